"""Weights arrive byte for byte: by the hashes that vLLM itself takes of an engine's parameters."""

import pytest
from real_engine import Shared, SharedEngine, new_engine, started
from tiny_model import TinyModel

from runtime.weights import RunWeightFile


def hashes(generator) -> list[dict[str, str]]:
    """For each of vLLM's workers: its parameters' names and the SHA-256 of their bytes, after the last push."""
    generator.settle()
    host = generator.engine.host if isinstance(generator.engine, Shared) else generator
    return host.result_of(host._run(host.engine.vllm.compute_weight_checksums))


def changed(before: list[dict[str, str]], after: list[dict[str, str]]) -> set[str]:
    """Names of the parameters of one worker whose hashes differ."""
    (old,), (new,) = before, after
    assert set(old) == set(new)
    return {name.split(":")[-1] for name in new if old[name] != new[name]}


def test_hashes_of_an_engines_weights_change_with_an_update(vllm_engine: SharedEngine) -> None:
    """New weights change the hash of each parameter, since this small model's are not repacked; the same weights once
    more change none."""
    tiny = vllm_engine.tiny
    with vllm_engine.generator() as generator:
        digests = []
        for version, seed in enumerate((1, 2, 2), start=1):
            generator.push(tiny.weights(seed), version, 0)
            digests.append(hashes(generator))
    parameters = {name.split(":")[-1] for name in digests[0][0]}
    assert changed(digests[0], digests[1]) == parameters and len(parameters) > 8
    assert changed(digests[1], digests[2]) == set()


def test_two_engines_with_the_same_weights_have_the_same_hashes(vllm_engine: SharedEngine, tmp_path) -> None:
    """One was started with them, the other got them in flight: what it computes with is what was sent, to the byte."""
    tiny = TinyModel(tmp_path / "model", tied=True)
    with started(new_engine(tiny), tiny.weights(3)) as generator:
        expected = hashes(generator)
    with vllm_engine.generator() as generator:
        generator.push(tiny.weights(3), 1, 0)
        assert hashes(generator) == expected


@pytest.mark.medium
def test_a_small_update_in_bfloat16_changes_the_bytes_and_a_lost_one_does_not(tmp_path, monkeypatch) -> None:
    """Weights of about 0.15, where bfloat16 has steps of 1e-3, move by 1e-6, as by one step of AdamW at that learning
    rate: of the embedding's 4,096 some round to another value. Then nothing arrives any more."""
    tiny = TinyModel(tmp_path / "model", tied=True)
    weights = tiny.weights(0)
    moved = {name: x + 1e-6 * x.sign() for name, x in weights.items()}

    def rounded(weights):
        return {name: x.bfloat16() for name, x in weights.items()}

    with started(new_engine(tiny, dtype="bfloat16"), rounded(weights)) as generator:
        digests = [hashes(generator)]
        generator.push(rounded(moved), 1, 0)
        digests.append(hashes(generator))
        monkeypatch.setattr(RunWeightFile, "prepare", lambda self, weights: None)  # the old file stays
        generator.push(rounded(tiny.weights(1)), 2, 0)
        digests.append(hashes(generator))
    assert "model.embed_tokens.weight" in changed(digests[0], digests[1])
    assert changed(digests[1], digests[2]) == set()
