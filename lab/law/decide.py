"""Two decisions about runs that go on: which of them will be higher, and may one stop.

    python lab/law/decide.py runs/a runs/b --at 4x        # at four times the compute of the shorter one
    python lab/law/decide.py runs/a --at 2e6 --stop-at 0.03

WHO WINS AT C (`winner`). Each run has a place at C: its number (forecast.py) and, around it, the band of its curve; a
run that does not rise has its level and its range. A run wins if its number lies above every other by more than APART
of the two reaches between them, added as squares, since the errors are independent:

    a - b > APART sqrt((a - low of a)^2 + (high of b - b)^2)

The rule was chosen on some public curves and run once on 105 others. Of pairs that really differ it named, at a quarter
of the compute, 36 winners of 68 on validation curves, none wrong, and 25 of 84 on training rewards, one wrong. In one
large repository 8 % of its training winners were wrong: so it says "in nine of ten cases". On validation curves bands
lay wholly apart, which was asked for before, for 26 pairs of two repositories. `compare` of curves.py is the paper's
comparison instead: it waits until both ceilings are known. Where nobody wins, `parts_at` says from which compute on one
would, if each run went on along its best form.

MAY IT STOP (`stops`). A run may stop if the top of its band at the planned end lies at most a named gain above what it
has reached. A choice by somebody who pays, so the price is printed: what the rule saved and lost on public validation
curves. On 14 of them (the half of lab/results/public.md that was looked at) a gain of .03 saved 9 % of the compute and
lost .002 on average, .029 at worst (41 curves, 14 of them the same: 13 %, .003, .029); patience, which stops where
three evaluations are no better than the three before, saved 37 % and lost .031, .146 at worst.

SIMPLIFIED. More than two runs are not corrected for being many. A band says nothing of a run that will fall.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from curves import ERRORS, UNITS, short, span
from forecast import CurveReport, Forecast, as_it_goes, continued, curve

APART = 0.65  # by hand; from .4 to 1 the winners are hardly others
SHARES = tuple(k / 20 for k in range(21))  # of the way from now to the compute that is asked for
PROBLEMS = ("dataset", "task", "held_out", "rarity")  # flags that decide what is evaluated


def compute(text: str, ends: Sequence[float]) -> float:
    """`4x`, of the shorter run's compute, or a number. Raises ValueError."""
    value = float(text.removesuffix("x"))
    C = value * min(ends) if text.endswith("x") else value
    if not 0 < C < math.inf:
        raise ValueError(f"--at must be a compute above 0, such as 2e6 or 4x, not {text}")
    return C


def check_alike(reports: Sequence[CurveReport], files: Sequence[str]) -> None:
    """Raises ValueError for runs in different units of compute, or evaluated on different problems."""
    units = {r.x for r in reports}
    if len(units) > 1:
        raise ValueError(f"compute is {' and '.join(sorted(units))}: name one column for all runs with --x")
    first, *others = map(problems, files)
    for other in others:
        for name in first.keys() & other.keys():
            if first[name] != other[name]:
                values = f"{name} {other[name]}, not {first[name]}"
                raise ValueError(f"evaluated on other problems than {files[0]}: {values}")


def problems(file: str) -> dict[str, object]:
    """What a run's config.json says of its problems; nothing, where there is none."""
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    config = folder / "config.json"
    if not config.is_file():
        return {}
    flags = json.loads(config.read_text())
    return {name: flags[name] for name in PROBLEMS if name in flags}


class Place(NamedTuple):
    """Where a run will be at some compute: its number, and the low and high end around it."""

    number: float
    low: float
    high: float


def place_of(f: Forecast, C: float) -> Place | None:
    """The place at compute C; None of a run that collapsed or falls, or has too few points or none that differ."""
    place = None
    if f.allowed:
        low, high = f.interval(C)[:, 0].tolist()
        place = Place(min(max(f.number(C), low), high), low, high)
    elif "does not rise" in f.reason:
        place = Place(*as_it_goes(f.fit))
    return place if place and not math.isnan(place.low) else None


