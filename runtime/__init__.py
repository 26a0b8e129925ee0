"""What it takes to run: flags, model, trainer, engine, weight channels, a run's folder."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported, which may be soon
