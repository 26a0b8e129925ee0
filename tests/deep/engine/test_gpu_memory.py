"""runtime/weights.GpuMemory in a real engine, with memory that two processes share in the place of a GPU's: the handle, its
way through vLLM's messages, the layout and both ends are those of a GPU. (That a card's handle opens: lab/tests/gpu.)"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from fake_engine import problems
from real_engine import new_engine, started
from test_weights_in_flight import check_weights_move, evaluated, long_training
from tiny_model import TinyModel

from pipeline_rl import Pacer
from runtime.weights import GpuMemory
from vllm_engine import mapped, tensors_in


@pytest.fixture
def channel() -> GpuMemory:
    return GpuMemory(device="cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_move_in_flight(tmp_path, channel, tied):
    """Versions, log-probs of stale caches, and no file. Weights that are prepared and not yet delivered change nothing,
    although they lie in memory that the engine has open."""
    tiny, long = TinyModel(tmp_path, tied=tied), problems(2)
    engine = new_engine(tiny, channel=channel, stop_ids=[])
    options = {"pacer": Pacer(2, 0), "length_control": long_training(700)}
    with started(engine, tiny.weights(0), long, **options) as generator:
        check_weights_move(generator, tiny, long)
        live = generator.engine.version
        generator.settle()
        channel.prepare(tiny.weights(7))
        asked, rollouts = evaluated(generator, problems(3, seed=5), 2)
        assert tiny.gap(tiny.weights(100 + live), asked, rollouts).mean() < 1e-5
        assert tiny.gap(tiny.weights(7), asked, rollouts).mean() > 0.1
        assert channel.handle and not channel.path.exists()


def test_an_engine_that_cannot_open_the_memory_takes_the_file(tmp_path, channel, capsys):
    """One sentence, and the run goes on with the weights that were prepared."""
    tiny = TinyModel(tmp_path, tied=True)
    usual = channel.new_memory

    def broken():
        memory = usual()
        channel.handle[1] = b"/gone"
        return memory

    channel.new_memory = broken
    with started(new_engine(tiny, channel=channel), tiny.weights(1), max_completion=12) as generator:
        for version in (0, 1, 2):
            if version:
                generator.push(tiny.weights(version + 1), version, 0)
            asked, rollouts = evaluated(generator, problems(3), 2)
            assert tiny.gap(tiny.weights(version + 1), asked, rollouts).mean() < 1e-5
        assert channel.path.exists()
    printed = [line for line in capsys.readouterr().out.splitlines() if "new weights go through" in line]
    assert len(printed) == 1 and "cannot open memory of the GPU" in printed[0]


def test_memory_without_a_handle_is_the_file_s(channel, monkeypatch, capsys):
    """Some drivers share no memory of a GPU (WSL): the engine is told of the file from the first weights on."""
    calls = []

    def refuse(self):
        raise RuntimeError("CUDA error: operation not supported")

    async def collective_rpc(name, args):
        calls.append((name, args[0]))

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
    for value in (1.0, 2.0):
        channel.prepare({"a": torch.full((3,), value)})
        asyncio.run(channel.deliver(SimpleNamespace(collective_rpc=collective_rpc)))
        assert tensors_in(mapped(channel.path), channel.layout)["a"].tolist() == [value] * 3
    assert calls == [("load_weight_file", str(channel.path))] * 2
    printed = capsys.readouterr().out
    assert printed.count("new weights go through") == 1 and "operation not supported" in printed
    channel.close()


def test_an_engine_that_dies_later_is_no_reason_for_the_file(channel):
    """Its memory was open: what an update raises then is told as it is."""
    calls = []

    async def collective_rpc(name, args):
        calls.append(name)
        if len(calls) > 1:
            raise ConnectionError("dead")

    vllm = SimpleNamespace(collective_rpc=collective_rpc)
    channel.prepare({"a": torch.ones(3)})
    asyncio.run(channel.deliver(vllm))
    with pytest.raises(ConnectionError, match="dead"):
        asyncio.run(channel.deliver(vllm))
    assert calls == ["load_gpu_memory"] * 2 and not channel.path.exists()
    channel.close()
