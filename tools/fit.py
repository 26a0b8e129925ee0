"""Fits the logs of other frameworks: a reader around `forecast.py`, which itself reads `eval.jsonl` alone.

    python tools/fit.py log.csv --x gpu_hours --y eval/acc --scale 0.01 --samples 500 --fit-until 0.5
    python tools/fit.py checkpoint-500/trainer_state.json    # TRL: eval_reward against step
    python tools/fit.py run.jsonl --y mean@1 --samples 1319  # verl: val-core/openai/gsm8k/reward/mean@1

A file is CSV (as spreadsheets, wandb and TensorBoard write it), JSON lines, what verl prints (`step:7 - name:0.5`), or
one JSON document: a list, or an object that has a list under `log_history`. The names of nested records are joined by
"/", without verl's `data`. Name a column in full, or by its end after a "/" or after the " - " that follows the name
of a wandb run. Records without the reward are left out, and of equal records one counts.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fit_sigmoid
import forecast

REWARDS = ("pass_rate", "eval_reward", "Value")  # ours, TRL's, TensorBoard's
STEPS = ("Step", "_step")  # TensorBoard's, wandb's
HINTS = {  # words of an error: the flag that helps
    "compute starts at": "--x-start first",
    "percents": "--scale 0.01; of a sum of rewards name one, with --y",
}
ERRORS = (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError, csv.Error)
Record = Mapping[str, Any]


def records(path: str | Path) -> list[Record]:
    """The records of a file, flat, each once. A name is printable: it may be shown on a terminal."""
    unique = {}
    for record in read_records(path):
        row = {printable(str(name)): value for name, value in record.items()}
        unique[repr(sorted(row.items()))] = row
    return list(unique.values())


def printable(name: str) -> str:
    """The name with a question mark for each control character."""
    return "".join(character if character.isprintable() else "?" for character in name)


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, flat."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith(("{", "[")):
        return [dict(flat(record)) for record in json_records(text)]
    printed = re.findall(r"\bstep:(\d+) - (\S+:.*)", text)
    if printed:
        return [console_record(step, values) for step, values in printed]
    lines = text.splitlines() or [""]
    delimiter = max(",;\t", key=lines[0].count)
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
    return list(reader)


def json_records(text: str) -> list[Record]:
    """The records of a JSON document or of JSON lines. A last line that is still being written is left out."""
    lines = text.split("\n")
    with suppress(json.JSONDecodeError):
        document = json.loads(text)
        return document if isinstance(document, list) else document.get("log_history", [document])
    if not lines[-1].endswith("}"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON ({error.msg}): repair or delete it") from error
    return rows


def console_record(step: str, values: str) -> Record:
    """A line that verl prints: `step:5 - actor/lr:1e-06 - critic/score:0.5`."""
    parts = [part.rsplit(":", 1) for part in values.split(" - ") if ":" in part]
    return {"step": step, **dict(parts)}


def flat(record: Record, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """{"a": {"b": 1}} -> ("a/b", 1)."""
    for name, value in record.items():
        if not isinstance(value, Mapping):
            yield prefix + name, value
        elif name == "data":
            yield from flat(value, prefix)
        else:
            yield from flat(value, f"{prefix}{name}/")


def column(name: str, columns: Iterable[str], flag: str) -> str:
    """The one column of this name, or of this ending."""
    if name in columns:
        return name
    matches = [column for column in columns if column.endswith((f" - {name}", f"/{name}"))]
    if len(matches) != 1:
        choices = ", ".join(sorted(matches or columns)) or "none at all"
        count = len(matches) or "no"
        raise ValueError(f"{count} columns are called {name}: name one with {flag}; there are {choices}")
    return matches[0]


def number(cell: Any) -> float:
    """NaN of an empty cell; .2 of "20%"."""
    if cell in (None, ""):
        return math.nan
    text = str(cell).strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def numbers(rows: Sequence[Record], name: str) -> np.ndarray:
    """(N,) a column; NaN where it is missing."""
    try:
        return np.array([number(row.get(name)) for row in rows])
    except ValueError as error:
        raise ValueError(f"{name} has what is no number: {error}") from error


def default_compute(rows: Sequence[Record], columns: Iterable[str]) -> str:
    """Tokens of a run on a CPU, else device_hours, else the first known name."""
    devices = {row.get("device", "gpu" if number(row.get("device_hours")) > 0 else "cpu") for row in rows}
    first = "tokens" if devices <= {"cpu"} else "device_hours"
    known = (first, *fit_sigmoid.UNITS, *STEPS)
    return next((name for name in known if name in columns), first)


def sample_counts(rows: Sequence[Record], columns: Iterable[str], samples: str, y: str) -> np.ndarray | None:
    """(N,) samples behind each point; None if nothing says them."""
    with suppress(ValueError):
        return np.full(len(rows), float(samples))
    if samples:
        return numbers(rows, column(samples, columns, "--samples"))
    prefix = y.removesuffix("pass_rate")
    prompts, per_prompt = f"{prefix}n_prompts", f"{prefix}n_samples"
    if prompts not in columns or per_prompt not in columns:
        return None
    return numbers(rows, prompts) * numbers(rows, per_prompt)


def load(
    path: str | Path, x: str = "", y: str = "", samples: str = "", scale: float = 1.0, x_start: str = "0"
) -> tuple[str, np.ndarray, np.ndarray, np.ndarray | None]:
    """Name of x, C (N,), R (N,) and the samples behind each (N,) or None.

    x, y     columns of compute and reward; "": `default_compute`, and the first of REWARDS
    samples  column or number; "": n_prompts * n_samples where the file has both, under y's own prefix
    x_start  a number, or "first" for the least compute: subtracted from the compute
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"--scale is a number above 0, such as 0.01 for percent, not {scale:g}")
    rows = records(path)
    columns = {str(name) for row in rows for name in row}
    usual = next((name for name in REWARDS if name in columns), REWARDS[0])
    y = column(y or usual, columns, "--y")
    rows = [row for row in rows if row.get(y) not in (None, "")]
    x = column(x or default_compute(rows, columns), columns, "--x")
    C, R = numbers(rows, x), numbers(rows, y) * scale
    start = np.nanmin(C, initial=math.inf) if x_start == "first" else float(x_start)
    before_training = [str(row.get("step")) == "0" for row in rows]
    C = np.where(before_training, 0.0, C - start)  # there, a clock has run, but nothing has been trained
    return x, C, R, sample_counts(rows, columns, samples, y)


