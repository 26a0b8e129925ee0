"""What ScaleRL's functions must give: the papers' equations in plain float64 loops, for conformance.py.

Slow on purpose, and computed otherwise than losses.py, which it is held against: a loop over tokens, no tensor algebra
and no autograd. The gradient of every policy loss here is, token by token,

    d(loss) / d(log π) = -(weight of the token) · (factor of the token) · A

where the weight comes from the average (`token_weight`) and the factor from the loss (`token_factor`).
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("logprobs", "behaviour", "old", "mask", "advantages", "group_ids")


@dataclass
class Batch:
    """Rows of one optimizer step: all of them, or a microbatch of n."""

    logprobs: Tensor  # (n, T) log π, which has the gradient
    behaviour: Tensor  # (n, T) log π_gen, the generator's own
    old: Tensor  # (n, T) log π_old, the trainer's before the first update on this batch
    mask: Tensor  # (n, T) 1 on tokens that train
    advantages: Tensor  # (n,)
    group_ids: Tensor  # (n,)
    layout: list[list[list[int]]]  # for each rank its microbatches, each a list of rows
    loss: str = "on_policy"
    options: dict[str, float] = field(default_factory=dict)
    average: str = "token"
    constant: float = 10.0  # L_max of the constant average
    dropped: list[int] = field(default_factory=list)  # rows whose group has equal rewards
    rows: list[int] = field(default_factory=list)  # which rows of the step these are
    parts: int = 1  # microbatches on this rank
    ranks: int = 1


def token_factor(step: Batch, row: int, t: int) -> float:
    """What stands before A ∇log π of one token."""
    name, limits = step.loss, step.options
    A = float(step.advantages[row])
    pi = math.exp(step.logprobs[row, t])
    pi_gen = math.exp(step.behaviour[row, t])
    old_ratio = math.exp(step.old[row, t]) / pi_gen  # π_old / π_gen
    rho = pi / pi_gen
    logs = [float(step.logprobs[row, i] - step.behaviour[row, i]) for i in tokens_of(step, row)]
    mean_log = sum(logs) / len(logs)
    if name == "on_policy":
        return 1.0
    if name == "cispo":  # 2510.13786 Eq. 4: sg(min(ρ, ε_max)) A log π
        return max(min(rho, limits["cap"]), limits.get("floor", 0.0))
    if name == "two caps":  # the two halves of ρ are capped apart
        return min(rho / old_ratio, limits["cap"]) * min(old_ratio, limits["cap"])
    if name == "clip":  # GRPO 2402.03300 Eq. 3, DAPO 2503.14476 Eq. 8: min(ρ A, clip(ρ) A)
        return clipped(rho, A, limits)
    if name == "gspo":  # 2507.18071 Eq. 5 to 7: the ratio of a sequence is the geometric mean of its tokens'
        return clipped(math.exp(mean_log), A, limits)
    if name == "tis":  # Yao et al. 2025: min(π_old / π_gen, cap) · min(q A, clip(q) A), q = π / π_old
        return min(old_ratio, limits["cap"]) * clipped(rho / old_ratio, A, limits)
    dropped = {
        "icepop": not limits.get("low", 0.0) <= rho <= limits["high"],  # 2602.15763
        "dppo": (pi - pi_gen) * math.copysign(1, A) > limits["high"],  # 2602.04879 Eq. 13
        "deepseek": A < 0 and -mean_log > limits["high"],  # 2512.02556: a whole row
        "m2po": (row, t) in m2po_dropped(step),  # 2510.01161
    }
    return 0.0 if dropped[name] else rho


def clipped(ratio: float, A: float, limits: dict[str, float]) -> float:
    """The ratio, or 0 where the clip has stopped its gradient; with `dual`, for A < 0 also above it."""
    too_high = ratio > (1 + limits["high"] if A > 0 else limits.get("dual", math.inf))
    too_low = A < 0 and ratio < 1 - limits["low"]
    return 0.0 if too_high or too_low else ratio


def m2po_dropped(step: Batch) -> set[tuple[int, int]]:
    """Of the tokens that moved as A pushes them, the largest (log ρ)² until the mean of the others is at most τ."""
    squares = {}
    for row in range(len(step.mask)):
        for t in tokens_of(step, row):
            log = float(step.logprobs[row, t] - step.behaviour[row, t])
            if log * step.advantages[row] > 0:
                squares[row, t] = log * log
    kept = sorted(squares, key=lambda token: squares[token])
    while kept and statistics.fmean(squares[token] for token in kept) > step.options["high"]:
        kept.pop()
    return set(squares) - set(kept)


def tokens_of(step: Batch, row: int) -> list[int]:
    """Positions of the row's tokens that train."""
    return [t for t, bit in enumerate(step.mask[row].tolist()) if bit]


