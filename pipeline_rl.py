"""PipelineRL-k and PPO-off-policy-k: generate and train at the same time, with a bound on how old a token may be.

SYMBOLS. B prompts per step, G rollouts per prompt, k steps off-policy, v policy version.

PROBLEM. Sampling takes most of the time of reinforcement learning on language models, and its slowest completions
take most of that. A trainer that waits for every completion leaves the generator idle at the end of each batch, and is
itself idle until the batch is complete.

IDEA (PipelineRL, arXiv 2509.19128; ScaleRL, arXiv 2510.13786, section 3.1). The generator never stops: prompts
stream in, finished groups stream out, and each optimizer step's weights are swapped into the engine while its requests
run. They go on with the new weights over the keys and values of the old ones. The price is that a token may be trained
on by a later policy than the one that sampled it:

    lag(token) = v_train − v_token        v counts updates. v_train: the weights that compute the gradient; v_token:
                                          those that sampled the token. Every token carries its version.

THE BOUND. Groups are numbered as they enter the engine and trained strictly in that order. A new one may enter only
while the following holds:

    outstanding < (k + 1) · B             outstanding: admitted, and the weights of the step that trains them are
                                          not yet live in the engine; B groups train in a step

A group that enters at version w has at most (k + 1)·B − 1 outstanding groups before it, which fill at most k whole
steps. So it trains at version w + k at the latest. Its tokens were sampled at w or later: their lag is at most k. For
B = 2 and k = 1:

    version live       0          1          2          3
    groups admitted    0 1 2 3    4 5        6 7        8 9
    the step trains    0 1        2 3        4 5        6 7
    lag, at most       0          1          1          1

Nothing is dropped for its age: that would drop the long rollouts. Two shortcuts would break the bound. If a group
stopped being outstanding when it is taken, and not when its step's weights are live, k = 0 would train at lag 1. If the
trainer took whichever groups finish first, a slow group 0 would wait while 1, 2, 3 finish, train and make room for 4,
5, 6, and so on: never more than (k + 1)·B are outstanding, yet group 0 ages by one version a step.

That rule alone guarantees the bound. But do not run up to it: finished groups only go stale while they wait. So there
is a second rule. A group that the trainer takes is replaced at once; beyond that, a new one enters only while fewer
than B are *ready*. A group is ready if it and all older groups are finished, so that the trainer could take it now. (If
a finished group behind a running one counted as well, a single long completion would empty the engine.) Groups are
*under way* from their admission until they are taken; the *peak* is the largest number that ever were.

    groups that are ready    groups under way        may one more enter?
    fewer than B             any number              yes: the trainer would have to wait
    B or more                fewer than at the peak  yes: it replaces one that was taken
    B or more                as many as at the peak  no: it would only grow old

And never while fewer than G slots are free: nothing queues inside the engine. So the first peak is what the bound and
the free slots allow, and it grows only while the trainer would have to wait.

PPO-off-policy-k, the alternative, freezes the policy, samples k·B prompts and takes k steps of B. The pacer keeps at
most k·B groups outstanding. The caller does the freezing: it pushes once, after the k-th step, and releases all k·B
together, when those weights are live. (Groups that dynamic sampling discards are released earlier; those that take
their place are sampled by the same policy.) Lags are 0..k − 1, and the engine is idle while the trainer works.

P1: the paper has a queue between generator and trainer. Here admission is paced, and groups train in admission order.

SIMPLIFIED. The engine is any object with the methods that `Generator` lists; vllm_engine.py has one. An engine that
dies is not replaced: train.py saves a checkpoint and ends.

`python pipeline_rl.py` simulates the pacing: with k = 0 the trainer waits 77 % of the time, with k = 2 34 %, and with
k = 8 2 %, at a mean lag of 5.3.

    >>> pacer = Pacer(batch_prompts=2, k=1)
    >>> numbers = [pacer.admit() for _ in range(4)]
    >>> pacer.may_admit()                  # 4 = (k + 1) · B are outstanding
    False
"""

import asyncio
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

FORCED = -1  # the "version" of a token that nobody sampled (the interruption phrase)
Problem = Any  # an object with `prompt_ids`


