"""What is refused before anything is loaded, and what is noted: the rules between the flags, grouped by concept.

Each rule yields one sentence that names the flag and the fix. The first sentence ends the run.
"""

import json
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import torch

import masks
from runtime.engine import engine_options
from runtime.flags import BUILT_IN, DEFAULTS, PRETRAINED_LR, Flags, UsageError, has_adapters
from runtime.run_folder import Folder
from runtime.trainer import mask_options

LONGEST_MASK = 4096  # positions: a GPU's fast kernels take no dense mask, and longer rows slow it down
HOLDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


def is_qwen3(model: str) -> bool:
    """Whether this is a folder of a model of the built-in one's kind."""
    config = Path(model, "config.json")
    return config.is_file() and json.loads(config.read_text()).get("model_type") == "qwen3"


def judged_by_code(flags: Flags) -> bool:
    """Whether a data set's reward runs what the model wrote."""
    return flags.reward == "code" or bool(re.search(":code(=|,|$)", f"{flags.dataset},{flags.eval_dataset}"))


# Flags that do nothing without others: their names -> (what they need, whether these flags have it).
NEEDS: dict[str, tuple[str, Callable[[Flags], bool]]] = {
    "eps_max": ("--loss cispo", lambda flags: flags.loss == "cispo"),
    "eps_low": ("--loss dispo, gspo, dapo, grpo or tis", lambda flags: flags.loss != "cispo"),
    "eps_high": ("--loss dispo, gspo, dapo or tis (grpo's clip is symmetric)",  # "clip-higher"
                 lambda flags: flags.loss not in ("cispo", "grpo")),
    "mask_low": ("--mask icepop, sequence or geometric",
                 lambda flags: flags.mask in ("icepop", "sequence", "geometric")),
    "mask_high": ("a --mask", lambda flags: flags.mask != "none"),
    "penalty_window penalty_on": ("--length_control penalty", lambda flags: flags.length_control == "penalty"),
    "zero_variance_filter": ("--dynamic_sampling false", lambda flags: not flags.dynamic_sampling),
    "engine_args weight_channel":
        ("--engine vllm", lambda flags: flags.engine == "vllm"),
    "prompts": ("--dataset chain or graded", lambda flags: flags.dataset in BUILT_IN),
    "lora_rank": ("new adapters (--lora_adapter has its own rank)", lambda flags: not flags.lora_adapter),
    "size vocabulary": ("the built-in model (no --model)", lambda flags: not flags.model),
    "difficulty": ("--dataset graded", lambda flags: flags.dataset == "graded"),
    "eval_dataset prompt_column answer_column prompt_template held_out max_prompt_tokens reward_workers reward_timeout "
    "thinking apply_chat_template end_of_thinking stop_tokens":
        ("a --dataset", lambda flags: flags.dataset not in BUILT_IN),
    "review": ("prompts that retire (--pass_rate_threshold at most 1)", lambda flags: flags.pass_rate_threshold <= 1),
    "unsafe_code": ("a data set judged by `code`", judged_by_code),
    "interruption_phrase": ("--length_control interruption and a --dataset",
                            lambda flags: flags.length_control == "interruption" and flags.dataset not in BUILT_IN),
}  # fmt: skip

USUAL = {  # values for real models, where the default suits the built-in task
    "min_budget": "768 to 10000", "max_budget": "1024 to 12000", "answer_budget": "128 to 2000", "dtype": "bfloat16",
}  # fmt: skip


def check_flags(flags: Flags) -> list[str]:
    """Raises UsageError for what cannot work; returns notes. Flags that have no effect, or that must be rounded, are
    changed in place, and a note says so."""
    for refusals in (single_flags, schedule, length, data, model, idle_flags, stale_tokens, folders):
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


def schedule(flags: Flags) -> Iterator[str]:
    """Whether batches ever become ready, and a group fits the engine."""
    size, pipeline, behind = flags.batch_prompts, flags.schedule == "pipeline", flags.min_ready
    if not pipeline and flags.k < 1:
        yield f"--k must be at least 1 with --schedule {flags.schedule}, not {flags.k}."
    if not pipeline and behind:
        yield "--min_ready works with --schedule pipeline; with ppo_off_policy --k sets the lag."
    if behind > flags.k * size:
        yield f"--min_ready {behind} is never met; give at most --k * --batch_prompts = {flags.k * size} groups."
    if flags.rollouts > flags.max_num_seqs:
        yield f"--rollouts {flags.rollouts} do not fit one engine; raise --max_num_seqs (now {flags.max_num_seqs})."


def length(flags: Flags) -> Iterator[str]:
    """Budgets that can be drawn, a penalty that fits under the cap, thinking that can be interrupted."""
    how, low, high = flags.length_control, flags.min_budget, flags.max_budget
    cap = flags.most_sampled
    if how == "interruption" and low > high:
        yield f"--min_budget {low} is above --max_budget {high}; lower the one or raise the other."
    if how == "penalty" and not 1 <= flags.penalty_window <= cap:
        yield f"--penalty_window must be from 1 to --max_budget + --answer_budget = {cap}, not {flags.penalty_window}."
    if flags.thinking == "false":
        if how == "interruption":
            yield "--thinking false leaves nothing to interrupt; add --length_control none or penalty."
        for name in ("end_of_thinking", "interruption_phrase"):
            if getattr(flags, name):
                yield f"--{name} is for models that think; drop it, or --thinking false."


