"""Fit pass rate against compute with a sigmoid, say what more compute will bring, and how sure that is.

PROBLEM. The recipe that wins early in a run may lose later, and there is rarely a budget to compare recipes late.
IDEA. The pass rate on held-out prompts follows a sigmoid in compute, so the early part of a run predicts the rest
(Khatri et al. 2025, ScaleRL, arXiv 2510.13786, Eq. 1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    C      compute, in any unit               R0  pass rate before RL      A  ceiling (asymptotic pass rate)
    C_mid  compute at half of the gain A - R0                              B  efficiency: the exponent, how steep

WHY A SIGMOID. Suppose each problem is learned at a compute of its own, and that the logarithms of these computes follow
a logistic distribution of median log C_mid and scale 1/B. Then the share learned by C is s = 1 / (1 + (C_mid / C)^B).
So Eq. 1 is a distribution function: of how soon problems are learned. The pass rate is R = (1 - s) R0 + s A.

1. THE LAW. `sigmoid`, the equation above.   2. LEAST SQUARES. `plain_fit`, without weights or errors, to learn from.
3. THE CLOSED FORM. For a given share s(C), R = (1 - s) R0 + s A is linear in R0 and A. So for each shape (B, C_mid) the
   best R0 and A, their Q = sum_i w_i (R_i - R(C_i))^2, and the ellipse of all R0 and A that fit almost as well follow
   from six sums (`solve`). Only B and C_mid are searched, on a grid that closes in (`scan`): no start, no luck.
4. THE TAILS. Nothing says that learning times are logistic. Eq. 1 is one of four forms here. Fitted to the same early
   points they look alike, each with a B and C_mid of its own, and they differ in what is still to come. With
   u = B log(C / C_mid), and half of the gain at C_mid in each:

       form           share s            density of log learning time   gain still missing at large C
       Weibull        1 - 2^(-e^u)       Gumbel, mirrored               2^(-(C/C_mid)^B): the last problems come soon
       log-normal     Phi(u / 1.7)       normal                         less than any power of C
       log-logistic   1 / (1 + e^-u)     logistic: Eq. 1                (C_mid/C)^B: some problems come very late
       Frechet        2^(-e^-u)          Gumbel: starts sharply         (C_mid/C)^B log 2; its B fits lower: the latest

5. THE INTERVAL spans two things:
   - every curve of every form that fits almost as well: Q <= least Q + DOUBT * dispersion * t^2. The dispersion is the
     variance of the residuals (`see_noise`), t Student's quantile. DOUBT = 2 is a margin, chosen and not derived, for
     what no form describes.
   - beyond the data, every rate from no further gain to three times the gain that Eq. 1 still expects. For the data
     show how the early problems are learned, not the late ones. In the paper's run, cut at 20k to 50k GPU-hours, 1.9 to
     2.5 times that gain came; in others less did, and any run may just stop.
   So an interval is wide for three reasons: noise, the form, and what remains. Only compute makes the last one small.
6. THE VERDICT. A is identifiable if (a) there are enough points, (b) the pass rate rises beyond its noise and the first
   point lies below C_mid, (c) it does not fall at the end, (d) A's interval, before it is clipped to 1, is at most 0.1
   wide and at most half of the gain. Else `reason` says why not, and `ask_again` guesses from when on.
7. COMPARISON. `compare`: the higher ceiling wins; where ceilings agree, B at the shared ceiling decides.   8. REPORT,
   picture and command line for the `eval.jsonl` of a run. (`tools/` reads the logs of other frameworks.)

CHOICES. (i) A, B and C_mid are always Eq. 1's, to compare with the paper's; the printed forecast is that of the form
that fits best. (ii) No point is left out. The paper leaves out the first 1,500 GPU-hours of its run. Without them, or
without what lies below .6 C_mid, the same fit is sure of a wrong ceiling of that run. (iii) C = 0 measures R0.

>>> C, R = [0, 1, 2, 4, 8, 16, 32, 64], [0.250, 0.275, 0.317, 0.405, 0.505, 0.566, 0.589, 0.597]
>>> [round(v, 2) for v in plain_fit(C, R)]  # R0, A, B, C_mid
[0.25, 0.6, 1.75, 4.57]
>>> f = fit(C, R, n_samples=16_000)
>>> print(f"A {f.A:.3f}, 95% from {f.A_interval[0]:.3f} to {f.A_interval[1]:.3f}")
A 0.601, 95% from 0.588 to 0.612

Then `f.identifiable`, or `f.reason` and `f.ask_again()`; `f.predict(C, f.form)`; `f.interval(C, noise=True)`.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import expit, fdtrc, ndtr, stdtrit

EQ1 = "log-logistic"
FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # step 4: the share at u
    "Weibull": lambda u: -np.expm1(-math.log(2) * np.exp(np.minimum(u, 50))),
    "log-normal": lambda u: ndtr(u / 1.7),  # 1.7: nowhere .01 off the logistic
    EQ1: expit,
    "Frechet": lambda u: np.exp(-math.log(2) * np.exp(np.minimum(-u, 50))),
}
DOUBT, REMAINS, MAX_WIDTH = 2.0, 3.0, 0.1  # steps 5 and 6; 0.1 is five of the paper's margins of 0.02
FLAT, FALL = 0.001, 4.0  # how unlikely a flat line must be; how many standard errors the last points may lie too low
B_RANGE = (0.1, 20.0)  # an interval that touches an end is open
A_SLACK = 1.25  # A is searched up to here and reported up to 1: near the top a run may rise faster than A <= 1 can
MIN_SD = 1e-4  # no evaluation is more exact: residuals below it are rounding, which must not decide anything
PRIOR_DOF = 4.0  # weight of "dispersion = 1" where sample numbers are known: few residuals alone would claim anything
UNITS = {"device_hours": "device-hours", "tokens": "sampled tokens", "flops": "FLOPs", "step": "steps"}
# C, R, w (N,) of Q = sum_i w_i (R_i - R(C_i))^2, and a box (4, 2) of R0, A, log B, log C_mid; equal ends hold R0 or A
Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Interval = tuple[float, float]


# ------------------------------------------------------------------------------------ 1. The law, and 2. least squares
def sigmoid(C: ArrayLike, R0: ArrayLike, A: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> np.ndarray:
    """R(C) of arXiv 2510.13786, Eq. 1, for compute C >= 0. Arguments broadcast. Exactly R0 at C = 0."""
    with np.errstate(divide="ignore"):  # log 0 = -inf gives a share of 0, as it should
        # share of the gain: 1 / (1 + (C_mid / C)^B) = expit(B (log C - log C_mid)), which never overflows
        share = expit(B * (np.log(np.asarray(C, dtype=float)) - np.log(C_mid)))
    return R0 + (np.asarray(A) - R0) * share


def plain_fit(C: ArrayLike, R: ArrayLike) -> tuple[float, float, float, float]:
    """(R0, A, B, C_mid) by least squares, from a single start. How sure that is, is what `fit` says."""
    C, R = np.asarray(C, dtype=float), np.asarray(R, dtype=float)
    start = [R.min(), R.max(), 0.0, math.log(np.median(C[C > 0]))]  # R0, A, log B, log C_mid
    box = [0.0, 0.0, math.log(B_RANGE[0]), -50.0], [1.0, 1.0, math.log(B_RANGE[1]), 99.0]
    x = least_squares(lambda x: sigmoid(C, *x[:2], *np.exp(x[2:])) - R, start, bounds=box, x_scale=[0.1, 0.1, 1, 1]).x
    return float(x[0]), float(x[1]), math.exp(x[2]), math.exp(x[3])


# -------------------------------------------------------------------------------- 3. The closed form, and 4. the tails
class Curves(NamedTuple):
    """G curves of one form, each array (G,): the shape, the best R0 and A for it, and Q, which becomes Q + d' V^-1 d
    where d = (dR0, dA) off the best pair. (Where a bound holds that pair, this is wider than it needs to be.)"""

    log_B: np.ndarray
    log_C_mid: np.ndarray
    R0: np.ndarray
    A: np.ndarray
    Q: np.ndarray
    V: np.ndarray  # (3, G) its elements 00, 01, 11

    def ends(self, s: ArrayLike, limit: float) -> tuple[float, float]:
        """Least and greatest (1 - s) R0 + s A over all curves with Q <= limit; s is (G,), or 0 for R0 and 1 for A."""
        r = 1 - np.asarray(s)
        value = r * self.R0 + s * self.A
        spread = r * r * self.V[0] + 2 * r * s * self.V[1] + s * s * self.V[2]
        reach = np.sqrt(np.maximum(limit - self.Q, 0) * np.maximum(spread, 0))
        return float((value - reach).min()), float((value + reach).max())


def shares(form: str, C: np.ndarray, log_B: ArrayLike, log_C_mid: ArrayLike) -> np.ndarray:
    """Share of the gain (..., N) at compute C (N,) for shapes (...,)."""
    with np.errstate(divide="ignore"):
        return FORMS[form](np.exp(log_B)[..., None] * (np.log(C) - np.asarray(log_C_mid)[..., None]))


def solve(data: Data, form: str, log_B: np.ndarray, log_C_mid: np.ndarray) -> Curves:
    """The best R0 and A for each shape (G,): weighted regression of R on 1 - s and s."""
    C, R, w, (R0_box, A_box, *_) = data
    s = shares(form, C, log_B, log_C_mid)  # (G, N)
    r: np.ndarray = 1 - s
    rr, rs, ss, rR, sR, RR = (r * r) @ w, (r * s) @ w, (s * s) @ w, (r * R) @ w, (s * R) @ w, (R * R) @ w
    # The normal equations [rr rs; rs ss] (R0, A) = (rR, sR). A held value is one measured with infinite weight.
    infinite = 1e9 * w.sum()
    more_r, more_s = (infinite if low == high else 1e-12 * w.sum() for low, high in (R0_box, A_box))
    det = (rr + more_r) * (ss + more_s) - rs * rs
    A = ((rr + more_r) * (sR + more_s * A_box[0]) - rs * (rR + more_r * R0_box[0])) / det
    # On an edge of its box one of the two is fixed, and the other solved again. No curve falls: R0 <= A.
    A = np.clip(A, *A_box)
    R0 = np.clip((rR - rs * A) / np.maximum(rr, more_r), R0_box[0], np.clip(A, *R0_box))
    A = np.clip((sR - rs * R0) / np.maximum(ss, more_s), np.maximum(A_box[0], R0), A_box[1])
    Q = RR - 2 * R0 * rR - 2 * A * sR + R0 * R0 * rr + 2 * R0 * A * rs + A * A * ss
    return Curves(log_B, log_C_mid, R0, A, np.maximum(Q, 0), np.array([ss + more_s, -rs, rr + more_r]) / det)


def scan(data: Data, form: str, limit: float = -math.inf) -> Curves:
    """The curves with Q <= limit, or without a limit the best one, on a grid that closes in on them."""
    whole = ends = data[3][2:]
    for _ in range(12 if limit < 0 else 4):
        axes = [np.linspace(low, high, 31 if limit < 0 else 61) for low, high in ends]
        all_ = solve(data, form, *(x.ravel() for x in np.meshgrid(*axes, indexing="ij")))
        keep = all_.Q <= max(limit, all_.Q.min())
        step = 3 * np.array([[x[0] - x[1], x[1] - x[0]] for x in axes])  # the valley of Q is narrow, and lies across
        ends = np.clip([[v[keep].min(), v[keep].max()] for v in all_[:2]] + step, whole[:, :1], whole[:, 1:])
    return Curves(*(v[..., keep] for v in all_))


# ------------------------------------------------------------------------------------ 5. The interval, 6. the verdict
@dataclass(repr=False)
class SigmoidFit:
    """A fitted curve, in the data's unit of compute. A's interval is over all forms, the other numbers are Eq. 1's."""

    C: np.ndarray  # (N,) the points used, sorted
    R: np.ndarray  # (N,)
    n: np.ndarray | None  # (N,) samples behind each
    options: dict[str, Any]  # R0, A, skip_below, as given to `fit`
    intervals: dict[str, Interval]  # of A, B and C_mid
    reason: str = ""  # why the data cannot tell the ceiling; empty if they can
    dispersion: float = math.nan  # a point has variance dispersion * p (1 - p) / n, or dispersion where n is unknown
    best: dict[str, Curves] = field(default_factory=dict)  # form -> one curve; empty if nothing can be fitted
    allowed: dict[str, Curves] = field(default_factory=dict)  # form -> all curves that are not excluded

    R0 = property(lambda self: float(self.best[EQ1].R0[0]) if self.best else math.nan)
    A = property(lambda self: min(float(self.best[EQ1].A[0]), 1.0) if self.best else math.nan)
    B = property(lambda self: float(np.exp(self.best[EQ1].log_B[0])) if self.best else math.nan)
    C_mid = property(lambda self: float(np.exp(self.best[EQ1].log_C_mid[0])) if self.best else math.nan)
    A_interval, B_interval = property(lambda self: self.intervals["A"]), property(lambda self: self.intervals["B"])
    C_mid_interval, n_points = property(lambda self: self.intervals["C_mid"]), property(lambda self: self.C.size)
    identifiable = property(lambda self: not self.reason)
    rmse = property(lambda self: math.sqrt(np.mean((self.R - self.predict(self.C)) ** 2)))  # unweighted
    form = property(lambda self: min(self.best, key=lambda form: self.best[form].Q[0], default=EQ1))  # that fits best
    prior = property(lambda self: 0.0 if self.n is None else PRIOR_DOF)
    t = property(lambda self: float(stdtrit(self.dof, 0.975)))  # Student's quantile
    limit = property(lambda self: min(float(curve.Q[0]) for curve in self.best.values()) + self.margin)  # of Q
    margin = property(lambda self: DOUBT * self.dispersion * self.t**2)

    @property
    def dof(self) -> float:
        """Degrees of freedom. A measured R0 costs one like a fitted one, because its point is one of the N."""
        return self.C.size - 2 - (self.options["R0"] is None) - (self.options["A"] is None) + self.prior

    @property
    def likelihood(self) -> dict[str, float]:
        """That of each form's best curve, over that of `form`."""
        Q = {form: float(self.best[form].Q[0]) for form in FORMS if self.best}
        return {form: math.exp((min(Q.values()) - Q[form]) / 2 / self.dispersion) for form in Q}

    def __repr__(self) -> str:
        numbers = f"A={self.A:.4g} {self.A_interval}, B={self.B:.4g} {self.B_interval}, C_mid={self.C_mid:.4g}"
        return f"SigmoidFit(R0={self.R0:.4g}, {numbers} {self.C_mid_interval}, {self.reason or 'identifiable'})"

    def predict(self, C: ArrayLike, form: str = EQ1) -> np.ndarray:
        """The fitted curve at compute `C`, any shape: Eq. 1. The printed forecast is `predict(C, self.form)`."""
        if not self.best:
            return np.full(np.shape(C), math.nan)
        log_B, log_C_mid, R0, A = (float(v[0]) for v in self.best[form][:4])
        s = shares(form, np.ravel(np.asarray(C, dtype=float)), log_B, log_C_mid).reshape(np.shape(C))
        return np.minimum((1 - s) * R0 + s * A, 1.0)

    def interval(self, C: ArrayLike, *, noise: bool = False) -> np.ndarray:
        """Low and high pass rate at compute `C` (K,) -> (2, K): of the curve, or with `noise` of an evaluation there
        with as many samples as the fitted points have. The half-widths of curve and noise add in quadrature."""
        C = np.atleast_1d(np.asarray(C, dtype=float))
        if not self.allowed:
            return np.array([np.zeros(C.shape), np.ones(C.shape)])
        limit = self.limit
        found = [
            [curves.ends(shares(form, C[i : i + 1], *curves[:2])[:, 0], limit) for i in range(C.size)]
            for form, curves in self.allowed.items()
        ]  # (F, K, 2)
        reached, beyond = self.predict(self.C[-1]), C > self.C[-1]
        remains = np.where(beyond, REMAINS * (self.predict(C) - reached), -math.inf)
        low, high = np.min(found, 0)[:, 0], np.maximum(np.max(found, 0)[:, 1], reached + remains)
        low, high = np.clip([np.where(beyond, np.minimum(low, reached), low), high], 0, 1)
        if noise:
            p = np.clip(self.predict(C, self.form), low, high)
            sd = np.sqrt(self.dispersion * variance(p, None if self.n is None else np.median(self.n))) * self.t
            low, high = np.maximum(p - np.hypot(p - low, sd), 0), np.minimum(p + np.hypot(high - p, sd), 1)
        return np.array([low, high])

    def ask_again(self) -> float:
        """About the compute from which A would be identifiable, if the run went on along its best form, evaluated as
        often, with half of its noise (so the odds are about even); inf beyond 28 times the compute so far."""
        last, n = float(self.C[-1]) if self.allowed else math.nan, self.n

        def _known(k: int) -> bool:
            later = np.linspace(1, 1.1**k, 2 + min(int(2 * (self.C > last / 2).sum() * (1.1**k - 1)), 200))[1:] * last
            R, size = self.predict(later, self.form), later.size
            R = R + np.resize([0.5, -0.5], size) * np.sqrt(self.dispersion * variance(R, None if n is None else n[-1]))
            C, R = np.append(self.C, later), np.append(self.R, np.clip(R, 0, 1))
            more = None if n is None else np.append(n, np.full(size, n[-1]))
            return fit(C, R, n_samples=more, **self.options).identifiable

        k = bisect_left(range(36), True, key=_known) if self.allowed else 36
        return last * 1.1**k if k < 36 else math.inf


