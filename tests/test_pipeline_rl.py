"""pipeline_rl.py: the pacer by hand, the dispatch on a fake engine, and the lag bound under any order of events.

Real vLLM has its tests in tests/deep/engine/.
"""

import asyncio
import itertools
import math
import pickle
import random
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from fake_engine import FakeEngine, Problem, generating, no_reward, problems, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pipeline_rl
from pipeline_rl import FORCED, Group, Pacer, Rollout, lags
from runtime.generator import EngineDied, EngineFailed, Exhausted, Generator, GeneratorFailed, StopRequested
from vllm_engine import check_sample

pytestmark = pytest.mark.timeout(30)  # a bound that is broken often shows as a wait without end


@pytest.mark.parametrize(("schedule", "k", "most"), [("pipeline", 0, 0), ("pipeline", 3, 3), ("ppo_off_policy", 3, 2)])
def test_the_simulation_of_the_file_keeps_to_the_bound(schedule, k, most):
    token_lags, empty, waited = pipeline_rl.simulate(k, schedule)
    assert min(token_lags) == 0 and max(token_lags) == most and 0 < empty < 1 and 0 < waited < 1


def test_a_straggler_does_not_empty_the_engine():
    """If groups behind a running one counted as ready, it would be .33, and the trainer would wait for .085."""
    _, empty, waited = pipeline_rl.simulate(8)
    assert empty < 0.3 and waited < 0.05


def finished(number: int) -> Group:
    return Group(number, SimpleNamespace(key=str(number), prompt_ids=[1]), 0, [])


def test_pipeline_by_hand():
    """B = 2, k = 1: four groups at most. 0 and 1 train while 2 and 3 run; their places come free when they are live."""
    pacer = Pacer(2, 1)
    assert (pacer.take_size, pacer.capacity) == (2, 4)
    assert [pacer.admit() for _ in range(4)] == [0, 1, 2, 3]
    assert not pacer.may_admit() and pacer.outstanding == 4 and pacer.ready == 0
    with pytest.raises(RuntimeError, match="4 of 4 are outstanding, 0 are ready"):
        pacer.admit()
    pacer.finish(finished(1))
    assert pacer.take(2) is None and pacer.ready == 0
    pacer.finish(finished(0))
    assert pacer.ready == 2 and [group.number for group in pacer.take(2)] == [0, 1]
    assert (pacer.outstanding, pacer.training, pacer.ready) == (4, 2, 0)
    assert not pacer.may_admit()  # taken is not done
    pacer.release(1)  # one group of the two: dynamic sampling's discard
    assert pacer.outstanding == 3 and pacer.admit() == 4 and not pacer.may_admit()
    pacer.release(1)
    assert pacer.admit() == 5 and pacer.admitted == 6


def test_strict_order_waits_for_the_oldest():
    """Numbers 1, 2, 3 are finished and 0 is not: nothing is taken; then 0 and 1, then 2 and 3."""
    pacer = Pacer(2, 3)
    for _ in range(4):
        pacer.admit()
    for number in (3, 1, 2):
        pacer.finish(finished(number))
    assert pacer.take(1) is None and pacer.take(2) is None and pacer.ready == 0
    pacer.finish(finished(0))
    assert pacer.ready == 4 and [[group.number for group in pacer.take(n)] for n in (2, 1)] == [[0, 1], [2]]
    assert pacer.take(2) is None  # only one is left, and it stays
    assert [group.number for group in pacer.take(1)] == [3] and pacer.training == 4


def test_on_policy_by_hand():
    """k = 0, B = 2: the next group enters when the step of the first two is live, not a moment before."""
    pacer = Pacer(2, 0)
    pacer.admit(), pacer.admit()
    assert not pacer.may_admit()
    pacer.finish(finished(0)), pacer.finish(finished(1))
    assert len(pacer.take(2)) == 2 and not pacer.may_admit()
    pacer.release(2)
    assert pacer.may_admit() and pacer.outstanding == 0


@pytest.mark.parametrize(("min_ready", "entered"), [(0, 2), (1, 1)])
def test_what_the_trainer_took_is_replaced(min_ready, entered):
    """B = 2, k = 8. Two of four groups are taken and two are ready, so no more need enter, but two replace those taken.
    With min_ready = 1 only one enters, since three shall be ready."""
    pacer = Pacer(2, 8, min_ready=min_ready)
    for number in [pacer.admit() for _ in range(4)]:
        pacer.finish(finished(number))
    assert not pacer.may_admit()
    pacer.take(2), pacer.release(2)
    for _ in range(entered):
        pacer.finish(finished(pacer.admit()))
    assert not pacer.may_admit() and pacer.outstanding == pacer.ready == 2 + entered


