"""tools/ablate.py and its report: which runs are made, which are not made again, and the report's numbers worked by hand. A scripted
stand-in takes the place of train.py, so nothing is trained."""

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import ablate
import ablation_report
from ablate import UsageError, plan
from comparisons import COMPARISONS, Comparison

WRITE_REPORT = ablate.write_report

STAND_IN = '''
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
flags = dict(zip([w[2:] for w in words[::2]], words[1::2]))
folder = pathlib.Path(flags.get("resume") or flags["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
script = json.loads(pathlib.Path(os.environ["STAND_IN"]).read_text())
plan = script.get("/".join(folder.parts[-3:]), {})
with open(os.environ["STAND_IN"] + ".calls", "a") as file:
    file.write(json.dumps({"run": "/".join(folder.parts[-3:]), "argv": words, "start": time.time()}) + "\\n")
if "resume" not in flags:
    typed = {k: json.loads(v) if v[:1].isdigit() or v in ("true", "false") else v for k, v in flags.items()}
    (folder / "config.json").write_text(json.dumps(typed))

def stop(number, frame):
    checkpoint = folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True, exist_ok=True)
    if not plan.get("damage"):
        (checkpoint / "state.json").write_text('{"files": {}}')
    print("stopped by", number)
    sys.exit(128 + number)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
if plan.get("wait") and "resume" not in flags:
    (folder / "waiting").touch()
    time.sleep(plan["wait"])
evals = plan.get("evals") or [{"step": 8 * i, "tokens": 1000 * i, "device_hours": 0.001 * i, "pass_rate": 0.1 + 0.05 * i,
    "n_prompts": 512, "n_samples": 2, "truncated": 0.0, "interrupted": 0.0, "mean_length": 20.0} for i in range(13)]
with open(folder / "eval.jsonl", "w") as file:
    file.writelines(json.dumps(e) + "\\n" for e in evals)
with open(folder / "metrics.jsonl", "w") as file:
    file.write(json.dumps({"config": {}}) + "\\n")
    for i in range(4):
        file.write(json.dumps({"step": i + 1, "rows": 5, "truncated": 0.0, "lag_mean": 1.0, "lag_max": 2, "ess": 0.9,
                               "capped_positive": 0.01, "capped_negative": 0.03, "updated": 1}) + "\\n")
sys.exit(plan.get("exit", 0))
'''


@pytest.fixture
def table(monkeypatch):
    """Two small comparisons that share their baseline."""
    small = {
        "one": Comparison("first", {"base": "", "dapo": "--loss dapo"}, setting="--k 4"),
        "two": Comparison("second", {"grpo": "--loss grpo", "same": "", "again": "--loss dapo"}, setting="--k 4"),
    }
    monkeypatch.setattr(ablate, "COMPARISONS", small)
    return small


@pytest.fixture
def sweep(table, monkeypatch, tmp_path):
    """(call ablate with these words, set what the stand-in does by run, the calls that it got)."""
    program, script = tmp_path / "train.py", tmp_path / "script.json"
    program.write_text(STAND_IN)
    script.write_text("{}")
    monkeypatch.setenv("STAND_IN", str(script))
    monkeypatch.setattr(ablate, "write_report", lambda name, runs, args: None)  # seconds of fits

    def call(*words):
        return ablate.main([*words, "--output", str(tmp_path / "runs"), "--train", str(program)])

    def calls():
        file = Path(f"{script}.calls")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return call, lambda **runs: script.write_text(json.dumps({k.replace("__", "/"): v for k, v in runs.items()})), calls


def names(calls: list) -> list[str]:
    return [record["run"].replace("seed-", "") for record in calls]


# ---- planning


def test_equal_flags_are_one_run_in_the_folder_of_the_first_comparison(table, tmp_path):
    """`same` of two is `base` of one, `again` is `dapo`; a flag given at its default changes nothing."""
    one, two = (plan(name, [0, 1], tmp_path, {}) for name in ("one", "two"))
    assert [str(run.folder.relative_to(tmp_path)) for run in two.values()] == [
        "two/grpo/seed-0", "one/base/seed-0", "one/dapo/seed-0", "two/grpo/seed-1", "one/base/seed-1", "one/dapo/seed-1",
    ]  # fmt: skip
    assert two["same", 1] == one["base", 1] and len({*one.values(), *two.values()}) == 6
    table["two"].variants["grpo"] = "--loss cispo --eps_max 5"
    assert plan("two", [0], tmp_path, {})["grpo", 0].folder == one["base", 0].folder


