"""Simulations behind the promises of `fit_sigmoid.py`: accuracy, coverage, verdicts, prediction, time.

    python tools/fit_benchmark.py [--draws 1000] [--seed 0]

Every draw is a curve with known truth over the range of the paper's fitted values, observed with noise. The reference for
the accuracy is a dense multi-start maximum likelihood: 20 random starts and the truth itself, in all four parameters with
their own optimiser, so that no method that maximises the likelihood can do better.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_sigmoid import SigmoidFit, fit, sigmoid  # noqa: E402

Draw = tuple[np.ndarray, np.ndarray, tuple[float, float, float, float]]  # C (N,), R (N,), (R0, A, B, C_mid)


def draw(rng: np.random.Generator, *, spanning: bool = False) -> Draw:
    """A run over the paper's range of parameters: R0 .2-.35, A .45-.70, B .6-2.5, C_mid 500-20,000, noise .005-.01.

    20-80 evenly spaced evaluations up to 0.5-10 C_mid, half of the runs with the point at C = 0. With `spanning`, 40-80
    evaluations from C_mid / 4 to 4 C_mid.
    """
    truth = rng.uniform(0.2, 0.35), rng.uniform(0.45, 0.7), rng.uniform(0.6, 2.5), np.exp(rng.uniform(*np.log([500, 20_000])))
    if spanning:
        C = np.linspace(truth[3] / 4, truth[3] * 4, rng.integers(40, 81))
    else:
        n = rng.integers(20, 81)
        C = np.linspace(0, truth[3] * np.exp(rng.uniform(*np.log([0.5, 10]))), n + 1)[1:]
    C = np.append(0.0, C) if rng.random() < 0.5 else C
    return C, np.clip(sigmoid(C, *truth) + rng.normal(0, rng.uniform(0.005, 0.01), C.size), 0, 1), truth


def multi_start(C: np.ndarray, R: np.ndarray, truth: tuple, rng: np.random.Generator, starts: int = 20) -> tuple[float, float]:
    """(A, sum of squares) of the best of `starts` random starts and the truth, four parameters, A <= 1."""
    top = C.max()
    bounds = np.array([[0, 1], [0, 1], np.log([0.05, 20]), np.log([top / 1e4, top * 1e3])]).T

    def residuals(v: np.ndarray) -> np.ndarray:
        return sigmoid(C, v[0], v[1], np.exp(v[2]), np.exp(v[3])) - R

    first = [truth[0], truth[1], np.log(truth[2]), np.log(truth[3])]
    random = np.stack([rng.uniform(0.1, 0.4, starts), rng.uniform(0.4, 1, starts), rng.uniform(*np.log([0.3, 5]), starts),
                       np.log(top) + rng.uniform(-4, 2, starts)], axis=1)
    found = [least_squares(residuals, v, bounds=bounds, x_scale=[0.1, 0.1, 0.3, 0.5], xtol=1e-12, ftol=1e-12, gtol=1e-12)
             for v in [first, *random]]
    best = min(found, key=lambda o: o.cost)
    return float(best.x[1]), 2 * best.cost


def inside(interval: tuple[float, float], value: float) -> bool:
    return bool(interval[0] <= value <= interval[1])


def paper_range(draws: int, seed: int, *, spanning: bool = False, reference: bool = True) -> dict[str, float]:
    """Accuracy, coverage and verdicts over `draws` runs; every value is a share or an error of A."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(draws):
        C, R, truth = draw(rng, spanning=spanning)
        start = time.perf_counter()
        f = fit(C, R)
        seconds = time.perf_counter() - start
        far = 2 * C.max()
        A_ref, Q_ref = multi_start(C, R, truth, rng) if reference else (f.A, f.rmse**2 * C.size)
        rows.append((abs(f.A - truth[1]), abs(A_ref - truth[1]), f.rmse**2 * C.size > Q_ref * (1 + 1e-6), f.identifiable,
                     inside(f.A_interval, truth[1]), inside(f.B_interval, truth[2]), inside(f.C_mid_interval, truth[3]),
                     inside(f.interval(far)[:, 0], float(sigmoid(far, *truth))),
                     inside(f.interval(far, noise=True)[:, 0], float(sigmoid(far, *truth)) + rng.normal(0, 0.0075)), seconds))
    error, best, failed, known, A, B, C_mid, curve, evaluation, seconds = np.array(rows).T
    known = known.astype(bool)
    return {"RMSE of A": np.sqrt(np.mean(error**2)), "RMSE of A, reference": np.sqrt(np.mean(best**2)),
            "median error of A": np.median(error), "median error of A, reference": np.median(best),
            "RMSE of A, identifiable": np.sqrt(np.mean(error[known] ** 2)), "worse minimum than the reference": failed.mean(),
            "identifiable": known.mean(), "A covered": A.mean(), "A covered, identifiable": A[known].mean(),
            "B covered": B.mean(), "C_mid covered": C_mid.mean(), "curve at 2x covered": curve.mean(),
            "evaluation at 2x covered": evaluation.mean(), "seconds a fit, median": np.median(seconds),
            "seconds a fit, largest": seconds.max()}
