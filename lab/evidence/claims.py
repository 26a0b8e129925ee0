"""What the paper says of a variant, and what an interval of ours says of that: three words, and what could be seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, ndtr, stdtrit

MARGIN = 0.02  # in A, which the paper calls the noise between equal runs (arXiv 2510.13786, section 3)
CHANCE = 0.8  # of seeing what is said to be visible


@dataclass(frozen=True)
class Claim:
    """What the paper says of variant minus baseline: the difference lies between `low` and `high`.

    words    the statement, with the paper's own number where it has one
    source   a figure, table or section of arXiv 2510.13786 whose set-up is that of our runs
    visible  could this task show it? `yes`, `no`, or `in part`: every recipe that learns ends near the ceiling of .80,
             so equal ceilings say that a change does no harm, and nothing of a gain
    measure  "A" or "B"
    """

    words: str
    low: float
    high: float
    source: str
    visible: str
    measure: str = "A"


def equal(source: str) -> Claim:
    """Ceilings that differ by no more than the paper's margin."""
    return Claim("A equal", -MARGIN, MARGIN, source, "in part")


def lower(words: str, source: str, visible: str = "no") -> Claim:
    """A ceiling that is lower by more than the margin: no difference is both this and `equal`."""
    return Claim(f"A lower{words}", -math.inf, -MARGIN, source, visible)


def higher(words: str, source: str, visible: str = "no") -> Claim:
    """A ceiling that is higher by more than the margin."""
    return Claim(f"A higher{words}", MARGIN, math.inf, source, visible)


def less_steep(words: str, source: str) -> Claim:
    """A smaller B. The paper gives no margin for B."""
    return Claim(f"B lower{words}", -math.inf, 0.0, source, "yes", "B")


def verdict(low: float, high: float, claim: Claim, enough: bool = True) -> str:
    """What our interval [low, high] of a difference says of the paper's statement.

    Same here: all of ours lies where the paper says. Opposite here: none of it does. Else, and wherever this task could
    not show the statement or there are not `enough` pairs, it is not visible here.
    """
    if claim.visible == "no" or not enough:
        return "not visible here"
    if claim.low <= low and high <= claim.high:
        return "same here"
    if high < claim.low or low > claim.high:
        return "opposite here"
    return "not visible here"


def power(effect: float, sd: float, n: int) -> float:
    """How likely n pairs, whose differences have this standard deviation, show a true difference at 5 % (two-sided)."""
    # P(|Z + shift| > t s) over s, the measured sd in units of the true one: s^2 is chi^2 / dof. SciPy's nct has NaNs.
    dof = n - 1
    s = np.sqrt(chdtri(dof, (np.arange(10_000) + 0.5) / 10_000) / dof)
    ts = float(stdtrit(dof, 0.975)) * s
    shift = effect / math.sqrt(sd**2 / n)
    return float(np.mean(ndtr(shift - ts) + ndtr(-shift - ts)))


def visible(sd: float, n: int) -> float:
    """The smallest difference that n pairs see in four of five cases; NaN for one pair."""
    if n < 2 or not sd > 0:
        return math.nan
    return sd * float(brentq(lambda effect: power(effect, 1.0, n) - CHANCE, 0, 50))


def pooled_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, over all of them; NaN where none has two values."""
    dof = sum(len(values) - 1 for values in groups if len(values))
    squares = sum(float(np.var(values)) * len(values) for values in groups if len(values))
    return math.sqrt(squares / dof) if dof else math.nan
