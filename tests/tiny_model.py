"""A Qwen3 of two layers with random weights, and the trainer's log-probs under any weights of it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fake_engine import Problem
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_rl import Rollout
from runtime import microbatches as layouts
from runtime.shared_prompts import MicrobatchScorer, score
from runtime.trainer import round_parameters

VOCABULARY, STOP, END_OF_THINKING = 64, 1, 7
PHRASE = [5, 6, END_OF_THINKING]


class TinyModel:
    """The model, saved in `folder`."""

    def __init__(self, folder: Path, tied: bool):
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=1024,
            eos_token_id=None,  # vLLM stops at it whatever the request says
            pad_token_id=None,
            bos_token_id=None,
            tie_word_embeddings=tied,
        )
        self.folder = str(folder)
        self.model = Qwen3ForCausalLM(config).float().eval()
        self.model.save_pretrained(folder)

    def weights(self, seed: int) -> dict[str, Tensor]:
        """New random weights, every tensor of them: nothing of another seed's is left."""
        rng = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(tensor.shape, generator=rng) * 0.15 + (tensor.ndim == 1)  # norms around 1
            for name, tensor in self.model.named_parameters()
        }

    def load(self, weights: dict[str, Tensor]) -> Any:
        """The Hugging Face model with these weights."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])
        return self.model

    def gap(
        self, weights: dict[str, Tensor], prompts: Sequence[Problem], rollouts: Sequence[Rollout], **options: object
    ) -> Any:
        """|log-prob of the trainer - the generator's| of each token that trains, one flat tensor; `dtype` is that of the
        trainer's parameters."""
        dtype = options.pop("dtype", torch.float32)
        trainer = round_parameters(MicrobatchScorer(copy.deepcopy(self.load(weights)), **options), dtype)
        rows = [
            layouts.TokenRow(p.prompt_ids, r.completion_ids, r.mask) for p, r in zip(prompts, rollouts, strict=True)
        ]
        width = max(len(rollout.mask) for rollout in rollouts)
        with torch.no_grad():
            logprobs, _ = score(trainer, layouts.make_microbatch(rows, range(len(rows)), width))  # (N, T)
        gaps = []
        for own, rollout in zip(logprobs, rollouts, strict=True):
            gap = own[: len(rollout.mask)] - torch.tensor(rollout.logprobs)
            gaps.append(gap.abs()[torch.tensor(rollout.mask) == 1])
        return torch.cat(gaps)
