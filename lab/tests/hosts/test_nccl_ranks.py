"""Two trainer processes whose weights, shards of FSDP2, go to the engine by vLLM's `nccl` transfer: train.py from its start
to a SIGTERM, and on from the checkpoint."""

import signal
import sys
from pathlib import Path

import pytest
from test_trainer_processes import stopped_and_resumed, with_own_head
from transformers import Qwen3ForCausalLM

from lab import warm_start

ROOT = Path(__file__).resolve().parents[3]
TRANSFER = [
    "--engine",
    "lab.hosts:NcclEngine",
    "--engine_args",
    '{"worker_extension_cls": "transfers_on_cpu.Receiver"}',
]


@pytest.mark.slow
def test_two_ranks_stop_and_go_on(tmp_path):
    """A SIGTERM goes to the group: both ranks save one checkpoint and end, and two processes go on from it. The head is
    untied: in vLLM's CPU build a transfer leaves a tied one behind."""
    built_in = Qwen3ForCausalLM.from_pretrained(warm_start.warm_start(ROOT / "runs" / "cache"))
    with_own_head(built_in).save_pretrained(tmp_path / "model")

    def command(*flags):
        launcher = ["accelerate.commands.launch", "--config_file", ROOT / "configs" / "fsdp2.yaml"]
        launcher += ["--main_process_port", 0, "--num_processes", 2, ROOT / "lab" / "tests" / "hosts" / "two_ranks.py"]
        return [sys.executable, "-m", *map(str, [*launcher, *TRANSFER, "--model", tmp_path / "model", *flags])]

    stopped_and_resumed(command, tmp_path, lambda job: job.send_signal(signal.SIGTERM), 500)
