r"""Tasks made of data sets: files and Hugging Face data sets of questions with known answers.

A ROW, the first that GSM8K trains on, and what becomes of it:

>>> from tasks.rows import final_answer, key_of, prompt_messages
>>> from tasks.verifiers import math_kind
>>> row = {
...     "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
...     "How many clips did Natalia sell altogether in April and May?",
...     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
...     "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
... }
>>> [message] = prompt_messages(row["question"])  # the tokenizer's chat template makes token ids of it
>>> message["role"], key_of(message["content"])  # the prompts with the smallest keys are held out
('user', '73429d562982300e')
>>> final_answer(row["answer"])  # with which completions are compared
'72'
>>> [math_kind(text, "72") for text in ("24 in May, so she sold 72 clips.", r"\boxed{48 + 24}", "I think many.")]
['correct', 'wrong', 'unparsed']

PROBLEM. Every data set names its columns in its own way, and some rows have no question, or no answer, or one that no
verifier can read. And a prompt that occurs in two places must not be trained on in one and held out in the other.

IDEA. Rows (rows.py) become `Problem`s: rows that cannot be asked or judged are left out and counted by kind, prompts
are encoded (tokens.py), and the problems are split. A key is the hash of its row's prompt, and THE SPLIT is by this key
and nothing else. Of all prompts in a data set, those with the smallest keys are held out, before any is left out for
its length or its answer, and what one data set holds out no other trains on. So no seed, order of rows or data sets,
duplicate, template, limit, reward or tokenizer can carry a held-out problem into training, nor from one run on the same
data sets into the next.

EVALUATION SETS are data sets that a run only evaluates, as the paper (arXiv 2510.13786) watches AIME-24 while it trains
on Polaris. Held-out prompts measure how far a recipe gets in distribution, which the paper fits; an evaluation set
measures what that is worth elsewhere. It is kept whole: a prompt that it shares with the training data is not trained
on.

SIMPLIFIED. All rows are held in memory. Near-duplicates (other words, the same numbers) are not looked for.

    task = load_dataset_task("openai/gsm8k:main", tokenizer, PromptOptions())
    task.score(task.held_out[0], [completion_ids])    # [(1.0, True)], judged in worker processes
    task.close()
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.judges import Job, RewardPool
from tasks.prompts import Problem, PromptOptions, Task
from tasks.rows import DataSet, parse_data_sets, parse_eval_sets, read_rows
from tasks.tokens import Endings, encode_prompts, find_endings

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerBase


def is_long(words: str) -> bool:
    """Whether a prompt is long enough that one that holds it must be the same question."""
    return len(words.split()) > 3


class DatasetTask(Task):
    """Problems of data sets, judged in worker processes, made by `load_dataset_task`. Has what every task has
    (prompts.py), and `skipped` (rows left out, by kind), `columns` (those that are read and those that are not, by data
    set) and `counts` (verdicts, by kind). `rewards` names the reward of each data set, also of those that are only
    evaluated. Problems come by `add` and `add_eval_sets`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: PromptOptions,
        endings: Endings,
        pool: RewardPool,
        rewards: Mapping[str, str],
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.train: list[Problem] = []
        self.held_out: list[Problem] = []
        self.sources: list[str] = []
        self.eval_sources: list[str] = []
        self.stop_ids = endings.stop_ids
        self.end_of_thinking_ids = endings.end_of_thinking_ids
        self.phrase_ids = endings.phrase_ids
        self.thinking_end = endings.thinking_end
        self.skipped = Counter[str]()
        self.columns: dict[str, str] = {}
        self._pool = pool
        self._rewards = rewards
        self._prompts: dict[tuple[str, str], str] = {}  # (source, key) -> text
        self._split: set[str] = set()  # keys of all prompts that a data set holds out, usable or not
        self._ids = set(tokenizer.get_vocab().values())  # they may have gaps

    def read(self, name: str, data: DataSet) -> tuple[dict[str, Problem], set[str]]:
        """({key: problem}, the keys of all prompts) of one data set, under the source `name`. Left out and counted in
        `skipped` are rows whose answer no verifier can read and prompts that are too long. Raises ValueError."""
        options = self.options
        reward = self._rewards[name]
        rows, prompts, skipped, self.columns[name] = read_rows(
            data, options.prompt_column, options.answer_column, reward
        )
        readable = self._pool.answers_readable(reward, [row.answer for row in rows.values()])
        encoded = encode_prompts(self.tokenizer, [row.messages for row in rows.values()], options)
        problems: dict[str, Problem] = {}
        for (key, row), is_readable, ids in zip(rows.items(), readable, encoded, strict=True):
            if not is_readable:
                skipped["unreadable_answer"] += 1
            elif not ids:
                skipped["prompt_without_tokens"] += 1
            elif len(ids) > options.max_prompt_tokens:
                skipped["prompt_too_long"] += 1
            else:
                problems[key] = Problem(key, tuple(ids), row.answer, name)
                self._prompts[name, key] = row.text
        self.skipped += skipped
        return problems, prompts

    def add(self, data: DataSet) -> None:
        """Reads and splits one data set. A prompt of several stays with the first that holds it out, or else with the
        first that has it, and is counted for the others. Raises ValueError."""
        problems, prompts = self.read(data.name, data)
        self.sources.append(data.name)
        smallest = set(sorted(prompts)[: self.options.held_out])
        self._split |= smallest
        given_up = [problem for problem in self.train if problem.key in smallest]  # by the earlier data sets
        self.train = [problem for problem in self.train if problem.key not in smallest]
        to_hold_out = (problems.keys() & smallest) - {problem.key for problem in self.held_out}
        to_train = problems.keys() - self._split - {problem.key for problem in self.train}
        elsewhere = problems.keys() - to_hold_out - to_train
        self.held_out += [problems[key] for key in sorted(to_hold_out)]
        self.train += [problems[key] for key in sorted(to_train)]
        self.skipped += Counter(duplicate_prompt=len(given_up) + len(elsewhere))

    def check_split(self) -> None:
        """Raises ValueError if a data set has nothing left to train on or to evaluate, now that all are there."""
        train = Counter(problem.source for problem in self.train)
        held_out = Counter(problem.source for problem in self.held_out)
        expected = self.options.held_out
        for name in self.sources:
            if not train[name] or (expected and not held_out[name]):
                skipped = f" (skipped: {dict(self.skipped)})" if self.skipped else ""
                raise ValueError(
                    f"`dataset` {name} has {train[name] + held_out[name]} usable prompts{skipped}, "
                    f"and `held_out` {expected} leaves {train[name]} to train on and "
                    f"{held_out[name]} to evaluate; add rows, mend those that are skipped, or evaluate others"
                )

    def add_eval_sets(self, data_sets: Mapping[str, DataSet]) -> None:
        """Reads each set into `held_out`, whole, and takes its prompts out of `train`, which
        `skipped["in_eval_dataset"]` counts. A prompt that is a part of the other, as where one has a system message or
        an instruction around the question, is the same. The split of the training data does not change. Raises
        ValueError if a set has nothing to evaluate."""
        evaluated: list[Problem] = []
        for name, data in data_sets.items():
            try:
                problems, _ = self.read(name, data)
            except ValueError as error:
                raise ValueError(str(error).replace("`dataset`", "`eval_dataset`")) from error
            if not problems:
                raise ValueError(f"`eval_dataset` {name} has no usable prompt (skipped: {dict(self.skipped)})")
            self.eval_sources.append(name)
            self.held_out += [problems[key] for key in sorted(problems)]
            evaluated += problems.values()
        keys = {problem.key for problem in evaluated}
        texts = list(filter(is_long, map(self.words, evaluated)))
        all_texts = "\n".join(texts)

        def is_evaluated(problem: Problem) -> bool:
            words = self.words(problem)
            if problem.key in keys or (is_long(words) and words in all_texts):
                return True
            return any(text in words for text in texts)

        train = [problem for problem in self.train if not is_evaluated(problem)]
        self.skipped += Counter(in_eval_dataset=len(self.train) - len(train))
        self.train = train

    @property
    def counts(self) -> Counter[str]:
        """Verdicts so far by kind: the kinds of `judges.Verdict`."""
        return self._pool.counts

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; U+FFFD where ids have no token, which `decode` leaves out: models
        may have more rows than their tokenizer has tokens."""
        text = ""
        for known, part in itertools.groupby(ids, self._ids.__contains__):
            text += self.tokenizer.decode(list(part), skip_special_tokens=False) if known else "\ufffd"
        return text

    def question(self, problem: Problem) -> str:
        """The problem's prompt as its data set has it."""
        return self._prompts[problem.source, problem.key]

    def words(self, problem: Problem) -> str:
        """Its prompt with its white space made equal, between spaces."""
        return f" {' '.join(self.question(problem).split())} "

    def score(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """(reward, correct) of each completion of one problem, in order; a stop token at its end is not judged."""
        reward = self._rewards[problem.source]
        jobs = []
        for ids in completions:
            body = ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids
            jobs.append(Job(reward, self.question(problem), self.text(body), problem.answer))
        return [(verdict.reward, verdict.correct) for verdict in self._pool.judge(jobs)]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def load_dataset_task(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    reward: str = "math",
    reward_workers: int = max(2, (os.cpu_count() or 2) // 2),
    reward_timeout: float = 8.0,
    eval_dataset: str = "",
    judge: bool = True,
) -> DatasetTask:
    """A task of one data set or several, named as `rows.parse_data_sets` reads them, and of sets that are only
    evaluated, as `rows.parse_eval_sets` does.

    `reward` is that of all data sets that name none, see judges.py. `judge` False ends the worker processes once the
    rows are checked, for a process that never scores. Raises ValueError naming the option to change, in backticks.
    """
    data_sets = {data.name: data for data in parse_data_sets(dataset)}
    eval_sets = parse_eval_sets(eval_dataset)
    for name in eval_sets.keys() & data_sets.keys():
        raise ValueError(f"`eval_dataset` {name}: a name is that of a data set to train on; give another")
    rewards = {source: data.reward or reward for source, data in (data_sets | eval_sets).items()}
    if "{prompt}" not in options.prompt_template:
        raise ValueError(f"`prompt_template` must hold {{prompt}}, got {options.prompt_template!r}")
    endings = find_endings(tokenizer, options)
    pool = RewardPool(list(rewards.values()), reward_workers, reward_timeout, endings.end_of_thinking)
    with contextlib.ExitStack() as undo:
        undo.callback(pool.close)
        task = DatasetTask(tokenizer, options, endings, pool, rewards)
        for data in data_sets.values():
            task.add(data)
        task.add_eval_sets(eval_sets)
        task.check_split()
        if judge:
            undo.pop_all()  # the task closes the pool
    return task
