"""Engines, and programs, whose processes are forked from one that has imported vLLM: a start takes 3 s of a processor, in
place of 16. Only the import is shared. tests/test_vllm_engine.py and test_alone.py have engines that start as a user's
do."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from unittest import mock

from vllm_engine import vllm_environment

IMPORTED = ["vllm.v1.engine.core", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "tiny_model", "train"]


class Forked(ForkServerProcess):
    """A process that has the environment variables of whoever made it, as one has that was spawned."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        self.variables = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.variables)
        super().run()


class Context(ForkServerContext):
    Process = Forked


class Child(ForkProcess):
    """Ctrl-C ends it, as it ends one that was spawned: its parent's handler is not taken over."""

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        super().run()


class ChildContext(ForkContext):
    Process = Child


def fork_engines(context: BaseContext | None = None) -> None:
    """From now on, engines that this process starts are forked: from a process that has vLLM, or from this one if the
    context says so."""
    import vllm.v1.engine.utils

    if context is None:
        context = Context()
        with mock.patch.dict(os.environ, vllm_environment(gpu=False, eager=True, dtype="float32")):
            multiprocessing.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
    vllm.v1.engine.utils.get_mp_context = lambda: context


def run_program(function: Callable[..., int | None], out: str, err: str, *args: object) -> None:
    """`function` as a program of its own: with a session, Ctrl-C, an exit code, and files in the place of a terminal."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    fork_engines(ChildContext())
    sys.exit(function(*args))
