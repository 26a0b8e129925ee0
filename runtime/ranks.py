"""The trainer's processes. Rank 0 has the generator, prints, and writes the files; the other ranks follow it.

What talks between ranks is a collective: every rank must call it, in the same order, or all of them wait forever.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tqdm import tqdm

from pipeline_rl import EngineFailed, Generator
from runtime.weights import Channel, Weights
from tasks.prompts import Problem

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator

Made = TypeVar("Made")
RESTARTS = "SCALERL_RESTARTS"  # in the environment: how often this run has replaced its process


class Ranks:
    """What rank 0 tells the others."""

    def __init__(self, accelerator: "Accelerator"):
        self.accelerator = accelerator
        self.main: bool = accelerator.is_main_process

    @property
    def count(self) -> int:
        """Trainer processes."""
        return self.accelerator.num_processes

    def from_main(self, make: Callable[[], Made]) -> Made:
        """Rank 0's `make()`, on every rank. If it raises there, every rank raises, so that none keeps waiting."""
        from accelerate.utils import broadcast_object_list

        if self.count == 1:
            return make()
        made: list[Any] = [None, None]  # the value, or the error
        try:
            made[0] = make() if self.main else None
        except Exception as raised:  # travels to the other ranks
            made[1] = raised
        value, error = broadcast_object_list(made)
        if error is not None:
            raise error
        return value

    @property
    def on_one_host(self) -> bool:
        """Whether all trainer processes run here."""
        return self.count == int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    def told_at_restart(self) -> dict[str, str]:
        """Environment variables for the processes that take the place of these; a collective."""
        from accelerate.utils.other import get_free_port

        told = {RESTARTS: str(restarts() + 1)}
        if self.count > 1:  # they cannot meet in the launcher's store, which holds what these ranks wrote there
            port = self.from_main(get_free_port)
            told |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        return told

    def say(self, line: str) -> None:
        """Prints on rank 0, above the progress bar."""
        if self.main:
            tqdm.write(line)
            sys.stdout.flush()


def restarts() -> int:
    """How often this run has replaced its process."""
    return int(os.environ.get(RESTARTS, "0"))


def restart(folder: Path, environment: dict[str, str]) -> NoReturn:
    """Replaces this process by one of the same command that goes on from the newest checkpoint in `folder`."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:], "--overwrite", "false", "--resume", str(folder)]
    os.execve(sys.executable, command, environment)


class SharedGenerator:
    """The generator as every rank calls it. Rank 0 drives the real one (`generator`, None on the others); all take part
    in what is a collective: gathering the weights for this rank's `channel`, and raising what a push raised."""

    def __init__(self, generator: Generator | None, channel: Channel, ranks: Ranks):
        self.generator, self.channel, self.ranks = generator, channel, ranks

    @property
    def on_main(self) -> Generator:
        """The generator, which only rank 0 may ask for."""
        assert self.generator is not None
        return self.generator

    def start(self, weights: Weights, version: int) -> None:
        """Starts the engine with the trainer's weights. If it does not start, every rank raises EngineFailed."""
        outcome: list[EngineFailed | None] = []

        def meet(failed: EngineFailed | None = None) -> None:  # rank 0 says whether the engine runs
            outcome.append(self.ranks.from_main(lambda: failed))
            if outcome[0] is not None:
                raise outcome[0]

        self.channel.meet = meet  # before the first transfer, in which the other ranks would wait for ever; else below
        try:
            if self.generator is None:
                self.channel.prepare(weights)
            else:
                self.generator.start(weights, version)
        except EngineFailed as error:
            if not outcome:
                meet(error)
            raise
        if not outcome:
            meet()

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

    def evaluate(self, problems: list[Problem], n_samples: int) -> Future | None:
        """Starts sampling `n_samples` completions of each problem at the live version; None on ranks other than 0."""
        self.settle()
        return None if self.generator is None else self.generator.evaluate(problems, n_samples)

    def close(self) -> None:
        """Ends the engine and the weight channel."""
        if self.generator is not None:
            self.generator.close()
        self.channel.close()
