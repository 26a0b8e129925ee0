"""The power law over model size: how much faster does a larger model learn, and what follows for a budget?

PROBLEM. The sigmoid of fit_sigmoid.py predicts the rest of one run. It says nothing about a model of another size.

IDEA (Tan et al. 2025, arXiv 2509.25300). In the part of a run where it still learns, the share of held-out problems
that the model fails, L = 1 - pass rate, is a straight line in a log-log plot, and its slope K depends on the number of
parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is either the compute of training, 6 N T FLOPs for T tokens, or the number of samples. K saturates: N0 is the size at
which a model learns at half of the greatest rate K_max. E, the offset, differs from size to size.

WHAT IT PREDICTS. *Within a model*, the early part of a run gives K and E, and so the rest. *Across models*, small ones
give K_max and N0, and so the slope of a larger one. Its offset E is no function of N in this law, and must come from
points of the larger model's own run (`with_size`). A larger model has the steeper line, so if it starts behind, it
overtakes at one X (`crossing`). The best size for a budget X is the one with the lowest line there (`best_size`).

HOW IT IS FITTED. For given K_max and N0 the best E of each size is a mean, so least squares finds two parameters. Every
size has the same weight, however many points it has. The errors of K_max and N0 are robust to unequal noise (HC3); that
of a line's height comes from the spread of its points. Both take points as independent: where evaluations of one run
wander together (autocorrelation .8), intervals of 95 % held in half of 60 simulations. Seeds may differ by more.

WHEN TO USE IT. This law has no ceiling and no start, and runs bend away from their line at both ends. The published 8B
run of ScaleRL (arXiv 2510.13786) ends at .610; fitted to its 1,500 to 8,000 GPU-hours this law says .81 at 160,000. So:
the sigmoid for one run's rest and its ceiling; this law to compare sizes, far below a ceiling.

    python fit_power_law.py 0.6B=runs/small/eval.jsonl 4B=runs/large/eval.jsonl --budget 1e19 --plot sizes.png

    >>> law = fit(N=[1, 1, 1, 2, 2, 2, 4, 4, 4], X=[1, 2, 4] * 3, L=[.5, .44, .38, .5, .41, .33, .5, .38, .29])
    >>> round(law.K(4), 2), round(law.predict(4, 8), 2)
    (0.39, 0.22)
    >>> round(law.with_size(8, X=[1, 2], L=[.5, .37]).predict(8, 4), 2)  # of a larger one after two points of its run
    0.26

Symbols: N parameters, X compute or samples, L failure rate, S sizes, n points; logarithms are natural.
"""

import argparse
import csv
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

FARTHEST = 1e3  # N0 is looked for from the smallest size / FARTHEST to the largest size * FARTHEST
EDGE = 10.0  # beyond the sizes by more than this factor, the data do not tell N0 from 0 or from infinity
UNITS = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}
BAD_INPUT = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError, csv.Error)
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

    K_max: float  # the slope of an infinitely large model
    N0: float  # size at half of it
    scaled_covariance: np.ndarray  # (2, 2), of log K_max and log N0, times a squared quantile: roots are half intervals
    sizes: dict[float, Size]
    rmse: float  # of log L

    K_max_interval = property(lambda self: around(self.K_max, math.sqrt(self.scaled_covariance[0, 0])))
    N0_interval = property(lambda self: around(self.N0, math.sqrt(self.scaled_covariance[1, 1])))
    X_range = property(lambda self: tuple(f(f(s.X_range) for s in self.sizes.values()) for f in (min, max)))  # of all

    def K(self, N: float) -> float:
        """Slope of a model with N parameters."""
        return self.K_max / (1 + self.N0 / N)

    def K_error(self, N: float) -> float:
        """Half the 95 % interval of log K(N)."""
        gradient = np.array([1.0, -1 / (1 + N / self.N0)])  # by log K_max and log N0
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
        new = old._replace(E=float(offsets.mean()), x=float(x.mean()), error=error, X_range=X_range)
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
        own, (low, high) = {N: s.own_K for N, s in self.sizes.items() if not math.isnan(s.own_K)}, self.N0_interval
        against, falling = listed(N for N in own if self.sizes[N].off), listed(N for N in own if own[N] <= 0)
        notes = []
        if against:
            notes.append(f"the law does not hold: the own slope of size {against} is not K(N), by more than its error")
        elif len(own) == 2:
            notes.append("two sizes give K_max and N0: nothing here tests the law itself")
        if low < min(own) / EDGE and self.N0 < min(own) and not against:
            saturated = "K has saturated, and N0 is known to be small but not how small"
            notes.append(f"the slopes of all sizes agree: {saturated}")
        if high > max(own) * EDGE and self.N0 > max(own) and not against:
            notes.append("K still grows in proportion to N: only K_max / N0 is known, and neither of the two")
        if falling:
            notes.append(f"the pass rate of size {falling} does not rise, which is no learning: leave that size out")
        return notes


