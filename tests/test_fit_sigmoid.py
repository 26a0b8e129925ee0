"""Tests of `fit_sigmoid.py`: worked examples, oracles computed another way, verdicts, rounding, comparison.

Its report and command line are tested in `test_fit_report.py`.
"""

import doctest
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize
from scipy.special import expit
from scipy.stats import t as student

import fit_sigmoid as module
from fit_sigmoid import CHECKS, backtest, compare, format_comparison, plain_fit, sigmoid
from tools.fit_benchmark import draw

PAPER_ROWS = [(2542, 2.44, 0.585), (1675, 1.09, 0.615), (11272, 1.89, 0.645), (4242, 1.65, 0.710)]  # C_mid, B, A
X = np.arange(1, 25.0)
NOISE = np.random.default_rng(9).normal(0, 0.008, 24)


def fit(*data, cuts=(), **options):
    """`fit_sigmoid.fit`, by default without its four backtests, each of which takes as long as the fit."""
    return module.fit(*data, cuts=cuts, **options)


def run_of(truth=(0.3, 0.6, 1.8, 2500.0), n=40, end=16_000.0, sd=0.007, seed=0, zero=True):
    """C (n or n + 1,), R: an evenly evaluated run with Gaussian noise."""
    C = np.linspace(0, end, n + 1)[0 if zero else 1 :]
    return C, sigmoid(C, *truth) + np.random.default_rng(seed).normal(0, sd, C.size)


def spare(f):
    """How far Q may lie above its least value within the likelihood set at 95 %: 1.1 dispersion t^2."""
    dispersion, dof, _ = f.uncertainty
    return 1.1 * dispersion * student.ppf(0.975, dof) ** 2


def squares(f, C=None, R=None):
    """Sum of squared residuals of a fit, on its own or on other points."""
    C, R = (f.points.C, f.points.R) if C is None else (C, R)
    return float(np.sum((R - f.predict(C)) ** 2))


# ------------------------------------------------------------------------------------------------------ worked examples


def test_sigmoid_by_hand():
    """R0 .2, A .6, B 2, C_mid 100. s(50) = 1 / (1 + 2^2) = .2, s(100) = .5, s(200) = 1 / (1 + .5^2) = .8."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = sigmoid([0, 50, 100, 200, 1e300], 0.2, 0.6, 2.0, 100.0)
    assert values == pytest.approx([0.2, 0.28, 0.4, 0.52, 0.6], abs=1e-12)
    assert sigmoid(0.0, 0.2, 0.6, 2.0, 100.0) == 0.2
    assert sigmoid(100.0, 0.2, np.array([0.6, 0.8]), 2.0, 100.0) == pytest.approx([0.4, 0.5])


@pytest.mark.long
def test_the_example_of_the_docstring_prints_what_it_says():
    assert doctest.testmod(module) == (0, 7)


def test_plain_fit_finds_what_fit_finds():
    """A run of the paper that shows both ends of its curve: exact data give the truth, noisy ones the minimum of `fit`."""
    C, R = run_of(sd=0)
    assert plain_fit(C, R) == pytest.approx((0.3, 0.6, 1.8, 2500.0), rel=1e-5)
    C, R = run_of()
    f = fit(C, R)
    assert plain_fit(C, R) == pytest.approx((f.R0, f.A, f.B, f.C_mid), rel=1e-3)


def test_best_R0_by_hand():
    """Shares of the gain 0, .5, 1 at C = 0, 1, inf; A .8. R - s A = .2, .2, .02; Q is least where
    R0 = (1 * .2 + .5 * .2) / (1 + .25) = .24, and there Q = .04^2 + .08^2 + .02^2 = .0084; curvature 1.25."""
    data = module.Data(np.array([0, 1, 1e300]), np.array([0.2, 0.6, 0.82]), np.ones(3), (0.0, 1.0))
    R0, curvature, Q = module.best_R0(np.array([[0.8, 0.0, 0.0]]), data)
    assert (R0[0], curvature[0], Q[0]) == pytest.approx((0.24, 1.25, 0.0084))


# A constant .22, measured with a sd of .0073: a steep rise at the first points fits better than a flat line (p .005).
LUCK = np.array([
    221, 232, 211, 213, 237, 237, 225, 237, 234, 246, 226, 230, 236, 232, 249, 240, 230, 244, 229, 221, 238, 236, 231, 236,
    220, 227, 232, 237, 235, 236, 233, 224, 229, 228, 235, 239, 226,
]) / 1000  # fmt: skip


@pytest.mark.long
def test_every_check_can_be_the_reason():
    """One run for each row of the table, named by what fails in it; the reason is the row's own sentence."""
    rise = sigmoid(X, 0.2, 0.6, 3, 5) + NOISE
    early, C = sigmoid(X, 0.2, 0.9, 2, 30) + NOISE / 4, np.linspace(0, 450, 10)
    runs = {
        "enough points": fit(X[:3], rise[:3]),
        "compute counts from the start": fit(1e9 + X, rise),
        "noise is measured": fit(X[:4], [0.2, 0.3, 0.38, 0.4]),
        "pass rate rises": fit(X, 0.4 + NOISE),
        "end stays on the curve": fit(X, rise - 0.008 * np.maximum(X - 16, 0)),
        "data and not the bound hold A": fit(C, 0.065 + 0.935 * (C / 640) ** 1.6),
        "few ceilings fit": fit(X[:20], early[:20]),
        "curve bends in C": fit(X, 0.05 + 0.14 * X / 24 + NOISE / 4, A_max=0.2),
        "curve bends in log C": fit(X, 0.2 + 0.06 * np.log(X)),
        "rise is no luck": fit(1 + np.arange(LUCK.size), LUCK),
        "data reach 2 C_mid": fit(C, 0.1 + 0.8 / (1 + (250 / np.maximum(C, 1e-9)) ** 3)),
        "A lies inside the grid": fit(X, rise, method="paper_grid", A_range=(0.3, 0.5)),
    }
    rows = {name: sentence for stage in CHECKS.values() for name, _, _, sentence in stage}
    assert list(runs) == list(rows)
    for name, f in runs.items():
        assert re.fullmatch(re.sub(r"\\{.*?\\}", ".*", re.escape(rows[name])), f.reason), (name, f.reason)
        assert not f.identifiable
    assert fit(X, rise).identifiable


