"""Fits the curves of runs from any framework: the full command around `fit_sigmoid.py`.

    python tools/fit_curves.py runs/*/eval.jsonl --fit-until 0.5 --predict-at 2x 1e21 --skip-below auto
    python tools/fit_curves.py wandb.csv --y eval/acc --scale 0.01 --windows --power-law --slopes slopes.png

Beside what `python fit_sigmoid.py` does, it reads CSV with columns of any name (`curve_files.py`), tests whether the
first points are off the curve of the others, refits over the paper's windows of compute, fits a power law for
comparison, draws the linearized plot whose slope is B, and prints JSON.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import curve_fit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from curve_files import Evaluations, InputError, load

import fit_sigmoid
import isocompute
from fit_sigmoid import CurveReport, SigmoidFit, fit, sigmoid, span

WINDOWS = ((0.015, 0.5), (0.0, 1.0), (0.0, 0.5), (0.05, 0.5))  # the paper's, as shares of the run's compute
MAX_EARLY = 12  # points that a cut may leave out, and at most a third
ALPHA = 0.01  # a cut costs precision, so it must have strong evidence

# -------------------------------------------------------------------------------------------- what else one may ask


class Transient(NamedTuple):
    """Whether the first points are off the curve of the others; `skip_below` is 0 where they should stay."""

    skip_below: float
    n_points: int  # that the best cut would leave out
    p_value: float  # of the F test, times the number of cuts tried
    offset: float  # mean of those points minus the curve of the others
    A_before: float
    A_after: float


def early_transient(
    C: ArrayLike, R: ArrayLike, *, n_samples: ArrayLike | None = None, alpha: float = ALPHA
) -> Transient:
    """Test whether the first k points at C > 0 (k up to 12 or a third) are off the sigmoid of the others.

    F = ((Q_all - Q_rest) / k) / dispersion of the rest. A cut is proposed only at p < alpha.
    """
    everything = fit(C, R, n_samples=n_samples, cuts=())  # only its curve is needed
    C, R, n, _ = everything.points
    best = Transient(0.0, 0, 1.0, 0.0, everything.A, everything.A)
    if math.isnan(everything.A):
        return best
    zeros = int((C == 0).sum())
    tries = range(1, min((C.size - zeros) // 3, C.size - zeros - 5, MAX_EARLY) + 1)
    w, prior = 1 / fit_sigmoid.unit_variance(everything.predict(C), n), 0.0 if n is None else fit_sigmoid.PRIOR_DOF
    Q_all = w @ (R - everything.predict(C)) ** 2
    for k in tries:
        rest = np.r_[:zeros, zeros + k : C.size]
        data = fit_sigmoid.Data(C[rest], R[rest], w[rest], (0.0, 1.0))
        x = fit_sigmoid.global_fit(data, fit_sigmoid.search_range(data.C, (0.0, 1.0)))
        miss = R - sigmoid(C, *fit_sigmoid.parameters(x, data))
        dof, Q_rest = rest.size - 4 + prior, data.w @ miss[rest] ** 2
        dispersion = max((Q_rest + prior) / dof, fit_sigmoid.MIN_SD**2)
        p = min(1.0, len(tries) * fit_sigmoid.f_test_p(Q_all - Q_rest, k, dof, dispersion))
        if p < best.p_value:
            cut = float(C[zeros + k]) if p < alpha else 0.0
            best = Transient(cut, k, p, float(miss[zeros : zeros + k].mean()), everything.A, float(x[0]))
    return best


def power_law(C: ArrayLike, R: ArrayLike, *, skip_below: float = 0.0, A_max: float = 1.0) -> dict[str, float]:
    """Least squares for R = A - D / C^B, the sigmoid's high-compute limit, over C > 0 and C >= skip_below.

    Returns A, D, B and rmse. On early data its A runs to the bound, which is why the paper prefers the sigmoid.
    ValueError: fewer than 4 points.
    """
    C, R, *_ = fit_sigmoid.clean(C, R, None, max(A_max, 1.0), skip_below, drop_zero=True)
    if C.size < 4:
        raise ValueError(f"a power law needs 4 points at C > 0, not {C.size}")
    end, found = C[-1], []
    for start in (0.1, 0.4, 1.0, 2.0):
        (A, D, B), _ = curve_fit(
            lambda c, A, D, B: A - D * c**-B, C / end, R, p0=(0.9 * A_max, 0.1, start),
            bounds=([0, 0, 0.01], [A_max, np.inf, 10]), max_nfev=5000,
        )  # fmt: skip
        D *= end**B
        found.append((math.sqrt(np.mean((A - D / C**B - R) ** 2)), float(A), float(D), float(B)))
    return dict(zip(("rmse", "A", "D", "B"), min(found), strict=True))


def windows(
    C: ArrayLike, R: ArrayLike, *, shares: Sequence[tuple[float, float]] = WINDOWS,
    n_samples: ArrayLike | None = None, **options: Any,
) -> list[tuple[float, float, SigmoidFit]]:  # fmt: skip
    """Robustness: (low, high, fit) of the points with low <= C <= high, for windows given as shares of the compute."""
    C, R, n, _ = fit_sigmoid.clean(C, R, n_samples, max(options.get("A_max", 1.0), 1.0))
    spans = [(float(a * C[-1]), float(b * C[-1]), C <= b * C[-1] * fit_sigmoid.ROUNDING) for a, b in shares]
    return [(a, b, fit(C[u], R[u], n_samples=n if n is None else n[u], skip_below=a, **options)) for a, b, u in spans]


def linearized(f: SigmoidFit) -> tuple[np.ndarray, np.ndarray, int]:
    """log C and log F(R) of the points, a line of slope B where the fit holds, and how many points have no log F.

    log F = B log C, with F = C_mid^B / ((A - R0) / (R - R0) - 1) = C_mid^B (R - R0) / (A - R).
    """
    C, R, *_ = f.points
    use = (C > 0) & (R > f.R0) & (R < f.A)
    log_F = f.B * math.log(f.C_mid) + np.log((R[use] - f.R0) / (f.A - R[use]))
    return np.log(C[use]), log_F, int((C > 0).sum() - use.sum())


def plot_slopes(fits: Sequence[SigmoidFit], names: Sequence[str], path: str | Path) -> None:
    """Write a PNG of the paper's linearized plot: F(R) against C, log-log, with lines of slope B."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7.5, 4.6), layout="constrained").subplots()
    for i, (f, name) in enumerate(zip(fits, names, strict=True)):
        log_C, log_F, left_out = linearized(f)
        axes.loglog(np.exp(log_C), np.exp(log_F), f"C{i}o", ms=4, label=f"{name} ({left_out} points outside (R0, A))")
        axes.loglog(np.exp(log_C), np.exp(f.B * log_C), f"C{i}", label=f"slope B = {f.B:.2f}")
    axes.set(xlabel="compute C", ylabel="F(R) = C_mid^B (R - R0) / (A - R)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.figure.savefig(path, dpi=150)


# ----------------------------------------------------------------------------------------------------- one run


class Fitted(NamedTuple):
    """A run: what its file says, the report, and the test of its first points."""

    data: Evaluations
    report: CurveReport
    transient: Transient


def amount(value: float | str, end: float, flag: str) -> float:
    """Compute >= 0 from a number, or from "2x": twice the run's compute `end`."""
    text = str(value)
    result = number(text.removesuffix("x"), math.nan) * (end if text.endswith("x") else 1.0)
    if not result >= 0:
        raise InputError(f"{flag} {text!r}: give compute >= 0 such as 5e6, or 2x for twice the run's")
    return result


def number(text: Any, other: Any) -> Any:
    """The number that `text` spells, else `other`."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return other


def fit_run(
    source: str | Path | Sequence[Mapping], *, x: str | None = None, y: str | None = None,
    samples: str | float | None = None, scale: float = 1.0, x_start: str | float = 0.0, fit_until: float = 1.0,
    skip_below: float | str = 0.0, predict_at: Sequence[float | str] = (), records: bool = False, data_set: str = "",
    **options: Any,
) -> Fitted:  # fmt: skip
    """`fit_sigmoid.curve` of a run that `curve_files.load` reads.

    `skip_below` "auto" takes the cut that `early_transient` proposes. `predict_at` holds compute, or "2x" for twice the
    run's. With `records` points are fitted only if their reward is in a higher bin of .02 than all before, as in arXiv
    2603.12151; points not seen by the fit stay as they are. `options` go to `fit`.
    """
    data = load(source, x=x, y=y, samples=samples, scale=scale, x_start=x_start, data_set=data_set)
    end = float(data.C[np.isfinite(data.C) & np.isfinite(data.R)].max(initial=0.0))
    seen = ~(data.C > fit_until * end * fit_sigmoid.ROUNDING)
    keep = ~seen | np.isnan(data.R) | isocompute.record_points(data.C, data.R) | (not records)
    n, seen = None if data.n_samples is None else data.n_samples[keep], seen[keep]
    data = data._replace(C=data.C[keep], R=data.R[keep], n_samples=n)
    C, R = data.C, data.R
    transient = early_transient(C[seen], R[seen], n_samples=None if n is None else n[seen])
    cut = transient.skip_below if skip_below == "auto" else amount(skip_below, end, "--skip-below")
    at = [amount(a, end, "--predict-at") for a in predict_at]
    rows = [{"compute": c, "pass_rate": r} for c, r in zip(C, R, strict=True)]
    if n is not None:
        rows = [row | {"n_prompts": k, "n_samples": 1} for row, k in zip(rows, n, strict=True)]
    name = str(source).removesuffix("/eval.jsonl") if isinstance(source, (str, Path)) else ""
    name += f", {data_set}" if data_set else ""
    options |= {"skip_below": cut, "fit_until": fit_until, "predict_at": at}
    report = fit_sigmoid.curve(rows, x="compute", name=name, **options)
    report.x = data.x
    report.fit.points.left_out.update({"no record": int((~keep).sum())} if records else {})
    return Fitted(data, report, transient)


def format_run(run: Fitted) -> str:
    """The report, and a line about the first points where they are off."""
    text, t = fit_sigmoid.format_report(run.report), run.transient
    if t.skip_below and not math.isnan(run.report.fit.A):
        text += (
            f"\n{'early points':<24}the first {t.n_points} are {t.offset:+.3f} off the curve of the others (p = "
            f"{t.p_value:.0e}); A is {t.A_before:.3f} with and {t.A_after:.3f} without them: consider "
            f"--skip-below {t.skip_below:g}"
        )
    return text


# ------------------------------------------------------------------------------------------------- the command line


def plain(v: Any) -> Any:
    """For JSON: fits and reports without their arrays, named tuples as dicts, null for what is not finite."""
    if isinstance(v, SigmoidFit):
        v = {name: getattr(v, name) for name in ("R0", "A", "B", "C_mid", "rmse", "n_points")} | {
            **{f"{name}_interval": pair for name, pair in v.intervals._asdict().items()},
            **{name: getattr(v, name) for name in ("identifiable", "reason", "R0_source")},
            "left_out": v.points.left_out, "phi": v.uncertainty.dispersion, "dof": v.uncertainty.dof,
            **{name: v.options[name] for name in ("level", "A_max", "method")},
        }  # fmt: skip
    if isinstance(v, Fitted):
        v, transient = dict(vars(v.report)), v.transient
        names = ("name", "x", "fit", "fit_until", "transient", "unseen_points", "unseen_rmse", "unseen_covered")
        v = {name: (v | {"transient": transient})[name] for name in (*names, "predictions")}
    v = v._asdict() if hasattr(v, "_asdict") else vars(v) if isinstance(v, fit_sigmoid.Comparison) else v
    if isinstance(v, dict):
        return {key: plain(value) for key, value in v.items()}
    if isinstance(v, (list, tuple)):
        return [plain(u) for u in v]
    return None if isinstance(v, float) and not math.isfinite(v) else v


def check_options(args: argparse.Namespace) -> None:
    """InputError for a value that cannot work."""
    A_range = args.A_range
    for flag, right, fix in (
        ("fit-until", 0 < args.fit_until <= 1, "a share > 0 and <= 1"),
        ("scale", 0 < args.scale < math.inf, "a number > 0, such as 0.01 for percent"),
        ("samples", not isinstance(args.samples, float) or 0 < args.samples < math.inf, "a number > 0 or a column"),
        ("x-start", args.x_start == "first" or math.isfinite(number(args.x_start, math.nan)), "a number or 'first'"),
        ("A-max", 0 < args.A_max < math.inf, "a number > 0"),
        ("R0", args.R0 is None or 0 <= args.R0 <= args.A_max, "a rate from 0 to --A-max"),
        ("A-range", not A_range or 0 <= A_range[0] < A_range[1] < math.inf, "0 <= LOW < HIGH"),
        ("A-range", not A_range or args.method == "paper_grid", "--method paper_grid with it"),
    ):
        if not right:
            raise InputError(f"--{flag} is {getattr(args, flag.replace('-', '_'))}; give {fix}")


def run(args: argparse.Namespace) -> str:
    """What the command line prints. InputError for what the user can mend."""
    check_options(args)
    options = {"R0": args.R0, "A_max": args.A_max, "method": args.method}
    options |= {"A_range": args.A_range} if args.A_range else {}
    reading = {name: getattr(args, name) for name in ("x", "y", "samples", "scale", "x_start", "data_set")}
    asked = {name: getattr(args, name) for name in ("fit_until", "skip_below", "predict_at", "records")}
    runs: list[Fitted] = []
    for file in args.files:
        runs.append(fit_run(file, **reading, **asked, **options))
        report, first = runs[-1].report, runs[0].report
        if math.isnan(report.fit.A):
            hint = " (--x-start first)" if "subtract its start" in report.fit.reason else ""
            raise InputError(f"{file}, line {runs[-1].data.last_line}: {report.fit.reason}{hint}")
        if report.x != first.x:
            raise InputError(f"{file}, line 1: x is {report.x}, but {first.x} in {args.files[0]}; choose one with --x")
    reports = [r.report for r in runs]
    result, text = {"runs": runs}, ["\n\n".join(map(format_run, runs))]
    shared = []  # the slopes are drawn at the shared A, as in the paper
    if len(runs) > 1:
        both = fit_sigmoid.compare(*(r.fit for r in reports), names=[r.name for r in reports])
        result["comparison"], shared = both, both.refits
        text.append(fit_sigmoid.format_comparison(both))
    for r in runs:
        more(args, r, options, result, text)
    try:
        if args.plot:
            fit_sigmoid.plot_curves(reports, args.plot)
        if args.slopes:
            plot_slopes(shared or [r.fit for r in reports], [r.name for r in reports], args.slopes)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise InputError(f"--plot or --slopes: not written ({error}); name a .png in a folder that exists") from error
    return json.dumps(plain(result), indent=1) if args.json else "\n\n".join(text)


def more(args: argparse.Namespace, run: Fitted, options: dict, result: dict, text: list[str]) -> None:
    """What --windows and --power-law ask of a run: added to `result` and `text`."""
    name, f = run.report.name, run.report.fit
    if args.windows:
        table = result[f"windows of {name}"] = windows(run.data.C, run.data.R, n_samples=run.data.n_samples, **options)
        lines = (f"  {span((a, b)):<18}A {w.A:.3f} {span(w.A_interval, 3)}  B {w.B:.2f}" for a, b, w in table)
        text.append("\n".join([f"{name}: windows of compute", *lines]))
    if args.power_law:
        if (f.points.C > 0).sum() < 4:
            raise InputError(f"{name}: --power-law needs 4 points at C > 0; evaluate more often or leave it out")
        law = result[f"power law of {name}"] = power_law(f.points.C, f.points.R, A_max=args.A_max)
        text.append(f"{name}: A - D / C^B with A {law['A']:.3f}, B {law['B']:.2f}, RMSE {law['rmse']:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Fit reward against compute with a sigmoid (arXiv 2510.13786, Eq. 1).")
    add = parser.add_argument
    add("files", nargs="+", help="eval.jsonl of a run, or a CSV with named columns")
    add("--x", help="column of compute: device_hours, flops, tokens, step or another (default: tokens on a CPU run)")
    add("--x-start", default="0", metavar="C", help="subtract this from the compute, or 'first': its least value")
    add("--y", help="column of the reward, in [0, 1] (default: pass_rate)")
    add("--scale", type=float, default=1.0, help="multiply the reward by this, 0.01 for percent")
    add("--data-set", default="", metavar="NAME", help="fit this data set of train.py's evaluations alone")
    add("--samples", help="Bernoulli samples behind a point: column or number (default: n_prompts * n_samples)")
    add("--method", choices=fit_sigmoid.METHODS, default=fit_sigmoid.METHODS[0])
    add("--fit-until", type=float, default=1.0, metavar="SHARE", help="fit this share of the compute, predict the rest")
    add("--skip-below", default="0", metavar="C", help="leave out points with 0 < compute < C, or 'auto'")
    add("--predict-at", nargs="+", default=[], metavar="C", help="compute such as 1e21, or 2x for twice the run's")
    add("--records", action="store_true", help="fit record-breaking points only (which are lucky: see docs/fit.md)")
    add("--R0", type=float, help="hold R0 fixed")
    add("--A-max", type=float, default=1.0, help="bound on the ceiling")
    add("--A-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="A of the paper's grid (default: 0.45 0.8)")
    add("--plot", metavar="PNG", help="draw points, fit and extrapolation")
    add("--slopes", metavar="PNG", help="draw log F(R) against log C, lines of slope B")
    add("--windows", action="store_true", help="refit over the paper's windows of compute")
    add("--power-law", action="store_true", help="fit A - D / C^B too")
    add("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args(argv)
    args.samples, args.x_start = number(args.samples, args.samples), number(args.x_start, args.x_start)
    try:
        print(run(args))
    except InputError as error:
        print(f"fit_curves.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
