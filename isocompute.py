"""IsoCompute: how should a budget of sampled completions be spent: on prompts, on rollouts per prompt, or on updates?

PROBLEM. A run that samples B_p prompts a batch and n rollouts a prompt for M updates costs, in completions,

    C = B_p n M            (in a log C = B_p n step: `step` counts batches, each an update but for those without any)

At equal C few rollouts give many updates on noisy advantages, and many rollouts give few updates on good ones.

IDEA (Cheng et al. 2026, arXiv 2603.12151). Make cheap runs over a grid of (B_p, n). Each run is a curve of reward
against C. At each C some n lies on the upper envelope of all curves; this best n grows with C and saturates:

    log2 n*(C) = L / (1 + exp(-s (log10 C - log10 C0))) + b

from 2^b rollouts for a small budget to 2^(b + L) for a large one, half way (in log2) at C0. Hard prompts saturate
earlier than easy ones. For B_p there is no such law: any value that is stable will do.

A RUN AS A CURVE. A rising sigmoid, R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), is fitted to the points of all runs of
one (B_p, n). The paper keeps record-breaking points, the first in each new highest bin of the reward. These are lucky,
and lift a curve the more, the more often it was evaluated: in simulations n* came out 1.3 to 1.7 times too small from
C0 on (`points="records"`). The default is every point but those of a collapse (`Run.standing`).

HOW SURE n* IS. A parametric bootstrap: `fit_grid` draws the curves again within their errors, moves each n that was
tried by up to ROUNDING steps of the grid (in log2 n), as the best n could only be one of those tried, and fits the law
again. Not in it: how far two seeds of one shape differ, and that the curves may have another form.

THE RECIPE (`recommend`): cheap runs, small M; fit them; n* for the budget; the smallest stable B_p; the rest into M.

WHAT MORE ROLLOUTS BUY. On easy prompts they *sharpen*: the average and the worst of k rise. On hard ones they *cover*:
the best of k (pass@k) rises, as rare solutions are found. `of_k` gives the three from counts of correct answers.

    python isocompute.py runs/grid/* --budget 1e6 --plot grid.png
    python isocompute.py grid.csv --budget 1e6    # columns B_p, n, step, pass_rate; and run, where a shape has several
    plan = recommend([Run(32, 8, updates=[10, 20], rewards=[.2, .3]), ...], budget=1e6)    # plan.n, plan.B_p, plan.M

    >>> [round(float(n_star(C, L=6.09, s=4.75, log10_C0=5.84, b=2.73))) for C in (10**4.5, 10**5.84, 10**6.5)]
    [7, 55, 379]

Symbols: B_p, n, M, C as above, R reward (a pass rate), G shapes (B_p, n), S values of n, P values of C, D draws.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import expit

FALL = 0.1  # a run is unstable if its reward, averaged over three evaluations, falls this far below the highest before
STEEPEST = 10.0  # B of any curve is at most this
ENVELOPE_POINTS = 40  # values of C, evenly in log C, at which the best n is read
REACH = 1.1  # a curve counts this far beyond its first and last C: runs of equal budgets end at C that differ a little
DRAWS = 100  # of the bootstrap
NO_RISE = 1e-3  # a curve that rises by less over its run is flat
ROUNDING = 0.43  # steps of the grid that n* may be off, such that 95 % of the intervals hold in fit_benchmark.py
MOST = 10**12  # B_p, n and updates are below this
BAD_INPUT = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError, csv.Error)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One run of the grid: its rewards after `updates` updates each. ValueError: values that no run has."""

    B_p: int
    n: int
    updates: Sequence[float]
    rewards: Sequence[float]

    def __post_init__(self) -> None:
        M, R = np.asarray(self.updates, float), np.asarray(self.rewards, float)
        broken = ""
        if not all(1 <= x < MOST and x % 1 == 0 for x in (self.B_p, self.n)):
            broken = "B_p and n must be whole numbers from 1 on"
        elif not (M.shape == R.shape == (M.size,) and np.all((M >= 0) & (np.diff(M, prepend=-1) > 0) & (M < MOST))):
            broken = "updates must rise from 0 on, as many as rewards; sort them, and keep runs apart (column run)"
        elif not np.all((R >= 0) & (R <= 1)):
            broken = "rewards must lie in [0, 1]; leave out missing ones, divide percents by 100"
        if broken:
            raise ValueError(f"B_p {self.B_p}, n {self.n}: {broken}")

    @property
    def C(self) -> np.ndarray:
        """Completions sampled up to each reward."""
        return self.B_p * self.n * np.asarray(self.updates, float)

    @property
    def standing(self) -> np.ndarray:
        """True for rewards that do not lie FALL below an earlier one, each averaged with its two neighbors. (Of single
        evaluations of 256 problems, one in a hundred lies there by chance, and two of five runs of 60 have one.)"""
        padded = np.pad(np.asarray(self.rewards, float), 1, mode="edge")
        means = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
        return means > np.maximum.accumulate(means) - FALL

    def fitted(self, points: str = "all") -> np.ndarray:
        """True for the rewards at C > 0 that a curve is fitted to: "all" but those of a collapse, or the "records"."""
        if points not in ("all", "records"):
            raise ValueError(f"points must be all or records, not {points!r}")
        return (self.C > 0) & (self.standing if points == "all" else record_points(self.C, self.rewards))


