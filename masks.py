"""Masks: which stale tokens still count.

PROBLEM. A token of an old policy, or of a generator that computes otherwise, has a ratio rho = pi / pi_gen far from 1.
A loss limits how much it weighs (losses.py). But at any weight it may say little about the current policy.

IDEA. Drop it. A mask is multiplied into a loss: 0 where a token no longer counts, 1 where it does.

    mask        drops, for A > 0              drops, for A < 0              low, high   source
    truncate    nothing: scales rho down to `high`, in a loss without a cap      2      Yao et al. 2025
    icepop      rho outside [low, high]       the same                      .5   5      IcePop; GLM-5, 2602.15763
    sequence    the row, if the product of its rho is outside [low, high]   .5   2      Liu et al. 2025
    geometric   the row, if their geometric mean is outside [low, high]     .99  1.01   Liu et al. 2025
    deepseek    nothing                       the row, if the mean of            .5     DeepSeek-V3.2, 2512.02556;
                                              log pi_gen - log pi > high                the number is TRL's
    dppo        pi - pi_gen > high            pi_gen - pi > high                 .2     DPPO, 2602.04879
    dppo_kl     KL > high and pi > pi_gen     KL > high and pi < pi_gen          .05    DPPO
    m2po        of the tokens with rho > 1    of those with rho < 1              .04    M2PO, 2510.01161
                those with the largest (log rho)^2, until the mean of the others is at most `high`

`dppo` measures the probability that has moved, and no ratio: 1e-4 that became 1e-3 has moved by .0009 and stays, .61
that became .3 goes, if A < 0. `dppo`, `dppo_kl` and `m2po` drop only what has moved as A pushes it, as PPO's clip does.
L6: what is dropped stays in the denominators of `aggregation_weights`, so a step shrinks with what is dropped.

SYMBOLS. N rows (completions) · T positions, padded · A advantage · pi, pi_gen the trainer's and the generator's
probability of the sampled token · KL of the two distributions "this token, or another" · mask 1 on tokens that train.

SIMPLIFIED. Weights carry no gradient. L7: `m2po` looks at the rows that it is given, so it depends on how a batch is
cut into microbatches. The masks on rows take rows packed end to end for one.

>>> now, then = torch.tensor([[0.30, 1e-3]]).log(), torch.tensor([[0.61, 1e-4]]).log()  # rho = 0.49 and 10
>>> for name in ("icepop", "dppo", "m2po"):
...     kept = [MASKS[name](now, then, torch.tensor([A]), torch.ones(1, 2))[0].tolist()[0] for A in (1.0, -1.0)]
...     print(f"{name:7} A > 0 {kept[0]}   A < 0 {kept[1]}")
icepop  A > 0 [0.0, 0.0]   A < 0 [0.0, 0.0]
dppo    A > 0 [1.0, 1.0]   A < 0 [0.0, 1.0]
m2po    A > 0 [1.0, 0.0]   A < 0 [0.0, 1.0]
"""

import functools
from collections.abc import Callable
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

    @property
    def mean_log_rho(self) -> Tensor:
        """(N, 1) over the trained tokens of each row."""
        return self.log_rho.sum(-1, keepdim=True) / self.trained.sum(-1, keepdim=True).clamp_min(1)


