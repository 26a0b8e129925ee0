"""vLLM's own weight channels as far as a machine without a GPU can drive them."""

from types import SimpleNamespace

import pytest
import rendezvous
import torch
from fake_engine import problems
from real_engine import new_engine, new_generator
from tiny_model import TinyModel

from runtime.weight_channels import Meta, TransferWeights


@pytest.mark.medium
def test_a_transfer_in_flight(tmp_path, monkeypatch):
    """Through vLLM's start, update and finish, with a worker that blocks until the trainer sends: ten updates while
    completions run; those wholly by one version agree with it, and `push` returns only when its weights are live."""
    tiny = TinyModel(tmp_path / "model", tied=False)  # vLLM's CPU reload leaves a tied head behind
    meeting = tmp_path / "meeting.safetensors"
    channel = TransferWeights("rendezvous")
    channel.engine_args["worker_extension_cls"] = "rendezvous.Receiver"
    monkeypatch.setattr(channel, "_init_info", lambda: rendezvous.TrainerInfo(str(meeting), rank=0))
    prompts = problems(6)
    generator = new_generator(new_engine(tiny, channel=channel), max_completion=24)
    try:
        generator.start(tiny.weights(0))
        for version in range(1, 11):
            long = generator.evaluate(problems(4, seed=version), 2) if version == 5 else None
            generator.push(tiny.weights(version), version, 0)
            assert generator.version == version and generator.counters.pushes == version
            if long is not None:
                assert len(generator.result_of(long)) == 4
        rollouts = [r for group in generator.result_of(generator.evaluate(prompts, 2)) for r in group]
        asked = [problem for problem in prompts for _ in range(2)]
        assert {v for r in rollouts for v in r.versions} == {10}
        assert tiny.gap(tiny.weights(10), asked, rollouts).mean() < 1e-5
        assert tiny.gap(tiny.weights(9), asked, rollouts).mean() > 0.1
    finally:
        generator.close()
    assert not channel.folder.exists()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_what_vllm_is_asked_for(kind):
    """Backends and fields of vLLM's own trainer-side classes; the buffer of `ipc` holds the largest tensor."""
    channel = TransferWeights(kind, rank=0, workers=4)
    channel.prepare(SimpleNamespace(metadata=lambda: [Meta("w", torch.float32, (2**28,))]))
    info = channel._init_info()
    assert info.backend == kind and info.rank == 0 and info.packed
    if kind == "ipc":
        assert info.packed_buffer_size_bytes == 2**30
    else:
        assert info.world_size == 5 and info.master_address == "127.0.0.1" and 0 < info.master_port < 2**16
    assert channel.engine_args["weight_transfer_config"] == {"backend": kind}
    channel.close()
