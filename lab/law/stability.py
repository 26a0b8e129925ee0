"""How stale is too stale? From the first ten steps of a run, the chance that it goes down.

    python lab/law/stability.py runs/demo                   # a run's folder, or its log: JSON lines or CSV
    python lab/law/stability.py log.csv --rate 1e-6 --lag 4 # where the log lacks one of them

PROBLEM. An asynchronous run trains on tokens that are k updates old. A larger k keeps more devices busy, and at some k
the run goes down: its pass rate falls by more than .1, or never rises by as much. Nobody knows which k, before.

BY RATE AND LAG. Of the 84 runs of the map in lab/results/staleness.md, rates of 3.5e-4 to 2.8e-3 and lags of 1 to 16:

    chance = 1 / (1 + (HALF / x)^SLOPE),    x = rate * lag^EXPONENT

HALF is a rate of this task, model, batch and loss. Of others this says little: stability.md says where it ends.

BY THE FIRST STEPS. What a rate does is seen in the log. (Of another model half may go down elsewhere: stability.md.)
With E the mean effective sample size of the first ten steps and l their mean lag,

    drift = sqrt(-log E) / l,    chance = 1 / (1 + (DRIFT_HALF / x)^DRIFT_SLOPE),    x = drift * sqrt(lag)

For a log-normal ratio E = exp(-sigma^2), so sqrt(-log E) is the rms of log rho, which stands in for E where a log has
no other (`log_ratio_rms`). It is divided by l, not by its root: on the map the rms grows as the lag, to the power 1.0
to 1.2. So the lag need not be there yet: a lag of 16 takes 16 steps to build up. `lag` is the one that the run will
have: by its flags --k and --min_ready, or --lag.

train.py prints a warning by the second rule, where x is beyond EARLY_DRIFT. It cannot import this file, so
runtime/recorder.py has the two constants, too.

SIMPLIFIED. A lag is one number; a mix of lags counts as its mean. The chances are those of runs to 170 updates.

>>> print(f"{chance(7e-4 * 8**EXPONENT, HALF, SLOPE):.2f}, safe below a lag of {safe_lag(7e-4):.1f}")
0.23, safe below a lag of 4.6
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

EXPONENT, HALF, SLOPE = 0.472, 2.235e-3, 6.67
DRIFT_HALF, DRIFT_SLOPE = 0.259, 5.58
EARLY_STEPS = 10  # those of the map's first evaluation
EARLY_DRIFT = 0.42  # x of the first steps, beyond which train.py warns: no published run above it stood
FALL = 0.1  # of the pass rate
SAFE = 0.05
NEEDED = {  # names under which logs have it, and how to get it
    "rate": (("lr", "learning_rate", "actor/lr"), "log the optimizer's rate as `lr`, or give --rate"),
    "lag": (
        ("lag_mean", "lag"),
        "log `lag_mean`, the trainer's count of updates minus that of the weights that sampled a token, or give --lag",
    ),
}


class FirstSteps(NamedTuple):
    """What a log says. `drift` is None if it has neither ess nor log_ratio_rms."""

    rate: float
    lag: float  # that the run will have
    drift: float | None  # nats an update


# ------------------------------------------------------------------------------------------------------ the two rules
def goes_down(pass_rates: Sequence[float]) -> bool:
    """Whether a run falls more than FALL below its best so far, or never rises more than FALL above its first."""
    best = first = pass_rates[0]
    for rate in pass_rates:
        best = max(best, rate)
        if best - rate > FALL:
            return True
    return best - first <= FALL


def chance(x: float, half: float, slope: float) -> float:
    """Of going down at x, which is half at `half`."""
    return 1 / (1 + (half / x) ** slope) if x else 0.0


def safe(half: float, slope: float) -> float:
    """The x at which the chance is SAFE."""
    return half * (SAFE / (1 - SAFE)) ** (1 / slope)


def safe_lag(rate: float) -> float:
    """The lag at which the chance is SAFE, by the rate."""
    return (safe(HALF, SLOPE) / rate) ** (1 / EXPONENT)


def safe_rate(lag: float) -> float:
    """The rate at which the chance is SAFE, by the lag."""
    return safe(HALF, SLOPE) / lag**EXPONENT


# ------------------------------------------------------------------------------------------------------------ the log
def records(path: Path) -> list[dict[str, float]]:
    """The rows of a log, JSON lines or CSV: their numbers."""
    text = path.read_text()
    if text.lstrip().startswith("{"):
        rows = [json.loads(line) for line in text.split("\n") if line.endswith("}")]
    else:
        rows = list(csv.DictReader(text.splitlines()))
    return [dict(numbers(row)) for row in rows]


def numbers(row: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The columns of a row that hold a number."""
    for name, value in row.items():
        with suppress(TypeError, ValueError):
            yield name, float(value)  # type: ignore[arg-type]


