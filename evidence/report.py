"""The page of one comparison and what all pages share; `figures.py` has the numbers and THE RULE."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from curves import LOGGED, OF_SETS, of_set
from figures import (
    FALL,
    RELATIVE,
    Compared,
    Groups,
    Row,
    against_paper,
    falls,
    final,
    fitted,
    interval,
    over_steps,
    rate_at,
    visible,
)
from forecasts import forecast

from fit_sigmoid import UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {  # of a run: (heading, words for more and for less)
    "A known": ("A where identifiable", "higher", "lower"),
    "B shared": ("B at the shared A", "steeper", "flatter"),
    "C_mid shared": ("C_mid at the shared A", "needs more", "needs less"),
    "final": ("pass rate at the end", "higher", "lower"),
    "tokens": ("tokens to the rate", "needs more", "needs fewer"),
    "device_hours": ("device-hours to the rate", "needs more", "needs fewer"),
}
IN_THE_PAPER = {"A": "A known", "B": "B shared", "end": "final"}
LEAST_PAIRS = 3  # of runs with an identifiable ceiling, for a verdict on A
PAPER_HEAD = ["variant", "against", "figure", "the paper", "here", "seeds", "could see", "verdict"]
HEALTH_HEAD = ["variant", "lag mean / max", "ESS", "clipped A > 0 / A < 0", "kept", "entropy", "falls"]


# ------------------------------------------------------------------------------------------------ words of all pages


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def joined(*parts: str) -> str:
    """A page of these paragraphs and tables, without the empty ones."""
    return "\n\n".join(filter(None, parts)) + "\n"


def amount(value: float) -> str:
    """0.0123, 12.3, 512k: three digits of anything."""
    if not math.isfinite(value):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def with_ends(values: Sequence[float]) -> str:
    """`value [low, high]`; a single run has no ends."""
    value, low, high = map(amount, values)
    return value if math.isnan(values[1]) else f"{value} [{low}, {high}]"


def mean_of(values: Sequence[float], count: bool = False) -> str:
    """`mean [low, high]` of the finite ones, and with `count` of how many if not of all."""
    known = [value for value in values if math.isfinite(value)]
    return with_ends(interval(known)) + f" ({len(known)} of {len(values)})" * (count and len(known) < len(values))


def share_of(found: Sequence[bool]) -> str:
    """`18 of 20`."""
    return f"{sum(found)} of {len(found)}"


def seeds_of(groups: Groups) -> str:
    """`base 0, 1; dapo 0`."""
    return "; ".join(f"{name} {', '.join(str(run.seed) for run in runs)}" for name, runs in groups.items())


def difference_text(value: float, relative: bool) -> str:
    """A difference: .0123, or the percent that a difference of logarithms is; from ten times on how many times."""
    if math.isnan(value):
        return "–"
    if relative and value > math.log(10):
        return f"{math.exp(value):.3g} times"
    return f"{100 * math.expm1(value):+.3g} %" if relative else f"{'+' if value >= 0 else ''}{amount(value)}"


def save(text: str, path: Path) -> None:
    """Writes a page, and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"written to {path}")


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Puts each block into a page, between the lines `<!-- refit NAME -->` and `<!-- end -->`."""
    text = page.read_text()
    for name in re.findall(r"<!-- refit (.+?) -->", text):
        if name in blocks:
            pattern = rf"(<!-- refit {re.escape(name)} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda found, new=blocks[name]: f"{found[1]}{new}\n{found[2]}", text, flags=re.S)
        else:
            print(f"{page}: there is nothing to put under {name}, which stays as it is")
    page.write_text(text)


def paper_row(
    names: Sequence[str],
    theirs: tuple[float, float],
    ours: tuple[float, float, float],
    n: int,
    sd: float,
    *,
    relative: bool = False,
    least_pairs: int = 1,
) -> Row:
    """A row in PAPER_HEAD's columns. `names`: the first three; `theirs`: between these lies the paper's difference;
    `ours`: mean and interval of `n` seeds; `sd`: of the paired differences, NaN where there are none; there is no
    verdict with fewer than `least_pairs` seeds."""

    def text(value: float) -> str:
        return difference_text(value, True) if relative else f"{value:+.3f}"

    (least, most), (mean, low, high) = theirs, ours
    claim = f"{text(least)} to {text(most)}" if math.isfinite(most - least) else "lower" if most <= 0 else "higher"
    here = f"{text(mean)} [{text(low)}, {text(high)}]" if n > 1 else text(mean) if n else "–"
    could = visible(sd, n)
    seen = difference_text(could, True) if relative and math.isfinite(could) else amount(could)
    return [*names, claim, here, str(n), seen, f"**{against_paper(low, high, least, most, n >= least_pairs)}**"]


# ------------------------------------------------------------------------------------------------ one comparison


def page(x: Compared) -> str:
    """Markdown."""
    c, groups = x.c, x.groups
    absent = [variant for variant in c.variants if variant not in groups]
    given = "; ".join(f"*{name}* `{c.variants[name] or 'the setting as it is'}`" for name in groups)
    rows = paper_rows(x)
    return joined(
        f"# {x.name}: {c.about}",
        f"{sum(map(len, groups.values()))} finished runs. Seeds: {seeds_of(groups)}."
        + (f" Left out: {', '.join(x.left_out)}." if x.left_out else "")
        + (f" Variants without a finished run: {', '.join(absent)}." if absent else ""),
        f"Setting: `{c.setting}`. Variants: {given}.",
        f"![{x.name}]({x.name}.png)",
        table(PAPER_HEAD, rows) if rows else "",
        difference_table(x) if x.against else "",
        sight(x),
        variant_table(x),
        f"`fit_sigmoid.compare` on all runs: {x.said}.",
        health_table(groups),
        sets_table(x) if c.sets else "",
    )


def measures(x: Compared) -> dict[str, str]:
    """Those that are shown, with the pass rate in its place in their headings; hours only where time is compared."""
    shown = (measure for measure in MEASURES if x.c.axis == "device_hours" or measure != "device_hours")
    return {measure: MEASURES[measure][0].replace("the rate", f"{x.c.pass_rate:g}") for measure in shown}


def paper_rows(x: Compared) -> list[Row]:
    """What the paper has, what we have, and whether the runs could have told, in PAPER_HEAD's columns."""
    rows = []
    for variant in (variant for variant in x.c.paper if variant in x.against):
        kind, *theirs = x.c.paper[variant]
        measure, least = IN_THE_PAPER[kind], LEAST_PAIRS if kind == "A" else 1
        apart, names = x.apart(variant, measure), (variant, x.against[variant], MEASURES[measure][0])
        rows.append(paper_row(names, tuple(theirs), interval(apart), len(apart), x.spread(measure), least_pairs=least))
    return rows


