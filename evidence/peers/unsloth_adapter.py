"""Unsloth: `grpo_compute_loss` of unsloth_zoo, compiled alone, since its package does not load without a GPU.

The weights of its prompt average and of its zero-variance filter are in the package unsloth, which was not run."""

import math

import torch
from stand_ins import function

compute_loss = function(
    "unsloth_zoo/rl_replacements.py", "grpo_compute_loss", torch=torch, math=math, **vars(__import__("typing"))
)
LOSS_TYPES = {"token": "dapo", "sample": "grpo", "constant": "dr_grpo"}


class Adapter:
    """loss_type=cispo epsilon_high=5 vllm_importance_sampling_mode=token_truncate clip_max=5"""

    def loss(self, part, step):
        if part.average == "prompt" or part.loss in ("dppo", "m2po", "deepseek"):
            raise NotImplementedError
        options = part.options
        masked = part.loss == "icepop"
        rows = None, part.logprobs, part.old, part.behaviour, part.mask.long(), part.mask, 0.0, part.advantages
        return compute_loss(
            *rows,
            loss_type="cispo" if part.loss == "cispo" else LOSS_TYPES[part.average],
            importance_sampling_level="sequence" if part.loss == "gspo" else "token",
            epsilon_low=options.get("low", 0.2),
            epsilon_high=options["cap"] if part.loss == "cispo" else options.get("high", 0.2),
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_mask" if masked else "token_truncate",
            vllm_importance_sampling_clip_min=options["low"] if masked else None,
            vllm_importance_sampling_clip_max=options["high"] if masked else options.get("cap", math.inf),
            max_completion_length=part.constant,
            num_items_in_batch=step.mask.sum(),
            current_gradient_accumulation_steps=part.parts,
            steps_per_generation=part.parts,
            num_processes=part.ranks,
        )[0]
