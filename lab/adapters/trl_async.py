"""TRL 1.16.0 (15 October 2026): trl.experimental.async_grpo, PPO's clip on π / π_gen, with the token average.

`global_n_tokens` is what its collator counts: the tokens of one microbatch over all ranks.
"""

from types import SimpleNamespace

import numpy as np
import torch

from lab.adapters.sources import Source

TRAINER = "trl/experimental/async_grpo/async_grpo_trainer.py"
WORKER = "trl/experimental/async_grpo/async_rollout_worker.py"


class Adapter:
    settings = "nearest"
    filter = history = interrupt = dynamic_sampling = kl = kl_sampled = None

    def __init__(self) -> None:
        self.source = Source("trl", "1.16.0")

    def loss(self, part, step):
        if part.average != "token" or part.loss not in ("clip", "on_policy"):
            raise NotImplementedError
        default = self.source.defaults("trl/experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig")
        low, high = default.epsilon, default.epsilon_high or default.epsilon
        if self.settings == "nearest" and part.options:
            low, high = part.options["low"], part.options["high"]
        (k,) = {parts.index(part.rows) for parts in step.layout if part.rows in parts}
        rows = [step.rows.index(row) for parts in step.layout for row in parts[k]]
        trained = part.mask.bool()
        trainer = SimpleNamespace(
            epsilon_low=low, epsilon_high=high, current_gradient_accumulation_steps=part.parts,
            accelerator=SimpleNamespace(num_processes=part.ranks),
        )  # fmt: skip
        return self.source.run(
            TRAINER, "AsyncGRPOTrainer.compute_loss", "log_ratio =", "loss = loss / self.current",
            self=trainer, inputs={"global_n_tokens": step.mask[rows].sum()[None]}, log_probs=part.logprobs[trained],
            old_log_probs=part.behaviour[trained],
            advantages=part.advantages[:, None].expand_as(part.mask)[trained],
        )["loss"]  # fmt: skip

    def advantages(self, rewards, group_ids, how, lengths):
        if how != "prompt":
            raise NotImplementedError
        result = torch.empty_like(rewards)
        for group in group_ids.unique():  # its worker scores one group at a time
            rows = group_ids == group
            variables = {"rewards": rewards[rows].double().numpy(), "scored_mask": np.ones(int(rows.sum()), bool)}
            run = self.source.run(
                WORKER, "_score_group", "advantages = np.zeros_like", "if scored_mask.any", **variables
            )
            result[rows] = torch.tensor(run["advantages"]).float()
        return result
