"""What the logs already know: did ESS, the log-prob gap or the entropy announce a fall, and how often for nothing?

THE RULE. A run falls at the first evaluation that lies more than .1 below the best before it. A logged figure gives an
alarm where it leaves mean +- 3 standard deviations of the run's own first third, at any evaluation after that; each
value is a mean over the steps since the evaluation before. An alarm before the fall announces it, and its lead is the
number of evaluations between them. An alarm in a run that never falls is a false one. A second alarm needs nothing of
what is usual in a run: the ESS below a level that is the same for all.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from curves import Evaluations
from figures import FALL, Row, falls
from report import table
from scipy.stats import spearmanr

SIGNALS = {"ess": "ESS", "gap": "log-prob gap", "entropy": "entropy", "lag": "lag", "truncated": "truncated share"}
SDS = 3.0
LEVELS = (0.9, 0.8, 0.7)  # of the ESS


def first(where: np.ndarray) -> int | None:
    """Index of the first True, None if there is none."""
    return int(np.argmax(where)) if where.any() else None


def first_third(run: Evaluations) -> int:
    """Number of the last evaluation of a run's first third; evaluation 0 comes before the first step."""
    return (run.rates.size - 1) // 3


def fall_of(run: Evaluations) -> int | None:
    """Number of the evaluation at which the run falls, None if it never does."""
    return first(falls(run) > FALL)


def learns(run: Evaluations) -> bool:
    """Whether any evaluation lies as far above the first as a fall lies below the best."""
    return bool(run.rates.max() - run.rates[0] > FALL)


def alarm_of(run: Evaluations, signal: str) -> int | None:
    """Number of the evaluation with the first alarm, None if there is none, or too few values to know what is usual."""
    end, values = first_third(run), run.points[signal]
    usual = values[1 : end + 1]
    usual = usual[np.isfinite(usual)]
    if usual.size < 3:
        return None
    out = np.abs(values - usual.mean()) > SDS * usual.std(ddof=1)
    return first(out & (np.arange(values.size) > end))


def low_of(run: Evaluations, level: float) -> int | None:
    """Number of the first evaluation with an ESS below `level` since the one before, None if there is none."""
    return first(run.points["ess"] < level)


def alarm_row(name: str, runs: Sequence[Evaluations], alarm: Callable[[Evaluations], int | None]) -> Row:
    """Announced falls, lead and false alarms of one rule for an alarm."""
    found = [(fall_of(run), alarm(run)) for run in runs]
    fallen = [(fall, at) for fall, at in found if fall is not None]
    calm = [at is not None for fall, at in found if fall is None]
    leads = [fall - at for fall, at in fallen if at is not None and at < fall]
    lead = f"{np.median(leads):g} ({min(leads)} to {max(leads)})" if leads else "–"
    return [name, f"{len(leads)} of {len(fallen)}", lead, f"{sum(calm)} of {len(calm)}"]


def correlation(runs: Sequence[Evaluations], signal: str, share: float) -> str:
    """Spearman's rank correlation, over runs, of a figure at `share` of a run with the pass rate at its end."""
    rows = [(run.points[signal][max(1, round(share * (run.rates.size - 1)))], run.rates[-2:].mean()) for run in runs]
    x, y = np.array([pair for pair in rows if math.isfinite(pair[0])]).reshape(-1, 2).T
    if x.size < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return "–"
    found = spearmanr(x, y)
    return f"{found.statistic:+.2f} (p {found.pvalue:.2f}, {x.size} runs)"


def page(runs: Sequence[Evaluations], baseline: Sequence[Evaluations]) -> str:
    """Markdown. `baseline`: the runs with the flags of the setting, which differ in their seeds only."""
    never = [run.run for run in runs if not learns(run)]
    runs, baseline = ([run for run in some if learns(run)] for some in (runs, baseline))
    falling = [(run, fall) for run in runs if (fall := fall_of(run)) is not None]
    early = sum(fall <= first_third(run) for run, fall in falling)
    down = sum(run.points["entropy"][-1] < run.points["entropy"][1] for run in runs)
    names = ", ".join(f"{run.run} ({fall})" for run, fall in falling)
    alarms = [alarm_row(name, runs, lambda run, signal=signal: alarm_of(run, signal))
              for signal, name in SIGNALS.items()]  # fmt: skip
    low = [alarm_row(f"{level:g}", runs, lambda run, level=level: low_of(run, level)) for level in LEVELS]
    related = [[SIGNALS[signal], *(correlation(some, signal, share) for some in (runs, baseline)
                                   for share in (1 / 3, 1 / 2))] for signal in ("entropy", "ess", "gap")]  # fmt: skip
    text = [
        "# What the logs already know",
        f"{len(falling)} of {len(runs)} runs fall: an evaluation lies more than {FALL:g} below the best before it"
        + (f" (in brackets its number): {names}." if names else ".")
        + f" {early} of them within their first third, where no alarm of the first table is possible." * bool(early)
        + (f" Left out are {len(never)} runs that never gain more than {FALL:g}: {', '.join(never)}." if never else "")
        + " Runs on half of the problems (`--difficulty`) are not looked at.",
        f"An alarm is a figure outside of mean ± {SDS:g} standard deviations of the run's own first third (of its "
        "evaluations, the start left out; three of them at least, or there is no alarm), at any "
        "evaluation after it; each value is a mean over the steps since the evaluation before. The lead is in "
        "evaluations. A false alarm is one in a run that never falls.",
        table(["figure", "falls announced", "lead, median (range)", "false alarms"], alarms),
        "The same for an alarm wherever the ESS is below a level, from the first evaluation after the start on. The "
        "levels were chosen after a look at these runs, so the next ones will be announced less well.",
        table(["ESS below", "falls announced", "lead, median (range)", "false alarms"], low),
        f"**Entropy** is lower before the last evaluation than before the first in {down} of {len(runs)} runs. Rank "
        "correlation over runs with the pass rate at the end (mean of the last two evaluations):",
        table(["figure", "at a third of the run, all runs", "at half, all runs", "at a third, baseline only",
               "at half, baseline only"], related),
    ]  # fmt: skip
    return "\n\n".join(text) + "\n"
