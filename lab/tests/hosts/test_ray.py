"""A run on two hosts: Ray's head and train.py on the one, the engine's worker on the other."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from two_hosts import LACKS, Host, hosts

from runtime.folder import Folder

FLAGS = "--engine lab.hosts:RayEngine --batch_prompts 8 --rollouts 8 --held_out 64 --eval_every 10 --save_every 10"
Pair = Sequence[Host]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """The trainer's host, with Ray's head, and the engine's. Where hosts cannot be made, CI fails, and elsewhere these
    tests are left out."""
    if LACKS and "CI" not in os.environ:
        pytest.skip(f"tests of several hosts need {LACKS}")
    assert not LACKS, f"tests of several hosts need {LACKS}"
    with hosts(2) as (a, b):
        a.ray("--head", "--num-gpus=0", "--include-dashboard=false")
        b.ray(f"--address={a.address}:6379", "--num-gpus=1")
        yield a, b


class Launched:
    """train.py on the first host, with an engine that Ray places."""

    def __init__(self, pair: Pair, folder: Path, *flags: Any):
        self.folder, self.log = folder, folder.with_suffix(".log")
        place = [] if "--resume" in flags else ["--output_dir", folder, *FLAGS.split()]
        with self.log.open("a") as log:
            self.process = pair[0].start(sys.executable, "train.py", *place, *flags, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def steps(self) -> list[dict[str, Any]]:
        if not (self.folder / "metrics.jsonl").exists():
            return []
        return [record for record in Folder(self.folder).read("metrics.jsonl") if "step" in record]

    def wait(self, condition: Callable[[], bool], seconds: float = 500) -> None:
        """Waits until `condition` holds, or fails with what the run printed."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.output[-3000:]
            time.sleep(0.1)

    def wait_for_steps(self, count: int) -> None:
        """Until it has made `count` steps more than now."""
        goal = len(self.steps()) + count
        self.wait(lambda: len(self.steps()) >= goal or self.process.poll() is not None)
        assert len(self.steps()) >= goal, self.output[-3000:]

    def end(self) -> int:
        """Its exit code."""
        self.wait(lambda: self.process.poll() is not None)
        return self.process.returncode


def worker(pair: Pair) -> int:
    """The engine's process on the second host."""
    [pid] = [pid for pid, line in pair[1].processes().items() if line.startswith("ray::RayWorker")]
    return pid


def check_steps(run: Launched, count: int) -> None:
    """No step is lost or made twice; the log-probs of both sides agree to 1e-6 whenever they were compared."""
    steps = run.steps()
    assert [record["step"] for record in steps] == list(range(1, count + 1))
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    assert len(gaps) >= 2 and max(gaps) < 1e-6


@pytest.mark.medium
def test_twelve_steps(pair: Pair, tmp_path: Path) -> None:
    """The command of lab/hosts/README.md: the weights check passes, and nothing is left on either host within the
    seconds that Ray takes to end a job's processes."""
    before = [host.left() for host in pair]
    run = Launched(pair, tmp_path / "run", "--max_steps", 12)
    assert run.end() == 0, run.output[-3000:]
    check_steps(run, 12)
    run.wait(lambda: [host.left() for host in pair] == before, 20)


@pytest.mark.slow
def test_a_worker_that_dies_and_a_link_that_is_cut(pair: Pair, tmp_path: Path) -> None:
    """A cut of ten seconds ends nothing. A dead worker ends the run with a checkpoint of every step and exit code 75; a
    new process goes on from it."""
    run = Launched(pair, tmp_path / "run", "--max_steps", 30)
    run.wait_for_steps(5)
    pair[1].link("down")
    time.sleep(10)
    pair[1].link("up")
    run.wait_for_steps(5)
    os.kill(worker(pair), signal.SIGKILL)
    assert run.end() == 75 and "EngineDied" in run.output, run.output[-3000:]
    state = Folder(run.folder).newest_checkpoint()[1]
    assert state["step"] == len(run.steps()) < 30
    again = Launched(pair, run.folder, "--resume", run.folder, "--engine", "lab.hosts:RayEngine")
    assert again.end() == 0, again.output[-3000:]
    check_steps(again, 30)


@pytest.mark.slow
def test_a_killed_trainer_takes_its_engine_along(pair: Pair, tmp_path: Path) -> None:
    """Its worker on the other host and the engine's process on its own end."""
    run = Launched(pair, tmp_path / "run", "--max_steps", 3000)
    run.wait_for_steps(2)
    pid = worker(pair)
    for child in psutil.Process(run.process.pid).children():  # `process` waits for it outside its host
        child.kill()
    run.wait(lambda: pid not in pair[1].pids())
    run.wait(lambda: not any("EngineCore" in line for line in pair[0].processes().values()))


@pytest.mark.slow
def test_hosts_with_too_few_devices(pair: Pair, tmp_path: Path) -> None:
    """One sentence and exit code 2, before vLLM starts."""
    run = Launched(pair, tmp_path / "run", "--engine_args", '{"tensor_parallel_size": 2}')
    sentence = "the engine needs 2 devices, and 1 of Ray's are free"
    assert run.end() == 2 and sentence in run.output.splitlines()[-1], run.output[-3000:]
    assert "Traceback" not in run.output and "EngineCore" not in run.output
