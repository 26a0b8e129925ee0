"""fp32_head.py on drawn sizes, dtypes and chunks, what torch really dispatches, and a `Scorer` on two ranks.

tests/test_fp32_head.py has the numbers by hand."""

import os
import subprocess
import sys

import pytest
import scorer_worker
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_fp32_head import inputs
from test_model import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import fp32_head
from fp32_head import Scorer, head_of, token_logprobs

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def logprobs_of(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def plain(hidden, weight, targets, bias=None, temperature=1.0):
    """Oracle: full logits, `torch.distributions`, float64 autograd."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def precision():
    """What the process allows of FP32 products, on a GPU and on a CPU."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def tensors_of(values):
    return [x for x in values if isinstance(x, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Notes every operation that torch executes, after autocast has had its say, with the tensors that it takes and
    returns; of matrix products the dtypes of all of these, and what `precision` was."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.products = []
        self.precisions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        taken = tensors_of(args)
        returned = tensors_of(result if isinstance(result, (tuple, list)) else [result])
        self.calls.append((name, taken, returned))  # keeping them keeps addresses unique
        if name in ("mm", "addmm", "addmm_", "matmul", "linear", "bmm", "baddbmm"):
            self.products.append({x.dtype for x in taken + returned})
            self.precisions.append(precision())
        return result


DTYPES = st.sampled_from([F64, F32, BF16])
CHUNKS = st.none() | st.integers(1, 10)
TEMPERATURES = st.sampled_from([1.0, 0.7, 3.0])


@given(st.integers(0, 9), st.integers(1, 12), CHUNKS, TEMPERATURES, st.booleans(), DTYPES)
def test_any_size_and_dtype_against_float64_autograd(m, v, chunk_tokens, temperature, with_bias, dtype):
    """Both outputs enter the loss with their own random weights, so that no sign or factor can hide. Results are FP32 at
    least, gradients have the dtypes of their inputs, and no input is written to. Without tokens the backward pass runs
    on zeros."""
    hidden, weight, targets, bias = inputs(dtype, m=m, v=v)
    leaves = [hidden, weight]
    options = {"temperature": temperature}
    if with_bias:
        leaves.append(bias)
        options["bias"] = bias
    a, b = torch.randn(2, m, dtype=F64)

    def gradients(logprobs, entropy):
        return list(torch.autograd.grad((a * logprobs + b * entropy).sum(), leaves))

    before = [x.detach().clone() for x in (*leaves, targets)]
    expected, expected_grads = [torch.zeros(0)] * 2, [0 * x for x in leaves]
    if m:
        expected = plain(hidden, weight, targets, **options)
        expected_grads = gradients(*expected)
    result = token_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens, entropy_grad=True, **options)
    near = {F64: 1e-11, F32: 1e-4, BF16: 1e-4}[dtype]
    expected = [x.to(torch.promote_types(dtype, F32)) for x in expected]
    torch.testing.assert_close(list(result), expected, rtol=near, atol=near)  # compares dtypes, too
    near = {F64: 1e-11, F32: 1e-4, BF16: 2e-2}[dtype]
    torch.testing.assert_close(gradients(*result), expected_grads, rtol=near, atol=near)
    for x, y in zip((*leaves, targets), before, strict=True):
        assert torch.equal(x, y)
        assert x._version == 0


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_gradients_only_where_asked(trained):
    """A frozen head or body costs no product and gets no gradient: one product forward, one more, and its own."""
    arguments = dict(zip(("hidden", "weight", "targets", "bias"), inputs(F32), strict=True))
    for name in {"hidden", "weight", "bias"} - {trained}:
        arguments[name].requires_grad_(False)
    (expected,) = torch.autograd.grad(plain(**arguments)[0].sum(), arguments[trained])
    with Recorder() as recorder:
        token_logprobs(**arguments)[0].sum().backward()
    assert len(recorder.products) == (2 if trained == "bias" else 3)
    torch.testing.assert_close(arguments[trained].grad, expected)


def test_fp64_of_either_input_wins():
    hidden, weight, targets, _ = inputs()
    assert token_logprobs(hidden, weight.float(), targets)[0].dtype == F64
    assert token_logprobs(hidden.float(), weight, targets)[0].dtype == F64


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_buffers_of_every_kind_of_pass(dtype, entropy_grad):
    """M = 64, V = 50, C = 4: nothing larger than the inputs. Buffers of C x V: two forward, one backward (two for the
    entropy's gradient)."""
    hidden, weight, targets, bias = inputs(dtype, m=64, h=8, v=50)
    options = {"bias": bias, "chunk_tokens": 4, "entropy_grad": entropy_grad, "temperature": 0.5}
    with Recorder() as recorder:
        logprobs, entropy = token_logprobs(hidden, weight, targets, **options)
        (logprobs + entropy).sum().backward()
    tensors = [x for _, _, returned in recorder.calls for x in returned]
    assert max(x.numel() for x in tensors) == 64 * 8  # hidden states; a full set of logits would be 64 * 50
    buffers = {x.untyped_storage().data_ptr() for x in tensors if x.shape == (4, 50)}
    assert len(buffers) == 3 + entropy_grad


@pytest.mark.parametrize(
    ("dtype", "chunk_bytes", "sizes"),
    [
        (F32, 175, [3, 3, 1]),
        (F64, 175, [1] * 7),
        (F32, 1, [1] * 7),  # at least one token, whatever the vocabulary
    ],
)
def test_chunk_fills_the_byte_budget(monkeypatch, dtype, chunk_bytes, sizes):
    """3 tokens of 11 FP32 logits are 132 bytes; with 175 bytes a fourth (44 more) does not fit. In FP64 one fits."""
    monkeypatch.setattr(fp32_head, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, targets, _ = inputs(dtype)
    with Recorder() as recorder, torch.no_grad():
        token_logprobs(hidden, weight, targets)
    assert [len(returned[0]) for name, _, returned in recorder.calls if name == "mm"] == sizes


@pytest.mark.parametrize("elsewhere", ["highest", "high", "medium"])
def test_precision_allowed_elsewhere_does_not_reach_the_head(elsewhere, request):
    """All four products are FP32 whatever the process allows: `high` is allow_tf32, a line of many trainers, `medium` on a
    CPU bfloat16. There nothing changes, also if one of them fails."""
    torch.set_float32_matmul_precision(elsewhere)
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    before = precision()
    for hidden_dtype, weight_dtype in (BF16, BF16), (BF16, F32), (F32, F32):
        hidden, weight, targets = inputs(hidden_dtype)[0], inputs(weight_dtype)[1], inputs()[2]
        with Recorder() as recorder:
            token_logprobs(hidden, weight, targets)[0].sum().backward()
        assert recorder.precisions == [("ieee", "ieee")] * 4
        assert precision() == before
    with pytest.raises(RuntimeError):
        token_logprobs(hidden, weight, targets + 11)  # no such ids
    assert precision() == before


@pytest.mark.parametrize("with_bias", [False, True])
def test_fp32_false_multiplies_in_the_models_dtype(with_bias):
    """The ablation: logits as a bfloat16 model computes them, log-softmax in FP32; farther from float64 than FP32."""
    hidden, weight, targets, bias = inputs(BF16, m=64, h=64, v=50)
    if not with_bias:
        bias = None
    with Recorder() as recorder:
        coarse, _ = token_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=5, fp32=False)
    assert set.union(*recorder.products) == {BF16}
    expected = logprobs_of(F.linear(hidden, weight, bias).float(), targets)
    torch.testing.assert_close(coarse, expected, rtol=0, atol=2e-2)  # blocks of another size round elsewhere
    exact, _ = plain(hidden, weight, targets, bias)
    fine, _ = token_logprobs(hidden, weight, targets, bias=bias)
    assert (fine - exact).abs().max() < 1e-5
    assert (coarse - exact).abs().max() > 1e-3


def test_fp32_false_rounds_fp32_masters_and_keeps_their_gradient():
    """FP32 master weights: forward as with the bfloat16 head; gradient (H1) through the rounded logits' softmax."""
    hidden, weight, targets, _ = inputs(F32)
    half, options = hidden.detach().bfloat16(), {"temperature": 2.0, "fp32": False}
    result, _ = token_logprobs(half, weight, targets, **options)
    assert torch.equal(result, token_logprobs(half, weight.bfloat16(), targets, **options)[0])
    logits = F.linear(half, weight.bfloat16()).float().detach().requires_grad_()
    logprobs_of(logits / 2, targets).sum().backward()
    result.sum().backward()
    torch.testing.assert_close(weight.grad, logits.grad.t() @ half.float())


def test_fp32_false_changes_nothing_in_float32():
    hidden, weight, targets, _ = inputs(F32)
    assert torch.equal(
        token_logprobs(hidden, weight, targets, fp32=False)[0], token_logprobs(hidden, weight, targets)[0]
    )


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}])
def test_scorer_is_the_models_own_log_softmax(inputs):
    """A Hugging Face model with two padded rows, whose padding id is any in range; T = .7; from position 2 on."""
    model = tiny_model(tied=False)
    ids = torch.tensor([[4, 5, 6, 7, 8, 9], [3, 1, 2, 18, 0, 0]])
    logprobs, entropy = Scorer(model, temperature=0.7)(ids, 2, **inputs)
    expected = torch.distributions.Categorical(logits=model(ids, **inputs).logits[:, 1:-1] / 0.7)
    assert logprobs.shape == entropy.shape == (2, 4)
    torch.testing.assert_close(logprobs, expected.log_prob(ids[:, 2:]))
    torch.testing.assert_close(entropy, expected.entropy())


