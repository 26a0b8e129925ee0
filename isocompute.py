"""IsoCompute: how should a budget of sampled completions be spent: on prompts, on rollouts per prompt, or on updates?

PROBLEM. A run that samples B_p prompts a batch and n rollouts a prompt for M updates costs, in completions,

    C = B_p n M

At equal C few rollouts give many updates on noisy advantages, and many rollouts give few updates on good ones.

IDEA (Cheng et al. 2026, arXiv 2603.12151). Make cheap runs over a grid of (B_p, n). Each run is a curve of reward
against C. At each C some n lies on the upper envelope of all curves; this best n grows with C and saturates:

    log2 n*(C) = L / (1 + exp(-s (log10 C - log10 C0))) + b

from 2^b rollouts for a small budget to 2^(b + L) for a large one, half way (in log2) at C0. Hard prompts saturate
earlier than easy ones. For B_p there is no such law: any value that is stable will do.

How a run becomes a curve. A monotone sigmoid, R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), is fitted to the points of
the run. The paper keeps its record-breaking points: the reward is cut into bins, and the first point in each new
highest bin stays (`points="records"`). Records are lucky points, so they lift a curve the more, the more often it was
evaluated: in simulations with evaluations of 500 problems, n* then came out 1.3 to 1.7 times too small from C0 on
(tools/law_benchmark.py). The default is therefore every point but those of a collapse, FALL below an earlier one.

How sure n* is. `fit_grid` draws the curves again within their errors, moves each n that was tried by up to ROUNDING
steps of the grid, as the best n was looked for among these only, and fits the law again (a parametric bootstrap).

The recipe, as one function (`recommend`): 1 cheap runs with small M; 2 fit them; 3 n* for the budget; 4 the smallest
stable B_p; 5 all that is left into M.

What more rollouts buy. On easy prompts they *sharpen*: the average and the worst of k rise. On hard ones they *cover*:
the best of k (pass@k) rises, as rare solutions are found. `of_k` gives the three from counts of correct answers.

    python isocompute.py runs/grid/* --budget 1e6 --plot grid.png   # or a CSV with columns B_p, n, step and pass_rate

    >>> [round(float(n_star(C, L=6.09, s=4.75, log10_C0=5.84, b=2.73))) for C in (10**4.5, 10**5.84, 10**6.5)]
    [7, 55, 379]

Symbols: B_p prompts per batch, n rollouts per prompt, M updates, C completions, R reward (a pass rate), G runs.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import comb, expit
from scipy.stats import t as student

FALL = 0.1  # a run is unstable if its reward falls this far below the highest before
ENVELOPE_POINTS = 40  # values of C, evenly in log C, at which the best n is read
REACH = 1.1  # a curve counts this far beyond its first and last C: runs of equal budgets end at C that differ a little
DRAWS = 100  # of the bootstrap
ROUNDING = 0.43  # n* may be this many steps of the grid off: less than half of one, since many steps make one law, and
# such that 95 % of the intervals hold in tools/law_benchmark.py
Interval = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One run of the grid: its rewards after `updates` updates each."""

    B_p: int
    n: int
    updates: Sequence[float]
    rewards: Sequence[float]

    @property
    def C(self) -> np.ndarray:
        """Completions sampled up to each reward."""
        return self.B_p * self.n * np.asarray(self.updates, float)

    @property
    def standing(self) -> np.ndarray:
        """True for rewards that do not lie FALL below an earlier one."""
        rewards = np.asarray(self.rewards, float)
        return rewards > np.maximum.accumulate(rewards) - FALL


# ------------------------------------------------------------------------------------------------------ one run's curve


class Curve(NamedTuple):
    """A fitted sigmoid and the (4, 4) covariance of R0, A, log B and log C_mid."""

    R0: float
    A: float
    B: float
    C_mid: float
    covariance: np.ndarray

    def __call__(self, C: np.ndarray) -> np.ndarray:
        """R0 + (A - R0) / (1 + (C_mid / C)^B)."""
        return self.R0 + (self.A - self.R0) * expit(self.B * np.log(C / self.C_mid))

    def gradient(self, C: np.ndarray) -> np.ndarray:
        """(len(C), 4), by R0, A, log B and log C_mid."""
        z = self.B * np.log(C / self.C_mid)
        share = expit(z)
        slope = (self.A - self.R0) * share * (1 - share)
        return np.stack([1 - share, share, slope * z, -slope * self.B], 1)


