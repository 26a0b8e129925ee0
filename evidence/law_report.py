"""Does the law hold? Every run is fitted to its beginning, and the fit is held against what came.

The graded task's ceiling is known by construction (tasks/graded.py), so the fitted one can be judged as well. Two
simpler rules see the same points: the pass rate stays as it is, and the power law A - D / C^B.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import FALL, compute_to, fitted, interval, pooled_sd, seeds_needed
from ablation_report import amount, apart_text, save
from curves import Curve
from log_report import fall_of, learns
from measuring import table

from fit_sigmoid import SigmoidFit, span, variance
from tasks.graded import CEILING

AXIS = "tokens"
PLATEAU = 8  # evaluations at the end of a run
CUTS = {"a quarter": 0.25, "half": 0.5}  # of a run's compute
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
RULES = ("the form that fits best", "Eq. 1", "power law", "the pass rate stays")
EFFECTS = {"A": 0.02, "C_mid": math.log(1.15)}  # differences that a comparison should see; C_mid's of logarithms


def covers(fit: SigmoidFit) -> bool:
    """Whether the interval of A holds the known ceiling."""
    return fit.A_interval[0] <= CEILING <= fit.A_interval[1]


def plateau(curve: Curve) -> float:
    """Mean of the run's last evaluations."""
    return float(curve.points["pass_rate"][-PLATEAU:].mean())


def finds_plateau(fit: SigmoidFit, curve: Curve) -> bool:
    """Whether the interval of A holds the plateau."""
    return fit.A_interval[0] <= plateau(curve) <= fit.A_interval[1]


def half_gain(curve: Curve) -> float:
    """C_mid as measured, without a fit: where straight lines between evaluations first reach half of the gain."""
    return compute_to(curve.evals(), (curve.points["pass_rate"][0] + plateau(curve)) / 2, AXIS)


class Forecast(NamedTuple):
    """Of one evaluation: predicted by the form that fits best and by Eq. 1, and what was measured."""

    best: float
    eq1: float
    curve: tuple[float, float]
    evaluation: tuple[float, float]
    measured: float

    inside = property(lambda self: self.evaluation[0] <= self.measured <= self.evaluation[1])
    error = property(lambda self: self.best - self.measured)


@cache
def forecast(curve: Curve, share: float) -> Forecast:
    """What the fit to `share` of a run says of its last evaluation."""
    return forecast_by(fitted(curve, AXIS, share).fit, curve, -1)


def forecast_by(fit: SigmoidFit, curve: Curve, at: int) -> Forecast:
    """What a fit says of evaluation number `at`."""
    C = float(curve.points[AXIS][at])
    ends = (tuple(fit.interval(C, noise=noise)[:, 0].tolist()) for noise in (False, True))
    return Forecast(*(float(fit.predict(C, form)) for form in (fit.form, "log-logistic")), *ends,
                    float(curve.points["pass_rate"][at]))  # fmt: skip


def noise_ratio(curve: Curve) -> float:
    """RMSE of the fit to the whole run, over the binomial noise of its evaluations."""
    fit = fitted(curve, AXIS).fit
    return fit.rmse / math.sqrt(np.mean(variance(fit.predict(fit.C), fit.n)))


def power_law(C: np.ndarray, R: np.ndarray, A_max: float = 1.0) -> dict[str, float]:
    """Least squares for R = A - D / C^B over the points with C > 0: Eq. 1 at large C. Returns A, D, B and rmse.

    On early data its A runs to the bound, which is why the paper prefers the sigmoid. ValueError: fewer than 4 points.
    """
    C, R = C[C > 0], R[C > 0]
    if C.size < 4:
        raise ValueError(f"a power law needs 4 points at C > 0, not {C.size}")
    B = np.geomspace(0.01, 10, 400)
    for _ in range(5):  # R = A - D x is linear in A and D: a regression for each B, on a grid that closes in
        x = (C / C.max()) ** -B[:, None]  # (G, N)
        off = x - x.mean(1, keepdims=True)
        D = np.maximum(-(off @ R) / (off * off).sum(1), 0)
        A = np.clip(R.mean() + D * x.mean(1), 0, A_max)
        D = np.where(A < A_max, D, x @ (A_max - R) / (x * x).sum(1))
        Q = ((A[:, None] - D[:, None] * x - R) ** 2).sum(1)
        i = int(np.argmin(Q))
        found = A[i], D[i] * C.max() ** B[i], B[i], math.sqrt(Q[i] / C.size)
        B = np.geomspace(B[max(i - 1, 0)], B[min(i + 1, B.size - 1)], 400)
    return dict(zip(("A", "D", "B", "rmse"), map(float, found), strict=True))


