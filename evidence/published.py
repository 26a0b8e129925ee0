"""What follows from the figures that the three papers print, without any training: docs/published.md and its pictures.

    python evidence/published.py [--output docs]

Every constant below is quoted with its paper and its place.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from figure1 import R0, read, table

from fit_sigmoid import fit, sigmoid
from isocompute import n_star

# Khatri et al. 2025, arXiv 2510.13786, Table 1: (A, B, C_mid in GPU-hours). R0 is not printed: see docs/figure1.md.
KHATRI = {
    "8B, batch 768, 14k tokens": (0.610, 1.92, 2542.0),
    "32k tokens": (0.645, 1.89, 11272.0),
    "batch 512": (0.605, 1.77, 2818.0),
    "batch 2048": (0.645, 1.70, 10909.0),
    "17B x 16 MoE": (0.710, 1.65, 4242.0),
}
# The same: (low, high) in GPU-hours of the run of 100,000 -> A and B of the sigmoid, A of a power law, or NaN.
WINDOWS = {(1500, 50_000): (0.645, 1.70, 1.0), (5000, 50_000): (0.645, 1.67, 0.74),
           (0, 50_000): (0.645, 1.70, math.nan), (0, 100_000): (0.655, 1.56, math.nan)}  # fmt: skip
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


def curve(name: str, C: np.ndarray | float) -> np.ndarray:
    """A published curve at C."""
    A, B, C_mid = KHATRI[name]
    return sigmoid(C, R0["moe" if "MoE" in name else "dense"], A, B, C_mid)


def long_run() -> np.ndarray:
    """(75,) GPU-hours of evaluations of the run of 100,000; its curve is that of batch 2048, whose A and B it has."""
    return np.linspace(0, 100_000, 76)[1:]


def paper_grid(C: np.ndarray, R: np.ndarray, R0: float) -> tuple[float, float, float]:
    """(A, B, C_mid) by the paper's procedure: the least sum of squares over A from .450 to .800 by .005, 100 values of
    C_mid, and all B; R0 is held. The paper finds B by `curve_fit`, here it is the best of 800 values."""
    A, C_mid, B = np.arange(90, 161) * 0.005, np.linspace(100, 40_000, 100), np.geomspace(0.3, 6, 800)
    s = sigmoid(C, 0.0, 1.0, B[:, None, None], C_mid[:, None])  # (800, 100, N)
    gain, y = (A - R0)[:, None, None], R - R0
    Q = y @ y - 2 * gain * (s @ y) + gain**2 * (s * s).sum(-1)  # (71, 800, 100)
    i, j, k = np.unravel_index(Q.argmin(), Q.shape)
    return float(A[i]), float(B[j]), float(C_mid[k])


def power_law(C: np.ndarray, R: np.ndarray) -> tuple[float, float, float]:
    """(A, D, B) of the least sum of squares for R = A - D / C^B with A <= 1. It is linear in A and D for a given B."""
    B = np.geomspace(0.01, 10, 4000)
    x = (C / C[-1]) ** -B[:, None]  # (4000, N)
    low = x - x.mean(1, keepdims=True)
    D = -(low @ R) / (low * low).sum(1)
    A = R.mean() + D * x.mean(1)
    D = np.where(A > 1, ((1 - R) * x).sum(1) / (x * x).sum(1), D)  # on the bound D alone is free
    A = np.minimum(A, 1)
    i = ((A - D * x.T - R[:, None]) ** 2).sum(0).argmin()
    return float(A[i]), float(D[i] * C[-1] ** B[i]), float(B[i])


def window_row(low: float, high: float) -> list[str]:
    """A and B of the long run over a window: as printed, by the paper's grid and by ours; then A of power laws."""
    (C, R), exact = read("dense"), long_run()
    use, exact = (low <= C) & (high >= C), exact[(low <= exact) & (high >= exact)]
    C, R = C[use], R[use]
    f, printed = fit(C, R, skip_below=low), WINDOWS.get((low, high), (math.nan, math.nan, math.nan))
    sigmoids = [printed[:2], *(paper_grid(C, R, R0["dense"] - less)[:2] for less in (0, 0.01)), (f.A, f.B)]
    powers = [printed[2], power_law(C, R)[0], power_law(exact, curve("batch 2048", exact))[0]]
    cells = [f"{A:.3f}, {B:.2f}" for A, B in sigmoids] + [f"{A:.2f}" for A in powers]
    return [f"{low / 1e3:g}k to {high / 1e3:g}k", str(C.size), *("–" if "nan" in cell else cell for cell in cells)]


