"""fit_power_law.py: published constants back from exact data, what changes nothing, intervals that cover, what follows."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_laws import recover_sizes, sizes_draw

from fit_power_law import fit, main, number, report

SIZES = (0.5, 1.5, 3, 7, 14, 32, 72)  # billions of parameters: the Qwen2.5 models of Tan et al.
OFFSETS = dict(zip(SIZES, (-0.20, -0.30, -0.40, -0.45, -0.50, -0.55, -0.60), strict=True))
FOUR = np.array([1.0, 2.0, 4.0, 8.0])
NONE_LATER = np.empty((0, 3))
few = settings(max_examples=8)


def lines(slopes, E=None, X=FOUR, noise=0.0, seed=0):
    """(N, X, L) on log L = E - K log X for {N: K}, E 0 if it is not in {N: E}, with noise of log L."""
    N, x = np.repeat([float(n) for n in slopes], len(X)), np.tile(X, len(slopes))
    y = np.array([(E or {}).get(n, 0.0) - slopes[n] * math.log(c) for n, c in zip(N, x, strict=True)])
    return N, x, np.exp(y + noise * np.random.default_rng(seed).normal(size=y.size))


def exact():
    """The published law, Qwen2.5 base on compute: K_max .135, N0 13.1. X from 1 to 100."""
    return lines({N: 0.135 / (1 + 13.1 / N) for N in SIZES}, OFFSETS, np.geomspace(1, 100, 20))


def test_three_lines_by_hand():
    """L = X^-K with K = .1, .15, .18 for N = 1, 3, 9: K_max = .2 and N0 = 1, as .2 / (1 + 1/N) gives these three.
    All offsets are 0, so at any X above 1 the largest is ahead, and from the start: nothing crosses. Exact data leave
    no doubt: every interval is a point."""
    result = fit(*lines({1: 0.1, 3: 0.15, 9: 0.18}))
    assert (result.K_max, result.N0) == pytest.approx((0.2, 1.0), rel=1e-6)
    assert [result.sizes[n].E for n in (1.0, 3.0, 9.0)] == pytest.approx([0, 0, 0], abs=1e-9)
    assert result.predict(3.0, 16.0) == pytest.approx(16**-0.15)
    assert result.best_size(16.0) == 9.0 and result.crossing(1.0, 9.0) is None
    assert result.K_interval(9.0) == pytest.approx((0.18, 0.18)) and result.interval(9.0, 1.0) == pytest.approx((1, 1))
    assert result.interval(9.0, 16.0) == pytest.approx([16**-0.18] * 2)


def test_a_larger_model_overtakes_by_hand():
    """Slopes .1 and .15 for N = 1 and 2 (K_max .3, N0 2). -.1 log X + log .5 and -.15 log X + log .8 are equal where
    .05 log X = log 1.6: at X = 1.6^20 = 12,089. Seen from X = 30,000 on, the larger one was always ahead."""
    X, E = np.array([10.0, 100.0, 1e3, 1e4]), {1: math.log(0.5), 2: math.log(0.8)}
    result = fit(*lines({1: 0.1, 2: 0.15}, E, X))
    assert (result.K_max, result.N0) == pytest.approx((0.3, 2.0), rel=1e-6)
    assert result.crossing(1.0, 2.0) == result.crossing(2.0, 1.0) == pytest.approx(1.6**20, rel=1e-5)
    assert result.best_size(12_000) == 1.0 and result.best_size(12_200) == 2.0
    assert any("nothing here tests the law" in note for note in result.notes)
    assert fit(*lines({1: 0.1, 2: 0.15}, E, X * 3000)).crossing(1, 2) is None


def test_published_constants_come_back():
    result = fit(*exact())
    assert (result.K_max, result.N0) == pytest.approx((0.135, 13.1), rel=1e-6)
    assert [round(result.K(n), 3) for n in SIZES] == [0.005, 0.014, 0.025, 0.047, 0.070, 0.096, 0.114]  # as published
    assert [result.sizes[n].E for n in SIZES] == pytest.approx(list(OFFSETS.values()), abs=1e-9)
    assert result.notes == []


def test_the_largest_model_is_predicted_from_the_others():
    """Fitted to .5 to 32; the offset of 72 comes from the first four of its 20 points, and the rest is predicted. With
    it 72 is like any other size: -.135/(1 + 13.1/32) log X - .55 meets -.135/(1 + 13.1/72) log X - .60 below X = 1.
    One point gives an offset without an error; new points of a size that was fitted leave its slope."""
    N, X, L = exact()
    small, large = N < 72, N == 72
    result = fit(N[small], X[small], L[small])
    for ask in (lambda: result.predict(72, 10), lambda: result.crossing(32, 72), lambda: result.interval(72, 4)):
        with pytest.raises(ValueError, match="72 has no offset E, which this law cannot predict"):
            ask()
    more = result.with_size(72, X[large][:4], L[large][:4])
    assert 72 not in result.sizes and more.predict(72, 100.0) == pytest.approx(L[large][-1], rel=1e-5)
    assert more.best_size(10.0) == 72 and more.crossing(32, 72) is None
    assert more.interval(72, 100.0) == pytest.approx([L[large][-1]] * 2, rel=1e-5)
    assert more.notes == [] and math.isnan(more.sizes[72].own_K)
    low, high = result.with_size(72, [4.0], [0.5]).interval(72, 4)
    assert low < 1e-200 and high > 1e200
    again = result.with_size(32, [16, 32], np.exp(-result.K(32) * np.log([16, 32])))
    assert again.sizes[32].E == pytest.approx(0) and again.sizes[32].own_K == result.sizes[32].own_K
    for X_, L_ in (([], []), ([1.0], [0.0]), ([0.0], [0.5]), ([1.0, 2.0], [0.5])):
        with pytest.raises(ValueError):
            result.with_size(72, X_, L_)


NOISY = st.tuples(st.integers(0, 10**6), st.floats(0.1, 0.5), st.floats(0.2, 20), st.floats(1e-3, 0.03))


def drawn(case):
    """Points of sizes 1, 3 and 9 on a law, with noise."""
    seed, K_max, N0, noise = case
    return lines({N: K_max / (1 + N0 / N) for N in (1, 3, 9)}, dict.fromkeys((1, 3, 9), -1.0), noise=noise, seed=seed)


@few
@given(NOISY, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_order_and_units_change_nothing(case, unit_N, unit_X):
    """N0 is in the unit of N, and an offset is taken at X = 1 of its unit: E + K log unit."""
    N, X, L = drawn(case)
    a, order = fit(N, X, L), np.random.default_rng(case[0]).permutation(N.size)
    b = fit(N[order] * unit_N, X[order] * unit_X, L[order])
    assert b.K_max == pytest.approx(a.K_max, rel=1e-4) and b.rmse == pytest.approx(a.rmse, rel=1e-6)
    assert np.log(b.N0_interval) - math.log(unit_N) == pytest.approx(np.log(a.N0_interval), abs=0.01)
    for n in (1.0, 3.0, 9.0):
        assert b.sizes[n * unit_N].E == pytest.approx(a.sizes[n].E + a.K(n) * math.log(unit_X), abs=1e-4)
        assert b.interval(n * unit_N, 5 * unit_X) == pytest.approx(a.interval(n, 5), rel=1e-3)


@few
@given(NOISY, st.integers(2, 5), st.sampled_from([1.0, 3.0, 9.0]))
def test_every_size_counts_the_same_however_many_points_it_has(case, copies, size):
    N, X, L = drawn(case)
    more = np.repeat(np.arange(N.size), np.where(N == size, copies, 1))
    a, b = fit(N, X, L), fit(N[more], X[more], L[more])
    assert [b.K(n) for n in (1, 3, 9)] == pytest.approx([a.K(n) for n in (1, 3, 9)], rel=1e-4)
    assert b.sizes[size].E == pytest.approx(a.sizes[size].E, abs=1e-4)
    low, high = (law.K_interval(size) for law in (a, b))
    assert low[0] <= a.K(size) <= low[1] and high[0] <= b.K(size) <= high[1]


@few
@given(NOISY, st.floats(0.5, 1e4))
def test_a_larger_model_is_steeper_and_best_from_the_crossing_on(case, X):
    """Two lines are equal where they cross, the best size is that of the lowest line, K grows with N up to K_max, and an
    interval holds its line."""
    law = fit(*drawn(case))
    assert 0 < law.K(1) <= law.K(3) <= law.K(9) <= law.K_max
    L = {N: law.predict(N, X) for N in (1, 3, 9)}
    assert L[law.best_size(X)] == min(L.values())
    assert all(law.interval(N, X)[0] <= L[N] <= law.interval(N, X)[1] for N in L)
    for small, large in ((1, 3), (3, 9), (1, 9)):
        at = law.crossing(small, large)
        if at is not None and at < 1e100:
            assert law.log_L(small, at)[0] == pytest.approx(law.log_L(large, at)[0], abs=1e-6) and at > 1
            assert law.predict(large, 2 * at) <= law.predict(small, 2 * at)
        elif at is None:
            assert law.log_L(large, 10)[0] <= law.log_L(small, 10)[0] + 1e-9


@pytest.mark.medium
def test_intervals_cover_the_truth():
    """200 draws over the published range, evaluations of 500 problems: 93 to 97 % of 200, where 95 % is meant; the
    seven slopes, which hang together, hold nearly as often. No fit fails."""
    found = recover_sizes(200, np.random.default_rng(0))
    for name, least in ("K_max", 0.93), ("N0", 0.93), ("K(N)", 0.92):
        assert least <= found[f"{name} covered"] <= 0.97
    assert found["K_max error"] < 0.1 and found["K(72B) error"] < 0.06


@pytest.mark.medium
def test_predictions_within_a_run_cover_the_truth():
    """The first 40 % of log X of each of seven runs is fitted, and the line at the end of the largest predicted: 95 % of
    200 is 190, its standard error 3.1."""
    rng, covered = np.random.default_rng(2), 0
    for _ in range(200):
        N, X, _, K_max, N0 = sizes_draw(rng)
        L = np.maximum(rng.binomial(500, 0.6 * X ** -(K_max / (1 + N0 / N))) / 500, 1 / 500)
        early = X <= 100**0.4
        low, high = fit(N[early], X[early], L[early]).interval(72, 100.0)
        covered += low <= 0.6 * 100 ** -(K_max / (1 + N0 / 72)) <= high
    assert 180 <= covered <= 199


def test_what_cannot_be_known_is_said():
    for slopes, words in [
        ({1: 0.1, 2: 0.1, 4: 0.1}, "K has saturated"),
        ({1: 0.001, 2: 0.002, 4: 0.004}, "only K_max / N0 is known"),
        ({1: -0.05, 2: 0.1, 4: 0.12}, "the pass rate of size 1 does not rise, which is no learning: leave that size"),
    ]:
        law = fit(*lines(slopes, dict.fromkeys(slopes, -0.7), np.geomspace(1, 100, 20), 1e-4, seed=1))
        assert any(words in note for note in law.notes)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02])
def test_own_slopes_that_contradict_the_law_are_named(noise):
    """K must not fall with N, nor rise faster than N. Sizes that do were once said to agree, or to be fitted exactly."""
    wrong = {"1e+09, 4e+09": {1e9: 0.3, 4e9: 0.1}, "1, 2": {1: 0.02, 2: 0.2}, "2, 4": {1: 0.1, 2: 0.15, 4: 0.05}}
    right = {1: 0.1, 3: 0.15, 9: 0.18}, {1: 0.1, 2: 0.1, 4: 0.1}, {1: 0.1, 2: 0.15}
    for off, slopes in [*wrong.items(), *(("", slopes) for slopes in right)]:
        notes = "; ".join(fit(*lines(slopes, dict.fromkeys(slopes, -0.5), np.geomspace(1, 100, 12), noise)).notes)
        assert (f"the own slope of size {off} is not K(N)" in notes) if off else "does not hold" not in notes
        assert not off or not any(words in notes for words in ("agree", "nothing here tests", "in proportion"))


def test_an_offset_far_from_the_points_is_no_overflow():
    """log L is log .9 at X = 1e19, so E = log .9 + K log 1e19 for slopes K of 10 and 40, and e^E is no number."""
    E = {N: math.log(0.9) + K * math.log(1e19) for N, K in ((1, 10), (10, 40))}
    law = fit(*lines({1: 10.0, 10: 40.0}, E, np.geomspace(1e19, 1.05e19, 5)))
    assert f"E {E[10]:.3f} [{E[10]:.3f}, {E[10]:.3f}]" in report(law, NONE_LATER, [])
    assert law.best_size(1.0) == 1.0 and math.isfinite(law.predict(10.0, 1.0))


def test_what_is_out_of_reach_is_no_number():
    """Slopes .1 and .2, and at X = 1 an L that is 2^(p / 10) times as high: they meet at X = 2^p. 2^12 = 4,096 is within
    a thousand times 8, and 2^13 is not; nor is 2^10,000, of slopes .1 and .1001."""
    far = "not within a thousand times the X that was run"
    for K, p, words in ((0.2, 1.2, "at X = 4.1e+03 (an extrap"), (0.2, 1.3, far), (0.1001, 1, far)):
        law = fit(*lines({1: 0.1, 3: K}, {1: -1.2, 3: -1.2 + p * math.log(2)}))
        assert f"3 is ahead of 1: {words}" in report(law, NONE_LATER, [])
    law = fit(*lines(dict.fromkeys((1e9, 2e9, 4e9), 0.1), dict.fromkeys((1e9, 2e9, 4e9), -0.7), noise=0.02, seed=1))
    assert "N0     not known\n" in report(law, NONE_LATER, [])  # slopes that agree leave it anywhere near 0


def test_an_extrapolation_is_one_beyond_the_points_of_a_size():
    """1 is seen from 1 to 8 and 2 from 10 to 80; they meet at 20 (slopes .1 and .15, .05 log 20 apart), beyond 1's."""
    one, two = lines({1: 0.1}, {1: -0.7}), lines({2: 0.15}, {2: -0.7 + 0.05 * math.log(20)}, 10 * FOUR)
    law = fit(*np.concatenate([one, two], axis=1))
    assert law.X_range == (1, 80) and (law.sizes[1].X_range, law.sizes[2].X_range) == ((1, 8), (10, 80))
    text = report(law, NONE_LATER, [1, 8, 9, 80])
    assert "2 is ahead of 1: at X = 20 (an extrapolation of 1)" in text
    assert "at X = 1 (an extrapolation of 2) N 1" in text and "at X = 8 (an extrapolation of 2) N 1" in text
    assert "at X = 9 (an extrapolation of 1, 2) N 1" in text and "at X = 80 (an extrapolation of 1) N 2" in text
    more = law.with_size(2, [5, 100], [0.4, 0.3]).with_size(4, [0.5, 7], [0.4, 0.3])
    assert (more.sizes[2].X_range, more.sizes[4].X_range, more.X_range) == ((5, 100), (0.5, 7), (0.5, 100))
    assert law.with_size(2, [20, 60], [0.4, 0.3]).sizes[2].X_range == (10, 80)
    assert "extrapolation" not in report(fit(*lines({1: 0.1, 2: 0.15}, {1: -0.7, 2: -0.7})), NONE_LATER, [1, 8])


