"""The control that shows whose gain it is: the warm start's supervised steps, continued for as many tokens as RL.

If more demonstrations of the same kind raised the pass rate as RL does, RL would have shown nothing. This runs the
warm start's last phase (corrupted demonstrations, the same settings and the same wrong facts, fresh problems, none of
them held out) for `--tokens` taught completion tokens, and samples the held-out problems along the way exactly as an
evaluation of the run does: temperature 1, thinking interrupted at its budget.

    python tools/supervised_control.py --tokens 900000 --output_dir runs/supervised
    python fit_sigmoid.py runs/demo/eval.jsonl runs/supervised/eval.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tasks.chain import ChainTask
from tasks.demonstrations import Demonstrator
from tasks.warm_start import WarmStart, supervised_steps, warm_start, warm_start_optimizer


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_id: int, pad_id: int
) -> list[list[int]]:
    """One completion of each prompt at temperature 1 by `transformers`, up to and with the stop token."""
    longest = max(map(len, prompts))
    # Left padding: every row's last prompt token is at the same place.
    ids = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts])  # (N, T)
    attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])  # (N, T)
    out = model.generate(
        input_ids=ids,
        attention_mask=attend,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_id,
        pad_token_id=pad_id,
    )
    completions = [row[longest:].tolist() for row in out]
    return [c[: c.index(stop_id) + 1] if stop_id in c else c for c in completions]


def evaluate(model: Any, task: ChainTask, samples: int, thinking_budget: int, answer_budget: int) -> dict[str, float]:
    """Pass rate on the held-out problems, `samples` each, with the thinking interrupted at its budget."""
    problems = [problem for problem in task.held_out for _ in range(samples)]
    stop, end, pad = task.stop_ids[0], task.end_of_thinking_ids[0], task.tokenizer.pad_token_id
    completions = sample(model, [p.prompt_ids for p in problems], thinking_budget, stop, pad)
    # A row needs a second leg unless it stopped by itself: with the phrase if it is still thinking.
    cut = [i for i, c in enumerate(completions) if stop not in c]
    interrupted = [i for i in cut if end not in completions[i]]
    for i in interrupted:
        completions[i] += task.phrase_ids
    if cut:
        legs = sample(model, [[*problems[i].prompt_ids, *completions[i]] for i in cut], answer_budget, stop, pad)
        for i, leg in zip(cut, legs, strict=True):
            completions[i] += leg
    correct = [task.reward(p, c)[1] for p, c in zip(problems, completions, strict=True)]
    return {
        "pass_rate": sum(correct) / len(correct),
        "n_prompts": len(task.held_out),
        "n_samples": samples,
        "interrupted": len(interrupted) / len(correct),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the warm start, the demonstrations and the sampling")
    parser.add_argument("--tokens", type=int, default=900_000, help="taught completion tokens to continue for")
    parser.add_argument("--eval_every", type=int, default=100_000, help="tokens between evaluations")
    parser.add_argument("--eval_samples", type=int, default=2, help="completions per held-out problem")
    parser.add_argument("--held_out", type=int, default=512, help="held-out problems")
    parser.add_argument("--lr", type=float, default=WarmStart.lr, help="learning rate, the warm start's by default")
    parser.add_argument("--thinking_budget", type=int, default=30, help="tokens before the interruption")
    parser.add_argument("--answer_budget", type=int, default=4, help="tokens after it")
    parser.add_argument("--cache_dir", default="runs/cache", help="where warm starts are cached")
    parser.add_argument("--output_dir", default="runs/supervised", help="eval.jsonl is written here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Runs the control, prints and writes one record an evaluation, and returns the records."""
    from transformers import Qwen3ForCausalLM

    args = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    settings = WarmStart()
    task = ChainTask(args.seed, held_out_size=args.held_out)
    start = warm_start(args.cache_dir, seed=args.seed, settings=settings, report=print)
    model = Qwen3ForCausalLM.from_pretrained(start)
    optimizer = warm_start_optimizer(model, args.lr)
    demonstrator = Demonstrator(settings.demonstrations, args.seed, corrupted=True, stream="control")
    folder, records = Path(args.output_dir), []
    folder.mkdir(parents=True, exist_ok=True)
    step = tokens = 0
    with open(folder / "eval.jsonl", "w") as file:
        while True:
            if tokens >= len(records) * args.eval_every or tokens >= args.tokens:
                found = evaluate(model, task, args.eval_samples, args.thinking_budget, args.answer_budget)
                records.append({"step": step, "tokens": tokens, **found})
                print(f"step {step:5d} | tokens {tokens:9d} | held-out pass rate {found['pass_rate']:.3f}", flush=True)
                file.write(json.dumps(records[-1]) + "\n")
                file.flush()
            if tokens >= args.tokens:
                return records
            batch = demonstrator.batch(settings.batch_size)
            step, tokens = step + 1, tokens + int((batch[1] != -100).sum())
            list(supervised_steps(model, optimizer, [batch]))


if __name__ == "__main__":
    main()
