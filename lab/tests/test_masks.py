"""lab/masks.py against values by hand, brute-force loops, the limits 0 and infinity, and autograd through each loss.

Weights that are all 0 or 1 are written as digits, one word for each row: "1011 1111"."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import masks
from lab.masks import MASKS
from losses import aggregation_weights, cispo, dapo, merge_metrics, normalize_advantages, summarize_metrics
from tasks.named import named

PAIRS = ["icepop", "sequence", "geometric"]  # which have two limits
F64 = torch.float64

each_mask = pytest.mark.parametrize("name", MASKS)


def digits(weights: Tensor) -> str:
    return " ".join("".join(f"{weight:g}" for weight in row) for row in weights.tolist())


def weights_of(name: str, pi, pi_gen, advantages, mask=None, **limits) -> tuple[str, tuple[int, int, int]]:
    """(weights in digits, (kept, masked_positive, masked_negative)) for probabilities (N, T)."""
    pi, pi_gen, advantages = (torch.tensor(x, dtype=F64) for x in (pi, pi_gen, advantages))
    mask = torch.ones_like(pi) if mask is None else torch.tensor(mask)
    weights, metrics = MASKS[name](pi.log(), pi_gen.log(), advantages, mask, **limits)
    assert list(metrics) == ["kept", "masked_positive", "masked_negative"]
    return digits(weights), tuple(int(count) for count in metrics.values())


def row(name: str, rho: list[float], advantage: float) -> Tensor:
    """Weights of one row whose tokens have these ratios: pi_gen is .01 on each."""
    ones = torch.ones(1, len(rho), dtype=F64)
    behaviour = math.log(0.01) * ones
    logprobs = behaviour + torch.tensor(rho, dtype=F64).log()
    weights, _ = MASKS[name](logprobs, behaviour, advantage * ones, ones)
    return weights[0]


def limits(name: str, low: float, high: float) -> dict[str, float]:
    return {"low": low, "high": high} if name in PAIRS else {"high": high}


@st.composite
def batches(draw):
    """(log-probs, behaviour log-probs, advantages for each token, mask) of up to 4 x 4 tokens, with rows left out."""
    rows = draw(st.integers(1, 4))
    length = draw(st.integers(1, 4))

    def tensor(values, dtype=F64):
        drawn = draw(st.lists(values, min_size=rows * length, max_size=rows * length))
        return torch.tensor(drawn, dtype=dtype).view(rows, length)

    logprobs = tensor(st.floats(-6, -1e-3))
    log_rho = tensor(st.sampled_from([0, 0.05, -0.05, 0.2, -0.2, 0.7, -0.7, 3, -3]))
    advantages = tensor(st.sampled_from([-1.5, 0, 0.5]))
    return logprobs, logprobs - log_rho, advantages, tensor(st.booleans(), torch.bool)


@pytest.mark.parametrize(
    ("name", "limits", "positive", "negative"),
    [
        ("icepop", {}, "1011 1011", "1011 1011"),
        ("sequence", {}, "0000 1111", "0000 1111"),
        ("geometric", {"low": 0.9, "high": 1.1}, "0000 0000", "0000 0000"),
        ("dppo", {}, "0111 1111", "1111 0111"),
        ("dppo_kl", {}, "0111 1011", "1111 0101"),
        ("deepseek", {}, "1111 1111", "1111 1111"),
        ("deepseek", {"high": 0.05}, "1111 1111", "0000 1111"),
    ],
)
def test_the_code_of_others_drops_the_same(name, limits, positive, negative):
    """The weights of two rows, for A > 0 and for A < 0, that the published code of others computes: verl 0.9.1
    (rollout_corr_helper and core_algos), SkyRL 0.3.0 (dppo again), TRL 1.16.0 (deepseek)."""
    pi = [[0.85, 0.012, 0.34, 0.88], [0.42, 0.11, 0.25, 0.44]]
    pi_gen = [[0.6, 0.05, 0.3, 0.9], [0.7, 0.02, 0.4, 0.5]]
    assert weights_of(name, pi, pi_gen, [1, 1], **limits)[0] == positive
    assert weights_of(name, pi, pi_gen, [-1, -1], **limits)[0] == negative


@pytest.mark.parametrize(
    ("name", "rho", "positive", "negative", "zero"),
    [
        ("icepop", [0.51, 0.49, 4.9, 5.1], "1010", "1010", "1010"),
        ("dppo", [0.01, 20.9, 21.1], "110", "111", "111"),  # by .209 and .211; nothing can fall by .2
        # (log rho)^2 is .04 for rho = e^.2: of that alone the mean is the limit. And 1 for e^+-1.
        ("m2po", [math.exp(0.1999), math.exp(1), math.exp(-1)], "101", "110", "111"),
    ],
)
def test_tokens_by_hand(name, rho, positive, negative, zero):
    """With the limits of the sources and pi_gen = .01."""
    for advantage, expected in (2.0, positive), (-0.5, negative), (0.0, zero):
        assert digits(row(name, rho, advantage)[None]) == expected


def test_deepseek_by_hand():
    """Mean of log pi_gen - log pi over three trained tokens: (2 - .2 - .27) / 3 = .51 and (2 - .2 - .33) / 3 = .49. Only
    the first goes, and only where A < 0. The fourth token does not train; counted, it would make both means smaller."""
    drift = torch.tensor([[2.0, -0.2, -0.27, -9.0], [2.0, -0.2, -0.33, -9.0]], dtype=F64)
    pi = (0.01 * (-drift).exp()).tolist()
    pi_gen = [[0.01] * 4] * 2
    for advantages, expected in [
        ([-1, -1], ("0000 1110", (3, 0, 3))),
        ([1, 0], ("1110 1110", (6, 0, 0))),
        # for each token: the first row has drifted, and its tokens with A < 0 go
        ([[-1, 1, 0, 1], [-1, 1, 0, 1]], ("0110 1110", (5, 0, 1))),
    ]:
        assert weights_of("deepseek", pi, pi_gen, advantages, [[1, 1, 1, 0]] * 2) == expected


@pytest.mark.parametrize(
    ("advantage", "limits", "expected"),
    [
        (1.0, {}, ("01111", (4, 1, 0))),
        (-1.0, {}, ("11011", (4, 0, 1))),
        (-1.0, {"high": 0.18}, ("11001", (3, 0, 2))),
    ],
)
def test_dppo_by_hand(advantage, limits, expected):
    """pi - pi_gen = .21, .19, -.21, -.19 at ratios of 1.3 to .7, and .0009 at a ratio of 10."""
    pi, pi_gen = [[0.91, 0.89, 0.49, 0.51, 1e-3]], [[0.7, 0.7, 0.7, 0.7, 1e-4]]
    assert weights_of("dppo", pi, pi_gen, [advantage], **limits) == expected


@pytest.mark.parametrize(
    ("advantage", "limits", "expected"),
    [
        (1.0, {}, ("10110", (3, 2, 0))),
        (-1.0, {}, ("11101", (4, 0, 1))),
        (1.0, {"high": 0.0535}, ("10111", (4, 1, 0))),
    ],
)
def test_dppo_kl_by_hand(advantage, limits, expected):
    """KL((.5, .5) || (.65, .35)) = .5 ln(.5 / .65) + .5 ln(.5 / .35) = .0472, of (.66, .34) .0540; the same for .35 and
    .34. The other way round, of (.65, .35) from .5, it would be .0457, and of .66 .0519. KL((.9, .1) || (.97, .03)) =
    .9 ln(.9 / .97) + .1 ln(.1 / .03) = .0530, where the reverse has .0366."""
    pi, pi_gen = [[0.65, 0.66, 0.35, 0.34, 0.97]], [[0.5, 0.5, 0.5, 0.5, 0.9]]
    assert weights_of("dppo_kl", pi, pi_gen, [advantage], **limits) == expected


def test_dppo_kl_of_a_probability_of_1_is_finite():
    assert weights_of("dppo_kl", [[1.0, 1.0]], [[1.0, 0.5]], [1.0]) == ("10", (1, 1, 0))


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (0.0376, ("1111 1000", (5, 0, 0))),
        (0.0374, ("1101 1000", (4, 1, 0))),
        (0.0199, ("1001 1000", (3, 2, 0))),
        (0.0099, ("0001 0000", (1, 4, 0))),
    ],
)
def test_m2po_by_hand(high, expected):
    """A > 0, log-ratios .1, .2, .3, -2, and .1 in a second row: of the four that rose, .01, .01, .04 and .09 have means
    .01, .01, .02, .0375 in that order. At .0374 the last goes, at .0199 the one before, at .0099 all four, and the token
    that fell never does."""
    log_rho = torch.tensor([[0.1, 0.2, 0.3, -2.0], [0.1, -1.0, -1.0, -1.0]], dtype=F64)
    pi = (log_rho - 3).exp().tolist()
    pi_gen = [[math.exp(-3)] * 4] * 2
    mask = [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert weights_of("m2po", pi, pi_gen, [1, 1], mask, high=high) == expected


def test_the_default_limits_are_those_of_the_table():
    assert {name: mask.keywords for name, mask in MASKS.items()} == {
        "truncate": {"high": 2},
        "icepop": {"low": 0.5, "high": 5},
        "sequence": {"low": 0.5, "high": 2},
        "geometric": {"low": 0.99, "high": 1.01},
        "deepseek": {"high": 0.5},
        "dppo": {"high": 0.2},
        "dppo_kl": {"high": 0.05},
        "m2po": {"high": 0.04},
    }


def brute_force(name: str, now: Tensor, then: Tensor, a: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Token by token over Python numbers, with products and sums written out."""
    weights = torch.zeros_like(now)
    places = [tuple(place) for place in mask.nonzero().tolist()]
    rho = {p: math.exp(now[p] - then[p]) for p in places}
    for p in places:
        of_row = [rho[q] for q in places if q[0] == p[0]]
        pi = math.exp(now[p])
        mu = math.exp(then[p])
        kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        weights[p] = {
            "truncate": min(rho[p], high) / rho[p],
            "sequence": low <= math.prod(of_row) <= high,
            "geometric": low <= math.prod(of_row) ** (1 / len(of_row)) <= high,
            "dppo_kl": not (kl > high and (pi - mu) * a[p] > 0),
        }[name]
    return weights


