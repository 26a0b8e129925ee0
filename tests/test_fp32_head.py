"""fp32_head.py against hand-worked numbers, float64 autograd, and what torch really dispatches."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scorer_worker
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fp32_head
from fp32_head import GENERATOR_ARGS, Scorer, head_of, rounded, token_logprobs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(dtype: torch.dtype = torch.float64, m: int = 7, h: int = 5, v: int = 11):
    """Random (hidden (m, h), weight (v, h), targets (m,), bias (v,)), the floats as leaves with gradients."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=rng, dtype=torch.float64) for n in ((m, h), (v, h), (v,)))
    targets = torch.randint(v, (m,), generator=rng)
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight)), targets, bias.to(dtype).requires_grad_()


def plain(hidden, weight, targets, bias=None, temperature=1.0):
    """Oracle: full logits, `torch.distributions`, float64 autograd."""
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double()) / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


def precision():
    """What the process allows of FP32 products, on a GPU and on a CPU."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


class Recorder(TorchDispatchMode):
    """Notes every operation that torch executes, after autocast has had its say, with the tensors that it takes and
    returns; of matrix products the dtypes of all of these, and what `precision` was."""

    def __init__(self):
        super().__init__()
        self.calls, self.products, self.precisions = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        taken = [x for x in args if isinstance(x, torch.Tensor)]
        given = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
        self.calls.append((name, taken, given))  # holding them keeps addresses unique
        if name in ("mm", "addmm", "addmm_", "matmul", "linear", "bmm", "baddbmm"):
            self.products.append({x.dtype for x in taken + given})
            self.precisions.append(precision())
        return out


def test_two_tokens_by_hand():
    """Logits (0, ln 3): p = (1/4, 3/4). log p_1 = ln 3/4; entropy = 1/4 ln 4 + 3/4 ln 4/3.
    d log p_1 / d h = (0 - 1/4) * 0 + (1 - 3/4) * ln 3 with weights (0, ln 3) and h = 1; d / d W = (-1/4, 1/4)."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(3 / 4))
    assert entropy.item() == pytest.approx(math.log(4) / 4 + 3 / 4 * math.log(4 / 3))
    grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert torch.cat(grads).flatten().tolist() == pytest.approx([math.log(3) / 4, -1 / 4, 1 / 4])


def test_temperature_by_hand():
    """Logits (0, ln 3) at T = 1/2 are (0, ln 9): p = (1/10, 9/10). d log p_0 / d W = (9/10, -9/10) / T."""
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    logprobs, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), temperature=0.5)
    assert logprobs.item() == pytest.approx(math.log(1 / 10))
    assert entropy.item() == pytest.approx(0.1 * math.log(10) + 0.9 * math.log(10 / 9))
    assert torch.autograd.grad(logprobs.sum(), weight)[0].flatten().tolist() == pytest.approx([1.8, -1.8])


