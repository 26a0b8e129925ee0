"""The page of one comparison and what all pages share; `figures.py` has the numbers and THE RULE."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from comparisons import GRADED, Comparison
from curves import LOGGED, OF_SETS, Evaluations, as_word, of_set
from figures import (
    FALL,
    RELATIVE,
    Compared,
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
from sweep import resolved

from fit_sigmoid import UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {  # of a run: (name in a table, words for more and for less, digits of a difference)
    "A known": ("A", "higher", "lower", 3),
    "B shared": ("B", "steeper", "flatter", 2),
    "C_mid shared": ("C_mid", "needs more", "needs less", 0),
    "final": ("end", "higher", "lower", 3),
    "tokens": ("tokens to", "needs more", "needs fewer", 0),
    "device_hours": ("hours to", "needs more", "needs fewer", 0),
}
IN_THE_PAPER = {  # of a claim: (measure, its name in the findings)
    "A": ("A known", "A where identifiable"),
    "B": ("B shared", "B at the shared A"),
    "end": ("final", "pass rate at the end"),
}
LEAST_PAIRS = 3  # of runs with an identifiable ceiling, for a verdict on A
PAPER_HEAD = ["variant", "against", "figure", "the paper", "here", "seeds", "could see", "verdict"]
HEALTH_HEAD = ["lag", "largest lag", "ESS", "clipped A > 0", "clipped A < 0", "kept", "entropy", "falls"]


# ------------------------------------------------------------------------------------------------ words of all pages


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def told_apart(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table without the columns in which all rows agree, which a line below it names; the first one stays."""
    alike = {i for i, cells in enumerate(zip(*rows, strict=True)) if len(rows) > 1 and i and len(set(cells)) == 1}
    said = "; ".join(f"{head[i]} {rows[0][i]}" for i in sorted(alike))
    some = [[cell for i, cell in enumerate(row) if i not in alike] for row in (head, *rows)]
    return joined(table(some[0], some[1:]), f"In all rows: {said}." if said else "").strip()


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


def mean_of(values: Sequence[float], ends: bool = True) -> str:
    """`mean [low, high]` of the finite ones, and of how many if not of all."""
    known = [value for value in values if math.isfinite(value)]
    text = with_ends(interval(known)) if ends else amount(interval(known)[0])
    return text + f" ({share_of(np.isfinite(values))})" * (len(known) < len(values))


def share_of(found: Sequence[bool]) -> str:
    """`18 of 20`."""
    return f"{sum(found)} of {len(found)}"


def difference_text(values: Sequence[float], digits: int = 3, relative: bool = False) -> str:
    """`-0.001 [-0.003, +0.001]`; of logarithms `+39 % [+22, +59]`, from ten times on `18 times [2.35, 43.8]`. A value
    alone, or of one seed, has no ends."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    if relative and max(known) > math.log(10):
        shown, unit = [f"{math.exp(value):.3g}" for value in known], " times"
    elif relative:
        shown, unit = [f"{100 * math.expm1(value):+.0f}" for value in known], " %"
    else:
        shown, unit = [f"{value:+.{digits}f}" for value in known], ""
    return shown[0] + unit + (f" [{', '.join(shown[1:])}]" if len(shown) > 1 else "")


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

    (least, most), (_, low, high), could = theirs, ours, visible(sd, n)
    claim = "lower" if most <= 0 else "higher"
    if math.isfinite(most - least):
        claim = " to ".join(difference_text([value], relative=relative) for value in theirs)
    seen = difference_text([could], relative=True) if relative else amount(could)
    verdict = f"**{against_paper(low, high, least, most, n >= least_pairs)}**"
    return [*names, claim, difference_text(ours, relative=relative), str(n), seen, verdict]


# ------------------------------------------------------------------------------------------------ one comparison


def page(x: Compared) -> str:
    """Markdown; docs/results/README.md says how to read it."""
    c, groups = x.c, x.groups
    absent = [variant for variant in c.variants if variant not in groups]
    given = [f"*{name}*" + f" `{c.variants[name]}`" * bool(c.variants[name]) for name in groups]
    given = given if len(given) < 10 else [given[0], f"the other {len(given) - 1} likewise"]  # a grid
    return joined(
        f"# {x.name}: {c.about}",
        f"{sum(map(len, groups.values()))} finished runs in {setting_of(c)}: {'; '.join(given)}."
        + (f" Left out: {', '.join(x.left_out)}." if x.left_out else "")
        + (f" Variants without a finished run: {', '.join(absent)}." if absent else ""),
        f"![{x.name}]({x.name}.png)",
        difference_table(x) if x.against else "",
        sight(x),
        variant_table(x),
        (f"B and C_mid are at A = {x.A:.3f}; " if x.A else "")
        + f"`fit_sigmoid.compare` of all runs: {re.split('[,;]', x.said)[0]}.",
        sets_table(x) if c.sets else "",
    )


def setting_of(c: Comparison) -> str:
    """What differs from the flags of GRADED, which stand in docs/results/README.md."""
    usual, given = resolved(GRADED), resolved(c.setting)
    if usual.keys() - given.keys():
        return f"the setting `{c.setting}`"
    other = [(f"--{name}", as_word(value)) for name, value in given.items() if usual.get(name) != value]
    return "the usual setting (docs/results/README.md)" + (f" with `{shlex.join(sum(other, ()))}`" if other else "")


def measures(x: Compared) -> dict[str, str]:
    """Those that are shown, with their names; hours only where time is compared."""
    shown = (measure for measure in MEASURES if x.c.axis == "device_hours" or measure != "device_hours")
    return {measure: MEASURES[measure][0].replace(" to", f" to {x.c.pass_rate:g}") for measure in shown}


def paper_rows(x: Compared) -> list[Row]:
    """What the paper has, what we have, and whether the runs could have told, in PAPER_HEAD's columns."""
    rows = []
    for variant in (variant for variant in x.c.paper if variant in x.against):
        kind, *theirs = x.c.paper[variant]
        (measure, figure), least = IN_THE_PAPER[kind], LEAST_PAIRS if kind == "A" else 1
        apart, names = x.apart(variant, measure), (variant, x.against[variant], figure)
        rows.append(paper_row(names, tuple(theirs), interval(apart), len(apart), x.spread(measure), least_pairs=least))
    return rows


