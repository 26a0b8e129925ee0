"""What one process of lab/bench/gpu.py measures: a line of JSON on stdout for each figure, as soon as it is known.

    python lab/bench/gpu_sides.py both --seconds 120 --model FOLDER [more flags of train.py]

shapes     Makes a model with random weights, `tiny` or `qwen`, prompts and a reward, in the present folder.
both       Trainer and generator of one run, as train.py makes them: windows of steps with both, then each side alone,
           then a turn of 8 steps (PPO-off-policy-8). One engine start for all; ends when the seconds are used up.
trl        TRL's GRPOTrainer with vLLM in its own process, same model, prompts, lengths and batch.

--root FOLDER takes another checkout of the project. If the environment variable GO names a file, the process makes its
imports and waits for that file.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 5  # of a window: with one probe of the weights check
STARTED = time.monotonic()
CALLS = ("backward", "update", "wait", "push", "prepare")  # of which the seconds are noted: see `Both`


def say(figure: str, **values: Any) -> None:
    print("\n" + json.dumps({"figure": figure} | values), flush=True)  # a line of its own, whatever stands before


def imports(root: str, *modules: str) -> None:
    """Imports of this checkout, before the time counts."""
    sys.path[:1] = [root, f"{root}/lab/bench", f"{root}/lab/tests/gpu"]
    for name in modules:
        __import__(name)
    go = os.environ.get("GO")
    while go and not Path(go).exists():
        time.sleep(0.05)
        if os.getppid() == 1:
            sys.exit(1)  # nobody is left who would make it
    global STARTED
    STARTED = time.monotonic()


def wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_GB() -> float:
    """Most memory that this process's tensors had, in GB."""
    import torch

    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else 0.0


def timed(work: Callable[[], object]) -> float:
    wait_for_device()
    started = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - started


def rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    return [round(value, digits) for value in values]


# -------------------------------------------------------------------------------------------------------------- shapes


