"""One side of `benchmark.py pacer`: a Generator on a real vLLM engine, beside a trainer that only waits.

    PYTHONPATH=CHECKOUT python tools/benchmark_pacer.py MODEL SLOTS MEAN      then one case a line, as JSON, on stdin

The pipeline_rl.py, weight_sync.py and engine_process.py are those of CHECKOUT, so that two versions meet the same work:
completions whose lengths come from a lognormal distribution (the model never stops by itself), a training step that is
a sleep of fixed length, and its weights, which are pushed in flight. The answer to a case is a line of JSON on stdout.
"""

import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file

import pipeline_rl
from runtime import weight_channels as weight_sync


class Lengths:
    """As length control: a completion's length is drawn, and nothing is appended."""

    def __init__(self, mean: int):
        self.mean, self.sigma = mean, 0.0
        self.max_budget = self.max_completion = 4 * mean

    def draw_budget(self, rng: random.Random) -> int:
        """Tokens of a completion: lognormal with this mean, at most four times it."""
        factor = math.exp(rng.gauss(-(self.sigma**2) / 2, self.sigma))
        return max(1, min(self.max_budget, round(self.mean * factor)))

    def second_leg(self, *_: Any) -> None:
        """There is none."""

    def mask(self, *_: int) -> list[int]:
        """Asked of second legs alone."""
        raise AssertionError("there is no second leg")


class Busy:
    """Integral over time of the requests inside the engine."""

    def __init__(self, generator: pipeline_rl.Generator):
        self.generator, self.total, self.since = generator, 0.0, time.perf_counter()
        self.occupy, generator._occupy = generator._occupy, self.watch

    def watch(self, slots: int) -> None:
        """Stands in the place of `Generator._occupy`."""
        now = time.perf_counter()
        self.total += self.generator._inside * (now - self.since)
        self.since = now
        self.occupy(slots)


def prompts() -> Iterator[Any]:
    """Endless short ones."""
    rng = random.Random(0)
    for number in itertools.count():
        yield SimpleNamespace(key=str(number), prompt_ids=[rng.randrange(4, 30) for _ in range(8)])


def measure(generator: pipeline_rl.Generator, busy: Busy, weights: Any, case: dict[str, Any]) -> dict[str, float]:
    """Of the `steps` steps after the first `skip`: seconds a step, busy share of the slots, tokens/s, lag, and share of
    the time that the trainer waited. `training` None: nobody trains, and admission waits for nobody."""
    size, training = case["batch_prompts"], case["training"]
    queue = {"min_ready": case["min_ready"]} if case["min_ready"] else {}  # which an older checkout may not know
    k, queue = (case["k"], queue) if training is not None else (10**6, {"max_ready": 10**9})
    generator.length_control.sigma = case["sigma"]
    generator.slots = generator.max_num_seqs = case["slots"]  # an older checkout goes by the second
    generator.in_loop(lambda g: setattr(g, "pacer", pipeline_rl.Pacer(size, k, **queue)))
    generator.release(0)  # admission looks again
    found, waited, first = [], 0.0, generator.version
    for step in range(case["skip"] + case["steps"]):
        if step == case["skip"]:
            started, slots, tokens = time.perf_counter(), busy.total, generator.counters.sampled
            found, waited = [], 0.0
        before = time.perf_counter()
        groups = generator.take(size)
        waited += time.perf_counter() - before
        if training is None:
            generator.release(size)
            continue
        version = first + step
        found += [lag for g in groups for rollout in g.rollouts for lag in pipeline_rl.lags(rollout, version)]
        time.sleep(training)
        generator.push(weights, version + 1, size)
    seconds, slots = time.perf_counter() - started, busy.total - slots
    tokens = generator.counters.sampled - tokens
    generator.settle()
    drain(generator)
    return {
        "seconds a step": seconds / case["steps"], "busy": slots / seconds / case["slots"],
        "tokens/s": tokens / seconds, "lag": sum(found) / max(1, len(found)), "largest lag": max(found, default=0),
        "trainer idle": waited / seconds,
    }  # fmt: skip


def drain(generator: pipeline_rl.Generator) -> None:
    """Lets nothing more in and waits until the engine is empty."""

    def stop(g: pipeline_rl.Generator) -> int:
        g.pacer.capacity = g.pacer.min_ready = 0
        return len(g.running)

    generator.take(generator.in_loop(stop))


def main() -> None:
    """Starts the engine, answers cases until stdin ends."""
    model, slots, mean = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not come between the answers
    weights, nothing_yet = load_file(f"{model}/model.safetensors"), pipeline_rl.Pacer(1, 0)
    nothing_yet.capacity = 0
    generator = pipeline_rl.Generator(
        model, prompts(), lambda problem, completions: [(0.0, False)] * len(completions), nothing_yet, 1, [],
        weights=weight_sync.FileWeights(), length_control=Lengths(mean), max_num_seqs=slots, max_prompt=8,
    )  # fmt: skip
    try:
        generator.start(weights)
        busy = Busy(generator)
        for line in sys.stdin:
            case = json.loads(line)
            generator.rollouts = case["rollouts"]
            print(json.dumps(measure(generator, busy, weights, case)), file=answers, flush=True)
    finally:
        generator.close()


if __name__ == "__main__":
    main()