@pytest.mark.medium
def test_a_wrapped_scorer_on_two_ranks_has_the_gradient_of_one_process(tmp_path):
    """DDP and FSDP2 on gloo, 1 and 3 of 4 rows; the oracle is plain log_softmax and autograd over the whole batch. As
    both average over the ranks, the loss is multiplied by 2; without the factor the gradient is half."""
    model, start = scorer_worker.Model(), scorer_worker.START
    ids = scorer_worker.batch()[0]
    logits = model.lm_head(model.base_model(ids, use_cache=False).last_hidden_state)
    logprobs = logprobs_of(logits[:, start - 1 : -1], ids[:, start:])
    scorer_worker.loss_of(logprobs, [0, 1, 2, 3]).backward()
    command = [sys.executable, scorer_worker.__file__, str(tmp_path / "store"), str(tmp_path / "out")]
    environment = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env=environment | {"RANK": rank}, stderr=subprocess.PIPE) for rank in "01"]
    try:
        for rank in ranks:
            _, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    results = torch.load(tmp_path / "out")
    for wrapper, factor in ("ddp", 1), ("fsdp2", 1), ("ddp without the factor", 0.5):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(results[wrapper, name], parameter.grad * factor)


@pytest.mark.parametrize("kind", ["no bias", "no attribute"])
def test_scorer_of_heads_without_a_bias(kind):
    """No bias may be None, or no attribute at all."""
    model, ids = scorer_worker.Model(), scorer_worker.batch()[0]
    torch.nn.init.zeros_(model.lm_head.bias)
    expected, _ = Scorer(model, BF16)(ids)
    v, h = model.lm_head.weight.shape
    head = torch.nn.Linear(h, v, bias=False) if kind == "no bias" else torch.nn.Embedding(v, h)
    head.weight = model.lm_head.weight
    model.lm_head = head
    torch.testing.assert_close(Scorer(model, BF16)(ids)[0], expected)


