"""The rungs from GRPO to ScaleRL: their files, made from recipe.py, and the settings in which they run.

README.md beside this file is the one place of the diffs. A rung's file is recipe.py with the diffs above it undone.

    python lab/ladder/rungs.py 3 ramble 0 FOLDER     # a run for publish.py: rung, setting, seed
"""

import csv
import importlib.util
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from lab.tasks import ramble, rare
from pipeline_rl import Pacer
from tasks.arithmetic import discover

PAGE = Path(__file__).with_name("README.md")
OUT = ROOT / "runs" / "ladder"
# An evaluation. `work`: tokens through the model, three times where they train; `seconds` leave out evaluations.
COLUMNS = ("setting", "rung", "seed", "step", "tokens", "work", "seconds", "pass_rate")
Row = dict[str, Any]


class Setting(NamedTuple):
    """What differs from recipe.py: the steps, the values of some of its names, and the task."""

    steps: int
    names: dict[str, Any]
    task: Callable = discover


STALE = {"K": 16, "LR": 1.75e-4, "Pacer": partial(Pacer, min_ready=15 * 8)}  # all tokens as old as is allowed
SETTINGS = {
    "discover": Setting(48, {}),
    "stale": Setting(72, STALE),
    "ramble": Setting(24, {}, ramble),
    "mostly-solved": Setting(96, {"B": 16, "G": 8, "LR": 1.75e-4}, lambda seed, _: rare(seed, 1024)),  # small effects
}
# Where each rung's change should show.
RUNGS = (*["discover"] * 2, "stale", "ramble", "discover", "mostly-solved", *["discover"] * 3)


def section(rung: int) -> str:
    """What the page says of the rung, its name first."""
    return re.split(r"^## \d\. ", PAGE.read_text(), flags=re.M)[rung + 1]


def diff_of(rung: int) -> str:
    """The rung's diff: hunks of whole lines, with a line `@@` between them."""
    return re.findall(r"```diff\n(.*?)```", section(rung), re.S)[0]


def applied(text: str, diff: str, undo: bool = False) -> str:
    """The text with the diff's changes made or undone. Raises ValueError for a hunk that does not fit."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        if undo:
            old, new = new, old
        if text.count(old) != 1:
            raise ValueError(f"recipe.py has changed, and lab/ladder/README.md has a diff that does not fit:\n{hunk}")
        text = text.replace(old, new)
    return text


def source(rung: int) -> str:
    """The rung's file."""
    text = (ROOT / "recipe.py").read_text()
    for above in range(len(RUNGS) - 1, rung, -1):
        text = applied(text, diff_of(above), undo=True)
    return text


def climb(rung: int, name: str, seed: int = 0, steps: int | None = None) -> list[Row]:
    """Runs the rung's file in a setting, and returns its evaluations."""
    setting = SETTINGS[name]
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"rung_{rung}.py"
    path.write_text(source(rung))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(setting.names)
    task = setting.task(seed, 256)
    scorer, evaluate = module.Scorer, module.evaluate
    rows: list[Row] = []
    trained, evaluating, started = 0, 0.0, None

    def counted_scorer(model: torch.nn.Module, **options: Any) -> Callable:
        score = scorer(model, **options)

        def counted(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal trained
            trained += ids.numel()
            return score(ids)

        return counted

    def noted(generator: Any, task: Any, step: int) -> tuple[int, float]:
        nonlocal evaluating, started
        now = time.monotonic()
        started = started or now
        seconds = round(now - started - evaluating, 2)
        tokens, pass_rate = evaluate(generator, task, step)
        evaluating += time.monotonic() - now
        work = generator.counters.prefilled + tokens + 3 * trained
        values = name, rung, seed, step, tokens, work, seconds, pass_rate
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        return tokens, pass_rate

    module.ChainTask = lambda seed, pool: task
    module.MODEL = task.first_model(ROOT / "runs" / "cache", print)
    module.Scorer, module.evaluate = counted_scorer, noted
    module.fit, module.report = lambda *curve, **options: None, lambda *fit: ""  # so short a curve has no fit
    module.train(steps or setting.steps, seed)
    return rows


def publish(rung: int, name: str, seed: int, folder: Path) -> None:
    """A run whose evaluations go to a file of their own, unless it is there."""
    path = folder / f"{name}-{rung}-{seed}.csv"
    if path.exists():
        return
    rows = climb(rung, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    publish(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