BAD_POINTS = [
    ([], [], [], "no point to fit"),
    ([1] * 3, [1, 2, 4], [0.5, 0.4], "flat and of equal length"),
    ([1] * 3, [1, 2, 4], [0.5, 0.4, 0.0], "leave out points with a pass rate of 1"),
    ([1] * 3, [0, 2, 4], [0.5, 0.4, 0.3], "above 0"),
    ([1] * 3, [1, 2, 2], [0.5, 0.4, 0.3], "size 1 has 2 different X"),
    ([1, 1, 1, 2, 2, 2], [1, 2, 4] * 2, [0.3, 0.4, 0.5] * 2, "the pass rate rises at no size"),
    ([7] * 3, [1, 2, 4], [0.5, 0.4, 0.3], "K_max and N0 need at least two sizes, not 7 alone"),
]


@pytest.mark.parametrize(("N", "X", "L", "words"), BAD_POINTS)
def test_bad_points(N, X, L, words):
    with pytest.raises(ValueError, match=words):
        fit(N, X, L)


def test_sizes_as_people_write_them():
    assert [number(text) for text in ("0.6B", "135M", "2e5", " 72b")] == [6e8, 1.35e8, 2e5, 7.2e10]
    assert number("0.07B") == number("70M")  # .07 * 1e9 is 70000000.00000001, which would be another size


