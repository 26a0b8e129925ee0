"""losses.py, worked by hand: advantages, one loss after the other, averages, and at the end an oracle for all of them.

A gradient here is that of the summed loss by the log-probs, so a token that is pushed up has a negative one."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from losses import LOSSES, aggregation_weights, kl_penalty, merge_metrics, normalize_advantages, summarize_metrics

each_loss = pytest.mark.parametrize("name", LOSSES)


def f64(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def run(name: str, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, **options):
    """(token loss, metrics, gradient); the old log-probs of TIS are the behaviour's unless they are given."""
    if name == "tis":
        options = {"old_logprobs": behaviour} | options
    leaf = logprobs.clone().requires_grad_()
    token_loss, metrics = LOSSES[name](leaf, behaviour, advantages, mask, **options)
    (grad,) = torch.autograd.grad(token_loss.sum(), leaf)
    return token_loss.detach(), metrics, grad


def run_ratios(name: str, rho: list[float], advantages: list[float], **options):
    """`run` on one row of tokens with these ratios and advantages, and pi_gen = e^-2."""
    behaviour = torch.full_like(f64(rho), -2)
    return run(name, behaviour + f64(rho).log(), behaviour, f64(advantages), torch.ones(1, len(rho)), **options)


def test_advantages_by_hand():
    """Prompt 5: rewards 1, -1, -1, -1, mean -.5, centered 1.5, -.5, -.5, -.5. Prompt 2: 12, 10, centered 1, -1.
    batch: variance (2.25 + 3 * .25 + 2) / 6 = 5/6, std .9128709 (the raw rewards' std would be 5.6);
    prompt: stds sqrt(3/4) = .8660254 and 1. With ddof 1: batch sqrt(5/5) = 1; prompt sqrt(3/3) = 1 and sqrt(2).
    Rewards that all are 100,000 higher have the same, also in float32, where E[r^2] - E[r]^2 would be good to 1,000."""
    rewards = f64(1, 12, -1, -1, 10, -1)
    ids = torch.tensor([5, 2, 5, 5, 2, 5])
    centered = f64(1.5, 1, -0.5, -0.5, -1, -0.5)
    for how, ddof, std in [
        ("batch", 0, 0.9128709),
        ("batch", 1, 1.0),
        ("prompt", 0, f64(0.8660254, 1, 0.8660254, 0.8660254, 1, 0.8660254)),
        ("prompt", 1, f64(1, 1.4142136, 1, 1, 1.4142136, 1)),
    ]:
        for eps in (0.0, 1.0):
            close(normalize_advantages(rewards, ids, how, eps=eps, ddof=ddof), centered / (std + eps))
        close(normalize_advantages((rewards + 1e5).float(), ids, how, eps=0.0, ddof=ddof).double(), centered / std)
    close(normalize_advantages(rewards, ids, "none"), centered)
    # by default `batch`, population std, and eps 1e-6: the std of these is .913e-6
    close(normalize_advantages(rewards * 1e-6, ids), centered / (0.9128709 + 1))


@pytest.mark.parametrize(("how", "size"), [("batch", 5**0.5), ("prompt", 1), ("none", 1)])
def test_equal_or_single_rewards_give_exactly_zero(how, size):
    """In float32 the mean of seven .1 is off by 7e-9, which a std of 7e-9 would blow up to 1. -.3 lies below the 0 of an
    empty buffer. A group of one row is 0, too. The group that differs has 1 and -1, and all ten rows count: the variance
    of the batch is 2/10."""
    for value in (0.1, -0.3):
        rewards = torch.tensor([value] * 7 + [1.0, -1.0, 5.0])
        *equal, right, wrong, single = normalize_advantages(rewards, torch.tensor([0] * 7 + [1, 1, 2]), how, eps=0.0)
        assert not any(equal)
        assert single == 0
        assert right == -wrong == pytest.approx(size)
    for ddof in (0, 1):  # a batch of one row: 0 / 0
        assert normalize_advantages(torch.ones(1), torch.zeros(1), how, eps=0.0, ddof=ddof) == 0


