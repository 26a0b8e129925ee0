"""Fit the reward of an RL run against compute, and say what more compute will bring, and how surely.

Problem. The recipe that wins early in a run may lose later, and the budget for late comparisons is rarely there.
Idea. Pass rate on held-out prompts follows a sigmoid in compute, so the early part of a run predicts the rest
(Khatri et al. 2025, arXiv 2510.13786, Eq. 1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    C      compute, any unit               R0  pass rate before RL         A  ceiling (asymptotic pass rate)
    C_mid  compute at half of the gain     B   efficiency: how steep       s  share of the gain, 1 / (1 + (C_mid / C)^B)

For given (B, C_mid) the curve is linear in the other two, R = (1 - s) R0 + s A, so the best (R0, A) and the whole sum of
squares Q around it are closed forms. A grid over (B, C_mid) alone then sees every minimum and every curve the data allow.

1. Estimate: the best minima of a global grid, polished. `paper_grid` is the paper's own procedure, for comparison.
2. Uncertainty by profile likelihood: the set of all curves with Q <= Q_min + phi t^2, t being Student's quantile. The
   interval of anything (A, B, the reward at 2 C) is its least and greatest value over that set. Chosen over a bootstrap
   because it needs no refits and does not break at the bound A <= 1.
3. Noise: a point has variance phi p (1 - p) / n where its number of samples n is known, else phi. The residuals give phi
   (with known n, together with 4 prior degrees of freedom at phi = 1), because n counts prompts x samples and samples of
   one prompt are correlated: phi > 1 when every evaluation draws new prompts, < 1 on a fixed held-out set. Residuals in
   waves hold less information: phi grows by (1 + r) / (1 - r), r their lag-1 correlation where it is significant.
4. `identifiable` is False, with a reason, when A's interval is wider than 0.1 or half the gain, when the bound on A and
   not the data stopped the fit, when nothing rises, and when points are too few.

Choices where the paper is silent: (a) the point at C = 0 measures R0 with its own sampling error; without it R0 is fitted.
(b) No run is exactly a sigmoid. One that rises faster than a ceiling <= 1 allows would be predicted too low, so
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import curve_fit, least_squares
from scipy.special import expit, fdtrc, stdtrit

METHODS = ("least_squares", "paper_grid")
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "optimiser steps"}
B_RANGE = (0.05, 20.0)  # an interval that touches an end is reported as open
A_SLACK = 1.25  # choice (b)
MAX_WIDTH = 0.1  # of A's interval, to be called identifiable: five of the paper's margins of 0.02
PRIOR_DOF = 4.0  # weight of "phi = 1" where n is known: a handful of residuals alone would claim anything
MIN_SD = 1e-4  # no evaluation is more exact; keeps noise-free data from giving intervals of width zero
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
    """A fitted curve. Compute is in the unit of the data, intervals are at `level`, NaN stands where there is no fit."""

    R0: float = math.nan
    A: float = math.nan
    B: float = math.nan
    C_mid: float = math.nan
    rmse: float = math.nan  # root mean squared residual of the points used, unweighted
    n_points: int = 0
    A_interval: tuple[float, float] = (0.0, math.inf)
    B_interval: tuple[float, float] = (0.0, math.inf)
    C_mid_interval: tuple[float, float] = (0.0, math.inf)
    R0_interval: tuple[float, float] = (0.0, math.inf)
    identifiable: bool = False
    reason: str = ""  # why not identifiable
    R0_source: str = "fitted"  # or "given", or "measured" (the point at C = 0)
    left_out: dict[str, int] = field(default_factory=dict)  # points not used: nan, duplicate, skipped, zero
    phi: float = math.nan  # variance of a point = phi p (1 - p) / n, or phi where n is unknown
    dof: float = 0.0  # degrees of freedom behind phi
    level: float = 0.95
    A_max: float = 1.0
    method: str = METHODS[0]
    C: np.ndarray = field(default=None, repr=False)  # (N,) the points used, by rising compute
    R: np.ndarray = field(default=None, repr=False)  # (N,)
    n_samples: np.ndarray | None = field(default=None, repr=False)  # (N,)
    curves: np.ndarray | None = field(default=None, repr=False)  # (4, M): R0, A, B, C_mid: edge of the likelihood set

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


def fit(C: ArrayLike, R: ArrayLike, *, R0: float | None = None, A: float | None = None, method: str = "least_squares",
        skip_below: float = 0.0, n_samples: ArrayLike | None = None, A_max: float = 1.0, level: float = 0.95,
        A_range: tuple[float, float] = (0.45, 0.8), C_mid_range: tuple[float, float] | None = None) -> SigmoidFit:
    """Fit Eq. 1 to rewards `R` (N,) at compute `C` (N,); inputs are not modified, order does not matter.

    R0, A       hold these fixed. R0 None: the point at C = 0 measures it, else it is fitted
    method      "least_squares" (global minimum) or "paper_grid" (A by steps of 0.005 in `A_range`, 100 linear values of
                C_mid in `C_mid_range`, by default up to the run's compute, B by `curve_fit`; intervals as above)
    skip_below  leaves out points with 0 < C < skip_below; the point at C = 0 always stays
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    A_max       bound on A
    Points with a NaN and exact repetitions are left out and counted. Data that cannot carry a fit give a verdict in
    `reason`, not an error. ValueError: shapes that differ, negative compute, a reward outside [0, A_max], two points at
    C = 0 that disagree, an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    C, R, n, left_out = _clean(C, R, n_samples, max(A_max, 1.0), skip_below, R0 is not None)
    source = "given" if R0 is not None else "measured" if (C == 0).any() else "fitted"
    result = SigmoidFit(n_points=C.size, R0_source=source, left_out=left_out, level=level, A_max=A_max, method=method,
                        C=C, R=R, n_samples=n)
    if C.size < 4 or (C > 0).sum() < 3:
        result.reason = f"{C.size} usable points: four unknowns need at least 4, three of them at C > 0"
        return result
    box = np.array([*((0, A_max) if R0 is None else (R0, R0)), *((0, A_max) if A is None else (A, A))], dtype=float)
    p, x = R, None
    for _ in range(1 if n is None else 3):  # binomial weights need the curve, the curve needs the weights
        w = 1 / _unit_variance(p, n)
        x, best = _search(C, R, w, box, x)
        p = sigmoid(C, *best)
    z, prior = np.sqrt(w) * (R - p), 0.0 if n is None else PRIOR_DOF
    result.dof = C.size - 2 - (R0 is None) - (A is None) + prior
    if result.dof > 0:
        result.phi = max((z @ z + prior) / result.dof, MIN_SD**2 if n is None else 0.0) * _waves(z)
        limit = z @ z + result.phi * stdtrit(result.dof, (1 + level) / 2) ** 2
        result.curves = _likelihood_set(C, R, w, box * [1, 1, 1, A_SLACK if A is None else 1], x, limit)
    if method == "paper_grid":
        best = _paper_grid(C, R, w, best[0] if source == "fitted" else box[0] if R0 is not None else R[0], A_range, C_mid_range)
    result.R0, result.A, result.B, result.C_mid = map(float, best)
    result.rmse = math.sqrt(np.mean((R - result.predict(C)) ** 2))
    _judge(result, w, A is not None, A_range)
    return result


def _clean(C: ArrayLike, R: ArrayLike, n: ArrayLike | None, top: float, skip_below: float, drop_zero: bool) -> tuple:
    """Sorted float copies of the points to use, and how many were left out for which reason."""
    C, R = np.array(C, dtype=float), np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = None if n is None else np.broadcast_to(np.asarray(n, dtype=float), C.shape)
    real = np.isfinite(C) & np.isfinite(R) & (True if n is None else np.isfinite(n))
    order = np.lexsort((R, C))
    order = order[real[order]]
    left_out = {"nan": int((~real).sum())}
    C, R, n = C[order], R[order], None if n is None else n[order]
    if (C < 0).any() or (R < 0).any() or (R > top).any() or (n is not None and (n <= 0).any()):
        raise ValueError(f"compute must be >= 0, rewards in [0, {top:g}] and n_samples > 0")
    repeated = np.zeros(C.size, dtype=bool)
    repeated[1:] = (np.diff(C) == 0) & (np.diff(R) == 0)
    if (~repeated & (C == 0)).sum() > 1:
        raise ValueError("two points at C = 0 disagree; keep one, it is the measurement of R0")
    skipped = ~repeated & (C > 0) & (C < skip_below)
    zero = ~repeated & (C == 0) & drop_zero  # with R0 given it would say nothing, but its residual would count as noise
    left_out |= {"duplicate": int(repeated.sum()), "skipped": int(skipped.sum()), "zero": int(zero.sum())}
    use = ~(repeated | skipped | zero)
    return C[use], R[use], None if n is None else n[use], left_out


def _unit_variance(p: ArrayLike, n: ArrayLike | None) -> np.ndarray:
    """Variance of a point but for phi: p (1 - p) / n, with one success and one failure added so that it is never 0."""
    p = np.asarray(p, dtype=float)
    if n is None:
        return np.ones(p.shape)
    q = np.clip((p * n + 1) / (n + 2), 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


def _waves(z: np.ndarray) -> float:
    """Variance inflation (1 + r) / (1 - r) of successive residuals `z` (N,); 1 where r is insignificant."""
    total = z @ z
    r = min(z[1:] @ z[:-1] / total, 0.95) if total > 0 else 0.0
    return (1 + r) / (1 - r) if r > 1.645 / math.sqrt(z.size) else 1.0


class _Cells(NamedTuple):
    """Q over (R0, A) in G cells (B, C_mid): Q_free + a dR0^2 + 2 b dR0 dA + c dA^2, (G,), and five candidate minima."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    R0: np.ndarray  # (5, G): the free minimum, then those on the edges R0 = low, R0 = high, A = low, A = high
    A: np.ndarray
    Q: np.ndarray
    allowed: np.ndarray  # bool: inside the box

    def best(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(R0, A, Q) of the least allowed candidate, (G,) each."""
        row = np.where(self.allowed, self.Q, np.inf).argmin(0)[None]
        return tuple(np.take_along_axis(v, row, 0)[0] for v in (self.R0, self.A, self.Q))


def _cells(log_B: np.ndarray, log_mid: np.ndarray, C: np.ndarray, R: np.ndarray, w: np.ndarray, box: np.ndarray) -> _Cells:
    """Weighted least squares for R = (1 - s) R0 + s A in every cell (G,), R0 in box[:2] and A in box[2:]."""
    with np.errstate(divide="ignore"):
        s = expit(np.exp(log_B)[:, None] * (np.log(C) - log_mid[:, None]))  # (G, N)
    u = 1 - s
    centre = w @ R / w.sum()  # both unknowns shift with R because the two factors sum to 1; this saves digits
    y, (low, high, A_low, A_high) = R - centre, box - centre
    a, b, c, d, e = (u * u) @ w, (u * s) @ w, (s * s) @ w, u @ (w * y), s @ (w * y)  # (G,)
    with np.errstate(divide="ignore", invalid="ignore"):  # a cell that says nothing on one of them gives NaN: not allowed
        det = a * c - b * b
        R0, A = [(c * d - b * e) / det], [(a * e - b * d) / det]
        for edge in (low, high):
            R0.append(np.full_like(a, edge))
            A.append(np.clip((e - b * edge) / c, A_low, A_high))
        for edge in (A_low, A_high):
            R0.append(np.clip((d - b * edge) / a, low, high))
            A.append(np.full_like(a, edge))
        R0, A = np.array(R0), np.array(A)
        Q = w @ (y * y) + a * R0**2 + 2 * b * R0 * A + c * A**2 - 2 * d * R0 - 2 * e * A
    return _Cells(a, b, c, R0 + centre, A + centre, Q, _inside(R0 + centre, A + centre, box) & np.isfinite(Q))


def _inside(R0: np.ndarray, A: np.ndarray, box: np.ndarray, tol: float = 1e-9) -> np.ndarray:
    return (R0 > box[0] - tol) & (R0 < box[1] + tol) & (A > box[2] - tol) & (A < box[3] + tol)


def _limits(C: np.ndarray) -> np.ndarray:
    """Search range [[low, high] of log B, [low, high] of log C_mid]: far beyond the data on both sides."""
    return np.log([B_RANGE, (C[C > 0].min() / 100, C.max() * 1000)])


def _search(C: np.ndarray, R: np.ndarray, w: np.ndarray, box: np.ndarray, start: np.ndarray | None = None) -> tuple:
    """Global least squares: x = (log B, log C_mid) and the parameters (R0, A, B, C_mid). `start` skips the zoom."""
    if start is None:
        log_B, log_mid, cells = _zoom(C, R, w, box)
        start = np.array([log_B[0], log_mid[0]])

    def residuals(x: np.ndarray) -> np.ndarray:
        R0, A, _ = _cells(x[:1], x[1:], C, R, w, box).best()
        return np.sqrt(w) * (sigmoid(C, R0, A, *np.exp(x)) - R)

    limits = _limits(C)
    inner = limits + np.array([1e-9, -1e-9]) * np.ptp(limits, axis=1)[:, None]  # `least_squares` starts strictly inside
    x = least_squares(residuals, np.clip(start, *inner.T), bounds=limits.T, xtol=1e-10, ftol=1e-12, gtol=1e-12).x
    R0, A, _ = _cells(x[:1], x[1:], C, R, w, box).best()
    return x, (R0[0], A[0], *np.exp(x))


def _zoom(C: np.ndarray, R: np.ndarray, w: np.ndarray, box: np.ndarray, x: np.ndarray | None = None, limit: float = -1.0) -> tuple:
    """Narrow a grid to the cells with Q <= limit around the optimum x, or without x to the best cell.

    Returns log B (G,), log C_mid (G,) and the cells. The region is often a thin banana, so every row (a value of B) has
    its own range of C_mid. The range of B narrows only after three rounds over C_mid: a row must have found its valley
    before it may be dropped as too high.
    """
    size, limits = 40, _limits(C)
    rows = np.linspace(*limits[0], size) if x is None else np.unique(np.append(np.linspace(*limits[0], size), x[0]))
    low, high = np.full(rows.size, limits[1, 0]), np.full(rows.size, limits[1, 1])
    for round_ in range(9):
        mids = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, size)  # (rows, size)
        if x is not None:  # the optimum is always one of the cells
            i = np.abs(rows - x[0]).argmin()
            mids[i, np.abs(mids[i] - x[1]).argmin()] = x[1]
        log_B, log_mid = np.repeat(rows, size), mids.ravel()
        cells = _cells(log_B, log_mid, C, R, w, box)
        Q = cells.best()[2].reshape(mids.shape)
        ok = Q <= max(limit, Q.min())
        if round_ == 8:
            return log_B[ok.ravel()], log_mid[ok.ravel()], _Cells(*(v[..., ok.ravel()] for v in cells))
        first = np.where(ok.any(1), ok.argmax(1), Q.argmin(1))
        last = np.where(ok.any(1), size - 1 - ok[:, ::-1].argmax(1), Q.argmin(1))
        step = (high - low) / (size - 1)
        low, high = np.maximum(low + (first - 1) * step, limits[1, 0]), np.minimum(low + (last + 1) * step, limits[1, 1])
        if round_ in (3, 6):
            hit = np.flatnonzero(ok.any(1))
            new = np.linspace(rows[max(hit[0] - 1, 0)], rows[min(hit[-1] + 1, rows.size - 1)], size)
            new = new if x is None else np.unique(np.append(new, x[0]))
            i = np.clip(np.searchsorted(rows, new), 1, rows.size - 1)
            rows, low, high = new, np.minimum(low[i - 1], low[i]), np.maximum(high[i - 1], high[i])


def _likelihood_set(C: np.ndarray, R: np.ndarray, w: np.ndarray, box: np.ndarray, x: np.ndarray, limit: float) -> np.ndarray:
    """Curves with Q <= limit, (4, M): R0, A, B, C_mid. In each cell they fill an ellipse in (R0, A), cut by the box."""
    log_B, log_mid, q = _zoom(C, R, w, box, x, limit)
    angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        radius = np.sqrt(np.maximum(limit - q.Q[0], 0))
        # Q = Q_free + (det / a) dA^2 + a (dR0 + b dA / a)^2, so that angle 0 is the extreme of A
        dA = radius * np.sqrt(q.a / (q.a * q.c - q.b**2)) * np.cos(angle)
        R0, A = [q.R0[0] - q.b / q.a * dA + radius / np.sqrt(q.a) * np.sin(angle)], [q.A[0] + dA]
        for sign in (-1, 0, 1):  # where the ellipse meets each edge of the box, and the best point of that edge
            reach = sign * np.sqrt(np.where(q.Q <= limit, limit - q.Q, np.nan))
            R0 += [q.R0[1:3], np.clip(q.R0[3:] + reach[3:] / np.sqrt(q.a), *box[:2])]
            A += [np.clip(q.A[1:3] + reach[1:3] / np.sqrt(q.c), *box[2:]), q.A[3:]]
    R0, A = np.concatenate(R0), np.concatenate(A)
    good = np.isfinite(R0 + A) & _inside(R0, A, box)
    return np.stack([v[good] for v in (R0, A, *np.broadcast_arrays(R0, np.exp(log_B), np.exp(log_mid))[1:])])


def _judge(result: SigmoidFit, w: np.ndarray, A_given: bool, A_range: tuple[float, float]) -> None:
    """Fill in the intervals, and the verdict: can the data tell the ceiling?"""
    r, C, R = result, result.C, result.R
    if r.curves is None:
        r.reason = f"{C.size} points leave no residual to measure the noise by: add points, or n_samples"
        return
    width = np.ptp(r.curves[1])
    spans = [(float(v.min()), float(v.max())) for v in r.curves[:, r.curves[1] <= r.A_max + 1e-9]]
    r.R0_interval, r.A_interval = spans[0], (spans[1][0], r.A_max if r.curves[1].max() > r.A_max else spans[1][1])
    edges = np.exp(_limits(C))  # at the end of the search range the data set no limit
    r.B_interval, r.C_mid_interval = ((0.0 if low < edge[0] * 1.05 else low, math.inf if high > edge[1] / 1.05 else high)
                                      for (low, high), edge in zip(spans[2:], edges))
    level = r.R0 if r.R0_source == "given" else w @ R / w.sum()
    gain = w @ ((R - level) ** 2 - (R - r.predict(C)) ** 2)  # what the curve explains beyond a flat line
    end, last = r.predict(C[-1]), f"by C = {_short(C[-1])}"
    if r.A < r.R0 or (fdtrc(2, r.dof, gain / 2 / r.phi) > 0.05):
        falls = np.corrcoef(C, R)[0, 1] < 0 if np.ptp(R) > 0 else False
        r.reason = f"the reward {'falls' if falls else 'does not rise beyond its noise'} {last}: there is no ceiling to fit"
    elif A_given:
        r.reason = ""
    elif r.A > r.A_max - 1e-6 and end < r.A_max - MAX_WIDTH / 2:
        r.reason = f"the bound A <= {r.A_max:g} stopped the fit, not the data, which reach {end:.2f} {last}"
    elif width > min(MAX_WIDTH, (r.A - r.R0) / 2):
        r.reason = f"every ceiling from {r.A_interval[0]:.2f} to {r.A_interval[1]:.2f} fits: the points stop at {end:.2f} {last}"
    elif r.method == "paper_grid" and not A_range[0] < r.A < A_range[1] - 1e-9:
        r.reason = f"A lies on the edge of the grid {A_range[0]:g}..{A_range[1]:g}: widen A_range"
    r.identifiable = not r.reason


def _short(v: float) -> str:
    """1234567 -> '1.23M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(v) < 1000 * size:
            return f"{v / size:.3g}{unit}"
    return f"{v:.3g}"
