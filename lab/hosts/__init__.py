"""Engines on other hosts, and weights that go from GPU to GPU:

    python train.py --engine lab.hosts:RayEngine                          Ray places the engine's workers
    python train.py --engine lab.hosts:NcclEngine                         on this host's GPUs on which no trainer runs
    python train.py --engine lab.hosts:RayEngine --engine_args '{"tensor_parallel_size": 2}'

                      where                      how weights get there
    NcclEngine        free GPUs of this host     `nccl`
    RayEngine         wherever Ray has devices   `nccl` where the trainer has a GPU, else `message`
    RayMessageEngine  wherever Ray has devices   `message`

channels.py has the two ways. What a run gives up with them:

- `nccl`: rank 0 keeps a second copy of the model on its GPU, in the generator's dtype (16 GB for 8B), from which it
  sends. The trainer need not wait for a transfer, and one that fails leaves no rank inside it.
- `nccl` has never been run on a GPU; its two sides ran on CPUs, with stand-ins for the communicator.
- `message` carries at most 4 GiB, and the engine pauses for as long as they travel.

They are subclasses of runtime.engine.RunEngine, whose file says in a table what such a class may have of its own.
"""

import os
from typing import Any

import torch

from lab.hosts.channels import MessageWeights, TransferWeights
from lab.hosts.ray_check import check_ray
from runtime.engine import LOOPBACK, EngineDevices, RunEngine, variables_set
from runtime.flags import UsageError
from runtime.weights import RunWeightFile

SHARE_OF_GPU = 0.85  # of the memory of a GPU of its own: the buffers of a transfer come on top


class NcclEngine(RunEngine):
    """An engine on this host's GPUs beside those of the trainers; its weights go from GPU to GPU."""

    @classmethod
    def check_devices(cls, devices: EngineDevices) -> None:
        """NCCL cannot have two ranks on one GPU."""
        if devices.shared or not torch.cuda.is_available():
            raise UsageError("--engine lab.hosts:NcclEngine needs a GPU that no trainer process uses; use `vllm`.")

    @classmethod
    def new_channel(cls, devices: EngineDevices, rank: int) -> RunWeightFile:
        """The `nccl` channel, which meets the workers on this host's loopback."""
        return TransferWeights(rank, devices.workers, "127.0.0.1")

    def __post_init__(self) -> None:
        if "gpu_memory_utilization" not in self.engine_args:
            self.engine_args = {"gpu_memory_utilization": SHARE_OF_GPU} | self.engine_args
        super().__post_init__()


class RayEngine(RunEngine):
    """An engine whose workers Ray places, on any host."""

    elsewhere = True

    @classmethod
    def new_channel(cls, devices: EngineDevices, rank: int) -> RunWeightFile:
        """`nccl` from GPU to GPU, past the host's memory; without GPUs `message`."""
        if not torch.cuda.is_available():
            return MessageWeights(rank)
        return TransferWeights(rank, devices.workers, os.environ.get("VLLM_HOST_IP", ""))

    def __post_init__(self) -> None:
        self.engine_args = {"distributed_executor_backend": "ray"} | self.engine_args
        if isinstance(self.channel, TransferWeights):
            self.engine_args = {"gpu_memory_utilization": SHARE_OF_GPU} | self.engine_args
        super().__post_init__()
        for name in LOOPBACK:  # its workers would listen where no other host reaches them
            self.environment.pop(name)

    async def start(self) -> None:
        """Starts vLLM with the weights prepared last. Raises EngineFailed, also if Ray has too few devices."""
        check_ray(self.args.get("tensor_parallel_size", 1) * self.args.get("pipeline_parallel_size", 1))
        await super().start()

    def new_vllm(self) -> Any:
        """vLLM's AsyncLLM over our executor, in the place of vLLM's own for Ray."""
        with variables_set(self._variables()):
            from lab.hosts.ray_executor import RayExecutor
        self.args["distributed_executor_backend"] = RayExecutor
        return super().new_vllm()


class RayMessageEngine(RayEngine):
    """The same, with weights by message also where the trainer has a GPU."""

    @classmethod
    def new_channel(cls, devices: EngineDevices, rank: int) -> RunWeightFile:
        """`message`."""
        return MessageWeights(rank)
