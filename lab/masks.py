"""Masks: which stale tokens still count.

PROBLEM. A token that was sampled by an old policy, or by a generator whose numbers differ, can have a ratio
rho = pi / pi_gen far from 1. A loss limits how much such a token weighs (losses.py). But at any weight it may say
little about the current policy.

IDEA. Drop it. A mask multiplies the loss of each token: by 0 where the token no longer counts, by 1 where it does.

    mask        drops, for A > 0              drops, for A < 0              low, high   source
    truncate    nothing: scales rho down to `high`, in a loss without a cap      2      Yao et al. 2025
    icepop      rho outside [low, high]       the same                      .5   5      IcePop; also GLM-5, 2602.15763
    sequence    the row, if the product of its rho is outside [low, high]   .5   2      Liu et al. 2025
    geometric   the row, if their geometric mean is outside [low, high]     .99  1.01   Liu et al. 2025; users of verl
                                                                                        have .001 to .01 on each side
    deepseek    nothing                       the row, if the mean of            .5     DeepSeek-V3.2, 2512.02556, has
                                              log pi_gen - log pi > high                no number; this is TRL's
    dppo        pi - pi_gen > high            pi_gen - pi > high                 .2     DPPO, 2602.04879; the number is
                                                                                        prime-rl's; verl's script: .15
    dppo_kl     KL > high and pi > pi_gen     KL > high and pi < pi_gen          .05    DPPO; the number is verl's
    m2po        of the tokens with rho > 1    of those with rho < 1              .04    M2PO, 2510.01161
                those with the largest (log rho)^2, until the mean of the others is at most `high`

`dppo` looks at the change in probability, not at the ratio. A token that went from 1e-4 to 1e-3 moved by only .0009 and
is kept; one that went from .61 to .3 is dropped if A < 0. Like PPO's clip, `dppo`, `dppo_kl` and `m2po` drop only
tokens that moved in the direction in which A pushes them. L6: dropped tokens stay in the denominators of
`aggregation_weights`, so the more are dropped, the smaller the step.

SYMBOLS. N rows (completions) · T positions, padded · A advantage · pi, pi_gen the trainer's and the generator's
probability of the sampled token · KL of the two distributions "this token, or another" · mask 1 on tokens that train.

SIMPLIFIED. Weights carry no gradient. L7: `m2po` compares all tokens that it is given, so give it the whole batch and
not a microbatch. `sequence`, `geometric` and `deepseek` treat a row as one sequence, even where several are packed end
to end.

>>> now, then = torch.tensor([[0.30, 1e-3]]).log(), torch.tensor([[0.61, 1e-4]]).log()  # rho = 0.49 and 10
>>> for name in ("icepop", "dppo", "m2po"):
...     kept = [MASKS[name](now, then, torch.tensor([A]), torch.ones(1, 2))[0].tolist()[0] for A in (1.0, -1.0)]
...     print(f"{name:7} A > 0 {kept[0]}   A < 0 {kept[1]}")
icepop  A > 0 [0.0, 0.0]   A < 0 [0.0, 0.0]
dppo    A > 0 [1.0, 1.0]   A < 0 [0.0, 1.0]
m2po    A > 0 [1.0, 0.0]   A < 0 [0.0, 1.0]
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # as in losses.py: no exp overflows


class Tokens(NamedTuple):
    """What a rule sees of a batch, (N, T) each in float64; log_rho and advantages are 0 where `trained` is False."""

    pi: Tensor
    pi_gen: Tensor
    log_rho: Tensor
    advantages: Tensor
    trained: Tensor

    def mean_log_rho(self) -> Tensor:
        """(N, 1) over the trained tokens of each row."""
        length = self.trained.sum(-1, keepdim=True).clamp_min(1)  # (N, 1)
        return self.log_rho.sum(-1, keepdim=True) / length


def weigh(
    rule: Callable[..., Tensor],
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    **thresholds: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Applies one of the rules below. `MASKS[name]` is this function with a rule and its default thresholds.

    Args:
        logprobs, behaviour_logprobs, advantages, mask: as in losses.py; what lies outside the mask changes nothing.
        thresholds: `low` and `high` of the rule, from 0 to infinity.
    Returns (weights (N, T) from 0 to 1, at least float32, 0 outside the mask; metrics: `kept` counts the tokens with a
    weight above 0, `masked_positive` and `masked_negative` those with one below 1 where A > 0 and where A < 0).
    Raises ValueError for shapes that do not agree, a threshold below 0, or `low` above `high`; TypeError for a
    threshold that the rule does not have.
    """
    shape = logprobs.shape
    equal = shape == behaviour_logprobs.shape == mask.shape
    if len(shape) != 2 or not equal or advantages.shape not in (shape, shape[:1]):
        shapes = [tuple(x.shape) for x in (logprobs, behaviour_logprobs, mask, advantages)]
        raise ValueError(f"expected logprobs, behaviour_logprobs, mask (N, T); advantages (N,) or (N, T): {shapes}")
    limits = {"low": 0.0} | thresholds
    if not 0 <= limits["low"] <= limits["high"]:
        raise ValueError(f"{rule.__name__} needs 0 <= low <= high, and has {limits}.")

    trained = mask.bool()  # (N, T)

    def inside(x: Tensor) -> Tensor:
        return torch.where(trained, x.detach().double(), 0.0)  # (N, T), 0 outside the mask

    now = inside(logprobs)  # (N, T)
    then = inside(behaviour_logprobs)  # (N, T)
    advantages = inside(advantages if advantages.dim() == 2 else advantages[:, None])  # (N, T)
    log_rho = (now - then).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (N, T)

    weights = rule(Tokens(now.exp(), then.exp(), log_rho, advantages, trained), **thresholds)  # (N, T) or (N, 1)
    weights = torch.where(trained, weights.double(), 0.0)  # (N, T)
    metrics = counts(weights, advantages, trained)
    return weights.to(torch.promote_types(logprobs.dtype, torch.float32)), metrics


