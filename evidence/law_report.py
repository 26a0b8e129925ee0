"""Does the law hold? Every run is fitted to its beginning, and the fit is held against what came. `forecasts.py` has
the numbers. And what the effective sample size announced of a run's fall.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from curves import Evaluations
from figures import FALL, Groups, Row, by_outcome, fall_of, first, fitted, interval, needed, pooled_sd, seeds_needed
from forecasts import AXIS, PLATEAU, RULES, cut_at, error, forecast, holds, is_long, noise_ratio, plateau, reach_of
from report import amount, difference_text, table

from fit_sigmoid import SigmoidFit, span
from tasks.arithmetic import CEILING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CUTS = {"a quarter": 0.25, "half": 0.5}  # of a run's compute
FITTED = CUTS | {"all of it": 1.0}
LEVELS = {"ess": (0.9, 0.8, 0.7), "truncated": (0.05, 0.1)}  # an alarm below, and above
REACHES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)  # C_mid
CHAIN_FAILS = (
    "**Where the law fails.** The task `chain`, with a budget too short for its longest chains: all short chains are "
    "learned together and the long ones never, so that its curve is a cliff."
)
GREEDY = (
    "**Evaluated with the likeliest token** (`law-greedy`). Training is that of the law's runs; the sampling at "
    "temperature 1 is gone from the evaluations, and with it what keeps a policy below what it has learned."
)
INTERVALS = (
    "The 95 % interval of an evaluation is where the fit expects one that is still to come, with its sampling noise; "
    "that of the curve is without the noise. A's interval is for the ceiling, over all forms of the tail."
)
EFFECTS = {"A": 0.02, "C_mid": math.log(1.15)}  # differences that a comparison should see; C_mid's of logarithms

REACH_HEAD = (
    "data reach|runs|evaluation at twice the compute inside|A holds the plateau|width at twice the compute: curve|"
    "width: A|identifiable (of these A misses the plateau)|ask again within 1.5 times of what was needed"
).split("|")


def reach_table(curves: Sequence[Evaluations]) -> str:
    """All of these runs by how far the data reach, in C_mid as measured."""
    rows = []
    for reach in REACHES:
        cuts = [cut for curve in curves if (cut := cut_at(curve, reach))]
        if not cuts:
            continue
        known, again = [cut for cut in cuts if cut.identifiable], [c.again for c in cuts if not math.isnan(c.again)]
        widths = np.median([(np.ptp(cut.twice.curve), cut.width) for cut in cuts], axis=0)
        held = share_of([cut.twice.inside for cut in cuts]), share_of([cut.holds for cut in cuts])
        identifiable = f"{len(known) / len(cuts):.0%} ({sum(not cut.holds for cut in known)} of {len(known)})"
        near = f"{np.mean(np.abs(np.log(again)) <= math.log(1.5)):.0%} ({len(again)})" if again else "–"
        rows.append([f"{reach:g} C_mid", len(cuts), *held, *(f"{width:.3f}" for width in widths), identifiable, near])
    return table(REACH_HEAD, rows)


def by_reach(curves: Sequence[Evaluations]) -> str:
    """The table and its rule, for runs of every comparison, with the names of those left out."""
    kept, *left_out = by_outcome(curves).values()
    falls, never = (", ".join(curve.run for curve in some) or "none" for some in left_out)
    return "\n\n".join(
        [
            f"{len(kept)} runs of the graded task, each fitted up to so many C_mid, where C_mid is measured without a "
            "fit: the compute at half of the gain from the first evaluation to the plateau. A run counts where it was "
            "evaluated at twice the compute. Widths are medians. *Ask again*: of fits that are not identifiable, the "
            "compute that they say over that from which on the run's fits are (in brackets how many; runs that never "
            "are do not count).",
            reach_table(kept),
            f"Left out: {len(left_out[0])} runs that fall, which is an evaluation more than {FALL:g} below the best "
            f"before it ({falls}), and {len(left_out[1])} that never gain more than {FALL:g} ({never}).",
        ]
    )


# ------------------------------------------------------------------------------------------------------------ tables

ROW_HEAD = ["run", "A of all of it", *(f"predicted from {name}" for name in CUTS), "measured at the end"]


def row(curve: Evaluations) -> Row:
    """One run in ROW_HEAD's columns; a prediction in bold is one whose interval the end left."""
    full, cells = fitted(curve, AXIS), []
    for end in (forecast(curve, share) for share in CUTS.values()):
        bold = "" if end.inside else "**"
        cells.append(f"{bold}{end.best:.3f} {span(end.evaluation, 3)}{bold}")
    name = f"{curve.variant} {curve.seed}"
    return [name, f"{full.A:.3f} {span(full.A_interval, 3)}", *cells, f"{curve.rates[-1]:.3f}"]


