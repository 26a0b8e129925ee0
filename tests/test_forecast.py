"""forecast.py against scipy and by hand, but for its report and command line (test_fit_report.py)."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit
from test_fit_sigmoid import NOISE, RISE, X, box_of, curve_of, least, random_run, run_of

import forecast as module
from fit_sigmoid import Data, plain_fit, scan, shares, sigmoid
from forecast import EQ1, FORMS, forecast

NORMAL = stats.norm(scale=1.7)
LEARNED = {"Weibull": stats.gumbel_l, "log-normal": NORMAL, EQ1: stats.logistic, "Frechet": stats.gumbel_r}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_distribution_that_the_table_names(form):
    """scipy's own, with its median at 0; of what is still missing late, the logarithm."""
    u, law = np.linspace(-40, 40, 401), LEARNED[form]
    share, late = FORMS[form](u), np.array([1.0, 2, 3])
    assert share == pytest.approx(law.cdf(u + law.median()), abs=1e-12) and (np.diff(share) >= 0).all()
    assert np.log(1 - FORMS[form](late)) == pytest.approx(law.logsf(late + law.median()), rel=1e-9)
    assert FORMS[form](np.array([0, -np.inf, np.inf])).tolist() == [0.5, 0, 1]
    assert np.abs(FORMS["log-normal"](u) - expit(u)).max() < 0.01
    s = shares(np.array([0.0, 5.0, 50.0]), np.log([2.0, 3.0]), np.log([5.0, 50.0]), FORMS[form])
    assert s[[0, 1], [1, 2]] == pytest.approx(0.5) and s[:, 0].tolist() == [0, 0]


@pytest.fixture(scope="module")
def runs():
    """30 random runs: data, the least Q of each form, the dispersion of the best."""
    least_Q = [(data, {form: least(data, form) for form in FORMS}) for data in map(random_run, range(30))]
    return [(data, Q, max(min(Q.values()) / (data.C.size - 4), 1)) for data, Q in least_Q]


@pytest.mark.long
def test_scan_finds_the_least_Q(runs):
    """To a hundredth of the dispersion, for each form."""
    above = {
        (i, form): (scan(data, share=FORMS[form]).Q[0] - Q[form]) / d
        for i, (data, Q, d) in enumerate(runs)
        for form in FORMS
    }
    assert {case: round(v, 2) for case, v in above.items() if not -0.01 < v < 0.01} == {}


@pytest.mark.long
def test_ends_of_the_scanned_set_are_the_profiles(runs):
    """2 % of its width outside an end of A's range no curve with that A has Q <= limit, 2 % inside one has."""
    wrong, seen = [], 0
    for i, (data, Q, dispersion) in enumerate(runs[::3]):
        limit = min(Q.values()) + 8 * dispersion
        for form in (form for form in FORMS if Q[form] < limit - 0.1):
            low, high = np.clip(scan(data, limit, FORMS[form]).ends(1.0, limit), 0, 1.25)
            for end, step in ((low, 0.02 * (low - high)), (high, 0.02 * (high - low))):
                seen += 1
                out = 0 < end + step < 1.25 and least(data, form, end + step) <= limit
                wrong += [(3 * i, form, end)] if out or least(data, form, end - step) > limit else []
    assert wrong == [] and seen > 40


def by_hand(f):
    """Standardized residuals z (N,) of the best form and its Q; the weights are of Eq. 1's curve."""
    q = None if f.fit.n is None else (f.predict(f.fit.C) * f.fit.n + 1) / (f.fit.n + 2)
    z = (f.fit.R - f.predict(f.fit.C, f.form)) / (1.0 if q is None else np.sqrt(q * (1 - q) / f.fit.n))
    return z, float(z @ z)


