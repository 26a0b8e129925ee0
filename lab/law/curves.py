"""Eq. 1 fitted as `forecast.py` needs it: thousands of times a second, and with the noise that real evaluations have.

`fit_sigmoid.py` is the lesson on this law. It searches all four numbers from several starts, and takes the errors of
neighboring evaluations for independent. Here two numbers are searched, and correlated errors widen the intervals.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)                          arXiv 2510.13786, Eq. 1

1. THE CLOSED FORM. With s = 1 / (1 + (C_mid / C)^B), the part of the gain made by C, R = (1 - s) R0 + s A is linear in
   R0 and A. So for each shape (B, C_mid) six sums give the best R0 and A, their Q = sum_i w_i (R_i - R(C_i))^2, and the
   ellipse of all R0 and A that fit almost as well (`solve`). Here w_i = 1 / `variance`: exact points count more. Only B
   and C_mid are searched, on a grid that closes in (`scan`), so no starting point is needed.
2. THE NOISE. The dispersion says how many times that variance the points have around their curve (`dispersion_of`).
3. THE INTERVALS. Every curve with Q <= least Q + DOUBT * dispersion * t^2 fits almost as well as the best one; t is
   Student's 97.5% quantile. An interval holds the values that these curves have (`profile`). DOUBT = 2 is a safety
   margin that was chosen, not derived: it stands for whatever the equation does not describe.
4. THE FIT. `fit` does all of this. A is identifiable if its interval, before it is clipped to 1, is at most 0.1 wide
   and at most half of the gain, and the first point lies below C_mid. Otherwise `reason` says why not.
5. COMPARISON. `compare`: the higher ceiling wins; where ceilings agree, B at the shared ceiling decides.
6. A RUN. `load` reads the `eval.jsonl` of a run. (`read_logs.py` reads the logs of other frameworks.)
7. REPORT, and the picture of several variants, each of one run or of the mean of its seeds.

All of this takes Eq. 1 for the truth. `forecast.py` asks what else the same points allow, and is less often sure. It
also asks whether the run rises at all, and whether it falls.

CHOICES. (i) No point is left out. The paper leaves out the first 1,500 GPU-hours of its run. Without those, or without
the points below .6 C_mid, this fit is sure of a wrong ceiling for that run. (ii) The point at C = 0 is fitted like any.

>>> C, R = [0, 1, 2, 4, 8, 16, 32, 64], [0.250, 0.275, 0.317, 0.405, 0.505, 0.566, 0.589, 0.597]
>>> f = fit(C, R, n_samples=16_000)
>>> print(f"A {f.A:.3f}, 95% from {f.A_interval[0]:.3f} to {f.A_interval[1]:.3f}")
A 0.601, 95% from 0.590 to 0.612

Symbols: N points, G curves (shapes); s the part of the gain that is made, r = 1 - s. A `tail` is the function that
gives s: Eq. 1's unless forecast.py passes another.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, stdtrit

DOUBT = 2.0  # step 3
B_RANGE = (0.1, 20.0)  # an interval that touches an end is open
A_SLACK = 1.25  # A is searched up to here and reported up to 1: near the top a curve with A <= 1 may be too slow
MIN_SD = 1e-4  # no evaluation is more exact: residuals below it are rounding, which must not decide anything
MAX_WIDTH = 0.1  # step 4: five times the paper's 0.02
BLOCK = 8192  # numbers: arrays of so many stay in the cache
PRIOR_DOF = 4.0  # counts as 4 residuals of dispersion 1, where n is known: few real ones say little
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "steps"}
Array = np.ndarray
Interval = tuple[float, float]
Tail = Callable[[Array], Array]  # the part of the gain made at u = B log(C / C_mid); of Eq. 1: expit(u)


# ------------------------------------------------------------------------------------------- 1. The closed form
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

    def ends(self, s: ArrayLike, largest_Q: float) -> Interval:
        """Least and greatest rate r R0 + s A of all curves with Q <= largest_Q; s is (G,), or 0 for R0 and 1 for A."""
        s = np.asarray(s)
        r = 1 - s
        rate = r * self.R0 + s * self.A
        # d' V^-1 d <= largest_Q - Q allows r dR0 + s dA up to sqrt((largest_Q - Q) (r, s) V (r, s)').
        V00, V01, V11 = self.V
        spread = r * r * V00 + 2 * r * s * V01 + s * s * V11
        reach = np.sqrt(np.maximum(largest_Q - self.Q, 0) * np.maximum(spread, 0))
        low = float(np.min(rate - reach))
        high = float(np.max(rate + reach))
        return low, high


def gained(C: Array, log_B: ArrayLike, log_C_mid: ArrayLike, tail: Tail = expit) -> Array:
    """The part of the gain made, (N, ...), at compute C (N,) for shapes (...,)."""
    with np.errstate(divide="ignore"):
        u = np.exp(log_B) * np.subtract.outer(np.log(C), log_C_mid)  # B log(C / C_mid)
    return tail(u)


def rates_of_first(curves: Curves | None, C: ArrayLike, tail: Tail = expit) -> Array:
    """Pass rates of the first of the curves at compute C, any shape, at most 1; NaN without a curve."""
    if curves is None:
        return np.full(np.shape(C), nan)
    flat = np.ravel(np.asarray(C, dtype=float))
    s = gained(flat, curves.log_B[0], curves.log_C_mid[0], tail)
    R = (1 - s) * curves.R0[0] + s * curves.A[0]
    return np.minimum(R, 1.0).reshape(np.shape(C))


def solve(data: Data, log_B: Array, log_C_mid: Array, tail: Tail = expit) -> Curves:
    """The best R0 and A for each shape (G,), if the data rise: weighted regression of R on r = 1 - s and s."""
    C, R, w, box = data
    (R0_low, R0_high), (A_low, A_high) = box[:2]

    # Q = sum w (R - r R0 - s A)^2 depends on the data through six sums, (G,) each but for RR, a number. Arrays of BLOCK
    # numbers stay in the cache.
    blocks = math.ceil(C.size * log_B.size / BLOCK)
    sums = []
    for block in np.array_split(np.array([log_B, log_C_mid]), blocks, axis=1):
        s = gained(C, block[0], block[1], tail)  # (N, g)
        sums.append([w @ s, w @ (s * s), (w * R) @ s])
    s_sum, ss, sR = np.concatenate(sums, axis=1)
    rs = s_sum - ss
    rr = w.sum() - s_sum - rs
    rR = w @ R - sR
    RR = w @ (R * R)

    # The best pair: normal equations [rr rs; rs ss] (R0, A) = (rR, sR), for A by Cramer's rule. Where all points have
    # s = 0, or all s = 1, they say nothing of A or R0; a tiny weight keeps the determinant above 0.
    tiny = 1e-12 * w.sum()
    rr_safe = rr + tiny
    ss_safe = ss + tiny
    det = rr_safe * ss_safe - rs * rs
    A = (rr_safe * sR - rs * rR) / det

    # The box: A is moved into it, then R0 is the best for this A, then A is the best for this R0. A fixed value has a
    # box of one point. No curve falls, R0 <= A; where the data fall, a better pair may be left out.
    A = np.clip(A, A_low, A_high)
    R0 = (rR - rs * A) / np.maximum(rr, tiny)
    R0 = np.clip(R0, R0_low, np.clip(A, R0_low, R0_high))
    A = (sR - rs * R0) / np.maximum(ss, tiny)
    A = np.clip(A, np.maximum(A_low, R0), A_high)
    Q = RR - 2 * R0 * rR - 2 * A * sR + R0 * R0 * rr + 2 * R0 * A * rs + A * A * ss

    # V is the inverse of the matrix above. A fixed value has no spread, and the other one is left with its own.
    none = np.zeros_like(det)
    if R0_low == R0_high:
        V = [none, none, none if A_low == A_high else 1 / ss_safe]
    elif A_low == A_high:
        V = [1 / rr_safe, none, none]
    else:
        V = [ss_safe / det, -rs / det, rr_safe / det]
    return Curves(log_B, log_C_mid, R0, A, np.maximum(Q, 0), np.array(V))


def scan(data: Data, largest_Q: float | None = None, tail: Tail = expit) -> Curves:
    """The curves with Q <= largest_Q, or without it the best one, on a grid that closes in on them."""
    searched = data.box[2:]  # the ends of log B and of log C_mid
    spans = searched
    rounds, size = (12, 31) if largest_Q is None else (4, 61)
    for _ in range(rounds):
        axes = [np.linspace(low, high, size) for low, high in spans]
        log_B, log_C_mid = np.meshgrid(*axes, indexing="ij")
        curves = solve(data, log_B.ravel(), log_C_mid.ravel(), tail)
        least = curves.Q.min()
        keep = curves.Q <= (least if largest_Q is None else max(largest_Q, least))
        # The next grid spans what is kept and three steps around it: the valley of Q is narrow and slanted.
        around = []
        for values, axis in zip(curves[:2], axes, strict=True):
            room = 3 * (axis[1] - axis[0])
            around.append([values[keep].min() - room, values[keep].max() + room])
        spans = np.clip(around, searched[:, :1], searched[:, 1:])
    return Curves(*(values[..., keep] for values in curves))


def search_box(C: Array, R0: float | None, A: float | None) -> Array:
    """The `Data.box` of points at C, with R0 and A fixed where they are given."""
    R0_box = (0.0, 1.0) if R0 is None else (R0, R0)
    A_box = (0.0, A_SLACK) if A is None else (A, A)
    first = C[C > 0][0]
    last = C[-1]
    C_mid_range = [first / 10, last * 30]
    return np.array([R0_box, A_box, np.log(B_RANGE), np.log(C_mid_range)])


def best_curve(C: Array, R: Array, n: Array | None, box: Array) -> tuple[Data, Curves]:
    """The best curve of Eq. 1, and its data with the weights."""
    data = Data(C, R, 1 / variance(R, n), box)
    curve = scan(data)
    if n is None:
        return data, curve
    # Binomial weights need the curve, and the curve needs the weights. Measured rates near 0 or 1 weigh too much.
    for _ in range(2):
        data = data._replace(w=1 / variance(rates_of_first(curve, C), n))
        curve = scan(data)
    return data, curve


def usable(C: ArrayLike, R: ArrayLike, n: ArrayLike | None) -> tuple:
    """Sorted copies of C, R and n (N,) of the points to use; ValueError as `fit` says."""
    C = np.array(C, dtype=float)
    R = np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = np.asarray(inf if n is None else n, dtype=float)
    n = np.broadcast_to(n, C.shape)
    use = np.isfinite(C) & np.isfinite(R) & ~np.isnan(n)
    C = C[use]
    R = R[use]
    n = n[use]
    valid = (C >= 0) & (R >= 0) & (R <= 1) & (n > 0)
    if not valid.all():
        raise ValueError("need compute >= 0, n_samples > 0, pass rates in [0, 1]: divide percents by 100")
    order = np.lexsort((n, R, C))
    C, R, n = C[order], R[order], n[order]
    if C.size > 2 and C[0] > C[-1] / 2:
        raise ValueError(f"compute starts at {C[0]:g} and ends at {C[-1]:g}: subtract what it was before training")
    return C, R, None if np.isinf(n).all() else n


# ------------------------------------------------------------------------------ 2. The noise, and 3. the intervals
def variance(p: ArrayLike, n: ArrayLike | None) -> Array:
    """Variance of a point at dispersion 1: p (1 - p) / n, with one success and one failure added so that it is never 0.
    Without n it is 1, and the dispersion is the variance itself."""
    if n is None:
        return np.ones(np.shape(p))
    smoothed = (np.asarray(p) * n + 1) / (np.asarray(n) + 2)
    q = np.clip(smoothed, 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


def sums_per_C(C: Array, values: Array) -> tuple[Array, Array]:
    """Sum of the values (N,) for each different C, and of how many, (P,) each. Points of equal C have no order, so they
    count as one neighbor."""
    _, first, counts = np.unique(C, return_index=True, return_counts=True)
    return np.add.reduceat(values, first), counts


def dispersion_of(C: Array, z: Array, w: Array, dof: float, n_known: bool) -> float:
    """The variance of a point, in units of `variance`, from standardized residuals z = sqrt(w) (R - R(C)), (N,).

    It is Q / dof, with Q = sum z^2 and `dof` = N less the numbers that were fitted; times (1 + rho) / (1 - rho), as for
    a first-order autoregression, if rho, the correlation of neighbors, is significant."""
    Q = z @ z
    exact = w.mean() * MIN_SD**2
    sums, counts = sums_per_C(C, z)
    y = sums / np.sqrt(counts)  # (P,), each with the variance of one point
    rho = y[1:] @ y[:-1] / max(y @ y, w.sum() * MIN_SD**2)
    rho = min(rho, 0.95)
    significant = rho > 1.645 / math.sqrt(y.size)
    inflation = (1 + rho) / (1 - rho) if significant else 1.0
    if not n_known:
        return float(max(Q / dof * inflation, exact))
    # PRIOR_DOF is part of `dof` here. A dispersion below 1 is not believed where samples are known: on fixed
    # prompts, points agree with each other more than with the law.
    estimate = (Q + PRIOR_DOF) / dof * inflation
    return float(max(estimate, 1.0, exact))


def profile(data: Data, largest_Q: float) -> tuple[Interval, Interval, Interval]:
    """What A, B and C_mid may be: their least and greatest values over all curves of Eq. 1 with Q <= largest_Q."""
    curves = scan(data, largest_Q)
    A_ends = curves.ends(1.0, largest_Q)
    B_ends = extent(curves.log_B, data.box[2])
    C_mid_ends = extent(curves.log_C_mid, data.box[3])
    return A_ends, B_ends, C_mid_ends


def extent(logs: Array, searched: Array) -> Interval:
    """Least and greatest value from logarithms; open at an end of what was searched."""
    low = logs.min()
    high = logs.max()
    is_open_below = low < searched[0] + 0.05
    is_open_above = high > searched[1] - 0.05
    return 0.0 if is_open_below else math.exp(low), inf if is_open_above else math.exp(high)


# ---------------------------------------------------------------------------------------------------- 4. The fit
@dataclass(frozen=True, eq=False, repr=False)
class SigmoidFit:
    """Eq. 1 through the points of a run, in the data's unit of compute. NaN, and intervals that exclude nothing, where
    `reason` says that no curve can be fitted."""

    C: Array  # (N,) the points used, sorted
    R: Array  # (N,)
    n: Array | None  # (N,) samples behind each
    fixed: dict[str, float | None]  # R0 and A, as `fit` got them
    dof: float  # degrees of freedom
    t: float  # Student's 97.5% quantile for them
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
    data: Any = None  # Data, where there is a curve
    curve: Any = None  # Curves: the best one; None if nothing can be fitted

    @property
    def identifiable(self) -> bool:
        """Whether the data can tell the ceiling."""
        return not self.reason

    @property
    def margin(self) -> float:
        """By how much Q may exceed the least one: step 3."""
        return DOUBT * self.dispersion * self.t**2

    def predict(self, C: ArrayLike) -> Array:
        """The fitted curve at compute `C`, any shape; NaN where nothing can be fitted."""
        return rates_of_first(self.curve, C)

    def interval(self, C: Array) -> Array:
        """Low and high end (2, K) of the curve's 95% interval at compute `C` (K,): step 3; NaN as in `predict`."""
        if self.curve is None:
            return np.full((2, len(C)), nan)
        largest_Q = float(self.curve.Q[0]) + self.margin
        curves = scan(self.data, largest_Q)
        s = gained(C, curves.log_B, curves.log_C_mid)  # (K, G)
        ends = [curves.ends(of_all, largest_Q) for of_all in s]
        return np.clip(ends, 0, 1).T


