"""IsoCompute: how should a budget of sampled completions be spent: on prompts, on rollouts per prompt, or on updates?

PROBLEM. A run that samples B_p prompts a batch and n rollouts a prompt for M updates costs, in completions,

    C = B_p n M

At equal C few rollouts give many updates on noisy advantages, and many rollouts give few updates on good ones.

IDEA (Cheng et al. 2026, arXiv 2603.12151). Make cheap runs over a grid of (B_p, n). Each run is a curve of reward
against C. At each C some n lies on the upper envelope of all curves; this best n grows with C and saturates:

    log2 n*(C) = L / (1 + exp(-s (log10 C - log10 C0))) + b

from 2^b rollouts for a small budget to 2^(b + L) for a large one, half way (in log2) at C0. Hard prompts saturate
earlier than easy ones. For B_p there is no such law: any value that is stable will do.

How a run becomes a curve. Rewards rise with noise, so only record-breaking points count: the reward is cut into bins,
and the first point in each new highest bin is kept. A monotone sigmoid is fitted to these:

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

The recipe, as one function (`recommend`): 1 cheap runs with small M; 2 fit them; 3 n* for the budget; 4 the smallest
stable B_p; 5 all that is left into M.

What more rollouts buy. On easy prompts they *sharpen*: the average and the worst of k rise. On hard ones they *cover*:
the best of k rises, as rare solutions are found. `of_k` gives the three from counts of correct answers.

    >>> [round(float(n_star(C, L=6.09, s=4.75, log10_C0=5.84, b=2.73))) for C in (10**4.5, 10**5.84, 10**6.5)]
    [7, 55, 379]

Symbols: B_p prompts per batch, n rollouts per prompt, M updates, C completions, R reward (a pass rate).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.special import comb, expit
from scipy.stats import t as student

CONFIDENCE = 0.95
FALL = 0.1  # a run is unstable if its reward falls this far below the highest before
ENVELOPE_POINTS = 40  # values of C, evenly in log C, at which the best n is read


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
    def stable(self) -> bool:
        """Whether no reward lies FALL below an earlier one."""
        rewards = np.asarray(self.rewards, float)
        return bool(np.all(rewards > np.maximum.accumulate(rewards) - FALL))


# ------------------------------------------------------------------------------------------------------ one run's curve


def record_points(C: Sequence[float], R: Sequence[float], bin_width: float = 0.02) -> np.ndarray:
    """(n,) True where R is the first, in the order of C, in a higher bin than all before it."""
    order = np.argsort(C, kind="stable")
    bins = np.floor(np.asarray(R, float)[order] / bin_width + 1e-9)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(bins)[:-1]])
    mask: np.ndarray = np.zeros(len(bins), bool)
    mask[order] = bins > before
    return mask


def sigmoid(C: np.ndarray, R0: float, A: float, B: float, C_mid: float) -> np.ndarray:
    """R0 + (A - R0) / (1 + (C_mid / C)^B)."""
    return R0 + (A - R0) * expit(B * (np.log(C) - math.log(C_mid)))


def fit_run(run: Run, bin_width: float = 0.02) -> tuple[float, float, float, float]:
    """(R0, A, B, C_mid) of the monotone sigmoid through the run's record points. Raises ValueError if there are fewer
    than 4 of them."""
    C, R = run.C, np.asarray(run.rewards, float)
    seen = C > 0
    keep = record_points(C[seen], R[seen], bin_width)
    C, R = C[seen][keep], R[seen][keep]
    if len(C) < 4:
        raise ValueError(f"the run with B_p {run.B_p} and n {run.n} has {len(C)} record points, and a curve needs 4")
    x = np.log(C)

    def residuals(p: np.ndarray) -> np.ndarray:
        return p[0] + (p[1] - p[0]) * expit(math.exp(p[2]) * (x - p[3])) - R

    low, high = [0, 0, math.log(0.2), x.min() - 3], [1, 1, math.log(10), x.max() + 3]
    starts = ([R.min(), R.max(), 0.4, middle] for middle in np.linspace(x.min(), x.max(), 5))
    found = [least_squares(residuals, np.clip(start, low, high), bounds=(low, high)) for start in starts]
    R0, A, log_B, log_C_mid = min(found, key=lambda result: result.cost).x
    return float(R0), float(A), math.exp(log_B), math.exp(log_C_mid)


# ------------------------------------------------------------------------------------------------ the best n for each C


def envelope(runs: Sequence[Run], bin_width: float = 0.02) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(C, best n, its reward), at values of C that at least two n have reached; a curve counts within its own run."""
    curves = [(run, fit_run(run, bin_width)) for run in runs]
    least = sorted(min(run.C[run.C > 0].min() for run in runs if run.n == n) for n in {run.n for run in runs})
    most = sorted((max(run.C.max() for run in runs if run.n == n) for n in {run.n for run in runs}), reverse=True)
    if len(least) < 2 or least[1] >= most[1]:
        raise ValueError("the runs need at least two values of n that reach the same C")
    grid = np.geomspace(least[1], most[1], ENVELOPE_POINTS)
    best = [
        max((float(sigmoid(C, *curve)), run.n) for run, curve in curves if run.C[run.C > 0].min() <= C <= run.C.max())
        for C in grid
    ]
    return grid, np.array([n for _, n in best]), np.array([reward for reward, _ in best])


