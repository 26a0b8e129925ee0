"""tests/gpu on a machine without a GPU: what is selected and skipped, that collecting it costs nothing, a check that raises,
dies or hangs, and the places of engines on several GPUs. `--dry-run` runs the checks themselves, which is slow."""

import math
import os
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from test_makefile import commands

from runtime import devices
from runtime.flags import parse_flags

pytestmark = pytest.mark.medium  # processes of its own

ROOT = Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"
sys.path.append(str(GPU))
COUNT = 19  # checks, each case of a table counted


def collected(*words: str) -> subprocess.CompletedProcess:
    """pytest in a process of its own, which sees no GPU."""
    command, environment = [sys.executable, "-m", "pytest", *words], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def harness(monkeypatch):
    """conftest.py of tests/gpu as a module."""
    spec = spec_from_file_location("gpu_conftest", GPU / "conftest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    return module


def test_without_a_gpu_every_check_is_skipped_and_says_why():
    done = collected("tests/gpu", "-m", "gpu", "-rs")
    assert done.returncode == 0 and f"{COUNT} skipped" in done.stdout, done.stdout
    assert "--dry-run takes the CPU" in done.stdout
    assert f"{COUNT} deselected" in collected("tests/gpu", "-m", "not gpu", "--collect-only").stdout


def test_to_collect_the_checks_costs_nothing():
    """No vLLM is imported, no CUDA context made."""
    code = "import sys, torch, test_1_parts, test_2_engine, test_3_runs, conftest\n"
    code += "assert not {'vllm', 'transformers'} & sys.modules.keys() and not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=GPU, check=True)


def test_make_gpu_check_takes_the_gpus_environment_and_stops_at_the_first_failure(tmp_path):
    said = commands("gpu-check", tmp_path, nvidia=True)
    assert ".venv/bin/pip install -q -r requirements.txt" in said and "-cpu" not in said
    assert ".venv/bin/python -m pytest tests/gpu -m gpu -x -v" in said and "--junitxml runs/gpu-check.xml" in said
    assert "nvidia-smi -L" in said  # which fails, and make with it, where there is none


# ------------------------------------------------------------------------------------- one process for each, and figures

STAND_INS = """
import os, signal, subprocess, sys, time
from checks import Lacks

def raises(check):
    check.figure("before", 1.0)
    raise ValueError("no such thing")

def lacks(check):
    raise Lacks("it needs two GPUs")

def dies(check):
    check.figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)

def leaves_one(check):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    check.figure("left", left.pid)
    check.figure("pid", os.getpid())
    check.figure("GPUs", len(os.environ.get("CUDA_VISIBLE_DEVICES", "0")))

def stopped(check):
    leaves_one(check)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)

def hangs(check):
    leaves_one(check)
    time.sleep(600)
"""


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Functions in the place of checks."""
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stand_ins", raising=False)
    import stand_ins

    return stand_ins


RAISED = {"raises": "ValueError", "lacks": "Lacks", "dies": "BrokenProcessPool", "hangs": "TimeoutError"}
RAISED |= {"stopped": "KeyboardInterrupt"}


@pytest.mark.parametrize(("name", "error"), RAISED.items())
def test_what_a_check_raises_is_raised(harness, stand_ins, tmp_path, name, error):
    """What it measured before is kept. No process is left, those in sessions of their own among them, although it would
    sleep for ten minutes."""
    check = harness.Check(tmp_path, True, "")
    with pytest.raises(BaseException) as raised:
        harness.in_own_process(getattr(stand_ins, name), {"check": check}, 20.0 if name == "hangs" else 120.0)
    assert type(raised.value).__name__ == error
    names = [figure["name"] for figure in check.figures()]
    first = {"lacks": [], "hangs": ["left"], "stopped": ["left"]}.get(name, ["before"])
    assert names[:1] == first or (name == "hangs" and not names)  # a busy machine takes 20 s to start a process
    for figure in check.figures():
        assert figure["name"] != "left" or not runs(figure["value"])


def test_a_check_has_a_process_of_its_own_and_leaves_none(harness, stand_ins, tmp_path):
    check = harness.Check(tmp_path, True, "")
    harness.in_own_process(stand_ins.leaves_one, {"check": check}, 120.0, hidden=True)
    left, pid, visible = (figure["value"] for figure in check.figures())
    assert pid != os.getpid() and visible == 0 and harness.MARK not in os.environ
    assert not runs(left)


def runs(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.exists() and file.read_bytes() != b""


def test_a_figure_keeps_its_bounds(harness, tmp_path):
    """NaN keeps none."""
    check = harness.Check(tmp_path, False, "")
    for value in (math.nan, 1.0, 0.9, 0.5):
        check.figure("gap", value, above=0.5, below=1.0)
    check.require("it is there", [])
    check.figure("speed", 1.0)
    assert [figure["met"] for figure in check.figures()] == [False, False, True, False, False, True]
    assert check.figures()[0]["bound"] == "above 0.5 and below 1"


# ---------------------------------------------------------------------------------------------------------- several GPUs


@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_engine_finds_a_place(harness, count, monkeypatch):
    """The checks for several GPUs have flags of runs that can be placed on so many; the trainer has the first."""
    import test_2_engine
    import test_3_runs

    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "check_ray", lambda: None)  # test_devices.py has it

    def placed(flags: str) -> tuple:
        return devices.place(parse_flags(shlex.split(flags), ""))[:2]

    for case in ("tied", "untied"):
        assert placed(test_2_engine.engines_elsewhere(case, count)) == ("nccl", [1])
    both = ("file", [0, 1]) if count == 2 else ("nccl", [1, 2])
    assert placed(test_2_engine.engines_elsewhere("tensor parallel", count)) == both
    assert placed(test_2_engine.RAY) == ("nccl", [])
    if count > 2:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert placed(test_3_runs.engines_on_the_rest(count)) == ("nccl", list(range(2, count)))


def test_every_figure_is_shown_with_its_bound(tmp_path):
    report = tmp_path / "report.xml"
    done = collected("tests/gpu", "-m", "gpu", "--dry-run", "-k", "machine", f"--junitxml={report}")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert re.search(r"^test_machine: free disk, GB: [\d.]+ above 1$", done.stdout, re.M)
    assert re.search(r'<property name="free disk, GB" value="[\d.]+ above 1"', report.read_text())


@pytest.mark.slow
def test_the_dry_run(tmp_path):
    """All of them on this CPU, with everything but a device: the code itself works. Left out are a tied head behind the
    stand-ins for GPUs, and Ray."""
    report = tmp_path / "report.xml"
    folders = f"--basetemp={tmp_path / 'all'}", f"--junitxml={report}"
    done = collected("tests/gpu", "-m", "gpu", "--dry-run", "-x", *folders)
    assert done.returncode == 0 and f"{COUNT - 2} passed, 2 skipped" in done.stdout, done.stdout
    assert 'name="largest gap, nats" value="' in report.read_text()
