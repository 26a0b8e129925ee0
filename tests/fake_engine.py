"""`FakeEngine` has no model and the interface of an engine that generator.Generator asks for."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from generator import Generator
from pipeline_rl import Pacer, Rollout


@dataclass
class Problem:
    key: str
    prompt_ids: list[int]


def problems(count: int, length: int = 10, seed: int = 0) -> list[Problem]:
    """`count` different random prompts of `length` tokens."""
    draw = random.Random(seed)
    return [Problem(f"p{i}", [draw.randrange(8, 64) for _ in range(length)]) for i in range(count)]


def no_reward(problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
    return [(0.0, False)] * len(completions)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class FakeEngine:
    """Every request samples `length(prompt_ids, max_tokens)` tokens, one after each pause of `seconds`, of the version
    that is live then. While `frozen`, no token is sampled."""

    def __init__(
        self,
        slots: int = 16,
        length: Callable[[list[int], int], int] = lambda ids, most: most,
        seconds=0.0,
        frozen=False,
    ):
        self.slots, self.length, self.seconds, self.frozen = slots, length, seconds, frozen
        self.version = self.prepared = 0
        self.requests: list[tuple[list[int], int, str]] = []
        self.inside = self.most_inside = 0
        self.events: list[str] = []

    def prepare(self, weights: object, version: int) -> None:
        self.prepared = version

    async def start(self) -> None:
        self.version = self.prepared

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> Rollout:
        self.requests.append((list(prompt_ids), max_tokens, salt))
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        versions: list[int] = []
        try:
            for _ in range(self.length(list(prompt_ids), max_tokens)):
                await asyncio.sleep(self.seconds)
                while self.frozen:
                    await asyncio.sleep(0.001)
                versions.append(self.version)
        finally:
            self.inside -= 1
        n = len(versions)
        reason = "stop" if n < max_tokens else "length"
        return Rollout([9] * n, [-1.0] * n, versions, [1] * n, reason, prefilled=len(prompt_ids))

    async def update(self) -> None:
        await asyncio.sleep(0.002)
        self.version = self.prepared

    def shutdown(self) -> None:
        self.events.append("shutdown")


@contextmanager
def generating(
    prompts: Any = (), engine: Any = None, pacer: Pacer | None = None, **options: object
) -> Iterator[Generator]:
    """A started Generator over a fake engine: groups of two, B = 1, k = 0 unless the options say otherwise."""
    defaults = {"score": no_reward, "rollouts": 2, "max_completion": 8}
    generator = Generator(engine or FakeEngine(), iter(prompts), pacer=pacer or Pacer(1, 0), **defaults | options)
    try:
        generator.start({})
        yield generator
    finally:
        generator.close()
