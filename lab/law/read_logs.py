"""Fits the logs of other frameworks: a reader before `forecast.py`, which itself reads `eval.jsonl` alone.

    python lab/law/read_logs.py run.log                              # what verl or TRL prints
    python lab/law/read_logs.py log.csv --y eval/acc --range 0 100 --samples 500 --fit-until 0.5

WHAT IS READ. CSV, JSON lines and documents, HTML tables, notebooks, and printed values (`[Step 7/90] name=0.5`). Names
are joined by "/". Of equal neighbors that name their step one counts, and of a last line that is still being written
nothing. Among the records of verl or TRL other lines do not count: they may be what a model wrote.
WHICH COLUMNS. The first pattern of `REWARDS` that a column fits, and of `COMPUTE`; or with --x and --y one by its name,
or by its end after a "/" or a " - ". An epoch is rounded: where it is repeated, records are counted instead. A step
that stands on a line of its own holds for the rewards up to the next one.
SEVERAL RUNS are never pooled. Where compute is repeated or goes back, a column of labels tells them apart, or two or
three, such as run and split. Without one, compute that goes back to its beginning starts another run. If it goes back
by less, the run was resumed from a checkpoint, and what it did again replaces what it had done.
BLOCKS. A reward of training is that of few rollouts: about 40 means of neighbors are fitted, or means of as many
records as --block says. Held-out scores are averaged only where there are 300 or more.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import forecast
import numpy as np
import pandas as pd

# Patterns for the names of columns. An earlier one is preferred.
HELD_OUT = "(^|[^a-z])(val|valid|validation|eval|evaluation|test)(?![a-z])"
RIGHT = (  # not "accumulation", "bypass", "incorrect", "correction", "unanswered"
    "acc(?![a-z])|accurac|(?<![a-z])pass(?!age|ive|word)|(?<!in)correct(?!ion)|(?<!un)solved?($|_rate)|(?<!un)answer"
)
SCORE = f"{RIGHT}|score|reward|^value$"
NO_SCORE = (
    "(^|[^a-z])((min|max|n|num)(?![a-z])|std|best|worst|maj|loss|len|tim|token|kl|margin|format|none"
    "|fail(ed|ure)|error|schema|retr(y|ies)|eligible|parse|parsable|invalid|truncated"
    r"|pass\W?(_?at_?)?(?!1(?!\d))(\d|k(?![a-z])))"  # pass@4, which is more than a pass rate
    # The share of answers that can be read; but valid/acc and valid_reward are of a validation set.
    "|(?<!^)(?<! - )valid(?!ation)|valid(?!ation|/|_(acc|pass|solve|correct|score|reward))"
)
REWARDS = (
    "^(pass_rate|eval_reward|value)$",  # ours, TRL's, TensorBoard's
    f"^(?=.*{HELD_OUT}).*({RIGHT})",
    f"^(?=.*{HELD_OUT}).*(score|reward)",
    RIGHT,
    "(^|[^a-z])raw_(reward|score)",  # before it is normalised
    "score/mean$",  # verl's
    "(^|/)(mean_|avg_|average_)?(reward|score)s?(_mean|_avg)?$",
    SCORE,
)
COMPUTE = (
    "^tokens$",
    "^device_hours$",
    "^flops$",
    "^step$",
    "^_step$",
    "^(?!.*(per_|tim)).*(step|iter|iteration|update|episode|batch)$",
    "num_tokens$",
    "epoch$",
    "^record$",
)
LABELS = "(^|[^a-z])(run|seed|trial|id)$"
# What printed lines hold: a name, perhaps in quotes, and a number.
PAIR = r"(?<!\w)'?([a-z_][^\s=,;|(){}\[\]\"']{0,200})'?\s*[:=]\s*'?([-+]?\d[\d.]*(?:e[-+]?\d+)?%?)"
STEP = r"(?<![a-z\d])(step|iter|iteration|update|episode)\s{0,9}[^\w\s.,;]?\s{0,9}(\d)"
COUNTER = "(step|iter|iteration|update|episode)$"
RECORDS = (r"\bstep:\d+ - ", r"^\{'[^']*':")  # what verl prints, and TRL
EXPORT = {  # a mark in the name of a file that is no text: what makes a text of it
    "tfevents": 'python -c "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E;'
    " print('step,value', *(f'{e.step},{e.value}' for e in E('FILE').Reload().Scalars('TAG')), sep='\\n')\" > log.csv",
    ".wandb": "python -c \"import wandb; wandb.Api().run('ENTITY/PROJECT/RUN').history(samples=100_000)"
    ".to_csv('log.csv')\"",
}
csv.field_size_limit(2**31 - 1)  # a cell of a notebook's text may be long
ERRORS = (*forecast.ERRORS, csv.Error, NotImplementedError)


# ---------------------------------------------------------------------------------------------------------- records
def read(path: Path, y: str = "") -> pd.DataFrame:
    """The records of a file, with the column `y` or a score. The names are printable, since errors show them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        command = next((EXPORT[mark] for mark in EXPORT if mark in path.name), "export it as CSV")
        raise ValueError(f"this is no text; to make one: {command}") from error
    frame = pd.json_normalize(parse(text, y), sep="/")
    frame.columns = ["".join(c if c.isprintable() else "?" for c in str(name)) for name in frame]
    return frame


