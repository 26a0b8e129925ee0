"""The trainer: from a batch of rollouts to a step of AdamW, the same on one process and on many.

It joins the policy (fp32_head's `Scorer`), the losses (losses.py) and accelerate. What it must get right:

- The weight of each token is fixed over the whole batch before the first microbatch, so microbatches and ranks only add
  up. Data parallelism averages gradients, hence the factor `ranks` on the loss.
- A gradient that is not finite changes nothing and is counted.
- The learning rate depends on the policy version only, so that a resumed run has the same schedule.
- In bfloat16 the forward and backward pass have weights in that dtype, as the generator does; the weights that the
  optimizer steps, the sums of gradients and its moments stay FP32 (`LowPrecisionCopy`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import losses
from runtime.flags import Flags, UsageError, own_code, reason_of
from runtime.microbatches import Microbatch, TokenRow, microbatches
from runtime.model import active_parameters, load_policy
from runtime.shared_prompts import MicrobatchScorer, score, why_not
from runtime.weights import CheckpointTensors, whole

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator


# Epsilon and decay are the paper's. It does not say its betas; these are MiniMax-M1's (O1: see docs/choices.md).
ADAMW: dict[str, object] = {"betas": (0.9, 0.95), "eps": 1e-15, "weight_decay": 0.01}
LARGEST_NORM = 1.0  # gradient-norm clip (O2)


@dataclass
class TrainingBatch:
    """The rows that one optimizer step trains on, those of all ranks."""

    rows: list[TokenRow]
    behaviour_logprobs: Tensor  # (N, T)
    mask: Tensor  # (N, T)
    advantages: Tensor  # (N,)
    token_weights: Tensor  # (N, T)
    old_logprobs: Tensor | None = None  # (N, T), for TIS


class Trainer:
    """Policy and optimizer. Every rank has one, sees the whole batch and computes its own rows of it.

        policy    computes log-probs, in `flags.dtype`
        model     has the FP32 weights that the optimizer steps, and that checkpoints and the generator get

    In float32, and under FSDP2, `policy` computes with the parameters of `model` themselves; in bfloat16 otherwise with
    a rounded copy of them (`LowPrecisionCopy`)."""

    def __init__(self, flags: Flags, accelerator: Accelerator, model_folder: str):
        self.flags = flags
        self.accelerator = accelerator
        self.dtype: torch.dtype = getattr(torch, flags.dtype)
        policy = load_policy(flags, model_folder)
        reason = why_not(policy)
        self.can_share, self.note = not reason, ""
        if flags.share_prompts and reason:
            flags.share_prompts = False
            self.note = f"--share_prompts false, as {type(policy.model).__name__} cannot: {reason}"
        self.reference: MicrobatchScorer | None = None  # the initial model, for the KL penalty
        if flags.kl_coef:
            reference = round_parameters(load_policy(flags, model_folder), self.dtype)
            self.reference = reference.requires_grad_(False).to(accelerator.device)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=flags.lr, **ADAMW, fused=True)
        self.low_precision: LowPrecisionCopy | None = None
        if accelerator.is_fsdp2:
            round_in_fsdp2(accelerator, self.dtype)
        if self.dtype == torch.float32 or accelerator.is_fsdp2:
            self.policy, self.optimizer = accelerator.prepare(policy, optimizer)
            self.model = accelerator.unwrap_model(self.policy).model
        else:
            # Checkpoints have the masters. `evaluation_mode` leaves DDP out: `average_gradients` does its work.
            masters = accelerator.prepare_model(policy, evaluation_mode=True)
            self.optimizer = accelerator.prepare_optimizer(optimizer)
            self.low_precision = LowPrecisionCopy(masters, self.dtype)
            self.policy = self.low_precision.policy
            self.model = masters.model
        self.policy_loss: Any = chosen_loss(flags)
        self.clip_options = clip_options(flags)
        self.weights = CheckpointTensors(self.model, self.dtype)  # for the generator
        self.parameters_in_flops = active_parameters(self.model)

    def _microbatches(self, rows: list[TokenRow]) -> list[Microbatch]:
        here = self.accelerator
        tokens, share = self.flags.tokens_per_microbatch, self.flags.share_prompts and self.can_share
        parts = microbatches(rows, tokens, rank=here.process_index, ranks=here.num_processes, share=share)
        return [part.to(here.device) for part in parts]

    @torch.no_grad()
    def score(self, rows: list[TokenRow]) -> Tensor:
        """(N, T) log-probs of all rows under the policy as it is now, on the CPU; 0 where no token trains."""
        logprobs = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows), device=self.accelerator.device)
        for microbatch in self._microbatches(rows):
            logprobs[microbatch.rows] = score(self.policy, microbatch)[0]
        shard_again(self.policy)
        return self.accelerator.reduce(logprobs).cpu()  # each rank filled in its own rows

    def backward(self, batch: TrainingBatch) -> tuple[bool, dict[str, float]]:
        """Adds the gradient of the batch's loss. Returns whether the loss has a term at all (the mask may drop every
        token, but keeps those of the KL penalty and the entropy bonus), and its metrics over all ranks."""
        accelerator = self.accelerator
        mine = self._microbatches(batch.rows)
        parts = []
        for microbatch in mine:
            with exchange_of_gradients(accelerator, self.policy, now=microbatch is mine[-1]):
                loss, metrics = self._loss(microbatch, batch)
                accelerator.backward(loss * accelerator.num_processes)  # data parallelism averages the ranks' gradients
            parts.append(metrics)
        if self.low_precision:
            self.low_precision.average_gradients(accelerator)
        metrics = self._summary(parts)
        other_terms = bool(self.flags.kl_coef or self.flags.entropy_coef)
        return metrics.get("kept_tokens") != 0 or other_terms, metrics

    def weights_are_finite(self) -> bool:
        """Whether every weight is a number, on all ranks. A collective."""
        from accelerate.utils import gather_object

        shards = [x.to_local() if hasattr(x, "to_local") else x for x in self.model.parameters()]
        finite = all(bool(shard.isfinite().all()) for shard in shards)
        return all(gather_object([finite]))

    def _loss(self, microbatch: Microbatch, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The microbatch's terms of the batch's loss, and metrics that add up."""
        flags = self.flags

        def part(tensor: Tensor) -> Tensor:  # without waiting for the device
            return tensor[microbatch.rows].to(self.accelerator.device, non_blocking=True)

        options: dict[str, Any] = dict(self.clip_options)
        if batch.old_logprobs is not None:
            options["old_logprobs"] = part(batch.old_logprobs)
        mask = part(batch.mask)  # (n, T)
        logprobs, entropy = score(self.policy, microbatch)  # (n, T)
        rows = logprobs, part(batch.behaviour_logprobs), part(batch.advantages), mask
        token_loss, metrics = self.policy_loss(*rows, **options)  # (n, T)
        if self.reference is not None:
            kl = losses.kl_penalty(logprobs, score(self.reference, microbatch)[0], mask)  # k3
            token_loss = token_loss + flags.kl_coef * kl
            metrics["kl_sum"] = kl.detach().sum()
        token_loss = token_loss - flags.entropy_coef * entropy
        # The weights already divide by the whole batch's size.
        loss = (part(batch.token_weights) * token_loss).sum()
        metrics["loss_sum"] = loss.detach()
        metrics["forward_tokens"] = torch.tensor(microbatch.tokens)
        metrics["entropy_sum"] = (entropy.detach() * mask).sum()
        return loss, metrics

    def _summary(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        from accelerate.utils import gather_object

        mine = {name: value.cpu() for name, value in losses.merge_metrics(parts).items()}
        merged = losses.merge_metrics(gather_object([mine]))
        tokens = max(1, int(merged["tokens"]))
        means = {"loss": merged["loss_sum"].item(), "entropy": merged["entropy_sum"].item() / tokens}
        means["forward_tokens"] = int(merged["forward_tokens"])
        if "kl_sum" in merged:
            means["kl"] = merged["kl_sum"].item() / tokens
        if "kept" in merged:
            means["kept_tokens"] = int(merged["kept"])
        return means | losses.summarize_metrics(merged)

    def update(self, version: int) -> dict[str, float]:
        """The optimizer step that makes `version` + 1. A gradient that is not finite is thrown away and counted."""
        norm = float(whole(self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)))
        lr = learning_rate(self.flags, version)
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            if self.low_precision:
                self.low_precision.round_masters()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": lr, "updated": int(finite)}


