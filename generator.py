"""Drives an engine by the rules of a pacer: prompts in, finished groups out, new weights in flight.

You are here, on the way of docs/one_group.md:  [1 enters  2 is sampled  3 judged]  4 weighed  5 scored  [6 new weights]

pipeline_rl.py says when a group may enter. Here an event loop, in a thread of its own, keeps the engine full, while the
trainer's thread takes groups, pushes weights and evaluates. An engine (vllm_engine.py has one) is any object with

    slots, version                     requests inside it at most; the version that is live
    prepare(weights, version)          in the trainer's thread: what `start` or `update` loads next; OSError: no room
    await start(), await update()      starts with these weights; or pauses, loads them, and goes on
    await sample(prompt_ids, max_tokens, salt)   one request: an object with completion_ids, logprobs, versions,
                                       finish_reason and prefilled, as in `Rollout`
    shutdown()                         ends it; may be called twice

Three ways to wait, and who may call which. (SIMPLIFIED: no engine is replaced; what failed once ends every wait.)

    call                       in which thread    it waits for              and is ended by
    await _until(condition)    the loop's         a slot, or groups         whatever has failed in the loop
    result_of(future)          the trainer's      what runs in the loop     the same, or `stop_requested`
    in_loop(function)          the trainer's      its turn between events   nothing: the function runs undivided
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipeline_rl import Group, Pacer, Problem, Rollout, joined, rollout_of


@dataclass
class Counters:
    """What the generator did since its start; the trainer logs differences."""

    sampled: int = 0  # completion tokens of groups, not of evaluations
    prefilled: int = 0  # prompt tokens computed, not read from cache; the second legs' forced tokens are among them
    eval_seconds: float = 0.0  # time in which evaluations ran, times their share of the tokens sampled in it
    idle_seconds: float = 0.0  # no request inside the engine, and not paused
    request_seconds: float = 0.0  # requests inside the engine, summed over time
    sync_seconds: float = 0.0  # paused for new weights


class StopRequested(Exception):
    """The caller asked to stop while it waited; nothing was taken."""


class Exhausted(Exception):
    """No prompt is left to admit, and fewer groups than a take needs."""


class EngineFailed(RuntimeError):
    """The engine did not start."""


class GeneratorFailed(RuntimeError):
    """Something raised in the generator's thread: engine, reward or prompts. The cause is that very exception."""


class EngineDied(GeneratorFailed):
    """Raised by an engine whose process has died or no longer answers, and then by every wait for the generator."""


