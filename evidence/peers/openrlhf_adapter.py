"""OpenRLHF: `PolicyLoss`, the experience maker's advantages and its overlong penalty."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from stand_ins import absent, bare

absent("ray", "deepspeed", "openrlhf.trainer.ray.launcher")
bare("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils")

from openrlhf.models.loss import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402

ESTIMATORS = {"prompt": "group_norm", "batch": "reinforce_baseline", "none": "dr_grpo"}


class Adapter:
    """advantage.estimator=reinforce_baseline, is_correction_level=token"""

    def loss(self, part, step):
        options = {"low": 0.2, "high": 0.2} | part.options
        if part.average not in ("token", "sample") or part.loss not in ("on_policy", "clip", "gspo", "tis", "icepop"):
            raise NotImplementedError
        clips = options["low"], options["high"]
        kinds = {
            "tis": ("token", "clip", "ratio", [0.0, options.get("cap")]),
            "icepop": ("token", "mask", "ratio", clips),
        }
        names = "is_correction_level", "is_correction_mode", "is_correction_gating", "is_correction_threshold"
        correction = dict(zip(names, kinds[part.loss], strict=True)) if part.loss in kinds else {}
        kind = "gspo" if part.loss == "gspo" else "ppo"
        policy_loss = PolicyLoss(*clips, token_level_loss=part.average == "token", policy_loss_type=kind, **correction)
        totals = {
            "batch_num_tokens": step.mask.sum(),
            "global_batch_size": step.mask.any(1).sum(),
            "dp_size": part.ranks,
        }
        rows = part.logprobs, part.old, part.advantages[:, None], part.mask, part.behaviour
        return policy_loss(*rows, **totals)[0]

    def advantages(self, rewards, group_ids, how, lengths):
        size = int((group_ids == group_ids[0]).sum())
        if len(rewards) % size or not group_ids.equal(torch.arange(len(rewards)) // size):
            raise NotImplementedError
        mask = torch.arange(10) < lengths[:, None]
        kl = torch.zeros_like(mask, dtype=torch.float32)
        experience = SimpleNamespace(index=list(range(len(rewards))), rewards=rewards, kl=kl, action_mask=mask, info={})
        maker = MagicMock(advantage_estimator=ESTIMATORS[how], kl_ctl=SimpleNamespace(value=0.0))
        args = maker.strategy.args
        args.algo.advantage = SimpleNamespace(estimator=ESTIMATORS[how], gamma=1.0, no_std_norm=False)
        args.reward = SimpleNamespace(clip_range=None)
        args.rollout.n_samples_per_prompt = size
        maker.get_cumulative_returns = lambda *x: RemoteExperienceMaker.get_cumulative_returns(maker, *x)
        return RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])[0].advantages[:, 0]

    def penalty(self, lengths, max_length, cache_length):
        experience = SimpleNamespace(rewards=torch.zeros(len(lengths)), response_length=lengths)
        apply_overlong_penalty([experience], max_length, cache_length)
        return experience.rewards
