"""The power law over model size: how much faster does a larger model learn, and what follows for a budget?

PROBLEM. The sigmoid of fit_sigmoid.py predicts the rest of one run. It says nothing about a model of another size.

IDEA (Tan et al. 2025, arXiv 2509.25300). In the part of a run where it still learns, the share of held-out problems
that the model fails, L = 1 - pass rate, is a straight line in a log-log plot, and its slope K depends on the number of
parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is either the compute of training, 6 N T FLOPs for T tokens, or the number of samples. K saturates: N0 is the size at
which a model learns at half of the greatest rate K_max. E, the offset, is the size's own.

What it predicts. *Within a model* (intra), the early part of a run gives K and E, and so the rest. *Across models*
(inter), small models give K_max and N0, and so the slope of a larger one; its offset E is no function of N in this law
and must come from points of the larger model's own run (`with_size`). The best size for a budget X, of compute or of
samples, is the one with the lowest line there (`best_size`). A larger model has the steeper line, so if it starts
behind, it overtakes at one X (`crossing`).

How it is fitted. For given K_max and N0 the best E of each size is a mean, so least squares finds two parameters. Every
size has the same weight, however many points it has. The intervals are those of heteroscedasticity-robust errors (HC3):
the noise of log L grows as L falls.

When to use which law. This one has no ceiling and no start: L goes to 0 as X grows, and to infinity as X falls to 0.
Runs bend away from their line at both ends, and there fit_sigmoid.py is right. Fitted to the first half of three runs
of `--dataset chain`, which climb from .08 to .97 faster than any one line, this law misses the second half by .17 to
.24 (root mean square), and the sigmoid by .02 to .06. Fitted from 1,500 to 8,000 GPU-hours of the published 8B curve (A
.610; R0, which is not printed, taken as .25), it says .65 at 16,000, where the curve has .60, and .81 at 160,000. So:
the sigmoid for the rest of one run and its ceiling; this law to compare sizes, over a stretch on which log L is
straight, far from the ceiling.

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
import sys
from collections import Counter
from collections.abc import Sequence
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
Interval = tuple[float, float]
Point = tuple[float, float, float]  # N, X, L


class Size(NamedTuple):
    """What is known of one size."""

    E: float  # offset: log L at X = 1
    x: float  # mean of its log X
    error: float  # half an interval of the line's log L there
    own_K: float = math.nan  # slope of its own line, without the law; nan if the law was not fitted to it


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law. Sizes are in the unit that `fit` was given, X in its unit; intervals are of 95 %."""

    K_max: float  # the slope of an infinitely large model; nan if only one size was fitted
    N0: float  # size at half of it; nan if only one size was fitted
    covariance: np.ndarray  # (2, 2), of log K_max and log N0, times the squared quantile
    sizes: dict[float, Size]
    rmse: float  # of log L
    X_range: Interval  # of all points

    K_max_interval = property(lambda self: around(self.K_max, math.sqrt(self.covariance[0, 0])))
    N0_interval = property(lambda self: around(self.N0, math.sqrt(self.covariance[1, 1])))

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
        return math.sqrt(gradient @ self.covariance @ gradient)

    def K_interval(self, N: float) -> Interval:
        """95 % interval of `K(N)`."""
        return around(self.K(N), self.K_error(N))

    def predict(self, N: float, X: float) -> float:
        """L of a model with N parameters at X. ValueError for a size without an offset."""
        if N not in self.sizes:
            raise ValueError(f"size {N:g} has no offset E, which this law cannot predict: give points of its run")
        return math.exp(self.sizes[N].E - self.K(N) * math.log(X))

    def interval(self, N: float, X: float) -> Interval:
        """95 % interval of `predict`: of the line, not of an evaluation, whose own noise comes on top."""
        slope_error = (math.log(X) - self.sizes[N].x) * self.K(N) * self.K_error(N)
        return around(self.predict(N, X), math.hypot(slope_error, self.sizes[N].error))

    def with_size(self, N: float, X: Sequence[float], L: Sequence[float]) -> "PowerLaw":
        """This law with one more size: its slope is K(N), its offset the mean of log L + K(N) log X over its points."""
        x, offsets = np.log(X), np.log(L) + self.K(N) * np.log(X)
        n = len(x)
        error = float(student.ppf(0.975, n - 1) * np.std(offsets, ddof=1) / math.sqrt(n)) if n > 1 else math.inf
        return replace(self, sizes=self.sizes | {N: Size(float(offsets.mean()), float(x.mean()), error)})

    def best_size(self, X: float) -> float:
        """Which size that has an offset has the lowest L at X: under a budget of compute or of samples, whichever the
        law was fitted to."""
        return min(self.sizes, key=lambda N: self.predict(N, X))

    def crossing(self, N1: float, N2: float) -> float | None:
        """X at which the larger of two sizes overtakes the smaller one. None if it is ahead from the first X on."""
        small, large = sorted((N1, N2))
        steeper, behind = self.K(large) - self.K(small), self.sizes[large].E - self.sizes[small].E
        if steeper <= 0 or behind / steeper <= math.log(self.X_range[0]) + 1e-9:
            return None
        return math.exp(min(behind / steeper, 700))

    @property
    def notes(self) -> list[str]:
        """What the fitted sizes cannot tell, one sentence each."""
        fitted, (low, high) = {N: s.own_K for N, s in self.sizes.items() if not math.isnan(s.own_K)}, self.N0_interval
        least, most, falling = min(fitted), max(fitted), ", ".join(f"{N:g}" for N, K in fitted.items() if K <= 0)
        notes = {
            f"one size alone ({least:g}) gives its own line; K_max and N0 need at least two sizes": least == most,
            "two sizes fit K_max and N0 exactly: nothing here tests the law itself": len(fitted) == 2,
            "the slopes of all sizes agree: K has saturated, and N0 is known to be small but not how small":
                low < least / EDGE and self.N0 < least,
            "K still grows in proportion to N: only K_max / N0 is known, and neither of the two":
                high > most * EDGE and self.N0 > most,
            f"the reward of size {falling} does not rise: a law of learning does not describe it": falling,
        }  # fmt: skip
        return [note for note, holds in notes.items() if holds]