def fit(
    C: ArrayLike,
    R: ArrayLike,
    *,
    R0: float | None = None,
    A: float | None = None,
    skip_below: float = 0.0,
    n_samples: ArrayLike | None = None,
) -> SigmoidFit:
    """Fit pass rates `R` (N,) at compute `C` (N,). The inputs are not modified; their order does not matter.

    R0, A       hold these fixed. R0 None: the point at C = 0 measures it, else it is fitted
    skip_below  leave out points with 0 < C < skip_below
    n_samples   Bernoulli samples behind each point (a number or (N,)), for binomial weights
    Points with a NaN are left out. Data that cannot carry a fit give a `reason`. ValueError: shapes that differ, values
    out of range (compute >= 0, pass rates in [0, 1], 0 <= R0 <= A <= 1).
    """
    if not 0 <= (R0 or 0.0) <= (1.0 if A is None else A) <= 1:
        raise ValueError(f"need 0 <= R0 <= A <= 1, not R0 = {R0}, A = {A}")
    C, R, n = usable(C, R, n_samples, skip_below)
    unknown = {"A": (0.0, 1.0), "B": (0.0, math.inf), "C_mid": (0.0, math.inf)}
    f = SigmoidFit(C, R, n, {"R0": R0, "A": A, "skip_below": skip_below}, unknown)
    if f.dof - f.prior < (n is None) or np.unique(C[C > 0]).size < 3:
        f.reason = f"{C.size} usable points are too few for four unknowns and the noise: evaluate more often"
        return f
    R0_box, A_box = (0.0, 1.0) if R0 is None else (R0, R0), (0.0, A_SLACK) if A is None else (A, A)
    box = np.array([R0_box, A_box, *np.log([B_RANGE, (C[C > 0].min() / 10, C[-1] * 30)])])
    for again in range(1 if n is None else 3):  # binomial weights need the curve, and the curve needs the weights
        data = C, R, 1 / variance(f.predict(C) if again else R, n), box
        f.best[EQ1] = scan(data, EQ1)
    f.best |= {form: scan(data, form) for form in FORMS if form != EQ1}
    f.reason = see_noise(f, data)
    if not f.reason:
        f.reason = see_ceiling(f, data)
    return f


