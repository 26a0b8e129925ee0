"""tools/measuring.py and the logic of the benchmarks: turns, ratios, targets, the report; no engine is started."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import benchmark_head
import benchmark_pacer
import benchmark_race
import measuring
import pytest
import subjects
import trl_side
from fake_engine import wait_until

pytestmark = pytest.mark.medium


def test_cases_take_turns():
    """A B A B, never A A B B: what else the machine does falls on both."""
    calls = []
    cases = {"A": lambda: calls.append("A") or len(calls), "B": lambda: calls.append("B") or len(calls)}
    assert measuring.take_turns(cases, 3) == {"A": [1, 3, 5], "B": [2, 4, 6]}
    assert "".join(calls) == "ABABAB"


def test_a_figure_is_the_median_of_the_turns_ratios():
    """Turns 2/1, 9/3, 4/4 have the ratios 2, 3, 1, whose median is 2; the ratio of the medians would be 4 / 3."""
    found = measuring.ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert found == [2.0, 3.0, 1.0]
    assert measuring.spread(found) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError):
        measuring.ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("bounds", "met", "target"),
    [({"least": 2.0}, True, ">= 2.0"), ({"least": 2.1}, False, ">= 2.1"), ({"most": 2.0}, True, "<= 2.0"),
     ({"most": 1.9}, False, "<= 1.9"), ({}, None, "")],
)  # fmt: skip
def test_a_figure_knows_its_target(bounds, met, target):
    record = measuring.Figure("x", [1.0, 2.0, 3.0], **bounds).record()
    assert (record["met"], record["target"]) == (met, target)
    assert (record["median"], record["low"], record["high"]) == (2.0, 1.0, 3.0)


def test_table_and_json_line(capsys):
    parser = measuring.benchmark_parser("tools/benchmark_head.py", "about")
    report = measuring.Report(parser.parse_args(["--repeats", "2"]))
    report.add({"ours": [1.0, 3.0]}, "s")
    report.figures = [measuring.Figure("ours / bare", [1.0, 2.0], most=1.2)]
    report.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| ours | 2 | 1 | 3 | s |"
    assert "| ours / bare | 1.5 | 1 | 2 | <= 1.2 | NO |" in lines
    record = json.loads(lines[-1])
    assert record["benchmark"] == "head" and record["settings"]["repeats"] == 2
    assert record["measured"] == {"ours": [1.0, 3.0]} and len(record["load"]) == 2
    assert record["figures"][0]["met"] is False and record["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [(measuring.positive, "0"), (measuring.positive, "many"), (measuring.above_zero, "nan"),
     (measuring.above_zero, "-1")],
)  # fmt: skip
def test_bad_arguments_are_refused(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        kind(text)


def test_a_bfloat16_head_rounds_more_the_more_logits_there_are(monkeypatch):
    """Spread by 4, the largest of 40 logits are near 9, where the steps are 1/16 and the mean error of rounding is a
    quarter of that, 1/64. It counts twice, in the token's logit and in the normalizer, which cancels if that token has
    most of the probability. The largest of 4,096 are near 14, and their token has less of it."""
    monkeypatch.setattr(benchmark_head, "ROUNDED", 2**20)
    few, many = benchmark_head.rounding(40), benchmark_head.rounding(4096)
    assert max(few["FP32"], many["FP32"]) < 5e-6
    assert 1 / 640 < few["bfloat16"] < 1 / 64 and 1.5 * few["bfloat16"] < many["bfloat16"] < 2 / 64


def test_the_queue_that_gives_a_lag():
    """B = 32, k = 8: 1.5 without a queue needs 16 groups more for 2, 80 for 4; 12 would need 336, above k B = 256."""
    assert [benchmark_pacer.queue_for(lag, 1.5) for lag in (1, 2, 4, 12)] == [1, 16, 80, 256]


def test_a_program_that_fails_is_no_slow_program(tmp_path):
    """A failed run would otherwise count as one that never reaches the rate."""
    program = subjects.Program([sys.executable, "-c", "raise SystemExit('no engine')"], tmp_path / "run", 1)
    try:
        with pytest.raises(RuntimeError, match="run ended with 1:\nno engine"):
            benchmark_race.evaluations(program, 0.5)
    finally:
        program.close()


def test_seconds_of_a_run_come_from_the_devices_that_it_counts(monkeypatch):
    """Two trainer threads and an engine are three of four cores: 30 core-seconds are 10 s. Of two cores they use two."""
    program = SimpleNamespace(threads=2, ended=lambda: True, watch_memory=lambda: None)
    program.records = lambda name: [{"pass_rate": 0.1, "device_hours": 30 / 3600}]
    for cores, seconds in ((4, 10), (2, 15)):
        monkeypatch.setattr(benchmark_race.os, "cpu_count", lambda cores=cores: cores)
        assert [r["seconds"] for r in benchmark_race.evaluations(program, 0.9)] == [pytest.approx(seconds)]


def test_a_contestant_is_stopped_when_its_time_is_over(monkeypatch):
    """Its evaluations come after 10, 20, 30 s: with 15 s to go it is stopped at the second one, though it has not
    ended."""
    monkeypatch.setattr(benchmark_race.time, "sleep", lambda seconds: None)
    written = [{"pass_rate": 0.1, "seconds": float(10 * n)} for n in (1, 2, 3)]
    calls = iter([1, 2, 3])
    program = SimpleNamespace(ended=lambda: False, watch_memory=lambda: None, threads=2)
    program.records = lambda name: written[: next(calls)]
    assert [r["seconds"] for r in benchmark_race.evaluations(program, 0.9, until=15.0)] == [10.0, 20.0]


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


def test_pass_rates_at_equal_times():
    """The shorter one ends after 80 s. At 20, 40 and 80 s it stood at .25, .5 and 1; the other, which rises by .1 in
    20 s, at .1, .2 and .4."""
    fast = [{"seconds": t, "pass_rate": t / 80} for t in (0.0, 40.0, 80.0)]
    slow = [{"seconds": t, "pass_rate": t / 200} for t in (0.0, 160.0)]
    found = benchmark_race.at_equal_times({"ours": fast, "trl": slow})
    assert {name: values[0] for name, values in found.items()} == pytest.approx({
        "ours after 1/4": 0.25, "trl after 1/4": 0.1, "ours after 1/2": 0.5, "trl after 1/2": 0.2,
        "ours after 1": 1.0, "trl after 1": 0.4,
    })  # fmt: skip


def test_the_race_trains_a_pretrained_model_as_make_real_does():
    """The flags stand in two places, and what is compared with TRL is what a visitor runs."""
    said = subprocess.check_output(["make", "-n", "real"], cwd=subjects.ROOT, text=True)
    [command] = re.findall(r"train.py --model runs/real-start/model(.+?)--dataset", said, re.S)
    words = command.replace("\\", "").split()
    made = dict(zip(words[::2], words[1::2], strict=True))
    for name in ("--dtype", "--save_every", "--output_dir", "--overwrite"):
        del made[name]
    flags = [*subjects.SETTING, *benchmark_race.REAL, *benchmark_race.REAL_OURS]
    raced = dict(zip(flags[::2], flags[1::2], strict=True))
    assert {"--max_steps": str(benchmark_race.REAL_STEPS), **raced}.items() >= made.items()


def test_memory_of_a_program_and_its_children(tmp_path):
    """A child that holds 200 MB, beside a parent that waits for it: between 200 MB and 260 MB in all."""
    child = "x = bytearray(b'1') * 200_000_000; print(1, flush=True); import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    program = subjects.Program([sys.executable, "-c", parent], tmp_path / "run", 1)
    try:
        wait_until(lambda: Path(program.log.name).read_text())
        program.watch_memory()
        assert 200e6 < program.peak_memory < 260e6
    finally:
        program.close()
