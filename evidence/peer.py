"""Our training against TRL's GRPOTrainer on the same model, problems and batches; `trl_side.py` says what differs.

    python evidence/peer.py speed                              # installs TRL into /tmp/trl-venv first
    python evidence/peer.py speed --size 8M --batch_prompts 8 --steps 1
    python evidence/peer.py race                               # 3 seeds x 4 contestants, 21 minutes
    python evidence/peer.py race --model MODEL --dataset DATA --dtype bfloat16     # a model of your own

*speed*, in completions a second: programs that neither evaluate nor save, each frozen while another has its turn, ours
with one thread on either side and TRL with two. *race*, to a held-out pass rate, in wall time and sampled tokens, seed
by seed: each has the machine to itself, with its best number of threads; its start-up and its evaluations are off the
clock. A pretrained model is trained as `make real` does it: by `pipeline` 8 for all `--steps`, then by TRL for as much
time, and what each has learned by then is compared.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import compute_to
from measuring import Figure, Measured, Report, benchmark_parser, parse, positive, ratios, take_turns
from subjects import QUIET, SETTING, SIZES, Program, ours, random_model, warm_model
from trl_side import ROLLOUTS, theirs

RATE, MAX_STEPS = 0.9, 200  # held-out pass rate to reach; the race ends there
REAL_RATE, REAL_STEPS = 0.3, 20  # of a pretrained model, which goes on to its last step
CONTESTANTS = {  # name -> CPU threads, flags of train.py
    "pipeline-8": (1, ["--schedule", "pipeline", "--k", "8"]),
    "ppo_off_policy-8": (2, ["--schedule", "ppo_off_policy", "--k", "8"]),
    "ppo_off_policy-1": (2, ["--schedule", "ppo_off_policy", "--k", "1"]),
    "trl": (2, []),
}
# Of `make real`: what TRL has a word for, and what only train.py has.
REAL = "--batch_prompts 16 --lr 1e-5 --held_out 256 --eval_every 2 --penalty_window 8".split()
REAL_OURS = (
    "--length_control penalty --max_budget 8 --answer_budget 8 --eval_samples 1 --tokens_per_microbatch 1024 "
    "--share_prompts true"
).split()


# ------------------------------------------------------------------------------------------------------------- speed


def speed(args: argparse.Namespace, report: Report) -> None:
    """Completions a second, in turns."""
    small, steps = args.size == "0.2M", args.steps or 6
    longest, least = (37, 1.3) if small else (256, 1.8)
    with ExitStack() as until_the_end:
        root = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        model = warm_model(args.seed) if small else random_model(root / "model", args.size)
        both = ["--model", model, "--seed", str(args.seed), "--batch_prompts", str(args.batch_prompts)]
        mine = [*both, *QUIET, "--length_control", "none", "--max_budget", str(longest - 4)]
        every_row = ["--zero_variance_filter", "false", "--pass_rate_threshold", "2"]
        commands = {"ours, every row trains": (ours(*mine, *every_row), 1)}
        if small:
            commands["ours, with its filters"] = (ours(*mine), 1)
        still = ["--max_steps", "80000", "--eval_every", "0", "--max_completion", str(longest)]
        commands["TRL"] = (theirs(*both, *still), 2)
        completions, cases = args.batch_prompts * ROLLOUTS * steps, {}
        for name, (command, threads) in commands.items():
            program = until_the_end.enter_context(closing(Program(command, root / name.replace(" ", "-"), threads)))
            program.advance(3 if small else 1)  # start-up, not timed
            cases[name] = lambda program=program: completions / program.advance(steps)
        found = take_turns(cases, args.repeats)
    report.add(found, "completions/s")
    trl = found.pop("TRL")
    report.figures = [Figure(f"{name} / TRL", ratios(values, trl), least) for name, values in found.items()]


# -------------------------------------------------------------------------------------------------------------- race


def program_of(name: str, seed: int, args: argparse.Namespace) -> Program:
    """A contestant, started."""
    threads, flags = CONTESTANTS[name]
    both = ["--seed", str(seed), "--max_steps", str(args.steps or (REAL_STEPS if args.model else MAX_STEPS))]
    mine = [*SETTING, *flags, "--save_every", "0"]
    if args.model:
        both += ["--model", args.model, "--dataset", args.dataset, "--dtype", args.dtype, *REAL]
        mine, other = [*both, *mine, *REAL_OURS], [*both, "--max_completion", "16"]
    else:
        mine, other = [*both, *mine, "--eval_every", "5", "--probe_every", "5"], ["--model", warm_model(seed), *both]
    folder = Path(f"runs/{'race-real' if args.model else 'race'}/{name}-seed-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    return Program(theirs(*other) if name == "trl" else ours(*mine), folder, threads)


def evaluations(program: Program, rate: float, until: float = math.inf) -> list[dict[str, float]]:
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


def race(args: argparse.Namespace, report: Report) -> None:
    """Each contestant by itself, seed by seed; ratios of the first to the others."""
    first, *others = names = ["pipeline-8", "trl"] if args.model else list(CONTESTANTS)
    rate = REAL_RATE if args.model else RATE
    units = {"time": f"s to {rate}", "tokens": f"tokens to {rate}", "speed": "steps/s"}
    units |= {"most memory": "GB", "end": "pass rate"}
    found: dict[str, Measured] = {what: {name: [] for name in names} for what in units}
    for seed in args.seeds:
        runs: dict[str, list[dict[str, float]]] = {}
        for name in names:
            until = runs[first][-1]["seconds"] if args.model and runs else math.inf
            with closing(program_of(name, seed, args)) as program:
                records = runs[name] = evaluations(program, math.inf if args.model else RATE, until)
            clock, sampled, rates = ([record[key] for record in records] for key in ("seconds", "tokens", "pass_rate"))
            seconds, tokens = compute_to(clock, rates, rate), compute_to(sampled, rates, rate)
            values = seconds, tokens, records[-1]["step"] / clock[-1], program.peak_memory / 1e9, rates[-1]
            for what, value in zip(units, values, strict=True):
                found[what][name].append(value)
            print(f"{name} seed {seed}: {seconds:.0f} s, {tokens:,.0f} tokens", flush=True)
    for what, unit in units.items():
        report.add({f"{name}: {what}": values for name, values in found[what].items()}, unit)
    for name in others:
        for what, most in (("time", 1.0), ("tokens", None), ("speed", None)):
            values = ratios(found[what][first], found[what][name])
            report.figures.append(Figure(f"{first} / {name}: {what}", values, most=most))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = benchmark_parser(__file__, __doc__)
    add = parser.add_argument
    add("what", choices=["speed", "race"])
    add("--steps", type=positive, help=f"of a turn (6); of a race at most ({MAX_STEPS}, {REAL_STEPS} with --model)")
    add("--model", default="", help="race: folder of a pretrained model in the place of the built-in one")
    add("--dataset", default="", help="race: its problems")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="race: of its forward pass")
    add("--size", choices=list(SIZES), default="0.2M", help="speed: of the model; others sample 256 tokens")
    add("--batch_prompts", type=positive, default=32, help="speed: prompts of a step (32)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="race: (0 1 2)")
    args = parse(parser, argv)
    report = Report(args)
    (speed if args.what == "speed" else race)(args, report)
    report.close()


if __name__ == "__main__":
    main()