def extrapolate(name: str, end: float, points: int, draws: int, seed: int = 0) -> dict[str, float]:
    """The first half of a curve, with noise, fitted; its end predicted."""
    rng, C = np.random.default_rng(seed), np.linspace(0, end, points)
    R, half, rows = curve(name, C), C <= end / 2, []
    for _ in range(draws):
        f = fit(C[half], (R + rng.normal(0, NOISE, points))[half])
        low, high = f.interval(end)[:, 0]
        rows.append((f.A, f.identifiable, float(f.predict(end, f.form)) - R[-1], low <= R[-1] <= high, high - low))
    A, known, errors, covered, width = np.array(rows, float).T
    return {"sd of A": A.std(ddof=1), "identifiable": known.mean(), "median error": np.median(np.abs(errors)),
            "covered": covered.mean(), "width": np.median(width)}  # fmt: skip


def overtakes(slow: str, fast: str) -> float:
    """GPU-hours at which the run with the higher ceiling overtakes the other: the last sign change from 100 to 10^6."""

    def ahead(C: Any) -> Any:
        return curve(slow, C) - curve(fast, C)

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


def page() -> str:
    """The text of docs/published.md."""
    base = "8B, batch 768, 14k tokens"
    pairs = (("32k tokens", base), ("batch 2048", base), (base, "batch 512"))
    ahead = [[f"{slow} over {fast}", f"{overtakes(slow, fast) / 1e3:.1f}k"] for slow, fast in pairs]
    halves = []
    for name, arguments in (("0 to 50k, then 100k", ("batch 2048", 1e5, 76)), ("0 to 8k, then 16k", (base, 16e3, 41))):
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
    return PAGE.format(
        draws=DRAWS,
        windows=table(["window, GPU-hours", "points", "printed", "paper's grid, R0 = .40", "the same, R0 = .39",
                       "our fit", "power law, printed", "on the points", "on the exact curve"],
                      [window_row(*window) for window in (*WINDOWS, LATE)]),
        ahead=table(["ahead", "from, GPU-hours"], ahead),
        halves=table(["fitted, predicted", "sd of A", "median error at the end", "width of its 95 % interval",
                      "ceiling identifiable", "truth inside"], halves),
        noise=table(["±.015 read as", "sd of A", "two runs must differ by", "two means of three by",
                     "range of nine equal runs", "it is at most .020 in"], noise),
        slopes=table(["K(N)", *(f"{N:g}B" for N in SIZES)], slopes),
        halving=table(["", *(f"{N:g}B" for N in SIZES)], [["compute to halve the failures, times", *halving]]),
        best=table(["completions C", *(f"10^{c:g}" for c in LOG10_C)], best),
    )  # fmt: skip


PAGE = """# What follows from the printed figures

Three papers print the constants of their laws. This page, written by `python evidence/published.py`, computes what
follows from them without any training; the constants and their places in the papers are at the top of that file. R0,
the pass rate before training, is not printed in arXiv 2510.13786. Its Figure 1 shows .40 for the dense runs and .51 for
the MoE run ([figure1.md](figure1.md)).

![Windows of a long run, and runs that overtake each other](published_runs.png)

## A sigmoid's ceiling hardly depends on the window, a power law's does

arXiv 2510.13786: the run of 100,000 GPU-hours. Its points are those of [figure1.md](figure1.md). The exact curve is
that of batch 2048 in Table 1, without noise, so that only the form of the law decides: A .645, B 1.70, C_mid 10,909,
where the curve that Figure 1 draws has .645, 1.68 and 10,920. First A and B of the sigmoid, then A of the power law
A − D / C^B with A ≤ 1.

{windows}
The power law does what is printed: from 1.5k on it runs to the bound, and from 5k on it has .72 on the points and .74
on the curve for the printed .74. It is the sigmoid's limit for large C, so it agrees only late, when the ceiling is in
sight anyway. The paper's procedure meets the printed A and B to .010 and .13. How exactly R0 is known decides as much:
.01 less in R0 moves A by up to .010. From 5k on our fit, which does not hold R0, finds no ceiling that is identifiable.

## From half a run to its end

{draws} draws each, with noise of sd .005 on every evaluation (mean@16 on 1,000 prompts has a binomial sd of
.004); fitted by `fit_sigmoid.py`.

{halves}
## Which run is ahead, and from when on

From A, B and C_mid of Table 1, and R0 = .40; the run with the higher ceiling is the slower one at first.

{ahead}
So longer completions or a larger batch, whose ceilings are .035 higher, lead from 28k and 30k GPU-hours on. At 16k,
where the leave-one-out runs end, both are still .04 behind.

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
    R = curve("batch 2048", C)
    long.plot(C, R, "k.", ms=4, label="the run of 100k, R0 = .40")
    for low, high in ((1500, 50_000), (5000, 50_000), LATE):
        use = (low <= C) & (high >= C)
        A, D, B = power_law(C[use], R[use])
        long.plot(grid, A - D / grid**B, label=f"power law, {low / 1e3:g}k to {high / 1e3:g}k: A {A:.2f}")
    long.set(ylim=(0.35, 0.85), xlabel="GPU-hours", ylabel="pass rate")
    for name in KHATRI:
        all_runs.plot(grid, curve(name, grid), label=name)
    all_runs.set(xlabel="GPU-hours", ylabel="pass rate, from R0 = .40, MoE .51")

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
