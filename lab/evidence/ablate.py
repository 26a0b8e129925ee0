"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python lab/evidence/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then what changed

`comparisons.py` says what is compared, `tables.py` what can be told apart. A run is in OUTPUT/COMPARISON/VARIANT/seed-N
with a .log and a .json beside it. One that ended with exit code 0 is never made again. Any other goes on from its last
checkpoint, or begins again if it has none. Ctrl-C also reaches the runs under way, which save checkpoints.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
import tables
from comparisons import COMPARISONS
from curves import plot_fits
from runs import collect, runs_of

from runtime.folder import Folder

TRAIN = ROOT / "train.py"


@dataclass(frozen=True)
class Job:
    """One run of train.py."""

    folder: Path
    flags: tuple[str, ...]  # words of the command line, the seed among them

    @property
    def note(self) -> Path:
        """The file beside the run that has its flags and its exit code, null while it runs."""
        return self.folder.with_name(f"{self.folder.name}.json")

    def finished(self) -> bool:
        """Whether the run is complete. Raises ValueError if the folder holds a run with other flags."""
        if not self.note.exists():
            return False
        note = json.loads(self.note.read_text())
        if note["flags"] != list(self.flags):
            old = shlex.join(note["flags"])
            raise ValueError(f"{self.folder} holds a run with {old}; move it away, or give another --output.")
        return note["exit_code"] == 0

    def write_note(self, exit_code: int | None) -> None:
        """Replaces the note."""
        new = self.note.with_suffix(".new")
        new.write_text(json.dumps({"flags": self.flags, "exit_code": exit_code}))
        new.replace(self.note)

    def command(self) -> list[str]:
        """The command that begins the run, or goes on with it."""
        if Folder(self.folder).newest_checkpoint():
            return [sys.executable, str(TRAIN), "--resume", str(self.folder)]
        return [sys.executable, str(TRAIN), "--output_dir", str(self.folder), "--overwrite", "true", *self.flags]


def plan(name: str, output: Path, seeds: int, only: Sequence[str], budget: int | None) -> list[Job]:
    """The runs of a comparison. Raises ValueError for an unknown variant, and for flags that train.py has lost."""
    c = COMPARISONS[name]
    if c.only_at:
        raise ValueError(f"{name} can be run at {c.only_at} only; lab/results/comparisons.md has its results.")
    if unknown := set(only) - set(c.variants):
        raise ValueError(f"--only {', '.join(sorted(unknown))}: {name} has {', '.join(c.variants)}.")
    jobs = []
    for seed in range(seeds):
        for variant in only or c.variants:
            words = shlex.split(f"{c.setting} {c.variants[variant]} --seed {seed}")
            if budget:
                words += ["--max_sampled_tokens", str(budget)]
            jobs.append(Job(output / name / variant / f"seed-{seed}", tuple(words)))
    return jobs


def begin(job: Job) -> subprocess.Popen:
    """Starts a run, which prints to its log."""
    command = job.command()
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    (job.folder / "config.json.new").unlink(missing_ok=True)  # all that a run leaves if it is killed very early
    job.write_note(None)
    print(f"{job.folder}: {'goes on' if '--resume' in command else 'begins'}", flush=True)
    with job.folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=TRAIN.parent,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )


def end(job: Job, exit_code: int) -> int:
    """Notes how a run ended, and returns its exit code."""
    job.write_note(exit_code)
    result = "finished" if exit_code == 0 else f"exit code {exit_code}, see {job.folder}.log"
    print(f"{job.folder}: {result}", flush=True)
    return exit_code


def make(jobs: Sequence[Job], at_once: int) -> int:
    """Makes all runs that are not finished. Exit code: 0 all are, 1 some failed, 2 train.py refused a flag, after which
    no other run begins, 130 stopped by Ctrl-C."""
    waiting = [job for job in jobs if not job.finished()]
    print(f"{len(jobs) - len(waiting)} runs are finished, {len(waiting)} are to be run", flush=True)
    running: dict[Job, subprocess.Popen] = {}
    codes: list[int] = []
    started = time.monotonic()
    try:
        while running or (waiting and 2 not in codes):
            while waiting and len(running) < at_once and 2 not in codes:
                job = waiting.pop(0)
                running[job] = begin(job)
            time.sleep(0.05)
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    codes.append(end(job, process.returncode))
                    minutes = (time.monotonic() - started) / 60 / len(codes) * (len(waiting) + len(running))
                    print(f"about {minutes:.0f} minutes to go", flush=True)
    except KeyboardInterrupt:  # the terminal sends it to the runs as well
        for job, process in running.items():
            end(job, process.wait())
        return 130
    return 2 if 2 in codes else int(any(codes))


# -------------------------------------------------------------------------------------------------- command line


def tokens(text: str) -> int:
    """`800000`, `800k` or `1.5M` as a number; argparse prints the ValueError."""
    if not re.fullmatch(r"(\d+|\d*\.\d+)[kM]?", text):
        raise ValueError
    number = round(float(text.replace("k", "e3").replace("M", "e6")))
    if number < 1:
        raise ValueError
    return number


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse ends with exit code 2 on an unknown word."""
    listing = "\n".join(f"  {name:<17}{c.about}: {', '.join(c.variants)}" for name, c in COMPARISONS.items())
    parser = argparse.ArgumentParser(
        "ablate.py",
        description=__doc__.split("\n")[0],
        epilog=f"comparisons and their variants:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("comparison", choices=COMPARISONS, metavar="COMPARISON", help="one of those below")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="only these variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--budget", type=tokens, help="sampled tokens of each run, as 800k or 1.5M")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"), help="folder of the runs (runs/ablate)")
    args = parser.parse_args(argv)
    if min(args.seeds, args.jobs) < 1:
        parser.error("--seeds and --jobs must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: that of `make`, or 2 for bad input."""
    args = arguments(argv)
    output = args.output.resolve()
    try:
        jobs = plan(args.comparison, output, args.seeds, args.only, args.budget)
        code = make(jobs, args.jobs)
    except ValueError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    if code in (0, 1):
        report(args.comparison, jobs, output)
    return code


def report(name: str, jobs: Sequence[Job], output: Path) -> None:
    """Prints the table of the runs that finished, which tables.py explains, and draws them over each other."""
    folders = {str(job.folder.relative_to(output)) for job in jobs}
    groups: dict[str, list] = {variant: [] for variant in COMPARISONS[name].variants}
    for run in runs_of(collect(output)).values():
        if run.name in folders and run.state == "finished":
            groups[run.variant].append(run)
    groups = {variant: runs for variant, runs in groups.items() if runs}
    if groups:
        c = COMPARISONS[name]
        print("Δ is against the baseline, the first variant: paired by seed, with its 95 % interval, in ** without 0.")
        print(tables.compare(c, tables.measure(groups, c.axis)).to_string(index=False))
        picture = output / name / "overlay.png"
        draw(groups, c.axis, picture)
        print(f"picture: {picture}")


def draw(groups: tables.Groups, axis: str, path: Path) -> None:
    """Writes a PNG: the variants over each other, each as its mean, with its seeds. `axis` is a column of curves.py."""
    plot_fits({variant: [tables.fitted(run, axis).fit for run in runs] for variant, runs in groups.items()}, axis, path)


if __name__ == "__main__":
    sys.exit(main())
