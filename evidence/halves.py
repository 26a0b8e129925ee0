"""The two halves of the graded task as two data sets, with its starting model, for `downstream` and `two-sets`.

    python evidence/halves.py --output runs/halves      # easy.jsonl, hard.jsonl and model/

They take the way of one's own data: --dataset, --eval_dataset and the reward `exact`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tasks import warm_start
from tasks.arithmetic import graded_task


def rows(difficulty: str) -> list[dict[str, str]]:
    """The 2,560 problems of a half, in the order in which they were drawn."""
    task = graded_task(difficulty=difficulty)
    problems = [*task.train, *task.held_out]
    return [{"prompt": task.text(problem.prompt_ids), "answer": str(problem.answer)} for problem in problems]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the files; what is there already is written over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/halves"), metavar="FOLDER")
    args = parser.parse_args(argv)
    settings = warm_start.warm_start_of("m", warm_start.DEMONSTRATIONS["graded"])
    made = warm_start.warm_start(args.output / "cache", settings=settings, report=print)
    shutil.copytree(made, args.output / "model", dirs_exist_ok=True)
    for difficulty in ("easy", "hard"):
        text = "".join(json.dumps(row) + "\n" for row in rows(difficulty))
        (args.output / f"{difficulty}.jsonl").write_text(text)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
