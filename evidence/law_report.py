"""Does the law hold? Every run is fitted to its beginning, and the fit is held against what came. `forecasts.py` has
the numbers. And what the effective sample size announced of a run's fall.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from curves import Evaluations
from figures import FALL, Groups, Row, by_outcome, fall_of, first, fitted, interval, needed, pooled_sd, seeds_needed
from forecasts import AXIS, PLATEAU, cut_at, errors, forecast, holds, noise_ratio, plateau, reach_of
from report import amount, difference_text, joined, share_of, table, told_apart

from tasks.arithmetic import CEILING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CUTS = {"a quarter": 0.25, "half": 0.5}  # of a run's compute
FITTED = CUTS | {"all of it": 1.0}
LEVELS = {"ess": (0.9, 0.8, 0.7), "truncated": (0.05, 0.1)}  # an alarm below, and above
REACHES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)  # C_mid
ABOUT = (
    "Intervals are those of an evaluation that is still to come, with its sampling noise; A's is for the ceiling, over "
    "all forms of the tail. *law*: the runs of [RESULTS.md](../../RESULTS.md#half-a-run-predicts-the-other-half). "
    "*law-greedy*: evaluated with the likeliest token, so that no sampling keeps a policy below what it has learned. "
    "*3 C_mid*: runs of every comparison whose first half is at least 3 C_mid, but for those on half of the problems "
    "(`--difficulty`), which have other ceilings. Some were made to be worse, so nothing is promised for them. "
    "*chain*: the task on which the law fails."
)
REACHED = (
    "runs of the graded task, each fitted up to so many C_mid, where C_mid is measured without a fit: the compute at "
    "half of the gain from the first evaluation to the plateau. A run counts where it was evaluated at twice the "
    "compute; *inside* says in how many that evaluation lies in its interval, *A holds* in how many A's holds the "
    "plateau. Widths are medians, of the curve's interval at twice the compute and of A's. *Ask again*: of fits that "
    "are not identifiable, in runs that later are (in brackets), how many named the compute needed to within 1.5 times."
)
EFFECTS = {"A": 0.02, "C_mid": math.log(1.15)}  # differences that a comparison should see; C_mid's of logarithms

# ------------------------------------------------------------------------------------------------------------ tables


SUM_HEAD = (
    "fitted|runs|C_mid seen, median|end inside its 95 % interval|mean error [95 %]|width of the interval, median|"
    "ceiling identifiable|A holds .80|A holds the plateau"
).split("|")
REACH_HEAD = "data reach|runs|inside|A holds|width|A's width|identifiable (A misses the plateau)|ask again".split("|")


def mean_error(values: Sequence[float]) -> str:
    """`mean [low, high]` over the runs that have a prediction."""
    known = [value for value in values if math.isfinite(value)]
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(known)) if known else "–"


def sum_row(name: str, share: float, runs: Sequence[Evaluations]) -> Row:
    """All of these runs, fitted to `share` of their compute, in SUM_HEAD's columns."""
    fits, ends = [fitted(run, AXIS, share) for run in runs], [forecast(run, share) for run in runs]
    reach = pd.Series([reach_of(run, share) for run in runs]).median()
    width = np.median([np.ptp(end.evaluation) for end in ends])
    predicted = [share_of([end.inside for end in ends]), mean_error([end.error for end in ends]), f"{width:.3f}"]
    known = runs[0].flags.get("dataset") == "graded"
    return [
        name,
        str(len(runs)),
        f"{reach:.1f}",
        *(predicted if share < 1 else ["–"] * 3),  # at the end there is nothing left to predict
        share_of([fit.identifiable for fit in fits]),
        share_of([holds(fit, CEILING) for fit in fits]) if known else "–",
        share_of([holds(fit, plateau(run)) for fit, run in zip(fits, runs, strict=True)]),
    ]


def sum_rows(runs: Sequence[Evaluations], cuts: Mapping[str, float] = FITTED, about: str = "") -> list[Row]:
    """All of these runs, one row a share of their compute."""
    return [sum_row(about + name, share, runs) for name, share in cuts.items()] if runs else []


