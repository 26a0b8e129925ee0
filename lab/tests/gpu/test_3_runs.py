"""Runs of train.py, as a user starts them. Those with the torch engine need no vLLM: `-k torch`."""

import json
import statistics
import subprocess
import sys

import pytest
import torch
from small import QWEN3_06B, ROOT, TINY, random_qwen3

from runtime.folder import Folder

pytestmark = pytest.mark.gpu
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "fsdp2.yaml"), "--num_processes"]


def train(folder, *flags, launcher=()):
    """train.py in the folder's parent, to its end."""
    subprocess.run([sys.executable, *launcher, str(ROOT / "train.py"), *flags], cwd=folder.parent, check=True)


def records(folder, name="metrics.jsonl"):
    """Those of steps, or of evaluations."""
    return [record for record in Folder(folder).read(name) if "step" in record]


def gaps(folder):
    """Differences of log-probs between trainer and engine, in nats a token."""
    return [record["logprob_gap"] for record in records(folder) if "logprob_gap" in record]


def demo(folder, *flags):
    """Runs 20 steps of the built-in task."""
    flags = ["--max_steps", "20", "--eval_every", "20", "--save_every", "0", *flags]
    train(folder, "--output_dir", str(folder), *flags)
    return gaps(folder)


ENGINES = pytest.mark.parametrize("engine", ["torch", "vllm"])


@ENGINES
def test_demo_in_float32(device, figure, tmp_path, engine):
    """Trainer and engine agree at every probe, and the model learns."""
    figure("largest gap, nats", max(demo(tmp_path / "run", "--engine", engine)), below=1e-4)
    first, last = (record["pass_rate"] for record in records(tmp_path / "run", "eval.jsonl"))
    figure("rise of the held-out pass rate", last - first, above=0.1)


@ENGINES
def test_demo_in_bfloat16(device, figure, tmp_path, engine):
    """They agree less, and less still without the FP32 head. Five times on a CPU the ratio was 0.65 to 0.77. At 1 the
    head does nothing."""
    flags = ["--engine", engine, "--dtype", "bfloat16", "--fp32_head"]
    with_head, without = (demo(tmp_path / on, *flags, on) for on in ("true", "false"))
    figure("largest gap, nats", max(with_head + without), below=1e-2)
    ratios = [a / b for a, b in zip(with_head, without, strict=True)]
    figure("gap with the FP32 head / without, median", statistics.median(ratios), below=0.95)


REWARD = "import random\ndef coin(*_):\n    return random.random() < 0.5\n"  # so that a random model has a gradient


def real_flags(device, folder):
    """Of a run on a model in the shape of Qwen3-0.6B, with prompts made here and the built-in task's words."""
    from tasks import arithmetic

    rows = [{"question": f"{a} {b} {c}", "answer": a} for a in "0123456789" for b in "0123456789" for c in "01234"]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    model = random_qwen3(folder / "model", QWEN3_06B if device == "cuda" else TINY)
    sizes = "--min_budget 192 --max_budget 256 --answer_budget 32 --batch_prompts 16 --rollouts 8"
    if device == "cpu":
        sizes = "--min_budget 8 --max_budget 12 --answer_budget 4 --batch_prompts 4 --rollouts 4"
    data = ["--model", model, "--dataset", "problems.jsonl", "--reward", "reward:coin", "--dtype", "bfloat16"]
    data += ["--interruption_phrase", " ".join(arithmetic.PHRASE), "--held_out", "32", "--pass_rate_threshold", "2"]
    return [*data, *sizes.split(), "--eval_every", "6", "--output_dir", str(folder / "run")]


@pytest.mark.parametrize(("engine", "processes"), [("torch", 0), ("vllm", 0), ("vllm", 1), ("vllm", 2)])
def test_a_real_model(device, figure, tmp_path, engine, processes):
    """By itself, or under FSDP2 with so many processes; and then resumed, for every step once. (A reward of one's own is
    code, which no resume takes over.)"""
    if processes > torch.cuda.device_count():  # accelerate offers FSDP2 to GPUs only
        pytest.skip(f"it needs {processes} GPUs")
    launcher, folder = [*FSDP2, str(processes)] if processes else [], tmp_path / "run"
    train(folder, *real_flags(device, tmp_path), "--engine", engine, "--max_steps", "6", launcher=launcher)
    steps = records(folder)
    figure("largest gap, nats", max(gaps(folder)), below=2e-2)
    for ratio in [record["ratio_mean"] for record in steps if record["lag_max"] == 0 and "ratio_mean" in record]:
        figure("mean rho at lag 0", ratio, above=0.98, below=1.02)
    figure("updates", sum(record.get("updated", 0) for record in steps), above=1)
    stall = max(record["sync_seconds"] for record in steps)
    figure("longest stall for new weights, s", stall, below=1.0 if device == "cuda" else 60.0)
    figure("sampled tokens/s", steps[-1]["tokens"] / sum(record["seconds"] for record in steps))
    more = ["--resume", str(folder), "--max_steps", "8", "--reward", "reward:coin"]
    train(folder, *more, launcher=launcher)
    assert [record["step"] for record in records(folder)] == list(range(1, 9))
