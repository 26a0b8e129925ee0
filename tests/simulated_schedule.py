"""A model of the schedule, written from its rules and not from `Generator`: a clock, an engine that samples every token
with the version live at that moment, and a trainer, all with random delays. Only the `Pacer` is real. It counts for itself
what is outstanding and ready, so that the pacer's own counters are never believed."""

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline_rl import Group, Pacer, Rollout


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
