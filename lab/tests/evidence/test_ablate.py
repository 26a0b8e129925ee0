"""lab/evidence/ablate.py: which runs are made and which are not made again. A stand-in takes the place of train.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ablate
import pytest
from comparisons import COMPARISONS, Comparison

from runtime.folder import signed

pytestmark = pytest.mark.medium

STAND_IN = (
    f"""
WHOLE = {json.dumps(signed({"files": {}}))!r}
"""
    + """
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
    (folder / "checkpoints/step-000003/state.json").write_text(WHOLE)
    sys.exit(130)

signal.signal(signal.SIGINT, stop)
time.sleep(orders.get("wait", 0))
rows = [{"step": i, "tokens": 1000 * i, "device_hours": i, "flops": i, "pass_rate": 0.05 * i, "n_prompts": 512,
         "n_samples": 2} for i in range(13)]
(folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
sys.exit(orders.get("exit", 0))
"""
)


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
    call.script = script
    call.calls = lambda: Path(f"{train}.calls").read_text().splitlines()
    return call


@pytest.mark.parametrize("name", [name for name, c in COMPARISONS.items() if not c.only_at])
def test_every_row_is_accepted_by_train(name, tmp_path):
    """Flags that train.py refuses, or rounds, would show only after minutes. Baselines are rows."""
    from runtime.flags import check_flags, parse_flags

    for job in ablate.plan(name, tmp_path, 1, [], 900):
        flags = parse_flags([*job.flags, "--output_dir", str(job.folder)], "about")
        assert not [note for note in check_flags(flags) if "rounded" in note or "does nothing" in note]
        assert flags.max_sampled_tokens == 900
    c = COMPARISONS[name]
    assert {*c.against, *c.against.values(), *c.paper} <= set(c.variants)


def test_finished_runs_are_never_run_again(program, tmp_path, capsys):
    """Two variants and two seeds, then a third seed of one variant; then nothing is left, and table and picture are
    made."""
    assert program("--seeds", "2", "--jobs", "2") == 0
    assert len(program.calls()) == 4
    assert program("--seeds", "3", "--only", "dapo") == 0
    assert program.calls()[4:] == ["begin dapo seed-2"]
    capsys.readouterr()
    assert program("--seeds", "2") == 0
    output = capsys.readouterr().out
    picture = tmp_path / "runs" / "one" / "overlay.png"
    assert f"picture: {picture}" in output and picture.read_bytes()[:4] == b"\x89PNG"
    assert "4 runs are finished, 0 are to be run" in output and len(program.calls()) == 5
    (dapo,) = [line.split() for line in output.splitlines() if line.split()[0] == "dapo"]
    assert dapo[1:3] == ["2", "0"] and "+0.000" in dapo  # two seeds; a straight line has no ceiling
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
    assert program("--seeds", "1", "--budget", "90k") == 2
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
    assert sorted(program.calls()) == [
        f"{verb} {name} seed-0" for verb in ("begin", "resume") for name in ("base", "dapo")
    ]


def test_budgets():
    values = [ablate.tokens(text) for text in ("800k", "1.5M", "900")]
    assert values == [800_000, 1_500_000, 900]
    for bad in ("0", "-5k", "many", "nan", "0.05h", "1.2.3", ""):
        with pytest.raises(ValueError):
            ablate.tokens(bad)
