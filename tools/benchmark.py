"""Six questions about speed, each answered by cases that take turns: BENCHMARKS.md has what was seen.

    python tools/benchmark.py generator | trainer | head | overlap | sync | pacer
    python tools/benchmark.py head --vocabularies 32000 --repeats 3

generator   Sampled tokens a second of our Generator, with a trainer at work (one step and one push for every batch
            that is sampled, as in training) and without, and of `LLM.generate`, compiled, on the same lengths.
trainer     Our training step against the best of several bare loops: forward, backward, AdamW and nothing else, which
            is what the hardware allows with this model and these rows. Two threads and two processes against one.
head        The FP32 head against full logits and log_softmax: time; what memory a forward and backward pass takes
            beyond inputs, weight and weight gradient, as a share of one FP32 (tokens, vocabulary) tensor; the error
            against float64; and what a bfloat16 head rounds off, which grows with the largest logit.
overlap     Wall time of a step under each schedule, and of either side by itself. The efficiency is the longest of
            generation by itself, training by itself, and CPU time over cores, divided by the wall time of a step: 1 is
            the best there can be.
sync        How long an update of the weights stalls generation (pause, load, resume), by model size: in a pipeline 8
            steps deep, and on-policy, where the engine is empty and the trainer waits.
pacer       How busy the pacer keeps an engine whose completions vary in length, and which lags `--min_ready` holds at
            what cost: real vLLM, and a trainer that sleeps for RATIO of the engine's time and really pushes.
"""

import argparse
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import subjects
import torch
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns, timed
from subjects import QUIET, SIZES, STILL, Helper, Program, TrainerSide

import fp32_head
import pipeline_rl
from runtime.flags import parse_flags
from runtime.model import cut_rows, make_microbatch
from runtime.trainer import TrainingBatch

BATCH = 32  # prompts of a step


# ------------------------------------------------------------------------------------------------------------ generator

SECONDS = 6.0  # of a turn of ours
ONE_CORE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


def generator(args: argparse.Namespace, report: Report) -> None:
    model = subjects.warm_model(args.seed)
    torch.set_num_threads(1)
    side = TrainerSide(model, args.seed)
    weights, versions = side.trainer.weights, itertools.count(1)
    with ExitStack() as until_the_end:
        made = until_the_end.enter_context(subjects.built_in_generator(model, weights, args.seed))
        subjects.free_running(made, BATCH)
        groups = made.take(4 * BATCH)
        subjects.drain(made)
        batches = itertools.cycle([groups[i : i + BATCH] for i in range(0, len(groups), BATCH)])
        requests = [(list(g.problem.prompt_ids), sum(r.mask)) for g in groups for r in g.rollouts]
        tokens = sum(length for _, length in requests)

        def train() -> None:
            made.take(BATCH)  # a step for each batch sampled
            side.step(side.batch(next(batches)))
            made.push(weights, next(versions), release=0)

        cases = {
            "ours, trainer stopped": lambda: sampled_per_second(made, lambda: time.sleep(0.02)),
            "ours, trainer at work": lambda: sampled_per_second(made, train),
        }
        helper = until_the_end.enter_context(closing(Helper(bare_vllm, model, **ONE_CORE)))
        helper.ask(requests[:64])
        found = take_turns(cases | {"bare vLLM": lambda: tokens / helper.ask(requests)}, args.repeats)
    report.add(found, "tokens/s")
    calm, busy, bare = found.values()
    report.figures = [
        Figure("ours, trainer at work / trainer stopped", ratios(busy, calm), least=0.9),
        Figure("ours, trainer at work / bare vLLM", ratios(busy, bare), least=0.8),
    ]


