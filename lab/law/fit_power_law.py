"""The power law over model size: how much faster does a larger model learn, and what follows for a budget?

PROBLEM. The sigmoid of fit_sigmoid.py predicts the rest of one run. It says nothing about a model of another size.

IDEA (Tan et al. 2025, arXiv 2509.25300). While a run still learns, the share of held-out problems that the model fails,
L = 1 - pass rate, is a straight line in a log-log plot, and the slope K depends on the number of parameters N alone:

    log L(N, X) = -K(N) log X + E(N)          K(N) = K_max / (1 + N0 / N)

X is either the compute of training, 6 N T FLOPs for T tokens, or the number of samples. K saturates: N0 is the size at
which a model learns at half of the greatest rate K_max. E, the offset, differs from size to size.

WHAT IT PREDICTS. *Within a model*, the early part of a run gives K and E, and so the rest. *Across models*, small ones
give K_max and N0, and so the slope of a larger one. Its offset E is no function of N in this law, and must come from
points of the larger model's own run (`with_size`). A larger model has the steeper line, so if it starts behind, it
overtakes at one X (`crossing`). The best size for a budget X is the one with the lowest line there (`best_size`).

HOW IT IS FITTED. For given K_max and N0 the best E of each size is a mean, so least squares searches two parameters.
Every size has the same weight, however many points it has. The errors of K_max and N0 are robust to unequal noise
(HC3); the error of a line's height comes from the scatter of its points. Both treat points as independent. Where the
evaluations of one run drift together (autocorrelation .8), 95 % intervals were right in half of 60 simulations. Seeds
may differ by more.

WHEN TO USE IT. This law has no ceiling and no start, and runs bend away from their line at both ends. The published 8B
run of ScaleRL (arXiv 2510.13786) ends at .610; fitted to its 1,500 to 8,000 GPU-hours this law says .81 at 160,000. So
use the sigmoid for the rest of one run and its ceiling, and this law to compare sizes, far below a ceiling.

    >>> law = fit(N=[1, 1, 1, 2, 2, 2, 4, 4, 4], X=[1, 2, 4] * 3, L=[.5, .44, .38, .5, .41, .33, .5, .38, .29])
    >>> round(law.K(4), 2), round(law.predict(4, 8), 2)
    (0.39, 0.22)
    >>> round(law.with_size(8, X=[1, 2], L=[.5, .37]).predict(8, 4), 2)  # of a larger one after two points of its run
    0.26

`python fit_power_law.py` prints a worked example. Points with a pass rate of 1 or at X = 0 have no logarithm: leave
them out.

Symbols: N parameters, X compute or samples, L failure rate, S sizes, n points; logarithms are natural.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

FARTHEST = 1e3  # N0 is looked for from the smallest size / FARTHEST to the largest size * FARTHEST
EDGE = 10.0  # beyond the sizes by more than this factor, the data do not tell N0 from 0 or from infinity
Array = np.ndarray
Interval = tuple[float, float]


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
    """A fitted law. Sizes are in the unit of `fit`'s N, X is in its unit; intervals are of 95 %."""

    K_max: float  # the slope of an infinitely large model
    N0: float  # size at half of it
    K_max_interval: Interval
    N0_interval: Interval
    scaled_covariance: Array  # (2, 2), of log K_max and log N0, times a squared quantile: roots are half intervals
    sizes: dict[float, Size]
    rmse: float  # of log L

    @property
    def E(self) -> dict[float, float]:
        """The offset of each size."""
        return {N: size.E for N, size in self.sizes.items()}

    def K(self, N: float) -> float:
        """Slope of a model with N parameters."""
        return self.K_max / (1 + self.N0 / N)

    def K_error(self, N: float) -> float:
        """Half the 95 % interval of log K(N)."""
        gradient = np.array([1.0, -1 / (1 + N / self.N0)])  # of log K, by log K_max and log N0
        return math.sqrt(gradient @ self.scaled_covariance @ gradient)

    def K_interval(self, N: float) -> Interval:
        """95 % interval of `K(N)`."""
        return around(self.K(N), self.K_error(N))

    def log_L(self, N: float, X: float) -> tuple[float, float]:
        """log L of `predict`, and half its 95 % interval, which is infinite if the offset is that of one point."""
        if N not in self.sizes:
            raise ValueError(f"size {N:g} has no offset E, which this law cannot predict: give points of its run")
        size = self.sizes[N]
        x = math.log(X)
        K = self.K(N)
        slope_error = (x - size.x) * K * self.K_error(N)
        return size.E - K * x, math.hypot(slope_error, size.error)

    def predict(self, N: float, X: float) -> float:
        """L of a model with N parameters at X. ValueError for a size without an offset."""
        log_L, _ = self.log_L(N, X)
        return math.exp(min(log_L, 700))  # a steep line, far below its first X, is above any number

    def interval(self, N: float, X: float) -> Interval:
        """95 % interval of `predict`: of the line, not of an evaluation, whose own noise comes on top."""
        _, half = self.log_L(N, X)
        return around(self.predict(N, X), half)

    def with_size(self, N: float, X: Sequence[float], L: Sequence[float]) -> "PowerLaw":
        """This law with one more size: its slope is K(N), its offset the mean of log L + K(N) log X over its points.
        ValueError: no points, or values that `fit` refuses."""
        same_N = np.full(np.shape(X), N)
        _, x, y = checked(same_N, X, L, least=1)
        offsets = y + self.K(N) * x
        n = len(offsets)
        error = math.inf
        if n > 1:
            sd = float(np.std(offsets, ddof=1))
            error = float(student.ppf(0.975, n - 1) * sd / math.sqrt(n))
        X_range = float(min(X)), float(max(X))
        size = Size(float(offsets.mean()), float(x.mean()), error, X_range)
        if N in self.sizes:  # a size that was fitted keeps its own slope
            old = self.sizes[N]
            X_range = min(X_range[0], old.X_range[0]), max(X_range[1], old.X_range[1])
            size = size._replace(X_range=X_range, own_K=old.own_K, off=old.off)
        return replace(self, sizes=self.sizes | {N: size})

    def best_size(self, X: float, sizes: Iterable[float] | None = None) -> float:
        """Which of the sizes (None: all that have an offset) has the lowest L at X, a budget in the law's unit of X."""
        if sizes is None:
            sizes = self.sizes
        return min(sizes, key=lambda N: self.log_L(N, X)[0])

    def crossing(self, N1: float, N2: float) -> float | None:
        """X at which the larger of two sizes overtakes the smaller one. None if it is ahead from the first X on.
        ValueError for a size without an offset."""
        small, large = sorted((N1, N2))
        # -K(large) x + E(large) = -K(small) x + E(small), with x = log X
        behind = self.log_L(large, 1)[0] - self.log_L(small, 1)[0]
        steeper = self.K(large) - self.K(small)
        first = min(size.X_range[0] for size in self.sizes.values())
        if steeper <= 0 or behind / steeper <= math.log(first) + 1e-9:
            return None
        return math.exp(min(behind / steeper, 700))

    @property
    def notes(self) -> list[str]:
        """What the fitted sizes cannot tell, one sentence each."""
        fitted = {N: size for N, size in self.sizes.items() if not math.isnan(size.own_K)}
        smallest, largest = min(fitted), max(fitted)
        low, high = self.N0_interval
        against = listed(N for N, size in fitted.items() if size.off)
        falling = listed(N for N, size in fitted.items() if size.own_K <= 0)
        notes = []
        if against:
            notes.append(f"the law does not hold: the own slope of size {against} is not K(N), by more than its error")
        elif len(fitted) == 2:
            notes.append("two sizes give K_max and N0: nothing here tests the law itself")
        if not against and low < smallest / EDGE and self.N0 < smallest:
            saturated = "K has saturated, and N0 is known to be small but not how small"
            notes.append(f"the slopes of all sizes agree: {saturated}")
        if not against and high > largest * EDGE and self.N0 > largest:
            notes.append("K still grows in proportion to N: only K_max / N0 is known, and neither of the two")
        if falling:
            notes.append(f"the pass rate of size {falling} does not rise, which is no learning: leave that size out")
        return notes