SUM_HEAD = (
    "fitted|runs|C_mid seen, median|end inside its 95 % interval|mean error [95 %]|width of the interval, median|"
    "ceiling identifiable|A holds .80|A holds the plateau"
).split("|")


def mean_error(errors: Sequence[float]) -> str:
    """`mean [low, high]` over runs."""
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(errors))


def share_of(found: Sequence[bool]) -> str:
    """`18 of 20`."""
    return f"{sum(found)} of {len(found)}"


def sum_row(name: str, share: float, curves: Sequence[Evaluations]) -> Row:
    """All of these runs, fitted to `share` of their compute, in SUM_HEAD's columns."""
    fits, ends = [fitted(curve, AXIS, share) for curve in curves], [forecast(curve, share) for curve in curves]
    reached = [far for curve in curves if not math.isnan(far := reach_of(curve, share))]
    forecasts = ["–"] * 3  # at the end there is nothing left to predict
    if share < 1:
        known = [end.error for end in ends if math.isfinite(end.error)]  # a fit to too few points predicts nothing
        width = f"{np.median([np.ptp(end.evaluation) for end in ends]):.3f}"
        forecasts = [share_of([end.inside for end in ends]), mean_error(known) if known else "–", width]
    return [
        name,
        str(len(curves)),
        f"{np.median(reached):.1f}" if reached else "–",
        *forecasts,
        share_of([fit.identifiable for fit in fits]),
        share_of([holds(fit, CEILING) for fit in fits]) if curves[0].flags.get("dataset") == "graded" else "–",
        share_of([holds(fit, plateau(curve)) for fit, curve in zip(fits, curves, strict=True)]),
    ]


def sum_table(curves: Sequence[Evaluations], cuts: Mapping[str, float] = FITTED) -> str:
    """All of these runs, one row a share of their compute."""
    return table(SUM_HEAD, [sum_row(name, share, curves) for name, share in cuts.items()] if curves else [])


def rules_table(curves: Sequence[Evaluations]) -> str:
    """The sigmoid against simpler rules, on the same points."""
    rows = []
    for name, share in CUTS.items():
        for rule in RULES:
            errors = [e for curve in curves if math.isfinite(e := error(curve, share, rule))]
            if errors:
                rows.append([name, rule, str(len(errors)), mean_error(errors)])
    return table(["fitted", "rule", "runs", "mean error [95 %]"], rows)


def power_table(groups: Groups) -> str:
    """How many seeds see EFFECTS, from the spread of the first variant's runs and of the pairs with it."""
    rows = []
    for measure, effect in EFFECTS.items():
        found = pd.DataFrame(
            {name: {c.seed: getattr(fitted(c, AXIS), measure) for c in some} for name, some in groups.items()}
        )  # (seeds, variants)
        found = np.log(found) if measure == "C_mid" else found
        base, *others = (found[name] for name in groups)
        alone, apart = pooled_sd([base.dropna()]), pooled_sd([(other - base).dropna() for other in others])
        shown = difference_text(effect, True) if measure == "C_mid" else f"{effect:g}"
        for kind, sd, paired in (("two groups of seeds", alone, False), ("the same seeds in both", apart, True)):
            count = str(seeds_needed(effect, sd, paired)) if sd > 0 else "–"
            rows.append([f"{measure}, a difference of {shown}", kind, amount(sd), count])
    return table(["what is to be seen", "design", "standard deviation", "seeds of each"], rows)


