"""A run's folder: one process at a time, logs that are written line by line, checkpoints that are whole or absent.

run.py says who writes which file. A checkpoint is written to a temporary folder, flushed to disk and renamed, so that
one that exists is complete. Its `state.json` lists the other files with their sizes and has a hash of itself, so that
one that was damaged later is recognized. It has the lengths of the logs and their hashes, too: a resumed run takes off
what they gained after it.
"""

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from pipeline_rl import Group
from runtime.command_line import reason_of
from runtime.flags import Flags, UsageError

Record = dict[str, Any]  # a JSON object
LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
KEEP = 2  # checkpoints
LOCK_PATIENCE = 5.0  # seconds; what a killed run leaves of its processes may hold the lock for a moment

# What Python raises for damaged files: not there, cut short, too deep, of other types and shapes.
DAMAGED = (
    OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError,
    MemoryError, EOFError, ImportError,
)  # fmt: skip


class RunFailed(RuntimeError):
    """Going on would train on what cannot be trusted, or would save nothing."""


@dataclass
class Progress:
    """Where a run is."""

    rng: random.Random  # for what rank 0 draws: the shuffle of `ppo_off_policy`, the rows of a weights check
    step: int = 0  # batches consumed
    version: int = 0  # optimizer updates; train.py says which steps make none
    evaluated: int = -1  # step of the last recorded evaluation
    bad_steps: int = 0  # gradients in a row that were not finite
    taken: list[Group] = field(default_factory=list)  # from the generator, not yet trained on
    compute: dict[str, float] = field(default_factory=dict)  # of the run before it was resumed
    stop_signal: int = 0  # number of the signal that asked the run to stop

    def state_dict(self) -> Record:
        """What a resumed run needs, for JSON."""
        counts = {"step": self.step, "version": self.version, "evaluated": self.evaluated}
        return counts | {"random": self.rng.getstate()}

    def load_state_dict(self, state: Record) -> None:
        """Goes on where `state` was saved."""
        self.step = state["step"]
        self.version = state["version"]
        self.evaluated = state["evaluated"]
        generator, internal, gauss = state["random"]
        self.rng.setstate((generator, tuple(internal), gauss))


