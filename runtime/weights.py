"""How the trainer's weights travel to the engine: everything between an optimizer step and the next sampled token.

PROBLEM. The generator is half way through its sequences when the trainer has made a step. Its engine must get every
parameter, in the generator's dtype and under the names of a Hugging Face checkpoint, without ending a request and
without a second copy of the model on the trainer's devices.

`CheckpointTensors` gathers the parameters one at a time, under the names of a checkpoint. They travel in one of three
ways with one interface: `prepare(weights)` is called on every rank of the trainer, `deliver(vllm)` on rank 0 only and
while the engine is paused.

    RunWeightFile     a safetensors file in shared memory, which an engine on this host reads. Any device. The trainer
                      goes on as soon as it is written.
    MessageWeights    the same file's bytes in vLLM's own message to its workers, on whichever host. Any device, and
                      at most 4 GiB; the engine pauses for as long as they travel.
    TransferWeights   vLLM's `nccl` channel to GPUs on which no trainer runs, also on other hosts: one broadcast. The
                      trainer waits until it is done.

The engine's end of all three is inside_vllm.RunWeightReceiver. On one host `nccl` is preferred to the file, because the
weights then never leave the GPUs; but NCCL cannot have two ranks on one GPU.

SIMPLIFIED. A file serves one host and stays in its memory. While the next one is written, the host holds both, and
under a GPU trainer the gathered tensors as well. An engine that dies inside a transfer ends a run of several trainer
processes without a checkpoint: some wait there.

Source: vLLM 0.32, vllm/distributed/weight_transfer (its trainer-side engines and the layer-wise reload).
"""

import asyncio
import os
import shutil
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

import vllm_engine
from runtime.lock import lock

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


class Meta(NamedTuple):
    """What a tensor will be, known before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights(Protocol):
    """A dict of tensors that are no shards, or an object that gathers one tensor at a time (CheckpointTensors).
    Gathering is a collective: all ranks go through the items in lockstep."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...


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

    def metadata(self) -> list[Meta]:
        """Names, dtypes and shapes, in the order of `items()`; nothing is gathered."""
        tensors = [item for stored in self._stored.values() for item in stored.items()]
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, gathered tensor); every rank must iterate."""
        for name, tensor in full_tensors(self.model, self.dtype):
            if list(self._stored[name]) == [name]:
                yield name, tensor
            else:
                yield from self._as_stored(name, tensor).items()


# --------------------------------------------------------------------------------------------------------- three ways

PREFIX = "scalerl-weights-"
# Bytes of tensors that travel together by `nccl`. Up to three parts are in memory at once on each side; the tensor that
# exceeds this size closes its part. Of an 8B model three are 1.8 GB at most; at vLLM's 1 GiB they would be 3.6 GB.
BUFFER = 256 * 2**20


def private_folder() -> Path:
    """A new folder in shared memory that only this user can enter, locked for as long as this process lives. Folders of
    processes that were killed are removed here: their name carries a pid that is gone, and nobody holds their lock (a
    pid of another container means nothing here)."""
    base = vllm_engine.shared_memory()
    for stale in base.glob(f"{PREFIX}*"):
        pid = stale.name.removeprefix(PREFIX).split("-")[0]
        with suppress(OSError):  # removed by another process; still locked; or a symbolic-link loop
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and stale.stat().st_uid == os.getuid():
                if lock(stale) is not None:
                    shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
    lock(folder)
    return folder


class RunWeightFile(vllm_engine.WeightFile):
    """`WeightFile` for several trainer processes: rank 0 writes, the others only take part in gathering. If this
    process is killed, the next start removes its folder. It also brings inside_vllm.py into the engine's processes."""

    meet: Callable[[], None] = staticmethod(lambda: None)  # what all ranks call before their first transfer: see below

    def __init__(self, rank: int = 0) -> None:
        super().__init__(private_folder())
        self.rank = rank
        self.engine_args = {"worker_extension_cls": "runtime.inside_vllm.RunWeightReceiver"}

    def prepare(self, weights: Weights) -> None:
        """Replaces the file by these tensors. Raises OSError if there is no room for it."""
        if self.rank == 0:
            super().prepare(weights)
        else:
            take_part(weights)


