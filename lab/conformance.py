"""Is your trainer's ScaleRL the paper's ScaleRL? 79 small cases put to your own functions.

PROBLEM. Trainers that offer the same losses differ in what surrounds them: which tokens a sum is divided by, what the
std is taken of, whether a group with equal rewards is really dead in float32. All of them train, and none says so.

IDEA. An oracle computes what each case must give, in plain float64 loops from the papers' equations. You write an
adapter: an object with small methods that call your trainer's functions. Every method is optional.

    loss(part, step)                     what the trainer sends to backward() for the microbatch `part` of the optimizer
                                         step `step`, both a `Batch`: a scalar tensor
    advantages(rewards, group_ids, how, lengths)      (N,); how: prompt, batch or none; lengths: tokens of each row
    filter(rewards, group_ids)           (N,) bool: the rows that the zero-variance filter keeps
    penalty(lengths, max_length, cache_length)        (N,), DAPO's overlong penalty
    history(visits)                      prompts retired at a threshold of .9 after visits [(prompt, [0, 1, ...]), ...];
                                         save and load your state after each
    interrupt(ids, finish_reason, answer_budget, phrase_ids, end_ids)     of the thinking sampled so far: (forced ids,
                                         tokens that may follow, mask of all up to here), or None if nothing follows
    logprobs(hidden, weight, targets)    of bfloat16 hidden states (M, H) and head (V, H), with FP32 logits

THE LOSS. `step` has the rows of all ranks, `part` those of one microbatch, and `part.parts` counts the microbatches of
its rank. Gradients are summed over microbatches and AVERAGED over ranks, as DDP and FSDP do it; multiply by
`part.ranks` to undo that average. What is compared is d(loss) / d(log-prob), token by token.

`part.loss` names what is asked for, with `part.options`: on_policy · cispo (cap 5) · clip (low, high: .2, .26) · gspo
(low, high) · tis (low, high, cap) · icepop (low, high) · dppo, deepseek, m2po (high). on_policy asks for averages, and
any loss answers it, because every ratio is 1. `part.average` is one of sample, prompt, token, constant. Other losses
are asked for with sample, then with token, then with prompt, until one is not refused. To refuse a loss, an average or
an option, raise NotImplementedError in that call.

Dropped rows (a group with equal rewards) are asked about only if there is a `filter`. They are then missing from `step`
and `part`. With `masks_dropped = True` in the adapter they are there, with an empty mask.

Log-probs, masks, rewards and advantages are float32, ids and lengths int64. Answers may be off by 2e-3 of the largest
expected number, log-probs by 1e-5. A verdict is

    agrees                      the papers' value
    another definition: NAME    another value that somebody uses on purpose, and which
    differs                     "x k": the right direction, k times as large; else the worst number
    error                       the adapter raised, or returned what cannot be compared
    not offered                 the adapter has no such method, or it raised NotImplementedError

SIMPLIFIED. Functions and not loops are compared, so nothing here tests how old a token may get.

    python conformance.py my_module:Adapter           a row a case that was answered, then how many were not
    python conformance.py --json vectors.json         inputs and values, for what cannot import torch; cases of one name
                                                      are ways to ask one question

The exit code is 1 if a verdict is another definition, differs or error, but for what the papers leave open: ddof 1, and
whether an empty row counts.

>>> class Mine:
...     def loss(self, part, step):
...         if part.loss != "cispo" or part.average != "token":
...             raise NotImplementedError
...         rho = (part.logprobs - part.behaviour).exp()
...         weight = rho.detach().clamp(max=part.options["cap"])
...         token_loss = -weight * part.advantages[:, None] * part.logprobs
...         return (token_loss * part.mask).sum() / step.mask.sum() * part.ranks
...     def penalty(self, lengths, max_length, cache_length):  # it forgets its floor of -1
...         return (max_length - cache_length - lengths).clamp(max=0) / cache_length
>>> [row.verdict for row in check(Mine()) if row.topic == "penalty"]
['agrees', 'differs']
>>> [(row.case, row.detail) for row in check(Mine()) if row.verdict == "differs"]
[('NaN in the padding', 'NaN or infinity in the gradient'), ('-1 beyond L_max', '-4 for -1')]
"""

import importlib
import json
import math
import re
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# the last two are left open by the papers
NO_DEVIATION = ("agrees", "not offered", "another definition: ddof 1", "another definition: an empty row counts")
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


