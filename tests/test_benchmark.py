"""tools/benchmark.py without an engine: whose turn it is, what is printed, and commands that can work."""

import sys
from types import SimpleNamespace

import benchmark
import pytest

from runtime.flag_checks import check_flags
from runtime.flags import parse_flags

pytestmark = pytest.mark.medium


def test_cases_take_turns_and_ratios_are_those_of_each_turn(capsys):
    """A B A B, never A A B B: what else the machine does affects both. The turns 2/1, 9/3, 4/4 have the ratios 2, 3, 1,
    whose median is 2; the ratio of the medians would be 4 / 3."""
    calls, speeds = [], {"A": [4.0, 9.0, 2.0], "B": [4.0, 3.0, 1.0]}

    def case(name):
        calls.append(name)
        return speeds[name].pop()

    benchmark.take_turns({"A": lambda: case("A"), "B": lambda: case("B")}, 3, "steps/s")
    assert "".join(calls) == "ABABAB"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| steps/s | median (least to greatest) | A / this |"
    assert lines[2:] == ["| A | 4 (2 to 9) | 1 (1 to 1) |", "| B | 3 (1 to 4) | 2 (1 to 3) |"]


def test_a_program_has_turns_and_is_frozen_between_them(tmp_path):
    """Its second turn begins where the first ended, although it could have gone on meanwhile."""
    line = """open(f"{folder}/metrics.jsonl", "a").write('{"step": 1}\\n'); time.sleep(0.01)"""
    code = f"import os, sys, time; folder = sys.argv[-1]; os.mkdir(folder)\nwhile True: {line}"
    program = benchmark.Program([sys.executable, "-c", code], tmp_path / "run")
    try:
        program.advance(3)
        benchmark.time.sleep(0.2)  # a step that was under way
        before = program.steps()
        benchmark.time.sleep(0.5)
        assert program.steps() == before >= 3
        assert program.advance(2) > 0 and program.steps() >= before + 2
    finally:
        program.close()
    assert program.process.poll() is not None


def test_a_program_that_fails_is_no_slow_program(tmp_path):
    """It would otherwise be waited for without end; its last words are told."""
    program = benchmark.Program([sys.executable, "-c", "raise SystemExit('no engine')"], tmp_path / "run")
    with pytest.raises(RuntimeError, match="run ended: no engine"):
        program.advance(1)
    program.close()


def test_every_program_has_flags_that_can_work(monkeypatch):
    """No check refuses them, and both sides of the peer have the same ones."""
    commands = {}
    monkeypatch.setattr(benchmark, "in_turns", lambda these, *_: commands.update(these))
    args = SimpleNamespace(flags=["--seed", "3", "--model", "folder"], trl_python="python", trl_options="{}")
    flags = parse_flags([*benchmark.SETTING, *args.flags], "")
    benchmark.overlap(args, flags)
    benchmark.peer(args, flags)
    for name, command in commands.items():
        parsed = parse_flags(command[5:] if name == "TRL" else command[2:], "")
        check_flags(parsed)
        assert parsed.seed == 3 and parsed.k in (0, 1, 8)
    still, filters, trl = (commands[name] for name in ("ours, every row trains", "ours with its filters", "TRL"))
    assert still[2:] == trl[5:] == [*filters[2:], *benchmark.STILL]
