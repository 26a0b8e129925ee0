"""fit_sigmoid.py: the equation by hand, the paper's rows, intervals against another optimizer and against the truth."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

import fit_sigmoid
from fit_sigmoid import compare, fit, load, mean_of_seeds, plain_fit, report, sigmoid

TRUTH = (0.3, 0.6, 1.8, 2500.0)  # R0, A, B, C_mid


def run_of(truth=TRUTH, n=40, end=16_000.0, sd=0.007, seed=0):
    """C (n + 1,), R: an evenly evaluated run with Gaussian noise."""
    C = np.linspace(0, end, n + 1)
    return C, sigmoid(C, *truth) + np.random.default_rng(seed).normal(0, sd, C.size)


def test_sigmoid_by_hand():
    """R0 .2, A .6, B 2, C_mid 100. s(50) = 1 / (1 + 2^2) = .2, s(100) = .5, s(200) = 1 / (1 + .5^2) = .8."""
    values = sigmoid([0, 50, 100, 200, 1e300], 0.2, 0.6, 2.0, 100.0)
    assert values == pytest.approx([0.2, 0.28, 0.4, 0.52, 0.6], abs=1e-12)


@pytest.mark.parametrize("row", [(2542, 2.44, 0.585), (1675, 1.09, 0.615), (11272, 1.89, 0.645), (4242, 1.65, 0.710)])
def test_rows_of_the_paper_come_back(row):
    C_mid, B, A = row
    C = np.linspace(0, 50_000, 41)
    assert plain_fit(C, sigmoid(C, 0.25, A, B, C_mid)) == pytest.approx((0.25, A, B, C_mid), rel=1e-4)
    f = fit(C, sigmoid(C, 0.25, A, B, C_mid))
    assert (f.R0, f.A, f.B, f.C_mid) == pytest.approx((0.25, A, B, C_mid), rel=1e-4)
    assert f.identifiable and f.predict(C_mid) == pytest.approx((0.25 + A) / 2)


def test_the_interval_of_A_against_another_optimizer():
    """The least and greatest A of all curves with Q <= least Q + 2 Q / dof t^2, by SLSQP in steps of about 1. N = 21:
    17 degrees of freedom, t = 2.110."""
    C, R = run_of(n=20)
    f = fit(C, R)
    best, scale = np.array([f.R0, f.A, np.log(f.B), np.log(f.C_mid)]), np.array([0.01, 0.01, 0.1, 0.05])

    def misfit(v):
        R0, A, log_B, log_C_mid = best + scale * v
        return np.sum((R - sigmoid(C, R0, A, np.exp(log_B), np.exp(log_C_mid))) ** 2)

    limit = misfit(np.zeros(4)) * (1 + 2 / 17 * 2.1098**2)
    allowed = {"type": "ineq", "fun": lambda v: (limit - misfit(v)) / limit}
    for sign, end in zip((1, -1), f.A_interval, strict=True):
        result = minimize(lambda v, sign=sign: sign * v[1], np.zeros(4), constraints=allowed, method="SLSQP")
        assert f.A + sign * scale[1] * result.fun == pytest.approx(end, abs=1e-3)


def test_intervals_hold_the_truth():
    """Of 12 runs whose end is near the ceiling, 95 % intervals of A, B and C_mid miss at most 1 each. One that is cut
    at C_mid does not know its ceiling."""
    misses = np.zeros(3, int)
    for seed in range(12):
        f = fit(*run_of(seed=seed))
        ends = (f.A_interval, f.B_interval, f.C_mid_interval)
        misses += [not low <= value <= high for (low, high), value in zip(ends, TRUTH[1:], strict=True)]
    assert misses.max() <= 1
    C, R = run_of()
    cut = fit(C[:8], R[:8])
    assert not cut.identifiable and "ceilings from" in cut.reason
    small = fit(*run_of((0.3, 0.36, 1.8, 2500.0)))  # an interval of .054 is too wide for a gain of .065
    assert not small.identifiable and small.A_interval[1] - small.A_interval[0] < 0.1


def test_binomial_weights_are_maximum_likelihood():
    """Oracle: the binomial log-likelihood itself, maximised by Nelder-Mead from the truth, with unequal n."""
    C = np.linspace(0, 900, 19)
    n = np.where(np.arange(19) % 2, 400, 4000)
    k = np.random.default_rng(3).binomial(n, sigmoid(C, 0.10, 0.92, 2.0, 300.0))

    def loss(v):
        p = np.clip(sigmoid(C, *expit(v[:2]), *np.exp(v[2:])), 1e-9, 1 - 1e-9)
        return -np.sum(k * np.log(p) + (n - k) * np.log(1 - p))

    start = np.log([0.1 / 0.9, 0.92 / 0.08, 2, 300])
    v = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 8000, "xatol": 1e-9, "fatol": 1e-9}).x
    f = fit(C, k / n, n_samples=n)
    assert (f.R0, f.A) == pytest.approx(expit(v[:2]), abs=3e-5)  # weights from the rates alone miss by 4e-4
    assert abs(fit(C, k / n).A - expit(v[1])) > 3e-3  # without weights it is another estimate


def test_what_cannot_be_fitted():
    """NaN is left out and inputs stay; too few points have no curve; percents are refused."""
    C, R = run_of(n=20)
    dirty = np.append(C, [np.nan, 3.0]), np.append(R, [0.4, np.nan])
    assert fit(*dirty).A == fit(C, R).A and np.isnan(dirty[0][-2])
    few = fit(C[:4], R[:4])
    assert "4 usable points are too few" in few.reason and few.A_interval == (0, 1)
    assert report("a run", few, "tokens") == f"a run: no fit: {few.reason}"
    for bad in ((C, R * 100), (-C - 1, R)):
        with pytest.raises(ValueError, match="divide percents by 100"):
            fit(*bad)
    with pytest.raises(ValueError, match="one length"):
        fit(C, R[:1])
    with pytest.raises(ValueError, match="R0 = 0.7, A = 0.6"):
        fit(C, R, R0=0.7, A=0.6)


def test_a_first_point_that_comes_too_late():
    """From 10 = 2.5 C_mid on, the start of a curve with C_mid = 4 is a guess; where R0 is known it is none."""
    C = np.linspace(10, 100, 30)
    R = sigmoid(C, 0.1, 0.8, 2, 4)
    assert fit(C, R).reason == "the first point is at 2.5 C_mid, too late"
    assert fit(C, R, R0=0.1).reason == fit(C, R, A=0.8).reason == ""
    early = np.linspace(3, 100, 30)
    assert fit(early, sigmoid(early, 0.1, 0.8, 2, 4)).reason == ""


@pytest.mark.parametrize(
    ("R", "words"),
    [
        (sigmoid(np.arange(41), 0.6, 0.2, 3, 12), "from 0.58 in its best stretch to 0.21"),  # falls from the start
        (np.repeat([0.3, 0.6, 0.0], [10, 20, 11]), "from 0.60 in its best stretch to 0.00"),  # rises and collapses
        (
            np.repeat([0.3, 0.6, 0.1], [10, 26, 5]),
            "from 0.60 in its best stretch to 0.29",
        ),  # of 8 points 3 at .6, 5 at .1
        (np.repeat([0.3, 0.6, 0.585], [10, 20, 11]), ""),  # .015 lower, which is less than equal runs differ by
        (sigmoid(np.arange(41), 0.3, 0.6, 2, 4), ""),
        (np.full(41, 0.4), ""),
    ],
)
def test_a_run_that_falls_says_so(R, words):
    """Means of the last fifth of 41 evaluations, eight, and of the best eight in a row. Eq. 1 has no ceiling for them."""
    f = fit(np.arange(41), R)
    assert ("the run falls" in f.reason) == bool(words) and f.reason.endswith(words)
    assert words in report("a run", f, "tokens")


def test_noise_is_no_fall():
    """256 answers right with .4, 40 times, at 8 and 41 evaluations: neither scatter nor one good stretch is a fall."""
    rng = np.random.default_rng(5)
    for n in [8, 41] * 20:
        assert "falls" not in fit(np.arange(n), rng.binomial(256, 0.4, n) / 256).reason


def test_a_pass_rate_of_exactly_0_is_one():
    C = np.arange(0.0, 61.0)
    assert fit(C, sigmoid(C, 0.0, 0.8, 2, 10)).R0 == pytest.approx(0, abs=1e-3)


def test_one_curve_is_reported():
    """Points that near 1 faster than Eq. 1 have their best A above 1. What is reported is the best curve up to 1, as
    `plain_fit` finds it within its bounds."""
    C = np.linspace(0, 3, 31)
    R = 1 - np.exp(-(C**3))
    f = fit(C, R)
    assert (f.R0, f.A, f.B, f.C_mid) == pytest.approx(plain_fit(C, R), abs=1e-3)


def test_fixed_values_stay():
    """Without noise, A fixed at the truth gives the rest, and both fixed have no interval."""
    C, R = run_of(sd=0)
    f = fit(C, R, R0=0.3, A=0.6)
    assert (f.R0, *f.A_interval) == (0.3, 0.6, 0.6) and (f.B, f.C_mid) == pytest.approx((1.8, 2500), rel=1e-4)
    assert fit(C, R, A=0.7).A == 0.7 and fit(C, R, A=0.7).identifiable


def test_mean_of_seeds_by_hand():
    """The second run starts at 2 and ends at 8; at 4 it lies halfway between .3 and .5, at 6 halfway to .7."""
    one = [0, 2, 4, 6, 10], [0.1, 0.2, 0.3, 0.4, 0.5], [100] * 5
    two = [2, 3, 5, 7, 8], [0.2, 0.3, 0.5, 0.7, 0.7], [100] * 5
    C, R, n = mean_of_seeds([one, two])
    assert C.tolist() == [2, 4, 6] and R == pytest.approx([0.2, (0.3 + 0.4) / 2, (0.4 + 0.6) / 2])
    assert n.tolist() == [200, 200, 200]


def test_compare_by_hand():
    """.60 and .61 agree, and B decides; .60 and .64 do not."""
    slow, fast, high = (fit(*run_of((0.3, A, B, 2500.0), sd=0.002)) for A, B in ((0.60, 1.3), (0.61, 2.2), (0.64, 1.3)))
    verdict = compare(slow, fast, names=["slow", "fast"])
    assert verdict.startswith("ceilings agree within 0.02; at the shared A = 0.60") and "fast is the most" in verdict
    assert "the intervals of B overlap" in compare(slow, slow)
    assert compare(slow, high, names=["slow", "high"]).endswith("more than 0.02: high is highest")
    three = compare(slow, fast, high, names=["slow", "fast", "high"])
    assert three.endswith("is highest") and float(three.split()[3][:-1]) == pytest.approx(0.03, abs=0.005)  # .64 - .61
    low = fit(*run_of((0.3, 0.5, 1.3, 2500.0), sd=0.002))
    assert compare(slow, fast, low, names=["slow", "fast", "low"]).startswith(
        "ceilings agree within 0.02 (lower: low);"
    )
    wide = [replace(f, A_interval=(0.55, 0.65)) for f in (slow, high)]
    assert compare(*wide).endswith("run 2 is highest, but its interval overlaps that of another")
    C, R = run_of()
    assert compare(slow, fit(C[:8], R[:8])) == "no verdict: the ceiling of run 2 is not known yet"


def write(folder, truth, **options):
    rows = []
    for C, R in zip(*run_of(truth, **options), strict=True):
        row = {"step": int(C), "tokens": C + 5, "pass_rate": R, "n_prompts": 256, "n_samples": 4, "device": "cpu"}
        rows.append(json.dumps(row))
    folder.mkdir(parents=True)
    (folder / "eval.jsonl").write_text("\n".join([*rows, '{"step": 1']))
    return str(folder)


def test_two_variants_from_the_shell(tmp_path, capsys):
    """One variant has two seeds, the other one run. Its tokens at step 0 count as none, its last line is half written.
    Bad input is one sentence, and exit code 2."""
    runs = [write(tmp_path / "a" / f"seed-{i}", (0.3, 0.6, 1.8, 2500.0), seed=i) for i in range(2)]
    runs.append(write(tmp_path / "b", (0.3, 0.7, 1.8, 2500.0)) + "/eval.jsonl")
    x, C, R, n = load(runs[0])
    assert (x, len(R), C[0], C[1], n[0]) == ("tokens", 41, 0, 405, 1024)
    assert fit_sigmoid.main([*runs, "--plot", str(tmp_path / "both.png")]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path / 'a'}, mean of 2: Eq. 1, the paper's sigmoid, fitted to 41 evaluations up to 16," in output
    assert f"more than 0.02: {tmp_path / 'b'} is highest" in output
    assert (tmp_path / "both.png").stat().st_size > 10_000
    few = write(tmp_path / "few", TRUTH, n=3)
    table = tmp_path / "log.csv"
    x, R = run_of()
    lines = [f'{C},"{rate}",x' for C, rate in zip(x, R, strict=True)]
    table.write_text("\n".join(["hours,eval acc,note", *lines, "17000,,late"]))
    assert fit_sigmoid.main([str(table), "--x", "hours", "--y", "eval acc"]) == 0
    assert "fitted to 41 evaluations up to 16,000 hours" in capsys.readouterr().out
    (C, rates), f = load(table, "hours", "eval acc")[1:3], fit(x, R)
    assert fit(C, rates).A == f.A and np.isnan(rates[-1])  # a cell without a number is left out
    twice = tmp_path / "twice.csv"
    twice.write_text("\n".join(["hours,acc", *lines, *lines]).replace(",x", ""))
    table.write_text("step,tokens,pass_rate\n0,7,0.1\n8,9,0.2\n")
    assert load(table)[1].tolist() == [0, 9]  # nothing had been trained at step 0
    table.write_text("\n".join(["hours,eval acc,note", *lines, "17000,,late"]))
    for argv, words in (
        ([*runs, "--x", "flops"], "flops"),
        ([few], "4 usable points"),
        (["none"], "none"),
        ([str(table)], "none of the 42 rows has tokens; --x names compute, --y the pass rate"),
        ([str(tmp_path / "both.png")], "neither JSON, a line for each evaluation, nor a .csv with a header"),
        ([__file__], "neither JSON"),
        ([str(twice), "--x", "hours", "--y", "acc"], "hours goes back; if these are several runs, give each a file"),
    ):
        assert fit_sigmoid.main(argv) == 2
        output, error = capsys.readouterr()
        assert output == "" and words in error and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        fit_sigmoid.main([runs[0], runs[0] + "/eval.jsonl"])
    assert "a run is named twice" in capsys.readouterr().err
