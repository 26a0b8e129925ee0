"""Draws traces of runs (`--trace true`) below each other on one clock: a lane is a slot of the engine, a color the
version that samples, a vertical line an update of the weights; below each, what the trainer does.

    python evidence/timeline.py runs/pipeline-8 runs/ppo-8 runs/ppo-1 --begin 5 --seconds 4 --output timeline.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.trace import ENGINE, PACER, TRAINER

COLORS = [colormaps["viridis"](x) for x in (0.0, 0.55, 0.95, 0.3, 0.75)]  # of versions, in turn; gray tells them apart
WAITS = "0.85"


def read(path: Path) -> pd.DataFrame:
    """The spans of a trace, which may lack its end: process, lane, begin and length in seconds since the first, name.
    Raises ValueError if it has none."""
    lines = [line.rstrip(",\n") for line in path.read_text().splitlines()[1:]]
    events = [json.loads(line) for line in lines if line.endswith("}")]
    spans = pd.DataFrame([event for event in events if event["ph"] == "X"])
    if spans.empty:
        raise ValueError(f"{path} has no spans: did the run have --trace true?")
    begin, length = (spans["ts"] - spans["ts"].min()) / 1e6, spans["dur"] / 1e6
    spans = spans.rename(columns={"pid": "process", "tid": "lane"})[["process", "lane", "name"]]
    return spans.assign(begin=begin, length=length)


def within(spans: pd.DataFrame, begin: float, seconds: float) -> pd.DataFrame:
    """Spans that touch the window, cut to it; times count from its begin."""
    starts, ends = (x.clip(0, seconds) for x in (spans["begin"] - begin, spans["begin"] + spans["length"] - begin))
    return spans.assign(begin=starts, length=ends - starts)[ends > starts]


def shares(spans: pd.DataFrame, seconds: float) -> tuple[float, float]:
    """Shares of the window: slots that are empty, of those that are ever used; the trainer waits."""
    requests = spans[spans["process"] == ENGINE]
    idle = spans[(spans["process"] == TRAINER) & (spans["name"] == "trainer_idle")]
    busy = requests["length"].sum() / (max(requests["lane"].nunique(), 1) * seconds)
    return 1 - busy, idle["length"].sum() / seconds


def draw(engine: Axes, trainer: Axes, spans: pd.DataFrame, name: str, seconds: float) -> None:
    """The two panels of one run."""
    for span in spans.itertuples():
        at = [(span.begin, span.length)]
        if span.process == ENGINE:
            color = COLORS[int(span.name.split()[1]) % len(COLORS)]
            engine.broken_barh(at, (span.lane, 1), color=color, linewidth=0)
        elif span.process == PACER and span.name.startswith("update"):
            engine.axvline(span.begin + span.length, color="black", linewidth=0.6)
        elif span.process == TRAINER:
            waits = span.name == "trainer_idle"
            trainer.broken_barh(at, (0, 1), color=WAITS if waits else "0.4", edgecolor="white", linewidth=0.5)
    empty, waits = shares(spans, seconds)
    engine.set_title(f"{name}: {empty:.0%} of the slots empty, the trainer waits {waits:.0%}", loc="left", fontsize=9)
    engine.set_ylabel("slot")
    trainer.set_yticks([0.5], ["trainer"])
    for axes in (engine, trainer):
        axes.set_xlim(0, seconds)
        axes.spines[["top", "right"]].set_visible(False)
    engine.set_xticks([])


def main(argv: Sequence[str] | None = None) -> None:
    """Exit code 2 and a sentence if a folder has no trace."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs with --trace true")
    parser.add_argument("--begin", type=float, default=5.0, help="seconds after the first span (5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the window (4)")
    parser.add_argument("--output", type=Path, default=Path("timeline.png"))
    args = parser.parse_args(argv)
    figure = Figure(figsize=(9, 2.4 * len(args.runs)), layout="constrained")
    panels = figure.subplots(2 * len(args.runs), 1, height_ratios=[8, 1] * len(args.runs), squeeze=False)[:, 0]
    for i, run in enumerate(args.runs):
        try:
            spans = within(read(run / "trace.json"), args.begin, args.seconds)
        except (OSError, ValueError, KeyError) as error:
            parser.error(str(error))
        draw(panels[2 * i], panels[2 * i + 1], spans, run.name, args.seconds)
    panels[-1].set_xlabel("seconds")
    figure.savefig(args.output, dpi=110)
    print(args.output)


if __name__ == "__main__":
    main()
