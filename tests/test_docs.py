"""docs/: every test that is named there exists, and every bug to be found is one line away from the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("name", ["traps.md", "find_the_bug.md"])
def test_every_test_named_exists(name):
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / name).read_text())
    assert len(named) >= 25
    assert [test for test in named if f"def {test}(" not in TESTS] == []


def test_every_bug_is_a_change_of_the_code_as_it_is():
    text = (ROOT / "docs" / "find_the_bug.md").read_text()
    bugs = re.findall(r"```diff\n(.*?)```", text, re.S)
    assert len(bugs) == 25
    source = "".join((ROOT / name).read_text() for name in sorted(set(re.findall(r"`(\w+\.py)`", text))))
    for bug in bugs:
        removed = [line[1:] for line in bug.splitlines() if line.startswith("-")]
        assert removed and source.count("\n".join(removed) + "\n") == 1, bug
