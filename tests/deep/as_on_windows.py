"""Runs train.py without what Windows does not have, as far as Linux can play that: python tests/deep/as_on_windows.py FLAGS

No fcntl (but for filelock, which has a lock of its own there), no resource, no pwd, no SIGHUP, no user ids and no
fork; folders that cannot be opened, files that are flushed only by who may write them, a rename that replaces nothing;
text is ASCII where LC_ALL=C PYTHONUTF8=0. vLLM is not installed, nor are data sets and their judges.
"""

import errno
import fcntl
import importlib
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
for package in ("accelerate", "psutil", "torch", "transformers.models.qwen3.modeling_qwen3"):
    importlib.import_module(package)  # these know Windows themselves
PACKAGES = ("fcntl", "resource", "pwd", "grp", "termios", "vllm", "ray", "datasets", "math_verify", "tensorboard")
OF_OS = ("O_DIRECTORY", "getuid", "geteuid", "getgid", "fork", "killpg", "setsid", "memfd_create")
OF_SIGNAL = ("SIGHUP", "SIGPROF", "setitimer", "pthread_sigmask")
os_open, os_close, os_fsync, os_rename = os.open, os.close, os.fsync, os.rename
temporary: dict[int, str] = {}  # descriptor -> a file that goes with it


def open_file(path, flags, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    descriptor = os_open(path, flags & ~os.O_TEMPORARY, *arguments, **options)
    if flags & os.O_TEMPORARY:
        temporary[descriptor] = path
    return descriptor


def close(descriptor):
    os_close(descriptor)
    if descriptor in temporary:
        os.unlink(temporary.pop(descriptor))


def fsync(descriptor):
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os_fsync(descriptor)


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
    os.O_TEMPORARY = 1 << 30
    shutil._use_fd_functions = False  # which opens folders
    os.open, os.close, os.fsync, os.rename = open_file, close, fsync, rename
    import train

    sys.exit(train.main(sys.argv[1:]))
