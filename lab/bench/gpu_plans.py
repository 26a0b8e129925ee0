"""The plans of gpu.py: each is a function that makes the jobs of one plan, which run at the same time.

A job has a limit that fits a start of vLLM with empty caches: 90 s on an H200. Those that measure sample and train in
the shape of Qwen3-0.6B with random weights, 128 completions of about 498 tokens a step.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tasks.arithmetic import PHRASE

SIDES = ROOT / "lab" / "bench" / "gpu_sides.py"
# Flags of the runs that are measured. With a coin as the reward, nearly every group has a gradient.
STILL = "--held_out 32 --pass_rate_threshold 2 --eval_every 1000000 --save_every 0 --lr 1e-6".split()
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
    run: Path | None = None  # the folder of its run of train.py


@dataclass
class Place:
    """Where jobs run."""

    root: Path  # the checkout
    work: Path  # a folder for models and runs
    dry: str  # the engine of a dry run; empty on a GPU

    @property
    def engine(self) -> str:
        return self.dry or "vllm"


# --------------------------------------------------------------------------------------------------------------- plans


def tests(place: Place, name: str, file: str, chosen: str, limit: float, *more: str) -> Job:
    """Those of lab/tests/gpu whose names have what `chosen` says."""
    command = [sys.executable, "-m", "pytest", f"lab/tests/gpu/{file}", "-m", "gpu", "-s", "-k", chosen]
    command += ["--basetemp", str(place.work / f"pytest-{name}")]
    command += ["--device", "cpu"] if place.dry else ["--device", "cuda", "--engine_args", SMALL_ENGINE]
    return Job(name, [*command, *more], limit, place.root, place.root)


def qwen(place: Place, name: str, question: str, limit: float, *more: str) -> Job:
    """A process of gpu_sides.py."""
    flags = ["--model", "model", "--dataset", "problems.jsonl", "--reward", "reward:coin", "--dtype", "bfloat16"]
    flags += ["--interruption_phrase", " ".join(PHRASE), *STILL, *(TINY if place.dry else QWEN).split()]
    flags += ["--output_dir", str(place.work / f"run-{name}"), "--overwrite", "true", *more]
    command = [sys.executable, str(SIDES), question, "--root", str(place.root), *flags]
    return Job(name, command, limit, place.work / ("tiny" if place.dry else "qwen"), place.root)


def parts(place: Place) -> list[Job]:
    """Head, trainer and memory against other ways of computing the same; no vLLM."""
    return [tests(place, "parts", "test_1_parts.py", "memory" if place.dry else "", 240)]


def own_cache(place: Place, job: Job) -> Job:
    """For an engine that starts beside others: two of them would write the same compiled files."""
    return replace(job, environment={"VLLM_CACHE_ROOT": str(place.work / f"cache-{job.name}")})


def weights(place: Place) -> list[Job]:
    """New weights reach an engine that samples: each channel, a tied head and an untied one."""
    jobs = []
    for name, tied in itertools.product([f"[{place.engine}", "FileEngine"], ("True", "False")):
        title = f"weights-{name.strip('[')}-{'tied' if tied == 'True' else 'untied'}"
        jobs.append(own_cache(place, tests(place, title, "test_2_engine.py", f"{name} and {tied}", 260)))
    return jobs[:1] if place.dry else jobs


def faults(place: Place) -> list[Job]:
    """SIGTERM and resume, a dead engine, FSDP2 with one process."""
    names = ["sigterm"] if place.dry == "torch" else ["sigterm", "killed", "fsdp2"]
    jobs = [tests(place, f"faults-{name}", "test_4_faults.py", f"{name} and {place.engine}", 300) for name in names]
    return [own_cache(place, job) for job in jobs]


def auto(place: Place) -> list[Job]:
    """The default run, with the engine that it takes by itself."""
    folder = place.work / "run-auto"
    command = [sys.executable, str(place.root / "train.py"), "--output_dir", str(folder), "--overwrite", "true"]
    if not place.dry:
        return [Job("auto", command, 150, place.root, place.root, run=folder)]
    command += ["--model", "model", *TINY.split(), "--held_out", "16", "--max_steps", "2", "--engine", place.dry]
    return [Job("auto", command, 150, place.work / "tiny", place.root, run=folder)]


def both(place: Place) -> list[Job]:
    """Steps of PipelineRL-8, then each side alone, then a turn of 8 steps."""
    return [qwen(place, "both", "both", 300, "--engine", place.engine)]


def head(place: Place) -> list[Job]:
    """PipelineRL-8 without the FP32 head."""
    return [
        qwen(
            place,
            "head",
            "both",
            200,
            "--engine",
            place.engine,
            "--fp32_head",
            "false",
            "--windows",
            "1",
            "--alone",
            "0",
        )
    ]


def prompts(place: Place) -> list[Job]:
    """The trainer alone, with prompts of 128 tokens computed once, and with whole rows."""
    command = [sys.executable, "lab/bench/gpu_speed.py", "prompts"]
    return [Job("prompts", command, 120, place.root, place.root)]


def trl(place: Place) -> list[Job]:
    """TRL's GRPOTrainer, vLLM in its process, the same work."""
    length, steps, options = ("12", "3", {"use_vllm": False}) if place.dry else ("498", "8", TRL)
    more = ["--trl_options", json.dumps(options), "--length_control", "none", "--max_budget", length]
    job = qwen(place, "trl", "trl", 240, *more, "--answer_budget", "0", "--max_steps", steps)
    return [replace(job, environment={} if place.dry else TRL_PLACE)]


def runs(place: Place) -> list[Job]:
    """Whole runs with each engine, and FSDP2 where there are GPUs for it."""
    cases = [f"{dtype} and {engine}" for dtype in ("float32", "bfloat16") for engine in ("torch", "vllm")]
    cases += [f"real_model and {case}" for case in ("torch-0", "vllm-0", "vllm-1", "vllm-2")]
    if place.dry:
        return [tests(place, "runs", "test_3_runs.py", "", 120, "--collect-only")]
    return [tests(place, f"runs-{case.split()[0]}-{case.split()[-1]}", "test_3_runs.py", case, 300) for case in cases]


PLANS = {plan.__name__: plan for plan in (parts, weights, faults, auto, both, head, prompts, trl, runs)}
ONE_BY_ONE = ("runs",)  # the jobs of the others run at the same time


def groups_of(names: Sequence[str], trees: dict[str, Path], work: Path, dry: str) -> list[list[Job]]:
    """The jobs that run at the same time, in order. Raises SystemExit for a plan or a tree that is not there."""
    groups: list[list[Job]] = []
    times: Counter[str] = Counter()  # that a plan was named; the second `both` is `both-2`
    for together in names:
        jobs: list[Job] = []
        for name in together.split("+"):
            plan, _, tree = name.partition("@")
            if plan not in PLANS or (tree and tree not in trees):
                raise SystemExit(
                    f"{name}: the plans are {', '.join(PLANS)}; the trees {', '.join(trees) or 'this one'}"
                )
            times[name] += 1
            end = name.removeprefix(plan) + (f"-{times[name]}" if times[name] > 1 else "")
            place = Place(trees.get(tree, ROOT), work, dry)
            jobs += [replace(job, name=job.name + end) for job in PLANS[plan](place)]
        groups += [[job] for job in jobs] if together in ONE_BY_ONE else [jobs]
    return groups
