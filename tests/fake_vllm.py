"""A vLLM that samples nothing, in the place of the package: for tests of the engine around it."""

import asyncio
import os
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

from runtime.engine import RunEngine


class EngineGenerateError(Exception):
    """What vLLM makes of any other error of a request."""


class EngineDeadError(Exception):
    """In the place of vLLM's."""


class FakeVLLM:
    """The calls of AsyncLLM that the engine makes. Dead (`errored`) or `frozen`, it fails requests with `failure`, if
    there is one, and answers nothing else."""

    seconds = 0.0  # that a token takes

    def __init__(self, args):
        self.args, self.errored, self.frozen, self.calls, self.version = args, False, False, [], "default"
        self.engine_core = self.output_processor = self
        self.failure = EngineDeadError()

    def propagate_error(self, error):
        self.failure = error

    async def generate(self, prompt, params, request_id):
        assert params.flat_logprobs
        assert params.ignore_eos and params.stop_token_ids == [1]  # no end token but the run's
        for _ in range(params.max_tokens):
            await asyncio.sleep(self.seconds)
            while self.errored or self.frozen:
                if isinstance(self.failure, EngineDeadError):
                    raise self.failure
                if self.failure:
                    raise EngineGenerateError from self.failure
                await asyncio.sleep(1)
        completion = SimpleNamespace(
            token_ids=[5] * params.max_tokens,
            logprobs=SimpleNamespace(logprobs=[-1.0] * params.max_tokens),
            weight_versions=[SimpleNamespace(version=self.version, start=0, end=params.max_tokens)],
            finish_reason="length",
        )
        yield SimpleNamespace(outputs=[completion], kv_transfer_params=None, num_cached_tokens=0)

    async def answer(self, name):
        while self.errored or self.frozen:
            await asyncio.sleep(1)
        self.calls.append(name)

    async def is_paused(self):
        while self.errored or self.frozen:
            await asyncio.sleep(1)

    async def pause_scheduler_async(self, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        await self.answer("pause")

    async def resume_generation(self):
        await self.answer("resume")

    async def collective_rpc(self, name, args=()):
        await self.answer(name)

    async def update_weight_version(self, version):
        await self.answer(f"version {version}")
        self.version = version

    def shutdown(self, timeout):
        self.calls.append("shutdown")


@contextmanager
def in_place_of_vllm(monkeypatch):
    """`import vllm` finds the fake; gives the list of the engines that were started. The plain engine leaves its
    environment set."""
    engines = []

    def from_engine_args(args):
        engines.append(FakeVLLM(args))
        return engines[-1]

    modules = {
        "vllm": {"SamplingParams": SimpleNamespace, "AsyncEngineArgs": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    with mock.patch.dict(os.environ):
        yield engines


class Channel:
    """A weight channel that loads nothing."""

    def __init__(self):
        self.engine_args, self.folder, self.closed = {}, "none", 0

    def prepare(self, weights):
        pass

    async def deliver(self, vllm):
        await vllm.collective_rpc("load")

    def close(self):
        self.closed += 1


def new_engine(**options) -> RunEngine:
    return RunEngine("model", [1], 64, **{"channel": Channel(), "max_num_seqs": 4} | options)


async def start_with(engine, *versions):
    """Starts the engine with the first version of the weights and updates it to the others."""
    engine.prepare({}, versions[0])
    await engine.start()
    for version in versions[1:]:
        engine.prepare({}, version)
        await engine.update()