@pytest.mark.parametrize("n", [None, 900])
@pytest.mark.parametrize("sd", [0.0, 0.01, 0.03])
def test_dispersion_and_limit_by_hand(n, sd):
    """Without n: Q / (N - 4), at least 1e-8. With n: (Q + 4) / (N - 4 + 4), at least 1. The set's limit is the least Q
    plus 2 dispersion t^2, t Student's quantile. The likelihood of a form: exp of half of its Q above, over dispersion."""
    f = forecast(*run_of(n=30, seed=1, sd=sd), n_samples=n)
    z, Q = by_hand(f)
    assert sd == 0 or abs(z[1:] @ z[:-1] / Q) < 1.645 / math.sqrt(31)  # no correlation to be seen
    assert f.fit.dof == (31 if n else 27) and f.fit.t == pytest.approx(stats.t.ppf(0.975, f.fit.dof))
    assert f.fit.dispersion == pytest.approx(max((Q + 4) / 31, 1.0) if n else max(Q / 27, 1e-8), rel=1e-3)
    assert f.limit - Q == pytest.approx(2 * f.fit.dispersion * f.fit.t**2, rel=1e-3)
    assert not (n and sd) or (f.fit.dispersion > 2) == (sd == 0.03)
    for form, curve in f.best.items():
        assert f.likelihood[form] == pytest.approx(
            math.exp((Q - curve.Q[0]) / 2 / f.fit.dispersion), rel=0.01, abs=1e-9
        )


@pytest.mark.long
def test_neighbors_that_agree_raise_the_dispersion():
    """By (1 + r) / (1 - r), r the lag-1 correlation of the residuals, if it exceeds 1.645 / sqrt(N); at most .95."""
    C, R = run_of(n=60)
    raised = []
    for size in np.linspace(0, 0.02, 7):
        f = forecast(C, R + size * np.sin(C / 900))
        z, Q = by_hand(f)
        r = z[1:] @ z[:-1] / Q
        raised.append(f.fit.dispersion * 57 / Q)
        assert raised[-1] == pytest.approx((1 + r) / (1 - r) if r > 1.645 / math.sqrt(61) else 1, rel=1e-9)
    assert raised[0] == 1 and 1.3 < min(v for v in raised if v > 1) < 2 and 3 < raised[-1] < 39
    C = np.linspace(0, 16_000, 151)
    f = forecast(C, sigmoid(C, 0.3, 0.6, 1.8, 2500) + 0.02 * np.sin(C / 500))  # r is .97
    assert f.fit.dispersion == pytest.approx(by_hand(f)[1] / 147 * 1.95 / 0.05)


def test_the_interval_is_a_union():
    """Of every form that is not excluded; and beyond the data, of the pass rate reached, and that plus three times what
    Eq. 1 expects. A's is that at compute without end."""
    C, R = run_of(sd=0.004)
    for cut, forms in ((12, 4), (26, 3), (41, 2)):
        f, at = forecast(C[:cut], R[:cut]), np.array([2000.0, C[cut - 1], 1.5 * C[cut - 1], 1e5, 1e7])
        (low, high), reached = f.interval(at), f.predict(f.fit.C[-1])
        likely = {form for form, p in f.likelihood.items() if p > math.exp(-(f.fit.t**2))}
        assert len(f.allowed) == forms and set(f.allowed) == likely
        for form in f.allowed:
            assert (low <= f.predict(at, form) + 1e-9).all() and (f.predict(at, form) <= high + 1e-9).all()
        columns = [(curves, shares(at, *curves[:2], FORMS[form]).T) for form, curves in f.allowed.items()]
        ends = [[curves.ends(s, f.limit) for s in of_form] for curves, of_form in columns]  # (F, 5, 2)
        least_, most = np.min(ends, 0)[:, 0], np.max(ends, 0)[:, 1]
        assert low == pytest.approx(np.maximum([*least_[:2], *np.minimum(least_[2:], reached)], 0))
        remains = reached + 3 * (f.predict(at) - reached)
        assert high == pytest.approx(np.minimum([*most[:2], *np.maximum(most, remains)[2:]], 1))
        assert f.A_interval == pytest.approx(f.interval(1e30)[:, 0], abs=1e-6) and f.identifiable == (cut > 12)


