"""The rules between flags: what is refused before anything is loaded, and what is only noted.

A rule stands here if the run would otherwise fail late, or silently be another run than its command line says. Each
yields one sentence that names the flag and the fix; the first sentence ends the run.
"""

import json
import math
import operator
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fp32_head import GENERATOR_ARGS
from losses import LOSSES
from pipeline_rl import Pacer
from runtime.flags import (
    BUILT_IN,
    DEFAULTS,
    PRETRAINED_LR,
    WITH_RARITY,
    EngineFlags,
    Flags,
    ScheduleFlags,
    UsageError,
    own_code,
    parsed_engine_args,
    reason_of,
)
from runtime.folder import Record
from runtime.model import check_config
from vllm_engine import VLLMEngine

BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}

# Flags that an ablation would change for nothing: name -> (another flag, the values of that one that leave it unused).
UNUSED = {
    "eps_max": ("loss", "dispo gspo dapo grpo tis"),
    "eps_low": ("loss", "cispo"),
    "eps_high": ("loss", "cispo grpo"),  # grpo's clip is symmetric
    "penalty_window": ("length_control", "interruption none"),
    "penalty_on": ("length_control", "interruption none"),
    "zero_variance_filter": ("dynamic_sampling", "True"),
    "min_ready": ("dynamic_sampling", "True"),  # which takes groups one by one
    "engine_args": ("engine", "torch"),
    "weight_channel": ("engine", "torch"),
}

USUAL = {  # values for real models, where the default suits the built-in task
    "min_budget": "768 to 10000",
    "max_budget": "1024 to 12000",
    "answer_budget": "128 to 2000",
    "dtype": "bfloat16",
}


def check_flags(flags: Flags) -> list[str]:
    """Raises UsageError for what cannot work; returns notes. Rounds `max_steps` up where steps come in rounds of k."""
    engine_options(flags)  # raises UsageError itself
    for rule in (bounds, unused, loss, schedule, length, data, model):
        for sentence in rule(flags):
            raise UsageError(sentence)
    messages = list(notes(flags))
    if flags.schedule == "ppo_off_policy":
        flags.max_steps = math.ceil(flags.max_steps / flags.k) * flags.k
    return messages


# ------------------------------------------------------------------------------------------------------ what is refused


def bounds(flags: Flags) -> Iterator[str]:
    """The bounds of single flags, which stand with each in flags.py."""
    for item in fields(flags):
        value = getattr(flags, item.name)
        for word, bound in item.metadata["bounds"].items():
            if not (BOUNDS[word](value, bound) and value < math.inf):
                yield f"--{item.name} must be {word.replace('_', ' ')} {bound} and finite, not {value}."


def unused(flags: Flags) -> Iterator[str]:
    """Flags that were changed and would do nothing, by the table UNUSED."""
    for name, (other, values) in UNUSED.items():
        value, setting = getattr(flags, name), str(getattr(flags, other))
        if value != DEFAULTS[name] and setting in values.split():
            yield f"--{name} {value} does nothing with --{other} {setting.lower()}; leave out one of the two."


def schedule(flags: Flags) -> Iterator[str]:
    """Batches that never become ready, and groups that never fit into the engine."""
    try:
        new_pacer(flags)
    except ValueError as error:
        yield f"--schedule {flags.schedule} --k {flags.k} --min_ready {flags.min_ready}: {error}."
    if flags.rollouts > flags.max_num_seqs:
        yield f"--rollouts {flags.rollouts} do not fit one engine; raise --max_num_seqs (now {flags.max_num_seqs})."


def new_pacer(flags: ScheduleFlags) -> Pacer:
    """Who may enter the engine, and when. Raises ValueError."""
    return Pacer(flags.batch_prompts, flags.k, schedule=flags.schedule, min_ready=flags.min_ready)


def length(flags: Flags) -> Iterator[str]:
    """Budgets that cannot be drawn, a penalty that does not fit under the cap, thinking that nothing can interrupt."""
    if flags.length_control == "interruption":
        if flags.min_budget > flags.max_budget:
            yield f"--min_budget {flags.min_budget} is above --max_budget {flags.max_budget}; lower it."
        if flags.thinking == "false":
            yield "--thinking false leaves nothing to interrupt; add --length_control none or penalty."
    cap = flags.completion_cap
    if flags.length_control == "penalty" and not 1 <= flags.penalty_window <= cap:
        yield f"--penalty_window must be from 1 to --max_budget + --answer_budget = {cap}, not {flags.penalty_window}."


def data(flags: Flags) -> Iterator[str]:
    """Groups without a gradient, prompts that no model can read, rewards that nobody gives."""
    other_terms = flags.kl_coef > 0 or flags.entropy_coef > 0
    needs_variance = flags.zero_variance_filter or flags.dynamic_sampling
    if flags.rollouts == 1 and flags.max_steps and (needs_variance or not other_terms):
        yield "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more."
    if flags.dynamic_sampling and flags.reward == "shuffled":
        yield "--dynamic_sampling looks at true rewards; use --reward task with it."
    if flags.dataset in WITH_RARITY and flags.model:
        yield f"--dataset {flags.dataset} has a first model of its own; leave out --model {flags.model}."
    if flags.dataset not in WITH_RARITY and not flags.task and flags.rarity != DEFAULTS["rarity"]:
        yield f"--rarity {flags.rarity} is of `discover`; leave it out, or add --dataset discover."
    if flags.dataset in BUILT_IN:
        if flags.reward not in ("task", "shuffled"):
            yield f"--reward {flags.reward} judges data sets; the built-in task has `task` and `shuffled`."
        if flags.eval_dataset:
            yield f"--eval_dataset {flags.eval_dataset} needs a --dataset beside it; the built-in task has its own."
    elif not flags.model:
        yield "--dataset needs --model, whose tokenizer encodes the prompts."
    else:
        for package in ("datasets", "math_verify"):
            if not find_spec(package):
                yield f"--dataset {flags.dataset}: pip install {package.replace('_', '-')}, or take a built-in task."
        if not find_spec("resource"):
            yield f"--dataset {flags.dataset} needs limits for its judges that Windows does not have; use Linux or WSL."


