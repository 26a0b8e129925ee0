"""masks.py against values by hand, brute-force loops, the limits 0 and infinity, and autograd through a loss."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses import LOSSES, cispo
from masks import MASKS

NAMES = list(MASKS)
PAIRS = ["icepop", "sequence", "geometric"]  # which have two limits
F64 = torch.float64


def f64(*values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def weights_of(name: str, pi, pi_gen, advantages, mask=None, **limits) -> tuple[list, tuple[int, int, int]]:
    """(weights as lists, (kept, masked_positive, masked_negative)) for probabilities (N, T)."""
    pi, pi_gen = f64(*pi), f64(*pi_gen)
    mask = torch.ones_like(pi) if mask is None else torch.tensor(mask)
    weights, metrics = MASKS[name](pi.log(), pi_gen.log(), f64(*advantages), mask, **limits)
    assert list(metrics) == ["kept", "masked_positive", "masked_negative"]
    return weights.tolist(), tuple(int(count) for count in metrics.values())


def limits(name: str, low: float, high: float) -> dict[str, float]:
    return {"low": low, "high": high} if name in PAIRS else {"high": high}


def row(name: str, rho, advantage: float, **limits) -> list[float]:
    """Weights of one row whose tokens have these ratios: pi_gen is .01 on each."""
    (weights,), _ = weights_of(name, [[0.01 * r for r in rho]], [[0.01] * len(rho)], [advantage], **limits)
    return weights


@st.composite
def batches(draw):
    """(log-probs, behaviour log-probs, advantages for each token, mask) of up to 4 x 4 tokens, with rows left out."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = math.prod(shape)

    def tensor(values, dtype=F64):
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype).view(shape)

    logprobs = tensor(st.floats(-6, -1e-3))
    behaviour = logprobs - tensor(st.sampled_from([0, 0.05, -0.05, 0.2, -0.2, 0.7, -0.7, 3, -3]))
    return logprobs, behaviour, tensor(st.sampled_from([-1.5, 0, 0.5])), tensor(st.booleans(), torch.bool)


# (mask, limits): weights of the two rows below, for A > 0 and for A < 0, as the published code of others computes them:
# verl 0.9.1 (rollout_corr_helper and core_algos), SkyRL 0.3.0 (dppo again), TRL 1.16.0 (deepseek).
PEERS = [
    ("icepop", {}, [[1, 0, 1, 1], [1, 0, 1, 1]], [[1, 0, 1, 1], [1, 0, 1, 1]]),
    ("sequence", {}, [[0] * 4, [1] * 4], [[0] * 4, [1] * 4]),
    ("geometric", {"low": 0.9, "high": 1.1}, [[0] * 4, [0] * 4], [[0] * 4, [0] * 4]),
    ("dppo", {}, [[0, 1, 1, 1], [1, 1, 1, 1]], [[1, 1, 1, 1], [0, 1, 1, 1]]),
    ("dppo_kl", {}, [[0, 1, 1, 1], [1, 0, 1, 1]], [[1, 1, 1, 1], [0, 1, 0, 1]]),
    ("deepseek", {}, [[1] * 4, [1] * 4], [[1] * 4, [1] * 4]),
    ("deepseek", {"high": 0.05}, [[1] * 4, [1] * 4], [[0] * 4, [1] * 4]),
]


@pytest.mark.parametrize("name, limits, positive, negative", PEERS)
def test_the_code_of_others_drops_the_same(name, limits, positive, negative):
    pi, pi_gen = [[0.85, 0.012, 0.34, 0.88], [0.42, 0.11, 0.25, 0.44]], [[0.6, 0.05, 0.3, 0.9], [0.7, 0.02, 0.4, 0.5]]
    assert weights_of(name, pi, pi_gen, [1, 1], **limits)[0] == positive
    assert weights_of(name, pi, pi_gen, [-1, -1], **limits)[0] == negative