def engines_table(torch: Sequence[Evaluations], vllm: Sequence[Evaluations], rate: float = 0.5) -> str:
    """The same flags and seeds with two engines, as far as the shorter of two runs goes; "" if no seed has both.
    Differences are vLLM minus torch, paired by seed; those of compute are percent."""
    pairs = [(one, other) for one in torch for other in vllm if one.seed == other.seed]
    if not pairs:
        return ""
    ends = [min(curve.points[AXIS][-1] for curve in pair) for pair in pairs]

    def until(curve: Evaluations, end: float) -> SigmoidFit:
        return fitted(curve, AXIS, end / curve.points[AXIS][-1])

    measures: dict[str, tuple[bool, Callable[[Evaluations, float], float]]] = {  # name -> (of compute, its value)
        "A": (False, lambda curve, end: until(curve, end).A),
        "C_mid": (True, lambda curve, end: until(curve, end).C_mid),
        f"tokens to {rate:g}": (True, lambda curve, end: needed(curve, rate, AXIS)),
        "pass rate at the end": (False, lambda curve, end: float(np.interp(end, curve.points[AXIS], curve.rates))),
    }
    rows = []
    for name, (of_compute, value) in measures.items():
        found = np.array([[value(curve, end) for curve in pair] for pair, end in zip(pairs, ends, strict=True)])
        apart = np.diff(np.log(found) if of_compute else found)[:, 0]  # found is (seeds, 2)
        mean, low, high = (difference_text(x, of_compute) for x in interval(apart))
        rows.append([name, *map(amount, found.mean(0)), f"{mean} [{low}, {high}]"])
    return table([f"{len(pairs)} seeds, to {amount(min(ends))} tokens", "torch", "vLLM", "apart [95 %]"], rows)


def summary(curves: Sequence[Evaluations]) -> str:
    """How well the law held over these runs."""
    ratios = [noise_ratio(curve) for curve in curves]
    return "\n\n".join(
        [
            f"{len(curves)} runs of the graded task, whose ceiling is {CEILING:g} by construction. Errors are "
            "predicted minus measured pass rate at the last evaluation. The plateau is the mean of a run's last "
            f"{PLATEAU} evaluations.",
            sum_table(curves),
            f"RMSE of the fit to a whole run over the binomial noise of its evaluations: median {np.median(ratios):.2f}"
            f", largest {max(ratios):.2f}; at most 1.3 in {share_of([ratio <= 1.3 for ratio in ratios])}.",
        ]
    )


def page(
    groups: Groups,
    left_out: Sequence[str],
    others: Sequence[Evaluations],
    chain: Sequence[Evaluations],
    greedy: Sequence[Evaluations],
    every: Sequence[Evaluations],
) -> str:
    """Markdown. `groups`: finished runs of the comparison `law`, by variant; `others`: of the other comparisons;
    `chain`: of the task on which the law fails; `greedy`: evaluated with the likeliest token; `every`: of the graded
    task."""
    curves = [curve for some in groups.values() for curve in some]
    seeds = "; ".join(f"{name} {', '.join(str(c.seed) for c in some)}" for name, some in groups.items())
    text = [
        "# The law: half a run predicts the other half",
        f"Seeds: {seeds}." + (f" Left out: {', '.join(left_out)}." if left_out else ""),
        "![law](law.png)",
        summary(curves),
        INTERVALS,
        "**How far the data reach.** " + by_reach(every),
        "**Simpler rules** on the same points. What stays is the mean of the last two evaluations.",
        rules_table(curves),
        "**Each run.** In bold a prediction whose interval the end left.",
        table(ROW_HEAD, [row(curve) for curve in curves]),
        "**How many seeds a comparison needs** to see a difference in four of five cases, at 5 %, two-sided (Student's "
        "t). The spread is that of the first variant over its seeds, and that of the paired differences to it.",
        power_table(groups),
    ]
    on_vllm = [curve for curve in others if (curve.comparison, curve.variant) == ("schedules", "pipeline-8")]
    if engines := engines_table(next(iter(groups.values())), on_vllm):
        text += ["**The same seeds with both engines.** The baseline of `law`, and that of `schedules`.", engines]
    if greedy:
        text += [GREEDY, sum_table(greedy)]
    if others:
        long = [curve for curve in (*curves, *others) if is_long(curve)]
        text += [
            "**All runs whose first half is at least 3 C_mid**, of every comparison, each counted once. Those on half "
            "of the problems (`--difficulty`), which have other ceilings, are left out. There are variants among them "
            "that were made to be worse, so nothing is promised for them.",
            sum_table(long),
        ]
    if chain:
        text += [CHAIN_FAILS, sum_table(chain, CUTS)]
    return "\n\n".join(text) + "\n"


