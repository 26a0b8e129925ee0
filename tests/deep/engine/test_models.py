"""Hugging Face models and a data set of word problems, made here and saved in the formats of the hub, through the whole
of train.py on a CPU with real vLLM."""

import json
import os
import random

import pytest
import torch
from bpe import train_tokenizer
from forked import Context, fork_engines, run_program

import train
from runtime import model as policy
from runtime.weights import CheckpointTensors

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
REWARD = """
def even(prompt, completion, answer):
    "A reward that a random model sometimes gets."
    return len(completion) % 2 == 0
"""


def word_problems(count, seed=0):
    """Rows of the shape of GSM8K."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b, things = draw.randrange(50), draw.randrange(50), draw.choice(["apples", "pens", "books", "coins"])
        question = f"Ann has {a} {things} and gets {b} more. How many {things} has she?"
        yield {"question": question, "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}


def new_tokenizer():
    """Byte-level BPE, trained on the spot, with a chat template that opens the thinking."""
    from tokenizers import pre_tokenizers

    texts = [row["question"] + row["answer"] for row in word_problems(500)]
    tokenizer = train_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), texts, SPECIAL, 400)
    tokenizer.pad_token, tokenizer.chat_template = "<|end|>", TEMPLATE
    return tokenizer


# What a tiny model of a family needs beside the common shape. Experts are held in one tensor by transformers, and apart
# in a checkpoint.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": EXPERTS | {"norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mistral": {},
    "Gemma": {"tie_word_embeddings": True},
    "Gemma3Text": {"tie_word_embeddings": True, "sliding_window": 512, "query_pre_attn_scalar": 32},
    "Phi": {"num_key_value_heads": 2},
    "Phi3": {},
    "GPT2": {"tie_word_embeddings": True},
    "GPTNeoX": {"num_key_value_heads": 2},
    "Olmo2": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "Granite": {},
    "StableLm": {},
    "Starcoder2": {"tie_word_embeddings": True},
    "SmolLM3": {},
    "Glm4": {},
    "Glm4Moe": ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2},
    "Exaone4": {"sliding_window": 512},
    "SeedOss": {},
    "Olmo3": {"sliding_window": 512},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Nemotron": {},
    "Ernie4_5": {"tie_word_embeddings": True},
    "Glm": {},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True},
}


def new_model(kind, vocabulary):
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512}
    shape |= {"initializer_range": 0.1, "tie_word_embeddings": False}
    shape |= dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), 0)
    config = getattr(transformers, f"{kind}Config")(**(shape | FAMILIES[kind]))
    return transformers.AutoModelForCausalLM.from_config(config)


def save(kind, folder):
    tokenizer = new_tokenizer()
    model = new_model(kind, len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "start")
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in word_problems(400)))
    (folder / "own.py").write_text(REWARD)
    return model


def program(folder, argv):
    """train.py with these arguments, in a process of its own."""
    os.chdir(folder)
    return train.main(argv)


def trained(folder, out, *more):
    """The steps of a run in a process that is forked, as its engine is, from one that has imported vLLM."""
    argv = [
        "--engine", "vllm", "--dataset", "words.jsonl", "--reward", "own:even", "--max_steps", "3",
        "--batch_prompts", "4", "--rollouts", "4", "--k", "2", "--lr", "0.01", "--warmup_steps", "1", "--held_out",
        "16", "--eval_every", "1", "--eval_samples", "1", "--dtype", "float32",
        "--min_budget", "8", "--max_budget", "12", "--answer_budget", "6", "--max_num_seqs", "32",
        "--interruption_phrase", " stop </think>", "--pass_rate_threshold", "2", "--output_dir", out, *more,
    ]  # fmt: skip
    fork_engines()
    printed, errors = (folder / f"{out}.{name}" for name in ("out", "err"))
    process = Context().Process(target=run_program, args=(program, str(printed), str(errors), str(folder), argv))
    process.start()
    process.join(280)
    assert process.exitcode == 0, printed.read_text()[-2000:] + errors.read_text()[-3000:]
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.medium
@pytest.mark.parametrize("kind", [k if k == "Qwen3Moe" else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES])
def test_a_family_trains(kind, tmp_path):
    """docs/operations.md lists them. Three steps from a JSONL of word problems: trainer and generator agree at every
    version after weights moved, every tensor of the body is trained, and the saved model loads in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = save(kind, tmp_path)
    steps = trained(tmp_path, "run", "--model", "start")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert sum(step.get("updated", 0) for step in steps) >= 2
    gaps = [step["logprob_gap"] for step in steps if "logprob_gap" in step]
    assert len(gaps) >= 2 and max(gaps) < 1e-4
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert type(after) is type(start) and len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == 400
    # Adam's first steps move every coordinate with a gradient by about lr; every tensor of the body has some.
    if kind == "Qwen3Moe":
        pairs = zip(start.named_parameters(), after.parameters(), strict=True)
        assert all((p - q).abs().max() > 1e-3 for (name, p), q in pairs if "q_norm" not in name)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe", "Mixtral"])
def test_weights_for_the_generator_are_those_of_a_checkpoint(kind, tmp_path):
    """Same names, shapes and numbers as save_pretrained writes."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    new_model(kind, 400).save_pretrained(tmp_path)
    for model in (new_model(kind, 400), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)):
        sent = CheckpointTensors(model, torch.float32)
        tensors, written = dict(sent.items()), load_file(tmp_path / "model.safetensors")
        assert tensors.keys() == written.keys()
        assert all(torch.equal(tensors[name], written[name]) for name in written)


@pytest.mark.parametrize(("kind", "experts"), [("Qwen3Moe", 3 * 64 * 32), ("Mixtral", 3 * 64 * 128)])
def test_active_parameters_of_a_mixture(kind, experts):
    """Two of four experts a token, in two layers; the router, attention, norms and head whole; no embedding table."""
    model = new_model(kind, 400)
    total = sum(p.numel() for p in model.parameters())
    assert policy.active_parameters(model) == total - 2 * 2 * experts - 400 * 64
