"""What gpu_check.py and its checks share: where a check writes what it finds, and its processes."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """A part of the check that this machine or the dry run leaves out."""
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
        try:
            if mark in file.read_bytes().split(b"\0"):  # empty of a process that has ended
                found.append(int(file.parent.name))
        except OSError:  # it ends just now, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def gpus() -> list[str]:
    """Name, driver, memory in all and in use of each GPU, as nvidia-smi says them; none without it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return []
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
