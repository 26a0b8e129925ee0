"""What the published runs show: the tables and the pictures of README.md, from curves.csv.gz and nothing else.

    python lab/ladder/publish.py

evidence.py has the tests and how they are judged.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from evidence import (
    ALONE,
    IN_SECONDS,
    LEFT_OUT,
    PILOTS,
    RATES,
    SEEDS,
    TESTS,
    WHOLE,
    Test,
    best_rate,
    level_of,
    rows_in,
    value,
)
from rungs import NAMES, PAGE, ROOT, Row, curves_of
from scipy.stats import binomtest, ttest_1samp

sys.path.insert(0, str(ROOT / "lab" / "evidence"))
from runs import as_text, holm, interval
from tables import fill, markdown

PAIRED = 0.8  # of the pairs must have a value, or p is a sign test's
REPLACED = 23  # tests
AXES = {
    "tokens": "sampled tokens",
    "passes": "tokens through the model, three times where they train",
    "seconds": "seconds",
}
COMPUTE = tuple(AXES)


@dataclass(frozen=True)
class Outcome:
    """What the pairs of a test show: after against before; of compute in logarithms."""

    test: Test
    rates: tuple[float, float]  # of both sides, times the setting's
    lags: tuple[float, float]  # in updates, means of whole runs
    apart: tuple[float, float, float]  # mean, and its interval
    known: int  # pairs in which both sides have a value
    pairs: int
    p: float

    def text(self) -> str:
        """`+32 % [+6, +64]`, or `-0.020 [-0.050, +0.010]` of pass rates; with (7 of 10) where pairs have no value."""
        text = as_text(self.apart, "tokens" if self.test.measure in COMPUTE else "end")
        return text if self.known == self.pairs else f"{text} ({self.known} of {self.pairs})"


def rates_of(rows: Sequence[Row], test: Test) -> tuple[float, float]:
    """The best rate of each side; the whole's where one of its changes is left out, and `discover`'s of `alone`."""
    setting = "discover" if test.setting == "alone" else test.setting
    before = test.after if test in LEFT_OUT else test.before
    return best_rate(rows, setting, before), best_rate(rows, setting, test.after)


def outcome(rows: Sequence[Row], test: Test, rates: tuple[float, float], seeds: Iterable[int] = SEEDS) -> Outcome:
    """Of the pairs that are there."""
    sides = zip((test.before, test.after), rates, strict=True)
    before, after = (curves_of(rows, side, test.setting, rate) for side, rate in sides)
    seeds = [seed for seed in seeds if seed in before and seed in after]
    if not seeds:
        return Outcome(test, rates, (math.nan, math.nan), interval([]), 0, 0, math.nan)
    values = np.array([[value(curves[seed], test.measure) for seed in seeds] for curves in (before, after)])
    lags = tuple(float(np.mean([curves[seed][-1]["lag"] for seed in seeds])) for curves in (before, after))
    differ = np.log(values[1] / values[0]) if test.measure in COMPUTE else values[1] - values[0]
    known = differ[~np.isnan(differ)]
    if len(known) < PAIRED * len(seeds):
        first, second = np.nan_to_num(values, nan=np.inf)
        more, less = int((second > first).sum()), int((second < first).sum())
        p = binomtest(more, more + less).pvalue if more + less else 1.0
    else:
        p = float(ttest_1samp(known, 0).pvalue)
    return Outcome(test, rates, lags, interval(known), len(known), len(seeds), p)


def outcomes(rows: Sequence[Row], seeds: Sequence[int] = SEEDS, tests: Sequence[Test] = TESTS) -> list[Outcome]:
    """Of those of the tests whose runs are all there, each side at its best rate."""
    results = []
    for test in tests:
        rates = rates_of(rows, test)
        if not any(isinstance(rate, list) for rate in rates):  # pilots that are missing
            results.append(outcome(rows, test, rates, seeds))
    return [result for result in results if result.pairs == len(seeds)]


def corrected(results: Sequence[Outcome]) -> list[float]:
    """Holm's p of each; a test without its runs counts as p = 1, too."""
    others = len(TESTS) + REPLACED - len(results)
    return list(holm([result.p for result in results] + [1.0] * others)[: len(results)])