def reach_table(runs: Sequence[Evaluations]) -> str:
    """All of these runs by how far the data reach, in C_mid as measured."""
    rows = []
    for reach, cuts in pd.DataFrame([cut for r in REACHES for run in runs if (cut := cut_at(run, r))]).groupby("reach"):
        known, again = cuts[cuts["identifiable"]], cuts["again"].dropna()
        widths = [f"{width:.3f}" for width in cuts[["width", "width of A"]].median()]
        identifiable = f"{cuts['identifiable'].mean():.0%} ({share_of(~known['A holds'])})"
        near = f"{(np.log(again).abs() <= math.log(1.5)).mean():.0%} ({len(again)})" if len(again) else "–"
        held = cuts["inside"].sum(), cuts["A holds"].sum()
        rows.append([f"{reach:g} C_mid", len(cuts), *held, *widths, identifiable, near])
    return table(REACH_HEAD, rows)


def by_comparison(runs: Sequence[Evaluations]) -> str:
    """`3 (schedules 2, sizes 1)`."""
    counts = Counter(run.comparison for run in runs).most_common()
    return str(len(runs)) + f" ({', '.join(f'{name} {n}' for name, n in counts)})" * bool(runs)


def by_reach(runs: Sequence[Evaluations]) -> str:
    """The table and its rule, for runs of every comparison, with how many are left out."""
    stand, fall, never = by_outcome(runs).values()
    out = f"Left out: {by_comparison(fall)} that fall and {by_comparison(never)} that never rise."
    return f"**How far the data reach.** {len(stand)} {REACHED} {out}\n\n{reach_table(stand)}"


def rules_table(runs: Sequence[Evaluations]) -> str:
    """The sigmoid against simpler rules, on the same points."""
    rows = []
    for name, share in CUTS.items():
        found = pd.DataFrame([errors(run, share) for run in runs])
        for rule in found:
            known = found[rule].dropna()
            rows.append([name, rule, len(known), difference_text(interval(known)), f"{known.abs().median():.3f}"])
    return told_apart(["fitted", "rule", "runs", "mean error", "median miss"], rows)


def power_table(groups: Groups) -> str:
    """How many seeds see EFFECTS, from the spread of the first variant's runs and of the pairs with it."""
    rows = []
    for measure, effect in EFFECTS.items():
        found = pd.DataFrame(
            {name: {run.seed: getattr(fitted(run, AXIS), measure) for run in some} for name, some in groups.items()}
        )  # (seeds, variants)
        found = np.log(found) if measure == "C_mid" else found
        base, *others = (found[name] for name in groups)
        alone, apart = pooled_sd([base.dropna()]), pooled_sd([(other - base).dropna() for other in others])
        shown = difference_text([effect], relative=True) if measure == "C_mid" else f"{effect:g}"
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
    ends, values, rows = [], [], []  # values: (seeds, 2, measures)
    for pair in pairs:
        ends.append(end := min(run.points[AXIS][-1] for run in pair))
        fits = [fitted(run, AXIS, end / run.points[AXIS][-1]) for run in pair]
        last = [np.interp(end, run.points[AXIS], run.rates) for run in pair]
        values.append([(f.A, f.C_mid, needed(run, rate, AXIS), R) for f, run, R in zip(fits, pair, last, strict=True)])
    for i, name in enumerate(("A", "C_mid", f"tokens to {rate:g}", "pass rate at the end")):
        found, of_compute = np.array(values)[:, :, i], i in (1, 2)
        apart = np.diff(np.log(found) if of_compute else found)[:, 0]
        rows.append([name, *map(amount, found.mean(0)), difference_text(interval(apart), relative=of_compute)])
    return table([f"{len(pairs)} seeds, to {amount(min(ends))} tokens", "torch", "vLLM", "apart [95 %]"], rows)


# ---------------------------------------------------------------------------------------------------------- the page