@cache
def power_law_end(curve: Curve, share: float) -> float:
    """The power law's prediction of the end; NaN where too few points are there to fit it."""
    fit = fitted(curve, AXIS, share).fit
    if (fit.C > 0).sum() < 4:
        return math.nan
    law = power_law(fit.C, fit.R)
    return law["A"] - law["D"] / curve.points[AXIS][-1] ** law["B"]


def error(curve: Curve, share: float, rule: str) -> float:
    """Predicted minus measured at the last evaluation; NaN where the rule has no prediction."""
    end = forecast(curve, share)
    predicted = {
        "the form that fits best": lambda: end.best,
        "Eq. 1": lambda: end.eq1,
        "power law": lambda: power_law_end(curve, share),
        "the pass rate stays": lambda: float(fitted(curve, AXIS, share).fit.R[-2:].mean()),
    }[rule]()
    return predicted - end.measured


# ------------------------------------------------------------------------------------------------------ by reach


class Cut(NamedTuple):
    """A run fitted up to so many C_mid, and its evaluation at twice the compute of the last point that was fitted."""

    twice: Forecast
    width: float  # of A's interval
    holds: bool  # the plateau
    identifiable: bool
    again: float  # `ask_again` over `identifiable_from`; NaN where the fit is identifiable, or the run never is


def of_share(curve: Curve, share: float) -> SigmoidFit:
    """A fit that is not kept: there are thousands, of a quarter of a megabyte each."""
    return fitted.__wrapped__(curve, AXIS, share).fit


@cache
def identifiable_from(curve: Curve) -> float:
    """The compute from which on the fits to the run up to each evaluation are identifiable; inf if there is none."""
    C = curve.points[AXIS]
    for i in range(C.size - 1, -1, -1):
        if C[i] <= 0 or not of_share(curve, C[i] / C[-1]).identifiable:
            return float(C[i + 1]) if i + 1 < C.size else math.inf
    return math.inf


@cache
def cut_at(curve: Curve, reach: float) -> Cut | None:
    """None where twice the compute is beyond the end of the run, or fewer than four evaluations are seen."""
    C, until = curve.points[AXIS], reach * half_gain(curve)
    seen = C[until >= C]
    if 2 * until > 1.02 * C[-1] or seen.size < 4:
        return None
    fit, again = of_share(curve, float(until / C[-1])), math.nan
    if not fit.identifiable and (known := identifiable_from(curve)) < math.inf:
        again = fit.ask_again() / known
    at = int(np.argmin(np.abs(C - 2 * seen[-1])))
    width, holds = float(np.ptp(fit.A_interval)), finds_plateau(fit, curve)
    return Cut(forecast_by(fit, curve, at), width, holds, fit.identifiable, again)


REACH_HEAD = ["data reach", "runs", "evaluation at twice the compute inside", "A holds the plateau",
              "width at twice the compute: curve", "width: A", "identifiable (of these A misses the plateau)",
              "mean error: Eq. 1", "the best form", "ask again over what was needed, median", "within 1.5 times",
              "within twice"]  # fmt: skip