def record_points(C: ArrayLike, R: ArrayLike, bin_width: float = 0.02) -> np.ndarray:
    """(n,) True where R is the first, in the order of C, in a higher bin than all before it."""
    order = np.argsort(C, kind="stable")
    bins = np.floor(np.asarray(R, float)[order] / bin_width + 1e-9)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(bins)[:-1]])
    mask: np.ndarray = np.zeros(len(bins), bool)
    mask[order] = bins > before
    return mask


def fit_run(run: Run, points: str = "all") -> Curve:
    """The monotone sigmoid through the `points` of a run: "all" but those of a collapse, or "records". Raises
    ValueError if there are fewer than 4 at C > 0."""
    if points not in ("all", "records"):
        raise ValueError(f"points must be all or records, not {points!r}")
    C, R = run.C, np.asarray(run.rewards, float)
    keep = (C > 0) & (run.standing if points == "all" else record_points(C, R))
    C, R = C[keep], R[keep]
    if len(C) < 4:
        raise ValueError(f"B_p {run.B_p}, n {run.n} has {len(C)} points to fit ({points}), and a curve needs 4")

    def curve(p: np.ndarray) -> Curve:
        return Curve(float(p[0]), float(p[1]), math.exp(p[2]), math.exp(p[3]), np.zeros((4, 4)))

    x = np.log(C)
    low, high = [0, 0, math.log(0.2), x.min() - 3], [1, 1, math.log(10), x.max() + 3]
    starts = [np.clip([R.min(), R.max(), 0.4, middle], low, high) for middle in np.linspace(x.min(), x.max(), 5)]
    found = [
        least_squares(lambda p: curve(p)(C) - R, start, lambda p: curve(p).gradient(C), bounds=(low, high))
        for start in starts
    ]
    best = min(found, key=lambda result: result.cost)
    variance = 2 * best.cost / max(1, len(C) - 4)
    return curve(best.x)._replace(covariance=variance * np.linalg.pinv(best.jac.T @ best.jac))


# ------------------------------------------------------------------------------------------------ the best n for each C


def n_star(C: float | np.ndarray, L: Any, s: Any, log10_C0: Any, b: Any) -> np.ndarray:
    """The best number of rollouts for C completions: 2^(L / (1 + exp(-s (log10 C - log10 C0))) + b)."""
    return 2 ** (L * expit(s * (np.log10(C) - log10_C0)) + b)


@dataclass(frozen=True)
class BestRollouts:
    """A fitted n*(C)."""

    L: float
    s: float
    log10_C0: float
    b: float
    draws: np.ndarray  # (D, 4) L, s, log10 C0, b as they may also be

    def __call__(self, C: float) -> float:
        """n*(C)."""
        return float(n_star(C, self.L, self.s, self.log10_C0, self.b))

    def interval(self, C: float) -> Interval:
        """95 % interval of n*(C)."""
        n = n_star(C, *self.draws.T)
        return float(np.quantile(n, 0.025)), float(np.quantile(n, 0.975))

    @property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the four parameters. Those of a law that saturates at neither end are as wide as the
        search: only `interval` then says something."""
        low, high = (np.quantile(self.draws, share, axis=0).tolist() for share in (0.025, 0.975))
        return dict(zip(("L", "s", "log10_C0", "b"), zip(low, high, strict=True), strict=True))


def search_law(x: np.ndarray, y: np.ndarray, start: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
    """Least squares for p = (L, log s, log10 C0, b) of y = log2 n at x = log10 C, from `start` or from many places:
    scipy's result, and the bounds (2, 4). The law never falls: L >= 0 and s > 0."""
    bounds = np.array([[0, math.log(0.2), x.min() - 1, -2], [20, math.log(50), x.max() + 1, 20]])
    starts = [start] if start is not None else [
        np.array([np.ptp(y), math.log(s), np.quantile(x, share), y.min()])
        for s in (2, 5, 10) for share in (0.25, 0.5, 0.75)
    ]  # fmt: skip
    exact = 1e-15 if start is None else 1e-6

    def residuals(p: np.ndarray) -> np.ndarray:
        return p[0] * expit(math.exp(p[1]) * (x - p[2])) + p[3] - y

    def gradient(p: np.ndarray) -> np.ndarray:  # (len(x), 4)
        share = expit(math.exp(p[1]) * (x - p[2]))
        slope = p[0] * share * (1 - share) * math.exp(p[1])
        return np.stack([share, slope * (x - p[2]), -slope, np.ones_like(x)], 1)

    options = {"bounds": bounds, "xtol": exact, "ftol": exact, "gtol": exact}
    found = [least_squares(residuals, np.clip(p, *bounds), gradient, **options) for p in starts]
    return min(found, key=lambda result: result.cost), bounds


