"""What one process of lab/bench/gpu.py measures: a line of JSON on stdout for each figure, as soon as it is known.

    python lab/bench/gpu_sides.py both --model FOLDER [more flags of train.py]

both    Trainer and generator of one run, as train.py makes them: windows of steps with both, then each side alone, then
        a turn of 8 steps (PPO-off-policy-8).
trl     TRL's GRPOTrainer with vLLM in its own process, same model, prompts, lengths and batch.
It makes its imports, and then waits for the file that the environment variable GO names.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.cuda.is_available()
STEPS = 5  # of a window: with one probe of the weights check


def say(figure: str, **values: Any) -> None:
    print("\n" + json.dumps({"figure": figure} | values), flush=True)  # a line of its own, whatever stands before


def imports(*names: str) -> None:
    """Imports these modules, before the time counts."""
    for name in names:
        import_module(name)
    go = os.environ.get("GO")
    while go and not Path(go).exists() and os.getppid() > 1:  # at 1 nobody is left who would make it
        time.sleep(0.05)


def flags_of(argv: Sequence[str]) -> Any:
    try:
        from runtime.command_line import parse_flags  # until 17e9d0b
    except ImportError:
        from runtime.flags import parse_flags
    return parse_flags(argv, "")


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    started = time.perf_counter()
    work()
    if GPU:
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 4)


def peak_GB() -> float:
    """Most memory that this process's tensors had."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if GPU else 0.0


