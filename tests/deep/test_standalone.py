"""Each concept file can be copied by itself: in an empty folder it imports its declared packages only, and as a script
it does its work there."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

# What each file imports, beside the standard library: when it is imported | inside a function that needs it.
DECLARED = {
    "pipeline_rl": (set(), set()),
    "vllm_engine": ({"torch"}, {"vllm"}),
    "losses": ({"torch"}, set()),
    "filters": ({"torch"}, set()),
    "length_control": ({"torch"}, set()),
    "fp32_head": ({"torch"}, set()),
    "fit_sigmoid": ({"numpy", "scipy"}, {"matplotlib"}),
}
CONCEPTS = list(DECLARED)
# What each file prints as a script, among other things.
PRINTED = {
    "pipeline_rl": "lag",
    "vllm_engine": "token_versions",
    "losses": "dapo  [7.39, 0.0]",
    "filters": "['b', 'c']",
    "length_control": "[0.0, -0.5, -1.0]",
    "fp32_head": "master  head, FP32 product True   0.008",
    "fit_sigmoid": "A 0.601",
}


def imported_packages(tree: ast.AST) -> set[str]:
    """Top-level names of all packages that the nodes below `tree` import."""
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or ".").split(".")[0] if node.level == 0 else ".")
    return packages - set(sys.stdlib_module_names)


def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text())


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


# Isolated Python (-I: neither the current folder nor PYTHONPATH, -B: no bytecode) with one folder on the path. The packages
# are imported once, since that takes seconds; then each script has a process of its own.
RUNNER = """
import importlib, json, os, runpy, sys
import matplotlib.figure, scipy.optimize, torch

for folder, name, arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.chdir(folder)
        log = os.open(folder + ".txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.path.insert(0, folder)
        module = importlib.import_module(name)
        assert module.__file__.startswith(folder) and module.__doc__
        assert not set(%r) - set(os.listdir(folder)) & {f"{module}.py" for module in sys.modules}
        print("imported", flush=True)
        sys.argv = [name + ".py", *arguments]
        try:
            runpy.run_path(module.__file__, run_name="__main__")
        except SystemExit as end:
            assert not end.code, end
        sys.stdout.flush()
        os._exit(0)  # the end of an interpreter that holds torch takes a second
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
""" % [path.name for path in ROOT.glob("*.py")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """{file: (exit code, what was printed, files in the folder at the end)}."""
    runs = []
    for name in CONCEPTS:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"{name}.py", folder)
        runs.append((str(folder), name, []))
    command = [sys.executable, "-I", "-B", "-c", RUNNER, json.dumps(runs)]
    codes = subprocess.check_output(command, text=True, timeout=240).split()
    results = {}
    for (folder, name, _), code in zip(runs, codes, strict=True):
        results[name] = int(code), Path(f"{folder}.txt").read_text(), {path.stem for path in Path(folder).iterdir()}
    return results


@pytest.mark.parametrize("name", CONCEPTS)
def test_works_alone_in_an_empty_folder(name, alone):
    """It imports without output, imports nothing of ours and leaves no file behind; as a script it prints and ends with 0."""
    code, printed, files = alone[name]
    assert code == 0 and printed.startswith("imported\n") and PRINTED[name] in printed, printed
    assert files == {name}


def test_every_concept_file_is_declared():
    others = {"train", "recipe", "generator", "torch_engine"}  # drivers, which need concept files beside them
    assert {path.stem for path in ROOT.glob("*.py")} == {*CONCEPTS, *others}
