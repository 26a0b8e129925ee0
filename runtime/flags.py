"""Every flag of `train.py`, grouped by concept, and what is refused before anything is loaded.

The defaults are the ScaleRL recipe (arXiv 2510.13786) scaled to the built-in task. Every ingredient has an off value or
an alternative, so that an ablation is one flag. Section numbers in the help lines are the paper's.
"""

import json
from collections.abc import Sequence
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

OWN_FLAG = {  # vLLM's arguments that the trainer must know of
    "tensor_parallel_size": "tensor_parallel",
    "data_parallel_size": "data_parallel",
    "max_num_seqs": "max_num_seqs",
    "model": "model",
    "dtype": "dtype",
    "seed": "seed",
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


def changed_flags(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each flag that a resumed run has otherwise than before."""
    changed = [name for name in new if name not in OF_ONE_CALL and name in old and new[name] != old[name]]
    return [f"--{name} is now {new[name]} (it was {old[name]})" for name in changed]


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
