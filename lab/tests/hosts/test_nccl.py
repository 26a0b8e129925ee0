"""vLLM's own `nccl` channel as far as a machine without a GPU can drive it."""

from dataclasses import replace

import pytest
from fake_engine import problems
from forked import fork_engines
from real_engine import new_engine, started
from test_weights_in_flight import evaluated
from tiny_model import TinyModel

from lab.hosts.channels import TransferWeights


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    """Put in place when they are imported, and not before: vLLM takes seconds."""
    import transfers_on_cpu  # noqa: F401


BUFFER = 40_000  # bytes; the model has 340,000, so that it travels in many pieces


@pytest.mark.medium
def test_a_transfer_in_flight(tmp_path, monkeypatch):
    """vLLM's own classes, on both sides: ten updates while completions run; those wholly by one version agree with it.
    What the trainer does to its weights after a push does not reach the engine. The receiver of a broadcast waits for
    the sender, so a sender that waited for the update's answer before it sends would never get there."""
    fork_engines()
    tiny = TinyModel(tmp_path / "model", tied=False)  # vLLM's CPU reload leaves a tied head behind
    channel = TransferWeights()
    channel.engine_args["worker_extension_cls"] = "transfers_on_cpu.Receiver"
    info = channel._init_info
    monkeypatch.setattr(channel, "_init_info", lambda: replace(info(), packed_buffer_size_bytes=BUFFER))
    with started(new_engine(tiny, channel=channel), tiny.weights(0), max_completion=24) as generator:
        for version in range(1, 11):
            long = generator.evaluate(problems(4, seed=version), 2) if version == 5 else None
            weights = tiny.weights(version)
            generator.push(weights, version, 0)
            for tensor in weights.values():
                tensor.zero_()  # the next step of the optimizer, at once
            if long is not None:
                assert len(generator.result_of(long)) == 4
        asked, rollouts = evaluated(generator, problems(6), 2)
        assert {v for r in rollouts for v in r.versions} == {10}
        assert tiny.gap(tiny.weights(10), asked, rollouts).mean() < 1e-5
        assert tiny.gap(tiny.weights(9), asked, rollouts).mean() > 0.1
        assert channel._sender.packed_buffer_size_bytes == BUFFER
    assert not channel.folder.exists()
