"""runtime/devices.py: which channel, and which devices the engines use."""

from types import SimpleNamespace

import pytest
import torch

from runtime.devices import new_channel
from runtime.flags import UsageError, parse_flags


def made_on(monkeypatch, gpus, trainers=1, visible=None, **changes):
    """The channel that train.py makes on a host with `gpus` GPUs, closed again, and the engine's environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = [x for name, value in changes.items() for x in (f"--{name}", str(value))]
    flags = parse_flags(["--output_dir", "none", *options], "")
    channel, environment = new_channel(flags, SimpleNamespace(process_index=0))
    channel.close()
    return channel, environment


def choose(monkeypatch, *host, **changes):
    """(kind of channel, CUDA_VISIBLE_DEVICES of the engine, its processes)."""
    channel, environment = made_on(monkeypatch, *host, **changes)
    return getattr(channel, "backend", "file"), environment.get("CUDA_VISIBLE_DEVICES"), getattr(channel, "workers", 0)


@pytest.mark.parametrize(
    ("gpus", "trainers", "changes", "found"),
    [
        (0, 1, {}, ("file", None, 0)),
        (1, 1, {}, ("ipc", "0", 1)),  # one GPU, shared
        (2, 1, {}, ("nccl", "1", 1)),  # the free one
        (8, 4, {"data_parallel": 4}, ("nccl", "4,5,6,7", 4)),
        (8, 4, {"data_parallel": 2, "tensor_parallel": 2, "generator_devices": "7,6,5,4"}, ("nccl", "7,6,5,4", 4)),
        (8, 8, {"data_parallel": 8}, ("ipc", "0,1,2,3,4,5,6,7", 8)),  # every trainer shares its own
        (8, 4, {"generator_devices": "4", "weight_channel": "file"}, ("file", "4", 0)),
        (8, 8, {"tensor_parallel": 8, "engine_args": "distributed_executor_backend=ray"}, ("nccl", None, 8)),
    ],
)
def test_devices_and_channel(monkeypatch, gpus, trainers, changes, found):
    assert choose(monkeypatch, gpus, trainers, **changes) == found


def test_devices_are_counted_among_the_visible_ones(monkeypatch):
    assert choose(monkeypatch, 4, 2, visible="2,3,6,7", data_parallel=2) == ("nccl", "6,7", 2)


@pytest.mark.parametrize(
    ("gpus", "trainers", "changes", "words"),
    [
        (0, 1, {"generator_devices": "0"}, "--generator_devices and --weight_channel"),
        (0, 1, {"weight_channel": "nccl"}, "this host has none"),
        (2, 1, {"generator_devices": "2"}, "this host has 2, 0 to 1"),
        (4, 2, {"generator_devices": "2,2", "data_parallel": 2}, "--generator_devices 2,2"),
        (4, 2, {"generator_devices": "2,x", "data_parallel": 2}, "--generator_devices 2,x"),
        (4, 2, {"tensor_parallel": 8}, "need 8"),
        (2, 2, {"weight_channel": "nccl"}, "--weight_channel nccl needs"),
        (4, 2, {"weight_channel": "ipc", "generator_devices": "3"}, "--weight_channel ipc needs"),
        (4, 2, {"data_parallel": 3, "generator_devices": "0,1,2"}, "trainers' own GPUs, 0 to 1"),
    ],
)
def test_devices_that_cannot_work_are_refused(monkeypatch, gpus, trainers, changes, words):
    with pytest.raises(UsageError, match=words):
        choose(monkeypatch, gpus, trainers, **changes)


@pytest.mark.parametrize(
    ("gpus", "changes", "share"),
    [
        (0, {}, None),
        (1, {}, 0.35),  # shared with the trainer: vLLM's own 0.92 would leave it nothing
        (1, {"weight_channel": "file"}, 0.35),
        (2, {}, None),  # a GPU of its own
        (1, {"gpu_memory_utilization": "0.5"}, None),
        (1, {"engine_args": "gpu_memory_utilization=0.2"}, None),
    ],
)
def test_an_engine_on_a_trainers_gpu_leaves_room_for_it(monkeypatch, capsys, gpus, changes, share):
    channel, _ = made_on(monkeypatch, gpus, **changes)
    assert channel.engine_args.get("gpu_memory_utilization") == share
    assert capsys.readouterr().out.count("--gpu_memory_utilization") == (share is not None)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_scheduler_of_whole_completions_is_for_engines_on_a_cpu(monkeypatch, gpu):
    """On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not."""
    channel, _ = made_on(monkeypatch, int(gpu))
    assert channel.engine_args.get("scheduler_cls") == (None if gpu else "runtime.engine_process.WholeCompletions")
    assert channel.engine_args["worker_extension_cls"] == "runtime.engine_process.WeightReceiver"