@dataclass
class Rollout:
    """One completion of one prompt and all that training needs to know about it; lists have one entry per token."""

    completion_ids: list[int]
    logprobs: list[float]  # the generator's own, at its temperature; 0.0 on forced tokens
    versions: list[int]  # policy version that sampled the token; FORCED on forced tokens
    mask: list[int]  # 1 = sampled, trains; 0 = forced
    finish_reason: str  # "stop" or "length" (truncated)
    interrupted: bool = False  # its thinking was cut and the phrase appended
    prefilled: int = 0  # prompt tokens that the engine computed for it
    reward: float = math.nan
    correct: bool = False


@dataclass
class Group:
    """The G rollouts of one prompt: the unit of queueing, filtering and batching."""

    number: int  # order of admission
    problem: Problem
    version: int  # policy version live at admission
    rollouts: list[Rollout]


def lags(rollout: Rollout, version: int) -> list[int]:
    """Lag of each sampled token of `rollout` at the step that makes `version` + 1; forced tokens have none."""
    return [version - v for v, m in zip(rollout.versions, rollout.mask, strict=True) if m]


class Pacer:
    """Who may start, and who must wait: the lag bound as a counter (module docstring). `simulate` shows one in use. Not
    safe to call from several threads: call it from one event loop. Of a group it reads `.number` only.

    Args:
        batch_prompts: B.
        k: `pipeline`: k >= 0, lag in 0..k. `ppo_off_policy`: k >= 1, lag in 0..k-1.
        min_ready: groups that stay ready behind each take, which raises the lag by about min_ready / B; `pipeline`
            only, at most k·B. Above 0, a new group enters only while fewer than a take and `min_ready` are ready: taken
            groups are not replaced at once. Set the attribute to 0 when no prompt is left to admit.

    Raises ValueError for an unknown schedule or impossible numbers.
    """

    def __init__(self, batch_prompts: int, k: int, *, schedule: str = "pipeline", min_ready: int = 0):
        if schedule not in ("pipeline", "ppo_off_policy"):
            raise ValueError(f"schedule must be one of pipeline, ppo_off_policy, not {schedule!r}")
        least_k = 0 if schedule == "pipeline" else 1
        if batch_prompts < 1 or k < least_k:
            raise ValueError(f"{schedule} needs batch_prompts >= 1 and k >= {least_k}, not {batch_prompts} and {k}")
        self.take_size = batch_prompts if schedule == "pipeline" else k * batch_prompts  # groups the trainer takes
        self.capacity = (k + 1) * batch_prompts if schedule == "pipeline" else k * batch_prompts
        if not 0 <= min_ready <= self.capacity - self.take_size:
            raise ValueError(f"min_ready must be from 0 to {self.capacity - self.take_size}, not {min_ready}")
        self.min_ready = min_ready
        self.peak_under_way = 0  # the most groups that were ever admitted and not yet taken
        self.admitted = 0  # numbers given out so far
        self.training = 0  # taken by the trainer, their step not yet live
        self._groups: dict[int, Any] = {}  # admitted and not taken, in number order; None while the group runs

    @property
    def outstanding(self) -> int:
        """Groups admitted whose step is not yet live."""
        return len(self._groups) + self.training

    @property
    def ready(self) -> int:
        """Finished groups that the trainer could take now: those before the first one that still runs."""
        return sum(1 for _ in itertools.takewhile(lambda group: group is not None, self._groups.values()))

    def may_admit(self) -> bool:
        """Whether one more group may enter the engine."""
        if self.outstanding >= self.capacity:
            return False
        if not self.may_take(self.take_size):
            return True  # the trainer would have to wait
        return self.min_ready == 0 and len(self._groups) < self.peak_under_way  # it replaces one that was taken

    def admit(self) -> int:
        """The number of the group that enters now. Raises RuntimeError if none may enter."""
        if not self.may_admit():
            counts = f"{self.outstanding} of {self.capacity} are outstanding, {self.ready} are ready"
            raise RuntimeError(f"no group may enter now ({counts}); ask may_admit() first")
        self._groups[self.admitted] = None
        self.peak_under_way = max(self.peak_under_way, len(self._groups))
        self.admitted += 1
        return self.admitted - 1

    def finish(self, group: Group) -> None:
        """Every rollout of `group` is complete and scored. Raises KeyError if it was not running."""
        if group.number not in self._groups or self._groups[group.number] is not None:
            raise KeyError(f"group {group.number} is not running")
        self._groups[group.number] = group

    def may_take(self, count: int) -> bool:
        """Whether `count` groups are ready and `min_ready` more."""
        return self.ready >= count + self.min_ready

    def take(self, count: int) -> list[Group] | None:
        """The `count` lowest numbers, or None: the trainer must wait for them, even if younger groups are finished."""
        if not self.may_take(count):
            return None
        self.training += count
        return [self._groups.pop(number) for number in list(self._groups)[:count]]

    def release(self, count: int) -> None:
        """`count` taken groups stop being outstanding: their step is live in the engine, was skipped, or dynamic
        sampling discarded them."""
        if count > self.training:
            raise ValueError(f"{count} groups released, but only {self.training} are in training")
        self.training -= count


