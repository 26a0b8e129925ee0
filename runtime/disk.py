"""What a full or forbidden disk becomes in torch and safetensors: an OSError that names the path."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Turns what a full or read-only disk becomes in torch and safetensors into an OSError, and names `path` where it
    names none: a full disk is found when a file is written, where Python knows no name. Other errors stay."""
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
