"""ScaleRL end to end: asynchronous reinforcement learning of a language model, with every ingredient a flag.

    python train.py                                    # the built-in task on a laptop CPU: the whole recipe, k = 8
    python train.py --loss dapo --aggregation token    # change one ingredient
    python train.py --help                             # every flag, by concept

The recipe (arXiv 2510.13786) and where each part stands:

    sample       PipelineRL, k steps off-policy, weights swapped in flight     pipeline_rl.py
    interrupt    thinking cut at a random budget, then an answer               length_control.py
    filter       equal rewards out of the batch, solved prompts out for good   filters.py
    advantage    reward minus the prompt's mean, over the batch's std          losses.py
    loss         CISPO, averaged per prompt, FP32 logits                       losses.py, fp32_head.py
    predict      a sigmoid of pass rate against compute                        fit_sigmoid.py

This file is the glue: flags, the loop, evaluation, logging, checkpoints. `train` is the loop.
Words: a step takes one batch of B groups; the version counts optimiser steps (a skipped batch makes none).
"""

import json
import math
import os
import random
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import filters
# import fit_sigmoid
import fp32_head
import length_control
import losses
import pipeline_rl
import policy as policies
import tasks


class UsageError(ValueError):
    """A flag that cannot work; the message names it and the fix."""


def flag(default: Any, text: str) -> Any:
    """A dataclass field with a help line."""
    return field(default=default, metadata={"help": text})


# ---------------------------------------------------------------------------------------------------------------- flags


@dataclass
class RunFlags:
    """The run: length, evaluation, files."""

    _argument_group_name = "run"
    output_dir: str = flag("runs/demo", "Folder of this run's files.")
    overwrite: bool = flag(False, "Delete an existing run in --output_dir first.")
    resume: str = flag("", "Folder of a run to go on with; its flags are taken over, flags given here win.")
    seed: int = flag(0, "Seed of prompts, budgets, sampling and the warm start.")
    max_steps: int = flag(90, "Batches to train on.")
    max_tokens: int = flag(0, "Stop after this many sampled completion tokens; 0 means no limit.")
    max_hours: float = flag(0.0, "Stop after this many hours of wall time; 0 means no limit.")
    eval_every: int = flag(10, "Evaluate the held-out prompts every so many steps, at the start and at the end.")
    eval_problems: int = flag(512, "Held-out prompts per evaluation.")
    eval_samples: int = flag(2, "Completions per held-out prompt (the paper's mean@16 has 16).")
    probe_every: int = flag(5, "Check generator against trainer log-probs on a short probe every so many steps.")
    save_every: int = flag(30, "Checkpoint every so many steps; 0 means none.")
    keep: int = flag(2, "Checkpoints to keep.")
    eval_only: bool = flag(False, "Evaluate the model once and end.")
    dry_run: bool = flag(False, "Print the resolved configuration and what would run, then end.")
    report_to: Literal["none", "tensorboard", "wandb"] = flag("none", "Also log through this tracker.")


@dataclass
class ModelFlags:
    """The model and its numbers."""

    _argument_group_name = "model"
    model: str = flag("", "Folder or hub id of a causal LM; empty means the built-in warm-started one.")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "Dtype of generator and forward pass; weights stay FP32.")
    fp32_head: bool = flag(True, "FP32 logits in trainer and generator (section 3.2); changes nothing in float32.")
    temperature: float = flag(1.0, "Sampling temperature; the trainer's log-probs use it too.")
    cache_dir: str = flag("runs/cache", "Where the warm-started model is kept.")


@dataclass
class DataFlags:
    """Prompts and rewards."""

    _argument_group_name = "data"
    dataset: str = flag("chain", "`chain`, the built-in task.")
    reward: Literal["task", "shuffled"] = flag("task", "`shuffled` permutes rewards within the batch: a control.")
    prompts: int = flag(2048, "Training prompts of the built-in task.")


@dataclass
class ScheduleFlags:
    """Asynchrony (section 3.1)."""

    _argument_group_name = "schedule"
    schedule: Literal["pipeline", "ppo_off_policy"] = flag("pipeline", "PipelineRL-k or PPO-off-policy-k.")
    k: int = flag(8, "Most steps off-policy; 0 (pipeline only) is on-policy.")
    batch_prompts: int = flag(32, "B, prompts per optimiser step.")
    rollouts: int = flag(16, "G, completions per prompt.")
    max_ready: int = flag(0, "Admission stops while this many finished groups wait; 0 means B.")
    max_num_seqs: int = flag(256, "Requests inside the engine at once.")


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
    truncated_rollouts: Literal["keep", "drop"] = flag("keep", "Rollouts cut at the cap: wrong answers, or not trained.")


