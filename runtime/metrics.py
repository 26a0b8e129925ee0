"""What a run measures: the clock that counts compute, the record and the line of a step and of an evaluation."""

import time
from collections.abc import Sequence
from typing import Any

import length_control
from runtime.run_folder import Folder

LOW_ENTROPY = 1e-3  # nats per token
EMPTY_STEPS = 3
UNFINISHED = 0.5  # share of completions whose thinking never ended


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """One record of several; a name that stands in two of them is an error (KeyError), as one value would be lost."""
    record: dict[str, Any] = {}
    for part in parts:
        if twice := record.keys() & part.keys():
            raise KeyError(f"two values for {sorted(twice)} in one record")
        record |= part
    return record


def accelerators_in_use(trainers: int, here: int, engines: Sequence[int], elsewhere: int = 0) -> int:
    """Devices that train or sample; idle ones do not count.

    trainers: trainer processes, one device each, `here` of them on this host's first devices. engines: this host's
    devices that engines use. elsewhere: workers that Ray places.
    """
    return trainers + len({device for device in engines if device >= here}) + elsewhere


class Clock:
    """Compute so far. Start-up and evaluation's share of the time do not count; a resumed run goes on from `past`.

    generator: has `.counters` (`pipeline_rl.Counters`). parameters: P, those multiplied for each token.
    devices: accelerators of both sides that are in use, or CPU cores.
    """

    def __init__(self, generator: Any, parameters: int, devices: int, past: dict[str, float]):
        self.generator, self.parameters, self.devices, self.past = generator, parameters, devices, past
        self.started = time.monotonic()
        self.trained_tokens = self.forwarded = 0  # tokens in the loss; prompt + completion tokens in forward passes

    def trained_flops(self, batch: Any) -> int:
        """Forward and backward of one step, attention's products left out."""
        return 6 * self.parameters * sum(map(len, batch.rows))

    def hours(self) -> float:
        """Wall time, evaluation too, that of the run before a resume among it."""
        return self.past.get("hours", 0.0) + (time.monotonic() - self.started) / 3600

    def now(self) -> dict[str, float]:
        """tokens (sampled, dropped ones too), trained_tokens, flops, device_hours."""
        counters, past = self.generator.counters, self.past
        seconds = time.monotonic() - self.started - counters.eval_seconds
        # FLOPs: 2 P for each token that the generator computes, 6 P for each that the trainer does
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


def evaluation_record(groups: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The figures of one evaluation, from its rollouts grouped by prompt."""
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


def evaluation_line(record: dict[str, Any]) -> str:
    """The printed line of one evaluation."""
    return (
        f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f} · pass@{record['n_samples']} "
        f"{record['pass_at_k']:.3f} · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
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
    found = [length_control.truncation_warning(record["truncated"])]
    if record.get("entropy", 1.0) < LOW_ENTROPY:
        found.append(f"Warning: the entropy is {record['entropy']:.1e} nats: the policy hardly explores any more.")
    if empty_steps and empty_steps % EMPTY_STEPS == 0:
        found.append(
            f"Warning: {empty_steps} steps in a row had no group with unequal rewards, so nothing was trained."
        )
    verdicts = record.get("verdicts", {})
    unfinished = verdicts.get("unfinished", 0) / max(1, sum(verdicts.values()))
    if record.get("step") == 1 and unfinished > UNFINISHED:  # once, with the first evaluation's verdicts
        found.append(
            f"Warning: {unfinished:.0%} of completions never ended their thinking and count as wrong; if the model "
            "does not think, use --thinking false."
        )
    return [warning for warning in found if warning is not None]


def closing_table(folder: Folder, clock: Clock, device: str, k: int) -> str:
    """Start and end, compute, waiting, lag, and where the files are."""
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    rates = [record["pass_rate"] for record in folder.read("eval.jsonl")]
    last_two = sum(rates[-2:]) / len(rates[-2:])
    compute = clock.now()
    seconds = max(1e-9, sum(record["seconds"] for record in steps))
    mean_lag = sum(record["lag_mean"] for record in steps) / max(1, len(steps))
    rows = {
        "pass rate": f"{rates[0]:.3f} -> {rates[-1]:.3f} (mean of the last two {last_two:.3f})",
        "compute": f"{compute['device_hours'] * 3600 / clock.devices:.0f} s on {clock.devices} x {device}, "
        f"{compute['flops']:.2e} FLOPs",
        "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
        "generator idle": f"{sum(r['generator_idle'] + r['sync_seconds'] for r in steps) / seconds:.1%}",
        "trainer idle": f"{sum(r['trainer_idle'] for r in steps) / seconds:.1%}",
        "lag mean / max": f"{mean_lag:.2f} / {max((r['lag_max'] for r in steps), default=0)} (k = {k})",
        "files": str(folder.path),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in rows.items())