def test_an_adapter_on_the_head_is_refused_by_name():
    """A PEFT layer holds the layer that it adapts as `base_layer`, and shows that one's weight as its own."""

    class LoraLinear(torch.nn.Linear):
        base_layer = None

    model = scorer_worker.Model()
    weight, bias = head_of(model)
    assert weight is model.base_model.embedding.weight
    assert bias is model.lm_head.bias
    model.lm_head = LoraLinear(1, 1)
    with pytest.raises(TypeError, match="the head is a LoraLinear, .* target_modules"):
        Scorer(model)(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden must be \(M, H\)"),
        ({"hidden": torch.zeros(2, 3)}, r"hidden must be \(M, H\)"),
        ({"weight": torch.zeros(4)}, r"hidden must be \(M, H\)"),
        ({"hidden": torch.zeros(2, 3, 4)}, r"targets are \(2, 3\), .*; got \(2,\)"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets are \(2,\), .*; got \(3,\)"),
        ({"bias": torch.zeros(1)}, r"bias \(6,\)"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
    ],
)
def test_errors(change, message):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "targets": torch.zeros(2, dtype=torch.long)}
    token_logprobs(**good)
    with pytest.raises(ValueError, match=message):
        token_logprobs(**good | change)


def test_each_pass_casts_a_bfloat16_head_once():
    """To FP32, a copy of (V, H): with 150,000 rows the largest tensor of a pass."""
    hidden, weight, targets, _ = inputs(BF16, v=50)
    with Recorder() as forward:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_tokens=2)
    with Recorder() as backward:
        logprobs.sum().backward()
    for recorder in (forward, backward):
        casts = [x for name, _, returned in recorder.calls if name == "_to_copy" for x in returned]
        assert len([x for x in casts if x.shape == weight.shape and x.dtype == F32]) == 1


def test_two_bfloat16_numbers_hold_16_bits():
    """What tensor cores multiply in the backward pass: the sum of the parts is within 2^-16 of each number."""
    dz = torch.randn(64, 100) * torch.logspace(-6, 2, 100)
    high, low = fp32_head._bfloat16_parts(dz.clone())
    assert high.dtype == low.dtype == torch.bfloat16
    assert ((high.float() + low.float() - dz).abs() <= 2**-16 * dz.abs()).all()
    assert ((high.float() - dz).abs() > 2**-16 * dz.abs()).any()  # one part alone does not
