"""length_control.py on worked examples and at every boundary."""

import collections
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from length_control import PHRASE, Interruption, SecondLeg, overlong_penalty, truncation_rate, truncation_warning

SETTINGS = {
    "min_budget": 10,
    "max_budget": 12,
    "answer_budget": 4,
    "phrase_ids": [7, 9],
    "end_of_thinking_ids": [9],
}
SPLIT = {"phrase_ids": [7, 8, 9], "end_of_thinking_ids": [8, 9]}  # a mark of two tokens


def cut(**change) -> Interruption:
    return Interruption(**SETTINGS | change)


@pytest.mark.parametrize(
    ("completion", "reason", "forced", "left"),
    [
        ([3, 3, 3], "length", [7, 9], 4),  # a: thinking was cut; the answer budget of 4 is untouched
        ([], "length", [7, 9], 4),
        ([3, 9, 4, 4, 4], "length", [], 1),  # b: thinking ended at 9, three of four answer tokens are sampled
        ([3, 3, 9], "length", [], 4),  # the mark is the last token of the budget
        ([3, 9, 4, 9], "length", [], 2),  # a second mark inside the answer is an answer token like any other
    ],
)
def test_second_leg_by_hand(completion, reason, forced, left):
    leg = cut().second_leg([1, 2], completion, reason)
    assert leg == SecondLeg(prompt_ids=[1, 2, *completion, *forced], forced_ids=forced, max_tokens=left)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ([3, 9, 4, 4, 4, 4], "length"),  # c: no answer token is left, so the completion is truncated
        ([3, 9, 4, 4, 4, 4, 4], "length"),
        ([3, 9, 4], "stop"),  # d: it finished
        ([3] * 12, "stop"),  # at the very length of the budget, too: the finish reason tells
        ([3] * 10, "abort"),
        ([3] * 10, None),
    ],
)
def test_no_second_leg_by_hand(completion, reason):
    assert cut().second_leg([1, 2], completion, reason) is None


def test_mask_by_hand():
    assert cut().mask(3, 2, 1) == [1, 1, 1, 0, 0, 1]


def test_penalty_by_hand():
    """L_max = 14, L_cache = 2: 0 up to 12 tokens, -1/2 at 13, -1 at 14 and beyond. L_cache = L_max: a ramp from 0 on."""
    lengths = torch.tensor([0, 11, 12, 13, 14, 15, 100])
    assert overlong_penalty(lengths, 14, 2).tolist() == [0, 0, 0, -0.5, -1, -1, -1]
    assert overlong_penalty(torch.arange(6), 4, 4).tolist() == [0, -0.25, -0.5, -0.75, -1, -1]


def test_truncation_rate_by_hand():
    """Two of five are cut; an aborted or unknown end is not a truncation, but counts among the five."""
    assert truncation_rate(iter(["length", "stop", "length", None, "abort"])) == 2 / 5
    assert truncation_rate([]) == 0


def test_budgets_are_uniform_with_both_ends():
    """9,000 draws from 10..12: 3,000 of each, standard deviation 45. They depend on the random generator alone."""

    def draws(seed: int) -> list[int]:
        rng = random.Random(seed)
        return [cut().draw_budget(rng) for _ in range(9000)]

    counts = collections.Counter(draws(1))
    assert set(counts) == {10, 11, 12}
    assert all(abs(count - 3000) < 200 for count in counts.values())
    assert draws(1) == draws(1) != draws(2)
    assert cut(min_budget=12).draw_budget(random.Random(0)) == 12


@pytest.mark.parametrize("ids", [[8], [9], [9, 8], [8, 3, 9], [8, 8], [3, 8]])
def test_part_of_a_mark_is_not_the_mark(ids):
    """The mark is (8, 9): its tokens alone, in the wrong order, apart, or cut by the budget do not end thinking."""
    assert cut(**SPLIT).second_leg([1], ids, "length").forced_ids
    assert not cut(**SPLIT).second_leg([1], [*ids, 8, 9], "length").forced_ids


def test_thinking_end_decides_where_the_mark_has_several_forms():
    """Tokens from 90 on hold the mark's end, as `>\\n\\n` holds that of `</think>`: 91 ends thinking like 90. In 3 91 4 4
    two of four answer tokens are sampled, so two more may come."""

    def bracketed(ids):
        return next((n for n, i in enumerate(ids, 1) if i >= 90), None)

    several = {"phrase_ids": [7, 92], "end_of_thinking_ids": [90], "thinking_end": bracketed}
    assert cut(phrase_ids=[7, 90], end_of_thinking_ids=[90]).second_leg([1], [3, 91, 4, 4], "length").forced_ids
    assert cut(**several).second_leg([1], [3, 91, 4, 4], "length") == SecondLeg([1, 3, 91, 4, 4], [], 2)
    assert cut(**several).second_leg([1], [3, 3], "length").prompt_ids == [1, 3, 3, 7, 92]
    with pytest.raises(ValueError, match=r"phrase_ids must end thinking, and thinking_end finds no end in \[7, 8\]"):
        cut(**several | {"phrase_ids": [7, 8]})


