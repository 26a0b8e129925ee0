"""PipelineRL-k and PPO-off-policy-k: generate and train at the same time, with a bound on how stale a token may be.

The problem. Sampling takes most of the time of RL on language models, and its slowest completions most of that. A
trainer that waits for every completion leaves the generator idle at the end of each batch, and itself idle before it.

The idea (PipelineRL, arXiv 2509.19128; ScaleRL, arXiv 2510.13786, section 3.1). The generator never stops: prompts
stream in, finished groups stream out, and each optimiser step's weights are swapped into the engine while its
sequences are half way. They go on with the new weights over the keys and values of the old ones. The price is that a
token may be trained on by a later policy than the one that sampled it:

    lag(token) = v_train − v_token         v counts optimiser steps; every token carries the v that sampled it

The alternative, PPO-off-policy-k: freeze the policy, sample k·B prompts, then take k steps of B prompts each.

How the lag is bounded. Dropping stale rollouts would drop the long ones (they are the stale ones), so nothing is
dropped: admission is paced instead. Groups are numbered as they enter the engine and trained strictly in that order,
and a new one enters only while

    outstanding < (k + 1) · B              outstanding = admitted, and the step that trained it not yet live

A group admitted at version w has at most (k + 1)·B − 1 groups before it, so it trains in one of the next k + 1 steps:
the one that makes w + 1 (lag 0), ..., or the one that makes w + k + 1 (lag k). Counting a group as done when it is
taken, not when its step's weights are live, would train k = 0 at lag 1; taking whichever group finishes first would
break the bound too.

The bound is not a target. Admission also stops while B finished groups wait that the trainer could take now, so that a
generator that is faster runs no further ahead than it must. Groups that finished behind a running one do not count
there: the trainer cannot take them, and if they counted, one long completion would empty the engine. To study lag it
can be held up: while the trainer takes B groups only if `min_ready` more are ready, the lag is about that of
`min_ready` 0 plus min_ready / B.

`Pacer` is these rules; `Generator` drives a vLLM engine by them.

P1: the paper has a queue between generator and trainer; here admission is paced, groups train in admission order, and
nothing is dropped.

Simplified: one engine object (vLLM's own tensor and data parallelism lie behind it); one reward function.
This file alone drives a vLLM engine (which outlives a trainer that is killed by SIGKILL); weight_sync.py and
engine_process.py mend that, and add speed and other ways for the weights.

    >>> pacer = Pacer(batch_prompts=2, k=1)
    >>> numbers = [pacer.admit() for _ in range(4)]
    >>> pacer.may_admit()                  # 4 = (k + 1) · B are outstanding
    False

Symbols: B prompts per optimiser step, G rollouts per prompt, k steps off-policy, v policy version, T tokens.
"""

import asyncio
import importlib.util
import itertools
import math
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol

import torch

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # the engine's processes listen there alone
FORCED = -1  # the "version" of a token that nobody sampled (the interruption phrase)


@dataclass
class Rollout:
    """One completion of one prompt and all that training needs to know about it; lists have one entry per token."""

    completion_ids: list[int]
    logprobs: list[float]  # the generator's own, at its temperature; 0.0 on forced tokens
    versions: list[int]  # policy version that sampled the token; FORCED on forced tokens
    mask: list[int]  # 1 = sampled, trains; 0 = forced
    finish_reason: str  # "stop" or "length" (truncated)
    interrupted: bool = False  # its thinking was cut and the phrase appended
    prefilled: int = 0  # prompt tokens that the engine computed for it
    reward: float = math.nan
    correct: bool = False


@dataclass
class Group:
    """The G rollouts of one prompt: the unit of queueing, filtering and batching."""

    number: int  # order of admission
    problem: Any  # has .prompt_ids and .key
    version: int  # policy version live at admission
    rollouts: list[Rollout]


class Interrupted(Exception):
    """The caller asked to stop while it waited; nothing was taken."""


class EngineDied(RuntimeError):
    """The engine died more often than `max_restarts` allows, or did not start again."""


class EngineFailed(RuntimeError):
    """The engine did not start."""


class Exhausted(Exception):
    """No prompt is left to admit and every admitted group was taken."""


