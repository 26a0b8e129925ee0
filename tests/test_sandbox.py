"""The sandbox: hostile programs get nothing, cost no more than their limit, and leave what follows as it was."""

import itertools
import json
import os
import pickle
import platform
import runpy
import subprocess
import sys
import time
import zlib
from array import array
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from test_judges import group_of

from tasks.code import sandbox
from tasks.code.sandbox import MAX_ITEMS, MAX_OUTPUT_BYTES, SYSCALLS, Sandbox, SandboxDied, decode, encode

pytestmark = pytest.mark.long  # processes of its own, and deadlines
ROOT = Path(__file__).parent.parent
SECRET = "sesame-8317"

# `attempt` and `raw` print BROKEN if a call succeeds. Signals are 0, which only asks for the right to send one.
PRELUDE = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try: result = call()
    except (OSError, ValueError, ImportError): return
    if result != -1: print("BROKEN", result)
def raw(number, *args): attempt(lambda: libc.syscall(number, *args))
"""
BOMB = zlib.compress(bytes(1 << 24), 9)  # 16 MiB
UNPICKLED = pickle.dumps(0).replace(b"K\x00.", b"cos\nsystem\n(S'touch FOLDER/new'\ntR.")
HOSTILE = {  # name: (kind, program); FOLDER is a run's folder, PARENT and SERVER are process ids
    # processes
    "fork bomb": ("wrong", "while True: os.fork()"),
    "fork by clone, vfork and clone3": ("done", "raw(56, 17, 0, 0, 0, 0); raw(58); raw(435, bytes(88), 88)"),
    "thread bomb": ("timeout", "while True: threading.Thread(target=time.sleep, args=(1000,)).start()"),
    "threads by hand": ("wrong", "import _thread\nwhile True: _thread.start_new_thread(time.sleep, (1000,))"),
    "a daemon that outlives": ("done", "attempt(os.fork)\nattempt(os.setsid)\nraw(157, 36, 1)"),
    "a shell": ("done", "attempt(lambda: os.system('touch FOLDER/new') and -1)\nattempt(lambda: os.execv('/bin/sh', ['sh']))"),
    # memory and processor
    "memory": ("memory", "bytearray(8 << 30)"),
    "memory bit by bit": ("memory timeout", "kept = []\nwhile True: kept.append(bytearray(1 << 20))"),
    "memory in the kernel": ("done", "raw(319, b'x', 0)\nraw(29, 0, 1 << 30, 0o1600)\nattempt(os.pipe)\nraw(149, 0, 1 << 20)"),
    "zip bomb": ("memory timeout", f"import zlib\nkept = [zlib.decompress({BOMB!r}) for _ in range(64)]"),
    "huge ints": ("timeout", "9 ** 9 ** 9"),
    "huge ints as text": ("timeout", "sys.set_int_max_str_digits(0)\nstr(1 << 10 ** 8)"),
    "endless": ("timeout", "while True: pass"),
    "endless, deaf to signals": ("timeout", "for n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile True: pass"),
    "endless, without exceptions": ("timeout", "while True:\n try:\n  while True: time.sleep(1)\n except BaseException: pass"),
    "asleep": ("timeout", "time.sleep(1000)"),
    "a regular expression": ("timeout", "import re\nre.match('(a+)+$', 'a' * 64 + 'b')"),
    "limits raised": ("done", "import resource\nfor n in range(16):\n attempt(lambda: resource.setrlimit(n, (-1, -1)))\n raw(302, 0, n, bytes([255] * 16), 0)\n raw(160, n, bytes([255] * 16))"),
    # output
    "endless output": ("wrong", "while True: print('x' * 100000)"),
    "output past its end": ("done", "os.lseek(1, 1 << 40, 0)\nattempt(lambda: os.write(1, b'BROKEN'))\nattempt(lambda: os.ftruncate(1, 1 << 40))"),
    "other open files": ("done", "for n in range(3, 2000):\n attempt(lambda: os.write(n, b'0'))\n attempt(lambda: os.read(n, 1))\n attempt(lambda: os.dup2(1, n))"),
    # files
    "disk fill": ("wrong", "file = open('/tmp/fill', 'wb')\nwhile True: file.write(bytes(1 << 20))"),
    "the run's folder": ("done", "attempt(lambda: open('FOLDER/new', 'w'))\nattempt(lambda: open('FOLDER/eval.jsonl', 'a'))\nattempt(lambda: open('FOLDER/eval.jsonl'))"),
    "files by raw calls": ("done", "raw(2, b'FOLDER/eval.jsonl', 0)\nraw(257, -100, b'FOLDER/eval.jsonl', 0)\nraw(437, -100, b'FOLDER/eval.jsonl', bytes(24), 24)\nraw(85, b'FOLDER/new', 0o600)"),
    "links": ("done", "attempt(lambda: os.symlink('FOLDER/eval.jsonl', 'FOLDER/new'))\nattempt(lambda: os.link('FOLDER/eval.jsonl', 'FOLDER/new'))"),
    "removed and renamed": ("done", "attempt(lambda: os.unlink('FOLDER/eval.jsonl'))\nattempt(lambda: os.rename('FOLDER/eval.jsonl', 'FOLDER/new'))\nattempt(lambda: os.chmod('FOLDER/eval.jsonl', 0))\nattempt(lambda: os.truncate('FOLDER/eval.jsonl', 0))"),
    "keys": ("done", "attempt(lambda: os.listdir(os.path.expanduser('~/.ssh')))\nattempt(lambda: open('/etc/passwd').read())"),
    "the parent's environment": ("done", "print(os.environ)\nfor n in ('PARENT', 'SERVER', 'self'):\n for what in ('environ', 'mem', 'maps', 'fd/0'):\n  attempt(lambda: open(f'/proc/{n}/{what}', 'rb').read())"),
    "another root": ("done", "attempt(lambda: os.chdir('/'))\nattempt(lambda: os.chroot('/tmp'))\nraw(272, 0x10000000)\nraw(165, b'x', b'/tmp', b'tmpfs', 0, 0)"),
    "unpickling": ("done", f"import pickle\nattempt(lambda: pickle.loads({UNPICKLED!r}) and -1)"),
    # other processes
    "signals to the parent": ("done", "for n in (PARENT, SERVER, -1, 0):\n attempt(lambda: os.kill(n, 0))\n raw(62, n, 0)\nraw(200, PARENT, 0)\nraw(234, PARENT, PARENT, 0)\nraw(129, PARENT, 0, bytes(128))\nraw(434, PARENT, 0)"),
    "ptrace": ("done", "raw(101, 16, SERVER, 0, 0)\nraw(101, 0x4206, PARENT, 0, 0)\nraw(310, SERVER, 0, 0, 0, 0, 0)\nraw(311, SERVER, 0, 0, 0, 0, 0)"),
    "more rights": ("done", "attempt(lambda: os.setuid(0))\nraw(126, bytes(8), bytes(24))\nraw(157, 22, 0)\nraw(157, 38, 0, 0, 0, 0)\nraw(317, 1, 0, 0)"),
    # network
    "network": ("done", "for family in (1, 2, 10, 16, 17):\n raw(41, family, 1, 0)\nraw(53, 1, 1, 0, bytes(8))\nraw(425, 1, bytes(120))"),
    "network by Python": ("done", "def connect():\n import socket\n return socket.create_connection(('127.0.0.1', 22))\nattempt(connect)"),
    # the interpreter
    "recursion": ("memory crash timeout wrong", "sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"),
    "recursion in C": ("memory crash timeout wrong", "sys.setrecursionlimit(1 << 30)\nclass A:\n def __repr__(self): return repr(self)\nrepr(A())"),
    "a wild pointer": ("crash", "ctypes.string_at(0)"),
    "abort": ("crash", "os.abort()"),
    "calls of 32 bits": ("crash", "libc.mmap.restype = ctypes.c_void_p\nat = libc.mmap(None, 4096, 7, 0x22, -1, 0)\ncode = b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3'\nctypes.memmove(at, code, 8)\nprint('BROKEN', ctypes.CFUNCTYPE(ctypes.c_int)(at)())"),
    "nested brackets": ("wrong memory crash timeout", "eval('(' * 10 ** 6)"),
    "no modules, no builtins": ("wrong", "sys.modules.clear()\n__builtins__.__dict__.clear()\nprint(1)"),
    "stdin for ever": ("done", "for i in range(3):\n os.lseek(0, 0, 0)\n assert os.read(0, 9) == b'in'\nattempt(lambda: os.write(0, b'') and 0 or -1)\nos.close(0)\nassert not sys.stdin.closed"),
    "standard output closed": ("wrong done", "os.close(1)\nprint('BROKEN')"),
}  # fmt: skip


@pytest.fixture(scope="module")
def box():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", SECRET)
        with Sandbox() as sandbox:
            yield sandbox


def printed(box, program, seconds=10.0, stdin=""):
    return box.run([["exec", program]], seconds=seconds, stdin=stdin)


def processor_seconds(pid):
    """Of all children that `pid` has waited for."""
    times = psutil.Process(pid).cpu_times()
    return times.children_user + times.children_system


def children(pid):
    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nothing(box, tmp_path, name):
    """It ends as the table says, within its processor time, and has touched nothing; the next is judged."""
    (tmp_path / "eval.jsonl").write_text(SECRET)
    server, (kinds, program) = box._server.pid, HOSTILE[name]
    seconds = 0.5 if "timeout" in kinds else 10.0
    for word, value in (("FOLDER", tmp_path), ("PARENT", os.getpid()), ("SERVER", server)):
        program = program.replace(word, str(value))
    before, start = processor_seconds(server), time.monotonic()
    kind, output = printed(box, PRELUDE + program, seconds=seconds, stdin="in")
    assert time.monotonic() - start < seconds + 5.0
    assert processor_seconds(server) - before < seconds + 0.2
    assert kind in kinds.split() and len(output) <= MAX_OUTPUT_BYTES, output
    assert b"BROKEN" not in output and SECRET.encode() not in output
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"eval.jsonl": SECRET}
    assert children(server) == []
    assert printed(box, "print(input())", stdin="42") == ("done", b"42\n")


SWEEP = """
import ctypes
libc, permitted = ctypes.CDLL(None, use_errno=True), set(PERMITTED)
for number in range(1000):
    for called in (number, number | 0x40000000):
        ctypes.set_errno(0)
        if called not in {*permitted, 335, 336} and (libc.syscall(called, 0, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1):
            print("BROKEN", called)
print("swept")
""".replace("PERMITTED", repr(list(SYSCALLS.values())))


def test_every_other_system_call_is_refused(box):
    """All numbers up to 1000, also those of the x32 ABI: EPERM. Left out are uretprobe and uprobe, which since Linux 6.14
    no filter sees: outside of a probe's trampoline the kernel answers them with SIGILL."""
    assert printed(box, SWEEP) == ("done", b"swept\n")


def test_an_ordinary_user_is_as_safe_as_root(tmp_path):
    """The same as the user `nobody`, if this is root: no right of root's is needed, and none is what protects."""
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tasks.code.sandbox import *\n"
    code += f"with Sandbox() as box: print(os.getuid(), box.run([['exec', {SWEEP!r}]], seconds=60))"
    for python in (sys.executable, "/usr/bin/python3"):
        user = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": {}}
        try:
            subprocess.run([python, "-c", f"open({sandbox.__file__!r})"], check=True, capture_output=True, **user)
        except (OSError, subprocess.CalledProcessError):
            continue  # `nobody` may not read it
        found = subprocess.run([python, "-B", "-c", code], capture_output=True, text=True, timeout=120, **user)
        assert (found.stdout, found.stderr) == ("65534 ('done', b'swept\\n')\n", "")
        return
    pytest.skip("the user `nobody` can read no Python here")


def test_a_program_finds_nothing_of_those_before_it(box):
    """Neither in the memory that the server hands on, nor in the shared files. The search finds its own copy."""
    for _ in range(3):
        box.run([["eval", f"'{SECRET * 1000}'"]], seconds=5, values=json.dumps([SECRET] * 1000))
        printed(box, f"print('{SECRET * 1000}')", stdin=SECRET * 1000)
    search = """
import ctypes, gc, os
libc = ctypes.CDLL(None)
libc.write.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
word = "-".join(["sesame", "8317"]).encode()  # one copy in the heap
kept, found = bytes(word), 0
for place in sorted({id(thing) & ~0xFFFFF for thing in gc.get_objects()} | {id(kept) & ~0xFFFFF}):
    for page in range(place, place + (1 << 20), 4096):
        os.lseek(1, 0, 0)
        # write(2) says EFAULT for a page that is not there, where reading it would be the end
        found += libc.write(1, page, 4096) == 4096 and ctypes.string_at(page, 4096).count(word)
os.lseek(1, 0, 0)
print(found)
"""
    kind, output = printed(box, search, seconds=20)
    assert kind == "done" and 1 <= int(output[:4].split()[0]) <= 3, output[:100]


@pytest.mark.parametrize(("program", "expected"), [
    ("print(sum(map(int, input().split())))", b"42\n"),
    ("import sys\nfor line in sys.stdin: print(line.strip())", b"40 2\n"),
    ("print(open(0).read().split())", b"['40', '2']\n"),
    ("import sys\nprint(sys.stdin.buffer.read())", b"b'40 2'\n"),
    ("import os\nprint(os.read(0, 100))", b"b'40 2'\n"),
    ("if __name__ == '__main__': print('main')", b"main\n"),
    ("import sys\nprint(1)\nsys.exit()", b"1\n"),
    ("print(1)\nexit(0)", b"1\n"),
    ("print('\u00e9\U0001f600')", "\u00e9\U0001f600\n".encode()),
    ("import io, sys, atexit, os\nsys.stdout = io.StringIO()\natexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(3)", b"3\n"),
    ("import sys, threading\nthreading.stack_size(1 << 26)\nt = threading.Thread(target=lambda: print(4))\nt.start()\nt.join()", b"4\n"),
    ("import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10 ** 6)\n@lru_cache(None)\ndef f(n): return n and f(n - 1) + 1\nprint(f(20000))", b"20000\n"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n x: int\nprint(P(1))", b"P(x=1)\n"),
    ("import collections, heapq, itertools, math, bisect, string, random, re, decimal, fractions, datetime, typing\nprint(math.gcd(4, 6))", b"2\n"),
    ("from datetime import datetime\nprint(datetime.strptime('2024-02-29', '%Y-%m-%d').year)", b"2024\n"),
    ("print({'b', 'a', 'c', 'd'} == set('abcd'))", b"True\n"),
])  # fmt: skip
def test_what_honest_programs_do(box, program, expected):
    assert printed(box, program, stdin="40 2") == ("done", expected)


def test_two_runs_have_other_random_numbers_and_equal_sets(box):
    """The forked process draws a seed of its own; the order of a set of strings is the same in every server."""
    assert len({printed(box, "import random\nprint(random.random())") for _ in range(3)}) == 3
    order = "print(*{str(i) for i in range(50)})"
    with Sandbox() as other:
        assert printed(box, order) == printed(other, order)


@pytest.mark.parametrize("value", [
    None, True, 0, -1, 2**63, -(2**20000), 1.5, float("inf"), "a\ud800\n", b"\x00\xff", 1 + 2j, [], [1, [2]], (1, (2,)),
    {1, 2}, frozenset({"a"}), {1: (2, [3]), "a": {"b": None}, (1, 2): {3}}, {"int": "0x1"}, {"object": 1},
    range(1, 9, 3), deque([1, [2]]), Fraction(1, 3), Decimal("0.10"), date(2020, 1, 2), datetime(2020, 1, 2, tzinfo=UTC), array("d", [0.5]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_plain_data_arrives_as_it_is(value):
    found = decode(json.dumps(encode(value)))
    assert found == value and type(found) is type(value)


def test_other_values_become_what_they_are_derived_from_or_nothing():
    Number = type("Number", (int,), {"__eq__": lambda *_: True, "__hash__": int.__hash__})
    Anything = type("Anything", (), {"__eq__": lambda *_: True})

    def arrived(value):
        return decode(json.dumps(encode(value)))

    for value, plain in ((Number(3), 3), (Counter("aab"), {"a": 2, "b": 1}), (bytearray(b"x"), b"x")):
        assert arrived(value) == plain and type(arrived(value)) is type(plain)
    assert [type(arrived(value)) for value in (Anything(), len)] == [object, object]
    for value in (iter([1, 2]), {1: 0, 2: 0}.keys(), map(int, "12")):
        found = arrived(value)
        assert found not in ([1, 2], {1, 2}, (1, 2)) and list(found) == [1, 2]
    assert len(list(arrived(itertools.count()))) == MAX_ITEMS


def test_what_is_not_confined_is_never_run(tmp_path, monkeypatch):
    """The same file with one line changed. Before any program runs, `Sandbox` finds it out. So it does on another
    machine."""
    for line, words in (
        ("PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38", "PR_SET_NO_NEW_PRIVS = 1, 4, 9999, 38"),  # the kernel has no filters
        ('"read": 0', '"read": 0, "open": 257'),  # a filter that permits too much
        ("RLIMIT_FSIZE: MAX_OUTPUT_BYTES", "RLIMIT_FSIZE: 1 / 0"),  # a limit that cannot be set
    ):
        before, found, after = Path(sandbox.__file__).read_text().partition(line)
        (tmp_path / "changed.py").write_text(before + words + after)
        changed = runpy.run_path(str(tmp_path / "changed.py"))
        with pytest.raises(RuntimeError, match="the kernel does not confine programs by seccomp filters here"):
            changed["Sandbox"]()
        assert found
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="on Linux on x86_64 only"):
        Sandbox()


@pytest.mark.parametrize(("stdin", "after"), [("", 0.2), ("x" * 30_000_000, 0.0)], ids=["it has begun", "it reads"])
def test_a_server_that_is_killed_is_an_error_and_takes_its_program_with_it(stdin, after):
    """As by a kernel that is short of memory, or when the run is killed."""
    with Sandbox() as box, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(printed, box, "import time\nwhile True: time.sleep(60)", seconds=60, stdin=stdin)
        while not (program := children(box._server.pid)):
            time.sleep(0.01)
        time.sleep(after)
        box._server.kill()
        for _ in range(2):
            with pytest.raises(SandboxDied, match="the process that starts programs died"):
                answer.result()
            answer = thread.submit(printed, box, "print(1)")
        deadline = time.monotonic() + 10
        while group_of(program[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert group_of(program[0]) is None
