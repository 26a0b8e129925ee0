"""pipeline_rl.py without an engine: the lag bound under a simulated generator and trainer, and the small parts by hand.

The simulation is a model of the schedule written from its rules, not from `Generator`: a clock, an engine that samples
every token with the version live at that moment, and a trainer, all with random delays. Only the `Pacer` is real. It
counts for itself what is outstanding and ready, so that the pacer's own counters are never believed.
"""

import asyncio
import bisect
import doctest
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

import pipeline_rl
from pipeline_rl import FORCED, Generator, Group, Interrupted, Pacer, Rollout, check_arrival, lags

torch.set_num_threads(1)


def test_module_example_runs():
    result = doctest.testmod(pipeline_rl)
    assert result.attempted >= 3 and result.failed == 0


# ------------------------------------------------------------------------------------------------- the simulation


@dataclass(frozen=True)
class Setting:
    """One simulated run. Times are in units of the mean gap between two tokens of a rollout."""

    seed: int
    schedule: str = "pipeline"
    k: int = 8
    batch: int = 2  # B
    rollouts: int = 2  # G
    max_ready: int | None = None
    min_ready: int = 0
    room: int = 10**6  # requests inside the engine
    steps: int = 30
    step_time: float = 1.0  # mean
    push_time: float = 0.1
    scoring_time: float = 0.0
    stragglers: float = 0.1  # share of rollouts that are 10 to 200 times slower
    same: float = 0.2  # share of groups with equal rewards
    dynamic: bool = False
    bad_steps: float = 0.1  # share of steps whose gradient is thrown away
    evaluations: int = 0
    restarts: int = 0
    resumes: int = 0

    @property
    def take_size(self) -> int:
        return self.batch if self.schedule == "pipeline" else self.k * self.batch

    @property
    def most_outstanding(self) -> int:
        return (self.k + 1) * self.batch if self.schedule == "pipeline" else self.k * self.batch

    @property
    def most_ready(self) -> int:
        return self.max_ready or self.take_size + self.min_ready

    @property
    def most_lag(self) -> int:
        return self.k if self.schedule == "pipeline" else self.k - 1


@dataclass
class Record:
    """What happened in one simulated run."""

    lags: list[int] = field(default_factory=list)  # of every token that came to a step
    consumed: list[int] = field(default_factory=list)  # prompts, in the order in which the trainer took them
    left: list[int] = field(default_factory=list)  # admitted and never taken
    phases: list[set[int]] = field(default_factory=list)  # token versions of all groups taken together
    outstanding: int = 0  # most of them just before an admission
    ready: int = 0
    kept: float = math.inf  # fewest ready groups that a take left behind
    refused: int = 0  # times that the pacer held back a group that the rules admit
    deadlock: bool = False
    redone: int = 0
    discarded: int = 0
    skipped: int = 0
    delayed: int = 0  # pushes that waited for an evaluation


@dataclass
class Job:
    """A group in the simulated engine."""

    prompt: int
    attempt: int = 0
    ended: int = 0  # rollouts
    times: list[list[float]] = field(default_factory=list)  # at which each rollout's tokens are sampled


