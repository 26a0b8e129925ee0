"""Problems and verifiable rewards: what the policy is asked, and who says that the answer is right.

Reinforcement learning with verifiable rewards (ScaleRL, arXiv 2510.13786, section 2) needs nothing of a task but
prompts, a held-out set that training never sees, and a program that says of a completion: right or wrong,

    r(x, y) = +1 if the answer that follows the thinking is right, else -1.

A task is any object with `train` and `held_out` (lists of `Problem`), `tokenizer`, `stop_ids`,
`end_of_thinking_ids`, `thinking_end`, `phrase_ids`, `reward(problem, completion_ids)`, `score(problem, completions)`,
`text(ids)` and `close()`. Two stand here: a built-in one, and `load_dataset_task` for files and Hugging Face data sets
of questions with known answers, judged by rewards.py.

THE BUILT-IN TASK, `ChainTask`: "chain mod 10" is small enough that a model of 0.2M parameters learns it on a laptop in
minutes, and still has what makes reasoning hard: the answer needs a chain of steps, one wrong step spoils the rest,
and thinking longer than the budget is cut. A prompt is a digit and n labelled operations; thinking writes one
`label operation result` a step:

    prompt      7 a +5 b *3 c -4 <think>
    thinking    a +5 2 b *3 6 c -4 2
    answer      </think> 6 2 <eos>                       v_(n-1) and v_n

Every operation is a bijection modulo 10, so an error always reaches the end; two numbers make a guess right 1 % of
the time. `warm_start` stands in for pre-training: it teaches a tiny Qwen3 the format, and arithmetic with mistakes
that practice must undo: part of the facts are learned wrong, and some demonstrations ramble past the budget.

THE SPLIT is by the hash of a problem's text and nothing else, so that no seed, order of rows, duplicate or
demonstration can carry a held-out problem into training.

SIMPLIFIED. Chain mod 10 has no answer parser: the format is part of the exact match. Near-duplicates of a data set
(other words, the same numbers) are not looked for.

>>> task = ChainTask(seed=0)
>>> task.text(task.held_out[0].prompt_ids), task.held_out[0].answer
>>> task.reward(task.held_out[0], task.tokenizer("</think> 6 2 <eos>")["input_ids"])
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import inspect
import json
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from rewards import BUILT_IN, Job, RewardPool

# ---------------------------------------------------------------------------------------------------------------------
# What every task shares


@dataclass(frozen=True)
class Problem:
    """One prompt. `key` is a hash of the problem's text: the same text has the same key in every run and process."""

    key: str
    prompt_ids: tuple[int, ...]
    answer: object
    source: str = ""