def around(value: float, half: float) -> Interval:
    """The interval of a value from half that of its logarithm."""
    factor = math.exp(min(half, 600))  # wider than any number: not known
    return value / factor, value * factor


def fit(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs; L is 1 - pass rate. ValueError:
    lengths differ, a value is not positive, L is above 1, a size has fewer than 3 X, fewer than two sizes, the pass
    rate rises at none."""
    sizes, x, y = checked(N, X, L)
    known, of = np.unique(sizes, return_inverse=True)  # (S,), (n,) which size a point belongs to
    n_points = np.bincount(of)  # (S,)
    mean_x, mean_y = np.bincount(of, x) / n_points, np.bincount(of, y) / n_points  # (S,)
    dx, dy = x - mean_x[of], y - mean_y[of]  # (n,) the best E makes each line pass through its size's mean
    own_K = -np.bincount(of, dx * dy) / (spread := np.bincount(of, dx * dx))  # (S,)
    if len(known) < 2:
        raise ValueError(f"K_max and N0 need at least two sizes, not {known[0]:g} alone")
    if own_K.max() <= 0:
        raise ValueError("the pass rate rises at no size, so there is no learning to fit")
    weight = 1 / n_points[of]  # every size counts the same

    def slopes(theta: np.ndarray) -> np.ndarray:  # (S,), theta = log K_max, log N0
        return np.exp(theta[0]) / (1 + np.exp(theta[1]) / known)

    least, most = math.log(known[0] / FARTHEST), math.log(known[-1] * FARTHEST)
    options = {"bounds": ([-np.inf, least], [np.inf, most]), "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    found = [
        least_squares(lambda t: np.sqrt(weight) * (dy + slopes(t)[of] * dx), (math.log(own_K.max()), u), **options)
        for u in np.linspace(least, most, 9)[1:-1]
    ]
    theta = min(found, key=lambda result: result.cost).x
    K = slopes(theta)  # (S,)
    errors = dy + K[of] * dx  # (n,) measured minus fitted
    # HC3: covariance = bread sum_i s_i s_i' bread, s_i = w_i e_i / (1 - h_i) (d e_i / d theta), h_i the leverage.
    left = 1 - K / math.exp(theta[0])  # (S,) N0 / N / (1 + N0 / N)
    by_theta = np.stack([K[of] * dx, -(K * left)[of] * dx], 1)  # (n, 2) derivatives by log K_max and log N0
    bread = np.linalg.pinv(by_theta.T @ (weight[:, None] * by_theta))  # (2, 2)
    leverage = 1 / n_points[of] + weight * np.einsum("ni,ij,nj->n", by_theta, bread, by_theta)  # (n,)
    scores = by_theta * (weight * errors / np.maximum(1 - leverage, 1e-3))[:, None]  # (n, 2)
    width = student.ppf(0.975, len(x) - len(known) - 2)  # the offsets, K_max and N0 are fitted
    mean_error = width * np.sqrt(np.bincount(of, errors**2) / (n_points - 1) / n_points)  # (S,)
    own_sd = np.sqrt(np.bincount(of, (dy + own_K[of] * dx) ** 2) / (n_points - 2) / spread)  # (S,)
    off = abs(own_K - K) > np.maximum(student.ppf(1 - 0.025 / len(known), n_points - 2) * own_sd, abs(own_K) / 100)
    ranges = [(float(r.min()), float(r.max())) for r in (np.asarray(X, float)[of == i] for i in range(len(known)))]
    E = (mean_y + K * mean_x).tolist()
    rows = zip(E, mean_x.tolist(), mean_error.tolist(), ranges, own_K.tolist(), off.tolist(), strict=True)
    K_max, N0 = np.exp(theta).tolist()
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


# --------------------------------------------------------------------------------------- reader, picture, command line
def number(text: str) -> float:
    """ "0.6B" as 6e8, "7e9" as it is."""
    digits = str(text).strip().upper()
    return float(digits[:-1] + UNITS[digits[-1]] if digits[-1:] in UNITS else digits)


def read(named: str, x: str, y: str, dropped: Counter[str]) -> list[Point]:
    """(N, X, L) of `SIZE=FILE`, a run's eval.jsonl or a CSV, or of a FILE with a column N. Points without a logarithm
    are counted in `dropped`. Raises BAD_INPUT, a ValueError among it if no point of a size is left."""
    *size, name = named.split("=", 1)
    lines = Path(name).read_text(encoding="utf-8-sig").splitlines()
    points, sizes = list[Point](), set(map(number, size))
    for row in map(json.loads, filter(str.strip, lines)) if name.endswith(".jsonl") else csv.DictReader(lines):
        if size and "N" in row:
            raise ValueError("it has a column N; leave SIZE out")
        N = number(size[0] if size else row["N"])
        X, R = (math.nan if row[column] in (None, "") else float(row[column]) for column in (x, y))
        sizes.add(N)
        if R < 0 or R > 1:
            raise ValueError(f"{y} is {R:g}, and a pass rate lies between 0 and 1; divide percents by 100")
        flaws = {"no number": not math.isfinite(X + R), f"{x} is not above 0": X <= 0, f"{y} is 1": R == 1}
        if any(flaws.values()):
            dropped.update([flaw for flaw, there in flaws.items() if there][:1])
        else:
            points.append((N, X, 1 - R))
    if not points or (sizes := sizes - {N for N, *_ in points}):
        raise ValueError("no usable row" + f" of size {listed(sizes)}" * bool(sizes))
    return points


def listed(sizes: Iterable[float]) -> str:
    """{4e9, 1e9} -> "1e+09, 4e+09"."""
    return ", ".join(f"{N:.3g}" for N in sorted(sizes))


def shown(value: float, ends: Interval, form: str = ".4f") -> str:
    """`value [low, high]`, or that so wide an interval tells nothing."""
    low, high = ends
    return "not known" if high > 1e6 * low else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def report(law: PowerLaw, later: np.ndarray, budgets: Sequence[float]) -> str:
    """What `main` prints: the law, how `later` points (n, 3) lie, what follows. ValueError: a budget below all X."""
    lines = [
        f"log L = -K(N) log X + E(N), 95 % intervals, RMSE of log L {law.rmse:.4f}",
        f"K_max  {shown(law.K_max, law.K_max_interval)}",
        f"N0     {shown(law.N0, law.N0_interval, '.3g')}",
    ]
    for N, size in sorted(law.sizes.items()):
        E, half = law.log_L(N, 1)
        line = f"N {N:.3g}: K {shown(law.K(N), law.K_interval(N))}, E {E:.3f} [{E - half:.3f}, {E + half:.3f}]"
        lines.append(f"{line}, own line {size.own_K:.4f}")
    if len(later):
        errors = np.array([math.log(L) - law.log_L(N, X)[0] for N, X, L in later.tolist()])
        said = f"RMSE of log L {np.sqrt(np.mean(errors**2)):.4f}, mean {errors.mean():+.4f}"
        lines.append(f"{len(later)} points not fitted: {said} (above 0: worse than predicted)")

    def at(X: float, *concerned: float) -> str:
        outside = listed(N for N in concerned if not law.sizes[N].X_range[0] <= X <= law.sizes[N].X_range[1])
        return f"at X = {X:.3g}" + f" (an extrapolation of {outside})" * bool(outside)

    for small, large in pairwise(sorted(law.sizes)):
        X = law.crossing(small, large)
        where = "from the start" if X is None else at(X, small, large)
        if X is not None and X > 1000 * law.X_range[1]:
            where = "not within a thousand times the X that was run"
        lines.append(f"{large:.3g} is ahead of {small:.3g}: {where}")
    for X in budgets:
        if not law.X_range[0] <= X < math.inf:
            raise ValueError(f"--budget {X:g} is no number from the first X of the runs on, {law.X_range[0]:g}")
        best = law.best_size(X)
        L = shown(law.predict(best, X), law.interval(best, X))
        lines.append(f"{at(X, *law.sizes)} N {best:.3g} is best: L {L}")
    return "\n".join([*lines, *law.notes])


def plot(law: PowerLaw, points: np.ndarray, fitted: np.ndarray, path: str) -> None:
    """Writes a PNG of L against X, log-log, of the `points` (n, 3); hollow where they are not `fitted` (n,)."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, N in enumerate(sorted(law.sizes)):
        its = points[:, 0] == N
        for which, fill in ((fitted, f"C{i}"), (~fitted, "none")):
            axes.plot(*points[its & which, 1:].T, f"C{i}o", ms=4, mfc=fill)
        ends = points[its, 1].min(), points[its, 1].max()
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
    add("--budget", type=float, nargs="+", default=[], metavar="X", help="say which size is best at this X")
    add("--plot", metavar="PNG", help="draw L against X, log-log")
    args = parser.parse_args(argv)
    place, dropped, points = "", Counter[str](), list[Point]()
    try:
        if not 0 < args.fit_until <= 1:
            raise ValueError(f"--fit-until is a share above 0 and at most 1, not {args.fit_until:g}")
        if len({os.path.realpath(name.partition("=")[2] or name) for name in args.files}) < len(args.files):
            raise ValueError("a file is given twice")
        for name in args.files:
            place = f"{name}: "
            points += read(name, args.x, args.y, dropped)
        place, table = "", np.array(points)  # (n, 3)
        last = np.array([table[table[:, 0] == N, 1].max() for N in table[:, 0]])
        fitted = table[:, 1] <= args.fit_until * last
        law = fit(*table[fitted].T)
        text = report(law, table[~fitted], args.budget)
        if args.plot:
            plot(law, table, fitted, args.plot)
    except BAD_INPUT as error:
        said = f"no column {error}: write SIZE=FILE, --x and --y" if isinstance(error, KeyError) else error
        print(f"fit_power_law.py: {place}{said}; points left out: {dict(dropped) or 'none'}", file=sys.stderr)
        return 2
    print(text, f"points left out: {dict(dropped) or 'none'}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
