"""fp32_head.py, worked by hand on two tokens, then against float64 autograd, then what it promises of rounding."""

import collections
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp32_head
from fp32_head import GENERATOR_ARGS, Scorer, rounded, token_logprobs

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def inputs(dtype: torch.dtype = F64, m: int = 7, h: int = 5, v: int = 11) -> tuple[Tensor, ...]:
    """Random (hidden (m, h), weight (v, h), targets (m,), bias (v,)), the floats as leaves with gradients."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=rng, dtype=F64) for shape in ((m, h), (v, h), (v,)))
    targets = torch.randint(v, (m,), generator=rng)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves[0], leaves[1], targets, leaves[2]


def test_two_tokens_by_hand():
    """Logits (0, ln 3) at T = 1/2 are (0, ln 9): p = (1/10, 9/10). log p_1 = ln 9/10; entropy = 1/10 ln 10 + 9/10 ln 10/9.
    d log p_1 / d h = ((0 - 1/10) * 0 + (1 - 9/10) * ln 3) / T with weights (0, ln 3) and h = 1; d / d W = (-.1, .1) / T."""
    leaves = torch.ones(1, 1, requires_grad=True), torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    logprobs, entropy = token_logprobs(*leaves, torch.tensor([1]), temperature=0.5)
    assert logprobs.item() == pytest.approx(math.log(9 / 10))
    assert entropy.item() == pytest.approx(math.log(10) / 10 + 9 / 10 * math.log(10 / 9))
    assert not entropy.requires_grad  # a monitor, unless it is asked for
    grads = torch.cat(torch.autograd.grad(logprobs.sum(), leaves))
    assert grads.flatten().tolist() == pytest.approx([0.2 * math.log(3), -0.2, 0.2])


def test_huge_logits_stay_finite():
    """Logits (0, 1e4): exp overflows without the maximum taken off; log p = (-1e4, 0), entropy 0."""
    weight = torch.tensor([[0.0], [1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), entropy_grad=True)
    assert logprobs.tolist() == [-1e4, 0]
    assert entropy.tolist() == [0, 0]
    (logprobs + entropy).sum().backward()
    assert weight.grad.flatten().tolist() == [1, -1]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(F64, 1e-11), (F32, 1e-5), (BF16, 1e-2)])
def test_values_and_gradients_against_float64_autograd(dtype, near, with_bias, entropy_grad):
    """Oracle: all logits at once, `torch.distributions`, autograd. Seven tokens in chunks of three, T = .7; each result
    enters the loss with a weight of its own. Results are FP32 at least, gradients have the dtypes of their inputs."""
    hidden, weight, targets, bias = inputs(dtype)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    a, b = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=F64)

    def with_gradients(logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
        loss = (a * logprobs).sum()
        if entropy_grad:
            loss = loss + (b * entropy).sum()
        return [logprobs.double(), entropy.double(), *torch.autograd.grad(loss, leaves)]

    logits = hidden.double() @ weight.double().T + (bias.double() if with_bias else 0)
    oracle = torch.distributions.Categorical(logits=logits / 0.7)
    options = {"bias": bias if with_bias else None, "temperature": 0.7, "chunk_tokens": 3}
    logprobs, entropy = token_logprobs(hidden, weight, targets, entropy_grad=entropy_grad, **options)
    assert logprobs.dtype == entropy.dtype == (F64 if dtype == F64 else F32)
    expected = with_gradients(oracle.log_prob(targets), oracle.entropy())
    torch.testing.assert_close(with_gradients(logprobs, entropy), expected, rtol=near, atol=near)


@pytest.mark.parametrize(("dtype", "near"), [(F64, 1e-11), (F32, 1e-5)])
def test_a_soft_cap_a_padded_vocabulary_and_rows_of_tokens(dtype, near):
    """Oracle: float64 autograd through cap * tanh(z / cap) / T of nine of eleven rows of the head, for hidden states (2, 3, H);
    logits of about 3 at a cap of 2 saturate. The gradient of the padding rows is 0."""
    hidden, weight, targets, bias = inputs(dtype, m=6)
    rows = targets.view(2, 3).clamp(max=8)
    logits = hidden.double().view(2, 3, -1) @ weight[:9].double().T + bias[:9].double()
    oracle = torch.distributions.Categorical(logits=2 * (logits / 2).tanh() / 0.7)
    options = {"bias": bias[:9], "softcap": 2.0, "temperature": 0.7, "chunk_tokens": 4, "entropy_grad": True}
    found = token_logprobs(hidden.view(2, 3, -1), weight[:9], rows, **options)
    a, b = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    results = []
    for logprobs, entropy in (found, (oracle.log_prob(rows), oracle.entropy())):
        assert logprobs.shape == entropy.shape == (2, 3)
        grads = torch.autograd.grad((a * logprobs + b * entropy).sum(), [hidden, weight, bias], retain_graph=True)
        results.append([logprobs.double(), entropy.double(), *grads])
    torch.testing.assert_close(*results, rtol=near, atol=near)
    assert not results[0][3][9:].any()


def test_a_model_that_is_not_hugging_faces():
    """The three lines of the docstring, on a model that returns soft-capped logits of 6 tokens, its head having 8 rows."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.lm_head = nn.Embedding(6, 5), nn.Linear(5, 8, bias=False)

        def forward(self, ids):
            return 15 * (self.lm_head(40 * self.body(ids))[..., :6] / 15).tanh()

    model, ids = Model(), torch.tensor([[0, 1, 2, 3], [5, 5, 0, 1]])
    lines = fp32_head.__doc__.split("soft cap on its logits:\n")[1].split("\n\n")[0]
    hidden, head = torch.randn(2, 5).bfloat16(), torch.randn(8, 5).bfloat16()
    names = {"model": model, "ids": ids, "V": 6, "token_logprobs": token_logprobs, "hidden": hidden, "head": head}
    names |= {"F": F, "collections": collections}
    exec(textwrap.dedent(lines), names)
    expected = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(names["logprobs"], expected)
    torch.testing.assert_close(names["logits"], (hidden.double() @ head.double().T).float())
    for _ in range(3):
        model(ids)
    assert len(names["inputs"]) == 1


