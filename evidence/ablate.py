"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python evidence/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then the report
    python evidence/ablate.py all                           # every comparison, the law, and what the logs know
    python evidence/ablate.py all --curves FILE             # the same reports from `curves.py`'s file, without any runs
    python evidence/ablate.py all --finished FILE           # what is finished in that file is not run again

`comparisons.py` says what is compared, `sweep.py` makes the runs, `curves.py` reads them, `figures.py` has the numbers,
and `report.py`, `law_report.py` and `other_laws.py` say what came out. A run that two comparisons share (nearly all
have the recipe) is made once, in OUTPUT/COMPARISON/VARIANT/seed-N of the comparison that comes first in the table.
"""

import argparse
import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import law_report
import other_laws
import pretrained
import report
import staleness
import sweep
from comparisons import COMPARISONS
from curves import NO_ROWS, Evaluations, as_word, collect, curves_of, differing, read_rows
from figures import Compared, Groups, Row
from sweep import Jobs, Value, plan, resolved

from runtime.flags import DEFAULTS, UsageError

# Comparisons whose findings are on a page of their own: they test other papers than ScaleRL's, but for `order`.
OTHER_LAWS = ("sizes", "reuse", "order", "regularizers", "grid-easy", "grid-hard")
OTHER_LAWS_PAGE = """# Findings on the other two laws