@dataclass
class LengthFlags:
    """Length control (section 3.2)."""

    _argument_group_name = "length"
    length_control: Literal["interruption", "penalty", "none"] = flag("interruption", "How thinking is kept short.")
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
    warmup_steps: int = flag(5, "Steps of linear warm-up (paper: 100).")
    beta1: float = flag(0.9, "AdamW beta 1.")
    beta2: float = flag(0.95, "AdamW beta 2 (the paper does not say; MiniMax-M1's).")
    adam_eps: float = flag(1e-15, "AdamW epsilon (paper: 1e-15).")
    weight_decay: float = flag(0.01, "AdamW weight decay.")
    clip_grad: float = flag(1.0, "Largest norm of the gradient.")
    tokens_per_microbatch: int = flag(2048, "Positions per forward pass, padding counted.")
    packed: bool = flag(False, "Pack sequences end to end instead of padding sorted rows.")
    threads: int = flag(1, "CPU threads of each trainer process.")


FLAGS = (RunFlags, ModelFlags, DataFlags, ScheduleFlags, LossFlags, FilterFlags, LengthFlags, OptimizerFlags)


def parse_flags(argv: Sequence[str]) -> Any:
    """All flags as one namespace. argparse itself ends with exit code 2 on an unknown flag or choice."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(FLAGS, prog="train.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    flags = parser.parse_args(argv)
    if flags.resume:
        config = Path(flags.resume) / "config.json"
        if not config.is_file():
            raise UsageError(f"--resume {flags.resume}: there is no {config}; give the folder of an earlier run.")
        saved = json.loads(config.read_text())
        parser.set_defaults(**{name: value for name, value in saved.items() if hasattr(flags, name)})
        flags = parser.parse_args(argv)
        flags.output_dir = flags.resume
    return flags


def check_flags(flags: Any) -> None:
    """Raises UsageError for what cannot work, before anything is loaded."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise UsageError(message)

    for name in ("batch_prompts", "rollouts", "max_steps", "eval_every", "eval_problems", "eval_samples", "prompts",
                 "answer_budget", "min_budget", "tokens_per_microbatch", "threads"):  # fmt: skip
        need(getattr(flags, name) >= 1, f"--{name} must be at least 1, not {getattr(flags, name)}.")
    for name in ("lr", "temperature", "eps_max", "pass_rate_threshold", "clip_grad", "tis_cap"):
        need(0 < getattr(flags, name) < math.inf, f"--{name} must be above 0, not {getattr(flags, name)}.")
    least = 1 if flags.schedule == "ppo_off_policy" else 0
    need(flags.k >= least, f"--k must be at least {least} with --schedule {flags.schedule}, not {flags.k}.")
    need(
        flags.rollouts <= flags.max_num_seqs,
        f"--rollouts {flags.rollouts} do not fit the engine; raise --max_num_seqs (now {flags.max_num_seqs}).",
    )
    need(
        flags.min_budget <= flags.max_budget,
        f"--min_budget {flags.min_budget} is above --max_budget {flags.max_budget}; swap them.",
    )
    need(
        not (flags.dynamic_sampling and flags.reward == "shuffled"),
        "--dynamic_sampling looks at true rewards; use --reward task with it.",
    )
    need(flags.kl_coef == 0 or flags.kl_estimator != "k1", "--kl_estimator k1 has no useful gradient; use k2 or k3.")
    folder = Path(flags.output_dir)
    need(
        bool(flags.resume or flags.overwrite or flags.dry_run) or not (folder / "config.json").exists(),
        f"--output_dir {folder} holds a run; choose another folder, or --resume {folder}, or --overwrite true.",
    )


# ------------------------------------------------------------------------------------------------- prompts and batches


class PromptStream:
    """Training prompts, epoch after epoch, each epoch in its own shuffled order; retired prompts are passed over.

    Its place is two numbers, because the order of an epoch depends on seed and epoch alone.
    """

    def __init__(self, problems: Sequence[Any], seed: int, retired: Callable[[str], bool]):
        self.problems, self.seed, self.retired = problems, seed, retired
        self.epoch = self.position = 0
        self.first: deque[Any] = deque()  # prompts that a resumed run must admit before all others

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.first:
            return self.first.popleft()
        for _ in range(2):  # the rest of this epoch, then at most one whole epoch
            order = list(range(len(self.problems)))
            random.Random(f"{self.seed} epoch {self.epoch}").shuffle(order)
            while self.position < len(order):
                problem = self.problems[order[self.position]]
                self.position += 1
                if not self.retired(problem.key):
                    return problem
            self.epoch, self.position = self.epoch + 1, 0
        raise StopIteration  # every prompt is retired


