"""What the pages name is there and can work: files, links and their anchors, targets, flags, commands, snippets."""

import base64
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from test_house import CORE, MODULES, ROOT

from runtime import flags

PAGES = {path: path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/**/*.md")]}
GUIDES = {
    path: text for path, text in PAGES.items() if path.name not in ("CHANGELOG.md", "RESULTS.md", "BENCHMARKS.md")
}
GUIDES = {path: text for path, text in GUIDES.items() if path.parent.name != "results"}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", "\n".join(GUIDES.values()), re.M | re.S)  # (language, what is in it)
MINE = next(code for language, code in BLOCKS if language == "py" and "def starts_right(" in code)  # the user's own


def test_python_snippets_print_what_they_say():
    """A `print(...)  # value` line of a snippet prints that value."""
    snippets = [code for language, code in BLOCKS if language == "python"]
    assert snippets
    for code in snippets:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, "README.md", "exec"), {})
        assert output.getvalue().splitlines() == re.findall(r"print\(.*\)\s+# (.*)", code)


def test_commands_have_flags_that_can_work(monkeypatch, tmp_path):
    """Every `train.py` command of a page passes all checks that come before anything is loaded; README's own reward is
    there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mine.py").write_text(MINE)
    shell = "".join(code for language, code in BLOCKS if not language)
    commands = re.findall(r"^.*\btrain\.py ((?:.*\\\n)*.*)$", shell, re.M)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command.replace("\\\n", " ").replace("...", "").split(";")[0], comments=True)
        if "--resume" not in words:
            flags.check_flags(flags.parse_flags(words, ""))
    sys.modules.pop("mine", None)


OTHERS = "config_file num_processes main_process_port standalone nnodes rdzv_backend master_addr master_port "
OTHERS += "nproc_per_node head node-ip-address num-gpus address help no-deps index-url ignore"  # of accelerate, torch, Ray and pip


def test_every_flag_named_exists():
    known = {*flags.DEFAULTS, *OTHERS.split()}
    for path in [*MODULES.values(), *ROOT.glob("lab/tests/gpu/*.py")]:
        known |= set(re.findall(r'"--([\w-]+)"', path.read_text()))
    named = {path.name: set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)) - known for path, text in GUIDES.items()}
    assert {name: unknown for name, unknown in named.items() if unknown} == {}


def targets(folder: Path) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (folder / "Makefile").read_text(), re.M))


def test_every_file_and_target_named_exists():
    """Files in backquotes that look like ours, and `make` targets."""
    core, lab = targets(ROOT), targets(ROOT / "lab")
    shell = (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"^make ([a-z][\w-]*)", shell, re.M)) <= core
    assert set(re.findall(r"^make -C lab ([a-z][\w-]*)", shell, re.M)) <= lab
    missing = []
    for path, text in GUIDES.items():
        pattern = r"`((?:(?:lab|tests|docs|runtime|tasks|configs)/)?(?:\w+/)?\w+\.(?:py|txt|toml|yaml|md))`"
        names = set(re.findall(pattern, text)) - {"mine.py"}  # the user's own
        missing += [
            f"{path.name}: {name}" for name in names if not ((ROOT / name).exists() or (path.parent / name).exists())
        ]
        missing += [
            f"{path.name}: make {name}"
            for name in set(re.findall(r"(?:^|`|\| )make ([a-z][a-z-]*)", text, re.M)) - core
        ]
        missing += [
            f"{path.name}: make -C lab {name}" for name in set(re.findall(r"make -C lab ([a-z][a-z-]*)", text)) - lab
        ]
    assert missing == []


def test_every_choice_has_its_number_in_the_code():
    """The numbers of the table of choices, each once, are those in the source."""
    table = re.findall(r"^\| ([A-Z]\d{1,2}) \|", (ROOT / "docs" / "choices.md").read_text(), re.M)
    source = "".join(MODULES[name].read_text() for name in CORE)
    assert len(table) == len(set(table)) > 10 and set(table) == set(re.findall(r"\b[LFTHOP]\d{1,2}\b", source))


def test_traps_and_bugs_are_those_of_the_code_as_it_is():
    """Every test that is named exists, and every bug is one change away from the code."""
    tests = "\n".join(path.read_text() for path in ROOT.glob("**/tests/**/test_*.py"))
    text = PAGES[ROOT / "docs" / "find_the_bug.md"]
    named = re.findall(r"`(test_\w+)`", PAGES[ROOT / "lab" / "traps.md"] + text)
    assert len(named) > 40 and [test for test in named if f"def {test}(" not in tests] == []
    source = "".join((ROOT / name).read_text() for name in set(re.findall(r"`(\w+\.py)`", text)))
    bugs = re.findall(r"```diff\n(.*?)```", text, re.S)
    for bug in bugs:
        removed = [line[1:] for line in bug.splitlines() if line.startswith("-")]
        assert removed and source.count("\n".join(removed) + "\n") == 1, bug
    assert len(bugs) > 10


def anchors(path: Path) -> set[str]:
    """The names in a page to which a link may lead: GitHub's of a heading, the `id`s of HTML."""
    text = path.read_text()
    if path.suffix == ".html":
        return set(re.findall(r'\bid="([^"]+)"', text))
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


