"""A simulated cluster with the real pacer: a job of PipelineRL-k or PPO-off-policy-k on engines and trainers of given
speeds, from event to event.

    a step of an engine    base + per_request · n  seconds   n requests run in it, and each gets one token
    a step of the trainer  tokens of the batch / (tokens/s of one trainer · trainers)
    an update              push_seconds, in which every engine stands still

`pipeline_rl.simulate` is the same in twenty lines, on one engine whose speed does not depend on its load.

SIMPLIFIED. One engine is one GPU, all engines run equally many requests, and prompts cost the engine nothing (the G
rollouts of a group share one prefill). A completion that is cut is one request with its answer, as it keeps its slot.
Judging takes no time, no step is thrown away, and nothing is evaluated.
"""

import bisect
import heapq
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pipeline_rl import Pacer


@dataclass(frozen=True)
class Setting:
    """A job and the machines that it runs on; seconds throughout."""

    batch_prompts: int  # B
    k: int
    lengths: Sequence[Sequence[int]]  # tokens of the G completions of each group as it is admitted; then from the start
    trainers: int
    engines: int
    max_num_seqs: int  # requests inside each engine at most
    engine_step: tuple[float, float]  # base, and for each request in it
    trainer_rates: Sequence[float]  # sampled tokens/s of one trainer, in each counted step; then from the start
    push_seconds: float
    trainer_waits: bool = True  # for an update; only a weight file does not keep it
    schedule: str = "pipeline"
    queue: Mapping[str, int | None] = field(default_factory=dict)  # the pacer's min_ready and max_ready
    steps: int = 45  # that are counted, after those of `warm_up`

    @property
    def warm_up(self) -> int:
        """Steps until the engines are full; the rounds of ppo_off_policy are all alike."""
        return self.k + 2 if self.schedule == "pipeline" else self.k

    def pacer(self) -> Pacer:
        """A new one. Raises ValueError for numbers that it refuses."""
        return Pacer(self.batch_prompts, self.k, schedule=self.schedule, **self.queue)


def lognormal(mean: float, sigma: float, longest: int, rollouts: int, groups: int, seed: int = 0) -> list[list[int]]:
    """Tokens of the completions of groups: lognormal with this mean and standard deviation of their logarithm, cut."""
    rng = random.Random(seed)

    def draw() -> int:
        return max(1, min(longest, round(mean * math.exp(rng.gauss(-(sigma**2) / 2, sigma)))))

    return [[draw() for _ in range(rollouts)] for _ in range(groups)]


@dataclass
class Plan:
    """What the counted steps came to; shares are of their time."""

    step_seconds: float
    trainer_busy: float
    generator_busy: float  # a request is inside, and no update stops it
    requests: float  # inside each engine, mean
    lag_mean: float
    lag_max: int
    tokens: float  # sampled tokens/s, all engines together


@dataclass
class RunningGroup:
    """What the pacer sees of a group, and the clock readings between which each of its requests ran."""

    number: int
    begin: float
    ends: list[float]
    left: int  # requests that still run


