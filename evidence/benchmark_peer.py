"""Completions a second of our training and of TRL's GRPOTrainer on the same model, problems and batches.

    python evidence/benchmark_peer.py                                        # installs TRL into /tmp/trl-venv first
    python evidence/benchmark_peer.py --size 8M --batch_prompts 8 --steps 1
    python evidence/benchmark_peer.py --model runs/real-start/model --dataset runs/real-start/sums.jsonl --steps 1

Both are programs that neither evaluate nor save, each frozen while the other has its turn: ours with one thread
on either side, TRL with two threads. `trl_side.py` says what differs.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns
from subjects import QUIET, SIZES, Program, ours, random_model, warm_model
from trl_side import ROLLOUTS, theirs


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--size", choices=list(SIZES), default="0.2M", help="of the model; others sample 256 tokens")
    parser.add_argument("--steps", type=positive, default=6, help="of a turn (6)")
    parser.add_argument("--batch_prompts", type=positive, default=32, help="prompts of a step (32)")
    parser.add_argument("--model", default="", help="folder of a pretrained model in the place of --size")
    parser.add_argument("--dataset", default="", help="its problems")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parse(parser, argv)
    report, small = Report(args), args.size == "0.2M" and not args.model
    longest = 37 if small else 32 if args.model else 256
    with ExitStack() as until_the_end:
        root = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or (warm_model(args.seed) if small else random_model(root / "model", args.size))
        both = ["--model", model, "--seed", str(args.seed), "--batch_prompts", str(args.batch_prompts),
                "--dtype", args.dtype]  # fmt: skip
        if args.dataset:  # a pretrained model must not move: at this rate not even a weight of 0 does
            both += ["--dataset", args.dataset, "--held_out", "256", "--lr", "1e-60"]
        mine = [*both, *QUIET, "--length_control", "none", "--max_budget", str(longest - 4)]
        every_row = ["--zero_variance_filter", "false", "--pass_rate_threshold", "2"]
        commands = {"ours, every row trains": (ours(*mine, *every_row), 1)}
        if small:
            commands["ours, with its filters"] = (ours(*mine), 1)
        still = ["--max_steps", "80000", "--eval_every", "0", "--max_completion", str(longest)]
        commands["TRL"] = (theirs(*both, *still), 2)
        completions, cases = args.batch_prompts * ROLLOUTS * args.steps, {}
        for name, (command, threads) in commands.items():
            program = until_the_end.enter_context(closing(Program(command, root / name.replace(" ", "-"), threads)))
            program.advance(3 if small else 1)  # start-up, not timed
            cases[name] = lambda program=program: completions / program.advance(args.steps)
        found = take_turns(cases, args.repeats)
    report.add(found, "completions/s")
    least = None if args.model else 1.3 if small else 1.8
    report.figures = [Figure(f"{name} / TRL", ratios(values, found["TRL"]), least)
                      for name, values in found.items() if name != "TRL"]  # fmt: skip
    report.close()


if __name__ == "__main__":
    main()
