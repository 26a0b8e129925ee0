"""tools/plan.py: bytes by hand and by another way of counting."""

import re
import shlex
from functools import cache
from pathlib import Path

import plan
import pytest
import torch
from saved_bytes import saved_bytes
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.flags import Flags
from runtime.model import Policy, Row, make_microbatch, recompute_layers

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parent.parent
TINY = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
# Two tables of 1000 x 64. A layer: 64 x 64 for q and o, 64 x 32 for k and v, 3 x 64 x 96, norms of 2 x 64 and 2 x 16.
PARAMETERS = 2 * 64_000 + 3 * (2 * 4096 + 2 * 2048 + 18_432 + 128 + 32) + 64
POSITIONS = 512
FLAGS = {"dtype": "bfloat16", "model": "tiny", "tokens_per_microbatch": POSITIONS}


@pytest.fixture
def tiny(tmp_path) -> str:
    """A folder with nothing but the configuration."""
    Qwen3Config(**TINY).save_pretrained(tmp_path)
    return str(tmp_path)


@cache
def trainer(ranks: int = 1, **flags) -> dict[str, float]:
    return plan.trainer_bytes(Qwen3Config(**TINY), Flags(**FLAGS | flags), ranks, ranks == 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_and_gathered_weights_by_hand(ranks):
    """FP32 weight, gradient and two moments are shared by the ranks. At the peak both tables and the last norm are whole
    on each rank, at 2 bytes a parameter, and at most two layers."""
    found = trainer(ranks)
    assert found["FP32 weights, gradients, moments"] == pytest.approx(16 * PARAMETERS / ranks, rel=1e-3)
    root, layer = 2 * (2 * 64_000 + 64), 2 * (PARAMETERS - 2 * 64_000 - 64) / 3
    assert root <= found["layers and head, gathered"] <= root + 2 * layer


def test_what_is_kept_is_what_autograd_saves():
    """The same policy in bfloat16 with real data, its saved tensors counted by hooks; the microbatch's own are left out
    by neither. Each of three layers keeps its input only, 64 bfloat16 numbers of 512 positions; without recomputation
    at least ten times that: what its 7 products and its activations read."""
    part = make_microbatch([Row([0], [0] * (POSITIONS - 1), [1] * (POSITIONS - 1))], [0], POSITIONS - 1)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), dtype=torch.bfloat16)
    recompute_layers(model)
    saved = saved_bytes(model, lambda: Policy(model)(part))
    kept, everything = (trainer(gradient_checkpointing=on)["kept for the backward pass"] for on in (True, False))
    assert kept == pytest.approx(saved, rel=0.1) and everything - kept > 3 * 10 * POSITIONS * 64 * 2


def test_an_update_and_the_reference_model():
    """A table of 1000 x 64 in the engine's dtype, here float32, and on one GPU one part of 256 MiB. The model of the
    penalty is whole on every GPU."""
    assert trainer(dtype="float32")["an update: a whole tensor and what travels"] == 4 * 64_000 + 256 * 2**20
    assert trainer(4, kl_coef=0.1)["reference model of --kl_coef"] == 2 * PARAMETERS
    assert trainer(4)["reference model of --kl_coef"] == 0


def test_keys_and_values_and_the_longest_row_by_hand():
    """Qwen3-8B: 36 layers, 8 heads of 128, keys and values, 2 bytes; on 8 GPUs each has one of the heads. A row has
    prompt, thinking, phrase and answer."""
    config = plan.config_of("Qwen/Qwen3-8B")
    assert plan.cache_bytes(config, Flags(dtype="bfloat16")) == 147_456
    assert plan.cache_bytes(config, Flags(dtype="bfloat16", tensor_parallel=8)) == 18_432
    flags = Flags(dataset="x", max_prompt_tokens=100, max_budget=40, answer_budget=8)
    assert plan.longest_row(flags) == 100 + 40 + plan.PHRASE + 8


def test_an_engine_spends_its_share():
    """0.35 of a trainer's card of 10 GB are 3.5 GB, of its own 8.5; 16 sequences' logits are 3 FP32 tensors. An update
    travels in one part, between two GPUs in three."""
    config = Qwen3Config(**TINY)
    for shared, share, parts in ((True, 3.5e9, 1), (False, 8.5e9, 3)):
        found = plan.engine_bytes(config, Flags(**FLAGS, max_num_seqs=16), 1e10, shared)
        beyond = found.pop("beyond its share: what of an update travels")
        assert sum(found.values()) == pytest.approx(share) and beyond == parts * 256 * 2**20
        assert found["weights"] == 2 * PARAMETERS
        assert found["logits, prefill"] == 3 * 4 * 16 * 1000 + 8192 * 2 * (4 * 64 + 2 * 96)
    asked = plan.engine_bytes(config, Flags(**FLAGS, engine_args='{"gpu_memory_utilization": 0.5}'), 1e10, True)
    assert sum(asked.values()) - 256 * 2**20 == pytest.approx(5e9)


def test_exit_code_and_verdict(tiny, capsys):
    """CUDA's contexts and the update's buffers alone take 1.5 GB. A run that is there already is no hindrance."""
    for card, code, words in (("4", 0, "it fits"), ("1", 1, "it does NOT fit")):
        assert plan.main(["--card_gb", card, "--model", tiny, "--dtype", "bfloat16", "--output_dir", tiny]) == code
        assert words in capsys.readouterr().out


# The machine that docs/gpu.md names for each of its commands.
MACHINES = [(24, 1, 1), (80, 8, 4), (80, 8, 8)]


@pytest.mark.slow
def test_the_commands_of_the_gpu_page_fit_their_cards():
    shell = "".join(re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "gpu.md").read_text(), re.M | re.S))
    commands = re.findall(r"^.*\btrain\.py ((?:.*\\\n)*.*--model (?:.*\\\n)*.*)$", shell, re.M)
    for command, (card, gpus, trainers) in zip(commands, MACHINES, strict=True):
        options = f"--card_gb {card} --gpus {gpus} --trainers {trainers}"
        assert plan.main([*options.split(), *shlex.split(command.replace("\\\n", " "))]) == 0


def test_what_cannot_work_is_refused(capsys):
    for words, message in (
        ("", "--model must be a folder, a hub id, or one of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B"),
        ("--model /nowhere", "--model /nowhere is no folder of a Hugging Face model"),
        ("--model Qwen/Qwen3-8B --generator_devices 3", "--generator_devices 3"),
        ("--model Qwen/Qwen3-8B --k -1", "--k must be at least 0"),
        ("--model Qwen/Qwen3-8B --max_num_seqs 8", "--rollouts 16 do not fit one engine; raise --max_num_seqs"),
        ("--trainers 0", "--trainers: must be a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            plan.main(["--card_gb", "80", *words.split()])
        assert ended.value.code == 2 and message in capsys.readouterr().err
