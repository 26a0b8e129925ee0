"""Shared by the tests that need real vLLM: one engine for all of them, as starting one takes 10 s and more.

`vllm_engine` holds a running engine with a tiny random model of tied embeddings. `vllm_engine.generator(...)` is a
`Generator` of its own (pacer, counters, problems, length control) on that engine: only its start and its end are the
fixture's. An engine that a test kills or breaks is the test's own: `new_generator`.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VOCABULARY, STOP, END_OF_THINKING = 64, 1, 7
PHRASE = [5, 6, END_OF_THINKING]


@dataclass
class Problem:
    key: str
    prompt_ids: list[int]


def problems(count: int, length: int = 10, seed: int = 0) -> list[Problem]:
    """`count` different random prompts of `length` tokens."""
    import random

    rng = random.Random(seed)
    return [Problem(f"p{i}", [rng.randrange(8, VOCABULARY) for _ in range(length)]) for i in range(count)]


def no_reward(problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
    return [(0.0, False)] * len(completions)


class TinyModel:
    """A Qwen3 of 2 layers with random weights, its folder, and the trainer's log-probs under any weights of it."""

    def __init__(self, folder: Path, tied: bool):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.set_num_threads(1)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, intermediate_size=128, tie_word_embeddings=tied, max_position_embeddings=1024,
            eos_token_id=None, pad_token_id=None, bos_token_id=None,  # vLLM stops at eos whatever the request says
        )  # fmt: skip
        self.folder = str(folder)
        self.model = Qwen3ForCausalLM(config).float().eval()
        self.model.save_pretrained(folder)

    def weights(self, seed: int) -> dict[str, Any]:
        """New random weights, every tensor of them: nothing of another seed's is left."""
        import torch

        rng = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(tensor.shape, generator=rng) * 0.15 + (tensor.ndim == 1)  # norms around 1
            for name, tensor in self.model.named_parameters()
        }

    def load(self, weights: dict[str, Any]) -> Any:
        """The Hugging Face model with these weights."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])
        return self.model

    def gap(self, weights: dict[str, Any], prompts: Sequence[Problem], rollouts: Sequence[Any], **options: Any) -> Any:
        """|log-prob of the trainer (`policy.Policy`) - the generator's| of each token that trains, one flat tensor."""
        import policy
        import torch

        import fp32_head

        trainer = policy.Policy(self.load(weights), fp32_head.token_logprobs, fp32_head.rounded, **options)
        rows = [policy.Row(p.prompt_ids, r.completion_ids, r.mask) for p, r in zip(prompts, rollouts, strict=True)]
        with torch.no_grad():
            found, _ = trainer(policy.make_microbatch(rows, range(len(rows)), max(len(r.mask) for r in rows)))  # (N, T)
        gaps = [
            (found[i, : len(r.mask)] - torch.tensor(r.logprobs)).abs()[torch.tensor(r.mask) == 1]
            for i, r in enumerate(rollouts)
        ]
        return torch.cat(gaps)


def new_generator(tiny: TinyModel, **options: Any) -> Any:
    """A Generator that would start an engine of its own: 16 slots, two completions of a prompt, B = 1, k = 0."""
    import weight_sync

    import pipeline_rl

    options["weights"] = options.get("weights") or weight_sync.FileWeights()
    defaults: dict[str, Any] = {"problems": iter(()), "score": no_reward, "pacer": pipeline_rl.Pacer(1, 0)}
    defaults |= {"rollouts": 2, "stop_ids": [STOP], "max_tokens": 64, "max_num_seqs": 16, "max_prompt": 100}
    engine_args = {"max_model_len": 1024} | options.pop("engine_args", {})
    return pipeline_rl.Generator(model=tiny.folder, engine_args=engine_args, **defaults | options)


@dataclass
class Engine:
    """A running engine, its model, and generators on it."""

    host: Any  # the pipeline_rl.Generator that started it
    tiny: TinyModel

    @contextmanager
    def generator(self, prompts: Iterable[Problem] = (), **options: Any) -> Iterator[Any]:
        """A Generator with fresh bookkeeping at version 0, whose weights are `tiny.weights(0)`."""
        host = self.host
        made = new_generator(self.tiny, problems=iter(prompts), weights=host.weights, **options)
        made._loop.close()
        made._loop, made._engine, made._dead_engine = host._loop, host._engine, host._dead_engine
        made._versions = host._versions
        made._loop.set_exception_handler(made._fail)
        made.weights.prepare(self.tiny.weights(0))

        async def begin() -> set[asyncio.Task]:
            assert await made._engine.reset_prefix_cache()  # another test's keys and values, salted with "0" too
            await made._load_weights(made._engine)
            made._versions[-1] = made.version
            return asyncio.all_tasks() - {asyncio.current_task()}

        async def end() -> None:
            tasks = asyncio.all_tasks() - vllms - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            if not made._engine.errored:
                await made._engine.resume_generation()

        vllms = made._call(begin())
        made._loop.call_soon_threadsafe(made._dispatch)
        try:
            yield made
        finally:
            made._error = None  # or the wait for the end raises it
            if made._pushing is not None:  # half a push would leave `_versions` one ahead of the engine's pauses
                wait([made._pushing], timeout=3)
            made._call(end())


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    tiny = TinyModel(tmp_path_factory.mktemp("tied"), tied=True)
    host = new_generator(tiny)
    try:
        host.start(tiny.weights(0))
        yield Engine(host, tiny)
    finally:
        host.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a real engine come first: they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/engine/"))


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes, a file's tests run in one of them, and all that need a real engine in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class OneEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/engine" if nodeid.startswith("tests/engine/") else nodeid.split("::")[0]

    config.option.loadscopereorder = False  # else the file with the most tests would come first
    return OneEngine(config, log)