def test_cispo_by_hand():
    """Row 1, A = 1, pi_gen = (.1, .05), pi = (.2, .5): rho = 2 and 10, capped at 5.
    Row 2, A = -2, pi_gen = .4, pi = .04: rho = .1, no lower cap; its second token is not trained.
    loss = -w A log pi:  -2 ln .2 = 3.218876,  -5 ln .5 = 3.465736,  +.2 ln .04 = -.643775.
    gradient = -w A: -2, -5, +.2. What is logged is before truncation: rho adds up to 12.1, rho^2 to 104.01, and
    (ln rho)^2 to .480453 + 5.301898 + 5.301898 = 11.084249."""
    logprobs = f64([0.2, 0.5], [0.04, 0.9]).log()
    behaviour = f64([0.1, 0.05], [0.4, 0.1]).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    token_loss, metrics, grad = run("cispo", logprobs, behaviour, f64(1, -2), mask)
    close(token_loss, f64([3.218876, 3.465736], [-0.643775, 0]))
    close(grad, f64([-2, -5], [0.2, 0]))
    expected = {
        "ratio_mean": 12.1 / 3,
        "ratio_max": 10,
        "log_ratio_rms": (11.084249 / 3) ** 0.5,
        "ess": 12.1**2 / (3 * 104.01),
        "capped_positive": 0.5,
        "capped_negative": 0,
    }
    parts = [run("cispo", logprobs[i], behaviour[i], A, mask[i])[1] for i, A in (([0], f64(1)), ([1], f64(-2)))]
    for whole in metrics, merge_metrics(parts):
        assert summarize_metrics(whole) == pytest.approx(expected)
        assert (whole["tokens"], whole["tokens_positive"], whole["tokens_negative"]) == (3, 2, 1)


@pytest.mark.parametrize("name", ["dapo", "tis", "gspo"])
def test_clip_quadrants(name):
    """eps_low = .4, eps_high = .5, A = +-1/2; loss = term * -A, gradient = slope * A."""
    for rho, sign, term, slope in [
        (2.0, 1, 1.5, 0.0),  # above, A > 0: clipped to 1 + eps_high
        (0.1, 1, 0.1, -0.1),  # below, A > 0: free to grow back
        (2.0, -1, 2.0, -2.0),  # above, A < 0: free to shrink back
        (0.1, -1, 0.6, 0.0),  # below, A < 0: clipped to 1 - eps_low
        (1.45, 1, 1.45, -1.45),  # inside above; eps_low and eps_high swapped would clip here
        (0.55, -1, 0.6, 0.0),  # past 1 - eps_low = .6; swapped, with 1 - .5 = .5, would not clip here
    ]:
        a = 0.5 * sign
        token_loss, metrics, grad = run_ratios(name, [rho], [a], eps_low=0.4, eps_high=0.5)
        assert float(token_loss) == pytest.approx(-term * a)
        assert float(grad) == pytest.approx(slope * a)
        assert metrics["capped_positive"] == (slope == 0 and sign > 0)
        assert metrics["capped_negative"] == (slope == 0 and sign < 0)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("dapo", 0.2, 0.26), ("gspo", 3e-3, 4e-3), ("grpo", 0.2, 0.2), ("tis", 0.2, 0.2)],
)
def test_default_clips(name, low, high):
    """DAPO .2/.26 and GSPO 3e-3/4e-3 as ScaleRL ran them, GRPO .2: a hair inside is free, a hair outside is clipped."""
    for sign, bound in (1, 1 + high), (-1, 1 - low):
        _, _, inside = run_ratios(name, [bound - 1e-5 * sign], [sign])
        _, _, outside = run_ratios(name, [bound + 1e-5 * sign], [sign])
        assert inside.any()
        assert not outside.any()


