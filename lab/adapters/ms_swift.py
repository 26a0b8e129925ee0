"""ms-swift 4.6.0 (13 October 2026): statements of GRPOTrainer, rl_core/advantage.py, SoftOverlong.

Nearest: `loss_type=cispo epsilon_high=5 rollout_importance_sampling_mode=token_truncate
rollout_importance_sampling_threshold=5 advantage_estimator=reinforce_plus_plus scale_rewards=batch`. Default: no mode.
All microbatches have the same number of rows. Hugging Face's Trainer divides what its loss returns by their number.
"""

from functools import partial
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token, equal_rows, group_size

TRAINER = "swift/rlhf_trainers/grpo_trainer.py"
LOSSES = {"sample": "grpo", "token": "dapo", "constant": "dr_grpo"}
METHODS = (
    "_undo_gradient_accumulation_scaling", "_apply_rollout_importance_sampling", "_get_rollout_is_correction",
    "_compute_off_policy_sequence_mask", "_compute_sequence_level_ratios", "compute_std",
)  # fmt: skip


class Adapter:
    settings = "nearest"
    history = interrupt = kl_sampled = None

    def __init__(self) -> None:
        self.source = Source("ms_swift", "4.6.0")
        names = ("WINDOW_NORMALIZED_LOSS_TYPES", *(f"GRPOTrainer.{name}" for name in METHODS))
        self.methods = vars(self.source.functions(TRAINER, *names))
        self.window = self.methods.pop("WINDOW_NORMALIZED_LOSS_TYPES")

    def loss(self, part, step):
        kind = "cispo" if part.loss == "cispo" and part.average == "token" else LOSSES.get(part.average)
        refused = part.loss in ("dppo", "m2po", "icepop") or (part.loss == "cispo" and kind != "cispo")
        if kind is None or refused:
            raise NotImplementedError
        if part.average in ("sample", "constant"):
            equal_rows(step)
        trainer = self.trainer(part, kind)
        batch = SimpleNamespace(
            completion_mask=part.mask.bool(), advantages=each_token(part.advantages, part.mask),
            old_per_token_logps=part.old, rollout_per_token_logps=part.behaviour, num_items_in_batch=step.mask.sum(),
        )  # fmt: skip
        loss = self.source.run(
            TRAINER, "GRPOTrainer._compute_loss_and_metrics", "advantages = grpo_batch.advantages",
            "if self.loss_type in ['grpo', 'sapo']", self=trainer, grpo_batch=batch, per_token_logps=part.logprobs,
            completion_mask=batch.completion_mask, entropy_mask=None, per_token_kl=None,
            WINDOW_NORMALIZED_LOSS_TYPES=self.window, gather_object=list,
        )["loss"]  # fmt: skip
        return loss / part.parts

    def trainer(self, part, kind):
        """What `self` is in its methods."""
        trainer = self.source.defaults("swift/rlhf_trainers/args_mixin.py", "GRPOArgumentsMixin")
        trainer.loss_type, trainer.max_completion_length = kind, int(part.constant)
        trainer.importance_sampling_level = "sequence" if part.loss == "gspo" else "token"
        trainer.epsilon_low, trainer.epsilon_high = trainer.epsilon, trainer.epsilon_high or trainer.epsilon
        trainer.args, trainer.model = SimpleNamespace(delta=trainer.delta), SimpleNamespace(training=True)
        trainer.accelerator = SimpleNamespace(num_processes=part.ranks)
        trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps = part.parts
        trainer.disable_rollout_importance_sampling = trainer._has_teacher = False
        trainer._compute_rollout_offpolicy_metrics = trainer._compute_is_correction_metrics = lambda *_: {}
        for name, method in self.methods.items():
            setattr(trainer, name, partial(method, trainer))
        if part.loss == "tis":
            trainer.rollout_importance_sampling_mode = "token_truncate"
        options = part.options
        if self.settings == "default" or not options:
            return trainer
        trainer.rollout_importance_sampling_mode = "token_truncate"
        trainer.rollout_importance_sampling_threshold = options.get("cap", 1e9)
        if part.loss == "cispo":
            trainer.epsilon_high = options["cap"]
        elif part.loss == "deepseek":
            trainer.off_policy_sequence_mask_delta = options["high"]
        else:
            trainer.epsilon_low, trainer.epsilon_high = options["low"], options["high"]
        return trainer

    def advantages(self, rewards, group_ids, how, lengths):
        estimator = "reinforce_plus_plus" if how == "batch" and self.settings == "nearest" else "grpo"
        compute = self.source.functions("swift/rl_core/advantage.py", "compute_advantages").compute_advantages
        scale = {"prompt": "group"}.get(how, how)
        size = group_size(group_ids)
        return compute(rewards[:, None], torch.ones(1), size, advantage_estimator=estimator, scale_rewards=scale)[0]

    def filter(self, rewards, group_ids):
        """Dynamic sampling, by the std of each group."""
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device="cpu"), model=SimpleNamespace(training=True), dynamic_num_samples=False,
            reward_weights=torch.ones(1), num_generations=group_size(group_ids),
        )  # fmt: skip
        std = self.methods["compute_std"](trainer, None, rewards[:, None])
        run = self.source.run(TRAINER, "GRPOTrainer._dynamic_sampling", "valid_mask =", "valid_mask =", rewards_std=std)
        return run["valid_mask"]

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        keep = self.filter(rewards, group_ids)  # dropped groups are drawn anew before the advantages
        advantages = torch.zeros_like(rewards)
        advantages[keep] = self.advantages(rewards[keep], group_ids[keep], how, None)
        return advantages, keep & (truncated == 0)  # overlong_filter masks in the loss

    def penalty(self, lengths, max_length, cache_length):
        orm = self.source.functions("swift/rewards/orm.py", "SoftOverlong", ORM=object).SoftOverlong
        reward = SimpleNamespace(soft_max_length=max_length, soft_cache_length=cache_length)
        return orm.__call__(reward, None, response_token_ids=[[0] * int(n) for n in lengths])

    def kl(self, logprobs, reference, estimator):
        if estimator != "k3":
            raise NotImplementedError
        return self.source.run(
            TRAINER, "GRPOTrainer._compute_loss_and_metrics", "if self.beta != 0.0 and (not self.kl_in_reward)",
            self=SimpleNamespace(beta=1.0, kl_in_reward=False), per_token_logps=logprobs,
            grpo_batch=SimpleNamespace(ref_per_token_logps=reference),
        )["per_token_kl"]  # fmt: skip
