"""What the weights check rests on, by vLLM itself: hashes of an engine's weights."""

import pytest
from real_engine import SharedEngine, new_engine, started
from tiny_model import TinyModel

from runtime.engine import RunEngine
from runtime.weights import RunWeightFile


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
            digests.append(generator.ask(lambda shared: shared._there(shared.engine.weight_digests())))
    parameters = {name.split(":")[-1] for name in digests[0][0]}
    assert changed(digests[0], digests[1]) == parameters and len(parameters) > 8
    assert changed(digests[1], digests[2]) == set()


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
        digests = [generator.ask(RunEngine.weight_digests)]
        generator.push(rounded(moved), 1, 0)
        digests.append(generator.ask(RunEngine.weight_digests))
        monkeypatch.setattr(RunWeightFile, "prepare", lambda self, weights: None)  # the old file stays
        generator.push(rounded(tiny.weights(1)), 2, 0)
        digests.append(generator.ask(RunEngine.weight_digests))
    assert "model.embed_tokens.weight" in changed(digests[0], digests[1])
    assert changed(digests[1], digests[2]) == set()