def links(path: Path) -> list[str]:
    """The relative links of a page."""
    text = path.read_text()
    targets_named = re.findall(r"\]\(([^)\s]+)\)", text) if path.suffix == ".md" else []
    targets_named += re.findall(r'(?:href|src)="([^"{}$]+)"', re.sub(r"<script.*?</script>", "", text, flags=re.S))
    return [link for link in targets_named if not re.match(r"https?:|data:|mailto:", link)]


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("docs/*.html"), *ROOT.glob("lab/**/*.html")], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    """To a file, and in it to a heading."""
    dead = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_what_was_measured_is_not_called_unmeasured():
    """A paragraph that says "not measured" names none of the comparisons that are published."""
    headings = re.findall(r"^## (.*)$", PAGES[ROOT / "lab" / "results" / "comparisons.md"], re.M)
    topics = [heading.replace("-", " ") for heading in headings if "-" in heading]  # one word alone is too common
    assert "dynamic sampling" in topics
    for path, text in PAGES.items():
        for paragraph in re.split(r"\n\n|\n(?=\|)", text):
            if re.search(r"not (yet )?(been )?(measured|compared)", paragraph):
                assert not [topic for topic in topics if topic in paragraph.replace("-", " ").lower()], (
                    path,
                    paragraph,
                )


def test_each_script_that_a_page_names_starts():
    """`--help` of every `python FILE.py` says what it can do."""
    text = "\n".join(GUIDES.values())
    scripts = sorted(set(re.findall(r"python ((?:lab/)?[\w/]+\.py)", text)) - {"lab/trl_scalerl.py"})  # it needs TRL
    assert len(scripts) > 8

    def help_of(script: str) -> tuple[str, str]:
        done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
        said = done.stdout + done.stderr
        return script, said if "Traceback" in said or done.returncode not in (0, 1, 2) else ""

    with ThreadPoolExecutor(2) as pool:
        assert [pair for pair in pool.map(help_of, scripts) if pair[1]] == []


def test_the_first_page_is_short():
    assert len(PAGES[ROOT / "README.md"].split()) <= 1_400


def test_the_tour_shows_what_its_code_does():
    """`python lab/tour.py` stores the outputs, and a hash of the code that made them: of all but the first cell, which
    only fetches the repository. Pictures are of one width, and no warning names a folder of ours."""
    text = (ROOT / "tour.ipynb").read_text()
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells[1:])
    assert notebook["metadata"]["code"] == sha256(code.encode()).hexdigest(), "run python lab/tour.py"
    outputs = [output for cell in cells for output in cell["outputs"]]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    widths = [
        picture["metadata"].get("image/png", {}).get("width")
        or int.from_bytes(base64.b64decode(picture["data"]["image/png"])[16:20])  # of the PNG itself
        for picture in pictures
    ]
    assert len(widths) == 4 and len(set(widths)) == 1 and len(text) < 400_000
    assert {output.get("name") for output in outputs} == {None, "stdout"}