@pytest.mark.parametrize(
    ("batch", "k", "options", "sentence"),
    [
        (0, 0, {}, "pipeline needs batch_prompts >= 1 and k >= 0, not 0 and 0"),
        (1, -1, {}, "pipeline needs batch_prompts >= 1 and k >= 0, not 1 and -1"),
        (1, 0, {"schedule": "ppo_off_policy"}, "ppo_off_policy needs batch_prompts >= 1 and k >= 1, not 1 and 0"),
        (1, 1, {"schedule": "grpo"}, "one of pipeline, ppo_off_policy, not 'grpo'"),
        # B + m groups ready, and none in training, are outstanding: B + m <= (k + 1) B.
        (2, 3, {"min_ready": 7}, "min_ready must be from 0 to 6, not 7"),
        (2, 3, {"min_ready": -1}, "min_ready must be from 0 to 6, not -1"),
        (3, 0, {"min_ready": 1}, "min_ready must be from 0 to 0, not 1"),
        (2, 3, {"min_ready": 1, "schedule": "ppo_off_policy"}, "min_ready must be from 0 to 0, not 1"),
    ],
)
def test_numbers_without_a_meaning_are_refused(batch, k, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Pacer(batch, k, **options)
    assert Pacer(2, 3, min_ready=6).min_ready == 6  # at the bound


def test_a_group_that_does_not_run_cannot_finish():
    pacer = Pacer(1, 1)
    first = Group(pacer.admit(), None, 0, [])
    pacer.finish(first)
    for group in (first, Group(7, None, 0, [])):  # finished already; never admitted
        with pytest.raises(KeyError, match=f"group {group.number} is not running"):
            pacer.finish(group)


def test_lags_by_hand():
    """Sampled at 3, 3, then forced, forced, then at 4 and 5; trained by the step that makes 6 + 1. The forced tokens
    have no lag: their "version" -1 would be one of 7."""
    rollout = Rollout([9] * 6, [-1.0] * 6, [3, 3, FORCED, FORCED, 4, 5], [1, 1, 0, 0, 1, 1], "stop")
    assert lags(rollout, 6) == [3, 3, 2, 1]
    assert lags(Rollout([9], [-1.0], [6], [1], "stop"), 6) == [0]  # on-policy
    with pytest.raises(ValueError):
        lags(Rollout([9, 9], [-1.0] * 2, [3], [1, 1], "stop"), 6)  # a token without a version


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "reason", "message"),
    [
        ([], [], [], "stop", "0 tokens"),
        ([5, 6], [-0.5], [3, 3], "stop", "2 tokens, 1 log-probs, 2 versions"),
        ([5, 6], [-0.5, -0.5], [3], "stop", "2 tokens, 2 log-probs, 1 versions"),
        ([5, 6], [-0.5, math.nan], [3, 3], "stop", "not finite or above 0"),
        ([5, 6], [-math.inf, -0.5], [3, 3], "stop", "not finite or above 0"),
        ([5, 6], [-0.5, 0.01], [3, 3], "stop", "not finite or above 0"),
        ([5], [-0.5], [3], "abort", "'abort'"),
    ],
)
def test_what_is_missing_in_an_answer_is_an_error_and_no_zero(ids, logprobs, versions, reason, message):
    with pytest.raises(RuntimeError, match=message):
        check_sample(ids, logprobs, versions, reason)
    check_sample([5, 6], [-0.5, 0.0], [3, 3], "length")
    check_sample([5], [1e-6], [0], "stop")  # rounding: log-softmax of a sure token may end just above 0


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


class Cut:
    """As length control: thinking is cut at 3 tokens, for prompts whose first token is even; evaluation may take 7."""

    max_budget, max_completion = 7, 12

    def draw_budget(self, rng: random.Random) -> int:
        return 3

    def second_leg(self, prompt_ids, completion_ids, finish_reason):
        if finish_reason == "stop" or prompt_ids[0] % 2:
            return None
        return SimpleNamespace(prompt_ids=[*prompt_ids, *completion_ids, 5, 6], forced_ids=[5, 6], max_tokens=4)

    def mask(self, n_first: int, n_forced: int, n_second: int) -> list[int]:
        return [1] * n_first + [0] * n_forced + [1] * n_second


