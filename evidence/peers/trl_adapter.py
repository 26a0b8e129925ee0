"""TRL: `GRPOTrainer._compute_loss` with a stand-in for the trainer. Only the ratio to the generator and the advantages,
which stand inside a method of 700 lines, are restated here."""

from unittest.mock import MagicMock

import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

LOSS_TYPES = {"token": "dapo", "sample": "grpo", "constant": "dr_grpo"}
LEVEL = {"gspo": "sequence"}


class Adapter:
    """loss_type=cispo epsilon_high=5 vllm_importance_sampling_mode=token_truncate clip_max=5"""

    def generator_ratio(self, part):
        ratio = ((part.old - part.behaviour) * part.mask).nan_to_num().exp()  # token_truncate, or token_mask for IcePop
        if part.loss == "icepop":
            return torch.where((ratio < part.options["low"]) | (ratio > part.options["high"]), 0.0, ratio)
        return ratio.clamp(max=part.options.get("cap", torch.inf))

    def loss(self, part, step):
        if part.average == "prompt" or part.loss in ("dppo", "m2po"):
            raise NotImplementedError
        options = part.options
        trainer = MagicMock(beta=0.0, top_entropy_quantile=1.0, aux_loss_enabled=False, _entropy_bonus_enabled=False)
        trainer.loss_type = "cispo" if part.loss == "cispo" else LOSS_TYPES[part.average]
        trainer.importance_sampling_level = LEVEL.get(part.loss, "token")
        trainer.epsilon_low, trainer.epsilon_high = options.get("low", 0), options.get("cap", options.get("high", 0))
        if part.loss == "tis":
            trainer.epsilon_high = options["high"]
        trainer.off_policy_mask_threshold = options["high"] if part.loss == "deepseek" else None
        trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = part.parts
        trainer.max_completion_length, trainer.accelerator.num_processes = part.constant, part.ranks
        trainer.args.delta, trainer.accelerator.gather = None, lambda x: x
        trainer._get_per_token_logps_and_entropies.return_value = part.logprobs, torch.zeros_like(part.old), None
        inputs = {"prompt_ids": part.mask[:, :0], "prompt_mask": part.mask[:, :0], "completion_ids": part.mask}
        inputs |= {"completion_mask": part.mask, "advantages": part.advantages, "old_per_token_logps": part.old}
        inputs |= {"sampling_per_token_logps": part.behaviour, "num_items_in_batch": step.mask.sum()}
        return GRPOTrainer._compute_loss(
            trainer, None, inputs | {"importance_sampling_ratio": self.generator_ratio(part)}
        )

    def advantages(self, rewards, group_ids, how, lengths):
        groups = [rewards[group_ids == g] for g in group_ids.unique()]
        if not group_ids.equal(group_ids.sort().values) or len({len(group) for group in groups}) > 1:
            raise NotImplementedError  # groups lie one after the other and have one size
        centred = torch.cat([group - group.mean() for group in groups])
        if how == "none":
            return centred
        stds = [rewards.std() if how == "batch" else group.std() for group in groups]
        return centred / (torch.stack(stds).repeat_interleave(len(groups[0])) + 1e-4)

    def penalty(self, lengths, max_length, cache_length):
        return get_soft_overlong_punishment(max_length, cache_length)([[0] * n for n in lengths.tolist()])


class Recipe(Adapter):
    """The ScaleRL recipe of TRL's paper index: vllm_importance_sampling_mode is left at sequence_mask, clip_max at 3"""

    def generator_ratio(self, part):
        ratio = ((part.old - part.behaviour) * part.mask).nan_to_num().sum(-1, keepdim=True).exp()
        return ratio.masked_fill(ratio > 3, 0.0)

    def loss(self, part, step):
        if part.average != "token" or part.loss not in ("cispo", "on_policy"):
            raise NotImplementedError
        return super().loss(part, step)
