"""length_control.py, worked by hand: the four ways a first leg ends, the mask, the budgets, and the penalty."""

import collections
import random

import pytest
import torch

from length_control import Interruption, SecondLeg, overlong_penalty, truncation_rate, truncation_warning

SETTINGS = {
    "min_budget": 10,
    "max_budget": 12,
    "answer_budget": 4,
    "phrase_ids": [7, 9],
    "end_of_thinking_ids": [9],
}


def cut(**change) -> Interruption:
    return Interruption(**SETTINGS | change)


@pytest.mark.parametrize(
    ("completion", "reason", "forced", "left"),
    [
        ([3, 3, 3], "length", [7, 9], 4),  # a: thinking was cut; the answer budget of 4 is untouched
        ([3, 9, 4, 4, 4], "length", [], 1),  # b: thinking ended at 9, three of four answer tokens are sampled
        ([3, 3, 9], "length", [], 4),  # b: the mark is the last token of the budget
        ([3, 9, 4, 9], "length", [], 2),  # b: a second mark inside the answer is an answer token like any other
        ([3, 9, 4, 4, 4, 4], "length", [], 0),  # c: no answer token is left, so the completion is truncated
        ([3, 9, 4, 4, 4, 4, 4], "length", [], 0),
        ([3, 9, 4], "stop", [], 0),  # d: it finished
        ([3] * 12, "stop", [], 0),  # d: at the very length of the budget, too; the finish reason tells
        ([3] * 10, "abort", [], 0),
    ],
)
def test_second_leg_by_hand(completion, reason, forced, left):
    leg = cut().second_leg([1, 2], completion, reason)
    assert leg == (SecondLeg([1, 2, *completion, *forced], forced, left) if left else None)


T, END, A, STOP = 3, 9, 4, 1


@pytest.mark.parametrize(
    ("sampled", "completion", "reason"),
    [
        ([T] * 11 + [A] * 5, [T] * 11 + [7, END] + [A] * 4, "length"),  # a
        ([T] * 11 + [A, STOP], [T] * 11 + [7, END, A, STOP], "stop"),  # a
        ([T] * 7 + [END] + [A] * 9, [T] * 7 + [END] + [A] * 4, "length"),  # b
        ([T] * 5 + [END] + [A] * 9, [T] * 5 + [END] + [A] * 5, "length"),  # c
        ([T] * 5 + [END, A, STOP], [T] * 5 + [END, A, STOP], "stop"),  # d
    ],
)
def test_a_rollout_of_any_generate_and_of_a_loop_over_tokens(sampled, completion, reason):
    """The four cases of the docstring, with a budget of 11: what a model samples in turn, and what comes of it. Each sampled
    token has log-prob -.5; the phrase 7 9 has none and is masked. Between two rows that stop at once the order stays."""
    control = cut(min_budget=11, max_budget=11)
    forced = range(11, 13) if 7 in completion else ()
    mask = [int(i not in forced) for i in range(len(completion))]
    calls = []

    def generate(prompts, limits):
        calls.append(list(zip(prompts, limits, strict=True)))
        legs = []
        for prompt, limit in calls[-1]:
            script = [STOP] if prompt[0] else rest[: rest.index(STOP) + 1 if STOP in rest else None]
            ids = script[:limit]
            if not prompt[0]:
                del rest[: len(ids)]
            legs.append((ids, [-0.5] * len(ids), "stop" if ids[-1] == STOP else "length"))
        return legs

    rest = list(sampled)
    other = ([STOP], [-0.5], [1], "stop")
    rollouts = list(control.two_legs(generate, [[8], [0], [8]], random.Random(0)))
    assert rollouts == [other, (completion, [-0.5 * m for m in mask], mask, reason), other]
    assert [limit for _, limit in calls[0]] == [11] * 3 and len(calls) <= 2

    ids, rest = [], list(sampled)
    while (phrase := control.after_token(ids, 11)) is not None:
        ids += [*phrase, rest.pop(0)]
        if ids[-1] == STOP:
            break
    assert ids == completion and (phrase is None) == (reason == "length")


