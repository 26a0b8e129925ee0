"""What isocompute.py says of our own grids of prompts a batch and rollouts a prompt (arXiv 2603.12151)."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import UNSEEN, difference, pooled_sd
from ablation_report import amount, paper_row, save
from curves import OF_K, Curve
from measuring import table

import isocompute
from isocompute import Grid, Run

Runs = Mapping[str, Sequence[Curve]]  # `16x8` -> the runs of 16 prompts and 8 rollouts


class Half(NamedTuple):
    """The runs of one grid as isocompute.py has them, and their analysis, or why there is none."""

    runs: list[Run]
    grid: Grid | None
    why: str = ""


def half_of(found: Runs) -> Half:
    """The runs and their analysis."""
    runs = [
        Run(*map(int, name.split("x")), curve.points["step"], curve.points["pass_rate"])
        for name, curves in found.items() for curve in curves
    ]  # fmt: skip
    try:
        return Half(runs, isocompute.fit_grid(runs))
    except ValueError as error:
        return Half(runs, None, str(error))


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


def at_end(found: Runs, column: str) -> dict[int, dict[int, float]]:
    """{n: {seed: a column at the end of its runs, mean of the last two evaluations and of the B_p}}."""
    ends: dict[int, dict[int, list[float]]] = {}
    for name, curves in found.items():
        for curve in curves:
            of_n = ends.setdefault(int(name.split("x")[1]), {})
            of_n.setdefault(curve.seed, []).append(float(curve.points[column][-2:].mean()))
    return {n: {seed: float(np.mean(v)) for seed, v in seeds.items()} for n, seeds in sorted(ends.items())}


def of_k_table(found: Mapping[str, Runs]) -> str:
    """Sharpening and coverage: average, best and worst of k at the end, by n."""
    rows = []
    for half, runs in found.items():
        for title, column in (("average", "pass_rate"), *((f"{column} of k", column) for column in OF_K)):
            ends = at_end(runs, column)
            rows.append([half, title, *(f"{np.mean(list(seeds.values())):.3f}" for seeds in ends.values())])
    return table(["half", "at the end", *(f"n = {n}" for n in at_end(next(iter(found.values())), "step"))], rows)


def findings(halves: Mapping[str, Half], found: Mapping[str, Runs]) -> list[list[str]]:
    """The paper's statements on n* against these grids, each after the name of its comparison, in `ablation_report`'s
    columns. n* comes from all seeds at once, with the interval of its bootstrap; best and worst of k seed by seed."""
    grids = {name: half.grid for name, half in halves.items() if half.grid}
    rows = [[f"grid-{name}", "–", "–", "log2 n*", "higher", half.why, "–", "–", f"**{UNSEEN}**"]
            for name, half in halves.items() if half.why]  # fmt: skip

    def add(names: tuple[str, str, str, str], ends: tuple[float, float], draws: np.ndarray, value: float) -> None:
        name, *others = names
        n = len({curve.seed for half in found.values() for curves in half.values() for curve in curves})
        ours = (value, *np.quantile(draws, (0.025, 0.975)).tolist(), n)
        rows.append([name, *paper_row(others, ends, ours, math.nan)])

    def drawn(grid: Grid, C: float) -> tuple[np.ndarray, float]:
        return np.log2(isocompute.n_star(C, *grid.law.draws.T)), math.log2(grid.law(C))

    for half, grid in grids.items():
        (early, first), (late, last) = drawn(grid, grid.C[0]), drawn(grid, grid.C[-1])
        names = (f"grid-{half}", f"C = {amount(grid.C[-1])}", f"C = {amount(grid.C[0])}", "log2 n*, growth beyond 1")
        add(names, (0.0, math.inf), late - early - 1, last - first - 1)  # the law cannot fall, so 0 would prove nothing
    if len(grids) == 2:
        C = min(grid.C[-1] for grid in grids.values())
        (easy, of_easy), (hard, of_hard) = drawn(grids["easy"], C), drawn(grids["hard"], C)
        names = ("grid-hard", "hard", "easy", f"log2 n* at C = {amount(C)}")
        add(names, (-math.inf, 0.0), hard - easy, of_hard - of_easy)
    for half, column in (("easy", "worst"), ("hard", "best")):
        if ends := at_end(found.get(half, {}), column):
            least, most = min(ends), max(ends)
            ours = difference(ends[most], ends[least])
            sd = pooled_sd([[ends[most][seed] - ends[least][seed] for seed in ends[most].keys() & ends[least].keys()]])
            figure = (f"n = {most}", f"n = {least}", f"{column} of k at the end")
            rows.append([f"grid-{half}", *paper_row(figure, (0.0, math.inf), ours, sd)])
    return rows


def page(halves: Mapping[str, Half], found: Mapping[str, Runs]) -> str:
    """The whole page."""
    grids = {name: half.grid for name, half in halves.items() if half.grid}
    text = [
        "# IsoCompute on our own grids",
        "The easy and the hard half of the graded task's problems, by how often the starting model solves them; every "
        "run of a grid samples as many completions, on-policy, with a learning rate that goes with the square root of "
        "the batch. Fitted as isocompute.py says.",
        *(shape_table(name, half.runs) for name, half in halves.items()),
        *([best_table(grids), law_table(grids)] if grids else []),
        *(f"No law for the {name} half: {half.why}." for name, half in halves.items() if half.why),
        "What more rollouts buy at equal completions: k is the number of samples of an evaluation, the best of k is "
        "right if one of them is, the worst if all are; means over B_p and seeds.",
        of_k_table(found),
        *(f"Left out, {name}: {'; '.join(grid.dropped)}." for name, grid in grids.items() if grid.dropped),
    ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write(found: Mapping[str, Runs], folder: Path) -> list[list[str]]:
    """FOLDER/isocompute.* and a picture of each half, from the finished runs of each grid by its name; `findings` is
    returned."""
    halves = {name: half_of(runs) for name, runs in found.items()}
    for name, half in halves.items():
        if half.grid:
            isocompute.plot(half.grid, str(folder / f"isocompute-{name}.png"))
    save(page(halves, found), (folder / "isocompute").with_suffix(".md"))
    return findings(halves, found)
