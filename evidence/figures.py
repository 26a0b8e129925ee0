"""The numbers of a comparison: finished runs are fitted, and variants are compared with their baselines.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] is its 95 % interval over the n seeds, where t is
Student's quantile with n - 1 degrees of freedom. Two variants are distinguishable if 0 lies outside. Each row has
several such intervals and nothing is corrected for their number: of twenty without any effect, one will look like one.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pandas as pd
from comparisons import Comparison
from curves import Evaluations
from scipy.optimize import brentq
from scipy.special import chdtri, ndtr, stdtrit

import fit_sigmoid
from fit_sigmoid import SigmoidFit

Groups = Mapping[str, Sequence[Evaluations]]  # variant -> its finished runs
Row = list[str]  # of a Markdown table

RELATIVE = ("C_mid shared", "tokens", "device_hours")  # differences of logarithms, shown in percent
FALL = 0.1  # an evaluation this far below the best before it
REPRODUCED, REFUTED, UNSEEN = "reproduced", "refuted", "cannot be seen at this size"
LEAST_PAIRS = 3  # of runs with an identifiable ceiling, for a verdict on A


# ------------------------------------------------------------------------------------------------------ one run


def fit_to(run: Evaluations, axis: str, until: float = 1.0) -> SigmoidFit:
    """The fit to the first `until` of a run's compute on that axis. At step 0 the clock may have run: C is 0."""
    points = run.points
    C = np.where(points["step"] == 0, 0.0, points[axis])
    seen = until * C.max() * (1 + 1e-12) >= C
    return fit_sigmoid.fit(C[seen], run.rates[seen], n_samples=points["n"][seen])


fitted = cache(fit_to)  # since comparisons share runs


def final(run: Evaluations) -> float:
    """Pass rate at the end: mean of the last two evaluations."""
    return float(run.rates[-2:].mean())


def falls(run: Evaluations) -> np.ndarray:
    """(N,): how far each evaluation lies below the best before it; 0 at a new best."""
    return np.maximum.accumulate(run.rates) - run.rates


def fall_of(run: Evaluations) -> int | None:
    """Number of the evaluation at which the run falls, None if it never does."""
    return first(falls(run) > FALL)


def first(where: np.ndarray) -> int | None:
    """Index of the first True, None if there is none."""
    return int(np.argmax(where)) if where.any() else None


def learns(run: Evaluations) -> bool:
    """Whether any evaluation lies as far above the first as a fall lies below the best."""
    return bool(run.rates.max() - run.rates[0] > FALL)


def compute_to(compute: Sequence[float], rates: Sequence[float], rate: float) -> float:
    """Compute at which the straight line between evaluations first reaches `rate`; inf if no evaluation does."""
    for i in np.flatnonzero(np.asarray(rates) >= rate)[:1]:
        return float(np.interp(rate, rates[i - 1 : i + 1], compute[i - 1 : i + 1]) if i else compute[0])
    return math.inf


def needed(run: Evaluations, rate: float, axis: str) -> float:
    """Compute that a run needs to a pass rate."""
    return compute_to(run.points[axis], run.rates, rate)


def over_steps(run: Evaluations, column: str) -> float:
    """Mean of a logged column over the steps of a run; NaN if it is not logged."""
    values, steps = run.points[column][1:], np.diff(run.points["step"])
    known = np.isfinite(values) & (steps > 0)
    return float(np.average(values[known], weights=steps[known])) if known.any() else math.nan


def saturating_power(C: np.ndarray, R: np.ndarray, A_max: float = 1.0) -> dict[str, float]:
    """Least squares for R = A - D / C^B over the points with C > 0: Eq. 1 at large C. Returns A, D, B and rmse.

    On early data its A runs to the bound, which is why the paper prefers the sigmoid. ValueError: fewer than 4 points.
    """
    C, R = C[C > 0], R[C > 0]
    if C.size < 4:
        raise ValueError(f"a power law needs 4 points at C > 0, not {C.size}")
    B = np.geomspace(0.01, 10, 400)
    for _ in range(5):  # R = A - D x is linear in A and D: a regression for each B, on a grid that closes in
        x = (C / C.max()) ** -B[:, None]  # (G, N)
        off = x - x.mean(1, keepdims=True)
        D = np.maximum(-(off @ R) / (off * off).sum(1), 0)
        A = np.clip(R.mean() + D * x.mean(1), 0, A_max)
        D = np.where(A < A_max, D, x @ (A_max - R) / (x * x).sum(1))
        Q = ((A[:, None] - D[:, None] * x - R) ** 2).sum(1)
        i = int(np.argmin(Q))
        found = A[i], D[i] * C.max() ** B[i], B[i], math.sqrt(Q[i] / C.size)
        B = np.geomspace(B[max(i - 1, 0)], B[min(i + 1, B.size - 1)], 400)
    return dict(zip(("A", "D", "B", "rmse"), map(float, found), strict=True))


