"""The arithmetic, the table, the JSON line and the argument errors of tools/benchmark.py and its parts; no engine is started."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import benchmark
import contests
import measuring


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
    args = benchmark.parse(["scale", "--repeats", "2"])
    report = measuring.Report(args)
    report.add({"ours": [1.0, 3.0]}, "s")
    report.figures = [measuring.Figure("ours / bare", [1.0, 2.0], most=1.2)]
    report.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| ours | 2 | 1 | 3 | s |"
    assert "| ours / bare | 1.5 | 1 | 2 | <= 1.2 | NO |" in lines
    record = json.loads(lines[-1])
    assert record["benchmark"] == "scale" and record["settings"]["repeats"] == 2
    assert record["measured"] == {"ours": [1.0, 3.0]} and len(record["load"]) == 2
    assert record["figures"][0]["met"] is False and record["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "required: command"),
        (["nothing"], "invalid choice"),
        (["head", "--repeats", "0"], "must be a whole number of at least 1, not '0'"),
        (["head", "--vocabularies", "many"], "not 'many'"),
        (["generator", "--seconds", "nan"], "must be a number above 0, not 'nan'"),
        (["generator", "--seconds", "-1"], "--seconds"),
        (["sync", "--sizes", "9M"], "invalid choice: '9M'"),
        (["race", "--contestants", "pipeline-8"], "must be pipeline-K:THREADS"),
        (["race", "--contestants", "ppo_off_policy-0:1"], "must be pipeline-K:THREADS"),
        (["pacer", "--pipeline", "nowhere/pipeline_rl.py"], "must be the pipeline_rl.py of another checkout"),
        (["pacer", "--pipeline", str(benchmark.ROOT)], "must be the pipeline_rl.py of another checkout"),
        (["peer", "--environment", str(benchmark.ROOT / ".venv")], "must be an environment of its own"),
    ],
)
def test_bad_arguments_name_the_flag_and_exit_2(argv, part, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(argv)
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err


def test_where_a_curve_reaches_a_rate():
    """0.80 at 100 s and 0.95 at 130 s: 0.90 lies two thirds of the way, at 120 s."""
    records = [{"pass_rate": p, "seconds": s} for p, s in ((0.5, 50.0), (0.8, 100.0), (0.95, 130.0))]
    assert contests.reached(records, 0.9, "seconds") == pytest.approx(120.0)
    assert contests.reached(records, 0.4, "seconds") == 50.0
    assert contests.reached(records, 0.99, "seconds") == math.inf
    assert contests.reached([], 0.9, "seconds") == math.inf


def test_synthetic_groups_have_the_length_asked_for():
    groups = benchmark.synthetic(64, 40)
    lengths = [len(rollout.completion_ids) for group in groups for rollout in group.rollouts]
    assert len(lengths) == 64 and min(lengths) >= 20 and max(lengths) <= 60
    assert sum(lengths) / 64 == pytest.approx(40, rel=0.15)


def test_no_attention_gives_each_position_its_own_value():
    value = torch.randn(2, 3, 5, 4)  # (N, KV heads, T, head_dim)
    out, _ = benchmark.no_attention(None, torch.zeros(2, 6, 5, 4), None, value)
    assert out.shape == (2, 5, 6, 4)
    assert torch.equal(out[1, 2, 5], value[1, 2, 2]) and torch.equal(out[1, 2, 4], value[1, 2, 2])


def test_pacer_asks_for_the_queue_that_gives_the_lag(monkeypatch, capsys):
    """B = 16, and an engine whose lag is 1.5 + min_ready / B: lags of 2, 4 and 6 need 8, 40 and 72 groups; 12 would need
    168, more than k B = 128, and ends at 9.5. A training step is .8 of the engine's 2 s. It loses 1 % of its speed for
    each 40 groups; the other checkout has half of it."""
    asked = []

    class Stub:
        def __init__(self, checkout, *_):
            self.half = checkout != benchmark.ROOT

        def ask(self, *, min_ready, training, slots, **case):
            asked.append((min_ready, training, slots))
            speed = (50.0 if self.half else 100.0) - min_ready / 40
            return {"seconds a step": 2.0, "busy": speed / 100, "tokens/s": speed, "lag": 1.5 + min_ready / 16}

        def close(self):
            pass

    monkeypatch.setattr(contests, "Paced", Stub)
    monkeypatch.setattr(contests, "random_model", lambda *_, **options: "")
    other = str(Path(__file__).parent.parent / "pipeline_rl.py")
    args = benchmark.parse(["pacer", "--repeats", "1", "--batch_prompts", "16", "--lags", "2", "4", "6", "12", "--pipeline", other])
    args.pipeline = Path("/elsewhere/pipeline_rl.py")
    figures = {figure["name"]: figure for figure in args.function(args)["figures"]}
    assert asked[0] == (0, None, 256) and asked[1:3] == [(0, 1.6, 256)] * 2 and asked[3] == (0, None, 128)
    assert asked[4:] == [(m, 1.6, 128) for m in (0, 8, 40, 72, 128)]
    assert [figures[f"lag {lag} asked: off by"]["median"] for lag in (2, 4, 6, 12)] == [0, 0, 0, 2.5]
    assert [figures[f"lag {lag} asked: off by"]["met"] for lag in (2, 4, 6, 12)] == [True, True, True, False]
    assert figures["lag 4 asked: speed lost"]["median"] == pytest.approx(0.01)
    assert figures["tokens/s / other's"]["median"] == 2 and figures["busy share of the slots, other"]["median"] == 0.5