def test_the_table_makes_no_run_twice(tmp_path):
    """Over all comparisons: as many folders as there are different sets of flags. Leave-one-out has 10 runs a seed, to
    which the losses add GSPO under two averages and GRPO, the schedules pipeline-8 and -4 with their lag held up,
    pipeline-1 and off-policy-1."""
    runs = {run for name in COMPARISONS for run in plan(name, [0], tmp_path, {}).values()}
    assert len({run.folder for run in runs}) == len({run.flags for run in runs}) == len(runs)
    first = set(plan("leave-one-out", [0], tmp_path, {}).values())
    assert len(first) == 10
    assert len(set(plan("losses", [0], tmp_path, {}).values()) - first) == 3
    assert len(set(plan("schedules", [0], tmp_path, {}).values()) - first) == 4


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_every_row_is_accepted_by_train(name, tmp_path):
    """Flags that train.py refuses, or rounds, would show only after minutes. Baselines are rows."""
    from flags import check_flags, parse_flags

    for run in plan(name, [0], tmp_path, {}).values():
        flags = parse_flags(run.command(Path("train.py"), False)[2:], "about")
        assert not [note for note in check_flags(flags) if "rounded" in note]
        assert all(getattr(flags, key) == value for key, value in run.flags)
    assert {*COMPARISONS[name].against, *COMPARISONS[name].against.values()} <= set(COMPARISONS[name].variants)


@pytest.mark.parametrize("row", ["--lamda 1", "--seed 3", "--output_dir x", "--k eight", "--k", "k 8"])
def test_a_row_with_a_wrong_flag_is_refused(table, row, tmp_path, capsys):
    table["one"].variants["wrong"] = row
    assert ablate.main(["one", "--dry-run", "--output", str(tmp_path)]) == 2
    assert row.split()[0] in capsys.readouterr().err


def test_budget_is_of_each_run_and_takes_the_settings_place(table, tmp_path):
    """800k tokens, 1.5M tokens, 0.05 device-hours; one kind switches the other off."""
    assert ablate.budget_flags("800k") == {"max_sampled_tokens": 800_000, "max_device_hours": 0.0}
    assert ablate.budget_flags("1.5M")["max_sampled_tokens"] == 1_500_000 and ablate.budget_flags("900")["max_sampled_tokens"] == 900
    assert ablate.budget_flags("0.05h") == {"max_sampled_tokens": 0, "max_device_hours": 0.05}
    object.__setattr__(table["one"], "setting", "--k 4 --max_sampled_tokens 100")
    runs = plan("one", [0], tmp_path, ablate.budget_flags("0.05h"))
    words = runs["base", 0].command(Path("train.py"), False)
    assert words[words.index("--max_sampled_tokens") + 1] == "0" and words[words.index("--max_device_hours") + 1] == "0.05"
    for bad in ("0", "-5k", "many", "h", "nan", "inf"):
        with pytest.raises(UsageError):
            ablate.budget_flags(bad)


def test_dry_run_lists_the_commands_and_starts_nothing(sweep, capsys):
    call, _, calls = sweep
    assert call("two", "--dry-run", "--seeds", "1", "--only", "grpo", "same") == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3 and "--loss grpo" in out[0] and "one/base/seed-0" in out[1] and "0 of 2 runs" in out[2]
    assert calls() == []
    assert call("two", "--dry-run", "--only", "nothing") == 2


# ---- the sweep


