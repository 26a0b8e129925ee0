"""Rows: which data sets are named, how their rows are read, and what a row's prompt and answer are."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tasks.code_answers import TEST_COLUMNS, tests_of
from tasks.judge_process import VERIFIERS
from tasks.prompts import stable_key
from tasks.verifiers import last_box

# The columns looked for, in this order, if none is named: GSM8K has question and answer, Polaris and DeepScaleR have
# problem and answer. A dot goes into a nested record.
PROMPT_COLUMNS = ("prompt", "problem", "question", "instruction")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model.ground_truth", "solution")
FILE_KINDS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class DataSet:
    """A file or a hub id with its configuration and split, its weight in a mixture, and its reward."""

    name: str
    config: str | None = None
    split: str | None = None  # None: `train`
    weight: float | None = None  # None: drawn in proportion to its size
    reward: str | None = None  # None: the reward of all data sets that name none


def parse_data_sets(text: str) -> list[DataSet]:
    """Data sets of `NAME[:CONFIG[:SPLIT]][:REWARD][=WEIGHT],...`. NAME is a .jsonl or .parquet file or a Hugging Face
    id, REWARD one of VERIFIERS.

        "openai/gsm8k:main=2,my.jsonl=1"    draws two of three prompts from the first
        "openai/gsm8k:main,my.jsonl"        draws every prompt of both equally often
        "my/set::test"                      reads another split than `train`
        "a.jsonl:math=2,my/set:main:code=1" judges the first as math, and runs what answers the second

    Raises ValueError on a weight that is not a positive number, on weights for some data sets only, on a name given
    twice, and on a file with a configuration or a split.
    """
    found: list[DataSet] = []
    for part in map(str.strip, text.split(",")):
        names, equals, weight = part.partition("=")
        before, _, last = names.rpartition(":")
        names, reward = (before, last) if last in VERIFIERS else (names, None)
        name, config, split = [*names.split(":", 2), "", ""][:3]  # a split may hold a colon: train[:100]
        try:
            value = float(weight) if equals else None
        except ValueError:
            value = math.nan
        if not name or not (value is None or 0 < value < math.inf):
            form = "NAME[:CONFIG[:SPLIT]][:REWARD][=WEIGHT],..."
            raise ValueError(f"`dataset` must be {form} weights above 0, got {part!r}")
        if ":" in names and (Path(name).suffix in FILE_KINDS or Path(name).is_file()):
            raise ValueError(f"`dataset` {names}: a file has no configuration and no split; give name and reward only")
        found.append(DataSet(name, config or None, split or None, value, reward))
    if len({data.name for data in found}) < len(found):
        raise ValueError(f"`dataset` names a data set twice: {text}; raise its weight instead")
    if len({data.weight is None for data in found}) > 1:
        raise ValueError(f"`dataset` {text}: give every data set a weight, or none, which draws each by its size")
    return found


def read_rows(data: DataSet, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a data set. Lines of a .jsonl file that are no JSON object are counted in `skipped`.

    Raises ValueError if there is no such file, kind of file or data set. A .jsonl file is not read by `datasets`, which
    refuses all of a file that has one bad line and makes a column of one type.
    """
    path = Path(data.name)
    if path.suffix in FILE_KINDS and not path.is_file():
        raise ValueError(f"`dataset` {data.name}: there is no such file")
    if path.is_file() and path.suffix not in FILE_KINDS:
        raise ValueError(f"`dataset` {data.name}: a file's name must end with {' or '.join(FILE_KINDS)}")
    if path.suffix == ".jsonl":
        yield from read_json_lines(path, skipped)
        return
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        if path.is_file():
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(path).to_pylist()
        else:
            yield from load_dataset(data.name, data.config, split=data.split or "train")
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"`dataset` {data.name} cannot be loaded ({type(error).__name__}: {error}); give a .jsonl or "
            ".parquet file, or a data set id, with its configuration and split as NAME:CONFIG:SPLIT"
        ) from error


