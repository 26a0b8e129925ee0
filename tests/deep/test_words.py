"""Pages and the files at the top call one thing by one word: CONTRIBUTING.md has the list, docs/one_group.md the
meanings."""

import re

import pytest
from test_house import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.py")]
PAGES += [ROOT / "lab" / "ladder" / "README.md", ROOT / "lab" / "experiments.md"]
LIST = re.search(r"^## Words\n.*?(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)[0]
# Each with the file that may name it, or nothing.
FORBIDDEN = [
    pair
    for cell in re.findall(r"\| ([^|]*) \|$", LIST, re.M)[1:]
    for pair in re.findall(r"([\w-]+)(?: \((.*?)\))?", cell)
]


def forbidden_words(text: str, name: str) -> list[str]:
    """Those of the list that the file `name` says, in its plural too; what stands in backquotes is another's name."""
    text = re.sub(r"`[^`\n]*`", "", text.replace(LIST, ""))
    case = re.I if name.endswith(".md") else re.NOFLAG  # `Sequence` is a type in code
    forms = {word: word.removesuffix("y") + "(y|ies|s)?" for word, but in FORBIDDEN if name != but}
    return [word for word, form in forms.items() if re.search(rf"(?<![\w.-]){form}(?!\w|\.\w|-)", text, case)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_says_a_forbidden_word(path):
    assert forbidden_words(path.read_text(), path.name) == []


def test_the_list_finds_what_it_forbids():
    assert ("trajectory", "") in FORBIDDEN and ("sequence", "losses.py") in FORBIDDEN and len(FORBIDDEN) >= 8
    assert forbidden_words("Its responses, and one trajectory.", "README.md") == ["response", "trajectory"]
    assert forbidden_words("One sequence", "README.md") == ["sequence"]
    assert forbidden_words("One sequence, `trajectory`", "losses.py") == []


def test_the_glossary_is_short():
    """Twelve lines, the words of the list that stand in a batch among them."""
    glossary = (ROOT / "docs" / "one_group.md").read_text().partition("```")[0]
    words = re.findall(r"^\| (?!word |-)([^|]+) \|", glossary, re.M)
    assert len(words) == 12 and {"completion", "rollout", "row", "lag"} <= set(words)
