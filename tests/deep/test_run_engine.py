"""runtime/engine.py and vllm_engine.VLLMEngine on a vLLM that samples nothing: places, arguments and deaths.

Real engines that are killed are in tests/deep/engine/test_deaths.py.
"""

import asyncio
import json
import os
import signal
import sys
import time
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_engine import generating, problems, wait_until

from fp32_head import GENERATOR_ARGS
from runtime import engine, ray_check
from runtime.engine import RunEngine, devices_in_use, place, variables_set
from runtime.flag_checks import check_flags, engine_options, worker_count
from runtime.flags import Flags, UsageError, parse_flags, reason_of
from runtime.generator import EngineFailed, GeneratorFailed
from runtime.weights import MessageWeights, RunWeightFile, TransferWeights
from vllm_engine import VLLMEngine, vllm_environment

# ------------------------------------------------------------------------------------------------------ where it computes

RAY = '--engine_args {"distributed_executor_backend":"ray"}'
CHANNELS = {RunWeightFile: "file", MessageWeights: "message", TransferWeights: "nccl"}


def flags_of(words):
    return parse_flags(["--output_dir", "none", *words.split()], "")


def host(monkeypatch, gpus, trainers):
    """This host has `gpus` GPUs, and `trainers` trainer processes run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def engine_for(words):
    result, channel = engine.new_engine(flags_of(words), place(flags_of(words)), 0, "model", [1], 64)
    channel.close()
    return result, channel


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "kind", "own", "share"),
    [
        (0, 1, "", "file", [], None),
        (1, 1, "", "file", [0], 0.35),  # one GPU, shared: vLLM's own .92 would leave the trainer nothing
        (1, 1, '--engine_args {"gpu_memory_utilization":0.2}', "file", [0], 0.2),
        (2, 1, "", "nccl", [1], 0.85),  # the free one; the parts of a transfer come on top of what the engine takes
        (2, 1, "--weight_channel file", "file", [1], None),
        (8, 4, '--engine_args {"tensor_parallel_size":2,"pipeline_parallel_size":2}', "nccl", [4, 5, 6, 7], 0.85),
        (8, 8, '--engine_args {"tensor_parallel_size":8}', "file", [*range(8)], 0.35),
        (8, 6, '--engine_args {"tensor_parallel_size":4}', "file", [0, 1, 2, 3], 0.35),  # two free ones are too few
        (8, 8, RAY, "nccl", [], 0.85),
        (8, 8, f"{RAY} --weight_channel message", "message", [], None),
        (0, 1, RAY, "message", [], None),
    ],
)
def test_places_and_channels(monkeypatch, capsys, gpus, trainers, words, kind, own, share):
    host(monkeypatch, gpus, trainers)
    check_flags(flags_of(words))
    result, channel = engine_for(words)
    assert CHANNELS[type(channel)] == kind and result.channel is channel and list(result.gpus) == own
    assert result.args.get("gpu_memory_utilization") == share
    assert ("wins" in capsys.readouterr().out) == (share is not None and "gpu_memory" not in words)
    if kind == "nccl":
        assert (channel.workers, channel.address) == ((1, "127.0.0.2") if words == RAY else (len(own), "127.0.0.1"))
    # On a GPU vLLM schedules a step while the one before it runs; a subclass of its plain scheduler could not.
    assert ("scheduler_cls" in result.args) == (gpus == 0)


def test_the_torch_engine_is_on_the_first_trainers_gpu(monkeypatch):
    """Also where another GPU is free, since it lives in that trainer's process."""
    host(monkeypatch, 2, 1)
    placement = place(flags_of("--engine torch"))
    assert (placement.gpus, placement.shared, placement.channel) == ([0], True, "file")


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "sentence"),
    [
        (0, 1, "--weight_channel nccl", "--weight_channel nccl needs a GPU that no trainer"),
        (2, 2, "--weight_channel nccl", "--weight_channel nccl needs a GPU that no trainer"),
        (0, 1, f"{RAY} --weight_channel file", "--weight_channel file reaches no engine that Ray places"),
        (4, 2, '--engine_args {"tensor_parallel_size":8}', "of 8 processes needs as many GPUs; there are 4"),
        (2, 4, "", "4 trainer processes need a GPU each: give the launcher --num_processes 2"),
        (0, 1, '--engine_args {"data_parallel_size":2}', "data_parallel_size: a run has one engine"),
    ],
)
def test_places_that_cannot_work_are_refused(monkeypatch, gpus, trainers, words, sentence):
    host(monkeypatch, gpus, trainers)
    with pytest.raises(UsageError, match=sentence):
        place(flags_of(words))


