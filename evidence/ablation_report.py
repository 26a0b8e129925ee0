"""The report of one comparison, in Markdown with a picture; `ablation_figures.py` has its numbers and THE RULE."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import (
    LEAST_PAIRS,
    RELATIVE,
    Result,
    against_paper,
    by_variant,
    difference,
    differences,
    interval,
    over_steps,
    pairs,
    share_ceiling,
    signs,
    spread,
    values,
    verdict,
    visible,
)
from comparisons import Comparison
from curves import Curve
from measuring import table

import fit_sigmoid

# What is compared with the baseline: (heading, words for more and for less)
FITTED = {  # of the curve, so for each axis of compute
    "A known": ("A where identifiable", "higher", "lower"),
    "B shared": ("B at the shared A", "steeper", "flatter"),
    "C_mid shared": ("C_mid at the shared A", "needs more", "needs less"),
}
MEASURED = {  # of the run, without a fit
    "final": ("pass rate at the end", "higher", "lower"),
    "fall": ("largest fall below the best before", "falls further", "falls less"),
    "truncated": ("truncated completions, mean over steps", "more", "fewer"),
    "tokens": ("tokens to the rate", "needs more", "needs fewer"),
    "step": ("steps to the rate", "needs more", "needs fewer"),
    "device_hours": ("device-hours to the rate", "needs more", "needs fewer"),
}
IN_THE_PAPER = {"A": "A known", "B": "B shared", "end": "final"}

RULE = (
    "Differences are variant minus baseline, paired by seed, with the 95 % interval over seeds; those of compute are "
    "differences of logarithms, in percent. In bold where 0 is outside, which is what *distinguishable* means here. "
    "Not corrected for the number of comparisons."
)
AGAINST_THE_PAPER = (
    "**Against the paper.** *Reproduced*: where the paper's difference is about 0, ours lies within its margin; else "
    "ours leaves out 0 and overlaps the paper's. *Refuted*: ours and the paper's do not overlap. Anything else *cannot "
    f"be seen at this size*, and so is a difference in A of fewer than {LEAST_PAIRS} pairs of identifiable ceilings. "
    "*Could see*: the smallest true difference that so many seeds show in four of five cases (5 %, two-sided), given "
    "the spread of all paired differences of this comparison between runs that do not fall."
)


def amount(value: float) -> str:
    """0.0123, 12.3, 512k: three digits of anything."""
    if not math.isfinite(value):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def apart_text(value: float, relative: bool) -> str:
    """A difference: .0123, or the percent that a difference of logarithms is; from ten times on how many times."""
    if math.isnan(value):
        return "–"
    if relative and value > math.log(10):
        return f"{math.exp(value):.3g} times"
    return f"{100 * math.expm1(value):+.3g} %" if relative else f"{'+' if value >= 0 else ''}{amount(value)}"


def cell(found: Mapping[int, float], of: int) -> str:
    """`mean [low, high]`, and of how many runs if not of all."""
    if not found:
        return f"– (0 of {of})" if of else "–"
    mean, low, high = interval(list(found.values()))
    text = amount(mean) if math.isnan(low) else f"{amount(mean)} [{amount(low)}, {amount(high)}]"
    return text if len(found) == of else f"{text} ({len(found)} of {of})"


def fit_table(groups: Mapping[str, Sequence[Result]], axis: str, shared: float | None) -> str:
    """Fits against one axis of compute, one row a variant."""
    unit, at = fit_sigmoid.UNITS.get(axis, axis), f"A = {shared:.3f}" if shared else "a shared A"
    head = ["variant", "seeds", "A", "A identifiable", "B", f"C_mid ({unit})", f"B at {at}", f"C_mid at {at}"]
    rows = []
    for name, results in groups.items():
        names, n = ("A", "B", "C_mid", "B shared", "C_mid shared"), len(results)
        A, *others = (cell(values(results, measure, axis, 0.0), n) for measure in names)
        rows.append([name, str(n), A, f"{len(values(results, 'A known', axis, 0.0))} of {n}", *others])
    return table(head, rows)


def run_table(groups: Mapping[str, Sequence[Result]], rate: float) -> str:
    """What needs no fit, one row a variant."""
    head = ["variant", "seeds", *headings(MEASURED, rate)]
    rows = [[name, str(len(some)), *(cell(values(some, measure, "", rate), len(some)) for measure in MEASURED)]
            for name, some in groups.items()]  # fmt: skip
    return table(head, rows)


def headings(measures: Mapping[str, tuple[str, str, str]], rate: float) -> list[str]:
    """Their headings, with the pass rate in its place."""
    return [heading.replace("the rate", f"{rate:g}") for heading, *_ in measures.values()]


def health_table(groups: Mapping[str, Sequence[Result]]) -> str:
    """What the runs were like, one row a variant; means over their steps."""
    head = ["variant", "lag mean / max", "ESS", "clipped A > 0 / A < 0", "truncated", "interrupted", "kept", "entropy",
            "largest log-prob gap", "instabilities"]  # fmt: skip
    rows = []
    for name, results in groups.items():

        def mean(column: str, results: Sequence[Result] = results) -> float:
            return float(np.mean([over_steps(r.curve, column) for r in results]))

        def most(column: str, results: Sequence[Result] = results) -> float:
            return max(np.nanmax(r.curve.points[column], initial=-math.inf) for r in results)

        said = [f"seed {r.seed}: {', '.join(found)}" for r in results if (found := signs(r))]
        rows.append([
            name, f"{mean('lag'):.2f} / {most('lag_max'):.0f}", f"{mean('ess'):.3f}",
            f"{mean('clipped_positive'):.2%} / {mean('clipped_negative'):.2%}", f"{mean('truncated'):.1%}",
            f"{mean('interrupted'):.1%}", f"{mean('kept'):.0%}", f"{mean('entropy'):.3f}", f"{most('gap'):.1e}",
            "; ".join(said) or "none",
        ])  # fmt: skip
    return table(head, rows)


def apart(
    against: Mapping[str, str],
    groups: Mapping[str, Sequence[Result]],
    axis: str,
    rate: float,
    measures: Mapping[str, tuple[str, str, str]],
) -> list[str]:
    """A table of each variant against its baseline, measure by measure, and the same in words; by THE RULE. `against`:
    {variant: baseline}; `axis`: of the fits."""
    rows = {name: [name, base] for name, base in against.items()}
    lines = []
    for (measure, (_, more, less)), heading in zip(measures.items(), headings(measures, rate), strict=True):
        said: dict[str, list[str]] = {}
        for name, base in against.items():
            mean, low, high, n = difference(*differences(groups, name, base, axis, rate, measure))
            relative = measure in RELATIVE
            word = verdict(mean, low, high, more, less) if n else "no pair of runs has it"
            sure = word in (more, less)
            said.setdefault(f"**{word}**" if sure else word, []).append(name)
            span = "" if math.isnan(low) else f" [{apart_text(low, relative)}, {apart_text(high, relative)}]"
            few = f" ({n} of {len(groups[name])} seeds)" if 0 < n < len(groups[name]) else ""
            text = f"{apart_text(mean, relative)}{span}{few}" if n else "–"
            rows[name].append(f"**{text}**" if sure else text)
        found = sorted(said, key=lambda word: word[0] != "*")  # first what is told apart
        lines.append(f"- {heading}: " + "; ".join(f"{word}: {', '.join(said[word])}" for word in found) + ".")
    head = ["variant", "against", *headings(measures, rate)]
    return [table(head, list(rows.values())), "\n".join(lines)] if rows else []


def sight(c: Comparison, groups: Mapping[str, Sequence[Result]], axis: str) -> str:
    """What the runs of a comparison could have seen, for each number of pairs that its variants have."""
    seeds = {v: {r.seed for r in some} for v, some in groups.items()}
    counts = sorted({len(seeds[v] & seeds[base]) for v, base in pairs(c, groups).items()} - {0, 1})
    lines = []
    for n in counts:
        A, B, C_mid = (visible(spread(c, groups, axis, measure), n) for measure in FITTED)
        lines.append(f"{n} pairs of runs could see a difference of {amount(A)} in A, of {amount(B)} in B and of "
                     f"{apart_text(C_mid, True)} in C_mid")  # fmt: skip
    return "; ".join(lines) + " (5 %, two-sided, in four of five cases)." if lines else ""


PAPER_HEAD = ["variant", "against", "figure", "the paper", "here", "seeds", "could see", "verdict"]


def paper_row(names: Sequence[str], theirs: tuple[float, float], ours: tuple[float, float, float, int], sd: float,
              relative: bool = False, least_pairs: int = 1) -> list[str]:  # fmt: skip
    """A row in PAPER_HEAD's columns. `names`: the first three; `theirs`: between these lies the paper's difference;
    `ours`: mean, interval and number of seeds; `sd`: of the paired differences, NaN where there are none; there is no
    verdict with fewer than `least_pairs` seeds."""

    def text(value: float) -> str:
        return apart_text(value, True) if relative else f"{value:+.3f}"

    (least, most), (mean, low, high, n) = theirs, ours
    claim = f"{text(least)} to {text(most)}" if math.isfinite(most - least) else "lower" if most <= 0 else "higher"
    here = f"{text(mean)} [{text(low)}, {text(high)}]" if n > 1 else text(mean) if n else "–"
    could = visible(sd, n)
    seen = apart_text(could, True) if relative and math.isfinite(could) else amount(could)
    return [*names, claim, here, str(n), seen, f"**{against_paper(low, high, least, most, n >= least_pairs)}**"]


def paper_rows(c: Comparison, groups: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """What the paper has, what we have, and whether the runs could have told, in PAPER_HEAD's columns."""
    axis, against, rows = c.axes[0], pairs(c, groups), []
    for variant in (variant for variant in c.paper if variant in against):
        kind, *theirs = c.paper[variant]
        measure, base = IN_THE_PAPER[kind], against[variant]
        ours = difference(*differences(groups, variant, base, axis, c.pass_rate, measure))
        figure = (FITTED | MEASURED)[measure][0]
        sd, few = spread(c, groups, axis, measure), LEAST_PAIRS if kind == "A" else 1
        rows.append(paper_row((variant, base, figure), tuple(theirs), ours, sd, least_pairs=few))
    return rows