def test_huge_logits_stay_finite():
    """Logits (0, 1e4): exp overflows without the maximum taken off; log p = (-1e4, 0), entropy 0."""
    weight = torch.tensor([[0.0], [1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), entropy_grad=True)
    assert logprobs.tolist() == [-1e4, 0] and entropy.tolist() == [0, 0]
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad.flatten().tolist() == [1, -1]


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
CHUNKS, TEMPERATURES = st.none() | st.integers(1, 10), st.sampled_from([1.0, 0.7, 3.0])


@given(st.integers(0, 9), st.integers(1, 12), CHUNKS, TEMPERATURES, st.booleans(), DTYPES)
def test_values_and_gradients_against_float64_autograd(m, v, chunk_tokens, temperature, with_bias, dtype):
    """Both outputs enter the loss with their own random weights, so that no sign or factor can hide. Results are FP32 at
    least, gradients have the dtypes of their inputs, and no input is written to. Without tokens the backward pass runs
    on zeros."""
    hidden, weight, targets, bias = inputs(dtype, m=m, v=v)
    leaves = [hidden, weight, bias][: 2 + with_bias]
    options = {"temperature": temperature, "bias": bias if with_bias else None}
    a, b = torch.randn(2, m, dtype=torch.float64)
    before = [x.detach().clone() for x in (*leaves, targets)]
    expected = plain(hidden, weight, targets, **options) if m else (torch.zeros(0), torch.zeros(0))
    found = token_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens, entropy_grad=True, **options)
    grads = torch.autograd.grad((a * found[0] + b * found[1]).sum(), leaves)
    near = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    wide = torch.promote_types(dtype, torch.float32)
    expected_wide = tuple(y.to(wide) for y in expected)
    torch.testing.assert_close(found, expected_wide, rtol=min(near, 1e-4), atol=min(near, 1e-4))  # and equal dtypes
    wanted = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), leaves) if m else [x * 0 for x in leaves]
    assert [x.dtype for x in grads] == [dtype] * len(leaves)
    torch.testing.assert_close(list(grads), list(wanted), rtol=near, atol=near)
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip((*leaves, targets), before, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads(tied):
    """A tied embedding gets both gradients, that of the look-up and that of the head, and is not upcast."""
    _, table, targets, _ = inputs(torch.float32)
    head = table if tied else inputs(torch.float32)[1].detach().flip(0).requires_grad_()
    ids = torch.tensor([0, 3, 3, 10, 2, 1, 0])
    leaves = [table] if tied else [table, head]

    ours, theirs = (f(torch.tanh(table[ids]), head, targets)[0].sum() for f in (token_logprobs, plain))
    grads = [torch.autograd.grad(value, leaves) for value in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    assert table.dtype == torch.float32


@pytest.mark.parametrize("v, scale", [(20_000, 0.3), pytest.param(152_064, 0.1, marks=pytest.mark.slow)])
def test_fp32_is_close_to_float64_on_a_large_vocabulary(v, scale):
    hidden, weight, targets, _ = inputs(torch.float32, m=8, h=1024 if scale == 0.1 else 128, v=v)
    with torch.no_grad():
        weight.mul_(scale)  # logits of standard deviation 3
        found, expected = token_logprobs(hidden, weight, targets), plain(hidden, weight, targets)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert max((x - y).abs().max().item() for x, y in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_gradients_only_where_asked(trained):
    """A frozen head or body costs no product and gets no gradient: one product forward, one more, and its own."""
    arguments = dict(zip(("hidden", "weight", "targets", "bias"), inputs(torch.float32), strict=True))
    for name in {"hidden", "weight", "bias"} - {trained}:
        arguments[name].requires_grad_(False)
    expected = torch.autograd.grad(plain(**arguments)[0].sum(), arguments[trained])[0]
    with Recorder() as recorder:
        token_logprobs(**arguments)[0].sum().backward()
    assert len(recorder.products) == (2 if trained == "bias" else 3)
    torch.testing.assert_close(arguments[trained].grad, expected)


def test_which_results_carry_a_gradient_and_fp64_of_either_input_wins():
    hidden, weight, targets, _ = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    assert logprobs.requires_grad and not entropy.requires_grad
    assert token_logprobs(hidden, weight, targets, entropy_grad=True)[1].requires_grad
    assert token_logprobs(hidden, weight.float(), targets)[0].dtype == torch.float64
    assert token_logprobs(hidden.float(), weight, targets)[0].dtype == torch.float64


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_by_vocabulary_tensor_is_ever_alive(dtype, entropy_grad):
    """M = 64, V = 50, C = 4: nothing larger than the inputs. Buffers of C x V: two forward, one backward (two for the
    entropy's gradient)."""
    hidden, weight, targets, bias = inputs(dtype, m=64, h=8, v=50)
    options = {"chunk_tokens": 4, "entropy_grad": entropy_grad, "temperature": 0.5}
    with Recorder() as recorder:
        found = token_logprobs(hidden, weight, targets, bias=bias, **options)[: 1 + entropy_grad]
        torch.autograd.backward(found, [torch.ones(64)] * len(found))
    tensors = [x for _, _, given in recorder.calls for x in given]
    assert max(x.numel() for x in tensors) == 64 * 8  # hidden states; a full set of logits would be 64 * 50
    buffers = {x.untyped_storage().data_ptr() for x in tensors if x.shape == (4, 50)}
    assert len(buffers) == (4 if entropy_grad else 3)


def test_chunk_fills_the_byte_budget(monkeypatch):
    """3 tokens of 11 FP32 logits are 132 bytes; with 175 bytes a fourth (44 more) does not fit. In FP64 one fits."""
    monkeypatch.setattr(fp32_head, "CHUNK_BYTES", 175)

    def sizes(dtype):
        hidden, weight, targets, _ = inputs(dtype)
        with Recorder() as recorder, torch.no_grad():
            token_logprobs(hidden, weight, targets)
        return [given[0].shape[0] for name, _, given in recorder.calls if name == "mm"]

    assert sizes(torch.float32) == [3, 3, 1]
    assert sizes(torch.float64) == [1] * 7
    monkeypatch.setattr(fp32_head, "CHUNK_BYTES", 1)
    assert sizes(torch.float32) == [1] * 7  # at least one token, whatever the vocabulary


def test_product_stays_fp32_under_autocast():
    """Mixed precision casts products to bfloat16. Operands and results of all four products are looked at."""
    hidden, weight, targets, bias = inputs(torch.float32)
    expected = token_logprobs(hidden, weight, targets, bias=bias)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (hidden @ weight.t()).dtype == torch.bfloat16  # autocast is on
        for use_bias in (None, bias):
            with Recorder() as recorder:
                logprobs, _ = token_logprobs(hidden, weight, targets, bias=use_bias)
                logprobs.sum().backward()
            assert recorder.products == [{torch.float32}] * 4
    assert torch.equal(logprobs, expected)


@pytest.mark.parametrize("elsewhere", ["highest", "high", "medium"])
def test_precision_allowed_elsewhere_does_not_reach_the_head(elsewhere, request):
    """All four products are FP32 whatever the process allows: `high` is allow_tf32, a line of many trainers, `medium` on a
    CPU bfloat16. There nothing changes, also if one of them fails."""
    torch.set_float32_matmul_precision(elsewhere)
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    before = precision()
    for kinds in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        hidden, weight = (x.detach().to(kind).requires_grad_() for x, kind in zip(inputs(), kinds, strict=False))
        targets = inputs()[2]
        with Recorder() as recorder:
            token_logprobs(hidden, weight, targets)[0].sum().backward()
        assert recorder.precisions == [("ieee", "ieee")] * 4 and precision() == before
    with pytest.raises(RuntimeError):
        token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets + 11)  # no such ids
    assert precision() == before


def test_weight_gradient_is_summed_in_fp32():
    """512 tokens of hidden state 1 in chunks of 1, a head of zeros over 2 tokens, target 0: each adds 1/2 to dW_0 and
    db_0. The sum is 256; a bfloat16 sum stops at 128, where adding 1/2 rounds away."""
    hidden, weight, bias = torch.ones(512, 1).bfloat16(), torch.zeros(2, 1).bfloat16(), torch.zeros(2).bfloat16()
    leaves = weight.requires_grad_(), bias.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.long), bias=bias, chunk_tokens=1)
    for grad in torch.autograd.grad(logprobs.sum(), leaves):
        assert grad.flatten().tolist() == [256, -256]