class World:
    """One process: engine, trainer and the real pacer between them. Time passes from event to event."""

    def __init__(self, setting: Setting, pacer: Pacer, prompts: Iterator[int], record: Record, start: tuple[int, int]):
        self.s, self.pacer, self.prompts, self.record = setting, pacer, prompts, record
        self.version, self.step = start
        self.rng = random.Random(f"{setting} {start}")
        self.now, self.serial, self.events = 0.0, itertools.count(), []
        self.live_since, self.live = [0.0], [self.version]  # at which time which version became live
        self.up_since, self.written = 0.0, self.version
        self.jobs: dict[int, Job] = {}  # inside the engine
        self.waiting: dict[int, int] = {}  # number -> prompt of all groups admitted and not taken
        self.ready: set[int] = set()
        self.released = self.admitted = 0
        self.pushing = False
        self.evaluated_until = 0.0

    # ---- clock ----

    def at(self, time: float, action, *arguments) -> None:
        heapq.heappush(self.events, (time, next(self.serial), action, arguments))

    def in_reach(self) -> int:
        """Finished groups that no running one stands before."""
        return sum(1 for _ in itertools.takewhile(self.ready.__contains__, self.waiting))

    def delay(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean) if mean else 0.0

    def run(self, until_step: int) -> list[int]:
        """Runs until the trainer made `until_step` steps; returns the prompts that were admitted and not taken."""
        horizon = 20 * self.s.step_time * self.s.steps
        for _ in range(self.s.evaluations):
            self.at(self.rng.uniform(0, horizon), self.evaluate)
        for _ in range(self.s.restarts):
            self.at(self.rng.uniform(0, horizon), self.die)
        trainer = self.train(until_step)
        self.dispatch()
        self.resume(trainer)
        while self.step < until_step or self.pushing:
            if not self.events:
                self.record.deadlock = True
                break
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
            if self.asleep is False:
                self.resume(trainer)
        return list(self.waiting.values())

    def resume(self, trainer) -> None:
        """The trainer goes on until it sleeps for a time (a number) or waits for something to happen (None)."""
        self.asleep = False
        pause = next(trainer, None)
        if pause is not None:
            self.asleep = True
            self.at(self.now + pause, self.resume, trainer)

    # ---- engine ----

    def dispatch(self) -> None:
        inside = sum(self.s.rollouts - job.ended for job in self.jobs.values())
        while inside + self.s.rollouts <= self.s.room:
            outstanding = self.admitted - self.released
            allowed = outstanding < self.s.most_outstanding and self.in_reach() < self.s.most_ready
            if not self.pacer.may_admit():
                self.record.refused += allowed
                return
            self.record.outstanding = max(self.record.outstanding, outstanding)
            self.record.ready = max(self.record.ready, self.in_reach())
            number, prompt = self.pacer.admit(), next(self.prompts)
            self.admitted += 1
            inside += self.s.rollouts
            self.waiting[number] = prompt
            self.jobs[number] = Job(prompt)
            self.sample(number)

    def sample(self, number: int) -> None:
        job = self.jobs[number]
        job.attempt, job.ended, job.times = job.attempt + 1, 0, []
        for _ in range(self.s.rollouts):
            gap = self.rng.uniform(10, 200) if self.rng.random() < self.s.stragglers else 1.0
            gaps = [self.delay(gap) for _ in range(self.rng.randint(1, 8))]
            times = list(itertools.accumulate(gaps, initial=max(self.now, self.up_since)))[1:]
            job.times.append(times)
            self.at(times[-1], self.end_rollout, number, job.attempt)

    def end_rollout(self, number: int, attempt: int) -> None:
        job = self.jobs.get(number)
        if job is None or job.attempt != attempt:
            return  # the engine died meanwhile
        job.ended += 1
        if job.ended == self.s.rollouts:
            del self.jobs[number]
            self.at(self.now + self.delay(self.s.scoring_time), self.finish, number, job)
        self.dispatch()

    def finish(self, number: int, job: Job) -> None:
        versions = [[self.live[bisect.bisect(self.live_since, t) - 1] for t in times] for times in job.times]
        rollouts = [Rollout([1] * len(v), [-1.0] * len(v), v, [1] * len(v), "stop") for v in versions]
        self.pacer.finish(Group(number, job.prompt, -1, rollouts))
        self.ready.add(number)
        self.dispatch()

    def die(self) -> None:
        """The engine dies and comes back with the weights written last; groups inside are redone whole."""
        if self.now < self.up_since:
            return  # it is down already
        self.up_since = self.now + self.delay(20.0)
        self.live_since.append(self.up_since)
        self.live.append(self.written)
        for number in self.jobs:
            self.sample(number)
            self.record.redone += 1

    def evaluate(self) -> None:
        if not self.pushing:  # it begins when the last push is live; pushes then wait for its end
            self.evaluated_until = self.now + self.delay(20 * self.s.step_time)

    # ---- trainer ----

    def train(self, until_step: int):
        while self.step < until_step:
            groups = []
            while len(groups) < self.s.take_size:
                taken = self.pacer.take(1 if self.s.dynamic else self.s.take_size)
                if taken is None:
                    yield None
                    continue
                for group in taken:
                    self.record.consumed.append(self.waiting.pop(group.number))
                    self.ready.remove(group.number)
                self.record.kept = min(self.record.kept, self.in_reach())
                self.dispatch()
                if self.s.dynamic and self.rng.random() < self.s.same:
                    self.release(1)
                    self.record.discarded += 1
                else:
                    groups += taken
            if self.s.schedule == "ppo_off_policy":
                self.rng.shuffle(groups)
            yield from self.steps_on(groups)

    def steps_on(self, groups: list[Group]):
        before = self.version
        self.record.phases.append({v for group in groups for rollout in group.rollouts for v in rollout.versions})
        for i in range(0, len(groups), self.s.batch):
            part = groups[i : i + self.s.batch]
            yield self.delay(self.s.step_time)
            tokens = [v for group in part for rollout in group.rollouts for v in rollout.versions]
            self.record.lags += [self.version - v for v in tokens]
            all_same = not self.s.dynamic and all(self.rng.random() < self.s.same for _ in part)
            if all_same or self.rng.random() < self.s.bad_steps:
                self.record.skipped += 1
            else:
                self.version += 1
            self.step += 1
        if self.version == before:
            self.release(len(groups))
            return
        while self.pushing:  # one push at a time
            yield None
        self.pushing, self.written = True, self.version
        self.at(self.now, self.push, self.version, len(groups))

    def push(self, version: int, count: int) -> None:
        if self.now < self.evaluated_until:
            self.record.delayed += 1
            self.at(self.evaluated_until, self.push, version, count)
        else:
            self.at(max(self.now, self.up_since) + self.delay(self.s.push_time), self.become_live, version, count)

    def become_live(self, version: int, count: int) -> None:
        if self.now < self.up_since:  # the engine died meanwhile
            self.at(self.up_since, self.become_live, version, count)
            return
        self.live_since.append(self.now)
        self.live.append(version)
        self.pushing = False
        self.release(count)

    def release(self, count: int) -> None:
        self.pacer.release(count)
        self.released += count
        self.dispatch()


