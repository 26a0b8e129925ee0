"""A run's folder: where the run is, its logs, checkpoints and model, and how a resumed run goes on from them.

    config.json      every flag                     metrics.jsonl   the flags, then one record per step
    eval.jsonl       one record per evaluation      samples.jsonl   a few rollouts to read
    groups.jsonl     what each step consumed: [prompt key, correct, rollouts], and the rollouts' tokens, from step 0
    eval_counts.jsonl  of each evaluation: how many of `n_samples` are correct, problem by problem
    checkpoints/     step-000030, ...               model/          the final model, Hugging Face format; run.json

A checkpoint (checkpoints.py) is written to a temporary folder, flushed to disk and renamed, so that one that exists is
complete. Its `state.json` lists the other files with their sizes, so that one that was damaged later is recognized.

Nothing outside of the folder is written, cut or removed: of a link the link goes, and what it points to stays.
"""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from pipeline_rl import Group

Record = dict[str, Any]  # a JSON object
LOGS = ("metrics.jsonl", "eval.jsonl", "eval_counts.jsonl", "groups.jsonl", "samples.jsonl")
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # what a full or forbidden disk answers


@dataclass
class Progress:
    """Where a run is."""

    rng: random.Random  # for what rank 0 draws: the shuffle of `ppo_off_policy`, the rows of a weights check
    step: int = 0  # batches consumed
    version: int = 0  # optimizer steps: a batch without a row to train on is a step and makes no version
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
        self.step, self.version, self.evaluated = state["step"], state["version"], state["evaluated"]
        version, internal, gauss = state["random"]
        self.rng.setstate((version, tuple(internal), gauss))
        self.compute = state["compute"]


