"""Rows: which data sets are named, how their rows are read, and what a row's prompt and answer are."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tasks.answers import NO_ANSWER, last_box
from tasks.judge_process import VERIFIERS
from tasks.prompts import stable_key

# The columns looked for, in this order, if none is named: GSM8K has question and answer, Polaris and DeepScaleR have
# problem and answer. A dot goes into a nested record.
PROMPT_COLUMNS = ("prompt", "problem", "question", "instruction", "query", "messages", "text")
ANSWER_COLUMNS = (
    "answer", "ground_truth", "final_answer", "expected_answer", "reward_model.ground_truth", "solution",
)  # fmt: skip
# Columns beside a question without which it is not whole: choices, what is to be read or seen, tools.
PARTS = re.compile(
    r"(?i)(?!n_|num(?:ber_of)?_|has_|is_|answer_(?!choice|option)|solution|response|output|correct|gold|generated|"
    r"target)(?:\w+[ _-])?"
    r"(?:choices?|options?|endings?|candidates?|passages?|contexts?|ctx|articles?|documents?|paragraphs?|story|stories|lectures?|abstract|stem|given|graphs?|"
    r"body|inputs?|background|scenario|premises?|hypothesis|theory|puzzle|dialog(?:ue)?s?|history|transcripts?|text|"
    r"sentences?|excerpts?|snippets?|tables?|schema|tools?|functions?|(?:image|figure|diagram|picture|audio|video)"
    r"s?(?:_(?:path|file|name|url|id|bytes))?)[ _-]?[a-e\d]?|problem|question|instruction|(?-i:[A-E])"
)
FILE_KINDS = (".jsonl", ".parquet")
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """A file or a hub id with its configuration and split, and its reward."""

    name: str
    config: str | None = None
    split: str | None = None  # None: `train`
    reward: str | None = None  # None: the reward of all data sets that name none


def parse_data_sets(text: str) -> list[DataSet]:
    """Data sets of `NAME[:CONFIG[:SPLIT]][:REWARD],...`. NAME is a .jsonl or .parquet file or a Hugging Face id, REWARD
    one of VERIFIERS.

        "openai/gsm8k:main,my.jsonl"      two data sets, shuffled together
        "my/set::test"                    reads another split than `train`
        "a.jsonl:exact,my/set:main:math"  judges the first by `exact`, the second as math

    Raises ValueError on a part without a name, on a data set that is named twice, and on a split of a file.
    """
    parts = [text] if os.path.isfile(split_reward(text)[0]) else text.split(",")
    data_sets = [parse_data_set(part.strip()) for part in parts]
    names = [data.name for data in data_sets]
    if len(set(names)) < len(names):
        raise ValueError(f"`dataset` names a data set twice: {text}; name each once")
    return data_sets


def parse_data_set(text: str) -> DataSet:
    """One of the parts that `parse_data_sets` reads."""
    names, reward = split_reward(text)
    if os.path.isfile(names):  # its path may hold a colon
        return DataSet(names, reward=reward)
    name, config, split = [*names.split(":", 2), "", ""][:3]  # a split may hold a colon: train[:100]
    if not name:
        raise ValueError(f"`dataset` must be NAME[:CONFIG[:SPLIT]][:REWARD],... got {text!r}")
    if ":" in names and (name.endswith(FILE_KINDS) or os.path.isfile(name)):
        raise ValueError(f"`dataset` {names}: a file has no configuration and no split; give name and reward only")
    return DataSet(name, config or None, split or None, reward)


def split_reward(text: str) -> tuple[str, str | None]:
    """(data set, its reward) of one of the parts."""
    names, _, last = text.rpartition(":")
    return (names, last) if last in VERIFIERS else (text, None)


def parse_eval_sets(text: str) -> dict[str, DataSet]:
    """{name: data set} of `NAME=DATA[:CONFIG[:SPLIT]][:REWARD],...`, in the same order; the names are the user's own.

        "aime24=aime24.jsonl,math=HuggingFaceH4/MATH-500::test"

    Raises ValueError on a part without a name of letters, digits, dots and dashes, and on a name that comes twice.
    """
    data_sets: dict[str, DataSet] = {}
    parts = [text] if os.path.isfile(text.partition("=")[2]) else text.split(",")
    for part in filter(None, map(str.strip, parts)):
        name, _, data = map(str.strip, part.partition("="))
        if not re.fullmatch(r"[\w.-]+", name) or not data:
            raise ValueError(f"`eval_dataset` must be NAME=DATA[:CONFIG[:SPLIT]][:REWARD],... got {part!r}")
        if name in data_sets:
            raise ValueError(f"`eval_dataset` has the name {name} twice; give each set its own")
        data_sets[name] = parse_data_set(data)
    return data_sets


# ---------------------------------------------------------------------------------------------------------------- rows


class DataRow(NamedTuple):
    """What is kept of a data set's row. `text` is the prompt as it is in the row."""

    text: str
    messages: list[dict[str, str]]
    answer: object


