"""runtime/engines.py and vllm_engine.VLLMEngine on a vLLM that samples nothing: arguments and deaths.

Real engines that are killed are in tests/engine/test_deaths.py.
"""

import asyncio
import os
import signal
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from fake_engine import FakeVLLM, generating, install_fake_vllm, problems, wait_until

from pipeline_rl import EngineFailed, GeneratorFailed
from runtime import engines, hosts
from runtime.engines import RunEngine, environment, reason_of
from vllm_engine import VLLMEngine, vllm_environment


@pytest.fixture
def made(monkeypatch):
    """The fake vLLM engines that were started, in their order. The plain engine leaves its environment set."""
    with mock.patch.dict(os.environ):
        yield install_fake_vllm(monkeypatch)


class Channel:
    """A weight channel that loads nothing."""

    trainer_waits = False

    def __init__(self):
        self.engine_args, self.environment, self.closed = {}, {}, 0

    def prepare(self, weights):
        pass

    async def deliver(self, vllm):
        await vllm.collective_rpc("load")

    def close(self):
        self.closed += 1


def new_engine(**options) -> RunEngine:
    return RunEngine("model", [1], 64, **{"channel": Channel(), "max_num_seqs": 4} | options)


async def start_with(engine, *versions):
    """Starts the engine with the first version of the weights and updates it to the others."""
    engine.prepare({}, versions[0])
    await engine.start()
    for version in versions[1:]:
        engine.prepare({}, version)
        await engine.update()


def test_an_update_by_hand(made):
    """A token carries the version that vLLM reports for it. Shut down twice, the process is ended once."""
    engine = VLLMEngine("model", [1], 64, channel=Channel())

    async def run():
        await start_with(engine, 3)
        before = await engine.sample([7, 8], 2, "3")
        engine.prepare({}, 4)
        assert engine.version == 3
        await engine.update()
        return before, await engine.sample([7, 8], 2, "4")

    before, after = asyncio.run(run())
    assert made[0].calls == ["load", "version 3", "pause", "load", "version 4", "resume"]
    assert (before.versions, after.versions, engine.version) == ([3, 3], [4, 4], 4)
    assert after.completion_ids == [5, 5] and after.prefilled == 2
    with pytest.raises(ValueError, match="60 prompt tokens and 5 more exceed max_model_len = 64"):
        asyncio.run(engine.sample([7] * 60, 5, "4"))
    engine.shutdown()
    engine.shutdown()
    assert made[0].calls[-2:] == ["resume", "shutdown"] and engine.channel.closed


def test_versions_of_the_faster_scheduler(made):
    """It sends the number of pauses before each token: the first weights are version 3, two pauses brought 4 and 7."""
    engine = new_engine()
    asyncio.run(start_with(engine, 3, 4, 7))
    sent = SimpleNamespace(kv_transfer_params={"logprobs": [-1.0, -2.0, -3.0, -4.0], "pauses": [0, 1, 1, 2]})
    assert engine.read(sent) == ([-1.0, -2.0, -3.0, -4.0], [3, 4, 4, 7])


def test_max_num_seqs_is_of_each_engine():
    four = {"data_parallel_size": 4}
    for engine in (new_engine(max_num_seqs=8, engine_args=four), new_engine(engine_args=four | {"max_num_seqs": 8})):
        assert (engine.replicas, engine.slots, engine.args["max_num_seqs"]) == (4, 8, 8)


def test_each_replica_is_warmed_up_and_a_request_goes_to_the_one_it_names(made):
    engine = new_engine(engine_args={"data_parallel_size": 3})

    asyncio.run(start_with(engine, 0))
    asyncio.run(engine.sample([7, 8], 2, "0", 2))
    assert made[0].placed == [0, 1, 2, 2]