def simulate(setting: Setting, pacer_class: type[Pacer] = Pacer) -> Record:
    """A whole run, cut into `resumes` + 1 processes; each new one has a fresh pacer and begins with what was left."""
    record, stream, left, version, step = Record(), itertools.count(), [], 0, 0
    for part in range(setting.resumes + 1):
        pacer = pacer_class(setting.batch, setting.k, schedule=setting.schedule, max_ready=setting.max_ready,
                            min_ready=setting.min_ready)  # fmt: skip
        world = World(setting, pacer, itertools.chain(left, stream), record, (version, step))
        world.prompts = prompts = iter(world.prompts)
        left = world.run(setting.steps * (part + 1) // (setting.resumes + 1))
        version, step = world.version, world.step
        stream, left = prompts, left
        if record.deadlock:
            break
    record.left = left
    return record


def random_setting(seed: int, schedule: str, k: int) -> Setting:
    rng = random.Random(f"{seed} {schedule} {k}")
    batch, rollouts = rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 2, 4])
    found = Setting(
        seed=seed, schedule=schedule, k=k, batch=batch, rollouts=rollouts,
        max_ready=rng.choice([None, batch, batch + 1, 3 * batch, 10**6]),
        room=rollouts * rng.choice([1, 2, batch, (k + 1) * batch, 10**6]),
        steps=2 * k + rng.randint(6, 14),
        step_time=rng.choice([0.1, 1.0, 5.0, 40.0]),
        push_time=rng.choice([0.0, 0.1, 2.0, 50.0]),
        scoring_time=rng.choice([0.0, 1.0, 20.0]),
        stragglers=rng.choice([0.0, 0.1, 0.4]),
        same=rng.choice([0.0, 0.2, 0.7]),
        dynamic=rng.random() < 0.4,
        bad_steps=rng.choice([0.0, 0.1, 0.6]),
        evaluations=rng.choice([0, 0, 4]),
        restarts=rng.choice([0, 0, 1, 3]),
        resumes=rng.choice([0, 0, 1, 2]),
    )  # fmt: skip
    if schedule == "ppo_off_policy":
        return replace(found, max_ready=None)
    min_ready = 0 if found.dynamic else rng.choice([0, 0, 1, batch, k * batch - 1, k * batch])
    min_ready = max(0, min(min_ready, k * batch))
    return replace(found, min_ready=min_ready, max_ready=found.max_ready and found.max_ready + min_ready)


SCHEDULES = [("pipeline", k) for k in (0, 1, 2, 8)] + [("ppo_off_policy", k) for k in (1, 2, 8)]
RUNS = 120  # settings for each schedule and k


