"""What the laws of the other two papers say of our own runs: model size (fit_power_law.py, arXiv 2509.25300) and
rollouts (isocompute.py, arXiv 2603.12151), beside what the runs did.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from curves import Evaluations
from figures import UNSEEN, Groups, Row, first, interval, needed, pooled_sd
from report import amount, joined, mean_of, paper_row, save, table, told_apart, with_ends

import fit_power_law
import isocompute
from fit_power_law import PowerLaw
from isocompute import Grid, Run


def parameters(size: str) -> int:
    """How many the model has, those of the embedding, which is the head's too, among them."""
    return {"xs": 57_920, "s": 101_760, "m": 226_304, "l": 505_280, "xl": 1_009_344}[size]


UNTIL = 0.5  # pass rate
RISE = (
    "The law is a straight line of log L against log X, and our curves are sigmoids with a ceiling of .80, so it can "
    f"only describe their rise: the evaluations after the first, up to the one that reaches a pass rate of {UNTIL:g}. "
    "*Own K* is the slope of a size's own line, *K(N)* that of the law, with 95 %."
)
AS_PREDICTED = 1.1  # a slope within this factor of the predicted one; ours, since the paper gives none
AXES = {"flops": "FLOPs", "tokens": "sampled tokens"}
Sizes = Mapping[int, Sequence[Evaluations]]  # parameters -> runs


def rise(run: Evaluations, size: int, axis: str) -> np.ndarray:
    """(K, 3): N, X, L of the evaluations in which a run rises."""
    reached = first(run.rates >= UNTIL)
    rising = slice(1, None if reached is None else reached + 1)
    X, R = run.points[axis][rising], run.rates[rising]
    return np.stack([np.full(X.size, float(size)), X, 1 - R], axis=1)


def law_of(sizes: Sizes, axis: str) -> tuple[PowerLaw, np.ndarray]:
    """The law of all sizes, and the points (K, 3) that it was fitted to."""
    points = np.concatenate([rise(run, size, axis) for size, runs in sizes.items() for run in runs])
    return fit_power_law.fit(*points.T), points


def slope_ratio(points: np.ndarray) -> float:
    """The largest size's own slope over that which the law of the others gives it."""
    N = points[:, 0]
    own = fit_power_law.fit(*points.T).sizes[N.max()].own_K
    return own / fit_power_law.fit(*points[N < N.max()].T).K(N.max())


def size_table(sizes: Sizes, laws: Mapping[str, PowerLaw]) -> str:
    """One row a size: what was measured, and the slopes."""
    head = ["parameters", "runs", *(f"{unit} to {UNTIL:g}" for unit in AXES.values())]
    head += [f"{what} ({unit})" for unit in AXES.values() for what in ("own K", "K(N)")]
    rows = []
    for size, runs in sizes.items():
        cells = [mean_of([needed(run, UNTIL, axis) for run in runs], ends=False) for axis in AXES]
        for law in laws.values():
            low, high = law.K_interval(size)
            cells += [f"{law.sizes[size].own_K:.3f}", f"{law.K(size):.3f} [{low:.3f}, {high:.3f}]"]
        rows.append([amount(size), str(len(runs)), *cells])
    return told_apart(head, rows)


def known(value: float, ends: tuple[float, float]) -> str:
    """`value [low, high]`, or that it is not known, where the interval is wider than a million times."""
    return "not known" if ends[1] > 1e6 * ends[0] else with_ends((value, *ends))


def size_findings(sizes: Sizes) -> list[Row]:
    """The paper's statements on model size against these runs, seed by seed, in PAPER_HEAD's columns: the
    larger model needs less data and less compute, learns along a steeper line, and the smaller ones predict how
    steep."""
    least, most = min(sizes), max(sizes)
    seeds = sorted(set.intersection(*({run.seed for run in runs} for runs in sizes.values())))
    found = []
    for seed in seeds:
        some = {size: [run for run in runs if run.seed == seed] for size, runs in sizes.items()}
        law, points = law_of(some, "flops")
        more = [needed(some[most][0], UNTIL, axis) / needed(some[least][0], UNTIL, axis) for axis in AXES]
        found.append([*more, law.sizes[most].own_K / law.sizes[least].own_K, slope_ratio(points)])
    margin, smallest = math.log(AS_PREDICTED), amount(least)
    claims = [
        *((smallest, f"{unit} to a pass rate of {UNTIL:g}", (-math.inf, 0.0)) for unit in AXES.values()),
        (smallest, "slope K of its own line (FLOPs)", (0.0, math.inf)),
        ("as the others predict", "slope K (FLOPs)", (-margin, margin)),
    ]
    rows = []
    for (other, figure, theirs), apart in zip(claims, np.log(found).T, strict=True):
        names, sd = (amount(most), other, figure), pooled_sd([apart])
        rows.append(paper_row(names, theirs, interval(apart), len(apart), sd, relative=True))
    return rows


def size_page(sizes: Sizes) -> str:
    """Markdown."""
    found = {axis: law_of(sizes, axis) for axis in AXES}
    said = [
        f"Over {AXES[axis]}: K_max {known(law.K_max, law.K_max_interval)}, N0 in parameters "
        f"{known(law.N0, law.N0_interval)}, RMSE of log L {law.rmse:.3f} over {len(points)} points."
        for axis, (law, points) in found.items()
    ]
    said += dict.fromkeys(f"Note: {note}." for law, _ in found.values() for note in law.notes)
    sizes_and_slopes = size_table(sizes, {axis: law for axis, (law, _) in found.items()})
    return joined("# The power law over model size, on our own runs", RISE, sizes_and_slopes, " ".join(said))


