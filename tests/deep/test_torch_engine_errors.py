"""The engine in torch: its head in bfloat16, how often it draws a token, and errors in a step."""

import asyncio
import copy
from collections import Counter

import pytest
import torch
from test_torch_engine import PROMPTS, STOP, new_engine, new_model, sampled


@pytest.fixture
def model():
    return new_model(seed=0)


def test_a_bfloat16_engine_has_fp32_logits_unless_its_head_is_bfloat16(model, tmp_path):
    """With the same bfloat16 weights and keys, a plain pass that multiplies the head in FP32 is nearer to the engine
    with the FP32 head: its logits are not rounded. Near 8, bfloat16 numbers are .0625 apart."""
    model.get_output_embeddings().weight.data *= 8
    coarse = copy.deepcopy(model).bfloat16()
    gaps = {}
    for fp32_head in (True, False):
        engine = new_engine(model, tmp_path, dtype=torch.bfloat16, fp32_head=fp32_head)
        differences = []
        for prompt, rollout in zip(PROMPTS, sampled(engine, [(prompt, 12) for prompt in PROMPTS]), strict=True):
            ids = prompt + rollout.completion_ids
            hidden = coarse.base_model(torch.tensor([ids])).last_hidden_state[0].detach().float()  # (T, H)
            logits = hidden @ coarse.get_output_embeddings().weight.detach().float().T / 0.7  # (T, V)
            expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0]
            differences.append((torch.tensor(rollout.logprobs) - expected).abs())
        gaps[fp32_head] = torch.cat(differences).mean()
    assert gaps[True] < 0.7 * gaps[False]


@pytest.mark.long
def test_tokens_are_drawn_by_their_probability(model, tmp_path):
    """4,000 first tokens after one prompt: each is drawn as often as its probability says, within 5 standard errors."""
    rollouts = sampled(new_engine(model, tmp_path, slots=500), [([5, 6], 1)] * 4000)
    drawn = Counter(rollout.completion_ids[0] for rollout in rollouts)
    p = torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1].detach() / 0.7, -1)
    frequency = torch.tensor([drawn[token] / 4000 for token in range(len(p))])
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / 4000).sqrt() + 1e-3).all() and p.max() < 0.9


@pytest.mark.parametrize("moment", ["the prefill", "the end"])
def test_an_error_in_a_step_reaches_everyone_who_waits(model, tmp_path, moment):
    """Two requests inside or about to be, one that waits for a slot, and one that comes when no step is made any more."""
    engine = new_engine(model, tmp_path, slots=2)
    if moment == "the prefill":
        engine.model.base_model.forward = lambda **_: 1 / 0
    else:
        engine._leave = lambda *_: 1 / 0

    async def run():
        await engine.start()
        together = await asyncio.gather(*[engine.sample([5], 4, "") for _ in range(3)], return_exceptions=True)
        return together + await asyncio.gather(engine.sample([5], 4, ""), return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(run(), 20))
    assert [type(error) for error in errors] == [ZeroDivisionError] * 4


def test_a_log_prob_that_is_no_number_is_an_error(model, tmp_path):
    """Read as any number, it would silently change the ratio."""
    model.get_output_embeddings().weight.data[STOP] = torch.nan
    with pytest.raises(RuntimeError, match="nan"):
        sampled(new_engine(model, tmp_path), [([5, 6], 4)])
