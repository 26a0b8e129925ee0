"""filters.py: hand-worked groups, properties over drawn rewards, and each filter's state through JSON."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from filters import DynamicSampling, NoVariedGroups, PassRateHistory, has_variance


def test_has_variance_by_hand():
    """Group 4: +1, -1, +1 stays; group 2: all +1 goes; group 9: all -1 goes; group 5: one row goes. Interleaved."""
    rewards = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    ids = torch.tensor([4, 2, 4, 9, 2, 4, 9, 5])
    assert has_variance(rewards, ids).tolist() == [True, False, True, False, False, True, False, False]


REWARDS = st.sampled_from([-0.5, -0.25, 0.1, 1 / 3, 1 / 3 + 1e-7, 1.0])


@given(st.lists(st.tuples(REWARDS, st.integers(0, 4))))
def test_has_variance_counts_different_rewards_whatever_the_order(rows):
    """Oracle: a set of each group's rewards has more than one element. No input is written."""
    rewards, ids = torch.tensor([r for r, _ in rows]), torch.tensor([i for _, i in rows], dtype=torch.long)
    different = [len({float(r) for r in rewards[ids == i]}) > 1 for i in ids]
    assert has_variance(rewards, ids).tolist() == different
    assert rewards._version == ids._version == 0


def test_has_variance_is_exact_equality():
    """Seven FP32 thirds have a std of 3e-8 in FP32, not 0: equal all the same. The next number is not equal."""
    thirds = torch.full((7,), 1 / 3)
    assert not has_variance(thirds, torch.zeros(7)).any()
    thirds[3] = torch.nextafter(thirds[3], torch.tensor(1.0))
    assert has_variance(thirds, torch.zeros(7)).all()
    for rewards in ([math.nan, 1.0], [math.nan, math.nan]):  # an error to be seen, not a group to be dropped in silence
        assert has_variance(torch.tensor(rewards), torch.zeros(2)).all()


def counts(history: PassRateHistory) -> dict:
    """Of each prompt (solved, rollouts)."""
    return {key: (solved, rollouts) for key, solved, rollouts in history.state_dict()["counts"]}


def test_pass_rate_history_by_hand():
    """12 of 16, then 16 of 16: 28/32 = .875 stays; then 16/16: 44/48 = .917 goes."""
    history = PassRateHistory()
    assert history.threshold == 0.9 and counts(history) == {} and not history.retired("a")
    for solved, so_far, retired in [(12, (12, 16), False), (16, (28, 32), False), (16, (44, 48), True)]:
        history.update("a", [1] * solved + [0] * (16 - solved))
        assert counts(history) == {"a": so_far} and history.retired("a") is retired
    history.update("b", [True, False])
    assert counts(history)["b"] == (1, 2) and not history.retired("b") and history.n_retired == 1
    history.update("c", [1] * 8 + [0])  # 8.1 of 9 would be .9
    assert not history.retired("c")


