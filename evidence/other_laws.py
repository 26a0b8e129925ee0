"""What the laws of the other two papers say of our own runs: model size (fit_power_law.py, arXiv 2509.25300) and
rollouts (isocompute.py, arXiv 2603.12151), beside what the runs did.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from curves import OF_K, Evaluations
from figures import UNSEEN, Groups, Row, interval, needed, pooled_sd
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
        rates = curve.rates
        last = int(np.argmax(rates >= UNTIL)) if (rates >= UNTIL).any() else len(rates) - 1
        points += [(float(size), float(curve.points[axis][i]), 1 - float(rates[i])) for i in range(1, last + 1)]
    return points


def law_of(sizes: Sizes, axis: str) -> tuple[PowerLaw, list[Point]]:
    """The law of all sizes, and the points that it was fitted to."""
    points = [point for size, runs in sizes.items() for point in rise(runs, size, axis)]
    return fit_power_law.fit(*np.transpose(points)), points


def rmse(law: PowerLaw, points: Sequence[Point]) -> float:
    """Root mean square of measured minus predicted log L."""
    return float(np.sqrt(np.mean([np.log(L / law.predict(N, X)) ** 2 for N, X, L in points])))


def within(points: Sequence[Point]) -> float:
    """RMSE of log L on the later half of each size's points (in X), predicted from the earlier half; all sizes."""
    middle = {N: np.median([X for M, X, _ in points if M == N]) for N, *_ in points}
    early = [point for point in points if point[1] <= middle[point[0]]]
    return rmse(fit_power_law.fit(*np.transpose(early)), [point for point in points if point not in early])