def fit_n_star(C: Sequence[float], n: Sequence[float], again: Sequence[np.ndarray] = ()) -> BestRollouts:
    """The law through best rollouts n at C, by least squares on log2 n. Its intervals come from fits to `again`, other
    n at these C; without them from the residuals, as if the points were independent.

    Raises:
        ValueError: fewer than 5 points, a value that is not positive, or the same n everywhere.
    """
    x, y = np.asarray(C, float), np.asarray(n, float)
    if len(x) < 5 or x.shape != y.shape or not np.all((x > 0) & (y > 0)):
        raise ValueError("the law needs at least 5 positive values of C, and a positive n for each")
    if np.ptp(y) == 0:
        raise ValueError(f"n* is {y[0]:g} at every C, so nothing shows how it grows; widen C or the grid of n")
    x = np.log10(x)
    best, bounds = search_law(x, np.log2(y))
    if len(again):
        draws = np.array([search_law(x, np.log2(other), best.x)[0].x for other in again])
    else:
        wider = (student.ppf(0.975, max(1, len(x) - 4)) / 1.96) ** 2  # for the residuals of a few points
        covariance = wider * 2 * best.cost / max(1, len(x) - 4) * np.linalg.pinv(best.jac.T @ best.jac)
        draws = np.random.default_rng(0).multivariate_normal(best.x, covariance, 10 * DRAWS, method="eigh")
    draws = np.clip(draws, *bounds)
    draws[:, 1] = np.exp(draws[:, 1])
    L, log_s, log10_C0, b = map(float, best.x)
    return BestRollouts(L, math.exp(log_s), log10_C0, b, draws)


@dataclass(frozen=True)
class Grid:
    """All runs of a grid, analyzed together."""

    curves: list[tuple[Run, Curve]]
    C: np.ndarray  # (ENVELOPE_POINTS,) that at least two n have reached
    best_n: np.ndarray  # (ENVELOPE_POINTS,) of the highest curve there
    reward: np.ndarray  # (ENVELOPE_POINTS,) the upper envelope
    law: BestRollouts
    dropped: list[str]  # why a run was left out, one sentence each


def fit_grid(runs: Sequence[Run], points: str = "all") -> Grid:
    """Curves, envelope and n*(C) with its intervals. ValueError: no two n have reached the same C, or n* is the same
    everywhere."""
    curves, dropped = [], []
    for run in runs:
        try:
            curves.append((run, fit_run(run, points)))
        except ValueError as error:
            dropped.append(str(error))
    rollouts, of = np.unique([run.n for run, _ in curves], return_inverse=True)
    spans = np.array([(run.C[run.C > 0].min(), run.C.max()) for run, _ in curves]).reshape(-1, 2)  # (G, 2)
    least = sorted(spans[of == i, 0].min() for i in range(len(rollouts)))
    most = sorted(spans[of == i, 1].max() for i in range(len(rollouts)))
    if len(rollouts) < 2 or least[1] >= most[-2]:
        raise ValueError("; ".join(["the runs need at least two values of n that reach the same C", *dropped]))
    C = np.geomspace(least[1], most[-2], ENVELOPE_POINTS)
    rewards = np.array([curve(C) for _, curve in curves])  # (G, ENVELOPE_POINTS)
    rewards[(spans[:, :1] > C * REACH) | (spans[:, 1:] < C / REACH)] = -np.inf

    rng = np.random.default_rng(0)
    gradients = np.stack([curve.gradient(C) for _, curve in curves])  # (G, ENVELOPE_POINTS, 4)
    errors = [rng.multivariate_normal(np.zeros(4), curve.covariance, DRAWS, method="eigh") for _, curve in curves]
    others = rewards[:, None] + np.einsum("gcp,gdp->gdc", gradients, errors)  # (G, DRAWS, ENVELOPE_POINTS)
    off = ROUNDING * np.median(np.diff(np.log2(rollouts)))  # the best n was looked for among these only
    rounded = np.log2(rollouts) + rng.uniform(-off, off, (DRAWS, len(rollouts)))
    again = 2 ** np.take_along_axis(rounded, of[others.argmax(0)], axis=1)  # (DRAWS, ENVELOPE_POINTS)
    best = rollouts[of[rewards.argmax(0)]]
    return Grid(curves, C, best, rewards.max(0), fit_n_star(C, best, again), dropped)


