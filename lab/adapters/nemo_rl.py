"""NeMo-RL 7ea279a (22 August 2026): ClippedPGLossFn, GRPO's advantages, its KL, dynamic sampling and reward shaping.

Nearest: `use_cispo ratio_clip_max=4` (its recipe for ScaleRL writes 5, a cap of 6), `prev_logprobs` of the generator,
no leave-one-out baseline, no clamp of the KL. Default: its own numbers. The loss divides by the tokens or rows of the
whole step, and the driver undoes the mean over ranks.
"""

from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token

LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
UTILS = "nemo_rl/algorithms/utils.py"


class Names:
    """An enumeration, by its members' names."""

    def __getattr__(self, name: str) -> str:
        return name


def shifted(x: torch.Tensor) -> torch.Tensor:
    """(n, T + 1): its columns begin with the first token, which nothing scores."""
    return torch.cat([torch.zeros(len(x), 1), x], 1)


class Adapter:
    settings = "nearest"
    history = interrupt = None

    def __init__(self) -> None:
        self.source = source = Source("nemo_rl", "7ea279a")
        names = ("calculate_kl", "masked_mean", "calculate_baseline_and_std_per_prompt")
        self.utils = source.functions(UTILS, *names, Optional=None)
        space = vars(self.utils) | {name: Names() for name in ("LossType", "LossInputType", "MetricNormalizer")}
        self.loss_class = source.functions(LOSS, "ClippedPGLossFn", LossFunction=object, **space).ClippedPGLossFn
        estimator = source.functions("nemo_rl/algorithms/advantage_estimator.py", "GRPOAdvantageEstimator", **space)
        self.estimator = estimator.GRPOAdvantageEstimator

    @property
    def leave_one_out(self) -> bool:
        default = self.source.defaults("nemo_rl/algorithms/grpo.py", "GRPOConfig")
        return self.settings == "default" and default.use_leave_one_out_baseline

    def loss(self, part, step):
        cispo = part.loss == "cispo" or (part.loss == "on_policy" and part.average == "token")
        wrong = part.average == ("token" if part.loss == "gspo" else "sample" if part.loss == "cispo" else "")
        if part.average not in ("token", "sample") or part.loss in ("dppo", "m2po", "deepseek") or wrong:
            raise NotImplementedError
        config = self.source.defaults(LOSS, "ClippedPGLossConfig")
        config.reference_policy_kl_penalty = 0.0
        config.token_level_loss, config.use_cispo = part.average == "token", cispo
        config.sequence_level_importance_ratios = part.loss == "gspo"
        previous, options = part.old, part.options
        if part.loss in ("tis", "icepop"):  # its numbers have no defaults
            config.use_importance_sampling_correction = True
            config.truncated_importance_sampling_type = part.loss
            config.truncated_importance_sampling_ratio = options.get("cap", options["high"])
            if part.loss == "icepop":
                config.truncated_importance_sampling_ratio_min = options["low"]
        else:
            previous = part.behaviour if self.settings == "nearest" else part.old
        if self.settings == "nearest":
            if part.loss == "cispo":
                config.ratio_clip_min, config.ratio_clip_max = 1.0, options["cap"] - 1
            elif options and part.loss != "icepop":
                config.ratio_clip_min, config.ratio_clip_max = options["low"], options["high"]
        data = {
            "token_mask": shifted(part.mask),
            "sample_mask": torch.ones(len(part.mask)),
            "advantages": shifted(each_token(part.advantages, part.mask)),
            "prev_logprobs": shifted(previous),
            "generation_logprobs": shifted(part.behaviour),
        }
        rows = torch.tensor(float(len(step.rows)))
        return self.loss_class(config)(part.logprobs, data, rows, step.mask.sum())[0] * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        if how == "batch":
            raise NotImplementedError
        config = SimpleNamespace(use_leave_one_out_baseline=self.leave_one_out, normalize_rewards=how == "prompt")
        columns = group_ids[:, None], rewards, torch.ones(len(rewards), 1)
        return self.estimator(config, None).compute_advantage(*columns)[:, 0]

    def dynamic_sampling(self, rewards, correct, group_ids):
        _, std = self.utils.calculate_baseline_and_std_per_prompt(
            group_ids[:, None], rewards, torch.ones_like(rewards), self.leave_one_out, std_rewards=correct.float()
        )
        run = self.source.run(
            "nemo_rl/algorithms/grpo.py", "dynamic_sampling", "non_zero_std_mask =", "non_zero_std_mask =", std=std
        )
        return run["non_zero_std_mask"]

    def filter(self, rewards, group_ids):  # without reward shaping
        return self.dynamic_sampling(rewards, rewards, group_ids)

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if truncated.any():
            raise NotImplementedError
        # a row's group is its prompt's token ids
        return self.advantages(rewards, prompts, how, None), self.filter(rewards, prompts)

    def penalty(self, lengths, max_length, cache_length):
        path = "nemo_rl/algorithms/reward_functions.py"
        config = self.source.defaults(path, "RewardShapingConfig")
        config.enabled, config.overlong_buffer_penalty = True, 1.0
        config.max_response_length, config.overlong_buffer_length = max_length, cache_length
        batch = {"total_reward": torch.zeros(len(lengths)), "response_token_lengths": lengths}
        return self.source.functions(path, "apply_reward_shaping").apply_reward_shaping(batch, config)["total_reward"]

    def kl(self, logprobs, reference, estimator, weights=None):
        default = self.source.defaults(LOSS, "ClippedPGLossConfig")
        clamp = default.kl_output_clamp_value if self.settings == "default" else None
        return self.utils.calculate_kl(
            logprobs, reference, estimator, output_clamp_value=clamp, importance_sampling_weights=weights
        )

    def kl_sampled(self, logprobs, reference, estimator):
        default = {"curr_logprobs_unfiltered": logprobs, "self": SimpleNamespace(use_on_policy_kl_approximation=False)}
        first = "if self.use_on_policy_kl_approximation"
        run = self.source.run(LOSS, "ClippedPGLossFn.__call__", first, "if self.use", **default)
        return self.kl(logprobs, reference, estimator, run["kl_importance_weights"])
