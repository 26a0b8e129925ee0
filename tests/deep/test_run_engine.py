"""runtime/engine.py and vllm_engine.VLLMEngine on a vLLM that samples nothing: places, arguments and deaths.

Real engines that are killed are in tests/deep/engine/test_deaths.py.
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from fake_engine import generating, problems, wait_until
from fake_vllm import EngineDeadError, FakeVLLM, in_place_of_vllm, new_engine, start_with

from fp32_head import GENERATOR_ARGS
from generator import EngineDied, EngineFailed, GeneratorFailed
from runtime import engine
from runtime.engine import choose_devices, choose_engine, devices_in_use, variables_set
from runtime.flags import Flags, UsageError, check_flags, engine_options, parse_flags, reason_of
from tasks.arithmetic import FIRST_MODELS
from vllm_engine import vllm_environment

# ------------------------------------------------------------------------------------------------------ where it computes


def flags_of(words):
    return parse_flags(["--output_dir", "none", *words.split()], "")


def host(monkeypatch, gpus, trainers):
    """This host has `gpus` GPUs, and `trainers` trainer processes run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def new_run_engine(words, rank=0):
    """(engine, channel), the channel closed."""
    result, channel = engine.new_engine(flags_of(words), choose_devices(flags_of(words)), rank, "model", [1], 64)
    channel.close()
    return result, channel


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "own", "share"),
    [
        (0, 1, "", [], None),
        (1, 1, "", [0], 0.35),  # one GPU, shared: vLLM's own .92 would leave the trainer nothing
        (1, 1, '--engine_args {"gpu_memory_utilization":0.2}', [0], 0.2),
        (1, 1, '--engine_args {"kv_cache_memory_bytes":9}', [0], None),
        (2, 1, "", [1], None),  # the free one
        (8, 4, '--engine_args {"tensor_parallel_size":2,"pipeline_parallel_size":2}', [4, 5, 6, 7], None),
        (8, 8, '--engine_args {"tensor_parallel_size":8}', [*range(8)], 0.35),
        (8, 6, '--engine_args {"tensor_parallel_size":4}', [0, 1, 2, 3], 0.35),  # two free: too few
    ],
)
def test_places(monkeypatch, gpus, trainers, words, own, share):
    """The GPUs of an engine, and how much of them it takes."""
    host(monkeypatch, gpus, trainers)
    check_flags(flags_of(words))
    result, channel = new_run_engine(words)
    assert result.channel is channel and list(result.gpus) == own
    assert result.args.get("gpu_memory_utilization") == share


@pytest.mark.parametrize(
    ("gpus", "words", "missing", "expected", "note"),
    [
        (0, "", False, "vllm", "^$"),
        (
            0,
            "",
            True,
            "torch",
            r"^--engine torch: vLLM cannot be imported \(OSError: libcudart\); `make setup` installs",
        ),
        (0, "--engine torch", False, "torch", "^$"),
        (0, "--engine vllm", True, "vllm", "^$"),  # its import says what is wrong
        (1, "", False, "torch", "^--engine torch: for the built-in model on a GPU it is faster"),
        (1, "--model org/name", False, "vllm", "^$"),
        (1, '--engine_args {"block_size":64}', False, "vllm", "^$"),
        (1, "--model org/name", True, "torch", "vLLM cannot be imported"),
    ],
)
def test_auto_takes_vllm_or_says_why_not(monkeypatch, gpus, words, missing, expected, note):
    """On a GPU vLLM would compile for a minute and make fewer tokens of the built-in model. Broken packages raise all
    kinds of errors."""

    def import_module(name):
        if missing:
            raise OSError("libcudart")

    host(monkeypatch, gpus, 1)
    monkeypatch.setattr(engine, "import_module", import_module)
    flags = flags_of(words)
    assert re.search(note, choose_engine(flags)) and flags.engine == expected


def test_the_torch_engine_is_on_the_first_trainers_gpu(monkeypatch):
    """Also where another GPU is free, since it lives in that trainer's process."""
    host(monkeypatch, 2, 1)
    devices = choose_devices(flags_of("--engine torch"))
    assert (devices.gpus, devices.shared) == ([0], True)


@pytest.mark.parametrize(
    ("gpus", "trainers", "words", "sentence"),
    [
        (4, 2, '--engine_args {"tensor_parallel_size":8}', "of 8 processes needs as many GPUs; there are 4"),
        (2, 4, "", "4 trainer processes need a GPU each: give the launcher --num_processes 2"),
    ],
)
def test_places_that_cannot_work_are_refused(monkeypatch, gpus, trainers, words, sentence):
    host(monkeypatch, gpus, trainers)
    with pytest.raises(UsageError, match=sentence):
        choose_devices(flags_of(words))


