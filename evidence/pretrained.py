"""The page docs/results/pretrained.md: a pretrained model on tasks that nobody made for the law, every run with what
its first half foretold of the second."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from comparisons import COMPARISONS
from curves import Evaluations
from figures import Groups, fit_to, outcome
from forecasts import AXIS, forecast_by, reach_of
from report import HEALTH_HEAD, amount, health, joined, share_of, told_apart

from fit_sigmoid import curve, plot_curves

HALF = 0.5  # of a run's tokens
HEAD = [
    "run", "tokens", "in C_mid", "first", "best", "end", "the end, forecast from half", "end inside",
    "later ones inside", "ceilings that fit all of it", "outcome",
]  # fmt: skip


def row(run: Evaluations) -> list[str]:
    """Of the table, in HEAD's columns."""
    half, whole, C = fit_to(run, AXIS, HALF), fit_to(run, AXIS), run.points[AXIS]
    foretold = ["none", "–", "–"]  # too much noise for a fit
    if half.best:
        *_, end = later = [forecast_by(half, run, int(at)) for at in np.flatnonzero(half.C[-1] < C)]
        said = "{:.3f} [{:.3f}, {:.3f}]".format(end.best, *end.evaluation)
        foretold = [said, "yes" if end.inside else "no", share_of([one.inside for one in later])]
    return [
        f"{run.variant} {run.seed}",
        amount(C[-1]),
        f"{reach_of(run, 1.0):.1f}",  # as measured: of a curve in noise the fitted C_mid may be anything
        *(f"{rate:.3f}" for rate in (run.rates[0], run.rates.max(), run.rates[-1])),
        *foretold,
        "{:.2f} to {:.2f}".format(*whole.A_interval) + ", identifiable" * whole.identifiable,
        outcome(run),
    ]


def page(groups: Groups, left_out: Sequence[str]) -> str:
    """Markdown."""
    c = COMPARISONS["pretrained"]
    return joined(
        f"# pretrained: {c.about}",
        f"Setting: `{c.setting}`; "
        + "; ".join(f"*{name}* `{c.variants[name]}`" for name in groups)
        + (f". Left out: {', '.join(left_out)}." if left_out else "."),
        "Every run, fitted to the first half of its tokens: the band is to hold 95 % of the later evaluations.",
        "![pretrained](pretrained.png)",
        told_apart(HEAD, [row(run) for runs in groups.values() for run in runs]),
        told_apart(["variant", *HEALTH_HEAD], [[name, *health(runs)] for name, runs in groups.items()]),
    )


def picture(groups: Groups, path: Path) -> None:
    """A row of panels for each variant, a panel for each seed that all have, with the forecast from half its tokens."""
    rows, seeds = [], min(map(len, groups.values()))
    for runs in groups.values():
        rows.append([])
        for run in runs[:seeds]:
            points = zip(run.points[AXIS], run.rates, run.points["n"], strict=True)
            records = [{AXIS: C, "pass_rate": R, "n_prompts": n, "n_samples": 1} for C, R, n in points]
            rows[-1].append(curve(records, HALF, f"{run.variant} {run.seed}", AXIS))
    plot_curves(rows, path)
