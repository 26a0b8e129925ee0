"""The evaluations of all published runs, from which every table is made again.

    python lab/evidence/runs.py runs/ablate       # adds the runs of ablate.py to lab/results/

curves.csv.gz has a row for each evaluation of each run; lab/results/README.md explains its columns. runs.csv says
which run is which seed of which variant, since comparisons share runs. A run that is there already is replaced.
"""

import argparse
import gzip
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from runtime.flags import DEFAULTS

RESULTS = ROOT / "lab" / "results"
OF_THE_RUN = ("run", "comparison", "variant", "seed", "flags", "state")
MEASURED = ("step", "tokens", "device_hours", "flops", "pass_rate", "n", "best", "worst", "set_1", "set_2")
LOGGED = {  # column -> key of metrics.jsonl; `kept` is the share of the rollouts that the filters leave to train on
    "lag": "lag_mean",
    "lag_max": "lag_max",
    "ess": "ess",
    "gap": "logprob_gap",
    "entropy": "entropy",
    "interrupted": "interrupted",
    "truncated": "truncated",
    "kept": "rows",
    "clipped_positive": "capped_positive",
    "clipped_negative": "capped_negative",
    "mismatch": "mismatch_rms",
    "staleness": "staleness_rms",
}
NUMBERS = (*MEASURED, *LOGGED)
COLUMNS = (*OF_THE_RUN, *NUMBERS)
DIGITS = {"step": ".0f", "tokens": ".0f", "n": ".0f", "device_hours": ".6g"}
DIGITS |= dict.fromkeys(("pass_rate", "best", "worst", "set_1", "set_2"), ".5f")
MEMBER = ["comparison", "variant", "seed"]
OF_ONE_CALL = ("output_dir", "overwrite", "resume", "seed")
# `flags` are those that differ from the defaults of the day when the first run was made.
THEN = DEFAULTS | {
    "dataset": "chain",
    "max_steps": 130,
    "eval_every": 5,
    "batch_prompts": 32,
    "min_budget": 26,
    "max_budget": 30,
    "lr": 5e-4,
    "max_num_seqs": 512,
    "k": 8,
    "max_sampled_tokens": 0,
    "engine": "vllm",
    "rollouts": 16,
}


@dataclass(frozen=True, eq=False)
class Run:
    """One run. `points`: column -> (N,) of its N evaluations, NaN where nothing was logged."""

    name: str  # COMPARISON/VARIANT/seed-N
    comparison: str
    variant: str
    seed: int
    flags: str
    state: str  # "finished", "unfinished" or "failed (exit code 1)"
    points: dict[str, np.ndarray]

    @property
    def rates(self) -> np.ndarray:
        """(N,) pass rates."""
        return self.points["pass_rate"]


# ------------------------------------------------------------------------------------------------- from run folders


