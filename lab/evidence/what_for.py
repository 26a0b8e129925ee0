"""What each of the recipe's eight changes is for: the recipe, and the recipe with that one change undone.

    python lab/evidence/what_for.py clip        # makes both, three seeds each, and says what differs
    python lab/evidence/what_for.py             # the tables and the picture of lab/what_for.md, from the published runs

Each pair stands in the setting in which its change is needed; both sides have the same seeds, and one measure is
tested. Settings, measures and the number of seeds were committed before the published runs.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ablate
import numpy as np
import pandas as pd
from pages import fill, markdown
from runs import RESULTS, Run, collect, members, runs_of
from scipy.stats import binomtest, ttest_1samp
from tables import as_text, difference_cell, differences, interval, measure

Groups = Mapping[str, Sequence[Run]]  # variant of the comparison `what-for` -> its runs
PAGE = RESULTS.parent / "what_for.md"

FOUND = 0.25  # a run that ends above it has found thinking


@dataclass(frozen=True)
class Pair:
    """One change: the variants with it and without, the column of the curves that shows its mechanism at work, and the
    measure that is tested: the end, or the compute to a pass rate."""

    recipe: str
    without: str
    mechanism: str
    tested: str
    rate: float = 0.5
    rounds: bool = False  # evaluated after whole rounds of updates only: compute counts to one of these evaluations


COMPUTE = ("tokens", "flops", "device_hours")
MEASURES = (*COMPUTE, "end")
WORDS = {  # of the measures, and of the columns that show a mechanism at work
    "tokens": "sampled tokens",
    "flops": "FLOPs",
    "device_hours": "device-hours",
    "end": "pass rate at the end",
    "lag": "mean lag, updates",
    "clipped_positive": "tokens silenced by the clip",
    "mismatch": "mismatch, nats a token",
    "truncated": "completions cut off",
    "ess": "effective sample size",
    "kept": "rollouts that train",
}
SIDES = {  # of each pair: what a reader knows it as
    "pipeline": ("PipelineRL", "in turns of 8 updates"),
    "clip": ("CISPO", "GRPO's clip"),
    "fp32": ("FP32 logits", "bfloat16 logits"),
    "average": ("prompt average", "sample average"),
    "normalization": ("the batch's std", "the prompt's std"),
    "filter": ("zero-variance filter", "without the filter"),
    "retire": ("solved prompts retire", "all prompts are drawn"),
    "interruption": ("forced interruption", "completions are cut off"),
}
PAIRS = {
    "pipeline": Pair("recipe", "in-turns", "lag", "device_hours"),
    "clip": Pair("many-updates", "many-updates-grpo-clip", "clipped_positive", "tokens", rate=0.25, rounds=True),
    "fp32": Pair("bfloat16", "bfloat16-head", "mismatch", "tokens"),
    "average": Pair("short-budget-cut-off", "short-budget-cut-off-sample-average", "truncated", "end"),
    "normalization": Pair("recipe", "prompt-normalization", "ess", "tokens"),
    "filter": Pair("recipe", "no-zero-variance-filter", "kept", "flops"),
    "retire": Pair("mostly-solved", "mostly-solved-uniform-sampling", "kept", "tokens", rate=0.9),
    "interruption": Pair("ramble", "ramble-cut-off", "truncated", "end"),
}
# Is it the rate? The same at half of it; not one of the eight tests.
CLIP_AGAIN = replace(PAIRS["clip"], recipe="many-updates-half-rate", without="many-updates-half-rate-grpo-clip")


def measured(pair: Pair, groups: Groups) -> pd.DataFrame:
    """The numbers of the pair's runs."""
    both = {variant: groups[variant] for variant in (pair.recipe, pair.without)}
    numbers = measure(both, rate=pair.rate)
    if pair.rounds:
        for variant, runs in both.items():
            for run in runs:
                for axis in COMPUTE:
                    numbers.loc[(variant, run.seed), axis] = to_an_evaluation(run, axis, pair.rate)
    return numbers