def fit(
    C: ArrayLike,
    R: ArrayLike,
    *,
    R0: float | None = None,
    A: float | None = None,
    n_samples: ArrayLike | None = None,
) -> SigmoidFit:
    """Fit pass rates `R` (N,) at compute `C` (N,). The inputs are not modified; their order does not matter.

    R0, A       fix these. R0 None: it is fitted; a point at C = 0 helps most
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    Points with a NaN are left out. Data that cannot carry a fit give a `reason`. ValueError: shapes that differ;
    compute below 0, or that starts above half of its end; rates that break 0 <= R <= 1 or 0 <= R0 <= A <= 1;
    n_samples <= 0.
    """
    f = best_fit(C, R, n_samples, R0, A)
    if f.curve is None:
        return f
    f, _ = with_noise(f, f.curve)
    f, (low, high) = with_intervals(f)
    return with_ceiling(f, low, high)


def best_fit(C: ArrayLike, R: ArrayLike, n_samples: ArrayLike | None, R0: float | None, A: float | None) -> SigmoidFit:
    """The best curve of Eq. 1, without its noise; or the reason why there is none."""
    if not 0 <= (R0 or 0.0) <= (1.0 if A is None else A) <= 1:
        raise ValueError(f"need 0 <= R0 <= A <= 1, not R0 = {R0}, A = {A}")
    C, R, n = usable(C, R, n_samples)
    # A measured R0 costs one degree of freedom like a fitted one: its point is one of the N.
    fitted = 2 + (R0 is None) + (A is None)
    spare = C.size - fitted
    dof = float(spare) if n is None else spare + PRIOR_DOF
    f = SigmoidFit(C, R, n, {"R0": R0, "A": A}, dof, float(stdtrit(dof, 0.975)))
    needed = 1 if n is None else 0
    places = np.unique(C[C > 0])
    if spare < needed or places.size < 3:
        few = f"too few points: {C.size}, with {places.size} different values of compute above 0; evaluate more often"
        return replace(f, reason=few)
    data, curve = best_curve(C, R, n, search_box(C, R0, A))
    return replace(
        f,
        data=data,
        curve=curve,
        R0=float(curve.R0[0]),
        A=min(float(curve.A[0]), 1.0),
        B=float(np.exp(curve.log_B[0])),
        C_mid=float(np.exp(curve.log_C_mid[0])),
        rmse=math.sqrt(np.mean((R - rates_of_first(curve, C)) ** 2)),
    )