@pytest.mark.parametrize("name", ["truncate", "sequence", "geometric", "dppo_kl"])
@settings(max_examples=20)
@given(batch=batches(), high=st.sampled_from([0.0301, 0.101, 0.51, 1.013]), low=st.sampled_from([0.31, 0.99]))
def test_against_a_brute_force_loop(name, batch, high, low):
    """Limits lie beside the ratios that occur, so that rounding decides nothing. test_conformance.py does the others."""
    now, then, a, mask = batch
    then = then.clamp(max=-1e-3)
    high += name in PAIRS
    weights, _ = MASKS[name](now, then, a, mask, **limits(name, low, high))
    expected = brute_force(name, now, then, a, mask, low, high)
    torch.testing.assert_close(weights, expected, atol=1e-9, rtol=0)


@each_mask
@settings(max_examples=20)
@given(batch=batches())
def test_the_counts_are_those_of_the_weights(name, batch):
    _, _, a, mask = batch
    weights, metrics = MASKS[name](*batch)
    masked = mask & (weights < 1)
    assert metrics["kept"] == (weights > 0).sum()
    assert metrics["masked_positive"] == (masked & (a > 0)).sum()
    assert metrics["masked_negative"] == (masked & (a < 0)).sum()


@each_mask
@settings(max_examples=20)
@given(batch=batches())
def test_the_limits_zero_and_infinity(name, batch):
    """Infinity (and 0 below) keeps every token. 0 drops all that has moved to the side that the mask looks at, and
    keeps what has not."""
    now, then, a, mask = batch
    weights, metrics = MASKS[name](*batch, **limits(name, 0.0, math.inf))
    assert torch.equal(weights, mask.double())
    assert list(metrics.values()) == [mask.sum(), 0, 0]
    weights, metrics = MASKS[name](*batch, **limits(name, 0.0, 0.0))
    pushed = mask & ((now - then) * a > 0)
    if name in PAIRS or name == "truncate":
        assert not weights.any()
        assert metrics["kept"] == 0
    elif name != "deepseek":
        assert torch.equal(weights, (mask & ~pushed).double())


