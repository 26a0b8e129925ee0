"""ScaleRL in TRL's GRPOTrainer: the recipe by this repository's files; FSDP, LoRA and several hosts by TRL.

    pip install ".[trl]"
    python lab/trl_scalerl.py               # recipe.py's task in a minute or two, without a GPU
    python lab/trl_scalerl.py --vllm        # the same, sampled by TRL's vLLM; --help has more

    FP32 logits                      TRL's cast_lm_head_to_fp32; GENERATOR_ARGS for its vLLM
    forced interruption              `rollout`, with Interruption
    no positive resampling           `_generate_and_score_completions`, with PromptStream and PassRateHistory
    zero-variance filter             the same, with has_variance
    batch-level normalization        the same, with normalize_advantages
    prompt average                   the same, with aggregation_weights
    CISPO                            `_compute_loss`, with cispo
    PipelineRL                       not here: this trainer samples and trains in turns, at lag 0

PipelineRL in TRL is `trl.experimental.async_grpo`. Of 1.16.0's code we read this.
It has: a rollout worker beside the trainer; a vLLM server that takes weights in the middle of completions and keeps its
cached keys and values; a version for each sample; the generator's log-probs in the ratio.
It has not: a bound on the lag that drops nothing (samples older than `max_staleness`, 4 updates, are thrown away, one
by one and not by group); a version for each token; CISPO (its clip is PPO's); a prompt average (each microbatch's mean
weighs the same); `rollout_func`, which the interruption needs.

SIMPLIFIED. Text only. A generation batch is one optimizer step. TRL's own options of the loss (loss_type, epsilon,
beta, scale_rewards, vllm_importance_sampling_*) change nothing here. Where no group has variance the loss is 0, and the
optimizer steps by its momentum. vLLM rounds the head to its dtype, and TRL's trainer does not (fp32_head.py). With LoRA
on a model whose embeddings are tied TRL's cast_lm_head_to_fp32 raises. FSDP and vLLM as a server were not run.
"""

import argparse
import json
import random
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.models import unwrap_model_for_generation

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "bench")]
from filters import PassRateHistory, has_variance
from fp32_head import GENERATOR_ARGS
from length_control import Interruption
from losses import aggregation_weights, cispo, normalize_advantages, summarize_metrics
from tasks.arithmetic import DISCOVER_POOL, FIRST_MODELS, ChainTask
from tasks.prompts import Problem, PromptStream

STATE = "scalerl.json"  # in each checkpoint: who is retired, and how far the prompts have come