# ------------------------------------------------------------------------------------------------------------- bfloat16


class LowPrecisionCopy:
    """Passes in bfloat16 over FP32 weights, the masters, which the optimizer steps.

    A step of AdamW is often smaller than the distance between two bfloat16 numbers, and a sum of many gradients loses
    the small ones. So `policy`, a copy of the masters in `dtype`, computes; each of its gradients is added to its
    master's in FP32; and after a step, or when a checkpoint is loaded, the copy takes the rounded masters again."""

    def __init__(self, masters: MicrobatchScorer, dtype: torch.dtype):
        self.policy = round_parameters(copy.deepcopy(masters), dtype)
        self.masters = list(masters.parameters())
        for parameter, master in zip(self.policy.parameters(), self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(move_gradient, master=master))
        masters.register_load_state_dict_post_hook(lambda *_: self.round_masters())

    def average_gradients(self, accelerator: Accelerator) -> None:
        """The mean over ranks, as DDP takes it."""
        if accelerator.num_processes > 1:
            for master in self.masters:
                master.grad = accelerator.reduce(master.grad, "mean")

    @torch.no_grad()
    def round_masters(self) -> None:
        """Puts the rounded masters into the copy."""
        for parameter, master in zip(self.policy.parameters(), self.masters, strict=True):
            parameter.copy_(master)