def on_batches(rule: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Gives a rule the arguments of a loss.

    Args:
        logprobs, behaviour_logprobs, advantages, mask: as in losses.py; what lies outside the mask changes nothing.
        thresholds: `low` and `high` of the rule, from 0 to infinity.
    Returns (what is kept of each token (N, T) from 0 to 1, float32 at least, 0 outside the mask; metrics: `kept` counts
    tokens above 0, `masked_positive` and `masked_negative` those below 1 where A > 0 and A < 0).
    Raises ValueError for shapes that do not agree, a threshold below 0, and `low` above `high`.
    """

    @functools.wraps(rule)
    def weigh(
        logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, **thresholds: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shapes = [tuple(x.shape) for x in (logprobs, behaviour_logprobs, mask, advantages)]
        if logprobs.dim() != 2 or shapes[:3] != [shapes[0]] * 3 or shapes[3] not in (shapes[0], shapes[0][:1]):
            raise ValueError(f"expected logprobs, behaviour_logprobs, mask (N, T); advantages (N,) or (N, T): {shapes}")
        if not 0 <= (limits := {"low": 0.0} | (rule.__kwdefaults__ or {}) | thresholds)["low"] <= limits["high"]:
            raise ValueError(f"{rule.__name__} needs 0 <= low <= high, and has {limits}.")
        trained = mask.bool()  # (N, T)
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]  # (N, T) or (N, 1)
        now, then, a = (torch.where(trained, x.detach().double(), 0.0)
                        for x in (logprobs, behaviour_logprobs, advantages))  # fmt: skip
        tokens = Tokens(now.exp(), then.exp(), (now - then).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), a, trained)
        kept = torch.where(trained, rule(tokens, **thresholds).double(), 0.0)  # (N, T)
        masked = trained & (kept < 1)  # (N, T)
        counts = {"kept": kept > 0, "masked_positive": masked & (a > 0), "masked_negative": masked & (a < 0)}
        metrics = {name: where.sum() for name, where in counts.items()}
        return kept.to(torch.promote_types(logprobs.dtype, torch.float32)), metrics

    return weigh


@on_batches
def truncate(x: Tokens, *, high: float = 2.0) -> Tensor:
    """min(1, high / rho): a factor rho becomes min(rho, high). For a loss that has no such cap of its own."""
    return (high / x.log_rho.exp()).clamp(max=1)


@on_batches
def icepop(x: Tokens, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """1[low <= rho <= high] of each token."""
    return (low <= x.log_rho.exp()) & (x.log_rho.exp() <= high)


@on_batches
def sequence(x: Tokens, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """1[low <= prod_t rho_t <= high] for all tokens of a row."""
    product = x.log_rho.sum(-1, keepdim=True).exp()  # (N, 1)
    return (low <= product) & (product <= high)


@on_batches
def geometric(x: Tokens, *, low: float = 0.99, high: float = 1.01) -> Tensor:
    """1[low <= (prod_t rho_t)^(1/n) <= high] for all n tokens of a row."""
    mean = x.mean_log_rho.exp()  # (N, 1)
    return (low <= mean) & (mean <= high)


@on_batches
def deepseek(x: Tokens, *, high: float = 0.5) -> Tensor:
    """0 for a row with A < 0 and 1/n sum_t (log pi_gen - log pi) > high."""
    return ~((x.advantages < 0) & (-x.mean_log_rho > high))


@on_batches
def dppo(x: Tokens, *, high: float = 0.2) -> Tensor:
    """0 where pi has moved as A pushes it, by more than `high`: pi - pi_gen for A > 0, pi_gen - pi for A < 0."""
    return ~((x.pi - x.pi_gen) * x.advantages.sign() > high)


@on_batches
def dppo_kl(x: Tokens, *, high: float = 0.05) -> Tensor:
    """`dppo` by KL( (pi_gen, 1 - pi_gen) || (pi, 1 - pi) )."""
    others = (1 - x.pi_gen) * ((1 - x.pi_gen).clamp_min(1e-8) / (1 - x.pi).clamp_min(1e-8)).log()  # (N, T)
    return ~((others - x.pi_gen * x.log_rho > high) & (x.log_rho * x.advantages > 0))


@on_batches
def m2po(x: Tokens, *, high: float = 0.04) -> Tensor:
    """0 for the tokens with the largest (log rho)^2, as few as make the mean of the others at most `high`. Only tokens
    that have moved as A pushes them are looked at and dropped."""
    moved = x.log_rho * x.advantages > 0  # (N, T)
    squares, order = torch.where(moved, x.log_rho.square(), torch.inf).flatten().sort()  # (N T,), the others last
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)  # they only grow
    return ~moved | torch.empty_like(moved).flatten().scatter(0, order, means <= high).view_as(moved)


MASKS = {mask.__name__: mask for mask in (truncate, icepop, sequence, geometric, deepseek, dppo, dppo_kl, m2po)}

if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index(">>>") :])
    raise SystemExit(doctest.testmod().failed)