def test_gspo_with_advantages_per_token_is_gspo_token():
    """Two rows of two and three tokens, eps_low = eps_high = .04. Row 1: rho = 1.10 and .88, so s = sqrt(.968) = .9838699,
    inside the clip; A = 2 and -3. Loss and gradient of each token are -s A_t. Row 2 has a third token, rho = 1.2 and
    A = 0: s = (1.1616)^(1/3) = 1.0512, above the clip. It clips the token with A = 2 and not the one with A = -3."""
    behaviour = torch.full((2, 3), -2.0, dtype=torch.float64)
    logprobs = behaviour + f64([1.10, 0.88, 9], [1.10, 0.88, 1.2]).log()
    advantages, mask = f64([2, -3, 9], [2, -3, 0]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    token_loss, metrics, grad = run("gspo", logprobs, behaviour, advantages, mask, eps_low=0.04, eps_high=0.04)
    close(token_loss[0], grad[0])
    close(grad, f64([-2 * 0.9838699, 3 * 0.9838699, 0], [0, 3 * 1.1616 ** (1 / 3), 0]))
    assert (metrics["capped_positive"], metrics["capped_negative"]) == (1, 0)


def test_tis_by_hand():
    """pi_gen = .1, pi_old = .3, pi = .33, A = 2: min(.3/.1, 2) = 2 and q = 1.1, so loss = -2 * 1.1 * 2 = -4.4 and the
    gradient is the same. Second token: pi_old = .15, factor 1.5, q = 1.1: -3.3. Against pi_gen both would be clipped."""
    logprobs, old, behaviour = f64([[0.33, 0.165]], [[0.30, 0.15]], [[0.1, 0.1]]).log()
    token_loss, metrics, grad = run("tis", logprobs, behaviour, f64(2), torch.ones(1, 2), old_logprobs=old)
    close(token_loss, f64([-4.4, -3.3]))
    close(grad, f64([-4.4, -3.3]))
    summary = summarize_metrics(metrics)
    assert summary["tis_capped"] == 0.5
    assert summary["capped_positive"] == 0
    assert summary["ratio_max"] == pytest.approx(3.3)  # pi / pi_gen, as in every loss


def test_aggregation_by_hand():
    """Prompt 7: rows of 1 and 3 tokens; prompt 3: one row of 2; a fourth row, alone in prompt 9, has none.
    sample 1/(|y| * 3 rows) = 1/3, 1/9, 1/6 · prompt 1/(4 * 2 prompts) = 1/8 and 1/(2 * 2) = 1/4 · token 1/6 ·
    constant 10: 1/(10 * 3) = 1/30, constant .25: 1/(.25 * 3) = 4/3."""
    mask = f64([1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0])
    ids = torch.tensor([7, 7, 3, 9])
    for how, of_rows in {
        "sample": (1 / 3, 1 / 9, 1 / 6, 0),
        "prompt": (1 / 8, 1 / 8, 1 / 4, 0),
        "token": (1 / 6,) * 4,
        "constant": (1 / 30,) * 4,
    }.items():
        close(aggregation_weights(mask, ids, how, constant=10), mask * f64(*of_rows)[:, None])
    close(aggregation_weights(mask, ids, "constant", constant=0.25), mask * 4 / 3)
    close(aggregation_weights(mask, ids), aggregation_weights(mask, ids, "prompt"))


@each_loss
@pytest.mark.parametrize("ignored", [-100, -1])
def test_labels_are_no_mask(name, ignored):
    """Labels that leave out the prompt and the padding; as a mask all eight tokens would train, and not three."""
    labels = torch.tensor([[ignored, ignored, 5, 7], [ignored, ignored, ignored, 9]])
    logprobs, ids = torch.full((2, 4), -1.0), torch.tensor([0, 0])
    for mask in (labels, labels.float()):
        with pytest.raises(ValueError, match=r"labels\? Then give labels != -100"):
            run(name, logprobs, logprobs, torch.ones(2), mask)
        for function, other in (aggregation_weights, ids), (lambda mask, x: kl_penalty(x, x, mask), logprobs):
            with pytest.raises(ValueError, match=r"labels\?"):
                function(mask, other)
    assert run(name, logprobs, logprobs, torch.ones(2), labels != ignored)[1]["tokens"] == 3


@each_loss
def test_on_policy_the_same_log_probs_twice(name):
    """rho is 1, and the gradient -A of each token, whatever the loss. One advantage for each row may stand in a column."""
    leaf = f64([-1, -2], [-3, -4]).requires_grad_()
    for advantages in f64(2, -0.5), f64([2], [-0.5]):
        options = {"old_logprobs": leaf} if name == "tis" else {}
        token_loss, metrics = LOSSES[name](leaf, leaf, advantages, torch.ones(2, 2), **options)
        close(torch.autograd.grad(token_loss.sum(), leaf)[0], f64([-2, -2], [0.5, 0.5]))
        assert (metrics["ratio_sum"], metrics["ratio_max"]) == (4, 1)


@pytest.mark.parametrize("name", ["cispo", "dapo"])
def test_packed_rows_as_rows_of_one_token(name):
    """Rows of 1 and 3 tokens of one prompt and a row of 2 of another, end to end: 1/(4 * 2 prompts) = 1/8 and 1/(2 * 2) = 1/4.
    rho is .5, 1, 1.2 in turn, so the gradient is -w rho A. In padded rows a row's weight is one number."""
    rho, advantages, w = f64(0.5, 1, 1.2, 0.5, 1, 1.2), f64(2, -1, -1, -1, 3, 3), f64(1, 1, 1, 1, 2, 2) / 8
    group_of_token, mask = torch.tensor([7, 7, 7, 7, 3, 3]), torch.ones(1, 6, dtype=torch.long)
    weights = aggregation_weights(mask[0][:, None], group_of_token)
    close(weights[:, 0].double(), w)
    packed = torch.full((1, 6), -2.0, dtype=torch.float64)
    logprobs = packed + rho.log()
    _, _, grad = run(name, logprobs[0][:, None], packed[0][:, None], advantages, mask[0][:, None])
    free = f64(1, 1, 1, 0, 1, 1) if name == "dapo" else 1  # DAPO's clip: rho = .5 and A < 0
    close(grad[:, 0], -rho * advantages * free)
    rows = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]])
    padded = aggregation_weights(rows, torch.tensor([7, 7, 3]))
    close(padded.amax(1).double(), f64(1, 1, 2) / 8)
    close(padded, padded.amax(1)[:, None] * rows)


