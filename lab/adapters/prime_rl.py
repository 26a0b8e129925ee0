"""prime-rl 559b447 (21 August 2026): default_loss_fn through compute_loss, GRPO's score_group, its pruning of A = 0.

Its one loss of this kind is DPPO with a KL term. Nearest: `kl_tau=0`. Default: its own numbers. Each token weighs the
same: `rl_scale` is the step's tokens, and the gradient of ranks is summed.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token

LOSS = "src/prime_rl/trainer/rl/loss.py"
CONFIG = "packages/prime-rl-configs/src/prime_rl/configs/trainer.py"


class Adapter:
    settings = "nearest"
    history = interrupt = dynamic_sampling = penalty = kl = kl_sampled = None

    def __init__(self) -> None:
        self.source = Source("prime_rl", "559b447")
        names = ("LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl")
        self.losses = self.source.functions(
            LOSS, *names, "default_loss_fn", "compute_loss", dataclass=dataclass, field=field
        )

    def loss(self, part, step):
        if part.average != "token" or part.loss not in ("dppo", "on_policy"):
            raise NotImplementedError
        config = self.source.defaults(CONFIG, "DefaultLossConfig")
        if self.settings == "nearest":
            config.kl_tau = 0.0
            config.dppo_mask_low = config.dppo_mask_high = part.options.get("high", config.dppo_mask_high)
        rows = range(len(part.mask))
        columns = part.logprobs, part.behaviour, each_token(part.advantages, part.mask), part.mask.bool()
        logprobs, behaviour, advantages, masks = ([column[row] for row in rows] for column in columns)
        loss, _ = self.losses.compute_loss(
            logprobs, behaviour, None, advantages, masks, None, None, None,
            rl_loss_fn=lambda inputs: self.losses.default_loss_fn(inputs, config),
            rl_scale=int(step.mask.sum()), ce_scale=1, ref_kl_scale=1,
        )  # fmt: skip
        return loss * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        if how != "none":
            raise NotImplementedError
        result = torch.empty_like(rewards)
        path = "src/prime_rl/orchestrator/algo/grpo.py"
        for group in group_ids.unique():
            rows = group_ids == group
            traces = [SimpleNamespace(reward=float(reward)) for reward in rewards[rows]]
            trainer = SimpleNamespace(length_penalty=None)
            first, last = "rewards = torch.tensor", "if length_penalty is None"
            result[rows] = self.source.run(path, "score_group", first, last, self=trainer, traces=traces)["advantages"]
        return result

    def filter(self, rewards, group_ids):
        """Tokens whose advantage is 0 leave the loss and its count."""
        path = "src/prime_rl/orchestrator/train_sink.py"
        prune = self.source.functions(path, "_prune_zero_advantages")._prune_zero_advantages

        def kept(advantage):
            sample = SimpleNamespace(advantages=[advantage], mask=[True], rl_weights=None, ce_weights=None)
            sample.ref_kl_weights = None
            return prune(sample)

        return [kept(float(advantage)) for advantage in self.advantages(rewards, group_ids, "none", None)]

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if truncated.any():
            raise NotImplementedError
        return self.advantages(rewards, group_ids, how, None), self.filter(rewards, group_ids)