class Pacer:
    """Who may start, and who must wait: the lag bound as a counter (module docstring). With a generator of your own:

        while pacer.may_admit():              # again after each `finish`, `take` and `release`
            start(pacer.admit())
        pacer.finish(group)                   # when all rollouts of that number are complete; wake the trainer
        groups = pacer.take(pacer.take_size)  # the trainer's side; None: it must wait
        ...                                   # one step on them (ppo_off_policy: k), then the new weights go live
        pacer.release(len(groups))            # and only now are they done; ppo_off_policy: all k·B after the last step

    Not safe to call from several threads: call it from one event loop. Of a group it reads `.number` alone. Strict
    order has a price: while the oldest group runs, those that finish behind it wait.

    Args:
        batch_prompts: B, groups per optimiser step.
        k: most steps off-policy. `pipeline`: k >= 0, lag in 0..k. `ppo_off_policy`: k >= 1, lag in 0..k-1.
        schedule: `pipeline` or `ppo_off_policy`.
        max_ready: admission also stops while this many groups are ready; None means as many as one take needs.
        min_ready: groups that stay ready behind each take, which holds the lag up by min_ready / B; `pipeline` only, at
            most k·B. Set the attribute to 0 when no prompt is left to admit.

    Raises:
        ValueError: for an unknown schedule or impossible numbers.
    """

    def __init__(
        self, batch_prompts: int, k: int, *, schedule: str = "pipeline",
        max_ready: int | None = None, min_ready: int = 0,
    ):  # fmt: skip
        if schedule not in ("pipeline", "ppo_off_policy"):
            raise ValueError(f"schedule must be one of pipeline, ppo_off_policy, not {schedule!r}")
        least = 0 if schedule == "pipeline" else 1
        if batch_prompts < 1 or k < least:
            raise ValueError(f"{schedule} needs batch_prompts >= 1 and k >= {least}, not {batch_prompts} and {k}")
        self.take_size = batch_prompts if schedule == "pipeline" else k * batch_prompts  # groups the trainer takes
        self.capacity = (k + 1) * batch_prompts if schedule == "pipeline" else k * batch_prompts
        if not 0 <= min_ready <= self.capacity - self.take_size:
            raise ValueError(f"min_ready must be from 0 to {self.capacity - self.take_size}, not {min_ready}")
        needed = self.take_size + min_ready  # for a take
        if max_ready is not None and max_ready < needed:
            raise ValueError(f"max_ready must be at least {needed}, for which the trainer waits, not {max_ready}")
        self.min_ready, self.max_ready = min_ready, needed if max_ready is None else max_ready
        self.admitted = 0  # numbers given out so far
        self.training = 0  # taken by the trainer, their step not yet live
        self._finished: dict[int, Group | None] = {}  # admitted and not taken; None while it runs; in number order

    @property
    def outstanding(self) -> int:
        """Groups admitted whose step is not yet live."""
        return len(self._finished) + self.training

    @property
    def ready(self) -> int:
        """Finished groups that the trainer could take now: those before the first one that still runs."""
        return sum(1 for _ in itertools.takewhile(lambda group: group is not None, self._finished.values()))

    def may_admit(self) -> bool:
        """Whether one more group may enter the engine."""
        return self.outstanding < self.capacity and self.ready < self.max_ready

    def admit(self) -> int:
        """The number of the group that enters now. Raises RuntimeError if none may enter."""
        if not self.may_admit():
            counts = f"{self.outstanding} of {self.capacity} are outstanding, {self.ready} of {self.max_ready} ready"
            raise RuntimeError(f"no group may enter now ({counts}); ask may_admit() first")
        self._finished[self.admitted] = None
        self.admitted += 1
        return self.admitted - 1

    def finish(self, group: Group) -> None:
        """Every rollout of `group` is complete and scored. Raises KeyError if it was not running."""
        if self._finished.get(group.number, group) is not None:
            raise KeyError(f"group {group.number} is not running")
        self._finished[group.number] = group

    def may_take(self, count: int) -> bool:
        """Whether `count` groups are ready and `min_ready` more."""
        return self.ready >= count + self.min_ready

    def take(self, count: int) -> list[Group] | None:
        """The `count` lowest numbers, or None: the trainer must wait for them, even if younger groups are finished."""
        if not self.may_take(count):
            return None
        self.training += count
        return [self._finished.pop(number) for number in list(self._finished)[:count]]

    def release(self, count: int) -> None:
        """`count` taken groups stop being outstanding: their step is live in every engine, was skipped, or dynamic
        sampling discarded them."""
        if count > self.training:
            raise ValueError(f"{count} groups released, but only {self.training} are in training")
        self.training -= count

    def waiting_for(self) -> list[int]:
        """Numbers of the groups that are still running, oldest first."""
        return [number for number, group in self._finished.items() if group is None]


