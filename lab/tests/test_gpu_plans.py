"""lab/bench/gpu.py on a CPU: every plan runs in tiny sizes with the torch engine, and what fails or hangs stops nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest
from gpu_plans import Job, groups_of

ROOT = Path(__file__).resolve().parents[2]


def records(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def job(name, code, limit=30.0):
    return Job(name, [sys.executable, "-c", code], limit)


def driven(out, jobs, seconds=60.0):
    """The driver after one group of jobs."""
    driver = gpu.Driver(out, seconds)
    driver.finish(driver.start(jobs))
    driver.close()
    return driver


def test_a_failure_and_a_hang_are_told_and_stop_nothing(tmp_path):
    """The one that hangs is ended at its limit; figures that came before are kept, also from a line beside others."""
    figure = (
        """import json; print("\\n" + json.dumps({"figure": "speed", "value": VALUE, "holds": True}), flush=True)"""
    )
    jobs = [
        job("right", figure.replace("VALUE", "3")),
        job("wrong", f"{figure.replace('VALUE', '2')}; raise SystemExit('no engine')"),
        job("slow", f"{figure.replace('VALUE', '1')}; import time; time.sleep(60)", limit=1.5),
    ]
    started = time.monotonic()
    driver = driven(tmp_path, jobs)
    assert time.monotonic() - started < 20 and driver.failed
    verdicts = {r["job"]: r["figure"] for r in records(tmp_path) if "seconds" in r}
    assert verdicts == {"right": "done", "wrong": "failed with exit code 1", "slow": "too slow"}
    assert {r["job"]: r["value"] for r in records(tmp_path) if r["figure"] == "speed"} == {
        "right": 3,
        "wrong": 2,
        "slow": 1,
    }
    assert "| slow | too slow | seconds" in driver.table()


def test_figures_of_one_name_are_one_row(tmp_path):
    """Of 2 and 3, one outside its bounds, the table says so."""
    line = """print('{"figure": "gap", "value": %d, "holds": %s}')"""
    driver = driven(tmp_path, [job("check", "; ".join([line % (2, "true"), line % (3, "false")]))])
    assert "| check | gap | 2 from 2 to 3, outside its bounds |" in driver.table().splitlines()


def test_the_use_of_the_card_is_that_of_the_time(tmp_path, monkeypatch):
    """Of three lines two lie in the span: 40 and 60 % busy, 2000 and 3000 MiB."""
    times = [1_000.0, 1_001.0, 1_002.0]
    stamps = [time.strftime("%Y/%m/%d %H:%M:%S.000", time.localtime(t)) for t in times]
    lines = zip(stamps, (40, 60, 100), (2000, 3000, 9000), strict=True)
    (tmp_path / "smi.csv").write_text("".join(f"{at}, {busy}, {used}\n" for at, busy, used in lines) + "2026/1")
    assert gpu.use_of_card(tmp_path / "smi.csv", 999.5, 1001.5) == {"card_busy": 0.5, "card_GB": 3.1}


def test_jobs_that_measure_have_the_card_to_themselves(tmp_path):
    """Plans joined by + are one group; each job of `runs` is one; a tree that is not there is an error."""
    groups = groups_of(["weights+faults", "both@old", "both", "both@old", "runs"], {"old": tmp_path}, tmp_path, "")
    assert [len(group) for group in groups] == [7, *[1] * (len(groups) - 1)]
    assert [groups[n][0].name for n in (1, 2, 3)] == ["both@old", "both", "both@old-2"]
    assert [groups[n][0].root for n in (1, 2)] == [tmp_path, ROOT]
    assert all(job.limit <= 300 for group in groups for job in group)
    with pytest.raises(SystemExit, match="the plans are"):
        groups_of(["both@new"], {}, tmp_path, "")


@pytest.mark.medium
def test_every_plan_runs(tmp_path):
    """As `make -C lab gpu-check` runs them, but on a CPU, with fewer tests, and their imports made once."""
    command = [sys.executable, "lab/tests/forked_jobs.py", "--dry", "torch", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    jobs = {record["job"] for record in records(tmp_path) if record["figure"] == "done"}
    assert {job.split("-")[0] for job in jobs} == {"shapes", *gpu.DEFAULT}
    figures = {record["figure"]: record for record in records(tmp_path)}
    assert figures["steps 16 to 20"]["s_a_step"] > 0 and figures["turn of 8"]["tokens_s"] > 0
