"""Fit pass rate against compute with a sigmoid, and say what more compute will bring and how sure that is.

PROBLEM. The recipe that wins early in a run may lose later, and there is rarely a budget to compare recipes late.
IDEA. The pass rate on held-out prompts follows a sigmoid in compute, so the early part of a run predicts the rest
(Khatri et al. 2025, ScaleRL, arXiv 2510.13786, Eq. 1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    C      compute, in any unit               R0  pass rate before RL      A  ceiling (asymptotic pass rate)
    C_mid  compute at half of the gain A - R0                              B  efficiency: the exponent, how steep

WHY A SIGMOID. Suppose each problem is learned at a compute of its own, and that the logarithms of these computes follow
a logistic distribution with median log C_mid and scale 1/B. Then the share learned by C is s = 1 / (1 + (C_mid / C)^B).
So Eq. 1 is a distribution function: it says how soon problems are learned. The pass rate is R = (1 - s) R0 + s A.

PART ONE, what the paper does: a curve, its error, a comparison.
1. THE LAW. `sigmoid`, the equation above.
2. LEAST SQUARES. `plain_fit` is the fit in six lines, without weights or errors. Read this one first.
3. THE CLOSED FORM. For a given share s(C), R = (1 - s) R0 + s A is linear in R0 and A. So for each shape (B, C_mid) six
   sums give the best R0 and A, their Q = sum_i w_i (R_i - R(C_i))^2, and the ellipse of all R0 and A that fit almost as
   well (`solve`). Only B and C_mid are searched, on a grid that closes in (`scan`), so no starting point is needed.
4. THE NOISE. How far points scatter around their curve (`dispersion_of`).
5. THE INTERVALS. Every curve with Q <= least Q + DOUBT * dispersion * t^2 fits almost as well as the best one; t is
   Student's quantile. An interval holds the values that these curves have (`profile`). DOUBT = 2 is a safety margin
   that was chosen, not derived: it stands for whatever no form describes.
6. COMPARISON. `compare`: the higher ceiling wins; where ceilings agree, B at the shared ceiling decides.
7. A RUN. `load` reads the `eval.jsonl` of a run. (`tools/` reads the logs of other frameworks.)

PART TWO, what we add: a forecast that knows what it cannot know.
8. THE TAILS. Nothing says that learning times are logistic. Eq. 1 is one of four forms here. Fitted to the same early
   points they look alike, each with its own B and C_mid, but they differ in what is still to come. With
   u = B log(C / C_mid), and half of the gain at C_mid in each form:

       form           share s            density of log learning time   gain still missing at large C
       Weibull        1 - 2^(-e^u)       Gumbel, mirrored               2^(-(C/C_mid)^B): the last problems come soon
       log-normal     Phi(u / 1.7)       normal                         less than any power of C
       log-logistic   1 / (1 + e^-u)     logistic: Eq. 1                (C_mid/C)^B: some problems come very late
       Frechet        2^(-e^-u)          Gumbel: starts sharply         (C_mid/C)^B log 2; its B fits lower: the latest

9. THE BAND (`Forecast.interval`) spans two things:
   - every curve of every form that fits almost as well as the best one (step 5);
   - beyond the data, every rate from no further gain to three times the gain that Eq. 1 still expects. The data show
     how the early problems are learned, not the late ones. In the paper's run, cut at 20k to 50k GPU-hours, 1.9 to 2.5
     times that gain came; in other runs less came, and any run may simply stop improving.
   So a band is wide for three reasons: noise, form, and what remains. Only more compute makes the last one small.
10. THE VERDICT. A is identifiable if (a) there are enough points, (b) the pass rate rises beyond its noise and the
   first point lies below C_mid, (c) it does not fall at the end, (d) A's interval, before it is clipped to 1, is at
   most 0.1 wide and at most half of the gain. Otherwise `reason` says why not.
11. ASK AGAIN. `ask_again` estimates the compute from which A will be identifiable.
12. REPORT, picture and command line.

CHOICES. (i) A, B and C_mid are always those of Eq. 1, so that they compare with the paper's; the printed forecast comes
from the form that fits best. (ii) No point is left out. The paper leaves out the first 1,500 GPU-hours of its run.
Without them, or without the points below .6 C_mid, this fit is sure of a wrong ceiling for that run. (iii) The point
at C = 0 measures R0.

>>> C, R = [0, 1, 2, 4, 8, 16, 32, 64], [0.250, 0.275, 0.317, 0.405, 0.505, 0.566, 0.589, 0.597]
>>> [round(v, 2) for v in plain_fit(C, R)]  # R0, A, B, C_mid
[0.25, 0.6, 1.75, 4.57]
>>> f = fit(C, R, n_samples=16_000)
>>> print(f"A {f.A:.3f}, 95% from {f.A_interval[0]:.3f} to {f.A_interval[1]:.3f}")
A 0.601, 95% from 0.588 to 0.612

Then `f.identifiable`, or `f.reason` and `f.ask_again()`; `f.predict(C, f.form)`; `f.interval(C, noise=True)`.

Symbols: N points, G curves (shapes), K computes that are asked for; s the share of the gain, r = 1 - s.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import expit, fdtrc, ndtr, stdtrit

# ================================================================================= PART ONE: what the paper does
DOUBT = 2.0  # step 5
B_RANGE = (0.1, 20.0)  # an interval that touches an end is open
A_SLACK = 1.25  # A is searched up to here and reported up to 1: near the top a run may rise faster than A <= 1 can
MIN_SD = 1e-4  # no evaluation is more exact: residuals below it are rounding, which must not decide anything
PRIOR_DOF = 4.0  # weight of "dispersion = 1" where sample numbers are known: few residuals alone would claim anything
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "steps"}
Array = np.ndarray
Interval = tuple[float, float]
Share = Callable[[Array], Array]  # share of the gain at u = B log(C / C_mid); of Eq. 1: expit(u)


# --------------------------------------------------------------------------------- 1. The law, and 2. least squares
def sigmoid(C: ArrayLike, R0: ArrayLike, A: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> Array:
    """R(C) of arXiv 2510.13786, Eq. 1, for compute C >= 0. Arguments broadcast. Exactly R0 at C = 0."""
    with np.errstate(divide="ignore"):  # log 0 = -inf gives a share of 0, as it should
        u = B * (np.log(np.asarray(C, dtype=float)) - np.log(C_mid))
    # s = 1 / (1 + (C_mid / C)^B) = expit(B (log C - log C_mid)), which never overflows
    s = expit(u)
    return R0 + (np.asarray(A) - R0) * s


def plain_fit(C: ArrayLike, R: ArrayLike) -> tuple[float, float, float, float]:
    """(R0, A, B, C_mid) by least squares, from a single start. `fit` also says how sure they are."""
    C = np.asarray(C, dtype=float)
    R = np.asarray(R, dtype=float)

    def residuals(x: Array) -> Array:
        R0, A, log_B, log_C_mid = x
        return sigmoid(C, R0, A, np.exp(log_B), np.exp(log_C_mid)) - R

    least_B, most_B = B_RANGE
    lower = [0.0, 0.0, math.log(least_B), -50.0]
    upper = [1.0, 1.0, math.log(most_B), 99.0]
    start = [R.min(), R.max(), 0.0, math.log(np.median(C[C > 0]))]
    result = least_squares(residuals, start, bounds=(lower, upper), x_scale=[0.1, 0.1, 1, 1])
    R0, A, log_B, log_C_mid = result.x.tolist()
    return R0, A, math.exp(log_B), math.exp(log_C_mid)


# ------------------------------------------------------------------------------------------- 3. The closed form
class Data(NamedTuple):
    """What is fitted: Q = sum_i w_i (R_i - R(C_i))^2, within a box."""

    C: Array  # (N,) compute, sorted
    R: Array  # (N,) pass rates
    w: Array  # (N,) weights: one over the variance of a point at dispersion 1
    box: Array  # (4, 2) least and greatest R0, A, log B, log C_mid; equal ends fix R0 or A


class Curves(NamedTuple):
    """G curves of one form, each array (G,): the shape, the best R0 and A for it, and their Q. Away from the best pair,
    by d = (dR0, dA), Q grows to Q + d' V^-1 d. (Where a bound fixes that pair, this is wider than it needs to be.)"""

    log_B: Array
    log_C_mid: Array
    R0: Array
    A: Array
    Q: Array
    V: Array  # (3, G) the elements 00, 01, 11 of V

    def ends(self, s: ArrayLike, limit: float) -> Interval:
        """Least and greatest rate r R0 + s A over all curves with Q <= limit; s is (G,), or 0 for R0 and 1 for A."""
        s = np.asarray(s)
        r = 1 - s
        rate = r * self.R0 + s * self.A
        # d' V^-1 d <= limit - Q allows r dR0 + s dA up to sqrt((limit - Q) (r, s) V (r, s)').
        V00, V01, V11 = self.V
        spread = r * r * V00 + 2 * r * s * V01 + s * s * V11
        reach = np.sqrt(np.maximum(limit - self.Q, 0) * np.maximum(spread, 0))
        low = float(np.min(rate - reach))
        high = float(np.max(rate + reach))
        return low, high


