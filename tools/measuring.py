"""How the benchmarks measure: cases that take turns, ratios with their spread, and one report.

Every figure of a benchmark is a ratio of cases that took turns in one run (A B A B ...), so that what else the machine
does falls on all of them. A figure is the median over the turns, with the smallest and the largest. What is measured (a
model, a trainer, a generator, a program) is made in `subjects.py`.
"""

import argparse
import gc
import math
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

Measured = dict[str, list[float]]  # case -> one value for each turn


def take_turns(cases: dict[str, Callable[[], float]], repeats: int) -> Measured:
    """A B A B ...: every case once, `repeats` times over."""
    found: Measured = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            gc.collect()
            found[name].append(case())
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, smallest, largest)."""
    return statistics.median(values), min(values), max(values)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each turn; nan over 0."""
    return [a / b if b else math.nan for a, b in zip(above, below, strict=True)]


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@dataclass
class Figure:
    """One number and its target; `values` has one for each turn. `least` is a lower bound, `most` an upper one."""

    name: str
    values: Sequence[float]
    least: float | None = None
    most: float | None = None

    def row(self) -> list[object]:
        """Name, spread, target, and whether the median meets it; a turn that is nan meets none."""
        row, median = [self.name, *spread(self.values)], statistics.median(self.values)
        if self.least is None and self.most is None:
            return [*row, "", ""]
        reached = median >= self.least if self.least is not None else median <= self.most
        target = f">= {self.least}" if self.least is not None else f"<= {self.most}"
        return [*row, target, "yes" if reached and not any(map(math.isnan, self.values)) else "NO"]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats are printed with four significant digits."""
    cells = [[f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def processor() -> str:
    """Name of this machine's processor."""
    found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()  # ARM's Linux names none


class Report:
    """What one benchmark found: measurements with their units, and figures with their targets."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.load = args, os.getloadavg()[0]
        self.rows: list[list[object]] = []
        self.figures: list[Figure] = []

    def add(self, measured: Measured, unit: str) -> None:
        """Measurements in one unit, said at once: the tables come at the end of what may take half an hour."""
        for name, values in measured.items():
            median, low, high = spread(values)
            self.rows.append([name, median, low, high, unit])
            print(f"{name}: {median:.4g} ({low:.4g} to {high:.4g}) {unit}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Prints the tables, the machine and the settings."""
        print(table(["measured", "median", "low", "high", "unit"], self.rows) + "\n")
        print(table(["figure", "median", "low", "high", "target", "met"], [figure.row() for figure in self.figures]))
        where = f"{processor()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M')}"
        settings = ", ".join(f"{name} {value}" for name, value in vars(self.args).items())
        load = f"load average {self.load:.2f} before and {os.getloadavg()[0]:.2f} after"
        print(f"\n{where}, {load}\n{settings}", flush=True)


# -------------------------------------------------------------------------------------------------------- command line


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def new_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser without abbreviations; `about` is the program's docstring, printed as it is."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(Path(program).name, description=about, formatter_class=form, allow_abbrev=False)


def benchmark_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = new_parser(program, about)
    parser.add_argument("--repeats", type=positive, default=5, help="turns of each case (5)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, from here on in the checkout's folder. SIGTERM unwinds, so that no helper process is left."""
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return args
