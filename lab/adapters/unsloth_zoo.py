"""unsloth_zoo 2026.10.9 (26 October 2026): grpo_compute_loss, which unsloth puts under TRL's trainer.

Nearest: `loss_type=cispo epsilon_high=5` with the generator's log-probs as the old ones (`rollout_logps_as_old`),
which makes the cap that of π / π_gen. Default: the numbers of its function and TRL's mode. Advantages are TRL's
(trl_grpo.py). Its prompt average and its zero-variance filter stand in unsloth, not here. All microbatches have the
same number of rows.
"""

import torch

from lab.adapters.sources import Source, equal_rows

LOSSES = {"sample": "grpo", "token": "dapo", "constant": "dr_grpo"}
MODES = {"tis": "token_truncate", "icepop": "token_mask"}


class Adapter:
    settings = "nearest"
    history = interrupt = None

    def __init__(self) -> None:
        self.source = Source("unsloth_zoo", "2026.10.9")
        path = "unsloth_zoo/rl_replacements.py"
        self.compute_loss = self.source.functions(path, "grpo_compute_loss").grpo_compute_loss

    def loss(self, part, step):
        kind = "cispo" if part.loss == "cispo" and part.average == "token" else LOSSES.get(part.average)
        refused = part.loss in ("dppo", "m2po", "deepseek") or (part.loss == "cispo" and kind != "cispo")
        if kind is None or refused:  # the mask of DeepSeek is a method of TRL
            raise NotImplementedError
        if part.average in ("sample", "constant"):
            equal_rows(step)
        settings = {
            "loss_type": kind,
            "importance_sampling_level": "sequence" if part.loss == "gspo" else "token",
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "num_items_in_batch": step.mask.sum(),
            "num_processes": part.ranks,
            "current_gradient_accumulation_steps": part.parts,
            "steps_per_generation": part.parts,
            "max_completion_length": int(part.constant),
        }
        if part.loss in MODES:
            settings["vllm_importance_sampling_mode"] = MODES[part.loss]
        old, options = part.old, part.options
        if self.settings == "nearest" and options:
            if part.loss == "cispo":
                settings["epsilon_high"] = options["cap"]
            elif part.loss != "icepop":
                settings["epsilon_low"], settings["epsilon_high"] = options["low"], options["high"]
            if part.loss in MODES:
                settings["vllm_importance_sampling_clip_max"] = options.get("cap", options["high"])
                settings["vllm_importance_sampling_clip_min"] = options["low"] if part.loss == "icepop" else None
            else:
                old = part.behaviour
                settings |= {"rollout_logps_as_old": True, "vllm_importance_sampling_correction": False}
        ids = torch.zeros_like(part.mask, dtype=torch.long)
        columns = None, part.logprobs, old, part.behaviour, ids, part.mask
        return self.compute_loss(*columns, 0.0, part.advantages, **settings)[0]

    def kl(self, logprobs, reference, estimator, correction=False):
        """The loss of one token with beta 1 and A = 0, token by token."""
        if estimator != "k3":
            raise NotImplementedError

        def term(t):
            column = logprobs[:, t : t + 1]
            one = torch.ones_like(column)
            columns = reference[:, t : t + 1], column, column.detach(), None, one.long(), one
            return self.compute_loss(*columns, 1.0, torch.zeros(len(column)), use_bias_correction_kl=correction)[0]

        return torch.stack([term(t) for t in range(logprobs.shape[1])])[None]

    def kl_sampled(self, logprobs, reference, estimator):
        return self.kl(logprobs, reference, estimator, correction=self.settings == "nearest")