def read_json_lines(path: Path, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; other lines that are not empty are counted in `skipped`."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                skipped["not_json"] += 1
                continue
            if isinstance(row, dict):
                yield row
            else:
                skipped["not_an_object"] += 1


def field_of(row: dict[str, Any], column: str) -> Any:
    """`row[column]`, where a dot goes into a nested record. None if it is not there."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def first_ten(names: Iterable[object]) -> str:
    """The first ten of these names in their order, for a message: a terminal obeys none of their characters."""
    known = sorted(set(map(str, names)))
    more = f" and {len(known) - 10:,} more" if len(known) > 10 else ""
    return ", ".join(repr(name[:50])[1:-1] for name in known[:10]) + more


def find_columns(
    rows: list[dict[str, Any]], wanted: Mapping[str, tuple[str | None, Sequence[str]]], name: str
) -> list[str]:
    """The column to read for each option: the one it names, or else the first of those known that any row has.

    `wanted` is {option: (column or None, known columns)}. Raises ValueError naming every option without a column.
    """
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for option, (given, known) in wanted.items():
        choices = [given] if given else known
        column = next((choice for choice in choices if any(field_of(row, choice) is not None for row in rows)), None)
        if column is None:
            missing[option] = ", ".join(choices)
        else:
            found[option] = column
    if missing:
        there = first_ten(key for row in rows[:100] for key in row) or "none at all"
        raise ValueError(
            f"`dataset` {name}: no row has {', and none has '.join(missing.values())}; its columns are {there}; name "
            f"the right one{'s' * (len(missing) > 1)} with {' and '.join(f'`{option}`' for option in missing)}"
        )
    return list(found.values())


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def prompt_messages(value: Any) -> list[dict[str, str]] | None:
    """A prompt column's value as chat messages; a string is one message of the user. None if it is neither."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = [m if isinstance(m, dict) else {} for m in value] if isinstance(value, list) else []
    if not messages or not all(isinstance(m.get(name), str) for m in messages for name in ("role", "content")):
        return None
    return [{"role": m["role"], "content": clean_text(m["content"])} for m in messages]


def final_answer(value: Any) -> str | None:
    """An answer column's value as text. None if no text or number. Of a worked solution the answer counts: what follows
    `####`, as in GSM8K, and of that the last `\\boxed{}`, as in MATH."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # Parquet turns a column of whole numbers with a gap into floats, and Python writes small floats as 1e-05.
    text = f"{Decimal(repr(value or 0.0)).normalize():f}" if isinstance(value, float) else clean_text(str(value))
    text = text.rpartition("####")[2]
    box = last_box(text)
    return (text if box is None else box).strip()


class UsableRow(NamedTuple):
    """What is kept of a data set's row. `text` is the prompt as it is in the row."""

    text: str
    messages: list[dict[str, str]]
    answer: Any


def usable_rows(
    data: DataSet, prompt_column: str | None, answer_column: str | None, reward: str, skipped: Counter[str],
    prompts: set[str] | None = None,
) -> dict[str, UsableRow]:  # fmt: skip
    """{key: row} of a data set. Of equal prompts the first stays. What is left out is counted in `skipped`, by kind.

    A column None looks through PROMPT_COLUMNS or ANSWER_COLUMNS (for the reward `code` TEST_COLUMNS). A user's reward
    function gets the answer as it is in the row. The key is the hash of the prompt's text with its white space made
    equal; `prompts` gets those of all rows with a prompt, whatever their answers. A conversation that ends with the
    assistant's turn is no prompt: it holds an answer.
    """
    rows = list(read_rows(data, skipped))
    known = TEST_COLUMNS if reward == "code" else ANSWER_COLUMNS
    options = {"prompt_column": (prompt_column, PROMPT_COLUMNS), "answer_column": (answer_column, known)}
    prompt_column, answer_column = find_columns(rows, options, data.name)
    kept: dict[str, UsableRow] = {}
    for row in rows:
        messages, given = prompt_messages(field_of(row, prompt_column)), field_of(row, answer_column)
        if reward == "code":
            answer = tests_of(row, given)
        else:
            answer = final_answer(given) if reward in VERIFIERS else given
        text = "\n\n".join(message["content"] for message in messages or [])
        key = stable_key(" ".join(text.split()))
        if messages is None:
            skipped["prompt_is_no_text"] += 1
            continue
        if not text.strip() or messages[-1]["role"] == "assistant":
            skipped["ends_with_assistant" if text.strip() else "empty_prompt"] += 1
            continue
        if prompts is not None:
            prompts.add(key)
        if answer is None:
            skipped["no_answer" if given is None else "answer_is_no_text"] += 1
        elif answer == "":
            skipped["empty_answer"] += 1
        elif key in kept:
            skipped["duplicate_prompt"] += 1
        else:
            kept[key] = UsableRow(text, messages, answer)
    return kept
