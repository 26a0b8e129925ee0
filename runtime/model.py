"""The trainer's model: which ones can be trained, and how many parameters count."""

from __future__ import annotations

from functools import partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.utils.checkpoint import checkpoint

from fp32_head import head_of
from runtime.flags import DAMAGED, Flags, UsageError, reason_of
from runtime.shared_prompts import MicrobatchScorer

if TYPE_CHECKING:  # their imports take seconds
    from transformers import PretrainedConfig, PreTrainedModel

# Also what transformers, accelerate and torch raise, as for a pickle with code in it.
UNREADABLE = (*DAMAGED, UnpicklingError, SafetensorError, StrictDataclassError, CheckpointException)


# ------------------------------------------------------------------------------------------ which models can be trained


def load_policy(flags: Flags, folder: str) -> MicrobatchScorer:
    """The causal LM to train, as a `Scorer` that DDP or FSDP can wrap. Raises UsageError."""
    model = load_model(flags, folder)
    entropy_grad = flags.entropy_coef != 0
    policy = MicrobatchScorer(model, temperature=flags.temperature, fp32=flags.fp32_head, entropy_grad=entropy_grad)
    policy._no_split_modules = layers_of(model)
    return policy


def layers_of(model: nn.Module) -> list[str]:
    """The kinds of layers that FSDP shards one by one. A model may also name layers that it does not have."""
    names = getattr(model, "_no_split_modules", None) or ()
    return sorted({type(module).__name__ for module in model.modules()} & set(names))


def load_model(flags: Flags, folder: str) -> PreTrainedModel:
    """The causal LM to train, with FP32 weights. Raises UsageError.

    One whose logits the trainer does not compute (scaled or capped, as in Granite and Gemma 2; rotary scaling by the
    longest row, as longrope) fails the first weights check, before the first update: evaluation.py.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=flags.trust_remote_code,
        )
    except UNREADABLE as error:
        reason = reason_of(error).split(". ")[0]  # the advice of torch's loader is not ours
        raise UsageError(f"--model {folder} does not load as a causal LM ({reason}).") from error
    missing = sorted(report["missing_keys"])
    missing += sorted(name for name, *_ in report["mismatched_keys"])
    if missing:  # transformers has filled them with random numbers
        raise UsageError(
            f"--model {folder}: its weights lack {missing[0]}, or have it in another shape ({len(missing)} such "
            "tensors); get the whole model."
        )
    if hasattr(model, "peft_config"):  # transformers has loaded both, if peft is installed
        raise UsageError(f"--model {folder} is an adapter; merge it into its base model first.")
    allow_sampling_settings(model)
    if flags.gradient_checkpointing and not recompute_layers(model):
        raise UsageError(f"--gradient_checkpointing true: {type(model).__name__} has no layers for it; leave it out.")
    return model


def allow_sampling_settings(model: PreTrainedModel) -> None:
    """Some models come with a temperature and without do_sample, which transformers loads but refuses to save."""
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def recompute_layers(model: nn.Module) -> int:
    """Gradient checkpointing: each layer keeps only its input and runs again in the backward pass. Returns the number
    of layers, 0 if transformers knows none of this model. (`model.gradient_checkpointing_enable` recomputes in training
    mode only, which switches dropout on.)"""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def experts(config: PretrainedConfig) -> int:
    """Experts of a layer; 1 if the model is no mixture. `config` is that of the text model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = (getattr(config, name, None) for name in names)
    return next(filter(None, counts), 1)


def active_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token is multiplied with: without the embedding table, which is looked up, but with the head,
    tied or not, and with only as many experts of a mixture as a token visits."""
    config = model.config.get_text_config()
    visited = getattr(config, "num_experts_per_tok", None) or 1
    embedding = model.get_input_embeddings().weight
    head, _ = head_of(model)
    total = head.numel() if head is embedding else 0
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            total += parameter.numel() * visited // experts(config)
        elif parameter is not embedding:
            total += parameter.numel()
    return total