@dataclass
class Batch:
    """The rows that one optimiser step trains on, and the counts of those it does not; tensors over all ranks' rows."""

    rows: list[policies.Row]
    behaviour_logprobs: Tensor  # (N, T)
    mask: Tensor  # (N, T)
    advantages: Tensor  # (N,)
    weights: Tensor  # (N, T)
    old_logprobs: Tensor | None = None  # (N, T), for TIS


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """(N, T) with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def shaped_rewards(groups: Sequence[pipeline_rl.Group], flags: Any, rng: random.Random) -> Tensor:
    """(N,) rewards of all rollouts: the verifier's, plus the length penalty, or shuffled for the control."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
    if flags.length_control == "penalty":
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])  # (N,)
        cap = flags.max_budget + flags.answer_budget
        penalty = length_control.overlong_penalty(lengths, cap, flags.penalty_window)
        on = torch.tensor([rollout.correct or flags.penalty_on == "all" for rollout in rollouts])
        rewards = rewards + torch.where(on, penalty, 0.0)
    if flags.reward == "shuffled":
        rewards = rewards[rng.sample(range(len(rewards)), len(rewards))]
    return rewards


def make_batch(groups: Sequence[pipeline_rl.Group], flags: Any, rng: random.Random) -> tuple[Batch | None, dict[str, Any]]:
    """(the batch, or None if no row is left to train on; metrics of everything that was sampled for it)."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompts = [group.problem.prompt_ids for group in groups for _ in group.rollouts]
    prompt_ids = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g.rollouts) for g in groups]))  # (N,)
    rewards = shaped_rewards(groups, flags, rng)  # (N,)
    truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    varied = filters.zero_variance(rewards, prompt_ids)  # (N,)
    keep = varied if flags.zero_variance_filter else torch.ones_like(varied)
    counts = {
        "reward": rewards.mean().item(),
        "pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
        "interrupted": sum(rollout.interrupted for rollout in rollouts) / len(rollouts),
        "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in rollouts]),
        "zero_variance_groups": len(groups) - len(prompt_ids[varied].unique()),
    }
    if not keep.any():
        return None, counts
    # Whole groups leave first; the std is that of the rows that stay.
    advantages = torch.zeros_like(rewards)
    advantages[keep] = losses.normalize_advantages(rewards[keep], prompt_ids[keep], flags.normalize_advantages)
    if flags.truncated_rollouts == "drop":  # single rows leave after the centring, never before
        keep = keep & ~truncated
        counts["truncated_dropped"] = int(truncated.sum())
    if not keep.any():
        return None, counts
    chosen = keep.nonzero().squeeze(1).tolist()
    mask = padded([rollouts[i].mask for i in chosen], torch.bool)  # (N, T)
    constant = flags.max_budget + flags.answer_budget
    weights = losses.aggregation_weights(mask, prompt_ids[keep], flags.aggregation, constant)
    rows = [policies.Row(prompts[i], rollouts[i].completion_ids, rollouts[i].mask) for i in chosen]
    behaviour = padded([rollouts[i].logprobs for i in chosen], torch.float32)
    return Batch(rows, behaviour, mask, advantages[keep], weights), counts | {"rows": len(rows), "trained_tokens": int(mask.sum())}


# ------------------------------------------------------------------------------------------------------------- trainer


class Trainer:
    """Policy and optimiser; the same on every rank, each of which sees the whole batch and computes its share."""

    def __init__(self, flags: Any, accelerator: Any, model_folder: str):
        from transformers import AutoModelForCausalLM

        self.flags, self.accelerator = flags, accelerator
        self.dtype = getattr(torch, flags.dtype)
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self.reference = None
        if flags.kl_coef:
            self.reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
            self.reference = self._policy(self.reference.requires_grad_(False)).to(accelerator.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=flags.lr, betas=(flags.beta1, flags.beta2), eps=flags.adam_eps,
            weight_decay=flags.weight_decay, fused=True,
        )  # fmt: skip
        self.policy, self.optimizer = accelerator.prepare(self._policy(model), optimizer)
        self.model = accelerator.unwrap_model(self.policy).model
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        # The embedding table is looked up, not multiplied; the head is multiplied, tied or not.
        self.parameters_in_flops = sum(p.numel() for p in self.model.parameters()) - embedding.numel()
        self.parameters_in_flops += head.numel() if head is embedding else 0

    def _policy(self, model: torch.nn.Module) -> policies.Policy:
        return policies.Policy(
            model, fp32_head.token_logprobs, fp32_head.rounded, dtype=self.dtype, fp32_head=self.flags.fp32_head,
            temperature=self.flags.temperature, entropy_grad=self.flags.entropy_coef != 0,
        )  # fmt: skip

    def _microbatches(self, rows: list[policies.Row]) -> list[policies.Microbatch]:
        found = policies.microbatches(
            rows, self.flags.tokens_per_microbatch, rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes, packed=self.flags.packed,
        )  # fmt: skip
        return [microbatch.to(self.accelerator.device) for microbatch in found]

    @torch.no_grad()
    def score(self, rows: list[policies.Row]) -> Tensor:
        """(N, T) log-probs of all rows under the policy as it is now, on the CPU; 0 where no token trains."""
        found = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows), device=self.accelerator.device)
        for microbatch in self._microbatches(rows):
            found[microbatch.rows] = self.policy(microbatch)[0]
        return self.accelerator.reduce(found).cpu()  # each rank filled in its own rows

    def gradients(self, batch: Batch) -> dict[str, float]:
        """Adds the batch's gradient; returns the loss and its metrics over all ranks."""
        flags, device, ranks = self.flags, self.accelerator.device, self.accelerator.num_processes
        loss_function = losses.LOSSES[flags.loss]
        clips = clip_options(flags)
        parts = []
        work = self._microbatches(batch.rows)
        for i, microbatch in enumerate(work):
            rows = microbatch.rows.cpu()
            mask, weights = batch.mask[rows].to(device), batch.weights[rows].to(device)  # (n, T)
            with self.accelerator.no_sync(self.policy) if i < len(work) - 1 else nullcontext():
                logprobs, entropy = self.policy(microbatch)  # (n, T)
                if flags.loss == "tis":
                    clips["old_logprobs"] = batch.old_logprobs[rows].to(device)
                token_loss, metrics = loss_function(
                    logprobs, batch.behaviour_logprobs[rows].to(device), batch.advantages[rows].to(device), mask, **clips
                )
                if self.reference is not None:
                    reference = self.reference(microbatch)[0]
                    kl = losses.kl_penalty(logprobs, reference, mask, flags.kl_estimator)
                    token_loss = token_loss + flags.kl_coef * kl
                    metrics["kl_sum"] = kl.detach().sum()
                token_loss = token_loss - flags.entropy_coef * entropy
                loss = (weights * token_loss).sum()  # normalised over the whole batch already
                self.accelerator.backward(loss * ranks)  # data parallelism averages the ranks' gradients
            metrics |= {"loss_sum": loss.detach(), "entropy_sum": (entropy.detach() * mask).sum()}
            parts.append(metrics)
        return self._summary(parts)

    def _summary(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        from accelerate.utils import gather_object

        mine = {name: value.cpu() for name, value in losses.merge_metrics(parts).items()}
        merged = losses.merge_metrics(gather_object([mine]))
        tokens = max(1, int(merged["tokens"]))
        extra = {"loss": merged["loss_sum"].item(), "entropy": merged["entropy_sum"].item() / tokens}
        if "kl_sum" in merged:
            extra["kl"] = merged["kl_sum"].item() / tokens
        return extra | losses.summarise_metrics(merged)

    def update(self, version: int) -> dict[str, float]:
        """The optimiser step that makes `version` + 1. A gradient that is not finite is thrown away and counted."""
        norm = float(self.accelerator.clip_grad_norm_(self.policy.parameters(), self.flags.clip_grad))
        # A function of the version alone, so that a resumed run and any number of ranks have the same schedule.
        lr = self.flags.lr * min(1.0, (version + 1) / max(1, self.flags.warmup_steps))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": lr, "updated": int(math.isfinite(norm))}

    def weights(self) -> dict[str, Tensor]:
        """Whole parameters in the generator's dtype; every rank must call, since gathering shards is a collective."""
        return dict(policies.full_tensors(self.model, self.dtype))


def clip_options(flags: Any) -> dict[str, float]:
    """The chosen loss's keyword options; what was not given stays at the loss's own default."""
    given = {"eps_low": flags.eps_low, "eps_high": flags.eps_high}
    given = {name: value for name, value in given.items() if value >= 0}
    if flags.loss == "cispo":
        return {"eps_max": flags.eps_max}
    if flags.loss == "grpo":
        return {"eps": given["eps_low"]} if "eps_low" in given else {}
    return given | ({"cap": flags.tis_cap} if flags.loss == "tis" else {})


# ------------------------------------------------------------------------------------------------- evaluation and files


class Folder:
    """A run's files. Rank 0 writes; records are flushed line by line, so that what was measured is kept."""

    def __init__(self, flags: Any):
        self.path = Path(flags.output_dir)
        if flags.overwrite and not flags.resume and (self.path / "config.json").exists():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)

    def append(self, name: str, record: dict[str, Any]) -> None:
        """One more line of the JSON lines file `name`."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self, name: str) -> list[dict[str, Any]]:
        """All records of `name`; none if it does not exist."""
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Clock:
    """Compute so far. Start-up and evaluation's share of the time are not counted; a resumed run goes on from its past."""

    def __init__(self, generator: pipeline_rl.Generator, parameters: int, devices: int, past: dict[str, float]):
        self.generator, self.parameters, self.devices, self.past = generator, parameters, devices, past
        self.started = time.monotonic()
        self.trained_tokens = self.forwarded = 0  # tokens in the loss; prompt + completion tokens in forward passes

    def now(self) -> dict[str, float]:
        """tokens (sampled, dropped ones too), trained_tokens, flops and device_hours."""
        counters, past = self.generator.counters, self.past
        seconds = time.monotonic() - self.started - counters.eval_seconds
        # 2 P for each token that the generator computes, 6 P for each that the trainer does
        flops = 2 * self.parameters * (counters.prefilled + counters.sampled) + 6 * self.parameters * self.forwarded
        return {
            "tokens": past.get("tokens", 0) + counters.sampled,
            "trained_tokens": past.get("trained_tokens", 0) + self.trained_tokens,
            "flops": past.get("flops", 0) + flops,
            "device_hours": past.get("device_hours", 0.0) + seconds * self.devices / 3600,
        }