def parse(text: str, y: str) -> list[dict]:
    """The records of a text of any kind."""
    text = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", text)
    if re.match(r"\s*(\{\s*[\"}]|\[\s*[\[{\]])", text) and '"cell_type"' not in text:  # JSON, but no notebook
        return json_records(text)
    if not text.endswith(("\n", "}", ">", '"')):  # the last line is still being written
        text = text[: text.rfind("\n") + 1]
    rows = csv_records(text)
    is_table = all(len(row) > 1 and None not in row and None not in row.values() for row in rows)
    if rows and is_table and not fits(PAIR, text.split("\n", 1)[0]):
        return rows
    kinds = [records for records in (table_records(text), line_records(text)) if records]
    score = f"{re.escape(y)}$" if y else SCORE
    scored = [records for records in kinds if any(fits(score, name) for name in set().union(*records))]
    return (scored or kinds or [rows])[0]


def json_records(text: str) -> list[dict]:
    """The records of a JSON document or of JSON lines."""
    with suppress(json.JSONDecodeError):
        return document_records(json.loads(text))
    lines = text.split("\n")
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


def document_records(document: Any) -> list[dict]:
    """The records of a JSON document. The name of a list of them is its `run`, or where records have one its `list`."""
    if isinstance(document, list):
        return document
    lists = {name: value for name, value in document.items() if isinstance(value, list) and value}
    tables = {name: rows for name, rows in lists.items() if isinstance(rows[0], dict)}
    if tables:
        label = "list" if any("run" in row for rows in tables.values() for row in rows) else "run"
        return [{label: name} | row for name, rows in tables.items() for row in rows]
    if not lists:
        return [document]
    return pd.DataFrame.from_dict(lists, orient="index").T.assign(record=0).to_dict("records")


def table_records(text: str) -> list[dict]:
    """The rows of HTML tables."""
    rows = []
    for table in text.split("<table")[1:]:
        if "</table>" in table:
            names, *lines = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", line) for line in table.split("</tr>")]
            rows += [dict(zip(names, line, strict=False)) for line in lines]
    return rows


def line_records(text: str) -> list[dict]:
    """Printed lines, and dictionaries as Python prints them, that have numbers under names."""
    lines = re.split(r"[\r\n]|(?=\{')", text)
    for form in RECORDS:
        records = [line for line in lines if re.search(form, line)]
        if sum(any(fits(SCORE, name) for name, _ in re.findall(PAIR, line, re.IGNORECASE)) for line in records) >= 3:
            lines = records
    lines = [re.sub(STEP, r"\1=\2", line, flags=re.IGNORECASE) for line in lines]
    rows = [dict(re.findall(PAIR, line, re.IGNORECASE)) for line in lines]
    return [row | {"record": 0} for row in rows if row]


def csv_records(text: str) -> list[dict]:
    """The rows of a table with commas, semicolons or tabs."""
    lines = text.splitlines() or [""]
    delimiter = max(",;\t", key=lines[0].count)
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
    return list(reader)


# ---------------------------------------------------------------------------------------------------------- columns
def fits(pattern: str, name: str) -> bool:
    """Whether it does, anywhere, in capitals or not."""
    return bool(re.search(pattern, name, re.IGNORECASE))


def column(name: str, patterns: Sequence[str], names: Iterable[str], flag: str) -> str:
    """The one that is called `name`, or ends so; without a name the one that the first possible pattern fits."""
    if name:
        end = re.escape(name)
        patterns = [f"^{end}$", f"( - |/){end}$"]
    matches = [exact for exact in names if exact == name]
    for pattern in patterns:
        matches = matches or [name for name in names if fits(pattern, name)]
    if len(matches) == 1:
        return matches[0]
    scores = [name for name in names if flag == "--y" and fits(SCORE, name)]
    choices = ", ".join(sorted(matches or scores or names)) or "none at all"
    raise ValueError(f"{len(matches) or 'no'} columns fit: name one with {flag}; there are {choices}")


