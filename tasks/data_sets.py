"""Tasks made of data sets: files and Hugging Face data sets of questions with known answers.

PROBLEM. Every data set names its columns otherwise, some rows have no question, no answer or one that no verifier can
read, and a prompt that occurs in two places must not be trained on in one and held out in the other.

IDEA. Rows (rows.py) become `Problem`s: what cannot be asked or judged is left out and counted by kind, prompts are
encoded (tokens.py), and the problems are split. A key is the hash of its row's prompt, and THE SPLIT is by
this key and nothing else: of all prompts in a data set, those with the smallest keys are held out, before any is left
out for its length or its answer, and what one data set holds out no other trains on. So no seed, order of rows or data
sets, duplicate, template, limit, reward or tokenizer can carry a held-out problem into training, nor from one run on
the same data sets into the next.

EVALUATION SETS are data sets that a run only evaluates, as the paper (arXiv 2510.13786) watches AIME-24 while it trains
on Polaris. Held-out prompts say how far a recipe gets in distribution, which the paper fits; an evaluation set says
what that is worth elsewhere. It is kept whole: where training has one of its prompts, the training goes without.

SIMPLIFIED. All rows are held in memory. Near-duplicates (other words, the same numbers) are not looked for.

    task = load_dataset_task("openai/gsm8k:main", tokenizer)
    task.score(task.held_out[0], [completion_ids])    # [(1.0, True)], judged in worker processes
    task.close()
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.judges import Job, RewardPool
from tasks.prompts import Problem, Task
from tasks.rows import DataSet, parse_data_sets, parse_eval_sets, read_rows
from tasks.tokens import Endings, encode_prompts, find_endings

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts. Without a name of a column the usual ones are looked for (rows.py).

    `prompt_template` is put around the prompt's text and holds `{prompt}`; `apply_chat_template` uses the tokenizer's
    chat template if it has one. `thinking` False: the model answers at once, and the whole completion is judged; True:
    it thinks, and what follows is judged; None: it does if the tokenizer knows an end of thinking. `end_of_thinking`,
    `interruption_phrase` and `stop_tokens` are found from the tokenizer where they are empty. Prompts longer than
    `max_prompt_tokens` are left out; `held_out` prompts of each data set are kept for evaluation, or fewer where some
    of these are left out.
    """

    prompt_column: str = ""
    answer_column: str = ""
    prompt_template: str = "{prompt}"
    apply_chat_template: bool = True
    thinking: bool | None = None
    end_of_thinking: str = ""
    interruption_phrase: str = ""
    stop_tokens: str = ""
    held_out: int = 1000
    max_prompt_tokens: int | None = None