@dataclass
class Case:
    """A question to the method of this name, and its answers."""

    method: str
    name: str
    source: str  # paper and equation; the mistake that the case catches
    inputs: list
    expected: Any
    also: dict[str, Any] = field(default_factory=dict)  # other definitions that are in use


@dataclass
class Row:
    """What came out of one case."""

    topic: str  # the method; of `loss` which loss
    case: str
    verdict: str
    detail: str
    source: str


# --------------------------------------------------------------------------- the oracle: the papers' equations in loops


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


def mean_of_means(step: Batch) -> Tensor:
    """(N, T): what comes out if each microbatch is averaged by itself."""
    result = torch.zeros_like(step.logprobs)
    for parts in step.layout:
        for rows in parts:
            result[rows] = expected_gradient(select(step, rows)) / len(parts) / len(step.layout)
    return result


def select(step: Batch, rows: list[int], **changes: Any) -> Batch:
    """These rows of a step."""
    columns = {name: getattr(step, name)[rows] for name in COLUMNS}
    return replace(step, rows=rows, **columns, **changes)


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


# ---------------------------------------------------------------------------------------------------- the cases as data

CAP, CLIP, SYMMETRIC = {"cap": 5.0}, {"low": 0.2, "high": 0.26}, {"low": 0.2, "high": 0.2}
FAR, NEAR = "0.01 0.5 1 4.9 5.5 50", "0.5 0.85 1.2 1.3 3.5"
SIGNS = "2 2 2 2 -0.5 -0.5 -0.5 -0.5"
# name, source and mistake, loss, options, then as text: π / π_gen of each token, with | between rows (a token below 0,
# or NaN, does not train); A of each row; π_old / π_gen of each token, where "=" is π / π_gen (a batch's first update)
LOSSES: list[tuple] = [
    ("CISPO: cap 5, absolute, A > 0", "2510.13786 Eq. 4; a cap of 1 + 5", "cispo", CAP, FAR, "2", "1"),
    ("CISPO: no lower bound, A < 0", "2506.13585; a clip on both sides", "cispo", CAP, FAR, "-0.5", "1"),
    ("CISPO: the generator's ratio, π_old = π", "Eq. 4; π / π_old, which is 1", "cispo", CAP, "0.5 2 7", "1", "="),
    ("CISPO: the generator's ratio, π_old between", "Eq. 4; two caps", "cispo", CAP, "0.5 2 7", "1", "1 1.5 6.5"),
    ("DAPO: clip .2/.26, A > 0", "2503.14476 Eq. 8; sides exchanged", "clip", CLIP, NEAR, "2", "1"),
    ("DAPO: clip .2/.26, A < 0", "2503.14476 Eq. 8; a dual clip on top", "clip", CLIP, NEAR, "-0.5", "1"),
    (
        "GRPO: clip .2, both signs",
        "2402.03300 Eq. 3; a clip that ignores the sign of A",
        "clip",
        SYMMETRIC,
        "0.7 | 0.9 | 1.1 | 1.3 | 0.7 | 0.9 | 1.1 | 1.3",
        SIGNS,
        "1",
    ),
    (
        "GSPO: the ratio is the geometric mean of a row",
        "2507.18071 Eq. 7; the product, or the mean of the ratios",
        "gspo",
        {"low": 0.9, "high": 9.0},
        "2.7 3 1 | 0.6 0.8 -9",
        "2 -0.5",
        "1",
    ),
    (
        "GSPO: its clip",
        "2507.18071 Eq. 5; clips of .2",
        "gspo",
        {"low": 3e-3, "high": 4e-3},
        "0.99 | 0.998 | 1.003 | 1.01 | 0.99 | 0.998 | 1.003 | 1.01",
        SIGNS,
        "1",
    ),
    (
        "TIS: cap 2 times a clip",
        "Yao et al. 2025; the clip on π / π_gen",
        "tis",
        SYMMETRIC | {"cap": 2.0},
        "0.55 1.2 3.3 6 2.2",
        "2",
        "0.5 1.5 3 4 2",
    ),
    (
        "DPPO mask: .02 in probability",
        "2602.04879 Eq. 13; a limit on the ratio",
        "dppo",
        {"high": 0.02},
        "1.8 | 1.6 | 0.7 | 0.75",
        "2 2 -0.5 -0.5",
        "=",
    ),
    (
        "IcePop mask: .5, 5",
        "2602.15763; the ratio is clipped, not masked",
        "icepop",
        {"low": 0.5, "high": 5.0},
        "0.45 0.55 4.9 5.1",
        "2",
        "=",
    ),
    (
        "M2PO mask: .04",
        "2510.01161; all tokens count",
        "m2po",
        {"high": 0.04},
        "1.1 1.28 1.4 0.55 | 1.01 1.01 1 1",
        "2 0",
        "=",
    ),
    (
        "DeepSeek-V3.2 mask: .5",
        "2512.02556; the sum of a row, or rows with A > 0",
        "deepseek",
        {"high": 0.5},
        "0.5 0.9 | 0.4 0.9 | 0.4 0.9 | 0.55 -9",
        "-0.5 -0.5 0.5 -0.5",
        "=",
    ),
    (
        "NaN in the padding",
        "behaviour is NaN where the mask is 0; 0 · NaN in the gradient, in spite of a where() after the product",
        "cispo",
        CAP,
        "2 7 nan",
        "1",
        "=",
    ),
    ("a log-ratio of 100", "exp overflows", "cispo", CAP, "2.7e43 1", "1", "="),
]
EIGHT, PAIRS = "1 111 11 11 11111 1 1111 11", "0 0 1 1 2 2 3 3"
# name, mistake, the mask of each row, group ids, the rows of each microbatch with | between ranks
AVERAGES = [
    ("one microbatch", "another average", "1 111 11 11", "0 0 1 1", "0123"),
    ("forced tokens", "forced tokens in the denominator", "101 111 11 0011 01", "0 0 1 1 2", "01234"),
    ("a row without tokens", "an empty row in the denominator", "1 111 11 0", "0 0 1 1", "0123"),
    ("a group without tokens", "an empty group there", "1 111 0 0 11 1111", "0 0 1 1 2 2", "012345"),
    ("a group with equal rewards", "dropped rows in the denominator", EIGHT, PAIRS, "01234567"),
    ("2 microbatches", "the mean of their means", EIGHT, PAIRS, "0123 4567"),
    ("4 microbatches", "the mean of their means", EIGHT, PAIRS, "01 23 45 67"),
    ("groups cut across microbatches", "half groups", EIGHT, PAIRS, "0246 1357"),
    ("2 ranks", "the mean that DDP takes over ranks", EIGHT, PAIRS, "0123 | 4567"),
    ("2 ranks of 2 microbatches", "the mean that DDP takes over ranks", EIGHT, PAIRS, "01 23 | 45 67"),
]
DEFINITIONS = [
    "ddof 1",
    "std of the raw rewards",
    "std of the raw rewards, ddof 1",
    "std weighted by tokens",
    "whitened by tokens",
    "whitened by tokens, ddof 1",
    "leave one out",
    "a lone reward stays",
]
FOURS, EIGHTS = "0 0 0 0 1 1 1 1", "0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1"
# name, source and mistake, rewards, group ids, how: a second one is asked if the first is refused
ADVANTAGES = [
    ("std of the prompt", "2402.03300; that of the batch", "1 0 0 0 1 1 0 0", FOURS, "prompt"),
    ("no std", "2503.20783; the mean of the others", "1 0 0 0 1 1 0 0", FOURS, "none"),
    (
        "the batch's std is that of the centred rewards",
        "2510.13786 Eq. 5; that of the rewards",
        "1 1 1 1 1 1 1 0 0 0 0 0 0 0 0 1",
        EIGHTS,
        "batch",
    ),
    ("the batch's std counts sequences", "2510.13786 Eq. 5; it counts tokens", "1 0 0 0 1 1 1 0", FOURS, "batch"),
    (
        "equal rewards give exactly 0",
        "rounding, / 1e-9",
        "0.1 0.1 0.1 0.1 0.1 0.1 0.1",
        "0 0 0 0 0 0 0",
        "prompt batch",
    ),
    ("interleaved groups", "groups by position", "1 5 0 7 0 5", "0 1 0 1 0 1", "none"),
    ("a group of one gives 0", "its raw reward", "1 0 1", "0 0 1", "none batch prompt"),
]
THIRD, NEXT = "0.33333334", "0.33333337"  # two float32 numbers with none between
# name, source and mistake, rewards, group ids, whether a row stays
FILTER = [
    (
        "equal +1, equal -1, mixed",
        "2510.13786 section 3.2; rewards of 0",
        "1 1 -1 -1 1 -1",
        "0 0 1 1 2 2",
        "0 0 0 0 1 1",
    ),
    (
        "seven float32 thirds are equal",
        "a std of 1e-9",
        " ".join([THIRD] * 7),
        "0 0 0 0 0 0 0",
        "0 0 0 0 0 0 0",
    ),
    ("1/3 and its next float32 differ", "a tolerance", f"{THIRD} {NEXT} {THIRD}", "0 0 0", "1 1 1"),
    ("the middle row of 1, .5, 0 stays", "rows with A = 0 are dropped", "1 0.5 0", "0 0 0", "1 1 1"),
]
# name, source and mistake, visits, retired prompts
HISTORY = [
    ("15 of 16 goes, 14 of 16 stays", "2510.13786 section 3.2; another threshold", "a:15+1 b:14+2", ["a"]),
    ("9 of 10 is .9", "2510.13786 section 3.2; > for ≥", "a:9+1", ["a"]),
    ("the rate is that of all epochs", "the last epoch's", "a:0+16 a:16+0", []),
    ("all epochs, reached later", "the first epoch's", "a:12+4 a:16+0 a:16+0", ["a"]),
    ("kept through a restart", "no state is saved", "a:16+0 b:0+16", ["a"]),
]
# name, source and mistake, lengths, penalties for L_max = 14 and L_cache = 2
PENALTY = [
    ("a ramp over the last L_cache tokens", "2503.14476 Eq. 13; one step", [0, 12, 13, 14], [0, 0, -0.5, -1]),
    ("-1 beyond L_max", "2503.14476 Eq. 13; no floor", [15, 20], [-1, -1]),
]
PHRASE, END, BUDGET = [7, 8, 9], [9], 2
# name, source and mistake, ids of the thinking, finish reason, answer
INTERRUPT = [
    (
        "no end in the budget: the phrase, masked",
        "2510.13786 section 3.2; the phrase trains",
        [3, 3, 3, 3, 3],
        "length",
        [PHRASE, BUDGET, [1, 1, 1, 1, 1, 0, 0, 0]],
    ),
    ("cut in the answer: the rest of its budget", "a new budget", [3, 3, 3, 9, 5], "length", [[], 1, [1, 1, 1, 1, 1]]),
    ("ended by itself without the mark", "it goes on after EOS", [3, 3, 3, 0], "stop", None),
    ("the answer's budget used up", "0 tokens are asked for", [3, 3, 9, 5, 5], "length", None),
]


