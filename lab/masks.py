"""Masks and other losses for stale tokens, as `--loss lab.masks:NAME`.

PROBLEM. A token that was sampled by an old policy, or by a generator whose numbers differ, can have a ratio
rho = pi / pi_gen far from 1. A loss limits how much such a token weighs (losses.py). But at any weight it may say
little about the current policy.

IDEA. Drop it. A mask is a weight on the loss of each token: 0 where the token no longer counts, 1 where it does.

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
tokens that moved in the direction in which A pushes them.

AS A LOSS. Each name of the table is the mask's weights times the token loss of `cispo`, but for `truncate`: it caps rho
in a loss that does not, so it goes with `dapo`. The runs of lab/results/staleness.md were of these pairs. (At a37976d
`--mask` went with any loss. For a pair that is missing here, write `mine = masked("icepop", dapo)` in a module of your
own, and name it: `--loss my_module:mine`.) Two more losses, `dispo` and `maxrl`, stand below the masks.

SYMBOLS. N rows (completions) · T positions, padded · A advantage · pi, pi_gen the trainer's and the generator's
probability of the sampled token · KL of the two distributions "this token, or another" · mask 1 on tokens that train.

SIMPLIFIED. Weights carry no gradient. `sequence`, `geometric` and `deepseek` treat a row as one sequence, even where
several are packed end to end. The thresholds have no flags: `icepop_3 = functools.partial(icepop, high=3.0)`.

CHOICES, where papers are silent or differ. L6: what a mask drops stays in the denominators of `aggregation_weights`, so
the more is dropped, the smaller the step. L7: M2PO does not say which tokens share a limit; here those of the call that
moved as A pushes them. L8: MaxRL divides by the pass rate, which a loss reads off the advantage. L9: DISPO tunes four
bounds, by a summary .2, 10, 1, 100; ours are .2 and .28 for right answers, 1 and 4 for wrong ones.

NEEDS losses.py of the folder above.

>>> now, then = torch.tensor([[0.30, 1e-3]]).log(), torch.tensor([[0.61, 1e-4]]).log()  # rho = 0.49 and 10
>>> for name in ("icepop", "dppo", "m2po"):
...     kept = [MASKS[name](now, then, torch.tensor([A]), torch.ones(1, 2))[0].tolist()[0] for A in (1.0, -1.0)]
...     print(f"{name:7} A > 0 {kept[0]}   A < 0 {kept[1]}")
icepop  A > 0 [0.0, 0.0]   A < 0 [0.0, 0.0]
dppo    A > 0 [1.0, 1.0]   A < 0 [0.0, 1.0]
m2po    A > 0 [1.0, 0.0]   A < 0 [0.0, 1.0]
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import losses
from losses import MAX_LOG_RATIO, LossAndMetrics, cispo, dapo


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


# The rules: weights of the tokens, (N, T), or (N, 1) where a row stays or goes as one.
def truncate_rule(tokens: Tokens, high: float) -> Tensor:
    """min(1, high / rho): turns a factor rho into min(rho, high)."""
    return (high / tokens.log_rho.exp()).clamp(max=1)


def icepop_rule(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= rho <= high] for each token."""
    rho = tokens.log_rho.exp()  # (N, T)
    return (low <= rho) & (rho <= high)


