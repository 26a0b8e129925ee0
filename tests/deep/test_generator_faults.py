"""Faults of whatever the generator drives, stops in the middle of a wait, and its end."""

import asyncio
import pickle
import time
from unittest import mock

import pytest
from fake_engine import FakeEngine, Problem, generating, problems, wait_until

import generator as generator_module
from generator import EngineDied, EngineFailed, GeneratorFailed, StopRequested
from pipeline_rl import Pacer

pytestmark = pytest.mark.timeout(30)  # a fault here often shows as a wait without end


def test_an_update_of_an_idle_engine_is_counted_once():
    """k = 0: two requests of 0.1 s at a time, and then an update of 0.1 s with nobody inside; twice."""
    engine = FakeEngine(length=lambda ids, most: 1, seconds=0.1)

    async def update() -> None:
        await asyncio.sleep(0.1)

    engine.update = update
    began = time.monotonic()
    with generating(problems(2), engine) as generator:
        for version in (1, 2):
            generator.take(1)
            generator.push({}, version, release=1)
            generator.settle()
        elapsed, counters = time.monotonic() - began, generator.counters
    assert counters.sync_seconds >= 0.2 and counters.request_seconds >= 0.4
    assert counters.idle_seconds + counters.sync_seconds + counters.request_seconds / 2 < elapsed + 0.05


def test_an_evaluation_counts_for_its_share_of_the_tokens():
    """Beside its 40 tokens a group samples 2 x 10: two thirds of the time are the evaluation's, the rest trains."""
    engine = FakeEngine(length=lambda ids, most: 40 if ids == [1] else 10, seconds=0.001, frozen=True)
    with generating(problems(1), engine) as generator:
        wait_until(lambda: engine.inside == 2)
        began = time.monotonic()
        future = generator.evaluate([Problem("e", [1])], 1)
        time.sleep(0.3)
        engine.frozen = False
        generator.result_of(future)
        elapsed = time.monotonic() - began
        assert 0.19 < generator.counters.eval_seconds <= 40 / 60 * elapsed


@pytest.mark.parametrize(
    ("method", "error", "kind"),
    [
        ("update", OSError("no room for layers.7"), GeneratorFailed),
        ("prepare", OSError("no room for layers.7"), GeneratorFailed),
        ("update", EngineDied("killed"), EngineDied),
    ],
)
def test_a_push_that_fails_ends_every_wait_with_its_error(method, error, kind):
    """A `prepare` that fails does not raise at once: other trainer processes go on to the next wait. The error travels
    to them by pickle, its cause does not."""
    engine = FakeEngine(frozen=True)
    with generating(problems(2), engine) as generator:
        vars(engine)[method] = mock.Mock(side_effect=error)
        generator.push({}, 1, 0)
        started = time.monotonic()
        for wait in (lambda: generator.take(2), generator.settle):
            with pytest.raises(GeneratorFailed) as caught:
                wait()
            there = pickle.loads(pickle.dumps(caught.value))
            assert type(there) is kind and there.__cause__ is None
            assert str(there) == f"the generator failed: {type(error).__name__}: {error}"
        assert time.monotonic() - started < 10 and generator.engine.version == 0


@pytest.mark.parametrize(
    ("method", "effect", "error", "words"),
    [
        ("prepare", mock.Mock(side_effect=OSError("no room")), EngineFailed, "^no room$"),
        ("start", mock.AsyncMock(side_effect=KeyError), EngineFailed, "KeyError"),
        ("start", lambda: asyncio.Event().wait(), StopRequested, None),  # never comes up: a signal is noticed meanwhile
    ],
)
def test_what_ends_a_start(method, effect, error, words):
    engine = FakeEngine()
    vars(engine)[method] = effect
    stop = error is StopRequested
    with pytest.raises(error, match=words), generating(engine=engine, stop_requested=lambda: stop):
        pass


def test_a_stop_loses_no_group_that_is_ready():
    """The signal came during the step before: both groups stay in `under_way`, from where the checkpoint lists them.
    `stop_requested` is asked only after the generator's thread had its turn, the worst moment. If it comes when the
    wait is over, the groups arrive. A wait for a group that runs ends, too, and the group comes later."""
    stop = [False]
    with generating(problems(9), pacer=Pacer(2, 1)) as generator:
        generator.stop_requested = lambda: generator.in_loop(lambda g: stop[0])  # after its turn
        wait_until(lambda: generator.pacer.ready >= 2)
        stop[0] = True
        with pytest.raises(StopRequested):
            generator.take(2)
        assert generator.in_loop(lambda g: list(g.under_way))[:2] == [0, 1]
        stop[0] = False
        assert [group.number for group in generator.take(2)] == [0, 1] and 0 not in generator.under_way
    answers = iter([False, True])
    with generating(problems(9), pacer=Pacer(2, 1)) as generator:
        generator.stop_requested = lambda: next(answers)
        wait_until(lambda: generator.pacer.ready >= 2)
        assert [group.number for group in generator.take(2)] == [0, 1]
    engine = FakeEngine(frozen=True)
    with generating(problems(1), engine, stop_requested=lambda: stop[0]) as generator:
        stop[0] = True
        with pytest.raises(StopRequested):
            generator.take(1)
        engine.frozen = stop[0] = False
        assert generator.take(1)[0].number == 0


