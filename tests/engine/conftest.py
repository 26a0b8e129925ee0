"""One real vLLM engine for all tests that break none, since a start takes 10 s and more: `vllm_engine.generator(...)` is a
`Generator` of its own (pacer, problems, length control) over it. A test that kills or breaks an engine starts one of its
own with `new_generator`."""

from collections.abc import Iterator

import pytest
from real_engine import SharedEngine, new_engine, new_generator
from tiny_model import TinyModel


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    tiny = TinyModel(tmp_path_factory.mktemp("tied"), tied=True)
    host = new_generator(new_engine(tiny))
    try:
        host.start(tiny.weights(0))
        yield SharedEngine(host, tiny)
    finally:
        host.close()
