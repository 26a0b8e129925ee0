"""Where the time goes: against the limit of this machine, and against what a user would pick instead.

    python tools/benchmark.py generator      our Generator beside a busy trainer; bare vLLM on the same lengths
    python tools/benchmark.py trainer        our step; the best bare forward + backward + AdamW; two processes
    python tools/benchmark.py head           the FP32 head; full logits and log_softmax
    python tools/benchmark.py overlap        wall time per step of each schedule; either side alone
    python tools/benchmark.py sync           how long an update stalls generation, by model size
    python tools/benchmark.py scale          cost per trained token as completions and batches grow
    python tools/benchmark.py peer           TRL's GRPOTrainer in its own environment: completions a second
    python tools/benchmark.py race           wall time and tokens to a held-out pass rate, schedule by schedule
    python tools/benchmark.py pacer          how busy the engine is where lengths vary; the lags that --min_ready holds

Every figure is a ratio of cases that took turns in one run (A B A B ...), so that what else the machine does falls on
all of them: the median over the turns, with the smallest and the largest. Each command prints a table and one JSON line
with every single measurement, the machine, the date, and the load average before and after.

To keep the work the same from turn to turn the policy stands still (a learning rate of 1e-12: the step is computed and
changes nothing), no prompt is retired, and no row is filtered, unless the command says otherwise.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from contests import pacer, peer, race
from measuring import QUIET, ROOT, SIZES, Figure, Measured, Report, random_model, ratios, take_turns, timed

import pipeline_rl
import train
from runtime import model as policies
from runtime.flags import parse_flags
from tasks import chain
from tasks.prompts import Problem

STILL = ["--lr", "1e-12", "--pass_rate_threshold", "2", "--zero_variance_filter", "false"]

# ---------------------------------------------------------------------------------------------- a product to measure


@contextmanager
def product(*arguments: str, seed: int = 0, threads: int = 1) -> Iterator[train.Run]:
    """A started run of train.py, silent, in a folder that goes away with it."""
    folder = tempfile.mkdtemp(prefix="scalerl-benchmark-")
    more = ["--output_dir", folder, "--seed", str(seed), "--threads", str(threads)]
    run = None
    try:
        with pipeline_rl.environment({"OMP_NUM_THREADS": str(threads)}):
            run = train.Run(parse_flags([*QUIET, *more, *arguments], train.__doc__))
            run.say = run.finish = lambda *_: None  # no lines, and no evaluation and model file at the end
            run.step, run.evaluated = 1, 0  # step 0 would probe
            run.start()
        yield run
    finally:
        if run is not None:
            run.close()
        shutil.rmtree(folder, ignore_errors=True)


def drain(run: train.Run) -> list[pipeline_rl.Group]:
    """Lets nothing more in, waits until the engine is empty, and returns what it had."""
    generator = run.generator
    generator.settle()
    running = generator.in_loop(lambda g: setattr(g.pacer, "capacity", 0) or len(g.running))
    return generator.take(running)


def use_schedule(run: train.Run, schedule: str, k: int, max_ready: int | None = None) -> None:
    """Empties the engine and goes on under another schedule."""
    drain(run)
    run.flags.schedule, run.flags.k = schedule, k
    pacer = pipeline_rl.Pacer(run.flags.batch_prompts, k, schedule=schedule, max_ready=max_ready)
    run.generator.in_loop(lambda g: setattr(g, "pacer", pacer))
    run.generator.release(0)  # admission looks again


def steps(run: train.Run, count: int) -> None:
    """`count` steps of train.py's own loop."""
    run.flags.max_steps = run.step + count
    train.train(run)


def unpaced(run: train.Run) -> None:
    """From here on the generator waits for nobody."""
    use_schedule(run, "pipeline", 10**6, 10**9)


def record_groups(run: train.Run, batches: int) -> list[list[pipeline_rl.Group]]:
    """Batches of groups to train on again and again."""
    unpaced(run)
    size = run.flags.batch_prompts
    found = [run.generator.take(size) for _ in range(batches)]
    drain(run)
    return found


