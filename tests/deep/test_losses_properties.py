"""losses.py on drawn batches: any split, any junk outside the mask, dtypes, huge ratios, and what is refused.

tests/test_losses.py has the numbers by hand."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses import close, each_loss, f64
from torch import Tensor

from losses import LOSSES, aggregation_weights, kl_penalty, merge_metrics, normalize_advantages, summarize_metrics

AVERAGES = ["sample", "prompt", "token", "constant"]
F64 = torch.float64


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def capped(metrics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return metrics["capped_positive"], metrics["capped_negative"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def batch(rows: int = 6, length: int = 5, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    """Random (logprobs, behaviour, old, advantages, mask) in FP64; rows of unequal length, with holes in the mask."""
    first, second, third, fourth = noise(4, rows, length, seed=seed)
    logprobs = -first.abs()
    behaviour = logprobs + spread * second
    old = logprobs + 0.3 * third
    mask = (fourth < 0.3).long()
    mask[:, 0] = 1
    return logprobs, behaviour, old, fourth[:, 0], mask


@st.composite
def batches(draw):
    """(`batch` of 1 to 7 rows whose mask may leave rows out, group ids, an average's name)."""
    rows = draw(st.integers(1, 7))
    length = draw(st.integers(1, 5))
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))
    seed = draw(st.integers(0, 99))

    def of_rows(largest: int) -> Tensor:
        return torch.tensor(draw(st.lists(st.integers(0, largest), min_size=rows, max_size=rows)))

    *inputs, mask = batch(rows, length, spread, seed)
    mask *= of_rows(1)[:, None]
    return (*inputs, mask), of_rows(3), draw(st.sampled_from(AVERAGES))


def loss(name: str, logprobs, behaviour, old, advantages, mask, **options):
    """(token_loss, metrics); only TIS takes the old log-probs."""
    if name == "tis":
        options["old_logprobs"] = old
    return LOSSES[name](logprobs, behaviour, advantages, mask, **options)


class Result(NamedTuple):
    token_loss: Tensor
    metrics: dict[str, Tensor]
    grad: Tensor  # of the summed loss with respect to the log-probs


def run(name: str, logprobs: Tensor, *inputs: Tensor, **clips) -> Result:
    leaf = logprobs.clone().requires_grad_()
    token_loss, metrics = loss(name, leaf, *inputs, **clips)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    return Result(token_loss.detach(), metrics, grad)


def run_ratios(name: str, rho: list[float], advantage: float | list[float] = 1.0, **clips) -> Result:
    """`run` on one row whose tokens have the ratios `rho`, and one advantage for all or one for each."""
    ones = torch.ones(1, len(rho), dtype=F64)
    behaviour = -2 * ones
    logprobs = behaviour + f64(rho).log()
    return run(name, logprobs, behaviour, behaviour, ones * torch.tensor(advantage), ones, **clips)


def test_tis_counts_capped_tokens_of_both_signs_and_none_outside_the_mask():
    """w = 1 on each token, above a cap of .5; A = 1, -1 and, outside the mask, 1."""
    zeros = f64([0, 0, 0])
    advantages = f64([1, -1, 1])
    mask = torch.tensor([[1, 1, 0]])
    metrics = run("tis", zeros, zeros, zeros, advantages, mask, cap=0.5).metrics
    assert metrics["tis_capped"] == 2
    assert summarize_metrics(metrics)["tis_capped"] == 1


@each_loss
def test_an_advantage_is_a_factor_whose_sign_alone_decides(name):
    """A hundredth of all advantages, most of them then below .01: a hundredth of the loss and of the gradient, and as many
    tokens capped."""
    *logprobs, advantages, mask = batch()
    large = run(name, *logprobs, advantages, mask)
    small = run(name, *logprobs, advantages / 100, mask)
    close(small.token_loss * 100, large.token_loss)
    close(small.grad * 100, large.grad)
    assert capped(small.metrics) == capped(large.metrics)


def test_tis_with_one_update_a_batch_is_cispo():
    """pi_old = pi: per token the gradient is that of CISPO with eps_max = cap to the bit, and no clip acts, however
    narrow (rho of e^+-3 here)."""
    logprobs, behaviour, _, advantages, mask = batch(spread=1.5)
    inputs = logprobs, behaviour, logprobs, advantages, mask
    expected = run("cispo", *inputs, eps_max=2.0).grad
    for clips in ({}, {"eps_low": 1e-9, "eps_high": 1e-9}):
        result = run("tis", *inputs, **clips)
        assert torch.equal(result.grad, expected)
        assert capped(result.metrics) == (0, 0)
        assert result.metrics["tis_capped"] > 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@each_loss  # drawn, some would hardly come
