"""TRL's GRPOTrainer on the model, problems, batches and learning rate of `train.py`: the other side of `peer.py`.

    /tmp/trl-venv/bin/python evidence/trl_side.py --model FOLDER --output_dir FOLDER

It runs in an environment of its own (`theirs` makes it) and has of ours only the task: problems, tokenizer and
reward are the same. It writes the files of `train.py`, so that one reader serves both:

    metrics.jsonl    one record a step: step, seconds (without evaluations), tokens (sampled so far)
    eval.jsonl       one record an evaluation: the same, and the held-out pass rate

What differs, and stays as TRL has it: no interruption (`--max_completion` caps a completion), no filter, a warm-up of
the learning rate that begins at 0, and `transformers`' `generate` for sampling.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ROLLOUTS = 16
ENVIRONMENT = Path("/tmp/trl-venv")
PACKAGES = ["transformers==5.19.0", "accelerate==1.15.0", "safetensors==0.8.0", "math-verify==0.9.0", "trl==1.16.0"]


def theirs(*arguments: str) -> list[str]:
    """The command line of a run of this program in TRL's environment, which is made first if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing TRL into {ENVIRONMENT}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        for packages in (["torch==2.13.0"], PACKAGES):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return [str(python), "evidence/trl_side.py", *arguments]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; defaults are the recipe's."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder of the model and its tokenizer")
    add("--dataset", default="", help="of a pretrained model; left out, the chain task of the built-in one")
    add("--held_out", type=int, default=256, help="problems of the --dataset kept for evaluation")
    add("--output_dir", required=True)
    add("--seed", type=int, default=0)
    add("--max_steps", type=int, default=130)
    add("--batch_prompts", type=int, default=32)
    add("--lr", type=float, default=5e-4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the forward pass")
    add("--max_completion", type=int, default=37, help="tokens of a completion at most")
    add("--penalty_window", type=int, default=0, help="L_cache of the overlong penalty; 0 means none")
    add("--eval_every", type=int, default=5, help="steps between evaluations; 0 means none")
    return parser.parse_args(argv)


def sample(model: Any, task: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """One completion of each prompt at temperature 1 by `transformers`, up to and with the stop token."""
    import torch

    longest, stop, pad = max(map(len, prompts)), task.stop_ids[0], task.tokenizer.pad_token_id
    # Left padding: every row's last prompt token is at the same place.
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])  # (N, T)
    attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])  # (N, T)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_new_tokens}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=attend, eos_token_id=stop, pad_token_id=pad, **options)
    completions = [row[longest:].tolist() for row in out]
    return [c[: c.index(stop) + 1] if stop in c else c for c in completions]


class Journal:
    """Counts and writes; its clock does not run while it evaluates."""

    def __init__(self, args: argparse.Namespace, task: Any):
        self.args, self.task, self.folder = args, task, Path(args.output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.off_clock, self.started = 0.0, time.monotonic()
        self.tokens = 0
        self.problems = {problem.key: problem for problem in task.train}

    def write(self, name: str, step: int, **more: float) -> None:
        """One more line of the file `name`."""
        record = {"step": step, "seconds": time.monotonic() - self.started - self.off_clock, "tokens": self.tokens}
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record | more) + "\n")

    def reward(self, completion_ids: list[list[int]], key: list[str], **_: object) -> list[float]:
        """TRL's reward function: the task's own verdict on the token ids and, if it is on, the overlong penalty on the
        right ones, as `--penalty_on correct` has it."""
        import torch

        from length_control import overlong_penalty

        lengths = [len(ids) for ids in completion_ids]
        self.tokens += sum(lengths)
        verdicts = [self.task.reward(self.problems[k], ids) for k, ids in zip(key, completion_ids, strict=True)]
        most, window = self.args.max_completion, self.args.penalty_window
        if not window:
            return [reward for reward, _ in verdicts]
        penalties = overlong_penalty(torch.tensor(lengths), most, window).tolist()
        return [reward + penalty * correct for (reward, correct), penalty in zip(verdicts, penalties, strict=True)]

    def evaluate(self, model: Any, step: int) -> None:
        """Held-out pass rate at temperature 1, off the clock."""
        began = time.monotonic()
        samples = 1 if self.args.dataset else 2  # as ours in the race
        problems = [problem for problem in self.task.held_out for _ in range(samples)]
        completions = sample(model, self.task, [problem.prompt_ids for problem in problems], self.args.max_completion)
        correct = [self.task.reward(p, c)[1] for p, c in zip(problems, completions, strict=True)]
        self.off_clock += time.monotonic() - began
        self.write("eval.jsonl", step, pass_rate=sum(correct) / len(correct))


def config(args: argparse.Namespace) -> Any:
    """ScaleRL's loss and our optimizer in TRL's words."""
    from trl import GRPOConfig

    size = args.batch_prompts * ROLLOUTS
    microbatch = min(size, 64)  # completions for each forward pass; it is faster than all 512 at once
    return GRPOConfig(
        output_dir=args.output_dir, seed=args.seed, max_steps=args.max_steps, use_cpu=True,
        bf16=args.dtype == "bfloat16",
        loss_type="cispo", epsilon_high=5.0, beta=0.0, scale_rewards="batch", num_generations=ROLLOUTS,
        per_device_train_batch_size=microbatch, gradient_accumulation_steps=size // microbatch, temperature=1.0,
        max_completion_length=args.max_completion, learning_rate=args.lr, lr_scheduler_type="constant_with_warmup",
        warmup_steps=5, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-15, weight_decay=0.01, max_grad_norm=1.0,
        optim="adamw_torch_fused", gradient_checkpointing=False, save_strategy="no", report_to="none",
        logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and writes one record a step."""
    args = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from tasks import arithmetic, data_sets

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.dataset:  # the problems and the judge that train.py has for the same words
        options = data_sets.PromptOptions(held_out=args.held_out)
        task = data_sets.load_dataset_task(args.dataset, tokenizer, options)
    else:
        task = arithmetic.ChainTask(seed=args.seed)
    journal = Journal(args, task)
    rows = [{"prompt": task.text(problem.prompt_ids), "key": problem.key} for problem in task.train]

    class Steps(TrainerCallback):
        """Called by TRL around its steps."""

        def on_train_begin(self, *_: object, model: Any, **__: object) -> None:
            journal.started = time.monotonic()
            if args.eval_every:
                journal.evaluate(model, 0)

        def on_step_end(self, arguments: object, state: Any, *_: object, model: Any, **__: object) -> None:
            journal.write("metrics.jsonl", state.global_step)
            if args.eval_every and state.global_step % args.eval_every == 0:
                journal.evaluate(model, state.global_step)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=journal.reward,
        args=config(args),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps()],
        processing_class=tokenizer,
    )
    trainer.train()
    task.close()


if __name__ == "__main__":
    main()
