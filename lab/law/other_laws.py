"""Two more laws of RL: how fast does a larger model learn, and how many rollouts should a prompt get?

POWER LAW OVER SIZE (Tan et al. 2025, arXiv 2509.25300). While a run still learns, the share of held-out problems that
it fails, L = 1 - pass rate, is a straight line in a log-log plot, whose slope depends on the parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is compute (6 N T FLOPs for T tokens) or samples. E is no function of N: a larger model's needs points of its own run.
Its line is steeper, so where it starts behind, it overtakes at one X. There is no ceiling: compare far below one.

ISOCOMPUTE (Cheng et al. 2026, arXiv 2603.12151). M updates on B_p prompts with n rollouts each cost C = B_p n M
completions. Few rollouts give many updates on noisy advantages, many give few on good ones. Of cheap runs over a grid
of (B_p, n), the n of the highest curve at C grows with C and saturates:

    log2 n*(C) = L / (1 + exp(-s (log10 C - log10 C0))) + b

For B_p there is no law: take the smallest that is stable. The paper fits a run's curve to its *record points*, which
are lucky: in simulations n* came out 1.3 to 1.7 times too small from C0 on. Here all count but those of a collapse.

INTERVALS are of 95 %, from slopes and curves drawn again within their errors. Points count as independent; where the
evaluations of one run drift together, or seeds differ by more, the intervals are too narrow.
Symbols: as above; S sizes, G shapes (B_p, n), P values of C, D draws. `log` is natural.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import expit
from scipy.stats import t as student

FARTHEST = 1e3  # N0 is looked for from the smallest size / FARTHEST to the largest size * FARTHEST
FALL = 0.1  # a run is unstable if its reward, averaged over three evaluations, falls this far below the highest before
REACH = 1.1  # a curve counts this far beyond its first and last C: runs of equal budgets end at C that differ a little
ROUNDING = 0.43  # steps of the grid that n* may be off, such that 95 % of the intervals hold in simulations
DRAWS = 200  # for an interval
Array = np.ndarray
Interval = tuple[float, float]


def middle(draws: Array) -> Interval:
    """The interval that holds 95 % of the draws (D,); nan if there are none."""
    low, high = np.quantile(draws, (0.025, 0.975)).tolist() if len(draws) else (math.nan, math.nan)
    return low, high


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law, in the units of the N and X that it was fitted to."""

    K_max: float  # the slope of an infinitely large model
    N0: float  # size at half of it
    E: dict[float, float]  # the offset of each size: its log L at X = 1
    first: float = 0.0  # least log X
    off: Sequence[float] = ()  # sizes whose own slope is not K(N), by more than its error: if any, the law fails
    again: Sequence["PowerLaw"] = ()  # the law as it may also be

    def interval(self, quantity: Callable[["PowerLaw"], float]) -> Interval:
        """Of what a law says: `law.interval(lambda law: law.K(9))`. An evaluation has its own noise on top."""
        return middle(np.array([quantity(law) for law in self.again]))

    def K(self, N: float) -> float:
        """Slope of a model with N parameters."""
        return self.K_max / (1 + self.N0 / N)

    def log_L(self, N: float, X: float) -> float:
        """log L of a model with N parameters at X. ValueError for a size without an offset."""
        if N not in self.E:
            raise ValueError(f"size {N:g} has no offset E, which this law cannot predict: give points of its run")
        return self.E[N] - self.K(N) * math.log(X)

    def predict(self, N: float, X: float) -> float:
        """L of a model with N parameters at X. ValueError for a size without an offset."""
        return math.exp(min(self.log_L(N, X), 700))  # a steep line, far below its first X, is above any number

    def best_size(self, C: float, sizes: Iterable[float] | None = None) -> float:
        """Which of the sizes (None: all that have an offset) has the lowest L at a budget C, in the law's unit of X."""
        return min(self.E if sizes is None else sizes, key=lambda N: self.log_L(N, C))

    def crossing(self, N1: float, N2: float) -> float | None:
        """X at which the larger of two sizes overtakes the smaller one. None if it is ahead from the first X on."""
        small, large = sorted((N1, N2))
        # -K(large) x + E(large) = -K(small) x + E(small), with x = log X
        behind = self.log_L(large, 1) - self.log_L(small, 1)
        steeper = self.K(large) - self.K(small)
        log_X = behind / steeper if steeper > 0 else -math.inf
        return math.exp(min(log_X, 700)) if log_X > self.first + 1e-9 else None