def with_noise(f: SigmoidFit, best: Curves, tail: Tail = expit) -> tuple[SigmoidFit, Array]:
    """The fit with the noise around the `best` curve, of Eq. 1 or another form; and the standardized residuals (N,)."""
    w = f.data.w
    z = np.sqrt(w) * (f.R - rates_of_first(best, f.C, tail))
    return replace(f, dispersion=dispersion_of(f.C, z, w, f.dof, f.n is not None)), z


def with_intervals(f: SigmoidFit) -> tuple[SigmoidFit, Interval]:
    """The fit with the intervals of B and C_mid; and that of A, not yet clipped."""
    A_ends, B_ends, C_mid_ends = profile(f.data, float(f.curve.Q[0]) + f.margin)
    return replace(f, B_interval=B_ends, C_mid_interval=C_mid_ends), A_ends


def with_ceiling(f: SigmoidFit, low: float, high: float) -> SigmoidFit:
    """The fit with ceilings from `low` to `high`; and the reason, if the data cannot tell A."""
    R0, A = f.fixed["R0"], f.fixed["A"]
    A_interval = (max(low, 0.0), min(high, 1.0)) if A is None else (A, A)
    f = replace(f, A_interval=A_interval)
    too_wide = A is None and high - low > min(MAX_WIDTH, (f.A - f.R0) / 2)
    starts_late = R0 is None and A is None and f.C_mid < f.C[0]
    if not (too_wide or starts_late):
        return f
    reached = float(f.predict(f.C[-1]))
    reason = f"ceilings from {A_interval[0]:.2f} to {A_interval[1]:.2f} fit: the data reach {reached:.2f}"
    reason += f" by C = {short(f.C[-1])}, {f.C[-1] / f.C_mid:.1f} C_mid"
    if starts_late:
        reason += f"; the first point is at {f.C[0] / f.C_mid:.1f} C_mid, too late"
    return replace(f, reason=reason)


