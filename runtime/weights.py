"""How the trainer's weights travel to the engine: everything between an optimizer step and the next sampled token.

PROBLEM. The generator is half way through its sequences when the trainer has made a step. Its engine must get every
parameter, in the generator's dtype and under the names of a Hugging Face checkpoint, without ending a request and
without a second copy of the model on the trainer's devices.

`CheckpointTensors` gathers the parameters one at a time, under the names of a checkpoint. Gathering is a collective, so
every rank of the trainer has an end of a channel and calls its `prepare`:

    rank 0          prepare(weights)    gathers them into memory that both processes see; the trainer goes on
                    deliver(vllm)       tells a paused engine to load what is there
    other ranks     prepare(weights)    take part in gathering

The memory is a file in shared memory (RunWeightFile). The engine's end is inside_vllm.RunWeightReceiver.

SIMPLIFIED. Weights leave the GPU also where trainer and engine share one (lab/fast_vllm.py has a channel that stays on
it). One copy of the weights lies there for the whole run, and it serves one host. At the first `prepare` the
host holds the gathered tensors as well. lab/hosts has channels to other hosts and between two GPUs.

Source: vLLM 0.32, vllm/model_executor/model_loader/reload.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from filelock import FileLock
from torch import nn

import vllm_engine

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


class Weights(Protocol):
    """A dict of tensors that are no shards, or an object that gathers one tensor at a time (CheckpointTensors).
    Gathering is a collective: all ranks go through the items in lockstep."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class Channel(Protocol):
    """A rank's end of the way to the engine. On rank 0 it is the engine's own, which may ask more of it."""

    def prepare(self, weights: Weights) -> None: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------------------------------- what a checkpoint would hold


def whole(tensor: Any) -> torch.Tensor:
    """The tensor, gathered from all ranks if it is a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor in `dtype`) of each parameter, then each persistent buffer as it is, one at a time. Gathering a
    shard is a collective, so every rank must iterate. A tied head appears once, under the embedding's name."""
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach().to(dtype))  # rounded before shards travel
    for name, buffer in persistent_buffers(model):
        yield name, whole(buffer)


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint has: a router's correction bias is one, rotary frequencies are not."""
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


class CheckpointTensors:
    """The weights as a Hugging Face checkpoint stores them, gathered one at a time: what a generator loads. The two
    differ for a mixture: transformers holds the experts of a layer in one tensor, checkpoints hold them apart."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype):
        self.model = model
        self.dtype = dtype
        # name in the model -> the tensors, without data, that a checkpoint has for it
        self._stored: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in model.named_parameters():
            self._stored[name] = self._as_stored(name, tensor.detach().to("meta", dtype))
        for name, tensor in persistent_buffers(model):
            self._stored[name] = self._as_stored(name, tensor.to("meta"))

    def _as_stored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, {name: tensor})

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, gathered tensor); every rank must iterate."""
        for name, tensor in full_tensors(self.model, self.dtype):
            if list(self._stored[name]) == [name]:
                yield name, tensor
            else:
                yield from self._as_stored(name, tensor).items()


# ---------------------------------------------------------------------------------------------------------- the channel

PREFIX = "scalerl-weights-"


def private_folder() -> tuple[Path, FileLock]:
    """A new folder in shared memory that only this user can enter, and the lock that keeps it for as long as this
    process lives. Folders of processes that were killed are removed here: their name carries a pid that is gone, and
    nobody holds their lock (a pid of another container means nothing here)."""
    base = vllm_engine.SHARED_MEMORY
    for stale in base.glob(f"{PREFIX}*"):
        pid = stale.name.removeprefix(PREFIX).split("-")[0]
        with suppress(OSError):  # removed by another process; or still locked
            gone = pid.isdigit() and not Path(f"/proc/{pid}").exists()
            # A link of another user's would lead the lock to one of our folders.
            if gone and not stale.is_symlink() and stale.stat().st_uid == os.getuid():
                with FileLock(stale / "lock", timeout=0):
                    shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
    lock = FileLock(folder / "lock", thread_local=False)
    lock.acquire()
    return folder, lock


class RunWeightFile(vllm_engine.WeightFile):
    """`WeightFile` for several trainer processes: rank 0 writes, the others only take part in gathering. If this
    process is killed, the next start removes its folder. It also brings inside_vllm.py into the engine's processes."""

    def __init__(self, rank: int = 0) -> None:
        folder, self.lock = private_folder()
        super().__init__(folder)
        self.rank = rank
        self.engine_args = {"worker_extension_cls": "runtime.inside_vllm.RunWeightReceiver"}

    def prepare(self, weights: Weights) -> None:
        """Replaces the weights in the file by these. Raises OSError if there is no room for it."""
        if self.rank == 0:
            super().prepare(weights)
        else:
            take_part(weights)


class InProcess:
    """The channel of ranks other than 0 where the engine's own `prepare` takes the weights as they are: they only take
    part in gathering."""

    def prepare(self, weights: Weights) -> None:
        """Called on the other ranks only."""
        take_part(weights)

    def close(self) -> None:
        """Nothing was opened."""


def take_part(weights: Weights) -> None:
    """Gathers each tensor together with the rank that sends them."""
    for _ in weights.items():
        pass
