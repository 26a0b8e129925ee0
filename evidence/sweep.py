"""Which runs of `train.py` a comparison needs, and making them, one or several at a time, until all are finished.

FINISHED is a run whose folder holds `finished.json`, which is written after `train.py` ended with exit code 0; it is
never run again. Any other folder goes on by --resume if it has a whole checkpoint, and begins again if not. Ctrl-C is
passed on once to the runs under way, which save checkpoints; a second one ends them at once.
"""

import ctypes
import datetime
import fcntl
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from comparisons import COMPARISONS
from curves import OWN, as_word

from runtime.flags import DEFAULTS, UsageError, runs_code
from runtime.run_folder import Folder

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "train.py"
DATE = "%Y-%m-%d %H:%M:%S UTC"
Value = bool | int | float | str


@dataclass(frozen=True)
class Job:
    """One process of train.py, in OUTPUT/COMPARISON/VARIANT/seed-N."""

    output: Path
    name: str  # COMPARISON/VARIANT/seed-N
    flags: tuple[tuple[str, Value], ...]  # those that are given, with those of the setting
    seed: int

    folder = property(lambda self: self.output / self.name)
    log = property(lambda self: self.output / f"{self.name}.log")  # what the run prints

    def command(self) -> list[str]:
        """What is run; the flags of a run that goes on are in its folder, but for those that run code."""
        if gone := [name for name, _ in self.flags if name not in DEFAULTS]:
            said = f"{self.folder}: train.py has no --{', --'.join(gone)}; correct its row in comparisons.py"
            raise UsageError(f"{said} or only report its published runs with --curves.")
        goes_on = Folder(self.folder).newest_checkpoint() is not None
        flags = [(name, value) for name, value in self.flags if not goes_on or runs_code(name, value)]
        given = [word for name, value in flags for word in (f"--{name}", as_word(value))]
        if goes_on:
            return [sys.executable, str(TRAIN), "--resume", str(self.folder), *given]
        new = ["--output_dir", str(self.folder), "--overwrite", "true", "--seed", str(self.seed)]
        return [sys.executable, str(TRAIN), *new, *given]

    def finished(self) -> bool:
        """Does the run have its closing record? Raises UsageError if the folder is of a run with other flags."""
        config = self.folder / "config.json"
        if config.exists():
            saved = json.loads(config.read_text())
            wanted = {name: value for name, value in DEFAULTS.items() if name not in OWN} | dict(self.flags)
            wanted["seed"] = self.seed
            other = [f"--{n} {as_word(saved[n])}, not {as_word(v)}" for n, v in wanted.items() if saved.get(n, v) != v]
            if other:
                raise UsageError(f"{self.folder} holds a run with {'; '.join(other)}: move it away, or give --output.")
        return (self.folder / "finished.json").exists()


Jobs = Mapping[tuple[str, int], Job]  # (variant, seed) -> its run


# ------------------------------------------------------------------------------------------------------ planning


def resolved(text: str) -> dict[str, Value]:
    """`--k 8 --loss dapo` as {"k": 8, "loss": "dapo"}. Raises UsageError for what no row may give. A flag that train.py
    had once is a word: its published runs are still reported."""
    words, found = shlex.split(text), {}
    for name, value in itertools.zip_longest(words[::2], words[1::2]):
        key = name.removeprefix("--")
        if not name.startswith("--") or key in OWN or value is None:
            raise UsageError(f"{text!r}: {name} is no flag that a row may give; write --NAME VALUE of train.py.")
        kind = type(DEFAULTS.get(key, ""))
        try:
            found[key] = value.lower() == "true" if kind is bool else kind(value)
        except ValueError as error:
            raise UsageError(f"{name} {value} is not of type {kind.__name__}.") from error
    return found


