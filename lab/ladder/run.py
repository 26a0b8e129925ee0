"""One rung of the ladder from GRPO to ScaleRL: its diff, a question, a run, and its curve over that of the rung before.

python lab/ladder/run.py 3           # 0 is GRPO, 8 is recipe.py
python lab/ladder/run.py all         # the page's tables from three seeds of your own: twenty minutes on two idle cores
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence

from evidence import LEFT_OUT, TESTS, Run, best_rate, rows_in, trained, work
from publish import corrected, draw, ladder, outcomes, rates_of, setting_of, whole
from rungs import NAMES, OUT, SETTINGS, Row, section, source

OWN = (1, 2, 3)  # seeds of `all`: none of them is published
# What runs in the ladder's files, beside another run: not what is measured in seconds, and not by train.py's flags.
QUICK = [test for test in TESTS if test.setting in SETTINGS and test.setting != "alone" and test not in LEFT_OUT]


def waiting(rows: Sequence[Row]) -> Iterator[Run]:
    """What `all` still lacks: each side at its best published rate."""
    made = {(row["side"], row["setting"], row["rate"], row["seed"]) for row in rows}
    runs = {}
    for test in QUICK:
        for side, rate in zip((test.before, test.after), rates_of(rows, test), strict=True):
            runs[side, test.setting, rate] = None
    for seed in OWN:
        for run in runs:
            if (*run, seed) not in made:
                yield *run, seed


def every_rung() -> None:
    """Makes the runs, says how many are left, and prints the tables."""
    folder = OUT / "all"
    left = len(list(waiting(rows_in(folder))))
    print(f"{left} runs, two at once, in {os.path.relpath(folder)}; if you stop it, it goes on there", flush=True)
    work(waiting, folder, at_once=2)
    rows = rows_in(folder)
    results = outcomes(rows, OWN, QUICK)
    ps = corrected(results)
    print(f"\n{whole(rows, results, ps)}\n\n{ladder(rows, results, ps)}")


def one_rung(rung: int, seed: int, rate: float | None, steps: int | None) -> None:
    """The diff and the question, a run, the answer and the picture."""
    text = re.sub(r"^(```\w*|!\[.*)\n|\*\*", "", section(rung), flags=re.M)  # a terminal shows no Markdown
    before, _, answer = text.partition("<details><summary>Answer</summary>\n")
    if rung == 0:
        print(source(0))
    print(f"{rung}. {before}")
    if sys.stdin.isatty() and answer:
        input("Your answer? Enter runs it. ")
    rows, setting = rows_in(), setting_of(rung)
    own = trained(str(rung), setting, seed, rate or best_rate(rows, setting, str(rung)), steps)
    path = OUT / f"rung_{rung}.png"
    draw(rung, rows, path, rate, own)
    print(answer.replace("</details>", "").strip())
    print(f"\nYour curve{f' over those of rung {rung - 1} in this setting' if rung else ''}: {os.path.relpath(path)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a rung, a rate or a seed that is not there."""
    parser = argparse.ArgumentParser("run.py", description=__doc__.split("\n")[0])
    names = ", ".join(f"{rung} {name}" for rung, name in enumerate(NAMES))
    parser.add_argument("rung", help=f"{names}; all: all of them, with three seeds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="times the setting's learning rate; without it the rung's best one")
    parser.add_argument("--steps", type=int, help="fewer than the setting's")
    args = parser.parse_args(argv)
    if args.rung not in (*map(str, range(len(NAMES))), "all"):
        parser.error(f"there is no rung {args.rung!r}; the rungs are {names}, and all")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be at least 0 and below 2**63, not {args.seed}")
    if args.rate is not None and not 0 < args.rate <= 16:
        parser.error(f"--rate must be above 0 and at most 16, not {args.rate}")
    if args.rung == "all" and (args.seed, args.rate, args.steps) != (0, None, None):
        parser.error("all takes no --seed, --rate or --steps: its seeds are 1, 2 and 3, its rates the best ones")
    if args.rung == "all":
        every_rung()
    else:
        one_rung(int(args.rung), args.seed, args.rate, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
