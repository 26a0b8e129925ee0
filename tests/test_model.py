"""runtime/model.py: how a batch is cut into microbatches, and log-probs and gradients against one row at a time.

The oracle is Hugging Face's own forward pass with full logits, one unpadded row after the other. Models are random and
tiny, in float64; transformers' eager softmax is float32 even there, which makes differences of 1e-7.
"""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from runtime.loading import attention_kinds
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import fp32_head
from runtime import model as model_file
from runtime.model import (
    Policy,
    Row,
    cut_rows,
    forwarded,
    full_tensors,
    make_microbatch,
    microbatches,
    share_rows,
)

VOCABULARY = 23


# ------------------------------------------------------------------------------------------------- microbatches by hand

BATCH = [Row([1], [2, 3], [1, 1]), Row([9], [9], [1]), Row([5, 6], [7, 8, 9], [1, 0, 1])]


def test_padded_microbatch_by_hand():
    """Rows 2 and 0: [5 6 | 7 8 9] and [1 | 2 3], the 8 forced. The longest has 5 positions. Token 7, at position 2, is
    read at 1, token 9, at 4, at 3; in the second row, which begins at 5, tokens 2 and 3 at 5 and 6."""
    part = make_microbatch(BATCH, [2, 0], width=4)
    assert part.rows == [2, 0] and part.width == 4 and part.sees is None
    assert part.input_ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]
    assert part.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert part.read.tolist() == [1, 3, 5, 6]
    assert part.write.tolist() == [0, 2, 4, 5]  # (row 0, t 0), (0, 2), (1, 0), (1, 1) of 2 x 4
    assert part.targets.tolist() == [7, 9, 2, 3]
    moved = part.to(torch.device("meta"))
    assert {x.device.type for x in vars(moved).values() if isinstance(x, torch.Tensor)} == {"meta"}


def test_shared_microbatch_by_hand():
    """Prompt [5 6] has two completions, [7 8] and [9], and [1] has [2]. The prompt stands once, at 0 and 1, and its end
    predicts 7 and 9; both completions begin at position id 2. Position 4 (the 9) sees 0, 1 and itself. The other prompt
    has a line of its own, with three positions of padding. A forced token is not read: of [7 8 9] with the 8 forced, 9
    is read where the 8 stands."""
    batch = [Row([1], [2], [1]), Row([5, 6], [7, 8], [1, 1]), Row([5, 6], [9], [1])]
    part = make_microbatch(batch, [1, 2, 0], width=2, shared=True)
    assert part.rows == [1, 2, 0] and part.input_ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert part.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 3, 4]]
    assert part.read.tolist() == [1, 2, 1, 5] and part.targets.tolist() == [7, 8, 9, 2]
    assert part.write.tolist() == [0, 1, 2, 4]  # (row 0, t 0), (0, 1), (1, 0), (2, 0) of 3 x 2
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4]]  # by each position of the first line
    assert [[i for i, sees in enumerate(row) if sees] for row in part.sees[0].tolist()] == seen
    assert part.sees[1, :2].tolist() == [[True, False, False, False, False], [True, True, False, False, False]]
    part = make_microbatch(BATCH, [2], width=3, shared=True)
    assert (part.read.tolist(), part.write.tolist(), part.targets.tolist()) == ([1, 3], [0, 2], [7, 9])


def test_cutting_by_hand():
    """Rows of 5, 4, 3, 3, 2. Of 10 positions two padded rows of up to 5 fill all, three of up to 3 take 9. A row of 12
    is a list of its own. Shared: prompt 4 has completions of 2 and 2, prompt 9 of 2 and 1, both are 3 long: of 8
    positions 3 + 2 + 2 fit, then 3 + 2 + 1; of 5 each row pays for its prompt."""
    rows = [Row([0], [0] * (n - 1), [1] * (n - 1)) for n in (3, 5, 2, 4, 3)]
    everything = range(5)
    assert cut_rows(rows, everything, 10, shared=False) == [[1, 3], [0, 4, 2]]
    assert cut_rows(rows, everything, 9, shared=False) == [[1], [3, 0], [4, 2]]
    assert cut_rows([Row([0], [0] * 11, [1] * 11), *rows], [0, 3, 5], 10, shared=False) == [[0], [5, 3]]
    batch = [Row([9] * 3, [0] * n, [1] * n) for n in (2, 1)] + [Row([4] * 3, [0] * 2, [1] * 2)] * 2
    assert cut_rows(batch, [0, 1, 2, 3], 8, shared=True) == [[2, 3], [0, 1]]
    assert cut_rows(batch, [3, 1, 0, 2], 5, shared=True) == [[3], [2], [0], [1]]


