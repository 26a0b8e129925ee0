"""Simulations behind the promises of `fit_sigmoid.py`: accuracy, coverage, verdicts, prediction, time.

    python tools/fit_benchmark.py [--draws 1000] [--seed 0]

Every draw is a curve of known truth, observed with noise. The reference for accuracy is a dense multi-start maximum
likelihood in all four parameters (20 random starts and the truth itself), which no maximum-likelihood method can beat.
The last table leaves the sigmoid: curves of the shape of the built-in task, some of them no sigmoids at all.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares
from scipy.signal import lfilter
from scipy.special import betaincinv, expit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_sigmoid import fit, sigmoid

Draw = tuple[np.ndarray, np.ndarray, tuple[float, float, float, float], float]  # C (N,), R (N,), (R0, A, B, C_mid), sd
TRIAL = ([0, 107, 207, 400, 600, 800, 900], [0.065, 0.173, 0.323, 0.623, 0.813, 0.893, 0.933])  # kilotokens, pass rate


def draw(rng: np.random.Generator, *, spanning: bool = False) -> Draw:
    """A run over the paper's range of parameters: R0 .2-.35, A .45-.70, B .6-2.5, C_mid 500-20,000, noise .005-.01.

    20-80 evenly spaced evaluations up to 0.5-10 C_mid, or with `spanning` 40-80 from C_mid / 4 to 4 C_mid. Half of the
    runs have the point at C = 0.
    """
    truth = (
        rng.uniform(0.2, 0.35),
        rng.uniform(0.45, 0.7),
        rng.uniform(0.6, 2.5),
        float(np.exp(rng.uniform(*np.log([500, 20_000])))),
    )
    if spanning:
        C = np.linspace(truth[3] / 4, truth[3] * 4, rng.integers(40, 81))
    else:
        C = np.linspace(0, truth[3] * np.exp(rng.uniform(*np.log([0.5, 10]))), rng.integers(21, 82))[1:]
    C, sd = np.append(0.0, C) if rng.random() < 0.5 else C, rng.uniform(0.005, 0.01)
    return C, np.clip(sigmoid(C, *truth) + rng.normal(0, sd, C.size), 0, 1), truth, sd


def multi_start(C: np.ndarray, R: np.ndarray, truth: tuple, rng: np.random.Generator) -> tuple[float, float]:
    """(A, sum of squares) of the best of 20 random starts and the truth; four parameters, A <= 1."""
    top = C.max()
    bounds = np.array([[0, 1], [0, 1], np.log([0.05, 20]), np.log([top / 1e4, top * 1e3])]).T

    def _residuals(v: np.ndarray) -> np.ndarray:
        return sigmoid(C, v[0], v[1], np.exp(v[2]), np.exp(v[3])) - R

    low, high = [0.1, 0.4, np.log(0.3), np.log(top) - 4], [0.4, 1, np.log(5), np.log(top) + 2]
    starts = [[*truth[:2], *np.log(truth[2:])], *rng.uniform(low, high, (20, 4))]
    best = min(
        (
            least_squares(
                _residuals, v, bounds=bounds, x_scale=[0.1, 0.1, 0.3, 0.5], xtol=1e-12, ftol=1e-12, gtol=1e-12
            )
            for v in starts
        ),
        key=lambda o: o.cost,
    )
    return float(best.x[1]), 2 * best.cost


def inside(interval: tuple[float, float], value: float) -> bool:
    """Is the value in the interval, ends included?"""
    return bool(interval[0] <= value <= interval[1])


def paper_range(draws: int, seed: int, *, spanning: bool = False, reference: bool = True) -> dict[str, float]:
    """Accuracy, coverage, verdicts and CPU time over `draws` runs of the paper's range."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(draws):
        C, R, truth, sd = draw(rng, spanning=spanning)
        start = time.process_time()
        f = fit(C, R)
        seconds, Q, far = time.process_time() - start, f.rmse**2 * C.size, 2 * C.max()
        A_ref, Q_ref = multi_start(C, R, truth, rng) if reference else (f.A, Q)
        later = float(sigmoid(far, *truth))
        held = [inside(span, value) for span, value in zip(f.intervals, truth, strict=True)][1:]  # A, B, C_mid
        rows.append(
            (
                f.A - truth[1],
                A_ref - truth[1],
                Q > Q_ref * (1 + 1e-6),
                f.identifiable,
                *held,
                inside(f.interval(far)[:, 0], later),
                inside(f.interval(far, noise=True)[:, 0], later + rng.normal(0, sd)),
                seconds,
            )
        )
    error, best, failed, known, A, B, C_mid, curve, evaluation, seconds = np.array(rows, dtype=float).T
    known = known > 0
    return {
        "RMSE of A": np.sqrt(np.mean(error**2)),
        "reference RMSE of A": np.sqrt(np.mean(best**2)),
        "median error of A": np.median(abs(error)),
        "reference median error of A": np.median(abs(best)),
        "RMSE of A where identifiable": np.sqrt(np.mean(error[known] ** 2)),
        "failed convergence": failed.sum(),
        "identifiable": known.mean(),
        "A covered": A.mean(),
        "A covered where identifiable": A[known].mean(),
        "B covered": B.mean(),
        "C_mid covered": C_mid.mean(),
        "curve at 2 C covered": curve.mean(),
        "evaluation at 2 C covered": evaluation.mean(),
        "CPU seconds a fit, median": np.median(seconds),
        "CPU seconds a fit, largest": seconds.max(),
    }