@settings(max_examples=20)
@given(drawn=batches(), data=st.data())
def test_junk_outside_the_mask_changes_nothing(name, drawn, data):
    """Anything in any input outside the mask, NaN and infinities included: same loss, gradient, metrics, to the bit, and 0
    there. One advantage for each row does the same as an equal one for each token. The gradient flows through the
    log-probs alone, and no input is written to."""
    (*inputs, advantages, mask), ids, _ = drawn
    clean = run(name, *inputs, advantages, mask)

    def dirty(x: Tensor, outside: Tensor) -> Tensor:
        junk = data.draw(st.floats() | st.sampled_from([math.nan, math.inf]))
        return x.masked_fill(outside, junk).requires_grad_()

    logprobs = [dirty(x, mask == 0) for x in inputs]
    per_token = dirty(advantages[:, None].expand(mask.shape), mask == 0)
    per_row = dirty(advantages, ~mask.any(1))
    leaves = [*logprobs, per_row, per_token]
    before = [x.detach().clone() for x in (*leaves, mask)]
    with torch.autograd.detect_anomaly():  # no NaN on the way either: it would stop whoever debugs with this switch
        for a in (per_row, per_token):
            token_loss, metrics = loss(name, *logprobs, a, mask)
            grad, *others = torch.autograd.grad(token_loss.sum(), leaves, allow_unused=True)
            assert torch.equal(token_loss, clean.token_loss)
            assert torch.equal(grad, clean.grad)
            assert others == [None] * 4
            assert floats(metrics) == floats(clean.metrics)
            assert not any(x.requires_grad for x in metrics.values())
            assert not token_loss[mask == 0].any()
            assert not grad[mask == 0].any()
    aggregation_weights(mask, ids)
    kl_penalty(logprobs[0], logprobs[1], mask)
    normalize_advantages(per_row.detach(), ids)
    after = [x.detach() for x in (*leaves, mask)]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@each_loss
@pytest.mark.parametrize("which", range(4))
def test_a_nan_inside_the_mask_is_not_hidden(name, which):
    """A NaN in one log-prob or advantage comes out in its own row, never in other rows or padding, and in ratio_max."""
    inputs = list(batch())
    inputs[which][(1, 0) if which < 3 else 1] = math.nan
    token_loss, metrics, _ = run(name, *inputs)
    if which != 2 or name == "tis":  # the old log-probs, which the other losses do not take
        assert token_loss[1, 0].isnan()
    assert token_loss[[0, 2, 3, 4, 5]].isfinite().all()
    assert not token_loss[inputs[-1] == 0].any()
    if which < 2:
        assert math.isnan(summarize_metrics(merge_metrics([metrics, metrics]))["ratio_max"])


@each_loss
def test_bfloat16_log_probs_are_raised_before_the_ratio(name):
    """Loss, gradient and clip decisions are those of the same values in FP32: in bfloat16 ratios near 1 are .996, 1 or
    1.008, and a third of the rows fall on the other side of GSPO's clips at .997 and 1.004. FP64 stays FP64, and what is
    FP64 beside FP32 log-probs promotes nothing."""
    first, second, shift, advantages = noise(4, 64, 64).float()
    coarse = -first.abs().bfloat16()
    behaviour = coarse.float() + 0.005 * shift[:, :1] + 0.003 * second
    rest = behaviour, behaviour, advantages[:, 0]
    mask = torch.ones(64, 64)
    expected = run(name, coarse.float(), *rest, mask)
    result = run(name, coarse, *rest[:2], rest[2].double(), mask.bool())
    assert result.token_loss.dtype == torch.float32
    assert torch.equal(result.token_loss, expected.token_loss)
    assert floats(result.metrics) == floats(expected.metrics)
    assert result.metrics["ratio_sum"].dtype == F64  # so that sums of many tokens add up
    assert result.grad.dtype == torch.bfloat16
    assert torch.equal(result.grad, expected.grad.bfloat16())
    if name == "gspo":
        assert 8 <= result.grad.any(1).sum() <= 56  # clips act
    assert run(name, coarse.double(), *rest, mask).token_loss.dtype == F64


@pytest.mark.parametrize("name", ["cispo", "dapo", "grpo", "tis"])
def test_advantages_per_token(name):
    """Given for each token they act as in rows of one token each, so that any packing will do (for GSPO see above)."""
    *logprobs, _, mask = batch(spread=0.3)
    advantages = noise(6, 5, seed=9)
    result = run(name, *logprobs, advantages, mask)
    expected = run(name, *(x.reshape(-1, 1) for x in logprobs), advantages.flatten(), mask.reshape(-1, 1))
    assert torch.equal(result.token_loss.reshape(-1, 1), expected.token_loss)
    assert torch.equal(result.grad.reshape(-1, 1), expected.grad)
    assert floats(result.metrics) == pytest.approx(floats(expected.metrics))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_nothing_is_capped_exactly_at_its_bound(advantage):
    """rho = 1 = eps_max = 1 + 0 = 1 - 0; A = 0 has no sign."""
    metrics = run_ratios("cispo", [1.0], advantage, eps_max=1.0).metrics
    assert capped(metrics) == (0, 0)
    assert metrics["tokens_positive"] == (advantage > 0)
    assert metrics["tokens_negative"] == (advantage < 0)
    for name in ("dapo", "gspo", "tis"):
        assert capped(run_ratios(name, [1.0], advantage, eps_low=0.0, eps_high=0.0).metrics) == (0, 0)
    assert run_ratios("tis", [1.0], advantage, cap=1.0).metrics["tis_capped"] == 0


