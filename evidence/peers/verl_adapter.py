"""verl: the registered policy losses with `agg_loss`, the rollout correction and two advantage estimators."""

import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import FSDPActorConfig

AVERAGES = {"token": "token-mean", "sample": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
MODES = {"cispo": "cispo", "gspo": "gspo", "dppo": "dppo_tv"}


class Adapter:
    """loss_mode=cispo clip_ratio_low=1 clip_ratio_high=4, bypass mode; clip_ratio_c huge"""

    def loss(self, part, step):
        if part.average == "prompt" or part.loss in ("deepseek", "m2po"):
            raise NotImplementedError
        options = part.options | {"cispo": {"low": 1.0, "high": 4.0}, "dppo": {"low": 0.02}}.get(part.loss, {})
        clips = {"clip_ratio_low": options.get("low", 0.2), "clip_ratio_high": options.get("high", 0.2)}
        config = FSDPActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9, **clips
        )
        config.global_batch_info.update(dp_size=part.ranks, batch_num_tokens=step.mask.sum())
        config.global_batch_info.update(global_batch_size=len(step.rows), loss_scale_factor=part.constant)
        old, weights = part.old, None
        if part.loss in ("cispo", "dppo"):
            old = part.behaviour  # bypass mode
        if part.loss in ("tis", "icepop"):
            threshold = options["cap"] if part.loss == "tis" else "{low}_{high}".format(**options)
            inputs = part.old - part.behaviour, part.mask, "token", threshold
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(*inputs)
        loss = core_algos.get_policy_loss_fn(MODES.get(part.loss, "vanilla"))
        inputs = old, part.logprobs, part.advantages[:, None].expand_as(part.mask), part.mask
        return loss(*inputs, AVERAGES[part.average], config, weights)[0]

    def advantages(self, rewards, group_ids, how, lengths):
        mask = (torch.arange(10) < lengths[:, None]).float()
        scores = torch.zeros_like(mask)
        scores[:, 0] = rewards
        inputs = {"token_level_rewards": scores, "response_mask": mask, "index": group_ids.numpy()}
        if how == "batch":
            return core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**inputs)[0][:, 0]
        return core_algos.compute_grpo_outcome_advantage(**inputs, norm_adv_by_std_in_grpo=how == "prompt")[0][:, 0]
