"""How the benchmarks measure: cases that take turns, ratios with their spread, and one report with a JSON line.

Every figure of a benchmark is a ratio of cases that took turns in one run (A B A B ...), so that what else the machine
does falls on all of them. A figure is the median over the turns, with the smallest and the largest. What is measured (a
model, a trainer, a generator, a program) is made in `subjects.py`.
"""

import argparse
import gc
import json
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

    def record(self) -> dict[str, object]:
        """For the JSON line; `met` is None without a target."""
        median, low, high = spread(self.values)
        target = f">= {self.least}" if self.least is not None else f"<= {self.most}" if self.most is not None else ""
        reached = median >= self.least if self.least is not None else self.most is None or median <= self.most
        met = reached and not any(map(math.isnan, self.values)) if target else None
        return {"name": self.name, "median": median, "low": low, "high": high, "target": target, "met": met}


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
        self.args, self.load = args, [os.getloadavg()[0]]
        self.rows: list[list[object]] = []
        self.figures: list[Figure] = []
        self.measured: Measured = {}

    def add(self, measured: Measured, unit: str) -> None:
        """Measurements in one unit, said at once: the tables come at the end of what may take half an hour."""
        self.measured |= measured
        rows = [[name, *spread(values), unit] for name, values in measured.items()]
        self.rows += rows
        for name, median, low, high, _ in rows:
            print(f"{name}: {median:.4g} ({low:.4g} to {high:.4g}) {unit}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Prints the tables and the JSON line."""
        import torch

        self.load.append(os.getloadavg()[0])
        machine = {"cpu": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
        machine |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
        machine |= {"date": time.strftime("%Y-%m-%d %H:%M")}
        figures = [figure.record() for figure in self.figures]
        settings = {name: x for name, x in vars(self.args).items() if isinstance(x, int | float | str | list)}
        record = {"benchmark": settings.pop("benchmark"), "machine": machine, "load": self.load, "settings": settings}
        record |= {"figures": figures, "measured": self.measured}
        print(table(["measured", "median", "low", "high", "unit"], self.rows) + "\n")
        marks = {True: "yes", False: "NO", None: ""}
        lines = [[f["name"], f["median"], f["low"], f["high"], f["target"], marks[f["met"]]] for f in figures]
        print(table(["figure", "median", "low", "high", "target", "met"], lines))
        before, after = self.load
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}"
        print(f"\n{where}, load average {before:.2f} before and {after:.2f} after\n{json.dumps(record)}", flush=True)


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


def benchmark_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; `about` is the program's docstring."""
    name = Path(program).stem
    parser = argparse.ArgumentParser(
        prog=f"{name}.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.set_defaults(benchmark=name.removeprefix("benchmark_"))
    parser.add_argument("--repeats", type=positive, default=5, help="turns of each case (5)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, from here on in the checkout's folder. SIGTERM unwinds, so that no helper process is left."""
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return args