def test_sharing_by_hand():
    """Longest first, dealt forth and back: 9 8 | 7 6 | 5 to ranks 0 1 | 1 0 | 0."""
    assert share_rows([5, 9, 7, 6, 8], 2) == [[1, 3, 0], [4, 2]]
    assert share_rows([4], 3) == [[0], [], []] and share_rows([], 2) == [[], []]


def test_kinds_of_attention():
    assert attention_kinds(SimpleNamespace()) == ["full_attention"]
    assert attention_kinds(SimpleNamespace(sliding_window=4096)) == ["sliding_attention"]
    assert attention_kinds(SimpleNamespace(sliding_window=4096, use_sliding_window=False)) == ["full_attention"]
    assert attention_kinds(SimpleNamespace(layer_types=["linear_attention"])) == ["linear_attention"]


# -------------------------------------------------------------------------------------------- microbatches of any batch

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ROWS = st.lists(st.builds(lambda n, mask: Row([n] * n, [2] * len(mask), mask), st.integers(1, 3), MASKS), max_size=9)


@given(ROWS, st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_all_ranks_get_equally_many_microbatches(rows, tokens, ranks, shared):
    """Every row once, all tokens that train at their places, one width T, and no more positions than asked for but in a
    microbatch of one row. A rank without rows has an empty microbatch of one position. `forwarded` counts them all."""
    mine = [microbatches(rows, tokens, rank=rank, ranks=ranks, shared=shared) for rank in range(ranks)]
    assert len({len(parts) for parts in mine}) == 1
    parts = [part for parts in mine for part in parts]
    assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
    assert {part.width for part in parts} == {max((len(row.completion_ids) for row in rows), default=1)}
    for part in parts:
        assert part.input_ids.numel() <= tokens or len(part.rows) <= 1
        places = [n * part.width + t for n, i in enumerate(part.rows) for t, m in enumerate(rows[i].mask) if m]
        assert part.write.tolist() == places and len(part.read) == len(part.targets) == len(places)
        if not part.rows:
            assert part.input_ids.tolist() == part.position_ids.tolist() == [[0]]
    if shared:
        positions = sum(part.input_ids.numel() for part in parts if part.rows)
        assert forwarded(rows, shared, tokens, ranks) == positions


# ------------------------------------------------------------------------------------------------ models and the oracle


def tiny_model(kind: str = "qwen3", tied: bool = True, attention: str = "sdpa", dtype: torch.dtype = torch.float64):
    """Two layers, the same weights in every run, large enough that every token matters to every later one."""
    make = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = make(**sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    return model


def uneven_batch() -> list[Row]:
    """Rows of quite different lengths, some with forced tokens inside."""
    rng = random.Random(0)
    rows = []
    for i in range(9):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        completion = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 14]))]
        mask = [1] * len(completion)
        if len(completion) > 4:
            for t in range(2, 2 + i % 3):
                mask[t] = 0
        rows.append(Row(prompt, completion, mask))
    rows[0] = Row(rows[0].prompt_ids, [3, 4, 5, 6], [0, 1, 0, 1])  # a forced token first
    rows[1] = Row(rows[1].prompt_ids, [3, 4, 5], [0, 0, 0])  # nothing trains
    for i in (3, 5, 7):
        rows[i].prompt_ids = rows[2].prompt_ids
    return rows


