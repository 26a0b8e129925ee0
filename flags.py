"""Every flag of `train.py`, grouped by concept, and what is refused before anything is loaded.

The defaults are the ScaleRL recipe (arXiv 2510.13786) scaled to the built-in task. Every ingredient has an off value or
an alternative, so that an ablation is one flag. Section numbers in the help lines are the paper's.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal


class UsageError(ValueError):
    """A flag that cannot work; the message names it and the fix."""


def flag(default: Any, text: str) -> Any:
    """A dataclass field with a help line."""
    return field(default=default, metadata={"help": text})


OF_ONE_CALL = ("resume", "output_dir", "overwrite", "eval_only", "dry_run")  # a resumed run does not take these over

# ---------------------------------------------------------------------------------------------------------------- flags


@dataclass
class RunFlags:
    """The run: length, evaluation, files."""

    _argument_group_name = "run"
    output_dir: str = flag("runs/demo", "Folder of this run's files.")
    overwrite: bool = flag(False, "Delete an existing run in --output_dir first.")
    resume: str = flag("", "Folder of a run to go on with; its flags are taken over, flags given here win.")
    seed: int = flag(0, "Seed of prompts, budgets, sampling and the warm start.")
    max_steps: int = flag(130, "Batches to train on.")
    max_tokens: int = flag(0, "Stop after this many sampled completion tokens; 0 means no limit.")
    max_hours: float = flag(0.0, "Stop after this many hours, those before a resume too; 0 means no limit.")
    max_device_hours: float = flag(0.0, "Stop after this many device-hours, evaluation not counted; 0: no limit.")
    eval_every: int = flag(5, "Evaluate the held-out prompts every so many steps, at the start and at the end.")
    eval_problems: int = flag(256, "Held-out prompts of each data set per evaluation.")
    eval_samples: int = flag(1, "Completions per held-out prompt (the paper's mean@16 has 16).")  # P2
    probe_every: int = flag(5, "Check generator against trainer log-probs on 16 completions every so many steps.")
    save_every: int = flag(30, "Checkpoint every so many steps and at the end; 0 means at a stop only.")
    keep: int = flag(2, "Checkpoints to keep.")
    eval_only: bool = flag(False, "Evaluate the model, or that of --resume, once, print it, write nothing.")
    dry_run: bool = flag(False, "Print the resolved configuration and what would run, then end.")
    report_to: Literal["none", "tensorboard", "wandb"] = flag("none", "Also log through this tracker.")


@dataclass
class ModelFlags:
    """The model and its numbers."""

    _argument_group_name = "model"
    model: str = flag("", "Folder or hub id of a causal LM; empty means the built-in warm-started one.")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "Dtype of generator and forward pass; weights stay FP32.")
    fp32_head: bool = flag(True, "FP32 logits in trainer and generator (section 3.2); changes nothing in float32.")
    temperature: float = flag(1.0, "Sampling temperature; the trainer's log-probs use it too.")  # O2
    cache_dir: str = flag("runs/cache", "Where the warm-started model is kept.")
    attn_implementation: str = flag("", "Attention of the trainer: sdpa, eager, flash_attention_2; empty: its default.")
    peak_tflops: float = flag(0.0, "Peak TFLOP/s of a trainer's device; metrics.jsonl then has `mfu`. 0: not known.")
    gradient_checkpointing: bool = flag(False, "Recompute the body's activations in the backward pass.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model's files.")


@dataclass
class DataFlags:
    """Prompts and rewards."""

    _argument_group_name = "data"
    dataset: str = flag(
        "chain", "`chain` (built in), or .jsonl / .parquet files or hub ids: NAME[:CONFIG[:SPLIT]][=WEIGHT],..."
    )
    prompts: int = flag(2048, "Training prompts of the built-in task.")
    rambling: float = flag(0.35, "Built-in task: share of its warm start that thinks all over again; 1: length-hungry.")
    prompt_column: str = flag("", "Column of the prompt; empty looks for the usual names.")
    answer_column: str = flag("", "Column of the answer; empty looks for the usual names.")
    prompt_template: str = flag("{prompt}", "Text around the prompt.")
    apply_chat_template: bool = flag(True, "Put prompts into the tokenizer's chat template, if it has one.")
    held_out: int = flag(1000, "Prompts of each data set kept for evaluation, by a stable hash.")
    max_prompt_tokens: int = flag(2048, "Longer prompts are left out and counted.")
    reward: str = flag(
        "task", "`task`: the data's own (exact for chain, math else); `math`, `exact`, `module:function`, one for each "
        "data set; `shuffled`: the task's, permuted within the batch, as a control.",
    )  # fmt: skip
    reward_workers: int = flag(2, "Processes that judge answers to data sets.")
    reward_timeout: float = flag(8.0, "Seconds for one answer, then its worker is replaced.")
    reward_errors: Literal["raise", "zero"] = flag("raise", "A reward function that raises ends the run, or scores 0.")
    thinking: Literal["auto", "true", "false"] = flag(
        "auto", "Whether the model thinks before it answers; `auto`: if its tokenizer knows </think>; `false`: the "
        "whole completion is judged.",
    )  # fmt: skip
    end_of_thinking: str = flag("", "Text that ends thinking; empty finds it from the tokenizer.")
    interruption_phrase: str = flag("", "Text appended to thinking that is cut; empty means the paper's.")
    stop_tokens: str = flag("", "Comma-separated tokens that end a completion; empty finds them from the tokenizer.")


@dataclass
class ScheduleFlags:
    """Asynchrony (section 3.1)."""

    _argument_group_name = "schedule"
    schedule: Literal["pipeline", "ppo_off_policy"] = flag("pipeline", "PipelineRL-k or PPO-off-policy-k.")
    k: int = flag(8, "Most steps off-policy; 0 (pipeline only) is on-policy.")
    batch_prompts: int = flag(32, "B, prompts per optimiser step.")
    rollouts: int = flag(16, "G, completions per prompt.")
    max_ready: int = flag(0, "Admission stops while this many groups are ready; 0 means B, and --min_ready more.")
    min_ready: int = flag(0, "Groups that stay ready behind each batch: holds the lag up, by about min_ready / B.")
    max_num_seqs: int = flag(512, "Requests inside each engine at once (so --data_parallel times as many in all).")
    tensor_parallel: int = flag(1, "Generator: devices that share one engine's tensors.")
    data_parallel: int = flag(1, "Generator: engines that share the prompts; each gets every update.")
    generator_devices: str = flag("", "Generator: this host's GPUs as 2,3; empty takes free ones, else the trainer's.")
    weight_channel: Literal["auto", "file", "ipc", "nccl"] = flag(
        "auto", "New weights: `file` (shared memory), `ipc` (trainer's own GPU), `nccl` (other GPUs)."
    )
    weight_address: str = flag("127.0.0.1", "nccl: address of rank 0's host; another for engines on other hosts.")
    gpu_memory_utilization: float = flag(0.0, "Generator: share of a GPU's memory; 0: .35 on a trainer's, else vLLM's.")
    engine_args: str = flag("", "More of vLLM's engine arguments: KEY=VALUE,... (values as JSON or words).")
    max_restarts: int = flag(1, "Deaths of the engine that a run survives within --restart_window.")
    restart_window: int = flag(100, "Policy versions after which a death of the engine no longer counts.")


@dataclass
class LossFlags:
    """Loss, averages, advantages (Eq. 5)."""

    _argument_group_name = "loss"
    loss: Literal["cispo", "gspo", "dapo", "grpo", "tis"] = flag("cispo", "Policy loss.")
    aggregation: Literal["prompt", "sample", "token", "constant"] = flag("prompt", "Average of the token losses.")
    normalize_advantages: Literal["batch", "prompt", "none"] = flag("batch", "Std that divides the advantages.")
    eps_max: float = flag(5.0, "CISPO: absolute cap on rho.")
    eps_low: float = flag(-1.0, "Lower clip of gspo, dapo, grpo, tis; negative means the loss's own default.")
    eps_high: float = flag(-1.0, "Upper clip of gspo, dapo, tis; negative means the loss's own default.")
    tis_cap: float = flag(2.0, "TIS: cap on pi_train_old / pi_gen.")
    tis_level: Literal["token", "sequence"] = flag("token", "TIS: that ratio per token, or its product per sequence.")
    kl_coef: float = flag(0.0, "Weight of the KL penalty to the initial model; the paper uses none.")
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k3", "KL estimator; k1 is a monitor, not a loss.")
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus; the paper uses none.")


@dataclass
class FilterFlags:
    """Which prompts and rollouts train (section 3.2)."""

    _argument_group_name = "filters"
    zero_variance_filter: bool = flag(True, "Drop groups with equal rewards from loss and denominators.")
    dynamic_sampling: bool = flag(False, "DAPO instead: replace such groups until the batch is full.")
    pass_rate_threshold: float = flag(0.9, "Retire prompts solved this often; above 1 none ever is.")
    pass_rate_window: Literal["cumulative", "latest"] = flag("cumulative", "Which groups count for it.")
    truncated_rollouts: Literal["keep", "drop"] = flag(  # O3
        "keep", "Rollouts cut at the cap: wrong answers, or not trained."
    )


@dataclass
class LengthFlags:
    """Length control (section 2)."""

    _argument_group_name = "length"
    length_control: Literal["interruption", "penalty", "none"] = flag("interruption", "How thinking is kept short.")
    # T3: the paper's budgets are 10,000 to 12,000 tokens
    min_budget: int = flag(26, "Least thinking tokens before the interruption; drawn per rollout.")
    max_budget: int = flag(30, "Most thinking tokens before the interruption.")
    answer_budget: int = flag(4, "Tokens for the answer.")
    penalty_window: int = flag(8, "Penalty: L_cache, tokens before the cap over which it grows to -1.")
    penalty_on: Literal["correct", "all"] = flag("correct", "Penalty on correct answers (ScaleRL) or all (DAPO).")


@dataclass
class OptimizerFlags:
    """AdamW and the trainer's memory."""

    _argument_group_name = "optimizer"
    lr: float = flag(5e-4, "Learning rate (the paper's 8B model: 5e-7).")
    lr_schedule: Literal["constant", "cosine"] = flag("constant", "After the warm-up: constant (paper) or cosine to 0.")
    lr_scale: Literal["none", "sqrt"] = flag("none", "`sqrt`: lr * sqrt(B * G / 1024) (IsoCompute, arXiv 2603.12151).")
    warmup_steps: int = flag(5, "Steps of linear warm-up (paper: 100).")
    # O1: the paper does not say its betas
    beta1: float = flag(0.9, "AdamW beta 1.")
    beta2: float = flag(0.95, "AdamW beta 2 (the paper does not say; MiniMax-M1's).")
    adam_eps: float = flag(1e-15, "AdamW epsilon (paper: 1e-15).")
    weight_decay: float = flag(0.01, "AdamW weight decay.")
    clip_grad: float = flag(1.0, "Largest norm of the gradient.")  # O2
    tokens_per_microbatch: int = flag(2048, "Positions per forward pass, padding counted.")
    packed: bool = flag(False, "Pack sequences end to end instead of padding sorted rows.")
    threads: int = flag(1, "CPU threads of each trainer process.")


