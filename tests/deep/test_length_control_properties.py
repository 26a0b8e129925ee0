"""length_control.py at every boundary, with ids of every kind, and the penalty against fractions. tests/test_length_control.py
has the numbers by hand."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_length_control import cut

from length_control import overlong_penalty


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
        ({"phrase_ids": []}, "phrase_ids must end with end_of_thinking_ids"),
        ({"phrase_ids": [9], "end_of_thinking_ids": [8, 9]}, "phrase_ids must end with end_of_thinking_ids"),
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


@pytest.mark.parametrize("reason", ["max_tokens", "LENGTH", 1])
def test_unknown_finish_reasons_are_refused(reason):
    """Taken for "stop", it would end every completion that was cut in the middle of its thinking."""
    with pytest.raises(ValueError, match="must be stop, length, abort or N"):
        cut().second_leg([1], [3], reason)
