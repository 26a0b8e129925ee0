"""vLLM's own `nccl` weight transfer, both sides, on a machine without a GPU.

Stand-ins are what needs the hardware: the communicator (its bytes go through the store at which trainer and workers met)
and streams. They are put in their places when this module is imported: by the trainer's side, and by the engine's worker
for its `Receiver`.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

from runtime import inside_vllm


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


class Torch:
    """`torch` as vLLM's transfer sees it."""

    stream = SimpleNamespace(synchronize=lambda: None)
    accelerator = SimpleNamespace(current_device_index=lambda: 0)
    cuda = SimpleNamespace(
        Stream=lambda device: Torch.stream,
        current_stream=lambda: Torch.stream,
        stream=lambda stream: nullcontext(),
        is_available=lambda: True,
        synchronize=lambda: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


pynccl.PyNcclCommunicator = Communicator
for module in (nccl_common, nccl_engine, packed_tensor):
    module.torch = Torch()


class Receiver(inside_vllm.RunWeightReceiver):
    """Named as `worker_extension_cls`, so that a worker imports this module."""
