"""What only a GPU can show, from a single function to a whole job: `make gpu-check`, 20 minutes, up to the first failure.

    python -m pytest tests/gpu -m gpu -x -v              # all of it
    python -m pytest tests/gpu -m gpu -k "head or resume"
    python -m pytest tests/gpu -m gpu --dry-run          # the same code with small numbers, on a CPU

Each check runs in a process of its own, as one that fails may hold a GPU's memory, and none of its processes is left.
Every figure is shown with its bound at the end, and stands in the report of --junitxml.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from unittest import mock

import pytest
from checks import MARK, Check, Lacks, gpus, marked, none_left

LIMIT = 25 * 60.0  # seconds that a check may take; the slowest should take four minutes
PATIENCE = 10.0  # seconds in which the processes of a check may end by themselves


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dry-run", action="store_true", help="tests/gpu on a CPU, with small numbers")
    parser.addoption("--model", default="", help="tests/gpu: folder or hub id, in the place of a random Qwen3-0.6B")


@pytest.fixture
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Check:
    """The settings of a check, and what it found."""
    dry = request.config.getoption("--dry-run", False)
    if not dry and not gpus():
        pytest.skip("nvidia-smi finds no GPU, or CUDA_VISIBLE_DEVICES hides them; --dry-run takes the CPU")
    model = request.config.getoption("--model", "")
    return Check(tmp_path, dry, str(Path(model).resolve()) if model and Path(model).is_dir() else model)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A check is called in its own process. It has failed if it raises, or if one of its figures is out of bounds."""
    if pyfuncitem.get_closest_marker("gpu") is None:
        return None
    check = pyfuncitem.funcargs["check"]
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        in_own_process(pyfuncitem.obj, arguments, LIMIT, hidden=check.cpu)
    except Lacks as reason:
        pytest.skip(str(reason))
    finally:
        found = [(f["name"], f"{f['value']} {f['bound']}".strip()) for f in check.figures()]
        pyfuncitem.user_properties += found
    wrong = [f"{f['name']}: {f['value']}, must be {f['bound']}" for f in check.figures() if not f["met"]]
    assert not wrong, "; ".join(wrong)
    return True


def in_own_process(function: Callable, arguments: dict, limit: float, hidden: bool = False) -> None:
    """Calls a function in a new process and ends all processes that it leaves. Raises what it raises, TimeoutError after
    `limit` seconds, or BrokenProcessPool if its process dies; SIGTERM ends it as Ctrl-C does. `hidden`: no GPU is seen."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource_tracker.ensure_running()  # before the mark: it is not of this check
    environment = {MARK: f"{os.getpid()}-{time.monotonic_ns()}", "SPT_NOENV": "1"}  # vLLM's titles would overwrite it
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as executor:
        try:
            executor.submit(function, **arguments).result(limit)
            executor.shutdown()
            none_left(PATIENCE)
        finally:
            for pid in marked():  # an engine that outlives its check would keep its memory
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            none_left(PATIENCE)
            signal.signal(signal.SIGTERM, before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every figure with its bound."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties if "tests/gpu/" in report.nodeid else ():
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {name}: {value}")
