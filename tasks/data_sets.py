"""Tasks made of data sets: files and Hugging Face data sets of questions with known answers.

PROBLEM. Every data set names its columns otherwise, some rows have no question, no answer or one that no verifier can
read, and a prompt that occurs in two places must not be trained on in one and held out in the other.

IDEA. Rows (rows.py) become `Problem`s: what cannot be asked or judged is left out and counted by kind, prompts are
encoded (tokens.py), and the problems are split. A problem's key is the hash of its row's prompt, and THE SPLIT is by
this key and nothing else: of all prompts in a data set, those with the smallest keys are held out, before any is left
out for its length or its answer, and what one data set holds out no other trains on. So no seed, order of rows or data
sets, duplicate, template, limit, reward or tokenizer can carry a held-out problem into training, nor from one run on
the same data sets into the next.

SIMPLIFIED. All rows are held in memory. Near-duplicates (other words, the same numbers) are not looked for.

    task = load_dataset_task("openai/gsm8k:main", tokenizer)
    task.score(task.held_out[0], [completion_ids])    # [(1.0, True)], judged in worker processes
    task.close()
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.eval_sets import add_eval_sets, parse_eval_sets
from tasks.judges import Job, RewardPool
from tasks.prompts import Problem
from tasks.rows import DataSet, parse_data_sets, usable_rows
from tasks.tokens import Endings, encode_prompts, find_endings


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts. A column None looks for the usual names (rows.py).

    `prompt_template` is put around the prompt's text and holds `{prompt}`; `apply_chat_template` uses the tokenizer's
    chat template if it has one. `thinking` False: the model answers at once; True: it thinks; None: it does if the
    tokenizer knows an end of thinking. Prompts longer than `max_prompt_tokens` are left out; `held_out` prompts of each
    data set are kept for evaluation, or fewer where some of these are left out.
    """

    prompt_column: str | None = None
    answer_column: str | None = None
    prompt_template: str = "{prompt}"
    apply_chat_template: bool = True
    thinking: bool | None = None
    held_out: int = 1000
    max_prompt_tokens: int | None = None


