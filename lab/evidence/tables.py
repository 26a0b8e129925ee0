"""The marked tables of the lab's pages, and the pictures that go with them, from the published curves and nothing else.

    python lab/evidence/tables.py       # all of them, a few minutes: `make -C lab refit`

comparisons.py has what is compared, runs.py what is measured of a run and the rule that tells two variants apart.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from comparisons import COMPARISONS, STATEMENTS, Comparison, Statement
from runs import (
    LEAST_PAIRS,
    PLATEAU,
    RESULTS,
    ROOT,
    Groups,
    Run,
    as_text,
    ceilings,
    cut_at,
    difference_cell,
    differences,
    interval,
    judge,
    measure,
    members,
    reach_of,
    stands,
    steepness,
)
from scipy.stats import fisher_exact

sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from forecast import curve, plot_curves

Published = Mapping[str, Groups]  # comparison -> its runs
LAB = RESULTS.parent


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table."""
    head, *rows = [f"| {' | '.join(map(str, row))} |" for row in (frame.columns, *frame.to_numpy())]
    return "\n".join([head, "|---" * len(frame.columns) + "|", *rows])


def without_repeats(frame: pd.DataFrame) -> str:
    """The table without the columns in which all rows agree; a line below names them. The first column stays."""
    alike = [name for name in frame.columns[1:] if len(frame) > 1 and frame[name].nunique() == 1]
    text = markdown(frame.drop(columns=alike))
    if alike:
        text += "\n\nIn all rows: " + "; ".join(f"{name} {frame[name].iloc[0]}" for name in alike) + "."
    return text


