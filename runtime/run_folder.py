"""A run's folder: its logs, checkpoints and model, and how a resumed run goes on from them.

    config.json      the version and every flag     metrics.jsonl   the flags, then one record per step
    eval.jsonl       one record per evaluation      samples.jsonl   a few rollouts to read
    groups.jsonl     what each step consumed: [prompt key, correct, rollouts], and the rollouts' tokens; it counts steps
                     from 0, the other logs from 1
    eval_counts.jsonl  of each evaluation: how many of `n_samples` are correct, problem by problem
    checkpoints/     step-000030, ...               model/          the final model, Hugging Face format; run.json

A checkpoint holds the model, the optimizer and the random states (accelerate writes them, one file per rank or shard)
and `state.json`: step, version, the pass-rate history, the place in the stream of prompts, compute so far, and how long
the logs were. Nothing that was sampled is saved. The prompts of groups in flight are listed instead, and a resumed run
samples them again before all others, in their old order. These begin anew at a resume: the counts of bad and of empty
steps in a row, the random state of the thinking budgets, and what the evaluator knows of the weights' bytes.

It is written to a temporary folder, flushed to disk and renamed, so that one that exists is complete. `state.json`
lists the other files with their sizes, so that one that was damaged later is recognized.

Resume only folders of your own. Loading a checkpoint runs no code that its tensors may contain, but the flags in
config.json may name code: a `reward` of yours, a class in `engine_args`.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from filters import PassRateHistory
from pipeline_rl import Group
from runtime.flags import UsageError
from runtime.generator import Generator
from runtime.lock import flush, lock, unlock
from tasks.prompts import PromptStream

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator

    from runtime.ranks import Ranks

Record = dict[str, Any]  # a JSON object
LOGS = ("metrics.jsonl", "eval.jsonl", "eval_counts.jsonl", "groups.jsonl", "samples.jsonl")
KEEP = 2  # checkpoints
LOCK_PATIENCE = 5.0  # seconds; what a killed run leaves of its processes may hold the lock for a moment

# What transformers, accelerate and torch raise for damaged files: cut short, of other shapes, a pickle with code in it.
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    EOFError,
    ImportError,
    UnpicklingError,
    SafetensorError,
    StrictDataclassError,
    CheckpointException,
)


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
        self._lock: int | None = None  # descriptor of the folder

    def lock(self) -> None:
        """Makes the folder, and keeps every other run out of it until `unlock` or the end of this process. Raises
        UsageError if another run has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + LOCK_PATIENCE
        while (descriptor := lock(self.path)) is None:
            if time.monotonic() > end:
                raise UsageError(f"another run uses the folder {self.path}; wait for its end.")
            time.sleep(0.1)
        self._lock = descriptor

    def unlock(self) -> None:
        """Lets other runs in."""
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------------------------------ the logs

    def holds_run(self) -> bool:
        """Whether a run wrote its flags into the first line of metrics.jsonl."""
        try:
            return "config" in json.loads((self.path / "metrics.jsonl").read_bytes().split(b"\n")[0])
        except (OSError, ValueError, TypeError):
            return False

    def clear(self) -> None:
        """Removes the files of the run that this folder holds, and nothing else. metrics.jsonl, which marks the folder
        as a run, goes last."""
        for name in ("checkpoints", "model", "model.new", "model.old"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("curve.png", "config.json", *reversed(LOGS)):
            (self.path / name).unlink(missing_ok=True)

    def append(self, name: str, record: Record) -> None:
        """One more line of `name`. Raises RunFailed if the disk is full."""
        with writing(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Replaces the file `name`: a stop leaves either the old file or the new one."""
        new = self.path / f"{name}.new"
        new.write_text(text)
        new.replace(self.path / name)

    def read(self, name: str) -> list[Record]:
        """All records of `name`, none if it does not exist. A last line that is cut short is left out: its writer was
        killed, or is writing it now."""
        file = self.path / name
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]]

    def lengths(self) -> dict[str, int]:
        """Bytes in each log, for a checkpoint."""
        files = [self.path / name for name in LOGS]
        return {file.name: file.stat().st_size if file.exists() else 0 for file in files}

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Takes off what the logs gained after a checkpoint, so that no step appears twice."""
        for name, length in self.lengths().items():
            if length > lengths[name]:
                os.truncate(self.path / name, lengths[name])

    # ------------------------------------------------------------------------------------------- the final model

    def begin_model(self) -> Path:
        """An empty folder to write the final model into."""
        new = self.path / "model.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        return new

    def finish_model(self, record: Record) -> None:
        """Adds `record` (of step and compute) as run.json; an earlier model stays until this one takes its place."""
        new = self.path / "model.new"
        (new / "run.json").write_text(json.dumps(record))
        _swap(new, self.path / "model", self.path / "model.old")

    # ------------------------------------------------------------------------------------------- checkpoints

    def begin_checkpoint(self) -> Path:
        """An empty folder to write the next checkpoint into; half-written ones of earlier processes are removed."""
        for leftover in self._checkpoints.glob("unfinished-*"):
            shutil.rmtree(leftover)
        temporary = self._checkpoints / f"unfinished-{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def finish_checkpoint(self, temporary: Path, step: int, state: Record) -> Path:
        """Adds state.json, flushes all of it and the logs, renames the folder to its final name and keeps the newest
        KEEP whole ones up to it. Older and damaged ones go, and later ones, which exist only after a resume fell back
        past a damaged checkpoint."""
        files = [file for file in temporary.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(temporary)): file.stat().st_size for file in files}
        (temporary / "state.json").write_text(json.dumps(state | {"logs": self.lengths(), "files": sizes}))
        for file in [*temporary.rglob("*"), *(self.path / name for name in LOGS), temporary]:
            flush(file)
        final = self._checkpoints / f"step-{step:06d}"
        _swap(temporary, final, temporary.with_name(f"{temporary.name}-replaced"))
        flush(self._checkpoints)
        checkpoints = self.checkpoints()
        earlier = checkpoints[: checkpoints.index(final)]
        newest = [folder for folder in earlier if _whole_state(folder)] + [final]
        for folder in checkpoints:
            if folder not in newest[-KEEP:]:
                shutil.rmtree(folder)
        return final

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        folders = [path for path in self._checkpoints.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(folders, key=lambda folder: int(folder.name[5:]))

    def newest_checkpoint(self) -> tuple[Path, Record] | None:
        """(folder, its state) of the newest complete checkpoint; damaged ones are passed over with a printed line."""
        for folder in reversed(self.checkpoints()):
            state = _whole_state(folder)
            if state is not None:
                return folder, state
            print(f"checkpoint {folder} is damaged and is passed over", flush=True)
        return None


def _whole_state(folder: Path) -> Record | None:
    """The state of a checkpoint whose files all have the sizes that it was written with, else None."""
    try:
        state = json.loads((folder / "state.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return state if sizes == state["files"] else None


def _swap(new: Path, final: Path, old: Path) -> None:
    """Puts the folder `new` in the place of `final`, which is `old` in between: a stop loses neither."""
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------- saving and loading a run


def save(ranks: "Ranks", folder: Folder, step: int, state: Callable[[], Record]) -> Path | None:
    """Writes a checkpoint; on every rank, since a sharded model is written by all. `state()` is called on rank 0 for
    the content of state.json. Returns its folder, None on ranks other than 0. What one rank could not write is raised
    on all of them."""
    from accelerate.utils import gather_object

    failure = None
    try:
        with writing(folder.path / "checkpoints"):
            temporary = Path(ranks.from_main(lambda: str(folder.begin_checkpoint())))
            ranks.accelerator.save_state(temporary)  # model, optimizer, random states
    except RunFailed as error:
        failure = error
    for error in gather_object([failure]):
        if error is not None:
            raise error
    if not ranks.main:
        return None
    content = state()
    with writing(folder.path / "checkpoints"):
        return folder.finish_checkpoint(temporary, step, content)


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


def state_of(
    progress: Progress, history: PassRateHistory, prompts: PromptStream, generator: Generator, compute: Record
) -> Record:
    """What state.json says of a run. Read between two events of the generator's thread, which draws from `prompts`."""
    flying, stream = generator.in_loop(lambda generator: (list(generator.under_way.values()), prompts.state_dict()))
    in_flight = [*(group.problem for group in progress.taken), *flying]
    stream["first"] = [problem.key for problem in in_flight] + stream["first"]
    return progress.state_dict() | {"history": history.state_dict(), "prompts": stream, "compute": compute}


def load(accelerator: "Accelerator", checkpoint: Path) -> None:
    """Model, optimizer and random states of a checkpoint, on every rank. Raises UsageError for one of another model.
    Every `torch.load` in it loads weights only, also where its caller asks for more, as FSDP2's does."""
    from accelerate.utils import patch_environment

    try:
        with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
            accelerator.load_state(str(checkpoint))
    except UNREADABLE as error:
        reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
        raise UsageError(f"--resume: {checkpoint} does not fit this model ({reason}).") from error