def test_mask_by_hand():
    """Three sampled tokens, a phrase of two, one sampled token of answer."""
    assert cut().mask(3, 2, 1) == [1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("ids", [[8], [9], [9, 8], [8, 3, 9], [8, 8]])
def test_part_of_a_mark_is_not_the_mark(ids):
    """The mark is (8, 9): its tokens alone, in the wrong order or apart do not end thinking."""
    two_tokens = cut(phrase_ids=[7, 8, 9], end_of_thinking_ids=[8, 9])
    assert two_tokens.second_leg([1], ids, "length").forced_ids
    assert not two_tokens.second_leg([1], [*ids, 8, 9], "length").forced_ids


def test_thinking_end_decides_where_the_mark_has_several_forms():
    """Tokens from 90 on hold the mark's end, as `>\\n\\n` holds that of `</think>`: 91 ends thinking like 90. In 3 91 4 4
    two of four answer tokens are sampled, so two more may come."""

    def thinking_end(ids):
        return next((n for n, i in enumerate(ids, 1) if i >= 90), None)

    several = cut(phrase_ids=[7, 92], end_of_thinking_ids=[90], thinking_end=thinking_end)
    assert several.second_leg([1], [3, 91, 4, 4], "length") == SecondLeg([1, 3, 91, 4, 4], [], 2)
    assert several.second_leg([1], [3, 3], "length").prompt_ids == [1, 3, 3, 7, 92]
    with pytest.raises(ValueError, match=r"thinking_end finds no end in \[7, 8\]"):
        cut(phrase_ids=[7, 8], thinking_end=thinking_end)


def test_budgets_are_uniform_with_both_ends():
    """9,000 draws from 10..12: 3,000 of each, standard deviation 45. The longest completion thinks for 12 tokens, is
    interrupted by 2, and answers with 4."""
    rng = random.Random(1)
    counts = collections.Counter(cut().draw_budget(rng) for _ in range(9000))
    assert set(counts) == {10, 11, 12}
    assert all(abs(count - 3000) < 200 for count in counts.values())
    assert cut().max_completion == 12 + 2 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_budget": 13}, r"smallest thinking budget \(13\) must not exceed the largest \(12\)"),
        ({"min_budget": 0}, "at least 1 token, got 0 and 4"),
        ({"answer_budget": 0}, "at least 1 token, got 10 and 0"),
        ({"end_of_thinking_ids": []}, "end_of_thinking_ids is empty"),
        ({"phrase_ids": [9, 7]}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": "time is up"}, "invalid literal for int"),  # text, not ids
    ],
)
def test_impossible_settings(change, message):
    with pytest.raises(ValueError, match=message):
        cut(**change)
    assert Interruption(1, 1, 1, [9], [9]).max_completion == 3  # the smallest that are possible


def test_penalty_by_hand():
    """L_max = 14, L_cache = 2: 0 up to 12 tokens, -1/2 at 13, -1 at 14 and beyond. L_cache = L_max: a ramp from 0 on."""
    lengths = torch.tensor([0, 11, 12, 13, 14, 15, 100])
    assert overlong_penalty(lengths, 14, 2).tolist() == [0, 0, 0, -0.5, -1, -1, -1]
    assert overlong_penalty(torch.arange(6), 4, 4).tolist() == [0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalty(torch.tensor([3, 4]), 4, 1).tolist() == [0, -1]
    with pytest.raises(ValueError, match=r"from 1 to max_length \(14\), got 15"):
        overlong_penalty(lengths, 14, 15)
    with pytest.raises(ValueError, match="got 0"):
        overlong_penalty(lengths, 14, 0)


def test_truncation_rate_by_hand():
    """Two of five are cut; an aborted or unknown end is not a truncation, but counts among the five. Below 5 % is healthy,
    above 10 % is where runs have collapsed."""
    assert truncation_rate(["length", "stop", "length", None, "abort"]) == 2 / 5
    assert truncation_rate([]) == 0
    assert truncation_warning(0.0) is truncation_warning(0.049) is None
    for rate, words in (0.05, "Warning: 5.0%"), (0.1, "Warning: 10.0%"), (0.101, "WARNING: 10.1%"), (1, "WARNING: 100"):
        assert truncation_warning(rate).startswith(words)
