"""Weights arrive byte for byte: by the hashes that vLLM itself takes of an engine's parameters."""

from real_engine import Shared, SharedEngine, new_engine, started
from tiny_model import TinyModel


def hashes(generator) -> list[dict[str, str]]:
    """For each of vLLM's workers: its parameters' names and the SHA-256 of their bytes, after the last push."""
    generator.settle()
    host = generator.engine.host if isinstance(generator.engine, Shared) else generator
    return host.result_of(host._run(host.engine.vllm.compute_weight_checksums))


def test_two_engines_with_the_same_weights_have_the_same_hashes(vllm_engine: SharedEngine, tmp_path) -> None:
    """One was started with them, the other got them in flight: what it computes with is what was sent, to the byte."""
    tiny = TinyModel(tmp_path / "model", tied=True)
    with started(new_engine(tiny), tiny.weights(3)) as generator:
        expected = hashes(generator)
    with vllm_engine.generator() as generator:
        for version, seed in ((1, 2), (2, 3)):
            generator.push(tiny.weights(seed), version, 0)
            assert (hashes(generator) == expected) == (seed == 3)
