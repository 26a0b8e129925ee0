"""Code answers: tests are taken apart, verdicts are right and cannot be faked, and data sets of code mix with others."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from bpe import bpe_tokenizer
from test_judges import group_of
from test_rows import write_rows
from test_sandbox import children

from runtime.flag_checks import check_flags
from runtime.flags import Flags, UsageError
from runtime.parts import load_task
from tasks.code import answers
from tasks.code.answers import code_kind, last_program, read_asserts
from tasks.code.sandbox import Sandbox
from tasks.data_sets import PromptOptions, load_dataset_task
from tasks.judges import Job, RewardPool

pytestmark = pytest.mark.long  # processes of its own, and deadlines
DOUBLE = ["assert double(2) == 4", "assert double(-3) == -6"]


@pytest.fixture(scope="module")
def box():
    with Sandbox() as sandbox:
        yield sandbox


def fenced(program):
    return f"So:\n```python\n{program}\n```\nDone."


def kind_of(box, program, tests, seconds=10.0, **setup):
    return code_kind(fenced(program), {"tests": tests, **setup}, box, seconds)


@pytest.mark.parametrize(("text", "program"), [
    ("```python\na\n```", "a\n"), ("```python\na\n```\n```python\nb\n```", "b\n"), ("```Python3 \r\na\n```", "a\n"),
    ("no fence", None), ("```\na\n```", None), ("```python\na", None), ("```python\na\n```\n```python\nb", None),
    ("x ```python\na\n```", None), ("```python\n```", ""), ("  ```py\n  if a:\n    b\n  ```", "if a:\n  b\n"),
    ("```python\na = '```'\n```", "a = '```'\n"), ("```python\na\n```\n```text\nb\n```", "a\n"), ("", None),
])  # fmt: skip
def test_the_last_fence(text, program):
    found = last_program(text)
    assert found == program if program is None else found.strip("\n") == program.strip("\n")


APART = [
    ("f(1, 2) == 3", "f(1, 2)", "_values[0] == 3"),
    ("3 == f(1)", "f(1)", "3 == _values[0]"),
    ("set(f((3, 4))) == set((4, 5))", "f((3, 4))", "set(_values[0]) == set((4, 5))"),
    ("math.isclose(f(2), 3.1, rel_tol=0.1)", "f(2)", "math.isclose(_values[0], 3.1, rel_tol=0.1)"),
    ("f(g(1))[0].name == 'x' and not h(2), f(9)", "f(g(1))[0].name; h(2)", "_values[0] == 'x' and (not _values[1])"),
    ("sorted(f(3), key=lambda p: p[0]) == []", "f(3)", "sorted(_values[0], key=lambda p: p[0]) == []"),
    ("any(y == f(1) for y in (1, 2))", "f(1)", "any((y == _values[0] for y in (1, 2)))"),
    ("sum(10, 15) == 6", "sum(10, 15)", "_values[0] == 6"),
    ("Solution().run([1]) == 2", "Solution().run([1])", "_values[0] == 2"),
]


@pytest.mark.parametrize(("test", "calls", "check"), APART)
def test_an_assert_is_taken_apart(test, calls, check):
    """What the program computes, and what is compared where it never was. No expected value is on the first side."""
    found = read_asserts({"tests": [f"assert {test}"]})
    assert found.calls == [["eval", call] for call in calls.split("; ")]
    assert found.checks[1:] == [["eval", f"bool({check})"]]


def test_statements_and_imports_of_the_tests():
    """Statements follow the program if what compares does not need them; imports go to both sides."""
    tests = ["queue = [2, 1]\norder(queue)\nassert queue == [1, 2]", "assert Counter(f(1)) == Counter([1])"]
    own = ["exec", "from collections import Counter"]
    found = read_asserts({"tests": tests, "test_imports": [own[1]], "test_setup_code": "n = 1"})
    steps = [["exec", "queue = [2, 1]"], ["exec", "order(queue)"], ["eval", "queue"], ["eval", "f(1)"]]
    assert found.calls == [own, ["exec", "n = 1"], *steps]
    compared = ["bool(_values[0] == [1, 2])", "bool(Counter(_values[1]) == Counter([1]))"]
    assert found.checks[1:] == [own, *(["eval", check] for check in compared)]


@pytest.mark.parametrize("tests", [
    [], [""], ["assert 1 == 1"], ["x ="], ["f(1)"], [1], None, {}, "", 5, [None], ["assert f(1) == 2", "def"],
    ["assert all(f(x) == x for x in (1, 2))"], ["def check(c):\n assert c(1) == 2\ncheck(f)"],
    ["for x in (1, 2):\n assert f(x) == x", "assert f(1) == 1"], ["import numpy", "assert f(1) == 1"],
    ["from math import *", "assert f(1) == 1"], ["\0"], ["assert " + "(" * 500 + "f(1)" + ")" * 500],
    {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, {"inputs": [[1]], "outputs": [[2]]}, {"inputs": [], "outputs": []},
    {"inputs": "1", "outputs": "2"}, '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', "{", "[]", "1" * 5000,
], ids=repr)  # fmt: skip
def test_tests_that_cannot_be_read_are_known_before_training(box, tests):
    assert code_kind(None, {"tests": tests}, box, 1.0) == "bad_answer"


@pytest.mark.parametrize(("kind", "program"), [
    ("correct", "def double(x): return 2 * x"), ("wrong", "def double(x): return x * x"),
    ("wrong", "def double(x): return abs(2 * x)"), ("wrong", "def double(x): raise ValueError"), ("wrong", "def double(x"),
    ("wrong", ""), ("wrong", "def double(x): print(2 * x)"), ("wrong", "double = 4"), ("timeout", "while True: pass"),
    ("timeout", "def double(x):\n while True: pass"), ("memory", "def double(x): return bytearray(8 << 30)"),
    ("crash", "import ctypes\nctypes.string_at(0)"), ("correct", "class double(int):\n def __new__(self, x): return 2 * x"),
    ("correct", "print('noise' * 9999)\ndef double(x):\n print(x)\n return 2.0 * x"), ("wrong", "double = lambda x: '4'"),
])  # fmt: skip
def test_kinds_of_asserts(box, kind, program):
    assert kind_of(box, program, DOUBLE, seconds=0.8 if kind == "timeout" else 10.0) == kind


@pytest.mark.parametrize(("kind", "program"), [
    ("correct", "a, b = map(int, input().split())\nprint(a + b)"), ("correct", "print(sum(map(int, open(0).read().split())), end='')"),
    ("wrong", "print(3)"), ("wrong", "print('3 7')"), ("wrong", ""), ("wrong", "input()\nprint(3)\ninput()"),
    ("wrong", "print(sum(map(int, input().split())))\nraise SystemExit(1)"), ("timeout", "while True: pass"),
    ("correct", "import sys\ndef main(): print(' ', sum(map(int, sys.stdin.readline().split())), ' \\n')\nif __name__ == '__main__': main()"),
])  # fmt: skip
def test_kinds_of_pairs(box, kind, program):
    """As a dict, and as JSON of it. White space around words does not count."""
    tests = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
    seconds = 0.4 if kind == "timeout" else 10.0
    assert kind_of(box, program, tests, seconds) == kind_of(box, program, json.dumps(tests), seconds) == kind


def test_every_test_counts(box):
    """Right in all but one of them is wrong; the first is right for both programs."""
    asserts = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]
    for tests in (asserts, {"inputs": ["1", "2"], "outputs": ["1", "4"]}):
        for program, kind in (("f = lambda x: x * x", "correct"), ("f = lambda x: x * x * x", "wrong")):
            assert kind_of(box, program + "\nif __name__ == '__main__': print(f(int(input())))", tests) == kind


@pytest.mark.parametrize(("value", "test"), [
    ("{'a': (1, [2.5])}", "{'a': (1, [2.5])}"), ("[10 ** 5000]", "[10 ** 5000]"), ("{1, 2}", "{2, 1}"),
    ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"), ("float('inf')", "float('inf')"), ("b'a'", "b'a'"),
    ("True", "1"), ("None", "None"), ("'\\ud800'", "'\\ud800'"), ("1 + 2j", "1 + 2j"),
])  # fmt: skip
def test_values_are_compared_as_in_python(box, value, test):
    assert kind_of(box, f"def f(): return {value}", [f"assert f() == {test}"]) == "correct"
    assert kind_of(box, f"def f(): return {value}", [f"assert f() != {test}"]) == "wrong"
    assert kind_of(box, f"def f(): return [{value}]", [f"assert f() == {test}"]) == "wrong"


def test_the_programs_imports_serve_the_tests_and_helpers_follow_the_program(box):
    """MBPP's tests use `math` where the program imports it, and set up objects of the program's own classes."""
    tests = ["assert math.isclose(f(), math.pi, rel_tol=0.01)"]
    assert kind_of(box, "import math\ndef f(): return 3.14159", tests) == "correct"
    program = "class Node:\n def __init__(self, x): self.x = x\ndef value(n): return n.x"
    for setup, kind in (("root = Node(5)", "correct"), ("while True: pass", "timeout")):
        assert kind_of(box, program, ["assert value(root) == 5"], seconds=0.8, test_setup_code=setup) == kind


HIDDEN = ["assert f(2) == 'sesame-8317'", "assert f(3) == 'sesame-8318'"]
FAKES = {
    "exit code 0": "import os\nos._exit(0)",
    "exit code 0, later": "import os\ndef f(x): os._exit(0)",
    "exit": "raise SystemExit(0)",
    "magic words": "print('correct', 'done', '[true]', 'OK', 0)\nf = print",
    "equals everything": "class E:\n __eq__ = lambda *a: True\n __ne__ = lambda *a: False\n __bool__ = lambda *a: True\nf = lambda x: E()",
    "a string that equals everything": "class E(str):\n __eq__ = lambda *a: True\n __hash__ = str.__hash__\nf = lambda x: E('x')",
    "true": "f = lambda x: True",
    "what is none of the plain data": "f = lambda x: iter('sesame')",
    "builtins replaced": "import builtins\nfor name in ('bool', 'str', 'eval', 'compile', 'isinstance', 'print'):\n setattr(builtins, name, lambda *a, **k: True)\nf = bool",
    "json replaced": "import json\njson.dumps = lambda *a, **k: '[true, true]'\njson.loads = lambda *a, **k: [True, True]\nf = str",
    "a reply of its own": "import os\nfor n in range(64):\n try: os.lseek(n, 0, 0), os.write(n, b'[true, true]')\n except OSError: pass\ndef f(x): os._exit(0)",
    "a reply of data that none has": 'import os\nfor n in range(64):\n try: os.write(n, b\'{"__class__": "sesame-8317"}\')\n except OSError: pass\ndef f(x): os._exit(0)',
    "a reply that is no JSON": "import os\nos.write(3, b'x') if 0 else None\nfor n in range(3, 64):\n try: os.write(n, b'\\xff[' * 99)\n except OSError: pass\ndef f(x): os._exit(0)",
    "the judge's frames": "import sys\ndef f(x):\n frame = sys._getframe()\n while frame:\n  for name, value in {**frame.f_globals, **frame.f_locals}.items():\n   if callable(value) and name in ('encode', 'decode', 'eval'): frame.f_globals[name] = lambda *a: True\n   if 'sesame' + '-' in repr(value): return 'sesame-' + repr(value).split('sesame-' + '')[-1][:4]\n  frame = frame.f_back",
    "the tests in memory": "import gc\ndef f(x):\n for thing in gc.get_objects():\n  for inside in gc.get_referents(thing):\n   if isinstance(inside, (str, bytes)) and len(inside) < 1000 and str(8315 + x) in str(inside) and 'sesame' in str(inside)[:20]: return inside",
    "the tests in files": "import os\ndef f(x):\n for n in range(64):\n  for read in (lambda: os.pread(n, 99999, 0), lambda: open(f'/proc/self/fd/{n}').read(), lambda: os.read(n, 99999)):\n   try: found = str(read())\n   except (OSError, ValueError): continue\n   if 'sesame' + '-' in found: return 'sesame-' + found.split('sesame-' + '')[x - 1][:4]",
    "exceptions": "f = lambda x: (_ for _ in ()).throw(AssertionError)",
    "the tests' variables": "_values = ['sesame', 'sesame']\nf = lambda x: _values[0]\n__builtins__['assert'] = 1 if isinstance(__builtins__, dict) else 0",
    "endless data": "a = []\na.append(a)\nf = lambda x: a",
    "deep data": "def f(x):\n a = []\n for i in range(100000): a = [a]\n return a",
    "a generator of everything": "import itertools\nf = lambda x: itertools.count()",
}


@pytest.mark.parametrize("name", FAKES)
def test_a_verdict_cannot_be_faked(box, name):
    """Not after the same tests were passed, either, by which time the expected values were in the sandbox."""
    assert kind_of(box, "def f(x): return f'sesame-{8315 + x}'", HIDDEN) == "correct"
    assert kind_of(box, FAKES[name], HIDDEN) in ("wrong", "memory", "crash")
    pairs = {"inputs": ["2", "3"], "outputs": ["sesame-8317", "sesame-8318"]}
    assert kind_of(box, "print(f'sesame-{8315 + int(input())}')", pairs) == "correct"
    faked = kind_of(box, f"{FAKES[name]}\nif __name__ == '__main__': print(f(int(input())))", pairs)
    assert faked in ("wrong", "memory", "crash")


@pytest.mark.parametrize(("test", "program"), [
    ("assert set(f(1)) == {4, 5}", "set = lambda x: Fake()"), ("assert math.isclose(f(1), 3.0)", "import math\nmath.isclose = lambda *a: True"),
    ("assert sorted(f(1)) == [1]", "import builtins\nbuiltins.sorted = lambda x: [1]"), ("assert len(f(1)) == 3", "len = lambda x: 3"),
    ("from collections import Counter\nassert Counter(f(1)) == Counter('ab')", "import collections\ncollections.Counter = lambda x: 1"),
    ("assert isinstance(f(1), str)", "isinstance = lambda *a: True"), ("assert f(1) in (2, 3)", "f = lambda x: Fake()"),
    ("assert abs(f(1) - 5) < 1e-6", "class float(float): __sub__ = lambda *a: 5\nabs = lambda x: 0\nf = lambda x: float(0)"),
])  # fmt: skip
def test_what_compares_is_not_the_programs(box, test, program):
    """The same names mean Python's own where the values are compared."""
    fake = "class Fake:\n __eq__ = __ne__ = __lt__ = __contains__ = lambda *a: True\n __hash__ = lambda s: hash(2)\nf = lambda x: [0, 1]\n"
    assert kind_of(box, fake + program, [test]) == "wrong"


