"""The trainer: from a batch of rollouts to a step of AdamW, the same on one process and on many.

It joins the policy (model.py), the losses (losses.py) and accelerate. What it must get right:

- The weight of each token is fixed over the whole batch before the first microbatch, so microbatches and ranks only add
  up. Data parallelism averages gradients, hence the factor `ranks` on the loss.
- A gradient that is not finite changes nothing and is counted.
- The learning rate depends on the policy version only, so that a resumed run has the same schedule.
- In bfloat16 and float16 the forward and backward pass have weights in that dtype, as the generator does; the weights
  that the optimizer steps, the sums of gradients and its moments stay FP32. In float16 the loss is scaled.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import losses
import masks
from runtime.flags import Flags, LossFlags, OptimizerFlags
from runtime.loading import load_model
from runtime.model import CheckpointTensors, Microbatch, Policy, Row, active_parameters, microbatches

if TYPE_CHECKING:  # their imports take seconds
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# Epsilon and decay are the paper's. O1: it does not say its betas; these are MiniMax-M1's.
ADAMW: dict[str, object] = {"betas": (0.9, 0.95), "eps": 1e-15, "weight_decay": 0.01}
LARGEST_NORM = 1.0  # O2: of the gradient, which is clipped to it
GROWTH_INTERVAL = 2000  # steps without overflow, after which the loss scale of float16 doubles


@dataclass
class TrainingBatch:
    """The rows that one optimizer step trains on, those of all ranks."""

    rows: list[Row]
    behaviour_logprobs: Tensor  # (N, T)
    mask: Tensor  # (N, T)
    advantages: Tensor  # (N,)
    token_weights: Tensor  # (N, T)
    old_logprobs: Tensor | None = None  # (N, T), for TIS


class Trainer:
    """Policy and optimizer. Every rank has one, sees the whole batch and computes its share."""

    def __init__(self, flags: Flags, accelerator: Accelerator, model_folder: str):
        self.flags, self.accelerator = flags, accelerator
        self.dtype: torch.dtype = getattr(torch, flags.dtype)
        model = load_model(flags, model_folder)
        self.reference = None  # the initial model, for the KL penalty
        if flags.kl_coef:
            reference = load_model(flags, model_folder).requires_grad_(False)
            for parameter in reference.parameters():  # not model.to(): rotary frequencies stay FP32, as under FSDP
                parameter.data = parameter.data.to(self.dtype)
            self.reference = self._policy(reference).to(accelerator.device)
        learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learns, lr=flags.lr, **ADAMW, fused=True)
        if self.dtype != torch.float32:
            hold_in(accelerator, self.dtype)
        self.loss_scale = LossScale() if self.dtype == torch.float16 else None
        if self.loss_scale:
            accelerator.register_for_checkpointing(self.loss_scale)
        self.policy, self.optimizer = accelerator.prepare(self._policy(model), optimizer)
        self.model = accelerator.unwrap_model(self.policy).model
        self.weights = CheckpointTensors(self.model, self.dtype)  # for the generator
        self.parameters_in_flops = active_parameters(self.model)

    def _policy(self, model: PreTrainedModel) -> Policy:
        flags, entropy_grad = self.flags, self.flags.entropy_coef != 0
        return Policy(model, fp32_head=flags.fp32_head, temperature=flags.temperature, entropy_grad=entropy_grad)

    def _microbatches(self, rows: list[Row]) -> list[Microbatch]:
        here, most, shared = self.accelerator, self.flags.tokens_per_microbatch, self.flags.share_prompts
        mine = microbatches(rows, most, rank=here.process_index, ranks=here.num_processes, shared=shared)
        return [microbatch.to(here.device) for microbatch in mine]

    @torch.no_grad()
    def score(self, rows: list[Row]) -> Tensor:
        """(N, T) log-probs of all rows under the policy as it is now, on the CPU; 0 where no token trains."""
        logprobs = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows), device=self.accelerator.device)
        for microbatch in self._microbatches(rows):
            logprobs[microbatch.rows] = self.policy(microbatch)[0]
        # After a forward pass without a backward pass FSDP2 leaves the root unsharded, and the optimizer would step
        # shards that nobody reads.
        if hasattr(self.policy, "reshard"):
            self.policy.reshard()
        return self.accelerator.reduce(logprobs).cpu()  # each rank filled in its own rows

    def gradients(self, batch: TrainingBatch) -> dict[str, float]:
        """Adds the gradient of the batch's loss; returns the loss and its metrics over all ranks."""
        mine = self._microbatches(batch.rows)
        parts = []
        for i, microbatch in enumerate(mine):
            # Ranks exchange gradients once, with the last microbatch; but under FSDP2 gradients that are not reduced
            # are not sharded, and each rank would hold those of the whole model.
            wait = i < len(mine) - 1 and not getattr(self.accelerator, "is_fsdp2", False)
            with self.accelerator.no_sync(self.policy) if wait else nullcontext():
                loss, metrics = self._loss(microbatch, batch)
                # Data parallelism averages the ranks' gradients.
                scale = self.loss_scale.scale if self.loss_scale else 1.0
                self.accelerator.backward(loss * self.accelerator.num_processes * scale)
            parts.append(metrics)
        return self._summary(parts)

    def _loss(self, microbatch: Microbatch, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The microbatch's share of the batch's loss, and metrics that add up."""
        flags = self.flags

        def part(tensor: Tensor) -> Tensor:  # without waiting for the device
            return tensor[microbatch.rows].to(self.accelerator.device, non_blocking=True)

        policy_loss: Any = losses.LOSSES[flags.loss]  # each has options of its own
        mask, options = part(batch.mask), dict[str, Any](clip_options(flags))  # (n, T)
        if flags.loss == "tis" and batch.old_logprobs is not None:
            options["old_logprobs"] = part(batch.old_logprobs)
        logprobs, entropy = self.policy(microbatch)  # (n, T)
        rows = logprobs, part(batch.behaviour_logprobs), part(batch.advantages), mask
        token_loss, metrics = policy_loss(*rows, **options)  # (n, T)
        if flags.mask != "none":  # which stale tokens still count; the two terms below keep all
            kept, counts = masks.MASKS[flags.mask](*rows, **mask_options(flags))  # (n, T)
            token_loss, metrics = token_loss * kept, metrics | counts
        if self.reference is not None:
            kl = losses.kl_penalty(logprobs, self.reference(microbatch)[0], mask)  # k3
            token_loss = token_loss + flags.kl_coef * kl
            metrics["kl_sum"] = kl.detach().sum()
        token_loss = token_loss - flags.entropy_coef * entropy
        loss = (part(batch.token_weights) * token_loss).sum()  # they divide by the size of the whole batch
        return loss, metrics | {"loss_sum": loss.detach(), "entropy_sum": (entropy.detach() * mask).sum()}

    def _summary(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        from accelerate.utils import gather_object

        mine = {name: value.cpu() for name, value in losses.merge_metrics(parts).items()}
        merged = losses.merge_metrics(gather_object([mine]))
        tokens = max(1, int(merged["tokens"]))
        means = {"loss": merged["loss_sum"].item(), "entropy": merged["entropy_sum"].item() / tokens}
        if "kl_sum" in merged:
            means["kl"] = merged["kl_sum"].item() / tokens
        if "kept" in merged:
            means["kept_tokens"] = int(merged["kept"])
        return means | losses.summarize_metrics(merged)

    def update(self, version: int) -> dict[str, float]:
        """The optimizer step that makes `version` + 1. A gradient that is not finite is thrown away and counted."""
        if self.loss_scale:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.loss_scale.scale)  # of FP32, by a power of two: exact
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), LARGEST_NORM)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP2 returns a shard of it
        completions = self.flags.batch_prompts * self.flags.rollouts
        lr, finite = learning_rate(self.flags, completions, version), math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        step = {"grad_norm": norm, "lr": lr, "updated": int(finite)}
        return step | (self.loss_scale.update(finite) if self.loss_scale else {})


class LossScale:
    """Loss scaling for float16, by the rule and with the numbers of torch.amp.GradScaler.

    The smallest float16 is 6e-8, and gradients of single activations are smaller: they would be 0. So the loss is
    multiplied by S before the backward pass and the FP32 gradient divided by it after. Where that overflows, the batch
    is lost and S halves; after 2,000 steps in a row that did not, it doubles.
    """

    def __init__(self) -> None:
        self.scale, self.good_steps = 2.0**16, 0  # S; since it last changed

    def update(self, finite: bool) -> dict[str, float]:
        """Counts a step. Returns the S that it had, and whether another S may mend it."""
        step = {"loss_scale": self.scale, "overflow": int(not finite and self.scale > 1)}
        self.good_steps = self.good_steps + 1 if finite else 0
        if step["overflow"]:
            self.scale /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
        return step

    def state_dict(self) -> dict[str, float]:
        """For accelerate, which saves it with a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def hold_in(accelerator: Accelerator, dtype: torch.dtype) -> None:
    """Parameters in `dtype` for the forward and backward pass, over FP32 weights, gradients and moments: the mixed
    precision of FSDP2, on one process as on many. accelerate offers FSDP2 to several GPUs only, but nothing in it needs
    them: its state is told here."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not torch.distributed.is_initialized():
        # One process is a group of its own, in which nothing travels: torch's "fake" group gives back what it is given,
        # on any device, and so a GPU needs no communicator of NCCL's.
        torch.distributed.init_process_group("fake", rank=0, world_size=1)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=policy
    )
    # In both places: accelerate copies it from the second into the first whenever it asks for the state.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def learning_rate(flags: OptimizerFlags, completions: int, version: int) -> float:
    """Learning rate of the step from `version` to `version` + 1: linear warm-up, then constant, as in the paper."""
    # lr min(1, (v + 1) / warm-up), with `sqrt` that times sqrt(B G / 1024)
    lr = flags.lr * min(1.0, (version + 1) / max(1, flags.warmup_steps))
    return lr * math.sqrt(completions / 1024) if flags.lr_scale == "sqrt" else lr


def clip_options(flags: LossFlags) -> dict[str, float]:
    """The keyword options of the chosen loss; what was not given stays at the loss's own default."""
    if flags.loss == "cispo":
        return {"eps_max": flags.eps_max}
    given = {"eps_low": flags.eps_low, "eps_high": flags.eps_high}
    if flags.loss == "grpo":  # one for both sides
        given = {"eps": flags.eps_low}
    return {name: value for name, value in given.items() if value >= 0}


def mask_options(flags: LossFlags) -> dict[str, float]:
    """The thresholds of --mask; what was not given stays at the mask's own default."""
    given = {"low": flags.mask_low, "high": flags.mask_high}
    return {name: value for name, value in given.items() if value >= 0}
