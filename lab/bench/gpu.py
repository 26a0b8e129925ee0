"""What only a GPU can show, in plans that each have a limit; docs/gpu.md has what came out.

    python lab/bench/gpu.py                           # every plan but `trl`, one after another: a quarter of an hour
    python lab/bench/gpu.py weights+faults both       # these; plans of checks may run at the same time
    python lab/bench/gpu.py both@before both --tree before=../old    # another checkout of the project beside this one
    python lab/bench/gpu.py --dry torch               # on a CPU, in tiny sizes: does this file work?

Every figure is a line of a table and of OUT/results.jsonl as soon as it is known; OUT/logs has what programs print, and
OUT/smi.csv the use of the card. A plan that fails or is too slow ends, the next one begins, and the exit code is 1.
Limits allow for a start of vLLM with empty caches, 90 s on an H200. What is measured has the card to itself, the shape
of Qwen3-0.6B with random weights, 128 completions of about 498 tokens a step, and the engine of lab/fast_vllm.py.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tasks.arithmetic import PHRASE

SIDES, GPU_TESTS = ROOT / "lab" / "bench" / "gpu_sides.py", ROOT / "lab" / "tests" / "gpu"
GRACE = 15.0  # seconds between SIGTERM and SIGKILL
SHORTEST = 30.0  # with fewer seconds left, nothing begins
TAIL = 25  # lines of a log that are shown: of what failed, and of a run of train.py
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
# Flags of the runs that are measured. With a coin as the reward, nearly every group has a gradient.
STILL = "--held_out 32 --pass_rate_threshold 2 --eval_every 1000000 --save_every 0 --lr 1e-6 --dtype bfloat16"
QWEN = "--min_budget 448 --max_budget 480 --answer_budget 32 --batch_prompts 16 --rollouts 8"
QWEN += " --tokens_per_microbatch 8192"
TINY = "--min_budget 8 --max_budget 12 --answer_budget 4 --batch_prompts 4 --rollouts 4 --max_num_seqs 32"
# Engines that start at the same time must not look at the card to decide how large their caches are.
SMALL_ENGINE = '{"kv_cache_memory_bytes": 1073741824, "gpu_memory_utilization": 0.1}'
# Of TRL: a pass of 16 completions, the memory for vLLM, and completions that do not end early, as ours.
TRL = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8, "vllm_mode": "colocate"}
TRL |= {"vllm_gpu_memory_utilization": 0.35, "vllm_max_model_length": 576, "generation_kwargs": {"ignore_eos": True}}
TRL_PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
TRL_PLACE["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@dataclass
class Job:
    """A command with a limit in seconds."""

    name: str
    command: list[str]
    limit: float
    folder: Path = ROOT  # where it runs
    root: Path = ROOT  # the checkout that it imports
    environment: dict[str, str] = field(default_factory=dict)
    waits: bool = False  # for the file `go`, after its imports

    def start(self, out: Path) -> None:
        """In a session of its own."""
        self.log, self.go = out / "logs" / f"{self.name}.txt", out / "logs" / f"{self.name}.go"
        for folder in (self.log.parent, self.folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.go.unlink(missing_ok=True)
        path = f"{self.root}:{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | OFFLINE | {"PYTHONPATH": path, "GO": str(self.go)} | self.environment
        files = {"stdout": self.log.open("w"), "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(self.command, cwd=self.folder, env=environment, start_new_session=True, **files)
        self.figures = 0  # that were read

    def new_figures(self) -> list[dict[str, Any]]:
        """Those that it has printed since the last call."""
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        figures = [json.loads(line) for line in lines if line.startswith('{"figure"') and line.endswith("}\n")]
        before, self.figures = self.figures, len(figures)
        return figures[before:]


# --------------------------------------------------------------------------------------------------------------- plans


class Plans:
    """Each method makes the jobs of one plan, which run at the same time."""

    def __init__(self, root: Path, work: Path, dry: str):
        self.root, self.work, self.dry = root, work, dry
        fast = (root / "lab" / "fast_vllm.py").exists()  # before, `vllm` was as fast
        self.engine = "torch" if dry == "torch" else "lab.fast_vllm:FastEngine" if fast else "vllm"

    def tests(self, name: str, file: str, chosen: str, limit: float) -> Job:
        """Those of lab/tests/gpu whose names have what `chosen` says, with compiled files of their own: two engines
        that start at the same time would write the same ones."""
        command = [sys.executable, "-m", "pytest", f"lab/tests/gpu/{file}", "-m", "gpu", "-s", "-k", chosen]
        command += ["--basetemp", str(self.work / f"pytest-{name}")]
        command += ["--device", "cpu"] if self.dry else ["--device", "cuda", "--engine_args", SMALL_ENGINE]
        cache = {"VLLM_CACHE_ROOT": str(self.work / f"cache-{name}")}
        return Job(name, command, limit, self.root, self.root, cache)

    def sides(self, name: str, question: str, limit: float, *more: str) -> Job:
        """A process of gpu_sides.py."""
        flags = ["--model", "model", "--dataset", "problems.jsonl", "--reward", "reward:coin"]
        flags += ["--interruption_phrase", " ".join(PHRASE), *STILL.split(), *(TINY if self.dry else QWEN).split()]
        flags += ["--engine", self.engine, "--output_dir", str(self.work / f"run-{name}"), "--overwrite", "true"]
        command = [sys.executable, str(SIDES), question, "--root", str(self.root), *flags, *more]
        return Job(name, command, limit, self.work / ("tiny" if self.dry else "qwen"), self.root, waits=True)

    def parts(self) -> list[Job]:
        """Head, trainer and memory against other ways of computing the same; no vLLM."""
        return [self.tests("parts", "test_1_parts.py", "memory" if self.dry else "not prompts", 240)]

    def weights(self) -> list[Job]:
        """New weights reach an engine that samples: on the card and by the file, a tied head and an untied one."""
        cases = [(engine, tied) for engine in (self.engine, "vllm") for tied in ("True", "False")]
        names = [f"{engine.rpartition(':')[2]}-{tied}" for engine, tied in cases[: 1 if self.dry else 4]]
        return [self.tests(f"weights-{name}", "test_2_engine.py", f"{name}]", 260) for name in names]

    def faults(self) -> list[Job]:
        """SIGTERM and resume, a dead engine, FSDP2."""
        names = ["sigterm"] if self.dry == "torch" else ["sigterm", "killed", "fsdp2"]
        kind = self.engine.rpartition(":")[2]
        return [self.tests(f"faults-{name}", "test_3_faults.py", f"{name} and {kind}", 300) for name in names]

    def auto(self) -> list[Job]:
        """The default run, with the engine that it takes by itself."""
        folder, place = self.work / "run-auto", self.work / "tiny" if self.dry else self.root
        command = [sys.executable, str(self.root / "train.py"), "--output_dir", str(folder), "--overwrite", "true"]
        if self.dry:
            command += ["--model", "model", *TINY.split(), "--held_out", "16", "--max_steps", "2", "--engine", self.dry]
        return [Job("auto", command, 150, place, self.root)]

    def both(self) -> list[Job]:
        """Steps of PipelineRL-8, then each side alone, then a turn of 8 steps."""
        return [self.sides("both", "both", 300)]

    def head(self) -> list[Job]:
        """PipelineRL-8 without the FP32 head."""
        return [self.sides("head", "both", 200, "--fp32_head", "false", "--short")]

    def prompts(self) -> list[Job]:
        """The trainer alone, with prompts of 128 tokens computed once, and with whole rows."""
        return [self.tests("prompts", "test_1_parts.py", "prompts", 120)]

    def trl(self) -> list[Job]:
        """TRL's GRPOTrainer, vLLM in its process, the same work."""
        length, steps, options = ("12", "3", {"use_vllm": False}) if self.dry else ("498", "8", TRL)
        more = ["--trl_options", json.dumps(options), "--length_control", "none", "--max_budget", length]
        job = self.sides("trl", "trl", 240, *more, "--answer_budget", "0", "--max_steps", steps)
        return [replace(job, environment={} if self.dry else TRL_PLACE)]