# ------------------------------------------------------------------------------------------------------ one run's curve
class Curve(NamedTuple):
    """A fitted sigmoid R0 + gain / (1 + (C_mid / C)^B)."""

    R0: float
    gain: float
    B: float
    C_mid: float
    covariance: np.ndarray = np.zeros((4, 4))  # of R0, gain, log B and log C_mid

    def __call__(self, C: ArrayLike) -> np.ndarray:
        """The curve at C, any shape."""
        return self.R0 + self.gain * expit(self.B * np.log(np.divide(C, self.C_mid)))

    def gradient(self, C: np.ndarray) -> np.ndarray:
        """(len(C), 4), by R0, gain, log B and log C_mid."""
        z = self.B * np.log(C / self.C_mid)
        share = expit(z)
        slope = self.gain * share * (1 - share)
        return np.stack([np.ones_like(z), share, slope * z, -slope * self.B], 1)


def fit_curve(C: np.ndarray, y: np.ndarray, low: float, high: float, start: Curve | None = None) -> Curve:
    """The rising sigmoid of least squares through y at C, with R0 from `low` to `high` and a gain of at most their
    difference: looked for from `start`, or from ten places."""
    x = np.log(C)
    bounds = np.array([[low, 0, math.log(0.2), x.min() - 3], [high, high - low, math.log(STEEPEST), x.max() + 3]])
    starts = [[y.min(), np.ptp(y), log_B, at] for log_B in (0.4, 1.2) for at in np.linspace(x.min(), x.max(), 5)]
    starts, exact = (starts, 1e-12) if start is None else ([[*start[:2], *np.log(start[2:4])]], 1e-6)

    def curve(p: np.ndarray) -> Curve:
        return Curve(float(p[0]), float(p[1]), math.exp(p[2]), math.exp(p[3]))

    options = {"bounds": bounds, "xtol": exact, "ftol": exact, "gtol": exact}
    found = [
        least_squares(lambda p: curve(p)(C) - y, np.clip(p, *bounds), lambda p: curve(p).gradient(C), **options)
        for p in starts
    ]
    best = min(found, key=lambda result: result.cost)
    variance = 2 * best.cost / max(1, len(C) - 4)
    return curve(best.x)._replace(covariance=variance * np.linalg.pinv(best.jac.T @ best.jac))


def record_points(C: ArrayLike, R: ArrayLike, bin_width: float = 0.02) -> np.ndarray:
    """(n,) True where R is the first, in the order of C, in a higher bin than all before it."""
    order = np.argsort(C, kind="stable")
    bins = np.floor(np.asarray(R, float)[order] / bin_width + 1e-9)
    before = np.concatenate([[-np.inf], np.fmax.accumulate(bins)[:-1]])
    return (bins > before)[np.argsort(order)]


def fit_run(*runs: Run, points: str = "all") -> Curve:
    """The sigmoid through the `points` (`Run.fitted`) of all runs of one (B_p, n). ValueError: fewer than 4."""
    keep = np.concatenate([run.fitted(points) for run in runs])
    C, R = (np.concatenate(values)[keep] for values in ([run.C for run in runs], [run.rewards for run in runs]))
    if len(C) < 4:
        shape = f"B_p {runs[0].B_p}, n {runs[0].n}"
        raise ValueError(f"{shape} has {len(C)} points to fit ({points}), and a curve needs 4: leave it out")
    return fit_curve(C, R, 0, 1)


# ------------------------------------------------------------------------------------------------ the best n for each C
def n_star(C: ArrayLike, L: ArrayLike, s: ArrayLike, log10_C0: ArrayLike, b: ArrayLike) -> np.ndarray:
    """The best number of rollouts for C completions: 2^(L / (1 + exp(-s (log10 C - log10 C0))) + b)."""
    return 2 ** (L * expit(s * (np.log10(C) - log10_C0)) + b)


