"""One real vLLM engine for all tests that break none, since a start takes 10 s and more: `vllm_engine.generator(...)` is a
`Generator` of its own (pacer, problems, length control) over it. A test that kills or breaks an engine starts one of its
own with `started`."""

from collections.abc import Iterator

import pytest
from forked import fork_engines
from real_engine import SharedEngine, new_engine, started
from tiny_model import TinyModel


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    fork_engines()
    tiny = TinyModel(tmp_path_factory.mktemp("tied"), tied=True)
    with started(new_engine(tiny), tiny.weights(0)) as host:
        yield SharedEngine(host, tiny)
