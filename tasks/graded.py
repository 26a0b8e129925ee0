"""The graded task: chain mod 10, made so that the scaling law can be seen.

PROBLEM. By the law (arXiv 2510.13786, Eq. 1) pass rate is a sigmoid in log C. That is so where problems differ in how
soon they are learned. Those of chain.py do not: their mistakes are equally strong and are unlearned together, so its
curve is a cliff, and a fit to the part before the edge says little about the part after it.

IDEA. Let T be the compute after which a problem, drawn at random, is solved. The pass rate after compute C is the share
of problems with T <= C, and the law's share of the gain,

    P(T <= C) = 1 / (1 + (C_mid / C)^B),

is the distribution function of a log-logistic: log T is a logistic variable with its middle at log C_mid and scale 1/B.
For B = 2 one problem in ten is solved by C_mid / 3 and nine in ten by 3 C_mid, nine times the compute. So T is spread:

- EVERY fact, such as 7 + 5, has wrong results in the warm start's demonstrations. Its right one is shown with a
  probability that is evenly spaced over the 210 facts, from .05 to .9. A right result is reinforced only when it is
  sampled, so T goes roughly with 1 / probability, which has a long tail. Which fact is how strong is the same for all
  seeds. A problem needs two to four facts, and each fact is in 1.4 % of the problems: a late one is a small step.
- ANY of the nine wrong results takes the rest. With one and the same, a fact that was right in 5 % of the samples could
  be lost for good: as the policy becomes more certain of everything, what is twenty times as likely becomes a thousand
  times as likely. In one seed of three such a fact, sampled right five times in 2,000, kept the pass rate at .775; now
  it is one run of twenty.
- ONE PROBLEM IN FIVE has a key that the policy practically never samples (`chain.impossible_answer`). These stand for
  what is too hard for a real model: there is no reward to learn from. So the ceiling A is .8 by construction, and a fit
  can be judged by whether it finds that number.

So the task was made to show the law, and is no evidence that other tasks obey it; chain.py is one that does not. Nor is
it exact here: the first rise is less steep than the rest, since near the end few groups have unequal rewards and the
whole gradient goes to them; and the last few facts, right in some problems and wrong in others, come later than the
law says. So the Weibull form of fit_sigmoid.py fits most runs better than Eq. 1 does. B comes out at 2.7: eight tenths
of the gain within a factor of five of compute, where the paper's own B of 2 takes nine.

    python train.py    # it is the default task

>>> task = graded_task()
>>> [(task.text(problem.prompt_ids), problem.answer) for problem in task.held_out[3:5]]
[('1 a -9 b +7 c -5 <think>', '9 4'), ('7 a +8 b -9 <think>', '4 6 9')]
"""

import math
from collections.abc import Sequence

from tasks.chain import WORDS, ChainTask, chain_values, impossible_answer
from tasks.demonstrations import Demonstrations, Demonstrator
from tasks.prompts import Problem

MIN_OPS, MAX_OPS = 2, 4
IMPOSSIBLE_EVERY = 5
CEILING = 1 - 1 / IMPOSSIBLE_EVERY
DEMONSTRATIONS = Demonstrations(
    min_ops=MIN_OPS,
    max_ops=MAX_OPS,
    wrong_facts=1.0,
    any_wrong_result=True,
    wrong_shown=(0.1, 0.95),
    same_for_all_seeds=True,
    noise=0.0,
)


WRONG_SHOWN = Demonstrator(DEMONSTRATIONS, 0, corrupted=True).wrong_shown  # of each fact


def easiness(problem: Problem) -> float:
    """About how often the starting model solves it: how often its facts are shown right, multiplied; 0 if it is
    impossible."""
    words = [WORDS[i] for i in problem.prompt_ids]
    operations = words[2:-1:2]
    facts = zip(operations, chain_values(int(words[0]), operations), strict=False)
    possible = impossible_answer(" ".join(words), IMPOSSIBLE_EVERY) is None
    return possible * math.prod(1 - WRONG_SHOWN[fact] for fact in facts)


def half(problems: Sequence[Problem], difficulty: str) -> list[Problem]:
    """The easy or the hard half, in the given order. All impossible problems are in the hard one."""
    ranked = sorted(problems, key=easiness, reverse=difficulty == "easy")
    chosen = {problem.key for problem in ranked[: len(problems) // 2]}
    return [problem for problem in problems if problem.key in chosen]


def graded_task(seed: int = 0, pool_size: int = 2048, held_out_size: int = 512, difficulty: str = "all") -> ChainTask:
    """The problems. `seed` draws the training pool; the held-out problems are the same for every seed. Of a
    `difficulty`, "easy" or "hard", they are that half of twice as many, and the ceiling is 1 or .6."""
    times = 1 if difficulty == "all" else 2
    task = ChainTask(
        seed, times * pool_size, times * held_out_size, min_ops=MIN_OPS, max_ops=MAX_OPS,
        impossible_every=IMPOSSIBLE_EVERY,
    )  # fmt: skip
    task.ceiling = {"all": CEILING, "easy": 1.0, "hard": 1 - 2 / IMPOSSIBLE_EVERY}[difficulty]
    if difficulty != "all":
        task.train, task.held_out = half(task.train, difficulty), half(task.held_out, difficulty)
    return task
