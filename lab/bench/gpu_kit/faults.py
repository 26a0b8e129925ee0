"""Three things that go wrong in a run, at the same time: SIGTERM and --resume; the engine killed; FSDP2 with one process.
`python faults.py ROOT FOLDER SECONDS JSON-of-engine-args [case ...]`: one JSON line each."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT, FOLDER, LIMIT, ENGINE = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
END = time.monotonic() + LIMIT
GPU = "--cpu" not in sys.argv
CASES = [case for case in sys.argv[5:] if case != "--cpu"] or ["sigterm", "killed", "fsdp2"]
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs/fsdp2.yaml"), "--num_processes", "1"]
LAUNCH += ["--main_process_port", "29517"]


def flags(name: str) -> list[str]:
    sizes = "--min_budget 24 --max_budget 32 --answer_budget 8 --batch_prompts 4 --rollouts 4 --held_out 16 --eval_every 1000"
    data = [
        "--model",
        str(FOLDER / "model"),
        "--dataset",
        "problems.jsonl",
        "--reward",
        "reward:coin",
        "--dtype",
        "bfloat16",
    ]
    data += [
        "--interruption_phrase",
        (FOLDER / "phrase.txt").read_text(),
        "--pass_rate_threshold",
        "2",
        "--engine",
        "vllm",
    ]
    if ENGINE:
        data += ["--engine_args", ENGINE]
    return [*data, *sizes.split(), "--output_dir", str(FOLDER / name)]


def launch(name: str, *more: str, launcher=()) -> subprocess.Popen:
    log = (FOLDER / f"{name}.log").open("a")
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train.py"), *more], cwd=FOLDER, stdout=log, stderr=log
    )


def steps(name: str) -> list[int]:
    try:
        lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["step"] for line in lines if '"step"' in line]


def until(condition, process) -> bool:
    while time.monotonic() < END and process.poll() is None:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def end(process) -> int | None:
    try:
        return process.wait(max(1.0, END - time.monotonic()))
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        return None


def say(case: str, **values) -> None:
    print(json.dumps({"fault": case} | values), flush=True)


def sigterm() -> None:
    process = launch("sigterm", *flags("sigterm"), "--max_steps", "1000", "--save_every", "0")
    ran = until(lambda: len(steps("sigterm")) >= 3, process)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = end(process)
    seconds = time.monotonic() - started
    done = max(steps("sigterm"), default=0)
    say("SIGTERM", ran=ran, exit=code, expected=143, seconds=round(seconds, 1), after_step=done)
    if code != 143:
        return
    process = launch("sigterm", "--resume", str(FOLDER / "sigterm"), "--max_steps", str(done + 2), "--reward", "reward:coin",
                     *(["--engine_args", ENGINE] if ENGINE else []))  # fmt: skip
    code = end(process)
    found = steps("sigterm")
    say("resume", exit=code, each_step_once=found == list(range(1, done + 3)), last=max(found, default=0))


def killed() -> None:
    process = launch("killed", *flags("killed"), "--max_steps", "1000", "--save_every", "0")
    ran = until(lambda: len(steps("killed")) >= 3, process)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    engines = [c for c in children if "EngineCore" in c.name() or "EngineCore" in " ".join(c.cmdline())]
    names = [(c.name(), " ".join(c.cmdline())[-60:]) for c in children]
    started = time.monotonic()
    for child in engines:
        child.kill()
    code = end(process)
    seconds = time.monotonic() - started
    left = [c.pid for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    shm = [p.name for p in Path("/dev/shm").glob(f"scalerl-weights-{process.pid}-*")]
    checkpoints = [p.name for p in (FOLDER / "killed").glob("*checkpoint*")]
    say("engine killed", ran=ran, engines=len(engines), exit=code, expected=75, seconds=round(seconds, 1), left=left, shm=shm,
        folder=sorted(p.name for p in (FOLDER / "killed").glob("*"))[:12], checkpoints=checkpoints, children=names)  # fmt: skip


def fsdp2() -> None:
    started = time.monotonic()
    process = launch("fsdp2", *flags("fsdp2"), "--max_steps", "4", "--save_every", "2", launcher=LAUNCH if GPU else ())
    code = end(process)
    say("FSDP2, one process", exit=code, steps=steps("fsdp2"), seconds=round(time.monotonic() - started, 1))
    if code != 0 or time.monotonic() > END - 20:
        return
    more = [
        "--resume",
        str(FOLDER / "fsdp2"),
        "--max_steps",
        "6",
        "--reward",
        "reward:coin",
        *(["--engine_args", ENGINE] if ENGINE else []),
    ]
    process = launch("fsdp2", *more, launcher=LAUNCH if GPU else ())
    code = end(process)
    say("FSDP2 resumed", exit=code, steps=steps("fsdp2"))


if __name__ == "__main__":
    os.chdir(FOLDER)
    functions = {"sigterm": sigterm, "killed": killed, "fsdp2": fsdp2}
    threads = [threading.Thread(target=functions[name]) for name in CASES]
    for thread in threads:
        thread.start()
        time.sleep(1.0)
    for thread in threads:
        thread.join()
