"""Each concept file can be copied alone: it imports in an empty folder, with its declared packages only."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each file imports, beside the standard library: when it is imported | inside a function that needs it.
DECLARED = {
    "pipeline_rl": ({"torch"}, {"safetensors", "vllm"}),
    "losses": ({"torch"}, set()),
    "filters": ({"torch"}, set()),
    "length_control": ({"torch"}, set()),
    "fp32_head": ({"torch"}, set()),
    "fit_sigmoid": ({"numpy", "scipy"}, {"matplotlib"}),
}
CONCEPTS = [name for name in DECLARED if (ROOT / f"{name}.py").exists()]
# Helpers of up to five lines that stand in two files under different names.
TWINS = [("losses", "_has_variance", "filters", "has_variance")]


def imported_packages(tree: ast.AST) -> set[str]:
    """Top-level names of all packages that the nodes below `tree` import."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").split(".")[0] if node.level == 0 else ".")
    return found - set(sys.stdlib_module_names)


def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text())


def code_of(function: ast.FunctionDef) -> list[str]:
    """The statements of a function without its docstring, comments and layout."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return [ast.unparse(statement) for statement in body]


def test_the_files_of_this_concept_exist():
    assert {"losses", "filters"} <= set(CONCEPTS)


@pytest.mark.parametrize("name", CONCEPTS)
def test_imports_what_it_declares(name):
    """At import the declared packages, inside functions also the optional ones, and all of these; no file of ours."""
    at_import, inside = DECLARED[name]
    tree = parse(name)
    assert imported_packages(tree) == at_import | inside
    for node in ast.walk(tree):  # what stands inside functions may be optional; drop it and look at the rest
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [ast.Pass()]
    assert imported_packages(tree) == at_import


@pytest.mark.parametrize("name", CONCEPTS)
def test_imports_alone_in_an_empty_folder(name, tmp_path):
    """Isolated Python (-I: neither the current folder nor PYTHONPATH), the file's copy alone on the path. It must
    import without output and without leaving a file behind.
    """
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name} as m; "
        f"assert m.__file__.startswith({str(tmp_path)!r}) and m.__doc__; "
        f"assert not ({ {p.stem for p in ROOT.glob('*.py')} - {name}!r} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.py"]


def test_helpers_that_stand_in_two_files_agree():
    """Same name in two concept files: same code, up to five lines. So for the pairs of TWINS."""
    functions: dict[str, dict[str, list[str]]] = {}
    for name in CONCEPTS:
        for node in parse(name).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                functions.setdefault(node.name, {})[name] = code_of(node)
    for helper, copies in functions.items():
        if len(copies) > 1:
            assert len({tuple(code) for code in copies.values()}) == 1, f"{helper} differs between {sorted(copies)}"
            assert len(next(iter(copies.values()))) <= 5, f"{helper} is too long to stand in {sorted(copies)}"
    for file, helper, other_file, other_helper in TWINS:
        code, other = functions[helper][file], functions[other_helper][other_file]
        assert code == other and len(code) <= 5
