"""ms-swift: methods of its GRPOTrainer, the advantages and the overlong reward, compiled alone."""

import math
import typing
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from stand_ins import function

NAMES = vars(typing) | {"torch": torch, "GRPOBatch": object, "WINDOW_NORMALIZED_LOSS_TYPES": ["cispo", "dapo", "fipo"]}
NAMES |= {"gather_object": lambda x: x, "nanmin": MagicMock(), "nanmax": MagicMock()}
METHODS = "_undo_gradient_accumulation_scaling", "_get_rollout_is_correction", "_apply_rollout_importance_sampling"
TRAINER = partial(function, "swift/rlhf_trainers/grpo_trainer.py", **NAMES)
LOSS_TYPES = {"token": "dapo", "sample": "grpo", "constant": "dr_grpo"}


class Adapter:
    """loss_type=cispo epsilon_high=5, mode token_truncate; advantage_estimator=reinforce_plus_plus batch"""

    def loss(self, part, step):
        if part.average == "prompt" or part.loss in ("dppo", "m2po", "icepop"):
            raise NotImplementedError
        options = part.options
        trainer = MagicMock(
            beta=0.0, compute_entropy=False, overlong_filter=False, _has_teacher=False, sdar_loss_coef=0
        )
        trainer.configure_mock(
            disable_rollout_importance_sampling=False, rollout_importance_sampling_mode="token_truncate"
        )
        trainer.configure_mock(model_accepts_loss_kwargs=False, compute_loss_func=None, chord_sft_iterator=None)
        trainer.loss_type = "cispo" if part.loss == "cispo" else LOSS_TYPES[part.average]
        trainer.importance_sampling_level = "sequence" if part.loss == "gspo" else "token"
        trainer.epsilon_low, trainer.epsilon_high = options.get("low", 0.2), options.get("high", 0.2)
        trainer.rollout_importance_sampling_threshold = options.get("cap", math.inf)
        if part.loss == "cispo":
            trainer.epsilon_high = options["cap"]
        trainer.off_policy_sequence_mask_delta = options["high"] if part.loss == "deepseek" else None
        trainer.max_completion_length, trainer.accelerator.num_processes = part.constant, part.ranks
        trainer.current_gradient_accumulation_steps, trainer.args.delta = part.parts, None
        trainer._compute_rollout_offpolicy_metrics.return_value = (
            trainer._compute_is_correction_metrics.return_value
        ) = {}
        trainer._get_per_token_logps_and_entropies.return_value = part.logprobs, None
        for name in (*METHODS, "_compute_off_policy_sequence_mask"):
            setattr(trainer, name, partial(TRAINER(name), trainer))
        batch = SimpleNamespace(completion_mask=part.mask.bool(), truncated_mask=None, old_per_token_logps=part.old)
        batch.advantages = part.advantages[:, None].expand_as(part.mask)
        batch.rollout_per_token_logps, batch.num_items_in_batch = part.behaviour, step.mask.sum()
        loss, _ = TRAINER("_compute_loss_and_metrics")(trainer, None, {}, batch)
        return loss / part.parts  # as Trainer.training_step does

    def advantages(self, rewards, group_ids, how, lengths):
        size = int((group_ids == group_ids[0]).sum())
        if len(rewards) % size or not group_ids.equal(torch.arange(len(rewards)) // size):
            raise NotImplementedError
        compute = function("swift/rl_core/advantage.py", "compute_advantages", **NAMES)
        kind = {"prompt": ("grpo", "group"), "batch": ("reinforce_plus_plus", "batch"), "none": ("grpo", "none")}[how]
        return compute(rewards[:, None], torch.ones(1), size, *kind)[0]

    def penalty(self, lengths, max_length, cache_length):
        reward = SimpleNamespace(soft_max_length=max_length, soft_cache_length=cache_length)
        call = function("swift/rewards/orm.py", "SoftOverlong", ORM=object, **NAMES).__call__
        return call(reward, None, response_token_ids=[[0] * n for n in lengths.tolist()])
