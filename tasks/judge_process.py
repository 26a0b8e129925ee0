"""What lives inside a judge's process: it reads jobs, calls the verifier that each one names, and writes verdicts.

judges.py starts it as `python tasks/judge_process.py SETTINGS`. A job comes in as one line of JSON on stdin, and its
verdict goes out as one line on what was stdout. Nothing is pickled, so nothing in a data set can run as code, and JSON
carries whatever a tokenizer may decode to: lone surrogates, control characters, megabytes.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # started by its path, with tasks/ on the module path instead of the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tasks import code_answers, verifiers
from tasks.sandbox import Sandbox, SandboxDied

VERIFIERS = ("math", "exact", "code")
MAX_FILE_BYTES = 64 * 2**20
MAX_TRACEBACK_CHARS = 20_000


class Job(NamedTuple):
    """One completion to judge by the reward `name`; a completion None asks only whether the answer can be read."""

    name: str
    prompt: str
    completion: str | None
    answer: Any


class Verdict(NamedTuple):
    """`kind` says why: correct, wrong, unparsed (no answer in the completion), unfinished (its thinking never ended),
    bad_answer (no verifier reads the data set's answer or tests), verifier_error (math-verify or SymPy raised on it),
    timeout, crash, memory (a worker's, or a program's that was run), error (a user's function raised)."""

    reward: float
    correct: bool
    kind: str


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises ImportError if there is none."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ImportError(f"the module {module} has no function {function}")
    return found


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


def judge_one(
    job: Job, functions: dict[str, Callable[..., Any]], end_of_thinking: str, soft_timeout: int,
    code_kind: Callable[[str | None, Any], str] | None = None,
) -> Verdict:  # fmt: skip
    """The verdict on one job; `code_kind` says what kind a code answer's is. What a user's function raises passes
    through, and SandboxDied."""
    if job.name in functions:
        return verdict_of(functions[job.name](job.prompt, job.completion, job.answer))
    text = None if job.completion is None else verifiers.after_thinking(job.completion, end_of_thinking)
    if text is None and job.completion is not None:
        kind = "unfinished"
    elif job.name == "math":
        kind = verifiers.math_kind(text, str(job.answer), soft_timeout)
    elif job.name == "code" and code_kind is not None:
        kind = code_kind(text, job.answer)
    else:
        kind = verifiers.exact_kind(text, str(job.answer))
    return Verdict(1.0 if kind == "correct" else -1.0, kind == "correct", kind)


def limit_processor_time(seconds: float) -> None:
    """SIGXCPU after `seconds` more of processor time: a process that hangs ends even if its run was killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds), hard))


def prepare(
    rewards: list[str], timeout: float, memory_mb: int
) -> tuple[dict[str, Callable[..., Any]], Callable[[str | None, Any], str] | None]:
    """The user's functions among `rewards`, by name, and `code_kind` with a sandbox. Sets the process's limits: of
    memory once all is imported."""
    sys.path.insert(0, os.getcwd())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    functions = {name: load_function(name) for name in rewards if name not in VERIFIERS}
    if "math" in rewards:
        verifiers.warm_up()
    code_kind = None
    if "code" in rewards:  # within the run's deadline, so that a program which hangs costs no worker
        code_kind = functools.partial(code_answers.code_kind, sandbox=Sandbox(), seconds=0.8 * timeout)
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
    return functions, code_kind


def serve(rewards: list[str], timeout: float, memory_mb: int, end_of_thinking: str) -> None:
    """Answers `["ready", ...]` or `["error", ..., traceback]`, then each line of stdin, until stdin ends."""
    # What a user's function prints goes to stderr: the run reads nothing but replies from stdout. And a process that it
    # starts inherits neither end, or the run would not see that this one died.
    replies, requests = os.fdopen(os.dup(1), "w", encoding="ascii"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    number = 0  # of the job, for the reply

    def reply(verdict: Verdict, trace: str = "") -> None:
        print(json.dumps([number, verdict.kind, verdict.reward, verdict.correct, trace]), file=replies, flush=True)

    try:
        functions, code_kind = prepare(rewards, timeout, memory_mb)
    except Exception:  # the run raises it again, with this traceback
        reply(Verdict(0.0, False, "error"), traceback.format_exc()[-MAX_TRACEBACK_CHARS:])
        return
    reply(Verdict(0.0, False, "ready"))
    for line in requests:
        limit_processor_time(4 * timeout)  # a function may use several threads
        try:
            number, *job = json.loads(line)
            reply(judge_one(Job(*job), functions, end_of_thinking, max(1, int(timeout / 3)), code_kind))
        except SandboxDied:  # the run takes this process's end for a crash, and starts another
            return
        except MemoryError:
            reply(Verdict(-1.0, False, "memory"))
        except Exception:  # a user's function may raise anything: the run shows it and stops, or counts it
            reply(Verdict(0.0, False, "error"), traceback.format_exc()[-MAX_TRACEBACK_CHARS:])


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
