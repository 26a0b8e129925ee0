"""Fixtures of several files: runs on recorded rollouts, and tasks made of data sets."""

from contextlib import closing
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def program(monkeypatch, tmp_path, model):
    """train.py on recorded rollouts, in tmp_path / "run"."""
    from recorded import Program, record_rollouts

    record_rollouts(monkeypatch)
    return Program(monkeypatch, tmp_path / "run", model)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, model):
    """`whole(flags)`: the folder of such a run that nothing stopped."""
    from recorded import Program, record_rollouts

    @cache
    def finished(flags=""):
        folder = tmp_path_factory.mktemp("whole") / "run"
        with pytest.MonkeyPatch.context() as monkeypatch:
            record_rollouts(monkeypatch)
            assert Program(monkeypatch, folder, model)(flags)[0] == 0
        return folder

    return finished


@pytest.fixture(scope="session")
def tokenizer():
    """Of bytes, with a chat template, and `</think>` as one token."""
    from bpe import bpe_tokenizer

    return bpe_tokenizer()


@pytest.fixture(scope="module")
def pool():
    """A worker that reads math takes a second to start."""
    from tasks.judges import RewardPool

    with closing(RewardPool(["math", "exact"], workers=1, end_of_thinking="</think>")) as pool:
        yield pool


@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer, pool):
    """`load_dataset_task` of rows, or of files in the working folder by their names, with one worker, `exact` and 10
    held-out prompts. What `math` and `exact` judge goes through one pool; others are closed at the end."""
    from test_rows import write_rows

    from tasks import data_sets
    from tasks.judges import RewardPool
    from tasks.prompts import PromptOptions

    monkeypatch.chdir(tmp_path)
    loaded = []

    def new_pool(rewards, *options):
        if not {*rewards} <= {"math", "exact"}:
            return RewardPool(rewards, *options)
        pool.counts.clear()

        def judge(jobs):
            assert {job.name for job in jobs} <= {*rewards}
            return pool.judge(jobs)

        others = {"answers_readable": pool.answers_readable, "counts": pool.counts}
        return SimpleNamespace(judge=judge, close=lambda: None, **others)

    monkeypatch.setattr(data_sets, "RewardPool", new_pool)

    def load(data, **options):
        if isinstance(data, list):
            data = write_rows(Path(f"rows-{len(loaded)}.jsonl"), data)
        names = options.keys() & PromptOptions.__dataclass_fields__
        prompt_options = PromptOptions(**{"held_out": 10} | {name: options.pop(name) for name in names})
        options = {"tokenizer": tokenizer, "reward": "exact", "reward_workers": 1} | options
        loaded.append(data_sets.load_dataset_task(data, options=prompt_options, **options))
        return loaded[-1]

    yield load
    for task in loaded:
        task.close()