def test_rewards_of_one_prompt_and_as_lists():
    """1, 0, 0, 0: centered .75 and -.25, std sqrt(3)/4 = .4330127. With one prompt that is the batch's and the prompt's."""
    expected = f64(0.75, -0.25, -0.25, -0.25) / 0.4330127
    for kind in (list, np.array, torch.tensor):
        for how in ("batch", "prompt"):
            close(normalize_advantages(kind([1, 0, 0, 0]), kind([5, 5, 5, 5]), how, eps=0.0).double(), expected)


@each_loss
def test_nothing_outside_the_mask_counts(name):
    """A NaN in the padding, in any input, leaves loss, gradient and metrics as they are: 0 * NaN would be NaN."""
    one = f64([-1.0, -2.0], [-0.5, -3.0])
    inputs = [one, one - 0.1, f64([1, 1], [-1, -1])]
    mask = torch.tensor([[1, 1], [1, 0]])
    clean_loss, clean_metrics, clean_grad = run(name, *inputs, mask)
    dirty = [x.masked_fill(mask == 0, math.nan) for x in inputs]
    token_loss, metrics, grad = run(name, *dirty, mask)
    assert torch.equal(token_loss, clean_loss)
    assert torch.equal(grad, clean_grad)
    assert metrics == clean_metrics
    assert token_loss[1, 1] == grad[1, 1] == 0