def numbers(text: str, kind: type = float) -> list:
    """Of a cell of the tables."""
    return [kind(word) for word in text.split()]


def ratio_step(average: str, loss: str, options: dict[str, float], ratios: str, advantages: str, old: str) -> Batch:
    """A step of these ratios, with π = .05. Each row is a group."""
    rho = torch.tensor([numbers(row) for row in ratios.split("|")], dtype=torch.float64)  # (N, T)
    logprobs = torch.full_like(rho, math.log(0.05))
    behaviour = logprobs - rho.abs().log()
    old_logprobs = logprobs if old == "=" else behaviour + torch.tensor(numbers(old)).log()
    A = torch.tensor(numbers(advantages))
    ids = torch.arange(len(rho))
    layout = [[ids.tolist()]]
    return Batch(logprobs, behaviour, old_logprobs, (rho > 0).float(), A, ids, layout, loss, options, average)


def average_step(average: str, bits: str, group_ids: str, layout: str) -> Batch:
    """On-policy rows of 10 places with this mask, with A = 1 each."""
    mask = torch.tensor([[float(bit) for bit in row.ljust(10, "0")] for row in bits.split()])
    logprobs = torch.full_like(mask, -1.0, dtype=torch.float64)
    ids = torch.tensor(numbers(group_ids, int))
    ranks = [[[int(row) for row in part] for part in rank.split()] for rank in layout.split("|")]
    return Batch(logprobs, logprobs, logprobs, mask, torch.ones(len(mask)), ids, ranks, average=average)