def test_ray_workers_do_not_listen_on_loopback():
    """They are on other hosts; what they must not get of this one is in ray_engine.py."""
    here, ray = new_engine(), new_engine(engine_args={"distributed_executor_backend": "ray"})
    assert here.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert not {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"} & set(ray.environment)
    assert "VLLM_NO_USAGE_STATS" in ray.environment


def test_an_engine_that_does_not_answer_is_dead(made, monkeypatch):
    """As a frozen one: after PATIENCE."""
    monkeypatch.setattr(engines, "PATIENCE", 0.3)

    async def never(name, args=()):
        await asyncio.Event().wait()

    with generating(problems(2), new_engine()) as generator:
        made[0].collective_rpc = never
        generator.push({}, 1, 0)
        with pytest.raises(GeneratorFailed, match="EngineDeadError"):
            generator.settle()


@pytest.mark.parametrize("place", ["a request", "the pause", "the load", "the digests"])
def test_a_death_ends_every_wait_of_the_trainer(made, monkeypatch, place):
    """A dead vLLM fails its requests and never answers another call. No call is left that waits for ever: told of when
    it is collected, it would pass for another error."""
    monkeypatch.setattr(FakeVLLM, "seconds", 0.05)
    with generating(problems(2), new_engine()) as generator:
        wait_until(lambda: generator.pacer.admitted == 1)
        [vllm] = made
        vllm.tells = None if place != "a request" else vllm.tells

        async def die(name, args=()):
            vllm.errored = True
            await asyncio.Event().wait()

        vllm.collective_rpc, vllm.errored = die, place != "the load"
        waits = [lambda: generator.take(1), lambda: generator.evaluate(problems(1), 1)]
        if place in ("the pause", "the load"):
            generator.push({}, 1, 0)
            waits.append(generator.settle)
        if place == "the digests":
            waits = [lambda: generator.ask(lambda engine: engine.weight_digests())]
        started = time.monotonic()
        for wait in waits:
            with pytest.raises(GeneratorFailed, match="EngineDeadError"):
                wait()
                generator.take(1)  # the evaluation only begins
        assert time.monotonic() - started < 10
        waiting = generator.in_loop(lambda _: [task.get_coro().__qualname__ for task in asyncio.all_tasks()])
        assert not [name for name in waiting if "load" in name or "update" in name or "checksums" in name]
    assert len(made) == 1 and vllm.calls[-1] == "shutdown"


def test_ray_is_asked_before_vllm_starts(made, monkeypatch):
    """For as many processes as all engines have."""
    asked = []
    monkeypatch.setattr(hosts, "refusal", lambda *asks: asked.append(asks) or "no device is free")
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    with pytest.raises(EngineFailed, match="^no device is free$"):
        asyncio.run(new_engine(engine_args={"distributed_executor_backend": "ray"} | sizes).start())
    assert asked == [(6, "model", 0.0)] and not made


def test_a_start_that_fails_says_why_and_leaves_nothing(made, monkeypatch):
    """The line of the first cause, not that of what was raised over it."""
    engine = new_engine(engine_args={"scheduler_cls": "nowhere.Scheduler"})
    with pytest.raises(EngineFailed, match=r"ModuleNotFoundError: scheduler_cls=nowhere\.Scheduler: "):
        with generating(engine=engine):
            pass
    assert engine.channel.closed and not made

    async def lacks(self, name, args=()):
        raise RuntimeError("the trainer sent no weights for x") from None

    monkeypatch.setattr(FakeVLLM, "collective_rpc", lacks)
    with pytest.raises(EngineFailed, match=r"\(RuntimeError: the trainer sent no weights for x\)"):
        with generating(engine=new_engine()):
            pass
    assert made[0].calls == ["shutdown"]
    second = RuntimeError("see above")
    second.__cause__ = SimpleError("1 validation error for ModelConfig\n  Value error, Invalid repository ID")
    assert reason_of(second) == "SimpleError: Value error, Invalid repository ID"
    assert reason_of(KeyError()) == "KeyError"


class SimpleError(ValueError):
    """As of pydantic, which checks vLLM's arguments: its text has more lines than the message."""

    def errors(self):
        return [{"msg": self.args[0].split("\n  ")[1]}]


def environment_of_start(monkeypatch) -> dict:
    """The environment that the next engine will find as it starts, and under "mask" the signals that are blocked."""
    seen = {}

    def new(args):
        seen.update(os.environ, mask=signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return FakeVLLM(args)

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"], "AsyncLLM", SimpleNamespace(from_engine_args=new))
    return seen


def test_the_engine_inherits_a_blocked_ctrl_c_and_its_devices(made, monkeypatch):
    """Ctrl-C is the trainer's to answer; devices are set whatever the user's environment says, the rest is not."""
    seen = environment_of_start(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with generating(engine=new_engine(device_environment={"CUDA_VISIBLE_DEVICES": "2,3"})):
        pass
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,3" and seen["OMP_NUM_THREADS"] == "7"
    assert seen["VLLM_HOST_IP"] == "127.0.0.1" and signal.SIGINT in seen["mask"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0" and "VLLM_HOST_IP" not in os.environ
    with pytest.raises(KeyError), environment({}, {"CUDA_VISIBLE_DEVICES": "2,3"}):
        raise KeyError  # as when the engine does not start
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_engine_does_not_take_itself_for_one_of_the_launchers_processes(made, monkeypatch):
    """What torch.distributed.run sets (torch 2.13, local_elastic_agent.py) is not there when the engine starts;
    afterwards it is."""
    names = [kind + name for kind in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")]
    names += [f"TORCHELASTIC_{x}" for x in ("RUN_ID", "USE_AGENT_STORE", "RESTART_COUNT", "ERROR_FILE")]
    launcher = dict.fromkeys([*names, "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"], "1")
    other = {"MY_RANK": "1", "RANKING": "2", "OMP_NUM_THREADS": "1"}
    for name, value in (launcher | other).items():
        monkeypatch.setenv(name, value)
    seen = environment_of_start(monkeypatch)
    with generating(engine=new_engine()):
        pass
    assert not set(launcher) & set(seen) and other.items() <= seen.items()
    assert launcher.items() <= os.environ.items()


def test_the_engine_is_asked_after_the_last_push(made):
    with generating(engine=new_engine()) as generator:
        assert generator.ask(lambda engine: engine.weight_digests()) == [{"w": "0"}]
        generator.push({}, 3, 0)
        assert generator.ask(lambda engine: engine.weight_digests()) == [{"w": "3"}]


def test_float32_on_a_gpu_asks_for_whole_products():
    """Triton's default on NVIDIA, TF32, moves log-probs by more than the gap at which a run ends."""
    assert vllm_environment(True, False, "float32")["TRITON_F32_DEFAULT"] == "ieee"
    for gpu, dtype in ((True, "bfloat16"), (False, "float32")):
        assert "TRITON_F32_DEFAULT" not in vllm_environment(gpu, False, dtype)
