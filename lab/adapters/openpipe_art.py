"""OpenPipe ART 0.5.23 (wheel): statements of loss_fn, and of the advantages in tokenize.py.

Its default is CISPO with epsilon 1 and epsilon_high 4, the paper's cap, and `ppo` is a switch. Nearest: the numbers
asked for. The loss is that of its Megatron backend, a sum over tokens, which the driver divides by the step's tokens.
(Its Unsloth backend takes the mean of each microbatch.) Rows with an advantage of 0 are left out.
"""

from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token

TOKENIZE = "art/preprocessing/tokenize.py"
ZERO_VARIANCE = "art/utils/grpo.py"


class Adapter:
    settings = "nearest"
    history = interrupt = dynamic_sampling = penalty = kl = kl_sampled = None

    def __init__(self) -> None:
        self.source = Source("openpipe_art", "0.5.23")
        self.space = vars(self.source.functions("art/loss.py", "_mask_ignored_tokens", "compute_probs_corr"))
        self.space["LossOffPolicyDiagnostics"] = SimpleNamespace(from_tensors=lambda **_: None)

    def loss(self, part, step):
        if part.average != "token" or part.loss not in ("on_policy", "cispo", "clip", "tis", "icepop"):
            raise NotImplementedError
        config, options = {"ppo": part.loss in ("clip", "tis")}, part.options
        old = part.old if part.loss == "tis" else part.behaviour
        if part.loss == "tis":
            config["truncated_importance_sampling"] = options["cap"]  # it has no default
        if part.loss == "icepop":
            config["mask_prob_ratio"] = True
        if self.settings == "nearest" and options:
            if part.loss == "cispo":
                config |= {"epsilon": 1.0, "epsilon_high": options["cap"] - 1}
            elif part.loss == "icepop":
                config |= {"epsilon": 1 - options["low"], "epsilon_high": options["high"] - 1}
            else:
                config |= {"epsilon": options["low"], "epsilon_high": options["high"]}
        aligned = SimpleNamespace(
            old_logprobs=old, original_logprobs=part.behaviour, advantages=each_token(part.advantages, part.mask),
            assistant_mask=part.mask, weights=torch.ones_like(part.mask), denominator=lambda mask, reduction: 1.0,
        )  # fmt: skip
        run = self.source.run(
            "art/loss.py", "loss_fn", "old_logprobs = aligned_inputs", "reduced_policy_loss =", aligned_inputs=aligned,
            new_logprobs=part.logprobs, ref_logprobs=None, experimental_config=config, reduction="sum", **self.space,
        )  # fmt: skip
        return run["reduced_policy_loss"] / step.mask.sum() * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        if how == "batch":
            raise NotImplementedError
        equal = self.source.functions(ZERO_VARIANCE, "rewards_have_zero_variance").rewards_have_zero_variance
        result = torch.empty_like(rewards)
        for group in group_ids.unique():
            rows = (group_ids == group).nonzero()[:, 0].tolist()
            trajectories = [SimpleNamespace(reward=float(rewards[row])) for row in rows]
            name, last = "tokenize_trajectory_groups", "if not zero_variance"
            space = {"group": trajectories, "rewards_have_zero_variance": equal}
            of_group = self.source.run(TOKENIZE, name, "zero_variance =", last, **space)
            space = {key: of_group[key] for key in ("zero_variance", "reward_mean", "reward_std")}
            space["scale_rewards"] = how == "prompt"
            for row, trajectory in zip(rows, trajectories, strict=True):
                run = self.source.run(TOKENIZE, name, "advantage =", "if scale_rewards", trajectory=trajectory, **space)
                result[row] = run["advantage"]
        return result

    def filter(self, rewards, group_ids):
        return self.advantages(rewards, group_ids, "none", None) != 0  # drop_zero_advantage_trajectories

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if truncated.any():
            raise NotImplementedError
        return self.advantages(rewards, group_ids, how, None), self.filter(rewards, group_ids)
