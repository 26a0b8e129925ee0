"""pipeline_rl.py by hand: what a rollout is, who may enter, and how old a token can be. No engine and no thread.

Any order of events: deep/test_bound_properties.py. The driver: test_generator.py.
"""

import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

import pipeline_rl
from pipeline_rl import FORCED, Group, Pacer, Rollout, joined, lags, rollout_of, simulate


def enter(pacer: Pacer) -> list[int]:
    """As many groups as may enter now."""
    numbers = []
    while pacer.may_admit():
        numbers.append(pacer.admit())
    return numbers


def finish(pacer: Pacer, *numbers: int) -> None:
    for number in numbers:
        pacer.finish(Group(number, None, 0, []))


def take(pacer: Pacer, count: int) -> list[int] | None:
    groups = pacer.take(count)
    return groups and [taken.number for taken in groups]


def test_lags():
    """Sampled at 3, 3, then two forced tokens, then at 4 and 5; trained by the step that makes 6 + 1. The forced tokens
    have no lag: their "version" -1 would be one of 7."""
    rollout = Rollout([9] * 6, [-1.0] * 6, [3, 3, FORCED, FORCED, 4, 5], [1, 1, 0, 0, 1, 1], "stop")
    assert lags(rollout, 6) == [3, 3, 2, 1]
    assert lags([3, 3, FORCED, FORCED, 4, 5], 6) == [3, 3, 2, 1]  # of a trainer without rollouts
    assert lags(Rollout([9], [-1.0], [6], [1], "stop"), 6) == [0]  # on-policy
    with pytest.raises(ValueError):
        lags(Rollout([9, 9], [-1.0] * 2, [3], [1, 1], "stop"), 6)  # a token without a version


def test_two_legs_and_a_phrase_make_one_rollout():
    """The phrase 5 6 is masked, has log-prob 0, and nobody sampled it."""
    sample = SimpleNamespace(
        completion_ids=(9, 8), logprobs=[-1.0, -2.0], versions=[3, 4], finish_reason="length", prefilled=7
    )
    first, second = rollout_of(sample), Rollout([1], [-3.0], [4], [1], "stop", prefilled=2)
    assert first == Rollout([9, 8], [-1.0, -2.0], [3, 4], [1, 1], "length", prefilled=7)
    whole = joined(first, [5, 6], second, lambda *lengths: [1, 1, 0, 0, 1] if lengths == (2, 2, 1) else [])
    assert whole == Rollout(
        [9, 8, 5, 6, 1], [-1.0, -2.0, 0.0, 0.0, -3.0], [3, 4, FORCED, FORCED, 4], [1, 1, 0, 0, 1], "stop", True, 9
    )
    assert not joined(first, [], second, lambda *lengths: [1] * 3).interrupted


def test_the_table_of_the_docstring():
    """B = 2, k = 1: four groups at most. Two train while two run, and their places come free when their step is live."""
    pacer = Pacer(2, 1)
    assert enter(pacer) == [0, 1, 2, 3] and (pacer.outstanding, pacer.ready) == (4, 0)
    with pytest.raises(RuntimeError, match="4 of 4 are outstanding, 0 are ready"):
        pacer.admit()
    for step, entering in enumerate(([4, 5], [6, 7], [8, 9])):
        oldest = [2 * step, 2 * step + 1]
        finish(pacer, *oldest)
        assert take(pacer, 2) == oldest and (pacer.outstanding, pacer.training) == (4, 2)
        assert enter(pacer) == []  # taken is not done
        pacer.release(2)
        assert enter(pacer) == entering
    pacer.release(0)
    with pytest.raises(ValueError, match="1 groups released, but only 0 are in training"):
        pacer.release(1)


def test_on_policy():
    """k = 0, B = 2: the next group enters when the step of the first two is live. Earlier, when they are taken, it would
    sample with version 0 and train at version 1."""
    pacer = Pacer(2, 0)
    assert enter(pacer) == [0, 1]
    finish(pacer, 0, 1)
    assert take(pacer, 2) == [0, 1] and not pacer.may_admit()
    pacer.release(1)  # of one of them, as dynamic sampling does when it discards a group
    assert enter(pacer) == [2]


def test_the_trainer_waits_for_the_oldest():
    """B = 2, k = 2. Group 0 runs for long, the others finish at once. Behind it they are not ready, so others go on to
    enter, up to the bound. Nothing is taken, or younger groups would train and enter while it grows old. Then all are, in
    their order."""
    pacer = Pacer(2, 2)
    pacer.admit()
    for _ in range(5):
        finish(pacer, pacer.admit())
    assert pacer.ready == 0 and not pacer.may_admit() and pacer.outstanding == 6
    assert take(pacer, 1) is None
    finish(pacer, 0)
    assert pacer.ready == 6 and take(pacer, 4) == [0, 1, 2, 3]
    assert take(pacer, 3) is None  # only two are left, and they stay
    assert take(pacer, 2) == [4, 5] and pacer.training == 6


def test_a_group_that_never_finishes_is_cancelled():
    """B = 2, k = 1. Group 0 is lost, 1, 2, 3 are finished: nothing could be taken, nothing enter. Without it 1 and 2 are
    taken, and another enters for it. What is taken, cancelled or was never there cannot be cancelled, and what is
    cancelled cannot finish."""
    pacer = Pacer(2, 1)
    enter(pacer)
    finish(pacer, 1, 2, 3)
    assert take(pacer, 2) is None and enter(pacer) == []
    pacer.cancel(0)
    assert (pacer.outstanding, pacer.ready) == (3, 3)
    assert take(pacer, 2) == [1, 2] and enter(pacer) == [4]
    for lost in (0, 1, 9):
        with pytest.raises(KeyError, match=f"{lost}"):
            pacer.cancel(lost)
    with pytest.raises(KeyError, match="group 0 is not running"):
        finish(pacer, 0)