def test_finished_runs_are_never_run_again(sweep, capsys):
    """One has 2 variants x 2 seeds; then two adds only GRPO; a third call starts nothing."""
    call, _, calls = sweep
    assert call("one", "--seeds", "2") == 0
    assert names(calls()) == ["one/base/0", "one/dapo/0", "one/base/1", "one/dapo/1"]
    assert call("two", "--seeds", "2") == 0
    assert names(calls())[4:] == ["two/grpo/0", "two/grpo/1"]
    assert call("two", "--seeds", "2") == 0 and len(calls()) == 6
    assert "6 runs are finished, 0 are to be run" in capsys.readouterr().out


def wait_for(path):
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize("damaged", [False, True])
def test_ctrl_c_ends_the_run_with_a_checkpoint_and_the_next_call_resumes_it(sweep, damaged, tmp_path, capfd):
    """Ctrl-C during the second of four runs. Then: the first is not run again, the second is resumed (begun again if its
    checkpoint is damaged), the others follow."""
    call, script, calls = sweep
    script(**{"one__dapo__seed-0": {"wait": 20, "damage": damaged}})

    def interrupt():
        wait_for(tmp_path / "runs/one/dapo/seed-0/waiting")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.time()
    assert call("one", "--seeds", "2") == 130
    thread.join()
    assert time.time() - started < 10
    assert names(calls()) == ["one/base/0", "one/dapo/0"]
    log = (tmp_path / "runs/one/dapo/seed-0.log").read_text()
    assert log.count("stopped by 2") == 1
    assert not (tmp_path / "runs/one/dapo/seed-0/finished.json").exists()
    script()
    assert call("one", "--seeds", "2") == 0
    assert names(calls())[2:] == ["one/dapo/0", "one/base/1", "one/dapo/1"]
    assert calls()[2]["argv"][0] == ("--output_dir" if damaged else "--resume")
    assert ("--loss" in calls()[2]["argv"]) == damaged


def test_a_killed_sweep_leaves_no_orphan_and_is_taken_up(sweep, tmp_path):
    """SIGKILL of the sweep itself: its run gets SIGTERM, saves, and lets go of the lock; the next call resumes it."""
    call, script, calls = sweep
    script(**{"one__base__seed-0": {"wait": 20}})
    child = os.fork()
    if not child:
        os._exit(call("one", "--seeds", "1"))
    wait_for(tmp_path / "runs/one/base/seed-0/waiting")
    assert call("one", "--seeds", "1") == 2  # in use
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(tmp_path / "runs/one/base/seed-0/checkpoints/step-000003/state.json")
    time.sleep(0.1)
    assert call("one", "--seeds", "1") == 0
    assert names(calls()) == ["one/base/0", "one/base/0", "one/dapo/0"]
    assert calls()[1]["argv"] == ["--resume", str(tmp_path / "runs/one/base/seed-0")]


def test_a_failed_run_is_told_and_tried_again(sweep, capsys):
    """Exit code 1 of one run: the others go on, the sweep ends with 1, the next call repeats that run alone."""
    call, script, calls = sweep
    script(**{"one__base__seed-0": {"exit": 1}})
    assert call("one", "--seeds", "1") == 1
    assert names(calls()) == ["one/base/0", "one/dapo/0"]
    assert "failed: " in capsys.readouterr().out
    script()
    assert call("one", "--seeds", "1") == 0
    assert names(calls())[2:] == ["one/base/0"]


def test_flags_that_train_refuses_end_the_sweep(sweep):
    call, script, calls = sweep
    script(**{"one__base__seed-0": {"exit": 2}})
    assert call("one", "--seeds", "1") == 2
    assert names(calls()) == ["one/base/0"]


def test_jobs_run_side_by_side(sweep):
    """Four runs of 0.3 s, two at a time: the first two start together, the third after one of them ended."""
    call, script, calls = sweep
    script(**{f"one__{v}__seed-{s}": {"wait": 0.3} for v in ("base", "dapo") for s in (0, 1)})
    assert call("one", "--seeds", "2", "--jobs", "2") == 0
    starts = sorted(record["start"] for record in calls())
    assert starts[1] - starts[0] < 0.25 < starts[2] - starts[0]


