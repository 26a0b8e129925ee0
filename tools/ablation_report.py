"""The report of one comparison, in Markdown with a picture; `ablation_figures.py` has its numbers and THE RULE."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import (
    Result,
    by_variant,
    difference,
    extrapolation,
    health,
    interval,
    read,
    share_ceiling,
    values,
    verdict,
)
from comparisons import Comparison
from measuring import table

import fit_sigmoid

__all__ = ["read", "write", "write_predictions"]

# What is compared with the baseline: (heading, words for more and for less)
FITTED = {  # of the curve, so for each axis of compute
    "A known": ("A where identifiable", "higher", "lower"),
    "B shared": ("B at the shared A", "steeper", "flatter"),
    "C_mid shared": ("C_mid at the shared A", "needs more", "needs less"),
}
MEASURED = {  # of the run, without a fit
    "final": ("pass rate at the end", "higher", "lower"),
    "best": ("best pass rate", "higher", "lower"),
    "fall": ("largest fall below the best before", "falls further", "falls less"),
    "truncated": ("truncated completions, mean over steps", "more", "fewer"),
    "tokens": ("tokens to the rate", "needs more", "needs fewer"),
    "step": ("steps to the rate", "needs more", "needs fewer"),
    "device_hours": ("device-hours to the rate", "needs more", "needs fewer"),
}

RULE = (
    "Differences are variant minus baseline, paired by seed, with the 95 % interval over seeds; in bold where 0 is "
    "outside, which is what *distinguishable* means here. Not corrected for the number of comparisons."
)


def amount(value: float) -> str:
    """0.0123, 12.3, 512k: three digits of anything."""
    if not math.isfinite(value):
        return "–"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


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
    """What the runs were like, one row a variant."""
    head = ["variant", "lag mean / max", "ESS", "clipped A > 0 / A < 0", "truncated, mean over steps / at the end",
            "interrupted at the end", "length at the end", "largest log-prob gap", "instabilities"]  # fmt: skip
    rows = []
    for name, results in groups.items():
        each = [health(r) for r in results]

        def mean(key: str, each: list[dict[str, Any]] = each) -> float:
            return float(np.mean([one[key] for one in each]))

        pairs = [(r.seed, ", ".join(one["signs"])) for r, one in zip(results, each, strict=True)]
        signs = [f"seed {seed}: {text}" for seed, text in pairs if text]
        rows.append([
            name, f"{mean('lag'):.2f} / {max(one['lag_max'] for one in each)}", f"{mean('ess'):.3f}",
            f"{mean('clipped +'):.2%} / {mean('clipped -'):.2%}",
            f"{mean('truncated'):.1%} / {mean('truncated_last'):.1%}", f"{mean('interrupted'):.1%}",
            f"{mean('length'):.1f}", f"{max(one['gap'] for one in each):.1e}", "; ".join(signs) or "none",
        ])  # fmt: skip
    return table(head, rows)


def pairs(c: Comparison, groups: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """{variant: its baseline}, for the variants that have one among the finished runs."""
    first = next(iter(c.variants))
    found = {name: c.against.get(name, first) for name in groups}
    own = set(c.against.values())  # a baseline of others is itself compared with none
    return {name: base for name, base in found.items() if name != base and base in groups and name not in own}


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
            ours, theirs = (values(groups[v], measure, axis, rate) for v in (name, base))
            mean, low, high, n = difference(ours, theirs)
            word = verdict(mean, low, high, more, less) if n else "no pair of runs has it"
            sure = word in (more, less)
            said.setdefault(f"**{word}**" if sure else word, []).append(name)
            span = "" if math.isnan(low) else f" [{amount(low)}, {amount(high)}]"
            few = f" ({n} of {len(groups[name])} seeds)" if 0 < n < len(groups[name]) else ""
            text = f"{'+' if mean >= 0 else ''}{amount(mean)}{span}{few}" if n else "–"
            rows[name].append(f"**{text}**" if sure else text)
        found = sorted(said, key=lambda word: word[0] != "*")  # first what is told apart
        lines.append(f"- {heading}: " + "; ".join(f"{word}: {', '.join(said[word])}" for word in found) + ".")
    head = ["variant", "against", *headings(measures, rate)]
    return [table(head, list(rows.values())), "\n".join(lines)] if rows else []


def extrapolation_text(results: Sequence[Result]) -> str:
    """The table of predictions."""
    head = [
        "from the first half",
        "runs",
        "error at the end: median",
        "90 % quantile",
        "largest",
        "too high in",
        "last evaluation inside its 95 % interval",
        "all held-out evaluations inside",
        "median RMSE, second half",
    ]

    def errors(found: Sequence[float]) -> list[str]:
        return [f"{v:.3f}" for v in (np.median(found), np.quantile(found, 0.9), max(found))]

    known = [r for r in results if r.half.fit.identifiable]
    unknown = [r for r in results if not r.half.fit.identifiable]
    rows = []
    for name, some in (("ceiling identifiable", known), ("ceiling not identifiable", unknown), ("all", results)):
        e = extrapolation(some)
        n = e["runs"]
        if n:
            rows.append(
                [
                    f"sigmoid, {name}",
                    str(n),
                    *errors(e["errors"]),
                    f"{e['too high']} of {n}",
                    f"{e['inside']} of {n}",
                    f"{e['covered']:.0%} of {e['points']}",
                    f"{e['rmse']:.3f}",
                ]
            )
        else:
            rows.append([f"sigmoid, {name}", "0", *["–"] * 7])
    rows += [[rule, str(len(found)), *errors(found), *["–"] * 4] for rule, found in e["others"].items()]
    failed = e["not fitted"]
    return table(head, rows) + (f"\n\n{failed} runs have too few evaluations in their first half." if failed else "")


def report(name: str, c: Comparison, results: Sequence[Result], wanted: Sequence[tuple[str, int]]) -> str:
    """Markdown. `wanted`: (variant, seed) of all runs of the comparison, finished or not."""
    groups = by_variant(results)
    seeds = sorted({r.seed for r in results})
    missing = [f"{v} seed {s}" for v, s in wanted if (v, s) not in {(r.variant, r.seed) for r in results}]
    minutes, dates = sum(r.closing["seconds"] for r in results) / 60, sorted(r.closing["finished"] for r in results)
    text = [
        f"# {name}: {c.about}",
        f"{len(results)} of {len(wanted)} runs finished, seeds {', '.join(map(str, seeds))}; {minutes:.0f} minutes of "
        f"machine time, finished between {dates[0]} and {dates[-1]}; "
        f"{'; '.join(sorted({r.closing['machine'] for r in results}))}."
        + (f" Not finished: {', '.join(missing)}." if missing else ""),
        f"Setting: `{c.setting}`. Variants: "
        + "; ".join(f"*{v}* `{c.variants[v] or 'the setting as it is'}`" for v in groups) + ".",
        f"![{name}]({name}.png)",
        RULE,
        "**Without a fit.** Mean [95 % interval over seeds].",
        run_table(groups, c.pass_rate),
    ]  # fmt: skip
    against = pairs(c, groups)
    text += apart(against, groups, "", c.pass_rate, MEASURED)
    for axis in c.axes:
        shared, said = share_ceiling(results, axis)
        text += [f"**Fits against {fit_sigmoid.UNITS.get(axis, axis)}.** A ceiling that is not identifiable is a "
                 "guess, and so are its B and C_mid; B and C_mid at the shared A are as good as that A.",
                 fit_table(groups, axis, shared),
                 f"`fit_sigmoid.compare` on all runs: {said}.",
                 *apart(against, groups, axis, c.pass_rate, FITTED)]  # fmt: skip
    text += ["**Health of the runs.**", health_table(groups), "**Half a run predicts the other.**",
             extrapolation_text(results)]  # fmt: skip
    return "\n\n".join(text) + "\n"


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
            lines = [(np.array([e[axis] for e in r.evals]), np.array([e["pass_rate"] for e in r.evals])) for r in some]
            for x, y in lines:
                panel.plot(x, y, color=f"C{i % 10}", alpha=0.3, lw=0.8)
            grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
            panel.plot(grid, np.mean([np.interp(grid, x, y) for x, y in lines], 0), color=f"C{i % 10}", lw=2,
                       ls="-" if i < 10 else "--")  # fmt: skip
        panel.set(xlabel=fit_sigmoid.UNITS.get(axis, axis), ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("pass rate on held-out prompts")
    against = pairs(c, groups)
    for i, (variant, some) in enumerate(groups.items()):
        base = groups[against.get(variant, variant)]
        mean, low, high, _ = difference(values(some, "final", "", 0.0), values(base, "final", "", 0.0))
        reach = 0.0 if math.isnan(low) else high - mean
        last.errorbar(mean, i, xerr=reach, color=f"C{i % 10}", marker="o", capsize=3)
    last.set_yticks(range(len(groups)), list(groups), fontsize=8)
    last.invert_yaxis()
    last.axvline(0, color="gray", lw=0.8)
    last.set(xlabel="pass rate at the end minus the baseline's, 95 %")
    figure.savefig(path, dpi=110)


def draw_predictions(results: Sequence[Result], path: Path) -> None:
    """A PNG: each run's last evaluation, predicted from its first half with the 95 % interval, over the measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5), layout="constrained")
    panel = figure.subplots()
    for known, color, label in ((True, "C0", "ceiling identifiable"), (False, "C1", "ceiling not identifiable")):
        ends = [r.half.predictions[0] for r in results if r.half.fit.identifiable == known]
        ends = [end for end in ends if math.isfinite(end.reward)]
        if ends:
            x, y = (np.array([getattr(end, of) for end in ends]) for of in ("measured", "reward"))
            low, high = np.array([end.evaluation for end in ends]).T
            reach = np.clip([y - low, high - y], 0, None)
            panel.errorbar(x, y, yerr=reach, fmt="o", ms=4, lw=0.8, color=color, label=f"{label}: {len(ends)} runs")
    panel.axline((0, 0), slope=1, color="gray", lw=0.8)
    panel.set(xlabel="pass rate at the end, measured", ylabel="predicted from the first half of the run",
              xlim=(0, 1), ylim=(0, 1))  # fmt: skip
    panel.grid(alpha=0.3)
    panel.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)


def write(name: str, c: Comparison, results: Sequence[Result], wanted: Sequence[tuple[str, int]], folder: Path) -> None:
    """FOLDER/NAME.md and its picture, from the finished runs of a comparison; `wanted` as in `report`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(c, results, folder / f"{name}.png")
    _save(report(name, c, results, wanted), folder / f"{name}.md")


def write_predictions(results: Sequence[Result], folder: Path) -> None:
    """FOLDER/predictions.md and its picture, from all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_predictions(results, folder / "predictions.png")
    head = f"# Half a run predicts the other: all {len(results)} runs, each counted once"
    _save(f"{head}\n\n![predictions](predictions.png)\n\n{extrapolation_text(results)}\n", folder / "predictions.md")


def _save(text: str, path: Path) -> None:
    path.write_text(text)
    print(f"{text}\nwritten to {path}, with a picture")
