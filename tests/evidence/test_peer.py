"""The race with TRL: what is counted, when a contestant is stopped, and that both have the same problem."""

import re
import subprocess
import sys
from types import SimpleNamespace

import peer
import pytest
import subjects
import trl_side

pytestmark = pytest.mark.medium


def test_a_program_that_fails_is_no_slow_program(tmp_path):
    """A failed run would otherwise count as one that never reaches the rate."""
    program = subjects.Program([sys.executable, "-c", "raise SystemExit('no engine')"], tmp_path / "run", 1)
    try:
        with pytest.raises(RuntimeError, match="run ended with 1:\nno engine"):
            peer.evaluations(program, 0.5)
    finally:
        program.close()


def test_seconds_of_a_run_come_from_the_devices_that_it_counts(monkeypatch):
    """Two trainer threads and an engine are three of four cores: 30 core-seconds are 10 s. Of two cores they use two."""
    program = SimpleNamespace(threads=2, ended=lambda: True, watch_memory=lambda: None)
    program.records = lambda name: [{"pass_rate": 0.1, "device_hours": 30 / 3600}]
    for cores, seconds in ((4, 10), (2, 15)):
        monkeypatch.setattr(peer.os, "cpu_count", lambda cores=cores: cores)
        assert [r["seconds"] for r in peer.evaluations(program, 0.9)] == [pytest.approx(seconds)]


def test_a_contestant_is_stopped_when_its_time_is_over(monkeypatch):
    """Its evaluations come after 10, 20, 30 s: with 15 s to go it is stopped at the second one, though it has not
    ended."""
    monkeypatch.setattr(peer.time, "sleep", lambda seconds: None)
    written = [{"pass_rate": 0.1, "seconds": float(10 * n)} for n in (1, 2, 3)]
    calls = iter([1, 2, 3])
    program = SimpleNamespace(ended=lambda: False, watch_memory=lambda: None, threads=2)
    program.records = lambda name: written[: next(calls)]
    assert [r["seconds"] for r in peer.evaluations(program, 0.9, until=15.0)] == [10.0, 20.0]


@pytest.mark.parametrize(("window", "rewards"), [(0, [1, 1, -1, -1]), (24, [1, 0.5, -1, -1])])
def test_the_other_side_has_our_length_penalty(window, rewards, tmp_path):
    """Of 32 tokens the last 24 are the ramp: -0 at 8 tokens, -1/2 at 20, and nothing for wrong answers, at 20 or 32."""
    args = SimpleNamespace(output_dir=tmp_path, max_completion=32, penalty_window=window)
    task = SimpleNamespace(
        train=[SimpleNamespace(key="q")], reward=lambda p, ids: (1.0, True) if ids[0] else (-1.0, False)
    )
    journal = trl_side.Journal(args, task)
    assert journal.reward([[1] * 8, [1] * 20, [0] * 20, [0] * 32], ["q"] * 4) == pytest.approx(rewards)
    assert journal.tokens == 80


def test_the_race_trains_a_pretrained_model_as_make_real_does():
    """The flags stand in two places, and what is compared with TRL is what a visitor runs."""
    said = subprocess.check_output(["make", "-n", "real"], cwd=subjects.ROOT, text=True)
    [command] = re.findall(r"train.py --model runs/real-start/model(.+?)--dataset", said, re.S)
    words = command.replace("\\", "").split()
    made = dict(zip(words[::2], words[1::2], strict=True))
    for name in ("--dtype", "--save_every", "--output_dir", "--overwrite"):
        del made[name]
    flags = [*subjects.SETTING, *peer.REAL, *peer.REAL_OURS]
    raced = dict(zip(flags[::2], flags[1::2], strict=True))
    assert {"--max_steps": str(peer.REAL_STEPS), **raced}.items() >= made.items()
