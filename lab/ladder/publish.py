"""Makes the table and the pictures of README.md from curves.csv: python lab/ladder/publish.py"""

import sys

import numpy as np
import pandas as pd
from run import NAMES, draw, measure_of
from rungs import PAGE, ROOT, RUNGS, Row, curves_of, published
from scipy.stats import ttest_1samp

sys.path.insert(0, str(ROOT / "lab" / "evidence"))
from runs import compute_to, holm, interval
from tables import fill, markdown


def reached(curve: list[Row], axis: str, rate: float | None) -> float:
    """Compute to the rate, NaN if it is never reached; or, without a rate, the mean of the last two pass rates."""
    compute, rates = (np.array([row[key] for row in curve]) for key in (axis, "pass_rate"))
    return float(np.mean(rates[-2:])) if rate is None else compute_to(compute, rates, rate)


def row(rung: int, rows: list[Row]) -> dict[str, object]:
    """What a rung's runs show against those of the rung before, paired by seed, with its 95 % interval."""
    axis, rate = measure_of(rung)
    before, after = (
        pd.Series({seed: reached(curve, axis, rate) for seed, curve in curves_of(rows, r, RUNGS[rung]).items()})
        for r in (rung - 1, rung)
    )
    apart = ((after - before) if rate is None else np.log(after / before)).dropna()
    ends = interval(apart)
    text = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*ends)
    if rate is not None:
        text = "{:+.0%} [{:+.0%}, {:+.0%}]".format(*np.expm1(ends))
    return {
        "rung": f"[{rung}](#{rung}-{NAMES[rung].lower().replace(' ', '-')})",
        "adds": NAMES[rung],
        "setting": RUNGS[rung],
        "measure": "pass rate at the end" if rate is None else f"{axis} to {rate:g}",
        "against the rung before": text,
        "pairs": str(len(apart)),
        "p (Holm)": ttest_1samp(apart, 0).pvalue,
        "seen here": "a gain" if (ends[0] > 0) == (rate is None) else "a cost",
    }


def table(rows: list[Row]) -> str:
    """The table: each rung against the one before, and what can be seen after a correction for eight tests."""
    tests = [row(rung, rows) for rung in range(1, len(RUNGS))]
    for cells, p in zip(tests, holm([cells["p (Holm)"] for cells in tests]), strict=True):
        cells["p (Holm)"] = f"{p:.3f}"
        if p >= 0.05:
            cells["seen here"] = "no"
    first = {"rung": "[0](#0-grpo)", "adds": NAMES[0], "setting": RUNGS[0]}
    return markdown(pd.DataFrame([first, *tests]).fillna("–"))


if __name__ == "__main__":
    rows = published()
    fill(PAGE, {"ladder": table(rows)})
    for rung in range(len(RUNGS)):
        draw(rung, rows, PAGE.with_name(f"rung_{rung}.png"))
