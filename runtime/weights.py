"""New weights into a running vLLM engine: what travels between an optimizer step and the next sampled token.

PROBLEM. The generator is half way through its sequences when the trainer has made a step. Its engine must get every
parameter, in the generator's dtype and under the names of a Hugging Face checkpoint, without ending a request and
without a second copy of the model on the trainer's devices.

Three ways, one interface. `prepare(weights)` is called on every rank of the trainer; `deliver(vllm)` on rank 0 only,
while the engine is paused.

    FileWeights       a safetensors file in shared memory, which engines on this host read. Any device. The trainer
                      goes on as soon as it is written.
    MessageWeights    the same file's bytes in vLLM's own message to its workers, on whichever host. Any device, and
                      at most 4 GiB; the engine pauses for as long as they travel.
    TransferWeights   vLLM's own channels between GPUs: `ipc` (trainer and engine on the same GPU: handles of its
                      memory travel, not bytes), `nccl` (separate GPUs, also of other hosts: one broadcast). The
                      trainer waits until it is done.

SIMPLIFIED. A file serves one host, and while it is written, that host holds all tensors once more. An engine that
dies under TransferWeights ends a run of several trainer processes without a checkpoint: some wait inside the transfer.

Source: vLLM 0.32, vllm/distributed/weight_transfer (its trainer-side engines and the layer-wise reload).
"""

import asyncio
import fcntl
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
from typing import Any, NamedTuple, Protocol

import torch

import vllm_engine


class Meta(NamedTuple):
    """What a tensor will be, known before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights(Protocol):
    """A dict of tensors that are no shards, or an object that gathers one tensor at a time (model.CheckpointTensors).
    Gathering is a collective: all ranks go through the items in lockstep."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...


PREFIX = "scalerl-weights-"
# Bytes of tensors that travel together. Under `nccl` three such parts are alive at once on either side, and a part ends
# with the tensor that exceeds this size. Of an 8B model three are 1.8 GB at most; at vLLM's 1 GiB they would be 3.6 GB.
BUFFER = 256 * 2**20


def private_folder() -> Path:
    """A new folder in shared memory that only this user can enter, locked for as long as this process lives. Folders of
    processes that were killed are removed here: their name carries a pid that is gone, and nobody holds their lock (a
    pid of another container means nothing here)."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for stale in base.glob(f"{PREFIX}*"):
        pid = stale.name.removeprefix(PREFIX).split("-")[0]
        with suppress(OSError):  # another process that starts now removes it; it is locked; it is a link to itself
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and stale.stat().st_uid == os.getuid():
                lock(stale, fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
    lock(folder)
    return folder


def lock(folder: Path, how: int = 0) -> None:
    """Locks `folder` until this process ends."""
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | how)


def process_environment(folder: Path) -> dict[str, str]:
    """The engine's process keeps its sockets in `folder` and ends with this one (engine_process.py)."""
    return {"VLLM_RPC_BASE_PATH": str(folder), "SCALERL_TRAINER_PID": str(os.getpid())}


def process_args() -> dict[str, Any]:
    """vLLM's arguments that bring engine_process.py into the engine's processes; its scheduler is for a CPU only."""
    ours = "runtime.engine_process"
    on_cpu = {"scheduler_cls": f"{ours}.WholeCompletions", "async_scheduling": False}
    return {"worker_extension_cls": f"{ours}.WeightReceiver"} | ({} if torch.cuda.is_available() else on_cpu)


class FileWeights(vllm_engine.WeightFile):
    """`WeightFile` for several trainer processes (rank 0 writes, the others only help to gather), in a folder that is
    removed at the next start if this process is killed."""

    meet: Callable[[], None] = staticmethod(lambda: None)  # never called: nobody waits in the writing of a file

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        super().__init__(private_folder())
        self.engine_args = process_args()
        self.environment = process_environment(self.folder)

    def prepare(self, weights: Weights) -> None:
        """Replaces the file by these tensors."""
        if self.rank == 0:
            super().prepare(weights)
        else:
            for _ in weights.items():
                pass


