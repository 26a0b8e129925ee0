"""What follows from the figures that the three papers print, without any training: docs/published.md and its pictures.

    python tools/published.py [--output docs]

Every constant below is quoted with its paper and its place. Where a paper leaves a value open, the page shows a range.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_curves import power_law

from fit_sigmoid import fit, sigmoid
from isocompute import n_star

# Khatri et al. 2025, arXiv 2510.13786, Table 1: (A, B, C_mid in GPU-hours). R0 is not printed.
KHATRI = {
    "8B, batch 768, 14k tokens": (0.610, 1.92, 2542.0),
    "32k tokens": (0.645, 1.89, 11272.0),
    "batch 512": (0.605, 1.77, 2818.0),
    "batch 2048": (0.645, 1.70, 10909.0),
}
R0S = (0.2, 0.25, 0.3, 0.35, 0.4)
# The same: (low, high) in GPU-hours of the run of 100,000 -> A of the sigmoid, A of a power law (None: not printed).
WINDOWS = {(1500, 50_000): (0.645, 1.0), (5000, 50_000): (0.645, 0.74), (0, 50_000): (0.645, None),
           (0, 100_000): (0.655, None)}  # fmt: skip
LATE = (30_000, 60_000)  # ours: where both laws should agree
LOO_A, SEED_NOISE, MARGIN = (0.590, 0.610), 0.015, 0.02  # the same: A of the leave-one-out runs; of three equal runs
DRAWS = 30  # of a noisy run
NOISE = 0.005  # of a mean@16 on 1,000 prompts: binomial .004, and a little for prompts that correlate
# Tan et al. 2025, arXiv 2509.25300: (K_max, N0 in billions) within a model and from 0.5-32B to 72B.
TAN = {
    "Qwen2.5 base, compute": ((0.135, 13.1), (0.152, 17.4)),
    "Qwen2.5 base, samples": ((0.135, 11.5), (0.163, 17.0)),
    "Qwen2.5 instruct, compute": ((0.128, 17.3), (0.144, 28.3)),
    "Qwen2.5 instruct, samples": ((0.133, 17.1), (0.148, 27.2)),
    "Llama-3 instruct, compute": ((0.089, 11.3), (0.074, 8.5)),
    "Llama-3 instruct, samples": ((0.091, 12.7), (0.087, 11.8)),
}
SIZES = (0.5, 1.5, 3, 7, 14, 32, 72)
# Cheng et al. 2026, arXiv 2603.12151: L, s, log10 C0, b of n*(C).
CHENG = {"easy": (6.09, 4.75, 5.84, 2.73), "hard": (4.47, 7.23, 5.84, 2.79)}
LOG10_C = (4.5, 5.0, 5.5, 5.84, 6.0, 6.5, 7.0)


def curve(name: str, R0: float, C: np.ndarray | float) -> np.ndarray:
    """A published curve at C, from an assumed R0."""
    A, B, C_mid = KHATRI[name]
    return sigmoid(C, R0, A, B, C_mid)


def long_run() -> np.ndarray:
    """(76,) GPU-hours of evaluations of the run of 100,000; its curve is that of batch 2048, whose A and B it has."""
    return np.linspace(0, 100_000, 76)


def window_A(R0: float, low: float, high: float) -> tuple[float, float]:
    """(A of the sigmoid, A of the power law) fitted to the exact curve of the long run over a window."""
    C = long_run()
    C = C[(low <= C) & (high >= C)]
    R = curve("batch 2048", R0, C)
    return fit(C, R).A, power_law(C, R)["A"]


def extrapolate(name: str, end: float, points: int, cut: float, draws: int, seed: int = 0) -> dict[str, float]:
    """The first half of a curve from R0 = .3, with noise, fitted; its end predicted."""
    rng, C = np.random.default_rng(seed), np.linspace(0, end, points)
    R, half, rows = curve(name, 0.3, C), C <= end / 2, []
    for _ in range(draws):
        found = fit(C[half], (R + rng.normal(0, NOISE, points))[half], skip_below=cut)
        low, high = found.interval(end)[:, 0]
        rows.append((found.A, found.identifiable, float(found.predict(end)) - R[-1], low <= R[-1] <= high, high - low))
    A, known, errors, covered, width = np.array(rows, float).T
    return {"sd of A": A.std(ddof=1), "identifiable": known.mean(), "median error": np.median(np.abs(errors)),
            "covered": covered.mean(), "width": np.median(width)}  # fmt: skip


def overtakes(slow: str, fast: str, R0: float) -> float:
    """GPU-hours at which the run with the higher ceiling overtakes the other: the last sign change from 100 to 10^6."""

    def ahead(C: Any) -> Any:
        return curve(slow, R0, C) - curve(fast, R0, C)

    grid = np.geomspace(100, 1e6, 400)
    [*_, last] = np.flatnonzero(np.diff(np.sign(ahead(grid))))
    return float(brentq(ahead, grid[last], grid[last + 1]))


def range_of_equal_runs(sd: float, runs: int, seed: int = 0) -> tuple[float, float]:
    """(mean range of A over `runs` equal runs, share of such sets whose range is at most that of the leave-one-out)."""
    A = np.random.default_rng(seed).normal(0, sd, (100_000, runs))
    ranges = np.ptp(np.round(A / 0.005) * 0.005, axis=1)  # A is fitted on a grid of .005
    return float(ranges.mean()), float(np.mean(ranges <= LOO_A[1] - LOO_A[0] + 1e-9))


def K(K_max: float, N0: float, N: Any) -> Any:
    """Tan et al.: slope of a model with N billion parameters (a number or an array)."""
    return K_max / (1 + N0 / N)


# ------------------------------------------------------------------------------------------------------------- the page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *rows])


def page() -> str:
    """The text of docs/published.md."""
    none = "–"
    windows = []
    for (low, high), printed in [*WINDOWS.items(), (LATE, (None, None))]:
        here = [window_A(R0, low, high) for R0 in R0S]  # (sigmoid, power law); the sigmoid's does not depend on R0
        cells = [none if A is None or np.isnan(A) else f"{A:.3g}" for A in (*printed, here[0][0])]
        windows.append([f"{low / 1e3:g}k to {high / 1e3:g}k", *cells, *(f"{A:.2f}" for _, A in here)])
    base = "8B, batch 768, 14k tokens"
    ahead = [
        [f"{slow} over {fast}", *(f"{overtakes(slow, fast, R0) / 1e3:.1f}k" for R0 in R0S)]
        for slow, fast in (("32k tokens", base), ("batch 2048", base), (base, "batch 512"))
    ]
    halves = []
    for name, arguments in (("1.5k to 50k, then 100k", ("batch 2048", 1e5, 76, 1500)),
                            ("0 to 8k, then 16k", (base, 16e3, 41, 0))):  # fmt: skip
        r = extrapolate(*arguments, DRAWS)
        halves.append([name, *(f"{r[key]:.4f}" for key in ("sd of A", "median error", "width")),
                       *(f"{r[key]:.0%}" for key in ("identifiable", "covered"))])  # fmt: skip
    noise = []
    for reading, sd in (("the standard deviation", SEED_NOISE), ("half the range of three", SEED_NOISE / 0.846),
                        ("95 % of runs", SEED_NOISE / 1.96)):  # fmt: skip
        mean, below = range_of_equal_runs(sd, 9)
        apart = [1.96 * 2**0.5 * sd, 2.776 * (2 / 3) ** 0.5 * sd]  # t with 4 degrees of freedom
        noise.append([reading, f"{sd:.4f}", *(f"{v:.3f}" for v in (*apart, mean)), f"{below:.0%}"])
    slopes = [[f"{name}, {kind}", *(f"{K(*c, N):.3f}" for N in SIZES)]
              for name, both in TAN.items() for kind, c in zip(("intra", "inter"), both, strict=True)]  # fmt: skip
    halving = [f"10^{np.log10(2) / K(*TAN['Qwen2.5 base, compute'][0], N):.1f}" for N in SIZES]
    best = [[name, *(f"{float(n_star(10**c, *law)):.0f}" for c in LOG10_C)] for name, law in CHENG.items()]
    r0 = [f"R0 = {R0:g}" for R0 in R0S]
    return PAGE.format(
        draws=DRAWS,
        windows=table(["window, GPU-hours", "printed: sigmoid", "printed: power law", "here: sigmoid",
                       *(f"power law, {r}" for r in r0)], windows),
        ahead=table(["ahead from", *r0], ahead),
        halves=table(["fitted, predicted", "sd of A", "median error at the end", "width of its 95 % interval",
                      "ceiling identifiable", "truth inside"], halves),
        noise=table(["±.015 read as", "sd of A", "two runs must differ by", "two means of three by",
                     "range of nine equal runs", "it is at most .020 in"], noise),
        slopes=table(["K(N)", *(f"{N:g}B" for N in SIZES)], slopes),
        halving=table(["", *(f"{N:g}B" for N in SIZES)], [["compute to halve the failures, times", *halving]]),
        best=table(["completions C", *(f"10^{c:g}" for c in LOG10_C)], best),
    )  # fmt: skip


PAGE = """# What follows from the printed figures

