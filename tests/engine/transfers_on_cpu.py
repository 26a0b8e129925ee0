"""vLLM's own `nccl` and `ipc` weight transfer, both sides, on a machine without a GPU.

Stand-ins are what needs the hardware: the communicator (its bytes go through the store at which trainer and workers met),
the memory that a handle opens (a file in shared memory), streams, and the name of the GPU that each process has. They are
put in their places when this module is imported: by the trainer, and by the engine's worker for its `Receiver`.
"""

import multiprocessing
import os
from contextlib import nullcontext
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

from runtime import engine_process

MEMORY = 80e9  # bytes of a GPU


class Communicator:
    """In the place of PyNcclCommunicator: a receiver waits until the sender has sent."""

    def __init__(self, group: object, device: int):
        self.group, self.world_size = group, group.world_size

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        received = self.group.broadcast(tensor, src)
        assert received.shape == tensor.shape and received.dtype == tensor.dtype
        tensor.copy_(received)

    def destroy(self) -> None:
        pass


def own_gpu() -> int:
    """Number of the GPU that this process would have: a trainer's rank, an engine's place among the engines."""
    _, _, engine = multiprocessing.current_process().name.partition("EngineCore_DP")
    return int(engine or os.environ.get("LOCAL_RANK", 0))


class Torch:
    """`torch` as vLLM's transfer and runtime/devices.py see it, on a host of four GPUs."""

    stream = SimpleNamespace(synchronize=lambda: None)
    accelerator = SimpleNamespace(current_device_index=own_gpu)
    cuda = SimpleNamespace(
        Stream=lambda device: Torch.stream,
        current_stream=lambda: Torch.stream,
        stream=lambda stream: nullcontext(),
        is_available=lambda: True,
        device_count=lambda: 4,
        mem_get_info=lambda device: (MEMORY, MEMORY),
        synchronize=lambda: None,
        ipc_collect=lambda: None,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"GPU-{own_gpu()}", total_memory=MEMORY),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        if device != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        file = NamedTemporaryFile(dir="/dev/shm")
        memory = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
        memory.file = file  # removed with the tensor, as memory of a GPU is freed with it
        return memory


def reduce_tensor(memory: torch.Tensor) -> tuple[object, tuple]:
    """As torch's for a tensor on a GPU: what rebuilds it, and the fifteen arguments of that; classes are among them."""
    handle = memory.file.name.encode()
    return rebuild_cuda_tensor, (
        torch.Tensor,
        memory.shape,
        memory.stride(),
        0,
        torch.UntypedStorage,
        memory.dtype,
        own_gpu(),
        handle,
        memory.nbytes,
        0,
        False,
        b"",
        0,
        b"",
        True,
    )


def rebuild_cuda_tensor(cls, size, stride, offset, storage, dtype, device, handle, *rest) -> torch.Tensor:
    return torch.from_file(handle.decode(), shared=True, size=size[0], dtype=dtype)


pynccl.PyNcclCommunicator = Communicator
for module in (nccl_common, nccl_engine, ipc_engine, packed_tensor):
    module.torch = Torch()
packed_tensor.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor


class Receiver(engine_process.WeightReceiver):
    """Named as `worker_extension_cls`, so that a worker imports this module."""