def no_ceiling(draws: int, seed: int) -> dict[str, float]:
    """How many runs without a ceiling are called identifiable, of `draws` each, with 6 to 40 points."""
    rng, counts = np.random.default_rng(seed), {}
    shapes = {
        "straight in C": lambda x: x,
        "straight in log C": lambda x: 1 + np.log(x) / np.log(x.size),
        "C^0.7": lambda x: x**0.7,
        "constant": lambda x: 0 * x,
        "falling": lambda x: -0.5 * x,
    }
    for name, shape in shapes.items():
        counts[name] = 0
        for _ in range(draws):
            x = np.linspace(0, 1, rng.integers(6, 41) + 1)[1:]
            R = rng.uniform(0.15, 0.35) + rng.uniform(0.05, 0.3) * shape(x)
            R += rng.normal(0, rng.uniform(0.005, 0.01), x.size)
            counts[name] += fit(1e4 * x, np.clip(R, 0, 1)).identifiable
    return counts


def task_shapes() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Pass rate against kilotokens, .065 to .93: a sigmoid, a logistic in C, and the points of a trial joined."""
    return {
        "sigmoid": lambda c: sigmoid(c, 0.065, 0.98, 2.3, 320.0),
        "logistic in C": lambda c: 0.94 * expit((c - 300) / 120),
        "trial, interpolated": PchipInterpolator(*TRIAL),
    }


def evaluate(rng: np.random.Generator, mean: np.ndarray, prompts: int, samples: int, fresh: bool = False) -> np.ndarray:
    """Measured pass rates (K,) of prompts whose difficulty has a beta distribution of the given means (K,).

    The held-out prompts are the same at every evaluation, or with `fresh` drawn anew.
    """
    rank = rng.random((mean.size, prompts)) if fresh else (np.arange(prompts) + 0.5) / prompts
    p = betaincinv(2 * mean[:, None], 2 - 2 * mean[:, None], rank)  # (K, prompts): easy prompts stay easy
    return rng.binomial(samples, p).mean(1) / samples


def noise_kinds(draws: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Coverage of A, median dispersion, share identifiable: samples are correlated, or neighboring residuals are."""
    result = {}
    for name in ("independent samples", "one held-out set", "new prompts every time", "waves, correlation 0.6"):
        rng, rows = np.random.default_rng(seed), []
        for _ in range(draws):
            C, _, truth, sd = draw(rng, spanning=True)
            mean, n = sigmoid(C, *truth), 16_000
            if name == "independent samples":
                R = rng.binomial(n, mean) / n
            elif name == "waves, correlation 0.6":
                R, n = mean + sd * 0.8 * lfilter([1], [1, -0.6], rng.normal(size=C.size + 30))[30:], None
            else:
                R = evaluate(rng, mean, 1000, 16, fresh=name == "new prompts every time")
            f = fit(C, R, n_samples=n)
            rows.append((inside(f.A_interval, truth[1]), f.uncertainty.dispersion, f.identifiable))
        covered, dispersion, known = np.array(rows, dtype=float).T
        result[name] = covered.mean(), float(np.median(dispersion)), known.mean()
    return result


def half_runs(draws: int, seed: int, every: int) -> dict[str, tuple[float, float, float]]:
    """Fit the first half of runs of the built-in task's shape: an evaluation of 512 x 2 samples `every` kilotokens.

    Returns by shape: mean RMSE on the second half, share of runs with RMSE <= 0.05, share whose last evaluation lies in
    its interval.
    """
    rng, result, C = np.random.default_rng(seed), {}, np.arange(0, 901, every, dtype=float)
    for name, shape in task_shapes().items():
        rows = []
        for _ in range(draws):
            R, first = evaluate(rng, shape(C), 512, 2), C <= 450
            f = fit(C[first], R[first], n_samples=1024)
            rmse = np.sqrt(np.mean((f.predict(C[~first]) - R[~first]) ** 2))
            rows.append((rmse, rmse <= 0.05, inside(f.interval(C[-1], noise=True)[:, 0], R[-1])))
        result[name] = tuple(np.mean(rows, axis=0))
    return result


def main() -> None:
    """Print the tables of docs/fit.md."""
    parser = argparse.ArgumentParser(description="Simulations behind the promises of fit_sigmoid.py")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    wide = paper_range(args.draws, args.seed)
    narrow = paper_range(args.draws // 2, args.seed + 1, spanning=True, reference=False)
    print(f"| the paper's range of parameters | {args.draws} runs | {args.draws // 2} over C_mid/4 .. 4 C_mid |")
    print("|---|---|---|")
    for key, value in wide.items():
        other = "" if "reference" in key or "failed" in key else f"{narrow[key]:.3f}"
        print(f"| {key} | {value:.4g} | {other} |")
    print(f"\n| no ceiling to find, {args.draws // 5} runs each | called identifiable |\n|---|---|")
    for key, value in no_ceiling(args.draws // 5, args.seed).items():
        print(f"| {key} | {value} |")
    print("\n| kind of noise | A covered | median dispersion (waves: its root, an sd) | identifiable |")
    print("|---|---|---|---|")
    for key, (covered, dispersion, known) in noise_kinds(args.draws // 5, args.seed).items():
        shown = dispersion if dispersion > 0.01 else math.sqrt(dispersion)
        print(f"| {key} | {covered:.3f} | {shown:.2g} | {known:.2f} |")
    print("\n| first half fitted | evaluated every | RMSE on the second half | runs <= 0.05 | last point covered |")
    print("|---|---|---|---|---|")
    for every in (25, 50, 100):
        for key, (rmse, share, covered) in half_runs(max(args.draws // 10, 5), args.seed, every).items():
            print(f"| {key} | {every}k tokens | {rmse:.3f} | {share:.0%} | {covered:.0%} |")
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