def cell(x: Compared, variant: str, measure: str) -> str:
    """`mean [low, high]`, and of how many runs if not of all."""
    return mean_of(x.figures.loc[variant, measure], count=True)


def difference(x: Compared, name: str, measure: str) -> str:
    """`mean [low, high]` of the paired differences, in bold where THE RULE tells them apart."""
    apart, n = x.apart(name, measure), len(x.groups[name])
    mean, low, high = interval(apart)
    text, *ends = (difference_text(value, measure in RELATIVE) for value in (mean, low, high))
    text += "" if math.isnan(low) else f" [{', '.join(ends)}]"
    text += f" ({len(apart)} of {n} seeds)" * (0 < len(apart) < n)
    return f"**{text}**" if low > 0 or high < 0 else text


def difference_table(x: Compared) -> str:
    """Each variant against its baseline, measure by measure."""
    shown = measures(x)
    rows = [[name, base, *(difference(x, name, measure) for measure in shown)] for name, base in x.against.items()]
    return table(["variant", "against", *shown.values()], rows)


def variant_table(x: Compared) -> str:
    """What was measured, one row a variant."""
    _, *others = measures(x)
    rows = []
    for name, runs in x.groups.items():
        known = f"{x.figures.loc[name, 'A known'].count()} of {len(runs)}"
        rows.append([name, len(runs), cell(x, name, "A"), known, *(cell(x, name, measure) for measure in others)])
        if x.c.published:
            rows[-1] += ["{:.3f}, {:.2f}".format(*x.c.published[name])]
    at = f"A = {x.A:.3f}" if x.A else "a shared A"
    of_fit = [f"B at {at}", f"C_mid ({UNITS.get(x.c.axis, x.c.axis)}) at {at}"]
    head = ["variant", "seeds", "A", "A identifiable", *of_fit, *list(measures(x).values())[3:]]
    return table(head + ["the paper's A, B"] * bool(x.c.published), rows)


def health_table(groups: Groups) -> str:
    """What the runs were like, one row a variant; means over their steps."""
    rows = []
    for name, runs in groups.items():
        mean = {column: np.mean([over_steps(run, column) for run in runs]) for column in LOGGED}
        lag = max(np.nanmax(run.points["lag_max"], initial=-math.inf) for run in runs)
        clipped = f"{mean['clipped_positive']:.2%} / {mean['clipped_negative']:.2%}"
        fell = [f"seed {run.seed}: by up to {below:.2f}" for run in runs if (below := falls(run).max()) > FALL]
        cells = f"{mean['lag']:.2f} / {lag:.0f}", f"{mean['ess']:.3f}", clipped, f"{mean['kept']:.0%}"
        rows.append([name, *cells, f"{mean['entropy']:.3f}", "; ".join(fell) or "none"])
    return table(HEALTH_HEAD, rows)


