"""What the logs already know: did ESS, the log-prob gap or the entropy announce a fall, and how often for nothing?

THE RULE. A run falls at the first evaluation that lies more than .1 below the best before it. A logged figure gives an
alarm where it leaves mean +- 3 standard deviations of the run's own first third, at any evaluation after that; each
value is a mean over the steps since the evaluation before. An alarm before the fall announces it, and its lead is the
number of evaluations between them. An alarm in a run that never falls is a false one. A second alarm needs nothing of
what is usual in a run: the ESS below a level that is the same for all.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ablation_figures import FALL
from ablation_report import save
from curves import Curve
from measuring import table

SIGNALS = {"ess": "ESS", "gap": "log-prob gap", "entropy": "entropy", "lag": "lag", "truncated": "truncated share"}
SDS = 3.0
LEVELS = (0.9, 0.8, 0.7)  # of the ESS


def first_third(curve: Curve) -> int:
    """Number of the last evaluation of a run's first third; evaluation 0 comes before the first step."""
    return (curve.points["step"].size - 1) // 3


def fall_of(curve: Curve) -> int | None:
    """Number of the evaluation at which the run falls, None if it never does."""
    rates = curve.points["pass_rate"]
    low = np.flatnonzero(np.maximum.accumulate(rates) - rates > FALL)
    return int(low[0]) if low.size else None


def learns(curve: Curve) -> bool:
    """Whether any evaluation lies as far above the first as a fall lies below the best."""
    rates = curve.points["pass_rate"]
    return bool(rates.max() - rates[0] > FALL)


def alarm_of(curve: Curve, signal: str) -> int | None:
    """Number of the evaluation with the first alarm, None if there is none, or too few values to know what is usual."""
    end, values = first_third(curve), curve.points[signal]
    usual = values[1 : end + 1]
    usual = usual[np.isfinite(usual)]
    if usual.size < 3:
        return None
    out = np.flatnonzero(np.abs(values[end + 1 :] - usual.mean()) > SDS * usual.std(ddof=1))
    return end + 1 + int(out[0]) if out.size else None


def low_of(curve: Curve, level: float) -> int | None:
    """Number of the first evaluation with an ESS below `level` since the one before, None if there is none."""
    low = np.flatnonzero(curve.points["ess"] < level)
    return int(low[0]) if low.size else None


def alarm_row(name: str, curves: Sequence[Curve], alarm: Callable[[Curve], int | None]) -> list[str]:
    """Announced falls, lead and false alarms of one rule for an alarm."""
    falls = [(fall, alarm(curve)) for curve in curves if (fall := fall_of(curve)) is not None]
    leads = [fall - first for fall, first in falls if first is not None and first < fall]
    calm = [alarm(curve) is not None for curve in curves if fall_of(curve) is None]
    lead = f"{np.median(leads):g} ({min(leads)} to {max(leads)})" if leads else "–"
    return [name, f"{len(leads)} of {len(falls)}", lead, f"{sum(calm)} of {len(calm)}"]


def correlation(curves: Sequence[Curve], signal: str, share: float) -> str:
    """Spearman's rank correlation, over runs, of a figure at `share` of a run with the pass rate at its end."""
    rows = []
    for curve in curves:
        i = max(1, round(share * (curve.points["step"].size - 1)))
        rows.append((curve.points[signal][i], curve.points["pass_rate"][-2:].mean()))
    x, y = np.array([pair for pair in rows if math.isfinite(pair[0])]).reshape(-1, 2).T
    if x.size < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return "–"
    found = spearmanr(x, y)
    return f"{found.statistic:+.2f} (p {found.pvalue:.2f}, {x.size} runs)"


def page(curves: Sequence[Curve], baseline: Sequence[Curve]) -> str:
    """Markdown. `baseline`: the runs with the flags of the setting, which differ in their seeds only."""
    never = [curve.run for curve in curves if not learns(curve)]
    curves, baseline = ([curve for curve in some if learns(curve)] for some in (curves, baseline))
    falling = [(curve, fall) for curve in curves if (fall := fall_of(curve)) is not None]
    early = [curve for curve, fall in falling if fall <= first_third(curve)]
    ends = [(curve.points["entropy"][1], curve.points["entropy"][-1]) for curve in curves]
    down = sum(last < first for first, last in ends)
    names = ", ".join(f"{curve.run} ({fall})" for curve, fall in falling)
    text = [
        "# What the logs already know",
        f"{len(falling)} of {len(curves)} runs fall: an evaluation lies more than {FALL:g} below the best before it"
        + (f" (in brackets its number): {names}." if names else ".")
        + (f" {len(early)} of them within their first third, where no alarm of the first table is possible."
           if early else "")
        + (f" Left out are {len(never)} runs that never gain more than {FALL:g}: {', '.join(never)}." if never else "")
        + " Runs on half of the problems (`--difficulty`) are not looked at.",
        f"An alarm is a figure outside of mean ± {SDS:g} standard deviations of the run's own first third (of its "
        "evaluations, the start left out; three of them at least, or there is no alarm), at any "
        "evaluation after it; each value is a mean over the steps since the evaluation before. The lead is in "
        "evaluations. A false alarm is one in a run that never falls.",
        table(["figure", "falls announced", "lead, median (range)", "false alarms"],
              [alarm_row(name, curves, lambda curve, signal=signal: alarm_of(curve, signal))
               for signal, name in SIGNALS.items()]),
        "The same for an alarm wherever the ESS is below a level, from the first evaluation after the start on. The "
        "levels were chosen after a look at these runs, so the next ones will be announced less well.",
        table(["ESS below", "falls announced", "lead, median (range)", "false alarms"],
              [alarm_row(f"{level:g}", curves, lambda curve, level=level: low_of(curve, level)) for level in LEVELS]),
        f"**Entropy** is lower before the last evaluation than before the first in {down} of {len(curves)} runs. Rank "
        "correlation over runs with the pass rate at the end (mean of the last two evaluations):",
        table(["figure", "at a third of the run, all runs", "at half, all runs", "at a third, baseline only",
               "at half, baseline only"],
              [[SIGNALS[signal], *(correlation(some, signal, share) for some in (curves, baseline)
                                   for share in (1 / 3, 1 / 2))] for signal in ("entropy", "ess", "gap")]),
    ]  # fmt: skip
    return "\n\n".join(text) + "\n"


def write(curves: Sequence[Curve], baseline: Sequence[Curve], folder: Path) -> None:
    """FOLDER/logs.* from finished runs."""
    folder.mkdir(parents=True, exist_ok=True)
    save(page(curves, baseline), (folder / "logs").with_suffix(".md"))
