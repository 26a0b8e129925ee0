"""What follows, without any training, from what three papers print: tables and picture of docs/results/figure1.md (the
two runs of Figure 1 of arXiv 2510.13786, fitted at every cut) and tables of docs/results/published.md (constants and
where they stand).

    python evidence/published.py [--output docs/results]
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import brentq, curve_fit
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import saturating_power
from report import fill, table

from fit_sigmoid import SigmoidFit, fit, plain_fit, short, sigmoid, span
from isocompute import n_star

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

# Khatri et al. 2025, arXiv 2510.13786, Figure 1: what its page says of its two runs, and (R0, A, B, C_mid) as drawn.
NAMES = {"dense": "8B dense run", "moe": "17B x 16 MoE run"}
R0 = {"dense": 0.40, "moe": 0.51}  # read off the figure, as the page says
CUTS = {"dense": (15, 20, 25, 50, 60, 100), "moe": (16, 25, 35, 100)}  # in thousands
HALF = {"dense": 50, "moe": 16}  # up to where the paper fits
DRAWN = {"dense": (0.4017, 0.6446, 1.682, 10920), "moe": (0.5116, 0.7099, 1.659, 6920)}
# The same, Table 1, 8B: (A, B, C_mid in GPU-hours); the base is batch 768 with 14k tokens. R0 is not printed.
KHATRI = {
    "base": (0.610, 1.92, 2542.0),
    "32k tokens": (0.645, 1.89, 11272.0),
    "batch 2048": (0.645, 1.70, 10909.0),
}
BASE = "base"
# The same: (low, high) in GPU-hours of the run of 100,000 -> A and B of the sigmoid, A of a power law, or NaN.
WINDOWS = {
    (1500, 50_000): (0.645, 1.70, 1.0),
    (5000, 50_000): (0.645, 1.67, 0.74),
    (0, 100_000): (0.655, 1.56, math.nan),
    (30_000, 60_000): (math.nan,) * 3,  # ours: where both laws should agree
}
LOO_A, SEED_NOISE = (0.590, 0.610), 0.015  # the same: A of the leave-one-out runs; of three equal runs
# Tan et al. 2025, arXiv 2509.25300, Qwen2.5 base over compute, within a model: K_max, N0 in billions.
TAN = 0.135, 13.1
SIZES = (0.5, 7, 32, 72)
# Cheng et al. 2026, arXiv 2603.12151: L, s, log10 C0, b of n*(C).
CHENG = {"easy": (6.09, 4.75, 5.84, 2.73), "hard": (4.47, 7.23, 5.84, 2.79)}
LOG10_C = (4.5, 5.5, 5.84, 6.0, 7.0)

HEADS = {
    "cuts": "until|C_mid|Eq. 1's A|A's interval|ask again|later|usual fit's A|inside",
    "windows": "window, GPU-hours|printed|paper's grid|our fit|power law, printed|on the points",
    "ahead": "ahead of the base|from, GPU-hours",
    "noise": "±.015 read as|sd of A|two runs differ by|two means of three by|nine within .020 in",
}


# ------------------------------------------------------------------------------------------------ the runs of Figure 1


@cache
def read(run: str) -> np.ndarray:
    """(2, N) GPU-hours and pass rates of the dense or the MoE run."""
    points = pd.read_csv(RESULTS / "figure1.csv").query("run == @run")
    return np.array([1000 * points["k_gpu_hours"], points["pass_rate"]])


@cache
def fits(run: str) -> list[SigmoidFit]:
    """To the first 7, 8, ... and at last to all points."""
    C, R = read(run)
    return [fit(C[:i], R[:i]) for i in range(7, C.size + 1)]


def inside(f: SigmoidFit, C: np.ndarray, R: np.ndarray) -> int:
    """How many of the later evaluations R (K,) lie in their intervals."""
    low, high = f.interval(C, noise=True) if C.size else (0, 0)
    return int(((low <= R) & (R <= high)).sum())


def usual(C: np.ndarray, R: np.ndarray, later: np.ndarray) -> tuple[float, float, np.ndarray]:
    """(A, half-width of its 95 % interval, (2, K) intervals of evaluations at `later`) as most would compute them:
    Eq. 1, the covariance of `curve_fit`, and the error of a forecast by derivatives."""
    p, V = curve_fit(sigmoid, C, R, p0=plain_fit(C, R), maxfev=20_000)
    t, h = float(stdtrit(C.size - 4, 0.975)), 1e-5 * p
    slopes = np.array([sigmoid(later, *(p + d)) - sigmoid(later, *(p - d)) for d in np.diag(h)]) / (2 * h[:, None])
    noise = np.sum((R - sigmoid(C, *p)) ** 2) / (C.size - 4)
    reach = t * np.sqrt((slopes * (V @ slopes)).sum(0) + noise)
    return float(p[1]), t * math.sqrt(V[1, 1]), sigmoid(later, *p) + np.array([[-1], [1]]) * reach


def cut_table(run: str) -> str:
    """The table of a run: our fit at every cut, and what the usual fit says."""
    (C, R), rows = read(run), []
    for cut in CUTS[run]:
        now = 1000 * cut >= C
        f, later = fits(run)[now.sum() - 7], (C[~now], R[~now])
        A, half, (low, high) = usual(C[now], R[now], later[0])
        held = str(((low <= later[1]) & (later[1] <= high)).sum()) if low.size else "–"
        claim = f"{A:.3f} ± {half:.3f}" if half < 0.5 else "unknown"
        fitted = f"{C[now][-1] / f.C_mid:.1f}", f"{f.A:.3f}", span(f.A_interval, 3)
        again = short(f.ask_again()) if f.reason else "identifiable"
        rows.append([f"{cut}k" if low.size else "all", *fitted, again, str(low.size or "–"), claim, held])
    return table(HEADS["cuts"].split("|"), rows)


# --------------------------------------------------------------------------------------------- what constants imply


def curve(name: str, C: ArrayLike) -> np.ndarray:
    """A published curve at C."""
    return sigmoid(C, R0["dense"], *KHATRI[name])


def paper_grid(C: np.ndarray, R: np.ndarray, R0: float) -> tuple[float, float, float]:
    """(A, B, C_mid) by the paper's procedure: the least sum of squares over A from .450 to .800 by .005, 100 values of
    C_mid, and all B; R0 is held. The paper finds B by `curve_fit`, here it is the best of 800 values."""
    A, C_mid, B = np.arange(90, 161) * 0.005, np.linspace(100, 40_000, 100), np.geomspace(0.3, 6, 800)
    s = sigmoid(C, 0.0, 1.0, B[:, None, None], C_mid[:, None])  # (800, 100, N)
    gain, y = (A - R0)[:, None, None], R - R0
    Q = y @ y - 2 * gain * (s @ y) + gain**2 * (s * s).sum(-1)  # (71, 800, 100)
    i, j, k = np.unravel_index(Q.argmin(), Q.shape)
    return float(A[i]), float(B[j]), float(C_mid[k])


def window_row(low: float, high: float) -> list[str]:
    """A and B of the long run over a window: as printed, by the paper's grid and by ours; then A of power laws."""
    (C, R), printed = read("dense"), WINDOWS[low, high]
    use = (low <= C) & (high >= C)
    C, R = C[use], R[use]
    f = fit(C, R, skip_below=low)
    cells = [f"{A:.3f}, {B:.2f}" for A, B in (printed[:2], paper_grid(C, R, R0["dense"])[:2], (f.A, f.B))]
    cells += [f"{A:.2f}" for A in (printed[2], saturating_power(C, R)[0])]
    return [f"{low / 1e3:g}k to {high / 1e3:g}k", *("–" if "nan" in cell else cell for cell in cells)]


