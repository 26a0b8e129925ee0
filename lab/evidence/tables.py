"""What a flag changed, paired by seed: a table for each comparison, and the findings of RESULTS.md.

    python lab/evidence/tables.py       # from the published curves and nothing else (`make -C lab refit`)

Each run is fitted with all its points. A, the ceiling, is compared where it is identifiable. B and C_mid are compared
at the shared A, the mean of the identifiable ceilings, as in the paper's leave-one-out. A run whose own interval of A
leaves out the shared one has no B and C_mid, and a variant of which less than half of the pairs are left has none.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
With d_N = variant - baseline at seed N, the 95 % interval over n seeds is mean(d) -+ t sd(d) / sqrt(n), where t is
Student's quantile with n - 1 degrees of freedom. Two variants are distinguishable if 0 lies outside. Nothing is
corrected for the number of intervals: of twenty without any effect, one will look like one.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from claims import pooled_sd, verdict, visible
from comparisons import COMPARISONS, Comparison
from pages import fill, markdown, without_repeats
from runs import RESULTS, Run, members
from scipy.special import stdtrit

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from curves import short
from forecast import Forecast, forecast

Groups = Mapping[str, Sequence[Run]]  # variant -> its finished runs, the baseline first
Interval = tuple[float, float, float]  # mean, low, high
FALL = 0.1  # an evaluation this far below the best before it
RATE = 0.5  # the compute to this pass rate is reported
# Compute: differences of logarithms, shown in percent.
LOGARITHMIC = ("C_mid", "tokens", "trained", "flops", "device_hours")
TITLES = {  # Δ: variant minus baseline
    "A": "ΔA",
    "B": "ΔB",
    "C_mid": "ΔC_mid",
    "end": "Δend",
    "tokens": "Δtokens to .5",
    "trained": "the same without what waits",
    "flops": "ΔFLOPs to .5",
    "device_hours": "Δhours to .5",
}
AT_SHARED_A = ("B", "C_mid")
IN_TURNS = ("trained", "device_hours")  # are shown where runs were made side by side and their schedules differ
LEFT_OUT = ["identifiable", "A", "ΔC_mid", "Δend", TITLES["trained"]]  # of the page; ablate.py prints them
LEAST_PAIRS = 3  # for a verdict, and for bold


# ------------------------------------------------------------------------------------------------------ one run


def fit_to(run: Run, axis: str, share: float = 1.0) -> Forecast:
    """The forecast from the first `share` of a run's compute on that axis."""
    C = np.where(run.points["step"] == 0, 0.0, run.points[axis])  # the clock may have run before the first step
    seen = share * C.max() * (1 + 1e-12) >= C
    return forecast(C[seen], run.rates[seen], n_samples=run.points["n"][seen])


fitted = cache(fit_to)  # comparisons share runs


def compute_to(compute: np.ndarray, rates: np.ndarray, rate: float) -> float:
    """Compute at which the straight line between evaluations first reaches `rate`; NaN if no evaluation does."""
    reached = np.flatnonzero(rates >= rate)
    if reached.size == 0:
        return math.nan
    i = reached[0]
    if i == 0:
        return float(compute[0])
    return float(np.interp(rate, rates[i - 1 : i + 1], compute[i - 1 : i + 1]))


def waiting(run: Run) -> float:
    """Tokens that wait in the queue: what was sampled by the second evaluation beyond what its steps trained on, at the
    tokens of a step between the second and the fourth."""
    tokens = run.points["tokens"]
    step = run.points["step"]
    if step.size < 4:
        return math.nan
    of_a_step = (tokens[3] - tokens[1]) / (step[3] - step[1])
    return float(tokens[1] - step[1] * of_a_step)


def depths(rates: np.ndarray) -> np.ndarray:
    """(N,): how far each evaluation lies below the best before it; 0 at a new best."""
    return np.maximum.accumulate(rates) - rates


# ------------------------------------------------------------------------------------------------ one comparison


