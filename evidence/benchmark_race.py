"""Wall time and sampled tokens to a held-out pass rate, seed by seed, of our schedules and of TRL's GRPOTrainer.

    python evidence/benchmark_race.py                         # 3 seeds x 4 contestants, 21 minutes
    python evidence/benchmark_race.py --model MODEL --dataset DATA --dtype bfloat16   # a model of your own

Each contestant has the machine to itself, with its best number of threads; its start-up and its evaluations are off the
clock. A pretrained model is trained as `make real` does it: by `pipeline` 8 for all `--steps`, then by TRL for as much
time; what each has learned is compared at equal times as well.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from figures import compute_to
from measuring import Figure, Measured, Report, benchmark_parser, parse, positive, ratios
from subjects import SETTING, Program, ours, warm_model
from trl_side import theirs

RATE, MAX_STEPS = 0.9, 200  # held-out pass rate to reach; the race ends there
REAL_RATE, REAL_STEPS = 0.3, 20  # of a pretrained model, which goes on to its last step
CONTESTANTS = {  # name -> CPU threads, flags of train.py
    "pipeline-8": (1, ["--schedule", "pipeline", "--k", "8"]),
    "ppo_off_policy-8": (2, ["--schedule", "ppo_off_policy", "--k", "8"]),
    "ppo_off_policy-1": (2, ["--schedule", "ppo_off_policy", "--k", "1"]),
    "trl": (2, []),
}
# Of `make real`: what TRL has a word for, and what only train.py has.
REAL = ["--batch_prompts", "16", "--lr", "1e-5", "--held_out", "256", "--eval_every", "2", "--penalty_window", "8"]
REAL_OURS = ["--length_control", "penalty", "--max_budget", "8", "--answer_budget", "8", "--eval_samples", "1",
             "--tokens_per_microbatch", "1024", "--share_prompts", "true"]  # fmt: skip
GB = 1e9


def program_of(name: str, seed: int, args: argparse.Namespace) -> Program:
    """A contestant, started."""
    threads, flags = CONTESTANTS[name]
    both = ["--seed", str(seed), "--max_steps", str(args.steps)]
    mine = [*SETTING, *flags, "--save_every", "0"]
    if args.model:
        both += ["--model", args.model, "--dataset", args.dataset, "--dtype", args.dtype, *REAL]
        mine, other = [*both, *mine, *REAL_OURS], [*both, "--max_completion", "16"]
    else:
        mine, other = [*both, *mine, "--eval_every", "5", "--probe_every", "5"], ["--model", warm_model(seed), *both]
    folder = Path(f"runs/{'race-real' if args.model else 'race'}/{name}-seed-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    return Program(theirs(*other) if name == "trl" else ours(*mine), folder, threads)


def evaluations(program: Program, rate: float, until: float = math.inf) -> list[dict[str, Any]]:
    """Evaluations with their seconds, until one reaches `rate` or comes `until` seconds after the start, or the program
    ends."""
    while True:
        ended = program.ended()
        program.watch_memory()
        records = program.records("eval.jsonl")
        for record in records:  # ours counts device-hours, of the cores that its trainer and its engine use
            devices = min(os.cpu_count(), program.threads + 1)
            record.setdefault("seconds", record.get("device_hours", 0.0) * 3600 / devices)
        if ended or any(record["pass_rate"] >= rate or record["seconds"] >= until for record in records):
            return records
        time.sleep(0.5)


def at_equal_times(runs: dict[str, list[dict[str, Any]]]) -> Measured:
    """Pass rate of each contestant after a quarter, a half and all of the time of the one that ended first, on the
    straight line between its evaluations."""
    shorter = min(records[-1]["seconds"] for records in runs.values())
    found: Measured = {}
    for part, share in {"1/4": 0.25, "1/2": 0.5, "1": 1.0}.items():
        for name, records in runs.items():
            times, rates = zip(*((record["seconds"], record["pass_rate"]) for record in records), strict=True)
            found[f"{name} after {part}"] = [float(np.interp(share * shorter, times, rates))]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--model", default="", help="folder of a pretrained model in the place of the built-in one")
    parser.add_argument("--dataset", default="", help="its problems")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of its forward pass")
    parser.add_argument("--steps", type=positive, help=f"at most ({MAX_STEPS}, or {REAL_STEPS} with --model)")
    args = parse(parser, argv)
    args.steps = args.steps or (REAL_STEPS if args.model else MAX_STEPS)
    rate = REAL_RATE if args.model else RATE
    names = ["pipeline-8", "trl"] if args.model else list(CONTESTANTS)
    report = Report(args)
    seconds: Measured = {name: [] for name in names}
    tokens: Measured = {name: [] for name in names}
    memory: Measured = {name: [] for name in names}
    speed: Measured = {name: [] for name in names}
    rates: Measured = {}
    for seed in args.seeds:
        runs: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            program, until = program_of(name, seed, args), math.inf
            if args.model and runs:
                until = runs[names[0]][-1]["seconds"]
            try:
                runs[name] = evaluations(program, math.inf if args.model else RATE, until)
            finally:
                program.close()
            rates_so_far = [record["pass_rate"] for record in runs[name]]
            for axis, found in (("seconds", seconds), ("tokens", tokens)):
                found[name].append(compute_to([record[axis] for record in runs[name]], rates_so_far, rate))
            memory[name].append(program.peak_memory / GB)
            speed[name].append(runs[name][-1]["step"] / runs[name][-1]["seconds"])
            print(f"{name} seed {seed}: {seconds[name][-1]:.0f} s, {tokens[name][-1]:,.0f} tokens", flush=True)
        for name, values in at_equal_times(runs).items() if args.model else ():
            rates.setdefault(name, []).extend(values)
    report.add({f"{name}: time": values for name, values in seconds.items()}, f"s to {rate}")
    report.add({f"{name}: tokens": values for name, values in tokens.items()}, f"tokens to {rate}")
    report.add({f"{name}: speed": values for name, values in speed.items()}, "steps/s")
    report.add({f"{name}: most memory": values for name, values in memory.items()}, "GB")
    report.add(rates, "pass rate")
    first, *others = names
    for name in others:
        report.figures += [Figure(f"{first} / {name}: time", ratios(seconds[first], seconds[name]), most=1.0),
                           Figure(f"{first} / {name}: tokens", ratios(tokens[first], tokens[name])),
                           Figure(f"{first} / {name}: speed", ratios(speed[first], speed[name]))]  # fmt: skip
    report.close()


if __name__ == "__main__":
    main()
