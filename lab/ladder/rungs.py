"""The rungs from GRPO to ScaleRL: their files, made from recipe.py, and the settings in which they run.

README.md beside this file is the one place of the diffs. A rung's file is recipe.py with the diffs above it undone. A
*side* is a rung's number, or `no-NAME`: ScaleRL without one of its changes (WITHOUT).
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import losses
from filters import PassRateHistory
from generator import Generator
from lab.tasks import ramble, rare
from length_control import Interruption
from pipeline_rl import Group, Pacer
from tasks.arithmetic import ChainTask, discover, graded

PAGE = Path(__file__).with_name("README.md")
OUT = ROOT / "runs" / "ladder"
# An evaluation. `passes`: tokens through the model, a prompt once for its group, three times where they train;
# `seconds` leave out evaluations; `lag`: mean of all tokens so far; `other`: at the end of `ramble`, the pass rate
# evaluated with the phrase where the side trains without it, and the other way round.
COLUMNS = ("setting", "side", "rate", "seed", "step", "tokens", "passes", "seconds", "lag", "pass_rate", "other")
Row = dict[str, Any]


class Setting(NamedTuple):
    """What differs from recipe.py: the steps, the values of some of its names, and the task."""

    steps: int
    names: dict[str, Any]
    task: Callable = discover


STALE = {"K": 16, "LR": 1.75e-4, "Pacer": partial(Pacer, min_ready=15 * 8)}  # all tokens as old as is allowed
SETTINGS = {
    "discover": Setting(48, {}),
    "alone": Setting(48, {}),  # the same, where seconds are measured
    "stale": Setting(72, STALE),
    "ramble": Setting(24, {}, ramble),
    "mostly-solved": Setting(96, {"B": 16, "G": 8, "LR": 1.75e-4}, lambda seed, _: rare(seed, 1024)),  # small effects
    "graded": Setting(96, {"B": 16, "LR": 7e-4}, graded),
}


class InTurns(Generator):
    """Samples K batches with frozen weights, which then train, and takes new weights after the last one."""

    turn: tuple[list[Group], ...] = ()
    newest: tuple[Any, int] | None = None  # weights and their version

    def take(self, count: int) -> list[Group]:
        """The next of the turn's batches."""
        if not self.turn:
            groups = super().take(self.pacer.take_size)
            updates = len(groups) // count
            self.turn, self.newest = tuple(groups[i::updates] for i in range(updates)), None
        batch, *rest = self.turn
        self.turn = tuple(rest)
        return batch

    def push(self, weights: Any, version: int, release: int) -> None:
        """Keeps them until the turn ends."""
        self.newest = weights, version
        self.release(release)

    def release(self, count: int) -> None:
        """At the end of the turn all of it is released."""
        if not self.turn and self.newest:
            super().push(*self.newest, release=self.pacer.take_size)
        elif not self.turn:
            super().release(self.pacer.take_size)


# ScaleRL without one of its changes: names of recipe.py, and what takes their place.
WITHOUT: dict[str, dict[str, Any]] = {
    "PipelineRL": {"Pacer": partial(Pacer, schedule="ppo_off_policy"), "Generator": InTurns},
    "CISPO": {"cispo": losses.grpo},
    "interruption": {"Interruption": lambda **_: None, "Generator": partial(Generator, max_completion=22)},
    "filter": {"has_variance": lambda rewards, group_ids: torch.ones_like(rewards, dtype=torch.bool)},
    "resampling": {"PassRateHistory": lambda threshold: PassRateHistory(2.0)},
    "average": {"aggregation_weights": partial(losses.aggregation_weights, how="sample")},
    "normalization": {"normalize_advantages": partial(losses.normalize_advantages, how="prompt")},
}


def curves_of(rows: Iterable[Row], side: object, setting: str, rate: float = 1.0) -> dict[int, list[Row]]:
    """By seed."""
    curves: dict[int, list[Row]] = {}
    for row in rows:
        if (row["side"], row["setting"], row["rate"]) == (str(side), setting, rate):
            curves.setdefault(int(row["seed"]), []).append(row)
    return curves


def section(rung: int) -> str:
    """What the page says of the rung, its name first."""
    return re.split(r"^## \d\. ", PAGE.read_text(), flags=re.M)[rung + 1]


NAMES = [section(rung).partition("\n")[0] for rung in range(9)]


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
    for above in range(len(NAMES) - 1, rung, -1):
        text = applied(text, diff_of(above), undo=True)
    return text


def climb(side: str, name: str, seed: int = 0, rate: float = 1.0, steps: int | None = None) -> list[Row]:
    """Trains a side in a setting at `rate` times its learning rate, and returns its evaluations."""
    setting, without = SETTINGS[name], WITHOUT.get(side.removeprefix("no-"), {})
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"rung_{side}.py"
    text = source(len(NAMES) - 1 if without else int(side))
    path.write_text(text)
    module = ModuleType("rung")
    exec(compile(text, str(path), "exec"), vars(module))  # two runs of a side may write the file at once
    vars(module).update(setting.names | without)
    module.LR *= rate
    steps = steps or setting.steps
    task = setting.task(seed, 256)
    tensors, lags, evaluate = module.tensors, module.lags, module.evaluate
    rows: list[Row] = []
    ages: list[int] = []
    trained, evaluating, started = 0, 0.0, None

    def counted_tensors(batch: list) -> tuple[torch.Tensor, ...]:
        nonlocal trained
        trained += sum(map(len, {tuple(prompt) for prompt, _ in batch}))
        trained += sum(len(rollout.completion_ids) for _, rollout in batch)
        return tensors(batch)

    def counted_lags(*args: Any) -> Iterator[int]:
        for lag in lags(*args):
            ages.append(lag)
            yield lag

    def noted(generator: Generator, task: ChainTask, step: int) -> tuple[int, float]:
        nonlocal evaluating, started
        now = time.monotonic()
        started = started or now
        seconds = round(now - started - evaluating, 2)
        tokens, pass_rate = evaluate(generator, task, step)
        other = evaluated_the_other_way(generator, task) if name == "ramble" and step == steps else None
        evaluating += time.monotonic() - now
        passes = generator.counters.prefilled + tokens + 3 * trained
        lag = round(sum(ages) / max(1, len(ages)), 3)
        values = name, side, rate, seed, step, tokens, passes, seconds, lag, pass_rate, other
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        return tokens, pass_rate

    module.ChainTask = lambda seed, pool: task
    module.MODEL = task.first_model(ROOT / "runs" / "cache", print)
    module.tensors, module.lags, module.evaluate = counted_tensors, counted_lags, noted
    module.fit, module.report = lambda *curve, **options: None, lambda *fit: ""  # so short a curve has no fit
    module.train(steps, seed)
    return rows


def evaluated_the_other_way(generator: Generator, task: ChainTask) -> float:
    """The pass rate with the phrase if the generator samples without it, and without it if it samples with it."""
    phrase = Interruption(14, 18, 4, task.phrase_ids, task.end_of_thinking_ids)
    generator.length_control, own = None if generator.length_control else phrase, generator.length_control
    generator.max_completion = 22
    answers = generator.result_of(generator.evaluate(task.held_out, 1))
    generator.length_control = own
    return sum(rollout.correct for [rollout] in answers) / len(answers)
