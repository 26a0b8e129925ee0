"""lab/bench/benchmark.py without an engine: whose turn it is, what is printed, and commands that can work."""

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import benchmark
import pytest
import torch

from runtime.flags import check_flags, parse_flags
from vllm_engine import VLLMEngine, mapped, tensors_in

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


def test_every_program_has_flags_that_can_work(monkeypatch, tmp_path):
    """No check refuses them, and both sides of the peer have the same ones."""
    monkeypatch.chdir(tmp_path)  # where no run lies in the default folder
    commands = {}
    monkeypatch.setattr(benchmark, "in_turns", lambda these, *_: commands.update(these))
    args = SimpleNamespace(flags=["--seed", "3", "--model", "folder"], trl_options="{}", without_filters=False)
    flags = parse_flags([*benchmark.SETTING, *args.flags], "")
    benchmark.overlap(args, flags)
    benchmark.peer(args, flags)
    for name, command in commands.items():
        parsed = parse_flags(command[5:] if name == "TRL" else command[2:], "")
        check_flags(parsed)
        assert parsed.seed == 3 and parsed.k in (0, 1, 8)
    still, filters, trl = (commands[name] for name in ("ours, every row trains", "ours with its filters", "TRL"))
    assert still[2:] == trl[5:] == [*filters[2:], *benchmark.STILL]


def test_new_weights_reach_trls_vllm_through_our_channel(monkeypatch):
    """TRL's own copy fails on a CPU; without one, TRL would go on sampling from its first weights. What TRL itself asks
    of vLLM comes before our arguments."""
    calls = []
    vllm = SimpleNamespace(
        collective_rpc=lambda method, args: calls.append((method, tensors_in(mapped(Path(args[0])), args[1]))),
        reset_prefix_cache=lambda: calls.append("prefix cache"),
    )
    generation = type("VLLMGeneration", (), {"llm": vllm})
    module = SimpleNamespace(LLM=lambda **arguments: arguments, VLLMGeneration=generation)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trl.generation", SimpleNamespace(vllm_generation=module))
    engine = VLLMEngine("folder", (), 0, dtype="bfloat16")
    with closing(engine.channel):
        benchmark.mend_vllm(engine)
        generation._iter_named_params = lambda self: iter({"head.weight": torch.tensor([[1.0, 2.0]])}.items())
        generation().sync_weights()
    (method, weights), last = calls
    assert method == "load_weight_file" and weights["head.weight"].tolist() == [[1.0, 2.0]] and last == "prefix cache"
    arguments = module.LLM(model="another", seed=7)
    assert arguments["model"] == "another" and arguments["seed"] == 7 and arguments["dtype"] == "bfloat16"
    assert arguments["worker_extension_cls"] == "vllm_engine.WeightReceiver"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["peer", "--threads", "0"], "--steps, --repeats and --threads must be at least 1"),
        (["overlap", "--steps", "4"], "--steps must be a multiple of 8 for overlap"),
        (["generator", "--bad", "3"], "error: unknown flag --bad; --help lists all."),
        (["peer", "--lr", "0"], "error: --lr must be above 0 and finite, not 0.0."),
    ],
)
def test_turns_that_cannot_be_measured_are_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(words)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