def test_the_example_with_a_thread_and_a_lock():
    """As the docstring has it, B = 2, k = 2: each step waits until the other thread has two more groups ready, which
    therefore train at lag 1, all in order of admission. Prompt 3 fails; the trainer does not wait for it."""
    lines = pipeline_rl.__doc__.split("rule no group enters while B are ready.)\n")[1]
    example = textwrap.dedent(lines.split("P1:")[0].split("`python")[0])
    trained, found = [], []

    def sample(prompt):
        return None if prompt == 3 else [names["version"]] * 2

    def train(groups):
        trained.extend(group.problem for group in groups)
        found.extend(lag for group in groups for lag in lags(group.rollouts, names["version"]))
        while names["version"] < 4 and pacer.ready < 2:
            time.sleep(0.001)

    pacer = Pacer(2, 2)
    names = {"pacer": pacer, "B": 2, "steps": 5, "prompts": range(12), "sample": sample, "train": train}
    names |= {"push": list, "threading": threading, "Group": Group}
    exec(example, names)
    assert trained == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert found == [0] * 4 + [1] * 16
    assert not names["thread"].is_alive()  # though nothing may enter any more
    names |= {"pacer": Pacer(2, 2), "prompts": range(3), "train": list}
    with pytest.raises(AssertionError, match="no prompts are left"):
        exec(example, names)


def test_without_a_thread_it_stays_on_policy():
    """A loop that samples while it may, and then trains, k = 8: two of the eighteen that the bound allows."""
    pacer = Pacer(2, 8)
    for step in range(3):
        while pacer.may_admit():
            finish(pacer, pacer.admit())
        assert (pacer.outstanding, take(pacer, 2)) == (2, [2 * step, 2 * step + 1])
        pacer.release(2)


def test_what_the_trainer_took_is_replaced():
    """B = 2, k = 8. Four groups were needed until two were ready. Then none enters but for those that were taken."""
    pacer = Pacer(2, 8)
    for _ in range(4):
        pacer.admit()
    finish(pacer, 0, 1)
    assert enter(pacer) == [] and pacer.outstanding == 4
    take(pacer, 2), pacer.release(2)
    assert pacer.may_admit()  # 2 and 3 still run: the trainer would have to wait
    finish(pacer, 2, 3)
    assert enter(pacer) == [4, 5] and pacer.needed == 4


def test_min_ready_keeps_more_of_them():
    """B = 2, m = 1: the trainer takes two of three that are ready; what it took is not replaced at once."""
    pacer = Pacer(2, 8, min_ready=1)
    for _ in range(5):
        pacer.admit()
    finish(pacer, 0, 1)
    assert take(pacer, 2) is None
    finish(pacer, 2, 3, 4)
    assert take(pacer, 2) == [0, 1] and not pacer.may_admit()
    assert take(pacer, 2) == [2, 3] and pacer.may_admit()


def test_ppo_off_policy():
    """B = 2, k = 3: six groups of one policy, and no seventh before all six are released."""
    pacer = Pacer(2, 3, schedule="ppo_off_policy")
    assert enter(pacer) == list(range(6))
    finish(pacer, *range(6))
    assert take(pacer, pacer.take_size) == list(range(6)) and not pacer.may_admit()
    pacer.release(6)
    assert pacer.may_admit()


@pytest.mark.parametrize(
    ("batch", "k", "options", "sentence"),
    [
        (0, 0, {}, "pipeline needs batch_prompts >= 1 and k >= 0, not 0 and 0"),
        (1, -1, {}, "pipeline needs batch_prompts >= 1 and k >= 0, not 1 and -1"),
        (1, 0, {"schedule": "ppo_off_policy"}, "ppo_off_policy needs batch_prompts >= 1 and k >= 1, not 1 and 0"),
        (1, 1, {"schedule": "grpo"}, "one of pipeline, ppo_off_policy, not 'grpo'"),
        # B + m groups that are ready are outstanding: B + m <= (k + 1) B
        (2, 3, {"min_ready": 7}, "min_ready must be from 0 to 6, not 7"),
        (2, 3, {"min_ready": -1}, "min_ready must be from 0 to 6, not -1"),
        (2, 3, {"min_ready": 1, "schedule": "ppo_off_policy"}, "min_ready must be .*0, not 1"),
    ],
)
def test_numbers_without_a_meaning_are_refused(batch, k, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Pacer(batch, k, **options)
    assert Pacer(2, 3, min_ready=6).min_ready == 6  # at the bound


def test_a_group_that_does_not_run_cannot_finish():
    pacer = Pacer(1, 1)
    finish(pacer, pacer.admit())
    for number in (0, 7):  # finished already; never admitted
        with pytest.raises(KeyError, match=f"group {number} is not running"):
            finish(pacer, number)


@pytest.mark.parametrize(
    ("schedule", "k", "mean", "most", "empty", "waits"),
    [
        ("pipeline", 0, 0.00, 0, 0.84, 0.77),
        ("pipeline", 2, 1.53, 2, 0.52, 0.34),
        ("pipeline", 8, 5.34, 7, 0.27, 0.02),
        ("ppo_off_policy", 3, 0.99, 2, 0.67, 0.55),
    ],
)
def test_the_simulation_prints(schedule, k, mean, most, empty, waits):
    """With a larger k the engine is busier, the trainer waits less, and tokens are older, by k at most."""
    ages, empty_slots, waiting = simulate(k, schedule)
    assert max(ages) == most and min(ages) == 0
    assert (sum(ages) / len(ages), empty_slots, waiting) == pytest.approx((mean, empty, waits), abs=0.005)