def stable_key(text: str) -> str:
    """16 hex digits of the SHA-256 of `text`. Python's own `hash` differs from process to process."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Chain mod 10: the words

DIGITS = tuple("0123456789")
LABELS = tuple("abcdefgh")
OPERATIONS = tuple(f"+{i}" for i in range(1, 10)) + tuple(f"-{i}" for i in range(1, 10)) + ("*3", "*7", "*9")
RECHECK, RESTART = "wait", "again"
PHRASE = ("time", "up", "</think>")
SPECIAL = ("<pad>", "<eos>", "<think>", "</think>")
WORDS = (*SPECIAL, RECHECK, RESTART, *PHRASE[:-1], *DIGITS, *LABELS, *OPERATIONS)
IDS = {word: i for i, word in enumerate(WORDS)}
# One problem in this many is held out, by the hash of its text.
HELD_OUT_ONE_IN = 8


def apply(operation: str, value: int) -> int:
    """`value` after one of OPERATIONS, modulo 10: `apply("*7", 4) == 8`."""
    number = int(operation[1:])
    return (value + number if operation[0] == "+" else value - number if operation[0] == "-" else value * number) % 10


def chain_values(start: int, operations: Sequence[str]) -> list[int]:
    """The right values [v_0 = start, v_1, ..., v_n]."""
    values = [start]
    for operation in operations:
        values.append(apply(operation, values[-1]))
    return values


def draw_chain(rng: random.Random, min_ops: int, max_ops: int) -> tuple[int, list[str]]:
    """A random start digit and n operations, n uniform in min_ops..max_ops."""
    return rng.randrange(10), [rng.choice(OPERATIONS) for _ in range(rng.randint(min_ops, max_ops))]


def chain_text(start: int, operations: Sequence[str]) -> str:
    """The prompt: `chain_text(7, ["+5", "*3"]) == "7 a +5 b *3 <think>"`."""
    steps = " ".join(f"{label} {operation}" for label, operation in zip(LABELS, operations, strict=False))
    return f"{start} {steps} <think>"


def is_held_out(text: str) -> bool:
    """True for one problem text in HELD_OUT_ONE_IN. Nothing else decides, so no seed or pool size can mix the sets."""
    return int(stable_key(text), 16) % HELD_OUT_ONE_IN == 0


def word_tokenizer() -> Any:
    """A Hugging Face tokenizer in which every word of WORDS is one token; an unknown word is an error."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class ChainTask:
    """Chain mod 10. `seed` draws the training pool; the held-out problems are the same for every seed.

    `train` has `pool_size` and `held_out` `held_out_size` distinct problems of min_ops..max_ops operations. Raises
    ValueError if the range is not within 2..8 or has too few distinct problems.
    """

    def __init__(
        self, seed: int = 0, pool_size: int = 2048, held_out_size: int = 512, *, min_ops: int = 2, max_ops: int = 8
    ) -> None:
        if not 2 <= min_ops <= max_ops <= len(LABELS):
            raise ValueError(f"min_ops and max_ops must satisfy 2 <= min_ops <= max_ops <= {len(LABELS)}, "
                             f"got {min_ops} and {max_ops}")
        self.tokenizer = word_tokenizer()
        self.sources, self.weights = ["chain"], {}
        self.stop_ids = (IDS["<eos>"],)
        self.end_of_thinking_ids = (IDS["</think>"],)
        self.thinking_end = None  # the mark is always one token
        self.phrase_ids = tuple(IDS[word] for word in PHRASE)
        self.train = self._draw(random.Random(f"train {seed}"), pool_size, (min_ops, max_ops), held_out=False)
        self.held_out = self._draw(random.Random("held out"), held_out_size, (min_ops, max_ops), held_out=True)

    @staticmethod
    def _draw(rng: random.Random, size: int, ops: tuple[int, int], held_out: bool) -> list[Problem]:
        problems: dict[str, Problem] = {}
        for _ in range(1000 + 100 * size):
            if len(problems) == size:
                break
            start, operations = draw_chain(rng, *ops)
            text = chain_text(start, operations)
            if is_held_out(text) == held_out:
                values = chain_values(start, operations)
                ids = tuple(IDS[word] for word in text.split())
                problems[text] = Problem(stable_key(text), ids, f"{values[-2]} {values[-1]}", "chain")
        if len(problems) < size:
            raise ValueError(f"there are fewer than {size} distinct problems of {ops[0]} to {ops[1]} operations; "
                             "ask for fewer problems or more operations")
        return list(problems.values())

    def reward(self, problem: Problem, completion_ids: Sequence[int]) -> tuple[float, bool]:
        """(+1.0, True) if exactly `v_(n-1) v_n <eos>` follows the first `</think>`, else (-1.0, False)."""
        ids = list(completion_ids)
        end = self.end_of_thinking_ids[0]
        if end not in ids:
            return -1.0, False
        wanted = [IDS[word] for word in str(problem.answer).split()] + [self.stop_ids[0]]
        correct = ids[ids.index(end) + 1 :] == wanted
        return (1.0 if correct else -1.0), correct

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """`reward` of each completion of one problem, in order."""
        return [self.reward(problem, completion) for completion in completions]

    def text(self, ids: Sequence[int]) -> str:
        """The words of `ids`, special ones included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def close(self) -> None:
        """Nothing to release: there are no worker processes."""


# ---------------------------------------------------------------------------------------------------------------------
# Chain mod 10: the warm start


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start: the model, how it is trained, and what is wrong with the demonstrations.

    `wrong_facts` of the 210 (operation, value) facts carry a fixed wrong result, shown `wrong_shown` of the time;
    any other result is replaced by a random digit with probability `noise`. `recheck` is per step, `restart` and
    `cut` per demonstration. Harder (a lower ceiling for the same compute): raise `wrong_facts`, `wrong_shown` or
    `noise`, or train on a ChainTask with more operations.
    """

    min_ops: int = 2
    max_ops: int = 8
    wrong_facts: float = 0.40
    wrong_shown: float = 0.70
    noise: float = 0.18
    recheck: float = 0.15
    restart: float = 0.35
    cut: float = 0.15
    clean_loss: float = 0.08
    clean_steps: int = 600
    corrupted_steps: int = 90
    batch_size: int = 64
    lr: float = 3e-3
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    init_std: float = 0.08


def wrong_results(share: float, seed: int) -> dict[tuple[str, int], int]:
    """A fixed wrong result for `share` of all (operation, value) facts."""
    rng = random.Random(f"wrong facts {seed}")
    facts = [(operation, value) for operation in OPERATIONS for value in range(10)]
    return {
        (operation, value): (apply(operation, value) + rng.randint(1, 9)) % 10
        for operation, value in rng.sample(facts, round(share * len(facts)))
    }


