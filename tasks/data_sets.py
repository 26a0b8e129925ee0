"""Tasks of data sets: files and Hugging Face data sets of questions with known answers."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tasks.prompts import Problem, stable_key
from tasks.verifiers import BUILT_IN, Job, RewardPool

# The columns looked for, in this order, where --prompt_column and --answer_column are not given: GSM8K has question and
# answer, Polaris and DeepScaleR problem and answer; a dot goes into a nested record.
PROMPT_COLUMNS = ("prompt", "problem", "question", "instruction")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model.ground_truth", "solution")
FILE_KINDS = (".jsonl", ".parquet")
TIME_IS_UP = "Okay, time is up. Let me stop thinking and formulate a final answer now. "


@dataclass(frozen=True)
class DataSet:
    """One data set of `--dataset`: a file or a hub id with its configuration and split, and its weight in a mixture."""

    name: str
    config: str | None = None
    split: str | None = None  # None: `train`
    weight: float | None = None  # None: drawn in proportion to its size


def parse_data_sets(text: str) -> list[DataSet]:
    """Data sets of `NAME[:CONFIG[:SPLIT]][=WEIGHT],...`: `"openai/gsm8k:main=2,my.jsonl=1"` draws two of three prompts
    from the first, `"openai/gsm8k:main,my.jsonl"` every prompt of both as often; `"my/set::test"` is another split.

    NAME is a .jsonl or .parquet file or a Hugging Face data set id. Raises ValueError on a weight that is no positive
    number, on weights for some only, on a name given twice, and on a file with a configuration or a split.
    """
    found: list[DataSet] = []
    for part in map(str.strip, text.split(",")):
        names, equals, weight = part.partition("=")
        name, config, split = [*names.split(":", 2), "", ""][:3]  # a split may hold a colon: train[:100]
        try:
            value = float(weight) if equals else None
        except ValueError:
            value = math.nan
        if not name or not (value is None or 0 < value < math.inf):
            raise ValueError(f"--dataset must be NAME[:CONFIG[:SPLIT]][=WEIGHT],... weights above 0, got {part!r}")
        if ":" in names and (Path(name).suffix in FILE_KINDS or Path(name).is_file()):
            raise ValueError(f"--dataset {names}: a file has no configuration and no split; give its name alone")
        found.append(DataSet(name, config or None, split or None, value))
    if len({data.name for data in found}) < len(found):
        raise ValueError(f"--dataset names a data set twice: {text}; raise its weight instead")
    if len({data.weight is None for data in found}) > 1:
        raise ValueError(f"--dataset {text}: give every data set a weight, or none, which draws each by its size")
    return found


def read_rows(data: DataSet, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a data set; lines of a .jsonl that are no JSON object are counted in `skipped`.

    Raises ValueError if there is no such file, kind of file or data set.
    """
    path = Path(data.name)
    if path.suffix in FILE_KINDS and not path.is_file():
        raise ValueError(f"--dataset {data.name}: there is no such file")
    if path.is_file() and path.suffix not in FILE_KINDS:
        raise ValueError(f"--dataset {data.name}: a file's name must end with {' or '.join(FILE_KINDS)}")
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
        raise ValueError(f"--dataset {data.name} cannot be loaded ({type(error).__name__}: {error}); give a .jsonl or "
                         ".parquet file, or a data set id, with its configuration and split as NAME:CONFIG:SPLIT"
                         ) from error  # fmt: skip


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
    """`row[column]`, where a dot goes into a nested record; None if it is not there."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def find_column(rows: Sequence[dict[str, Any]], wanted: str | None, known: Sequence[str], flag: str, name: str) -> str:
    """The column to read: `wanted`, or the first of `known` that any row has. Raises ValueError naming the flag."""
    for column in [wanted] if wanted else known:
        if any(field_of(row, column) is not None for row in rows):
            return column
    there = ", ".join(sorted({str(key) for row in rows[:100] for key in row})) or "none at all"
    raise ValueError(f"--dataset {name}: no row has {wanted or ', '.join(known)}; its columns are {there}; "
                     f"name the right one with {flag}")


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def prompt_messages(value: Any) -> list[dict[str, str]] | None:
    """A prompt column's value as chat messages: a string is one of the user; None if it is neither."""
    if isinstance(value, str):
        return [{"role": "user", "content": clean_text(value)}]
    if isinstance(value, list) and value and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        return [{"role": m["role"], "content": clean_text(m["content"])} for m in value]
    return None