def pass_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Share of prompts with at least one correct sample among their k."""
    return sum(any(samples) for samples in correct) / len(correct)


def evaluation_record(groups: Sequence[Sequence[pipeline_rl.Rollout]]) -> dict[str, Any]:
    """The figures of one evaluation."""
    rollouts = [rollout for group in groups for rollout in group]
    return {
        "pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "pass_at_k": pass_at_k([[rollout.correct for rollout in group] for group in groups]),
        "n_prompts": len(groups),
        "n_samples": len(groups[0]),
        "interrupted": sum(rollout.interrupted for rollout in rollouts) / len(rollouts),
        "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in rollouts]),
        "mean_length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
    }


@dataclass
class Check:
    """Evaluation or probe under way at one version."""

    future: Any  # None on ranks other than 0
    problems: list[Any]
    version: int
    record: dict[str, Any] | None  # of an evaluation: step and compute when it began; None for a probe


class Run:
    """Everything of one run, and what the loop does with it."""

    CHECK_ROWS = 64  # completions that the log-prob check scores
    LARGEST_GAP = 1e-4  # mean |difference| of log-probs in float32 that rounding explains

    def __init__(self, flags: Any):
        from accelerate import Accelerator

        torch.manual_seed(flags.seed)
        torch.set_num_threads(flags.threads)
        self.flags = flags
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), log_with=None if flags.report_to == "none" else flags.report_to,
            project_dir=flags.output_dir,
        )  # fmt: skip
        self.main = self.accelerator.is_main_process
        self.folder = Folder(flags)
        self.task = tasks.ChainTask(seed=flags.seed, pool_size=flags.prompts)
        model = flags.model or str(tasks.warm_start(flags.cache_dir, seed=flags.seed, report=self.say))
        self.trainer = Trainer(flags, self.accelerator, model)
        self.history = filters.PassRateHistory(flags.pass_rate_threshold, flags.pass_rate_window)
        self.prompts = PromptStream(self.task.train, flags.seed, self.history.retired)
        self.rng = random.Random(flags.seed)
        self.step = self.version = 0
        self.check: Check | None = None
        self.evaluated = -1  # step of the last evaluation
        self.generator = self._generator(model) if self.main else None

    def _generator(self, model: str) -> pipeline_rl.Generator:
        flags, task = self.flags, self.task
        control = None
        if flags.length_control == "interruption":
            control = length_control.Interruption(
                flags.min_budget, flags.max_budget, flags.answer_budget, task.phrase_ids, task.end_of_thinking_ids
            )
        longest = max(len(problem.prompt_ids) for problem in [*task.train, *task.held_out])
        return pipeline_rl.Generator(
            model, self.prompts, task.score,
            pipeline_rl.Pacer(flags.batch_prompts, flags.k, schedule=flags.schedule, max_ready=flags.max_ready or None),
            flags.rollouts, task.stop_ids, length_control=control, max_tokens=flags.max_budget + flags.answer_budget,
            temperature=flags.temperature, max_num_seqs=flags.max_num_seqs, max_prompt=longest, dtype=flags.dtype,
            seed=flags.seed, engine_args=fp32_head.GENERATOR_ARGS if flags.fp32_head else {},
        )  # fmt: skip

    def say(self, line: str) -> None:
        """Prints on rank 0, above the progress bar."""
        from tqdm import tqdm

        if self.main:
            tqdm.write(line)
            sys.stdout.flush()

    def start(self) -> None:
        """Starts the generator with the trainer's weights, the clock and the progress bar."""
        from tqdm import tqdm

        weights = self.trainer.weights()
        if self.main:
            self.say("starting vLLM")
            self.generator.start(weights, self.version)
            gpus = torch.cuda.device_count()
            devices = gpus or min(os.cpu_count() or 1, self.accelerator.num_processes * self.flags.threads + 1)
            self.device = torch.cuda.get_device_name() if gpus else "cpu"
            self.clock = Clock(self.generator, self.trainer.parameters_in_flops, devices, {})
            (self.folder.path / "config.json").write_text(json.dumps(vars(self.flags), indent=1))
            self.folder.append("metrics.jsonl", {"config": vars(self.flags)})
            self.bar = tqdm(total=self.flags.max_steps, initial=self.step, unit="step", disable=None, leave=False)
        self.accelerator.init_trackers("scalerl", config=vars(self.flags))

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0] if self.accelerator.num_processes > 1 else value

    # ---- the steps of the loop ----

    def collect(self) -> list[list[pipeline_rl.Group]] | None:
        """The groups of the next steps: one batch of B under `pipeline`, k batches under `ppo_off_policy`; None at the
        end of the run."""
        return self.from_main(self._collect() if self.main else None)

    def _collect(self) -> list[list[pipeline_rl.Group]] | None:
        flags, generator = self.flags, self.generator
        if self.step >= flags.max_steps or self._budget_spent():
            return None
        self.waited = -time.monotonic()
        try:
            if not flags.dynamic_sampling:
                groups = generator.take(generator.pacer.take_size)
            else:
                sampler = filters.DynamicSampling(generator.pacer.take_size)
                while not sampler.full:
                    [group] = generator.take(1)
                    if not sampler.offer(group, [rollout.reward for rollout in group.rollouts]):
                        self.remember([group])
                        generator.release(1)
                self.discarded = sampler.discarded
                groups = sampler.take()
        except (pipeline_rl.Exhausted, filters.PromptsExhausted) as reason:
            self.say(f"{reason}; {self.history.n_retired} of {len(self.task.train)} prompts are retired. The run ends.")
            return None
        self.waited += time.monotonic()
        if flags.schedule == "ppo_off_policy":
            self.rng.shuffle(groups)
        size = flags.batch_prompts
        return [groups[i : i + size] for i in range(0, len(groups), size)]

    def _budget_spent(self) -> bool:
        flags, compute = self.flags, self.clock.now()
        if flags.max_tokens and compute["tokens"] >= flags.max_tokens:
            self.say(f"--max_tokens {flags.max_tokens} reached")
            return True
        if flags.max_hours and (time.monotonic() - self.clock.started) / 3600 >= flags.max_hours:
            self.say(f"--max_hours {flags.max_hours} reached")
            return True
        return False

    def remember(self, groups: Sequence[pipeline_rl.Group]) -> int:
        """Counts consumed groups in the pass-rate history; returns how many were of a prompt retired meanwhile."""
        late = sum(self.history.retired(group.problem.key) for group in groups)
        for group in groups:
            self.history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])
        return late

    def push(self, groups: int, updated: bool) -> None:
        """New weights to the generator; `groups` groups are done with. Without an update they are done with at once."""
        weights = self.trainer.weights() if updated else {}
        if self.main:
            if updated:
                self.generator.push(weights, self.version, release=groups)
            else:
                self.generator.release(groups)

    def begin_check(self) -> None:
        """Starts an evaluation or a probe at the live version, if one is due now."""
        flags = self.flags
        if self.evaluated < 0 or self.step // flags.eval_every > self.evaluated // flags.eval_every:
            self.begin_evaluation()
        elif self.step % flags.probe_every == 0:
            problems = self.rng.sample(self.task.held_out, min(16, len(self.task.held_out)))
            future = self.generator.evaluate(problems, 1) if self.main else None
            self.check = Check(future, problems, self.version, None)

    def begin_evaluation(self) -> None:
        """Starts an evaluation of the held-out prompts at the live version."""
        problems = self.task.held_out[: self.flags.eval_problems]
        self.check = Check(None, problems, self.version, {})
        if self.main:
            self.check.future = self.generator.evaluate(problems, self.flags.eval_samples)
            self.check.record = {"step": self.step, "version": self.version, "device": self.device} | self.clock.now()
        self.evaluated = self.step

    def finish_check(self) -> dict[str, float]:
        """Waits for the evaluation or probe; must come before the weights change. Its completions were made wholly by
        this version, so the trainer's log-probs must be the generator's; in float32 more than LARGEST_GAP ends the run.
        """
        if self.check is None:
            return {}
        check, self.check = self.check, None
        rows, behaviour = self.from_main(self._checked_rows(check) if self.main else None)
        own = self.trainer.score(rows)  # (N, T)
        mask = padded([row.mask for row in rows], torch.bool)
        gap = (own - padded(behaviour, torch.float32))[mask].abs().mean().item()
        if self.flags.dtype == "float32" and not gap <= self.LARGEST_GAP:
            raise RuntimeError(
                f"weights check: at version {check.version} trainer and generator differ by {gap:.1e} nats per token, "
                f"more than {self.LARGEST_GAP}: the generator does not have the trainer's weights."
            )
        return {"logprob_gap": gap}

    def _checked_rows(self, check: Check) -> tuple[list[policies.Row], list[list[float]]]:
        groups = self.generator.result_of(check.future)
        flat = [(problem, r) for problem, group in zip(check.problems, groups, strict=True) for r in group]
        mixed = sum(any(v != check.version for v, m in zip(r.versions, r.mask, strict=True) if m) for _, r in flat)
        if mixed:
            raise RuntimeError(f"{mixed} evaluation completions are not wholly by version {check.version}")
        if check.record is not None:
            record = check.record | evaluation_record(groups)
            self.folder.append("eval.jsonl", record)
            self.accelerator.log({"eval/pass_rate": record["pass_rate"]}, step=self.step)
            self.say(
                f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f} · pass@{record['n_samples']} "
                f"{record['pass_at_k']:.3f} · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
                f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
            )
        chosen = self.rng.sample(flat, min(self.CHECK_ROWS, len(flat)))
        rows = [policies.Row(problem.prompt_ids, r.completion_ids, r.mask) for problem, r in chosen]
        return rows, [r.logprobs for _, r in chosen]

    def log(self, groups: Sequence[pipeline_rl.Group], metrics: dict[str, Any], version: int) -> None:
        """One record and one line a step. `version` is the one before the step."""
        if not self.main:
            return
        found = [lag for group in groups for rollout in group.rollouts for lag in pipeline_rl.lags(rollout, version)]
        counters, now = vars(self.generator.counters).copy(), time.monotonic()
        before, self._counters = getattr(self, "_counters", {}), counters
        passed, self._logged = now - getattr(self, "_logged", self.clock.started), now
        record = {"step": self.step, "version": self.version, "lag_mean": sum(found) / len(found), "lag_max": max(found)}
        record |= metrics | self.clock.now() | {
            "seconds": passed, "trainer_idle": self.waited, "retired": self.history.n_retired,
            "generator_idle": counters["idle_seconds"] - before.get("idle_seconds", 0.0),
            "sync_seconds": counters["sync_seconds"] - before.get("sync_seconds", 0.0),
            "outstanding": self.generator.pacer.outstanding, "epoch": self.prompts.epoch,
        }  # fmt: skip
        self.waited = 0.0
        self.folder.append("metrics.jsonl", record)
        self.accelerator.log({name: x for name, x in record.items() if isinstance(x, int | float)}, step=self.step)
        self.bar.update()
        self.say(step_line(record))
        if (warning := length_control.truncation_warning(record["truncated"])) is not None:
            self.say(warning)

    def sample(self, groups: Sequence[pipeline_rl.Group]) -> None:
        """A few rollouts to read, into samples.jsonl."""
        for group in groups[:2] if self.main else ():
            for rollout in group.rollouts[:2]:
                text = {"prompt": self.task.text(group.problem.prompt_ids), "completion": self.task.text(rollout.completion_ids)}
                record = {"step": self.step, "key": group.problem.key, "reward": rollout.reward, **text}
                self.folder.append("samples.jsonl", record | {"interrupted": rollout.interrupted})

    def score_old(self, batches: Sequence[tuple[Batch | None, dict[str, Any]]]) -> None:
        """TIS needs the trainer's own log-probs from before the first of these steps."""
        for batch, _ in batches if self.flags.loss == "tis" else ():
            if batch is not None:
                batch.old_logprobs = self.trainer.score(batch.rows)

    def count(self, batch: Batch) -> None:
        """Adds what the trainer computed to the clock."""
        if self.main:
            self.clock.trained_tokens += int(batch.mask.sum())
            self.clock.forwarded += sum(map(len, batch.rows))

    def finish(self) -> None:
        """Last evaluation, the final model and the closing table."""
        self.finish_check()
        if self.evaluated != self.step:
            self.begin_evaluation()
            self.finish_check()
        state = {f"{name}": tensor for name, tensor in policies.full_tensors(self.trainer.model, torch.float32)}
        if self.main:
            self.trainer.model.save_pretrained(self.folder.path / "model", state_dict=state)
            self.task.tokenizer.save_pretrained(self.folder.path / "model")
            self.bar.close()
            self.say(self.closing_table())

    def closing_table(self) -> str:
        """Start and end, compute, waiting, lag and where the files are."""
        steps = [record for record in self.folder.read("metrics.jsonl") if "step" in record]
        evals = self.folder.read("eval.jsonl")
        compute = self.clock.now()
        seconds = max(1e-9, sum(record["seconds"] for record in steps))
        rows = {
            "pass rate": f"{evals[0]['pass_rate']:.3f} -> {evals[-1]['pass_rate']:.3f}"
            f" (mean of the last two evaluations {sum(e['pass_rate'] for e in evals[-2:]) / len(evals[-2:]):.3f})",
            "compute": f"{compute['device_hours'] * 3600 / self.clock.devices:.0f} s on {self.clock.devices} x {self.device}"
            f", {compute['flops']:.2e} FLOPs",
            "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
            "generator idle": f"{sum(r['generator_idle'] + r['sync_seconds'] for r in steps) / seconds:.1%}",
            "trainer idle": f"{sum(r['trainer_idle'] for r in steps) / seconds:.1%}",
            "lag mean / max": f"{sum(r['lag_mean'] for r in steps) / max(1, len(steps)):.2f} / "
            f"{max((r['lag_max'] for r in steps), default=0)} (k = {self.flags.k})",
            "files": str(self.folder.path),
        }
        return "\n".join(f"{name:<16}{text}" for name, text in rows.items())

    def close(self) -> None:
        """Ends the generator and the trackers, whatever happened."""
        if self.generator is not None:
            self.generator.close()
        self.task.close()
        self.accelerator.end_training()


