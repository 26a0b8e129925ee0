"""The power law over model size: how much faster does a larger model learn, and what follows for a budget?

PROBLEM. The sigmoid of fit_sigmoid.py predicts the rest of one run. It says nothing about a model of another size.

IDEA (Tan et al. 2025, arXiv 2509.25300). In the part of a run where it still learns, the share of held-out problems
that the model fails, L = 1 - pass rate, is a straight line in a log-log plot, and its slope K depends on the number of
parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is either the compute of training, 6 N T FLOPs for T tokens, or the number of samples. K saturates: N0 is the size at
which a model learns at half of the greatest rate K_max. E, the offset, differs from size to size.

What it predicts. *Within a model* (intra), the early part of a run gives K and E, and so the rest. *Across models*
(inter), small models give K_max and N0, and so the slope of a larger one; its offset E is no function of N in this law
and must come from points of the larger model's own run (`with_size`). The best size for a budget X, of compute or of
samples, is the one with the lowest line there (`best_size`). A larger model has the steeper line, so if it starts
behind, it overtakes at one X (`crossing`).

How it is fitted. For given K_max and N0 the best E of each size is a mean, so least squares finds two parameters. Every
size has the same weight, however many points it has. Intervals are those of heteroscedasticity-robust errors (HC3) for
K_max and N0, and of the spread of its points for a line's height. They take points as independent: evaluations of one
run that wander together make them too narrow (with noise of autocorrelation .8, intervals of 95 % held in about half of
60 simulations), and the difference between two seeds is not in them.

When to use which law. This one has no ceiling and no start: L goes to 0 as X grows, and to infinity as X falls to 0.
Runs bend away from their line at both ends, and there fit_sigmoid.py is right. Runs of the task `chain` climb from a
pass rate of .08 to .97, faster than any one line: fitted to their first half, this law misses the second by .17 to .24
(root mean square, three runs), the sigmoid by .02 to .06. The published 8B run of ScaleRL (arXiv 2510.13786) has a
ceiling of .610: fitted to 1,500 to 8,000 GPU-hours (a start at .25 is assumed), this law says .65 at 16,000, where the
curve has .60, and .81 at 160,000. So: the sigmoid for one run's rest and ceiling; this law to compare sizes, far below.

    python fit_power_law.py 0.6B=runs/small/eval.jsonl 4B=runs/large/eval.jsonl --budget 1e19 --plot sizes.png

    >>> law = fit(N=[1, 1, 1, 2, 2, 2, 4, 4, 4], X=[1, 2, 4] * 3, L=[.5, .44, .38, .5, .41, .33, .5, .38, .29])
    >>> round(law.K(4), 2), round(law.predict(4, 8), 2)
    (0.39, 0.22)

Symbols: N parameters, X compute or samples, L failure rate, S sizes, n points; logarithms are natural.
"""

import argparse
import csv
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

FARTHEST = 1e3  # N0 is looked for from the smallest size / FARTHEST to the largest size * FARTHEST
EDGE = 10.0  # beyond the sizes by more than this factor, the data do not tell N0 from 0 or from infinity
UNITS = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}
Interval = tuple[float, float]
Point = tuple[float, float, float]  # N, X, L


