"""How busy the pacer keeps an engine whose completions vary in length, and which lags `--min_ready` holds at what cost.

    python tools/benchmark_pacer.py

A Generator on a real vLLM engine, with a trainer that sleeps for a fixed time (RATIO of what the engine needs for a
batch) and then really pushes its weights in flight. Completions have lengths from a lognormal distribution; the model
never stops by itself. `python pipeline_rl.py` shows the same pacing on a simulated engine.
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
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios
from safetensors.torch import load_file
from subjects import drain, generator_of, random_model, seconds_by_itself, set_pacer

import pipeline_rl
from runtime.flags import parse_flags

BATCH, ROLLOUTS, K, STEPS = 32, 8, 8, 30  # STEPS: of a case
MEAN, SIGMA = 30, 0.6  # tokens of a completion, standard deviation of their logarithm
RATIO = 0.8
LAGS = (2, 4, 6)  # to hold


class Lengths:
    """As length control: a completion's length is drawn and nothing is appended."""

    max_budget = max_completion = 4 * MEAN

    def draw_budget(self, rng: random.Random) -> int:
        """Tokens of a completion: lognormal with this mean, at most four times it."""
        return max(1, min(self.max_budget, round(MEAN * math.exp(rng.gauss(-(SIGMA**2) / 2, SIGMA)))))

    def second_leg(self, *_: Any) -> None:
        """There is none."""


def short_prompts() -> Iterator[Any]:
    """Endless ones."""
    rng = random.Random(0)
    for number in itertools.count():
        yield SimpleNamespace(key=str(number), prompt_ids=[rng.randrange(4, 30) for _ in range(8)])


def nothing_solved(problem: Any, completions: Sequence[Any]) -> list[tuple[float, bool]]:
    """(reward, correct) of each completion."""
    return [(0.0, False)] * len(completions)


def paced(generator: pipeline_rl.Generator, weights: Any, training: float, **options: int) -> dict[str, float]:
    """Mean requests inside the engine, tokens/s and mean lag, of STEPS steps after the first k + 2. `options`: of the
    pacer."""
    set_pacer(generator, pipeline_rl.Pacer(BATCH, K, **options))
    counters, version = generator.counters, generator.version
    for step in range(K + 2 + STEPS):
        if step == K + 2:
            started, busy, tokens, lags = time.perf_counter(), counters.request_seconds, counters.sampled, []
        groups = generator.take(BATCH)
        if step >= K + 2:
            lags += [lag for g in groups for rollout in g.rollouts for lag in pipeline_rl.lags(rollout, version)]
        time.sleep(training)
        version += 1
        generator.push(weights, version, BATCH)
    seconds = time.perf_counter() - started
    busy, tokens = counters.request_seconds - busy, counters.sampled - tokens
    drain(generator)
    return {"inside": busy / seconds, "tokens/s": tokens / seconds, "lag": sum(lags) / len(lags)}


def queue_for(lag: float, without: float) -> int:
    """The `--min_ready` that holds this lag, where --max_ready B has `without`: each batch of waiting groups adds one.
    At least 1, since 0 is the default, which is another rule."""
    return min(K * BATCH, max(1, round((lag - without) * BATCH)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--slots", type=positive, default=128, help="of the engine (128)")
    args = parse(parser, argv)
    report = Report(args)
    turns: dict[str, list[dict[str, float]]] = {
        name: [] for name in ("default", "no queue", *(f"lag {lag}" for lag in LAGS))
    }
    task = SimpleNamespace(train=[next(short_prompts())], held_out=[], stop_ids=[], score=nothing_solved)
    flags = parse_flags(["--rollouts", str(ROLLOUTS), "--max_num_seqs", str(args.slots)], "")
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), "0.2M", ends=False)
        weights = load_file(f"{model}/model.safetensors")
        with generator_of(flags, model, weights, task, short_prompts(), Lengths()) as generator:
            for _ in range(args.repeats):
                training = RATIO * seconds_by_itself(generator, BATCH, K)
                turns["default"].append(paced(generator, weights, training))
                turns["no queue"].append(paced(generator, weights, training, max_ready=BATCH))
                for lag in LAGS:
                    queue = queue_for(lag, turns["no queue"][-1]["lag"])
                    turns[f"lag {lag}"].append(paced(generator, weights, training, min_ready=queue))
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
        report.figures += [Figure(f"lag {lag}: off by", [abs(x - lag) for x in held["lag"]], most=0.5),
                           Figure(f"lag {lag}: speed lost", lost, most=0.05)]  # fmt: skip
    report.close()


if __name__ == "__main__":
    main()
