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
and the more often a curve was evaluated, the more they lift it. In simulations n* came out 1.3 to 1.7 times too small
from C0 on (`points="records"`). The default is every point but those of a collapse (`Run.standing`).

HOW SURE n* IS. A parametric bootstrap: `fit_grid` draws the curves again within their errors, moves each n that was
tried by up to ROUNDING steps of the grid (in log2 n), because the best n could only be one of those tried, and fits the
law again. It leaves out how far two seeds of one shape differ, and that the curves may have another form.

THE RECIPE (`recommend`): cheap runs, small M; fit them; n* for the budget; the smallest stable B_p; the rest into M.

WHAT MORE ROLLOUTS BUY. On easy prompts they *sharpen*: the average and the worst of k rise. On hard ones they *cover*:
the best of k (pass@k) rises, as rare solutions are found. `of_k` gives the three from counts of correct answers.

    plan = recommend([Run(32, 8, updates=[10, 20], rewards=[.2, .3]), ...], budget=1e6)    # plan.n, plan.B_p, plan.M

    >>> [round(float(n_star(C, L=6.09, s=4.75, log10_C0=5.84, b=2.73))) for C in (10**4.5, 10**5.84, 10**6.5)]
    [7, 55, 379]

`python isocompute.py` prints a worked example.

