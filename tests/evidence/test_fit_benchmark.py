"""Tests of `evidence/fit_benchmark.py`: its curves, and what its simulations say of `fit_sigmoid.py`."""

import fit_benchmark
import numpy as np
import pytest
from fit_benchmark import TRUTHS, draw, multi_start, no_ceiling, outside, paper_range

from fit_sigmoid import fit

pytestmark = pytest.mark.medium


def test_least_squares_is_the_global_minimum():
    """To a thousandth of the sum of squares, which is what a grid is for."""
    rng = np.random.default_rng(4)
    for i in range(8):
        C, R, truth, _ = draw(rng, spanning=i % 2 == 0)
        f, (A, Q) = fit(C, R), multi_start(C, R, truth, rng)
        assert f.best["log-logistic"].Q[0] <= Q * 1.001
        if f.identifiable:
            assert f.A == pytest.approx(A, abs=1e-3)


@pytest.mark.parametrize("name", TRUTHS)
def test_a_truth_rises_from_nothing_to_all(name):
    share = TRUTHS[name](np.array([1e-9, *np.geomspace(0.01, 1e7, 50)]))
    assert (np.diff(share) >= 0).all() and share[0] < 0.01 and share[-1] == pytest.approx(1, abs=0.03)


def test_outside_judges_the_fit(monkeypatch):
    """A fit that sees nothing says everything is possible: always inside, of width 1, and never identifiable. One that
    is sure of a point is never inside, and wrongly identifiable. It is asked for 14 of 28 points."""

    class Fit:
        def __init__(self, C, R, n_samples):
            assert (C.size, C[-1], n_samples) == (14, pytest.approx(4 * 13 / 27), 1024)

        interval, A_interval, identifiable = staticmethod(lambda *_, **__: np.array([[0.0], [1.0]])), (0, 1), False

    monkeypatch.setattr(fit_benchmark, "fit", Fit)
    assert outside("gamma 3", 2, 3, seed=1).tolist() == [[1, 1, 1, 1, 0, 0]] * 3
    monkeypatch.setattr(Fit, "interval", staticmethod(lambda *_, **__: np.array([[0.01], [0.01]])))
    monkeypatch.setattr(Fit, "A_interval", (0.01, 0.01))
    monkeypatch.setattr(Fit, "identifiable", True)
    assert outside("gamma 3", 2, 3, seed=1).tolist() == [[0, 0, 0, 0, 1, 1]] * 3


@pytest.mark.slow
def test_simulations_keep_their_promises():
    found = paper_range(100, seed=1)
    assert found["RMSE of A"] <= 1.1 * found["reference RMSE of A"]
    assert found["median error of A"] <= 1.1 * found["reference median error of A"]
    assert min(value for name, value in found.items() if name.endswith("covered")) >= 0.93
    assert all(count <= 1 for count in no_ceiling(100, seed=1).values())
    rows = np.concatenate([outside(name, reach, 20, seed=1) for name in TRUTHS for reach in (2, 3, 4)])
    curve, evaluation, _, _, _, wrongly = rows.mean(0)
    assert min(curve, evaluation) >= 0.93 and wrongly <= 0.05
