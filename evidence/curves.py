"""The curves of finished sweeps in one small file, from which every table of RESULTS.md is made again.

    python evidence/curves.py runs/ablate --output docs/results/curves.csv.gz   # run folders -> the file
    make refit                                                               # the file -> docs/results/

One row is one evaluation of one run. `flags` are those that differ from THEN, the defaults of train.py when the first
of these runs was made, so that the file stays true when defaults change; `n` is problems times
samples of the evaluation; `best` and `worst` are the shares of problems with a correct sample and with no wrong one.
The columns of LOGGED are means over the steps since the evaluation before it (`lag_max` is the largest), and empty
where nothing is logged. A run that failed or did not end says so in `state`, and has a row even if it was never
evaluated. Runs that the file holds already stay, unless a folder has them again.
"""

import argparse
import csv
import gzip
import io
import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sweep import OWN, as_word

from isocompute import of_k
from runtime.flags import DEFAULTS, with_new_names
from runtime.run_folder import Folder

OF_THE_RUN = ("run", "comparison", "variant", "seed", "flags", "state")
OF_THE_EVALUATION = ("step", "tokens", "device_hours", "flops", "pass_rate", "n")
OF_K = ("best", "worst")  # of all samples of a problem; empty without eval_counts.jsonl
LOGGED = {  # column -> key of metrics.jsonl; `kept` is the share of the rollouts that the filters leave to train on
    "lag": "lag_mean", "lag_max": "lag_max", "ess": "ess", "gap": "logprob_gap", "entropy": "entropy",
    "interrupted": "interrupted", "truncated": "truncated", "kept": "kept",
    "clipped_positive": "capped_positive", "clipped_negative": "capped_negative",
}  # fmt: skip
COLUMNS = (*OF_THE_RUN, *OF_THE_EVALUATION, *OF_K, *LOGGED)
DIGITS = {"step": ".0f", "tokens": ".0f", "n": ".0f", "device_hours": ".6g"}  # the others: .4g
DIGITS |= dict.fromkeys(("pass_rate", *OF_K), ".5f")
STOPPED = (0, 130, 143, -2, -15)  # exit codes of a run that did not fail: done, or stopped by Ctrl-C or SIGTERM

Row = dict[str, str]
THEN = DEFAULTS | {"dataset": "chain", "max_steps": 130, "eval_every": 5, "batch_prompts": 32, "min_budget": 26,
                   "max_budget": 30, "lr": 5e-4, "max_num_seqs": 512}  # fmt: skip


class InputError(ValueError):
    """Bad input, said in one sentence with the place and the fix."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One run. `points`: column -> (N,) of its N evaluations, NaN where nothing is logged."""

    run: str
    comparison: str
    variant: str
    seed: int
    flags: dict[str, str]  # name -> value as the command line has it
    state: str  # "finished", "unfinished" or "failed (exit code 1)"
    points: dict[str, np.ndarray]

    finished = property(lambda self: self.state == "finished")

    def evals(self) -> list[dict[str, float]]:
        """Records as `fit_sigmoid.curve` reads them."""
        columns = {name: self.points[name] for name in OF_THE_EVALUATION}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [row | {"n_prompts": row["n"], "n_samples": 1} for row in rows]


# ------------------------------------------------------------------------------------------------- from run folders


def differing(config: Mapping[str, Any]) -> dict[str, str]:
    """The flags of a run that differ from THEN, by name."""
    config = DEFAULTS | with_new_names(dict(config))
    names = sorted(name for name in config if name in DEFAULTS and name not in OWN)
    return {name: as_word(config[name]) for name in names if config[name] != THEN[name]}


def logged(steps: Sequence[Mapping[str, Any]], rollouts: int) -> dict[str, float]:
    """The columns of LOGGED over some steps of `rollouts` completions each."""
    steps = [{"kept": step.get("rows", 0) / rollouts} | dict(step) for step in steps]
    found = {column: [step[key] for step in steps if key in step] for column, key in LOGGED.items()}
    return {
        column: float(max(some) if column == "lag_max" else np.mean(some)) for column, some in found.items() if some
    }