Symbols: B_p, n, M, C as above, R reward (a pass rate), G shapes (B_p, n), S values of n, P values of C, D draws.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
ROUNDING = 0.43  # steps of the grid that n* may be off, such that 95 % of the intervals hold in simulations
MOST = 10**12  # B_p, n and updates are below this
Array = np.ndarray
Interval = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One run of the grid: its rewards after `updates` updates each. ValueError: values that no run has."""

    B_p: int
    n: int
    updates: Sequence[float]
    rewards: Sequence[float]

    def __post_init__(self) -> None:
        M = np.asarray(self.updates, float)
        R = np.asarray(self.rewards, float)
        reason = ""
        if not all(1 <= x < MOST and x % 1 == 0 for x in (self.B_p, self.n)):
            reason = "B_p and n must be whole numbers from 1 on"
        elif M.ndim != 1 or M.shape != R.shape or not np.all((np.diff(M, prepend=-1) > 0) & (M >= 0) & (M < MOST)):
            reason = "updates must rise from 0 on, as many as rewards; sort them, and keep runs apart"
        elif not np.all((R >= 0) & (R <= 1)):
            reason = "rewards must lie in [0, 1]; leave out missing ones, divide percents by 100"
        if reason:
            raise ValueError(f"B_p {self.B_p}, n {self.n}: {reason}")

    @property
    def C(self) -> Array:
        """Completions sampled up to each reward."""
        return self.B_p * self.n * np.asarray(self.updates, float)

    @property
    def standing(self) -> Array:
        """True for rewards that do not lie FALL below an earlier one, each averaged with its two neighbors. (Of single
        evaluations of 256 problems, one in a hundred lies there by chance, and two of five runs of 60 have one.)"""
        padded = np.pad(np.asarray(self.rewards, float), 1, mode="edge")
        means = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
        return means > np.maximum.accumulate(means) - FALL

    def fitted(self, points: str = "all") -> Array:
        """True for the rewards at C > 0 that a curve is fitted to: "all" but those of a collapse, or the "records"."""
        if points not in ("all", "records"):
            raise ValueError(f"points must be all or records, not {points!r}")
        chosen = self.standing if points == "all" else record_points(self.C, self.rewards)
        return (self.C > 0) & chosen


# ------------------------------------------------------------------------------------------------------ one run's curve
class Curve(NamedTuple):
    """A fitted sigmoid R0 + gain / (1 + (C_mid / C)^B)."""

    R0: float
    gain: float
    B: float
    C_mid: float
    covariance: Array = np.zeros((4, 4))  # of R0, gain, log B and log C_mid

    def __call__(self, C: ArrayLike) -> Array:
        """The curve at C, any shape."""
        return self.R0 + self.gain * expit(self.B * np.log(np.divide(C, self.C_mid)))

    def gradient(self, C: Array) -> Array:
        """(len(C), 4), by R0, gain, log B and log C_mid."""
        z = self.B * np.log(C / self.C_mid)
        share = expit(z)
        slope = self.gain * share * (1 - share)
        return np.stack([np.ones_like(z), share, slope * z, -slope * self.B], 1)


def fit_curve(C: Array, y: Array, low: float, high: float, start: Curve | None = None) -> Curve:
    """The rising sigmoid of least squares through y at C, with R0 from `low` to `high` and a gain of at most their
    difference: looked for from `start`, or from ten places."""
    x = np.log(C)
    lower = [low, 0, math.log(0.2), x.min() - 3]  # R0, gain, log B, log C_mid
    upper = [high, high - low, math.log(STEEPEST), x.max() + 3]
    if start is None:
        exact = 1e-12
        middles = np.linspace(x.min(), x.max(), 5)
        shapes = [(log_B, middle) for log_B in (0.4, 1.2) for middle in middles]
        starts = [[y.min(), np.ptp(y), *shape] for shape in shapes]
    else:
        exact = 1e-6
        starts = [[start.R0, start.gain, np.log(start.B), np.log(start.C_mid)]]

    def curve(p: Array) -> Curve:
        R0, gain, log_B, log_C_mid = p.tolist()
        return Curve(R0, gain, math.exp(log_B), math.exp(log_C_mid))

    def residuals(p: Array) -> Array:
        return curve(p)(C) - y

    def jacobian(p: Array) -> Array:
        return curve(p).gradient(C)

    options = {"bounds": (lower, upper), "xtol": exact, "ftol": exact, "gtol": exact}
    results = []
    for p in starts:
        inside = np.clip(p, lower, upper)
        results.append(least_squares(residuals, inside, jacobian, **options))
    best = min(results, key=lambda result: result.cost)
    variance = 2 * best.cost / max(1, len(C) - 4)
    covariance = variance * np.linalg.pinv(best.jac.T @ best.jac)
    return curve(best.x)._replace(covariance=covariance)


def record_points(C: ArrayLike, R: ArrayLike, bin_width: float = 0.02) -> Array:
    """(n,) True where R is the first, in the order of C, in a higher bin than all before it."""
    order = np.argsort(C, kind="stable")
    bins = np.floor(np.asarray(R, float)[order] / bin_width + 1e-9)
    highest = np.fmax.accumulate(bins)
    before = np.concatenate([[-np.inf], highest[:-1]])
    return (bins > before)[np.argsort(order)]


def fit_run(*runs: Run, points: str = "all") -> Curve:
    """The sigmoid through the `points` (`Run.fitted`) of all runs of one (B_p, n). ValueError: fewer than 4."""
    C = np.concatenate([run.C[run.fitted(points)] for run in runs])
    R = np.concatenate([np.asarray(run.rewards)[run.fitted(points)] for run in runs])
    if len(C) < 4:
        shape = f"B_p {runs[0].B_p}, n {runs[0].n}"
        raise ValueError(f"{shape} has {len(C)} points to fit ({points}), and a curve needs 4: leave it out")
    return fit_curve(C, R, 0, 1)


# ------------------------------------------------------------------------------------------------ the best n for each C
def n_star(C: ArrayLike, L: ArrayLike, s: ArrayLike, log10_C0: ArrayLike, b: ArrayLike) -> Array:
    """The best number of rollouts for C completions: 2^(L / (1 + exp(-s (log10 C - log10 C0))) + b)."""
    return 2 ** (L * expit(s * (np.log10(C) - log10_C0)) + b)


class BestRollouts(NamedTuple):
    """A fitted n*(C)."""

    L: float
    s: float
    log10_C0: float
    b: float
    draws: Array  # (D, 4), these four as they may also be; D = 0: no intervals

    def __call__(self, C: float) -> float:
        """n*(C)."""
        return float(n_star(C, self.L, self.s, self.log10_C0, self.b))

    def interval(self, C: float) -> Interval:
        """95 % interval of n*(C); nan without draws."""
        if not len(self.draws):
            return math.nan, math.nan
        n = n_star(C, *self.draws.T)
        return float(np.quantile(n, 0.025)), float(np.quantile(n, 0.975))


def fit_n_star(C: ArrayLike, n: Sequence[float], again: Iterable[Array] = ()) -> BestRollouts:
    """The law through best rollouts n at C, by least squares on log2 n. Its intervals come from fits to `again`: n at
    these C as they may also be. ValueError: fewer than 5 points, or the same n everywhere."""
    C = np.asarray(C, float)
    if len(C) < 5:
        raise ValueError(f"the law needs at least 5 values of C, not {len(C)}")
    if min(n) == max(n):
        raise ValueError(f"n* is {n[0]:g} at every C, so nothing shows how it grows; widen C or the grid of n")
    best = fit_curve(C, np.log2(n), -2, 20)
    curves = [best]
    for other in again:
        curves.append(fit_curve(C, np.log2(other), -2, 20, best))
    laws = []
    for curve in curves:  # the same sigmoid, in log10 C
        s = curve.B * math.log(10)
        laws.append([curve.gain, s, math.log10(curve.C_mid), curve.R0])
    L, s, log10_C0, b = laws[0]
    return BestRollouts(L, s, log10_C0, b, draws=np.reshape(laws[1:], (-1, 4)))


@dataclass(frozen=True)
class Grid:
    """All runs of a grid, analyzed together."""

    curves: list[tuple[list[Run], Curve]]  # the runs of one (B_p, n), and their curve
    C: Array  # (P,) that at least two n have reached, P = ENVELOPE_POINTS or fewer
    best_n: Array  # (P,) of the highest curve there
    reward: Array  # (P,) the upper envelope
    law: BestRollouts


def fit_grid(runs: Sequence[Run], points: str = "all") -> Grid:
    """Curves, envelope and n*(C) with its intervals. ValueError: a (B_p, n) with too few points for a curve, fewer than
    two n, no two that reach one C, no reward or n* rises."""
    shapes: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        shapes.setdefault((run.B_p, run.n), []).append(run)
    groups = list(shapes.values())
    curves = [fit_run(*group, points=points) for group in groups]
    rollouts, of = np.unique([group[0].n for group in groups], return_inverse=True)  # (S,), (G,)
    if len(rollouts) < 2:
        raise ValueError(f"n* needs runs of at least two values of n, not of {rollouts.tolist()}")

    # A curve says nothing of its run after a collapse.
    every_C = []
    for group in groups:
        every_C.append(np.concatenate([run.C[run.fitted("all")] for run in group]))
    first = np.array([C.min() for C in every_C])  # (G,)
    last = np.array([C.max() for C in every_C])
    starts = sorted(first[of == i].min() for i in range(len(rollouts)))  # (S,)
    ends = sorted(last[of == i].max() for i in range(len(rollouts)))
    if starts[1] >= ends[-2]:
        raise ValueError("the runs need at least two values of n that reach the same C")
    if all(np.ptp(curve(C)) < NO_RISE for curve, C in zip(curves, every_C, strict=True)):
        raise ValueError("no run's reward rises, so there is nothing to compare; make the runs longer")

    # The envelope, where at least two n can be compared.
    C = np.geomspace(starts[1], ends[-2], ENVELOPE_POINTS)
    covered = (first[:, None] <= C * REACH) & (last[:, None] >= C / REACH)  # (G, ENVELOPE_POINTS)
    n_covered = sum(covered[of == i].any(axis=0).astype(int) for i in range(len(rollouts)))
    C = C[n_covered > 1]  # (P,)
    covered = covered[:, n_covered > 1]  # (G, P)
    rewards = np.where(covered, [curve(C) for curve in curves], -np.inf)  # (G, P)
    best_n = rollouts[of[rewards.argmax(0)]]
    law = fit_n_star(C, best_n, bootstrap(curves, C, rewards, rollouts, of))
    return Grid(list(zip(groups, curves, strict=True)), C, best_n, rewards.max(0), law)


def bootstrap(curves: list[Curve], C: Array, rewards: Array, rollouts: Array, of: Array) -> Array:
    """The best n at C as it may also be, (D, P): from each curve's rewards (G, P) and its n, `rollouts[of]`.

    To first order a curve is off at C by its gradient there times a draw from N(0, covariance)."""
    rng = np.random.default_rng(0)
    draws = []
    for curve, reward in zip(curves, rewards, strict=True):
        errors = rng.multivariate_normal(np.zeros(4), curve.covariance, DRAWS, method="eigh")  # (D, 4)
        draws.append(reward + errors @ curve.gradient(C).T)  # (D, P)
    best = of[np.argmax(draws, axis=0)]  # (D, P), which n
    log2_n = np.log2(rollouts)
    off = ROUNDING * np.median(np.diff(log2_n))  # the best n was looked for among these only
    moved = log2_n + rng.uniform(-off, off, (DRAWS, len(rollouts)))
    return 2 ** np.take_along_axis(moved, best, axis=1)


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
    C = grid.C
    if not math.isfinite(budget):
        raise ValueError(f"a budget of {budget:g} completions is no finite number")
    if budget < C[0]:
        compared = f"{C[0]:g} to {C[-1]:g}"
        raise ValueError(f"a budget of {budget:g} completions lies below what the runs compare, {compared}")
    best = grid.law(budget)
    n = 2 ** max(1, round(math.log2(best)))  # a single rollout has nothing to be compared with
    unstable = {run.B_p for run in runs if not run.standing.all()}
    stable = {run.B_p for run in runs} - unstable
    if not stable:
        raise ValueError(f"no B_p is stable: each has a run that falls by {FALL}; raise B_p or lower the learning rate")
    B_p = min(stable)
    M = int(budget // (B_p * n))
    if M < 1:
        raise ValueError(f"a budget of {budget:g} completions is less than one update of {B_p} x {n}")

    fitted = sum(run.fitted(points).sum() for run in runs)
    total = sum(len(run.rewards) for run in runs)
    at_start = sum((run.C == 0).sum() for run in runs)
    fallen = sum((~run.standing).sum() for run in runs)
    smallest, largest = min(run.n for run in runs), max(run.n for run in runs)
    low, high = grid.law.interval(budget)
    lines = [
        f"{len(runs)} runs, n from {smallest} to {largest}, compared from C = {C[0]:.3g} to {C[-1]:.3g}",
        f"{fitted} of {total} rewards are fitted ({points}); {at_start} at C = 0 and {fallen} after a collapse are not",
        f"n* at {budget:.3g} is {best:.1f}, 95 % interval {low:.1f} to {high:.1f}",
        f"B_p {B_p} is the smallest of which no run falls by {FALL}",
    ]
    if budget > C[-1]:
        times = budget / C[-1]
        lines.append(f"the budget is {times:.1f} times the largest C that was compared: n* is an extrapolation")
    if grid.best_n.max() == largest:
        lines.append(f"the largest n that was tried, {largest}, is the best at some C: b + L is its edge; try larger")
    if grid.best_n.min() == smallest > 1:
        lines.append(f"the smallest n that was tried, {smallest}, is the best at some C: b is its edge; try smaller")
    return Plan(n, B_p, M, lines, grid)


def of_k(correct: Sequence[int], total: int, k: int) -> dict[str, float]:
    """Means over prompts of `total` samples each, `correct` of them right: `average`, `best` (pass@k, at least one of k
    is right) and `worst` (all k are), both unbiased. Raises ValueError if k is not from 1 to `total`."""
    if not 1 <= k <= total or min(correct) < 0 or max(correct) > total:
        raise ValueError(f"k must be from 1 to {total}, and no count below 0 or above {total}")
    sets = math.comb(total, k) * len(correct)  # of k samples each
    all_wrong = sum(math.comb(total - c, k) for c in correct)
    all_right = sum(math.comb(c, k) for c in correct)
    return {"average": sum(correct) / total / len(correct), "best": 1 - all_wrong / sets, "worst": all_right / sets}


def main() -> None:
    """A worked example: four runs without noise. The larger n, the slower and the higher its curve."""
    updates = list(range(1, 200))
    runs = []
    for n, ceiling, half in ((4, 0.5, 20), (8, 0.6, 50), (16, 0.7, 120), (32, 0.8, 300)):
        rewards = [ceiling * C / (C + half) for C in (2 * n * M for M in updates)]
        runs.append(Run(2, n, updates, rewards))
    plan = recommend(runs, budget=1500)
    print(f"n = {plan.n} rollouts, B_p = {plan.B_p} prompts, M = {plan.M} updates")
    for line in plan.rests_on:
        print("-", line)
    for C in (100, 300, 1000):
        print(f"n* at C = {C}: {plan.grid.law(C):.1f}")


if __name__ == "__main__":
    main()