class Both:
    """Trainer and generator of one run."""

    def __init__(self, argv: Sequence[str]):
        from runtime.parts import Run
        from runtime.run import start

        self.flags = flags_of([*argv, "--max_steps", "80000"])
        self.flags.max_steps = 0
        self.run = Run(self.flags)
        self.generator = self.run.generator.on_main
        self.tokens = 0  # sampled so far
        seconds = timed(lambda: start(self.run))
        channel = getattr(self.generator.engine, "channel", None)
        on_card = bool(getattr(channel, "handle", b""))  # the engine reads the trainer's memory on the card
        say("engine started", s=seconds, weights_stay_on_card=on_card)

    def steps(self) -> None:
        """So many steps of the loop, and their figures."""
        import train

        since, first = time.time(), self.run.progress.step + 1
        self.flags.max_steps += STEPS
        train.train(self.run)
        records = [record for record in self.run.folder.read("metrics.jsonl") if record.get("step", 0) >= first]
        gaps = [record["logprob_gap"] for record in records if "logprob_gap" in record]
        seconds = sum(record["seconds"] for record in records)

        def rate(name: str) -> float:
            """A second."""
            return round(sum(record.get(name, 0) for record in records) / seconds, 3)

        before, self.tokens = self.tokens, records[-1]["tokens"]  # the log counts them from the start
        names = ("trained_tokens", "generator_idle", "trainer_idle", "sync_seconds")
        values = {"sampled_tokens": round((self.tokens - before) / seconds)} | {name: rate(name) for name in names}
        values["lag"] = round(sum(record["lag_mean"] for record in records) / STEPS, 2)
        values |= {"gap": max(gaps, default=None), "trainer_peak_GB": peak_GB(), "span": [since, time.time()]}
        say(f"steps {first} to {self.flags.max_steps}", s_a_step=round(seconds / STEPS, 3), **values)

    def batch(self) -> list[Any]:
        """Samples a batch; what it frees in the engine is filled at once."""
        groups = self.generator.take(self.flags.batch_prompts)
        self.generator.release(len(groups))
        return groups

    def generator_alone(self) -> None:
        self.run.evaluator.wait(self.run.progress)
        self.generator.settle()
        for _ in range(1 + self.generator.in_loop(lambda generator: generator.pacer.ready) // self.flags.batch_prompts):
            self.batch()  # those that were made before
        groups: list[Any] = []
        since, seconds = time.time(), timed(lambda: [groups.extend(self.batch()) for _ in range(6)])
        say("generator alone", tokens_s=round(tokens_of(groups) / seconds), span=[since, time.time()])

    def trainer_alone(self) -> None:
        groups = self.batch()
        self.generator.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
        while self.generator.in_loop(lambda generator: generator.free) < self.generator.engine.slots:
            time.sleep(0.02)  # until the engine is empty
        self.train_on(groups)
        since, seconds = time.time(), [timed(lambda: self.train_on(groups)) for _ in range(3)]
        rate = round(3 * tokens_of(groups) / sum(seconds))
        say("trainer alone", s_a_step=seconds, tokens_s=rate, span=[since, time.time()])
        prepare, version = self.generator.engine.prepare, self.run.progress.version
        prepared = [timed(lambda: prepare(self.run.trainer.weights, version)) for _ in range(3)]
        say("weights with nothing under way", prepare_s=prepared, all_s=[timed(lambda: self.push(0)) for _ in range(3)])

    def train_on(self, groups: Sequence[Any]) -> None:
        import benchmark

        benchmark.optimizer_step(self.run, groups)

    def push(self, release: int) -> None:
        self.run.progress.version += 1
        self.generator.push(self.run.trainer.weights, self.run.progress.version, release=release)
        self.generator.settle()

    def turn(self) -> None:
        """8 batches are sampled, then trained on, then the weights travel."""
        from pipeline_rl import Pacer

        size = self.flags.batch_prompts

        def begin(generator: Any) -> None:
            generator.under_way.clear()
            generator.pacer = Pacer(size, 8, schedule="ppo_off_policy")

        groups: list[Any] = []
        self.generator.in_loop(begin)
        since, sampling = time.time(), timed(lambda: groups.extend(self.generator.take(8 * size)))
        training = sum(timed(lambda n=n: self.train_on(groups[n : n + size])) for n in range(0, 8 * size, size))
        self.generator.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
        seconds = sampling + training + timed(lambda: self.push(len(groups)))
        rates = {"s_a_step": round(seconds / 8, 3), "tokens_s": round(tokens_of(groups) / seconds)}
        say("turn of 8", **rates, sampling_s=sampling, training_s=round(training, 4), span=[since, time.time()])


def tokens_of(groups: Sequence[Any]) -> int:
    """Sampled tokens."""
    return sum(sum(rollout.mask) for group in groups for rollout in group.rollouts)


def both(options: argparse.Namespace, argv: Sequence[str]) -> None:
    imports("train", "accelerate", "benchmark", "transformers.models.qwen3.modeling_qwen3")
    sides = Both(argv)
    for _ in range(2 if options.short else 4):  # the pipeline fills in the first
        sides.steps()
    if not options.short:
        sides.generator_alone()
        sides.trainer_alone()
        sides.turn()
    for process in psutil.Process().children(recursive=True):  # an orderly end takes seconds of a lent GPU
        process.kill()
    sides.generator.engine.shutdown()
    os._exit(0)


def trl(options: argparse.Namespace, argv: Sequence[str]) -> None:
    imports("benchmark", "datasets", "trl", "trl.trainer.grpo_trainer", "trl.generation.vllm_generation")
    import benchmark

    flags = flags_of(argv)
    benchmark.trl(options, flags)
    times = [json.loads(line)["at"] for line in Path(flags.output_dir, "metrics.jsonl").read_text().splitlines()]
    seconds = [round(after - before, 3) for before, after in itertools.pairwise(times)]  # from reward to reward
    say("TRL", s_a_step=seconds, peak_GB=peak_GB(), span=[times[0], times[-1]])
    os._exit(0)


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("question", choices=["both", "trl"])
    parser.add_argument("--root", default=str(ROOT), help="checkout of the project (this one)")
    parser.add_argument("--short", action="store_true", help="of `both`: two windows of steps, no side alone")
    parser.add_argument("--trl_options", default="{}", help="of `trl`: more of TRL's GRPOConfig, as JSON")
    known, rest = parser.parse_known_args()
    sys.path[:1] = [known.root, f"{known.root}/lab/bench", f"{known.root}/lab/tests/gpu"]
    globals()[known.question](known, rest)