def without_twins(frame: pd.DataFrame) -> list[str]:
    """The names of the columns, but of those of compute that are proportional the first one alone."""
    twins = set()
    for pattern in COMPUTE:
        columns = [numbers(frame[name], "coerce") for name in frame if fits(pattern, name)]
        shares = [cells / cells.max() for cells in columns]
        twins |= {share.name for share in shares[1:] if np.allclose(share, shares[0])}
    return [name for name in frame if name not in twins]


def numbers(cells: pd.Series, errors: str = "raise") -> pd.Series:
    """NaN of an empty cell; .2 of "20%"."""
    text = cells.astype(str).str.strip()
    text = text.mask(text.str.lower().isin(["", "none", "nan", "null"]))
    unit = np.where(text.str.endswith("%"), 0.01, 1.0)
    try:
        return pd.to_numeric(text.str.rstrip("%"), errors=errors) * unit
    except ValueError as error:
        raise ValueError(f"{cells.name} has what is no number: {error}") from error


def usual_rewards(frame: pd.DataFrame) -> list[str]:
    """The columns that may be a reward: those with a dozen numbers or more that are not all equal, if there are any."""
    scores = [name for name in frame if fits(SCORE, name) and not fits(NO_SCORE, name)]
    values = {name: numbers(frame[name], "coerce") for name in scores}
    scores = [name for name in scores if values[name].nunique() > 1] or scores
    most = max((values[name].count() for name in scores), default=0)
    return [name for name in scores if values[name].count() >= min(12, most)]


def with_counters(frame: pd.DataFrame, rewards: pd.Index) -> pd.DataFrame:
    """The records of `rewards`. A step that none of them has is the one before it, or where they come first the one
    behind; but not if it seldom counts from one reward to the next."""
    kept = frame.loc[rewards].copy()
    for name in frame:
        if fits(COUNTER, name) and kept[name].isna().all():
            steps = frame[name].ffill()[rewards]
            if steps.isna().iloc[0]:
                steps = frame[name].bfill()[rewards]
            if 10 * (steps == steps.shift()).sum() <= len(steps):
                kept[name] = steps
    return kept


def sample_counts(frame: pd.DataFrame, samples: str, y: str) -> Any:
    """(N,) samples behind each point, or a number for all; NaN if nothing says them."""
    with suppress(ValueError):
        return float(samples)
    if samples:
        return numbers(frame[column(samples, [], frame, "--samples")])
    names = [y.removesuffix("pass_rate") + name for name in ("n_prompts", "n_samples")]
    return frame[names].apply(numbers).prod(axis=1) if set(names) <= set(frame) else np.nan


