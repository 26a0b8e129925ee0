"""Each concept file can be copied by itself: in an empty folder it imports its declared packages only, and as a script
it does its work there."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent

# What each file imports, beside the standard library: when it is imported | inside a function that needs it.
DECLARED = {
    "pipeline_rl": ({"torch"}, {"safetensors", "vllm"}),
    "losses": ({"torch"}, set()),
    "filters": ({"torch"}, set()),
    "length_control": ({"torch"}, set()),
    "fp32_head": ({"torch"}, set()),
    "fit_sigmoid": ({"numpy", "scipy"}, {"matplotlib"}),
    "fit_power_law": ({"numpy", "scipy"}, {"matplotlib"}),
    "isocompute": ({"numpy", "scipy"}, {"matplotlib"}),
}
CONCEPTS = list(DECLARED)
# What each file prints as a script, among other things; the fits are asked for --help.
PRINTED = {
    "pipeline_rl": "lag",
    "losses": "1.667",
    "filters": "['b', 'c']",
    "length_control": "[0.0, -0.5, -1.0]",
    "fp32_head": "master  head, FP32 product True   0.008",
    "fit_sigmoid": "usage:",
    "fit_power_law": "usage:",
    "isocompute": "usage:",
}


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
def test_works_alone_in_an_empty_folder(name, tmp_path):
    """Isolated Python (-I: neither the current folder nor PYTHONPATH) with only the file's copy on the path. It must
    import without output, import nothing of ours and leave no file behind; then, as a script, print and end with 0.
    """
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    others = {p.stem for p in ROOT.glob("*.py")} - {name}
    code = f"""
import runpy, sys
sys.path.insert(0, {str(tmp_path)!r})
import {name} as module
assert module.__file__.startswith({str(tmp_path)!r}) and module.__doc__ and not {others!r} & set(sys.modules)
print("imported", flush=True)
sys.argv = ["{name}.py", *{["--help"] if PRINTED[name] == "usage:" else []}]
runpy.run_path(module.__file__, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("imported\n") and PRINTED[name] in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.py"]


@pytest.mark.parametrize(
    ("name", "arguments", "table", "printed"),
    [
        (  # L = X^-K / 2, K = .1 and .15: K_max .3 and N0 twice the smaller size
            "fit_power_law", ["--x", "samples"],
            ["N,samples,pass_rate", *(f"{n}B,{x},{1 - x**-k / 2}" for n, k in ((1, 0.1), (2, 0.15)) for x in (1, 2, 4, 8))],
            "K_max  0.3000",
        ),
        (  # n = 4 is better below C = 205, n = 16 above
            "isocompute", ["--budget", "700"],
            ["B_p,n,step,pass_rate",
             *(f"1,{n},{m},{top * m * n / (m * n + mid)}" for n, top, mid in ((4, 0.5, 20), (16, 0.9, 200)) for m in range(1, 200))],
            "n = 16 rollouts, B_p = 1 prompts, M = 43 updates",
        ),
    ],
)  # fmt: skip
def test_the_laws_read_a_csv_in_an_empty_folder(name, arguments, table, printed, tmp_path):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "runs.csv").write_text("\n".join(table))
    command = [sys.executable, "-I", "-B", f"{name}.py", "runs.csv", *arguments, "--plot", "out.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{name}.py", "out.png", "runs.csv"])


def test_helpers_of_the_same_name_agree():
    """A helper of up to five lines may stand in two concept files; then its copies have the same code."""
    functions: dict[str, dict[str, list[str]]] = {}
    for name in CONCEPTS:
        for node in parse(name).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                functions.setdefault(node.name, {})[name] = code_of(node)
    for helper, copies in functions.items():
        if len(copies) > 1:
            assert len({tuple(code) for code in copies.values()}) == 1, f"{helper} differs between {sorted(copies)}"
            assert len(next(iter(copies.values()))) <= 5, f"{helper} is too long to stand in {sorted(copies)}"
