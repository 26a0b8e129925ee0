"""The power law over model size: how much faster does a larger model learn, and what follows for a budget?

PROBLEM. The sigmoid of fit_sigmoid.py predicts the rest of one run. It says nothing about a model of another size.

IDEA (Tan et al. 2025, arXiv 2509.25300). In the part of a run where it still learns, the share of held-out problems
that the model fails, L = 1 - pass rate, is a straight line in a log-log plot, and its slope K depends on the number of
parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is either the compute of training, 6 N T FLOPs for T tokens, or the number of samples. K saturates: N0 is the size at
which a model learns at half of the greatest rate K_max. E, the offset, is the size's own.

What it predicts. *Within a model* (intra), the early part of a run gives K and E, and so the rest. *Across models*
(inter), small models give K_max and N0, and so the slope of a larger one. Its offset E is no function of N in this law:
it must come from the first points of its own run (`offset`).

How it is fitted. For given K_max and N0 the best E of each size is a mean, so two parameters are left, which least
squares finds. Every size has the same weight, however many points it has. The intervals are those of
heteroscedasticity-robust errors (HC3): the noise of log L grows as L falls.

When to use which law. This one has no ceiling: as X grows, L goes to 0. A reward that saturates below 1 must leave the
line, and there fit_sigmoid.py is right and this law is not. It is for models of several sizes while they still learn.

    >>> result = fit(N=[1, 1, 1, 2, 2, 2, 4, 4, 4], X=[1, 2, 4] * 3, L=[.5, .44, .38, .5, .41, .33, .5, .38, .29])
    >>> round(result.K(4), 2), round(result.predict(4, 8), 2)
    (0.39, 0.22)

Symbols: N parameters, X compute or samples, L failure rate, S sizes, n points; logarithms are natural.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

CONFIDENCE = 0.95
FARTHEST = 1e3  # N0 is looked for from the smallest size / FARTHEST to the largest size * FARTHEST
EDGE = 10.0  # beyond the sizes by more than this factor, the data do not tell N0 from 0 or from infinity
Interval = tuple[float, float]


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law. Sizes are in the unit that `fit` was given, X in its unit."""

    K_max: float  # the slope of an infinitely large model; nan if only one size was fitted
    N0: float  # size at half of it
    K_max_interval: Interval
    N0_interval: Interval
    E: dict[float, float]  # size -> offset: log L at X = 1
    E_interval: dict[float, Interval]
    own_K: dict[float, float]  # size -> slope of its own line, without the law
    rmse: float  # of log L
    covariance: np.ndarray  # (2, 2), of log K_max and log N0
    notes: tuple[str, ...]  # what these data cannot tell, one sentence each

    def K(self, N: float) -> float:
        """Slope of a model with N parameters. With a single size fitted it is known for that size only (ValueError)."""
        if math.isnan(self.K_max):
            if N not in self.own_K:
                raise ValueError(f"only one size, {only(self.own_K):g}, was fitted: the slope at {N:g} is not known")
            return self.own_K[N]
        return self.K_max / (1 + self.N0 / N)

    def K_interval(self, N: float) -> Interval:
        """95 % interval of `K(N)`."""
        gradient = np.array([1.0, -(self.N0 / N) / (1 + self.N0 / N)])  # of log K by log K_max and log N0
        error = math.sqrt(gradient @ self.covariance @ gradient)
        return self.K(N) * math.exp(-error), self.K(N) * math.exp(error)

    def offset(self, N: float, X: Sequence[float], L: Sequence[float]) -> float:
        """E of a size that was not fitted, from points of its own run: the mean of log L + K(N) log X."""
        return float(np.mean(np.log(L) + self.K(N) * np.log(X)))

    def predict(self, N: float, X: float, E: float | None = None) -> float:
        """L of a model with N parameters at X. A size that was not fitted needs its `offset` as E (ValueError)."""
        if E is None and N not in self.E:
            raise ValueError(f"size {N:g} was not fitted: give E from the first points of its run (offset)")
        return math.exp(-self.K(N) * math.log(X) + (self.E[N] if E is None else E))

    def best_size(self, X: float, sizes: Sequence[float] | None = None) -> float:
        """Which of the fitted `sizes` (all by default) has the lowest L at X: under a budget of compute or of samples,
        whichever the law was fitted to."""
        return min(sizes or self.E, key=lambda N: self.predict(N, X))

    def crossing(self, N1: float, N2: float) -> float | None:
        """X at which the larger of two fitted sizes overtakes the smaller one; None if it is ahead from the start or
        never catches up, as its line is no steeper."""
        small, large = sorted((N1, N2))
        steeper, behind = self.K(large) - self.K(small), self.E[large] - self.E[small]
        if steeper <= 0 or behind <= 1e-9:  # at X = 1, which is before any training; less is rounding
            return None
        return math.exp(behind / steeper)


def only(values: dict[float, float]) -> float:
    """The single key of `values`."""
    [value] = values
    return value


