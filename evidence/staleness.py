"""The page docs/results/staleness.md: at which lag and learning rate runs stand, and what changes it.

`outcome` in figures.py says what a run does. Counts of few runs are compared by Fisher's exact test, without a
correction for their number.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from curves import Evaluations
from figures import Groups, by_outcome, fall_of, final, first, interval, needed, over_steps
from report import amount, joined, mean_of, table, with_ends
from scipy.stats import fisher_exact

# Comparisons that have this page in the place of their own.
LAB = ("staleness", "stress", "survivors", "precision", "recipes-stressed")
AGES = {"1 to 20": 20, "21 to 50": 50, "51 to 100": 100, "more than 100": math.inf}  # steps since a prompt retired
PLURAL = {"stands": "stand", "falls": "fall", "never rises": "never rise"}


def stand(runs: Sequence[Evaluations]) -> int:
    """How many of these runs do."""
    return len(by_outcome(runs)["stands"])


def counted(runs: Sequence[Evaluations]) -> str:
    """ "3 stand", or what the runs did otherwise: "1 stands, 2 fall"."""
    found = {name: len(some) for name, some in by_outcome(runs).items() if some}
    return ", ".join(f"{n} {name if n == 1 else PLURAL[name]}" for name, n in found.items())


def lag_and_rate(variant: str) -> tuple[str, str]:
    """Of `lag-8-lr-7e-4`."""
    lag, rate = variant.removeprefix("lag-").split("-lr-")
    return lag, rate


def map_table(groups: Groups, rate: float) -> str:
    """A row for each lag and a column for each learning rate: outcomes, and means of the pass rate at the end, of the
    tokens to `rate` of the runs that reach it, and of the effective sample size."""
    cells = {}
    for variant, runs in groups.items():
        end, ess = np.mean([final(run) for run in runs]), np.mean([over_steps(run, "ess") for run in runs])
        tokens = [x for run in runs if math.isfinite(x := needed(run, rate, "tokens"))]
        cells[lag_and_rate(variant)] = f"{counted(runs)}; {end:.2f}; {amount(interval(tokens)[0])}; {ess:.2f}"
    lags, rates = (sorted(set(names), key=float) for names in zip(*cells, strict=True))
    rows = [[lag, *(cells.get((lag, rate), "–") for rate in rates)] for lag in lags]
    return table(["lag held at", *(f"rate {rate}" for rate in rates)], rows)


def survivors_table(groups: Groups, rate: float) -> str:
    """A row for each variant: outcomes, Fisher's p against the first, pass rate at the end, tokens to `rate`."""
    base, rows = next(iter(groups.values())), []
    for variant, runs in groups.items():
        p = fisher_exact([[stand(some), len(some) - stand(some)] for some in (runs, base)]).pvalue
        measured = [[final(run) for run in runs], [over_steps(run, "ess") for run in runs]]
        cells = (f"{np.mean(values):.2f}" for values in measured)
        tokens = mean_of([needed(run, rate, "tokens") for run in runs])
        rows.append([variant, counted(runs), "–" if runs is base else f"{p:.2g}", *cells, tokens])
    return table(["variant", "outcome", "p", "end", "ESS", f"tokens to {rate:g}"], rows)


def entropy_at(run: Evaluations, rate: float) -> float:
    """Entropy of the steps before the first evaluation that reaches a pass rate; NaN if none does."""
    reached = first(run.rates >= rate)
    return math.nan if reached is None else float(run.points["entropy"][reached])


def entropy_table(groups: Groups, rates: Sequence[float] = (0.3, 0.5, 0.7)) -> str:
    """A row for each variant: mean entropy when each pass rate is first reached, and over all steps."""
    rows = []
    for variant, runs in groups.items():
        cells = [mean_of([entropy_at(run, rate) for run in runs]) for rate in rates]
        rows.append([variant, len(runs), *cells, mean_of([over_steps(run, "entropy") for run in runs])])
    return table(["variant", "seeds", *(f"at {rate:g}" for rate in rates), "over all steps"], rows)


