"""LoRA: small adapters are trained in the place of the weights, and merged into them wherever weights go.

PROBLEM. Full training holds 16 bytes for each parameter: FP32 weight, gradient and two moments.

IDEA. Each linear layer W (out, in) of the body is frozen, with 4 bytes, and what it learns has a low rank r:

    W' = W + alpha / r · B A        A (r, in) is random at first, B (out, r) is 0, so that W' is W

The trainer computes W x + alpha / r · B (A x). All others get W' (`model.merged_parameters`), under the names of the
model without adapters: the generator through its usual channel, the weights check, and the final model.

SIMPLIFIED. Two factors of a linear layer: not of the head, the embedding or a mixture's experts, and without a bias or
a magnitude (DoRA). In bfloat16 W' is rounded for the generator, and in the trainer W and the sum.

Source: Hu et al. (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runtime.flags import ModelFlags, UsageError
from runtime.model import experts, whole

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

ALPHA = 32  # of new adapters, as in Schulman et al., "LoRA Without Regret": with alpha / r one --lr serves every rank


def add_adapters(flags: ModelFlags, model: PreTrainedModel, base: str, seed: int) -> None:
    """Freezes the model and puts adapters into its linear layers: new ones, or those of --lora_adapter. `base`: folder
    or hub id of the model, which a saved adapter names. Raises UsageError for adapters that do not fit."""
    import peft

    if experts(model.config) > 1:
        raise UsageError(f"--model {base} is a mixture of experts, which gets no adapters here; train it in full.")
    given, shape = flags.lora_adapter, {"r": flags.lora_rank, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    try:
        if given:
            config = peft.PeftConfig.from_pretrained(given)
        else:
            config = peft.LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, **shape)
        named = config.base_model_name_or_path
        if named and Path(named).resolve() != Path(base).resolve():
            raise ValueError(f"its adapter_config.json names another base, {named}")
        config.inference_mode = False
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)  # A is the same on every rank
            peft.inject_adapter_in_model(config, model)
        if given:
            found = peft.set_peft_model_state_dict(model, peft.load_peft_weights(given, device="cpu"))
            apart = [*found.unexpected_keys, *(name for name in found.missing_keys if ".lora_" in name)]
            if apart:
                raise ValueError(f"only one of the two has {apart[0]}")
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        if not given:
            raise UsageError(f"--lora_rank: --model {base} gets no adapters ({reason}); leave it out.") from error
        raise UsageError(
            f"--lora_adapter {given} does not fit --model {base} ({reason}); give the model that it was trained on."
        ) from error
    model.eval()  # a saved adapter may have dropout
    learns = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    variant = any(getattr(module, "lora_variant", None) for module in model.modules())
    head = hasattr(model.get_output_embeddings(), "base_layer")  # peft's name for what an adapter wraps
    if variant or head or not all(re.search(r"\.lora_[AB]\.default\.weight$", name) for name in learns):
        raise UsageError(f"--lora_adapter {given}: only plain LoRA of linear layers but the head can be trained.")


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the adapters under peft's names, on the CPU; none without adapters. Gathering a shard is a
    collective, so every rank must call it."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": whole(parameter.detach()).cpu()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def save_adapter(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(base, folder)` loads, and --lora_adapter."""
    config: Any = model.peft_config["default"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
