"""Reads evaluations from files of any framework: JSON lines, and CSV as wandb, TensorBoard or a spreadsheet write it.

Every complaint is one sentence that names the file, the line and the fix.
"""

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_sigmoid import UNITS, of_data_set

Rows = list[tuple[int, Mapping]]  # (line number, record)


class InputError(ValueError):
    """Bad input, said in one sentence with the place and the fix."""


class Evaluations(NamedTuple):
    """The evaluations of a run, one per row of its file."""

    x: str  # name of the column of compute
    C: np.ndarray  # (N,) compute
    R: np.ndarray  # (N,) reward, NaN where it is missing
    n_samples: np.ndarray | None  # (N,) samples per point
    last_line: int


def read_rows(source: str | Path | Sequence[Mapping]) -> Rows:
    """The records of a JSON-lines file, of a CSV file with a header, or of a list."""
    if not isinstance(source, (str, Path)):
        return list(enumerate(source, 1))
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source}, line 1: not a readable text file ({error}); give JSON lines or CSV") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"{source}, line 1: the file is empty; give a record per evaluation")
    if not lines[0].lstrip().startswith(("{", "[")):
        reader = csv.DictReader(lines, delimiter=max(",;\t", key=lines[0].count), skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        return [(reader.line_num, row) for row in reader]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise InputError(f"{source}, line {number}: not JSON ({error.msg}); repair or delete the line") from error
        if not isinstance(record, dict):
            raise InputError(f"{source}, line {number}: not a JSON object; write one record {{...}} a line")
        rows += [(number, record)] if record else []
    return rows


def default_x(rows: Rows, columns: set[str]) -> str:
    """tokens on a CPU run (so marked, or without device-hours), else device_hours, else the first column there is."""
    cpu = not any(row.get("device_hours") not in (None, "", 0, "0", "0.0") for _, row in rows)
    if "device" in columns:
        cpu = all(row.get("device", "cpu") == "cpu" for _, row in rows)
    order = ("tokens" if cpu else "device_hours", *UNITS, "Step", "_step")
    return next((c for c in order if c in columns), "device_hours")


def match_columns(wanted: Mapping[str, str], columns: set[str], place: str) -> dict[str, str]:
    """Column of the file for each name in `wanted` (name -> flag that gives it).

    A name also matches the one column "RUN - NAME", as wandb writes it.
    """
    found, missing = {}, {}
    for name, flag in wanted.items():
        match = [name] if name in columns else sorted(c for c in columns if c.endswith(f" - {name}"))
        if len(match) > 1:
            raise InputError(
                f"{place}: {len(match)} columns end in {name!r}: {', '.join(match)}; give one in full with {flag}"
            )
        (found if match else missing)[name] = match[0] if match else flag
    if missing:
        names, flags = ", ".join(map(repr, missing)), ", ".join(missing.values())
        there = ", ".join(sorted(columns))
        raise InputError(f"{place}: no column {names}; name another with {flags}, there are: {there}")
    return found


def load(
    source: str | Path | Sequence[Mapping],
    *,
    x: str | None = None,
    y: str | None = None,
    samples: str | float | None = None,
    scale: float = 1.0,
    x_start: str | float = 0.0,
    data_set: str = "",
) -> Evaluations:
    """Read evaluations. InputError names the file, the line and the fix.

    x        column of compute; None: tokens on a CPU run, else device_hours, else what there is
    y        column of the reward; None: pass_rate, or TensorBoard's Value
    samples  column or number of samples per point; None: n_prompts * n_samples where the file has both
    scale    the reward is multiplied by this
    x_start  a number, or "first" for the least compute: subtracted from the compute
    data_set the figures of one data set of train.py's evaluations, instead of the mean over those trained on
    A record with `step` 0 is at compute 0: a clock that ran before the first step has trained nothing.
    """
    rows, name = read_rows(source), source if isinstance(source, (str, Path)) else "records"
    if not rows:
        raise InputError(f"{name}, line 1: there is no row, at most a header; give a record per evaluation")
    if data_set:
        rows = [(line, of) for line, row in rows for of in of_data_set([row], data_set)]
        if not rows:
            raise InputError(f"{name}, line 1: no record has a data set {data_set!r}; leave --data-set out")
    columns = {str(column) for _, row in rows for column in row}
    x = x or default_x(rows, columns)
    y = y or ("Value" if "Value" in columns and "pass_rate" not in columns else "pass_rate")
    counts = [samples] if isinstance(samples, str) else ["n_prompts", "n_samples"] if samples is None else []
    counts = [] if samples is None and not columns.issuperset(counts) else counts
    wanted = {c: "--samples" for c in counts} | {y: "--y", x: "--x"}
    found = match_columns({c: wanted[c] for c in (x, y, *counts)}, columns, f"{name}, line 1")

    def _number(line: int, row: Mapping, column: str) -> float:
        try:
            return math.nan if row.get(column) in (None, "") else float(row[column])
        except (TypeError, ValueError) as error:
            text = f"{column} is {row[column]!r}; write a number or leave it empty"
            raise InputError(f"{name}, line {line}: {text}") from error

    if x_start == "first":
        x_start = min((c for c in (_number(*row, found[x]) for row in rows) if not math.isnan(c)), default=0.0)
    points, zero = [], math.nan
    for line, row in rows:
        c, r = _number(line, row, found[x]) - x_start, _number(line, row, found[y]) * scale
        c = 0.0 if row.get("step") in (0, "0") else c
        n = math.prod(_number(line, row, found[k]) for k in counts) if counts else samples
        n = math.nan if n is None else n
        bad = complaint(c, r, n, zero, x, y, x_start)
        if bad:
            raise InputError(f"{name}, line {line}: {bad}")
        zero = r if c == 0 and not math.isnan(r) else zero
        points.append((c, r, n))
    C, R, n = np.array(points, dtype=float).reshape(-1, 3).T
    return Evaluations(x, C, R, n if counts or samples is not None else None, rows[-1][0])


def complaint(c: float, r: float, n: float, zero: float, x: str, y: str, x_start: float) -> str:
    """What is wrong with a point of compute c, reward r and n samples; `zero` is the reward at compute 0 so far."""
    if c < 0 or math.isinf(c):
        start = f" after --x-start {x_start:g}" if x_start else ""
        return f"{x} is {c:g}{start}; compute is finite and >= 0, correct the value or delete the line"
    if r < 0 or r > 1:
        return f"{y} is {r:g}; rewards lie in [0, 1], give --scale (0.01 for percent) or another --y"
    if n <= 0:
        return f"{n:g} samples; give a positive number or leave the column out"
    if c == 0 and abs(r - zero) > 0:  # False while either is NaN
        return f"{y} is {r:g} at {x} = 0 but {zero:g} on an earlier line; keep one of the two"
    return ""
