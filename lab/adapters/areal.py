"""AReaL cbff54d (22 August 2026): cispo_loss_fn, ppo_actor_loss_fn, Normalization, M2PO's mask, its penalty and KL.

Nearest: `use_cispo_loss eps_clip=1 eps_clip_higher=4`, proximal log-probs of the generator, `reward_norm` with
mean_level group and std_level batch. Default: its own numbers, with recomputed proximal log-probs. Its engine weighs a
microbatch by its share of the step's tokens, times the ranks.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token, group_size

LOSSES = "areal/utils/functional/functional.py"
CONFIG = "areal/api/cli_args.py"
LEVELS = {"prompt": "group", "batch": "batch", "none": None}


class Adapter:
    settings = "nearest"
    filter = dynamic_sampling = history = interrupt = kl_sampled = None

    def __init__(self) -> None:
        self.source = source = Source("areal", "cbff54d")
        data = source.functions("areal/utils/data.py", "KLEstimator", "Normalization")
        self.estimator, self.normalization = data.KLEstimator, data.Normalization
        names = ("RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling")
        names += ("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn", "cispo_loss_fn")
        space = {"dataclass": dataclass, "KLEstimator": self.estimator}
        self.losses = source.functions(LOSSES, *names, "reward_overlong_penalty", **space)
        actor = source.functions("areal/trainer/ppo/actor.py", "_get_m2po_loss_mask", "_apply_m2po_masking")
        self.m2po = actor._apply_m2po_masking

    def loss(self, part, step):
        if part.average != "token" or part.loss in ("dppo", "deepseek"):
            raise NotImplementedError
        config, options = self.source.defaults(CONFIG, "PPOActorConfig"), part.options
        nearest = self.settings == "nearest" and options
        low, high = config.eps_clip, config.eps_clip_higher
        proximal = part.behaviour if nearest and part.loss in ("cispo", "clip", "gspo") else part.old
        trained = part.mask.bool()
        share = trained.sum() / step.mask.sum()
        if nearest and part.loss == "cispo":
            low, high = 1.0, options["cap"] - 1
        elif nearest and part.loss not in ("icepop", "m2po"):
            low, high = options["low"], options["high"]
        advantages = each_token(part.advantages, part.mask)
        if part.loss in ("cispo", "on_policy"):
            high = low if high is None else high
            loss, _ = self.losses.cispo_loss_fn(part.logprobs, proximal, advantages, low, trained, high)
            return loss * share * part.ranks
        sampling = None
        if part.loss in ("tis", "icepop"):
            action = "clamp" if part.loss == "tis" else "mask"
            upper, lower = options.get("cap", options["high"]), None if part.loss == "tis" else options["low"]
            sampling = SimpleNamespace(
                level="token", action=action, metric="ratio", agg="sum", upper=upper, lower=lower
            )
        mask = trained
        if part.loss == "m2po":
            mask = self.m2po(part.behaviour, proximal, trained, options["high"])
            share = mask.sum() / step.mask.sum()
            sampling = SimpleNamespace(level="token", action="clamp", metric="ratio", agg="sum", upper=1e9, lower=None)
        loss, _ = self.losses.ppo_actor_loss_fn(
            part.logprobs, proximal, part.behaviour, advantages, low, mask, high, rejection_sampling=sampling,
            importance_sampling_level="sequence" if part.loss == "gspo" else "token",
        )  # fmt: skip
        return loss * share * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        config = SimpleNamespace(
            mean_level="group", mean_leave1out=False, std_level=LEVELS[how], group_size=group_size(group_ids), eps=1e-5,
            std_unbiased=self.settings == "default",
        )  # fmt: skip
        return self.normalization(config)(rewards)

    def penalty(self, lengths, max_length, cache_length):
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        data = {"rewards": torch.zeros(len(lengths)), "input_ids": mask, "loss_mask": mask}
        return self.losses.reward_overlong_penalty(data, cache_length, 1.0, max_length)["rewards"]

    def kl(self, logprobs, reference, estimator):
        return self.estimator(estimator, apply_clamp=self.settings == "default")(logprobs, reference)
