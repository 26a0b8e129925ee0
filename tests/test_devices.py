"""runtime/devices.py: which channel, and which devices the engines use."""

from types import SimpleNamespace

import pytest
import torch

from runtime import devices
from runtime.devices import new_channel, place
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
    ],
)
def test_devices_and_channel(monkeypatch, capsys, gpus, trainers, flags, kind, seen, workers, share):
    channel, environment = made_on(monkeypatch, gpus, trainers, flags)
    by_message = "message" if isinstance(channel, MessageWeights) else "file"
    assert (getattr(channel, "backend", by_message), getattr(channel, "workers", 0)) == (kind, workers)
    meets = "127.0.0.2" if kind == "nccl" and "ray" in flags else "127.0.0.1"
    assert getattr(channel, "address", "127.0.0.1") == meets
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen
    ours = None if "gpu_memory" in flags else share  # a given share is vLLM's argument already
    assert channel.engine_args.get("gpu_memory_utilization") == ours
    assert ("gpu_memory_utilization" in capsys.readouterr().out) == (ours is not None)
    assert place(given(flags)).share == (share or 0.92)
    # On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not.
    assert ("scheduler_cls" in channel.engine_args) == (gpus == 0)


def test_devices_are_counted_among_the_visible_ones(monkeypatch):
    assert made_on(monkeypatch, 4, 2, "--data_parallel 2", "2,3,6,7")[1] == {"CUDA_VISIBLE_DEVICES": "6,7"}


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
])  # fmt: skip
def test_devices_that_cannot_work_are_refused(monkeypatch, gpus, trainers, flags, words):
    with pytest.raises(UsageError, match=words):
        made_on(monkeypatch, gpus, trainers, flags)


@pytest.mark.parametrize("address", ["", "192.0.2.1", "no host"])
def test_ray_that_is_not_installed_and_an_address_that_is_not_this_hosts(monkeypatch, address):
    """Engines of Ray could not reach it. Of the other trainer processes' hosts nothing is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("VLLM_HOST_IP", address)
    for has_ray, sentence in ((False, "--engine_args with Ray: pip install"), (True, f"VLLM_HOST_IP={address} is no ")):
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
        (f'--tensor_parallel 4 {RAY[:-1]},"pipeline_parallel_size":2}}', 8, 8, 16),
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
