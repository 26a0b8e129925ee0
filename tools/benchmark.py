"""Four questions about speed, each answered by cases that take turns: BENCHMARKS.md has what was seen.

    python tools/benchmark.py generator | trainer | head | overlap
    python tools/benchmark.py head --repeats 3

generator   Sampled tokens a second of our Generator, with a trainer at work (one step and one push for every batch
            that is sampled, as in training) and without, and of `LLM.generate`, compiled, on the same lengths.
trainer     Our training step against the best of several bare loops: forward, backward, AdamW and nothing else, which
            is what the hardware allows with this model and these rows.
head        The FP32 head against full logits and log_softmax: time; what memory a forward and backward pass takes
            beyond inputs, weight and weight gradient, as a share of one FP32 (tokens, vocabulary) tensor; the error
            against float64.
overlap     Wall time of a step under each schedule, and of either side by itself. The efficiency is the longest of
            generation by itself, training by itself, and CPU time over cores, divided by the wall time of a step: 1 is
            the best there can be.
"""

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import subjects
import torch
from measuring import Figure, Report, benchmark_parser, parse, ratios, take_turns, timed
from subjects import BATCH, QUIET, STILL, Program, TrainerSide, call, helper

import fp32_head
import pipeline_rl
from runtime.model import make_microbatch
from runtime.trainer import TrainingBatch

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
    sides = subjects.both_sides(args.seed, 4 * BATCH)
    with sides as (side, made, groups), helper(bare_vllm, subjects.warm_model(args.seed), **ONE_CORE) as bare:
        weights, versions = side.trainer.weights, itertools.count(1)
        batches = itertools.cycle([groups[i : i + BATCH] for i in range(0, len(groups), BATCH)])
        requests = [(list(g.problem.prompt_ids), sum(r.mask)) for g in groups for r in g.rollouts]
        tokens = sum(length for _, length in requests)

        def train() -> None:
            made.take(BATCH)  # a step for each batch sampled
            side.step(side.batch(next(batches)))
            made.push(weights, next(versions), release=0)

        bare.submit(call, requests[:64]).result()
        cases = {
            "ours, trainer stopped": lambda: sampled_per_second(made, lambda: time.sleep(0.02)),
            "ours, trainer at work": lambda: sampled_per_second(made, train),
            "bare vLLM": lambda: tokens / bare.submit(call, requests).result(),
        }
        found = take_turns(cases, args.repeats)
    report.add(found, "tokens/s")
    calm, busy, vllm = found.values()
    report.figures = [
        Figure("ours, trainer at work / trainer stopped", ratios(busy, calm), least=0.9),
        Figure("ours, trainer at work / bare vLLM", ratios(busy, vllm), least=0.8),
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
    subjects.free_running(made)
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

ROWS, LENGTH = 512, 23  # of a batch of the built-in task
AT_A_TIME = (32, 64, 128)  # rows of a microbatch of a bare loop


class BareLoop:
    """Forward, backward, AdamW, so many rows at a time, sorted by length."""

    def __init__(self, model: str, batch: TrainingBatch, rows: int):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        order = sorted(range(len(batch.rows)), key=lambda i: -len(batch.rows[i]))
        factors = batch.token_weights * batch.advantages[:, None]  # (N, T)
        self.pieces = []  # of each microbatch: its input; of its tokens the generator's log-prob, weight x advantage
        for piece in (order[i : i + rows] for i in range(0, len(order), rows)):
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


def trainer(args: argparse.Namespace, report: Report) -> None:
    model = subjects.warm_model(args.seed)
    torch.set_num_threads(1)
    side, groups = TrainerSide(model), subjects.synthetic_groups(ROWS, LENGTH)
    batch = side.batch(groups)
    tokens = 2 * int(batch.mask.sum())  # each case makes two steps

    def ours() -> float:
        return tokens / timed(lambda: [side.step(side.batch(groups)) for _ in range(2)])

    def bare(loop: BareLoop) -> float:
        return tokens / timed(lambda: [loop.step() for _ in range(2)])

    ours()  # libraries get their own memory
    loops = {f"bare, {rows} rows at a time": BareLoop(model, batch, rows) for rows in AT_A_TIME}
    tried = take_turns({name: lambda loop=loop: bare(loop) for name, loop in loops.items()}, 2)
    report.add({f"{name} (2 turns)": values for name, values in tried.items()}, "tokens/s")
    best = max(tried, key=lambda name: max(tried[name]))
    found = take_turns({"ours": ours, best: lambda: bare(loops[best])}, args.repeats)
    report.add(found, "tokens/s")
    speed = ratios(found["ours"], found[best])
    report.figures = [Figure(f"ours / {best}, the best bare loop", speed, least=0.9)]


# ----------------------------------------------------------------------------------------------------------------- head

TOKENS, HIDDEN, VOCABULARY = 4096, 256, 151_936
CHECKED = 512  # tokens compared with float64


def full_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) the same log-probs with all (M, V) logits in memory."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def our_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) by the chunked head."""
    return fp32_head.token_logprobs(hidden, weight, targets)[0]


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states (M, H), head (V, H) and targets (M,)."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN) / math.sqrt(HIDDEN)).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,))


