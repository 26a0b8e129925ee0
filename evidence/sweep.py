"""Runs of `train.py`, one or several at a time, until all are finished: what `ablate.py` plans, this makes.

FINISHED is a run whose folder holds `finished.json`, which is written after `train.py` ended with exit code 0; it is
never run again. Any other folder goes on by --resume if it has a whole checkpoint, and begins again if not. Ctrl-C is
passed on once to the runs under way, which save checkpoints; a second one ends them at once.
"""

import ctypes
import datetime
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import ROOT, processor

from runtime.flags import DEFAULTS, UsageError, runs_code, with_new_names
from runtime.run_folder import Folder

TRAIN = ROOT / "train.py"
OWN = ("output_dir", "overwrite", "resume", "seed", "dry_run", "cache_dir")  # of a run, not of what is compared


@dataclass(frozen=True)
class Run:
    """One process of train.py."""

    folder: Path
    flags: tuple[tuple[str, Any], ...]  # those that are given, with those of the setting
    seed: int

    def command(self) -> list[str]:
        """What is run; the flags of a run that goes on are in its folder, but for those that run code."""
        goes_on = Folder(self.folder).newest_checkpoint() is not None
        flags = [(name, value) for name, value in self.flags if not goes_on or runs_code(name, value)]
        given = [word for name, value in flags for word in (f"--{name}", as_word(value))]
        if goes_on:
            return [sys.executable, str(TRAIN), "--resume", str(self.folder), *given]
        new = ["--output_dir", str(self.folder), "--overwrite", "true", "--seed", str(self.seed)]
        return [sys.executable, str(TRAIN), *new, *given]

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def finished(self) -> bool:
        """Does the run have its closing record? Raises UsageError if the folder is of a run with other flags."""
        config = self.folder / "config.json"
        if config.exists():
            saved = with_new_names(json.loads(config.read_text()))
            wanted = {name: value for name, value in DEFAULTS.items() if name not in OWN} | dict(self.flags)
            wanted["seed"] = self.seed
            other = [f"--{n} {as_word(saved[n])}, not {as_word(v)}" for n, v in wanted.items() if saved.get(n, v) != v]
            if other:
                raise UsageError(f"{self.folder} holds a run with {'; '.join(other)}: move it away, or give --output.")
        return (self.folder / "finished.json").exists()


def as_word(value: Any) -> str:
    """A flag's value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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


def make(runs: Sequence[Run], output: Path, jobs: int = 1) -> int:
    """Makes all runs that are not finished, `jobs` at a time. Exit code: 0 all are, 1 some failed, 2 flags that cannot
    work, 130 stopped by a signal. Raises UsageError if another sweep uses `output`."""
    with locked(output) as lock:
        waiting = list(dict.fromkeys(run for run in runs if not run.finished()))
        print(f"{len(set(runs)) - len(waiting)} runs are finished, {len(waiting)} are to be run", flush=True)
        signals: list[int] = []  # the handler only notes them: one may come while a child is being started
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.signal(n, lambda number, frame: signals.append(number)) for n in numbers}
        codes: list[int] = []

        def next_one(run: Run) -> int | None:
            if signals or 2 in codes:
                return None
            codes.append(code := run_one(run, output, lock, signals))
            return code

        try:
            with ThreadPoolExecutor(jobs) as pool:
                ended = list(pool.map(next_one, waiting))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if signals:
        return 130
    for run, code in zip(waiting, ended, strict=True):
        if code:
            print(f"failed: {run.folder}; the next call tries it again")
    return 2 if 2 in codes else int(any(codes))


def run_one(run: Run, output: Path, lock: int, signals: list[int]) -> int:
    """Begins a run, or goes on with it from its newest whole checkpoint; returns its exit code."""
    command = run.command()
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.json.new").unlink(missing_ok=True)  # all that a run has if it is killed very early
    print(f"{run.folder}: {'goes on' if '--resume' in command else 'begins'}", flush=True)
    started, passed_on = time.time(), 0
    with run.log.open("a") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
            start_new_session=True,  # the terminal's Ctrl-C comes through us, once
            pass_fds=(lock,), preexec_fn=end_with_parent if sys.platform == "linux" else None,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )  # fmt: skip
    while (code := child.poll()) is None:
        for number in signals[passed_on:]:
            child.send_signal(number)
            passed_on += 1
        time.sleep(0.02)
    seconds, name = time.time() - started, str(run.folder.relative_to(output))
    log_of_all = Folder(output)
    log_of_all.append("sweep.jsonl", {"folder": name, "started": date(started), "seconds": seconds, "exit_code": code})
    if code == 0:
        total = sum(record["seconds"] for record in log_of_all.read("sweep.jsonl") if record["folder"] == name)
        closing = {"finished": date(time.time()), "seconds": total, "machine": f"{os.cpu_count()} x {processor()}"}
        Folder(run.folder).replace("finished.json", json.dumps(closing, indent=1))
    rates = [record["pass_rate"] for record in Folder(run.folder).read("eval.jsonl")][-1:]
    result = f"pass rate {rates[0]:.3f}" if code == 0 and rates else f"exit code {code}, see {run.log}"
    print(f"{run.folder}: {result} after {seconds:.0f} s", flush=True)
    return code


def end_with_parent() -> None:
    """In the child, on Linux: SIGTERM if the sweep dies, so that the run saves a checkpoint and no orphan is left."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def date(seconds: float) -> str:
    """Of a time, in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
