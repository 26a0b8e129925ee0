"""Puts the cases of conformance.py to every trainer whose wheel or source lies in a folder, and prints a table.

    python lab/adapters/score.py FOLDER            the table; what could not be asked, and why, on the error stream
    python lab/adapters/score.py FOLDER --write    also into conformance.md; what deviates goes into verdicts.json

FOLDER is filled by `pip download --no-deps` and by `git archive`, as conformance.md says. One number a verdict:

    agrees (or what the papers leave open) / another definition / differs or error / not offered / not asked
"""

import datetime
import functools
import importlib
import json
import sys
from pathlib import Path

LAB = Path(__file__).resolve().parents[1]
sys.path[0] = str(LAB.parent)  # not this folder
from lab import conformance
from lab.adapters import sources

PAGE = LAB / "conformance.md"
BEGIN, END = "<!-- begin: score.py -->\n", "<!-- end: score.py -->"
HEAD = "|trainer|version|" + "|".join(["recipe", "other", "robustness", "recipe, default", "other, default"])


def counts(rows: list[conformance.Row], kind: str) -> str:
    """The five numbers of a class."""
    numbers = [0] * 5
    for row in rows:
        if row.kind == kind:
            if row.verdict == "agrees" or row.verdict.removeprefix("another definition: ") in conformance.OPEN:
                numbers[0] += 1
            elif row.verdict in conformance.NOT_ANSWERED:
                numbers[3 + conformance.NOT_ANSWERED.index(row.verdict)] += 1
            else:
                numbers[1 if row.verdict.startswith("another") else 2] += 1
    return "/".join(map(str, numbers))


def deviations(rows: list[conformance.Row]) -> str:
    """Those of the recipe: which other definitions, and the cases that differ."""
    names = {}
    for row in rows:
        if row.kind == "recipe" and conformance.is_deviation(row):
            names[row.verdict.split(": ", 1)[-1] if row.verdict.startswith("another") else row.case] = None
    return "; ".join(names)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 without a folder, or where --write lacks a trainer. A trainer that cannot be asked is a line,
    and the others go on."""
    if not argv or not Path(argv[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    sources.FOLDER = Path(argv[0])
    conformance.all_cases = functools.cache(conformance.all_cases)
    trainers = 0
    table, verdicts = [HEAD + "|deviations in the recipe, nearest|", "|" + "---|" * 8], {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in ("score", "sources"):
            continue
        trainers += 1
        try:
            adapter = importlib.import_module(f"lab.adapters.{path.stem}").Adapter()
        except (Exception, SystemExit) as error:
            print(f"{path.stem}: not asked ({type(error).__name__}: {error})", file=sys.stderr)
            continue
        source = adapter.source
        if source.note:
            print(f"{path.stem}: {source.path.name}: {source.note}", file=sys.stderr)
        asked = {}
        for adapter.settings in ("nearest", "default"):
            asked[adapter.settings] = conformance.check(adapter)
        nearest, default = asked["nearest"], asked["default"]
        cells = [path.stem, f"{source.version} {source.note}".strip()]
        cells += [counts(nearest, kind) for kind in conformance.CLASSES]
        cells += [counts(default, "recipe"), counts(default, "other"), deviations(nearest)]
        table.append(f"|{'|'.join(cells)}|")
        verdicts[path.stem] = {"version": source.version} | {
            settings: {
                row.case: f"{row.verdict} {row.detail}".strip()
                for row in rows
                if row.verdict not in ("agrees", *conformance.NOT_ANSWERED)
            }
            for settings, rows in asked.items()
        }
    text = "\n".join(table)
    print(text)
    if "--write" in argv and len(verdicts) < trainers:
        print("nothing is written: that needs every trainer", file=sys.stderr)
        return 2
    if "--write" in argv:
        date = f"{datetime.date.today():%d %B %Y}"
        page = PAGE.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{date}:\n\n{text}\n{END}{after}")
        lines = json.dumps({"date": date} | verdicts, ensure_ascii=False, indent=1)
        (Path(__file__).parent / "verdicts.json").write_text(lines + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