def overtakes(slow: str, fast: str) -> float:
    """GPU-hours at which the run with the higher ceiling overtakes the other: the last sign change from 100 to 10^6."""

    def ahead(C: np.ndarray) -> np.ndarray:
        return curve(slow, C) - curve(fast, C)

    grid = np.geomspace(100, 1e6, 400)
    [*_, last] = np.flatnonzero(np.diff(np.sign(ahead(grid))))
    return float(brentq(ahead, grid[last], grid[last + 1]))


def range_of_equal_runs(sd: float, runs: int) -> tuple[float, float]:
    """(mean range of A over `runs` equal runs, share of such sets whose range is at most that of the leave-one-out)."""
    A = np.random.default_rng(0).normal(0, sd, (100_000, runs))
    ranges = np.ptp(np.round(A / 0.005) * 0.005, axis=1)  # A is fitted on a grid of .005
    return float(ranges.mean()), float(np.mean(ranges <= LOO_A[1] - LOO_A[0] + 1e-9))


def noise_row(reading: str, sd: float) -> list[str]:
    """How far apart two runs, and two means of three, must be for 95 % confidence, and where nine equal ones lie."""
    _, below = range_of_equal_runs(sd, 9)
    apart = [1.96 * 2**0.5 * sd, 2.776 * (2 / 3) ** 0.5 * sd]  # t with 4 degrees of freedom
    return [reading, f"{sd:.4f}", *(f"{v:.3f}" for v in apart), f"{below:.0%}"]


