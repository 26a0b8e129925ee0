"""Prompts: what every task has, and the order in which training prompts come.

Reinforcement learning with verifiable rewards (ScaleRL, arXiv 2510.13786, section 2) needs of a task (`Task`) only
prompts, a held-out set that training never sees, and a program that says of a completion whether it is right:

    r(x, y) = +1 if the answer that follows the thinking is right, else -1

>>> problems = [Problem(str(i), (i,), "") for i in range(3)]
>>> stream = PromptStream(problems, seed=0, retired=lambda key: key == "1")
>>> [next(stream).key for _ in range(4)]
['0', '2', '2', '0']
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Problem:
    """One prompt. `key` is a hash of the problem's text: the same text has the same key in every run and process."""

    key: str
    prompt_ids: tuple[int, ...]
    answer: object
    source: str = ""


class Task(Protocol):
    """What a task has. Of data sets, it has `skipped` (rows left out) and `counts` (verdicts so far), too, by kind."""

    train: list[Problem]
    held_out: list[Problem]
    sources: list[str]  # names of its data sets
    mixture: dict[str, float]  # weight of each in `PromptStream`; empty: drawn by size
    eval_sources: list[str]  # names of those that it only evaluates, whose problems are in `held_out`, too
    tokenizer: Any
    stop_ids: tuple[int, ...]  # of the tokens that end a completion
    end_of_thinking_ids: tuple[int, ...]  # this and the next two: see length_control.Interruption
    phrase_ids: tuple[int, ...]
    thinking_end: Callable[[Sequence[int]], int | None] | None
    ceiling: float | None  # the highest pass rate there can be, where it is known

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]: ...
    def reward(self, problem: Problem, completion_ids: Sequence[int]) -> tuple[float, bool]: ...  # (reward, correct)
    def text(self, ids: Sequence[int]) -> str: ...
    def close(self) -> None: ...  # releases what the task holds


def stable_key(text: str) -> str:
    """16 hex digits of the SHA-256 of `text`. Python's own `hash` differs from process to process."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def places_of(mixture: dict[str, float], places: int) -> dict[str, int]:
    """How many of the first `places` places of a run each source gets, by its weight. They add up, and with more places
    no source gets fewer: place i + 1 of a source comes at (i + 1/2) / weight (the method of Sainte-Laguë)."""
    total, early = sum(mixture.values()), places - len(mixture)  # so early that rounding gives no source too many
    counts = {source: max(0, int(weight / total * early + 0.5)) for source, weight in sorted(mixture.items())}
    for _ in range(places - sum(counts.values())):
        counts[min(counts, key=lambda source: (counts[source] + 0.5) / mixture[source])] += 1
    return counts


def epoch_order(problems: Sequence[Problem], mixture: dict[str, float], seed: int, epoch: int) -> list[int]:
    """Indices into `problems`: which comes when in one epoch. `mixture` has a weight for each source; without any,
    everything is shuffled.

    An epoch has as many places as the sources in `mixture` have problems. Each source gets its share of the places so
    far (`places_of`), so one whose share is less than a place an epoch comes in some epochs. It fills its places from
    shuffles of its own problems, going on where the last epoch left off (while the weights stay the same). So a small
    source with a large weight comes round more often than a large one with a small weight. An epoch need not hold every
    problem, but two in a row hold all of at least one source. Pure: a place in a run is (seed, mixture, epoch,
    position).
    """
    order = [] if mixture else list(range(len(problems)))
    owned = {source: [i for i, problem in enumerate(problems) if problem.source == source] for source in mixture}
    places = sum(map(len, owned.values()))
    before, after = (places_of(mixture, n * places) for n in (epoch, epoch + 1))
    for source, drawn in before.items():  # `drawn`: how many of this source came before
        own, count = owned[source], after[source] - drawn
        while count:
            shuffled = random.Random(f"{seed} {source} {drawn // len(own)}").sample(own, len(own))
            some = shuffled[drawn % len(own) :][:count]
            order, drawn, count = order + some, drawn + len(some), count - len(some)
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order


class PromptStream:
    """Training prompts, epoch after epoch, each in an order of its own (with `shuffled=False` in that of `problems`).
    Retired prompts are passed over, but for a share `review` of them in each epoch, and the stream ends when all are.

    `mixture` has a weight for each data set (`epoch_order`), and each gets its share of an epoch's places. Once all
    prompts of one are retired, the others take its places from the next epoch on. The stream's place is its epoch, its
    position and the epoch's sources; an epoch's order depends on these and the seed only.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        retired: Callable[[str], bool],
        mixture: dict[str, float] | None = None,
        shuffled: bool = True,
        review: float = 0.0,
    ) -> None:
        self.problems, self.seed, self.retired, self.mixture = problems, seed, retired, mixture or {}
        self.shuffled, self.review = shuffled, review
        self.epoch = self.position = 0
        self.shares = self.mixture  # of the sources that had prompts left when this epoch began
        self.first: deque[Problem] = deque()  # prompts that a resumed run must admit before all others
        self._order: list[int] | None = None  # of this epoch

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        if self.first:
            return self.first.popleft()
        while True:
            if self._order is None:
                kept = list(range(len(self.problems)))
                self._order = epoch_order(self.problems, self.shares, self.seed, self.epoch) if self.shuffled else kept
            while self.position < len(self._order):
                problem = self.problems[self._order[self.position]]
                self.position += 1
                if not self.retired(problem.key) or self._comes_again():
                    return problem
            # An epoch of a mixture need not hold every prompt, but two in a row hold all of at least one source.
            left = {problem.source for problem in self.problems if not self.retired(problem.key)}
            if not left:
                raise StopIteration
            self.shares = {source: weight for source, weight in self.mixture.items() if source in left}
            self.epoch, self.position, self._order = self.epoch + 1, 0, None

    def _comes_again(self) -> bool:
        """Whether the retired prompt at this place is reviewed: drawn anew for each place of a run."""
        return random.Random(f"{self.seed} review {self.epoch} {self.position}").random() < self.review

    def state_dict(self) -> dict[str, object]:
        """The epoch, the position, the epoch's sources, and the keys of `first`."""
        first = [problem.key for problem in self.first]
        return {"epoch": self.epoch, "position": self.position, "sources": list(self.shares), "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was saved."""
        problems = {problem.key: problem for problem in self.problems}
        self.epoch, self.position, self._order = state["epoch"], state["position"], None
        sources = state.get("sources", self.mixture)  # an older checkpoint does not name them
        self.shares = {source: weight for source, weight in self.mixture.items() if source in sources}
        self.first = deque(problems[key] for key in state["first"])
