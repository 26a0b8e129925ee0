"""Are retired prompts still solved? From runs with --review, in which some of them come again.

    python evidence/retired.py runs/ablate/review/review-0.2/seed-* --output docs/results/retired.csv

The file has a row for each review: the run, the step, how many steps before the prompt retired, and how many of its
rollouts were right. evidence/staleness.py makes a table of it.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from filters import PassRateHistory
from runtime.run_folder import Folder


def reviews(records: Iterable[dict], threshold: float) -> Iterator[tuple[int, int, int, int]]:
    """(step, steps since the prompt retired, right rollouts, rollouts) of each review, from a run's groups.jsonl."""
    history, retired = PassRateHistory(threshold), dict[str, int]()
    for record in records:
        for key, right, rollouts in record["groups"]:
            if key in retired:
                yield record["step"], record["step"] - retired[key], right, rollouts
            else:
                history.update(key, [1] * right + [0] * (rollouts - right))
                if history.retired(key):
                    retired[key] = record["step"]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs with --review")
    parser.add_argument("--output", type=Path, default=Path("docs/results/retired.csv"), metavar="FILE")
    args = parser.parse_args(argv)
    rows = [
        (f"{run.parent.name}/{run.name}", *review)
        for run in args.runs
        for review in reviews(Folder(run).read("groups.jsonl"), 0.9)
    ]
    if not rows:
        parser.error("no retired prompt came again in these runs; give folders of runs with --review above 0")
    pd.DataFrame(rows, columns=["run", "step", "age", "right", "rollouts"]).to_csv(args.output, index=False)
    print(f"{len(rows)} reviews: {args.output}")


if __name__ == "__main__":
    main()
