"""Code answers: does a program that a model wrote pass its problem's tests? sandbox.py runs it, shut in.

PROBLEM. `assert double(2) == 4` behind the model's own program, in one process, asks that program for its grade. It
may end the process with exit code 0, return an object that equals everything, replace `abs` or `print`, or look for
the 4 among the interpreter's objects.

IDEA. The process that runs the program never has an expected answer, and the process that compares never runs the
program. A test is taken apart:

    assert set(shared([1, 2], [2, 3])) == {2}
    the program's process computes  shared([1, 2], [2, 3])  and its value leaves as plain data;
    a fresh process computes  set(_values[0]) == {2}  from the data, where `set` and `==` are Python's own

What is taken is each expression that begins at a name which is neither Python's nor of the tests. So all that a
program can do in order to fake a verdict is to claim other values, which is no more than to return them. A variable or
a function of the tests is on the side that needs it. Tests that need one on both sides cannot be read, and neither can
those that no program would pass. Where a test gives text to stdin and expects text on stdout, what was printed is
compared here, word by word.

THE DATA. A row has a column `test_list`, a list of asserts as in MBPP, with `test_imports` and `test_setup_code` if it
needs them; or `input_output`, {"inputs": [text, ...], "outputs": [text, ...]} or JSON of it, as in APPS and TACO.

STILL TO BE FAKED. A test says what it says: `assert f(3)` holds for whatever is true, and a program may know the
arguments of a test by heart. A function that the tests call and do not define is the program's. Values other than plain
data (`sandbox.encode`) equal nothing, an honest program's too.

>>> with Sandbox() as sandbox:
...     code_kind("```python\\ndef double(x): return 2 * x\\n```", {"tests": ["assert double(2) == 4"]}, sandbox, 2.0)
'correct'
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
import textwrap
import time
from typing import Any, NamedTuple

from .sandbox import MADE, MAX_INPUT_BYTES, MAX_OUTPUT_BYTES, MODULES, Sandbox

JsonObject = dict[str, Any]  # a row of a data set, or what was kept of one

TEST_COLUMNS = ("test_list", "input_output")
SETUP_COLUMNS = ("test_imports", "test_setup_code")
FENCE = re.compile(r"^[ \t]*```(?:python3?|py)[ \t\r]*$", re.MULTILINE | re.IGNORECASE)
FENCE_END = re.compile(r"^[ \t]*```", re.MULTILINE)
# Methods of a value: their argument is what is expected.
COMPARE = "startswith endswith find rfind index rindex count issubset issuperset isdisjoint".split()
RUN = """
eval exec compile builtins pickle ctypes timeit threading modules methodcaller get_type_hints CodeType FunctionType
globals locals vars dir open input help exit quit id callable getattr hasattr setattr delattr attrgetter
""".split()  # which would run what a program returned, or look for what plain data do not have
ATTRIBUTES = {name for kind in (complex, str, bytes, list, dict, set, *MADE) for name in dir(kind)}


class Asserts(NamedTuple):
    """Tests as steps of `Sandbox.run`: `calls` follow the program, `checks` see only the values of `calls`."""

    calls: list[list[str]]
    checks: list[list[str]]


class Take(ast.NodeTransformer):
    """Puts `_values[0]`, `_values[1]`, ... for each expression that begins at a name of the program's.

    Others are `known` as Python's or imported by the tests, `plain` variables of the tests, or `local` to a loop.
    Variables that the program `made`, or may have changed, are its own.
    """

    def __init__(self) -> None:
        self.known, self.plain, self.made, self.local = set(vars(builtins)), set[str](), set[str](), set[str]()
        self.first, self.taken, self.begins = 0, list[str](), set[str]()

    def visit(self, node: ast.AST) -> Any:
        path = path_of(node)
        begin, name = path[-1], getattr(path[-1], "id", None)
        asked = name in self.made or any(isinstance(x, ast.Call) and x.func is begin for x in path)
        if name is None or name in self.known or name in self.plain | self.local or (name in MODULES and not asked):
            return self.generic_visit(node)
        methods = [x.attr for x in path if isinstance(x, ast.Attribute)]
        if not asked or any(method in COMPARE or method.startswith("__") for method in methods):
            raise ValueError("a function is no plain data, and a method of the program's does not compare")
        self.taken.append(ast.unparse(node))
        self.begins.add(name)
        return ast.parse(f"_values[{self.first + len(self.taken) - 1}]", mode="eval").body

    def take(self, tree: ast.expr) -> ast.expr:
        """What remains of `tree` without the expressions that the program computes, which are in `taken`. Raises
        ValueError if there are none, or they are in a loop or compared with each other."""
        nodes = list(ast.walk(tree))
        self.taken, self.begins = [], set()
        self.local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        rest = self.visit(tree)
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        if not self.taken and len(called) == 1 and called <= set(vars(builtins)):
            self.known -= called  # a program's function may be named `sum`
            rest = self.visit(tree)
            self.known |= called
        inside = set().union(*(names_of(call)[0] for call in self.taken))
        sides = [[node.left, *node.comparators] for node in ast.walk(rest) if isinstance(node, ast.Compare)]
        both = any(all("_values[" in ast.unparse(side) for side in each) for each in sides)
        several = self.begins & self.made and len(self.begins) > 1
        loop = self.local and inside & {*self.local, "next"}
        if not self.taken or loop or several or (both and not self.begins <= self.made):
            raise ValueError("the program is asked for nothing, in a loop, or for all that is compared")
        return rest


def tests_of(row: JsonObject, tests: Any) -> JsonObject | None:
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
    long = texts and any(len(json.dumps(i)) > MAX_INPUT_BYTES or len(o) > MAX_OUTPUT_BYTES for i, o in pairs)
    return pairs if pairs and texts and not (long or tests.get("fn_name")) else None  # fn_name: calls of a function


def path_of(node: ast.AST) -> list[ast.AST]:
    """`node`, what it is called on or taken from, and so on to where the expression begins."""
    path = [node]
    while True:
        match path[-1]:
            case ast.Call(ast.Name("next" | "repr" | "str"), [inner] | [inner, ast.Constant(None)], []):
                path.append(inner)  # which answers for itself
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                path.append(inner)
            case _:
                return path


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The global names in `source`, and those of them that it binds."""
    tables, found = [symtable.symtable(source, "tests", "exec")], list[symtable.Symbol]()
    for table in tables:  # which grows by the functions inside
        tables += table.get_children()
        found += [symbol for symbol in table.get_symbols() if table is tables[0] or symbol.is_global()]
    bound = {symbol.get_name() for symbol in found if symbol.is_assigned() or symbol.is_imported()}
    return {symbol.get_name() for symbol in found}, bound