def share_of(values: Sequence[bool]) -> str:
    """`18 of 20`."""
    return f"{sum(values)} of {len(values)}"


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Puts each block into a page, between the lines `<!-- refit NAME -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, block in blocks.items():
        pattern = rf"(<!-- refit {re.escape(name)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text, flags=re.S)
    page.write_text(text)
    print(f"written to {page}")


# ------------------------------------------------------------------------------------------------ one comparison

TITLES = {  # Δ: variant minus baseline
    "A": "ΔA",
    "B": "ΔB",
    "tokens": "Δtokens to .5",
    "flops": "ΔFLOPs to .5",
    "device_hours": "Δhours to .5",
    "end": "Δend",
    "elsewhere": "Δend on the other half",
}


def compare(c: Comparison, groups: Groups, but: Sequence[str] = ("end", "elsewhere")) -> pd.DataFrame:
    """The table of one comparison: what the runs of each variant did, and what changed against its baseline; `but`
    these measures. Only runs of a comparison in time were made side by side."""
    numbers = measure(groups).assign(A=ceilings(groups, c.axis))
    names = [name for name in TITLES if name not in but and (name != "device_hours" or c.axis == "device_hours")]
    if "B" in names:
        numbers["B"] = steepness(groups, c.axis)
    rows = []
    for variant in groups:
        base = c.against.get(variant, next(iter(c.variants)))
        has_base = base != variant and base in groups
        row = {"variant": variant}
        if c.against:  # else it is the first variant for all
            row["against"] = base if has_base else "–"
        group = numbers.loc[variant]
        row |= {"seeds": len(group), "fell": group["fell"].sum(), "end": f"{group['end'].mean():.3f}"}
        row |= {TITLES[name]: difference_cell(numbers, variant, base, name) if has_base else "–" for name in names}
        rows.append(row)
    return pd.DataFrame(rows)


PROMPTS_ONCE = ("dynamic-sampling", "batch-rule", "depth")  # FLOPs as today's trainer counts them


def comparisons(published: Published) -> dict[str, str]:
    """The tables of results/comparisons.md. The paper has a B of the schedules only."""
    tables = {}
    for name in re.findall("<!-- refit (.+) -->", (RESULTS / "comparisons.md").read_text()):
        c = COMPARISONS[name]
        but = ["end", "elsewhere"]
        if c.axis != "device_hours":
            but.append("B")
        if name not in PROMPTS_ONCE:
            but.append("flops")
        tables[name] = without_repeats(compare(c, published[name], but))
    return tables


# ----------------------------------------------------------------------------------- what the ladder cannot ask

LOSSES = 13  # were put to a lag of 8 beside CISPO: a p value is corrected for as many


def verdict(low: float, high: float, between: tuple[float, float] | None, pairs: int) -> str:
    """What our interval [low, high] of a difference says of the statement that it lies `between` two numbers: the same
    if all of ours does, the opposite if none does, else, and of fewer than three pairs, nothing."""
    if between is None:
        return "–"
    if pairs >= LEAST_PAIRS and between[0] <= low and high <= between[1]:
        return "**same here**"
    if pairs >= LEAST_PAIRS and (high < between[0] or low > between[1]):
        return "**opposite here**"
    return "**not visible here**"


def finding(s: Statement, groups: Groups) -> dict[str, object]:
    """A row: what is stated of variant minus baseline, and what our runs have."""
    row = {"comparison": s.comparison, "variant": s.variant, "against": s.against, "stated": s.words}
    if s.measure == "stands":
        runs = [[run for name in names.split() for run in groups[name]] for names in (s.variant, s.against)]
        (up, n), (base_up, base_n) = [(sum(map(stands, side)), len(side)) for side in runs]
        p = min(1, LOSSES * fisher_exact([[up, n - up], [base_up, base_n - base_up]]).pvalue)
        return row | {"here": f"{up} of {n} stand, {base_up} of {base_n}; p {p:.2g}", "pairs": "–", "verdict": "–"}
    both = {name: groups[name] for name in (s.against, s.variant)}
    numbers = measure(both)
    if s.measure == "A":
        numbers["A"] = ceilings(both)
    if s.measure == "B":  # all schedules share a ceiling
        numbers["B"] = steepness(groups, "device_hours")
    apart = differences(numbers, s.variant, s.against, s.measure)
    ends = interval(apart)
    here = f"{TITLES[s.measure]} {as_text(ends, s.measure)}"
    return row | {"here": here, "pairs": len(apart), "verdict": verdict(*ends[1:], s.between, len(apart))}


def findings(published: Published) -> dict[str, str]:
    """The table of RESULTS.md: every statement, and how many ends a forecast of ours held."""
    rows = [finding(s, published[s.comparison]) for s in STATEMENTS]
    for cut, share in CUTS.items():
        inside = share_of([judge(run, share)["inside"] for run in runs_in(published, "law")])
        row = {"comparison": "law", "variant": f"{cut} of a run", "against": "its end", "stated": "95 % inside"}
        rows.append(row | {"here": f"{inside} inside", "pairs": "–", "verdict": "–"})
    return {"findings": markdown(pd.DataFrame(rows))}


# ------------------------------------------------------------------------------------------------------- the law

CUTS = {"a quarter": 0.25, "half": 0.5}  # of a run's compute
TASKS = {"graded": "law", "chain": "chain"}  # and the file of a run
REACHES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)  # C_mid


def cut_row(name: str, share: float, runs: Sequence[Run]) -> dict[str, str]:
    """A row of the table: these runs, fitted to `share` of their compute."""
    results = pd.DataFrame([judge(run, share) for run in runs])
    return {
        "fitted": name,
        "runs": str(len(runs)),
        "C_mid seen, median": f"{results['reach'].median():.1f}",
        "end inside": share_of(results["inside"]),
        "mean error [95 %]": "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(results["error"].dropna())),
        "identifiable": share_of(results["identifiable"]),
    }


def reach_table(runs: Sequence[Run]) -> pd.DataFrame:
    """These runs by how far the data reach, in C_mid as measured."""
    cuts = [cut_at(run, reach) for reach in REACHES for run in runs]
    results = pd.DataFrame([cut for cut in cuts if cut])
    rows = []
    for reach, group in results.groupby("reach"):
        sure = group[group["identifiable"]]
        row = {
            "data reach": f"{reach:g} C_mid",
            "runs": len(group),
            "inside": group["inside"].sum(),
            "identifiable (A misses the plateau)": f"{group['identifiable'].mean():.0%} ({share_of(~sure['holds'])})",
        }
        rows.append(row)
    return pd.DataFrame(rows)


def runs_in(published: Published, *names: str) -> list[Run]:
    """The runs of these comparisons, each once."""
    return list({run.name: run for name in names for group in published[name].values() for run in group}.values())


def is_graded(run: Run) -> bool:
    """Whether it is a run of the graded task."""
    return "--dataset graded" in run.flags and "--task" not in run.flags


def is_whole(run: Run) -> bool:
    """Whether a run of the graded task is of all problems and evaluated as it is trained, else its ceiling is another;
    and as many evaluations as a plateau needs."""
    known = "--difficulty" not in run.flags and "--eval_temperature" not in run.flags
    return is_graded(run) and known and run.rates.size >= PLATEAU


def law(published: Published) -> dict[str, str]:
    """The tables of results/law.md."""
    every = runs_in(published, *published)
    groups = {
        "law": runs_in(published, "law"),
        "3 C_mid": [run for run in every if is_whole(run) and reach_of(run, 0.5) >= 3],  # as far as the paper's fits
        "chain": runs_in(published, "chain"),
    }
    rows = [cut_row(f"{name}, {cut}", share, runs) for name, runs in groups.items() for cut, share in CUTS.items()]
    reach = reach_table([run for run in every if is_graded(run) and stands(run)])
    return {"cuts": markdown(pd.DataFrame(rows)), "reach": markdown(reach)}


# ------------------------------------------------------------------------------------------------------ pictures


def draw() -> None:
    """The pictures of README.md and RESULTS.md: forecasts of published runs, with what came."""
    paper = curve(RESULTS / "paper_8B_run.jsonl", 0.25, "The paper's 8B run")
    plot_curves([[paper._replace(x="GPU-hours")]], ROOT / "docs" / "law.png")
    tasks = [curve(RESULTS / f"{file}.jsonl", 0.5, f"Task {name}") for name, file in TASKS.items()]
    plot_curves([tasks], RESULTS / "law.png")


PAGES = {
    LAB / "RESULTS.md": findings,
    RESULTS / "comparisons.md": comparisons,
    RESULTS / "law.md": law,
}


def main() -> None:
    """Remakes the tables and the pictures."""
    published = members()
    for page, blocks in PAGES.items():
        fill(page, blocks(published))
    draw()


if __name__ == "__main__":
    main()
