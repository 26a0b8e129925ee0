"""Tests of `tools/fit_benchmark.py`: what its simulations say of `fit_sigmoid.py`."""

import time

import numpy as np
import pytest
from test_fit_sigmoid import run_of, squares

from fit_sigmoid import CUTS, fit
from tools.fit_benchmark import REGIMES, draw, multi_start, no_ceiling, paper_range, regime

pytestmark = pytest.mark.medium


def test_least_squares_is_the_global_minimum():
    rng = np.random.default_rng(4)
    for i in range(8):
        C, R, truth, _ = draw(rng, spanning=i % 2 == 0)
        f, (A, Q) = fit(C, R, cuts=()), multi_start(C, R, truth, rng)
        assert squares(f) <= Q * (1 + 1e-7)
        if f.identifiable:
            assert f.A == pytest.approx(A, abs=1e-4)


def test_a_fit_with_intervals_is_fast():
    """Well under 0.1 s of CPU time, and 0.5 s with the backtests; one of seven must be, because other work may run at
    the same time."""

    def seconds(cuts):
        start = time.process_time()
        fit(*run_of(n=60), cuts=cuts)
        return time.process_time() - start

    for cuts, most in (((), 0.1), (CUTS, 0.5)):
        assert any(seconds(cuts) < most for _ in range(7))


def test_coverage_in_short():
    """Backtests, left out here, only widen the intervals."""
    found = paper_range(30, seed=5, reference=False, cuts=())
    assert found["A covered"] >= 0.85 and found["curve at 2 C covered"] >= 0.85


def test_half_of_a_simulated_run_is_learned_at_C_mid():
    """Of two steps only the first is learned by then; a cliff is straight up to there. All end at their ceiling."""
    for name, shape in REGIMES.items():
        curve, A = shape(np.random.default_rng(1), 0.25)
        start, half, end = curve(np.array([0.0, 0.25, 100.0]))
        assert start == pytest.approx(0.07, abs=0.03) and end == pytest.approx(A, abs=0.01)
        assert half == pytest.approx((start + A) / 2, abs={"logistic in C": 0.04, "two steps": 0.2}.get(name, 1e-6))
        if name == "a cliff":
            assert curve(np.array([0.125])) == pytest.approx([(start + half) / 2])


@pytest.mark.slow
def test_simulations_keep_their_promises():
    found = paper_range(300, seed=0)
    assert found["RMSE of A"] <= 1.1 * found["reference RMSE of A"] and found["failed convergence"] == 0
    assert found["median error of A"] <= 1.1 * found["reference median error of A"]
    assert 0.90 <= found["A covered"] <= 0.99 and 0.90 <= found["A covered where identifiable"] <= 0.98
    for name in ("B covered", "C_mid covered", "curve at 2 C covered", "evaluation at 2 C covered"):
        assert 0.90 <= found[name] <= 0.99
    spanning = paper_range(200, seed=1, spanning=True, reference=False)
    assert spanning["identifiable"] >= 0.6 and 0.90 <= spanning["A covered where identifiable"] <= 1.0
    assert all(count <= 2 for count in no_ceiling(100, seed=0).values())
    for reach in (1.6, 3.0):
        found = regime(REGIMES["the law"], reach, 40, seed=0)
        assert found["end inside"] >= 0.9 and found["identifiable and wrong"] <= 0.05