def fit_power_law(N: ArrayLike, X: ArrayLike, L: ArrayLike) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs; L is 1 - pass rate. Every size
    counts the same, however many points it has; one with less than three X takes its slope from the others. ValueError:
    values that no run has, a size with one point, fewer than two sizes of three X, a pass rate that never rises."""
    N, X, L = (np.asarray(values, float) for values in (N, X, L))
    if not N.size or not N.shape == X.shape == L.shape == (N.size,):
        raise ValueError(f"N, X and L must be flat and of equal length, not {N.shape}, {X.shape} and {L.shape}")
    if not (np.isfinite(N) & np.isfinite(X) & (N > 0) & (X > 0) & (L > 0) & (L <= 1)).all():
        raise ValueError("N and X must be above 0 and L above 0 and at most 1; leave out points with a pass rate of 1")
    points = {size: (np.log(X[N == size]), np.log(L[N == size])) for size in np.unique(N).tolist()}
    sloped = {size: (x, y) for size, (x, y) in points.items() if len(np.unique(x)) > 2}
    if min(len(x) for x, _ in points.values()) < 2 or len(sloped) < 2:
        raise ValueError("every size needs two points, and two sizes need three X, for a slope and its error")
    own_K, error, weights, dof = np.array([own_slope(x, y) for x, y in sloped.values()]).T  # (S,)
    if own_K.max() <= 0:
        raise ValueError("the pass rate rises at no size, so there is no learning to fit")
    sizes, rng = np.array([*sloped]), np.random.default_rng(0)
    drawn = error * rng.standard_t(dof, (1 + DRAWS, len(sizes)))
    drawn[0] = 0  # the first law is the fit
    K_max, N0 = saturating(own_K + drawn, weights, sizes)  # (1 + D,)
    tolerance = student.ppf(1 - 0.025 / len(sizes), dof) * error  # 95 % for all sizes together
    off = abs(own_K - K_max[0] / (1 + N0[0] / sizes)) > np.maximum(tolerance, abs(own_K) / 100)
    E = {}  # of each size (1 + D,)
    for size, (x, y) in points.items():  # a line goes through the mean of its points
        K = K_max / (1 + N0 / size)
        error_of_mean = np.std(y + K[0] * x, ddof=1) / math.sqrt(len(x))
        E[size] = y.mean() + error_of_mean * np.append(0, rng.standard_t(len(x) - 1, DRAWS)) + K * x.mean()
    laws = [PowerLaw(K_max[i], N0[i], {size: E[size][i] for size in E}) for i in range(1 + DRAWS)]
    return replace(laws[0], first=math.log(X.min()), off=sizes[off].tolist(), again=laws[1:])


def own_slope(x: Array, y: Array) -> tuple[float, float, float, int]:
    """K of a line through points (log X, log L); its error, robust to unequal noise (HC3); its weight in the least
    squares of log L, where a size counts as the mean of its points; degrees of freedom."""
    dx = x - x.mean()
    K = -(dx @ y) / (dx @ dx)
    leverage = 1 / len(x) + dx**2 / (dx @ dx)
    residuals = (y - y.mean() + K * dx) / np.maximum(1 - leverage, 1e-3)
    return K, float(np.linalg.norm(dx * residuals) / (dx @ dx)), float(np.mean(dx**2)), len(x) - 2


def saturating(slopes: Array, weights: Array, sizes: Array) -> tuple[Array, Array]:
    """K_max and N0 (D,) of weighted least squares through D times S slopes (D, S). With g = 1 / (1 + N0 / N) the best
    K_max is sum w K g / sum w g^2, and lowers the sum of squares by (sum w K g)^2 / sum w g^2. So N0 alone is looked
    for, on a grid that is made finer eight times."""
    least, most = math.log(sizes[0] / FARTHEST), math.log(sizes[-1] * FARTHEST)
    low, high = np.full(len(slopes), least), np.full(len(slopes), most)
    for _ in range(8):
        grid = np.linspace(low, high, 41)  # (41, D) of log N0
        g = 1 / (1 + np.exp(grid)[..., None] / sizes)  # (41, D, S)
        top = (weights * slopes * g).sum(-1).clip(min=1e-12)
        bottom = (weights * g**2).sum(-1)
        best = np.argmax(top**2 / bottom, axis=0), np.arange(len(slopes))
        step = (high - low) / 40
        low, high = np.maximum(grid[best] - step, least), np.minimum(grid[best] + step, most)
    return (top / bottom)[best], np.exp(grid[best])


@dataclass(frozen=True)
class Run:
    """One run of the grid: its pass rates after `updates` updates each. ValueError: values that no run has."""

    B_p: int
    n: int
    updates: Sequence[float]
    rewards: Sequence[float]

    def __post_init__(self) -> None:
        M, R = np.asarray(self.updates, float), np.asarray(self.rewards, float)
        if not all(1 <= count < 1e12 and count % 1 == 0 for count in (self.B_p, self.n)):
            raise ValueError(f"B_p {self.B_p}, n {self.n}: both must be whole numbers from 1 on")
        rising = M.ndim == 1 and M.shape == R.shape and np.all((np.diff(M, prepend=-1) > 0) & (M >= 0) & (M < 1e12))
        if not rising or not np.all((R >= 0) & (R <= 1)):
            raise ValueError(f"B_p {self.B_p}, n {self.n}: updates rise from 0 on, with as many rewards from 0 to 1")

    @property
    def standing(self) -> Array:
        """True for rewards that do not lie FALL below an earlier one, each averaged with its two neighbors."""
        padded = np.pad(np.asarray(self.rewards, float), 1, mode="edge")
        means = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
        return means > np.maximum.accumulate(means) - FALL

    @property
    def points(self) -> Array:
        """(2, points): C up to each reward, and the reward; without C = 0 and those of a collapse."""
        C = self.B_p * self.n * np.asarray(self.updates, float)
        return np.stack([C, self.rewards])[:, self.standing & (C > 0)]


def record_points(C: ArrayLike, R: ArrayLike, bin_width: float = 0.02) -> Array:
    """(n,) True where R is the first, in the order of C, in a higher bin than all before it."""
    order = np.argsort(C, kind="stable")
    bins = np.floor(np.asarray(R, float)[order] / bin_width + 1e-9)
    before = np.concatenate([[-np.inf], np.fmax.accumulate(bins)[:-1]])
    return (bins > before)[np.argsort(order)]


def sigmoid(C: ArrayLike, p: Array) -> Array:
    """R0 + gain / (1 + (C_mid / C)^B) at C (P,), p = (R0, gain, log B, log C_mid): (P,), or (4, P) for four rows p."""
    R0, gain, log_B, log_C_mid = np.moveaxis(p, -1, 0)[..., None]
    return R0 + gain * expit(np.exp(log_B) * (np.log(C) - log_C_mid))


def fit_curve(C: Array, y: Array, low: float, high: float, start: Array | None = None) -> tuple[Array, Array]:
    """Parameters (4,) of the rising sigmoid of least squares through y at C, and their covariance (4, 4). R0 lies from
    `low` to `high`, the gain is at most their difference. It is looked for from `start`, or from ten places."""
    x = np.log(C)
    bounds = [low, 0, math.log(0.2), x.min() - 3], [high, high - low, math.log(10), x.max() + 3]
    starts = [start]
    if start is None:
        shapes = [(log_B, place) for log_B in (0.4, 1.2) for place in np.linspace(x.min(), x.max(), 5)]
        starts = [np.clip([y.min(), np.ptp(y), *shape], *bounds) for shape in shapes]
    fits = [least_squares(lambda p: sigmoid(C, p) - y, p, bounds=bounds) for p in starts]
    best = min(fits, key=lambda fit: fit.cost)
    return best.x, 2 * best.cost / max(1, len(C) - 4) * np.linalg.pinv(best.jac.T @ best.jac)


def n_star(C: ArrayLike, L: ArrayLike, s: ArrayLike, log10_C0: ArrayLike, b: ArrayLike) -> Array:
    """The best number of rollouts for C completions: 2^(L / (1 + exp(-s (log10 C - log10 C0))) + b)."""
    return 2 ** (L * expit(s * (np.log10(C) - log10_C0)) + b)


class BestRollouts(NamedTuple):
    """A fitted n*(C)."""

    L: float
    s: float
    log10_C0: float
    b: float
    draws: Array  # (D, 4), these four as they may also be

    def __call__(self, C: float) -> float:
        return float(n_star(C, self.L, self.s, self.log10_C0, self.b))

    def interval(self, C: float) -> Interval:
        """Of n*(C); nan without draws."""
        return middle(n_star(C, *self.draws.T))


def fit_n_star(C: ArrayLike, n: ArrayLike, again: Iterable[ArrayLike] = ()) -> BestRollouts:
    """The law through best rollouts n at C, by least squares on log2 n. Its intervals come from fits to `again`: n at
    these C as they may also be. ValueError: fewer than 5 points, or the same n everywhere."""
    if len(C) < 5 or np.ptp(n) == 0:
        raise ValueError(f"n*(C) needs 5 values of C, {len(C)} here, of more than one best n: widen C or the grid of n")
    best, _ = fit_curve(C, np.log2(n), -2, 20)
    others = [fit_curve(C, np.log2(other), -2, 20, start=best)[0] for other in again]
    R0, gain, log_B, log_C_mid = np.array([best, *others]).T
    laws = np.stack([gain, np.exp(log_B) * math.log(10), log_C_mid / math.log(10), R0], 1)  # the same, in log10 C
    return BestRollouts(*laws[0].tolist(), draws=laws[1:])


def best_of_grid(runs: Sequence[Run]) -> tuple[Array, Array]:
    """C (P,) that two n or more have reached, and the n of the highest curve there (1 + D, P): first as fitted, then as
    it may also be. A curve counts for nothing after its run collapsed. ValueError: as `recommend`."""
    shapes = sorted({(run.B_p, run.n) for run in runs})
    points = [np.concatenate([run.points for run in runs if (run.B_p, run.n) == shape], axis=1) for shape in shapes]
    for (B_p, n), (x, _) in zip(shapes, points, strict=True):
        if len(x) < 4:
            raise ValueError(f"B_p {B_p}, n {n} has {len(x)} points to fit, and a curve needs 4: leave it out")
    rollouts, which = np.unique([n for _, n in shapes], return_inverse=True)  # (S,), (G,)
    if len(rollouts) < 2:
        raise ValueError(f"n* needs runs of at least two values of n, not of {rollouts.tolist()}")
    first, last = (sorted(end(x) for x, _ in points) for end in (min, max))
    C = np.geomspace(first[1], last[-2], 40)  # (P,)
    rng = np.random.default_rng(0)
    heights = []  # of each shape (1 + D, P)
    for x, R in points:
        p, covariance = fit_curve(x, R, 0, 1)
        # To first order the curve is off by its gradient times a draw from N(0, covariance).
        step = 1e-6 * np.eye(4)
        gradient = (sigmoid(C, p + step) - sigmoid(C, p - step)) / 2e-6  # (4, P)
        errors = rng.multivariate_normal(np.zeros(4), covariance, DRAWS, method="eigh") @ gradient  # (D, P)
        reached = (C >= x.min() / REACH) & (C <= x.max() * REACH)
        heights.append(np.where(reached, sigmoid(C, p) + np.vstack([0 * C, errors]), -np.inf))
    several = np.array([len(np.unique(which[column])) > 1 for column in np.isfinite(heights)[:, 0].T])  # (P,)
    best = which[np.argmax(heights, axis=0)[:, several]]  # (1 + D, P)
    # The best n was looked for among those tried only.
    moves = rng.uniform(-ROUNDING, ROUNDING, (1 + DRAWS, len(rollouts))) * np.median(np.diff(np.log2(rollouts)))
    moves[0] = 0
    return C[several], 2 ** np.take_along_axis(np.log2(rollouts) + moves, best, axis=1)


class Plan(NamedTuple):
    """How to spend a budget, and what that rests on."""

    n: int  # a power of 2
    B_p: int  # the smallest of which no run fell
    M: int
    law: BestRollouts
    compared: Interval  # the C at which two n or more were: a budget above them is an extrapolation
    left_out: int  # rewards at C = 0 and after a collapse


def recommend(runs: Sequence[Run], budget: float) -> Plan:
    """n, B_p and M for `budget` completions from cheap runs over a grid of (B_p, n). ValueError: a shape with less than
    4 points, no two n at one C, n* that does not grow, no stable B_p, a budget below all runs or below one update."""
    C, best_n = best_of_grid(runs)
    law = fit_n_star(C, best_n[0], best_n[1:])
    if not C[0] <= budget < math.inf:
        raise ValueError(f"the runs compare from {C[0]:g} completions on, and the budget is {budget:g}")
    n = 2 ** max(1, round(math.log2(law(budget))))  # a single rollout has nothing to be compared with
    stable = {run.B_p for run in runs} - {run.B_p for run in runs if not run.standing.all()}
    if not stable:
        raise ValueError(f"no B_p is stable: each has a run that falls by {FALL}; raise B_p or lower the learning rate")
    B_p = min(stable)
    if budget < B_p * n:
        raise ValueError(f"a budget of {budget:g} completions is less than one update of {B_p} x {n}")
    left_out = sum(len(run.rewards) - run.points.shape[1] for run in runs)
    return Plan(n, B_p, int(budget // (B_p * n)), law, (C[0], C[-1]), left_out)


def main() -> None:
    """A worked example of each: three sizes, of the largest two points only; four n, the larger the higher its end."""
    L = [0.5, 0.47, 0.44, 0.4, 0.55, 0.49, 0.45, 0.4, 0.58, 0.52]
    law = fit_power_law([1] * 4 + [3] * 4 + [9] * 2, [1, 2, 4, 8] * 2 + [1, 2], L)
    low, high = law.interval(lambda law: law.predict(9, 64))
    print(f"K_max {law.K_max:.3f}, N0 {law.N0:.2f}; size 9 at X = 64: {law.predict(9, 64):.3f} [{low:.3f}, {high:.3f}]")
    print(f"size 9 overtakes size 1 at X = {law.crossing(1, 9):.1f}; best at 2: {law.best_size(2):g}")
    runs = []
    for n, end, half in ((4, 0.5, 20), (8, 0.6, 50), (16, 0.7, 120), (32, 0.8, 300)):
        runs.append(Run(2, n, range(1, 200), [end * n * M / (n * M + half / 2) for M in range(1, 200)]))
    plan = recommend(runs, budget=1500)
    print(f"1,500 completions: {plan.n} rollouts, {plan.B_p} prompts, {plan.M} updates")


if __name__ == "__main__":
    main()
