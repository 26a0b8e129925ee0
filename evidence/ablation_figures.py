"""The numbers of a comparison: finished runs are read and fitted, and variants are compared with their baselines.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] is its 95 % interval over the n seeds, where t is
Student's quantile with n - 1 degrees of freedom. Two variants are distinguishable if 0 lies outside. Each row has
several such intervals and nothing is corrected for their number: of twenty without any effect, one will look like one.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, ndtr, stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from comparisons import Comparison
from curves import Curve

import fit_sigmoid

RELATIVE = ("C_mid shared", "tokens", "step", "device_hours")  # differences of logarithms, shown in percent
FALL = 0.1  # an evaluation this far below the best before it
REPRODUCED, REFUTED, UNSEEN = "reproduced", "refuted", "cannot be seen at this size"
LEAST_PAIRS = 3  # of runs with an identifiable ceiling, for a verdict on A


@cache
def fitted(curve: Curve, axis: str, until: float = 1.0) -> fit_sigmoid.CurveReport:
    """The fit to the first `until` of a run's compute on that axis; made once, since comparisons share runs."""
    return fit_sigmoid.curve(curve.evals(), x=axis, fit_until=until, name=f"{curve.variant} seed {curve.seed}")


@dataclass
class Result:
    """A finished run under the name that a comparison has for it. `shared`: by axis, the fit at the shared ceiling."""

    variant: str
    curve: Curve
    shared: dict[str, fit_sigmoid.SigmoidFit] = field(default_factory=dict)

    seed = property(lambda self: self.curve.seed)
    rates = property(lambda self: self.curve.points["pass_rate"])  # (evaluations,)

    @property
    def final(self) -> float:
        """Pass rate at the end: mean of the last two evaluations."""
        return float(self.rates[-2:].mean())

    @property
    def falls(self) -> np.ndarray:
        """(evaluations,): how far each lies below the best before it; 0 at a new best."""
        return np.maximum.accumulate(self.rates) - self.rates