def in_words(result: Outcome, p: float) -> str:
    """`saves 31 % [22, 39] of the passes`, `ends +0.410 [+0.300, +0.520] higher`, or `not seen: -5 % [-23, +18]`."""
    measure, (mean, low, high) = result.test.measure, result.apart
    if not p < 0.05 or math.isnan(mean):
        return f"not seen: {result.text()}{f' {measure}' if measure in COMPUTE else ''}"
    if measure not in COMPUTE:
        return f"**ends {'higher' if mean > 0 else 'lower'}**: {result.text()}"
    verb = "costs" if mean > 0 else "saves"
    least, most = sorted(abs(100 * np.expm1([low, high])))
    some = "" if result.known == result.pairs else f" ({result.known} of {result.pairs})"
    return f"**{verb} {abs(100 * math.expm1(mean)):.0f} %** [{least:.0f}, {most:.0f}] of the {measure}{some}"


def whole(rows: Sequence[Row], results: Sequence[Outcome], ps: Sequence[float]) -> str:
    """ScaleRL against GRPO: two rows for each setting, each side at its best rate and both at the setting's; bold where
    Holm's p is below .05."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for result, p in zip(results, ps, strict=True):
        test = result.test
        if test.change != "ScaleRL":
            continue
        setting = {"alone": "discover", "vllm": "discover, vLLM"}.get(test.setting, test.setting)
        best = cells.setdefault((setting, "each its best"), {})
        best[test.measure] = f"**{result.text()}**" if p < 0.05 else result.text()
        if test in WHOLE:
            cells.setdefault((setting, "the setting's"), {})[test.measure] = outcome(rows, test, (1.0, 1.0)).text()
    lines = [
        {"setting": setting, "rate": rate} | {measure: row.get(measure, "–") for measure in (*COMPUTE, "end")}
        for (setting, rate), row in cells.items()
    ]
    return markdown(pd.DataFrame(lines))


def ladder(rows: Sequence[Row], results: Sequence[Outcome], ps: Sequence[float]) -> str:
    """Each change against the rung before: what it brings at each side's best rate, and at the setting's."""
    lines = []
    for result, p in zip(results, ps, strict=True):
        test = result.test
        rung = rung_of(test)
        if not rung:
            continue
        same = "–" if test.setting in ALONE else outcome(rows, test, (1.0, 1.0)).text()
        lines.append({
            "change": f"[{test.change}](#{rung}-{NAMES[rung].lower().replace(' ', '-')})",
            "setting": test.setting,
            "at its best rate": in_words(result, p),
            "at the setting's rate": same,
        })  # fmt: skip
    lines.sort(key=lambda line: line["change"].partition("(#")[2])
    return markdown(pd.DataFrame(lines))


def left_out(results: Sequence[Outcome], ps: Sequence[float]) -> str:
    """ScaleRL on `discover` without one of its changes: what the change brings there."""
    lines = [
        {"change": result.test.change, "against ScaleRL without it": in_words(result, p)}
        for result, p in zip(results, ps, strict=True)
        if result.test in LEFT_OUT
    ]
    return markdown(pd.DataFrame(lines))


def elsewhere(rows: Sequence[Row], test: Test) -> str:
    """The same at half, once and twice the setting's rate on both sides, in three pilots each."""
    if test in (*LEFT_OUT, *IN_SECONDS) or test.measure == "seconds":
        return "–"
    means = [outcome(rows, test, (rate, rate), PILOTS).apart[0] for rate in RATES]
    return " · ".join(as_text([mean], "tokens" if test.measure in COMPUTE else "end") for mean in means)


def statistics(rows: Sequence[Row], results: Sequence[Outcome], ps: Sequence[float]) -> str:
    """Every test of the page."""
    lines = []
    for result, p in zip(results, ps, strict=True):
        test = result.test
        lines.append({
            "change": f"{test.change} left out" if test in LEFT_OUT else test.change,
            "setting": test.setting, "measure": test.measure, "sides": f"{test.before}, {test.after}",
            "rates": "{:g}, {:g}".format(*result.rates), "lags": "{:.1f}, {:.1f}".format(*result.lags),
            "outcome": result.text(), "½ · 1 · 2 (pilots)": elsewhere(rows, test),
            "p": f"{result.p:.2g}", "Holm": f"{p:.2g}",
        })  # fmt: skip
    return markdown(pd.DataFrame(lines))


