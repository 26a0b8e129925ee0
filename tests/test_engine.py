"""runtime/engine.py and what it adds to vllm_engine.py, on a vLLM that samples nothing; and an engine of one's own.

A real vLLM is in test_vllm_engine.py. Places, deaths and what the engine's process inherits: tests/deep/test_run_engine.py.
"""

import asyncio
import json
import textwrap

import pytest
from fake_vllm import Channel, in_place_of_vllm, start_with

import train
from vllm_engine import VLLMEngine


@pytest.fixture
def started(monkeypatch):
    with in_place_of_vllm(monkeypatch) as engines:
        yield engines


def test_an_update_by_hand(started):
    """A token carries the version that vLLM reports for it. Shut down twice, the process is ended once."""
    engine = VLLMEngine("model", [1], 64, channel=Channel())

    async def run():
        await start_with(engine, 3)
        before = await engine.sample([7, 8], 2, "3")
        engine.prepare({}, 4)
        assert engine.version == 3
        await engine.update()
        return before, await engine.sample([7, 8], 2, "4")

    before, after = asyncio.run(run())
    assert started[0].calls == ["load", "version 3", "pause", "load", "version 4", "resume"]
    assert (before.versions, after.versions, engine.version) == ([3, 3], [4, 4], 4)
    assert after.completion_ids == [5, 5] and after.prefilled == 2
    with pytest.raises(ValueError, match="60 prompt tokens and 5 more exceed max_model_len = 64"):
        asyncio.run(engine.sample([7] * 60, 5, "4"))
    engine.shutdown()
    engine.shutdown()
    assert started[0].calls[-2:] == ["resume", "shutdown"] and engine.channel.closed


MINE = """
    import asyncio
    import torch
    from transformers import AutoModelForCausalLM
    from vllm_engine import Sample

    class MyEngine:
        def __init__(self, model, stop_ids, max_model_len, flags):
            self.model, self.stop_ids = AutoModelForCausalLM.from_pretrained(model), stop_ids
            self.slots, self.version = flags.max_num_seqs, 0

        def prepare(self, weights, version):
            self.prepared = version, {name: tensor.detach().clone() for name, tensor in weights.items()}

        async def update(self):
            self.version, weights = self.prepared
            self.model.load_state_dict(weights, strict=False)

        start = update

        async def sample(self, prompt_ids, max_tokens, salt):
            ids, logprobs, versions = [], [], []
            while len(ids) < max_tokens and ids[-1:] not in [[stop] for stop in self.stop_ids]:
                logits = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, -1].detach()
                log_p = torch.log_softmax(logits, -1)
                ids.append(int(torch.multinomial(log_p.exp(), 1)))
                logprobs.append(float(log_p[ids[-1]]))
                versions.append(self.version)
                await asyncio.sleep(0)
            reason = "stop" if ids[-1] in self.stop_ids else "length"
            return Sample(ids, logprobs, versions, reason, len(prompt_ids))

        def shutdown(self):
            pass
"""


def test_an_engine_of_ones_own_is_named_on_the_command_line(tmp_path, monkeypatch, model):
    """The shortest engine that keeps the table of generator.py: no cache, one request after the other. It stands
    in the working directory, trains six steps, and its log-probs pass the check that weights arrived."""
    (tmp_path / "my_engine.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    words = "--engine my_engine:MyEngine --output_dir run --max_steps 6 --batch_prompts 2 --rollouts 2 --k 1"
    words += " --entropy_coef 0.1 --zero_variance keep --held_out 2 --eval_samples 1 --eval_every 6 --max_budget 8 --min_budget 4 --answer_budget 2"
    assert train.main([*words.split(), "--model", model]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["logprob_gap"] for record in records if "logprob_gap" in record]
    assert gaps and max(gaps) < 1e-5
    assert [record["step"] for record in records if "step" in record] == [*range(1, 7)]
