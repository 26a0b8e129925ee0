"""In the place of vLLM's `nccl` on machines without a GPU: worker and trainer must meet inside the update, or both wait.

The worker's `update_weights` blocks until the trainer, which sends at the same time, has written a file; as with a
broadcast, a trainer that waits for the call before it sends never gets there. Importing this module in a worker
(`worker_extension_cls`) registers the worker's side.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from runtime import engine_process


@dataclass
class InitInfo(WeightTransferInitInfo):
    path: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]


class WorkerSide(WeightTransferEngine):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
        self.path = Path(init_info.path)

    def start_weight_update(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        until = time.monotonic() + 20
        while not self.path.exists():
            assert time.monotonic() < until, "the trainer did not send"
            time.sleep(0.01)
        weights = load_file(self.path)
        self.path.unlink()
        assert list(weights) == sorted(update_info.names)
        self.model.load_weights(weights.items())

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


@dataclass
class TrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = "rendezvous"
    path: str


class TrainerSide(TrainerWeightTransferEngine):
    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info, *, client, source):
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made.path = Path(init_info.path)
        client.init_weight_transfer_engine({"path": init_info.path})
        return made

    def send_weights(self):
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self.client.update_weights, {"names": [m.name for m in self.source.metadata()]})
            new = self.path.with_suffix(".new")
            save_file(dict(self.source), new)
            new.rename(self.path)
            received.result()
        self.client.finish_weight_update()


WeightTransferEngineFactory.register_engine("rendezvous", WorkerSide)
WeightTransferTrainerFactory.register_engine("rendezvous", TrainerSide)


class Receiver(engine_process.WeightReceiver):
    """Named as `worker_extension_cls`, so that a worker imports this module."""
