"""slime 624b824 (21 August 2026): statements of policy_loss_function, reducers of cp_utils.py, rewards, filter, KL.

Nearest: `--advantage-estimator cispo --eps-clip 1 --eps-clip-high 4 --use-rollout-logprobs`. Default: the clips of .2
and the other numbers of utils/arguments.py, typed here; old log-probs are the trainer's. Rows are not padded. Megatron
divides by the number of microbatches, or by the sum of `num_tokens`, and averages over ranks.
"""

from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, at_the_end, each_token

LOSS = "slime/backends/megatron_utils/loss.py"
UTILS = "slime/utils/ppo_utils.py"
NO_PARALLEL = SimpleNamespace(get_context_parallel_world_size=lambda: 1)


class Adapter:
    settings = "nearest"
    history = interrupt = penalty = None

    def __init__(self) -> None:
        self.source = source = Source("slime", "624b824")
        names = ("compute_opsm_mask", "compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss")
        self.space = vars(source.functions(UTILS, *names, "compute_approx_kl"))
        path = "slime/backends/megatron_utils/cp_utils.py"
        self.space |= vars(source.functions(path, "get_sum_of_sample_mean", mpu=NO_PARALLEL))
        self.space |= vars(source.functions(LOSS, "vanilla_tis_function", "icepop_function"))

    def loss(self, part, step):
        if part.average not in ("sample", "token") or part.loss in ("dppo", "m2po"):
            raise NotImplementedError
        nearest, options = self.settings == "nearest" and part.options, part.options
        rollout = nearest and part.loss in ("cispo", "clip", "gspo")
        args = SimpleNamespace(
            advantage_estimator=part.loss if part.loss in ("cispo", "gspo") else "grpo",
            eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None, tis_clip=2.0, tis_clip_low=0.0, opsm_delta=1e-4,
            use_opsm=part.loss == "deepseek", use_tis=part.loss in ("tis", "icepop", "deepseek"),
            get_mismatch_metrics=False, calculate_per_token_loss=part.average == "token",
            custom_tis_function_path="icepop" if part.loss == "icepop" else None,
        )  # fmt: skip
        if nearest and part.loss == "cispo":
            args.eps_clip, args.eps_clip_high = 1.0, options["cap"] - 1
        elif nearest and part.loss == "icepop":
            args.tis_clip_low, args.tis_clip = options["low"], options["high"]
        elif nearest and part.loss == "deepseek":
            args.opsm_delta, args.tis_clip = options["high"], 1e9
        elif nearest:
            args.eps_clip, args.eps_clip_high = options["low"], options["high"]
            args.tis_clip = options.get("cap", args.tis_clip)
        lengths = [max(int(row.nonzero().max()) + 1, 1) if row.any() else 1 for row in part.mask]

        def rows(column):
            return [row[:n] for row, n in zip(column, lengths, strict=True)]

        masks, logprobs, train = rows(part.mask), rows(part.logprobs), rows(part.old)
        old = rows(part.behaviour) if rollout else train
        if part.loss == "deepseek":  # its ratio to the mask's policy is that to the generator
            old = rows(part.behaviour)
            args.use_tis, args.eps_clip, args.eps_clip_high = False, 1e9, 1e9
        advantages = rows(each_token(part.advantages, part.mask))
        batch = {
            "advantages": advantages,
            "loss_masks": masks,
            "rollout_log_probs": rows(part.behaviour),
            "rollout_mask_sums": [mask.sum() for mask in masks],
        }
        mean = self.space["get_sum_of_sample_mean"]
        reducer = mean(lengths, lengths, masks, batch["rollout_mask_sums"], args.calculate_per_token_loss)
        loss = self.source.run(
            LOSS, "policy_loss_function", "if args.use_opsm", "pg_loss = pg_loss_reducer", args=args, batch=batch,
            full_log_probs=logprobs, full_old_log_probs=old, log_probs=logprobs, old_log_probs=old,
            advantages=torch.cat(advantages), train_log_probs_for_tis=train, total_lengths=lengths,
            response_lengths=lengths, sum_of_sample_mean=reducer,
            load_function=lambda name: self.space["icepop_function"], **self.space,
        )["pg_loss"]  # fmt: skip
        if part.average == "sample":
            return loss / len(step.rows) * part.ranks
        batch = {"loss_masks": step.mask}
        run = self.source.run(LOSS, "loss_function", "num_tokens =", "num_tokens =", batch=batch)
        return loss / run["num_tokens"] * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        ids, sizes = torch.unique_consecutive(group_ids, return_counts=True)
        if len(ids) != len(group_ids.unique()):
            raise NotImplementedError
        args = SimpleNamespace(
            advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=how == "prompt",
            n_samples_per_prompt=int(sizes[0]), rollout_batch_size=len(ids),
        )  # fmt: skip
        samples = [SimpleNamespace(get_reward_value=lambda args, reward=float(reward): reward) for reward in rewards]
        trainer = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        path = "slime/ray/rollout.py"
        process = self.source.functions(path, "RolloutManager._post_process_rewards")._post_process_rewards
        advantages = torch.tensor(process(trainer, samples)[1])
        if how != "batch":
            return advantages
        _, mask = at_the_end(rewards, lengths)  # --normalize-advantages
        path = "slime/utils/distributed_utils.py"
        alone = SimpleNamespace(all_reduce=lambda *_, **__: None)
        whiten = self.source.functions(path, "distributed_masked_whiten", dist=alone).distributed_masked_whiten
        return whiten(each_token(advantages, mask), mask)[:, 0]

    def dynamic_sampling(self, rewards, correct, group_ids):
        """By --reward-key, which may be correctness."""
        path = "slime/rollout/filter_hub/dynamic_sampling_filters.py"
        check = self.source.functions(path, "check_reward_nonzero_std", DynamicFilterOutput=SimpleNamespace)
        kept = {}
        for group in group_ids.unique().tolist():
            values = correct[group_ids == group].tolist()
            samples = [SimpleNamespace(get_reward_value=lambda args, value=value: value) for value in values]
            kept[group] = bool(check.check_reward_nonzero_std(None, samples).keep)
        return [kept[group] for group in group_ids.tolist()]

    def filter(self, rewards, group_ids):
        return self.dynamic_sampling(rewards, rewards, group_ids)

    def kl(self, logprobs, reference, estimator):
        return self.space["compute_approx_kl"](logprobs, reference, estimator)

    def kl_sampled(self, logprobs, reference, estimator):
        ratio = (logprobs - logprobs.detach()).exp() if self.settings == "nearest" else None  # --use-unbiased-kl
        return self.space["compute_approx_kl"](logprobs, reference, estimator, ratio)
