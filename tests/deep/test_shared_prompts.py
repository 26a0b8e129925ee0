"""runtime/shared_prompts.py on models of many kinds: the gradient of prompts that are computed once is that of whole rows,
or the rows stay whole."""

import random

import pytest
import torch
from tiny_trainer import gradient_of, saved_model, trainer_of

import losses
from runtime.microbatches import TokenRow, lay_out
from runtime.trainer import TrainingBatch

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 6}  # shorter than the prompts
MODELS = {
    "Llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Qwen2", {}),
    "norms of queries and keys": ("Qwen3", {}),
    "four heads to one": ("Llama", {"num_attention_heads": 4, "head_dim": 8}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3Moe", MIXTURE | {"num_experts": 4}),
    "sliding windows": ("Mistral", WINDOW),
    "some windows": ("Gemma3Text", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "attention sinks": ("GptOss", MIXTURE | WINDOW | {"num_local_experts": 4}),
    "learned positions": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPT2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "GPTNeoX": ("GPTNeoX", {}),
}
# Gradient checkpointing goes another way for one model, for a mixture and for layers of two kinds; not for each of these.
SELDOM = MODELS.keys() - {"Llama, tied", "Mixtral", "some windows"}
CASES = [pytest.param(name, False, id=name) for name in MODELS]
for name in MODELS:
    marks = pytest.mark.slow if name in SELDOM else ()
    CASES.append(pytest.param(name, True, id=f"{name}-checkpointing", marks=marks))
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
RECURRENT = {
    "Mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1, "expand": 2},
    "Qwen3Next": MIXTURE | DELTA | {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
}


def a_batch(seed: int) -> TrainingBatch:
    """Four prompts of 7 to 12 tokens, four completions of up to 13 each, some tokens forced, some the prompt's only one."""
    draw, rows = random.Random(seed), []

    def tokens(n: int) -> list[int]:
        return [draw.randrange(23) for _ in range(n)]

    for _ in range(4):
        prompt = tokens(draw.choice([7, 9, 12]))
        for n in draw.sample(range(1, 14), 4):
            rows.append(TokenRow(prompt, tokens(n), [int(draw.random() < 0.9) for _ in range(n)]))
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.mask) for row in rows], batch_first=True).bool()
    advantages = torch.tensor([draw.gauss(0, 1) for _ in rows])
    return TrainingBatch(rows, -3.0 * mask, mask, advantages, losses.aggregation_weights(mask, torch.arange(16) // 4))


def gradient(trainer, batch, tokens: int, share: bool) -> torch.Tensor:
    trainer.flags.tokens_per_microbatch, trainer.flags.share_prompts = tokens, share
    assert lay_out(batch.rows, tokens, share=share)[0] == share
    trainer.optimizer.zero_grad()
    trainer.backward(batch)
    return gradient_of(trainer)


def test_the_batches_have_several_shared_microbatches_and_lengths():
    shared, [cuts] = lay_out(a_batch(0).rows, 64, share=True)
    assert shared and len(cuts) > 2
    assert len({len(row.prompt_ids) for row in a_batch(0).rows}) > 1


@pytest.mark.long
@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_float32_gradients_over_ten_steps(name, recompute, tmp_path):
    """Within 1e-5 of those of whole rows, relative to their norm, at every step, of which those that recompute make
    four, in microbatches of two sizes; log-probs within 1e-5 nats."""
    kind, more = MODELS[name]
    options = {"lr": 1e-3, "warmup_steps": 0, "gradient_checkpointing": recompute}
    trainer = trainer_of(saved_model(kind, tmp_path, **more | {"initializer_range": 0.2}), **options)
    assert not trainer.note
    for step in range(4 if recompute else 10):
        batch = a_batch(step)
        shared = gradient(trainer, batch, (64, 2048)[step % 2], share=True)
        scores = trainer.score(batch.rows)
        plain = gradient(trainer, batch, 2048, share=False)
        assert (shared - plain).norm() < 1e-5 * plain.norm()
        torch.testing.assert_close(scores, trainer.score(batch.rows), atol=2e-5, rtol=0)
        assert trainer.update(step)["updated"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama, tied", "biases", "Qwen3Moe", "some windows"])
def test_bfloat16_gradients_over_ten_steps(name, tmp_path):
    """As near to the FP32 gradient of the same rounded weights as that of whole rows is. (From each other they are two or
    three times as far as whole rows in other microbatches are: attention with a mask rounds elsewhere.)"""
    kind, more = MODELS[name]
    options = {"dtype": "bfloat16", "lr": 1e-3, "warmup_steps": 0}
    folder = saved_model(kind, tmp_path, **more | {"initializer_range": 0.2})
    trainer, exact, gaps = trainer_of(folder, **options), trainer_of(folder), []
    for step in range(10):
        batch = a_batch(step)
        for parameter, rounded in zip(exact.model.parameters(), trainer.policy.parameters(), strict=True):
            parameter.data = rounded.data.float()
        expected = gradient(exact, batch, 2048, share=False)
        whole, shared = (gradient(trainer, batch, 2048, share) for share in (False, True))
        gaps.append([((other - expected).norm() / expected.norm()).item() for other in (whole, shared)])
        trainer.update(step)
    of_whole, of_shared = map(sum, zip(*gaps, strict=True))
    assert 0.001 < of_shared < 1.1 * of_whole


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_models_rows_stay_whole(kind, tmp_path):
    """Its state after the prompt is in no cache of keys and values. One line says why, and it trains as before."""
    folder = saved_model(kind, tmp_path, **RECURRENT[kind])
    trainer, plain = trainer_of(folder), trainer_of(folder, share_prompts=False)
    assert trainer.note.startswith(f"--share_prompts false, as {kind}ForCausalLM cannot: ")
    assert not trainer.flags.share_prompts and not plain.note
    for each in (trainer, plain):
        each.backward(a_batch(0))
    assert torch.equal(gradient_of(trainer), gradient_of(plain))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_cache_without_a_gradient_is_found_out(part, tmp_path, monkeypatch):
    """The proof at load would see keys or values that have lost their graph, and log-probs of another prompt's."""
    from runtime.shared_prompts import PromptLayer

    folder, update = saved_model("Llama", tmp_path), PromptLayer.update

    def detached(layer, keys, values, *more):
        if part == "keys":
            keys = keys.detach()
        else:
            values = values.detach()
        return update(layer, keys, values, *more) if layer.prompt_of is None else update(layer, keys, values)

    monkeypatch.setattr(PromptLayer, "update", detached)
    assert "its gradient would change" in trainer_of(folder).note
