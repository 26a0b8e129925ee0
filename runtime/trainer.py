"""The trainer: from a batch of rollouts to a step of AdamW, the same on one process and on many.

Glue between the policy (model.py), the losses (losses.py) and accelerate. What it must get right:

- Each token's weight is fixed over the whole batch before the first microbatch, so microbatches and ranks only add up;
  data parallelism averages gradients, hence the factor `ranks` on the loss.
- A gradient that is not finite changes nothing and is counted.
- The learning rate is a function of the policy version alone, so that a resumed run has the same schedule.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fp32_head
import losses
from runtime import model as policies
from runtime.flags import UsageError


@dataclass
class Batch:
    """The rows that one optimiser step trains on, and the counts of those it does not; tensors over all ranks' rows."""

    rows: list[policies.Row]
    behaviour_logprobs: Tensor  # (N, T)
    mask: Tensor  # (N, T)
    advantages: Tensor  # (N,)
    weights: Tensor  # (N, T)
    old_logprobs: Tensor | None = None  # (N, T), for TIS


class Trainer:
    """Policy and optimiser; the same on every rank, each of which sees the whole batch and computes its share."""

    def __init__(self, flags: Any, accelerator: Any, model_folder: str):
        from transformers import AutoModelForCausalLM

        self.flags, self.accelerator = flags, accelerator
        self.dtype = getattr(torch, flags.dtype)
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": flags.trust_remote_code}
        if flags.attn_implementation:
            options["attn_implementation"] = flags.attn_implementation
        try:
            model = AutoModelForCausalLM.from_pretrained(model_folder, **options)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"--model {model_folder} does not load as a causal LM ({reason}).") from error
        if not policies.has_plain_head(model):
            raise UsageError(
                f"--model {model_folder}: its logits are no plain product of head and last hidden states but scaled "
                "or capped (as in Granite, Cohere, Gemma 2), which the trainer does not compute; take another model."
            )
        if flags.gradient_checkpointing and not policies.recompute_layers(model):
            name = type(model).__name__
            raise UsageError(f"--gradient_checkpointing true: {name} has no layers for it; leave it out.")
        self.reference = None
        if flags.kl_coef:
            self.reference = AutoModelForCausalLM.from_pretrained(model_folder, **options)
            self.reference = self._policy(self.reference.requires_grad_(False)).to(accelerator.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=flags.lr, betas=(flags.beta1, flags.beta2), eps=flags.adam_eps,
            weight_decay=flags.weight_decay, fused=True,
        )  # fmt: skip
        self.policy, self.optimizer = accelerator.prepare(self._policy(model), optimizer)
        self.model = accelerator.unwrap_model(self.policy).model
        self.weights = policies.CheckpointTensors(self.model, self.dtype)  # for the generator
        self.parameters_in_flops = policies.active_parameters(self.model)

    def _policy(self, model: torch.nn.Module) -> policies.Policy:
        return policies.Policy(
            model, fp32_head.token_logprobs, fp32_head.rounded, dtype=self.dtype, fp32_head=self.flags.fp32_head,
            temperature=self.flags.temperature, entropy_grad=self.flags.entropy_coef != 0,
        )  # fmt: skip

    def _microbatches(self, rows: list[policies.Row]) -> list[policies.Microbatch]:
        found = policies.microbatches(
            rows, self.flags.tokens_per_microbatch, rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes, packed=self.flags.packed,
        )  # fmt: skip
        return [microbatch.to(self.accelerator.device) for microbatch in found]

    @torch.no_grad()
    def score(self, rows: list[policies.Row]) -> Tensor:
        """(N, T) log-probs of all rows under the policy as it is now, on the CPU; 0 where no token trains."""
        found = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows), device=self.accelerator.device)
        for microbatch in self._microbatches(rows):
            found[microbatch.rows] = self.policy(microbatch)[0]
        if hasattr(self.policy, "reshard"):  # FSDP2 leaves the root whole after a forward without a backward: the
            self.policy.reshard()  # optimiser would step shards that nobody sees
        return self.accelerator.reduce(found).cpu()  # each rank filled in its own rows

    def gradients(self, batch: Batch) -> dict[str, float]:
        """Adds the batch's gradient; returns the loss and its metrics over all ranks."""
        flags, device, ranks = self.flags, self.accelerator.device, self.accelerator.num_processes
        loss_function = losses.LOSSES[flags.loss]
        clips = clip_options(flags)
        parts = []
        work = self._microbatches(batch.rows)
        for i, microbatch in enumerate(work):
            rows = microbatch.rows.cpu()
            mask, weights = batch.mask[rows].to(device), batch.weights[rows].to(device)  # (n, T)
            # Under FSDP2 gradients that are not reduced are whole: each rank would hold the whole model's.
            later = i < len(work) - 1 and not getattr(self.accelerator, "is_fsdp2", False)
            with self.accelerator.no_sync(self.policy) if later else nullcontext():
                logprobs, entropy = self.policy(microbatch)  # (n, T)
                if flags.loss == "tis":
                    clips["old_logprobs"] = batch.old_logprobs[rows].to(device)
                token_loss, metrics = loss_function(
                    logprobs,
                    batch.behaviour_logprobs[rows].to(device),
                    batch.advantages[rows].to(device),
                    mask,
                    **clips,
                )
                if self.reference is not None:
                    reference = self.reference(microbatch)[0]
                    kl = losses.kl_penalty(logprobs, reference, mask, flags.kl_estimator)
                    token_loss = token_loss + flags.kl_coef * kl
                    metrics["kl_sum"] = kl.detach().sum()
                token_loss = token_loss - flags.entropy_coef * entropy
                loss = (weights * token_loss).sum()  # normalised over the whole batch already
                self.accelerator.backward(loss * ranks)  # data parallelism averages the ranks' gradients
            metrics |= {"loss_sum": loss.detach(), "entropy_sum": (entropy.detach() * mask).sum()}
            parts.append(metrics)
        return self._summary(parts)

    def _summary(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        from accelerate.utils import gather_object

        mine = {name: value.cpu() for name, value in losses.merge_metrics(parts).items()}
        merged = losses.merge_metrics(gather_object([mine]))
        tokens = max(1, int(merged["tokens"]))
        extra = {"loss": merged["loss_sum"].item(), "entropy": merged["entropy_sum"].item() / tokens}
        if "kl_sum" in merged:
            extra["kl"] = merged["kl_sum"].item() / tokens
        return extra | losses.summarize_metrics(merged)

    def update(self, version: int) -> dict[str, float]:
        """The optimiser step that makes `version` + 1. A gradient that is not finite is thrown away and counted."""
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.flags.clip_grad)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP2: a shard's norm is not it
        # A function of the version alone, so that a resumed run and any number of ranks have the same schedule.
        lr = learning_rate(self.flags, version)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": lr, "updated": int(math.isfinite(norm))}


def learning_rate(flags: Any, version: int) -> float:
    """Of the step that makes `version` + 1: linear warm-up, then constant (the paper) or half a cosine to 0."""
    lr = flags.lr * min(1.0, (version + 1) / max(1, flags.warmup_steps))
    if flags.lr_scale == "sqrt":
        lr *= math.sqrt(flags.batch_prompts * flags.rollouts / 1024)
    if flags.lr_schedule == "cosine":
        done = (version - flags.warmup_steps) / max(1, flags.max_steps - flags.warmup_steps)
        lr *= 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
    return lr


def clip_options(flags: Any) -> dict[str, Any]:
    """The chosen loss's keyword options; what was not given stays at the loss's own default."""
    given = {"eps_low": flags.eps_low, "eps_high": flags.eps_high}
    given = {name: value for name, value in given.items() if value >= 0}
    if flags.loss == "cispo":
        return {"eps_max": flags.eps_max}
    if flags.loss == "grpo":
        return {"eps": given["eps_low"]} if "eps_low" in given else {}
    return given | ({"cap": flags.tis_cap, "level": flags.tis_level} if flags.loss == "tis" else {})