What Tan et al. (arXiv 2509.25300: model size, reuse of data), Cheng et al. (arXiv 2603.12151: rollouts, regularizers)
and ScaleRL's abstract (a curriculum moves no ceiling) say, and what our runs say, with the verdicts of
[RESULTS.md](../../RESULTS.md#findings). Where the papers give no margin it is ours: .02 in a pass rate, a tenth in a
slope. Beside this page are `power-law` (sizes), `isocompute` (grids), and a page for each other comparison.

"""


# -------------------------------------------------------------------------------------------------- command line


def budget_flags(text: str) -> dict[str, Value]:
    """`800000`, `800k` or `1.5M` tokens of each run; {} if empty. Raises UsageError."""
    if not text:
        return {}
    known = re.fullmatch(r"(\d+|\d*\.\d+)[kM]?", text)
    tokens = round(float(text.replace("k", "e3").replace("M", "e6"))) if known else 0
    if tokens < 1:
        raise UsageError(f"--budget {text}: give a run's tokens as 800000, 800k or 1.5M.")
    return {"max_sampled_tokens": tokens}


def listing() -> str:
    """The comparisons, for --help."""
    lines = ["comparisons (runs of 3 seeds, minutes on two idle cores; shared runs are made once):"]
    for name, c in COMPARISONS.items():
        n = 3 * len(c.variants)
        lines += [f"  {name:<15}{c.about}", f"  {'':<15}{n} runs, {n * c.minutes:.0f} minutes: {', '.join(c.variants)}"]
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse ends with exit code 2 on an unknown word."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("ablate.py", description=about, epilog=listing(), formatter_class=as_it_is)
    add = parser.add_argument
    add("comparison", choices=[*COMPARISONS, "all"], metavar="COMPARISON", help="one of those below, or all of them")
    add("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    add("--only", nargs="+", default=[], metavar="VARIANT", help="only these variants")
    add("--jobs", type=int, default=1, help="runs at a time (default 1; two of --engine torch take both of two cores)")
    add("--budget", default="", help="sampled tokens of each run, as 800k or 1.5M")
    add("--output", default="runs/ablate", metavar="FOLDER", help="where the runs are (default runs/ablate)")
    add("--results", default="", metavar="FOLDER", help="where reports are written (default OUTPUT/results)")
    add("--curves", default="", metavar="FILE", help="no runs, the report of those in this file of curves.py")
    add("--finished", default="", metavar="FILE", help="runs that this file of curves.py has are taken from it")
    add("--page", default="", metavar="FILE", help="write tables between its <!-- refit NAME --> and <!-- end -->")
    args = parser.parse_args(argv)
    if min(args.seeds, args.jobs) < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if args.curves and args.finished:
        parser.error("--curves makes no runs, so that --finished has nothing to spare; give one of them")
    return args


# ------------------------------------------------------------------------------------------------------- reports


def other_flags(row: Mapping[str, str], run: Mapping[str, str]) -> list[str]:
    """Names of flags with other values in a row and in its published run. What only the run has, of a flag that
    train.py has no more, is not compared: a row cannot give it."""
    names = {name for name, _ in row.items() ^ run.items()}
    return sorted(name for name in names if name in DEFAULTS or name in row)


def matched(jobs: Jobs, curves: Mapping[str, Evaluations]) -> tuple[Groups, list[str]]:
    """({variant: its finished runs}, the other runs with the reason) of a comparison. Raises UsageError for a run with
    other flags than its row has now."""
    found: dict[str, list[Evaluations]] = {}
    others = []
    for (variant, seed), job in jobs.items():
        run = curves.get(job.name)
        if run is not None and run.finished:
            if names := other_flags(differing(dict(job.flags)), run.flags):
                raise UsageError(f"{run.run} has another --{', --'.join(names)} than its row in comparisons.py.")
            found.setdefault(variant, []).append(run)
        elif run is not None:
            others.append(f"{variant} seed {seed} ({run.state})")
    return found, others


def write_comparison(
    name: str, found: Groups, left_out: Sequence[str], args: argparse.Namespace, folder: Path
) -> list[Row]:
    """The report of a comparison from its finished runs; its rows against the paper."""
    c = COMPARISONS[name]
    # A baseline that comparisons share is not reported in each of them.
    least = min(2, len(c.variants)) if args.comparison == "all" else 1
    if len(found) < least:
        print(f"{name}: {len(found)} of {len(c.variants)} variants have finished runs, nothing to report")
        return []
    if args.budget:  # it took the place of the setting's own
        given = resolved(c.setting) | budget_flags(args.budget)
        c = dataclasses.replace(c, setting=" ".join(f"--{flag} {as_word(value)}" for flag, value in given.items()))
    ordered = {variant: found[variant] for variant in c.variants if variant in found}
    compared = Compared("law-variants" if name == "law" else name, c, ordered, left_out)
    report.save(report.page(compared), folder / f"{compared.name}.md")
    report.picture(compared).savefig(folder / f"{compared.name}.png", dpi=110)
    if args.comparison != "all" and compared.against:
        print(report.in_short(compared))
    return report.paper_rows(compared)


def findings_by_page(rows: Sequence[Row]) -> dict[str, str]:
    """{page: table} of rows that begin with their comparison; a page without rows is missing."""
    pages: dict[str, list[Row]] = {}
    for row in rows:
        pages.setdefault("other-laws" if row[0] in OTHER_LAWS else "findings", []).append(row)
    return {page: report.table(["comparison", *report.PAPER_HEAD], some) for page, some in pages.items()}


def write_law(found: Mapping[str, Groups], left_out: Sequence[str], runs: Sequence[Evaluations], folder: Path) -> str:
    """How well the law held and what the logs know, from all finished runs; the block of RESULTS.md."""
    law, chain = found["law"], found["chain"].get("chain", [])
    every = [run for run in runs if run.flags.get("dataset") == "graded"]
    graded = [run for run in every if not {"difficulty", "eval_temperature"} & run.flags.keys()]  # other ceilings
    others = [run for run in graded if run.comparison != "law"]
    likeliest = [run for some in found["law-greedy"].values() for run in some]
    report.save(law_report.page(law, left_out, others, chain, likeliest, every), folder / "law.md")
    law_report.picture(law, chain).savefig(folder / "law.png", dpi=110)
    report.save(law_report.logs_page(graded), folder / "logs.md")
    return law_report.summary([run for some in law.values() for run in some])


def write_reports(plans: Mapping[str, Jobs], curves: Mapping[str, Evaluations], args: argparse.Namespace) -> None:
    """The reports of all these comparisons, and with the law among them how well it held and what the logs know."""
    folder, every = Path(args.results or Path(args.output).resolve() / "results"), args.comparison == "all"
    found: dict[str, Groups] = defaultdict(dict)  # comparison -> its finished runs
    left_out: dict[str, list[str]] = defaultdict(list)
    for name, jobs in plans.items():
        found[name], left_out[name] = matched(jobs, curves)
    claimed = {job.name for jobs in plans.values() for job in jobs.values()}
    if every and (stray := sorted(curves.keys() - claimed)):
        print(f"in no comparison, so in no report: {', '.join(stray)}")
    blocks, rows = {}, []
    for name in plans:
        if name == "pretrained" and found[name]:
            report.save(pretrained.page(found[name], left_out[name]), folder / "pretrained.md")
            pretrained.picture(found[name], folder / "pretrained.png")
        elif not (every and name in (*staleness.LAB, "chain", "law")):  # law.md has the last two
            rows += [[name, *row] for row in write_comparison(name, found[name], left_out[name], args, folder)]
    if lab := {name: found[name] for name in staleness.LAB if found[name]}:
        reviews = pd.read_csv(path) if (path := folder / "retired.csv").exists() else None
        report.save(staleness.page(lab | {"batch": found["batch"]}, reviews), folder / "staleness.md")
    if found["law"]:
        absent = [run for name in ("law", "chain", "law-greedy") for run in left_out[name]]
        blocks["law"] = write_law(found, absent, [run for run in curves.values() if run.finished], folder)
    if len(found["sizes"]) > 2:
        rows += [["sizes", *row] for row in other_laws.write_sizes(found["sizes"], folder)]
    if grids := {half: some for half in ("easy", "hard") if (some := found[f"grid-{half}"])}:
        rows += other_laws.write_grids(grids, folder)
    blocks |= findings_by_page(rows)
    if every and "other-laws" in blocks:
        report.save(OTHER_LAWS_PAGE + blocks["other-laws"] + "\n", folder / "other-laws.md")
    if args.page:
        report.fill(Path(args.page), blocks)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 some runs failed, 2 usage, 130 stopped by a signal."""
    args = arguments(argv)
    output = Path() if args.curves else Path(args.output).resolve()
    names = list(COMPARISONS) if args.comparison == "all" else [args.comparison]
    code = 0
    try:
        file = args.curves or args.finished
        rows = read_rows(Path(file)) if file else NO_ROWS
        known = set(rows.loc[rows["state"] == "finished", "run"])
        seeds = sorted(rows["seed"].astype(int).unique()) if args.curves else range(args.seeds)
        plans = {name: plan(name, seeds, output, budget_flags(args.budget), args.only) for name in names}
        unknown = [job for jobs in plans.values() for job in jobs.values() if job.name not in known]
        if not args.curves:
            code = sweep.make(unknown, output, args.jobs)
        if code not in (2, 130):
            made = NO_ROWS if args.curves else collect(output)
            rows = pd.concat([made, rows[~rows["run"].isin(made["run"])]])
            write_reports(plans, {run.run: run for run in curves_of(rows)}, args)
    except UsageError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