def reach_table(curves: Sequence[Curve]) -> str:
    """All of these runs by how far the data reach, in C_mid as measured."""
    rows = []
    for reach in REACHES:
        cuts = [cut for curve in curves if (cut := cut_at(curve, reach))]
        if not cuts:
            continue
        known, again = [cut for cut in cuts if cut.identifiable], [c.again for c in cuts if not math.isnan(c.again)]
        errors = np.array([(cut.twice.eq1, cut.twice.best) for cut in cuts]) - [[cut.twice.measured] for cut in cuts]
        widths = np.median([(np.ptp(cut.twice.curve), cut.width) for cut in cuts], axis=0)
        off = np.abs(np.log(again))
        rows.append([
            f"{reach:g} C_mid", str(len(cuts)), share_of([cut.twice.inside for cut in cuts]),
            share_of([cut.holds for cut in cuts]), *(f"{width:.3f}" for width in widths),
            f"{len(known) / len(cuts):.0%} ({sum(not cut.holds for cut in known)} of {len(known)})",
            *(f"{v:+.4f}" for v in np.nanmean(errors, axis=0)),
            *([f"{np.median(again):.2f} ({len(again)})", *(f"{np.mean(off <= math.log(k)):.0%}" for k in (1.5, 2))]
              if again else ["–"] * 3),
        ])  # fmt: skip
    return table(REACH_HEAD, rows)


def by_reach(curves: Sequence[Curve], names: bool = True) -> str:
    """The table and its rule, for runs of every comparison, with the `names` of those left out."""
    falls = [curve.run for curve in curves if learns(curve) and fall_of(curve) is not None]
    never = [curve.run for curve in curves if not learns(curve)]
    kept = [curve for curve in curves if learns(curve) and fall_of(curve) is None]
    return "\n\n".join([
        f"{len(kept)} runs of the graded task, each fitted up to so many C_mid, where C_mid is measured without a fit: "
        "the compute at half of the gain from the first evaluation to the plateau. A run counts where it was evaluated "
        "at twice the compute. Widths are medians. *Ask again*: of fits that are not identifiable, the compute that "
        "they say over that from which on the run's fits are (in brackets how many; runs that never are do not count).",
        reach_table(kept),
        f"Left out: {len(falls)} runs that fall, which is an evaluation more than {FALL:g} below the best before it"
        + f" ({', '.join(falls) or 'none'})" * names + f", and {len(never)} that never gain more than {FALL:g}"
        + f" ({', '.join(never) or 'none'})" * names + ".",
    ])  # fmt: skip


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
    *early, full = fits = [fitted(curve, AXIS, share).fit for share in (*CUTS.values(), 1.0)]
    cells = [
        f"{curve.variant} {curve.seed}", f"{full.A:.3f} {span(full.A_interval, 3)}", f"{full.B:.2f}",
        amount(full.C_mid), f"{noise_ratio(curve):.2f}", f"{curve.points['pass_rate'][-1]:.3f}",
    ]  # fmt: skip
    for share, fit in zip(CUTS.values(), early, strict=True):
        end = forecast(curve, share)
        bold = "" if end.inside else "**"
        cells += [f"{bold}{end.best:.3f} {span(end.evaluation, 3)}{bold}", f"{fit.A:.3f} {span(fit.A_interval, 3)}"]
    return [*cells, marks([fit.identifiable for fit in fits]), marks([covers(fit) for fit in fits])]


SUM_HEAD = ["fitted", "runs", "C_mid seen, median", "end inside its 95 % interval", "median error", "mean error [95 %]",
            "width of the interval, median", "ceiling identifiable", "A holds .80", "A holds the plateau"]  # fmt: skip


def mean_error(errors: Sequence[float]) -> str:
    """`mean [low, high]` over runs."""
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(errors))


def share_of(found: Sequence[bool]) -> str:
    """`18 of 20 (90 %)`."""
    return f"{sum(found)} of {len(found)} ({np.mean(found):.0%})"


