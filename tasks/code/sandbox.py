"""A sandbox for programs that a model wrote: they may compute, and the kernel refuses them everything else.

PROBLEM. To judge a program one must run it, and sooner or later a policy writes one that deletes files, opens a
connection, forks without end or kills its parent. A policy is rewarded for whatever makes a verdict `correct`, so that
it also finds every way to fake one.

IDEA. A process that may ask the kernel for next to nothing can do nothing but compute. Each program runs in a process
of its own. Before its first line a seccomp filter (seccomp(2), mode 2) is put on this process, and nobody can take it
off. Of more than 350 system calls it permits the 24 in SYSCALLS, which reach no file, process, signal or socket; for
all others the kernel returns EPERM, which Python raises as PermissionError. So nothing has to be found and forbidden
one by one: not a path, not /proc, not ptrace. Open are its input, its output and /dev/null, and the environment has
nothing of ours. What remains is limited:

    time        `seconds` of wall time, then SIGKILL; as much processor time, even if nobody is left to kill it
    memory      MEMORY_MB of address space
    output      MAX_OUTPUT_BYTES
    processes   one, with one thread: `threading.Thread(...).start()` runs its function at once

This needs no root, no namespaces and no container, works within a container, and is the same for root and for a
user. It needs Linux on x86_64 with CONFIG_SECCOMP_FILTER, which all distributions have and Docker permits. `Sandbox`
tries forbidden calls when it starts, and where one of them is not refused it raises: nothing is ever run with less.

HOW. A fresh Python takes 70 ms until it has imported what programs need. So a server starts once (this file, as a
script), imports it, and forks for each run. The forked process reads its request, shuts itself in, and runs it. The
server never sees requests or replies, which are in two files in memory; otherwise the next program could find the
last one's in the memory that it inherits.

SIMPLIFIED. Only MODULES can be imported, since a program opens no file; NumPy is not among them. The protection is as
good as the kernel's handling of the 24 calls; a processor's side channels are not closed.

>>> with Sandbox() as sandbox:
...     sandbox.run([["exec", "def double(x): return 2 * x"], ["eval", "double(21)"]], seconds=2)
...     sandbox.run([["exec", "print(sum(map(int, input().split())))"]], stdin="40 2", seconds=2)
('done', b'[42]')
('done', b'42\\n')
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import decimal
import fractions
import gc
import importlib
import itertools
import json
import math
import os
import platform
import resource
import signal
import site
import struct
import subprocess
import sys
import threading
import types
from array import array
from collections import abc, deque
from typing import Any

MEMORY_MB = 512
MAX_OUTPUT_BYTES = 8 * 2**20
MAX_INPUT_BYTES = 63 * 2**20  # as JSON; the judges' files may have 64 MiB
MAX_ITEMS = 6000  # of an iterator, which may have no end
STACK_BYTES = 64 * 2**20  # deep recursion through C code, such as that of functools.lru_cache
MODULES = """
__future__ abc array ast base64 binascii bisect builtins calendar cmath collections collections.abc contextlib copy csv
ctypes dataclasses datetime decimal difflib encodings.ascii encodings.idna encodings.latin_1 encodings.utf_16 enum
fractions functools gc hashlib heapq inspect io itertools json keyword locale logging math numbers operator os os.path
pickle platform pprint queue random re resource secrets signal statistics string struct sys textwrap threading time
timeit traceback types typing unicodedata uuid warnings weakref zlib _strptime
""".split()
# By its type from the arguments that pickle would give it; a datetime is a date, too.
DATES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
MADE = (*DATES, fractions.Fraction, decimal.Decimal, range, array)
SYSCALLS = {  # x86_64; on files that are open, on the process's own memory, signal handlers, clocks, and its end
    "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "restart_syscall": 219,
    "sched_yield": 24, "nanosleep": 35, "clock_nanosleep": 230, "gettimeofday": 96, "time": 201, "clock_gettime": 228,
    "getpid": 39, "getrandom": 318, "exit": 60, "exit_group": 231,
}  # fmt: skip
AUDIT_ARCH_X86_64 = 0xC000003E
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
RAISED, MEMORY, UNPROTECTED = 1, 3, 4  # exit codes of a run
FORBIDDEN = "os.open('/', 0)", "os.stat('/')", "os.pipe()", "os.fork()", "os.kill(0, 0)"


class SandboxDied(RuntimeError):
    """The server is gone: someone killed it, such as a kernel that is short of memory."""


class Sandbox:
    """A server process that forks for each run, and the files that it shares with this process.

    Raises RuntimeError if this machine cannot confine a program.
    """

    def __init__(self) -> None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise RuntimeError(f"programs can be confined on Linux on x86_64 only, not {platform.platform()}")
        self._files = self._request, self._output = os.memfd_create("request"), os.memfd_create("output")
        # Without packages, and nothing of this environment. Equal sets are printed equally in every process.
        command, env = [sys.executable, "-s", "-S", "-P", __file__], {"PYTHONHASHSEED": "0"}
        command, pipe = [*command, *map(str, self._files)], subprocess.PIPE
        self._server = subprocess.Popen(command, env=env, pass_fds=self._files, stdin=pipe, stdout=pipe, bufsize=0)
        attempts = "".join(f"try: {call}\nexcept PermissionError: refused += 1\n" for call in FORBIDDEN)
        try:
            found = self.run([["exec", f"import os\nrefused = 0\n{attempts}"], ["eval", "refused"]], seconds=20)
        except SandboxDied as error:
            found = "crash", str(error).encode()
        if found != ("done", b"[%d]" % len(FORBIDDEN)):
            self.close()
            raise RuntimeError(f"the kernel does not confine programs by seccomp filters here: {found}")

    def run(self, steps: list[list[str]], *, seconds: float, stdin: str = "", values: str = "") -> tuple[str, bytes]:
        """Runs `steps` in a new process; returns what became of it, and what it wrote.

        A step is ["exec", statements] or ["eval", expression]. All share one namespace, in which the list `_values` is
        what the JSON text `values` decodes to. What is written is the JSON list of the expressions' values, see
        `encode`; without an expression it is what the program prints, and it is the main program.

        Returns done, wrong (it raised an exception), memory, timeout or crash, each of which the program itself may
        bring about. Raises SandboxDied.
        """
        os.ftruncate(self._request, 0)
        os.pwrite(self._request, json.dumps({"steps": steps, "stdin": stdin, "values": values}).encode(), 0)
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)
        assert self._server.stdin and self._server.stdout
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(b"%f\n" % max(seconds, 0.001))
        reply = self._server.stdout.readline()
        if not reply:
            raise SandboxDied("the process that starts programs died")
        kinds = {b"timeout": "timeout", b"0": "done", b"%d" % RAISED: "wrong", b"%d" % MEMORY: "memory"}
        return kinds.get(reply.strip(), "crash"), os.pread(self._output, MAX_OUTPUT_BYTES, 0)

    def close(self) -> None:
        """Ends the server and waits for it."""
        self._server.kill()
        self._server.communicate()
        for file in self._files:
            os.close(file)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(value: object) -> object:
    """`value` for JSON: None, booleans, numbers, strings, bytes, dates, arrays, ranges, lists, tuples, sets, deques and
    dicts of such, and what is derived from these types as what it is derived from. Anything else becomes an object that
    equals nothing; it still has its length, and its first MAX_ITEMS items."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}  # Python limits an int's decimal digits
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    for kind in (tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    for kind in MADE:
        if isinstance(value, kind):
            return {kind.__name__: encode(list(value.__reduce_ex__(2)[1]))}
    if isinstance(value, abc.Iterable):
        items = [encode(item) for item in itertools.islice(value, MAX_ITEMS)]
        return {"iterator" if isinstance(value, abc.Iterator) else "items": items}
    return {"items": [None] * len(value)} if isinstance(value, abc.Sized) else {"object": type(value).__name__}


def decode(text: str) -> Any:
    """What `encode` made JSON of. Raises ValueError, TypeError or KeyError if it did not."""
    makers: dict[str, abc.Callable] = {kind.__name__: lambda args, kind=kind: kind(*args) for kind in MADE}
    makers |= {kind.__name__: kind for kind in (dict, bytes, tuple, set, frozenset, deque)}
    makers |= {"int": lambda digits: int(digits, 16), "complex": lambda parts: complex(*parts)}
    makers |= {"iterator": lambda items: (item for item in items), "object": lambda _: object()}
    makers["items"] = lambda items: dict(enumerate(items)).values()
    return json.loads(text, object_hook=lambda tagged: next(makers[kind](x) for kind, x in tagged.items()))


# ------------------------------------------------------------------------------------------------- the server's process


def serve(request: int, output: int) -> None:
    """For each number of seconds on stdin: forks, waits, and writes the exit code, or `timeout`, on stdout."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # for sigtimedwait
    for name in MODULES:
        importlib.import_module(name)
    site.setquit()  # exit() and quit()
    filtered, server = new_filter(), os.getpid()
    gc.freeze()
    for line in sys.stdin.buffer:
        seconds = float(line)
        signal.sigtimedwait({signal.SIGCHLD}, 0)  # that of the last run, if it was killed
        child = os.fork()
        if child == 0:
            try:
                run(request, output, seconds, filtered, server)
            except MemoryError:
                os._exit(MEMORY)
            except BaseException:  # whatever a program raises, SystemExit too
                os._exit(RAISED)
        late = signal.sigtimedwait({signal.SIGCHLD}, seconds) is None
        if late:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("timeout" if late else code, flush=True)


def new_filter() -> bytes:
    """The filter as a program for the kernel's virtual machine: 8 bytes an instruction (seccomp(2), bpf in the kernel's
    Documentation/networking/filter.rst)."""

    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    load, jump_if_equal, end = 0x20, 0x15, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000  # `refuse` returns EPERM, which is 1
    jumps = [
        instruction(jump_if_equal, number, if_true=len(SYSCALLS) - i)  # to the last instruction
        for i, number in enumerate(SYSCALLS.values())
    ]
    right = [instruction(load, 4), instruction(jump_if_equal, AUDIT_ARCH_X86_64, if_true=1), instruction(end, kill)]
    return b"".join([*right, instruction(load, 0), *jumps, instruction(end, refuse), instruction(end, allow)])


def shut_in(seconds: float, filtered: bytes, server: int) -> None:
    """Sets this process's limits and filter, for good. If that is not possible, the process ends."""

    limits = {resource.RLIMIT_AS: MEMORY_MB * 2**20, resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES}
    limits |= {resource.RLIMIT_CPU: math.ceil(seconds) + 1, resource.RLIMIT_STACK: STACK_BYTES}
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    code = ctypes.create_string_buffer(filtered)
    program = ctypes.create_string_buffer(struct.pack("HP", len(filtered) // 8, ctypes.addressof(code)))
    prctl, zero = ctypes.CDLL(None).prctl, ctypes.c_ulong(0)
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), zero, zero, zero)  # the server's death is its own
    if os.getppid() != server:  # it died before
        os._exit(UNPROTECTED)
    prctl(PR_SET_DUMPABLE, zero, zero, zero, zero)  # no core dump, which may start a program of the system's
    prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)  # which lets an ordinary user set a filter
    if prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, zero, zero) != 0:
        os._exit(UNPROTECTED)


