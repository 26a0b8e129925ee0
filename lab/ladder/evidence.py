"""What each change of the ladder brings, at each side's own best rate: the tests, chosen before their runs; the runs.

    python lab/ladder/evidence.py FOLDER                # makes what is missing of them; it may be stopped, and goes on
    python lab/ladder/evidence.py FOLDER --at_once 2    # two runs at once
    python lab/ladder/evidence.py FOLDER --publish      # adds them to curves.csv.gz: none of these is made again

A test compares two sides in a setting, by a measure: compute to a pass rate, or the pass rate at the end. RATES are
tried on seeds that count for nothing. A side's best rate is the one with the least median of sampled tokens to the
setting's level; where no median reaches it, the one with the highest median end. A best rate at an edge brings the next
rate, a quarter or four times. Then both sides run SEEDS, paired: each at its best rate, and both at the setting's own
(not where a change is left out, nor where seconds are measured). Where seconds are measured, nothing else runs.

Pairs are compared by logarithms of compute, or by differences of pass rates: a mean, Student's interval of 95 %, and p.
Where fewer than eight of ten pairs reach the level on both sides, p is a sign test's, in which a side that never
reaches it takes more. p is corrected by Holm's method for all TESTS and for the 23 that they replaced (fifteen of each
change alone, eight of the ladder's rungs), each of which counts as p = 1.
"""

import argparse
import csv
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import NamedTuple

import by_flags
import numpy as np
from rungs import COLUMNS, PAGE, ROOT, WITHOUT, Row, climb, curves_of

sys.path.insert(0, str(ROOT / "lab" / "evidence"))
from runs import compute_to

CURVES = PAGE.with_name("curves.csv.gz")  # all published runs
RATES, EDGES = (0.5, 1.0, 2.0), {0.5: 0.25, 2.0: 4.0}
PILOTS = (101, 102, 103)
SEEDS = range(1001, 1011)
LEVELS = {"stale": 0.25, "mostly-solved": 0.9}  # elsewhere .5; `ramble` is judged by its end
ALONE = ("alone", "vllm")  # `alone` is `discover`, at its rates, in seconds


Run = tuple[str, str, float, int]  # side, setting, rate, seed


class Test(NamedTuple):
    """One comparison: `measure` is tokens, passes or seconds to the setting's level, or a pass rate at the end."""

    change: str
    setting: str
    measure: str
    before: str
    after: str


CHANGES = [
    Test("PipelineRL", "discover", "tokens", "0", "1"),
    Test("CISPO", "stale", "tokens", "1", "2"),
    Test("forced interruption, evaluated with the phrase", "ramble", "with the phrase", "2", "3"),
    Test("forced interruption, evaluated without it", "ramble", "without the phrase", "2", "3"),
    Test("zero-variance filter", "discover", "passes", "3", "4"),
    Test("no positive resampling", "mostly-solved", "tokens", "4", "5"),
    Test("prompt average", "discover", "tokens", "6", "7"),
    Test("batch normalization", "discover", "tokens", "7", "8"),
]
WHOLE = [
    Test("ScaleRL", setting, measure, "0", "8")
    for setting in ("discover", "mostly-solved", "graded")
    for measure in ("tokens", "passes", "end")
]
# Which change costs the tokens of `discover`: each left out of the whole, at the whole's best rate.
LEFT_OUT = [Test(name, "discover", "tokens", f"no-{name}", "8") for name in WITHOUT]
# By train.py's flags: the generator a process of its own, where PipelineRL saves waiting; bfloat16, where FP32 logits
# should matter; DAPO's dynamic sampling at a batch of equal size.
BY_FLAGS = [
    Test("PipelineRL", "vllm", "seconds", "0", "1"),
    Test("PipelineRL", "vllm", "tokens", "0", "1"),
    Test("ScaleRL", "vllm", "seconds", "0", "8"),
    Test("FP32 logits", "bfloat16", "tokens", "5", "6"),
    Test("dynamic sampling", "torch", "tokens", "8", "replaced"),
    Test("dynamic sampling", "torch", "passes", "8", "replaced"),
]
IN_SECONDS = [Test("PipelineRL", "alone", "seconds", "0", "1"), Test("ScaleRL", "alone", "seconds", "0", "8")]
TESTS = CHANGES + WHOLE + LEFT_OUT + BY_FLAGS + IN_SECONDS


def level_of(setting: str) -> float:
    """The pass rate to which compute counts."""
    return LEVELS.get(setting, 0.5)


def value(curve: Sequence[Row], measure: str) -> float:
    """The measure of one run; NaN for a level that it never reaches."""
    rates = np.array([row["pass_rate"] for row in curve])
    if measure in ("tokens", "passes", "seconds"):
        return compute_to(np.array([row[measure] for row in curve]), rates, level_of(curve[0]["setting"]))
    if measure == "end":
        return float(rates[-2:].mean())
    trains_with = int(curve[0]["side"]) >= 3  # a rung of `ramble`
    own = trains_with == (measure == "with the phrase")
    return float(curve[-1]["pass_rate" if own else "other"])


def best_rate(rows: Sequence[Row], setting: str, side: str) -> float | list[tuple[float, int]]:
    """By the pilots; while some of them are missing, their rates and seeds."""
    tried = list(RATES)
    while True:
        runs = {rate: curves_of(rows, side, setting, rate) for rate in tried}
        waiting = [(rate, seed) for rate in tried for seed in PILOTS if seed not in runs[rate]]
        if waiting:
            return waiting
        keys = {}
        for rate, pilots in runs.items():
            compute = [np.nan if setting == "ramble" else value(pilots[seed], "tokens") for seed in PILOTS]
            end = median(value(pilots[seed], "end") for seed in PILOTS)
            keys[rate] = (median(np.nan_to_num(compute, nan=np.inf)), -end)
        best = min(keys, key=keys.__getitem__)
        if EDGES.get(best, best) in tried:
            return best
        tried.append(EDGES[best])


