"""`benchmark.py peer`, `race` and `pacer`: whole programs side by side, TRL's GRPOTrainer and older checkouts too."""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import QUIET, ROOT, SETTING, Figure, Measured, Report, random_model, ratios, take_turns

from runtime.run_folder import Folder
from tasks import warm_start

PEER_PACKAGES = ["transformers==5.19.0", "accelerate==1.15.0", "safetensors==0.8.0", "trl==1.16.0"]


def peer_environment(folder: Path) -> str:
    """Python of TRL's own environment, made first if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing TRL into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (["torch==2.13.0"], PEER_PACKAGES):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return str(python)


class Contestant:
    """A training program in a process group of its own, which can be frozen; it writes metrics.jsonl, a line a step."""

    def __init__(self, command: list[str], folder: Path, threads: int):
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, (folder.parent / f"{folder.name}.log").open("w")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([*command, "--output_dir", str(folder)], env=environment, cwd=ROOT,
                                        stdout=self.log, stderr=self.log, start_new_session=True)  # fmt: skip

    def records(self, name: str) -> list[dict[str, Any]]:
        """Records of steps or evaluations so far."""
        found = Folder(self.folder).read(name)
        return [record for record in found if "step" in record]

    def advance(self, count: int) -> float:
        """Thaws it for `count` more steps; seconds that they take. Raises RuntimeError if it ends."""
        target = len(self.records("metrics.jsonl")) + count
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        while len(self.records("metrics.jsonl")) < target:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.folder.name} ended with {self.process.returncode}; see {self.log.name}")
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """Ends it."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            try:
                self._signal(signal.SIGCONT)
                self._signal(number)
                self.process.wait(timeout=patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.log.close()

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def ours(*arguments: str) -> list[str]:
    """Command line of a run of ours."""
    return [sys.executable, "train.py", *arguments]


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """Completions a second of ours and of TRL's GRPOTrainer, thawed in turn; neither evaluates."""
    report, python = Report(args), peer_environment(args.environment)
    longest = 256 if args.size != "0.2M" else 37
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        small = args.size == "0.2M"
        model = random_model(root / "model", args.size)
        if small:
            model = str(warm_start.warm_start("runs/cache", seed=args.seed))
        both = ["--model", model, "--seed", str(args.seed), "--max_steps", "100000"]
        both += ["--batch_prompts", str(args.batch_prompts)]
        budget = ["--length_control", "none", "--max_budget", str(longest - 4)]
        every_row = ["--zero_variance_filter", "false", "--pass_rate_threshold", "2"]
        mine = [*both, *QUIET, *budget, "--threads", "1"]
        theirs = [python, "tools/benchmark_peer.py", *both, "--eval_every", "0", "--max_tokens", str(longest)]
        commands = {"ours, every row trains": (ours(*mine, *every_row), 1)}
        if small:
            commands["ours, with its filters"] = (ours(*mine), 1)
        commands["TRL"] = ([*theirs, "--threads", "2", "--microbatch", str(args.microbatch)], 2)
        found, running = {}, {}
        try:
            for name, (command, threads) in commands.items():
                running[name] = Contestant(command, root / name.replace(" ", "-"), threads)
                running[name].advance(3 if small else 1)  # not timed
            completions = args.batch_prompts * 16 * args.steps
            found = take_turns({name: lambda c=c: completions / c.advance(args.steps) for name, c in running.items()},
                               args.repeats)  # fmt: skip
        finally:
            for contestant in running.values():
                contestant.close()
    report.add(found, "completions/s")
    least = 1.3 if small else 1.8
    report.figures = [Figure(f"{name} / TRL", ratios(values, found["TRL"]), least=least)
                      for name, values in found.items() if name != "TRL"]  # fmt: skip
    return report.close()


def reached(records: Sequence[dict[str, Any]], rate: float, what: str) -> float:
    """Value of `what` where the held-out pass rate first reaches `rate`, on the line between two evaluations; inf if it
    never does."""
    before = None
    for record in records:
        if record["pass_rate"] >= rate:
            if before is None:
                return record[what]
            share = (rate - before["pass_rate"]) / (record["pass_rate"] - before["pass_rate"])
            return before[what] + share * (record[what] - before[what])
        before = record
    return math.inf


def contestant(name: str, seed: int, args: argparse.Namespace) -> tuple[list[str], int]:
    """(command, threads) of `pipeline-8:1`, `ppo_off_policy-1:2` or `trl:2`."""
    label, _, threads = name.partition(":")
    if label == "trl":
        model = str(warm_start.warm_start("runs/cache", seed=seed))
        more = ["--model", model, "--seed", str(seed), "--threads", threads, "--max_steps", str(args.max_steps)]
        return [peer_environment(args.environment), "tools/benchmark_peer.py", *more], int(threads)
    schedule, _, k = label.rpartition("-")
    more = ["--schedule", schedule, "--k", k, "--seed", str(seed), "--threads", threads, "--save_every", "0"]
    evaluations = [*SETTING, "--eval_every", "5", "--probe_every", "5", "--max_steps", str(args.max_steps)]
    return ours(*evaluations, *more), int(threads)


def race(args: argparse.Namespace) -> dict[str, Any]:
    """Wall time and sampled tokens to a held-out pass rate, seed by seed; each contestant has the machine to itself.
    Start-up and evaluation are off every clock."""
    report, folder = Report(args), Path(args.output_dir)
    seconds: Measured = {name: [] for name in args.contestants}
    tokens: Measured = {name: [] for name in args.contestants}
    for seed in args.seeds:
        for name in args.contestants:
            command, threads = contestant(name, seed, args)
            place = folder / f"{name.replace(':', '-threads-')}-seed-{seed}"
            shutil.rmtree(place, ignore_errors=True)
            runner = Contestant(command, place, threads)
            try:
                found = wait_until(runner, args.rate, args.limit)
            finally:
                runner.close()
            seconds[name].append(reached(found, args.rate, "seconds"))
            tokens[name].append(reached(found, args.rate, "tokens"))
            print(f"{name} seed {seed}: {seconds[name][-1]:.0f} s, {tokens[name][-1]:,.0f} tokens", flush=True)
    report.add({f"{name}: time": values for name, values in seconds.items()}, f"s to {args.rate}")
    report.add({f"{name}: tokens": values for name, values in tokens.items()}, f"tokens to {args.rate}")
    first, *others = args.contestants
    for name in others:
        report.figures += [Figure(f"{first} / {name}: time", ratios(seconds[first], seconds[name]), most=1.0),
                           Figure(f"{first} / {name}: tokens", ratios(tokens[first], tokens[name]))]  # fmt: skip
    return report.close()


def wait_until(runner: Contestant, rate: float, limit: float) -> list[dict[str, Any]]:
    """Evaluations with their seconds, until one reaches `rate`, the program ends or `limit` seconds have passed."""
    started = time.monotonic()
    while True:
        records = runner.records("eval.jsonl")
        for record in records:  # ours counts devices' hours
            record.setdefault("seconds", record.get("device_hours", 0.0) * 3600 / min(2, os.cpu_count()))
        late = time.monotonic() > started + limit
        if late or runner.process.poll() is not None or any(record["pass_rate"] >= rate for record in records):
            return records
        time.sleep(0.5)


class Paced:
    """The pipeline_rl.py of one checkout on an engine of its own, in a process of its own (benchmark_pacer.py)."""

    def __init__(self, checkout: Path, model: str, slots: int, mean: int):
        command = [sys.executable, "tools/benchmark_pacer.py", model, str(slots), str(mean)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def ask(self, **case: Any) -> dict[str, float]:
        """The figures of one case. Raises RuntimeError if the process ended."""
        self.process.stdin.write(json.dumps(case) + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("benchmark_pacer.py ended; its own message is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def pacer(args: argparse.Namespace) -> dict[str, Any]:
    """How busy the pacer keeps an engine whose completions vary in length, here and in another checkout; and which lags
    --min_ready holds, at what loss of time, with half of the slots."""
    report, size = Report(args), args.batch_prompts
    places = {"ours": ROOT} | ({"other": args.pipeline.parent} if args.pipeline else {})
    found: dict[str, list[dict[str, float]]] = {}
    running: dict[str, Paced] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), "0.2M", ends=False)
        try:
            for name, place in places.items():
                running[name] = Paced(place, model, args.slots, args.mean)

            def one(label: str, name: str = "ours", **more: Any) -> dict[str, float]:
                common = {"batch_prompts": size, "rollouts": args.rollouts, "slots": args.slots, "sigma": args.sigma,
                          "k": args.k, "min_ready": 0, "steps": args.steps, "skip": args.k + 2}  # fmt: skip
                figures = running[name].ask(**common | more)
                print(label, {what: float(f"{x:.4g}") for what, x in figures.items()}, flush=True)
                found.setdefault(label, []).append(figures)
                return figures

            for _ in range(args.repeats):
                alone = one("engine alone", training=None, steps=args.k)["seconds a step"]
                for name in running:
                    one(f"{name}, {args.slots} slots", name, training=args.ratio * alone)
                half = {"slots": args.slots // 2}
                training = args.ratio * one("engine alone, half", training=None, steps=args.k, **half)["seconds a step"]
                base = one("min_ready 0", training=training, **half)["lag"]
                for lag in args.lags:
                    m = min(args.k * size, max(0, round((lag - base) * size)))
                    one(f"lag {lag} asked", training=training, min_ready=m, **half)["min_ready"] = m
        finally:
            for runner in running.values():
                runner.close()
    for label, turns in found.items():
        for what in turns[0]:
            report.add({f"{label}: {what}": [turn[what] for turn in turns]}, "")
    values = {label: {what: [turn[what] for turn in turns] for what in turns[0]} for label, turns in found.items()}
    ours, dial = values[f"ours, {args.slots} slots"], values["min_ready 0"]
    report.figures = [Figure("busy share of the slots", ours["busy"], least=0.9)]
    if args.pipeline:
        other = values[f"other, {args.slots} slots"]
        faster = ratios(ours["tokens/s"], other["tokens/s"])
        report.figures += [Figure("busy share of the slots, other", other["busy"]),
                           Figure("tokens/s / other's", faster, least=1.0)]  # fmt: skip
    for lag in args.lags:
        held = values[f"lag {lag} asked"]
        lost = [1 - x for x in ratios(held["tokens/s"], dial["tokens/s"])]
        report.figures += [Figure(f"lag {lag} asked: off by", [abs(x - lag) for x in held["lag"]], most=0.5),
                           Figure(f"lag {lag} asked: speed lost", lost, most=0.05)]  # fmt: skip
    return report.close()
