"""What isocompute.py says of our own grids of prompts a batch and rollouts a prompt (arXiv 2603.12151)."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_report import amount, save
from curves import Curve
from measuring import table

import isocompute
from isocompute import Grid, Run

Runs = Mapping[str, Sequence[Curve]]  # `16x8` -> the runs of 16 prompts and 8 rollouts


def grid_of(found: Runs) -> tuple[list[Run], Grid]:
    """The runs as isocompute.py has them, and their analysis."""
    runs = [
        Run(*map(int, name.split("x")), curve.points["step"], curve.points["pass_rate"])
        for name, curves in found.items() for curve in curves
    ]  # fmt: skip
    return runs, isocompute.fit_grid(runs)


def best_table(grids: Mapping[str, Grid]) -> str:
    """n* at a few budgets within what each grid compares."""
    rows = []
    for name, grid in grids.items():
        for C in np.geomspace(grid.C[0], grid.C[-1], 4):
            at = int(np.argmin(np.abs(np.log(grid.C / C))))
            low, high = grid.law.interval(C)
            rows.append([name, amount(C), str(grid.best_n[at]), f"{grid.law(C):.3g} [{low:.3g}, {high:.3g}]",
                         f"{grid.reward[at]:.3f}"])  # fmt: skip
    return table(["half", "completions C", "best n that was tried", "n* by its law [95 %]", "pass rate there"], rows)


def law_table(grids: Mapping[str, Grid]) -> str:
    """The four parameters of n*(C)."""
    names = ("L", "s", "log10_C0", "b")
    rows = [
        [
            half,
            *("{:.2f} [{:.2f}, {:.2f}]".format(getattr(grid.law, name), *grid.law.intervals[name]) for name in names),
        ]
        for half, grid in grids.items()
    ]
    return table(["half", *names], rows)


def shape_table(name: str, runs: Sequence[Run]) -> str:
    """The pass rate at the end of each cell of a grid, mean of the last two evaluations and of the seeds; in brackets
    how many of its runs fell."""
    shapes = sorted({(run.B_p, run.n) for run in runs})
    sizes, rollouts = (sorted({shape[i] for shape in shapes}) for i in (0, 1))
    rows = []
    for B_p in sizes:
        cells = []
        for n in rollouts:
            same = [run for run in runs if (run.B_p, run.n) == (B_p, n)]
            fell = sum(not run.standing.all() for run in same)
            end = np.mean([np.mean(run.rewards[-2:]) for run in same]) if same else math.nan
            cells.append(f"{end:.3f}" + (f" ({fell} of {len(same)} fell)" if fell else ""))
        rows.append([str(B_p), *cells])
    return table([f"{name}: B_p", *(f"n = {n}" for n in rollouts)], rows)


def page(halves: Mapping[str, tuple[list[Run], Grid]]) -> str:
    """The whole page."""
    grids = {name: grid for name, (_, grid) in halves.items()}
    text = [
        "# IsoCompute on our own grids",
        "The easy and the hard half of the graded task's problems, by how often the starting model solves them; every "
        "run of a grid samples as many completions, on-policy, with a learning rate that goes with the square root of "
        "the batch. Fitted as isocompute.py says.",
        *(shape_table(name, runs) for name, (runs, _) in halves.items()),
        best_table(grids), law_table(grids),
        *(f"Left out, {name}: {'; '.join(grid.dropped)}." for name, grid in grids.items() if grid.dropped),
    ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write(found: Mapping[str, Runs], folder: Path) -> None:
    """FOLDER/isocompute.* and a picture of each half, from the finished runs of each grid by its name."""
    halves = {}
    for name, runs in found.items():
        try:
            halves[name] = grid_of(runs)
        except ValueError as error:
            print(f"{name}: {error}")
    for name, (_, grid) in halves.items():
        isocompute.plot(grid, str(folder / f"isocompute-{name}.png"))
    if halves:
        save(page(halves), (folder / "isocompute").with_suffix(".md"))
