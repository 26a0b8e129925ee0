"""runtime/devices.py: which channel, which devices the engines use, and whether the machine can hold the run."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from runtime import devices
from runtime.devices import check_memory, count_parameters, new_channel, place
from runtime.flag_checks import check_flags
from runtime.flags import UsageError, parse_flags
from runtime.weights import MessageWeights

RAY = '--engine_args {"distributed_executor_backend":"ray"}'


def given(flags):
    return parse_flags(["--output_dir", "none", *flags.split()], "")


def made_on(monkeypatch, gpus, trainers, flags, visible=None):
    """The channel that train.py makes on a host with `gpus` GPUs, closed again, and the engine's environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    monkeypatch.setattr(devices, "find_spec", lambda name: True)  # Ray
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_flags(given(flags))
    channel, environment = new_channel(given(flags), SimpleNamespace(process_index=0))
    channel.close()
    return channel, environment


@pytest.mark.parametrize(
    ("gpus", "trainers", "flags", "kind", "seen", "workers", "share"),
    [
        (0, 1, "", "file", None, 0, None),
        (0, 1, "--packed true --tokens_per_microbatch 9999", "file", None, 0, None),  # a CPU computes no other way
        (1, 1, "", "ipc", "0", 1, 0.35),  # one GPU, shared: vLLM's own .92 would leave the trainer nothing
        (1, 1, '--engine_args {"gpu_memory_utilization":0.2}', "ipc", "0", 1, 0.2),
        (1, 1, "--weight_channel file", "file", "0", 0, 0.35),
        (2, 1, "", "nccl", "1", 1, 0.85),  # the free one; the parts of a transfer come on top of what the engine takes
        (2, 1, "--weight_channel file", "file", "1", 0, None),
        (8, 4, "--data_parallel 4", "nccl", "4,5,6,7", 4, 0.85),
        (8, 4, "--data_parallel 2 --tensor_parallel 2 --generator_devices 7,6,5,4", "nccl", "7,6,5,4", 4, 0.85),
        (8, 8, "--data_parallel 8", "ipc", "0,1,2,3,4,5,6,7", 8, 0.35),  # every trainer shares its own
        (8, 4, "--generator_devices 4 --weight_channel file", "file", "4", 0, None),
        (4, 2, "--generator_devices 1 --weight_channel file", "file", "1", 0, 0.35),  # shared, and that is fine
        (8, 8, f"--tensor_parallel 8 {RAY}", "nccl", None, 8, 0.85),
        (0, 1, RAY, "message", None, 0, None),
        (8, 8, f"{RAY} --weight_channel message", "message", None, 0, None),
        (1, 1, "--weight_channel message", "message", "0", 0, 0.35),
        (1, 1, "--packed true --tokens_per_microbatch 9999 --attn_implementation flex_attention", "ipc", "0", 1, 0.35),
        (1, 1, "--packed true --tokens_per_microbatch 4096", "ipc", "0", 1, 0.35),
    ],
)
def test_devices_and_channel(monkeypatch, capsys, gpus, trainers, flags, kind, seen, workers, share):
    channel, environment = made_on(monkeypatch, gpus, trainers, flags)
    by_message = "message" if isinstance(channel, MessageWeights) else "file"
    assert (getattr(channel, "backend", by_message), getattr(channel, "workers", 0)) == (kind, workers)
    assert getattr(channel, "address", "127.0.0.1") == (
        "127.0.0.2" if kind == "nccl" and "ray" in flags else "127.0.0.1"
    )
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen
    ours = None if "gpu_memory" in flags else share  # a given share is vLLM's argument already
    assert channel.engine_args.get("gpu_memory_utilization") == ours
    assert ("gpu_memory_utilization" in capsys.readouterr().out) == (ours is not None)
    assert place(given(flags)).share == (share or 0.92)
    # On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not.
    assert ("scheduler_cls" in channel.engine_args) == (gpus == 0)