def test_a_folder_with_other_flags_is_refused(sweep, table, capsys):
    """The table was edited after the run: neither skipped nor overwritten."""
    call, _, calls = sweep
    assert call("one", "--seeds", "1") == 0
    object.__setattr__(table["one"], "setting", "--k 8")
    assert call("one", "--seeds", "1") == 2
    assert "--k 4, not 8" in capsys.readouterr().err and len(calls()) == 2


# ---- numbers


def test_interval_and_difference_by_hand():
    """1, 2, 3: mean 2, sd 1, t(2 degrees, 97.5 %) = 4.3027: 2 -+ 4.3027 / sqrt 3 = 2 -+ 2.4841. Paired by seed:
    (5 - 4), (7 - 5), (9 - 6), while seeds 3 and 8 have no partner."""
    assert ablation_report.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    mean, low, high = ablation_report.interval([0.7])
    assert mean == 0.7 and math.isnan(low) and math.isnan(high)
    found = ablation_report.difference({0: 5.0, 1: 7.0, 2: 9.0, 3: 0.0}, {0: 4.0, 1: 5.0, 2: 6.0, 8: 1.0})
    assert found == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841, 3), abs=1e-4)
    assert ablation_report.difference({0: 1.0}, {1: 1.0})[3] == 0


def test_the_rule_in_words():
    words = [ablation_report.verdict(0.1, low, high, "more", "less") for low, high in ((0.01, 0.2), (-0.1, 0.3), (-0.3, -0.1))]
    assert words == ["more", "not distinguishable", "less"]
    assert ablation_report.verdict(0.1, 0.0, 0.2, "more", "less") == "not distinguishable"
    assert "nothing" in ablation_report.verdict(0.1, math.nan, math.nan, "more", "less")


def test_compute_to_a_rate_by_hand():
    """.2 at 100, .6 at 300: .3 is reached at 100 + (.1 / .4) 200 = 150; the first crossing counts; .9 never is."""
    evals = [{"tokens": 0, "pass_rate": 0.1}, {"tokens": 100, "pass_rate": 0.2}, {"tokens": 300, "pass_rate": 0.6},
             {"tokens": 400, "pass_rate": 0.25}, {"tokens": 500, "pass_rate": 0.7}]  # fmt: skip
    assert ablation_report.compute_to(evals, 0.3, "tokens") == pytest.approx(150)
    assert ablation_report.compute_to(evals, 0.6, "tokens") == pytest.approx(300)
    assert ablation_report.compute_to(evals, 0.05, "tokens") == 0
    assert ablation_report.compute_to(evals, 0.9, "tokens") is None


def sigmoid_evals(A, C_mid=300, n=16, noise=0.0, seed=0):
    """Evaluations on R0 = .1, B = 2, every 50 tokens; device-hours are a thousandth of the tokens."""
    C = 50.0 * np.arange(n + 1)
    rates = ablation_report.fit_sigmoid.sigmoid(C, 0.1, A, 2.0, C_mid) + noise * np.random.default_rng(seed).normal(size=n + 1)
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
    return ablation_report.read(folder, variant, seed, ("tokens",))


def test_health_counts_by_hand(tmp_path):
    """Four steps: one truncated at 12 % (10 % itself is not above), one thrown away, one without rows; the pass rate
    ends .15 below its best."""
    steps = [
        {"step": 1, "rows": 5, "truncated": 0.12, "lag_mean": 1, "lag_max": 3, "ess": 0.5, "capped_positive": 0.1,
         "capped_negative": 0.3, "updated": 1, "logprob_gap": 2e-7},
        {"step": 2, "rows": 5, "truncated": 0.10, "lag_mean": 2, "lag_max": 2, "ess": 1.0, "capped_positive": 0.3,
         "capped_negative": 0.5, "updated": 0, "logprob_gap": 3e-4},
        {"step": 3, "truncated": 0.0, "lag_mean": 3, "lag_max": 5},
        {"step": 4, "rows": 5, "truncated": 0.0, "lag_mean": 2, "lag_max": 2, "ess": 0.9, "capped_positive": 0.2,
         "capped_negative": 0.4, "updated": 1},
    ]  # fmt: skip
    evals = sigmoid_evals(0.8)
    evals[-2]["pass_rate"] = evals[-1]["pass_rate"] = max(e["pass_rate"] for e in evals[:-2]) - 0.15
    found = ablation_report.health(result("a", 0, evals, tmp_path, steps))
    assert (found["lag"], found["lag_max"], found["gap"]) == (2.0, 5, 3e-4)
    assert (found["ess"], found["clipped +"], found["clipped -"]) == pytest.approx((0.8, 0.2, 0.4))
    run = result("b", 0, evals, tmp_path, steps)
    assert ablation_report.values([run], "truncated", "", 0.5) == {0: pytest.approx(0.055)}
    assert found["truncated"] == pytest.approx(0.055) and found["interrupted"] == 0.25
    assert [s.split(" in ")[0] for s in found["signs"][:-1]] == [
        "truncated above 10 %", "gradient not finite", "nothing to train on", "gap above 1e-4",
    ]  # fmt: skip
    assert all(" in 1 of 4 steps" in s for s in found["signs"][:-1]) and found["signs"][-1].startswith("fell by up to 0.15 (2 of")


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
    assert ablation_report.values([run], "fall", "tokens", 0.5) == {0: pytest.approx(0.4)}


