"""Engines without a model: `FakeEngine` has the interface that pipeline_rl.Generator asks for; `fake_vllm` puts a vLLM that
samples nothing in the place of the real one, for what VLLMEngine and RunEngine make of it."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from pipeline_rl import Generator, Pacer, Rollout


@dataclass
class Problem:
    key: str
    prompt_ids: list[int]


def problems(count: int, length: int = 10, seed: int = 0, vocabulary: int = 64) -> list[Problem]:
    """`count` different random prompts of `length` tokens."""
    import random

    rng = random.Random(seed)
    return [Problem(f"p{i}", [rng.randrange(8, vocabulary) for _ in range(length)]) for i in range(count)]


def no_reward(problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
    return [(0.0, False)] * len(completions)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class FakeEngine:
    """Every request samples `length(prompt_ids, max_tokens)` tokens, one after each pause of `seconds`, of the version
    that is live then. While `held`, no token is sampled; `failure` is what the next `update` raises."""

    trainer_waits, replicas = False, 1

    def __init__(
        self, slots: int = 16, length: Callable[[list[int], int], int] = lambda ids, most: most, seconds=0.0, held=False
    ):
        self.slots, self.length, self.seconds, self.held = slots, length, seconds, held
        self.version, self.prepared, self.failure = 0, 0, None
        self.requests: list[tuple[list[int], int, str]] = []
        self.placed: list[int] = []  # the replica of each
        self.temperatures: list[float | None] = []
        self.inside = self.most_inside = 0
        self.events: list[str] = []

    def prepare(self, weights: object, version: int) -> None:
        self.prepared = version

    async def start(self) -> None:
        self.version = self.prepared

    async def sample(
        self, prompt_ids: Sequence[int], max_tokens: int, salt: str, replica: int = 0, temperature: float | None = None
    ) -> Rollout:
        self.requests.append((list(prompt_ids), max_tokens, salt))
        self.placed.append(replica)
        self.temperatures.append(temperature)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        versions: list[int] = []
        try:
            for _ in range(self.length(list(prompt_ids), max_tokens)):
                await asyncio.sleep(self.seconds)
                while self.held:
                    await asyncio.sleep(0.001)
                versions.append(self.version)
        finally:
            self.inside -= 1
        n = len(versions)
        reason = "stop" if n < max_tokens else "length"
        return Rollout([9] * n, [-1.0] * n, versions, [1] * n, reason, prefilled=len(prompt_ids))

    async def update(self) -> None:
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0.002)
        self.version = self.prepared
        self.events.append(f"version {self.version}")

    def shutdown(self) -> None:
        self.events.append("shutdown")


@contextmanager
def generating(
    prompts: Any = (), engine: Any = None, pacer: Pacer | None = None, **options: object
) -> Iterator[Generator]:
    """A started Generator over a fake engine: groups of two, B = 1, k = 0 if not said otherwise."""
    defaults = {"score": no_reward, "rollouts": 2, "max_completion": 8}
    made = Generator(engine or FakeEngine(), iter(prompts), pacer=pacer or Pacer(1, 0), **defaults | options)
    try:
        made.start({})
        yield made
    finally:
        made.close()


# ------------------------------------------------------------------------------------------------------------- vLLM


class EngineDeadError(Exception):
    """In the place of vLLM's."""


class FakeVLLM:
    """The calls of AsyncLLM that the engine makes. Dead (`errored`), it fails requests with what it `tells`, if
    anything, and answers nothing else."""

    made: ClassVar[list["FakeVLLM"]] = []
    seconds = 0.0  # that a token takes

    def __init__(self, args: Any):
        self.args, self.errored, self.calls, self.version = args, False, [], "default"
        self.placed: list[int] = []  # the replica of each request
        self.engine_core = self
        self.tells: Any = EngineDeadError()
        FakeVLLM.made.append(self)

    async def generate(self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int) -> Any:
        assert params.flat_logprobs
        self.placed.append(data_parallel_rank)
        for _ in range(params.max_tokens):
            await asyncio.sleep(self.seconds)
            while self.errored:
                if self.tells:
                    raise self.tells
                await asyncio.sleep(1)
        span = SimpleNamespace(version=self.version, start=0, end=params.max_tokens)
        done = SimpleNamespace(
            token_ids=[5] * params.max_tokens,
            logprobs=SimpleNamespace(logprobs=[-1.0] * params.max_tokens),
            weight_versions=[span],
            finish_reason="length",
        )
        yield SimpleNamespace(outputs=[done], kv_transfer_params=None, num_cached_tokens=0)

    async def _answer(self, name: str) -> None:
        while self.errored:
            await asyncio.sleep(1)
        self.calls.append(name)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await self._answer("pause")

    async def resume_generation(self) -> None:
        await self._answer("resume")

    async def collective_rpc(self, name: str, args: tuple = ()) -> None:
        await self._answer(name)

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        await self._answer("digests")
        return [{"w": self.version}]

    async def update_weight_version(self, version: str) -> None:
        await self._answer(f"version {version}")
        self.version = version

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")


def install_fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[FakeVLLM]:
    """`import vllm` finds the fake for the rest of the test; returns the engines that were made, in their order."""
    FakeVLLM.made = []
    modules = {
        "vllm": {"SamplingParams": SimpleNamespace, "AsyncEngineArgs": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=lambda args: FakeVLLM(args))},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return FakeVLLM.made