class LengthControl(Protocol):
    """What the generator asks of forced interruption (`length_control.Interruption` is one)."""

    max_budget: int
    max_completion: int

    def draw_budget(self, rng: random.Random) -> int:
        """Thinking tokens before the interruption."""

    def second_leg(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str) -> Any:
        """None, or an object with prompt_ids, forced_ids and max_tokens."""

    def mask(self, n_first: int, n_forced: int, n_second: int) -> list[int]:
        """1 on sampled tokens, 0 on forced ones."""


class WeightChannel(Protocol):
    """How new weights reach the engine: `WeightFile`, and runtime/weight_channels.py has two more."""

    engine_args: dict[str, Any]  # vLLM's arguments that it needs
    environment: dict[str, str]  # of the engine's process
    trainer_waits: bool  # the trainer's weights must not change before they are live
    survives_restart: bool  # a new engine can be given the weights prepared last

    def prepare(self, weights: Any) -> None:
        """Called in the trainer's thread, on every rank."""

    async def deliver(self, call: Callable[[str], Callable[..., Awaitable[Any]]]) -> None:
        """Brings the weights prepared last into the paused engine; `call("name")(...)` calls a method of it."""

    def close(self) -> None:
        """Removes what it made."""


class WeightFile:
    """The plain channel: a safetensors file in shared memory, which engines on this host read.

    Weights are a dict, name in the Hugging Face checkpoint -> whole tensor, as `dict(model.named_parameters())`: a tied
    head is not among them. The engine's process imports this file by its name, so its folder must be on `sys.path`.
    """

    trainer_waits = False  # the engine reads a copy
    survives_restart = True

    def __init__(self, folder: Path | None = None) -> None:
        shared_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="weights-", dir=shared_memory))  # this user's alone
        self.path = self.folder / "weights.safetensors"
        self.engine_args: dict[str, Any] = {"worker_extension_cls": f"{__name__}.WeightReceiver"}
        self.environment: dict[str, str] = {}

    def prepare(self, weights: Any) -> None:
        """Replaces the file by these tensors: an engine that still reads the old one keeps it."""
        from safetensors.torch import save_file

        new = self.folder / "new.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, new)
        new.replace(self.path)

    async def deliver(self, call: Callable[[str], Callable[..., Awaitable[Any]]]) -> None:
        """Every worker of every engine loads the file."""
        await call("collective_rpc")("load_weight_file", args=(str(self.path),))

    def close(self) -> None:
        """Removes the file and its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class WeightReceiver:
    """Mixed into vLLM's worker, in the engine's process (`worker_extension_cls`): loads a weight file into the running
    model. Its methods' names must be new to vLLM's worker."""

    def load_weight_file(self, path: str) -> None:
        """Replaces all weights by those of the safetensors file `path`, between two engine steps. This is the worker's
        own `reload_weights`, which would say nothing of a weight that the file lacks.

        Raises:
            RuntimeError: the file lacks a weight of the model.
        """
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        torch.cpu._init_amx()  # vLLM's bfloat16 attention uses AMX where a CPU has it, but does not ask Linux for it
        model = self.model_runner.get_model()
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False) and hasattr(model, "lm_head")
        names = {name for name, _ in model.named_parameters() if not (tied and name.startswith("lm_head."))}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            # Layer by layer: vLLM's CPU linears keep repacked weights, which an in-place copy would not reach.
            initialize_layerwise_reload(model)
            loaded = model.load_weights(load_file(path).items())
            finalize_layerwise_reload(model, self.model_config)
            if loaded is not None and names - loaded:
                raise RuntimeError(f"the trainer sent no weights for {sorted(names - loaded)[:3]}")
            if tied:  # a tied head keeps its own repacked copy, which the reload leaves at the old weights
                tables = [m for m in model.modules() if type(m) is VocabParallelEmbedding]
                model.lm_head.weight = tables[0].weight
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


@dataclass
class Counters:
    """What the generator did since its start; the trainer logs differences."""

    sampled: int = 0  # completion tokens of rollouts, not of evaluation
    prefilled: int = 0  # prompt tokens computed, not read from cache; the second legs' forced tokens are among them
    eval_sampled: int = 0
    eval_prefilled: int = 0
    eval_seconds: float = 0.0  # evaluation's share of the time: its tokens of all tokens sampled while it ran
    idle_seconds: float = 0.0  # no request inside the engine
    sync_seconds: float = 0.0  # paused for new weights
    pushes: int = 0
    redone_groups: int = 0
    restarts: int = 0


@dataclass
class Generator:
    """A vLLM engine in its own process, driven from a thread of the trainer's: prompts in, finished groups out.

    Args:
        model: folder of the initial weights, in Hugging Face format.
        problems: endless or finite iterator of problems with `.prompt_ids`; asked at each admission.
        score: (problem, completions) -> one (reward, correct) per completion; runs in a thread.
        pacer: decides admission.
        rollouts: G.
        length_control: forced interruption, or None.
        max_tokens: completion tokens at most, when there is no interruption.
        stop_ids: token ids that end a completion.
        weights: the channel by which new weights reach the engine; None: a `WeightFile`.
        temperature: of sampling; the log-probs are those at it.
        max_num_seqs: requests inside each of vLLM's `data_parallel_size` engines at once; in all at least G.
        max_prompt: tokens of the longest prompt.
        dtype: of the engine's weights and products, `float32` or `bfloat16`.
        seed: of the engine's sampling and of the budgets.
        max_restarts: engine deaths survived within `restart_window` policy versions.
        restart_window: versions after which a death no longer counts.
        engine_args: more of vLLM's AsyncEngineArgs.
        devices: environment that shows the engine its devices, as {"CUDA_VISIBLE_DEVICES": "2,3"}; empty: all.
        interrupted: asked once a second while `take` or `result_of` waits; True raises Interrupted there.
    """

    model: str
    problems: Iterator[Any]
    score: Callable[[Any, list[list[int]]], list[tuple[float, bool]]]
    pacer: Pacer
    rollouts: int
    stop_ids: Sequence[int]
    weights: WeightChannel | None = None
    length_control: LengthControl | None = None
    max_tokens: int = 0
    temperature: float = 1.0
    max_num_seqs: int = 256
    max_prompt: int = 64
    dtype: str = "float32"
    seed: int = 0
    max_restarts: int = 1
    restart_window: int = 100
    engine_args: dict[str, Any] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    interrupted: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        engines = self.engine_args.get("data_parallel_size", 1)
        self.slots = engines * self.engine_args.get("max_num_seqs", self.max_num_seqs)  # requests inside all of them
        if self.slots < self.rollouts:
            raise ValueError(f"{self.rollouts} rollouts per prompt do not fit {self.slots} engine slots")
        self.weights = self.weights or WeightFile()
        self.counters = Counters()
        self.version = 0  # live in the engine
        self.exhausted = False  # `problems` came to its end
        self.running: dict[int, Any] = {}  # number -> problem of the groups admitted and not yet taken
        self._inside = 0  # requests in the engine; a rollout keeps its slot from its first leg to its second
        self._idle_since = time.monotonic()
        self._wanted: deque[asyncio.Future] = deque()  # evaluation requests that wait for a slot
        self._rng = random.Random(self.seed)
        self._request_number = 0
        self._tasks: set[asyncio.Task] = set()
        self._error: BaseException | None = None
        self._pushing: Future | None = None
        self._closing = False  # nothing enters the engine any more, and a dead one stays dead
        self._prepared = 0  # version of the weights in `weights`
        self._versions: list[int] = []  # n-th entry: version live in the engine after n pauses
        self._engine = None
        self._engine_number = 0
        self._deaths: list[int] = []  # versions at which an engine died and was replaced
        self._dead_engine: type[Exception] = RuntimeError  # vLLM's own class once vLLM is imported
        self._restarting, self._wake, self._no_evaluation = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._no_evaluation.set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._fail)
        self._thread = threading.Thread(target=self._loop.run_forever, name="generator", daemon=True)

    # ---- the trainer's side: plain calls from its thread ----

    def start(self, weights: Any, version: int = 0) -> None:
        """Starts the engine, gives it the weights of `version` and opens admission. Raises EngineFailed."""
        self._thread.start()
        self.weights.prepare(weights)
        self._prepared = version
        self._call(self._start_engine())
        self.counters = Counters()
        self._idle_since = time.monotonic()
        self._loop.call_soon_threadsafe(self._dispatch)

    def take(self, count: int, *, report_after: float = 60.0) -> list[Group]:
        """Waits for the `count` oldest groups. Raises the generator's error, or Exhausted; every `report_after`
        seconds of waiting it prints who waits for whom."""
        ready = asyncio.run_coroutine_threadsafe(self._until_ready(count, report_after), self._loop)
        self._wait(ready, interruptible=True)
        # Only the wait can be cut short. What leaves `running` and arrives nowhere would be in no checkpoint.
        return asyncio.run_coroutine_threadsafe(self._take(count), self._loop).result()

    def release(self, count: int) -> None:
        """The trainer is done with `count` taken groups without new weights (a skipped step, a discarded group)."""
        self._loop.call_soon_threadsafe(self._release, count)

    def push(self, weights: Any, version: int, release: int) -> None:
        """Sends the weights of `version` to the engine in flight and returns once the trainer may change them; when
        they are live, `release` groups stop being outstanding. The next `push`, `evaluate` or `settle` raises if that
        failed."""
        self.settle()
        self.weights.prepare(weights)
        self._prepared = version
        self._pushing = asyncio.run_coroutine_threadsafe(self._push(release), self._loop)
        if self.weights.trainer_waits:
            self.settle()

    def settle(self) -> None:
        """Waits until the last pushed weights are live."""
        if self._pushing is not None:
            self._wait(self._pushing)
            self._pushing = None

    def evaluate(self, problems: Iterable[Any], n_samples: int) -> "Future[list[list[Rollout]]]":
        """Starts sampling `n_samples` completions of each problem at the live version and returns their future, a list
        of rollouts per problem; `result_of` waits for it. A push waits while evaluation runs."""
        self.settle()
        return asyncio.run_coroutine_threadsafe(self._evaluate(list(problems), n_samples), self._loop)

    def result_of(self, future: Future) -> Any:
        """Waits for a future of `evaluate`; raises the generator's error instead of waiting forever."""
        return self._wait(future, interruptible=True)

    def in_loop(self, function: Callable[["Generator"], Any]) -> Any:
        """`function(generator)`, run between two events of the generator's thread: nothing is admitted meanwhile."""

        async def call() -> Any:
            return function(self)

        return self._call(call())

    def close(self) -> None:
        """Stops engine and thread; safe to call twice and after a failure."""
        if self._thread.is_alive():
            if self._pushing is not None:
                wait([self._pushing], timeout=5)  # the engine reads a file that goes next
            try:
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=10)
        self.weights.close()

    def _call(self, coroutine: Coroutine) -> Any:
        return self._wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _wait(self, future: Future, interruptible: bool = False) -> Any:
        while True:
            if interruptible and self.interrupted():
                future.cancel()
                raise Interrupted
            try:
                return future.result(timeout=1.0)
            except Exception as error:
                running = isinstance(error, TimeoutError) and not future.done()
                if running and self._error is None:
                    continue
                future.cancel()
                if interruptible and self.interrupted():  # a signal to the whole process group ends the engine, too
                    raise Interrupted from error
                if running:
                    raise self._error from None
                raise

    # ---- the loop's side: everything below runs in the generator's thread, so it needs no locks ----

    async def _start_engine(self) -> None:
        engine = None
        try:
            engine = self._new_engine()
            await self._load_weights(engine)
            self._versions = [self.version]
            # Together: what begins on a dead engine while this one starts must not pass for a death of this one.
            self._engine, self._engine_number = engine, self._engine_number + 1
            await self._request([0, 0], 2, "warm-up")  # a fresh engine's first step takes seconds
        except Exception as error:  # vLLM raises many kinds, bare Exception among them
            if engine is not None:
                engine.shutdown(timeout=1)
            raise EngineFailed(f"vLLM does not start ({reason_of(error)})") from error

    def _new_engine(self) -> Any:
        # Ctrl-C reaches every process of the terminal. The engine inherits this thread's mask: it ends when we say so.
        resource_tracker.ensure_running()  # when it starts it unblocks SIGINT in its caller
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        gpu = torch.cuda.is_available()
        longest = self.length_control.max_completion if self.length_control else self.max_tokens
        args = {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": not gpu,
            "block_size": None if gpu else 32,
            "max_model_len": self.max_prompt + longest,
            "max_num_seqs": self.max_num_seqs,
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, temperature included
            "generation_config": "vllm",  # or the model's own file sets top_p and top_k behind our back
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": self.seed,
        }
        args |= self.weights.engine_args | self.engine_args
        variables = engine_environment(gpu, args["enforce_eager"], args["dtype"])
        if args.get("distributed_executor_backend") == "ray":  # workers elsewhere: no folder, process, file of ours
            args.pop("worker_extension_cls", None)
        else:
            variables |= self.weights.environment | LOOPBACK
        with environment(variables, self.devices):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.engine.exceptions import EngineDeadError

            self._dead_engine = EngineDeadError
            for name in ("worker_extension_cls", "scheduler_cls"):  # missed by the engine's process, they end it
                named = args.get(name)
                if isinstance(named, str) and importlib.util.find_spec(named.rpartition(".")[0]) is None:
                    raise ModuleNotFoundError(f"{name}={named}: its module is not on sys.path")
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    async def _stop(self) -> None:
        self._closing = True
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        if self._engine is not None:
            self._engine.shutdown(timeout=3)  # killed earlier, the engine leaves semaphores behind

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()  # the trainer's next wait raises it

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = self._error or context.get("exception") or RuntimeError(context["message"])

    def _occupy(self, slots: int) -> None:
        now = time.monotonic()
        if self._inside == 0:
            self.counters.idle_seconds += now - self._idle_since
        self._inside += slots
        if self._inside == 0:
            self._idle_since = now

    def _dispatch(self) -> None:
        """Fills the engine: evaluation first, then new groups. Nothing ever queues inside vLLM, so the version at
        admission is the version of the prefill. Called whenever a slot or the pacer may have opened."""
        if self._closing or self._restarting.locked():  # a new engine may not have its weights yet
            return
        while self._wanted and self._inside < self.slots:
            self._occupy(1)
            self._wanted.popleft().set_result(None)
        if self.exhausted:
            return
        while not self._wanted and self._inside + self.rollouts <= self.slots and self.pacer.may_admit():
            problem = next(self.problems, None)
            if problem is None:
                self.exhausted = True
                self.pacer.min_ready = 0  # what is left is trained, too
                self._wake.set()
                return
            number = self.pacer.admit()
            self.running[number] = problem
            self._occupy(self.rollouts)
            task = self._loop.create_task(self._run_group(number, problem))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _run_group(self, number: int, problem: Any) -> None:
        """Samples and scores the G rollouts of one group. If the engine dies, all G are redone under the same number:
        redoing only the unfinished ones would favour short completions."""
        version, tries = self.version, 0

        async def attempt() -> list[Rollout]:
            nonlocal version, tries
            version, tries = self.version, tries + 1
            if tries > 1:
                self._occupy(self.rollouts)
                self.counters.redone_groups += 1
            budgets = [self._draw_budget() for _ in range(self.rollouts)]
            return await self._together([self._rollout(problem, budget, version) for budget in budgets])

        rollouts = await self._redo_if_engine_dies(attempt)
        await self._score(problem, rollouts)
        for rollout in rollouts:
            self.counters.sampled += sum(rollout.mask)
            self.counters.prefilled += rollout.prefilled
        self.pacer.finish(Group(number, problem, version, rollouts))
        self._wake.set()
        self._dispatch()

    def _draw_budget(self) -> int:
        return self.length_control.draw_budget(self._rng) if self.length_control else self.max_tokens

    async def _score(self, problem: Any, rollouts: list[Rollout]) -> None:
        scores = await asyncio.to_thread(self.score, problem, [rollout.completion_ids for rollout in rollouts])
        for rollout, (reward, correct) in zip(rollouts, scores, strict=True):
            rollout.reward, rollout.correct = float(reward), bool(correct)

    async def _rollout(self, problem: Any, budget: int, version: int) -> Rollout:
        """One completion, in one request or, when its thinking is cut at `budget`, in two; the caller took its slot."""
        prompt, salt = list(problem.prompt_ids), str(version)
        try:
            if len(prompt) > self.max_prompt:
                raise ValueError(f"a prompt has {len(prompt)} tokens, above max_prompt = {self.max_prompt}")
            first = await self._request(prompt, budget, salt)
            leg = self.length_control and self.length_control.second_leg(
                prompt, first.completion_ids, first.finish_reason
            )
            if leg is None:
                return first
            second = await self._request(leg.prompt_ids, leg.max_tokens, salt)
        finally:
            self._occupy(-1)
            self._dispatch()
        forced = list(leg.forced_ids)
        return Rollout(
            completion_ids=first.completion_ids + forced + second.completion_ids,
            logprobs=first.logprobs + [0.0] * len(forced) + second.logprobs,
            versions=first.versions + [FORCED] * len(forced) + second.versions,
            mask=self.length_control.mask(len(first.mask), len(forced), len(second.mask)),
            finish_reason=second.finish_reason,
            interrupted=bool(forced),
            prefilled=first.prefilled + second.prefilled,
        )

    async def _request(self, prompt_ids: Sequence[int], max_tokens: int, salt: str) -> Rollout:
        """One vLLM request. `salt` keeps prompts of one version from hitting cached keys and values of another."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            logprobs=0,  # the sampled token's own
            stop_token_ids=list(self.stop_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # these are this request's alone
        )
        self._request_number += 1
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        async for output in self._engine.generate(prompt, params, request_id=str(self._request_number)):
            done = output.outputs[0]
        ids, whole = list(done.token_ids), output.kv_transfer_params
        if whole:  # sent at once by engine_process.WholeCompletions
            logprobs, versions = whole["logprobs"], [self._versions[n] for n in whole["pauses"]]
        else:
            logprobs = [entry[token].logprob for token, entry in zip(ids, done.logprobs, strict=True)]
            versions = [int(span.version) for span in done.weight_versions for _ in range(span.start, span.end)]
        check_arrival(ids, logprobs, versions, done.finish_reason)
        prefilled = len(prompt_ids) - (output.num_cached_tokens or 0)
        return Rollout(ids, logprobs, versions, [1] * len(ids), done.finish_reason, prefilled=prefilled)

    async def _until_ready(self, count: int, report_after: float) -> None:
        while not self.pacer.may_take(count):
            if self._error is not None:  # an iterator that raised is at its end, too: not `Exhausted`
                raise self._error
            if self.exhausted and len(self.running) < count:
                raise Exhausted(f"no prompt is left to admit; {len(self.running)} groups stay untrained")
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), report_after)
            except TimeoutError:
                running = self.pacer.waiting_for()
                oldest = f"{len(running)} run, the oldest is {running[:1]}"
                print(f"the trainer waits for {count + self.pacer.min_ready} groups; {oldest}", flush=True)

    async def _take(self, count: int) -> list[Group]:
        groups = self.pacer.take(count)
        for group in groups:
            del self.running[group.number]
        self._dispatch()
        return groups

    def _release(self, count: int) -> None:
        self.pacer.release(count)
        self._dispatch()

    async def _push(self, release: int) -> None:
        """New weights in flight: running requests freeze, keep their cache, and go on with the new weights."""
        await self._no_evaluation.wait()
        started = time.monotonic()
        async with self._restarting:  # a restart under way ends with a new engine
            number, engine = self._engine_number, self._engine
        try:
            try:
                # clear_cache=True would prefill every running request anew; pause_generation adds 20 ms of sleep
                self._versions.append(self._prepared)
                pause = engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                await self._answer(engine, pause)
                await self._load_weights(engine)
                await self._answer(engine, engine.resume_generation())
            except self._dead_engine:
                await self._restart(number)  # the new engine starts with these weights
        except Exception as error:
            self._error = self._error or error  # the engine stands still: no wait of the trainer's would ever end
            raise
        self.counters.sync_seconds += time.monotonic() - started
        self.counters.pushes += 1
        self._release(release)

    async def _load_weights(self, engine: Any) -> None:
        version = self._prepared
        await self.weights.deliver(lambda name: lambda *a, **k: self._answer(engine, getattr(engine, name)(*a, **k)))
        await self._answer(engine, engine.update_weight_version(str(version)))
        self.version = version

    async def _answer(self, engine: Any, call: Coroutine) -> Any:
        """Waits for a call to the engine. vLLM never answers it if the engine's process dies meanwhile."""
        task = self._loop.create_task(call)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if engine.errored:
                task.cancel()
                raise self._dead_engine
        return task.result()

    async def _evaluate(self, problems: list[Any], n_samples: int) -> list[list[Rollout]]:
        started, trained, counters = time.monotonic(), self.counters.sampled, self.counters
        self._no_evaluation.clear()

        async def attempt() -> list[Rollout]:
            return await self._together([self._in_turn(p) for p in problems for _ in range(n_samples)])

        try:
            flat = await self._redo_if_engine_dies(attempt)
        finally:
            self._no_evaluation.set()
        groups = [flat[i : i + n_samples] for i in range(0, len(flat), n_samples)]
        await asyncio.gather(*[self._score(p, g) for p, g in zip(problems, groups, strict=True)])
        sampled = sum(sum(rollout.mask) for rollout in flat)
        counters.eval_sampled += sampled
        counters.eval_prefilled += sum(rollout.prefilled for rollout in flat)
        share = sampled / max(1, sampled + counters.sampled - trained)
        counters.eval_seconds += share * (time.monotonic() - started)
        return groups

    async def _in_turn(self, problem: Any) -> Rollout:
        """An evaluation rollout: waits for a slot before any new group gets one; the longest budget."""
        slot = self._loop.create_future()
        self._wanted.append(slot)
        self._dispatch()
        await slot
        budget = self.length_control.max_budget if self.length_control else self.max_tokens  # T4
        return await self._rollout(problem, budget, self.version)

    async def _together(self, coroutines: list[Coroutine]) -> list[Rollout]:
        """All results, in order. If the engine dies it waits until all have ended, so that a redo overlaps none."""
        tasks = [self._loop.create_task(coroutine) for coroutine in coroutines]
        try:
            return await asyncio.gather(*tasks)
        except self._dead_engine:
            await asyncio.wait(tasks)
            raise

    async def _redo_if_engine_dies(self, attempt: Callable[[], Coroutine]) -> Any:
        while True:
            engine = self._engine_number
            try:
                return await attempt()
            except self._dead_engine:
                await self._restart(engine)

    async def _restart(self, dead: int) -> None:
        """Replaces the dead engine by one with the weights written last; of many callers the first one does it."""
        async with self._restarting:
            if self._engine_number != dead:
                return
            if self._closing:
                raise EngineDied("the engine was closed")
            recent = sum(self.version - version < self.restart_window for version in self._deaths)
            if recent >= self.max_restarts or not self.weights.survives_restart:
                why = f"the vLLM engine died {recent + 1} times within {self.restart_window} versions"
                if not self.weights.survives_restart:
                    why = "the vLLM engine died, and this weight channel cannot fill a new one"
                raise EngineDied(f"{why}; its own message is above")
            self._deaths.append(self.version)
            self.counters.restarts += 1
            self._engine.shutdown(timeout=1)
            try:
                await self._start_engine()
            except EngineFailed as error:
                raise EngineDied(f"the vLLM engine died and did not start again: {error}") from error
        self._dispatch()