def fit(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs.

    Raises:
        ValueError: lengths differ, a value is not positive, L is above 1, or a size has fewer than 3 values of X.
    """
    sizes, x, y = np.asarray(N, float), np.asarray(X, float), np.asarray(L, float)
    if not sizes.shape == x.shape == y.shape or sizes.ndim != 1 or not len(sizes):
        raise ValueError(f"N, X and L must be flat and of equal length, not {sizes.shape}, {x.shape} and {y.shape}")
    if not (np.all(np.isfinite(sizes + x + y)) and sizes.min() > 0 and x.min() > 0 and y.min() > 0 and y.max() <= 1):
        raise ValueError("N and X must be above 0 and L above 0 and at most 1; leave out points with a pass rate of 1")
    x, y = np.log(x), np.log(y)
    known = np.unique(sizes)
    for size in known:
        if (count := len(np.unique(x[sizes == size]))) < 3:
            raise ValueError(f"size {size:g} has {count} different X, and a line with its error needs at least 3")
    of = np.searchsorted(known, sizes)  # (n,) which size a point belongs to
    n_points = np.bincount(of)  # (S,)
    mean_x, mean_y = np.bincount(of, x) / n_points, np.bincount(of, y) / n_points  # (S,)
    dx, dy = x - mean_x[of], y - mean_y[of]  # (n,) the best E makes each line pass through its size's mean
    own_K = -np.bincount(of, dx * dy) / np.bincount(of, dx * dx)  # (S,)
    if len(known) == 1:
        return one_size(float(known[0]), dx, dy, float(own_K[0]), float(mean_x[0]), float(mean_y[0]))
    weight = 1 / n_points[of]  # every size counts the same

    def slopes(theta: np.ndarray) -> np.ndarray:  # (S,)
        return math.exp(theta[0]) / (1 + math.exp(theta[1]) / known)

    def residuals(theta: np.ndarray) -> np.ndarray:  # (n,)
        return np.sqrt(weight) * (dy + slopes(theta)[of] * dx)

    least, most = math.log(known[0] / FARTHEST), math.log(known[-1] * FARTHEST)
    starts = [(math.log(max(own_K.max(), 1e-6)), u) for u in np.linspace(least, most, 9)[1:-1]]
    bounds = ([-np.inf, least], [np.inf, most])
    options = {"bounds": bounds, "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    best = min((least_squares(residuals, start, **options) for start in starts), key=lambda found: found.cost)
    K_max, N0 = map(math.exp, best.x)
    K = slopes(best.x)  # (S,)
    errors = dy + K[of] * dx  # (n,) measured minus fitted
    saturation = K / K_max  # (S,) 1 / (1 + N0 / N)
    jacobian = np.stack([K[of] * dx, -(K * (1 - saturation))[of] * dx], 1)  # (n, 2) by log K_max and log N0
    bread = np.linalg.pinv(jacobian.T @ (weight[:, None] * jacobian))  # (2, 2)
    leverage = 1 / n_points[of] + weight * np.einsum("ni,ij,nj->n", jacobian, bread, jacobian)  # (n,)
    scores = jacobian * (weight * errors / np.maximum(1 - leverage, 1e-3))[:, None]  # (n, 2)
    width = student.ppf((1 + CONFIDENCE) / 2, max(1, len(x) - len(known) - 2))
    covariance = width**2 * bread @ scores.T @ scores @ bread  # (2, 2), of half an interval
    half = np.minimum(np.sqrt(np.diag(covariance)), 600)  # wider than any number: not known
    interval = [(math.exp(v - d), math.exp(v + d)) for v, d in zip(best.x, half, strict=True)]
    E = mean_y + K * mean_x  # (S,)
    gradient = np.stack([np.ones(len(known)), -(1 - saturation)], 1)  # (S, 2) of log K
    slope_error = K * np.sqrt(np.einsum("si,ij,sj->s", gradient, covariance, gradient))  # (S,)
    mean_error = width * np.sqrt(np.bincount(of, errors**2) / np.maximum(1, n_points - 1) / n_points)  # (S,)
    E_error = np.hypot(mean_x * slope_error, mean_error)  # (S,)
    by_size = lambda values: dict(zip(known.tolist(), values, strict=True))  # noqa: E731
    return PowerLaw(
        K_max, N0, interval[0], interval[1], by_size(E.tolist()),
        by_size(list(zip((E - E_error).tolist(), (E + E_error).tolist(), strict=True))), by_size(own_K.tolist()),
        float(np.sqrt(np.mean(errors**2))), covariance, what_is_unknown(known, N0, own_K, interval[1]),
    )  # fmt: skip


def one_size(size: float, dx: np.ndarray, dy: np.ndarray, K: float, mean_x: float, mean_y: float) -> PowerLaw:
    """The line of a single size: how its slope depends on N is not known."""
    errors, n = dy + K * dx, len(dx)
    width = student.ppf((1 + CONFIDENCE) / 2, max(1, n - 2))
    spread = math.sqrt(float(errors @ errors) / max(1, n - 2))
    E, E_error = mean_y + K * mean_x, width * spread * math.sqrt(1 / n + mean_x**2 / float(dx @ dx))
    unknown = (math.nan, math.nan)
    note = f"one size alone ({size:g}) gives its own line; K_max and N0 need at least two sizes"
    return PowerLaw(
        math.nan, math.nan, unknown, unknown, {size: E}, {size: (E - E_error, E + E_error)}, {size: K},
        float(np.sqrt(np.mean(errors**2))), np.full((2, 2), math.nan), (note,),
    )  # fmt: skip


def what_is_unknown(known: np.ndarray, N0: float, own_K: np.ndarray, interval: Interval) -> tuple[str, ...]:
    """One sentence for each thing that these sizes cannot tell."""
    notes = []
    if interval[0] < known[0] / EDGE and N0 < known[0]:
        notes.append("the slopes of all sizes agree: K has saturated, and N0 is known to be small but not how small")
    if interval[1] > known[-1] * EDGE and N0 > known[-1]:
        notes.append("K still grows in proportion to N: only K_max / N0 is known, and neither of the two")
    if len(known) == 2:
        notes.append("two sizes fit K_max and N0 exactly: nothing here tests the law itself")
    if np.any(own_K <= 0):
        falling = ", ".join(f"{size:g}" for size in known[own_K <= 0])
        notes.append(f"the reward of size {falling} does not rise: a law of learning does not describe it")
    return tuple(notes)


# ------------------------------------------------------------------------------------------------------- command line


def number(text: str) -> float:
    """ "0.6B" as 6e8, "7e9" as it is. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMBT]?)\s*", str(text))
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is no size; write it as 0.6B or 6e8")
    return float(match[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def read(named: str, x: str, y: str, dropped: Counter[str]) -> list[tuple[float, float, float]]:
    """(N, X, L) of `SIZE=FILE` (a run's eval.jsonl, or a CSV), or of a CSV with a column N. Points that have no
    logarithm are counted in `dropped`. Raises ValueError for a missing column."""
    size, equals, name = named.rpartition("=")
    path = Path(name)
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        rows = list(csv.DictReader(path.read_text().splitlines()))
    points = []
    for row in rows:
        if missing := [column for column in (x, y, *(() if equals else ("N",))) if row.get(column) in (None, "")]:
            fix = "give SIZE=FILE" if missing == ["N"] else "--x and --y name columns"
            raise ValueError(f"{path} has no {missing[0]} in a row; its columns are {', '.join(row)}; {fix}")
        X, L = float(row[x]), 1 - float(row[y])
        reason = "nan" if math.isnan(X + L) else "X is 0" if X <= 0 else "pass rate is 1 or more" if L <= 0 else ""
        if reason:
            dropped[reason] += 1
        else:
            points.append((number(size if equals else row["N"]), X, L))
    return points


def first_share(points: Sequence[tuple[float, float, float]], share: float) -> tuple[list, list]:
    """Points of each size up to `share` of its largest X, and the others."""
    last = {N: share * max(X for M, X, _ in points if M == N) for N, _, _ in points}
    return [p for p in points if p[1] <= last[p[0]]], [p for p in points if p[1] > last[p[0]]]


def report(law: PowerLaw, rest: Sequence[tuple[float, float, float]], dropped: Counter[str]) -> str:
    """The printed result."""
    lines = [f"log L = -K(N) log X + E(N), {CONFIDENCE:.0%} intervals; left out: {dict(dropped) or 'nothing'}"]
    if not math.isnan(law.K_max):
        lines.append("K_max  {:.4f}  [{:.4f}, {:.4f}]".format(law.K_max, *law.K_max_interval))
        lines.append("N0     {:.3g}  [{:.3g}, {:.3g}]".format(law.N0, *law.N0_interval))
    for N, E in law.E.items():
        lines.append(f"N {N:.3g}: K {law.K(N):.4f} (own line {law.own_K[N]:.4f}), E {E:.3f}")
    if rest:
        errors = [math.log(L) - math.log(law.predict(N, X)) for N, X, L in rest]
        lines.append(f"{len(rest)} later points: RMSE of log L {np.sqrt(np.mean(np.square(errors))):.4f}, "
                     f"mean {np.mean(errors):+.4f} (above 0: worse than predicted)")  # fmt: skip
    return "\n".join([*lines, f"RMSE of log L {law.rmse:.4f}", *law.notes])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="SIZE=runs/NAME/eval.jsonl, or a CSV with a column N")
    parser.add_argument("--x", default="flops", help="column of compute or samples (default flops)")
    parser.add_argument("--y", default="pass_rate", help="column of the pass rate")
    parser.add_argument("--fit-until", type=float, default=1.0, help="share of each run that is fitted")
    args = parser.parse_args(argv)
    if not args.files:
        parser.print_help()
        return 0
    dropped: Counter[str] = Counter()
    try:
        points = [point for name in args.files for point in read(name, args.x, args.y, dropped)]
        fitted, rest = first_share(points, args.fit_until)
        print(report(fit(*zip(*fitted, strict=True)) if fitted else fit([], [], []), rest, dropped))
    except (OSError, ValueError) as error:
        print(f"fit_power_law.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
