"""The paper's method as one command: change one ingredient, run, fit, compare A and then B (arXiv 2510.13786, 3.2).

    python tools/ablate.py leave-one-out --seeds 3       # the recipe, its variants, then the report
    python tools/ablate.py losses --dry-run              # only list the commands
    python tools/ablate.py losses --report               # only the report of what is finished

A row of COMPARISONS is a name and the `train.py` flags that differ from the setting: add a row, and the next call runs
what is new. Each run is a process of `train.py` in OUTPUT/COMPARISON/VARIANT/seed-N. A run that two comparisons share
(the recipe is in nearly all) is made once, in the folder of the comparison that stands first.

FINISHED is a run whose folder holds `finished.json`, which is written after `train.py` ended with exit code 0; it is
never run again. Any other folder goes on by --resume if it has a whole checkpoint, and begins again if not. Ctrl-C is
passed on once to the runs under way, which save a checkpoint; a second one ends them at once.

THE RULE for what can be told apart. Seeds are paired: seed N has the same starting model and prompts in every variant.
d_N = variant - baseline at seed N, and [mean d -+ t s / sqrt(n)] its 95 % interval over the n seeds, t Student's
quantile with n - 1 degrees of freedom. Distinguishable means that 0 lies outside. Each row has several such intervals
and nothing is corrected for their number: of twenty without any effect, one will look like one.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fit_sigmoid
from flags import FLAGS, UsageError
from records import Folder

ROOT = Path(__file__).resolve().parent.parent

# ------------------------------------------------------------------------------------------------------- what is run

# The harder setting. The thinking budget is too short for the longest chains, so the ceiling is below 1; the learning
# rate, more requests in flight and a deeper queue move the ratios away from 1, so that clipping acts. (With 1024
# requests and a queue of 256 the lag is 6.5, and CISPO itself falls back after 700k tokens: RESULTS.md.)
HARD = (
    "--min_budget 18 --max_budget 22 --lr 7e-4 --k 8 --max_num_seqs 512 --max_ready 128 --max_steps 4000 "
    "--max_tokens 1100000 --eval_every 6 --save_every 24"
)
# A length-hungry start: all demonstrations of the warm start think all over again, so that half of the first
# completions are cut, and yet every problem fits if the policy learns to stop.
HUNGRY = (
    "--rambling 1 --lr 7e-4 --k 8 --max_num_seqs 512 --max_ready 128 --max_steps 4000 --max_tokens 900000 "
    "--eval_every 4 --save_every 20"
)


@dataclass(frozen=True)
class Comparison:
    """One question. `variants`: name -> flags beside those of `setting`; the first is the baseline of the others, but
    for those that `against` gives another. `axes`: compute that runs are fitted against. `minutes`: of a run, alone on
    two cores."""

    about: str
    variants: dict[str, str]
    setting: str = HARD
    against: dict[str, str] = field(default_factory=dict)
    axes: tuple[str, ...] = ("tokens",)
    minutes: float = 2.8


COMPARISONS = {
    "leave-one-out": Comparison(
        "the recipe without one ingredient each (Figure 7)",
        {
            "scalerl": "",
            "prompt-normalisation": "--normalize_advantages prompt",
            "length-penalty": "--length_control penalty",
            "no-zero-variance-filter": "--zero_variance_filter false",
            "ppo-off-policy-8": "--schedule ppo_off_policy --k 8",
            "sample-average": "--aggregation sample",
            "dapo-loss": "--loss dapo",
            "uniform-sampling": "--pass_rate_threshold 1.1",
            "fp32-head-bfloat16": "--dtype bfloat16",
            "no-fp32-head-bfloat16": "--dtype bfloat16 --fp32_head false",
        },
        against={"no-fp32-head-bfloat16": "fp32-head-bfloat16"},
    ),
    "losses": Comparison(
        "the loss (Figure 5)",
        {"cispo": "", "gspo": "--loss gspo", "dapo": "--loss dapo", "grpo": "--loss grpo"},
    ),
    "schedules": Comparison(
        "generator and trainer one after the other or side by side (Figure 4)",
        {
            "pipeline-8": "",
            "pipeline-4": "--k 4",
            "pipeline-1": "--k 1",
            "ppo-off-policy-8": "--schedule ppo_off_policy --k 8",
            "ppo-off-policy-1": "--schedule ppo_off_policy --k 1",
        },
        axes=("device_hours", "step"),
    ),
    "aggregation": Comparison(
        "the average of the token losses",
        {"prompt": "", "sample": "--aggregation sample", "token": "--aggregation token",
         "constant": "--aggregation constant"},
    ),
    "normalization": Comparison(
        "what divides the advantages",
        {"batch": "", "prompt": "--normalize_advantages prompt", "none": "--normalize_advantages none"},
    ),
    "recipes": Comparison(  # batches 5/3 as large where zero-variance groups leave them; see PAPER.md, section 1.6
        "prevalent recipes as the paper ran them again (Figure 2); the head is FP32 in all, as in float32 it must be",
        {
            "scalerl": "",
            "deepseek-grpo": "--loss grpo --aggregation sample --normalize_advantages prompt --schedule ppo_off_policy "
            "--k 8 --zero_variance_filter false --pass_rate_threshold 1.1",
            "qwen2.5-dapo": "--loss dapo --normalize_advantages prompt --schedule ppo_off_policy --k 8 "
            "--batch_prompts 53 --max_ready 212 --pass_rate_threshold 1.1",
            "magistral": "--loss dapo --normalize_advantages prompt --batch_prompts 53 --max_ready 212 "
            "--pass_rate_threshold 1.1",
            "minimax-m1": "--normalize_advantages prompt --schedule ppo_off_policy --k 8 --batch_prompts 53 "
            "--max_ready 212 --pass_rate_threshold 1.1",
        },
    ),
    "clip": Comparison(
        "DAPO's upper clip and CISPO's cap",
        {
            "cispo-5": "",
            "cispo-1.2": "--eps_max 1.2",
            "cispo-2": "--eps_max 2",
            "cispo-8": "--eps_max 8",
            "dapo-0.20": "--loss dapo --eps_high 0.20",
            "dapo-0.26": "--loss dapo",
            "dapo-0.28": "--loss dapo --eps_high 0.28",
            "dapo-0.50": "--loss dapo --eps_high 0.50",
        },
    ),
    "batch": Comparison(
        "prompts per optimiser step, at equal tokens",
        {
            "batch-32": "",
            "batch-16": "--batch_prompts 16 --max_ready 64 --eval_every 12 --save_every 48",
            "batch-64": "--batch_prompts 64 --max_ready 256 --eval_every 3 --save_every 12",
        },
    ),
    "rollouts": Comparison(
        "completions per prompt, at equal completions per step",
        {
            "rollouts-16": "",
            "rollouts-8": "--rollouts 8 --batch_prompts 64 --max_ready 256",
            "rollouts-32": "--rollouts 32 --batch_prompts 16 --max_ready 64",
        },
    ),
    "length": Comparison(
        "interruption, penalty or neither, from a start that rambles",
        {"interruption": "", "penalty": "--length_control penalty", "none": "--length_control none"},
        setting=HUNGRY,
        minutes=2.3,
    ),
}  # fmt: skip

TRAIN = ROOT / "train.py"
DEFAULTS = {f.name: f.default for group in FLAGS for f in dataclasses.fields(group)}
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
            saved = json.loads(config.read_text())
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
    units = {"h": ("max_device_hours", 1), "k": ("max_tokens", 1e3), "M": ("max_tokens", 1e6), "": ("max_tokens", 1)}
    unit = text[-1:] if text[-1:] in units else ""
    name, size = units[unit]
    try:
        amount = float(text.removesuffix(unit)) * size
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise UsageError(f"--budget {text}: give a run's tokens as 800000, 800k or 1.5M, or device-hours as 0.05h.")
    both = {"max_tokens": 0, "max_device_hours": 0.0}  # one takes the place of the other
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


# --------------------------------------------------------------------------------------------------------- the figures


@dataclass
class Result:
    """A finished run, read and fitted. `whole` and `half` are by axis of compute: fits to all and to the first half."""

    variant: str
    seed: int
    evals: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    closing: dict[str, Any]
    float32: bool
    whole: dict[str, fit_sigmoid.CurveReport]
    half: fit_sigmoid.CurveReport
    shared: dict[str, fit_sigmoid.SigmoidFit] = field(default_factory=dict)

    @property
    def final(self) -> float:
        """Pass rate at the end: mean of the last two evaluations."""
        rates = [record["pass_rate"] for record in self.evals[-2:]]
        return sum(rates) / len(rates)


def read(run: Run, variant: str, axes: Sequence[str]) -> Result:
    """Reads a run's folder and fits its evaluations."""
    folder = Folder(run.folder)
    evals = folder.read("eval.jsonl")
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    whole = {x: fit_sigmoid.curve(evals, x=x, name=f"{variant} seed {run.seed}") for x in axes}
    half = fit_sigmoid.curve(evals, x=axes[0], fit_until=0.5, name=f"{variant} seed {run.seed}")
    closing = json.loads((run.folder / "finished.json").read_text())
    float32 = dict(run.flags).get("dtype", "float32") == "float32"
    return Result(variant, run.seed, evals, steps, closing, float32, whole, half)


