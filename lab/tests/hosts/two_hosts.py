"""Hosts on one machine: network namespaces on one link, each with its own processes, shared memory and Ray folder. They
share the file system, so the checkout, its .venv and the models are at the same paths. It needs root and `ip`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]
PATHS = ":".join(
    str(ROOT / folder) for folder in ("", "tests", "tests/deep/engine", "lab/tests/hosts")
)  # of our modules
NO_ZOMBIES = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); [signal.pause() for _ in iter(int, 1)]"
LACKS = "root" if os.geteuid() else "" if shutil.which("ip") else "`ip` (Debian: iproute2)"


class Host:
    """A host with one address, on the bridge's link. It lives as long as its first process."""

    def __init__(self, number: int):
        self.address, self.name = f"10.77.0.{number}", f"scalerl-{os.getpid()}-{number}"
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        folders = "mkdir -p /tmp/ray; for at in /dev/shm /tmp/ray; do mount -t tmpfs -o size=2g none $at; done"
        script = f"hostname {self.name}; {folders}; echo ready; exec {sys.executable} -S -c '{NO_ZOMBIES}'"
        new = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
        command = ["ip", "netns", "exec", self.name, *new, "sh", "-c", script]
        self.outside = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.outside.stdout.readline() == b"ready\n"
        [self.init] = psutil.Process(self.outside.pid).children()

    def start(self, *command: Any, **options: Any) -> subprocess.Popen:
        """A process there, in the checkout's folder."""
        enter = ["nsenter", f"--target={self.init.pid}", *"--mount --uts --ipc --pid --net".split(), f"--wd={ROOT}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": self.address, "GLOO_SOCKET_IFNAME": "eth0"}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": PATHS}
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # hidden GPUs, of which Ray would count none
        return subprocess.Popen([*enter, *map(str, command)], env=environment, text=True, **options)

    def run(self, *command: Any) -> str:
        """What it prints."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, (command, out[-3000:])
        return out

    def ray(self, *arguments: str) -> None:
        """`ray start` with little memory."""
        small = ("--num-cpus=1", "--object-store-memory=80000000", f"--node-ip-address={self.address}")
        self.run(Path(sys.executable).with_name("ray"), "start", *arguments, *small)

    def pids(self) -> list[int]:
        """Its processes except for the first one, as this process sees them."""
        pids = {int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", self.name]).split()}
        return sorted(pids - {self.outside.pid, self.init.pid})

    def processes(self) -> dict[int, str]:
        """Their command lines."""
        lines = {}
        for pid in self.pids():
            try:
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
        return {pid: line for pid, line in lines.items() if line}  # a zombie has none

    def left(self) -> list[str]:
        """Its processes, except for Ray's idle ones, and names in shared memory."""
        lines = sorted(line[:90] for line in self.processes().values() if not line.startswith("ray::IDLE"))
        return lines + self.run("ls", "/dev/shm").split()

    def link(self, state: str) -> None:
        """Takes its link `up` or `down`."""
        ip("-n", self.name, "link", "set", "eth0", state)

    def end(self) -> None:
        """Leaves nothing of it."""
        self.init.kill()  # and all others with it
        self.outside.wait()
        ip("netns", "del", self.name)


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """`count` hosts that reach each other, and nothing else."""
    new_folder = not Path("/tmp/ray").exists()
    bridge = f"scalerl-{os.getpid()}-0"
    ip("netns", "add", bridge)
    started: list[Host] = []
    try:
        ip("-n", bridge, "link", "add", "switch", "type", "bridge")
        ip("-n", bridge, "link", "set", "switch", "up")
        for number in range(1, count + 1):
            host = Host(number)
            started.append(host)
            ends = f"eth0 netns {host.name} type veth peer name to{number} netns {bridge}"
            ip("link", "add", *ends.split())
            ip("-n", bridge, "link", "set", f"to{number}", "master", "switch", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.link("up")
        yield started
    finally:
        for host in started:
            host.end()
        ip("netns", "del", bridge)
        if new_folder:
            Path("/tmp/ray").rmdir()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