def plan(
    name: str, seeds: Sequence[int], output: Path, budget: Mapping[str, Value], only: Sequence[str] = ()
) -> dict[tuple[str, int], Job]:
    """The runs of a comparison by variant and seed. Equal flags are one run, wherever they occur: its folder is that of
    the first comparison and variant that has them."""
    owners: dict[str, str] = {}
    mine = {}
    for comparison, c in COMPARISONS.items():
        for variant, text in c.variants.items():
            given = resolved(c.setting) | resolved(text) | dict(budget)
            identity = json.dumps({**DEFAULTS, **given}, sort_keys=True)
            owners.setdefault(identity, f"{comparison}/{variant}")
            if comparison == name:
                mine[variant] = owners[identity], tuple(given.items())
    if unknown := set(only) - set(mine):
        raise UsageError(f"--only {', '.join(sorted(unknown))}: {name} has {', '.join(mine)}.")
    chosen = {variant: job for variant, job in mine.items() if not only or variant in only}
    return {
        (variant, seed): Job(output, f"{owner}/seed-{seed}", flags, seed)
        for seed in seeds
        for variant, (owner, flags) in chosen.items()
    }


# ------------------------------------------------------------------------------------------------------- making


@contextmanager
def locked(output: Path) -> Iterator[int]:
    """Holds OUTPUT for this sweep and its runs, which inherit the lock: two sweeps would write into the same folders.
    Yields the lock's descriptor. Raises UsageError if another holds it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{output} is in use by another sweep, or by a run that it left; wait for it.") from error
        yield file.fileno()


def make(jobs: Sequence[Job], output: Path, at_once: int) -> int:
    """Makes all runs that are not finished, some at a time. Exit code: 0 all are, 1 some failed, 2 flags that cannot
    work, 130 stopped by a signal. Raises UsageError if another sweep uses `output`."""
    with locked(output) as lock:
        waiting = list(dict.fromkeys(job for job in jobs if not job.finished()))
        for job in waiting:
            job.command()  # a row with a flag that train.py does not have is refused before the first run
        print(f"{len(set(jobs)) - len(waiting)} runs are finished, {len(waiting)} are to be run", flush=True)
        signals: list[int] = []  # the handler only notes them: one may come while a child is being started
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.signal(n, lambda number, frame: signals.append(number)) for n in numbers}
        codes: list[int] = []

        def next_one(job: Job) -> int | None:
            if signals or 2 in codes:
                return None
            codes.append(code := run_one(job, lock, signals))
            return code

        try:
            with ThreadPoolExecutor(at_once) as pool:
                ended = list(pool.map(next_one, waiting))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if signals:
        return 130
    for job, code in zip(waiting, ended, strict=True):
        if code:
            print(f"failed: {job.folder}; the next call tries it again")
    return 2 if 2 in codes else int(any(codes))


def run_one(job: Job, lock: int, signals: list[int]) -> int:
    """Begins a run, or goes on with it from its newest whole checkpoint; returns its exit code."""
    command = job.command()
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    (job.folder / "config.json.new").unlink(missing_ok=True)  # all that a run has if it is killed very early
    print(f"{job.folder}: {'goes on' if '--resume' in command else 'begins'}", flush=True)
    started, passed_on = datetime.datetime.now(datetime.UTC), 0
    with job.log.open("a") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,  # the terminal's Ctrl-C comes through us, once
            pass_fds=(lock,),
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
    while (code := child.poll()) is None:
        for number in signals[passed_on:]:
            child.send_signal(number)
            passed_on += 1
        time.sleep(0.02)
    ended = datetime.datetime.now(datetime.UTC)
    seconds = (ended - started).total_seconds()
    record = {"folder": job.name, "started": f"{started:{DATE}}", "seconds": seconds, "exit_code": code}
    Folder(job.output).append("sweep.jsonl", record)
    if code == 0:
        Folder(job.folder).replace("finished.json", json.dumps({"finished": f"{ended:{DATE}}"}))
    rates = [record["pass_rate"] for record in Folder(job.folder).read("eval.jsonl")][-1:]
    result = f"pass rate {rates[0]:.3f}" if code == 0 and rates else f"exit code {code}, see {job.log}"
    print(f"{job.folder}: {result} after {seconds:.0f} s", flush=True)
    return code


def end_with_parent() -> None:
    """In the child, on Linux: SIGTERM if the sweep dies, so that the run saves a checkpoint and no orphan is left."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