def test_devices_are_counted_among_the_visible_ones(monkeypatch):
    _, environment = made_on(monkeypatch, 4, 2, "--data_parallel 2", visible="2,3,6,7")
    assert environment == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize(("gpus", "trainers", "flags", "words"), [
    (0, 1, "--generator_devices 0", "--generator_devices and --weight_channel"),
    (0, 1, "--weight_channel nccl", "this host has none"),
    (2, 1, "--generator_devices 2", "this host has 2, 0 to 1"),
    (4, 2, "--generator_devices 2,2 --data_parallel 2", "--generator_devices 2,2"),
    (4, 2, "--generator_devices 2,x --data_parallel 2", "--generator_devices 2,x"),
    (4, 2, "--tensor_parallel 8", "need 8"),
    (2, 2, "--weight_channel nccl", "--weight_channel nccl needs"),
    (4, 2, "--weight_channel ipc --generator_devices 3", "--weight_channel ipc needs"),
    (4, 2, "--data_parallel 3 --generator_devices 0,1,2", "trainers' own GPUs, 0 to 1"),
    (4, 2, "--generator_devices 1,2 --data_parallel 2", "trainers' own GPUs, 0 to 1"),  # neither nor
    (2, 1, "--engine torch", "--engine torch is for a CPU"),
    (2, 4, "", "4 trainer processes need a GPU each: give the launcher --num_processes 2"),
    (8, 4, f"{RAY} --weight_channel file", "channel file .* Ray"),
    (8, 4, f"{RAY} --weight_channel ipc", "channel ipc .* Ray"),
    (0, 1, f"{RAY} --weight_channel file", "channel file .* Ray"),
    (0, 1, f"{RAY} --weight_channel nccl", "this host has none"),
    (1, 1, "--packed true --tokens_per_microbatch 4097", "--packed true .* masks of 4097 x 4097; .* to 4096, or add"),
    (1, 1, "--share_prompts true --tokens_per_microbatch 4097", "--share_prompts true .*; lower .* to 4096, or leave"),
])  # fmt: skip
def test_devices_that_cannot_work_are_refused(monkeypatch, gpus, trainers, flags, words):
    with pytest.raises(UsageError, match=words):
        made_on(monkeypatch, gpus, trainers, flags)


@pytest.mark.parametrize("address", ["", "192.0.2.1", "no host"])
def test_ray_that_is_not_installed_and_an_address_that_is_not_this_hosts(monkeypatch, address):
    """Engines of Ray could not reach it. Of the other trainer processes' hosts nothing is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("VLLM_HOST_IP", address)
    said = {
        False: "--engine_args with Ray: pip install -r requirements-ray.txt",
        True: f"VLLM_HOST_IP={address} is no ",
    }
    for has_ray, sentence in said.items():
        monkeypatch.setattr(devices, "find_spec", lambda name, has_ray=has_ray: has_ray)
        with pytest.raises(UsageError, match=f"^{sentence}"):
            place(given(RAY))
    monkeypatch.setenv("RANK", "1")
    assert place(given(RAY)).channel == "message"


@pytest.mark.parametrize(
    ("flags", "trainers", "here", "used"),
    [
        ("", 1, 1, 2),  # one trains, one samples, fourteen are idle
        ("--generator_devices 0", 1, 1, 1),  # shared
        ("--tensor_parallel 2 --data_parallel 2", 1, 1, 5),
        ("--data_parallel 4", 4, 4, 8),
        ("--data_parallel 4 --generator_devices 0,1,2,3", 4, 4, 4),
        ("--generator_devices 8", 16, 8, 17),  # trainers on two hosts
        (
            '--tensor_parallel 4 --engine_args {"distributed_executor_backend":"ray","pipeline_parallel_size":2}',
            8,
            8,
            16,
        ),
    ],
)
def test_device_hours_count_devices_in_use(monkeypatch, flags, trainers, here, used):
    """On a host with sixteen GPUs, whose first `here` train."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert devices.devices_in_use(given(flags), trainers) == used


OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"


@pytest.mark.parametrize(
    ("build", "visible", "says", "refused"),
    [
        ("13.0", None, OLD, True),
        ("13.0", "0", OLD, True),
        ("13.0", "", OLD, False),  # hidden on purpose: the run is for the CPU
        ("13.0", None, "Found no NVIDIA driver on your system.", False),  # a CPU with torch's build for GPUs
        (None, None, "Torch not compiled with CUDA enabled", False),
    ],
)
def test_a_driver_that_is_too_old_is_not_taken_for_a_machine_without_a_gpu(monkeypatch, build, visible, says, refused):
    """torch says so in `torch.cuda.init` only; `is_available` is False in every case."""

    def init():
        raise RuntimeError(says)

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", init)
    if not refused:
        assert made_on(monkeypatch, 0, 1, "", visible)[1] == {}
        return
    with pytest.raises(UsageError, match=r"too old for torch .* CUDA 13\.0; install 580 or newer, or set CUDA"):
        made_on(monkeypatch, 0, 1, "", visible)


# -------------------------------------------------------------------------------------------------------------- memory


