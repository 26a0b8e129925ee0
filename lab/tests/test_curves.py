"""lab/law/curves.py against scipy and by hand, but for its reader and its report (test_fit_report.py)."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from curves import Data, compare, fit, solve
from forecast import EQ1, FORMS
from scipy.optimize import least_squares, lsq_linear, minimize
from test_fit_sigmoid import run_of

import fit_sigmoid
from fit_sigmoid import sigmoid

X = np.arange(1, 25.0)
NOISE = np.random.default_rng(9).normal(0, 0.008, 24)
RISE = sigmoid(X, 0.2, 0.6, 3, 5) + NOISE


def curve_of(form, C, R0, A, log_B, log_C_mid):
    with np.errstate(divide="ignore"):
        u = math.exp(log_B) * (np.log(C) - log_C_mid)
    return R0 + (A - R0) * FORMS[form](u)


def box_of(C):
    first = C[C > 0][0]
    return np.array([[0, 1], [0, 1.25], *np.log([(0.1, 20), (first / 10, C[-1] * 30)])])


def random_run(seed):
    """Data of a random run of 8 to 39 points, its form and noise the seed's turn; weights around those of its noise."""
    rng = np.random.default_rng(seed)
    sd = (0.01, 0.002)[seed % 2]
    form = list(FORMS)[seed // 2 % 4]
    N = int(rng.integers(8, 40))
    end = 10 ** rng.uniform(-2, 6)
    C = np.linspace(0, end, N)
    R0, A, B, x = rng.uniform([0, 0.5, 0.8, 0.15], [0.4, 1, 4, 1.2])
    R = curve_of(form, C, R0, A, math.log(B), math.log(x * end)) + rng.normal(0, sd, N)
    w = rng.uniform(0.2, 5, N) / sd**2
    return Data(C, np.clip(R, 0, 1), w, box_of(C))


def least(data, form, A=None):
    """Oracle for the least Q, A fixed or free: scipy's least squares in all four, from the best three of nine starts."""
    C, R, w, box = data
    free = [0, 1, 2, 3] if A is None else [0, 2, 3]
    low, high = box[free].T

    def residuals(v):
        if A is not None:
            v = np.insert(v, 1, A)
        return np.sqrt(w) * (curve_of(form, C, *v) - R)

    def cost(v):
        return np.sum(residuals(v) ** 2)

    starts = []
    for B in (0.7, 2, 6):
        for x in (0.1, 0.4, 1.5):
            start = np.array([R.min(), R.max(), math.log(B), math.log(x * C[-1])])
            starts.append(np.clip(start[free], low + 1e-6, high - 1e-6))
    starts.sort(key=cost)
    scale = np.array([0.1, 0.1, 1, 1])[free]
    fits = [least_squares(residuals, v, bounds=(low, high), x_scale=scale, ftol=1e-10) for v in starts[:3]]
    return min(2 * result.cost for result in fits)


@pytest.mark.parametrize("R0", [None, 0.25])
@pytest.mark.parametrize("A", [None, 0.7])
def test_closed_form_against_scipy(R0, A):
    """Random data, weights and forms: `lsq_linear` finds the same; where it lets a curve fall, ours does not."""
    rng = np.random.default_rng(1)
    low = np.array([R0 or 0.0, A or 0.0])
    free = np.array([R0 is None, A is None])
    high = np.where(free, [1, 0.75], low)
    compared = at_bound = 0
    for i in range(100):
        form = list(FORMS)[i % 4]
        C = np.sort(rng.uniform(0, 10, 12))
        shape = rng.normal([0, 1.2], 0.6)
        s = curve_of(form, C, 0, 1, *shape)
        R = rng.uniform(-0.1, 0.3) + rng.uniform(0, 0.8) * s + rng.normal(0, 0.1, 12)
        w = rng.uniform(0.1, 9, 12)
        box = np.array([*zip(low, high, strict=True), (0, 0), (0, 0)])
        curve = solve(Data(C, R, w, box), *shape[:, None], FORMS[form])
        ours = np.array([curve.R0[0], curve.A[0]])
        M = np.stack([1 - s, s], -1)
        assert ours[0] <= ours[1]
        assert curve.Q[0] == pytest.approx(np.sum(w * (R - M @ ours) ** 2), abs=1e-7)

        x = low.copy()
        if free.any():
            rest = R - M[:, ~free] @ low[~free]
            bounds = low[free], high[free]
            x[free] = lsq_linear(np.sqrt(w)[:, None] * M[:, free], np.sqrt(w) * rest, bounds, tol=1e-14).x
        if x[0] < x[1]:
            compared += 1
            at_bound += ((x < low + 1e-6) | (x > high - 1e-6))[free].any()
            assert ours == pytest.approx(x, abs=1e-5)
            assert ours[~free] == pytest.approx(low[~free], abs=1e-8)
    assert compared > 50
    assert at_bound > 10 or not free.any()


def test_ends_against_all_pairs():
    """The greatest and least R0, A and R(C) over a fine grid of (R0, A) with Q <= limit, of two shapes."""
    C, R = run_of(n=20)
    shapes = np.log([[1.5, 2300.0], [2.2, 2700.0]])
    curves = solve(Data(C, R, np.full(21, 1e4), box_of(C)), *shapes.T)
    limit = curves.Q.max() + 30
    R0, A = np.meshgrid(np.linspace(0.15, 0.45, 601), np.linspace(0.5, 0.7, 601), indexing="ij")
    allowed = []
    for shape in shapes:
        s = curve_of(EQ1, C, 0, 1, *shape)
        Q = sum(1e4 * (R[i] - (1 - s[i]) * R0 - s[i] * A) ** 2 for i in range(21))
        allowed.append(limit >= Q)
    for share in ([0, 0], [1, 1], [0.5, 0.5], [0.2, 0.9]):
        values = [((1 - p) * R0 + p * A)[ok] for p, ok in zip(share, allowed, strict=True)]
        values = np.concatenate(values)
        assert curves.ends(share, limit) == pytest.approx((values.min(), values.max()), abs=1.5e-3)


def test_interval_of_the_curve_against_scipy():
    """The least and greatest R(C) of all curves with Q <= limit, by SLSQP, which scales to steps of about 1."""
    C, R = run_of(n=20)
    f = fit(C, R)
    best = np.array([f.R0, f.A, math.log(f.B), math.log(f.C_mid)])
    scale = np.array([0.01, 0.01, 0.1, 0.05])

    def rate(v, at):
        return curve_of(EQ1, at, *(best + scale * v))

    def slack(v):
        return (np.sum((R - rate(np.zeros(4), C)) ** 2) + f.margin - np.sum((R - rate(v, C)) ** 2)) / f.margin

    at = np.array([1.0, 1000.0, 2500.0, 16_000.0, 40_000.0])
    for k, ends in enumerate(f.interval(at).T):
        for sign, end in zip((1, -1), ends, strict=True):
            result = minimize(
                lambda v, sign=sign, k=k: sign * 100 * rate(v, at[k]),
                np.zeros(4),
                constraints={"type": "ineq", "fun": slack},
                method="SLSQP",
            )
            assert result.success and sign * result.fun / 100 == pytest.approx(end, abs=1e-3)
    assert np.isnan(fit(C[:3], R[:3]).interval(at)).all()


@pytest.mark.parametrize("row", [(1675, 1.09, 0.615), (11272, 1.89, 0.645)])
def test_rows_of_the_paper_come_back(row):
    """C_mid, B, A of two, and of noisy data, also with binomial weights, what the lesson finds, by another way."""
    C_mid, B, A = row
    C = np.linspace(0, 50_000 if C_mid > 5000 else 16_000, 41)
    R = sigmoid(C, 0.25, A, B, C_mid)
    f = fit(C, R)
    assert (f.R0, f.A, f.B, f.C_mid) == pytest.approx((0.25, A, B, C_mid), rel=1e-4)
    assert f.rmse < 1e-6
    R = R + np.resize(NOISE, 41)
    for n in (None, np.where(np.arange(41) % 2, 400, 4000)):
        f = fit(C, R, n_samples=n)
        lesson = fit_sigmoid.fit(C, R, n_samples=n)
        assert (lesson.R0, lesson.A, lesson.B, lesson.C_mid) == pytest.approx((f.R0, f.A, f.B, f.C_mid), rel=1e-4)


def test_points_are_cleaned_and_not_modified():
    """NaN in C, R or n is left out, and equal points stay: two evaluations that agree are two."""
    C, R = run_of(n=20)
    n = np.linspace(500, 900, 21)
    data = [np.append(C, [np.nan, 3, 4]), np.append(R, [0.4, np.nan, 0.5]), np.append(n, [9, 9, np.nan])]
    before = [v.copy() for v in data]
    f = fit(*data[:2], n_samples=data[2])
    for now, then in zip(data, before, strict=True):
        np.testing.assert_array_equal(now, then)
    for used, clean in ((f.C, C), (f.R, R), (f.n, n)):
        assert used.tolist() == clean.tolist()
    assert f.A == fit(C, R, n_samples=n).A

    plain = fit(C, R).A
    assert fit(C, R, n_samples=math.inf).A == plain
    assert fit(C, R, n_samples=700).A == fit(C, R, n_samples=[700] * 21).A != plain
    assert fit([*X, 4], [*RISE, RISE[3]]).C.size == 25


def test_few_points_are_enough_for_fixed_values():
    R = [0.1, 0.2, 0.3, 0.4]
    few = "too few points: {}, with {} different values of compute above 0; evaluate more often"
    assert fit([5, 6, 7, 10], R).reason == few.format(4, 4)
    assert fit([1, 2] * 20, R * 10).reason == few.format(40, 2)
    assert fit([0, 1, 2, 3], R, R0=0.4, A=0.4).A == pytest.approx(0.4)


def test_the_reason_names_what_is_wrong():
    """Ceilings lie between 0 and 1, whatever the algebra allows. Where the interval is narrow, and the first point lies
    above C_mid, that is the reason."""
    noise = fit(X[:12], 0.4 + NOISE[:12])
    assert re.fullmatch(
        r"ceilings from 0\.00 to 1\.00 fit: the data reach 0\.4\d by C = 12, \d\.\d C_mid", noise.reason
    )
    R = np.full(37, 0.4) + np.resize(NOISE, 37) / 4
    R[0] = 0.37
    late = fit(np.arange(1, 38.0), R)
    assert np.ptp(late.A_interval) < 0.1
    assert late.reason.endswith(f"C_mid; the first point is at {1 / late.C_mid:.1f} C_mid, too late")
    assert fit(late.C, R, R0=0.1).identifiable


def fits_of(*ceilings, B=(1.8, 1.8), sd=0.002, **options):
    fits = []
    for seed, (A, b) in enumerate(zip(ceilings, B, strict=True)):
        C, R = run_of((0.3, A, b, 2500.0), sd=sd, seed=seed)
        fits.append(fit(C, R, **options))
    return fits


def test_equal_ceilings_share_A_and_compare_B():
    fits = fits_of(0.60, 0.61, B=(1.3, 2.2))
    both = compare(*fits, names=["slow", "fast"])
    assert both.shared_A == pytest.approx((fits[0].A + fits[1].A) / 2)
    assert [f.A for f in both.refits] == pytest.approx([both.shared_A] * 2, abs=1e-6)
    assert both.refits[0].B < both.refits[1].B
    C_mid = [f"{f.C_mid / 1000:.3g}k" for f in both.refits]
    (low, first), (high, last) = sorted(zip(C_mid, ("slow", "fast"), strict=True))
    assert both.verdict == (
        f"ceilings agree within 0.02; at the shared A = {both.shared_A:.3f} fast is the most efficient, "
        f"and C_mid goes from {low} ({first}) to {high} ({last})"
    )
    verdict = compare(*fits_of(0.60, 0.60, sd=0.006)).verdict
    assert "the intervals of B overlap, and C_mid" in verdict
    refit = compare(*fits_of(0.60, 0.61, R0=0.29, n_samples=9000)).refits[0]
    assert (refit.R0, refit.n[0], refit.C.size) == (pytest.approx(0.29), 9000, 41)


def test_different_ceilings_and_unknown_ones():
    """.590 and .610, the paper's leave-one-out runs, agree; .590 and .6101 do not."""
    known, other = fits_of(0.60, 0.61)

    def at(A, low=0.6, high=0.7):  # a fit with this ceiling and interval
        return replace(known, A=A, A_interval=(low, high))

    assert compare(at(0.590), at(0.610)).shared_A == pytest.approx(0.600)
    assert compare(at(0.590), at(0.6101)).shared_A is None
    assert compare(at(0.590), at(0.6101), margin=0.03).shared_A is not None
    differ = "ceilings differ by 0.050, more than 0.02: {} is highest"
    overlap = compare(at(0.59, 0.58, 0.61), at(0.64, 0.61))
    assert overlap.verdict == differ.format("run 2") + ", but its interval overlaps that of another"
    apart = compare(at(0.64, 0.6101), at(0.59, 0.58, 0.61), names=["high", "low"])
    assert apart.verdict == differ.format("high")

    C, R = run_of()
    short = fit(C[:9], R[:9])
    unknown = compare(known, short, names=["known", "short"])
    assert unknown.verdict == "no verdict: the ceiling of short is not known yet"
    with pytest.raises(ValueError, match="at least two"):
        compare(known)
    with pytest.raises(ValueError, match="zip"):
        compare(known, other, names=["known"])


@pytest.mark.parametrize("n", [None, 32])
@pytest.mark.parametrize("spread", [1e-9, 1e-6])
def test_points_at_one_compute_have_no_order(spread, n):
    """8 runs, evaluated at the same 20 computes on 32 problems each: noise of the samples and no more. Neither that nor
    a verdict changes where each compute is moved by a billionth of itself."""
    rng = np.random.default_rng(0)
    C = np.repeat(np.arange(1.0, 21.0), 8)
    R = rng.binomial(32, sigmoid(C, 0.05, 0.9, 2.0, 4.0)) / 32
    f = fit(C, R, n_samples=n)
    apart = fit(C * (1 + spread * rng.random(160)), R, n_samples=n)
    assert (f.dispersion, *f.A_interval) == pytest.approx((apart.dispersion, *apart.A_interval), rel=1e-3)
    assert f.reason == apart.reason
    assert n is None or f.dispersion < 1.4
    order = rng.permutation(160)  # points are sorted by compute, rate and samples before anything is summed
    again = fit(C[order], R[order], n_samples=n)
    assert (again.A, again.B, again.A_interval) == (f.A, f.B, f.A_interval)