def simulate(k: int, schedule: str = "pipeline", batch: int = 8, slots: int = 24) -> tuple[list[int], float, float]:
    """(lags of all tokens, share of the time that slots were empty, share that the trainer waited) of 200 steps on an
    engine that samples one token of each group inside it a tick, while the trainer takes 16 ticks a step."""
    pacer = Pacer(batch, k, schedule=schedule)
    rng = random.Random(0)
    steps = pacer.take_size // batch  # of each take
    lengths: dict[int, int] = {}  # number -> length of a group that runs
    versions: dict[int, list[int]] = {}  # number -> the version of each of its tokens
    token_lags: list[int] = []
    version = tick = empty = waited = 0
    live_at = math.inf  # the tick at which the weights of the steps in progress go live
    while version < 200:
        if tick == live_at:
            version += steps
            live_at = math.inf
            pacer.release(pacer.take_size)
        if live_at == math.inf and (groups := pacer.take(pacer.take_size)):
            for i, group in enumerate(groups):
                token_lags += [version + i // batch - v for v in versions[group.number]]
            live_at = tick + 16 * steps
        while pacer.may_admit() and len(lengths) < slots:
            number = pacer.admit()
            lengths[number] = rng.randint(10, 60)
            versions[number] = []
        empty += slots - len(lengths)
        waited += live_at == math.inf
        tick += 1
        for number, length in list(lengths.items()):
            versions[number].append(version)
            if len(versions[number]) == length:
                del lengths[number]
                pacer.finish(Group(number, None, version, []))
    return token_lags, empty / slots / tick, waited / tick


# The bound ends here. Below: driving an engine by it.


@dataclass
class Counters:
    """What the generator did since its start; the trainer logs differences."""

    sampled: int = 0  # completion tokens of groups, not of evaluations
    prefilled: int = 0  # prompt tokens computed, not read from cache; the second legs' forced tokens are among them
    eval_seconds: float = 0.0  # evaluation's share of the time: its tokens of all tokens sampled while it ran
    idle_seconds: float = 0.0  # no request inside the engine, and not paused
    request_seconds: float = 0.0  # requests inside the engine, summed over time
    sync_seconds: float = 0.0  # paused for new weights


class StopRequested(Exception):
    """The caller asked to stop while it waited; nothing was taken."""


class Exhausted(Exception):
    """No prompt is left to admit, and fewer groups than a take needs."""


class EngineFailed(RuntimeError):
    """The engine did not start."""


class EngineDied(RuntimeError):
    """Raised by an engine whose process has died or no longer answers."""


class GeneratorFailed(RuntimeError):
    """Something raised in the generator's thread: engine, reward or prompts. The cause is that very exception."""

    engine_died = False  # the cause is an EngineDied; other than the cause, this survives pickling


def rollout_of(sample: Any) -> Rollout:
    """What an engine returned, of which every token trains."""
    ids = list(sample.completion_ids)
    mask = [1] * len(ids)
    return Rollout(ids, sample.logprobs, sample.versions, mask, sample.finish_reason, prefilled=sample.prefilled)


def joined(first: Rollout, forced: list[int], second: Rollout, mask: Callable[[int, int, int], list[int]]) -> Rollout:
    """The two legs of a cut rollout, and the phrase if there was one; nobody sampled the phrase."""
    return Rollout(
        completion_ids=first.completion_ids + forced + second.completion_ids,
        logprobs=first.logprobs + [0.0] * len(forced) + second.logprobs,
        versions=first.versions + [FORCED] * len(forced) + second.versions,
        mask=mask(len(first.mask), len(forced), len(second.mask)),
        finish_reason=second.finish_reason,
        interrupted=bool(forced),
        prefilled=first.prefilled + second.prefilled,
    )


class LoopThread:
    """An event loop in a thread of its own. Other threads call its methods; `_until` is awaited only inside the loop.
    What raises in `_run` ends every wait for the loop, as GeneratorFailed."""

    stop_requested: Callable[[], bool]

    def __init__(self) -> None:
        self._changed = asyncio.Event()  # wakes waiters in `_until`
        self._error: BaseException | None = None  # the first one in the loop: it ends every wait
        self._closing = False
        self._running: set[Future] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generator", daemon=True)

    def _run(self, function: Callable[..., Coroutine], *args: Any) -> Future:
        """Starts `function(*args)` in the loop."""

        async def noting_errors() -> Any:
            if self._closing:  # scheduled just before `_end`
                raise asyncio.CancelledError
            try:
                return await function(*args)
            except Exception as error:
                self._error = self._error or error
                raise
            finally:
                self._changed.set()

        future = asyncio.run_coroutine_threadsafe(noting_errors(), self._loop)
        self._running.add(future)  # or it could be garbage-collected before it finishes
        future.add_done_callback(self._running.discard)
        return future

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits in the loop. Raises what has failed there meanwhile."""
        while not condition():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def in_loop(self, function: Callable[[Any], Any]) -> Any:
        """`function(self)`, run between two events of the loop: nothing is admitted meanwhile."""

        async def call() -> Any:
            self._changed.set()
            return function(self)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def result_of(self, future: Future, may_stop: bool = True) -> Any:
        """Waits for a future of the loop. Raises GeneratorFailed instead of waiting forever, or StopRequested: once a
        second it looks whether something has failed, or the caller wants to stop."""
        error = None
        while error is None and not (may_stop and self.stop_requested()):
            done = bool(wait([future], timeout=1.0).done)
            error = future.exception() if done else self._error
            if done and error is None:
                return future.result()
        future.cancel()
        if error is None or (may_stop and self.stop_requested()):  # the same signal may have killed the engine
            raise StopRequested from error
        if isinstance(error, EngineFailed):
            raise error
        failure = GeneratorFailed(f"the generator failed: {type(error).__name__}: {error}")
        failure.engine_died = isinstance(error, EngineDied)
        raise failure from error

    def _end(self, last: Callable[[], None]) -> None:
        """Cancels what runs, calls `last` in the loop, and ends the thread."""

        async def stop() -> None:
            self._closing = True
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()  # vLLM answers no request after its end
            if others:
                await asyncio.wait(others, timeout=5)
            last()

        wait([self._run(stop)], timeout=30)  # longer on a machine that is too busy; the thread ends all the same
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


@dataclass(eq=False)
class Generator(LoopThread):
    """Prompts in, finished groups out: keeps an engine full by the rules of a pacer, in an event loop in a thread of
    its own. The methods without an underscore are for the trainer's thread, which waits in them. An engine has

        slots                              requests inside it at most
        version                            the version that is live
        trainer_waits                      True: it reads the trainer's own tensors, which must not change meanwhile
        prepare(weights, version)          in the trainer's thread: what the next `start` or `update` loads; OSError if
                                           there is no room for them
        await start(), await update()      starts with these weights; or pauses, loads them, and goes on
        await sample(prompt_ids, max_tokens, salt)   one request: an object with completion_ids, logprobs, versions,
                                           finish_reason and prefilled, as in `Rollout`
        shutdown()                         ends it; may be called twice
    """

    engine: Any
    problems: Iterator[Problem]  # endless or finite, asked at each admission
    score: Callable[[Problem, list[list[int]]], list[tuple[float, bool]]]  # (reward, correct) of each; in a thread
    pacer: Pacer
    rollouts: int  # G
    _: KW_ONLY
    length_control: Any = None  # a length_control.Interruption, or its draw_budget, max_budget, second_leg and mask
    max_completion: int = 64  # completion tokens at most, without length control
    seed: int = 0  # of the thinking budgets
    stop_requested: Callable[[], bool] = lambda: False  # asked each second of a wait; True raises StopRequested there

    def __post_init__(self) -> None:
        super().__init__()
        if self.engine.slots < self.rollouts:
            raise ValueError(f"{self.rollouts} rollouts per prompt do not fit {self.engine.slots} engine slots")
        self.counters = Counters()
        self.under_way: dict[int, Problem] = {}  # number -> problem of the groups admitted and not yet taken
        self.free = self.engine.slots  # slots; a rollout keeps its own between its legs
        self.exhausted = False  # `problems` came to its end
        self._rng = random.Random(self.seed)
        self._evaluating = False  # an evaluation runs
        self._entering = False  # some of its requests wait for slots
        self._paused = False  # for new weights
        self._counted_at = time.monotonic()  # when `_count` was called last
        self._pushing: Future | None = None

    async def _admit(self) -> None:
        """Starts new groups. Nothing queues inside vLLM, and none enters in a pause: the version at admission is the
        version of the prefill."""
        while True:
            await self._until(self._has_room)
            if (problem := next(self.problems, None)) is None:
                break
            number = self.pacer.admit()
            self.under_way[number] = problem
            self._count(self.rollouts)
            self._run(self._group, number, problem)
        self.exhausted = True
        self.pacer.min_ready = 0  # so that the last groups are trained as well

    def _has_room(self) -> bool:
        return self.free >= self.rollouts and not self._entering and not self._paused and self.pacer.may_admit()

    async def _group(self, number: int, problem: Problem) -> None:
        """Samples and scores the G rollouts of one group."""
        version = self.engine.version
        draw = self.length_control.draw_budget if self.length_control else lambda rng: self.max_completion
        budgets = [draw(self._rng) for _ in range(self.rollouts)]
        rollouts = await asyncio.gather(*[self._rollout(problem, budget, version) for budget in budgets])
        await self._score(problem, rollouts)
        self.counters.sampled += sum(sum(rollout.mask) for rollout in rollouts)
        self.counters.prefilled += sum(rollout.prefilled for rollout in rollouts)
        self.pacer.finish(Group(number, problem, version, rollouts))

    async def _rollout(self, problem: Problem, budget: int, version: int) -> Rollout:
        """One completion, in one request, or in two where the first one ends at `budget` and tokens for an answer are
        left; the phrase comes between only if thinking had not ended. Gives its slot back."""
        # The salt keeps a prompt from hitting keys and values that another version left in vLLM's cache. Both legs have
        # the same one, so that the second finds those of the first.
        prompt = list(problem.prompt_ids)
        salt = str(version)
        control = self.length_control
        try:
            first = rollout_of(await self.engine.sample(prompt, budget, salt))
            leg = control and control.second_leg(prompt, first.completion_ids, first.finish_reason)
            if leg is None:
                return first
            second = rollout_of(await self.engine.sample(leg.prompt_ids, leg.max_tokens, salt))
        finally:
            self._count(-1)
        return joined(first, list(leg.forced_ids), second, control.mask)

    async def _score(self, problem: Problem, rollouts: list[Rollout]) -> None:
        scores = await asyncio.to_thread(self.score, problem, [rollout.completion_ids for rollout in rollouts])
        for rollout, (reward, correct) in zip(rollouts, scores, strict=True):
            rollout.reward, rollout.correct = float(reward), bool(correct)

    async def _evaluate(self, problems: list[Any], n_samples: int) -> list[list[Rollout]]:
        """Its requests get slots before any new group does, and the longest budget (T4: papers do not say which)."""
        longest = self.length_control.max_budget if self.length_control else self.max_completion
        started = time.monotonic()
        sampled_before = self.counters.sampled
        requests = []
        self._evaluating = self._entering = True
        try:
            for problem in [problem for problem in problems for _ in range(n_samples)]:
                await self._until(lambda: self.free > 0)
                self._count(1)
                request = self._run(self._rollout, problem, longest, self.engine.version)
                requests.append(asyncio.wrap_future(request))
            self._entering = False
            flat = await asyncio.gather(*requests)
        finally:
            self._evaluating = self._entering = False
            self._changed.set()
        groups = [flat[i : i + n_samples] for i in range(0, len(flat), n_samples)]
        await asyncio.gather(*[self._score(p, g) for p, g in zip(problems, groups, strict=True)])
        sampled = sum(sum(rollout.mask) for rollout in flat)
        sampled_meanwhile = self.counters.sampled - sampled_before
        share = sampled / max(1, sampled + sampled_meanwhile)
        self.counters.eval_seconds += share * (time.monotonic() - started)
        return groups

    async def _push(self, release: int) -> None:
        """Requests freeze, keep their cache, and go on with the new weights. If that fails, they stay frozen."""
        await self._until(lambda: not self._evaluating)
        self._count()
        self._paused = True
        await self.engine.update()
        self._count()
        self._paused = False
        self.pacer.release(release)

    async def _fail(self, error: Exception) -> None:
        raise error

    def _count(self, change: int = 0) -> None:
        """Counts the time since the last call, and `change` more requests inside the engine."""
        now = time.monotonic()
        passed = now - self._counted_at
        self._counted_at = now
        inside = self.engine.slots - self.free
        self.counters.request_seconds += passed * inside
        if self._paused:
            self.counters.sync_seconds += passed
        elif not inside:
            self.counters.idle_seconds += passed
        self.free -= change
        self._changed.set()

    def start(self, weights: object, version: int = 0) -> None:
        """Starts the engine, gives it the weights of `version` and opens admission. Raises EngineFailed, or
        StopRequested (unless other trainer processes may be inside the first transfer of weights)."""
        self._thread.start()
        try:
            self.engine.prepare(weights, version)
            self.result_of(self._run(self.engine.start), may_stop=not self.engine.trainer_waits)
        except (GeneratorFailed, OSError) as error:
            raise EngineFailed(str(error)) from error
        self._counted_at = time.monotonic()
        self._run(self._admit)

    def take(self, count: int) -> list[Group]:
        """Waits for the `count` oldest groups. Raises GeneratorFailed or Exhausted."""

        def too_few_left() -> bool:
            return self.exhausted and len(self.under_way) < count

        def now(_: object) -> list[Group]:
            if (groups := self.pacer.take(count)) is None:
                raise Exhausted(f"no prompt is left to admit; {len(self.under_way)} groups stay untrained")
            for group in groups:
                del self.under_way[group.number]
            return groups

        self.result_of(self._run(self._until, lambda: self.pacer.may_take(count) or too_few_left()))
        # Nothing can interrupt this: a group lost between the wait and the take would be in no checkpoint.
        return self.in_loop(now)

    def release(self, count: int) -> None:
        """The trainer is done with `count` taken groups without new weights (a skipped step, a discarded group)."""
        self.in_loop(lambda _: self.pacer.release(count))

    def push(self, weights: object, version: int, release: int) -> None:
        """Sends weights to the engine, whose requests go on; returns once the trainer may change them. When they are
        live, `release` groups stop being outstanding; the next `push`, `evaluate` or `settle` raises if that failed."""
        self.settle()
        try:
            self.engine.prepare(weights, version)
        except OSError as error:  # other trainer processes go on to the next wait, so this one does, too
            self._pushing = self._run(self._fail, error)
            return
        self._pushing = self._run(self._push, release)
        if self.engine.trainer_waits:
            self.result_of(self._pushing, may_stop=False)  # the other trainer processes are inside the transfer

    def settle(self) -> None:
        """Waits until the last pushed weights are live, or until the caller wants to stop. Calling it twice is free:
        with several trainer processes `push` finds that all of them have called it."""
        if self._pushing is not None:
            self.result_of(self._pushing)
            self._pushing = None

    def evaluate(self, problems: Iterable[Problem], n_samples: int) -> Future:
        """Starts sampling `n_samples` completions of each problem at the live version and returns their future, a list
        of rollouts per problem, for `result_of`. A push waits while it runs."""
        self.settle()
        return self._run(self._evaluate, list(problems), n_samples)

    def ask(self, call: Callable[[Any], Coroutine]) -> Any:
        """The result of the coroutine `call(engine)`, after the last push."""
        self.settle()
        return self.result_of(self._run(call, self.engine))

    def close(self) -> None:
        """Stops engine and thread; safe to call twice and after a failure."""
        if self._thread.is_alive():
            if self._pushing is not None:
                wait([self._pushing], timeout=5)  # the engine reads a file that is deleted next
            self._end(self.engine.shutdown)  # in the loop, whose requests it ends
        self.engine.shutdown()  # again: the loop may not have got to it, or never ran


if __name__ == "__main__":
    print("simulated        lag mean   largest   slots empty   trainer waits")
    for schedule, k in (("pipeline", 0), ("pipeline", 1), ("pipeline", 2), ("pipeline", 8), ("ppo_off_policy", 3)):
        ages, empty, waited = simulate(k, schedule)
        print(f"{schedule:14} {k} {sum(ages) / len(ages):9.2f} {max(ages):9} {empty:13.0%} {waited:15.0%}")
