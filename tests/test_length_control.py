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

SPLIT = {"phrase_ids": [7, 8, 9], "end_of_thinking_ids": [8, 9]}  # a mark of two tokens


def cut(**change) -> Interruption:
    ids = {"phrase_ids": [7, 9], "end_of_thinking_ids": [9]}
    return Interruption(**{"min_budget": 10, "max_budget": 12, "answer_budget": 4} | ids | change)


@pytest.mark.parametrize(
    "completion, reason, forced, left",
    [
        ([3, 3, 3], "length", [7, 9], 4),  # a: thinking was cut; the answer budget of 4 is untouched
        ([], "length", [7, 9], 4),
        ([3, 9, 4, 4, 4], "length", [], 1),  # b: thinking ended at 9, three of four answer tokens are sampled
        ([3, 3, 9], "length", [], 4),  # the mark is the last token of the budget
        ([3, 9, 4, 9], "length", [], 2),  # a second mark inside the answer is an answer token like any other
        ([3, 9, 4, 4, 4, 4], "length", [], None),  # c: no answer token is left, so the completion is truncated
        ([3, 9, 4, 4, 4, 4, 4], "length", [], None),
        ([3, 9, 4], "stop", [], None),  # d: it finished
        ([3] * 12, "stop", [], None),  # at the very length of the budget, too: the finish reason tells
        ([3] * 10, "abort", [], None),
        ([3] * 10, None, [], None),
    ],
)
def test_second_leg_by_hand(completion, reason, forced, left):
    leg = left and SecondLeg(prompt_ids=[1, 2, *completion, *forced], forced_ids=forced, max_tokens=left)
    assert cut().second_leg([1, 2], completion, reason) == leg


def test_mask_by_hand():
    assert cut().mask(3, 2, 1) == [1, 1, 1, 0, 0, 1] and cut().mask(2, 0, 0) == [1, 1]


def test_penalty_by_hand():
    """L_max = 14, L_cache = 2: 0 up to 12 tokens, -1/2 at 13, -1 at 14 and beyond. L_cache = L_max: a ramp from 0 on."""
    lengths = torch.tensor([0, 11, 12, 13, 14, 15, 100])
    assert overlong_penalty(lengths, 14, 2).tolist() == [0, 0, 0, -0.5, -1, -1, -1]
    assert overlong_penalty(torch.arange(6), 4, 4).tolist() == [0, -0.25, -0.5, -0.75, -1, -1]


def test_truncation_rate_by_hand():
    """Two of five are cut; an aborted or unknown end is not a truncation, but counts among the five."""
    assert truncation_rate(iter(["length", "stop", "length", None, "abort"])) == 2 / 5
    assert truncation_rate([]) == 0 and truncation_rate(["length"]) == 1


def test_budgets_are_uniform_with_both_ends():
    """9,000 draws from 10..12: 3,000 of each, standard deviation 45. They depend on the random generator alone."""
    draws = [[cut().draw_budget(rng) for _ in range(9000)] for rng in map(random.Random, (1, 1, 2))]
    counts = collections.Counter(draws[0])
    assert set(counts) == {10, 11, 12} and all(abs(count - 3000) < 200 for count in counts.values())
    assert draws[0] == draws[1] != draws[2]
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

    interruption = cut(phrase_ids=[7, 92], end_of_thinking_ids=[90], thinking_end=bracketed)
    assert cut(phrase_ids=[7, 90], end_of_thinking_ids=[90]).second_leg([1], [3, 91, 4, 4], "length").forced_ids
    assert interruption.second_leg([1], [3, 91, 4, 4], "length") == SecondLeg([1, 3, 91, 4, 4], [], 2)
    assert interruption.second_leg([1], [3, 3], "length").prompt_ids == [1, 3, 3, 7, 92]
    with pytest.raises(ValueError, match=r"phrase_ids must end thinking, and thinking_end finds no end in \[7, 8\]"):
        cut(phrase_ids=[7, 8], end_of_thinking_ids=[90], thinking_end=bracketed)