def K(K_max: float, N0: float, N: float) -> float:
    """Tan et al.: slope of a model with N billion parameters."""
    return K_max / (1 + N0 / N)


def constant_tables() -> dict[str, str]:
    """The tables of published.md, by name."""
    readings = {"the standard deviation": 1, "half the range of three": 0.846, "95 % of runs": 1.96}
    slopes = [["K(N)", *(f"{K(*TAN, N):.3f}" for N in SIZES)]]
    best = [[name, *(f"{float(n_star(10**c, *law)):.0f}" for c in LOG10_C)] for name, law in CHENG.items()]
    rows = {
        "windows": [window_row(*window) for window in WINDOWS],
        "ahead": [[slow, f"{overtakes(slow, BASE) / 1e3:.1f}k"] for slow in ("32k tokens", "batch 2048")],
        "noise": [noise_row(name, SEED_NOISE / by) for name, by in readings.items()],
    }
    return {name: table(HEADS[name].split("|"), some) for name, some in rows.items()} | {
        "slopes": table(["N", *(f"{N:g}B" for N in SIZES)], slopes),
        "best": table(["completions C", *(f"10^{c:g}" for c in LOG10_C)], best),
    }


# --------------------------------------------------------------------------------------------------------- picture


def draw_cuts(path: Path) -> None:
    """Left A against the cut, right the forecast from where the paper makes its own."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for run, (left, right) in zip(CUTS, figure.subplots(2, 2), strict=True):
        C, R = read(run)
        cuts, claims = [f.C[-1] for f in fits(run)], np.array([usual(f.C, f.R, C[:0])[:2] for f in fits(run)])
        claims[claims[:, 1] > 0.5] = math.nan
        left.fill_between(cuts, *np.transpose([f.A_interval for f in fits(run)]), color="0.85", label="A's interval")
        left.errorbar(cuts, *claims.T, fmt="none", ecolor="0.35", lw=0.8, capsize=2, label="A, the usual fit of Eq. 1")
        for known, color in ((False, "white"), (True, "black")):
            points = np.array([(f.C[-1], f.A) for f in fits(run) if f.identifiable == known])
            left.plot(*points.T, "ko", mfc=color, ms=5, label="Eq. 1's A" + ", identifiable" * known)
        A = fits(run)[-1].A
        left.axhline(A, color="C3", ls="--", label=f"Eq. 1's A of the whole run, {A:.3f}")
        left.set(title=f"{NAMES[run]}: its ceiling, by how much is fitted", ylabel="A", ylim=(R.max() - 0.16, 1.02))
        now, grid = 1000 * HALF[run] >= C, np.geomspace(C[0] / 1.3, 1.3 * C[-1], 200)
        f, beyond = fits(run)[now.sum() - 7], grid[grid > 1000 * HALF[run]]
        right.fill_between(beyond, *f.interval(beyond, noise=True), color="0.85", label="interval of evaluations")
        right.plot(grid, f.predict(grid, f.form), "k-", lw=1.2, label=f"our forecast from {HALF[run]}k, {f.form}")
        right.plot(grid, sigmoid(grid, *DRAWN[run]), "C3--", lw=1.2, label="the paper's curve")
        right.plot(C[now], R[now], "ko", ms=4, label="fitted")
        right.plot(C[~now], R[~now], "ko", mfc="white", ms=4, label="later")
        right.set(title=f"{NAMES[run]}: the forecast from {HALF[run]}k", ylabel="pass rate")
        for axes, place in ((left, "upper right"), (right, "lower right")):
            axes.set_xscale("log")
            axes.set_xticks([1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5], ["1k", "2k", "5k", "10k", "20k", "50k", "100k"])
            axes.set(xlim=(0.9 * axes.get_lines()[0].get_xdata()[0], 1.3 * C[-1]), xlabel="GPU-hours")
            axes.minorticks_off()
            axes.legend(fontsize=8, loc=place)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--output", default=RESULTS, type=Path, metavar="FOLDER", help="of pages and picture")
    folder = parser.parse_args(argv).output
    cuts = {f"{run} cuts": cut_table(run) for run in CUTS}
    for name, tables in (("figure1.md", cuts), ("published.md", constant_tables())):
        (folder / name).write_text((RESULTS / name).read_text())
        fill(folder / name, tables)
    draw_cuts(folder / "figure1.png")


if __name__ == "__main__":
    main()
