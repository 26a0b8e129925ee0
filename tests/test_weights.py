"""runtime/weights.py: what a generator is sent, and the file in which it comes.

Folders that other processes leave behind: tests/deep/test_weight_folders.py. That an engine computes with what it got, byte
for byte: tests/deep/engine.
"""

import stat
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime import weights
from runtime.weights import CheckpointTensors, RunWeightFile
from vllm_engine import mapped, tensors_in


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
    written = tensors_in(mapped(channel.path), channel.layout)  # as another process sees it
    assert {name: x.dtype for name, x in written.items()} == {name: x.dtype for name, x in tensors.items()}
    torch.testing.assert_close(written["a.weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert written["empty"].shape == (0, 3) and written["scalar"].item() == 3.0
    assert channel.path.stat().st_size == 64 + 64 + 64 + 0 + 64  # each begins at a multiple of 64 bytes
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert sorted(file.name for file in channel.folder.iterdir()) == ["lock", channel.path.name]


def test_who_has_mapped_the_file_sees_the_next_weights(channel):
    """Both sides map it once, and an update is one copy in: no file is made anew."""
    channel.prepare({"a": torch.zeros(3), "b": torch.zeros(2).bfloat16()})
    engines = tensors_in(mapped(channel.path), channel.layout)
    channel.prepare({"a": torch.arange(3.0), "b": torch.ones(2)})
    assert engines["a"].tolist() == [0, 1, 2] and engines["b"].tolist() == [1, 1]


@pytest.mark.parametrize("code", [0, 1])
def test_a_file_that_cannot_be_pinned_is_no_error(channel, monkeypatch, code):
    """CUDA would tell the next kernel of this thread: one that nobody needs takes the error."""
    kernels = []

    def kernel(*_, device):
        kernels.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    channel.prepare({"a": torch.arange(3.0)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: code))
    monkeypatch.setattr(torch, "zeros", kernel)
    assert tensors_in(mapped(channel.path), channel.layout)["a"].tolist() == [0, 1, 2]
    assert kernels == ["cuda"] * code


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
