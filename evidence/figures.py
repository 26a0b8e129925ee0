"""The numbers of a comparison: finished runs are fitted, and variants are compared with their baselines.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] is its 95 % interval over the n seeds, where t is
Student's quantile with n - 1 degrees of freedom. Two variants are distinguishable if 0 lies outside. Each row has
several such intervals and nothing is corrected for their number: of twenty without any effect, one will look like one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from comparisons import Comparison
from curves import Evaluations
from scipy.optimize import brentq, minimize_scalar, nnls
from scipy.special import chdtri, ndtr, stdtrit

import fit_sigmoid
from fit_sigmoid import SigmoidFit

Groups = Mapping[str, Sequence[Evaluations]]  # variant -> its finished runs
Row = list[str]  # of a Markdown table

RELATIVE = ("C_mid shared", "tokens", "device_hours")  # differences of logarithms, shown in percent
FALL = 0.1  # an evaluation this far below the best before it
OUTCOMES = ("stands", "falls", "never rises")  # of a run
REPRODUCED, REFUTED, UNSEEN = "reproduced", "refuted", "cannot be seen at this size"
CHANCE = 0.8  # of seeing what is said to be visible


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


def outcome(run: Evaluations) -> str:
    """One of OUTCOMES: it *never rises* if no evaluation lies as far above the first as a fall does below the best."""
    if run.rates.max() - run.rates[0] <= FALL:
        return "never rises"
    return "stands" if fall_of(run) is None else "falls"


def by_outcome(runs: Iterable[Evaluations]) -> dict[str, list[Evaluations]]:
    """{outcome: the runs that have it}, for each of OUTCOMES."""
    named = [(outcome(run), run) for run in runs]
    return {name: [run for said, run in named if said == name] for name in OUTCOMES}


def compute_to(compute: Sequence[float], rates: Sequence[float], rate: float) -> float:
    """Compute at which the straight line between evaluations first reaches `rate`; inf if no evaluation does."""
    i = first(np.asarray(rates) >= rate)
    if i is None:
        return math.inf
    return float(np.interp(rate, rates[i - 1 : i + 1], compute[i - 1 : i + 1]) if i else compute[0])


def needed(run: Evaluations, rate: float, axis: str) -> float:
    """Compute that a run needs to a pass rate."""
    return compute_to(run.points[axis], run.rates, rate)


def rate_at(run: Evaluations, axis: str, share: float) -> float:
    """Pass rate at this share of a run's compute, on the straight line between evaluations."""
    C = run.points[axis]
    return float(np.interp(share * C[-1], C, run.rates))


def over_steps(run: Evaluations, column: str) -> float:
    """Mean of a logged column over the steps of a run; NaN if it is not logged."""
    values, steps = run.points[column][1:], np.diff(run.points["step"])
    known = np.isfinite(values) & (steps > 0)
    return float(np.average(values[known], weights=steps[known])) if known.any() else math.nan


def saturating_power(C: np.ndarray, R: np.ndarray) -> tuple[float, float, float]:
    """(A, D, B) of least squares for R = A - D / C^B, A <= 1, over the points with C > 0: Eq. 1 at large C.

    On early data its A runs to the bound, which is why the paper prefers the sigmoid. NaN for fewer than 4 points.
    """
    C, R = C[C > 0], R[C > 0]
    if C.size < 4:
        return math.nan, math.nan, math.nan

    def best(B: float) -> tuple[np.ndarray, float]:  # 1 - R = (1 - A) + D x is linear in 1 - A >= 0 and D >= 0
        return nnls(np.stack([np.ones_like(C), (C / C.max()) ** -B], 1), 1 - R)

    grid = np.geomspace(0.01, 10, 400)
    i = int(np.argmin([best(B)[1] for B in grid]))
    ends = grid[max(i - 1, 0)], grid[min(i + 1, grid.size - 1)]
    B = float(minimize_scalar(lambda B: best(B)[1], bounds=ends, method="bounded", options={"xatol": 1e-9}).x)
    gap, D = best(B)[0]
    return 1 - gap, D * C.max() ** B, B


