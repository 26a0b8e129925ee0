"""The pacer in any order of events: what is outstanding, ready and old is counted here, and the pacer's own counters are
never believed."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline_rl import Group, Pacer

pytestmark = pytest.mark.timeout(30)  # a bound that is broken often shows as a wait without end


def finished(number: int) -> Group:
    return Group(number, None, 0, [])


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
        self.entered = self.outstanding = self.needed = 0
        self.version = self.live = 0  # the trainer's, the engine's
        self.waits_for_weights = False

    def ready(self) -> int:
        return sum(1 for _ in itertools.takewhile(self.complete.__contains__, self.under_way))

    def may_enter(self) -> bool:
        replacement = self.least == 0 and len(self.under_way) < self.needed
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
        self.needed = max(self.needed, len(self.under_way))

    @precondition(running)
    @rule(data=st.data(), ends=st.booleans())
    def sample(self, data, ends):
        number = data.draw(st.sampled_from(self.running()))
        self.under_way[number].append(self.live)
        if ends:
            self.complete.add(number)
            self.pacer.finish(finished(number))

    @precondition(running)
    @rule(data=st.data())
    def fail(self, data):
        number = data.draw(st.sampled_from(self.running()))
        self.pacer.cancel(number)
        del self.under_way[number]
        self.outstanding -= 1

    @precondition(lambda self: len(self.phase) < self.size and not self.waits_for_weights and self.enough())
    @rule(discard=st.booleans())
    def take(self, discard):
        taken = [group.number for group in self.pacer.take(self.count)]
        assert taken == list(self.under_way)[: self.count] and self.complete.issuperset(taken)  # the oldest
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
    """With min_ready at its largest, k B, (k + 1) B groups are in at version 0, and the last B of them train in the step
    that makes version k + 1. By default no more are ready than a step needs, so that fewer grow old."""
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