def shapes(options: argparse.Namespace, names: Sequence[str]) -> None:
    imports(options.root, "torch", "transformers", "small")
    import torch
    from small import QWEN3_06B, TINY
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from tasks import arithmetic

    [name] = names
    sizes, folder, end = {"tiny": TINY, "qwen": QWEN3_06B}[name], Path(name), arithmetic.IDS["<eos>"]
    ends = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **ends, max_position_embeddings=4096))
    model.bfloat16().save_pretrained(folder / "model")
    words = dict(arithmetic.IDS)  # and a word for each other token: TRL decodes them all
    words |= {f"t{i}": i for i in range(len(words), sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    rows = [{"question": " ".join(digits), "answer": digits[0]} for digits in itertools.product("0123456789", repeat=3)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("import random\ndef coin(*_):\n    return random.random() < 0.5\n")


# ---------------------------------------------------------------------------------------------------------------- both


class Both:
    """Trainer and generator of one run."""

    def __init__(self, argv: Sequence[str]):
        import psutil

        from runtime.flags import parse_flags
        from runtime.parts import Run
        from runtime.run import start

        self.flags = parse_flags(argv, "")
        self.flags.max_steps = 0
        self.run = Run(self.flags)
        self.generator = self.run.generator.on_main
        self.tokens = 0  # sampled so far
        self.seconds: dict[str, list[float]] = {name: [] for name in CALLS}
        # `backward`, `update` and `wait` (for an evaluation or a probe) are the trainer's work; while it has to `push`
        # weights it stands still, and `prepare` is the part of that in which they are copied.
        owners = self.run.trainer, self.run.trainer, self.run.evaluator, self.run.generator, self.generator.engine
        for owner, name in zip(owners, CALLS, strict=True):
            setattr(owner, name, self.noted(name, getattr(owner, name)))
        started = time.perf_counter()
        start(self.run)
        channel = getattr(self.generator.engine, "channel", None)
        on_card = bool(getattr(channel, "handle", b""))  # the engine reads the trainer's memory on the card
        say("engine started", s=round(time.perf_counter() - started, 1), weights_stay_on_card=on_card)
        self.processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds[name].append(time.perf_counter() - started)

        return call

    def cpu_seconds(self) -> list[float]:
        """Of the trainer's process, and of those that it started."""
        times = [sum(process.cpu_times()[:2]) for process in self.processes if process.is_running()]
        return [times[0], sum(times[1:])]

    def steps(self, count: int) -> None:
        """So many steps of the loop, and their figures."""
        import train

        for values in self.seconds.values():
            values.clear()
        cpu, since = self.cpu_seconds(), time.time()
        first = self.run.progress.step + 1
        self.flags.max_steps += count
        train.train(self.run)
        records = [record for record in self.run.folder.read("metrics.jsonl") if record.get("step", 0) >= first]
        before, self.tokens = self.tokens, records[-1]["tokens"]  # the log counts them from the start
        seconds = sum(record["seconds"] for record in records)

        def total(name: str) -> float:
            return sum(record.get(name, 0) for record in records)

        def logged(name: str, digits: int) -> list[float]:
            return rounded([record[name] for record in records if name in record], digits)

        say(
            f"steps {first} to {first + count - 1}",
            s_a_step=round(seconds / count, 3), each=logged("seconds", 2),
            sampled_tokens_s=round((records[-1]["tokens"] - before) / seconds),
            trained_tokens_s=round(total("trained_tokens") / seconds),
            pause_s=round(total("sync_seconds") / max(1, total("updated")), 4),
            **{f"{name}_s": round(statistics.median(values or [0]), 4) for name, values in self.seconds.items()},
            paused=round(total("sync_seconds") / seconds, 4),
            generator_idle=round(total("generator_idle") / seconds, 3),
            trainer_idle=round(total("trainer_idle") / seconds, 3), requests=round(total("requests") / count),
            lag=round(total("lag_mean") / count, 2), gaps=logged("logprob_gap", 7), rho=logged("ratio_mean", 4),
            cores=[round((b - a) / seconds, 2) for a, b in zip(cpu, self.cpu_seconds(), strict=True)],
            trainer_peak_GB=peak_GB(), span=[since, time.time()],
        )  # fmt: skip

    def batch(self) -> list[Any]:
        """Samples a batch; what it frees in the engine is filled at once."""
        groups = self.generator.take(self.flags.batch_prompts)
        self.generator.release(len(groups))
        return groups

    def drain(self) -> None:
        """Nobody enters, and the engine becomes empty."""
        self.generator.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
        while self.generator.in_loop(lambda generator: generator.free) < self.generator.engine.slots:
            time.sleep(0.02)

    def generator_alone(self) -> None:
        self.run.evaluator.wait(self.run.progress)
        self.generator.settle()
        for _ in range(1 + self.generator.in_loop(lambda generator: generator.pacer.ready) // self.flags.batch_prompts):
            self.batch()  # those that were made before
        since, speeds = time.time(), []
        for _ in range(3):
            started = time.perf_counter()
            tokens = sum(map(tokens_of, self.batch() + self.batch()))
            speeds.append(round(tokens / (time.perf_counter() - started)))
        say("generator alone", tokens_s=speeds, span=[since, time.time()])

    def trainer_alone(self) -> None:
        import benchmark

        self.groups = self.batch()
        self.drain()
        benchmark.optimizer_step(self.run, self.groups)
        since = time.time()
        seconds = [timed(lambda: benchmark.optimizer_step(self.run, self.groups)) for _ in range(3)]
        tokens = sum(map(tokens_of, self.groups))
        rate = round(3 * tokens / sum(seconds))
        say("trainer alone", s_a_step=rounded(seconds), tokens_s=rate, span=[since, time.time()])
        pushes = rounded([timed(lambda: self.push(0)) for _ in range(3)], 4)
        prepared = rounded(self.seconds["prepare"][-3:], 4)
        say("weights with nothing under way", prepare_s=prepared, all_s=pushes)

    def push(self, release: int) -> None:
        progress = self.run.progress
        progress.version += 1
        self.generator.push(self.run.trainer.weights, progress.version, release=release)
        self.generator.settle()

    def turn(self) -> None:
        """8 batches are sampled, then trained on, then the weights travel."""
        import benchmark

        from pipeline_rl import Pacer

        size = self.flags.batch_prompts

        def begin(generator: Any) -> None:
            generator.under_way.clear()
            generator.pacer = Pacer(size, 8, schedule="ppo_off_policy")

        since, started = time.time(), time.perf_counter()
        self.generator.in_loop(begin)
        groups = self.generator.take(8 * size)
        sampling = time.perf_counter() - started
        batches = [groups[first : first + size] for first in range(0, 8 * size, size)]
        training = timed(lambda: [benchmark.optimizer_step(self.run, batch) for batch in batches])
        self.generator.in_loop(lambda generator: setattr(generator.pacer, "may_admit", lambda: False))
        self.push(len(groups))
        seconds = time.perf_counter() - started
        parts = {"sampling_s": round(sampling, 2), "training_s": round(training, 2)}
        tokens = round(sum(map(tokens_of, groups)) / seconds)
        say("turn of 8", s_a_step=round(seconds / 8, 3), tokens_s=tokens, **parts, span=[since, time.time()])


def tokens_of(group: Any) -> int:
    """Sampled tokens of a group."""
    return sum(sum(rollout.mask) for rollout in group.rollouts)


def both(options: argparse.Namespace, argv: Sequence[str]) -> None:
    imports(options.root, "train", "runtime.run", "accelerate", "benchmark", "transformers.models.qwen3.modeling_qwen3")
    sides = Both([*argv, "--max_steps", "80000"])
    windows = [lambda: sides.steps(STEPS)] * (1 + options.windows)  # the pipeline fills in the first
    alone = [sides.generator_alone, sides.trainer_alone, sides.turn] if options.alone else []
    longest, code = 0.0, 0  # seconds of a part; the exit code
    try:
        for part in [*windows, *alone]:
            if time.monotonic() - STARTED + longest > options.seconds:
                say("left out", what=getattr(part, "__name__", "steps"))
                continue
            longest = max(longest, timed(part))
    except Exception:
        traceback.print_exc()
        code = 1
    for process in sides.processes[1:]:  # an orderly end takes seconds of a lent GPU
        process.kill()
    sides.generator.engine.shutdown()
    sys.stdout.flush()
    os._exit(code)


# ----------------------------------------------------------------------------------------------------------------- trl


def trl(options: argparse.Namespace, argv: Sequence[str]) -> None:
    imports(options.root, "benchmark", "datasets", "trl", "trl.trainer.grpo_trainer", "trl.generation.vllm_generation")
    import benchmark

    from runtime.flags import parse_flags

    flags = parse_flags(argv, "")
    benchmark.trl(options, flags)
    times = [json.loads(line)["at"] for line in Path(flags.output_dir, "metrics.jsonl").read_text().splitlines()]
    seconds = [after - before for before, after in itertools.pairwise(times)]  # from reward to reward, a whole step
    rates = {"completions_s": round(flags.batch_prompts * flags.rollouts / statistics.median(seconds), 1)}
    say("TRL", s_a_step=rounded(seconds), **rates, peak_GB=peak_GB(), span=[times[0], times[-1]])
    os._exit(0)


QUESTIONS = {function.__name__: function for function in (shapes, both, trl)}

if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--root", default=str(HERE.parents[1]), help="checkout of the project (this one)")
    parser.add_argument("--seconds", type=float, default=1e9, help="of `both`, without its imports")
    parser.add_argument("--windows", type=int, default=3, help="of `both`, each of 5 steps, after the first")
    parser.add_argument("--alone", type=int, default=1, help="of `both`: 0 leaves out each side alone")
    parser.add_argument("--trl_options", default="{}", help="of `trl`: more of TRL's GRPOConfig, as JSON")
    known, rest = parser.parse_known_args()
    QUESTIONS[known.question](known, rest)
