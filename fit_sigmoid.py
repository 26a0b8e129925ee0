"""Fit the reward of an RL run against compute, and say what more compute will bring, and how surely.

Problem. The recipe that wins early in a run may lose later, and the budget to compare late is rarely there.
Idea. Pass rate on held-out prompts follows a sigmoid in compute, so the early part of a run predicts the rest
(Khatri et al. 2025, arXiv 2510.13786, Eq. 1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    C      compute, any unit              R0  pass rate before RL      A  ceiling (asymptotic pass rate)
    C_mid  compute at half of the gain    B   efficiency: how steep    s  share of the gain, 1 / (1 + (C_mid / C)^B)

1. Estimate: weighted least squares over the whole plausible range, Q(R0, A, B, C_mid) = sum_i w_i (R_i - R(C_i))^2.
   For given (A, B, C_mid) the best R0 is a closed form, R = (1 - s) R0 + s A; a population searches the other three.
   `method="paper_grid"` is the paper's own procedure, to compare with published values.
2. Uncertainty by profile likelihood: the set of all curves with Q <= Q_min + 1.1 phi t^2, t Student's quantile. The
   interval of anything (A, B, the reward at 2 C) is its least and greatest value over that set. Chosen over a
   bootstrap because it needs no refits and does not break at the bound A <= 1.
3. Noise: a point has variance phi p (1 - p) / n where its number n of samples is known, else phi. phi comes from the
   residuals (with known n, together with 4 prior degrees of freedom at phi = 1), because n counts prompts x samples and
   samples of one prompt are correlated: phi > 1 when every evaluation draws new prompts, phi < 1 on a fixed held-out
   set. Residuals in waves say less: phi grows by (1 + r) / (1 - r), r their lag-1 correlation if significant.
4. `identifiable` is False, with a reason, when A's interval is wider than 0.1 or half the gain, when the bound on A and
   not the data stopped the fit, when the reward does not rise, or rises in a straight line, or falls away at the
   end, and when points are too few.

Choices where the paper is silent: (a) the point at C = 0 measures R0, with its own sampling error; without it R0 is
fitted. (b) No run is exactly a sigmoid. One that rises faster than a ceiling <= 1 allows would be predicted too low, so
predictions (never A) may use curves with A up to 1.25 A_max, cut at A_max.

    from fit_sigmoid import fit
    f = fit([0, 1, 2, 4, 8, 16, 32], [.250, .275, .317, .405, .505, .566, .589], n_samples=16_000)
    print(f.A, f.A_interval, f.identifiable, f.predict(64), f.interval(64))
"""

import argparse
import csv
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeWarning, curve_fit, least_squares
from scipy.special import expit, fdtrc, stdtrit

METHODS = ("least_squares", "paper_grid")
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "optimiser steps"}
B_RANGE = (0.05, 20.0)  # an interval that touches an end is reported as open
A_SLACK = 1.25  # choice (b)
MAX_WIDTH = 0.1  # of A's interval, to be called identifiable: five of the paper's margins of 0.02
PRIOR_DOF = 4.0  # weight of "phi = 1" where n is known: a handful of residuals alone would claim anything
LINE_ALPHA = 0.01  # a straight line must be this unlikely before the curve is said to bend towards a ceiling
SAFETY = 1.1  # on phi t^2: intervals that are narrow by chance are called identifiable more often than wide ones
MIN_SD = 1e-4  # no evaluation is more exact; residuals below it are rounding, and no statistic may hang on them
WINDOWS = ((0.015, 0.5), (0.0, 1.0), (0.0, 0.5), (0.05, 0.5))  # the paper's, as shares of the run's compute


class InputError(ValueError):
    """Bad input, told in one sentence with the place and the fix."""


