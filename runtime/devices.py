"""Which devices the engines use, and the channel by which weights reach them."""

import os
from typing import Any

import torch

from runtime import weight_channels
from runtime.flags import Flags, UsageError, engine_options, engine_workers

SHARED_MEMORY = 0.35  # the engine's share of a GPU on which a trainer runs, too: vLLM's 0.92 would starve it


def new_channel(flags: Flags, accelerator: Any) -> tuple[Any, dict[str, str]]:
    """(the weight channel of this rank, the environment that shows the engine its devices). Raises UsageError."""
    if not torch.cuda.is_available():
        if flags.generator_devices or flags.weight_channel in ("ipc", "nccl"):
            raise UsageError("--generator_devices and --weight_channel ipc, nccl need GPUs, and this host has none.")
        return weight_channels.FileWeights(accelerator.process_index), {}
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # trainer processes on this host, on its first devices
    devices = generator_devices(flags, torch.cuda.device_count(), trainers)
    shared = any(device < trainers for device in devices)
    kind = flags.weight_channel if flags.weight_channel != "auto" else "ipc" if shared else "nccl"
    if kind == "nccl" and shared:
        raise UsageError("--weight_channel nccl needs --generator_devices that no trainer process uses; or use `ipc`.")
    if kind == "ipc" and not (devices and all(device < trainers for device in devices)):
        raise UsageError(
            f"--weight_channel ipc needs engines on the trainers' own GPUs, 0 to {trainers - 1}, but "
            f"--generator_devices are {devices}; use `nccl` and other GPUs, or `file`."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [visible[i] if len(visible) > i and visible[i] else str(i) for i in devices]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}
    options, rank = engine_options(flags), accelerator.process_index
    if kind == "file":
        channel = weight_channels.FileWeights(rank)
    else:
        channel = weight_channels.TransferWeights(kind, rank, engine_workers(flags), flags.weight_address)
    if shared and "gpu_memory_utilization" not in options:
        channel.engine_args["gpu_memory_utilization"] = SHARED_MEMORY
        if rank == 0:
            print(f"the engine takes {SHARED_MEMORY} of a trainer's GPU; --gpu_memory_utilization says otherwise")
    return channel, environment


def generator_devices(flags: Flags, count: int, trainers: int) -> list[int]:
    """Which of this host's `count` GPUs the engines use, of which the first `trainers` train: those given, else free
    ones, else the trainers' own; none if Ray places the engines. Raises UsageError."""
    if engine_options(flags).get("distributed_executor_backend") == "ray":
        return []
    needed = engine_workers(flags)
    if flags.generator_devices:
        found = [int(x) if x.strip().isdigit() else -1 for x in flags.generator_devices.split(",")]
    else:
        found = list(range(trainers, trainers + needed) if trainers + needed <= count else range(min(needed, count)))
    if len(set(found)) != needed or not all(0 <= device < count for device in found):
        raise UsageError(
            f"--generator_devices {flags.generator_devices or found}: --tensor_parallel x --data_parallel need "
            f"{needed} different devices, and this host has {count}, 0 to {count - 1}."
        )
    return found