# ------------------------------------------------------------------------------------------------ what the logs know


def alarm_row(stand: Sequence[Evaluations], fall: Sequence[Evaluations], name: str, level: float) -> Row:
    """Announced falls, lead and false alarms of an `ess` below a level, or of a share `truncated` above one."""

    def alarm(run: Evaluations) -> int | None:
        return first(run.points[name] < level if name == "ess" else run.points[name] > level)

    leads = [fall_of(run) - at for run in fall if (at := alarm(run)) is not None and at < fall_of(run)]
    lead = f"{np.median(leads):g} ({min(leads)} to {max(leads)})" if leads else "–"
    what = f"ESS below {level:g}" if name == "ess" else f"truncated above {level:.0%}"
    return [what, f"{len(leads)} of {len(fall)}", lead, share_of([alarm(run) is not None for run in stand])]


def logs_page(runs: Sequence[Evaluations]) -> str:
    """Did the effective sample size announce a fall, and how often for nothing? Markdown."""
    stand, fall, never = by_outcome(runs).values()
    falling, dead = (", ".join(f"{run.run} ({fall_of(run)})" for run in fall), ", ".join(run.run for run in never))
    text = [
        "# What the logs already know",
        f"{len(fall)} of {len(stand) + len(fall)} runs fall: an evaluation lies more than {FALL:g} below the best "
        + (f"before it (in brackets its number): {falling}." if fall else "before it.")
        + (f" Left out are {len(never)} runs that never gain more than {FALL:g}: {dead}." if never else "")
        + " Runs on half of the problems (`--difficulty`) are not looked at.",
        "An alarm is an effective sample size (ESS) below a level, or a share of truncated completions above one, as a "
        "mean over the steps since the evaluation before. One before the fall announces it, and its lead is the number "
        "of evaluations between them. One in a run that never falls is a false alarm. The levels of the ESS were "
        "chosen after a look at these runs, so the next ones will be announced less well. Those of truncation are the "
        "paper's: where thinking is interrupted, it announces nothing.",
        table(
            ["alarm", "falls announced", "lead, median (range)", "false alarms"],
            [alarm_row(stand, fall, name, level) for name, levels in LEVELS.items() for level in levels],
        ),
    ]
    return "\n\n".join(text) + "\n"


# ----------------------------------------------------------------------------------------------------- the picture


def draw_halves(axes: "Axes", curves: Sequence[Evaluations]) -> None:
    """Runs, the fit to the first half of each, its band for the rest, and what came (hollow)."""
    for i, curve in enumerate(curves):
        half, C, color = fitted(curve, AXIS, 0.5), curve.points[AXIS], f"C{i}"
        seen, last = half.C[-1] >= C, half.C[-1]
        axes.plot(C[seen], curve.rates[seen], "o", color=color, ms=4, label=f"{curve.variant} {curve.seed}")
        axes.plot(C[~seen], curve.rates[~seen], "o", color=color, mfc="white", ms=4)
        for start, stop, style in ((0, last, "-"), (last, C[-1], "--")):
            axes.plot(grid := np.linspace(start, stop, 100), half.predict(grid, half.form), style, color=color)
        axes.fill_between(grid, *half.interval(grid, noise=True), color=color, alpha=0.12, lw=0)
    axes.set(xlabel="sampled tokens", ylabel="pass rate on held-out prompts", ylim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: amount(value))


def picture(groups: Groups, chain: Sequence[Evaluations]) -> "Figure":
    """Left: the first runs. Middle: those of the task on which the law fails. Right: the end of each run of `groups`,
    predicted with its interval, and measured."""
    from matplotlib.figure import Figure

    shown = 3
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
            end = forecast(curve, 0.5)
            right.plot(end.evaluation, (y, y), color=f"C{i}", lw=1)
            right.plot(end.best, y, "o", color=f"C{i}", ms=4)
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
    return figure