def test_fp32_false_multiplies_in_the_models_dtype():
    """The ablation: logits as a bfloat16 model computes them, log-softmax in FP32; farther from float64 than FP32."""
    hidden, weight, targets, bias = inputs(torch.bfloat16, m=64, h=64, v=50)
    for use_bias in (None, bias):
        expected = F.linear(hidden, weight, use_bias).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        with Recorder() as recorder:
            found = token_logprobs(hidden, weight, targets, bias=use_bias, chunk_tokens=5, fp32=False)[0]
        assert set.union(*recorder.products) == {torch.bfloat16}
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)  # blocks of another size round elsewhere
    exact = plain(hidden, weight, targets)[0]
    fp32, found = (token_logprobs(hidden, weight, targets, fp32=flag)[0] for flag in (True, False))
    assert (fp32 - exact).abs().max() < 1e-5 and (found - exact).abs().max() > 1e-3


def test_fp32_false_rounds_fp32_masters_and_keeps_their_gradient():
    """FP32 master weights: forward as with the bfloat16 head; gradient (H1) through the rounded logits' softmax."""
    hidden, weight, targets, _ = inputs(torch.float32)
    half = hidden.detach().bfloat16()
    found = token_logprobs(half, weight, targets, temperature=2.0, fp32=False)[0]
    assert torch.equal(found, token_logprobs(half, weight.bfloat16(), targets, temperature=2.0, fp32=False)[0])
    logits = F.linear(half, weight.bfloat16()).float().detach().requires_grad_()
    (logits / 2).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    found.sum().backward()
    torch.testing.assert_close(weight.grad, logits.grad.t() @ half.float())
    a, b = (token_logprobs(hidden, weight, targets, fp32=flag)[0] for flag in (False, True))
    assert torch.equal(a, b)  # in float32 the flag changes nothing


