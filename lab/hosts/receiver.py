"""The engine's end of weights that come as bytes. vLLM imports this file into its worker's process."""

import torch

from runtime.inside_vllm import RunWeightReceiver
from vllm_engine import Layout, tensors_in


class BytesReceiver(RunWeightReceiver):
    """Loads the bytes of a weight file into the running model."""

    def load_weight_bytes(self, data: bytes, layout: Layout) -> None:
        """Replaces all weights by those of a file that is on another host and has these bytes."""
        self.load_tensors(tensors_in(torch.frombuffer(bytearray(data), dtype=torch.uint8), layout))