@each_loss
def test_log_ratio_is_bounded_before_exp(name):
    """In float32 e^300 is inf, and in ess e^-300 would be 0 / 0. The bounds are e^20 and e^-20."""
    near, far = torch.full((1, 1), -1.0), torch.full((1, 1), -301.0)
    for logprobs, behaviour, bound in (near, far, 20), (far, near, -20):
        for sign in (1.0, -1.0):
            token_loss, metrics, grad = run(name, logprobs, behaviour, torch.tensor([sign]), torch.ones(1, 1))
            assert token_loss.isfinite().all()
            assert grad.isfinite().all()
            summary = summarize_metrics(metrics)
            assert summary["ratio_max"] == pytest.approx(math.exp(bound))
            assert summary["log_ratio_rms"] == pytest.approx(20)
            assert summary["ess"] == pytest.approx(1)


def test_kl_by_hand():
    """pi = .5, pi_ref = .25, r = .5: k1 = ln 2, k2 = (ln 2)^2 / 2 = .2402265, k3 = .5 - 1 + ln 2 = .1931472. Their slopes
    in log pi are 1, -log r = ln 2 and 1 - r = .5. Only the policy has a gradient, and the second token is masked."""
    logprobs = f64([0.5, 0.5]).log().requires_grad_()
    reference = f64([0.25, 0.9]).log().requires_grad_()
    mask = torch.tensor([[1, 0]])
    for name, value, slope in ("k1", 0.6931472, 1), ("k2", 0.2402265, 0.6931472), ("k3", 0.1931472, 0.5):
        penalty = kl_penalty(logprobs, reference, mask, name)
        close(penalty, f64([value, 0.0]))
        own, of_reference = torch.autograd.grad(penalty.sum(), [logprobs, reference], allow_unused=True)
        close(own, f64([slope, 0.0]))
        assert of_reference is None
    assert torch.equal(kl_penalty(logprobs, reference, mask), penalty)  # k3 is the default


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_with_the_sampling_term_has_the_gradient_of_the_kl(estimator):
    """Oracle: enumerate all 5 actions y sampled by pi. sum_y pi(y) grad kl(y) must be the gradient of KL(pi || pi_ref) by
    autograd. Without the term k1's is 0. The value stays, and a token outside the mask has none."""
    logits, reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.requires_grad_()
    logprobs, reference = logits.log_softmax(0), reference.log_softmax(0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    rows = logprobs[:, None], reference[:, None], torch.ones(5, 1)
    kl = kl_penalty(*rows, estimator, sampling_term=True)
    assert torch.equal(kl, kl_penalty(*rows, estimator))
    (grad,) = torch.autograd.grad((logprobs.exp().detach()[:, None] * kl).sum(), logits, retain_graph=True)
    torch.testing.assert_close(grad, expected)
    assert not kl_penalty(*rows[:2], torch.zeros(5, 1), estimator, sampling_term=True).any()


@each_loss
def test_expected_gradient_is_the_policy_gradient(name):
    """Oracle: enumerate all 5 actions sampled by mu. With limits out of reach, sum_y mu(y) * grad loss(y) must be
    -grad of E_{y~pi}[A(y)] = sum_y pi(y) A(y), computed by autograd on the logits: off-policy sampling is undone."""
    logits, mu, advantages, change = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mu = mu.log_softmax(0)
    old = (logits + 0.2 * change).log_softmax(0)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(-(logits.softmax(0) * advantages).sum(), logits)
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    options = {parameter.name: 1e6 for parameter in parameters if isinstance(parameter.default, float)}
    if name == "tis":
        options["old_logprobs"] = old[:, None]
    # five rows of one token: row y is the action y
    token_loss, _ = LOSSES[name](logits.log_softmax(0)[:, None], mu[:, None], advantages, torch.ones(5, 1), **options)
    (grad,) = torch.autograd.grad((mu.exp()[:, None] * token_loss).sum(), logits)
    torch.testing.assert_close(grad, expected)