def share_ceiling(results: Sequence[Result], axis: str) -> tuple[float | None, str]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `fit_sigmoid.compare`).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, and the verdict says so.
    """
    fits = [fitted(r.curve, axis).fit for r in results]
    if len(fits) < 2:
        return None, "one run: nothing to compare"
    both = fit_sigmoid.compare(*fits, names=[f"{r.variant} seed {r.seed}" for r in results])
    ceilings = [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]
    A = both.shared_A if both.refits else float(np.mean(ceilings)) if ceilings else None
    if A is not None:
        refits = both.refits or [fit_sigmoid.fit(f.C, f.R, n_samples=f.n, A=A) for f in fits]
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


def against_paper(low: float, high: float, least: float, most: float, enough: bool = True) -> str:
    """What our interval [low, high] of a difference says of the paper's, which lies in [least, most].

    REFUTED: no value of ours is one of theirs. REPRODUCED, where theirs are about 0: all of ours are among them; else:
    ours overlap theirs and leave out 0. Anything else is UNSEEN, and all where there are not `enough` pairs of runs.
    """
    if enough and (high < least or low > most):
        return REFUTED
    inside = least <= low and high <= most
    seen = inside or (not least < 0 < most and (low > 0 or high < 0))
    return REPRODUCED if enough and seen else UNSEEN


# ------------------------------------------------------------------------------------------------------------- power


def power(effect: float, sd: float, n: int, paired: bool) -> float:
    """How likely n seeds of each of two variants show a true difference at 5 % (Student's t, two-sided). `sd`: of the
    paired differences, or of the runs of one variant."""
    dof, variance = (n - 1, sd**2 / n) if paired else (2 * (n - 1), 2 * sd**2 / n)
    # P(|Z + shift| > t s) over s, the measured sd in units of the true one: s^2 is chi^2 / dof. SciPy's nct has NaNs.
    s = np.sqrt(chdtri(dof, (np.arange(10_000) + 0.5) / 10_000) / dof)
    ts, shift = float(stdtrit(dof, 0.975)) * s, effect / math.sqrt(variance)
    return float(np.mean(ndtr(shift - ts) + ndtr(-shift - ts)))


def seeds_needed(effect: float, sd: float, paired: bool, chance: float = 0.8) -> int:
    """The fewest seeds that see it with that chance."""
    return next((n for n in range(2, 1000) if power(effect, sd, n, paired) >= chance), 1000)


def visible(sd: float, n: int, paired: bool = True, chance: float = 0.8) -> float:
    """The smallest difference that n seeds see with that chance; NaN for one seed."""
    if n < 2 or not sd > 0:
        return math.nan
    return sd * float(brentq(lambda effect: power(effect, 1.0, n, paired) - chance, 0, 50))


def pooled_sd(pairs: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, over all of them; NaN where none has two values."""
    dof = sum(max(len(some) - 1, 0) for some in pairs)
    return math.sqrt(sum(float(np.var(some)) * len(some) for some in pairs if some) / dof) if dof else math.nan


# --------------------------------------------------------------------------------------------------- values of a run


def over_steps(curve: Curve, column: str) -> float:
    """Mean of a logged column over the steps of a run; NaN if it is not logged."""
    values, steps = curve.points[column][1:], np.diff(curve.points["step"])
    known = np.isfinite(values) & (steps > 0)
    return float(np.average(values[known], weights=steps[known])) if known.any() else math.nan


def signs(result: Result) -> list[str]:
    """What a stable run does not show."""
    points, found = result.curve.points, []
    gaps = points["gap"] if result.curve.flags.get("dtype", "float32") == "float32" else np.array([])
    for name, seen in (("truncated above 10 %", points["truncated"] > 0.10), ("gap above 1e-4", gaps > 1e-4)):
        if seen.any():
            found.append(f"{name} before {seen.sum()} of {seen.size - 1} evaluations")
    if low := int((result.falls > FALL).sum()):
        found.append(f"fell by up to {result.falls.max():.2f} ({low} of {result.falls.size} evaluations)")
    return found


def values(results: Sequence[Result], measure: str, axis: str, rate: float) -> dict[int, float]:
    """{seed: value} of one variant's runs; runs without that value (no ceiling to speak of, rate not reached) are
    missing. `A known` is A where it is identifiable, `fall` the largest fall of the pass rate below its best before."""
    found: dict[int, float | None] = {}
    for r in results:
        if measure == "final":
            found[r.seed] = r.final
        elif measure == "fall":
            found[r.seed] = float(r.falls.max())
        elif measure == "truncated":
            found[r.seed] = over_steps(r.curve, "truncated")
        elif measure in ("B shared", "C_mid shared"):
            found[r.seed] = getattr(r.shared[axis], measure.split()[0]) if axis in r.shared else None
        elif measure in ("A", "A known", "B", "C_mid"):
            fit = fitted(r.curve, axis).fit
            found[r.seed] = getattr(fit, measure.split()[0]) if fit.identifiable or measure != "A known" else None
        else:
            found[r.seed] = compute_to(r.curve.evals(), rate, measure)
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by variant, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.variant, []).append(result)
    return found


# ------------------------------------------------------------------------------------- a comparison's differences


def pairs(c: Comparison, groups: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """{variant: its baseline}, for the variants that have one among the finished runs."""
    first = next(iter(c.variants))
    found = {name: c.against.get(name, first) for name in groups if name != first}
    return {name: base for name, base in found.items() if base in groups}


def differences(
    groups: Mapping[str, Sequence[Result]], name: str, base: str, axis: str, rate: float, measure: str
) -> tuple[dict[int, float], dict[int, float]]:
    """{seed: value} of a variant and of its baseline, as logarithms where differences are RELATIVE."""
    both = [values(groups[variant], measure, axis, rate) for variant in (name, base)]
    if measure in RELATIVE:
        both = [{seed: math.log(value) for seed, value in some.items() if value > 0} for some in both]
    return both[0], both[1]


def spread(c: Comparison, groups: Mapping[str, Sequence[Result]], axis: str, measure: str) -> float:
    """Standard deviation of the paired differences of a comparison within its variants, over all of them but those of a
    run that falls: one collapse has a C_mid a thousand times as large, and would hide what all others could see."""
    calm = {variant: [r for r in some if r.falls.max() <= FALL] for variant, some in groups.items()}
    of_all = (differences(calm, v, base, axis, c.pass_rate, measure) for v, base in pairs(c, groups).items())
    return pooled_sd([[ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()] for ours, theirs in of_all])