def test_the_longest_completion():
    assert Interruption(1, 1, 1, [9], [9]).max_completion == 3
    assert cut(**SPLIT).max_completion == 12 + 3 + 4


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_tuples_and_arrays_serve_as_ids(kind):
    """What comes out is Python's own integers, which an engine takes and JSON can write, and nothing that went in."""
    prompt, completion, phrase = kind([1]), kind([3]), kind([7, 9])
    interruption = cut(phrase_ids=phrase, end_of_thinking_ids=kind([9]))
    assert interruption.second_leg(prompt, kind([3, 9]), "length").forced_ids == []
    leg = interruption.second_leg(prompt, completion, "length")
    assert leg.prompt_ids == [1, 3, 7, 9]
    assert leg.forced_ids == [7, 9]
    assert {type(i) for i in leg.prompt_ids + leg.forced_ids} == {int}
    leg.prompt_ids.append(0)
    leg.forced_ids.append(0)
    assert ([*prompt], [*completion], [*phrase]) == ([1], [3], [7, 9])
    assert interruption.second_leg(prompt, completion, "length").forced_ids == [7, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_budget": 13}, r"smallest thinking budget \(13\) must not exceed the largest \(12\)"),
        ({"min_budget": 0}, "budgets must be at least 1 token, got 0 and 4"),
        ({"answer_budget": 0}, "budgets must be at least 1 token, got 10 and 0"),
        ({"end_of_thinking_ids": []}, "end_of_thinking_ids is empty"),
        ({"phrase_ids": [9, 7]}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": []}, "phrase_ids must end with end_of_thinking_ids"),
        (SPLIT | {"phrase_ids": [9]}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": PHRASE, "end_of_thinking_ids": "</think>"}, "phrase_ids must be token ids, got the text 'Okay"),
        ({"end_of_thinking_ids": ["</think>"]}, "end_of_thinking_ids must be token ids, got the text"),
    ],
)
def test_impossible_settings(change, message):
    with pytest.raises(ValueError, match=message):
        cut(**change)


KINDS = st.sampled_from([torch.int64, torch.int32, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.integers(0, 256), max_size=9), st.integers(1, 256), st.data(), KINDS)
def test_penalty_of_any_ramp(values, max_length, data, kind):
    """Oracle: fractions. FP32 at least, and the lengths are not written to."""
    cache_length = data.draw(st.integers(1, max_length))
    lengths = torch.tensor(values, dtype=kind)
    penalty = overlong_penalty(lengths, max_length, cache_length)
    ramp = [Fraction(max_length - n, cache_length) - 1 for n in values]
    assert penalty.tolist() == pytest.approx([float(max(-1, min(0, x))) for x in ramp], abs=1e-6)
    assert penalty.shape == lengths.shape
    assert penalty.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert lengths.tolist() == values
    assert lengths._version == 0


@pytest.mark.parametrize(
    ("rate", "level"),
    [(0, None), (0.049, None), (0.05, "Warning"), (0.1, "Warning"), (0.101, "WARNING"), (1, "WARNING")],
)
def test_truncation_warning_levels(rate, level):
    """Below 5 % is healthy, above 10 % is where runs have collapsed."""
    warning = truncation_warning(rate)
    if level is None:
        assert warning is None
    else:
        assert warning.startswith(f"{level}: {rate:.1%} of completions")


@pytest.mark.parametrize("reason", ["max_tokens", "LENGTH", 1])
def test_unknown_finish_reasons_are_refused(reason):
    """Taken for "stop", it would end every completion that was cut in the middle of its thinking."""
    with pytest.raises(ValueError, match="must be stop, length, abort or N"):
        cut().second_leg([1], [3], reason)


@pytest.mark.parametrize("cache_length", [0, -1, 15])
def test_ramps_that_are_refused(cache_length):
    with pytest.raises(ValueError, match=r"from 1 to max_length \(14\)"):
        overlong_penalty(torch.tensor([1]), 14, cache_length)


@pytest.mark.parametrize("rate", [-0.01, 1.01, 7, float("nan")])
def test_rates_that_are_no_share_are_refused(rate):
    with pytest.raises(ValueError, match="share from 0 to 1"):
        truncation_warning(rate)
