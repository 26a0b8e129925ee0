"""What is refused before anything is loaded, and what is noted: the rules between the flags, grouped by concept.

Each rule yields one sentence that names the flag and the fix. The first sentence ends the run.
"""

import math
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from runtime.flags import BUILT_IN, DEFAULTS, PRETRAINED_LR, Flags, UsageError, engine_options, has_adapters
from runtime.run_folder import Folder

HOLDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def runs_code(flags: Flags) -> bool:
    """Whether a data set's reward runs what the model wrote."""
    return "code" in flags.reward.split(",") or bool(re.search(":code(=|,|$)", f"{flags.dataset},{flags.eval_dataset}"))


# Flags that do nothing without others: their names -> (what they need, whether these flags have it).
NEEDS: dict[str, tuple[str, Callable[[Flags], bool]]] = {
    "eps_max": ("--loss cispo", lambda flags: flags.loss == "cispo"),
    "eps_low": ("--loss gspo, dapo, grpo or tis", lambda flags: flags.loss != "cispo"),
    "eps_high": ("--loss gspo, dapo or tis (grpo's clip is symmetric)",  # "clip-higher"
                 lambda flags: flags.loss in ("gspo", "dapo", "tis")),
    "penalty_window penalty_on": ("--length_control penalty", lambda flags: flags.length_control == "penalty"),
    "zero_variance_filter": ("--dynamic_sampling false", lambda flags: not flags.dynamic_sampling),
    "restart_window": ("--max_restarts above 0", lambda flags: flags.max_restarts > 0),
    "tensor_parallel data_parallel engine_args weight_channel max_restarts":
        ("--engine vllm", lambda flags: flags.engine == "vllm"),
    "prompts": ("--dataset chain or graded", lambda flags: flags.dataset in BUILT_IN),
    "lora_alpha lora_targets": ("--lora_rank above 0", lambda flags: flags.lora_rank > 0),
    "lora_rank": ("new adapters (--lora_adapter has its own rank)", lambda flags: not flags.lora_adapter),
    "size vocabulary": ("the built-in model (no --model)", lambda flags: not flags.model),
    "difficulty prompt_order": ("--dataset graded", lambda flags: flags.dataset == "graded"),
    "eval_dataset prompt_column answer_column prompt_template held_out max_prompt_tokens reward_workers reward_timeout "
    "thinking apply_chat_template end_of_thinking stop_tokens":
        ("a --dataset", lambda flags: flags.dataset not in BUILT_IN),
    "unsafe_code": ("a data set judged by `code`", runs_code),
    "generator_devices": ("engines on this host (Ray places its own)",
                          lambda flags: engine_options(flags).get("distributed_executor_backend") != "ray"),
    "interruption_phrase": ("--length_control interruption and a --dataset",
                            lambda flags: flags.length_control == "interruption" and flags.dataset not in BUILT_IN),
}  # fmt: skip

USUAL = {  # values for real models, where the default suits the built-in task
    "min_budget": "768 to 10000", "max_budget": "1024 to 12000", "answer_budget": "128 to 2000",
    "dtype": "bfloat16",
}  # fmt: skip


def check_flags(flags: Flags) -> list[str]:
    """Raises UsageError for what cannot work; returns notes. Flags that have no effect, or that must be rounded, are
    changed in place, and a note says so."""
    for refusals in (single_flags, schedule, length, loss, data, lora, engine, reports, idle_flags, folders):
        for sentence in refusals(flags):
            raise UsageError(sentence)
    engine_options(flags)  # raises UsageError itself
    return [*adjustments(flags), *notes(flags)]


# ------------------------------------------------------------------------------------------------------ what is refused


def single_flags(flags: Flags) -> Iterator[str]:
    """The bounds of single flags, which are written with each in flags.py; text and paths that cannot be written."""
    for name, value in vars(flags).items():
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            yield f"--{name} {value} is not UTF-8, as which it is saved; give another."
    for name in ("output_dir", "model", "lora_adapter"):
        path = Path(getattr(flags, name)).absolute()
        if len(os.fsencode(path)) > 3800 or any(len(os.fsencode(part)) > 255 for part in path.parts):
            yield f"--{name} {getattr(flags, name)} is too long a path; give a shorter one."
    for item in fields(flags):
        bounds, value = item.metadata["bounds"], getattr(flags, item.name)
        if bounds and not (value < 2**63 and all(HOLDS[word](value, bound) for word, bound in bounds.items())):
            wanted = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in bounds.items())
            yield f"--{item.name} must be {wanted}{' and below 2^63' if value >= 2**63 else ''}, not {value}."
    for name in ("eps_low", "eps_high"):  # any negative number stands for the loss's own default
        if math.isnan(getattr(flags, name)):
            yield f"--{name} must be a number, not nan; leave it out for the default."