@pytest.mark.parametrize(
    ("name", "rho", "positive", "negative", "zero"),
    [
        ("truncate", [1.9, 2.1, 4, 0.1], *[[1, 1 / 1.05, 0.5, 1]] * 3),
        ("icepop", [0.51, 0.49, 4.9, 5.1], *[[1, 0, 1, 0]] * 3),
        ("dppo", [0.01, 20.9, 21.1], [1, 1, 0], [1, 1, 1], [1, 1, 1]),  # by .209 and .211; nothing can fall by .2
        # (log rho)^2 is .04 for rho = e^.2: of that alone the mean is the limit. And 1 for e^+-1.
        ("m2po", [math.exp(0.1999), math.exp(1), math.exp(-1)], [1, 0, 1], [1, 1, 0], [1, 1, 1]),
    ],
)
def test_tokens_by_hand(name, rho, positive, negative, zero):
    """With the limits of the sources and pi_gen = .01."""
    for advantage, weights in (2.0, positive), (-0.5, negative), (0.0, zero):
        assert row(name, rho, advantage) == pytest.approx(weights)


def test_rows_by_hand():
    """Products of two ratios: 1.9 and 2.1; .51 and .49; and of 1.9, 1.05 and 1/1.05. Geometric means: exp(.009) and
    exp(.011) by log-ratios of .029 and -.011, of .033 and -.011."""
    for rho, kept in [([3.8, 0.5], 1), ([4.2, 0.5], 0), ([0.1, 5.1], 1), ([0.1, 4.9], 0), ([1.9, 1.05, 1 / 1.05], 1)]:
        for a in (1.0, -1.0):
            assert row("sequence", rho, a) == [kept] * len(rho)
    for mean, kept in [(0.0099, 1), (0.0101, 0), (-0.0100, 1), (-0.0102, 0)]:  # log 1.01 = .00995, log .99 = -.01005
        assert row("geometric", [math.exp(mean + 0.02), math.exp(mean - 0.02)], 1.0) == [kept, kept]


def test_deepseek_by_hand():
    """Mean of log pi_gen - log pi over three trained tokens: (2 - .2 - .27) / 3 = .51 and (2 - .2 - .33) / 3 = .49. Only
    the first goes, and only where A < 0. The fourth token does not train; counted, it would make both means smaller."""
    drift = [[2.0, -0.2, -0.27, -9.0], [2.0, -0.2, -0.33, -9.0]]
    pi = [[0.01 * math.exp(-d) for d in of_row] for of_row in drift]
    mask, same = [[1, 1, 1, 0]] * 2, [[0.01] * 4] * 2
    assert weights_of("deepseek", pi, same, [-1.0, -1.0], mask) == ([[0] * 4, [1, 1, 1, 0]], (3, 0, 3))
    assert weights_of("deepseek", pi, same, [1.0, 0.0], mask) == ([[1, 1, 1, 0]] * 2, (6, 0, 0))
    # advantages for each token: the row has drifted, and those with A < 0 go
    assert weights_of("deepseek", pi[:1], same[:1], [[-1.0, 1.0, 0.0, 1.0]], mask[:1]) == ([[0, 1, 1, 0]], (2, 0, 1))


def test_dppo_by_hand():
    """pi - pi_gen = .21, .19, -.21, -.19 at ratios of 1.3 to .7, and .0009 at a ratio of 10."""
    pi, pi_gen = [[0.91, 0.89, 0.49, 0.51, 1e-3]], [[0.7, 0.7, 0.7, 0.7, 1e-4]]
    assert weights_of("dppo", pi, pi_gen, [1.0]) == ([[0, 1, 1, 1, 1]], (4, 1, 0))
    assert weights_of("dppo", pi, pi_gen, [-1.0]) == ([[1, 1, 0, 1, 1]], (4, 0, 1))
    assert weights_of("dppo", pi, pi_gen, [-1.0], high=0.18) == ([[1, 1, 0, 0, 1]], (3, 0, 2))


