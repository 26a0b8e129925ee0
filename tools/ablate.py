"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python tools/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then the report
    python tools/ablate.py losses --dry-run              # only list the commands
    python tools/ablate.py losses --report               # only the report of what is finished
    python tools/ablate.py all                           # every comparison, and the predictions of all runs

`comparisons.py` says what is compared, `sweep.py` makes the runs, `ablation_report.py` compares them. Each run is a
process of `train.py` in OUTPUT/COMPARISON/VARIANT/seed-N. A run that two comparisons share (nearly all have the
recipe) is made once, in the folder of the comparison that comes first in the table.
"""

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ablation_report
import sweep
from comparisons import COMPARISONS
from sweep import Run, as_word

from runtime.flags import DEFAULTS, UsageError


def resolved(text: str) -> dict[str, Any]:
    """`--k 8 --loss dapo` as {"k": 8, "loss": "dapo"}. Raises UsageError for what train.py does not have."""
    words, found = shlex.split(text), {}
    for name, value in itertools.zip_longest(words[::2], words[1::2]):
        key = name.removeprefix("--")
        if not name.startswith("--") or key not in DEFAULTS or key in sweep.OWN or value is None:
            raise UsageError(f"{text!r}: {name} is no flag that a row may give; write --NAME VALUE of train.py.")
        kind = type(DEFAULTS[key])
        try:
            found[key] = value.lower() == "true" if kind is bool else kind(value)
        except ValueError as error:
            raise UsageError(f"{name} {value} is not of type {kind.__name__}.") from error
    return found


def budget_flags(text: str) -> dict[str, Any]:
    """`800k` or `1.5M` tokens, or `0.05h` device-hours, of each run; {} if empty. Raises UsageError."""
    if not text:
        return {}
    sizes = {"h": 1, "k": 1e3, "M": 1e6, "": 1}
    unit = text[-1:] if text[-1:] in sizes else ""
    try:
        amount = float(text.removesuffix(unit)) * sizes[unit]
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise UsageError(f"--budget {text}: give a run's tokens as 800000, 800k or 1.5M, or device-hours as 0.05h.")
    hours = unit == "h"  # one takes the place of the other
    return {"max_sampled_tokens": 0 if hours else round(amount), "max_device_hours": amount if hours else 0.0}


def plan(
    name: str, seeds: Sequence[int], output: Path, budget: Mapping[str, Any], only: Sequence[str] = ()
) -> dict[tuple[str, int], Run]:
    """The runs of a comparison by variant and seed. Equal flags are one run, wherever they occur: its folder is that of
    the first comparison and variant that has them."""
    owners: dict[str, tuple[str, str]] = {}
    mine = {}
    for comparison, c in COMPARISONS.items():
        for variant, text in c.variants.items():
            given = resolved(c.setting) | resolved(text) | dict(budget)
            identity = json.dumps({**DEFAULTS, **given}, sort_keys=True)
            owners.setdefault(identity, (comparison, variant))
            if comparison == name:
                mine[variant] = owners[identity], tuple(given.items())
    unknown = set(only) - set(mine)
    if unknown:
        raise UsageError(f"--only {', '.join(sorted(unknown))}: {name} has {', '.join(mine)}.")
    return {
        (variant, seed): Run(output.joinpath(*owner, f"seed-{seed}"), flags, seed)
        for seed in seeds for variant, (owner, flags) in mine.items() if not only or variant in only
    }  # fmt: skip


def listing() -> str:
    """The comparisons, for --help."""
    lines = ["comparisons (runs of 3 seeds, minutes on two idle cores; shared runs are made once):"]
    for name, c in COMPARISONS.items():
        n = 3 * len(c.variants)
        lines += [f"  {name:<15}{c.about}", f"  {'':<15}{n} runs, {n * c.minutes:.0f} minutes: {', '.join(c.variants)}"]
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse ends with exit code 2 on an unknown word."""
    parser = argparse.ArgumentParser(
        prog="ablate.py", description=__doc__.split("\n")[0], epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("comparison", choices=[*COMPARISONS, "all"], metavar="COMPARISON", help="one of those below, or all of them")
    add("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    add("--only", nargs="+", default=[], metavar="VARIANT", help="only these variants")
    add("--jobs", type=int, default=1, help="runs at a time (default 1; two of --engine torch take both of two cores)")
    add("--budget", default="", help="of each run: tokens as 800k or 1.5M, or device-hours as 0.05h")
    add("--output", default="runs/ablate", metavar="FOLDER", help="where the runs are (default runs/ablate)")
    add("--results", default="", metavar="FOLDER", help="where reports are written (default OUTPUT/results)")
    add("--dry-run", action="store_true", help="list the commands and end")
    add("--report", action="store_true", help="no runs, only the report of the finished ones")
    args = parser.parse_args(argv)
    if min(args.seeds, args.jobs) < 1:
        parser.error("--seeds and --jobs must be at least 1")
    return args


def list_commands(runs: Mapping[tuple[str, int], Run], minutes: float) -> None:
    """What would be run, and how long it may take."""
    left = 0
    for (variant, seed), run in runs.items():
        done = run.finished()
        left += not done
        print(f"{variant}, seed {seed}: {'finished' if done else shlex.join(run.command())}")
    print(f"{len(runs) - left} of {len(runs)} runs are finished; the others take about {left * minutes:.0f} minutes")


def write_report(name: str, runs: Mapping[tuple[str, int], Run], args: argparse.Namespace) -> None:
    """The report of a comparison from its finished runs; that of `all` holds the predictions of all runs."""
    c = COMPARISONS.get(name)
    axes = c.axes if c else ("tokens",)
    results = [ablation_report.read(run.folder, variant, run.seed, axes)
               for (variant, _), run in runs.items() if run.finished()]  # fmt: skip
    if not results:
        print(f"{name}: no run is finished, nothing to report")
        return
    folder = Path(args.results or Path(args.output) / "results")
    if c is None:
        ablation_report.write_predictions(results, folder)
        return
    if args.budget:  # it took the place of the setting's own
        given = resolved(c.setting) | budget_flags(args.budget)
        c = dataclasses.replace(c, setting=" ".join(f"--{flag} {as_word(value)}" for flag, value in given.items()))
    ablation_report.write(name, c, results, list(runs), folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 some runs failed, 2 usage, 130 stopped by a signal."""
    args = arguments(argv)
    output = Path(args.output).resolve()
    names = list(COMPARISONS) if args.comparison == "all" else [args.comparison]
    code = 0
    try:
        budget = budget_flags(args.budget)
        plans = {name: plan(name, range(args.seeds), output, budget, args.only) for name in names}
        runs = [run for of_one in plans.values() for run in of_one.values()]
        if args.dry_run:
            for name, of_one in plans.items():
                list_commands(of_one, COMPARISONS[name].minutes)
            return 0
        if not args.report:
            code = sweep.make(runs, output, args.jobs)
        if args.comparison == "all":
            plans["all"] = {(str(run.folder.parent.relative_to(output)), run.seed): run for run in runs}  # each once
        if code not in (2, 130):
            for name, of_one in plans.items():
                write_report(name, of_one, args)
    except UsageError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
