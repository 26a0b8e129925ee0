"""Fixtures of several files, which tests come first, and which share a process. That this file is here also puts tests/ on
the path of tests/deep/engine/."""

import atexit
import gc
from contextlib import suppress

import pytest

with suppress(ModuleNotFoundError):  # the lessons run with requirements.txt alone
    from hypothesis import settings

    settings.register_profile(
        "tests", derandomize=True, database=None, deadline=None, max_examples=50
    )  # the same every time
    settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Not at the top of this file: the process that shares the tests out would wait for the import as well."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """accelerate collects garbage at the end of each run: not among what earlier files imported, 0.1 s each time."""
    gc.freeze()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The loop of train.py over a scripted generator and trainer, in tmp_path / "run"."""
    from scripted import play  # the imports take seconds

    return lambda *scripts, **changes: play(monkeypatch, tmp_path / "run", *scripts, overwrite=True, **changes)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny untrained model."""
    from scripted import small_model

    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def one_step(tmp_path):
    """What one step of the loop makes of groups, in a folder of its own: scripted.py's `batch_of`."""
    from scripted import batch_of

    return lambda groups, **changes: batch_of(groups, tmp_path, **changes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a real engine come first: they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/deep/engine/"))


def pytest_collection_finish() -> None:
    """No garbage collection looks again at what the imports left, a million objects and 0.4 s each time, before the end
    of the process (where what is left would be called leaked)."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several test processes, a file's tests run in one of them, and all that share a real engine in the same one;
    the medium ones have engines of their own."""
    from xdist.scheduler import LoadScopeScheduling

    shared = not config.option.markexpr.startswith("medium")

    class OneEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/deep/engine" if shared and nodeid.startswith("tests/deep/engine/") else nodeid.split("::")[0]

    config.option.loadscopereorder = False  # else the file with the most tests would come first
    return OneEngine(config, log)