class Folder:
    """The files of one run. Every line is written when it is measured, so that a stop keeps what came before it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._checkpoints = self.path / "checkpoints"
        self._lock = FileLock(self.path / "lock")

    def lock(self) -> None:
        """Makes the folder, and keeps every other run out of it until `unlock` or the end of this process, whatever
        ends that. Raises UsageError if another run has it, or if it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=LOCK_PATIENCE)
            for old in (self.path / "model.old", *self._checkpoints.glob("step-*.old")):
                if old.exists() and not old.with_suffix("").exists():  # a kill in the middle of `swap`
                    old.rename(old.with_suffix(""))
        except Timeout as error:
            raise UsageError(f"another run uses the folder {self.path}; wait for its end.") from error
        except (OSError, ValueError) as error:  # no permission, a name that is too long, ...
            raise UsageError(
                f"--output_dir {self.path} cannot be used ({reason_of(error)}); choose another."
            ) from error

    def unlock(self) -> None:
        """Lets other runs in."""
        with suppress(OSError):  # Windows removes the file itself, at the release
            if self._lock.is_locked:
                (self.path / "lock").unlink()  # who waits for this lock sees that its file is gone, and makes it anew
        self._lock.release()

    def holds_run(self) -> bool:
        """Whether a run wrote its flags into the first line of metrics.jsonl."""
        try:
            return "config" in json.loads((self.path / "metrics.jsonl").read_bytes().split(b"\n")[0])
        except (OSError, ValueError, TypeError):
            return False

    def clear(self) -> None:
        """Removes the files of the run that this folder holds, and nothing else. metrics.jsonl, which marks the folder
        as a run, goes last."""
        folders = ("checkpoints", "recorded", "model", "model.new", "model.old")
        for name in (*folders, "curve.png", "config.json", "config.json.new", *reversed(LOGS)):
            remove(self.path / name)

    def append(self, name: str, record: Record) -> None:
        """One more line of `name`, with null for a number that is not finite: JSON has no NaN, and other readers refuse
        the whole line. Raises RunFailed if the disk is full."""
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record = record | {key: None}
        with writing(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Replaces the file `name`: a stop leaves either the old file or the new one."""
        new = self.path / f"{name}.new"
        new.write_text(text)
        new.replace(self.path / name)

    def read(self, name: str) -> list[Record]:
        """All records of `name`; none if it does not exist. A last line that is cut short is left out: its writer was
        killed, or is writing it now."""
        return [json.loads(line) for line in self.content(name).split(b"\n")[:-1]]

    def content(self, name: str) -> bytes:
        """What is in the log `name`; nothing if it does not exist."""
        file = self.path / name
        return file.read_bytes() if file.exists() else b""

    def logs(self) -> Record:
        """Of each log its length in bytes and their hash, for a checkpoint."""
        contents = {name: self.content(name) for name in LOGS}
        return {name: [len(content), sha256(content).hexdigest()] for name, content in contents.items()}

    def check_logs(self, logs: Record) -> None:
        """Raises UsageError for a log that no longer begins as it was when a checkpoint was written."""
        for name, (length, digest) in logs.items():
            with reading(self.path / name):
                if sha256(self.content(name)[:length]).hexdigest() != digest:
                    raise ValueError("it is another than the checkpoint knows")

    def cut_back(self, logs: Record) -> None:
        """Takes off what the logs gained after a checkpoint, so that no step appears twice."""
        for name, (length, _) in logs.items():
            if (self.path / name).exists():
                os.truncate(self.path / name, length)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def begin_checkpoint(self) -> Path:
        """An empty folder to write the next checkpoint into; half-written ones of earlier processes are removed."""
        for leftover in [*self._checkpoints.glob("unfinished-*"), *self._checkpoints.glob("*.old")]:
            remove(leftover)
        temporary = self._checkpoints / f"unfinished-{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def finish_checkpoint(self, temporary: Path, step: int, state: Record) -> Path:
        """Adds state.json, flushes all of it and the logs, renames the folder to its final name and keeps the newest
        KEEP whole ones up to it. Older and damaged ones go, and later ones, which exist only after a resume fell back
        past a damaged checkpoint."""
        files = [file for file in temporary.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(temporary)): file.stat().st_size for file in files}
        state = signed(state | {"logs": self.logs(), "files": sizes})
        (temporary / "state.json").write_text(json.dumps(state))
        for file in [*temporary.rglob("*"), *(self.path / name for name in LOGS), temporary]:
            flush(file)
        final = self._checkpoints / f"step-{step:06d}"
        swap(temporary, final)
        flush(self._checkpoints)
        checkpoints = self.checkpoints()
        earlier = checkpoints[: checkpoints.index(final) + 1]
        newest = list(filter(whole_state, earlier))[-KEEP:]
        for folder in checkpoints:
            if folder not in newest:
                remove(folder)
        return final

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        folders = [path for path in self._checkpoints.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(folders, key=lambda folder: int(folder.name[5:]))

    def newest_checkpoint(self) -> tuple[Path, Record] | None:
        """(folder, its state) of the newest complete checkpoint; damaged ones are passed over with a printed line."""
        for folder in reversed(self.checkpoints()):
            state = whole_state(folder)
            if state is not None:
                return folder, state
            print(f"checkpoint {folder} is damaged and is passed over", flush=True)
        return None


def check_folder(flags: Flags) -> None:
    """Raises UsageError for a folder that the run cannot have."""
    try:
        problem = problem_of_folder(flags)
    except (OSError, ValueError) as error:  # a name that is too long, a loop of links
        problem = f"--output_dir {flags.output_dir} cannot be used ({reason_of(error)}); choose another."
    if problem:
        raise UsageError(problem)


def problem_of_folder(flags: Flags) -> str:
    """One sentence where the run would overwrite a run, other files or the model to train, or would go on with files
    that lie elsewhere; else empty."""
    path = Path(flags.output_dir)
    if flags.resume:
        links = [file for file in [*path.glob("*"), *path.glob("checkpoints/*")] if file.is_symlink()]
        where = links[0].relative_to(path) if links else ""
        return f"--resume {path}: {where} is a link; put what it leads to in its place, or remove it." if links else ""
    if flags.overwrite and flags.model and Path(flags.model).resolve().is_relative_to(path.resolve()):
        return f"--overwrite would delete --model {flags.model}, which lies in --output_dir; choose another folder."
    if Folder(path).holds_run():
        if flags.overwrite:
            return ""
        return f"--output_dir {path} holds a run; give another folder, or --resume {path}, or --overwrite true."
    if path.is_file() or (path.is_dir() and any(file.name != "lock" for file in path.iterdir())):
        return f"--output_dir {path} is not empty and holds no run; choose another folder."
    return ""


def signed(state: Record) -> Record:
    """`state` with the hash of all else in it, by which a state.json that was changed is recognized."""
    rest = {name: value for name, value in state.items() if name != "hash"}
    return rest | {"hash": sha256(json.dumps(rest).encode()).hexdigest()}


def whole_state(folder: Path) -> Record | None:
    """The state of a checkpoint as it was written, with all its files at their sizes, else None."""
    try:
        state = json.loads((folder / "state.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
        is_whole = sizes == state["files"] and signed(state)["hash"] == state["hash"]
    except DAMAGED:
        return None
    return state if is_whole else None


def swap(new: Path, final: Path) -> None:
    """Puts the folder `new` in the place of `final`, which has the suffix `.old` in between. A kill there leaves it so,
    and the next start puts it back."""
    old = final.with_suffix(".old")
    if final.exists():
        remove(old)
        final.rename(old)
    new.rename(final)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file, a folder, or a link and not what it leads to, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """What was written to a file is on the disk now; so is a folder's list of files, but on Windows, which opens
    none."""
    if path.is_file():
        mode = os.O_RDWR  # Windows flushes only what may be written
    elif path.is_dir() and hasattr(os, "O_DIRECTORY"):
        mode = os.O_RDONLY
    else:
        return
    descriptor = os.open(path, mode)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What a full disk raises in the block becomes one sentence, a RunFailed: OSError, safetensors' own error, or that
    of torch's zip writer."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if type(error) is RuntimeError and "inline_container" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RunFailed(f"cannot write {getattr(error, 'filename', None) or path}: {reason}") from error


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """What a damaged file raises in the block becomes a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except DAMAGED as error:
        raise UsageError(f"--resume: {file} is damaged ({reason_of(error)}); put back a copy of it.") from error
