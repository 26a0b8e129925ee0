"""The blind test on public learning curves: the table of lab/results/public.md, from what is published beside it.

    python lab/evidence/public.py            # the marked table, from the results of the test
    python lab/evidence/public.py --again    # prints that of today's forecast, for the curves that have points here

public_results.csv.gz has a row for each curve and cut, with its source; public.csv.gz has the points of the curves
whose repository has a licence, with the licence.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pages import fill, markdown
from runs import RESULTS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from forecast import forecast

CUTS = (0.25, 0.5, 0.75)  # of the compute
SLACK = 0.01  # A's interval is wrong if the level at the end lies farther outside


def interval(answers: pd.DataFrame) -> str:
    """`0.950 [0.90, 0.98]`, the share inside: a mean over curves, for whose interval repositories are drawn again."""
    groups = [group.to_numpy() for _, group in answers.groupby("repo")["inside"]]
    draws = np.random.default_rng(0).integers(len(groups), size=(2000, len(groups)))
    means = [np.concatenate([groups[i] for i in draw]).mean() for draw in draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{answers['inside'].mean():.3f} [{low:.2f}, {high:.2f}]"


def summary(results: pd.DataFrame) -> str:
    """The table by kind and cut."""
    rows = []
    for (kind, cut), curves in results[results["kind"] != "second"].groupby(["kind", "cut"], sort=False):
        answers = curves[curves["outcome"] == "answer"]
        known = answers[answers["identifiable"]]
        wrong = (known["end_level"] < known["A_low"] - SLACK) | (known["end_level"] > known["A_high"] + SLACK)
        means = answers.mean(numeric_only=True)
        row = {
            "curves": f"{kind}, {cut:.0%}",
            "n": len(curves),
            "answers": len(answers),
            "inside [95 %]": interval(answers),
            "width": f"{answers['width'].median():.3f}",
            "interval score": f"{means['interval_score']:.3f}",
            "identifiable (wrong)": f"{len(known)} ({wrong.sum()})",
        }
        if "boot_inside" in means:
            row["inside: bootstrap, covariance"] = f"{means['boot_inside']:.3f}, {means['delta_inside']:.3f}"
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def judge(points: pd.DataFrame, cut: float) -> dict[str, Any]:
    """Today's forecast from the first part of a curve, against the rest."""
    seen = points["x"] <= cut * points["x"].max()
    before = points[seen]
    later = points[~seen]
    f = forecast(before["x"], before["y"], n_samples=None if before["n"].isna().any() else before["n"])
    if not f.allowed:
        return {"outcome": "none", "identifiable": False}
    low, high = f.interval(later["x"], noise=True)
    outside = np.maximum(low - later["y"], 0) + np.maximum(later["y"] - high, 0)
    A_low, A_high = f.A_interval
    return {
        "outcome": "answer",
        "identifiable": f.identifiable,
        "A_low": A_low,
        "A_high": A_high,
        "end_level": points["y"].tail(max(3, len(points) // 10)).mean(),
        "inside": np.mean(outside == 0),
        "width": np.median(high - low),
        "interval_score": np.mean(high - low + 40 * outside),  # 2 / .05
    }


def judge_again(points: pd.DataFrame) -> pd.DataFrame:
    """The results of today's forecast. Training rewards are means of blocks; a rest counts from half a block on."""
    rows = []
    for (kind, _, repo), curve in points.groupby(["kind", "name", "repo"], sort=False):
        size = max(1, len(curve) // 40) if kind == "training" else 1
        blocks = curve[["x", "y", "n"]].groupby(np.arange(len(curve)) // size)
        means = blocks.mean()[blocks.size() >= size / 2]
        rows += [{"repo": repo, "kind": kind, "cut": cut, **judge(means, cut)} for cut in CUTS]
    return pd.DataFrame(rows)


if __name__ == "__main__":
    if "--again" in sys.argv:
        print(summary(judge_again(pd.read_csv(RESULTS / "public.csv.gz"))))
    else:
        fill(RESULTS / "public.md", {"public": summary(pd.read_csv(RESULTS / "public_results.csv.gz"))})
