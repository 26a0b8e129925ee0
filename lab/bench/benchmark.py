"""Three questions about speed; BENCHMARKS.md has the answers. Flags of train.py may follow, for all sides.

    python lab/bench/benchmark.py generator     # or overlap
    pip install --no-deps --target /tmp/trl trl==1.16.0
    PYTHONPATH=/tmp/trl python lab/bench/benchmark.py peer --batch_prompts 8 --model MODEL --dataset DATA

generator  Tokens a second: of sampling and training together, of our generator alone, of our trainer alone, and of
           vLLM's own `LLM.generate` on the same prompts and lengths.
overlap    Steps a second of train.py under each schedule.
peer       Completions a second of train.py, where every row trains and with its filters, and of TRL's GRPOTrainer,
           which samples with vLLM in its own process; with `transformers` by --trl_options '{"use_vllm": false}'.

Ours samples with lab/fast_vllm.py unless --engine says otherwise. The cases take turns (A B A B ...), so whatever else
the machine does affects all of them. But for train.py with its filters the work stays the same: at a rate of 1e-30 a
step changes nothing, no prompt retires and no row is filtered.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from curves import short

import losses
import train
from runtime.flags import Flags, UsageError, check_flags, parse_flags
from runtime.folder import Folder
from runtime.parts import Run, first_model, load_task, new_accelerator
from runtime.ranks import Ranks
from runtime.trainer import TrainingBatch
from vllm_engine import VLLMEngine

SETTING = ["--engine", "lab.fast_vllm:FastEngine", "--batch_prompts", "32", "--max_steps", "8000", "--save_every", "0"]
SETTING += ["--eval_every", "8000"]
TRAIN = [sys.executable, "train.py", *SETTING]
STILL = "--lr 1e-30 --pass_rate_threshold 2 --zero_variance keep".split()
SCHEDULES = ["pipeline-8", "pipeline-1", "pipeline-0", "ppo_off_policy-1", "ppo_off_policy-8"]
STEPS = 8  # of a turn; a multiple of every k above 1, since ppo_off_policy makes k steps at a time


def take_turns(cases: dict[str, Callable[[], float]], repeats: int, unit: str) -> None:
    """A B A B ...: prints the speed of each case, and the ratio of the first case's speed to it, turn by turn."""
    turns: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            turns[name].append(case())
            print(f"{name}: {short(turns[name][-1])} {unit}", file=sys.stderr, flush=True)
    first, *_ = turns
    print(f"| {unit} | median (least to greatest) | {first} / this |\n| --- | --- | --- |")
    for name, speeds in turns.items():
        ratios = [a / b for a, b in zip(turns[first], speeds, strict=True)]
        print(f"| {name} | {spread(speeds)} | {spread(ratios)} |")


def spread(values: Sequence[float]) -> str:
    return f"{short(statistics.median(values))} ({short(min(values))} to {short(max(values))})"


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def generator(args: argparse.Namespace, flags: Flags) -> None:
    """Trainer and generator, made as train.py makes them, take turns with bare vLLM."""
    run = Run(flags)
    ours, versions = run.generator.on_main, itertools.count(1)

    def sample() -> list[Any]:
        """One batch; what it frees in the engine is filled at once."""
        groups = ours.take(flags.batch_prompts)
        ours.release(len(groups))
        return groups

    def sample_and_train() -> None:
        groups = ours.take(flags.batch_prompts)
        optimizer_step(run, groups)
        ours.push(run.trainer.weights, next(versions), release=len(groups))

    def speed(work: Callable[[], object]) -> float:
        """Tokens a second. The first batches are not timed, and afterwards the engine becomes empty."""
        for _ in range(3):
            work()
        seconds = timed(lambda: [work() for _ in range(STEPS)])
        while ours.in_loop(lambda generator: generator.pacer.ready < len(generator.under_way)):
            time.sleep(0.02)
        return STEPS * tokens / seconds

    with closing(run), ProcessPoolExecutor(1, get_context("spawn")) as other:
        ours.start(run.trainer.weights, 0)
        groups = sample()
        requests = [(list(group.problem.prompt_ids), sum(r.mask)) for group in groups for r in group.rollouts]
        tokens = sum(length for _, length in requests)
        bare = (requests, ours.engine.model, flags.dtype, flags.max_num_seqs)
        other.submit(bare_vllm, *bare).result()
        cases = {
            "both": lambda: speed(sample_and_train),
            "generator alone": lambda: speed(sample),
            "trainer alone": lambda: speed(lambda: optimizer_step(run, groups)),
            "bare vLLM": lambda: STEPS * tokens / other.submit(bare_vllm, *bare, STEPS).result(),
        }
        take_turns(cases, args.repeats, "tokens/s")


