"""What a run measures, prints and writes while it trains: the record and the line of each step.

Those of an evaluation are in evaluation.py.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import length_control
from pipeline_rl import Group, Rollout, lags
from runtime.flags import VERSION, Flags
from runtime.folder import Folder, Progress, Record
from runtime.generator import Generator
from runtime.microbatches import TokenRow, microbatches
from runtime.ranks import Ranks, SharedGenerator
from runtime.trainer import TrainingBatch
from tasks.prompts import PromptStream, Task

LOW_ENTROPY = 1e-3  # nats per token
HIGH_ENTROPY = 0.3
RISEN = 1.25  # of 914 published runs nine went beyond both, and none of these learned
EMPTY_STEPS = 3  # in a row
UNFINISHED = 0.5  # share of completions whose thinking never ended
EARLY_STEPS = 10
EARLY_DRIFT = 0.42  # lab/law/stability.py: no published run beyond it stood


@dataclass(eq=False)
class Clock:
    """The compute of a run so far, without start-up and without evaluation's share of the time."""

    generator: Generator
    parameters: int  # P, those that each token is multiplied with
    devices: int  # accelerators in use on both sides, or CPU cores
    past: Mapping[str, float]  # what a run before a resume had used

    def __post_init__(self) -> None:
        self.past = Counter(self.past)  # 0 for what is not in it
        self.started = time.monotonic()
        self.trained_tokens = 0  # tokens in the loss
        self.forward_tokens = 0  # in the trainer's forward and backward passes, without padding
        self.extra_forward_tokens = 0  # the same in further forward passes: KL reference, TIS, gradient checkpointing

    def hours(self) -> float:
        """Wall time with evaluation, also that of the run before a resume."""
        return self.past["hours"] + (time.monotonic() - self.started) / 3600

    def now(self) -> dict[str, float]:
        """tokens (all that were sampled, dropped ones too), trained_tokens, flops, device_hours."""
        counters = self.generator.counters
        seconds = time.monotonic() - self.started - counters.eval_seconds
        # FLOPs: 2 P for each token of a forward pass on either side, 4 P more with its backward pass
        generated = 2 * self.parameters * (counters.prefilled + counters.sampled)
        trained = self.parameters * (6 * self.forward_tokens + 2 * self.extra_forward_tokens)
        return {
            "tokens": self.past["tokens"] + counters.sampled,
            "trained_tokens": self.past["trained_tokens"] + self.trained_tokens,
            "flops": self.past["flops"] + generated + trained,
            "device_hours": self.past["device_hours"] + seconds * self.devices / 3600,
        }