# ------------------------------------------------------------------------------------------------- 5. Comparison
class Comparison(NamedTuple):
    """`refits` share the ceiling `shared_A`, where ceilings agree."""

    verdict: str
    shared_A: float | None = None
    refits: Sequence[SigmoidFit] = ()


def compare(*fits: SigmoidFit, names: Sequence[str] | None = None, margin: float = 0.02) -> Comparison:
    """The paper's comparison. Ceilings within `margin` (the paper's noise between equal runs) agree: refit all with
    their mean, and compare B and C_mid. Otherwise the higher ceiling wins. No verdict where a ceiling is not
    identifiable. Whether a run falls is not asked here, but by forecast.py, whose fits can be compared as well.
    ValueError: fewer than two fits, or another number of names."""
    if len(fits) < 2:
        raise ValueError("a comparison needs at least two fits")
    if names is None:
        names = [f"run {i + 1}" for i in range(len(fits))]
    unknown = [name for name, f in zip(names, fits, strict=True) if not f.identifiable]
    if unknown:
        return Comparison(f"no verdict: the ceiling of {', '.join(unknown)} is not known yet")

    A = [f.A for f in fits]
    top = [i for i in range(len(fits)) if max(A) - A[i] <= margin + 1e-9]  # the paper's .590 to .610 agree
    if len(top) == 1:
        [best] = top
        difference = A[best] - sorted(A)[-2]
        verdict = f"ceilings differ by {difference:.3f}, more than {margin:g}: {names[best]} is highest"
        if overlaps([f.A_interval for f in fits], best):
            verdict += ", but its interval overlaps that of another"
        return Comparison(verdict)

    lower = [name for i, name in enumerate(names) if i not in top]
    names = [names[i] for i in top]
    shared = float(np.mean([A[i] for i in top]))
    refits = []
    for f in (fits[i] for i in top):
        refits.append(fit(f.C, f.R, n_samples=f.n, R0=f.fixed["R0"], A=shared))
    best = int(np.argmax([f.B for f in refits]))
    efficiency = f"{names[best]} is the most efficient"
    if overlaps([f.B_interval for f in refits], best):
        efficiency = "the intervals of B overlap"
    C_mid = [f.C_mid for f in refits]
    (low, first), *_, (high, last) = sorted(zip(C_mid, names, strict=True))
    note = f" (lower: {', '.join(lower)})" if lower else ""
    verdict = f"ceilings agree within {margin:g}{note}; "
    verdict += f"at the shared A = {shared:.3f} {efficiency}"
    verdict += f", and C_mid goes from {short(low)} ({first}) to {short(high)} ({last})"
    return Comparison(verdict, shared, refits)