def final_answer(value: Any) -> str | None:
    """An answer column's value as text, of GSM8K's worked solutions what follows `####`; None if no text or number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # Parquet turns a column of whole numbers with a gap into floats, and Python writes small floats as 1e-05.
    text = f"{Decimal(repr(value or 0.0)).normalize():f}" if isinstance(value, float) else clean_text(str(value))
    return text.rpartition("####")[2].strip()


def encode_prompts(
    tokenizer: Any, prompts: Sequence[list[dict[str, str]]], options: PromptOptions
) -> list[list[int]]:
    """Token ids of each prompt: `options.template` around its last message, then the chat template, if there is one.
    Chat templates of models that can do both (Qwen3) read `enable_thinking`; None leaves it to them."""
    if not prompts:
        return []
    prompts = [[*p[:-1], {**p[-1], "content": options.template.replace("{prompt}", p[-1]["content"])}] for p in prompts]
    if options.chat and tokenizer.chat_template:
        thinking = {} if options.thinking is None else {"enable_thinking": options.thinking}
        return tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=False, **thinking
        )
    return tokenizer(["\n\n".join(message["content"] for message in p) for p in prompts])["input_ids"]


def default_stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of sequence and those of the generation_config.json beside it (chat models have two)."""
    from transformers import GenerationConfig

    found = [tokenizer.eos_token_id]
    try:
        more = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
        found += more if isinstance(more, list) else [more]
    except OSError:
        pass  # there is none beside it
    return tuple(dict.fromkeys(i for i in found if i is not None))


def default_end_of_thinking(tokenizer: Any) -> str:
    """`</think>` if the vocabulary or the chat template has it; else "", for a model that does not think apart."""
    known = "</think>" in tokenizer.get_vocab() or "</think>" in str(tokenizer.chat_template or "")
    return "</think>" if known else ""


def named_stop_ids(tokenizer: Any, names: str) -> tuple[int, ...]:
    """Ids of the comma-separated tokens `names`. Raises ValueError for one that the tokenizer does not know."""
    vocabulary, tokens = tokenizer.get_vocab(), [name.strip() for name in names.split(",")]
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise ValueError(f"--stop_tokens: the tokenizer has no token {', '.join(map(repr, unknown))}; name single "
                         "tokens as its vocabulary writes them, separated by commas")
    return tuple(vocabulary[token] for token in tokens)


def end_in_text(tokenizer: Any, mark: str) -> Callable[[Sequence[int]], int | None]:
    """A function of completion ids: the index of the token behind the one that completes the text `mark`, else None.

    For marks of several tokens, which byte-pair encoding merges with their neighbours: ` </think>`, `</think>\\n\\n`.
    """
    def answer_start(ids: Sequence[int]) -> int | None:
        def ended(n: int) -> bool:
            return mark in tokenizer.decode(list(ids[:n]), skip_special_tokens=False)

        # A text that holds the mark goes on holding it: the shortest such beginning is found by halving.
        return bisect.bisect_left(range(len(ids)), True, key=ended) if ended(len(ids)) else None

    return answer_start

