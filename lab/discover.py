"""What a run of the task `discover` learned: pass rate and length, evaluation by evaluation, and two completions.

python lab/discover.py runs/discover
"""

import json
import sys
from pathlib import Path


def read(path: Path) -> list[dict]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(folder: Path) -> None:
    """A line for each evaluation, then a problem's completion that was wrong, and its last one that was right."""
    for record in read(folder / "eval.jsonl"):
        bar = "#" * round(40 * record["pass_rate"])
        tokens, length, rate = record["tokens"], record["mean_length"], record["pass_rate"]
        print(f"{tokens:>9,} tokens   length {length:4.1f}   right {rate:.2f} {bar}")
    samples = read(folder / "samples.jsonl")
    wrong = {sample["prompt"]: sample for sample in reversed(samples) if sample["reward"] < 0}  # the earliest
    right = {sample["prompt"]: sample for sample in samples if sample["reward"] > 0}  # the latest
    for prompt in [prompt for prompt in right if prompt in wrong][:1]:
        print(f"\n{prompt}\n    before: {wrong[prompt]['completion']}\n    after:  {right[prompt]['completion']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
