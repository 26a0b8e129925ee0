"""What a run on two hosts does when a process, a host or the link between them fails: each with its seconds (`-s`)."""

import os
import signal
import time
from pathlib import Path

import pytest
from ray_run import Launched, Pair

from runtime.run_folder import Folder

pytestmark = pytest.mark.slow
LONG = ("--max_steps", 3000, "--lr", 1e-6)


@pytest.fixture
def run(pair: Pair, tmp_path: Path) -> Launched:
    """At its twelfth step, with a checkpoint."""
    if not any("raylet" in line for line in pair.b.processes().values()) or pair.faulty:
        pair.start_b()
    pair.faulty = True
    made = Launched(pair, tmp_path / "run", *LONG)
    made.wait(made.steps_on(12))
    yield made
    while not made.ended():
        made.signal(signal.SIGKILL)
        time.sleep(0.1)


def worker(pair: Pair) -> int:
    """The engine's process on B."""
    [pid] = [pid for pid, line in pair.b.processes().items() if line.startswith("ray::RayWorker")]
    return pid


def check_once(run: Launched) -> None:
    """No step is lost or made twice."""
    assert [record["step"] for record in run.records()] == list(range(1, len(run.records()) + 1))


def say(what: str, **seconds: float) -> None:
    print(f"\n{what}:", *(f"{name} {value} s" for name, value in seconds.items()))


@pytest.mark.parametrize("seconds", [3, 10, 40])
def test_link_cut_for_a_while(pair: Pair, run: Launched, seconds: int) -> None:
    """The run goes on with the same engine."""
    pair.b.cut()
    time.sleep(seconds)
    pair.b.join()
    on = run.wait(run.steps_on(12))
    assert "restart" not in run.said and "train.py:" not in run.said
    check_once(run)
    say(f"link cut for {seconds} s", goes_on_after=on)


def test_link_cut_for_good(pair: Pair, run: Launched) -> None:
    """A checkpoint, a wait for a host of engines, and the end."""
    pair.b.cut()
    noticed = run.wait(lambda: "goes on from it" in run.said)
    ends = run.wait(run.ended, may_end=True)
    assert run.process.returncode == 1
    say("link cut for good", noticed_after=noticed, ends_after=ends)
    print(run.said[-600:])
    assert Folder(run.folder).newest_checkpoint()[1]["step"] == len(run.records())


def test_sigterm_while_the_link_is_cut(pair: Pair, run: Launched) -> None:
    """It is obeyed at once."""
    pair.b.cut()
    time.sleep(10)
    run.signal(signal.SIGTERM)
    ends = run.wait(run.ended, 60, may_end=True)
    say("SIGTERM while the link is cut", ends_after=ends)
    assert run.process.returncode == 143
    assert Folder(run.folder).newest_checkpoint()[1]["step"] == len(run.records())


def test_worker_killed(pair: Pair, run: Launched) -> None:
    """The run goes on by itself."""
    os.kill(worker(pair), signal.SIGKILL)
    noticed = run.wait(lambda: "restart 1 of at most 3 goes on from it" in run.said)
    on = run.wait(run.steps_on(2))
    check_once(run)
    say("worker killed", noticed_after=noticed, goes_on_after=on)


def test_host_killed_that_comes_back(pair: Pair, run: Launched) -> None:
    """Twenty seconds later, and the run goes on by itself."""
    pair.b.kill()
    noticed = run.wait(lambda: "restart 1 of at most 3 goes on from it" in run.said)
    time.sleep(20)
    pair.start_b()
    on = run.wait(run.steps_on(2))
    check_once(run)
    say("host killed, back after 20 s", noticed_after=noticed, goes_on_after=on)


def test_host_killed(pair: Pair, run: Launched) -> None:
    """For good: a checkpoint, a minute in which it may come back, one sentence."""
    pair.b.kill()
    noticed = run.wait(lambda: "restart 1 of at most 3 goes on from it" in run.said)
    ends = run.wait(run.ended, may_end=True)
    assert run.process.returncode == 1 and "devices" in run.said.splitlines()[-1]
    say("host killed", noticed_after=noticed, ends_after=ends)


def test_worker_frozen(pair: Pair, run: Launched) -> None:
    """Its host is well, so only the patience with its answers ends it: five minutes."""
    os.kill(worker(pair), signal.SIGSTOP)
    noticed = run.wait(lambda: "restart 1 of at most 3 goes on from it" in run.said, 400)
    on = run.wait(run.steps_on(2))
    check_once(run)
    say("worker frozen", noticed_after=noticed, goes_on_after=on)


def test_host_frozen(pair: Pair, run: Launched) -> None:
    """All its processes."""
    pair.b.kill("-STOP")
    noticed = run.wait(lambda: "restart 1 of at most 3 goes on from it" in run.said, 400)
    ends = run.wait(run.ended, may_end=True)
    say("host frozen", noticed_after=noticed, ends_after=ends)
    assert run.process.returncode == 1


def test_trainer_killed(pair: Pair, run: Launched, tmp_path: Path) -> None:
    """The engines' host ends its engine and takes the next run."""
    pid = worker(pair)
    run.signal(signal.SIGKILL)
    ended = run.wait(lambda: pid not in pair.b.pids(), may_end=True)
    engines = run.wait(lambda: not any("EngineCore" in line for line in pair.a.processes().values()), may_end=True)
    again = Launched(pair, tmp_path / "next", "--max_steps", 3)
    assert again.end() == 0, again.said[-3000:]
    say("trainer killed", worker_ends_after=ended, engine_after=engines)
