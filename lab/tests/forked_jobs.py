"""lab/bench/gpu.py, each of whose jobs is forked from one process that has made the imports: `forked_jobs.py ARGUMENTS`. A job
takes ten seconds of a processor less; what it computes is the same."""

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "bench")]

import gpu

for name in ("train", "pytest", "accelerate", "benchmark", "transformers.models.qwen3.modeling_qwen3"):
    import_module(name)


def run_as_a_program(command: Sequence[str], log: IO[str], cwd: Path, env: dict[str, str]) -> None:
    """What `python SCRIPT ...` or `python -m MODULE ...` does. Ends the process."""
    os.setsid()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(":")
    code: object = 0
    try:
        if command[1] == "-m":
            sys.argv = list(command[2:])
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command[1:])
            sys.path.insert(0, str(Path(command[1]).parent))
            runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class Forked(subprocess.Popen):
    """A started program of Python, as subprocess has them."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: dict[str, str], stdout: IO[str], **_: Any):
        super().__init__(["true"])
        self.wait()
        self.returncode = None
        self.args = command
        self.pid = os.fork()
        if self.pid == 0:
            run_as_a_program(command, stdout, cwd, env)


def started(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """A job of ours, or the program that watches the card."""
    return (Forked if command[0] == sys.executable else subprocess.Popen)(command, **options)


if __name__ == "__main__":
    gpu.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": started})  # of that module only
    sys.exit(gpu.main())
