"""Sampled tokens a second of our Generator, with a trainer at work and without, and of bare vLLM on the same lengths.

    python tools/benchmark_generator.py

The trainer at work makes one step and one push for every batch that is sampled, as in training. Bare vLLM is
`LLM.generate`, eager and compiled, on one core as our engine.
"""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, ratios, take_turns, timed
from subjects import Helper, TrainerSide, built_in_generator, drain, free_running, warm_model

BATCH = 32  # prompts
SECONDS = 6.0  # of a turn of ours
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


def sampled_per_second(generator: Any, work: Callable[[], Any]) -> float:
    """Tokens a second of a generator that waits for nobody, while this thread repeats `work`."""
    free_running(generator, BATCH)
    while generator.in_loop(lambda g: g.pacer.ready) < 1:  # the engine fills up first
        time.sleep(0.05)
    work()
    started, before = time.perf_counter(), generator.counters.sampled
    while time.perf_counter() < started + SECONDS:
        work()
    rate = (generator.counters.sampled - before) / (time.perf_counter() - started)
    drain(generator)
    return rate


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(benchmark_parser(__file__, __doc__), argv)
    report, model = Report(args), warm_model(args.seed)
    torch.set_num_threads(1)
    side = TrainerSide(model, args.seed)
    weights = side.trainer.weights
    with ExitStack() as until_the_end:
        generator = until_the_end.enter_context(built_in_generator(model, weights, args.seed))
        free_running(generator, BATCH)
        groups = generator.take(4 * BATCH)
        drain(generator)
        batches = itertools.cycle([groups[i : i + BATCH] for i in range(0, len(groups), BATCH)])
        requests = [(list(g.problem.prompt_ids), sum(r.mask)) for g in groups for r in g.rollouts]
        tokens = sum(length for _, length in requests)
        versions = itertools.count(1)

        def train() -> None:
            generator.take(BATCH)  # a step for each batch sampled
            side.step(side.batch(next(batches)))
            generator.push(weights, next(versions), release=0)

        cases = {
            "ours, trainer stopped": lambda: sampled_per_second(generator, lambda: time.sleep(0.02)),
            "ours, trainer at work": lambda: sampled_per_second(generator, train),
        }
        for name in ("eager", "compiled"):
            helper = until_the_end.enter_context(closing(Helper(bare_vllm, model, name == "eager", **ONE_CORE)))
            helper.ask(requests[:64])
            cases[f"bare vLLM, {name}"] = lambda helper=helper: tokens / helper.ask(requests)
        found = take_turns(cases, args.repeats)
    report.add(found, "tokens/s")
    best = max((name for name in found if "bare" in name), key=lambda name: statistics.median(found[name]))
    busy, calm = found["ours, trainer at work"], found["ours, trainer stopped"]
    report.figures = [
        Figure("ours, trainer at work / trainer stopped", ratios(busy, calm), least=0.9),
        Figure(f"ours, trainer at work / {best}", ratios(busy, found[best]), least=0.8),
        Figure(f"ours, trainer stopped / {best}", ratios(calm, found[best])),
    ]
    report.close()


if __name__ == "__main__":
    main()
