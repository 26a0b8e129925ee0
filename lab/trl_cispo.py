"""ScaleRL's loss, average and filter inside TRL's GRPOTrainer, with three functions of this repository.

    pip install trl==1.16.0
    python lab/trl_cispo.py FOLDER_OR_NAME_OF_A_MODEL

TRL samples and scores; here stand its rewards once more, because what it calls advantages is divided by the std of the
raw rewards. One process and one update for each batch, so that a generation batch is one optimizer step.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from filters import has_variance
from losses import aggregation_weights, cispo, normalize_advantages


class ScaleRLTrainer(GRPOTrainer):
    def _calculate_rewards(self, *inputs):
        rewards = super()._calculate_rewards(*inputs)  # (N, number of reward functions)
        self.rewards = rewards.nansum(1)  # (N,)
        return rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        group_ids = torch.arange(len(self.rewards)) // self.num_generations  # (N,)
        keep = has_variance(self.rewards, group_ids)  # (N,)
        batch["advantages"] = torch.zeros_like(self.rewards)  # (N,)
        batch["advantages"][keep] = normalize_advantages(self.rewards[keep], group_ids[keep])
        mask = batch["completion_mask"] * keep[:, None]  # (N, T)
        batch["token_weights"] = aggregation_weights(mask, group_ids)  # (N, T), before TRL cuts the batch
        return batch

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]  # (n, T)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], mask], 1)
        logprobs, *_ = self._get_per_token_logps_and_entropies(model, ids, attended, mask.shape[1])  # (n, T)
        behaviour = inputs.get("sampling_per_token_logps", logprobs)  # vLLM's own; without vLLM the ratio is 1
        token_loss, _ = cispo(logprobs, behaviour, inputs["advantages"], mask)
        return (inputs["token_weights"] * token_loss).sum()


def even(completion_ids, **_):
    """The reward: most tokens of the completion are even."""
    return [float(sum(i % 2 == 0 for i in ids) > len(ids) / 2) for ids in completion_ids]


if __name__ == "__main__":
    config = GRPOConfig(
        output_dir="trl_cispo",
        max_steps=20,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=8,
        logging_steps=5,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    prompts = Dataset.from_dict({"prompt": ["1 +2", "3 +4", "5 +6", "7 +8"] * 40})
    ScaleRLTrainer(sys.argv[1], even, config, prompts).train()
