"""Judges: worker processes that call the verifiers, because these may hang or die and a run must not.

PROBLEM. Sooner or later a policy writes `\\boxed{9^{9^{9^9}}}`, a megabyte of digits or a thousand nested roots, and a
computer algebra system that takes it seriously neither answers nor stops. One such completion must not stall or kill a
run.

IDEA. Judge in worker processes. Each has limits from the operating system (address space, processor time, size of a
file), and each request has a deadline. A worker that misses its deadline or dies is killed with its children and
replaced; the completion counts as wrong and is counted by what happened:

    r(x, y) = +1 if verify(answer, what follows the thinking in y), else -1

THE REWARDS
    math, exact       see verifiers.py
    code              tests of the program in the completion, see code_answers.py; only with `unsafe_code`
    module:function   your own `function(prompt, completion, answer)`, imported in the worker. It returns True or False,
                      a number (above 0 is correct), a pair (reward, correct), or None for "cannot be parsed"

SIMPLIFIED. The limits stop accidents, not an attacker: a worker has the user's rights. (A program that `code` runs has
none: see sandbox.py.)

WHY NOT A LIBRARY. `concurrent.futures` cannot end a task that hangs. `pebble.ProcessPool` can, but leaves the worker's
children running, gives up the whole pool when a worker dies between two tasks (as under the kernel's memory killer),
and imports the main program again in each worker, torch and all (320 MB instead of 17 MB).

>>> with RewardPool(["math"], workers=1, end_of_thinking="</think>") as pool:
...     pool.judge([Job("math", "1/4 + 1/4?", "Adding up. </think> It is \\\\boxed{0.5}.", "1/2")])
[Verdict(reward=1.0, correct=True, kind='correct')]
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tasks import judge_process
from tasks.judge_process import VERIFIERS, Job, Verdict
from tasks.sandbox import Sandbox

MAX_REPLY_BYTES = 1_000_000
START_TIMEOUT = 120.0


class RewardError(RuntimeError):
    """A user's reward function raised; the message is its traceback."""