def test_interval_of_an_evaluation_by_hand():
    """Half-widths add in quadrature: hypot(curve, t sd), sd^2 = dispersion p (1 - p) / n at the median n, or dispersion
    without n; p is the best form's."""
    C, R = run_of(n=30)
    for n in (None, 5000, np.repeat([5000, 500, 50_000], [16, 8, 7])):
        f = forecast(C, R, n_samples=n)
        p, (low, high), (a, b) = f.predict(2e4, f.form), f.interval(2e4)[:, 0], f.interval(2e4, noise=True)[:, 0]
        q = (p * 5000 + 1) / 5002
        sd = math.sqrt(f.fit.dispersion * (1.0 if n is None else q * (1 - q) / 5000))
        assert (p - a, b - p) == pytest.approx((math.hypot(p - low, f.fit.t * sd), math.hypot(high - p, f.fit.t * sd)))
    near_one = forecast(C, np.minimum(R / 0.6, 1), n_samples=100).interval([0.0, 1e5], noise=True)
    assert near_one.max() == 1.0 and near_one.min() > 0


def test_a_rise_too_fast_for_any_ceiling_up_to_1():
    """A may go up to 1.25 in the fit, and is cut at 1: so the forecast does not bend down to meet a bound."""
    C = np.linspace(0, 450, 10)
    R = 0.065 + 0.935 * (C / 640) ** 1.6
    f, strict = forecast(C, R), forecast(C, R, A=1.0)
    assert f.fit.A == 1.0 and f.best[EQ1].A[0] == pytest.approx(1.25) and not f.identifiable and f.predict(1e9) == 1.0
    assert plain_fit(C, R)[1] == pytest.approx(1.0)
    assert f.predict(640.0) > strict.predict(640.0) + 0.005 and f.fit.rmse < strict.fit.rmse


def test_open_ends():
    """A step between two points: B has no upper end. Almost a straight line in log C: C_mid has no upper end, or neither
    has one. No fit: none."""
    f = forecast(X[:20], np.where(X < 10.5, 0.2, 0.6)[:20] + NOISE[:20])
    assert (
        f.fit.B_interval[1] == math.inf
        and f.fit.B_interval[0] > 5
        and 9 < f.fit.C_mid_interval[0] < f.fit.C_mid_interval[1] < 12
    )
    f = forecast(X, 0.2 + 0.03 * np.log(X) + NOISE / 2)
    assert f.fit.C_mid_interval[1] == math.inf and f.fit.C_mid_interval[0] > 0.5
    assert 0.15 < f.fit.B_interval[0] < f.fit.B_interval[1] < 2
    f = forecast(X, 0.2 + 0.01 * np.log(X) + NOISE / 2)
    assert f.fit.C_mid_interval == (0, math.inf) and f.fit.B_interval[0] == 0 and 2 < f.fit.B_interval[1] < 20
    assert forecast(X, 0.2 + 0.01 * np.log(X)).fit.B == pytest.approx(0.1) and forecast(
        X, 0.4 * (X > 9.5)
    ).fit.B == pytest.approx(20)
    f = forecast(X, np.full(24, 0.4))
    assert f.fit.B_interval == f.fit.C_mid_interval == (0.0, math.inf) and f.A_interval == (0.0, 1.0)
    assert f.interval([5.0, 6.0]).tolist() == [[0, 0], [1, 1]] and np.isnan(f.predict([5.0, 6.0])).all()