def data(flags: Flags) -> Iterator[str]:
    """Groups with a gradient, a model that can read the prompts, and a reward that can judge the answers."""
    built_in, other_terms = flags.dataset in BUILT_IN, flags.kl_coef > 0 or flags.entropy_coef > 0
    filtered = flags.zero_variance_filter or flags.dynamic_sampling
    if flags.rollouts == 1 and flags.max_steps and (filtered or not other_terms):
        yield "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more."
    if flags.normalize_advantages == "maxrl" and flags.length_control == "penalty" and flags.penalty_on == "all":
        yield "--normalize_advantages maxrl divides by the pass rate; use --penalty_on correct, or another."
    if flags.dynamic_sampling and flags.reward == "shuffled":
        yield "--dynamic_sampling looks at true rewards; use --reward task with it."
    if built_in and flags.reward not in ("task", "shuffled"):
        yield f"--reward {flags.reward} judges data sets; the built-in task has `task` and `shuffled`."
    if judged_by_code(flags) and not flags.unsafe_code:
        yield "--dataset judged by code runs what the model writes; read docs/code.md, then add --unsafe_code true."
    if flags.prompt_order == "easy_first" and flags.dataset != "graded":
        yield "--prompt_order easy_first is for --dataset graded; sort your rows (tools/score.py) and give `file`."
    if flags.prompt_order == "file" and (built_in or "=" in flags.dataset):
        yield "--prompt_order file is for data sets without weights; leave out one of the two."
    if not built_in and not flags.model:
        yield "--dataset needs --model, whose tokenizer encodes the prompts."


def model(flags: Flags) -> Iterator[str]:
    """Files and packages that are there, and an engine for this model."""
    positions = flags.tokens_per_microbatch
    if flags.share_prompts and positions > LONGEST_MASK and torch.cuda.is_available():  # a CPU computes no other way
        needs = f"a mask of {positions} x {positions}; lower --tokens_per_microbatch to {LONGEST_MASK}"
        yield f"--share_prompts true needs {needs}, or leave it out."
    if Path(flags.model).is_absolute() and not Path(flags.model, "config.json").is_file():
        yield f"--model {flags.model} is no folder of a Hugging Face model; it has no config.json."
    if has_adapters(flags) and not find_spec("peft"):
        yield "--lora_rank and --lora_adapter need a package: pip install peft, or leave them out."
    if flags.lora_adapter and not Path(flags.lora_adapter, "adapter_config.json").is_file():
        yield f"--lora_adapter {flags.lora_adapter} is no folder of an adapter; it has no adapter_config.json."
    if flags.engine == "torch" and (flags.dtype != "float32" or (flags.model and not is_qwen3(flags.model))):
        what = "the built-in model, or a folder of another Qwen3, in float32"
        yield f"--engine torch samples from {what}; leave out --model and --dtype, or --engine."
    if flags.report_to != "none" and not find_spec(flags.report_to):  # accelerate would go on without a word
        yield f"--report_to {flags.report_to}: pip install {flags.report_to}, or leave it out."


def idle_flags(flags: Flags) -> Iterator[str]:
    """Flags that were changed and would do nothing, by the table NEEDS."""
    for names, (what, has) in NEEDS.items():
        for name in names.split():
            if getattr(flags, name) != DEFAULTS[name] and not has(flags):
                yield f"--{name} {getattr(flags, name)} does nothing without {what}; change that, or leave it out."


def stale_tokens(flags: Flags) -> Iterator[str]:
    """A mask that the loss can use, between limits that leave something."""
    if flags.mask == "truncate" and flags.loss not in ("dapo", "grpo"):
        yield f"--mask truncate caps rho, which --loss {flags.loss} caps itself or does not have; use dapo or grpo."
    elif flags.mask != "none":
        nothing = torch.zeros(1, 1)
        try:
            masks.MASKS[flags.mask](nothing, nothing, nothing, nothing, **mask_options(flags))
        except ValueError as error:
            yield f"--mask_low {flags.mask_low} and --mask_high {flags.mask_high}: {error}"


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
    k, steps = flags.k, flags.max_steps
    if flags.schedule == "ppo_off_policy":
        flags.max_steps = -(-steps // k) * k
        if steps % k:
            yield f"--max_steps {steps} is rounded up to {flags.max_steps}, a multiple of --k {k}"
    if flags.min_ready and flags.dynamic_sampling:
        yield f"--min_ready {flags.min_ready} does nothing with --dynamic_sampling, which takes groups singly"
        flags.min_ready = 0


def notes(flags: Flags) -> Iterator[str]:
    """What works, but not as its name or the defaults promise."""
    if flags.loss == "tis" and (flags.schedule == "pipeline" or flags.k == 1):
        yield (
            "--loss tis: every batch gets one update, so pi_old is pi, the clip never acts and it equals --loss cispo "
            "--eps_max 2"
        )
    if flags.loss == "gspo" and flags.aggregation != "sample":
        yield f"--loss gspo with --aggregation {flags.aggregation}: GSPO's own paper averages by --aggregation sample"
    usual = [name for name in USUAL if getattr(flags, name) == DEFAULTS[name]]  # left as they are
    if flags.length_control != "interruption":
        if "min_budget" not in usual:
            yield f"--min_budget {flags.min_budget} does nothing without --length_control interruption"
        usual = [name for name in usual if name != "min_budget"]
    if usual and flags.dataset not in BUILT_IN:
        left = ", ".join(f"--{name} {DEFAULTS[name]} (usual for a real model: {USUAL[name]})" for name in usual)
        yield f"left at what suits the built-in task: {left}"


def lr_note(flags: Flags) -> str:
    """The learning rate, and where it comes from."""
    default, whose = DEFAULTS["lr"], "the built-in model"
    if flags.dataset not in BUILT_IN:
        default, whose = PRETRAINED_LR, "a pretrained model (the paper's 8B: 5e-7; `make real`, 135M: 1e-5)"
    if flags.lr == default:
        return f"--lr {flags.lr:g}: the default for {whose}"
    return f"--lr {flags.lr:g}: given, now or before a resume; {default:g} is the default for {whose}"
