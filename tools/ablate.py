"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python tools/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then the report
    python tools/ablate.py losses --dry-run              # only list the commands
    python tools/ablate.py losses --report               # only the report of what is finished
    python tools/ablate.py all                           # every comparison, and the predictions of all runs

What is compared stands in `comparisons.py`, how in `ablation_report.py`. Each run is a process of `train.py` in
OUTPUT/COMPARISON/VARIANT/seed-N. A run that two comparisons share (the recipe is in nearly all) is made once, in the
folder of the comparison that stands first.

FINISHED is a run whose folder holds `finished.json`, which is written after `train.py` ended with exit code 0; it is
never run again. Any other folder goes on by --resume if it has a whole checkpoint, and begins again if not. Ctrl-C is
passed on once to the runs under way, which save a checkpoint; a second one ends them at once.
"""

import argparse
import ctypes
import dataclasses
import datetime
import fcntl
import itertools
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ablation_report
from comparisons import COMPARISONS

from runtime.flags import DEFAULTS, UsageError, with_new_names
from runtime.run_folder import Folder

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
OWN = ("output_dir", "overwrite", "resume", "seed", "dry_run", "cache_dir")  # of a run, not of what is compared


def resolved(text: str) -> dict[str, Any]:
    """`--k 8 --loss dapo` as {"k": 8, "loss": "dapo"}. Raises UsageError for what train.py has not."""
    words, found = shlex.split(text), {}
    for name, value in itertools.zip_longest(words[::2], words[1::2]):
        key = name.removeprefix("--")
        if not name.startswith("--") or key not in DEFAULTS or key in OWN or value is None:
            raise UsageError(f"{text!r}: {name} is no flag that a row may give; write --NAME VALUE of train.py.")
        kind = type(DEFAULTS[key])
        try:
            found[key] = value.lower() == "true" if kind is bool else kind(value)
        except ValueError as error:
            raise UsageError(f"{name} {value} is not of type {kind.__name__}.") from error
    return found


@dataclass(frozen=True)
class Run:
    """One process of train.py."""

    folder: Path
    flags: tuple[tuple[str, Any], ...]  # those given, the setting's among them
    seed: int

    def command(self, train: Path, resume: bool) -> list[str]:
        """What is run. A resumed run has its flags in its folder."""
        start = [sys.executable, str(train)]
        if resume:
            return [*start, "--resume", str(self.folder)]
        given = [word for name, value in self.flags for word in (f"--{name}", _word(value))]
        return [*start, "--output_dir", str(self.folder), "--overwrite", "true", "--seed", str(self.seed), *given]

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def finished(self) -> bool:
        """Has the run its closing record? Raises UsageError if the folder is of a run with other flags."""
        config = self.folder / "config.json"
        if config.exists():
            saved = with_new_names(json.loads(config.read_text()))
            wanted = {name: value for name, value in DEFAULTS.items() if name not in OWN} | dict(self.flags)
            wanted["seed"] = self.seed
            other = [f"--{n} {_word(saved[n])}, not {_word(v)}" for n, v in wanted.items() if saved.get(n, v) != v]
            if other:
                raise UsageError(f"{self.folder} holds a run with {'; '.join(other)}: move it away, or give --output.")
        return (self.folder / "finished.json").exists()


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def budget_flags(text: str) -> dict[str, Any]:
    """`800k` or `1.5M` tokens, or `0.05h` device-hours, of each run. Raises UsageError."""
    tokens = "max_sampled_tokens"
    units = {"h": ("max_device_hours", 1), "k": (tokens, 1e3), "M": (tokens, 1e6), "": (tokens, 1)}
    unit = text[-1:] if text[-1:] in units else ""
    name, size = units[unit]
    try:
        amount = float(text.removesuffix(unit)) * size
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise UsageError(f"--budget {text}: give a run's tokens as 800000, 800k or 1.5M, or device-hours as 0.05h.")
    both = {"max_sampled_tokens": 0, "max_device_hours": 0.0}  # one takes the place of the other
    return both | {name: amount if unit == "h" else round(amount)}


def plan(
    name: str, seeds: Sequence[int], output: Path, budget: Mapping[str, Any], only: Sequence[str] = ()
) -> dict[tuple[str, int], Run]:
    """The runs of a comparison by variant and seed. Equal flags are one run, wherever they occur: its folder is that of
    the first comparison and variant that has them."""
    owners: dict[str, tuple[str, str]] = {}
    mine = {}
    for comparison, c in COMPARISONS.items():
        for variant, text in c.variants.items():
            given = resolved(c.setting) | resolved(text) | dict(budget)
            identity = json.dumps({**DEFAULTS, **given}, sort_keys=True)
            owners.setdefault(identity, (comparison, variant))
            if comparison == name:
                mine[variant] = owners[identity], tuple(given.items())
    unknown = set(only) - set(mine)
    if unknown:
        raise UsageError(f"--only {', '.join(sorted(unknown))}: {name} has {', '.join(mine)}.")
    return {
        (variant, seed): Run(output.joinpath(*owner, f"seed-{seed}"), flags, seed)
        for seed in seeds for variant, (owner, flags) in mine.items() if not only or variant in only
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the sweep


@contextmanager
def alone(output: Path) -> Iterator[int]:
    """Holds OUTPUT for this sweep and its runs, which inherit the lock: two sweeps would write into the same folders.
    Yields the lock's descriptor. Raises UsageError if another holds it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{output} is in use by another sweep, or by a run that it left; wait for it.") from error
        yield file.fileno()