def test_dispersion_by_hand():
    """Without n: Q / (N - 4). With n: (sum of squared standardized residuals + 4) / (N - 4 + 4)."""
    C, R = run_of(n=30, seed=2)
    f = fit(C, R)
    assert f.uncertainty[:2] == pytest.approx((squares(f) / 27, 27))
    f = fit(C, R, n_samples=5000)
    p = (f.predict(C) * 5000 + 1) / 5002
    Q = np.sum((R - f.predict(C)) ** 2 * 5000 / p / (1 - p))
    assert f.uncertainty[:2] == pytest.approx(((Q + 4) / 31, 31), rel=1e-6)


def test_inflation_by_hand():
    """Ten times +1, ten times -1: r = (9 - 1 + 9) / 20 = .85, inflation 1.85 / .15. Alternating signs: none."""
    assert module.inflation(np.repeat([1.0, -1.0], 10), 20.0) == pytest.approx(1.85 / 0.15)
    assert module.inflation(np.repeat([1.0, -1.0], 10), 34.0) == pytest.approx(1.5 / 0.5)  # 17 / 34
    assert module.inflation(np.repeat([1.0, -1.0], 10), 1e6) == 1.0  # rounding
    assert module.inflation(np.tile([1.0, -1.0], 10), 1e-9) == 1.0
    assert module.inflation(np.array([1.0, 1, -1, -1]), 1e-9) == 1.0  # r = .25 of four points is nothing
    assert module.inflation(np.zeros(5), 1e-9) == 1.0
    C, R = run_of(n=60)
    wave = R + 0.02 * np.sin(C / 1500)
    assert fit(C, wave).uncertainty.dispersion > 3 * squares(fit(C, wave)) / 57


@pytest.mark.long
def test_interval_of_an_evaluation_by_hand():
    """Half-widths add in quadrature: hypot(curve, t sd), sd^2 = dispersion p (1 - p) / n, or dispersion without n."""
    C, R = run_of(n=30)
    for n, of in ((None, None), (5000, None), (5000, 200)):
        f = fit(C, R, n_samples=n)
        dispersion, dof, _ = f.uncertainty
        p, t = f.predict(20_000.0), student.ppf(0.975, dof)
        m = of or n
        q = 0.0 if n is None else (p * m + 1) / (m + 2)
        sd = math.sqrt(dispersion if n is None else dispersion * q * (1 - q) / m)
        (low,), (high,) = f.interval(20_000.0)
        (a,), (b,) = f.interval(20_000.0, noise=True, n_samples=of)
        assert (p - a, b - p) == pytest.approx((math.hypot(p - low, t * sd), math.hypot(high - p, t * sd)))
    n = np.repeat([5000, 500, 50_000], [16, 8, 7])  # the median is 5000
    f = fit(C, R, n_samples=n)
    assert np.array_equal(f.interval(9e3, noise=True), f.interval(9e3, noise=True, n_samples=5000))
    assert not np.array_equal(f.interval(9e3, noise=True), f.interval(9e3, noise=True, n_samples=500))
    near_one = fit(C, np.minimum(R / 0.6, 1), n_samples=100).interval([0.0, 1e5], noise=True)
    assert near_one.max() == 1.0 and near_one.min() > 0


