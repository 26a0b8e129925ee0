"""Makes the table and the pictures of README.md from curves.csv.

python lab/ladder/publish.py             # from the curves as they are
python lab/ladder/publish.py FOLDER      # all runs that rungs.py left in FOLDER go to curves.csv first
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from run import NAMES, curves_of, draw, measure_of, published
from rungs import COLUMNS, PAGE, ROOT, RUNGS, Row
from scipy.stats import ttest_1samp

sys.path.insert(0, str(ROOT / "lab" / "evidence"))
from pages import fill, markdown
from tables import interval


def reached(curve: list[Row], axis: str, rate: float | None) -> float:
    """Compute at which a line between evaluations first reaches the rate, NaN if none does; or, without a rate, the
    mean of the last two pass rates."""
    rates, compute = ([row[key] for row in curve] for key in ("pass_rate", axis))
    if rate is None:
        return float(np.mean(rates[-2:]))
    after = next((i for i, value in enumerate(rates) if value >= rate), None)
    if after is None:
        return np.nan
    return float(np.interp(rate, rates[max(after - 1, 0) : after + 1], compute[max(after - 1, 0) : after + 1]))


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
        "p": ttest_1samp(apart, 0).pvalue,
        "seen here": "a gain" if (ends[0] > 0) == (rate is None) else "a cost",
    }


def holm(p: pd.Series) -> pd.Series:
    """Corrects n p-values: the least times n, the next times n - 1, ..., none below the one before, none above 1."""
    return (p.sort_values() * np.arange(len(p), 0, -1)).cummax().clip(upper=1).reindex(p.index)


def gather(folder: Path) -> None:
    """curves.csv from a folder of runs."""
    runs = [path.read_text().splitlines()[1:] for path in sorted(folder.glob("*.csv"))]
    lines = [",".join(COLUMNS), *(line for run in runs for line in run)]
    PAGE.with_name("curves.csv").write_text("\n".join(lines) + "\n")


def page() -> None:
    """The table and the pictures from curves.csv."""
    rows = published()
    first = {"rung": "[0](#0-grpo)", "adds": NAMES[0], "setting": RUNGS[0]}
    table = pd.DataFrame([first, *(row(rung, rows) for rung in range(1, len(RUNGS)))])
    p = holm(table["p"].dropna())
    table["p"] = p.map("{:.3f}".format)
    table.loc[p.index[p >= 0.05], "seen here"] = "no"
    table = table.fillna("–").rename(columns={"p": "p (Holm)"})
    fill(PAGE, {"ladder": markdown(table)})
    for rung in range(len(RUNGS)):
        draw(rung, rows, PAGE.with_name(f"rung_{rung}.png"))


if __name__ == "__main__":
    if sys.argv[1:]:
        gather(Path(sys.argv[1]))
    page()