def schedule(flags: Flags) -> Iterator[str]:
    """Whether batches ever become ready, and a group fits the engine."""
    size, pipeline = flags.batch_prompts, flags.schedule == "pipeline"
    if not pipeline and flags.k < 1:
        yield f"--k must be at least 1 with --schedule {flags.schedule}, not {flags.k}."
    if not pipeline and flags.min_ready:
        yield "--min_ready works with --schedule pipeline; with ppo_off_policy --k sets the lag."
    if flags.min_ready > flags.k * size:
        yield (
            f"--min_ready {flags.min_ready} is never met: at most --k * --batch_prompts = {flags.k * size} groups wait "
            "behind a batch; lower it or raise --k."
        )
    if pipeline and flags.max_ready and flags.max_ready < size + flags.min_ready:
        yield (
            f"--max_ready {flags.max_ready} would never let a batch be ready; give at least --batch_prompts + "
            f"--min_ready = {size + flags.min_ready}, or 0."
        )
    if flags.rollouts > flags.max_num_seqs:
        yield f"--rollouts {flags.rollouts} do not fit one engine; raise --max_num_seqs (now {flags.max_num_seqs})."


def length(flags: Flags) -> Iterator[str]:
    """Budgets that can be drawn, a penalty that fits under the cap, thinking that can be interrupted."""
    cap = flags.max_budget + flags.answer_budget
    if flags.length_control == "interruption" and flags.min_budget > flags.max_budget:
        yield (
            f"--min_budget {flags.min_budget} is above --max_budget {flags.max_budget}; lower the one or raise the "
            "other."
        )
    if flags.length_control == "penalty" and not 1 <= flags.penalty_window <= cap:
        yield (
            f"--penalty_window must be from 1 to the cap of {cap} tokens (--max_budget + --answer_budget), "
            f"not {flags.penalty_window}."
        )
    if flags.thinking == "false":
        if flags.length_control == "interruption":
            yield (
                "--thinking false leaves nothing to interrupt; add --length_control none or --length_control penalty."
            )
        for name in ("end_of_thinking", "interruption_phrase"):
            if getattr(flags, name):
                yield f"--{name} is for models that think; drop it, or --thinking false."


def loss(flags: Flags) -> Iterator[str]:
    """A loss with a gradient."""
    filtered = flags.zero_variance_filter or flags.dynamic_sampling
    other_terms = flags.kl_coef > 0 or flags.entropy_coef > 0
    if flags.rollouts == 1 and flags.max_steps and (filtered or not other_terms):
        yield "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more."


def data(flags: Flags) -> Iterator[str]:
    """Prompts, a model that can read them, and a reward that can judge the answers."""
    if flags.dynamic_sampling and flags.reward == "shuffled":
        yield "--dynamic_sampling looks at true rewards; use --reward task with it."
    if flags.dataset in BUILT_IN and flags.reward not in ("task", "shuffled"):
        yield f"--reward {flags.reward} judges data sets; the built-in task has `task` and `shuffled`."
    if runs_code(flags) and not flags.unsafe_code:
        yield "--dataset judged by code runs what the model writes; read docs/code.md, then add --unsafe_code true."
    if flags.dataset not in BUILT_IN and not flags.model:
        yield "--dataset needs --model, whose tokenizer encodes the prompts."
    if flags.attn_implementation == "flash_attention_2":
        if flags.share_prompts:
            yield "--share_prompts needs a mask, which flash_attention_2 does not take; leave one of them out."
        if flags.dtype == "float32":
            yield "--attn_implementation flash_attention_2 has no float32; add --dtype bfloat16."
        if not (find_spec("flash_attn") or find_spec("kernels")):
            yield "--attn_implementation flash_attention_2: pip install flash-attn, or leave it out for sdpa."
    if Path(flags.model).is_absolute() and not Path(flags.model, "config.json").is_file():
        yield f"--model {flags.model} is no folder of a Hugging Face model; it has no config.json."


def lora(flags: Flags) -> Iterator[str]:
    """Adapters whose package is there, and a folder that holds one."""
    folder = flags.lora_adapter
    if has_adapters(flags) and not find_spec("peft"):
        yield "--lora_rank and --lora_adapter need a package: pip install peft, or leave them out."
    if folder and not Path(folder, "adapter_config.json").is_file():
        yield f"--lora_adapter {folder} is no folder of an adapter; it has no adapter_config.json."