def bare_vllm(model: str) -> Callable[[list[tuple[list[int], int]]], float]:
    """In a helper: seconds that vLLM's offline `LLM.generate` takes for prompts and their lengths, on one core."""
    os.sched_setaffinity(0, {0})
    from vllm import LLM, SamplingParams

    options = {"max_model_len": 128, "max_num_seqs": 256, "block_size": 32, "seed": 0, "generation_config": "vllm"}
    options |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    llm = LLM(model, dtype="float32", **options)

    def generate(requests: list[tuple[list[int], int]]) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        common = {"ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(max_tokens=length, **common) for _, length in requests]
        return timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    return generate


def sampled_per_second(made: pipeline_rl.Generator, work: Callable[[], object]) -> float:
    """Tokens a second of a generator that waits for nobody, while this thread repeats `work`."""
    subjects.free_running(made, BATCH)
    while made.in_loop(lambda g: g.pacer.ready) < 1:  # the engine fills up first
        time.sleep(0.05)
    work()
    started, before = time.perf_counter(), made.counters.sampled
    while time.perf_counter() < started + SECONDS:
        work()
    rate = (made.counters.sampled - before) / (time.perf_counter() - started)
    subjects.drain(made)
    return rate


# -------------------------------------------------------------------------------------------------------------- trainer

CUTS = ("unsorted 64", "sorted 32", "sorted 64", "sorted 128", "tokens 1024", "tokens 2048", "tokens 4096")
ROWS, LENGTH = 512, 23  # of a batch of the built-in task


class BareLoop:
    """Forward, backward, AdamW. `cut`: so many rows to a microbatch, sorted by length or not, or so many tokens."""

    def __init__(self, model: str, batch: TrainingBatch, cut: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        lengths, (kind, size) = [len(row) for row in batch.rows], cut.split()
        if kind == "tokens":
            pieces = cut_rows(batch.rows, range(len(lengths)), int(size), "padded")
        else:
            order = sorted(range(len(lengths)), key=lambda i: -lengths[i] if kind == "sorted" else i)
            pieces = [order[i : i + int(size)] for i in range(0, len(order), int(size))]
        factors = batch.token_weights * batch.advantages[:, None]  # (N, T)
        self.pieces = []  # of each microbatch: its input; of its tokens the generator's log-prob, weight x advantage
        for piece in pieces:
            mask, microbatch = batch.mask[piece], make_microbatch(batch.rows, piece, batch.mask.shape[1])
            self.pieces.append((microbatch, batch.behaviour_logprobs[piece][mask], factors[piece][mask]))

    def step(self) -> None:
        """One optimizer step with CISPO's loss in one line, on tensors that are ready."""
        for microbatch, behaviour, factor in self.pieces:
            hidden = self.model.base_model(input_ids=microbatch.input_ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[microbatch.read])  # (M, V)
            logprobs = logits.log_softmax(-1).gather(1, microbatch.targets[:, None]).squeeze(1)
            rho = (logprobs.detach() - behaviour).exp().clamp(max=5.0)
            (-(rho * factor * logprobs)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank(model: str) -> Callable[[int], float]:
    """In a helper: one of several trainer processes; the seconds that so many steps take."""
    torch.set_num_threads(1)
    side = TrainerSide(model)
    batch = side.batch(subjects.synthetic_groups(ROWS, LENGTH))
    return lambda count: timed(lambda: [side.step(batch) for _ in range(count)])


def trainer(args: argparse.Namespace, report: Report) -> None:
    model = subjects.warm_model(args.seed)
    torch.set_num_threads(1)
    side, groups = TrainerSide(model), subjects.synthetic_groups(ROWS, LENGTH)
    batch = side.batch(groups)
    tokens = 2 * int(batch.mask.sum())  # each case makes two steps

    def ours(threads: int) -> float:
        torch.set_num_threads(threads)
        seconds = timed(lambda: [side.step(side.batch(groups)) for _ in range(2)])
        torch.set_num_threads(1)
        return tokens / seconds

    def bare(loop: BareLoop) -> float:
        return tokens / timed(lambda: [loop.step() for _ in range(2)])

    ours(1)  # libraries get their own memory
    loops = {f"bare, {cut}": BareLoop(model, batch, cut) for cut in CUTS}
    tried = take_turns({name: lambda loop=loop: bare(loop) for name, loop in loops.items()}, 2)
    best = max(tried, key=lambda name: max(tried[name]))
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 60000)), "WORLD_SIZE": "2"}
    both |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as until_the_end:
        pair = [Helper(rank, model, RANK=str(i), LOCAL_RANK=str(i), **both) for i in (0, 1)]
        for helper in pair:
            until_the_end.enter_context(closing(helper))

        def two_processes() -> float:
            return tokens / max(call.result() for call in [helper.send(2) for helper in pair])

        two_processes()
        cases = {"ours": lambda: ours(1), best: lambda: bare(loops[best]), "ours, 2 threads": lambda: ours(2)}
        found = take_turns(cases | {"ours, 2 processes": two_processes}, args.repeats)
    report.add(found, "tokens/s")
    report.add({f"{name} (2 turns)": values for name, values in tried.items() if name != best}, "tokens/s")
    report.figures = [
        Figure(f"ours / {best}, the best bare loop", ratios(found["ours"], found[best]), least=0.9),
        Figure("2 processes / 1", ratios(found["ours, 2 processes"], found["ours"])),
        Figure("2 threads / 1", ratios(found["ours, 2 threads"], found["ours"])),
    ]


