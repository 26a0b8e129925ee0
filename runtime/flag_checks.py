"""What is refused before anything is loaded, and what is said."""

import math
import operator
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from runtime.flags import DEFAULTS, Flags, UsageError, engine_options

HOLDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

# Flags that do nothing beside others: names -> (what they need, whether these flags have it).
NEEDS: dict[str, tuple[str, Callable[[Flags], bool]]] = {
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

USUAL = {  # for real models, where the default is the built-in task's
    "lr": "5e-7 to 1e-6",
    "min_budget": "768 to 10000",
    "max_budget": "1024 to 12000",
    "answer_budget": "128 to 2000",
}


def check_flags(flags: Flags) -> list[str]:
    """Raises UsageError for what cannot work, before anything is loaded; returns notes on what was adjusted."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise UsageError(message)

    for item in fields(flags):
        bounds, value = item.metadata["bounds"], getattr(flags, item.name)
        good = not bounds or (math.isfinite(value) and all(HOLDS[word](value, x) for word, x in bounds.items()))
        wanted = " and ".join(f"{word.replace('_', ' ')} {x}" for word, x in bounds.items())
        need(good, f"--{item.name} must be {wanted}, not {value}.")
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
    if flags.lr_schedule == "cosine" and (flags.max_sampled_tokens or flags.max_hours or flags.max_device_hours):
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