def around(value: float, half: float) -> Interval:
    """The interval of a value from half that of its logarithm."""
    factor = math.exp(min(half, 600))  # wider than any number: not known
    return value / factor, value * factor


def listed(sizes: Iterable[float]) -> str:
    """{4e9, 1e9} -> "1e+09, 4e+09"."""
    return ", ".join(f"{N:.3g}" for N in sorted(sizes))


def fit(N: Sequence[float], X: Sequence[float], L: Sequence[float]) -> PowerLaw:
    """The law through the points (N, X, L), flat arrays of equal length over all runs; L is 1 - pass rate. ValueError:
    lengths differ, a value is not positive, L is above 1, a size has fewer than 3 X, fewer than two sizes, the pass
    rate rises at none."""
    N, x, y = checked(N, X, L)
    sizes, of = np.unique(N, return_inverse=True)  # (S,), (n,) which size a point belongs to
    counts = np.bincount(of)  # (S,)
    mean_x = np.bincount(of, x) / counts  # (S,)
    mean_y = np.bincount(of, y) / counts
    # The best E makes each line pass through the mean of its points. What is left to fit is dy = -K dx.
    dx = x - mean_x[of]  # (n,)
    dy = y - mean_y[of]
    spread = np.bincount(of, dx * dx)  # (S,)
    own_K = -np.bincount(of, dx * dy) / spread  # (S,) of each size alone
    if len(sizes) < 2:
        raise ValueError(f"K_max and N0 need at least two sizes, not {sizes[0]:g} alone")
    if own_K.max() <= 0:
        raise ValueError("the pass rate rises at no size, so there is no learning to fit")

    weight = 1 / counts[of]  # every size counts the same
    theta = search(sizes, of, dx, dy, weight, math.log(own_K.max()))
    K = slopes(theta, sizes)  # (S,)
    errors = dy + K[of] * dx  # (n,) measured minus fitted
    width = student.ppf(0.975, len(x) - len(sizes) - 2)  # the offsets, K_max and N0 are fitted
    scaled_covariance = robust_covariance(theta, K[of], dx, weight, errors, width)

    E = mean_y + K * mean_x
    mean_variance = np.bincount(of, errors**2) / (counts - 1) / counts  # (S,)
    mean_error = width * np.sqrt(mean_variance)
    own_errors = dy + own_K[of] * dx  # (n,)
    own_variance = np.bincount(of, own_errors**2) / (counts - 2) / spread  # (S,) of own_K
    tolerance = student.ppf(1 - 0.025 / len(sizes), counts - 2) * np.sqrt(own_variance)
    off = abs(own_K - K) > np.maximum(tolerance, abs(own_K) / 100)  # (S,)
    rows = {}
    for i, size in enumerate(sizes.tolist()):
        its_X = np.asarray(X, float)[of == i]
        rows[size] = Size(
            E=float(E[i]),
            x=float(mean_x[i]),
            error=float(mean_error[i]),
            X_range=(float(its_X.min()), float(its_X.max())),
            own_K=float(own_K[i]),
            off=bool(off[i]),
        )
    K_max, N0 = np.exp(theta).tolist()
    half_K_max, half_N0 = np.sqrt(scaled_covariance.diagonal()).tolist()
    return PowerLaw(
        K_max=K_max,
        N0=N0,
        K_max_interval=around(K_max, half_K_max),
        N0_interval=around(N0, half_N0),
        scaled_covariance=scaled_covariance,
        sizes=rows,
        rmse=math.sqrt(np.mean(errors**2)),
    )


