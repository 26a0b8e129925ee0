"""Real FastEngines: the tests of weights in flight that the plain engine passes, over whole completions and memory that two
processes share; what happens where that memory cannot be opened; and train.py."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engine import problems
from forked import Context, fork_engines, run_program
from real_engine import SharedEngine, new_engine, started
from test_weights_in_flight import (  # noqa: F401  (these run here as well)
    check_weights_move,
    evaluated,
    long_training,
    test_a_prompt_does_not_hit_keys_and_values_of_another_version,
    test_a_second_leg_finds_the_first_ones_keys_and_values,
    test_logprobs_are_the_trainers_also_after_an_interruption,
    test_weights_move_in_flight_under_a_tied_head,
)
from tiny_model import TinyModel

import train
from lab.fast_vllm import FastEngine, FastWeightFile, GpuMemory
from pipeline_rl import FORCED, Pacer
from runtime.engine import EngineDevices
from vllm_engine import mapped, tensors_in

HERE = EngineDevices(options={}, workers=1, gpus=[], shared=False)


def test_weights_that_are_not_delivered_change_nothing(vllm_engine: SharedEngine) -> None:
    """Although they lie in memory that the engine has open; and there is no file."""
    tiny = vllm_engine.tiny
    with vllm_engine.generator(max_completion=12) as generator:
        generator.push(tiny.weights(1), 1, 0)
        generator.settle()
        channel = vllm_engine.host.engine.channel
        channel.prepare(tiny.weights(7))
        asked, rollouts = evaluated(generator, problems(3, seed=5), 2)
        assert tiny.gap(tiny.weights(1), asked, rollouts).mean() < 1e-5
        assert tiny.gap(tiny.weights(7), asked, rollouts).mean() > 0.1
        assert channel.handle and not channel.path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheduler", [None, "lab.fast_scheduler.AsyncWholeCompletions"])
def test_weights_move_in_flight_under_the_scheduler_of_a_gpu(tmp_path: Path, scheduler: str | None, tied: bool) -> None:
    """vLLM's own, which sends each token, and ours. A pause finds a step under way (async_on_cpu.py), whose tokens are
    still by the weights before it: versions are exact to a token."""
    tiny, long = TinyModel(tmp_path, tied=tied), problems(2)
    args = {"scheduler_cls": scheduler, "worker_extension_cls": "async_on_cpu.Receiver"}
    options = {"channel": FastWeightFile(0, HERE), "stop_ids": [], "engine_args": args}
    engine = new_engine(tiny, kind=FastEngine, **options)
    with started(engine, tiny.weights(0), long, pacer=Pacer(2, 0), length_control=long_training(700)) as generator:
        check_weights_move(generator, tiny, long)


def test_an_engine_that_cannot_open_the_memory_takes_the_file(tmp_path, channel, capsys):
    """One sentence, and the run goes on with the weights that were prepared, here under an untied head."""
    tiny = TinyModel(tmp_path, tied=False)
    usual = channel.new_memory

    def broken():
        memory = usual()
        channel.handle[1] = b"/gone"
        return memory

    channel.new_memory = broken
    engine = new_engine(tiny, kind=FastEngine, channel=channel)
    with started(engine, tiny.weights(1), max_completion=12) as generator:
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


def test_an_engine_that_dies_later_is_no_reason_for_the_file(channel: GpuMemory) -> None:
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


@pytest.mark.medium
def test_train_py_with_this_engine(tmp_path):
    """Four steps of the default run: every sampled token has the version that sampled it, older than the step, and
    trainer and engine agree, at the last evaluation with the newest weights. Both processes are forked from one that
    has imported vLLM."""
    flags = f"--engine lab.fast_vllm:FastEngine --max_steps 4 --eval_every 4 --held_out 32 --save_every 0 --output_dir {tmp_path / 'run'}"
    fork_engines()
    out, err = tmp_path / "out", tmp_path / "err"
    process = Context().Process(target=run_program, args=(train.main, str(out), str(err), flags.split()))
    process.start()
    process.join(240)
    assert process.exitcode == 0, err.read_text()[-2000:]
    steps, samples = (
        [record for record in map(json.loads, (tmp_path / "run" / name).read_text().splitlines()) if "step" in record]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and sum(step["updated"] for step in steps) >= 3
    gaps = [step["logprob_gap"] for step in steps if "logprob_gap" in step]
    assert gaps and max(gaps) < 1e-5
    for sample in samples:
        versions = [version for version in sample["versions"] if version != FORCED]
        assert versions == sorted(versions) and 0 <= versions[0] and versions[-1] < sample["step"]