def test_the_shared_ceiling_is_compares(tmp_path):
    """Ceilings .80 and .81 agree: both are refitted with .805 (to the fit's precision), and B is about the true 2."""
    runs = [result(name, 0, sigmoid_evals(A, n=24), tmp_path) for name, A in (("a", 0.80), ("b", 0.81))]
    shared, said = ablation_report.share_ceiling(runs, "tokens")
    assert shared == pytest.approx(0.805, abs=2e-3) and "agree" in said
    assert [r.shared["tokens"].A for r in runs] == [shared] * 2
    assert [r.shared["tokens"].B for r in runs] == pytest.approx([2.0, 2.0], abs=0.1)
    found = [ablation_report.values([r], "C_mid shared", "tokens", 0.5)[0] for r in runs]
    assert found == pytest.approx([300, 300], abs=8)
    assert ablation_report.share_ceiling(runs[:1], "tokens")[0] is None


def test_ceilings_that_differ_are_told_and_still_described(tmp_path):
    """.6 and .8: `compare` names the higher; the refits use the mean, .7."""
    runs = [result(name, 0, sigmoid_evals(A, n=24), tmp_path) for name, A in (("a", 0.6), ("b", 0.8))]
    shared, said = ablation_report.share_ceiling(runs, "tokens")
    assert shared == pytest.approx(0.7, abs=5e-3) and "b seed 0 is highest" in said
    assert [r.shared["tokens"].A for r in runs] == [shared] * 2


def test_extrapolation_counts_by_hand(tmp_path):
    """Two exact sigmoids: errors near 0, all inside. A third run falls to .2 after its first half: the error is what the
    fit predicted minus .2, and its 20 held-out points are outside: 40 of 60 inside."""
    evals = [sigmoid_evals(0.8, n=40) for _ in range(3)]
    for record in evals[2][21:]:
        record["pass_rate"] = 0.2
    runs = [result("a", i, e, tmp_path) for i, e in enumerate(evals)]
    found = ablation_report.extrapolation(runs)
    assert (found["runs"], found["inside"], found["points"]) == (3, 2, 60)
    assert found["covered"] == pytest.approx(40 / 60)
    runs[1].half.predictions[0] = runs[1].half.predictions[0]._replace(measured=0.99)
    assert [ablation_report.extrapolation([run])["too high"] for run in runs[1:]] == [0, 1]  # one ends above, one falls
    assert found["errors"][1] < 0.01 and found["errors"][2] == pytest.approx(evals[0][-1]["pass_rate"] - 0.2, abs=0.01)


