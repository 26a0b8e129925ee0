"""What a run measures: the clock that counts compute, the record and the line of a step and of an evaluation."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import fit_sigmoid
import length_control
from fit_sigmoid import CurveReport, short
from length_control import COLLAPSE_TRUNCATION, HEALTHY_TRUNCATION
from pipeline_rl import Generator, Rollout
from runtime.run_folder import Folder

LOW_ENTROPY = 1e-3  # nats per token
EMPTY_STEPS = 3  # in a row
UNFINISHED = 0.5  # share of completions whose thinking never ended
FARTHEST = 4  # times the cap: beyond that the lengths under it say nothing


class Clock:
    """The compute of a run so far, without start-up and without evaluation's share of the time.

    parameters: P, those that each token is multiplied with. devices: accelerators in use on both sides, or CPU cores.
    past: what a run before a resume had used. frozen: a frozen weight needs no gradient, a third of training's FLOPs
    (those of the adapters in its place are few, and left out).
    """

    def __init__(
        self, generator: Generator, parameters: int, devices: int, past: dict[str, float], frozen: bool = False
    ):
        self.generator, self.parameters, self.devices, self.past = generator, parameters, devices, past
        self.training_flops = (4 if frozen else 6) * parameters  # of a token
        self.started = time.monotonic()
        self.trained_tokens = self.forwarded = 0  # tokens in the loss; prompt + completion tokens in forward passes

    def hours(self) -> float:
        """Wall time with evaluation, also that of the run before a resume."""
        return self.past.get("hours", 0.0) + (time.monotonic() - self.started) / 3600

    def now(self) -> dict[str, float]:
        """tokens (all that were sampled, dropped ones too), trained_tokens, flops, device_hours."""
        counters, past = self.generator.counters, self.past
        seconds = time.monotonic() - self.started - counters.eval_seconds
        # FLOPs: 2 P for each token that the generator computes, 6 P for each that the trainer does
        flops = 2 * self.parameters * (counters.prefilled + counters.sampled) + self.training_flops * self.forwarded
        return {
            "tokens": past.get("tokens", 0) + counters.sampled,
            "trained_tokens": past.get("trained_tokens", 0) + self.trained_tokens,
            "flops": past.get("flops", 0) + flops,
            "device_hours": past.get("device_hours", 0.0) + seconds * self.devices / 3600,
        }


def evaluation_record(groups: Sequence[Sequence[Rollout]]) -> dict[str, Any]:
    """The figures of one evaluation, from its rollouts grouped by prompt."""
    rollouts = [rollout for group in groups for rollout in group]
    return {
        "pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "pass_at_k": sum(any(rollout.correct for rollout in group) for group in groups) / len(groups),
        "n_prompts": len(groups),
        "n_samples": len(groups[0]),
        "interrupted": sum(rollout.interrupted for rollout in rollouts) / len(rollouts),
        "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in rollouts]),
        "mean_length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
    }


def evaluation_line(record: dict[str, Any]) -> str:
    """The printed line of one evaluation, with the pass rate of each data set at its end if there are several."""
    apart = {name.rpartition("/")[2]: found["pass_rate"] for name, found in record.get("data_sets", {}).items()}
    return (
        f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f} · pass@{record['n_samples']} "
        f"{record['pass_at_k']:.3f} · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
        + "".join(f" · {name} {rate:.3f}" for name, rate in apart.items())
    )


def step_line(record: dict[str, Any]) -> str:
    """The printed line of one step; README explains each number."""
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


def warnings_of(record: dict[str, Any], empty_steps: int) -> list[str]:
    """What a healthy run does not show. `empty_steps`: steps in a row without a row to train on."""
    warnings = []
    if truncated := length_control.truncation_warning(record["truncated"]):
        warnings.append(truncated)
    if record.get("entropy", 1.0) < LOW_ENTROPY:
        warnings.append(f"Warning: the entropy is {record['entropy']:.1e} nats: the policy hardly explores any more.")
    if empty_steps and empty_steps % EMPTY_STEPS == 0:
        warnings.append(
            f"Warning: {empty_steps} steps in a row had no group with unequal rewards, so nothing was trained."
        )
    verdicts = record.get("verdicts", {})
    unfinished = verdicts.get("unfinished", 0) / max(1, sum(verdicts.values()))
    if record.get("step") == 1 and unfinished > UNFINISHED:  # once, with the first evaluation's verdicts
        warnings.append(
            f"Warning: {unfinished:.0%} of completions never ended their thinking and count as wrong; if the model "
            "does not think, use --thinking false."
        )
    return warnings


def pass_rates(evaluations: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """A run's pass rates: under "" those over all that is trained on, then those of each data set of the last
    evaluation, from the first that has it: a set may have come with a resume."""
    rates = {"": [record["pass_rate"] for record in evaluations]}
    for name in evaluations[-1].get("data_sets", {}):
        found = [record["data_sets"][name] for record in evaluations if name in record.get("data_sets", {})]
        rates[name] = [record["pass_rate"] for record in found]
    return rates


def start_and_end(rates: Sequence[float]) -> str:
    """The first and the last pass rate of a run, and the mean of the last two, which is less noisy."""
    return f"{rates[0]:.3f} -> {rates[-1]:.3f} (mean of the last two {sum(rates[-2:]) / len(rates[-2:]):.3f})"


def enough_tokens(lengths: Sequence[int], cut: Sequence[bool], cap: int) -> float:
    """The cap at which HEALTHY_TRUNCATION of the completions would be cut, from those under another; inf if none ended
    in the second half of it.

    lengths, cut: (n,) tokens, and whether it was the cap that ended them. Assumed: beyond half of the cap they end at a
    constant rate per token, so that the share still running is S(L) = S(cap) exp(-rate (L - cap)). The rate is the
    number of endings there over the number of tokens there.
    """
    beyond = [(length - cap / 2, was_cut) for length, was_cut in zip(lengths, cut, strict=True) if length > cap / 2]
    rate = sum(not was_cut for _, was_cut in beyond) / sum(tokens for tokens, _ in beyond)
    return cap + math.log(sum(cut) / len(cut) / HEALTHY_TRUNCATION) / rate if rate else math.inf


def budget_advice(
    rollouts: Sequence[Rollout], control: length_control.Interruption | None, max_budget: int, answer_budget: int
) -> str | None:
    """If too many completions of the first evaluation are truncated: which budget to raise, and to what. Where thinking
    is interrupted it is the answer that is cut, otherwise the whole completion."""
    cut = [rollout.finish_reason == "length" for rollout in rollouts]
    if sum(cut) <= COLLAPSE_TRUNCATION * len(cut):
        return None
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    name, now, cap = "max_budget", max_budget, max_budget + answer_budget
    if control:
        starts = [control.answer_start(rollout.completion_ids) for rollout in rollouts]
        lengths = [0 if start is None else length - start for length, start in zip(lengths, starts, strict=True)]
        name, now, cap = "answer_budget", answer_budget, answer_budget
    needed = enough_tokens(lengths, cut, cap)
    wanted = min(needed, FARTHEST * cap) - (cap - now)
    unit = 10 ** max(0, math.floor(math.log10(wanted)) - 1)  # two digits, rounded up
    why = f"where {HEALTHY_TRUNCATION:.0%} would be, judging by the lengths of the others"
    if needed > FARTHEST * cap:
        why = "at least: too few of the long ones ended to tell more"
    return (
        f"Warning: {sum(cut) / len(cut):.0%} of completions are truncated before any training; raise --{name} from "
        f"{now} to {math.ceil(wanted / unit) * unit}, {why}."
    )


def of_data_set(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The records of evaluations with the figures of one of their `data_sets`; "" takes those over all of them."""
    if not name:
        return list(rows)
    return [{**row, **row["data_sets"][name]} for row in rows if name in row.get("data_sets", {})]


