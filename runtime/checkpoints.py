"""Checkpoints: how a run is saved and restored; run_folder.py has the files.

A checkpoint holds the model, the optimizer and the random states (accelerate writes them, one file per rank or shard)
and `state.json`: step, version, the pass-rate history, the place in the stream of prompts, compute so far, and how long
the logs were. Nothing that was sampled is saved. The prompts of groups in flight are listed instead, and a resumed run
samples them again before all others, in their old order.

Loading a checkpoint runs no code that it may contain. torch's weights-only loader builds tensors and plain containers;
where torch unpickles without it (`.metadata` of FSDP2), `check_pickles` reads the file first.
"""

import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from filters import PassRateHistory
from pipeline_rl import Generator
from runtime.ranks import Ranks
from runtime.run_folder import LOGS, Folder, Progress, Record, disk, json_object
from tasks.prompts import PromptStream

if TYPE_CHECKING:  # its import takes seconds
    from accelerate import Accelerator


class CheckpointError(ValueError):
    """A checkpoint that does not fit this run."""


def save(ranks: Ranks, folder: Folder, step: int, state: Callable[[], Record], keep: int) -> Path | None:
    """Writes a checkpoint; on every rank, since a sharded model is written by all. `state()` is called on rank 0 for
    the content of state.json. Returns its folder, None on ranks other than 0. Raises OSError for a full or read-only
    disk, after it has removed what was half written; earlier checkpoints stay."""
    temporary = ranks.from_main(lambda: str(folder.begin_checkpoint()))
    try:
        with disk(temporary):
            ranks.accelerator.save_state(temporary)  # model, optimizer, random states
            ranks.accelerator.wait_for_everyone()
        if not ranks.main:
            return None
        found = state()
        with disk(temporary):
            return folder.finish_checkpoint(Path(temporary), step, found, keep)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def state_of(
    progress: Progress, history: PassRateHistory, prompts: PromptStream, generator: Generator, compute: Record
) -> Record:
    """What state.json says of a run. Read between two events of the generator's thread, which draws from `prompts`."""
    flying, stream = generator.in_loop(lambda generator: (list(generator.under_way.values()), prompts.state_dict()))
    in_flight = [*(group.problem for group in progress.taken), *flying]
    stream["first"] = [problem.key for problem in in_flight] + stream["first"]
    return progress.state_dict() | {"history": history.state_dict(), "prompts": stream, "compute": compute}


def check(folder: Folder, checkpoint: Path, state: Record) -> None:
    """Raises CheckpointError if a resumed run could not read state.json, or could not go on with a log: one that holds
    no JSON up to this checkpoint, or a later step."""
    if not readable(folder, state):
        raise CheckpointError(f"{checkpoint}/state.json is damaged; remove that folder to go on from the one before it")
    for name in LOGS:
        file = folder.path / name
        lines = file.read_bytes()[: state["logs"].get(name, 0)].split(b"\n") if file.is_file() else [b""]
        steps = [(json_object(line) or {"step": None}).get("step", 0) for line in lines[:-1]]
        good = [type(step) is int and step <= state["step"] for step in steps] + [lines[-1] == b""]
        if not all(good):
            line = good.index(False) + 1
            raise CheckpointError(f"{file} is damaged from line {line} on; restore it, or cut it before that line")


def readable(folder: Folder, state: Record) -> bool:
    """Whether all that a resumed run reads of `state` is there, of its type and in its range."""
    try:
        Progress(random.Random()).load_state_dict(state)
        prompts, history, logs, compute = (state[name] for name in ("prompts", "history", "logs", "compute"))
        solved = [(key, (correct, rollouts)) for key, correct, rollouts in history["counts"]]
        names = [*prompts["first"], *prompts.get("sources", ()), *history["retired"], *(key for key, _ in solved)]
        counts = [state["step"], state["version"], state["evaluated"] + 1, prompts["epoch"], prompts["position"]]
        counts += [number for _, numbers in solved for number in numbers]
        counts += [*logs.values(), *(logs[name] for name in LOGS if (folder.path / name).is_file())]
        types = [set(map(type, values)) for values in (names, counts, compute.values())]
        typed = types[0] <= {str} and types[1] <= {int} and types[2] <= {int, float}
        return typed and all(0 <= n < 1e100 for n in [*counts, *compute.values()])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return False


def load(accelerator: "Accelerator", checkpoint: Path) -> None:
    """Model, optimizer and random states of a checkpoint, on every rank. Raises CheckpointError."""
    names = "pytorch_model_fsdp_0", "model.safetensors"  # shards, and the whole model
    wanted, other = (checkpoint / name for name in (names if getattr(accelerator, "is_fsdp2", False) else names[::-1]))
    if other.exists() and not wanted.exists():
        raise CheckpointError(
            f"{other} is not what this trainer saves, {wanted.name}: give dtype and launcher as before"
        )
    try:
        check_pickles(checkpoint)
        with weights_only():
            accelerator.load_state(str(checkpoint))
    except (RuntimeError, ValueError, EOFError, SafetensorError, UnpicklingError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"{checkpoint} does not fit this model ({reason})") from error


# ------------------------------------------------------------------------------------------------------ no foreign code

PLAIN = {  # the classes in the `.metadata` of a torch distributed checkpoint; dtypes come on top
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
}


class _Plain(Unpickler):
    """Builds what PLAIN names, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if name in PLAIN.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnpicklingError(f"it would call {module}.{name}")


def check_pickles(checkpoint: Path) -> None:
    """Reads the files of a checkpoint that torch or accelerate unpickle and whose errors would come late or not at all:
    `.metadata` (FSDP2; torch's reader runs any code in it) and the random states (accelerate goes on without bad ones).
    Raises UnpicklingError if one asks for more than plain data."""
    from accelerate.utils.other import load as unpickled

    for file in sorted(checkpoint.rglob("*.metadata")):
        with file.open("rb") as stream:
            try:
                _Plain(stream).load()
            except (UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
                raise UnpicklingError(f"{file.relative_to(checkpoint)}: {error}") from error
    for file in sorted(checkpoint.glob("random_states_*.pkl")):
        unpickled(file)


def weights_only() -> AbstractContextManager:
    """Every `torch.load` in the block loads weights only, also where its caller asks for more, as FSDP2's does."""
    from accelerate.utils import patch_environment

    return patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1")