def test_the_report_by_hand(table, tmp_path):
    """Two seeds. Base has A = .60 and .64, dapo .10 more at each seed, all measured to 5 C_mid, where 25/26 of the gain
    is reached: the difference at the end is .1 * 25/26 = .096 at both seeds, so it is told apart although the two
    intervals over seeds overlap widely. Tokens to .5 are C_mid sqrt(s / (1 - s)) with s = .4 / (A - .1): 600 and 507,
    dapo 424 and 387. Differences of -176 and -120: -148, sd 40, -+ 12.7 * 40 / sqrt 2: not told apart."""
    results = [result(v, s, sigmoid_evals(0.60 + 0.04 * s + extra, n=30), tmp_path)
               for v, extra in (("base", 0.0), ("dapo", 0.10)) for s in range(2)]  # fmt: skip
    text = ablation_report.report("one", table["one"], results, 0.5, "one.png", [(v, s) for v in ("base", "dapo") for s in range(3)])
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
    mean, low, high = ablation_report.interval(ends[0])
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
    found = ablation_report.other_predictions(result("a", 0, evals, tmp_path).half)
    short = result("b", 0, sigmoid_evals(0.8, n=7), tmp_path)  # 3 points and the start: enough for the sigmoid alone
    assert ablation_report.extrapolation([short])["runs"] == 1
    assert "power law" not in ablation_report.other_predictions(short.half)
    assert found["power law"] == pytest.approx(0.9 - 0.8 / math.sqrt(40), abs=1e-3)
    assert found["the pass rate stays"] == pytest.approx(0.9 - 0.4 * (1 / math.sqrt(19) + 1 / math.sqrt(20)))


def test_the_report_of_one_seed_claims_nothing(table, tmp_path):
    results = [result("base", 0, sigmoid_evals(0.5), tmp_path), result("dapo", 0, sigmoid_evals(0.9), tmp_path)]
    text = ablation_report.report("one", table["one"], results, 0.3, "one.png", [("base", 0), ("dapo", 0)])
    assert "nothing can be said" in text and "**higher**" not in text and "**needs" not in text


def test_report_alone_reads_what_is_finished(sweep, table, monkeypatch, tmp_path, capsys):
    """One of two variants is finished: its report and picture are written, and nothing is run. The pass rate is the
    comparison's own, or the one given."""
    call, _, calls = sweep
    object.__setattr__(table["one"], "pass_rate", 0.3)
    assert call("one", "--seeds", "1", "--only", "base") == 0
    monkeypatch.setattr(ablate, "write_report", WRITE_REPORT)
    assert call("one", "--seeds", "1", "--report", "--pictures", str(tmp_path / "docs")) == 0 and len(calls()) == 1
    assert (tmp_path / "docs/one.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "runs/one/report.md").read_text()
    assert text in capsys.readouterr().out and "1 of 2 runs finished" in text
    assert f"![one]({tmp_path / 'docs/one.png'})" in text and "tokens to 0.3" in text
    assert call("one", "--seeds", "1", "--report", "--pass-rate", "0.4") == 0
    assert "tokens to 0.4" in (tmp_path / "runs/one/report.md").read_text()


def test_the_report_names_the_budget_that_was_given(sweep, monkeypatch, tmp_path):
    """Not the one of the setting, which it took the place of."""
    call, _, _ = sweep
    monkeypatch.setattr(ablate, "write_report", WRITE_REPORT)
    assert call("one", "--seeds", "1", "--only", "base", "--budget", "90k") == 0
    text = (tmp_path / "runs/one/report.md").read_text()
    assert "Setting: `--k 4 --max_sampled_tokens 90000 --max_device_hours 0.0`" in text


def test_all_runs_every_comparison_once_and_predicts_each_run_once(sweep, monkeypatch, tmp_path, capsys):
    """One and two have three different runs a seed; `all` makes them, reports both, and counts 3 predictions, not 5."""
    call, _, calls = sweep
    monkeypatch.setattr(ablate, "write_report", WRITE_REPORT)
    assert call("all", "--seeds", "1") == 0
    assert names(calls()) == ["one/base/0", "one/dapo/0", "two/grpo/0"]
    text = (tmp_path / "runs/all/report.md").read_text()
    assert "all 3 runs" in text and "| sigmoid, all | 3 |" in text and (tmp_path / "runs/all/predictions.png").exists()
    assert all((tmp_path / f"runs/{name}/report.md").exists() for name in ("one", "two"))
    assert call("all", "--seeds", "1", "--dry-run") == 0 and len(calls()) == 3