def step_line(record: dict[str, Any]) -> str:
    """The line of one step; README explains each number."""
    line = (
        f"step {record['step']:4d} · pass {record['pass_rate']:.3f} · length {record['length']:5.1f} · "
        f"lag {record['lag_mean']:.2f}/{record['lag_max']}"
    )
    if "ratio_max" in record:
        line += (
            f" · rho {record['ratio_mean']:.3f}/{record['ratio_max']:.2f} · ess {record['ess']:.3f} · "
            f"entropy {record['entropy']:.3f} · grad {record['grad_norm']:.2f}"
        )
    return line + f" · waits {record['trainer_idle']:.2f}/{record['generator_idle']:.2f} s · {record['seconds']:.2f} s"


# ------------------------------------------------------------------------------------------------------------- the loop


def train(run: Run) -> None:
    """The loop: collect, filter, advantages, loss, step, push weights, log; evaluation runs beside it."""
    run.begin_check()
    while (parts := run.collect()) is not None:
        batches = [make_batch(groups, run.flags, run.rng) for groups in parts]
        run.score_old(batches)
        updated = False
        for groups, (batch, metrics) in zip(parts, batches, strict=True):
            before = run.version
            if batch is not None:
                metrics |= run.trainer.gradients(batch)
                metrics |= run.finish_check()  # the weights change next
                metrics |= run.trainer.update(before)
                updated |= bool(metrics["updated"])
                run.version += metrics["updated"]
                run.count(batch)
            metrics["retired_in_flight"] = run.remember(groups)
            run.step += 1
            if groups is parts[-1]:
                run.push(sum(map(len, parts)), updated)
            run.log(groups, metrics, before)
        run.sample(parts[-1])
        run.begin_check()
    run.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 1 failure, 2 usage, 130 Ctrl-C."""
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv)
        check_flags(flags)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if flags.dry_run:
        print(plan(flags))
        return 0
    run = Run(flags)
    try:
        run.start()
        if flags.eval_only:
            run.begin_evaluation()
            run.finish_check()
        else:
            train(run)
    except KeyboardInterrupt:
        run.say(f"stopped by Ctrl-C at step {run.step}; what was measured is in {run.folder.path}")
        return 130
    finally:
        run.close()
    return 0


def plan(flags: Any) -> str:
    """What would run, for --dry_run."""
    batch = flags.batch_prompts * flags.rollouts
    steps = math.ceil(flags.max_steps / flags.k) * flags.k if flags.schedule == "ppo_off_policy" else flags.max_steps
    return json.dumps(vars(flags), indent=1) + (
        f"\n{steps} steps of {flags.batch_prompts} prompts x {flags.rollouts} rollouts = {batch} completions each; "
        f"{flags.schedule} {flags.k}; evaluation of {flags.eval_problems} x {flags.eval_samples} every "
        f"{flags.eval_every} steps; files in {flags.output_dir}"
    )


if __name__ == "__main__":
    sys.exit(main())
