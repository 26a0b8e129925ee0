"""fit_sigmoid.py: the equation by hand, the paper's rows, intervals against another optimizer and against the truth."""

import json

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

import fit_sigmoid
from fit_sigmoid import compare, fit, load, sigmoid

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
    """Of 20 runs whose end is near the ceiling, 95 % intervals of A, B and C_mid miss at most 2 each. One that is cut
    at C_mid does not know its ceiling."""
    misses = np.zeros(3, int)
    for seed in range(20):
        f = fit(*run_of(seed=seed))
        ends = (f.A_interval, f.B_interval, f.C_mid_interval)
        misses += [not low <= value <= high for (low, high), value in zip(ends, TRUTH[1:], strict=True)]
    assert misses.max() <= 2
    C, R = run_of()
    cut = fit(C[:8], R[:8])
    assert not cut.identifiable and "ceilings from" in cut.reason


def test_binomial_weights_are_maximum_likelihood():
    """Oracle: the binomial log-likelihood itself, maximised by Nelder-Mead from the truth, with unequal n."""
    C = np.linspace(0, 900, 19)
    n = np.where(np.arange(19) % 2, 400, 4000)
    k = np.random.default_rng(1).binomial(n, sigmoid(C, 0.10, 0.92, 2.0, 300.0))

    def loss(v):
        p = np.clip(sigmoid(C, *expit(v[:2]), *np.exp(v[2:])), 1e-9, 1 - 1e-9)
        return -np.sum(k * np.log(p) + (n - k) * np.log(1 - p))

    start = np.log([0.1 / 0.9, 0.92 / 0.08, 2, 300])
    v = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 8000, "xatol": 1e-9, "fatol": 1e-9}).x
    f = fit(C, k / n, n_samples=n)
    assert (f.R0, f.A) == pytest.approx(expit(v[:2]), abs=1e-3)
    assert abs(fit(C, k / n).A - expit(v[1])) > 3e-3  # without weights it is another estimate


def test_what_cannot_be_fitted():
    """NaN is left out and inputs stay; too few points have no curve; percents are refused."""
    C, R = run_of(n=20)
    dirty = np.append(C, [np.nan, 3.0]), np.append(R, [0.4, np.nan])
    assert fit(*dirty).A == fit(C, R).A and np.isnan(dirty[0][-2])
    few = fit(C[:4], R[:4])
    assert "4 usable points are too few" in few.reason and np.isnan(few.A) and few.A_interval == (0, 1)
    for bad in ((C, R * 100), (-C - 1, R)):
        with pytest.raises(ValueError, match="divide percents by 100"):
            fit(*bad)
    late = fit(C[8:], R[8:])  # from 6,400 on: it has no start
    assert "too late" in late.reason or "ceilings from" in late.reason


def test_compare_by_hand():
    """.60 and .61 agree, and B decides; .60 and .64 do not."""
    slow, fast, high = (fit(*run_of((0.3, A, B, 2500.0), sd=0.002)) for A, B in ((0.60, 1.3), (0.61, 2.2), (0.64, 1.3)))
    assert compare(slow, fast, names=["slow", "fast"]).startswith("ceilings agree within 0.02; at the shared A = 0.60")
    assert "fast is the most efficient" in compare(slow, fast, names=["slow", "fast"])
    assert "the intervals of B overlap" in compare(slow, slow)
    assert compare(slow, high, names=["slow", "high"]).endswith("more than 0.02: high is highest")
    C, R = run_of()
    assert compare(slow, fit(C[:8], R[:8])) == "no verdict: the ceiling of run 2 is not identifiable"


def test_two_runs_from_the_shell(tmp_path, capsys):
    for name, A in (("a", 0.6), ("b", 0.7)):
        rows = []
        for C, R in zip(*run_of((0.3, A, 1.8, 2500.0)), strict=True):
            rows.append(
                {"step": int(C), "tokens": C + 5, "pass_rate": R, "n_prompts": 256, "n_samples": 4, "device": "cpu"}
            )
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')
    x, C, _, n = load(tmp_path / "a")
    assert (x, C[0], C[1], n[0]) == ("tokens", 0, 405, 1024)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert fit_sigmoid.main([*runs, "--plot", str(tmp_path / "both.png")]) == 0
    assert "ceilings differ" in capsys.readouterr().out and (tmp_path / "both.png").stat().st_size > 10_000
    assert fit_sigmoid.main([*runs, "--x", "flops"]) == 2 and "flops" in capsys.readouterr().err
