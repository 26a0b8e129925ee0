"""runtime/recorder.py: what a step's record holds, and what is printed."""

import json
import time
from collections import Counter

import pytest
from replay import go, without_times
from scripted import ScriptedGenerator

from runtime.run_folder import Folder
from tasks import chain


def test_trained_tokens_of_a_step_and_of_the_run(run):
    """Each step trains 6 rows of two tokens: `trained_tokens` are the step's, `trained_tokens_total` the run's."""
    played = run(max_steps=3, eval_every=3)
    assert [r["trained_tokens"] for r in played.evals] == [0, 36]  # an evaluation's are the run's
    assert [r["trained_tokens"] for r in played.steps] == [12, 12, 12]
    assert [r["trained_tokens_total"] for r in played.steps] == [12, 24, 36]


@pytest.mark.parametrize("shared", [{}, {"share_prompts": True, "tokens_per_microbatch": 1}])
def test_model_flops_utilization(run, shared):
    """6 FLOPs per parameter (here one) and position of the batch, over what a trainer of 2 FLOP/s could have done. Prompts
    that could be shared are not, if each row fills a microbatch."""
    played = run(peak_tflops=2e-12, max_steps=2, **shared)
    prompts = iter(played.trainer.prompts)  # of each row trained on, step after step; completions have two tokens
    for step in played.steps:
        positions = sum(len(next(prompts)) + 2 for _ in range(step["rows"]))
        assert step["mfu"] * 2 * (step["seconds"] - step["trainer_idle"]) == pytest.approx(6 * positions)
    assert "mfu" not in run(max_steps=2).steps[0]


def test_flags_and_groups_are_written(run):
    """metrics.jsonl begins with the flags; groups.jsonl has the prompts of each step with their solved rollouts, and how
    many tokens each rollout has sampled: two, but in the first group one is forced."""

    def rollout(self, reward, version=None):
        made = ScriptedGenerator.rollout(self, reward, version)
        made.mask = [1, 0] if self.pacer.admitted == 1 and version is None else made.mask
        return made

    played = run({"rollout": rollout}, max_steps=2)
    folder = played.parts.folder
    assert folder.read("metrics.jsonl")[0]["config"] == json.loads((folder.path / "config.json").read_text())
    consumed = [(r["step"], *group) for r in folder.read("groups.jsonl") for group in r["groups"]]
    assert consumed == [(i // 3, p.key, 1, 2) for i, p in enumerate(played.generator.taken)]
    assert [r["lengths"] for r in folder.read("groups.jsonl")] == [[[1, 1], [2, 2], [2, 2]], [[2, 2]] * 3]


def test_requests_inside_the_engine(run):
    """While each step's groups are taken, 7 requests run for 2 s."""

    def take(self, count):
        self.counters.request_seconds += 14
        return ScriptedGenerator.take(self, count)

    for step in run({"take": take}, max_steps=2).steps:
        assert step["requests"] * step["seconds"] == pytest.approx(14)


def test_correct_samples_of_each_held_out_problem(run):
    """Five problems, of which 0, 1, 2, 0 and 1 of two samples are correct: one line for each evaluation, in the order
    of the problems. 4 of 10 are correct, and 3 of 5 problems have one that is."""

    def evaluate(self, problems, n_samples, temperature=None):
        self.settle()
        self.evaluating = True
        return [[self.rollout(1.0 if j < i % 3 else -1.0) for j in range(n_samples)] for i in range(len(problems))]

    played = run({"evaluate": evaluate}, max_steps=4)
    assert played.parts.folder.read("eval_counts.jsonl") == [
        {"step": step, "n_samples": 2, "correct": [0, 1, 2, 0, 1]} for step in (0, 4)
    ]
    assert [(r["pass_rate"], r["pass_at_k"]) for r in played.evals] == [(0.4, 0.6)] * 2


def test_truncation_is_explained_before_training_only(run, capsys):
    """Every completion of every evaluation is cut: the budget to raise is named at step 0, and not at steps 4 and 8."""

    def rollout(self, reward, version=None):
        made = ScriptedGenerator.rollout(self, reward, version)
        made.finish_reason, made.completion_ids = "length", [9] * 22
        made.logprobs, made.mask, made.versions = [0.0] * 22, [1] * 22, made.versions[:1] * 22
        return made

    run({"rollout": rollout}, length_control="none")
    out = capsys.readouterr().out
    assert out.count("raise --max_budget from 18 to 84, at least") == 1
    assert out.index("evaluation at step 0") < out.index("raise --max_budget") < out.index("step    1")


def test_samples_reach_no_terminal(monkeypatch, program, tmp_path):
    """Completions that would clear the screen, ring, or rename the window: samples.jsonl is plain ASCII without control
    characters, from which the text comes back whole; nothing of it is printed."""
    text = "\x1b[2J\x07\x1b]0;title\x07\r\x7f\x9b31m\u202e\ud800 </think> 1"
    monkeypatch.setattr(chain.ChainTask, "text", lambda self, ids: text)
    _, out, err = program("--max_steps", "1")
    content = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in content)
    records = Folder(tmp_path / "run").read("samples.jsonl")
    assert len(records) == 4 and {r["completion"] for r in records} == {text}
    assert not set(out + err) & set("\x1b\x07\x7f\x9b\u202e\ud800") and "title" not in out + err


def test_verdicts_are_logged(monkeypatch, tmp_path, model):
    """What became of the judged completions, lost reward workers among it, is in each step's record."""
    monkeypatch.setattr(chain.ChainTask, "counts", Counter(correct=5, timeout=2), raising=False)
    go(monkeypatch, tmp_path / "run", model, "--max_steps", "1")
    [record] = without_times(tmp_path / "run", "metrics.jsonl")
    assert record["verdicts"] == {"correct": 5, "timeout": 2}


@pytest.mark.long
def test_saving_is_timed(monkeypatch, tmp_path, model):
    """Two seconds in each save, after steps 2, 4 and 6: the record of the next step says so."""
    finish_checkpoint, clock, real = Folder.finish_checkpoint, [0.0], time.monotonic

    def slow(self, *args):
        clock[0] += 2.0
        return finish_checkpoint(self, *args)

    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    monkeypatch.setattr(Folder, "finish_checkpoint", slow)
    go(monkeypatch, tmp_path / "run", model)
    spent = [r["save_seconds"] for r in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in r]
    assert [s > 0 for s in spent] == [False, False, True, False, True, False, True]
    assert all(2.0 < s < 3.0 for s in spent if s)
