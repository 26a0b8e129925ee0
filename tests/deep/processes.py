"""Processes that tests start, and what they leave."""

import contextlib
import time

import psutil


def family(pid: int) -> list[int]:
    """Process ids of all descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_end(pids, seconds: float = 20) -> None:
    """None of them outlives its parent by more than a moment (a second on an idle machine)."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