@pytest.mark.parametrize(("schedule", "k"), SCHEDULES)
def test_the_lag_bound_under_random_delays(schedule, k):
    """lag <= k for every token (k - 1 for PPO-off-policy), no deadlock, no prompt lost or doubled, strict order, and
    neither more nor fewer groups at once than the rules say, whatever the delays."""
    total = Record()
    for seed in range(RUNS):
        setting = random_setting(seed, schedule, k)
        record = simulate(setting)
        assert not record.deadlock, setting
        assert min(record.lags) >= 0 and max(record.lags) <= setting.most_lag, setting
        everything = record.consumed + record.left
        assert everything == list(range(len(everything))), setting  # in order, none lost, none twice, over resumes too
        assert record.ready < setting.most_ready and record.outstanding < setting.most_outstanding, setting
        assert record.refused == 0 and record.kept >= setting.min_ready, setting
        if schedule == "ppo_off_policy":
            assert all(len(versions) == 1 for versions in record.phases), setting  # one frozen version
        total.lags.append(max(record.lags))
        for name in ("redone", "discarded", "skipped", "delayed"):
            setattr(total, name, getattr(total, name) + getattr(record, name))
    assert max(total.lags) == setting.most_lag  # the bound is reached, so a pacer that is too strict would show
    assert min(total.redone, total.discarded, total.skipped, total.delayed) > 0  # nothing above was vacuous


