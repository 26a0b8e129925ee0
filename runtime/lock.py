"""A lock on a folder: one process at a time, on any system. It ends with the process, whatever ends that."""

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]


def lock(folder: Path) -> int | None:
    """A descriptor that keeps every other process out of `folder` until `unlock`, or the end of this process. None if
    another one has it. Raises OSError if the folder cannot be opened."""
    if fcntl is None:
        return _file_of_windows(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int) -> None:
    """Lets other processes in, also if one that this process has forked still has the descriptor."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _file_of_windows(folder: Path) -> int | None:
    """Windows opens no folder. It removes this file when its descriptor is closed, also that of a killed process."""
    removed_when_closed = getattr(os, "O_TEMPORARY", 0)
    try:
        return os.open(folder / "lock", os.O_CREAT | os.O_EXCL | removed_when_closed)
    except (FileExistsError, PermissionError):  # the second while Windows removes it
        return None


def flush(path: Path) -> None:
    """What was written to a file is on the disk now; so is a folder's list of files, but on Windows."""
    if path.is_file():
        mode = os.O_RDWR  # Windows flushes only what may be written
    elif path.is_dir() and fcntl is not None:
        mode = os.O_RDONLY
    else:
        return
    descriptor = os.open(path, mode)
    os.fsync(descriptor)
    os.close(descriptor)
