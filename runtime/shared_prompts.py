"""Prompts that are computed once for all their completions, and the proof that a model can.

The prompts' pass leaves the keys and values of each layer; in the completions' pass each line has those of its prompt
before its own. They keep their graph, so the gradient flows back through them to the prompt:

    prompts  (U, P)   keys (U, heads, P, d)  ──┐ [prompt_of]
    lines    (N, L)   keys (N, heads, L, d)  ──┴─ (N, heads, P + L, d)

transformers' own caches would be wrong here: they grow at each call, and gradient checkpointing calls each layer again;
those with sliding windows drop keys that the mask would hide anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from fp32_head import Scorer
from runtime.flags import DAMAGED, reason_of
from runtime.microbatches import Microbatch, TokenRow, make_microbatch

TOLERANCE = 1e-3  # of what is compared, which in float32 agrees to about 1e-6


class PromptLayer(DynamicLayer):
    """A layer's keys and values of the prompts. In the prompts' pass it takes them, in the other it gives them."""

    prompt_of: Tensor | None = None  # (N,) of the lines

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values that the present pass attends to."""
        if self.prompt_of is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        # In FP32: the gradient is a sum over lines, in which bfloat16 would lose the small ones.
        keys, values = (x.float()[self.prompt_of].to(x.dtype) for x in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def new_cache() -> Cache:
    """Of the prompts' pass."""
    return Cache(layer_class_to_replicate=PromptLayer)


def beside(prompts: Cache, prompt_of: Tensor) -> Cache:
    """Of the completions' pass, after that of `prompts`."""
    cache = Cache(layers=[PromptLayer() for _ in prompts.layers])
    for layer, before in zip(cache.layers, prompts.layers, strict=True):
        layer.update(before.keys, before.values)
        layer.prompt_of = prompt_of
    return cache


class MicrobatchScorer(Scorer):
    """fp32_head's `Scorer`, whose body computes a prompt once for all rows that have it."""

    def hidden_states(self, input_ids: Tensor, start: int, **inputs: Tensor) -> Tensor:
        """(N, L - start, H): those that predict the tokens of the lines from `start` on. `inputs` are the `prompts`
        (U, P) before the lines, with P = 0 for whole rows, and `prompt_of` (N,)."""
        prompts, prompt_of = inputs["prompts"], inputs["prompt_of"]
        if start:
            return super().hidden_states(input_ids, start)
        cache = new_cache()
        before = self.model.base_model(input_ids=prompts, past_key_values=cache, use_cache=True).last_hidden_state
        ends = before[prompt_of, -1:]  # (N, 1, H): a prompt's last position predicts the first token of its lines
        positions = prompts.shape[1] + torch.arange(input_ids.shape[1] - 1, device=input_ids.device)
        lines = self.model.base_model(
            input_ids=input_ids[:, :-1],  # no token follows the last one
            position_ids=positions.expand(len(input_ids), -1),
            past_key_values=beside(cache, prompt_of),
            use_cache=True,
        )
        return torch.cat([ends, lines.last_hidden_state], dim=1)  # (N, L, H)


def score(policy: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy), each (N, T), 0 where no token trains. `policy`: a MicrobatchScorer, or what DDP or FSDP
    made of it."""
    part = microbatch
    values = policy(part.lines, part.start, part.trained, prompts=part.prompts, prompt_of=part.prompt_of)
    logprobs, entropy = map(part.by_completion, values)
    return logprobs, entropy


def why_not(policy: nn.Module) -> str:
    """Why this policy cannot share prompts; empty if it can. Two prompts with two completions each must have the same
    log-probs, and the same gradient at the embeddings, to which that of all layers' keys and values flows."""
    rows = [TokenRow([n, *range(n - 1)], [3, n, 2, 1][: n - k], [1] * (n - k)) for n in (3, 4) for k in (0, 2)]
    weights = torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(0))
    results = []
    for shared in (False, True):
        try:
            logprobs, _ = score(policy, make_microbatch(rows, range(len(rows)), 4, shared))  # (4, 4)
            table = policy.model.get_input_embeddings().weight
            results.append((logprobs, *torch.autograd.grad((weights * logprobs).sum(), table)))
        except DAMAGED as error:
            return reason_of(error)
    for what, plain, once in zip(("log-probs", "gradient"), *results, strict=True):
        if not (once - plain).norm() <= TOLERANCE * plain.norm():  # NaN, too
            return f"its {what} would change"
    return ""