def highest(places: Sequence[Place | None]) -> int | None:
    """Which place lies above all others; None if no one does, or a run has no place."""
    known = [p for p in places if p]
    a = max(known, default=None)
    if a is None or len(known) < len(places):
        return None
    best = places.index(a)
    others = [p for p in known if p is not a]
    apart = all(a.number - b.number > APART * math.hypot(a.number - a.low, b.high - b.number) for b in others)
    return best if apart else None


def winner(reports: Sequence[CurveReport], C: float) -> str:
    """The sentence about who is higher at compute C, or why nobody can say so."""
    places = [place_of(r.forecast, C) for r in reports]
    entries = []
    for r, p in zip(reports, places, strict=True):
        if p is None:
            return f"no winner at {short(C)}: {r.name} has no forecast: {r.forecast.reason}"
        entries.append(f"{r.name} {p.number:.3f} {span((p.low, p.high), 3)}")
    listed = ", ".join(entries)
    best = highest(places)
    if best is not None:
        others = " and ".join(r.name for r in reports if r is not reports[best])
        return f"{reports[best].name} ends higher than {others} at {short(C)} in nine of ten cases: {listed}"
    return f"no winner at {short(C)}, the runs may end alike: {listed}; {parts_at(reports, C)}"


def parts_at(reports: Sequence[CurveReport], C: float) -> str:
    """From which compute on a run would win at C, if all went on along their best forms, with half of their noise as in
    `ask_again`."""

    def apart(share: float) -> bool:
        places = []
        for r in reports:
            f = r.forecast
            now = float(f.fit.C[-1])
            later = now + share * max(C - now, 0)
            places.append(place_of(continued(f, later / now) if share and f.allowed else f, C))
        return highest(places) is not None

    k = bisect_left(SHARES, True, key=apart)
    now = min(float(r.forecast.fit.C[-1]) for r in reports)
    if k < len(SHARES) and (again := now + SHARES[k] * (C - now)) > 1.005 * now:
        return f"if they go on as they do, ask again at {short(again)}"
    return "if they go on as they do, more compute up to there does not tell either"


def stops(r: CurveReport, C: float, gain: float) -> str:
    """The sentence about a run that is planned to go on to compute C, and may stop if that brings at most `gain`."""
    f = r.forecast
    if not f.allowed:
        return f"{r.name}: no forecast, so nothing says stop: {f.reason}"
    reached = float(f.predict(f.fit.C[-1], f.form))
    top = float(f.interval(C)[1, 0])
    more = f"{r.name} has reached {reached:.3f}; compute up to {short(C)} brings at most {max(top - reached, 0):.3f}"
    if top <= reached + gain:
        return f"{more}: it may stop (a gain of .03 saved 9 % on public validation curves and cost .002, at worst .029)"
    return f"{more}: it goes on, since that is more than --stop-at {gain:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Which run will be higher at a compute, and may one stop?")
    parser.add_argument("files", nargs="+", help="eval.jsonl of a run, or its folder")
    parser.add_argument("--at", default="4x", metavar="C", help="this compute, or 4x: times that of the shorter run")
    parser.add_argument("--stop-at", type=float, metavar="GAIN", help="may a run stop, if more brings at most this?")
    parser.add_argument("--x", default="", metavar="COLUMN", help="compute; by default tokens or device_hours")
    args = parser.parse_args(argv)
    place = args.files[0]
    try:
        if len(args.files) == 1 and args.stop_at is None:
            raise ValueError("one run has no rival: name another, or ask for --stop-at 0.03")
        if args.stop_at is not None and not 0 <= args.stop_at < 1:
            raise ValueError(f"--stop-at is a gain of the pass rate from 0 to 1, not {args.stop_at:g}")
        reports = []
        for place in args.files:
            reports.append(curve(place, 1.0, place.removesuffix("/eval.jsonl"), args.x))
        check_alike(reports, args.files)
        C = compute(args.at, [r.end for r in reports])
        print(f"at {short(C)} {UNITS.get(reports[0].x, reports[0].x)}:")
        if len(reports) > 1:
            print(winner(reports, C))
        if args.stop_at is not None:
            for r in reports:
                print(stops(r, C, args.stop_at))
    except ERRORS as error:
        print(f"decide.py: {place}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
