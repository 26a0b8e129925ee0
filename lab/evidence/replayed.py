"""Replay's predictions beside what runs measured: the table of lab/replay.md, and its picture, from results/replay.csv.

    python lab/evidence/replayed.py

A row is a variant in a setting. `tokens`, `low`, `high`: predicted, relative to the recipe's, with replay's interval.
`measured`: tokens to a pass rate of .5 over the recipe's, the geometric mean over `pairs` of runs with equal seeds;
empty before there are any. `spread`: of the logarithm of such a ratio between seeds, known from earlier runs. Its share
in the mean over pairs widens the interval that should hold what is measured.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pages import fill, markdown
from runs import RESULTS

ROOT = Path(__file__).resolve().parents[2]
LEVEL = 1.96  # 95 %
ALIKE = 0.85, 1.18  # ratios between these say nothing of a sign
SHOWN = 0.7, 6.0  # the ratios in the picture
TITLES = {"blind": "Blind test", "known": "Known answers"}


def widened(rows: pd.DataFrame, sign: int) -> np.ndarray:
    """The lower (-1) or upper (1) end of the interval for what is measured, as a logarithm."""
    center, end = np.log(rows["tokens"]), np.log(rows["low" if sign < 0 else "high"])
    return center + sign * np.hypot(end - center, LEVEL * rows["spread"] / np.sqrt(rows["pairs"]))


def summary(rows: pd.DataFrame) -> dict[str, str]:
    """The bars of one group of rows."""
    truth, guess = np.log(rows["measured"]), np.log(rows["tokens"])
    inside = (np.log(rows["low"]) <= truth) & (truth <= np.log(rows["high"]))
    held = (widened(rows, -1) <= truth) & (truth <= widened(rows, 1))
    told = rows[(rows["measured"] < ALIKE[0]) | (rows["measured"] > ALIKE[1])]
    right = (told["tokens"] > 1) == (told["measured"] > 1)
    return {
        "variants": str(len(rows)),
        "pairs": "{}–{}".format(rows["pairs"].min(), rows["pairs"].max()),
        "Spearman": f"{truth.corr(guess, method='spearman'):.2f}",
        "median log error": f"{(truth - guess).abs().median():.2f}",
        "inside": f"{inside.sum()}",
        "with luck": f"{held.sum()}",
        "right sign": f"{right.sum()}/{len(told)}",
    }


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Predicted against measured, with replay's intervals, and names where there is room."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.transforms import Bbox

    tests = list(rows.groupby("test", sort=False))
    figure, axes = pyplot.subplots(1, len(tests), figsize=(4.6 * len(tests), 4.4), layout="constrained", squeeze=False)
    for ax, (test, own) in zip(axes[0], tests, strict=True):
        ax.plot(SHOWN, SHOWN, color="gray", linewidth=0.8)
        for setting, some in own.groupby("setting", sort=False):
            [line] = ax.plot(some["measured"], some["tokens"], "o", label=setting)
            ax.vlines(some["measured"], some["low"], some["high"].clip(upper=9), color=line.get_color(), alpha=0.3)
        ax.set(xscale="log", yscale="log", xlim=SHOWN, ylim=SHOWN, title=f"{TITLES[test]}: {len(own)} predictions")
        ax.set(xlabel="tokens measured, over the recipe's", ylabel="predicted from runs of the recipe alone")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks([1, 2, 4], ["1", "2", "4"])
            axis.set_ticks([], minor=True)
        ax.legend(loc="upper left")
    figure.draw_without_rendering()
    for ax, (_, own) in zip(axes[0], tests, strict=True):
        taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in ax.transData.transform(own[["measured", "tokens"]])]
        taken.append(ax.get_legend().get_window_extent())
        for _, row in own[(own["measured"] - 1).abs() > 0.15].sort_values("measured", ascending=False).iterrows():
            for side, shift in (("left", (6, 0)), ("right", (-6, 0)), ("center", (0, -10))):
                place = {"xytext": shift, "textcoords": "offset points", "ha": side, "va": "center"}
                name = ax.annotate(row["variant"], (row["measured"], row["tokens"]), fontsize=8, **place)
                box = name.get_window_extent()
                if not box.count_overlaps(taken) and box.x1 < ax.get_window_extent().x1:
                    taken.append(box)
                    break
                name.remove()
    figure.savefig(path, dpi=180)


def main() -> None:
    rows = pd.read_csv(RESULTS / "replay.csv")
    known = rows[rows["measured"].notna()]
    blind = known[known["test"] == "blind"]
    groups = [("blind", blind), *known.groupby("setting", sort=False)]  # the known answers share measured ratios
    table = pd.DataFrame([{"": name} | summary(own) for name, own in groups])
    fill(ROOT / "lab" / "replay.md", {"replay": markdown(table)})
    draw(known, ROOT / "lab" / "pictures" / "replay.png")


if __name__ == "__main__":
    sys.exit(main())