PLANS = ("parts", "weights", "faults", "auto", "both", "head", "prompts", "trl")
DEFAULT = PLANS[:-1]  # TRL is not among the packages that `make setup` installs


def groups_of(names: Sequence[str], trees: dict[str, Path], work: Path, dry: str) -> list[list[Job]]:
    """The jobs that run at the same time, in order. Raises SystemExit for a plan or a tree that is not there."""
    groups: list[list[Job]] = []
    times: Counter[str] = Counter()  # that a plan was named; the second `both` is `both-2`
    for together in names:
        groups.append([])
        for name in together.split("+"):
            plan, _, tree = name.partition("@")
            if plan not in PLANS or (tree and tree not in trees):
                raise SystemExit(
                    f"{name}: the plans are {', '.join(PLANS)}; the trees {', '.join(trees) or 'this one'}"
                )
            times[name] += 1
            end = name.removeprefix(plan) + (f"-{times[name]}" if times[name] > 1 else "")
            jobs = getattr(Plans(trees.get(tree, ROOT), work, dry), plan)()
            groups[-1] += [replace(job, name=job.name + end) for job in jobs]
    return groups


# -------------------------------------------------------------------------------------------------------------- driver


def stop(jobs: Sequence[Job]) -> None:
    """Ends these and what they started, all at once; an engine has its own process group, and ends with its trainer."""
    for number, grace in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, number)
        end = time.monotonic() + grace
        while time.monotonic() < end and any(job.process.poll() is None for job in jobs):
            time.sleep(0.1)


