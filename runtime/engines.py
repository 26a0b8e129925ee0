"""The engine of a run: vllm_engine's, with what only a long run, a launcher or several hosts need of vLLM.

one process of many   its own devices, none of the launcher's variables, Ctrl-C left to the trainer, loopback only
a death               is seen while a call waits for an answer that never comes; train.py then goes on in a new process
faster messages       engines on a CPU send a completion once (engine_process.WholeCompletions)
Ray                   workers on other hosts (ray_engine.py)
"""

import asyncio
import importlib.util
import math
import os
import re
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import vllm_engine
from pipeline_rl import EngineFailed
from runtime import hosts

if TYPE_CHECKING:  # its import takes seconds
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

# What torch.distributed.run tells its processes. The engine's are not among them: they would look for its store.
LAUNCHER = re.compile("TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME)")
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # engines listen there only
PATIENCE = 300.0  # seconds in which an engine must have answered a call; vLLM gives a step as long


@dataclass(eq=False)
class RunEngine(vllm_engine.VLLMEngine):
    """A VLLMEngine in a run: it shares its host with a trainer, and perhaps with a launcher and other hosts."""

    device_environment: dict[str, str] = field(default_factory=dict)  # as {"CUDA_VISIBLE_DEVICES": "2,3"}; empty: all

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_ray = self.args.get("distributed_executor_backend") == "ray"
        self.environment |= {} if self.on_ray else LOOPBACK
        self._versions: list[int] = []  # n-th entry: the version that is live after n pauses of generation

    async def start(self) -> None:
        """Starts vLLM with the weights prepared last. Raises EngineFailed, whatever vLLM raised."""
        if self.on_ray:
            workers = math.prod(self.args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
            if refused := hosts.refusal(workers, self.model, 0.0):
                raise EngineFailed(refused)
        try:
            await super().start()
        except Exception as error:  # vLLM raises many kinds, bare Exception among them
            advice = "take a model that vLLM can run here, or check --dtype and --engine_args"
            raise EngineFailed(f"vLLM does not start ({reason_of(error)}); {advice}") from error

    def new_vllm(self) -> "AsyncLLM":
        """vLLM's AsyncLLM, which survives Ctrl-C and sees no devices but its own."""
        # Ctrl-C reaches every process of the terminal. The engine inherits this thread's signal mask and ends when we
        # end it.
        resource_tracker.ensure_running()  # when it starts it unblocks SIGINT in its caller
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for name in ("worker_extension_cls", "scheduler_cls"):  # a missing one would end the engine's process
            named = self.args.get(name)
            if isinstance(named, str) and importlib.util.find_spec(named.rpartition(".")[0]) is None:
                raise ModuleNotFoundError(f"{name}={named}: its module is not on sys.path")
        with environment(
            self.environment, self.device_environment | dict.fromkeys(filter(LAUNCHER.fullmatch, os.environ))
        ):
            if self.on_ray:
                from runtime.ray_engine import RayExecutor

                self.args["distributed_executor_backend"] = RayExecutor
            return super().new_vllm()

    def read(self, output: "RequestOutput") -> tuple[list[float], list[int]]:
        """(log-probs, versions) of a request's tokens. Our scheduler sends, in a field that vLLM hands through, how
        many pauses of generation came before each token; the n-th pause brought version `_versions[n]`."""
        sent = output.kv_transfer_params
        if not sent:
            return super().read(output)
        return sent["logprobs"], [self._versions[n] for n in sent["pauses"]]

    async def _load(self, vllm: "AsyncLLM") -> None:
        self._versions.append(self.prepared)
        await watched(vllm, super()._load(vllm))

    async def update(self) -> None:
        """The weights prepared last become live. Raises vLLM's EngineDeadError."""
        await watched(self.vllm, super().update())

    async def weight_digests(self) -> list[dict[str, str]]:
        """For each of vLLM's workers: its parameters' names and a hash of their bytes, of one version."""
        return await watched(self.vllm, self.vllm.compute_weight_checksums())


async def watched(vllm: "AsyncLLM", calls: Coroutine) -> Any:
    """The result of calls to `vllm`, which are never answered if its process dies or is frozen meanwhile. Raises
    vLLM's EngineDeadError."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task, end = asyncio.ensure_future(calls), time.monotonic() + PATIENCE
    try:
        while not (await asyncio.wait([task], timeout=0.1))[0]:
            if vllm.errored or time.monotonic() > end:
                raise EngineDeadError
        return task.result()
    finally:
        task.cancel()  # also if this wait is itself canceled: no one else would, and vLLM never answers


@contextmanager
def environment(defaults: dict[str, str], forced: Mapping[str, str | None]) -> Iterator[None]:
    """Sets `forced` (None: unset), and those of `defaults` that have no value, within the `with` block: processes
    started there inherit them."""
    wanted = {name: value for name, value in defaults.items() if name not in os.environ} | dict(forced)
    before = {name: os.environ.get(name) for name in wanted}
    put(wanted)
    try:
        yield
    finally:
        put(before)


def put(variables: Mapping[str, str | None]) -> None:
    """Sets environment variables, or unsets those that are None."""
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def reason_of(error: BaseException) -> str:
    """Kind and first line of the error that caused `error`. One in the engine's own process is printed there only."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)  # of pydantic, which checks arguments
    return ": ".join([type(error).__name__, *text.strip().splitlines()[:1]])