def optimizer_step(run: Run, groups: Sequence[Any]) -> None:
    """As the loop of train.py makes it without filters."""
    rollouts, rows = train.rollouts_of(groups), train.token_rows(groups)
    group_ids = torch.arange(len(groups)).repeat_interleave(len(groups[0].rollouts))  # (N,)
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
    mask = train.pad([rollout.mask for rollout in rollouts], torch.bool)  # (N, T)
    behaviour = train.pad([rollout.logprobs for rollout in rollouts], torch.float32)  # (N, T)
    advantages = losses.normalize_advantages(rewards, group_ids)  # (N,)
    token_weights = losses.aggregation_weights(mask, group_ids)  # (N, T)
    run.trainer.backward(TrainingBatch(rows, behaviour, mask, advantages, token_weights))
    run.trainer.update(0)


bare_llm: Any = None


def bare_vllm(requests: list[tuple[list[int], int]], model: str, dtype: str, slots: int, times: int = 1) -> float:
    """In a process of its own: seconds that `LLM.generate` takes for these prompts and lengths, so many times over."""
    global bare_llm
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    if bare_llm is None:
        longest = max(len(prompt) + length for prompt, length in requests)
        options = {"max_model_len": longest, "skip_tokenizer_init": True, "generation_config": "vllm"}
        options["gpu_memory_utilization"] = 0.3  # beside our own engine
        bare_llm = LLM(model, dtype=dtype, max_num_seqs=slots, disable_log_stats=True, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests] * times
    params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for _, n in requests] * times
    return timed(lambda: bare_llm.generate(prompts, params, use_tqdm=False))


class Program:
    """A training program, frozen except in its turns. It writes a line a step to metrics.jsonl in its folder."""

    def __init__(self, command: Sequence[str], folder: Path, threads: int = 1):
        self.folder, self.log = Folder(folder), folder.with_suffix(".log").open("w")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [*command, "--output_dir", str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log)

    def each(self, action: str) -> list[psutil.Process]:
        """Does this to the program and to all processes that it started; the engine is one. Returns them."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            program = psutil.Process(self.process.pid)
            processes = [program, *program.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                getattr(process, action)()
        return processes

    def steps(self) -> int:
        return sum("step" in record for record in self.folder.read("metrics.jsonl"))

    def advance(self, count: int) -> float:
        """Lets it make `count` more steps; returns the seconds that they take. Raises RuntimeError if it ends."""
        target = self.steps() + count
        started = time.perf_counter()
        self.each("resume")
        while self.steps() < target:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.folder.path.name} ended: {Path(self.log.name).read_text()[-2000:]}")
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        self.each("suspend")
        return seconds

    def close(self) -> None:
        """Ends it and its processes."""
        self.process.terminate()
        processes = self.each("resume")
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            process.kill()
        self.process.wait()
        self.log.close()


def in_turns(commands: dict[str, Sequence[str]], args: argparse.Namespace, unit: str, count: int) -> None:
    """Programs take turns of `args.steps` steps; `count` units are a step."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        cases = {}
        for name, command in commands.items():
            threads = os.cpu_count() if name == "TRL" else args.threads
            program = stack.enter_context(closing(Program(command, root / name.replace(" ", "-"), threads)))
            program.advance(args.steps)  # start-up, and steps until the pipeline is full
            cases[name] = lambda program=program: count * args.steps / program.advance(args.steps)
        take_turns(cases, args.repeats, unit)


def overlap(args: argparse.Namespace, flags: Flags) -> None:
    schedules = {name: name.rsplit("-", 1) for name in SCHEDULES}
    ours = [*TRAIN, *STILL, *args.flags]
    commands = {name: [*ours, "--schedule", schedule, "--k", k] for name, (schedule, k) in schedules.items()}
    in_turns(commands, args, "steps/s", 1)


def peer(args: argparse.Namespace, flags: Flags) -> None:
    model = first_model(flags, Ranks(new_accelerator(flags)), load_task(flags))
    both = [*args.flags, "--model", model, "--length_control", "none"]
    commands = {"ours, every row trains": [*TRAIN, *both, *STILL], "ours with its filters": [*TRAIN, *both]}
    if args.without_filters:
        del commands["ours with its filters"]
    commands["TRL"] = [sys.executable, __file__, "trl", "--trl_options", args.trl_options, *SETTING, *both, *STILL]
    in_turns(commands, args, "completions/s", flags.batch_prompts * flags.rollouts)