def test_rounded_has_the_generators_values_and_passes_the_gradient_through():
    """1.003 lies between the bfloat16 neighbours 1 and 1 + 2^-7; the gradient 1.003 arrives unrounded."""
    weight = torch.tensor([1.003, -1.003, 0.0, 1e-30, 3e38], requires_grad=True)
    result = rounded(weight, BF16)
    assert result[0] == 1
    assert torch.equal(result, weight.bfloat16().float())
    result.backward(torch.full_like(weight, 1.003))
    assert torch.equal(weight.grad, torch.full_like(weight, 1.003))
    assert rounded(weight, F32) is weight


def test_trainer_and_generator_compute_the_same_function():
    """The generator stores the head in bfloat16 and casts when it multiplies. With `rounded` the trainer's FP32 masters
    give its numbers; without, they are off by the rounding, and so is a product in bfloat16."""
    assert GENERATOR_ARGS == {"hf_overrides": {"head_dtype": "float32"}}
    hidden, weight, targets, _ = inputs(F32, m=64, h=64, v=50)
    half = hidden.bfloat16()
    generator = (half.float() @ weight.bfloat16().float().T).log_softmax(-1)[range(64), targets]

    def furthest(head: Tensor, **options: bool) -> float:
        logprobs, _ = token_logprobs(half, head, targets, **options)
        return (logprobs - generator).abs().max().item()

    assert furthest(rounded(weight, BF16)) < 1e-5
    assert furthest(weight) > 1e-3
    assert furthest(rounded(weight, BF16), fp32=False) > 1e-2


def test_product_stays_fp32_under_autocast():
    """Mixed precision casts products to bfloat16: not this one, in neither pass."""
    hidden, weight, targets, bias = inputs(F32)
    results = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            assert (hidden @ weight.t()).dtype == (BF16 if autocast else F32)
            logprobs, _ = token_logprobs(hidden, weight, targets, bias=bias)
            results.append([logprobs, *torch.autograd.grad(logprobs.sum(), [hidden, weight, bias])])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_weight_gradient_is_summed_in_fp32():
    """512 tokens of hidden state 1 in chunks of 1, a head of zeros over 2 tokens, target 0: each adds 1/2 to dW_0 and
    db_0. The sum is 256; a bfloat16 sum stops at 128, where adding 1/2 rounds away."""
    hidden, targets = torch.ones(512, 1, dtype=BF16), torch.zeros(512, dtype=torch.long)
    weight = torch.zeros(2, 1, dtype=BF16, requires_grad=True)
    bias = torch.zeros(2, dtype=BF16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=1)
    for grad in torch.autograd.grad(logprobs.sum(), [weight, bias]):
        assert grad.flatten().tolist() == [256, -256]


def test_a_scorer_scores_each_token_by_the_position_before_it():
    """A model of four tokens whose hidden state is its token's row of the tied head. The oracle takes the log-softmax at
    position t - 1 for token t, from position 2 on; with a dtype it rounds hidden states, head and bias to it first. Chosen
    tokens have the same values."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(3, 4)
            self.body = nn.Embedding(4, 3, _weight=self.head.weight)

        def base_model(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=self.body(input_ids))

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    ids = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]])
    for dtype in (None, BF16):
        weight, bias = (x if dtype is None else x.to(dtype).float() for x in (model.head.weight, model.head.bias))
        distribution = (weight[ids] @ weight.T + bias).div(0.5).log_softmax(-1)  # (2, 4, 4)
        expected = [[distribution[row, t - 1, ids[row, t]].item() for t in (2, 3)] for row in (0, 1)]
        logprobs, entropy = Scorer(model, dtype, temperature=0.5)(ids, 2)
        torch.testing.assert_close(logprobs, torch.tensor(expected))
        assert entropy.shape == (2, 2)
        chosen, _ = Scorer(model, dtype, temperature=0.5)(ids, 2, torch.tensor([1, 2]))  # of four tokens, row by row
        assert torch.equal(chosen, logprobs.flatten()[1:3])