class InProcess:
    """The channel to an engine in rank 0's own process: the other ranks only take part in gathering."""

    trainer_waits = False
    meet: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, weights: Weights) -> None:
        """Called on the other ranks only."""
        take_part(weights)

    def close(self) -> None:
        """Nothing was opened."""


Channel = RunWeightFile | InProcess  # the other two extend the first


class MessageWeights(RunWeightFile):
    """The engine gets the bytes of the file: its workers may be on other hosts."""

    async def deliver(self, vllm: Any) -> None:
        """Brings the weights prepared last into a paused vLLM."""
        await vllm.collective_rpc("load_weight_bytes", args=(self.path.read_bytes(),))


class TransferWeights(RunWeightFile):
    """vLLM's `nccl` channel; no file is written. It has never been run on a GPU.

    rank: of this trainer process; rank 0 sends. workers: processes of the engine. address: of this host, where the
    workers meet rank 0.
    """

    trainer_waits = True  # the engine reads the trainer's own tensors

    def __init__(self, rank: int = 0, workers: int = 1, address: str = "127.0.0.1"):
        super().__init__(rank)
        self.workers, self.address = workers, address
        self.engine_args["weight_transfer_config"] = {"backend": "nccl"}
        self._weights: Any  # a CheckpointTensors, which has metadata
        self._met = False
        self._sender: Any = None
        self._client = _Client()

    # vLLM's trainer-side engine reads its source through these two.
    def metadata(self) -> list[Meta]:
        """Of the weights that are being sent."""
        return self._weights.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights.items())

    def prepare(self, weights: Any) -> None:
        """Rank 0 only takes note of the weights; the other ranks gather while it sends, in `deliver`."""
        self._weights = weights
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM sends on streams of its own, which wait for no optimizer step
        if self.rank != 0:
            self._meet_once()
            take_part(weights)

    async def deliver(self, vllm: Any) -> None:
        """Sends while the engine receives: both sides must run at once, so a thread of its own sends. (It does not keep
        the process alive if the engine dies.)"""
        sent: Future[None] = Future()

        def settle(error: BaseException | None = None) -> None:
            with suppress(InvalidStateError):  # the first failure has settled it, or nobody waits any more
                sent.set_exception(error) if error else sent.set_result(None)

        def send() -> None:
            try:
                self._meet_once()
                self._sender = self._sender or self._connect()
                self._sender.send_weights()
            except BaseException as error:  # the waiting coroutine raises it
                settle(error)
            else:
                settle()

        self._client.vllm = vllm
        self._client.loop = asyncio.get_running_loop()
        self._client.failed = settle
        threading.Thread(target=send, name="weights", daemon=True).start()
        await asyncio.wrap_future(sent)

    def _meet_once(self) -> None:
        """Meets the other ranks before the first transfer. Without this they would wait there forever for an engine
        that did not start."""
        if not self._met:
            self._met = True
            self.meet()

    def _connect(self) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(self._init_info(), client=self._client, source=self)

    def _init_info(self) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        warnings.filterwarnings("ignore", ".*exceeds buffer_size_bytes")  # the embedding, in a part of its own
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            port = probe.getsockname()[1]
        size = 1 + self.workers  # of the group
        return NCCLTrainerInitInfo(self.address, port, size, rank=0, packed=True, packed_buffer_size_bytes=BUFFER)

    def close(self) -> None:
        """Leaves the process group and removes the folder."""
        if self._sender is not None:
            self._sender.shutdown()
        super().close()


class _Client:
    """vLLM's trainer-side engine calls these from the sending thread; the engine lives in the generator's loop."""

    vllm: Any
    loop: asyncio.AbstractEventLoop
    failed: Callable[[BaseException], object]

    def _wait(self, coroutine: Coroutine) -> None:
        try:
            asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        except BaseException as error:
            self.failed(error)  # now: the sending thread may wait in a broadcast that no worker joins
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the workers' end."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self.vllm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        """The workers make ready for new weights."""
        self._wait(self.vllm.start_weight_update())

    def update_weights(self, update_info: object) -> None:
        """The workers receive one part, or all."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self.vllm.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The workers put the new weights in place; the generator names their version."""
        self._wait(self.vllm.finish_weight_update(weight_version))


def take_part(weights: Weights) -> None:
    """Gathers each tensor together with the rank that sends them."""
    for _ in weights.items():
        pass
