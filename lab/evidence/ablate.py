"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python lab/evidence/ablate.py losses --seeds 3      # every variant of a comparison, and what changed
    python lab/evidence/ablate.py --publish runs/ablate      # adds the runs of a folder to lab/results/

`comparisons.py` says what is compared, `runs.py` what can be told apart. A run is in OUTPUT/COMPARISON/VARIANT/seed-N
with a .log and a .json beside it. One that ended with exit code 0 is never made again. Any other goes on from its last
checkpoint, or begins again if it has none. Ctrl-C also reaches the runs under way, which save checkpoints.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tables
from comparisons import COMPARISONS
from runs import COLUMNS, LOGGED, MEMBER, NUMBERS, RESULTS, ROOT, Groups, fitted, read_rows, runs_of, write_rows

sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from curves import plot_fits

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
    """The runs of a comparison. Raises ValueError for an unknown variant."""
    c = COMPARISONS[name]
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


# ------------------------------------------------------------------------------------------------- from run folders


DIGITS = {"step": ".0f", "tokens": ".0f", "n": ".0f", "device_hours": ".6g"}
DIGITS |= dict.fromkeys(("pass_rate", "best", "worst", "set_1", "set_2"), ".5f")


def state_of(exit_code: int | None) -> str:
    """What a note's exit code says of a run."""
    if exit_code == 0:
        return "finished"
    if exit_code is None or exit_code in (130, 143) or exit_code < 0:  # under way, or stopped by a signal
        return "unfinished"
    return f"failed (exit code {exit_code})"


def rows_of(folder: Path) -> pd.DataFrame:
    """The rows of the run in OUTPUT/COMPARISON/VARIANT/seed-N; one without numbers if it was never evaluated."""
    comparison, variant, seed = folder.parts[-3:]
    note = json.loads(folder.with_name(f"{folder.name}.json").read_text())
    run = {
        "run": f"{comparison}/{variant}/{seed}",
        "comparison": comparison,
        "variant": variant,
        "seed": seed.removeprefix("seed-"),
        "flags": shlex.join(note["flags"]),
        "state": state_of(note["exit_code"]),
    }
    evaluations = Folder(folder).read("eval.jsonl")
    if not evaluations:
        return pd.DataFrame([run], columns=COLUMNS).fillna("")
    config = json.loads((folder / "config.json").read_text())
    steps = pd.DataFrame(record for record in Folder(folder).read("metrics.jsonl") if "step" in record)
    steps = steps.reindex(columns=["step", *LOGGED.values()]).astype(float)
    rows = []
    before = 0
    for record in evaluations:
        values = record | {"n": record["n_prompts"] * record["n_samples"]}
        if "correct" in record:
            correct = np.array(record["correct"])
            values["best"] = np.mean(correct > 0)
            values["worst"] = np.mean(correct == record["n_samples"])
        rates_of_sets = [figures["pass_rate"] for figures in record.get("data_sets", {}).values()]
        values |= zip(("set_1", "set_2"), rates_of_sets, strict=False)
        since = steps[steps["step"].between(before, record["step"], inclusive="right")]
        values |= {column: since[key].mean() for column, key in LOGGED.items()}
        values["lag_max"] = since["lag_max"].max()
        values["kept"] = since["rows"].fillna(0).mean() / (config["batch_prompts"] * config["rollouts"])
        rows.append(run | {column: number(column, values.get(column)) for column in NUMBERS})
        before = record["step"]
    return pd.DataFrame(rows, columns=COLUMNS)


def number(column: str, value: float | None) -> str:
    """A number as curves.csv.gz has it; empty where there is none."""
    if value is None or not math.isfinite(value):
        return ""
    return format(value, DIGITS.get(column, ".4g"))


def collect(output: Path) -> pd.DataFrame:
    """The rows of all runs in OUTPUT."""
    folders = [note.with_suffix("") for note in output.glob("*/*/seed-*.json")]
    return pd.concat([pd.DataFrame(columns=COLUMNS), *(rows_of(folder) for folder in sorted(folders))])


