"""The engine in torch: every log-prob against a plain forward pass, also of tokens that came after new weights."""

import asyncio
import copy
from types import SimpleNamespace

import pytest
import torch
from stale_cache import stale_cache_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.arithmetic import FIRST_MODELS
from torch_engine import SlotCache, TorchEngine

pytestmark = pytest.mark.timeout(120)  # a fault here often shows as a wait without end
STOP = 3
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [5, 6, 7], [11], [12, 13, 14, 15], [5, 6, 7], [20, 21]]


def new_model(seed: int):
    """The built-in model with random weights, large ones, so that another number is nats away."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FIRST_MODELS / "graded", **sizes))


@pytest.fixture
def model():
    return new_model(seed=0)


def new_engine(model, folder, slots=3, **precision) -> TorchEngine:
    model.save_pretrained(folder)
    engine = TorchEngine(str(folder), [STOP], 32, temperature=0.7, max_num_seqs=slots, seed=1, **precision)
    engine.prepare(dict(model.named_parameters()), 4)
    return engine


def sampled(engine: TorchEngine, requests) -> list:
    """The samples of all requests at once, each (prompt, most tokens)."""

    async def run():
        await engine.start()
        return await asyncio.gather(*[engine.sample(prompt, most, "") for prompt, most in requests])

    return asyncio.run(run())


def plain(model, ids: list[int]) -> torch.Tensor:
    """Log-probs of each token after the first at temperature .7, by one forward pass over all of them."""
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].detach() / 0.7, -1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_seven_requests_through_three_slots(model, tmp_path):
    """Each has the log-probs of a forward pass over it alone, and ends with a stop token or at its limit."""
    rollouts = sampled(new_engine(model, tmp_path), [(prompt, 4 + 3 * i) for i, prompt in enumerate(PROMPTS)])
    for i, (prompt, rollout) in enumerate(zip(PROMPTS, rollouts, strict=True)):
        ids = rollout.completion_ids
        assert rollout.finish_reason == ("stop" if ids[-1] == STOP else "length")
        assert STOP not in ids[:-1] and (ids[-1] == STOP or len(ids) == 4 + 3 * i)
        assert rollout.versions == [4] * len(ids)
        expected = plain(model, prompt + ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-5, rtol=0)


def test_new_weights_in_flight_go_on_over_the_old_keys_and_values(model, tmp_path):
    """Five tokens of version 4 and two more while version 5 is prepared but not live, then ten of version 5: those are
    what the new model says over the old one's cache."""
    engine = new_engine(model, tmp_path)
    engine.stop = torch.tensor([-1])
    other = new_model(seed=1)

    async def run():
        await engine.start()
        request = asyncio.create_task(engine.sample([5, 6, 7], 17, ""))
        for tokens in (5, 7):
            while not engine.inside or engine.lengths.max() < 3 + tokens:
                assert not request.done()  # a dead engine never gets there
                await asyncio.sleep(0)
            if tokens == 5:
                engine.prepare(dict(other.named_parameters()), 5)
        await engine.update()
        return await request

    rollout = asyncio.run(run())
    old = rollout.versions.count(4)
    assert rollout.versions == [4] * old + [5] * (17 - old) and 7 <= old <= 8
    logprobs, ids = torch.tensor(rollout.logprobs), [5, 6, 7, *rollout.completion_ids]
    assert (logprobs - plain(other, ids)[2:]).abs().max() > 0.1  # not vacuous
    weights = {4: copy.deepcopy(model).state_dict(), 5: other.state_dict()}
    expected = stale_cache_logprobs(model, weights, [5, 6, 7], rollout.completion_ids, rollout.versions, 0.7)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_prompt_computed_for_several_requests_is_counted_once(model, tmp_path):
    """As in vLLM, whose later requests find it in the cache: six requests for two tokens, two for one, all at once."""
    rollouts = sampled(new_engine(model, tmp_path, slots=8), [([5, 6], 1)] * 6 + [([7], 1)] * 2)
    assert [rollout.prefilled for rollout in rollouts] == [2, 0, 0, 0, 0, 0, 1, 0]


def test_the_cache_takes_what_attention_hands_on():
    """transformers 5.24 calls `update(..., kwargs=...)`, which plain attention has no use for. Two slots write their
    positions 0 and 2, and the first three are read."""
    cache = SlotCache(SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, head_dim=1), 2, 4, torch.float32)
    cache.position, cache.longest = torch.tensor([0, 2]), 3
    new = torch.tensor([5.0, 7.0]).view(2, 1, 1, 1)
    keys, values = cache.update(new, -new, 1, kwargs={"position": 0})
    assert keys.flatten().tolist() == [5, 0, 0, 0, 0, 7]
    assert torch.equal(values, -keys) and not cache.keys[0].any()
