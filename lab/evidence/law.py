"""How well the law held: runs are fitted to their beginning, and the fit is held against what came.

    python lab/evidence/law.py      # its tables and pictures, on RESULTS.md and results/law.md (`make -C lab refit`)

C_mid is measured here without a fit, so that runs can be sorted by how far their data reach before anything is fitted.
The ceiling of the graded task is known by construction (tasks/arithmetic.py).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from pages import fill, markdown
from runs import RESULTS, Run, members
from scipy.stats import gmean
from tables import FALL, Groups, compute_to, depths, fit_to, fitted, interval

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from curves import plot_fits, variance
from forecast import Forecast, curve, plot_curves

from tasks.arithmetic import CEILING

AXIS = "tokens"
PLATEAU = 8  # evaluations at the end of a run
CUTS = {"a quarter": 0.25, "half": 0.5, "all of it": 1.0}  # of a run's compute
TASKS = {"graded": "law", "chain": "chain"}  # and the file of a run
REACHES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)  # C_mid


def plateau(run: Run) -> float:
    """Mean of the run's last evaluations."""
    return float(run.rates[-PLATEAU:].mean())


def half_gain(run: Run) -> float:
    """C_mid as measured: where straight lines between evaluations first reach half of the gain."""
    return compute_to(run.points[AXIS], run.rates, (run.rates[0] + plateau(run)) / 2)


def reach_of(run: Run, share: float) -> float:
    """How far `share` of the run reaches, in C_mid as measured; NaN for a run that ends no higher than it began."""
    C_mid = half_gain(run)
    return share * float(run.points[AXIS][-1]) / C_mid if C_mid > 0 else math.nan


def outcome(run: Run) -> str:
    """It `never rises` if no evaluation lies as far above the first as a fall does below the best."""
    if run.rates.max() - run.rates[0] <= FALL:
        return "never rises"
    if depths(run.rates).max() > FALL:
        return "falls"
    return "stands"


def holds(fit: Forecast, A: float) -> bool:
    """Whether the interval of A does."""
    low, high = fit.A_interval
    return low <= A <= high


def share_of(values: Sequence[bool]) -> str:
    """`18 of 20`."""
    return f"{sum(values)} of {len(values)}"


# ----------------------------------------------------------------------------------------------------- by the cut


def judge(run: Run, share: float) -> dict[str, float]:
    """The fit to the first `share` of a run, against its last evaluation and against its ceiling."""
    f = fitted(run, AXIS, share)
    C = run.points[AXIS][-1]
    low, high = f.interval(C, noise=True)[:, 0]
    return {
        "reach": reach_of(run, share),
        "inside": low <= run.rates[-1] <= high,
        "error": float(f.predict(C, f.form)) - run.rates[-1],
        "width": high - low,
        "identifiable": f.identifiable,
        "holds the ceiling": holds(f, CEILING),
        "holds the plateau": holds(f, plateau(run)),
    }


def cut_row(name: str, share: float, runs: Sequence[Run], known: bool = True) -> dict[str, str]:
    """A row of the table: these runs, fitted to `share` of their compute; `known`: their ceiling is CEILING."""
    results = pd.DataFrame([judge(run, share) for run in runs])
    row = {"fitted": name, "runs": str(len(runs)), "C_mid seen, median": f"{results['reach'].median():.1f}"}
    inside, error, width = "end inside its 95 % interval", "mean error [95 %]", "width of the interval, median"
    errors = results["error"].dropna()
    row |= dict.fromkeys((inside, error, width), "–")
    if share < 1:  # at the end there is nothing left to predict
        row[inside] = share_of(results["inside"])
        row[width] = f"{results['width'].median():.3f}"
    if share < 1 and len(errors):
        row[error] = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(errors))
    row["ceiling identifiable"] = share_of(results["identifiable"])
    row["A holds .80"] = share_of(results["holds the ceiling"]) if known else "–"
    row["A holds the plateau"] = share_of(results["holds the plateau"])
    return row


def noise_ratio(run: Run) -> float:
    """RMSE of the fit to the whole run, over the binomial noise of its evaluations."""
    f = fitted(run, AXIS)
    noise = np.mean(variance(f.fit.predict(f.fit.C), f.fit.n))
    return f.fit.rmse / math.sqrt(noise)


def summary(runs: Sequence[Run]) -> str:
    """How well the law held over these runs: the block of RESULTS.md."""
    table = pd.DataFrame([cut_row(name, share, runs) for name, share in CUTS.items()])
    ratios = [noise_ratio(run) for run in runs]
    return "\n\n".join(
        [
            f"{len(runs)} runs of the graded task, whose ceiling is {CEILING:g} by construction. Errors are predicted "
            "minus measured pass rate at the last evaluation. The plateau is the mean of a run's last "
            f"{PLATEAU} evaluations.",
            markdown(table),
            f"RMSE of the fit to a whole run over the binomial noise of its evaluations: median {np.median(ratios):.2f}"
            f", largest {max(ratios):.2f}; at most 1.3 in {share_of([ratio <= 1.3 for ratio in ratios])}.",
        ]
    )


# --------------------------------------------------------------------------------------------------- by the reach


@cache
def identifiable_from(run: Run) -> float:
    """The compute from which on the fits to the run up to each evaluation are identifiable; inf if there is none."""
    C = run.points[AXIS]
    known = math.inf
    for now in C[::-1]:  # `fit_to` keeps no fit: there are thousands, of a quarter of a megabyte each
        if now <= 0 or not fit_to(run, AXIS, now / C[-1]).identifiable:
            break
        known = float(now)
    return known


