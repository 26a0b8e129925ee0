"""fp32_head's `Scorer` over microbatches: log-probs and gradients against one row at a time.

The oracle is Hugging Face's own forward pass with full logits, one unpadded row after the other. Models are random and
tiny, in float64; transformers' eager softmax is float32 even there, which makes differences of 1e-7.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from runtime.microbatches import TokenRow, make_microbatch, microbatches
from runtime.shared_prompts import MicrobatchScorer, score

VOCABULARY = 23


# ------------------------------------------------------------------------------------------------ models and the oracle


def tiny_model(kind: str = "qwen3", tied: bool = True, attention: str = "sdpa", dtype: torch.dtype = torch.float64):
    """Two layers, the same weights in every run, large enough that every token matters to every later one."""
    make = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind]
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    return model


def uneven_batch() -> list[TokenRow]:
    """Rows of quite different lengths, some with forced tokens inside: the first begins with one, the second trains none."""
    rng = random.Random(0)

    def tokens(n):
        return [rng.randrange(VOCABULARY) for _ in range(n)]

    rows = [TokenRow(tokens(3), [3, 4, 5, 6], [0, 1, 0, 1]), TokenRow(tokens(1), [3, 4, 5], [0, 0, 0])]
    for n, forced in ((1, 0), (14, 2), (2, 0), (9, 3), (5, 1), (14, 0), (1, 0)):
        rows.append(TokenRow(tokens(rng.randint(1, 6)), tokens(n), [1] * 2 + [0] * forced + [1] * n))
        rows[-1].mask = rows[-1].mask[:n]
    return rows


def padded(rows) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def brute_force(model, row: TokenRow, temperature: float = 1.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """log p and entropy of every completion token: one row, no padding, all logits."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    logp = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double() / temperature, dim=-1)
    before = len(row.prompt_ids) - 1  # position of the prompt's last token, which predicts the first completion token
    rows = [logp[before + t] for t in range(len(row.completion_ids))]
    return [p[y] for p, y in zip(rows, row.completion_ids, strict=True)], [-(p.exp() * p).sum() for p in rows]


def gradient(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# ---------------------------------------------------------------------------------------------- gradients and log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("kind", "tied", "attention"), [("qwen3", True, "sdpa"), ("llama", False, "eager")])
def test_logprobs_are_those_of_one_row_at_a_time(kind, tied, attention, temperature):
    """Shifted by one, at the sampling temperature, 0 on forced tokens and padding."""
    net = MicrobatchScorer(tiny_model(kind, tied, attention), temperature=temperature)
    rows = uneven_batch()
    mask = padded([row.mask for row in rows])
    with torch.no_grad():
        results = [brute_force(net.model, row, temperature) for row in rows]
        expected = [padded([[float(x) for x in values[i]] for values in results]) * mask for i in (0, 1)]
        for tokens in (1, 50, 10**6):
            logprobs, entropy = torch.zeros_like(mask), torch.zeros_like(mask)
            for part in microbatches(rows, tokens):
                logprobs[part.rows], entropy[part.rows] = score(net, part)
            torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=0)
            assert not logprobs[mask == 0].any()
            assert not entropy[mask == 0].any()
    assert expected[0].std() > 0.5  # the weights matter, or a wrong neighbor could look right


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float64), (False, torch.bfloat16)])
def test_an_empty_microbatch_runs_backward(tied, dtype):
    """No rows: outputs (0, T), a loss of 0, and a gradient, all 0, on every parameter, as data parallelism expects."""
    model = tiny_model(tied=tied, dtype=dtype)
    logprobs, entropy = score(MicrobatchScorer(model), make_microbatch([], [], width=5))
    assert logprobs.shape == entropy.shape == (0, 5)
    loss = (torch.zeros(0, 5) * logprobs).sum()
    assert loss.item() == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