def test_data_that_are_slow_to_compare_cost_no_more_than_the_limit(box):
    """Integers with one hash make a set quadratic, on the comparing side, too."""
    program = "def f(): return {i * (2 ** 61 - 1): 0 for i in range(4000)}\ndef g(): return [f()] * 9"
    assert kind_of(box, program, ["assert g() == 1"], seconds=1.0) in ("wrong", "timeout")


RUN = "import os\nfor n in range(3, 64):\n try: os.write(n, b'[true]')\n except OSError: pass\nos._exit(0)"
EVAL = f"f = lambda x: {f'exec({RUN!r})'!r}"
PICKLED = "import pickle\nclass P:\n def __reduce__(self): return print, ()\nf = lambda x: pickle.dumps(P())"
EMPTIES = "def f(x):\n x.clear()\n return []"
FAKED = [  # tests, and a program that does not solve them
    # what is expected is in a variable of the tests, or in what it was made from
    ("expected = 'sesame'\nassert f(2) == expected", "f = lambda x: expected"),
    ("expected = 'sesame'\nassert f(2) == expected", "def f(x):\n global expected\n expected = 5\n return 5"),
    ("want = 'sesame'\nassert f(2) == want", "f = lambda x: next((v for v in globals().values() if str(v)[:3] == 'ses'), 0)"),
    ("cases = [(2, 'sesame')]\nassert f(cases[0][0]) == cases[0][1]", "f = lambda x: cases[0][1]"),
    ("cases = [(2, 'sesame')]\na, b = cases[0]\nassert f(a) == b", "f = lambda x: b"),
    ("a = [2]\nb = a\nb.append('sesame')\nassert f(a) == b", "f = lambda x: b"),
    ("def want(x): return 'sesame'\nassert f(2) == want(2)", "f = lambda x: want(x)"),
    ("class E:\n want = 'sesame'\nassert f(2) == E.want", "f = lambda x: E.want"),
    ("def put():\n global e\n e = 'sesame'\nput()\nassert f(2) == e", "f = lambda x: e"),
    ("e = 'sesame'\nassert f(2).startswith(e)", "f = lambda x: e"),
    ("e = ['sesame']\nr = f(e)\nassert r == e", EMPTIES), ("import operator\ne = [1]\nr = f(e)\nassert operator.eq(r, e)", EMPTIES),
    ("ok = f(2) == 'sesame'\nassert ok", "class E:\n __eq__ = lambda *a: True\nf = lambda x: E()"),
    ("def near(a, b): return abs(a - b) < 1\nassert near(f(2), 5)", "near = lambda *a: True\nf = lambda x: 0"),
    ("assert f(2) == EXPECTED", "EXPECTED = 5\nf = lambda x: 5"), ("e = E\nassert f(2) == e", "E = 5\nf = lambda x: 5"), ("assert f(2) == want(2)", "f = want = lambda x: 5"),
    ("assert np.isclose(f(2), 3.0)", "class np: isclose = lambda *a: True\nf = lambda x: 0"),
    # what compares would run what the program returned
    ("assert eval(f(2)) == 4", EVAL), ("run = exec\nassert run(f(2)) is None", EVAL), ("def g(x): return eval(x)\nassert g(f(2)) == 4", EVAL),
    ("import builtins as b\nassert b.eval(f(2)) == 4", EVAL), ("assert list(map(eval, [f(2)])) == [4]", EVAL),
    ("import sys\nassert sys.modules['builtins'].eval(f(2)) == 4", EVAL), ("import timeit\nassert timeit.timeit(f(2), number=1) < 9", EVAL),
    ("import pickle\nassert pickle.loads(f(2)) is None", PICKLED), ("from pickle import loads\nassert loads(f(2)) is None", PICKLED),
    ("try:\n from pickle import loads\nexcept ImportError: pass\nassert loads(f(2)) is None", PICKLED),
    # what compares is a builtin that has the name of the program's function, or is beside it
    *((f"assert set([4, 5]) == set({name}([5, 4]))", "set = copy = sum = filter = max = lambda x: 7") for name in ("copy", "sum", "filter", "max")),
    ("assert max([4, 5]) == max([5, 4])", "max = lambda x: 7"), ("assert abs(sum(1, 2) - 4) < 1", "abs = lambda x: 0\nsum = lambda *a: 9"),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), FAKED)
