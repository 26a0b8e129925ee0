"""tools/benchmark.py and what it measures with: turns, ratios, targets, the report; no engine is started."""

import argparse
import sys
from pathlib import Path

import benchmark
import measuring
import pytest
import subjects
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
    assert measuring.spread(found) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError):
        measuring.ratios([1.0], [1.0, 2.0])


def test_a_figure_knows_its_target():
    for bounds, *target in (
        ({"least": 2.0}, ">= 2.0", "yes"),
        ({"least": 2.1}, ">= 2.1", "NO"),
        ({"most": 2.0}, "<= 2.0", "yes"),
        ({"most": 1.9}, "<= 1.9", "NO"),
        ({}, "", ""),
    ):
        assert measuring.Figure("x", [1.0, 2.0, 3.0], **bounds).row() == ["x", 2.0, 1.0, 3.0, *target]
    assert measuring.Figure("x", [1.0, 3.0, float("nan")], least=0.5).row()[-1] == "NO"  # a turn that is nan meets none


def test_the_report(capsys, monkeypatch):
    def head(args, report):
        report.add({"ours": [1.0, 3.0]}, "s")
        report.figures = [measuring.Figure("ours / bare", [1.0, 2.0], most=1.2)]

    monkeypatch.setitem(benchmark.QUESTIONS, "head", head)
    benchmark.main(["head", "--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| ours | 2 | 1 | 3 | s |"
    assert "| ours / bare | 1.5 | 1 | 2 | <= 1.2 | NO |" in lines
    assert "cores" in lines[-2] and lines[-1].startswith("repeats 2, seed 0, benchmark head")


def test_bad_arguments_are_refused(capsys):
    for words, sentence in (
        ("head --repeats 0", "--repeats: must be a whole number of at least 1, not '0'"),
        ("head --repeats many", "--repeats: must be a whole number of at least 1, not 'many'"),
        ("speed", "invalid choice: 'speed' (choose from"),
    ):
        with pytest.raises(SystemExit) as ended:
            benchmark.main(words.split())
        assert ended.value.code == 2 and sentence in capsys.readouterr().err
    for text in ("nan", "inf", "-1", "0", "much"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number above 0"):
            measuring.above_zero(text)


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