def train_once(run: train.Run, groups: list[pipeline_rl.Group]) -> int:
    """One optimiser step on recorded groups, as the loop takes it; returns the tokens trained."""
    batch, _ = train.make_batch(groups, run.flags, random.Random(0))
    run.trainer.gradients(batch)
    run.trainer.update(run.version)
    return int(batch.mask.sum())


def cpu_seconds() -> float:
    """CPU time of this process and its descendants (the engine is one)."""
    import psutil

    me = psutil.Process()
    found = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(times.user + times.system for times in found)


# ------------------------------------------------------------------------------------------- helpers in other processes


class Helper:
    """A function in a process of its own: `make(*args)` there returns it; between calls it waits and takes no CPU."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *args: Any, **environment: str):
        self.pipe, there = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(target=_serve, args=(there, make, args))
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        self.process.start()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        there.close()

    def send(self, request: Any) -> None:
        """Starts a call."""
        self.pipe.send(request)

    def result(self) -> Any:
        """Waits for the call. Raises EOFError if the process ended."""
        return self.pipe.recv()

    def ask(self, request: Any) -> Any:
        """One call."""
        self.send(request)
        return self.result()

    def close(self) -> None:
        """Ends the process."""
        self.pipe.close()
        self.process.join(timeout=5)
        self.process.kill()


def _serve(pipe: Any, make: Callable[..., Callable[[Any], Any]], args: tuple) -> None:
    function = make(*args)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(function(request))


# ------------------------------------------------------------------------------------------------------------ generator

Request = tuple[list[int], int]  # prompt, completion tokens
ONE_CORE = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip


def bare_vllm(model: str, eager: bool) -> Callable[[list[Request]], float]:
    """In a helper: seconds that vLLM's offline `LLM.generate` takes for these prompts and lengths, on one core."""
    os.sched_setaffinity(0, {0})
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", enforce_eager=eager, skip_tokenizer_init=True, max_model_len=128, seed=0,
              max_num_seqs=256, block_size=32, generation_config="vllm", disable_log_stats=True)  # fmt: skip

    def generate(requests: list[Request]) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
                  for _, length in requests]  # fmt: skip
        return timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    return generate


def sampled_per_second(run: train.Run, seconds: float, work: Callable[[], Any]) -> float:
    """Tokens a second of the running generator while this thread repeats `work`."""
    counters = run.generator.counters
    while run.generator.in_loop(lambda g: g.pacer.ready) < 1:  # past the ramp
        time.sleep(0.05)
    work()
    started, before = time.perf_counter(), counters.sampled
    while time.perf_counter() < started + seconds:
        work()
    return (counters.sampled - before) / (time.perf_counter() - started)


def generator(args: argparse.Namespace) -> dict[str, Any]:
    """Our Generator alone and under the training load (steps and pushes), and bare vLLM, eager and compiled."""
    report = Report(args)
    with product(*STILL, seed=args.seed) as run:
        batches = record_groups(run, 4)
        rollouts = [(group, rollout) for groups in batches for group in groups for rollout in group.rollouts]
        requests = [(list(g.problem.prompt_ids), sum(r.mask)) for g, r in rollouts]
        tokens = sum(length for _, length in requests)
        turn = iter(range(10**9))

        def load() -> None:
            run.generator.take(run.flags.batch_prompts)  # a step for each batch sampled, as in training
            train_once(run, batches[next(turn) % len(batches)])
            run.push(0, True)

        def ours(work: Callable[[], Any]) -> float:
            unpaced(run)
            rate = sampled_per_second(run, args.seconds, work)
            drain(run)
            return rate

        model = run.generator.model
        bare = {name: Helper(bare_vllm, model, name == "eager", **ONE_CORE) for name in ("eager", "compiled")}
        try:
            for helper in bare.values():
                helper.ask(requests[:64])
            cases = {"ours, trainer stopped": lambda: ours(lambda: time.sleep(0.02)),
                     "ours, trainer at work": lambda: ours(load)}  # fmt: skip
            cases |= {f"bare vLLM, {name}": lambda h=h: tokens / h.ask(requests) for name, h in bare.items()}
            found = take_turns(cases, args.repeats)
        finally:
            for helper in bare.values():
                helper.close()
    report.add(found, "tokens/s")
    best = max((name for name in found if "bare" in name), key=lambda name: statistics.median(found[name]))
    busy, alone = found["ours, trainer at work"], found["ours, trainer stopped"]
    report.figures = [
        Figure("ours, trainer at work / trainer stopped", ratios(busy, alone), least=0.9),
        Figure(f"ours, trainer at work / {best}", ratios(busy, found[best]), least=0.8),
        Figure(f"ours, trainer stopped / {best}", ratios(alone, found[best])),
    ]
    return report.close()