def loss_case(name: str, source: str, step: Batch) -> Case:
    """A question to `loss`, with the other definitions in use."""
    masked = without_dropped(step)
    counted = expected_gradient(masked, empty_counts=True)
    also = {"an empty row counts": counted, "the mean of the microbatches' means": mean_of_means(masked)}
    if step.dropped:
        also = {"dropped rows stay in the average": counted}
    if step.loss == "cispo":
        also["cap 1 + 5"] = expected_gradient(replace(step, options={"cap": 6.0}))
        also["a lower bound of .8"] = expected_gradient(replace(step, options=CAP | {"floor": 0.8}))
        also["a product of two caps"] = expected_gradient(replace(step, loss="two caps"))
    if step.loss == "clip":
        also["a dual clip of 3"] = expected_gradient(replace(step, options=step.options | {"dual": 3.0}))
    return Case("loss", name, source, [step], expected_gradient(masked), also)


def average_cases(average: str) -> list[Case]:
    """What a token weighs."""
    paper = "2503.20783" if average == "constant" else "2510.13786 section 3.2"
    cases = []
    for name, mistake, *inputs in AVERAGES:
        step = average_step(average, *inputs)
        if name == "a group with equal rewards":
            step.dropped = [2, 3]
        cases.append(loss_case(f"{average} average: {name}", f"{paper}; {mistake}", step))
    return cases


