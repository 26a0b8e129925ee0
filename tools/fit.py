"""Fits the logs of other frameworks: a reader around `fit_sigmoid.py`, which reads `eval.jsonl` alone.

    python tools/fit.py log.csv --x gpu_hours --y eval/acc --scale 0.01 --samples 500 --fit-until 0.5
    python tools/fit.py checkpoint-500/trainer_state.json    # TRL: eval_reward against step
    python tools/fit.py run.jsonl --y mean@1 --samples 1319  # verl: val-core/openai/gsm8k/reward/mean@1

A file is CSV (as spreadsheets, wandb and TensorBoard write it), JSON lines, what verl prints (`step:7 - name:0.5`), or
one JSON document, a list or one that holds a list under `log_history`. Names of nested records are joined by "/",
without the `data` of verl. A column is named in full, or by what stands behind " - " (wandb's run in front of it) or a
"/". Records without the reward do not count, and one that stands there twice counts once.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fit_sigmoid

REWARDS = ("pass_rate", "eval_reward", "Value")  # ours, TRL's, TensorBoard's; "Step" is TensorBoard's, "_step" wandb's
HINTS = {  # by the words of an error
    "compute starts at": "--x-start first",
    "percents": "--scale 0.01; of a sum of rewards name one, with --y",
}
ERRORS = (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError, csv.Error)


def records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, flat. A last line that is still being written is none."""
    text = Path(path).read_text(encoding="utf-8-sig")
    *lines, last = text.split("\n")
    if not text.lstrip().startswith(("{", "[")):
        if printed := re.findall(r"\bstep:(\d+) - (\S+:.*)", text):  # verl's console
            return [{"step": n, **dict(v.rsplit(":", 1) for v in rest.split(" - ") if ":" in v)} for n, rest in printed]
        lines = text.splitlines() or [""]
        reader = csv.DictReader(lines, delimiter=max(",;\t", key=lines[0].count), skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        return list(reader)
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else whole.get("log_history", [whole])
    except json.JSONDecodeError:
        found = []
        for number, line in enumerate(lines + [last] * last.endswith("}"), 1):
            try:
                found += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON ({error.msg}): repair or delete it") from error
    return [dict(flat(record)) for record in found]


def flat(record: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """{"a": {"b": 1}} -> ("a/b", 1)."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, prefix if name == "data" else f"{prefix}{name}/")
        else:
            yield prefix + name, value


def column(name: str, rows: Sequence[Mapping[str, object]], flag: str) -> str:
    """The one column that bears this name."""
    columns = {str(column) for row in rows for column in row}
    found = [name] if name in columns else sorted(c for c in columns if c.endswith((f" - {name}", f"/{name}")))
    if len(found) != 1:
        there = ", ".join(found or sorted(columns)) or "none at all"
        raise ValueError(f"{len(found) or 'no'} columns are called {name}: name one with {flag}; there are {there}")
    return found[0]


def number(cell: Any) -> float:
    """NaN of an empty cell; .2 of "20%"."""
    text = "nan" if cell in (None, "") else str(cell).strip()
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def numbers(rows: Sequence[Mapping[str, object]], name: str) -> np.ndarray:
    """(N,) a column; NaN where it is missing."""
    try:
        return np.array([number(row.get(name)) for row in rows])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has what is no number: {error}") from error


def load(
    path: str | Path, x: str = "", y: str = "", samples: str = "", scale: float = 1.0, x_start: str = "0"
) -> tuple:
    """Name of x, C (N,), R (N,) and the samples behind each (N,) or None.

    x, y     columns of compute and reward; "": tokens on a CPU run, else device_hours, else what there is; REWARDS
    samples  column or number; "": n_prompts * n_samples where the file has both, under y's own prefix
    x_start  a number, or "first" for the least compute: subtracted from the compute
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"--scale is a number above 0, such as 0.01 for percent, not {scale:g}")
    rows = records(path)
    columns = {name for row in rows for name in row}
    y = column(y or next((name for name in REWARDS if name in columns), REWARDS[0]), rows, "--y")
    rows = [row for row in rows if row.get(y) not in (None, "")]
    rows = [row for i, row in enumerate(rows) if row not in rows[:i]]
    cpu = not any(float(row.get("device_hours") or 0) for row in rows)
    if "device" in columns:
        cpu = all(row.get("device", "cpu") == "cpu" for row in rows)
    order = ("tokens" if cpu else "device_hours", *fit_sigmoid.UNITS, "Step", "_step")
    x = column(x or next((name for name in order if name in columns), order[0]), rows, "--x")
    C, R = numbers(rows, x), numbers(rows, y) * scale
    C = C - (np.nanmin(C, initial=math.inf) if x_start == "first" else float(x_start))
    C[[str(row.get("step")) == "0" for row in rows]] = 0.0  # a clock has run, but nothing has been trained
    counts = [y.removesuffix("pass_rate") + name for name in ("n_prompts", "n_samples")]
    try:
        n = np.full(C.shape, float(samples))
    except ValueError:
        named = [column(samples, rows, "--samples")] if samples else counts if columns.issuperset(counts) else []
        n = np.prod([numbers(rows, name) for name in named], axis=0) if named else None
    return x, C, R, n


def curve(path: str | Path, fit_until: float = 1.0, **columns: str) -> fit_sigmoid.CurveReport:
    """`fit_sigmoid.curve` of what `load` reads."""
    x, C, R, n = load(path, **columns)
    rows = [{x: c, "pass_rate": r} for c, r in zip(C, R, strict=True)]
    if n is not None:
        rows = [row | {"n_prompts": samples, "n_samples": 1} for row, samples in zip(rows, n, strict=True)]
    return fit_sigmoid.curve(rows, fit_until, str(path), x)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
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
    args = parser.parse_args(argv)
    place = "--predict-at"
    try:
        if not all(0 <= C < math.inf for C in args.predict_at):
            raise ValueError(f"need compute >= 0, not {args.predict_at}")
        columns = {name: getattr(args, name) for name in ("x", "y", "samples", "scale", "x_start")}
        rows = [[curve(place := file, share, **columns) for share in args.fit_until] for file in args.files]
        for place, (*_, r) in zip(args.files, rows, strict=True):  # noqa: B007
            if not r.fit.best or r.x != rows[0][0].x:
                raise ValueError(r.fit.reason or f"compute is {r.x}, but {rows[0][0].x} in {args.files[0]}")
        print("\n\n".join(fit_sigmoid.format_report(r, *args.predict_at) for row in rows for r in row))
        if len(rows) > 1:
            print("\n" + fit_sigmoid.compare(*(row[-1].fit for row in rows), names=args.files).verdict)
        place = "--plot"
        if args.plot:
            fit_sigmoid.plot_curves(rows, args.plot)
    except ERRORS as error:
        hint = "".join(f" ({flag})" for words, flag in HINTS.items() if words in str(error) and flag not in str(error))
        print(f"fit.py: {place}: {error}{hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
