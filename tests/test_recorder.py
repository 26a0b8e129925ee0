"""runtime/recorder.py: the clock that counts compute, what is written and printed of a step, and the table of the end."""

import json
from types import SimpleNamespace

import pytest
from scripted import Alone, ScriptedGenerator

from generator import Counters
from runtime import recorder
from runtime.flags import VERSION, Flags
from runtime.folder import Folder
from runtime.ranks import Ranks
from runtime.recorder import Clock, Recorder, step_line, warnings_of


@pytest.fixture
def new_clock(monkeypatch):
    """Makes a clock over counters and a wall clock that the test sets: (clock, counters, [seconds])."""

    def make(past: dict | None = None) -> tuple[Clock, Counters, list[float]]:
        now = [5000.0]
        monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
        counters = Counters()
        return Clock(SimpleNamespace(counters=counters), 1000, 2, past or {}), counters, now

    return make


def test_compute_by_hand(new_clock):
    """P = 1000: 2 P (10 prefilled + 20 sampled) + 6 P 25 forwarded = 210,000 FLOPs. 100 s less evaluation's 28 s on two
    devices: 144 / 3600 = 0.04 device-hours. A resume adds to what there was; its hours count evaluation, too."""
    past = {"tokens": 100, "trained_tokens": 50, "flops": 1e6, "device_hours": 1.5, "hours": 0.5}
    for before in ({}, past):
        clock, counters, now = new_clock(before)
        assert clock.now() | {"hours": clock.hours()} == (before or dict.fromkeys(past, 0))
        now[0] += 100
        counters.prefilled, counters.sampled, counters.eval_seconds = 10, 20, 28.0
        clock.forward_tokens, clock.trained_tokens = 25, 15
        gained = {"tokens": 20, "trained_tokens": 15, "flops": 210_000, "device_hours": 0.04, "hours": 100 / 3600}
        expected = {name: value + before.get(name, 0) for name, value in gained.items()}
        assert clock.now() | {"hours": clock.hours()} == pytest.approx(expected)


def test_a_steps_record(run):
    """Three groups of two rollouts of two tokens a step, in which one token of the first group is forced. While they
    are taken 7 requests run for 2 s."""

    def rollout(self, reward, version=None):
        result = ScriptedGenerator.rollout(self, reward, version)
        if self.pacer.admitted == 1 and version is None:
            result.mask = [1, 0]
        return result

    def take(self, count):
        self.counters.request_seconds += 14
        return ScriptedGenerator.take(self, count)

    played = run({"rollout": rollout, "take": take}, max_steps=3, eval_every=3)
    folder = played.run.folder
    config = json.loads((folder.path / "config.json").read_text())
    assert config == {"version": VERSION} | folder.read("metrics.jsonl")[0]["config"]
    assert [r["trained_tokens"] for r in played.evals] == [0, 34]  # an evaluation's are the run's
    assert [r["trained_tokens"] for r in played.steps] == [10, 12, 12]
    assert [r["trained_tokens_total"] for r in played.steps] == [10, 22, 34]
    assert [r["requests"] * r["seconds"] for r in played.steps] == pytest.approx([14] * 3)
    taken = [[p.key, 1, 2] for p in played.generator.taken]  # each group with its right rollouts and all of them
    assert [group for r in played.steps for group in r["groups"]] == taken


def step_record(**changes) -> dict:
    return {
        "step": 7, "pass_rate": 0.25, "length": 21.5, "lag_mean": 1.234, "lag_max": 3, "ratio_mean": 1.001,
        "ratio_max": 4.56, "ess": 0.987, "entropy": 0.345, "grad_norm": 0.12, "trainer_idle": 0.5,
        "generator_idle": 0.25, "seconds": 1.75, "sync_seconds": 0.1,
    } | changes  # fmt: skip


def test_step_line_shows_what_was_measured_and_lines_up():
    end = " · waits 0.50/0.25 s · 1.75 s"
    line = step_line(step_record())
    assert line.startswith("step    7 · pass 0.250 · length  21.5 · lag 1.23/3 · rho 1.001/4.56 · ess 0.987 · ")
    assert line.endswith("entropy 0.345 · grad 0.12" + end)
    assert len(step_line(step_record(step=1234, length=9.0))) == len(line)
    measured = ("ratio_mean", "ratio_max", "ess", "entropy", "grad_norm")
    skipped = {name: x for name, x in step_record().items() if name not in measured}
    assert step_line(skipped) == "step    7 · pass 0.250 · length  21.5 · lag 1.23/3 · nothing to train on" + end
    assert step_line(step_record(retired=0)) == line
    assert step_line(step_record(retired=12)) == line + " · retired 12"


@pytest.mark.parametrize(
    ("changes", "empty", "beginning"),
    [
        ({}, 0, ""),
        ({"truncated": 0.07}, 0, "Warning: 7.0% of completions are truncated"),
        ({"entropy": 9e-4}, 0, "Warning: the entropy is 9.0e-04 nats"),
        ({}, 6, "Warning: 6 steps in a row had nothing to train on."),
        ({"step": 1, "verdicts": {"unfinished": 6, "wrong": 5}}, 0, "Warning: most completions never ended their"),
        ({"step": 2, "verdicts": {"unfinished": 6, "wrong": 5}}, 0, ""),
    ],
)
def test_what_is_warned_of(changes, empty, beginning):
    lines = list(warnings_of(step_record(truncated=0.0) | changes, empty))
    assert len(lines) == bool(beginning) and all(line.startswith(beginning) for line in lines)


def test_the_table_of_the_end_by_hand(new_clock, tmp_path):
    """Steps of 1 s and 3 s: the generator idle 0.5 + 0.1 + 0.3 + 0.1 = 1 of 4 s, the trainer 2 of 4 s; lag mean 1.5,
    max 4."""
    clock, counters, now = new_clock()
    now[0] += 10
    counters.sampled, clock.trained_tokens = 12_345, 678
    folder = Folder(tmp_path)
    recorder = Recorder(Flags(k=8), Ranks(Alone()), folder, None, None, None)
    for seconds, idle, waited, lag, most in ((1.0, 0.6, 0.5, 1.0, 4), (3.0, 0.4, 1.5, 2.0, 2)):
        record = {"seconds": seconds, "generator_idle": idle, "trainer_idle": waited, "lag_mean": lag}
        recorder.totals.update(record)
        recorder.totals |= {"lag_max": most}
    recorder.clock, recorder.device = clock, "cpu"
    rows = {line[:16].strip(): line[16:] for line in recorder.table(2).splitlines()}
    assert rows == {
        "compute": "10 s on 2 x cpu, 2.47e+07 FLOPs",  # 2 P x 12,345
        "tokens": "12,345 sampled, 678 trained",
        "generator idle": "25.0%",
        "trainer idle": "50.0%",
        "lag mean / max": "1.50 / 4 (k = 8)",
        "files": str(tmp_path),
    }
