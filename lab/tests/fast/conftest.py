"""One real FastEngine for all tests that break none, with memory that two processes share in the place of a GPU's: the
handle, its way through vLLM's messages, the layout and both ends are those of a GPU. (That a card's handle opens:
lab/tests/gpu.)"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import TinyModel

from lab.fast_vllm import FastEngine, GpuMemory
from runtime.engine import EngineDevices

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "deep" / "engine"))

from forked import fork_engines
from real_engine import SharedEngine, new_engine, started

HERE = EngineDevices(options={}, workers=1, gpus=[], shared=False)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> GpuMemory:
    monkeypatch.setattr(GpuMemory, "device", "cpu")
    return GpuMemory(0, HERE)


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    fork_engines()
    tiny = TinyModel(tmp_path_factory.mktemp("tied"), tied=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuMemory, "device", "cpu")
        engine = new_engine(tiny, kind=FastEngine, channel=GpuMemory(0, HERE))
        with started(engine, tiny.weights(0)) as host:
            yield SharedEngine(host, tiny)