def shares(C: Array, log_B: ArrayLike, log_C_mid: ArrayLike, share: Share = expit) -> Array:
    """Share of the gain (..., N) at compute C (N,) for shapes (...,)."""
    B = np.exp(log_B)[..., None]
    with np.errstate(divide="ignore"):
        u = B * (np.log(C) - np.asarray(log_C_mid)[..., None])  # B log(C / C_mid)
    return share(u)


def rates(curves: Curves, C: Array, share: Share = expit) -> Array:
    """Pass rates (N,) of the first of the curves at compute C (N,), at most 1."""
    s = shares(C, curves.log_B[0], curves.log_C_mid[0], share)
    R = (1 - s) * curves.R0[0] + s * curves.A[0]
    return np.minimum(R, 1.0)


def solve(data: Data, log_B: Array, log_C_mid: Array, share: Share = expit) -> Curves:
    """The best R0 and A for each shape (G,): weighted regression of R on r = 1 - s and s."""
    C, R, w, box = data
    R0_low, R0_high = box[0]
    A_low, A_high = box[1]
    s = shares(C, log_B, log_C_mid, share)  # (G, N)
    r: Array = 1 - s

    # Q = sum w (R - r R0 - s A)^2 depends on the data through six sums, (G,) each but for the last, a number.
    rr = (r * r) @ w
    rs = (r * s) @ w
    ss = (s * s) @ w
    rR = (r * R) @ w
    sR = (s * R) @ w
    RR = (R * R) @ w

    # A fixed value is one that was also measured with infinite weight. Else a tiny weight keeps det above 0.
    infinite = 1e9 * w.sum()
    tiny = 1e-12 * w.sum()
    R0_weight = infinite if R0_low == R0_high else tiny
    A_weight = infinite if A_low == A_high else tiny

    # The normal equations [rr rs; rs ss] (R0, A) = (rR, sR), by Cramer's rule for A.
    rr_all = rr + R0_weight
    ss_all = ss + A_weight
    det = rr_all * ss_all - rs * rs
    A = (rr_all * (sR + A_weight * A_low) - rs * (rR + R0_weight * R0_low)) / det

    # If one lies on an edge of its box, the other is solved again for it. No curve falls: R0 <= A.
    A = np.clip(A, A_low, A_high)
    R0 = (rR - rs * A) / np.maximum(rr, R0_weight)
    R0 = np.clip(R0, R0_low, np.clip(A, R0_low, R0_high))
    A = (sR - rs * R0) / np.maximum(ss, A_weight)
    A = np.clip(A, np.maximum(A_low, R0), A_high)

    Q = RR - 2 * R0 * rR - 2 * A * sR + R0 * R0 * rr + 2 * R0 * A * rs + A * A * ss
    V = np.array([ss_all, -rs, rr_all]) / det  # the inverse of the matrix above
    return Curves(log_B, log_C_mid, R0, A, np.maximum(Q, 0), V)