def to_an_evaluation(run: Run, axis: str, rate: float) -> float:
    """Compute to the first evaluation at or above the rate; NaN if there is none. Where evaluations are rare, a line
    between two of them says more than was measured."""
    reached = run.points[axis][run.rates >= rate]
    return float(reached[0]) if reached.size else np.nan


def row(name: str, pair: Pair, groups: Groups, numbers: pd.DataFrame) -> dict[str, object]:
    """What a pair's runs show."""
    with_it, without = (
        np.mean([np.nanmean(run.points[pair.mechanism]) for run in groups[variant]])
        for variant in (pair.recipe, pair.without)
    )
    cells = {
        "change": name,
        "pairs": len(tested(pair, numbers)),
        "at work": f"{WORDS[pair.mechanism]} {with_it:.3g}, without {without:.3g}",
        "tested": WORDS[pair.tested] if pair.tested == "end" else f"{WORDS[pair.tested]} to {pair.rate:g}",
    }
    return cells | {key: difference_cell(numbers, pair.without, pair.recipe, key) for key in MEASURES}


def tested(pair: Pair, numbers: pd.DataFrame) -> pd.Series:
    """Without the change minus the recipe, by seed, of the measure that is tested."""
    return differences(numbers, pair.without, pair.recipe, pair.tested)


def at_evaluations(name: str, groups: Groups) -> pd.Series:
    """The logarithms of the compute that is tested, without the change minus with it, by seed, to an evaluation."""
    pair = PAIRS[name]
    known = [
        pd.Series({run.seed: to_an_evaluation(run, pair.tested, pair.rate) for run in groups[variant]})
        for variant in (pair.recipe, pair.without)
    ]
    return np.log(known[1] / known[0]).dropna()


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's corrected p values: the smallest times their number, the next times one less, and never falling."""
    order = np.argsort(p)
    factors = np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.sort(p) * factors).clip(max=1)
    return corrected


def ceilings(groups: Groups) -> pd.DataFrame:
    """The table of the comparison `ceilings`, whose rules stand in comparisons.py: of each recipe's runs how many found
    thinking, with Clopper and Pearson's interval, and when and where those ended."""
    rows = []
    for recipe, numbers in measure(groups, rate=FOUND).groupby(level=0, sort=False):
        finders = numbers[numbers["end"] > FOUND]
        count, n = len(finders), len(numbers)
        row = {
            "recipe": recipe,
            "found": f"{count} of {n}",
            "95 %": "[{:.2f}, {:.2f}]".format(*binomtest(count, n).proportion_ci()),
            "tokens to .25": f"{finders['tokens'].median():,.0f}",
            "end": f"{finders['end'].mean():.2f}",
        }
        rows.append(row)
    return pd.DataFrame(rows)


def evaluated_alike(results: pd.DataFrame) -> pd.DataFrame:
    """The table of interruption.csv: each model of `ramble` answers with the phrase and without it, however it was
    trained. Means over seeds; the difference is paired by seed, with its 95 % interval."""
    rates = results.pivot(index="seed", columns=["trained", "evaluated"], values="pass_rate")
    rows = []
    for evaluated in ("with", "without"):
        cells = {trained: rates[trained, evaluated] for trained in ("first", "with", "without")}
        row = {"answers are given": f"{evaluated} the phrase", "seeds": len(rates)}
        row |= {f"trained {name}" if name != "first" else "first model": f"{x.mean():.3f}" for name, x in cells.items()}
        apart = interval(cells["without"] - cells["with"])
        rows.append(row | {"trained without minus with": "{:+.3f} [{:+.3f}, {:+.3f}]".format(*apart)})
    return pd.DataFrame(rows)