def slopes(theta: Array, sizes: Array) -> Array:
    """K_max / (1 + N0 / N) of each size (S,), for theta = log K_max, log N0."""
    return np.exp(theta[0]) / (1 + np.exp(theta[1]) / sizes)


def search(sizes: Array, of: Array, dx: Array, dy: Array, weight: Array, log_K_max: float) -> Array:
    """log K_max and log N0 of least squares, the best from seven starts."""
    least = math.log(sizes[0] / FARTHEST)
    most = math.log(sizes[-1] * FARTHEST)
    bounds = [-np.inf, least], [np.inf, most]

    def residuals(theta: Array) -> Array:
        return np.sqrt(weight) * (dy + slopes(theta, sizes)[of] * dx)

    results = []
    for log_N0 in np.linspace(least, most, 9)[1:-1]:
        start = log_K_max, log_N0
        results.append(least_squares(residuals, start, bounds=bounds, xtol=1e-15, ftol=1e-15, gtol=1e-15))
    return min(results, key=lambda result: result.cost).x


def robust_covariance(theta: Array, K: Array, dx: Array, weight: Array, errors: Array, width: float) -> Array:
    """(2, 2) of log K_max and log N0, by HC3, from the slope, weight and error of each point (n,):

    width^2 bread sum_i s_i s_i' bread, with s_i = w_i e_i / (1 - h_i) (d e_i / d theta) and h_i the leverage."""
    left = 1 - K / math.exp(theta[0])  # N0 / N / (1 + N0 / N)
    by_theta = np.stack([K * dx, -(K * left) * dx], 1)  # (n, 2) derivatives by log K_max and log N0
    bread = np.linalg.pinv(by_theta.T @ (weight[:, None] * by_theta))  # (2, 2)
    # weight is 1 / points of the size, which is also the leverage of its mean
    leverage = weight + weight * np.einsum("ni,ij,nj->n", by_theta, bread, by_theta)  # (n,)
    scaled = weight * errors / np.maximum(1 - leverage, 1e-3)
    scores = by_theta * scaled[:, None]  # (n, 2)
    return width**2 * bread @ scores.T @ scores @ bread