# --------------------------------------------------------------------------------------------------------- the estimate


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_rows_of_the_paper_come_back(row):
    C_mid, B, A = row
    C = np.linspace(0, 50_000 if C_mid > 5000 else 16_000, 41)
    R = sigmoid(C, 0.25, A, B, C_mid)
    f = fit(C, R)
    assert (f.A, f.B, f.C_mid, f.R0) == pytest.approx((A, B, C_mid, 0.25), rel=1e-4)
    assert f.identifiable and f.rmse < 1e-6


def test_binomial_weights_are_maximum_likelihood():
    """Oracle: the binomial log-likelihood itself, maximised by Nelder-Mead from the truth, with unequal n."""
    truth, rng = (0.10, 0.92, 2.0, 300.0), np.random.default_rng(1)
    C = np.linspace(0, 900, 19)
    n = np.where(np.arange(19) % 2, 400, 4000)
    k = rng.binomial(n, sigmoid(C, *truth))

    def loss(v):
        p = np.clip(sigmoid(C, expit(v[0]), expit(v[1]), np.exp(v[2]), np.exp(v[3])), 1e-9, 1 - 1e-9)
        return -np.sum(k * np.log(p) + (n - k) * np.log(1 - p))

    start = [np.log(0.1 / 0.9), np.log(0.92 / 0.08), np.log(2), np.log(300)]
    v = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 8000, "xatol": 1e-9, "fatol": 1e-9}).x
    f, plain = fit(C, k / n, n_samples=n), fit(C, k / n)
    assert f.A == pytest.approx(expit(v[1]), abs=1e-3) and f.R0 == pytest.approx(expit(v[0]), abs=1e-3)
    assert f.B == pytest.approx(np.exp(v[2]), rel=5e-3)
    assert abs(plain.A - expit(v[1])) > 3e-3  # without weights it is another estimate


@pytest.mark.long
def test_held_parameters_and_bound():
    C, R = run_of()
    assert fit(C, R, A=0.58).A == 0.58 and fit(C, R, A=0.58).A_interval == (0.58, 0.58)
    assert fit(C, R, R0=0.28).R0 == 0.28
    assert squares(fit(C, R, A=0.58)) > squares(fit(C, R))
    f = fit(C, R, A_max=0.55)
    assert f.A == pytest.approx(0.55) and f.A_interval[1] <= 0.55


def test_a_rising_curve_never_falls():
    """R0 <= A: a falling run gives a flat line, not a ceiling below its start."""
    f = fit(np.arange(1, 21), 0.6 - 0.02 * np.arange(20))
    assert f.A >= f.R0 - 1e-9


# ----------------------------------------------------------------------------------------------------- the paper's grid


@pytest.mark.long
def test_paper_grid_against_brute_force():
    """All cells of the grid with B from a scan of 3,000 values: no `curve_fit`, no preselection of cells."""
    C, R = run_of(n=14, seed=2)
    f = fit(C, R, method="paper_grid", A_range=(0.58, 0.61), C_mid_range=(2300, 2800))
    B, C_mid = np.geomspace(1.2, 3, 3000), np.linspace(2300, 2800, 100)
    s = 1 / (1 + (C_mid[:, None] / np.maximum(C, 1e-9)) ** B[:, None, None])  # (3000, 100, N)
    cells = []
    for A in np.arange(0.58, 0.6101, 0.005):
        Q = ((R - R[0] - (A - R[0]) * s) ** 2).sum(-1).min(0)  # (100,)
        cells.append((Q.min(), A, C_mid[Q.argmin()]))
    Q, A, mid = min(cells)
    assert squares(f) == pytest.approx(Q, rel=1e-4) and squares(f) <= Q
    assert (f.A, f.C_mid, f.R0) == (pytest.approx(A), pytest.approx(mid), R[0])


@pytest.mark.long
@pytest.mark.parametrize(("truth", "edge"), [((0.82, 0.93, 2.0, 2500.0), 0.8), ((0.02, 0.30, 2.0, 2500.0), 0.45)])
def test_a_ceiling_outside_the_grid_is_reported_as_that(truth, edge):
    """The run rises to .93, or to .30, and stays: it neither lacks a rise nor falls away. No curve of the grid falls."""
    C, R = run_of(truth, end=8000, sd=0.003)
    f = fit(C, R, method="paper_grid")
    assert f.A >= f.R0 and f.A == pytest.approx(max(edge, R[0])) and not f.identifiable
    assert f.reason == "A lies on the edge of the grid 0.45..0.8: widen A_range"
    assert f.C_mid / 80 == pytest.approx(round(f.C_mid / 80))  # of a hundred values up to the run's 8,000
    wide = fit(C, R, method="paper_grid", A_range=(0.2, 1.0))
    assert wide.identifiable and wide.A == pytest.approx(truth[1], abs=0.0101)