def test_dppo_kl_by_hand():
    """KL((.5, .5) || (.65, .35)) = .5 ln(.5 / .65) + .5 ln(.5 / .35) = .0472, of (.66, .34) .0540; the same for .35 and
    .34. The other way round, of (.65, .35) from .5, it would be .0457, and of .66 .0519. KL((.9, .1) || (.97, .03)) =
    .9 ln(.9 / .97) + .1 ln(.1 / .03) = .0530, where the reverse has .0366. A probability of 1 leaves it finite."""
    pi, pi_gen = [[0.65, 0.66, 0.35, 0.34, 0.97]], [[0.5, 0.5, 0.5, 0.5, 0.9]]
    assert weights_of("dppo_kl", pi, pi_gen, [1.0]) == ([[1, 0, 1, 1, 0]], (3, 2, 0))
    assert weights_of("dppo_kl", pi, pi_gen, [-1.0]) == ([[1, 1, 1, 0, 1]], (4, 0, 1))
    assert weights_of("dppo_kl", [[1.0, 1.0]], [[1.0, 0.5]], [1.0]) == ([[1, 0]], (1, 1, 0))
    assert weights_of("dppo_kl", pi, pi_gen, [1.0], high=0.0535) == ([[1, 0, 1, 1, 1]], (4, 1, 0))


def test_m2po_by_hand():
    """A > 0, log-ratios .1, .2, .3, -2, and .1 in a second row: of the four that rose, .01, .01, .04 and .09 have means
    .01, .01, .02, .0375 in that order. At .0374 the last goes, at .0199 the one before, at .0099 all four, and the token
    that fell never does."""
    pi = [[math.exp(d - 3) for d in of_row] for of_row in ([0.1, 0.2, 0.3, -2.0], [0.1, -1.0, -1.0, -1.0])]
    pi_gen, mask = [[math.exp(-3)] * 4] * 2, [[1, 1, 1, 1], [1, 0, 0, 0]]
    for high, first in [(0.0376, [1, 1, 1, 1]), (0.0374, [1, 1, 0, 1]), (0.0199, [1, 0, 0, 1]), (0.0099, [0, 0, 0, 1])]:
        weights, counts = weights_of("m2po", pi, pi_gen, [1.0, 1.0], mask, high=high)
        second = int(high > 0.0099)
        assert weights == [first, [second, 0, 0, 0]] and counts == (sum(first) + second, 5 - sum(first) - second, 0)


def test_the_default_limits_are_those_of_the_table():
    assert {name: MASKS[name].keywords for name in NAMES} == {  # as the docstring's table has them
        "truncate": {"high": 2}, "icepop": {"low": 0.5, "high": 5}, "sequence": {"low": 0.5, "high": 2},
        "geometric": {"low": 0.99, "high": 1.01}, "deepseek": {"high": 0.5}, "dppo": {"high": 0.2},
        "dppo_kl": {"high": 0.05}, "m2po": {"high": 0.04},
    }  # fmt: skip