class MessageWeights(FileWeights):
    """Of the file, the engine gets the bytes: its workers may be on other hosts."""

    async def deliver(self, vllm: Any) -> None:
        """Brings the weights prepared last into a paused vLLM."""
        await vllm.collective_rpc("load_weight_bytes", args=(self.path.read_bytes(),))


class TransferWeights:
    """Weight channel through vLLM's own trainer-side engines.

    backend: `ipc` or `nccl`. rank: of this trainer process; rank 0 sends. workers: processes of all engines together
    (tensor x pipeline x data parallel). address: of this host, where the workers meet rank 0 for `nccl`.
    """

    trainer_waits = True  # the engine reads the trainer's own tensors
    meet: Callable[[], None] = staticmethod(lambda: None)  # what all ranks call before they gather for the first time

    def __init__(self, backend: str, rank: int = 0, workers: int = 1, address: str = "127.0.0.1"):
        self.backend, self.rank, self.workers, self.address = backend, rank, workers, address
        self.folder = private_folder()
        self.engine_args = process_args() | {"weight_transfer_config": {"backend": backend}}
        self.environment = process_environment(self.folder)
        if backend == "ipc":
            # Handles of GPU memory are no plain data: vLLM pickles them, here and in its own processes.
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        self._weights: Weights
        self._sender: Any = None
        self._client = _Client()

    # vLLM's trainer-side engine reads its source through these two.
    def metadata(self) -> list[Meta]:
        """Of the weights that are being sent."""
        if hasattr(self._weights, "metadata"):
            return self._weights.metadata()
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights.items())

    def prepare(self, weights: Weights) -> None:
        """Rank 0 only takes note of the weights; other ranks take part in the sending, which `deliver` does."""
        self._weights = weights
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM gathers and sends on streams of its own, which wait for no optimizer step
        if self.rank != 0:
            self._send()

    async def deliver(self, vllm: Any) -> None:
        """Sends while the engine receives: both sides must run at once, so the sending is done in a thread of its own
        (one that does not keep a process alive whose engine died)."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        sent: Future[None] = Future()

        def settle(error: BaseException | None = None) -> None:
            with suppress(InvalidStateError):  # the first failure has settled it, or nobody waits any more
                sent.set_exception(error) if error else sent.set_result(None)

        def send() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                self._send()
                settle()
            except BaseException as error:  # the waiting coroutine raises it
                settle(error)

        self._client.vllm, self._client.loop, self._client.failed = vllm, asyncio.get_running_loop(), settle
        threading.Thread(target=send, name="weights", daemon=True).start()
        await asyncio.wrap_future(sent)

    def _send(self) -> None:
        if self._sender is None:
            self.meet()
            self._sender = self._connect()
        self._sender.send_weights()

    def _connect(self) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(self._init_info(), client=self._client, source=self)

    def _init_info(self) -> Any:
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            largest = max(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in self.metadata())
            return IPCTrainerInitInfo(rank=self.rank, packed=True, packed_buffer_size_bytes=max(largest, BUFFER))
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        warnings.filterwarnings("ignore", ".*exceeds buffer_size_bytes")  # the embedding, in a part of its own
        port = 0
        if self.rank == 0:  # the others never meet the workers
            with socket.socket() as probe:
                probe.bind((self.address, 0))
                port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(
            self.address, port, 1 + self.workers, rank=self.rank, packed=True, packed_buffer_size_bytes=BUFFER
        )

    def close(self) -> None:
        """Leaves the process group and removes the folder."""
        if self._sender is not None:
            self._sender.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Client:
    """vLLM's trainer-side engine calls these from the sending thread; the engine lives in the generator's loop."""

    vllm: Any
    loop: asyncio.AbstractEventLoop
    failed: Callable[[BaseException], object]

    def _wait(self, coroutine: Coroutine) -> None:
        try:
            asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        except BaseException as error:
            self.failed(error)  # now: the sending thread may wait in a broadcast that nobody receives
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


Channel = FileWeights | TransferWeights
