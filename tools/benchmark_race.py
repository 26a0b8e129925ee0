"""Wall time and sampled tokens to a held-out pass rate, seed by seed, of our schedules and of TRL's GRPOTrainer.

    python tools/benchmark_race.py                         # 3 seeds x 4 contestants, 21 minutes
    python tools/benchmark_race.py --contestants pipeline-8:1 pipeline-1:1 --seeds 0

A contestant is `pipeline-K:THREADS`, `ppo_off_policy-K:THREADS` or `trl:THREADS`. Each has the machine to itself; its
start-up and its evaluations are off the clock.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import compute_to
from measuring import Figure, Measured, Report, above_zero, benchmark_parser, parse, positive, ratios
from subjects import SETTING, Program, ours, warm_model
from trl_side import new_environment, own_folder, theirs

CONTESTANTS = ["pipeline-8:1", "ppo_off_policy-8:2", "ppo_off_policy-1:2", "trl:2"]


def contestant(text: str) -> str:
    """The type of a contestant, for argparse."""
    label, _, threads = text.partition(":")
    schedule, _, k = label.rpartition("-")
    known = label == "trl" or (schedule in ("pipeline", "ppo_off_policy") and k.isdigit())
    if not known or not threads.isdigit() or int(threads) < 1 or label == "ppo_off_policy-0":
        kinds = "pipeline-K:THREADS, ppo_off_policy-K:THREADS or trl:THREADS"
        raise argparse.ArgumentTypeError(f"must be {kinds}, not {text!r}")
    return text


def command(name: str, seed: int, args: argparse.Namespace) -> tuple[list[str], int]:
    """(command line, threads) of a contestant."""
    label, _, threads = name.partition(":")
    both = ["--seed", str(seed), "--threads", threads, "--max_steps", str(args.max_steps)]
    if label == "trl":
        return theirs(new_environment(args.environment), "--model", warm_model(seed), *both), int(threads)
    schedule, _, k = label.rpartition("-")
    mine = [*SETTING, "--eval_every", "5", "--probe_every", "5", "--save_every", "0", "--schedule", schedule, "--k", k]
    return ours(*both, *mine), int(threads)


def evaluations(program: Program, rate: float) -> list[dict[str, Any]]:
    """Evaluations with their seconds, until one reaches `rate` or the program ends."""
    while True:
        ended = program.ended()
        records = program.records("eval.jsonl")
        for record in records:  # ours counts device-hours
            record.setdefault("seconds", record.get("device_hours", 0.0) * 3600 / min(2, os.cpu_count()))
        if ended or any(record["pass_rate"] >= rate for record in records):
            return records
        time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what it prints as JSON."""
    parser = benchmark_parser(__file__, __doc__)
    add = parser.add_argument
    add("--contestants", type=contestant, nargs="+", default=CONTESTANTS, help=f"({' '.join(CONTESTANTS)})")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    add("--rate", type=above_zero, default=0.9, help="held-out pass rate (0.9)")
    add("--max_steps", type=positive, default=200, help="the race ends there (200)")
    add("--output_dir", type=Path, default="runs/race", help="folder of the runs (runs/race)")
    add("--environment", type=own_folder, default="/tmp/trl-venv", help="TRL's, made if missing")
    args = parse(parser, argv)
    report = Report(args)
    seconds: Measured = {name: [] for name in args.contestants}
    tokens: Measured = {name: [] for name in args.contestants}
    for seed in args.seeds:
        for name in args.contestants:
            words, threads = command(name, seed, args)
            folder = args.output_dir / f"{name.replace(':', '-threads-')}-seed-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            program = Program(words, folder, threads)
            try:
                found = evaluations(program, args.rate)
            finally:
                program.close()
            seconds[name].append(compute_to(found, args.rate, "seconds"))
            tokens[name].append(compute_to(found, args.rate, "tokens"))
            print(f"{name} seed {seed}: {seconds[name][-1]:.0f} s, {tokens[name][-1]:,.0f} tokens", flush=True)
    report.add({f"{name}: time": values for name, values in seconds.items()}, f"s to {args.rate}")
    report.add({f"{name}: tokens": values for name, values in tokens.items()}, f"tokens to {args.rate}")
    first, *others = args.contestants
    for name in others:
        report.figures += [Figure(f"{first} / {name}: time", ratios(seconds[first], seconds[name]), most=1.0),
                           Figure(f"{first} / {name}: tokens", ratios(tokens[first], tokens[name]))]  # fmt: skip
    return report.close()


if __name__ == "__main__":
    main()