class DatasetTask:
    """Problems of data sets, judged in worker processes. Made by `load_dataset_task`; `close` ends the workers.

    Beside what every task has: `sources` (names of the data sets), `weights` (their weights for `epoch_order`, empty
    without any), `skipped` (rows left out, by kind) and `counts` (verdicts, by kind).
    """

    def __init__(
        self,
        problems: tuple[list[Problem], list[Problem]],
        tokenizer: Any,
        pool: RewardPool,
        rewards: dict[str, str],
        *,
        prompts: dict[str, str],
        stop_ids: tuple[int, ...],
        end_of_thinking_ids: tuple[int, ...],
        phrase_ids: tuple[int, ...],
        thinking_end: Callable[[Sequence[int]], int | None] | None,
        weights: dict[str, float],
        skipped: Counter[str],
    ) -> None:
        self.train, self.held_out = problems
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self.end_of_thinking_ids, self.phrase_ids = end_of_thinking_ids, phrase_ids
        self.thinking_end = thinking_end
        self.sources, self.weights, self.skipped = list(rewards), weights, skipped
        self._pool, self._rewards, self._prompts = pool, rewards, prompts

    @property
    def counts(self) -> Counter[str]:
        """Verdicts so far by kind: the kinds of `rewards.Verdict`."""
        return self._pool.counts

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """(reward, correct) of each completion of one problem, in order; a stop token at its end is not judged."""
        name, prompt = self._rewards[problem.source], self._prompts[problem.key]
        bodies = [ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids for ids in completions]
        verdicts = self._pool.judge([Job(name, prompt, self.text(ids), problem.answer) for ids in bodies])
        return [(verdict.reward, verdict.correct) for verdict in verdicts]

    def reward(self, problem: Problem, completion_ids: Sequence[int]) -> tuple[float, bool]:
        """`score` of one completion."""
        return self.score(problem, [completion_ids])[0]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts. None as a column looks through PROMPT_COLUMNS or ANSWER_COLUMNS.

    `template` stands around the prompt's text and holds `{prompt}`; `chat` applies the tokenizer's chat template if it
    has one. `thinking` False: the model answers at once; True: it thinks; None: it does if the tokenizer knows an end
    of thinking. `max_tokens` leaves longer prompts out; `held_out` prompts of each data set are kept for evaluation.
    """

    prompt_column: str | None = None
    answer_column: str | None = None
    template: str = "{prompt}"
    chat: bool = True
    thinking: bool | None = None
    held_out: int = 1000
    max_tokens: int | None = None


def read_problems(
    data: DataSet, tokenizer: Any, options: PromptOptions, readable: Callable[[list[Any]], list[bool]], raw: bool,
    skipped: Counter[str],
) -> dict[str, tuple[str, Problem]]:
    """{key: (prompt text, problem)} of one data set's rows; the first of equal prompts stays, others are counted.

    The key is the hash of the row's own text with its white space made equal, so template and tokenizer change no
    split. `raw` keeps the answer as it stands in the row, for a user's reward function.
    """
    rows = list(read_rows(data, skipped))
    prompt_column = find_column(rows, options.prompt_column, PROMPT_COLUMNS, "--prompt_column", data.name)
    answer_column = find_column(rows, options.answer_column, ANSWER_COLUMNS, "--answer_column", data.name)
    kept: dict[str, tuple[str, list[dict[str, str]], Any]] = {}
    for row in rows:
        messages, given = prompt_messages(field_of(row, prompt_column)), field_of(row, answer_column)
        answer = given if raw else final_answer(given)
        text = "\n\n".join(message["content"] for message in messages or [])
        key = stable_key(" ".join(text.split()))
        if messages is None:
            skipped["prompt_is_no_text"] += 1
        elif not text.strip():
            skipped["empty_prompt"] += 1
        elif answer is None:
            skipped["no_answer" if given is None else "answer_is_no_text"] += 1
        elif answer == "":
            skipped["empty_answer"] += 1
        elif key in kept:
            skipped["duplicate_prompt"] += 1
        else:
            kept[key] = text, messages, answer
    for key, good in zip(list(kept), readable([answer for _, _, answer in kept.values()]), strict=True):
        if not good:
            skipped["unreadable_answer"] += 1
            del kept[key]
    encoded = encode_prompts(tokenizer, [messages for _, messages, _ in kept.values()], options)
    found: dict[str, tuple[str, Problem]] = {}
    for (key, (text, _, answer)), ids in zip(kept.items(), encoded, strict=True):
        if options.max_tokens is not None and len(ids) > options.max_tokens:
            skipped["prompt_too_long"] += 1
        else:
            found[key] = text, Problem(key, tuple(ids), answer, data.name)
    return found


def load_dataset_task(
    datasets: str,
    tokenizer: Any,
    options: PromptOptions = PromptOptions(),
    *,
    reward: str = "math",
    reward_workers: int = 2,
    reward_timeout: float = 8.0,
    reward_memory_mb: int = 2048,
    reward_errors: str = "raise",
    end_of_thinking: str | None = None,
    phrase: str | None = None,
    stop_tokens: str | None = None,
    judge: bool = True,
) -> DatasetTask:
    """A task of one data set or several, as `--dataset` names them (`parse_data_sets`).

    `reward` is one name for all or one for each, separated by commas (see verifiers.py). `end_of_thinking`, `phrase`
    and `stop_tokens` are found from the tokenizer where they are None. With `options.thinking` False the whole
    completion is judged; with True what follows `end_of_thinking`, or `</think>`, which the tokenizer need not know as
    one token.
    `judge` False ends the worker processes once the rows are checked, for a process that never scores. The held-out
    problems of a data set are those with the smallest hashes: the order of its rows changes nothing, and a prompt that
    two data sets share belongs to the first. Raises ValueError naming the flag to change.
    """
    named = parse_data_sets(datasets)
    rewards = [name.strip() for name in reward.split(",")]
    rewards = rewards * len(named) if len(rewards) == 1 else rewards
    if len(rewards) != len(named):
        raise ValueError(f"--reward must be one name or one for each of the {len(named)} data sets, got {reward!r}")
    if "{prompt}" not in options.template:
        raise ValueError(f"--prompt_template must hold {{prompt}}, got {options.template!r}")
    if options.thinking is False and end_of_thinking:
        raise ValueError("--end_of_thinking is for models that think; drop it, or --thinking false")
    found = {True: "</think>", False: "", None: default_end_of_thinking(tokenizer)}
    end = end_of_thinking or found[options.thinking]
    words = TIME_IS_UP + end if phrase is None else phrase
    if not words.endswith(end):
        raise ValueError(f"--interruption_phrase must end with the end of thinking {end!r}, got {words!r}")
    stops = default_stop_ids(tokenizer) if stop_tokens is None else named_stop_ids(tokenizer, stop_tokens)
    if not stops:
        raise ValueError("the tokenizer has no end-of-sequence token; name one with --stop_tokens")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if end and text else ()

    with contextlib.ExitStack() as undo:
        pool = RewardPool(rewards, workers=reward_workers, timeout=reward_timeout, memory_mb=reward_memory_mb,
                          errors=reward_errors, end_of_thinking=end)
        undo.callback(pool.close)
        problems, prompts, skipped = split_problems(named, rewards, tokenizer, options, pool)
        if judge:
            undo.pop_all()  # all went well: the task closes the pool
    return DatasetTask(
        problems, tokenizer, pool, {data.name: name for data, name in zip(named, rewards, strict=True)},
        stop_ids=stops, end_of_thinking_ids=ids(end), phrase_ids=ids(words),
        # An added token is never merged with its neighbours, so its id will do.
        thinking_end=end_in_text(tokenizer, end) if end and end not in tokenizer.get_added_vocab() else None,
        weights={data.name: data.weight for data in named if data.weight is not None} if len(named) > 1 else {},
        prompts=prompts, skipped=skipped,
    )  # fmt: skip


def split_problems(
    named: Sequence[DataSet], rewards: Sequence[str], tokenizer: Any, options: PromptOptions, pool: RewardPool
) -> tuple[tuple[list[Problem], list[Problem]], dict[str, str], Counter[str]]:
    """((train, held out), {key: prompt text}, skipped rows by kind) of all data sets."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    prompts: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for data, reward in zip(named, rewards, strict=True):
        def readable(answers: list[Any], reward: str = reward) -> list[bool]:
            return pool.answers_readable(reward, answers)

        found = read_problems(data, tokenizer, options, readable, reward not in BUILT_IN, skipped)
        own = [key for key in sorted(found) if key not in prompts]
        skipped["duplicate_prompt"] += len(found) - len(own)
        if len(own) <= options.held_out:
            raise ValueError(f"--dataset {data.name} has {len(own)} usable prompts (skipped: {dict(+skipped)}), which "
                             f"leaves none to train on beside --held_out {options.held_out}; lower it or add rows")
        prompts.update((key, found[key][0]) for key in own)
        held_out += [found[key][1] for key in own[: options.held_out]]
        train += [found[key][1] for key in own[options.held_out :]]
    return (train, held_out), prompts, +skipped