SMALL = 0.2 + 0.08 * sigmoid(X, 0, 1, 3, 5) + NOISE / 2  # a gain of .08
WIDE = r"ceilings from 0\.{} to {} fit: the data reach 0\.\d\d by C = {}, {}\.\d C_mid"
FLAT = "the pass rate does not rise beyond its noise by C = 24: no curve to fit"
FEW = "{} usable points are too few for four unknowns and the noise: evaluate more often"
FALL = "the last 4 points lie below the curve: the run falls, and nothing says how far"
VERDICTS = {  # what fails: C, R, n_samples, the whole reason
    "nothing": (X, RISE, None, ""),
    "nothing, n known": (X, RISE, 2000, ""),
    "nothing, little gain": (X, SMALL, None, ""),
    "no point": ([], [], None, FEW.format(0)),
    "four points": (X[[1, 3, 6, 20]], RISE[[1, 3, 6, 20]], None, FEW.format(4)),
    "four points, n known": (X[[1, 3, 6, 20]], RISE[[1, 3, 6, 20]], 2000, WIDE.format(r"5\d", r"0\.\d\d", 21, 4)),
    "two places": ([0, 1, 1, 1, 2, 2, 2], RISE[:7], None, FEW.format(7)),
    "only NaN": (X, np.full(24, np.nan), None, FEW.format(0)),
    "noise": (X, 0.4 + NOISE, None, FLAT),
    "constant": (X, np.full(24, 0.4), None, FLAT),
    "all solved": (X, np.ones(24), 2000, FLAT),
    "falling": (X, 0.6 - 0.02 * X, None, FALL),
    "falls at the end": (X, RISE - 0.012 * np.maximum(X - 16, 0), None, FALL),
    "early": (X[:8], RISE[:8], None, WIDE.format(r"[45]\d", r"1\.00", 8, 1)),
    "later": (X[:14], RISE[:14], 2000, WIDE.format(r"5\d", r"0\.7\d", 14, 2)),
    "more than half of the gain": (X, SMALL, 2000, WIDE.format("27", r"0\.36", 24, 4)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", VERDICTS)
def test_each_condition_fails_alone_with_its_sentence(what):
    C, R, n_samples, sentence = VERDICTS[what]
    f = forecast(C, R, n_samples=n_samples)
    f.interval([1.0, 10.0, 100.0], noise=True)  # without a warning
    assert re.fullmatch(sentence, f.reason), f.reason
    assert f.identifiable == (not sentence)
    if "ceilings" not in sentence and sentence:  # nothing is known of a ceiling, and nothing says when it will be
        assert f.A_interval == (0, 1) and f.ask_again() == math.inf
        assert bool(f.best) == (f.fit.A > 0.5) == (what == "falls at the end")


def crossing(statistics, verdicts, at):
    """The verdict is yes exactly where the statistic is below `at`, and the table comes near it on both sides."""
    pairs = sorted(zip(statistics, verdicts, strict=True))
    assert all(verdict == (statistic < at) for statistic, verdict in pairs), pairs
    assert max(v for v, _ in pairs if v < at) > at / 1.3 and min(v for v, _ in pairs if v > at) < at * 1.3, pairs


@pytest.mark.long
def test_thresholds_of_the_verdict():
    """By hand on tables of runs that cross them: F test of the best curve against a flat line at .001; the mean of the
    last fifth, in standard errors of the noise that differences show, at -4; width of A's interval at .1."""
    p, flat, jagged = [], [], 2 * np.abs(NOISE) * np.resize([1, -1], 24)
    for size in np.linspace(0.07, 0.1, 9):
        R = sigmoid(X, 0.2, 0.2 + size, 2, 8) + jagged
        Q, total = min(least(Data(X, R, np.ones(24), box_of(X)), form) for form in FORMS), np.sum((R - R.mean()) ** 2)
        p.append(stats.f.sf((total - Q) / 2 / (Q / 20), 2, 20))
        flat.append(forecast(X, R).reason == FLAT)
    crossing(-np.log(p), flat, -math.log(0.001))
    fits = [forecast(X, RISE - slope * np.maximum(X - 16, 0)) for slope in np.linspace(0.004, 0.012, 10)]
    z = [by_hand(f)[0] for f in fits]
    below = [-v[-4:].mean() * 2 / math.sqrt(np.mean(np.diff(v) ** 2) / 2) for v in z]
    crossing(below, [f.reason != FALL for f in fits], 4)
    fits = [forecast(X[:k], (RISE - 0.75 * NOISE)[:k], n_samples=2000) for k in range(15, 22)]
    crossing([np.ptp(f.A_interval) for f in fits], [f.identifiable for f in fits], 0.1)


@pytest.mark.long
@pytest.mark.parametrize("form", ["Weibull", "Frechet"])
def test_ask_again(form):
    """If the run goes on along its best form, without further noise and as often evaluated, it is identifiable at the
    compute that `ask_again` names, and not 20 % before."""
    C = np.linspace(0, 1200, 13)
    f = forecast(C, curve_of(form, C, 0.1, 0.7, math.log(2), math.log(700)), n_samples=4000)
    again = f.ask_again()

    def at(end):
        more = np.arange(1300, end + 50, 100)
        return forecast(np.append(C, more), np.append(f.fit.R, f.predict(more, f.form)), n_samples=4000)

    assert not f.identifiable and 1200 < again < 10_000 and at(again).identifiable and not at(again / 1.2).identifiable
    assert forecast(*run_of(sd=0.004)).ask_again() == 16_000  # it is identifiable


UNIT = np.arange(1, 17) / 16


@pytest.mark.long
@pytest.mark.parametrize(
    "p", [0.1 + 0.6 * UNIT, 0.4 + 0.08 * np.log(UNIT), 0.1 + 0.6 * UNIT**0.7, 0.4 + 0 * UNIT, 0.7 - 0.3 * UNIT]
)
def test_no_ceiling_no_claim(p):
    C, rng = UNIT, np.random.default_rng(0)
    runs = [forecast(C, p), *(forecast(C, p + rng.normal(0, 0.01, 16)) for _ in range(10))]
    runs += [forecast(C, rng.binomial(1024, p) / 1024, n_samples=1024) for _ in range(10)]
    assert not any(f.identifiable for f in runs)


def test_fixed_parameters():
    """Also the degrees of freedom: N - 4 and one more for each that is fixed."""
    C, R = run_of(sd=0.005)
    f, at_R0, at_A = forecast(C, R), forecast(C, R, R0=0.28), forecast(C[:12], R[:12], A=0.58)
    assert (at_R0.fit.R0, at_A.fit.A) == pytest.approx((0.28, 0.58), abs=1e-6) and at_R0.fit.rmse > f.fit.rmse
    assert (f.fit.dof, at_R0.fit.dof, at_A.fit.dof, forecast(C, R, A=0.6, R0=0.3, n_samples=99).fit.dof) == (
        37,
        38,
        9,
        43,
    )
    assert at_A.identifiable and at_A.A_interval == (0.58, 0.58) and not forecast(C[:12], R[:12]).identifiable
    sharp = forecast(C, R, n_samples=np.where(C == 0, 1e9, 1000.0))  # a very exact measurement of R0 is R0
    assert sharp.fit.R0 == pytest.approx(R[0], abs=1e-5) and abs(f.fit.R0 - R[0]) > 1e-3


RUNS = st.integers(0, 10**6), st.sampled_from([None, 2000])  # the seed of `random_run`, samples behind each point


@pytest.mark.long
@settings(max_examples=10)
@given(*RUNS, st.floats(1e-4, 1e12))
def test_order_and_unit_of_compute_change_nothing(seed, n, unit):
    """To rounding for the order, and to the grid's rounding for the unit."""
    C, R, *_ = random_run(seed)
    order = np.random.default_rng(seed).permutation(C.size)
    f = forecast(C, R, n_samples=n)
    g = forecast(unit * C, R, n_samples=n)
    again = forecast(C[order], R[order], n_samples=n)
    assert (again.form, again.reason) == (f.form, f.reason)
    for name in ("R0", "A", "B", "C_mid", "dispersion", "A_interval", "B_interval", "C_mid_interval"):
        assert getattr(again.fit, name) == pytest.approx(getattr(f.fit, name), rel=1e-9, nan_ok=True)
    assert again.interval(2 * C[-1]) == pytest.approx(f.interval(2 * C[-1]), rel=1e-9)
    assert (g.identifiable, g.form, g.fit.C.size) == (f.identifiable, f.form, f.fit.C.size)
    assert (g.fit.A, g.fit.C_mid / unit, *g.A_interval) == pytest.approx(
        (f.fit.A, f.fit.C_mid, *f.A_interval), rel=1e-4, nan_ok=True
    )
    assert np.abs(g.interval(2 * unit * C[-1]) - f.interval(2 * C[-1])).max() < 1e-3


@pytest.mark.long
@settings(max_examples=10)
@given(*RUNS)
def test_no_curve_falls_and_an_interval_holds_the_best_ones(seed, n):
    """Of every form; that of an evaluation holds the curve's; and beyond the data both of its ends rise with C."""
    C, R, *_ = random_run(seed)
    f, at = forecast(C, R, n_samples=n), np.geomspace(0.01, 1000, 12) * C[-1]
    (low, high), (least, most) = f.interval(at), f.interval(at, noise=True)
    assert all((np.diff(v) >= 0).all() for v in np.transpose([0 * at, least, low, high, most, 0 * at + 1]))
    for form in f.allowed:
        best = f.predict(at, form)
        assert (np.diff(best) >= -1e-12).all() and (low <= best + 1e-9).all() and (best <= high + 1e-9).all()
    assert (np.diff([low[at > C[-1]], high[at > C[-1]]]) >= -1e-9).all()
    assert not f.allowed or f.A_interval[0] <= f.fit.A <= f.A_interval[1]


def test_a_first_point_that_is_low_makes_no_ceiling():
    """A constant run whose first point is low by chance: a step before the second point fits. With R0 given the same
    points do show a rise."""
    C, R = np.arange(1, 38.0), np.full(37, 0.4) + np.resize(NOISE, 37) / 4
    R[0] = 0.37
    f = forecast(C, R)
    assert not f.identifiable and f.reason.endswith("C_mid, from 1.1 on")
    assert forecast(C, R, R0=0.1).identifiable


LONG = np.linspace(0, 1200, 31)
EXACT, ERRORS = sigmoid(LONG, 0.1, 0.7, 2.0, 300.0), np.resize(NOISE, 31)
SHAPES = {"exact": EXACT, "noise of 1e-6": EXACT + ERRORS / 8000, "noise of 0.008": EXACT + ERRORS}
SHAPES |= {"flat": 0 * EXACT + 0.7, "falling": EXACT[::-1], "straight": np.linspace(0.1, 0.7, 31)}
SHAPES |= {"early": sigmoid(LONG, 0.1, 0.7, 2, 1200)}


@pytest.mark.long
@pytest.mark.parametrize("n_samples", [None, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_decides_nothing(shape, n_samples):
    """Pass rates that differ by a few units in the last place, as another BLAS would round them: same form and verdict,
    and an interval's end moves by 1 % of its width at most."""
    C, R, far = LONG, SHAPES[shape], np.array([1200, 2400, 12_000])
    f = forecast(C, R, n_samples=n_samples)
    for size in (1e-15, 1e-13):
        g = forecast(C, R * (1 + size * np.random.default_rng(0).standard_normal(31)), n_samples=n_samples)
        assert (g.identifiable, g.reason, g.form) == (f.identifiable, f.reason, f.form)
        for name in ("A_interval", "B_interval", "C_mid_interval"):
            low, high = getattr(f.fit, name)
            width = high - low if math.isfinite(high) else max(low, 1)
            assert getattr(g.fit, name) == pytest.approx((low, high), abs=0.01 * width + 1e-9)
        assert np.abs(g.interval(far) - f.interval(far)).max() <= 0.01 * np.ptp(f.interval(far), 0).max()
        for name in ("R0", "A", "B", "C_mid", "dispersion"):
            assert getattr(g.fit, name) == pytest.approx(getattr(f.fit, name), rel=1e-4, nan_ok=True)


FIT_THREE = """
import json, numpy as np
from fit_sigmoid import sigmoid
from forecast import forecast
C = np.linspace(0, 1.0, 16)
fits = [forecast(C, np.random.default_rng(i).binomial(1024, sigmoid(C, .04, .8, 2.6, C_mid)) / 1024, n_samples=1024)
        for i, C_mid in enumerate((0.3, 0.6, 1.2))]
print(json.dumps([[f.fit.R0, f.fit.A, f.fit.B, f.fit.C_mid, f.limit, *np.ravel([f.A_interval, f.fit.B_interval, f.fit.C_mid_interval,
                  f.interval(2.0)[:, 0]])] for f in fits]))"""


@pytest.mark.medium
def test_an_older_processor_finds_the_same_fit():
    """Without AVX2 and AVX-512 numpy computes by other code, and another OpenBLAS kernel rounds otherwise. Runs seen to
    3.3, 1.7 and .8 C_mid. (A processor that has neither shows nothing.)"""
    less = "AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    root, results = Path(module.__file__).parent, []
    for changed in ({}, {"NPY_DISABLE_CPU_FEATURES": less}, {"OPENBLAS_CORETYPE": "Nehalem"}):
        command, env = [sys.executable, "-c", FIT_THREE], os.environ | changed
        results.append(json.loads(subprocess.run(command, env=env, cwd=root, capture_output=True, check=True).stdout))
    np.testing.assert_allclose(results[1:], results[:1] * 2, rtol=1e-6)