class Demonstrator:
    """Writes demonstrations: clean ones, or corrupted ones with the mistakes and habits that `settings` names.

    `seed` fixes which facts are wrong; `stream` names the random numbers, so that the same mistakes can be shown on
    other problems.
    """

    def __init__(self, settings: WarmStart, seed: int, corrupted: bool, stream: str = "warm start") -> None:
        self.settings, self.corrupted = settings, corrupted
        self.rng = random.Random(f"demonstrations {seed} {corrupted} {stream}")
        self.wrong = wrong_results(settings.wrong_facts, seed)

    def result(self, operation: str, value: int) -> int:
        """What the demonstration writes as the result of `operation` on `value`."""
        right = apply(operation, value)
        if not self.corrupted:
            return right
        if (operation, value) in self.wrong and self.rng.random() < self.settings.wrong_shown:
            return self.wrong[operation, value]
        return self.rng.randrange(10) if self.rng.random() < self.settings.noise else right

    def thinking(self, start: int, operations: Sequence[str]) -> list[str]:
        """The words of the thinking: every step, with rechecks of a step and a restart from the first one."""
        words: list[str] = []
        value, i = start, 0
        restart_at = self._restart_at(len(operations)) if self.corrupted else 0
        while i < len(operations):
            before, value = value, self.result(operations[i], value)
            words += [LABELS[i], operations[i], str(value)]
            if self.corrupted and self.rng.random() < self.settings.recheck:
                value = self.result(operations[i], before)
                words += [RECHECK, LABELS[i], operations[i], str(value)]
            i += 1
            if i == restart_at:
                words.append(RESTART)
                value, i, restart_at = start, 0, 0
        return words

    def _restart_at(self, n: int) -> int:
        """After how many steps the thinking starts over, 0 for never. Half do so at the end: the longest rambling."""
        if self.rng.random() >= self.settings.restart:
            return 0
        return n if self.rng.random() < 0.5 else self.rng.randint(1, n)

    def demonstration(self) -> tuple[list[str], list[str], list[bool]]:
        """(prompt words, completion words, which completion words are taught) of a problem that is not held out."""
        while True:
            start, operations = draw_chain(self.rng, self.settings.min_ops, self.settings.max_ops)
            text = chain_text(start, operations)
            if not is_held_out(text):
                break
        words, close, taught = self.thinking(start, operations), ["</think>"], [True]
        if self.corrupted and self.rng.random() < self.settings.cut:
            words = words[: self.rng.randint(3, len(words))]
            # The phrase will be forced, never sampled: the model learns what follows it, not to write it.
            close, taught = list(PHRASE), [False] * len(PHRASE)
        answer = [*last_two(start, words), "<eos>"]
        return text.split(), words + close + answer, [True] * len(words) + taught + [True] * len(answer)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch: (input ids, labels), both (N, T), right-padded; a label is -100 where nothing is taught."""
        rows = [self.demonstration() for _ in range(self.settings.batch_size)]
        longest = max(len(prompt) + len(completion) for prompt, completion, _ in rows)
        ids = torch.full((len(rows), longest), IDS["<pad>"])  # (N, T)
        labels = torch.full((len(rows), longest), -100)  # (N, T)
        for row, (prompt, completion, taught) in enumerate(rows):
            tokens = torch.tensor([IDS[word] for word in prompt + completion])
            ids[row, : len(tokens)] = tokens
            wanted = torch.tensor([False] * len(prompt) + taught)
            labels[row, : len(tokens)] = torch.where(wanted, tokens, -100)
        return ids, labels


def last_two(start: int, thinking: Sequence[str]) -> list[str]:
    """The newest results of the two furthest steps that `thinking` reached: the best answer to give when cut."""
    values = {0: str(start), -1: str(start)}
    for i in range(len(thinking) - 2):
        if thinking[i] in LABELS and thinking[i + 2] in DIGITS:
            values[LABELS.index(thinking[i]) + 1] = thinking[i + 2]
    furthest = max(values)
    return [values.get(furthest - 1, str(start)), values[furthest]]


Batch = tuple[torch.Tensor, torch.Tensor]


def supervised_steps(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> Iterator[float]:
    """One optimiser step a batch on the mean cross-entropy of the taught tokens; yields each step's loss."""
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits  # (N, T, V)
        # Position t predicts token t + 1.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def new_model(settings: WarmStart, seed: int) -> Any:
    """The tiny Qwen3ForCausalLM with random weights. head_dim is 32: vLLM's CPU attention refuses 24."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=settings.hidden_size, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, num_key_value_heads=settings.kv_heads, head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size, tie_word_embeddings=True, initializer_range=settings.init_std,
        max_position_embeddings=256, eos_token_id=IDS["<eos>"], pad_token_id=IDS["<pad>"], bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def warm_start_optimizer(model: Any, settings: WarmStart) -> torch.optim.AdamW:
    """AdamW as the warm start uses it."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)


