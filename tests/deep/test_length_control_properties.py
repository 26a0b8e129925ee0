"""length_control.py at every boundary, with ids of every kind, and the penalty against fractions. tests/test_length_control.py
has the numbers by hand."""

import collections
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from length_control import PHRASE, Interruption, overlong_penalty, truncation_rate, truncation_warning

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


def test_truncation_rate_of_an_iterator():
    """Two of five are cut; an aborted or unknown end is not a truncation, but counts among the five."""
    assert truncation_rate(iter(["length", "stop", "length", None, "abort"])) == 2 / 5
    assert truncation_rate([]) == 0


def test_budgets_depend_on_the_random_generator_alone():
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
def test_what_is_no_mark_of_two_tokens(ids):
    """The mark is (8, 9): its tokens alone, in the wrong order, apart, or cut by the budget do not end thinking."""
    assert cut(**SPLIT).second_leg([1], ids, "length").forced_ids
    assert not cut(**SPLIT).second_leg([1], [*ids, 8, 9], "length").forced_ids


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
def test_settings_that_cannot_work_together(change, message):
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