def n_star(C: float | np.ndarray, L: float, s: float, log10_C0: float, b: float) -> np.ndarray:
    """The best number of rollouts for C completions: 2^(L / (1 + exp(-s (log10 C - log10 C0))) + b)."""
    return 2 ** (L * expit(s * (np.log10(C) - log10_C0)) + b)


@dataclass(frozen=True)
class BestRollouts:
    """A fitted n*(C). An interval with an infinite end: these data do not tell."""

    L: float
    s: float
    log10_C0: float
    b: float
    L_interval: tuple[float, float]
    s_interval: tuple[float, float]
    log10_C0_interval: tuple[float, float]
    b_interval: tuple[float, float]
    covariance: np.ndarray  # (4, 4), of L, log s, log10 C0, b; times the squared quantile
    range: tuple[float, float]  # of the C that were fitted

    def __call__(self, C: float) -> float:
        """n*(C)."""
        return float(n_star(C, self.L, self.s, self.log10_C0, self.b))

    def interval(self, C: float) -> tuple[float, float]:
        """95 % interval of n*(C)."""
        z = float(expit(self.s * (math.log10(C) - self.log10_C0)))
        slope = self.L * z * (1 - z)
        gradient = np.array([z, slope * self.s * (math.log10(C) - self.log10_C0), -slope * self.s, 1])
        error = math.sqrt(max(0.0, gradient @ self.covariance @ gradient))
        return self(C) * 2**-error, self(C) * 2**error