@pytest.mark.parametrize("k", [0, 1, 2, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_bound_is_reached_by_a_fast_generator(k, batch):
    """Sampling takes no time beside training: all (k + 1) B groups are in at version 0, and the last B of them train in
    the step that makes version k + 1. The engine then stays k steps ahead. With max_ready = B, and room for one group
    in the engine, so that none finishes behind a running one, it does not: fewer than B are ready, B train and B wait
    to be live when a group enters, so the lag is 2 at most."""
    fast = Setting(seed=0, k=k, batch=batch, step_time=1e6, same=0.0, bad_steps=0.0, stragglers=0.0)
    assert max(simulate(replace(fast, max_ready=10**6)).lags) == k
    assert max(simulate(replace(fast, room=2)).lags) <= min(k, 2)  # k is a bound, not a target
    if k:
        off_policy = simulate(replace(fast, schedule="ppo_off_policy"))
        assert set(off_policy.lags) == set(range(k))


class OneBatchMore(Pacer):
    """The bound off by one: (k + 2) B."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.capacity += arguments[0]


class DoneWhenTaken(Pacer):
    """Trap 23: a group stops being outstanding when the trainer takes it, not when its step is live."""

    def take(self, count):
        groups = super().take(count)
        self.training = 0
        return groups

    def release(self, count):
        pass


class FirstFinished(Pacer):
    """Takes whatever is finished, oldest first, instead of waiting for stragglers."""

    def take(self, count):
        finished = [n for n, group in self._finished.items() if group is not None][:count]
        if len(finished) < count:
            return None
        self.training += count
        return [self._finished.pop(n) for n in finished]


class YoungestFirst(Pacer):
    """Takes the freshest finished groups."""

    def take(self, count):
        finished = [n for n, group in self._finished.items() if group is not None][-count:]
        if len(finished) < count:
            return None
        self.training += count
        return [self._finished.pop(n) for n in finished]


class TooStrict(Pacer):
    """k B: on-policy gets no work at all, the rest never reach the bound."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.capacity -= self.take_size


def simulate_fault(fault: type[Pacer], schedule: str, k: int) -> Iterator[tuple[Record, Setting]]:
    """The settings of the real test, without those that a broken pacer could not bear."""
    for seed in range(RUNS):
        setting = replace(random_setting(seed, schedule, k), dynamic=False, resumes=0, min_ready=0)
        yield simulate(setting, fault), setting


@pytest.mark.parametrize(
    ("fault", "schedule", "k"),
    [(OneBatchMore, "pipeline", k) for k in (0, 1, 2, 8)]
    + [(DoneWhenTaken, "pipeline", k) for k in (0, 1, 2, 8)]
    + [(DoneWhenTaken, "ppo_off_policy", k) for k in (1, 2, 8)]
    + [(OneBatchMore, "ppo_off_policy", k) for k in (1, 2, 8)]
    + [(fault, "pipeline", k) for fault in (FirstFinished, YoungestFirst) for k in (1, 2, 8)],
)
def test_a_broken_pacer_is_found_out(fault, schedule, k):
    """The same settings must catch the faults, or the test above proves nothing."""
    assert any(max(record.lags) > setting.most_lag for record, setting in simulate_fault(fault, schedule, k))


@pytest.mark.parametrize("k", [0, 2])
def test_a_pacer_that_is_too_strict_is_found_out(k):
    records = [record for record, _ in simulate_fault(TooStrict, "pipeline", k)]
    assert any(record.refused for record in records)
    assert all(record.deadlock for record in records) if k == 0 else max(max(r.lags) for r in records) < k


# ------------------------------------------------------------------------------------------------- the pacer by hand


def finished(number: int) -> Group:
    return Group(number, SimpleNamespace(key=str(number), prompt_ids=[1]), 0, [])


def test_pipeline_by_hand():
    """B = 2, k = 1: four groups at most. 0 and 1 train while 2 and 3 run; their places come free when they are live."""
    pacer = Pacer(2, 1)
    assert (pacer.take_size, pacer.capacity, pacer.max_ready) == (2, 4, 2)
    assert [pacer.admit() for _ in range(4)] == [0, 1, 2, 3]
    assert not pacer.may_admit() and pacer.outstanding == 4 and pacer.ready == 0
    assert pacer.waiting_for() == [0, 1, 2, 3]
    pacer.finish(finished(1))
    assert pacer.take(2) is None and pacer.ready == 0 and pacer.waiting_for() == [0, 2, 3]
    pacer.finish(finished(0))
    assert pacer.ready == 2
    groups = pacer.take(2)
    assert [group.number for group in groups] == [0, 1]
    assert (pacer.outstanding, pacer.training, pacer.ready) == (4, 2, 0)
    assert not pacer.may_admit()  # taken is not done
    pacer.release(1)  # one group of the two: dynamic sampling's discard
    assert pacer.outstanding == 3 and pacer.may_admit()
    assert pacer.admit() == 4 and not pacer.may_admit()
    pacer.release(1)
    assert pacer.may_admit() and pacer.admit() == 5 and pacer.admitted == 6


def test_strict_order_waits_for_the_oldest():
    """Numbers 1, 2, 3 are finished and 0 is not: nothing is taken; then 0 and 1, then 2 and 3."""
    pacer = Pacer(2, 3)
    for _ in range(4):
        pacer.admit()
    for number in (3, 1, 2):
        pacer.finish(finished(number))
    assert pacer.take(1) is None and pacer.take(2) is None and pacer.ready == 0
    pacer.finish(finished(0))
    assert pacer.ready == 4
    assert [group.number for group in pacer.take(2)] == [0, 1]
    assert [group.number for group in pacer.take(1)] == [2]
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


def test_ppo_off_policy_by_hand():
    """k = 3, B = 2: six groups from one version, taken together, and nothing new before all six are done."""
    pacer = Pacer(2, 3, schedule="ppo_off_policy")
    assert (pacer.take_size, pacer.capacity, pacer.max_ready) == (6, 6, 6)
    for number in range(6):
        assert pacer.may_admit() and pacer.admit() == number
    assert not pacer.may_admit()
    for number in range(6):
        pacer.finish(finished(number))
    assert len(pacer.take(6)) == 6 and not pacer.may_admit()
    pacer.release(6)
    assert pacer.may_admit()


def test_max_ready_by_hand():
    """B = 2, k = 8: with two groups ready admission stops, by default; with max_ready = 3, at three. A value below B
    would let the trainer starve and is refused, as is one below B + min_ready."""
    for given, limit in ((None, 2), (2, 2), (3, 3)):
        pacer = Pacer(2, 8, max_ready=given)
        assert pacer.max_ready == limit
        for number in range(limit):
            assert pacer.may_admit()
            pacer.admit()
            pacer.finish(finished(number))
        assert not pacer.may_admit() and pacer.outstanding < pacer.capacity
        pacer.take(2)
        assert pacer.may_admit()
    assert Pacer(2, 3, schedule="ppo_off_policy", max_ready=9).max_ready == 9
    for schedule, given, least in (("pipeline", {"max_ready": 1}, 2), ("ppo_off_policy", {"max_ready": 5}, 6),
                                   ("pipeline", {"max_ready": 4, "min_ready": 3}, 5)):  # fmt: skip
        with pytest.raises(ValueError, match=f"max_ready must be at least {least}"):
            Pacer(2, 3, schedule=schedule, **given)


def test_groups_behind_a_running_one_are_not_ready():
    """B = 2, k = 3: 0 runs, 1, 2 and 3 are finished behind it. The trainer can take none of them, so admission goes on,
    up to the eight that the bound allows. When 0 finishes, four are ready and admission stops."""
    pacer = Pacer(2, 3)
    assert [pacer.admit() for _ in range(4)] == [0, 1, 2, 3]
    for number in (1, 2, 3):
        pacer.finish(finished(number))
    assert pacer.ready == 0 and pacer.may_admit()
    assert [pacer.admit() for _ in range(4)] == [4, 5, 6, 7] and not pacer.may_admit()
    pacer.finish(finished(0))
    assert pacer.ready == 4
    pacer.finish(finished(5))
    assert pacer.ready == 4  # 4 runs before it
    pacer.take(2), pacer.release(2)
    assert pacer.outstanding == 6 and pacer.ready == 2 and not pacer.may_admit()


def test_no_group_enters_past_the_bound():
    """B = 2, k = 0: a third group would train at lag 1. With two ready, k = 8 and max_ready = 2 a third may not either."""
    for pacer, counts in ((Pacer(2, 0), "2 of 2 are outstanding"), (Pacer(2, 8), "2 of 2 ready")):
        for number in range(2):
            pacer.admit()
            pacer.finish(finished(number))
        with pytest.raises(RuntimeError, match=counts):
            pacer.admit()
        assert pacer.admitted == pacer.outstanding == 2


def test_min_ready_by_hand():
    """B = 2, k = 2, min_ready = 3: five must be ready before two are taken, and three stay, until min_ready is set to 0
    at the end of the prompts."""
    pacer = Pacer(2, 2, min_ready=3)
    assert pacer.max_ready == 5
    for number in range(5):
        assert not pacer.may_take(2) and pacer.take(2) is None
        pacer.admit()
        pacer.finish(finished(number))
    assert not pacer.may_admit() and pacer.may_take(2) and not pacer.may_take(3)
    assert [group.number for group in pacer.take(2)] == [0, 1]
    assert pacer.ready == 3 and pacer.take(2) is None and pacer.training == 2
    pacer.min_ready = 0
    assert [group.number for group in pacer.take(2)] == [2, 3]


@pytest.mark.parametrize(("batch", "k", "schedule", "most"), [(2, 3, "pipeline", 6), (3, 0, "pipeline", 0),
                                                               (2, 3, "ppo_off_policy", 0)])  # fmt: skip
def test_min_ready_that_is_never_met_is_refused(batch, k, schedule, most):
    """B + m groups ready, and none in training, are outstanding: B + m <= (k + 1) B. An off-policy phase has no more
    than it takes."""
    assert Pacer(batch, k, schedule=schedule, min_ready=most).min_ready == most
    for wrong in (most + 1, -1):
        with pytest.raises(ValueError, match=f"min_ready must be from 0 to {most}, not {wrong}"):
            Pacer(batch, k, schedule=schedule, min_ready=wrong)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_min_ready_up_to_the_bound_is_met(k, batch):
    """No deadlock for any m that is allowed, with engines of one group up to more than ever enter, stragglers, late
    pushes and skipped steps; m stay ready behind each take, and the lag keeps to its bound."""
    for m in range(k * batch + 1):
        for groups in (1, 2, batch + 1, (k + 1) * batch + 1):
            setting = Setting(seed=m, k=k, batch=batch, min_ready=m, room=2 * groups, steps=12, evaluations=1)
            record = simulate(setting)
            assert not record.deadlock and record.refused == 0 and record.kept >= m, setting
            assert len(record.consumed) == 12 * batch and max(record.lags) <= k, setting


# ------------------------------------------------------------------------------------------------- speed and lag


@dataclass
class Sequences:
    """A group in the engine of `pace`."""

    number: int
    spans: list[tuple[int, int]]  # (start, end) of each rollout; the engine samples one token of it per unit of time


def pace(
    pacer: Pacer, *, rollouts: int, slots: int, length, training: int, steps: int, skip: int
) -> tuple[float, float]:
    """(busy share of the engine's slots, mean lag of trained tokens) after the first `skip` steps. `length()` draws the
    tokens of a rollout; a step takes `training` units of time, and its weights are live at its end."""
    now = since = busy = lag = tokens = 0
    trained_at = math.inf
    live = [0]  # live[v]: when version v went live
    ends: list[int] = []  # of the rollouts in the engine, a heap
    running: list[tuple[int, int, Sequences]] = []  # (end, number, group), a heap
    while len(live) <= steps:
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        while running and running[0][0] <= now:
            pacer.finish(heapq.heappop(running)[2])
        if trained_at <= now:
            live.append(now)
            trained_at = math.inf
            pacer.release(pacer.take_size)
            since, busy = (now, 0) if len(live) == skip + 1 else (since, busy)
        if trained_at == math.inf and (groups := pacer.take(pacer.take_size)):
            trained_at = now + training
            for start, end in (span for group in groups if len(live) > skip for span in group.spans):
                lag += sum(len(live) - bisect.bisect_right(live, time) for time in range(start, end))
                tokens += end - start
        while pacer.may_admit() and len(ends) + rollouts <= slots:
            group = Sequences(pacer.admit(), [(now, now + length()) for _ in range(rollouts)])
            heapq.heappush(running, (max(end for _, end in group.spans), group.number, group))
            for _, end in group.spans:
                heapq.heappush(ends, end)
        then = min([trained_at, *ends[:1]])
        assert then < math.inf, "deadlock"
        busy, now = busy + len(ends) * (then - now), then
    return busy / slots / (now - since), lag / tokens


def lognormal(seed: int, mean: int, sigma: float):
    """Draws whole lengths of about `mean` tokens, at most four times that."""
    rng = random.Random(seed)
    return lambda: max(1, min(4 * mean, round(mean * math.exp(rng.gauss(-(sigma**2) / 2, sigma)))))


@pytest.mark.parametrize(("sigma", "slots", "least"), [(0.3, 256, 0.95), (0.6, 512, 0.95), (0.9, 512, 0.9)])
def test_the_engine_stays_busy_where_lengths_vary(sigma, slots, least):
    """B = 32, G = 16, lengths of 30 tokens in the mean, a trainer twice as fast as the engine. Every slot has work but
    where fewer than G are free: counting groups behind a running one as ready leaves .89, .58 and .67."""
    training = 32 * 16 * 30 // slots // 2
    pacer = Pacer(32, 8)
    busy, _ = pace(pacer, rollouts=16, slots=slots, length=lognormal(1, 30, sigma), training=training, steps=40, skip=10)
    assert busy >= least


def test_min_ready_is_a_dial_for_the_lag():
    """k = 8, B = 16, a trainer a little faster than the engine: B, 2 B and 4 B groups kept ready are 1, 2 and 4 steps
    more lag, for at most 5 % of the engine's time."""
    options = {"rollouts": 8, "slots": 128, "training": 20, "steps": 60, "skip": 15}
    found = [pace(Pacer(16, 8, min_ready=m), length=lognormal(1, 30, 0.6), **options) for m in (0, 16, 32, 64)]
    (busy, base), *others = found
    for more, (share, lag) in zip((1, 2, 4), others, strict=True):
        assert lag == pytest.approx(base + more, abs=0.5) and share >= 0.95 * busy


# ------------------------------------------------------------------------------------------------- taking from a Generator


class NoWeights:
    """A weight channel for a generator whose engine never starts."""

    def close(self) -> None:
        pass


@pytest.fixture
def new_idle_generator():
    """Makes generators without an engine: two groups, p0 and p1, are finished; `prompts` are left to admit."""
    made = []

    def make(prompts: int = 0, min_ready: int = 0, interrupted=lambda: False) -> Generator:
        pacer = Pacer(2, 1, min_ready=min_ready)
        left = iter([SimpleNamespace(key=f"p{i}", prompt_ids=[1]) for i in range(2, 2 + prompts)])
        generator = Generator("", left, None, pacer, 1, [], NoWeights(), max_num_seqs=8, interrupted=interrupted)
        generator._run_group = lambda number, problem: asyncio.sleep(0)  # none of the others finishes
        for _ in range(2):
            group = finished(pacer.admit())
            generator.running[group.number] = group.problem
            pacer.finish(group)
        made.append(generator)
        generator._thread.start()
        generator._loop.call_soon_threadsafe(generator._dispatch)
        return generator

    yield make
    for generator in made:
        generator.close()


def test_a_stop_signal_loses_no_group_that_is_ready(new_idle_generator):
    """The signal came during the step before, both groups are ready: `take` raises Interrupted, and they still stand in
    `running`, from where the checkpoint lists them. `interrupted` is asked only after the generator's thread had its
    turn, the worst moment."""
    stop = [True]
    generator = new_idle_generator(interrupted=lambda: generator.in_loop(lambda g: stop[0]))
    with pytest.raises(Interrupted):
        generator.take(2)
    assert generator.in_loop(lambda g: [(number, problem.key) for number, problem in g.running.items()]) == [
        (0, "0"), (1, "1")
    ]  # fmt: skip
    stop[0] = False
    assert [group.number for group in generator.take(2)] == [0, 1] and not generator.running
    answers = iter([False, True])  # the signal comes when the wait is over: the groups arrive
    generator = new_idle_generator(interrupted=lambda: next(answers))
    assert [group.number for group in generator.take(2)] == [0, 1]


def test_min_ready_ends_with_the_prompts(new_idle_generator):
    """Two groups are ready and one must stay: the trainer waits while a third prompt runs, and gets them once there is
    none."""
    generator = new_idle_generator(prompts=2, min_ready=1)
    waiting = asyncio.run_coroutine_threadsafe(generator._until_ready(2, 60.0), generator._loop)
    assert generator.in_loop(lambda g: (g.pacer.admitted, g.exhausted)) == (4, False) and not waiting.done()
    generator.in_loop(lambda g: g.pacer.finish(finished(2)))
    assert [group.number for group in generator.take(2)] == [0, 1]
    generator.release(2)  # admission asks for the next prompt
    generator.in_loop(lambda g: g.pacer.finish(finished(3)))
    assert [group.number for group in generator.take(2)] == [2, 3] and generator.exhausted
    waiting.cancel()


# ------------------------------------------------------------------------------------------------- lags and arrival


def test_lags_by_hand():
    """Sampled at 3, 3, then forced, forced, then at 4 and 5; trained by the step that makes 6 + 1: lags 3, 3, 2, 1. The
    two forced tokens have none: their "version" -1 would be a lag of 7."""
    rollout = Rollout([9] * 6, [-1.0] * 6, [3, 3, FORCED, FORCED, 4, 5], [1, 1, 0, 0, 1, 1], "stop")
    assert lags(rollout, 6) == [3, 3, 2, 1]
    assert lags(Rollout([9], [-1.0], [6], [1], "stop"), 6) == [0]  # on-policy
    with pytest.raises(ValueError):
        lags(Rollout([9, 9], [-1.0] * 2, [3], [1, 1], "stop"), 6)  # a token without a version


def test_trap_10_arrival_lets_whole_answers_pass():
    for reason in ("stop", "length"):
        check_arrival([5, 6], [-0.5, 0.0], [3, 3], reason)
    check_arrival([5], [1e-6], [0], "stop")  # rounding: log-softmax of a sure token may end just above 0


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "reason", "message"),
    [
        ([], [], [], "stop", "0 tokens"),
        ([5, 6], [-0.5], [3, 3], "stop", "2 tokens, 1 log-probs, 2 versions"),
        ([5, 6], [-0.5, -0.5], [3], "stop", "2 tokens, 2 log-probs, 1 versions"),
        ([5], [-0.5, -0.5], [3, 3], "stop", "1 tokens, 2 log-probs"),
        ([5, 6], [-0.5, math.nan], [3, 3], "stop", "not finite or above 0"),
        ([5, 6], [-math.inf, -0.5], [3, 3], "stop", "not finite or above 0"),
        ([5, 6], [-0.5, math.inf], [3, 3], "stop", "not finite or above 0"),
        ([5, 6], [-0.5, 0.01], [3, 3], "stop", "not finite or above 0"),
        ([5], [-0.5], [3], "abort", "'abort'"),
        ([5], [-0.5], [3], None, "None"),
    ],
)
def test_trap_10_arrival_is_an_error_not_a_zero(ids, logprobs, versions, reason, message):
    with pytest.raises(RuntimeError, match=message):
        check_arrival(ids, logprobs, versions, reason)
