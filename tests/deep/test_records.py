"""runtime/recorder.py and evaluation.py: verdicts, trackers, and texts that a terminal must not see."""

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType
from recorded import steps_of

from runtime import flags as flags_module
from runtime.folder import Folder
from tasks import arithmetic


def test_verdicts_are_logged(monkeypatch, program, tmp_path):
    monkeypatch.setattr(arithmetic.ChainTask, "counts", Counter(correct=5, timeout=2), raising=False)
    program("--max_steps 1")
    [record] = steps_of(tmp_path / "run")
    assert record["verdicts"] == {"correct": 5, "timeout": 2}


def test_samples_reach_no_terminal(monkeypatch, program, tmp_path):
    """Completions that would clear the screen, ring, or rename the window: the text comes back whole from plain ASCII
    without control characters; nothing of it is printed."""
    text = "\x1b[2J\x07\x1b]0;title\x07\r\x7f\x9b31m\u202e\ud800 </think> 1"
    monkeypatch.setattr(arithmetic.ChainTask, "text", lambda self, ids: text)
    _, out, err = program("--max_steps 1")
    content = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in content)
    records = Folder(tmp_path / "run").read("samples.jsonl")
    assert len(records) == 4 and {r["completion"] for r in records} == {text}
    assert {type(r["interrupted"]) for r in records} == {bool}  # the tour reads it
    assert not set(out + err) & set("\x1b\x07\x7f\x9b\u202e\ud800") and "title" not in out + err


def test_a_gradient_that_is_no_number_leaves_json(tmp_path):
    """JSON has no NaN and no Infinity, and readers such as jq refuse the line: null."""

    def refuse(constant):
        raise ValueError(constant)

    record = {
        "step": 3,
        "grad_norm": math.nan,
        "ratio_max": math.inf,
        "lag": -math.inf,
        "loss": 0.5,
        "groups": [["a", 1]],
    }
    Folder(tmp_path).append("metrics.jsonl", record)
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    missing = {"grad_norm": None, "ratio_max": None, "lag": None}
    assert json.loads(line, parse_constant=refuse) == record | missing


@pytest.mark.long
@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_flags_steps_and_evaluations(monkeypatch, program, tmp_path, name):
    """A stand-in for the package, with the parts of it that accelerate calls. What comes after a resume is a run of its
    own there: it may have gone back to a checkpoint, and wandb drops records of an earlier step."""
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append(("finish", {}))
    )
    config = SimpleNamespace(update=lambda values, **_: calls.append(("config", values)))
    package = SimpleNamespace(config=config, init=lambda **options: calls.append(("init", options)) or run)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(flags_module, "find_spec", lambda _: True)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType(name)])
    folder = str(tmp_path / "run")
    options = {"project": "scalerl", "name": folder} | ({"dir": folder} if name == "wandb" else {})
    assert program(f"--max_steps 2 --report_to {name}")[0] == 0
    init, (kind, settings), *logged, last = calls
    assert init == ("init", options) and kind == "config" and settings["max_steps"] == 2 and last == ("finish", {})
    steps = [step for step, values in logged if "grad_norm" in values]
    evaluations = [step for step, values in logged if "eval/pass_rate" in values]
    assert len(logged) == 4 and steps == [1, 2] and evaluations == [0, 2]
    assert not any("step" in values for _, values in logged)  # a name that trackio keeps for itself
    calls.clear()
    assert program("--resume --max_steps 3")[0] == 0
    assert calls[0] == ("init", options | {"name": f"{folder} from step 2"})
    assert [step for step, _ in calls[2:-1]] == [3, 3]


@pytest.mark.long
def test_each_source_of_a_mixture_has_its_own_pass_rate(monkeypatch, run):
    """Two data sets of the same held-out problems: the evaluation takes five of each and tells them apart."""

    def mixture(*args, **options):
        task = arithmetic.ChainTask(*args, **options)
        task.sources = ["chain", "other"]
        task.held_out += [type(p)(p.key, p.prompt_ids, p.answer, "other") for p in task.held_out]
        return task

    monkeypatch.setattr(arithmetic, "graded_task", mixture)

    def evaluate(self, problems, n_samples, longest_leg=0):
        self.settle()
        self.evaluating = True
        return [[self.rollout(1.0 if p.source == "other" else -1.0) for _ in range(n_samples)] for p in problems]

    record = run({"evaluate": evaluate}, max_steps=1).evals[0]
    assert record["n_prompts"] == 10 and record["pass_rate"] == 0.5
    apart = {name: (of["pass_rate"], of["n_prompts"]) for name, of in record["data_sets"].items()}
    assert apart == {"chain": (0.0, 5), "other": (1.0, 5)}


def test_evaluations_that_come_due_within_a_round_are_made_after_it(run):
    played = run(schedule="ppo_off_policy", k=4, max_steps=12, eval_every=3)
    assert [r["step"] for r in played.evals] == [0, 4, 8, 12]
