"""The engine's end of weights that come as bytes. vLLM imports this file into its worker's process."""

import os

from runtime.inside_vllm import RunWeightReceiver


class BytesReceiver(RunWeightReceiver):
    """Loads the bytes of a weight file into the running model."""

    def load_weight_bytes(self, data: bytes) -> None:
        """Replaces all weights by those of a safetensors file, which is on another host and has these bytes."""
        # A file in memory that has no name: nothing is left of it if this process is killed.
        with os.fdopen(os.memfd_create("weights"), "wb") as file:
            file.write(data)
            file.flush()
            self.load_weight_file(f"/proc/self/fd/{file.fileno()}")