@pytest.mark.long
def test_command_line(tmp_path, capsys):
    """Two runs and a CSV of two sizes; points without a logarithm are counted, later ones compared. The points of 9B at
    X = 8 are e^.3 above the law: the root mean square of 0, 0 and .3 is .1732, their mean .1."""
    for size, slope in (("1B", 0.1), ("3B", 0.15)):
        points = [*((x, 1 - x**-slope / 2) for x in FOUR), (0.0, 0.1), (9.0, 1.0)]
        rows = [json.dumps({"flops": x, "pass_rate": R}) + "\n" for x, R in points]
        (tmp_path / f"{size}.jsonl").write_text("".join(rows))
    more = [f"9B,{x},{1 - x**-0.18 / 2 * (math.exp(0.3) if x == 8 else 1)}" for x in FOUR]
    (tmp_path / "more.csv").write_text("\n".join(["N,flops,pass_rate", *more]))
    files = [f"1B={tmp_path}/1B.jsonl", f"3B={tmp_path}/3B.jsonl", f"{tmp_path}/more.csv"]
    assert main([*files, "--fit-until", "0.5", "--budget", "16", "--plot", str(tmp_path / "sizes.png")]) == 0
    out = capsys.readouterr().out
    assert "K_max  0.2000" in out and "N0     1e+09" in out and "9e+09: K 0.1800" in out
    assert "3 points not fitted: RMSE of log L 0.1732, mean +0.1000 (above 0: worse than predicted)" in out
    # all lines start at log .5, so a larger size is ahead from X = 1 on: .5 * 16^-.18 is the least at 16
    assert "9e+09 is ahead of 3e+09: from the start" in out
    assert f"at X = 16 (an extrapolation of 1e+09, 3e+09, 9e+09) N 9e+09 is best: L {0.5 * 16**-0.18:.4f}" in out
    assert "'flops is not above 0': 2" in out and "'pass_rate is 1': 2" in out
    assert (tmp_path / "sizes.png").stat().st_size > 10_000


