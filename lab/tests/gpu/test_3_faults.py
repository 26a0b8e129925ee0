"""What goes wrong in a run: a signal, and going on after it; an engine that dies; and FSDP2, resumed."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from small import ROOT, TINY, random_task

from runtime.folder import Folder
from runtime.run import DEAD_ENGINE

pytestmark = pytest.mark.gpu
FAST = "lab.fast_vllm:FastEngine"
ENGINES = pytest.mark.parametrize("engine", ["torch", FAST])
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "fsdp2.yaml"), "--num_processes"]
LIMIT = 200  # seconds of a run


@pytest.fixture
def started(device, engine, engine_args, tmp_path):
    """`started(*flags, launcher=())` starts train.py with a tiny model; it ends with the test."""
    processes = []
    random_task(tmp_path, TINY)
    sizes = "--min_budget 8 --max_budget 12 --answer_budget 4 --batch_prompts 4 --rollouts 4 --held_out 16"
    data = ["--model", "model", "--dataset", "problems.jsonl", "--interruption_phrase", "time up </think>"]
    new = [*data, *sizes.split(), "--output_dir", str(tmp_path / "run"), "--eval_every", "1000"]

    def start(*flags, launcher=()):
        # What is code is named at a resume, too.
        flags = [*flags, "--reward", "reward:coin", "--engine", engine, *(engine_args if engine != "torch" else [])]
        flags = flags if "--resume" in flags else [*new, "--pass_rate_threshold", "2", *flags]
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *flags]
        processes.append(subprocess.Popen(command, cwd=tmp_path))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def steps(folder):
    return [record["step"] for record in Folder(folder).read("metrics.jsonl") if "step" in record]


def after_three_steps(process, folder):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None and len(steps(folder)) < 3:
        time.sleep(0.1)
    assert process.poll() is None and len(steps(folder)) >= 3


@ENGINES
def test_sigterm_and_resume(started, figure, tmp_path):
    """It saves and ends, and the resumed run has every step once."""
    process, folder = started("--max_steps", "1000", "--save_every", "0"), tmp_path / "run"
    after_three_steps(process, folder)
    since = time.monotonic()
    process.terminate()
    assert process.wait(LIMIT) == 128 + signal.SIGTERM
    figure("seconds from SIGTERM to the end", time.monotonic() - since, below=60)
    last = max(steps(folder)) + 2
    assert started("--resume", str(folder), "--max_steps", str(last)).wait(LIMIT) == 0
    assert steps(folder) == list(range(1, last + 1))


@pytest.mark.parametrize("engine", [FAST])
def test_killed_engine(started, figure, tmp_path):
    """The run saves a checkpoint, ends with the exit code for it, and leaves nothing in shared memory."""
    process, folder = started("--max_steps", "1000", "--save_every", "0"), tmp_path / "run"
    after_three_steps(process, folder)
    children = psutil.Process(process.pid).children(recursive=True)
    engines = [child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])]
    assert engines, [child.cmdline() for child in children]
    since = time.monotonic()
    for engine in engines:
        engine.kill()
    assert process.wait(LIMIT) == DEAD_ENGINE
    figure("seconds from the engine's death to the end", time.monotonic() - since, below=60)
    assert list(folder.glob("checkpoints/*"))
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@ENGINES
def test_fsdp2(device, started, tmp_path):
    """On two GPUs if there are so many. Four steps and a checkpoint, resumed for two more. accelerate offers FSDP2 to
    GPUs only."""
    count = str(min(2, torch.cuda.device_count()))
    launcher, folder = [*FSDP2, count, "--main_process_port", "29517"] if device == "cuda" else [], tmp_path / "run"
    assert started("--max_steps", "4", "--save_every", "2", launcher=launcher).wait(LIMIT) == 0
    assert started("--resume", str(folder), "--max_steps", "6", launcher=launcher).wait(LIMIT) == 0
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