FLAGS = (RunFlags, ModelFlags, DataFlags, ScheduleFlags, LossFlags, FilterFlags, LengthFlags, OptimizerFlags)
DEFAULTS = {item.name: item.default for group in FLAGS for item in fields(group)}

# Flags that do nothing beside others: names -> (what they need, whether these flags have it).
NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "eps_max": ("--loss cispo", lambda flags: flags.loss == "cispo"),
    "eps_low": ("--loss gspo, dapo, grpo or tis", lambda flags: flags.loss != "cispo"),
    "eps_high": (  # "clip-higher"
        "--loss gspo, dapo or tis (grpo's clip is symmetric)", lambda flags: flags.loss in ("gspo", "dapo", "tis")
    ),
    "tis_cap tis_level": ("--loss tis", lambda flags: flags.loss == "tis"),
    "kl_estimator": ("--kl_coef above 0", lambda flags: flags.kl_coef > 0),
    "penalty_window penalty_on": ("--length_control penalty", lambda flags: flags.length_control == "penalty"),
    "zero_variance_filter": ("--dynamic_sampling false", lambda flags: not flags.dynamic_sampling),
    "pass_rate_window": ("a --pass_rate_threshold of at most 1", lambda flags: flags.pass_rate_threshold <= 1),
    "restart_window": ("--max_restarts above 0", lambda flags: flags.max_restarts > 0),
    "prompts": ("--dataset chain", lambda flags: flags.dataset == "chain"),
    "rambling": ("the built-in model (no --model)", lambda flags: not flags.model),
    "prompt_column answer_column prompt_template held_out max_prompt_tokens reward_workers reward_timeout "
    "reward_errors thinking apply_chat_template end_of_thinking stop_tokens": (
        "a --dataset", lambda flags: flags.dataset != "chain"
    ),
    "interruption_phrase": (
        "--length_control interruption and a --dataset",
        lambda flags: flags.length_control == "interruption" and flags.dataset != "chain",
    ),
}