# ----------------------------------------------------------------------------------------------------------------- head

TOKENS, HIDDEN = 4096, 256
CHECKED = 512  # tokens compared with float64
SPREAD = 4.0  # standard deviation of the logits that are rounded: of 151,936 the largest is near 20
ROUNDED = 2**23  # how many of them, at most


def full_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) the same log-probs with all (M, V) logits in memory."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def our_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) by the chunked head."""
    return fp32_head.token_logprobs(hidden, weight, targets)[0]


HEADS = {"ours": our_logprobs, "full logits": full_logprobs}


def inputs(vocabulary: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, head and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / math.sqrt(HIDDEN)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def head_case(name: str, vocabulary: int) -> Callable[[str], float]:
    """In a helper: the `seconds` of one forward and backward pass, or its peak of `bytes`."""
    torch.set_num_threads(1)
    hidden, weight, targets = inputs(vocabulary, TOKENS)

    def once(rows: int = TOKENS) -> None:
        HEADS[name](hidden[:rows], weight, targets[:rows]).sum().backward()
        hidden.grad = weight.grad = None

    def measure(what: str) -> float:
        if what == "seconds":
            return timed(once)
        forget_peak()
        before = peak()
        loss = HEADS[name](hidden, weight, targets).sum()
        first = peak() - before
        forget_peak()
        loss.backward()  # its peak has the weight gradient in it
        return max(first, peak() - before - weight.numel() * weight.itemsize)

    once(8)  # libraries get their own memory
    return measure


def forget_peak() -> None:
    """`peak` starts anew from what is allocated now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@torch.no_grad()
def error(vocabulary: int) -> float:
    """Largest |log-prob - float64's|."""
    hidden, weight, targets = inputs(vocabulary, CHECKED)
    exact = full_logprobs(hidden.double(), weight.double(), targets)
    return float((our_logprobs(hidden, weight, targets) - exact).abs().max())


def rounding(vocabulary: int) -> dict[str, float]:
    """{product: mean |log-prob - float64's|} of tokens drawn from the policy, for a head in FP32 and in bfloat16."""
    rng = torch.Generator().manual_seed(0)
    tokens = min(TOKENS, max(1, ROUNDED // vocabulary))
    hidden = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()  # (M, H)
    weight = (torch.randn(vocabulary, HIDDEN, generator=rng) * SPREAD / math.sqrt(HIDDEN)).bfloat16()  # (V, H)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)  # (M, V)
    targets = torch.multinomial(exact.exp(), 1, generator=rng)  # (M, 1)
    true = exact.gather(1, targets).squeeze(1)
    return {
        name: (fp32_head.token_logprobs(hidden, weight, targets.squeeze(1), fp32=fp32)[0] - true).abs().mean().item()
        for name, fp32 in (("FP32", True), ("bfloat16", False))
    }


def head(args: argparse.Namespace, report: Report) -> None:
    for V in args.vocabularies:
        with ExitStack() as until_the_end:
            helpers = {name: Helper(head_case, name, V, OMP_NUM_THREADS="1") for name in HEADS}
            for helper in helpers.values():
                until_the_end.enter_context(closing(helper))
            memory = {f"{name}, V = {V:,}, memory": [h.ask("bytes") / 2**20] for name, h in helpers.items()}
            cases = {f"{name}, V = {V:,}": lambda h=h: h.ask("seconds") for name, h in helpers.items()}
            found = take_turns(cases, args.repeats)
        report.add(found, "s")
        report.add(memory, "MiB")
        large = V > 100_000  # the targets are for this one
        share = memory[f"ours, V = {V:,}, memory"][0] * 2**20 / (TOKENS * V * 4)
        report.figures += [
            Figure(f"time / full logits, V = {V:,}", ratios(*found.values()), most=1.5 if large else None),
            Figure(f"peak memory / one (M, V) tensor, V = {V:,}", [share], most=0.1 if large else None),
            *(Figure(f"rounding of a head in {name}, V = {V:,}", [gap]) for name, gap in rounding(V).items()),
        ]
    off = error(max(args.vocabularies))
    report.figures.append(Figure(f"largest log-prob error against float64, {CHECKED} tokens", [off], most=1e-5))


# -------------------------------------------------------------------------------------------------------------- overlap

STEPS = 8  # of a turn
FIRST, OTHERS = "pipeline-8", ("pipeline-1", "pipeline-0", "ppo_off_policy-1", "ppo_off_policy-8")
WAITS = ("generator_idle", "trainer_idle", "sync_seconds")


def segment(program: Program, schedule: str) -> dict[str, float]:
    """Seconds a step: `wall`, `cpu` of all processes, and WAITS, over STEPS steps, which are a round of k updates too.
    The round before them is not timed: its records contain the time in which the program was frozen."""
    program.advance(int(schedule[-1]) if schedule.startswith("ppo") else 3)
    cpu = program.cpu_seconds()
    found = {"wall": program.advance(STEPS), "cpu": program.cpu_seconds() - cpu}
    records = program.records("metrics.jsonl")[-STEPS:]
    found |= {name: sum(record[name] for record in records) for name in WAITS}
    return {name: seconds / STEPS for name, seconds in found.items()}


def overlap(args: argparse.Namespace, report: Report) -> None:
    """`pipeline-8` takes turns with one other schedule at a time, and is frozen meanwhile."""
    model = subjects.warm_model(args.seed)
    torch.set_num_threads(args.threads)
    side = TrainerSide(model, args.seed)
    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in (FIRST, *OTHERS)}
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(TemporaryDirectory()))
        made = until_the_end.enter_context(subjects.built_in_generator(model, side.trainer.weights, args.seed))
        subjects.free_running(made, BATCH)
        groups = made.take(BATCH)
        subjects.drain(made)

        def started(schedule: str) -> Program:
            name, _, k = schedule.rpartition("-")
            flags = [*QUIET, *STILL, "--seed", str(args.seed), "--schedule", name, "--k", k]
            program = Program(subjects.ours(*flags), folder / schedule, args.threads)
            program.advance(1)  # start-up; then it is frozen
            return program

        def sides() -> float:
            """The longer of generation and training by themselves, seconds a step."""
            training = timed(lambda: [side.step(side.batch(groups)) for _ in range(STEPS)]) / STEPS
            return max(training, subjects.seconds_by_itself(made, BATCH, STEPS))

        def step(program: Program, schedule: str) -> float:
            found[schedule].append(segment(program, schedule))
            return found[schedule][-1]["wall"]

        first = until_the_end.enter_context(closing(started(FIRST)))
        for other in OTHERS:
            with closing(started(other)) as second:
                cases = {"longer side": sides, FIRST: lambda: step(first, FIRST)}
                cases[other] = lambda second=second, other=other: step(second, other)
                measured = take_turns(cases, args.repeats)
            report.add({f"{name} (with {other})": turns for name, turns in measured.items()}, "s a step")
            for name in (FIRST, other):
                for turn, longest in zip(found[name][-args.repeats :], measured["longer side"], strict=True):
                    turn["efficiency"] = max(longest, turn["cpu"] / os.cpu_count()) / turn["wall"]
            longer = ratios(measured[other], measured[FIRST])
            report.figures.append(Figure(f"{other} / {FIRST}, wall time a step", longer))
    for schedule, turns in found.items():
        idle = [(turn["generator_idle"] + turn["sync_seconds"]) / turn["wall"] for turn in turns]
        target = 0.9 if schedule == FIRST else None
        report.figures += [
            Figure(f"{schedule}: efficiency", [turn["efficiency"] for turn in turns], least=target),
            Figure(f"{schedule}: trainer idle", [turn["trainer_idle"] / turn["wall"] for turn in turns]),
            Figure(f"{schedule}: generator idle or paused", idle),
        ]


# ----------------------------------------------------------------------------------------------------------------- sync

UPDATES = 4  # of a turn


def stall(program: Program, shares: list[float]) -> float:
    """Mean seconds of an update, whose share of a step is added to `shares`. The first step after a thaw is left out:
    it contains the time in which the program was frozen."""
    program.advance(UPDATES + 1)
    records = program.records("metrics.jsonl")[-UPDATES:]
    stalled = sum(record["sync_seconds"] for record in records)
    shares.append(stalled / sum(record["seconds"] for record in records))
    return stalled / UPDATES


def sync(args: argparse.Namespace, report: Report) -> None:
    for size in args.sizes:
        with ExitStack() as until_the_end:
            root, small = Path(until_the_end.enter_context(TemporaryDirectory())), size == "0.2M"
            model = subjects.warm_model(args.seed) if small else subjects.random_model(root / "model", size)
            flags = [*QUIET, *STILL, "--model", model, "--seed", str(args.seed)]
            flags += [] if small else ["--batch_prompts", "2"]
            shares: dict[str, list[float]] = {"pipeline 8": [], "ppo_off_policy 1": []}
            cases = {}
            for name, shares_of_it in shares.items():
                schedule, k = name.split()
                command = subjects.ours(*flags, "--schedule", schedule, "--k", k)
                program = until_the_end.enter_context(closing(Program(command, root / schedule, 1)))
                program.advance(2)  # start-up
                cases[name] = lambda program=program, shares_of_it=shares_of_it: stall(program, shares_of_it)
            found = take_turns(cases, args.repeats)
            megabytes = (Path(model) / "model.safetensors").stat().st_size / 1e6
        report.add({f"{size}, {name}": values for name, values in found.items()}, "s")
        report.figures += [
            Figure(f"{size}: stall in the pipeline / on-policy", ratios(*found.values())),
            Figure(f"{size}: stall / step", shares["pipeline 8"]),
            Figure(f"{size}: MB/s, of the stall", [megabytes / seconds for seconds in found["pipeline 8"]]),
        ]


# ---------------------------------------------------------------------------------------------------------------- pacer

ROLLOUTS, K, COUNTED = 8, 8, 30  # COUNTED: steps of a case
MEAN, SIGMA = 30, 0.6  # tokens of a completion, standard deviation of their logarithm
RATIO = 0.8
LAGS = (2, 4, 6)  # to hold


class Lengths:
    """As length control: a completion's length is drawn and nothing is appended."""

    max_budget = max_completion = 4 * MEAN

    def draw_budget(self, rng: random.Random) -> int:
        """Tokens of a completion: lognormal with this mean, at most four times it."""
        return max(1, min(self.max_budget, round(MEAN * math.exp(rng.gauss(-(SIGMA**2) / 2, SIGMA)))))

    def second_leg(self, *_: object) -> None:
        """There is none."""


def short_prompts() -> Iterator[SimpleNamespace]:
    """Endless ones."""
    rng = random.Random(0)
    for number in itertools.count():
        yield SimpleNamespace(key=str(number), prompt_ids=[rng.randrange(4, 30) for _ in range(8)])


def paced(made: pipeline_rl.Generator, weights: object, training: float, **options: int) -> dict[str, float]:
    """Mean requests inside the engine, tokens/s and mean lag, of COUNTED steps after the first k + 2. `options`: of the
    pacer."""
    subjects.set_pacer(made, pipeline_rl.Pacer(BATCH, K, **options))
    counters, version = made.counters, made.version
    for step in range(K + 2 + COUNTED):
        if step == K + 2:
            started, busy, tokens, lags = time.perf_counter(), counters.request_seconds, counters.sampled, []
        groups = made.take(BATCH)
        if step >= K + 2:
            lags += [lag for g in groups for rollout in g.rollouts for lag in pipeline_rl.lags(rollout, version)]
        time.sleep(training)
        version += 1
        made.push(weights, version, BATCH)
    seconds = time.perf_counter() - started
    busy, tokens = counters.request_seconds - busy, counters.sampled - tokens
    subjects.drain(made)
    return {"inside": busy / seconds, "tokens/s": tokens / seconds, "lag": sum(lags) / len(lags)}


def queue_for(lag: float, without: float) -> int:
    """The `--min_ready` that holds this lag, where --max_ready B has `without`: each batch of waiting groups adds one.
    At least 1, since 0 is the default, which is another rule."""
    return min(K * BATCH, max(1, round((lag - without) * BATCH)))


def pacer(args: argparse.Namespace, report: Report) -> None:
    from safetensors.torch import load_file

    names = ("default", "no queue", *(f"lag {lag}" for lag in LAGS))
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    task = SimpleNamespace(train=[next(short_prompts())], held_out=[], stop_ids=[], score=nothing_solved)
    flags = parse_flags(["--rollouts", str(ROLLOUTS), "--max_num_seqs", str(args.slots)], "")
    with TemporaryDirectory() as folder:
        model = subjects.random_model(Path(folder), "0.2M", ends=False)
        weights = load_file(f"{model}/model.safetensors")
        with subjects.generator_of(flags, model, weights, task, short_prompts(), Lengths()) as made:
            for _ in range(args.repeats):
                training = RATIO * subjects.seconds_by_itself(made, BATCH, K)
                turns["default"].append(paced(made, weights, training))
                turns["no queue"].append(paced(made, weights, training, max_ready=BATCH))
                for lag in LAGS:
                    queue = queue_for(lag, turns["no queue"][-1]["lag"])
                    turns[f"lag {lag}"].append(paced(made, weights, training, min_ready=queue))
    found = {name: {what: [turn[what] for turn in some] for what in some[0]} for name, some in turns.items()}
    for name, measured in found.items():
        report.add({f"{name}: {what}": values for what, values in measured.items()}, "")
    base = found["no queue"]
    faster = ratios(found["default"]["tokens/s"], base["tokens/s"])
    report.figures = [
        Figure("busy share of the slots", [x / args.slots for x in found["default"]["inside"]], least=0.9),
        Figure("tokens/s, default / --max_ready B", faster, least=0.97),
    ]
    for lag in LAGS:
        held = found[f"lag {lag}"]
        lost = [1 - x for x in ratios(held["tokens/s"], base["tokens/s"])]
        report.figures.append(Figure(f"lag {lag}: off by", [abs(x - lag) for x in held["lag"]], most=0.5))
        report.figures.append(Figure(f"lag {lag}: speed lost", lost, most=0.05))


def nothing_solved(problem: object, completions: Sequence[object]) -> list[tuple[float, bool]]:
    """(reward, correct) of each completion."""
    return [(0.0, False)] * len(completions)


# --------------------------------------------------------------------------------------------------------- command line

QUESTIONS = {function.__name__: function for function in (generator, trainer, head, overlap, sync, pacer)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("benchmark.py", __doc__)
    parser.add_argument("benchmark", choices=QUESTIONS, help="what to measure")
    parser.add_argument("--vocabularies", type=positive, nargs="+", default=[32_000, 151_936], help="head: words")
    parser.add_argument("--threads", type=positive, default=1, help="overlap: CPU threads of each trainer (1)")
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=list(SIZES), help="sync: of the models")
    parser.add_argument("--slots", type=positive, default=128, help="pacer: of the engine (128)")
    args = parse(parser, argv)
    report = Report(args)
    QUESTIONS[args.benchmark](args, report)
    report.close()


if __name__ == "__main__":
    main()
