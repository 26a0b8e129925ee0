"""fit_sigmoid.py against scipy and by hand, but for its reader and command line (test_fit_report.py)."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares, lsq_linear, minimize
from scipy.special import expit

from fit_sigmoid import Data, compare, fit, plain_fit, sigmoid, solve
from forecast import EQ1, FORMS, forecast

C4, R4 = [0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4]
X = np.arange(1, 25.0)
NOISE = np.random.default_rng(9).normal(0, 0.008, 24)
RISE = sigmoid(X, 0.2, 0.6, 3, 5) + NOISE


def run_of(truth=(0.3, 0.6, 1.8, 2500.0), n=40, end=16_000.0, sd=0.007, seed=0):
    """C (n + 1,), R: an evenly evaluated run with Gaussian noise."""
    C = np.linspace(0, end, n + 1)
    return C, sigmoid(C, *truth) + np.random.default_rng(seed).normal(0, sd, C.size)


def curve_of(form, C, R0, A, log_B, log_C_mid):
    with np.errstate(divide="ignore"):
        return R0 + (A - R0) * FORMS[form](math.exp(log_B) * (np.log(C) - log_C_mid))


def random_run(seed):
    """Data of a random run of 8 to 39 points, its form and noise the seed's turn; weights around those of its noise."""
    rng, sd = np.random.default_rng(seed), (0.01, 0.002)[seed % 2]
    N, end = int(rng.integers(8, 40)), 10 ** rng.uniform(-2, 6)
    C, (R0, A, B, x) = np.linspace(0, end, N), rng.uniform([0, 0.5, 0.8, 0.15], [0.4, 1, 4, 1.2])
    R = curve_of(list(FORMS)[seed // 2 % 4], C, R0, A, math.log(B), math.log(x * end)) + rng.normal(0, sd, N)
    return Data(C, np.clip(R, 0, 1), rng.uniform(0.2, 5, N) / sd**2, box_of(C))


def box_of(C):
    return np.array([[0, 1], [0, 1.25], *np.log([(0.1, 20), (C[C > 0][0] / 10, C[-1] * 30)])])


def least(data, form, A=None):
    """Oracle for the least Q, A fixed or free: scipy's least squares in all four, from the best three of nine starts."""
    C, R, w, box = data
    (low, high), free = box.T, [0, 1, 2, 3] if A is None else [0, 2, 3]

    def residuals(v):
        return np.sqrt(w) * (curve_of(form, C, *(v if A is None else (v[0], A, v[1], v[2]))) - R)

    shapes = [(math.log(B), math.log(x * C[-1])) for B in (0.7, 2, 6) for x in (0.1, 0.4, 1.5)]
    starts = [np.clip([R.min(), R.max(), *shape], low + 1e-6, high - 1e-6)[free] for shape in shapes]
    starts.sort(key=lambda v: np.sum(residuals(v) ** 2))
    options = {"bounds": (low[free], high[free]), "x_scale": np.array([0.1, 0.1, 1, 1])[free], "ftol": 1e-10}
    return min(2 * least_squares(residuals, v, **options).cost for v in starts[:3])


@pytest.mark.filterwarnings("error")
def test_sigmoid_by_hand():
    """R0 .2, A .6, B 2, C_mid 100. s(50) = 1 / (1 + 2^2) = .2, s(100) = .5, s(200) = 1 / (1 + .5^2) = .8."""
    values = sigmoid([0, 50, 100, 200, 1e300], 0.2, 0.6, 2.0, 100.0)
    assert values == pytest.approx([0.2, 0.28, 0.4, 0.52, 0.6], abs=1e-12) and values[0] == 0.2
    assert sigmoid(100.0, 0.2, np.array([0.6, 0.8]), 2.0, 100.0) == pytest.approx([0.4, 0.5])


@pytest.mark.parametrize(("R0", "A"), [(None, None), (0.25, None), (None, 0.7), (0.25, 0.7)])
def test_closed_form_against_scipy(R0, A):
    """Random data, weights and forms: `lsq_linear` finds the same; where it lets a curve fall, ours does not."""
    rng, bound, compared = np.random.default_rng(1), 0, 0
    low, fixed = np.array([R0 or 0.0, A or 0.0]), np.array([R0 is not None, A is not None])
    high = np.where(fixed, low, [1, 0.75])
    for i in range(100):
        C, form, shape = np.sort(rng.uniform(0, 10, 12)), list(FORMS)[i % 4], rng.normal([0, 1.2], 0.6)
        s = curve_of(form, C, 0, 1, *shape)
        R, w = rng.uniform(-0.1, 0.3) + rng.uniform(0, 0.8) * s + rng.normal(0, 0.1, 12), rng.uniform(0.1, 9, 12)
        box = np.array([*zip(low, high, strict=True), (0, 0), (0, 0)])
        curve = solve(Data(C, R, w, box), *shape[:, None], FORMS[form])
        M, x, ours = np.stack([1 - s, s], -1), low.copy(), np.array([curve.R0[0], curve.A[0]])
        if not fixed.all():
            b = np.sqrt(w) * (R - M[:, fixed] @ low[fixed])
            x[~fixed] = lsq_linear(np.sqrt(w)[:, None] * M[:, ~fixed], b, (low[~fixed], high[~fixed]), tol=1e-14).x
        assert ours[0] <= ours[1] and curve.Q[0] == pytest.approx(np.sum(w * (R - M @ ours) ** 2), abs=1e-7)
        if x[0] < x[1]:
            compared += 1
            bound += ((x < low + 1e-6) | (x > high - 1e-6))[~fixed].any()
            assert ours == pytest.approx(x, abs=1e-5) and ours[fixed] == pytest.approx(low[fixed], abs=1e-8)
    assert compared > 50 and (bound > 10 or fixed.all())


def test_ends_against_all_pairs():
    """The greatest and least R0, A and R(C) over a fine grid of (R0, A) with Q <= limit, of two shapes."""
    C, R = run_of(n=20)
    log_B, log_C_mid = np.log([1.5, 2.2]), np.log([2300.0, 2700.0])
    curves = solve(Data(C, R, np.full(21, 1e4), box_of(C)), log_B, log_C_mid)
    limit = curves.Q.max() + 30
    R0, A = np.meshgrid(np.linspace(0.15, 0.45, 601), np.linspace(0.5, 0.7, 601), indexing="ij")
    s = [curve_of(EQ1, C, 0, 1, *shape) for shape in zip(log_B, log_C_mid, strict=True)]
    fits = [sum(1e4 * (R[i] - (1 - v[i]) * R0 - v[i] * A) ** 2 for i in range(21)) <= limit for v in s]
    for share in np.array([[0, 0], [1, 1], [0.5, 0.5], [0.2, 0.9]]):
        values = np.concatenate([((1 - p) * R0 + p * A)[ok] for p, ok in zip(share, fits, strict=True)])
        assert curves.ends(share, limit) == pytest.approx((values.min(), values.max()), abs=1.5e-3)


@pytest.mark.parametrize("row", [(2542, 2.44, 0.585), (1675, 1.09, 0.615), (11272, 1.89, 0.645), (4242, 1.65, 0.710)])
def test_rows_of_the_paper_come_back(row):
    """C_mid, B, A; `plain_fit` also finds the minimum of noisy data."""
    C_mid, B, A = row
    C = np.linspace(0, 50_000 if C_mid > 5000 else 16_000, 41)
    f = fit(C, sigmoid(C, 0.25, A, B, C_mid))
    assert (f.R0, f.A, f.B, f.C_mid) == pytest.approx((0.25, A, B, C_mid), rel=1e-4)
    assert plain_fit(C, f.R) == pytest.approx((0.25, A, B, C_mid), rel=1e-4)
    assert f.rmse < 1e-6
    f = fit(C, f.R + np.resize(NOISE, 41))
    assert plain_fit(C, f.R) == pytest.approx((f.R0, f.A, f.B, f.C_mid), rel=2e-3)


def test_binomial_weights_are_maximum_likelihood():
    """Oracle: the binomial log-likelihood itself, maximised by Nelder-Mead from the truth, with unequal n."""
    truth, rng = (0.10, 0.92, 2.0, 300.0), np.random.default_rng(1)
    C, n = np.linspace(0, 900, 19), np.where(np.arange(19) % 2, 400, 4000)
    k = rng.binomial(n, sigmoid(C, *truth))

    def loss(v):
        p = np.clip(sigmoid(C, *expit(v[:2]), *np.exp(v[2:])), 1e-9, 1 - 1e-9)
        return -np.sum(k * np.log(p) + (n - k) * np.log(1 - p))

    start, options = np.log([0.1 / 0.9, 0.92 / 0.08, 2, 300]), {"maxiter": 8000, "xatol": 1e-9, "fatol": 1e-9}
    v = minimize(loss, start, method="Nelder-Mead", options=options).x
    f, plain = fit(C, k / n, n_samples=n), fit(C, k / n)
    assert (f.R0, f.A) == pytest.approx(expit(v[:2]), abs=1e-3) and f.B == pytest.approx(np.exp(v[2]), rel=5e-3)
    assert abs(plain.A - expit(v[1])) > 3e-3  # without weights it is another estimate


def test_points_are_cleaned_and_not_modified():
    """NaN in C, R or n is left out, and equal points stay: two evaluations that agree are two."""
    (C, R), n = run_of(n=20), np.linspace(500, 900, 21)
    data = [np.append(v, w) for v, w in ((C, [np.nan, 3, 4]), (R, [0.4, np.nan, 0.5]), (n, [9, 9, np.nan]))]
    keep = [v.copy() for v in data]
    f, base = fit(*data[:2], n_samples=data[2]), fit(C, R, n_samples=n)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(data, keep, strict=True))
    assert (f.C.tolist(), f.R.tolist(), f.n.tolist(), f.A) == (C.tolist(), R.tolist(), n.tolist(), base.A)
    assert fit(C, R, n_samples=700).A == fit(C, R, n_samples=[700] * 21).A != fit(C, R).A
    assert fit(C, R).A == fit(C, R, n_samples=math.inf).A and fit([*X, 4], [*RISE, RISE[3]]).C.size == 25
    assert fit([5, 6, 7, 10], R4).C.size == 4 and fit(C4, R4, R0=0.4, A=0.4).C.size == 4


def fits_of(*ceilings, B=(1.8, 1.8), sd=0.002, **options):
    pairs = enumerate(zip(ceilings, B, strict=True))
    return [fit(*run_of((0.3, A, b, 2500.0), sd=sd, seed=i), **options) for i, (A, b) in pairs]


def test_equal_ceilings_share_A_and_compare_B():
    fits = fits_of(0.60, 0.61, B=(1.3, 2.2))
    both = compare(*fits, names=["slow", "fast"])
    assert both.shared_A == pytest.approx((fits[0].A + fits[1].A) / 2) and both.refits[0].B < both.refits[1].B
    assert [f.A for f in both.refits] == pytest.approx([both.shared_A] * 2, abs=1e-6)
    shared = f"ceilings agree within 0.02; at the shared A = {both.shared_A:.3f} "
    C_mid = [f"{f.C_mid / 1000:.3g}k" for f in both.refits]
    first, last = sorted(zip(C_mid, ("slow", "fast"), strict=True))
    efficient = "fast is the most efficient, and C_mid goes from {} ({}) to {} ({})"
    assert both.verdict == shared + efficient.format(*first, *last)
    verdict = compare(*fits_of(0.60, 0.60, sd=0.006)).verdict
    assert (
        verdict.startswith("ceilings agree within 0.02")
        and "; at the shared A = 0.6" in verdict
        and "the intervals of B overlap, and C_mid" in verdict
    )
    refit = compare(*fits_of(0.60, 0.61, R0=0.29, n_samples=9000)).refits[0]
    assert (refit.R0, refit.n[0], refit.C.size) == (pytest.approx(0.29), 9000, 41)


def test_different_ceilings_and_unknown_ones():
    """.590 and .610, the paper's leave-one-out runs, agree; .590 and .6101 do not."""
    a, b = fits_of(0.60, 0.61)

    def at(A, low=0.6, high=0.7):  # a fit with this ceiling and interval
        return replace(a, A=A, A_interval=(low, high))

    assert compare(at(0.590), at(0.610)).shared_A == pytest.approx(0.600)
    assert compare(at(0.590), at(0.6101)).shared_A is None
    assert compare(at(0.590), at(0.6101), margin=0.03).shared_A is not None
    differ = "ceilings differ by 0.050, more than 0.02: {} is highest"
    overlap = compare(at(0.59, 0.58, 0.61), at(0.64, 0.61))
    assert overlap.verdict == differ.format("run 2") + ", but its interval overlaps that of another"
    assert compare(at(0.64, 0.6101), at(0.59, 0.58, 0.61), names=["high", "low"]).verdict == differ.format("high")
    short = fit(*(v[:9] for v in run_of()))
    assert compare(a, short, names=["a", "short"]).verdict == "no verdict: the ceiling of short is not identifiable"
    for fits, names in ([a], None), ([a, b], ["a"]):
        with pytest.raises(ValueError, match="at least two|zip"):
            compare(*fits, names=names)


@pytest.mark.parametrize("spread", [1e-9, 1e-6])
def test_points_at_one_compute_have_no_order(spread):
    """8 runs, evaluated at the same 20 computes on 32 problems each: noise of the samples and no more. Neither that nor
    a verdict changes where each compute is moved by a billionth of itself."""
    C, rng = np.repeat(np.arange(1.0, 21.0), 8), np.random.default_rng(0)
    R = rng.binomial(32, sigmoid(C, 0.05, 0.9, 2.0, 4.0)) / 32
    for n in (None, 32):
        f = fit(C, R, n_samples=n)
        apart = fit(C * (1 + spread * rng.random(160)), R, n_samples=n)
        assert (f.dispersion, *f.A_interval) == pytest.approx((apart.dispersion, *apart.A_interval), rel=1e-3)
        assert f.reason == apart.reason and (n is None or f.dispersion < 1.4)


@pytest.mark.parametrize("n", [None, 1000])
def test_a_fixed_value_that_the_data_exclude_has_a_reason(n):
    """Data that rise from .1 to .6. Near values and the true ones are none that the data exclude."""
    C = np.linspace(0, 6, 25)
    R = sigmoid(C, 0.1, 0.6, 2, 1.0) + 0.002 * np.resize([1, -1], 25)
    for fixed in ({"A": 0.3}, {"R0": 0.3}):
        assert "contradicts the data" in fit(C, R, n_samples=n, **fixed).reason
        assert "contradicts the data" in forecast(C, R, n_samples=n, **fixed).reason
    for fixed in ({"A": 0.6}, {"A": 0.603}, {"R0": 0.1}, {"R0": 0.1, "A": 0.6}):
        assert fit(C, R, n_samples=n, **fixed).identifiable and forecast(C, R, n_samples=n, **fixed).identifiable