def counted(rows: Sequence[Row], setting: str, best: Mapping[str, float]) -> Iterator[Run]:
    """The runs that a setting still lacks, a seed's pairs side by side."""
    for seed in SEEDS:
        for side, rate in best.items():
            same = () if setting in ALONE or side.startswith("no-") else (1.0,)
            for one in dict.fromkeys((rate, *same)):
                if seed not in curves_of(rows, side, setting, one):
                    yield side, setting, one, seed


def missing(rows: Sequence[Row]) -> Iterator[Run]:
    """The next runs, one setting after the other: its pilots, then what counts; those that run alone come last."""
    alone: dict[str, float] = {}
    sides: dict[str, dict[str, None]] = {}
    for test in CHANGES + WHOLE + BY_FLAGS:
        sides.setdefault(test.setting, {}).update(dict.fromkeys((test.before, test.after)))
    for setting in sorted(sides, key=ALONE.__contains__):
        best = {side: best_rate(rows, setting, side) for side in sides[setting]}
        pilots = [(side, setting, *run) for side, runs in best.items() if isinstance(runs, list) for run in runs]
        yield from pilots
        if pilots:
            continue
        if setting == "discover":
            alone = {side: best[side] for side in "018"}
            best |= {test.before: best["8"] for test in LEFT_OUT}
        yield from counted(rows, setting, best)
    yield from counted(rows, "alone", alone)


def lines_in(folder: Path | None = None) -> list[str]:
    """The evaluations of all runs that are published or in the folder, as lines of a CSV. A run that was made twice
    counts once, as it is published."""
    published = gzip.decompress(CURVES.read_bytes()).decode().splitlines()[1:] if CURVES.exists() else []
    known = {run_of(line) for line in published}
    paths = folder.glob("*.csv") if folder else ()
    made = [line for path in paths for line in path.read_text().splitlines()[1:]]
    return sorted(published + [line for line in made if run_of(line) not in known])


def run_of(line: str) -> tuple[str, ...]:
    """Its setting, side, rate and seed."""
    return tuple(line.split(",")[:4])


def rows_in(folder: Path | None = None) -> list[Row]:
    """The same as rows, those of a run in the order of its steps."""
    try:
        rows = [
            {key: cell if key in ("setting", "side") else float(cell or "nan") for key, cell in row.items()}
            for row in csv.DictReader(lines_in(folder), COLUMNS)
        ]
    except (TypeError, ValueError, OSError) as error:
        raise SystemExit(f"evidence.py: a line in {folder} is no evaluation: {error}") from error
    return sorted(rows, key=itemgetter("setting", "side", "rate", "seed", "step"))


def publish(folder: Path) -> None:
    """Adds the runs of the folder to CURVES; the same runs give the same bytes."""
    rows_in(folder)  # raises SystemExit for what is no evaluation
    text = "\n".join([",".join(COLUMNS), *lines_in(folder)]) + "\n"
    CURVES.write_bytes(gzip.compress(text.encode(), mtime=0))


def trained(side: str, setting: str, seed: int, rate: float, steps: int | None = None) -> list[Row]:
    """The evaluations of a run, by the ladder's files or by train.py's flags; of fewer steps than the setting's."""
    run = by_flags.train if setting in by_flags.SETTINGS else climb
    return run(side, setting, seed, rate, steps)


def make(side: str, setting: str, rate: float, seed: int, folder: Path) -> None:
    """One run, whose evaluations go to a file of their own."""
    with redirect_stdout(None):
        rows = trained(side, setting, seed, rate)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{setting}_{side}_{rate:g}_{seed}.csv"
    with path.with_suffix(".new").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".new").rename(path)


def work(todo: Callable[[Sequence[Row]], Iterable[Run]], folder: Path, at_once: int) -> None:
    """Makes what `todo` says of the rows that are there. Raises SystemExit for a run that fails."""
    running: dict[Run, BaseProcess] = {}
    while True:
        runs = todo(rows_in(folder)) if len(running) < at_once else []
        for run in runs:
            _, setting, _, seed = run
            most = 1 if setting in ALONE and seed in SEEDS else at_once
            if run not in running and len(running) < most:
                running[run] = get_context("fork").Process(target=make, args=(*run, folder))  # torch is imported
                running[run].start()
        if not running:
            return
        # Asleep until one ends, so that nothing runs beside what is timed.
        ended = wait([process.sentinel for process in running.values()])
        for run in [run for run, process in running.items() if process.sentinel in ended]:
            process = running.pop(run)
            process.join()
            if process.exitcode:
                raise SystemExit(f"evidence.py: this run failed: {' '.join(map(str, run))}")
            print(*run, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Each run has a process of its own."""
    parser = argparse.ArgumentParser("evidence.py", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the runs that are there, and those that are made")
    parser.add_argument(
        "--publish", action="store_true", help="adds the folder's runs to curves.csv.gz, and makes none"
    )
    parser.add_argument("--at_once", type=int, default=1, help="runs side by side")
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at_once must be at least 1, not {args.at_once}")
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    if args.publish and not any(args.folder.glob("*.csv")):
        parser.error(f"{args.folder} has no runs to publish")
    if args.publish:
        publish(args.folder)
        return 0
    work(missing, args.folder, args.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
