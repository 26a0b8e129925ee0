"""tools/memory.py: bytes by hand, and by another way of counting; the commands of the pages fit the cards they name."""

import re
from functools import cache
from pathlib import Path

import memory
import pytest
import torch
from saved_bytes import saved_bytes
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.flags import Flags
from runtime.model import Policy, Row, make_microbatch, recompute_layers

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
# Two tables of 1000 x 64. A layer: 64 x 64 for q and o, 64 x 32 for k and v, 3 x 64 x 96, norms of 2 x 64 and 2 x 16.
PARAMETERS = 2 * 64_000 + 3 * (2 * 4096 + 2 * 2048 + 18_432 + 128 + 32) + 64
POSITIONS = 512
FLAGS = {"dtype": "bfloat16", "model": "tiny", "tokens_per_microbatch": POSITIONS}


def tiny(tmp_path: Path) -> str:
    """A folder with nothing but the configuration."""
    Qwen3Config(**TINY).save_pretrained(tmp_path)
    return str(tmp_path)


@cache
def trainer(ranks: int = 1, **flags) -> dict[str, float]:
    return memory.trainer_bytes(Qwen3Config(**TINY), Flags(**FLAGS | flags), ranks, ranks == 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_are_sixteen_bytes_a_parameter(ranks):
    """FP32 weight, gradient and two moments, shared by the ranks."""
    found = trainer(ranks)["FP32 weights, gradients, moments"]
    assert found == pytest.approx(16 * PARAMETERS / ranks, rel=1e-3)


def test_recomputed_layers_keep_their_input_only():
    """Of 512 positions each of three layers keeps 64 bfloat16 numbers, and the head their last ones in FP32 or less;
    without recomputation a layer keeps at least 20 times that: what its 7 products and its activations read."""
    kept = "kept for the backward pass"
    recomputed, all_of_them = (trainer(gradient_checkpointing=switch)[kept] for switch in (True, False))
    layer = POSITIONS * 64 * 2
    assert 3 * layer <= recomputed <= 3 * layer + 6 * layer
    assert all_of_them - recomputed > 3 * 10 * layer


def test_what_is_kept_is_what_autograd_saves():
    """The same policy in bfloat16 with real data, its saved tensors counted by hooks; the microbatch's own are left out
    by neither."""
    part = make_microbatch([Row([0], [0] * (POSITIONS - 1), [1] * (POSITIONS - 1))], [0], POSITIONS - 1)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), dtype=torch.bfloat16)
    recompute_layers(model)
    saved = saved_bytes(model, lambda: Policy(model)(part))
    assert trainer(gradient_checkpointing=True)["kept for the backward pass"] == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_gathered_weights_are_in_bfloat16(ranks):
    """At the peak both tables and the last norm are whole on each rank, at 2 bytes a parameter, and at most two layers."""
    root, layer = 2 * (2 * 64_000 + 64), 2 * (PARAMETERS - 2 * 64_000 - 64) / 3
    assert root <= trainer(ranks)["layers and head, gathered"] <= root + 2 * layer


def test_an_update_gathers_a_whole_tensor():
    """A table of 1000 x 64 in the engine's dtype, here float32, and on one GPU one part of 256 MiB."""
    assert trainer(dtype="float32")["an update: a whole tensor and what travels"] == 4 * 64_000 + 256 * 2**20


def test_the_reference_model_of_the_penalty_is_whole_on_every_gpu():
    assert trainer(4, kl_coef=0.1)["reference model of --kl_coef"] == 2 * PARAMETERS
    assert trainer(4)["reference model of --kl_coef"] == 0


def test_keys_and_values_by_hand():
    """Qwen3-8B: 36 layers, 8 heads of 128, keys and values, 2 bytes; on 8 GPUs each has one of the heads."""
    config = memory.config_of("Qwen/Qwen3-8B")
    assert memory.cache_bytes(config, Flags(dtype="bfloat16")) == 147_456
    assert memory.cache_bytes(config, Flags(dtype="bfloat16", tensor_parallel=8)) == 18_432


def test_an_engine_spends_its_share():
    """0.35 of a trainer's card of 10 GB are 3.5 GB, of its own 8.5; 16 sequences' logits are 3 FP32 tensors. An update
    travels in one part, between two GPUs in three."""
    config = Qwen3Config(**TINY)
    for shared, share, parts in ((True, 3.5e9, 1), (False, 8.5e9, 3)):
        found = memory.engine_bytes(config, Flags(**FLAGS, max_num_seqs=16), 1e10, shared)
        beyond = found.pop("beyond its share: what of an update travels")
        assert sum(found.values()) == pytest.approx(share) and beyond == parts * 256 * 2**20
        assert found["weights"] == 2 * PARAMETERS
        assert found["logits, prefill"] == 3 * 4 * 16 * 1000 + 8192 * 2 * (4 * 64 + 2 * 96)
    asked = memory.engine_bytes(config, Flags(**FLAGS, engine_args='{"gpu_memory_utilization": 0.5}'), 1e10, True)
    assert sum(asked.values()) - 256 * 2**20 == pytest.approx(5e9)


def test_a_row_is_as_long_as_prompt_phrase_and_budgets_allow():
    """Microbatches hold at least one row, however few positions are asked for."""
    flags = Flags(dataset="x", max_prompt_tokens=100, max_budget=40, answer_budget=8)
    assert memory.longest_row(flags) == 100 + 40 + memory.PHRASE + 8


@pytest.mark.parametrize(("card", "code", "words"), [("4", 0, "it fits"), ("1", 1, "it does NOT fit")])
def test_exit_code_and_verdict(card, code, words, tmp_path, capsys):
    """CUDA's contexts and the update's buffers alone take 1.5 GB."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # a run that is there already is no hindrance
    argv = ["--card_gb", card, "--model", tiny(tmp_path), "--dtype", "bfloat16", "--output_dir", str(tmp_path / "run")]
    assert memory.main(argv) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    ("", "--model must be a folder, a hub id, or one of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B"),
    ("--model /nowhere", "--model /nowhere is no folder of a Hugging Face model"),
    ("--model Qwen/Qwen3-8B --generator_devices 3", "--generator_devices 3"),
    ("--model Qwen/Qwen3-8B --k -1", "--k must be at least 0"),
])  # fmt: skip
def test_what_cannot_be_counted_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        memory.main(["--card_gb", "80", *words.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err


# The machine that docs/gpu.md names for each of its commands.
MACHINES = [(24, 1, 1), (80, 8, 4), (80, 8, 8)]


@pytest.mark.slow
def test_the_commands_of_the_gpu_page_fit_their_cards():
    shell = "".join(re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "gpu.md").read_text(), re.M | re.S))
    commands = re.findall(r"^.*\btrain\.py ((?:.*\\\n)*.*--model (?:.*\\\n)*.*)$", shell, re.M)
    for command, (card, gpus, trainers) in zip(commands, MACHINES, strict=True):
        options = f"--card_gb {card} --gpus {gpus} --trainers {trainers}"
        assert memory.main([*options.split(), *command.replace("\\\n", " ").split()]) == 0