def peak(forget: bool = False) -> int:
    """Most bytes that this process has had; with `forget` it starts anew from what is allocated now."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def our_peak() -> int:
    """Bytes that a forward and backward pass takes beyond inputs, weight and weight gradient."""
    hidden, weight, targets = inputs(TOKENS)
    our_logprobs(hidden[:8], weight, targets[:8]).sum().backward()  # libraries get their own memory
    hidden.grad = weight.grad = None
    before = peak(forget=True)
    loss = our_logprobs(hidden, weight, targets).sum()
    forward = peak() - before
    peak(forget=True)
    loss.backward()  # its peak has the weight gradient in it
    return max(forward, peak() - before - weight.numel() * weight.itemsize)


@torch.no_grad()
def error() -> float:
    """Largest |log-prob - float64's|."""
    hidden, weight, targets = inputs(CHECKED)
    exact = full_logprobs(hidden.double(), weight.double(), targets)
    return float((our_logprobs(hidden, weight, targets) - exact).abs().max())


def head(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    share = our_peak() / (TOKENS * VOCABULARY * 4)  # first: what is freed later may stay with the process
    hidden, weight, targets = inputs(TOKENS)

    def seconds(logprobs: Callable[..., torch.Tensor]) -> float:
        hidden.grad = weight.grad = None
        return timed(lambda: logprobs(hidden, weight, targets).sum().backward())

    cases = {"ours": lambda: seconds(our_logprobs), "full logits": lambda: seconds(full_logprobs)}
    found = take_turns(cases, args.repeats)
    report.add(found, "s")
    report.figures = [
        Figure("time / full logits", ratios(*found.values()), most=1.5),
        Figure("peak memory / one (M, V) tensor", [share], most=0.1),
        Figure(f"largest log-prob error against float64, {CHECKED} tokens", [error()], most=1e-5),
    ]


# -------------------------------------------------------------------------------------------------------------- overlap

STEPS = 8  # of a turn
FIRST, OTHERS = "pipeline-8", ("pipeline-1", "pipeline-0", "ppo_off_policy-1", "ppo_off_policy-8")
WAITS = ("generator_idle", "trainer_idle", "sync_seconds")


def started(schedule: str, seed: int, folder: Path, *flags: str) -> Program:
    """train.py under this schedule, frozen after its start-up."""
    name, _, k = schedule.rpartition("-")
    command = subjects.ours(*QUIET, *STILL, "--seed", str(seed), "--schedule", name, "--k", k, *flags)
    program = Program(command, folder / schedule, 1)
    program.advance(2)
    return program


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
    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in (FIRST, *OTHERS)}
    with subjects.both_sides(args.seed, BATCH) as (side, made, groups), ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(TemporaryDirectory()))

        def sides() -> float:
            """The longer of generation and training by themselves, seconds a step."""
            training = timed(lambda: [side.step(side.batch(groups)) for _ in range(STEPS)]) / STEPS
            return max(training, subjects.seconds_by_itself(made, STEPS))

        def step(program: Program, schedule: str) -> float:
            found[schedule].append(segment(program, schedule))
            return found[schedule][-1]["wall"]

        first = until_the_end.enter_context(closing(started(FIRST, args.seed, folder)))
        for other in OTHERS:
            with closing(started(other, args.seed, folder)) as second:
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


# --------------------------------------------------------------------------------------------------------- command line

QUESTIONS = {function.__name__: function for function in (generator, trainer, head, overlap)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("benchmark", choices=QUESTIONS, help="what to measure")
    args = parse(parser, argv)
    report = Report(args)
    QUESTIONS[args.benchmark](args, report)
    report.close()


if __name__ == "__main__":
    main()