def checked(N: Sequence[float], X: Sequence[float], L: Sequence[float], least: int = 3) -> tuple[Array, ...]:
    """(N, log X, log L) as arrays (n,). ValueError as `fit` says; a size needs `least` different X."""
    sizes = np.asarray(N, float)
    x = np.asarray(X, float)
    y = np.asarray(L, float)
    if not sizes.size:
        raise ValueError("there is no point to fit a law to")
    if not sizes.shape == x.shape == y.shape == (sizes.size,):
        raise ValueError(f"N, X and L must be flat and of equal length, not {sizes.shape}, {x.shape} and {y.shape}")
    valid = np.isfinite(sizes) & np.isfinite(x) & (sizes > 0) & (x > 0) & (y > 0) & (y <= 1)
    if not valid.all():
        raise ValueError("N and X must be above 0 and L above 0 and at most 1; leave out points with a pass rate of 1")
    for size in np.unique(sizes):
        count = len(np.unique(x[sizes == size]))
        if count < least:
            raise ValueError(f"size {size:g} has {count} different X, and a line with its error needs at least 3")
    return sizes, np.log(x), np.log(y)


def main() -> None:
    """A worked example: three small models are run, a fourth for two evaluations."""
    N = [1] * 3 + [2] * 3 + [4] * 3
    X = [1, 2, 4] * 3
    L = [0.5, 0.44, 0.38, 0.5, 0.41, 0.33, 0.5, 0.38, 0.29]
    law = fit(N, X, L)
    print("log L = -K(N) log X + E(N), K(N) = K_max / (1 + N0 / N); 95 % intervals")
    print("K_max  {:.3f}  [{:.3f}, {:.3f}]".format(law.K_max, *law.K_max_interval))
    print("N0     {:.3f}  [{:.3f}, {:.3f}]".format(law.N0, *law.N0_interval))
    law = law.with_size(8, X=[1, 2], L=[0.52, 0.37])
    for size, E in law.E.items():
        low, high = law.interval(size, 16)
        at_16 = f"{law.predict(size, 16):.3f} [{low:.3f}, {high:.3f}]"
        print(f"size {size:g}: K {law.K(size):.3f}, E {E:.3f}, L at X = 16 {at_16}")
    print(f"size 8 overtakes size 4 at X = {law.crossing(4, 8):.2f}")
    print(f"best size for a budget of X = 1: {law.best_size(1):g}, of X = 16: {law.best_size(16):g}")
    for note in law.notes:
        print(note)


if __name__ == "__main__":
    main()
