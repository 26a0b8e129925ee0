"""The published runs, what is measured of a run, and the rule by which two variants are told apart.

curves.csv.gz has a row for each evaluation of each run; lab/results/README.md explains its columns. runs.csv says
which run is which seed of which variant, since comparisons share runs. ablate.py adds to both.

THE RULE. Seeds are paired: seed N has the same starting model and prompts in every variant. With d_N = variant -
baseline at seed N, the 95 % interval over n seeds is mean(d) -+ t sd(d) / sqrt(n), where t is Student's quantile with
n - 1 degrees of freedom. Two variants are told apart if 0 lies outside. Nothing is corrected for the number of
intervals: of twenty without any effect, one will look like one.
"""

import gzip
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtrit

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from forecast import Forecast, forecast

RESULTS = ROOT / "lab" / "results"
OF_THE_RUN = ("run", "comparison", "variant", "seed", "flags", "state")
COMPUTE = ("tokens", "flops", "device_hours")
MEASURED = ("step", "tokens", "device_hours", "flops", "pass_rate", "n", "best", "worst", "set_1", "set_2")
LOGGED = {  # column -> key of metrics.jsonl; `kept` is the share of the rollouts that the filters leave to train on
    "lag": "lag_mean",
    "lag_max": "lag_max",
    "ess": "ess",
    "gap": "logprob_gap",
    "entropy": "entropy",
    "interrupted": "interrupted",
    "truncated": "truncated",
    "kept": "rows",
    "clipped_positive": "capped_positive",
    "clipped_negative": "capped_negative",
    "mismatch": "mismatch_rms",
    "staleness": "staleness_rms",
}
NUMBERS = (*MEASURED, *LOGGED)
COLUMNS = (*OF_THE_RUN, *NUMBERS)
MEMBER = ["comparison", "variant", "seed"]

FALL = 0.1  # an evaluation this far below the best before it
RATE = 0.5  # the compute to this pass rate is reported
PLATEAU = 8  # evaluations at the end of a run
LEAST_PAIRS = 3  # for bold, and for a verdict

Array = np.ndarray
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True, eq=False)
class Run:
    """One run. `points`: column -> (N,) of its N evaluations, NaN where nothing was logged."""

    name: str  # COMPARISON/VARIANT/seed-N
    comparison: str
    variant: str
    seed: int
    flags: str
    state: str  # "finished", "unfinished" or "failed (exit code 1)"
    points: dict[str, Array]

    @property
    def rates(self) -> Array:
        """(N,) pass rates."""
        return self.points["pass_rate"]


Groups = Mapping[str, Sequence[Run]]  # variant -> its finished runs, the baseline first


# --------------------------------------------------------------------------------------------------------- the files


