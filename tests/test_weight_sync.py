"""weight_sync.py: the file is whole and private; vLLM's own channels are driven so that neither side waits forever."""

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TinyModel, new_generator, problems
from safetensors.torch import load_file

from runtime import weight_channels as weight_sync
from runtime.devices import new_channel
from runtime.flags import UsageError, parse_flags
from runtime.weight_channels import FileWeights, Meta, TransferWeights, metadata, safetensors_header


@pytest.fixture
def channel(monkeypatch):
    """Under a prefix of its own, so that no file of a real run is touched."""
    monkeypatch.setattr(weight_sync, "PREFIX", "scalerl-test-")
    weights = FileWeights()
    yield weights
    weights.close()


# ------------------------------------------------------------------------------------------------- the weight file


def test_weights_are_written_whole_and_private(channel):
    table = torch.arange(6.0).view(2, 3)
    tensors = {"a.weight": table.t(), "b": torch.ones(2, requires_grad=True), "c": torch.ones(1).bfloat16()}
    tensors |= {"half": torch.ones(2, 2).half(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    channel.prepare(tensors)
    found = load_file(channel.path)
    assert set(found) == set(tensors)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in tensors.items()}
    torch.testing.assert_close(found["a.weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert found["empty"].shape == (0, 3) and found["scalar"].item() == 3.0
    assert stat.S_IMODE(channel.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert [file.name for file in channel.folder.iterdir()] == [channel.path.name]


def test_a_reader_of_the_old_weights_keeps_them(channel):
    """The file is replaced, not written over: an engine that still reads it must not get half of each version."""
    channel.prepare({"a": torch.zeros(3)})
    with channel.path.open("rb") as old:
        before = channel.path.read_bytes()
        channel.prepare({"a": torch.ones(3)})
        assert old.read() == before != channel.path.read_bytes()


def test_header_is_that_of_the_format():
    """By hand: 8 bytes of length, then JSON padded to a multiple of 8, offsets from the end of it."""
    header = safetensors_header([Meta("a", torch.float32, (2, 3)), Meta("b", torch.bfloat16, (5,))])
    length = int.from_bytes(header[:8], "little")
    assert length % 8 == 0 and len(header) == 8 + length
    assert json.loads(header[8:]) == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    }


class Gathered:
    """Weights that are gathered one at a time, and the most that were held at once."""

    def __init__(self, count):
        self.count, self.alive, self.most, self.passes = count, 0, 0, 0

    def metadata(self):
        return [Meta(f"w{i}", torch.float32, (4,)) for i in range(self.count)]

    def items(self):
        self.passes += 1
        for i in range(self.count):
            tensor = torch.full((4,), float(i))
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self._gone)
            yield f"w{i}", tensor
            del tensor

    def _gone(self):
        self.alive -= 1


def test_one_gathered_tensor_at_a_time(channel):
    """Never the whole model: at most the tensor that is written and the one that is gathered next are alive."""
    weights = Gathered(20)
    channel.prepare(weights)
    assert weights.most <= 2 and weights.passes == 1
    assert {name: x.tolist() for name, x in load_file(channel.path).items()} == {f"w{i}": [i] * 4 for i in range(20)}


def test_other_ranks_help_to_gather_and_write_nothing(monkeypatch):
    monkeypatch.setattr(weight_sync, "PREFIX", "scalerl-test-")
    channel, weights = FileWeights(rank=1), Gathered(3)
    channel.prepare(weights)
    assert weights.passes == 1 and list(channel.folder.iterdir()) == []
    channel.close()
    assert not channel.folder.exists()


def test_metadata_of_a_dict():
    assert metadata({"a": torch.zeros(2, 3).half()}) == [("a", torch.float16, (2, 3))]


def test_files_of_dead_processes_are_removed(channel):
    """A dead process's folder goes; those of living processes, this one among them, and other names stay."""
    base = channel.folder.parent
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    folders = {name: base / f"{weight_sync.PREFIX}{name}" for name in (f"{dead.pid}-x", f"{os.getppid()}-x", "notes-x")}
    try:
        for folder in folders.values():
            folder.mkdir()
            (folder / "weights.safetensors").write_bytes(b"old")
        second = FileWeights()
        assert [folder.exists() for folder in folders.values()] == [False, True, True]
        assert channel.folder.exists() and second.folder != channel.folder
        second.close()
        second.close()  # twice is fine
        assert not second.folder.exists() and channel.folder.exists()
    finally:
        for folder in folders.values():
            if folder.exists():
                (folder / "weights.safetensors").unlink()
                folder.rmdir()


@pytest.mark.parametrize("moment", ["looked at", "removed"])
def test_another_process_may_remove_the_same_folder_first(channel, monkeypatch, moment):
    """Ranks, or two runs, that start at once find the same folder of a dead process: none of them fails."""
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    stale = channel.folder.with_name(f"{weight_sync.PREFIX}{dead.pid}-x")
    stale.mkdir()
    (stale / "weights.safetensors").write_bytes(b"old")
    exists, rmtree = Path.exists, shutil.rmtree

    def other_process(usual, path, **options):
        if exists(stale):
            rmtree(stale)
        return usual(path, **options)

    with monkeypatch.context() as patch:
        if moment == "looked at":
            patch.setattr(Path, "exists", lambda path: other_process(exists, path))
        else:
            patch.setattr(shutil, "rmtree", lambda path, **options: other_process(rmtree, path, **options))
        folder = weight_sync.private_folder()
    folder.rmdir()
    assert not stale.exists()


# ------------------------------------------------------------------------------------------------- vLLM's own channels


def test_a_transfer_in_flight(tmp_path_factory, monkeypatch):
    """Through vLLM's start, update and finish, with a worker that blocks until the trainer sends: ten updates while
    completions run; those wholly by one version agree with it, and `push` returns only when its weights are live."""
    import rendezvous

    tiny = TinyModel(tmp_path_factory.mktemp("untied"), tied=False)  # vLLM's CPU reload leaves a tied head behind
    meeting = tmp_path_factory.mktemp("meeting") / "weights.safetensors"
    channel = TransferWeights("rendezvous")
    channel.engine_args["worker_extension_cls"] = "rendezvous.Receiver"
    monkeypatch.setattr(channel, "_init_info", lambda: rendezvous.TrainerInfo(str(meeting), rank=0))
    prompts = problems(6)
    generator = new_generator(tiny, problems=iter(()), weights=channel, max_tokens=24)
    try:
        generator.start(tiny.weights(0))
        for version in range(1, 11):
            long = generator.evaluate(problems(4, seed=version), 2) if version == 5 else None
            generator.push(tiny.weights(version), version, 0)
            assert generator.version == version and generator.counters.pushes == version
            if long is not None:
                assert len(generator.result_of(long)) == 4
        rollouts = [r for group in generator.result_of(generator.evaluate(prompts, 2)) for r in group]
        asked = [problem for problem in prompts for _ in range(2)]
        assert {v for r in rollouts for v in r.versions} == {10}
        assert tiny.gap(tiny.weights(10), asked, rollouts).mean() < 1e-5
        assert tiny.gap(tiny.weights(9), asked, rollouts).mean() > 0.1
    finally:
        generator.close()
    assert not channel.folder.exists()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_what_vllm_is_told(kind, monkeypatch):
    """Backends and fields of vLLM's own trainer-side classes; the buffer of `ipc` holds the largest tensor."""
    pytest.importorskip("vllm")
    channel = TransferWeights(kind, rank=0, workers=4)
    weights = Gathered(2)
    monkeypatch.setattr(weights, "metadata", lambda: [Meta("w", torch.float32, (2**28,))])
    channel.prepare(weights)
    info = channel._init_info()
    assert info.backend == kind and info.rank == 0 and info.packed and weights.passes == 0
    if kind == "ipc":
        assert info.packed_buffer_size_bytes == 2**30
    else:
        assert info.world_size == 5 and info.master_address == "127.0.0.1" and 0 < info.master_port < 2**16
    assert channel.engine_args["weight_transfer_config"] == {"backend": kind}
    channel.close()


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


# ------------------------------------------------------------------------------------------------- which channel, where


def made_on(monkeypatch, gpus, trainers=1, visible=None, **changes):
    """The channel that train.py makes on a host with `gpus` GPUs, closed again, and the engine's environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = [x for name, value in changes.items() for x in (f"--{name}", str(value))]
    flags = parse_flags(["--output_dir", "none", *options], "")
    channel, environment = new_channel(flags, SimpleNamespace(process_index=0))
    channel.close()
    return channel, environment


def choose(monkeypatch, *host, **changes):
    """(kind of channel, CUDA_VISIBLE_DEVICES of the engine, its processes)."""
    channel, environment = made_on(monkeypatch, *host, **changes)
    return getattr(channel, "backend", "file"), environment.get("CUDA_VISIBLE_DEVICES"), getattr(channel, "workers", 0)


@pytest.mark.parametrize(
    ("gpus", "trainers", "changes", "found"),
    [
        (0, 1, {}, ("file", None, 0)),
        (1, 1, {}, ("ipc", "0", 1)),  # one GPU, shared
        (2, 1, {}, ("nccl", "1", 1)),  # the free one
        (8, 4, {"data_parallel": 4}, ("nccl", "4,5,6,7", 4)),
        (8, 4, {"data_parallel": 2, "tensor_parallel": 2, "generator_devices": "7,6,5,4"}, ("nccl", "7,6,5,4", 4)),
        (8, 8, {"data_parallel": 8}, ("ipc", "0,1,2,3,4,5,6,7", 8)),  # every trainer shares its own
        (8, 4, {"generator_devices": "4", "weight_channel": "file"}, ("file", "4", 0)),
        (8, 8, {"tensor_parallel": 8, "engine_args": "distributed_executor_backend=ray"}, ("nccl", None, 8)),
    ],
)
def test_devices_and_channel(monkeypatch, gpus, trainers, changes, found):
    assert choose(monkeypatch, gpus, trainers, **changes) == found


def test_devices_are_counted_among_the_visible_ones(monkeypatch):
    assert choose(monkeypatch, 4, 2, visible="2,3,6,7", data_parallel=2) == ("nccl", "6,7", 2)


@pytest.mark.parametrize(
    ("gpus", "trainers", "changes", "words"),
    [
        (0, 1, {"generator_devices": "0"}, "--generator_devices and --weight_channel"),
        (0, 1, {"weight_channel": "nccl"}, "this host has none"),
        (2, 1, {"generator_devices": "2"}, "this host has 2, 0 to 1"),
        (4, 2, {"generator_devices": "2,2", "data_parallel": 2}, "--generator_devices 2,2"),
        (4, 2, {"generator_devices": "2,x", "data_parallel": 2}, "--generator_devices 2,x"),
        (4, 2, {"tensor_parallel": 8}, "need 8"),
        (2, 2, {"weight_channel": "nccl"}, "--weight_channel nccl needs"),
        (4, 2, {"weight_channel": "ipc", "generator_devices": "3"}, "--weight_channel ipc needs"),
        (4, 2, {"data_parallel": 3, "generator_devices": "0,1,2"}, "trainers' own GPUs, 0 to 1"),
    ],
)
def test_devices_that_cannot_work_are_refused(monkeypatch, gpus, trainers, changes, words):
    with pytest.raises(UsageError, match=words):
        choose(monkeypatch, gpus, trainers, **changes)


@pytest.mark.parametrize(
    ("gpus", "changes", "share"),
    [
        (0, {}, None),
        (1, {}, 0.35),  # shared with the trainer: vLLM's own 0.92 would leave it nothing
        (1, {"weight_channel": "file"}, 0.35),
        (2, {}, None),  # a GPU of its own
        (1, {"gpu_memory_utilization": "0.5"}, None),
        (1, {"engine_args": "gpu_memory_utilization=0.2"}, None),
    ],
)
def test_an_engine_on_a_trainers_gpu_leaves_room_for_it(monkeypatch, capsys, gpus, changes, share):
    channel, _ = made_on(monkeypatch, gpus, **changes)
    assert channel.engine_args.get("gpu_memory_utilization") == share
    assert capsys.readouterr().out.count("--gpu_memory_utilization") == (share is not None)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_scheduler_of_whole_completions_is_for_engines_on_a_cpu(monkeypatch, gpu):
    """On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not."""
    channel, _ = made_on(monkeypatch, int(gpu))
    assert channel.engine_args.get("scheduler_cls") == (None if gpu else "runtime.engine_process.WholeCompletions")
    assert channel.engine_args["worker_extension_cls"] == "runtime.engine_process.WeightReceiver"


def test_a_worker_that_fails_ends_the_delivery_even_if_the_sender_never_returns(monkeypatch):
    """As in a broadcast whose receiver has died: the sending thread stands still for good, the error is told."""
    channel, forever = TransferWeights("nccl"), threading.Event()

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
        asyncio.run(asyncio.wait_for(channel.deliver(lambda name: dies), 10))
    forever.set()
    channel.close()
