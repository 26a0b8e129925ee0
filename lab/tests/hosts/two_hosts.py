"""Hosts on one machine: network namespaces with one link, each with its own processes, shared memory and Ray folder. They
share the file system, so the checkout, its .venv and the models are at the same paths. It needs root and `ip`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]
NO_ZOMBIES = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); [signal.pause() for _ in iter(int, 1)]"
LACKS = "root" if os.geteuid() else "" if shutil.which("ip") else "`ip` (Debian: iproute2)"


class Host:
    """A host with one address. It lives as long as its first process."""

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
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
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

    def end(self) -> None:
        """Leaves nothing of it."""
        self.init.kill()  # and all others with it
        self.outside.wait()
        ip("netns", "del", self.name)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, and nothing else."""
    new_folder = not Path("/tmp/ray").exists()
    with ExitStack() as ends:
        here, there = Host(1), Host(2)
        for host in (here, there):
            ends.callback(host.end)
        ip("link", "add", "eth0", "netns", here.name, "type", "veth", "peer", "name", "eth0", "netns", there.name)
        for host in (here, there):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield here, there
    if new_folder:
        Path("/tmp/ray").rmdir()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
