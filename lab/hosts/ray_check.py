"""An engine that Ray places on other hosts: what is asked before vLLM starts.

ray start --head --node-ip-address A --num-gpus 0     on the trainer's host
ray start --address A:6379 --node-ip-address B        on the engine's host; --num-gpus 1 if it has no GPU
"""

import os
import socket
import subprocess
import sys

from generator import EngineFailed

RAY_TIMEOUT = 60.0  # seconds in which Ray must answer
FREE_DEVICES = """
import ray
ray.init("auto", log_to_driver=False, logging_level="CRITICAL")
print(int(ray.available_resources().get("GPU", 0)))
"""


def check_ray(workers: int) -> None:
    """Raises EngineFailed unless Ray has `workers` free devices, and this host the address at which they meet the
    trainer: vLLM would wait half an hour. Ray is asked in a process of its own, whose signal handlers it may change."""
    address = os.environ.get("VLLM_HOST_IP") or "no.address"
    command = [sys.executable, "-c", FREE_DEVICES]
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise EngineFailed(f"VLLM_HOST_IP must be this host's --node-ip-address, not {address}") from error
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=RAY_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"Ray did not answer for {RAY_TIMEOUT:.0f} s") from error
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise EngineFailed(f"Ray fails ({lines[-1]})")
    free = int(answer.stdout.split()[-1])
    if free < workers:
        raise EngineFailed(
            f"the engine needs {workers} devices, and {free} of Ray's are free; `ray start --address` on their host, "
            "with --num-gpus 1 if it has no GPU"
        )
