"""vLLM's asynchronous scheduling, which its CPU platform turns off: named as `worker_extension_cls`, a worker imports this
module. The next step is then scheduled before the tokens of this one are known, by vLLM's own scheduler, queue of steps
and model runner; only the streams and events of a GPU are stand-ins. So a pause finds a step under way, as on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from lab.fast_scheduler import FastReceiver


class Receiver(FastReceiver):
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert self.model_runner.use_async_scheduling
        super().load_tensors(tensors)


def new_runner(self: Any, vllm_config: Any, device: torch.device, make: Any = CPUModelRunner.__init__) -> None:
    vllm_config.scheduler_config.async_scheduling = True
    make(self, vllm_config, device)


CPUModelRunner.__init__ = new_runner
torch.cuda.Event = lambda **_: SimpleNamespace(record=lambda: None, synchronize=lambda: None)
torch.cuda.stream, torch.cuda.current_stream = lambda _: nullcontext(), lambda: None