def scan(data: Data, limit: float | None = None, share: Share = expit) -> Curves:
    """The curves with Q <= limit, or without a limit the best one, on a grid that closes in on them."""
    searched = data.box[2:].tolist()  # the ends of log B and of log C_mid
    ends = searched
    rounds, size = (12, 31) if limit is None else (4, 61)
    for _ in range(rounds):
        axes = [np.linspace(low, high, size) for low, high in ends]
        log_B, log_C_mid = np.meshgrid(*axes, indexing="ij")
        curves = solve(data, log_B.ravel(), log_C_mid.ravel(), share)

        least = curves.Q.min()
        keep = curves.Q <= (least if limit is None else max(limit, least))
        # The next grid spans what is kept and three steps around it: the valley of Q is narrow, and lies across.
        ends = []
        for values, axis, (low, high) in zip(curves[:2], axes, searched, strict=True):
            room = 3 * (axis[1] - axis[0])
            low = max(values[keep].min() - room, low)
            high = min(values[keep].max() + room, high)
            ends.append([low, high])
    return Curves(*(values[..., keep] for values in curves))


def search_box(C: Array, R0: float | None, A: float | None) -> Array:
    """The `Data.box` of points at C, with R0 and A fixed where they are given."""
    R0_box = (0.0, 1.0) if R0 is None else (R0, R0)
    A_box = (0.0, A_SLACK) if A is None else (A, A)
    first = C[C > 0][0]
    last = C[-1]
    C_mid_range = [first / 10, last * 30]
    return np.array([R0_box, A_box, np.log(B_RANGE), np.log(C_mid_range)])


def least_squares_curve(C: Array, R: Array, n: Array | None, box: Array) -> tuple[Data, Curves]:
    """The best curve of Eq. 1, and its data with the weights."""
    data = Data(C, R, 1 / variance(R, n), box)
    curve = scan(data)
    if n is None:
        return data, curve
    for _ in range(2):  # binomial weights need the curve, and the curve needs the weights
        data = data._replace(w=1 / variance(rates(curve, C), n))
        curve = scan(data)
    return data, curve


def usable(C: ArrayLike, R: ArrayLike, n: ArrayLike | None, skip_below: float) -> tuple:
    """Sorted copies of C, R and n (N,) of the points to use; ValueError as `fit` says."""
    C = np.array(C, dtype=float)
    R = np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = np.asarray(inf if n is None else n, dtype=float)
    n = np.broadcast_to(n, C.shape)
    use = np.isfinite(C) & np.isfinite(R) & ~np.isnan(n)
    use &= (C <= 0) | (C >= skip_below)
    C = C[use]
    R = R[use]
    n = n[use]
    valid = (C >= 0) & (R >= 0) & (R <= 1) & (n > 0)
    if not valid.all():
        raise ValueError("need compute >= 0, n_samples > 0, pass rates in [0, 1]: divide percents by 100")
    order = np.lexsort((n, R, C))
    C, R, n = C[order], R[order], n[order]
    if C.size > 2 and C[0] > C[-1] / 2 and not skip_below:
        raise ValueError(f"compute starts at {C[0]:g} and ends at {C[-1]:g}: subtract what it was before training")
    return C, R, None if np.isinf(n).all() else n