Three papers print the constants of their laws. This page, written by `python tools/published.py`, computes what
follows from them without any training; the constants and their places in the papers are at the top of that file. R0,
the pass rate before training, is not printed in arXiv 2510.13786, so values that depend on it are shown for a range.

![Windows of a long run, and runs that overtake each other](published_runs.png)

## A sigmoid finds the same ceiling in every window, a power law does not

arXiv 2510.13786: the run of 100,000 GPU-hours. Its curve is taken to be that of batch 2048 in Table 1, which has the
same A and B; it is exact here, without noise, so that only the form of the law decides.

{windows}
The power law is A − D / C^B, bounded by A ≤ 1, as in `tools/fit_curves.py`. From 1.5k on it runs to the bound, as
printed; from 5k on it has the printed .74 where R0 is near .4. It is the sigmoid's limit for large C, so it agrees only
late, when the ceiling is in sight anyway. From 30k on the sigmoid refuses (–): it wants to see where compute starts.

## From half a run to its end

{draws} draws each, with R0 = .3 and noise of sd .005 on every evaluation (mean@16 on 1,000 prompts has a binomial sd of
.004); fitted by `fit_sigmoid.py`.

{halves}
## Which run is ahead, and from when on

From A, B and C_mid of Table 1; the run with the higher ceiling is the slower one at first.

