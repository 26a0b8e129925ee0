"""Mend a bug of docs/find_the_bug.md in a copy of its file, until all tests of the file pass.

    python lab/exercises.py 7             # puts bug 7 into runs/exercises/7/losses.py, and waits for your mend
    python lab/exercises.py 7 --check     # the same without waiting: right, or one more hint

The page is the one list of bugs. The file itself stays as it is: its tests import the copy in its place. To begin
again, delete the folder.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "find_the_bug.md"
FOLDER = ROOT / "runs" / "exercises"
FOLD = r"<details><summary>{}</summary>\n\n"
BUG = r"\*\*(\d+)\*\* (.*?)\n" + FOLD.format("Hint") + r"(.*?)\n</details>\n"
BUG += FOLD.format("Line") + r"```diff\n(.*?)```\n(.*?) `(test_\w+)`\n"


class Exercise(NamedTuple):
    """A bug of the page."""

    number: str
    symptom: str
    hint: str
    file: Path  # in the repository
    right: str  # lines of the file
    wrong: str  # what they are with the bug
    answer: str
    test: str  # of the lesson, fails with the bug

    @property
    def copy(self) -> Path:
        """The file with the bug, for the reader to mend."""
        return FOLDER / self.number / self.file.name

    @property
    def lesson(self) -> str:
        """The tests of the file."""
        return f"tests/test_{self.file.name}"

    @property
    def text(self) -> str:
        """The text of the file with the bug."""
        return self.file.read_text().replace(self.right, self.wrong)


def read_page() -> dict[str, Exercise]:
    """The exercises by their numbers."""
    page = PAGE.read_text()
    files = [ROOT / name for name in re.findall(r"`(\w+\.py)`", page)]
    exercises = {}
    for number, symptom, hint, diff, answer, test in re.findall(BUG, page, re.DOTALL):
        right = "".join(re.findall(r"^-(.*\n)", diff, re.MULTILINE))
        wrong = "".join(re.findall(r"^\+(.*\n)", diff, re.MULTILINE))
        (file,) = [file for file in files if file.read_text().count(right) == 1]
        exercises[number] = Exercise(number, symptom, hint, file, right, wrong, answer, test)
    return exercises


def begin(exercise: Exercise) -> None:
    """Writes the copy with the bug, unless there is one already."""
    if exercise.copy.exists():
        return
    exercise.copy.parent.mkdir(parents=True, exist_ok=True)
    exercise.copy.write_text(exercise.text)


def passes(exercise: Exercise) -> bool:
    """Whether the test passes on the copy, and then the whole lesson, which sees a mend that breaks something else. If
    not, prints the end of what pytest says."""
    module = exercise.file.stem
    folder = str(exercise.copy.parent)
    # The copy is imported first, so that the tests get it wherever they look for the file.
    start = f"import sys; sys.path.insert(0, {folder!r}); import {module}, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    for tests in (f"{exercise.lesson}::{exercise.test}", exercise.lesson):
        result = subprocess.run(
            [sys.executable, "-c", start, "-x", "--tb=short", tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if result.returncode:
            print(result.stdout[-3000:])
            return False
    return True


def hint(exercise: Exercise) -> str:
    """The next one, from vague to plain; tries.txt keeps count."""
    above, _, _ = exercise.file.read_text().partition(exercise.right)
    line = above.count("\n") + 1
    hints = [
        exercise.hint,
        f"it begins within ten lines of line {round(line, -1)}",
        f"it begins in line {line}",
        f"this is right:\n{exercise.right}",
    ]
    tries = exercise.copy.with_name("tries.txt")
    with tries.open("a") as file:
        file.write("again\n")
    count = tries.read_text().count("\n")
    return hints[min(count, len(hints)) - 1]


def check(exercise: Exercise) -> bool:
    """Prints whether the mend is right, or a hint; no hint before the copy has changed."""
    right = passes(exercise)
    if right:
        print(f"Right: {exercise.lesson} passes. {exercise.answer} The page has:\n{exercise.right}")
    elif exercise.copy.read_text() == exercise.text:
        print(f"Not yet. Nothing has changed in {exercise.copy}: mend it there.")
    else:
        print(f"Not yet. The bug in {exercise.copy}: {hint(exercise)}")
    return right


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 right, 1 not yet, 2 bad input."""
    exercises = read_page()
    says, commands, _ = __doc__.split("\n\n")
    parser = argparse.ArgumentParser("exercises.py", usage=commands.strip(), description=says)
    parser.add_argument("number", nargs="?", choices=exercises, metavar="NUMBER", help=f"1 to {len(exercises)}")
    parser.add_argument("--check", action="store_true", help="do not wait: right, or one more hint")
    args = parser.parse_args(argv)
    if args.number is None:
        print(says, commands, sep="\n")
        return 0
    if not find_spec("pytest"):
        parser.error("the tests need pytest: pip install pytest")
    exercise = exercises[args.number]
    begin(exercise)
    if args.check:
        return 0 if check(exercise) else 1
    if passes(exercise):
        print(f"{exercise.copy} is mended: {exercise.lesson} passes. To begin again, delete {exercise.copy.parent}.")
        return 0
    print(f"{exercise.copy} has a bug. {exercise.symptom}")
    try:
        while True:
            input("Mend it there, then press Enter (Ctrl-C ends). ")
            if check(exercise):
                return 0
    except (EOFError, KeyboardInterrupt):
        print(f"\nGo on with: python lab/exercises.py {exercise.number} --check")
        return 1


if __name__ == "__main__":
    sys.exit(main())
