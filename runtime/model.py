"""The trainer's model: which ones can be trained, and log-probs of sampled completions in microbatches.

It joins a Hugging Face causal LM to the concept files. What it must get right:

- Position t predicts token t + 1, so a completion's log-probs are read from the positions before its tokens.
- Under causal attention no token sees the padding on the right of its line, so no attention mask is needed.
- The head is multiplied as the generator multiplies it (`fp32_head`): in the dtype of both sides, an FP32 product.

M tokens that train, H hidden size, V vocabulary; N, T, L, U, P: of `Microbatch`.
"""

from __future__ import annotations

from functools import partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.utils.checkpoint import checkpoint

from fp32_head import head_of, token_logprobs
from runtime.flags import DAMAGED, Flags, UsageError, reason_of
from runtime.microbatches import Microbatch

if TYPE_CHECKING:  # their imports take seconds
    from transformers import PretrainedConfig, PreTrainedModel

# Also what transformers, accelerate and torch raise, as for a pickle with code in it.
UNREADABLE = (*DAMAGED, UnpicklingError, SafetensorError, StrictDataclassError, CheckpointException)


# ------------------------------------------------------------------------------------------ which models can be trained


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


# --------------------------------------------------------------------------------------------------------- forward pass


class Policy(nn.Module):
    """A causal LM that returns the log-probs of the tokens that train, computed in the dtype of its parameters: that of
    the generator, if the two are to agree. fp32_head: False multiplies the head in the parameters' dtype, for the
    ablation. temperature, entropy_grad: of `fp32_head.token_logprobs`."""

    def __init__(
        self, model: PreTrainedModel, *, fp32_head: bool = True, temperature: float = 1.0, entropy_grad: bool = False
    ):
        super().__init__()
        self.model = model
        # FSDP shards layer by layer. A model may also name layers that it does not have.
        names = getattr(model, "_no_split_modules", None) or ()
        self._no_split_modules = sorted({type(module).__name__ for module in model.modules()} & set(names))
        self._head = partial(token_logprobs, temperature=temperature, fp32=fp32_head, entropy_grad=entropy_grad)

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(log-probs (N, T), entropy (N, T)), both 0 where no token trains."""
        from runtime import shared_prompts  # with transformers, whose import takes seconds

        start = microbatch.prompts.shape[1]  # P
        if start:
            cache = shared_prompts.new_cache()
            passes = [self._body(microbatch.prompts, 0, past_key_values=cache, use_cache=True)]  # (U P, H)
            cache = shared_prompts.beside(cache, microbatch.prompt_of)
            passes.append(self._body(microbatch.input_ids, start, past_key_values=cache, use_cache=True))  # (N L, H)
        else:
            passes = [self._body(microbatch.input_ids, 0, use_cache=False)]
        hidden = torch.cat(passes)[microbatch.read]  # (M, H)
        weight, bias = head_of(self.model)  # (V, H), (V,)
        logprobs, entropy = self._head(hidden, weight, microbatch.targets, bias=bias)  # (M,), (M,)
        shape = len(microbatch.rows), microbatch.width
        # The zero ties an empty microbatch to the parameters, so that its backward pass runs.
        zeros = logprobs.new_zeros(shape) + hidden.sum() * 0

        def pad(values: Tensor) -> Tensor:
            return zeros.flatten().scatter(0, microbatch.write, values).view(shape)

        return pad(logprobs), pad(entropy)

    def _body(self, ids: Tensor, start: int, **options: Any) -> Tensor:
        """Hidden states of `ids` (N, L), which begin at position `start`: (N L, H)."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
        return self.model.base_model(input_ids=ids, position_ids=positions, **options).last_hidden_state.flatten(0, 1)