def around(value: float, half: float) -> Interval:
    """The interval of a value from half that of its logarithm."""
    factor = math.exp(min(half, 600))  # wider than any number: not known
    return value / factor, value * factor


def fit(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs.

    Raises:
        ValueError: lengths differ, a value is not positive, L is above 1, a size has fewer than 3 values of X, or the
            reward rises at no size.
    """
    sizes, x, y = checked(N, X, L)
    known, of = np.unique(sizes, return_inverse=True)  # (S,), (n,) which size a point belongs to
    n_points = np.bincount(of)  # (S,)
    mean_x, mean_y = np.bincount(of, x) / n_points, np.bincount(of, y) / n_points  # (S,)
    dx, dy = x - mean_x[of], y - mean_y[of]  # (n,) the best E makes each line pass through its size's mean
    own_K = -np.bincount(of, dx * dy) / np.bincount(of, dx * dx)  # (S,)
    if own_K.max() <= 0:
        raise ValueError("the reward rises at no size, so there is no learning to fit")
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
    rows = np.stack([mean_y + K * mean_x, mean_x, mean_error, own_K], 1).tolist()  # (S, 4)
    K_max, N0 = np.exp(theta).tolist() if len(known) > 1 else (math.nan, math.nan)
    return PowerLaw(
        K_max,
        N0,
        covariance=width**2 * bread @ scores.T @ scores @ bread,
        sizes={N: Size(*row) for N, row in zip(known.tolist(), rows, strict=True)},
        rmse=float(np.sqrt(np.mean(errors**2))),
        X_range=(math.exp(x.min()), math.exp(x.max())),
    )


def checked(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, log X, log L) as arrays (n,). Raises ValueError as `fit` says."""
    sizes, x, y = np.asarray(N, float), np.asarray(X, float), np.asarray(L, float)
    if not sizes.size:
        raise ValueError("there is no point to fit a law to")
    if not sizes.shape == x.shape == y.shape == (sizes.size,):
        raise ValueError(f"N, X and L must be flat and of equal length, not {sizes.shape}, {x.shape} and {y.shape}")
    if not (np.all(np.isfinite(sizes + x + y)) and sizes.min() > 0 and x.min() > 0 and y.min() > 0 and y.max() <= 1):
        raise ValueError("N and X must be above 0 and L above 0 and at most 1; leave out points with a pass rate of 1")
    for size in np.unique(sizes):
        if (count := len(np.unique(x[sizes == size]))) < 3:
            raise ValueError(f"size {size:g} has {count} different X, and a line with its error needs at least 3")
    return sizes, np.log(x), np.log(y)


# ------------------------------------------------------------------------------------------------------- command line


def number(text: str) -> float:
    """ "0.6B" as 6e8, "7e9" as it is. Raises ValueError."""
    digits = str(text).strip().upper()
    try:
        value = float(digits[:-1] + UNITS[digits[-1]] if digits[-1:] in UNITS else digits)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is no size; write it as 0.6B or 6e8")
    return value


def read(named: str, x: str, y: str, dropped: Counter[str]) -> list[Point]:
    """(N, X, L) of `SIZE=FILE` (a run's eval.jsonl, or a CSV), or of a CSV with a column N. Points that have no
    logarithm are counted in `dropped`. ValueError: what is no size, no number or no pass rate, and a missing column."""
    size, name = named.split("=", 1) if "=" in named else ("", named)
    points: list[Point] = []
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").splitlines()
        for row in map(json.loads, filter(str.strip, lines)) if name.endswith(".jsonl") else csv.DictReader(lines):
            N, (X, R) = number(size or row["N"]), (math.nan if row[c] in (None, "") else float(row[c]) for c in (x, y))
            if R < 0 or R > 1:
                raise ValueError(f"{y} is {R:g}, and a pass rate lies between 0 and 1")
            reasons = {"no number": not math.isfinite(X + R), f"{x} is not above 0": X <= 0, f"{y} is 1": R == 1}
            if any(reasons.values()):
                dropped[max(reasons, key=reasons.__getitem__)] += 1
            else:
                points.append((N, X, 1 - R))
    except KeyError as missing:
        fix = "give SIZE=FILE" if missing.args[0] == "N" else "--x and --y name columns"
        raise ValueError(f"{name} has a row without {missing}, but with {', '.join(map(str, row))}; {fix}") from missing
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    return points


def analyze(points: Sequence[Point], share: float, new: float | None) -> tuple[PowerLaw, list[Point]]:
    """The law from the first `share` of each size's X, and the points that it has not seen. A `new` size gives no more
    than its offset. Raises ValueError if it has no points for that."""
    if not 0 < share <= 1:
        raise ValueError(f"--fit-until is {share:g}; give a share above 0 and at most 1")
    last = {N: share * max(X for M, X, _ in points if M == N) for N, _, _ in points}
    first = [p for p in points if p[1] <= last[p[0]]]
    law = fit(*np.reshape([p for p in first if p[0] != new], (-1, 3)).T)
    if new is None:
        return law, [p for p in points if p not in first]
    if not (own := [p for p in first if p[0] == new]):
        low, high = law.K_interval(new)
        raise ValueError(f"size {new:g} has K {law.K(new):.4f} [{low:.4f}, {high:.4f}] by this law, but its offset E "
                         "is no function of N and cannot be predicted: give points of its run")  # fmt: skip
    law = law.with_size(new, *np.transpose(own)[1:])
    return law, [p for p in points if p[0] == new and p not in own] or own


def report(law: PowerLaw, rest: Sequence[Point], budgets: Sequence[float]) -> str:
    """The printed result. Raises ValueError for a budget below all points."""
    lines, sizes = [f"log L = -K(N) log X + E(N), 95 % intervals, RMSE of log L {law.rmse:.4f}"], sorted(law.sizes)
    if not math.isnan(law.K_max):
        lines.append("K_max  {:.4f}  [{:.4f}, {:.4f}]".format(law.K_max, *law.K_max_interval))
        lines.append("N0     {:.3g}  [{:.3g}, {:.3g}]".format(law.N0, *law.N0_interval))
    for N in sizes:
        E, *_, own_K = law.sizes[N]
        own = "not fitted, but for E" if math.isnan(own_K) else f"own line {own_K:.4f}"
        (K_low, K_high), (E_low, E_high) = law.K_interval(N), np.log(law.interval(N, 1.0))
        lines.append(f"N {N:.3g}: K {law.K(N):.4f} [{K_low:.4f}, {K_high:.4f}], "
                     f"E {E:.3f} [{E_low:.3f}, {E_high:.3f}], {own}")  # fmt: skip
    if rest:
        errors = [math.log(L / law.predict(N, X)) for N, X, L in rest]
        lines.append(f"{len(rest)} points not fitted: RMSE of log L {np.sqrt(np.mean(np.square(errors))):.4f}, "
                     f"mean {np.mean(errors):+.4f} (above 0: worse than predicted)")  # fmt: skip

    def at(X: float) -> str:
        return f"at X = {X:.3g}{' (an extrapolation)' if X > law.X_range[1] else ''}"

    for small, large in pairwise(sizes):
        X = law.crossing(small, large)
        lines.append(f"{large:.3g} is ahead of {small:.3g}: {'from the start' if X is None else at(X)}")
    for X in budgets:
        if not law.X_range[0] <= X < math.inf:
            raise ValueError(f"--budget {X:g} lies below every point: the runs begin at {law.X_range[0]:g}")
        best = law.best_size(X)
        low, high = law.interval(best, X)
        lines.append(f"{at(X)} N {best:.3g} is best: L {law.predict(best, X):.4f} [{low:.4f}, {high:.4f}]")
    return "\n".join([*lines, *law.notes])


def plot(law: PowerLaw, points: Sequence[Point], rest: Sequence[Point], path: str) -> None:
    """Writes a PNG of L against X, log-log. Hollow points were not fitted."""
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
    add("--fit-until", type=float, default=1.0, metavar="SHARE", help="fit this share of each run, predict the rest")
    add("--predict-size", metavar="SIZE", help="leave this size out of the fit but for its offset, and predict its run")
    add("--budget", type=float, nargs="+", default=[], metavar="X", help="say which size is best at this X")
    add("--plot", metavar="PNG", help="draw L against X, log-log")
    args = parser.parse_args(argv)
    dropped: Counter[str] = Counter()
    try:
        points = [point for name in args.files for point in read(name, args.x, args.y, dropped)]
        law, rest = analyze(points, args.fit_until, args.predict_size and number(args.predict_size))
        text = report(law, rest, args.budget)
        if args.plot:
            plot(law, points, rest, args.plot)
    except (OSError, ValueError) as error:
        print(f"fit_power_law.py: {error}; points left out: {dict(dropped) or 'none'}", file=sys.stderr)
        return 2
    print(text, f"points left out: {dict(dropped) or 'none'}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
