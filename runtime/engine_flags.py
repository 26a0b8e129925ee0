"""--engine and --engine_args: which engine can run here, and the arguments that vLLM gets. What is wrong with them
is one sentence (UsageError), before a model is loaded.
"""

import json
import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fp32_head import GENERATOR_ARGS
from runtime.command_line import reason_of
from runtime.flags import DEFAULTS, Flags, UsageError, own_code
from runtime.folder import Record
from runtime.model import check_config
from vllm_engine import VLLMEngine


def is_qwen3(model: str) -> bool:
    """Whether this is the built-in model (""), or a folder of a model of its kind: one without a config.json that can
    be read is none."""
    if not model:
        return True
    try:
        config = json.loads(Path(model, "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "qwen3"


# -------------------------------------------------------------------------------------------------- which engine

BUILDS = "pip install '.[cpu]', or beside an NVIDIA GPU '.[gpu]'; `make setup` does it"


def choose_engine(flags: Flags) -> list[str]:
    """`--engine auto` becomes vllm, or torch where vLLM cannot be imported; that is a note. Raises UsageError if the
    other flags need vLLM, for arguments that vLLM cannot have, and for a model that the engine cannot run."""
    engine_options(flags)
    if flags.engine == "torch" and not is_qwen3(flags.model):
        what = "the built-in model, or a folder of another Qwen3"
        raise UsageError(f"--engine torch samples from {what}; leave out --model, or --engine.")
    problem = torchvision_problem()  # it would end a run with either engine
    own = ":" in flags.engine
    kind = own_code(flags, "engine") if own else VLLMEngine
    if not isinstance(kind, type):
        raise UsageError(f"--engine {flags.engine} is no class; runtime/engine.py says what one must have.")
    if flags.engine == "torch" or not issubclass(kind, VLLMEngine):
        return []
    if flags.engine == "auto" and not flags.model and not flags.engine_args and torch.cuda.is_available():
        flags.engine = "torch"
        return ["--engine torch, which is faster than vllm for the built-in model on a GPU"]
    problem = problem or vllm_problem()
    if not problem:
        flags.engine = flags.engine if own else "vllm"
        return []
    needs = [name for name in ("engine", "engine_args") if getattr(flags, name) != DEFAULTS[name]]
    if not is_qwen3(flags.model):
        check_config(flags)
        needs.append("model")
    for name in needs:
        raise UsageError(f"--{name} {getattr(flags, name)} needs vLLM, but {problem}.")
    flags.engine = "torch"
    return [f"--engine torch, since {problem}"]


@cache
def torchvision_problem() -> str:
    """Why torchvision cannot be imported; empty if it can, or is not there. From now on it is not there for this
    process: transformers needs none, and would fail with a broken one."""
    if not find_spec("torchvision"):
        return ""
    try:
        import_module("torchvision")
    except Exception as error:  # RuntimeError where torch is built for a CPU and torchvision for CUDA
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        return f"torchvision is broken: {reason_of(error)} (pip uninstall torchvision torchaudio torchcodec)"
    return ""


def vllm_problem() -> str:
    """Why vLLM cannot sample here, and what to do about it; empty if it can. Its import takes seconds, which a run with
    vLLM needs anyway."""
    if not find_spec("vllm"):
        advice = BUILDS if sys.platform == "linux" else "it has packages for Linux only"
        return f"vLLM is not installed ({advice})"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read by its import
    try:
        import_module("vllm.v1.engine.async_llm")
        platforms = import_module("vllm.platforms")
    except Exception as error:  # the packages that it needs raise all kinds
        return f"vLLM cannot be imported: {reason_of(error)} ({BUILDS})"
    if platforms.current_platform.is_unspecified():
        return f"this build of vLLM finds no device ({BUILDS})"
    return ""


# ------------------------------------------------------------------------------------------- arguments of the engine

# vLLM's arguments that the trainer must know as well -> the flag that both read.
OWN_FLAG = {name: name for name in ("model", "dtype", "seed", "max_num_seqs")} | {"max_model_len": "max_budget"}


def parsed_engine_args(text: str) -> dict[str, Any]:
    """The JSON object of --engine_args, empty for no text. Raises UsageError."""
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise UsageError(f"--engine_args must be a JSON object, as '{{\"block_size\": 64}}', not {text}.")
    return options


def engine_options(flags: Flags) -> Record:
    """The engine arguments of vLLM that the flags ask for, those of an FP32 head among them. Raises UsageError for
    arguments that cannot be read, or that contradict --fp32_head."""
    options: Record = parsed_engine_args(flags.engine_args)
    if "data_parallel_size" in options:
        raise UsageError("--engine_args data_parallel_size: a run has one engine; use tensor_parallel_size.")
    if options.get("distributed_executor_backend") == "ray" and flags.engine in ("auto", "vllm"):
        raise UsageError("--engine_args distributed_executor_backend ray: use --engine lab.hosts:RayEngine.")
    for name in OWN_FLAG.keys() & options.keys():
        raise UsageError(f"--engine_args {name}: use --{OWN_FLAG[name]}, which the trainer reads, too.")
    overrides = options.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        raise UsageError(f"--engine_args hf_overrides must be a JSON object, not {overrides!r}.")
    expected = "float32" if flags.fp32_head else flags.dtype
    head = overrides.get("head_dtype", expected)
    if head != expected:
        raise UsageError(f"--engine_args head_dtype {head!r} is not {expected!r}; set --fp32_head for both sides.")
    if flags.trust_remote_code:
        options.setdefault("trust_remote_code", True)
    if flags.fp32_head:
        options["hf_overrides"] = GENERATOR_ARGS["hf_overrides"] | overrides
    return options


def worker_count(options: Record) -> int:
    """Processes of the engine: tensor x pipeline parallel."""
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
