"""The page docs/results/staleness.md: at which lag and learning rate runs stand, and what changes it.

A run *falls* where an evaluation lies more than FALL below the best before it, *never rises* if it gains no more than
that, and else *stands*. Counts of few runs are compared by Fisher's exact test, without a correction for their number.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from curves import Evaluations
from figures import Groups, Row, fall_of, final, interval, learns, needed, over_steps
from report import amount, table, with_ends
from scipy.stats import fisher_exact

LAB = ("staleness", "stress", "survivors", "precision")  # comparisons that have this page in the place of their own
AGES = (0, 20, 50, 100, math.inf)  # in steps since a prompt retired
OUTCOMES = ("stands", "falls", "never rises")


def outcome(run: Evaluations) -> str:
    """One of OUTCOMES."""
    return "never rises" if not learns(run) else "falls" if fall_of(run) is not None else "stands"


def counted(runs: Sequence[Evaluations]) -> str:
    """ "3 stand", or what the runs did otherwise: "1 stands, 2 fall"."""
    found = Counter(map(outcome, runs))
    plural = {"stands": "stand", "falls": "fall", "never rises": "never rise"}
    return ", ".join(f"{n} {o if n == 1 else plural[o]}" for o in OUTCOMES if (n := found[o]))


def map_table(groups: Groups) -> str:
    """A row for each lag and a column for each rate: outcomes, mean pass rate at the end, mean ESS."""
    cells: dict[str, dict[str, str]] = {}
    for variant, runs in groups.items():
        lag, rate = variant.removeprefix("lag-").split("-lr-")
        end, ess = np.mean([final(run) for run in runs]), np.mean([over_steps(run, "ess") for run in runs])
        cells.setdefault(lag, {})[rate] = f"{counted(runs)}; {end:.2f}; {ess:.2f}"
    rates = sorted({rate for row in cells.values() for rate in row}, key=float)
    rows = [[lag, *(cells[lag].get(rate, "–") for rate in rates)] for lag in sorted(cells, key=int)]
    return table(["lag held at", *(f"rate {rate}" for rate in rates)], rows)


def highest_that_stand(groups: Groups) -> dict[int, float]:
    """{lag: the highest learning rate at which, as at all lower ones, every seed stands}; 0 where there is none."""
    standing: dict[int, dict[float, bool]] = {}
    for variant, runs in groups.items():
        lag, rate = variant.removeprefix("lag-").split("-lr-")
        standing.setdefault(int(lag), {})[float(rate)] = all(outcome(run) == "stands" for run in runs)
    found = {}
    for lag, rates in sorted(standing.items()):
        fails = min((rate for rate, stands in rates.items() if not stands), default=float("inf"))
        found[lag] = max((rate for rate in rates if rate < fails), default=0.0)
    return found


def survivors_table(groups: Groups, rate: float) -> str:
    """A row for each variant: outcomes, Fisher's p against the first, pass rate at the end, tokens to `rate`."""
    first = next(iter(groups.values()))
    rows: list[Row] = []
    for variant, runs in groups.items():
        stand, base = (sum(outcome(run) == "stands" for run in some) for some in (runs, first))
        p = fisher_exact([[stand, len(runs) - stand], [base, len(first) - base]]).pvalue
        known = [tokens for run in runs if np.isfinite(tokens := needed(run, rate, "tokens"))]
        rows.append(
            [
                variant,
                str(len(runs)),
                counted(runs),
                "–" if runs is first else f"{p:.2f}",
                with_ends(interval([final(run) for run in runs])),
                with_ends(interval(known)) + ("" if len(known) == len(runs) else f" ({len(known)} of {len(runs)})"),
                amount(float(np.mean([over_steps(run, "ess") for run in runs]))),
                with_ends(interval([e for run in runs if np.isfinite(e := entropy_at(run, rate))])),
            ]
        )
    head = [
        "variant",
        "seeds",
        "outcome",
        "p",
        "pass rate at the end",
        f"tokens to {rate:g}",
        "ESS",
        f"entropy at {rate:g}",
    ]
    return table(head, rows)


def entropy_at(run: Evaluations, rate: float) -> float:
    """Entropy of the steps before the first evaluation that reaches a pass rate; NaN if none does."""
    reached = np.flatnonzero(run.rates >= rate)
    return float(run.points["entropy"][reached[0]]) if reached.size else math.nan


def entropy_table(groups: Groups, rates: Sequence[float] = (0.3, 0.5, 0.7)) -> str:
    """A row for each variant: mean entropy when each pass rate is first reached."""
    rows = []
    for variant, runs in groups.items():
        found = [[e for run in runs if np.isfinite(e := entropy_at(run, rate))] for rate in rates]
        rows.append([variant, str(len(runs)), *(with_ends(interval(some)) for some in found)])
    return table(["variant", "seeds", *(f"entropy at {rate:g}" for rate in rates)], rows)


