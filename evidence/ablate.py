"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python evidence/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then the report
    python evidence/ablate.py losses --dry-run              # only list the commands
    python evidence/ablate.py losses --report               # only the report of what is finished
    python evidence/ablate.py all                           # every comparison, the law, and what the logs know
    python evidence/ablate.py all --curves FILE             # the same reports from `curves.py`'s file, without any runs
    python evidence/ablate.py all --finished FILE           # what is finished in that file is not run again

`comparisons.py` says what is compared, `sweep.py` makes the runs, `curves.py` reads them, `ablation_report.py`,
`law_report.py` and `log_report.py` say what came out. Each run is a process of `train.py` in
OUTPUT/COMPARISON/VARIANT/seed-N. A run that two comparisons share (nearly all have the recipe) is made once, in the
folder of the comparison that comes first in the table.
"""

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ablation_report
import grid_report
import law_report
import log_report
import size_report
import sweep
from comparisons import COMPARISONS
from curves import Curve, InputError, collect, curves_of, differing, read_rows
from measuring import table
from sweep import Run, as_word

from runtime.flags import DEFAULTS, UsageError

# Comparisons whose findings are on a page of their own: they test other papers than ScaleRL's, but for `order`.
OTHER_LAWS = ("sizes", "reuse", "order", "regularizers", "grid-easy", "grid-hard")
OTHER_LAWS_PAGE = """# Findings on the other two laws

What Tan et al. (arXiv 2509.25300: model size, reuse of data), Cheng et al. (arXiv 2603.12151: rollouts, regularizers)
and ScaleRL's abstract (a curriculum moves no ceiling) say, and what our runs say. The verdicts are those of
[RESULTS.md](../../RESULTS.md); where the papers give no margin it is ours, .02 in a pass rate and a tenth in a slope.
The numbers behind the rows are beside this page, in `power-law` (sizes), `isocompute` (grids), and under the name of
each other comparison.