@pytest.mark.long
def test_the_grid_keeps_to_what_is_held():
    """And without a point at C = 0, R0 is that of the least-squares fit."""
    C, R = run_of(n=20, seed=3)
    assert fit(C[1:], R[1:], method="paper_grid").R0 == fit(C[1:], R[1:]).R0
    assert fit(C, R, method="paper_grid", A=0.6123).A == pytest.approx(0.6123, abs=1e-9)
    assert fit(C, R, method="paper_grid", R0=0.9).A == 0.9  # not below R0
    assert fit(C, R, method="paper_grid", A_max=0.57).A <= 0.57
    with pytest.raises(ValueError, match="low < high in A_range"):
        fit(C, R, A_range=(0.8, 0.45))


# ----------------------------------------------------------------------------------------------------------- the points


def test_points_are_cleaned_counted_and_not_modified():
    C, R = run_of(n=20)
    base = fit(C, R)
    C2 = np.concatenate([C[::-1], [C[5], 3000.0, np.nan], C[7:9]])
    R2 = np.concatenate([R[::-1], [R[5], np.nan, 0.4], R[7:9]])
    keep = C2.copy(), R2.copy()
    f = fit(C2, R2)
    assert f.points.left_out == {"nan": 2, "duplicate": 3, "skipped": 0, "zero": 0}
    assert (f.A, f.B, f.n_points) == (base.A, base.B, 21)
    assert np.array_equal(C2, keep[0], equal_nan=True) and np.array_equal(R2, keep[1], equal_nan=True)
    n = np.full(C2.size, 900.0)
    n[2] = np.nan
    assert fit(C2, R2, n_samples=n).points.left_out["nan"] == 3
    twice = fit(np.append(C, C[5]), np.append(R, R[5] + 0.01))  # another value at the same compute is a measurement
    assert twice.n_points == 22


def test_skip_below_keeps_zero_and_the_point_on_the_edge():
    C, R = run_of(n=20)
    f = fit(C, R, skip_below=C[3])
    assert f.points.left_out["skipped"] == 2 and f.points.C[0] == 0 and f.points.C[1] == C[3]


def test_where_R0_comes_from():
    C, R = run_of(n=20)
    measured, given, fitted = fit(C, R), fit(C, R, R0=0.25), fit(C[1:], R[1:])
    assert [f.R0_source for f in (measured, given, fitted)] == ["measured", "given", "fitted"]
    assert given.R0 == 0.25 and given.points.left_out["zero"] == 1 and given.n_points == 20
    assert given.intervals.R0 == (0.25, 0.25)
    assert measured.R0 != R[0] and abs(measured.R0 - R[0]) < abs(fitted.R0 - R[0])  # one point among others
    assert given.uncertainty.dof == 20 - 3 and measured.uncertainty.dof == 21 - 4
    sharp = np.where(C == 0, 1e9, 1000.0)  # a very exact measurement of R0 is R0
    assert fit(C, R, n_samples=sharp).R0 == pytest.approx(R[0], abs=1e-5)


@pytest.mark.parametrize(("C", "R", "options", "words"), [
    ([0, 1, 2, 3], [0.1, 0.2, 0.3], {}, "one length"),
    ([[0, 1], [2, 3]], [[0.1, 0.2], [0.3, 0.4]], {}, "one-dimensional"),
    ([-1, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], {}, "compute must be >= 0"),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 1.4], {}, "pass rates in"), ([0, 1, 2, 3], [-0.1, 0.2, 0.3, 0.4], {}, "pass rates in"),
    ([0, 0, 2, 3], [0.1, 0.2, 0.3, 0.4], {}, "disagree"),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], {"n_samples": 0}, "n_samples"),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], {"method": "magic"}, "least_squares, paper_grid"),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], {"R0": 1.2}, "R0 <= A"),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], {"R0": 0.5, "A": 0.4}, "R0 <= A"),
])  # fmt: skip
def test_wrong_arguments(C, R, options, words):
    with pytest.raises(ValueError, match=words):
        fit(C, R, **options)


def test_rewards_above_one_are_allowed_with_a_higher_bound():
    C = np.linspace(0, 16_000, 41)
    assert fit(C, 2 * sigmoid(C, 0.3, 0.6, 1.8, 2500.0), A_max=2.0).A == pytest.approx(1.2, rel=1e-3)


def test_the_number_of_samples_of_a_repeated_point_does_not_depend_on_the_order():
    C, R = run_of(n=20)
    C, R, n = np.append(C, C[9]), np.append(R, R[9]), np.append(np.full(21, 500.0), 50_000.0)
    a, b = fit(C, R, n_samples=n), fit(C[::-1], R[::-1], n_samples=n[::-1])
    assert a.points.n_samples.tolist() == b.points.n_samples.tolist() and a.A == b.A


# ------------------------------------------------------------------------------------------------------ the uncertainty