class Size(NamedTuple):
    """What is known of one size."""

    E: float  # offset: log L at X = 1
    x: float  # mean of its log X
    error: float  # half an interval of the line's log L there
    X_range: Interval  # its least and its greatest X
    own_K: float = math.nan  # slope of its own line, without the law; nan if the law was not fitted to it
    off: bool = False  # whether that slope is not K(N), beyond its own error (95 % for all sizes together)


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law. Sizes are in the unit that `fit` was given, X in its unit; intervals are of 95 %."""

    K_max: float  # the slope of an infinitely large model; nan if only one size was fitted
    N0: float  # size at half of it; nan if only one size was fitted
    scaled_covariance: np.ndarray  # (2, 2), of log K_max and log N0, times a squared quantile: roots are half intervals
    sizes: dict[float, Size]
    rmse: float  # of log L

    K_max_interval = property(lambda self: around(self.K_max, math.sqrt(self.scaled_covariance[0, 0])))
    N0_interval = property(lambda self: around(self.N0, math.sqrt(self.scaled_covariance[1, 1])))
    X_range = property(lambda self: tuple(f(f(s.X_range) for s in self.sizes.values()) for f in (min, max)))  # of all

    def K(self, N: float) -> float:
        """Slope of a model with N parameters. With a single size fitted it is known for that size only (ValueError)."""
        if not math.isnan(self.K_max):
            return self.K_max / (1 + self.N0 / N)
        if N not in self.sizes:
            raise ValueError(f"only one size, {min(self.sizes):g}, was fitted: the slope at {N:g} is unknown")
        return self.sizes[N].own_K

    def K_error(self, N: float) -> float:
        """Half the 95 % interval of log K(N)."""
        gradient = np.array([1.0, 0.0 if math.isnan(self.N0) else -1 / (1 + N / self.N0)])  # by log K_max and log N0
        return math.sqrt(gradient @ self.scaled_covariance @ gradient)

    def K_interval(self, N: float) -> Interval:
        """95 % interval of `K(N)`."""
        return around(self.K(N), self.K_error(N))

    def log_L(self, N: float, X: float) -> tuple[float, float]:
        """log L of `predict`, and half its 95 % interval, which is infinite if the offset is that of one point."""
        if N not in self.sizes:
            raise ValueError(f"size {N:g} has no offset E, which this law cannot predict: give points of its run")
        size, x, K = self.sizes[N], math.log(X), self.K(N)
        return size.E - K * x, math.hypot((x - size.x) * K * self.K_error(N), size.error)

    def predict(self, N: float, X: float) -> float:
        """L of a model with N parameters at X. ValueError for a size without an offset."""
        return math.exp(min(self.log_L(N, X)[0], 700))  # a steep line, far below its first X, is above any number

    def interval(self, N: float, X: float) -> Interval:
        """95 % interval of `predict`: of the line, not of an evaluation, whose own noise comes on top."""
        return around(self.predict(N, X), self.log_L(N, X)[1])

    def with_size(self, N: float, X: Sequence[float], L: Sequence[float]) -> "PowerLaw":
        """This law with one more size: its slope is K(N), its offset the mean of log L + K(N) log X over its points.
        ValueError: no points, or values that `fit` refuses."""
        _, x, y = checked(np.full(np.shape(X), N), X, L, least=1)
        offsets, n = y + self.K(N) * x, len(x)
        error = float(student.ppf(0.975, n - 1) * np.std(offsets, ddof=1) / math.sqrt(n)) if n > 1 else math.inf
        old = self.sizes.get(N, Size(0, 0, 0, (math.inf, -math.inf)))  # a size that was fitted keeps its own slope
        X_range = float(min(*X, old.X_range[0])), float(max(*X, old.X_range[1]))
        new = Size(float(offsets.mean()), float(x.mean()), error, X_range, *old[4:])
        return replace(self, sizes=self.sizes | {N: new})

    def best_size(self, X: float) -> float:
        """Which size that has an offset has the lowest L at X, a budget of compute or of samples as the law's X."""
        return min(self.sizes, key=lambda N: self.log_L(N, X)[0])

    def crossing(self, N1: float, N2: float) -> float | None:
        """X at which the larger of two sizes overtakes the smaller one. None if it is ahead from the first X on.
        ValueError for a size without an offset."""
        small, large = sorted((N1, N2))
        behind, steeper = self.log_L(large, 1)[0] - self.log_L(small, 1)[0], self.K(large) - self.K(small)
        if steeper <= 0 or behind / steeper <= math.log(self.X_range[0]) + 1e-9:
            return None
        return math.exp(min(behind / steeper, 700))

    @property
    def notes(self) -> list[str]:
        """What the fitted sizes cannot tell, one sentence each."""
        fitted, (low, high) = {N: s.own_K for N, s in self.sizes.items() if not math.isnan(s.own_K)}, self.N0_interval
        least, most, falling = min(fitted), max(fitted), ", ".join(f"{N:g}" for N, K in fitted.items() if K <= 0)
        against = ", ".join(f"{N:g}" for N, size in self.sizes.items() if size.off)
        notes = {
            f"one size alone ({least:g}) gives its own line; K_max and N0 need at least two sizes": least == most,
            f"the law does not hold: the own slope of size {against} is not K(N), by more than its error": against,
            "two sizes give K_max and N0: nothing here tests the law itself": len(fitted) == 2 and not against,
            "the slopes of all sizes agree: K has saturated, and N0 is known to be small but not how small":
                low < least / EDGE and self.N0 < least and not against,
            "K still grows in proportion to N: only K_max / N0 is known, and neither of the two":
                high > most * EDGE and self.N0 > most and not against,
            f"the pass rate of size {falling} does not rise, which is no learning: leave that size out": falling,
        }  # fmt: skip
        return [note for note, holds in notes.items() if holds]