def rows_of(path: Path, output: Path) -> list[Row]:
    """The rows of the run in OUTPUT/COMPARISON/VARIANT/seed-N."""
    folder, name = Folder(path), path.relative_to(output)
    config = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    codes = [r["exit_code"] for r in Folder(output).read("sweep.jsonl") if r["folder"] == str(name)]
    failed = f"failed (exit code {codes[-1]})" if codes and codes[-1] not in STOPPED else "unfinished"
    comparison, variant, seed = name.parts
    run = {
        "run": str(name), "comparison": comparison, "variant": variant, "seed": seed.removeprefix("seed-"),
        "flags": shlex.join(word for flag, value in differing(config).items() for word in (f"--{flag}", value)),
        "state": "finished" if (path / "finished.json").exists() else failed,
    }  # fmt: skip
    flags = DEFAULTS | config
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    counts = {record["step"]: record for record in folder.read("eval_counts.jsonl")}
    rows, before = [], 0
    for record in folder.read("eval.jsonl"):
        since = [step for step in steps if before < step["step"] <= record["step"]]
        values = {**record, "n": record["n_prompts"] * record["n_samples"]} | dict.fromkeys(OF_K)
        if counted := counts.get(record["step"]):
            values |= of_k(counted["correct"], counted["n_samples"], counted["n_samples"])
        values |= dict.fromkeys(LOGGED) | logged(since, flags["batch_prompts"] * flags["rollouts"])
        rows.append(run | {column: _text(column, values[column]) for column in COLUMNS[len(OF_THE_RUN) :]})
        before = record["step"]
    return rows or [dict.fromkeys(COLUMNS, "") | run]


def _text(column: str, value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:{DIGITS.get(column, '.4g')}}"


def collect(output: Path) -> list[Row]:
    """The rows of all runs of the sweeps in OUTPUT, those that failed before they wrote anything too."""
    made = {output / record["folder"] for record in Folder(output).read("sweep.jsonl")}
    found = made | {config.parent for config in output.glob("*/*/seed-*/config.json")}
    return [row for path in sorted(found) for row in rows_of(path, output)]


# --------------------------------------------------------------------------------------------------------- the file


def curves_of(rows: Iterable[Row]) -> list[Curve]:
    """Rows as curves, one for each run, in the order of comparison, variant and seed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["run"], []).append(row)
    curves = []
    for some in groups.values():
        words, first = shlex.split(some[0]["flags"]), some[0]
        flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        some = [row for row in some if row["step"]]
        points = {c: np.array([float(row[c] or "nan") for row in some]) for c in COLUMNS[len(OF_THE_RUN) :]}
        names = (first[name] for name in ("run", "comparison", "variant"))
        curves.append(Curve(*names, int(first["seed"]), flags, first["state"], points))
    return sorted(curves, key=lambda curve: (curve.comparison, curve.variant, curve.seed))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `write_rows` wrote. InputError for a file that cannot be read, or has other columns."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), tuple(reader.fieldnames or ())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no readable .csv.gz ({error}); write it with evidence/curves.py.") from error
    if columns != COLUMNS:
        missing, more = [c for c in COLUMNS if c not in columns], [c for c in columns if c not in COLUMNS]
        said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(more)}, unknown here"] * bool(more)
        raise InputError(
            f"{path} {' and '.join(said) or 'has its columns in another order'}; write it anew with evidence/curves.py."
        )
    return rows


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Writes the file: the same rows give the same bytes, in whatever order they come."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: (row["run"], int(row["step"] or 0))))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:  # no name, no date
        packed.write(text.getvalue().encode())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="curves.py", description=__doc__.split("\n")[0])
    parser.add_argument("outputs", nargs="+", type=Path, metavar="OUTPUT", help="--output of evidence/ablate.py")
    parser.add_argument("--output", type=Path, default=Path("docs/results/curves.csv.gz"), metavar="FILE")
    args = parser.parse_args(argv)
    try:
        new = [collect(output) for output in args.outputs]
        for output, rows in zip(args.outputs, new, strict=True):
            if not rows:
                raise InputError(f"{output} holds no COMPARISON/VARIANT/seed-N of ablate.py; name its --output.")
        names = [run for rows in new for run in {row["run"] for row in rows}]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"{', '.join(twice)} is in two of the folders; name one of them.")
        old = [row for row in read_rows(args.output) if row["run"] not in names] if args.output.exists() else []
    except InputError as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2
    rows = [*old, *(row for some in new for row in some)]
    write_rows(rows, args.output)
    for curve in (curves := curves_of(rows)):
        if not curve.finished:
            print(f"{curve.state}: {curve.run}, {curve.points['step'].size} evaluations")
    done, kept = sum(curve.finished for curve in curves), len({row["run"] for row in old})
    print(f"{len(curves)} runs, {done} of them finished, {kept} kept from before; {len(rows)} rows: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