def publish(output: Path, results: Path = RESULTS) -> None:
    """Adds the runs of OUTPUT to both files, in the place of those that have their names, and prints which of them did
    not finish. Raises ValueError if there is none."""
    rows = collect(output)
    if rows.empty:
        raise ValueError(f"{output} holds no COMPARISON/VARIANT/seed-N; name the --output of runs.")
    runs = runs_of(rows).values()
    file = results / "curves.csv.gz"
    old = read_rows(file)
    write_rows(pd.concat([old[~old["run"].isin(rows["run"])], rows]), file)
    finished = [run for run in runs if run.state == "finished"]
    new = pd.DataFrame(
        [(run.comparison, run.variant, run.seed, run.name) for run in finished], columns=[*MEMBER, "run"]
    )
    listed = pd.concat([pd.read_csv(results / "runs.csv"), new])
    listed.drop_duplicates(MEMBER, keep="last").to_csv(results / "runs.csv", index=False)
    for run in runs:
        if run.state != "finished":
            print(f"{run.state}: {run.name}, {run.rates.size} evaluations")
    print(f"{len(runs)} runs, {len(finished)} of them finished: {file}")


# -------------------------------------------------------------------------------------------------- command line


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse ends with exit code 2 on an unknown word."""
    listing = "\n".join(f"  {name:<17}{c.about}: {', '.join(c.variants)}" for name, c in COMPARISONS.items())
    parser = argparse.ArgumentParser(
        "ablate.py",
        description=__doc__.split("\n")[0],
        epilog=f"a comparison, with its variants:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=list(COMPARISONS), metavar="NAME", help="one of those below")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="only these variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--budget", type=int, help="sampled tokens of each run, as 600_000")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"), help="folder of the runs (runs/ablate)")
    parser.add_argument(
        "--publish", type=Path, metavar="OUTPUT", help="make no run; add those of OUTPUT to lab/results"
    )
    args = parser.parse_args(argv)
    if min(args.seeds, args.jobs, args.budget or 1) < 1:
        parser.error("--seeds, --jobs and --budget must be at least 1")
    if (args.name is None) == (args.publish is None):
        parser.error("give a NAME, or --publish OUTPUT")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: that of `make`, or 2 for bad input."""
    args = arguments(argv)
    output = args.output.resolve()
    try:
        if args.publish:
            publish(args.publish)
            return 0
        jobs = plan(args.name, output, args.seeds, args.only, args.budget)
        code = make(jobs, args.jobs)
    except (ValueError, OSError) as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError) as error:
        print(f"ablate.py: a file in {args.publish or output} is damaged: {error!r}", file=sys.stderr)
        return 2
    if code in (0, 1):
        report(args.name, finished_runs(jobs, output), output)
    return code


def finished_runs(jobs: Sequence[Job], output: Path) -> Groups:
    """The runs of the jobs that finished, by variant, in the order of the jobs."""
    folders = [str(job.folder.relative_to(output)) for job in jobs]
    groups: dict[str, list] = {Path(folder).parent.name: [] for folder in folders}
    for run in runs_of(collect(output)).values():
        if run.name in folders and run.state == "finished":
            groups[run.variant].append(run)
    return {variant: runs for variant, runs in groups.items() if runs}


def report(name: str, groups: Groups, output: Path) -> None:
    """Prints what the runs show, and draws the variants over each other, each as its mean, with its seeds."""
    if len(groups) < 2:
        print("There is nothing to compare: fewer than two variants have a run that finished.")
        return
    c = COMPARISONS[name]
    print("Δ is against the baseline, the first variant: paired by seed, with its 95 % interval, in ** without 0.")
    print(tables.compare(c, groups).to_string(index=False))
    picture = output / f"{name}.png"
    plot_fits({variant: [fitted(run, c.axis).fit for run in runs] for variant, runs in groups.items()}, c.axis, picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