# ------------------------------------------------------------------------------ 4. The noise, and 5. the intervals
def variance(p: ArrayLike, n: ArrayLike | None) -> Array:
    """Variance of a point at dispersion 1: p (1 - p) / n, with one success and one failure added so that it is never 0.
    Without n it is 1, and the dispersion is the variance itself."""
    if n is None:
        return np.ones(np.shape(p))
    smoothed = (np.asarray(p) * n + 1) / (np.asarray(n) + 2)
    q = np.clip(smoothed, 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


def dispersion_of(z: Array, w: Array, spare: int, n_known: bool) -> float:
    """The variance of a point, in units of `variance`, from standardized residuals z = sqrt(w) (R - R(C)), (N,).

    It is Q / spare, with Q = sum z^2 and `spare` = N less the numbers that were fitted; times (1 + r) / (1 - r) if r,
    the correlation of neighbors, is significant."""
    Q = z @ z
    exact = w.mean() * MIN_SD**2
    r = z[1:] @ z[:-1] / max(Q, w.sum() * MIN_SD**2)
    r = min(r, 0.95)
    significant = r > 1.645 / math.sqrt(z.size)
    inflation = (1 + r) / (1 - r) if significant else 1.0
    if not n_known:
        return float(max(Q / spare * inflation, exact))
    # A dispersion below 1 is not believed where samples are known: a run on a fixed held-out set follows itself more
    # exactly than it follows the law.
    estimate = (Q + PRIOR_DOF) / (spare + PRIOR_DOF) * inflation
    return float(max(estimate, 1.0, exact))


def profile(data: Data, limit: float) -> tuple[Interval, Interval, Interval]:
    """What A, B and C_mid may be: their least and greatest values over all curves of Eq. 1 with Q <= limit."""
    curves = scan(data, limit)
    low, high = curves.ends(1.0, limit)
    A = max(low, 0.0), min(high, 1.0)
    B = extent(curves.log_B, data.box[2])
    C_mid = extent(curves.log_C_mid, data.box[3])
    return A, B, C_mid


def extent(logs: Array, searched: Array) -> Interval:
    """Least and greatest value from logarithms; open at an end of what was searched."""
    low = logs.min()
    high = logs.max()
    is_open_below = low < searched[0] + 0.05
    is_open_above = high > searched[1] - 0.05
    return 0.0 if is_open_below else math.exp(low), inf if is_open_above else math.exp(high)


@dataclass(frozen=True, eq=False, repr=False)
class SigmoidFit:
    """Eq. 1 through the points of a run, in the data's unit of compute. NaN, and intervals that exclude nothing, where
    `reason` says that no curve can be fitted."""

    C: Array  # (N,) the points used, sorted
    R: Array  # (N,)
    n: Array | None  # (N,) samples behind each
    options: dict[str, Any]  # R0, A, skip_below, as `fit` got them
    dof: float  # degrees of freedom
    t: float  # Student's quantile for them
    reason: str = ""  # why the data cannot tell the ceiling; empty if they can
    dispersion: float = nan  # a point has variance dispersion * p (1 - p) / n, or dispersion where n is unknown
    R0: float = nan
    A: float = nan
    B: float = nan
    C_mid: float = nan
    rmse: float = nan  # of Eq. 1, unweighted
    A_interval: Interval = (0.0, 1.0)
    B_interval: Interval = (0.0, inf)
    C_mid_interval: Interval = (0.0, inf)

    @property
    def n_points(self) -> int:
        """Number of points used."""
        return self.C.size

    @property
    def identifiable(self) -> bool:
        """Whether the data can tell the ceiling."""
        return not self.reason

    def __repr__(self) -> str:
        numbers = f"A={self.A:.4g} {self.A_interval}, B={self.B:.4g} {self.B_interval}, C_mid={self.C_mid:.4g}"
        return f"SigmoidFit(R0={self.R0:.4g}, {numbers} {self.C_mid_interval}, {self.reason or 'identifiable'})"


# ------------------------------------------------------------------------------------------------- 6. Comparison
class Comparison(NamedTuple):
    """`refits` share the ceiling `shared_A`, where ceilings agree."""

    verdict: str
    shared_A: float | None = None
    refits: Sequence[SigmoidFit] = ()


def compare(*fits: SigmoidFit, names: Sequence[str] | None = None, margin: float = 0.02) -> Comparison:
    """The paper's comparison. Ceilings within `margin`, the noise between equal runs, agree: refit all with their mean,
    and compare B and C_mid. Otherwise the higher ceiling wins. No verdict where a ceiling is not identifiable.
    ValueError: fewer than two fits, or another number of names."""
    if len(fits) < 2:
        raise ValueError("a comparison needs at least two fits")
    if names is None:
        names = [f"run {i + 1}" for i in range(len(fits))]
    unknown = [name for name, f in zip(names, fits, strict=True) if not f.identifiable]
    if unknown:
        return Comparison(f"no verdict: the ceiling of {', '.join(unknown)} is not identifiable")

    A = [f.A for f in fits]
    difference = max(A) - min(A)
    if difference > margin + 1e-9:  # the paper's leave-one-out runs, .590 to .610, agree
        best = int(np.argmax(A))
        verdict = f"ceilings differ by {difference:.3f}, more than {margin:g}: {names[best]} is highest"
        if overlaps([f.A_interval for f in fits], best):
            verdict += ", but its interval overlaps that of another"
        return Comparison(verdict)

    shared = float(np.mean(A))
    refits = []
    for f in fits:
        options = f.options | {"A": shared}
        refits.append(fit(f.C, f.R, n_samples=f.n, **options))
    best = int(np.argmax([f.B for f in refits]))
    efficiency = f"{names[best]} is the most efficient"
    if overlaps([f.B_interval for f in refits], best):
        efficiency = "the intervals of B overlap"
    C_mid = [f.C_mid for f in refits]
    (low, first), *_, (high, last) = sorted(zip(C_mid, names, strict=True))
    verdict = f"ceilings agree within {margin:g}; at the shared A = {shared:.3f} {efficiency}"
    verdict += f", and C_mid goes from {short(low)} ({first}) to {short(high)} ({last})"
    return Comparison(verdict, shared, refits)


def overlaps(intervals: Sequence[Interval], best: int) -> bool:
    """Whether another interval reaches up into that of the best."""
    low = intervals[best][0]
    reaching = [high for _, high in intervals if high >= low]  # the best one among them
    return len(reaching) > 1


# ------------------------------------------------------------------------------------------------------ 7. A run
def load(source: str | Path | Sequence[Mapping], x: str = "") -> tuple:
    """Read an `eval.jsonl`, its folder, or such records: -> name of x, C (N,), R (N,), n_samples (N,) or None.

    `x` is the column of compute; "": tokens on a CPU run (marked so, or without device-hours), else device_hours. A row
    that stands there twice counts once. ValueError: a column is missing, or a value is not a number."""
    if isinstance(source, (str, Path)):
        source = read_rows(Path(source))
    rows = list({repr(row): row for row in source}.values())
    devices = {row.get("device", "gpu" if row.get("device_hours") else "cpu") for row in rows}
    if not x:
        x = "tokens" if devices == {"cpu"} else "device_hours"
    missing = [name for name in (x, "pass_rate") if not any(name in row for row in rows)]
    if missing:
        raise ValueError(f"none of the {len(rows)} rows has {' or '.join(missing)}; tools/ reads other columns")

    def column(name: str) -> Array:
        values = [row.get(name) for row in rows]
        return np.array([nan if value is None else float(value) for value in values])

    C = column(x)
    R = column("pass_rate")
    n = column("n_prompts") * column("n_samples")
    untrained = [row.get("step") == 0 for row in rows]
    C[untrained] = 0.0  # the clock has run, but nothing has been trained
    return x, C, R, None if np.isnan(n).any() else n


def read_rows(path: Path) -> list[Mapping]:
    """The rows of an eval.jsonl, or of the one in a folder. A last line that is still being written is no row."""
    if path.is_dir():
        path = path / "eval.jsonl"
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    if lines[-1].count("{") != lines[-1].count("}"):
        lines.pop()
    return [json.loads(line) for line in lines if line.strip()]


def short(v: Any) -> str:
    """1234567 -> '1.23M'."""
    thousands = 0
    if v and math.isfinite(v):
        thousands = int((math.log10(abs(v)) + 2e-4) // 3)  # 999,900 is 1M
        thousands = min(max(thousands, 0), 3)
    return f"{v / 1000**thousands:.3g}{('', 'k', 'M', 'G')[thousands]}"


def span(pair: Sequence[float], digits: int | None = None) -> str:
    """(0.5, 1e6) -> '[0.5, 1M]'; with `digits` 3 '[0.500, 1000000.000]'."""
    low, high = (short(v) if digits is None else f"{v:.{digits}f}" for v in pair)
    return f"[{low}, {high}]"


# ====================================================================================== PART TWO: what we add
# Part two builds on part one. Of part two, part one calls `fit` alone, in `compare`.
REMAINS = 3.0  # step 9: how many times the gain that Eq. 1 expects may still come
MAX_WIDTH = 0.1  # step 10: five of the paper's margins of 0.02
FLAT = 0.001  # step 10: how unlikely a flat line must be
FALL = 4.0  # step 10: how many standard errors the last points may lie too low

# ---------------------------------------------------------------------------------------------------- 8. The tails
EQ1 = "log-logistic"
FORMS: dict[str, Share] = {  # the share at u
    "Weibull": lambda u: -np.expm1(-math.log(2) * np.exp(np.minimum(u, 50))),
    "log-normal": lambda u: ndtr(u / 1.7),  # 1.7: nowhere .01 off the logistic
    EQ1: expit,
    "Frechet": lambda u: np.exp(-math.log(2) * np.exp(np.minimum(-u, 50))),
}


def fit(
    C: ArrayLike,
    R: ArrayLike,
    *,
    R0: float | None = None,
    A: float | None = None,
    skip_below: float = 0.0,
    n_samples: ArrayLike | None = None,
) -> "Forecast":
    """Fit pass rates `R` (N,) at compute `C` (N,). The inputs are not modified; their order does not matter.

    R0, A       fix these. R0 None: the point at C = 0 measures it, else it is fitted
    skip_below  leave out points with 0 < C < skip_below
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    Points with a NaN are left out. Data that cannot carry a fit give a `reason`. ValueError: shapes that differ, values
    out of range (compute >= 0, pass rates in [0, 1], 0 <= R0 <= A <= 1).
    """
    if not 0 <= (R0 or 0.0) <= (1.0 if A is None else A) <= 1:
        raise ValueError(f"need 0 <= R0 <= A <= 1, not R0 = {R0}, A = {A}")
    C, R, n = usable(C, R, n_samples, skip_below)
    # A measured R0 costs one degree of freedom like a fitted one: its point is one of the N.
    fitted = 2 + (R0 is None) + (A is None)
    spare = C.size - fitted
    dof = float(spare) if n is None else spare + PRIOR_DOF
    options = {"R0": R0, "A": A, "skip_below": skip_below}
    t = float(stdtrit(dof, 0.975))
    f = Forecast(C, R, n, options, dof, t)
    least = 1 if n is None else 0
    places = np.unique(C[C > 0])
    if spare < least or places.size < 3:
        few = f"{C.size} usable points are too few for four unknowns and the noise: evaluate more often"
        return replace(f, reason=few)

    data, eq1 = least_squares_curve(C, R, n, search_box(C, R0, A))
    best = {EQ1: eq1}
    for form, share in FORMS.items():
        if form != EQ1:
            best[form] = scan(data, share=share)
    form = min(best, key=lambda name: best[name].Q[0])
    fitted_R = rates(best[form], C, FORMS[form])
    z = np.sqrt(data.w) * (R - fitted_R)  # (N,) standardized residuals
    dispersion = dispersion_of(z, data.w, spare, n is not None)
    f = replace(f, dispersion=dispersion)

    reason = falls(z, data.w)
    if is_flat(f, data, float(best[form].Q[0])):
        flat = f"the pass rate does not rise beyond its noise by C = {short(C[-1])}: no curve to fit"
        return replace(f, reason=reason or flat)
    f = with_curves(f, best, form)
    return replace(f, reason=reason) if reason else with_ceiling(f, data)


@dataclass(frozen=True, eq=False, repr=False)
class Forecast(SigmoidFit):
    """The same, with the four tails: A's interval is over all forms, the other numbers are Eq. 1's."""

    best: dict[str, Curves] = field(default_factory=dict)  # form -> one curve; empty if nothing can be fitted
    allowed: dict[str, Curves] = field(default_factory=dict)  # form -> all curves that are not excluded
    form: str = EQ1  # that fits best
    likelihood: dict[str, float] = field(default_factory=dict)  # of each form's best curve, over that of `form`
    margin: float = nan  # step 5: DOUBT * dispersion * t^2
    limit: float = nan  # least Q of all forms, and the margin

    def predict(self, C: ArrayLike, form: str = EQ1) -> Array:
        """The fitted curve at compute `C`, any shape: Eq. 1. The printed forecast is `predict(C, self.form)`."""
        if not self.best:
            return np.full(np.shape(C), nan)
        flat = np.ravel(np.asarray(C, dtype=float))
        return rates(self.best[form], flat, FORMS[form]).reshape(np.shape(C))

    def interval(self, C: ArrayLike, *, noise: bool = False) -> Array:
        """Low and high pass rate at compute `C` (K,) -> (2, K): of the curve, or with `noise` of an evaluation there
        with as many samples as the fitted points have. The half-widths of curve and noise add in quadrature."""
        C = np.atleast_1d(np.asarray(C, dtype=float))
        if not self.allowed:
            return np.array([np.zeros(C.shape), np.ones(C.shape)])
        low, high = band(self, C)
        if noise:
            n = None if self.n is None else np.median(self.n)
            p = np.clip(self.predict(C, self.form), low, high)
            sd = np.sqrt(self.dispersion * variance(p, n)) * self.t
            low = np.maximum(p - np.hypot(p - low, sd), 0)
            high = np.minimum(p + np.hypot(high - p, sd), 1)
        return np.array([low, high])

    def ask_again(self) -> float:
        """About the compute from which A would be identifiable, if the run went on along its best form, evaluated as
        often, with half of its noise (so the odds are about even); inf beyond 28 times the compute so far."""
        if not self.allowed:
            return inf
        powers = range(36)  # of 1.1, and 1.1^35 = 28
        k = bisect_left(powers, True, key=lambda k: continued(self, 1.1**k).identifiable)
        return float(self.C[-1]) * 1.1**k if k in powers else inf


def with_curves(f: Forecast, best: dict[str, Curves], form: str) -> Forecast:
    """The forecast with each form's best curve, and with the numbers of Eq. 1."""
    Q = {name: float(best[name].Q[0]) for name in FORMS}
    least = Q[form]
    # The likelihood of a curve is exp(-Q / (2 dispersion)), up to a constant.
    likelihood = {name: math.exp((least - Q[name]) / 2 / f.dispersion) for name in FORMS}
    margin = DOUBT * f.dispersion * f.t**2
    eq1 = best[EQ1]
    return replace(
        f,
        best=best,
        form=form,
        likelihood=likelihood,
        margin=margin,
        limit=least + margin,
        R0=float(eq1.R0[0]),
        A=min(float(eq1.A[0]), 1.0),
        B=float(np.exp(eq1.log_B[0])),
        C_mid=float(np.exp(eq1.log_C_mid[0])),
        rmse=math.sqrt(np.mean((f.R - rates(eq1, f.C)) ** 2)),
    )


# ---------------------------------------------------------------------------------------------------- 9. The band
def band(f: Forecast, C: Array) -> tuple[Array, Array]:
    """Low and high (K,) at compute C (K,): of all allowed curves of all forms, and beyond the data of what remains."""
    lows: list[float] = []  # F times K, for F forms
    highs: list[float] = []
    for form, curves in f.allowed.items():
        for compute in C:
            s = shares(compute[None], curves.log_B, curves.log_C_mid, FORMS[form])  # (G, 1)
            low, high = curves.ends(s[:, 0], f.limit)
            lows.append(low)
            highs.append(high)
    low = np.reshape(lows, (-1, C.size)).min(axis=0)
    high = np.reshape(highs, (-1, C.size)).max(axis=0)

    # Beyond the data: from the rate that was reached, R, to R + REMAINS (R(C) - R).
    reached = f.predict(f.C[-1])
    most = reached + REMAINS * (f.predict(C) - reached)
    beyond = f.C[-1] < C
    low = np.where(beyond, np.minimum(low, reached), low)
    high = np.where(beyond, np.maximum(high, most), high)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


# ------------------------------------------------------------------------------- 10. The verdict, and 11. ask again
def falls(z: Array, w: Array) -> str:
    """Why a run with standardized residuals z (N,) is said to fall: its last fifth lies FALL standard errors too low.
    Empty if it does not."""
    late = z[-max(3, z.size // 5) :]
    # The noise of differences between neighbors, which do not see a slow misfit.
    noise_variance = np.mean(np.diff(z) ** 2) / 2
    noise = math.sqrt(max(noise_variance, w.mean() * MIN_SD**2))
    if late.mean() * math.sqrt(late.size) >= -FALL * noise:
        return ""
    return f"the last {late.size} points lie below the curve: the run falls, and nothing says how far"


def is_flat(f: Forecast, data: Data, Q: float) -> bool:
    """Whether a flat line could have made this Q: the F test of two more parameters, simulated for its level."""
    if f.options["A"] is not None:
        return False
    _, R, w, _ = data
    level = f.options["R0"]
    if level is None:
        level = w @ R / w.sum()
    gained = w @ (R - level) ** 2 - Q
    F = max(gained, 0) / f.dispersion / 2
    return fdtrc(2, f.dof, F) > FLAT


def with_ceiling(f: Forecast, data: Data) -> Forecast:
    """The forecast with its allowed curves and intervals, and with the reason why A's is too wide, if it is."""
    eq1 = f.best[EQ1]
    reached = float(f.predict(f.C[-1]))
    # The band at infinite compute, where a rate is A: of what remains, and of all allowed curves of all forms.
    low = reached
    high = reached + REMAINS * (float(eq1.A[0]) - reached)
    allowed = {}
    for form, curve in f.best.items():
        if curve.Q[0] <= f.limit:
            allowed[form] = scan(data, f.limit, FORMS[form])
            least, most = allowed[form].ends(1.0, f.limit)
            low = min(low, least)
            high = max(high, most)

    # B and C_mid are Eq. 1's, also where another form excludes it.
    _, B_interval, C_mid_interval = profile(data, float(eq1.Q[0]) + f.margin)
    A_interval = max(low, 0.0), min(high, 1.0)
    f = replace(f, allowed=allowed, A_interval=A_interval, B_interval=B_interval, C_mid_interval=C_mid_interval)
    fixed = f.options["A"]
    if fixed is not None:
        return replace(f, A_interval=(fixed, fixed))

    too_wide = high - low > min(MAX_WIDTH, (f.A - f.R0) / 2)
    starts_late = f.options["R0"] is None and f.C_mid < f.C[0]
    if not (too_wide or starts_late):
        return f
    reason = f"ceilings from {low:.2f} to {A_interval[1]:.2f} fit: the data reach {reached:.2f}"
    reason += f" by C = {short(f.C[-1])}, {f.C[-1] / f.C_mid:.1f} C_mid"
    if f.C[0] > f.C_mid:
        reason += f", from {f.C[0] / f.C_mid:.1f} on"
    return replace(f, reason=reason)


def continued(f: Forecast, factor: float) -> Forecast:
    """The fit that the run would have after `factor` times its compute, as `ask_again` says."""
    last = float(f.C[-1])
    in_last_half = int((f.C > last / 2).sum())
    size = 1 + min(int(2 * in_last_half * (factor - 1)), 200)
    C = np.linspace(1, factor, 1 + size)[1:] * last
    n = None if f.n is None else np.full(size, f.n[-1])
    R = f.predict(C, f.form)
    sd = np.sqrt(f.dispersion * variance(R, n))
    R = R + np.resize([0.5, -0.5], size) * sd
    C = np.append(f.C, C)
    R = np.append(f.R, np.clip(R, 0, 1))
    n_samples = None if n is None else np.append(f.n, n)
    return fit(C, R, n_samples=n_samples, **f.options)


# ----------------------------------------------------------------------------- 12. Report, picture, command line
class CurveReport(NamedTuple):
    """All evaluations of a run, N of them, and the fit to those before the unseen ones."""

    name: str
    x: str  # what compute is: tokens, device_hours, flops, step
    C: Array
    R: Array
    unseen: Array  # of bool
    fit: Forecast

    @property
    def end(self) -> float:
        """The compute of the last evaluation."""
        return float(np.nanmax(self.C, initial=0.0))


def curve(source: str | Path | Sequence[Mapping], fit_until: float = 1.0, name: str = "", x: str = "") -> CurveReport:
    """`load` a run and fit the points up to the share `fit_until` of its compute."""
    if not 0 < fit_until <= 1:
        raise ValueError(f"--fit-until is a share of the compute in (0, 1], not {fit_until:g}")
    x, C, R, n = load(source, x)
    C = np.where(np.isfinite(C) & np.isfinite(R), C, nan)
    until = fit_until * np.nanmax(C, initial=0.0)
    unseen = C > until * (1 + 1e-12)
    seen = ~unseen
    f = fit(C[seen], R[seen], n_samples=None if n is None else n[seen])
    if not name:
        name = str(source).removesuffix("/eval.jsonl") if isinstance(source, (str, Path)) else "run"
    return CurveReport(name, x, C, R, unseen, f)


def format_report(r: CurveReport, *predict_at: float) -> str:
    """The table that a person reads."""
    f = r.fit
    if not f.best:
        return f"{r.name}: no fit: {f.reason}"
    verdict = "identifiable" if f.identifiable else "not identifiable"
    lines = [
        f"{r.name}: {f.n_points} points up to {short(f.C[-1])} {UNITS.get(r.x, r.x)}, {f.C[-1] / f.C_mid:.1f} C_mid",
        f"A     ceiling         {f.A:.3f}  {span(f.A_interval, 3)} {verdict}",
    ]
    if f.reason:
        again = f.ask_again()
        advice = f"; ask again at {short(again)}" if math.isfinite(again) else ""
        lines.append(f"{'':22}{f.reason}{advice}")
    others = ", ".join(f"{form} {p:.2g}" for form, p in f.likelihood.items() if p < 1)
    lines += [
        f"B     efficiency      {f.B:.2f}   {span(f.B_interval)}",
        f"C_mid half the gain   {short(f.C_mid)}   {span(f.C_mid_interval)}",
        f"R0    before RL       {f.R0:.3f}",
        f"tail                  {f.form}; {others}",
    ]
    if r.unseen.any():
        lines.append(format_prediction(r, r.end))
    lines += [format_prediction(r, at) for at in predict_at]
    if r.unseen.any():
        low, high = f.interval(r.C[r.unseen], noise=True)
        R = r.R[r.unseen]
        inside = (low <= R) & (R <= high)
        lines.append(f"unseen                {inside.sum()} of {R.size} evaluations inside")
    return "\n".join(lines)


def format_prediction(r: CurveReport, at: float) -> str:
    """What the fit says of compute `at`, beside what was measured there."""
    f = r.fit
    curve_ends = f.interval(at)[:, 0].tolist()
    low, high = f.interval(at, noise=True)[:, 0].tolist()
    line = f"at {short(at):<18} {float(f.predict(at, f.form)):.3f}  {span(curve_ends, 3)}"
    line += f", an evaluation {span((low, high), 3)}"
    for R in r.R[at == r.C]:
        line += f"; measured {R:.3f}, {'inside' if low <= R <= high else 'OUTSIDE'}"
    return line


def plot_curves(rows: Sequence[Sequence[CurveReport]], path: str | Path) -> None:
    """Write a PNG, a panel for each run: points, the best form, the band of evaluations, A's interval, the verdict."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    reports = [r for row in rows for r in row]
    columns = len(rows[0])
    names = {r.name: Path(r.name).name.removesuffix(".jsonl").replace("_", " ") for r in reports}
    if len(set(names.values())) < len(names):  # a/seed-0 and b/seed-0
        names = {name: name for name in names}
    lowest = min(float(np.nanmin(r.R, initial=1.0)) for r in reports)
    limits = max(0.0, lowest - 0.1), 1.02
    width = max(2.6 * columns + 1, 6)
    height = 2.6 * len(rows) + 1
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.subplots(len(rows), columns, squeeze=False, sharey=True)
    for axes, r in zip(figure.axes, reports, strict=True):
        plot_one(axes, r, names[r.name])
        axes.set(ylim=limits, xlabel=UNITS.get(r.x, r.x), ylabel="pass rate")
        axes.xaxis.set_major_formatter(lambda v, _: short(v))
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def plot_one(axes: Any, r: CurveReport, name: str) -> None:
    """One panel."""
    f = r.fit
    for which, fill, label in ((~r.unseen, "C0", "fitted"), (r.unseen, "white", "came later")):
        axes.plot(r.C[which], r.R[which], "o", color="C0", mfc=fill, ms=4, label=label)
    title = f"{name}, {f.n_points} of {r.C.size} points"
    if f.best:
        grid = np.linspace(0, r.end, 200)
        fitted = grid[grid <= f.C[-1]]  # beyond it many curves fit: the forecast is the band
        axes.plot(fitted, f.predict(fitted, f.form), color="black", lw=1)
        low, high = f.interval(grid, noise=True)
        axes.fill_between(grid, low, high, color="C0", alpha=0.2, lw=0, label="forecast, 95%")
        axes.plot([1.04 * r.end] * 2, f.A_interval, "_-", color="C1", label="ceiling A")
        title = f"{name}, {f.C[-1] / r.end:.0%} of the compute"
        title += f"\nceiling {f.A_interval[0]:.2f} to {f.A_interval[1]:.2f}"
    if f.reason:
        title += ", not known yet"
    axes.set_title(title, fontsize=9)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Fit pass rate against compute (arXiv 2510.13786, Eq. 1).")
    add = parser.add_argument
    add("files", nargs="+", help="eval.jsonl of a run, or its folder; several runs are compared")
    add("--fit-until", type=float, nargs="+", default=[1.0], metavar="SHARE", help="fit so much, forecast the rest")
    add("--predict-at", type=float, nargs="+", default=[], metavar="C", help="predict at this compute, too")
    add("--x", default="", metavar="COLUMN", help="compute; by default tokens or device_hours")
    add("--plot", metavar="PNG", help="draw a panel for each run and share")
    args = parser.parse_args(argv)
    place = "--predict-at"
    rows = []
    try:
        if not all(0 <= C < inf for C in args.predict_at):
            raise ValueError(f"need compute >= 0, not {args.predict_at}")
        for place in args.files:
            row = [curve(place, share, x=args.x) for share in args.fit_until]
            rows.append(row)
            x = rows[0][0].x
            if row[-1].x != x:
                raise ValueError(f"compute is {row[-1].x}, but {x} in {args.files[0]}")
            if not row[-1].fit.best:
                raise ValueError(row[-1].fit.reason)
        print("\n\n".join(format_report(r, *args.predict_at) for row in rows for r in row))
        if len(rows) > 1:
            fits = [row[-1].fit for row in rows]
            print("\n" + compare(*fits, names=[row[-1].name for row in rows]).verdict)
        if args.plot:
            place = args.plot
            plot_curves(rows, place)
    except (ImportError, OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        print(f"fit_sigmoid.py: {place}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
