"""runtime/model.py and trainer.py on models of many kinds: which are refused, what they send and cost, and gradient
checkpointing."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from saved_bytes import saved_bytes
from tiny_trainer import (
    SHAPE,
    gradient_of,
    hand_batch,
    near_uniform_model,
    saved_model,
    trainer_of,
    weights_of,
)
from transformers import AutoModelForCausalLM

from runtime.flags import UsageError
from runtime.microbatches import TokenRow
from runtime.shared_prompts import score

SAFE, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
MIXTURE |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    return near_uniform_model(tmp_path_factory.mktemp("model"))


def refused(folder: str, sentence: str, **flags) -> UsageError:
    with pytest.raises(UsageError, match=sentence) as caught:
        trainer_of(folder, **flags)
    return caught.value


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_parameters_that_cost_flops(tmp_path, tied):
    """The lookup of an embedding costs nothing: P is all parameters if one table serves as head, too. The generator
    gets its own dtype; the trainer's weights stay FP32."""
    trainer = trainer_of(saved_model("Qwen3", tmp_path, tie_word_embeddings=tied), dtype="bfloat16")
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert ("lm_head.weight" in sizes) == (not tied)
    lookup = 0 if tied else sizes["model.embed_tokens.weight"]
    assert trainer.parameters_in_flops == sum(sizes.values()) - lookup
    weights = dict(trainer.weights.items())
    assert set(weights) == set(sizes)
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_temperature_without_sampling_does_not_keep_a_model_from_being_saved(tmp_path):
    """As several public models have it: transformers loads such settings and refuses to save them."""
    folder = Path(saved_model("Qwen3", tmp_path / "model"))
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    trainer_of(str(folder)).model.save_pretrained(tmp_path / "saved")


@pytest.mark.long
def test_persistent_buffers_travel_in_their_own_dtype(tmp_path):
    """The correction bias of a router (GLM-4.5, DeepSeek-V3); rotary frequencies stay at home."""
    folder = saved_model("Glm4Moe", tmp_path, **MIXTURE)
    trainer, name = trainer_of(folder, dtype="bfloat16"), "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = dict(trainer.weights.items())
    assert weights.keys() == load_file(Path(folder) / SAFE).keys()
    assert weights[name].dtype == torch.float32


@pytest.mark.long
def test_a_model_of_text_and_images_trains_on_text(tmp_path):
    """Gemma 3 of 4B and more: the sizes of the text model are in a config of its own."""
    text = SHAPE | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"image_token_index": 20, "boi_token_index": 21, "eoi_token_index": 22, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, **ids
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = trainer_of(str(tmp_path))
    before = weights_of(trainer)
    assert trainer.backward(hand_batch())[0] and trainer.update(0)["updated"] == 1
    assert not torch.equal(before, weights_of(trainer)) and trainer.parameters_in_flops > 0


def test_an_adapter_in_the_place_of_a_model_is_refused(monkeypatch, model_folder):
    """With peft installed transformers loads its base, too, frozen: nothing would train."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.peft_config = {}
    report = {"missing_keys": [], "mismatched_keys": []}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, report))
    refused(model_folder, r"^--model .* is an adapter; merge it into its base model first\.$")


class Code:
    def __reduce__(self):
        return print, ("code ran",)


def without(name):
    return lambda weights: save({key: tensor for key, tensor in weights.items() if key != name})


def reshaped(weights):
    return save(weights | {"model.norm.weight": torch.ones(9)})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (SAFE, lambda weights: save(weights)[:5000], r"does not load as a causal LM \(SafetensorError: .*\)"),
        (PICKLED, lambda weights: pickle.dumps(Code()), r"does not load .* \(UnpicklingError: .*\)"),
        (PICKLED, lambda weights: b"no pickle at all", r"does not load as a causal LM \(.*\)"),
        (PICKLED, None, r"does not load as a causal LM \(.+\)"),  # no weights at all
        (SAFE, without("model.norm.weight"), r"weights lack model\.norm\.weight.*\(1 such tensors\); get .*"),
        (SAFE, without("lm_head.weight"), r"weights lack lm_head\.weight.*\(1 such tensors\); get .*"),
        (CONFIG, lambda weights: b"", r"does not load as a causal LM \(.+\)"),
        (CONFIG, lambda weights: b"[]", r"does not load as a causal LM \(.+\)"),
        (CONFIG, lambda weights: b"[" * 100_000, r"does not load as a causal LM \(.+\)"),
        (SAFE, reshaped, r"in another shape \(1 .*; get .*"),
    ],
)
def test_weights_that_are_damaged_are_refused_in_a_sentence(tmp_path, capsys, name, content, sentence):
    """Cut short, a pickle (whose code does not run), tensors that lack (which would be random) or have other shapes."""
    folder = Path(saved_model("Qwen3", tmp_path, tie_word_embeddings=False))
    weights = load_file(folder / SAFE)
    (folder / SAFE).unlink()
    if content:
        (folder / name).write_bytes(content(weights))
    error = refused(str(folder), rf"^--model .*{sentence}\.$")
    assert "\n" not in str(error) and "code ran" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_the_layers_inputs_only(dtype, tmp_path):
    """Four layers, 2,048 positions: at most a quarter of the bytes for backward, and the same gradient."""
    folder = saved_model("Qwen3", tmp_path, num_hidden_layers=4, max_position_embeddings=512, initializer_range=0.1)
    rng = random.Random(0)
    rows = [TokenRow([1], [rng.randrange(23) for _ in range(255)], [1] * 255) for _ in range(8)]
    sizes, gradients = [], []
    for switch in (False, True):
        trainer = trainer_of(folder, gradient_checkpointing=switch, dtype=dtype)
        [part] = trainer._microbatches(rows)
        outputs = []
        sizes.append(
            saved_bytes(trainer.policy.model, lambda t=trainer, p=part, o=outputs: o.append(score(t.policy, p)[0]))
        )
        outputs[0].sum().backward()
        gradients.append(gradient_of(trainer))
    assert sizes[1] < sizes[0] / 4
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("kind", ["Qwen3", "OPT"])  # OPT drops by the layer's own flag
def test_gradient_checkpointing_switches_no_dropout_on(kind, tmp_path):
    """Log-probs twice the same, and those without it."""
    more = OPT if kind == "OPT" else {}
    folder = saved_model(kind, tmp_path, **more, attention_dropout=0.5, dropout=0.5)
    plain, checkpointed = (trainer_of(folder, gradient_checkpointing=switch) for switch in (False, True))
    [part] = plain._microbatches(hand_batch().rows)
    expected = score(plain.policy, part)[0]
    for _ in range(2):
        assert torch.equal(score(checkpointed.policy, part)[0], expected)


def test_gradient_checkpointing_of_a_model_without_such_layers_is_refused(tmp_path):
    folder = saved_model("CTRL", tmp_path, n_embd=32, n_layer=1, n_head=2, dff=48)
    refused(folder, "--gradient_checkpointing true: CTRLLMHeadModel has no layers for it", gradient_checkpointing=True)