# ------------------------------------------------------------------------------------------------ all runs


def share_ceiling(groups: Groups, axis: str) -> tuple[float | None, str, list[SigmoidFit]]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `compare`, the refits).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, and the verdict says so.
    """
    named = {f"{variant} seed {run.seed}": fitted(run, axis) for variant, runs in groups.items() for run in runs}
    fits = list(named.values())
    if len(fits) < 2:
        return None, "one run: nothing to compare", []
    both = fit_sigmoid.compare(*fits, names=list(named))
    ceilings = [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]
    A = both.shared_A if both.refits else float(np.mean(ceilings)) if ceilings else None
    refits = list(both.refits)
    if A is not None and not refits:
        refits = [fit_sigmoid.fit(f.C, f.R, n_samples=f.n, A=A) for f in fits]
    unknown = sum(not f.identifiable for f in fits)
    return A, f"no verdict: {unknown} of {len(fits)} ceilings are not identifiable" if unknown else both.verdict, refits


def figures_of(groups: Groups, rate: float, axis: str, refits: Sequence[SigmoidFit]) -> pd.DataFrame:
    """A row for each (variant, seed): what needs no fit, its own A (`A known` where identifiable), and B and C_mid at
    the shared ceiling. NaN where the rate is not reached or there is no fit."""
    rows = {}
    for i, (variant, run) in enumerate((variant, run) for variant, runs in groups.items() for run in runs):
        f = fitted(run, axis)
        rows[variant, run.seed] = {
            "A": f.A,
            "A known": f.A if f.identifiable else math.nan,
            "B shared": refits[i].B if refits else math.nan,
            "C_mid shared": refits[i].C_mid if refits else math.nan,
            "final": final(run),
            "tokens": needed(run, rate, "tokens"),
            "device_hours": needed(run, rate, "device_hours"),
        }
    return pd.DataFrame.from_dict(rows, orient="index").replace(math.inf, math.nan)


def pairs(c: Comparison, groups: Groups) -> dict[str, str]:
    """{variant: its baseline}, for the variants that have one among the finished runs."""
    first = next(iter(c.variants))
    found = {name: c.against.get(name, first) for name in groups if name != first}
    return {name: base for name, base in found.items() if base in groups}


def differences(figures: pd.DataFrame, name: str, base: str, measure: str) -> pd.Series:
    """Variant minus baseline by seed, for the seeds of which both are known; of logarithms where RELATIVE."""
    both = figures[measure].unstack(0).reindex(columns=list(dict.fromkeys((name, base))))
    if measure in RELATIVE:
        both = np.log(both.where(both > 0))
    return (both[name] - both[base]).dropna()


def spread(c: Comparison, groups: Groups, figures: pd.DataFrame, measure: str) -> float:
    """Standard deviation of the paired differences of a comparison, pooled within its variants. Runs that fall are left
    out: one collapse has a C_mid a thousand times as large, and would hide what all others could see."""
    calm = [(variant, run.seed) for variant, runs in groups.items() for run in runs if falls(run).max() <= FALL]
    if not calm:
        return math.nan
    against = pairs(c, groups)
    return pooled_sd([differences(figures.loc[calm], name, base, measure) for name, base in against.items()])


# ------------------------------------------------------------------------------------------------ what can be told


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean over seeds; NaN ends for a single one, all NaN for none."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - reach, mean + reach


def against_paper(low: float, high: float, least: float, most: float, enough: bool = True) -> str:
    """What our interval [low, high] of a difference says of the paper's, which lies in [least, most].

    REFUTED: no value of ours is one of theirs. REPRODUCED, where theirs are about 0: all of ours are among them; else:
    ours overlap theirs and leave out 0. Anything else is UNSEEN, and all where there are not `enough` pairs of runs.
    """
    if enough and (high < least or low > most):
        return REFUTED
    among = least <= low and high <= most
    seen = among or (not least < 0 < most and (low > 0 or high < 0))
    return REPRODUCED if enough and seen else UNSEEN


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


def pooled_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, over all of them; NaN where none has two values."""
    dof = sum(max(len(some) - 1, 0) for some in groups)
    squares = sum(float(np.var(some)) * len(some) for some in groups if len(some))
    return math.sqrt(squares / dof) if dof else math.nan
