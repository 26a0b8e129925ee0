"""filters.py, worked by hand: which groups train, when a prompt retires, and how dynamic sampling fills a batch."""

import itertools
import json
import math
import random

import pytest
import torch
from torch.utils.data import DataLoader

from filters import DynamicSampling, NoVariedGroups, PassRateHistory, has_variance, unretired


def test_groups_with_equal_rewards_are_dropped():
    """Three groups, their rows mixed: 5 has 1, -1 and their mean, 2 has .1 three times, and 9 is a single row. A difference
    of 1e-7 is one. Of the last group a reward is NaN: an error to be seen, not a group to be dropped in silence."""
    rewards = torch.tensor([1.0, 0.1, -1.0, 0.1, -0.3, 0.1, 0.0])
    ids = torch.tensor([5, 2, 5, 2, 9, 2, 5])
    assert has_variance(rewards, ids).tolist() == [True, False, True, False, False, False, True]
    assert has_variance(torch.tensor([0.5, 0.5 + 1e-7]), torch.zeros(2)).all()
    for other in (1.0, math.nan):
        assert has_variance(torch.tensor([math.nan, other]), torch.zeros(2)).all()


def test_pass_rate_history_by_hand():
    """8 of 16, then 16 of 16: 24/32 = .75 stays; then 64 of 64: 88/96 = .917 goes, for good: 0 of 16 makes 88/112. (The mean
    of the groups' rates, .83, would stay.) A prompt that was never seen is not retired."""
    history = PassRateHistory()
    for solved, rollouts, retired in (8, 16, False), (16, 16, False), (64, 64, True), (0, 16, True):
        history.update("a", [1] * solved + [0] * (rollouts - solved))
        assert history.retired("a") is retired
    assert not history.retired("b") and history.n_retired == 1
    assert history.state_dict()["counts"] == [["a", 88, 112]]


def test_threshold_is_reached_at_equality():
    """Each share of 100 rollouts retires at that share and not one below; in floating point .57 * 100 < 57, .07 * 100 > 7.
    2 of 3 are less than .667."""
    for solved in range(1, 101):
        history = PassRateHistory(threshold=solved / 100)
        history.update("at", [1] * solved + [0] * (100 - solved))
        history.update("below", [1] * (solved - 1) + [0] * (101 - solved))
        assert history.retired("at")
        assert not history.retired("below")
    history = PassRateHistory(threshold=0.667)
    history.update("a", [1, 1, 0])
    assert not history.retired("a")


@pytest.mark.parametrize("correct", [[1, -1], [0.5], [math.nan], [2], []])
def test_a_shaped_reward_is_no_pass_rate(correct):
    """Rewards of -1, lengths' penalties and NaN are refused, and leave the history as it was."""
    history = PassRateHistory()
    history.update("a", [1, 0])
    with pytest.raises(ValueError, match="0 or 1"):
        history.update("a", correct)
    assert history.state_dict()["counts"] == [["a", 1, 2]]


def test_history_goes_through_a_checkpoint():
    """As JSON, where 1 and "1" stay two prompts, and a tuple is one. Then it goes on as if it had never stopped. What the
    other one had counted before is forgotten. A state that was kept with another threshold is refused."""
    history, loaded = PassRateHistory(0.6), PassRateHistory(0.6)
    history.update(1, [1, 1])
    history.update("1", [1, 0])
    history.update(("gsm8k", 3), [1])
    loaded.update("elsewhere", [1])
    loaded.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert loaded.state_dict() == history.state_dict()
    loaded.update("1", [1, 1])
    assert [loaded.retired(key) for key in (1, "1", ("gsm8k", 3), "elsewhere")] == [True, True, True, False]
    assert not history.retired("1")
    with pytest.raises(ValueError, match=r"threshold 0\.6, not with 0\.9"):
        PassRateHistory().load_state_dict(history.state_dict())


def retired_of(*keys) -> PassRateHistory:
    history = PassRateHistory()
    for key in keys:
        history.update(key, [1])
    return history


@pytest.mark.parametrize(
    ("prompts", "key", "retired", "left"),
    [
        (range(4), {}, (0, 2), [1, 3]),  # indices: the prompt is its key
        (DataLoader([{"id": n} for n in range(3)], None), {"key": lambda x: x["id"]}, (0, 1), [{"id": 2}]),
        ([("gsm8k", 3), ("math", 3)], {}, (("gsm8k", 3),), [("math", 3)]),
        (itertools.islice(itertools.cycle("abc"), 7), {}, ("a",), ["b", "c", "b", "c"]),
        (random.Random(0).sample(range(3), 3), {}, (0, 1, 2), []),  # a finite one ends
    ],
)  # fmt: skip
def test_retired_prompts_are_passed_over(prompts, key, retired, left):
    assert list(unretired(prompts, retired_of(*retired), **key)) == left


def test_a_prompt_is_looked_up_when_it_is_drawn():
    """The prompt "b" retires while "a" is sampled. When all three are retired, a cycle that never ends says so."""
    history = PassRateHistory()
    prompts = unretired(itertools.cycle("abc"), history)
    assert next(prompts) == "a"
    history.update("b", [1])
    assert next(prompts) == "c"
    history.update("a", [1]), history.update("c", [1])
    with pytest.raises(RuntimeError, match=r"all prompts are retired.*\(3 are\)"):
        next(prompts)


def test_dynamic_sampling_by_hand():
    """B = 2. Offered: dead, live, dead, dead, live: keeps the 2nd and 5th, and begins anew. float32 would not tell .5 from
    .5 + 1e-12."""
    sampler = DynamicSampling(batch_prompts=2)
    groups = {"a": [1, 1], "b": [0.5, 0.5 + 1e-12], "c": [-1, -1], "d": [0.1, 0.1, 0.1], "e": torch.tensor([-1.0, 1.0])}
    for group, rewards in groups.items():
        assert not sampler.full
        assert sampler.offer(group, rewards) is (group in "be")
    assert sampler.full
    with pytest.raises(RuntimeError, match="full"):
        sampler.offer("f", [1, -1])
    assert sampler.take() == ["b", "e"]
    with pytest.raises(RuntimeError, match="0 of 2"):
        sampler.take()


def test_dynamic_sampling_gives_up():
    """B = 2: after 19 dead groups a live one starts the count anew; the 20th in a row after it ends it, not the 19th."""
    sampler = DynamicSampling(batch_prompts=2)
    for rewards in [[1, 1]] * 19 + [[1, 0]] + [[0, 0]] * 19:
        sampler.offer(None, rewards)
    with pytest.raises(NoVariedGroups, match="20 groups in a row"):
        sampler.offer(None, [1, 1])
