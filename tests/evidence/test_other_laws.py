"""evidence/other_laws.py: the laws of model size and of rollouts, on runs made by hand."""

import math

import numpy as np
import other_laws
import pytest
from made_curves import made
from other_laws import parameters

from fit_sigmoid import sigmoid

pytestmark = pytest.mark.medium


def on_the_law(name, seed=0, K_max=0.3, N0=150_000, n=320):
    """Evaluations at X = 1/4, 2/4, 3/4 ... on log L = -K(N) log 4 X, in tokens; FLOPs are ten times the tokens."""
    K = K_max / (1 + N0 / parameters(name))
    X = 0.25 * np.arange(1, n + 1)
    return made(name, seed, rates=[0.0, *(1 - (4 * X) ** -K)], every=0.25, comparison="sizes")


def test_runs_that_keep_the_power_law_are_predicted_exactly():
    """Only their rise is fitted: L = (4 X)^-K is .5 at 4 X = 2^(1 / K). Over FLOPs a run has the same slopes."""
    sizes = {parameters(name): [on_the_law(name, seed) for seed in (0, 1)] for name in ("s", "m", "l", "xl")}
    for axis in ("tokens", "flops"):
        law, points = other_laws.law_of(sizes, axis)
        assert (law.K_max, law.N0) == (pytest.approx(0.3, rel=1e-4), pytest.approx(150_000, rel=1e-3))
        assert law.rmse < 1e-5 and other_laws.slope_ratio(points) == pytest.approx(1, abs=1e-3)
    K = 0.3 / (1 + 150_000 / parameters("xl"))
    last = other_laws.rise(sizes[parameters("xl")][0], parameters("xl"), "tokens")[:, 1].max()
    assert last == math.ceil(2 ** (1 / K)) / 4
    page = other_laws.size_page(sizes)
    assert "| 226k | " in page and "In all rows: runs 2." in page and "Over sampled tokens: K_max 0.3" in page


def test_the_findings_on_size_by_hand():
    """On L = (4 X)^-K a run is at .5 at 4 X = 2^(1 / K), up to the straight line between evaluations, and FLOPs are as
    many times the tokens for every size, so that both rows say the same. All seeds are alike: no spread to see by."""
    sizes = {parameters(name): [on_the_law(name, seed) for seed in (0, 1)] for name in ("s", "m", "l", "xl")}
    rows = other_laws.size_findings(sizes)
    K_s, K_xl = (0.3 / (1 + 150_000 / parameters(name)) for name in ("s", "xl"))
    needed, slope = 2 ** (1 / K_xl - 1 / K_s) - 1, K_xl / K_s - 1
    for row, expected, near in zip(rows, (needed, needed, slope, 0.0), (0.02, 0.02, 5e-3, 1e-3), strict=True):
        assert float(row[4].split(" %")[0]) / 100 == pytest.approx(expected, abs=near)
        assert row[5:] == ["2", "–", "**reproduced**"]
    assert [row[:2] for row in rows] == [["1.01M", "102k"]] * 3 + [["1.01M", "as the others predict"]]
    assert [row[3] for row in rows] == ["lower", "lower", "higher", "-9 % to +10 %"]


def grid_run(B_p, n, seed, C_mid, points=16, **columns):
    C = 4096.0 * np.arange(points + 1)
    rates = sigmoid(C, 0.1, 0.8, 1.5, C_mid)
    return made(f"{B_p}x{n}", seed, rates=rates, step=C / (B_p * n), comparison="grid-easy", **columns)


def test_the_grid_finds_the_rollouts_that_are_best_at_each_budget():
    """The curve of n = 4 is ahead at first and stops at .4; that of n = 64 is behind, and ends higher."""
    C_mid = {(16, 4): 5e3, (16, 64): 4e4, (64, 4): 9e3}
    found = {f"{B_p}x{n}": [grid_run(B_p, n, 0, half)] for (B_p, n), half in C_mid.items()}
    for curve in found["16x4"] + found["64x4"]:
        curve.points["pass_rate"][:] = np.minimum(curve.points["pass_rate"], 0.4)
    grid = other_laws.grid_of(found)
    assert (grid.best_n[0], grid.best_n[-1], grid.C[-1]) == (4, 64, 16 * 4096)
    assert "| easy |" in other_laws.grid_page({"easy": grid})


def test_a_grid_whose_best_n_never_changes_says_so():
    """n = 4 is ahead of n = 16 at every C."""
    found = {"easy": {"16x4": [grid_run(16, 4, 0, 5e3)], "16x16": [grid_run(16, 16, 0, 2e4)]}}
    halves = {"easy": other_laws.grid_of(found["easy"])}
    why = "n* is 4 at every C, so nothing shows how it grows; widen C or the grid of n"
    assert f"No law for the easy half: {why}." in other_laws.grid_page(halves)
    [row, worst] = other_laws.grid_findings(halves, found)
    assert worst[5] == "–"  # no column `worst` is there
    assert row == ["grid-easy", "–", "–", "log2 n*", "higher", why, "–", "–", "**cannot be seen at this size**"]


def test_the_findings_of_two_grids_by_hand():
    """Easy: the best n goes from 4 to 64, four powers of two; hard: from 2 to 4, so four powers of two below at the end,
    about: a smooth law overshoots a step. The worst of k ends at .1 with n = 4, and at .3 and .5 with n = 64: Student's t for one degree of
    freedom is 12.706, times .1."""
    easy = {
        "16x4": [grid_run(16, 4, seed, 5e3, worst=[0.1] * 17) for seed in (0, 1)],
        "16x64": [grid_run(16, 64, seed, 4e4, worst=[0.3 + 0.2 * seed] * 17) for seed in (0, 1)],
    }
    hard = {"16x2": [grid_run(16, 2, 0, 5e3)], "16x4": [grid_run(16, 4, 0, 4e4)]}
    for curve in [*easy["16x4"], *hard["16x2"]]:
        curve.points["pass_rate"][:] = np.minimum(curve.points["pass_rate"], 0.4)
    found = {"easy": easy, "hard": hard}
    rows = other_laws.grid_findings({half: other_laws.grid_of(runs) for half, runs in found.items()}, found)
    of_easy, of_hard, between, worst, best = rows
    assert [float(row[5].split()[0]) for row in (of_easy, of_hard, between)] == pytest.approx([3, 0, -4], abs=0.4)
    assert of_easy[0] == "grid-easy" and of_easy[3:5] == ["log2 n*, growth beyond 1", "higher"]
    assert of_easy[-1] == "**reproduced**"
    assert between[1:5] == ["hard", "easy", "log2 n* at C = 65.5k", "lower"] and between[-1] == "**reproduced**"
    assert worst[1:6] == ["n = 64", "n = 4", "worst of k at the end", "higher", "+0.300 [-0.971, +1.571]"]
    assert worst[-1] == "**cannot be seen at this size**" and best[5] == "–"