def test_rounded_has_the_generators_values_and_passes_the_gradient_through():
    """1.003 lies between the bfloat16 neighbours 1 and 1 + 2^-7; the gradient 1.003 arrives unrounded."""
    weight = torch.cat([torch.tensor([1.003, -1.003, 0.0, 1e-30, 3e38]), torch.randn(10_000)]).requires_grad_()
    result = rounded(weight, torch.bfloat16)
    assert result.dtype == torch.float32 and result[0] == 1
    assert torch.equal(result, weight.detach().bfloat16().float())
    result.backward(torch.full_like(weight, 1.003))
    assert torch.equal(weight.grad, torch.full_like(weight, 1.003))
    assert rounded(weight, torch.float32) is weight


def test_trainer_and_generator_compute_the_same_function():
    """The generator holds the head in bfloat16 and casts when it multiplies. With `rounded` the trainer's
    FP32 masters give its numbers; without, they are off by the rounding."""
    assert getattr(torch, GENERATOR_ARGS["hf_overrides"]["head_dtype"]) is torch.float32
    hidden, weight, targets, _ = inputs(torch.float32, m=64, h=64, v=50)
    half, held = hidden.detach().bfloat16(), weight.detach().bfloat16()
    logits = F.linear(half.float(), held.float())
    generator = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    trainer = token_logprobs(half, rounded(weight, torch.bfloat16), targets)[0]
    torch.testing.assert_close(trainer, generator, rtol=0, atol=1e-5)
    assert (token_logprobs(half, weight, targets)[0] - generator).abs().max() > 1e-3