def report(name: str, c: Comparison, results: Sequence[Result], left_out: Sequence[str]) -> tuple[str, list[list[str]]]:
    """(Markdown, the rows against the paper). `left_out`: runs without a result, each with the reason."""
    groups = by_variant(results)
    absent = [variant for variant in c.variants if variant not in groups]
    text = [
        f"# {name}: {c.about}",
        f"{len(results)} finished runs. Seeds: "
        + "; ".join(f"{v} {', '.join(str(r.seed) for r in some)}" for v, some in groups.items()) + "."
        + (f" Left out: {', '.join(left_out)}." if left_out else "")
        + (f" Variants without a finished run: {', '.join(absent)}." if absent else ""),
        f"Setting: `{c.setting}`. Variants: "
        + "; ".join(f"*{v}* `{c.variants[v] or 'the setting as it is'}`" for v in groups) + ".",
        f"![{name}]({name}.png)",
        RULE,
    ]  # fmt: skip
    against = pairs(c, groups)
    fits = []
    for axis in c.axes:
        shared, said = share_ceiling(results, axis)
        fits += [f"**Fits against {fit_sigmoid.UNITS.get(axis, axis)}.** A ceiling that is not identifiable is a "
                 "guess, and so are its B and C_mid; B and C_mid at the shared A are as good as that A.",
                 fit_table(groups, axis, shared),
                 f"`fit_sigmoid.compare` on all runs: {said}.",
                 *apart(against, groups, axis, c.pass_rate, FITTED), sight(c, groups, axis)]  # fmt: skip
    rows = paper_rows(c, groups)
    text += [AGAINST_THE_PAPER, table(PAPER_HEAD, rows)] if rows else []
    text += [*fits, "**Without a fit.** Mean [95 % interval over seeds].", run_table(groups, c.pass_rate),
             *apart(against, groups, "", c.pass_rate, MEASURED), "**Health of the runs.**",
             health_table(groups)]  # fmt: skip
    return "\n\n".join(filter(None, text)) + "\n", rows


