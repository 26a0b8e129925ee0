"""The built-in task, chain mod 10, which is made so that the scaling law can be seen.

PROBLEM. A run that shows what ScaleRL does needs a task that a tiny model learns on a laptop in minutes. The task must
still have what makes reasoning hard: a chain of steps, where one wrong step spoils the rest, and a budget for thinking.

IDEA. A prompt is a digit and n labeled operations. Thinking writes one `label operation result` per step:

    prompt      7 a +5 b *3 c -4 <think>
    thinking    a +5 2 b *3 6 c -4 2                     7 + 5 = 12 -> 2,  2 * 3 = 6,  6 - 4 = 2
    answer      </think> 6 2 <eos>                       v_(n-1) and v_n

Every operation is a bijection modulo 10, so an error always reaches the end. Two numbers make a guess right 1 % of the
time; with one number (10 %), runs collapsed into guessing. A word is a token.

THE SPLIT is by the hash of a problem's text and nothing else, so that no seed, pool size or demonstration can carry a
held-out problem into training.

WHY GRADED. By the law (arXiv 2510.13786, Eq. 1) pass rate is a sigmoid in log C. That is so where some problems are
learned sooner than others. If all mistakes of the starting model are equally strong, they are unlearned together. The
curve is then a cliff, and what comes before the edge says little about what comes after it.

Let T be the compute after which a problem, drawn at random, is solved. The pass rate after compute C is the share of
problems with T <= C, and the law's share of the gain,

    P(T <= C) = 1 / (1 + (C_mid / C)^B),

is the distribution function of a log-logistic: log T is a logistic variable with its middle at log C_mid and scale 1/B.
For B = 2 one problem in ten is solved by C_mid / 3 and nine in ten by 3 C_mid, nine times the compute. So T is spread:

- EVERY fact, such as 7 + 5, has wrong results in the demonstrations of the first model (lab/warm_start.py). Its right
  result is shown with a probability that is evenly spaced over the 210 facts, from .05 to .9. A right result is
  reinforced only when it is sampled, so T goes roughly with 1 / probability, which has a long tail. The strength of
  each fact is the same for all seeds. A problem needs two to four facts, and each fact is in 1.4 % of the problems, so
  a fact that is learned late is a small step.
- ANY of the nine wrong results takes the rest. If it were always the same one, a fact that is right in 5 % of the
  samples could be lost for good: as the policy becomes more certain, a wrong result that is twenty times as likely
  becomes a thousand times as likely.
- ONE PROBLEM IN FIVE has a key that the policy practically never samples (`impossible_answer`). These stand for what is
  too hard for a real model. So the ceiling A is .8 by construction, and a fit can be judged by that number.

So the task was made to show the law, and is no evidence that other tasks obey it. Nor is the law exact here: near the
end few groups have unequal rewards and the whole gradient goes to them, and the last few facts come later than the law
says. So the Weibull form of forecast.py fits most runs better than Eq. 1 does.

DISCOVER is a second task, made so that the recipe's ingredients can be seen. Its problems are the graded ones, without
impossible ones. Its first model knows its facts but seldom thinks: in all tries but one of fifty it answers at once,
with two digits at random. A run makes the rare behavior the rule: most groups have equal rewards at first, the
tokens that have to grow are rare ones, and the completions that earn the reward are three times as long as the others.
The first model is the same for every seed, as a pretrained model is.

SIMPLIFIED. There is no answer parser: the format is part of the exact match.

>>> task = graded_task()
>>> [(task.text(problem.prompt_ids), problem.answer) for problem in task.held_out[3:5]]
[('1 a -9 b +7 c -5 <think>', '9 4'), ('7 a +8 b -9 <think>', '4 6 9')]
>>> task.score(task.held_out[3], [task.tokenizer("a -9 2 b +7 9 c -5 4 </think> 9 4 <eos>")["input_ids"]])
[(1.0, True)]
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.prompts import Problem, Task, stable_key

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerFast

DIGITS = tuple("0123456789")
LABELS = tuple("abcdefgh")
OPERATIONS = (*(f"{sign}{i}" for sign in "+-" for i in range(1, 10)), "*3", "*7", "*9")
RECHECK, RESTART = "wait", "again"
PHRASE = ("time", "up", "</think>")
SPECIAL = ("<pad>", "<eos>", "<think>", "</think>")
WORDS = (*SPECIAL, RECHECK, RESTART, *PHRASE[:-1], *DIGITS, *LABELS, *OPERATIONS)
IDS = {word: i for i, word in enumerate(WORDS)}
HELD_OUT_ONE_IN = 8  # problems, by the hash of their text
OPS = (2, 4)  # fewest and most operations of a problem; there are labels for eight
MOST_PROBLEMS = 100_000  # of 2 million; the held-out ones are an eighth
IMPOSSIBLE_EVERY = 5  # problems of the graded task
DISCOVER_POOL = 128  # training problems
CEILING = 1 - 1 / IMPOSSIBLE_EVERY


def apply(operation: str, value: int) -> int:
    """`value` after one of OPERATIONS, modulo 10: `apply("*7", 4) == 8`."""
    sign, number = operation[0], int(operation[1:])
    if sign == "*":
        return value * number % 10
    return (value + number if sign == "+" else value - number) % 10


def chain_values(start: int, operations: Sequence[str]) -> list[int]:
    """The right values [v_0 = start, v_1, ..., v_n]."""
    values = [start]
    for operation in operations:
        values.append(apply(operation, values[-1]))
    return values


def draw_chain(rng: random.Random, ops: tuple[int, int] = OPS) -> tuple[int, list[str]]:
    """A start digit and n operations, n uniform from the first of `ops` to the last."""
    return rng.randrange(10), [rng.choice(OPERATIONS) for _ in range(rng.randint(*ops))]


def chain_text(start: int, operations: Sequence[str]) -> str:
    """The prompt: `chain_text(7, ["+5", "*3"]) == "7 a +5 b *3 <think>"`."""
    steps = " ".join(f"{label} {operation}" for label, operation in zip(LABELS, operations, strict=False))
    return f"{start} {steps} <think>"


def is_held_out(text: str) -> bool:
    """True for one problem text in HELD_OUT_ONE_IN."""
    return int(stable_key(text), 16) % HELD_OUT_ONE_IN == 0


def impossible_answer(text: str) -> str | None:
    """A key of three digits for one problem text in IMPOSSIBLE_EVERY, None for the others. The hash of the text draws
    the digits: no policy can know them, and one that answers with two numbers practically never samples them."""
    number = int(stable_key(text), 16) // HELD_OUT_ONE_IN  # so that both splits have such problems
    impossible = number % IMPOSSIBLE_EVERY == 0
    return " ".join(f"{number // IMPOSSIBLE_EVERY % 1000:03}") if impossible else None


def word_tokenizer() -> "PreTrainedTokenizerFast":
    """A Hugging Face tokenizer in which every word of WORDS is one token. An unknown word is an error."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class ChainTask(Task):
    """Chain mod 10. `seed` draws the training pool; the held-out problems are the same for every seed.

    `train` has `pool_size` distinct problems of `ops` operations, `held_out` has `held_out_size`. With `graded` every
    fifth problem of both lists is impossible (`impossible_answer`). Raises ValueError if more problems are asked for
    than MOST_PROBLEMS.
    """

    sources = ("chain",)

    def __init__(
        self,
        seed: int = 0,
        pool_size: int = 2048,
        held_out_size: int = 256,
        graded: bool = False,
        ops: tuple[int, int] = OPS,
    ) -> None:
        self.tokenizer = word_tokenizer()
        self.stop_ids = (IDS["<eos>"],)
        self.end_of_thinking_ids = (IDS["</think>"],)
        self.phrase_ids = tuple(IDS[word] for word in PHRASE)
        self.graded = graded
        self.ops = ops
        self.train = self._draw(random.Random(f"train {seed}"), pool_size, held_out=False)
        self.held_out = self._draw(random.Random("held out"), held_out_size, held_out=True)

    def _draw(self, rng: random.Random, size: int, held_out: bool) -> list[Problem]:
        if size > MOST_PROBLEMS:
            raise ValueError(f"there are at most {MOST_PROBLEMS:,} problems of a kind; ask for fewer")
        problems: dict[str, Problem] = {}
        while len(problems) < size:
            start, operations = draw_chain(rng, self.ops)
            text = chain_text(start, operations)
            if is_held_out(text) != held_out:
                continue
            impossible = impossible_answer(text) if self.graded else None
            # The place in the list decides which problems are impossible, so their share, and CEILING, are exact.
            next_is_impossible = self.graded and len(problems) % IMPOSSIBLE_EVERY == IMPOSSIBLE_EVERY - 1
            if next_is_impossible != (impossible is not None):
                continue
            before, last = chain_values(start, operations)[-2:]
            ids = tuple(IDS[word] for word in text.split())
            problems[text] = Problem(stable_key(text), ids, impossible or f"{before} {last}", "chain")
        return list(problems.values())

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """For each completion, in order: (+1.0, True) if exactly `v_(n-1) v_n <eos>` follows the first `</think>`, else
        (-1.0, False)."""
        end = self.end_of_thinking_ids[0]
        expected = [IDS[word] for word in str(problem.answer).split()] + [self.stop_ids[0]]
        scores = []
        for ids in map(list, completions):
            correct = end in ids and ids[ids.index(end) + 1 :] == expected
            scores.append((1.0 if correct else -1.0, correct))
        return scores

    def text(self, ids: Sequence[int]) -> str:
        """The words of `ids`, special ones included; <99> for an id without a word, which `decode` would leave out."""
        return " ".join(WORDS[i] if i < len(WORDS) else f"<{i}>" for i in ids)


def graded_task(seed: int = 0, pool_size: int = 2048, held_out_size: int = 256) -> ChainTask:
    """The graded task: every fifth problem is impossible."""
    return ChainTask(seed, pool_size, held_out_size, graded=True)


# .23M parameters each, FP32; how they were made, and that they can be made again: lab/warm_start.py.
FIRST_MODELS = Path(__file__).parent / "first_models"


def graded(seed: int, held_out: int) -> ChainTask:
    """The default task."""
    task = graded_task(seed, held_out_size=held_out)
    task.first_model = lambda cache, say: FIRST_MODELS / "graded"
    return task


def discover(seed: int, held_out: int) -> ChainTask:
    """The task whose first model thinks in one completion of fifty."""
    task = ChainTask(seed, DISCOVER_POOL, held_out)
    task.first_model = lambda cache, say: FIRST_MODELS / "discover"
    return task


TASKS: dict[str, Callable[[int, int], ChainTask]] = {"graded": graded, "discover": discover}
