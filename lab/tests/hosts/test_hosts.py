"""lab/hosts without Ray and without a GPU: where its engines run, what Ray is asked, and both ways of the weights. A broadcast
is driven so that neither side waits forever."""

import asyncio
import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import Channel, in_place_of_vllm
from fake_vllm import new_engine as new_run_engine
from test_run_engine import flags_of, host

from generator import EngineFailed
from lab.hosts import RayEngine, ray_check
from lab.hosts.channels import MessageWeights, TransferWeights
from runtime import engine
from runtime.engine import choose_devices
from runtime.flags import UsageError, check_flags
from vllm_engine import tensors_in

NCCL, RAY = (f"--engine lab.hosts:{kind}" for kind in ("NcclEngine", "RayEngine"))


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "kind", "own", "memory"),
    [
        (2, 1, NCCL, TransferWeights, [1], 0.85),  # the parts of a transfer come on top of what the engine takes
        (2, 1, NCCL + ' --engine_args {"gpu_memory_utilization":0.5}', TransferWeights, [1], 0.5),
        (8, 4, NCCL + ' --engine_args {"tensor_parallel_size":4}', TransferWeights, [4, 5, 6, 7], 0.85),
        (8, 8, RAY, TransferWeights, [], 0.85),
        (8, 8, "--engine lab.hosts:RayMessageEngine", MessageWeights, [], None),
        (0, 1, RAY, MessageWeights, [], None),
    ],
)
def test_places_and_channels(monkeypatch, gpus, trainers, words, kind, own, memory):
    host(monkeypatch, gpus, trainers)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    flags = flags_of(words)
    check_flags(flags)
    result, channel = engine.new_engine(flags, choose_devices(flags), 0, "model", [1], 64)
    channel.close()
    assert type(channel) is kind and result.channel is channel and list(result.gpus) == own
    assert result.args.get("gpu_memory_utilization") == memory
    if kind is TransferWeights:
        assert (channel.workers, channel.address) == (len(own) or 1, "127.0.0.1" if own else "127.0.0.2")
    assert engine.new_engine(flags, choose_devices(flags), 1, "model", [1], 64)[0] is None


@pytest.mark.parametrize(("gpus", "trainers"), [(0, 1), (2, 2)])
def test_nccl_needs_a_gpu_of_its_own(monkeypatch, gpus, trainers):
    host(monkeypatch, gpus, trainers)
    with pytest.raises(UsageError, match="--engine lab.hosts:NcclEngine needs a GPU that no trainer process uses"):
        choose_devices(flags_of(NCCL))


def new_ray_engine(**options):
    return RayEngine("model", [1], 64, **{"channel": Channel(), "max_num_seqs": 4} | options)


def test_ray_workers_do_not_listen_on_loopback():
    """They are on other hosts; what they must not get of this one is in ray_executor.py."""
    here, ray = new_run_engine(), new_ray_engine()
    assert here.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert not {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"} & set(ray.environment)
    assert "VLLM_NO_USAGE_STATS" in ray.environment and ray.args["distributed_executor_backend"] == "ray"


@pytest.mark.parametrize(
    ("answer", "address", "sentence"),
    [
        ((0, "log line\n5\n", ""), "127.0.0.1", "the engine needs 6 devices, and 5 of Ray's are free"),
        ((1, "", "Traceback\nConnectionError: none runs\n"), "127.0.0.1", r"Ray fails \(ConnectionError: none runs\)"),
        ((0, "6\n", ""), "192.0.2.1", "VLLM_HOST_IP must be this host's --node-ip-address, not 192.0.2.1"),
    ],
)
def test_ray_is_asked_before_vllm_starts(monkeypatch, answer, address, sentence):
    """For as many processes as the engine has: 2 x 3."""
    result = SimpleNamespace(**dict(zip(("returncode", "stdout", "stderr"), answer, strict=True)))
    monkeypatch.setattr(ray_check.subprocess, "run", lambda *_, **__: result)
    monkeypatch.setenv("VLLM_HOST_IP", address)
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    with in_place_of_vllm(monkeypatch) as started, pytest.raises(EngineFailed, match=f"^{sentence}"):
        asyncio.run(new_ray_engine(engine_args=options).start())
    assert not started


# ---------------------------------------------------------------------------------------------------------- the weights


def test_a_message_has_the_files_bytes():
    channel, sent = MessageWeights(), []

    async def collective_rpc(name, args):
        sent.append((name, *args))

    channel.prepare({"a": torch.ones(3), "b": torch.zeros(2).bfloat16()})
    asyncio.run(channel.deliver(SimpleNamespace(collective_rpc=collective_rpc)))
    [(name, data, layout)] = sent
    tensors = tensors_in(torch.frombuffer(bytearray(data), dtype=torch.uint8), layout)
    assert name == "load_weight_bytes" and tensors["a"].tolist() == [1, 1, 1] and tensors["b"].dtype == torch.bfloat16
    channel.close()


class Gathered:
    """Weights that must be gathered, and how often they were."""

    def __init__(self, count):
        self.count, self.passes = count, 0
        self.tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(count)}

    def items(self):
        self.passes += 1
        yield from self.tensors.items()


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
    """`transfer(rank, sending)` is a channel whose sender does `sending(channel)`."""
    base = SimpleNamespace(WeightTransferUpdateRequest=dict)  # vLLM's own takes seconds to import
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    channels = []

    def make(rank, sending):
        channel = TransferWeights(rank=rank)
        channels.append(channel)
        monkeypatch.setattr(channel, "_connect", lambda: Sender(lambda: sending(channel)))
        return channel

    yield make
    for channel in channels:
        channel.close()


def test_every_rank_gathers_at_once_and_rank_0_sends_a_copy(transfer):
    """So no rank is inside a transfer, and what the optimizer does to the weights meanwhile is not sent. No file is
    written. A second transfer goes over the same connection."""
    sent = []
    first = transfer(0, lambda channel: sent.append({name: tensor.sum().item() for name, tensor in channel}))
    second = transfer(1, None)
    for count in (2, 3):
        gathered = [Gathered(count), Gathered(count)]
        for channel, weights in zip((first, second), gathered, strict=True):
            channel.prepare(weights)
            assert weights.passes == 1
            for tensor in weights.tensors.values():
                tensor.fill_(9)
        asyncio.run(first.deliver(None))
    assert sent == [{"w0": 0.0, "w1": 4.0}, {"w0": 0.0, "w1": 4.0, "w2": 8.0}]
    assert not first.path.exists() and second.copy == {}


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
