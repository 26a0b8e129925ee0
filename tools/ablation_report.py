"""The report of `tools/ablate.py`: finished runs are read, fitted and compared (arXiv 2510.13786, 3.2).

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] its 95 % interval over the n seeds, t Student's
quantile with n - 1 degrees of freedom. Distinguishable means that 0 lies outside. Each row has several such intervals
and nothing is corrected for their number: of twenty without any effect, one will look like one.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from comparisons import Comparison

import fit_sigmoid
from runtime.run_folder import Folder

# --------------------------------------------------------------------------------------------------------- the figures


@dataclass
class Result:
    """A finished run, read and fitted. `whole` and `half` are by axis of compute: fits to all and to the first half."""

    variant: str
    seed: int
    evals: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    closing: dict[str, Any]
    float32: bool
    whole: dict[str, fit_sigmoid.CurveReport]
    half: fit_sigmoid.CurveReport
    shared: dict[str, fit_sigmoid.SigmoidFit] = field(default_factory=dict)

    @property
    def final(self) -> float:
        """Pass rate at the end: mean of the last two evaluations."""
        rates = [record["pass_rate"] for record in self.evals[-2:]]
        return sum(rates) / len(rates)

    @property
    def best(self) -> float:
        """Best pass rate of the run: the highest mean of two evaluations in a row."""
        rates = np.array([record["pass_rate"] for record in self.evals])
        return float((rates[1:] + rates[:-1]).max(initial=2 * rates[0]) / 2)

    @property
    def falls(self) -> np.ndarray:
        """(evaluations,): how far each lies below the best before it; 0 at a new best."""
        rates = np.array([record["pass_rate"] for record in self.evals])
        return np.maximum.accumulate(rates) - rates


def read(path: Path, variant: str, seed: int, axes: Sequence[str]) -> Result:
    """Reads the folder of a finished run and fits its evaluations."""
    folder, name = Folder(path), f"{variant} seed {seed}"
    evals, (start, *lines) = folder.read("eval.jsonl"), folder.read("metrics.jsonl")
    steps = [record for record in lines if "step" in record]
    whole = {x: fit_sigmoid.curve(evals, x=x, name=name) for x in axes}
    half = fit_sigmoid.curve(evals, x=axes[0], fit_until=0.5, name=name)
    closing = json.loads((path / "finished.json").read_text())
    float32 = start["config"].get("dtype", "float32") == "float32"
    return Result(variant, seed, evals, steps, closing, float32, whole, half)


def share_ceiling(results: Sequence[Result], axis: str) -> tuple[float | None, str]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `fit_sigmoid.compare`).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, with the verdict beside it.
    """
    fits = [r.whole[axis].fit for r in results]
    if len(fits) < 2:
        return None, "one run: nothing to compare"
    both = fit_sigmoid.compare(*fits, names=[r.whole[axis].name for r in results])
    ceilings = [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]
    A = both.shared_A if both.refits else float(np.mean(ceilings)) if ceilings else None
    if A is not None:
        refits = both.refits or [fit_sigmoid.fit(f.C, f.R, A=A, n_samples=f.n_samples) for f in fits]
        for result, refit in zip(results, refits, strict=True):
            result.shared[axis] = refit
    unknown = sum(not f.identifiable for f in fits)
    return A, f"no verdict: {unknown} of {len(fits)} ceilings are not identifiable" if unknown else both.verdict


