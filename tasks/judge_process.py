"""What lives inside a judge's process: it reads jobs, calls the verifier that each one names, and writes verdicts.

judges.py starts it as `python -P tasks/judge_process.py SETTINGS`. A job comes in as one line of JSON on stdin, and its
verdict goes out as one line on what was stdout. Nothing is pickled, so nothing in a data set can run as code, and JSON
carries whatever a tokenizer may decode to: lone surrogates, control characters, megabytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tasks import verifiers
from tasks.named import named

with contextlib.suppress(ImportError):  # Windows has none: judges do not run there
    import resource

VERIFIERS = ("math", "exact")
MAX_FILE_BYTES = 64 * 2**20
MAX_REWARD = 1e6
MAX_TRACEBACK_CHARS = 20_000


class BadReward(ValueError):
    """What a user's function returned is no reward. The message goes on behind its name."""


class Job(NamedTuple):
    """One completion to judge by the reward `name`; a completion None asks only whether the answer can be read."""

    name: str
    prompt: str
    completion: str | None
    answer: object


class Verdict(NamedTuple):
    """`kind` is the reason: correct, wrong, unparsed (no answer in the completion), unfinished (its thinking never
    ended), bad_answer (no verifier reads the data set's answer), verifier_error (math-verify or SymPy raised on it),
    timeout, crash, memory."""

    reward: float
    correct: bool
    kind: str


def verdict_of(value: Any) -> Verdict:
    """The verdict that a user's return value means; its numbers may be NumPy's or torch's. Raises BadReward if it means
    none."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    reward, correct = value if is_pair else (value, None)
    try:
        fits = math.isfinite(reward) and abs(reward) <= MAX_REWARD
    except OverflowError:  # an int beyond all floats
        fits = False
    except TypeError as error:
        raise BadReward(f"must be a number or a pair (reward, correct), not {value!r:.99}") from error
    if not fits:
        raise BadReward(f"must be from -{MAX_REWARD:g} to {MAX_REWARD:g}, which float32 can square, not {reward!r:.99}")
    correct = bool(reward > 0 if correct is None else correct)
    return Verdict(float(reward), correct, "correct" if correct else "wrong")


def judge_one(job: Job, judges: Mapping[str, Callable], end_of_thinking: str) -> Verdict:
    """The verdict on one job, by the functions that `prepare` made. What a user's function raises passes through."""
    judge = judges[job.name]
    if job.name not in VERIFIERS:
        return verdict_of(judge(job.prompt, job.completion, job.answer))
    text = None if job.completion is None else verifiers.after_thinking(job.completion, end_of_thinking)
    if text is None and job.completion is not None:
        return Verdict(-1.0, False, "unfinished")
    kind = judge(text, str(job.answer))
    return Verdict(1.0 if kind == "correct" else -1.0, kind == "correct", kind)


def prepare(rewards: Sequence[str], timeout: float) -> dict[str, Callable]:
    """The function that judges each reward: the user's own, or one of a text and an answer that returns the kind of
    verdict. Sets the limits of the process but those of time and memory. Raises ValueError for a function that is not
    there."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    judges: dict[str, Callable] = {}
    for name in rewards:
        if name == "exact":
            judges[name] = verifiers.exact_kind
        elif name == "math":
            verifiers.warm_up()
            soft_timeout = max(1, int(timeout / 3))
            judges[name] = functools.partial(verifiers.math_kind, soft_timeout=soft_timeout)
        else:
            judges[name] = named("reward", name)
    return judges


def limit_memory(name: str, memory_mb: int) -> None:
    """Limits the address space for the verifiers. A user's own function may load a model, so it has no limit. macOS
    takes no such limit: only that of time is left there."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_mb * 2**20 if memory_mb and name in VERIFIERS else hard
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_processor_time(seconds: float) -> None:
    """SIGXCPU after `seconds` more of processor time: a process that hangs ends even if its run was killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds), hard))


def serve(rewards: Sequence[str], timeout: float, memory_mb: int, end: str) -> None:
    """Replies that it is ready, or why not, and then with the verdict on each line of stdin, until stdin ends."""
    # What a user's function prints goes to stderr: the run reads nothing but replies from stdout. And a process that it
    # starts inherits neither end, or the run would not see that this one died.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    number = 0  # of the job, for the reply

    def reply(reward: float, correct: bool, kind: str, trace: str = "") -> None:
        line = json.dumps([number, trace[-MAX_TRACEBACK_CHARS:], reward, correct, kind])
        print(line, file=replies, flush=True)

    try:
        judges = prepare(rewards, timeout)
    except ValueError as error:  # one sentence about a function that is not there
        reply(0.0, False, "error", str(error))
        return
    except Exception:  # the run raises it again, with this traceback
        reply(0.0, False, "error", traceback.format_exc())
        return
    reply(0.0, False, "ready")
    for line in requests:
        limit_processor_time(4 * timeout)  # a function may use several threads
        try:
            number, *job = json.loads(line)
            limit_memory(job[0], memory_mb)
            reply(*judge_one(Job(*job), judges, end))
        except MemoryError:
            reply(-1.0, False, "memory")
        except BadReward as error:
            reply(0.0, False, "error", str(error))
        except Exception:  # a user's function may raise anything, which stops the run
            reply(0.0, False, "error", traceback.format_exc())


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