# -------------------------------------------------------------------------------------------------------------- trainer


class BareLoop:
    """Forward, backward, AdamW on tensors that are ready: what the hardware allows with this model and these rows."""

    def __init__(self, model: str, batch: train.TrainingBatch, cut: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        lengths = [len(row) for row in batch.rows]
        order = list(range(len(lengths)))
        kind, size = cut.split()
        if kind == "tokens":
            pieces = policies.cut_rows(lengths, order, int(size), packed=False)
        else:
            order = order if kind == "unsorted" else sorted(order, key=lambda i: -lengths[i])
            pieces = [order[i : i + int(size)] for i in range(0, len(order), int(size))]
        width = batch.mask.shape[1]
        self.pieces = [
            (policies.make_microbatch(batch.rows, piece, width), *self._terms(batch, piece)) for piece in pieces
        ]

    @staticmethod
    def _terms(batch: train.TrainingBatch, piece: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the piece's trained tokens: the generator's log-probs, and weight times advantage."""
        mask = batch.mask[piece]
        return batch.behaviour_logprobs[piece][mask], (batch.weights[piece] * batch.advantages[piece, None])[mask]

    def step(self) -> None:
        """The same loss as ours, in one line."""
        for microbatch, behaviour, factor in self.pieces:
            hidden = self.model.base_model(input_ids=microbatch.input_ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[microbatch.read])  # (M, V)
            logprobs = logits.log_softmax(-1).gather(1, microbatch.targets[:, None]).squeeze(1)
            rho = (logprobs.detach() - behaviour).exp().clamp(max=5.0)
            (-(rho * factor * logprobs)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank(model: str, batches: list, seed: int, index: int, ranks: int) -> Callable[[int], float]:
    """In a helper: one of several trainer processes; seconds for that many steps."""
    from accelerate import Accelerator

    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="scalerl-rank-")
    flags = parse_flags([*STILL, "--output_dir", folder, "--seed", str(seed)], train.__doc__)
    shutil.rmtree(folder)
    trainer = train.Trainer(flags, Accelerator(cpu=True), model)
    prepared = [train.make_batch(groups, flags, random.Random(0))[0] for groups in batches]

    def run_steps(count: int) -> float:
        started = time.perf_counter()
        for i in range(count):
            trainer.gradients(prepared[i % len(prepared)])
            trainer.update(0)
        return time.perf_counter() - started

    return run_steps


CUTS = ("unsorted 64", "sorted 32", "sorted 64", "sorted 128", "tokens 1024", "tokens 2048", "tokens 4096")


def trainer(args: argparse.Namespace) -> dict[str, Any]:
    """Our step against the best of several bare loops, and against itself with two threads and two processes."""
    report = Report(args)
    with product(*STILL, seed=args.seed) as run:
        batches = record_groups(run, 2)
        made = [train.make_batch(groups, run.flags, random.Random(0))[0] for groups in batches]
        model, tokens = run.generator.model, int(sum(batch.mask.sum() for batch in made))
        run.generator.close()  # the engine is not needed any more

        def ours(threads: int) -> float:
            torch.set_num_threads(threads)
            seconds = timed(lambda: [train_once(run, groups) for groups in batches])
            torch.set_num_threads(1)
            return tokens / seconds

        loops = {cut: [BareLoop(model, batch, cut) for batch in made] for cut in CUTS}
        bare = {f"bare, {cut}": lambda loop=loop: tokens / timed(lambda: [one.step() for one in loop])
                for cut, loop in loops.items()}  # fmt: skip
        tried = take_turns(bare, 2)
        best = max(tried, key=lambda name: max(tried[name]))
        both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 60000)), "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        pair = [Helper(rank, model, batches, args.seed, i, 2, RANK=str(i), LOCAL_RANK=str(i), **both) for i in (0, 1)]

        def two_processes() -> float:
            for helper in pair:
                helper.send(len(batches))
            return tokens / max(helper.result() for helper in pair)

        try:
            two_processes()
            ours(1)
            cases = {"ours": lambda: ours(1), best: bare[best], "ours, 2 threads": lambda: ours(2),
                     "ours, 2 processes": two_processes}  # fmt: skip
            found = take_turns(cases, args.repeats)
        finally:
            for helper in pair:
                helper.close()
    report.add(found, "tokens/s")
    report.add({f"{name} (2 turns)": values for name, values in tried.items() if name != best}, "tokens/s")
    report.figures = [
        Figure(f"ours / {best}, the best bare loop", ratios(found["ours"], found[best]), least=0.9),
        Figure("2 processes / 1", ratios(found["ours, 2 processes"], found["ours"])),
        Figure("2 threads / 1", ratios(found["ours, 2 threads"], found["ours"])),
    ]
    return report.close()


# ----------------------------------------------------------------------------------------------------------------- head


def head_case(kind: str, vocabulary: int, hidden_size: int, tokens: int, threads: int) -> Callable[[str], float]:
    """In a helper: seconds of one forward and backward pass, or its peak of bytes beyond inputs, weight and weight
    gradient."""
    import fp32_head

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(tokens, hidden_size, device=device, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size, device=device) / math.sqrt(hidden_size)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def forward(rows: int = tokens) -> torch.Tensor:
        h, y = hidden[:rows], targets[:rows]
        if kind == "ours":
            return fp32_head.token_logprobs(h, weight, y)[0].sum()
        if kind == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, h, y)
        return (h @ weight.T).log_softmax(-1).gather(1, y[:, None]).sum()

    def once(rows: int = tokens) -> None:
        forward(rows).backward()
        hidden.grad = weight.grad = None
        if device == "cuda":
            torch.cuda.synchronize()

    def measure(what: str) -> float:
        if what == "seconds":
            return timed(once)
        forget_peak()
        before = peak()
        loss = forward()
        first = peak() - before
        forget_peak()
        loss.backward()  # its peak has the weight gradient in it
        return max(first, peak() - before - weight.numel() * weight.itemsize)

    once(8)  # libraries get their own memory
    return measure


def forget_peak() -> None:
    """`peak` starts anew from what is allocated now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes allocated since `forget_peak`: of the GPU, or of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def head_errors(vocabulary: int, hidden_size: int, tokens: int) -> tuple[float, float]:
    """(largest |log-prob - float64's|, relative error of the gradients) of the same computation in float64."""
    import fp32_head

    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size)
    weight = torch.randn(vocabulary, hidden_size) / math.sqrt(hidden_size)
    targets = torch.randint(vocabulary, (tokens,))

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        h, w = (x.to(dtype).detach().requires_grad_() for x in (hidden, weight))
        if dtype == torch.float64:
            logprobs = (h @ w.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        else:
            logprobs = fp32_head.token_logprobs(h, w, targets)[0]
        logprobs.mean().backward()
        return logprobs.detach(), h.grad, w.grad

    (ours, *grads), (true, *true_grads) = gradients(torch.float32), gradients(torch.float64)
    error = max(float((g - t).norm() / t.norm()) for g, t in zip(grads, true_grads, strict=True))
    return float((ours - true).abs().max()), error


def head(args: argparse.Namespace) -> dict[str, Any]:
    """The FP32 head against full logits: time and memory at each vocabulary, and errors."""
    report = Report(args)
    kinds = ["ours", "full logits", *(["liger"] if torch.cuda.is_available() else [])]
    for vocabulary in args.vocabularies:
        helpers = {kind: Helper(head_case, kind, vocabulary, args.hidden, args.tokens, args.threads,
                                OMP_NUM_THREADS=str(args.threads)) for kind in kinds}  # fmt: skip
        try:
            cases = {f"{kind}, V = {vocabulary:,}": lambda h=h: h.ask("seconds") for kind, h in helpers.items()}
            memory = {f"{kind}, V = {vocabulary:,}, memory": [h.ask("bytes") / 2**20] for kind, h in helpers.items()}
            found = take_turns(cases, args.repeats)
        finally:
            for helper in helpers.values():
                helper.close()
        report.add(found, "s")
        report.add(memory, "MiB")
        ours, full, *_ = found.values()
        used = next(iter(memory.values()))[0] * 2**20
        large = vocabulary > 100_000  # the targets are for this one
        report.figures += [
            Figure(f"time / full logits, V = {vocabulary:,}", ratios(ours, full), most=1.5 if large else None),
            Figure(f"peak memory / one (M, V) tensor, V = {vocabulary:,}", [used / (args.tokens * vocabulary * 4)],
                   most=0.1 if large else None),
        ]  # fmt: skip
    rows = min(args.tokens, args.check_tokens)
    error, gradient = head_errors(max(args.vocabularies), args.hidden, rows)
    report.figures += [Figure(f"largest log-prob error against float64, {rows} tokens", [error], most=1e-5),
                       Figure(f"relative gradient error against float64, {rows} tokens", [gradient])]  # fmt: skip
    return report.close()


# -------------------------------------------------------------------------------------------------------------- overlap

SCHEDULES = (("pipeline", 8), ("pipeline", 1), ("pipeline", 0), ("ppo_off_policy", 1), ("ppo_off_policy", 8))


@dataclass
class Segment:
    """Per step of one schedule in one turn, in seconds."""

    wall: float
    cpu: float  # of all processes
    generator_idle: float
    trainer_idle: float
    sync: float


def segment(run: train.Run, schedule: str, k: int, count: int) -> Segment:
    """`count` steps, rounded up to whole rounds of k updates, after one round that nobody times."""
    round_of = k if schedule == "ppo_off_policy" else 1
    count = -(-count // round_of) * round_of
    use_schedule(run, schedule, k)
    steps(run, max(round_of, 3))
    logged = len(run.folder.read("metrics.jsonl"))
    cpu, started = cpu_seconds(), time.perf_counter()
    steps(run, count)
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    records = run.folder.read("metrics.jsonl")[logged:]
    waits = [sum(record[name] for record in records) for name in ("generator_idle", "trainer_idle", "sync_seconds")]
    return Segment(*(x / count for x in (wall, cpu, *waits)))


def overlap(args: argparse.Namespace) -> dict[str, Any]:
    """Each schedule's step, beside either side alone: how much of the time is hidden behind the other side."""
    report, found = Report(args), {}
    with product(*STILL, seed=args.seed, threads=args.threads) as run:
        groups = record_groups(run, 1)[0]
        size = run.flags.batch_prompts

        def generation() -> float:
            unpaced(run)
            run.generator.take(size)  # the ramp
            return timed(lambda: [run.generator.take(size) for _ in range(args.steps)]) / args.steps

        def training() -> float:
            drain(run)
            return timed(lambda: [train_once(run, groups) for _ in range(args.steps)]) / args.steps

        def one(schedule: str, k: int) -> float:
            found.setdefault((schedule, k), []).append(segment(run, schedule, k, args.steps))
            return found[schedule, k][-1].wall

        cases = {"generation alone": generation, "training alone": training}
        cases |= {f"{s} {k}": lambda s=s, k=k: one(s, k) for s, k in SCHEDULES}
        measured = take_turns(cases, args.repeats)
    report.add(measured, "s a step")
    sides = list(zip(measured["generation alone"], measured["training alone"], strict=True))
    for (schedule, k), segments in found.items():
        name = f"{schedule} {k}"
        report.add({f"{name}, core-seconds": [one.cpu for one in segments]}, "s a step")
        limit = [max(*side, one.cpu / os.cpu_count()) for side, one in zip(sides, segments, strict=True)]
        target = 0.9 if name == "pipeline 8" else None
        report.figures += [
            Figure(f"{name}: efficiency", ratios(limit, [one.wall for one in segments]), least=target),
            Figure(f"{name}: trainer idle", [one.trainer_idle / one.wall for one in segments]),
            Figure(f"{name}: generator idle", [(one.generator_idle + one.sync) / one.wall for one in segments]),
        ]
        if name != "pipeline 8":
            walls = ratios(measured[name], measured["pipeline 8"])
            report.figures.append(Figure(f"{name} / pipeline 8, wall time a step", walls))
    return report.close()


# ----------------------------------------------------------------------------------------------------------------- sync


def bare_update(run: train.Run) -> float:
    """Seconds of vLLM's pause, our receiver, resume: nothing around them, and the trainer stands still."""
    generator = run.generator

    async def update() -> float:
        engine = generator._engine
        started = time.perf_counter()
        await engine.pause_generation(mode="keep", clear_cache=False)
        await generator._load_weights(engine)
        await engine.resume_generation()
        return time.perf_counter() - started

    time.sleep(0.2)
    return generator._call(update())


def stall(run: train.Run, updates: int, work: Callable[[], Any]) -> tuple[float, float]:
    """(mean seconds that an update stalls generation, seconds of one round) while this thread repeats `work`."""
    counters = run.generator.counters
    seconds, started = counters.sync_seconds, time.perf_counter()
    for _ in range(updates):
        work()
        run.push(0, True)
    run.generator.settle()
    return (counters.sync_seconds - seconds) / updates, (time.perf_counter() - started) / updates


def updates_of(size: str, seed: int, updates: int) -> Callable[[int], tuple[str, Measured, Measured]]:
    """In a helper, since vLLM keeps the environment of its first engine: what `sync` measures of one model."""

    def measure(repeats: int) -> tuple[str, Measured, Measured]:
        with tempfile.TemporaryDirectory() as folder:
            more = [] if size == "0.2M" else ["--model", random_model(Path(folder), size), "--batch_prompts", "2"]
            with product(*STILL, *more, seed=seed) as run:
                groups, shares = record_groups(run, 1)[0], []
                unpaced(run)
                run.generator.take(1)

                def at_work() -> float:
                    stalled, round_of = stall(run, updates, lambda: train_once(run, groups))
                    shares.append(stalled / round_of)
                    return stalled

                found = take_turns({
                    "update, trainer at work": at_work,
                    "update, trainer stopped": lambda: stall(run, updates, lambda: time.sleep(0.2))[0],
                    "bare pause, update, resume": lambda: statistics.mean(bare_update(run) for _ in range(updates)),
                }, repeats)  # fmt: skip
                weights = list(run.trainer.model.parameters())
                moved = sum(p.numel() for p in weights) * run.trainer.dtype.itemsize / 1e6
                rates = [moved / seconds for seconds in found["update, trainer at work"]]
                return f"{sum(p.numel() for p in weights) / 1e6:.2f}M", found, {"share": shares, "rate": rates}

    return measure


def sync(args: argparse.Namespace) -> dict[str, Any]:
    """The stall of an update beside a busy trainer, beside an idle one, and of the bare calls; by model size."""
    report = Report(args)
    for size in args.sizes:
        helper = Helper(updates_of, size, args.seed, args.updates)
        try:
            parameters, found, more = helper.ask(args.repeats)
        finally:
            helper.close()
        report.add({f"{parameters}: {name}": values for name, values in found.items()}, "s")
        busy, alone, bare = found.values()
        report.figures += [
            Figure(f"{parameters}: trainer at work / bare", ratios(busy, bare), most=1.2),
            Figure(f"{parameters}: trainer stopped / bare", ratios(alone, bare)),
            Figure(f"{parameters}: stall / step", more["share"]),
            Figure(f"{parameters}: MB/s moved, of the stall", more["rate"]),
        ]
    return report.close()


# ---------------------------------------------------------------------------------------------------------------- scale


def synthetic(rollouts: int, length: int, size: int = 16) -> list[pipeline_rl.Group]:
    """Groups of random completions of about `length` tokens (uniform in half to one and a half times of it)."""
    rng, groups = random.Random(0), []
    for number in range(rollouts // size):
        made = []
        for _ in range(size):
            n = rng.randint(length // 2, length + length // 2)
            ids = [rng.randrange(4, len(chain.WORDS)) for _ in range(n)]
            right = rng.random() < 0.5
            reward = 1.0 if right else -1.0
            made.append(pipeline_rl.Rollout(ids, [-2.0] * n, [0] * n, [1] * n, "stop", reward=reward, correct=right))
        problem = Problem(str(number), tuple(rng.randrange(4, 30) for _ in range(12)), "")
        groups.append(pipeline_rl.Group(number, problem, 0, made))
    return groups


def no_attention(
    module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Each position takes its own value: attention's inputs and outputs, without the part that grows with length."""
    heads = query.shape[1] // value.shape[1]
    return value.repeat_interleave(heads, 1).transpose(1, 2).contiguous(), None


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """Cost per trained token against completion length at equal tokens, with and without attention, and against the
    number of rollouts."""
    from accelerate import Accelerator
    from transformers import AttentionInterface

    AttentionInterface.register("none", no_attention)
    report = Report(args)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), args.size, context=4096)
        flags = parse_flags([*STILL, "--output_dir", f"{folder}/run"], train.__doc__)
        made = train.Trainer(flags, Accelerator(cpu=not torch.cuda.is_available()), model)

        def cost(groups: list[pipeline_rl.Group], attention: str = "sdpa") -> float:
            made.model.set_attn_implementation(attention)
            started = time.perf_counter()
            batch, _ = train.make_batch(groups, flags, random.Random(0))
            made.gradients(batch)
            made.update(0)
            return 1e6 * (time.perf_counter() - started) / int(batch.mask.sum())

        lengths = {n: synthetic(max(16, args.tokens // n // 16 * 16), n) for n in args.lengths}
        sizes = {n: synthetic(n, 32) for n in args.rollouts}
        cost(next(iter(lengths.values())))
        cases = {f"{n} tokens": lambda g=g: cost(g) for n, g in lengths.items()}
        cases |= {f"{n} tokens, without attention": lambda g=g: cost(g, "none") for n, g in lengths.items()}
        cases |= {f"{n} rollouts of 32 tokens": lambda g=g: cost(g) for n, g in sizes.items()}
        found = take_turns(cases, args.repeats)
    report.add(found, "µs a token")
    first = min(args.lengths)
    for n in args.lengths:
        grown = ratios(found[f"{n} tokens"], found[f"{first} tokens"])
        report.figures.append(Figure(f"{n} / {first} tokens", grown, most=1.5 if n == 512 else None))
        rest = ratios(found[f"{n} tokens, without attention"], found[f"{first} tokens, without attention"])
        report.figures.append(Figure(f"{n} / {first} tokens, without attention", rest))
    fewest = min(args.rollouts)
    for n in args.rollouts:
        grown = ratios(found[f"{n} rollouts of 32 tokens"], found[f"{fewest} rollouts of 32 tokens"])
        report.figures.append(Figure(f"{n} / {fewest} rollouts", grown))
    return report.close()


# --------------------------------------------------------------------------------------------------------- command line


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def contestant_name(text: str) -> str:
    """`pipeline-8:1`, `ppo_off_policy-1:2`, `trl:2`."""
    label, _, threads = text.partition(":")
    schedule, _, k = label.rpartition("-")
    known = label == "trl" or (schedule in ("pipeline", "ppo_off_policy") and k.isdigit())
    if not known or not threads.isdigit() or int(threads) < 1 or label == "ppo_off_policy-0":
        kinds = "pipeline-K:THREADS, ppo_off_policy-K:THREADS or trl:THREADS"
        raise argparse.ArgumentTypeError(f"must be {kinds}, not {text!r}")
    return text


def other_environment(text: str) -> Path:
    """A folder for TRL, not ours: its packages would replace those of this project."""
    folder = Path(text).resolve()
    if folder == Path(sys.prefix).resolve() or (ROOT / ".venv") in (folder, *folder.parents):
        raise argparse.ArgumentTypeError(f"must be an environment of its own, not {text}")
    return folder


def pipeline_file(text: str) -> Path:
    """A checkout's pipeline_rl.py."""
    path = Path(text).resolve()
    if path.name != "pipeline_rl.py" or not path.is_file():
        raise argparse.ArgumentTypeError(f"must be the pipeline_rl.py of another checkout, not {text}")
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(function: Callable[..., Any], **options: Any) -> argparse.ArgumentParser:
        one = commands.add_parser(function.__name__, help=function.__doc__.split("\n")[0])
        one.set_defaults(function=function)
        one.add_argument("--repeats", type=positive, default=5, help="turns of each case")
        one.add_argument("--seed", type=int, default=0)
        for name, (default, text) in options.items():
            kind = {"environment": other_environment, "contestants": contestant_name, "seeds": int,
                    "pipeline": pipeline_file}.get(name)  # fmt: skip
            first = default[0] if isinstance(default, list) else default
            kind = kind or {int: positive, float: above_zero, str: str}[type(first)]
            many = {"nargs": "+"} if isinstance(default, list) else {}
            choices = {"choices": list(SIZES)} if name in ("size", "sizes") else {}
            one.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})", **many, **choices)
        return one

    threads, environment = (1, "CPU threads of each side"), ("/tmp/trl-venv", "TRL's environment, made if missing")
    command(generator, seconds=(6.0, "length of a turn of ours"))
    command(trainer)
    command(head, vocabularies=([32_000, 151_936], "vocabulary sizes"), hidden=(256, "hidden size"), threads=threads,
            tokens=(4096, "tokens"), check_tokens=(512, "tokens compared with float64"))  # fmt: skip
    command(overlap, steps=(8, "steps of a turn"), threads=threads)
    command(sync, sizes=(["0.2M", "2M", "8M", "32M"], "model sizes"), updates=(4, "updates of a turn"))
    command(scale, size=("0.2M", "model size"), threads=threads, tokens=(16_384, "trained tokens of a batch"),
            lengths=([32, 128, 512, 2048], "mean completion lengths"),
            rollouts=([128, 512, 1024, 4096], "rollouts of a batch, 32 tokens each"))  # fmt: skip
    command(peer, size=("0.2M", "model size; others than 0.2M sample up to 256 tokens"), steps=(6, "steps of a turn"),
            batch_prompts=(32, "prompts of a step"), microbatch=(64, "TRL's completions per forward pass"),
            environment=environment)  # fmt: skip
    command(race, contestants=(["pipeline-8:1", "ppo_off_policy-8:2", "ppo_off_policy-1:2", "trl:2"], "NAME-K:THREADS"),
            seeds=([0, 1, 2], "seeds"), rate=(0.9, "held-out pass rate"), limit=(330.0, "seconds of one contestant"),
            max_steps=(200, "steps at most"), output_dir=("runs/race", "folder of the runs"),
            environment=environment)  # fmt: skip
    command(pacer, pipeline=(None, "pipeline_rl.py of another checkout to compare with"), batch_prompts=(32, "B"),
            rollouts=(8, "G"), k=(8, "most steps off-policy"), slots=(256, "of the engine"),
            mean=(30, "tokens of a completion"), sigma=(0.6, "of the logarithm of lengths"), steps=(30, "of a case"),
            ratio=(0.8, "a training step / the engine's time for a batch"), lags=([2, 4, 6], "to hold"))  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs one command and returns what it prints as JSON."""
    args = parse(argv)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no helper is left behind
    return args.function(args)


if __name__ == "__main__":
    main()