def test_two_legs_make_one_rollout():
    """The phrase 5 6 is masked, has log-prob 0 and the version FORCED. The second request has the salt of the first, so
    that it finds its keys and values; a salt is the version."""
    engine, prompts = FakeEngine(), [Problem("even", [8, 9]), Problem("odd", [9, 9])]
    with generating(prompts, engine, Pacer(1, 1), length_control=Cut(), rollouts=1) as generator:
        generator.push({}, 1, 0)
        [even], [odd] = (group.rollouts for group in generator.take(1) + generator.take(1))
    assert even.completion_ids == [9, 9, 9, 5, 6, 9, 9, 9, 9] and odd.completion_ids == [9, 9, 9]
    assert even.mask == [1, 1, 1, 0, 0, 1, 1, 1, 1] and odd.mask == [1, 1, 1]
    assert [v == FORCED for v in even.versions] == [m == 0 for m in even.mask]
    assert even.logprobs == [-1.0] * 3 + [0.0] * 2 + [-1.0] * 4
    assert even.interrupted and not odd.interrupted and even.finish_reason == "length"
    assert even.prefilled == 2 + 7 and generator.counters.prefilled == 2 + 7 + 2
    assert generator.counters.sampled == 7 + 3
    salts = {len(ids): salt for ids, _, salt in engine.requests if ids[0] == 8}
    assert set(salts) == {2, 7} and salts[2] == salts[7] in ("0", "1")
    with generating([Problem("later", [7])] * 9, later := FakeEngine(), Pacer(1, 0), rollouts=1) as generator:
        generator.take(1)
        generator.push({}, 5, 1)
        generator.take(1)
    assert {later.requests[0][2], later.requests[-1][2]} == {"0", "5"}
    assert [most for ids, most, _ in engine.requests if ids[0] == 8] == [3, 4]


def test_a_push_waits_for_evaluation_which_no_pacer_holds_back():
    """The pacer is full (k = 0, its one group is frozen), yet evaluation runs, at one version, and then the push."""
    engine = FakeEngine(seconds=0.001, frozen=True)
    with generating(problems(3), engine, length_control=Cut(), rollouts=2) as generator:
        wait_until(lambda: engine.inside == 2)
        asked = [Problem(str(i), [9, i]) for i in range(10)]
        future = generator.evaluate(asked, 4)
        generator.push({}, 1, 0)
        assert not generator.pacer.may_admit() and engine.version == 0
        engine.frozen = False
        generator.settle()
        assert sum(ids[0] == 9 for ids, _, _ in engine.requests) == 40, "the push did not wait"
        groups = generator.result_of(future)
        assert [len(group) for group in groups] == [4] * 10 and generator.engine.version == 1
        assert all(rollout.versions == [0] * 7 for group in groups for rollout in group)  # the longest budget
        counters = generator.counters
        assert generator.pacer.admitted == 1 and 0 < counters.eval_seconds < 60
        assert counters.sampled <= 14  # of rollouts, and not the 280 of the evaluation
        assert engine.most_inside == 16


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
            assert generator.in_loop(lambda g: g._paused and g.pacer.may_admit() and g.pacer.admitted) == 2
        arrived.set()
        assert [group.version for group in generator.take(2)] == [1, 1]


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


def test_more_rollouts_than_slots_are_refused():
    with pytest.raises(ValueError, match="9 rollouts per prompt do not fit 8 engine slots"):
        Generator(FakeEngine(slots=8), iter(()), no_reward, Pacer(1, 0), 9)
    Generator(FakeEngine(slots=8), iter(()), no_reward, Pacer(1, 0), 8).close()