def around(value: float, half: float) -> Interval:
    """The interval of a value from half that of its logarithm."""
    factor = math.exp(min(half, 600))  # wider than any number: not known
    return value / factor, value * factor


def fit(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs; L is 1 - pass rate. ValueError:
    lengths differ, a value is not positive, L is above 1, a size has fewer than 3 X, the pass rate rises at no size."""
    sizes, x, y = checked(N, X, L)
    known, of = np.unique(sizes, return_inverse=True)  # (S,), (n,) which size a point belongs to
    n_points = np.bincount(of)  # (S,)
    mean_x, mean_y = np.bincount(of, x) / n_points, np.bincount(of, y) / n_points  # (S,)
    dx, dy = x - mean_x[of], y - mean_y[of]  # (n,) the best E makes each line pass through its size's mean
    own_K = -np.bincount(of, dx * dy) / (spread := np.bincount(of, dx * dx))  # (S,)
    if own_K.max() <= 0:
        raise ValueError("the pass rate rises at no size, so there is no learning to fit")
    weight = 1 / n_points[of]  # every size counts the same

    def slopes(theta: np.ndarray) -> np.ndarray:  # (S,), theta = log K_max, log N0
        return np.exp(theta[0]) / (1 + np.exp(theta[1]) / known)

    theta = np.array([math.log(own_K.max()), -np.inf])  # of a single size: its own slope
    if len(known) > 1:
        least, most = math.log(known[0] / FARTHEST), math.log(known[-1] * FARTHEST)
        options = {"bounds": ([-np.inf, least], [np.inf, most]), "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
        found = [
            least_squares(lambda t: np.sqrt(weight) * (dy + slopes(t)[of] * dx), (theta[0], u), **options)
            for u in np.linspace(least, most, 9)[1:-1]
        ]
        theta = min(found, key=lambda result: result.cost).x
    K = slopes(theta)  # (S,)
    errors = dy + K[of] * dx  # (n,) measured minus fitted
    left = 1 - K / math.exp(theta[0])  # (S,) N0 / N / (1 + N0 / N)
    by_theta = np.stack([K[of] * dx, -(K * left)[of] * dx], 1)  # (n, 2) derivatives by log K_max and log N0
    bread = np.linalg.pinv(by_theta.T @ (weight[:, None] * by_theta))  # (2, 2)
    leverage = 1 / n_points[of] + weight * np.einsum("ni,ij,nj->n", by_theta, bread, by_theta)  # (n,)
    scores = by_theta * (weight * errors / np.maximum(1 - leverage, 1e-3))[:, None]  # (n, 2) HC3
    width = student.ppf(0.975, len(x) - len(known) - min(2, len(known)))  # offsets and slopes are fitted
    mean_error = width * np.sqrt(np.bincount(of, errors**2) / (n_points - 1) / n_points)  # (S,)
    own_sd = np.sqrt(np.bincount(of, (dy + own_K[of] * dx) ** 2) / (n_points - 2) / spread)  # (S,)
    off = abs(own_K - K) > np.maximum(student.ppf(1 - 0.025 / len(known), n_points - 2) * own_sd, abs(own_K) / 100)
    ranges = [(float(r.min()), float(r.max())) for r in (np.asarray(X, float)[of == i] for i in range(len(known)))]
    E = (mean_y + K * mean_x).tolist()
    rows = zip(E, mean_x.tolist(), mean_error.tolist(), ranges, own_K.tolist(), off.tolist(), strict=True)
    K_max, N0 = np.exp(theta).tolist() if len(known) > 1 else (math.nan, math.nan)
    scaled_covariance = width**2 * bread @ scores.T @ scores @ bread  # (2, 2)
    found_sizes = {N: Size(*row) for N, row in zip(known.tolist(), rows, strict=True)}
    return PowerLaw(K_max, N0, scaled_covariance, found_sizes, rmse=float(np.sqrt(np.mean(errors**2))))


def checked(N: Sequence[float], X: Sequence[float], L: Sequence[float], least: int = 3) -> tuple[np.ndarray, ...]:
    """(N, log X, log L) as arrays (n,). ValueError as `fit` says; a size needs `least` different X."""
    sizes, x, y = np.asarray(N, float), np.asarray(X, float), np.asarray(L, float)
    if not sizes.size:
        raise ValueError("there is no point to fit a law to")
    if not sizes.shape == x.shape == y.shape == (sizes.size,):
        raise ValueError(f"N, X and L must be flat and of equal length, not {sizes.shape}, {x.shape} and {y.shape}")
    if not (np.all(np.isfinite([sizes, x, y])) and sizes.min() > 0 and x.min() > 0 and y.min() > 0 and y.max() <= 1):
        raise ValueError("N and X must be above 0 and L above 0 and at most 1; leave out points with a pass rate of 1")
    for size in np.unique(sizes):
        if (count := len(np.unique(x[sizes == size]))) < least:
            raise ValueError(f"size {size:g} has {count} different X, and a line with its error needs at least 3")
    return sizes, np.log(x), np.log(y)


# ------------------------------------------------------------------------------------------------------- command line


def number(text: str, fix: str = "write it as 0.6B or 6e8") -> float:
    """ "0.6B" as 6e8, "7e9" as it is. ValueError, with the fix, for what is no size."""
    digits = str(text).strip().upper()
    try:
        value = float(digits[:-1] + UNITS[digits[-1]] if digits[-1:] in UNITS else digits)
    except ValueError:
        value = math.nan
    if not 1e-300 < value < 1e300:
        raise ValueError(f"{text!r} is no size: {fix}")
    return value


def cell(row: Mapping[str, Any], column: str) -> float:
    """A number of a row; nan where none is written. ValueError: no such column, or no number in it."""
    if column not in row:
        fix = "give SIZE=FILE" if column == "N" else "--x and --y name columns"
        known = repr(", ".join(map(str, [*row][:10])))[1:-1][:500]  # no terminal obeys these characters
        raise ValueError(f"a row without {column!r}, but with {known}; {fix}")
    try:
        return number(row["N"]) if column == "N" else float(math.nan if row[column] in (None, "") else row[column])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {column}: {error}") from error


def read(named: str, x: str, y: str, dropped: Counter[str]) -> list[Point]:
    """(N, X, L) of `SIZE=FILE` (a run's eval.jsonl, or a CSV), or of a CSV with a column N. Points that have no
    logarithm are counted in `dropped`. ValueError: what is no size, no number or no pass rate, a missing column, an N
    that is not SIZE, and a file or a size of which no point is left."""
    before, given, after = named.partition("=")
    size, name = (number(before, "write SIZE=FILE"), after) if given else (None, named)
    rows, i = list[tuple[float, float, float, str]](), 0  # N, X, L and what is wrong with it
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").splitlines()
        table = map(json.loads, filter(str.strip, lines)) if name.endswith(".jsonl") else csv.DictReader(lines)
        for i, row in enumerate(table, 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {i} is no JSON object")
            N, X, R = size if size and not row.get("N") else cell(row, "N"), cell(row, x), cell(row, y)
            if size not in (None, N):
                raise ValueError(f"row {i} has N {row['N']}, and SIZE is {before}; leave SIZE out to use the column N")
            if R < 0 or R > 1:
                raise ValueError(f"{y} is {R:g}, and a pass rate lies between 0 and 1; divide percents by 100")
            flaws = {"no number": not math.isfinite(X + R), f"{x} is not above 0": X <= 0, f"{y} is 1": R == 1}
            rows.append((N, X, 1 - R, next((flaw for flaw, there in flaws.items() if there), "")))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: row {i + 1} is no JSON object") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    points, counts = [row[:3] for row in rows if not row[3]], Counter(flaw for *_, flaw in rows if flaw)
    lost = ", ".join(f"{N:g}" for N in sorted({row[0] for row in rows} - {point[0] for point in points}))
    dropped.update(counts)
    if lost or not points:
        of = f" of size {lost}" if lost else ""
        raise ValueError(f"{name} has no usable row{of}; left out of it: {dict(counts) or 'none'}")
    return points


def analyze(points: Sequence[Point], share: float, new: float | None) -> tuple[PowerLaw, list[Point]]:
    """The law from the first `share` of each size's X, and all points after it, which were used for nothing. A `new`
    size gives no more than its offset. ValueError: a size has no points for that, or `share` is no share."""
    if not 0 < share <= 1:
        raise ValueError(f"--fit-until is {share:g}; give a share above 0 and at most 1")
    last = {N: share * max(X for M, X, _ in points if M == N) for N, _, _ in points}
    first, rest = [p for p in points if p[1] <= last[p[0]]], [p for p in points if p[1] > last[p[0]]]
    if lost := last.keys() - {N for N, *_ in first}:
        raise ValueError(f"--fit-until {share:g} leaves no point of size {min(lost):g}")
    law = fit(*np.reshape([p for p in first if p[0] != new], (-1, 3)).T)
    if new is None:
        return law, rest
    if not (own := [p for p in first if p[0] == new]):
        raise ValueError(f"size {new:g} has K {shown(law.K(new), law.K_error(new))} by this law, but its offset E is "
                         "no function of N and cannot be predicted: give points of its run")  # fmt: skip
    return law.with_size(new, *np.transpose(own)[1:]), rest


def shown(value: float, half: float, form: str = ".4f") -> str:
    """`value [low, high]` from half the interval of its logarithm, or that so wide an interval tells nothing."""
    low, high = around(value, half)
    if math.isinf(half):
        return f"{value:{form}} [unknown from one point]"
    return "not known" if high > 1e6 * low else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def report(law: PowerLaw, rest: Sequence[Point], budgets: Sequence[float], points: Sequence[Point] = ()) -> str:
    """The printed result; `rest` is what was not used of `points`. ValueError: a budget below them all, or infinite."""
    lines, sizes = [f"log L = -K(N) log X + E(N), 95 % intervals, RMSE of log L {law.rmse:.4f}"], sorted(law.sizes)
    if not math.isnan(law.K_max):
        halves = np.sqrt(np.diag(law.scaled_covariance)).tolist()
        lines += [f"K_max  {shown(law.K_max, halves[0])}", f"N0     {shown(law.N0, halves[1], '.3g')}"]
    for N in sizes:
        (E, half), own_K = law.log_L(N, 1), law.sizes[N].own_K
        own = "not fitted, but for E" if math.isnan(own_K) else f"own line {own_K:.4f}"
        ends = "unknown from one point" if math.isinf(half) else f"{E - half:.3f}, {E + half:.3f}"
        lines.append(f"N {N:.3g}: K {shown(law.K(N), law.K_error(N))}, E {E:.3f} [{ends}], {own}")
    tests = [(f"{len(rest)} points not fitted", rest)]
    for N in (N for N in sizes if math.isnan(law.sizes[N].own_K)):
        later, its = ([p for p in some if p[0] == N] for some in (rest, points))
        ahead = f"of these, {len(later)} of size {N:.3g}, predicted with the slope that the other sizes give"
        alone = f"E of size {N:.3g} was taken from these {len(its)} points, which test only its slope"
        tests.append((ahead, later) if later else (alone, its[1:] and its))  # one point alone tests nothing
    for what, some in tests:
        if errors := [math.log(L) - law.log_L(N, X)[0] for N, X, L in some]:
            lines.append(f"{what}: RMSE of log L {np.sqrt(np.mean(np.square(errors))):.4f}, "
                         f"mean {np.mean(errors):+.4f} (above 0: worse than predicted)")  # fmt: skip

    def at(X: float, *concerned: float) -> str:
        outside = [f"{N:.3g}" for N in concerned if not law.sizes[N].X_range[0] <= X <= law.sizes[N].X_range[1]]
        return f"at X = {X:.3g}" + (f" (an extrapolation of {', '.join(outside)})" if outside else "")

    for small, large in pairwise(sizes):
        X = law.crossing(small, large)
        where = "from the start" if X is None else at(X, small, large)
        if X is not None and X > 1000 * law.X_range[1]:
            where = "not within a thousand times the X that was run"
        lines.append(f"{large:.3g} is ahead of {small:.3g}: {where}")
    for X in budgets:
        if not law.X_range[0] <= X < math.inf:
            below = f"lies below every point: the runs begin at {law.X_range[0]:g}"
            raise ValueError(f"--budget {X:g} {below if math.isfinite(X) else 'is no finite number'}")
        best = law.best_size(X)
        lines.append(f"{at(X, *sizes)} N {best:.3g} is best: L {shown(law.predict(best, X), law.log_L(best, X)[1])}")
    late, early = max(sizes, key=lambda N: law.sizes[N].X_range[0]), min(sizes, key=lambda N: law.sizes[N].X_range[1])
    if law.sizes[late].X_range[0] > law.sizes[early].X_range[1]:
        lines.append(f"all X of {late:.3g} lie above those of {early:.3g}: see that both columns have the same unit")
    return "\n".join([*lines, *law.notes])


def plot(law: PowerLaw, points: Sequence[Point], rest: Sequence[Point], path: str) -> None:
    """Writes a PNG of L against X, log-log. Hollow points, the `rest`, were not used."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, N in enumerate(sorted(law.sizes)):
        for p in (p for p in points if p[0] == N):
            axes.plot(*p[1:], f"C{i}o", ms=4, mfc="none" if p in rest else f"C{i}")
        ends = [f(X for M, X, _ in points if M == N) for f in (min, max)]
        axes.plot(ends, [law.predict(N, X) for X in ends], f"C{i}", label=f"{N:.3g}: K = {law.K(N):.3f}")
    axes.set(xscale="log", yscale="log", xlabel="X", ylabel="L = 1 - pass rate")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", help="SIZE=runs/NAME/eval.jsonl, or a CSV with a column N")
    add("--x", default="flops", help="column of compute or samples (default flops)")
    add("--y", default="pass_rate", help="column of the pass rate")
    add("--fit-until", type=float, default=1, metavar="SHARE", help="fit points with X up to SHARE of a size's last X")
    add("--predict-size", metavar="SIZE", help="leave this size out of the fit but for its offset, and predict its run")
    add("--budget", type=float, nargs="+", default=[], metavar="X", help="say which size is best at this X")
    add("--plot", metavar="PNG", help="draw L against X, log-log")
    args = parser.parse_args(argv)
    dropped: Counter[str] = Counter()
    try:
        file, times = Counter(os.path.realpath(name.partition("=")[2] or name) for name in args.files).most_common()[0]
        if times > 1:
            raise ValueError(f"{file} is given {times} times")
        points = [point for name in args.files for point in read(name, args.x, args.y, dropped)]
        law, rest = analyze(points, args.fit_until, args.predict_size and number(args.predict_size))
        text = report(law, rest, args.budget, points)
        if args.plot:
            plot(law, points, rest, args.plot)
    except (OSError, ValueError) as error:
        print(f"fit_power_law.py: {error}; points left out: {dict(dropped) or 'none'}", file=sys.stderr)
        return 2
    print(text, f"points left out: {dict(dropped) or 'none'}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