def padded(rows) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def brute_force(model, row: Row, temperature: float = 1.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
    """Shifted by one, at the sampling temperature, 0 on forced tokens and padding. Packed rows must not see
    each other: transformers finds that in the position ids."""
    net = Policy(tiny_model(kind, tied, attention), temperature=temperature)
    rows = uneven_batch()
    mask = padded([row.mask for row in rows])
    with torch.no_grad():
        found = [brute_force(net.model, row, temperature) for row in rows]
        wanted = [padded([[float(x) for x in values[i]] for values in found]) * mask for i in (0, 1)]
        for shared in (False, True):
            for tokens in (1, 50, 10**6):
                logprobs, entropy = torch.zeros_like(mask), torch.zeros_like(mask)
                for part in microbatches(rows, tokens, shared=shared):
                    logprobs[part.rows], entropy[part.rows] = net(part)
                torch.testing.assert_close(logprobs, wanted[0], atol=1e-5, rtol=0)
                torch.testing.assert_close(entropy, wanted[1], atol=1e-5, rtol=0)
                assert (logprobs[mask == 0] == 0).all() and (entropy[mask == 0] == 0).all()
    assert wanted[0].std() > 0.5  # the weights matter, or a wrong neighbor could look right


@pytest.mark.parametrize(
    ("shared", "tied", "dtype"),
    [(False, True, torch.float64), (False, False, torch.bfloat16), (True, True, torch.bfloat16)],
)
def test_an_empty_microbatch_runs_backward(shared, tied, dtype):
    """No rows: outputs (0, T), a loss of 0, and a gradient, all 0, on every parameter, as data parallelism expects."""
    model = tiny_model(tied=tied, dtype=dtype)
    net = Policy(model)
    part = make_microbatch([], [], width=5, shared=shared)
    logprobs, entropy = net(part)
    assert logprobs.shape == entropy.shape == (0, 5)
    loss = (torch.zeros(0, 5) * logprobs).sum()
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_entropy_carries_a_gradient_only_if_asked():
    rows = uneven_batch()
    for entropy_grad in (False, True):
        net = Policy(tiny_model(), entropy_grad=entropy_grad)
        net(microbatches(rows, 10**6)[0])[1].sum().backward()
        assert bool(gradient(net.model).any()) == entropy_grad
    net.zero_grad()
    wanted = copy.deepcopy(net.model)
    sum(e for row in rows for e, m in zip(brute_force(wanted, row)[1], row.mask, strict=True) if m).backward()
    net(microbatches(rows, 10**6)[0])[1].sum().backward()
    torch.testing.assert_close(gradient(net.model), gradient(wanted), atol=1e-6, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------- low precision


@pytest.fixture
def head_calls(monkeypatch) -> list[tuple]:
    """What the policy gives to token_logprobs: hidden, weight, targets, keywords."""
    calls = []

    def token_logprobs(hidden, weight, targets, **more):
        calls.append((hidden.detach(), weight.detach(), targets, more))
        return fp32_head.token_logprobs(hidden, weight, targets, **more)

    monkeypatch.setattr(model_file, "token_logprobs", token_logprobs)
    return calls


@pytest.mark.parametrize("fp32", [True, False])
def test_a_bf16_models_head(head_calls, fp32):
    """Body, head and bias in bfloat16, as the generator has them; the oracle multiplies in FP64. `fp32_head=False`, the
    ablation, gives another, coarser answer from the same hidden states."""
    model, part = tiny_model(dtype=torch.bfloat16), microbatches(uneven_batch(), 10**6)[0]
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCABULARY).bfloat16())
    logprobs, _ = Policy(model, fp32_head=fp32, temperature=0.5)(part)
    [(hidden, weight, targets, more)] = head_calls
    body = model.model(input_ids=part.input_ids).last_hidden_state
    assert torch.equal(hidden, body.flatten(0, 1)[part.read]) and hidden.dtype == weight.dtype == torch.bfloat16
    assert more == {"temperature": 0.5, "fp32": fp32, "entropy_grad": False, "bias": model.lm_head.bias}
    logits = F.linear(hidden.double(), weight.double(), model.lm_head.bias.double()) / 0.5  # (M, V)
    wanted = F.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
    gap = (logprobs.flatten()[part.write].double() - wanted).abs().max()
    assert logprobs.dtype == torch.float32 and (gap < 1e-5 if fp32 else 1e-4 < gap < 1)


def test_fsdp_gets_the_layers_that_the_model_has():
    """accelerate refuses a name of which it finds no layer, and models of several kinds name those of all kinds."""
    model = tiny_model()
    assert Policy(model)._no_split_modules == ["Qwen3DecoderLayer"]
    model._no_split_modules = ["Qwen3DecoderLayer", "SiglipEncoderLayer"]
    assert Policy(model)._no_split_modules == ["Qwen3DecoderLayer"]
    model._no_split_modules = None
    assert Policy(model)._no_split_modules == []


# ---------------------------------------------------------------------------------------------------- heads and weights


def test_a_tied_head_is_sent_once():
    """Under the embedding's name; an untied one under its own. Values in the dtype asked for, the model untouched."""
    for tied in (True, False):
        model = tiny_model(tied=tied, dtype=torch.float32)
        sent = list(full_tensors(model, torch.bfloat16))
        names = [name for name, _ in sent]
        assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names
        assert ("lm_head.weight" in names) == (not tied)
        state = model.state_dict()
        assert set(state) - set(names) == ({"lm_head.weight"} if tied else set())
        for name, tensor in sent:
            assert tensor.dtype == torch.bfloat16 and not tensor.requires_grad
            assert torch.equal(tensor, state[name].bfloat16())
        assert model.dtype == torch.float32