def test_a_torch_engine_beyond_the_memory_is_refused(monkeypatch):
    """Keys and values of 3 slots of 8 tokens, in 2 layers of 2 heads of 32 FP32 numbers, are 2 x 12,288 bytes. Linux
    promises more than it has, and kills the run later."""
    words = flags_of("--engine torch --max_num_seqs 3"), choose_devices(flags_of("--engine torch")), 0
    memory = SimpleNamespace(total=24_576)
    monkeypatch.setattr(engine.psutil, "virtual_memory", lambda: memory)
    engine.new_engine(*words, str(FIRST_MODELS / "discover"), [1], 8)
    memory.total -= 1
    with pytest.raises(UsageError, match=r"^--engine torch, --max_num_seqs 3 of 8 tokens .*MemoryError: keys and "):
        engine.new_engine(*words, str(FIRST_MODELS / "discover"), [1], 8)


def test_other_ranks_have_an_end_of_the_channel_and_no_engine():
    result, channel = new_run_engine("", rank=1)
    assert result is None and channel.rank == 1


@pytest.mark.parametrize(
    ("words", "trainers", "here", "used"),
    [
        ("", 1, 1, 2),  # one trains, one samples, fourteen are idle
        ('--engine_args {"tensor_parallel_size":4}', 1, 1, 5),
        ('--engine_args {"tensor_parallel_size":2}', 16, 16, 16),  # shared
        ('--engine_args {"tensor_parallel_size":14}', 3, 3, 14),  # three of fourteen are shared
        ("", 16, 8, 17),  # trainers on two hosts
    ],
)
def test_device_hours_count_devices_in_use(monkeypatch, words, trainers, here, used):
    """On a host with sixteen GPUs, whose first `here` train."""
    host(monkeypatch, 16, here)
    assert devices_in_use(choose_devices(flags_of(words)), trainers) == used


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
        assert choose_devices(flags_of("")).gpus == []
        return
    with pytest.raises(UsageError, match=r"too old for torch .* CUDA 13\.0; install 580 or newer, or set CUDA"):
        choose_devices(flags_of(""))


def test_engine_options_by_hand():
    """A flag's argument is given by the flag; the head is that of --fp32_head."""
    options = {"pipeline_parallel_size": 3, "tensor_parallel_size": 2, "a": {"b": [1, "x,y"]}, "c": None}
    flags = Flags(trust_remote_code=True, engine_args=json.dumps(options))
    assert engine_options(flags) == {"trust_remote_code": True} | options | GENERATOR_ARGS
    assert choose_devices(flags).workers == 6 and choose_devices(Flags()).workers == 1
    assert engine_options(Flags(dtype="bfloat16", fp32_head=False)) == {}
    for name in ("max_model_len", "hf_overrides", "data_parallel_size"):
        with pytest.raises(UsageError, match=f"--engine_args {name}: the trainer decides it, by a flag"):
            engine_options(Flags(engine_args=json.dumps({name: 9})))


# ------------------------------------------------------------------------------------- the engine


@pytest.fixture
def started(monkeypatch):
    with in_place_of_vllm(monkeypatch) as engines:
        yield engines


def test_engine_args_win():
    assert new_engine(max_num_seqs=8, engine_args={"max_num_seqs": 6}).slots == 6


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
            assert type(caught.value) is EngineDied


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


@pytest.mark.parametrize("place", ["a request", "the pause", "the load"])
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
        began = time.monotonic()
        for wait in waits:
            with pytest.raises(GeneratorFailed, match="EngineDied: vLLM's process has died"):
                wait()
                generator.take(1)  # the evaluation only begins
        assert time.monotonic() - began < 10
        waiting = generator.in_loop(lambda _: [task.get_coro().__qualname__ for task in asyncio.all_tasks()])
        assert not [name for name in waiting if "load" in name or "update" in name]
    assert len(started) == 1 and vllm.calls[-1] == "shutdown"


def test_a_death_is_told_once(started, monkeypatch):
    """The run says in a sentence that vLLM has died, so vLLM's own traceback of it is not logged. Any other is."""
    logger, logged = logging.getLogger("vllm.v1.engine.async_llm"), []
    monkeypatch.setattr(logger, "handle", lambda record: logged.append(record) if logger.filter(record) else None)
    with generating(engine=new_engine()):
        for error in (EngineDeadError("dead"), ValueError("other"), None):
            logger.error("failed", exc_info=error)
    assert [record.exc_info and record.exc_info[0] for record in logged] == [ValueError, None]


def test_a_start_that_fails_says_why_and_leaves_nothing(started, monkeypatch):
    """It gives the line of the first cause, not that of what was raised over it."""

    async def lacks(self, name, args=()):
        raise RuntimeError("the trainer sent no weights for x") from None

    monkeypatch.setattr(FakeVLLM, "collective_rpc", lacks)
    with pytest.raises(EngineFailed, match=r"\(RuntimeError: the trainer sent no weights for x\)"):
        with generating(engine=new_engine()):
            pass
    assert started[0].calls == ["shutdown"]
    assert reason_of(KeyError()) == "KeyError"


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
