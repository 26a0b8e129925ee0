"""Trainers of tiny random models, on ranks that never meet, and a batch by hand."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoModelForCausalLM

import losses
from runtime.flags import Flags
from runtime.microbatches import TokenRow
from runtime.trainer import Trainer, TrainingBatch

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def saved_model(kind: str, folder: Path, **more) -> str:
    """The folder of a tiny random model of that kind."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def near_uniform_model(folder: Path) -> str:
    """A Qwen3 with a tied head, near the uniform distribution."""
    return saved_model("Qwen3", folder, tie_word_embeddings=True, num_hidden_layers=1, initializer_range=0.08)


def rank_of(rank: int, ranks: int) -> SimpleNamespace:
    """What the trainer asks of accelerate, for one of `ranks` ranks that never meet."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        process_index=rank,
        num_processes=ranks,
        is_fsdp2=False,
        prepare=lambda *things: things,
        prepare_model=lambda model, evaluation_mode: model,
        prepare_optimizer=lambda optimizer: optimizer,
        unwrap_model=lambda model: model,
        reduce=lambda tensor, reduction="sum": tensor,
        no_sync=lambda model: nullcontext(),
        backward=torch.Tensor.backward,
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    )


def trainer_of(folder: str, rank: int = 0, ranks: int = 1, accelerator=None, **flags) -> Trainer:
    return Trainer(Flags(**flags), accelerator or rank_of(rank, ranks), folder)


def hand_batch(old_logprobs: bool = False) -> TrainingBatch:
    """Two prompts with four rollouts each: 18 trained tokens, one forced; behavior log-probs near the random model's
    -log(23) = -3.1, so that some ratios are capped."""
    masks = [[1] * n for n in (3, 1, 3, 2, 2, 2, 2, 4)]
    masks[2][1] = 0
    rows = [TokenRow([1] if i < 4 else [3, 2], range(10, 10 + len(mask)), mask) for i, mask in enumerate(masks)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(m, dtype=torch.bool) for m in masks], batch_first=True)
    behaviour = -(2.9 + 0.1 * torch.arange(4)) * mask  # (8, 4)
    advantages = torch.tensor([1.6, -0.5, -0.5, -0.5, 1.1, 1.1, -1.1, -1.1])
    token_weights = losses.aggregation_weights(mask, torch.arange(8) // 4)
    old = behaviour - 0.1 if old_logprobs else None  # which only TIS takes
    return TrainingBatch(rows, behaviour, mask, advantages, token_weights, old)


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def shift_weights(trainer: Trainer, size: float) -> None:
    """Moves every weight by a random amount of this size, the same in every run."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=rng))
