"""Real vLLM engines for tests, and generators over one that runs already."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from fake_engine import Problem, no_reward
from tiny_model import STOP, TinyModel
from torch import Tensor

from generator import Generator
from pipeline_rl import Pacer
from runtime.engine import RunEngine
from runtime.weights import RunWeightFile


def new_engine(tiny: TinyModel, *, kind: Any = RunEngine, channel: Any = None, **options: object) -> RunEngine:
    """An engine of 16 slots that is not started yet."""
    defaults = {"stop_ids": [STOP], "max_model_len": 1024, "max_num_seqs": 16, "channel": channel or RunWeightFile()}
    return kind(tiny.folder, **defaults | options)


def new_generator(engine: Any, prompts: Iterable[Problem] = (), **options: object) -> Generator:
    """Two completions of a prompt, B = 1, k = 0."""
    defaults = {"score": no_reward, "pacer": Pacer(1, 0), "rollouts": 2, "max_completion": 64}
    return Generator(engine, iter(prompts), **defaults | options)


@contextmanager
def started(
    engine: Any, weights: dict[str, Tensor], prompts: Iterable[Problem] = (), **options: object
) -> Iterator[Generator]:
    """`new_generator`, at version 0 with these weights, and closed in the end."""
    generator = new_generator(engine, prompts, **options)
    try:
        generator.start(weights)
        yield generator
    finally:
        generator.close()


class Shared:
    """The interface of an engine, over one that runs in another generator's event loop and goes on after `shutdown`."""

    runs = itertools.count()

    def __init__(self, host: Generator, slots: int, **changes: object):
        self.host, self.engine, self.slots = host, host.engine, slots
        self.before = {name: getattr(self.engine, name) for name in changes}
        vars(self.engine).update(changes)
        self.prepare = self.engine.prepare
        self.salt = next(self.runs)  # no test finds another one's keys and values
        self.calls: set[Future] = set()

    @property
    def version(self) -> int:
        return self.engine.version

    async def _there(self, coroutine: Coroutine) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.host._loop)
        self.calls.add(future)
        return await asyncio.wrap_future(future)

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> Any:
        return await self._there(self.engine.sample(prompt_ids, max_tokens, f"{self.salt} {salt}"))

    async def update(self) -> None:
        await asyncio.shield(self._there(self.engine.update()))  # half a push would leave it paused

    start = update  # to the weights that this generator begins with

    def shutdown(self) -> None:
        wait(self.calls, timeout=5)
        asyncio.run_coroutine_threadsafe(self.engine.vllm.resume_generation(), self.host._loop).result(timeout=10)
        vars(self.engine).update(self.before)


class SharedEngine:
    """A running engine, its model, and generators over it."""

    def __init__(self, host: Generator, tiny: TinyModel):
        self.host, self.tiny = host, tiny

    @contextmanager
    def generator(
        self,
        prompts: Iterable[Problem] = (),
        *,
        slots: int = 16,
        wrap: Callable[[Shared], object] | None = None,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (STOP,),
        **options: object,
    ) -> Iterator[Generator]:
        """A generator at version 0, whose weights are `tiny.weights(0)`."""
        engine = Shared(self.host, slots, temperature=temperature, stop_ids=stop_ids)
        if wrap:
            wrap(engine)
        with started(engine, self.tiny.weights(0), prompts, **options) as generator:
            yield generator
