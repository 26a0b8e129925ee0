"""Two hosts that train, one process each: FSDP2 over gloo, by accelerate's launcher as on GPUs."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_run import FLAGS, RAY
from safetensors.torch import load_file
from two_hosts import ROOT, Host, hosts

from runtime.run_folder import Folder
from tasks import warm_start

PROGRAM = ROOT / "tests" / "distributed_worker.py"
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configs" / "fsdp2.yaml", "--num_processes", 2]


def launch(trainers: Sequence[Host], *arguments: Any) -> None:
    """distributed_worker.py, one process on each host, to its end."""
    place = ["--num_machines", 2, "--main_process_ip", trainers[0].address, "--main_process_port", 29500]
    started = [
        host.start(sys.executable, *FSDP2, *place, "--machine_rank", rank, PROGRAM, *arguments)
        for rank, host in enumerate(trainers)
    ]
    assert [process.wait(timeout=500) for process in started] == [0, 0]


@pytest.mark.slow
def test_two_hosts_train_as_one_process(permitted: None, tmp_path: Path) -> None:
    """Weights, scores, loss and gradient norm after five steps, to 1e-6 (float32)."""
    shape = replace(warm_start.SHAPES["xs"], hidden_size=32, head_dim=16, intermediate_size=48)
    warm_start.new_model(shape, seed=0).save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--lr", "0.01", "--tokens_per_microbatch", "64"]
    subprocess.run([sys.executable, PROGRAM, "steps", tmp_path / "one", "14", *flags], check=True, timeout=120)
    with hosts(2) as pair:
        launch(pair, "steps", tmp_path / "two", "14", *flags)
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert one.keys() == two.keys()
    apart = max((two[name] - tensor).abs().max().item() for name, tensor in one.items())
    print(f"\nlargest difference {apart:.1e} of {len(one)} tensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_on_three_hosts(permitted: None, tmp_path: Path) -> None:
    """Two that train, and one with the engine: the log-probs of both sides agree after each update."""
    with hosts(3) as (a, b, c):
        a.ray("start", "--head", "--num-gpus=0")
        c.ray("start", f"--address={a.address}:6379", "--num-gpus=1")
        launch((a, b), "job", "--output_dir", tmp_path / "run", "--engine_args", RAY, *FLAGS, "--max_steps", 6)
    steps = [record for record in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in record]
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    assert len(steps) == 6 and len(gaps) >= 3 and max(gaps) < 1e-6
