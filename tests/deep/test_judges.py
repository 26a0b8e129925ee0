"""Judges: a pool of worker processes that survives what it is given, and the user's own reward functions."""

from contextlib import closing

import pytest

from tasks.judge_process import BadReward, Job, Verdict, verdict_of
from tasks.judges import RewardPool

pytestmark = pytest.mark.long  # processes of its own, and deadlines


FUNCTIONS = """
import os

def equal(prompt, completion, answer): return completion == answer
def number(prompt, completion, answer): return float(completion)
def pair(prompt, completion, answer): return 0.25, True
def echo(prompt, completion, answer): return len(prompt), completion == answer["text"]
def loud(prompt, completion, answer):
    print("noise\\n" * 1000); os.write(1, b"more noise\\n"); return True
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A working folder with the user's module `own`, and one that has the name of our package."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    (tmp_path / "tasks.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)


def test_kinds():
    right, unreadable = r"</think> \boxed{4}", r"\frac{"
    cases = [
        (r"\boxed{4}", "4", "unfinished"), (right, "4", "correct"), (right, 4, "correct"), (right, "5", "wrong"),
        ("</think> no idea", "4", "unparsed"), (right, unreadable, "bad_answer"), (right, "", "bad_answer"),
    ]  # fmt: skip
    texts = ("6 1 </think>  6 2\n", "</think> 6 2.", "6 2", "</think> </think> 6 2")
    answers = ["42", r"\frac{1}{2}", "Evelyn", unreadable, "", "9" * 2000 + "x"]
    with closing(RewardPool(["math", "exact"], workers=1, end_of_thinking="</think>")) as pool:
        # Asked before training, and not counted.
        assert pool.answers_readable("math", answers) == [True] * 3 + [False] * 3
        assert pool.answers_readable("exact", answers) == [True] * 6 and not pool.counts
        verdicts = pool.judge([Job("math", "", completion, answer) for completion, answer, _ in cases])
        assert [verdict.kind for verdict in verdicts] == [kind for _, _, kind in cases]
        assert all(verdict == (1.0, True, "correct") or verdict[:2] == (-1.0, False) for verdict in verdicts)
        verdicts = pool.judge([Job("exact", "", text, "6 2") for text in texts])
        assert [verdict.kind for verdict in verdicts] == ["correct", "wrong", "unfinished", "wrong"]
        assert pool.counts == {"correct": 3, "wrong": 3, "unparsed": 1, "unfinished": 2, "bad_answer": 2}


def test_return_values():
    """A number, above 0 is correct, or a pair (reward, correct); NumPy's and torch's like Python's."""
    import numpy
    import torch

    for value, reward, correct in (
        (0.5, 0.5, True), (True, 1.0, True), (numpy.bool_(True), 1.0, True), (torch.tensor(0.5), 0.5, True),
        ((-1, 1), -1.0, True), (0, 0.0, False), (-2, -2.0, False), (numpy.float32(-2), -2.0, False),
        ((0.25, False), 0.25, False), ([torch.tensor(2), numpy.bool_(0)], 2.0, False),
    ):  # fmt: skip
        verdict = verdict_of(value)
        assert verdict == Verdict(reward, correct, "correct" if correct else "wrong")
        assert (type(verdict.reward), type(verdict.correct)) == (float, bool)  # JSON writes no other
    for bad in (None, "yes", {}, (1, 2, 3), ("1", True), (None, True)):
        with pytest.raises(BadReward, match="a number or a pair"):
            verdict_of(bad)
    for bad in (float("nan"), float("-inf"), (float("nan"), True), 1.1e6, 10**400):
        with pytest.raises(BadReward, match="from -1e\\+06 to 1e\\+06"):
            verdict_of(bad)


def test_own_functions(functions, capfd):
    """What they print is not on the run's stdout. Lone surrogates and megabytes arrive as they are."""
    odd = "\udfff \x00 \u2028"
    cases = [
        ("equal", "", "x </think> y", "x </think> y", 1.0),
        ("equal", "", "a", "b", 0.0),
        ("equal", "", "z" * 3_000_000, "z" * 3_000_000, 1.0),
        ("number", "", "-0.5", "", -0.5),
        ("pair", "", "", "", 0.25),
        ("loud", "", "", "", 1.0),
        ("echo", "\ud800" * 7, odd, {"text": odd}, 7.0),
    ]
    with closing(RewardPool([f"own:{name}" for name, *_ in cases], timeout=5, end_of_thinking="</think>")) as pool:
        verdicts = pool.judge([Job(f"own:{name}", *job) for name, *job, _ in cases])
    assert verdicts == [(x, x > 0, "correct" if x > 0 else "wrong") for *_, x in cases]
    assert capfd.readouterr().out == ""
