"""Evaluation sets: data sets that a run only evaluates, as the paper watches AIME-24 while it trains on Polaris.

The held-out prompts of the training data say how far a recipe gets on what it trains on (in distribution), which the
paper fits (arXiv 2510.13786). An evaluation set says what that is worth elsewhere (downstream). It is kept whole: where
training has one of its prompts, it is the training that goes without.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tasks.rows import DataSet, parse_data_sets


def parse_eval_sets(text: str) -> dict[str, DataSet]:
    """{name: data set} of `NAME=DATA[:CONFIG[:SPLIT]][:REWARD],...`, in the order given; the names are ours.

        "aime24=aime24.jsonl,math=HuggingFaceH4/MATH-500::test"

    Raises ValueError on a part without a name of letters, digits, dots and dashes, and on a name given twice.
    """
    found: dict[str, DataSet] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, data = map(str.strip, part.partition("="))
        if not re.fullmatch(r"[\w.-]+", name) or not data or "=" in data:
            raise ValueError(f"`eval_dataset` must be NAME=DATA[:CONFIG[:SPLIT]][:REWARD],... got {part!r}")
        if name in found:
            raise ValueError(f"`eval_dataset` has the name {name} twice; give each set its own")
        [found[name]] = parse_data_sets(data)
    return found


def add_eval_sets(task: Any, named: dict[str, DataSet], options: Any) -> None:
    """Reads each set into the `held_out` of a `data_sets.DatasetTask`, whole, and takes its prompts out of `train`,
    which `skipped["in_eval_dataset"]` counts. `options` are its `PromptOptions`. The split of the
    training data does not change. Raises ValueError if nothing is left to evaluate or to train on."""
    for name, data in named.items():
        try:
            found = task.read(name, data, options)
        except ValueError as error:
            raise ValueError(str(error).replace("`dataset`", "`eval_dataset`")) from error
        if not found:
            raise ValueError(f"`eval_dataset` {name} has no usable prompt (skipped: {dict(task.skipped)})")
        task.held_out += [found[key] for key in sorted(found)]
    evaluated = {problem.key for problem in task.held_out if problem.source in named}
    for source in task.sources:
        if all(problem.key in evaluated for problem in task.train if problem.source == source):
            raise ValueError(f"`eval_dataset` has every prompt that `dataset` {source} would train on; take another")
    kept = [problem for problem in task.train if problem.key not in evaluated]
    task.skipped += Counter(in_eval_dataset=len(task.train) - len(kept))
    task.train = kept
