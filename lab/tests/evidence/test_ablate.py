"""lab/evidence/ablate.py: which runs are made and which are not made again, and how folders become published rows. A
stand-in takes the place of train.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ablate
import pandas as pd
import pytest
import runs
from comparisons import COMPARISONS, Comparison

pytestmark = pytest.mark.medium

STAND_IN = """
import json, os, pathlib, signal, sys, time
flags = dict(zip([word[2:] for word in sys.argv[1::2]], sys.argv[2::2]))
folder = pathlib.Path(flags.get("resume") or flags["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
script = pathlib.Path(__file__).with_suffix(".json")
orders = json.loads(script.read_text()).get(folder.parent.name, {})
with open(__file__ + ".calls", "a") as file:
    file.write(" ".join(["resume" if "resume" in flags else "begin", *folder.parts[-2:]]) + "\\n")
(folder / "config.json").write_text(json.dumps({"loss": "dapo", "batch_prompts": 4, "rollouts": 2}))

def stop(number, frame):
    (folder / "checkpoints/step-000003").mkdir(parents=True)
    sys.exit(130)

signal.signal(signal.SIGINT, stop)
time.sleep(orders.get("wait", 0))
rows = [{"step": i, "tokens": 1000 * i, "device_hours": i, "flops": i, "pass_rate": 0.05 * i, "n_prompts": 512,
         "n_samples": 2} for i in range(13)]
(folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
sys.exit(orders.get("exit", 0))
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Called with words, it is ablate.py on the stand-in; `script` sets what the stand-in does in a variant, and `calls`
    are the runs that it made."""
    train = tmp_path / "train.py"
    train.write_text(STAND_IN)
    monkeypatch.setattr(ablate, "TRAIN", train)
    monkeypatch.setitem(COMPARISONS, "one", Comparison("first", {"base": "", "dapo": "--loss dapo"}, setting="--k 4"))

    def call(*words):
        return ablate.main(["one", "--output", str(tmp_path / "runs"), *words])

    def script(orders):
        train.with_suffix(".json").write_text(json.dumps(orders))

    script({})
    call.script, call.report = script, ablate.report
    monkeypatch.setattr(ablate, "report", lambda *_: None)  # seconds of fits
    call.calls = lambda: Path(f"{train}.calls").read_text().splitlines()
    return call


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_row_is_accepted_by_train(name, tmp_path):
    """Flags that train.py refuses would show only after a while. Baselines are rows."""
    from runtime.flags import check_flags, parse_flags

    for job in ablate.plan(name, tmp_path, 1, [], 900):
        flags = parse_flags([*job.flags, "--output_dir", str(job.folder)], "about")
        check_flags(flags)  # raises
        assert flags.max_sampled_tokens == 900
    c = COMPARISONS[name]
    assert {*c.against, *c.against.values()} <= set(c.variants)


def test_finished_runs_are_never_run_again(program, monkeypatch, tmp_path, capsys):
    """Two variants and two seeds, then a third seed of one variant; then nothing is left, and table and picture are
    made."""
    assert program("--seeds", "2", "--jobs", "2") == 0
    assert len(program.calls()) == 4
    assert program("--seeds", "3", "--only", "dapo") == 0
    assert program.calls()[4:] == ["begin dapo seed-2"]
    monkeypatch.setattr(ablate, "report", program.report)
    assert program("--only", "dapo") == 0 and "fewer than two variants" in capsys.readouterr().out
    assert program("--seeds", "2") == 0
    output = capsys.readouterr().out
    picture = tmp_path / "runs" / "one.png"
    assert f"picture: {picture}" in output and picture.read_bytes()[:4] == b"\x89PNG"
    assert "4 runs are finished, 0 are to be run" in output and len(program.calls()) == 5
    (dapo,) = [line.split() for line in output.splitlines() if line.split()[0] == "dapo"]
    assert dapo[1:4] == ["2", "0", "0.575"]  # two seeds, no fall; the last two rates are .55 and .6
    assert program("--only", "nothing") == 2


def test_a_failed_run_is_tried_again_and_a_refused_flag_ends_the_sweep(program, capsys):
    program.script({"base": {"exit": 1}})
    assert program("--seeds", "1") == 1 and "exit code 1, see" in capsys.readouterr().out
    program.script({"base": {"exit": 2}})
    assert program("--seeds", "2") == 2
    program.script({})
    assert program("--seeds", "1") == 0
    assert program.calls() == [f"begin {name} seed-0" for name in ("base", "dapo", "base", "base")]


def test_a_folder_with_other_flags_is_refused(program, capsys):
    """Neither taken for the run nor overwritten."""
    assert program("--seeds", "1") == 0
    assert program("--seeds", "1", "--budget", "90_000") == 2
    assert "holds a run with --k 4" in capsys.readouterr().err and len(program.calls()) == 2


def test_ctrl_c_ends_the_runs_with_checkpoints_and_the_next_call_resumes_them(program, tmp_path):
    """It reaches both runs, no other begins, and the next call goes on from their checkpoints."""
    program.script({"base": {"wait": 20}, "dapo": {"wait": 20}})
    words = ["one", "--output", str(tmp_path / "runs"), "--seeds", "2", "--jobs", "2"]
    code = f"""import signal, sys, pathlib, ablate, comparisons
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, a shell has switched it off
ablate.TRAIN = pathlib.Path({str(ablate.TRAIN)!r})
comparisons.COMPARISONS["one"] = comparisons.Comparison("", {{"base": "", "dapo": "--loss dapo"}}, setting="--k 4")
sys.exit(ablate.main({words}))"""
    environment = os.environ | {"PYTHONPATH": str(Path(ablate.__file__).parent)}
    sweep = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    while len(list((tmp_path / "runs/one").glob("*/seed-0/config.json"))) < 2:
        assert sweep.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(sweep.pid, signal.SIGINT)
    assert sweep.wait() == 130
    program.script({})
    assert program("--seeds", "1") == 0
    calls = [f"{verb} {name} seed-0" for verb in ("begin", "resume") for name in ("base", "dapo")]
    assert sorted(program.calls()) == calls


# ------------------------------------------------------------------------------------------------- from run folders


def run_folder(output, name, evals=(), steps=(), exit_code=0):
    """A run that ablate.py made."""
    folder = output / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"batch_prompts": 32, "rollouts": 16}))
    for file, records in (("eval.jsonl", evals), ("metrics.jsonl", [{"config": {}}, *steps])):
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.with_suffix(".json").write_text(json.dumps({"flags": ["--loss", "dapo"], "exit_code": exit_code}))
    return folder


def evaluation(step, pass_rate):
    compute = {"step": step, "tokens": 1000 * step, "device_hours": 0.0123456789 * step, "flops": 123456 * step}
    return compute | {"pass_rate": pass_rate, "n_prompts": 512, "n_samples": 2, "truncated": 0.5}


def test_a_row_by_hand(tmp_path):
    """Evaluations at steps 0, 2 and 3. Steps 1 and 2 have lags 1 and 2 (largest 3 and 4), entropies .5 and .3, and one
    probe of two, at 2e-7. They keep 128 and 0 of the 32 * 16 = 512 rollouts: an eighth. Step 3 has no probe, and a line
    that is still being written does not count."""
    step = dict(rows=128, lag_mean=1.0, lag_max=3, ess=0.9, entropy=0.5, interrupted=0.25, truncated=0.0)
    step |= dict(capped_positive=0.01, capped_negative=0.02)
    steps = [
        step | {"step": 1, "logprob_gap": 2e-7, "mismatch_rms": 1e-7, "staleness_rms": 0.03},
        {"step": 2, "lag_mean": 2.0, "lag_max": 4, "entropy": 0.3, "interrupted": 0.75, "truncated": 0.1},
        step | {"step": 3, "rows": 512},
    ]
    apart = {"data_sets": {name: {"pass_rate": rate} for name, rate in (("a", 2 / 512), ("b", 6 / 512), ("c", 1.0))}}
    correct = {"correct": [0, 1, 2, 2]}  # of two samples: three of four prompts have a right one, two no wrong one
    evals = [evaluation(0, 0.0), evaluation(2, 100 / 1024) | correct, evaluation(3, 0.5) | apart]
    folder = run_folder(tmp_path, "law/dapo-0.26/seed-12", evals, steps)
    with (folder / "eval.jsonl").open("a") as file:
        file.write('{"step": 3, "n_sam')
    rows = ablate.collect(tmp_path)
    assert tuple(rows) == runs.COLUMNS
    zero, first, second = rows.to_dict("records")
    of_the_run = ["law/dapo-0.26/seed-12", "law", "dapo-0.26", "12", "--loss dapo", "finished"]
    assert [first[name] for name in runs.OF_THE_RUN] == of_the_run
    measured = ["2", "2000", "0.0246914", "2.469e+05", "0.09766", "1024", "0.75000", "0.50000", "", ""]
    assert [first[name] for name in runs.MEASURED] == measured
    logged = ["1.5", "4", "0.9", "2e-07", "0.4", "0.5", "0.05", "0.125", "0.01", "0.02", "1e-07", "0.03"]
    assert [first[name] for name in runs.LOGGED] == logged
    assert [second[name] for name in ("best", "gap", "kept", "lag_max")] == ["", "", "1", "3"]
    assert (second["set_1"], second["set_2"]) == ("0.00391", "0.01172")
    assert {zero[name] for name in runs.LOGGED} == {""} and zero["pass_rate"] == "0.00000"


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "finished"), (1, "failed (exit code 1)"), (None, "unfinished"), (130, "unfinished"), (-2, "unfinished")],
)
def test_the_state_of_a_run(tmp_path, code, state):
    """Popen's code for a signal is its negative number. A run that failed before it was evaluated has a row."""
    (run_folder(tmp_path, "law/a/seed-0", exit_code=code) / "config.json").unlink()
    (run,) = runs.runs_of(ablate.collect(tmp_path)).values()
    assert run.state == state and run.rates.size == 0


def test_published_runs_stay_and_come_back(tmp_path, capsys):
    """Of two runs that are published one is made again. Seed 10 comes after seed 2. What is not logged is NaN, the same
    rows are the same bytes in any order, and a run that failed is in no comparison."""
    results = tmp_path / "results"
    results.mkdir()
    run_folder(tmp_path / "old", "one/base/seed-2", [evaluation(0, 0.1), evaluation(1, 0.123456)])
    run_folder(tmp_path / "old", "one/base/seed-10", [evaluation(0, 0.25)])
    runs.write_rows(ablate.collect(tmp_path / "old"), results / "curves.csv.gz")
    listed = [("one", "base", 2, "one/base/seed-2"), ("two", "same", 2, "one/base/seed-2")]
    pd.DataFrame(listed, columns=[*runs.MEMBER, "run"]).to_csv(results / "runs.csv", index=False)
    run_folder(tmp_path / "new", "one/base/seed-10", [evaluation(0, 0.5)])
    run_folder(tmp_path / "new", "one/dapo/seed-0", exit_code=1)
    ablate.publish(tmp_path / "new", results)
    assert "failed (exit code 1): one/dapo/seed-0, 0 evaluations" in capsys.readouterr().out
    groups = runs.members(results)
    assert groups.keys() == {"one", "two"} and groups["one"].keys() == {"base"}
    two, ten = groups["one"]["base"]
    assert (two.seed, ten.seed, ten.rates) == (2, 10, [0.5])
    assert groups["two"]["same"][0].name == two.name
    assert two.rates == pytest.approx([0.1, 0.12346], abs=1e-9)
    rows = runs.read_rows(results / "curves.csv.gz")
    runs.write_rows(rows[::-1], tmp_path / "again.csv.gz")
    assert (tmp_path / "again.csv.gz").read_bytes() == (results / "curves.csv.gz").read_bytes()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert ablate.main(["--publish", str(tmp_path)]) == 2
    assert "holds no COMPARISON/VARIANT/seed-N" in capsys.readouterr().err