def share_ceiling(results: Sequence[Result], axis: str) -> tuple[float | None, str]:
    """Refits every run with the shared ceiling; (that ceiling or None, the verdict of `fit_sigmoid.compare`).

    The shared ceiling is the mean over all runs whose own is identifiable, as in the paper's leave-one-out, or over all
    runs if none is; where `compare` gives no shared one, B there still describes the runs, with the verdict beside it.
    """
    fits = [r.whole[axis].fit for r in results]
    if len(fits) < 2:
        return None, "one run: nothing to compare"
    both = fit_sigmoid.compare(*fits, names=[r.whole[axis].name for r in results])
    ceilings = [f.A for f in fits if f.identifiable] or [f.A for f in fits if math.isfinite(f.A)]
    A = both.shared_A if both.refits else float(np.mean(ceilings)) if ceilings else None
    if A is not None:
        refits = both.refits or [fit_sigmoid.fit(f.C, f.R, A=A, n_samples=f.n_samples) for f in fits]
        for result, refit in zip(results, refits, strict=True):
            result.shared[axis] = refit
    return A, both.verdict


def compute_to(evals: Sequence[Mapping[str, Any]], rate: float, axis: str) -> float | None:
    """Compute at which the straight line between evaluations first reaches `rate`; None if no evaluation does."""
    before = None
    for record in evals:
        if record["pass_rate"] >= rate:
            if before is None:
                return float(record[axis])
            share = (rate - before["pass_rate"]) / (record["pass_rate"] - before["pass_rate"])
            return before[axis] + share * (record[axis] - before[axis])
        before = record
    return None


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean over seeds; NaN ends for a single one."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return mean, math.nan, math.nan
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - reach, mean + reach


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float, int]:
    """(mean, low, high, n) of the paired differences over the seeds that both have; NaN and 0 if they share none."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return math.nan, math.nan, math.nan, 0
    return *interval([ours[seed] - theirs[seed] for seed in seeds]), len(seeds)


def verdict(mean: float, low: float, high: float, more: str, less: str) -> str:
    """What an interval of a difference says; THE RULE above."""
    if math.isnan(low):
        return "one seed, so nothing can be said"
    return more if low > 0 else less if high < 0 else "not distinguishable"


def health(result: Result) -> dict[str, Any]:
    """Lag, clipped share, truncation and what a stable run does not show, of one run."""
    steps, evals = result.steps, result.evals

    def over(name: str) -> list[float]:
        return [step[name] for step in steps if name in step]

    def mean(name: str) -> float:
        return float(np.mean(over(name))) if over(name) else math.nan

    rates = [record["pass_rate"] for record in evals]
    found = {
        "truncated above 10 %": sum(step["truncated"] > 0.10 for step in steps),
        "gradient not finite": sum(step.get("updated", 1) == 0 for step in steps),
        "nothing to train on": sum("rows" not in step for step in steps),
        "gap above 1e-4": sum(gap > 1e-4 for gap in over("logprob_gap")) if result.float32 else 0,
    }
    signs = [f"{name} in {count} of {len(steps)} steps" for name, count in found.items() if count]
    if max(rates) - result.final > 0.1:
        signs.append(f"fell from {max(rates):.2f} to {result.final:.2f}")
    return {
        "lag": mean("lag_mean"), "lag_max": max(over("lag_max"), default=0), "ess": mean("ess"),
        "clipped +": mean("capped_positive"), "clipped -": mean("capped_negative"),
        "truncated": mean("truncated"), "truncated_last": evals[-1]["truncated"],
        "interrupted": evals[-1]["interrupted"], "length": evals[-1]["mean_length"],
        "gap": max(over("logprob_gap"), default=math.nan), "signs": signs,
    }  # fmt: skip


def extrapolation(results: Sequence[Result]) -> dict[str, Any]:
    """How well fits to first halves predict second halves: errors at the end of the run, and coverage."""
    rows = [r.half for r in results if not math.isnan(r.half.fit.A) and r.half.held_out_points]
    errors = [abs(row.predictions[0].reward - row.predictions[0].measured) for row in rows]
    inside = [row.predictions[0].evaluation[0] <= row.predictions[0].measured <= row.predictions[0].evaluation[1]
              for row in rows]  # fmt: skip
    points = sum(row.held_out_points for row in rows)
    return {
        "runs": len(rows), "not fitted": len(results) - len(rows), "errors": sorted(errors), "inside": sum(inside),
        "identifiable": sum(row.fit.identifiable for row in rows), "points": points,
        "covered": sum(row.held_out_covered * row.held_out_points for row in rows) / max(1, points),
        "rmse": float(np.median([row.held_out_rmse for row in rows])) if rows else math.nan,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the report

# What is compared with the baseline: (heading, words for more and for less, what it is of a result)
MEASURES = {
    "final": ("pass rate at the end", "higher", "lower"),
    "A known": ("A where identifiable", "higher", "lower"),
    "B shared": ("B at the shared A", "more efficient", "less efficient"),
    "tokens": ("tokens to the rate", "needs more", "needs fewer"),
    "device_hours": ("device-hours to the rate", "needs more", "needs fewer"),
}

RULE = (
    "**What can be told apart** (variant minus baseline, paired by seed, with the 95 % interval over seeds: "
    "distinguishable if 0 is outside; not corrected for the number of comparisons):"
)


def values(results: Sequence[Result], measure: str, axis: str, rate: float) -> dict[int, float]:
    """{seed: value} of one variant's runs; runs without that value (no ceiling to speak of, rate not reached) are
    missing. `A known` is A where it is identifiable."""
    found: dict[int, float | None] = {}
    for r in results:
        if measure == "final":
            found[r.seed] = r.final
        elif measure == "A known":
            found[r.seed] = r.whole[axis].fit.A if r.whole[axis].fit.identifiable else None
        elif measure == "B shared":
            found[r.seed] = r.shared[axis].B if axis in r.shared else None
        elif measure in ("A", "B", "C_mid"):
            found[r.seed] = getattr(r.whole[axis].fit, measure)
        else:
            found[r.seed] = compute_to(r.evals, rate, measure)
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def amount(value: float) -> str:
    """0.0123, 12.3, 512k: three digits of anything."""
    if not math.isfinite(value):
        return "–"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def cell(found: Mapping[int, float], of: int) -> str:
    """`mean [low, high]`, and of how many runs if not of all."""
    if not found:
        return f"– (0 of {of})" if of else "–"
    mean, low, high = interval(list(found.values()))
    text = amount(mean) if math.isnan(low) else f"{amount(mean)} [{amount(low)}, {amount(high)}]"
    return text if len(found) == of else f"{text} ({len(found)} of {of})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by variant, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.variant, []).append(result)
    return found


def main_table(groups: Mapping[str, Sequence[Result]], axis: str, shared: float | None, rate: float) -> str:
    """Fits and compute to the rate, one row a variant."""
    unit = fit_sigmoid.UNITS.get(axis, axis)
    head = ["variant", "seeds", "pass rate at the end", "A", "A identifiable", "B", f"C_mid ({unit})",
            f"B at A = {shared:.3f}" if shared else "B at a shared A", f"tokens to {rate:g}",
            f"device-hours to {rate:g}"]  # fmt: skip
    rows = []
    for name, results in groups.items():
        names, n = ("final", "A", "B", "C_mid", "B shared", "tokens", "device_hours"), len(results)
        found = [cell(values(results, measure, axis, rate), n) for measure in names]
        known = len(values(results, "A known", axis, rate))
        rows.append([name, str(n), *found[:2], f"{known} of {n}", *found[2:]])
    return table(head, rows)


def health_table(groups: Mapping[str, Sequence[Result]]) -> str:
    """What the runs were like, one row a variant."""
    head = ["variant", "lag mean / max", "ESS", "clipped A > 0 / A < 0", "truncated, all steps / at the end",
            "interrupted at the end", "length at the end", "largest log-prob gap", "instabilities"]  # fmt: skip
    rows = []
    for name, results in groups.items():
        each = [health(r) for r in results]

        def mean(key: str, each: list[dict[str, Any]] = each) -> float:
            return float(np.mean([one[key] for one in each]))

        pairs = [(r.seed, ", ".join(one["signs"])) for r, one in zip(results, each, strict=True)]
        signs = [f"seed {seed}: {text}" for seed, text in pairs if text]
        rows.append([
            name, f"{mean('lag'):.2f} / {max(one['lag_max'] for one in each)}", f"{mean('ess'):.3f}",
            f"{mean('clipped +'):.2%} / {mean('clipped -'):.2%}",
            f"{mean('truncated'):.1%} / {mean('truncated_last'):.1%}", f"{mean('interrupted'):.1%}",
            f"{mean('length'):.1f}", f"{max(one['gap'] for one in each):.1e}", "; ".join(signs) or "none",
        ])  # fmt: skip
    return table(head, rows)


def sentences(c: Comparison, groups: Mapping[str, Sequence[Result]], axis: str, rate: float) -> list[str]:
    """In words: each variant against its baseline, measure by measure, by THE RULE."""
    first = next(iter(c.variants))
    lines = []
    for name, results in groups.items():
        base = c.against.get(name, first)
        if name == base or base not in groups or (name not in c.against and name in c.against.values()):
            continue
        parts = []
        for measure, (heading, more, less) in MEASURES.items():
            ours, theirs = (values(r, measure, axis, rate) for r in (results, groups[base]))
            mean, low, high, n = difference(ours, theirs)
            heading = heading.replace("the rate", f"{rate:g}")
            missing = len(results) - n
            if not n:
                parts.append(f"{heading}: no pair of runs has it")
                continue
            span = "" if math.isnan(low) else f" [{amount(low)}, {amount(high)}]"
            few = f" ({n} of {len(results)} seeds)" if missing else ""
            parts.append(f"{heading} {'+' if mean >= 0 else ''}{amount(mean)}{span}{few}: "
                         f"**{verdict(mean, low, high, more, less)}**")  # fmt: skip
        lines.append(f"- *{name}* against *{base}*: " + "; ".join(parts) + ".")
    return lines


def extrapolation_text(results: Sequence[Result]) -> str:
    """The table of predictions."""
    known = [r for r in results if r.half.fit.identifiable]
    unknown = [r for r in results if not r.half.fit.identifiable]
    head = ["fits to the first half", "runs", "error at the end: median", "9 of 10 below", "largest",
            "last evaluation inside its 95 % interval", "all held-out evaluations inside", "RMSE of the second half"]
    rows = []
    for name, some in (("ceiling identifiable", known), ("ceiling not identifiable", unknown), ("all", results)):
        e = extrapolation(some)
        if not e["runs"]:
            rows.append([name, "0", *["–"] * 6])
            continue
        high = float(np.quantile(e["errors"], 0.9))
        rows.append([name, str(e["runs"]), f"{np.median(e['errors']):.3f}", f"{high:.3f}", f"{e['errors'][-1]:.3f}",
                     f"{e['inside']} of {e['runs']}", f"{e['covered']:.0%} of {e['points']}", f"{e['rmse']:.3f}"])
    failed = extrapolation(results)["not fitted"]
    return table(head, rows) + (f"\n\n{failed} runs have too few evaluations in their first half." if failed else "")


def report(
    name: str, results: Sequence[Result], rate: float, picture: str, wanted: Sequence[tuple[str, int]]
) -> str:
    """The whole report of one comparison, Markdown. `wanted`: (variant, seed) of all its runs."""
    c, groups = COMPARISONS[name], by_variant(results)
    seeds = sorted({r.seed for r in results})
    missing = [f"{v} seed {s}" for v, s in wanted if (v, s) not in {(r.variant, r.seed) for r in results}]
    minutes, dates = sum(r.closing["seconds"] for r in results) / 60, sorted(r.closing["finished"] for r in results)
    text = [
        f"## {name}: {c.about}",
        f"{len(results)} of {len(wanted)} runs finished, seeds {', '.join(map(str, seeds))}; {minutes:.0f} minutes of "
        f"machine time, {dates[0]} to {dates[-1]}; {'; '.join(sorted({r.closing['machine'] for r in results}))}."
        + (f" Not finished: {', '.join(missing)}." if missing else ""),
        f"Setting: `{c.setting}`. Variants: "
        + "; ".join(f"*{v}* `{c.variants[v] or 'the setting as it is'}`" for v in groups) + ".",
        f"![{name}]({picture})",
    ]  # fmt: skip
    for axis in c.axes:
        shared, said = share_ceiling(results, axis)
        text += [f"**Fits against {fit_sigmoid.UNITS.get(axis, axis)}.** Mean [95 % interval over seeds]. "
                 "A ceiling that is not identifiable is a guess, and so are its B and C_mid.",
                 main_table(groups, axis, shared, rate),
                 f"`fit_sigmoid.compare` on all runs: {said}."]  # fmt: skip
        lines = sentences(c, groups, axis, rate)
        text += [RULE, "\n".join(lines)] if lines else []
    text += ["**Health of the runs.**", health_table(groups), "**Half a run predicts the other.**",
             extrapolation_text(results)]  # fmt: skip
    return "\n\n".join(text) + "\n"


def draw(name: str, results: Sequence[Result], path: Path) -> None:
    """A PNG: a panel for each axis of compute, thin lines the runs, thick ones the means over seeds, and a panel with
    the differences in the pass rate at the end."""
    from matplotlib.figure import Figure

    c, groups = COMPARISONS[name], by_variant(results)
    axes_of = list(dict.fromkeys((*c.axes, "device_hours")))
    figure = Figure(figsize=(4.6 * (len(axes_of) + 1), 4.4), layout="constrained")
    *panels, last = figure.subplots(1, len(axes_of) + 1)
    for panel, axis in zip(panels, axes_of, strict=True):
        for i, some in enumerate(groups.values()):
            lines = [(np.array([e[axis] for e in r.evals]), np.array([e["pass_rate"] for e in r.evals])) for r in some]
            for x, y in lines:
                panel.plot(x, y, color=f"C{i % 10}", alpha=0.3, lw=0.8)
            grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
            panel.plot(grid, np.mean([np.interp(grid, x, y) for x, y in lines], 0), color=f"C{i % 10}", lw=2,
                       ls="-" if i < 10 else "--")  # fmt: skip
        panel.set(xlabel=fit_sigmoid.UNITS.get(axis, axis), ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("pass rate on held-out prompts")
    first = next(iter(c.variants))
    for i, (variant, some) in enumerate(groups.items()):
        base = groups.get(c.against.get(variant, first), [])
        mean, low, high, _ = difference(values(some, "final", "", 0.0), values(base, "final", "", 0.0))
        reach = 0.0 if math.isnan(low) else high - mean
        last.errorbar(mean, i, xerr=reach, color=f"C{i % 10}", marker="o", capsize=3)
    last.set_yticks(range(len(groups)), list(groups), fontsize=8)
    last.invert_yaxis()
    last.axvline(0, color="gray", lw=0.8)
    last.set(xlabel="pass rate at the end minus the baseline's, 95 %")
    figure.savefig(path, dpi=110)


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
    add("comparison", choices=list(COMPARISONS), metavar="COMPARISON")
    add("--seeds", type=int, default=3, help="runs of each variant, seeds 0, 1, ... (default 3)")
    add("--only", nargs="+", default=[], metavar="VARIANT", help="these variants alone")
    add("--jobs", type=int, default=1, help="runs at a time; above 1 they slow each other, and device-hours mean less")
    add("--budget", default="", help="of each run: tokens as 800k or 1.5M, or device-hours as 0.05h")
    add("--output", default="runs/ablate", metavar="FOLDER", help="where the runs are (default runs/ablate)")
    add("--pass-rate", type=float, default=0.5, metavar="P", help="compute to this pass rate is reported (default 0.5)")
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
    """report.md and its picture, from the runs that are finished."""
    c = COMPARISONS[name]
    results = [read(run, variant, c.axes) for (variant, _), run in runs.items() if run.finished()]
    if not results:
        print("no run is finished: nothing to report")
        return
    folder = Path(args.output) / name
    pictures = Path(args.pictures) if args.pictures else folder
    for path in (folder, pictures):
        path.mkdir(parents=True, exist_ok=True)
    picture = pictures / f"{name}.png"
    draw(name, results, picture)
    shown = picture.name if pictures == folder else str(picture)
    text = report(name, results, args.pass_rate, shown, list(runs))
    (folder / "report.md").write_text(text)
    print(f"{text}\nwritten to {folder / 'report.md'} and {picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 some runs failed, 2 usage, 130 stopped by a signal."""
    args = arguments(argv)
    name, output, train = args.comparison, Path(args.output).resolve(), Path(args.train).resolve()
    code = 0
    try:
        budget = budget_flags(args.budget) if args.budget else {}
        runs = plan(name, range(args.seeds), output, budget, args.only)
        if args.dry_run:
            list_commands(runs, train, COMPARISONS[name].minutes)
            return 0
        if not args.report:
            with alone(output) as lock:
                sweep = Sweep(output, train, args.jobs, lock)
                code = sweep.run(list(runs.values()))
            for run in sweep.failed:
                print(f"failed: {run.folder}; the next call tries it again")
        if code not in (2, 130):
            write_report(name, runs, args)
    except UsageError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