def closing_fits(folder: Folder, name: str, known: float | None) -> tuple[list[CurveReport], str]:
    """The forecast that the first half of a run makes, and the fit to all of it: both reports, and what a person reads.

    `name` is the data set's, "" for all; `known` is the task's own ceiling, where it has one.
    """
    rows, label = of_data_set(folder.read("eval.jsonl"), name), f"{folder.path}, {name}".removesuffix(", ")
    found = [fit_sigmoid.curve(rows, share, label) for share in (0.5, 1.0)]
    half, f = found[0], found[0].fit
    lines = [f"no forecast from the first half: {f.reason}"]
    if f.best:
        at, last = float(half.C[-1]), float(half.R[-1])
        low, high = f.interval(at, noise=True)[:, 0]
        come = half.unseen & np.isfinite(half.R)
        ends = f.interval(half.C[come], noise=True)
        held = int(((ends[0] <= half.R[come]) & (half.R[come] <= ends[1])).sum())
        lines = [
            f"forecast at half: {short(float(f.C[-1]))} of {short(at)} "
            f"{fit_sigmoid.UNITS[half.x]}, {f.C[-1] / f.C_mid:.1f} C_mid",
            f"  the last evaluation {float(f.predict(at, f.form)):.3f}, in 95% of cases {low:.3f} to {high:.3f}",
            f"  what then came      {last:.3f}, {'inside' if low <= last <= high else 'OUTSIDE'}; "
            f"of all {come.sum()} that came {held} inside",
            f"  the ceiling         {ceiling_line(f, known)}",
        ]
    if (whole := found[1].fit).best:
        lines += ["the whole run", f"  the ceiling         {ceiling_line(whole, None)}"]  # of the policy as sampled
    return found, "\n".join(lines)


def ceiling_line(f: fit_sigmoid.SigmoidFit, known: float | None) -> str:
    """A's interval in words, and whether it holds the ceiling that is known."""
    low, high = f.A_interval
    line = f"{low:.3f} to {high:.3f}, {'identifiable' if f.identifiable else 'not identifiable yet'}"
    return line + (f"; {'holds' if low <= known <= high else 'MISSES'} the known {known:.2f}" if known else "")


def closing_table(folder: Folder, clock: Clock, device: str, k: int) -> str:
    """Start and end, compute, waiting, lag, and where the files are."""
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    rates = pass_rates(folder.read("eval.jsonl"))
    compute = clock.now()
    seconds = max(1e-9, sum(record["seconds"] for record in steps))
    mean_lag = sum(record["lag_mean"] for record in steps) / max(1, len(steps))
    generator_idle = sum(record["generator_idle"] + record["sync_seconds"] for record in steps)
    rows = {
        "pass rate": f"\n{'':<16}".join(start_and_end(some) + (of and f" of {of}") for of, some in rates.items()),
        "compute": f"{compute['device_hours'] * 3600 / clock.devices:.0f} s on {clock.devices} x {device}, "
        f"{compute['flops']:.2e} FLOPs",
        "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
        "generator idle": f"{generator_idle / seconds:.1%}",
        "trainer idle": f"{sum(r['trainer_idle'] for r in steps) / seconds:.1%}",
        "lag mean / max": f"{mean_lag:.2f} / {max((r['lag_max'] for r in steps), default=0)} (k = {k})",
        "files": str(folder.path),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in rows.items())
