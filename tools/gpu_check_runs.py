"""Checks 6 to 12 of gpu_check.py: runs of train.py, as a user starts them.

 6 demo, float32          trainer and engine agree at every step, and the model learns
 7 demo, bfloat16         the same in bfloat16, with the FP32 head and without
 8 the README's command   the run of a real model, shortened: memory, log-probs, stalls, speed
 9 stop and resume        SIGTERM, and a run that goes on with the same weights
10 engine killed          the engine dies while it gets new weights: the run ends and leaves nothing
11 FSDP2                  accelerate's launcher; the step after a load is the step without one
12 several GPUs           weights by `nccl`; two trainer processes, and an engine on each GPU that is left
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gpu_check_parts
import torch
from gpu_check_engine import updates_in_flight
from gpu_check_job import Job, NotRun, marked
from gpu_check_parts import QWEN3_06B, TINY, equal, random_qwen3
from measuring import ROOT
from torch import Tensor

from runtime.run_folder import Folder


class Run:
    """A run of train.py in the folder JOB/NAME; the current folder is JOB."""

    def __init__(self, job: Job, name: str, *flags: str, processes: int = 0, resume: bool = False):
        self.folder = job.folder / name
        place = [
            "--resume" if resume else "--output_dir",
            str(self.folder),
            "--cache_dir",
            str(ROOT / "runs" / "cache"),
        ]
        command = [*launcher(job, processes), str(ROOT / "train.py"), *flags, *place]  # the last of two wins
        print(shlex.join(command), flush=True)  # into the check's log, as all that the run prints
        local = {"GLOO_SOCKET_IFNAME": "lo"} if job.cpu else {}
        self.process = subprocess.Popen(command, cwd=job.folder, env=os.environ | local)

    def end(self, code: int = 0) -> None:
        """Waits for its end. Raises RuntimeError for another exit code."""
        if self.process.wait() != code:
            raise RuntimeError(f"train.py ended with {self.process.returncode}, not {code}")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The records of steps, or of evaluations, so far."""
        return [record for record in Folder(self.folder).read(name) if "step" in record]

    def steps(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        return self.read("metrics.jsonl")

    def wait_for_step(self, step: int) -> None:
        """Returns when this step is recorded. Raises RuntimeError if the run ends before."""
        while not any(record["step"] >= step for record in self.steps()):
            if self.process.poll() is not None:
                raise RuntimeError(f"train.py ended with {self.process.returncode} before step {step}")
            time.sleep(0.01)

    def gaps(self) -> list[float]:
        """Differences of log-probs between trainer and engine, in nats per token."""
        return [record["logprob_gap"] for record in self.steps() if "logprob_gap" in record]


def launcher(job: Job, processes: int) -> list[str]:
    """The words before a script: for `processes` of it under FSDP2, or for one without a launcher (0). The dry run has
    torch's launcher, since accelerate's offers FSDP2 to GPUs only."""
    if processes == 0:
        return [sys.executable]
    if job.cpu:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    configured = ["--config_file", str(ROOT / "configs" / "fsdp2.yaml"), "--num_processes", str(processes)]
    return [sys.executable, "-m", "accelerate.commands.launch", *configured]


# ------------------------------------------------------------------------------------------------------------- the demo


def demo(job: Job, steps: int, *flags: str) -> Run:
    """The built-in task, with a probe at every step."""
    every = ["--max_steps", str(steps), "--eval_every", str(steps), "--probe_every", "1", "--save_every", "0"]
    run = Run(job, "-".join(["run", *flags]), *every, *flags)
    run.end()
    job.require(f"{' '.join(flags)}: a probe at every step", len(run.gaps()) == steps)
    if job.cpu:
        job.not_run("a GPU's precision")
    return run


def demo_float32(job: Job) -> str:
    """6. Trainer and engine agree, and the model learns."""
    run = demo(job, 20, "--dtype", "float32")
    gap = job.figure("largest gap, nats", max(run.gaps()), below=1e-4)
    first, last = (record["pass_rate"] for record in run.read("eval.jsonl"))
    job.figure("rise of the held-out pass rate", last - first, above=0.1)
    return f"gap {gap:.0e}, pass rate {first:.2f} -> {last:.2f}"


def demo_bfloat16(job: Job) -> str:
    """7. The FP32 head must not make it worse."""
    mean = {}
    for fp32_head in ("true", "false"):
        gaps = demo(job, 6, "--dtype", "bfloat16", "--fp32_head", fp32_head).gaps()
        job.figure(f"largest gap, --fp32_head {fp32_head}, nats", max(gaps), below=1e-2)
        mean[fp32_head] = sum(gaps) / len(gaps)
    job.figure("mean gap, with the FP32 head / without", mean["true"] / mean["false"], below=1.0)
    return f"gap {mean['true']:.1e} with the FP32 head, {mean['false']:.1e} without"


# --------------------------------------------------------------------------------------------------------- a real model

SHORT = """--pass_rate_threshold 2 --batch_prompts 16 --rollouts 8 --min_budget 192 --max_budget 256 --answer_budget 32
    --max_steps 5 --eval_every 5 --held_out 32 --eval_problems 32 --save_every 2 --probe_every 1"""
DRY = "--batch_prompts 4 --rollouts 4 --min_budget 8 --max_budget 12 --answer_budget 4 --eval_problems 8"
REWARD = """def even(prompt, completion, answer):
    "Half of all completions, so that every batch has something to learn."
    return len(completion) % 2 == 0
"""


def real_model(job: Job) -> list[str]:
    """The flags of the README's command for one GPU, shortened, with word problems made here. The model is --model, or
    a random one of its shape."""
    rng, rows = random.Random(0), []
    for _ in range(400):
        a, b, thing = rng.randrange(50), rng.randrange(50), rng.choice(["apples", "pens", "books", "coins"])
        question = f"Ann has {a} {thing} and gets {b} more. How many {thing} has she?"
        rows.append({"question": question, "answer": str(a + b)})
    (job.folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "reward.py").write_text(REWARD)
    words = sorted({word for row in rows for word in row["question"].split()})
    shape = job.size(QWEN3_06B, TINY)
    model = job.model or random_qwen3(job.folder / "model", shape, ["<end>", "<unknown>", "</think>", *words])
    command = re.search(r"python train\.py (--model Qwen/.*?)```", (ROOT / "README.md").read_text(), re.S)
    data = ["--model", model, "--dataset", "problems.jsonl", "--reward", "reward:even"]
    return shlex.split(command[1].replace("\\\n", "")) + data + shlex.split(SHORT) + shlex.split(job.size("", DRY))


def as_it_should(job: Job, run: Run) -> str:
    """Bounds on a run of `real_model` that has come to its end, and its speed."""
    steps = run.steps()
    gap = job.figure("largest gap, nats", max(run.gaps()), below=2e-2)
    for record in steps:
        if record["lag_max"] == 0 and "ratio_mean" in record:
            job.figure(f"step {record['step']}: mean rho at lag 0", record["ratio_mean"], above=0.98, below=1.02)
    job.require("two updates or more", sum(record.get("updated", 0) for record in steps) >= 2)
    stall = max(record["sync_seconds"] for record in steps)
    job.figure("longest stall for new weights, s", stall, below=job.size(1.0, 60.0))
    wall = sum(record["seconds"] for record in steps)
    busy = wall - sum(record["trainer_idle"] for record in steps)
    sampled = job.figure("sampled tokens/s", steps[-1]["tokens"] / wall)
    trained = job.figure("trained tokens/s while it trains", steps[-1]["trained_tokens_total"] / busy)
    idle = job.figure("generator idle, share", sum(record["generator_idle"] for record in steps) / wall)
    speed = f"{sampled:.0f} sampled and {trained:.0f} trained tokens/s, generator idle {idle:.0%}"
    return f"gap {gap:.0e}, stall {stall:.2f} s, {speed}"


def readme_command(job: Job) -> str:
    """8. Five steps; and how busy the process is that reads the engine's output."""
    run = Run(job, "run", *real_model(job))
    run.wait_for_step(1)
    before, started = processor_seconds(run.process.pid), time.monotonic()
    run.wait_for_step(5)
    cores = (processor_seconds(run.process.pid) - before) / (time.monotonic() - started)
    job.figure("cores that the trainer's process keeps busy", cores)
    run.end()
    if job.cpu:
        job.not_run("ipc, a real model's size, memory and speed")
    return f"{as_it_should(job, run)}, {cores:.1f} cores"


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def stop_and_resume(job: Job) -> str:
    """9. A run that is stopped goes on with its next step. Resumed to end where it is, it writes the weights again that
    it was stopped with."""
    run = Run(job, "run", *real_model(job), "--max_steps", "50", "--save_every", "0")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGTERM)
    run.end(143)
    last = run.steps()[-1]["step"]
    before = saved_weights(run, last)
    for end in (last, last + 1):
        Run(job, "run", "--max_steps", str(end), resume=True).end()
        if end == last:
            job.require("the same weights after a resume", equal(before, saved_weights(run, last)))
    numbers = [record["step"] for record in run.steps()]
    job.require("every step once", numbers == list(range(1, last + 2)))
    if job.cpu:
        job.not_run("ipc")
    return f"stopped after step {last}, went on with step {last + 1} and the same weights"


