"""The oracle for weights that move in flight, in transformers."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def stale_cache_logprobs(
    model: Any,
    weights: Mapping[int, dict[str, Tensor]],
    prompt: Sequence[int],
    ids: list[int],
    versions: Sequence[int],
    temperature: float = 1.0,
) -> Tensor:
    """(T,) log-probs of a completion that several versions sampled, in FP32: each version's piece is fed, under its own
    weights, onto the keys and values that the earlier versions left."""
    from transformers import DynamicCache

    cache, pieces, start = DynamicCache(), [], 0
    for version, piece in groupby(versions):
        end = start + len(list(piece))
        fed = ([*prompt] if start == 0 else [ids[start - 1]]) + ids[start : end - 1]
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[version][name])
        logits = model(torch.tensor([fed], device=model.device), past_key_values=cache, use_cache=True).logits[0]
        logprobs = (logits[start - end :] / temperature).log_softmax(-1).cpu()  # (piece, V)
        pieces.append(logprobs.gather(1, torch.tensor(ids[start:end])[:, None])[:, 0])
        start = end
    return torch.cat(pieces)