@pytest.mark.parametrize(
    ("name", "now", "then", "advantage", "limits"),
    [
        *((name, -0.7, -0.7, 1, {"low": 1.0, "high": 1.0}) for name in PAIRS),  # rho = 1
        ("dppo", math.log(0.75), math.log(0.5), 1, {"high": 0.25}),
        ("deepseek", -2, -1, -1, {"high": 1.0}),
        ("m2po", -1, -2, 1, {"high": 1.0}),
        ("truncate", -1, -1, 1, {"high": 1.0}),
    ],
)
def test_a_token_exactly_at_its_limit_stays(name, now, then, advantage, limits):
    one = torch.ones(1, 1, dtype=F64)
    weights, _ = MASKS[name](now * one, then * one, advantage * one, one, **limits)
    assert weights == 1


@each_mask
def test_huge_ratios_are_bounded_and_a_row_of_them_too(name):
    """Log-ratios of +-300 on 200 tokens: no NaN, whatever overflows, and without limits all stay."""
    ones, a = torch.ones(2, 200), torch.tensor([1.0, -1.0])
    then = -400 * ones
    now = then + 300 * a[:, None]
    weights, _ = MASKS[name](now, then, a, ones, **limits(name, 0.0, math.inf))
    assert weights.all()
    weights, _ = MASKS[name](now, then, a, ones)
    assert weights.isfinite().all()
    assert weights.dtype == torch.float32
    if name == "truncate":
        assert weights[0, 0] == pytest.approx(2 / math.exp(20))
        assert weights[1].all()