def test_a_stop_does_not_wait_for_weights_that_never_arrive():
    """As when the engine's host is cut off."""
    stop = [False]

    class CutOff(FakeEngine):
        async def update(self) -> None:
            await asyncio.Event().wait()

    with generating(problems(1), CutOff(), stop_requested=lambda: stop[0]) as generator:
        generator.push({}, 1, 0)
        stop[0] = True
        for wait in (lambda: generator.push({}, 2, 0), generator.settle):
            with pytest.raises(StopRequested):
                wait()


def test_an_evaluation_that_is_given_up_holds_nothing_back():
    """The caller stops while half of its requests wait for slots."""
    stop, engine = [False], FakeEngine(slots=2, frozen=True)
    with generating(problems(2), engine, stop_requested=lambda: stop[0]) as generator:
        stop[0] = True
        with pytest.raises(StopRequested):
            generator.result_of(generator.evaluate(problems(1), 4))
        engine.frozen = stop[0] = False
        generator.push({}, 1, 0)
        generator.settle()
        assert generator.take(1)[0].number == 0 and engine.version == 1 and len(engine.requests) <= 6


def test_min_ready_ends_with_the_prompts():
    """Two groups are ready and one must stay, until there is no further prompt."""
    engine = FakeEngine(length=lambda ids, most: 1 if ids[0] < 2 else most, frozen=True)
    prompts = [Problem(f"p{i}", [i]) for i in range(4)]
    with generating(prompts, engine, Pacer(2, 1, min_ready=1), rollouts=1) as generator:
        wait_until(lambda: generator.pacer.admitted == 4)
        assert not generator.in_loop(lambda g: g.exhausted) and generator.pacer.ready < 3
        engine.frozen = False
        assert [group.number for group in generator.take(2)] == [0, 1]
        generator.release(2)  # admission asks for the next prompt
        assert [group.number for group in generator.take(2)] == [2, 3]
        assert generator.in_loop(lambda g: g.exhausted)


def test_closing_admits_nothing():
    """Requests that end because the generator closes give their slots to no new group."""
    engine = FakeEngine(slots=4, frozen=True)
    with generating(problems(50), engine, Pacer(4, 8)) as generator:
        wait_until(lambda: engine.inside == 4)
    assert generator.pacer.admitted == 2 and engine.inside == 0 and engine.events[-1] == "shutdown"
    generator.close()  # twice does no harm


def test_an_engine_that_is_slow_to_end_is_no_error(monkeypatch):
    """The engine is ended by `close` itself."""
    engine = FakeEngine(slots=4)
    with generating(problems(0), engine, Pacer(2, 1)) as generator:
        monkeypatch.setattr(generator_module, "wait", lambda futures, timeout: time.sleep(0.1))
        generator.close()
        assert engine.events[-1] == "shutdown" and not generator._thread.is_alive()


def broken_score(problem, completions):
    raise ZeroDivisionError("the verifier")


def broken_problems(count):
    yield from problems(count)
    raise LookupError("the data set")


@pytest.mark.parametrize(
    ("prompts", "options", "error"),
    [
        (problems(4), {"score": broken_score}, ZeroDivisionError),
        (broken_problems(1), {}, LookupError),
        (problems(4), {"score": lambda problem, completions: [(1.0, True)]}, ValueError),  # one too few
    ],
)
def test_exceptions_in_the_reward_and_in_the_problems_reach_the_trainer(prompts, options, error):
    """The exception is the cause of what is raised where the trainer waits, and again at the next wait."""
    with generating(prompts, pacer=Pacer(2, 0), **options) as generator:
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(GeneratorFailed, match=error.__name__) as caught:
                generator.take(2)
            assert type(caught.value) is GeneratorFailed and type(caught.value.__cause__) is error
        assert time.monotonic() - started < 10


def test_a_group_that_is_ready_arrives_though_the_prompts_raise_as_it_makes_room():
    with generating(broken_problems(2), FakeEngine(slots=2), Pacer(1, 3)) as generator:
        wait_until(lambda: generator.pacer.ready == 2)
        assert [generator.take(1)[0].problem.key for _ in range(2)] == ["p0", "p1"]
        with pytest.raises(GeneratorFailed, match="LookupError: the data set"):
            generator.take(1)


def test_evaluation_gets_slots_before_new_groups():
    """While the first group is frozen, an evaluation asks for 4 requests; the second group comes after it."""
    engine = FakeEngine(slots=2, frozen=True)
    with generating(problems(2), engine, Pacer(2, 0)) as generator:
        wait_until(lambda: engine.inside == 2)
        future = generator.evaluate([Problem("e", [1])], 4)
        for _ in range(3):  # turns of the event loop in which its requests queue
            generator.in_loop(lambda _: None)
        engine.frozen = False
        assert len(generator.result_of(future)[0]) == 4
        generator.take(2)
    assert [len(ids) for ids, _, _ in engine.requests] == [10] * 2 + [1] * 4 + [10] * 2
