"""Does the law hold? Every run is fitted to its first quarter and half, and the fit is held against what came.

The graded task's ceiling is known by construction (tasks/graded.py), so the fitted one can be judged as well. Two
simpler rules see the same points: the pass rate stays as it is, and the power law A - D / C^B.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import EARLY, compute_to, fitted, interval, pooled_sd, seeds_needed
from ablation_report import amount, apart_text, save
from curves import Curve
from fit_curves import power_law
from measuring import table

from fit_sigmoid import CurveReport, SigmoidFit, span, unit_variance
from tasks.graded import CEILING

AXIS = "tokens"
PLATEAU = 8  # evaluations at the end of a run
CUTS = {"a quarter": 0.25, "half": 0.5}  # of a run's compute
CHAIN_FAILS = (
    "**Where the law fails.** The task `chain`, with a budget too short for its longest chains: all short chains are "
    "learned together and the long ones never, so that its curve is a cliff."
)
GREEDY = (
    "**Evaluated with the likeliest token** (`law-greedy`). Training is that of the law's runs; the sampling at "
    "temperature 1 is gone from the evaluations, and with it what keeps a policy below what it has learned. These runs "
    "are in no other table here."
)
RULES = ("sigmoid", "power law", "the pass rate stays")
LEFT_OUT = (0.0, 50e3, 100e3, 150e3, 200e3)  # tokens at the start: other choices of EARLY
EFFECTS = {"A": 0.02, "C_mid": math.log(1.15)}  # differences that a comparison should see; C_mid's of logarithms


def covers(fit: SigmoidFit) -> bool:
    """Whether the interval of A holds the known ceiling."""
    return fit.A_interval[0] <= CEILING <= fit.A_interval[1]


def finds_plateau(fit: SigmoidFit, curve: Curve) -> bool:
    """Whether the interval of A holds the mean of the run's last evaluations."""
    return fit.A_interval[0] <= curve.points["pass_rate"][-PLATEAU:].mean() <= fit.A_interval[1]


def inside(report: CurveReport) -> bool:
    """Whether the last evaluation lies in the 95 % interval that the fit gives an evaluation there."""
    end = report.predictions[0]
    return end.evaluation[0] <= end.measured <= end.evaluation[1]


def noise_ratio(curve: Curve) -> float:
    """RMSE of the fit to the whole run, over the binomial noise of its evaluations."""
    fit = fitted(curve, AXIS).fit
    variance = unit_variance(fit.predict(fit.points.C), fit.points.n_samples)
    return fit.rmse / math.sqrt(np.mean(variance))


@cache
def power_law_end(curve: Curve, share: float) -> float:
    """The power law's prediction of the end; NaN where too few points are there to fit it."""
    half = fitted(curve, AXIS, share)
    C, R = half.fit.points.C, half.fit.points.R
    if (C > 0).sum() < 4:
        return math.nan
    law = power_law(C, R)
    return law["A"] - law["D"] / half.C[-1] ** law["B"]


def error(curve: Curve, share: float, rule: str) -> float:
    """Predicted minus measured at the last evaluation; NaN where the rule has no prediction."""
    report = fitted(curve, AXIS, share)
    end = report.predictions[0]
    predicted = {
        "sigmoid": lambda: end.pass_rate,
        "power law": lambda: power_law_end(curve, share),
        "the pass rate stays": lambda: float(report.fit.points.R[-2:].mean()),
    }[rule]()
    return predicted - end.measured


# ------------------------------------------------------------------------------------------------------------ tables

ROW_HEAD = [
    "run", "A", "B", "C_mid", "RMSE / noise", "measured at the end",
    *(f"from {name}: {what}" for name in CUTS for what in ("predicted", "A")),
    "identifiable ¼ ½ 1", "A holds .80 ¼ ½ 1",
]  # fmt: skip


def marks(found: Sequence[bool]) -> str:
    """yes or no for each."""
    return " ".join("yes" if one else "no" for one in found)


def row(curve: Curve) -> list[str]:
    """One run in ROW_HEAD's columns; a prediction in bold is one whose interval the end left."""
    full, early = fitted(curve, AXIS), [fitted(curve, AXIS, share) for share in CUTS.values()]
    fits = [report.fit for report in (*early, full)]
    cells = [
        f"{curve.variant} {curve.seed}", f"{full.fit.A:.3f} {span(full.fit.A_interval, 3)}", f"{full.fit.B:.2f}",
        amount(full.fit.C_mid), f"{noise_ratio(curve):.2f}", f"{full.predictions[0].measured:.3f}",
    ]  # fmt: skip
    for report in early:
        end, bold = report.predictions[0], "" if inside(report) else "**"
        cells += [f"{bold}{end.pass_rate:.3f} {span(end.evaluation, 3)}{bold}",
                  f"{report.fit.A:.3f} {span(report.fit.A_interval, 3)}"]  # fmt: skip
    return [*cells, marks([fit.identifiable for fit in fits]), marks([covers(fit) for fit in fits])]


