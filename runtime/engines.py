"""The engine of a run: vllm_engine's, replaced when it dies, and what else only a long run needs of vLLM.

RestartingEngine    a new vLLM, with the weights prepared last, when one has died; groups are then redone
faster messages     engines on a CPU send a completion once (engine_process.WholeCompletions)
Ray                 workers on other hosts, which have none of our files
"""

import asyncio
import importlib.util
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

import vllm_engine
from pipeline_rl import Counters, EngineDied, EngineFailed
from vllm_engine import Sample

# What torch.distributed.run tells its processes. The engine's are not among them: they would look for its store.
LAUNCHER = re.compile("TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME)")
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # engines listen there only


@dataclass(eq=False)
class RestartingEngine(vllm_engine.VLLMEngine):
    """A VLLMEngine that starts again with the weights prepared last when its process dies."""

    max_restarts: int = 1  # deaths survived within `restart_window` policy versions
    restart_window: int = 100  # versions after which a death no longer counts
    devices: dict[str, str] = field(default_factory=dict)  # as {"CUDA_VISIBLE_DEVICES": "2,3"}; empty: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.args.get("distributed_executor_backend") == "ray":
            # Ray's workers run on other hosts, which have none of our files, folders and processes.
            self.args.pop("worker_extension_cls", None)
            self.environment = {name: x for name, x in self.environment.items() if name not in self.channel.environment}
        else:
            self.environment |= LOOPBACK
        self._versions: list[int] = []  # n-th entry: the version that is live after n pauses of generation
        self._deaths: list[int] = []  # versions at which an engine died and was replaced
        self._restarting = asyncio.Lock()
        self._closed = False
        self.counters = Counters()  # until a generator sets its own

    async def start(self) -> None:
        """Starts vLLM with the weights prepared last. Raises EngineFailed, whatever vLLM raised."""
        try:
            await super().start()
        except Exception as error:  # vLLM raises many kinds, bare Exception among them
            raise EngineFailed(f"vLLM does not start ({reason_of(error)})") from error

    def new_vllm(self) -> Any:
        """vLLM's AsyncLLM, which survives Ctrl-C and sees no devices but its own."""
        # Ctrl-C reaches every process of the terminal. The engine inherits this thread's signal mask and ends when we
        # end it.
        resource_tracker.ensure_running()  # when it starts it unblocks SIGINT in its caller
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for name in ("worker_extension_cls", "scheduler_cls"):  # a missing one would end the engine's process
            named = self.args.get(name)
            if isinstance(named, str) and importlib.util.find_spec(named.rpartition(".")[0]) is None:
                raise ModuleNotFoundError(f"{name}={named}: its module is not on sys.path")
        with environment(self.environment, self.devices | dict.fromkeys(filter(LAUNCHER.fullmatch, os.environ))):
            return super().new_vllm()

    def read(self, output: Any) -> tuple[list[float], list[int]]:
        """(log-probs, versions) of a request's tokens. Our scheduler sends, in a field that vLLM hands through, how
        many pauses of generation came before each token; the n-th pause brought version `_versions[n]`."""
        sent = output.kv_transfer_params
        if not sent:
            return super().read(output)
        return sent["logprobs"], [self._versions[n] for n in sent["pauses"]]

    async def _load(self, vllm: Any) -> None:
        await watched(vllm, super()._load(vllm))
        if vllm is not self.vllm:
            self._versions = [self.version]  # a new engine has not paused yet

    async def sample(
        self, prompt_ids: Sequence[int], max_tokens: int, salt: str, replica: int = 0, temperature: float | None = None
    ) -> Sample:
        """One request. Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        vllm = self.vllm
        try:
            return await super().sample(prompt_ids, max_tokens, salt, replica, temperature)
        except EngineDeadError as error:
            raise death_of(vllm) from error

    async def together(self, begin: Callable[[], list[Coroutine]]) -> list[Any]:
        """The results of the coroutines that `begin()` makes, in order; all are begun anew if the engine dies."""
        while True:
            tasks = [asyncio.ensure_future(coroutine) for coroutine in begin()]
            try:
                return await asyncio.gather(*tasks)
            except EngineDied as death:
                await asyncio.wait(tasks)  # so that what is begun anew overlaps nothing
                await self._replace(death.vllm)

    async def update(self) -> None:
        """The weights prepared last become live; if the engine dies meanwhile, in the new one."""
        async with self._restarting:  # a restart under way ends with a new engine
            vllm = self.vllm
        self._versions.append(self.prepared)
        try:
            await watched(vllm, super().update())
        except EngineDied:
            await self._replace(vllm)  # by an engine with these weights

    async def weight_digests(self) -> list[dict[str, str]]:
        """For each of vLLM's workers: its parameters' names and a hash of their bytes, of one version."""
        return (await self.together(lambda: [watched(self.vllm, self.vllm.compute_weight_checksums())]))[0]

    async def _replace(self, dead: Any) -> None:
        """Replaces the engine `dead` by a new one; of many callers the first one does it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._restarting:
            if self.vllm is not dead:
                return
            if self._closed:
                raise EngineDied("the engine was closed")
            recent = sum(self.version - version < self.restart_window for version in self._deaths)
            if recent >= self.max_restarts or not self.channel.survives_restart:
                why = f"the vLLM engine died {recent + 1} times within {self.restart_window} versions"
                if not self.channel.survives_restart:
                    why = "the vLLM engine died, and this weight channel cannot fill a new one"
                raise EngineDied(f"{why}; its own message is above")
            self._deaths.append(self.version)
            self.counters.restarts += 1
            self.accepting = False  # nothing may enter a new engine that has not got its weights yet
            # vLLM tells the running requests in a task of its own, which `shutdown` cancels. If a push saw the death
            # first, nobody has told them yet, and they would wait forever.
            dead.output_processor.propagate_error(EngineDeadError())
            dead.shutdown(timeout=1)
            try:
                await self.start()
            except EngineFailed as error:
                raise EngineDied(f"the vLLM engine died and did not start again: {error}") from error
            finally:
                self.accepting = True

    def shutdown(self) -> None:
        """Ends vLLM's process for good."""
        self._closed = True
        super().shutdown()


def death_of(vllm: Any) -> EngineDied:
    """What is raised if the engine `vllm` has died."""
    death = EngineDied("the vLLM engine died; its own message is above")
    death.vllm = vllm
    return death


async def watched(vllm: Any, calls: Coroutine) -> Any:
    """The result of calls to `vllm`, which are never answered if its process dies meanwhile. Raises EngineDied."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.ensure_future(calls)
    try:
        while not (await asyncio.wait([task], timeout=0.1))[0]:
            if vllm.errored:
                raise EngineDeadError
        return task.result()
    except EngineDeadError as error:
        raise death_of(vllm) from error
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
