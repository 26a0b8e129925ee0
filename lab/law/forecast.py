"""Forecast the pass rate at more compute from the early part of a run, and say how sure that is.

PROBLEM. `curves.py`, like `fit_sigmoid.py`, takes Eq. 1 for the truth. Other curves fit as well and end elsewhere.
IDEA. Fit several forms, keep every curve that is not excluded, and let the forecast be a band that holds them all.

1. THE TAILS. Each problem is learned at a compute of its own. Nothing says that their logarithms are logistic. So
   Eq. 1 is one of four forms here. Fitted to the same early points they look alike, each with its own B and C_mid, but
   they differ in what is still to come. With u = B log(C / C_mid), and half of the gain at C_mid in each form:

       form           share s            density of log learning time   gain still missing at large C
       Weibull        1 - 2^(-e^u)       Gumbel, mirrored               2^(-(C/C_mid)^B): the last problems come soon
       log-normal     Phi(u / 1.7)       normal                         falls faster than any power of C
       log-logistic   1 / (1 + e^-u)     logistic: Eq. 1                (C_mid/C)^B: some problems come very late
       Frechet        2^(-e^-u)          Gumbel: starts sharply         (C_mid/C)^B log 2, with a lower B: the latest

2. THE BAND (`Forecast.interval`) spans three things:
   - every curve of every form that fits almost as well as the best one (step 3 of curves.py);
   - beyond the data, every rate from no further gain to three times the gain that Eq. 1 expects from there to C. The
     data show how the early problems are learned, not the late ones. In the paper's run, cut at 20k to 50k GPU-hours,
     1.9 to 2.5 times as much came; in other runs less came, and any run may simply stop improving;
   - the line in log C through the last half of the points, up to 3 times their compute (`on_the_line`); it lifts only
     the top. Many real runs jump when the model learns the format, and then rise slowly. A sigmoid takes the jump for
     the whole gain; the line does not.
   So a band is wide for noise, form (both in the first) and what remains (the other two). Only more compute makes what
   remains small.
3. THE VERDICT is that of curves.py, but A's interval is the band at infinite compute. There is no band if there
   are too few points, or the run collapsed, falls, or does not rise beyond its noise. `reason` says so, as it does when
   a fixed R0 or A contradicts the data.
4. ASK AGAIN. `ask_again` estimates the compute from which A will be identifiable.
5. REPORT, picture and command line: python lab/law/forecast.py runs/a --fit-until 0.5 --plot curve.png
   `python lab/law/forecast.py runs/a runs/b --plot both.png` forecasts each run and compares them.

THE NUMBER. The forecast is the band, meant to hold 95 % of evaluations; how often it did: lab/results/public.md. Who
needs one number takes `number`: halfway between Eq. 1 and the level of the last third of the run. It was chosen on some
public curves. On others, where it was tried once, it is off by .0117 [.0049, .0211] less than "it stays", the mean of
the last two evaluations; on validation curves at a quarter it is off by half as much.

CHOICE. A, B and C_mid are always those of Eq. 1, so that they compare with the paper's. The noise is that around the
form that fits best.

>>> C, R = [0, 1, 2, 4, 8, 16, 32, 64], [0.250, 0.275, 0.317, 0.405, 0.505, 0.566, 0.589, 0.597]
>>> f = forecast(C, R, n_samples=16_000)
>>> print(f"A {f.fit.A:.3f}, 95% from {f.A_interval[0]:.3f} to {f.A_interval[1]:.3f}")
A 0.601, 95% from 0.588 to 0.656

Ask `f.identifiable`, `f.reason`, `f.ask_again()`, `f.predict(C, f.form)`, `f.interval(C, noise=True)`.

Symbols: N points, G curves (shapes), F forms, K computes that are asked for; s the part of the gain made.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from curves import (
    ERRORS,
    MIN_SD,
    UNITS,
    Array,
    Curves,
    Interval,
    SigmoidFit,
    Tail,
    best_fit,
    compare,
    format_fit,
    gained,
    load,
    rates_of_first,
    scan,
    short,
    span,
    sums_per_C,
    variance,
    with_ceiling,
    with_intervals,
    with_noise,
)
from curves import fit as fit_eq1
from numpy.typing import ArrayLike
from scipy.special import expit, fdtrc, ndtr

REMAINS = 3.0  # step 2: how many times the gain that Eq. 1 expects may still come
AHEAD = 3.0  # step 2: the line goes level at so many times the run's compute; by hand
FLAT = 0.001  # step 3: below this p-value a run rises
FALL = 4.0  # step 3: so many standard errors too low is a fall; by hand
SAME = 0.01  # THE NUMBER: a forecast this near to "it stays" says no more; by hand
KNOWN = {"graded": 0.8}  # ceilings that are known by construction: tasks/arithmetic.py
MOST = 100  # points of a run that `ask_again` keeps; of more it makes half as many means

# ---------------------------------------------------------------------------------------------------- 1. The tails
EQ1 = "log-logistic"
FORMS: dict[str, Tail] = {  # the part of the gain made at u
    "Weibull": lambda u: -np.expm1(-math.log(2) * np.exp(np.minimum(u, 50))),
    "log-normal": lambda u: ndtr(u / 1.7),  # 1.7: nowhere .01 off the logistic
    EQ1: expit,
    "Frechet": lambda u: np.exp(-math.log(2) * np.exp(np.minimum(-u, 50))),
}


def forecast(
    C: ArrayLike,
    R: ArrayLike,
    *,
    R0: float | None = None,
    A: float | None = None,
    n_samples: ArrayLike | None = None,
) -> "Forecast":
    """Forecast from pass rates `R` (N,) at compute `C` (N,). Arguments and errors are those of `curves.fit`."""
    fit = best_fit(C, R, n_samples, R0, A)
    if fit.curve is None:
        return Forecast(fit)
    f, z = fit_every_form(fit)
    reason = collapses(f.fit) or falls(f.fit, z)
    if is_flat(f):
        return Forecast(without_numbers(f.fit, reason or as_it_is(f.fit)))
    if reason:
        return replace(f, fit=replace(f.fit, reason=reason))
    f = replace(f, allowed=allowed_curves(f))
    return replace(f, fit=verdict(f))


@dataclass(frozen=True, eq=False)
class Forecast:
    """Eq. 1's fit, and all curves of all forms that fit almost as well as the best one."""

    fit: SigmoidFit  # Eq. 1's numbers; the noise, A's interval and the reason are those of all forms
    best: Mapping[str, Curves] = field(default_factory=dict)  # form -> one curve; empty if nothing can be fitted
    form: str = EQ1  # that fits best
    likelihood: Mapping[str, float] = field(default_factory=dict)  # of each form's best curve, over that of `form`
    largest_Q: float = nan  # that is not excluded: the least Q of all forms, plus the fit's margin
    allowed: Mapping[str, Curves] = field(default_factory=dict)  # form -> all curves that are not excluded

    @property
    def A_interval(self) -> Interval:
        """Over all forms, and of what remains."""
        return self.fit.A_interval

    @property
    def reason(self) -> str:
        """Why the data cannot tell the ceiling; empty if they can."""
        return self.fit.reason

    @property
    def identifiable(self) -> bool:
        """Whether the data can tell the ceiling."""
        return self.fit.identifiable

    def predict(self, C: ArrayLike, form: str = EQ1) -> Array:
        """The fitted curve at compute `C`, any shape: Eq. 1, or another form, such as the best one, `self.form`."""
        return rates_of_first(self.best.get(form), C, FORMS[form])

    @property
    def stays(self) -> float:
        """The forecast that nothing changes: the mean of the last two evaluations."""
        return float(self.fit.R[-2:].mean())

    def number(self, C: float) -> float:
        """One number for compute `C`: halfway between Eq. 1 and the level of the last third of the points."""
        last_third = self.fit.R[-max(1, self.fit.R.size // 3) :]
        return (float(self.predict(C)) + float(last_third.mean())) / 2

    def numbers(self, C: float) -> str:
        """The number for compute `C`, and beside it Eq. 1's and that nothing changes."""
        number = self.number(C)
        text = f"{number:.3f}; by Eq. 1 {float(self.predict(C)):.3f}, if nothing changes {self.stays:.3f}"
        if abs(number - self.stays) < SAME:
            text += " (the guess says no more than that nothing changes)"
        return text

    def interval(self, C: ArrayLike, *, noise: bool = False) -> Array:
        """Low and high pass rate at compute `C` (K,) -> (2, K): of the curve, or with `noise` of an evaluation there
        with the median number of samples of the fitted points. Half-widths of curve and noise are added as squares."""
        C = np.atleast_1d(np.asarray(C, dtype=float))
        if not self.allowed:
            return np.array([np.zeros(C.shape), np.ones(C.shape)])
        low, high = np.clip(band(self, C), 0, 1)
        if noise:
            fit = self.fit
            n = None if fit.n is None else np.median(fit.n)
            p = np.clip(self.predict(C, self.form), low, high)
            half_width = np.sqrt(fit.dispersion * variance(p, n)) * fit.t
            low = np.maximum(p - np.hypot(p - low, half_width), 0)
            high = np.maximum(p + np.hypot(high - p, half_width), on_the_line(fit, C) + half_width)
            high = np.minimum(high, 1)
        return np.array([low, high])

    def ask_again(self) -> float:
        """About the compute from which A would be identifiable, if the run went on along its best form, evaluated as
        often, with half of its noise, so about half of such runs will need more; inf beyond 28 times the compute so
        far. Of more than MOST points neighbors are averaged, for speed."""
        if not self.allowed:
            return inf
        if self.identifiable:
            return float(self.fit.C[-1])
        now = averaged(self)
        powers = range(1, 36)  # of 1.1, and 1.1^35 = 28
        k = 1 + bisect_left(powers, True, key=lambda k: continued(now, 1.1**k).identifiable)
        return float(self.fit.C[-1]) * 1.1**k if k in powers else inf


# ------------------------------------------------------------------------------- 1. The tails, fitted; 2. the band
def fit_every_form(fit: SigmoidFit) -> tuple[Forecast, Array]:
    """The best curve of each form, beside the fit of Eq. 1, with the noise around the best of all; and the standardized
    residuals (N,) from that one."""
    best = {EQ1: fit.curve}  # the first: it is taken where others fit as well
    for form, tail in FORMS.items():
        if form != EQ1:
            best[form] = scan(fit.data, tail=tail)
    Q = {form: float(curve.Q[0]) for form, curve in best.items()}
    form = min(Q, key=Q.__getitem__)
    fit, z = with_noise(fit, best[form], FORMS[form])
    # The likelihood of a curve is exp(-Q / (2 dispersion)), up to a constant.
    likelihood = {name: math.exp((Q[form] - Q[name]) / 2 / fit.dispersion) for name in FORMS}
    return Forecast(fit, best, form, likelihood, Q[form] + fit.margin), z


def allowed_curves(f: Forecast) -> dict[str, Curves]:
    """All curves that are not excluded, of each form that has one."""
    allowed = {}
    for form, curve in f.best.items():
        if curve.Q[0] <= f.largest_Q:
            allowed[form] = scan(f.fit.data, f.largest_Q, FORMS[form])
    return allowed


def band(f: Forecast, C: Array) -> tuple[Array, Array]:
    """Low and high (K,) at compute C (K,), not yet clipped to [0, 1]. At C = inf they are those of the ceiling A."""
    # All allowed curves of all forms.
    low = np.full(C.shape, inf)
    high = -low
    for form, curves in f.allowed.items():
        for k, compute in enumerate(C):
            s = gained(compute[None], curves.log_B, curves.log_C_mid, FORMS[form])  # (1, G)
            least, most = curves.ends(s[0], f.largest_Q)
            low[k] = min(low[k], least)
            high[k] = max(high[k], most)

    # Beyond the data, what remains: from the rate that was reached, R, to R + REMAINS (R(C) - R) of Eq. 1.
    last = f.fit.C[-1]
    reached = f.predict(last)
    eq1 = f.best[EQ1]
    s = gained(C, eq1.log_B[0], eq1.log_C_mid[0])
    furthest = reached + REMAINS * ((1 - s) * eq1.R0[0] + s * eq1.A[0] - reached)
    beyond = last < C
    low = np.where(beyond, np.minimum(low, reached), low)
    high = np.where(beyond, np.maximum(high, furthest), high)

    # And the line.
    return low, np.maximum(high, on_the_line(f.fit, C))


def on_the_line(fit: SigmoidFit, C: Array) -> Array:
    """Rates (K,) beyond the data on the line in log C through the last half of the points, which does not sink and goes
    level at AHEAD times their compute. Within the data there is no line: 0, which lifts nothing."""
    in_last_half = (fit.C > 0) & (fit.C >= fit.C[fit.C.size // 2])
    x = np.log(fit.C[in_last_half])
    y = fit.R[in_last_half]
    x0 = x.mean()
    dx = x - x0
    slope = max(dx @ y / max(dx @ dx, 1e-12), 0)
    last = fit.C[-1]
    ahead = np.log(np.clip(C, last, AHEAD * last))
    line = y.mean() + slope * (ahead - x0)
    return np.where(last < C, line, 0)


# ------------------------------------------------------------------------------------------------ 3. The verdict
def verdict(f: Forecast) -> SigmoidFit:
    """The fit with all intervals, A's being the band at infinite compute; and with the reason why that is too wide, if
    it is."""
    low, high = band(f, np.array([inf]))
    fit, _ = with_intervals(f.fit)  # also where another form excludes Eq. 1
    fit = with_ceiling(fit, float(low[0]), float(high[0]))
    if contradicts(f):
        fit = replace(fit, reason="the R0 or A that was fixed contradicts the data: no curve with it fits them")
    return fit


def without_numbers(fit: SigmoidFit, reason: str) -> SigmoidFit:
    """The fit of a run that does not rise: no curve, and the reason."""
    return replace(fit, reason=reason, curve=None, R0=nan, A=nan, B=nan, C_mid=nan, rmse=nan)


def collapses(fit: SigmoidFit) -> str:
    """Why a run is said to have collapsed: its last fifth (at least 3 points) lies FALL standard errors below the best
    stretch of as many points, and below half of it. Empty if it does not."""
    sums, counts = sums_per_C(fit.C, fit.R)
    R = sums / counts  # (P,) one rate for each different compute
    size = max(3, R.size // 5)
    if R.size < 2 * size:
        return ""
    stretches = np.convolve(R, np.full(size, 1 / size), mode="valid")
    peak = stretches.max()
    end = stretches[-1]
    noise = math.sqrt(np.mean(np.diff(R) ** 2) / 2)
    error = noise * math.sqrt(2 / size)  # of a difference of two means
    if peak - end <= max(peak / 2, FALL * error):
        return ""
    return f"the run collapsed, from {peak:.2f} in its best stretch to {end:.2f} now: nothing says where it ends"


def falls(fit: SigmoidFit, z: Array) -> str:
    """Why a run with standardized residuals z (N,) is said to fall: its last fifth (at least 3 points) lies FALL
    standard errors below the curve. Empty if it does not."""
    sums, counts = sums_per_C(fit.C, z)
    y = sums / np.sqrt(counts)  # (P,), each with the variance of one point
    size = max(3, y.size // 5)
    late = y[-size:]
    # The noise of differences between neighbors, which do not see a slow misfit.
    noise_variance = np.mean(np.diff(y) ** 2) / 2
    noise = math.sqrt(max(noise_variance, fit.data.w.mean() * MIN_SD**2))
    if late.mean() * math.sqrt(late.size) >= -FALL * noise:
        return ""
    return f"the last {counts[-size:].sum()} points lie below the curve: the run falls, and nothing says where it ends"


def is_flat(f: Forecast) -> bool:
    """Whether a flat line could have made the least Q: an F test, and where the samples say the noise a chi-square. A
    sigmoid has three numbers more, but 2 degrees of freedom are what simulations gave."""
    fit = f.fit
    if fit.fixed["A"] is not None:
        return False
    w = fit.data.w
    flat = fit.fixed["R0"]
    if flat is None:
        flat = w @ fit.R / w.sum()
    drop = w @ (fit.R - flat) ** 2 - f.best[f.form].Q[0]
    F = max(drop, 0) / fit.dispersion / 2
    p = fdtrc(2, fit.dof, F) if fit.n is None else math.exp(-F)
    return p > FLAT


def as_it_goes(fit: SigmoidFit) -> tuple[float, float, float]:
    """Of a run that does not rise its level, the mean of the last half, and low and high end of where evaluations lie
    if it goes on so: -+ 3.5 standard deviations of all points (from public runs: lab/law/fit.md). The ends are NaN
    where the points are all alike."""
    level = float(fit.R[fit.C.size // 2 :].mean())
    sd = float(fit.R.std(ddof=1))
    reach = 3.5 * sd if sd > MIN_SD else nan
    return level, *np.clip([level - reach, level + reach], 0, 1).tolist()


def as_it_is(fit: SigmoidFit) -> str:
    """What can be said of a run that does not rise. The counts are from public runs."""
    level, *ends = as_it_goes(fit)
    goes_on = f"if it goes on as it is, an evaluation lies in {span(ends, 3)} (about 94 %)"
    if math.isnan(ends[0]):
        goes_on = "its points are all alike, so nothing says how far an evaluation may lie from it"
    return (
        f"the pass rate does not rise beyond its noise by C = {short(fit.C[-1])}: no curve to fit. "
        f"Its level is {level:.3f}; {goes_on}. "
        "Of 369 flat beginnings of public runs 116 rose by more than .05 later, 58 fell and 195 stayed"
    )


def contradicts(f: Forecast) -> bool:
    """Whether the best curve with R0 or A fixed lies outside of those that would be allowed if both were free."""
    own = f.fit
    if own.fixed["R0"] is None and own.fixed["A"] is None:
        return False
    free = fit_eq1(own.C, own.R, n_samples=own.n)
    if free.curve is None:
        return False
    Q = free.data.w @ (own.R - f.predict(own.C, f.form)) ** 2
    return Q > free.curve.Q[0] + free.margin


# ------------------------------------------------------------------------------------------------- 4. Ask again
def averaged(f: Forecast) -> Forecast:
    """The forecast from at most MOST points, or from half as many means of neighbors; the first point stays."""
    now = f.fit
    if now.C.size <= MOST:
        return f
    size = math.ceil(2 * now.C.size / MOST)
    starts = np.append(0, np.arange(1, now.C.size, size))
    counts = np.diff(np.append(starts, now.C.size))
    C = np.add.reduceat(now.C, starts) / counts
    R = np.add.reduceat(now.R, starts) / counts
    n = None if now.n is None else np.add.reduceat(now.n, starts)
    C[-1] = now.C[-1]  # the run ends where it ended
    means = forecast(C, R, n_samples=n, **now.fixed)
    return means if means.allowed else f


def continued(f: Forecast, factor: float) -> Forecast:
    """The forecast that the run would have after `factor` times its compute, as `ask_again` says."""
    now = f.fit
    last = float(now.C[-1])
    in_last_half = int((now.C > last / 2).sum())
    size = 1 + min(int(2 * in_last_half * (factor - 1)), 200)
    C = np.linspace(1, factor, 1 + size)[1:] * last
    n = None if now.n is None else np.full(size, now.n[-1])
    R = f.predict(C, f.form)
    sd = np.sqrt(now.dispersion * variance(R, n))
    R = R + np.resize([0.5, -0.5], size) * sd
    C = np.append(now.C, C)
    R = np.append(now.R, np.clip(R, 0, 1))
    n_samples = None if n is None else np.append(now.n, n)
    return forecast(C, R, n_samples=n_samples, **now.fixed)


# ----------------------------------------------------------------------------- 5. Report, picture, command line
class CurveReport(NamedTuple):
    """All evaluations of a run, N of them, and the forecast from those before the unseen ones."""

    name: str
    x: str  # what compute is: tokens, device_hours, flops, step
    C: Array
    R: Array
    unseen: Array  # of bool
    forecast: Forecast
    known: float | None = None  # the ceiling, where the task has one by construction
    fit_until: float = 1.0  # the share of the compute that was asked for

    @property
    def end(self) -> float:
        """The compute of the last evaluation."""
        return float(np.nanmax(self.C, initial=0.0))


def curve(
    source: str | Path | Sequence[Mapping], fit_until: float = 1.0, name: str = "run", x: str = ""
) -> CurveReport:
    """`load` a run and fit the points up to the share `fit_until` of its compute."""
    if not 0 < fit_until <= 1:
        raise ValueError(f"--fit-until is a share of the compute in (0, 1], not {fit_until:g}")
    x, C, R, n = load(source, x)
    C = np.where(np.isfinite(C) & np.isfinite(R), C, nan)
    until = fit_until * np.nanmax(C, initial=0.0)
    unseen = C > until * (1 + 1e-12)
    seen = ~unseen
    f = forecast(C[seen], R[seen], n_samples=None if n is None else n[seen])
    return CurveReport(name, x, C, R, unseen, f, known_ceiling(source), fit_until)


def known_ceiling(source: str | Path | Sequence[Mapping]) -> float | None:
    """The ceiling of the task that a run was trained on; None where it is not known, or the source is no run's."""
    if not isinstance(source, (str, Path)):
        return None
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    config = folder / "config.json"
    return KNOWN.get(json.loads(config.read_text()).get("dataset", "")) if config.is_file() else None


def format_report(r: CurveReport, *predict_at: float) -> str:
    """The table that a person reads. Without a band that is the verdict, and Eq. 1's numbers if there are any."""
    f = r.forecast
    fit = f.fit
    if not f.allowed:
        verdict = f"{r.name}: no forecast: {f.reason}"
        if f.best:
            verdict += (
                f"\nEq. 1 alone           A {fit.A:.3f}, B {fit.B:.2f}, C_mid {short(fit.C_mid)}, R0 {fit.R0:.3f}"
            )
        return verdict
    again = f.ask_again() if f.reason else inf
    if math.isfinite(again):
        fit = replace(fit, reason=f"{f.reason}; ask again at {short(again)}")
    seen = f", forecast from its first {100 * r.fit_until:.3g}%" if r.unseen.any() else ""
    lines = format_fit(fit, r.name + seen, r.x)
    asked = predict_at or (() if r.unseen.any() else (2 * r.end,))
    places = (r.end, *asked) if r.unseen.any() else asked
    lines[1:1] = [f"{f'best guess at {short(at)}':<22}{f.numbers(at)}" for at in places]
    others = ", ".join(f"{form} {p:.2g}" for form, p in f.likelihood.items() if p < 1)
    lines.append(f"shape of the rise     {f.form}; how well others fit beside it (1: as well): {others}")
    if r.unseen.any():
        lines += what_came(r)
    if r.known is not None:
        low, high = f.A_interval
        holds = "holds" if low <= r.known <= high else "MISSES"
        lines.append(f"the ceiling           {low:.3f} to {high:.3f} {holds} the known {r.known:.2f}")
    for at in asked:
        curve_ends = f.interval(at)[:, 0].tolist()
        ends = f.interval(at, noise=True)[:, 0].tolist()
        lines.append(f"at {short(at):<18} an evaluation {span(ends, 3)}, the curve {span(curve_ends, 3)}")
    return "\n".join(lines)


def what_came(r: CurveReport) -> list[str]:
    """The forecast of a run's end, beside what was measured there and on the way."""
    f = r.forecast
    low, high = f.interval(r.C, noise=True)  # (N,)
    inside = (low <= r.R) & (r.R <= high)
    later = r.unseen & np.isfinite(r.R)
    end = np.flatnonzero(r.C == r.end)[-1]
    verdict = "inside" if inside[end] else "OUTSIDE"
    return [
        f"the end, forecast     {low[end]:.3f} to {high[end]:.3f} in 95 % of cases; the curve "
        + span(f.interval(r.end)[:, 0].tolist(), 3),
        f"the end, measured     {r.R[end]:.3f}, {verdict}; of {later.sum()} evaluations {inside[later].sum()} inside",
    ]


def plot_curves(rows: Sequence[Sequence[CurveReport]], path: str | Path) -> None:
    """Write a PNG, a panel for each run: points, the best form, the band of evaluations, A's interval, the verdict."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    reports = [r for row in rows for r in row]
    columns = len(rows[0])
    lowest = min(float(np.nanmin(r.R, initial=1.0)) for r in reports)
    highest = max(float(np.nanmax(r.R, initial=r.forecast.A_interval[1])) for r in reports)
    limits = max(0.0, lowest - 0.1), min(highest + 0.1, 1.02)
    width = max(2.6 * columns + 1, 5.2)
    height = 2.6 * len(rows) + 1
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.subplots(len(rows), columns, squeeze=False, sharey=True)
    for axes, r in zip(figure.axes, reports, strict=True):
        plot_one(axes, r)
        axes.set(ylim=limits, xlabel=UNITS.get(r.x, r.x), ylabel="pass rate")
        axes.xaxis.set_major_formatter(lambda v, _: short(v))
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def plot_one(axes: Any, r: CurveReport) -> None:
    """One panel."""
    f = r.forecast
    for which, fill, label in ((~r.unseen, "C0", "fitted"), (r.unseen, "white", "came later")):
        axes.plot(r.C[which], r.R[which], "o", color="C0", mfc=fill, ms=4, label=label)
    name = "/".join(Path(r.name).parts[-2:])
    title = f"{name}, {f.fit.C.size} of {r.C.size} points\nno forecast"
    grid = np.linspace(0, r.end, 200)
    if f.best:
        last = f.fit.C[-1]
        fitted = grid[grid <= last]  # beyond it many curves fit: the forecast is the band
        axes.plot(fitted, f.predict(fitted, f.form), color="black", lw=1)
    if f.allowed:
        low, high = f.interval(grid, noise=True)
        axes.fill_between(grid, low, high, color="C0", alpha=0.2, lw=0, label="forecast, 95%")
        axes.plot([1.04 * r.end] * 2, f.A_interval, "_-", color="C1", label="ceiling A")
        title = f"{name},\nforecast from {100 * r.fit_until:.3g}% of the compute"
        title += f"\nceiling {f.A_interval[0]:.2f} to {f.A_interval[1]:.2f}"
        if f.reason:
            title += ", not known yet"
    axes.set_title(title, fontsize=9)


def main(argv: Sequence[str] | None = None, sources: Mapping[str, Sequence[Mapping]] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input. `sources` has the records of runs that are no files."""
    parser = argparse.ArgumentParser(description="Forecast pass rate at more compute.")
    add = parser.add_argument
    add("files", nargs="+", help="eval.jsonl of a run, or its folder")
    add("--fit-until", type=float, nargs="+", default=[1.0], metavar="SHARE", help="fit so much, forecast the rest")
    add(
        "--predict-at",
        type=float,
        nargs="+",
        default=[],
        metavar="C",
        help="predict at this compute; by default at twice the run's",
    )
    add("--x", default="", metavar="COLUMN", help="compute; by default tokens or device_hours")
    add("--plot", metavar="PNG", help="draw a panel for each run and share")
    args = parser.parse_args(argv)
    place = "--predict-at"
    rows = []
    try:
        if not all(0 <= C < inf for C in args.predict_at):
            raise ValueError(f"need compute >= 0, not {args.predict_at}")
        for place in args.files:
            source = (sources or {}).get(place, place)
            name = place.removesuffix("/eval.jsonl")
            rows.append([curve(source, share, name, args.x) for share in args.fit_until])
        reports = [r for row in rows for r in row]
        if all(r.forecast.fit.data is None for r in reports):  # too few points; a run that does not rise is a verdict
            raise ValueError(reports[-1].forecast.reason)
        print("\n\n".join(format_report(r, *args.predict_at) for r in reports))
        if len(rows) > 1:
            of_last_share = [row[-1] for row in rows]
            fits = [r.forecast.fit for r in of_last_share]
            print("\n" + compare(*fits, names=[r.name for r in of_last_share]).verdict)
        if args.plot:
            place = args.plot
            plot_curves(rows, place)
    except ERRORS as error:
        print(f"forecast.py: {place}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