def overlaps(intervals: Sequence[Interval], best: int) -> bool:
    """Whether another interval reaches up into that of the best."""
    low = intervals[best][0]
    reaching = [high for _, high in intervals if high >= low]  # counts the best itself
    return len(reaching) > 1


# ------------------------------------------------------------------------------------------------------ 6. A run
def load(source: str | Path | Sequence[Mapping], x: str = "") -> tuple:
    """Read an `eval.jsonl`, its folder, or such records: -> name of x, C (N,), R (N,), n (N,) samples a point, or None
    if a row has none.

    `x` is the column of compute; "": tokens on a CPU run (marked so, or without device-hours), else device_hours. A row
    that stands there twice counts once. ValueError: no row has a column, or a value is not a number."""
    if isinstance(source, (str, Path)):
        source = read_rows(Path(source))
    rows = list({repr(row): row for row in source}.values())
    devices = {row.get("device", "gpu" if row.get("device_hours") else "cpu") for row in rows}
    if not x:
        x = "tokens" if devices == {"cpu"} else "device_hours"
    missing = [name for name in (x, "pass_rate") if not any(name in row for row in rows)]
    if missing:
        raise ValueError(f"none of the {len(rows)} rows has {' or '.join(missing)}; read_logs.py reads other columns")

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
        thousands = min(max(thousands, 0), 6)
    return f"{v / 1000**thousands:.3g}{('', 'k', 'M', 'G', 'T', 'P', 'E')[thousands]}"


