"""The engine of a run: where it runs, how weights reach it, its arguments, and how its death is noticed.

`choose_devices` refuses what cannot work before the model is loaded; `new_engine` makes the engine and this rank's
channel.

HOW A RUN'S vLLM DIFFERS FROM A PLAIN ONE. Each line has two ends, one in the trainer's process (this file, unless said
otherwise) and one in vLLM's (inside_vllm.py):

    what                            trainer's end                   vLLM's end
    its GPUs, loopback only, and    RunEngine._variables            the environment that it inherits
      none of a launcher's names
    Ctrl-C is not for it            RunEngine.new_vllm              the signal mask that it inherits, os.setpgid
    it ends with its trainer        SCALERL_TRAINER_PID             exit_with_trainer
    its death ends the run          RunEngine._answer_or_death      nothing: it is dead, or does not answer
    its weights change              weights.RunWeightFile.deliver   RunWeightReceiver.load_weight_file

YOUR OWN ENGINE, `--engine module:Class`. Rank 0 calls `Class(model, stop_ids, max_model_len, flags)`: the folder of the
first weights in Hugging Face format, the token ids that end a completion, the tokens of the longest prompt and
completion, and the flags, of which `temperature`, `max_num_seqs` (its `slots`), `seed`, `dtype` and `fp32_head` are for
it. It runs in rank 0's process and has what the table in generator.py asks for; `prepare` gets the gathered
weights by `weights.items()`. A subclass of RunEngine is called as RunEngine is, and may have three things of its own:

    elsewhere                      True: none of this host's GPUs is for it (its workers are on other hosts)
    check_devices(devices)         class method; raises UsageError where it cannot run, before anything is written
    new_channel(devices, rank)   class method; each rank's end of a weight channel of its own

lab/hosts has such subclasses: Ray, NCCL; lab/fast_vllm.py one with a faster scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker
from typing import Any, ClassVar

import psutil
import torch

import vllm_engine
from generator import EngineDied, EngineFailed
from runtime.flags import Flags, UsageError, engine_options, own_code, reason_of
from runtime.weights import Channel, InProcess, RunWeightFile
from torch_engine import TorchEngine

# What torch.distributed.run sets for its processes. The engine must not see these, or it would try to join the
# launcher's store.
LAUNCHER = re.compile("TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME)")
DEAD = "vLLM's process has died"
SHARE = 0.35  # of a GPU on which a trainer is, too; vLLM would take .92
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # engines listen there only
CALL_TIMEOUT = 300.0  # an engine must answer a call within this many seconds, as long as vLLM allows a step
HEARTBEAT = 30.0  # seconds between two calls that only ask whether the engine still answers


# -------------------------------------------------------------------------------------------------------- where it runs


@dataclass(frozen=True)
class EngineDevices:
    """Where the engine runs, and how weights reach it."""

    options: dict[str, Any]  # vLLM's arguments, by the flags
    workers: int  # processes of the engine
    gpus: list[int]  # this host's GPUs that it uses; none on a CPU, or if Ray places its workers
    shared: bool  # a trainer uses one of these GPUs, too


def choose_devices(flags: Flags) -> EngineDevices:
    """The engine takes the GPUs beyond those of the trainers, or shares theirs if there are too few. Raises UsageError
    for devices that cannot work."""
    kind = engine_class(flags)
    options = engine_options(flags)
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    trainers = trainers_here()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: list[int] = []
    if count == 0:
        check_driver()
    elif trainers > count:
        raise UsageError(f"{trainers} trainer processes need a GPU each: give the launcher --num_processes {count}.")
    elif not issubclass(kind, RunEngine):
        gpus = [0]  # it lives in the first trainer's process
    elif not kind.elsewhere:
        if workers > count:
            raise UsageError(f"--engine_args: an engine of {workers} processes needs as many GPUs; there are {count}.")
        first = trainers if trainers + workers <= count else 0
        gpus = list(range(first, first + workers))
    devices = EngineDevices(options, workers, gpus, shared=bool(gpus) and gpus[0] < trainers)
    if issubclass(kind, RunEngine):
        kind.check_devices(devices)
    return devices


def choose_engine(flags: Flags) -> str:
    """`--engine auto` becomes vllm where it can be imported (on a GPU only for a model that is given), else torch; then
    the reason is returned."""
    if flags.engine != "auto":
        return ""
    reason = "for the built-in model on a GPU it is faster than vllm"
    if flags.model or flags.engine_args or not torch.cuda.is_available():
        try:
            import_module("vllm.v1.engine.async_llm")
            reason = ""
        except Exception as error:  # not there, or the packages that it needs are broken: they raise all kinds
            reason = f"vLLM cannot be imported ({reason_of(error)}); `make setup` installs it on Linux"
    flags.engine = "torch" if reason else "vllm"
    return f"--engine torch: {reason}" if reason else ""


def engine_class(flags: Flags) -> Any:
    """The class of --engine: `torch`, `vllm`, or your own `module:Class`. Raises UsageError."""
    if ":" in flags.engine:
        kind = own_code(flags, "engine")
        if not isinstance(kind, type):
            raise UsageError(f"--engine {flags.engine} is no class.")
        return kind
    return TorchEngine if flags.engine == "torch" else RunEngine


def trainers_here() -> int:
    """Trainer processes on this host; they use its first GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def devices_in_use(devices: EngineDevices, trainers: int) -> int:
    """Devices that train (`trainers`, on all hosts) or sample: GPUs, or CPU cores. Idle ones do not count."""
    if not torch.cuda.device_count():
        return min(os.cpu_count() or 1, trainers * torch.get_num_threads() + devices.workers)
    if not devices.gpus:  # all of its workers are elsewhere
        return trainers + devices.workers
    return trainers + sum(gpu >= trainers_here() for gpu in devices.gpus)