def train_warm_start(settings: WarmStart, seed: int, report: Callable[[str], None] = lambda line: None) -> Any:
    """The warm-started model: clean demonstrations until they are known, then corrupted ones.

    The first phase ends at a smoothed loss, not at a step count: how many steps it takes depends on the seed, and
    with it would depend how much is left for RL. Raises RuntimeError if the loss is not reached.
    """
    model = new_model(settings, seed)
    optimizer = warm_start_optimizer(model, settings)
    clean, corrupted = (Demonstrator(settings, seed, corrupted) for corrupted in (False, True))
    smoothed, step = math.inf, 0
    for loss in supervised_steps(model, optimizer, (clean.batch() for _ in range(settings.clean_steps))):
        step += 1
        smoothed = loss if step == 1 else 0.9 * smoothed + 0.1 * loss
        if smoothed < settings.clean_loss:
            break
    else:
        raise RuntimeError(f"the warm start's loss is {smoothed:.3f} after {step} clean steps, not below "
                           f"{settings.clean_loss}; raise clean_steps or try another seed")
    report(f"warm start: {step} clean steps, loss {smoothed:.3f}")
    for loss in supervised_steps(model, optimizer, (corrupted.batch() for _ in range(settings.corrupted_steps))):
        smoothed = 0.9 * smoothed + 0.1 * loss
    report(f"warm start: {settings.corrupted_steps} corrupted steps, loss {smoothed:.3f}")
    return model.eval()


def warm_start(
    cache_dir: str | Path,
    *,
    seed: int = 0,
    settings: WarmStart | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Folder of the warm-started model and its tokenizer in Hugging Face format; trained once, then cached.

    `settings` defaults to `WarmStart()`; `report` gets one line a phase. The folder's name is a hash of the settings,
    the seed and the source of all that makes the model. It is written under a temporary name and renamed: a folder
    that exists is complete, whoever was killed.
    """
    settings = settings or WarmStart()
    makers = (draw_chain, chain_text, apply, is_held_out, wrong_results, last_two, Demonstrator, supervised_steps,
              new_model, warm_start_optimizer, train_warm_start, word_tokenizer)
    made_of = [asdict(settings), seed, WORDS, HELD_OUT_ONE_IN, torch.__version__, *map(inspect.getsource, makers)]
    folder = Path(cache_dir) / f"chain-{stable_key(json.dumps(made_of))}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        train_warm_start(settings, seed, report).save_pretrained(temporary)
        word_tokenizer().save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it 0o700
        temporary.rename(folder)
    except OSError:
        # Two processes at once: the other was first, and its model is the same.
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Data sets

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


def epoch_order(problems: Sequence[Problem], weights: dict[str, float], seed: int, epoch: int) -> list[int]:
    """Which problem comes when in one epoch of a weighted mixture: indices into `problems`, as many places as the
    sources in `weights` have problems.

    Each source gets its share of the epoch's places and, while the weights stay, goes on where it was in the last
    epoch, through shuffles of its own problems: a small source with a large weight comes round more often than a large
    one with a small weight. An epoch need not hold every problem; any two in a row hold all of at least one source.
    Pure: the place in a run is (seed, weights, epoch, position). With no weights this is a shuffle of everything.
    """
    owned = {source: [i for i, problem in enumerate(problems) if problem.source == source] for source in weights}
    places, total, taken, start = sum(map(len, owned.values())), sum(weights.values()), 0.0, 0
    order = [] if weights else list(range(len(problems)))
    for source, weight in sorted(weights.items()):
        own = owned[source]
        # Rounded cumulative shares: the counts add up to the epoch's length.
        taken += weight
        count = round(taken / total * places) - start
        start += count
        place = epoch * count
        while count:
            shuffle = random.Random(f"{seed} {source} {place // len(own)}").sample(own, len(own))
            some = shuffle[place % len(own) :][:count]
            order, place, count = order + some, place + len(some), count - len(some)
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order


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

    `reward` is one name for all or one for each, separated by commas (see rewards.py). `end_of_thinking`, `phrase` and
    `stop_tokens` are found from the tokenizer where they are None. With `options.thinking` False the whole completion
    is judged; with True what follows `end_of_thinking`, or `</think>`, which the tokenizer need not know as one token.
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