def sum_row(name: str, share: float, curves: Sequence[Curve]) -> list[str]:
    """All of these runs, fitted to `share` of their compute, in SUM_HEAD's columns."""
    fits, ends = [fitted(curve, AXIS, share).fit for curve in curves], [forecast(curve, share) for curve in curves]
    reached = [far for curve in curves if not math.isnan(far := reach_of(curve, share))]
    known = [end.error for end in ends if math.isfinite(end.error)]  # a fit to too few points predicts nothing
    fewer = "" if len(known) == len(ends) else f" (of {len(known)})"
    later = share < 1  # at the end there is nothing left to predict
    return [
        name, str(len(curves)), f"{np.median(reached):.1f}" if reached else "–",
        share_of([end.inside for end in ends]) if later else "–",
        f"{np.median(np.abs(known)):.3f}{fewer}" if later and known else "–",
        mean_error(known) if later and known else "–",
        f"{np.median([np.ptp(end.evaluation) for end in ends]):.3f}" if later else "–",
        share_of([fit.identifiable for fit in fits]),
        share_of([covers(fit) for fit in fits]) if curves[0].flags.get("dataset") == "graded" else "–",
        share_of([finds_plateau(fit, curve) for fit, curve in zip(fits, curves, strict=True)]),
    ]  # fmt: skip


def reach_of(curve: Curve, share: float) -> float:
    """How far `share` of the run reaches, in C_mid as measured; NaN for a run that ends no higher than it began."""
    C_mid = half_gain(curve)
    return share * float(curve.points[AXIS][-1]) / C_mid if C_mid > 0 else math.nan


def is_long(curve: Curve) -> bool:
    """Half of the run is at least 3 C_mid, as the paper's fits saw it."""
    return reach_of(curve, 0.5) >= 3


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
    published: Sequence[Curve],
    left_out: Sequence[str],
) -> str:
    """Markdown. `groups`: the comparison's runs by variant; `others`: the runs of other comparisons, by comparison;
    `chain`: runs of the task on which the law fails; `greedy`: runs whose evaluations took the likeliest token;
    `published`: every finished run of the graded task."""
    curves = [curve for some in groups.values() for curve in some]
    text = [
        "# The law: half a run predicts the other half",
        "Seeds: " + "; ".join(f"{name} {', '.join(str(c.seed) for c in some)}" for name, some in groups.items()) + "."
        + (f" Left out: {', '.join(left_out)}." if left_out else ""),
        "![law](law.png)",
        summary(curves),
        INTERVALS,
        "**How far the data reach.** " + by_reach(published),
        *(["The same for the task `chain`, on which the law fails (below):", reach_table(chain)] if chain else []),
        "**Simpler rules** on the same points. What stays is the mean of the last two evaluations.",
        rules_table(curves),
        "**Each run.** Compute in sampled tokens; in bold a prediction whose interval the end left.",
        table(ROW_HEAD, [row(curve) for curve in curves]),
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
        text += ["**All of these runs whose first half is at least 3 C_mid**:",
                 table(SUM_HEAD, rows)]  # fmt: skip
    if chain:
        rows = [sum_row(name, share, chain) for name, share in CUTS.items()]
        text += [CHAIN_FAILS, table(SUM_HEAD, rows)]
    return "\n\n".join(text) + "\n"


def draw_halves(axes: Any, curves: Sequence[Curve]) -> None:
    """Runs, the fit to the first half of each, its band for the rest, and what came (hollow)."""
    for i, curve in enumerate(curves):
        half, color = fitted(curve, AXIS, 0.5), f"C{i}"
        seen, form, last = ~half.unseen, half.fit.form, half.fit.C[-1]
        axes.plot(half.C[seen], half.R[seen], "o", color=color, ms=4, label=f"{curve.variant} {curve.seed}")
        axes.plot(half.C[~seen], half.R[~seen], "o", color=color, mfc="white", ms=4)
        for start, stop, style in ((0, last, "-"), (last, half.C[-1], "--")):
            axes.plot(grid := np.linspace(start, stop, 100), half.fit.predict(grid, form), style, color=color)
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
    figure.savefig(path, dpi=110)


def write(groups: Mapping[str, Sequence[Curve]], others: Mapping[str, Sequence[Curve]], chain: Sequence[Curve],
          greedy: Sequence[Curve], published: Sequence[Curve], left_out: Sequence[str],
          folder: Path) -> None:  # fmt: skip
    """FOLDER/law.* from finished runs; the arguments as in `page`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(groups, chain, folder / "law.png")
    save(page(groups, others, chain, greedy, published, left_out), (folder / "law").with_suffix(".md"))
