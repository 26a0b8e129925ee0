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


def holds(fit: SigmoidFit, A: float) -> bool:
    """Whether the interval of A does."""
    return fit.A_interval[0] <= A <= fit.A_interval[1]


def plateau(run: Evaluations) -> float:
    """Mean of the run's last evaluations."""
    return float(run.rates[-PLATEAU:].mean())


def half_gain(run: Evaluations) -> float:
    """C_mid as measured, without a fit: where straight lines between evaluations first reach half of the gain."""
    return needed(run, (run.rates[0] + plateau(run)) / 2, AXIS)


def reach_of(run: Evaluations, share: float) -> float:
    """How far `share` of the run reaches, in C_mid as measured; NaN for a run that ends no higher than it began."""
    C_mid = half_gain(run)
    return share * float(run.points[AXIS][-1]) / C_mid if C_mid > 0 else math.nan


class Forecast(NamedTuple):
    """Of one evaluation: predicted by the form that fits best and by Eq. 1, with intervals, and what was measured."""

    best: float
    eq1: float
    curve: tuple[float, float]
    evaluation: tuple[float, float]
    measured: float

    inside = property(lambda self: self.evaluation[0] <= self.measured <= self.evaluation[1])
    error = property(lambda self: self.best - self.measured)


def forecast_by(fit: SigmoidFit, run: Evaluations, at: int) -> Forecast:
    """What a fit says of evaluation number `at`."""
    C = float(run.points[AXIS][at])
    ends = (tuple(fit.interval(C, noise=noise)[:, 0].tolist()) for noise in (False, True))
    predicted = (float(fit.predict(C, form)) for form in (fit.form, "log-logistic"))
    return Forecast(*predicted, *ends, float(run.rates[at]))


@cache
def forecast(run: Evaluations, share: float) -> Forecast:
    """What the fit to `share` of a run says of its last evaluation."""
    return forecast_by(fitted(run, AXIS, share), run, -1)


def errors(run: Evaluations, share: float) -> dict[str, float]:
    """{rule: predicted minus measured at the last evaluation}; NaN where a rule has no prediction."""
    end, fit = forecast(run, share), fitted(run, AXIS, share)
    A, D, B = saturating_power(fit.C, fit.R)
    predicted = {
        "the form that fits best": end.best,
        "Eq. 1": end.eq1,
        "power law": A - D / run.points[AXIS][-1] ** B,
        "the pass rate stays": float(fit.R[-2:].mean()),
    }
    return {rule: value - end.measured for rule, value in predicted.items()}


def noise_ratio(run: Evaluations) -> float:
    """RMSE of the fit to the whole run, over the binomial noise of its evaluations."""
    fit = fitted(run, AXIS)
    return fit.rmse / math.sqrt(np.mean(variance(fit.predict(fit.C), fit.n)))


@cache
def identifiable_from(run: Evaluations) -> float:
    """The compute from which on the fits to the run up to each evaluation are identifiable; inf if there is none."""
    C, known = run.points[AXIS], math.inf
    for now in C[::-1]:  # `fit_to` keeps no fit: there are thousands, of a quarter of a megabyte each
        if now <= 0 or not fit_to(run, AXIS, now / C[-1]).identifiable:
            break
        known = float(now)
    return known


def cut_at(run: Evaluations, reach: float) -> dict[str, float] | None:
    """A run fitted up to so many C_mid, and its evaluation at twice the compute of the last point that was fitted;
    `again` is `ask_again` over `identifiable_from`, NaN where the fit is identifiable, or the run never is.

    None where twice the compute is beyond the end of the run, or fewer than four evaluations are seen."""
    C, until = run.points[AXIS], reach * half_gain(run)
    seen = C[until >= C]
    if 2 * until > 1.02 * C[-1] or seen.size < 4:
        return None
    fit, again = fit_to(run, AXIS, float(until / C[-1])), math.nan
    if not fit.identifiable and (known := identifiable_from(run)) < math.inf:
        again = fit.ask_again() / known
    twice = forecast_by(fit, run, int(np.argmin(np.abs(C - 2 * seen[-1]))))
    return {
        "reach": reach,
        "inside": twice.inside,
        "width": np.ptp(twice.curve),
        "A holds": holds(fit, plateau(run)),
        "width of A": np.ptp(fit.A_interval),
        "identifiable": fit.identifiable,
        "again": again,
    }
