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
from report import amount, paper_row, save, table, with_ends

import fit_power_law
import isocompute
from fit_power_law import Point, PowerLaw
from isocompute import Grid, Run
from tasks.warm_start import parameters

UNTIL = 0.5  # pass rate
RISE = (
    "The law is a straight line of log L against log X, and our curves are sigmoids with a ceiling of .80, so it can "
    "only describe their rise: of each run the evaluations after the first, up to the one that reaches a pass rate of "
    f"{UNTIL:g}."
)
AS_PREDICTED = 1.1  # a slope within this factor of the predicted one; ours, since the paper gives none
AXES = {"flops": "FLOPs", "tokens": "sampled tokens"}
Sizes = Mapping[int, Sequence[Evaluations]]  # parameters -> runs


def rise(runs: Sequence[Evaluations], size: int, axis: str) -> list[Point]:
    """(N, X, L) of the evaluations of these runs in which they rise."""
    points = []
    for curve in runs:
        reached = first(curve.rates >= UNTIL)
        until = curve.rates.size if reached is None else reached + 1
        points += [(float(size), float(curve.points[axis][i]), 1 - float(curve.rates[i])) for i in range(1, until)]
    return points


def law_of(sizes: Sizes, axis: str) -> tuple[PowerLaw, list[Point]]:
    """The law of all sizes, and the points that it was fitted to."""
    points = [point for size, runs in sizes.items() for point in rise(runs, size, axis)]
    return fit_power_law.fit(*np.transpose(points)), points


def slope_ratio(points: Sequence[Point]) -> float:
    """The largest size's own slope over that which the law of the others gives it."""
    largest = max(N for N, *_ in points)
    own = fit_power_law.fit(*np.transpose(points)).sizes[largest].own_K
    others = fit_power_law.fit(*np.transpose([point for point in points if point[0] != largest]))
    return own / others.K(largest)


def size_table(sizes: Sizes, laws: Mapping[str, PowerLaw]) -> str:
    """One row a size: what was measured, and the slopes."""
    head = ["parameters", "runs", *(f"{unit} to {UNTIL:g}" for unit in AXES.values())]
    head += [f"{what} ({unit})" for unit in AXES.values() for what in ("K of its own line", "K(N) [95 %]")]
    rows = []
    for size, runs in sizes.items():
        cells = [with_ends(interval([needed(c, UNTIL, axis) for c in runs])) for axis in AXES]
        for law in laws.values():
            low, high = law.K_interval(size)
            cells += [f"{law.sizes[size].own_K:.3f}", f"{law.K(size):.3f} [{low:.3f}, {high:.3f}]"]
        rows.append([amount(size), str(len(runs)), *cells])
    return table(head, rows)


def known(value: float, ends: tuple[float, float]) -> str:
    """`value [low, high]`, or that it is not known, where the interval is wider than a million times."""
    return "not known" if ends[1] > 1e6 * ends[0] else with_ends((value, *ends))


def size_findings(sizes: Sizes) -> list[Row]:
    """The paper's statements on model size against these runs, seed by seed, in PAPER_HEAD's columns: the
    larger model needs less data and less compute, learns along a steeper line, and the smaller ones predict how
    steep."""
    least, most = min(sizes), max(sizes)
    seeds = sorted(set.intersection(*({curve.seed for curve in runs} for runs in sizes.values())))
    of = [{size: [c for c in runs if c.seed == seed] for size, runs in sizes.items()} for seed in seeds]
    ends = [law_of(some, "flops") for some in of]
    slopes = [law.sizes[most].own_K / law.sizes[least].own_K for law, _ in ends]
    margin = math.log(AS_PREDICTED)

    def row(other: str, figure: str, theirs: tuple[float, float], ratios: Sequence[float]) -> Row:
        apart = np.log(ratios)
        names = (amount(most), other, figure)
        return paper_row(names, theirs, interval(apart), len(apart), pooled_sd([apart]), relative=True)

    def more(axis: str) -> list[float]:
        return [needed(some[most][0], UNTIL, axis) / needed(some[least][0], UNTIL, axis) for some in of]

    return [
        *(
            row(amount(least), f"{unit} to a pass rate of {UNTIL:g}", (-np.inf, 0), more(axis))
            for axis, unit in AXES.items()
        ),
        row(amount(least), "slope K of its own line (FLOPs)", (0.0, np.inf), slopes),
        row("as the others predict", "slope K (FLOPs)", (-margin, margin), [slope_ratio(points) for _, points in ends]),
    ]


