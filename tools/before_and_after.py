"""The same held-out problems, answered by a model as it was and as a finished run of train.py left it.

    python tools/before_and_after.py runs/real-sums

Answers are judged as in the run: programs that the model writes are run, shut in (docs/code.md); a reward of your own,
and other flags that run code, must be given again (`--reward MODULE:FUNCTION`).

Both take the likeliest token every time, so that they differ by their weights alone, under the run's length control
with its largest budget. An evaluation samples at --temperature instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from length_control import Interruption
from runtime.flags import BUILT_IN, UsageError, parse_flags
from runtime.parts import load_task, new_interruption

Sampler = Callable[[Sequence[int], int], list[int]]  # (prompt ids, most tokens) -> completion ids


@torch.no_grad()
def likeliest(model: Any, stop_ids: Sequence[int], prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy completion of a prompt, up to and with a stop token."""
    ids = torch.tensor([list(prompt_ids)])  # (1, T)
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
        eos_token_id=list(stop_ids), pad_token_id=stop_ids[0],
    )  # fmt: skip
    return out[0, len(prompt_ids) :].tolist()


def completion(
    sample: Sampler, stop_ids: Sequence[int], prompt_ids: Sequence[int], control: Interruption | None, max_tokens: int
) -> list[int]:
    """One completion of at most `max_tokens`; under the interruption in two legs, each with its own limit."""
    if control is None:
        return sample(prompt_ids, max_tokens)
    ids = sample(prompt_ids, control.max_budget)
    leg = control.second_leg(prompt_ids, ids, "stop" if ids[-1] in stop_ids else "length")
    return [*ids, *leg.forced_ids, *sample(leg.prompt_ids, leg.max_tokens)] if leg else ids


def first_of_each(problems: Sequence[Any], count: int) -> list[Any]:
    """The first `count` problems of each data set, in their order."""
    seen: dict[str, list[Any]] = {}
    for problem in problems:
        seen.setdefault(problem.source, []).append(problem)
    return [problem for some in seen.values() for problem in some[:count]]


def answers(run: Path, count: int, given: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of the first `count` held-out problems of each data set of a run: `question`, `answer`, and of `before` and
    `after` the completion and whether it is right. `given`: flags of train.py. Raises UsageError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    flags = parse_flags(["--resume", str(run), "--unsafe_code", "true", *given], "")
    if flags.dataset in BUILT_IN or not (run / "model" / "config.json").is_file():
        raise UsageError(f"{run} holds no finished run on a --dataset; let the run come to its end.")
    task = load_task(flags)
    try:
        problems, control = first_of_each(task.held_out, count), new_interruption(flags, task)
        records = [{"question": task.question(p), "answer": p.answer} for p in problems]
        for side, folder in (("before", flags.model), ("after", run / "model")):
            sample = partial(likeliest, AutoModelForCausalLM.from_pretrained(folder), task.stop_ids)
            for problem, record in zip(problems, records, strict=True):
                limit = flags.max_budget + flags.answer_budget
                ids = completion(sample, task.stop_ids, problem.prompt_ids, control, limit)
                record[side] = task.tokenizer.decode(ids, skip_special_tokens=True), task.reward(problem, ids)[1]
    finally:
        task.close()
    return records


def report(records: Sequence[dict[str, Any]]) -> str:
    """Each problem with both completions below it, in one line each."""
    lines = []
    for record in records:
        answer = "" if isinstance(record["answer"], dict) else f"    ({record['answer']})"  # a dict has tests
        lines.append(f"{one_line(record['question'], 130)}{answer}")
        for side in ("before", "after"):
            text, right = record[side]
            lines.append(f"    {side:<8}{'right' if right else 'wrong':<7}{one_line(text)}")
    return "\n".join(lines)


def one_line(text: str, most: int = 90) -> str:
    """`text` with its white space made equal, cut to `most` characters."""
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1] + "…"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; a folder that cannot be read ends with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--problems", type=int, default=5, help="held-out problems of each data set to answer (5)")
    args, given = parser.parse_known_args(argv)
    try:
        print(report(answers(args.run, args.problems, given)))
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