def saved_weights(run: Run, step: int) -> dict[str, Tensor]:
    """Those of the checkpoint of a step."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    folder = run.folder / "checkpoints" / f"step-{step:06d}"
    shards, whole = folder / "pytorch_model_fsdp_0", run.folder / "whole"
    if shards.exists():
        merge_fsdp_weights(str(shards), str(whole))
    return load_file((whole if shards.exists() else folder) / "model.safetensors")


def engine_killed(job: Job) -> str:
    """10. The engine is frozen as soon as a step is recorded, since the next that happens is that it gets new weights,
    and killed a second later."""
    run = Run(job, "run", *real_model(job), "--max_steps", "50", "--save_every", "0", "--max_restarts", "0")
    run.wait_for_step(2)
    [engine] = [pid for pid in marked() if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(engine, signal.SIGSTOP)
    shared = shared_files(run.process.pid) | shared_files(engine)
    time.sleep(1.0)
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    run.end(1)
    seconds = job.figure("from the engine's end to the run's, s", time.monotonic() - killed, below=job.size(30, 120))
    saved = re.findall(r"checkpoint (\S+);", job.log.read_text())
    job.require("a checkpoint is named", bool(saved) and Path(saved[-1]).is_dir())
    while marked() and time.monotonic() < killed + 30:
        time.sleep(0.1)
    job.require("no process is left", not marked())
    job.require("nothing is left in shared memory", not any(Path(file).exists() for file in shared))
    if job.cpu:
        job.not_run("ipc")
    return f"the run ended {seconds:.0f} s after its engine and left nothing"


def shared_files(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


# ---------------------------------------------------------------------------------------------------- several processes


def fsdp2(job: Job) -> str:
    """11. One process under accelerate's FSDP2: NCCL of one rank, weights as DTensors."""
    tiny = random_qwen3(job.folder / "tiny", TINY)
    subprocess.run([*launcher(job, 1), gpu_check_parts.__file__, tiny, str(job.folder / "saved")], check=True)
    flags = [*real_model(job), "--max_steps", "3", "--eval_every", "3", "--save_every", "3"]
    run = Run(job, "run", *flags, processes=1)
    run.end()
    before = saved_weights(run, 3)
    Run(job, "run", processes=1, resume=True).end()  # it is at its end, and saves once more
    job.require("the same weights after a resume", equal(before, saved_weights(run, 3)))
    if job.cpu:
        job.not_run("accelerate's launcher, NCCL")
    return as_it_should(job, run)


def several_gpus(job: Job) -> str:
    """12. The engine on the second GPU; then two trainer processes, and an engine on each GPU that is left."""
    count, lines = job.size(torch.cuda.device_count(), 4), []
    if count < 2:
        raise NotRun("it needs two GPUs or more: `nccl`, two trainer processes, data-parallel engines")
    if job.cpu:
        job.not_run("nccl, accelerate's launcher")
    else:
        for name, tied in (("tied", True), ("untied", False)):
            lines.append(updates_in_flight(job, name, tied, 5, "--generator_devices", "1") + ", world size 2")
    if count == 2:
        job.not_run("two trainer processes, which need a third GPU for the engine")
        return " · ".join(lines)
    devices = job.size(["--generator_devices", ",".join(map(str, range(2, count)))], [])
    engines = ["--data_parallel", str(count - 2), *devices]
    run = Run(job, "run", *real_model(job), "--max_steps", "3", "--save_every", "0", *engines, processes=2)
    run.end()
    return " · ".join([*lines, f"2 trainers, engines {count - 2}: {as_it_should(job, run)}"])