def span(pair: Sequence[float], digits: int | None = None) -> str:
    """(0.5, 1e6) -> '[0.5, 1M]'; with `digits` 3 '[0.500, 1000000.000]'."""
    low, high = (short(v) if digits is None else f"{v:.{digits}f}" for v in pair)
    return f"[{low}, {high}]"


# ------------------------------------------------------------------------------------------- 7. Report, picture
def format_fit(f: SigmoidFit, name: str, x: str) -> list[str]:
    """The lines that a person reads, of a fit that has a curve."""
    verdict = "known" if f.identifiable else "not known yet"
    jump = " at its limit: one jump, which noise may make" if f.B > 0.99 * B_RANGE[1] else ""
    lines = [
        f"{name}: {f.C.size} points up to {short(f.C[-1])} {UNITS.get(x, x)}, {f.C[-1] / f.C_mid:.1f} C_mid",
        f"A     ceiling         {f.A:.3f}  {span(f.A_interval, 3)} {verdict}",
    ]
    if f.reason:
        lines.append(f"{'':22}{f.reason}")
    lines += [
        f"B     efficiency      {f.B:.2f}   {span(f.B_interval)}{jump}",
        f"C_mid half the gain   {short(f.C_mid)}   {span(f.C_mid_interval)}",
        f"R0    before RL       {f.R0:.3f}",
    ]
    return lines