def reason_of(error: BaseException) -> str:
    """Kind and first line of the error that caused `error`. One in the engine's own process is printed there only."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)  # of pydantic, which checks arguments
    return ": ".join([type(error).__name__, *text.strip().splitlines()[:1]])


def engine_environment(gpu: bool, eager: bool, dtype: str) -> dict[str, str]:
    """Environment of the engine's process: errors are printed, chatter is not."""
    both = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "VLLM_NO_USAGE_STATS": "1",
    }
    on_cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process: one process fewer
        "OMP_NUM_THREADS": "1",  # the other core is the trainer's
    }
    # vLLM compiles one small function of its sampler even in eager mode: seconds at the start, and it needs a compiler.
    uncompiled = {"TORCH_COMPILE_DISABLE": "1"} if eager else {}
    # vLLM's attention for float32 is Triton's, whose products have 10 bits of significand if nothing asks for all 23.
    exact = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
    return both | (exact if gpu else on_cpu | uncompiled)


@contextmanager
def environment(defaults: dict[str, str], forced: dict[str, str] | None = None) -> Iterator[None]:
    """Sets `forced`, and those of `defaults` that have no value, within the `with` block: processes started there
    inherit them."""
    wanted = {name: value for name, value in defaults.items() if name not in os.environ} | (forced or {})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def check_arrival(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], finish_reason: str) -> None:
    """What the engine returned is whole: a missing log-prob read as 0.0 would mean probability 1 and a ratio of 1e4.

    Raises:
        RuntimeError: lengths differ, a log-prob is not finite or above 0, or the request neither stopped nor ran out.
    """
    if not ids or not len(ids) == len(logprobs) == len(versions):
        raise RuntimeError(f"vLLM returned {len(ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logprobs):
        raise RuntimeError("vLLM returned a log-prob that is not finite or above 0")
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {finish_reason!r} instead of 'stop' or 'length'")


def lags(rollout: Rollout, version: int) -> list[int]:
    """Lag of each sampled token of `rollout` at the step that makes `version` + 1; forced tokens have none."""
    return [version - v for v, m in zip(rollout.versions, rollout.mask, strict=True) if m]