SUM_HEAD = ["fitted", "runs", "C_mid seen, median", "end inside its 95 % interval", "median error", "mean error [95 %]",
            "width of the interval, median", "ceiling identifiable", "A holds .80", "A holds the plateau"]  # fmt: skip


def mean_error(errors: Sequence[float]) -> str:
    """`mean [low, high]` over runs."""
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(errors))


def share_of(found: Sequence[bool]) -> str:
    """`18 of 20 (90 %)`."""
    return f"{sum(found)} of {len(found)} ({np.mean(found):.0%})"


def sum_row(name: str, share: float, curves: Sequence[Curve], early: float = EARLY) -> list[str]:
    """All of these runs, fitted to `share` of their compute without the first `early`, in SUM_HEAD's columns."""
    reports = [fitted(curve, AXIS, share, early) for curve in curves]
    seen = [report.fit_until / fitted(curve, AXIS).fit.C_mid for report, curve in zip(reports, curves, strict=True)]
    errors = [report.predictions[0].pass_rate - report.predictions[0].measured for report in reports]
    known = [e for e in errors if math.isfinite(e)]  # a fit to too few points predicts nothing
    fewer = "" if len(known) == len(errors) else f" (of {len(known)})"
    widths = [report.predictions[0].evaluation[1] - report.predictions[0].evaluation[0] for report in reports]
    later = share < 1  # at the end there is nothing left to predict
    return [
        name, str(len(curves)), f"{np.median(seen):.1f}", share_of([inside(r) for r in reports]) if later else "–",
        f"{np.median(np.abs(known)):.3f}{fewer}" if later and known else "–",
        mean_error(known) if later and known else "–",
        f"{np.median(widths):.3f}" if later else "–", share_of([r.fit.identifiable for r in reports]),
        share_of([covers(r.fit) for r in reports]) if curves[0].flags.get("dataset") == "graded" else "–",
        share_of([finds_plateau(report.fit, curve) for report, curve in zip(reports, curves, strict=True)]),
    ]  # fmt: skip


def is_long(curve: Curve) -> bool:
    """Half of the run is at least 3 C_mid, as the paper's fits saw it."""
    half = fitted(curve, AXIS, 0.5)
    return bool(half.fit_until >= 3 * fitted(curve, AXIS).fit.C_mid)


def rules_table(curves: Sequence[Curve]) -> str:
    """The sigmoid against simpler rules, on the same points."""
    rows = []
    for name, share in CUTS.items():
        for rule in RULES:
            errors = [e for curve in curves if math.isfinite(e := error(curve, share, rule))]
            if errors:
                rows.append([name, rule, str(len(errors)), f"{np.median(np.abs(errors)):.3f}",
                             f"{np.max(np.abs(errors)):.3f}", mean_error(errors)])  # fmt: skip
    return table(["fitted", "rule", "runs", "median error", "largest", "mean error [95 %]"], rows)


def left_out_table(curves: Sequence[Curve]) -> str:
    """The same fits with more or less of the start left out."""
    rows = [
        [amount(early) if early else "nothing", *sum_row(name, share, curves, early)]
        for early in LEFT_OUT
        for name, share in (CUTS | {"all of it": 1.0}).items()
    ]
    return table(["tokens left out", *SUM_HEAD], rows)


def power_table(groups: Mapping[str, Sequence[Curve]]) -> str:
    """How many seeds see EFFECTS, from the spread of the first variant's runs and of the pairs with it."""
    rows, (first, *others) = [], list(groups)
    for measure, effect in EFFECTS.items():
        found = {name: {c.seed: getattr(fitted(c, AXIS).fit, measure) for c in some} for name, some in groups.items()}
        if measure == "C_mid":
            found = {name: {seed: math.log(v) for seed, v in some.items()} for name, some in found.items()}
        base = found[first]
        alone = pooled_sd([list(base.values())])
        apart = pooled_sd([[found[v][s] - base[s] for s in found[v].keys() & base.keys()] for v in others])
        for kind, sd, paired in (("two groups of seeds", alone, False), ("the same seeds in both", apart, True)):
            needed = str(seeds_needed(effect, sd, paired)) if sd > 0 else "–"
            shown = apart_text(effect, True) if measure == "C_mid" else f"{effect:g}"
            rows.append([f"{measure}, a difference of {shown}", kind, amount(sd), needed])
    return table(["what is to be seen", "design", "standard deviation", "seeds of each"], rows)


