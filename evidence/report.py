"""The page of one comparison and what all pages share; `figures.py` has the numbers and THE RULE."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from comparisons import Comparison
from curves import LOGGED
from figures import (
    LEAST_PAIRS,
    RELATIVE,
    Groups,
    Row,
    against_paper,
    differences,
    interval,
    measured,
    of_fits,
    over_steps,
    pairs,
    share_ceiling,
    signs,
    spread,
    verdict,
    visible,
)

from fit_sigmoid import UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is compared with the baseline: (heading, words for more and for less)
Measures = Mapping[str, tuple[str, str, str]]
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
PAPER_HEAD = ["variant", "against", "figure", "the paper", "here", "seeds", "could see", "verdict"]
HEALTH_HEAD = ["variant", "lag mean / max", "ESS", "clipped A > 0 / A < 0", "truncated", "interrupted", "kept",
               "entropy", "largest log-prob gap", "instabilities"]  # fmt: skip

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


# ------------------------------------------------------------------------------------------------ words of all pages


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


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


def difference_text(value: float, relative: bool) -> str:
    """A difference: .0123, or the percent that a difference of logarithms is; from ten times on how many times."""
    if math.isnan(value):
        return "–"
    if relative and value > math.log(10):
        return f"{math.exp(value):.3g} times"
    return f"{100 * math.expm1(value):+.3g} %" if relative else f"{'+' if value >= 0 else ''}{amount(value)}"


def save(text: str, path: Path) -> None:
    """Writes a page, and prints it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"{text}\nwritten to {path}")


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


def paper_row(names: Sequence[str], theirs: tuple[float, float], ours: tuple[float, float, float], n: int, sd: float,
              relative: bool = False, least_pairs: int = 1) -> Row:  # fmt: skip
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