@each_mask
@settings(max_examples=20)
@given(batch=batches(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 5.0]))
def test_nothing_outside_the_mask_counts(name, batch, junk):
    """Weights and counts are the same whatever stands there, and the weights are 0. No gradient flows through them, and no
    input is written to."""
    *inputs, mask = batch
    expected, expected_metrics = MASKS[name](*batch)
    before = [x.masked_fill(~mask, junk) for x in inputs]
    dirty = [x.clone().requires_grad_() for x in before]
    weights, metrics = MASKS[name](*dirty, mask)
    assert torch.equal(weights, expected)
    assert metrics == expected_metrics
    assert not weights.requires_grad
    assert not weights[~mask].any()
    torch.testing.assert_close([x.detach() for x in dirty], before, rtol=0, atol=0, equal_nan=True)


@each_mask
@settings(max_examples=20)
@given(batch=batches())
def test_bfloat16_log_probs_are_raised_before_the_ratio(name, batch):
    """Weights are those of the same values in FP64, where bfloat16 would round the ratio again. FP64 stays FP64."""
    *inputs, mask = batch
    coarse = [x.bfloat16() for x in inputs]
    weights, _ = MASKS[name](*coarse, mask)
    expected, _ = MASKS[name](*(x.double() for x in coarse), mask)
    assert weights.dtype == torch.float32
    assert expected.dtype == F64
    assert torch.equal(weights, expected.float())


@each_mask
def test_a_nan_is_not_hidden(name):
    """A log-prob that is NaN inside the mask makes the masked loss NaN there, and nowhere else but in its own row."""
    ones = torch.ones(2, 2)
    now = -ones
    now[0, 0] = math.nan
    inputs = now, -ones, ones, ones
    masked_loss = MASKS[name](*inputs)[0] * cispo(*inputs)[0]
    assert masked_loss[0, 0].isnan()
    assert masked_loss[1].isfinite().all()


GOOD = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)]


@each_mask
def test_limits_that_cannot_be_are_refused(name):
    pair = name in PAIRS
    for bad in [{"high": -0.1}, {"high": math.nan}] + [{"low": -1.0}, {"low": 9.0}] * pair:
        with pytest.raises(ValueError, match=f"^{name} needs 0 <= low <= high, and has "):
            MASKS[name](*GOOD, **bad)
    with pytest.raises(TypeError, match="cap"):
        MASKS[name](*GOOD, cap=0.0)
    if not pair:
        with pytest.raises(TypeError, match="low"):
            MASKS[name](*GOOD, low=0.0)


@pytest.mark.parametrize(("i", "bad"), [(0, 3), (1, (2, 1)), (2, (1, 3)), (2, 3), (3, 2)])
def test_inputs_of_other_shapes_are_refused(i, bad):
    inputs = list(GOOD)
    inputs[i] = torch.zeros(bad)
    with pytest.raises(ValueError, match="expected log-probs"):
        MASKS["icepop"](*inputs)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@each_mask
def test_an_empty_microbatch_keeps_nothing(name, shape):
    zeros = torch.zeros(shape)
    weights, metrics = MASKS[name](zeros, zeros, torch.ones(shape[0]), zeros)
    assert weights.shape == shape
    assert not weights.any()
    assert not any(metrics.values())


# ---------------------------------------------------------------------------------------------------------- as losses


def leaf_rows() -> tuple[Tensor, ...]:
    """Four rows of three tokens in float64, with ratios of e^-2 to e^2, both signs of A, and a hole in the mask."""
    noise = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(3), dtype=F64)
    logprobs = -noise[0].abs() - 0.1
    mask = torch.ones(4, 3)
    mask[1, 2] = 0
    return (
        logprobs.requires_grad_(),
        logprobs.detach() - noise[1],
        torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=F64),
        mask,
    )


