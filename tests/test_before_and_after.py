"""Answers before and after a run: each side's legs, and the report."""

from types import SimpleNamespace

import before_and_after

from length_control import Interruption

STOP = 2
CONTROL = Interruption(3, 5, answer_budget=2, phrase_ids=[8, 9], end_of_thinking_ids=[9])


def sampler(*legs):
    """Answers each call with the next of `legs`, which must fit its limit; keeps the prompts."""
    left, prompts = list(legs), []

    def sample(prompt_ids, max_tokens):
        prompts.append(list(prompt_ids))
        assert len(left[0]) <= max_tokens
        return left.pop(0)

    return sample, prompts


def test_thinking_that_is_cut_goes_on_behind_the_phrase():
    """Five tokens of thinking, the largest budget; then phrase 8 9 and an answer of two."""
    sample, prompts = sampler([3] * 5, [4, STOP])
    assert before_and_after.completion(sample, [STOP], [1], CONTROL, 99) == [3, 3, 3, 3, 3, 8, 9, 4, STOP]
    assert prompts == [[1], [1, 3, 3, 3, 3, 3, 8, 9]]


def test_a_completion_that_ends_by_itself_has_one_leg():
    sample, _ = sampler([3, 3, 3, 9, STOP])  # its fifth and last token is the stop
    assert before_and_after.completion(sample, [STOP], [1], CONTROL, 99) == [3, 3, 3, 9, STOP]
    sample, _ = sampler([3] * 7)
    assert before_and_after.completion(sample, [STOP], [1], None, 7) == [3] * 7


def test_each_data_set_is_shown():
    """Two of three sums, and the one function behind them."""
    problems = [SimpleNamespace(source=s, key=k) for s, k in (("sums", 0), ("sums", 1), ("sums", 2), ("functions", 3))]
    assert [p.key for p in before_and_after.first_of_each(problems, 2)] == [0, 1, 3]


def test_the_report_has_both_sides_under_each_problem():
    records = [{"question": "2 +\n 2 =", "answer": "4", "before": ("It is\n 5.", False), "after": ("4" * 91, True)}]
    assert before_and_after.report(records).splitlines() == [
        "2 + 2 =    (4)",
        "    before  wrong  It is 5.",
        f"    after   right  {'4' * 89}…",
    ]


def test_the_report_leaves_out_a_programs_tests():
    record = {
        "question": "Write f.",
        "answer": {"tests": ["assert f()"]},
        "before": ("no", False),
        "after": ("f", True),
    }
    assert before_and_after.report([record]).splitlines()[0] == "Write f."
