"""lab/fast_vllm.py without a GPU and without vLLM: how weights reach the engine, its scheduler, and how much of a shared GPU
it takes."""

import asyncio

import pytest
import torch
from fake_vllm import in_place_of_vllm
from test_run_engine import flags_of, host
from transformers import GPT2Config, LlamaConfig

from generator import EngineFailed
from lab.fast_vllm import FastWeightFile, GpuMemory
from runtime import engine
from runtime.engine import choose_devices
from runtime.flags import check_flags

LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, num_key_value_heads=2, head_dim=8)
GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=32)  # says nothing of its keys' heads, nor of their width
TOKEN = 2 * 2 * 2 * 8 * 4  # layers x (key, value) x heads x width x bytes: what a token of LLAMA takes in float32
SLOT = 64 + 16  # tokens: the longest row, and a block more


@pytest.fixture
def new(monkeypatch, tmp_path):
    """`new(gpus, trainers, words, config)` is an engine of a run on a host with so many GPUs and trainers, and its
    channel; 100,000 weights are prepared."""

    def make(gpus, trainers, words, config=LLAMA):
        host(monkeypatch, gpus, trainers)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr("vllm_engine.mapped", lambda path: torch.empty(400_000, dtype=torch.uint8))
        monkeypatch.setattr(GpuMemory, "device", "cpu")
        flags = flags_of(f"--engine lab.fast_vllm:FastEngine {words}")
        check_flags(flags)
        config.save_pretrained(tmp_path)
        made, channel = engine.new_engine(flags, choose_devices(flags), 0, str(tmp_path), [1], 64)
        made.prepare({"a": torch.zeros(100_000, dtype=getattr(torch, flags.dtype))}, 0)
        return made, channel

    with in_place_of_vllm(monkeypatch):
        yield make


def started(made, monkeypatch, total):
    """Its arguments after its start on a GPU of `total` bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (0, int(total)))
    try:
        asyncio.run(made.start())
    finally:
        made.shutdown()
    return made.args


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "kind"),
    [
        (0, 1, "", FastWeightFile),
        (1, 1, "", GpuMemory),
        (2, 1, "", FastWeightFile),  # the engine has the free one
        (8, 8, '--engine_args {"tensor_parallel_size":8}', FastWeightFile),
    ],
)
def test_weights_stay_on_a_shared_gpu(new, gpus, trainers, words, kind):
    """On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not."""
    made, channel = new(gpus, trainers, words)
    made.shutdown()
    assert type(channel) is kind and made.channel is channel
    assert made.args["scheduler_cls"].endswith("AsyncWholeCompletions" if gpus else ".WholeCompletions")
    assert made.args["async_scheduling"] == (gpus > 0)


@pytest.mark.parametrize(
    ("words", "config", "cache"),
    [
        ("", LLAMA, 256 * SLOT * TOKEN),
        ("--max_num_seqs 32 --dtype bfloat16", LLAMA, 32 * SLOT * TOKEN // 2),
        ("", GPT2, 256 * SLOT * TOKEN * 2),  # all four heads
    ],
)
def test_an_engine_keeps_what_its_requests_can_fill(new, monkeypatch, capsys, words, config, cache):
    args = started(new(1, 1, words, config)[0], monkeypatch, 10**8)
    assert args["kv_cache_memory_bytes"] == cache
    assert args["gpu_memory_utilization"] == -(-cache // 10**6) / 100  # what vLLM wants to see free at its start
    assert f"an engine keeps {cache / 1e9:.1f} GB of its GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "total", "utilization", "cache"),
    [
        (1, 1, "", 12_000_000, 0.35, None),  # the requests could fill 5.2 MB, more than the largest share
        (1, 1, '--engine_args {"gpu_memory_utilization":0.2}', 10**8, 0.2, None),
        (1, 1, '--engine_args {"kv_cache_memory_bytes":7}', 10**8, None, 7),
        (2, 1, "", 10**8, None, None),  # a GPU of its own
        (2, 2, '--engine_args {"tensor_parallel_size":2}', 10**8, 0.03, 128 * SLOT * TOKEN),  # a head each
    ],
)
def test_what_it_takes_of_a_gpu(new, monkeypatch, gpus, trainers, words, total, utilization, cache):
    args = started(new(gpus, trainers, words)[0], monkeypatch, total)
    assert (args.get("gpu_memory_utilization"), args.get("kv_cache_memory_bytes")) == (utilization, cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_too_small_for_both_sides_is_refused(new, monkeypatch, dtype):
    """24 bytes for each of 100,000 weights, and the cache of two requests: 2.4 + .04 MB."""
    cache = 2 * SLOT * TOKEN // (1 if dtype == "float32" else 2)
    words = f"--rollouts 2 --max_num_seqs 2 --dtype {dtype}"
    started(new(1, 1, words)[0], monkeypatch, 2_400_000 + cache)
    with pytest.raises(EngineFailed, match="^trainer and engine need more than .*lower --max_num_seqs"):
        started(new(1, 1, words)[0], monkeypatch, 2_400_000 + cache - 1)