def rung_of(test: Test) -> int:
    """The rung that is compared with the one before; 0 for another test."""
    sides = test.before, test.after
    return next((rung for rung in range(1, len(NAMES)) if sides == (str(rung - 1), str(rung))), 0)


def test_of(rung: int) -> Test:
    """The first test of the rung against the one before."""
    return next(test for test in TESTS if rung_of(test) == rung)


def setting_of(rung: int) -> str:
    """Where its change should show."""
    return test_of(rung).setting if rung else "discover"


def draw(rung: int, rows: Sequence[Row], path: Path, rate: float | None = None, own: Sequence[Row] = ()) -> None:
    """The curves of the rung over those of the rung before, a thin line for each seed: each at its best rate, or both
    at `rate`; a thick one for your run."""
    from matplotlib.figure import Figure

    setting = setting_of(rung)
    measure = test_of(rung).measure if rung else "tokens"
    axis = measure if measure in COMPUTE else "tokens"
    figure = Figure(figsize=(6, 3.4))
    axes = figure.subplots()
    axes.set(xlabel=AXES[axis], ylabel="pass rate", ylim=(0, 1), title=f"{setting}: rung {rung}, {NAMES[rung]}")
    lines = [(rung, "C0-", 0.8), (rung - 1, "C1--", 0.8)] if rung else [(rung, "C0-", 0.8)]
    for number, style, width in reversed(lines):
        times = rate or best_rate(rows, setting, str(number))
        curves = curves_of(rows, number, setting, times)
        label = f"rung {number}, {NAMES[number]}, rate × {times:g}"
        for seed in set(SEEDS) & set(curves) or curves:
            points = ([row[key] for row in curves[seed]] for key in (axis, "pass_rate"))
            axes.plot(*points, style, linewidth=width, label=label)
            label = None  # one line of the legend for all seeds
    if own:
        axes.plot(*([row[key] for row in own] for key in (axis, "pass_rate")), "C0-", linewidth=2.5, label="your run")
    if measure in COMPUTE:
        axes.axhline(level_of(setting), color="0.7", linewidth=0.8, zorder=0)
    axes.legend(loc="best")
    figure.savefig(path)


def draw_whole(rows: Sequence[Row], path: Path) -> None:
    """The picture of the repository's README: GRPO beside ScaleRL on recipe.py's toy, by each measure of compute."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2))
    for axes, axis in zip(figure.subplots(1, 3, sharey=True), COMPUTE, strict=True):
        axes.set(xlabel="compute" if axis == "passes" else axis, ylim=(0, 1))
        setting = "alone" if axis == "seconds" else "discover"
        for name, side, color in (("GRPO", "0", "C1"), ("ScaleRL", "8", "C0")):
            curves = curves_of(rows, side, setting, best_rate(rows, "discover", side))
            for seed in set(SEEDS) & set(curves):
                points = ([row[key] for row in curves[seed]] for key in (axis, "pass_rate"))
                axes.plot(*points, color, linewidth=0.8, label=name)
                name = None
        axes.axhline(0.5, color="0.7", linewidth=0.8, zorder=0)
    figure.axes[0].set(ylabel="pass rate")
    figure.axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=130)


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The page's tables."""
    results = outcomes(rows)
    ps = corrected(results)
    return {
        "whole": whole(rows, results, ps),
        "ladder": ladder(rows, results, ps),
        "left-out": left_out(results, ps),
        "statistics": statistics(rows, results, ps),
    }


if __name__ == "__main__":
    rows = rows_in()
    fill(PAGE, blocks(rows))
    for rung in range(len(NAMES)):
        draw(rung, rows, PAGE.with_name(f"rung_{rung}.png"))
    draw_whole(rows, ROOT / "docs" / "grpo.png")