def advantage_case(name: str, source: str, rewards: str, group_ids: str, how: str) -> Case:
    """A question to `advantages`, with the other definitions in use."""
    ids = numbers(group_ids, int)
    lengths = [9 if i % 2 and "sequences" in name else 1 for i in range(len(ids))]
    inputs = numbers(rewards), ids, how, lengths
    also = {definition: expected_advantages(*inputs, definition) for definition in DEFINITIONS}
    return Case("advantages", name, source, [*inputs], expected_advantages(*inputs), also)


def head_case() -> Case:
    """log_softmax of an FP32 product of bfloat16 factors."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, 64, generator=random).bfloat16()
    weight = torch.randn(100, 64, generator=random).bfloat16()
    targets = torch.arange(16)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[targets, targets]
    rounded = (hidden @ weight.T).float().log_softmax(-1)[targets, targets]
    source = "2510.13786 section 3.2; the product is rounded to bfloat16"
    inputs = [hidden, weight, targets]
    return Case("logprobs", "FP32 product of bfloat16 factors", source, inputs, exact, {"bfloat16 logits": rounded})


def visits(text: str) -> list[tuple[str, list[int]]]:
    """a:2+1 is prompt a, solved twice and failed once."""
    counts = re.findall(r"(\w):(\d+)\+(\d+)", text)
    return [(prompt, [1] * int(solved) + [0] * int(failed)) for prompt, solved, failed in counts]


def all_cases() -> list[Case]:
    """79 questions. Cases of one name are ways to ask the same."""
    cases = []
    for name, source, *inputs in LOSSES:
        for average in ("sample", "token", "prompt"):
            cases.append(loss_case(name, source, ratio_step(average, *inputs)))
    for average in ("sample", "prompt", "token", "constant"):
        cases += average_cases(average)
    for name, source, rewards, ids, ways in ADVANTAGES:
        cases += [advantage_case(name, source, rewards, ids, how) for how in ways.split()]
    for name, source, rewards, ids, stays in FILTER:
        cases.append(Case("filter", name, source, [numbers(rewards), numbers(ids, int)], numbers(stays, int)))
    for name, source, lengths, penalties in PENALTY:
        cases.append(Case("penalty", name, source, [lengths, 14, 2], penalties))
    cases += [Case("history", name, source, [visits(text)], answer) for name, source, text, answer in HISTORY]
    for name, source, ids, reason, answer in INTERRUPT:
        cases.append(Case("interrupt", name, source, [ids, reason, BUDGET, PHRASE, END], answer))
    return [*cases, head_case()]


# ---------------------------------------------------------------------------------------------------------- the harness


def gradient(adapter: Any, step: Batch) -> Tensor:
    """(N, T) of -d(loss) / d(log π): summed over microbatches, averaged over ranks."""
    if step.dropped and not hasattr(adapter, "filter"):
        raise NotImplementedError
    absent = [] if getattr(adapter, "masks_dropped", False) else step.dropped
    layout = [[[row for row in rows if row not in absent] for rows in parts] for parts in step.layout]
    leaf = step.logprobs.float().requires_grad_()
    step = replace(
        without_dropped(step),
        logprobs=leaf,
        behaviour=step.behaviour.float(),
        old=step.old.float(),
        ranks=len(layout),
    )
    everything = select(step, [row for row in range(len(leaf)) if row not in absent])
    total = torch.zeros_like(leaf)
    for parts in layout:
        for rows in parts:
            loss = adapter.loss(select(step, rows, parts=len(parts)), everything)
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise TypeError(f"loss must return a tensor that has a gradient, not {loss!r:.40}")
            (part,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            total -= part / len(layout)
    return total


def without_dropped(step: Batch) -> Batch:
    """The step with an empty mask in the rows that the zero-variance filter drops."""
    mask = step.mask.clone()
    mask[step.dropped] = 0.0
    return replace(step, mask=mask)


def ask(adapter: Any, case: Case) -> Any:
    """What the adapter answers. Lists of numbers become tensors, but for histories and token ids."""
    if case.method == "loss":
        return gradient(adapter, case.inputs[0])
    inputs = case.inputs
    if case.method not in ("history", "interrupt"):
        inputs = [torch.tensor(x) if isinstance(x, list) else x for x in inputs]
    return getattr(adapter, case.method)(*inputs)


def check(adapter: Any) -> list[Row]:
    """One row a question. Never raises what the adapter raises."""
    rows: dict[str, Row] = {}
    for case in all_cases():
        if case.name in rows and rows[case.name].verdict != "not offered":
            continue
        topic = case.inputs[0].loss if case.method == "loss" else case.method
        verdict, detail = "not offered", ""
        try:
            if hasattr(adapter, case.method):
                verdict, detail = judge(case, ask(adapter, case))
        except NotImplementedError:
            pass
        except Exception as error:
            verdict = "error"
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
        rows[case.name] = Row(topic, case.name, verdict, detail, case.source)
    return list(rows.values())


def judge(case: Case, answer: Any) -> tuple[str, str]:
    """(verdict, detail)."""
    if case.method in ("history", "interrupt"):
        if isinstance(answer, tuple | set):
            answer = list(answer)
        return ("agrees", "") if answer == case.expected else ("differs", f"{answer} for {case.expected}")
    actual = torch.as_tensor(answer).detach().double()
    expected = torch.as_tensor(case.expected).double()
    if actual.shape != expected.shape:
        return "error", f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    if not actual.isfinite().all():
        return "differs", "NaN or infinity" + " in the gradient" * (case.method == "loss")
    tolerance = 1e-5 if case.method == "logprobs" else 2e-3  # of the largest expected value

    def equal(values: Tensor) -> bool:
        return float((actual - values).abs().max()) <= tolerance * (float(expected.abs().max()) or 1.0)

    if equal(expected):
        return "agrees", ""
    for name, values in case.also.items():
        if equal(torch.as_tensor(values).double()):
            return f"another definition: {name}", ""
    squares = float(expected.square().sum())
    factor = float((actual * expected).sum()) / squares if squares else 0.0
    if factor > 0 and equal(expected * factor):
        return "differs", f"x {factor:.3g}"
    worst = int((actual - expected).abs().argmax())
    return "differs", f"{actual.flatten()[worst]:.3g} for {expected.flatten()[worst]:.3g}"


def is_deviation(row: Row) -> bool:
    """Whether the papers say otherwise."""
    return row.verdict not in NO_DEVIATION


def main(argv: list[str]) -> int:
    """Exit code: 0 no deviation, 1 some, or nothing that agrees, 2 no such adapter."""
    if argv[:1] == ["--json"] and len(argv) == 2:
        text = json.dumps([vars(case) for case in all_cases()], default=as_data)
        Path(argv[1]).write_text(text.replace(", NaN", ", null"))  # JSON has no NaN
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0
    sys.path.insert(0, "")
    try:
        module, name = argv[0].split(":")
        adapter = getattr(importlib.import_module(module), name)()
    except Exception as error:
        print(f"conformance.py: {argv[0]} is no MODULE:CLASS that can be made ({error!r})", file=sys.stderr)
        return 2
    rows = check(adapter)
    for row in rows:
        made_for = f"   [the case is made for: {row.source}]" if is_deviation(row) else ""
        if row.verdict != "not offered":
            print(f"{row.topic:10} {row.case:50} {row.verdict} {row.detail}".rstrip() + made_for)
    counts = Counter(row.verdict.split(":")[0] for row in rows)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    asked = Counter(row.topic for row in rows)
    answered = Counter(row.topic for row in rows if row.verdict != "not offered")
    print("answered: " + ", ".join(f"{topic} {answered[topic]} of {n}" for topic, n in asked.items()))
    return 1 if any(map(is_deviation, rows)) or not counts["agrees"] else 0


def as_data(value: Any) -> Any:
    """A step as a dict, a tensor as lists."""
    return value.float().tolist() if isinstance(value, Tensor) else asdict(value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