def engine(flags: Flags) -> Iterator[str]:
    """The engine in torch is for the built-in model."""
    if flags.engine == "torch" and (flags.model or flags.dtype != "float32"):
        yield "--engine torch samples from the built-in model, in float32; leave out --model and --dtype, or --engine."


def reports(flags: Flags) -> Iterator[str]:
    """A tracker whose package is there (accelerate would leave it out without a word)."""
    if flags.report_to != "none" and not find_spec(flags.report_to):
        yield f"--report_to {flags.report_to}: pip install {flags.report_to}, or leave it out."


def idle_flags(flags: Flags) -> Iterator[str]:
    """Flags that were changed and would do nothing, by the table NEEDS."""
    for names, (what, has) in NEEDS.items():
        for name in names.split():
            value, default = getattr(flags, name), DEFAULTS[name]
            if value != default and not has(flags):
                yield (
                    f"--{name} {value} does nothing without {what}; change that, or leave --{name} out (its default is "
                    f"{default!r})."
                )


def folders(flags: Flags) -> Iterator[str]:
    """No file of another run, of another kind, or of the model to train is ever deleted."""
    if flags.overwrite and flags.resume:
        yield "--overwrite deletes the run that --resume goes on with; take one of the two."
    folder = Path(flags.output_dir)
    for name in ("model", "lora_adapter"):
        used = getattr(flags, name)
        if flags.overwrite and used and f"{os.path.realpath(used)}/".startswith(f"{os.path.realpath(folder)}/"):
            yield f"--overwrite would delete --{name} {used}, which lies in --output_dir; choose another folder."
    if flags.resume:
        for name in Folder(folder).not_its_own():
            yield f"--resume {folder}: {name} there is a link, or no file of a run; put the run's own in its place."
        return
    holds_run = Folder(folder).holds_run()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    empty = nearest.is_dir() and (nearest != folder or not any(folder.iterdir()))
    if not (holds_run or empty):
        yield f"--output_dir {folder} is not empty and holds no run; choose another folder."
    if holds_run and not flags.overwrite:
        yield f"--output_dir {folder} holds a run; choose another folder, or --resume {folder}, or --overwrite true."


# ------------------------------------------------------------------------------------------------- what is only noted


def adjustments(flags: Flags) -> Iterator[str]:
    """What is changed in `flags`, and a note on each."""
    if flags.max_ready and flags.schedule == "ppo_off_policy":
        yield f"--max_ready {flags.max_ready} does nothing with --schedule ppo_off_policy"
        flags.max_ready = 0
    if flags.min_ready and flags.dynamic_sampling:
        yield f"--min_ready {flags.min_ready} does nothing with --dynamic_sampling, which takes groups singly"
        flags.min_ready = 0
    if flags.schedule == "ppo_off_policy" and flags.max_steps % flags.k:
        rounded_up = -(-flags.max_steps // flags.k) * flags.k
        yield f"--max_steps {flags.max_steps} is rounded up to {rounded_up}, a multiple of --k {flags.k}"
        flags.max_steps = rounded_up


def notes(flags: Flags) -> Iterator[str]:
    """What works, but not as its name or the defaults promise."""
    if flags.loss == "tis" and (flags.schedule == "pipeline" or flags.k == 1):
        yield (
            "--loss tis: every batch gets one update, so pi_old is pi, the clip never acts and it equals --loss cispo "
            "--eps_max 2"
        )
    if flags.loss == "gspo" and flags.aggregation != "sample":
        yield f"--loss gspo with --aggregation {flags.aggregation}: GSPO's own paper averages by --aggregation sample"
    interrupted = flags.length_control == "interruption"
    if not interrupted and flags.min_budget != DEFAULTS["min_budget"]:
        yield f"--min_budget {flags.min_budget} does nothing without --length_control interruption"
    if flags.dataset not in BUILT_IN:
        left = [
            f"--{name} {DEFAULTS[name]} (usual for a real model: {usual})"
            for name, usual in USUAL.items()
            if getattr(flags, name) == DEFAULTS[name] and (interrupted or name != "min_budget")
        ]
        if left:
            yield f"left at what suits the built-in task: {', '.join(left)}"


def lr_note(flags: Flags) -> str:
    """The learning rate, and where it comes from."""
    built_in = flags.dataset in BUILT_IN
    default = DEFAULTS["lr"] if built_in else PRETRAINED_LR
    whose = "the built-in model" if built_in else "a pretrained model (the paper's 8B: 5e-7; `make real`, 135M: 1e-5)"
    if flags.lr == default:
        return f"--lr {flags.lr:g}: the default for {whose}"
    return f"--lr {flags.lr:g}: given, now or before a resume; {default:g} is the default for {whose}"