# ------------------------------------------------------------------------------------------------------------- runs
def load(path: str, args: argparse.Namespace) -> tuple[str, dict[str, pd.DataFrame]]:
    """Name of x, and the points of each run: compute C, reward R, and n samples behind each, NaN where unknown."""
    frame = read(Path(path), args.y)
    records = len(frame)
    usual = [] if args.y else usual_rewards(frame)
    y = column(args.y, REWARDS if usual else [], usual or frame, "--y")
    R = numbers(frame[y]).dropna()
    low, high = args.range
    if not low <= R.min() <= R.max() <= high:
        raise ValueError(
            f"{y} goes from {R.min():g} to {R.max():g}, not from {low:g} to {high:g}: name what it can be with --range,"
            " such as --range 0 100 for percents or --range -1 1, or another column with --y"
        )
    frame = with_counters(frame, R.index).dropna(axis=1, how="all")
    x = column(args.x, COMPUTE, frame if args.x else without_twins(frame), "--x")
    if not fits("epoch|record", x):
        text = frame.astype(str)
        frame = frame[(text != text.shift()).any(axis=1)]
        R = R[frame.index]
    C = numbers(frame[x])
    if args.x_start == "0" and C.min() > C.max() / 2 and len(C) > 2:
        raise ValueError(f"{x} starts at {C.min():g} and ends at {C.max():g}: subtract its start with --x-start first")
    C -= C.min() if args.x_start == "first" else float(args.x_start)
    if "step" in frame:
        C[numbers(frame["step"], "coerce") == 0] = 0.0  # there, a clock has run, but nothing has been trained
    points = pd.DataFrame({"C": C, "R": (R - low) / (high - low), "n": sample_counts(frame, args.samples, y)})
    label = column(args.label, [], frame, "--label") if args.label else ""
    points = split(points[C.notna()], frame, label)
    if fits("epoch|record", x) and any(run["C"].duplicated().any() for run in points.values()):
        x = "record"
        points = {label: run.assign(C=np.arange(1, len(run) + 1)) for label, run in points.items()}
    runs = {}
    for label, run in points.items():
        N = len(run)
        repeats = run["C"].duplicated().sum()
        if 10 * repeats > N and not args.block:
            raise ValueError(
                f"{x} is repeated in {repeats} of {N} records: name the column that tells runs apart with --label, or"
                " average neighbors with --block"
            )
        held_out = fits(f"{HELD_OUT}|^pass_rate$", y + label) or run["n"].notna().all()
        size = max(1, N // (args.block or N // (150 if held_out else 40) or 1))
        blocks = run.sort_values("C", kind="stable").groupby(np.arange(N) * size // N)
        name = f"{path} {label}".strip()
        runs[name] = blocks.mean().assign(n=blocks["n"].sum(min_count=1))
        print(f"{name}: {y} against {x}, {N} of {records} records" + f" in {size} means" * (size < N))
    return x, runs


def grows(points: pd.DataFrame) -> bool:
    """Whether compute does, from each record to the next."""
    return points["C"].is_monotonic_increasing and points["C"].is_unique


def split(points: pd.DataFrame, frame: pd.DataFrame, label: str) -> dict[str, pd.DataFrame]:
    """The points of each run under its name; "" for a single one."""
    if grows(points) and not label:
        return {"": points}
    if label:
        runs = {}
        for name, run in points.groupby(label + "=" + frame[label].astype(str), sort=False):
            for inner, part in split(run, frame.loc[run.index].drop(columns=label), "").items():
                runs[f"{name} {inner}".strip()] = part
        return runs
    texts = {name: name + "=" + frame.loc[points.index, name].astype(str) for name in frame}
    few = [name for name in frame if 1 < texts[name].nunique() <= len(points) / 3]
    labels = [name for name in few if fits(LABELS, name) or numbers(frame[name], "coerce").isna().all()]
    for size in (1, 2, 3):  # of run, seed and split all three may be needed
        for names in combinations(labels, size):
            key = texts[names[0]].str.cat([texts[name] for name in names[1:]], sep=" ")
            groups = dict(list(points.groupby(key, sort=False)))
            if 3 * len(groups) <= len(points) and all(map(grows, groups.values())):
                return groups
    backs = points["C"].diff() < 0
    if 5 * backs.sum() > len(points):
        raise ValueError(
            f"compute goes back {backs.sum()} times in {len(points)} records: sort them by it, or see --label"
        )
    parts: list[pd.DataFrame] = []
    for _, part in points.groupby(backs.cumsum()):
        start = part["C"].min()
        if parts and start > points["C"].iloc[0]:  # resumed: what was done again replaces what had been done
            before = parts.pop()
            part = pd.concat([before[~before["C"].between(start, part["C"].max())], part])
        parts.append(part)
    return {f"run {i}" if len(parts) > 1 else "": part for i, part in enumerate(parts, 1)}


# ----------------------------------------------------------------------------------------------------- command line
def command_line(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of `load`, and those of `forecast.py`."""
    parser = argparse.ArgumentParser(
        description="Fit reward against compute with a sigmoid (arXiv 2510.13786, Eq. 1).",
        epilog="After the files also those of forecast.py: --fit-until, --predict-at, --plot.",
    )
    add = parser.add_argument
    add("files", nargs="+", help="CSV, JSON, notebooks, printed logs; several runs are compared")
    add("--x", default="", metavar="COLUMN", help="compute (default: the usual names)")
    add("--x-start", default="0", metavar="C", help="subtract this from the compute, or 'first': its least value")
    add("--y", default="", metavar="COLUMN", help="the reward (default: the usual names, held-out ones first)")
    add("--range", type=float, nargs=2, default=[0, 1], metavar="R", help="least and greatest reward there can be")
    add("--samples", default="", metavar="N", help="samples behind each point: a number or a column")
    add("--block", type=int, default=0, metavar="N", help="fit means of so many records")
    add("--label", default="", metavar="COLUMN", help="what tells the runs of a file apart")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 2 bad input."""
    args, others = command_line(argv)
    sources = {}
    axes = set()
    try:
        for place in args.files:
            x, runs = load(place, args)
            axes.add(x)
            for name, points in runs.items():
                rows = points.set_axis([x, "pass_rate", "n_prompts"], axis=1).assign(n_samples=1)
                sources[name] = rows.to_dict("records")
        if len(axes) > 1:
            raise ValueError(f"files of different compute do not compare: {', '.join(axes)}; name one with --x")
    except ERRORS as error:
        print(f"read_logs.py: {place}: {error}", file=sys.stderr)
        return 2
    return forecast.main([*sources, "--x", x, *others], sources)


if __name__ == "__main__":
    sys.exit(main())