class Rows(NamedTuple):
    """The usable rows of a data set by their keys, the keys of all its prompts, and what is left out, by kind; and in
    words which columns are read and which are not."""

    usable: dict[str, DataRow]
    prompts: set[str]
    skipped: Counter[str]
    columns: str


def read_rows(data: DataSet, prompt_column: str, answer_column: str, reward: str) -> Rows:
    """Reads a data set. Of equal prompts the first stays. Raises ValueError.

    Without a name of a column it looks through PROMPT_COLUMNS or ANSWER_COLUMNS, and refuses rows in which another
    column holds a part of the question. A user's reward function gets the answer as it is in the row. A conversation
    that ends with the assistant's turn is no prompt: it holds an answer.
    """
    objects, skipped = read_objects(data)
    question = find_column(objects, prompt_column, PROMPT_COLUMNS, data.name, "prompt_column")
    answer_column = find_column(objects, answer_column, ANSWER_COLUMNS, data.name, "answer_column")
    used = (question, answer_column, answer_column.split(".")[0])
    unused = [name for name in dict.fromkeys(name for row in objects for name in row) if name not in used]
    parts = [] if prompt_column else [name for name in unused if PARTS.fullmatch(name)]
    lacking = Counter[str]()
    usable: dict[str, DataRow] = {}
    prompts: set[str] = set()
    for row in objects:
        messages = prompt_messages(field_of(row, question))
        if messages is None:
            skipped["prompt_is_no_text"] += 1
            continue
        text = text_of(messages)
        if not text.strip():
            skipped["empty_prompt"] += 1
            continue
        if messages[-1]["role"] == "assistant":
            skipped["ends_with_assistant"] += 1
            continue
        lacking.update(name for name in parts if not is_in(row.get(name), text))
        key = key_of(text)
        prompts.add(key)
        value = field_of(row, answer_column)
        answer = final_answer(value) if reward in VERIFIERS else value
        if value is None:
            skipped["no_answer"] += 1
        elif answer is None:
            skipped["answer_is_no_text"] += 1
        elif answer == "":
            skipped["empty_answer"] += 1
        elif key in usable:
            skipped["duplicate_prompt"] += 1
        else:
            usable[key] = DataRow(text, messages, answer)
    for name, count in lacking.most_common(1):
        raise ValueError(
            f"`dataset` {data.name}: {question} is no whole question without the column {name}, in {count} of "
            f"{len(objects)} rows; write both into one column, or name with `prompt_column` the one that is whole"
        )
    columns = f"{question} and {answer_column}" + (f", not {str(unused)[1:-1]:.300}" if unused else "")
    return Rows(usable, prompts, skipped, columns)