def sequence_rule(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= prod_t rho_t <= high] for all tokens of a row."""
    product = tokens.log_rho.sum(-1, keepdim=True).exp()  # (N, 1)
    return (low <= product) & (product <= high)


def geometric_rule(tokens: Tokens, low: float, high: float) -> Tensor:
    """1[low <= (prod_t rho_t)^(1/n) <= high] for all n tokens of a row."""
    mean = tokens.mean_log_rho().exp()  # (N, 1)
    return (low <= mean) & (mean <= high)


def deepseek_rule(tokens: Tokens, high: float) -> Tensor:
    """0 for a row with A < 0 and 1/n sum_t (log pi_gen - log pi) > high."""
    drift = -tokens.mean_log_rho()  # (N, 1)
    return ~((tokens.advantages < 0) & (drift > high))


def dppo_rule(tokens: Tokens, high: float) -> Tensor:
    """0 where pi moved by more than `high` in the direction of A: pi - pi_gen for A > 0, pi_gen - pi for A < 0."""
    moved = (tokens.pi - tokens.pi_gen) * tokens.advantages.sign()  # (N, T)
    return ~(moved > high)


def dppo_kl_rule(tokens: Tokens, high: float) -> Tensor:
    """0 where pi moved in the direction of A, and KL( (pi_gen, 1 - pi_gen) || (pi, 1 - pi) ) > high."""
    # KL = pi_gen log(pi_gen / pi) + (1 - pi_gen) log( (1 - pi_gen) / (1 - pi) ), the second term bounded near pi = 1
    others = 1 - tokens.pi  # (N, T)
    others_gen = 1 - tokens.pi_gen  # (N, T)
    log_others = (others_gen.clamp_min(1e-8) / others.clamp_min(1e-8)).log()  # (N, T)
    kl = others_gen * log_others - tokens.pi_gen * tokens.log_rho  # (N, T)
    moved = tokens.log_rho * tokens.advantages > 0  # (N, T)
    return ~((kl > high) & moved)


def m2po_rule(tokens: Tokens, high: float) -> Tensor:
    """0 for the tokens with the largest (log rho)^2, as few as make the mean of the others at most `high`.

    Only tokens that moved in the direction of A are looked at and dropped. THE PRICE of a mask inside a loss: M2PO
    compares the tokens of a whole batch, and here each microbatch is compared by itself.
    """
    moved = tokens.log_rho * tokens.advantages > 0  # (N, T)
    squares = tokens.log_rho[moved].square()  # (K,), of the K tokens that moved
    ascending, places = squares.sort()  # (K,), and where each of them stands in `squares`
    # mean_n = 1/n (sum of the n smallest) can only grow with n, so the means of at most `high` are the first ones.
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)  # (K,)
    kept = torch.zeros_like(squares)  # (K,)
    kept[places[means <= high]] = 1
    weights = torch.ones_like(tokens.log_rho)  # (N, T): what did not move stays
    weights[moved] = kept
    return weights


def weigh(
    rule: Callable[..., Tensor],
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    **thresholds: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Applies one of the rules above. `MASKS[name]` is this function with a rule and its default thresholds.

    Args:
        logprobs, behaviour_logprobs, advantages, mask: as in losses.py; what lies outside the mask changes nothing.
        thresholds: `low` and `high` of the rule, from 0 to infinity.
    Returns (weights (N, T) from 0 to 1, at least float32, 0 outside the mask; metrics: `kept` counts the tokens with a
    weight above 0, `masked_positive` and `masked_negative` those with one below 1 where A > 0 and where A < 0).
    Raises ValueError for shapes that do not agree, a threshold below 0, or `low` above `high`; TypeError for a
    threshold that the rule does not have.
    """
    limits = {"low": 0.0} | thresholds
    if not 0 <= limits["low"] <= limits["high"]:
        raise ValueError(f"{rule.__name__.removesuffix('_rule')} needs 0 <= low <= high, and has {limits}.")
    wide = [x.detach().double() for x in (advantages, logprobs, behaviour_logprobs)]
    trained, advantages, now, then = losses._select(mask, *wide)  # (N, T) each, float64, 0 outside the mask
    log_rho = (now - then).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (N, T)
    weights = rule(Tokens(now.exp(), then.exp(), log_rho, advantages, trained), **thresholds)  # (N, T) or (N, 1)
    weights = torch.where(trained, weights.double(), 0.0)  # (N, T)
    masked = trained & (weights < 1)  # (N, T)
    metrics = {
        "kept": (weights > 0).sum(),
        "masked_positive": (masked & (advantages > 0)).sum(),
        "masked_negative": (masked & (advantages < 0)).sum(),
    }
    return weights.to(torch.promote_types(logprobs.dtype, torch.float32)), metrics


MASKS = {
    "truncate": partial(weigh, truncate_rule, high=2.0),
    "icepop": partial(weigh, icepop_rule, low=0.5, high=5.0),
    "sequence": partial(weigh, sequence_rule, low=0.5, high=2.0),
    "geometric": partial(weigh, geometric_rule, low=0.99, high=1.01),
    "deepseek": partial(weigh, deepseek_rule, high=0.5),
    "dppo": partial(weigh, dppo_rule, high=0.2),
    "dppo_kl": partial(weigh, dppo_kl_rule, high=0.05),
    "m2po": partial(weigh, m2po_rule, high=0.04),
}


def masked(name: str, token_loss_of: Callable[..., LossAndMetrics] = cispo) -> Callable[..., LossAndMetrics]:
    """A mask as a loss: its weights times the token loss of `cispo` or another, with the metrics of both.

    What comes out has the arguments, results and errors of `losses.cispo`; its options are the mask's thresholds.
    """

    def loss(
        logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, **thresholds: float
    ) -> LossAndMetrics:
        rows = logprobs, behaviour_logprobs, advantages, mask
        token_loss, metrics = token_loss_of(*rows)  # (N, T)
        weights, counts = MASKS[name](*rows, **thresholds)  # (N, T)
        return weights * token_loss, metrics | counts

    loss.__name__ = name
    return loss


