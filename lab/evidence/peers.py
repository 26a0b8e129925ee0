"""Other trainers under conformance.py: record one, or print the table of lab/conformance.md.

    PYTHONPATH=FOLDER_OF_THE_WHEEL:FOLDER_OF_THE_ADAPTER python lab/evidence/peers.py trl_adapter:Adapter "TRL 1.16.0"
    python lab/evidence/peers.py

An adapter says in its docstring which flags of its trainer it stands for; lab/conformance.md names the commit that has
those of the table. lab/results/peers.json has the date and the verdict of each case, for each trainer. In the table =
agrees, · is not offered, and cases with equal verdicts share a row.
"""

import importlib
import json
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "law")]
from lab import conformance

RESULTS = ROOT / "lab" / "results" / "peers.json"


def record(adapter: str, trainer: str) -> None:
    """Put the cases to an adapter and keep its verdicts."""
    module, name = adapter.split(":")
    kind = getattr(importlib.import_module(module), name)
    verdicts = {row.case: f"{row.verdict} {row.detail}".strip() for row in conformance.check(kind())}
    results = json.loads(RESULTS.read_text())
    results[trainer] = {"date": date.today().isoformat(), "flags": kind.__doc__, "verdicts": verdicts}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def cell(verdict: str) -> str:
    """A verdict in few words."""
    if verdict == "not offered":
        return "·"
    if verdict == "agrees":
        return "="
    return verdict.removeprefix("another definition: ").removeprefix("differs ").removeprefix("error ")


def table(results: dict) -> str:
    """Markdown: a row for each set of cases with equal verdicts, where somebody does not agree."""
    trainers = list(results)
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in results[trainers[0]]["verdicts"]:
        cells = tuple(cell(results[trainer]["verdicts"][case]) for trainer in trainers)
        rows.setdefault(cells, []).append(case)
    lines = ["|".join(["", "", *trainers, ""]), "|---" * (len(trainers) + 1) + "|"]
    for cells, cases in rows.items():
        if set(cells) - {"=", "·"}:
            lines.append("|".join(["", "; ".join(cases), *cells, ""]))
    total = len(results[trainers[0]]["verdicts"])
    for label, kind in ("agree", "agrees"), ("not offered", "not offered"):
        counts = [list(results[trainer]["verdicts"].values()).count(kind) for trainer in trainers]
        lines.append("|".join(["", f"of {total} cases {label}", *map(str, counts), ""]))
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        record(*sys.argv[1:])
    else:
        print(table(json.loads(RESULTS.read_text())))