@dataclass
class Compared:
    """The finished runs of a comparison and their figures: `unfitted`, and `fits` by axis of compute with the shared
    ceiling and what `fit_sigmoid.compare` says."""

    name: str
    c: Comparison
    groups: Groups
    left_out: Sequence[str]  # runs without a result, each with the reason

    def __post_init__(self) -> None:
        self.against = pairs(self.c, self.groups)
        self.unfitted = measured(self.groups, self.c.pass_rate)
        self.fits: dict[str, tuple[pd.DataFrame, float | None, str]] = {}
        for axis in self.c.axes:
            A, said, refits = share_ceiling(self.groups, axis)
            self.fits[axis] = of_fits(self.groups, axis, refits), A, said

    def page(self) -> str:
        """Markdown."""
        c, groups = self.c, self.groups
        absent = [variant for variant in c.variants if variant not in groups]
        seeds = "; ".join(f"{name} {', '.join(str(run.seed) for run in runs)}" for name, runs in groups.items())
        given = "; ".join(f"*{name}* `{c.variants[name] or 'the setting as it is'}`" for name in groups)
        rows = self.paper_rows()
        text = [
            f"# {self.name}: {c.about}",
            f"{sum(map(len, groups.values()))} finished runs. Seeds: {seeds}."
            + (f" Left out: {', '.join(self.left_out)}." if self.left_out else "")
            + (f" Variants without a finished run: {', '.join(absent)}." if absent else ""),
            f"Setting: `{c.setting}`. Variants: {given}.",
            f"![{self.name}]({self.name}.png)",
            RULE,
            *([AGAINST_THE_PAPER, table(PAPER_HEAD, rows)] if rows else []),
        ]
        for axis, (figures, A, said) in self.fits.items():
            text += [f"**Fits against {UNITS.get(axis, axis)}.** A ceiling that is not identifiable is a "
                     "guess, and so are its B and C_mid; B and C_mid at the shared A are as good as that A.",
                     self.fit_table(axis, A), f"`fit_sigmoid.compare` on all runs: {said}.",
                     *self.compare(figures, FITTED), self.sight(figures)]  # fmt: skip
        text += ["**Without a fit.** Mean [95 % interval over seeds].", self.run_table(),
                 *self.compare(self.unfitted, MEASURED), "**Health of the runs.**", self.health_table()]  # fmt: skip
        return "\n\n".join(filter(None, text)) + "\n"

    def paper_rows(self) -> list[Row]:
        """What the paper has, what we have, and whether the runs could have told, in PAPER_HEAD's columns."""
        rows = []
        for variant in (variant for variant in self.c.paper if variant in self.against):
            kind, *theirs = self.c.paper[variant]
            measure, base = IN_THE_PAPER[kind], self.against[variant]
            figures = self.unfitted if measure == "final" else self.fits[self.c.axes[0]][0]
            apart = differences(figures, variant, base, measure)
            names, sd = (variant, base, (FITTED | MEASURED)[measure][0]), spread(self.c, self.groups, figures, measure)
            least = LEAST_PAIRS if kind == "A" else 1
            rows.append(paper_row(names, tuple(theirs), interval(apart), len(apart), sd, least_pairs=least))
        return rows

    def headings(self, measures: Measures) -> list[str]:
        """Their headings, with the pass rate in its place."""
        return [heading.replace("the rate", f"{self.c.pass_rate:g}") for heading, *_ in measures.values()]

    def cell(self, figures: pd.DataFrame, variant: str, measure: str) -> str:
        """`mean [low, high]`, and of how many runs if not of all."""
        found, n = figures.loc[variant, measure].dropna(), len(self.groups[variant])
        text = with_ends(interval(found))
        return text if len(found) == n else f"{text} ({len(found)} of {n})"

    def fit_table(self, axis: str, A: float | None) -> str:
        """Fits against one axis of compute, one row a variant."""
        figures, at = self.fits[axis][0], f"A = {A:.3f}" if A else "a shared A"
        head = ["variant", "seeds", "A", "A identifiable", "B", f"C_mid ({UNITS.get(axis, axis)})", f"B at {at}",
                f"C_mid at {at}"]  # fmt: skip
        rows = []
        for name, runs in self.groups.items():
            cells = [self.cell(figures, name, measure) for measure in ("A", "B", "C_mid", "B shared", "C_mid shared")]
            known = f"{figures.loc[name, 'A known'].count()} of {len(runs)}"
            rows.append([name, len(runs), cells[0], known, *cells[1:]])
        return table(head, rows)

    def run_table(self) -> str:
        """What needs no fit, one row a variant."""
        rows = [[name, len(runs), *(self.cell(self.unfitted, name, measure) for measure in MEASURED)]
                for name, runs in self.groups.items()]  # fmt: skip
        return table(["variant", "seeds", *self.headings(MEASURED)], rows)

    def health_table(self) -> str:
        """What the runs were like, one row a variant; means over their steps."""
        rows = []
        for name, runs in self.groups.items():
            mean = {column: np.mean([over_steps(run, column) for run in runs]) for column in LOGGED}
            lag, gap = (max(np.nanmax(run.points[column], initial=-math.inf) for run in runs)
                        for column in ("lag_max", "gap"))  # fmt: skip
            said = [f"seed {run.seed}: {', '.join(found)}" for run in runs if (found := signs(run))]
            rows.append([
                name, f"{mean['lag']:.2f} / {lag:.0f}", f"{mean['ess']:.3f}",
                f"{mean['clipped_positive']:.2%} / {mean['clipped_negative']:.2%}", f"{mean['truncated']:.1%}",
                f"{mean['interrupted']:.1%}", f"{mean['kept']:.0%}", f"{mean['entropy']:.3f}", f"{gap:.1e}",
                "; ".join(said) or "none",
            ])  # fmt: skip
        return table(HEALTH_HEAD, rows)

    def compare(self, figures: pd.DataFrame, measures: Measures) -> list[str]:
        """A table of each variant against its baseline, measure by measure, and the same in words; by THE RULE."""
        rows = {name: [name, base] for name, base in self.against.items()}
        headings, lines = self.headings(measures), []
        for (measure, (_, more, less)), heading in zip(measures.items(), headings, strict=True):
            said: dict[str, list[str]] = {}
            for name, base in self.against.items():
                apart, relative = differences(figures, name, base, measure), measure in RELATIVE
                mean, low, high = interval(apart)
                word = verdict(mean, low, high, more, less)
                bold = "**" if word in (more, less) else ""
                said.setdefault(f"{bold}{word}{bold}", []).append(name)
                text, *ends = (difference_text(value, relative) for value in (mean, low, high))
                text += "" if math.isnan(low) else f" [{', '.join(ends)}]"
                text += f" ({len(apart)} of {len(self.groups[name])} seeds)" * (0 < len(apart) < len(self.groups[name]))
                rows[name].append(f"{bold}{text}{bold}")
            found = sorted(said, key=lambda word: word[0] != "*")  # first what is told apart
            lines.append(f"- {heading}: " + "; ".join(f"{word}: {', '.join(said[word])}" for word in found) + ".")
        head = ["variant", "against", *headings]
        return [table(head, list(rows.values())), "\n".join(lines)] if rows else []

    def sight(self, figures: pd.DataFrame) -> str:
        """What the runs could have seen, for each number of pairs that the variants have."""
        seeds = {name: {run.seed for run in runs} for name, runs in self.groups.items()}
        lines = []
        for n in sorted({len(seeds[name] & seeds[base]) for name, base in self.against.items()} - {0, 1}):
            A, B, C_mid = (visible(spread(self.c, self.groups, figures, measure), n) for measure in FITTED)
            lines.append(f"{n} pairs of runs could see a difference of {amount(A)} in A, of {amount(B)} in B and of "
                         f"{difference_text(C_mid, True)} in C_mid")  # fmt: skip
        return "; ".join(lines) + " (5 %, two-sided, in four of five cases)." if lines else ""

    def in_short(self) -> str:
        """What changed and whether it can be seen, a line for each variant."""
        lines = ["What changed in the pass rate at the end, variant minus baseline, with its 95 % interval over seeds:"]
        sd = spread(self.c, self.groups, self.unfitted, "final")
        for name, base in self.against.items():
            apart = differences(self.unfitted, name, base, "final")
            mean, low, high = interval(apart)
            ends, could = f" [{low:+.3f}, {high:+.3f}]" * (len(apart) > 1), amount(visible(sd, len(apart)))
            lines.append(f"  {name} against {base}: {mean:+.3f}{ends}: {verdict(mean, low, high, 'higher', 'lower')}; "
                         f"{len(apart)} seeds could see a difference of {could}")  # fmt: skip
        return "\n".join(lines)

    def picture(self) -> "Figure":
        """A panel for each axis of compute, thin lines the runs, thick ones the means over seeds, and a panel with the
        differences in the pass rate at the end."""
        from matplotlib.figure import Figure

        axes_of = list(dict.fromkeys((*self.c.axes, "device_hours")))
        figure = Figure(figsize=(4.6 * (len(axes_of) + 1), 4.4), layout="constrained")
        *panels, last = figure.subplots(1, len(axes_of) + 1)
        for panel, axis in zip(panels, axes_of, strict=True):
            for i, runs in enumerate(self.groups.values()):
                lines = [(run.points[axis], run.rates) for run in runs]
                for x, y in lines:
                    panel.plot(x, y, color=f"C{i % 10}", alpha=0.3, lw=0.8)
                grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
                panel.plot(grid, np.mean([np.interp(grid, x, y) for x, y in lines], 0), color=f"C{i % 10}", lw=2,
                           ls="-" if i < 10 else "--")  # fmt: skip
            panel.set(xlabel=UNITS.get(axis, axis), ylim=(0, 1))
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("pass rate on held-out prompts")
        for i, name in enumerate(self.groups):
            mean, low, high = interval(differences(self.unfitted, name, self.against.get(name, name), "final"))
            reach = 0.0 if math.isnan(low) else high - mean
            last.errorbar(mean, i, xerr=reach, color=f"C{i % 10}", marker="o", capsize=3)
        last.set_yticks(range(len(self.groups)), list(self.groups), fontsize=8)
        last.invert_yaxis()
        last.axvline(0, color="gray", lw=0.8)
        last.set(xlabel="pass rate at the end minus the baseline's, 95 %")
        return figure
