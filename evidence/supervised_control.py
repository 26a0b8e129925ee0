"""The control that shows whose gain it is: the warm start's supervised steps, continued for as many tokens as RL.

If more demonstrations of the same kind raised the pass rate as RL does, RL would have shown nothing. This runs the
warm start's last phase (corrupted demonstrations, the same settings and the same wrong facts, fresh problems, none of
them held out) for `--tokens` taught completion tokens, and samples the held-out problems along the way exactly as an
evaluation of the run does: temperature 1, thinking interrupted at the largest budget.

    python evidence/supervised_control.py --tokens 900000 --output_dir runs/supervised
    python fit_sigmoid.py runs/demo/eval.jsonl runs/supervised/eval.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime.flags import Flags
from runtime.parts import new_interruption
from tasks.arithmetic import ChainTask
from tasks.warm_start import Demonstrator, WarmStart, supervised_steps, warm_start, warm_start_optimizer


@torch.no_grad()
def sample(model: nn.Module, task: ChainTask, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """One completion of each prompt at temperature 1 by `transformers`, up to and with the stop token."""
    longest, stop, pad = max(map(len, prompts)), task.stop_ids[0], task.tokenizer.pad_token_id
    # Left padding: every row's last prompt token is at the same place.
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])  # (N, T)
    attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])  # (N, T)
    at_temperature_1 = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ends = {"max_new_tokens": max_new_tokens, "eos_token_id": stop, "pad_token_id": pad}
    out = model.generate(input_ids=ids, attention_mask=attend, **at_temperature_1, **ends)
    completions = [row[longest:].tolist() for row in out]
    return [c[: c.index(stop) + 1] if stop in c else c for c in completions]


def evaluate(model: nn.Module, task: ChainTask, samples: int) -> dict[str, float]:
    """Pass rate on the held-out problems, `samples` each, under the interruption at 26 to 30 tokens."""
    control = new_interruption(Flags(min_budget=26, max_budget=30), task)
    problems = [problem for problem in task.held_out for _ in range(samples)]
    completions = sample(model, task, [p.prompt_ids for p in problems], control.max_budget)
    legs = {}
    for i, (problem, ids) in enumerate(zip(problems, completions, strict=True)):
        if leg := control.second_leg(problem.prompt_ids, ids, "stop" if task.stop_ids[0] in ids else "length"):
            legs[i] = leg
    answers = sample(model, task, [leg.prompt_ids for leg in legs.values()], control.answer_budget) if legs else []
    for (i, leg), answer in zip(legs.items(), answers, strict=True):
        completions[i] += leg.forced_ids + answer[: leg.max_tokens]
    correct = [task.reward(p, c)[1] for p, c in zip(problems, completions, strict=True)]
    return {
        "pass_rate": sum(correct) / len(correct),
        "n_prompts": len(task.held_out),
        "n_samples": samples,
        "interrupted": sum(bool(leg.forced_ids) for leg in legs.values()) / len(correct),
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Runs the control, prints and writes one record an evaluation, and returns the records."""
    from transformers import Qwen3ForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the warm start, the demonstrations and the sampling")
    parser.add_argument("--tokens", type=int, default=900_000, help="taught completion tokens to continue for")
    parser.add_argument("--eval_every", type=int, default=100_000, help="tokens between evaluations")
    parser.add_argument("--eval_samples", type=int, default=2, help="completions per held-out problem")
    parser.add_argument("--output_dir", default="runs/supervised", help="eval.jsonl is written here")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    settings, task = WarmStart(), ChainTask(args.seed)
    model = Qwen3ForCausalLM.from_pretrained(warm_start("runs/cache", seed=args.seed, settings=settings, report=print))
    optimizer = warm_start_optimizer(model, settings.lr)
    demonstrator = Demonstrator(settings.demonstrations, args.seed, corrupted=True, stream="control")
    folder, records = Path(args.output_dir), []
    folder.mkdir(parents=True, exist_ok=True)
    step = tokens = 0
    with open(folder / "eval.jsonl", "w") as file:
        while True:
            if tokens >= len(records) * args.eval_every or tokens >= args.tokens:
                records.append({"step": step, "tokens": tokens, **evaluate(model, task, args.eval_samples)})
                rate = records[-1]["pass_rate"]
                print(f"step {step:5d} | tokens {tokens:9d} | held-out pass rate {rate:.3f}", flush=True)
                file.write(json.dumps(records[-1]) + "\n")
                file.flush()
            if tokens >= args.tokens:
                return records
            batch = demonstrator.batch(settings.batch_size)
            step, tokens = step + 1, tokens + int((batch[1] != -100).sum())
            list(supervised_steps(model, optimizer, [batch]))


if __name__ == "__main__":
    main()
