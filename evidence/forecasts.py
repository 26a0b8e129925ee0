"""How well a fit to the beginning of a run foretells the rest of it, in numbers: `law_report.py` has the tables.

The graded task's ceiling is known by construction (tasks/arithmetic.py), so the fitted one can be judged as well. Two
simpler rules see the same points: the pass rate stays as it is, and the power law A - D / C^B.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from curves import Evaluations
from figures import fit_to, fitted, needed, saturating_power

from fit_sigmoid import SigmoidFit, variance

AXIS = "tokens"
PLATEAU = 8  # evaluations at the end of a run
RULES = ("the form that fits best", "Eq. 1", "power law", "the pass rate stays")


def holds(fit: SigmoidFit, A: float) -> bool:
    """Whether the interval of A does."""
    return fit.A_interval[0] <= A <= fit.A_interval[1]


def plateau(curve: Evaluations) -> float:
    """Mean of the run's last evaluations."""
    return float(curve.rates[-PLATEAU:].mean())


def half_gain(curve: Evaluations) -> float:
    """C_mid as measured, without a fit: where straight lines between evaluations first reach half of the gain."""
    return needed(curve, (curve.rates[0] + plateau(curve)) / 2, AXIS)


class Forecast(NamedTuple):
    """Of one evaluation: predicted by the form that fits best and by Eq. 1, and what was measured."""

    best: float
    eq1: float
    curve: tuple[float, float]
    evaluation: tuple[float, float]
    measured: float

    inside = property(lambda self: self.evaluation[0] <= self.measured <= self.evaluation[1])
    error = property(lambda self: self.best - self.measured)


@cache
def forecast(curve: Evaluations, share: float) -> Forecast:
    """What the fit to `share` of a run says of its last evaluation."""
    return forecast_by(fitted(curve, AXIS, share), curve, -1)


def forecast_by(fit: SigmoidFit, curve: Evaluations, at: int) -> Forecast:
    """What a fit says of evaluation number `at`."""
    C = float(curve.points[AXIS][at])
    ends = (tuple(fit.interval(C, noise=noise)[:, 0].tolist()) for noise in (False, True))
    predicted = (float(fit.predict(C, form)) for form in (fit.form, "log-logistic"))
    return Forecast(*predicted, *ends, float(curve.rates[at]))


def noise_ratio(curve: Evaluations) -> float:
    """RMSE of the fit to the whole run, over the binomial noise of its evaluations."""
    fit = fitted(curve, AXIS)
    return fit.rmse / math.sqrt(np.mean(variance(fit.predict(fit.C), fit.n)))


def error(curve: Evaluations, share: float, rule: str) -> float:
    """Predicted minus measured at the last evaluation; NaN where the rule has no prediction."""
    end, fit = forecast(curve, share), fitted(curve, AXIS, share)
    if rule == "power law":
        if (fit.C > 0).sum() < 4:
            return math.nan
        A, D, B = saturating_power(fit.C, fit.R)
        return A - D / curve.points[AXIS][-1] ** B - end.measured
    predicted = {"the form that fits best": end.best, "Eq. 1": end.eq1, "the pass rate stays": float(fit.R[-2:].mean())}
    return predicted[rule] - end.measured


# ------------------------------------------------------------------------------------------------------ by reach


class Cut(NamedTuple):
    """A run fitted up to so many C_mid, and its evaluation at twice the compute of the last point that was fitted."""

    twice: Forecast
    width: float  # of A's interval
    holds: bool  # the plateau
    identifiable: bool
    again: float  # `ask_again` over `identifiable_from`; NaN where the fit is identifiable, or the run never is


@cache
def identifiable_from(curve: Evaluations) -> float:
    """The compute from which on the fits to the run up to each evaluation are identifiable; inf if there is none."""
    C = curve.points[AXIS]  # `fit_to` keeps no fit: there are thousands, of a quarter of a megabyte each
    for i in range(C.size - 1, -1, -1):
        if C[i] <= 0 or not fit_to(curve, AXIS, C[i] / C[-1]).identifiable:
            return float(C[i + 1]) if i + 1 < C.size else math.inf
    return math.inf


def cut_at(curve: Evaluations, reach: float) -> Cut | None:
    """None where twice the compute is beyond the end of the run, or fewer than four evaluations are seen."""
    C, until = curve.points[AXIS], reach * half_gain(curve)
    seen = C[until >= C]
    if 2 * until > 1.02 * C[-1] or seen.size < 4:
        return None
    fit, again = fit_to(curve, AXIS, float(until / C[-1])), math.nan
    if not fit.identifiable and (known := identifiable_from(curve)) < math.inf:
        again = fit.ask_again() / known
    at = int(np.argmin(np.abs(C - 2 * seen[-1])))
    width = float(np.ptp(fit.A_interval))
    return Cut(forecast_by(fit, curve, at), width, holds(fit, plateau(curve)), fit.identifiable, again)


def reach_of(curve: Evaluations, share: float) -> float:
    """How far `share` of the run reaches, in C_mid as measured; NaN for a run that ends no higher than it began."""
    C_mid = half_gain(curve)
    return share * float(curve.points[AXIS][-1]) / C_mid if C_mid > 0 else math.nan


def is_long(curve: Evaluations) -> bool:
    """Half of the run is at least 3 C_mid, as the paper's fits saw it."""
    return reach_of(curve, 0.5) >= 3