"""


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
    add("--curves", default="", metavar="FILE", help="no runs, the report of those in this file of curves.py")
    add("--finished", default="", metavar="FILE", help="runs that this file of curves.py has are taken from it")
    add("--page", default="", metavar="FILE", help="a page that gets its tables, law and findings, written anew "
        "between the marks <!-- refit NAME --> and <!-- end -->")  # fmt: skip
    args = parser.parse_args(argv)
    if min(args.seeds, args.jobs) < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if args.curves and args.finished:
        parser.error("--curves makes no runs, so that --finished has nothing to spare; give one of them")
    return args


def list_commands(runs: Mapping[tuple[str, int], Run], minutes: float, spared: Collection[Run]) -> None:
    """What would be run, and how long it may take. `spared`: runs whose curve is known."""
    left = 0
    for (variant, seed), run in runs.items():
        done = run in spared or run.finished()
        left += not done
        print(f"{variant}, seed {seed}: {'finished' if done else shlex.join(run.command())}")
    print(f"{len(runs) - left} of {len(runs)} runs are finished; the others take about {left * minutes:.0f} minutes")


def matched(
    runs: Mapping[tuple[str, int], Run], curves: Mapping[str, Curve], output: Path, wanted: bool
) -> tuple[dict[str, list[Curve]], list[str]]:
    """({variant: its finished runs}, the others with the reason) of a comparison. `wanted`: a run that was never begun
    is one of the others. Raises UsageError for a run with other flags than its row has now."""
    found: dict[str, list[Curve]] = {}
    others = []
    for (variant, seed), run in runs.items():
        curve = curves.get(str(run.folder.relative_to(output)))
        if curve is not None and curve.finished:
            row = differing(dict(run.flags))
            if other := sorted(dict(row.items() ^ curve.flags.items())):
                raise UsageError(f"{curve.run} has another --{', --'.join(other)} than its row in comparisons.py.")
            found.setdefault(variant, []).append(curve)
        elif curve is not None or wanted:
            others.append(f"{variant} seed {seed} ({curve.state if curve else 'not run'})")
    return found, others


def write_report(name: str, found: Mapping[str, Sequence[Curve]], left_out: Sequence[str], args: argparse.Namespace,
                 folder: Path) -> list[list[str]]:  # fmt: skip
    """The report of a comparison from its finished runs; its rows against the paper."""
    c = COMPARISONS[name]
    least = 2 if args.comparison == "all" else 1  # a baseline that comparisons share is not reported in each of them
    if len(found) < least:
        print(f"{name}: {len(found)} of {len(c.variants)} variants have finished runs, nothing to report")
        return []
    if args.budget:  # it took the place of the setting's own
        given = resolved(c.setting) | budget_flags(args.budget)
        c = dataclasses.replace(c, setting=" ".join(f"--{flag} {as_word(value)}" for flag, value in given.items()))
    ordered = {variant: found[variant] for variant in c.variants if variant in found}
    return ablation_report.write("law-variants" if name == "law" else name, c, ordered, left_out, folder)


def findings_by_page(rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """{page: table} of rows that begin with their comparison; a page without rows is missing."""
    pages: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        pages.setdefault("other-laws" if row[0] in OTHER_LAWS else "findings", []).append(row)
    return {page: table(["comparison", *ablation_report.PAPER_HEAD], some) for page, some in pages.items()}


def write_reports(
    plans: Mapping[str, Mapping[tuple[str, int], Run]],
    curves: Mapping[str, Curve],
    output: Path,
    args: argparse.Namespace,
) -> None:
    """The reports of all these comparisons, and with the law among them how well it held and what the logs know."""
    folder = Path(args.results or output / "results")
    matches = {name: matched(of_one, curves, output, not args.curves) for name, of_one in plans.items()}
    claimed = {str(run.folder.relative_to(output)) for of_one in plans.values() for run in of_one.values()}
    if args.comparison == "all" and (stray := sorted(curves.keys() - claimed)):
        print(f"in no comparison, so in no report: {', '.join(stray)}")
    blocks, rows = {}, []
    for name, (found, left_out) in matches.items():
        rows += [[name, *row] for row in write_report(name, found, left_out, args, folder)]
    law, left_out = matches.get("law", ({}, []))
    if law:
        published = [curve for curve in curves.values() if curve.finished and curve.flags.get("dataset") == "graded"]
        other_ceilings = {"difficulty", "eval_temperature"}
        graded = [curve for curve in published if not other_ceilings & curve.flags.keys()]
        others: dict[str, list[Curve]] = {}
        for curve in graded:
            if curve.comparison != "law":
                others.setdefault(curve.comparison, []).append(curve)
        chain, not_there = matches.get("chain", ({}, []))
        greedy, not_made = matches.get("law-greedy", ({}, []))
        likeliest = [curve for some in greedy.values() for curve in some]
        left_out = [*left_out, *not_there, *not_made]
        law_report.write(law, others, chain.get("chain", []), likeliest, published, left_out, folder)
        log_report.write(graded, law.get("baseline", []), folder)
        blocks["law"] = law_report.summary([curve for some in law.values() for curve in some])
        blocks["reach"] = law_report.by_reach(published, names=False)
    if len(found := matches.get("sizes", ({}, []))[0]) > 2:
        rows += [["sizes", *row] for row in size_report.write(found, folder)]
    grids = {half: matches.get(f"grid-{half}", ({}, []))[0] for half in ("easy", "hard")}
    if grids := {half: found for half, found in grids.items() if found}:
        rows += grid_report.write(grids, folder)
    blocks |= findings_by_page(rows)
    if args.comparison == "all" and "other-laws" in blocks:
        ablation_report.save(OTHER_LAWS_PAGE + blocks["other-laws"] + "\n", (folder / "other-laws").with_suffix(".md"))
    if args.page:
        ablation_report.fill(Path(args.page), blocks)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 some runs failed, 2 usage, 130 stopped by a signal."""
    args = arguments(argv)
    output = Path() if args.curves else Path(args.output).resolve()
    names = list(COMPARISONS) if args.comparison == "all" else [args.comparison]
    code = 0
    try:
        rows = read_rows(Path(args.curves or args.finished)) if args.curves or args.finished else []
        seeds = sorted({int(row["seed"]) for row in rows}) if args.curves else range(args.seeds)
        budget = budget_flags(args.budget)
        plans = {name: plan(name, seeds, output, budget, args.only) for name in names}
        runs = [run for of_one in plans.values() for run in of_one.values()]
        known = {curve.run for curve in curves_of(rows) if curve.finished}
        spared = {run for run in runs if str(run.folder.relative_to(output)) in known}
        if args.dry_run:
            for name, of_one in plans.items():
                list_commands(of_one, COMPARISONS[name].minutes, spared)
            return 0
        if not (args.report or args.curves):
            code = sweep.make([run for run in runs if run not in spared], output, args.jobs)
        if code not in (2, 130):
            made = [] if args.curves else collect(output)
            folders = {row["run"] for row in made}
            rows = [*made, *(row for row in rows if row["run"] not in folders)]
            write_reports(plans, {curve.run: curve for curve in curves_of(rows)}, output, args)
    except (UsageError, InputError) as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