def cut_at(run: Run, reach: float) -> dict[str, float] | None:
    """A run fitted up to so many C_mid, against its evaluation at twice the compute of the last point that was fitted.
    `again` is `ask_again` over `identifiable_from`, NaN where the fit is identifiable, or the run never is.

    None where twice the compute is beyond the end of the run, or fewer than four evaluations are seen."""
    C = run.points[AXIS]
    until = reach * half_gain(run)
    seen = C[until >= C]
    if 2 * until > 1.02 * C[-1] or seen.size < 4:
        return None
    f = fit_to(run, AXIS, float(until / C[-1]))
    again = math.nan
    if not f.identifiable and identifiable_from(run) < math.inf:
        again = f.ask_again() / identifiable_from(run)
    twice = int(np.argmin(np.abs(C - 2 * seen[-1])))
    low, high = f.interval(C[twice], noise=True)[:, 0]
    return {
        "reach": reach,
        "inside": low <= run.rates[twice] <= high,
        "holds": holds(f, plateau(run)),
        "width": np.ptp(f.interval(C[twice])),
        "width of A": np.ptp(f.A_interval),
        "identifiable": f.identifiable,
        "again": again,
    }


def reach_table(runs: Sequence[Run]) -> pd.DataFrame:
    """These runs by how far the data reach, in C_mid as measured."""
    cuts = [cut_at(run, reach) for reach in REACHES for run in runs]
    results = pd.DataFrame([cut for cut in cuts if cut])
    rows = []
    for reach, group in results.groupby("reach"):
        sure = group[group["identifiable"]]
        again = np.log(group["again"].dropna()).abs()
        row = {
            "data reach": f"{reach:g} C_mid",
            "runs": len(group),
            "inside": group["inside"].sum(),
            "A holds": group["holds"].sum(),
            "width": f"{group['width'].median():.3f}",
            "A's width": f"{group['width of A'].median():.3f}",
            "identifiable (A misses the plateau)": f"{group['identifiable'].mean():.0%} ({share_of(~sure['holds'])})",
            "ask again": f"{(again <= math.log(1.5)).mean():.0%} ({len(again)})" if len(again) else "–",
        }
        rows.append(row)
    return pd.DataFrame(rows)


# ---------------------------------------------------------------------------------------------------------- pages


def is_graded(run: Run) -> bool:
    """Whether it is a run of the graded task."""
    return "--dataset graded" in run.flags and "--task" not in run.flags


def has_known_ceiling(run: Run) -> bool:
    """Whether a graded run is of all problems and evaluated as it is trained: else its ceiling is another."""
    return "--difficulty" not in run.flags and "--eval_temperature" not in run.flags


def runs_in(published: Mapping[str, Groups], *names: str) -> list[Run]:
    """The runs of these comparisons, each once."""
    runs = {}
    for name in names:
        for group in published[name].values():
            runs |= {run.name: run for run in group}
    return list(runs.values())


def draw(recipes: Groups) -> None:
    """The pictures of README.md and RESULTS.md: two recipes, forecasts of published runs, and what came."""
    picture = ROOT / "docs" / "grpo.png"
    grpo = recipes["deepseek-grpo"]
    seeds = {run.seed for run in grpo}
    scalerl = [run for run in recipes["scalerl"] if run.seed in seeds]
    groups = {"ScaleRL": scalerl, "plain GRPO": grpo}
    fits = {name: [fitted(run, "flops").fit for run in runs] for name, runs in groups.items()}
    figure = plot_fits(fits, "flops", picture)
    start, end = (gmean([compute_to(run.points["flops"], run.rates, 0.5) for run in runs]) for runs in groups.values())
    (axes,) = figure.axes
    axes.annotate("", (end, 0.5), (start, 0.5), arrowprops={"arrowstyle": "->"})
    axes.text(math.sqrt(start * end), 0.51, f"{end / start:.1f} times", ha="center")
    axes.axhline(CEILING, color="gray", ls="--", lw=1)
    figure.savefig(picture, dpi=130)
    paper = curve(RESULTS / "paper_8B_run.jsonl", 0.25, "The paper's 8B run")
    plot_curves([[paper._replace(x="GPU-hours")]], ROOT / "docs" / "law.png")
    tasks = [curve(RESULTS / f"{file}.jsonl", 0.5, f"Task {name}") for name, file in TASKS.items()]
    plot_curves([tasks], RESULTS / "law.png")


def main() -> None:
    """Remakes the tables and the pictures."""
    published = members()
    every = [run for run in runs_in(published, *published) if is_graded(run)]
    law = runs_in(published, "law")
    groups = {  # RESULTS.md has the law's own rows
        "law-greedy": runs_in(published, "law-greedy"),
        "3 C_mid": [run for run in every if has_known_ceiling(run) and reach_of(run, 0.5) >= 3],  # as the paper's fits
    }
    rows = [cut_row(f"{name}, {cut}", share, runs) for name, runs in groups.items() for cut, share in CUTS.items()]
    chain = runs_in(published, "chain")
    rows += [cut_row(f"chain, {cut}", CUTS[cut], chain, known=False) for cut in ("a quarter", "half")]
    standing = [run for run in every if outcome(run) == "stands"]
    fill(RESULTS.parent / "RESULTS.md", {"law": summary(law)})
    fill(RESULTS / "law.md", {"cuts": markdown(pd.DataFrame(rows)), "reach": markdown(reach_table(standing))})
    draw(published["recipes"])


if __name__ == "__main__":
    main()