def counts(weights: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The metrics of `weigh`, for weights (N, T), advantages (N, T) or (N, 1), mask (N, T); those of parts add up."""
    masked = mask.bool() & (weights < 1)  # (N, T)
    return {
        "kept": (weights > 0).sum(),
        "masked_positive": (masked & (advantages > 0)).sum(),
        "masked_negative": (masked & (advantages < 0)).sum(),
    }


# The rules: weights of the tokens, (N, T), or (N, 1) where a row stays or goes as one.
def truncate(tokens: Tokens, high: float) -> Tensor:
    """min(1, high / rho): turns a factor rho into min(rho, high). For a loss that has no such cap of its own."""
    return (high / tokens.log_rho.exp()).clamp(max=1)


def icepop(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= rho <= high] for each token."""
    rho = tokens.log_rho.exp()  # (N, T)
    return (low <= rho) & (rho <= high)


def sequence(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= prod_t rho_t <= high] for all tokens of a row."""
    product = tokens.log_rho.sum(-1, keepdim=True).exp()  # (N, 1)
    return (low <= product) & (product <= high)


def geometric(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= (prod_t rho_t)^(1/n) <= high] for all n tokens of a row."""
    mean = tokens.mean_log_rho().exp()  # (N, 1)
    return (low <= mean) & (mean <= high)


def deepseek(tokens: Tokens, high: float) -> Tensor:
    """0 for a row with A < 0 and 1/n sum_t (log pi_gen - log pi) > high."""
    drift = -tokens.mean_log_rho()  # (N, 1)
    return ~((tokens.advantages < 0) & (drift > high))


def dppo(tokens: Tokens, high: float) -> Tensor:
    """0 where pi moved by more than `high` in the direction of A: pi - pi_gen for A > 0, pi_gen - pi for A < 0."""
    moved = (tokens.pi - tokens.pi_gen) * tokens.advantages.sign()  # (N, T)
    return ~(moved > high)


def dppo_kl(tokens: Tokens, high: float) -> Tensor:
    """0 where pi moved in the direction of A, and KL( (pi_gen, 1 - pi_gen) || (pi, 1 - pi) ) > high."""
    # KL = pi_gen log(pi_gen / pi) + (1 - pi_gen) log( (1 - pi_gen) / (1 - pi) ), the second term bounded near pi = 1
    others = 1 - tokens.pi  # (N, T)
    others_gen = 1 - tokens.pi_gen  # (N, T)
    log_others = (others_gen.clamp_min(1e-8) / others.clamp_min(1e-8)).log()  # (N, T)
    kl = others_gen * log_others - tokens.pi_gen * tokens.log_rho  # (N, T)
    moved = tokens.log_rho * tokens.advantages > 0  # (N, T)
    return ~((kl > high) & moved)


def m2po(tokens: Tokens, high: float) -> Tensor:
    """0 for the tokens with the largest (log rho)^2, as few as make the mean of the others at most `high`.

    Only tokens that moved in the direction of A are looked at and dropped.
    """
    moved = tokens.log_rho * tokens.advantages > 0  # (N, T)
    squares = torch.where(moved, tokens.log_rho.square(), torch.inf).flatten()  # (N T,), all others come last
    ascending, order = squares.sort()
    # The mean of the n smallest squares only grows with n, so those with a mean of at most `high` come first.
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)  # (N T,)
    small = torch.empty_like(moved).flatten().scatter(0, order, means <= high)  # (N T,)
    return ~moved | small.view_as(moved)


MASKS = {
    "truncate": partial(weigh, truncate, high=2.0),
    "icepop": partial(weigh, icepop, low=0.5, high=5.0),
    "sequence": partial(weigh, sequence, low=0.5, high=2.0),
    "geometric": partial(weigh, geometric, low=0.99, high=1.01),
    "deepseek": partial(weigh, deepseek, high=0.5),
    "dppo": partial(weigh, dppo, high=0.2),
    "dppo_kl": partial(weigh, dppo_kl, high=0.05),
    "m2po": partial(weigh, m2po, high=0.04),
}

if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index(">>>") :])
    raise SystemExit(doctest.testmod().failed)