def test_other_ranks_have_an_end_of_the_channel_and_no_engine():
    result, channel = engine.new_engine(flags_of(""), place(flags_of("")), 1, "model", [1], 64)
    channel.close()
    assert result is None and channel.rank == 1


@pytest.mark.parametrize(
    ("words", "trainers", "here", "used"),
    [
        ("", 1, 1, 2),  # one trains, one samples, fourteen are idle
        ('--engine_args {"tensor_parallel_size":4}', 1, 1, 5),
        ('--engine_args {"tensor_parallel_size":2}', 16, 16, 16),  # shared
        ('--engine_args {"tensor_parallel_size":14}', 3, 3, 14),  # three of fourteen are shared
        ("", 16, 8, 17),  # trainers on two hosts
        (f'{RAY[:-1]},"tensor_parallel_size":4,"pipeline_parallel_size":2}}', 8, 8, 16),
    ],
)
def test_device_hours_count_devices_in_use(monkeypatch, words, trainers, here, used):
    """On a host with sixteen GPUs, whose first `here` train."""
    host(monkeypatch, 16, here)
    assert devices_in_use(place(flags_of(words)), trainers) == used


OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"


@pytest.mark.parametrize(
    ("build", "visible", "message", "refused"),
    [
        ("13.0", "0", OLD, True),
        ("13.0", "", OLD, False),  # hidden on purpose: the run is for the CPU
        ("13.0", None, "Found no NVIDIA driver on your system.", False),  # a CPU with torch's build for GPUs
        (None, None, "Torch not compiled with CUDA enabled", False),
    ],
)
def test_a_driver_that_is_too_old_is_not_taken_for_no_gpu(monkeypatch, build, visible, message, refused):
    """torch says so in `torch.cuda.init` only; `is_available` is False in every case."""

    def init():
        raise RuntimeError(message)

    host(monkeypatch, 0, 1)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", init)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not refused:
        assert place(flags_of("")).gpus == []
        return
    with pytest.raises(UsageError, match=r"too old for torch .* CUDA 13\.0; install 580 or newer, or set CUDA"):
        place(flags_of(""))


def test_engine_options_by_hand():
    """Ray's workers are tensor x pipeline parallel. A flag's argument is given by the flag."""
    assert engine_options(flags_of("")) == GENERATOR_ARGS and worker_count(GENERATOR_ARGS) == 1
    options = {"pipeline_parallel_size": 3, "tensor_parallel_size": 2, "a": {"b": [1, "x,y"]}, "c": None}
    flags = Flags(trust_remote_code=True, engine_args=json.dumps(options))
    assert (
        engine_options(flags) == {"trust_remote_code": True} | options | GENERATOR_ARGS and worker_count(options) == 6
    )
    with pytest.raises(UsageError, match="--engine_args max_model_len: use --max_budget"):
        engine_options(Flags(engine_args='{"max_model_len": 9}'))


def test_engine_args_do_not_undo_the_fp32_head():
    """Other overrides of the model's configuration are added to it; one that contradicts --fp32_head is refused."""
    overrides = {"rope_theta": 1000000, "text_config": {"x": 1}}
    options = engine_options(Flags(engine_args=json.dumps({"hf_overrides": overrides})))
    assert options == {"hf_overrides": {"head_dtype": "float32"} | overrides}
    for fp32_head, head in ((True, "bfloat16"), (True, None), (False, "float32")):
        args = json.dumps({"hf_overrides": {"head_dtype": head}})
        with pytest.raises(UsageError, match="head_dtype .*--fp32_head"):
            engine_options(Flags(dtype="bfloat16", fp32_head=fp32_head, engine_args=args))
    assert engine_options(Flags(dtype="bfloat16", fp32_head=False)) == {}
    with pytest.raises(UsageError, match="hf_overrides must be a JSON object, not 3"):
        engine_options(Flags(engine_args='{"hf_overrides": 3}'))


