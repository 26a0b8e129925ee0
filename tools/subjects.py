"""What the benchmarks measure: models of several sizes, a trainer, a generator, a program, a helper process.

All in-process access to `train.py`, `pipeline_rl.py` and `runtime/` that a benchmark needs is in this file. To keep the
work the same from turn to turn, the policy does not move: at a learning rate of 1e-30 the step is computed and changes
nothing. No prompt is retired and no row is filtered, unless a benchmark says otherwise.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import psutil
import torch
from measuring import ROOT, timed

import losses
import pipeline_rl
import train
from runtime.flags import parse_flags
from runtime.parts import new_generator, new_interruption
from runtime.run_folder import Folder, Progress, Record
from runtime.trainer import Trainer, TrainingBatch
from runtime.weights import FileWeights
from tasks import arithmetic, warm_start
from tasks.prompts import Problem, PromptStream

# The setting of BENCHMARKS.md, which stays the same when the defaults of train.py change.
BATCH = 32  # prompts of a step
CHAIN = f"--dataset chain --batch_prompts {BATCH} --min_budget 26 --max_budget 30 --lr 5e-4".split()
SETTING = ["--max_num_seqs", "256", "--eval_problems", "512", "--eval_samples", "2"]
NEVER = ["--eval_every", "1000000000", "--probe_every", "1000000000", "--save_every", "0"]
QUIET = [*SETTING, *NEVER, "--max_steps", "80000"]
STILL = ["--lr", "1e-30", "--pass_rate_threshold", "2", "--zero_variance_filter", "false"]

SIZES = {  # name -> width, layers, heads, heads of the keys, head_dim (vLLM's CPU kernel takes 32), width of the MLP
    "0.2M": (),
    "8M": (256, 8, 8, 4, 32, 1024),
}


def warm_model(seed: int) -> str:
    """Folder of the built-in task's model."""
    return str(warm_start.warm_start("runs/cache", seed=seed))


def random_model(folder: Path, size: str) -> str:
    """Folder of a model with random weights for the built-in task's words."""
    made = warm_start.new_model(warm_start.ModelShape(*SIZES[size], initializer_range=0.02), seed=0)
    made.config.max_position_embeddings = 512
    made.save_pretrained(folder)
    arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)


# ---------------------------------------------------------------------------------------------------------- the trainer


