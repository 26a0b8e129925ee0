"""OpenRLHF 0.11.2 (14 September 2026): PolicyLoss, statements of compute_advantages_and_returns, its penalty and KL.

There is no CISPO. Nearest: `reinforce_baseline` for `batch`, `dr_grpo` for `none`, token or sample loss. Default: its
own clips of .2, its threshold of .5 to 5. The old log-probs are the trainer's own; no flag puts the generator's in
their place, but in GSPO a correction does. Rows come in any order, with their place in the batch as `index`. The actor
gives tokens and rows of the whole step; rows without tokens are not counted.
"""

import itertools
import logging
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token, group_size

MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"
ESTIMATORS = {"prompt": "group_norm", "batch": "reinforce_baseline", "none": "dr_grpo"}


class Adapter:
    settings = "nearest"
    filter = history = interrupt = None

    def __init__(self) -> None:
        self.source = source = Source("openrlhf", "0.11.2")
        self.utils = source.functions("openrlhf/models/utils.py", "masked_mean", "compute_approx_kl")
        types = {"Optional": None, "masked_mean": self.utils.masked_mean}
        names = ("aggregate_loss", "PolicyLoss")
        self.policy_loss = source.functions("openrlhf/models/loss.py", *names, **types).PolicyLoss

    def loss(self, part, step):
        if part.average not in ("token", "sample") or part.loss not in ("on_policy", "clip", "gspo", "tis", "icepop"):
            raise NotImplementedError
        if part.loss == "gspo" and part.average == "token":
            raise NotImplementedError
        settings, options = {"token_level_loss": part.average == "token"}, part.options
        if part.loss == "gspo":
            settings["policy_loss_type"] = "gspo"
        if part.loss in ("tis", "icepop"):
            settings |= {"is_correction_level": "token", "is_correction_mode": "clip" if part.loss == "tis" else "mask"}
        if self.settings == "nearest" and options:
            if part.loss == "gspo":
                settings["is_correction_level"] = "token"
            if part.loss != "icepop":
                settings |= {"clip_eps_low": options["low"], "clip_eps_high": options["high"]}
            low = options["low"] if part.loss == "icepop" else 0.0
            settings["is_correction_threshold"] = [low, options.get("cap", options["high"])]
        return self.policy_loss(**settings)(
            part.logprobs, part.old, each_token(part.advantages, part.mask), action_mask=part.mask,
            rollout_log_probs=part.behaviour, dp_size=part.ranks, batch_num_tokens=step.mask.sum(),
            global_batch_size=(step.mask.sum(-1) > 0).sum(),
        )[0]  # fmt: skip

    def advantages(self, rewards, group_ids, how, lengths):
        mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).float()
        advantage = SimpleNamespace(estimator=ESTIMATORS[how], no_std_norm=False)
        rollout = SimpleNamespace(n_samples_per_prompt=group_size(group_ids.sort().values))
        args = SimpleNamespace(algo=SimpleNamespace(advantage=advantage), rollout=rollout)
        places = group_ids.argsort(stable=True).argsort().tolist()
        row = SimpleNamespace(index=places, rewards=rewards, action_mask=mask, info={})
        variables = {"args": args, "experiences": [row]}
        name = "compute_advantages_and_returns"
        last = "rewards = rewards.reshape(-1)[indices]"
        run = self.source.run(MAKER, name, "exp_len =", last, itertools=itertools, **variables)
        row.advantages = each_token(run["rewards"][0], mask)
        self.source.run(MAKER, name, "if args.algo.advantage.estimator in ['gae'", **variables)
        return row.advantages[:, 0]

    def dynamic_sampling(self, rewards, correct, group_ids):
        """By the scores, which a reward function may give beside the rewards."""
        algo = SimpleNamespace(dynamic_filtering_range=(0.0, 1.0))
        kept = {}
        for group in group_ids.unique().tolist():
            rows = [SimpleNamespace(scores=[score]) for score in correct[group_ids == group]]
            run = self.source.run(
                "openrlhf/trainer/ppo_utils/samples_generator.py", "_generate_vllm", "if dynamic_filtering and",
                "if dynamic_filtering and", experiences=rows, dynamic_filtering=True, logger=logging.getLogger(),
                self=SimpleNamespace(args=SimpleNamespace(algo=algo)),
            )  # fmt: skip
            kept[group] = len(run["experiences"]) > 0
        return [kept[group] for group in group_ids.tolist()]

    def penalty(self, lengths, max_length, cache_length):
        path = "openrlhf/trainer/ppo_utils/length_penalty.py"
        rows = SimpleNamespace(rewards=torch.zeros(len(lengths)), response_length=lengths)
        self.source.functions(path, "apply_overlong_penalty").apply_overlong_penalty(
            [rows], max_new_tokens=max_length, overlong_buffer_len=cache_length, overlong_penalty_factor=1.0
        )
        return rows.rewards

    def kl(self, logprobs, reference, estimator):
        return self.utils.compute_approx_kl(logprobs, reference, None, estimator)

    def kl_sampled(self, logprobs, reference, estimator):
        unbiased = self.settings == "nearest"
        return self.utils.compute_approx_kl(logprobs, reference, None, estimator, unbiased_gradient=unbiased)
