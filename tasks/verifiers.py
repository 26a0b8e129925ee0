"""Verifiers: is the answer after the thinking right? In worker processes, which may hang or die as a run may not.

PROBLEM. A reward by a verifier (ScaleRL, arXiv 2510.13786, section 2) judges text that a policy wrote. Sooner or later
the policy writes `\\boxed{9^{9^{9^9}}}`, a megabyte of digits or a thousand nested roots, and a computer algebra
system that takes it seriously neither answers nor stops. One such completion must not stall or kill a run.

IDEA. Judge in worker processes. Each has limits from the operating system (address space, processor time, size of a
file), each request a deadline. A worker that misses it, or dies, is killed with its children and replaced; the
completion counts as wrong, and is counted by what happened:

    r(x, y) = +1 if verify(answer, what follows the thinking in y), else -1

Requests and replies are lines of JSON over pipes. Nothing is pickled, so nothing in a data set can run as code, and
JSON carries what a tokenizer may decode to: lone surrogates, control characters, megabytes.

THE REWARDS
    math              the answer in the last `\\boxed{}`, else the last one found, compared by the math-verify library
    exact             the text that follows the thinking equals the answer, spaces around it apart
    module:function   your own `function(prompt, completion, answer)`, imported in the worker; it returns True or False,
                      a number (above 0 is correct), a pair (reward, correct), or None for "cannot be parsed"

SIMPLIFIED. The limits stop accidents, not an attacker: a worker has the user's rights. Of several boxes only the last
is read. A bare word as answer is compared as text: as algebra, `Evelyn` would equal its anagrams. `2e+5` that stands
alone is 200000; 2e + 5 has spaces. math-verify is lenient, so these are right, and a policy may learn them:
    units      5 km for 5 cm, 3 minutes for 3 hours; 10 for 10 % and 10 % for 10; 60 for 60 degrees
    bases      11 and 10_2 for 11_2 and 10: a base is ignored
    order      1, 2 for 2, 1, for (1, 2) and for {1, 2}; BA for AB; 5 for x = 5; 1, 2 for x = 1, y = 2; X for x
    decimals   0.0000002 for 0.0000001: numbers are compared to 6 of them

>>> with RewardPool(["math"], workers=1, end_of_thinking="</think>") as pool:
...     pool.judge([Job("math", "1/4 + 1/4?", "Adding up. </think> It is \\\\boxed{0.5}.", "1/2")])
[Verdict(reward=1.0, correct=True, kind='correct')]
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import queue
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

BUILT_IN = ("math", "exact")
# What math-verify is given: longer answers are no answers, and its grammar takes more than linear time.
MAX_ANSWER_CHARS = 1_000
# A number such as 1e-05 that stands alone, which math-verify would read as 1 * e - 5. Exponents of up to three digits.
SCIENTIFIC = re.compile(r"(?<![^\s$=*])[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?=[.,;*]?(?:[\s$\\*]|$))")
MAX_TAIL_CHARS = 2_000
# math-verify reads `\ge 42` and `43 \to 42` as 42: an answer that is no relation is not given by one.
RELATION = re.compile(r"\\(?:[gl]eq?|neq?|[gl]t|to|(?:right|left)arrow)(?![a-z])|[<>≤≥≠→]")
MAX_REPLY_BYTES = 1_000_000
MAX_FILE_BYTES = 64 * 2**20
START_TIMEOUT = 120.0
# What can happen to a worker so that it must be replaced, and the kind of verdict that it gives.
LOST = {"hung": "timeout", "died": "crash", "memory": "memory"}


class Job(NamedTuple):
    """One completion to judge by the reward `name`; a completion None asks only whether the answer can be read."""

    name: str
    prompt: str
    completion: str | None
    answer: Any


class Verdict(NamedTuple):
    """`kind` says why: correct, wrong, unparsed (no answer in the completion), unfinished (its thinking never ended),
    bad_answer (no verifier reads the data set's answer), verifier_error (math-verify or SymPy raised on it), timeout,
    crash, memory, error (a user's function raised)."""

    reward: float
    correct: bool
    kind: str


class RewardError(RuntimeError):
    """A user's reward function raised; the message is its traceback."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading and comparing answers: pure functions, run in the worker


def after_thinking(completion: str, end_of_thinking: str) -> str | None:
    """What follows the first `end_of_thinking`; None if it never comes; all of it if `end_of_thinking` is empty."""
    if not end_of_thinking:
        return completion
    _, mark, answer = completion.partition(end_of_thinking)
    return answer if mark else None


def last_box(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` or `\\fbox{...}`, of nested boxes the inner one; None without.

    One pass from the left: to scan on from each opening would take quadratic time on `\\boxed{\\boxed{\\boxed{...`.
    """
    found, found_at, depth = None, -1, 0
    boxes: list[tuple[int, int]] = []  # (depth outside, where the content starts) of the boxes that are open
    # An escaped brace is none, and the line break `\\\\` escapes nothing.
    for mark in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if mark.group() == "}":
            depth -= 1
            if boxes and boxes[-1][0] == depth:
                start = boxes.pop()[1]
                if start > found_at:
                    found, found_at = text[start : mark.start()], start
        elif mark.group().endswith("{") and mark.group() != "\\{":
            if mark.group() != "{":
                boxes.append((depth, mark.end()))
            depth += 1
    return found


def decimals(text: str) -> str:
    """`text` with 1e-05 written as 0.00001."""
    return SCIENTIFIC.sub(lambda number: f"{Decimal(number.group()):f}", text)


def plain(answer: str) -> str:
    """An answer without what does not change it: dollars around, `\\text{}`, a full stop, outer spaces, extra zeros.
    1e-05 becomes 0.00001."""
    text = answer.strip().rstrip(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    text = re.sub(r"^\\(?:text|mathrm|textbf)\{([^{}\\]*)\}$", r"\1", text).strip()
    # TeX's thousands: 1{,}234 and 1\,234.
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))", "", text)
    text = decimals(text) if len(text) <= MAX_ANSWER_CHARS else text  # 1e999 is six characters, then a thousand
    # 1,234 and +007 as 1234 and 7, without int(): Python refuses more than 4,300 digits.
    if re.fullmatch(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)", text):
        digits = text.lstrip("+-").replace(",", "").lstrip("0") or "0"
        return "-" + digits if text[0] == "-" and digits != "0" else digits
    return text


def is_word(answer: str) -> bool:
    """True for an answer in words, such as `Evelyn` or `No`, which algebra would read as a product of letters."""
    return re.fullmatch(r"[A-Za-z]{3}[A-Za-z ]*|(?i:no)", answer) is not None


def math_kind(text: str | None, answer: str, soft_timeout: int = 2) -> str:
    """`correct`, `wrong`, `unparsed` (no answer in `text`), `bad_answer` (no verifier reads `answer`), `timeout` or
    `verifier_error` (the library raised).

    `text` None only asks whether `answer` can be read. math-verify parses both to SymPy and compares numbers to 6
    decimals, sets, intervals, matrices, equations and expressions; parsing the answer, parsing the text and comparing
    have `soft_timeout` seconds each, by an alarm that interrupts Python code (main thread only).
    """
    from math_verify.errors import TimeoutException

    wanted, box = plain(answer), last_box(text or "")
    given, integer = plain(box if box is not None else text or ""), r"-?\d+"
    if not wanted:
        return "bad_answer"
    if text is not None and given.casefold() == wanted.casefold():  # math-verify does not tell x from X either
        return "correct"
    if is_word(wanted) or (re.fullmatch(integer, wanted) and (text is None or re.fullmatch(integer, given))):
        return "unparsed" if box is None and is_word(wanted) else "wrong"
    if box is not None and RELATION.search(given) and not RELATION.search(wanted):
        return "wrong"
    try:
        gold = parse_math(rf"\boxed{{{wanted}}}", soft_timeout) if len(wanted) <= MAX_ANSWER_CHARS else ()
        if not gold or text is None:
            return "wrong" if gold else "bad_answer"
        read = decimals(text[-MAX_TAIL_CHARS:])[-MAX_TAIL_CHARS:] if box is None else rf"\boxed{{{given}}}"
        found = parse_math(read, soft_timeout) if box is None or len(given) <= MAX_ANSWER_CHARS else ()
        if found == ():
            return "unparsed"
        equal = same(gold, found, soft_timeout) if found is not None else None
        return "verifier_error" if equal is None else "correct" if equal else "wrong"
    except TimeoutException:
        return "timeout"


@functools.lru_cache(maxsize=256)  # a group's completions share one answer
def parse_math(text: str, soft_timeout: int) -> tuple[Any, ...] | None:
    """The SymPy objects that math-verify finds in `text`, () if there are none, None if it raises. Its TimeoutException
    passes through."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:
        found = parse(text, configs, fallback_mode="no_fallback", parsing_timeout=soft_timeout, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # SymPy and its grammar raise whatever they meet: RecursionError, TypeError, IndexError, ...
        return None
    return tuple(found)


def same(gold: Sequence[Any], found: Sequence[Any], soft_timeout: int) -> bool | None:
    """math-verify's comparison; None where it raises. Its TimeoutException passes through."""
    from math_verify import verify

    try:
        return bool(verify(list(gold), list(found), timeout_seconds=soft_timeout, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # as above; an answer that cannot be compared is not shown to be right
        return None


def verdict_of(value: Any) -> Verdict:
    """The verdict that a user's return value means. Raises TypeError or ValueError if it means none."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        reward, correct = float(value[0]), bool(value[1])
    else:
        # NumPy and torch scalars are read as Python's.
        value = value.item() if hasattr(value, "item") else value
        if value is None:
            return Verdict(-1.0, False, "unparsed")
        if isinstance(value, bool):
            reward, correct = (1.0 if value else -1.0), value
        elif isinstance(value, (int, float)):
            reward, correct = float(value), value > 0
        else:
            kind = type(value).__name__
            raise TypeError(f"a reward must be a bool, a number, a pair (reward, correct) or None, not {kind}")
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, not {reward}")
    return Verdict(reward, correct, "correct" if correct else "wrong")


# ---------------------------------------------------------------------------------------------------------------------
# The worker process: python verifiers.py SETTINGS


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises ValueError with the fix if there is none."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"--reward must be one of {', '.join(BUILT_IN)} or module:function, got {name!r}")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"--reward {name}: the module {module} has no function {function}")
    return found


def limit_processor_time(seconds: float) -> None:
    """SIGXCPU after `seconds` more of processor time, which ends a hanging worker whose run has gone away."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds), hard))


def judge_one(job: Job, functions: dict[str, Callable[..., Any]], end_of_thinking: str, soft_timeout: int) -> Verdict:
    """The verdict on one job. What a user's function raises passes through."""
    if job.name in functions:
        return verdict_of(functions[job.name](job.prompt, job.completion, job.answer))
    text = None if job.completion is None else after_thinking(job.completion, end_of_thinking)
    if text is None and job.completion is not None:
        kind = "unfinished"
    elif job.name == "math":
        kind = math_kind(text, str(job.answer), soft_timeout)
    else:
        kind = "correct" if text is not None and text.strip() == str(job.answer).strip() else "wrong"
    return Verdict(1.0 if kind == "correct" else -1.0, kind == "correct", kind)


def warm_up(soft_timeout: int) -> None:
    """Imports math-verify and walks once through what SymPy loads on first use, so that no deadline pays for it."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text, answer in ((r"\boxed{(x+1)^2}", "x^2+2x+1"), (r"\boxed{(1,2]}", "[1,2)"), (r"$x = 3$", r"\frac{1}{3}")):
        math_kind(text, answer, soft_timeout)


def worker_main(settings: dict[str, Any]) -> None:
    """Reads one request a line from stdin and writes one reply a line to what was stdout, until stdin ends."""
    # What a reward function prints goes to stderr; the pipe carries replies alone.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    soft_timeout = max(1, int(settings["timeout"] / 3))
    try:
        functions = {name: load_function(name) for name in settings["rewards"] if name not in BUILT_IN}
        if "math" in settings["rewards"]:
            warm_up(max(soft_timeout, 30))
        ready = ["ready", 0.0, False, ""]
    except Exception:  # told to the run, which raises it
        ready = ["error", 0.0, False, traceback.format_exc()[-20_000:]]
    if settings["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory_mb"] * 2**20,) * 2)
    print(json.dumps(ready), file=replies, flush=True)
    for line in sys.stdin.buffer:
        limit_processor_time(4 * settings["timeout"])  # a function may use several threads
        job, told = Job(*json.loads(line)), ""
        try:
            verdict = judge_one(job, functions, settings["end_of_thinking"], soft_timeout)
        except MemoryError:
            verdict = Verdict(-1.0, False, "memory")
        except Exception:  # a user's function may raise anything; the run shows it and stops, or counts it
            verdict, told = Verdict(0.0, False, "error"), traceback.format_exc()[-20_000:]
        print(json.dumps([verdict.kind, verdict.reward, verdict.correct, told]), file=replies, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The pool


class Worker:
    """One worker process and its two pipes, which are never waited on without a deadline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(settings)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # Its own session: Ctrl-C reaches the run alone, and killing the group takes what the worker started.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                                        env=environment, start_new_session=True)
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, request: bytes, timeout: float) -> list[Any]:
        """Sends one line, returns the reply. Raises TimeoutError at the deadline, EOFError if the worker is gone."""
        deadline, rest, reply = time.monotonic() + timeout, memoryview(request), b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if request:
                selector.register(self.process.stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                if len(reply) > MAX_REPLY_BYTES:
                    raise EOFError("the reply is too long")
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is self.process.stdout:
                        part = os.read(key.fd, 65536)
                        if not part:
                            raise EOFError("the worker died")
                        reply += part
                        continue
                    try:
                        rest = rest[os.write(key.fd, rest[:65536]) :]
                    except BrokenPipeError as error:
                        raise EOFError("the worker died") from error
                    if not rest:
                        selector.unregister(key.fileobj)
        return json.loads(reply)

    def kill(self) -> None:
        """Ends the process and what it started, and waits for it, so that no zombie stays."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """`kill`, and gives the pipes back."""
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class RewardPool:
    """Judges completions in `workers` processes; may be called from several threads.

    Args:
        rewards: names that jobs may use: `math`, `exact`, `module:function`.
        workers: processes.
        timeout: seconds for one completion; then its worker is killed and replaced, and the verdict is wrong.
        memory_mb: limit of a worker's address space in MiB, 0 for none (a function that uses CUDA needs none).
        errors: what an exception in a user's function does: `raise` stops the run with it; `zero` gives reward 0,
            counts it, and shows the first traceback on stderr.
        end_of_thinking: text after which `math` and `exact` read; empty if the model does not think apart.
    Raises:
        ValueError: an unknown option; a function that cannot be imported.
    """

    def __init__(
        self,
        rewards: Sequence[str] = ("math",),
        *,
        workers: int = 2,
        timeout: float = 8.0,
        memory_mb: int = 2048,
        errors: str = "raise",
        end_of_thinking: str = "",
    ) -> None:
        if errors not in ("raise", "zero"):
            raise ValueError(f"--reward_errors must be raise or zero, got {errors!r}")
        if workers < 1 or timeout <= 0:
            raise ValueError(f"--reward_workers and --reward_timeout must be positive, got {workers} and {timeout}")
        for name in rewards:
            if name not in BUILT_IN and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(f"--reward must be one of {', '.join(BUILT_IN)} or module:function, got {name!r}")
        self.timeout, self.errors = timeout, errors
        self.counts: Counter[str] = Counter()  # verdicts by kind
        self._settings = {"rewards": list(dict.fromkeys(rewards)), "timeout": timeout, "memory_mb": memory_mb,
                          "end_of_thinking": end_of_thinking}
        self._lock, self._closed, self._shown = threading.Lock(), False, False
        self._workers: list[Worker] = []
        # Workers that have nothing to do; None is one that is to be started again.
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for worker in [self._launch() for _ in range(workers)]:  # together, because each takes a second
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
        if name != "math":
            return [True] * len(answers)
        verdicts = self._threads.map(self._ask, [Job(name, "", None, answer) for answer in answers])
        return [verdict.kind in ("correct", "wrong", "unparsed") for verdict in verdicts]

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
        flag = f"--reward {','.join(self._settings['rewards'])}"
        try:
            kind, _, _, told = worker.exchange(b"", START_TIMEOUT)
        except (EOFError, TimeoutError) as error:
            raise ValueError(f"{flag}: a worker does not start, its own message stands above; "
                             f"a larger limit of memory than {self._settings['memory_mb']} MiB may help") from error
        if kind != "ready":
            raise ValueError(f"{flag} cannot be loaded:\n{told}")

    def _ask(self, job: Job) -> Verdict:
        request = json.dumps(job, default=str).encode("ascii") + b"\n"
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._launch()
                self._wait_ready(worker)
            kind, reward, correct, told = self._exchange(worker, request)
            if kind in LOST:
                with self._lock:
                    self._workers.remove(worker)
                worker.close()
                worker = None  # started again when it is next needed
        finally:
            self._idle.put(worker)
        if kind == "error":
            self._show(job.name, told)
        return Verdict(reward, correct, LOST.get(kind, kind))

    def _exchange(self, worker: Worker, request: bytes) -> list[Any]:
        try:
            return worker.exchange(request, self.timeout)
        except TimeoutError:
            return ["hung", -1.0, False, ""]
        except EOFError as error:
            if self._closed:
                raise RuntimeError("the reward workers are closed") from error
            return ["died", -1.0, False, ""]

    def _show(self, name: str, told: str) -> None:
        """A user's function raised: stop with its traceback, or show the first one and go on. A traceback may quote
        what a model wrote: nothing in it steers a terminal."""
        told = "".join(c if c.isprintable() or c == "\n" else "?" for c in told)
        if self.errors == "raise":
            raise RewardError(f"--reward {name} raised (--reward_errors zero goes on without it):\n{told}")
        with self._lock:
            first, self._shown = not self._shown, True
        if first:
            print(f"--reward {name} raised; such completions get reward 0 and are counted. The first:\n{told}",
                  file=sys.stderr)


if __name__ == "__main__":
    worker_main(json.loads(sys.argv[1]))