# ------------------------------------------------------------------------------------------------ one comparison


@dataclass
class Compared:
    """The finished runs of a comparison in numbers."""

    name: str
    c: Comparison
    groups: Groups
    left_out: Sequence[str]  # runs without a result, each with the reason

    def __post_init__(self) -> None:
        first = next(iter(self.c.variants))
        against = {name: self.c.against.get(name, first) for name in self.groups if name != first}
        # variant -> its baseline, for those that have one among the finished runs
        self.against = {name: base for name, base in against.items() if base in self.groups}
        self.A, self.said, refits = share_ceiling(self.groups, self.c.axis)
        self.figures = figures_of(self.groups, self.c.pass_rate, self.c.axis, refits)

    def apart(self, name: str, measure: str) -> pd.Series:
        """Variant minus its baseline by seed; 0 for a baseline."""
        return differences(self.figures, name, self.against.get(name, name), measure)

    def spread(self, measure: str) -> float:
        """Standard deviation of the paired differences, pooled within the variants. Runs that fall are left out: one
        collapse has a C_mid a thousand times as large, and would hide what all others could see."""
        calm = self.figures[self.figures["fell"] <= FALL]
        against = self.against.items() if len(calm) else ()
        return pooled_sd([differences(calm, name, base, measure) for name, base in against])


def differences(figures: pd.DataFrame, name: str, base: str, measure: str) -> pd.Series:
    """Variant minus baseline by seed, for the seeds of which both are known; of logarithms where RELATIVE."""
    both = figures[measure].unstack(0).reindex(columns=list(dict.fromkeys((name, base))))
    if measure in RELATIVE:
        both = np.log(both.where(both > 0))
    return (both[name] - both[base]).dropna()


def share_ceiling(groups: Groups, axis: str) -> tuple[float | None, str, Sequence[SigmoidFit]]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `compare`, the refits).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, and the verdict says so.
    """
    named = {f"{variant} seed {run.seed}": fitted(run, axis) for variant, runs in groups.items() for run in runs}
    fits = list(named.values())
    if len(fits) < 2:
        return None, "one run: nothing to compare", []
    both, unknown = fit_sigmoid.compare(*fits, names=list(named)), sum(not f.identifiable for f in fits)
    said = f"no verdict: {unknown} of {len(fits)} ceilings are not identifiable" if unknown else both.verdict
    if both.refits:
        return both.shared_A, said, both.refits
    if not (ceilings := [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]):
        return None, said, []
    A = float(np.mean(ceilings))
    return A, said, [fit_sigmoid.fit(f.C, f.R, n_samples=f.n, A=A) for f in fits]


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
            "fell": falls(run).max(),
        }
    return pd.DataFrame.from_dict(rows, orient="index").replace(math.inf, math.nan)


# ------------------------------------------------------------------------------------------------ what can be told


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95 % interval of the mean over seeds; NaN ends for one value, all NaN for none."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
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


def seeds_needed(effect: float, sd: float, paired: bool) -> int:
    """The fewest seeds that see it with CHANCE."""
    return next((n for n in range(2, 1000) if power(effect, sd, n, paired) >= CHANCE), 1000)


def visible(sd: float, n: int) -> float:
    """The smallest difference that n pairs see with CHANCE; NaN for one pair."""
    if n < 2 or not sd > 0:
        return math.nan
    return sd * float(brentq(lambda effect: power(effect, 1.0, n, True) - CHANCE, 0, 50))


def pooled_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, over all of them; NaN where none has two values."""
    dof = sum(max(len(some) - 1, 0) for some in groups)
    squares = sum(float(np.var(some)) * len(some) for some in groups if len(some))
    return math.sqrt(squares / dof) if dof else math.nan
