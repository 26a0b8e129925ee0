"""The README and the module docstrings say what is so: snippets run, flags and files exist."""

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest

from runtime import flags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_snippets_print_what_they_say():
    """A `print(...)  # value` line of a snippet prints that value."""
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert snippets
    for code in snippets:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "README.md", "exec"), {})
        said = re.findall(r"print\(.*\)\s+# (.*)", code)
        assert out.getvalue().split("\n")[:-1] == said


def test_every_flag_named_exists():
    """`--name` in the README is a flag of train.py or of the other programs that it shows."""
    known = set(flags.DEFAULTS)
    others = set(re.findall(r"--([\w-]+)", (ROOT / "fit_sigmoid.py").read_text()))
    for tool in ("supervised_control.py", "ablate.py"):
        others |= set(re.findall(r"--([\w-]+)", (ROOT / "tools" / tool).read_text()))
    others |= {"config_file", "num_processes", "standalone", "nproc_per_node"}  # launchers of accelerate and torch
    others |= {"head", "node-ip-address", "num-gpus", "address"}  # ray
    named = set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", README))
    assert named - known - others <= {"help"}


def test_commands_have_flags_that_can_work(monkeypatch, tmp_path):
    """Every `train.py` command of the README passes all checks that come before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^(?!ray).*\btrain\.py ((?:.*\\\n)*.*)$", "\n".join(re.findall(r"```\n(.*?)```", README, re.S)), re.M)
    assert len(commands) >= 3
    for command in commands:
        parsed = flags.parse_flags(command.replace("\\\n", " ").split(), "")
        flags.check_flags(parsed)
        flags.engine_options(parsed)


def test_every_file_named_exists():
    """Files in backquotes that look like ours are there, and so is the picture."""
    names = set(re.findall(r"`((?:tools/|tests/|docs/)?\w+\.(?:py|txt|toml))`", README))
    assert names and all((ROOT / name).exists() for name in names)
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).exists()


@pytest.mark.parametrize("module", ["losses", "filters", "length_control", "pipeline_rl"])
def test_docstring_examples(module):
    """The examples that stand as doctests in the module docstrings."""
    found = doctest.testmod(importlib.import_module(module))
    assert found.failed == 0


def test_every_choice_has_its_number_in_the_code():
    """The numbers of the table of choices, each once, are those that stand in the source."""
    table = re.findall(r"^\| ([A-Z]\d) \|", README, re.M)
    source = "".join(file.read_text() for file in ROOT.glob("*.py"))
    assert len(table) == len(set(table)) > 10
    assert set(table) == set(re.findall(r"\b[LFTHOP]\d\b", source))
