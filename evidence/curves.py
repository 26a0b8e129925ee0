"""The evaluations of finished sweeps in one small file, from which every table of RESULTS.md is made again.

    python evidence/curves.py runs/ablate --output docs/results/curves.csv.gz   # run folders -> the file
    make refit                                                                  # the file -> docs/results/

One row is one evaluation of one run. `flags` are those that differ from THEN, the defaults of train.py when the first
of these runs was made, so that the file stays true when defaults change or flags go; `n` is problems times samples of
the evaluation; `best` and `worst` are the shares of problems with a correct sample and with no wrong one; `set_1` and
`set_2` are the pass rates of data sets apart. The columns of LOGGED are means over the steps since the evaluation
before (`lag_max` is the largest), and empty where nothing is logged. A run that failed or did not end says so in
`state`, and has a row even if it was never evaluated. Runs that the file holds already stay, unless a folder has them
again.
"""

import argparse
import gzip
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from isocompute import of_k
from runtime.flags import DEFAULTS, UsageError
from runtime.run_folder import Folder

OF_THE_RUN = ("run", "comparison", "variant", "seed", "flags", "state")
OF_THE_EVALUATION = ("step", "tokens", "device_hours", "flops", "pass_rate", "n")
OF_K = ("best", "worst")  # of all samples of a problem; empty without eval_counts.jsonl
OF_SETS = ("set_1", "set_2")  # pass rates of data sets apart, in the order of the flags; empty where there is one
LOGGED = {  # column -> key of metrics.jsonl; `kept` is the share of the rollouts that the filters leave to train on
    "lag": "lag_mean", "lag_max": "lag_max", "ess": "ess", "gap": "logprob_gap", "entropy": "entropy",
    "interrupted": "interrupted", "truncated": "truncated", "kept": "rows",
    "clipped_positive": "capped_positive", "clipped_negative": "capped_negative",
    "mismatch": "mismatch_rms", "staleness": "staleness_rms",
}  # fmt: skip
NUMBERS = (*OF_THE_EVALUATION, *OF_K, *OF_SETS, *LOGGED)
COLUMNS = (*OF_THE_RUN, *NUMBERS)
NO_ROWS = pd.DataFrame(columns=COLUMNS)
DIGITS = {"step": ".0f", "tokens": ".0f", "n": ".0f", "device_hours": ".6g"}  # the others: .4g
DIGITS |= dict.fromkeys(("pass_rate", *OF_K, *OF_SETS), ".5f")
STOPPED = (0, 130, 143, -2, -15)  # exit codes of a run that did not fail: done, or stopped by Ctrl-C or SIGTERM
OWN = ("output_dir", "overwrite", "resume", "seed")  # of a run, not of what is compared
# Of flags that have another default today, or that rows of comparisons.py give at their value of then.
THEN = DEFAULTS | {
    "dataset": "chain", "max_steps": 130, "eval_every": 5, "batch_prompts": 32, "min_budget": 26, "max_budget": 30,
    "lr": 5e-4, "max_num_seqs": 512, "k": 8, "max_ready": 0, "max_sampled_tokens": 0, "eval_problems": 256,
    "engine": "vllm", "rollouts": 16, "probe_every": 5,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Evaluations:
    """One run. `points`: column -> (N,) of its N evaluations, NaN where nothing is logged."""

    run: str
    comparison: str
    variant: str
    seed: int
    flags: dict[str, str]  # name -> value as the command line has it
    state: str  # "finished", "unfinished" or "failed (exit code 1)"
    points: dict[str, np.ndarray]

    finished = property(lambda self: self.state == "finished")
    rates = property(lambda self: self.points["pass_rate"])  # (N,)


def of_set(run: Evaluations, column: str) -> Evaluations:
    """The run as one of OF_SETS saw it; all sets of a run are evaluated with as many problems."""
    sets = run.flags["dataset"].count(",") + 1  # of those, whose problems `n` counts
    return replace(run, points=run.points | {"pass_rate": run.points[column], "n": run.points["n"] / sets})


# ------------------------------------------------------------------------------------------------- from run folders


def as_word(value: object) -> str:
    """A flag's value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def differing(config: Mapping[str, object]) -> dict[str, str]:
    """The flags of a run that differ from THEN, by name; `config` may leave out what has today's default."""
    flags = sorted((DEFAULTS | dict(config)).items())
    return {name: as_word(value) for name, value in flags if name not in OWN and value != THEN.get(name)}


def rows_of(path: Path, output: Path) -> pd.DataFrame:
    """The rows of the run in OUTPUT/COMPARISON/VARIANT/seed-N."""
    folder, name = Folder(path), path.relative_to(output)
    config = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    codes = [r["exit_code"] for r in Folder(output).read("sweep.jsonl") if r["folder"] == str(name)]
    failed = f"failed (exit code {codes[-1]})" if codes and codes[-1] not in STOPPED else "unfinished"
    flags = shlex.join(word for flag, value in differing(config).items() for word in (f"--{flag}", value))
    state = "finished" if (path / "finished.json").exists() else failed
    comparison, variant, seed = name.parts
    run = (str(name), comparison, variant, seed.removeprefix("seed-"), flags, state)
    rollouts = (DEFAULTS | config)["batch_prompts"] * (DEFAULTS | config)["rollouts"]  # of a step
    records = [record for record in folder.read("metrics.jsonl") if "step" in record]
    steps = pd.DataFrame(records).reindex(columns=["step", *LOGGED.values()]).astype(float)
    counts = {record["step"]: record for record in folder.read("eval_counts.jsonl")}
    rows, before = [], 0
    for record in folder.read("eval.jsonl"):
        values = {**record, "n": record["n_prompts"] * record["n_samples"]} | dict.fromkeys((*OF_K, *OF_SETS))
        values |= zip(OF_SETS, record.get("pass_rate_of", {}).values(), strict=False)
        if counted := counts.get(record["step"]):
            values |= of_k(counted["correct"], counted["n_samples"], counted["n_samples"])
        since = steps[steps["step"].between(before, record["step"], inclusive="right")]
        values |= {column: since[key].mean() for column, key in LOGGED.items()}
        values |= {"lag_max": since["lag_max"].max(), "kept": since["rows"].fillna(0).mean() / rollouts}
        rows.append((*run, *(_text(column, values[column]) for column in NUMBERS)))
        before = record["step"]
    return pd.DataFrame(rows or [(*run, *[""] * len(NUMBERS))], columns=COLUMNS)


def _text(column: str, value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:{DIGITS.get(column, '.4g')}}"


def collect(output: Path) -> pd.DataFrame:
    """The rows of all runs of the sweeps in OUTPUT, those that failed before they wrote anything too."""
    made = {output / record["folder"] for record in Folder(output).read("sweep.jsonl")}
    found = made | {config.parent for config in output.glob("*/*/seed-*/config.json")}
    return pd.concat([NO_ROWS, *(rows_of(path, output) for path in sorted(found))])


# --------------------------------------------------------------------------------------------------------- the file


def curves_of(rows: pd.DataFrame) -> list[Evaluations]:
    """Rows as runs, in the order of comparison, variant and seed."""
    found = []
    for of_run, some in rows.groupby(list(OF_THE_RUN), sort=False):
        name, comparison, variant, seed, flags, state = of_run
        words = shlex.split(flags)
        given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        numbers = some.loc[some["step"] != "", list(NUMBERS)].replace("", "nan").astype(float)
        points = {column: numbers[column].to_numpy() for column in NUMBERS}
        found.append(Evaluations(name, comparison, variant, int(seed), given, state, points))
    return sorted(found, key=lambda run: (run.comparison, run.variant, run.seed))


def read_rows(path: Path) -> pd.DataFrame:
    """The rows of a file that `write_rows` wrote, as text. UsageError if it cannot be read or has other columns."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, compression="gzip")
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{path} is no readable .csv.gz ({error}); write it with evidence/curves.py.") from error
    if list(rows.columns) != list(COLUMNS):
        raise UsageError(f"{path} has other columns than {', '.join(COLUMNS)}; write it anew with evidence/curves.py.")
    return rows


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Writes the file: the same rows give the same bytes, in whatever order they come."""
    order = rows.assign(at=pd.to_numeric(rows["step"]).fillna(0)).sort_values(["run", "at"])
    path.parent.mkdir(parents=True, exist_ok=True)  # no name and no date are in the header
    path.write_bytes(gzip.compress(order.to_csv(columns=COLUMNS, index=False).encode(), mtime=0))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="curves.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, metavar="OUTPUT", help="--output of evidence/ablate.py")
    parser.add_argument("--output", type=Path, default=Path("docs/results/curves.csv.gz"), metavar="FILE")
    args = parser.parse_args(argv)
    try:
        new = collect(args.runs)
        if new.empty:
            raise UsageError(f"{args.runs} holds no COMPARISON/VARIANT/seed-N of ablate.py; name its --output.")
        old = read_rows(args.output) if args.output.exists() else NO_ROWS
    except UsageError as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2
    old = old[~old["run"].isin(new["run"])]
    rows = pd.concat([old, new])
    write_rows(rows, args.output)
    for run in (runs := curves_of(rows)):
        if not run.finished:
            print(f"{run.state}: {run.run}, {run.rates.size} evaluations")
    done, kept = sum(run.finished for run in runs), old["run"].nunique()
    print(f"{len(runs)} runs, {done} of them finished, {kept} kept from before; {len(rows)} rows: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
