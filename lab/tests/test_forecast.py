"""lab/law/forecast.py against scipy and by hand, but for its report and command line (test_fit_report.py)."""

import math
import re

import forecast as module
import numpy as np
import pytest
from curves import Data, gained, scan
from forecast import EQ1, FORMS, forecast
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit
from test_curves import NOISE, RISE, X, box_of, curve_of, least, random_run, run_of

from fit_sigmoid import sigmoid

LEARNED = {
    "Weibull": stats.gumbel_l,
    "log-normal": stats.norm(scale=1.7),
    EQ1: stats.logistic,
    "Frechet": stats.gumbel_r,
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_distribution_that_the_table_names(form):
    """scipy's own, with its median at 0; of what is still missing late, the logarithm."""
    u = np.linspace(-40, 40, 401)
    late = np.array([1.0, 2, 3])
    law = LEARNED[form]
    tail = FORMS[form]
    assert tail(u) == pytest.approx(law.cdf(u + law.median()), abs=1e-12)
    assert (np.diff(tail(u)) >= 0).all()
    assert np.log(1 - tail(late)) == pytest.approx(law.logsf(late + law.median()), rel=1e-9)
    assert tail(np.array([0, -np.inf, np.inf])).tolist() == [0.5, 0, 1]
    assert np.abs(FORMS["log-normal"](u) - expit(u)).max() < 0.01
    s = gained(np.array([0.0, 5.0, 50.0]), np.log([2.0, 3.0]), np.log([5.0, 50.0]), tail)
    assert s[[1, 2], [0, 1]] == pytest.approx(0.5)
    assert s[0].tolist() == [0, 0]


@pytest.fixture(scope="module")
def runs():
    """24 random runs, three of each form and noise: data, the least Q of each form, the dispersion of the best."""
    rows = []
    for seed in range(24):
        data = random_run(seed)
        Q = {form: least(data, form) for form in FORMS}
        dispersion = max(min(Q.values()) / (data.C.size - 4), 1)
        rows.append((data, Q, dispersion))
    return rows


@pytest.mark.long
def test_scan_finds_the_least_Q(runs):
    """To a hundredth of the dispersion, for each form."""
    for data, Q, dispersion in runs:
        for form, tail in FORMS.items():
            above = scan(data, tail=tail).Q[0] - Q[form]
            assert abs(above) < 0.01 * dispersion, form


@pytest.mark.long
def test_ends_of_the_scanned_set_are_the_profiles(runs):
    """2 % of its width outside an end of A's range no curve with that A has Q <= limit, 2 % inside one has."""
    ends = 0
    for data, Q, dispersion in runs[::3]:
        limit = min(Q.values()) + 8 * dispersion
        for form in FORMS:
            if Q[form] >= limit - 0.1:
                continue
            low, high = np.clip(scan(data, limit, FORMS[form]).ends(1.0, limit), 0, 1.25)
            step = 0.02 * (high - low)
            for outside, inside in ((low - step, low + step), (high + step, high - step)):
                ends += 1
                assert not 0 < outside < 1.25 or least(data, form, outside) > limit
                assert least(data, form, inside) <= limit
    assert ends > 40


def by_hand(f):
    """Standardized residuals z (N,) of the best form and its Q; the weights are of Eq. 1's curve."""
    fit = f.fit
    sd = 1.0
    if fit.n is not None:
        q = (f.predict(fit.C) * fit.n + 1) / (fit.n + 2)
        sd = np.sqrt(q * (1 - q) / fit.n)
    z = (fit.R - f.predict(fit.C, f.form)) / sd
    return z, float(z @ z)


@pytest.mark.parametrize("n", [None, 900])
@pytest.mark.parametrize("sd", [0.0, 0.01, 0.03])
def test_dispersion_and_limit_by_hand(n, sd):
    """Without n: Q / (N - 4), at least 1e-8. With n: (Q + 4) / (N - 4 + 4), at least 1. The set's limit is the least Q
    plus 2 dispersion t^2, t Student's quantile. The likelihood of a form: exp of half of its Q above, over dispersion."""
    f = forecast(*run_of(n=30, seed=1, sd=sd), n_samples=n)
    fit = f.fit
    z, Q = by_hand(f)
    assert sd == 0 or abs(z[1:] @ z[:-1] / Q) < 1.645 / math.sqrt(31)  # no correlation to be seen
    dof = 31 if n else 27
    dispersion = max((Q + 4) / 31, 1.0) if n else max(Q / 27, 1e-8)
    assert (fit.dof, fit.t) == (dof, pytest.approx(stats.t.ppf(0.975, dof)))
    assert fit.dispersion == pytest.approx(dispersion, rel=1e-3)
    assert f.largest_Q - Q == pytest.approx(2 * fit.dispersion * fit.t**2, rel=1e-3)
    if n and sd:
        assert (fit.dispersion > 2) == (sd == 0.03)
    for form, curve in f.best.items():
        likelihood = math.exp((Q - curve.Q[0]) / 2 / fit.dispersion)
        assert f.likelihood[form] == pytest.approx(likelihood, rel=0.01, abs=1e-9)


@pytest.mark.long
def test_neighbors_that_agree_raise_the_dispersion():
    """By (1 + r) / (1 - r), r the lag-1 correlation of the residuals, if it exceeds 1.645 / sqrt(N); at most .95."""
    C, R = run_of(n=60)
    raised = []
    for size in np.linspace(0, 0.02, 7):
        f = forecast(C, R + size * np.sin(C / 900))
        z, Q = by_hand(f)
        r = z[1:] @ z[:-1] / Q
        factor = (1 + r) / (1 - r) if r > 1.645 / math.sqrt(61) else 1
        assert f.fit.dispersion * 57 / Q == pytest.approx(factor, rel=1e-9)
        raised.append(factor)
    assert raised[0] == 1
    assert min(factor for factor in raised if factor > 1) < 2
    assert 3 < raised[-1] < 39
    C = np.linspace(0, 16_000, 151)
    f = forecast(C, sigmoid(C, 0.3, 0.6, 1.8, 2500) + 0.02 * np.sin(C / 500))  # r is .97
    assert f.fit.dispersion == pytest.approx(by_hand(f)[1] / 147 * 1.95 / 0.05)


def line_by_hand(f, at):
    """The line in log C through the last half of the points, by numpy; it ends at three times their compute."""
    fit = f.fit
    half = fit.C.size // 2
    slope, start = np.polyfit(np.log(fit.C[half:]), fit.R[half:], 1)
    last = fit.C[-1]
    line = start + slope * np.log(np.clip(at, 1, 3 * last))
    return np.where((slope > 0) & (last < at), line, 0)


@pytest.mark.parametrize(("cut", "forms"), [(12, 4), (26, 3), (41, 2)])
def test_the_interval_is_a_union(cut, forms):
    """Of every form that is not excluded; and beyond the data, of the pass rate reached, of that plus three times what
    Eq. 1 expects, and of the line. A's is that at compute without end."""
    C, R = run_of(sd=0.004)
    C, R = C[:cut], R[:cut]
    f = forecast(C, R)
    at = np.array([2000.0, C[-1], 1.5 * C[-1], 1e5, 1e7])
    beyond = at > C[-1]
    likely = {form for form, p in f.likelihood.items() if p > math.exp(-(f.fit.t**2))}
    assert set(f.allowed) == likely
    assert len(likely) == forms
    lows, highs = [], []
    for form, curves in f.allowed.items():
        s = gained(at, *curves[:2], FORMS[form])
        ends = [curves.ends(share, f.largest_Q) for share in s]
        lows.append([low for low, _ in ends])
        highs.append([high for _, high in ends])
    reached = f.predict(C[-1])
    remains = reached + 3 * (f.predict(at) - reached)
    lows.append(np.where(beyond, reached, 1))
    highs += [np.where(beyond, remains, 0), line_by_hand(f, at)]
    low, high = f.interval(at)
    assert low == pytest.approx(np.clip(np.min(lows, 0), 0, 1))
    assert high == pytest.approx(np.clip(np.max(highs, 0), 0, 1))
    assert f.A_interval == pytest.approx(f.interval(1e30)[:, 0], abs=1e-6)
    assert f.identifiable == (cut > 12)


@pytest.mark.parametrize("n", [None, 5000, np.repeat([5000, 500, 50_000], [16, 8, 7])])
def test_interval_of_an_evaluation_by_hand(n):
    """Half-widths add in quadrature: hypot(curve, t sd), sd^2 = dispersion p (1 - p) / n at the median n, or dispersion
    without n; p is the best form's. And no less than t sd above the line."""
    f = forecast(*run_of(n=30), n_samples=n)
    p = float(f.predict(2e4, f.form))
    q = (p * 5000 + 1) / 5002
    sd = math.sqrt(f.fit.dispersion * (1.0 if n is None else q * (1 - q) / 5000))
    noise = f.fit.t * sd
    low, high = f.interval(2e4)[:, 0]
    least_, most = f.interval(2e4, noise=True)[:, 0]
    above_line = float(line_by_hand(f, 2e4)) + noise
    assert p - least_ == pytest.approx(math.hypot(p - low, noise))
    assert most == pytest.approx(max(p + math.hypot(high - p, noise), above_line))


def test_an_evaluation_lies_between_0_and_1():
    C, R = run_of(n=30)
    band = forecast(C, np.minimum(R / 0.6, 1), n_samples=100).interval([0.0, 1e5], noise=True)
    assert band.max() == 1.0
    assert band.min() > 0


def test_a_rise_too_fast_for_any_ceiling_up_to_1():
    """A may go up to 1.25 in the fit, and is cut at 1: so the forecast does not bend down to meet a bound."""
    C = np.linspace(0, 450, 10)
    R = 0.065 + 0.935 * (C / 640) ** 1.6
    f = forecast(C, R)
    strict = forecast(C, R, A=1.0)
    assert f.fit.A == 1.0
    assert f.best[EQ1].A[0] == pytest.approx(1.25)
    assert not f.identifiable
    assert f.predict(1e9) == 1.0
    assert f.predict(640.0) > strict.predict(640.0) + 0.005
    assert f.fit.rmse < strict.fit.rmse


def test_open_ends():
    """A step between two points: B has no upper end. Almost a straight line in log C: C_mid has no upper end, or neither
    has one. No fit: none."""
    step = np.where(X < 10.5, 0.2, 0.6) + NOISE
    f = forecast(X[:20], step[:20]).fit
    assert f.B_interval[0] > 5
    assert f.B_interval[1] == math.inf
    assert 9 < f.C_mid_interval[0] < f.C_mid_interval[1] < 12

    f = forecast(X, 0.2 + 0.03 * np.log(X) + NOISE / 2).fit
    assert f.C_mid_interval[0] > 0.5
    assert f.C_mid_interval[1] == math.inf
    assert 0.15 < f.B_interval[0] < f.B_interval[1] < 2

    f = forecast(X, 0.2 + 0.01 * np.log(X) + NOISE / 2).fit
    assert f.C_mid_interval == (0, math.inf)
    assert f.B_interval[0] == 0
    assert 2 < f.B_interval[1] < 20

    assert forecast(X, 0.2 + 0.01 * np.log(X)).fit.B == pytest.approx(0.1)
    assert forecast(X, 0.4 * (X > 9.5)).fit.B == pytest.approx(20)
    f = forecast(X, np.full(24, 0.4))
    assert f.interval([5.0, 6.0]).tolist() == [[0, 0], [1, 1]]
    assert np.isnan(f.predict([5.0, 6.0])).all()


SMALL = 0.2 + 0.08 * sigmoid(X, 0, 1, 3, 5) + NOISE / 2  # a gain of .08
WIDE = r"ceilings from 0\.{} to {} fit: the data reach 0\.\d\d by C = {}, {}\.\d C_mid"
FLAT = (
    r"the pass rate does not rise beyond its noise by C = 24: no curve to fit\. Its level is {}; {}\. "
    r"Of 369 flat beginnings .* 116 rose .* 58 fell and 195 stayed"
)
RANGE = r"if it goes on as it is, an evaluation lies in \[{:.3f}, {:.3f}\] \(about 94 %\)"
ALIKE = "its points are all alike, so nothing says how far an evaluation may lie from it"
FEW = "too few points: {}, with {} different values of compute above 0; evaluate more often"
FALL = "the last 4 points lie below the curve: the run falls, and nothing says where it ends"
AROUND = 0.4 + NOISE[12:].mean() + 3.5 * NOISE.std(ddof=1) * np.array([-1, 1])
ONE = np.where(X == 3, 1 / 1024, 0.0)
COLLAPSE = "the run collapsed, from {} in its best stretch to {} now: nothing says where it ends"
VERDICTS = {  # what fails: C, R, n_samples, the whole reason
    "nothing": (X, RISE, None, ""),
    "nothing, n known": (X, RISE, 2000, ""),
    "nothing, little gain": (X, SMALL, None, ""),
    "no point": ([], [], None, FEW.format(0, 0)),
    "four points": (X[[1, 3, 6, 20]], RISE[[1, 3, 6, 20]], None, FEW.format(4, 4)),
    "four points, n known": (X[[1, 3, 6, 20]], RISE[[1, 3, 6, 20]], 2000, WIDE.format(r"5\d", r"0\.\d\d", 21, 4)),
    "two places": ([0, 1, 1, 1, 2, 2, 2], RISE[:7], None, FEW.format(7, 2)),
    "only NaN": (X, np.full(24, np.nan), None, FEW.format(0, 0)),
    "noise": (X, 0.4 + NOISE, None, FLAT.format(f"{AROUND.mean():.3f}", RANGE.format(*AROUND))),
    "one success in 1,024": (X, ONE, None, FLAT.format(r"0\.000", RANGE.format(0, 3.5 * ONE.std(ddof=1)))),
    "constant": (X, np.full(24, 0.4) + 1e-9 * NOISE, None, FLAT.format(r"0\.400", ALIKE)),
    "all solved": (X, np.ones(24), 2000, FLAT.format(r"1\.000", ALIKE)),
    "falling": (X, 0.6 - 0.02 * X, None, COLLAPSE.format("0.55", "0.15")),
    "falling to half": (X, 0.6 - 0.0133 * X, None, FALL),
    "collapsed": (X, np.where(X < 9, 0.49, 0.0), None, COLLAPSE.format("0.49", "0.00")),
    "collapsed after a rise": (X, np.where(X < 17, 0.6 - 0.4 / X, 0.1), None, COLLAPSE.format("0.57", "0.10")),
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
        assert f.A_interval == (0, 1)
        assert f.ask_again() == math.inf
        assert bool(f.best) == (f.fit.A > 0.5) == (what == "falls at the end")


def crossing(statistics, verdicts, at):
    """The verdict is yes exactly where the statistic is below `at`, and the table comes near it on both sides."""
    statistics = np.array(statistics)
    below = statistics < at
    assert below.tolist() == [bool(verdict) for verdict in verdicts]
    assert statistics[below].max() > at / 1.3
    assert statistics[~below].min() < at * 1.3


@pytest.mark.long
def test_threshold_of_a_flat_run():
    """By hand on a table of runs that cross it: the F test of the best curve against a flat line at .001."""
    statistics, verdicts = [], []
    jagged = 2 * np.abs(NOISE) * np.resize([1, -1], 24)
    for size in np.linspace(0.07, 0.1, 9):
        R = sigmoid(X, 0.2, 0.2 + size, 2, 8) + jagged
        data = Data(X, R, np.ones(24), box_of(X))
        Q = min(least(data, form) for form in FORMS)
        total = np.sum((R - R.mean()) ** 2)
        p = stats.f.sf((total - Q) / 2 / (Q / 20), 2, 20)
        statistics.append(-math.log(p))
        verdicts.append("does not rise" in forecast(X, R).reason)
    crossing(statistics, verdicts, -math.log(0.001))


def test_four_evaluations_of_500_problems_that_rise_are_not_flat():
    """Where the samples say the noise it is known, however few points there are. Draws of a constant rate are flat."""
    C = [0, 5, 10, 15]
    assert "does not rise" not in forecast(C, [0.406, 0.444, 0.608, 0.678], n_samples=500).reason
    rng = np.random.default_rng(1)
    for n in (30, 500):
        for _ in range(10):
            assert "does not rise" in forecast(C, rng.binomial(n, 0.4, 4) / n, n_samples=n).reason


@pytest.mark.long
def test_threshold_of_a_fall():
    """The mean of the last fifth, in standard errors of the noise that differences show, at -4."""
    statistics, verdicts = [], []
    for slope in np.linspace(0.004, 0.012, 10):
        f = forecast(X, RISE - slope * np.maximum(X - 16, 0))
        z, _ = by_hand(f)
        noise = math.sqrt(np.mean(np.diff(z) ** 2) / 2)
        statistics.append(-z[-4:].mean() * 2 / noise)
        verdicts.append(f.reason != FALL)
    crossing(statistics, verdicts, 4)


def test_thresholds_of_a_collapse():
    """At most half of the best stretch is left, .3 of .6, and it lies four standard errors below: four points of .02
    below four of .05 do not, where differences are as large."""
    for late, collapsed in ((0.29, True), (0.31, False)):
        R = np.where(X < 17, RISE, late)
        assert ("collapsed" in forecast(X, R).reason) == collapsed
    rare = np.resize([0.0, 0.1], 24)
    rare[-4:] = [0.0, 0.08, 0.0, 0.0]
    assert "collapsed" not in forecast(X, rare).reason


@pytest.mark.long
def test_threshold_of_a_known_ceiling():
    """The width of A's interval, at .1."""
    calm = RISE - 0.75 * NOISE
    fits = [forecast(X[:k], calm[:k], n_samples=2000) for k in range(15, 22)]
    crossing([np.ptp(f.A_interval) for f in fits], [f.identifiable for f in fits], 0.1)


def test_one_number_and_the_two_beside_it():
    """Halfway between Eq. 1 and the mean of the last third, 8 of 24 points; where the curve has levelled off, it says no
    more than that the run stays as it is."""
    late = forecast(X, RISE)
    stays = (RISE[-2] + RISE[-1]) / 2
    number = (late.predict(48.0) + RISE[16:].mean()) / 2
    assert late.stays == pytest.approx(stays)
    assert late.number(48.0) == pytest.approx(number)
    text = f"{number:.3f}; by Eq. 1 {late.predict(48.0):.3f}, if nothing changes {stays:.3f}"
    assert late.numbers(48.0) == f"{text} (the guess says no more than that nothing changes)"
    assert "no more" not in forecast(X[:8], RISE[:8]).numbers(16.0)


@pytest.mark.long
@pytest.mark.parametrize("form", ["Weibull", "Frechet"])
def test_ask_again(form):
    """If the run goes on along its best form, without further noise and as often evaluated, it is identifiable at the
    compute that `ask_again` names, and not 20 % before."""
    C = np.linspace(0, 1200, 13)
    R = curve_of(form, C, 0.1, 0.7, math.log(2), math.log(700))
    f = forecast(C, R, n_samples=4000)
    again = f.ask_again()

    def at(end):
        more = np.arange(1300, end + 50, 100)
        return forecast(np.append(C, more), np.append(R, f.predict(more, f.form)), n_samples=4000)

    assert not f.identifiable
    assert 1200 < again < 10_000
    assert at(again).identifiable
    assert not at(again / 1.2).identifiable
    assert forecast(*run_of(sd=0.004)).ask_again() == 16_000  # it is identifiable
    doubling = forecast([0, *(1000 * 2.0 ** np.arange(7))], [0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.74, 0.76])
    assert doubling.reason and doubling.ask_again() >= 1.1 * 64_000  # never what the data have reached


@pytest.mark.long
def test_many_points_are_averaged_before_it_asks_again():
    """294 points with much noise, or the 49 means of six: about the same compute."""
    rng = np.random.default_rng(0)
    C = np.linspace(0, 900, 295)
    R = sigmoid(C, 0.1, 0.7, 2, 600) + rng.normal(0, 0.02, 295)
    means = np.append(R[0], R[1:].reshape(49, 6).mean(1))
    f = forecast(C, np.clip(R, 0, 1))
    by_hand = forecast(np.append(0, C[1:].reshape(49, 6).mean(1)), means)
    again = f.ask_again()
    assert module.averaged(f).fit.C.size == 50 and module.averaged(by_hand) is by_hand
    assert again == pytest.approx(by_hand.ask_again(), rel=0.25)
    assert 900 < again < 9000


@pytest.mark.parametrize("n", [None, 1000])
def test_a_fixed_value_that_the_data_exclude_has_a_reason(n):
    """Data that rise from .1 to .6. Near values and the true ones are none that the data exclude."""
    C = np.linspace(0, 6, 25)
    R = sigmoid(C, 0.1, 0.6, 2, 1.0) + 0.002 * np.resize([1, -1], 25)
    for fixed in ({"A": 0.3}, {"R0": 0.3}):
        assert "contradicts the data" in forecast(C, R, n_samples=n, **fixed).reason
    for fixed in ({"A": 0.6}, {"A": 0.603}, {"R0": 0.1}, {"R0": 0.1, "A": 0.6}):
        assert forecast(C, R, n_samples=n, **fixed).identifiable


def test_fixed_parameters():
    """Also the degrees of freedom: N - 4 and one more for each that is fixed."""
    C, R = run_of(sd=0.005)
    f = forecast(C, R)
    at_R0 = forecast(C, R, R0=0.28)
    early = forecast(C[:12], R[:12], A=0.58)
    assert at_R0.fit.R0 == pytest.approx(0.28, abs=1e-6)
    assert early.fit.A == pytest.approx(0.58, abs=1e-6)
    assert at_R0.fit.rmse > f.fit.rmse
    assert (f.fit.dof, at_R0.fit.dof, early.fit.dof) == (37, 38, 9)
    assert forecast(C, R, A=0.6, R0=0.3, n_samples=99).fit.dof == 43
    assert early.identifiable
    assert early.A_interval == (0.58, 0.58)
    assert not forecast(C[:12], R[:12]).identifiable
    sharp = forecast(C, R, n_samples=np.where(C == 0, 1e9, 1000.0))  # a very exact measurement of R0 is R0
    assert sharp.fit.R0 == pytest.approx(R[0], abs=1e-5)
    assert abs(f.fit.R0 - R[0]) > 1e-3


RUNS = st.integers(0, 10**6), st.sampled_from([None, 2000])  # the seed of `random_run`, samples behind each point


@pytest.mark.long
@settings(max_examples=10)
@given(*RUNS, st.floats(1e-4, 1e12))
def test_order_and_unit_of_compute_change_nothing(seed, n, unit):
    """Order: to the digit. Unit: to the grid's rounding."""
    C, R, *_ = random_run(seed)
    order = np.random.default_rng(seed).permutation(C.size)
    far = 2 * C[-1]
    f = forecast(C, R, n_samples=n)
    again = forecast(C[order], R[order], n_samples=n)
    assert (again.form, again.reason) == (f.form, f.reason)
    for name in ("R0", "A", "B", "C_mid", "dispersion", "A_interval", "B_interval", "C_mid_interval"):
        np.testing.assert_array_equal(getattr(again.fit, name), getattr(f.fit, name))
    np.testing.assert_array_equal(again.interval(far), f.interval(far))

    g = forecast(unit * C, R, n_samples=n)
    assert (g.identifiable, g.form) == (f.identifiable, f.form)
    expected = (f.fit.A, f.fit.C_mid, *f.A_interval)
    assert (g.fit.A, g.fit.C_mid / unit, *g.A_interval) == pytest.approx(expected, rel=1e-4, nan_ok=True)
    assert np.abs(g.interval(unit * far) - f.interval(far)).max() < 1e-3


LONG = np.linspace(0, 1200, 31)
EXACT = sigmoid(LONG, 0.1, 0.7, 2.0, 300.0)
ERRORS = np.resize(NOISE, 31)
SHAPES = {
    "exact": EXACT,
    "noise of 1e-6": EXACT + ERRORS / 8000,
    "noise of 0.008": EXACT + ERRORS,
    "flat": np.full(31, 0.7),
    "falling": EXACT[::-1],
    "straight": np.linspace(0.1, 0.7, 31),
    "early": sigmoid(LONG, 0.1, 0.7, 2, 1200),
}


@pytest.mark.long
@pytest.mark.parametrize("n_samples", [None, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_decides_nothing(shape, n_samples):
    """Pass rates that differ by a few units in the last place, as another BLAS would round them: same form and verdict,
    and an interval's end moves by 1 % of its width at most."""
    C, R = LONG, SHAPES[shape]
    far = np.array([1200, 2400, 12_000])
    f = forecast(C, R, n_samples=n_samples)
    for size in (1e-15, 1e-13):
        rounding = 1 + size * np.random.default_rng(0).standard_normal(31)
        g = forecast(C, R * rounding, n_samples=n_samples)
        assert (g.identifiable, g.reason, g.form) == (f.identifiable, f.reason, f.form)
        for name in ("A_interval", "B_interval", "C_mid_interval"):
            low, high = getattr(f.fit, name)
            width = high - low if math.isfinite(high) else max(low, 1)
            assert getattr(g.fit, name) == pytest.approx((low, high), abs=0.01 * width + 1e-9)
        assert np.abs(g.interval(far) - f.interval(far)).max() <= 0.01 * np.ptp(f.interval(far), 0).max()
        for name in ("R0", "A", "B", "C_mid", "dispersion"):
            assert getattr(g.fit, name) == pytest.approx(getattr(f.fit, name), rel=1e-4, nan_ok=True)