def size_page(sizes: Sizes) -> str:
    """Markdown."""
    found = {axis: law_of(sizes, axis) for axis in AXES}
    text = ["# The power law over model size, on our own runs", RISE]
    text += [size_table(sizes, {axis: law for axis, (law, _) in found.items()})]
    for axis, (law, points) in found.items():
        text.append(
            f"Over {AXES[axis]}: K_max {known(law.K_max, law.K_max_interval)}, N0 in parameters "
            f"{known(law.N0, law.N0_interval)}, RMSE of log L {law.rmse:.3f} over {len(points)} points."
            + "".join(f" Note: {note}." for note in law.notes)
        )
    return "\n\n".join(text) + "\n"


def write_sizes(found: Groups, folder: Path) -> list[Row]:
    """FOLDER/power-law.*, from the finished runs of each size by name; `size_findings` is returned."""
    sizes = dict(sorted((parameters(name), runs) for name, runs in found.items()))
    law, points = law_of(sizes, "flops")
    fit_power_law.plot(law, np.array(points), np.full(len(points), True), str(folder / "power-law.png"))
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
    return table(["half", "completions C", "best n that was tried", "n* by its law [95 %]", "pass rate there"], rows)


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
    seeds = len({curve.seed for half in found.values() for curves in half.values() for curve in curves})

    def add(
        half: str, names: tuple[str, str, str], theirs: tuple[float, float], draws: np.ndarray, value: float
    ) -> None:
        ours = (value, *np.quantile(draws, (0.025, 0.975)).tolist())
        rows.append([f"grid-{half}", *paper_row(names, theirs, ours, seeds, math.nan)])

    def drawn(grid: Grid, C: float) -> tuple[np.ndarray, float]:
        return np.log2(isocompute.n_star(C, *grid.law.draws.T)), math.log2(grid.law(C))

    for half, grid in grids.items():
        (early, first), (late, last) = drawn(grid, grid.C[0]), drawn(grid, grid.C[-1])
        names = (f"C = {amount(grid.C[-1])}", f"C = {amount(grid.C[0])}", "log2 n*, growth beyond 1")
        # the law cannot fall, so 0 would prove nothing
        add(half, names, (0.0, math.inf), late - early - 1, last - first - 1)
    if len(grids) == 2:
        C = min(grid.C[-1] for grid in grids.values())
        (easy, of_easy), (hard, of_hard) = drawn(grids["easy"], C), drawn(grids["hard"], C)
        names = ("hard", "easy", f"log2 n* at C = {amount(C)}")
        add("hard", names, (-math.inf, 0.0), hard - easy, of_hard - of_easy)
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
    text = [
        "# IsoCompute on our own grids",
        "The easy and the hard half of the graded task's problems, by how often the starting model solves them; every "
        "run of a grid samples as many completions, on-policy, with a learning rate that goes with the square root of "
        "the batch. Fitted as isocompute.py says.",
        best_table(grids) if grids else "",
        *(f"No law for the {name} half: {why}." for name, why in halves.items() if isinstance(why, str)),
    ]
    return "\n\n".join(filter(None, text)) + "\n"


def write_grids(found: Mapping[str, Groups], folder: Path) -> list[Row]:
    """FOLDER/isocompute.* and a picture of each half, from the finished runs of each grid by its name; `grid_findings`
    is returned."""
    halves = {name: grid_of(runs) for name, runs in found.items()}
    for name, half in halves.items():
        if isinstance(half, Grid):
            isocompute.plot(half, str(folder / f"isocompute-{name}.png"))
    save(grid_page(halves), folder / "isocompute.md")
    return grid_findings(halves, found)
