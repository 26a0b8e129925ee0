"""Runs train.py without what Windows does not have, as far as Linux can play that:

    python tests/deep/as_on_windows.py FLAGS then OTHER FLAGS

No fcntl (but for filelock, which has a lock of its own there), no resource, no pwd, no SIGHUP, no user ids and no fork;
a rename that replaces nothing; text is ASCII where LC_ALL=C PYTHONUTF8=0. vLLM is not installed, nor are data sets and
their judges.
"""

import errno
import importlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
for package in ("accelerate", "psutil", "torch", "transformers.models.qwen3.modeling_qwen3"):
    importlib.import_module(package)  # these know Windows themselves
PACKAGES = ("fcntl", "resource", "pwd", "grp", "termios", "vllm", "ray", "datasets", "math_verify", "tensorboard")
OF_OS = ("getuid", "geteuid", "getgid", "fork", "killpg", "setsid", "memfd_create", "sync", "posix_fallocate")
OF_SIGNAL = ("SIGHUP", "SIGPROF", "setitimer", "pthread_sigmask")
os_rename = os.rename


def rename(source, target, **options):
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, "File exists", source, target)
    os_rename(source, target, **options)


if __name__ == "__main__":
    for package in PACKAGES:
        sys.modules[package] = None
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            delattr(module, name)
    os.rename = rename
    import train

    for flags in " ".join(sys.argv[1:]).split(" then "):
        if code := train.main(flags.split()):
            sys.exit(code)
