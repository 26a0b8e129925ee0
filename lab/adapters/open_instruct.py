"""open-instruct e6c3044 (20 August 2026): grpo_utils.py, statements of data_loader.py, its loop's masked_mean.

Nearest: `loss_fn=cispo clip_higher=4 use_vllm_logprobs`, one minibatch a step. Default: `loss_fn` and its own numbers.
Its loop divides by the tokens of the step, or by a constant, and multiplies by the ranks.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch

from lab.adapters.sources import Source, each_token, group_size

UTILS = "open_instruct/grpo_utils.py"
LOADER = "open_instruct/data_loader.py"


class Adapter:
    settings = "nearest"
    interrupt = dynamic_sampling = penalty = None

    def __init__(self) -> None:
        self.source = source = Source("open_instruct", "e6c3044")
        self.mean = source.functions("open_instruct/rl_utils.py", "masked_mean").masked_mean
        self.estimate_kl = source.functions("open_instruct/model_utils.py", "estimate_kl").estimate_kl
        names = ("_rho_drop_masks", "_sequence_level_mean", "RhoCorrection", "mask_logprobs")
        self.utils = source.functions(
            UTILS, *names, "compute_grpo_loss", "compute_rho_correction", dataclass=dataclass, field=field,
            GRPOLossType=SimpleNamespace(dapo="dapo", cispo="cispo"), INVALID_LOGPROB=1.0,
        )  # fmt: skip

    def loss(self, part, step):
        if part.average not in ("token", "constant") or part.loss in ("gspo", "dppo", "m2po", "deepseek"):
            raise NotImplementedError
        config, options = self.source.defaults(UTILS, "GRPOExperimentConfig"), part.options
        config.loss_fn = "cispo" if part.loss == "cispo" else "dapo"
        old = part.old
        if self.settings == "nearest" and options:
            if part.loss in ("cispo", "clip"):
                old = part.behaviour  # use_vllm_logprobs
            if part.loss == "cispo":
                config.clip_higher = options["cap"] - 1
            elif part.loss == "icepop":
                config.rho_clamp_upper_bound = 0.0  # none
                config.rho_mask_lower_bound, config.rho_mask_upper_bound = options["low"], options["high"]
            else:
                config.clip_lower, config.clip_higher = options["low"], options["high"]
                config.rho_clamp_upper_bound = options.get("cap", 2.0)
        trained = part.mask.bool()
        new, old, vllm = (self.utils.mask_logprobs(x, trained) for x in (part.logprobs, old, part.behaviour))
        advantages = each_token(part.advantages, part.mask)
        weights = self.utils.compute_rho_correction(old, vllm, trained, advantages, config).weights
        terms, *_ = self.utils.compute_grpo_loss(new, (new - old).exp(), advantages, None, config, weights)
        whole = step.mask.sum().item() if part.average == "token" else len(step.mask) * step.constant
        return self.mean(terms, part.mask, None, whole) * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        if how == "batch":
            raise NotImplementedError
        return self.of_scores(rewards, group_size(group_ids), how)

    def of_scores(self, rewards, size, how):
        kind = {"prompt": "standard", "none": "centered"}[how]
        config = SimpleNamespace(num_samples_per_prompt_rollout=size, advantage_normalization_type=kind)
        run = self.source.run(
            LOADER, "DataPreparationActor", "scores = np.array", "if self.config.advantage_normalization_type",
            self=SimpleNamespace(config=config), batch=SimpleNamespace(scores=rewards.tolist()),
        )  # fmt: skip
        return torch.tensor(run["advantages"], dtype=torch.float32)

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        if how == "batch":
            raise NotImplementedError
        size = group_size(group_ids)
        keep = torch.tensor(self.filter(rewards, group_ids)) & (truncated == 0)  # both leave before the advantages
        advantages = torch.zeros_like(rewards)
        advantages[keep] = self.of_scores(rewards[keep], size, how)
        return advantages, keep

    def group(self, scores, prompt, loader):
        """What its loader makes of one group: None if it is left out."""
        result = SimpleNamespace(reward_scores=scores, index=prompt)
        return self.source.run(
            LOADER, "process_group", "percent_solved =", "if filter_zero_std_samples", result=result,
            max_possible_score=1.0, filter_zero_std_samples=True, no_resampling_pass_rate=0.9, iter_dataloader=loader,
        )  # fmt: skip

    def filter(self, rewards, group_ids):
        loader = SimpleNamespace(exclude_index=lambda prompt: None)
        kept = {int(g): self.group(rewards[group_ids == g].tolist(), 0, loader) for g in group_ids.unique()}
        return [kept[int(g)] is not None for g in group_ids]

    def history(self, visits):
        methods = ("exclude_index", "state_dict", "load_state_dict")
        loader = self.source.functions(LOADER, *(f"HFDataLoader.{name}" for name in methods))
        state = {"epoch": 0, "batches_processed": 0, "excluded_indices": []}
        for prompt, correct in visits:
            data = SimpleNamespace()
            data.reshuffle = lambda data=data: setattr(data, "_epoch", data._epoch + 1)
            loader.load_state_dict(data, json.loads(json.dumps(state)))
            data.exclude_index = partial(loader.exclude_index, data)
            self.group(correct, prompt, data)
            state = loader.state_dict(data)
        return state["excluded_indices"]

    def kl(self, logprobs, reference, estimator):
        ratio = (logprobs - logprobs.detach()).exp()
        return self.estimate_kl((logprobs - reference).clamp(-40.0, 40.0), ratio)[int(estimator[1]) - 1]

    def kl_sampled(self, logprobs, reference, estimator):
        if estimator != "k1":
            raise NotImplementedError
        ratio = (logprobs - logprobs.detach()).exp()  # kl_estimator=3
        return self.estimate_kl((logprobs - reference).clamp(-40.0, 40.0), ratio)[3]