def parts_table(groups: Groups) -> str:
    """What the ratio is made of: a row for the runs that stand, and one for those that fall, up to their fall."""
    rows = []
    for name in OUTCOMES[:2]:
        runs = [run for some in groups.values() for run in some if outcome(run) == name]
        parts: list[list[float]] = [[], [], []]
        for run in runs:
            until = fall_of(run) or len(run.rates)
            for part, column in zip(parts, ("mismatch", "staleness", "ess"), strict=True):
                values = run.points[column][1:until]
                part.append(float(np.mean(values[np.isfinite(values)][-3:])) if np.isfinite(values).any() else math.nan)
        cells = [[v for v in part if np.isfinite(v)] for part in parts]
        medians = [f"{np.median(v):.2g} ({min(v):.2g} to {max(v):.2g})" if v else "–" for v in cells]
        rows.append([{"stands": "stand", "falls": "fall"}[name], str(len(cells[1])), *medians])
    return table(["runs that", "n", "mismatch, nats", "staleness, nats", "ESS"], rows)


def retired_table(reviews: pd.DataFrame) -> str:
    """A row for each range of ages: reviews, the share of right rollouts, and of prompts as good as when they retired.

    `reviews` is the file of evidence/retired.py. Intervals are over runs.
    """
    rows = []
    for low, high in itertools.pairwise(AGES):
        some = reviews[(reviews["age"] > low) & (reviews["age"] <= high)]
        share = (some["right"] / some["rollouts"]).groupby(some["run"])
        solved = (some["right"] >= 0.9 * some["rollouts"]).groupby(some["run"])
        age = f"{low + 1} to {high}" if math.isfinite(high) else f"more than {low}"
        rows.append([age, str(len(some)), with_ends(interval(share.mean())), with_ends(interval(solved.mean()))])
    return table(["steps since then", "reviews", "right rollouts", "prompts at .9 or more"], rows)


def down(runs: Sequence[Evaluations]) -> str:
    """How many do not stand: "2 of 7"."""
    return f"{sum(outcome(run) != 'stands' for run in runs)} of {len(runs)}"


def findings(found: Mapping[str, Groups]) -> str:
    """What the tables say, in a sentence each: runs that do not stand, of all."""
    said = []
    if stress := found.get("stress"):
        base, *others = stress
        cells = ", ".join(f"{name} {down(stress[name])}" for name in others)
        said.append(
            f"**What keeps a run alive?** At a lag of 8 and a rate of 7e-4 the recipe ({base}) goes down in "
            f"{down(stress[base])} runs, and with one change: {cells}."
        )
    if cells := found.get("survivors"):
        ranked = sorted(cells, key=lambda name: np.mean([outcome(run) == "stands" for run in cells[name]]))
        listed = ", ".join(f"{name} {down(cells[name])}" for name in reversed(ranked))
        said.append(f"**Which loss, which mask?** At a rate of 1e-3, from best to worst: {listed}.")
    if lab := found.get("staleness"):
        highest = ", ".join(f"{rate:g} at {lag}" for lag, rate in highest_that_stand(lab).items() if rate)
        said.append(f"**How old may a token be?** The highest rate at which all runs stand, by lag: {highest}.")
    return "\n".join(f"- {sentence}" for sentence in said)


def page(found: Mapping[str, Groups], reviews: pd.DataFrame | None = None, rate: float = 0.5) -> str:
    """Markdown; of LAB those that have runs."""
    text = [
        "# How old may a token be, and what keeps a run standing",
        findings(found),
        "Graded task, torch engine, 1.2M sampled tokens, a lag that is held. A run *falls* where an evaluation lies "
        "more than .1 below the best before it, *never rises* if it gains no more than that, else *stands*; it *goes "
        "down* if it does not stand. The p is of Fisher's exact test against the first row, not corrected for the "
        "number of rows. Settings and rules were committed before the runs, and none is left out. Three seeds were "
        "planned for the map and seven for the other tables; conclude nothing from rows that have fewer.",
    ]
    if lab := found.get("staleness"):
        text += [
            "## Lag and learning rate",
            "The paper of the staleness rule (arXiv 2607.01083) expects a stable rate that goes as 1 / lag. Cells: "
            "outcomes; pass rate at the end; effective sample size.",
            map_table(lab),
        ]
    cells = (
        ("stress", "The recipe without one ingredient, and other losses, at a rate of 7e-4"),
        ("survivors", "Which losses and which masks survive, at a rate of 1e-3"),
        ("precision", "16 bits, with real vLLM, at a rate of 7e-4"),
    )
    for name, head in cells:
        if groups := found.get(name):
            text += [f"## {head}", "A lag of 8.", survivors_table(groups, rate)]
    if len(lab := {f"{name}/{variant}": runs for name in LAB for variant, runs in found.get(name, {}).items()}) > 1:
        text += [
            "## What the ratio is made of before a fall",
            "The ratio of trainer and generator is the mismatch of the two programs at one version times the staleness "
            "of the weights (arXiv 2605.12070). Root mean squares of their logarithms, and the effective sample size, "
            "over the last three evaluations before the fall, or of the run: median over runs, and range.",
            parts_table(lab),
        ]
    if batch := found.get("batch"):
        text += [
            "## Entropy at equal pass rate",
            "Three batch sizes at equal tokens, and a lag that is not held.",
            entropy_table(batch),
        ]
    if reviews is not None:
        text += [
            "## Are retired prompts still solved?",
            f"Runs with `--review` ({reviews['run'].nunique()}), in which some retired prompts come again.",
            retired_table(reviews),
        ]
    return "\n\n".join(text) + "\n"
