"""lab/bench/gpu.py on a CPU: its plans run in tiny sizes with the torch engine, and what fails or hangs stops nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest

ROOT = Path(__file__).resolve().parents[2]


def records(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_failure_and_a_hang_are_told_and_stop_nothing(tmp_path, capsys):
    """The one that hangs is ended at its limit; figures that came before are kept, also from a line beside others."""
    figure = """import json, time; print("\\n" + json.dumps({"figure": "speed", "value": VALUE}), flush=True)"""
    ends = {"right": "", "wrong": "; raise SystemExit('no engine')", "slow": "; time.sleep(60)"}
    codes = {name: figure.replace("VALUE", str(number)) + ends[name] for number, name in enumerate(ends)}
    jobs = [gpu.Job(name, [sys.executable, "-c", code], 1.5 if name == "slow" else 30) for name, code in codes.items()]
    started, driver = time.monotonic(), gpu.Driver(tmp_path, 60)
    driver.finish(driver.start(jobs))
    driver.close()
    assert time.monotonic() - started < 20 and driver.failed
    verdicts = {r["job"]: r["figure"] for r in records(tmp_path) if "seconds" in r}
    assert verdicts == {"right": "done", "wrong": "failed with exit code 1", "slow": "too slow"}
    speeds = {r["job"]: r["value"] for r in records(tmp_path) if r["figure"] == "speed"}
    assert speeds == {"right": 0, "wrong": 1, "slow": 2}
    printed = capsys.readouterr().out
    assert "| slow | speed | value 2 |\n" in printed and "\nno engine\n" in printed


def test_jobs_that_measure_have_the_card_to_themselves(tmp_path):
    """Plans joined by + are one group; `vllm` is what another checkout calls its engine; a tree that is not there is an
    error."""
    names = ["weights+faults", "both@old", "both", "both@old"]
    groups = gpu.groups_of(names, {"old": tmp_path}, tmp_path, "")
    assert [len(group) for group in groups] == [7, 1, 1, 1]
    assert [group[0].name for group in groups[1:]] == ["both@old", "both", "both@old-2"]
    assert [group[0].root for group in groups[1:3]] == [tmp_path, ROOT]
    engines = [group[0].command[group[0].command.index("--engine") + 1] for group in groups[1:3]]
    assert engines == ["vllm", "lab.fast_vllm:FastEngine"]
    assert all(job.limit <= 300 for group in groups for job in group)
    with pytest.raises(SystemExit, match="the plans are"):
        gpu.groups_of(["both@new"], {}, tmp_path, "")


@pytest.mark.slow  # minutes: run it before a machine is rented
def test_the_plans_run(tmp_path):
    """As `make -C lab gpu-check` runs them, but on a CPU and with fewer tests."""
    plans = "weights+faults+auto+both head@before prompts".split()
    command = [sys.executable, "lab/bench/gpu.py", "--dry", "torch", "--out", str(tmp_path), *plans]
    command += ["--tree", f"before={ROOT}"]
    environment = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    names = {record["job"].split("-")[0] for record in records(tmp_path) if record["figure"] == "done"}
    assert names == {"models", "weights", "faults", "auto", "both", "head@before", "prompts"}
    figures = {record["figure"]: record for record in records(tmp_path)}
    assert figures["steps 16 to 20"]["s_a_step"] > 0 and figures["turn of 8"]["tokens_s"] > 0
    assert figures["difference of the gradients, float32"]["value"] < 1e-5