class ScaleRLTrainer(GRPOTrainer):
    """N rows (all processes), n of this process, G rollouts a prompt, T completion positions.

    A completion is right if the first reward function gives more than 0; a penalty comes second. With vLLM as a server
    start it with `--hf-overrides '{"head_dtype": "float32"}' --logprobs-mode processed_logprobs`.
    """

    def __init__(self, *args, interruption: Interruption, threshold: float = 0.9, **kwargs) -> None:
        self.interruption = interruption
        self.history = PassRateHistory(threshold)
        self.sampled = 0  # tokens, for training, by all processes
        vllm_generation.LLM = partial(vllm_generation.LLM, **GENERATOR_ARGS)
        super().__init__(*args, rollout_func=self.rollout, **kwargs)
        if not self.args.cast_lm_head_to_fp32:
            raise ValueError("set cast_lm_head_to_fp32=True: ScaleRL has FP32 logits in trainer and generator.")
        if self.args.steps_per_generation != self.args.gradient_accumulation_steps:
            raise ValueError("leave steps_per_generation at gradient_accumulation_steps: the averages are of one step.")
        keys = [Problem(str(i), (), None) for i in range(len(self.train_dataset))]
        self.prompts = PromptStream(keys, self.args.seed, self.history.retired)

    def rollout(self, prompts: list, _trainer: GRPOTrainer) -> dict[str, list]:
        """A completion of each prompt in two legs, as length_control.py draws them. `env_mask` is 0 on the phrase."""
        control = self.interruption
        rng = random.Random(f"{self.args.seed} {self.state.global_step} {self.accelerator.process_index}")
        prompt_ids, *_ = self._tokenize_prompts(prompts)
        first = []
        for prompt, (ids, logprobs) in zip(prompt_ids, self.sample(prompt_ids, control.max_budget), strict=True):
            budget = control.draw_budget(rng)
            ids, logprobs = ids[:budget], logprobs[:budget]
            reason = "stop" if ids[-1] in self.eos_token_ids else "length"
            first.append((ids, logprobs, control.second_leg(prompt, ids, reason)))
        again = [leg.prompt_ids for *_, leg in first if leg]
        # Every process samples twice, even for nothing: under FSDP and with a server the others wait for it.
        second = iter(self.sample(again or prompt_ids[:1], control.answer_budget))
        output = {"prompt_ids": prompt_ids, "completion_ids": [], "logprobs": [], "env_mask": []}
        for ids, logprobs, leg in first:
            forced, more, more_logprobs = [], [], []
            if leg:
                forced = leg.forced_ids
                more, more_logprobs = (column[: leg.max_tokens] for column in next(second))
            output["completion_ids"].append([*ids, *forced, *more])
            output["logprobs"].append([*logprobs, *[0.0] * len(forced), *more_logprobs])
            output["env_mask"].append(control.mask(len(ids), len(forced), len(more)))
        return output

    def sample(self, prompts: list[list[int]], limit: int) -> list[tuple[list[int], list[float]]]:
        """Up to `limit` token ids and their log-probs for each prompt, by TRL's vLLM or Hugging Face's generate, which
        keeps all logits in memory: it is for small models."""
        if self.use_vllm:
            self.vllm_generation.max_completion_length = limit
            _, completions, logprobs, _ = self.vllm_generation.generate(prompts, None, num_generations=1)
            chosen = [[token[0] for token in row] for row in logprobs]
            return list(zip(map(list, completions), chosen, strict=True))
        self.generation_config.update(max_new_tokens=limit, output_scores=True, return_dict_in_generate=True)
        padded = self.processing_class.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        gathered = unwrap_model_for_generation(self.model_wrapped, self.accelerator)
        with torch.no_grad(), gathered as model, self._dist.summon_full_params(self.model_wrapped, recurse=False):
            training = model.training
            model.eval()
            result = model.generate(**padded.to(model.device), generation_config=self.generation_config)
            model.train(training)
            logprobs = model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)  # (n, T)
        rows = []
        for ids, values in zip(result.sequences[:, -len(result.scores) :].tolist(), logprobs.tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(ids) if token in self.eos_token_ids), len(ids))
            rows.append((ids[:length], values[:length]))
        return rows

    def _calculate_rewards(self, *inputs):
        self.by_function = super()._calculate_rewards(*inputs)  # (N, number of reward functions)
        return self.by_function

    def _generate_and_score_completions(self, inputs):
        training = self.model.training
        processes, n = self.accelerator.num_processes, len(inputs)
        G = self.num_generations if training else self.num_generations_eval
        mine = slice(self.accelerator.process_index * n, (self.accelerator.process_index + 1) * n)
        if training:
            # Not those of TRL's data loader, which is a batch ahead: prompts would be drawn before they can retire.
            drawn = list(islice(self.prompts, n * processes // G))
            inputs = [self.train_dataset[int(prompt.key)] for prompt in drawn for _ in range(G)][mine]
        batch = super()._generate_and_score_completions(inputs)
        rewards = (self.by_function * self.reward_weights.to(self.by_function.device)).nansum(1)  # (N,)
        group_ids = torch.arange(len(rewards), device=rewards.device) // G  # (N,)
        mask = batch["completion_mask"] * batch["tool_mask"]  # (n, T)
        all_masks = self.accelerator.gather(self.accelerator.pad_across_processes(mask, dim=1))  # (N, longest T)
        if training:
            self.sampled += int(all_masks.sum())
            for prompt, right in zip(drawn, (self.by_function[:, 0] > 0).view(-1, G).tolist(), strict=True):
                self.history.update(prompt.key, right)
            if self.history.n_retired == len(self.train_dataset):
                self.control.should_training_stop = True  # no prompt is left
        keep = has_variance(rewards, group_ids)  # (N,)
        advantages = torch.zeros_like(rewards)  # (N,)
        advantages[keep] = normalize_advantages(rewards[keep], group_ids[keep])
        # Times the processes, because DDP and FSDP divide by them. TRL does not divide by the accumulation steps.
        weights = aggregation_weights(all_masks * keep[:, None], group_ids) * processes  # (N, longest T)
        # Before TRL shuffles the rows and cuts the batch into microbatches
        return batch | {"advantages": advantages[mine], "token_weights": weights[mine, : mask.shape[1]]}

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]  # (n, T) of a microbatch
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logprobs, *_ = self._get_per_token_logps_and_entropies(model, ids, attended, mask.shape[1])  # (n, T)
        token_loss, metrics = cispo(logprobs, inputs["sampling_per_token_logps"], inputs["advantages"], mask)
        for name, value in summarize_metrics(metrics).items():
            self._metrics["train" if self.model.training else "eval"][f"cispo/{name}"].append(value)
        return (inputs["token_weights"] * token_loss).sum()

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            state = {
                "history": self.history.state_dict(),
                "prompts": self.prompts.state_dict(),
                "sampled": self.sampled,
            }
            (folder / STATE).write_text(json.dumps(state))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = json.loads(Path(checkpoint, STATE).read_text())
            self.history.load_state_dict(state["history"])
            self.prompts.load_state_dict(state["prompts"])
            self.sampled = state["sampled"]


class Curve(TrainerCallback):
    """Prints a line for each evaluation."""

    def on_evaluate(self, args, state, control, metrics, **_):
        right = (metrics["eval_reward"] + 1) / 2  # rewards are 1 and -1
        retired = self.trainer.history.n_retired
        tokens = self.trainer.sampled
        print(f"step {state.global_step:2}  {tokens:6,} tokens  right {right:.2f}  retired {retired}", flush=True)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true", help="sample with TRL's vLLM")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--output_dir", default="runs/trl_scalerl", help="checkpoints, one every 32 steps")
    parser.add_argument("--resume", action="store_true", help="from its last checkpoint")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    task = ChainTask(flags.seed, DISCOVER_POOL)
    folder = str(FIRST_MODELS / "discover")
    if flags.vllm and not torch.cuda.is_available():
        from benchmark import VLLMEngine, mend_vllm  # what TRL's vLLM lacks on a CPU

        mend_vllm(VLLMEngine(folder, task.stop_ids, max_model_len=64))
    problems = {problem.key: problem for problem in (*task.train, *task.held_out)}

    def rows(problems: list[Problem]) -> Dataset:
        return Dataset.from_list([{"prompt": task.text(p.prompt_ids), "key": p.key} for p in problems])

    def right(completion_ids: list[list[int]], key: list[str], **_) -> list[float]:
        return [task.score(problems[k], [ids])[0][0] for k, ids in zip(key, completion_ids, strict=True)]

    config = GRPOConfig(
        output_dir=flags.output_dir, max_steps=flags.steps, seed=flags.seed, use_cpu=not torch.cuda.is_available(),
        learning_rate=3.5e-4, adam_beta2=0.95, adam_epsilon=1e-15, weight_decay=0.01, max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup", warmup_steps=4, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=128 // flags.microbatches, gradient_accumulation_steps=flags.microbatches,
        num_generations=16, cast_lm_head_to_fp32=True, use_vllm=flags.vllm, vllm_importance_sampling_correction=False,
        eval_strategy="steps", eval_steps=8, eval_on_start=True, per_device_eval_batch_size=256, num_generations_eval=1,
        save_steps=32, logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    control = Interruption(14, 18, 4, task.phrase_ids, task.end_of_thinking_ids)
    trainer = ScaleRLTrainer(
        folder, right, config, rows(task.train), rows(task.held_out), processing_class=task.tokenizer,
        interruption=control, callbacks=[curve := Curve()],
    )  # fmt: skip
    curve.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=flags.resume)


if __name__ == "__main__":
    main()
