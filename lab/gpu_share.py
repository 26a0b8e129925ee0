"""How much of a GPU an engine takes on which a trainer is, too: vLLM would take .92 of it by default."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from runtime.flags import Flags, UsageError

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PretrainedConfig, PreTrainedModel

LARGEST_SHARE = 0.35


def engine_args(flags: Flags, gpu: int, workers: int, longest: int, trained: PreTrainedModel, alone: bool) -> dict[str, Any]:
    """vLLM's arguments: memory for all that its requests can keep, but at most LARGEST_SHARE of the GPU. `trained`: the
    trainer's model; `alone`: it is whole on this GPU, and so is the engine. Raises UsageError if both cannot fit."""
    total = torch.cuda.mem_get_info(gpu)[1]
    asked = cache_bytes(trained.config.get_text_config(), flags, longest, workers)
    cache = min(asked, int(LARGEST_SHARE * total))
    # 24 bytes a weight, in either dtype: in FP32 itself, its gradient and two moments; and 8 for the engine's weight,
    # the one between the two, and in bfloat16 the trainer's rounded copy and its gradient.
    needed = 24 * sum(weight.numel() for weight in trained.parameters()) + cache
    if alone and needed > total:
        raise UsageError(
            f"trainer and engine need more than {needed / 1e9:.0f} GB, and their GPU has {total / 1e9:.0f}: take a "
            "smaller model, a lower --max_num_seqs, or more GPUs (docs/gpu.md)."
        )
    wins = "`gpu_memory_utilization` in --engine_args wins"
    if cache < asked:
        print(f"an engine takes {LARGEST_SHARE} of its GPU; {wins}")
        return {"gpu_memory_utilization": LARGEST_SHARE}
    print(f"an engine keeps {cache / 1e9:.1f} GB of its GPU for {flags.max_num_seqs} requests; {wins}")
    return {"gpu_memory_utilization": math.ceil(100 * cache / total) / 100, "kv_cache_memory_bytes": cache}


def cache_bytes(config: PretrainedConfig, flags: Flags, longest: int, workers: int) -> int:
    """Bytes on each GPU of the keys and values of as many requests as the engine has slots, each as long as it may
    become: in blocks of 16 tokens, and one more for each. With more workers than heads, each head is there several
    times."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * getattr(torch, flags.dtype).itemsize
    return flags.max_num_seqs * (math.ceil(longest / 16) + 1) * 16 * token // min(workers, heads)
