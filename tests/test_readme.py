"""The README, the pages of docs/ and the module docstrings say what is so: snippets run; flags, files and tests that are
named exist; every bug to be found is one line away from the code."""

import contextlib
import doctest
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

from runtime import flag_checks, flags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]}
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)  # (language, what is in it)


def test_python_snippets_print_what_they_say():
    """A `print(...)  # value` line of a snippet prints that value."""
    snippets = [code for language, code in BLOCKS if language == "python"]
    assert snippets
    for code in snippets:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "README.md", "exec"), {})
        said = re.findall(r"print\(.*\)\s+# (.*)", code)
        assert out.getvalue().split("\n")[:-1] == said


def test_every_flag_named_exists():
    """`--name` in a page is a flag of train.py or of the other programs that it shows."""
    known = set(flags.DEFAULTS)
    for program in (
        path for folder in ("", "tools/", "evidence/", "tests/gpu/") for path in ROOT.glob(f"{folder}*.py")
    ):
        known |= set(re.findall(r"--([\w-]+)", program.read_text()))
    known |= {"config_file", "num_processes", "main_process_port"}  # accelerate's launcher
    known |= {"standalone", "nnodes", "rdzv_backend", "master_addr", "master_port", "nproc_per_node"}  # torch's
    known |= {"head", "node-ip-address", "num-gpus", "address"}  # ray
    named = set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", TEXT))
    assert named - known <= {"help"}


def test_commands_have_flags_that_can_work(monkeypatch, tmp_path):
    """Every `train.py` command of a page passes all checks that come before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    shell = "".join(code for language, code in BLOCKS if not language)
    commands = re.findall(r"^.*\btrain\.py ((?:.*\\\n)*.*)$", shell, re.M)
    assert len(commands) >= 4
    for command in commands:
        parsed = flags.parse_flags(shlex.split(command.replace("\\\n", " "), comments=True), "")
        flag_checks.check_flags(parsed)


def test_every_default_shown_is_the_default():
    """The reading table has a column of flags with their defaults."""
    rows = [row.split("|")[3] for row in README.splitlines() if row.startswith("| [") and row.count("|") == 5]
    shown = [pair for cell in rows for pair in re.findall(r"--(\w+) (\w[\w.]*)", cell)]
    assert len(shown) >= 8
    for name, text in shown:
        assert str(flags.DEFAULTS[name]).lower() == text, name


def test_every_file_named_exists():
    """Files in backquotes that look like ours are there."""
    for path, text in PAGES.items():
        folder = "(?:tools/|evidence/|tests/|docs/|runtime/|tasks/|configs/)?"
        names = set(re.findall(rf"`({folder}\w+\.(?:py|txt|toml|yaml|md))`", text))
        assert all((ROOT / name).exists() or (path.parent / name).exists() for name in names), (path, names)


@pytest.mark.parametrize(
    "module", ["losses", "masks", "filters", "length_control", "pipeline_rl", "fit_power_law", "isocompute"]
)
def test_docstring_examples(module):
    """The examples that are doctests in the module docstrings."""
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted and found.failed == 0


def test_every_choice_has_its_number_in_the_code():
    """The numbers of the table of choices, each once, are those in the source."""
    table = re.findall(r"^\| ([A-Z]\d) \|", (ROOT / "docs" / "choices.md").read_text(), re.M)
    files = [file for pattern in ("*.py", "runtime/*.py", "tasks/*.py") for file in ROOT.glob(pattern)]
    source = "".join(file.read_text() for file in files)
    assert len(table) == len(set(table)) > 10
    assert set(table) == set(re.findall(r"\b[LFTHOP]\d\b", source))


@pytest.mark.parametrize("name", ["traps.md", "find_the_bug.md"])
def test_every_test_named_exists(name):
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGES[ROOT / "docs" / name])
    assert len(named) >= 25
    assert [test for test in named if f"def {test}(" not in tests] == []


def test_every_bug_is_a_change_of_the_code_as_it_is():
    text = PAGES[ROOT / "docs" / "find_the_bug.md"]
    bugs = re.findall(r"```diff\n(.*?)```", text, re.S)
    assert len(bugs) == 25
    source = "".join((ROOT / name).read_text() for name in sorted(set(re.findall(r"`(\w+\.py)`", text))))
    for bug in bugs:
        removed = [line[1:] for line in bug.splitlines() if line.startswith("-")]
        assert removed and source.count("\n".join(removed) + "\n") == 1, bug
