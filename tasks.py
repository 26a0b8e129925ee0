"""Problems and verifiable rewards: what the policy is asked, and who says that the answer is right.

Reinforcement learning with verifiable rewards (ScaleRL, arXiv 2510.13786, section 2) needs nothing of a task but
prompts, a held-out set that training never sees, and a program that says of a completion: right or wrong,

    r(x, y) = +1 if the answer that follows the thinking is right, else -1.

A task is any object with `train` and `held_out` (lists of `Problem`), `tokenizer`, `stop_ids`,
`end_of_thinking_ids`, `phrase_ids`, `reward(problem, completion_ids)`, `score(problem, completions)` and `text(ids)`.

`ChainTask`, "chain mod 10", is small enough that a 0.2M-parameter model learns it on a laptop in minutes, and still
has what makes reasoning hard: the answer needs a chain of steps, one wrong step spoils the rest, and thinking longer
than the budget is cut. A prompt is a digit and n labelled operations; thinking writes one `label op result` a step:

    prompt      7 a +5 b *3 c -4 <think>
    thinking    a +5 2 b *3 6 c -4 2
    answer      </think> 6 2 <eos>                       v_(n-1) and v_n

Every operation is a bijection modulo 10, so an error always reaches the end; two numbers make guessing right 1 % of
the time. `warm_start` stands in for pre-training: it teaches a tiny Qwen3 the format, and arithmetic with mistakes
that practice must undo: part of the facts are learned wrong, and some demonstrations ramble past the budget.

Simplified: there is no answer parser (the format itself is part of the exact match); held-out problems are told from
training ones by a hash of their text, so the split holds for every seed, every pool size and every demonstration.

    task = ChainTask(seed=0)
    model_folder = warm_start("runs/cache", seed=0)
    reward, correct = task.reward(task.train[0], task.tokenizer("</think> 6 2 <eos>")["input_ids"])
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

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
WORDS = ("<pad>", "<eos>", "<think>", "</think>", RECHECK, RESTART, "time", "up") + DIGITS + LABELS + OPERATIONS
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
        self.stop_ids = (IDS["<eos>"],)
        self.end_of_thinking_ids = (IDS["</think>"],)
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
