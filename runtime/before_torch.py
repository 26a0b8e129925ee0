"""What is answered before torch is imported, which takes seconds: --help, and whatever a look at the flags and the
files can show to be wrong, in one sentence (UsageError). The rest needs a model, a tokenizer or vLLM: engine_flags.py,
parts.py. This file imports nothing that imports torch.
"""

import json
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.command_line import parse_flags
from runtime.flags import Flags, UsageError, check_flags, with_flag_names
from runtime.folder import check_folder
from tasks.rows import check_file, parse_data_sets, parse_eval_sets


def answer(argv: Sequence[str], description: str) -> None:
    """Prints --help, or what is wrong, and ends the program; returns if nothing is."""
    try:
        checked_flags(argv, description)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)


def checked_flags(argv: Sequence[str], description: str) -> tuple[Flags, list[str]]:
    """The flags of a command line, and notes about them. Raises UsageError."""
    flags = parse_flags(argv, description)
    notes = check_flags(flags)
    check_files(flags)
    check_engine(flags)
    check_folder(flags)  # comes last: a folder hides no other fault
    return flags, notes


def check_files(flags: Flags) -> None:
    """Raises UsageError for a model's folder or a data set's file that is not there."""
    part = r"\b[\w.-]+\b"
    if flags.model and not Path(flags.model).exists() and not re.fullmatch(f"({part}/)?{part}", flags.model):
        raise UsageError(f"--model {flags.model}: there is no such folder, and a hub id is NAME or OWNER/NAME.")
    if not flags.from_data_sets:
        return
    try:
        for data in parse_data_sets(flags.dataset):
            check_file(data)
        for data in parse_eval_sets(flags.eval_dataset).values():
            check_file(data, "eval_dataset")
    except ValueError as error:
        raise UsageError(f"{with_flag_names(str(error))}.") from error


# --------------------------------------------------------------------------------------------------------- the engine

BUILDS = "pip install '.[cpu]', or beside an NVIDIA GPU '.[gpu]'; `make setup` does it"
# vLLM's arguments that the trainer must know as well -> the flag that both read.
OWN_FLAG = {name: name for name in ("model", "dtype", "seed", "max_num_seqs")} | {"max_model_len": "max_budget"}


def check_engine(flags: Flags) -> None:
    """Raises UsageError for an engine that is not there, for arguments that vLLM cannot have, and for a model that the
    torch engine cannot run."""
    parsed_engine_args(flags)
    if flags.engine == "vllm" and (problem := vllm_missing()):
        raise UsageError(f"--engine vllm needs vLLM, but {problem}.")
    if flags.engine == "torch" and not is_qwen3(flags.model):
        what = "the built-in model, or a folder of another Qwen3"
        raise UsageError(f"--engine torch samples from {what}; leave out --model, or --engine.")


def vllm_missing() -> str:
    """That vLLM is not installed, and what to do about it; empty if it is."""
    if find_spec("vllm"):
        return ""
    advice = BUILDS if sys.platform == "linux" else "it has packages for Linux only"
    return f"vLLM is not installed ({advice})"


def parsed_engine_args(flags: Flags) -> dict[str, Any]:
    """The JSON object of --engine_args, empty for no text. Raises UsageError for arguments that cannot be read, or that
    contradict another flag."""
    try:
        options = json.loads(flags.engine_args or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise UsageError(f"--engine_args must be a JSON object, as '{{\"block_size\": 64}}', not {flags.engine_args}.")
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
    return options


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
