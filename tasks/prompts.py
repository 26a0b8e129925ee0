"""Problems, and the order in which training prompts come."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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



class PromptStream:
    """Training prompts, epoch after epoch, each epoch in its own shuffled order; retired prompts are passed over.
    `weights` mixes several data sets (`epoch_order`): each gets its share of an epoch's places; once all of
    its prompts are retired, the others take its places from the next epoch on. It ends when every prompt is retired.

    Its place is epoch, position and the epoch's sources: the order of an epoch depends on these and the seed alone.
    """

    def __init__(
        self,
        problems: Sequence[Any],
        seed: int,
        retired: Callable[[str], bool],
        weights: dict[str, float] | None = None,
    ):
        self.problems, self.seed, self.retired, self.weights = problems, seed, retired, weights or {}
        self.epoch = self.position = 0
        self.shares = self.weights  # of the sources that had prompts left when this epoch began
        self.first: deque[Any] = deque()  # prompts that a resumed run must admit before all others
        self._shuffled: tuple[int, list[int]] = (-1, [])  # (epoch, its order)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.first:
            return self.first.popleft()
        while True:
            order = self._order()
            while self.position < len(order):
                problem = self.problems[order[self.position]]
                self.position += 1
                if not self.retired(problem.key):
                    return problem
            # An epoch of a mixture need not hold every prompt, but two in a row hold all of at least one source.
            left = [problem for problem in self.problems if not self.retired(problem.key)]
            if not left:
                raise StopIteration
            sources = {problem.source for problem in left} if self.weights else ()
            self.shares = {source: weight for source, weight in self.weights.items() if source in sources}
            self.epoch, self.position = self.epoch + 1, 0

    def _order(self) -> list[int]:
        if self._shuffled[0] != self.epoch:
            self._shuffled = (self.epoch, epoch_order(self.problems, self.shares, self.seed, self.epoch))
        return self._shuffled[1]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, the sources of the epoch, and the keys of `first`."""
        first = [problem.key for problem in self.first]
        return {"epoch": self.epoch, "position": self.position, "sources": list(self.shares), "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was saved."""
        problems = {problem.key: problem for problem in self.problems}
        self.epoch, self.position = state["epoch"], state["position"]
        sources = state.get("sources", self.weights)  # an older checkpoint does not name them
        self.shares = {source: weight for source, weight in self.weights.items() if source in sources}
        self.first = deque(problems[key] for key in state["first"])
