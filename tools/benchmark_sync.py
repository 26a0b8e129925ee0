"""How long an update of the weights stalls generation, by model size.

    python tools/benchmark_sync.py                         # 0.2M, 2M, 8M and 32M parameters
    python tools/benchmark_sync.py --sizes 0.2M 8M

A stall is pause, load, resume: `sync_seconds` of a run of `train.py`. In a pipeline 8 steps deep the trainer computes
its next step meanwhile, and requests are in flight. In an on-policy run the engine is empty and the trainer waits, so
nothing gets in the way; the ratio of the two is what working at the same time costs an update.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import Figure, Measured, Report, benchmark_parser, parse, ratios, take_turns
from subjects import QUIET, SIZES, STILL, Program, ours, random_model, warm_model

STEPS = 4  # updates of a turn


def stall(program: Program, shares: list[float]) -> float:
    """Mean seconds of an update, whose share of a step is added to `shares`. The first step after a thaw is left out:
    it contains the time in which the program was frozen."""
    program.advance(STEPS + 1)
    records = program.records("metrics.jsonl")[-STEPS:]
    stalled = sum(record["sync_seconds"] for record in records)
    shares.append(stalled / sum(record["seconds"] for record in records))
    return stalled / STEPS


def stalls(size: str, seed: int, repeats: int) -> tuple[Measured, list[float], float]:
    """(the stall by schedule, its share of a step of the pipeline, MB of weights) for one size of the model."""
    with ExitStack() as until_the_end:
        root, small = Path(until_the_end.enter_context(tempfile.TemporaryDirectory())), size == "0.2M"
        model = warm_model(seed) if small else random_model(root / "model", size)
        common = [*QUIET, *STILL, "--model", model, "--seed", str(seed), *([] if small else ["--batch_prompts", "2"])]

        def started(schedule: str, k: int) -> Program:
            program = Program(ours(*common, "--schedule", schedule, "--k", str(k)), root / schedule, 1)
            until_the_end.enter_context(closing(program))
            program.advance(2)  # start-up
            return program

        pipeline, on_policy = started("pipeline", 8), started("ppo_off_policy", 1)
        shares: list[float] = []
        found = take_turns({"pipeline 8": lambda: stall(pipeline, shares), "on-policy": lambda: stall(on_policy, [])},
                           repeats)  # fmt: skip
        return found, shares, (Path(model) / "model.safetensors").stat().st_size / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=list(SIZES), help="of the models")
    args = parse(parser, argv)
    report = Report(args)
    for size in args.sizes:
        found, shares, megabytes = stalls(size, args.seed, args.repeats)
        report.add({f"{size}, {name}": values for name, values in found.items()}, "s")
        report.figures += [
            Figure(f"{size}: stall in the pipeline / on-policy", ratios(*found.values())),
            Figure(f"{size}: stall / step", shares),
            Figure(f"{size}: MB/s, of the stall", [megabytes / seconds for seconds in found["pipeline 8"]]),
        ]
    report.close()


if __name__ == "__main__":
    main()
