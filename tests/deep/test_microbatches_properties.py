"""runtime/microbatches.py on any batch and any number of ranks, a bfloat16 head, and what FSDP asks for."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_model import VOCABULARY, tiny_model, uneven_batch

import fp32_head
from runtime.microbatches import TokenRow, microbatches
from runtime.model import layers_of
from runtime.shared_prompts import MicrobatchScorer, score

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ROWS = st.lists(
    st.builds(lambda n, mask: TokenRow([n] * n, [2] * len(mask), mask), st.integers(1, 3), MASKS), max_size=9
)


@given(ROWS, st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_all_ranks_get_equally_many_microbatches(rows, tokens, ranks, share):
    """Every row once, all tokens that train at their places in lines and outputs, one width T, and no more positions than
    asked for but in a microbatch of one row. A rank without rows has an empty microbatch."""
    of_ranks = [microbatches(rows, tokens, rank=rank, ranks=ranks, share=share) for rank in range(ranks)]
    assert len({len(parts) for parts in of_ranks}) == 1
    parts = [part for parts in of_ranks for part in parts]
    assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
    assert {part.width for part in parts} == {max((len(row.completion_ids) for row in rows), default=1)}
    for part in parts:
        assert part.prompts.numel() + part.lines[:, 1 - part.start :].numel() <= tokens or len(part.rows) <= 1
        places = [n * part.width + t for n, i in enumerate(part.rows) for t, m in enumerate(rows[i].mask) if m]
        assert part.outputs.tolist() == places
        whole = torch.cat([part.prompts[part.prompt_of], part.lines], dim=1)  # (N, P + L)
        in_line = part.lines.shape[1] - part.start
        line, token = part.trained // in_line, part.trained % in_line
        token = token + part.prompts.shape[1] + part.start  # its position in the whole row
        lengths = torch.tensor([len(rows[i].prompt_ids) for i in part.rows], dtype=torch.long)
        assert ((token - lengths[line]) + line * part.width).tolist() == places
        for n, i in enumerate(part.rows):
            ids = [*rows[i].prompt_ids, *rows[i].completion_ids]
            assert whole[n, : len(ids)].tolist() == ids
        if not part.rows:
            assert part.lines.tolist() == [[0, 0]] and part.tokens == 0


@pytest.mark.parametrize("fp32", [True, False])
def test_a_bf16_models_head(monkeypatch, fp32):
    """Body, head and bias in bfloat16, as the generator has them; the oracle multiplies in FP64. `fp32=False`, the
    ablation, gives another, coarser answer from the same hidden states."""
    calls = []

    def token_logprobs(*args, **options):
        calls.append((*args, options))
        return plain(*args, **options)

    plain = fp32_head.token_logprobs
    monkeypatch.setattr(fp32_head, "token_logprobs", token_logprobs)
    model = tiny_model(dtype=torch.bfloat16)
    [part] = microbatches(uneven_batch(), 10**6)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCABULARY).bfloat16())
    logprobs, _ = score(MicrobatchScorer(model, fp32=fp32, temperature=0.5), part)
    [(hidden, weight, targets, options)] = calls
    body = model.model(input_ids=part.lines).last_hidden_state[:, :-1]
    assert torch.equal(hidden, body.flatten(0, 1)[part.trained])
    assert hidden.dtype == weight.dtype == torch.bfloat16
    assert options == {"temperature": 0.5, "fp32": fp32, "bias": model.lm_head.bias}
    logits = F.linear(hidden.double(), weight.double(), model.lm_head.bias.double()) / 0.5  # (M, V)
    expected = F.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
    gap = (logprobs.flatten()[part.outputs].double() - expected).abs().max()
    assert logprobs.dtype == torch.float32
    assert gap < 1e-5 if fp32 else 1e-4 < gap < 1


def test_fsdp_gets_the_layers_that_the_model_has():
    """accelerate refuses a name of which it finds no layer, and models of several kinds name those of all kinds."""
    model = tiny_model()
    model._no_split_modules = ["Qwen3DecoderLayer", "SiglipEncoderLayer"]
    assert layers_of(model) == ["Qwen3DecoderLayer"]
    model._no_split_modules = None
    assert layers_of(model) == []
