"""Named as `worker_extension_cls`: a worker whose tied head keeps the weights that it had first."""

from typing import Any

from runtime import engine_process


class Receiver(engine_process.WeightReceiver):
    first: Any = None  # the head's product with its own repacked weights, after the weights of version 0

    def load_weight_file(self, path: str) -> None:
        super().load_weight_file(path)
        head = self.model_runner.get_model().lm_head
        self.first = head.cpu_linear = self.first or head.cpu_linear
