"""The built-in task: chain mod 10.

PROBLEM. A run that shows what ScaleRL does needs a task that a model of 0.2M parameters learns on a laptop in minutes,
and that still has what makes reasoning hard: the answer takes a chain of steps, one wrong step spoils the rest, and
thinking that is longer than its budget is cut.

IDEA. A prompt is a digit and n labeled operations. Thinking writes one `label operation result` per step:

    prompt      7 a +5 b *3 c -4 <think>
    thinking    a +5 2 b *3 6 c -4 2                     7 + 5 = 12 -> 2,  2 * 3 = 6,  6 - 4 = 2
    answer      </think> 6 2 <eos>                       v_(n-1) and v_n

Every operation is a bijection modulo 10, so an error always reaches the end. Two numbers make a guess right 1 % of the
time; with one number (10 %), runs collapsed into guessing. A word is a token.

THE SPLIT is by the hash of a problem's text and nothing else, so that no seed, pool size or demonstration can carry a
held-out problem into training.

SIMPLIFIED. There is no answer parser: the format is part of the exact match.

>>> task = ChainTask(seed=0)
>>> problem = task.held_out[0]
>>> task.text(problem.prompt_ids), problem.answer
>>> task.reward(problem, task.tokenizer(f"</think> {problem.answer} <eos>")["input_ids"])
(1.0, True)
"""

import random
from collections.abc import Sequence
from typing import Any

from tasks.prompts import Problem, stable_key

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
    """True for one problem text in HELD_OUT_ONE_IN."""
    return int(stable_key(text), 16) % HELD_OUT_ONE_IN == 0


def impossible_answer(text: str, one_in: int) -> str | None:
    """A key of three digits for one problem text in `one_in`, None for the others. The hash of the text draws the
    digits: no policy can know them, and one that answers with two numbers practically never samples them."""
    number = int(stable_key(text), 16) // HELD_OUT_ONE_IN  # so that both splits have such problems
    return " ".join(f"{number // one_in % 1000:03}") if number % one_in == 0 else None


def word_tokenizer() -> Any:
    """A Hugging Face tokenizer in which every word of WORDS is one token. An unknown word is an error."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class ChainTask:
    """Chain mod 10. `seed` draws the training pool; the held-out problems are the same for every seed.

    `train` has `pool_size` distinct problems of min_ops..max_ops operations, `held_out` has `held_out_size`. With
    `impossible_every=5` every fifth problem of both lists is impossible (`impossible_answer`). Raises ValueError if the
    range is not within 2..8 or has too few distinct problems.
    """

    def __init__(
        self, seed: int = 0, pool_size: int = 2048, held_out_size: int = 512, *, min_ops: int = 2, max_ops: int = 8,
        impossible_every: int = 0,
    ) -> None:  # fmt: skip
        if not 2 <= min_ops <= max_ops <= len(LABELS):
            raise ValueError(
                f"min_ops and max_ops must satisfy 2 <= min_ops <= max_ops <= {len(LABELS)}, "
                f"got {min_ops} and {max_ops}"
            )
        self.tokenizer = word_tokenizer()
        self.sources, self.eval_sources = ["chain"], list[str]()
        self.weights: dict[str, float] = {}
        self.stop_ids = (IDS["<eos>"],)
        self.end_of_thinking_ids = (IDS["</think>"],)
        self.thinking_end = None  # the mark is always one token
        self.phrase_ids = tuple(IDS[word] for word in PHRASE)
        self.ops, self.impossible_every = (min_ops, max_ops), impossible_every
        self.ceiling: float | None = None  # the highest pass rate, where the task knows it
        self.train = self._draw(random.Random(f"train {seed}"), pool_size, held_out=False)
        self.held_out = self._draw(random.Random("held out"), held_out_size, held_out=True)

    def _draw(self, rng: random.Random, size: int, held_out: bool) -> list[Problem]:
        problems: dict[str, Problem] = {}
        for _ in range(1000 + 100 * size):
            if len(problems) == size:
                break
            start, operations = draw_chain(rng, *self.ops)
            text = chain_text(start, operations)
            impossible = impossible_answer(text, self.impossible_every) if self.impossible_every else None
            # By their place in the list: their share is known exactly, and with it the ceiling.
            wanted = self.impossible_every > 0 and len(problems) % self.impossible_every == self.impossible_every - 1
            if is_held_out(text) == held_out and (impossible is not None) == wanted:
                values = chain_values(start, operations)
                ids = tuple(IDS[word] for word in text.split())
                problems[text] = Problem(stable_key(text), ids, impossible or f"{values[-2]} {values[-1]}", "chain")
        if len(problems) < size:
            raise ValueError(
                f"there are fewer than {size} distinct problems of {self.ops[0]} to {self.ops[1]} operations; "
                "ask for fewer problems or more operations"
            )
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
        """The words of `ids`, special ones included; <99> for an id without a word, which `decode` would leave out."""
        return " ".join(WORDS[i] if i < len(WORDS) else f"<{i}>" for i in ids)

    def close(self) -> None:
        """Nothing to release: there are no worker processes."""