def summary(runs: Sequence[Evaluations]) -> str:
    """How well the law held over these runs."""
    ratios = [noise_ratio(run) for run in runs]
    return "\n\n".join(
        [
            f"{len(runs)} runs of the graded task, whose ceiling is {CEILING:g} by construction. Errors are "
            "predicted minus measured pass rate at the last evaluation. The plateau is the mean of a run's last "
            f"{PLATEAU} evaluations.",
            table(SUM_HEAD, sum_rows(runs)),
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
    runs = [run for some in groups.values() for run in some]
    on_vllm = [run for run in others if (run.comparison, run.variant) == ("schedules", "pipeline-8")]
    engines = engines_table(next(iter(groups.values())), on_vllm)
    long = [run for run in (*runs, *others) if reach_of(run, 0.5) >= 3]  # as the paper's fits saw it
    rows = sum_rows(runs, about="law, ") + sum_rows(greedy, about="law-greedy, ")
    rows += sum_rows(long if others else [], about="3 C_mid, ") + sum_rows(chain, CUTS, "chain, ")
    return joined(
        "# The law: half a run predicts the other half",
        f"Left out: {', '.join(left_out)}." if left_out else "",
        "![law](law.png)",
        table(SUM_HEAD, rows),
        ABOUT,
        by_reach(every),
        "**Simpler rules** on the same points of *law*. What stays is the mean of the last two evaluations.",
        rules_table(runs),
        "**How many seeds a comparison needs** to see a difference in four of five cases, at 5 %, two-sided (Student's "
        "t). The spread is that of the first variant over its seeds, and that of the paired differences to it.",
        power_table(groups),
        "**The same seeds with both engines.** The baseline of `law`, and that of `schedules`." if engines else "",
        engines,
    )


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
    return joined(
        "# What the logs already know",
        f"Of {len(stand) + len(fall)} runs on the whole task {by_comparison(fall)} fall: an evaluation lies more than "
        f"{FALL:g} below the best before it. Left out: {by_comparison(never)} that never gain more than that.",
        "An alarm is an effective sample size (ESS) below a level, or a share of truncated completions above one, as a "
        "mean over the steps since the evaluation before. One before the fall announces it, and its lead is the number "
        "of evaluations between them. One in a run that never falls is false. The levels of the ESS were chosen after "
        "a look at these runs, so the next ones will be announced less well. Those of truncation are the paper's: "
        "where thinking is interrupted, it announces nothing.",
        table(
            ["alarm", "falls announced", "lead, median (range)", "false alarms"],
            [alarm_row(stand, fall, name, level) for name, levels in LEVELS.items() for level in levels],
        ),
    )


# ----------------------------------------------------------------------------------------------------- the picture


def draw_halves(axes: "Axes", runs: Sequence[Evaluations]) -> None:
    """Runs, the fit to the first half of each, its band for the rest, and what came (hollow)."""
    for i, run in enumerate(runs):
        half, C, color = fitted(run, AXIS, 0.5), run.points[AXIS], f"C{i}"
        last = half.C[-1]
        axes.plot(C[last >= C], run.rates[last >= C], "o", color=color, ms=4, label=f"{run.variant} {run.seed}")
        axes.plot(C[last < C], run.rates[last < C], "o", color=color, mfc="white", ms=4)
        for start, stop, style in ((0, last, "-"), (last, C[-1], "--")):
            axes.plot(grid := np.linspace(start, stop, 100), half.predict(grid, half.form), style, color=color)
        axes.fill_between(grid, *half.interval(grid, noise=True), color=color, alpha=0.12, lw=0)
    axes.set(xlabel="sampled tokens", ylabel="pass rate on held-out prompts", ylim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: amount(value))


def picture(groups: Groups, chain: Sequence[Evaluations]) -> "Figure":
    """Left: the first runs. Middle: those of the task on which the law fails. Right: the end of each run of `groups`,
    predicted with its interval, and measured."""
    from matplotlib.figure import Figure

    halves = {"graded: problems differ in how soon they are learned": next(iter(groups.values()))[:3]}
    if chain:
        halves["chain: short chains are learned at once, the longest never"] = chain[:3]
    figure = Figure(figsize=(7 + 5 * len(halves), 4.6), layout="constrained")
    *left, right = figure.subplots(1, len(halves) + 1, width_ratios=[1.5] * len(halves) + [1])
    for axes, (title, runs) in zip(left, halves.items(), strict=True):
        draw_halves(axes, runs)
        axes.set_title(title, fontsize=9)
    left[0].axhline(CEILING, color="gray", ls=":", label=f"the ceiling, {CEILING:g} by construction")
    ends = [(f"C{i}", run, forecast(run, 0.5)) for i, some in enumerate(groups.values()) for run in some]
    for y, (color, _, end) in enumerate(ends):
        right.plot(end.evaluation, (y, y), color=color, lw=1)
        right.plot(end.best, y, "o", color=color, ms=4)
        right.plot(end.measured, y, "o", color="black", mfc="white", ms=4)
    right.set_yticks(range(len(ends)), [f"{run.variant} {run.seed}" for _, run, _ in ends], fontsize=6)
    right.invert_yaxis()
    right.axvline(CEILING, color="gray", ls=":")
    right.set_xlabel("end: predicted from half, measured (hollow)")
    for axes in (*left, right):
        axes.grid(alpha=0.3)
    for axes in left:
        axes.legend(fontsize=8)
    return figure