@pytest.mark.long
@pytest.mark.parametrize("n_samples", [None, 3000])
def test_interval_of_A_is_the_profile(n_samples):
    """Definition: with A held at an end of its interval, the best Q exceeds the least one by 1.1 dispersion t^2. So much
    is allowed to every curve of the set, whose extremes are the intervals."""
    C, R = run_of(n=30, sd=0.006, seed=5)
    f = fit(C, R, n_samples=n_samples)
    p = f.predict(C)
    w = np.ones(C.size) if n_samples is None else 1 / module.unit_variance(p, n_samples)
    for end in f.A_interval:
        held = fit(C, R, n_samples=n_samples, A=end)
        grown = np.sum(w * (R - held.predict(C)) ** 2) - np.sum(w * (R - p) ** 2)
        assert 0.93 < grown / spare(f) < 1.02
    assert f.A_interval[0] < f.A < f.A_interval[1]
    kept = [np.sum(w * (R - sigmoid(C, *v)) ** 2) for v in f.uncertainty.curves.T[::37]]
    assert 0.97 < (max(kept) - np.sum(w * (R - p) ** 2)) / spare(f) < 1.01
    for values, span in zip(f.uncertainty.curves, f.intervals, strict=True):
        assert (values.min(), values.max()) == pytest.approx(span)
    wide = fit(C, R, n_samples=n_samples, level=0.99)
    assert wide.A_interval[0] < f.A_interval[0] and wide.A_interval[1] > f.A_interval[1]


def test_prediction_interval_by_penalty():
    """Oracle: tie the curve at 16,000 to an end of its interval by a penalty; the best Q then grows by 1.1 dispersion t^2."""
    C, R = run_of(n=30, end=8000, seed=6)
    f = fit(C, R)
    for end in f.interval(16_000)[:, 0]:

        def residuals(v, end=end):
            curve = v[0], v[1], np.exp(v[2]), np.exp(v[3])
            return np.append(sigmoid(C, *curve) - R, 1e3 * (sigmoid(16_000, *curve) - end))

        v = least_squares(residuals, [f.R0, f.A, np.log(f.B), np.log(f.C_mid)], xtol=1e-14, ftol=1e-14, gtol=1e-14).x
        assert 0.93 < (np.sum(residuals(v)[:-1] ** 2) - squares(f)) / spare(f) < 1.02
    low, high = f.interval([4000, 16_000])
    assert (low < f.predict([4000, 16_000])).all() and (high > f.predict([4000, 16_000])).all()
    assert high[1] - low[1] > 2 * (high[0] - low[0])  # extrapolation is less sure


def test_bound_is_no_news_to_predictions():
    """A run rising faster than a ceiling of 1 allows: A stays <= 1, but its prediction may reach up to 1."""
    C = np.linspace(0, 450, 10)
    f = fit(C, 0.065 + 0.935 * (C / 640) ** 1.6)
    assert f.A == pytest.approx(1.0) and f.A_interval[1] == 1.0 and not f.identifiable and "bound" in f.reason
    (low,), (high,) = f.interval(900.0)
    strict = sigmoid(900.0, *f.uncertainty.curves[:, f.uncertainty.curves[1] <= 1.0])
    assert high > strict.max() + 0.01 and high <= 1.0 and low <= strict.min() + 1e-9
    assert f.uncertainty.curves[1].max() == pytest.approx(1.25, abs=0.01)


def test_open_ends():
    """A step between two points: B has no upper end. No noise estimate: nothing is known."""
    C = np.arange(1, 21.0)
    f = fit(C, np.where(C < 10.5, 0.2, 0.6) + np.random.default_rng(0).normal(0, 0.01, 20))
    assert f.B_interval[1] == math.inf and f.B_interval[0] > 5 and math.isfinite(f.intervals.C_mid[1])
    f = fit(C, np.full(20, 0.4))
    assert f.B_interval == (0.0, math.inf) and f.intervals.C_mid[1] == math.inf
    f = fit([1, 2, 3, 4], [0.2, 0.3, 0.38, 0.4])
    assert not f.identifiable and "no residual" in f.reason and f.A_interval == (0.0, 1.0)
    assert f.interval([5.0, 6.0]).tolist() == [[0, 0], [1, 1]]


# ---------------------------------------------------------------------------------------------------------- the verdict


@pytest.mark.long
@pytest.mark.parametrize(("C", "R", "words"), [
    ([], [], "0 usable points"), ([0, 1, 2], [0.1, 0.2, 0.3], "3 usable points"),
    ([5, 5, 5, 5, 5], [0.1, 0.2, 0.3, 0.4, 0.5], "usable points"), (X, np.full(24, np.nan), "0 usable points"),
    (X, 0.4 + NOISE, "does not rise"), (X, np.ones(24), "does not rise"), (X, np.zeros(24), "does not rise"),
    (X, 0.6 - 0.02 * X, "falls by"), (X, 0.6 - 0.015 * X + NOISE, "falls by"), (X, 0.2 + 0.01 * X, ""),
    (X, 0.2 + 0.01 * X + NOISE, ""), (X, 0.2 + 0.06 * np.log(X) + NOISE, ""),
    (X, sigmoid(X, 0.2, 0.6, 3, 5) - 0.008 * np.maximum(X - 16, 0) + NOISE, "falls away"),
])  # fmt: skip
@pytest.mark.parametrize("n_samples", [None, 2000])
def test_no_ceiling_no_claim(C, R, words, n_samples):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = fit(C, R, n_samples=n_samples)
        f.interval([1.0, 10.0, 100.0], noise=True)
        assert n_samples or not fit(C, R, method="paper_grid").identifiable
    assert not f.identifiable and f.reason and words in f.reason
    assert f.A_interval[1] == 1.0  # whatever the fit says, no ceiling is excluded
    assert f.A_interval[0] == 0.0 or "falls away" not in f.reason


