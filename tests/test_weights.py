"""runtime/weights.py: the file is complete and private; a broadcast is driven so that neither side waits forever."""

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
from runtime.weights import MessageWeights, Meta, RunWeightFile, TransferWeights


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


def test_weights_are_written_completely_and_privately(channel):
    table = torch.arange(6.0).view(2, 3)
    tensors = {"a.weight": table.t(), "b": torch.ones(2, requires_grad=True), "c": torch.ones(1).bfloat16()}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    channel.prepare(tensors)
    written = load_file(channel.path)
    assert {name: x.dtype for name, x in written.items()} == {name: x.dtype for name, x in tensors.items()}
    torch.testing.assert_close(written["a.weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert written["empty"].shape == (0, 3) and written["scalar"].item() == 3.0
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert [file.name for file in channel.folder.iterdir()] == [channel.path.name]


def test_a_reader_of_the_old_weights_keeps_them(channel):
    """The file is replaced, not written over: an engine that still reads it must not get half of each version."""
    channel.prepare({"a": torch.zeros(3)})
    with channel.path.open("rb") as old:
        before = channel.path.read_bytes()
        channel.prepare({"a": torch.ones(3)})
        assert old.read() == before != channel.path.read_bytes()


def test_weights_that_have_no_room_name_the_place_and_the_fix(channel, monkeypatch):
    """As in Docker, whose /dev/shm has 64 MB. What was written of them goes, and the old weights stay."""
    channel.prepare({"a": torch.zeros(3)})

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"^no room for weights of 8\.0 MB in /.*, which has .* MB free: .*--shm-size"):
        channel.prepare({"a": torch.zeros(2_000_000)})
    assert [file.name for file in channel.folder.iterdir()] == [channel.path.name]
    assert load_file(channel.path)["a"].tolist() == [0, 0, 0]


def test_a_message_has_the_files_bytes():
    channel, sent = MessageWeights(), []

    async def collective_rpc(name, args):
        sent.append((name, *args))

    channel.prepare({"a": torch.ones(3), "b": torch.zeros(2).bfloat16()})
    asyncio.run(channel.deliver(SimpleNamespace(collective_rpc=collective_rpc)))
    [(name, data)] = sent
    tensors = load(data)
    assert name == "load_weight_bytes" and tensors["a"].tolist() == [1, 1, 1] and tensors["b"].dtype == torch.bfloat16
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
    channel, gathered = RunWeightFile(rank=1), Gathered(3)
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
    second = RunWeightFile()
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


class Sender:
    """In the place of vLLM's trainer-side engine; `sending` is what happens while it sends."""

    def __init__(self, sending):
        self.sending = sending

    def send_weights(self):
        self.sending()

    def shutdown(self):
        pass


@pytest.fixture
def transfer(monkeypatch):
    """`transfer(rank, sending)` is a channel whose sender does `sending(channel)`, and `channel.met` counts the meetings
    of the ranks."""
    base = SimpleNamespace(WeightTransferUpdateRequest=dict)  # vLLM's own takes seconds to import
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    channels = []

    def make(rank, sending):
        channel = TransferWeights(rank=rank)
        channels.append(channel)
        channel.met = []
        channel.meet = lambda: channel.met.append(rank)
        monkeypatch.setattr(channel, "_connect", lambda: Sender(lambda: sending(channel)))
        return channel

    yield make
    for channel in channels:
        channel.close()


def test_ranks_meet_once_and_gather_while_rank_0_sends(transfer):
    """A rank other than 0 gathers as soon as it prepares; rank 0 only when it delivers. Both meet before the first time,
    and write no file."""
    sent = []
    first, second = transfer(0, lambda channel: sent.append(sorted(dict(channel)))), transfer(1, None)
    for count in (2, 3):
        first.prepare(Gathered(count))
        gathered = Gathered(count)
        second.prepare(gathered)
        assert gathered.passes == 1 and len(sent) == count - 2
        asyncio.run(first.deliver(None))
    assert sent == [["w0", "w1"], ["w0", "w1", "w2"]] and first.met == [0] and second.met == [1]
    assert not list(first.folder.iterdir()) and first.trainer_waits


def test_a_worker_that_fails_ends_the_delivery_even_if_the_sender_never_returns(transfer):
    """As in a broadcast whose receiver has died: the sending thread waits forever, yet the error is raised."""
    forever = threading.Event()

    async def dies(*_):
        raise RuntimeError("the engine died")

    def sending(channel):
        with contextlib.suppress(RuntimeError):
            channel._client.update_weights({})
        forever.wait()

    channel = transfer(0, sending)
    channel.prepare(Gathered(1))
    with pytest.raises(RuntimeError, match="the engine died"):
        asyncio.run(asyncio.wait_for(channel.deliver(SimpleNamespace(update_weights=dies)), 10))
    forever.set()
