"""What a run of the task `discover` learned: pass rate and length, evaluation by evaluation, and two completions.

python tools/discover.py runs/discover
"""

import json
import sys
from pathlib import Path


def read(path: Path) -> list[dict]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(folder: Path) -> None:
    """A line for each evaluation, then the first completion that was logged and the last that is right."""
    for record in read(folder / "eval.jsonl"):
        bar = "#" * round(40 * record["pass_rate"])
        tokens, length, rate = record["tokens"], record["mean_length"], record["pass_rate"]
        print(f"{tokens:>9,} tokens   length {length:4.1f}   right {rate:.2f} {bar}")
    samples = read(folder / "samples.jsonl")
    right = [sample for sample in samples if sample["reward"] > 0]
    for name, sample in (("before", samples[0]), *(("after", sample) for sample in right[-1:])):
        print(f"\n{name}\n    {sample['prompt']}\n    {sample['completion']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