{ahead}
At R0 from .2 to .3 this is 35k to 40k GPU-hours for the longer completions, and 38k to 45k for the larger batch.

## What three runs can tell about a ceiling

The leave-one-out runs have A from .590 to .610; three runs of one recipe have A within ±.015, and the paper calls
differences below .02 noise. It does not say what ±.015 is, so three readings are shown: how far apart two runs, or two
means of three runs (Student's t, 4 degrees of freedom), must be for 95 % confidence; how far the A of nine equal runs
(the recipe and its eight variants, rounded to .005) lie apart on average; and how often no farther than .020.

{noise}
So nine equal runs would spread as far as .590 to .610, or farther: the table of ceilings ranks nothing. Single runs
tell apart ceilings that differ by more than .02 to .05, three seeds each by more than .02 to .04. The paper compares B
at the shared A instead.

![Slopes by model size, and the best number of rollouts](published_laws.png)

## A larger model learns faster, and that saturates

arXiv 2509.25300: log L = −K(N) log X + E(N), K(N) = K_max / (1 + N0 / N), for L = 1 − pass rate.

{slopes}
How slow that is: to halve L, compute must grow 2^(1/K) times (Qwen2.5 base, intra).

{halving}
Where 72B overtakes 32B does not follow: the offsets E(N) are not printed.

## How many rollouts

arXiv 2603.12151: n*(C) for C = B_p n M completions.

{best}
Both laws are half way (in log2) at C0 = 10^5.84; hard prompts saturate at fewer rollouts.
"""


def pictures(folder: Path) -> None:
    """The two PNGs."""
    from matplotlib.figure import Figure

    figures = {name: Figure(figsize=(10, 3.8), layout="constrained") for name in ("runs", "laws")}
    (long, all_runs), (slopes, rollouts) = (figure.subplots(1, 2) for figure in figures.values())
    C, grid = long_run(), np.geomspace(500, 2e5, 200)
    R = curve("batch 2048", 0.3, C)
    long.plot(C[1:], R[1:], "k.", ms=4, label="the run of 100k, R0 = .3")
    for low, high in ((1500, 50_000), (5000, 50_000), LATE):
        use = (low <= C) & (high >= C)
        A, D, B = (power_law(C[use], R[use])[key] for key in "ADB")
        long.plot(grid, A - D / grid**B, label=f"power law, {low / 1e3:g}k to {high / 1e3:g}k: A {A:.2f}")
    long.set(ylim=(0.25, 0.85), xlabel="GPU-hours", ylabel="pass rate")
    for name in KHATRI:
        all_runs.plot(grid, curve(name, 0.3, grid), label=name)
    all_runs.set(xlabel="GPU-hours", ylabel="pass rate, R0 = .3")

    N, C = np.geomspace(0.3, 300, 100), np.logspace(4, 7.5, 200)
    for i, (name, both) in enumerate(TAN.items()):
        for constants, style in zip(both, ("-", "--"), strict=True):
            slopes.plot(N, K(*constants, N), f"C{i}{style}", label=name if style == "-" else None)
    slopes.set(xlabel="parameters, billions", ylabel="K(N); dashed: inter")
    for name, law in CHENG.items():
        rollouts.plot(C, n_star(C, *law), label=name)
    rollouts.set(yscale="log", xlabel="completions C", ylabel="best rollouts per prompt n*")
    for name, figure in figures.items():
        for axes in figure.axes:
            axes.set(xscale="log")
            axes.legend(fontsize=7)
            axes.grid(alpha=0.3)
        figure.savefig(folder / f"published_{name}.png", dpi=80)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="docs", metavar="FOLDER", help="where the page and its pictures go")
    folder = Path(parser.parse_args(argv).output)
    (folder / "published.md").write_text(page())
    pictures(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