def difference(x: Compared, name: str, measure: str) -> str:
    """`mean [low, high]` of the paired differences, in bold where THE RULE tells them apart."""
    apart, n = x.apart(name, measure), len(x.groups[name])
    mean, low, high = interval(apart)
    text = difference_text((mean, low, high), MEASURES[measure][-1], measure in RELATIVE)
    text += f" ({len(apart)} of {n} seeds)" * (0 < len(apart) < n)
    return f"**{text}**" if low > 0 or high < 0 else text


def difference_table(x: Compared) -> str:
    """Each variant against its baseline, measure by measure, and against the paper."""
    shown, paper = measures(x), {row[0]: f"{x.c.paper[row[0]][0]} {row[3]}: {row[-1]}" for row in paper_rows(x)}
    rows = [[name, base, *(difference(x, name, measure) for measure in shown)] for name, base in x.against.items()]
    rows = [[*row, paper.get(row[0], "–")] if paper else row for row in rows]
    return told_apart(["variant", "against", *shown.values()] + ["the paper"] * bool(paper), rows)


def variant_table(x: Compared) -> str:
    """What was measured and what the runs were like, one row a variant."""
    (_, A), *others = measures(x).items()
    rows = []
    for name, runs in x.groups.items():
        known, numbers = x.figures.loc[name, "A known"].count(), [run.seed for run in runs]
        seeds = str(len(runs)) + f" ({', '.join(map(str, numbers))})" * (numbers != [*range(len(runs))])
        means = (mean_of(x.figures.loc[name, measure], ends=False) for measure in ("A", *dict(others)))
        theirs = ["{:.3f}, {:.2f}".format(*x.c.published[name])] if x.c.published else []
        rows.append([name, seeds, str(known), *means, *theirs, *health(runs)])
    theirs = ["the paper's A, B"] * bool(x.c.published)
    return told_apart(["variant", "seeds", "identifiable", A, *dict(others).values(), *theirs, *HEALTH_HEAD], rows)


def health(runs: Sequence[Evaluations]) -> Row:
    """What these runs were like, in HEALTH_HEAD's columns; means over their steps."""
    mean = {column: np.mean([over_steps(run, column) for run in runs]) for column in LOGGED}
    lag = max(np.nanmax(run.points["lag_max"], initial=-math.inf) for run in runs)
    fell = [f"seed {run.seed} by {below:.2f}" for run in runs if (below := falls(run).max()) > FALL]
    clipped = (f"{mean[column]:.1%}" for column in ("clipped_positive", "clipped_negative"))
    cells = f"{mean['lag']:.2f}", f"{lag:.0f}", f"{mean['ess']:.2f}", *clipped, f"{mean['kept']:.0%}"
    return [*cells, f"{mean['entropy']:.3f}", ", ".join(fell) or "none"]


def sets_table(x: Compared) -> str:
    """Each variant on the prompts that it trains on, and on each data set apart: every run has a fit of its own."""
    rows = []
    for variant, runs in x.groups.items():
        for name, column in (("all trained on", "pass_rate"), *zip(x.c.sets, OF_SETS, strict=False)):
            seen = [of_set(run, column) if column in OF_SETS else run for run in runs]
            fits, ends = [fitted(run, x.c.axis) for run in seen], [forecast(run, 0.5) for run in seen]
            shown = [[getattr(f, number) for f in fits] for number in ("A", "B", "C_mid")]
            shown += [[*map(final, seen)], [final(run) - rate_at(run, x.c.axis, 0.5) for run in seen]]
            known, held = (share_of(found) for found in ([f.identifiable for f in fits], [end.inside for end in ends]))
            rows.append([variant, name, known, *map(mean_of, shown), held])
    head = "variant|data set|identifiable|A|B|C_mid|end|gained in the second half|end inside, from half"
    return told_apart(head.split("|"), rows)


def sight(x: Compared) -> str:
    """What the runs could have seen, for each number of pairs that the variants have."""
    lines = []
    for n in sorted({len(x.apart(name, "final")) for name in x.against} - {0, 1}):
        A, B, C_mid = (visible(x.spread(measure), n) for measure in list(MEASURES)[:3])
        each = f"{amount(A)} in A, {amount(B)} in B and {difference_text([C_mid], relative=True)} in C_mid"
        lines.append(f"{n} pairs could see {each}")
    return "; ".join(lines) + "." if lines else ""


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
            means = (mean_of(x.figures.loc[variant, measure]) for variant in (base, name))
            lines.append("  {:<22}{:<28}{:<28}{}".format(title, *means, difference(x, name, compared).strip("*")))
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