truncate = masked("truncate", dapo)
icepop = masked("icepop")
sequence = masked("sequence")
geometric = masked("geometric")
deepseek = masked("deepseek")
dppo = masked("dppo")
dppo_kl = masked("dppo_kl")
m2po = masked("m2po")


def dispo(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low=0.2,
    eps_high=0.28,
    eps_low_wrong=1.0,
    eps_high_wrong=4.0,
) -> LossAndMetrics:
    """CISPO with four bounds: [1 - eps_low, 1 + eps_high] where A > 0, and those of `_wrong` elsewhere.

    The paper (arXiv 2602.00983) saw narrow bounds on wrong answers collapse a run. L9: the numbers are ours, DAPO's for
    right answers and ScaleRL's cap of 5 for wrong ones. The rest is as in `losses.cispo`.
    """
    trained, advantages, now, then = losses._select(mask, advantages, logprobs, behaviour_logprobs)  # (N, T) each
    rho = losses._bounded_exp(now - then)  # (N, T)
    # token loss = - sg(clip(rho, 1 - eps_low, 1 + eps_high)) * A * log pi, with the bounds that belong to the sign of A
    right = rho.clamp(1 - eps_low, 1 + eps_high)  # (N, T)
    wrong = rho.clamp(1 - eps_low_wrong, 1 + eps_high_wrong)  # (N, T)
    weight = torch.where(advantages > 0, right, wrong).detach()  # (N, T)
    return -weight * advantages * now, losses._metrics(now - then, weight != rho, advantages, trained)


# The bounds of the seven runs each in lab/results/staleness.md, "Which bound keeps a run standing?"
dispo_right_above = partial(dispo, eps_low=0.2, eps_high=4.0)
dispo_right_below = partial(dispo, eps_low=1.0, eps_high=0.28)
dispo_paper = partial(dispo, eps_low=0.2, eps_high=10.0, eps_low_wrong=1.0, eps_high_wrong=100.0)


def maxrl(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, gap=None, eps_max=5.0
) -> LossAndMetrics:
    """CISPO with advantages divided by the pass rate p, as the gradient of log p asks for (MaxRL, arXiv 2602.02710).

    L8: a loss sees no groups, but with `--normalize_advantages none` and rewards of two values that lie `gap` apart an
    advantage tells its group's pass rate: A = gap (1 - p) for a right answer and -gap p for a wrong one. Divided by gap
    p these are (1 - p) / p and -1; where all are equal, A stays 0. Without `gap` the call is asked (`reward_gap`). Give
    it where microbatches cut groups: `maxrl_01` is for rewards of 0 and 1. The rest is as in `losses.cispo`. Raises
    ValueError for an advantage that no such rewards can have.
    """
    token_loss, metrics = cispo(logprobs, behaviour_logprobs, advantages, mask, eps_max=eps_max)  # (N, T), linear in A
    _, advantages, _ = losses._select(mask, advantages, logprobs)  # (N, T) each
    if gap is None:
        gap = reward_gap(advantages)
    if (advantages.abs() >= gap).any():
        largest = advantages.abs().max()
        raise ValueError(
            f"maxrl: an advantage of +-{largest:.3f} is none of rewards that lie {gap} apart: give "
            "--normalize_advantages none, and rewards of two values."
        )
    # gap p = gap - A for A > 0, and -A for A < 0
    divisor = torch.where(advantages > 0, gap - advantages, -advantages)  # (N, T)
    return token_loss / torch.where(advantages == 0, 1.0, divisor), metrics


def reward_gap(advantages: Tensor) -> float:
    """1 for rewards of 0 and 1, 2 for 1 and -1, as a whole group of centered rewards tells: of two values 2 apart, one
    lies 1 or more from their mean; of 0 and 1 none does, and right answers lie 1 above wrong ones. Warns, and takes 2,
    where right answers without their group leave it open. Wrong answers alone weigh -1 in any case."""
    right = advantages[advantages > 0].unique()
    wrong = advantages[advantages < 0].unique()
    if (advantages.abs() >= 1).any() or not len(right):
        return 2.0
    if torch.isclose(right[:, None] - 1, wrong, atol=1e-4).any():
        return 1.0
    unsure = "maxrl: no whole group tells whether rewards lie 1 or 2 apart: took 2; maxrl_01 is for rewards of 0 and 1."
    warnings.warn(unsure, stacklevel=2)
    return 2.0


maxrl_01 = partial(maxrl, gap=1.0)


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index(">>>") :])
    raise SystemExit(doctest.testmod().failed)