def test_what_is_expected_is_never_beside_the_program(box, tests, program):
    assert kind_of(box, program, [tests]) in ("wrong", "bad_answer")


STACK = "class S:\n def __init__(self): self.x = []\n def push(self, x): self.x.append(x)\n def __len__(self): return len(self.x)\n def __str__(self): return 'S'"
POINT = "from dataclasses import dataclass\n@dataclass\nclass P: x: int\nf = P"
HONEST = [  # tests, a program that solves them, and whether they can be judged
    ("expected = 'x'\nassert f(2) == expected", "f = lambda x: 'x'", True), ("x = [3, 1]\nassert f(x) == [1, 3]", "f = sorted", True),
    ("a, b = [2], ['x']\nassert f(a) == ['x']", "f = lambda x: ['x']", True), ("g = f\nassert g(2) == 4", "f = lambda x: 4", True), ("r = f(2)\nassert r == 4\nassert g(r) == 5", "f = lambda x: 4\ng = lambda x: 5", True),
    ("def make(n): return [1] * n\nassert f(make(3)) == 3", "f = len", True), ("def near(a, b): return abs(a - b) < 1\nassert near(f(2), 5)", "f = lambda x: 5.5", True),
    ("class N:\n x = 5\nassert f(1) == 5", "f = lambda x: N().x", True), ("x = [3, 1]\nassert f(x) == sorted(x)", "f = sorted", False),
    ("s = S()\ns.push(1)\nassert len(s) == 1 and str(s) == 'S'\nassert not S()", STACK, True), ("root = P(1)\nroot.x = None\nassert g(root) is None", POINT + "\ng = lambda p: p.x", True),
    *((f"assert list(f(3)) == [0, 1, 2] and {test}", f"f = lambda n: {value}", True) for value, test in (
        ("(i for i in range(n))", "next(f(3)) == 0"), ("map(int, '012')", "sum(f(3)) == 3"), ("range(n)", "f(3) == range(3)"),
        ("{i: i for i in range(n)}.keys()", "len(f(3)) == 3"), ("dict(enumerate(range(n))).values()", "max(f(3)) == 2"),
    )),
    ("g = f()\nassert next(g) == 0\nassert next(g) == 1", "from itertools import count as f", True), ("from itertools import islice\nassert list(islice(f(), 2)) == [0, 1]", "from itertools import count as f", True),
    ("from collections import deque\nassert f() == deque([1])", "from collections import deque\nf = lambda: deque([1])", True),
    ("from fractions import Fraction as F\nassert f() == F(1, 2)", "from fractions import Fraction\nf = lambda: Fraction('0.5')", True),
    ("from decimal import Decimal\nassert f() == Decimal('0.1')", "from decimal import Decimal\nf = lambda: Decimal('0.10')", True),
    ("import datetime\nassert f() == datetime.date(2020, 1, 2)", "import datetime\nf = lambda: datetime.date(2020, 1, 2)", True),
    ("assert sum(10, 15) == 6", "sum = lambda a, b: 6", True), ("assert set([4, 5]) == set(copy([5, 4]))", "copy = list", True), ("assert len(list(max(3))) == 3", "max = range", False),
    ("assert list(map(f, [1])) == [1]", "f = abs", False), ("assert sorted([2, 1], key=f) == [1, 2]", "f = abs", False), ("assert callable(f)", "f = abs", False),
    ("from functools import reduce\nassert reduce(f, [1, 2]) == 3", "f = lambda a, b: a + b", False), ("assert PI == 3.14", "PI = 3.14", False), ("assert isinstance(f(1), P)", POINT, False),
    ("assert f(1) == P(1)", POINT, False), ("class P: pass\nassert f(1) == P()", "f = lambda x: P()", False), ("assert [p.x for p in f()] == []", "f = list", False),
    ("assert hasattr(f(1), 'x')", POINT, False), ("assert type(f(1)).__name__ == 'P'", POINT, False), ("g = f()\nassert [next(g) for _ in 'ab'] == [0, 1]", "from itertools import count as f", False),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "program", "judged"), HONEST)
