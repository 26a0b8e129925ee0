"""Fit pass rate against compute with a sigmoid, and say what more compute will bring, and how sure that is.

PROBLEM. The recipe that wins early in a run may lose later, and there is rarely a budget to compare recipes late.
IDEA. The pass rate on held-out prompts follows a sigmoid in compute, so the early part of a run predicts the rest
(Khatri et al. 2025, ScaleRL, arXiv 2510.13786, Eq. 1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    C      compute, in any unit               R0  pass rate before RL      A  ceiling (asymptotic pass rate)
    C_mid  compute at half of the gain A - R0                              B  efficiency: the exponent, how steep

WHY A SIGMOID. Suppose each problem is learned at a compute of its own, and that the logarithms of these computes follow
a logistic distribution of median log C_mid and scale 1/B. Then the share learned by C is 1 / (1 + (C_mid / C)^B): Eq. 1
is the distribution function of a log-logistic. With B = 2 the middle 80 % of the problems are learned between C_mid / 3
and 3 C_mid, about a decade. So the law holds where learning times spread out evenly like this, and fails where they do
not: problems that are all learned at once are a cliff, and a hard kind that is learned later is a second step.

This file climbs from the law to the command line. Each step uses those before it.

1. THE LAW. `sigmoid`, the equation above.
2. LEAST SQUARES. `plain_fit`, in 15 lines: the curve of least Q = sum_i w_i (R_i - R(C_i))^2, here with weights of 1.
3. UNCERTAINTY. `fit` finds the least Q from any start, and then keeps every curve that fits almost as well:

       Q <= Q_min + 1.1 * dispersion * t^2

   The interval of A, of B or of a prediction runs from its least to its greatest value over the curves kept. This is a
   profile likelihood. (A bootstrap would need refits and would break at the bound A <= 1.) The three factors:
   - dispersion: the variance of the residuals; where the numbers of samples are known, divided by that of pure sampling
     noise, pulled toward 1, and never below it. It is raised where neighboring residuals are correlated.
   - t: Student's quantile. Each interval is about one quantity, and t^2 is the F quantile for one parameter.
   - 1.1 corrects a selection: a ceiling is called identifiable if its interval is narrow, and some are so by chance.
   The law itself may be wrong for a run. So it is tested on the run: `backtest` fits 50, 60, 70 and 80 % of the compute
   and predicts the rest. Where the points came out above such a prediction by more than its interval, say by 1.5 times
   its upper half-width, the upper half-widths of A and of predictions beyond the data grow 1.5 times; likewise below.
4. VERDICT. A is identifiable if it passes the eleven checks of the table `CHECKS`. The main ones: the pass rate rises
   and does not fall at the end; few ceilings fit (their interval is at most 0.1 wide, and half of the gain); the curve
   bends in C and in log C, or has stopped rising; the data reach 2 C_mid. Else `reason` says what failed first, and
   ends of intervals that are in doubt are opened: A's upper one goes to the bound 1, or both go to 0 and 1.
5. COMPARISON. `compare`: the higher ceiling wins; where ceilings agree, B at the shared ceiling decides.
6. SEARCH. How the least Q and the set of curves are found. Not needed to use or trust a result.
7. REPORT, picture and command line for the `eval.jsonl` of a run.

CHOICES, where the paper is silent. (a) The point at C = 0 measures R0, with a sampling error like every other point;
without that point R0 is fitted. (b) Some runs rise faster near the top than any sigmoid with A <= 1 can. The best curve
then has A = 1 and predicts too low. So curves with A up to 1.25 are kept for predictions, each cut at 1; the printed
interval of A ends at 1. (c) `method="paper_grid"` is the paper's own procedure, to compare with published values.

>>> C, R = [0, 1, 2, 4, 8, 16, 32], [0.250, 0.275, 0.317, 0.405, 0.505, 0.566, 0.589]
>>> [round(v, 3) for v in plain_fit(C, R)]  # R0, A, B, C_mid
[0.251, 0.601, 1.745, 4.579]
>>> f = fit(C, R, n_samples=16_000)
>>> print(f"A {f.A:.3f}, 95% from {f.A_interval[0]:.3f} to {f.A_interval[1]:.3f}; at C = 64 {f.predict(64):.3f}")
A 0.601, 95% from 0.590 to 0.614; at C = 64 0.597
>>> fit(C[:-2], R[:-2], n_samples=16_000).reason
'ceilings from 0.55 to 0.77 fit: the data reach 0.51 by C = 8'
>>> learned_at = 4.6 * np.exp(np.random.default_rng(0).logistic(size=10_000) / 1.7)  # a compute for each problem
>>> print(f"{(learned_at <= 8).mean():.2f} learned by C = 8; Eq. 1: {sigmoid(8, 0, 1, 1.7, 4.6):.2f}")
0.72 learned by C = 8; Eq. 1: 0.72
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeWarning, curve_fit, least_squares
from scipy.special import expit, fdtrc, stdtrit

METHODS = ("least_squares", "paper_grid")
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "steps"}
B_RANGE = (0.05, 20.0)  # an interval that touches an end is reported as open
A_SLACK = 1.25  # choice (b)
MIN_SD = 1e-4  # no evaluation is more exact: residuals below it are rounding, which must not decide anything
PRIOR_DOF = 4.0  # weight of "dispersion = 1" where sample numbers are known: few residuals alone would claim anything
SAFETY = 1.1  # see step 3
CUTS = (0.5, 0.6, 0.7, 0.8)  # shares of the compute whose fits are tested on the rest
ROUNDING = 1 + 1e-12  # of a share of the compute


# ------------------------------------------------------------------------------------------------------ 1. The law


def sigmoid(C: ArrayLike, R0: ArrayLike, A: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> np.ndarray:
    """R(C) of arXiv 2510.13786, Eq. 1, for compute C >= 0. Arguments broadcast. Exactly R0 at C = 0."""
    with np.errstate(divide="ignore"):  # log 0 = -inf gives a share of 0, as it should
        # share of the gain: 1 / (1 + (C_mid / C)^B) = expit(B (log C - log C_mid)), which never overflows
        share = expit(B * (np.log(np.asarray(C, dtype=float)) - np.log(C_mid)))
    return R0 + (np.asarray(A) - R0) * share


# ------------------------------------------------------------------------------------------------- 2. Least squares


def plain_fit(C: ArrayLike, R: ArrayLike) -> tuple[float, float, float, float]:
    """(R0, A, B, C_mid) by least squares in Q = sum_i (R_i - R(C_i))^2, from a single start.

    Good enough for a run that shows both ends of its curve. What it lacks is in `fit`: points that count less than
    others, a second minimum, and how sure the result is.
    """
    C, R = np.asarray(C, dtype=float), np.asarray(R, dtype=float)

    def _residuals(x: np.ndarray) -> np.ndarray:
        R0, A, log_B, log_C_mid = x
        return sigmoid(C, R0, A, math.exp(log_B), math.exp(log_C_mid)) - R

    start = [R.min(), R.max(), 0.0, math.log(np.median(C[C > 0]))]
    low, high = [0.0, 0.0, math.log(B_RANGE[0]), -50.0], [1.0, 1.0, math.log(B_RANGE[1]), 99.0]
    R0, A, log_B, log_C_mid = least_squares(_residuals, start, bounds=(low, high), x_scale=[0.1, 0.1, 1, 1]).x
    return float(R0), float(A), math.exp(log_B), math.exp(log_C_mid)


# --------------------------------------------------------------------------------------------------- 3. Uncertainty


class Points(NamedTuple):
    """The points that a fit uses, sorted by compute."""

    C: np.ndarray  # (N,)
    R: np.ndarray  # (N,)
    n_samples: np.ndarray | None  # (N,)
    left_out: dict[str, int]  # how many points were not used, by reason: nan, duplicate, skipped, zero


class Data(NamedTuple):
    """What Q = sum_i w_i (R_i - R(C_i))^2 is made of."""

    C: np.ndarray  # (N,)
    R: np.ndarray  # (N,)
    w: np.ndarray  # (N,) weights: 1 / variance of a point, up to the dispersion
    R0_box: tuple[float, float]  # R0 lies in here


class Uncertainty(NamedTuple):
    """The likelihood set: every curve that fits almost as well as the best one."""

    dispersion: float = math.nan  # a point has variance dispersion * p (1 - p) / n, or dispersion where n is unknown
    dof: float = 0.0  # degrees of freedom behind the dispersion
    curves: np.ndarray | None = None  # (4, M) R0, A, B, C_mid; None where no residual is left to measure the noise


class Intervals(NamedTuple):
    """Low and high of each parameter over the likelihood set; wide open where the data say nothing."""

    R0: tuple[float, float]
    A: tuple[float, float]
    B: tuple[float, float] = (0.0, math.inf)
    C_mid: tuple[float, float] = (0.0, math.inf)


@dataclass
class SigmoidFit:
    """A fitted curve. Compute is in the unit of the data; numbers are NaN where there is no fit."""

    points: Points = field(repr=False)
    options: dict[str, Any] = field(repr=False)  # R0, A, method, A_max, level, A_range, C_mid_range, as given to `fit`
    intervals: Intervals
    uncertainty: Uncertainty = field(default=Uncertainty(), repr=False)
    R0: float = math.nan
    A: float = math.nan
    B: float = math.nan
    C_mid: float = math.nan
    rmse: float = math.nan  # root mean squared residual of the points, unweighted
    widened: tuple[float, float] = (1.0, 1.0)  # what `backtest` multiplies the lower and the upper half-width with
    reason: str = ""  # why the data cannot tell the ceiling; empty if they can

    identifiable = property(lambda self: not self.reason)
    n_points = property(lambda self: self.points.C.size)
    A_interval = property(lambda self: self.intervals.A)
    B_interval = property(lambda self: self.intervals.B)

    @property
    def R0_source(self) -> str:
        """Where R0 comes from: "given", "measured" (there is a point at C = 0) or "fitted"."""
        return "given" if self.options["R0"] is not None else "measured" if (self.points.C == 0).any() else "fitted"

    def predict(self, C: ArrayLike) -> np.ndarray:
        """The fitted curve at compute `C`, any shape."""
        return sigmoid(C, self.R0, self.A, self.B, self.C_mid)

    def interval(self, C: ArrayLike, *, noise: bool = False, n_samples: float | None = None) -> np.ndarray:
        """Low and high pass rate at compute `C` (K,) -> (2, K): of the curve, or with `noise` of an evaluation there.

        `n_samples` of that evaluation is by default the median of the fitted points'. Curve and noise are independent,
        so their half-widths add in quadrature.
        """
        C, A_max, (dispersion, dof, curves) = np.atleast_1d(C), self.options["A_max"], self.uncertainty
        p, top = self.predict(C), max(A_max, 1.0)
        if curves is None:
            return np.array([np.zeros(C.shape), np.full(C.shape, top)])
        allowed = [sigmoid(c, *curves) for c in C]  # K arrays (M,)
        low = np.minimum([v.min() for v in allowed], p)
        high = np.maximum(np.minimum([v.max() for v in allowed], A_max), p)  # choice (b)
        down, up = np.where(C > self.points.C[-1], np.reshape(self.widened, (2, 1)), 1.0)
        low, high = np.maximum(p - down * (p - low), 0), np.minimum(p + up * (high - p), top)
        if noise:
            if n_samples is None and self.points.n_samples is not None:
                n_samples = float(np.median(self.points.n_samples))
            sd = np.sqrt(dispersion * unit_variance(p, n_samples)) * stdtrit(dof, (1 + self.options["level"]) / 2)
            low, high = np.maximum(p - np.hypot(p - low, sd), 0), np.minimum(p + np.hypot(high - p, sd), top)
        return np.array([low, high])


def fit(
    C: ArrayLike, R: ArrayLike, *, R0: float | None = None, A: float | None = None, method: str = METHODS[0],
    skip_below: float = 0.0, n_samples: ArrayLike | None = None, A_max: float = 1.0, level: float = 0.95,
    A_range: Sequence[float] = (0.45, 0.8), C_mid_range: Sequence[float] | None = None, cuts: Sequence[float] = CUTS,
) -> SigmoidFit:  # fmt: skip
    """Fit Eq. 1 to pass rates `R` (N,) at compute `C` (N,). The inputs are not modified; their order does not matter.

    R0, A       hold these fixed. R0 None: the point at C = 0 measures it, else it is fitted
    method      "least_squares" (global minimum) or "paper_grid" (choice (c): A by steps of 0.005 in `A_range`, 100
                values of C_mid in `C_mid_range`, by default up to the run's compute; same intervals)
    skip_below  leave out points with 0 < C < skip_below; the point at C = 0 always stays
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    A_max       bound on A
    cuts        shares of the compute at which the law is tested on this run (`backtest`); () for no test
    Points with a NaN and exact repetitions are left out and counted. Data that cannot carry a fit give a `reason`, not
    an error. ValueError: shapes that differ, negative compute, a pass rate outside [0, max(1, A_max)], two points at
    C = 0 that disagree, an unknown method, R0 and A out of order, an empty A_range.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if not 0 <= (R0 or 0.0) <= (A_max if A is None else A) <= A_max < math.inf or A_max == 0:
        raise ValueError(f"need 0 <= R0 <= A <= A_max, 0 < A_max, not R0 = {R0}, A = {A}, A_max = {A_max}")
    if not 0 <= A_range[0] < A_range[1] < math.inf:
        raise ValueError(f"need 0 <= low < high in A_range, not {A_range[0]} and {A_range[1]}")
    options = dict(R0=R0, A=A, method=method, A_max=A_max, level=level, A_range=A_range, C_mid_range=C_mid_range)
    options["cuts"] = cuts
    C, R, n, _ = points = clean(C, R, n_samples, max(A_max, 1.0), skip_below, R0 is not None)
    f = SigmoidFit(points, options, Intervals(R0=(0.0, A_max), A=(0.0, A_max)))
    judge(f, "points")
    if f.reason:
        return f
    box = (0.0, A_max) if R0 is None else (R0, R0)
    bounds = search_range(C, (box[0], A_max) if A is None else (A, A))
    data = Data(C, R, 1 / unit_variance(R, n), box)
    x = global_fit(data, bounds)
    for _ in range(0 if n is None else 2):  # binomial weights need the curve, and the curve needs the weights
        data = data._replace(w=1 / unit_variance(sigmoid(C, *parameters(x, data)), n))
        x = global_fit(data, bounds)  # with other weights another curve may be the best one, far from the last
    f.R0, f.A, f.B, f.C_mid = map(float, parameters(x, data))
    f.uncertainty = likelihood_set(f, data, bounds, x)
    if f.uncertainty.curves is not None:
        f.intervals = intervals_of(f.uncertainty.curves, C, A_max)
        misses = [backtest(f, cut) for cut in cuts]
        f.widened = max([1.0, *(-miss for miss in misses)]), max([1.0, *misses])
        low, high = (f.A + factor * (end - f.A) for factor, end in zip(f.widened, f.intervals.A, strict=True))
        f.intervals = f.intervals._replace(A=(max(low, 0.0), min(high, A_max)))
    judge(f, *(("curve", "ceiling") if A is None else ("curve",)))
    if method == "paper_grid":  # after the verdict: the data are not to blame where no curve of the grid fits them
        f.R0, f.A, f.B, f.C_mid = paper_grid(f)
        judge(f, *(("grid",) if A is None else ()))
    f.rmse = math.sqrt(np.mean((R - f.predict(C)) ** 2))
    return f


def clean(
    C: ArrayLike, R: ArrayLike, n: ArrayLike | None, top: float, skip_below: float = 0.0, drop_zero: bool = False
) -> Points:
    """Sorted copies of the points to use. `top` bounds the pass rates; ValueError as `fit` says."""
    C, R = np.array(C, dtype=float), np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = None if n is None else np.broadcast_to(np.asarray(n, dtype=float), C.shape)
    real = np.isfinite(C) & np.isfinite(R) & (True if n is None else np.isfinite(n))
    order = np.lexsort((R if n is None else n, R, C))
    order = order[real[order]]
    C, R, n = C[order], R[order], None if n is None else n[order]
    if (C < 0).any() or (R < 0).any() or (R > top).any() or (n is not None and (n <= 0).any()):
        raise ValueError(f"compute must be >= 0, pass rates in [0, {top:g}] and n_samples > 0")
    repeated = np.zeros(C.size, dtype=bool)
    repeated[1:] = (np.diff(C) == 0) & (np.diff(R) == 0)
    if (~repeated & (C == 0)).sum() > 1:
        raise ValueError("two points at C = 0 disagree; keep one, it is the measurement of R0")
    skipped = ~repeated & (C > 0) & (C < skip_below)
    zero = ~repeated & (C == 0) & drop_zero  # with R0 given it says nothing, but its residual would count as noise
    left_out = {"nan": ~real, "duplicate": repeated, "skipped": skipped, "zero": zero}
    use = ~(repeated | skipped | zero)
    return Points(C[use], R[use], None if n is None else n[use], {why: int(v.sum()) for why, v in left_out.items()})


def unit_variance(p: ArrayLike, n: ArrayLike | None) -> np.ndarray:
    """Variance of a point at dispersion 1: p (1 - p) / n, with one success and one failure added: it is never 0."""
    p = np.asarray(p, dtype=float)
    if n is None:
        return np.ones(p.shape)
    q = np.clip((p * n + 1) / (n + 2), 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


def likelihood_set(f: SigmoidFit, data: Data, bounds: np.ndarray, x: np.ndarray) -> Uncertainty:
    """The curves with Q <= Q_min + 1.1 dispersion t^2, from the best one `f`, x.

    The dispersion is measured, since n_samples is prompts times samples, and samples of one prompt are correlated: the
    residuals vary more than binomially when every evaluation draws new prompts, and less on a fixed held-out set. Less
    is not believed: it is how exactly the run follows itself, not how exactly it follows the law.
    """
    z = np.sqrt(data.w) * (data.R - f.predict(data.C))  # standardized residuals
    known = f.points.n_samples is not None
    prior = PRIOR_DOF if known else 0.0
    # A measured R0 costs a degree of freedom like a fitted one, because its point is one of the N.
    dof = z.size - 2 - (f.options["R0"] is None) - (f.options["A"] is None) + prior
    if dof <= 0:
        return Uncertainty(dof=dof)
    dispersion = max((z @ z + prior) / dof, 1.0 if known else MIN_SD**2) * inflation(z, data.w.sum() * MIN_SD**2)
    limit = z @ z + SAFETY * float(dispersion) * stdtrit(dof, (1 + f.options["level"]) / 2) ** 2
    bounds = bounds * [[1, A_SLACK if f.options["A"] is None else 1], [1, 1], [1, 1]]  # choice (b)
    x, Q = explore(data, bounds, limit, x)
    R0, curvature, _ = best_R0(x, data)
    with np.errstate(divide="ignore"):
        reach = np.sqrt(np.maximum(limit - Q, 0) / curvature)  # Q is a parabola in R0: two ends for each x
    low, high = data.R0_box[0], np.minimum(data.R0_box[1], x[:, 0])
    R0 = np.concatenate([np.clip(R0 - reach, low, high), R0, np.clip(R0 + reach, low, high)])
    x = np.tile(x, (3, 1))
    return Uncertainty(float(dispersion), dof, np.stack([R0, x[:, 0], np.exp(x[:, 1]), np.exp(x[:, 2])]))


def backtest(f: SigmoidFit, cut: float) -> float:
    """By how many half-widths of its interval the mean of the points after the first `cut` of the compute lies above
    (positive) or below what a fit to those before it predicts; 0 where there is no interval or no such point."""
    C, R, n, _ = f.points
    early = C <= cut * C[-1] * ROUNDING
    options = f.options | {"cuts": (), "method": METHODS[0]}
    g = fit(C[early], R[early], n_samples=None if n is None else n[early], **options)
    if g.uncertainty.curves is None or early.all():
        return 0.0
    C, R, n = C[~early], R[~early], None if n is None else n[~early]
    p, (low, high), (dispersion, dof, _) = g.predict(C), g.interval(C), g.uncertainty
    miss = float(np.mean(R - p))
    reach = np.mean(high - p if miss > 0 else p - low)  # of the curve: it is off by as much at all these points
    sd = math.sqrt(dispersion * np.mean(unit_variance(p, n)) / C.size)  # of the points' own noise
    return miss / math.hypot(reach, sd * stdtrit(dof, (1 + f.options["level"]) / 2))


def inflation(z: np.ndarray, least: float) -> float:
    """(1 + r) / (1 - r), r the lag-1 correlation of residuals z (N,): neighbors of one sign are not independent.

    1 where r is not significant (5 %, one-sided), or where z @ z is far below `least`.
    """
    r = min(z[1:] @ z[:-1] / max(z @ z, least), 0.95)
    return (1 + r) / (1 - r) if r > 1.645 / math.sqrt(z.size) else 1.0


def intervals_of(curves: np.ndarray, C: np.ndarray, A_max: float) -> Intervals:
    """Least and greatest value of each parameter over `curves` (4, M); open within 5 % of the search range's end."""
    R0, A, *rest = ((float(v.min()), float(v.max())) for v in curves[:, curves[1] <= A_max + 1e-9])
    ends = np.exp(search_range(C, (0, 1))[1:])
    B, C_mid = (
        (0.0 if low < end[0] * 1.05 else low, math.inf if high > end[1] / 1.05 else high)
        for (low, high), end in zip(rest, ends, strict=True)
    )
    return Intervals(R0, (A[0], min(float(curves[1].max()), A_max)), B, C_mid)


# ------------------------------------------------------------------------------------------------------- 4. Verdict

# Of the likelihood set in A: five of the paper's margins of 0.02. Where a run gains little, the limit is half of its
# gain A - R0: ceilings 0.1 apart say nothing about a run that gains 0.1.
MAX_WIDTH = 0.1
RISE_ALPHA = 0.05  # a flat line must be this unlikely before the pass rate is said to rise
FLAT_ALPHA = 0.001  # and this unlikely before it is said to have risen to a ceiling
LINE_ALPHA = 0.01  # a straight line must be this unlikely before the curve is said to bend toward a ceiling
SLOPE_SDS = 2.0  # standard errors from which on a line rises or falls; a line that does not rise is a ceiling reached
REACH = 2.0  # in C_mid: how far the data must go before they bound the ceiling from above
LATE_SHARE, LATE_SDS = 1 / 5, 4.0  # this share of the points, the last ones, may lie so many standard errors too low

# What must hold before A is called identifiable, by what is looked at; the first row that fails gives the reason.
# (condition; a test that is True when it is violated; which intervals say too much then, and are opened; the reason);
# `e` are the numbers of `evidence`
CHECKS = {
    "points": (
        ("enough points", lambda e: e.n < 4 or e.computes < 3, "none",
         "{n} usable points, but four unknowns need at least 4, at three or more values of C > 0: "
         "evaluate more often or fit a larger part"),
        ("compute counts from the start", lambda e: e.first > e.last / 2 and not e.starts_late, "none",
         "compute that starts at {first:g} and ends at {last:g}: subtract its start"),
    ),
    "curve": (
        ("noise is measured", lambda e: e.dof <= 0, "none",
         "{n} points leave no residual to measure the noise by: add points, or give n_samples"),
        ("pass rate rises", lambda e: e.p_flat > RISE_ALPHA, "A and R0",
         "the pass rate {moves} by C = {end}: there is no ceiling to fit"),
        ("end stays on the curve", lambda e: e.late < -LATE_SDS * e.noise, "A",
         "the last {late_n} points lie below the curve: the run falls away from any ceiling"),
    ),
    "ceiling": (  # where A is fitted
        ("data and not the bound hold A", lambda e: e.A > e.A_max - 1e-6 and e.reach < e.A_max - MAX_WIDTH / 2, "none",
         "the bound A <= {A_max:g} stopped the fit and not the data, which reach {reach:.2f} by C = {end}"),
        ("few ceilings fit", lambda e: e.width > min(MAX_WIDTH, e.gain / 2), "none",  # A up to 1.25 A_max
         "ceilings from {low:.2f} to {up_to} fit: the data reach {reach:.2f} by C = {end}"),
        ("curve bends in C", lambda e: p_of_line(e, e.C / e.C[-1]) > LINE_ALPHA, "A above",
         "a straight line in C fits about as well: no ceiling shows by C = {end}"),
        ("curve bends in log C", lambda e: p_of_line(e, np.log(e.C)) > LINE_ALPHA, "A above",
         "a straight line in log C fits about as well: no ceiling shows by C = {end}"),
        ("rise is no luck", lambda e: e.p_flat > FLAT_ALPHA, "A above",
         "a flat line fits about as well: no ceiling shows by C = {end}"),
        ("data reach 2 C_mid", lambda e: e.last < REACH * e.C_mid, "A above",
         "the data end at {shown:.1f} C_mid: the ceiling is at least {low:.2f}"),
    ),
    "grid": (  # of the paper
        ("A lies inside the grid", lambda e: e.A < e.grid[0] + 1e-9 or e.grid[1] - 1e-9 < e.A < e.A_max, "none",
         "A lies on the edge of the grid {grid[0]:g}..{grid[1]:g}: widen A_range"),
    ),
}  # fmt: skip


def judge(f: SigmoidFit, *stages: str) -> None:
    """Make the checks of these stages. The first that fails gives `f.reason` and opens intervals that say too much."""
    e = evidence(f)
    for _, fails, opens, reason in (check for stage in stages for check in CHECKS[stage]):
        if not f.reason and fails(e):
            f.reason, f.intervals = reason.format(**vars(e)), opened(f, e, opens)


def evidence(f: SigmoidFit) -> SimpleNamespace:
    """The numbers that the checks compare and the reasons show; before a fit those of the points only."""
    C, R, n, left_out = f.points
    A_max, curves = f.options["A_max"], f.uncertainty.curves
    e = SimpleNamespace(n=C.size, first=C.min(initial=math.inf), last=C.max(initial=0.0))
    e.computes = np.unique(C[C > 0]).size
    e.starts_late = left_out["skipped"] or left_out["zero"] or f.options["A"] is not None  # by choice, or a refit
    if math.isnan(f.A):
        return e
    e.A, e.A_max, e.gain, e.grid = f.A, A_max, f.A - f.R0, f.options["A_range"]
    e.reach, e.end = float(f.predict(C[-1])), short(float(C[-1]))
    e.C_mid, e.shown = f.C_mid, e.last / f.C_mid
    e.low, e.high = f.intervals.A
    top = math.inf if curves is None else f.A + f.widened[1] * (curves[1].max() - f.A)  # e.high is cut at A_max
    e.width, e.up_to = top - e.low, f"{e.high:.2f}" + (" and beyond" if top > A_max else "")
    e.dispersion, e.dof, _ = f.uncertainty
    e.w = 1 / unit_variance(f.predict(C), n)
    z = np.sqrt(e.w) * (R - f.predict(C))  # standardized residuals
    level = f.R0 if f.R0_source == "given" else e.w @ R / e.w.sum()
    # What the curve explains beyond a flat line; then the mean misfit of the last points, against the noise.
    e.p_flat = f_test_p(e.w @ (R - level) ** 2 - z @ z, 2, e.dof, e.dispersion)
    falls = np.std(R) > MIN_SD and np.corrcoef(C, R)[0, 1] < -SLOPE_SDS / math.sqrt(C.size)
    e.moves = "falls" if falls else "does not rise beyond its noise"
    e.late_n = max(3, int(LATE_SHARE * C.size + 1e-9))
    e.late = z[-e.late_n :].mean() * math.sqrt(e.late_n)
    e.noise = math.sqrt(max(np.mean(np.diff(z) ** 2) / 2, e.w.mean() * MIN_SD**2))  # differences miss a slow misfit
    # For the straight lines: the points with C > 0, their weights, and Q of the curve there.
    e.C, e.R, e.v, e.Q = C[C > 0], R[C > 0], e.w[C > 0], z[C > 0] @ z[C > 0]
    return e


def f_test_p(gain: float, k: int, dof: float, dispersion: float) -> float:
    """F test: how likely noise is to lower Q by `gain` where `k` more parameters have nothing to explain."""
    return float(fdtrc(k, dof, max(gain, 0.0) / k / dispersion))


def p_of_line(e: SimpleNamespace, x: np.ndarray) -> float:
    """F test of the curve against a straight line in x, at the points with C > 0: how likely noise alone bends it.

    0, which means "bends", also where the line does not rise: the ceiling is reached already.
    """
    Q_line, Q_flat = (e.v @ (e.R - np.polyval(np.polyfit(x, e.R, k, w=np.sqrt(e.v)), x)) ** 2 for k in (1, 0))
    rises = Q_flat - Q_line > SLOPE_SDS**2 * e.dispersion
    return f_test_p(Q_line - e.Q, 2, e.dof, e.dispersion) if rises else 0.0


def opened(f: SigmoidFit, e: SimpleNamespace, opens: str) -> Intervals:
    """The intervals of `f` without the ends that a failed check puts in doubt: `opens` is its entry in CHECKS."""
    i, A_max = f.intervals, f.options["A_max"]
    if opens == "none":
        return i
    if opens in ("A", "A above"):
        return i._replace(A=(0.0 if opens == "A" else i.A[0], A_max))
    R0 = i.R0
    if f.options["R0"] is None:  # every curve that is flat from the first point fits: only a measurement tells R0
        sd = math.sqrt(SAFETY * e.dispersion / e.w[0]) if e.first == 0 else math.inf
        reach, R = sd * stdtrit(e.dof, (1 + f.options["level"]) / 2), f.points.R[0]
        R0 = (max(min(float(R - reach), f.R0), 0.0), min(max(float(R + reach), f.R0), A_max))
    return Intervals(R0, (0.0, A_max) if f.options["A"] is None else i.A)


# ---------------------------------------------------------------------------------------------------- 5. Comparison


@dataclass
class Comparison:
    """Several runs. Where their ceilings agree, `refits` share `shared_A`, and their B compare the runs."""

    names: list[str]
    fits: list[SigmoidFit]
    verdict: str = ""
    shared_A: float | None = None
    refits: list[SigmoidFit] = field(default_factory=list)


def compare(*fits: SigmoidFit, names: Sequence[str] | None = None, margin: float = 0.02) -> Comparison:
    """The paper's comparison. Ceilings within `margin`, the noise between equal runs, agree: refit all with their mean,
    each by its own method, and compare B. Else the higher ceiling wins. No verdict where a ceiling is not identifiable.

    ValueError: fewer than two fits.
    """
    if len(fits) < 2:
        raise ValueError("a comparison needs at least two fits")
    both = Comparison(list(names or [f"run {i + 1}" for i in range(len(fits))]), list(fits))
    unknown = [name for name, f in zip(both.names, fits, strict=True) if not f.identifiable]
    A = [f.A for f in fits]
    if unknown:
        both.verdict = f"no verdict: the ceiling of {', '.join(unknown)} is not identifiable"
    elif (spread := max(A) - min(A)) > margin + 1e-9:  # the paper's leave-one-out runs, .590 to .610, agree
        high, low = int(np.argmax(A)), int(np.argmin(A))
        both.verdict = f"ceilings differ by {spread:.3f}, more than {margin:g}: {both.names[high]} is highest"
        if fits[high].A_interval[0] <= fits[low].A_interval[1]:
            both.verdict += f", but its interval overlaps that of {both.names[low]}"
    else:
        both.shared_A = float(np.mean(A))
        both.refits = [refit(f, both.shared_A) for f in fits]
        B = [f.B for f in both.refits]
        high, low = int(np.argmax(B)), int(np.argmin(B))
        overlap = both.refits[high].B_interval[0] <= both.refits[low].B_interval[1]
        said = "the intervals of B overlap" if overlap else f"{both.names[high]} is the most efficient"
        both.verdict = f"ceilings agree within {margin:g}; at the shared A = {both.shared_A:.3f} {said}"
    return both


def refit(f: SigmoidFit, A: float) -> SigmoidFit:
    """The same points fitted again in the same way, with the ceiling held at A."""
    return fit(f.points.C, f.points.R, n_samples=f.points.n_samples, **(f.options | {"A": A}))


# --------------------------------------------------------------- 6. The search (not needed to use or trust a result)

# The method ends here. Below: how the curves are found (6), and how a result is shown (7).


def best_R0(x: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For curves x (G, 3) = A, log B, log C_mid: the best R0 (G,), half the curvature of Q in it (G,), and Q (G,)."""
    C, R, w, box = data
    A = x[:, :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        s = expit(np.exp(x[:, 1:2]) * (np.log(C) - x[:, 2:]))  # (G, N) share of the gain
        u, y = 1 - s, R - A * s  # R = (1 - s) R0 + s A is linear in R0: y = u R0
        curvature = (u * u) @ w
        R0 = np.where(curvature > 0, (u * y) @ w / curvature, box[0])
    R0 = np.clip(R0, box[0], np.minimum(box[1], A[:, 0]))  # no curve falls: R0 <= A
    return R0, curvature, (y - u * R0[:, None]) ** 2 @ w


def search_range(C: np.ndarray, A_box: Sequence[float]) -> np.ndarray:
    """Bounds (3, 2) of A, log B and log C_mid; those of C_mid lie far beyond the data on both sides."""
    return np.array([A_box, np.log(B_RANGE), np.log([C[C > 0].min() / 100, C.max() * 1000])])


def parameters(x: np.ndarray, data: Data) -> np.ndarray:
    """(R0, A, B, C_mid) of x = (A, log B, log C_mid)."""
    return np.array([best_R0(x[None], data)[0][0], x[0], *np.exp(x[1:])])


def global_fit(data: Data, bounds: np.ndarray) -> np.ndarray:
    """x = (A, log B, log C_mid) of least Q, by `least_squares` from the best of a population."""

    def _residuals(x: np.ndarray) -> np.ndarray:
        return np.sqrt(data.w) * (sigmoid(data.C, *parameters(x, data)) - data.R)

    start = explore(data, bounds)[0][0]
    wider = bounds + np.array([-1e-9, 1e-9])  # `least_squares` wants low < start < high, also where A is held
    x = least_squares(_residuals, start, bounds=wider.T, jac="3-point", xtol=1e-15, ftol=1e-15, gtol=1e-15).x
    x = np.clip(x, *bounds.T)
    flat = np.clip([data.w @ data.R / data.w.sum(), *bounds[1:].mean(1)], *bounds.T)
    Q, Q_flat = best_R0(np.stack([x, flat]), data)[2]  # where flat is as good, rounding would choose B and C_mid
    return flat if Q_flat < Q + data.w.sum() * MIN_SD**2 else x


def explore(
    data: Data, bounds: np.ndarray, limit: float = -math.inf, x: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Fill the set of curves with Q <= limit, or without a limit close in on the least Q: -> x (G, 3), Q (G,).

    A population spread over `bounds` moves as in differential evolution (Storn and Price 1997): a member plus the
    difference of two others, so that steps take the shape of the set, however thin and bent. Members with Q <= limit
    stay, and the best 60 while there are fewer. Half of the moves start from the extremes of A, B and C_mid, since the
    extremes are what the set is for. The seed is fixed: the same data give the same answer.
    """
    rng, size, best, (low, high) = np.random.default_rng(0), 600, 60, bounds.T
    trial = rng.uniform(low, high, (2 * size, 3))
    if x is not None:
        trial[0] = x
    pool, Q = np.empty((0, 3)), np.empty(0)
    for _ in range(24):
        pool, Q = np.concatenate([pool, trial]), np.concatenate([Q, best_R0(trial, data)[2]])
        stay = Q <= max(limit, np.partition(Q, best)[best])
        pool, Q = pool[stay], Q[stay]
        order, k = pool.argsort(0, kind="stable"), max(1, len(pool) // 100)
        i, j, m = rng.integers(len(pool), size=(3, size))
        i[: size // 2] = rng.choice(np.concatenate([order[:k], order[-k:]]).ravel(), size // 2)
        trial = np.clip(pool[i] + rng.choice([1.5, 0.5, 0.15], (size, 1)) * (pool[j] - pool[m]), low, high)
    stay = Q <= max(limit, Q.min())
    return pool[stay], Q[stay]


def paper_grid(f: SigmoidFit) -> tuple[float, ...]:
    """The paper's procedure: every (A, C_mid) of a grid, B by `curve_fit`, the least sum of squares wins; unweighted.

    B is first scanned in all cells at once; only the best hundred of the 7,100 cells are worth a `curve_fit`. Values of
    A outside [R0, A_max] move to its ends, since no curve falls and none passes A_max; an A that is held stays.
    """
    C, R, (held, A_max) = f.points.C, f.points.R, (f.options["A"], f.options["A_max"])
    R0 = min(R[0] if f.R0_source == "measured" else f.R0, A_max if held is None else held)
    A = np.round(np.arange(f.options["A_range"][0], f.options["A_range"][1] + 1e-9, 0.005), 10)
    A = np.unique(np.clip(A, *((R0, A_max) if held is None else (held, held))))
    low, high = f.options["C_mid_range"] or (C.max() / 100, C.max())
    C_mid, B = np.linspace(low, high, 100), np.geomspace(*B_RANGE, 200)
    s = sigmoid(C, 0.0, 1.0, B[:, None, None], C_mid[:, None])  # (200, 100, N)
    gain, y = (A - R0)[:, None, None], R - R0
    Q = y @ y - 2 * gain * (s @ y) + gain**2 * (s * s).sum(-1)  # (71, 200, 100)
    start, Q = B[Q.argmin(1)], Q.min(1)  # (71, 100)
    found: list[tuple[float, ...]] = []
    for i, j in np.argwhere(np.partition(Q.ravel(), 99)[99] >= Q):
        with warnings.catch_warnings():  # on a step or a flat curve B has no covariance, which is not asked for
            warnings.simplefilter("ignore", OptimizeWarning)
            curve_of = partial(sigmoid, R0=R0, A=A[i], C_mid=C_mid[j])
            (log_B,), _ = curve_fit(lambda c, b, f=curve_of: f(c, B=np.exp(b)), C, R, p0=[math.log(start[i, j])])
        cell = (float(R0), float(A[i]), math.exp(log_B), float(C_mid[j]))
        found.append((np.sum((sigmoid(C, *cell) - R) ** 2), *cell))
    return min(found)[1:]


# -------------------------------------------------------------------------------------- 7. Report and command line


class Prediction(NamedTuple):
    """The curve at one compute, its interval, the interval of an evaluation made there, what was measured (or NaN)."""

    C: float
    pass_rate: float
    curve: tuple[float, float]
    evaluation: tuple[float, float]
    measured: float


@dataclass
class CurveReport:
    """One run: the fit to its first part, and how the rest came out."""

    name: str
    x: str  # what compute is: tokens, device_hours, flops, step
    fit: SigmoidFit
    fit_until: float  # compute up to which points were fitted
    C: np.ndarray = field(repr=False)  # (N,) all points
    R: np.ndarray = field(repr=False)  # (N,)
    unseen_points: int = 0
    unseen_rmse: float = math.nan
    unseen_covered: float = math.nan  # share of the unseen points inside the interval of an evaluation
    predictions: list[Prediction] = field(default_factory=list)  # at the end of the run, then where asked


def of_data_set(rows: Sequence[Mapping], name: str) -> list[dict]:
    """The records of `rows` with the figures of one of their `data_sets`; those without it are left out."""
    return [{**row, **row["data_sets"][name]} for row in rows if name in row.get("data_sets", {})]


def load(source: str | Path | Sequence[Mapping], x: str | None = None, data_set: str = "") -> tuple:
    """Read an `eval.jsonl`, its folder or such records: -> name of x, C (N,), R (N,), n_samples (N,) or None.

    `data_set` takes the figures of one data set, not those over all that are trained on. `x` is the column of compute;
    None: tokens on a CPU run (so marked, or without device-hours), else device_hours. ValueError says what is wrong.
    """
    if isinstance(source, (str, Path)):
        file = Path(source, "eval.jsonl") if Path(source).is_dir() else Path(source)
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        source = json.loads("[" + ",\n".join(lines) + "]")
    rows = of_data_set(source, data_set) if data_set else [dict(row) for row in source]
    if data_set and not rows:
        raise ValueError(f"no record has a data set {data_set!r}")
    columns = {column for row in rows for column in row}
    hours, devices = any(row.get("device_hours") for row in rows), {row.get("device", "cpu") for row in rows}
    x = x or ("tokens" if (devices == {"cpu"} if "device" in columns else not hours) else "device_hours")
    if missing := {x, "pass_rate"} - columns:
        raise ValueError(f"none of the {len(rows)} records has {' or '.join(sorted(missing))}")
    # Before the first step the clock has run, but nothing has been trained.
    C = np.array([0.0 if row.get("step") == 0 else row.get(x) for row in rows], dtype=float)
    R = np.array([row.get("pass_rate") for row in rows], dtype=float)
    for i in np.flatnonzero((C < 0) | np.isinf(C) | (R < 0) | (R > 1)):
        raise ValueError(f"record {i + 1}: {x} is {C[i]:g}, pass_rate {R[i]:g}; need compute >= 0, a rate in [0, 1]")
    counts = np.array([[row.get("n_prompts"), row.get("n_samples")] for row in rows], dtype=float).prod(1)
    return x, C, R, counts if columns.issuperset({"n_prompts", "n_samples"}) else None


def curve(
    source: str | Path | Sequence[Mapping], *, x: str | None = None, name: str = "", fit_until: float = 1.0,
    predict_at: Sequence[float] = (), plot: str | Path | None = None, data_set: str = "", **options: Any,
) -> CurveReport:  # fmt: skip
    """`load` a run, fit the points up to the share `fit_until` of its compute, compare the rest with the curve.

    `options` go to `fit`; `plot` is a PNG to write. Too few points give a verdict in the report, not an error.
    """
    x, C, R, n = load(source, x, data_set)
    name = name or (str(source).removesuffix("/eval.jsonl") if isinstance(source, (str, Path)) else "this run")
    name += f", {data_set}" if data_set else ""
    real = np.isfinite(C) & np.isfinite(R)
    end = float(C[real].max(initial=0.0))
    unseen = real & (C > fit_until * end * ROUNDING)
    f = fit(C[~unseen], R[~unseen], n_samples=None if n is None else n[~unseen], **options)
    report = CurveReport(name, x, f, fit_until * end, C, R, int(unseen.sum()))
    n_new = None if n is None else float(np.nanmedian(n))  # samples of an evaluation to come
    for at in (end, *predict_at):
        low, high = f.interval(at)[:, 0].tolist()
        least, most = f.interval(at, noise=True, n_samples=n_new)[:, 0].tolist()
        seen = R[real & (at == C)]
        measured = float(seen.mean()) if seen.size else math.nan
        report.predictions.append(Prediction(at, float(f.predict(at)), (low, high), (least, most), measured))
    if unseen.any():
        low, high = f.interval(C[unseen], noise=True, n_samples=n_new)
        report.unseen_rmse = math.sqrt(np.mean((f.predict(C[unseen]) - R[unseen]) ** 2))
        report.unseen_covered = float(np.mean((low <= R[unseen]) & (R[unseen] <= high)))
    if plot is not None:
        plot_curves([report], plot)
    return report


def short(v: float) -> str:
    """1234567 -> '1.23M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(v) < 1000 * size:
            return f"{v / size:.3g}{unit}"
    return f"{v:.3g}"


def span(pair: Sequence[float], digits: int | None = None) -> str:
    """(0.5, 1e6) -> '[0.5, 1M]'; with `digits` 3 '[0.500, 1000000.000]'."""
    return "[" + ", ".join(short(v) if digits is None else f"{v:.{digits}f}" for v in pair) + "]"


def format_report(*reports: CurveReport) -> str:
    """The table that a person reads, one block per run."""
    return "\n\n".join("\n".join(f"{label:<24}{text}" for label, text in _block(r)) for r in reports)


def _block(r: CurveReport) -> list[tuple[str, str]]:
    f, i, unseen = r.fit, r.fit.intervals, ""
    if math.isnan(f.A):
        return [(f"{r.name}: ", f"no fit: {f.reason}")]
    if r.unseen_points:
        unseen = f"; {r.unseen_rmse:.4f} unseen, {r.unseen_covered:.0%} of it inside the intervals"
    left_out = ", ".join(f"{count} {why}" for why, count in f.points.left_out.items())
    rows = [
        (f"{r.name}: ", f"{r.x} up to {short(r.fit_until)}, {f.options['level']:.0%} intervals"),
        ("A     ceiling", f"{f.A:.3f}  {span(i.A, 3)}" + (" identifiable" if f.identifiable else "")),
        *([] if f.identifiable else [("      not identifiable", f.reason)]),
        ("B     efficiency", f"{f.B:.2f}   {span(i.B)}"),
        ("C_mid half the gain", f"{short(f.C_mid)}   {span(i.C_mid)} {UNITS.get(r.x, r.x)}"),
        ("R0    before RL", f"{f.R0:.3f}  {span(i.R0, 3)} {f.R0_source}"),
        ("points", f"{f.n_points} fitted, {r.unseen_points} unseen; left out: {left_out}"),
        ("RMSE", f"{f.rmse:.4f} fitted{unseen}"),
    ]
    for p in r.predictions:
        text = f"{p.pass_rate:.3f}  curve {span(p.curve, 3)}, an evaluation {span(p.evaluation, 3)}"
        if not math.isnan(p.measured):
            hit = p.evaluation[0] <= p.measured <= p.evaluation[1]
            text += f"; measured {p.measured:.3f}, {'inside' if hit else 'OUTSIDE'}"
        rows.append((f"at {short(p.C)}", text))
    return rows


def format_comparison(both: Comparison) -> str:
    """One line per run, then the verdict."""
    lines = [f"{'run':<36}     A   interval         B" + (f"     B at A = {both.shared_A:.3f}" if both.refits else "")]
    for i, (name, f) in enumerate(zip(both.names, both.fits, strict=True)):
        lines.append(f"{name[-35:]:<36} {f.A:.3f}   {span(f.A_interval, 3)} {f.B:5.2f}")
        lines[-1] += f"     {both.refits[i].B:.2f} {span(both.refits[i].B_interval)}" if both.refits else ""
    return "\n".join([*lines, both.verdict])


def plot_curves(reports: Sequence[CurveReport | SigmoidFit], path: str | Path) -> None:
    """Write a PNG: points, the fitted part, the extrapolation with the band of new evaluations, the points not seen."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, r in enumerate(reports):
        if isinstance(r, SigmoidFit):
            r = CurveReport(f"run {i + 1}", "any unit", r, r.points.C.max(initial=0.0), r.points.C, r.points.R)
        f, color, last = r.fit, f"C{i}", float(np.nanmax(r.C, initial=0.0))
        label = str if len(reports) == 1 else {"measured, fitted": r.name}.get
        unseen = r.C > r.fit_until * ROUNDING
        fitted = ~unseen & np.isin(r.C, f.points.C) & np.isin(r.R, f.points.R)
        for text, use, marker, fill in (
            ("measured, fitted", fitted, "o", color),
            ("measured, not seen by the fit", unseen, "o", "white"),
            ("left out", ~fitted & ~unseen, "x", color),
        ):
            if use.any():
                axes.plot(r.C[use], r.R[use], marker, color=color, mfc=fill, ms=5, label=label(text))
        if f.uncertainty.curves is None:
            continue
        end = max([last, *(p.C for p in r.predictions if p.C <= 4 * last)])
        for text, start, stop, style in (("fit", 0, r.fit_until, "-"), ("extrapolation", r.fit_until, end, "--")):
            if stop > start:
                grid = np.linspace(start, stop, 200)
                axes.plot(grid, f.predict(grid), style, color=color, label=label(text))
        grid, text = np.linspace(0, end, 200), label(f"{f.options['level']:.0%} of evaluations")
        axes.fill_between(grid, *f.interval(grid, noise=True), color=color, alpha=0.15, lw=0, label=text)
    x = getattr(reports[0], "x", "any unit")
    axes.xaxis.set_major_formatter(lambda v, _: short(v))
    axes.set(xlabel=f"compute ({UNITS.get(x, x)})", ylabel="pass rate on held-out prompts", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Fit pass rate against compute (arXiv 2510.13786, Eq. 1).")
    add = parser.add_argument
    add("files", nargs="+", help="eval.jsonl of a run, or its folder; several runs are compared")
    add("--fit-until", type=float, default=1.0, metavar="SHARE", help="fit this share of the compute, predict the rest")
    add("--skip-below", type=float, default=0.0, metavar="C", help="leave out points with 0 < compute < C")
    add("--predict-at", type=float, nargs="+", default=[], metavar="C", help="predict at this compute, too")
    add("--method", choices=METHODS, default=METHODS[0])
    add("--plot", metavar="PNG", help="draw points, fit and extrapolation")
    add("--data-set", default="", metavar="NAME", help="fit this data set of train.py's evaluations alone")
    options = vars(parser.parse_args(argv))
    files, plot, reports = options.pop("files"), options.pop("plot"), []
    try:
        for file in files:
            reports.append(r := curve(file, **options))
            if math.isnan(r.fit.A) or r.x != reports[0].x:
                raise ValueError(r.fit.reason or f"compute is {r.x}, but {reports[0].x} in {files[0]}")
        text = format_report(*reports)
        if len(reports) > 1:
            both = compare(*(r.fit for r in reports), names=[r.name for r in reports])
            text += "\n\n" + format_comparison(both)
        if plot:
            plot_curves(reports, plot)
    except (OSError, ValueError, TypeError) as error:
        print(f"fit_sigmoid.py: {file}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
