"""Drives an engine by the rules of a pacer: prompts in, finished groups out, new weights in flight.

pipeline_rl.py has the rules. Here an event loop in a thread of its own keeps the engine full, while the trainer's thread
takes groups, pushes weights and evaluates.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipeline_rl import FORCED, Group, Pacer, Problem, Rollout


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

    def result_of(self, future: Future) -> Any:
        """Waits for a future of the loop. Raises GeneratorFailed instead of waiting forever, or StopRequested: once a
        second it looks whether something has failed, or the caller wants to stop."""
        error = None
        while error is None and not self.stop_requested():
            done = bool(wait([future], timeout=1.0).done)
            error = future.exception() if done else self._error
            if done and error is None:
                return future.result()
        future.cancel()
        if error is None or self.stop_requested():  # the same signal may have killed the engine
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
            self.result_of(self._run(self.engine.start))
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