def test_exceptions_in_the_reward_and_in_the_problems_reach_the_trainer():
    """The exception is the cause of what is raised where the trainer waits, and again at the next wait. If the prompts
    raise as a group is taken and makes room, that group arrives all the same."""

    def broken_score(problem, completions):
        raise ZeroDivisionError("the verifier")

    def broken_problems(count):
        yield from problems(count)
        raise LookupError("the data set")

    for prompts, options, error in (
        (problems(4), {"score": broken_score}, ZeroDivisionError),
        (broken_problems(1), {}, LookupError),
        (problems(4), {"score": lambda problem, completions: [(1.0, True)]}, ValueError),  # one too few
    ):
        with generating(prompts, pacer=Pacer(2, 0), **options) as generator:
            started = time.monotonic()
            for _ in range(2):
                with pytest.raises(GeneratorFailed, match=error.__name__) as caught:
                    generator.take(2)
                assert type(caught.value.__cause__) is error and not caught.value.engine_died
            assert time.monotonic() - started < 10
    with generating(broken_problems(2), FakeEngine(slots=2), Pacer(1, 3)) as generator:
        wait_until(lambda: generator.pacer.ready == 2)
        assert [generator.take(1)[0].problem.key for _ in range(2)] == ["p0", "p1"]
        with pytest.raises(GeneratorFailed, match="LookupError: the data set"):
            generator.take(1)


@pytest.mark.parametrize("method", ["update", "prepare"])
def test_a_push_that_fails_ends_every_wait_with_its_error(method):
    """A `prepare` that fails does not raise at once: other trainer processes go on to the next wait."""
    engine = FakeEngine(frozen=True)
    with generating(problems(2), engine) as generator:
        vars(engine)[method] = mock.Mock(side_effect=OSError("no room for layers.7"))
        generator.push({}, 1, 0)
        started = time.monotonic()
        for wait in (lambda: generator.take(2), generator.settle):
            with pytest.raises(GeneratorFailed, match=r"layers\.7"):
                wait()
        assert time.monotonic() - started < 10 and generator.engine.version == 0


def test_weights_without_room_and_a_signal_end_the_start():
    """A signal is noticed while an engine starts, unless other trainer processes may be inside the first transfer, and
    then it hides no error."""
    engine = FakeEngine()
    engine.prepare = mock.Mock(side_effect=OSError("no room"))
    with pytest.raises(EngineFailed, match="^no room$"), generating(engine=engine):
        pass
    engine = FakeEngine()
    engine.start = asyncio.Event().wait  # never comes up
    with pytest.raises(StopRequested), generating(engine=engine, stop_requested=lambda: True):
        pass
    engine.start, engine.trainer_waits = mock.AsyncMock(side_effect=KeyError), True
    with pytest.raises(EngineFailed, match="KeyError"), generating(engine=engine, stop_requested=lambda: True):
        pass


def test_a_dead_engine_is_told_from_other_faults_on_every_rank():
    """The error travels to the other ranks by pickle, its cause does not."""
    engine = FakeEngine()
    with generating(problems(2), engine) as generator:
        engine.update = mock.AsyncMock(side_effect=EngineDied("killed"))
        generator.push({}, 1, 0)
        with pytest.raises(GeneratorFailed) as caught:
            generator.settle()
    there = pickle.loads(pickle.dumps(caught.value))
    assert there.engine_died and there.__cause__ is None and str(there) == "the generator failed: EngineDied: killed"


def test_finite_problems_end_in_exhausted():
    """Five prompts, B = 2: two steps, then one group is left that no step can use."""
    with generating(problems(5), pacer=Pacer(2, 1)) as generator:
        keys = []
        for _ in range(2):
            keys += [group.problem.key for group in generator.take(2)]
            generator.release(2)
        with pytest.raises(Exhausted, match="1 groups stay untrained"):
            generator.take(2)
        assert keys == ["p0", "p1", "p2", "p3"]
        assert [problem.key for problem in generator.under_way.values()] == ["p4"]


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
        monkeypatch.setattr(pipeline_rl, "wait", lambda futures, timeout: time.sleep(0.1))
        generator.close()
        assert engine.events[-1] == "shutdown" and not generator._thread.is_alive()


