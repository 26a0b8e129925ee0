"""The numbers of a comparison: finished runs are read and fitted, and variants are compared with their baselines.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] is its 95 % interval over the n seeds, where t is
Student's quantile with n - 1 degrees of freedom. Two variants are distinguishable if 0 lies outside. Each row has
several such intervals and nothing is corrected for their number: of twenty without any effect, one will look like one.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_curves import power_law

import fit_sigmoid
from runtime.run_folder import Folder


@dataclass
class Result:
    """A finished run, read and fitted. `full`: by axis of compute, the fit to the run; `half`: to its first half."""

    variant: str
    seed: int
    evals: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    closing: dict[str, Any]
    float32: bool
    full: dict[str, fit_sigmoid.CurveReport]
    half: fit_sigmoid.CurveReport
    shared: dict[str, fit_sigmoid.SigmoidFit] = field(default_factory=dict)

    @property
    def final(self) -> float:
        """Pass rate at the end: mean of the last two evaluations."""
        rates = [record["pass_rate"] for record in self.evals[-2:]]
        return sum(rates) / len(rates)

    @property
    def best(self) -> float:
        """Best pass rate of the run: the highest mean of two evaluations in a row."""
        rates = np.array([record["pass_rate"] for record in self.evals])
        return float((rates[1:] + rates[:-1]).max(initial=2 * rates[0]) / 2)

    @property
    def falls(self) -> np.ndarray:
        """(evaluations,): how far each lies below the best before it; 0 at a new best."""
        rates = np.array([record["pass_rate"] for record in self.evals])
        return np.maximum.accumulate(rates) - rates


def read(path: Path, variant: str, seed: int, axes: Sequence[str]) -> Result:
    """Reads the folder of a finished run and fits its evaluations."""
    folder, name = Folder(path), f"{variant} seed {seed}"
    evals, (start, *lines) = folder.read("eval.jsonl"), folder.read("metrics.jsonl")
    steps = [record for record in lines if "step" in record]
    full = {x: fit_sigmoid.curve(evals, x=x, name=name) for x in axes}
    half = fit_sigmoid.curve(evals, x=axes[0], fit_until=0.5, name=name)
    closing = json.loads((path / "finished.json").read_text())
    float32 = start["config"].get("dtype", "float32") == "float32"
    return Result(variant, seed, evals, steps, closing, float32, full, half)


def share_ceiling(results: Sequence[Result], axis: str) -> tuple[float | None, str]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `fit_sigmoid.compare`).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, and the verdict says so.
    """
    fits = [r.full[axis].fit for r in results]
    if len(fits) < 2:
        return None, "one run: nothing to compare"
    both = fit_sigmoid.compare(*fits, names=[r.full[axis].name for r in results])
    ceilings = [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]
    A = both.shared_A if both.refits else float(np.mean(ceilings)) if ceilings else None
    if A is not None:
        refits = both.refits or [fit_sigmoid.refit(f, A) for f in fits]
        for result, refit in zip(results, refits, strict=True):
            result.shared[axis] = refit
    unknown = sum(not f.identifiable for f in fits)
    return A, f"no verdict: {unknown} of {len(fits)} ceilings are not identifiable" if unknown else both.verdict


