"""Code answers: does a program that a model wrote pass its problem's tests? sandbox.py runs it, shut in.

PROBLEM. `assert double(2) == 4` behind the model's own program, in one process, asks that program for its grade. It
may end the process with exit code 0, return an object that equals everything, replace `abs` or `print`, or look for
the 4 among the interpreter's objects.

IDEA. The process that runs the program never has an expected answer, and the process that compares never runs the
program. A test is taken apart:

    assert set(shared([1, 2], [2, 3])) == {2}
    the program's process computes  shared([1, 2], [2, 3])  and its value leaves as plain data (`sandbox.encode`);
    a fresh process computes  set(_values[0]) == {2}  from the data, where `set` and `==` are Python's own

What is taken is each expression that begins at a name which is neither Python's nor imported by the tests. So all
that a program can do in order to fake a verdict is to claim other values, which is no more than to return them. Where
a test gives text to stdin and expects text on stdout, what was printed is compared here, word by word.

THE DATA. A row has a column `test_list`, a list of asserts as in MBPP, with `test_imports` and `test_setup_code` if it
needs them; or `input_output`, {"inputs": [text, ...], "outputs": [text, ...]} or JSON of it, as in APPS and TACO.

STILL TO BE FAKED. A test says what it says: `assert f(3)` holds for whatever is true, and a program may know the
arguments of a test by heart. A helper that the set-up defines, and a name that the tests use without importing it, run
beside the program, which may replace them. Values other than plain data equal nothing, an honest program's too.

>>> with Sandbox() as sandbox:
...     code_kind("```python\\ndef double(x): return 2 * x\\n```", {"tests": ["assert double(2) == 4"]}, sandbox, 2.0)
'correct'
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import textwrap
import time
from typing import Any, NamedTuple

from tasks.sandbox import MODULES, Sandbox

TEST_COLUMNS = ("test_list", "input_output")
SETUP_COLUMNS = ("test_imports", "test_setup_code")
FENCE = re.compile(r"^[ \t]*```(?:python3?|py)[ \t\r]*$", re.MULTILINE | re.IGNORECASE)
FENCE_END = re.compile(r"^[ \t]*```", re.MULTILINE)


class Asserts(NamedTuple):
    """Tests as steps of `Sandbox.run`: `calls` follow the program, `checks` see only the values of `calls`."""

    calls: list[list[str]]
    checks: list[list[str]]


class Take(ast.NodeTransformer):
    """Puts `_values[first]`, `_values[first + 1]`, ... for each expression that begins at a name not in `known`, and
    keeps it in `taken`."""

    def __init__(self, known: set[str], first: int) -> None:
        self.known, self.first, self.taken = known, first, list[str]()

    def visit(self, node: ast.AST) -> Any:
        begin = node
        while isinstance(begin, ast.Call | ast.Attribute | ast.Subscript):
            begin = begin.func if isinstance(begin, ast.Call) else begin.value
        if not isinstance(begin, ast.Name) or begin.id in self.known:
            return self.generic_visit(node)
        self.taken.append(ast.unparse(node))
        return ast.parse(f"_values[{self.first + len(self.taken) - 1}]", mode="eval").body


def tests_of(row: dict[str, Any], tests: Any) -> dict[str, Any] | None:
    """What is kept of a row as its answer; None if `tests`, the value of its column of tests, is None."""
    return None if tests is None else {"tests": tests} | {name: row.get(name) for name in SETUP_COLUMNS}


def last_program(text: str) -> str | None:
    """What is in the last ```python fence of `text`; None if there is none, or it does not end."""
    *before, last = FENCE.split(text)
    program, *after = FENCE_END.split(last, maxsplit=1)
    return textwrap.dedent(program) if before and after else None


def read_pairs(tests: Any) -> list[tuple[str, str]] | None:
    """(stdin, stdout) of each test of an `input_output` column; None if it is something else."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = isinstance(tests["inputs"], list) and all(isinstance(text, str) for pair in pairs for text in pair)
    return pairs if pairs and texts and not tests.get("fn_name") else None  # fn_name: calls of a function, not stdin


def read_asserts(answer: dict[str, Any]) -> Asserts | None:
    """Takes asserts apart; None if that cannot be done, or nothing in them depends on the program."""
    steps = Asserts([], [["exec", f"import {', '.join(MODULES)}"]])  # for tests that lean on the program's imports
    known, first = {*vars(builtins), *MODULES}, 0
    parts = [answer.get(name) or [] for name in (*SETUP_COLUMNS, "tests")]  # each a text, or a list of texts
    try:
        lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
        for statement in ast.parse("\n".join(lines)).body:
            source = ["exec", ast.unparse(statement)]
            if isinstance(statement, ast.Assert):
                taken, check = take(statement.test, known, first)
                steps.calls.extend(["eval", call] for call in taken)
                steps.checks.append(["eval", f"bool({check})"])
                first += len(taken)
                continue
            steps.calls.append(source)
            nodes = list(ast.walk(statement))
            known -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = {name.name for name in statement.names}
                modules = {statement.module} if isinstance(statement, ast.ImportFrom) else names
                if not modules <= {*MODULES} or "*" in names:
                    raise ValueError("nothing else can be imported")
                known |= {(name.asname or name.name).split(".")[0] for name in statement.names}
                steps.checks.append(source)
            elif any(isinstance(node, ast.Assert) for node in nodes):
                raise ValueError("an assert in a loop or a function would be judged by the program's process")
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None
    return steps if first else None


def take(check: ast.expr, known: set[str], first: int) -> tuple[list[str], str]:
    """The expressions of `check` that the program computes, and what remains of it. Raises ValueError if none is."""
    nodes = list(ast.walk(check))
    loops = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loops |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]  # the outermost first
    called = [function.id for function in calls if isinstance(function, ast.Name)]
    for names in (known, known - {*called[:1]}):  # a program's function may be named `sum`
        visitor = Take(names | loops, first)
        rest = visitor.visit(check)
        if visitor.taken:
            break
    inside = {node.id for call in visitor.taken for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)}
    if not visitor.taken or inside & loops:
        raise ValueError("the program is asked for nothing, or in a loop")
    return visitor.taken, ast.unparse(rest)


def code_kind(text: str | None, answer: dict[str, Any], sandbox: Sandbox, seconds: float) -> str:
    """Whether the program in `text` passes the tests in `answer`: correct, wrong (also if it raises), unparsed (there
    is no program), timeout, memory, crash, or bad_answer (the tests are none that can be read).

    With `text` None it only says whether the tests can be read: `bad_answer`, or `wrong` if they can. All tests
    together may take `seconds`. Raises SandboxDied.
    """
    pairs = read_pairs(answer["tests"])
    asserts = None if pairs else read_asserts(answer)
    if not pairs and not asserts:
        return "bad_answer"
    if text is None:
        return "wrong"
    program = last_program(text)
    if program is None:
        return "unparsed"
    deadline = time.monotonic() + seconds
    for stdin, wanted in pairs or ():
        kind, printed = sandbox.run([["exec", program]], stdin=stdin, seconds=deadline - time.monotonic())
        if kind != "done" or printed.decode("utf-8", "replace").split() != wanted.split():
            return "wrong" if kind == "done" else kind
    if asserts is None:
        return "correct"
    kind, values = sandbox.run([["exec", program], *asserts.calls], seconds=deadline - time.monotonic())
    if kind != "done":
        return kind
    data = values.decode("ascii", "replace")
    kind, held = sandbox.run(asserts.checks, values=data, seconds=deadline - time.monotonic())
    passed = kind == "done" and set(json.loads(held)) == {True}
    return "correct" if passed else "timeout" if kind == "timeout" else "wrong"
