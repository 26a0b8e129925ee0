"""The two built-in tasks, chain mod 10: `chain`, and `graded`, the default, which is made so that the law can be seen.

PROBLEM. A run that shows what ScaleRL does needs a task that a tiny model learns on a laptop in minutes, and that still
has what makes reasoning hard: a chain of steps, of which one wrong one spoils the rest, and a budget for thinking.

IDEA. A prompt is a digit and n labeled operations. Thinking writes one `label operation result` per step:

    prompt      7 a +5 b *3 c -4 <think>
    thinking    a +5 2 b *3 6 c -4 2                     7 + 5 = 12 -> 2,  2 * 3 = 6,  6 - 4 = 2
    answer      </think> 6 2 <eos>                       v_(n-1) and v_n

Every operation is a bijection modulo 10, so an error always reaches the end. Two numbers make a guess right 1 % of the
time; with one number (10 %), runs collapsed into guessing. A word is a token.

THE SPLIT is by the hash of a problem's text and nothing else, so that no seed, pool size or demonstration can carry a
held-out problem into training.

WHY GRADED. By the law (arXiv 2510.13786, Eq. 1) pass rate is a sigmoid in log C. That is so where problems differ in
how soon they are learned. Those of `chain` do not: their mistakes are equally strong and are unlearned together, so its
curve is a cliff, and what comes before the edge says little about what comes after it.

Let T be the compute after which a problem, drawn at random, is solved. The pass rate after compute C is the share of
problems with T <= C, and the law's share of the gain,

    P(T <= C) = 1 / (1 + (C_mid / C)^B),

is the distribution function of a log-logistic: log T is a logistic variable with its middle at log C_mid and scale 1/B.
For B = 2 one problem in ten is solved by C_mid / 3 and nine in ten by 3 C_mid, nine times the compute. So T is spread:

- EVERY fact, such as 7 + 5, has wrong results in the warm start's demonstrations. Its right one is shown with a
  probability that is evenly spaced over the 210 facts, from .05 to .9. A right result is reinforced only when it is
  sampled, so T goes roughly with 1 / probability, which has a long tail. Which fact is how strong is the same for all
  seeds. A problem needs two to four facts, and each fact is in 1.4 % of the problems: a late one is a small step.
- ANY of the nine wrong results takes the rest. With one and the same, a fact that was right in 5 % of the samples could
  be lost for good: as the policy becomes more certain, what is twenty times as likely becomes a thousand times.
- ONE PROBLEM IN FIVE has a key that the policy practically never samples (`impossible_answer`). These stand for what is
  too hard for a real model. So the ceiling A is .8 by construction, and a fit can be judged by that number.

So the task was made to show the law, and is no evidence that other tasks obey it; `chain` is one that does not. Nor is
it exact here: near the end few groups have unequal rewards and the whole gradient goes to them, and the last few facts
come later than the law says. So the Weibull form of fit_sigmoid.py fits most runs better than Eq. 1 does.

SIMPLIFIED. There is no answer parser: the format is part of the exact match.

>>> task = graded_task()
>>> [(task.text(problem.prompt_ids), problem.answer) for problem in task.held_out[3:5]]
[('1 a -9 b +7 c -5 <think>', '9 4'), ('7 a +8 b -9 <think>', '4 6 9')]
>>> task.reward(task.held_out[3], task.tokenizer("a -9 2 b +7 9 c -5 4 </think> 9 4 <eos>")["input_ids"])
(1.0, True)
"""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.prompts import Problem, Task, stable_key

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerFast

DIGITS = tuple("0123456789")
LABELS = tuple("abcdefgh")
OPERATIONS = tuple(f"+{i}" for i in range(1, 10)) + tuple(f"-{i}" for i in range(1, 10)) + ("*3", "*7", "*9")
RECHECK, RESTART = "wait", "again"
PHRASE = ("time", "up", "</think>")
SPECIAL = ("<pad>", "<eos>", "<think>", "</think>")
WORDS = (*SPECIAL, RECHECK, RESTART, *PHRASE[:-1], *DIGITS, *LABELS, *OPERATIONS)
IDS = {word: i for i, word in enumerate(WORDS)}
Fact = tuple[str, int]  # an operation, and the value to which it is applied
HELD_OUT_ONE_IN = 8  # problems, by the hash of their text
GRADED_OPS = (2, 4)  # fewest and most operations of the graded task
IMPOSSIBLE_EVERY = 5  # of its problems
CEILING = 1 - 1 / IMPOSSIBLE_EVERY
GRADED_WRONG = (0.1, 0.95)  # how often its warm start shows a fact wrong: least and most


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
    """A start digit and n operations, n uniform in min_ops..max_ops."""
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