def end_with_parent() -> None:
    """In the child, on Linux: SIGTERM if the sweep dies, so that the run saves a checkpoint and nothing is orphaned."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Sweep:
    """Runs processes of train.py, `jobs` at a time, until all are finished or a signal ends it."""

    def __init__(self, output: Path, train: Path, jobs: int, lock: int):
        self.output, self.train, self.jobs, self.lock = output, train, jobs, lock
        self.children: dict[Run, tuple[subprocess.Popen, float]] = {}
        self.signals: list[int] = []  # the handler only notes them: one may come while a child is being started
        self.passed_on: dict[Run, int] = {}  # how many of them a child has got
        self.failed: list[Run] = []

    def run(self, runs: Sequence[Run]) -> int:
        """Exit code: 0 all finished, 1 some failed, 2 flags that cannot work, 130 stopped by a signal."""
        waiting = deque(dict.fromkeys(run for run in runs if not run.finished()))
        print(f"{len(set(runs)) - len(waiting)} runs are finished, {len(waiting)} are to be run", flush=True)
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.signal(n, lambda number, frame: self.signals.append(number)) for n in numbers}
        refused = 0
        try:
            while self.children or (waiting and not self.signals and not refused):
                while waiting and len(self.children) < self.jobs and not self.signals and not refused:
                    self.start(waiting.popleft())
                time.sleep(0.02)
                self.pass_on()
                refused |= any(self.collect(run) == 2 for run in list(self.children))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 130 if self.signals else 2 if refused else 1 if self.failed else 0

    def start(self, run: Run) -> None:
        """Begins a run, or goes on with it from its newest whole checkpoint."""
        resume = Folder(run.folder).newest_checkpoint() is not None
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        (run.folder / "config.json.new").unlink(missing_ok=True)  # all that a run has if it is killed very early
        print(f"{run.folder}: {'goes on' if resume else 'begins'}", flush=True)
        seen = len(self.signals)
        with run.log.open("a") as log:
            child = subprocess.Popen(
                run.command(self.train, resume), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=ROOT,
                start_new_session=True,  # the terminal's Ctrl-C comes through us, once
                pass_fds=(self.lock,), preexec_fn=end_with_parent if sys.platform == "linux" else None,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
            )  # fmt: skip
        self.children[run], self.passed_on[run] = (child, time.time()), seen

    def collect(self, run: Run) -> int | None:
        """The exit code of a run if it has ended, else None; notes what happened."""
        child, started = self.children[run]
        code = child.poll()
        if code is None:
            return None
        del self.children[run]
        seconds = time.time() - started
        record = {"folder": str(run.folder.relative_to(self.output)), "started": _date(started), "seconds": seconds,
                  "exit_code": code, "jobs": self.jobs}  # fmt: skip
        Folder(self.output).append("sweep.jsonl", record)
        if code == 0:
            closing = {"finished": _date(time.time()), "seconds": self.seconds(record["folder"]), "machine": machine()}
            Folder(run.folder).replace("finished.json", json.dumps(closing, indent=1))
        elif not self.signals:
            self.failed.append(run)
        rates = [r["pass_rate"] for r in Folder(run.folder).read("eval.jsonl")][-1:]
        result = f"pass rate {rates[0]:.3f}" if code == 0 and rates else f"exit code {code}, see {run.log}"
        print(f"{run.folder}: {result} after {seconds:.0f} s", flush=True)
        return code

    def seconds(self, folder: str) -> float:
        """Of all processes of one run."""
        return sum(r["seconds"] for r in Folder(self.output).read("sweep.jsonl") if r["folder"] == folder)

    def pass_on(self) -> None:
        """Gives the runs under way the signals that came since they got one; no further run begins then."""
        for run, (child, _) in self.children.items():
            for number in self.signals[self.passed_on[run] :]:
                child.send_signal(number)
            self.passed_on[run] = len(self.signals)


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def machine() -> str:
    """Cores and processor, for the report."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


# -------------------------------------------------------------------------------------------------------- command line


