"""Which models can be trained: loaded with FP32 weights, or refused in one sentence."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from runtime.engine import reason_of
from runtime.flags import Flags, UsageError, has_adapters
from runtime.lora import add_adapters
from runtime.model import Policy, Row, make_microbatch, recompute_layers

if TYPE_CHECKING:  # their imports take seconds
    from transformers import PretrainedConfig, PreTrainedModel

# What transformers and torch raise for a folder that is no model: cut short, of other shapes, a pickle with code in it.
UNREADABLE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, EOFError, ImportError)
UNREADABLE += (UnpicklingError, SafetensorError, StrictDataclassError)


def load_model(flags: Flags, folder: str) -> PreTrainedModel:
    """The causal LM to train, with FP32 weights. Raises UsageError for one that the trainer cannot compute."""
    from transformers import AutoModelForCausalLM

    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    options["trust_remote_code"] = flags.trust_remote_code
    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except UNREADABLE as error:
        reason = reason_of(error).split(". ")[0]  # the advice of torch's loader is not ours
        raise UsageError(f"--model {folder} does not load as a causal LM ({reason}).") from error
    absent = sorted(report["missing_keys"]) + sorted(name for name, *_ in report["mismatched_keys"])
    if absent:  # transformers has made random ones
        raise UsageError(
            f"--model {folder}: its weights lack {absent[0]}, or have it in another shape ({len(absent)} such "
            "tensors); get the whole model."
        )
    if flags.share_prompts and (other := sorted(set(attention_kinds(model.config)) - {"full_attention"})):
        raise UsageError(
            f"--share_prompts true needs full attention, and {folder} has {', '.join(other)}; leave it out."
        )
    if not has_plain_head(model):
        raise UsageError(
            f"--model {folder}: its logits are no plain product of head and last hidden states but scaled or capped "
            "(as in Granite, Cohere, Gemma 2), which the trainer does not compute; take another model."
        )
    if flags.share_prompts and not keeps_rows_apart(model):
        raise UsageError(
            f"--share_prompts true: in one microbatch the rows of {folder} ({type(model).__name__}) change each "
            "other's log-probs, since its layers do not read position ids or take no mask; leave it out."
        )
    if hasattr(model, "peft_config"):  # transformers has loaded both
        raise UsageError(f"--model {folder} is an adapter; give its base as --model and this as --lora_adapter.")
    if has_adapters(flags):
        add_adapters(flags, model, folder, flags.seed)
    if flags.gradient_checkpointing and not recompute_layers(model):
        raise UsageError(f"--gradient_checkpointing true: {type(model).__name__} has no layers for it; leave it out.")
    return model


@torch.no_grad()
def keeps_rows_apart(model: PreTrainedModel) -> bool:
    """Whether three short rows have the log-probs in one microbatch, sharing a prompt, that each has alone, up to
    rounding. Layers that do not read position ids see what lies before (convolutions); some take no mask (Bloom)."""
    pairs = ([1, 2, 3], [4, 5, 6, 7]), ([1, 2, 3], [8, 9, 7, 6]), ([9], [3, 1, 2, 5])
    rows = [Row(prompt, completion, [1] * 4) for prompt, completion in pairs]
    try:
        alone, together = (
            torch.cat([Policy(model)(make_microbatch(rows, cut, 4, shared=True))[0] for cut in cuts])
            for cuts in ([[0], [1], [2]], [[0, 1, 2]])
        )
    except (ValueError, TypeError, RuntimeError):  # of a mask
        return False
    return torch.allclose(together, alone, rtol=0, atol=5e-5 * float(alone.std()))


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are W h + b of the body's last hidden states, as `Policy` computes them. Granite,
    Cohere and Gemma 2 scale or cap theirs. Takes two forward passes of four tokens on the CPU, before any sharding."""
    body, head, ids = model.base_model, model.get_output_embeddings(), torch.arange(4)[None]
    if body is model or head is None:
        return False
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state  # (1, 4, H)
    logits = model(input_ids=ids, use_cache=False).logits  # (1, 4, V)
    plain = nn.functional.linear(hidden, head.weight, head.bias)
    return logits.shape == plain.shape and torch.allclose(logits, plain, rtol=1e-5, atol=1e-5 * float(plain.std()))


def attention_kinds(config: PretrainedConfig) -> list[str]:
    """The attention of each layer, in transformers' words."""
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return list(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