OWN_FLAG = {  # vLLM's arguments that the trainer must know of
    "tensor_parallel_size": "tensor_parallel",
    "data_parallel_size": "data_parallel",
    "max_num_seqs": "max_num_seqs",
    "model": "model",
    "dtype": "dtype",
    "seed": "seed",
}

USUAL = {  # for real models, where the default is the built-in task's
    "lr": "5e-7 to 1e-6",
    "min_budget": "768 to 10000",
    "max_budget": "1024 to 12000",
    "answer_budget": "128 to 2000",
}


def parse_flags(argv: Sequence[str], description: str) -> Any:
    """All flags as one namespace; with --resume those of the earlier run, unless given again. argparse itself ends with
    exit code 2 on an unknown flag or choice. Raises UsageError."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(FLAGS, prog="train.py", description=description.split("\n")[0], allow_abbrev=False)
    flags = parser.parse_args(argv)
    if flags.resume:
        config = Path(flags.resume) / "config.json"
        if not config.is_file():
            raise UsageError(f"--resume {flags.resume}: there is no {config}; give the folder of an earlier run.")
        saved = json.loads(config.read_text())
        kept = {name: value for name, value in saved.items() if hasattr(flags, name) and name not in OF_ONE_CALL}
        parser.set_defaults(**kept)
        flags = parser.parse_args(argv)
        flags.output_dir = flags.resume
    return flags


def check_flags(flags: Any) -> list[str]:
    """Raises UsageError for what cannot work, before anything is loaded; returns notes on what was adjusted."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise UsageError(message)

    bounds = {  # names: (least, whether that value itself is allowed, largest, not allowed itself)
        "batch_prompts rollouts max_steps eval_every eval_problems eval_samples probe_every keep prompts min_budget "
        "answer_budget tokens_per_microbatch threads held_out max_prompt_tokens reward_workers tensor_parallel "
        "data_parallel restart_window": (1, True, math.inf),
        "lr temperature eps_max pass_rate_threshold clip_grad tis_cap adam_eps reward_timeout": (0, False, math.inf),
        "max_tokens max_hours max_device_hours save_every max_ready min_ready warmup_steps weight_decay kl_coef "
        "entropy_coef max_restarts peak_tflops": (0, True, math.inf),
        "beta1 beta2 gpu_memory_utilization": (0, True, 1),
    }
    for names, (least, included, most) in bounds.items():
        for name in names.split():
            value = getattr(flags, name)
            good = (value >= least if included else value > least) and value < most
            below = f" and below {most}" if most < math.inf else ""
            need(good, f"--{name} must be {'at least' if included else 'above'} {least}{below}, not {value}.")
    least = 1 if flags.schedule == "ppo_off_policy" else 0
    need(flags.k >= least, f"--k must be at least {least} with --schedule {flags.schedule}, not {flags.k}.")
    size, most = flags.batch_prompts, flags.k * flags.batch_prompts
    pipeline = flags.schedule == "pipeline"
    need(
        flags.min_ready == 0 or pipeline,
        "--min_ready works with --schedule pipeline; with ppo_off_policy the lag is set by --k alone.",
    )
    need(
        flags.min_ready <= most,
        f"--min_ready {flags.min_ready} is never met: at most --k * --batch_prompts = {most} groups wait behind a "
        "batch; lower it or raise --k.",
    )
    need(
        flags.max_ready == 0 or not pipeline or flags.max_ready >= size + flags.min_ready,
        f"--max_ready {flags.max_ready} would never let a batch be ready; give at least --batch_prompts + --min_ready "
        f"= {size + flags.min_ready}, or 0.",
    )
    need(
        flags.rollouts <= flags.max_num_seqs * flags.data_parallel,
        f"--rollouts {flags.rollouts} do not fit the engine; raise --max_num_seqs (now {flags.max_num_seqs}).",
    )
    need(
        flags.length_control != "interruption" or flags.min_budget <= flags.max_budget,
        f"--min_budget {flags.min_budget} is above --max_budget {flags.max_budget}; lower the one or raise the other.",
    )
    filtered = flags.zero_variance_filter or flags.dynamic_sampling
    other_terms = flags.kl_coef > 0 or flags.entropy_coef > 0
    need(
        flags.rollouts > 1 or flags.eval_only or (other_terms and not filtered),
        "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more.",
    )
    need(
        not (flags.dynamic_sampling and flags.reward == "shuffled"),
        "--dynamic_sampling looks at true rewards; use --reward task with it.",
    )
    for name in ("eps_low", "eps_high"):
        need(not math.isnan(getattr(flags, name)), f"--{name} must be a number, not nan; leave it out for the default.")
    need(flags.kl_coef == 0 or flags.kl_estimator != "k1", "--kl_estimator k1 has no useful gradient; use k2 or k3.")
    need(0 <= flags.rambling <= 1, f"--rambling must be from 0 to 1, not {flags.rambling}.")
    cap = flags.max_budget + flags.answer_budget
    need(
        flags.length_control != "penalty" or 1 <= flags.penalty_window <= cap,
        f"--penalty_window must be from 1 to the cap of {cap} tokens (--max_budget + --answer_budget), "
        f"not {flags.penalty_window}.",
    )
    need(
        flags.dataset != "chain" or flags.reward in ("task", "shuffled"),
        f"--reward {flags.reward} judges data sets; the built-in task has `task` and `shuffled`.",
    )
    need(flags.dataset == "chain" or bool(flags.model), "--dataset needs --model, whose tokenizer encodes the prompts.")
    need(
        not Path(flags.model).is_absolute() or Path(flags.model, "config.json").is_file(),
        f"--model {flags.model} is no folder of a Hugging Face model; it has no config.json.",
    )
    need(
        flags.thinking != "false" or flags.length_control != "interruption",
        "--thinking false leaves nothing to interrupt; add --length_control none or --length_control penalty.",
    )
    for name in ("end_of_thinking", "interruption_phrase"):
        need(
            flags.thinking != "false" or not getattr(flags, name),
            f"--{name} is for models that think; drop it, or --thinking false.",
        )
    for names, (what, has) in NEEDS.items():
        for name in names.split():
            value, default = getattr(flags, name), DEFAULTS[name]
            need(
                value == default or has(flags),
                f"--{name} {value} does nothing without {what}; change that, or leave --{name} out (its default is "
                f"{default!r}).",
            )
    need(
        not (flags.resume and flags.overwrite),
        "--overwrite deletes the run that --resume goes on with; take one of the two.",
    )
    need(not (flags.eval_only and flags.overwrite), "--overwrite deletes a run, and --eval_only writes none; take one.")
    folder = Path(flags.output_dir)
    holds_run = (folder / "config.json").exists()
    writes = not (flags.dry_run or flags.eval_only)
    need(
        not writes or holds_run or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"--output_dir {folder} is not empty and holds no run; choose another folder.",
    )
    need(
        bool(flags.resume or flags.overwrite) or not writes or not holds_run,
        f"--output_dir {folder} holds a run; choose another folder, or --resume {folder}, or --overwrite true.",
    )
    need(
        not (flags.overwrite and flags.model and folder.resolve() in Path(flags.model).resolve().parents),
        f"--overwrite would delete --model {flags.model}, which lies in --output_dir; choose another folder.",
    )
    engine_options(flags)
    notes = []
    if flags.max_ready and not pipeline:
        notes.append(f"--max_ready {flags.max_ready} does nothing with --schedule ppo_off_policy")
        flags.max_ready = 0
    if flags.min_ready and flags.dynamic_sampling:
        notes.append(f"--min_ready {flags.min_ready} does nothing with --dynamic_sampling, which takes groups singly")
        flags.min_ready = 0
    if flags.schedule == "ppo_off_policy" and flags.max_steps % flags.k:
        rounded_up = -(-flags.max_steps // flags.k) * flags.k
        notes.append(f"--max_steps {flags.max_steps} is rounded up to {rounded_up}, a multiple of --k {flags.k}")
        flags.max_steps = rounded_up
    if flags.loss == "tis" and (flags.schedule == "pipeline" or flags.k == 1):
        same = f"; with --tis_level token it equals --loss cispo --eps_max {flags.tis_cap:g}"
        notes.append(
            "--loss tis: every batch gets one update, so pi_old is pi and the clip never acts"
            + (same if flags.tis_level == "token" else "")
        )
    if flags.loss == "gspo" and flags.aggregation != "sample":
        notes.append(
            f"--loss gspo with --aggregation {flags.aggregation}: GSPO's own paper averages by --aggregation sample"
        )
    if flags.lr_schedule == "cosine" and (flags.max_tokens or flags.max_hours or flags.max_device_hours):
        notes.append(
            f"--lr_schedule cosine reaches 0 at --max_steps {flags.max_steps}, whatever budget ends the run before; "
            "give as many steps as the budget pays for"
        )
    if flags.length_control != "interruption" and flags.min_budget != DEFAULTS["min_budget"]:
        notes.append(f"--min_budget {flags.min_budget} does nothing without --length_control interruption")
    left = [name for name in USUAL if getattr(flags, name) == DEFAULTS[name]]
    if flags.length_control != "interruption":
        left = [name for name in left if name != "min_budget"]
    if left and flags.dataset != "chain":
        said = ", ".join(f"--{name} {DEFAULTS[name]} (usual for a real model: {USUAL[name]})" for name in left)
        notes.append(f"left at what suits the built-in task: {said}")
    return notes


def engine_options(flags: Any) -> dict[str, Any]:
    """What the flags say of vLLM's engine. Raises UsageError for arguments that cannot be read, or that
    contradict --fp32_head."""
    options: dict[str, Any] = {}
    if flags.tensor_parallel > 1:
        options["tensor_parallel_size"] = flags.tensor_parallel
    if flags.data_parallel > 1:
        options["data_parallel_size"] = flags.data_parallel
    if flags.gpu_memory_utilization:
        options["gpu_memory_utilization"] = flags.gpu_memory_utilization
    if flags.trust_remote_code:
        options["trust_remote_code"] = True
    given = key_values(flags.engine_args)
    for name, flag_of_its_own in OWN_FLAG.items():
        if name in given:
            raise UsageError(f"--engine_args {name}: use --{flag_of_its_own}, which the trainer goes by, too.")
    options |= given
    overrides = options.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        raise UsageError(f"--engine_args hf_overrides must be a JSON object, not {overrides!r}.")
    ours = "float32" if flags.fp32_head else flags.dtype
    if overrides.get("head_dtype", ours) != ours:
        raise UsageError(
            f"--engine_args hf_overrides: head_dtype {overrides['head_dtype']!r} is not the trainer's, {ours!r}; leave "
            "it out and set --fp32_head, which is for both sides."
        )
    return options


def engine_workers(flags: Any) -> int:
    """Processes of all engines together: tensor x data x pipeline parallel."""
    return flags.tensor_parallel * flags.data_parallel * int(engine_options(flags).get("pipeline_parallel_size", 1))


def key_values(text: str) -> dict[str, Any]:
    """KEY=VALUE,... as a dict: a value is JSON, within which commas are its own, or a word. Raises UsageError."""
    found: dict[str, Any] = {}
    while text := text.lstrip(", "):
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise UsageError(f"--engine_args must be KEY=VALUE,..., not {text.split(',')[0]!r}.")
        value, end = value.lstrip(), 0
        with suppress(ValueError):
            found[name], end = json.JSONDecoder().raw_decode(value)
        text = value[end:].lstrip()
        if end and text[:1] in ("", ","):
            continue
        if value.startswith(("{", "[", '"')):
            raise UsageError(f"--engine_args {name}: {value!r} does not begin with a JSON value.")
        found[name], _, text = value.partition(",")  # a word, which may begin like a number
    return found


def merged(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, where `more` wins; dicts within them are merged, too."""
    both = {
        name: merged(options[name], more[name])
        for name in options.keys() & more.keys()
        if isinstance(options[name], dict) and isinstance(more[name], dict)
    }
    return options | more | both
