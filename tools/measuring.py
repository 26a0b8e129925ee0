"""What the benchmarks share: cases that take turns, ratios with their spread, tables, and models of several sizes."""

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from tasks import chain, warm_start

ROOT = Path(__file__).resolve().parent.parent
# The setting of BENCHMARKS.md, which stays while the defaults of train.py move.
SETTING = ["--max_num_seqs", "256", "--eval_problems", "512", "--eval_samples", "2"]
QUIET = [*SETTING, "--eval_every", "1000000000", "--probe_every", "1000000000", "--save_every", "0"]

Measured = dict[str, list[float]]  # case -> one value a turn


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


def timed(function: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@dataclass
class Figure:
    """One number beside its target; `values` has one a turn. `least` is a lower bound, `most` an upper one."""

    name: str
    values: Sequence[float]
    least: float | None = None
    most: float | None = None

    def record(self) -> dict[str, Any]:
        """For the JSON line; `met` is None without a target."""
        median, low, high = spread(self.values)
        bounds = [median >= self.least] if self.least is not None else []
        bounds += [median <= self.most] if self.most is not None else []
        target = f">= {self.least}" if self.least is not None else f"<= {self.most}" if self.most is not None else ""
        met = all(bounds) and not any(map(math.isnan, self.values)) if bounds else None
        return {"name": self.name, "median": median, "low": low, "high": high, "target": target, "met": met}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers with four significant digits."""
    cells = [[f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "gpu": gpu,
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d %H:%M")}  # fmt: skip


class Report:
    """What one command found: measurements by unit, and figures beside their targets."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.load = args, [os.getloadavg()[0]]
        self.rows: list[list[Any]] = []
        self.figures: list[Figure] = []
        self.measured: Measured = {}

    def add(self, measured: Measured, unit: str) -> None:
        """Measurements in one unit."""
        self.measured |= measured
        self.rows += [[name, *spread(values), unit] for name, values in measured.items()]

    def close(self) -> dict[str, Any]:
        """Prints the tables and the JSON line, and returns the record."""
        self.load.append(os.getloadavg()[0])
        figures = [figure.record() for figure in self.figures]
        settings = {name: x for name, x in vars(self.args).items() if isinstance(x, int | float | str | list)}
        record = {"benchmark": self.args.command, "machine": machine(), "load": self.load, "settings": settings,
                  "figures": figures, "measured": self.measured}  # fmt: skip
        print(table(["measured", "median", "low", "high", "unit"], self.rows) + "\n")
        marks = {True: "yes", False: "NO", None: ""}
        lines = [[f["name"], f["median"], f["low"], f["high"], f["target"], marks[f["met"]]] for f in figures]
        print(table(["figure", "median", "low", "high", "target", "met"], lines))
        before, after = self.load
        print(f"\n{record['machine']['cpu']}, {os.cpu_count()} cores, {record['machine']['date']}, "
              f"load average {before:.2f} before and {after:.2f} after\n{json.dumps(record)}", flush=True)
        return record


SIZES = {  # name -> settings of warm_start.WarmStart; heads of 32, which vLLM's CPU kernel takes
    "0.2M": {},
    "2M": {"hidden_size": 192, "layers": 4, "heads": 6, "kv_heads": 3, "intermediate_size": 576},
    "8M": {"hidden_size": 256, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 1024},
    "32M": {"hidden_size": 512, "layers": 8, "heads": 16, "kv_heads": 8, "intermediate_size": 2048},
}


def random_model(folder: Path, size: str, context: int = 512, ends: bool = True) -> str:
    """Folder of a model with random weights for the built-in task's words; without `ends` it never stops by itself."""
    made = warm_start.new_model(warm_start.WarmStart(init_std=0.02, **SIZES[size]), seed=0)
    made.config.max_position_embeddings = context
    if not ends:
        made.config.eos_token_id = made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    chain.word_tokenizer().save_pretrained(folder)
    return str(folder)
