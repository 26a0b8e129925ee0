"""SkyRL 0.4.0 (1 October 2026): the losses of ppo_utils.py, its reduction of advantages, its filter, its batch's std.

Nearest: `policy_loss_type=cispo cispo_anchor=rollout loss_reduction=prompt_mean advantage_batch_normalize
grpo_norm_by_std=False zero_variance_filter zero_variance_filter_tol=0`, a huge `clip_ratio_c`. Default: these by name,
with its own numbers. The driver weighs the advantages of a whole minibatch; the losses are sums, over ranks too.
"""

from enum import StrEnum
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, at_the_end, each_token

UTILS = "skyrl/backends/skyrl_train/utils/"
CONFIG = "skyrl/train/config/config.py"
AVERAGES = {
    "sample": "sequence_mean",
    "prompt": "prompt_mean",
    "token": "token_mean",
    "constant": "seq_mean_token_sum_norm",
}
LOSSES = {
    "on_policy": "compute_policy_loss_cispo",
    "cispo": "compute_policy_loss_cispo",
    "clip": "ppo_policy_loss",
    "tis": "ppo_policy_loss",
    "gspo": "gspo_policy_loss",
    "icepop": "rollout_is_policy_loss",
    "dppo": "dppo_policy_loss",
}


class Adapter:
    settings = "nearest"
    history = interrupt = None
    masks_dropped = True  # a dropped group stays, with an empty mask

    def __init__(self) -> None:
        self.source = source = Source("skyrl", "0.4.0")
        space = vars(source.functions(UTILS + "torch_utils.py", "masked_mean", "safe_exp_delta"))
        corrections = ("tis_ratio", "outlier_token_mask", "token_mask", "sequence_mask", "off_policy_correction")
        space |= vars(
            source.functions(
                UTILS + "off_policy_correction_utils.py", "off_policy_correction_enabled",
                *(f"compute_{name}" for name in corrections), "apply_off_policy_correction", **space,
            )
        )  # fmt: skip
        self.utils = source.functions(
            UTILS + "ppo_utils.py", "reduce_loss", *dict.fromkeys(LOSSES.values()), "compute_grpo_outcome_advantage",
            "apply_loss_reduction_to_advantages_minibatch", "compute_approx_kl", StrEnum=StrEnum, **space,
        )  # fmt: skip
        trainer = source.functions("skyrl/train/utils/trainer_utils.py", "zero_variance_filter")
        self.zero_variance_filter = trainer.zero_variance_filter

    def config(self, part):
        def default(name):
            return self.source.defaults(CONFIG, name)

        config = default("AlgorithmConfig")
        config.off_policy_correction = default("OffPolicyCorrectionConfig")
        config.cispo = default("CISPOConfig")
        config.dppo = default("DPPOConfig")
        config.policy_loss_type, config.loss_reduction = "regular", AVERAGES[part.average]
        if part.loss == "tis":
            config.off_policy_correction.tis_ratio_type = "token"
        options = part.options
        if self.settings == "default" or not options:
            return config
        config.clip_ratio_c = 1e9
        if part.loss == "cispo":
            config.cispo.cispo_anchor = "rollout"
            config.cispo.cispo_eps_clip_high = options["cap"] - 1
        elif part.loss == "dppo":
            config.dppo.delta_low = config.dppo.delta_high = options["high"]
        elif part.loss == "icepop":
            config.eps_clip_low, config.eps_clip_high = 1 - options["low"], options["high"] - 1
        else:
            config.eps_clip_low, config.eps_clip_high = options["low"], options["high"]
            config.off_policy_correction.token_tis_ratio_clip_high = options.get("cap", 2.0)
        return config

    def loss(self, part, step):
        if part.loss not in LOSSES:
            raise NotImplementedError
        weighted = self.weighted(step)[[step.rows.index(row) for row in part.rows]]
        old = part.behaviour if part.loss in ("clip", "gspo") else part.old
        loss = getattr(self.utils, LOSSES[part.loss])
        return loss(part.logprobs, old, weighted, self.config(part), part.mask, part.behaviour)[0] * part.ranks

    def weighted(self, step):
        """(N, T): advantages times the weight of each token. Groups stand together in its batches."""
        order = step.group_ids.argsort(stable=True)
        _, sizes = torch.unique_consecutive(step.group_ids[order], return_counts=True)
        ends = sizes.cumsum(0).tolist()
        advantages = each_token(step.advantages, step.mask)
        result = torch.empty_like(advantages)
        result[order] = self.utils.apply_loss_reduction_to_advantages_minibatch(
            advantages[order], step.mask[order], AVERAGES[step.average], micro_batch_size=1,
            max_seq_len=int(step.constant), prompt_boundaries=list(zip([0, *ends[:-1]], ends, strict=True)),
        )  # fmt: skip
        return result

    def advantages(self, rewards, group_ids, how, lengths):
        tokens, mask = at_the_end(rewards, lengths)
        grpo = self.utils.compute_grpo_outcome_advantage
        advantages, _ = grpo(tokens, mask, group_ids.numpy(), grpo_norm_by_std=how == "prompt")
        if how == "batch":
            algorithm = SimpleNamespace(advantage_batch_normalize=True)
            trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)))
            run = self.source.run(
                "skyrl/train/trainer.py", "_normalize_advantages", "if self.cfg.trainer.algorithm.advantage_batch",
                self=trainer, advantages=advantages, response_mask=mask, data={},
            )  # fmt: skip
            advantages = run["data"]["advantages"]
        return advantages[:, 0]

    def filter(self, rewards, group_ids):
        default = self.source.defaults(CONFIG, "AlgorithmConfig").zero_variance_filter_tol
        tolerance = default if self.settings == "default" else 0.0
        kept = self.zero_variance_filter(rewards.tolist(), group_ids.tolist(), tol=tolerance)
        return [row in kept for row in range(len(rewards))]

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if truncated.any():
            raise NotImplementedError
        # a row's group is the number of its prompt in the data set
        advantages = self.advantages(rewards, prompts, how, torch.ones_like(prompts))
        return advantages, self.filter(rewards, prompts)

    def kl(self, logprobs, reference, estimator):
        return self.utils.compute_approx_kl(logprobs, reference, None, estimator)