def is_in(value: object, prompt: str) -> bool:
    """Whether a value adds nothing to a prompt's text: it is empty, its words are there, or it repeats the prompt."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(is_in(part, prompt) for part in value)
    words, asked = (" ".join(str(text).split()) for text in (value, prompt))
    return words in asked or asked in words or not re.search(r"\w", words) or NO_ANSWER.fullmatch(words) is not None


def read_objects(data: DataSet) -> tuple[list[JsonObject], Counter[str]]:
    """A data set's rows as they are, and how many lines of a .jsonl file are no row, by kind. Raises ValueError if
    there is no such file, kind of file or data set."""
    check_file(data.name)
    path = Path(data.name)
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    try:
        from datasets import load_dataset

        if os.path.isfile(path):
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist(), Counter()
        return list(load_dataset(data.name, data.config, split=data.split or "train")), Counter()
    except Exception as error:  # `datasets` raises all kinds: RuntimeError for a loading script, ImportError for sound
        raise ValueError(
            f"`dataset` {data.name} cannot be loaded ({type(error).__name__}: {error}); give a .jsonl or "
            ".parquet file, or a data set id, with its configuration and split as NAME:CONFIG:SPLIT"
        ) from error


def check_file(name: str) -> None:
    """Raises ValueError for a file that is not there, or of another kind."""
    is_file = os.path.isfile(name)  # Path.is_file raises where a name is too long
    if name.endswith(FILE_KINDS) and not is_file:
        raise ValueError(f"`dataset` {name}: there is no such file")
    if is_file and not name.endswith(FILE_KINDS):
        raise ValueError(f"`dataset` {name}: a file's name must end with {' or '.join(FILE_KINDS)}")


def read_json_lines(path: Path) -> tuple[list[JsonObject], Counter[str]]:
    """The objects of a JSON Lines file, and how many lines are neither objects nor empty, by kind. `datasets` would
    refuse a whole file for one bad line, and would force each column into one type. Raises ValueError if no line is an
    object or the file is not UTF-8."""
    rows: list[JsonObject] = []
    skipped = Counter[str]()
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"`dataset` {path}: the file is not UTF-8 ({error}); save it as UTF-8") from error
    for line in filter(str.strip, text.split("\n")):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            skipped["not_json"] += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            skipped["not_an_object"] += 1
    if skipped and not rows:
        raise ValueError(
            f"`dataset` {path}: no line is a JSON object; the file begins with {text[:30]!r}; a .jsonl file has one "
            "object on each line, which `jq -c '.[]'` makes of a JSON array and `jq -c .` of objects over several lines"
        )
    return rows, skipped


def field_of(row: JsonObject, column: str) -> object:
    """`row[column]`, where a dot goes into a nested record. None if it is not there."""
    value: object = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def find_column(rows: Sequence[JsonObject], column: str, known: Sequence[str], name: str, option: str) -> str:
    """`column` if it is not empty, or else the first of the `known` ones that any row has, in whatever case. Raises
    ValueError if there is none, with the `option` to change and the first columns that are there."""
    choices = [column] if column else known
    columns = sorted({str(key) for row in rows for key in row})
    in_any_case = [column for choice in choices for column in columns if column.casefold() == choice]
    for choice in (*choices, *in_any_case):
        if any(field_of(row, choice) is not None for row in rows):
            return choice
    listed = ", ".join(columns)[:300] or "none at all"
    raise ValueError(
        f"`dataset` {name}: no row has {', '.join(choices)}; its columns are {listed}; name the right one with "
        f"`{option}`"
    )


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def prompt_messages(value: object) -> list[dict[str, str]] | None:
    """A prompt column's value as chat messages; a string is one message of the user. None if it is neither."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for message in value:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):  # in parts; one without text, as an image, is missing from the question
            try:
                content = "".join(part["text"] for part in content)
            except (TypeError, LookupError):
                return None
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": role, "content": clean_text(content)})
    return messages


def text_of(messages: Sequence[dict[str, str]]) -> str:
    """The text of a prompt."""
    return "\n\n".join(message["content"] for message in messages)


def key_of(text: str) -> str:
    """A problem's key: the hash of its prompt's text with its white space made equal."""
    return stable_key(" ".join(text.split()))


def final_answer(value: object) -> str | None:
    """An answer column's value as text; None if it is neither text nor a number. Of a worked solution only the answer
    counts: what follows `####`, as in GSM8K, and in that the last `\\boxed{}`, as in MATH."""
    if isinstance(value, list) and len(value) == 1:  # as in OlympiadBench
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # Parquet turns a column of whole numbers with a gap into floats, and Python writes small floats as 1e-05.
        value = f"{Decimal(repr(value or 0.0)).normalize():f}"
    text = clean_text(str(value)).rpartition("####")[2]
    box = last_box(text)
    return (text if box is None else box).strip()