def see_noise(f: SigmoidFit, data: Data) -> str:
    """Sets the dispersion. Returns why no ceiling can be asked for: the run falls, or is flat, and no curve is kept."""
    C, R, w, _ = data
    Q, R0 = float(f.best[f.form].Q[0]), f.options["R0"]
    z = np.sqrt(w) * (R - f.predict(C, f.form))  # (N,) standardized residuals
    # Below 1 a dispersion is not believed where samples are known: a run on a fixed held-out set follows itself more
    # exactly than it follows the law. r, if it is significant, is the correlation of neighbors.
    r, exact = min(z[1:] @ z[:-1] / max(z @ z, w.sum() * MIN_SD**2), 0.95), w.mean() * MIN_SD**2
    alike = (1 + r) / (1 - r) if r > 1.645 / math.sqrt(z.size) else 1.0
    f.dispersion = float(max((z @ z + f.prior) / f.dof * alike, exact if f.n is None else max(1.0, exact)))
    late = z[-max(3, C.size // 5) :]
    noise = math.sqrt(max(float(np.mean(np.diff(z) ** 2)) / 2, exact))  # of differences: they miss a slow misfit
    falls = late.mean() * math.sqrt(late.size) < -FALL * noise
    gained = w @ (R - (w @ R / w.sum() if R0 is None else R0)) ** 2 - Q  # F test against a flat line, simulated
    flat = f.options["A"] is None and fdtrc(2, f.dof, max(gained, 0) / f.dispersion / 2) > FLAT
    if flat:
        f.best = {}
    if falls:
        return f"the last {late.size} points lie below the curve: the run falls, and nothing says how far"
    return f"the pass rate does not rise beyond its noise by C = {short(C[-1])}: no curve to fit" if flat else ""


def see_ceiling(f: SigmoidFit, data: Data) -> str:
    """Sets the allowed curves and the intervals. Returns why A's is too wide to tell the ceiling, if it is."""
    C, limit, held = f.C, f.limit, f.options["A"]
    f.allowed = {form: scan(data, form, limit) for form, curve in f.best.items() if curve.Q[0] <= limit}
    around = scan(data, EQ1, float(f.best[EQ1].Q[0]) + f.margin)  # also where another form excludes it
    for name, logs, (least, most) in zip(("B", "C_mid"), around[:2], data[3][2:], strict=True):
        low = 0.0 if logs.min() < least + 0.05 else math.exp(logs.min())  # at the end of what was searched: none
        f.intervals[name] = low, math.inf if logs.max() > most - 0.05 else math.exp(logs.max())
    reached, expected = float(f.predict(C[-1])), float(f.best[EQ1].A[0])
    tops = np.array([curves.ends(1.0, limit) for curves in f.allowed.values()])
    low, high = float(min(reached, tops.min())), float(max(reached + REMAINS * (expected - reached), tops.max()))
    f.intervals["A"] = (max(low, 0.0), min(high, 1.0)) if held is None else (held, held)
    too_wide = high - low > min(MAX_WIDTH, (f.A - f.R0) / 2) or (f.options["R0"] is None and f.C_mid < C[0])
    if held is not None or not too_wide:
        return ""
    reason = f"ceilings from {low:.2f} to {min(high, 1.0):.2f} fit: the data reach {reached:.2f} by C = "
    late = f", from {C[0] / f.C_mid:.1f} on" * bool(C[0] > f.C_mid)
    return f"{reason}{short(C[-1])}, {C[-1] / f.C_mid:.1f} C_mid{late}"


def usable(C: ArrayLike, R: ArrayLike, n: ArrayLike | None, skip_below: float) -> tuple:
    """Sorted copies of C, R and n (N,) of the points to use; ValueError as `fit` says."""
    C, R = np.array(C, dtype=float), np.array(R, dtype=float)
    if C.ndim != 1 or C.shape != R.shape:
        raise ValueError(f"C and R must be one-dimensional and of one length, not {C.shape} and {R.shape}")
    n = np.broadcast_to(np.asarray(math.inf if n is None else n, dtype=float), C.shape)
    order = np.lexsort((n, R, C))
    use = order[(np.isfinite(C) & np.isfinite(R) & (n == n) & ~((C > 0) & (C < skip_below)))[order]]
    C, R, n = C[use], R[use], n[use]
    if (C < 0).any() or (R < 0).any() or (R > 1).any() or (n <= 0).any():
        raise ValueError("need compute >= 0, n_samples > 0, pass rates in [0, 1]: divide percents by 100")
    if C.size > 2 and C[0] > C[-1] / 2 and not skip_below:
        raise ValueError(f"compute starts at {C[0]:g} and ends at {C[-1]:g}: subtract what it was before training")
    return C, R, None if np.isinf(n).all() else n


def variance(p: ArrayLike, n: ArrayLike | None) -> np.ndarray:
    """Variance of a point at dispersion 1: p (1 - p) / n, with one success and one failure added: it is never 0."""
    if n is None:
        return np.ones(np.shape(p))
    q = np.clip((np.asarray(p) * n + 1) / (np.asarray(n) + 2), 1e-6, 1 - 1e-6)
    return q * (1 - q) / n


# ----------------------------------------------------------------------------------------------------- 7. Comparison
class Comparison(NamedTuple):
    """`refits` share the ceiling `shared_A`, where ceilings agree."""

    verdict: str
    shared_A: float | None = None
    refits: Sequence[SigmoidFit] = ()


def compare(*fits: SigmoidFit, names: Sequence[str] | None = None, margin: float = 0.02) -> Comparison:
    """The paper's comparison. Ceilings within `margin`, the noise between equal runs, agree: refit all with their mean,
    and compare B and C_mid. Else the higher ceiling wins. No verdict where a ceiling is not identifiable."""
    if len(fits) < 2:
        raise ValueError("a comparison needs at least two fits")
    names, A = names or [f"run {i + 1}" for i in range(len(fits))], [f.A for f in fits]
    if unknown := [name for name, f in zip(names, fits, strict=True) if not f.identifiable]:
        return Comparison(f"no verdict: the ceiling of {', '.join(unknown)} is not identifiable")
    high = int(np.argmax(A))
    if max(A) - min(A) > margin + 1e-9:  # the paper's leave-one-out runs, .590 to .610, agree
        but = sum(f.A_interval[1] >= fits[high].A_interval[0] for f in fits) > 1
        verdict = f"ceilings differ by {max(A) - min(A):.3f}, more than {margin:g}: {names[high]} is highest"
        return Comparison(verdict + ", but its interval overlaps that of another" * but)
    shared = float(np.mean(A))
    refits = [fit(f.C, f.R, n_samples=f.n, **(f.options | {"A": shared})) for f in fits]
    high = int(np.argmax([f.B for f in refits]))
    overlap = sum(f.B_interval[1] >= refits[high].B_interval[0] for f in refits) > 1
    said = "the intervals of B overlap" if overlap else f"{names[high]} is the most efficient"
    (low, soon), *_, (high, late) = sorted(zip((f.C_mid for f in refits), names, strict=True))
    said += f", and C_mid goes from {short(low)} ({soon}) to {short(high)} ({late})"
    return Comparison(f"ceilings agree within {margin:g}; at the shared A = {shared:.3f} {said}", shared, refits)


# ----------------------------------------------------------------------------------- 8. Report, picture, command line
class CurveReport(NamedTuple):
    """All evaluations of a run, N of them, and the fit to those before the unseen ones."""

    name: str
    x: str  # what compute is: tokens, device_hours, flops, step
    C: np.ndarray
    R: np.ndarray
    unseen: np.ndarray  # of bool
    fit: SigmoidFit


def load(source: str | Path | Sequence[Mapping], x: str = "") -> tuple:
    """Read an `eval.jsonl`, its folder, or such records: -> name of x, C (N,), R (N,), n_samples (N,) or None.
    `x` is the column of compute; "": tokens on a CPU run (marked so, or without device-hours), else device_hours. A row
    that stands there twice counts once, and a last line that is still being written not at all."""
    if isinstance(source, (str, Path)):
        text = (Path(source, "eval.jsonl") if Path(source).is_dir() else Path(source)).read_text(encoding="utf-8-sig")
        *lines, last = text.split("\n")
        source = [json.loads(v) for v in [*lines, last * (last.count("{") == last.count("}"))] if v.strip()]
    rows = list({repr(row): row for row in source}.values())
    devices = {row.get("device", "gpu" if row.get("device_hours") else "cpu") for row in rows}
    x = x or ("tokens" if devices == {"cpu"} else "device_hours")
    if missing := [name for name in (x, "pass_rate") if not any(name in row for row in rows)]:
        raise ValueError(f"none of the {len(rows)} rows has {' or '.join(missing)}; tools/ reads other columns")
    names = (x, "pass_rate", "n_prompts", "n_samples")
    table = [[math.nan if row.get(name) is None else float(row[name]) for row in rows] for name in names]
    C, R, prompts, samples = np.array(table)
    C[[row.get("step") == 0 for row in rows]] = 0.0  # the clock has run, but nothing has been trained
    return x, C, R, None if np.isnan(prompts * samples).any() else prompts * samples


def curve(source: str | Path | Sequence[Mapping], fit_until: float = 1.0, name: str = "", x: str = "") -> CurveReport:
    """`load` a run and fit the points up to the share `fit_until` of its compute."""
    if not 0 < fit_until <= 1:
        raise ValueError(f"--fit-until is a share of the compute in (0, 1], not {fit_until:g}")
    x, C, R, n = load(source, x)
    C = np.where(np.isfinite(C) & np.isfinite(R), C, math.nan)
    unseen = C > fit_until * np.nanmax(C, initial=0.0) * (1 + 1e-12)
    f = fit(C[~unseen], R[~unseen], n_samples=None if n is None else n[~unseen])
    name = name or (str(source).removesuffix("/eval.jsonl") if isinstance(source, (str, Path)) else "run")
    return CurveReport(name, x, C, R, unseen, f)


def short(v: Any) -> str:
    """1234567 -> '1.23M'."""
    k = min(max(int((math.log10(abs(v)) + 2e-4) // 3), 0), 3) if v and math.isfinite(v) else 0
    return f"{v / 1000**k:.3g}{('', 'k', 'M', 'G')[k]}"


def span(pair: Sequence[float], digits: int | None = None) -> str:
    """(0.5, 1e6) -> '[0.5, 1M]'; with `digits` 3 '[0.500, 1000000.000]'."""
    return "[" + ", ".join(short(v) if digits is None else f"{v:.{digits}f}" for v in pair) + "]"


def format_report(r: CurveReport, *predict_at: float) -> str:
    """The table that a person reads."""
    f, end, unseen = r.fit, float(np.nanmax(r.C, initial=0.0)), int(r.unseen.sum())
    if not f.best:
        return f"{r.name}: no fit: {f.reason}"
    lines = [
        f"{r.name}: {f.n_points} points up to {short(f.C[-1])} {UNITS.get(r.x, r.x)}, {f.C[-1] / f.C_mid:.1f} C_mid",
        f"A     ceiling         {f.A:.3f}  {span(f.A_interval, 3)} {'not ' * bool(f.reason)}identifiable",
        f"B     efficiency      {f.B:.2f}   {span(f.B_interval)}",
        f"C_mid half the gain   {short(f.C_mid)}   {span(f.C_mid_interval)}",
        f"R0    before RL       {f.R0:.3f}",
        f"tail                  {f.form}; " + ", ".join(f"{form} {p:.2g}" for form, p in f.likelihood.items() if p < 1),
    ]
    if f.reason:
        again = f.ask_again()
        lines.insert(2, f"{'':22}{f.reason}" + f"; ask again at {short(again)}" * (again < math.inf))
    for at in (*[end] * (unseen > 0), *predict_at):
        low, high = ends = f.interval(at, noise=True)[:, 0].tolist()
        line = f"at {short(at):<18} {float(f.predict(at, f.form)):.3f}  {span(f.interval(at)[:, 0].tolist(), 3)}, "
        measured = [f"; measured {R:.3f}, {'inside' if low <= R <= high else 'OUTSIDE'}" for R in r.R[at == r.C]]
        lines.append(f"{line}an evaluation {span(ends, 3)}{''.join(measured)}")
    if unseen:
        (low, high), R = f.interval(r.C[r.unseen], noise=True), r.R[r.unseen]
        lines.append(f"unseen                {((low <= R) & (R <= high)).sum()} of {unseen} evaluations inside")
    return "\n".join(lines)


def plot_curves(rows: Sequence[Sequence[CurveReport]], path: str | Path) -> None:
    """Write a PNG, a panel for each run: points, the best form, the band of evaluations, A's interval, the verdict."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(max(2.6 * len(rows[0]) + 1, 6), 2.6 * len(rows) + 1), layout="constrained")
    figure.subplots(len(rows), len(rows[0]), squeeze=False, sharey=True)
    shown = {r.name: Path(r.name).name.removesuffix(".jsonl").replace("_", " ") for row in rows for r in row}
    if len(set(shown.values())) < len(shown):  # a/seed-0 and b/seed-0
        shown = {name: name for name in shown}
    bottom = max(0.0, min(float(np.nanmin(r.R, initial=1.0)) for row in rows for r in row) - 0.1)
    for axes, r in zip(figure.axes, (r for row in rows for r in row), strict=True):
        f, end = r.fit, float(np.nanmax(r.C, initial=0.0))
        title = f"{shown[r.name]}, {f.C.size} of {r.C.size} points"
        axes.plot(r.C[~r.unseen], r.R[~r.unseen], "o", color="C0", ms=4, label="fitted")
        axes.plot(r.C[r.unseen], r.R[r.unseen], "o", color="C0", mfc="white", ms=4, label="came later")
        if f.best:
            grid, title = np.linspace(0, end, 200), f"{shown[r.name]}, {f.C[-1] / end:.0%} of the compute"
            seen = grid <= f.C[-1]  # beyond it many curves fit: the forecast is the band
            axes.plot(grid[seen], f.predict(grid[seen], f.form), color="black", lw=1)
            axes.fill_between(grid, *f.interval(grid, noise=True), color="C0", alpha=0.2, lw=0, label="forecast, 95%")
            axes.plot([1.04 * end] * 2, f.A_interval, "_-", color="C1", label="ceiling A")
            title += "\nceiling {:.2f} to {:.2f}".format(*f.A_interval)
        axes.set_title(title + ", not known yet" * bool(f.reason), fontsize=9)
        axes.set(ylim=(bottom, 1.02), xlabel=UNITS.get(r.x, r.x), ylabel="pass rate")
        axes.xaxis.set_major_formatter(lambda v, _: short(v))
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


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
    file = "--predict-at"
    try:
        if not all(0 <= C < math.inf for C in args.predict_at):
            raise ValueError(f"need compute >= 0, not {args.predict_at}")
        rows = [[curve(file := name, share, x=args.x) for share in args.fit_until] for name in args.files]
        for file, (*_, r) in zip(args.files, rows, strict=True):  # noqa: B007
            if not r.fit.best or r.x != rows[0][0].x:
                other = f"compute is {r.x}, but {rows[0][0].x} in {args.files[0]}"
                raise ValueError(other if r.x != rows[0][0].x else r.fit.reason)
        print("\n\n".join(format_report(r, *args.predict_at) for row in rows for r in row))
        if len(rows) > 1:
            print("\n" + compare(*(row[-1].fit for row in rows), names=[row[-1].name for row in rows]).verdict)
        if args.plot:
            plot_curves(rows, file := args.plot)
    except (ImportError, OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        print(f"fit_sigmoid.py: {file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