@each_loss
def test_losses_and_merge_never_wait_for_the_device(name):
    """Tensors on the `meta` device have no values: any `.item()`, `float()` or `if tensor` would raise. The mask is bool:
    others are looked at, whether they are labels."""
    *inputs, mask = batch()
    metrics = run(name, *(x.to("meta") for x in (*inputs, mask.bool()))).metrics
    merged = merge_metrics([metrics, metrics])
    assert {value.device.type for value in merged.values()} == {"meta"}


@each_loss
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_microbatch_still_runs_backward(name, shape):
    zeros = torch.zeros(shape, dtype=F64)
    token_loss, metrics, grad = run(name, zeros, zeros, zeros, torch.ones(shape[0]), zeros)
    token_weights = aggregation_weights(zeros, torch.zeros(shape[0]))
    assert (token_weights * token_loss).sum() == 0
    assert grad.shape == shape
    assert not grad.any()
    assert not any(summarize_metrics(metrics).values())
    full = run(name, *batch()).metrics
    assert summarize_metrics(merge_metrics([full, metrics])) == summarize_metrics(full)
    assert merge_metrics([full]) == full  # a batch in one microbatch, on one rank


@each_loss
@settings(max_examples=20)
@given(drawn=batches(), data=st.data())
def test_any_split_gives_the_same_gradient(name, drawn, data):
    """Rows in any order, on up to four microbatches or ranks of any size, empty ones too: gradients add up to that of the
    batch, and merged metrics (merged again, or one by one) are its own."""
    (logprobs, *others), ids, how = drawn
    n = len(ids)
    token_weights = aggregation_weights(others[-1].double(), ids, how, constant=7)

    def of(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        leaf = logprobs.clone().requires_grad_()
        token_loss, metrics = loss(name, leaf[rows], *(x[rows] for x in others))
        (grad,) = torch.autograd.grad((token_weights[rows] * token_loss).sum(), leaf)
        return grad, metrics

    grad, metrics = of(list(range(n)))
    order = data.draw(st.permutations(range(n)))
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    parts = [of([row for row in order if part_of[row] == part]) for part in range(4)]
    grads, (first, second, *rest) = zip(*parts, strict=True)
    torch.testing.assert_close(sum(grads), grad, atol=1e-12, rtol=1e-12)
    merged = merge_metrics([merge_metrics([first, second]), *rest])
    assert floats(merged) == pytest.approx(floats(metrics), rel=1e-12)
    assert summarize_metrics(merged) == pytest.approx(summarize_metrics(metrics), rel=1e-12)


def test_prompt_average_needs_whole_groups():
    """Half of a group in a batch of its own weighs as much as a whole group: 1/2 + 1/2 for it instead of 1/3 each."""
    mask = torch.ones(6, 1)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert aggregation_weights(mask, ids)[:2].sum() == pytest.approx(1 / 3)
    assert aggregation_weights(mask[:3], ids[:3])[2] == pytest.approx(1 / 2)  # row 2 alone: half of group 1


@pytest.mark.parametrize("how", ["batch", "prompt"])
def test_variance_in_two_passes(how):
    """FP32 rewards of 100000 and 100001: E[r^2] - E[r]^2 would be the difference of two 1e10, good to +-1000."""
    rewards = torch.tensor([100000.0, 100001.0, 100000.0, 100001.0])
    advantages = normalize_advantages(rewards, torch.tensor([0, 0, 1, 1]), how)
    assert advantages.tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-5)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32, torch.bfloat16, F64])
def test_dtype_of_advantages(kind):
    rewards = torch.tensor([1, 0], dtype=kind)
    advantages = normalize_advantages(rewards, torch.zeros(2), "prompt", eps=0.0)
    assert advantages.dtype == (F64 if kind == F64 else torch.float32)
    assert advantages.tolist() == [1, -1]