# ----------------------------------------------------------------------------------------------------------- the recipe


@dataclass(frozen=True)
class Plan:
    """How to spend a budget, and what that rests on."""

    n: int
    B_p: int
    M: int
    rests_on: tuple[str, ...]
    grid: Grid


def recommend(runs: Sequence[Run], budget: float, points: str = "all") -> Plan:
    """n, B_p and M for `budget` completions from cheap runs over a grid of (B_p, n). n is a power of two.

    Raises:
        ValueError: too few runs for an envelope, no stable B_p, a budget below all runs or below one update.
    """
    grid = fit_grid(runs, points)
    C, law, tried = grid.C, grid.law, sorted({run.n for run, _ in grid.curves})
    if budget < C[0]:
        raise ValueError(f"a budget of {budget:g} completions lies below what the runs compare, {C[0]:g} to {C[-1]:g}")
    n = 2 ** max(0, round(math.log2(law(budget))))
    stable = [B_p for B_p in sorted({run.B_p for run in runs}) if all(r.standing.all() for r in runs if r.B_p == B_p)]
    if not stable:
        raise ValueError(f"no B_p is stable: every one has a run that falls by {FALL}; raise B_p or lower --lr")
    M = int(budget // (stable[0] * n))
    if M < 1:
        raise ValueError(f"a budget of {budget:g} completions is less than one update of {stable[0]} x {n}")
    low, high = law.interval(budget)
    said = [
        f"{len(grid.curves)} runs, n from {tried[0]} to {tried[-1]}, compared from C = {C[0]:.3g} to {C[-1]:.3g}",
        f"n* at {budget:.3g} is {law(budget):.1f}, 95 % interval {low:.1f} to {high:.1f}",
        f"B_p {stable[0]} is the smallest of which no run falls by {FALL}",
        *(f"left out: {reason}" for reason in grid.dropped),
    ]
    if budget > C[-1]:
        said.append(f"the budget is {budget / C[-1]:.1f} times the largest C that was compared: n* is an extrapolation")
    if grid.best_n[-1] == tried[-1]:
        said.append(f"the best n at the largest C is the largest that was tried, {tried[-1]}: try larger ones")
    if odd := [n for n in tried if n & (n - 1)]:
        said.append(f"n = {', '.join(map(str, odd))} is no power of two; the n proposed is rounded to one all the same")
    return Plan(n, stable[0], M, tuple(said), grid)


def of_k(correct: Sequence[int], total: int, k: int) -> dict[str, float]:
    """Means over prompts of `total` samples each, `correct` of them right: `average`, `best` (pass@k, at least one of k
    is right) and `worst` (all k are), both unbiased. Raises ValueError if k is not from 1 to `total`."""
    c = np.asarray(correct)
    if not 1 <= k <= total or c.min() < 0 or c.max() > total:
        raise ValueError(f"k must be from 1 to {total}, and no count below 0 or above it")
    ways = comb(total, k)
    best, worst = 1 - comb(total - c, k) / ways, comb(c, k) / ways
    return {"average": float(np.mean(c / total)), "best": float(np.mean(best)), "worst": float(np.mean(worst))}


# --------------------------------------------------------------------------------------------------------- command line


def read(name: str, y: str, k: int) -> list[Run]:
    """The run of a folder of train.py, or the runs of a CSV with columns B_p, n, step and `y`. With y = average, best
    or worst the rewards are those `of_k`, from the folder's eval_counts.jsonl. ValueError names what is missing."""
    path = Path(name)
    if path.is_dir():
        flags = json.loads((path / "config.json").read_text())
        counted = y in ("average", "best", "worst")
        log = path / ("eval_counts.jsonl" if counted else "eval.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        if counted:
            rows = [{"step": r["step"], y: of_k(r["correct"], r["n_samples"], k or r["n_samples"])[y]} for r in rows]
        rows = [row | {"B_p": flags["batch_prompts"], "n": flags["rollouts"]} for row in rows]
    else:
        rows = list(csv.DictReader(path.read_text().splitlines()))
    if missing := [c for c in ("B_p", "n", "step", y) for row in rows[:1] if c not in row]:
        raise ValueError(f"{name} has no column {missing[0]}, but {', '.join(rows[0])}; --y names the reward")
    runs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in rows:
        runs.setdefault((int(row["B_p"]), int(row["n"])), []).append((float(row["step"]), float(row[y])))
    return [Run(*shape, *zip(*sorted(points), strict=True)) for shape, points in runs.items()]


def plot(grid: Grid, path: str) -> None:
    """Writes a PNG. Left: rewards, record points filled, fitted curves, envelope. Right: the best n, and its law."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rollouts = sorted({run.n for run, _ in grid.curves})
    for run, curve in grid.curves:
        C, R, color = run.C, np.asarray(run.rewards), f"C{rollouts.index(run.n) % 10}"
        records = record_points(C, R)
        left.plot(C[~records], R[~records], "o", color=color, mfc="none", ms=3, alpha=0.4)
        left.plot(C[records], R[records], "o", color=color, ms=3)
        left.plot(C[C > 0], curve(C[C > 0]), color=color, lw=1, label=f"n = {run.n}, B_p = {run.B_p}")
    left.plot(grid.C, grid.reward, "k--", lw=2, label="envelope")
    C = np.geomspace(grid.C[0], grid.C[-1] * 3, 100)
    right.plot(grid.C, grid.best_n, "ko", ms=4, label="best n that was tried")
    right.plot(C, [grid.law(c) for c in C], "C0", label="n*(C)")
    right.fill_between(C, *np.transpose([grid.law.interval(c) for c in C]), color="C0", alpha=0.2, label="95 %")
    left.set(xscale="log", xlabel="completions C", ylabel="reward (filled: record points)")
    right.set(xscale="log", yscale="log", xlabel="completions C", ylabel="rollouts per prompt")
    for axes in (left, right):
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="folders of runs over a grid of (batch_prompts, rollouts), or a CSV")
    parser.add_argument("--budget", type=float, default=0.0, help="completions to spend")
    parser.add_argument("--y", default="pass_rate", help="the reward: a column, or average, best or worst (of k)")
    parser.add_argument("--k", type=int, default=0, help="of best and worst (default: all samples of a prompt)")
    parser.add_argument("--points", default="all", choices=("all", "records"), help="what a curve is fitted to")
    parser.add_argument("--plot", metavar="PNG", help="draw the runs, their envelope and n*(C)")
    args = parser.parse_args(argv)
    if not args.runs:
        parser.print_help()
        return 0
    try:
        plan = recommend([run for name in args.runs for run in read(name, args.y, args.k)], args.budget, args.points)
        if args.plot:
            plot(plan.grid, args.plot)
    except (OSError, KeyError, ValueError) as error:
        print(f"isocompute.py: {error}", file=sys.stderr)
        return 2
    print(f"n = {plan.n} rollouts, B_p = {plan.B_p} prompts, M = {plan.M} updates")
    for name, (low, high) in plan.grid.law.intervals.items():
        print(f"{name:<9}{getattr(plan.grid.law, name):8.2f}  [{low:.2f}, {high:.2f}]")
    print(*(f"- {line}" for line in plan.rests_on), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