def test_a_row_that_is_kept_can_be_passed(box, tests, program, judged):
    """An honest program passes it, or it is known before training that it cannot be judged."""
    assert kind_of(box, program, [tests]) == ("correct" if judged else "bad_answer")
    assert code_kind(None, {"tests": [tests]}, box, 1.0) == ("wrong" if judged else "bad_answer")


@pytest.mark.parametrize("reply", ["x", "[[1]]", "[1]", "[]", "5", "[true, true]", "[" * 9999, "\xff"])
def test_any_reply_is_a_verdict(box, monkeypatch, reply):
    """Whatever the process that compares wrote: what is no list of as many trues as there are tests is wrong."""
    run, replied = box.run, ("done", reply.encode("latin-1"))
    monkeypatch.setattr(box, "run", lambda steps, **given: replied if given.get("values") else run(steps, **given))
    assert kind_of(box, "double = abs", DOUBLE[:1]) == "wrong"


def test_the_folder_works_alone(tmp_path):
    """Copied into an empty folder, under another name."""
    shutil.copytree(Path(answers.__file__).parent, tmp_path / "judge", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
from judge.answers import code_kind
from judge.sandbox import Sandbox
with Sandbox() as box:
    print(*(code_kind(f"```python\\ndouble = {{body}}\\n```", {{"tests": {DOUBLE}}}, box, 10.0) for body in ("abs", "lambda x: x + x")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("wrong correct\n", "")


def test_long_texts_are_known_before_training(box):
    """What does not fit into the file that carries it is not cut; what no program can print is not asked for."""
    for stdin, stdout, kind in (
        ("x" * 60_000_000, "", "wrong"),
        ("x" * 67_000_000, "", "bad_answer"),
        ("\u00e9" * 12_000_000, "", "bad_answer"),
        ("", "x" * 9_000_000, "bad_answer"),
    ):
        assert code_kind(None, {"tests": {"inputs": [stdin], "outputs": [stdout]}}, box, 1.0) == kind


PROBLEMS = [  # a program, what is right by another way, and arguments
    ("def f(n):\n    total = 0\n    for i in range(n + 1): total += i * i\n    return total",
     lambda n: n * (n + 1) * (2 * n + 1) // 6, lambda draw: [draw.randint(1, 999)]),
    ("def f(a, b):\n    while b: a, b = b, a % b\n    return a", math.gcd, lambda draw: [draw.randint(1, 10**9) for _ in "ab"]),
    ("def f(s):\n    out = ''\n    for c in s: out = c + out\n    return out",
     lambda s: s[::-1], lambda draw: ["".join(draw.choices("abcxyz", k=9))]),
    ("def f(xs):\n    xs = list(xs)\n    for i in range(len(xs)):\n        for j in range(i):\n            if xs[j] > xs[i]: xs[i], xs[j] = xs[j], xs[i]\n    return xs",
     sorted, lambda draw: [[draw.randint(-99, 99) for _ in range(8)]]),
    ("def f(a, n):\n    out = 1\n    for _ in range(n): out *= a\n    return out", pow, lambda draw: [draw.randint(2, 99), draw.randint(1, 99)]),
]  # fmt: skip
ENDINGS = {
    "": "correct",
    "\ng = f\ndef f(*a):\n    r = g(*a)\n    return r + r[:1] if isinstance(r, (str, list)) else r + 1": "wrong",
    "\ndef f(*a): return None": "wrong",
    "\ndef f(*a): raise ValueError": "wrong",
    "\ng = f\ndef f(*a): print(g(*a))": "wrong",
    "\nimport os\nos._exit(0)": "wrong",
    "\n)": "wrong",
    None: "unparsed",
}


def random_job(i):
    """One of PROBLEMS with one of ENDINGS, judged by asserts or by stdin and stdout; and its kind."""
    draw = random.Random(i)
    (program, right, arguments), ending = draw.choice(PROBLEMS), draw.choice([*ENDINGS, *[""] * 6])
    asked = [arguments(draw) for _ in range(3)]
    if draw.random() < 0.5:
        tests = [f"assert f({', '.join(map(repr, given))}) == {right(*given)!r}" for given in asked]
    else:
        tests = {"inputs": [json.dumps(given) for given in asked], "outputs": [str(right(*given)) for given in asked]}
    main = "\nif __name__ == '__main__':\n    import json\n    print(f(*json.loads(input())))"
    text = program if ending is None else fenced(program + ending + main)
    return Job("code", "", text, {"tests": tests}), ENDINGS[ending]


@pytest.mark.medium
def test_a_thousand_programs_are_judged_right():
    """About half of them are right, and the rest are wrong in seven ways. The known values come from other algorithms."""
    jobs, kinds = zip(*map(random_job, range(1000)), strict=True)
    with RewardPool(["code"], workers=2, timeout=60.0, unsafe_code=True) as pool:
        assert [verdict.kind for verdict in pool.judge(jobs)] == list(kinds)
        assert pool.counts == Counter(kinds)
    assert 400 < pool.counts["correct"] < 700 and pool.counts["unparsed"] > 30


@pytest.mark.medium
def test_the_judges_count_code_by_kind_and_leave_no_process():
    """A program that is short of memory, or too slow, costs no worker; a sandbox that dies costs one, and one verdict."""
    texts = {
        "correct": "x </think> " + fenced("def double(x): return 2 * x"),
        "wrong": "</think>" + fenced("double = abs"),
        "unfinished": fenced("def double(x): return 2 * x"),
        "unparsed": "</think> 4",
        "timeout": "</think>" + fenced("while 1: pass"),
        "memory": "</think>" + fenced("def double(x): return bytearray(8 << 30)"),
        "crash": "</think>" + fenced("import os\nos.abort()"),
    }
    with RewardPool(["code", "exact"], workers=1, timeout=4.0, end_of_thinking="</think>", unsafe_code=True) as pool:
        (worker,) = [each.process.pid for each in pool._workers]
        (server,) = children(worker)
        assert pool.answers_readable("code", [{"tests": DOUBLE}, {"tests": []}]) == [True, False]
        verdicts = pool.judge([Job("code", "", text, {"tests": DOUBLE}) for text in texts.values()])
        assert [verdict.kind for verdict in verdicts] == list(texts) and pool.counts == dict.fromkeys(texts, 1)
        assert [verdict[:2] for verdict in verdicts] == [(1.0, True)] + [(-1.0, False)] * 6
        assert children(worker) == [server]
        os.kill(server, signal.SIGKILL)
        verdicts = pool.judge([Job("code", "", texts["correct"], {"tests": DOUBLE})] * 2)
        assert [verdict.kind for verdict in verdicts] == ["crash", "correct"]
        (worker,) = [each.process.pid for each in pool._workers]
        last = [worker, *children(worker)]
    deadline = time.monotonic() + 10
    while any(map(group_of, last)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(last) == 2 and not any(map(group_of, last))


def test_code_is_judged_only_if_asked_for_and_where_it_can_be_confined(monkeypatch):
    with pytest.raises(ValueError, match=r"`reward` code runs what a model writes; .* set `unsafe_code`"):
        RewardPool(["math", "code"])
    monkeypatch.setattr("tasks.code.sandbox.platform.machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="`reward` code cannot be used on this machine: .* x86_64 only"):
        RewardPool(["code"], unsafe_code=True)


SUMS = [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(9)]
PROGRAMS = [{"question": f"Write add{i}.", "test_list": [f"assert add{i}(3) == {i + 3}"]} for i in range(9)]


@pytest.mark.medium
def test_math_and_code_in_one_task(tmp_path):
    """Each data set is judged by its own reward, and the weights are as given. A row without tests, and one whose tests
    cannot be read, are left out and counted."""
    bad, tokenizer = [{"question": "no tests"}, {"question": "no asserts", "test_list": ["add(3)"]}], bpe_tokenizer()
    math_rows, code_rows = write_rows(tmp_path / "a.jsonl", SUMS), write_rows(tmp_path / "b.jsonl", PROGRAMS + bad)
    tokenizer.save_pretrained(tmp_path / "model")
    both = f"{math_rows}:math=2,{code_rows}:code=1"
    task = load_task(Flags(dataset=both, model=str(tmp_path / "model"), unsafe_code=True, held_out=2, reward_workers=1))
    try:
        assert task.mixture == {math_rows: 2.0, code_rows: 1.0}
        assert Counter(problem.source for problem in task.train) == {math_rows: 7, code_rows: 7}
        assert task.skipped == {"no_answer": 1, "unreadable_answer": 1}
        for problem in task.train:
            name = task.text(problem.prompt_ids).partition("Write ")[2].partition(".")[0]
            number = problem.answer if problem.source == math_rows else name.removeprefix("add")
            program = f"</think>The answer is {number}.\n```python\ndef {name or 'f'}(x): return x + {number}\n```"
            texts = program, program.replace(f"+ {number}", "- 1").replace(f"is {number}", "is 77")
            completions = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            assert task.score(problem, completions) == [(1.0, True), (-1.0, False)]
    finally:
        task.close()


def test_all_data_sets_by_one_reward_and_what_cannot_work_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": str(i), "input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})} for i in range(5)]
    for name, some in (("a.jsonl", SUMS), ("b.jsonl", PROGRAMS), ("c.jsonl", rows)):
        write_rows(tmp_path / name, some)

    def load(dataset, unsafe_code=True, **options):
        options |= {"reward_workers": 1, "unsafe_code": unsafe_code}
        return load_dataset_task(dataset, bpe_tokenizer(), PromptOptions(held_out=2), **options)

    task = load("c.jsonl", reward="code")
    task.close()
    assert len(task.train) == 3 and not task.skipped
    for dataset, unsafe, words in (
        ("a.jsonl:code", True, "`dataset` a.jsonl: no row has test_list, input_output; its columns are answer"),
        ("a.jsonl:code", False, "`reward` code runs what a model writes"),
        ("b.jsonl:exact", True, "no row has answer, ground_truth"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            load(dataset, unsafe)
        assert "\n" not in str(caught.value)


def test_unsafe_code_is_asked_for_by_its_flag(tmp_path, monkeypatch):
    """Before anything is loaded; and the flag is refused where nothing would run."""
    monkeypatch.chdir(tmp_path)  # away from a runs/demo that was made before
    for flags in (
        {"dataset": "a.jsonl:math=2,b.jsonl:code=1"},
        {"dataset": "my/set:main:train:code"},
        {"dataset": "a.jsonl", "eval_dataset": "mbpp=b.jsonl:code"},
        {"dataset": "a.jsonl", "reward": "code"},
    ):
        flags = {"model": "some/model", **flags}
        with pytest.raises(UsageError, match="--dataset judged by code runs what the .* add --unsafe_code true"):
            check_flags(Flags(**flags))
        check_flags(Flags(**flags, unsafe_code=True))
        flags = {name: value.replace("code", "exact") for name, value in flags.items()}
        check_flags(Flags(**flags))
        with pytest.raises(UsageError, match="--unsafe_code True does nothing without a data set judged by `code`"):
            check_flags(Flags(**flags, unsafe_code=True))
