"""One rung of the ladder from GRPO to ScaleRL: its diff, a question, a run, and its curve over that of the rung before.

python lab/ladder/run.py 3           # 0 is GRPO, 8 is recipe.py
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rungs import OUT, RUNGS, Row, climb, curves_of, published, section, source

NAMES = [section(rung).partition("\n")[0] for rung in range(len(RUNGS))]
AXES = {"tokens": "sampled tokens", "passes": "tokens through the model, ×3 where they train"}
MEASURES = {2: ("tokens", 0.25), 3: ("tokens", None), 4: ("passes", 0.5), 5: ("tokens", 0.9)}


def measure_of(rung: int) -> tuple[str, float | None]:
    """The compute over which the rung's change should show, and the pass rate to which it counts; None: the end."""
    return MEASURES.get(rung, ("tokens", 0.5))


def draw(rung: int, rows: Sequence[Row], path: Path, own: Sequence[Row] = ()) -> None:
    """The curves of the rung over those of the rung before, a thin line for each seed; a thick one for your run."""
    from matplotlib.figure import Figure

    (axis, rate), setting = measure_of(rung), RUNGS[rung]
    figure = Figure(figsize=(6, 3.4))
    axes = figure.subplots()
    axes.set(xlabel=AXES[axis], ylabel="pass rate", ylim=(0, 1), title=f"{setting}: rung {rung}, {NAMES[rung]}")
    lines = [(f"rung {rung - 1}, {NAMES[rung - 1]}", "C1--", 0.8, curves_of(rows, rung - 1, setting))]
    lines += [(f"rung {rung}, {NAMES[rung]}", "C0-", 0.8, curves_of(rows, rung, setting))]
    lines += [("your run", "C0-", 2.5, {0: own} if own else {})]
    for label, style, width, curves in lines:
        for curve in curves.values():
            x, y = ([row[key] for row in curve] for key in (axis, "pass_rate"))
            axes.plot(x, y, style, linewidth=width, label=label)
            label = None  # one line of the legend for all seeds
    if rate:
        axes.axhline(rate, color="0.7", linewidth=0.8, zorder=0)
    axes.legend(loc="best")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a rung that is not there."""
    parser = argparse.ArgumentParser("run.py", description=__doc__.split("\n")[0])
    names = ", ".join(f"{rung} {name}" for rung, name in enumerate(NAMES))
    parser.add_argument("rung", help=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="fewer than the setting's")
    args = parser.parse_args(argv)
    if args.rung not in map(str, range(len(RUNGS))):
        parser.error(f"there is no rung {args.rung!r}; the rungs are {names}")
    rung = int(args.rung)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    text = re.sub(r"^(```\w*|!\[.*)\n|\*\*", "", section(rung), flags=re.M)  # a terminal shows no Markdown
    before, _, answer = text.partition("<details><summary>Answer</summary>\n")
    if rung == 0:
        print(source(0))
    print(f"{rung}. {before}")
    if sys.stdin.isatty() and answer:
        input("Your answer? Enter runs it. ")
    own = climb(args.rung, RUNGS[rung], args.seed, steps=args.steps)
    path = OUT / f"rung_{rung}.png"
    draw(rung, published(), path, own)
    print(answer.replace("</details>", "").strip())
    print(f"\nYour curve{f' over those of rung {rung - 1} in this setting' if rung else ''}: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