class Worker:
    """One worker process and the socket to it, which is never waited on without a deadline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.socket, theirs = socket.socketpair()
        self.asked = 0  # the number of the last job, which its reply repeats; that of "ready" is 0
        command = [sys.executable, judge_process.__file__, json.dumps(settings)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # In a session of its own: Ctrl-C reaches only the run, and the process group is all that the worker started.
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment, start_new_session=True
            )

    def exchange(self, job: Job | None, timeout: float) -> list[Any]:
        """Sends one line, unless `job` is None, and returns the reply. Raises TimeoutError at the deadline, EOFError if
        the worker is gone or does not reply to this job."""
        deadline, reply = time.monotonic() + timeout, b""
        self.socket.settimeout(timeout)
        try:
            if job is not None:
                self.asked += 1
                self.socket.sendall(json.dumps([self.asked, *job], default=str).encode("ascii") + b"\n")
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self.socket.settimeout(left)
                part = self.socket.recv(65536)
                if not part or len(reply) > MAX_REPLY_BYTES:
                    raise EOFError("the worker died, or its reply is too long")
                reply += part
            number, *verdict = json.loads(reply)
        except (BrokenPipeError, ConnectionResetError, ValueError, TypeError, RecursionError) as error:
            raise EOFError("the worker died, or its reply is none") from error
        if number != self.asked:
            raise EOFError("the worker replied to another job")
        return verdict

    def kill(self) -> None:
        """Ends the process and what it started, and waits for it, so that no zombie stays."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """`kill`, and closes the socket."""
        self.kill()
        self.socket.close()


class RewardPool:
    """Judges completions in `workers` processes; may be called from several threads at once.

    Args:
        rewards: names that jobs may use: `math`, `exact`, `code`, `module:function`.
        workers: number of processes.
        timeout: seconds for one completion; then its worker is killed and replaced, and the verdict is wrong.
        memory_mb: limit of a worker's address space in MiB, 0 for none (a function that uses CUDA needs that).
        errors: what an exception in a user's function does: `raise` stops the run with it; `zero` gives reward 0,
            counts it, and shows the first traceback on stderr.
        end_of_thinking: text after which `math`, `exact` and `code` read; empty if the model does not think apart.
        unsafe_code: must be True for `code`, which runs programs that a model wrote.
    Raises:
        ValueError: an unknown option, or a function that cannot be imported (with its traceback), or `code` on a
            machine that cannot confine programs.
    """

    def __init__(
        self, rewards: Sequence[str] = ("math",), *, workers: int = 2, timeout: float = 8.0, memory_mb: int = 2048,
        errors: str = "raise", end_of_thinking: str = "", unsafe_code: bool = False,
    ) -> None:  # fmt: skip
        if errors not in ("raise", "zero"):
            raise ValueError(f"`reward_errors` must be raise or zero, got {errors!r}")
        if workers < 1 or timeout <= 0:
            raise ValueError(f"`reward_workers` and `reward_timeout` must be positive, got {workers} and {timeout}")
        for name in rewards:
            if name not in VERIFIERS and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(f"`reward` must be one of {', '.join(VERIFIERS)} or module:function, got {name!r}")
        if "code" in rewards:
            if not unsafe_code:
                raise ValueError("`reward` code runs what a model writes; read docs/code.md, then set `unsafe_code`")
            try:
                Sandbox().close()  # a worker's would raise in the worker, with a traceback
            except RuntimeError as error:
                raise ValueError(f"`reward` code cannot be used on this machine: {error}") from error
        self.timeout, self.errors = timeout, errors
        self.counts: Counter[str] = Counter()  # verdicts by kind
        self._settings: dict[str, Any] = {
            "rewards": list(dict.fromkeys(rewards)), "timeout": timeout, "memory_mb": memory_mb,
            "end_of_thinking": end_of_thinking,
        }  # fmt: skip
        self._lock, self._closed, self._shown = threading.Lock(), False, False
        self._workers: list[Worker] = []
        # Workers that have nothing to do. None is one that was lost, to be started again when it is needed.
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for worker in [self._launch() for _ in range(workers)]:  # all at once, because each takes a second
                self._wait_ready(worker)
                self._idle.put(worker)
            undo.pop_all()  # all are ready

    def judge(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict per job, in order. Raises RewardError if a user's function raised and `errors` is `raise`."""
        verdicts = list(self._threads.map(self._ask, jobs))
        with self._lock:
            self.counts.update(verdict.kind for verdict in verdicts)
        return verdicts

    def answers_readable(self, name: str, answers: Sequence[Any]) -> list[bool]:
        """For each answer: can the reward `name` read it? Asked before training, so that a bad row is known by then."""
        if name not in ("math", "code"):
            return [True] * len(answers)
        verdicts = self._threads.map(self._ask, [Job(name, "", None, answer) for answer in answers])
        return [verdict.kind == "wrong" for verdict in verdicts]

    def close(self) -> None:
        """Ends the workers and waits for them. A call that still runs raises RuntimeError."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)  # a call that runs takes its lost worker out of the list
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward workers are closed")
            self._workers.append(Worker(self._settings))
            return self._workers[-1]

    def _wait_ready(self, worker: Worker) -> None:
        names = ",".join(self._settings["rewards"])
        try:
            kind, _, _, trace = worker.exchange(None, START_TIMEOUT)
        except (EOFError, TimeoutError) as error:
            limit = f"{START_TIMEOUT:.0f} s and {self._settings['memory_mb']} MiB"
            raise ValueError(f"`reward` {names}: a worker does not start in {limit}; it says why above") from error
        if kind != "ready":
            raise ValueError(f"`reward` {names} cannot be loaded:\n{trace}")

    def _ask(self, job: Job) -> Verdict:
        worker, lost = self._idle.get(), True
        try:
            if worker is None:
                worker = self._launch()
                self._wait_ready(worker)
            try:
                kind, reward, correct, trace = worker.exchange(job, self.timeout)
                lost = kind == "memory" and job.name != "code"  # the worker may be short of memory for good
            except TimeoutError:
                kind, reward, correct, trace = "timeout", -1.0, False, ""
            except EOFError as error:
                if self._closed:
                    raise RuntimeError("the reward workers are closed") from error
                kind, reward, correct, trace = "crash", -1.0, False, ""
        finally:
            if lost and worker is not None:
                with self._lock:
                    self._workers.remove(worker)
                worker.close()
            self._idle.put(None if lost else worker)
        if kind == "error":
            self._show(job.name, trace)
        return Verdict(reward, correct, kind)

    def _show(self, name: str, trace: str) -> None:
        """A user's function raised: stop with its traceback, or show the first one and go on. A traceback may quote
        what a model wrote, so nothing in it may steer a terminal."""
        trace = "".join(c if c.isprintable() or c == "\n" else "?" for c in trace)
        if self.errors == "raise":
            raise RewardError(f"`reward` {name} raised (`reward_errors` zero goes on without it):\n{trace}")
        with self._lock:
            first, self._shown = not self._shown, True
        if first:
            print(
                f"The reward {name} raised; such completions get reward 0 and are counted. The first:\n{trace}",
                file=sys.stderr,
            )