def engines_table(torch: Sequence[Curve], vllm: Sequence[Curve], rate: float = 0.5) -> str:
    """The same flags and seeds with two engines, as far as the shorter of two runs goes; "" if no seed has both.
    Differences are vLLM minus torch, paired by seed; those of compute are percent."""
    pairs = [(one, other) for one in torch for other in vllm if one.seed == other.seed]
    if not pairs:
        return ""
    ends = {pair: min(curve.points[AXIS][-1] for curve in pair) for pair in pairs}

    def until(curve: Curve, end: float) -> SigmoidFit:
        return fitted(curve, AXIS, end / curve.points[AXIS][-1]).fit

    measures: dict[str, tuple[bool, Callable[[Curve, float], float]]] = {  # name -> (of compute, its value)
        "A": (False, lambda curve, end: until(curve, end).A),
        "C_mid": (True, lambda curve, end: until(curve, end).C_mid),
        f"tokens to {rate:g}": (True, lambda curve, end: compute_to(curve.evals(), rate, AXIS)),
        "pass rate at the end": (False, lambda c, end: float(np.interp(end, c.points[AXIS], c.points["pass_rate"]))),
    }
    rows = []
    for name, (of_compute, value) in measures.items():
        found = np.array([[value(curve, ends[pair]) for curve in pair] for pair in pairs])  # (seeds, 2)
        apart = np.diff(np.log(found) if of_compute else found)[:, 0]
        mean, low, high = (apart_text(x, of_compute) for x in interval(apart))
        rows.append([name, *map(amount, found.mean(0)), f"{mean} [{low}, {high}]"])
    return table([f"{len(pairs)} seeds, to {amount(min(ends.values()))} tokens", "torch", "vLLM", "apart [95 %]"], rows)


def summary(curves: Sequence[Curve]) -> str:
    """How well the law held over these runs."""
    ratios = [noise_ratio(curve) for curve in curves]
    sums = [sum_row(name, share, curves) for name, share in (CUTS | {"all of it": 1.0}).items()]
    return "\n\n".join([
        f"{len(curves)} runs of the graded task, whose ceiling is {CEILING:g} by construction. Errors are predicted "
        f"minus measured pass rate at the last evaluation. The plateau is the mean of a run's last {PLATEAU} "
        "evaluations.",
        table(SUM_HEAD, sums),
        f"RMSE of the fit to a whole run over the binomial noise of its evaluations: median {np.median(ratios):.2f}, "
        f"largest {max(ratios):.2f}; at most 1.3 in {share_of([ratio <= 1.3 for ratio in ratios])}.",
    ])  # fmt: skip


def page(
    groups: Mapping[str, Sequence[Curve]],
    others: Mapping[str, Sequence[Curve]],
    chain: Sequence[Curve],
    greedy: Sequence[Curve],
    left_out: Sequence[str],
) -> str:
    """Markdown. `groups`: the comparison's runs by variant; `others`: the runs of other comparisons, by comparison;
    `chain`: runs of the task on which the law fails; `greedy`: runs whose evaluations took the likeliest token."""
    curves = [curve for some in groups.values() for curve in some]
    text = [
        "# The law: half a run predicts the other half",
        "Seeds: " + "; ".join(f"{name} {', '.join(str(c.seed) for c in some)}" for name, some in groups.items()) + "."
        + (f" Left out: {', '.join(left_out)}." if left_out else ""),
        "![law](law.png)",
        summary(curves),
        "**Simpler rules** on the same points. What stays is the mean of the last two evaluations.",
        rules_table(curves),
        "**Each run.** Compute in sampled tokens; in bold a prediction whose interval the end left.",
        table(ROW_HEAD, [row(curve) for curve in curves]),
        f"**What is left out at the start** is {amount(EARLY)} tokens in all other tables. The same fits without more "
        "or less of it:",
        left_out_table(curves),
        "**How many seeds a comparison needs** to see a difference in four of five cases, at 5 %, two-sided (Student's "
        "t). The spread is that of the first variant over its seeds, and that of the paired differences to it.",
        power_table(groups),
    ]  # fmt: skip
    on_vllm = [curve for curve in others.get("schedules", ()) if curve.variant == "pipeline-8"]
    if engines := engines_table(next(iter(groups.values())), on_vllm):
        text += ["**The same seeds with both engines.** The baseline of `law`, and that of `schedules`.", engines]
    if greedy:
        rows = [sum_row(name, share, greedy) for name, share in (CUTS | {"all of it": 1.0}).items()]
        text += [GREEDY, table(SUM_HEAD, rows)]
    if others:
        rows = [sum_row(name, 0.5, some) for name, some in others.items()]
        text += ["**The other comparisons, fitted to half.** Each run is counted once; runs on half of the problems "
                 "(`--difficulty`), which have other ceilings, are left out. They hold variants that were "
                 "made to be worse, so nothing is promised for them.",
                 table(["comparison", *SUM_HEAD[1:]], rows)]  # fmt: skip
        long = [curve for curve in (*curves, *(c for some in others.values() for c in some)) if is_long(curve)]
        rows = [sum_row(name, share, long) for name, share in (CUTS | {"all of it": 1.0}).items()] if long else []
        text += ["**All of these runs whose first half is at least 3 C_mid** of the fit to the whole run:",
                 table(SUM_HEAD, rows)]  # fmt: skip
    if chain:
        rows = [sum_row(name, share, chain) for name, share in CUTS.items()]
        text += [CHAIN_FAILS, table(SUM_HEAD, rows)]
    return "\n\n".join(text) + "\n"