def gradient(token_loss: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(token_loss.sum(), logprobs)[0]


@each_mask
def test_a_mask_as_a_loss_is_its_weights_times_a_token_loss(name):
    """`--loss lab.masks:NAME`: CISPO's loss, DAPO's for `truncate`; the gradient too, and the metrics of both."""
    rows = leaf_rows()
    loss = named("loss", f"lab.masks:{name}")
    token_loss, metrics = loss(*rows)
    weights, counts = MASKS[name](*rows)
    base = dapo if name == "truncate" else cispo
    expected, base_metrics = base(*rows)
    assert torch.equal(token_loss, weights * expected)
    assert torch.equal(gradient(token_loss, rows[0]), weights * gradient(expected, rows[0]))
    assert metrics == base_metrics | counts
    assert not token_loss[1, 2]
    assert loss.__name__ == name
    with pytest.raises(TypeError):
        loss(*rows, eps_max=5.0)  # the options are the mask's


def test_icepop_as_a_loss_by_hand():
    """pi = .2 and .6 with pi_gen = .1: rho = 2 stays, and weighs 2; rho = 6 is above 5: loss and gradient are 0, where
    CISPO alone has -5 ln .6. Half of the tokens with A > 0 are masked, and those are what CISPO capped."""
    logprobs = torch.tensor([[0.2, 0.6]], dtype=F64).log().requires_grad_()
    behaviour = torch.tensor([[0.1, 0.1]], dtype=F64).log()
    token_loss, metrics = masks.icepop(logprobs, behaviour, torch.tensor([1.0]), torch.ones(1, 2))
    assert token_loss.tolist() == [[pytest.approx(3.218876), 0]]  # -2 ln .2
    assert gradient(token_loss, logprobs).tolist() == [[pytest.approx(-2), 0]]
    summary = summarize_metrics(metrics)
    assert metrics["kept"] == 1
    assert (summary["masked_positive"], summary["masked_negative"], summary["capped_positive"]) == (0.5, 0, 0.5)
    other, _ = masks.icepop(logprobs, behaviour, torch.tensor([1.0]), torch.ones(1, 2), high=7.0)
    assert other.all()


@pytest.mark.parametrize("name", [*sorted(set(MASKS) - {"m2po"}), "dispo", "maxrl"])
def test_microbatches_add_up(name):
    """Gradients and metrics of two microbatches are those of the batch. m2po pays with that: see below."""
    logprobs, behaviour, advantages, mask = leaf_rows()
    weights = aggregation_weights(mask, torch.tensor([0, 0, 1, 1]))

    def of(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss, metrics = getattr(masks, name)(logprobs[rows], behaviour[rows], advantages[rows], mask[rows])
        return gradient(weights[rows] * token_loss, logprobs), metrics

    (first, one), (second, other) = of(slice(0, 1)), of(slice(1, 4))
    whole, metrics = of(slice(0, 4))
    merged = merge_metrics([one, other])
    torch.testing.assert_close(first + second, whole)
    assert {key: float(x) for key, x in merged.items()} == pytest.approx({k: float(x) for k, x in metrics.items()})


def test_m2po_compares_the_tokens_of_a_microbatch():
    """Log-ratios .1 and .25 of one batch have a mean square of .03625, and both stay; alone, .0625 is above .04."""
    log_rho = torch.tensor([[0.1], [0.25]], dtype=F64)
    then, ones = torch.full_like(log_rho, -2), torch.ones(2, 1)
    _, together = masks.m2po(then + log_rho, then, ones[:, 0], ones)
    parts = [masks.m2po(then[i] + log_rho[i], then[i], ones[:1, 0], ones[:1])[1] for i in ([0], [1])]
    assert together["kept"] == 2
    assert merge_metrics(parts)["kept"] == 1


@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [
        ("dispo", [0.8, 0.9, 1.2, 1.28, 1.28], [0.1, 0.9, 1.2, 2.0, 5.0]),
        ("dispo_right_above", [0.8, 0.9, 1.2, 2.0, 5.0], [0.1, 0.9, 1.2, 2.0, 5.0]),
        ("dispo_right_below", [0.1, 0.9, 1.2, 1.28, 1.28], [0.1, 0.9, 1.2, 2.0, 5.0]),
        ("dispo_paper", [0.8, 0.9, 1.2, 2.0, 6.0], [0.1, 0.9, 1.2, 2.0, 6.0]),
    ],
)
def test_dispo_by_hand(name, positive, negative):
    """Ours: right answers keep weights in [.8, 1.28], wrong ones in [0, 5]. The runs of staleness.md: [.8, 5], [0, 1.28],
    and the paper's [.8, 11] with [0, 101]. The gradient stays outside of them, -weight A, and flows through log pi
    alone: loss -w A ln(pi), pi = e^-2 rho."""
    rho = torch.tensor([[0.1, 0.9, 1.2, 2.0, 6.0]], dtype=F64)
    behaviour = torch.full_like(rho, -2)
    for advantage, expected in (2.0, positive), (-0.5, negative):
        logprobs = (behaviour + rho.log()).requires_grad_()
        token_loss, metrics = getattr(masks, name)(logprobs, behaviour, torch.tensor([advantage]), torch.ones(1, 5))
        factor = -advantage * torch.tensor([expected], dtype=F64)
        torch.testing.assert_close(gradient(token_loss, logprobs), factor)
        torch.testing.assert_close(token_loss, factor * logprobs)
        count = sum(abs(a - b) > 1e-6 for a, b in zip(expected, rho[0].tolist(), strict=True))
        assert metrics["capped_positive" if advantage > 0 else "capped_negative"] == count


def test_maxrl_by_hand():
    """Rewards 1, -1, -1, -1: the pass rate is 1/4, so A = (1 - 1/4) / (1/4) = 3 and -1; three of four right: 1/3 and -1; all
    right: 0. With pi = pi_gen the gradient is -A. Rewards of 1 and 0 lie 1 apart, and the same call sees that. What no two such rewards can give, as
    an advantage over a std of .43, is refused."""
    rewards = torch.tensor([1.0, -1, -1, -1, 1, 1, 1, -1, 1, 1], dtype=F64)
    group_ids = torch.tensor([4, 4, 4, 4, 9, 9, 9, 9, 2, 2])
    expected = torch.tensor([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0], dtype=F64)
    logprobs = torch.full((10, 2), -1.0, dtype=F64, requires_grad=True)
    mask = torch.ones(10, 2, dtype=F64)
    mask[:, 1] = 0
    for values, gap in (rewards, {}), (rewards.clamp(0), {"gap": 1.0}), (rewards.clamp(0), {}):
        centered = normalize_advantages(values, group_ids, "none")
        token_loss, _ = masks.maxrl(logprobs, logprobs.detach(), centered, mask, **gap)
        torch.testing.assert_close(gradient(token_loss, logprobs), -expected[:, None] * mask)
        assert not token_loss[:, 1].any()
        per_token, _ = masks.maxrl(logprobs, logprobs.detach(), centered[:, None].expand(10, 2), mask, **gap)
        assert torch.equal(per_token, token_loss)
    assert torch.equal(masks.maxrl_01(logprobs, logprobs.detach(), centered, mask)[0], token_loss)
    scaled = normalize_advantages(rewards[:4], group_ids[:4], "prompt")
    with pytest.raises(ValueError, match="give --normalize_advantages none"):
        masks.maxrl(logprobs[:4], logprobs[:4].detach(), scaled, mask[:4], gap=1.0)
    with pytest.raises(ValueError, match="give --normalize_advantages none"):
        masks.maxrl(logprobs[:4], logprobs[:4].detach(), torch.full((4,), 2.0), mask[:4])  # exactly the gap
    capped, _ = masks.maxrl(logprobs[:1], logprobs[:1].detach() - 3, torch.tensor([1.5]), mask[:1], eps_max=2.0)
    assert float(gradient(capped, logprobs)[0, 0]) == pytest.approx(-2 * 3)


@pytest.mark.parametrize(
    ("advantages", "gap", "warns"),
    [
        ([0.75, -0.25, -0.25, -0.25], 1.0, False),  # 1, 0, 0, 0
        ([1.5, -0.5, -0.5, -0.5], 2.0, False),  # 1, -1, -1, -1
        ([1.0, -1.0], 2.0, False),
        ([0.5, -0.5], 1.0, False),
        ([-0.25, -0.25, 0.0], 2.0, False),  # wrong ones weigh -1 whatever the gap
        ([0.0, 0.0], 2.0, False),
        ([0.75], 2.0, True),  # 1 of 1, 0, 0, 0, or of 1 and -1 with five of eight right
        ([0.5, -0.25], 2.0, True),  # rows of two groups
    ],
)
def test_the_gap_of_rewards(advantages, gap, warns):
    """As a whole group tells it; right answers without their group leave it open."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert masks.reward_gap(torch.tensor(advantages)) == gap
    assert [("maxrl_01" in str(warning.message)) for warning in caught] == [True] * warns