def check_driver() -> None:
    """With too old a driver, torch finds no GPU and the run would silently use the CPU. Raises UsageError."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return  # the run is meant for the CPU
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "too old" in str(error):
            raise UsageError(
                f"the NVIDIA driver is too old for torch {torch.__version__}, which is built for CUDA "
                f"{torch.version.cuda}; install 580 or newer, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
            ) from error


# -------------------------------------------------------------------------------------------------- what it starts with


def new_engine(
    flags: Flags,
    devices: EngineDevices,
    rank: int,
    model: str,
    stop_ids: Sequence[int],
    longest: int,
) -> tuple[Any, Channel]:
    """(the engine, not yet started, None on ranks other than 0; this rank's end of the weight channel). `model`: folder
    of the initial weights; `longest`: tokens of the longest prompt and completion together."""
    kind = engine_class(flags)
    if not issubclass(kind, RunEngine):
        engine = None
        if rank == 0 and kind is TorchEngine:
            options = flags.temperature, flags.max_num_seqs, flags.seed, getattr(torch, flags.dtype), flags.fp32_head
            try:
                engine = TorchEngine(model, stop_ids, longest, *options)
                needed, here = 2 * engine.cache.keys.nbytes, psutil.virtual_memory().total
                if needed > here:  # Linux promises memory that it lacks, and kills who uses it
                    raise MemoryError(f"keys and values take {needed / 1e9:.0f} of {here / 1e9:.0f} GB; lower either")
            except (ValueError, TypeError, RuntimeError, MemoryError) as error:  # another model, or too little memory
                size = f"--max_num_seqs {flags.max_num_seqs} of {longest} tokens (prompt and --max_budget)"
                raise UsageError(f"--engine torch, {size}: {reason_of(error)}.") from error
        elif rank == 0:
            engine = kind(model, stop_ids, longest, flags)
        return engine, InProcess()
    channel = kind.new_channel(devices, rank)
    if rank != 0:
        return None, channel
    options = dict(devices.options)
    if devices.shared and "kv_cache_memory_bytes" not in options:
        options.setdefault("gpu_memory_utilization", SHARE)
    engine = kind(
        model, stop_ids, longest, channel, flags.temperature, flags.max_num_seqs, flags.dtype, flags.seed, options,
        gpus=devices.gpus,
    )  # fmt: skip
    return engine, channel


# ----------------------------------------------------------------------------------------------------------- the engine


@dataclass(eq=False)
class RunEngine(vllm_engine.VLLMEngine):
    """A VLLMEngine in a run: it shares its host with a trainer, and perhaps with a launcher."""

    gpus: Sequence[int] = ()  # this host's GPUs for it, counted among the visible ones; empty: all
    elsewhere: ClassVar[bool] = False

    @classmethod
    def check_devices(cls, devices: EngineDevices) -> None:
        """Any place will do: the weights go by memory that the engine and the trainer both see."""

    @classmethod
    def new_channel(cls, devices: EngineDevices, rank: int) -> RunWeightFile:
        """This rank's end of the weight channel."""
        return RunWeightFile(rank)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The engine's process keeps its sockets in the channel's folder, and ends with this one.
        self.environment["VLLM_RPC_BASE_PATH"] = str(self.channel.folder)
        self.environment["SCALERL_TRAINER_PID"] = str(os.getpid())  # for inside_vllm.exit_with_trainer
        self.environment |= LOOPBACK
        self._heart: asyncio.Task | None = None

    async def start(self) -> None:
        """Starts vLLM with the weights prepared last. Raises EngineFailed, whatever vLLM raised."""
        if torch.cuda.is_available():
            print("vLLM starts: up to two minutes the first time, while it compiles", flush=True)
        try:
            await super().start()
        except Exception as error:  # vLLM raises many kinds, bare Exception among them
            advice = "the first error above says why; what a run can change are the model, --dtype and --engine_args"
            raise EngineFailed(f"vLLM does not start ({reason_of(error)}); {advice}") from error
        self._heart = asyncio.create_task(self._heartbeat())

    async def _heartbeat(self) -> None:
        """Ends all requests with an error if the engine answers no more: they have no time limit themselves."""
        try:
            while True:
                await asyncio.sleep(HEARTBEAT)
                await self._answer_or_death(self.vllm.is_paused())
        except EngineDied as error:
            self.vllm.output_processor.propagate_error(error)

    def new_vllm(self) -> Any:
        """vLLM's AsyncLLM, which survives Ctrl-C and sees no GPUs but its own."""
        # Ctrl-C, or the end of a terminal, reaches every process of the terminal. The engine inherits this thread's
        # signal mask and ends when we end it.
        resource_tracker.ensure_running()  # starting it unblocks SIGINT in this thread, so start it first
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        # A death is no news: the run says it in one sentence. What an engine dies of, its own process prints.
        logger = logging.getLogger("vllm.v1.engine.async_llm")
        logger.addFilter(lambda record: "EngineDeadError" not in str(record.exc_info))
        with variables_set(self._variables()):
            return super().new_vllm()

    def _variables(self) -> dict[str, str | None]:
        """Environment variables of the engine's process that differ from this one's. None: unset there."""
        variables: dict[str, str | None] = {}
        for name, value in self.environment.items():
            if name not in os.environ:  # what the user has set stays
                variables[name] = value
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(self.gpus) + 1)))
            names = visible.split(",")
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in self.gpus)
        for name in filter(LAUNCHER.fullmatch, os.environ):
            variables[name] = None
        return variables

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> vllm_engine.Sample:
        """One request. Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            return await super().sample(prompt_ids, max_tokens, salt)
        except EngineDeadError as error:
            raise EngineDied(DEAD) from error
        except EngineGenerateError as error:  # vLLM wraps the heartbeat's
            if isinstance(error.__cause__, EngineDied):
                raise error.__cause__ from None
            raise

    async def _load(self) -> None:
        await self._answer_or_death(super()._load())

    async def update(self) -> None:
        """The weights prepared last become live. Raises EngineDied."""
        await self._answer_or_death(super().update())

    async def _answer_or_death(self, calls: Coroutine) -> Any:
        """The result of calls to vLLM, which would otherwise wait forever if its process dies or is frozen meanwhile.
        Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(calls)
        remaining = CALL_TIMEOUT  # of seconds in which this process runs: Ctrl-Z stops both
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.1)
                remaining -= 0.1
                if not task.done() and self.vllm.errored:
                    raise EngineDied(DEAD)
                if not task.done() and remaining < 0:
                    raise EngineDied(f"vLLM has not answered for {CALL_TIMEOUT:.0f} s")
            return task.result()
        except EngineDeadError as error:
            raise EngineDied(DEAD) from error
        finally:
            task.cancel()  # also if this wait is itself canceled: no one else would, and vLLM never answers


@contextmanager
def variables_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables (None: unsets) within the `with` block: processes started there inherit them."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