def parts_table(groups: Groups, head: str) -> str:
    """What the ratio is made of: a row for each group of runs, up to their falls."""
    rows = []
    for name, runs in groups.items():
        parts = pd.DataFrame([last_three(run) for run in runs], columns=["mismatch", "staleness", "ess"])
        shown = [f"{v.median():.2g} ({v.min():.2g} to {v.max():.2g})" if v.count() else "–" for _, v in parts.items()]
        rows.append([name, parts["staleness"].count(), *shown])
    return table([head, "n", "mismatch", "staleness", "ESS"], rows)


def last_three(run: Evaluations) -> pd.Series:
    """Each logged column's mean over the last three evaluations that have it before the run falls, or ends."""
    until = pd.DataFrame(run.points).iloc[1 : fall_of(run)]
    return until.apply(lambda column: column.dropna().tail(3).mean())


def retired_table(reviews: pd.DataFrame) -> str:
    """A row for each range of ages: reviews, the share of right rollouts, and of prompts as good as when they retired.

    `reviews` is the file of evidence/retired.py. Intervals are over runs.
    """
    share = reviews["right"] / reviews["rollouts"]
    ages = pd.cut(reviews["age"], [0, *AGES.values()], labels=list(AGES))
    rows = []
    for age, some in reviews.assign(share=share, solved=share >= 0.9).groupby(ages, observed=False):
        means = some.groupby("run")[["share", "solved"]].mean()
        rows.append([age, len(some), *(with_ends(interval(means[column])) for column in means)])
    return table(["steps since then", "reviews", "right rollouts", "prompts at .9 or more"], rows)


def page(found: Mapping[str, Groups], reviews: pd.DataFrame | None = None, rate: float = 0.5) -> str:
    """Markdown; of LAB those that have runs."""
    text = [
        "# How old may a token be, and what keeps a run standing",
        "The usual setting (docs/results/README.md) to 1.2M tokens, with a lag that is held; the findings are in "
        "[RESULTS.md](../../RESULTS.md#stale-tokens). A run *falls* where an evaluation lies more than .1 below the "
        "best before it, *never rises* if it gains no more than that, else *stands*. The p is of Fisher's exact test "
        "against the first row, not corrected for the number of rows. Settings and rules were committed before the "
        "runs, and none is left out. Three seeds were planned for the map and 16 bits, seven for the other tables; "
        "conclude nothing from fewer.",
    ]
    if lab := found.get("staleness"):
        text += [
            "## Lag and learning rate",
            "The staleness rule (arXiv 2607.01083) expects a stable rate that goes as 1 / lag. Cells: outcomes; pass "
            f"rate at the end; tokens to {rate:g} of the runs that reach it; effective sample size (ESS).",
            map_table(lab, rate),
        ]
    cells = (
        ("stress", "The recipe without one ingredient, and other losses, at a lag of 8 and a rate of 7e-4"),
        ("survivors", "Which losses and which masks survive a lag of 8 at a rate of 1e-3"),
        ("recipes-stressed", "The recipes of the paper's Figure 2 at a rate of 1e-3"),
        ("precision", "16 bits, with real vLLM, at a lag of 8 and a rate of 7e-4"),
    )
    for name, head in cells:
        if groups := found.get(name):
            text += [f"## {head}", survivors_table(groups, rate)]
    if len(lab := [run for name in LAB for runs in found.get(name, {}).values() for run in runs]) > 1:
        outcomes = by_outcome(lab)
        text += [
            "## What the ratio is made of before a fall",
            "The ratio of trainer and generator is the mismatch of the two programs at one version times the staleness "
            "of the weights (arXiv 2605.12070). Root mean squares of their logarithms in nats, and the ESS, over the "
            "last three evaluations before the fall, or of the run: median over runs, and range.",
            parts_table({PLURAL[name]: outcomes[name] for name in ("stands", "falls")}, "runs that"),
        ]
        if groups := found.get("precision"):
            text += [parts_table(groups, "in 16 bits")]
    if batch := found.get("batch"):
        about = "Three batch sizes at equal tokens, and a lag that is not held; DAPO at a lag of 8 and a rate of 1e-3."
        dapo = {name: runs for name, runs in found.get("survivors", {}).items() if name.startswith("dapo")}
        text += ["## Entropy at equal pass rate", about, entropy_table(batch | dapo)]
    if reviews is not None:
        text += [
            "## Are retired prompts still solved?",
            f"Of {reviews['run'].nunique()} runs with `--review`, in which some retired prompts come again.",
            retired_table(reviews),
        ]
    return joined(*text)
