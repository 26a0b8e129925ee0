"""Judges: worker processes that call the verifiers, because these may hang or die and a run must not.

PROBLEM. Sooner or later a policy writes `\\boxed{9^{9^{9^9}}}` or a megabyte of digits, and a computer algebra system
that takes it seriously neither answers nor stops. One such completion must not stall or kill a run.

IDEA. Judge in worker processes. The operating system limits each worker (processor time, size of a file, and, but for
your own functions, address space), and each request has a deadline. A worker that misses its deadline or dies is killed
with its children and replaced; the completion counts as wrong, and is counted by what happened:

    r(x, y) = +1 if verify(answer, what follows the thinking in y), else -1

THE REWARDS
    math, exact       see verifiers.py
    module:function   your own `function(prompt, completion, answer)`, imported in the worker. It returns the reward, a
                      number (above 0 is correct), or a pair (reward, correct)

SIMPLIFIED. The limits stop accidents, not an attacker: a worker has the user's rights.

WHY NOT A LIBRARY. `concurrent.futures` cannot end a task that hangs. `pebble.ProcessPool` can, but leaves the worker's
children running, gives up the whole pool when a worker dies between two tasks (as under the kernel's memory killer),
and imports the main program again in each worker, torch and all (320 MB instead of 17 MB).

>>> with contextlib.closing(RewardPool(["math"], workers=1, end_of_thinking="</think>")) as pool:
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
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tasks import judge_process
from tasks.judge_process import VERIFIERS, Job, Verdict

MAX_REPLY_BYTES = 1_000_000
START_TIMEOUT = 120.0


class RewardError(RuntimeError):
    """A user's reward function raised, and the message is its traceback; or it returned no reward."""


class Worker:
    """One worker process and the socket to it, which is never waited on without a deadline."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.socket, theirs = socket.socketpair()
        self.replies = self.socket.makefile("rb")
        self.number = 0  # of the last job, which its reply repeats; that of "ready" is 0
        command = [sys.executable, "-P", judge_process.__file__, json.dumps(settings)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # In a session of its own: Ctrl-C reaches only the run, and the process group is all that the worker started.
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment, start_new_session=True
            )

    def exchange(self, job: Job | None, timeout: float) -> tuple[Verdict, str]:
        """Sends one line, unless `job` is None, and returns the verdict and a traceback. Raises TimeoutError at the
        deadline, EOFError if the worker is gone or does not reply to this job."""
        deadline = time.monotonic() + timeout
        self.socket.settimeout(timeout)
        try:
            if job is not None:
                self.number += 1
                line = json.dumps([self.number, *job], default=str)
                self.socket.sendall(line.encode("ascii") + b"\n")
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            number, trace, *verdict = json.loads(self.replies.readline(MAX_REPLY_BYTES))
            if number != self.number:
                raise EOFError("the worker replied to another job")
            return Verdict(*verdict), trace
        except (BrokenPipeError, ConnectionResetError, ValueError, TypeError, RecursionError) as error:
            raise EOFError("the worker died, or its reply cannot be read") from error

    def kill(self) -> None:
        """Ends the process and what it started, and waits for it: no zombie stays."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """`kill`, and closes the socket."""
        self.kill()
        self.replies.close()
        self.socket.close()


class RewardPool:
    """Judges completions in `workers` processes; may be called from several threads at once.

    `rewards` are the names that jobs may use. One completion may take `timeout` seconds. `end_of_thinking` is the text
    after which `math` and `exact` read; empty if the model does not think apart. `memory_mb` limits a worker's address
    space while it runs `math` or `exact`; your own function has no limit. Raises ValueError on an unknown option, and
    on a function that cannot be imported or called.
    """

    def __init__(
        self,
        rewards: Sequence[str] = ("math",),
        workers: int = 2,
        timeout: float = 8.0,
        end_of_thinking: str = "",
        *,
        memory_mb: int = 2048,
    ) -> None:
        if workers < 1 or timeout <= 0:
            raise ValueError(f"`reward_workers` and `reward_timeout` must be positive, got {workers} and {timeout}")
        for name in rewards:
            if name not in VERIFIERS and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(f"`reward` must be one of {', '.join(VERIFIERS)} or module:function, got {name!r}")
        self.timeout = timeout
        self.counts = Counter[str]()  # verdicts by kind
        self._settings: dict[str, Any] = {
            "rewards": list(dict.fromkeys(rewards)),
            "timeout": timeout,
            "memory_mb": memory_mb,
            "end": end_of_thinking,
        }
        self._lock = threading.Lock()
        self._closed = False
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
        """One verdict per job, in order. Raises RewardError if a user's function raised."""
        verdicts = list(self._threads.map(self._ask, jobs))
        with self._lock:
            self.counts.update(verdict.kind for verdict in verdicts)
            lost = sum(self.counts[kind] for kind in ("timeout", "memory", "crash"))
            if lost > max(10, 0.1 * self.counts.total()):
                # One text, so that Python shows it once.
                warnings.warn("more than a tenth of the verdicts are timeout, memory or crash", stacklevel=2)
        return verdicts

    def answers_readable(self, name: str, answers: Sequence[object]) -> list[bool]:
        """For each answer: can the reward `name` read it? Asked before training, so that a bad row is known by then."""
        if name != "math":
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

    def _launch(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward workers are closed")
            self._workers.append(Worker(self._settings))
            return self._workers[-1]

    def _wait_ready(self, worker: Worker) -> None:
        names = ",".join(self._settings["rewards"])
        try:
            ready, trace = worker.exchange(None, START_TIMEOUT)
        except (EOFError, TimeoutError) as error:
            limit = f"{START_TIMEOUT:.0f} s and {self._settings['memory_mb']} MiB"
            raise ValueError(f"`reward` {names}: a worker does not start in {limit}; it says why above") from error
        if ready.kind == "error":
            raise ValueError(trace)

    def _ask(self, job: Job) -> Verdict:
        worker = self._idle.get()
        lost = True
        trace = ""
        try:
            if worker is None:
                worker = self._launch()
                self._wait_ready(worker)
            verdict, trace = worker.exchange(job, self.timeout)
            lost = verdict.kind == "memory"  # the worker may be short of memory for good
        except TimeoutError:
            verdict = Verdict(-1.0, False, "timeout")
        except EOFError as error:
            if self._closed:
                raise RuntimeError("the reward workers are closed") from error
            verdict = Verdict(-1.0, False, "crash")
        finally:
            if lost and worker is not None:
                with self._lock:
                    self._workers.remove(worker)
                worker.close()
            self._idle.put(None if lost else worker)
        if verdict.kind == "error":  # the traceback may quote what a model wrote, and that may not steer a terminal
            trace = "".join(c if c.isprintable() or c == "\n" else "?" for c in trace)
            raise RewardError(f"`reward` {job.name} " + (f"raised:\n{trace}" if "\n" in trace else trace))
        return verdict
