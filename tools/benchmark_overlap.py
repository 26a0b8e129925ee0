"""Wall time of a step under each schedule, and of either side by itself: how much of it hides behind the other side.

    python tools/benchmark_overlap.py

Each schedule is a run of `train.py`; `pipeline-8` takes turns with one other at a time, and is frozen meanwhile. The
efficiency of a schedule is the longest of generation by itself, training by itself, and CPU time over cores, divided by
the wall time of a step: 1 is the best there can be.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import subjects
import torch
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns, timed

BATCH = 32  # prompts
FIRST, OTHERS = "pipeline-8", ("pipeline-1", "pipeline-0", "ppo_off_policy-1", "ppo_off_policy-8")
WAITS = ("generator_idle", "trainer_idle", "sync_seconds")


def segment(program: subjects.Program, schedule: str, count: int) -> dict[str, float]:
    """Seconds a step: `wall`, `cpu` of all processes, and WAITS, over `count` steps, rounded up to rounds of k updates.
    The round before them is not timed: its records contain the time in which the program was frozen."""
    round_of = int(schedule[-1]) if schedule.startswith("ppo") else 1
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
    parser.add_argument("--against", nargs="+", choices=OTHERS, default=list(OTHERS), help="schedules (all of them)")
    args = parse(parser, argv)
    report, model = Report(args), subjects.warm_model(args.seed)
    torch.set_num_threads(args.threads)
    side = subjects.TrainerSide(model, args.seed)
    common = [*subjects.QUIET, *subjects.STILL, "--seed", str(args.seed), "--threads", str(args.threads)]

    def started(schedule: str, folder: Path) -> subjects.Program:
        name, _, k = schedule.rpartition("-")
        words = subjects.ours(*common, "--max_steps", "80000", "--schedule", name, "--k", k)
        return subjects.Program(words, folder / schedule, args.threads)

    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in (FIRST, *args.against)}
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        generator = until_the_end.enter_context(subjects.built_in_generator(model, side.trainer.weights, args.seed))
        subjects.free_running(generator, BATCH)
        groups = generator.take(BATCH)
        subjects.drain(generator)
        first = until_the_end.enter_context(closing(started(FIRST, folder)))
        first.advance(1)  # start-up; then it is frozen

        def sides() -> float:
            """The longer of generation and training by themselves, seconds a step."""
            training = timed(lambda: [side.step(side.batch(groups)) for _ in range(args.steps)]) / args.steps
            return max(training, subjects.seconds_by_itself(generator, BATCH, args.steps))

        def step(program: subjects.Program, schedule: str) -> float:
            found[schedule].append(segment(program, schedule, args.steps))
            return found[schedule][-1]["wall"]

        for schedule in args.against:
            with closing(started(schedule, folder)) as second:
                second.advance(1)
                cases = {"longer side": sides, FIRST: lambda: step(first, FIRST),
                         schedule: lambda p=second, s=schedule: step(p, s)}  # fmt: skip
                measured = take_turns(cases, args.repeats)
            report.add({f"{name} (with {schedule})": turns for name, turns in measured.items()}, "s a step")
            for name in (FIRST, schedule):
                for turn, longest in zip(found[name][-args.repeats :], measured["longer side"], strict=True):
                    turn["efficiency"] = max(longest, turn["cpu"] / os.cpu_count()) / turn["wall"]
            longer = ratios(measured[schedule], measured[FIRST])
            report.figures.append(Figure(f"{schedule} / {FIRST}, wall time a step", longer))
    for schedule, turns in found.items():
        idle = [(turn["generator_idle"] + turn["sync_seconds"]) / turn["wall"] for turn in turns]
        target = 0.9 if schedule == FIRST else None
        report.figures += [
            Figure(f"{schedule}: efficiency", [turn["efficiency"] for turn in turns], least=target),
            Figure(f"{schedule}: trainer idle", [turn["trainer_idle"] / turn["wall"] for turn in turns]),
            Figure(f"{schedule}: generator idle or paused", idle),
        ]
    return report.close()


if __name__ == "__main__":
    main()
