"""The two runs of Figure 1 of arXiv 2510.13786, fitted at every cut: the tables and the picture of docs/figure1.md.

python evidence/figure1.py [--output docs]
"""

import argparse
import csv
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import curve_fit
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fit_sigmoid import SigmoidFit, fit, plain_fit, short, sigmoid, span

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = {"dense": "8B dense run", "moe": "17B x 16 MoE run"}
R0 = {"dense": 0.40, "moe": 0.51}  # read off the figure, as the page says
CUTS = {"dense": (10, 15, 20, 25, 30, 35, 40, 50, 60, 100), "moe": (7, 9, 12, 16, 20, 25, 30, 35, 100)}  # in thousands
HALF = {"dense": 50, "moe": 16}  # up to where the paper fits; and (R0, A, B, C_mid) of the curve that it draws
DRAWN = {"dense": (0.4017, 0.6446, 1.682, 10920), "moe": (0.5116, 0.7099, 1.659, 6920)}
HEADS = {
    "cuts": "data until|points|reach, C_mid|Eq. 1's A|B|A's interval|best form|identifiable|later inside|ask again at",
    "others": "data until|usual fit: A|later inside|without the first 1.5k: A|A's interval|identifiable|later inside",
}


def read(run: str) -> np.ndarray:
    """(2, N) GPU-hours and pass rates of the dense or the MoE run."""
    with (DOCS / "results" / "figure1.csv").open() as file:
        rows = [(row["k_gpu_hours"], row["pass_rate"]) for row in csv.DictReader(file) if row["run"] == run]
    C, R = np.array(rows, dtype=float).T
    return np.array([1000 * C, R])


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


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in [head, ["---"] * len(head), *rows])


def rows_of(run: str) -> dict[str, list]:
    """The rows of its two tables."""
    (C, R), rows, yes = read(run), {"cuts": [], "others": []}, ("no", "yes")
    for cut in CUTS[run]:
        now = 1000 * cut >= C
        f, late, later = fit(C[now], R[now]), fit(C[now], R[now], skip_below=1500), (C[~now], R[~now])
        A, half, (low, high) = usual(C[now], R[now], later[0])
        counts = inside(f, *later), ((low <= later[1]) & (later[1] <= high)).sum(), inside(late, *later)
        held = [f"{count} of {low.size}" if low.size else "–" for count in counts]
        name, again = f"{cut}k" if low.size else "all", short(f.ask_again()) if f.reason else "–"
        rows["cuts"].append([name, f.n_points, f"{C[now][-1] / f.C_mid:.1f}", f"{f.A:.3f}", f"{f.B:.2f}",
                             span(f.A_interval, 3), f.form, yes[f.identifiable], held[0], again])  # fmt: skip
        claim, late_A = f"{A:.3f} ± {half:.3f}" if half < 0.5 else "unknown", f"{late.A:.3f}" if late.best else "no fit"
        rows["others"].append([name, claim, held[1], late_A, span(late.A_interval, 3), yes[late.identifiable], held[2]])
    return rows


def page(text: str) -> str:
    """docs/figure1.md with its tables made anew, each below the comment that names it."""
    for run in CUTS:
        for kind, rows in rows_of(run).items():
            before, after = re.split(rf"(?<=<!-- {run} {kind} -->\n)(?:\|.*\n)*", text)
            text = before + table(HEADS[kind].split("|"), rows) + after
    return text


def picture(path: Path) -> None:
    """Left A against the cut, right the forecast from where the paper makes its own."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for run, (left, right) in zip(CUTS, figure.subplots(2, 2), strict=True):
        C, R = read(run)
        fits = [fit(C[:i], R[:i]) for i in range(7, C.size + 1)]
        cuts, claims = [f.C[-1] for f in fits], np.array([usual(f.C, f.R, C[:0])[:2] for f in fits])
        claims[claims[:, 1] > 0.5] = math.nan
        left.fill_between(cuts, *np.transpose([f.A_interval for f in fits]), color="0.85", label="A's interval")
        left.errorbar(cuts, *claims.T, fmt="none", ecolor="0.35", lw=0.8, capsize=2, label="A, the usual fit of Eq. 1")
        for known, fill in ((False, "white"), (True, "black")):
            points = np.array([(f.C[-1], f.A) for f in fits if f.identifiable == known])
            left.plot(*points.T, "ko", mfc=fill, ms=5, label="Eq. 1's A" + ", identifiable" * known)
        left.axhline(fits[-1].A, color="C3", ls="--", label=f"Eq. 1's A of the whole run, {fits[-1].A:.3f}")
        left.set(title=f"{NAMES[run]}: its ceiling, by how much is fitted", ylabel="A", ylim=(R.max() - 0.16, 1.02))
        now, grid = 1000 * HALF[run] >= C, np.geomspace(C[0] / 1.3, 1.3 * C[-1], 200)
        f, beyond = fit(C[now], R[now]), grid[grid > 1000 * HALF[run]]
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=DOCS, type=Path, metavar="FOLDER")
    folder = parser.parse_args(argv).output
    (folder / "figure1.md").write_text(page((DOCS / "figure1.md").read_text()))
    picture(folder / "figure1.png")


if __name__ == "__main__":
    main()
