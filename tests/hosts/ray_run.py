"""Two hosts with Ray, and a run on them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from two_hosts import Host

from runtime.run_folder import Folder

RAY = '{"distributed_executor_backend": "ray"}'
FLAGS = "--batch_prompts 8 --rollouts 8 --eval_problems 64 --eval_every 10 --save_every 10 --probe_every 1".split()


class Pair:
    """A: the trainer's host, with Ray's head. B: the engines'."""

    def __init__(self, a: Host, b: Host):
        self.a, self.b, self.faulty = a, b, False

    def start_b(self) -> None:
        """B as after it was switched on."""
        self.b.join()
        if self.b.pids():
            while self.b.pids():
                self.b.kill()
            time.sleep(5)  # until Ray's head knows
        self.b.run("sh", "-c", "rm -rf /dev/shm/* /tmp/ray/*")
        self.b.ray("start", f"--address={self.a.address}:6379", "--num-gpus=1")

    def left(self) -> list[tuple[list[str], list[str]]]:
        """Of each host its processes, but for Ray's idle ones, names in shared memory, and Ray's sessions."""
        found = []
        for host in (self.a, self.b):
            processes = sorted(line[:90] for line in host.processes().values() if not line.startswith("ray::IDLE"))
            found.append((processes, host.shared_memory() + host.run("ls", "/tmp/ray").split()))
        return found


class Launched:
    """train.py on A, with an engine that Ray places."""

    def __init__(self, pair: Pair, folder: Path, *flags: Any, **options: Any):
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [sys.executable, "train.py", "--output_dir", folder, "--engine_args", RAY, *FLAGS, *flags]
        with self.log.open("a") as log:
            self.process = pair.a.start(*command, stdout=log, stderr=log, **options)

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def records(self) -> list[dict[str, Any]]:
        """Of its steps."""
        found = Folder(self.folder).read("metrics.jsonl") if (self.folder / "metrics.jsonl").exists() else []
        return [record for record in found if "step" in record]

    def signal(self, number: int) -> None:
        """To train.py itself: `process` is what waits for it outside its host."""
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(number)

    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def steps_on(self, count: int) -> Callable[[], bool]:
        """Whether it has made `count` steps more than now."""
        last = len(self.records()) + count
        return lambda: len(self.records()) >= last

    def wait(self, condition: Callable[[], bool], seconds: float = 240, may_end: bool = False) -> float:
        """Waits until `condition` holds; returns how long."""
        started = time.monotonic()
        while not condition():
            assert may_end or not self.ended(), self.said[-3000:]
            assert time.monotonic() - started < seconds, self.said[-3000:]
            time.sleep(0.1)
        return round(time.monotonic() - started, 1)

    def end(self, seconds: float = 240) -> int:
        """Its exit code."""
        self.wait(self.ended, seconds, may_end=True)
        return self.process.returncode
