"""verl 0.9.1 (20 September 2026): core_algos.py, rollout_corr_helper.py, masks of replay_buffer.py, the dapo manager.

Nearest: `loss_mode=cispo clip_ratio_low=1 clip_ratio_high=4`, bypass mode (old log-probs are the generator's), a huge
`clip_ratio_c`, REINFORCE++'s advantages for `batch`. Default: the names of the loss, the average and the
correction's preset only. Its loss gets
tokens and rows of the whole step, and multiplies by the ranks.
"""

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, at_the_end, each_token

CORE = "verl/trainer/ppo/core_algos.py"
CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"
AVERAGES = {"sample": "seq-mean-token-mean", "token": "token-mean", "constant": "seq-mean-token-sum-norm"}
LOSSES = {"on_policy": "cispo", "clip": "vanilla", "tis": "vanilla", "icepop": "vanilla", "dppo": "dppo_tv"}


class ActorConfig(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


class Adapter:
    settings = "nearest"
    history = interrupt = None

    def __init__(self) -> None:
        self.source = Source("verl", "0.9.1")
        means = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
        masked = self.source.functions("verl/utils/torch_functional.py", *means)
        names = ("vanilla", "cispo", "gspo", "dppo_tv")
        self.core = self.source.functions(
            CORE, "agg_loss", *(f"compute_policy_loss_{name}" for name in names), "kl_penalty_forward", "kl_penalty",
            "compute_grpo_outcome_advantage", "compute_reinforce_plus_plus_baseline_outcome_advantage",
            verl_F=masked, ActorConfig=ActorConfig, AlgoConfig=dict,
        )  # fmt: skip
        weights = ("SAFETY_BOUND", "_parse_rollout_is_threshold", "compute_rollout_correction_weights")
        self.correction = self.source.functions(CORRECTION, *weights, verl_F=masked, compute_is_metrics=lambda **_: {})
        space = {"dataclass": dataclass, "BaseConfig": object}
        config = self.source.functions("verl/trainer/config/algorithm.py", "RolloutCorrectionConfig", **space)
        presets = config.RolloutCorrectionConfig
        self.presets = {"tis": presets.decoupled_token_is(), "icepop": presets.decoupled_token_icepop()}

    def loss(self, part, step):
        if part.average not in AVERAGES or part.loss in ("deepseek", "m2po"):
            raise NotImplementedError
        nearest, options = self.settings == "nearest", part.options
        config = ActorConfig(**vars(self.source.defaults("verl/workers/config/actor.py", "ActorConfig")))
        config.global_batch_info = {
            "dp_size": part.ranks,
            "batch_num_tokens": step.mask.sum(),
            "global_batch_size": len(step.rows),
            "loss_scale_factor": step.constant if part.average == "constant" else None,
        }
        old, weights = part.old, None
        if part.loss in self.presets:
            threshold = self.presets[part.loss].rollout_is_threshold
        if nearest:
            config.clip_ratio_c = 1e9
            if part.loss in self.presets:
                threshold = options["cap"] if "cap" in options else f"{options['low']}_{options['high']}"
            else:
                old = part.behaviour  # bypass mode
            if part.loss == "cispo":
                config.clip_ratio_low, config.clip_ratio_high = 1.0, options["cap"] - 1
            elif part.loss == "dppo":
                config.clip_ratio_low = config.clip_ratio_high = options["high"]
            elif options and part.loss != "icepop":
                config.clip_ratio_low, config.clip_ratio_high = options["low"], options["high"]
        if part.loss in self.presets:
            log_ratio = part.old - part.behaviour
            weights, _ = self.correction.compute_rollout_correction_weights(log_ratio, part.mask, "token", threshold)
        loss = getattr(self.core, f"compute_policy_loss_{LOSSES.get(part.loss, part.loss)}")
        return loss(
            old_log_prob=old, log_prob=part.logprobs, advantages=each_token(part.advantages, part.mask),
            response_mask=part.mask.bool(), loss_agg_mode=AVERAGES[part.average], config=config,
            rollout_is_weights=weights,
        )[0]  # fmt: skip

    def advantages(self, rewards, group_ids, how, lengths):
        tokens, mask = at_the_end(rewards, lengths)
        if how == "batch":
            whiten = self.core.compute_reinforce_plus_plus_baseline_outcome_advantage
            return whiten(tokens, mask, group_ids.numpy())[0][:, 0]
        grpo = self.core.compute_grpo_outcome_advantage
        return grpo(tokens, mask, group_ids.numpy(), norm_adv_by_std_in_grpo=how == "prompt")[0][:, 0]

    def filter(self, rewards, group_ids):
        groups = {int(g): rewards[group_ids == g].tolist() for g in group_ids.unique()}
        run = self.source.run(
            "verl/trainer/ppo/v1/replay_buffer.py", "_dapo_filtered_keys", "for uid in new_finished_uids",
            new_finished_uids=list(groups), metrics_by_uid=groups, classification_cache={}, Counter=Counter,
        )  # fmt: skip
        return [run["classification_cache"][int(g)] is None for g in group_ids]

    def dynamic_sampling(self, rewards, correct, group_ids):  # filter_groups.metric=acc
        return self.filter(correct.float(), group_ids)

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if truncated.any():
            raise NotImplementedError
        keep = torch.tensor(self.filter(rewards, group_ids))  # the groups leave before the advantages
        advantages = torch.zeros_like(rewards)
        ones = torch.ones_like(group_ids[keep])
        advantages[keep] = self.advantages(rewards[keep], group_ids[keep], how, ones)
        return advantages, keep

    def penalty(self, lengths, max_length, cache_length):
        buffer = SimpleNamespace(enable=True, len=cache_length, penalty_factor=1.0, log=False)
        manager = SimpleNamespace(overlong_buffer_cfg=buffer, max_resp_len=max_length)

        def of(length):
            return self.source.run(
                "verl/workers/reward_manager/dapo.py", "DAPORewardManager.__call__", "if self.overlong_buffer_cfg",
                self=manager, valid_response_length=int(length), reward=0.0,
            )["reward"]  # fmt: skip

        return [of(length) for length in lengths]

    def kl(self, logprobs, reference, estimator):
        return self.core.kl_penalty(logprobs, reference, estimator)

    def kl_sampled(self, logprobs, reference, estimator):
        return self.core.kl_penalty(logprobs, reference, estimator + "+" * (self.settings == "nearest"))