class BestRollouts(NamedTuple):
    """A fitted n*(C)."""

    L: float
    s: float
    log10_C0: float
    b: float
    draws: np.ndarray  # (D, 4), these four as they may also be; D = 0: no intervals

    def __call__(self, C: float) -> float:
        """n*(C)."""
        return float(n_star(C, self.L, self.s, self.log10_C0, self.b))

    def interval(self, C: float) -> Interval:
        """95 % interval of n*(C); nan without draws."""
        n = n_star(C, *self.draws.T) if len(self.draws) else math.nan
        return float(np.quantile(n, 0.025)), float(np.quantile(n, 0.975))

    @property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the four parameters, if there are draws. Those of a law that saturates at neither end are
        as wide as the search: only `interval` then says something."""
        if not len(self.draws):
            return {}
        low, high = np.quantile(self.draws, (0.025, 0.975), axis=0)
        high[1] = math.inf if high[1] > 0.99 * STEEPEST * math.log(10) else high[1]  # a step has no greatest s
        return dict(zip(("L", "s", "log10_C0", "b"), zip(low.tolist(), high.tolist(), strict=True), strict=True))


def fit_n_star(C: ArrayLike, n: Sequence[float], again: Sequence[np.ndarray] = ()) -> BestRollouts:
    """The law through best rollouts n at C, by least squares on log2 n. Its intervals come from fits to `again`: n at
    these C as they may also be. ValueError: fewer than 5 points, or the same n everywhere."""
    C = np.asarray(C, float)
    if len(C) < 5:
        raise ValueError(f"the law needs at least 5 values of C, not {len(C)}")
    if min(n) == max(n):
        raise ValueError(f"n* is {n[0]:g} at every C, so nothing shows how it grows; widen C or the grid of n")
    best = fit_curve(C, np.log2(n), -2, 20)
    curves = [best, *(fit_curve(C, np.log2(other), -2, 20, best) for other in again)]
    laws = [(c.gain, c.B * math.log(10), math.log10(c.C_mid), c.R0) for c in curves]  # the same sigmoid, in log10 C
    return BestRollouts(*laws[0], np.reshape(laws[1:], (-1, 4)))


@dataclass(frozen=True)
class Grid:
    """All runs of a grid, analyzed together."""

    curves: list[tuple[list[Run], Curve]]  # the runs of one (B_p, n), and their curve
    C: np.ndarray  # (P,) that at least two n have reached, P = ENVELOPE_POINTS or fewer
    best_n: np.ndarray  # (P,) of the highest curve there
    reward: np.ndarray  # (P,) the upper envelope
    law: BestRollouts

    tried = property(lambda self: sorted({same[0].n for same, _ in self.curves}))


def fit_grid(runs: Sequence[Run], points: str = "all") -> Grid:
    """Curves, envelope and n*(C) with its intervals. ValueError: a (B_p, n) with too few points for a curve, fewer than
    two n, no two that reach one C, no reward or n* rises."""
    shapes: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        shapes.setdefault((run.B_p, run.n), []).append(run)
    curves = [(same, fit_run(*same, points=points)) for same in shapes.values()]
    rollouts, of = np.unique([same[0].n for same, _ in curves], return_inverse=True)  # (S,), (G,)
    if len(rollouts) < 2:
        raise ValueError(f"n* needs runs of at least two values of n, not of {rollouts.tolist()}")
    # A curve says nothing of its run after a collapse.
    every_C = [np.concatenate([run.C[run.fitted("all")] for run in same]) for same, _ in curves]
    first, last = (np.array([f(C) for C in every_C]) for f in (np.min, np.max))  # (G,)
    least, most = (sorted(f(v[of == i]) for i in range(len(rollouts))) for f, v in ((min, first), (max, last)))
    if least[1] >= most[-2]:
        raise ValueError("the runs need at least two values of n that reach the same C")
    if all(np.ptp(curve(C)) < NO_RISE for (_, curve), C in zip(curves, every_C, strict=True)):
        raise ValueError("no run's reward rises, so there is nothing to compare; make the runs longer")
    C = np.geomspace(least[1], most[-2], ENVELOPE_POINTS)
    there = (first[:, None] <= C * REACH) & (last[:, None] >= C / REACH)  # (G, ENVELOPE_POINTS)
    compared = np.sum([there[of == i].any(0) for i in range(len(rollouts))], 0) > 1
    C, there = C[compared], there[:, compared]  # (P,), (G, P)
    rewards = np.where(there, [curve(C) for _, curve in curves], -np.inf)  # (G, P)

    # The bootstrap. To first order a curve is off at C by its gradient there times a draw from N(0, covariance).
    rng = np.random.default_rng(0)
    gradients = np.stack([curve.gradient(C) for _, curve in curves])  # (G, P, 4)
    errors = [rng.multivariate_normal(np.zeros(4), curve.covariance, DRAWS, method="eigh") for _, curve in curves]
    others = rewards[:, None] + np.einsum("gcp,gdp->gdc", gradients, errors)  # (G, DRAWS, P)
    off = ROUNDING * np.median(np.diff(np.log2(rollouts)))  # the best n was looked for among these only
    rounded = np.log2(rollouts) + rng.uniform(-off, off, (DRAWS, len(rollouts)))
    again = 2 ** np.take_along_axis(rounded, of[others.argmax(0)], axis=1)  # (DRAWS, P)
    best = rollouts[of[rewards.argmax(0)]]
    return Grid(curves, C, best, rewards.max(0), fit_n_star(C, best, again))


# ----------------------------------------------------------------------------------------------------------- the recipe
class Plan(NamedTuple):
    """How to spend a budget, and what that rests on."""

    n: int
    B_p: int
    M: int
    rests_on: list[str]
    grid: Grid


def recommend(runs: Sequence[Run], budget: float, points: str = "all") -> Plan:
    """n (a power of 2), B_p and M for `budget` completions from cheap runs over a grid of (B_p, n). ValueError: too few
    runs for an envelope, no stable B_p, a budget below all runs or below one update."""
    grid = fit_grid(runs, points)
    C, law, tried = grid.C, grid.law, grid.tried
    if not C[0] <= budget < math.inf:
        below = f"lies below what the runs compare, {C[0]:g} to {C[-1]:g}"
        raise ValueError(f"a budget of {budget:g} completions {below if budget < C[0] else 'is no finite number'}")
    n = 2 ** max(1, round(math.log2(law(budget))))  # a single rollout has nothing to be compared with
    B_p = min({run.B_p for run in runs} - {run.B_p for run in runs if not run.standing.all()}, default=0)
    if not B_p:
        raise ValueError(f"no B_p is stable: every one has a run that falls by {FALL}; raise B_p or lower --lr")
    M = int(budget // (B_p * n))
    if M < 1:
        raise ValueError(f"a budget of {budget:g} completions is less than one update of {B_p} x {n}")
    used, total = sum(run.fitted(points).sum() for run in runs), sum(len(run.rewards) for run in runs)
    at_start, fell = sum((run.C == 0).sum() for run in runs), sum((~run.standing).sum() for run in runs)
    low, high = law.interval(budget)
    said = [
        f"{len(runs)} runs, n from {tried[0]} to {tried[-1]}, compared from C = {C[0]:.3g} to {C[-1]:.3g}",
        f"{used} of {total} rewards are fitted ({points}); {at_start} at C = 0 and {fell} after a collapse are not",
        f"n* at {budget:.3g} is {law(budget):.1f}, 95 % interval {low:.1f} to {high:.1f}",
        f"B_p {B_p} is the smallest of which no run falls by {FALL}",
    ]
    if budget > C[-1]:
        said.append(f"the budget is {budget / C[-1]:.1f} times the largest C that was compared: n* is an extrapolation")
    if grid.best_n.max() == tried[-1]:
        said.append(f"the largest n that was tried, {tried[-1]}, is the best at some C: b + L is its edge; try larger")
    if grid.best_n.min() == tried[0] > 1:
        said.append(f"the smallest n that was tried, {tried[0]}, is the best at some C: b is its edge; try smaller")
    return Plan(n, B_p, M, said, grid)


def of_k(correct: Sequence[int], total: int, k: int) -> dict[str, float]:
    """Means over prompts of `total` samples each, `correct` of them right: `average`, `best` (pass@k, at least one of k
    is right) and `worst` (all k are), both unbiased. Raises ValueError if k is not from 1 to `total`."""
    if not 1 <= k <= total or min(correct) < 0 or max(correct) > total:
        raise ValueError(f"k must be from 1 to {total}, and no count below 0 or above {total}")
    sets = math.comb(total, k) * len(correct)  # of k samples each
    wrong, right = (sum(math.comb(c, k) for c in some) for some in ([total - c for c in correct], correct))
    return {"average": sum(correct) / total / len(correct), "best": 1 - wrong / sets, "worst": right / sets}


# --------------------------------------------------------------------------------------- reader, picture, command line
def read(name: str, y: str) -> tuple[list[Run], int]:
    """The run of a folder of train.py, or those of a CSV with columns B_p, n, step and `y`, and `run` where there are
    several of one (B_p, n); and how many rows lack a number. Raises BAD_INPUT, a ValueError among it for what `Run`
    refuses, and a folder whose steps sampled other numbers of completions."""
    path, runs, missing = Path(name), dict[tuple, list[tuple[float, float]]](), 0
    if path.is_dir():
        log = (path / "metrics.jsonl").read_text().splitlines()  # it holds the flags, once more after each resume
        flags = [json.loads(line)["config"] for line in log if line.startswith('{"config"')]
        shapes = {(f["batch_prompts"], f["rollouts"], bool(f.get("dynamic_sampling"))) for f in flags}
        if len(shapes) != 1 or (shape := shapes.pop())[2]:
            raise ValueError("it needs one --batch_prompts and --rollouts, resumed or not, and no --dynamic_sampling")
        lines = (path / "eval.jsonl").read_text().splitlines()
        rows = [json.loads(line) | {"B_p": shape[0], "n": shape[1]} for line in lines]
    else:
        rows = [*csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())]
    if not rows:
        raise ValueError("it has no row")
    for row in rows:
        B_p, n, M, R = (math.nan if row[k] in (None, "") else float(row[k]) for k in ("B_p", "n", "step", y))
        if not math.isfinite(B_p + n + M + R):
            missing += 1
            continue
        if B_p % 1 or n % 1:
            raise ValueError(f"B_p and n must be whole numbers, not {B_p:g} and {n:g}")
        runs.setdefault((int(B_p), int(n), row.get("run")), []).append((M, R))
    return [Run(B_p, n, *zip(*sorted(points), strict=True)) for (B_p, n, _), points in runs.items()], missing


def plot(grid: Grid, path: str) -> None:
    """Writes a PNG. Left: rewards, fitted curves, their envelope. Right: the best n, and its law."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for same, curve in grid.curves:
        color = f"C{grid.tried.index(same[0].n) % 10}"
        for run in same:
            left.plot(run.C, run.rewards, "o", color=color, ms=3)
        C = np.unique(np.concatenate([run.C[run.C > 0] for run in same]))
        left.plot(C, curve(C), color=color, lw=1, label=f"n = {same[0].n}, B_p = {same[0].B_p}")
    left.plot(grid.C, grid.reward, "k--", lw=2, label="envelope")
    C = np.geomspace(grid.C[0], grid.C[-1] * 3, 100)
    right.plot(grid.C, grid.best_n, "ko", ms=4, label="best n that was tried")
    right.plot(C, [grid.law(c) for c in C], "C0", label="n*(C)")
    right.fill_between(C, *np.transpose([grid.law.interval(c) for c in C]), color="C0", alpha=0.2, label="95 %")
    left.set(xscale="log", xlabel="completions C", ylabel="reward")
    right.set(xscale="log", yscale="log", xlabel="completions C", ylabel="rollouts per prompt")
    for axes in (left, right):
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", help="folders of runs over a grid of (batch_prompts, rollouts), or a CSV")
    add("--budget", type=float, required=True, help="completions to spend")
    add("--y", default="pass_rate", help="column of the reward")
    add("--points", default="all", choices=("all", "records"), help="what a curve is fitted to")
    add("--plot", metavar="PNG", help="draw the runs, their envelope and n*(C)")
    args = parser.parse_args(argv)
    place, runs, missing = "", list[Run](), 0
    try:
        for name in args.runs:
            place = f"{name}: "
            found, lacking = read(name, args.y)
            runs, missing = runs + found, missing + lacking
        place = ""
        plan = recommend(runs, args.budget, args.points)
        if args.plot:
            plot(plan.grid, args.plot)
    except BAD_INPUT as error:
        said = f"no column {error}: B_p, n, step and --y are needed" if isinstance(error, KeyError) else error
        print(f"isocompute.py: {place}{said}; rows without a number, left out: {missing}", file=sys.stderr)
        return 2
    print(f"n = {plan.n} rollouts, B_p = {plan.B_p} prompts, M = {plan.M} updates")
    for name, (low, high) in plan.grid.law.intervals.items():
        print(f"{name:<9}{getattr(plan.grid.law, name):8.2f}  [{low:.2f}, {high:.2f}]")
    print(*(f"- {line}" for line in plan.rests_on), f"- rows without a number, left out: {missing}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
