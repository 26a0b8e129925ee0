"""runtime/weights.py: the file is complete and private; vLLM's own channels are driven so that neither side waits forever."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file

from runtime import weights
from runtime.weights import FileWeights, MessageWeights, Meta, TransferWeights


@pytest.fixture(autouse=True)
def prefix(monkeypatch):
    """A prefix of its own, so that no file of a real run is touched."""
    monkeypatch.setattr(weights, "PREFIX", "scalerl-test-")


@pytest.fixture
def channel():
    made = FileWeights()
    yield made
    made.close()


@pytest.fixture
def stale(channel):
    """The name of a folder of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    yield channel.folder.with_name(f"{weights.PREFIX}{process.pid}-x")
    for folder in channel.folder.parent.glob(f"{weights.PREFIX}*"):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


def test_weights_are_written_completely_and_privately(channel):
    table = torch.arange(6.0).view(2, 3)
    tensors = {"a.weight": table.t(), "b": torch.ones(2, requires_grad=True), "c": torch.ones(1).bfloat16()}
    tensors |= {"half": torch.ones(2, 2).half(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    channel.prepare(tensors)
    found = load_file(channel.path)
    assert set(found) == set(tensors)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in tensors.items()}
    torch.testing.assert_close(found["a.weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert found["empty"].shape == (0, 3) and found["scalar"].item() == 3.0
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert [file.name for file in channel.folder.iterdir()] == [channel.path.name]


def test_a_reader_of_the_old_weights_keeps_them(channel):
    """The file is replaced, not written over: an engine that still reads it must not get half of each version."""
    channel.prepare({"a": torch.zeros(3)})
    with channel.path.open("rb") as old:
        before = channel.path.read_bytes()
        channel.prepare({"a": torch.ones(3)})
        assert old.read() == before != channel.path.read_bytes()


def test_a_message_has_the_files_bytes():
    channel, sent = MessageWeights(), []

    async def collective_rpc(name, args):
        sent.append((name, *args))

    channel.prepare({"a": torch.ones(3), "b": torch.zeros(2).bfloat16()})
    asyncio.run(channel.deliver(SimpleNamespace(collective_rpc=collective_rpc)))
    [(name, data)] = sent
    found = load(data)
    assert name == "load_weight_bytes" and found["a"].tolist() == [1, 1, 1] and found["b"].dtype == torch.bfloat16
    channel.close()


class Gathered:
    """Weights that must be gathered, and how often they were."""

    def __init__(self, count):
        self.count, self.passes = count, 0

    def metadata(self):
        return [Meta(f"w{i}", torch.float32, (4,)) for i in range(self.count)]

    def items(self):
        self.passes += 1
        yield from ((f"w{i}", torch.full((4,), float(i))) for i in range(self.count))


def test_other_ranks_help_to_gather_and_write_nothing():
    channel, gathered = FileWeights(rank=1), Gathered(3)
    channel.prepare(gathered)
    assert gathered.passes == 1 and list(channel.folder.iterdir()) == []
    channel.close()
    assert not channel.folder.exists()


def test_files_of_dead_processes_are_removed(channel, stale):
    """Those of living processes, this one among them, and other names stay, and so does a link to itself, which cannot
    even be looked at."""
    living, notes = (stale.with_name(f"{weights.PREFIX}{name}-x") for name in (os.getppid(), "notes"))
    for folder in (stale, living, notes):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"old")
    second = FileWeights()
    assert [folder.exists() for folder in (stale, living, notes)] == [False, True, True]
    assert channel.folder.exists() and second.folder != channel.folder
    second.close()
    second.close()  # twice is fine
    assert not second.folder.exists() and channel.folder.exists()
    stale.symlink_to(stale)
    weights.private_folder()
    assert stale.is_symlink()


def test_a_folder_in_use_in_another_container_stays(channel, stale):
    """It shares /dev/shm but no pids: that in the folder's name is of no process here. It stays while it is locked."""
    stale.mkdir()
    holder = os.open(stale, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    weights.private_folder()
    assert stale.exists()
    os.close(holder)
    weights.private_folder()
    assert not stale.exists()
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(channel.folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


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


def test_other_ranks_send_with_rank_0(monkeypatch):
    """A rank other than 0 takes part in each sending as soon as it prepares; rank 0 only when it delivers."""
    sent = []

    class Sender:
        def send_weights(self):
            sent.append(sorted(dict(channel)))

        def shutdown(self):
            sent.append("shutdown")

    for rank in (0, 1):
        channel = TransferWeights("nccl", rank=rank)
        monkeypatch.setattr(channel, "_connect", Sender)
        channel.prepare(Gathered(2))
        channel.prepare(Gathered(3))
        channel.close()
        assert sent == [[], [["w0", "w1"], ["w0", "w1", "w2"], "shutdown"]][rank]


def test_a_worker_that_fails_ends_the_delivery_even_if_the_sender_never_returns(monkeypatch):
    """As in a broadcast whose receiver has died: the sending thread waits for ever, yet the error is raised."""
    channel, forever = TransferWeights("nccl"), threading.Event()
    base = SimpleNamespace(WeightTransferUpdateRequest=dict)  # vLLM's own takes seconds to import, in that thread
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)

    async def dies(*_):
        raise RuntimeError("the engine died")

    class Sender:
        def send_weights(self):
            with contextlib.suppress(RuntimeError):
                channel._client.update_weights({})
            forever.wait()

        def shutdown(self):
            pass

    monkeypatch.setattr(channel, "_connect", Sender)
    channel.prepare(Gathered(1))
    with pytest.raises(RuntimeError, match="the engine died"):
        asyncio.run(asyncio.wait_for(channel.deliver(SimpleNamespace(update_weights=dies)), 10))
    forever.set()
    channel.close()