def draw(c: Comparison, results: Sequence[Result], path: Path) -> None:
    """A PNG: a panel for each axis of compute, thin lines the runs, thick ones the means over seeds, and a panel with
    the differences in the pass rate at the end."""
    from matplotlib.figure import Figure

    groups = by_variant(results)
    axes_of = list(dict.fromkeys((*c.axes, "device_hours")))
    figure = Figure(figsize=(4.6 * (len(axes_of) + 1), 4.4), layout="constrained")
    *panels, last = figure.subplots(1, len(axes_of) + 1)
    for panel, axis in zip(panels, axes_of, strict=True):
        for i, some in enumerate(groups.values()):
            lines = [(r.curve.points[axis], r.rates) for r in some]
            for x, y in lines:
                panel.plot(x, y, color=f"C{i % 10}", alpha=0.3, lw=0.8)
            grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
            panel.plot(grid, np.mean([np.interp(grid, x, y) for x, y in lines], 0), color=f"C{i % 10}", lw=2,
                       ls="-" if i < 10 else "--")  # fmt: skip
        panel.set(xlabel=fit_sigmoid.UNITS.get(axis, axis), ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("pass rate on held-out prompts")
    against = pairs(c, groups)
    for i, variant in enumerate(groups):
        base = against.get(variant, variant)
        mean, low, high, _ = difference(*differences(groups, variant, base, "", 0.0, "final"))
        reach = 0.0 if math.isnan(low) else high - mean
        last.errorbar(mean, i, xerr=reach, color=f"C{i % 10}", marker="o", capsize=3)
    last.set_yticks(range(len(groups)), list(groups), fontsize=8)
    last.invert_yaxis()
    last.axvline(0, color="gray", lw=0.8)
    last.set(xlabel="pass rate at the end minus the baseline's, 95 %")
    figure.savefig(path, dpi=110)


def write(
    name: str, c: Comparison, found: Mapping[str, Sequence[Curve]], left_out: Sequence[str], folder: Path
) -> list[list[str]]:
    """FOLDER/NAME.md and its picture. `found`: variant -> its finished runs; `left_out` as in `report`, whose rows
    against the paper are returned."""
    results = [Result(variant, curve) for variant, curves in found.items() for curve in curves]
    folder.mkdir(parents=True, exist_ok=True)
    draw(c, results, folder / f"{name}.png")
    text, rows = report(name, c, results, left_out)
    save(text, folder / f"{name}.md")
    return rows


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Puts each block into a page, between the lines `<!-- refit NAME -->` and `<!-- end -->`."""
    text = page.read_text()
    for name in re.findall(r"<!-- refit (\S+) -->", text):
        if name in blocks:
            pattern = rf"(<!-- refit {re.escape(name)} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda found, new=blocks[name]: f"{found[1]}{new}\n{found[2]}", text, flags=re.S)
        else:
            print(f"{page}: there is nothing to put under {name}, which stays as it is")
    page.write_text(text)


def save(text: str, path: Path) -> None:
    """Writes a page, and prints it."""
    path.write_text(text)
    print(f"{text}\nwritten to {path}")