def column(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """What is needed under `name`, by the first of its columns that is there. Raises ValueError."""
    columns, advice = NEEDED[name]
    for found in columns:
        if values := [step[found] for step in steps if found in step]:
            return values
    raise ValueError(f"no {name}, under none of the names {', '.join(columns)}: {advice}")


def first_steps(place: Path, rate: float | None = None, lag: float | None = None) -> FirstSteps:
    """The first steps of a run. `rate` and `lag` stand in for what its log lacks, and win. Raises ValueError."""
    folder = place if place.is_dir() else place.parent
    path = place / "metrics.jsonl" if place.is_dir() else place
    steps = [step for step in records(path) if "step" in step or "lr" in step][:EARLY_STEPS]
    if len(steps) < EARLY_STEPS:
        raise ValueError(f"{len(steps)} steps, and the first {EARLY_STEPS} are needed: ask again later")
    if rate is None:
        rate = max(column(steps, "rate"))  # past its warm-up
    try:
        lags = column(steps, "lag")
    except ValueError:
        if lag is None:
            raise
        lags = [lag]
    seen = sum(lags) / len(lags)
    if lag is None:
        lag = max(seen, planned_lag(folder / "config.json"))
    sigma = sigma_of(steps)
    return FirstSteps(rate, lag, sigma / seen if sigma is not None and seen else None)


def planned_lag(config: Path) -> float:
    """The lag that the flags hold; 0 where none do, or there is no config.json."""
    if not config.is_file():
        return 0.0
    flags = json.loads(config.read_text())
    return min(flags["k"], 1 + flags["min_ready"] / flags["batch_prompts"])


def sigma_of(steps: Sequence[Mapping[str, float]]) -> float | None:
    """The rms of log rho in these steps, by the mean of their ESS where there is one."""
    if sizes := [step["ess"] for step in steps if "ess" in step]:
        return math.sqrt(max(0.0, -math.log(sum(sizes) / len(sizes))))
    if squares := [step["log_ratio_rms"] ** 2 for step in steps if "log_ratio_rms" in step]:
        return math.sqrt(sum(squares) / len(squares))
    return None


# --------------------------------------------------------------------------------------------------- the command line
def report(first: FirstSteps) -> Iterator[str]:
    """The lines that are printed of a run."""
    rate, lag, drift = first
    x = rate * lag**EXPONENT
    yield f"a rate of {rate:.2g} at a lag of {lag:.1f}; chances are those of CISPO, graded task, 32 prompts"
    by_rate = f"{SAFE:.0%} at a lag of {safe_lag(rate):.1f}, or a rate of {safe_rate(lag):.2g}" if lag else ""
    yield f"  by rate and lag: goes down in {chance(x, HALF, SLOPE):.0%} of runs; {by_rate}"
    if drift is None:
        yield "  by its first steps: the log has no lag above 0, or neither ess nor log_ratio_rms"
        return
    score = drift * math.sqrt(lag)
    limit = safe(DRIFT_HALF, DRIFT_SLOPE)
    by_drift = f"{SAFE:.0%} at a lag of {(limit / drift) ** 2:.1f}, or a rate of {rate * limit / score:.2g}"
    yield (
        f"  by its first {EARLY_STEPS} steps ({drift:.3f} nats an update): goes down in "
        f"{chance(score, DRIFT_HALF, DRIFT_SLOPE):.0%} of runs; {by_drift}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="From the first ten steps of a run: does it go down?")
    parser.add_argument("runs", nargs="+", help="the folder of a run, or a log: JSON lines or CSV")
    parser.add_argument("--rate", type=float, help="the learning rate, if the log has none")
    parser.add_argument("--lag", type=float, help="updates between sampling and training, if the log has none")
    args = parser.parse_args(argv)
    place = ""
    try:
        for name, value in (("--rate", args.rate), ("--lag", args.lag)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {value}")
        for place in args.runs:
            first = first_steps(Path(place), args.rate, args.lag)
            print(f"{place}: " + "\n".join(report(first)))
    except (ValueError, OSError) as error:
        print(f"stability.py: {place}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