def read_rows(path: Path = RESULTS / "curves.csv.gz") -> pd.DataFrame:
    """The rows of the file, as text."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Writes the file: the same rows give the same bytes, in whatever order they come."""
    in_order = rows.assign(number=pd.to_numeric(rows["step"]).fillna(0)).sort_values(["run", "number"])
    text = in_order.to_csv(columns=COLUMNS, index=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # no name and no date in the header


def runs_of(rows: pd.DataFrame) -> dict[str, Run]:
    """{name: run} of rows, in the order of comparison, variant and seed."""
    runs = []
    rows = rows.reset_index(drop=True)
    numbers = rows[list(NUMBERS)].apply(pd.to_numeric)  # an empty text is NaN
    for (name, comparison, variant, seed, flags, state), group in rows.groupby(list(OF_THE_RUN), sort=False):
        evaluated = numbers.loc[group.index].dropna(subset="step")
        points = {column: evaluated[column].to_numpy(float) for column in NUMBERS}
        runs.append(Run(name, comparison, variant, int(seed), flags, state, points))
    runs.sort(key=lambda run: (run.comparison, run.variant, run.seed))
    return {run.name: run for run in runs}


def members(results: Path = RESULTS) -> dict[str, dict[str, list[Run]]]:
    """{comparison: {variant: its finished runs}} of everything published; the baseline comes first."""
    runs = runs_of(read_rows(results / "curves.csv.gz"))
    groups: dict[str, dict[str, list[Run]]] = {}
    for row in pd.read_csv(results / "runs.csv").itertuples():
        variants = groups.setdefault(row.comparison, {})
        variants.setdefault(row.variant, []).append(runs[row.run])
    return groups


# ------------------------------------------------------------------------------------------------------ one run


def fit_to(run: Run, axis: str, share: float = 1.0) -> Forecast:
    """The forecast from the first `share` of a run's compute on that axis."""
    C = np.where(run.points["step"] == 0, 0.0, run.points[axis])  # the clock may have run before the first step
    seen = share * C.max() * (1 + 1e-12) >= C
    return forecast(C[seen], run.rates[seen], n_samples=run.points["n"][seen])


fitted = cache(fit_to)  # comparisons share runs


def compute_to(compute: Array, rates: Array, rate: float) -> float:
    """Compute at which the straight line between evaluations first reaches `rate`; NaN if no evaluation does."""
    reached = np.flatnonzero(rates >= rate)
    if reached.size == 0:
        return math.nan
    i = reached[0]
    if i == 0:
        return float(compute[0])
    return float(np.interp(rate, rates[i - 1 : i + 1], compute[i - 1 : i + 1]))


def depths(rates: Array) -> Array:
    """(N,): how far each evaluation lies below the best before it; 0 at a new best."""
    return np.maximum.accumulate(rates) - rates


def stands(run: Run) -> bool:
    """It never falls, and rises by more than a fall."""
    return bool(depths(run.rates).max() <= FALL < run.rates.max() - run.rates[0])


def plateau(run: Run) -> float:
    """Mean of the run's last evaluations."""
    return float(run.rates[-PLATEAU:].mean())


def half_gain(run: Run) -> float:
    """C_mid as measured: tokens at which straight lines between evaluations first reach half of the gain."""
    return compute_to(run.points["tokens"], run.rates, (run.rates[0] + plateau(run)) / 2)


def reach_of(run: Run, share: float) -> float:
    """How far `share` of the run reaches, in C_mid as measured; NaN for a run that ends no higher than it began."""
    C_mid = half_gain(run)
    return share * float(run.points["tokens"][-1]) / C_mid if C_mid > 0 else math.nan


def holds(fit: Forecast, A: float) -> bool:
    """Whether the interval of A does."""
    low, high = fit.A_interval
    return low <= A <= high


def judge(run: Run, share: float) -> dict[str, float]:
    """The fit to the first `share` of a run, against its last evaluation."""
    f = fitted(run, "tokens", share)
    C = run.points["tokens"][-1]
    low, high = f.interval(C, noise=True)[:, 0]
    return {
        "reach": reach_of(run, share),
        "inside": low <= run.rates[-1] <= high,
        "error": float(f.predict(C, f.form)) - run.rates[-1],
        "identifiable": f.identifiable,
    }


def cut_at(run: Run, reach: float) -> dict[str, float] | None:
    """A run fitted up to so many C_mid, against its evaluation at twice the compute of the last point that was fitted.
    None where twice that is beyond the end of the run, or fewer than four evaluations are seen."""
    C = run.points["tokens"]
    until = reach * half_gain(run)
    seen = C[until >= C]
    if 2 * until > 1.02 * C[-1] or seen.size < 4:
        return None
    f = fit_to(run, "tokens", float(until / C[-1]))  # not kept: there are thousands, of a quarter of a megabyte each
    twice = int(np.argmin(np.abs(C - 2 * seen[-1])))
    low, high = f.interval(C[twice], noise=True)[:, 0]
    return {
        "reach": reach,
        "inside": low <= run.rates[twice] <= high,
        "holds": holds(f, plateau(run)),
        "identifiable": f.identifiable,
    }


# ------------------------------------------------------------------------------------------------- several runs


def measure(
    groups: Groups, rate: float = RATE, reached: Callable[[Array, Array, float], float] = compute_to
) -> pd.DataFrame:
    """What needs no fit, a row for each (variant, seed): the mean pass rate of the last two evaluations, the same on
    another data set, whether it fell, and the compute to `rate`; NaN where there is none."""
    rows = {}
    for variant, runs in groups.items():
        for run in runs:
            rows[variant, run.seed] = {
                "end": run.rates[-2:].mean(),
                "elsewhere": run.points["set_1"][-2:].mean(),
                "fell": depths(run.rates).max() > FALL,
                **{axis: reached(run.points[axis], run.rates, rate) for axis in COMPUTE},
            }
    return pd.DataFrame.from_dict(rows, orient="index")


def ceilings(groups: Groups, axis: str = "tokens") -> pd.Series:
    """A of each (variant, seed), fitted to all points of the run; NaN where it is not identifiable."""
    fits = {(variant, run.seed): fitted(run, axis) for variant, runs in groups.items() for run in runs}
    return pd.Series({key: f.fit.A if f.identifiable else math.nan for key, f in fits.items()})


def steepness(groups: Groups, axis: str = "tokens") -> pd.Series:
    """B of each (variant, seed), at the shared A: the mean of the ceilings that are identifiable, or of all if none is,
    as in the paper's leave-one-out. NaN for a run whose own interval of A leaves the shared one out."""
    fits = {(variant, run.seed): fitted(run, axis).fit for variant, runs in groups.items() for run in runs}
    shared = ceilings(groups, axis).mean()
    if math.isnan(shared):
        shared = np.mean([own.A for own in fits.values() if math.isfinite(own.A)] or math.nan)
    B = {}
    for key, own in fits.items():
        low, high = own.A_interval
        B[key] = forecast(own.C, own.R, n_samples=own.n, A=shared).fit.B if low <= shared <= high else math.nan
    return pd.Series(B)


def differences(numbers: pd.DataFrame, variant: str, base: str, name: str) -> pd.Series:
    """Variant minus baseline by seed, where both are known; of logarithms for compute."""
    column = numbers[name]
    if name in COMPUTE:
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


def holm(p: Sequence[float]) -> Array:
    """Holm's corrected p values: the smallest times their number, the next times one less, never falling or above 1."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(np.array(p)[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return corrected[np.argsort(order)]


def as_text(values: Sequence[float], name: str) -> str:
    """`-0.001 [-0.003, +0.001]`; of logarithms `+39 % [+22, +59]`, from ten times on `18 times [2.35, 43.8]`. What is
    NaN is left out."""
    known = [value for value in values if not math.isnan(value)]
    unit = ""
    if not known:
        return "–"
    if name not in COMPUTE:
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
    all. No B where less than half of the pairs have one."""
    apart = differences(numbers, variant, base, name)
    mean, low, high = interval(apart)
    text = as_text((mean, low, high), name)
    n = len(numbers.loc[variant])
    if name == "B" and 2 * len(apart) < n:
        return "–"
    if 0 < len(apart) < n:
        text += f" ({len(apart)} of {n})"
    if len(apart) >= LEAST_PAIRS and (low > 0 or high < 0):
        return f"**{text}**"
    return text