def word_tokenizer() -> "PreTrainedTokenizerFast":
    """A Hugging Face tokenizer in which every word of WORDS is one token. An unknown word is an error."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class ChainTask(Task):
    """Chain mod 10. `seed` draws the training pool; the held-out problems are the same for every seed.

    `train` has `pool_size` distinct problems, `held_out` has `held_out_size`; both have `ops` = (min, max) operations.
    With `impossible_every=5` every fifth problem of both lists is impossible (`impossible_answer`). Raises ValueError
    if the range is not within 2..8 or has too few distinct problems.
    """

    def __init__(
        self,
        seed: int = 0,
        pool_size: int = 2048,
        held_out_size: int = 512,
        *,
        ops: tuple[int, int] = (2, 8),
        impossible_every: int = 0,
    ) -> None:
        if not 2 <= ops[0] <= ops[1] <= len(LABELS):
            raise ValueError(f"ops must be (min, max) with 2 <= min <= max <= {len(LABELS)}, got {ops}")
        self.tokenizer = word_tokenizer()
        self.sources, self.eval_sources = ["chain"], list[str]()
        self.mixture: dict[str, float] = {}
        self.stop_ids = (IDS["<eos>"],)
        self.end_of_thinking_ids = (IDS["</think>"],)
        self.thinking_end = None  # the mark is always one token
        self.phrase_ids = tuple(IDS[word] for word in PHRASE)
        self.ops, self.impossible_every = ops, impossible_every
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
        ids, end = list(completion_ids), self.end_of_thinking_ids[0]
        wanted = [IDS[word] for word in str(problem.answer).split()] + [self.stop_ids[0]]
        correct = end in ids and ids[ids.index(end) + 1 :] == wanted
        return (1.0 if correct else -1.0), correct

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """`reward` of each completion of one problem, in order."""
        return [self.reward(problem, completion) for completion in completions]

    def text(self, ids: Sequence[int]) -> str:
        """The words of `ids`, special ones included; <99> for an id without a word, which `decode` would leave out."""
        return " ".join(WORDS[i] if i < len(WORDS) else f"<{i}>" for i in ids)

    def close(self) -> None:
        """Nothing to release: there are no worker processes."""


# -------------------------------------------------------------------------------------------------------------- graded


def wrong_results(share: float, seed: int) -> dict[Fact, int]:
    """A fixed wrong result for `share` of the 210 facts, in random order."""
    rng = random.Random(f"wrong facts {seed}")
    facts = [(operation, value) for operation in OPERATIONS for value in range(10)]
    return {
        (operation, value): (apply(operation, value) + rng.randint(1, 9)) % 10
        for operation, value in rng.sample(facts, round(share * len(facts)))
    }


def evenly_spaced(facts: Sequence[Fact], ends: tuple[float, float]) -> dict[Fact, float]:
    """The middles of equal parts of `ends`, one for each fact: four facts over (0, 1) get 1/8, 3/8, 5/8 and 7/8."""
    low, high = ends
    return {fact: low + (high - low) * (i + 0.5) / len(facts) for i, fact in enumerate(facts)}


WRONG_SHOWN = evenly_spaced(list(wrong_results(1.0, seed=0)), GRADED_WRONG)  # of each fact, in the graded warm start


def easiness(problem: Problem) -> float:
    """About how often the starting model solves a graded problem: how often its facts are shown right, multiplied; 0 if
    it is impossible."""
    words = [WORDS[i] for i in problem.prompt_ids]
    operations = words[2:-1:2]
    facts = zip(operations, chain_values(int(words[0]), operations), strict=False)
    possible = impossible_answer(" ".join(words), IMPOSSIBLE_EVERY) is None
    return possible * math.prod(1 - WRONG_SHOWN[fact] for fact in facts)


def graded_task(seed: int = 0, pool_size: int = 2048, held_out_size: int = 512, difficulty: str = "all") -> ChainTask:
    """The problems. `seed` draws the training pool; the held-out problems are the same for every seed. Of a
    `difficulty`, "easy" or "hard", they are that half of twice as many, in the order in which they were drawn; all
    impossible problems are in the hard half. So the ceiling is 1 or .6."""
    times = 1 if difficulty == "all" else 2
    task = ChainTask(seed, times * pool_size, times * held_out_size, ops=GRADED_OPS, impossible_every=IMPOSSIBLE_EVERY)
    task.ceiling = {"all": CEILING, "easy": 1.0, "hard": 1 - 2 / IMPOSSIBLE_EVERY}[difficulty]

    def half(problems: list[Problem]) -> list[Problem]:
        ranked = sorted(problems, key=easiness, reverse=difficulty == "easy")
        chosen = {problem.key for problem in ranked[: len(problems) // 2]}
        return [problem for problem in problems if problem.key in chosen]

    if difficulty != "all":
        task.train, task.held_out = half(task.train), half(task.held_out)
    return task