def measure(groups: Groups, axis: str = "tokens", rate: float = RATE) -> pd.DataFrame:
    """The numbers of each run, a row for each (variant, seed), with the compute to `rate`; NaN where there is none."""
    runs = {(variant, run.seed): run for variant, group in groups.items() for run in group}
    fits = {key: fitted(run, axis) for key, run in runs.items()}
    identifiable = [f.fit.A for f in fits.values() if f.identifiable]
    known = [f.fit.A for f in fits.values() if math.isfinite(f.fit.A)]
    shared = float(np.mean(identifiable or known)) if known else None
    rows = {}
    for key, run in runs.items():
        own = fits[key].fit
        again = forecast(own.C, own.R, n_samples=own.n, A=shared).fit
        low, high = own.A_interval
        possible = shared is not None and low <= shared <= high
        tokens = compute_to(run.points["tokens"], run.rates, rate)
        rows[key] = {
            "A": own.A if own.identifiable else math.nan,
            "B": again.B if possible else math.nan,
            "C_mid": again.C_mid if possible else math.nan,
            "end": run.rates[-2:].mean(),
            "tokens": tokens,
            "trained": tokens - waiting(run),
            "flops": compute_to(run.points["flops"], run.rates, rate),
            "device_hours": compute_to(run.points["device_hours"], run.rates, rate),
            "fell": depths(run.rates).max(),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def baselines(c: Comparison, numbers: pd.DataFrame) -> dict[str, str]:
    """{variant: its baseline}, for the variants that have one with finished runs."""
    first = next(iter(c.variants))
    variants = numbers.index.unique(0)
    pairs = {variant: c.against.get(variant, first) for variant in variants if variant != first}
    return {variant: base for variant, base in pairs.items() if base in variants}


def differences(numbers: pd.DataFrame, variant: str, base: str, name: str) -> pd.Series:
    """Variant minus baseline by seed, where both are known; of logarithms for compute."""
    column = numbers[name]
    if name in LOGARITHMIC:
        column = np.log(column.where(column > 0))
    return (column[variant] - column[base]).dropna()


def interval(values: Sequence[float]) -> Interval:
    """(mean, low, high): Student's 95 % interval of the mean over seeds; NaN ends for one value, all NaN for none."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - reach, mean + reach


def as_text(values: Sequence[float], name: str) -> str:
    """`-0.001 [-0.003, +0.001]`; of logarithms `+39 % [+22, +59]`, from ten times on `18 times [2.35, 43.8]`. What is
    NaN is left out."""
    known = [value for value in values if not math.isnan(value)]
    unit = ""
    if not known:
        return "–"
    if name not in LOGARITHMIC:
        digits = 2 if name == "B" else 3
        words = [f"{value:+.{digits}f}" for value in known]
    elif max(known) > math.log(10):
        words = [f"{math.exp(value):.3g}" for value in known]
        unit = " times"
    else:
        words = [f"{100 * math.expm1(value):+.0f}" for value in known]
        unit = " %"
    mean, *ends = words
    if ends:
        return f"{mean}{unit} [{', '.join(ends)}]"
    return mean + unit


def difference_cell(numbers: pd.DataFrame, variant: str, base: str, name: str) -> str:
    """The difference with its interval, in bold where THE RULE tells the two apart, and of how many seeds if not of
    all."""
    apart = differences(numbers, variant, base, name)
    mean, low, high = interval(apart)
    text = as_text((mean, low, high), name)
    n = len(numbers.loc[variant])
    if name in AT_SHARED_A and 2 * len(apart) < n:
        return "–"
    if 0 < len(apart) < n:
        text += f" ({len(apart)} of {n})"
    if len(apart) >= LEAST_PAIRS and (low > 0 or high < 0):
        return f"**{text}**"
    return text


def compare(c: Comparison, numbers: pd.DataFrame) -> pd.DataFrame:
    """The table of one comparison: what the runs of each variant did, and what changed against its baseline."""
    against = baselines(c, numbers)
    rows = []
    for variant in numbers.index.unique(0):
        group = numbers.loc[variant]
        base = against.get(variant, "")
        row = {"variant": variant}
        if c.against:  # else it is the first variant for all
            row["against"] = base or "–"
        row |= {
            "seeds": len(group),
            "identifiable": group["A"].count(),
            "fell": (group["fell"] > FALL).sum(),
            "A": f"{group['A'].mean():.3f}".replace("nan", "–"),
            "end": f"{group['end'].mean():.3f}",
        }
        for name, title in TITLES.items():
            if name not in IN_TURNS or c.axis == "device_hours":
                row[title] = difference_cell(numbers, variant, base, name) if base else "–"
        rows.append(row)
    return pd.DataFrame(rows)


# -------------------------------------------------------------------------------------------- against the paper


def spread(numbers: pd.DataFrame, against: Mapping[str, str], name: str) -> float:
    """Standard deviation of the paired differences, pooled within the variants. Runs that fall are left out: one
    collapse has a C_mid a thousand times as large, and would hide what all others could see."""
    calm = numbers.where(numbers["fell"] <= FALL)
    return pooled_sd([differences(calm, variant, base, name) for variant, base in against.items()])


def findings(c: Comparison, numbers: pd.DataFrame) -> pd.DataFrame:
    """What the paper has, what we have, and whether the runs could have told."""
    against = baselines(c, numbers)
    rows = []
    for variant, claim in c.paper.items():
        if variant not in against:
            continue
        name = claim.measure
        apart = differences(numbers, variant, against[variant], name)
        mean, low, high = interval(apart)
        could_see = visible(spread(numbers, against, name), len(apart))
        row = {
            "variant": variant,
            "against": against[variant],
            "the paper": claim.words,
            "source": claim.source,
            "could this task show it?": claim.visible,
            "here": as_text((mean, low, high), name),
            "pairs": len(apart),
            "could see": short(could_see) if could_see > 0 else "–",
            "verdict": f"**{verdict(low, high, claim, len(apart) >= LEAST_PAIRS)}**",
        }
        rows.append(row)
    return pd.DataFrame(rows)


# -------------------------------------------------------------------------------------------------------- pages


def draw(published: Mapping[str, Groups]) -> None:
    """The picture of RESULTS.md: runs that were made side by side on one clock; and runs whose tokens are stale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.2))
    speed, falls = figure.subplots(1, 2, sharey=True)
    lines = [
        (speed, "schedules", "pipeline-8", "PipelineRL", "C0-"),
        (speed, "schedules", "ppo-off-policy-8", "in turns of 8 updates", "C1--"),
        (falls, "survivors", "dispo", "DISPO", "C0-"),
        (falls, "survivors", "cispo-5", "CISPO", "C1--"),
    ]
    for axes, comparison, variant, label, look in lines:
        runs = published[comparison][variant][:7]
        for run in runs:
            seconds = run.points["device_hours"] * 3600 / 2  # on two cores
            C = seconds if axes is speed else run.points["tokens"] / 1000
            axes.plot(C, run.rates, look, lw=0.8, label=label if run is runs[0] else None)
            fallen = depths(run.rates) > FALL
            axes.plot(C[fallen], run.rates[fallen], f"{look[:2]}.", ms=3)
        axes.legend(loc="center right")
    speed.set(title="PipelineRL learns in less time than turns", xlabel="seconds on two cores", xlim=(0, 100))
    speed.set_ylabel("pass rate")
    falls.plot([], [], "k.", ms=3, label=f"fallen: more than {FALL} below its best")
    falls.legend(loc=(0.4, 0.1), fontsize=8)
    falls.set(title="Eight updates old: CISPO falls, DISPO mostly stands", xlabel="thousand sampled tokens")
    figure.savefig(RESULTS.parent / "pictures" / "speed_and_falls.png", dpi=130)


def main() -> None:
    """Remakes the tables of lab/results/comparisons.md, and the findings and the first picture of RESULTS.md."""
    page = RESULTS / "comparisons.md"
    published = members()
    tables = {}
    rows = []
    for name in re.findall("<!-- refit (.+) -->", page.read_text()):
        c = COMPARISONS[name]
        numbers = measure(published[name], c.axis)
        left_out = LEFT_OUT if c.axis == "device_hours" else [*LEFT_OUT, "ΔB"]  # the paper has B of the schedules
        tables[name] = without_repeats(compare(c, numbers).drop(columns=left_out, errors="ignore"))
        if c.paper:
            frame = findings(c, numbers)
            frame.insert(0, "comparison", name)
            rows.append(frame)
    fill(page, tables)
    fill(RESULTS.parent / "RESULTS.md", {"findings": markdown(pd.concat(rows).drop(columns="could see"))})
    draw(published)


if __name__ == "__main__":
    main()
