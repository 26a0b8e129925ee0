"""runtime/weights.py: what a generator is sent, and the file in which it comes.

Folders that other processes leave behind: tests/deep/test_weight_folders.py. That an engine computes with what it got, byte
for byte: tests/deep/engine.
"""

import stat

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime import weights
from runtime.weights import CheckpointTensors, RunWeightFile


@pytest.fixture(autouse=True)
def prefix(monkeypatch):
    """A prefix of its own, so that no file of a real run is touched."""
    monkeypatch.setattr(weights, "PREFIX", "scalerl-test-")


@pytest.fixture
def channel():
    channel = RunWeightFile()
    yield channel
    channel.close()


def test_weights_are_written_completely_and_privately(channel):
    table = torch.arange(6.0).view(2, 3)
    tensors = {"a.weight": table.t(), "b": torch.ones(2, requires_grad=True), "c": torch.ones(1).bfloat16()}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    channel.prepare(tensors)
    written = load_file(channel.path)
    assert {name: x.dtype for name, x in written.items()} == {name: x.dtype for name, x in tensors.items()}
    torch.testing.assert_close(written["a.weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert written["empty"].shape == (0, 3) and written["scalar"].item() == 3.0
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert sorted(file.name for file in channel.folder.iterdir()) == ["lock", channel.path.name]


def test_a_reader_of_the_old_weights_keeps_them(channel):
    """The file is replaced, not written over: an engine that still reads it must not get half of each version."""
    channel.prepare({"a": torch.zeros(3)})
    with channel.path.open("rb") as old:
        before = channel.path.read_bytes()
        channel.prepare({"a": torch.ones(3)})
        assert old.read() == before != channel.path.read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_sent_once(tied):
    """Under the embedding's name; an untied one under its own. Values in the dtype asked for, the model untouched."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
    }
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=23, tie_word_embeddings=tied, **shape)).float()
    sent = list(CheckpointTensors(model, torch.bfloat16).items())
    names, state = [name for name, _ in sent], model.state_dict()
    assert len(names) == len(set(names)) and set(state) - set(names) == ({"lm_head.weight"} if tied else set())
    for name, tensor in sent:
        assert tensor.dtype == torch.bfloat16 and not tensor.requires_grad
        assert torch.equal(tensor, state[name].bfloat16())
    assert model.dtype == torch.float32
