"""What the weights check and the bound of a transfer rest on, by vLLM itself: hashes of an engine's weights, and how its
own packing cuts a model into parts."""

import pytest
import torch
from real_engine import SharedEngine, new_engine, new_generator
from tiny_model import TinyModel
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.engine import RestartingEngine
from runtime.model import CheckpointTensors
from runtime.weight_channels import BUFFER, FileWeights

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # vLLM's CPU build keeps them repacked, beside the model


def changed(before: list[dict[str, str]], after: list[dict[str, str]]) -> set[str]:
    """Names of the parameters of one worker whose hashes differ."""
    (old,), (new,) = before, after
    assert set(old) == set(new)
    return {name.split(":")[-1] for name in new if old[name] != new[name]}


def test_hashes_of_an_engines_weights_change_with_an_update(vllm_engine: SharedEngine) -> None:
    """New weights change the hash of each parameter, on a CPU but for the repacked ones; the same weights once more
    change none."""
    tiny = vllm_engine.tiny
    with vllm_engine.generator() as generator:
        found = []
        for version, seed in enumerate((1, 2, 2), start=1):
            generator.push(tiny.weights(seed), version, 0)
            found.append(generator.ask(lambda shared: shared._there(shared.engine.weight_digests())))
    parameters = {name.split(":")[-1] for name in found[0][0]}
    repacked = {name for name in parameters if any(linear in name for linear in LINEARS)}
    assert changed(found[0], found[1]) == parameters - repacked and "model.embed_tokens.weight" not in repacked
    assert len(repacked) == 8 and changed(found[1], found[2]) == set()


@pytest.mark.medium
def test_a_small_update_in_bfloat16_changes_the_bytes_and_a_lost_one_does_not(tmp_path, monkeypatch) -> None:
    """Weights of about 0.15, where bfloat16 has steps of 1e-3, move by 1e-6, as by one step of AdamW at that learning
    rate: of the embedding's 4,096 some round to another value. Then nothing arrives any more."""
    tiny = TinyModel(tmp_path / "model", tied=True)
    generator, weights = new_generator(new_engine(tiny, dtype="bfloat16")), tiny.weights(0)
    moved = {name: x + 1e-6 * x.sign() for name, x in weights.items()}

    def ask():
        return generator.ask(RestartingEngine.weight_digests)

    try:
        generator.start({name: x.bfloat16() for name, x in weights.items()})
        found = [ask()]
        generator.push({name: x.bfloat16() for name, x in moved.items()}, 1, 0)
        found.append(ask())
        monkeypatch.setattr(FileWeights, "prepare", lambda self, weights: None)  # the old file stays
        generator.push({name: x.bfloat16() for name, x in tiny.weights(1).items()}, 2, 0)
        found.append(ask())
    finally:
        generator.close()
    assert "model.embed_tokens.weight" in changed(found[0], found[1])
    assert changed(found[1], found[2]) == set()


def test_three_parts_of_an_8b_model_are_less_than_2_gb() -> None:
    """Two buffers of vLLM's `nccl` and the next part, which is made before the oldest is dropped. Its own 1 GiB would make
    3.6 GB, and a bound of the size of the largest tensor (1.2 GB, as `ipc` needs it) 4.8."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = CheckpointTensors(model, torch.bfloat16).metadata()

    def three(bound: int) -> float:
        items = ((meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta in tensors)
        parts = []
        while (part := pack_tensors(items, lambda item: item[1], bound)) is not None:
            parts.append(part.packed_tensor.numel() / 1e9)
        assert sum(parts) == pytest.approx(8_190_735_360 * 2 / 1e9)
        return max(sum(parts[i : i + 3]) for i in range(len(parts)))

    assert three(BUFFER) < 2 < 3.5 < three(2**30) < 4.5 < three(151936 * 4096 * 2)