def brute_force(name: str, now: Tensor, then: Tensor, a: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Token by token over Python numbers, with products and sums written out."""
    weights = torch.zeros_like(now)
    places = [tuple(place) for place in mask.nonzero().tolist()]
    pushed = [p for p in places if (now[p] - then[p]) * a[p] > 0]
    if name == "m2po":  # drop the largest one by one
        left = sorted(pushed, key=lambda p: abs(float(now[p] - then[p])))
        while left and sum(float(now[p] - then[p]) ** 2 for p in left) / len(left) > high:
            left.pop()
    for p in places:
        of_row = [math.exp(float(now[q] - then[q])) for q in places if q[0] == p[0]]
        rho, pi, mu = math.exp(float(now[p] - then[p])), math.exp(float(now[p])), math.exp(float(then[p]))
        kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)) if max(pi, mu) < 1 else math.inf
        weights[p] = {
            "truncate": min(rho, high) / rho,
            "icepop": low <= rho <= high,
            "sequence": low <= math.prod(of_row) <= high,
            "geometric": low <= math.prod(of_row) ** (1 / len(of_row)) <= high,
            "deepseek": not (a[p] < 0 and sum(-math.log(r) for r in of_row) / len(of_row) > high),
            "dppo": not ((a[p] > 0 and pi - mu > high) or (a[p] < 0 and mu - pi > high)),
            "dppo_kl": not (kl > high and p in pushed),
            "m2po": name == "m2po" and (p not in pushed or p in left),
        }[name]
    return weights


@pytest.mark.parametrize("name", NAMES)  # drawn, some would hardly come
@settings(max_examples=20)
@given(batch=batches(), high=st.sampled_from([0.0301, 0.101, 0.51, 1.013]), low=st.sampled_from([0.31, 0.99]))
def test_against_a_brute_force_loop(name, batch, high, low):
    """All masks and random batches; limits lie beside the ratios that occur, so that rounding decides nothing. Of m2po's
    equal squares either may go first, so there the counts must agree."""
    now, then, a, mask = batch
    then, high = then.clamp(max=-1e-3), high + (name in PAIRS)
    weights, metrics = MASKS[name](now, then, a, mask, **limits(name, low, high))
    wanted = brute_force(name, now, then, a, mask, low, high)
    assert int(metrics["kept"]) == int((weights > 0).sum())
    if name == "m2po":
        weights, wanted = weights.sum(), wanted.sum()
    torch.testing.assert_close(weights, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batch=batches())
def test_the_limits_zero_and_infinity(name, batch):
    """Infinity (and 0 below) keeps every token. 0 drops all that has moved to the side that the mask looks at, and
    keeps what has not."""
    now, then, a, mask = batch
    weights, metrics = MASKS[name](now, then, a, mask, **limits(name, 0.0, math.inf))
    assert torch.equal(weights, mask.double()) and list(metrics.values()) == [mask.sum(), 0, 0]
    weights, metrics = MASKS[name](now, then, a, mask, **limits(name, 0.0, 0.0))
    pushed = mask & ((now - then) * a > 0)
    if name in PAIRS or name == "truncate":
        assert not weights.any() and int(metrics["kept"]) == 0
    elif name != "deepseek":
        assert torch.equal(weights, (mask & ~pushed).double())
        wanted = (pushed & (a > 0)).sum(), (pushed & (a < 0)).sum()
        assert (metrics["masked_positive"], metrics["masked_negative"]) == wanted


def test_a_ratio_at_its_limit_stays():
    """rho = 1 exactly, and a probability, a drift or a square that is exactly the limit."""
    half = [[0.5]], [[0.5]], [1.0]
    for name in PAIRS:
        assert weights_of(name, *half, low=1.0, high=1.0)[0] == [[1]]
    assert weights_of("dppo", [[0.75]], [[0.5]], [1.0], high=0.25)[0] == [[1]]
    ones = torch.ones(1, 1, dtype=F64)
    assert float(MASKS["deepseek"](-2 * ones, -ones, -ones, ones, high=1.0)[0]) == 1
    assert float(MASKS["m2po"](-ones, -2 * ones, ones, ones, high=1.0)[0]) == 1
    assert float(MASKS["truncate"](-ones, -ones, ones, ones, high=1.0)[0]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_huge_ratios_are_bounded_and_a_row_of_them_too(name):
    """Log-ratios of +-300 on 200 tokens: no NaN, whatever overflows, and without limits all stay."""
    then, a = torch.full((2, 200), -400.0), torch.tensor([1.0, -1.0])
    now = then + 300 * a[:, None]
    assert MASKS[name](now, then, a, torch.ones(2, 200), **limits(name, 0.0, math.inf))[0].all()
    weights, _ = MASKS[name](now, then, a, torch.ones(2, 200))
    assert weights.isfinite().all() and weights.dtype == torch.float32
    if name == "truncate":
        assert weights[0, 0] == pytest.approx(2 / math.exp(20)) and weights[1].all()


@pytest.mark.parametrize(("name", "loss"), itertools.product(NAMES, LOSSES))
def test_the_gradient_of_a_masked_loss_is_the_losss_own_where_tokens_are_kept(name, loss):
    """By autograd: weight times the loss's gradient, token by token; no gradient flows through the weights, though the
    log-probs decide them. And a dropped token has a gradient of exactly 0."""
    g = torch.Generator().manual_seed(3)
    logprobs = (-3 * torch.rand(6, 5, generator=g, dtype=F64)).requires_grad_()
    behaviour = logprobs.detach() + 0.6 * torch.randn(6, 5, generator=g, dtype=F64)
    advantages, mask = torch.randn(6, generator=g, dtype=F64), torch.rand(6, 5, generator=g) < 0.8
    extra = {"old_logprobs": behaviour} if loss == "tis" else {}
    token_loss, _ = LOSSES[loss](logprobs, behaviour, advantages, mask, **extra)
    wide = {"geometric": {"low": 0.8, "high": 1.3}, "deepseek": {"high": 0.05}}.get(name, {})
    weights, _ = MASKS[name](logprobs, behaviour, advantages, mask, **wide)
    assert not weights.requires_grad and 0 < float(weights.sum()) < int(mask.sum())
    (own,) = torch.autograd.grad(token_loss.sum(), logprobs, retain_graph=True)
    (got,) = torch.autograd.grad((weights * token_loss).sum(), logprobs)
    torch.testing.assert_close(got, weights * own)
    assert not got[weights == 0].any()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batch=batches(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 5.0]))
def test_nothing_outside_the_mask_counts(name, batch, junk):
    """Weights and counts are the same whatever stands there, and the weights are 0; one advantage for each row does as
    an equal one for each token; no input is written to."""
    now, then, a, mask = batch
    clean = MASKS[name](now, then, a, mask)
    dirty = [x.masked_fill(~mask, junk) for x in (now, then, a)]
    before = [x.clone() for x in dirty]
    got = MASKS[name](*dirty, mask)
    assert torch.equal(got[0], clean[0]) and got[1] == clean[1] and not got[0][~mask].any()
    torch.testing.assert_close(dirty, before, rtol=0, atol=0, equal_nan=True)
    one, each = (MASKS[name](now, then, x, mask.int()) for x in (a[:, 0], a[:, :1].expand(mask.shape)))
    assert torch.equal(one[0], each[0]) and one[1] == each[1]
    assert one[0].dtype == F64 and MASKS[name](now.bfloat16(), then, a, mask)[0].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_is_not_hidden(name):
    """A log-prob that is NaN inside the mask makes the masked loss NaN there, and nowhere else but in its own row."""
    now, ones = torch.full((2, 2), -1.0), torch.ones(2, 2)
    now[0, 0] = math.nan
    weights, _ = MASKS[name](now, -ones, torch.ones(2), ones)
    loss = weights * cispo(now, -ones, torch.ones(2), ones)[0]
    assert loss[0, 0].isnan() and loss[1].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_limits_and_shapes_that_cannot_be_are_refused(name):
    good = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)]
    for bad in ({"high": -0.1}, {"high": math.nan}, *([{"low": -1.0}, {"low": 9.0}] if name in PAIRS else [])):
        with pytest.raises(ValueError, match=f"^{name} needs 0 <= low <= high, and has "):
            MASKS[name](*good, **bad)
    for unknown in ("cap", "cap" if name in PAIRS else "low"):
        with pytest.raises(TypeError, match=unknown):
            MASKS[name](*good, **{unknown: 0.0})
    for i, bad in [(0, (3,)), (1, (2, 1)), (2, (2, 1)), (2, (3,)), (3, (2,))]:
        with pytest.raises(ValueError, match="expected logprobs"):
            MASKS[name](*good[:i], torch.zeros(bad), *good[i + 1 :])


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_microbatch_keeps_nothing(name, shape):
    weights, metrics = MASKS[name](*[torch.zeros(shape)] * 2, torch.ones(shape[0]), torch.zeros(shape))
    assert weights.shape == shape and not weights.any() and not any(metrics.values())
