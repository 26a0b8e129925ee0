"""Checks 6 to 12 of gpu_check.py: runs of train.py, as a user starts them."""

import hashlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gpu_check_parts
import psutil
import torch
from gpu_check_engine import updates_in_flight
from gpu_check_job import Job, NotRun, marked, none_left
from gpu_check_parts import QWEN3_06B, TINY, random_qwen3
from measuring import ROOT

from runtime import devices
from runtime.run_folder import Folder
from tasks import arithmetic


class Run:
    """A run of train.py in the folder JOB/NAME; the current folder is JOB. Of equal flags the last wins."""

    def __init__(self, job: Job, name: str, flags: str, processes: int = 0, resume: bool = False):
        self.folder = job.folder / name
        place = ["--resume" if resume else "--output_dir", str(self.folder)]
        command = [*launcher(job, processes), str(ROOT / "train.py"), *shlex.split(flags), *place]
        print(shlex.join(command), flush=True)  # into the check's log, as all that the run prints
        local = {"GLOO_SOCKET_IFNAME": "lo"} if job.cpu else {}
        self.process = subprocess.Popen(command, cwd=job.folder, env=os.environ | local)

    def end(self, code: int = 0) -> None:
        """Waits for its end. Raises RuntimeError for another exit code."""
        if self.process.wait() != code:
            raise RuntimeError(f"train.py ended with {self.process.returncode}, not {code}")

    def steps(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The records of steps, or of evaluations, so far."""
        return [record for record in Folder(self.folder).read(name) if "step" in record]

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


def demo(job: Job, name: str, steps: int, flags: str) -> Run:
    """The built-in task, with a probe at every step."""
    flags += f" --max_steps {steps} --eval_every {steps} --probe_every 1 --save_every 0"
    run = Run(job, name, flags)
    run.end()
    job.require(f"{name}: a probe at every step", len(run.gaps()) == steps)
    return run


def demo_float32(job: Job) -> str:
    """6. Trainer and engine agree at every step, and the model learns."""
    run = demo(job, "float32", 20, "--dtype float32")
    gap = job.figure("largest gap, nats", max(run.gaps()), below=1e-4)
    first, last = (record["pass_rate"] for record in run.steps("eval.jsonl"))
    job.figure("rise of the held-out pass rate", last - first, above=0.1)
    return f"gap {gap:.0e}, pass rate {first:.2f} -> {last:.2f}"


def demo_bfloat16(job: Job) -> str:
    """7. In bfloat16 they agree less, and less still without the FP32 head. Five times on a CPU the ratio was 0.65 to
    0.77, mean 0.74 and standard deviation 0.05 (a median of six steps: 0.06): 0.95 is 3.5 of these away. At 1 the head
    does nothing."""
    heads = {"fp32-head": "true", "bfloat16-head": "false"}
    gaps = [demo(job, name, 6, f"--dtype bfloat16 --fp32_head {on}").gaps() for name, on in heads.items()]
    largest = job.figure("largest gap, nats", max(map(max, gaps)), below=1e-2)
    ratios = [a / b for a, b in zip(*gaps, strict=True)]
    ratio = job.figure("gap with the FP32 head / without, median of the steps", statistics.median(ratios), below=0.95)
    return f"gap at most {largest:.1e}; with the FP32 head {ratio:.2f} of that without"


# --------------------------------------------------------------------------------------------------------- a real model

SHORT = """--pass_rate_threshold 2 --batch_prompts 16 --rollouts 8 --min_budget 192 --max_budget 256 --answer_budget 32
    --max_steps 5 --eval_every 5 --held_out 32 --eval_problems 32 --save_every 2 --probe_every 1"""
DRY = "--batch_prompts 4 --rollouts 4 --min_budget 8 --max_budget 12 --answer_budget 4 --eval_problems 8"
REWARD = "import random\ndef coin(*_):\n    return random.random() < 0.5\n"  # so that a random model has a gradient


def real_model(job: Job) -> str:
    """The flags of docs/gpu.md's command for one GPU, shortened, with prompts made here. The model is --model, or a
    random one of its shape with the built-in task's words."""
    rows = [{"question": f"{a} {b} {c}", "answer": a} for a in "0123456789" for b in "0123456789" for c in "01234"]
    (job.folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "reward.py").write_text(REWARD)
    model = job.model or random_qwen3(job.folder / "model", job.size(QWEN3_06B, TINY), ends=True)
    phrase = "" if job.model else f"--interruption_phrase '{' '.join(arithmetic.PHRASE)}'"
    command = re.search(r"python train\.py (--model Qwen/.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.S)
    data = f"--model {shlex.quote(model)} --dataset problems.jsonl --reward reward:coin {phrase}"
    return " ".join([command[1].replace("\\\n", ""), data, SHORT, job.size("", DRY)])


def as_it_should(job: Job, run: Run) -> str:
    """Bounds on a run of `real_model`, which ends now, and its speed."""
    run.end()
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
    run = Run(job, "run", real_model(job))
    run.wait_for_step(1)
    process, started = psutil.Process(run.process.pid), time.monotonic()
    before = process.cpu_times()
    run.wait_for_step(5)
    seconds = sum(process.cpu_times()[:2]) - sum(before[:2])
    cores = job.figure("cores that the trainer's process keeps busy", seconds / (time.monotonic() - started))
    return f"{as_it_should(job, run)}, {cores:.1f} cores"


def under_way(job: Job) -> Run:
    """A run of `real_model` that has made two of its many steps, and saved nothing."""
    run = Run(job, "run", real_model(job) + " --max_steps 50 --save_every 0 --max_restarts 0")
    run.wait_for_step(2)
    return run


def stop_and_resume(job: Job) -> str:
    """9. A run that SIGTERM stopped goes on with its next step. Resumed to end where it is, it writes the weights again
    that it was stopped with. (A reward of one's own is code, which no resume takes over.)"""
    run = under_way(job)
    run.process.send_signal(signal.SIGTERM)
    run.end(143)
    last = run.steps()[-1]["step"]
    before = saved_weights(run, last)
    Run(job, "run", f"--max_steps {last} --reward reward:coin", resume=True).end()
    job.require("the same weights after a resume", len(before) == 1 and saved_weights(run, last) == before)
    Run(job, "run", f"--max_steps {last + 1} --reward reward:coin", resume=True).end()
    job.require("every step once", [record["step"] for record in run.steps()] == list(range(1, last + 2)))
    return f"stopped after step {last}, went on with step {last + 1} and the same weights"


def saved_weights(run: Run, step: int) -> list[str]:
    """A digest of the model's file, one for each process, in the checkpoint of a step."""
    files = (run.folder / "checkpoints" / f"step-{step:06d}").glob("pytorch_model_fsdp_0/*.distcp")
    return [hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in sorted(files)]


def engine_killed(job: Job) -> str:
    """10. The engine is frozen as soon as a step is recorded, since the next that happens is that it gets new weights,
    and killed a second later: the run ends and leaves nothing."""
    run = under_way(job)
    [engine] = [pid for pid in marked() if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(engine, signal.SIGSTOP)
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in (run.process.pid, engine))
    shared = re.findall(r"(/dev/shm/\S+)$", maps, re.M)  # the line of a file that is removed already ends in (deleted)
    time.sleep(1.0)
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    run.end(1)
    seconds = job.figure("from the engine's end to the run's, s", time.monotonic() - killed, below=job.size(30, 120))
    saved = re.findall(r"checkpoint (\S+);", job.log.read_text())
    job.require("a checkpoint is named", bool(saved) and Path(saved[-1]).is_dir())
    job.require("no process is left", none_left(30))
    job.require("nothing is left in shared memory", not any(Path(file).exists() for file in shared))
    return f"the run ended {seconds:.0f} s after its engine and left nothing"


# ---------------------------------------------------------------------------------------------------- several processes


def fsdp2(job: Job) -> str:
    """11. One process under accelerate's launcher and FSDP2: NCCL of one rank, weights as DTensors. The step after a
    load is the step without one, and a run is as it should be."""
    tiny = random_qwen3(job.folder / "tiny", TINY)
    subprocess.run([*launcher(job, 1), gpu_check_parts.__file__, tiny, str(job.folder / "saved")], check=True)
    return as_it_should(job, Run(job, "run", real_model(job) + " --max_steps 3", processes=1))


def several_gpus(job: Job) -> str:
    """12. Updates in flight by `nccl` to an engine on the second GPU, and to one on two GPUs (tensor parallel); two
    trainer processes, and an engine on each GPU that is left; an engine that Ray places."""
    count = job.size(torch.cuda.device_count(), 4)
    if count < 2:
        raise NotRun("it needs two GPUs: `nccl`, tensor parallel, two trainer processes, data-parallel engines, Ray")
    second = "--generator_devices 1"
    two = f"--tensor_parallel 2 --generator_devices {'1,2' if count > 2 else '0,1 --weight_channel file'}"
    if job.cpu:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or each of the two wants a NUMA node of its own
        lines = [updates_in_flight(job, "tensor parallel", True, 5, "--tensor_parallel 2")]
        lines.append(updates_in_flight(job, "untied", False, 5, stand_ins()))  # the last, since they stay
    else:
        cases = [("tied", second), ("untied", second), ("tensor parallel", two)]
        lines = [updates_in_flight(job, name, name != "untied", 5, flags) for name, flags in cases]
    if count > 2:
        left = job.size(f"--generator_devices {','.join(map(str, range(2, count)))}", "")
        more = f" --max_steps 3 --save_every 0 --data_parallel {count - 2} {left}"
        run = Run(job, "run", real_model(job) + more, processes=2)
        lines.append(f"2 trainers, engines {count - 2}: {as_it_should(job, run)}")
    else:
        job.not_run("two trainer processes, which need a third GPU for the engine")
    if not job.cpu and find_spec("ray"):
        lines.append(updates_in_flight(job, "Ray", True, 5, placed_by_ray()))
    elif not job.cpu:
        job.not_run("Ray, which is not installed (requirements-ray.txt)")
    return " · ".join(lines)


def stand_ins() -> str:
    """vLLM's own `nccl` classes run over what the tests have in the place of GPUs; the flags for that. (In bfloat16
    vLLM's CPU build would use AMX, which Linux allows only where a weight file is loaded.)"""
    sys.path.append(str(ROOT / "tests" / "engine"))
    import transfers_on_cpu

    devices.torch = transfers_on_cpu.Torch()
    return (
        '--dtype float32 --generator_devices 1 --engine_args \'{"worker_extension_cls": "transfers_on_cpu.Receiver"}\''
    )


def placed_by_ray() -> str:
    """Starts Ray, which has the second GPU alone; the flags for an engine that it places."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-gpus=1", "--port=6390"]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    subprocess.run([*ray, "--node-ip-address=127.0.0.1"], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, check=True)
    os.environ |= {"RAY_ADDRESS": "127.0.0.1:6390", "VLLM_HOST_IP": "127.0.0.1"}
    return '--engine_args \'{"distributed_executor_backend": "ray"}\' --weight_channel nccl'