class DatasetTask(Task):
    """Problems of data sets, judged in worker processes, made by `load_dataset_task`. Has what every task has
    (prompts.py), and `skipped` (rows left out, by kind) and `counts` (verdicts, by kind). `rewards` names the reward of
    each data set, those that are only evaluated too. Problems come by `add` and `add_eval_sets`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: PromptOptions,
        endings: Endings,
        pool: RewardPool,
        rewards: Mapping[str, str],
    ) -> None:
        self.train, self.held_out = list[Problem](), list[Problem]()
        self.sources, self.eval_sources, self.mixture = list[str](), list[str](), dict[str, float]()
        self.tokenizer, self.options, self.stop_ids, self.ceiling = tokenizer, options, endings.stop_ids, None
        self.end_of_thinking_ids, self.phrase_ids = endings.end_of_thinking_ids, endings.phrase_ids
        self.thinking_end, self.skipped = endings.thinking_end, Counter[str]()
        self._pool, self._rewards, self._prompts = pool, rewards, dict[tuple[str, str], str]()
        self._split: set[str] = set()  # keys of all prompts that a data set holds out, usable or not

    def read(self, name: str, data: DataSet) -> tuple[dict[str, Problem], set[str]]:
        """({key: problem}, the keys of all prompts) of one data set, under the source `name`. Left out and counted in
        `skipped` are rows whose answer no verifier can read and prompts that are too long. Raises ValueError."""
        options, reward = self.options, self._rewards[name]
        rows, prompts, skipped = read_rows(data, options.prompt_column, options.answer_column, reward)
        readable = self._pool.answers_readable(reward, [row.answer for row in rows.values()])
        messages, apply = [row.messages for row in rows.values()], options.apply_chat_template
        encoded = encode_prompts(self.tokenizer, messages, options.prompt_template, apply, options.thinking)
        found: dict[str, Problem] = {}
        for (key, row), good, ids in zip(rows.items(), readable, encoded, strict=True):
            if not good:
                skipped["unreadable_answer"] += 1
            elif options.max_prompt_tokens is not None and len(ids) > options.max_prompt_tokens:
                skipped["prompt_too_long"] += 1
            else:
                found[key] = Problem(key, tuple(ids), row.answer, name)
                self._prompts[name, key] = row.text
        self.skipped += skipped
        return found, prompts

    def add(self, data: DataSet) -> None:
        """Reads and splits one data set. A prompt of several stays with the first that holds it out, or else with the
        first that has it, and is counted for the others. Raises ValueError."""
        found, prompts = self.read(data.name, data)
        self.sources.append(data.name)
        before = len(self.train) + len(self.held_out) + len(found)
        own = set(sorted(prompts)[: self.options.held_out])
        self._split |= own
        self.train = [problem for problem in self.train if problem.key not in own]
        trained, held = ({problem.key for problem in some} for some in (self.train, self.held_out))
        self.held_out += [found[key] for key in sorted((found.keys() & own) - held)]
        self.train += [found[key] for key in sorted(found.keys() - self._split - trained)]
        self.skipped += Counter(duplicate_prompt=before - len(self.train) - len(self.held_out))

    def as_in_file(self) -> None:
        """Puts `train` into the order of the rows."""
        place = {key: i for i, (_, key) in enumerate(self._prompts)}
        self.train.sort(key=lambda problem: place[problem.key])

    def check_split(self) -> None:
        """Raises ValueError if a data set has nothing left to train on or to evaluate, now that all are there."""
        for name in self.sources:
            train, held = (sum(problem.source == name for problem in some) for some in (self.train, self.held_out))
            if not train or (self.options.held_out and not held):
                raise ValueError(
                    f"`dataset` {name} has {train + held} usable prompts (skipped: {dict(self.skipped)}), and "
                    f"`held_out` {self.options.held_out} leaves {train} to train on and {held} to evaluate; add rows"
                )

    def add_eval_sets(self, named: Mapping[str, DataSet]) -> None:
        """Reads each set into `held_out`, whole, and takes its prompts out of `train`, which
        `skipped["in_eval_dataset"]` counts. The split of the training data does not change. Raises ValueError if
        nothing is left to evaluate or to train on."""
        evaluated = set[str]()
        for name, data in named.items():
            try:
                found, _ = self.read(name, data)
            except ValueError as error:
                raise ValueError(str(error).replace("`dataset`", "`eval_dataset`")) from error
            if not found:
                raise ValueError(f"`eval_dataset` {name} has no usable prompt (skipped: {dict(self.skipped)})")
            self.eval_sources.append(name)
            self.held_out += [found[key] for key in sorted(found)]
            evaluated |= found.keys()
        kept = [problem for problem in self.train if problem.key not in evaluated]
        for source in self.sources:
            if not any(problem.source == source for problem in kept):
                raise ValueError(
                    f"`eval_dataset` has every prompt that `dataset` {source} would train on; take another"
                )
        self.skipped += Counter(in_eval_dataset=len(self.train) - len(kept))
        self.train = kept

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
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions = PromptOptions(),
    *,
    reward: str = "math",
    reward_workers: int = 2,
    reward_timeout: float = 8.0,
    unsafe_code: bool = False,
    eval_dataset: str = "",
    judge: bool = True,
) -> DatasetTask:
    """A task of one data set or several, named as `rows.parse_data_sets` reads them, and of sets that are only
    evaluated, as `rows.parse_eval_sets` does.

    `reward` is that of all data sets that name none, see judges.py (also for `unsafe_code`). `judge` False ends the
    worker processes once the rows are checked, for a process that never scores. Raises ValueError naming the option to
    change, in backticks.
    """
    named, evaluated = parse_data_sets(dataset), parse_eval_sets(eval_dataset)
    trained = {data.name: data for data in named}
    if twice := evaluated.keys() & trained.keys():
        raise ValueError(f"`eval_dataset` {min(twice)}: a name is that of a data set to train on; give another")
    rewards = {source: data.reward or reward for source, data in (trained | evaluated).items()}
    if "{prompt}" not in options.prompt_template:
        raise ValueError(f"`prompt_template` must hold {{prompt}}, got {options.prompt_template!r}")
    phrase, stops = options.interruption_phrase, options.stop_tokens
    endings = find_endings(tokenizer, options.thinking, options.end_of_thinking, phrase, stops)
    end, names = endings.end_of_thinking, list(rewards.values())
    pool = RewardPool(names, reward_workers, reward_timeout, end, unsafe_code=unsafe_code)
    with contextlib.ExitStack() as undo:
        undo.callback(pool.close)
        task = DatasetTask(tokenizer, options, endings, pool, rewards)
        for data in named:
            task.add(data)
        task.check_split()
        task.add_eval_sets(evaluated)
        if len(named) > 1:  # a single data set has all the places, whatever its weight
            task.mixture = {data.name: data.weight for data in named if data.weight is not None}
        if judge:
            undo.pop_all()  # the task closes the pool
    return task
