"""lab/bench/gpu.py, each of whose jobs is forked from one process that has made the imports: `forked_jobs.py ARGUMENTS`. A job
takes ten seconds of a processor less; what it computes is the same."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "bench")]

import gpu

for name in ("train", "pytest", "accelerate", "benchmark", "transformers.models.qwen3.modeling_qwen3"):
    import_module(name)


def program(command: Sequence[str], log: IO[str], cwd: Path, env: dict[str, str]) -> None:
    """What `python SCRIPT ...` or `python -m MODULE ...` does."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(":")
    if command[1] == "-m":
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")


class Forked(ForkProcess):
    """A started program of Python, with what the driver asks of a subprocess.Popen."""

    def __init__(self, command: Sequence[str], *, stdout: IO[str], cwd: Path, env: dict[str, str], **_: Any):
        super().__init__(target=program, args=(command, stdout, cwd, env))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)


if __name__ == "__main__":
    gpu.subprocess = SimpleNamespace(Popen=Forked, STDOUT=subprocess.STDOUT)  # of that module only
    gpu.shutil.which = lambda name: None  # nothing watches the card
    sys.exit(gpu.main())
