"""--engine and --engine_args: which engine can run here, and the arguments that vLLM gets. What is wrong with them
is one sentence (UsageError), before a model is loaded; what needs no torch is looked at in before_torch.py.
"""

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from fp32_head import GENERATOR_ARGS
from runtime.before_torch import BUILDS, check_engine, is_qwen3, parsed_engine_args, vllm_missing
from runtime.command_line import reason_of
from runtime.flags import DEFAULTS, Flags, UsageError, own_code
from runtime.folder import Record
from runtime.model import check_config
from vllm_engine import VLLMEngine

# -------------------------------------------------------------------------------------------------- which engine


def choose_engine(flags: Flags) -> list[str]:
    """`--engine auto` becomes vllm, or torch where vLLM cannot be imported; that is a note. Raises UsageError if the
    other flags need vLLM, for arguments that vLLM cannot have, and for a model that the engine cannot run."""
    check_engine(flags)
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
    if problem := vllm_missing():
        return problem
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


def engine_options(flags: Flags) -> Record:
    """The engine arguments of vLLM that the flags ask for, those of an FP32 head among them. Raises UsageError."""
    options: Record = parsed_engine_args(flags)
    if flags.trust_remote_code:
        options.setdefault("trust_remote_code", True)
    if flags.fp32_head:
        options["hf_overrides"] = GENERATOR_ARGS["hf_overrides"] | options.get("hf_overrides", {})
    return options


def worker_count(options: Record) -> int:
    """Processes of the engine: tensor x pipeline parallel."""
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