def test_scorer_is_the_models_own_log_softmax():
    """A Hugging Face model with two padded rows, whose padding id is any in range; T = .7; from position 2 on."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=19, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, **sizes)
    model = Qwen3ForCausalLM(config).double()
    ids = torch.tensor([[4, 5, 6, 7, 8, 9], [3, 1, 2, 18, 0, 0]])
    for inputs in ({}, {"attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}):
        logprobs, entropy = Scorer(model, temperature=0.7)(ids, 2, **inputs)
        expected = torch.distributions.Categorical(logits=model(ids, **inputs).logits[:, 1:-1] / 0.7)
        assert logprobs.shape == entropy.shape == (2, 4)
        torch.testing.assert_close(logprobs, expected.log_prob(ids[:, 2:]))
        torch.testing.assert_close(entropy, expected.entropy())


def test_scorer_multiplies_as_a_generator_that_holds_the_head_in_bfloat16():
    """The oracle rounds hidden states and head itself, and multiplies in FP64."""
    model = scorer_worker.Model()
    ids = scorer_worker.batch()[0]
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, :-1].bfloat16().double()
        weight, bias = (x.bfloat16().double() for x in (model.lm_head.weight, model.lm_head.bias))
        expected = (hidden @ weight.T + bias).log_softmax(-1)
        logprobs, _ = Scorer(model, torch.bfloat16)(ids)
        plain, _ = Scorer(model)(ids)
    expected = expected.gather(2, ids[:, 1:, None]).squeeze(2)
    assert (logprobs - expected).abs().max() < 1e-6 and (plain - expected).abs().max() > 1e-4


@pytest.mark.medium
def test_a_wrapped_scorer_on_two_ranks_has_the_gradient_of_one_process(tmp_path):
    """DDP and FSDP2 on gloo, 1 and 3 of 4 rows; the oracle is plain log_softmax and autograd over the whole batch. As
    both average over the ranks, the loss is multiplied by 2; without the factor the gradient is half."""
    model = scorer_worker.Model()
    ids = scorer_worker.batch()[0]
    logits = model.lm_head(model.base_model(ids, use_cache=False).last_hidden_state)[:, scorer_worker.START - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, scorer_worker.START :, None]).squeeze(2)
    scorer_worker.loss_of(logprobs, [0, 1, 2, 3]).backward()
    command = [sys.executable, str(Path(scorer_worker.__file__)), str(tmp_path / "store"), str(tmp_path / "out")]
    shared = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env=shared | {"RANK": rank}, stderr=subprocess.PIPE) for rank in "01"]
    try:
        for rank in ranks:
            _, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    found = torch.load(tmp_path / "out")
    for name, factor in (("ddp", 1), ("fsdp2", 1), ("ddp without the factor", 0.5)):
        for parameter, tensor in model.named_parameters():
            torch.testing.assert_close(
                found[name, parameter], tensor.grad * factor, msg=lambda m, n=name, p=parameter: f"{n} {p}: {m}"
            )


def test_scorer_of_heads_without_a_bias():
    """No bias may be None, or no attribute at all."""
    model, ids = scorer_worker.Model(), scorer_worker.batch()[0]
    weight = model.lm_head.weight
    with torch.no_grad():
        model.lm_head.bias.zero_()
        wanted = Scorer(model, torch.bfloat16)(ids)[0]
        for head in (torch.nn.Linear(*weight.T.shape, bias=False), torch.nn.Embedding(*weight.shape)):
            model.lm_head, head.weight = head, weight
            torch.testing.assert_close(Scorer(model, torch.bfloat16)(ids)[0], wanted)


def test_an_adapter_on_the_head_is_refused_by_name():
    """A PEFT layer holds the layer that it adapts as `base_layer`, and shows that one's weight as its own."""

    model = scorer_worker.Model()
    weight, bias = head_of(model)
    assert weight is model.base_model.embedding.weight and bias is model.lm_head.bias
    head = type("LoraLinear", (torch.nn.Linear,), {})(*weight.T.shape)
    head.base_layer, model.lm_head = model.lm_head, head
    with pytest.raises(TypeError, match="the head is a LoraLinear, .* target_modules"):
        Scorer(model)(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden must be \(M, H\)"),
        ({"hidden": torch.zeros(2, 3)}, r"hidden must be \(M, H\)"),
        ({"weight": torch.zeros(4)}, r"hidden must be \(M, H\)"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets must be \(M,\) = \(2,\)"),
        ({"targets": torch.zeros(2, 1, dtype=torch.long)}, r"targets must be \(M,\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \(V,\) = \(6,\)"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
    ],
)
def test_errors(change, message):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "targets": torch.zeros(2, dtype=torch.long)}
    token_logprobs(**good)
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{**good, **change})


def test_each_pass_casts_a_bfloat16_head_once():
    """To FP32, a copy of (V, H): with 150,000 rows the largest tensor of a pass."""
    hidden, weight = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(50, 8).bfloat16().requires_grad_()
    with Recorder() as forward:
        logprobs, _ = token_logprobs(hidden, weight, torch.arange(6), chunk_tokens=2)
    with Recorder() as backward:
        logprobs.sum().backward()
    for calls in (forward.calls, backward.calls):
        casts = [given[0].dtype for name, taken, given in calls if name == "_to_copy" and taken[0].shape == (50, 8)]
        assert casts.count(torch.float32) == 1
