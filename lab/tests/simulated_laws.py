"""Simulations for `lab/law/other_laws.py`: constants from the range that both papers print, evaluations of few problems."""

import math

import numpy as np
from other_laws import Run, best_of_grid, fit_n_star, fit_power_law, n_star, sigmoid
from scipy.special import logit

PROBLEMS = 500  # of an evaluation
SIZES = (0.5, 1.5, 3, 7, 14, 32, 72)  # billions of parameters, as in arXiv 2509.25300
AT = (5.25, 5.5, 5.84, 6.2, 6.5)  # log10 C at which n* is asked for; the half-way point of both published laws is 5.84


def inside(interval, value):
    return interval[0] <= value <= interval[1]


def sizes_draw(rng):
    """(N, X, L, K_max, N0): seven sizes with 20 evaluations each. Published K_max .074 to .163, N0 8.5 to 28.3."""
    N = np.repeat(SIZES, 20)
    X = np.tile(np.geomspace(1, 100, 20), len(SIZES))
    K_max = rng.uniform(0.07, 0.165)
    N0 = math.exp(rng.uniform(math.log(8), math.log(28)))
    E = np.repeat(rng.uniform(-0.7, -0.3, len(SIZES)), 20)
    L = rng.binomial(PROBLEMS, X ** -(K_max / (1 + N0 / N)) * np.exp(E)) / PROBLEMS
    return N, X, np.maximum(L, 1 / PROBLEMS), K_max, N0


def recover_sizes(draws, rng):
    """(draws, 5): whether the intervals hold K_max and N0, the share of the seven K that are covered, and the relative
    errors of K_max and of the largest K."""
    rows = []
    for _ in range(draws):
        *points, K_max, N0 = sizes_draw(rng)
        law = fit_power_law(*points)
        K = {N: K_max / (1 + N0 / N) for N in SIZES}
        row = [
            inside(law.interval(lambda law: law.K_max), K_max),
            inside(law.interval(lambda law: law.N0), N0),
            np.mean([inside(law.interval(lambda law, N=N: law.K(N)), K[N]) for N in SIZES]),
            abs(law.K_max / K_max - 1),
            abs(law.K(72) / K[72] - 1),
        ]
        rows.append(row)
    return np.array(rows, float)


def family(law, B, share, rollouts):
    """The parameters of a sigmoid for each n, such that the highest at C is that of n*(C).

    Of all curves R0 + gain(m) / (1 + (e^m / C)^B) with gain ~ e^(kappa m), kappa = (1 - share) B, the best at C is the
    one that has made `share` of its gain there: log C = m + logit(share) / B. So m of an n is taken from the C of which
    this n is n*. Near both ends of the law, where that C runs to 0 or infinity, it goes on in a straight line.
    """
    L, s, log10_C0, b = law
    z = (np.log2(rollouts) - b) / L
    near = np.clip(z, 0.03, 0.97)
    m = (log10_C0 + (logit(near) + (z - near) / (0.03 * 0.97)) / s) * math.log(10) - logit(share) / B
    top = (log10_C0 + logit(0.97) / s) * math.log(10) - logit(share) / B
    gain = np.minimum(0.8, 0.55 * np.exp((1 - share) * B * (m - top)))
    return [np.array([0.2, g, math.log(B), min(c, top + 3)]) for g, c in zip(gain, m, strict=True)]


def grid_draw(rng):
    """A law between those published for easy and hard prompts, and eight runs of 60 evaluations, each with twice the n
    of the one before."""
    law = rng.uniform([4.4, 4.7, 5.7, 2.7], [6.2, 7.3, 6.0, 2.8])
    rollouts = np.round(2 ** (np.arange(3, 11) - rng.uniform(0, 1)))  # n* lies anywhere between two of them
    curves = family(law, rng.uniform(1.5, 2.5), rng.uniform(0.8, 0.9), rollouts)
    runs = []
    for n, curve in zip(rollouts, curves, strict=True):
        first, last = np.array([10**4.5, 10**6.8]) / (32 * n)
        updates = np.unique(np.round(np.geomspace(max(1, first), last, 60)))
        rewards = rng.binomial(PROBLEMS, sigmoid(32 * n * updates, curve)) / PROBLEMS
        runs.append(Run(32, int(n), updates.tolist(), rewards.tolist()))
    return law, runs


def recover_rollouts(draws, rng):
    """(draws, 5): whether the interval holds n*, at each of AT."""
    rows = []
    for _ in range(draws):
        truth, runs = grid_draw(rng)
        C, best_n = best_of_grid(runs)
        law = fit_n_star(C, best_n[0], best_n[1:])
        rows.append([inside(law.interval(10**at), n_star(10**at, *truth)) for at in AT])
    return np.array(rows, float)
