"""Checkpoints: what may be unpickled, and what a full disk is called."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # what a full or forbidden disk answers


def disk_errno(error: BaseException) -> int | None:
    """Which of DISK a failed write of torch or safetensors tells of; both say it in words. None for all else."""
    if isinstance(error, CheckpointException):  # FSDP2: what each rank met
        return next((number for inner, _ in error.failures.values() if (number := disk_errno(inner))), None)
    if isinstance(error, OSError):
        return error.errno if error.errno in DISK else None
    named = next((number for number in DISK if os.strerror(number) in str(error)), None)
    if isinstance(error, RuntimeError) and "inline_container.cc" in str(error):  # torch's writer of files; a write
        return named or errno.ENOSPC  # that came up short says only "unexpected pos 576 vs 534"
    return named if isinstance(error, SafetensorError) else None


@contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Turns what a full or read-only disk becomes in torch and safetensors into an OSError that names `path`; every
    other error stays what it is."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except (RuntimeError, SafetensorError, CheckpointException) as error:
        number = disk_errno(error)
        if number is None:
            raise
        reason = str(error).strip().splitlines()[-1]
        raise OSError(number, f"it could not be written ({reason})", str(path)) from error


PLAIN = {  # what stands in the `.metadata` of a torch distributed checkpoint, beside dtypes
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
}


class _Plain(Unpickler):
    """Builds what PLAIN names, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in PLAIN.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnpicklingError(f"it would call {module}.{name}")


def check_pickles(checkpoint: Path) -> None:
    """Reads the files of a checkpoint that torch or accelerate unpickle and whose errors would come late or not at all:
    `.metadata` (FSDP2; torch's reader runs any code in it) and the random states (accelerate goes on without bad ones).
    Raises UnpicklingError if one asks for more than plain data."""
    from accelerate.utils.other import load

    for file in sorted(checkpoint.rglob("*.metadata")):
        with file.open("rb") as stream:
            try:
                _Plain(stream).load()
            except (UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
                raise UnpicklingError(f"{file.relative_to(checkpoint)}: {error}") from error
    for file in sorted(checkpoint.glob("random_states_*.pkl")):
        load(file)


@contextmanager
def weights_only() -> Iterator[None]:
    """Every `torch.load` in the block loads weights only, also where its caller asks for more, as FSDP2's does."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