def fit_n_star(C: Sequence[float], n: Sequence[float]) -> BestRollouts:
    """The law through best rollouts n at C, by least squares on log2 n; it never falls (L >= 0, s > 0).

    Raises:
        ValueError: fewer than 5 points, a value that is not positive, or the same n everywhere.
    """
    x, y = np.asarray(C, float), np.asarray(n, float)
    if len(x) < 5 or x.shape != y.shape or not np.all((x > 0) & (y > 0)):
        raise ValueError("the law needs at least 5 positive values of C, and a positive n for each")
    x, y = np.log10(x), np.log2(y)
    if np.ptp(y) == 0:
        raise ValueError(f"n* is {2 ** y[0]:g} at every C, so nothing shows how it grows; widen C or the grid of n")

    def residuals(p: np.ndarray) -> np.ndarray:
        return p[0] * expit(math.exp(p[1]) * (x - p[2])) + p[3] - y

    low, high = [0, math.log(0.2), x.min() - 1, -2], [20, math.log(50), x.max() + 1, 20]
    middles = [np.quantile(x, share) for share in (0.25, 0.5, 0.75)]
    starts = [[np.ptp(y), math.log(s), middle, max(y.min(), -2)] for s in (2, 5, 10) for middle in middles]
    options = {"bounds": (low, high), "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    best = min((least_squares(residuals, start, **options) for start in starts), key=lambda found: found.cost)
    L, log_s, log10_C0, b = best.x
    width = student.ppf((1 + CONFIDENCE) / 2, max(1, len(x) - 4))
    covariance = width**2 * 2 * best.cost / max(1, len(x) - 4) * np.linalg.pinv(best.jac.T @ best.jac)
    error = np.sqrt(np.maximum(0, np.diag(covariance)))
    error = np.where(np.isclose(best.x, low) | np.isclose(best.x, high), np.inf, error)  # held by a bound, not the data
    (L_low, *_), (L_high, *_) = best.x - error, best.x + error
    return BestRollouts(
        float(L), math.exp(log_s), float(log10_C0), float(b),
        (max(0.0, L_low), L_high), (math.exp(log_s - error[1]), float(np.exp(log_s + error[1]))),
        (log10_C0 - error[2], log10_C0 + error[2]), (b - error[3], b + error[3]),
        covariance, (float(np.min(C)), float(np.max(C))),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the recipe


@dataclass(frozen=True)
class Plan:
    """How to spend a budget, and what that rests on."""

    n: int
    B_p: int
    M: int
    rests_on: tuple[str, ...]


def recommend(runs: Sequence[Run], budget: float) -> Plan:
    """n, B_p and M for `budget` completions from cheap runs over a grid of (B_p, n). n is a power of two.

    Raises:
        ValueError: too few runs for an envelope, no stable B_p, or a budget below one update.
    """
    C, best, _ = envelope(runs)
    law = fit_n_star(C.tolist(), best.tolist())
    n = 2 ** max(0, round(math.log2(law(budget))))
    stable = [B_p for B_p in sorted({run.B_p for run in runs}) if all(run.stable for run in runs if run.B_p == B_p)]
    if not stable:
        raise ValueError(f"no B_p is stable: every one has a run that falls by {FALL}; raise B_p or lower --lr")
    M = int(budget // (stable[0] * n))
    if M < 1:
        raise ValueError(f"a budget of {budget:g} completions is less than one update of {stable[0]} x {n}")
    low, high = law.interval(budget)
    said = [
        f"{len(runs)} runs, n from {min(run.n for run in runs)} to {max(run.n for run in runs)}; the envelope covers "
        f"C from {C[0]:.3g} to {C[-1]:.3g}",
        f"n* at {budget:.3g} is {law(budget):.1f}, 95 % interval {low:.1f} to {high:.1f}",
        f"B_p {stable[0]} is the smallest of which no run falls by {FALL}",
    ]
    if budget > C[-1]:
        said.append(f"the budget is {budget / C[-1]:.1f} times the largest C that was tried: n* is an extrapolation")
    if best[-1] == max(run.n for run in runs):
        said.append(f"the best n at the largest C is the largest that was tried, {best[-1]}: try larger ones")
    return Plan(n, stable[0], M, tuple(said))


def of_k(correct: Sequence[int], total: int, k: int) -> dict[str, float]:
    """Means over prompts of `total` samples each, `correct` of them right: `average`, `best` (pass@k, at least one of k
    is right) and `worst` (all k are), both unbiased. Raises ValueError if k is not from 1 to `total`."""
    c = np.asarray(correct)
    if not 1 <= k <= total or c.min() < 0 or c.max() > total:
        raise ValueError(f"k must be from 1 to {total}, and no count below 0 or above it")
    ways = comb(total, k)
    best, worst = 1 - comb(total - c, k) / ways, comb(c, k) / ways
    return {"average": float(np.mean(c / total)), "best": float(np.mean(best)), "worst": float(np.mean(worst))}


def read(folder: str, y: str) -> Run:
    """A run's folder: config.json and eval.jsonl."""
    flags = json.loads((Path(folder) / "config.json").read_text())
    records = [json.loads(line) for line in (Path(folder) / "eval.jsonl").read_text().splitlines()]
    return Run(flags["batch_prompts"], flags["rollouts"], [r["step"] for r in records], [r[y] for r in records])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="folders of runs over a grid of --batch_prompts and --rollouts")
    parser.add_argument("--budget", type=float, default=0.0, help="completions to spend")
    parser.add_argument("--y", default="pass_rate", help="name of the reward in eval.jsonl")
    args = parser.parse_args(argv)
    if not args.folders:
        parser.print_help()
        return 0
    try:
        plan = recommend([read(folder, args.y) for folder in args.folders], args.budget)
    except (OSError, KeyError, ValueError) as error:
        print(f"isocompute.py: {error}", file=sys.stderr)
        return 2
    print(f"n = {plan.n} rollouts, B_p = {plan.B_p} prompts, M = {plan.M} updates")
    print(*(f"- {line}" for line in plan.rests_on), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
