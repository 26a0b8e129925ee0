"""generator.py on an engine without a model: groups come in order and young enough, new weights arrive in flight,
and an evaluation has one version. Faults: deep/test_generator_faults.py.
"""

import asyncio
import itertools
import random
import threading
import time

import pytest
from fake_engine import FakeEngine, Problem, generating, no_reward, problems, wait_until

from generator import Exhausted, Generator
from length_control import Interruption
from pipeline_rl import FORCED, Pacer, lags

pytestmark = pytest.mark.timeout(30)  # a fault here often shows as a wait without end


@pytest.mark.parametrize("k", [0, 2])
def test_the_lag_of_a_generator(k):
    """B = 2, lengths vary. With k = 0 all tokens are of v; with k = 2 the first six groups enter at once, so the third
    step trains on tokens two versions old."""
    prompts, rng, seen = problems(20), random.Random(0), []
    engine = FakeEngine(length=lambda ids, most: rng.randint(1, most), seconds=0.0005)
    with generating(prompts, engine, Pacer(2, k), max_completion=24) as generator:
        for version in range(8):
            groups = generator.take(2)
            assert [group.number for group in groups] == [2 * version, 2 * version + 1]
            assert [group.problem for group in groups] == prompts[2 * version : 2 * version + 2]
            assert all(version - k <= group.version <= version for group in groups)
            for rollout in [rollout for group in groups for rollout in group.rollouts]:
                assert rollout.versions == sorted(rollout.versions)
                seen += lags(rollout, version)
            generator.push({}, version + 1, 2)
        generator.settle()
        assert generator.engine.version == 8
    assert 0 <= min(seen) and max(seen) == k


def test_two_legs_make_one_rollout():
    """The second request goes on behind the phrase 5 6, and has the salt of the first, so that it finds its keys and
    values, though new weights came meanwhile. How the legs are joined: test_pipeline_rl.py."""

    def length(ids, most):
        engine.version += 1  # with each request
        return 2 if ids == [9, 9] else most

    engine, prompts = FakeEngine(length=length), [Problem("cut", [8, 9]), Problem("stops", [9, 9])]
    control = Interruption(3, 3, 4, phrase_ids=[5, 6], end_of_thinking_ids=[6])
    with generating(prompts, engine, length_control=control, rollouts=1) as generator:
        [cut] = generator.take(1)[0].rollouts
        generator.release(1)
        [stopped] = generator.take(1)[0].rollouts
    assert engine.requests == [([8, 9], 3, "0"), ([8, 9, 9, 9, 9, 5, 6], 4, "0"), ([9, 9], 3, "2")]
    assert cut.completion_ids == [9, 9, 9, 5, 6, 9, 9, 9, 9] and stopped.completion_ids == [9, 9]
    assert (generator.counters.prefilled, generator.counters.sampled) == (2 + 7 + 2, 7 + 2)


def test_slots_and_idle_time():
    """Groups of two take 2 + 2 slots, and when a first completion ends 1 + 2 + 2. While the trainer keeps all groups to
    itself (k = 0), the engine is idle."""
    lengths = itertools.cycle((3, 6))
    engine = FakeEngine(slots=5, length=lambda ids, most: next(lengths), seconds=0.001)
    with generating(problems(8), engine, Pacer(8, 0)) as generator:
        generator.take(8)
        assert engine.most_inside == 5 and generator.in_loop(lambda g: g.free) == 5
        engine.most_inside, before = 0, generator.counters.idle_seconds
        time.sleep(0.3)
        assert len(generator.result_of(generator.evaluate(problems(4), 3))) == 4
        assert engine.most_inside == 5 and 0.25 < generator.counters.idle_seconds - before
    assert all(len(ids) == 10 for ids, _, _ in engine.requests) and len(engine.requests) == 16 + 12


def test_a_push_waits_for_evaluation_which_no_pacer_holds_back():
    """The pacer is full (k = 0, its one group is frozen), yet evaluation runs, at one version, and then the push."""
    engine = FakeEngine(seconds=0.001, frozen=True)
    control = Interruption(3, 7, 4, phrase_ids=[5, 6], end_of_thinking_ids=[6])
    with generating(problems(3), engine, length_control=control) as generator:
        wait_until(lambda: engine.inside == 2)
        asked = [Problem(str(i), [9, i]) for i in range(10)]
        future = generator.evaluate(asked, 4)
        generator.push({}, 1, 0)
        assert not generator.pacer.may_admit() and engine.version == 0
        engine.frozen = False
        generator.settle()
        assert sum(ids[0] == 9 for ids, _, _ in engine.requests) == 80, "the push did not wait"
        groups = generator.result_of(future)
        assert [len(group) for group in groups] == [4] * 10 and generator.engine.version == 1
        longest = [0] * 7 + [FORCED] * 2 + [0] * 4  # the longest budget
        assert all(rollout.versions == longest for group in groups for rollout in group)
        counters = generator.counters
        assert generator.pacer.admitted == 1 and 0 < counters.eval_seconds < 60
        assert counters.sampled <= 22  # of rollouts, and not the 440 of the evaluation
        assert engine.most_inside == 16
        assert [group.number for group in generator.take(1)] == [0]
        generator.release(1)
        assert [group.number for group in generator.take(1)] == [1]  # groups enter again


def test_no_group_enters_while_weights_change():
    """Two groups are taken, and released in a pause of the engine: what replaces them belongs to the new version."""
    engine, arrived = FakeEngine(), threading.Event()

    async def update() -> None:
        while not arrived.is_set():
            await asyncio.sleep(0.001)
        engine.version = engine.prepared

    engine.update = update
    with generating(problems(4), engine, Pacer(2, 0)) as generator:
        generator.take(2)
        generator.push({}, 1, release=0)
        generator.in_loop(lambda g: g.pacer.release(2))
        for _ in range(3):  # turns of the event loop
            assert generator.in_loop(lambda g: g._updating and g.pacer.may_admit() and g.pacer.admitted) == 2
        arrived.set()
        assert [group.version for group in generator.take(2)] == [1, 1]


def test_finite_problems_end_in_exhausted():
    """Five prompts, B = 2: two steps, then one group is left that no step can use."""
    with generating(problems(5), pacer=Pacer(2, 1)) as generator:
        for keys in ["p0", "p1"], ["p2", "p3"]:
            assert [group.problem.key for group in generator.take(2)] == keys
            generator.release(2)
        with pytest.raises(Exhausted, match="1 groups stay untrained"):
            generator.take(2)
        assert [problem.key for problem in generator.under_way.values()] == ["p4"]


def test_more_rollouts_than_slots_are_refused():
    with pytest.raises(ValueError, match="9 rollouts per prompt do not fit 8 engine slots"):
        Generator(FakeEngine(slots=8), iter(()), no_reward, Pacer(1, 0), 9)
    Generator(FakeEngine(slots=8), iter(()), no_reward, Pacer(1, 0), 8).close()