def across(points: Sequence[Point]) -> tuple[float, float, float]:
    """(RMSE of log L on the later half of the largest size's points, with the slope that the others give it and the
    offset of its own earlier half; the same with the slope of the next smaller size; its own slope over the law's)."""
    *_, next_largest, largest = sorted({N for N, *_ in points})
    own = sorted((point for point in points if point[0] == largest), key=lambda point: point[1])
    early, late = own[: len(own) // 2], own[len(own) // 2 :]
    law = fit_power_law.fit(*np.transpose([point for point in points if point[0] != largest]))
    offset = np.mean([np.log(L) + law.K(next_largest) * np.log(X) for _, X, L in early])
    copied = [np.log(L) - offset + law.K(next_largest) * np.log(X) for _, X, L in late]
    alone = fit_power_law.fit(*np.transpose(points)).sizes[largest].own_K
    law = law.with_size(largest, *np.transpose(early)[1:])
    return rmse(law, late), float(np.sqrt(np.mean(np.square(copied)))), alone / law.K(largest)


def mean_rate(runs: Sequence[Evaluations], axis: str, at: float) -> float:
    """Pass rate of these runs at a compute between their evaluations, mean; NaN beyond the end of one."""
    return float(np.mean([np.interp(at, c.points[axis], c.rates, right=np.nan) for c in runs]))


def size_table(sizes: Sizes) -> str:
    """One row a size: what was measured, and the slopes."""
    laws = {axis: law_of(sizes, axis)[0] for axis in AXES}
    head = ["parameters", "runs", "start", "end", *(f"{unit} to {UNTIL:g}" for unit in AXES.values())]
    head += [f"{what} ({unit})" for unit in AXES.values() for what in ("K of its own line", "K(N) [95 %]")]
    rows = []
    for size, runs in sizes.items():
        rates = [curve.rates for curve in runs]
        to_rate = [interval([needed(c, UNTIL, axis) for c in runs]) for axis in AXES]
        slopes = [(law.sizes[size].own_K, law.K(size), *law.K_interval(size)) for law in laws.values()]
        rows.append([
            amount(size), str(len(runs)), f"{np.mean([r[0] for r in rates]):.3f}",
            f"{np.mean([r[-2:].mean() for r in rates]):.3f}",
            *map(with_ends, to_rate),
            *(text for own, K, low, high in slopes for text in (f"{own:.3f}", f"{K:.3f} [{low:.3f}, {high:.3f}]")),
        ])  # fmt: skip
    return table(head, rows)


def budget_table(sizes: Sizes, axis: str) -> str:
    """The best size for budgets over the rise, by the law and as measured."""
    law, points = law_of(sizes, axis)
    low, high = (np.log(f(X for _, X, _ in points)) for f in (min, max))
    rows = []
    for X in np.exp(np.linspace(low, high, 6)[1:]):
        measured = {size: mean_rate(runs, axis, X) for size, runs in sizes.items()}
        known = {size: rate for size, rate in measured.items() if np.isfinite(rate)}
        best, chosen = max(known, key=known.__getitem__, default=0), int(law.best_size(X))
        rows.append([amount(X), amount(chosen), amount(best), f"{known[chosen]:.3f}" if chosen in known else "–",
                     f"{known[best]:.3f}" if known else "–"])  # fmt: skip
    return table([AXES[axis], "best size by the law", "measured", "pass rate of the law's choice", "of the best"], rows)


def crossings(law: PowerLaw, unit: str) -> str:
    """Where each size overtakes the next smaller one, by the law."""
    said = []
    for small, large in pairwise(sorted(law.sizes)):
        X = law.crossing(small, large)
        at = "from the start" if X is None else f"from {amount(X)} on"
        far = X is not None and X > 1000 * law.X_range[1]
        at = "nowhere within a thousand times what was run" if far else at
        said.append(f"{amount(large)} is ahead of {amount(small)} {at}")
    return f"Crossings, in {unit}, by the law: " + "; ".join(said) + "."


def known(value: float, ends: tuple[float, float]) -> str:
    """`value [low, high]`, or that it is not known, where the interval is wider than a million times."""
    return "not known" if ends[1] > 1e6 * ends[0] else with_ends((value, *ends))


def size_findings(sizes: Sizes) -> list[Row]:
    """The paper's statements on model size against these runs, seed by seed, in PAPER_HEAD's columns: the
    larger model needs less data and less compute, learns along a steeper line, and the smaller ones predict how
    steep."""
    least, most = min(sizes), max(sizes)
    seeds = sorted(set.intersection(*({curve.seed for curve in runs} for runs in sizes.values())))
    of = {seed: {size: [c for c in runs if c.seed == seed] for size, runs in sizes.items()} for seed in seeds}

    def row(name: str, figure: str, ends: tuple[float, float], values: Sequence[float]) -> Row:
        names = (amount(most), name, figure)
        return paper_row(names, ends, interval(values), len(values), pooled_sd([values]), relative=True)

    def log_needed(size: int, axis: str, seed: int) -> float:
        return float(np.log(needed(of[seed][size][0], UNTIL, axis)))

    laws = {seed: law_of(some, "flops")[0] for seed, some in of.items()}
    slopes = [np.log(law.sizes[most].own_K / law.sizes[least].own_K) for law in laws.values()]
    predicted = [np.log(across(law_of(some, "flops")[1])[2]) for some in of.values()]
    rows = [
        row(amount(least), f"{unit} to a pass rate of {UNTIL:g}", (-np.inf, 0.0),
            [log_needed(most, axis, seed) - log_needed(least, axis, seed) for seed in seeds])
        for axis, unit in AXES.items()
    ]  # fmt: skip
    margin = float(np.log(AS_PREDICTED))
    return [*rows, row(amount(least), "slope K of its own line (FLOPs)", (0.0, np.inf), slopes),
            row("as the others predict", "slope K (FLOPs)", (-margin, margin), predicted)]  # fmt: skip


def size_page(sizes: Sizes) -> str:
    """Markdown."""
    text = ["# The power law over model size, on our own runs", RISE,
            size_table(sizes)]  # fmt: skip
    for axis, unit in AXES.items():
        law, points = law_of(sizes, axis)
        across_law, copied, ratio = across(points)
        text += [
            f"## Over {unit}",
            f"K_max {known(law.K_max, law.K_max_interval)}, N0 in parameters {known(law.N0, law.N0_interval)}, RMSE of "
            f"log L {law.rmse:.3f} over {len(points)} points." + "".join(f" Note: {note}." for note in law.notes),
            f"- Within a model: the later half of each rise, from the earlier half: RMSE of log L {within(points):.3f}."
            f"\n- Across models: the later half of the largest one's rise, with the slope that the smaller ones give "
            f"it and an offset from its own earlier half: {across_law:.3f}; with the next smaller one's slope: "
            f"{copied:.3f}. Its own slope is {ratio:.2f} of the law's.",
            budget_table(sizes, axis), crossings(law, unit),
        ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write_sizes(found: Groups, folder: Path) -> list[Row]:
    """FOLDER/power-law.*, from the finished runs of each size by name; `size_findings` is returned."""
    sizes = dict(sorted((parameters(name), runs) for name, runs in found.items()))
    law, points = law_of(sizes, "flops")
    fit_power_law.plot(law, np.array(points), np.full(len(points), True), str(folder / "power-law.png"))
    save(size_page(sizes), folder / "power-law.md")
    return size_findings(sizes)


# ---------------------------------------------------------------------------------------------- rollouts a prompt


class Half(NamedTuple):
    """The runs of one grid as isocompute.py has them, and their analysis, or why there is none."""

    runs: list[Run]
    grid: Grid | None
    why: str = ""


def half_of(found: Groups) -> Half:
    """The runs and their analysis."""
    runs = [
        Run(*map(int, name.split("x")), curve.points["step"], curve.rates)
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
    text = "{:.2f} [{:.2f}, {:.2f}]"
    rows = [[half, *(text.format(getattr(grid.law, name), *grid.law.intervals[name]) for name in names)]
            for half, grid in grids.items()]  # fmt: skip
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


def at_end(found: Groups, column: str) -> dict[int, dict[int, float]]:
    """{n: {seed: a column at the end of its runs, mean of the last two evaluations and of the B_p}}."""
    ends: dict[int, dict[int, list[float]]] = {}
    for name, curves in found.items():
        for curve in curves:
            of_n = ends.setdefault(int(name.split("x")[1]), {})
            of_n.setdefault(curve.seed, []).append(float(curve.points[column][-2:].mean()))
    return {n: {seed: float(np.mean(v)) for seed, v in seeds.items()} for n, seeds in sorted(ends.items())}


def of_k_table(found: Mapping[str, Groups]) -> str:
    """Sharpening and coverage: average, best and worst of k at the end, by n."""
    rows = []
    for half, runs in found.items():
        for title, column in (("average", "pass_rate"), *((f"{column} of k", column) for column in OF_K)):
            ends = at_end(runs, column)
            rows.append([half, title, *(f"{np.mean(list(seeds.values())):.3f}" for seeds in ends.values())])
    return table(["half", "at the end", *(f"n = {n}" for n in at_end(next(iter(found.values())), "step"))], rows)


def grid_findings(halves: Mapping[str, Half], found: Mapping[str, Groups]) -> list[Row]:
    """The paper's statements on n* against these grids, each after the name of its comparison, in PAPER_HEAD's
    columns. n* comes from all seeds at once, with the interval of its bootstrap; best and worst of k seed by seed."""
    grids = {name: half.grid for name, half in halves.items() if half.grid}
    rows = [[f"grid-{name}", "–", "–", "log2 n*", "higher", half.why, "–", "–", f"**{UNSEEN}**"]
            for name, half in halves.items() if half.why]  # fmt: skip

    def add(names: tuple[str, str, str, str], ends: tuple[float, float], draws: np.ndarray, value: float) -> None:
        name, *others = names
        n = len({curve.seed for half in found.values() for curves in half.values() for curve in curves})
        ours = (value, *np.quantile(draws, (0.025, 0.975)).tolist())
        rows.append([name, *paper_row(others, ends, ours, n, math.nan)])

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
            apart = [ends[most][seed] - ends[least][seed] for seed in sorted(ends[most].keys() & ends[least].keys())]
            figure = (f"n = {most}", f"n = {least}", f"{column} of k at the end")
            row = paper_row(figure, (0.0, math.inf), interval(apart), len(apart), pooled_sd([apart]))
            rows.append([f"grid-{half}", *row])
    return rows


def grid_page(halves: Mapping[str, Half], found: Mapping[str, Groups]) -> str:
    """Markdown."""
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
    ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write_grids(found: Mapping[str, Groups], folder: Path) -> list[Row]:
    """FOLDER/isocompute.* and a picture of each half, from the finished runs of each grid by its name; `grid_findings`
    is returned."""
    halves = {name: half_of(runs) for name, runs in found.items()}
    for name, half in halves.items():
        if half.grid:
            isocompute.plot(half.grid, str(folder / f"isocompute-{name}.png"))
    save(grid_page(halves, found), folder / "isocompute.md")
    return grid_findings(halves, found)
