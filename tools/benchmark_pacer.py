"""How busy the pacer keeps an engine whose completions vary in length, and which lags `--min_ready` holds at what cost.

    python tools/benchmark_pacer.py

A Generator on a real vLLM engine, with a trainer that sleeps for a fixed time and then really pushes its weights in
flight. Completions have lengths from a lognormal distribution; the model never stops by itself. A training step takes
RATIO of the time in which the engine makes a batch by itself. The lags are asked for with half of the slots.
"""

import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import Figure, Report, above_zero, benchmark_parser, parse, positive, ratios
from safetensors.torch import load_file
from subjects import drain, generator_of, random_model, set_pacer

import pipeline_rl
from runtime.flags import parse_flags

BATCH, ROLLOUTS, K = 32, 8, 8
MEAN = 30  # tokens of a completion
RATIO = 0.8


class Lengths:
    """As length control: a completion's length is drawn and nothing is appended. It is asked when requests enter the
    engine and when they leave it, so it also counts how many are inside, integrated over time."""

    def __init__(self, sigma: float):
        self.sigma, self.max_budget, self.max_completion = sigma, 4 * MEAN, 4 * MEAN
        self.inside, self.slot_seconds, self.since = 0, 0.0, time.perf_counter()

    def draw_budget(self, rng: random.Random) -> int:
        """Tokens of a completion: lognormal with this mean, at most four times it."""
        self._count(1)
        factor = math.exp(rng.gauss(-(self.sigma**2) / 2, self.sigma))
        return max(1, min(self.max_budget, round(MEAN * factor)))

    def second_leg(self, *_: Any) -> None:
        """There is none."""
        self._count(-1)

    def _count(self, requests: int) -> None:
        now = time.perf_counter()
        self.slot_seconds += self.inside * (now - self.since)
        self.inside, self.since = self.inside + requests, now


def short_prompts() -> Iterator[Any]:
    """Endless ones."""
    rng = random.Random(0)
    for number in itertools.count():
        yield SimpleNamespace(key=str(number), prompt_ids=[rng.randrange(4, 30) for _ in range(8)])


def nothing_solved(problem: Any, completions: Sequence[Any]) -> list[tuple[float, bool]]:
    """(reward, correct) of each completion."""
    return [(0.0, False)] * len(completions)


def measure(
    generator: pipeline_rl.Generator, weights: Any, slots: int, steps: int, training: float | None, min_ready: int = 0
) -> dict[str, float]:
    """Of `steps` steps after the first k + 2: seconds a step, busy share of the slots, tokens/s, lag, and the share of
    time for which the trainer waited. `training` is its seconds a step; None: it is not there, and nothing waits."""
    k, ready = (K, None) if training is not None else (10**6, 10**9)
    generator.slots = slots
    set_pacer(generator, pipeline_rl.Pacer(BATCH, k, max_ready=ready, min_ready=min_ready))
    lengths, first = generator.length_control, generator.version
    for step in range(k + 2 + steps if training is not None else steps + 2):
        if step == (k + 2 if training is not None else 2):
            started, busy, tokens = time.perf_counter(), lengths.slot_seconds, generator.counters.sampled
            lags, waited = [], 0.0
        before = time.perf_counter()
        groups = generator.take(BATCH)
        now = time.perf_counter()
        if training is None:
            generator.release(BATCH)
            continue
        if step >= k + 2:
            waited += now - before
            lags += [lag for g in groups for rollout in g.rollouts for lag in pipeline_rl.lags(rollout, first + step)]
        time.sleep(training)
        generator.push(weights, first + step + 1, BATCH)
    seconds = time.perf_counter() - started
    busy, tokens = lengths.slot_seconds - busy, generator.counters.sampled - tokens
    drain(generator)
    return {
        "seconds a step": seconds / steps, "busy": busy / seconds / slots, "tokens/s": tokens / seconds,
        "lag": sum(lags) / max(1, len(lags)), "largest lag": max(lags, default=0), "trainer idle": waited / seconds,
    }  # fmt: skip


def queue_for(lag: float, without: float) -> int:
    """The `--min_ready` that holds this lag, where it is `without` at 0: each batch of waiting groups adds one step."""
    return min(K * BATCH, max(0, round((lag - without) * BATCH)))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what it prints as JSON."""
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--slots", type=positive, default=256, help="of the engine (256)")
    parser.add_argument("--sigma", type=above_zero, default=0.6, help="of the logarithm of lengths (0.6)")
    parser.add_argument("--steps", type=positive, default=30, help="of a case (30)")
    parser.add_argument("--lags", type=positive, nargs="+", default=[2, 4, 6], help="to hold (2 4 6)")
    args = parse(parser, argv)
    report, found = Report(args), {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), "0.2M", ends=False)
        weights = load_file(f"{model}/model.safetensors")
        flags = parse_flags(["--rollouts", str(ROLLOUTS), "--max_num_seqs", str(args.slots)], "")
        task = SimpleNamespace(train=[next(short_prompts())], held_out=[], stop_ids=[], score=nothing_solved)
        with generator_of(flags, model, weights, task, short_prompts(), Lengths(args.sigma)) as generator:

            def one(label: str, slots: int, *case: Any) -> dict[str, float]:
                turn = measure(generator, weights, slots, *case)
                print(label, {name: float(f"{x:.4g}") for name, x in turn.items()}, flush=True)
                found.setdefault(label, []).append(turn)
                return turn

            for _ in range(args.repeats):
                training = RATIO * one("engine by itself", args.slots, K, None)["seconds a step"]
                one("all slots", args.slots, args.steps, training)
                half = args.slots // 2
                training = RATIO * one("engine by itself, half", half, K, None)["seconds a step"]
                without = one("min_ready 0", half, args.steps, training)["lag"]
                for lag in args.lags:
                    one(f"lag {lag} asked", half, args.steps, training, queue_for(lag, without))
    values = {label: {what: [turn[what] for turn in turns] for what in turns[0]} for label, turns in found.items()}
    for label, measured in values.items():
        report.add({f"{label}: {what}": turns for what, turns in measured.items()}, "")
    report.figures = [Figure("busy share of the slots", values["all slots"]["busy"], least=0.9)]
    for lag in args.lags:
        held = values[f"lag {lag} asked"]
        lost = [1 - x for x in ratios(held["tokens/s"], values["min_ready 0"]["tokens/s"])]
        report.figures += [Figure(f"lag {lag} asked: off by", [abs(x - lag) for x in held["lag"]], most=0.5),
                           Figure(f"lag {lag} asked: speed lost", lost, most=0.05)]  # fmt: skip
    return report.close()


if __name__ == "__main__":
    main()
