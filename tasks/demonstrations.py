"""Demonstrations for the warm start: solutions of chain mod 10, with mistakes that practice must undo.

The warm start stands in for pre-training. It must leave something for RL to do, so half of what it shows is corrupted:

    prompt     7 a +5 b *3 <think>
    clean      a +5 2 b *3 6 </think> 2 6 <eos>
    noise      a +5 9 b *3 7 </think> 9 7 <eos>                         a result is wrong, and so is all that follows
    recheck    a +5 2 wait a +5 2 b *3 6 </think> 2 6 <eos>
    restart    a +5 2 b *3 6 again a +5 2 b *3 6 </think> 2 6 <eos>     rambles past the thinking budget
    cut        a +5 2 b time up </think> 7 2 <eos>                      as after a forced interruption

Some (operation, value) facts carry one and the same wrong result most of the time, so that the model learns them wrong;
other results are noise. No held-out problem is ever shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks import chain
from tasks.chain import IDS, LABELS

Batch = tuple[torch.Tensor, torch.Tensor]  # input ids and labels, both (N, T), padded on the right


@dataclass(frozen=True)
class Demonstrations:
    """What is wrong with the corrupted demonstrations, and how long the chains are.

    `wrong_facts` of the 210 (operation, value) facts carry wrong results: each of them one and the same, or with
    `any_wrong_result` all nine, equally often. How often these are shown is evenly spaced over the facts between the
    two ends of `wrong_shown`. Each seed has wrong facts of its own, unless they are to be the `same_for_all_seeds`. Any
    other result is replaced by a random digit with probability `noise`. `recheck` is the chance of a recheck per step;
    `restart` and `cut` are chances per demonstration. For a harder task (a lower ceiling for the same compute) raise
    `wrong_facts`, `wrong_shown` or `noise`, or train on a ChainTask with more operations.
    """

    min_ops: int = 2
    max_ops: int = 8
    wrong_facts: float = 0.40
    any_wrong_result: bool = False
    wrong_shown: tuple[float, float] = (0.70, 0.70)
    same_for_all_seeds: bool = False
    noise: float = 0.18
    recheck: float = 0.15
    restart: float = 0.35
    cut: float = 0.15


def wrong_results(share: float, seed: int) -> dict[tuple[str, int], int]:
    """A fixed wrong result for `share` of all (operation, value) facts, in random order."""
    rng = random.Random(f"wrong facts {seed}")
    facts = [(operation, value) for operation in chain.OPERATIONS for value in range(10)]
    return {
        (operation, value): (chain.apply(operation, value) + rng.randint(1, 9)) % 10
        for operation, value in rng.sample(facts, round(share * len(facts)))
    }


def evenly_spaced(facts: Sequence[tuple[str, int]], ends: tuple[float, float]) -> dict[tuple[str, int], float]:
    """The middles of equal parts of `ends`, one for each fact: four facts over (0, 1) get 1/8, 3/8, 5/8 and 7/8."""
    low, high = ends
    return {fact: low + (high - low) * (i + 0.5) / len(facts) for i, fact in enumerate(facts)}


class Demonstrator:
    """Writes demonstrations: clean ones, or corrupted ones with the mistakes and habits that `settings` names.

    `seed` fixes which facts are wrong, unless all seeds have the same. `stream` names the random numbers, so that the
    same mistakes can be shown on other problems.
    """

    def __init__(self, settings: Demonstrations, seed: int, corrupted: bool, stream: str = "warm start") -> None:
        self.settings, self.corrupted = settings, corrupted
        self.rng = random.Random(f"demonstrations {seed} {corrupted} {stream}")
        self.wrong = wrong_results(settings.wrong_facts, 0 if settings.same_for_all_seeds else seed)
        self.wrong_shown = evenly_spaced(list(self.wrong), settings.wrong_shown)

    def result(self, operation: str, value: int) -> int:
        """What the demonstration writes as the result of `operation` on `value`."""
        right = chain.apply(operation, value)
        if not self.corrupted:
            return right
        if (operation, value) in self.wrong and self.rng.random() < self.wrong_shown[operation, value]:
            if not self.settings.any_wrong_result:
                return self.wrong[operation, value]
            return self.rng.choice([digit for digit in range(10) if digit != right])
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
                words += [chain.RECHECK, LABELS[i], operations[i], str(value)]
            i += 1
            if i == restart_at:
                words.append(chain.RESTART)
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
            start, operations = chain.draw_chain(self.rng, self.settings.min_ops, self.settings.max_ops)
            text = chain.chain_text(start, operations)
            if not chain.is_held_out(text):
                break
        words, close, taught = self.thinking(start, operations), ["</think>"], [True]
        if self.corrupted and self.rng.random() < self.settings.cut:
            words = words[: self.rng.randint(3, len(words))]
            # RL forces the phrase and never samples it: the model learns what follows it, not to write it.
            close, taught = list(chain.PHRASE), [False] * len(chain.PHRASE)
        answer = [*last_two(start, words), "<eos>"]
        return text.split(), words + close + answer, [True] * len(words) + taught + [True] * len(answer)

    def batch(self, size: int) -> Batch:
        """One batch of N = `size` demonstrations. A label is -100 where nothing is taught."""
        rows = [self.demonstration() for _ in range(size)]
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
    """The newest results of the two furthest steps that `thinking` reached: the best answer to thinking that is cut."""
    values = {0: str(start), -1: str(start)}
    for i in range(len(thinking) - 2):
        if thinking[i] in LABELS and thinking[i + 2] in chain.DIGITS:
            values[LABELS.index(thinking[i]) + 1] = thinking[i + 2]
    furthest = max(values)
    return [values.get(furthest - 1, str(start)), values[furthest]]