def test_identifiable_has_no_reason_and_its_limits():
    C, R = run_of()
    f = fit(C, R)
    assert f.identifiable and f.reason == "" and f.A_interval[1] - f.A_interval[0] < 0.1
    small = fit(*run_of((0.3, 0.34, 1.8, 2500.0)))  # A known to 0.086, but the gain is 0.04
    assert not small.identifiable and "ceilings from 0.34 to 0.42" in small.reason
    short = fit(C[:9], R[:9])  # up to 1.3 C_mid
    assert not short.identifiable and "ceilings from" in short.reason
    flat = fit(C, np.clip(sigmoid(C, 0.3, 1.0, 3.0, 1500.0) + np.random.default_rng(0).normal(0, 0.002, C.size), 0, 1))
    assert flat.identifiable and flat.A > 0.99
    flat = fit(C, np.minimum(sigmoid(C, 0.3, 1.0, 3.0, 1500.0) + 0.004, 1))
    assert flat.identifiable and flat.A == pytest.approx(1.0, abs=1e-7)  # on the bound, but the data reach it
    known = fit(C[1:], 0.55 + NOISE[:1] + R[1:] * 0 + np.resize([0.004, -0.004], 40), R0=0.2)  # risen before C[1]
    assert known.identifiable and known.A == pytest.approx(0.55, abs=0.01)


@pytest.mark.long
def test_a_straight_line_in_log_C_is_not_called_a_ceiling():
    """0.2 + 0.06 log C, 40 points: many sigmoids fit, the interval of A is sometimes narrow by luck."""
    exact = fit(X, 0.2 + 0.06 * np.log(X))
    assert "straight line in log C" in exact.reason and exact.A_interval[0] > 0.4 and exact.A_interval[1] == 1.0
    rng, C = np.random.default_rng(3), np.arange(1, 41.0)
    assert not any(fit(C, 0.2 + 0.06 * np.log(C) + rng.normal(0, 0.006, 40)).identifiable for _ in range(10))


def test_a_late_start_by_choice_is_no_clock():
    """Points up to half of the compute left out by the user, or a start at 0 behind a given R0, are no epoch seconds."""
    C, R = run_of(n=40)
    assert "subtract its start" in fit(C[21:], R[21:]).reason and math.isnan(fit(C[21:], R[21:]).A)
    late = [0, *range(21, 41)]
    assert math.isfinite(fit(C, R, skip_below=C[21]).A) and math.isfinite(fit(C[late], R[late], R0=0.3).A)


# ------------------------------------------------------------------------------------------------------------ backtests


def two_steps(C):
    """The law twice: problems learned by C = 10, and a harder kind that is learned by C = 70."""
    return sigmoid(C, 0.05, 0.5, 4, 10) + sigmoid(C, 0, 0.4, 4, 70)


@pytest.mark.long
def test_a_run_that_breaks_the_law_widens_its_own_intervals():
    """At C = 50 the first step is over and the second begins. One sigmoid through all of it claims a ceiling near .55,
    where .9 is to come. Fits to its first parts have predicted too little, so it may not claim to know."""
    C = np.arange(0, 51, 2.0)
    R = np.random.default_rng(0).binomial(2048, two_steps(C)) / 2048
    plain, tested = fit(C, R, n_samples=2048), fit(C, R, n_samples=2048, cuts=module.CUTS)
    assert plain.identifiable and plain.A_interval[1] < 0.6 and plain.widened == (1, 1)
    misses = [backtest(plain, cut) for cut in module.CUTS]
    assert tested.widened == (1, max(misses)) and max(misses) > 2 and "ceilings from" in tested.reason
    low, high = plain.interval([30.0, 200.0])
    wide_low, wide_high = tested.interval([30.0, 200.0])
    assert wide_low == pytest.approx(low) and wide_high[0] == high[0]  # C = 30 is measured, not predicted
    p = plain.predict(200.0)
    assert wide_high[1] - p == pytest.approx(max(misses) * (high[1] - p))
    assert tested.A_interval[1] - tested.A == pytest.approx(max(misses) * (plain.A_interval[1] - plain.A))
    assert tested.A_interval[0] == plain.A_interval[0]