def records(path: Path) -> list[dict]:
    """The whole lines of a .jsonl file; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a last line without its end is still being written


def state_of(folder: Path) -> str:
    """What ablate.py noted beside the folder of a run."""
    note = folder.with_name(f"{folder.name}.json")
    code = json.loads(note.read_text())["exit_code"] if note.exists() else None
    if code == 0:
        return "finished"
    if code is None or code in (130, 143) or code < 0:  # under way, or stopped by a signal
        return "unfinished"
    return f"failed (exit code {code})"


def flags_of(config: Mapping[str, object]) -> str:
    """The flags of a run that differ from THEN, as words."""
    words = []
    for name, value in sorted(config.items()):
        if name in DEFAULTS and name not in OF_ONE_CALL and value != THEN[name]:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += [f"--{name}", text]
    return shlex.join(words)


def rows_of(folder: Path) -> pd.DataFrame:
    """The rows of the run in OUTPUT/COMPARISON/VARIANT/seed-N; one without numbers if it was never evaluated."""
    comparison, variant, seed = folder.parts[-3:]
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    run = {
        "run": f"{comparison}/{variant}/{seed}",
        "comparison": comparison,
        "variant": variant,
        "seed": seed.removeprefix("seed-"),
        "flags": flags_of(config),
        "state": state_of(folder),
    }
    steps = pd.DataFrame(record for record in records(folder / "metrics.jsonl") if "step" in record)
    steps = steps.reindex(columns=["step", *LOGGED.values()]).astype(float)
    rows = []
    before = 0
    for record in records(folder / "eval.jsonl"):
        values = record | {"n": record["n_prompts"] * record["n_samples"]}
        if "correct" in record:
            correct = np.array(record["correct"])
            values["best"] = np.mean(correct > 0)
            values["worst"] = np.mean(correct == record["n_samples"])
        rates_of_sets = [figures["pass_rate"] for figures in record.get("data_sets", {}).values()]
        values |= zip(("set_1", "set_2"), rates_of_sets, strict=False)
        since = steps[steps["step"].between(before, record["step"], inclusive="right")]
        values |= {column: since[key].mean() for column, key in LOGGED.items()}
        values["lag_max"] = since["lag_max"].max()
        values["kept"] = since["rows"].fillna(0).mean() / (config["batch_prompts"] * config["rollouts"])
        rows.append(run | {column: as_text(column, values.get(column)) for column in NUMBERS})
        before = record["step"]
    return pd.DataFrame(rows or [run], columns=COLUMNS).fillna("")


def as_text(column: str, value: float | None) -> str:
    """A number as the file has it; empty where there is none."""
    if value is None or not math.isfinite(value):
        return ""
    return format(value, DIGITS.get(column, ".4g"))


def collect(output: Path) -> pd.DataFrame:
    """The rows of all runs of ablate.py in OUTPUT."""
    folders = [note.with_suffix("") for note in output.glob("*/*/seed-*.json")]
    return pd.concat([pd.DataFrame(columns=COLUMNS), *(rows_of(folder) for folder in sorted(folders))])


# --------------------------------------------------------------------------------------------------------- the files


def read_rows(path: Path = RESULTS / "curves.csv.gz") -> pd.DataFrame:
    """The rows of the file, as text."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def runs_of(rows: pd.DataFrame) -> dict[str, Run]:
    """{name: run} of rows, in the order of comparison, variant and seed."""
    runs = []
    for (name, comparison, variant, seed, flags, state), group in rows.groupby(list(OF_THE_RUN), sort=False):
        evaluated = group[group["step"] != ""]
        points = {column: evaluated[column].replace("", "nan").to_numpy(float) for column in NUMBERS}
        runs.append(Run(name, comparison, variant, int(seed), flags, state, points))
    runs.sort(key=lambda run: (run.comparison, run.variant, run.seed))
    return {run.name: run for run in runs}


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Writes the file: the same rows give the same bytes, in whatever order they come."""
    in_order = rows.assign(number=pd.to_numeric(rows["step"]).fillna(0)).sort_values(["run", "number"])
    text = in_order.to_csv(columns=COLUMNS, index=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # no name and no date in the header


def members(results: Path = RESULTS) -> dict[str, dict[str, list[Run]]]:
    """{comparison: {variant: its finished runs}} of everything published; the baseline comes first."""
    runs = runs_of(read_rows(results / "curves.csv.gz"))
    groups: dict[str, dict[str, list[Run]]] = {}
    for row in pd.read_csv(results / "runs.csv").itertuples():
        variants = groups.setdefault(row.comparison, {})
        variants.setdefault(row.variant, []).append(runs[row.run])
    return groups


def publish(output: Path, results: Path = RESULTS) -> None:
    """Adds the runs of OUTPUT to both files, and prints which of them did not finish."""
    rows = collect(output)
    runs = runs_of(rows).values()
    file = results / "curves.csv.gz"
    old = read_rows(file)
    write_rows(pd.concat([old[~old["run"].isin(rows["run"])], rows]), file)
    finished = [run for run in runs if run.state == "finished"]
    new = pd.DataFrame(
        [(run.comparison, run.variant, run.seed, run.name) for run in finished], columns=[*MEMBER, "run"]
    )
    listed = pd.concat([pd.read_csv(results / "runs.csv"), new])
    listed.drop_duplicates(MEMBER, keep="last").to_csv(results / "runs.csv", index=False)
    for run in runs:
        if run.state != "finished":
            print(f"{run.state}: {run.name}, {run.rates.size} evaluations")
    print(f"{len(runs)} runs, {len(finished)} of them finished: {file}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="curves.py", description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="--output of lab/evidence/ablate.py")
    args = parser.parse_args(argv)
    if collect(args.output).empty:
        parser.error(f"{args.output} holds no COMPARISON/VARIANT/seed-N of ablate.py; name its --output")
    publish(args.output)


if __name__ == "__main__":
    main()