@pytest.mark.parametrize("rollouts", [3, 100, 3000])
def test_threshold_is_reached_at_equality(rollouts):
    """Every share of the rollouts retires at that share and not one below; in floating point .57 * 100 < 57 and .07 * 100
    > 7."""
    for solved in range(1, rollouts + 1, max(1, rollouts // 200)):
        for below in (0, 1):
            history = PassRateHistory(threshold=solved / rollouts)
            history.update(0, [1] * (solved - below) + [0] * (rollouts - solved + below))
            assert history.retired(0) is (below == 0)


def test_retired_for_good_and_groups_in_flight():
    """A retired prompt's group that was in flight is counted and lowers the rate to 10/20; the prompt stays retired."""
    history = PassRateHistory()
    history.update("a", [1] * 10)
    history.update("a", [0] * 10)
    assert counts(history) == {"a": (10, 20)} and history.retired("a") and history.n_retired == 1


def test_a_threshold_above_1_retires_nothing():
    history = PassRateHistory(threshold=1.1)
    history.update("a", [1] * 50)
    assert not history.retired("a") and counts(history) == {"a": (50, 50)}


@pytest.mark.parametrize("correct", [[1, -1], [0.5], [0.9, 1.0], [math.nan], [2], []])
def test_a_shaped_reward_is_no_pass_rate(correct):
    """Rewards of -1, lengths' penalties and NaN are refused, and leave the history as it was."""
    history = PassRateHistory()
    history.update("a", [1, 0])
    with pytest.raises(ValueError, match="0 or 1"):
        history.update("a", correct)
    assert counts(history) == {"a": (1, 2)}


def test_correct_may_be_a_tensor_and_keys_may_not():
    history = PassRateHistory()
    for correct in (torch.tensor([1, 0]), torch.tensor([True, False]), np.array([1.0, 0.0]), (c for c in (1, 0))):
        history.update(3, correct)
    assert counts(history) == {3: (4, 8)}
    for bad in (torch.tensor(3), np.int64(3), ("a", 1), None):
        for method, more in [(history.update, [[1]]), (history.retired, [])]:
            with pytest.raises(TypeError, match=rf"str or int, got {type(bad).__name__}; use int\(key\) or str\(key\)"):
                method(bad, *more)  # to ask is refused too: the answer would be "not retired"


GROUPS = st.lists(st.tuples(st.sampled_from([1, "1", "a", 2]), st.lists(st.booleans(), min_size=1, max_size=9)))


@given(GROUPS, st.data())
def test_history_goes_through_a_checkpoint(groups, data):
    """Through JSON text after any of the groups, with keys of both kinds (1 and "1" are two prompts): it goes on as if
    it had never stopped. What was there before the load is forgotten, and a saved state is a copy."""
    cut = data.draw(st.integers(0, len(groups)))
    history, loaded = PassRateHistory(0.6), PassRateHistory(0.6)
    for key, correct in groups[:cut]:
        history.update(key, correct)
    state = json.loads(json.dumps(history.state_dict()))
    loaded.load_state_dict(history.state_dict())
    loaded.update("elsewhere", [1])
    assert history.state_dict() == state
    loaded.load_state_dict(state)
    for key, correct in groups[cut:]:
        history.update(key, correct)
        loaded.update(key, correct)
    assert loaded.state_dict() == history.state_dict() and loaded.n_retired == history.n_retired
    assert all(loaded.retired(key) == history.retired(key) for key in (1, "1", "a", 2))


def test_a_state_of_other_settings_is_refused_and_leaves_the_history_alone():
    history = PassRateHistory()
    history.update("a", [1, 1, 0])
    before = history.state_dict()
    assert before == {"threshold": 0.9, "counts": [["a", 2, 3]], "retired": []}
    without = [({k: v for k, v in before.items() if k != missing}, "keys") for missing in before]
    for state, message in [(before | {"threshold": 0.8}, "threshold 0.8"), (before | {"extra": 1}, "keys"), *without]:
        with pytest.raises(ValueError, match=message):
            history.load_state_dict(state)
    assert history.state_dict() == before


def test_dynamic_sampling_by_hand():
    """B = 2. Offered: dead, live, dead, dead, live: keeps the 2nd and 5th."""
    sampler = DynamicSampling(batch_prompts=2)
    stream = {"a": [1, 1], "b": [1, -1], "c": [-1, -1], "d": [0.1, 0.1, 0.1], "e": torch.tensor([-1.0, 1.0])}
    for group, rewards in stream.items():
        assert not sampler.full and sampler.offer(group, rewards) is (group in "be")
    assert sampler.full
    with pytest.raises(RuntimeError, match="full"):
        sampler.offer("f", [1, -1])
    assert sampler.take() == ["b", "e"] and not sampler.full
    for group, so_far in ("g", "0 of 2"), ("h", "1 of 2"):
        with pytest.raises(RuntimeError, match=so_far):
            sampler.take()
        sampler.offer(group, [1, 0])
    assert sampler.take() == ["g", "h"]


def test_dynamic_sampling_compares_as_exactly_as_the_filter():
    """Rewards 1e-12 apart differ; a group of one never has variance; a NaN is kept, so that the error shows."""
    sampler = DynamicSampling(batch_prompts=2)
    assert sampler.offer("a", [0.5, 0.5 + 1e-12])
    assert not sampler.offer("b", [1.0])
    assert sampler.offer("c", [math.nan, 1.0])


def test_dynamic_sampling_gives_up():
    """B = 2: after 19 dead groups a live one starts the count anew; the 20th in a row after it ends it, not the 19th."""
    sampler = DynamicSampling(batch_prompts=2)
    for rewards in [[1, 1]] * 19 + [[1, 0]] + [[0, 0]] * 19:
        sampler.offer(None, rewards)
    with pytest.raises(NoVariedGroups, match="20 groups in a row"):
        sampler.offer(None, [1, 1])
    smallest = DynamicSampling(1)
    assert smallest.offer("a", [0, 1]) and smallest.take() == ["a"]


SHAPES = [((3,), (2,)), ((2,), (3,)), ((4, 1), (4,)), ((4, 1), (4, 1)), ((), ())]
REFUSED = [
    (f"rewards {a} and group_ids {b} must", lambda a=a, b=b: has_variance(torch.zeros(a), torch.zeros(b)))
    for a, b in SHAPES
]
REFUSED += [("threshold", lambda x=x: PassRateHistory(x)) for x in (0, -0.1, math.nan, math.inf)]
REFUSED += [("at least 1", lambda: DynamicSampling(0))]
# a bug of the caller, and no group to discard
REFUSED += [("without rewards", lambda x=x: DynamicSampling(1).offer("a", x)) for x in ([], torch.zeros(0))]


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_values_that_are_refused(words, call):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