@pytest.mark.long
def test_a_run_that_keeps_the_law_is_seldom_widened():
    """Of 4 runs with Gaussian noise few miss any of their four later parts by more than a 95 % interval, and then by
    little. A backtest with nothing after the cut says nothing."""
    widened = [max(fit(*run_of(seed=seed), cuts=module.CUTS).widened) for seed in range(4)]
    assert sum(w > 1 for w in widened) <= 2 and max(widened) < 1.6
    assert backtest(fit(*run_of()), 1.0) == 0 and backtest(fit(*run_of()), 0.01) == 0


# ------------------------------------------------------------------------------------------------------------- rounding


def rounded_otherwise(C, R, seed):
    """The same data but for a few units in the last place of each reward, rows in another order: twice."""
    rng = np.random.default_rng(seed)
    for size in (1e-15, 1e-13):
        order = rng.permutation(C.size)
        yield C[order], np.clip(R * (1 + size * rng.standard_normal(C.size)), 0, 1)[order]


def assert_same_fit(a, b):
    """Verdict and interval ends; an end may move by 1 % of its interval's width, open ends stay open."""
    assert (a.identifiable, a.reason) == (b.identifiable, b.reason)
    assert a.uncertainty.dispersion == pytest.approx(b.uncertainty.dispersion, rel=1e-3)
    for name, (low, high), other in zip(a.intervals._fields, a.intervals, b.intervals, strict=True):
        width = high - low if math.isfinite(high) else max(low, 1.0)
        assert other == pytest.approx((low, high), abs=0.01 * width + 1e-9), name
    far = a.points.C[-1] * np.array([1, 2, 10])
    low, high = a.interval(far)
    assert np.abs(b.interval(far) - a.interval(far)).max() <= 0.01 * (high - low).max() + 1e-6
    assert (a.R0, a.A, a.B, a.C_mid) == pytest.approx((b.R0, b.A, b.B, b.C_mid), rel=1e-4)


SHAPES = {  # of a run: rewards from C, the curve's rewards, its R0 and A
    "exact": lambda C, R, R0, A: R,
    "noise of 1e-6": lambda C, R, R0, A: R + 1e-6 * np.random.default_rng(1).standard_normal(C.size),
    "flat": lambda C, R, R0, A: np.full(C.size, A),
    "falling": lambda C, R, R0, A: np.linspace(A, R0, C.size),
    "straight": lambda C, R, R0, A: np.linspace(R0, A, C.size),
    "noise of 0.007": lambda C, R, R0, A: R + 0.007 * np.random.default_rng(1).standard_normal(C.size),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "n_samples"), [*((shape, None) for shape in SHAPES), ("exact", 1000), ("flat", 1000)]
)
def test_rounding_decides_nothing(shape, n_samples):
    """Curves of the paper's range. Another BLAS, or another order of the rows, rounds otherwise, and no more."""
    rng = np.random.default_rng(0)
    for i in range(3 if shape == "exact" else 1):
        C, _, truth, _ = draw(rng, spanning=i % 2 == 0)
        R = SHAPES[shape](C, sigmoid(C, *truth), *truth[:2])
        f = fit(C, R, n_samples=n_samples)
        for again in rounded_otherwise(C, R, seed=i):
            assert_same_fit(f, fit(*again, n_samples=n_samples))


@pytest.mark.long
def test_exact_data_give_their_ceiling_whatever_the_rounding():
    """Measured far past C_mid and without noise, both ceilings are known, and .60 and .61 agree within .02."""
    C = 50.0 * np.arange(25)
    runs = [rounded_otherwise(C, sigmoid(C, 0.1, A, 2.0, 300.0), seed=i) for i, A in enumerate((0.60, 0.61))]
    for pair in zip(*runs, strict=True):
        both = compare(*(fit(*run) for run in pair))
        assert all(f.identifiable for f in both.fits) and both.shared_A == pytest.approx(0.605, abs=1e-4)
        assert "run 2 is the most efficient" in both.verdict  # its ceiling held too low makes it steeper


@pytest.mark.long
def test_rounding_decides_nothing_on_the_grid():
    C = np.linspace(0, 16_000, 31)
    R = sigmoid(C, 0.3, 0.6, 1.8, 2500.0)
    f = fit(C, R, method="paper_grid")
    for again in rounded_otherwise(C, R, seed=0):
        assert_same_fit(f, fit(*again, method="paper_grid"))


@pytest.mark.long
def test_the_last_weights_may_ask_for_another_curve_than_the_first():
    """Two runs that rise and then fall to 0, where the first weights, from the rewards, are largest: the best curve is
    flat at first. Under the last weights, from the curve, no curve of a grid is better than the fit."""
    for length in (14, 18):
        C = np.linspace(0, 1.0, 25)
        R = np.where(np.arange(25) < length, sigmoid(C, 0.04, 0.6, 3.0, 0.2), 0.0)
        f = fit(C, R, n_samples=1024)
        data = module.Data(C, R, 1 / module.unit_variance(f.predict(C), np.full(25, 1024.0)), (0.0, 1.0))
        grid = np.stack(np.meshgrid(*(np.linspace(*ends, 40) for ends in module.search_range(C, (0.0, 1.0)))), -1)
        own = module.best_R0(np.array([[f.A, math.log(f.B), math.log(f.C_mid)]]), data)[2][0]
        assert own <= 1.01 * module.best_R0(grid.reshape(-1, 3), data)[2].min()