class Folder:
    """The files of one run. Every line is written when it is measured, so that a stop keeps what came before it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._checkpoints = self.path / "checkpoints"

    def clear(self) -> None:
        """Removes the files of the run that this folder holds, and nothing else; last the one by which it is a run."""
        for name in ("checkpoints", "model", "model.new", "model.old", "curve.png", *LOGS, "config.json"):
            _remove(self.path / name)

    def holds_run(self) -> bool:
        """Whether a run wrote its flags here: into config.json, or into the first line of metrics.jsonl."""
        config, metrics = json_object(self.path / "config.json") or {}, self.path / "metrics.jsonl"
        first = json_object(metrics.read_bytes().split(b"\n")[0]) if metrics.is_file() else None
        return {"output_dir", "max_steps"} <= config.keys() or isinstance((first or {}).get("config"), dict)

    def not_its_own(self) -> list[str]:
        """Names of links, of logs that are no files, and of `checkpoints` that is one: no run writes there."""
        found = [self.path / name for name in (*LOGS, "curve.png", "checkpoints")]
        return [f.name for f in found if f.is_symlink() or (f.exists() and f.is_file() == (f.name == "checkpoints"))]

    def append(self, name: str, record: Record) -> None:
        """One more line of `name`."""
        with disk(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Replaces the file `name`: a stop leaves either the old file or the new one."""
        new = self.path / f"{name}.new"
        _remove(new)
        with disk(new):
            new.write_text(text)
        new.replace(self.path / name)

    def read(self, name: str) -> list[Record]:
        """All records of `name`, none if it does not exist. A last line that is cut short is left out: its writer was
        killed, or is writing it now."""
        file = self.path / name
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def lengths(self) -> dict[str, int]:
        """Bytes in each log, for a checkpoint."""
        return {name: file.stat().st_size if (file := self.path / name).exists() else 0 for name in LOGS}

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Takes off what the logs gained after a checkpoint, so that no step appears twice. A log that is shorter than
        it was then stays as it is, and a line says so."""
        for name in set(LOGS) & set(lengths) - set(self.not_its_own()):
            lost = lengths[name] - self.lengths()[name]
            if lost < 0:
                os.truncate(self.path / name, lengths[name])
            elif lost:
                print(f"{self.path / name} has lost its last {lost} bytes; its next records follow the gap", flush=True)

    def begin_model(self) -> Path:
        """An empty folder to write the final model into."""
        new = self.path / "model.new"
        _remove(new)
        new.mkdir()
        return new

    def finish_model(self, record: Record) -> None:
        """Adds `record` (of step and compute) as run.json; an earlier model stays until this one takes its place."""
        new = self.path / "model.new"
        with disk(new):
            (new / "run.json").write_text(json.dumps(record))
        _swap(new, self.path / "model", self.path / "model.old")

    def begin_checkpoint(self) -> Path:
        """An empty folder to write the next checkpoint into; half-written ones of earlier processes are removed."""
        for leftover in self._checkpoints.glob("unfinished-*"):
            _remove(leftover)
        temporary = self._checkpoints / f"unfinished-{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def finish_checkpoint(self, temporary: Path, step: int, state: Record, keep: int) -> Path:
        """Adds state.json, flushes all of it and the logs, renames the folder to its final name and keeps the
        newest `keep` whole ones up to it. Older, damaged and later ones go: a run that passes over one goes back."""
        files = {str(f.relative_to(temporary)): f.stat().st_size for f in sorted(temporary.rglob("*")) if f.is_file()}
        (temporary / "state.json").write_text(json.dumps(state | {"logs": self.lengths(), "files": files}))
        for file in [*temporary.rglob("*"), *(self.path / name for name in LOGS), temporary]:
            _flush(file)
        final = self._checkpoints / f"step-{step:06d}"
        _swap(temporary, final, temporary.with_name(f"{temporary.name}-replaced"))
        _flush(self._checkpoints)
        found = self.checkpoints()
        whole = [folder for folder in found[: found.index(final)] if _whole(folder)] + [final]
        for old in set(found) - set(whole[-keep:]):
            _remove(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = [f for f in self._checkpoints.glob("step-*") if re.fullmatch(r"step-[0-9]+", f.name) and f.is_dir()]
        return sorted(found, key=lambda folder: int(folder.name[5:]))

    def newest_checkpoint(self) -> tuple[Path, Record] | None:
        """(folder, its state) of the newest complete checkpoint; damaged ones are passed over with a printed line."""
        for folder in reversed(self.checkpoints()):
            if (state := _whole(folder)) is not None:
                return folder, state
            print(f"checkpoint {folder} is damaged and is passed over", flush=True)
        return None


def json_object(source: Path | bytes) -> Record | None:
    """The JSON object in a file or a line; None if it holds anything else, or cannot be read."""
    try:
        text = source if isinstance(source, bytes) else source.read_bytes() if source.is_file() else b""
        value = json.loads(text.decode())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole(folder: Path) -> Record | None:
    """The state of a checkpoint whose files all have the sizes that it was written with, else None."""
    state = json_object(folder / "state.json") or {}
    try:
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if sizes == state["files"] else None


def _flush(path: Path) -> None:
    if path.exists():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if one is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _swap(new: Path, final: Path, old: Path) -> None:
    """Puts the folder `new` in the place of `final`, which is `old` in between: a stop loses neither."""
    _remove(old)
    if os.path.lexists(final):
        final.rename(old)
    new.rename(final)
    _remove(old)


@contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Turns what a full or read-only disk becomes in torch and safetensors into an OSError, and names `path` where it
    names none: a full disk is found when a file is written, where Python knows no name. Other errors stay."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except (RuntimeError, SafetensorError, CheckpointException) as error:  # the last one has what each rank met
        text, writer = str(error), "inline_container.cc"  # torch's, which may say only "unexpected pos 576 vs 534"
        named = [number for number in DISK if os.strerror(number) in text] + [errno.ENOSPC] * (writer in text)
        if not named or (isinstance(error, RuntimeError) and writer not in text):
            raise
        raise OSError(named[0], f"it could not be written ({text.strip().splitlines()[-1]})", str(path)) from error