PAIRS = [(f"{n}B", x, 1 - x**-k / 2) for n, k in ((1, 0.1), (2, 0.15)) for x in (1, 2, 4, 8)]
RUN = "N,flops,pass_rate\n" + "".join(f"{n},{x},{R}\n" for n, x, R in PAIRS)
ROW = '{"flops": 1, "pass_rate": 0.5}\n'
BAD = [  # a.csv, flags, words
    (RUN.replace("0.5", "50"), [], "pass_rate is 50, and a pass rate lies between 0 and 1; divide percents by 100"),
    (RUN + "2B,9,-0.1\n", [], "pass_rate is -0.1"), (RUN + "2B,9,high\n", [], "a.csv: could not convert string to float: 'high'"),
    (RUN + "2B,NA,0.5\n", [], "a.csv: could not convert string to float: 'NA'"),
    (RUN + "NA,9,0.5\n", [], "a.csv: could not convert string to float: 'NA'"),
    (RUN + "9B,1,0.5\n9B,2,0.6\n", [], "size 9e+09 has 2 different X"),
    ("N,flops,pass_rate\n1B,1,1\n", [], "a.csv: no usable row of size 1e+09; points left out: {'pass_rate is 1': 1}"),
    (RUN + "9B,1,1\n9B,0,.5\n", [], "of size 9e+09; points left out: {'pass_rate is 1': 1, 'flops is not above 0': 1}"),
    ("", [], "a.csv: no usable row; points left out: none"), ("N,flops,pass_rate\n", [], "a.csv: no usable row;"),
    (RUN + "1B," + "9" * 131_073 + ",0.5\n", [], "a.csv: field larger than field limit"),
    (RUN.replace("2B", "1e400"), [], "N and X must be above 0"), (RUN.replace("2B", "-2B"), [], "N and X must be above 0"),
    (RUN, ["--fit-until", "50"], "--fit-until is a share above 0 and at most 1, not 50"), (RUN, ["--fit-until", "nan"], "not nan"),
    (RUN, ["--fit-until", "0.1"], "there is no point to fit"),
    (RUN + "9B,8,.5\n9B,9,.6\n9B,10,.7\n", ["--fit-until", "0.5"], "size 9e+09 has no offset E, which this law cannot predict"),
    (RUN, ["--budget", "0.5"], "--budget 0.5 is no number from the first X of the runs on, 1"),
    (RUN, ["--budget", "inf"], "--budget inf is no"), (RUN, ["--budget", "nan"], "--budget nan is no"),
    (RUN, ["--x", "hours"], "a.csv: no column 'hours': write SIZE=FILE"), (RUN, ["--plot", "a.xyz"], "'xyz' is not supported"),
]  # fmt: skip
BAD_FILES = [  # files, arguments, words
    ({"a.csv": RUN, "e.csv": ""}, ["4B=e.csv", "a.csv"], "e.csv: no usable row of size 4e+09; points left out: none"),
    ({"a.csv": "flops,pass_rate\n1,1\n"}, ["4B=a.csv"], "a.csv: no usable row of size 4e+09; points left out: {'pass"),
    ({"a.csv": RUN}, ["4B=a.csv"], "4B=a.csv: it has a column N; leave SIZE out"),
    ({"1.csv": RUN}, ["lr=1.csv"], "could not convert string to float: 'LR'"),
    ({"1.csv": RUN}, ["=1.csv"], "to float: ''"),
    ({"a.jsonl": ROW}, ["a.jsonl"], "no column 'N': write SIZE=FILE"),
    ({}, ["1B=none.csv"], "No such file"),
    ({"a.csv": RUN}, ["a.csv", "./a.csv"], "a file is given twice"),
    ({"a.csv": "flops,pass_rate\n1,.5\n"}, ["1B=a.csv", "2B=a.csv"], "a file is given twice"),
    ({"a.jsonl": ROW + "[1, 0.5]\n"}, ["1B=a.jsonl"], "1B=a.jsonl: list indices must be"),
    ({"a.jsonl": ROW + "7\n"}, ["1B=a.jsonl"], "1B=a.jsonl: argument of type 'int'"),
    ({"a.jsonl": ROW + '{"flo\n' + ROW}, ["1B=a.jsonl"], "1B=a.jsonl: Unterminated string"),
    ({"a.jsonl": ROW + "[" * 100_000}, ["1B=a.jsonl"], "1B=a.jsonl: maximum recursion depth"),
    ({"loop.csv": None}, ["1B=loop.csv"], "Too many levels of symbolic links: 'loop.csv'"),
    ({"a.csv": "\x1b]0;x\x07,b\n1,2\n"}, ["1B=a.csv"], "no column 'flops'"),
    ({"a.jsonl": '{"flops": [1], "pass_rate": 0.5}\n'}, ["1B=a.jsonl"], "1B=a.jsonl: float() argument"),
    ({"a.jsonl": '{"flops": 1' + "0" * 400 + ', "pass_rate": 0.5}\n'}, ["1B=a.jsonl"], "1B=a.jsonl: int too"),
]


BAD_FILES += [({"a.csv": text}, ["a.csv", *flags], words) for text, flags, words in BAD]


@pytest.mark.parametrize(("files", "arguments", "words"), BAD_FILES)
def test_bad_input_is_one_sentence_and_no_size_vanishes(files, arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).symlink_to(name) if text is None else (tmp_path / name).write_text(text)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == "" and "\x1b" not in printed.err


def test_what_is_left_out_is_counted(tmp_path, capsys):
    """Values that are missing, a run that was killed in the middle of a line, X of 0 and a pass rate of 1."""
    one, two = RUN.split("2B,", 1)
    (tmp_path / "one.csv").write_text(one + "1B,,0.5\n1B,16,\n1B,16,nan\n1B,0,0.1\n1B,-1,0.1\n1B,16,1\n1B,32")
    (tmp_path / "two.csv").write_text("flops,pass_rate\n" + two.replace("2B,", ""))
    assert main([str(tmp_path / "one.csv"), f"2B={tmp_path / 'two.csv'}"]) == 0
    out = capsys.readouterr().out
    assert "points left out: {'no number': 4, 'flops is not above 0': 2, 'pass_rate is 1': 1}" in out
    assert "K_max  0.3000" in out and "N 2e+09: K 0.1500" in out