FIT_HALVES = """
import json, numpy as np
from fit_sigmoid import fit, sigmoid
C = np.linspace(0, 1.0, 16)
fits = [fit(C, np.random.default_rng(i).binomial(1024, sigmoid(C, .04, .8, 2.6, C_mid)) / 1024, n_samples=1024, cuts=())
        for i, C_mid in enumerate((0.3, 0.6, 1.2))]
print(json.dumps([[f.R0, f.A, f.B, f.C_mid, *np.ravel(f.intervals)] for f in fits]))
"""


@pytest.mark.long
def test_an_older_processor_finds_the_same_fit():
    """Without AVX2 and AVX-512 numpy sorts by other code: equal numbers, as of many curves whose A is the largest
    allowed, come in another order. Runs seen to 3.3, 1.7 and .8 C_mid. (A processor that has neither shows nothing.)"""
    found = [
        json.loads(subprocess.run(
            [sys.executable, "-c", FIT_HALVES], env=os.environ | {"NPY_DISABLE_CPU_FEATURES": less},
            cwd=Path(module.__file__).parent, capture_output=True, text=True, check=True,
        ).stdout)
        for less in ("", "AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR")
    ]  # fmt: skip
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------- comparison


def fits_of(*ceilings, B=(1.8, 1.8), sd=0.002, **options):
    pairs = enumerate(zip(ceilings, B, strict=True))
    return [fit(*run_of((0.3, A, b, 2500.0), sd=sd, seed=i), **options) for i, (A, b) in pairs]


@pytest.mark.long
def test_equal_ceilings_share_A_and_compare_B():
    both = compare(*fits_of(0.60, 0.61, B=(1.3, 2.2)), names=["slow", "fast"])
    assert both.shared_A == pytest.approx((both.fits[0].A + both.fits[1].A) / 2)
    assert [f.A for f in both.refits] == [both.shared_A] * 2
    assert "fast is the most efficient" in both.verdict and both.refits[0].B < both.refits[1].B
    assert "overlap" in compare(*fits_of(0.60, 0.60, sd=0.006)).verdict
    assert f"B at A = {both.shared_A:.3f}" in format_comparison(both) and "fast" in format_comparison(both)


def test_refits_keep_what_the_fits_were_given():
    given = compare(*fits_of(0.60, 0.61, R0=0.29, n_samples=9000, level=0.8)).refits[0]
    assert (given.R0, given.points.n_samples[0], given.options["level"], given.n_points) == (0.29, 9000, 0.8, 40)


@pytest.mark.long
def test_refits_use_the_method_of_the_fits():
    """B on the grid, which has 2,000 and then every 10.1: at the shared A, from the measured R0."""
    both = compare(*fits_of(0.60, 0.61, method="paper_grid", C_mid_range=(2000, 3000)))
    for f in both.refits:
        assert f.A == both.shared_A and f.R0 == f.points.R[0]
        assert (f.C_mid - 2000) / (1000 / 99) == pytest.approx(round((f.C_mid - 2000) / (1000 / 99)), abs=1e-6)


@pytest.mark.long
def test_margin_is_inclusive():
    """.590 and .610, the paper's leave-one-out runs, agree; .590 and .611 do not."""
    a, b = fits_of(0.60, 0.61)
    a.A, b.A = 0.590, 0.610
    assert compare(a, b).shared_A == pytest.approx(0.600)
    b.A = 0.6101
    assert compare(a, b).shared_A is None
    assert compare(a, b, margin=0.03).shared_A is not None


def test_different_ceilings_and_unknown_ones():
    both = compare(*fits_of(0.55, 0.64), names=["low", "high"])
    assert both.shared_A is None and both.refits == [] and "high is highest" in both.verdict
    assert "overlaps" not in both.verdict
    a, b = fits_of(0.55, 0.64)
    b.intervals = b.intervals._replace(A=(0.54, 0.7))
    assert "overlaps that of run 1" in compare(a, b).verdict
    short = fit(*(v[:9] for v in run_of()))
    assert compare(a, short, names=["a", "short"]).verdict == "no verdict: the ceiling of short is not identifiable"
    with pytest.raises(ValueError, match="at least two"):
        compare(a)


def test_a_refit_is_not_taken_for_a_clock():
    """Its first point is late because the ones before were left out, not because compute is counted from long ago."""
    C = np.r_[0, np.arange(51, 101)]
    f = fit(C, sigmoid(C, 0.1, 0.6, 8, 70), R0=0.1)
    assert all(abs(refit.B - 8) < 0.1 for refit in compare(f, f).refits)