def draw_halves(axes: Any, curves: Sequence[Curve]) -> None:
    """Runs, the fit to the first half of each, its band for the rest, and what came (hollow)."""
    for i, curve in enumerate(curves):
        half, color = fitted(curve, AXIS, 0.5), f"C{i}"
        seen = half.fit_until >= half.C
        axes.plot(half.C[seen], half.R[seen], "o", color=color, ms=4, label=f"{curve.variant} {curve.seed}")
        axes.plot(half.C[~seen], half.R[~seen], "o", color=color, mfc="white", ms=4)
        for start, stop, style in ((0, half.fit_until, "-"), (half.fit_until, half.C[-1], "--")):
            axes.plot(grid := np.linspace(start, stop, 100), half.fit.predict(grid), style, color=color)
        axes.fill_between(grid, *half.fit.interval(grid, noise=True), color=color, alpha=0.12, lw=0)
    axes.set(xlabel="sampled tokens", ylabel="pass rate on held-out prompts", ylim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: amount(value))


def draw(groups: Mapping[str, Sequence[Curve]], chain: Sequence[Curve], path: Path, shown: int = 3) -> None:
    """A PNG. Left: the first runs. Middle: those of the task on which the law fails. Right: the end of each run of
    `groups`, predicted with its interval, and measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17 if chain else 12, 4.6), layout="constrained")
    left, *middle, right = figure.subplots(1, 3 if chain else 2, width_ratios=(1.5, 1.5, 1) if chain else (1.5, 1))
    draw_halves(left, next(iter(groups.values()))[:shown])
    left.axhline(CEILING, color="gray", ls=":", label=f"the ceiling, {CEILING:g} by construction")
    left.set_title("graded: problems differ in how soon they are learned", fontsize=9)
    if chain:
        draw_halves(middle[0], chain[:shown])
        middle[0].set_title("chain: short chains are learned at once, the longest never", fontsize=9)
    y, names = 0, []
    for i, some in enumerate(groups.values()):
        for curve in some:
            end = fitted(curve, AXIS, 0.5).predictions[0]
            right.plot(end.evaluation, (y, y), color=f"C{i}", lw=1)
            right.plot(end.pass_rate, y, "o", color=f"C{i}", ms=4)
            right.plot(end.measured, y, "o", color="black", mfc="white", ms=4)
            names, y = [*names, f"{curve.variant} {curve.seed}"], y + 1
    right.set_yticks(range(y), names, fontsize=6)
    right.invert_yaxis()
    right.axvline(CEILING, color="gray", ls=":")
    right.set_xlabel("end: predicted from half, measured (hollow)")
    for panel in (left, *middle, right):
        panel.grid(alpha=0.3)
    for panel in (left, *middle):
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def write(groups: Mapping[str, Sequence[Curve]], others: Mapping[str, Sequence[Curve]], chain: Sequence[Curve],
          greedy: Sequence[Curve], left_out: Sequence[str], folder: Path) -> None:  # fmt: skip
    """FOLDER/law.* from finished runs; the arguments as in `page`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(groups, chain, folder / "law.png")
    save(page(groups, others, chain, greedy, left_out), (folder / "law").with_suffix(".md"))
