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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import subjects
import torch
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns, timed

BATCH, STEPS = 32, 8  # prompts; steps of a turn
FIRST, OTHERS = "pipeline-8", ("pipeline-1", "pipeline-0", "ppo_off_policy-1", "ppo_off_policy-8")
WAITS = ("generator_idle", "trainer_idle", "sync_seconds")


def segment(program: subjects.Program, schedule: str) -> dict[str, float]:
    """Seconds a step: `wall`, `cpu` of all processes, and WAITS, over STEPS steps, which are a round of k updates too.
    The round before them is not timed: its records contain the time in which the program was frozen."""
    program.advance(int(schedule[-1]) if schedule.startswith("ppo") else 3)
    cpu = program.cpu_seconds()
    found = {"wall": program.advance(STEPS), "cpu": program.cpu_seconds() - cpu}
    records = program.records("metrics.jsonl")[-STEPS:]
    found |= {name: sum(record[name] for record in records) for name in WAITS}
    return {name: seconds / STEPS for name, seconds in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of each trainer (1)")
    args = parse(parser, argv)
    report, model = Report(args), subjects.warm_model(args.seed)
    torch.set_num_threads(args.threads)
    side = subjects.TrainerSide(model, args.seed)
    common = [*subjects.QUIET, *subjects.STILL, "--seed", str(args.seed)]
    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in (FIRST, *OTHERS)}
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        generator = until_the_end.enter_context(subjects.built_in_generator(model, side.trainer.weights, args.seed))
        subjects.free_running(generator, BATCH)
        groups = generator.take(BATCH)
        subjects.drain(generator)

        def started(schedule: str) -> subjects.Program:
            name, _, k = schedule.rpartition("-")
            words = subjects.ours(*common, "--schedule", name, "--k", k)
            return subjects.Program(words, folder / schedule, args.threads)

        def sides() -> float:
            """The longer of generation and training by themselves, seconds a step."""
            training = timed(lambda: [side.step(side.batch(groups)) for _ in range(STEPS)]) / STEPS
            return max(training, subjects.seconds_by_itself(generator, BATCH, STEPS))

        def step(program: subjects.Program, schedule: str) -> float:
            found[schedule].append(segment(program, schedule))
            return found[schedule][-1]["wall"]

        first = until_the_end.enter_context(closing(started(FIRST)))
        first.advance(1)  # start-up; then it is frozen
        for schedule in OTHERS:
            with closing(started(schedule)) as second:
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
    report.close()


if __name__ == "__main__":
    main()
