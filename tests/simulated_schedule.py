"""A model of the schedule, written from its rules and not from `Generator`: a clock, an engine that samples every token
with the version live at that moment, and a trainer, all with random delays. Only the `Pacer` is real. It counts for itself
what is outstanding and ready, so that the pacer's own counters are never believed."""

import bisect
import heapq
import itertools
import math
import random
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
    def replaces(self) -> bool:
        return not self.max_ready and not self.min_ready

    @property
    def most_lag(self) -> int:
        return self.k if self.schedule == "pipeline" else self.k - 1


@dataclass
class Record:
    """What happened in one simulated run."""

    lags: list[int] = field(default_factory=list)  # of every token that came to a step
    consumed: list[int] = field(default_factory=list)  # numbers, in the order in which the trainer took them
    phases: list[set[int]] = field(default_factory=list)  # token versions of all groups taken together
    outstanding: int = 0  # most of them just before an admission
    ready: int = 0  # but for groups that replace one that was taken
    under_way: int = 0  # most groups admitted and not taken
    kept: float = math.inf  # fewest ready groups that a take left behind
    refused: int = 0  # times that the pacer held back a group that the rules admit
    deadlock: bool = False
    discarded: int = 0
    skipped: int = 0
    delayed: int = 0  # pushes that waited for an evaluation


class World:
    """Engine, trainer and the real pacer between them. Time passes from event to event."""

    def __init__(self, setting: Setting, pacer: Pacer):
        self.s, self.pacer, self.record = setting, pacer, Record()
        self.rng = random.Random(f"{setting}")
        self.now, self.serial, self.events = 0.0, itertools.count(), []
        self.version = self.step = self.inside = self.admitted = self.released = 0
        self.live_since, self.live = [0.0], [0]  # at which time which version became live
        self.waiting: dict[int, bool] = {}  # number of all groups admitted and not taken -> whether it is finished
        self.pushing, self.asleep, self.evaluated_until = False, False, 0.0

    def at(self, time: float, action, *arguments) -> None:
        heapq.heappush(self.events, (time, next(self.serial), action, arguments))

    def delay(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean) if mean else 0.0

    def ready(self) -> int:
        """Finished groups before the first one that runs."""
        return sum(1 for _ in itertools.takewhile(bool, self.waiting.values()))

    def run(self) -> Record:
        for _ in range(self.s.evaluations):
            self.at(self.rng.uniform(0, 20 * self.s.step_time * self.s.steps), self.evaluate)
        trainer = self.train()
        self.dispatch()
        self.resume(trainer)
        while self.step < self.s.steps or self.pushing:
            if not self.events:
                self.record.deadlock = True
                break
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
            if not self.asleep:
                self.resume(trainer)
        return self.record

    def resume(self, trainer) -> None:
        """The trainer goes on until it sleeps for a time (a number) or waits for something to happen (None)."""
        pause = next(trainer, None)
        self.asleep = pause is not None
        if self.asleep:
            self.at(self.now + pause, self.resume, trainer)

    # ---- engine ----

    def dispatch(self) -> None:
        while self.inside + self.s.rollouts <= self.s.room:
            outstanding, ready = self.admitted - self.released, self.ready()
            replacement = self.s.replaces and len(self.waiting) < self.record.under_way
            if not self.pacer.may_admit():
                self.record.refused += outstanding < self.s.most_outstanding and (
                    replacement or ready < self.s.most_ready
                )
                return
            self.record.outstanding = max(self.record.outstanding, outstanding)
            self.record.ready = max(self.record.ready, 0 if replacement else ready)
            number, ends = self.pacer.admit(), []
            self.admitted += 1
            self.inside += self.s.rollouts
            self.waiting[number] = False
            self.record.under_way = max(self.record.under_way, len(self.waiting))
            for _ in range(self.s.rollouts):
                gap = self.rng.uniform(10, 200) if self.rng.random() < self.s.stragglers else 1.0
                gaps = [self.delay(gap) for _ in range(self.rng.randint(1, 8))]
                ends.append(list(itertools.accumulate(gaps, initial=self.now))[1:])
                self.at(ends[-1][-1], self.end_rollout)
            self.at(max(times[-1] for times in ends) + self.delay(self.s.scoring_time), self.finish, number, ends)

    def end_rollout(self) -> None:
        self.inside -= 1
        self.dispatch()

    def finish(self, number: int, token_times: list[list[float]]) -> None:
        versions = [[self.live[bisect.bisect(self.live_since, t) - 1] for t in times] for times in token_times]
        rollouts = [Rollout([1] * len(v), [-1.0] * len(v), v, [1] * len(v), "stop") for v in versions]
        self.pacer.finish(Group(number, None, -1, rollouts))
        self.waiting[number] = True
        self.dispatch()

    def evaluate(self) -> None:
        if not self.pushing:  # it begins when the last push is live; pushes then wait for its end
            self.evaluated_until = self.now + self.delay(20 * self.s.step_time)

    # ---- trainer ----

    def train(self):
        while self.step < self.s.steps:
            groups = []
            while len(groups) < self.s.take_size:
                taken = self.pacer.take(1 if self.s.dynamic else self.s.take_size)
                if taken is None:
                    yield None
                    continue
                self.record.consumed += [group.number for group in taken]
                for group in taken:
                    assert self.waiting.pop(group.number), "it had not finished"
                self.record.kept = min(self.record.kept, self.ready())
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
        before, batch = self.version, self.s.batch
        self.record.phases.append({v for group in groups for rollout in group.rollouts for v in rollout.versions})
        for part in (groups[i : i + batch] for i in range(0, len(groups), batch)):
            yield self.delay(self.s.step_time)
            tokens = [v for group in part for rollout in group.rollouts for v in rollout.versions]
            self.record.lags += [self.version - v for v in tokens]
            all_same = not self.s.dynamic and all(self.rng.random() < self.s.same for _ in part)
            bad = all_same or self.rng.random() < self.s.bad_steps
            self.record.skipped += bad
            self.version += not bad
            self.step += 1
        if self.version == before:
            self.release(len(groups))
            return
        while self.pushing:  # one push at a time
            yield None
        self.pushing = True
        self.push(self.version, len(groups))

    def push(self, version: int, count: int) -> None:
        if self.now < self.evaluated_until:
            self.record.delayed += 1
            self.at(self.evaluated_until, self.push, version, count)
        else:
            self.at(self.now + self.delay(self.s.push_time), self.become_live, version, count)

    def become_live(self, version: int, count: int) -> None:
        self.live_since.append(self.now)
        self.live.append(version)
        self.pushing = False
        self.release(count)

    def release(self, count: int) -> None:
        self.pacer.release(count)
        self.released += count
        self.dispatch()


def simulate(setting: Setting, pacer_class: type[Pacer] = Pacer) -> Record:
    """One run of `setting`."""
    options = {"schedule": setting.schedule, "max_ready": setting.max_ready, "min_ready": setting.min_ready}
    return World(setting, pacer_class(setting.batch, setting.k, **options)).run()