@pytest.mark.parametrize("how", ["batch", "prompt", "none"])
def test_a_nan_reward_is_not_hidden(how):
    """Not in a group of equal rewards either. Under `batch` other prompts lose theirs too, but for an exact 0."""
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    for second in (1.0, math.nan):
        rewards = torch.tensor([math.nan, second, 1, 0, 1, 1])
        advantages = normalize_advantages(rewards, ids, how)
        assert advantages[:2].isnan().all()
        assert advantages[2:4].isnan().all() == (how == "batch")
        assert advantages[4:].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.bfloat16, torch.float32, F64])
def test_dtype_of_weights(kind):
    weights = aggregation_weights(torch.ones(2, 3).to(kind), torch.zeros(2))
    assert weights.dtype == (F64 if kind == F64 else torch.float32)
    close(weights.double(), torch.full((2, 3), 1 / 6, dtype=F64))


def test_more_tokens_than_float32_can_count():
    """2^24 + 1 in one row: as a float32 it is 2^24."""
    n = 2**24 + 1
    weights = aggregation_weights(torch.ones(1, 1, dtype=torch.bool).expand(1, n), torch.zeros(1), "token")
    assert weights[0, 0] == torch.tensor(1 / n) != 2**-24


def test_kl_of_bfloat16_log_probs():
    """bfloat16 would round -1.001 to -1. The policy's own dtype decides that of the result."""
    penalty = kl_penalty(torch.tensor([[-1.0]]).bfloat16(), f64([-1.001]), torch.ones(1, 1), "k1")
    assert penalty.dtype == torch.float32
    assert float(penalty) == pytest.approx(0.001, rel=1e-3)


def test_advantages_of_no_rows():
    assert normalize_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_mask_and_range(estimator):
    """NaN outside the mask, and gaps of e^+-300, leave value and gradient finite; k3's gradient never pulls the policy
    away from the reference (a positive slope where pi_ref > pi)."""
    logprobs = torch.tensor([[-301.0, -1.0, math.nan, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -301.0, 0.0, math.inf]])
    mask = torch.tensor([[1, 1, 0, 0]])
    value = kl_penalty(logprobs, reference, mask, estimator)
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert grad.isfinite().all()
    assert not value[0, 2:].any()
    assert not grad[0, 2:].any()
    if estimator == "k3":
        assert grad[0, 0] <= 0
        assert float(grad[0, 1]) == pytest.approx(1.0)
    inside = kl_penalty(reference, logprobs.detach(), torch.ones(1, 4), estimator)
    assert inside[0, 2].isnan()  # not hidden


def test_k3_of_a_small_gap_is_not_rounding():
    """FP32: a gap of 1e-4 is (1e-4)^2 / 2 = 5e-9."""
    zero = torch.zeros(1, 1)
    small = kl_penalty(zero - 1e-4, zero, zero + 1)
    assert float(small) == pytest.approx(5e-9, rel=1e-2)


MASK = torch.ones(2, 3)
IDS = torch.tensor([0, 1])


@each_loss
@pytest.mark.parametrize(("i", "bad"), [(0, 3), (1, (2, 1)), (3, (1, 3)), (3, (3, 2)), (3, 3), (4, 2)])
def test_inputs_of_other_shapes_are_refused(name, i, bad):
    inputs = [MASK, MASK, MASK, IDS, MASK]  # as of `batch`
    inputs[i] = torch.zeros(bad)
    with pytest.raises(ValueError, match="expected log-probs"):
        loss(name, *inputs)
    with pytest.raises(ValueError, match="expected log-probs"):  # TIS's old log-probs
        loss("tis", MASK, MASK, MASK[:1], IDS, MASK)


@pytest.mark.parametrize(
    ("words", "function", "arguments"),
    [
        ("expected log-probs", LOSSES["cispo"], [IDS, IDS, IDS, IDS]),
        ("at least one dict of metrics, and the same keys", merge_metrics, [[]]),
        ("and the same keys in each", merge_metrics, [[{"tokens": IDS[0]}, {"rows": IDS[0]}]]),
        ("sample, prompt, token, constant", aggregation_weights, [MASK, IDS, "mean"]),
        ("constant > 0", aggregation_weights, [MASK, IDS, "constant"]),
        ("constant > 0", aggregation_weights, [MASK, IDS, "constant", 0]),
        ("constant > 0", aggregation_weights, [MASK, IDS, "constant", math.nan]),
        ("must be", aggregation_weights, [MASK, IDS[:1]]),
        ("must be", aggregation_weights, [IDS, IDS]),
        ("batch, prompt, none", normalize_advantages, [IDS, IDS, "group"]),
        ("must be", normalize_advantages, [MASK[0], IDS]),
        ("must be", normalize_advantages, [MASK, MASK]),
        ("k1, k2, k3", kl_penalty, [MASK, MASK, MASK, "k4"]),
        ("one shape", kl_penalty, [MASK, MASK[0], MASK]),
    ],
)
def test_refused_arguments(words, function, arguments):
    with pytest.raises(ValueError, match=words):
        function(*arguments)
