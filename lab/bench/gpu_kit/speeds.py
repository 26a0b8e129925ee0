"""Tokens a second of the generator alone, the trainer alone and bare vLLM, made as lab/bench/benchmark.py makes them, one line
as soon as each is known: `python speeds.py STEPS [flags of train.py]`, in the project's root."""

import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import psutil

ROOT = Path(os.environ.get("BENCH_ROOT", Path.cwd()))
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "bench")]


def say(name, **values):
    print(json.dumps({"speed": name} | values), flush=True)


def import_vllm() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm  # noqa: F401


def main() -> None:
    import benchmark
    import torch

    from pipeline_rl import Pacer
    from runtime.flags import parse_flags
    from runtime.parts import Run

    steps, argv = int(sys.argv[1]), sys.argv[2:]
    flags = parse_flags([*argv, *benchmark.STILL], "")
    completions = flags.batch_prompts * flags.rollouts

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(import_vllm)  # beside the start of our engine
        started = time.perf_counter()
        run = Run(flags)
        ours, versions = run.generator.on_main, itertools.count(1)
        with closing(run):
            ours.start(run.trainer.weights, 0)
            say("engine up", s=round(time.perf_counter() - started, 1))

            def sample():
                groups = ours.take(flags.batch_prompts)
                ours.release(len(groups))
                return groups

            def sampled(groups):
                return sum(sum(r.mask) for group in groups for r in group.rollouts)

            def drain():
                """Nobody enters, and the engine becomes empty."""
                ours.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
                while ours.in_loop(lambda generator: generator.free) < ours.engine.slots:
                    time.sleep(0.05)

            sample(), sample()
            started, count, inside = time.perf_counter(), 0, []
            for _ in range(steps):
                count += sampled(groups := sample())
                inside.append(ours.engine.slots - ours.free)
            seconds = time.perf_counter() - started
            say(
                "generator alone",
                tokens_s=round(count / seconds),
                completions_s=round(steps * completions / seconds, 1),
                batches=steps,
                s=round(seconds, 2),
                inside=inside,
            )
            drain()
            per_batch = sampled(groups)
            benchmark.optimizer_step(run, groups)
            wait()
            started = time.perf_counter()
            for _ in range(2):
                benchmark.optimizer_step(run, groups)
            wait()
            seconds = (time.perf_counter() - started) / 2
            peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0
            say(
                "trainer alone", tokens_s=round(per_batch / seconds), s_a_step=round(seconds, 3), peak_GB=round(peak, 1)
            )
            started = time.perf_counter()
            ours.push(run.trainer.weights, next(versions), release=0)
            pushed = time.perf_counter() - started
            ours.settle()
            say(
                "weights with nothing running",
                prepare_s=round(pushed, 3),
                all_s=round(time.perf_counter() - started, 3),
            )

            def turns(generator):
                generator.under_way.clear()
                generator.pacer = Pacer(flags.batch_prompts, 8, schedule="ppo_off_policy")

            started = time.perf_counter()
            ours.in_loop(turns)
            groups = ours.take(8 * flags.batch_prompts)
            sampling = time.perf_counter() - started
            for first in range(0, len(groups), flags.batch_prompts):
                benchmark.optimizer_step(run, groups[first : first + flags.batch_prompts])
            wait()
            training = time.perf_counter() - started - sampling
            ours.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
            ours.push(run.trainer.weights, next(versions), release=len(groups))
            ours.settle()
            seconds = time.perf_counter() - started
            say(
                "turns of 8",
                s_a_step=round(seconds / 8, 3),
                sampling_s=round(sampling, 2),
                training_s=round(training, 2),
                update_s=round(seconds - sampling - training, 3),
                tokens_s=round(sampled(groups) / seconds),
                completions_s=round(8 * completions / seconds, 1),
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            groups = groups[: flags.batch_prompts]
            per_batch = sampled(groups)
            requests = [(list(group.problem.prompt_ids), sum(r.mask)) for group in groups for r in group.rollouts]
            bare = (requests, ours.engine.model, flags.dtype, flags.max_num_seqs)
            started = time.perf_counter()
            other.submit(benchmark.bare_vllm, *bare).result()
            up = time.perf_counter() - started
            seconds = other.submit(benchmark.bare_vllm, *bare, steps).result()
            say("bare vLLM", tokens_s=round(steps * per_batch / seconds), s=round(seconds, 2), up_s=round(up, 1))
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os._exit(0)


if __name__ == "__main__":
    main()