def run(request: int, output: int, seconds: float, filtered: bytes, server: int) -> None:
    """One run, in the forked process, which it ends."""
    asked = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    stdin, null = os.memfd_create("stdin"), os.open(os.devnull, os.O_RDWR)
    os.pwrite(stdin, asked["stdin"].encode("utf-8", "replace"), 0)
    replies = any(mode == "eval" for mode, _ in asked["steps"])
    for number, file in enumerate((stdin, null if replies else output, null)):
        os.dup2(file, number)
    os.closerange(3, output)
    os.closerange(output + 1 if replies else output, 1024)
    sys.stdin, sys.stdout, sys.stderr = (open(i, mode, closefd=False) for i, mode in enumerate("rww"))
    # There are no threads. Programs that start one for its larger stack and wait for it get what they mean.
    threading.Thread.start = lambda self: self.run()  # type: ignore[method-assign]
    threading.Thread.join = lambda self, timeout=None: None  # type: ignore[method-assign]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    shut_in(seconds, filtered, server)
    module = sys.modules["__main__"] = types.ModuleType("answer" if replies else "__main__")
    sys.modules[module.__name__] = module
    if asked["values"]:
        vars(module)["_values"] = decode(asked["values"])
    values = []
    try:
        for mode, source in asked["steps"]:
            value = eval(compile(source, "answer.py", mode, dont_inherit=True), vars(module))
            values += [encode(value)] if mode == "eval" else []
    except SystemExit as stop:
        if replies or stop.code:
            raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if replies:
        os.write(output, json.dumps(values).encode())
    os._exit(0)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