def listing() -> str:
    """The comparisons, for --help."""
    lines = ["comparisons (runs of 3 seeds, minutes alone on two cores; shared runs are made once):"]
    for name, c in COMPARISONS.items():
        n = 3 * len(c.variants)
        lines += [f"  {name:<15}{c.about}", f"  {'':<15}{n} runs, {n * c.minutes:.0f} minutes: {', '.join(c.variants)}"]
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse ends with exit code 2 on an unknown word."""
    parser = argparse.ArgumentParser(
        prog="ablate.py", description=__doc__.split("\n")[0], epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("comparison", choices=[*COMPARISONS, "all"], metavar="COMPARISON", help="of those below, or all of them")
    add("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    add("--only", nargs="+", default=[], metavar="VARIANT", help="these variants alone")
    add("--jobs", type=int, default=1, help="runs at a time; above 1 they slow each other, and device-hours mean less")
    add("--budget", default="", help="of each run: tokens as 800k or 1.5M, or device-hours as 0.05h")
    add("--output", default="runs/ablate", metavar="FOLDER", help="where the runs are (default runs/ablate)")
    add("--pass-rate", type=float, default=0.0, metavar="P",
        help="compute to this pass rate is reported (default: the comparison's)")  # fmt: skip
    add("--dry-run", action="store_true", help="list the commands and end")
    add("--report", action="store_true", help="no runs, only the report of the finished ones")
    add("--pictures", default="", metavar="FOLDER", help="of the picture (default: beside the report)")
    add("--train", default=str(TRAIN), metavar="PROGRAM", help="what trains (default train.py)")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    return args


def list_commands(runs: Mapping[tuple[str, int], Run], train: Path, minutes: float) -> None:
    """What would be run, and how long it may take."""
    left = 0
    for (variant, seed), run in runs.items():
        done = run.finished()
        left += not done
        resume = not done and Folder(run.folder).newest_checkpoint() is not None
        state = "finished" if done else shlex.join(run.command(train, resume))
        print(f"{variant}, seed {seed}: {state}")
    print(f"{len(runs) - left} of {len(runs)} runs are finished; the others take about {left * minutes:.0f} minutes")


def write_report(name: str, runs: Mapping[tuple[str, int], Run], args: argparse.Namespace) -> None:
    """OUTPUT/NAME/report.md and its picture, from the runs that are finished. `all` is the predictions of all runs."""
    c = COMPARISONS.get(name)
    results = [ablation_report.read(run.folder, variant, run.seed, c.axes if c else ("tokens",))
               for (variant, _), run in runs.items() if run.finished()]  # fmt: skip
    if not results:
        print(f"{name}: no run is finished, nothing to report")
        return
    folder = Path(args.output) / name
    pictures = Path(args.pictures) if args.pictures else folder
    for path in (folder, pictures):
        path.mkdir(parents=True, exist_ok=True)
    picture = pictures / f"{name if c else 'predictions'}.png"
    shown = picture.name if pictures == folder else str(picture)
    if c and args.budget:  # it took the place of the setting's own
        given = resolved(c.setting) | budget_flags(args.budget)
        c = dataclasses.replace(c, setting=" ".join(f"--{flag} {_word(value)}" for flag, value in given.items()))
    if c:
        ablation_report.draw(c, results, picture)
        text = ablation_report.report(name, c, results, args.pass_rate or c.pass_rate, shown, list(runs))
    else:
        ablation_report.draw_predictions(results, picture)
        text = (f"## Half a run predicts the other: all {len(results)} runs, each counted once\n\n"
                f"![predictions]({shown})\n\n{ablation_report.extrapolation_text(results)}\n")  # fmt: skip
    (folder / "report.md").write_text(text)
    print(f"{text}\nwritten to {folder / 'report.md'} and {picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 some runs failed, 2 usage, 130 stopped by a signal."""
    args = arguments(argv)
    output, train = Path(args.output).resolve(), Path(args.train).resolve()
    names = list(COMPARISONS) if args.comparison == "all" else [args.comparison]
    code = 0
    try:
        budget = budget_flags(args.budget) if args.budget else {}
        plans = {name: plan(name, range(args.seeds), output, budget, args.only) for name in names}
        if args.dry_run:
            for name, runs in plans.items():
                list_commands(runs, train, COMPARISONS[name].minutes)
            return 0
        if not args.report:
            with alone(output) as lock:
                sweep = Sweep(output, train, args.jobs, lock)
                code = sweep.run([run for runs in plans.values() for run in runs.values()])
            for run in sweep.failed:
                print(f"failed: {run.folder}; the next call tries it again")
        if args.comparison == "all":
            runs = [run for runs in plans.values() for run in runs.values()]
            plans["all"] = {(str(run.folder.parent.relative_to(output)), run.seed): run for run in runs}  # each once
        if code not in (2, 130):
            for name, runs in plans.items():
                write_report(name, runs, args)
    except UsageError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