def move_gradient(parameter: Tensor, master: Tensor) -> None:
    """Adds the parameter's gradient to the master's, in FP32, and takes it off the parameter."""
    gradient = parameter.grad.float()
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient
    else:
        master.grad += gradient


def round_parameters(policy: MicrobatchScorer, dtype: torch.dtype) -> MicrobatchScorer:
    """The same policy with its parameters in `dtype`. Not `policy.to`, which would round rotary frequencies, too."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


# ------------------------------------------------------------------------------------- what is different under FSDP2


def round_in_fsdp2(accelerator: Accelerator, dtype: torch.dtype) -> None:
    """FSDP2 shards FP32 weights, and its own mixed precision does what `LowPrecisionCopy` does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    accelerator.state.fsdp_plugin.mixed_precision_policy = precision


def exchange_of_gradients(accelerator: Accelerator, policy: nn.Module, *, now: bool) -> AbstractContextManager:
    """Around a backward pass: ranks exchange gradients once, with the last microbatch. Under FSDP2 with each one: what
    is not exchanged is not sharded, and each rank would hold the gradients of the whole model."""
    return nullcontext() if now or accelerator.is_fsdp2 else accelerator.no_sync(policy)


def shard_again(policy: nn.Module) -> None:
    """After a forward pass without a backward pass FSDP2 leaves the root whole, and the optimizer would step shards
    that nobody reads."""
    if hasattr(policy, "reshard"):
        policy.reshard()


# -------------------------------------------------------------------------------------------------------------- options


def learning_rate(flags: Flags, version: int) -> float:
    """Learning rate of the step from `version` to `version` + 1: linear warm-up, then constant, as in the paper."""
    return flags.lr * min(1.0, (version + 1) / max(1, flags.warmup_steps))  # lr min(1, (v + 1) / warm-up)


def chosen_loss(flags: Flags) -> Any:
    """The function of --loss. Raises UsageError for one of your own that cannot train."""
    return losses.LOSSES.get(flags.loss) or own_loss(flags)


def own_loss(flags: Flags) -> Callable:
    """Your own `module:function` of --loss, called as `losses.cispo` is, but for its options. It returns (token_loss
    (N, T), metrics); the ratios that every loss logs are added to its metrics. Raises UsageError if it is not there, or
    fails on a single token."""
    function = own_code(flags, "loss")

    def loss(*rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss, metrics = function(*rows)
        if token_loss.shape != rows[0].shape:
            raise ValueError(f"it returned a token_loss of {tuple(token_loss.shape)}, not (N, T)")
        _, common = losses.cispo(*(x.detach() for x in rows))
        return token_loss, {name: x for name, x in common.items() if not name.startswith("capped")} | metrics

    logprobs = -torch.ones(1, 1, requires_grad=True)
    try:
        token_loss, _ = loss(logprobs, logprobs.detach(), torch.ones(1), torch.ones(1, 1))
        token_loss.sum().backward()
    except Exception as error:  # somebody's function, which may raise anything
        raise UsageError(
            f"--loss {flags.loss} cannot train ({reason_of(error)}); write it as losses.cispo is."
        ) from error
    return loss


def clip_options(flags: Flags) -> dict[str, float]:
    """The keyword options of the chosen loss; what was not set stays at the loss's own default. Your own
    `module:function` gets none: its clips are its own defaults."""
    if ":" in flags.loss:
        return {}
    if flags.loss == "cispo":
        return {"eps_max": flags.eps_max}
    if flags.loss == "grpo":  # one for both sides
        options = {"eps": flags.eps_low}
    else:
        options = {"eps_low": flags.eps_low, "eps_high": flags.eps_high}
    return {name: value for name, value in options.items() if value >= 0}
