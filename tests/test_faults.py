"""The real job under SIGKILL, SIGTERM and Ctrl-C: real vLLM, the built-in task, the whole recipe. Slow."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import records

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def start(folder, *extra):
    """The training process of a fresh run in `folder`, or with --resume of an old one."""
    command = [sys.executable, "train.py", *extra] if "--resume" in extra else [
        sys.executable, "train.py", "--output_dir", str(folder), *extra]  # fmt: skip
    with (folder.parent / "log.txt").open("a") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def family(pid):
    """Process ids of all descendants."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return found + [p for child in found for p in family(child)]


def alive(pid):
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids):
    """No process outlives its trainer by more than a moment (a second on an idle machine)."""
    end = time.monotonic() + 20
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.1)


def steps_of(folder):
    return [r["step"] for r in records.Folder(folder).read("metrics.jsonl") if "step" in r]


def wait_until(condition, process, timeout=240.0):
    """Polls; returns False if the process ended first."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)
    return True


def check_run(folder, steps, k):
    """Every step once, lag within k, the curriculum's history equal to a recount of what each step consumed."""
    assert steps_of(folder) == list(range(1, steps + 1))
    metrics = [r for r in records.Folder(folder).read("metrics.jsonl") if "step" in r]
    assert max(r["lag_max"] for r in metrics) <= k
    recount = {}
    for record in records.Folder(folder).read("groups.jsonl"):
        for key, correct, rollouts in record["groups"]:
            old = recount.get(key, (0, 0))
            recount[key] = (old[0] + correct, old[1] + rollouts)
    _, state = records.Folder(folder).newest_checkpoint()
    assert {key: (correct, n) for key, correct, n in state["history"]["counts"]} == recount
    assert state["step"] == steps
    evaluated = Counter(r["step"] for r in records.Folder(folder).read("eval.jsonl"))
    assert set(evaluated.values()) == {1}


def test_twenty_kills(tmp_path, capsys):
    """SIGKILL at 20 random moments (start-up, sampling, training, saving, evaluation), resumed each time."""
    folder, steps, draw, table = tmp_path / "run", 60, random.Random(7), []
    flags = ["--max_steps", str(steps), "--save_every", "3", "--eval_every", "10", "--eval_problems", "256"]
    process = start(folder, *flags)
    for kill in range(20):
        began, known = time.monotonic(), len(steps_of(folder)) if folder.exists() else 0
        kind = ["steps", "save", "evaluation", "start"][(0, 1, 0, 2, 0, 1, 0, 3)[kill % 8]]
        if kind == "start":
            time.sleep(draw.uniform(1.0, 8.0))
        else:
            goal, last = known + draw.randint(1, 4), (steps_of(folder) or [0])[-1] if folder.exists() else 0
            target = {
                "steps": lambda: folder.exists() and len(steps_of(folder)) >= goal,
                "save": lambda: any((folder / "checkpoints").glob("unfinished-*")),
                "evaluation": lambda: folder.exists() and (steps_of(folder) or [0])[-1] // 10 > last // 10,
            }[kind]
            if not wait_until(target, process):
                break
            time.sleep(0.0 if kind == "save" else draw.uniform(0.0, 1.0))
        relatives = family(process.pid)
        process.kill()
        process.wait()
        wait_for_end(relatives)
        found = records.Folder(folder).newest_checkpoint() if folder.exists() else None
        table.append((kill + 1, kind, f"{time.monotonic() - began:.0f} s", (steps_of(folder) or [0])[-1] if folder.exists()
                      else 0, found[1]["step"] if found else "-"))  # fmt: skip
        process = start(folder, "--resume", str(folder)) if found else start(folder, *flags, "--overwrite", "true")
    assert process.wait(timeout=400) == 0
    check_run(folder, steps, k=8)
    rates = [r["pass_rate"] for r in records.Folder(folder).read("eval.jsonl")]
    whole = tmp_path / "whole"
    assert start(whole, *flags).wait(timeout=400) == 0
    undisturbed = [r["pass_rate"] for r in records.Folder(whole).read("eval.jsonl")]
    with capsys.disabled():
        print("\nkill | moment | after | step reached | resumed from step")
        for row in table:
            print(" | ".join(map(str, row)))
        print("pass rates:", rates, "undisturbed:", undisturbed)
    assert len(table) == 20
    assert abs(rates[-1] - undisturbed[-1]) < 0.15  # one run's noise at this steep part of the curve
    assert not list(Path("/dev/shm").glob(f"scalerl-weights-{process.pid}-*"))


@pytest.mark.parametrize("moment", ["generation", "evaluation", "start"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_leaves_a_whole_checkpoint(tmp_path, moment, number):
    """Exit code 128 + signal within 30 s, a whole checkpoint (none before the first step), no child left."""
    folder = tmp_path / "run"
    process = start(folder, "--max_steps", "40", "--eval_every", "4", "--save_every", "0")
    conditions = {
        "generation": lambda: folder.exists() and len(steps_of(folder)) >= 2,
        "evaluation": lambda: folder.exists() and len(steps_of(folder)) >= 4,
        "start": lambda: (folder / "config.json").exists(),
    }
    assert wait_until(conditions[moment], process)
    relatives, began = family(process.pid), time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert time.monotonic() - began < 30
    wait_for_end(relatives)
    found = records.Folder(folder).newest_checkpoint()
    assert found is not None and found[1]["step"] == len(steps_of(folder))
    json.loads((folder / "config.json").read_text())
