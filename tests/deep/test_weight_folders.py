"""runtime/weights.py: folders in shared memory that other processes left, hold or remove, and no room in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from runtime import weights
from runtime.weights import RunWeightFile


@pytest.fixture(autouse=True)
def prefix(monkeypatch):
    """A prefix of its own, so that no file of a real run is touched."""
    monkeypatch.setattr(weights, "PREFIX", "scalerl-test-")


@pytest.fixture
def channel():
    channel = RunWeightFile()
    yield channel
    channel.close()


@pytest.fixture
def stale(channel):
    """The name of a folder of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    yield channel.folder.with_name(f"{weights.PREFIX}{process.pid}-x")
    for folder in channel.folder.parent.glob(f"{weights.PREFIX}*"):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


def test_weights_that_have_no_room_name_the_place_and_the_fix(channel, monkeypatch):
    """As in Docker, whose /dev/shm has 64 MB. It is asked for at once: a write without room would end the process."""

    def full(file, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):  # a second attempt says the same
        with pytest.raises(
            OSError, match=r"^no room for weights of 8\.0 MB in /.*, which has .* MB free: .*--shm-size"
        ):
            channel.prepare({"a": torch.zeros(2_000_000)})
        assert sorted(file.name for file in channel.folder.iterdir()) == ["lock"]


def test_files_of_dead_processes_are_removed(channel, stale, monkeypatch):
    """Those of living processes, this one among them, and other names stay, and so does a link to itself, which cannot
    even be looked at. What another user put there is neither entered nor removed: a link of theirs may lead to us."""
    living, notes = (stale.with_name(f"{weights.PREFIX}{name}-x") for name in (os.getppid(), "notes"))
    for folder in (stale, living, notes):
        folder.mkdir()
        (folder / "weights").write_bytes(b"old")
    second = RunWeightFile()
    assert [folder.exists() for folder in (stale, living, notes)] == [False, True, True]
    assert channel.folder.exists() and second.folder != channel.folder
    second.close()
    second.close()  # twice is fine
    assert not second.folder.exists() and channel.folder.exists()
    for place in (stale, notes):
        stale.symlink_to(place)
        weights.private_folder()
        assert not (notes / "lock").exists()
        stale.unlink()
    stale.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    weights.private_folder()
    assert stale.exists()


def test_a_folder_in_use_in_another_container_stays(channel, stale):
    """It shares /dev/shm but no pids: that in the folder's name is of no process here. It stays while it is locked."""
    stale.mkdir()
    with FileLock(stale / "lock"):
        weights.private_folder()
        assert stale.exists()
    weights.private_folder()
    assert not stale.exists()
    with pytest.raises(Timeout):
        FileLock(channel.folder / "lock", timeout=0).acquire()


@pytest.mark.parametrize("moment", ["looked at", "removed"])
def test_another_process_may_remove_the_same_folder_first(stale, monkeypatch, moment):
    """Ranks, or two runs, that start at once find the same folder of a dead process."""
    stale.mkdir()
    exists, rmtree = Path.exists, shutil.rmtree

    def other_process(usual, path, **options):
        if exists(stale):
            rmtree(stale)
        return usual(path, **options)

    owner, name, usual = (Path, "exists", exists) if moment == "looked at" else (shutil, "rmtree", rmtree)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda path, **options: other_process(usual, path, **options))
        weights.private_folder()
    assert not stale.exists()


class Gathered:
    """Weights that must be gathered, and how often they were."""

    def __init__(self, count):
        self.count, self.passes = count, 0

    def items(self):
        self.passes += 1
        yield from ((f"w{i}", torch.full((4,), float(i))) for i in range(self.count))


def test_other_ranks_help_to_gather_and_write_nothing():
    channel, gathered = RunWeightFile(rank=1), Gathered(3)
    channel.prepare(gathered)
    assert gathered.passes == 1 and not channel.path.exists()
    channel.close()
    assert not channel.folder.exists()