def test_the_longest_completion_and_the_papers_phrase():
    assert Interruption(1, 1, 1, [9], [9]).max_completion == 3 and cut(**SPLIT).max_completion == 12 + 3 + 4
    assert PHRASE.startswith("Okay, time is up.") and PHRASE.endswith("</think>")


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_tuples_and_arrays_serve_as_ids(kind):
    """What comes out is Python's own integers, which an engine takes and JSON can write, and nothing that went in."""
    prompt, completion, phrase = kind([1]), kind([3]), kind([7, 9])
    interruption = cut(phrase_ids=phrase, end_of_thinking_ids=kind([9]))
    assert interruption.second_leg(prompt, kind([3, 9]), "length").forced_ids == []
    leg = interruption.second_leg(prompt, completion, "length")
    assert leg.prompt_ids == [1, 3, 7, 9] and leg.forced_ids == [7, 9]
    assert {type(i) for i in leg.prompt_ids + leg.forced_ids} == {int}
    leg.prompt_ids.append(0), leg.forced_ids.append(0)
    assert ([*prompt], [*completion], [*phrase]) == ([1], [3], [7, 9])
    assert interruption.second_leg(prompt, completion, "length").forced_ids == [7, 9]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"min_budget": 13}, r"smallest thinking budget \(13\) must not exceed the largest \(12\)"),
        ({"min_budget": 0}, "budgets must be at least 1 token, got 0 and 4"),
        ({"answer_budget": 0}, "budgets must be at least 1 token, got 10 and 0"),
        ({"end_of_thinking_ids": []}, "end_of_thinking_ids is empty"),
        ({"phrase_ids": [9, 7]}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": []}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": [9], "end_of_thinking_ids": [8, 9]}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": [7]}, "tokenize phrase and mark together, as a space before .* or a newline after it changes"),
        ({"phrase_ids": PHRASE, "end_of_thinking_ids": "</think>"}, "phrase_ids must be token ids, got the text 'Okay"),
        ({"end_of_thinking_ids": ["</think>"]}, "end_of_thinking_ids must be token ids, got the text"),
        ({"end_of_thinking_ids": "9"}, "end_of_thinking_ids must be token ids, got the text"),
    ],
)
def test_impossible_settings(change, message):
    with pytest.raises(ValueError, match=message) as error:
        cut(**change)
    assert "\n" not in str(error.value)


KINDS = st.sampled_from([torch.int64, torch.int32, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.integers(0, 256), max_size=9), st.integers(1, 256), st.data(), KINDS)
def test_penalty_of_any_ramp(lengths, max_length, data, kind):
    """Oracle: fractions. FP32 at least, and the lengths are not written to."""
    cache, given_ = data.draw(st.integers(1, max_length)), torch.tensor(lengths, dtype=kind)
    found = overlong_penalty(given_, max_length, cache)
    wanted = [float(max(-1, min(0, Fraction(max_length - n, cache) - 1))) for n in lengths]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6) and found.shape == given_.shape
    assert found.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert given_.tolist() == lengths and given_._version == 0


def test_truncation_warning_levels():
    """Of 100 completions: below 5 is healthy, above 10 is where runs have collapsed."""
    assert truncation_warning(0.0) is truncation_warning(0.04) is None
    for n, level in (5, "Warning"), (10, "Warning"), (11, "WARNING"), (100, "WARNING"):
        warning = truncation_warning(truncation_rate(["length"] * n + ["stop"] * (100 - n)))
        assert warning.startswith(level) and f"{n}.0%" in warning and "\n" not in warning


@pytest.mark.parametrize(
    ("call", "values", "message"),
    [
        # taken for "stop", an unknown reason would end every completion that was cut in the middle of its thinking
        (
            lambda x: cut().second_leg([1], [3], x),
            ["max_tokens", "LENGTH", 1, "error"],
            "must be stop, length, abort or N",
        ),
        (lambda x: overlong_penalty(torch.tensor([1]), 14, x), [0, -1, 15], r"from 1 to max_length \(14\)"),
        (truncation_warning, [-0.01, 1.01, 7, float("nan")], "share from 0 to 1"),
    ],
)
def test_values_that_are_refused(call, values, message):
    for value in values:
        with pytest.raises(ValueError, match=message):
            call(value)
