"""Runs of train.py beside those of the ladder: what needs vLLM in a process of its own, bfloat16, or another filter.

A side is a rung by its flags, or a rung with one flag more.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rungs import COLUMNS, ROOT, Row
from transformers import AutoModelForCausalLM

from runtime.model import active_parameters
from tasks.arithmetic import FIRST_MODELS

DISCOVER = "--dataset discover --batch_prompts 8 --max_num_seqs 128 --held_out 256 --eval_every 8 --save_every 0"
RATE = 3.5e-4
SETTINGS = {
    "vllm": f"{DISCOVER} --max_steps 48 --engine lab.fast_vllm:FastEngine",
    "bfloat16": f"{DISCOVER} --max_steps 48 --engine torch --dtype bfloat16",
    "torch": f"{DISCOVER} --max_steps 64 --engine torch",
}
BEFORE_8 = "--normalize_advantages prompt"
BEFORE_7 = f"{BEFORE_8} --aggregation sample"
BEFORE_6 = f"{BEFORE_7} --fp32_head false"
BEFORE_2 = f"{BEFORE_6} --pass_rate_threshold 1.1 --zero_variance keep --length_control none --loss grpo"
SIDES = {
    "0": f"{BEFORE_2} --schedule ppo_off_policy",
    "1": BEFORE_2,
    "5": BEFORE_6,
    "6": BEFORE_7,
    "8": "",
    # Dropped, 4.5 to 5.3 of 8 groups train; so replaced ones have five.
    "replaced": "--zero_variance replace --batch_prompts 5",
}


def rows_of(folder: Path) -> list[Row]:
    """The evaluations of a run of train.py; its FLOPs in tokens through the model."""
    evaluations, steps = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("eval.jsonl", "metrics.jsonl")
    )
    parameters = active_parameters(AutoModelForCausalLM.from_pretrained(FIRST_MODELS / "discover"))
    rows = []
    for row in evaluations:
        lags = [step["lag_mean"] for step in steps if "lag_mean" in step and step["step"] <= row["step"]]
        lag = round(sum(lags) / max(1, len(lags)), 3)
        passes, seconds = round(row["flops"] / (2 * parameters)), round(row["device_hours"] * 3600, 2)
        values = row["step"], row["tokens"], passes, seconds, lag, row["pass_rate"], None
        rows.append(dict(zip(COLUMNS[4:], values, strict=True)))
    return rows


def train(side: str, name: str, seed: int, rate: float, steps: int | None = None) -> list[Row]:
    """Trains a side in a setting at `rate` times RATE, and returns its evaluations."""
    with TemporaryDirectory() as folder:
        flags = f"{SETTINGS[name]} {SIDES[side]} --lr {rate * RATE} --seed {seed} --output_dir {folder}/run"
        if steps:
            flags += f" --max_steps {steps}"
        command = [sys.executable, ROOT / "train.py", *shlex.split(flags)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = rows_of(Path(folder, "run"))
    return [{"setting": name, "side": side, "rate": rate, "seed": seed} | row for row in rows]