def read_asserts(answer: JsonObject) -> Asserts | None:
    """Takes asserts apart; None if that cannot be done, or one of them would pass no program, or any."""
    parts = [answer.get(name) or [] for name in (*SETUP_COLUMNS, "tests")]  # each a text, or a list of texts
    try:
        lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
        return take_apart(ast.parse("\n".join(lines)).body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


def take_apart(statements: list[ast.stmt]) -> Asserts:
    """The steps of both sides. Raises ValueError where `read_asserts` returns None."""
    take, own = Take(), dict[str, set[str]]()  # the tests' own statements, with their variables
    calls, checks = list[list[str]](), list[list[str]]()
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # it may say what is expected
        step = ["exec", ast.unparse(statement)]
        used, bound = names_of(step[1])
        reads = used if isinstance(statement, ast.AugAssign) else used - bound
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = {name.name for name in statement.names}
            modules = {statement.module} if isinstance(statement, ast.ImportFrom) else names
            if not modules <= {*MODULES} - {*RUN} or names & {"*", *RUN}:
                raise ValueError("this cannot be imported")
            take.known |= bound
            for side in (calls, checks):
                side.append(step)
        elif isinstance(statement, ast.Assert):
            checks.append(["eval", f"bool({ast.unparse(take.take(statement.test))})"])
            calls.extend(["eval", call] for call in take.taken)
            take.first += len(take.taken)
        elif any(isinstance(node, ast.Assert | ast.Import | ast.ImportFrom) for node in ast.walk(statement)):
            raise ValueError("an assert in a loop or a function would be judged beside the program")
        elif reads <= {*take.known, *take.plain, *MODULES} - take.made:
            own[step[1]] = bound | used & take.plain
            take.known, take.plain, take.made = take.known - bound, take.plain | bound, take.made - bound
            for side in (calls, checks):
                side.append(step)
        elif value := getattr(statement, "value", None):
            alias = isinstance(value, ast.Name) and value.id not in take.made  # of the program's function
            whole = alias or isinstance(value, ast.Constant)
            if not whole and ast.unparse(take.take(value)) != f"_values[{take.first}]":
                raise ValueError("what is compared would be beside the program")
            touched = bound | used & take.plain
            take.known, take.plain, take.made = take.known - bound, take.plain - touched, take.made | touched
            take.made -= bound if alias else set()
            calls.append(step)
        else:
            raise ValueError("the program is asked in a loop or a function")
    # The tests' own statements run beside the program, but for those that are needed where values are compared.
    variables = set().union(*own.values())
    need = variables & set().union(*(names_of(text)[0] for _, text in checks if text not in own))
    while more := set().union(*(names for names in own.values() if names & need)) - need:
        need |= more
    if not take.first or any(names_of(text)[0] & need for _, text in calls if text not in own):
        raise ValueError("there are no asserts, or the program could find what is expected in a variable")
    calls = [step for step in calls if not own.get(step[1], set()) & need]
    checks = [step for step in checks if step[1] not in own or own[step[1]] & need]
    roots = take.known | variables | {*MODULES}
    for node in [node for _, text in checks for node in ast.walk(ast.parse(text))]:
        word, begin = getattr(node, "attr", getattr(node, "id", "")), path_of(node)[-1]
        found = isinstance(begin, ast.Name) and begin.id in roots
        runs = word in RUN and word not in variables and not (word == "compile" and isinstance(node, ast.Attribute))
        lacks = isinstance(node, ast.Attribute) and not found and word not in ATTRIBUTES
        if isinstance(node, ast.ClassDef) or word.startswith("__") or runs or lacks:
            raise ValueError("more than plain data would be compared")
    # For tests that lean on the program's imports.
    return Asserts(calls, [["exec", f"import {', '.join(MODULES)}"], *checks])


def code_kind(text: str | None, answer: JsonObject, sandbox: Sandbox, seconds: float) -> str:
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
    passed = kind == "done" and held == json.dumps([True] * sum(mode == "eval" for mode, _ in asserts.checks)).encode()
    return "correct" if passed else "timeout" if kind == "timeout" else "wrong"
