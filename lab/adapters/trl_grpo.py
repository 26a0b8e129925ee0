"""TRL 1.16.0 (15 October 2026): GRPOTrainer, by the statements of its two long methods.

Nearest: `loss_type=cispo epsilon_high=5 vllm_importance_sampling_mode=token_truncate
vllm_importance_sampling_clip_max=5 scale_rewards=batch mask_truncated_completions`. Default: every number stays. The
scaling over microbatches and ranks stands in the loss itself; all have the same number of rows.
"""

from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, equal_rows, group_size

TRAINER = "trl/trainer/grpo_trainer.py"
LOSSES = {"sample": "grpo", "token": "dapo", "constant": "dr_grpo"}
MODES = {"tis": "token_truncate", "icepop": "token_mask"}
GENERATION = "GRPOTrainer._generate_and_score_completions"


def kind_of(part):
    """TRL's name of a loss with this average; NotImplementedError if it has none."""
    kind = "cispo" if part.loss == "cispo" and part.average == "token" else LOSSES.get(part.average)
    if kind is None or part.loss in ("dppo", "m2po") or (part.loss == "cispo" and kind != "cispo"):
        raise NotImplementedError
    return kind


def set_nearest(trainer, part):
    """The numbers that a case asks for, as the trainer's attributes."""
    options = part.options
    if not options:
        return
    trainer.vllm_importance_sampling_clip_max = options.get("cap", 1e9)
    if part.loss not in MODES:
        trainer.vllm_importance_sampling_mode = "token_truncate"
    if part.loss == "cispo":
        trainer.epsilon_high = options["cap"]
    elif part.loss == "icepop":
        trainer.vllm_importance_sampling_clip_min = options["low"]
        trainer.vllm_importance_sampling_clip_max = options["high"]
    elif part.loss == "deepseek":
        trainer.off_policy_mask_threshold = options["high"]
    else:
        trainer.epsilon_low, trainer.epsilon_high = options["low"], options["high"]


class Adapter:
    settings = "nearest"
    filter = history = interrupt = dynamic_sampling = None

    def __init__(self) -> None:
        self.source = Source("trl", "1.16.0")
        self.nanstd = self.source.functions("trl/trainer/utils.py", "nanstd").nanstd
        self.off_policy_mask = self.source.functions(TRAINER, "GRPOTrainer.get_off_policy_mask").get_off_policy_mask

    def loss(self, part, step):
        if part.average in ("sample", "constant"):
            equal_rows(step)
        trainer = self.trainer(part)
        ratio = self.source.run(
            TRAINER, GENERATION, "mask = completion_mask if tool_mask", "if self.vllm_importance_sampling_mode in",
            self=trainer, completion_mask=part.mask, tool_mask=None, old_per_token_logps=part.old,
            sampling_per_token_logps=part.behaviour,
        )["vllm_importance_sampling_ratio"]  # fmt: skip
        inputs = {
            "advantages": part.advantages,
            "old_per_token_logps": part.old,
            "sampling_per_token_logps": part.behaviour,
            "importance_sampling_ratio": ratio,
            "num_items_in_batch": step.mask.sum(),
        }
        return self.source.run(
            TRAINER, "GRPOTrainer._compute_loss", "advantages = inputs", "if self.loss_type in ['grpo', 'sapo']",
            self=trainer, inputs=inputs, per_token_logps=part.logprobs, mask=part.mask, entropy_mask=None,
        )["loss"]  # fmt: skip

    def trainer(self, part):
        """What `self` is in TRL's methods."""
        default = self.source.defaults("trl/trainer/grpo_config.py", "GRPOConfig")
        trainer = SimpleNamespace(
            loss_type=kind_of(part), beta=0.0, use_vllm=True, vllm_importance_sampling_correction=True,
            importance_sampling_level="sequence" if part.loss == "gspo" else "token",
            epsilon_low=default.epsilon, epsilon_high=default.epsilon_high or default.epsilon,
            vllm_importance_sampling_mode=MODES.get(part.loss, default.vllm_importance_sampling_mode),
            vllm_importance_sampling_clip_min=default.vllm_importance_sampling_clip_min,
            vllm_importance_sampling_clip_max=default.vllm_importance_sampling_clip_max,
            off_policy_mask_threshold=default.off_policy_mask_threshold, get_off_policy_mask=self.off_policy_mask,
            args=SimpleNamespace(delta=default.delta, steps_per_generation=part.parts),
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=part.parts,
            accelerator=SimpleNamespace(num_processes=part.ranks), max_completion_length=int(part.constant),
        )  # fmt: skip
        if self.settings == "nearest":
            set_nearest(trainer, part)
        return trainer

    def advantages(self, rewards, group_ids, how, lengths):
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards={"prompt": "group"}.get(how, how),
        )
        return self.source.run(
            TRAINER, GENERATION, "if self.multi_objective_aggregation", self=trainer, nanstd=self.nanstd,
            rewards_per_func=rewards[:, None], num_generations=group_size(group_ids), device="cpu",
            unscorable_mask=torch.zeros(len(rewards), dtype=torch.bool),
        )["advantages"]  # fmt: skip

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        for group in group_ids.unique():
            if len(rewards[group_ids == group].unique()) == 1:  # there is no filter
                raise NotImplementedError
        return self.advantages(rewards, group_ids, how, None), truncated == 0

    def penalty(self, lengths, max_length, cache_length):
        rewards = self.source.functions("trl/rewards/other_rewards.py", "_SoftOverlongPunishment")
        return rewards._SoftOverlongPunishment(max_length, cache_length)([[0] * int(n) for n in lengths])

    def kl(self, logprobs, reference, estimator, correction=False):
        if estimator != "k3":
            raise NotImplementedError
        return self.source.run(
            TRAINER, "GRPOTrainer._compute_loss", "if self.beta != 0.0",
            self=SimpleNamespace(beta=1.0, args=SimpleNamespace(use_bias_correction_kl=correction)),
            inputs={"ref_per_token_logps": reference}, per_token_logps=logprobs,
            coef_1=(logprobs - logprobs.detach()).exp(),
        )["per_token_kl"]  # fmt: skip

    def kl_sampled(self, logprobs, reference, estimator):
        if self.settings == "default":  # use_bias_correction_kl is off
            return self.kl(logprobs, reference, estimator)
        return self.kl(logprobs, reference, estimator, correction=True)