def write_sizes(found: Groups, folder: Path) -> list[Row]:
    """FOLDER/power-law.*, from the finished runs of each size by name; `size_findings` is returned."""
    sizes = dict(sorted((parameters(name), runs) for name, runs in found.items()))
    law, points = law_of(sizes, "flops")
    fit_power_law.plot(law, points, np.full(len(points), True), str(folder / "power-law.png"))
    save(size_page(sizes), folder / "power-law.md")
    return size_findings(sizes)


# ---------------------------------------------------------------------------------------------- rollouts a prompt


def grid_of(found: Groups) -> Grid | str:
    """The analysis of these runs by isocompute.py, or why there is none."""
    named = [(map(int, name.split("x")), curve) for name, curves in found.items() for curve in curves]
    try:
        return isocompute.fit_grid([Run(*shape, curve.points["step"], curve.rates) for shape, curve in named])
    except ValueError as error:
        return str(error)


def best_table(grids: Mapping[str, Grid]) -> str:
    """n* at a few budgets within what each grid compares."""
    rows = []
    for name, grid in grids.items():
        for C in np.geomspace(grid.C[0], grid.C[-1], 4):
            at = int(np.argmin(np.abs(np.log(grid.C / C))))
            low, high = grid.law.interval(C)
            by_law = f"{grid.law(C):.3g} [{low:.3g}, {high:.3g}]"
            rows.append([name, amount(C), str(grid.best_n[at]), by_law, f"{grid.reward[at]:.3f}"])
    return table(["half", "completions C", "best n tried", "n* by its law [95 %]", "pass rate there"], rows)


def at_end(found: Groups, column: str) -> pd.DataFrame:
    """(n, seed): a column at the end of the runs, mean of the last two evaluations and of the B_p."""
    rows = [
        (int(name.split("x")[1]), curve.seed, curve.points[column][-2:].mean())
        for name, curves in found.items()
        for curve in curves
    ]
    return pd.DataFrame(rows, columns=["n", "seed", "end"]).groupby(["n", "seed"])["end"].mean().unstack()


def grid_findings(halves: Mapping[str, Grid | str], found: Mapping[str, Groups]) -> list[Row]:
    """The paper's statements on n* against these grids, each after the name of its comparison, in PAPER_HEAD's
    columns. n* comes from all seeds at once, with the interval of its bootstrap; best and worst of k seed by seed."""
    grids = {name: half for name, half in halves.items() if isinstance(half, Grid)}
    rows = [
        [f"grid-{name}", "–", "–", "log2 n*", "higher", why, "–", "–", f"**{UNSEEN}**"]
        for name, why in halves.items()
        if isinstance(why, str)
    ]
    seeds = len({run.seed for half in found.values() for runs in half.values() for run in runs})

    def log2_n(half: str, C: float) -> np.ndarray:
        """(1 + draws,): what the law says, and the draws of its bootstrap."""
        law = grids[half].law
        return np.log2([law(C), *isocompute.n_star(C, *law.draws.T)])

    def add(half: str, names: tuple[str, str, str], theirs: tuple[float, float], value: np.ndarray) -> None:
        ours = (value[0], *np.quantile(value[1:], (0.025, 0.975)).tolist())
        rows.append([f"grid-{half}", *paper_row(names, theirs, ours, seeds, math.nan)])

    for half, grid in grids.items():
        names = (f"C = {amount(grid.C[-1])}", f"C = {amount(grid.C[0])}", "log2 n*, growth beyond 1")
        # the law cannot fall, so 0 would prove nothing
        add(half, names, (0.0, math.inf), log2_n(half, grid.C[-1]) - log2_n(half, grid.C[0]) - 1)
    if len(grids) == 2:
        C = min(grid.C[-1] for grid in grids.values())
        names = ("hard", "easy", f"log2 n* at C = {amount(C)}")
        add("hard", names, (-math.inf, 0.0), log2_n("hard", C) - log2_n("easy", C))
    for half, column in (("easy", "worst"), ("hard", "best")):
        if half in found:
            ends = at_end(found[half], column)
            apart = (ends.iloc[-1] - ends.iloc[0]).dropna()
            names = (f"n = {ends.index[-1]}", f"n = {ends.index[0]}", f"{column} of k at the end")
            row = paper_row(names, (0.0, math.inf), interval(apart), len(apart), pooled_sd([apart]))
            rows.append([f"grid-{half}", *row])
    return rows


def grid_page(halves: Mapping[str, Grid | str]) -> str:
    """Markdown."""
    grids = {name: half for name, half in halves.items() if isinstance(half, Grid)}
    return joined(
        "# IsoCompute on our own grids",
        "The easy and the hard half of the graded task's problems, by how often the starting model solves them; every "
        "run of a grid samples as many completions, on-policy, with a learning rate that goes with the square root of "
        "the batch. Fitted as isocompute.py says.",
        best_table(grids) if grids else "",
        *(f"No law for the {name} half: {why}." for name, why in halves.items() if isinstance(why, str)),
    )


def write_grids(found: Mapping[str, Groups], folder: Path) -> list[Row]:
    """FOLDER/isocompute.* and a picture of each half, from the finished runs of each grid by its name; returns
    `grid_findings`."""
    halves = {name: grid_of(runs) for name, runs in found.items()}
    for name, half in halves.items():
        if isinstance(half, Grid):
            isocompute.plot(half, str(folder / f"isocompute-{name}.png"))
    save(grid_page(halves), folder / "isocompute.md")
    return grid_findings(halves, found)