def compute_to(evals: Sequence[Mapping[str, Any]], rate: float, axis: str) -> float:
    """Compute at which the straight line between evaluations first reaches `rate`; inf if no evaluation does."""
    before = None
    for record in evals:
        if record["pass_rate"] >= rate:
            if before is None:
                return float(record[axis])
            share = (rate - before["pass_rate"]) / (record["pass_rate"] - before["pass_rate"])
            return before[axis] + share * (record[axis] - before[axis])
        before = record
    return math.inf


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean over seeds; NaN ends for a single one."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - reach, mean + reach


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float, int]:
    """(mean, low, high, n) of the paired differences over the seeds that both have; NaN and 0 if they share none."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return math.nan, math.nan, math.nan, 0
    return *interval([ours[seed] - theirs[seed] for seed in seeds]), len(seeds)


def verdict(mean: float, low: float, high: float, more: str, less: str) -> str:
    """What an interval of a difference says; THE RULE above."""
    if math.isnan(low):
        return "one seed, so nothing can be said"
    return more if low > 0 else less if high < 0 else "not distinguishable"


def health(result: Result) -> dict[str, Any]:
    """Lag, clipped share, truncation and what a stable run does not show, of one run."""
    steps, evals = result.steps, result.evals

    def over(name: str) -> list[float]:
        return [step[name] for step in steps if name in step]

    def mean(name: str) -> float:
        return float(np.mean(over(name))) if over(name) else math.nan

    found = {
        "truncated above 10 %": sum(step["truncated"] > 0.10 for step in steps),
        "gradient not finite": sum(step.get("updated", 1) == 0 for step in steps),
        "nothing to train on": sum("rows" not in step for step in steps),
        "gap above 1e-4": sum(gap > 1e-4 for gap in over("logprob_gap")) if result.float32 else 0,
    }
    signs = [f"{name} in {count} of {len(steps)} steps" for name, count in found.items() if count]
    low = int((result.falls > 0.1).sum())
    if low:
        signs.append(f"fell by up to {result.falls.max():.2f} ({low} of {len(evals)} evaluations more than .1 below "
                     "the best before)")  # fmt: skip
    return {
        "lag": mean("lag_mean"), "lag_max": max(over("lag_max"), default=0), "ess": mean("ess"),
        "clipped +": mean("capped_positive"), "clipped -": mean("capped_negative"),
        "truncated": mean("truncated"), "truncated_last": evals[-1]["truncated"],
        "interrupted": evals[-1]["interrupted"], "length": evals[-1]["mean_length"],
        "gap": max(over("logprob_gap"), default=math.nan), "signs": signs,
    }  # fmt: skip


def other_predictions(half: fit_sigmoid.CurveReport) -> dict[str, float]:
    """What the last evaluation would be by simpler rules, from the same first half: the pass rate stays as it is (mean
    of the half's last two evaluations), and the power law A - D / C^B, whose A may go up to 1."""
    seen = half.fit_until * (1 + 1e-12) >= half.C
    C, R = half.C[seen], half.R[seen]
    found = {"the pass rate stays": float(R[-2:].mean())}
    if (C > 0).sum() >= 4:  # what a power law needs
        law = power_law(C, R)
        found["power law"] = law["A"] - law["D"] / half.C[-1] ** law["B"]
    return found


def extrapolation(results: Sequence[Result]) -> dict[str, Any]:
    """How well fits to first halves predict second halves: |error| at the end of each run, with those of the simpler
    rules, and coverage. `not fitted`: runs with too few evaluations in their first half."""
    rows = [r.half for r in results if not math.isnan(r.half.fit.A) and r.half.held_out_points]
    ends = [row.predictions[0] for row in rows]
    points = sum(row.held_out_points for row in rows)
    others: dict[str, list[float]] = {}
    for row, end in zip(rows, ends, strict=True):
        for rule, value in other_predictions(row).items():
            others.setdefault(rule, []).append(abs(value - end.measured))
    return {
        "runs": len(rows), "not fitted": len(results) - len(rows), "others": others, "points": points,
        "errors": [abs(end.reward - end.measured) for end in ends],
        "too high": sum(end.reward > end.measured for end in ends),
        "inside": sum(end.evaluation[0] <= end.measured <= end.evaluation[1] for end in ends),
        "covered": sum(row.held_out_covered * row.held_out_points for row in rows) / max(1, points),
        "rmse": float(np.median([row.held_out_rmse for row in rows])) if rows else math.nan,
    }  # fmt: skip


def values(results: Sequence[Result], measure: str, axis: str, rate: float) -> dict[int, float]:
    """{seed: value} of one variant's runs; runs without that value (no ceiling to speak of, rate not reached) are
    missing. `A known` is A where it is identifiable, `fall` the largest fall of the pass rate below its best before."""
    found: dict[int, float | None] = {}
    for r in results:
        if measure in ("final", "best"):
            found[r.seed] = getattr(r, measure)
        elif measure == "A known":
            found[r.seed] = r.full[axis].fit.A if r.full[axis].fit.identifiable else None
        elif measure == "fall":
            found[r.seed] = float(r.falls.max())
        elif measure == "truncated":
            found[r.seed] = health(r)["truncated"]
        elif measure in ("B shared", "C_mid shared"):
            found[r.seed] = getattr(r.shared[axis], measure.split()[0]) if axis in r.shared else None
        elif measure in ("A", "B", "C_mid"):
            found[r.seed] = getattr(r.full[axis].fit, measure)
        else:
            found[r.seed] = compute_to(r.evals, rate, measure)
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by variant, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.variant, []).append(result)
    return found