def mean_of_seeds(fits: Sequence[SigmoidFit], C: Array) -> tuple[Array, Array, Array]:
    """The mean pass rate of several runs at compute C (K,), and low and high end of its 95% interval, (K,) each: from
    how the runs differ, by Student's t. Between evaluations a pass rate lies on a straight line."""
    rates = np.array([np.interp(C, f.C, f.R) for f in fits])  # (runs, K)
    runs = len(fits)
    mean = rates.mean(axis=0)
    half_width = stdtrit(runs - 1, 0.975) * rates.std(axis=0, ddof=1) / math.sqrt(runs)
    return mean, mean - half_width, mean + half_width


def plot_fits(variants: Mapping[str, Sequence[SigmoidFit]], x: str, path: str | Path) -> Any:
    """Write a PNG that lays all runs over each other on a log axis, so that a crossing is seen; returns its figure.
    A variant of one run has its points, the fit and its interval. One of several seeds has their mean, its interval,
    and thin lines."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlabel=UNITS.get(x, x), ylabel="pass rate")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda v, _: short(v))
    for number, (name, fits) in enumerate(variants.items()):
        color = f"C{number}"
        first = max(f.C[f.C > 0][0] for f in fits)
        last = min(f.C[-1] for f in fits)
        C = np.geomspace(first, last, 200)
        if len(fits) == 1:
            (f,) = fits
            marks = "o"
            label = f"{name}: A {span(f.A_interval, 2)}"
            middle = f.predict(C)
            low, high = f.interval(C)
        else:
            marks = "-"
            label = f"{name}: mean of {len(fits)} seeds"
            middle, low, high = mean_of_seeds(fits, C)
        for f in fits:
            axes.plot(f.C[f.C > 0], f.R[f.C > 0], marks, color=color, ms=3, lw=0.6, alpha=0.4)
        axes.plot(C, middle, color=color, lw=2, label=label, zorder=3)
        axes.fill_between(C, low, high, color=color, alpha=0.2, lw=0)
    axes.legend(fontsize=8, title="band: 95% interval", title_fontsize=8)
    figure.savefig(path, dpi=130)
    return figure


# Errors that a bad file may raise.
ERRORS = (ImportError, OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)
