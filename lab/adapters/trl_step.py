"""TRL through its own step: each microbatch goes through training_step of a real GRPOTrainer, which must be installed.

Completions and the generator's log-probs come by `rollout_func`. TRL makes masks, weights and microbatches of them, and
runs backward. Two things are put in: the advantages of a case, and a model whose forward pass gives the case's
log-probs (the old ones where no gradient is wanted). What backward leaves at these log-probs is compared. There is one
process; microbatches have the same number of rows, in TRL's own random order.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lab.adapters.trl_grpo import MODES, equal_rows, kind_of, set_nearest

WRITTEN_FOR = "1.16.0"
TOKENIZER = Path(__file__).resolve().parents[2] / "tasks" / "first_models" / "discover"
NUMBERS = ("epsilon_low", "epsilon_high", "off_policy_mask_threshold", "importance_sampling_level")
NUMBERS += tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))


class Trainer(trl.GRPOTrainer):
    """With the advantages of a case."""

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs) | {"advantages": self.step.advantages}


class Adapter:
    settings = "nearest"

    def __init__(self) -> None:
        note = "" if trl.__version__ == WRITTEN_FOR else f"the adapter was written for {WRITTEN_FOR}"
        self.source = SimpleNamespace(version=trl.__version__, note=note, path=Path(trl.__file__))
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
        with tempfile.TemporaryDirectory() as folder:
            config = trl.GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                per_device_train_batch_size=2, num_generations=2,
            )  # fmt: skip
            self.trainer = Trainer(
                model, lambda prompts, **_: [0.0 for _ in prompts], config, Dataset.from_list([{"prompt": "1"}]),
                processing_class=tokenizer, rollout_func=self.rollout,
            )  # fmt: skip
        self.trainer.model.forward = self.forward
        self.trainer.use_vllm, self.trainer._last_loaded_step = True, self.trainer.state.global_step
        self.numbers = {name: getattr(self.trainer, name) for name in NUMBERS}

    def gradient(self, step):
        if len(step.layout) > 1:
            raise NotImplementedError
        equal_rows(step)
        trainer, rows, parts = self.trainer, len(step.mask), len(step.layout[0])
        vars(trainer).update(self.numbers)
        trainer.loss_type = kind_of(step)
        if step.loss == "gspo":
            trainer.importance_sampling_level = "sequence"
        trainer.vllm_importance_sampling_mode = MODES.get(step.loss, trainer.vllm_importance_sampling_mode)
        if self.settings == "nearest":
            set_nearest(trainer, step)
        trainer.step, trainer.num_generations, trainer.max_completion_length = step, rows, int(step.constant)
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = parts
        trainer.args.per_device_train_batch_size = rows // parts
        trainer.current_gradient_accumulation_steps = parts
        trainer._step, trainer._buffered_inputs = 0, None
        self.step, self.leaf = step, step.logprobs.detach().clone().requires_grad_()
        trainer.model.train()
        for _ in range(parts):
            trainer.training_step(trainer.model, [{"prompt": "1"} for _ in range(rows)], None)
        return 0 - self.leaf.grad

    def rollout(self, prompts, trainer):
        """A prompt is one token, the number of its row."""
        rows, length = self.step.mask.shape
        return {
            "prompt_ids": [[row] for row in range(rows)],
            "completion_ids": [[1 for _ in range(length)] for _ in range(rows)],
            "logprobs": self.step.behaviour.tolist(),
            "env_mask": self.step.mask.long().tolist(),
        }

    def forward(self, input_ids, **_):
        table = self.leaf if torch.is_grad_enabled() else self.step.old
        logprobs = table[input_ids[:, 0]]
        return SimpleNamespace(log_probs=logprobs, entropy=torch.zeros_like(logprobs))
