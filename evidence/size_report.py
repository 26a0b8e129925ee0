"""What the power law over model size says of our own runs (fit_power_law.py), beside what they did.

The law is a straight line of log L against log X, and our curves are sigmoids with a ceiling of .80, so it can only
describe their rise: of each run the evaluations after the first, up to the one that reaches UNTIL.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import compute_to, difference, interval, pooled_sd
from ablation_report import amount, paper_row, save
from curves import Curve
from measuring import table

import fit_power_law
from fit_power_law import Point, PowerLaw
from tasks.sizes import parameters

UNTIL = 0.5  # pass rate
AS_PREDICTED = 1.1  # a slope within this factor of the predicted one; ours, since the paper gives none
AXES = {"flops": "FLOPs", "tokens": "sampled tokens"}
Sizes = Mapping[int, Sequence[Curve]]  # parameters -> runs


def rise(runs: Sequence[Curve], size: int, axis: str) -> list[Point]:
    """(N, X, L) of the evaluations of these runs in which they rise."""
    points = []
    for curve in runs:
        rates = curve.points["pass_rate"]
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
    alone = fit_power_law.fit(*np.transpose(own)).K(largest)
    law = law.with_size(largest, *np.transpose(early)[1:])
    return rmse(law, late), float(np.sqrt(np.mean(np.square(copied)))), alone / law.K(largest)


def mean_rate(runs: Sequence[Curve], axis: str, at: float) -> float:
    """Pass rate of these runs at a compute between their evaluations, mean; NaN beyond the end of one."""
    return float(np.mean([np.interp(at, c.points[axis], c.points["pass_rate"], right=np.nan) for c in runs]))


def size_table(sizes: Sizes) -> str:
    """One row a size: what was measured, and the slopes."""
    laws = {axis: law_of(sizes, axis)[0] for axis in AXES}
    head = ["parameters", "runs", "start", "end", *(f"{unit} to {UNTIL:g}" for unit in AXES.values())]
    head += [f"{what} ({unit})" for unit in AXES.values() for what in ("K of its own line", "K(N) [95 %]")]
    rows = []
    for size, runs in sizes.items():
        rates = [curve.points["pass_rate"] for curve in runs]
        needed = [interval([compute_to(c.evals(), UNTIL, axis) for c in runs]) for axis in AXES]
        slopes = [(law.sizes[size].own_K, law.K(size), *law.K_interval(size)) for law in laws.values()]
        rows.append([
            amount(size), str(len(runs)), f"{np.mean([r[0] for r in rates]):.3f}",
            f"{np.mean([r[-2:].mean() for r in rates]):.3f}",
            *("{} [{}, {}]".format(*map(amount, found)) for found in needed),
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


def of(value: float, ends: tuple[float, float]) -> str:
    """`value [low, high]`, or that it is not known, where the interval is wider than a million times."""
    return "not known" if ends[1] > 1e6 * ends[0] else "{} [{}, {}]".format(*map(amount, (value, *ends)))


def findings(sizes: Sizes) -> list[list[str]]:
    """The paper's statements on model size against these runs, seed by seed, in `ablation_report`'s columns: the
    larger model needs less data and less compute, learns along a steeper line, and the smaller ones predict how
    steep."""
    least, most = min(sizes), max(sizes)
    seeds = sorted(set.intersection(*({curve.seed for curve in runs} for runs in sizes.values())))
    of = {seed: {size: [c for c in runs if c.seed == seed] for size, runs in sizes.items()} for seed in seeds}

    def row(name: str, figure: str, ends: tuple[float, float], values: Sequence[float]) -> list[str]:
        ours = difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
        return paper_row((amount(most), name, figure), ends, ours, pooled_sd([values]), relative=True)

    def needed(size: int, axis: str, seed: int) -> float:
        return float(np.log(compute_to(of[seed][size][0].evals(), UNTIL, axis)))

    laws = {seed: law_of(some, "flops")[0] for seed, some in of.items()}
    slopes = [np.log(law.sizes[most].own_K / law.sizes[least].own_K) for law in laws.values()]
    predicted = [np.log(across(law_of(some, "flops")[1])[2]) for some in of.values()]
    rows = [
        row(amount(least), f"{unit} to a pass rate of {UNTIL:g}", (-np.inf, 0.0),
            [needed(most, axis, seed) - needed(least, axis, seed) for seed in seeds])
        for axis, unit in AXES.items()
    ]  # fmt: skip
    margin = float(np.log(AS_PREDICTED))
    return [*rows, row(amount(least), "slope K of its own line (FLOPs)", (0.0, np.inf), slopes),
            row("as the others predict", "slope K (FLOPs)", (-margin, margin), predicted)]  # fmt: skip


def page(sizes: Sizes) -> str:
    """The whole page."""
    about = " ".join(__doc__.partition("\n\n")[2].split()).replace("UNTIL", f"a pass rate of {UNTIL:g}")
    text = ["# The power law over model size, on our own runs", about,
            size_table(sizes)]  # fmt: skip
    for axis, unit in AXES.items():
        law, points = law_of(sizes, axis)
        across_law, copied, ratio = across(points)
        text += [
            f"## Over {unit}",
            f"K_max {of(law.K_max, law.K_max_interval)}, N0 in parameters {of(law.N0, law.N0_interval)}, RMSE of log L "
            f"{law.rmse:.3f} over {len(points)} points." + "".join(f" Note: {note}." for note in law.notes),
            f"- Within a model: the later half of each rise, from the earlier half: RMSE of log L {within(points):.3f}."
            f"\n- Across models: the later half of the largest one's rise, with the slope that the smaller ones give "
            f"it and an offset from its own earlier half: {across_law:.3f}; with the next smaller one's slope: "
            f"{copied:.3f}. Its own slope is {ratio:.2f} of the law's.",
            budget_table(sizes, axis), crossings(law, unit),
        ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write(found: Mapping[str, Sequence[Curve]], folder: Path) -> list[list[str]]:
    """FOLDER/power-law.*, from the finished runs of each size by name; `findings` is returned."""
    sizes = dict(sorted((parameters(name), runs) for name, runs in found.items()))
    law, points = law_of(sizes, "flops")
    fit_power_law.plot(law, points, [], str(folder / "power-law.png"))
    save(page(sizes), (folder / "power-law").with_suffix(".md"))
    return findings(sizes)