def compute_to(evals: Sequence[Mapping[str, Any]], rate: float, axis: str) -> float | None:
    """Compute at which the straight line between evaluations first reaches `rate`; None if no evaluation does."""
    before = None
    for record in evals:
        if record["pass_rate"] >= rate:
            if before is None:
                return float(record[axis])
            share = (rate - before["pass_rate"]) / (record["pass_rate"] - before["pass_rate"])
            return before[axis] + share * (record[axis] - before[axis])
        before = record
    return None


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean over seeds; NaN ends for a single one."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - reach, mean + reach


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float, int]:
    """(mean, low, high, n) of the paired differences over the seeds that both have; NaN and 0 if they share none."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return math.nan, math.nan, math.nan, 0
    return *interval([ours[seed] - theirs[seed] for seed in seeds]), len(seeds)


def verdict(mean: float, low: float, high: float, more: str, less: str) -> str:
    """What an interval of a difference says; THE RULE above."""
    if math.isnan(low):
        return "one seed, so nothing can be said"
    return more if low > 0 else less if high < 0 else "not distinguishable"


def health(result: Result) -> dict[str, Any]:
    """Lag, clipped share, truncation and what a stable run does not show, of one run."""
    steps, evals = result.steps, result.evals

    def over(name: str) -> list[float]:
        return [step[name] for step in steps if name in step]

    def mean(name: str) -> float:
        return float(np.mean(over(name))) if over(name) else math.nan

    found = {
        "truncated above 10 %": sum(step["truncated"] > 0.10 for step in steps),
        "gradient not finite": sum(step.get("updated", 1) == 0 for step in steps),
        "nothing to train on": sum("rows" not in step for step in steps),
        "gap above 1e-4": sum(gap > 1e-4 for gap in over("logprob_gap")) if result.float32 else 0,
    }
    signs = [f"{name} in {count} of {len(steps)} steps" for name, count in found.items() if count]
    low = int((result.falls > 0.1).sum())
    if low:
        signs.append(f"fell by up to {result.falls.max():.2f} ({low} of {len(evals)} evaluations more than .1 below "
                     "the best before)")  # fmt: skip
    return {
        "lag": mean("lag_mean"), "lag_max": max(over("lag_max"), default=0), "ess": mean("ess"),
        "clipped +": mean("capped_positive"), "clipped -": mean("capped_negative"),
        "truncated": mean("truncated"), "truncated_last": evals[-1]["truncated"],
        "interrupted": evals[-1]["interrupted"], "length": evals[-1]["mean_length"],
        "gap": max(over("logprob_gap"), default=math.nan), "signs": signs,
    }  # fmt: skip


def other_predictions(half: fit_sigmoid.CurveReport) -> dict[str, float]:
    """What the last evaluation would be by simpler rules, from the same first half: the pass rate stays as it is (mean
    of the half's last two evaluations), and the power law A - D / C^B, whose A may go up to 1."""
    seen = half.fit_until * (1 + 1e-12) >= half.C
    C, R = half.C[seen], half.R[seen]
    found = {"the pass rate stays": float(R[-2:].mean())}
    if (C > 0).sum() >= 4:  # what a power law needs
        law = fit_sigmoid.power_law(C, R)
        found["power law"] = law["A"] - law["D"] / half.C[-1] ** law["B"]
    return found


def extrapolation(results: Sequence[Result]) -> dict[str, Any]:
    """How well fits to first halves predict second halves: |error| at the end of each run, beside those of the simpler
    rules, and coverage. `not fitted`: runs with too few evaluations in their first half."""
    rows = [r.half for r in results if not math.isnan(r.half.fit.A) and r.half.held_out_points]
    ends = [row.predictions[0] for row in rows]
    points = sum(row.held_out_points for row in rows)
    others: dict[str, list[float]] = {}
    for row, end in zip(rows, ends, strict=True):
        for rule, value in other_predictions(row).items():
            others.setdefault(rule, []).append(abs(value - end.measured))
    return {
        "runs": len(rows), "not fitted": len(results) - len(rows), "others": others, "points": points,
        "errors": [abs(end.reward - end.measured) for end in ends],
        "too high": sum(end.reward > end.measured for end in ends),
        "inside": sum(end.evaluation[0] <= end.measured <= end.evaluation[1] for end in ends),
        "covered": sum(row.held_out_covered * row.held_out_points for row in rows) / max(1, points),
        "rmse": float(np.median([row.held_out_rmse for row in rows])) if rows else math.nan,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the report

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


def values(results: Sequence[Result], measure: str, axis: str, rate: float) -> dict[int, float]:
    """{seed: value} of one variant's runs; runs without that value (no ceiling to speak of, rate not reached) are
    missing. `A known` is A where it is identifiable, `fall` the largest fall of the pass rate below its best before."""
    found: dict[int, float | None] = {}
    for r in results:
        if measure in ("final", "best"):
            found[r.seed] = getattr(r, measure)
        elif measure == "A known":
            found[r.seed] = r.whole[axis].fit.A if r.whole[axis].fit.identifiable else None
        elif measure == "fall":
            found[r.seed] = float(r.falls.max())
        elif measure == "truncated":
            found[r.seed] = health(r)["truncated"]
        elif measure in ("B shared", "C_mid shared"):
            found[r.seed] = getattr(r.shared[axis], measure.split()[0]) if axis in r.shared else None
        elif measure in ("A", "B", "C_mid"):
            found[r.seed] = getattr(r.whole[axis].fit, measure)
        else:
            found[r.seed] = compute_to(r.evals, rate, measure)
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by variant, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.variant, []).append(result)
    return found


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
    against: Mapping[str, str], groups: Mapping[str, Sequence[Result]], axis: str, rate: float,
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
    head = ["from the first half", "runs", "error at the end: median", "90 % quantile", "largest", "too high in",
            "last evaluation inside its 95 % interval", "all held-out evaluations inside", "median RMSE, second half"]

    def errors(found: Sequence[float]) -> list[str]:
        return [f"{v:.3f}" for v in (np.median(found), np.quantile(found, 0.9), max(found))]

    known = [r for r in results if r.half.fit.identifiable]
    unknown = [r for r in results if not r.half.fit.identifiable]
    rows = []
    for name, some in (("ceiling identifiable", known), ("ceiling not identifiable", unknown), ("all", results)):
        e = extrapolation(some)
        n = e["runs"]
        if n:
            rows.append([f"sigmoid, {name}", str(n), *errors(e["errors"]), f"{e['too high']} of {n}",
                         f"{e['inside']} of {n}", f"{e['covered']:.0%} of {e['points']}", f"{e['rmse']:.3f}"])
        else:
            rows.append([f"sigmoid, {name}", "0", *["–"] * 7])
    rows += [[rule, str(len(found)), *errors(found), *["–"] * 4] for rule, found in e["others"].items()]
    failed = e["not fitted"]
    return table(head, rows) + (f"\n\n{failed} runs have too few evaluations in their first half." if failed else "")


def report(
    name: str, c: Comparison, results: Sequence[Result], rate: float, picture: str, wanted: Sequence[tuple[str, int]]
) -> str:
    """The whole report of one comparison, Markdown. `wanted`: (variant, seed) of all its runs."""
    groups = by_variant(results)
    seeds = sorted({r.seed for r in results})
    missing = [f"{v} seed {s}" for v, s in wanted if (v, s) not in {(r.variant, r.seed) for r in results}]
    minutes, dates = sum(r.closing["seconds"] for r in results) / 60, sorted(r.closing["finished"] for r in results)
    text = [
        f"## {name}: {c.about}",
        f"{len(results)} of {len(wanted)} runs finished, seeds {', '.join(map(str, seeds))}; {minutes:.0f} minutes of "
        f"machine time, finished between {dates[0]} and {dates[-1]}; "
        f"{'; '.join(sorted({r.closing['machine'] for r in results}))}."
        + (f" Not finished: {', '.join(missing)}." if missing else ""),
        f"Setting: `{c.setting}`. Variants: "
        + "; ".join(f"*{v}* `{c.variants[v] or 'the setting as it is'}`" for v in groups) + ".",
        f"![{name}]({picture})",
        RULE,
        "**Without a fit.** Mean [95 % interval over seeds].",
        run_table(groups, rate),
    ]  # fmt: skip
    against = pairs(c, groups)
    text += apart(against, groups, "", rate, MEASURED)
    for axis in c.axes:
        shared, said = share_ceiling(results, axis)
        text += [f"**Fits against {fit_sigmoid.UNITS.get(axis, axis)}.** A ceiling that is not identifiable is a "
                 "guess, and so are its B and C_mid; B and C_mid at the shared A are as good as that A.",
                 fit_table(groups, axis, shared),
                 f"`fit_sigmoid.compare` on all runs: {said}.",
                 *apart(against, groups, axis, rate, FITTED)]  # fmt: skip
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
    """A PNG: for every run the last evaluation as its first half predicts it, with the 95 % interval, over the measured
    one."""
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
