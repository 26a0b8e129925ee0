"""tools/size_report.py and tools/grid_report.py: the laws of model size and of rollouts, on runs made by hand."""

import math

import ablation_figures
import grid_report
import numpy as np
import pytest
import size_report
from made_curves import made

from fit_sigmoid import sigmoid
from tasks.sizes import parameters

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
        law, points = size_report.law_of(sizes, axis)
        assert (law.K_max, law.N0) == (pytest.approx(0.3, rel=1e-4), pytest.approx(150_000, rel=1e-3))
        assert size_report.rmse(law, points) < 1e-5 and size_report.within(points) < 1e-5
        by_law, copied, ratio = size_report.across(points)
        assert by_law < 1e-4 < copied and ratio == pytest.approx(1, abs=1e-3)
    K = 0.3 / (1 + 150_000 / parameters("xl"))
    last = max(X for N, X, _ in size_report.rise(sizes[parameters("xl")], parameters("xl"), "tokens"))
    assert last == math.ceil(2 ** (1 / K)) / 4
    page = size_report.page(sizes)
    assert "| 226k | 2 |" in page and "## Over sampled tokens" in page


def test_the_best_size_is_the_measured_one_beside_the_laws():
    """Without offsets the largest model has the lowest L everywhere."""
    sizes = {parameters(name): [on_the_law(name)] for name in ("s", "m", "l")}
    rows = size_report.budget_table(sizes, "tokens").splitlines()[2:]
    assert len(rows) == 5 and all(row.split("|")[2:4] == [" 505k ", " 505k "] for row in rows)


def grid_run(B_p, n, seed, C_mid, points=16):
    C = 4096.0 * np.arange(points + 1)
    return made(f"{B_p}x{n}", seed, rates=sigmoid(C, 0.1, 0.8, 1.5, C_mid), step=C / (B_p * n), comparison="grid-easy")


def test_the_grid_finds_the_rollouts_that_are_best_at_each_budget():
    """The curve of n = 4 is ahead at first and stops at .4; that of n = 64 is behind, and ends higher."""
    found = {
        "16x4": [grid_run(16, 4, 0, 5e3)], "16x64": [grid_run(16, 64, 0, 4e4)], "64x4": [grid_run(64, 4, 0, 9e3)],
    }  # fmt: skip
    for curve in found["16x4"] + found["64x4"]:
        curve.points["pass_rate"][:] = np.minimum(curve.points["pass_rate"], 0.4)
    runs, grid = grid_report.grid_of(found)
    assert (grid.best_n[0], grid.best_n[-1]) == (4, 64)
    assert len(runs) == 3 and runs[0].C[1] == 4096
    table = grid_report.shape_table("easy", runs)
    assert table.splitlines()[0] == "| easy: B_p | n = 4 | n = 64 |" and "| 64 | 0.400 | nan |" in table
    assert "| easy |" in grid_report.page({"easy": (runs, grid)})


def test_the_fits_of_the_graded_task_leave_out_its_first_rise():
    """The evaluation at 50k tokens is left out, those at 0 and 100k stay; of other tasks all are used. Over
    device-hours, a thousandth of the tokens, the same ones are left out."""
    run = made(every=50_000.0, C_mid=3e5, flags={"dataset": "graded"})
    for axis in ("tokens", "device_hours"):
        points = ablation_figures.fitted(run, axis).fit.points
        assert points.left_out["skipped"] == 1 and points.C[0] == 0 and points.C.size == 16
    assert ablation_figures.fitted(made(every=50_000.0, C_mid=3e5), "tokens").fit.points.left_out["skipped"] == 0
