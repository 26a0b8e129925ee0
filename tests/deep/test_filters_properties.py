"""filters.py on drawn rewards and histories, and what each filter refuses. tests/test_filters.py has the numbers by hand."""

import math
import re

import numpy as np
import pytest
import torch

from filters import DynamicSampling, PassRateHistory, has_variance


def counts(history: PassRateHistory) -> dict:
    """Of each prompt (solved, rollouts)."""
    return {key: (solved, rollouts) for key, solved, rollouts in history.state_dict()["counts"]}


def test_a_threshold_above_1_retires_nothing():
    history = PassRateHistory(threshold=1.1)
    history.update("a", [1] * 50)
    assert not history.retired("a")


@pytest.mark.parametrize("kind", [torch.tensor, np.array, iter])
def test_correct_may_be_a_tensor(kind):
    history = PassRateHistory()
    history.update(3, kind([1, 0]))
    history.update(3, kind([True, False]))
    assert counts(history) == {3: (2, 4)}


@pytest.mark.parametrize("key", [torch.tensor(3), np.int64(3), ("a", np.int64(3)), ("a", (1, 2)), None])
def test_a_key_may_not_be_a_tensor(key):
    """Nor may a part of a tuple. To ask is refused, too: the answer would be "not retired"."""
    history = PassRateHistory()
    kind = type(key[1] if isinstance(key, tuple) else key).__name__
    message = rf"key must be str, int or a flat tuple of them, got {kind}; use str\(key\)"
    with pytest.raises(TypeError, match=message):
        history.update(key, [1])
    with pytest.raises(TypeError, match=message):
        history.retired(key)


def test_a_state_of_another_threshold_is_refused_and_leaves_the_history_alone():
    history = PassRateHistory()
    history.update("a", [1, 1, 0])
    with pytest.raises(ValueError, match=r"threshold 0\.8"):
        history.load_state_dict({"threshold": 0.8, "counts": [["b", 1, 1]], "retired": ["b"]})
    assert history.state_dict() == {"threshold": 0.9, "counts": [["a", 2, 3]], "retired": []}


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0], False),
        ([math.nan, 1.0], True),  # so that the error shows
    ],
)
def test_rewards_that_dynamic_sampling_keeps(rewards, kept):
    assert DynamicSampling(batch_prompts=2).offer("a", rewards) is kept


@pytest.mark.parametrize(("a", "b"), [((3,), (2,)), ((4, 1), (4,)), ((4, 1), (4, 1)), ((), ())])
def test_rewards_of_other_shapes_are_refused(a, b):
    with pytest.raises(ValueError, match=re.escape(f"rewards {a} and group_ids {b} must")):
        has_variance(torch.zeros(a), torch.zeros(b))


@pytest.mark.parametrize("threshold", [0, -0.1, math.nan, math.inf])
def test_thresholds_that_are_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        PassRateHistory(threshold)


@pytest.mark.parametrize("rewards", [[], torch.zeros(0)])
def test_a_group_without_rewards_is_refused(rewards):
    """It is a bug of the caller, and no group to discard."""
    with pytest.raises(ValueError, match="without rewards"):
        DynamicSampling(1).offer("a", rewards)
