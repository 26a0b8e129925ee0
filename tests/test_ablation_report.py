"""tools/ablation_figures.py and tools/ablation_report.py: the numbers of a report, worked by hand."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import ablation_figures as figures
import ablation_report
from comparisons import Comparison

pytestmark = pytest.mark.long

ONE = Comparison("first", {"base": "", "dapo": "--loss dapo"}, setting="--k 4")


def test_interval_and_difference_by_hand():
    """1, 2, 3: mean 2, sd 1, t(2 degrees, 97.5 %) = 4.3027: 2 -+ 4.3027 / sqrt 3 = 2 -+ 2.4841. Paired by seed:
    (5 - 4), (7 - 5), (9 - 6), while seeds 3 and 8 have no partner."""
    assert figures.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    mean, low, high = figures.interval([0.7])
    assert mean == 0.7 and math.isnan(low) and math.isnan(high)
    found = figures.difference({0: 5.0, 1: 7.0, 2: 9.0, 3: 0.0}, {0: 4.0, 1: 5.0, 2: 6.0, 8: 1.0})
    assert found == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841, 3), abs=1e-4)
    assert figures.difference({0: 1.0}, {1: 1.0})[3] == 0


def test_the_rule_in_words():
    spans = ((0.01, 0.2), (-0.1, 0.3), (0.0, 0.2), (-0.3, -0.1))
    words = [figures.verdict(0.1, *span, "more", "less") for span in spans]
    assert words == ["more", "not distinguishable", "not distinguishable", "less"]
    assert "nothing" in figures.verdict(0.1, math.nan, math.nan, "more", "less")


def test_compute_to_a_rate_by_hand():
    """.2 at 100, .6 at 300: .3 is reached at 100 + (.1 / .4) 200 = 150; the first crossing counts; .9 never is."""
    evals = [{"tokens": 0, "pass_rate": 0.1}, {"tokens": 100, "pass_rate": 0.2}, {"tokens": 300, "pass_rate": 0.6},
             {"tokens": 400, "pass_rate": 0.25}, {"tokens": 500, "pass_rate": 0.7}]  # fmt: skip
    assert figures.compute_to(evals, 0.3, "tokens") == pytest.approx(150)
    assert figures.compute_to(evals, 0.6, "tokens") == pytest.approx(300)
    assert figures.compute_to(evals, 0.05, "tokens") == 0
    assert figures.compute_to(evals, 0.9, "tokens") == figures.compute_to([], 0.9, "tokens") == math.inf


def sigmoid_evals(A, n=16):
    """Evaluations on R0 = .1, B = 2, C_mid = 300, every 50 tokens; device-hours are a thousandth of the tokens."""
    C = 50.0 * np.arange(n + 1)
    rates = figures.fit_sigmoid.sigmoid(C, 0.1, A, 2.0, 300)
    return [{"step": 8 * i, "tokens": c, "device_hours": c / 1000, "pass_rate": float(r), "n_prompts": 512,
             "n_samples": 2, "truncated": 0.0, "interrupted": 0.25, "mean_length": 20.0}
            for i, (c, r) in enumerate(zip(C, rates, strict=True))]  # fmt: skip


def result(variant, seed, evals, tmp_path, steps=()):
    """A finished run of these evaluations and steps, as `read` reads it."""
    folder = tmp_path / variant / f"seed-{seed}"
    folder.mkdir(parents=True)
    for name, records in (("eval.jsonl", evals), ("metrics.jsonl", [{"config": {}}, *steps])):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    closing = {"finished": "2026-11-21 10:00:00 UTC", "seconds": 60.0, "machine": "2 x X"}
    (folder / "finished.json").write_text(json.dumps(closing))
    return figures.read(folder, variant, seed, ("tokens",))


def test_health_counts_by_hand(tmp_path):
    """Four steps: one truncated at 12 % (10 % itself is not above), one thrown away, one without rows; the pass rate
    ends .15 below its best."""
    full = {"rows": 5, "ess": 0.9, "capped_positive": 0.2, "capped_negative": 0.4, "updated": 1}
    steps = [
        full | {"step": 1, "truncated": 0.12, "lag_mean": 1, "lag_max": 3, "ess": 0.5, "logprob_gap": 2e-7},
        full
        | {"step": 2, "truncated": 0.10, "lag_mean": 2, "lag_max": 2, "ess": 1.0, "updated": 0, "logprob_gap": 3e-4},
        {"step": 3, "truncated": 0.0, "lag_mean": 3, "lag_max": 5},
        full | {"step": 4, "truncated": 0.0, "lag_mean": 2, "lag_max": 2},
    ]
    evals = sigmoid_evals(0.8)
    evals[-2]["pass_rate"] = evals[-1]["pass_rate"] = max(e["pass_rate"] for e in evals[:-2]) - 0.15
    found = figures.health(result("a", 0, evals, tmp_path, steps))
    assert (found["lag"], found["lag_max"], found["gap"]) == (2.0, 5, 3e-4)
    assert (found["ess"], found["clipped +"], found["clipped -"]) == pytest.approx((0.8, 0.2, 0.4))
    run = result("b", 0, evals, tmp_path, steps)
    assert figures.values([run], "truncated", "", 0.5) == {0: pytest.approx(0.055)}
    assert found["truncated"] == pytest.approx(0.055) and found["interrupted"] == 0.25
    assert [s.split(" in ")[0] for s in found["signs"][:-1]] == [
        "truncated above 10 %", "gradient not finite", "nothing to train on", "gap above 1e-4",
    ]  # fmt: skip
    assert all(" in 1 of 4 steps" in s for s in found["signs"][:-1]) and found["signs"][-1].startswith(
        "fell by up to 0.15 (2 of"
    )


def test_best_and_falls_by_hand(tmp_path):
    """.1 .3 .2 .5 .1 .6: below the best before by 0 0 .1 0 .4 0; the best two in a row are .2 and .5, or .1 and .6."""
    evals = sigmoid_evals(0.8)[:6]
    for record, rate in zip(evals, (0.1, 0.3, 0.2, 0.5, 0.1, 0.6), strict=True):
        record["pass_rate"] = rate
    run = result("a", 0, evals, tmp_path)
    assert run.falls == pytest.approx([0, 0, 0.1, 0, 0.4, 0])
    assert run.best == pytest.approx(0.35)
    run.evals[-2]["pass_rate"] = 0.2
    assert run.final == pytest.approx(0.4)  # of .2 and .6
    run.evals[-2]["pass_rate"] = 0.1
    assert figures.values([run], "fall", "tokens", 0.5) == {0: pytest.approx(0.4)}


def test_the_shared_ceiling(tmp_path):
    """Ceilings .80 and .81 agree: both are refitted with .805 (to the fit's precision), and B is about the true 2. Of .6
    and .8, `compare` names the higher one; the refits use the mean, .7."""
    runs = [result(str(A), 0, sigmoid_evals(A, n=24), tmp_path) for A in (0.80, 0.81, 0.60)]
    shared, said = figures.share_ceiling(runs[:2], "tokens")
    assert shared == pytest.approx(0.805, abs=2e-3) and "agree" in said
    assert [r.shared["tokens"].A for r in runs[:2]] == [shared] * 2
    assert [r.shared["tokens"].B for r in runs[:2]] == pytest.approx([2.0, 2.0], abs=0.1)
    found = [figures.values([r], "C_mid shared", "tokens", 0.5)[0] for r in runs[:2]]
    assert found == pytest.approx([300, 300], abs=8)
    assert figures.share_ceiling(runs[:1], "tokens")[0] is None
    shared, said = figures.share_ceiling([runs[0], runs[2]], "tokens")
    assert shared == pytest.approx(0.7, abs=5e-3) and "0.8 seed 0 is highest" in said


def test_extrapolation_counts_by_hand(tmp_path):
    """Two exact sigmoids: errors near 0, all inside. A third run falls to .2 after its first half: the error is what the
    fit predicted minus .2, and its 20 held-out points are outside: 40 of 60 inside."""
    evals = [sigmoid_evals(0.8, n=40) for _ in range(3)]
    for record in evals[2][21:]:
        record["pass_rate"] = 0.2
    runs = [result("a", i, e, tmp_path) for i, e in enumerate(evals)]
    found = figures.extrapolation(runs)
    assert (found["runs"], found["inside"], found["points"]) == (3, 2, 60)
    assert found["covered"] == pytest.approx(40 / 60)
    runs[1].half.predictions[0] = runs[1].half.predictions[0]._replace(measured=0.99)
    assert [figures.extrapolation([run])["too high"] for run in runs[1:]] == [0, 1]  # one ends above, one falls
    assert found["errors"][1] < 0.01 and found["errors"][2] == pytest.approx(evals[0][-1]["pass_rate"] - 0.2, abs=0.01)


def test_the_report_by_hand(tmp_path):
    """Two seeds. Base has A = .60 and .64, dapo .10 more at each seed, all measured to 5 C_mid, where 25/26 of the gain
    is reached: the difference at the end is .1 * 25/26 = .096 at both seeds, so it is distinguishable although the two
    intervals over seeds overlap widely. Tokens to .5 are C_mid sqrt(s / (1 - s)) with s = .4 / (A - .1): 600 and 507,
    dapo 424 and 387. Differences of -176 and -120: -148, sd 40, -+ 12.7 * 40 / sqrt 2: not distinguishable."""
    results = [result(v, s, sigmoid_evals(0.60 + 0.04 * s + extra, n=30), tmp_path)
               for v, extra in (("base", 0.0), ("dapo", 0.10)) for s in range(2)]  # fmt: skip
    text = ablation_report.report("one", ONE, results, [(v, s) for v in ("base", "dapo") for s in range(3)])
    ends = [[r.final for r in results if r.variant == v] for v in ("base", "dapo")]
    assert np.subtract(*ends) == pytest.approx([-0.096] * 2, abs=1e-3)
    assert "4 of 6 runs finished, seeds 0, 1; 4 minutes of machine time" in text
    assert "Not finished: base seed 2, dapo seed 2." in text
    dapo, fits = [line.split(" | ") for line in text.splitlines() if line.startswith("| dapo | base |")]
    assert "| base | base |" not in text
    assert dapo[2].startswith("**+0.0") and dapo[2].endswith("**") and fits[2].startswith("**+0.")
    assert abs(float(dapo[6].split()[0]) + 148) < 3 and "*" not in dapo[6]
    assert "- pass rate at the end: **higher**: dapo." in text and "- tokens to 0.5: not distinguishable: dapo." in text
    row = next(line for line in text.splitlines() if line.startswith("| base | 2 |"))
    mean, low, high = figures.interval(ends[0])
    assert f"| {mean:.3g} [{low:.3g}, {high:.3g}] |" in row
    assert "![one](one.png)" in text and "4 of 4" in text.split("Half a run")[1]


def test_pairs_follow_against(tmp_path):
    """`c` is compared with `b`, which is no variant of `a` then; a variant whose baseline has no finished run has none."""
    c = Comparison("x", {"a": "", "b": "--k 1", "c": "--k 2", "d": "--k 3"}, against={"c": "b"})
    assert ablation_report.pairs(c, dict.fromkeys("abcd", ())) == {"c": "b", "d": "a"}
    assert ablation_report.pairs(c, dict.fromkeys("bcd", ())) == {"c": "b"}


def test_the_simpler_rules_by_hand(tmp_path):
    """R = .9 - .8 / C^.5 in units of 50 tokens: the power law finds its own curve, .9 - .8 / sqrt(40) at the end. That
    the pass rate stays: the mean at C = 19 and 20."""
    evals = sigmoid_evals(0.8, n=40)
    for i, record in enumerate(evals[1:], 1):
        record["pass_rate"] = 0.9 - 0.8 / math.sqrt(i)
    found = figures.other_predictions(result("a", 0, evals, tmp_path).half)
    short = result("b", 0, sigmoid_evals(0.8, n=7), tmp_path)  # 3 points and the start: enough for the sigmoid alone
    assert figures.extrapolation([short])["runs"] == 1
    assert "power law" not in figures.other_predictions(short.half)
    assert found["power law"] == pytest.approx(0.9 - 0.8 / math.sqrt(40), abs=1e-3)
    assert found["the pass rate stays"] == pytest.approx(0.9 - 0.4 * (1 / math.sqrt(19) + 1 / math.sqrt(20)))


def test_the_report_of_one_seed_claims_nothing(tmp_path):
    results = [result("base", 0, sigmoid_evals(0.5), tmp_path), result("dapo", 0, sigmoid_evals(0.9), tmp_path)]
    text = ablation_report.report("one", ONE, results, [("base", 0), ("dapo", 0)])
    assert "nothing can be said" in text and "**higher**" not in text and "**needs" not in text
