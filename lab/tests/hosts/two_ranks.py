"""Program of test_nccl_ranks.py, in several trainer processes: train.py with these flags, on a host that seems to have four
GPUs, with the `nccl` channel of transfers_on_cpu.py. Under `accelerate launch` it is FSDP2 that finds this CPU."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "deep"), str(Path(__file__).parent)]

import torch
import transfers_on_cpu
from distributed_worker import take_this_cpu_for_an_accelerator

import train
from lab import hosts
from runtime import engine

if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP"):
        take_this_cpu_for_an_accelerator()
    engine.torch = hosts.torch = transfers_on_cpu.Torch()
    sys.exit(train.main(sys.argv[1:]))