def draw(groups: Groups, path: Path) -> None:
    """A panel for each change: the recipe solid, without the change dashed, a thin line for each seed; the title says
    what differs without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 4, figsize=(15, 6.5), sharey=True, layout="constrained")
    for panel, (name, pair) in zip(panels.flat, PAIRS.items(), strict=True):
        axis = "tokens" if pair.tested == "end" else pair.tested
        looks = ((pair.recipe, "C0-"), (pair.without, "C1--"))
        for label, (variant, style) in zip(SIDES[name], looks, strict=True):
            for run in groups[variant]:
                panel.plot(run.points[axis], run.rates, style, linewidth=0.8, label=label)
                label = None  # one line of the legend for all seeds
        found = interval(tested(pair, measured(pair, groups)))
        panel.set(title=f"{SIDES[name][1]}:\n{WORDS[pair.tested]} {as_text(found, pair.tested)}", xlabel=WORDS[axis])
        panel.legend(fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("pass rate")
    figure.savefig(path, dpi=80)


def publish() -> None:
    """The tables and the picture of the page."""
    published = members()
    groups = published["what-for"]
    numbers = {name: measured(pair, groups) for name, pair in PAIRS.items()}
    rows = {name: row(name, pair, groups, numbers[name]) for name, pair in PAIRS.items()}
    p = [ttest_1samp(tested(pair, numbers[name]), 0).pvalue for name, pair in PAIRS.items()]
    for cells, value in zip(rows.values(), holm(p), strict=True):
        cells["p (Holm)"] = f"{value:.2g}"
    again = [row("clip, half of the rate", CLIP_AGAIN, groups, measured(CLIP_AGAIN, groups)) | {"p (Holm)": "–"}]
    table = pd.DataFrame([*rows.values(), *again]).rename(columns=WORDS)
    tables = {
        "what-for": table,
        "interruption": evaluated_alike(pd.read_csv(RESULTS / "interruption.csv")),
        "ceilings": ceilings(published["ceilings"]),
    }
    fill(PAGE, {mark: markdown(rows) for mark, rows in tables.items()})
    draw(groups, PAGE.with_name("pictures") / "what_for.png")


def make(name: str, seeds: int, output: Path) -> int:
    """Makes a pair's runs, prints what differs and whether it can be seen, and returns the exit code."""
    pair = PAIRS[name]
    jobs = ablate.plan("what-for", output, seeds, [pair.recipe, pair.without], None)
    code = ablate.make(jobs, 1)
    if code:
        return code
    groups: dict[str, list[Run]] = {pair.recipe: [], pair.without: []}
    for run in runs_of(collect(output)).values():
        if run.variant in groups and run.state == "finished":
            groups[run.variant].append(run)
    print(report(name, groups))
    ablate.draw(groups, "tokens" if pair.tested == "end" else pair.tested, output / f"{name}.png")
    print(f"picture: {output / name}.png")
    return 0


def report(name: str, groups: Groups) -> str:
    """A pair's runs in words: both sides by name, what differs, and whether it can be seen."""
    pair = PAIRS[name]
    numbers = measured(pair, groups)
    sides = dict(zip(SIDES[name], (pair.recipe, pair.without), strict=True))
    lines = [f"{'':<28}" + "".join(f"{side:<26}" for side in sides)]

    def line(title: str, cells: Iterable[str]) -> None:
        lines.append(f"{title:<28}" + "".join(f"{cell:<26}" for cell in cells).rstrip())

    line("runs", (str(len(groups[variant])) for variant in sides.values()))
    means = [np.mean([np.nanmean(run.points[pair.mechanism]) for run in groups[v]]) for v in sides.values()]
    line(WORDS[pair.mechanism], (f"{mean:.3g}" for mean in means))
    line(WORDS["end"], (f"{numbers.loc[variant, 'end'].mean():.3f}" for variant in sides.values()))
    if pair.tested == "end":
        goal, apart = WORDS["end"], tested(pair, numbers)
    else:
        goal = f"{WORDS[pair.tested]} to the first evaluation at {pair.rate:g} or above"
        apart = at_evaluations(name, groups)
    mean, low, high = interval(apart)
    with_it, without = sides
    lines += [
        f"{goal}, {without} against {with_it}: {as_text((mean, low, high), pair.tested)} ({len(apart)} pairs)",
        "seen: 0 lies outside the interval" if low > 0 or high < 0 else "not seen: 0 lies in the interval",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser("what_for.py", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=PAIRS, help="the change; none remakes the page")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--output", type=Path, default=Path("runs/what-for"), help="folder of the runs")
    args = parser.parse_args(argv)
    if args.name:
        return make(args.name, args.seeds, args.output.resolve())
    publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