def sets_table(x: Compared) -> str:
    """Each variant on the prompts that it trains on, and on each data set apart: every run has a fit of its own."""
    rows = []
    for variant, runs in x.groups.items():
        for name, column in (("all trained on", "pass_rate"), *zip(x.c.sets, OF_SETS, strict=False)):
            seen = [of_set(run, column) if column in OF_SETS else run for run in runs]
            fits, ends = [fitted(run, x.c.axis) for run in seen], [forecast(run, 0.5) for run in seen]
            A, *others = (mean_of([getattr(f, number) for f in fits]) for number in ("A", "B", "C_mid"))
            gained = [final(run) - rate_at(run, x.c.axis, 0.5) for run in seen]
            cells = [
                A,
                share_of([f.identifiable for f in fits]),
                *others,
                mean_of([*map(final, seen)]),
                mean_of(gained),
            ]
            rows.append([variant, name, *cells, share_of([end.inside for end in ends])])
    head = (
        "variant|data set|A|A identifiable|B|C_mid|pass rate at the end|gained in the second half|end inside, from half"
    )
    return table(head.split("|"), rows)


def sight(x: Compared) -> str:
    """What the runs could have seen, for each number of pairs that the variants have."""
    lines = []
    for n in sorted({len(x.apart(name, "final")) for name in x.against} - {0, 1}):
        A, B, C_mid = (visible(x.spread(measure), n) for measure in list(MEASURES)[:3])
        each = f"{amount(A)} in A, of {amount(B)} in B and of {difference_text(C_mid, True)} in C_mid"
        lines.append(f"{n} pairs of runs could see a difference of {each}")
    return "; ".join(lines) + " (5 %, two-sided, in four of five cases)." if lines else ""


def in_short(x: Compared) -> str:
    """What changed and whether it can be seen: three rows and a sentence for each variant."""
    lines = []
    shown = {"pass rate at the end": ("final", "final"), "C_mid": ("C_mid shared",) * 2, "A": ("A", "A known")}
    for name, base in x.against.items():
        lines += ["", f"{name} against {base}: means with their 95 % intervals, and the difference paired by seed"]
        seen = []
        for title, (measure, compared) in shown.items():
            _, low, high = interval(x.apart(name, compared))
            if low > 0 or high < 0:
                seen.append(f"{title} {MEASURES[compared][1 if low > 0 else 2]}")
            cells = cell(x, base, measure), cell(x, name, measure), difference(x, name, compared).strip("*")
            lines.append("  {:<22}{:<28}{:<28}{}".format(title, *cells))
        n = len(x.apart(name, "final"))
        could = f"{n} seeds could see {amount(visible(x.spread('final'), n))} in the pass rate at the end"
        why = f"no interval leaves out 0; {could}" if n > 1 else "one seed has no interval"
        lines.append(f"  It can be seen: {', '.join(seen)}." if seen else f"  It cannot be seen: {why}.")
    return "\n".join(lines)


def picture(x: Compared) -> "Figure":
    """A panel for each axis of compute, thin lines the runs, thick ones the means over seeds, and a panel with the
    differences in the pass rate at the end."""
    from matplotlib.figure import Figure

    axes_of = list(dict.fromkeys((x.c.axis, "device_hours")))
    figure = Figure(figsize=(4.6 * (len(axes_of) + 1), 4.4), layout="constrained")
    *panels, last = figure.subplots(1, len(axes_of) + 1)
    for panel, axis in zip(panels, axes_of, strict=True):
        for i, runs in enumerate(x.groups.values()):
            color, style = f"C{i % 10}", "-" if i < 10 else "--"
            for run in runs:
                panel.plot(run.points[axis], run.rates, color=color, alpha=0.3, lw=0.8)
            grid = np.linspace(0, min(run.points[axis][-1] for run in runs), 60)
            mean = np.mean([np.interp(grid, run.points[axis], run.rates) for run in runs], 0)
            panel.plot(grid, mean, color=color, lw=2, ls=style)
        panel.set(xlabel=UNITS.get(axis, axis), ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("pass rate on held-out prompts")
    for i, name in enumerate(x.groups):
        mean, low, high = interval(x.apart(name, "final"))
        reach = 0.0 if math.isnan(low) else high - mean
        last.errorbar(mean, i, xerr=reach, color=f"C{i % 10}", marker="o", capsize=3)
    last.set_yticks(range(len(x.groups)), list(x.groups), fontsize=8)
    last.invert_yaxis()
    last.axvline(0, color="gray", lw=0.8)
    last.set(xlabel="pass rate at the end minus the baseline's, 95 %")
    return figure
