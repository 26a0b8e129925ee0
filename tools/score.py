"""Scores a data set by the model that is to be trained: how often does it solve each problem? And splits it by that.

    python tools/score.py train.jsonl --output scored --model MODEL --eval_samples 16 ...   # and what train.py takes

writes into the folder, with a column `pass_rate` in every row, `easy_first.jsonl` (all that can be used, the easiest
first), `easy.jsonl` (solved in at least --easy of the samples, but not always) and `hard.jsonl` (less often, but at
least once). Problems that are always or never solved have no gradient yet; a line says how many there are.

WHAT FOR. IsoCompute's advice differs for easy and hard problems (isocompute.py). A curriculum: `train.py --dataset
scored/easy_first.jsonl --prompt_order file`. And a data set of which half is never solved wants another model first.

One data set, a file or an id of the hub. The same prompt twice is one problem. The samples are those of an evaluation:
at --temperature, with the largest thinking budget.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runtime.flag_checks import check_flags
from runtime.flags import Flags, UsageError, parse_flags
from runtime.parts import new_parts
from runtime.run_folder import Progress
from tasks.code.answers import JsonObject
from tasks.rows import (
    PROMPT_COLUMNS,
    field_of,
    find_column,
    key_of,
    parse_data_sets,
    prompt_messages,
    read_objects,
    text_of,
)


def pass_rates(flags: Flags) -> dict[str, float]:
    """{key of the problem: share of its `eval_samples` completions that are right}, of all usable problems."""
    parts = new_parts(flags, Progress(random.Random(flags.seed)))
    try:
        parts.generator.start(parts.trainer.weights, 0)
        generator, problems = parts.generator.on_main, [*parts.task.train, *parts.task.held_out]
        groups = generator.result_of(generator.evaluate(problems, flags.eval_samples))
    finally:
        parts.close()
    right = ([rollout.correct for rollout in group] for group in groups)
    return {problem.key: sum(some) / len(some) for problem, some in zip(problems, right, strict=True)}


def scored(flags: Flags, rates: Mapping[str, float]) -> list[JsonObject]:
    """The rows that have a rate, with it, the easiest first; equal ones in the order of the data set."""
    [data] = parse_data_sets(flags.dataset)
    rows, _ = read_objects(data)
    column = find_column(rows, flags.prompt_column, PROMPT_COLUMNS, data.name, "prompt_column")
    found: dict[str, JsonObject] = {}
    for row in rows:
        key = key_of(text_of(prompt_messages(field_of(row, column)) or []))
        if key in rates and key not in found:  # of equal prompts the first
            found[key] = row | {"pass_rate": rates[key]}
    return sorted(found.values(), key=lambda row: -row["pass_rate"])


def split(rows: Sequence[JsonObject], easy: float) -> dict[str, list[JsonObject]]:
    """File name -> its rows."""
    varied = [row for row in rows if 0 < row["pass_rate"] < 1]
    hard = [row for row in varied if row["pass_rate"] < easy]
    return {"easy_first": list(rows), "easy": [row for row in varied if row["pass_rate"] >= easy], "hard": hard}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 2 usage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("dataset", help="a .jsonl or .parquet file, or NAME:CONFIG:SPLIT of the hub")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files; those of the same names go")
    parser.add_argument("--easy", type=float, default=0.5, help="pass rate from which a problem is easy (0.5)")
    args, rest = parser.parse_known_args(argv)
    with TemporaryDirectory() as folder:
        mine = ["--dataset", args.dataset, "--output_dir", folder, "--max_steps", "0", "--held_out", "1"]
        try:
            flags = parse_flags(["--eval_samples", "16", *rest, *mine], __doc__ or "")
            check_flags(flags)
            rows = scored(flags, pass_rates(flags))
        except (UsageError, ValueError) as error:
            print(f"score.py: {error}", file=sys.stderr)
            return 2
    files = split(rows, args.easy)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, some in files.items():
        (args.output / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    rates, counts = [row["pass_rate"] for row in rows], ", ".join(f"{name}.jsonl {len(files[name])}" for name in files)
    print(
        f"{len(rows)} problems, {flags.eval_samples} samples each: pass rate {sum(rates) / len(rates):.3f}, "
        f"{rates.count(1)} always solved, {rates.count(0)} never; {counts}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