def sigmoid(C: ArrayLike, R0: ArrayLike, A: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> np.ndarray:
    """R(C) of arXiv 2510.13786 Eq. 1 for compute C >= 0; arguments broadcast; exactly R0 at C = 0."""
    with np.errstate(divide="ignore"):  # log 0 = -inf gives s = 0, as it should
        # s = 1 / (1 + (C_mid / C)^B) = expit(B (log C - log C_mid)): neither overflows nor divides by zero
        s = expit(B * (np.log(np.asarray(C, dtype=float)) - np.log(C_mid)))
    return R0 + (np.asarray(A) - R0) * s


@dataclass
class SigmoidFit:
    """A fitted curve. Compute is in the unit of the data, intervals are at `level`, NaN where there is no fit."""

    R0: float = math.nan
    A: float = math.nan
    B: float = math.nan
    C_mid: float = math.nan
    rmse: float = math.nan  # root mean squared residual of the points used, unweighted
    n_points: int = 0
    R0_interval: tuple[float, float] = (0.0, 1.0)
    A_interval: tuple[float, float] = (0.0, 1.0)
    B_interval: tuple[float, float] = (0.0, math.inf)
    C_mid_interval: tuple[float, float] = (0.0, math.inf)
    identifiable: bool = False  # can the data tell the ceiling?
    reason: str = ""  # if not, why
    R0_source: str = "fitted"  # or "given", or "measured" (the point at C = 0)
    left_out: dict[str, int] = field(default_factory=dict)  # points not used: nan, duplicate, skipped, zero
    phi: float = math.nan  # variance of a point = phi p (1 - p) / n, or phi where n is unknown
    dof: float = 0.0  # degrees of freedom behind phi
    level: float = 0.95
    A_max: float = 1.0
    method: str = METHODS[0]
    C_mid_range: Sequence[float] | None = field(default=None, repr=False)  # of the paper's grid, where it was given
    C: np.ndarray | None = field(default=None, repr=False)  # (N,) the points used, by rising compute
    R: np.ndarray | None = field(default=None, repr=False)  # (N,)
    n_samples: np.ndarray | None = field(default=None, repr=False)  # (N,)
    curves: np.ndarray | None = field(default=None, repr=False)  # (4, M) R0, A, B, C_mid: the likelihood set

    def predict(self, C: ArrayLike) -> np.ndarray:
        """The fitted curve at compute `C`, any shape."""
        return sigmoid(C, self.R0, self.A, self.B, self.C_mid)

    def interval(self, C: ArrayLike, *, noise: bool = False, n_samples: float | None = None) -> np.ndarray:
        """Low and high reward at compute `C` (K,) -> (2, K): of the curve, or with `noise` of an evaluation made there.

        `n_samples` of that evaluation is by default the median of the fitted points'. Curve and noise are independent,
        so their half-widths add in quadrature.
        """
        C = np.atleast_1d(np.asarray(C, dtype=float))
        p, top = self.predict(C), max(self.A_max, 1.0)
        if self.curves is None:
            return np.array([np.zeros(C.shape), np.full(C.shape, top)])
        allowed = [sigmoid(c, *self.curves) for c in C]  # K arrays (M,)
        low = np.minimum([v.min() for v in allowed], p)
        high = np.maximum(np.minimum([v.max() for v in allowed], self.A_max), p)
        if noise:
            if n_samples is None and self.n_samples is not None:
                n_samples = float(np.median(self.n_samples))
            sd = np.sqrt(self.phi * _unit_variance(p, n_samples)) * stdtrit(self.dof, (1 + self.level) / 2)
            low, high = np.maximum(p - np.hypot(p - low, sd), 0), np.minimum(p + np.hypot(high - p, sd), top)
        return np.array([low, high])


def fit(C: ArrayLike, R: ArrayLike, *, R0: float | None = None, A: float | None = None, method: str = METHODS[0],
        skip_below: float = 0.0, n_samples: ArrayLike | None = None, A_max: float = 1.0, level: float = 0.95,
        A_range: Sequence[float] = (0.45, 0.8), C_mid_range: Sequence[float] | None = None) -> SigmoidFit:
    """Fit Eq. 1 to rewards `R` (N,) at compute `C` (N,); inputs are not modified, their order does not matter.

    R0, A       hold these fixed. R0 None: the point at C = 0 measures it, else it is fitted
    method      "least_squares" (global minimum) or "paper_grid" (A by steps of 0.005 in `A_range`, 100 linear values of
                C_mid in `C_mid_range`, by default up to the run's compute, B by `curve_fit`; same intervals)
    skip_below  leaves out points with 0 < C < skip_below; the point at C = 0 always stays
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    A_max       bound on A
    Points with a NaN and exact repetitions are left out and counted. Data that cannot carry a fit give a verdict in
    `reason`, not an error. ValueError: shapes that differ, negative compute, a reward outside [0, max(1, A_max)],
    two points at C = 0 that disagree, an unknown method, R0 and A out of order, an A_range that is none.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if not 0 <= (R0 or 0.0) <= (A_max if A is None else A) <= A_max < math.inf or A_max == 0:
        raise ValueError(f"need 0 <= R0 <= A <= A_max, 0 < A_max, not R0 = {R0}, A = {A}, A_max = {A_max}")
    if not 0 <= A_range[0] < A_range[1] < math.inf:
        raise ValueError(f"need 0 <= low < high in A_range, not {A_range[0]} and {A_range[1]}")
    C, R, n, left_out = _clean(C, R, n_samples, max(A_max, 1.0), skip_below, R0 is not None)
    source = "given" if R0 is not None else "measured" if (C == 0).any() else "fitted"
    f = SigmoidFit(n_points=C.size, R0_source=source, left_out=left_out, level=level, A_max=A_max, method=method,
                   C_mid_range=C_mid_range, C=C, R=R, n_samples=n, R0_interval=(0.0, A_max), A_interval=(0.0, A_max))
    if C.size < 4 or np.unique(C[C > 0]).size < 3:
        f.reason = (f"{C.size} usable points, but four unknowns need at least 4, at three or more values of C > 0: "
                    "evaluate more often or fit a larger part")
        return f
    if A is None and C[0] > C[-1] / 2 and not (left_out["skipped"] or left_out["zero"]):  # a refit holds A
        f.reason = f"compute that starts at {C[0]:g} and ends at {C[-1]:g}: subtract its start (--x-start first)"
        return f
    R0_box = (0.0, A_max) if R0 is None else (R0, R0)
    limits = _limits(C, (R0_box[0], A_max) if A is None else (A, A))
    p, x = R, None
    for _ in range(1 if n is None else 3):  # binomial weights need the curve, the curve needs the weights
        data = (C, R, 1 / _unit_variance(p, n), R0_box)
        x, best = _search(data, limits, x)
        p = sigmoid(C, *best)
    z, prior = np.sqrt(data[2]) * (R - p), 0.0 if n is None else PRIOR_DOF
    f.dof = C.size - 2 - (R0 is None) - (A is None) + prior
    if f.dof > 0:
        f.phi = float(max((z @ z + prior) / f.dof, MIN_SD**2 if n is None else 0.0)
                      * _waves(z, data[2].sum() * MIN_SD**2))
        limits[0, 1] *= A_SLACK if A is None else 1.0
        spare = SAFETY * f.phi * stdtrit(f.dof, (1 + level) / 2) ** 2
        f.curves = _likelihood_set(data, limits, z @ z + spare, x)
    f.R0, f.A, f.B, f.C_mid = map(float, best)
    if f.curves is not None:
        _set_intervals(f)
    f.reason = _verdict(f, A is not None)
    if method == "paper_grid":  # after the verdict: the data are not to blame where no curve of the grid fits them
        R0 = min(R[0] if source == "measured" else best[0], A_max if A is None else A)
        f.R0, f.A, f.B, f.C_mid = map(float, _paper_grid(C, R, R0, (R0, A_max) if A is None else (A, A), A_range,
                                                         C_mid_range))
        low, high = A_range
        if not f.reason and A is None and (f.A < low + 1e-9 or high - 1e-9 < f.A < A_max):
            f.reason = f"A lies on the edge of the grid {low:g}..{high:g}: widen A_range (--A-range LOW HIGH)"
    f.rmse = math.sqrt(np.mean((R - f.predict(C)) ** 2))
    f.identifiable = not f.reason
    return f


def _clean(C: ArrayLike, R: ArrayLike, n: ArrayLike | None, top: float, skip_below: float, drop_zero: bool) -> tuple:
    """Sorted float copies of the points to use, and how many were left out for which reason."""
    C, R = np.array(C, dtype=float), np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = None if n is None else np.broadcast_to(np.asarray(n, dtype=float), C.shape)
    real = np.isfinite(C) & np.isfinite(R) & (True if n is None else np.isfinite(n))
    order = np.lexsort((R if n is None else n, R, C))
    order = order[real[order]]
    C, R, n = C[order], R[order], None if n is None else n[order]
    if (C < 0).any() or (R < 0).any() or (R > top).any() or (n is not None and (n <= 0).any()):
        raise ValueError(f"compute must be >= 0, rewards in [0, {top:g}] and n_samples > 0")
    repeated = np.zeros(C.size, dtype=bool)
    repeated[1:] = (np.diff(C) == 0) & (np.diff(R) == 0)
    if (~repeated & (C == 0)).sum() > 1:
        raise ValueError("two points at C = 0 disagree; keep one, it is the measurement of R0")
    skipped = ~repeated & (C > 0) & (C < skip_below)
    zero = ~repeated & (C == 0) & drop_zero  # with R0 given it says nothing, but its residual would count as noise
    use = ~(repeated | skipped | zero)
    left_out = {"nan": ~real, "duplicate": repeated, "skipped": skipped, "zero": zero}
    return C[use], R[use], None if n is None else n[use], {why: int(v.sum()) for why, v in left_out.items()}


def _unit_variance(p: ArrayLike, n: ArrayLike | None) -> np.ndarray:
    """Variance of a point but for phi: p (1 - p) / n, with one success and one failure added so that it is never 0."""
    p = np.asarray(p, dtype=float)
    if n is None:
        return np.ones(p.shape)
    q = np.clip((p * n + 1) / (n + 2), 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


def _waves(z: np.ndarray, least: float) -> float:
    """Variance inflation (1 + r) / (1 - r) of residuals z (N,); 1 if r is insignificant or z @ z far below `least`."""
    r = min(z[1:] @ z[:-1] / max(z @ z, least), 0.95)
    return (1 + r) / (1 - r) if r > 1.645 / math.sqrt(z.size) else 1.0


def _profile(x: np.ndarray, C: np.ndarray, R: np.ndarray, w: np.ndarray, R0_box: Sequence[float]) -> tuple:
    """For curves x (G, 3) = A, log B, log C_mid: the best R0 (G,), half the curvature of Q in it (G,), and Q (G,)."""
    A = x[:, :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        s = expit(np.exp(x[:, 1:2]) * (np.log(C) - x[:, 2:]))  # (G, N)
        u, y = 1 - s, R - A * s  # R = (1 - s) R0 + s A is linear in R0: y = u R0
        curvature = (u * u) @ w
        R0 = np.where(curvature > 0, (u * y) @ w / curvature, R0_box[0])
    R0 = np.clip(R0, R0_box[0], np.minimum(R0_box[1], A[:, 0]))  # no curve falls: R0 <= A
    return R0, curvature, (y - u * R0[:, None]) ** 2 @ w


def _limits(C: np.ndarray, A_box: Sequence[float]) -> np.ndarray:
    """Search range (3, 2) of A, log B, log C_mid; the last reaches far beyond the data on both sides."""
    return np.array([A_box, np.log(B_RANGE), np.log([C[C > 0].min() / 100, C.max() * 1000])])


def _explore(data: tuple, limits: np.ndarray, limit: float = -math.inf, x: np.ndarray | None = None) -> tuple:
    """Fill the set of curves with Q <= limit, or without a limit close in on the least Q: -> x (G, 3), Q (G,).

    A population spread over `limits` moves as in differential evolution (Storn and Price 1997): a member plus the
    difference of two others, so that steps take the shape of the set, however thin and bent. What has Q <= limit stays,
    and the best 60 while there are fewer. Half the moves start from the extremes of A, B and C_mid, since extremes are
    what the set is for. The seed is fixed: same data, same answer.
    """
    rng, size, best = np.random.default_rng(0), 600, 60
    trial = rng.uniform(*limits.T, (2 * size, 3))
    if x is not None:
        trial[0] = x
    pool, Q = np.empty((0, 3)), np.empty(0)
    for _ in range(24):
        pool, Q = np.concatenate([pool, trial]), np.concatenate([Q, _profile(trial, *data)[2]])
        stay = Q <= max(limit, np.partition(Q, best)[best])
        pool, Q = pool[stay], Q[stay]
        order, k = pool.argsort(0), max(1, len(pool) // 100)
        i, j, m = rng.integers(len(pool), size=(3, size))
        i[: size // 2] = rng.choice(np.concatenate([order[:k], order[-k:]]).ravel(), size // 2)
        trial = np.clip(pool[i] + rng.choice([1.5, 0.5, 0.15], (size, 1)) * (pool[j] - pool[m]), *limits.T)
    stay = Q <= max(limit, Q.min())
    return pool[stay], Q[stay]


def _search(data: tuple, limits: np.ndarray, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Global least squares: x = (A, log B, log C_mid) and the parameters R0, A, B, C_mid. `start`: polish only."""
    C, R, w, _ = data

    def _residuals(x: np.ndarray) -> np.ndarray:
        return np.sqrt(w) * (sigmoid(C, _profile(x[None], *data)[0], x[0], *np.exp(x[1:])) - R)

    bounds = limits + np.array([-1e-9, 1e-9])  # `least_squares` wants low < start < high, also where A is held
    start = _explore(data, limits)[0][0] if start is None else start
    x = least_squares(_residuals, start, bounds=bounds.T, xtol=1e-10, ftol=1e-12, gtol=1e-12).x
    x = np.clip(x, *limits.T)
    flat = np.clip([w @ R / w.sum(), *limits[1:].mean(1)], *limits.T)
    Q, Q_flat = _profile(np.stack([x, flat]), *data)[2]  # where flat is as good, rounding would choose B and C_mid
    x = flat if Q_flat < Q + w.sum() * MIN_SD**2 else x
    return x, np.array([_profile(x[None], *data)[0][0], x[0], *np.exp(x[1:])])


def _likelihood_set(data: tuple, limits: np.ndarray, limit: float, x: np.ndarray) -> np.ndarray:
    """Curves with Q <= limit, (4, M): R0, A, B, C_mid. Q is a parabola in R0, so each x has its two ends in R0."""
    x, Q = _explore(data, limits, limit, x)
    R0, curvature, _ = _profile(x, *data)
    with np.errstate(divide="ignore"):
        reach = np.sqrt(np.maximum(limit - Q, 0) / curvature)
    low, high = data[3][0], np.minimum(data[3][1], x[:, 0])
    R0 = np.concatenate([np.clip(R0 - reach, low, high), R0, np.clip(R0 + reach, low, high)])
    x = np.tile(x, (3, 1))
    return np.stack([R0, x[:, 0], np.exp(x[:, 1]), np.exp(x[:, 2])])


def _set_intervals(f: SigmoidFit) -> None:
    """Least and greatest value of each parameter over the likelihood set; open where the search range ends it."""
    allowed = f.curves[:, f.curves[1] <= f.A_max + 1e-9]
    f.R0_interval, A, B, C_mid = ((float(v.min()), float(v.max())) for v in allowed)
    f.A_interval = (A[0], min(float(f.curves[1].max()), f.A_max))
    ends = np.exp(_limits(f.C, (0, 1))[1:])
    f.B_interval, f.C_mid_interval = (
        (0.0 if low < end[0] * 1.05 else low, math.inf if high > end[1] / 1.05 else high)
        for (low, high), end in zip((B, C_mid), ends, strict=True))


def _verdict(f: SigmoidFit, A_given: bool) -> str:
    """Why these data cannot tell the ceiling; empty if they can. Opens the intervals where no ceiling is in sight."""
    if f.curves is None:
        return f"{f.n_points} points leave no residual to measure the noise by: add points, or give n_samples"
    w = 1 / _unit_variance(f.predict(f.C), f.n_samples)
    z = np.sqrt(w) * (f.R - f.predict(f.C))
    level = f.R0 if f.R0_source == "given" else w @ f.R / w.sum()
    explained = max(w @ (f.R - level) ** 2 - z @ z, 0.0)  # by the curve, beyond a flat line
    reach, end = float(f.predict(f.C[-1])), f"by C = {_short(f.C[-1])}"
    if fdtrc(2, f.dof, explained / 2 / f.phi) > 0.05:
        falls = np.std(f.R) > MIN_SD and np.corrcoef(f.C, f.R)[0, 1] < -2 / math.sqrt(f.n_points)
        f.A_interval = f.A_interval if A_given else (0.0, f.A_max)
        f.B_interval, f.C_mid_interval = (0.0, math.inf), (0.0, math.inf)
        if f.R0_source != "given":  # any curve that is flat from the first point fits: only a measurement tells R0
            sd = math.sqrt(SAFETY * f.phi / w[0]) if f.C[0] == 0 else math.inf
            reach = sd * stdtrit(f.dof, (1 + f.level) / 2)
            low, high = min(float(f.R[0] - reach), f.R0), max(float(f.R[0] + reach), f.R0)
            f.R0_interval = (max(low, 0.0), min(high, f.A_max))
        return f"the reward {'falls' if falls else 'does not rise beyond its noise'} {end}: there is no ceiling to fit"
    last = max(3, f.n_points // 5)
    noise = math.sqrt(max(np.mean(np.diff(z) ** 2) / 2, w.mean() * MIN_SD**2))  # differences are blind to slow misfit
    if z[-last:].mean() * math.sqrt(last) < -4 * noise:
        f.A_interval = (0.0, f.A_max)
        return f"the last {last} points lie below the curve: the run falls away from any ceiling"
    if A_given:
        return ""
    if f.A > f.A_max - 1e-6 and reach < f.A_max - MAX_WIDTH / 2:
        return f"the bound A <= {f.A_max:g} stopped the fit and not the data, which reach {reach:.2f} {end}"
    if f.curves[1].max() - f.A_interval[0] > min(MAX_WIDTH, (f.A - f.R0) / 2):
        return f"ceilings from {f.A_interval[0]:.2f} to {f.A_interval[1]:.2f} fit: the data reach {reach:.2f} {end}"
    v, R, Q = w[f.C > 0], f.R[f.C > 0], z[f.C > 0] @ z[f.C > 0]
    for name, x in (("C", f.C[f.C > 0] / f.C[-1]), ("log C", np.log(f.C[f.C > 0]))):
        Q_line, Q_flat = (v @ (R - np.polyval(np.polyfit(x, R, k, w=np.sqrt(v)), x)) ** 2 for k in (1, 0))
        rises = Q_flat - Q_line > 4 * f.phi  # two standard errors; a flat line is a ceiling already reached
        if rises and fdtrc(2, f.dof, max(Q_line - Q, 0.0) / 2 / f.phi) > LINE_ALPHA:
            f.A_interval = (f.A_interval[0], f.A_max)
            return f"a straight line in {name} fits about as well: no ceiling shows {end}"
    return ""


def _paper_grid(C: np.ndarray, R: np.ndarray, R0: float, A_box: Sequence[float], A_range: Sequence[float],
                C_mid_range: Sequence[float] | None) -> tuple[float, float, float, float]:
    """The paper's procedure: every (A, C_mid) of a grid, B by `curve_fit`, the least sum of squares wins; unweighted.

    B is first scanned in all cells at once; only the best hundred of the 7,100 cells are worth a `curve_fit`. What the
    grid has outside `A_box` moves to its ends: no curve falls, none passes A_max, and a held A stays.
    """
    A = np.unique(np.clip(np.round(np.arange(A_range[0], A_range[1] + 1e-9, 0.005), 10), *A_box))
    C_mid = np.linspace(*(C_mid_range or (C.max() / 100, C.max())), 100)
    B = np.geomspace(*B_RANGE, 200)
    s = sigmoid(C, 0.0, 1.0, B[:, None, None], C_mid[:, None])  # (200, 100, N)
    gain, y = (A - R0)[:, None, None], R - R0
    Q = y @ y - 2 * gain * (s @ y) + gain**2 * (s * s).sum(-1)  # (71, 200, 100)
    start, Q = B[Q.argmin(1)], Q.min(1)  # (71, 100)
    found = []
    for i, j in np.argwhere(np.partition(Q.ravel(), 99)[99] >= Q):
        with warnings.catch_warnings():  # on a step or a flat curve B has no covariance, which is not asked for
            warnings.simplefilter("ignore", OptimizeWarning)
            (log_B,), _ = curve_fit(lambda c, b, i=i, j=j: sigmoid(c, R0, A[i], np.exp(b), C_mid[j]), C, R,
                                    p0=[math.log(start[i, j])])
        cell = (R0, A[i], math.exp(log_B), C_mid[j])
        found.append((np.sum((sigmoid(C, *cell) - R) ** 2), *cell))
    return min(found)[1:]


class Transient(NamedTuple):
    """Are the first points off the curve of the others? `skip_below` is 0 where the evidence does not ask for a cut."""

    skip_below: float
    n_points: int  # that the best cut would leave out
    p_value: float  # of the F test, times the number of cuts tried
    offset: float  # mean of those points minus the curve of the others
    A_before: float
    A_after: float


def early_transient(C: ArrayLike, R: ArrayLike, *, n_samples: ArrayLike | None = None,
                    alpha: float = 0.01) -> Transient:
    """Test whether the first k points at C > 0 (k up to 12 or a third) are off the sigmoid of the others.

    F = ((Q_all - Q_rest) / k) / phi_rest. A cut costs precision, so it is proposed only at p < alpha.
    """
    whole = fit(C, R, n_samples=n_samples)
    C, R, n, best = whole.C, whole.R, whole.n_samples, Transient(0.0, 0, 1.0, 0.0, whole.A, whole.A)
    if math.isnan(whole.A):
        return best
    zeros = int((C == 0).sum())
    tries = range(1, min((C.size - zeros) // 3, C.size - zeros - 5, 12) + 1)
    w, prior = 1 / _unit_variance(whole.predict(C), n), 0.0 if n is None else PRIOR_DOF
    Q_all = w @ (R - whole.predict(C)) ** 2
    for k in tries:
        rest = np.r_[:zeros, zeros + k : C.size]
        _, found = _search((C[rest], R[rest], w[rest], (0.0, 1.0)), _limits(C[rest], (0.0, 1.0)))
        miss = R - sigmoid(C, *found)
        dof, Q_rest = rest.size - 4 + prior, w[rest] @ miss[rest] ** 2
        phi = max((Q_rest + prior) / dof, MIN_SD**2)
        p = min(1.0, len(tries) * float(fdtrc(k, dof, max(Q_all - Q_rest, 0.0) / k / phi)))
        if p < best.p_value:
            cut = float(C[zeros + k]) if p < alpha else 0.0
            best = Transient(cut, k, p, float(miss[zeros : zeros + k].mean()), whole.A, float(found[1]))
    return best


def power_law(C: ArrayLike, R: ArrayLike, *, skip_below: float = 0.0, A_max: float = 1.0) -> dict[str, float]:
    """Least squares for R = A - D / C^B, the sigmoid's high-compute limit, over C > 0 and C >= skip_below.

    Returns A, D, B and rmse. On early data its A runs to the bound, which is why the paper prefers the sigmoid.
    ValueError: fewer than 4 points.
    """
    C, R, *_ = _clean(C, R, None, max(A_max, 1.0), skip_below, True)
    if C.size < 4:
        raise ValueError(f"a power law needs 4 points at C > 0, not {C.size}")
    end, found = C[-1], []
    for start in (0.1, 0.4, 1.0, 2.0):
        (A, D, B), _ = curve_fit(lambda c, A, D, B: A - D * c**-B, C / end, R, p0=(0.9 * A_max, 0.1, start),
                                 bounds=([0, 0, 0.01], [A_max, np.inf, 10]), max_nfev=5000)
        D *= end**B
        found.append((math.sqrt(np.mean((A - D / C**B - R) ** 2)), float(A), float(D), float(B)))
    return dict(zip(("rmse", "A", "D", "B"), min(found), strict=True))


def windows(C: ArrayLike, R: ArrayLike, *, shares: Sequence[tuple[float, float]] = WINDOWS,
            n_samples: ArrayLike | None = None, **options: Any) -> list[tuple[float, float, SigmoidFit]]:
    """Robustness: (low, high, fit) of the points with low <= C <= high, for windows given as shares of the compute."""
    C, R, n, _ = _clean(C, R, n_samples, max(options.get("A_max", 1.0), 1.0), 0.0, False)
    spans = [(float(a * C[-1]), float(b * C[-1]), C <= b * C[-1] * (1 + 1e-12)) for a, b in shares]
    return [(a, b, fit(C[u], R[u], n_samples=n if n is None else n[u], skip_below=a, **options)) for a, b, u in spans]


def linearised(f: SigmoidFit) -> tuple[np.ndarray, np.ndarray, int]:
    """log C and log F(R) of the points, a line of slope B where the fit holds, and how many points have no log F.

    log F = B log C, with F = C_mid^B / ((A - R0) / (R - R0) - 1) = C_mid^B (R - R0) / (A - R).
    """
    use = (f.C > 0) & (f.R > f.R0) & (f.R < f.A)
    log_F = f.B * math.log(f.C_mid) + np.log((f.R[use] - f.R0) / (f.A - f.R[use]))
    return np.log(f.C[use]), log_F, int((f.C > 0).sum() - use.sum())


@dataclass
class Comparison:
    """Runs beside each other. Where their ceilings agree, `refits` share `shared_A`, and B compares the runs."""

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
    elif max(A) - min(A) > margin + 1e-9:  # the paper's leave-one-out runs, .590 to .610, count as agreeing
        high, low = int(np.argmax(A)), int(np.argmin(A))
        overlap = fits[high].A_interval[0] <= fits[low].A_interval[1]
        both.verdict = (f"ceilings differ by {max(A) - min(A):.3f}, more than {margin:g}: {both.names[high]} is highest"
                        + (f", but its interval overlaps that of {both.names[low]}" if overlap else ""))
    else:
        both.shared_A = float(np.mean(A))
        both.refits = [fit(f.C, f.R, R0=f.R0 if f.R0_source == "given" else None, A=both.shared_A, A_max=f.A_max,
                           n_samples=f.n_samples, level=f.level, method=f.method, C_mid_range=f.C_mid_range)
                       for f in fits]
        B = [f.B for f in both.refits]
        high, low = int(np.argmax(B)), int(np.argmin(B))
        overlap = both.refits[high].B_interval[0] <= both.refits[low].B_interval[1]
        both.verdict = (f"ceilings agree within {margin:g}; at the shared A = {both.shared_A:.3f} "
                        + ("the intervals of B overlap" if overlap else f"{both.names[high]} is the most efficient"))
    return both


def _rows(source: str | Path | Sequence[Mapping]) -> list[tuple[int, Mapping]]:
    """(line number, record) of a JSON-lines file, of a CSV file with a header, or of a list of records."""
    if not isinstance(source, (str, Path)):
        return list(enumerate(source, 1))
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source}, line 1: not a readable text file ({error}); give JSON lines or CSV") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"{source}, line 1: the file is empty; give a record per evaluation")
    if not lines[0].lstrip().startswith(("{", "[")):
        reader = csv.DictReader(lines, delimiter=max(",;\t", key=lines[0].count), skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames]
        return [(reader.line_num, row) for row in reader]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise InputError(f"{source}, line {number}: not JSON ({error.msg}); repair or delete the line") from error
        if not isinstance(record, dict):
            raise InputError(f"{source}, line {number}: not a JSON object; write one record {{...}} a line")
        rows += [(number, record)] if record else []
    return rows


def _default_x(rows: list[tuple[int, Mapping]], columns: set[str]) -> str:
    """tokens on a CPU run (so marked, or without device-hours), else device_hours, else the first column there is."""
    cpu = not any(row.get("device_hours") not in (None, "", 0, "0", "0.0") for _, row in rows)
    if "device" in columns:
        cpu = all(row.get("device", "cpu") == "cpu" for _, row in rows)
    order = ("tokens" if cpu else "device_hours", *UNITS, "Step", "_step")
    return next((c for c in order if c in columns), "device_hours")


def load(source: str | Path | Sequence[Mapping], *, x: str | None = None, y: str | None = None,
         samples: str | float | None = None, scale: float = 1.0,
         x_start: str | float = 0.0) -> tuple[str, np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Read evaluations: -> name of x, compute (N,), reward (N,), samples per point (N,) or None, last line's number.

    `x` names the column of compute; None: tokens on a CPU run, else device_hours, else what there is. `y` names that of
    the reward; None: pass_rate, or TensorBoard's Value. `samples` is a column or a number; None: n_prompts * n_samples
    where the file has both. A name also stands for the one column "RUN - NAME", as wandb writes it. The reward is
    multiplied by `scale`; `x_start`, a number or "first" for the least compute, is subtracted from the compute. A
    record with `step` 0 is at compute 0. InputError names the file, line and fix.
    """
    rows, name = _rows(source), source if isinstance(source, (str, Path)) else "records"

    def _bad(line: int, text: str) -> InputError:
        return InputError(f"{name}, line {line}: {text}")

    def _number(line: int, row: Mapping, column: str) -> float:
        try:
            return math.nan if row.get(column) in (None, "") else float(row[column])
        except (TypeError, ValueError) as error:
            raise _bad(line, f"{column} is {row[column]!r}; write a number or leave it empty") from error

    if not rows:
        raise _bad(1, "there is no row, at most a header; give a record per evaluation")
    columns = {str(column) for _, row in rows for column in row}
    x = x or _default_x(rows, columns)
    y = y or ("Value" if "Value" in columns and "pass_rate" not in columns else "pass_rate")
    counts = [samples] if isinstance(samples, str) else ["n_prompts", "n_samples"] if samples is None else []
    counts = [] if samples is None and not columns.issuperset(counts) else counts
    found, missing = {}, {}
    for column, flag in ((x, "--x"), (y, "--y"), *((c, "--samples") for c in counts)):
        match = [column] if column in columns else sorted(c for c in columns if c.endswith(f" - {column}"))
        if len(match) > 1:
            raise _bad(1, f"{len(match)} columns end in {column!r}: {', '.join(match)}; give one in full with {flag}")
        (found if match else missing)[column] = match[0] if match else flag
    if missing:
        names, flags = ", ".join(map(repr, missing)), ", ".join(missing.values())
        raise _bad(1, f"no column {names}; name another with {flags}, there are: {', '.join(sorted(columns))}")
    if x_start == "first":
        x_start = min((c for c in (_number(*row, found[x]) for row in rows) if not math.isnan(c)), default=0.0)
    points, zero, fixed = [], math.nan, math.nan if samples is None else samples
    for line, row in rows:
        c, r = _number(line, row, found[x]) - x_start, _number(line, row, found[y]) * scale
        c = 0.0 if row.get("step") in (0, "0") else c  # before the first step: a clock that ran has trained nothing
        n = math.prod(_number(line, row, found[k]) for k in counts) if counts else fixed
        if c < 0 or math.isinf(c):
            start = f" after --x-start {x_start:g}" if x_start else ""
            raise _bad(line, f"{x} is {c:g}{start}; compute is finite and >= 0, correct the value or delete the line")
        if r < 0 or r > 1:
            raise _bad(line, f"{y} is {r:g}; rewards lie in [0, 1], give --scale (0.01 for percent) or another --y")
        if n <= 0:
            raise _bad(line, f"{n:g} samples; give a positive number or leave the column out")
        if c == 0 and abs(r - zero) > 0:  # False while either is NaN
            raise _bad(line, f"{y} is {r:g} at {x} = 0 but {zero:g} on an earlier line; keep one of the two")
        zero = r if c == 0 and not math.isnan(r) else zero
        points.append((c, r, n))
    C, R, n = np.array(points, dtype=float).reshape(-1, 3).T
    return x, C, R, n if counts or samples is not None else None, rows[-1][0]


class Prediction(NamedTuple):
    """The curve at one compute, its interval, the interval of an evaluation made there, what was measured (or NaN)."""

    C: float
    reward: float
    curve: tuple[float, float]
    evaluation: tuple[float, float]
    measured: float


@dataclass
class CurveReport:
    """One run: the fit to its first part, and how the rest came out."""

    name: str
    x: str
    fit: SigmoidFit
    fit_until: float  # compute up to which points were fitted
    transient: Transient
    held_out_points: int
    held_out_rmse: float
    held_out_covered: float  # share of the held-out points inside their interval
    predictions: list[Prediction]  # at the end of the run, then where asked
    C: np.ndarray = field(repr=False)  # (N,) all points
    R: np.ndarray = field(repr=False)
    n_samples: np.ndarray | None = field(repr=False)
    last_line: int = field(repr=False)


def _float(text: Any, other: Any) -> Any:
    """The number that `text` spells, else `other`."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return other


def _amount(value: float | str, end: float, flag: str) -> float:
    """Compute >= 0 from a number, or from "2x": twice the run's compute `end`."""
    text = str(value)
    amount = _float(text.removesuffix("x"), math.nan) * (end if text.endswith("x") else 1.0)
    if not amount >= 0:
        raise InputError(f"{flag} {text!r}: give compute >= 0 such as 5e6, or 2x for twice the run's")
    return amount


def curve(source: str | Path | Sequence[Mapping], *, x: str | None = None, y: str | None = None,
          samples: str | float | None = None, scale: float = 1.0, x_start: str | float = 0.0, fit_until: float = 1.0,
          skip_below: float | str = 0.0, predict_at: Sequence[float | str] = (), plot: str | Path | None = None,
          name: str = "", **options: Any) -> CurveReport:
    """Load a run (see `load`), fit the points up to the share `fit_until` of its compute, compare the rest with them.

    `skip_below` "auto" takes the cut that `early_transient` proposes. `predict_at` holds compute, or "2x" for twice the
    run's. `plot` is a PNG to write. `options` go to `fit`. Too few points give a verdict in the report, not an error.
    """
    x, C, R, n, last_line = load(source, x=x, y=y, samples=samples, scale=scale, x_start=x_start)
    real = np.isfinite(C) & np.isfinite(R)
    end = float(C[real].max(initial=0.0))
    unseen = real & (C > fit_until * end * (1 + 1e-12))
    n_seen, n_new = (None, None) if n is None else (n[~unseen], float(np.nanmedian(n)) if n.size else None)
    transient = early_transient(C[~unseen], R[~unseen], n_samples=n_seen)
    cut = transient.skip_below if skip_below == "auto" else _amount(skip_below, end, "--skip-below")
    f = fit(C[~unseen], R[~unseen], n_samples=n_seen, skip_below=cut, **options)
    predictions = []
    for at in (end, *(_amount(a, end, "--predict-at") for a in predict_at)):
        spans = [tuple(map(float, f.interval(at, noise=noise, n_samples=n_new)[:, 0])) for noise in (False, True)]
        seen = R[real & (at == C)]
        predictions.append(Prediction(at, float(f.predict(at)), *spans, float(seen.mean()) if seen.size else math.nan))
    low, high = f.interval(C[unseen], noise=True, n_samples=n_new)
    inside, miss = (low <= R[unseen]) & (R[unseen] <= high), f.predict(C[unseen]) - R[unseen]
    rmse, covered = (math.sqrt(np.mean(miss**2)), float(inside.mean())) if miss.size else (math.nan, math.nan)
    name = name or (str(source).removesuffix("/eval.jsonl") if isinstance(source, (str, Path)) else "this run")
    report = CurveReport(name, x, f, fit_until * end, transient, miss.size, rmse, covered, predictions,
                         C, R, n, last_line)
    if plot is not None:
        plot_curves([report], plot)
    return report


def _short(v: float) -> str:
    """1234567 -> '1.23M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(v) < 1000 * size:
            return f"{v / size:.3g}{unit}"
    return f"{v:.3g}"


def _span(pair: Sequence[float], form: str = "") -> str:
    return "[" + ", ".join(format(v, form) if form else _short(v) for v in pair) + "]"


def format_report(*reports: CurveReport) -> str:
    """The table a person reads, one block a run."""
    return "\n\n".join("\n".join(f"{label:<24}{text}" for label, text in _block(r)) for r in reports)


def _block(r: CurveReport) -> list[tuple[str, str]]:
    f, t = r.fit, r.transient
    held_out = f"; {r.held_out_rmse:.4f} held out, {r.held_out_covered:.0%} of it inside the intervals"
    if math.isnan(f.A):
        return [(f"{r.name}: ", f"no fit: {f.reason}")]
    rows = [(f"{r.name}: ", f"{r.x} up to {_short(r.fit_until)}, {f.level:.0%} intervals"),
            ("A     ceiling", f"{f.A:.3f}  {_span(f.A_interval, '.3f')}" + (" identifiable" if f.identifiable else "")),
            *([] if f.identifiable else [("      not identifiable", f.reason)]),
            ("B     efficiency", f"{f.B:.2f}   {_span(f.B_interval)}"),
            ("C_mid half the gain", f"{_short(f.C_mid)}   {_span(f.C_mid_interval)} {UNITS.get(r.x, r.x)}"),
            ("R0    before RL", f"{f.R0:.3f}  {_span(f.R0_interval, '.3f')} {f.R0_source}"),
            ("points", f"{f.n_points} fitted, {r.held_out_points} held out; left out: "
             + ", ".join(f"{count} {why}" for why, count in f.left_out.items())),
            ("RMSE", f"{f.rmse:.4f} fitted" + (held_out if r.held_out_points else ""))]
    for p in r.predictions:
        text = f"{p.reward:.3f}  curve {_span(p.curve, '.3f')}, an evaluation {_span(p.evaluation, '.3f')}"
        if not math.isnan(p.measured):
            hit = p.evaluation[0] <= p.measured <= p.evaluation[1]
            text += f"; measured {p.measured:.3f}, {'inside' if hit else 'OUTSIDE'}"
        rows.append((f"at {_short(p.C)}", text))
    if t.skip_below:
        rows.append(("early points", f"the first {t.n_points} are {t.offset:+.3f} off the curve of the others (p = "
                     f"{t.p_value:.0e}); A is {t.A_before:.3f} with and {t.A_after:.3f} without them: consider "
                     f"--skip-below {t.skip_below:g}"))
    return rows


def format_comparison(both: Comparison) -> str:
    """One line a run, then the verdict."""
    lines = [f"{'run':<36}     A   interval         B" + (f"     B at A = {both.shared_A:.3f}" if both.refits else "")]
    for i, (name, f) in enumerate(zip(both.names, both.fits, strict=True)):
        lines.append(f"{name[-35:]:<36} {f.A:.3f}   {_span(f.A_interval, '.3f')} {f.B:5.2f}")
        lines[-1] += f"     {both.refits[i].B:.2f} {_span(both.refits[i].B_interval)}" if both.refits else ""
    return "\n".join([*lines, both.verdict])


def _axes(path: str | Path) -> tuple:
    """A figure without pyplot (no display, no global state), its axes, and what finishes and writes it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()

    def _finish(**labels: Any) -> None:
        axes.set(**labels)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=150)

    return axes, _finish


def plot_curves(reports: Sequence[CurveReport | SigmoidFit], path: str | Path) -> None:
    """Write a PNG: points, the fitted part, the extrapolation with the band of new evaluations, the points not seen."""
    axes, finish = _axes(path)
    for i, r in enumerate(reports):
        if isinstance(r, SigmoidFit):
            end = SimpleNamespace(C=r.C.max(initial=0.0))
            r = SimpleNamespace(name=f"run {i + 1}", fit=r, fit_until=end.C, predictions=[end], C=r.C, R=r.R)
        f, color = r.fit, f"C{i}"
        names = iter(("measured, fitted", "measured, not seen by the fit", "left out", "fit", "extrapolation",
                      f"{f.level:.0%} of evaluations") if len(reports) == 1 else (r.name, *[None] * 5))
        unseen = r.C > r.fit_until * (1 + 1e-12)
        left = ~unseen & ~(np.isin(r.C, f.C) & np.isin(r.R, f.R))
        for use, style in ((~unseen & ~left, {}), (unseen, {"mfc": "white"}), (left, {"marker": "x"})):
            label = next(names)
            if use.any():
                axes.plot(r.C[use], r.R[use], ls="", ms=5, color=color, label=label, **{"marker": "o", **style})
        if f.curves is None:
            continue
        end = max(p.C for p in r.predictions if p.C <= 4 * r.predictions[0].C)
        for span, style in (((0, r.fit_until), "-"), ((r.fit_until, end), "--")):
            grid, label = np.linspace(*span, 200), next(names)
            if span[1] > span[0]:
                axes.plot(grid, f.predict(grid), style, color=color, label=label)
        grid = np.linspace(0, end, 200)
        axes.fill_between(grid, *f.interval(grid, noise=True), color=color, alpha=0.15, lw=0, label=next(names))
    axes.xaxis.set_major_formatter(lambda v, _: _short(v))
    x = getattr(reports[0], "x", "any unit")
    finish(xlabel=f"compute ({UNITS.get(x, x)})", ylabel="pass rate on held-out prompts", ylim=(0, 1.02))


def plot_slopes(fits: Sequence[SigmoidFit], names: Sequence[str], path: str | Path) -> None:
    """Write a PNG of the paper's linearised plot: F(R) against C, log-log, with lines of slope B."""
    axes, finish = _axes(path)
    for i, (f, name) in enumerate(zip(fits, names, strict=True)):
        log_C, log_F, left_out = linearised(f)
        axes.loglog(np.exp(log_C), np.exp(log_F), f"C{i}o", ms=4, label=f"{name} ({left_out} points outside (R0, A))")
        axes.loglog(np.exp(log_C), np.exp(f.B * log_C), f"C{i}", label=f"slope B = {f.B:.2f}")
    finish(xlabel="compute C", ylabel="F(R) = C_mid^B (R - R0) / (A - R)")


def _plain(v: Any) -> Any:
    """For JSON: dataclasses without their arrays, named tuples as dicts, null for what is not finite."""
    if dataclasses.is_dataclass(v):
        return {k.name: _plain(getattr(v, k.name)) for k in dataclasses.fields(v) if k.repr}
    v = v._asdict() if hasattr(v, "_asdict") else v
    if isinstance(v, dict):
        return {key: _plain(value) for key, value in v.items()}
    if isinstance(v, (list, tuple)):
        return [_plain(u) for u in v]
    return None if isinstance(v, float) and not math.isfinite(v) else v


def _run(args: argparse.Namespace) -> str:
    """What the command line prints. InputError for what the user can mend."""
    samples, x_start, A_range = (*(_float(v, v) for v in (args.samples, args.x_start)), args.A_range)
    for flag, right, fix in (
            ("fit-until", 0 < args.fit_until <= 1, "a share > 0 and <= 1"),
            ("scale", 0 < args.scale < math.inf, "a number > 0, such as 0.01 for percent"),
            ("samples", not isinstance(samples, float) or 0 < samples < math.inf, "a number > 0 or a column"),
            ("x-start", x_start == "first" or math.isfinite(_float(x_start, math.nan)), "a number or 'first'"),
            ("A-max", 0 < args.A_max < math.inf, "a number > 0"),
            ("R0", args.R0 is None or 0 <= args.R0 <= args.A_max, "a rate from 0 to --A-max"),
            ("A-range", not A_range or 0 <= A_range[0] < A_range[1] < math.inf, "0 <= LOW < HIGH"),
            ("A-range", not A_range or args.method == "paper_grid", "--method paper_grid with it")):
        if not right:
            raise InputError(f"--{flag} is {getattr(args, flag.replace('-', '_'))}; give {fix}")
    options = {"R0": args.R0, "A_max": args.A_max, "method": args.method} | ({"A_range": A_range} if A_range else {})
    reports = []
    for file in args.files:
        r = curve(file, x=args.x, y=args.y, samples=samples, scale=args.scale, x_start=x_start,
                  fit_until=args.fit_until, skip_below=args.skip_below, predict_at=args.predict_at, **options)
        if math.isnan(r.fit.A):
            raise InputError(f"{file}, line {r.last_line}: {r.fit.reason}")
        reports.append(r)
        if r.x != reports[0].x:
            raise InputError(f"{file}, line 1: x is {r.x}, but {reports[0].x} in {args.files[0]}; choose one with --x")
    result = {"runs": reports}
    text = [format_report(*reports)]
    if len(reports) > 1:
        result["comparison"] = both = compare(*(r.fit for r in reports), names=[r.name for r in reports])
        text.append(format_comparison(both))
    for r in reports:
        if args.windows:
            table = result[f"windows of {r.name}"] = windows(r.C, r.R, n_samples=r.n_samples, **options)
            text.append(f"{r.name}: windows of compute\n" + "\n".join(
                f"  {_span(w[:2]):<18}A {w[2].A:.3f} {_span(w[2].A_interval, '.3f')}  B {w[2].B:.2f}" for w in table))
        if args.power_law:
            if (r.fit.C > 0).sum() < 4:
                raise InputError(f"{r.name}: --power-law needs 4 points at C > 0; evaluate more often or leave it out")
            law = result[f"power law of {r.name}"] = power_law(r.fit.C, r.fit.R, A_max=args.A_max)
            text.append(f"{r.name}: A - D / C^B with A {law['A']:.3f}, B {law['B']:.2f}, RMSE {law['rmse']:.4f}")
    shared = result["comparison"].refits if len(reports) > 1 else []  # the slopes at the shared A, as in the paper
    try:
        if args.plot:
            plot_curves(reports, args.plot)
        if args.slopes:
            plot_slopes(shared or [r.fit for r in reports], [r.name for r in reports], args.slopes)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise InputError(f"--plot or --slopes: not written ({error}); name a .png in a folder that exists") from error
    return json.dumps(_plain(result), indent=1) if args.json else "\n\n".join(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Fit reward against compute with a sigmoid (arXiv 2510.13786, Eq. 1).")
    add = parser.add_argument
    add("files", nargs="+", help="eval.jsonl of a run, or a CSV with named columns")
    add("--x", help="column of compute: device_hours, flops, tokens, step or another (default: tokens on a CPU run)")
    add("--x-start", default="0", metavar="C", help="subtract this from the compute, or 'first': its least value")
    add("--y", help="column of the reward, in [0, 1] (default: pass_rate)")
    add("--scale", type=float, default=1.0, help="multiply the reward by this, 0.01 for percent")
    add("--samples", help="Bernoulli samples behind a point: column or number (default: n_prompts * n_samples)")
    add("--method", choices=METHODS, default=METHODS[0])
    add("--fit-until", type=float, default=1.0, metavar="SHARE", help="fit this share of the compute, predict the rest")
    add("--skip-below", default="0", metavar="C", help="leave out points with 0 < compute < C, or 'auto'")
    add("--predict-at", nargs="+", default=[], metavar="C", help="compute such as 1e21, or 2x for twice the run's")
    add("--R0", type=float, help="hold R0 fixed")
    add("--A-max", type=float, default=1.0, help="bound on the ceiling")
    add("--A-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="A of the paper's grid (default: 0.45 0.8)")
    add("--plot", metavar="PNG", help="draw points, fit and extrapolation")
    add("--slopes", metavar="PNG", help="draw log F(R) against log C, lines of slope B")
    add("--windows", action="store_true", help="refit over the paper's windows of compute")
    add("--power-law", action="store_true", help="fit A - D / C^B too")
    add("--json", action="store_true", help="print JSON instead of tables")
    try:
        print(_run(parser.parse_args(argv)))
    except InputError as error:
        print(f"fit_sigmoid.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