class Simulation:
    """Time passes from event to event. `clock` counts the steps of an engine, of which each gives every request one
    token; as all engines step alike, one clock serves all."""

    def __init__(self, setting: Setting):
        self.s = setting
        self.pacer = setting.pacer()
        self.now = self.clock = 0.0
        self.ends: list[tuple[float, int]] = []  # a heap: when which group's request is complete, on `clock`
        self.groups: dict[int, RunningGroup] = {}
        self.version, self.steps = 0, 0
        self.live_at, self.live = [0.0], [0]  # at which reading of `clock` which version went live
        self.trainer, self.trainer_until = self._trainer(), math.inf  # inf: it waits
        self.push_until = math.inf  # inf: no update is under way
        self.pushed = (0, 0)  # (version, groups to release) of the update under way
        self.seconds: Counter[str] = Counter()  # of each state, so far
        self.lags: Counter[int] = Counter()  # tokens of each lag

    @property
    def inside(self) -> int:
        """Requests inside all engines."""
        return len(self.ends)

    def run(self) -> Plan:
        """Simulates until `steps` steps are counted."""
        first, began, before = self.s.warm_up, 0.0, Counter()
        last = first + self.s.steps
        self._admit()
        while self.steps < last:
            self._pass_time(min(self._next_end(), self.trainer_until, self.push_until))
            if self.now >= self.push_until:
                self._go_live()
            while self.ends and self.ends[0][0] <= self.clock + 1e-6:
                self._end_request()
            steps = self.steps
            if not self.now < self.trainer_until < math.inf:  # not busy: it may have something to do
                self.trainer_until = next(self.trainer)
            if steps < first == self.steps:
                began, before, self.lags = self.now, self.seconds.copy(), Counter()
            self._admit()
        return self._plan(self.now - began, self.seconds - before)

    # ---- engines ----

    def _step_seconds(self) -> float:
        """Seconds of an engine's step with the requests that are inside."""
        base, per_request = self.s.engine_step
        return base + per_request * max(1.0, self.inside / self.s.engines)

    def _next_end(self) -> float:
        """When the next request is complete, if nothing else happens before."""
        if not self.ends or self.push_until < math.inf:
            return math.inf
        return self.now + max(0.0, self.ends[0][0] - self.clock) * self._step_seconds()

    def _pass_time(self, until: float) -> None:
        if until == math.inf:
            raise RuntimeError("nobody can go on: the groups that the trainer waits for do not fit the engines")
        passed, stopped = until - self.now, self.push_until < math.inf
        if self.ends and not stopped:
            self.clock += passed / self._step_seconds()
            self.seconds["generator"] += passed
            self.seconds["tokens"] += passed / self._step_seconds() * self.inside
        self.seconds["requests"] += passed * self.inside
        self.seconds["trainer"] += passed * (self.trainer_until < math.inf)
        self.now = until

    def _admit(self) -> None:
        lengths, slots = self.s.lengths, self.s.max_num_seqs * self.s.engines
        while self.inside + len(lengths[0]) <= slots and self.pacer.may_admit():
            number = self.pacer.admit()
            ends = [self.clock + length for length in lengths[number % len(lengths)]]
            self.groups[number] = RunningGroup(number, self.clock, ends, len(ends))
            for end in ends:
                heapq.heappush(self.ends, (end, number))

    def _end_request(self) -> None:
        group = self.groups[heapq.heappop(self.ends)[1]]
        group.left -= 1
        if not group.left:
            self.pacer.finish(self.groups.pop(group.number))

    # ---- trainer ----

    def _trainer(self) -> Iterator[float]:
        """Yields until when the trainer is busy; inf: until something happens."""
        while True:
            taken = self.pacer.take(self.pacer.take_size)
            if taken is None:
                yield math.inf
                continue
            for first in range(0, len(taken), self.s.batch_prompts):
                batch = taken[first : first + self.s.batch_prompts]
                tokens = sum(end - group.begin for group in batch for end in group.ends)
                rate = self.s.trainer_rates[(self.steps - self.s.warm_up) % len(self.s.trainer_rates)]
                yield self.now + tokens / (rate * self.s.trainers)
                self._count_lags(batch)
                self.version, self.steps = self.version + 1, self.steps + 1
            while self.push_until < math.inf:  # one update at a time
                yield math.inf
            self.push_until, self.pushed = self.now + self.s.push_seconds, (self.version, len(taken))
            while self.s.trainer_waits and self.push_until < math.inf:
                yield math.inf

    def _count_lags(self, batch: Sequence[RunningGroup]) -> None:
        """How many tokens of the batch were sampled how many versions before the one that trains on them."""
        for group in batch:
            first = bisect.bisect(self.live_at, group.begin) - 1
            for end in group.ends:
                at, place = group.begin, first
                while at < end:
                    until = min(end, self.live_at[place + 1] if place + 1 < len(self.live_at) else math.inf)
                    self.lags[self.version - self.live[place]] += until - at
                    at, place = until, place + 1

    def _go_live(self) -> None:
        version, release = self.pushed
        self.live_at.append(self.clock)
        self.live.append(version)
        self.push_until = math.inf
        self.pacer.release(release)

    def _plan(self, passed: float, seconds: Counter[str]) -> Plan:
        tokens = sum(self.lags.values())
        return Plan(
            step_seconds=passed / self.s.steps,
            trainer_busy=seconds["trainer"] / passed,
            generator_busy=seconds["generator"] / passed,
            requests=seconds["requests"] / passed / self.s.engines,
            lag_mean=sum(lag * count for lag, count in self.lags.items()) / tokens,
            lag_max=max(self.lags),
            tokens=seconds["tokens"] / passed,
        )


def simulate(setting: Setting) -> Plan:
    """One simulated job."""
    return Simulation(setting).run()
