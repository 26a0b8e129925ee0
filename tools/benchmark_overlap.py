"""Wall time of a step under each schedule, and of either side by itself: how much of it hides behind the other side.

    python tools/benchmark_overlap.py

Each schedule is a run of `train.py`, frozen while the others have their turn. Efficiency is the longest of generation
by itself, training by itself, and CPU time over cores, divided by the wall time of a step: 1 is the best there can be.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns, timed
from subjects import QUIET, STILL, Program, TrainerSide, built_in_generator, drain, free_running, ours, warm_model

BATCH = 32  # prompts
SCHEDULES = (("pipeline", 8), ("pipeline", 1), ("pipeline", 0), ("ppo_off_policy", 1), ("ppo_off_policy", 8))
WAITS = ("generator_idle", "trainer_idle", "sync_seconds")


def segment(program: Program, round_of: int, count: int) -> dict[str, float]:
    """Seconds a step: `wall`, `cpu` of all processes, and WAITS, over `count` steps, rounded up to rounds of k updates.
    The round before them is not timed: its records contain the time in which the program was frozen."""
    count = -(-count // round_of) * round_of
    program.advance(max(round_of, 3))
    cpu = program.cpu_seconds()
    wall = program.advance(count)
    found = {"wall": wall, "cpu": program.cpu_seconds() - cpu}
    records = program.records("metrics.jsonl")[-count:]
    found |= {name: sum(record[name] for record in records) for name in WAITS}
    return {name: seconds / count for name, seconds in found.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what it prints as JSON."""
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--steps", type=positive, default=8, help="of a turn (8)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of each trainer (1)")
    args = parse(parser, argv)
    report, model, found = Report(args), warm_model(args.seed), {}
    torch.set_num_threads(args.threads)
    side = TrainerSide(model, args.seed)
    common = [*QUIET, *STILL, "--seed", str(args.seed), "--threads", str(args.threads), "--max_steps", "80000"]
    with ExitStack() as open_until_the_end:
        folder = Path(open_until_the_end.enter_context(tempfile.TemporaryDirectory()))
        generator = open_until_the_end.enter_context(built_in_generator(model, side.trainer.weights, args.seed))
        free_running(generator, BATCH)
        groups = generator.take(BATCH)
        drain(generator)

        def generation() -> float:
            free_running(generator, BATCH)
            generator.take(BATCH)  # the engine fills up first
            seconds = timed(lambda: [generator.take(BATCH) for _ in range(args.steps)]) / args.steps
            drain(generator)
            return seconds

        def training() -> float:
            return timed(lambda: [side.step(side.batch(groups)) for _ in range(args.steps)]) / args.steps

        cases = {"generation by itself": generation, "training by itself": training}
        for schedule, k in SCHEDULES:
            name, words = f"{schedule} {k}", ours(*common, "--schedule", schedule, "--k", str(k))
            program = Program(words, folder / f"{schedule}-{k}", args.threads)
            open_until_the_end.callback(program.close)
            round_of = k if schedule == "ppo_off_policy" else 1
            program.advance(round_of)  # start-up

            def step(name: str = name, program: Program = program, round_of: int = round_of) -> float:
                found.setdefault(name, []).append(segment(program, round_of, args.steps))
                return found[name][-1]["wall"]

            cases[name] = step
        measured = take_turns(cases, args.repeats)
    report.add(measured, "s a step")
    sides = list(zip(measured["generation by itself"], measured["training by itself"], strict=True))
    for name, turns in found.items():
        report.add({f"{name}, core-seconds": [turn["cpu"] for turn in turns]}, "s a step")
        limit = [max(*side, turn["cpu"] / os.cpu_count()) for side, turn in zip(sides, turns, strict=True)]
        target = 0.9 if name == "pipeline 8" else None
        idle = [(turn["generator_idle"] + turn["sync_seconds"]) / turn["wall"] for turn in turns]
        report.figures += [
            Figure(f"{name}: efficiency", ratios(limit, measured[name]), least=target),
            Figure(f"{name}: trainer idle", [turn["trainer_idle"] / turn["wall"] for turn in turns]),
            Figure(f"{name}: generator idle", idle),
        ]
        if name != "pipeline 8":
            longer = ratios(measured[name], measured["pipeline 8"])
            report.figures.append(Figure(f"{name} / pipeline 8, wall time a step", longer))
    return report.close()


if __name__ == "__main__":
    main()