def curve(path: str | Path, fit_until: float = 1.0, **columns: Any) -> forecast.CurveReport:
    """`forecast.curve` of what `load` reads."""
    x, C, R, n = load(path, **columns)
    counts = [None] * len(C) if n is None else n
    points = zip(C, R, counts, strict=True)
    rows = [{x: c, "pass_rate": r, "n_prompts": count, "n_samples": 1} for c, r, count in points]
    return forecast.curve(rows, fit_until, str(path), x)


def command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of `main`."""
    parser = argparse.ArgumentParser(description="Fit reward against compute with a sigmoid (arXiv 2510.13786, Eq. 1).")
    add = parser.add_argument
    add("files", nargs="+", help="CSV, JSON lines, verl's console, TRL's trainer_state.json; several runs are compared")
    add("--x", default="", metavar="COLUMN", help="compute (default: tokens, device_hours, flops or step)")
    add("--x-start", default="0", metavar="C", help="subtract this from the compute, or 'first': its least value")
    add("--y", default="", metavar="COLUMN", help=f"the reward, from 0 to 1 (default: {', '.join(REWARDS)})")
    add("--scale", type=float, default=1.0, help="multiply the reward by this: 0.01 for percent")
    add("--samples", default="", metavar="N", help="samples behind each point: a number or a column")
    add("--fit-until", type=float, nargs="+", default=[1.0], metavar="SHARE", help="fit so much, forecast the rest")
    add("--predict-at", type=float, nargs="+", default=[], metavar="C", help="predict at this compute, too")
    add("--plot", metavar="PNG", help="draw a panel for each run and share")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 2 bad input."""
    args = command_line(argv)
    columns = {name: getattr(args, name) for name in ("x", "y", "samples", "scale", "x_start")}
    place = "--predict-at"
    try:
        if not all(0 <= C < math.inf for C in args.predict_at):
            raise ValueError(f"need compute >= 0, not {args.predict_at}")
        runs = []
        for place in args.files:
            runs.append([curve(place, share, **columns) for share in args.fit_until])
        for place, (*_, report) in zip(args.files, runs, strict=True):  # noqa: B007
            if not report.forecast.best:
                raise ValueError(report.forecast.reason)
            if report.x != runs[0][0].x:
                raise ValueError(f"compute is {report.x}, but {runs[0][0].x} in {args.files[0]}")
        reports = [forecast.format_report(report, *args.predict_at) for run in runs for report in run]
        print("\n\n".join(reports))
        if len(runs) > 1:
            fits = [run[-1].forecast.fit for run in runs]
            print("\n" + fit_sigmoid.compare(*fits, names=args.files).verdict)
        place = "--plot"
        if args.plot:
            forecast.plot_curves(runs, args.plot)
    except ERRORS as error:
        message = str(error)
        for words, flag in HINTS.items():
            if words in message and flag not in message:
                message += f" ({flag})"
        print(f"fit.py: {place}: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
