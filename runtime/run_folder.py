"""A run's files: flags, one record per step and per evaluation, rollouts to read, checkpoints, the final model.

    config.json      every flag                     metrics.jsonl   the flags, then one record per step
    eval.jsonl       one record per evaluation      samples.jsonl   a few rollouts to read
    groups.jsonl     what each step consumed: [prompt key, correct, rollouts], and the rollouts' tokens, from step 0
    eval_counts.jsonl  of each evaluation: how many of `n_samples` are correct, for each held-out problem in turn, and
                     for those of each evaluation set
    checkpoints/     step-000030, ...               model/          the final model, Hugging Face format; run.json

A checkpoint is written to a temporary folder, flushed to disk and renamed, so that one that exists is complete. Its
`state.json` lists the other files with their sizes, so that one that was damaged later is recognized.

Nothing outside of the folder is written, cut or removed: of a link the link goes, and what it points to stays.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from runtime.disk import disk

LOGS = ("metrics.jsonl", "eval.jsonl", "eval_counts.jsonl", "groups.jsonl", "samples.jsonl")


class Folder:
    """The files of one run. Every line is written when it is measured, so that a stop keeps what came before it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

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

    def append(self, name: str, record: dict[str, Any]) -> None:
        """One more line of the JSON-lines file `name`."""
        with disk(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Replaces the file `name`: a stop leaves either the old file or the new one."""
        new = self.path / f"{name}.new"
        _remove(new)
        with disk(new):
            new.write_text(text)
        new.replace(self.path / name)

    def read(self, name: str) -> list[dict[str, Any]]:
        """All records of `name`; none if it does not exist. A last line that is cut short is left out: a writer was
        killed, or is writing it now."""
        file = self.path / name
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def lengths(self) -> dict[str, int]:
        """Bytes in each log, for a checkpoint."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in LOGS}

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Takes off what the logs gained after a checkpoint, so that no step appears twice. A log that is shorter than
        it was then stays as it is, and a line says so."""
        for name in set(LOGS) & set(lengths) - set(self.not_its_own()):
            lost = lengths[name] - self.lengths()[name]
            if lost < 0:
                os.truncate(self.path / name, lengths[name])
            elif lost:
                print(f"{self.path / name} has lost its last {lost} bytes; its next records follow the gap", flush=True)

    # ---- the final model ----

    def begin_model(self) -> Path:
        """An empty folder to write the model into."""
        new = self.path / "model.new"
        _remove(new)
        new.mkdir()
        return new

    def finish_model(self, record: dict[str, Any]) -> None:
        """Adds `record` (of step and compute) as run.json; an earlier model stays until this one takes its place."""
        new, old, final = (self.path / name for name in ("model.new", "model.old", "model"))
        with disk(new):
            (new / "run.json").write_text(json.dumps(record))
        _remove(old)
        if os.path.lexists(final):
            final.rename(old)
        new.rename(final)
        _remove(old)

    def model(self) -> dict[str, Any] | None:
        """run.json of the final model; None if there is none, or a damaged one."""
        record = json_object(self.path / "model" / "run.json") or {}
        return record if [type(record.get(n)) for n in ("step", "version", "compute")] == [int, int, dict] else None

    # ---- checkpoints ----

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def begin_checkpoint(self) -> Path:
        """An empty folder to write the next checkpoint into; half-written ones of earlier processes are removed."""
        for leftover in self._checkpoints.glob("unfinished-*"):
            _remove(leftover)
        temporary = self._checkpoints / f"unfinished-{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def finish_checkpoint(self, temporary: Path, step: int, state: dict[str, Any], keep: int) -> Path:
        """Adds state.json, flushes everything and the logs too, renames the folder to its final name and keeps the
        newest `keep` whole ones up to it. Older, damaged and later ones go: a run that passes over one goes back."""
        files = {str(f.relative_to(temporary)): f.stat().st_size for f in sorted(temporary.rglob("*")) if f.is_file()}
        (temporary / "state.json").write_text(json.dumps(state | {"files": files}))
        logs = [self.path / name for name in LOGS if (self.path / name).exists()]
        for file in [*temporary.rglob("*"), *logs]:
            _flush(file)
        _flush(temporary)
        final = self._checkpoints / f"step-{step:06d}"
        replaced = temporary.with_name(f"{temporary.name}-replaced")
        if os.path.lexists(final):  # a second save after the same step
            final.rename(replaced)
        temporary.rename(final)
        _flush(self._checkpoints)
        _remove(replaced)
        found = self.checkpoints()
        whole = [folder for folder in found[: found.index(final)] if _whole(folder)] + [final]
        for old in set(found) - set(whole[-max(1, keep) :]):
            _remove(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = [f for f in self._checkpoints.glob("step-*") if re.fullmatch(r"step-[0-9]+", f.name) and f.is_dir()]
        return sorted(found, key=lambda folder: int(folder.name[5:]))

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """(folder, its state) of the newest complete checkpoint; damaged ones are passed over with a printed line."""
        for folder in reversed(self.checkpoints()):
            state = _whole(folder)
            if state is not None:
                return folder, state
            print(f"checkpoint {folder} is damaged and is passed over", flush=True)
        return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if one is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def json_object(source: Path | bytes) -> dict[str, Any] | None:
    """The JSON object in a file or a line; None if it holds anything else, or cannot be read."""
    try:
        text = source if isinstance(source, bytes) else source.read_bytes() if source.is_file() else b""
        value = json.loads(text.decode())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole(folder: Path) -> dict[str, Any] | None:
    """The state of a checkpoint whose files all have the sizes that it was written with, else None."""
    state = json_object(folder / "state.json") or {}
    try:
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if sizes == state["files"] else None