def model(flags: Flags) -> Iterator[str]:
    """A model that the torch engine samples otherwise than the trainer, a package that accelerate would not miss."""
    if flags.engine == "torch" and not is_qwen3(flags.model):
        what = "the built-in model, or a folder of another Qwen3"
        yield f"--engine torch samples from {what}; leave out --model, or --engine."
    if flags.report_to != "none" and not find_spec(flags.report_to):
        yield f"--report_to {flags.report_to}: pip install {flags.report_to}, or leave it out."


def is_qwen3(model: str) -> bool:
    """Whether this is the built-in model (""), or a folder of a model of its kind."""
    if not model:
        return True
    config = Path(model, "config.json")
    return config.is_file() and json.loads(config.read_text()).get("model_type") == "qwen3"


def loss(flags: Flags) -> Iterator[str]:
    """A loss or a task that is not there."""
    if ":" in flags.loss:
        own_code(flags, "loss")
    elif flags.loss not in LOSSES:
        yield f"--loss must be {', '.join(LOSSES)} or module:function, not {flags.loss}."
    if flags.task:
        own_code(flags, "task")
        if flags.dataset != DEFAULTS["dataset"]:
            yield f"--task {flags.task} takes the place of --dataset {flags.dataset}; leave out one of the two."


# -------------------------------------------------------------------------------------------------- which engine

NEED_VLLM = {"engine": "auto", "engine_args": "", "weight_channel": "auto"}  # flags that need it, and where they do not
BUILDS = "pip install -r requirements-cpu.txt, or beside an NVIDIA GPU requirements-gpu.txt"


def choose_engine(flags: Flags) -> list[str]:
    """`--engine auto` becomes vllm, or torch where vLLM cannot be imported; that is a note. Raises UsageError if the
    other flags need vLLM, and for an engine that is not there."""
    problem = torchvision_problem()  # it would end a run with either engine
    own = ":" in flags.engine
    if not own and flags.engine not in ("auto", "vllm", "torch"):
        raise UsageError(f"--engine must be auto, vllm, torch or module:Class, not {flags.engine}.")
    kind = own_code(flags, "engine") if own else VLLMEngine
    if not isinstance(kind, type):
        raise UsageError(f"--engine {flags.engine} is no class; runtime/engine.py says what one must have.")
    if flags.engine == "torch" or not issubclass(kind, VLLMEngine):
        return []
    problem = problem or vllm_problem()
    if not problem:
        flags.engine = flags.engine if own else "vllm"
        return []
    needs = [name for name, value in NEED_VLLM.items() if getattr(flags, name) != value]
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


def engine_options(flags: EngineFlags) -> Record:
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


# ------------------------------------------------------------------------------------------------- what is only noted


def notes(flags: Flags) -> Iterator[str]:
    """What works, but not as its name or the defaults promise."""
    if flags.schedule == "ppo_off_policy" and flags.max_steps % flags.k:
        rounded = math.ceil(flags.max_steps / flags.k) * flags.k
        yield f"--max_steps {flags.max_steps} is rounded up to {rounded}, a multiple of --k {flags.k}"
    if flags.loss == "tis" and (flags.schedule == "pipeline" or flags.k == 1):
        one_update = "every batch gets one update, so pi_old is pi, the clip never acts"
        yield f"--loss tis: {one_update} and it equals --loss cispo --eps_max 2"
    if flags.loss == "gspo" and flags.aggregation != "sample":
        yield f"--loss gspo with --aggregation {flags.aggregation}: GSPO's own paper averages by --aggregation sample"
    if flags.dataset not in BUILT_IN:
        defaults = [name for name in USUAL if getattr(flags, name) == DEFAULTS[name]]
        if flags.length_control != "interruption" and "min_budget" in defaults:
            defaults.remove("min_budget")  # nothing draws it
        if defaults:
            values = [f"--{name} {DEFAULTS[name]} (usual for a real model: {USUAL[name]})" for name in defaults]
            yield f"left at what suits the built-in task: {', '.join(values)}"


def lr_note(flags: Flags) -> str:
    """The learning rate, and where it comes from."""
    default, whose = DEFAULTS["lr"], "the built-in model"
    if flags.dataset not in BUILT_IN:
        default, whose = PRETRAINED_LR, "a pretrained model (the paper's 8B: 5e-7; `make real`, 135M: 1e-5)"
    if flags.lr == default:
        return f"--lr {flags.lr:g}: the default for {whose}"
    return f"--lr {flags.lr:g}: given, now or before a resume; {default:g} is the default for {whose}"