def trl(args: argparse.Namespace, flags: Flags) -> None:
    """GRPOTrainer with train.py's model, problems, rewards, batch, loss and rate; no filter, and warm-up from 0."""
    engine = VLLMEngine(flags.model, (), 0, dtype=flags.dtype)
    os.environ |= engine.environment | os.environ  # vLLM reads it when it is imported
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    task, log = load_task(flags), Path(flags.output_dir, "metrics.jsonl")
    problems = {problem.key: problem for problem in task.train}
    prompts = [{"prompt": task.text(problem.prompt_ids), "key": key} for key, problem in problems.items()]
    log.parent.mkdir(parents=True)

    def reward(completion_ids: list[list[int]], key: list[str], **_: Any) -> list[float]:
        with log.open("a") as file:  # TRL calls this once a step, with all completions of its batch
            file.write(json.dumps({"step": 0, "at": time.time()}) + "\n")
        return [task.score(problems[k], [ids])[0][0] for k, ids in zip(key, completion_ids, strict=True)]

    completions = flags.batch_prompts * flags.rollouts
    microbatch = min(completions, 64)  # completions of a forward pass
    config = {
        "output_dir": flags.output_dir, "seed": flags.seed, "max_steps": flags.max_steps,
        "bf16": flags.dtype != "float32", "use_cpu": not torch.cuda.is_available(),
        "loss_type": "cispo", "epsilon_high": flags.eps_max,
        "scale_rewards": "batch", "num_generations": flags.rollouts, "max_completion_length": flags.completion_budget,
        "per_device_train_batch_size": microbatch, "gradient_accumulation_steps": completions // microbatch,
        "learning_rate": flags.lr, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": flags.warmup_steps,
        "adam_beta2": 0.95, "adam_epsilon": 1e-15, "weight_decay": 0.01,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
        "use_vllm": True, "vllm_importance_sampling_correction": False,  # the correction costs a forward pass
    }  # fmt: skip
    with closing(engine.channel):
        if not torch.cuda.is_available():
            mend_vllm(engine)
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(**config | json.loads(args.trl_options)),
            train_dataset=Dataset.from_list(prompts),
            processing_class=task.tokenizer,
        ).train()


def mend_vllm(engine: VLLMEngine) -> None:
    """Gives TRL's vLLM what it lacks on a CPU: the dtype and settings of ours, and weights through our channel. TRL
    copies weights into vLLM's parameters, but a CPU's linears have repacked ones, which nothing can be copied into."""
    from trl.generation import vllm_generation

    def sync_weights(generation: Any) -> None:
        engine.channel.prepare(dict(generation._iter_named_params()))
        generation.llm.collective_rpc("load_weight_file", args=(str(engine.channel.path), engine.channel.layout))
        generation.llm.reset_prefix_cache()

    vllm_generation.LLM = partial(vllm_generation.LLM, **engine.args)  # TRL's own arguments come after these
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


QUESTIONS = {function.__name__: function for function in (generator, overlap, peer, trl)}


def main(argv: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("question", choices=QUESTIONS, help="what to measure; `trl` is TRL's side of `peer`, alone")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each case (5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a turn of `peer` or `overlap` ({STEPS})")
    parser.add_argument("--threads", type=int, default=1, help="of train.py's trainer (1); TRL has one for each core")
    parser.add_argument("--without_filters", action="store_true", help="`peer` without that side, to save memory")
    parser.add_argument("--trl_options", default="{}", metavar="JSON", help="more of TRL's GRPOConfig")
    args, args.flags = parser.parse_known_args(argv)
    if min(args.steps, args.repeats, args.threads) < 1:
        parser.error("--steps, --repeats and --threads must be at least 1")
    if args.question == "overlap" and args.steps % STEPS:
        parser.error(f"--steps must be a multiple of {STEPS} for overlap, since a schedule makes so many at a time")
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no program is left behind
    with TemporaryDirectory() as folder:
        still = STILL if args.question == "generator" else []
        try:
            flags = parse_flags(["--output_dir", folder, *SETTING, *still, *args.flags], "")
            check_flags(flags)
        except UsageError as error:
            parser.error(str(error))
        QUESTIONS[args.question](args, flags)
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[1]:.2f} in the last five minutes")


if __name__ == "__main__":
    main()