class TrainerSide:
    """A trainer whose policy does not move, and batches made as the loop makes them."""

    def __init__(self, model: str, seed: int = 0):
        from accelerate import Accelerator

        self.flags = parse_flags([*CHAIN, *STILL, "--seed", str(seed)], "")
        self.trainer = Trainer(self.flags, Accelerator(cpu=not torch.cuda.is_available()), model)

    def batch(self, groups: Sequence[pipeline_rl.Group]) -> TrainingBatch:
        """What one optimizer step trains on, as the loop of train.py makes it without filters."""
        rollouts, rows = train.rollouts_and_rows(groups)
        group_ids = torch.arange(len(groups)).repeat_interleave(len(rollouts) // len(groups))  # (N,)
        rewards = train.shaped_rewards(rollouts, self.flags)  # (N,)
        advantages = losses.normalize_advantages(rewards, group_ids)  # (N,)
        mask = train.pad([rollout.mask for rollout in rollouts], torch.bool)  # (N, T)
        behaviour = train.pad([rollout.logprobs for rollout in rollouts], torch.float32)  # (N, T)
        return TrainingBatch(rows, behaviour, mask, advantages, losses.aggregation_weights(mask, group_ids))

    def step(self, batch: TrainingBatch) -> None:
        """One optimizer step."""
        self.trainer.backward(batch)
        self.trainer.update(0)


def synthetic_groups(rollouts: int, length: int) -> list[pipeline_rl.Group]:
    """Groups of 16 random completions of about `length` tokens (uniform in half to one and a half times of it)."""
    rng = random.Random(0)

    def rollout() -> pipeline_rl.Rollout:
        n, right = rng.randint(length // 2, length + length // 2), rng.random() < 0.5
        ids = [rng.randrange(4, len(arithmetic.WORDS)) for _ in range(n)]
        reward = 1.0 if right else -1.0
        return pipeline_rl.Rollout(ids, [-2.0] * n, [0] * n, [1] * n, "stop", reward=reward, correct=right)

    problem = Problem("", tuple(rng.randrange(4, 30) for _ in range(12)), "")
    return [pipeline_rl.Group(i, problem, 0, [rollout() for _ in range(16)]) for i in range(rollouts // 16)]


# -------------------------------------------------------------------------------------------------------- the generator


@contextmanager
def both_sides(seed: int, count: int) -> Iterator[tuple[TrainerSide, pipeline_rl.Generator, list[pipeline_rl.Group]]]:
    """(A trainer, a generator, `count` groups that it sampled) of the built-in task with the recipe's interruption, 256
    requests in flight, groups of 16."""
    torch.set_num_threads(1)
    model = warm_model(seed)
    side, task = TrainerSide(model, seed), arithmetic.ChainTask(seed=seed)
    flags = parse_flags([*CHAIN, "--max_num_seqs", "256", "--seed", str(seed)], "")
    prompts = PromptStream(task.train, seed, lambda key: False)
    control, progress = new_interruption(flags, task), Progress(random.Random(0))
    made = new_generator(flags, model, task, prompts, FileWeights(), {}, control, progress)
    try:
        made.start(side.trainer.weights)
        free_running(made)
        groups = made.take(count)
        drain(made)
        yield side, made, groups
    finally:
        made.close()


def free_running(generator: pipeline_rl.Generator) -> None:
    """Empties the engine; from here on the generator waits for nobody."""
    drain(generator)
    generator.in_loop(lambda g: setattr(g, "pacer", pipeline_rl.Pacer(BATCH, 10**6, max_ready=10**9)))
    generator.release(0)  # admission looks again


def seconds_by_itself(generator: pipeline_rl.Generator, steps: int) -> float:
    """The seconds that it takes to sample a batch when it waits for nobody."""
    free_running(generator)
    generator.take(BATCH)  # the engine fills up first
    seconds = timed(lambda: [generator.take(BATCH) for _ in range(steps)])
    drain(generator)
    return seconds / steps


def drain(generator: pipeline_rl.Generator) -> None:
    """Lets nothing more in and waits until the engine is empty."""

    def stop(g: pipeline_rl.Generator) -> int:
        g.pacer.capacity = g.pacer.min_ready = 0
        return len(g.under_way)

    generator.settle()
    generator.take(generator.in_loop(stop))


# ---------------------------------------------------------------------------------------- programs and helper processes


class Program:
    """A training program in a process group of its own, which can be frozen; it writes metrics.jsonl, a line a step."""

    def __init__(self, command: Sequence[str], folder: Path, threads: int):
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.threads, self.folder, self.log = threads, folder, (folder.parent / f"{folder.name}.log").open("w")
        where = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": str(threads)}, "start_new_session": True}
        command = [*command, "--output_dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, **where)
        self.peak_memory = 0  # bytes, of the moments at which `watch_memory` looked
        self.next_look = time.monotonic()

    def records(self, name: str) -> list[Record]:
        """The records of steps or evaluations so far."""
        return [record for record in Folder(self.folder).read(name) if "step" in record]

    def advance(self, count: int) -> float:
        """Thaws it for `count` more steps; returns the seconds that they take. Raises RuntimeError if it ends."""
        target = len(self.records("metrics.jsonl")) + count
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        while len(self.records("metrics.jsonl")) < target:
            if self.ended():
                raise RuntimeError(f"{self.folder.name} ended before its step {target}")
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return seconds

    def ended(self) -> bool:
        """Whether it came to its end. Raises RuntimeError with its last words if it failed."""
        code = self.process.poll()
        if code:
            raise RuntimeError(f"{self.folder.name} ended with {code}:\n{Path(self.log.name).read_text()[-2000:]}")
        return code == 0

    def processes(self) -> list[psutil.Process]:
        """Its process and its descendants (the engine is one)."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """CPU time of its processes."""
        found = [process.cpu_times() for process in self.processes()]
        return sum(times.user + times.system for times in found)

    def watch_memory(self) -> None:
        """Remembers how much memory its processes hold now if that is the most so far; shared pages count once. It
        looks every five seconds at most, since a look takes time that the program would have."""
        if time.monotonic() < self.next_look:
            return
        held, self.next_look = 0, time.monotonic() + 5
        with suppress(psutil.NoSuchProcess):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one that ends meanwhile
                    held += process.memory_full_info().pss
        self.peak_memory = max(self.peak_memory, held)

    def close(self) -> None:
        """Ends it."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                self._signal(signal.SIGCONT)
                self._signal(number)
                self.process.wait(timeout=patience)
        self.log.close()

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def ours(*arguments: str) -> list[str]:
    """The command line of a run of train.py."""
    return [sys.executable, "train.py", *CHAIN, *arguments]


def helper(make: Callable[..., Callable[[Any], Any]], *args: object, **environment: str) -> ProcessPoolExecutor:
    """A process of its own, whose `submit(call, request)` calls what `make(*args)` returned there; between calls it
    waits and takes no CPU."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), _make, (make, *args))
    with mock.patch.dict(os.environ, environment):
        pool.submit(os.getpid)  # the first call starts the process, which keeps this environment
    return pool


def _make(make: Callable[..., Callable[[Any], Any]], *args: object) -> None:
    global _function
    _function = make(*args)


def call(request: object) -> Any:
    """In a helper."""
    return _function(request)