@dataclass(eq=False)
class Recorder:
    """Measures, prints and writes on rank 0; on the other ranks it does nothing. `clock` is there once the engine is
    up."""

    flags: Flags
    ranks: Ranks
    folder: Folder
    task: Task
    prompts: PromptStream
    generator: SharedGenerator

    def __post_init__(self) -> None:
        self.device = torch.cuda.get_device_name() if torch.cuda.device_count() else "cpu"
        self.discarded: list[tuple[Group, Tensor]] = []  # by dynamic sampling since the last step, with their rewards
        self.retired_in_flight = 0  # of the groups that dynamic sampling discarded since the last step
        self.empty_steps = 0  # in a row, without an update
        self.first_entropy = 0.0  # of the first step that trained, in nats
        self.mismatch: float | None = None  # `mismatch_rms` of the last completions that a single version sampled
        self.wait_seconds = 0.0  # seconds, for groups, since the last step

    def start_clock(self, parameters: int, devices: int, past: dict[str, float]) -> None:
        """Compute counts from now on, on top of that of the run before a resume."""
        if self.ranks.main:
            self.clock = Clock(self.generator.on_main, parameters, devices, past)
            self.counters = vars(self.generator.on_main.counters).copy()
            self.last_record_time = time.monotonic()

    def open(self, step: int) -> None:
        """Writes the flags."""
        settings = vars(self.flags)
        path = str(self.folder.path)
        if self.ranks.main:
            self.folder.replace("config.json", json.dumps({"version": VERSION} | settings, indent=1))
            self.folder.append("metrics.jsonl", {"config": settings})  # once more after each resume
        name = f"{path} from step {step}" if step else path  # no tracker takes steps back
        options = {"trackio": {"name": name}, "wandb": {"name": name, "dir": path}}
        self.ranks.accelerator.init_trackers("scalerl", config=settings, init_kwargs=options)
        self.ranks.say("lag, rho, ess, waits: docs/operations.md#a-runs-folder explains each word of a step's line")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds the time of the block to the next step's `trainer_idle`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.wait_seconds += time.monotonic() - started

    def measure(self, groups: Sequence[Group], rewards: Tensor, varied: Tensor) -> Record:
        """Metrics of everything that was sampled for a batch: its groups with their shaped rewards (N,), and what
        dynamic sampling discarded on the way. `varied` (N,): the rollouts of groups with unequal rewards. `groups`
        becomes [prompt key, correct rollouts, rollouts] of each."""
        discarded, self.discarded = self.discarded, []
        every_group = [*groups, *(group for group, _ in discarded)]
        rewards = torch.cat([rewards, *(shaped for _, shaped in discarded)])
        metrics: Record = {"reward": rewards.mean().item()}
        metrics |= rates([rollout for group in every_group for rollout in group.rollouts])
        metrics["zero_variance_groups"] = int((~varied).sum()) // self.flags.rollouts
        if self.flags.zero_variance == "replace":
            metrics["offered"] = len(every_group)
            metrics["discarded_groups"] = len(discarded)
        metrics["groups"] = []
        for group in every_group:
            correct = sum(rollout.correct for rollout in group.rollouts)
            metrics["groups"].append([group.problem.key, correct, len(group.rollouts)])
        return metrics

    def write_step(
        self, progress: Progress, groups: Sequence[Group], batch: TrainingBatch | None, metrics: Record, version: int
    ) -> None:
        """The record and the line of the step that `progress` has just counted; it began at `version`."""
        if not self.ranks.main:
            return
        if self.flags.loss == "tis":  # its first pass scores all rollouts, those that were filtered too
            rows = [TokenRow(g.problem.prompt_ids, r.completion_ids, r.mask) for g in groups for r in g.rollouts]
            tokens, ranks, share = self.flags.tokens_per_microbatch, self.ranks.count, self.flags.share_prompts
            for rank in range(ranks):
                parts = microbatches(rows, tokens, rank=rank, ranks=ranks, share=share)
                self.clock.extra_forward_tokens += sum(part.tokens for part in parts)
        if batch:
            metrics = metrics | self._trained(batch, metrics)
        self.empty_steps = 0 if metrics.get("updated") else self.empty_steps + 1
        compute = self.clock.now()
        compute["trained_tokens_total"] = compute.pop("trained_tokens")  # the step's own is in `metrics`
        token_lags = [lag for group in groups for rollout in group.rollouts for lag in lags(rollout, version)]
        record: Record = dict(  # of two values for one name one would be lost: a TypeError
            step=progress.step,
            version=progress.version,
            **metrics,
            **compute,
            **self._times(),
            lag_mean=sum(token_lags) / len(token_lags),
            lag_max=max(token_lags),
            outstanding=self.generator.on_main.pacer.outstanding,
            epoch=self.prompts.epoch,
        )
        if hasattr(self.task, "counts"):  # of a data set: verdicts so far by kind, lost reward workers among them
            record["verdicts"] = dict(self.task.counts)
        self.folder.append("metrics.jsonl", record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        self.ranks.accelerator.log(numbers, step=progress.step)
        self.first_entropy = self.first_entropy or record.get("entropy", 0.0)
        lines = [step_line(record), *warnings_of(record, self.empty_steps, self.first_entropy)]
        if progress.step == EARLY_STEPS:
            lines += early_warning(self.folder.read("metrics.jsonl"), self.flags)
        for line in lines:
            self.ranks.say(line)

    def _trained(self, batch: TrainingBatch, metrics: Record) -> Record:
        """What a step trained on, counted here and in the clock: nothing, if its gradient was not finite."""
        tokens = metrics.get("kept_tokens", int(batch.mask.sum())) if metrics["updated"] else 0
        self.clock.trained_tokens += tokens
        passed = metrics["forward_tokens"]
        self.clock.forward_tokens += passed
        for again in (self.flags.kl_coef, self.flags.gradient_checkpointing):
            if again:
                self.clock.extra_forward_tokens += passed
        result = {"rows": len(batch.rows), "trained_tokens": tokens}
        self.mismatch = metrics.get("mismatch_rms", self.mismatch)
        if self.mismatch is not None:
            result["staleness_rms"] = staleness(metrics["log_ratio_rms"], self.mismatch)
        return result

    def _times(self) -> Record:
        """Seconds since the last record, and what the two sides did in them."""
        now, counters = time.monotonic(), vars(self.generator.on_main.counters).copy()
        since = {name: counters[name] - self.counters[name] for name in counters}
        seconds = now - self.last_record_time
        result = {
            "seconds": seconds,
            "trainer_idle": self.wait_seconds,
            "generator_idle": since["idle_seconds"],
            "sync_seconds": since["sync_seconds"],
            "requests": since["request_seconds"] / seconds,
        }
        self.counters, self.last_record_time, self.wait_seconds = counters, now, 0.0
        return result

    def table(self) -> str:
        """At the end: compute, waiting, lag, and where the files are."""
        compute = self.clock.now()
        steps = [record for record in self.folder.read("metrics.jsonl") if "step" in record]

        def total(name: str) -> float:
            return sum(record[name] for record in steps)

        seconds = max(1e-9, total("seconds"))
        mean_lag = total("lag_mean") / max(1, len(steps))
        largest_lag = max((record["lag_max"] for record in steps), default=0)
        wall_time = compute["device_hours"] * 3600 / self.clock.devices
        rows = {
            "compute": f"{wall_time:.0f} s on {self.clock.devices} x {self.device}, {compute['flops']:.2e} FLOPs",
            "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
            "generator idle": f"{(total('generator_idle') + total('sync_seconds')) / seconds:.1%}",
            "trainer idle": f"{total('trainer_idle') / seconds:.1%}",
            "lag mean / max": f"{mean_lag:.2f} / {largest_lag} (k = {self.flags.k})",
            "files": str(self.folder.path),
        }
        return "\n".join(f"{name:<16}{text}" for name, text in rows.items())

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Two rollouts of each of two groups, to read, into samples.jsonl. `versions` has the weights that sampled each
        token, FORCED where it was not sampled and does not train."""
        for group in groups[:2] if self.ranks.main else ():
            for rollout in group.rollouts[:2]:
                record = {
                    "step": step,
                    "key": group.problem.key,
                    "reward": rollout.reward,
                    "interrupted": rollout.interrupted,
                    "prompt": self.task.text(group.problem.prompt_ids),
                    "completion": self.task.text(rollout.completion_ids),
                    "versions": rollout.versions,
                }
                self.folder.append("samples.jsonl", record)


# ------------------------------------------------------------------------------------------- a step's figures, its line


def rates(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What share is correct, truncated, interrupted; the mean length with forced tokens."""
    n = len(rollouts)
    return {
        "pass_rate": sum(rollout.correct for rollout in rollouts) / n,
        "length": sum(len(rollout.completion_ids) for rollout in rollouts) / n,
        "interrupted": sum(rollout.interrupted for rollout in rollouts) / n,
        "truncated": length_control.truncation_rate(rollout.finish_reason for rollout in rollouts),
    }


def staleness(log_ratio: float, mismatch: float) -> float:
    """What age adds to the ratio, as a root mean square in nats (Missing Old Logits, arXiv 2605.12070).

    rho = pi_now / mu = (pi_v / mu) * (pi_now / pi_v), with mu and pi_v the generator's and the trainer's probability at
    the version v that sampled the token: the mismatch of the two programs, times staleness. Of the batch only the
    product is known, but on the completions of the weights check the trainer still had the weights of v, so the size of
    the first factor is known there. Squares of the logarithms add up if the two are uncorrelated:
        E[log(rho)^2] = E[log(pi_v / mu)^2] + E[log(pi_now / pi_v)^2]
    Keys and values of older weights, which the weights check leaves out, count as staleness here. The mismatch is that
    of held-out prompts, which the batch's own may differ from.
    """
    return math.sqrt(max(log_ratio**2 - mismatch**2, 0.0))


def step_line(record: Record) -> str:
    """The printed line of one step; docs/operations.md explains each number."""
    line = (
        f"step {record['step']:4d} · pass {record['pass_rate']:.3f} · length {record['length']:5.1f} · "
        f"lag {record['lag_mean']:.2f}/{record['lag_max']}"
    )
    if "ratio_max" in record:
        line += f" · rho {record['ratio_mean']:.3f}/{record['ratio_max']:.2f} · ess {record['ess']:.3f}"
        line += f" · entropy {record['entropy']:.3f} · grad {record['grad_norm']:.2f}"
    else:
        line += " · nothing to train on"
    line += f" · waits {record['trainer_idle']:.2f}/{record['generator_idle']:.2f} s · {record['seconds']:.2f} s"
    if record.get("retired"):
        line += f" · retired {record['retired']}"
    return line


def warnings_of(record: Record, empty_steps: int, first_entropy: float = math.inf) -> Iterator[str]:
    """What a healthy run does not show. `empty_steps`: steps in a row without an update."""
    truncation = length_control.truncation_warning(record["truncated"])
    if truncation:
        yield truncation
    if record.get("entropy", 1.0) < LOW_ENTROPY:
        yield f"Warning: the entropy is {record['entropy']:.1e} nats: the policy hardly explores any more."
    if record.get("entropy", 0.0) > max(HIGH_ENTROPY, RISEN * first_entropy):
        risen = f"the entropy has risen from {first_entropy:.2f} to {record['entropy']:.2f} nats"
        yield f"Warning: {risen}: the policy becomes random (docs/derivations.md#entropy); lower --lr."
    if empty_steps and empty_steps % EMPTY_STEPS == 0:
        missing = "token that the mask keeps" if record.get("kept_tokens") == 0 else "rollout left to train on"
        yield f"Warning: {empty_steps} steps in a row had no {missing}, so nothing was trained."
    verdicts = record.get("verdicts", {})
    unfinished = verdicts.get("unfinished", 0) / max(1, sum(verdicts.values()))
    if record.get("step") == 1 and unfinished > UNFINISHED:  # once, with the first evaluation's verdicts
        never = f"{unfinished:.0%} of completions never ended their thinking and count as wrong"
        yield f"Warning: {never}; if the model does not think, use --thinking false."


def early_warning(records: Sequence[Record], flags: Flags) -> Iterator[str]:
    """What the first steps say of the rest; the lag that the flags hold comes later. -log ESS = sigma^2 of log rho."""
    steps = [record for record in records if "ess" in record]
    lag, ess = (sum(step[name] for step in steps) / max(1, len(steps)) for name in ("lag_mean", "ess"))
    lag_to_come = min(flags.k, 1 + flags.min_ready / flags.batch_prompts)
    if lag and math.sqrt(abs(math.log(ess)) * max(lag, lag_to_come)) / lag > EARLY_DRIFT:
        yield "Warning: runs that began so went down; a lower --lr or --k may help (lab/law/stability.py says which)."
