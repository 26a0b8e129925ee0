"""Two ways for new weights to reach an engine on another host, or on another GPU. Both have `prepare` and `close` on
each rank of the trainer, and on rank 0 `deliver`, as runtime/weights.py's file has.

    MessageWeights    the bytes of that file in vLLM's own message to its workers, on whichever host. Any device, and at
                      most 4 GiB; the engine pauses for as long as they travel.
    TransferWeights   vLLM's `nccl` channel to GPUs on which no trainer runs, also on other hosts: one broadcast, from a
                      copy of the weights on rank 0's device.

Source: vLLM 0.32, vllm/distributed/weight_transfer (its trainer-side engines).
"""

import asyncio
import socket
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from runtime.weights import RunWeightFile, Weights, take_part

# Bytes of tensors that travel together by `nccl`. Up to three parts are in memory at once on each side; the tensor that
# exceeds this size closes its part. Of an 8B model three are 1.8 GB at most; at vLLM's 1 GiB they would be 3.6 GB.
BUFFER = 256 * 2**20


class MessageWeights(RunWeightFile):
    """The engine gets the bytes of the file: its workers may be on other hosts."""

    def __init__(self, rank: int = 0):
        super().__init__(rank)
        self.engine_args["worker_extension_cls"] = "lab.hosts.receiver.BytesReceiver"

    async def deliver(self, vllm: Any) -> None:
        """Brings the weights prepared last into a paused vLLM."""
        await vllm.collective_rpc("load_weight_bytes", args=(self.path.read_bytes(), self.layout))


class Meta(NamedTuple):
    """What vLLM asks of each tensor before it travels."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TransferWeights(RunWeightFile):
    """vLLM's `nccl` channel; no file is written. It has never been run on a GPU.

    rank: of this trainer process; rank 0 sends. workers: processes of the engine. address: of this host, where the
    workers meet rank 0.
    """

    def __init__(self, rank: int = 0, workers: int = 1, address: str = "127.0.0.1"):
        super().__init__(rank)
        self.workers, self.address = workers, address
        self.engine_args["weight_transfer_config"] = {"backend": "nccl"}
        self.copy: dict[str, torch.Tensor] = {}  # of the weights, whole, on rank 0
        self._sender: Any = None
        self._client = _Client()

    # vLLM's trainer-side engine reads its source through these two.
    def metadata(self) -> list[Meta]:
        """Of the weights that are being sent."""
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.copy.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.copy.items())

    def prepare(self, weights: Weights) -> None:
        """Rank 0 keeps a copy, so that the trainer may go on and change its weights while they travel."""
        if self.rank != 0:
            take_part(weights)
            return
        self.copy = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM sends on streams of its own, which wait for no copy

    async def deliver(self, vllm: Any) -> None:
        """Sends while the engine receives: both sides must run at once, so a thread of its own sends. (It does not keep
        the process alive if the engine dies.)"""
        sent: Future[None] = Future()

        def settle(error: BaseException | None = None) -> None:
            with suppress(InvalidStateError):  # the first failure has settled it, or nobody waits any more
                sent.set_exception(error) if error else sent.set_result(None)

        def send() -> None:
            try:
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
