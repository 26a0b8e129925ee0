"""Wall time and sampled tokens to a held-out pass rate, seed by seed, of our schedules and of TRL's GRPOTrainer.

    python tools/benchmark_race.py                         # 3 seeds x 4 contestants, 21 minutes

Each contestant has the machine to itself, with its best number of threads; its start-up and its evaluations are off the
clock.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import compute_to
from measuring import Figure, Measured, Report, benchmark_parser, parse, ratios
from subjects import SETTING, Program, ours, warm_model
from trl_side import theirs

RATE, MAX_STEPS = 0.9, 200  # held-out pass rate to reach; the race ends there
CONTESTANTS = {  # name -> CPU threads, flags of train.py
    "pipeline-8": (1, ["--schedule", "pipeline", "--k", "8"]),
    "ppo_off_policy-8": (2, ["--schedule", "ppo_off_policy", "--k", "8"]),
    "ppo_off_policy-1": (2, ["--schedule", "ppo_off_policy", "--k", "1"]),
    "trl": (2, []),
}


def program_of(name: str, seed: int) -> Program:
    """A contestant, started."""
    threads, flags = CONTESTANTS[name]
    both = ["--seed", str(seed), "--threads", str(threads), "--max_steps", str(MAX_STEPS)]
    mine = [*both, *SETTING, *flags, "--eval_every", "5", "--probe_every", "5", "--save_every", "0"]
    folder = Path(f"runs/race/{name}-seed-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    return Program(theirs("--model", warm_model(seed), *both) if name == "trl" else ours(*mine), folder, threads)


def evaluations(program: Program, rate: float) -> list[dict[str, Any]]:
    """Evaluations with their seconds, until one reaches `rate` or the program ends."""
    while True:
        ended = program.ended()
        records = program.records("eval.jsonl")
        for record in records:  # ours counts device-hours, of the cores that its trainer and its engine use
            devices = min(os.cpu_count(), program.threads + 1)
            record.setdefault("seconds", record.get("device_hours", 0.0) * 3600 / devices)
        if ended or any(record["pass_rate"] >= rate for record in records):
            return records
        time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    args = parse(parser, argv)
    report = Report(args)
    seconds: Measured = {name: [] for name in CONTESTANTS}
    tokens: Measured = {name: [] for name in CONTESTANTS}
    for seed in args.seeds:
        for name in CONTESTANTS:
            program = program_of(name, seed)
            try:
                found = evaluations(program, RATE)
            finally:
                program.close()
            seconds[name].append(compute_to(found, RATE, "seconds"))
            tokens[name].append(compute_to(found, RATE, "tokens"))
            print(f"{name} seed {seed}: {seconds[name][-1]:.0f} s, {tokens[name][-1]:,.0f} tokens", flush=True)
    report.add({f"{name}: time": values for name, values in seconds.items()}, f"s to {RATE}")
    report.add({f"{name}: tokens": values for name, values in tokens.items()}, f"tokens to {RATE}")
    first, *others = CONTESTANTS
    for name in others:
        report.figures += [Figure(f"{first} / {name}: time", ratios(seconds[first], seconds[name]), most=1.0),
                           Figure(f"{first} / {name}: tokens", ratios(tokens[first], tokens[name]))]  # fmt: skip
    report.close()


if __name__ == "__main__":
    main()