# ------------------------------------------------------------------------------------- the engine


class EngineGenerateError(Exception):
    """What vLLM makes of any other error of a request."""


class EngineDeadError(Exception):
    """In the place of vLLM's."""


class FakeVLLM:
    """The calls of AsyncLLM that the engine makes. Dead (`errored`) or `frozen`, it fails requests with `failure`, if
    there is one, and answers nothing else."""

    seconds = 0.0  # that a token takes

    def __init__(self, args):
        self.args, self.errored, self.frozen, self.calls, self.version = args, False, False, [], "default"
        self.engine_core = self.output_processor = self
        self.failure = EngineDeadError()

    def propagate_error(self, error):
        self.failure = error

    async def generate(self, prompt, params, request_id):
        assert params.flat_logprobs
        assert params.ignore_eos and params.stop_token_ids == [1]  # no end token but the run's
        for _ in range(params.max_tokens):
            await asyncio.sleep(self.seconds)
            while self.errored or self.frozen:
                if isinstance(self.failure, EngineDeadError):
                    raise self.failure
                if self.failure:
                    raise EngineGenerateError from self.failure
                await asyncio.sleep(1)
        completion = SimpleNamespace(
            token_ids=[5] * params.max_tokens,
            logprobs=SimpleNamespace(logprobs=[-1.0] * params.max_tokens),
            weight_versions=[SimpleNamespace(version=self.version, start=0, end=params.max_tokens)],
            finish_reason="length",
        )
        yield SimpleNamespace(outputs=[completion], kv_transfer_params=None, num_cached_tokens=0)

    async def answer(self, name):
        while self.errored or self.frozen:
            await asyncio.sleep(1)
        self.calls.append(name)

    async def is_paused(self):
        while self.errored or self.frozen:
            await asyncio.sleep(1)

    async def pause_scheduler_async(self, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        await self.answer("pause")

    async def resume_generation(self):
        await self.answer("resume")

    async def collective_rpc(self, name, args=()):
        await self.answer(name)

    async def compute_weight_checksums(self):
        await self.answer("digests")
        return [{"w": self.version}]

    async def update_weight_version(self, version):
        await self.answer(f"version {version}")
        self.version = version

    def shutdown(self, timeout):
        self.calls.append("shutdown")


@pytest.fixture
def started(monkeypatch):
    """`import vllm` finds the fake; the list of the engines that were started. The plain engine leaves its environment
    set."""
    engines = []

    def from_engine_args(args):
        engines.append(FakeVLLM(args))
        return engines[-1]

    modules = {
        "vllm": {"SamplingParams": SimpleNamespace, "AsyncEngineArgs": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    with mock.patch.dict(os.environ):
        yield engines


class Channel:
    """A weight channel that loads nothing."""

    trainer_waits = False

    def __init__(self):
        self.engine_args, self.folder, self.closed = {}, "none", 0

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


def test_an_update_by_hand(started):
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
    assert started[0].calls == ["load", "version 3", "pause", "load", "version 4", "resume"]
    assert (before.versions, after.versions, engine.version) == ([3, 3], [4, 4], 4)
    assert after.completion_ids == [5, 5] and after.prefilled == 2
    with pytest.raises(ValueError, match="60 prompt tokens and 5 more exceed max_model_len = 64"):
        asyncio.run(engine.sample([7] * 60, 5, "4"))
    engine.shutdown()
    engine.shutdown()
    assert started[0].calls[-2:] == ["resume", "shutdown"] and engine.channel.closed


def test_versions_of_the_faster_scheduler(started):
    """It sends the number of pauses before each token: the first weights are version 3, two pauses brought 4 and 7."""
    engine = new_engine()
    asyncio.run(start_with(engine, 3, 4, 7))
    sent = SimpleNamespace(kv_transfer_params={"logprobs": [-1.0, -2.0, -3.0, -4.0], "pauses": [0, 1, 1, 2]})
    assert engine.logprobs_and_versions(sent) == ([-1.0, -2.0, -3.0, -4.0], [3, 4, 4, 7])


def test_engine_args_win():
    assert new_engine(max_num_seqs=8, engine_args={"max_num_seqs": 6}).slots == 6


def test_ray_workers_do_not_listen_on_loopback():
    """They are on other hosts; what they must not get of this one is in ray_executor.py."""
    here, ray = new_engine(), new_engine(engine_args={"distributed_executor_backend": "ray"})
    assert here.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert not {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"} & set(ray.environment)
    assert "VLLM_NO_USAGE_STATS" in ray.environment


def test_an_engine_that_does_not_answer_is_dead(started, monkeypatch):
    """As a frozen one: after CALL_TIMEOUT, whether an update waits for it, or the trainer for a group."""
    monkeypatch.setattr(engine, "CALL_TIMEOUT", 0.3)
    monkeypatch.setattr(engine, "HEARTBEAT", 0.1)
    monkeypatch.setattr(FakeVLLM, "seconds", 0.2)
    for pushes in (True, False):
        with generating(problems(2), new_engine()) as generator:
            time.sleep(0.5)  # one that answers is left alone
            started[-1].frozen, started[-1].failure = True, None
            if pushes:
                generator.push({}, 1, 0)
            with pytest.raises(GeneratorFailed, match="vLLM has not answered for 0 s") as caught:
                generator.settle() if pushes else generator.take(1)
            assert caught.value.engine_died


def test_a_stop_of_both_is_no_silence_of_the_engine(started, monkeypatch):
    """After Ctrl-Z and `fg` the engine has had no time to answer either. Here the loop stands still for a second."""
    monkeypatch.setattr(engine, "CALL_TIMEOUT", 0.6)

    async def call():
        await asyncio.sleep(0.1)
        time.sleep(1.0)
        await asyncio.sleep(0.15)
        return "answer"

    async def run():
        stopped = new_engine()
        await start_with(stopped, 3)
        return await stopped._answer_or_death(call())

    assert asyncio.run(run()) == "answer"


@pytest.mark.parametrize("place", ["a request", "the pause", "the load", "the digests"])
def test_a_death_ends_every_wait_of_the_trainer(started, monkeypatch, place):
    """A dead vLLM fails its requests and never answers another call. No call is left that waits forever: reported when it
    is collected, it would pass for another error."""
    monkeypatch.setattr(FakeVLLM, "seconds", 0.05)
    with generating(problems(2), new_engine()) as generator:
        wait_until(lambda: generator.pacer.admitted == 1)
        [vllm] = started
        if place != "a request":
            vllm.failure = None

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
        began = time.monotonic()
        for wait in waits:
            with pytest.raises(GeneratorFailed, match="EngineDied: vLLM's process has died"):
                wait()
                generator.take(1)  # the evaluation only begins
        assert time.monotonic() - began < 10
        waiting = generator.in_loop(lambda _: [task.get_coro().__qualname__ for task in asyncio.all_tasks()])
        assert not [name for name in waiting if "load" in name or "update" in name or "checksums" in name]
    assert len(started) == 1 and vllm.calls[-1] == "shutdown"


@pytest.mark.parametrize(
    ("answer", "address", "sentence"),
    [
        ((0, "log line\n5\n", ""), "127.0.0.1", "the engine needs 6 devices, and 5 of Ray's are free"),
        ((1, "", "Traceback\nConnectionError: none runs\n"), "127.0.0.1", r"Ray fails \(ConnectionError: none runs\)"),
        ((0, "6\n", ""), "192.0.2.1", "VLLM_HOST_IP must be this host's --node-ip-address, not 192.0.2.1"),
        ((0, "6\n", ""), "", "VLLM_HOST_IP must be this host's"),
    ],
)
def test_ray_is_asked_before_vllm_starts(started, monkeypatch, answer, address, sentence):
    """For as many processes as the engine has: 2 x 3."""
    result = SimpleNamespace(**dict(zip(("returncode", "stdout", "stderr"), answer, strict=True)))
    monkeypatch.setattr(ray_check.subprocess, "run", lambda *_, **__: result)
    monkeypatch.setenv("VLLM_HOST_IP", address)
    options = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    with pytest.raises(EngineFailed, match=f"^{sentence}"):
        asyncio.run(new_engine(engine_args=options).start())
    assert not started


def test_a_start_that_fails_says_why_and_leaves_nothing(started, monkeypatch):
    """It gives the line of the first cause, not that of what was raised over it."""
    engine = new_engine(engine_args={"scheduler_cls": "nowhere.Scheduler"})
    with pytest.raises(EngineFailed, match=r"ModuleNotFoundError: scheduler_cls=nowhere\.Scheduler: "):
        with generating(engine=engine):
            pass
    assert engine.channel.closed and not started

    async def lacks(self, name, args=()):
        raise RuntimeError("the trainer sent no weights for x") from None

    monkeypatch.setattr(FakeVLLM, "collective_rpc", lacks)
    with pytest.raises(EngineFailed, match=r"\(RuntimeError: the trainer sent no weights for x\)"):
        with generating(engine=new_engine()):
            pass
    assert started[0].calls == ["shutdown"]
    second = RuntimeError("see above")
    second.__cause__ = PydanticError("1 validation error for ModelConfig\n  Value error, Invalid repository ID")
    assert reason_of(second) == "PydanticError: Value error, Invalid repository ID"
    assert reason_of(KeyError()) == "KeyError"


class PydanticError(ValueError):
    """As of pydantic, which checks vLLM's arguments: its text has more lines than the message."""

    def errors(self):
        return [{"msg": self.args[0].split("\n  ")[1]}]


@pytest.fixture
def inherited(started, monkeypatch) -> dict:
    """The environment that the next engine finds as it starts, and under "mask" the signals that are blocked."""
    variables = {}

    def new(args):
        variables.update(os.environ, mask=signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return FakeVLLM(args)

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"], "AsyncLLM", SimpleNamespace(from_engine_args=new))
    return variables


@pytest.mark.parametrize(("visible", "own"), [(None, "2,3"), ("0", "0"), ("4,5,6,7", "6,7")])
def test_the_engine_inherits_a_blocked_ctrl_c_and_its_gpus(inherited, monkeypatch, visible, own):
    """Ctrl-C is the trainer's to answer. GPUs are counted among the visible ones. What else the user has set stays."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with generating(engine=new_engine(gpus=() if visible == "0" else (2, 3))):
        pass
    assert inherited["CUDA_VISIBLE_DEVICES"] == own and inherited["OMP_NUM_THREADS"] == "7"
    assert inherited["VLLM_HOST_IP"] == "127.0.0.1" and signal.SIGINT in inherited["mask"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible and "VLLM_HOST_IP" not in os.environ
    with pytest.raises(KeyError), variables_set({"CUDA_VISIBLE_DEVICES": "9"}):
        raise KeyError  # as when the engine does not start
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_the_engine_does_not_take_itself_for_one_of_the_launchers_processes(inherited, monkeypatch):
    """What torch.distributed.run sets (torch 2.13, local_elastic_agent.py) is not there when the engine starts;
    afterwards it is."""
    names = [kind + name for kind in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")]
    names += [f"TORCHELASTIC_{x}" for x in ("RUN_ID", "USE_AGENT_STORE", "RESTART_COUNT", "ERROR_FILE")]
    launcher = dict.fromkeys([*names, "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"], "1")
    other = {"MY_RANK": "1", "RANKING": "2", "OMP_NUM_THREADS": "1"}
    for name, value in (launcher | other).items():
        monkeypatch.setenv(name, value)
    with generating(engine=new_engine()):
        pass
    assert not set(launcher) & set(inherited) and other.items() <= inherited.items()
    assert launcher.items() <= os.environ.items()


def test_float32_on_a_gpu_asks_for_whole_products():
    """Triton's default on NVIDIA, TF32, moves log-probs by more than the gap at which a run ends."""
    assert vllm_environment(True, False, "float32")["TRITON_F32_DEFAULT"] == "ieee"
    for gpu, dtype in ((True, "bfloat16"), (False, "float32")):
        assert "TRITON_F32_DEFAULT" not in vllm_environment(gpu, False, dtype)