@dataclass(eq=False)
class Generator:
    """Keeps an engine full. The methods without an underscore are for the trainer's thread."""

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
        if self.engine.slots < self.rollouts:
            raise ValueError(f"{self.rollouts} rollouts per prompt do not fit {self.engine.slots} engine slots")
        self.counters = Counters()
        self.under_way: dict[int, Problem] = {}  # number -> problem of the groups admitted and not yet taken
        self.free = self.engine.slots  # slots; a rollout keeps its own between its legs
        self.exhausted = False  # `problems` came to its end
        self._rng = random.Random(self.seed)
        self._evaluation_enters = False  # its requests take the slots that come free: new groups wait
        self._updating = False  # the engine takes new weights: new groups wait
        self._one_version = asyncio.Lock()  # evaluation or update: the other waits, so an evaluation has one version
        self._pushing: Future | None = None  # the last push
        self._counted_at = time.monotonic()  # when `_count` was called last
        self._changed = asyncio.Event()  # wakes those who wait in `_until`
        self._error: BaseException | None = None  # the first one in the loop: it ends every wait
        self._closing = False
        self._running: set[Future] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generator", daemon=True)

    # -------------------------------------------------------------------------------------------- what runs in the loop
    async def _admit(self) -> None:
        """Starts new groups, none in a pause. An update may still come before the prefill: each token carries its own
        version."""
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
        return not (self._evaluation_enters or self._updating) and self.free >= self.rollouts and self.pacer.may_admit()

    async def _group(self, number: int, problem: Problem) -> None:
        """Samples and scores the G rollouts of one group."""
        version = self.engine.version
        draw = self.length_control.draw_budget if self.length_control else lambda rng: self.max_completion
        requests = [self._rollout(problem, draw(self._rng), version) for _ in range(self.rollouts)]
        rollouts = await asyncio.gather(*requests)
        await self._score(problem, rollouts)
        self.counters.sampled += sum(sum(rollout.mask) for rollout in rollouts)
        self.counters.prefilled += sum(rollout.prefilled for rollout in rollouts)
        self.pacer.finish(Group(number, problem, version, rollouts))

    async def _rollout(self, problem: Problem, budget: int, version: int, longest_leg: int = sys.maxsize) -> Rollout:
        """One completion, in one request, or in two where the first one ends at `budget` and tokens for an answer are
        left; the phrase comes between only if thinking had not ended. Gives its slot back."""
        prompt, control = list(problem.prompt_ids), self.length_control
        salt = str(version)  # vLLM shares keys and values within a salt: so only those of this version
        try:
            first = rollout_of(await self.engine.sample(prompt, budget, salt))
            leg = control and control.second_leg(prompt, first.completion_ids, first.finish_reason)
            if leg is None:
                return first
            second = rollout_of(await self.engine.sample(leg.prompt_ids, min(leg.max_tokens, longest_leg), salt))
        finally:
            self._count(-1)
        return joined(first, list(leg.forced_ids), second, control.mask)

    async def _score(self, problem: Problem, rollouts: list[Rollout]) -> None:
        scores = await asyncio.to_thread(self.score, problem, [rollout.completion_ids for rollout in rollouts])
        for rollout, (reward, correct) in zip(rollouts, scores, strict=True):
            rollout.reward, rollout.correct = float(reward), bool(correct)

    # The concept ends here. What follows: evaluations, new weights, counters, and what the trainer calls.
    async def _evaluate(self, problems: list[Any], n_samples: int, longest_leg: int) -> list[list[Rollout]]:
        """Its requests enter before any new group, with the longest budget (T4: papers do not say which)."""
        longest = self.length_control.max_budget if self.length_control else self.max_completion
        started, sampled_before, requests = time.monotonic(), self.counters.sampled, []
        async with self._one_version:
            self._evaluation_enters = True
            for problem in [problem for problem in problems for _ in range(n_samples)]:
                await self._until(lambda: self.free > 0)
                self._count(1)
                future = self._run(self._rollout, problem, min(longest, longest_leg), self.engine.version, longest_leg)
                requests.append(asyncio.wrap_future(future))
            self._evaluation_enters = False
            self._changed.set()
            rollouts = await asyncio.gather(*requests)
        groups = [rollouts[i : i + n_samples] for i in range(0, len(rollouts), n_samples)]
        await asyncio.gather(*[self._score(p, g) for p, g in zip(problems, groups, strict=True)])
        sampled = sum(sum(rollout.mask) for rollout in rollouts)
        by_groups = self.counters.sampled - sampled_before
        self.counters.eval_seconds += (time.monotonic() - started) * sampled / max(1, sampled + by_groups)
        return groups

    async def _push(self, release: int, failure: OSError | None) -> None:
        """Requests freeze, keep their cache, and go on with the new weights. If that fails, they stay frozen."""
        if failure is not None:
            raise failure
        async with self._one_version:
            self._count()
            self._updating = True
            await self.engine.update()
            self._count()
            self._updating = False
            self.pacer.release(release)

    def _count(self, entered: int = 0) -> None:
        """Adds the time since the last call to the counters, and then `entered` requests to those in the engine."""
        now = time.monotonic()
        passed, self._counted_at = now - self._counted_at, now
        inside = self.engine.slots - self.free
        self.counters.request_seconds += passed * inside
        if self._updating:
            self.counters.sync_seconds += passed
        elif not inside:
            self.counters.idle_seconds += passed
        self.free -= entered
        self._changed.set()

    # ---------------------------------------------------------------------------------- what the trainer's thread calls
    def start(self, weights: object, version: int = 0) -> None:
        """Starts the engine with the weights of `version` and opens admission. Raises EngineFailed or StopRequested."""
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

        def never() -> bool:
            return self.exhausted and len(self.under_way) < count

        self.result_of(self._run(self._until, lambda: self.pacer.may_take(count) or never()))
        # Nothing interrupts what follows: a group lost between the wait and the take would be in no checkpoint.
        groups = self.in_loop(lambda _: self.pacer.take(count))
        if groups is None:
            raise Exhausted(f"no prompt is left to admit; {len(self.under_way)} groups stay untrained")
        for group in groups:
            del self.under_way[group.number]
        return groups

    def release(self, count: int) -> None:
        """The trainer is done with `count` taken groups without new weights (a skipped step, a discarded group)."""
        self.in_loop(lambda _: self.pacer.release(count))

    def push(self, weights: object, version: int, release: int) -> None:
        """Sends weights to the engine, whose requests go on; returns once the trainer may change them. When they are
        live, `release` groups stop being outstanding; the next `push`, `evaluate` or `settle` raises if that failed."""
        self.settle()
        failure = None
        try:
            self.engine.prepare(weights, version)
        except OSError as error:  # raised at the next wait, to which other trainer processes go on, too
            failure = error
        self._pushing = self._run(self._push, release, failure)

    def settle(self) -> None:
        """Waits until the last pushed weights are live. Calling it twice is free."""
        if self._pushing is not None:
            self.result_of(self._pushing)
            self._pushing = None

    def evaluate(self, problems: Iterable[Problem], n_samples: int, longest_leg: int = sys.maxsize) -> Future:
        """Starts `n_samples` completions of each problem, in requests of at most `longest_leg` tokens. The future, for
        `result_of`, has rollouts by problem."""
        self.settle()
        return self._run(self._evaluate, list(problems), n_samples, longest_leg)

    def close(self) -> None:
        """Stops engine and thread; safe to call twice and after a failure."""
        if self._thread.is_alive():
            if self._pushing is not None:
                wait([self._pushing], timeout=5)  # the engine reads a file that is deleted next
            wait([self._run(self._shut_down)], timeout=30)  # a machine may be so busy that it comes to nothing
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        self.engine.shutdown()  # again: the loop may not have got to it, or never ran

    async def _shut_down(self) -> None:
        """Ends all that runs in the loop, and the engine, which may hold some of it."""
        self._closing = True
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()  # vLLM answers no request after its end
        if others:
            await asyncio.wait(others, timeout=5)
        self.engine.shutdown()

    # --------------------------------------------------------------------------- the three waits: the table at the top
    def _run(self, function: Callable[..., Coroutine], *args: Any) -> Future:
        """Starts `function(*args)` in the loop. What it raises ends every wait."""

        async def noting_errors() -> Any:
            if self._closing:  # it was scheduled just before
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

    def result_of(self, future: Future) -> Any:
        """Waits for a future of the loop. Raises GeneratorFailed or StopRequested, for which it looks once a second."""
        error: BaseException | None = None
        while error is None and not self.stop_requested():
            if not wait([future], timeout=1.0).done:
                error = self._error
            elif (error := future.exception()) is None:
                return future.result()
        future.cancel()
        if error is None or self.stop_requested():  # the same signal may have killed the engine
            raise StopRequested from error
        if isinstance(error, EngineFailed):
            raise error
        failed = EngineDied if isinstance(error, EngineDied) else GeneratorFailed
        raise failed(f"the generator failed: {type(error).__name__}: {error}") from error

    def in_loop(self, function: Callable[["Generator"], Any]) -> Any:
        """`function(self)`, run between two events of the loop: nothing is admitted meanwhile."""

        async def call() -> Any:
            self._changed.set()
            return function(self)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()
