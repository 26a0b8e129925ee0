"""Prompts: what every task has, and the order in which training prompts come.

Reinforcement learning with verifiable rewards (ScaleRL, arXiv 2510.13786, section 2) needs only three things from a
task (`Task`): prompts, a held-out set that training never sees, and a program that decides whether a completion is
right:

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
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Problem:
    """One prompt. `key` is a hash of the problem's text: the same text has the same key in every run and process."""

    key: str
    prompt_ids: tuple[int, ...]
    answer: object
    source: str = ""


@dataclass(frozen=True)
class PromptOptions:
    """How the rows of data sets become prompts. Where no column is named, the usual ones are looked for (rows.py).

    `prompt_template` is put around the prompt's text and holds `{prompt}`; `apply_chat_template` uses the tokenizer's
    chat template if it has one. `thinking` "false": the model answers at once, and the whole completion is judged;
    "true", or the text that ends it: it thinks, and what follows is judged; "auto": see tokens.py.
    `interruption_phrase` is the paper's where it is empty. Prompts longer than `max_prompt_tokens` are left out and
    counted. `held_out` prompts of each data set are kept for evaluation, or fewer where some of these are left out.
    """

    prompt_column: str = ""
    answer_column: str = ""
    prompt_template: str = "{prompt}"
    apply_chat_template: bool = True
    thinking: str = "auto"
    interruption_phrase: str = ""
    held_out: int = 256
    max_prompt_tokens: int = 2048


# Finds or makes the model that a run begins with: folder or hub id, from a folder in which what was made is kept, and a
# function that shows a line.
FirstModel = Callable[[Path, Callable[[str], None]], str | Path]


class Task(Protocol):
    """What every task has. A task of data sets also counts, by kind, the rows left out (`skipped`) and the verdicts so
    far (`counts`)."""

    train: list[Problem]
    held_out: list[Problem]
    sources: Sequence[str]  # names of its data sets
    eval_sources: Sequence[str] = ()  # names of those that are only evaluated; their problems are in `held_out`, too
    tokenizer: Any
    stop_ids: tuple[int, ...]  # of the tokens that end a completion
    end_of_thinking_ids: tuple[int, ...]  # this and the next two: see length_control.Interruption
    phrase_ids: tuple[int, ...]
    thinking_end: Callable[[Sequence[int]], int | None] | None = None
    first_model: FirstModel | None = None  # where a run without --model begins

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """(reward, correct) of each completion of one problem, in order."""
        ...

    def text(self, ids: Sequence[int]) -> str: ...
    def close(self) -> None:
        """Ends its worker processes, if it has any."""
        return


def stable_key(text: str) -> str:
    """16 hex digits of the SHA-256 of `text`. Python's own `hash` differs from process to process."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PromptStream:
    """Training prompts, epoch after epoch, each epoch in an order of its own, which depends only on the seed and the
    epoch's number. Several data sets are shuffled together. Retired prompts are passed over, and the stream ends when
    all are retired. Its place is its epoch and its position.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, retired: Callable[[str], bool]) -> None:
        self.problems = problems
        self.seed = seed
        self.retired = retired
        self.unfinished: deque[Problem] = deque()  # prompts in flight at a stop, which come before all others
        self._go_to(epoch=0, position=0)

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._order = list(range(len(self.problems)))
        random.Random(f"{self.seed} epoch {epoch}").shuffle(self._order)

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        if self.unfinished:
            return self.unfinished.popleft()
        while True:
            while self.position < len(self._order):
                problem = self.problems[self._order[self.position]]
                self.position += 1
                if not self.retired(problem.key):
                    return problem
            if all(self.retired(problem.key) for problem in self.problems):
                raise StopIteration
            self._go_to(self.epoch + 1, position=0)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the position, and the keys of `unfinished`."""
        unfinished = [problem.key for problem in self.unfinished]
        return {"epoch": self.epoch, "position": self.position, "unfinished": unfinished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was saved. Raises ValueError or LookupError for one of other prompts."""
        problems = {problem.key: problem for problem in self.problems}
        self.unfinished = deque(problems[key] for key in state["unfinished"])
        self._go_to(int(state["epoch"]), int(state["position"]))
        if not 0 <= self.position <= len(self.problems):
            raise ValueError(f"the position {self.position} is not among {len(self.problems)} prompts")