class DatasetTask:
    """Problems of data sets, judged in worker processes. Made by `load_dataset_task`; `close` ends the workers.

    Has what every task has (prompts.py), and `skipped` (rows left out, by kind) and `counts` (verdicts, by kind).
    """

    def __init__(
        self, tokenizer: Any, endings: Endings, pool: RewardPool, rewards: dict[str, str], eval_sources: Sequence[str]
    ) -> None:
        """`rewards` names the reward of each data set, those that are only evaluated (`eval_sources`) too. Problems
        come by `add` and `add_eval_sets`."""
        self.train: list[Problem] = []
        self.held_out: list[Problem] = []
        self.skipped: Counter[str] = Counter()
        self.sources, self.weights = [name for name in rewards if name not in eval_sources], dict[str, float]()
        self.eval_sources, self.ceiling = list(eval_sources), None
        self.tokenizer, self.stop_ids = tokenizer, endings.stop_ids
        self.end_of_thinking_ids, self.phrase_ids = endings.end_of_thinking_ids, endings.phrase_ids
        self.thinking_end = endings.thinking_end
        self._pool, self._rewards, self._prompts = pool, rewards, dict[tuple[str, str], str]()
        self._split: set[str] = set()  # keys of all prompts that a data set holds out, usable or not

    def read(
        self, name: str, data: DataSet, options: PromptOptions, prompts: set[str] | None = None
    ) -> dict[str, Problem]:
        """{key: problem} of one data set, under the source `name`. Left out and counted in `skipped` are rows whose
        answer no verifier can read and prompts that are too long; `prompts` gets their keys too. Raises ValueError."""
        reward = self._rewards[name]
        rows = usable_rows(data, options.prompt_column, options.answer_column, reward, self.skipped, prompts)
        readable = self._pool.answers_readable(reward, [row.answer for row in rows.values()])
        encoded = encode_prompts(
            self.tokenizer, [row.messages for row in rows.values()], options.prompt_template,
            options.apply_chat_template, options.thinking,
        )  # fmt: skip
        found: dict[str, Problem] = {}
        for (key, row), good, ids in zip(rows.items(), readable, encoded, strict=True):
            if not good:
                self.skipped["unreadable_answer"] += 1
            elif options.max_prompt_tokens is not None and len(ids) > options.max_prompt_tokens:
                self.skipped["prompt_too_long"] += 1
            else:
                found[key] = Problem(key, tuple(ids), row.answer, name)
                self._prompts[name, key] = row.text
        return found

    def add(self, data: DataSet, options: PromptOptions) -> None:
        """Reads and splits one data set. A prompt of several stays with the first that holds it out, or else with the
        first that has it, and is counted for the others. Raises ValueError."""
        prompts: set[str] = set()
        found = self.read(data.name, data, options, prompts)
        before = len(self.train) + len(self.held_out) + len(found)
        own = set(sorted(prompts)[: options.held_out])
        self._split |= own
        self.train = [problem for problem in self.train if problem.key not in own]
        trained, held = ({problem.key for problem in some} for some in (self.train, self.held_out))
        self.held_out += [found[key] for key in sorted((found.keys() & own) - held)]
        self.train += [found[key] for key in sorted(found.keys() - self._split - trained)]
        self.skipped += Counter(duplicate_prompt=before - len(self.train) - len(self.held_out))

    def check_split(self, source: str, held_out: int) -> None:
        """Raises ValueError if a data set has nothing left to train on or to evaluate, now that all are there."""
        train, held = (sum(problem.source == source for problem in some) for some in (self.train, self.held_out))
        if not train or (held_out and not held):
            raise ValueError(
                f"`dataset` {source} has {train + held} usable prompts (skipped: {dict(self.skipped)}), and `held_out` "
                f"{held_out} leaves {train} to train on and {held} to evaluate; change it or add rows"
            )

    @property
    def counts(self) -> Counter[str]:
        """Verdicts so far by kind: the kinds of `judges.Verdict`."""
        return self._pool.counts

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; U+FFFD where ids have no token, which `decode` leaves out: models
        may have more rows than their tokenizer has tokens."""
        parts = itertools.groupby(ids, lambda i: i < len(self.tokenizer))
        return "".join(
            self.tokenizer.decode(list(some), skip_special_tokens=False) if known else "\ufffd" for known, some in parts
        )

    def question(self, problem: Problem) -> str:
        """The problem's prompt as its data set has it."""
        return self._prompts[problem.source, problem.key]

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """(reward, correct) of each completion of one problem, in order; a stop token at its end is not judged."""
        name, prompt = self._rewards[problem.source], self.question(problem)
        bodies = [ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids for ids in completions]
        verdicts = self._pool.judge([Job(name, prompt, self.text(ids), problem.answer) for ids in bodies])
        return [(verdict.reward, verdict.correct) for verdict in verdicts]

    def reward(self, problem: Problem, completion_ids: Sequence[int]) -> tuple[float, bool]:
        """`score` of one completion."""
        return self.score(problem, [completion_ids])[0]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def load_dataset_task(
    dataset: str, tokenizer: Any, options: PromptOptions = PromptOptions(), *, reward: str = "math",
    reward_workers: int = 2, reward_timeout: float = 8.0, unsafe_code: bool = False,
    end_of_thinking: str | None = None, interruption_phrase: str | None = None, stop_tokens: str | None = None,
    judge: bool = True, eval_dataset: str = "",
) -> DatasetTask:  # fmt: skip
    """A task of one data set or several, named as `rows.parse_data_sets` reads them, and of sets that are only
    evaluated, as `eval_sets.parse_eval_sets` does.

    `reward` is one name for all that name none there, or one for each, those of the evaluation sets last, separated by
    commas (see judges.py, also for `unsafe_code`). `end_of_thinking`, `interruption_phrase` and `stop_tokens` are found
    from the tokenizer where they are None. With `options.thinking` False the whole completion is judged, otherwise what
    follows the end of thinking. `judge` False ends the worker processes once the rows are checked, for a process that
    never scores. Raises ValueError naming the option to change, in backticks.
    """
    named, evaluated = parse_data_sets(dataset), parse_eval_sets(eval_dataset)
    every, sources = [*named, *evaluated.values()], [*(data.name for data in named), *evaluated]
    if len(set(sources)) < len(sources):
        raise ValueError(f"`eval_dataset` {eval_dataset}: a name is that of a data set to train on; give another")
    rewards = [name.strip() for name in reward.split(",")]
    rewards = rewards * len(every) if len(rewards) == 1 else rewards
    if len(rewards) != len(every):
        raise ValueError(f"`reward` must be one name or one for each of the {len(every)} data sets, got {reward!r}")
    for option, text, some in (("dataset", dataset, named), ("eval_dataset", eval_dataset, evaluated.values())):
        if "," in reward and any(data.reward for data in some):
            raise ValueError(f"`{option}` {text} names rewards, too; leave out `reward` {reward}")
    rewards = [data.reward or name for data, name in zip(every, rewards, strict=True)]
    if "{prompt}" not in options.prompt_template:
        raise ValueError(f"`prompt_template` must hold {{prompt}}, got {options.prompt_template!r}")
    endings = find_endings(
        tokenizer, thinking=options.thinking, end_of_thinking=end_of_thinking,
        interruption_phrase=interruption_phrase, stop_tokens=stop_tokens,
    )  # fmt: skip
    with contextlib.ExitStack() as undo:
        pool = RewardPool(
            rewards, workers=reward_workers, timeout=reward_timeout,
            end_of_thinking=endings.end_of_thinking, unsafe_code=unsafe_code,
        )  # fmt: skip
        undo.callback(pool.close)
        task = DatasetTask(tokenizer, endings, pool, dict(zip(sources, rewards, strict=True)), list(evaluated))
        for data in named:
            task.add(data, options)
        for data in named:
            task.check_split(data.name, options.held_out)
        add_eval_sets(task, evaluated, options)
        if len(named) > 1:  # a single data set has all the places, whatever its weight
            task.weights = {data.name: data.weight for data in named if data.weight is not None}
        if judge:
            undo.pop_all()  # the task closes the pool
    return task
