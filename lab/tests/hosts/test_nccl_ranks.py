"""Two trainer processes whose weights, shards of FSDP2, go to the engine by vLLM's `nccl` transfer: train.py from its start
to a SIGTERM, and on from the checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tasks import warm_start

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TRANSFER = [
    "--engine",
    "lab.hosts:NcclEngine",
    "--engine_args",
    '{"worker_extension_cls": "transfers_on_cpu.Receiver"}',
]


def command(*flags):
    launcher = ["accelerate.commands.launch", "--config_file", ROOT / "configs" / "fsdp2.yaml"]
    launcher += ["--main_process_port", 0, "--num_processes", 2]
    return [sys.executable, "-m", *map(str, [*launcher, ROOT / "lab" / "tests" / "hosts" / "two_ranks.py", *flags])]


def end(job):
    """Kills a launcher that still runs, and its ranks, which are in sessions of their own."""
    if job.poll() is None:
        launcher = psutil.Process(job.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def with_own_head(model):
    """The same model, but for a head of its own: in vLLM's CPU build a transfer leaves a tied head behind."""
    from transformers import Qwen3ForCausalLM

    model.config.tie_word_embeddings = False
    untied = Qwen3ForCausalLM(model.config)
    untied.load_state_dict(model.state_dict())
    return untied


@pytest.mark.slow
def test_two_ranks_stop_and_go_on(tmp_path):
    """A SIGTERM goes to the group: both ranks save one checkpoint and end, and two processes go on from it: every step
    once, and the generator has the trainer's weights at every probe."""
    from transformers import Qwen3ForCausalLM

    built_in = Qwen3ForCausalLM.from_pretrained(warm_start.warm_start(ROOT / "runs" / "cache"))
    with_own_head(built_in).save_pretrained(tmp_path / "model")
    flags = [*TRANSFER, "--held_out", "64", "--eval_samples", "1", "--eval_every", "50"]
    flags += ["--output_dir", tmp_path / "run", "--model", tmp_path / "model"]
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log"
    with log.open("w") as out:
        job = subprocess.Popen(command(*flags, "--max_steps", 500), env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 500
        while not (metrics.exists() and metrics.read_text().count('"grad_norm"') >= 3):
            assert job.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=200) != 0
    finally:
        end(job)
    stopped = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    again = command(*flags, "--resume", tmp_path / "run", "--max_steps", stopped + 2)
    done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert [record["step"] for record in steps] == list(range(1, stopped + 3))
    gaps = [record["logprob_gap"] for record in steps if "logprob_gap" in record]
    assert gaps and max(gaps) < 1e-6
