"""losses.py against hand-worked numbers, exact expectations over enumerated actions, autograd and brute-force loops."""

import inspect
import itertools
import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses import LOSSES, aggregation_weights, kl_penalty, merge_metrics, normalize_advantages, summarize_metrics

NAMES, AVERAGES = list(LOSSES), ["sample", "prompt", "token", "constant"]
F64 = torch.float64


def f64(*values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def close(got: Tensor, wanted: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, wanted, atol=atol, rtol=0)


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def capped(metrics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return metrics["capped_positive"], metrics["capped_negative"]


def batch(rows: int = 6, length: int = 5, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, ...]:
    """Random (logprobs, behaviour, old, advantages, mask) in FP64; rows of unequal length, with holes in the mask."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, length, generator=g, dtype=F64) * 3
    behaviour = logprobs + spread * torch.randn(rows, length, generator=g, dtype=F64)
    old = logprobs + 0.3 * torch.randn(rows, length, generator=g, dtype=F64)
    advantages = torch.randn(rows, generator=g, dtype=F64)
    mask = (torch.rand(rows, length, generator=g) < 0.6).long()
    mask[:, 0] = 1
    return logprobs, behaviour, old, advantages, mask


@st.composite
def batches(draw):
    """(`batch` of 1 to 7 rows whose mask may leave rows out, group ids, an average's name)."""
    rows, length = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    *inputs, mask = batch(rows, length, draw(st.integers(0, 99)), draw(st.sampled_from([0.1, 1.0, 30.0])))
    mask *= torch.tensor(draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)))[:, None]
    ids = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    return (*inputs, mask), ids, draw(st.sampled_from(AVERAGES))


def loss(name: str, logprobs: Tensor, behaviour: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options):
    """(token_loss, metrics); only TIS takes the old log-probs."""
    options |= {"old_logprobs": old} if name == "tis" else {}
    return LOSSES[name](logprobs, behaviour, advantages, mask, **options)


def run(name: str, logprobs: Tensor, *inputs: Tensor, **clips):
    """(token_loss, metrics, gradient of the summed loss with respect to the log-probs)."""
    leaf = logprobs.clone().requires_grad_()
    token_loss, metrics = loss(name, leaf, *inputs, **clips)
    return token_loss.detach(), metrics, torch.autograd.grad(token_loss.sum(), leaf)[0]


def run_ratios(name: str, rho: list[float], advantage: float | list[float] = 1.0, **clips):
    """`run` on one row whose tokens have the ratios `rho`, and one advantage for all or one for each."""
    behaviour, ones = torch.full((1, len(rho)), -2.0, dtype=F64), torch.ones(1, len(rho), dtype=F64)
    return run(name, behaviour + f64(rho).log(), behaviour, behaviour, ones * torch.tensor(advantage), ones, **clips)


def test_cispo_by_hand():
    """Row 1, A = 1, pi_gen = (.1, .05), pi = (.2, .5): rho = 2 and 10, capped at 5.
    Row 2, A = -2, pi_gen = .4, pi = .2: rho = .5, no lower cap; its second token is not trained.
    loss = -w A log pi:  -2 ln .2 = 3.218876,  -5 ln .5 = 3.465736,  +1 * ln .2 = -1.609438.
    gradient = -w A: -2, -5, +1."""
    logprobs, behaviour = f64([0.2, 0.5], [0.2, 0.9]).log(), f64([0.1, 0.05], [0.4, 0.1]).log()
    inputs = behaviour, behaviour, f64(1, -2), torch.tensor([[1, 1], [1, 0]])
    token_loss, metrics, grad = run("cispo", logprobs, *inputs)
    close(token_loss, f64([3.218876, 3.465736], [-1.609438, 0]))
    close(grad, f64([-2, -5], [1, 0]))
    # before truncation: 2 + 10 + .5 = 12.5;  4 + 100 + .25 = 104.25;  ess = 12.5^2 / (3 * 104.25) = .4996003
    wanted = {"tokens": 3, "ratio_sum": 12.5, "ratio_sq_sum": 104.25, "ratio_max": 10, "tokens_positive": 2}
    wanted |= {"tokens_negative": 1, "capped_positive": 1, "capped_negative": 0}
    wanted |= {"log_ratio_sq_sum": 6.262804}  # ln(2)^2 + ln(10)^2 + ln(.5)^2 = .480453 + 5.301898 + .480453
    assert floats(metrics) == pytest.approx(wanted)
    wanted = {"ratio_mean": 12.5 / 3, "ratio_max": 10, "log_ratio_rms": 1.444854, "ess": 0.4996003}
    assert summarize_metrics(metrics) == pytest.approx(wanted | {"capped_positive": 0.5, "capped_negative": 0})


def test_eps_max_is_an_absolute_cap_without_a_lower_clamp():
    """rho = 5.5 is weighted 5 and counts as capped (a cap of 1 + 5 would do neither); rho = .01 is weighted .01."""
    _, metrics, grad = run_ratios("cispo", [5.5, 0.01, 4.9])
    close(grad, -f64([5.0, 0.01, 4.9]))
    assert capped(metrics) == (1, 0)
    close(run_ratios("cispo", [5.5, 0.01, 4.9], eps_max=3.0)[2], -f64([3.0, 0.01, 3.0]))


def test_dispo_by_hand():
    """Right answers keep weights in [.8, 1.28], wrong ones in [0, 5]; given bounds are .4, 1.5 and .7, 3. The gradient
    stays outside of them, -weight * A, and flows through log pi alone: loss -w A ln(pi), pi = .1 e^-2 rho."""
    rho = [0.1, 0.9, 1.2, 2.0, 6.0]
    own = {"eps_low": 0.6, "eps_high": 0.5, "eps_low_wrong": 0.3, "eps_high_wrong": 2.0}
    for a, bounds, weights, counts in [
        (2.0, {}, [0.8, 0.9, 1.2, 1.28, 1.28], (3, 0)), (-0.5, {}, [0.1, 0.9, 1.2, 2.0, 5.0], (0, 1)),
        (2.0, own, [0.4, 0.9, 1.2, 1.5, 1.5], (3, 0)), (-0.5, own, [0.7, 0.9, 1.2, 2.0, 3.0], (0, 2)),
    ]:  # fmt: skip
        token_loss, metrics, grad = run_ratios("dispo", rho, a, **bounds)
        close(grad, -a * f64(weights))
        close(token_loss, -a * f64(weights) * (f64(rho).log() - 2))
        assert capped(metrics) == counts


@pytest.mark.parametrize("name", ["dapo", "tis", "gspo"])
def test_clip_quadrants(name):
    """eps_low = .4, eps_high = .5, A = +-1/2, gradient = slope * A. grpo has one eps for both sides: see below."""
    for rho, sign, loss_over_a, slope in [
        (2.0, 1, -1.5, 0.0),  # above, A > 0: held at 1 + eps_high
        (0.1, 1, -0.1, -0.1),  # below, A > 0: free to grow back
        (2.0, -1, -2.0, -2.0),  # above, A < 0: free to shrink back
        (0.1, -1, -0.6, 0.0),  # below, A < 0: held at 1 - eps_low
        (1.45, 1, -1.45, -1.45),  # inside above; eps_low and eps_high swapped would clip here
        (0.55, -1, -0.6, 0.0),  # past 1 - eps_low = .6; swapped, with 1 - .5 = .5, would not clip here
    ]:
        token_loss, metrics, grad = run_ratios(name, [rho], 0.5 * sign, eps_low=0.4, eps_high=0.5)
        assert (float(token_loss), float(grad)) == pytest.approx((loss_over_a * 0.5 * sign, slope * 0.5 * sign))
        assert capped(metrics) == ((0, 0) if slope else (1, 0) if sign > 0 else (0, 1))


def test_default_clips():
    """DAPO .2/.26 and GSPO 3e-3/4e-3 as ScaleRL ran them, GRPO .2: a hair inside is free, a hair outside is clipped."""
    for name, low, high in ("dapo", 0.2, 0.26), ("gspo", 3e-3, 4e-3), ("grpo", 0.2, 0.2), ("tis", 0.2, 0.2):
        for (sign, bound), side in itertools.product([(1, 1 + high), (-1, 1 - low)], (-1, 1)):
            grad = float(run_ratios(name, [bound + 1e-5 * side], sign)[2])
            assert (grad == 0) == (side == sign), (name, sign, side)


def test_gspo_with_advantages_per_token_is_gspo_token():
    """rho = 1.10 and .88, so s = sqrt(.968) = .9838699, inside both clips of .04; A = 2 and -3. Loss and gradient of each
    token are -s A_t. A third token, rho = 1.2 and A = 0, makes s = (1.1616)^(1/3) = 1.0512, above the clip: it holds
    the token with A = 2 and not the one with A = -3, and the third does not move."""
    clips = {"eps_low": 0.04, "eps_high": 0.04}
    token_loss, _, grad = run_ratios("gspo", [1.10, 0.88], [2, -3], **clips)
    close(token_loss, grad)
    close(grad, f64([-2 * 0.9838699, 3 * 0.9838699]))
    _, metrics, grad = run_ratios("gspo", [1.10, 0.88, 1.2], [2, -3, 0], **clips)
    close(grad, f64([0.0, 3 * 1.0512, 0.0]), atol=1e-3)
    assert capped(metrics) == (1, 0)


def test_tis_by_hand():
    """pi_gen = .1, pi_old = .3, pi = .33, A = 2: min(.3/.1, 2) = 2 and r = 1.1, so loss = -2 * 1.1 * 2 = -4.4 and the
    gradient is the same. Second token: pi_old = .15, factor 1.5, r = 1.1: -3.3. Against pi_gen both would be clipped.
    """
    logprobs, old, behaviour = f64([0.33, 0.165]).log(), f64([0.30, 0.15]).log(), f64([0.1, 0.1]).log()
    token_loss, metrics, grad = run("tis", logprobs, behaviour, old, f64(2), torch.ones(1, 2))
    close(token_loss, f64([-4.4, -3.3]))
    close(grad, f64([-4.4, -3.3]))
    summary = summarize_metrics(metrics)
    assert summary["tis_capped"] == 0.5 and summary["capped_positive"] == 0
    assert summary["ratio_max"] == pytest.approx(3.3)  # pi / pi_gen, as in every loss


def test_aggregation_by_hand():
    """Prompt 7: rows of 1 and 3 tokens; prompt 3: one row of 2; a fourth row, alone in prompt 9, has none.
    sample 1/(|y| * 3 rows) = 1/3, 1/9, 1/6 · prompt 1/(4 * 2 prompts) = 1/8 and 1/(2 * 2) = 1/4 · token 1/6 ·
    constant 10: 1/(10 * 3) = 1/30."""
    mask, ids = f64([1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]), torch.tensor([7, 7, 3, 9])
    rows = [1 / 3, 1 / 9, 1 / 6, 0], [1 / 8, 1 / 8, 1 / 4, 0], [1 / 6] * 4, [1 / 30] * 4
    for how, of_rows in zip(AVERAGES, rows, strict=True):
        close(aggregation_weights(mask, ids, how, constant=10), mask * f64(*of_rows)[:, None])
    assert torch.equal(aggregation_weights(mask, ids), aggregation_weights(mask, ids, "prompt"))
    # a divisor below 1 is a divisor too: 1 / (.25 * 3)
    assert float(aggregation_weights(mask, ids, "constant", constant=0.25)[0, 0]) == pytest.approx(4 / 3)
    # the docstring's example: rows of 10 and 100 tokens in one group, of 50 and 50 in another
    mask, ids = (torch.arange(100) < torch.tensor([[10], [100], [50], [50]])).double(), torch.tensor([0, 0, 1, 1])
    for how, tokens in {"sample": (40, 400, 200, 200), "prompt": (220, 220, 200, 200), "token": (210,) * 4}.items():
        close(aggregation_weights(mask, ids, how), mask / f64(*tokens)[:, None])
    for kind, wanted in (torch.bool, torch.float32), (torch.bfloat16, torch.float32), (F64, F64):
        assert aggregation_weights(mask.to(kind), ids).dtype == wanted


def test_advantages_by_hand():
    """Prompt 5: rewards 1, -1, -1, -1, mean -.5, centered 1.5, -.5, -.5, -.5. Prompt 2: 12, 10, centered 1, -1.
    batch: variance (2.25 + 3 * .25 + 2) / 6 = 5/6, std .9128709 (the raw rewards' std would be 5.6);
    prompt: stds sqrt(3/4) = .8660254 and 1. With ddof 1: batch sqrt(5/5) = 1; prompt sqrt(3/3) = 1 and sqrt(2)."""
    rewards, ids = f64(1, 12, -1, -1, 10, -1), torch.tensor([5, 2, 5, 5, 2, 5])
    centered, own = f64(1.5, 1, -0.5, -0.5, -1, -0.5), f64(0.8660254, 1, 0.8660254, 0.8660254, 1, 0.8660254)
    own_1 = f64(1, math.sqrt(2), 1, 1, math.sqrt(2), 1)
    cases = [("none", 0, 1), ("batch", 0, 0.9128709), ("batch", 1, 1), ("prompt", 0, own), ("prompt", 1, own_1)]
    for how, ddof, std in cases:
        close(normalize_advantages(rewards, ids, how, eps=0.0, ddof=ddof), centered / std)
    # eps is added to the std, and `none` divides by nothing
    for how, std in ("batch", 0.9128709 + 1), ("prompt", own + 1), ("none", 1):
        close(normalize_advantages(rewards, ids, how, eps=1.0), centered / std)
    # by default `batch`, population std, and eps 1e-6: the std of these is .913e-6
    close(normalize_advantages(rewards * 1e-6, ids), centered / (0.9128709 + 1))


def test_maxrl_by_hand():
    """Rewards 1, 0, 0, 0: the pass rate is 1/4, so A = (1 - 1/4) / (1/4) = 3 and -1; three of four right: 1/3 and -1. With
    -1 for wrong the same, and shaped 1, .5, 0, -1 has a mean of .125, 1.125 above the lowest. eps is added to it."""
    ids, one = torch.tensor([4, 9, 4, 9, 4, 9, 4, 9]), torch.zeros(4, dtype=torch.long)
    wanted = f64(3, 1 / 3, -1, 1 / 3, -1, 1 / 3, -1, -1)
    for wrong in (0, -1):
        rewards = f64(1, 1, wrong, 1, wrong, 1, wrong, wrong)
        close(normalize_advantages(rewards, ids, "maxrl", eps=0.0), wanted)
        close(normalize_advantages(rewards.flip(0), ids.flip(0), "maxrl"), wanted.flip(0), atol=1e-4)
    close(normalize_advantages(f64(1, 0.5, 0, -1), one, "maxrl", eps=0.0), f64(0.875, 0.375, -0.125, -1.125) / 1.125)
    close(normalize_advantages(f64(1, 0, 0, 0), one, "maxrl", eps=0.25), f64(1.5, -0.5, -0.5, -0.5))
    assert not normalize_advantages(f64(1, 1, 1, 1), one, "maxrl", eps=0.0).any()


def test_kl_by_hand():
    """pi = .5, pi_ref = .25, r = .5: k1 = ln 2, k2 = (ln 2)^2 / 2 = .2402265, k3 = .5 - 1 + ln 2 = .1931472. Their slopes
    in log pi are 1, -log r = ln 2 and 1 - r = .5. The reference gets no gradient. bfloat16 would round -1.001 to -1."""
    logprobs, reference = (f64([p, q]).log().requires_grad_() for p, q in ((0.5, 0.5), (0.25, 0.9)))
    for name, value, slope in [(("k1",), 0.6931472, 1), (("k2",), 0.2402265, 0.6931472), ((), 0.1931472, 0.5)]:
        penalty = kl_penalty(logprobs, reference, torch.tensor([[1, 0]]), *name)  # k3 is the default
        close(penalty, f64([value, 0.0]), atol=1e-7)
        grads = torch.autograd.grad(penalty.sum(), [logprobs, reference], allow_unused=True)
        close(grads[0], f64([slope, 0.0]), atol=1e-7)
        assert grads[1] is None
    got = kl_penalty(torch.tensor([[-1.0]]).bfloat16(), f64([-1.001]), torch.ones(1, 1), "k1")
    assert got.dtype == torch.float32 and float(got) == pytest.approx(0.001, rel=1e-3)  # the policy's own dtype decides


@pytest.mark.parametrize("name", NAMES)
def test_expected_gradient_is_the_policy_gradient(name):
    """Oracle: enumerate all 5 actions sampled by mu. With limits out of reach, sum_y mu(y) * grad loss(y) must be
    -grad of E_{y~pi}[A(y)] = sum_y pi(y) A(y), computed by autograd on the logits: off-policy sampling is undone."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=g, dtype=F64, requires_grad=True)
    mu, advantages = torch.randn(5, generator=g, dtype=F64).log_softmax(0), torch.randn(5, generator=g, dtype=F64)
    old = (logits.detach() + 0.2 * torch.randn(5, generator=g, dtype=F64)).log_softmax(0)
    (expected,) = torch.autograd.grad(-(logits.softmax(0) * advantages).sum(), logits)
    options = inspect.signature(LOSSES[name]).parameters.values()
    wide = {option.name: 1e6 for option in options if isinstance(option.default, float)}
    columns = (x[:, None] for x in (logits.log_softmax(0), mu, old))  # five rows of one token: row y is the action y
    token_loss, _ = loss(name, *columns, advantages, torch.ones(5, 1), **wide)
    torch.testing.assert_close(torch.autograd.grad((mu.exp()[:, None] * token_loss).sum(), logits)[0], expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_advantage_is_a_factor_whose_sign_alone_decides(name):
    """A hundredth of all advantages, most of them then below .01: a hundredth of the loss and of the gradient."""
    logprobs, behaviour, old, advantages, mask = batch()
    token_loss, _, grad = run(name, logprobs, behaviour, old, advantages, mask)
    small_loss, _, small_grad = run(name, logprobs, behaviour, old, advantages / 100, mask)
    close(small_loss * 100, token_loss)
    close(small_grad * 100, grad)


def test_no_second_correction_and_ratio_against_the_generator():
    """Weight = pi_train / pi_gen itself, whatever the trainer's old log-probs; they cannot even be given."""
    logprobs, behaviour, old, advantages, mask = batch(spread=0.3)
    for name in ("cispo", "dispo", "gspo", "dapo", "grpo"):
        with pytest.raises(TypeError):
            LOSSES[name](logprobs, behaviour, advantages, mask, old_logprobs=old)
    grad = run("cispo", logprobs, behaviour, old, advantages, mask)[2]
    close(grad, -(logprobs.exp() / behaviour.exp()) * advantages[:, None] * mask)


def test_gspo_against_the_papers_own_expression():
    """Oracle: 1/N sum_i min(s_i A_i, clip(s_i) A_i), s_i = (prod pi / prod mu)^(1/|y_i|), written over Python lists of
    each row's trained tokens with products of probabilities; gradient by autograd. Some rows must be clipped."""
    logprobs, behaviour, old, advantages, mask = batch(rows=8, seed=0, spread=0.3)
    leaf = logprobs.clone().requires_grad_()
    total, clipped = 0.0, 0
    for i in range(8):
        tokens = [t for t in range(5) if mask[i, t]]
        product = math.prod(leaf[i, t].exp() / float(behaviour[i, t].exp()) for t in tokens)
        s, a = product ** (1 / len(tokens)), float(advantages[i])
        free, limited = float(s.detach()) * a, min(max(float(s.detach()), 0.95), 1.1) * a
        clipped += limited < free
        total = total - (s * a if free <= limited else leaf[i, 0] * 0 + limited)
    (expected,) = torch.autograd.grad(total / 8, leaf)
    assert 2 <= clipped <= 6
    token_loss, metrics = loss("gspo", leaf, behaviour, old, advantages, mask, eps_low=0.05, eps_high=0.1)
    mean = (aggregation_weights(mask.double(), torch.arange(8), "sample") * token_loss).sum()
    torch.testing.assert_close(mean, total / 8)
    torch.testing.assert_close(torch.autograd.grad(mean, leaf)[0], expected)
    close(token_loss, token_loss[:, :1] * mask, atol=1e-12)  # the term is repeated on the sequence's tokens
    assert sum(capped(metrics)) == sum(int(mask[i].sum()) for i in range(8) if not expected[i].any())


def test_tis_with_one_update_a_batch_is_cispo():
    """pi_old = pi: per token the gradient is that of CISPO with eps_max = cap to the bit, and no clip acts, however
    narrow (rho of e^+-3 here)."""
    logprobs, behaviour, _, advantages, mask = batch(spread=1.5)
    _, _, wanted = run("cispo", logprobs, behaviour, logprobs, advantages, mask, eps_max=2.0)
    for clips in ({}, {"eps_low": 1e-9, "eps_high": 1e-9}):
        _, metrics, grad = run("tis", logprobs, behaviour, logprobs, advantages, mask, **clips)
        assert torch.equal(grad, wanted) and capped(metrics) == (0, 0) and int(metrics["tis_capped"]) > 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", NAMES)  # drawn, some would hardly come
@settings(max_examples=20)
@given(drawn=batches(), data=st.data())
def test_nothing_outside_the_mask_counts(name, drawn, data):
    """Anything in any input outside the mask, NaN and infinities included: same loss, gradient, metrics, to the bit, and 0
    there. One advantage for each row does the same as an equal one for each token. The gradient flows through the
    log-probs alone, and no input is written to."""
    (*inputs, advantages, mask), ids, _ = drawn
    clean, junk = run(name, *inputs, advantages, mask), st.one_of(st.floats(), st.sampled_from([math.nan, math.inf]))
    dirty = [x.masked_fill(mask == 0, data.draw(junk)) for x in inputs]
    per_token = advantages[:, None].expand(mask.shape).masked_fill(mask == 0, data.draw(junk))
    advantages = advantages.masked_fill(~mask.any(1), data.draw(junk))
    given_ = [*dirty, advantages, per_token, mask]
    before = [x.clone() for x in given_]
    leaves = [x.requires_grad_() for x in given_[:-1]]
    with torch.autograd.detect_anomaly():  # no NaN on the way either: it would stop whoever debugs with this switch
        for a in (advantages, per_token):
            token_loss, metrics = loss(name, *dirty, a, mask)
            grad, *others = torch.autograd.grad(token_loss.sum(), leaves, allow_unused=True)
            assert torch.equal(token_loss, clean[0]) and torch.equal(grad, clean[2]) and others == [None] * 4
            assert floats(metrics) == floats(clean[1]) and not any(x.requires_grad for x in metrics.values())
            assert not token_loss[mask == 0].any() and not grad[mask == 0].any()
    aggregation_weights(mask, ids), kl_penalty(dirty[0], dirty[1], mask), normalize_advantages(advantages.detach(), ids)
    torch.testing.assert_close([x.detach() for x in given_], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_inside_the_mask_is_not_hidden(name):
    """A NaN in one log-prob or advantage comes out in its own row, never in other rows or padding, and in ratio_max."""
    for which in range(4):
        inputs = list(batch())
        inputs[which][(1, 0) if which < 3 else 1] = math.nan
        token_loss, metrics, _ = run(name, *inputs)
        if which != 2 or name == "tis":  # the old log-probs, which the other losses do not take
            assert token_loss[1, 0].isnan()
        assert token_loss[torch.arange(6) != 1].isfinite().all() and not token_loss[inputs[-1] == 0].any()
        if which < 2:
            assert math.isnan(summarize_metrics(merge_metrics([metrics, metrics]))["ratio_max"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_log_ratio_is_bounded_before_exp(name, gap):
    """FP32 exp(300) is inf: loss, gradient and effective sample size stay finite, and the bound is e^20 = 4.85e8."""
    behaviour, logprobs, ones = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0), torch.ones(2, 3)
    behaviour[:, 0] -= gap
    for old in (behaviour, logprobs):
        token_loss, metrics, grad = run(name, logprobs, behaviour, old, torch.tensor([1.0, -1.0]), ones)
        assert token_loss.isfinite().all() and grad.isfinite().all()
        summary = summarize_metrics(metrics)
        assert all(math.isfinite(v) for v in summary.values()) and summary["ess"] > 0
        assert summary["ratio_max"] == pytest.approx(math.exp(20) if gap > 0 else 1.0)
    token = [x[:1, :1] for x in (logprobs, behaviour, logprobs)]  # bounded below, too: equal ratios are no 0 / 0
    assert summarize_metrics(run(name, *token, torch.ones(1), torch.ones(1, 1))[1])["ess"] == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_log_probs_are_raised_before_the_ratio(name):
    """Loss, gradient and clip decisions are those of the same values in FP32: in bfloat16 ratios near 1 are .996, 1 or
    1.008, and a third of the rows fall on the other side of GSPO's clips at .997 and 1.004. FP64 stays FP64, and what is
    FP64 beside FP32 log-probs promotes nothing."""
    g = torch.Generator().manual_seed(0)
    coarse, advantages, mask = -2 * torch.rand(64, 64, generator=g), torch.randn(64, generator=g), torch.ones(64, 64)
    coarse, shift = coarse.bfloat16(), torch.empty(64, 1).uniform_(-0.01, 0.01, generator=g)
    behaviour = coarse.float() + shift + 0.003 * torch.randn(64, 64, generator=g)
    wanted = run(name, coarse.float(), behaviour, behaviour, advantages, mask)
    got = run(name, coarse, behaviour, behaviour, advantages.double(), mask.bool())
    assert got[0].dtype == torch.float32 and torch.equal(got[0], wanted[0]) and floats(got[1]) == floats(wanted[1])
    assert got[2].dtype == torch.bfloat16 and torch.equal(got[2], wanted[2].bfloat16())
    if name == "gspo":
        assert torch.equal(got[2].any(1), wanted[2].any(1)) and 8 <= int((~got[2].any(1)).sum()) <= 56  # clips act
    assert run(name, coarse.double(), behaviour, behaviour, advantages, mask)[0].dtype == F64


@pytest.mark.parametrize("name", ["cispo", "dispo", "dapo", "grpo", "tis"])
def test_advantages_per_token(name):
    """Given for each token they act as in rows of one token each, so that any packing will do (for GSPO see above)."""
    logprobs, behaviour, old, _, mask = batch(spread=0.3)
    each = torch.randn(6, 5, generator=torch.Generator().manual_seed(9), dtype=F64)
    got = run(name, logprobs, behaviour, old, each, mask)
    wanted = run(name, *(x.reshape(-1, 1) for x in (logprobs, behaviour, old)), each.flatten(), mask.reshape(-1, 1))
    assert torch.equal(got[0].reshape(-1, 1), wanted[0]) and torch.equal(got[2].reshape(-1, 1), wanted[2])
    assert floats(got[1]) == pytest.approx(floats(wanted[1]))


def test_metrics_are_taken_before_truncation_for_both_signs():
    """rho = 10 with A < 0: CISPO caps it too; a clip never binds there. rho = .5, A < 0: the clip binds, CISPO not."""
    for name in ("cispo", "dapo", "grpo", "tis"):
        _, m, grad = run_ratios(name, [10.0, 0.5], -1.0)
        assert (float(m["ratio_max"]), float(m["ratio_sum"])) == pytest.approx((10.0, 10.5)) and capped(m) == (0, 1)
        assert summarize_metrics(m)["capped_negative"] == 0.5
        assert float(grad[0, 0]) == pytest.approx(5.0 if name == "cispo" else 10.0)
    logprobs, zeros = f64([0.5, 1.0, 0.5]).log(), f64([0, 0, 0])  # rho = .5 inside the mask, 1 outside
    m = floats(run("cispo", logprobs, zeros, zeros, f64(1), torch.tensor([[1, 0, 1]]))[1])
    assert (m["ratio_max"], m["tokens"], m["ratio_sq_sum"]) == pytest.approx((0.5, 2, 0.5))


def test_nothing_is_capped_exactly_at_its_bound():
    """rho = 1 = eps_max = 1 + 0 = 1 - 0; A = 0 has no sign."""
    for a in (1.0, -1.0, 0.0):
        m = run_ratios("cispo", [1.0], a, eps_max=1.0)[1]
        assert capped(m) == (0, 0) and (m["tokens_positive"], m["tokens_negative"]) == (a > 0, a < 0)
        for name in ("dapo", "gspo", "tis"):
            assert capped(run_ratios(name, [1.0], a, eps_low=0.0, eps_high=0.0)[1]) == (0, 0)
    assert int(run_ratios("tis", [1.0], cap=1.0)[1]["tis_capped"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_merge_never_wait_for_the_device(name):
    """Tensors on the `meta` device have no values: any `.item()`, `float()` or `if tensor` would raise."""
    _, metrics, _ = run(name, *(x.to("meta") for x in batch()))
    assert all(v.device.type == "meta" for v in merge_metrics([metrics, metrics]).values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_microbatch_still_runs_backward(name, shape):
    zeros = torch.zeros(shape, dtype=F64)
    token_loss, metrics, grad = run(name, zeros, zeros, zeros, torch.ones(shape[0], dtype=F64), zeros)
    token_weights = aggregation_weights(zeros, torch.zeros(shape[0], dtype=torch.long))
    assert float((token_weights * token_loss).sum()) == 0 and grad.shape == shape and not grad.any()
    assert not any(summarize_metrics(metrics).values())
    full = run(name, *batch())[1]
    assert summarize_metrics(merge_metrics([full, metrics])) == summarize_metrics(full)
    assert merge_metrics([full]) == full  # a batch in one microbatch, on one rank


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(drawn=batches(), data=st.data())
def test_any_split_gives_the_same_gradient(name, drawn, data):
    """Rows in any order, on up to four microbatches or ranks of any size, empty ones too: gradients add up to that of the
    batch, and merged metrics (merged again, or one by one) are its own."""
    (logprobs, *others), ids, how = drawn
    token_weights = aggregation_weights(others[-1].double(), ids, how, constant=7)

    def of(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        leaf = logprobs.clone().requires_grad_()
        token_loss, metrics = loss(name, leaf[rows], *(x[rows] for x in others))
        return torch.autograd.grad((token_weights[rows] * token_loss).sum(), leaf)[0], metrics

    whole, metrics = of(list(range(len(ids))))
    order = data.draw(st.permutations(range(len(ids))))
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    parts = [of([row for row in order if part_of[row] == part]) for part in range(4)]
    torch.testing.assert_close(sum(grad for grad, _ in parts), whole, atol=1e-12, rtol=1e-12)
    merged = merge_metrics([merge_metrics([m for _, m in parts[:2]]), parts[2][1], parts[3][1]])
    assert floats(merged) == pytest.approx(floats(metrics), rel=1e-12)
    assert summarize_metrics(merged) == pytest.approx(summarize_metrics(metrics), rel=1e-12)


@given(batches())
def test_dropped_rows_leave_the_denominators(drawn):
    """Oracle: means over Python's lists. A row or group without trained tokens is left out, and holes count nowhere."""
    (values, *_, mask), ids, how = drawn
    rows = [values[i][mask[i] == 1].tolist() for i in range(len(ids))]
    groups = [[x for i, row in enumerate(rows) if ids[i] == group for x in row] for group in range(4)]
    wanted = {"sample": [fmean(row) for row in rows if row], "prompt": [fmean(group) for group in groups if group]}
    wanted |= {"token": [x for row in rows for x in row], "constant": [sum(row) / 7 for row in rows if row]}
    token_weights = aggregation_weights(mask.double(), ids, how, constant=7)
    assert float((token_weights * values).sum()) == pytest.approx(fmean(wanted[how] or [0]))
    assert not token_weights[mask == 0].any()


def test_a_trainer_that_averages_needs_its_divisor_as_a_factor():
    """accelerate's own `accumulate` and `backward` over 3 microbatches of unequal size: the loss times 3 gives the
    gradient of the whole batch in one backward pass, the bare loss a third of it. (Ranks: see test_fp32_head.py.)"""
    from accelerate import Accelerator

    torch.manual_seed(0)
    features, actions, model = torch.randn(8, 5, 4), torch.randint(6, (8, 5, 1)), torch.nn.Linear(4, 6)
    _, noise, _, advantages, mask = (x.float() for x in batch(rows=8, spread=0.2))
    weights = aggregation_weights(mask, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]))

    def share(module: torch.nn.Module, rows: slice) -> Tensor:
        logprobs = module(features[rows]).log_softmax(-1).gather(2, actions[rows]).squeeze(2)  # (n, 5)
        return (weights[rows] * LOSSES["cispo"](logprobs, noise[rows], advantages[rows], mask[rows])[0]).sum()

    wanted = torch.autograd.grad(share(model, slice(None)), model.weight)[0]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    prepared = accelerator.prepare(model)
    for factor in (1, 3):
        model.zero_grad()
        for rows in (slice(0, 2), slice(2, 7), slice(7, 8)):
            with accelerator.accumulate(prepared):
                accelerator.backward(share(prepared, rows) * factor)
        torch.testing.assert_close(model.weight.grad, wanted * factor / 3)
    accelerator.gradient_accumulation_steps = 1  # accelerate keeps it for the whole process


def test_prompt_average_needs_whole_groups():
    """Half of a group in a batch of its own weighs as much as a whole group: 1/2 + 1/2 for it instead of 1/3 each."""
    mask, ids = torch.ones(6, 1, dtype=F64), torch.tensor([0, 0, 1, 1, 2, 2])
    assert aggregation_weights(mask, ids)[:2].sum() == pytest.approx(1 / 3)
    assert aggregation_weights(mask[:3], ids[:3])[2].sum() == pytest.approx(1 / 2)  # row 2 alone: half of group 1


@pytest.mark.parametrize("how", ["batch", "prompt"])
def test_variance_in_two_passes(how):
    """FP32 rewards of 100000 and 100001: E[r^2] - E[r]^2 would be the difference of two 1e10, good to +-1000."""
    rewards = torch.tensor([100000.0, 100001.0, 100000.0, 100001.0])
    got = normalize_advantages(rewards, torch.tensor([0, 0, 1, 1]), how)
    close(got, torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-5)


@pytest.mark.parametrize("how", ["batch", "prompt", "none"])
def test_equal_or_single_rewards_give_exactly_zero(how):
    """The FP32 means of seven .1 or -.3 are off by 7e-9 to 3e-8: a test of the std would keep them. A single row is 0,
    too. Negative rewards are below the 0 of an empty buffer."""
    for (value, n), eps in itertools.product([(0.1, 7), (1e-8, 11), (123456.7, 13), (-0.3, 7)], (0.0, 1e-6)):
        rewards, ids = torch.tensor([value] * n + [1.0, -1.0, 5.0]), torch.tensor([0] * n + [1, 1, 2])
        assert not normalize_advantages(rewards[:n], ids[:n], how, eps=eps).any()
        mixed = normalize_advantages(rewards, ids, how, eps=eps)
        assert not mixed[:n].any() and mixed[n + 2] == 0 and mixed[n] > 0 > mixed[n + 1]
        assert not any(normalize_advantages(rewards[:1], ids[:1], how, eps=eps, ddof=ddof) for ddof in (0, 1))


def test_equal_rewards_left_in_the_batch_change_the_step():
    """The factors in the docstring of `normalize_advantages`. Two of six groups of two have equal rewards, p = 1/3: left
    in the std, the others' advantages grow by 1 / sqrt(1 - p) = 1.22; left in the average, the step shrinks by 1 - p =
    .67; left in both, by sqrt(1 - p) = .82."""
    rewards, ids = f64(1, -1, 1, -1, -1, 1, 1, -1, 1, 1, -1, -1), torch.arange(6).repeat_interleave(2)
    mask, keep, p = torch.ones(12, 1, dtype=F64), ids < 4, 1 / 3
    of_all, of_kept = (normalize_advantages(rewards[x], ids[x], eps=0.0) for x in (slice(None), keep))
    every, kept = (aggregation_weights(mask[x], ids[x])[:, 0] for x in (slice(None), keep))
    right = of_kept * kept  # the step is proportional to each row's A * weight
    close(of_all[keep] * kept, right * (1 - p) ** -0.5)
    close(of_kept * every[keep], right * (1 - p))
    close(of_all[keep] * every[keep], right * (1 - p) ** 0.5)


def test_center_over_whole_groups():
    """Group 1, 1, -1 -> means 1/3. Dropping the first row before centering makes it 0: A = +-1, not 2/3 and -4/3.
    Unequal sizes after a drop are no error either (no reshape to (-1, G))."""
    rewards, ids = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0]), torch.tensor([0, 0, 0, 1, 1])
    close(normalize_advantages(rewards, ids, "none"), torch.tensor([2 / 3, 2 / 3, -4 / 3, 1, -1]))
    close(normalize_advantages(rewards[1:], ids[1:], "none"), torch.tensor([1.0, -1, 1, -1]))


def test_advantage_dtypes_and_nan():
    ids = torch.tensor([0, 0, 1, 1])
    for kind in (torch.int64, torch.bool, torch.float32, torch.bfloat16, F64):
        got = normalize_advantages(torch.tensor([1, 0, 1, 0]).to(kind), ids, "prompt", eps=0.0)
        assert got.dtype == (kind if kind == F64 else torch.float32) and got.tolist() == [1, -1, 1, -1]
    for how, second in itertools.product(("batch", "prompt", "none"), (1.0, math.nan)):
        # a NaN reward is not hidden, in a group of equal rewards neither
        assert normalize_advantages(torch.tensor([math.nan, second, 1, 0]), ids, how)[:2].isnan().all()
    hidden = normalize_advantages(torch.tensor([math.nan, 1.0, 1, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 2]), "batch")
    assert hidden[:4].isnan().all() and hidden[4:].tolist() == [0, 0]  # other prompts lose theirs too, but for exact 0
    assert normalize_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_mask_and_range(estimator):
    """NaN outside the mask, and gaps of e^+-300, leave value and gradient finite; k3's gradient never pulls the policy
    away from the reference (a positive slope where pi_ref > pi); FP32 k3 of a gap of 1e-4 is 5e-9, not rounding."""
    logprobs = torch.tensor([[-301.0, -1.0, math.nan, -1.0]], requires_grad=True)
    reference, mask = torch.tensor([[-1.0, -301.0, 0.0, math.inf]]), torch.tensor([[1, 1, 0, 0]])
    value = kl_penalty(logprobs, reference, mask, estimator)
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all() and grad.isfinite().all()
    assert not value[0, 2:].any() and not grad[0, 2:].any() and value.dtype == torch.float32
    if estimator == "k3":
        assert grad[0, 0] <= 0 and float(grad[0, 1]) == pytest.approx(1.0)
        small = kl_penalty(torch.tensor([[-1e-4]]), torch.zeros(1, 1), torch.ones(1, 1))
        assert float(small) == pytest.approx(5e-9, rel=1e-2)
    assert kl_penalty(reference, logprobs.detach(), mask.new_ones(1, 4), estimator)[0, 2].isnan()  # inside: not hidden


GOOD = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)]  # as of `batch`
MASK, IDS = GOOD[4], torch.tensor([0, 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("i", "bad"), [(0, 3), (1, (2, 1)), (3, (2, 1)), (3, (3, 2)), (3, 3), (4, 2)])
def test_inputs_of_other_shapes_are_refused(name, i, bad):
    with pytest.raises(ValueError, match="expected logprobs"):
        loss(name, *GOOD[:i], torch.zeros(bad), *GOOD[i + 1 :])


REFUSED = [
    ("expected logprobs", lambda: loss("tis", *GOOD[:2], torch.zeros(1, 3), *GOOD[3:])),
    ("at least one dict of metrics, and the same keys", lambda: merge_metrics([])),
    ("and the same keys in each", lambda: merge_metrics([{"tokens": IDS[0]}, {"rows": IDS[0]}])),
    ("sample, prompt, token, constant", lambda: aggregation_weights(MASK, IDS, "mean")),
    ("constant > 0", lambda: aggregation_weights(MASK, IDS, "constant")),
    ("constant > 0", lambda: aggregation_weights(MASK, IDS, "constant", constant=0)),
    ("constant > 0", lambda: aggregation_weights(MASK, IDS, "constant", constant=-1.0)),
    ("constant > 0", lambda: aggregation_weights(MASK, IDS, "constant", constant=math.nan)),
    ("must be", lambda: aggregation_weights(MASK, IDS[:1])),
    ("must be", lambda: aggregation_weights(MASK[0], IDS)),
    ("must be", lambda: aggregation_weights(MASK, MASK)),
    ("batch, prompt, none, maxrl", lambda: normalize_advantages(IDS, IDS, "group")),
    ("must be", lambda: normalize_advantages(MASK[0], IDS)),
    ("must be", lambda: normalize_advantages(MASK[:, :1], IDS)),
    ("must be", lambda: normalize_advantages(MASK, MASK)),
    ("k1, k2, k3", lambda: kl_penalty(MASK, MASK, MASK, "k4")),
    ("one shape", lambda: kl_penalty(MASK, MASK[0], MASK)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_what_is_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()
