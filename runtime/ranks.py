"""The trainer's processes. Rank 0 runs the generator, prints, and writes the files; the other ranks follow it.

Anything that communicates between ranks is a collective: every rank must call it, in the same order, or they all
deadlock.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from generator import EngineFailed, Generator, StopRequested
from runtime.weights import Channel, Weights
from tasks.prompts import Problem

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator

Value = TypeVar("Value")


def report_fault(message: str) -> None:
    """One line on rank 0's stderr."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(f"train.py: {message}", file=sys.stderr, flush=True)
        except OSError:
            silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """What is written to `stream` from now on is lost, and raises no error, not even at the end of the process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Ranks:
    """How rank 0 shares with the other ranks what only it knows."""

    def __init__(self, accelerator: "Accelerator"):
        self.accelerator = accelerator
        self.main: bool = accelerator.is_main_process

    @property
    def count(self) -> int:
        """Trainer processes."""
        return self.accelerator.num_processes

    def from_main(self, make: Callable[[], Value]) -> Value:
        """Rank 0 calls `make()`, and every rank gets the result. If it raises, it raises on every rank, so that none
        keeps waiting."""
        from accelerate.utils import broadcast_object_list

        if self.count == 1:
            return make()
        outcome: list[Any] = [None, None]  # the value, or the error
        if self.main:
            try:
                outcome[0] = make()
            except Exception as error:  # travels to the other ranks
                outcome[1] = error
        value, error = broadcast_object_list(outcome)
        if error is not None:
            raise error
        return value

    def say(self, line: str) -> None:
        """Prints on rank 0. If nobody reads any more, the run goes on in silence."""
        if not self.main:
            return
        try:
            print(line, flush=True)
        except OSError:  # the reader of a pipe has ended, or the terminal is closed
            silence(sys.stdout)


@dataclass(eq=False)
class GeneratorForRanks:
    """The generator as every rank calls it. Rank 0 drives the real one (`generator`, None on the others). All ranks
    take part in the collectives: they gather the weights for this rank's `channel`, and raise what a push raised."""

    generator: Generator | None
    channel: Channel
    ranks: Ranks

    @property
    def on_main(self) -> Generator:
        """The generator, which only rank 0 may ask for."""
        assert self.generator is not None
        return self.generator

    def start(self, weights: Weights, version: int) -> None:
        """Starts the engine with the trainer's weights. If it does not start, every rank raises EngineFailed, or
        StopRequested."""
        failure = None
        try:
            if self.generator is None:
                self.channel.prepare(weights)
            else:
                self.generator.start(weights, version)
        except (EngineFailed, StopRequested) as error:
            failure = error
        main_failure = self.ranks.from_main(lambda: failure)
        if main_failure is not None:
            raise main_failure

    def push(self, weights: Weights, version: int, release: int) -> None:
        """Sends the weights of `version` while requests run; `release` groups are done with once they are live."""
        self.settle()
        if self.generator is None:
            self.channel.prepare(weights)
        else:
            self.generator.push(weights, version, release=release)

    def release(self, count: int) -> None:
        """`count` taken groups are done with, and there are no new weights."""
        if self.generator is not None:
            self.generator.release(count)

    def settle(self) -> None:
        """With several ranks: waits until the last weights are live. If that push failed, every rank raises."""
        if self.ranks.count > 1:
            self.ranks.from_main(lambda: self.on_main.settle())

    def evaluate(self, problems: list[Problem], n_samples: int, longest_leg: int = sys.maxsize) -> Future | None:
        """Starts sampling `n_samples` completions of each problem at the live version, in requests of at most
        `longest_leg` tokens; None on ranks other than 0."""
        self.settle()
        return None if self.generator is None else self.generator.evaluate(problems, n_samples, longest_leg)

    def close(self) -> None:
        """Ends the engine and the weight channel."""
        if self.generator is not None:
            self.generator.close()
        self.channel.close()