def told(monkeypatch, billions, flags="", *, gb=0, gpus=1, trainers=1, host=1000, fsdp2=True):
    """The sentences on a host with `host` GB of memory and `gpus` GPUs of `gb` GB, 1 of them in use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gb > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((gb - 1) * 10**9, gb * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=gb * 10**9))
    monkeypatch.setattr(devices, "virtual_memory", lambda: SimpleNamespace(available=host * 10**9))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    accelerator = SimpleNamespace(device="cuda:0", num_processes=trainers, is_fsdp2=fsdp2, local_process_index=0)
    return list(check_memory(given(flags), accelerator, int(billions * 1e9)))


FOUR = {"gpus": 8, "trainers": 4}  # and four engines of their own


@pytest.mark.parametrize(
    ("billions", "host", "flags", "said"),
    [
        # one GPU, shared: 16 bytes a parameter + 0.35 of it, of what is free
        (0.9, {"gb": 24}, "", ""),  # 14.4 + 8.4 = 22.8 of 23
        (1.0, {"gb": 24}, "", "a trainer needs at least 16 GB of GPU 0 and finds 14.6 GB;"),
        (1.0, {"gb": 24}, '--engine_args {"gpu_memory_utilization":0.25}', ""),
        (0.9, {"gb": 24}, "--kl_coef 0.1", "at least 18 GB"),  # 3.6 for the initial model
        (0.9, {"gb": 24}, "--kl_coef 0.1 --dtype bfloat16", "at least 16.2 GB"),
        (8.0, {"gb": 80, **FOUR}, "--data_parallel 4", ""),  # 32 GB; the engines' 32 of 68
        (8.0, {"gb": 80, **FOUR, "fsdp2": False}, "--data_parallel 4", "a trainer .* 128 GB"),
        (8.0, {"gb": 80, **FOUR, "fsdp2": False}, "--data_parallel 4 --dtype bfloat16", ""),
        (8.0, {"gb": 36, **FOUR}, "--data_parallel 4", "an engine .* 32 GB of GPU 4 and finds 30.6 GB"),
        (8.0, {"gb": 36, **FOUR}, "--data_parallel 2 --tensor_parallel 2", ""),
        (8.0, {"gb": 36, **FOUR}, '--engine_args {"quantization":"fp8"}', ""),
    ],
)
def test_a_gpu_that_is_too_small_is_refused_before_the_model_loads(monkeypatch, billions, host, flags, said):
    if not said:
        assert told(monkeypatch, billions, flags, **host) == []
        return
    with pytest.raises(UsageError, match=f"^--model: .*{said}") as refused:
        told(monkeypatch, billions, flags, **host)
    assert str(refused.value).endswith("(configs/fsdp2.yaml, --tensor_parallel).")


def test_host_memory_that_does_not_hold_the_weights_of_all_ranks_is_said(monkeypatch):
    """8 billion parameters: 32 GB for each process with GPUs, and 128 on a CPU, where gradient and moments are, too."""
    eight = {"gb": 80, "gpus": 9, "trainers": 8}
    [said] = told(monkeypatch, 8, **eight, host=255)
    assert said.startswith("8 trainer processes load 256 GB into this host's memory, which has 255 GB; ")
    assert told(monkeypatch, 8, **eight, host=257) == [] == told(monkeypatch, 8, host=129)
    assert "load 128 GB" in told(monkeypatch, 8, host=127)[0]
    assert told(monkeypatch, 0, host=1) == []  # a model that is not known


@pytest.mark.parametrize(
    ("billions", "elastic", "patience", "words"),
    [
        (8, True, None, "a checkpoint has 96 GB, 96 s at 1 GB/s, but the launcher kills what still saves 30 s after"),
        (8, True, "60", "60 s after SIGTERM; set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=288"),
        (8, True, "300", ""),
        (2, True, None, ""),  # 24 s
        (8, False, None, ""),  # plain python: nobody kills it
    ],
)
def test_a_save_that_takes_longer_than_the_launcher_waits_is_said(monkeypatch, billions, elastic, patience, words):
    elastic = "x" if elastic else None
    for name, value in (("TORCHELASTIC_RUN_ID", elastic), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", patience)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert [words in sentence for sentence in told(monkeypatch, billions)] == ([True] if words else [])


def test_parameters_are_counted_without_loading_any(tmp_path):
    """By hand, a Qwen3 of one layer: embedding 64 x 8, q and o 8 x 8, k and v 8 x 4, two norms of 4 in attention, three
    8 x 16 in the MLP, two norms of 8 and the last one: 512 + 192 + 8 + 384 + 16 + 8; untied the head has 512 more. A
    folder without a model counts as 0."""
    shape = dict(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    for tied, count in ((True, 1120), (False, 1632)):
        config = Qwen3Config(**shape, head_dim=4, intermediate_size=16, tie_word_embeddings=tied)
        config.save_pretrained(tmp_path)
        assert count_parameters(given(""), str(tmp_path)) == count
    (tmp_path / "config.json").unlink()
    assert count_parameters(given(""), str(tmp_path)) == 0