def token_weight(step: Batch, row: int, empty_counts: bool) -> float:
    """Averages of 2510.13786 section 3.2; constant: Dr. GRPO, 2503.20783.

    A row or a group without tokens is not counted, unless `empty_counts`: 1/G counts every rollout."""
    lengths = [len(tokens_of(step, i)) for i in range(len(step.mask))]
    counted = [i for i, n in enumerate(lengths) if n or empty_counts]
    if step.average == "sample":
        return 1 / (len(counted) * lengths[row])
    if step.average == "constant":
        return 1 / (len(counted) * step.constant)
    if step.average == "token":
        return 1 / sum(max(n, empty_counts) for n in lengths)
    groups = step.group_ids.tolist()
    in_group = sum(n for n, g in zip(lengths, groups, strict=True) if g == groups[row])
    return 1 / (len({groups[i] for i in counted}) * in_group)


def expected_gradient(step: Batch, empty_counts: bool = False) -> Tensor:
    """(N, T): weight · factor · A."""
    result = torch.zeros_like(step.logprobs)
    for row in range(len(step.mask)):
        for t in tokens_of(step, row):
            factor = token_factor(step, row, t)
            result[row, t] = token_weight(step, row, empty_counts) * factor * step.advantages[row]
    return result


def mean_of_means(step: Batch, pieces: list[list[int]]) -> Tensor:
    """(N, T): what comes out if each piece, a list of rows, is averaged by itself."""
    result = torch.zeros_like(step.logprobs)
    for rows in pieces:
        result[rows] = expected_gradient(select(step, rows)) / len(pieces)
    return result


def select(step: Batch, rows: list[int], **changes: Any) -> Batch:
    """These rows of a step."""
    columns = {name: getattr(step, name)[rows] for name in COLUMNS}
    return replace(step, rows=rows, **columns, **changes)


def without_dropped(step: Batch) -> Batch:
    """The step with an empty mask in the rows that the zero-variance filter drops."""
    mask = step.mask.clone()
    mask[step.dropped] = 0.0
    return replace(step, mask=mask)


def expected_advantages(
    rewards: list[float],
    group_ids: list[int],
    how: str,
    lengths: list[int],
    definition: str = "",
) -> list[float]:
    """2510.13786 Eq. 5: (r - mean of its group) / std of all centred rewards; `prompt`: the std of its group."""
    rows = range(len(rewards))
    centred = []
    for row in rows:
        group = [rewards[i] for i in rows if group_ids[i] == group_ids[row]]
        advantage = 0.0 if len(set(group)) == 1 else rewards[row] - statistics.fmean(group)
        if definition == "leave one out" and len(group) > 1:
            advantage *= len(group) / (len(group) - 1)
        if definition == "a lone reward stays" and len(group) == 1:
            advantage = rewards[row]
        centred.append(advantage)
    if how == "none":
        return centred
    values = rewards if "std of the raw rewards" in definition else centred
    copies = lengths if "by tokens" in definition else [1 for _ in rows]
    std = statistics.stdev if "ddof 1" in definition else statistics.pstdev
    result = []
    for row in rows:
        members = [i for i in rows if how == "batch" or group_ids[i] == group_ids[row]]
        samples = [values[i] for i in members for _ in range(copies[i])]
        mean = statistics.fmean(samples) if "whitened" in definition else 0.0
        divisor = std(samples) if len(samples) > 1 else 0.0
        result.append((centred[row] - mean) / divisor if divisor else 0.0)
    return result


def expected_batch(
    rewards: list[float],
    prompts: list[int],
    group_ids: list[int],
    truncated: list[int],
    how: str,
    definition: str = "",
) -> list[list[float]]:
    """[advantages, which rows train] of a batch: centre groups, drop equal ones, take the std, drop truncated rows."""
    ids = prompts if "one group" in definition else group_ids
    rows = [i for i in range(len(rewards)) if not (truncated[i] and "without truncated rows" in definition)]
    unequal = [i for i in rows if any(ids[i] == ids[j] and rewards[i] != rewards[j] for j in rows)]
    counted = rows if "counts dropped groups" in definition else unequal
    kept_rewards, kept_ids = [rewards[i] for i in counted], [ids[i] for i in counted]
    advantages = expected_advantages(kept_rewards, kept_ids, how, [1 for _ in counted], definition)
    trains = [float(i in unequal and not truncated[i]) for i in range(len(rewards))]
    of_row = dict(zip(counted, advantages, strict=True))
    return [[of_row[i] if bit else 0.0 for i, bit in enumerate(trains)], trains]


def bf16_head() -> tuple[list[Tensor], Tensor, Tensor]:
    """(hidden (M, H), weight (V, H), targets (M,)) and the log-probs (M,): exact, and of logits rounded to bfloat16."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, 64, generator=random).bfloat16()
    weight = torch.randn(100, 64, generator=random).bfloat16()
    targets = torch.arange(16)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[targets, targets]
    rounded = (hidden @ weight.T).float().log_softmax(-1)[targets, targets]
    return [hidden, weight, targets], exact, rounded
