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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns
from subjects import QUIET, SIZES, STILL, Program, ours, random_model, warm_model

SCHEDULES = {"pipeline 8": ("pipeline", "8"), "on-policy": ("ppo_off_policy", "1")}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what it prints as JSON."""
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=list(SIZES), help="of the models")
    parser.add_argument("--steps", type=positive, default=4, help="updates of a turn (4)")
    args = parse(parser, argv)
    report = Report(args)
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            root, running, shares = Path(folder), {}, []
            small = size == "0.2M"
            model = warm_model(args.seed) if small else random_model(root / "model", size)
            common = [*QUIET, *STILL, "--model", model, "--seed", str(args.seed), "--max_steps", "80000"]
            common += [] if small else ["--batch_prompts", "2"]

            def stall(name: str, running: dict[str, Program] = running, shares: list[float] = shares) -> float:
                """Mean seconds of an update; the first step after a thaw contains the time that it was frozen."""
                running[name].advance(args.steps + 1)
                records = running[name].records("metrics.jsonl")[-args.steps :]
                stalled = sum(record["sync_seconds"] for record in records)
                if name == "pipeline 8":
                    shares.append(stalled / sum(record["seconds"] for record in records))
                return stalled / args.steps

            try:
                for name, (schedule, k) in SCHEDULES.items():
                    words = ours(*common, "--schedule", schedule, "--k", k)
                    running[name] = Program(words, root / schedule, 1)
                    running[name].advance(2)  # start-up
                found = take_turns({name: lambda name=name: stall(name) for name in SCHEDULES}, args.repeats)
            finally:
                for program in running.values():
                    program.close()
            megabytes = (Path(model) / "model.safetensors").stat().st_size / 1e6
        report.add({f"{size}, {name}": values for name, values in found.items()}, "s")
        report.figures += [
            Figure(f"{size}: stall in the pipeline / on-policy", ratios(*found.values())),
            Figure(f"{size}: stall / step", shares),
            Figure(f"{size}: MB/s, of the stall", [megabytes / seconds for seconds in found["pipeline 8"]]),
        ]
    return report.close()


if __name__ == "__main__":
    main()