class AnyOrder(RuleBasedStateMachine):
    """What can happen around a pacer, by the rules of the module docstring, in any order. What is outstanding, ready
    and old is counted here: the pacer's own counters are never believed. A state without a way on is an error."""

    @initialize(data=st.data(), schedule=st.sampled_from(["pipeline", "ppo_off_policy"]), batch=st.integers(1, 3))
    def begin(self, data, schedule, batch):
        self.off_policy, self.batch = schedule == "ppo_off_policy", batch
        self.k = data.draw(st.integers(1, 3) if self.off_policy else st.sampled_from([0, 1, 2, 8]))
        self.size = self.k * batch if self.off_policy else batch  # of a take
        self.capacity = self.size if self.off_policy else (self.k + 1) * batch
        discards = data.draw(st.booleans())  # dynamic sampling takes one by one
        self.least = 0 if self.off_policy or discards else data.draw(st.integers(0, self.k * batch))
        self.count = 1 if discards else self.size
        self.pacer = Pacer(batch, self.k, schedule=schedule, min_ready=self.least)
        self.under_way: dict[int, list[int]] = {}  # not yet taken: number -> versions of its tokens so far
        self.complete: set[int] = set()
        self.phase: list[list[int]] = []  # what the trainer has taken
        self.entered = self.consumed = self.outstanding = self.peak = 0
        self.version = self.live = 0  # the trainer's, the engine's
        self.waits_for_weights = False

    def ready(self) -> int:
        return sum(1 for _ in itertools.takewhile(self.complete.__contains__, self.under_way))

    def may_enter(self) -> bool:
        replacement = self.least == 0 and len(self.under_way) < self.peak
        return self.outstanding < self.capacity and (self.ready() < self.size + self.least or replacement)

    def running(self) -> list[int]:
        return [number for number in self.under_way if number not in self.complete]

    def enough(self) -> bool:
        return self.ready() >= self.count + self.least

    @invariant()
    def the_pacer_says_the_same(self):
        assert self.pacer.may_admit() == self.may_enter() and self.pacer.may_take(self.count) == self.enough()
        if not self.enough():
            assert self.pacer.take(self.count) is None  # whatever is finished behind a running group
        if not self.may_enter():
            with pytest.raises(RuntimeError, match="no group may enter now"):
                self.pacer.admit()

    @precondition(may_enter)
    @rule()
    def enter(self):
        assert self.pacer.admit() == self.entered
        self.under_way[self.entered] = [self.live]
        self.entered, self.outstanding = self.entered + 1, self.outstanding + 1
        self.peak = max(self.peak, len(self.under_way))

    @precondition(running)
    @rule(data=st.data(), ends=st.booleans())
    def sample(self, data, ends):
        number = data.draw(st.sampled_from(self.running()))
        self.under_way[number].append(self.live)
        if ends:
            self.complete.add(number)
            self.pacer.finish(finished(number))

    @precondition(lambda self: len(self.phase) < self.size and not self.waits_for_weights and self.enough())
    @rule(discard=st.booleans())
    def take(self, discard):
        taken = [group.number for group in self.pacer.take(self.count)]
        assert taken == list(range(self.consumed, self.consumed + self.count)) and self.complete.issuperset(taken)
        self.consumed += self.count
        self.phase += [self.under_way.pop(number) for number in taken]
        if discard and self.count == 1 < self.size:
            self.pacer.release(1)
            self.phase.pop()
            self.outstanding -= 1

    @precondition(lambda self: len(self.phase) == self.size and not self.waits_for_weights)
    @rule(updates=st.booleans())
    def train(self, updates):
        assert not self.off_policy or len({v for versions in self.phase for v in versions}) == 1  # a frozen policy
        for i in range(0, self.size, self.batch):
            lags = [self.version - v for versions in self.phase[i : i + self.batch] for v in versions]
            assert 0 <= min(lags) and max(lags) <= (self.k - 1 if self.off_policy else self.k)
            self.version += updates
        self.phase, self.waits_for_weights = [], updates
        if not updates:  # no gradient was finite
            self.done()

    @precondition(lambda self: self.waits_for_weights)
    @rule()
    def weights_are_live(self):
        self.live, self.waits_for_weights = self.version, False
        self.done()

    def done(self):
        self.pacer.release(self.size)
        self.outstanding -= self.size


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
AnyOrder.TestCase.pytestmark = [pytest.mark.timeout(300)]
TestTheLagBoundInAnyOrder = AnyOrder.TestCase


@pytest.mark.parametrize("k", [0, 1, 2, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_bound_is_reached_by_a_fast_generator(k, batch):
    """With min_ready at its largest, k B, (k + 1) B groups are in at version 0, and the last B of them train in the
    step that makes version k + 1. By default no more are ready than a step needs, so that fewer grow old."""
    largest = {}
    for min_ready in (k * batch, 0):
        pacer, versions, token_lags = Pacer(batch, k, min_ready=min_ready), [], []
        for version in range(30):
            while pacer.may_admit():
                pacer.finish(finished(pacer.admit()))
                versions.append(version)
            token_lags += [version - versions[group.number] for group in pacer.take(batch)]
            pacer.release(batch)
        largest[min_ready] = max(token_lags)
    assert largest == {k * batch: k, 0: 0}