class Driver:
    """Runs groups of jobs, one after another, and keeps their figures."""

    def __init__(self, out: Path, seconds: float):
        self.out, self.started = out, time.monotonic()
        self.end = self.started + seconds
        self.jobs: list[Job] = []  # that run
        self.failed = False
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").unlink(missing_ok=True)
        print("| job | figure | values |\n| --- | --- | --- |")
        self.card = None
        if shutil.which("nvidia-smi"):
            command = "stdbuf -oL nvidia-smi --query-gpu=timestamp,name,driver_version,utilization.gpu,memory.used"
            command += " -lms 500 --format=csv,nounits"
            self.card = subprocess.Popen(command.split(), stdout=(out / "smi.csv").open("w"))

    def say(self, job: str, figure: str, **values: Any) -> None:
        """Keeps a figure. `at`: seconds since the start."""
        record = {"job": job, "figure": figure, "at": round(time.monotonic() - self.started, 1)} | values
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        row = ", ".join(f"{name} {value}" for name, value in values.items() if name != "span")
        print(f"| {job} | {figure} | {row} |", flush=True)

    def start(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            job.start(self.out)
            self.jobs.append(job)
        return jobs

    def finish(self, group: Sequence[Job]) -> None:
        """Lets these go on after their imports, waits for each to its limit, and writes what they say."""
        for job in group:
            job.go.touch()
        since, waiting = time.monotonic(), list(group)
        while waiting:
            time.sleep(0.1)
            seconds = time.monotonic() - since
            ended = [job for job in waiting if job.process.poll() is not None]
            late = [job for job in waiting if job not in ended and (seconds > job.limit or time.monotonic() > self.end)]
            stop(late)
            for job in waiting:
                for values in job.new_figures():
                    self.say(job.name, **values)
            for job in ended + late:
                code = job.process.returncode
                verdict = "too slow" if job in late else f"failed with exit code {code}" if code else "done"
                self.say(job.name, verdict, seconds=round(seconds, 1))
                self.failed |= verdict != "done"
                if verdict != "done" or "train.py" in job.command[1]:
                    print("\n".join(line[-300:] for line in job.log.read_text(errors="replace").splitlines()[-TAIL:]))
                waiting.remove(job)
                self.jobs.remove(job)

    def run(self, groups: Sequence[list[Job]], work: Path) -> None:
        """One group after another. While one runs, what measures next makes its imports, and waits."""
        models = self.start([Job("models", [sys.executable, str(GPU_TESTS / "small.py")], 120, work)])
        early = self.start([job for job in groups[0] if job.waits])
        self.finish(models)
        for group, after in zip(groups, [*groups[1:], []], strict=True):
            if time.monotonic() > self.end - SHORTEST:
                self.say(group[0].name, "left out")
                continue
            self.start([job for job in group if job not in early])
            early = self.start([job for job in after if job.waits])
            self.finish(group)

    def close(self) -> None:
        stop(self.jobs)
        if self.card:
            self.card.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("plans", nargs="*", default=DEFAULT, help=f"of {', '.join(PLANS)} (all but trl)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder for the figures (runs/gpu)")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all plans together")
    parser.add_argument("--tree", nargs="*", default=[], metavar="NAME=FOLDER", help="another checkout of the project")
    parser.add_argument("--dry", choices=["torch", "vllm"], default="", help="on a CPU, in tiny sizes, this engine")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out must be a folder, not the file {args.out}")
    if args.dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = args.out.resolve()
    trees = {name: Path(folder).resolve() for name, _, folder in (tree.partition("=") for tree in args.tree)}
    work = out / "work"
    groups = groups_of(args.plans, trees, work, args.dry)
    driver = Driver(out, args.seconds)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no program is left behind
    try:
        driver.say(
            "gpu.py", "machine", cores=os.cpu_count(), **{name: version(name) for name in ("torch", "transformers")}
        )
        driver.run(groups, work)
    finally:
        driver.close()
    return int(driver.failed)


if __name__ == "__main__":
    sys.exit(main())
