"""Is your trainer's ScaleRL the paper's ScaleRL? 79 small cases put to your own functions.

PROBLEM. Trainers that offer the same losses differ in what surrounds them: which tokens a sum is divided by, what the
std is taken of, whether a group with equal rewards is really dead in float32. Each trains, and each trains otherwise.

IDEA. An oracle computes, in plain float64 loops and straight from the papers' equations, what each case must give. You
write an adapter: an object with small methods that call your trainer's functions. Every method is optional.

    loss(part, step)                     what the trainer sends to backward() for one microbatch `part` of an optimizer
                                         step `step` (both are `Batch`es): a scalar tensor. Gradients are summed over
                                         microbatches and AVERAGED over ranks, as DDP and FSDP do it
    advantages(rewards, group_ids, how, lengths)      (N,); how: prompt, batch or none; lengths: tokens of each row
    filter(rewards, group_ids)           (N,) bool: the rows that the zero-variance filter keeps. An adapter with
                                         `masks_dropped = True` gets dropped rows with an empty mask, else without them
    penalty(lengths, max_length, cache_length)        (N,), DAPO's overlong penalty
    history(visits)                      prompts retired at a threshold of .9 after visits [(prompt, [0, 1, ...]), ...];
                                         save and load your state after each
    interrupt(ids, finish_reason, answer_budget, phrase_ids, end_ids)     of the thinking sampled so far: (forced ids,
                                         tokens that may follow, mask of all up to here), or None if nothing follows
    logprobs(hidden, weight, targets)    of bfloat16 hidden states (M, H) and head (V, H), with FP32 logits

For a loss the harness compares d(loss) / d(log-prob), token by token. A verdict is one of

    agrees                      the papers' value
    another definition: NAME    another value that somebody uses on purpose, and which
    differs                     "x k": the right direction, k times as large; else the first wrong number
    error                       the adapter raised, or returned what cannot be compared
    not offered                 the adapter has no such method, or it raised NotImplementedError

SIMPLIFIED. Functions and not loops are compared, so nothing here tests how old a token may get.

    python conformance.py my_module:Adapter           a row a case; exit code 1 on a deviation
    python conformance.py --json vectors.json         inputs and values, for what cannot import torch

>>> class Mine:                                # a penalty that forgets its floor of -1
...     def penalty(self, lengths, max_length, cache_length):
...         return (max_length - cache_length - lengths).clamp(max=0) / cache_length
>>> [row.verdict for row in check(Mine()) if row.verdict != "not offered"]
['agrees', 'differs']
"""

import argparse
import importlib
import json
import math
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 2e-3  # of the largest expected value; adapters compute in float32
OPEN = ("ddof 1", "an empty row counts")  # definitions that the papers leave open: no deviation


@dataclass
class Step:
    """The input of a loss: N rows of T tokens. `ranks`: for each rank its microbatches, each a list of rows."""

    logprobs: list[list[float]]  # log π, which has the gradient
    behaviour: list[list[float]]  # log π_gen, the generator's own
    old: list[list[float]]  # log π_old, the trainer's before the first update on this batch
    mask: list[list[float]]
    advantages: list[float]
    group_ids: list[int]
    loss: str = "on_policy"
    options: dict[str, float] = field(default_factory=dict)
    average: str = "token"
    ranks: list[list[list[int]]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # rows whose group has equal rewards
    constant: float = 10.0  # L_max of the constant average

    def __post_init__(self) -> None:
        self.ranks = self.ranks or [[list(range(len(self.mask)))]]


@dataclass
class Batch:
    """Some rows of a step as tensors; `step` gives the rest: its loss, options, average and constant."""

    step: Step
    rows: list[int]  # of the step
    logprobs: Tensor  # (n, T), requires grad
    behaviour: Tensor  # (n, T)
    old: Tensor  # (n, T)
    mask: Tensor  # (n, T)
    advantages: Tensor  # (n,)
    group_ids: Tensor  # (n,)
    parts: int  # microbatches on this rank
    ranks: int


@dataclass
class Row:
    """What came out of one case."""

    method: str
    case: str
    verdict: str
    detail: str


@dataclass
class Case:
    """A question to the method of this name, and its answers."""

    method: str
    name: str
    inputs: list
    expected: Any
    also: dict[str, list] = field(default_factory=dict)  # other definitions that are in use


# --------------------------------------------------------------------------- the oracle: the papers' equations in loops


def token_factor(step: Step, row: int, t: int, tokens: list[int]) -> float:
    """d(objective) / d(log π) of one token, divided by its weight and its advantage."""
    name, options = step.loss, step.options
    A = step.advantages[row]
    logs = [step.logprobs[row][i] - step.behaviour[row][i] for i in tokens]
    rho = math.exp(step.logprobs[row][t] - step.behaviour[row][t])  # π / π_gen
    if name == "on_policy":
        return 1.0
    if name == "cispo":  # 2510.13786 Eq. 4: sg(min(ρ, ε_max)) A log π
        return max(min(rho, options["cap"]), options.get("floor", 0.0))
    if name == "two caps":  # TRL and others: the two halves of ρ are capped apart
        old_ratio = math.exp(step.old[row][t] - step.behaviour[row][t])
        return min(rho / old_ratio, options["cap"]) * min(old_ratio, options["cap"])
    if name == "clip":  # GRPO 2402.03300 Eq. 3, DAPO 2503.14476 Eq. 8: min(ρ A, clip(ρ) A)
        return clipped(rho, A, options)
    if name == "gspo":  # 2507.18071 Eq. 5 to 7: the ratio of a sequence is the geometric mean of its tokens'
        return clipped(math.exp(sum(logs) / len(logs)), A, options)
    if name == "tis":  # Yao et al. 2025: min(π_old / π_gen, cap) · min(q A, clip(q) A), q = π / π_old
        old_ratio = math.exp(step.old[row][t] - step.behaviour[row][t])
        return min(old_ratio, options["cap"]) * clipped(rho / old_ratio, A, options)
    if name == "icepop":  # 2602.15763: ρ inside the limits, else 0
        return rho if options["low"] <= rho <= options["high"] else 0.0
    if name == "dppo":  # 2602.04879 Eq. 13: the probability moved too far in A's direction
        moved = math.exp(step.logprobs[row][t]) - math.exp(step.behaviour[row][t])
        return 0.0 if moved * math.copysign(1, A) > options["high"] else rho
    if name == "deepseek":  # 2512.02556: a row with A < 0 and mean(log π_gen - log π) above δ
        return 0.0 if A < 0 and -sum(logs) / len(logs) > options["high"] else rho
    if name == "m2po":  # 2510.01161
        return 0.0 if (row, t) in m2po_dropped(step) else rho
    raise ValueError(name)


def clipped(ratio: float, A: float, options: dict[str, float]) -> float:
    """The ratio, or 0 where the clip has stopped its gradient; with `dual`, for A < 0 also above it."""
    if A > 0 and ratio > 1 + options["high"]:
        return 0.0
    if A < 0 and (ratio < 1 - options["low"] or ratio > options.get("dual", math.inf)):
        return 0.0
    return ratio


def m2po_dropped(step: Step) -> set[tuple[int, int]]:
    """Of the tokens that moved as A pushes them, the largest (log ρ)² until the mean of the others is at most τ."""
    squares = {}
    for row, t in sampled_tokens(step):
        log = step.logprobs[row][t] - step.behaviour[row][t]
        if log * step.advantages[row] > 0:
            squares[row, t] = log * log
    kept = sorted(squares, key=lambda token: squares[token])
    while kept and sum(squares[token] for token in kept) / len(kept) > step.options["high"]:
        kept.pop()
    return set(squares) - set(kept)


def sampled_tokens(step: Step) -> list[tuple[int, int]]:
    """(row, position) of each token that trains."""
    return [(row, t) for row, line in enumerate(step.mask) for t, bit in enumerate(line) if bit]


def expected_gradient(step: Step, empty_counts: bool = False) -> list[list[float]]:
    """(N, T): weight · factor · A. Averages: 2510.13786 section 3.2; constant: Dr. GRPO, 2503.20783.

    A row or a group without tokens is not counted, unless `empty_counts`: 1/G counts every rollout."""
    rows = range(len(step.mask))
    tokens = {row: [t for t, bit in enumerate(step.mask[row]) if bit] for row in rows}
    counted = [row for row in rows if tokens[row] or empty_counts]
    groups = {step.group_ids[row] for row in counted}
    in_group = {g: sum(len(tokens[row]) for row in rows if step.group_ids[row] == g) for g in groups}
    in_batch = sum(max(len(tokens[row]), 1 if empty_counts else 0) for row in rows)
    gradient = [[0.0] * len(line) for line in step.mask]
    for row, t in sampled_tokens(step):
        weight = {
            "sample": 1 / (len(tokens[row]) * len(counted)),
            "prompt": 1 / (in_group[step.group_ids[row]] * len(groups)),
            "token": 1 / in_batch,
            "constant": 1 / (step.constant * len(counted)),
        }[step.average]
        gradient[row][t] = weight * token_factor(step, row, t, tokens[row]) * step.advantages[row]
    return gradient


def mean_of_means(step: Step) -> list[list[float]]:
    """What comes out if each microbatch is averaged by itself."""
    gradient = [[0.0] * len(line) for line in step.mask]
    for microbatches in step.ranks:
        for rows in microbatches:
            mask = [line if row in rows else [0.0] * len(line) for row, line in enumerate(step.mask)]
            part = expected_gradient(replace(step, mask=mask))
            for row, t in sampled_tokens(replace(step, mask=mask)):
                gradient[row][t] = part[row][t] / len(microbatches) / len(step.ranks)
    return gradient


def expected_advantages(
    rewards: list[float], group_ids: list[int], how: str, lengths: list[int], definition: str = ""
) -> list[float]:
    """2510.13786 Eq. 5: (r - mean of its group) / std of all centred rewards; `prompt`: the std of its group."""
    groups = {g: [r for r, i in zip(rewards, group_ids, strict=True) if i == g] for g in group_ids}
    centred = []
    for r, g in zip(rewards, group_ids, strict=True):
        group = groups[g]
        same = len(set(group)) == 1
        advantage = 0.0 if same else r - sum(group) / len(group)
        if definition == "leave one out" and len(group) > 1:
            advantage *= len(group) / (len(group) - 1)
        if definition == "a lone reward stays" and len(group) == 1:
            advantage = r
        centred.append(advantage)
    if how == "none":
        return centred
    result = []
    for advantage, g in zip(centred, group_ids, strict=True):
        members = [i for i, other in enumerate(group_ids) if how == "batch" or other == g]
        values = [rewards[i] if definition == "std of the raw rewards" else centred[i] for i in members]
        weights = [lengths[i] if definition == "std weighted by tokens" else 1 for i in members]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
        degrees = sum(weights) - (1 if definition == "ddof 1" else 0)
        std = math.sqrt(squares / degrees)
        result.append(advantage / std if std else 0.0)
    return result


# ---------------------------------------------------------------------------------------------------- the cases as data


def ratio_step(loss: str, options: dict, ratios: list[float], A: float | list, old: list | None = None) -> Step:
    """A step whose tokens have these ratios π / π_gen, with π = .05: one row, or one row a token if A is a list.
    `old`: π_old / π_gen; left out, π_old = π_gen, as where several updates are made of one batch."""
    logprobs = [math.log(0.05) for _ in ratios]
    behaviour = [math.log(0.05 / ratio) for ratio in ratios]
    old_logprobs = [b + math.log(r) for b, r in zip(behaviour, old or [1.0] * len(ratios), strict=True)]
    columns = (logprobs, behaviour, old_logprobs, [1.0] * len(ratios))
    if isinstance(A, list):
        pi, pi_gen, pi_old, mask = ([[value] for value in column] for column in columns)
        return Step(pi, pi_gen, pi_old, mask, A, list(range(len(A))), loss, options)
    pi, pi_gen, pi_old, mask = ([column] for column in columns)
    return Step(pi, pi_gen, pi_old, mask, [A], [0], loss, options)


def length_step(lengths: list[int], group_ids: list[int], average: str, ranks: list | None = None) -> Step:
    """On-policy rows of these lengths, with A = 1 each."""
    mask = [[1.0 if t < length else 0.0 for t in range(10)] for length in lengths]
    logprobs = [[-1.0 - 0.01 * t for t in range(10)] for _ in lengths]
    ones = [1.0] * len(lengths)
    return Step(logprobs, logprobs, logprobs, mask, ones, group_ids, average=average, ranks=ranks or [])


def loss_steps() -> dict[str, Step]:
    """What stands before A ∇log π of each token."""
    cap, clip, tv = {"cap": 5.0}, {"low": 0.2, "high": 0.26}, {"high": 0.2}
    ratios, near = [0.01, 0.5, 1.0, 4.9, 5.5, 50.0], [0.5, 0.85, 1.2, 1.3, 3.5]
    signs = [2.0] * 4 + [-0.5] * 4
    sequence = [[-2.0, -2.6, -2.0], [-0.5, -1.3, 0.0]]
    gspo = Step(
        [[-1.0, -1.5, -2.0]] * 2,
        sequence,
        sequence,
        [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]],
        [2.0, -0.5],
        [0, 1],
        "gspo",
        {"low": 0.9, "high": 9.0},
        "sample",
    )
    tight = ratio_step("gspo", {"low": 3e-3, "high": 4e-3}, [0.99, 0.998, 1.003, 1.01] * 2, signs)
    moved = ratio_step("dppo", tv, [1.0] * 4, [2.0, 2.0, -0.5, -0.5])
    moved.logprobs = [[math.log(p)] for p in (0.91, 0.89, 0.49, 0.51)]
    moved.behaviour = [[math.log(0.7)]] * 4
    nan = ratio_step("cispo", cap, [2.0, 7.0, 1.0], 1.0)
    nan.behaviour[0][2], nan.mask[0][2] = math.nan, 0.0
    far = ratio_step("cispo", cap, [1.0, 1.0], 1.0)
    far.behaviour[0][0] -= 100
    logs = {"m2po": (0.1, 0.3, 0.5, -0.6), "deepseek": (-0.4, -0.6, -0.6)}
    powers = {name: [math.exp(x) for x in values] for name, values in logs.items()}
    return {
        "CISPO: cap 5, absolute, A > 0": ratio_step("cispo", cap, ratios, 2.0),
        "CISPO: no lower bound, A < 0": ratio_step("cispo", cap, ratios, -0.5),
        "CISPO: ratio to the generator, π_old = π": ratio_step("cispo", cap, [0.5, 2, 7], 1.0, [0.5, 2, 7]),
        "CISPO: ratio to the generator, π_old between": ratio_step("cispo", cap, [0.5, 2, 7], 1.0, [1, 1.5, 6.5]),
        "DAPO: clip .2/.26, A > 0": ratio_step("clip", clip, near, 2.0),
        "DAPO: clip .2/.26, A < 0": ratio_step("clip", clip, near, -0.5),
        "GRPO: clip .2, both signs": ratio_step("clip", clip | {"high": 0.2}, [0.7, 0.9, 1.1, 1.3] * 2, signs),
        "GSPO: the ratio is the geometric mean of a row": gspo,
        "GSPO: its clip": replace(tight, average="sample"),
        "TIS: cap 2 times a clip": ratio_step(
            "tis", clip | tv | cap | {"cap": 2.0}, [0.55, 1.2, 3.3, 6.0, 2.2], 2.0, [0.5, 1.5, 3.0, 4.0, 2.0]
        ),
        "DPPO mask: .2 in probability": one_update(moved),
        "IcePop mask: .5, 5": one_update(ratio_step("icepop", {"low": 0.5, "high": 5.0}, [0.45, 0.55, 4.9, 5.1], 2.0)),
        "M2PO mask: .04": one_update(ratio_step("m2po", {"high": 0.04}, powers["m2po"], 2.0)),
        "DeepSeek-V3.2 mask: .5": one_update(
            ratio_step("deepseek", {"high": 0.5}, powers["deepseek"], [-0.5, -0.5, 2.0])
        ),
        "NaN in the padding": one_update(nan),
        "a log-ratio of 100": one_update(far),
    }


def one_update(step: Step) -> Step:
    """π_old = π: the trainer's log-probs before the only update on this batch."""
    return replace(step, old=step.logprobs)


def average_steps() -> dict[str, Step]:
    """What a token weighs, under four averages (2510.13786 section 3.2; constant: Dr. GRPO)."""
    steps: dict[str, Step] = {}
    for how in ("sample", "prompt", "token", "constant"):
        holes = length_step([3, 3, 2, 4], [0, 0, 1, 1], how)
        for row, t in ((0, 1), (3, 0), (3, 1)):
            holes.mask[row][t] = 0.0
        cases = {
            "one microbatch": length_step([1, 3, 2, 2], [0, 0, 1, 1], how),
            "forced tokens": holes,
            "a row without tokens": length_step([1, 3, 2, 0], [0, 0, 1, 1], how),
            "a group without tokens": length_step([1, 3, 0, 0, 2, 4], [0, 0, 1, 1, 2, 2], how),
            "a group with equal rewards": length_step(EIGHT, PAIRS, how),
        }
        cases["a group with equal rewards"].dropped = [2, 3]
        cases |= {name: length_step(EIGHT, PAIRS, how, ranks) for name, ranks in SPLITS.items()}
        steps |= {f"{how} average: {name}": step for name, step in cases.items()}
    return steps


EIGHT = [1, 3, 2, 2, 5, 1, 4, 2]  # lengths of four groups of two
PAIRS = [0, 0, 1, 1, 2, 2, 3, 3]
SPLITS = {
    "2 microbatches": [[[0, 1, 2, 3], [4, 5, 6, 7]]],
    "4 microbatches": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "groups cut across microbatches": [[[0, 2, 4, 6], [1, 3, 5, 7]]],
    "2 ranks": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    "2 ranks of 2 microbatches": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}


def step_case(name: str, step: Step) -> Case:
    """A question to `loss`, with the other definitions in use."""
    masked = without_dropped(step)
    also = {
        "an empty row counts": expected_gradient(masked, empty_counts=True),
        "the mean of the microbatches' means": mean_of_means(masked),
    }
    if step.dropped:
        also = {"dropped rows stay in the average": also["an empty row counts"]}
    if step.loss == "cispo":
        also["cap 1 + 5"] = expected_gradient(replace(step, options={"cap": 6.0}))
        also["a lower bound of .8"] = expected_gradient(replace(step, options={"cap": 5.0, "floor": 0.8}))
        also["a product of two caps"] = expected_gradient(replace(step, loss="two caps"))
    if step.loss == "clip":
        also["a dual clip of 3"] = expected_gradient(replace(step, options=step.options | {"dual": 3.0}))
    return Case("loss", name, [step], expected_gradient(masked), also)


DEFINITIONS = ["ddof 1", "std of the raw rewards", "std weighted by tokens", "leave one out", "a lone reward stays"]
ADVANTAGES: list[tuple[str, list[float], list[int], str]] = [  # name, rewards, group ids, how
    ("std of the prompt", [1.0, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4, "prompt"),
    ("no std", [1.0, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4, "none"),
    ("the batch's std is that of the centred rewards", [1.0] * 7 + [0] * 8 + [1], [0] * 8 + [1] * 8, "batch"),
    ("the batch's std counts sequences", [1.0, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, "batch"),
    ("equal rewards (seven .1) give exactly 0", [0.1] * 7, [0] * 7, "prompt"),
    ("interleaved groups", [1.0, 5, 0, 7, 0, 5], [0, 1, 0, 1, 0, 1], "none"),
    ("a group of one gives 0", [1.0, 0, 1], [0, 0, 1], "none"),
]
RIGHT, WRONG = [1] * 16, [0] * 16
PHRASE, END = [7, 8, 9], [9]
PLAIN: list[tuple[str, str, list, Any]] = [  # method, name, inputs, expected
    ("filter", "equal +1, equal -1, mixed", [[1.0, 1, -1, -1, 1, -1], [0, 0, 1, 1, 2, 2]], [0, 0, 0, 0, 1, 1]),
    ("filter", "seven float32 thirds are equal", [[1 / 3] * 7, [0] * 7], [0] * 7),
    ("filter", "1/3 and its next float32 differ", [[1 / 3, 1 / 3 + 3e-8, 1 / 3], [0] * 3], [1] * 3),
    ("filter", "the middle row of 1, .5, 0 stays", [[1.0, 0.5, 0.0], [0] * 3], [1] * 3),
    ("penalty", "a ramp over the last L_cache tokens", [[0, 12, 13, 14], 14, 2], [0.0, 0.0, -0.5, -1.0]),
    ("penalty", "-1 beyond L_max", [[15, 20], 14, 2], [-1.0, -1.0]),
    ("history", "15 of 16 goes, 14 of 16 stays", [[("a", [1] * 15 + [0]), ("b", [1] * 14 + [0] * 2)]], ["a"]),
    ("history", "9 of 10 is .9", [[("a", [1] * 9 + [0])]], ["a"]),
    ("history", "the rate is that of all epochs", [[("a", WRONG), ("a", RIGHT)]], []),
    ("history", "all epochs, reached later", [[("a", [1] * 12 + [0] * 4), ("a", RIGHT), ("a", RIGHT)]], ["a"]),
    ("history", "kept through a restart", [[("a", RIGHT), ("b", WRONG)]], ["a"]),
    ("interrupt", "no end in the budget: the phrase, masked", [[3] * 5, "length", 4], (PHRASE, 4, [1] * 5 + [0] * 3)),
    ("interrupt", "cut in the answer: the rest of its budget", [[3, 3, 9, 5, 5], "length", 4], ([], 2, [1] * 5)),
    ("interrupt", "ended by itself without the mark", [[3, 3, 3, 0], "stop", 4], None),
    ("interrupt", "the answer's budget used up", [[9, 5, 5, 5, 5], "length", 4], None),
]


def head_case() -> Case:
    """log_softmax of an FP32 product of bfloat16 factors."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=random).bfloat16()
    weight = (0.3 * torch.randn(1000, 256, generator=random)).bfloat16()
    targets = torch.arange(64)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[range(64), targets]
    rounded = (hidden @ weight.T).float().log_softmax(-1)[range(64), targets]
    also = {"logits rounded to bfloat16": rounded.tolist()}
    return Case("logprobs", "FP32 product of bfloat16 factors", [hidden, weight, targets], exact.tolist(), also)


def all_cases() -> list[Case]:
    """79 questions."""
    cases = [step_case(name, step) for name, step in (loss_steps() | average_steps()).items()]
    for name, rewards, ids, how in ADVANTAGES:
        lengths = [1, 9] * (len(ids) // 2) if "sequences" in name else [5] * len(ids)
        also = {word: expected_advantages(rewards, ids, how, lengths, word) for word in DEFINITIONS}
        expected = expected_advantages(rewards, ids, how, lengths)
        cases.append(Case("advantages", name, [rewards, ids, how, lengths], expected, also))
    for method, name, inputs, expected in PLAIN:
        if method == "interrupt":
            inputs = [*inputs, PHRASE, END]
        cases.append(Case(method, name, inputs, expected))
    return [*cases, head_case()]


# ---------------------------------------------------------------------------------------------------------- the harness


def gradient(adapter: Any, step: Step) -> Tensor:
    """(N, T) of -d(loss) / d(log π): summed over microbatches, averaged over ranks."""
    if step.dropped:
        if not hasattr(adapter, "filter"):
            raise NotImplementedError
        step = without_dropped(step)
        if not getattr(adapter, "masks_dropped", False):
            step = replace(step, ranks=[[[row for row in range(len(step.mask)) if row not in step.dropped]]])
    leaf = torch.tensor(step.logprobs, requires_grad=True)
    everything = batch(step, leaf, sorted(row for parts in step.ranks for part in parts for row in part), 1)
    total = torch.zeros_like(leaf)
    for parts in step.ranks:
        for rows in parts:
            loss = adapter.loss(batch(step, leaf, rows, len(parts)), everything)
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise TypeError("loss must return a tensor that has a gradient")
            [part] = torch.autograd.grad(loss, leaf, retain_graph=True)
            total += part / len(step.ranks)
    return -total


def without_dropped(step: Step) -> Step:
    """The step with an empty mask in the rows that the zero-variance filter drops."""
    mask = [[0.0] * len(line) if row in step.dropped else line for row, line in enumerate(step.mask)]
    return replace(step, mask=mask)


def batch(step: Step, leaf: Tensor, rows: list[int], parts: int) -> Batch:
    """These rows of `step` as tensors."""

    def tensor(values: list) -> Tensor:
        return torch.tensor([values[row] for row in rows])

    return Batch(
        step=step,
        rows=rows,
        logprobs=leaf[rows],
        behaviour=tensor(step.behaviour),
        old=tensor(step.old),
        mask=tensor(step.mask),
        advantages=tensor(step.advantages),
        group_ids=tensor(step.group_ids),
        parts=parts,
        ranks=len(step.ranks),
    )


def ask(adapter: Any, case: Case) -> Any:
    """What the adapter answers. Lists of numbers become tensors, but for histories and token ids."""
    if case.method == "loss":
        return gradient(adapter, case.inputs[0])
    inputs = case.inputs
    if case.method not in ("history", "interrupt"):
        inputs = [torch.tensor(x) if isinstance(x, list) else x for x in inputs]
    return getattr(adapter, case.method)(*inputs)


def check(adapter: Any) -> list[Row]:
    """One row a case. Never raises what the adapter raises."""
    rows = []
    for case in all_cases():
        verdict, detail = "not offered", ""
        if hasattr(adapter, case.method):
            try:
                verdict, detail = judge(case, ask(adapter, case))
            except NotImplementedError:
                pass
            except Exception as error:
                verdict, detail = "error", f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(Row(case.method, case.name, verdict, detail))
    return rows


def judge(case: Case, answer: Any) -> tuple[str, str]:
    """(verdict, detail)."""
    if case.method in ("history", "interrupt"):
        answer = sorted(answer) if case.method == "history" else answer
        return ("agrees", "") if answer == case.expected else ("differs", f"{answer} for {case.expected}")
    actual = torch.as_tensor(answer).detach().double().flatten()
    expected = torch.tensor(case.expected, dtype=torch.float64).flatten()
    if actual.shape != expected.shape:
        return "error", f"{len(actual)} numbers for {len(expected)}"
    if not actual.isfinite().all():
        return "error", "NaN or infinity"
    if equal(actual, expected):
        return "agrees", ""
    for name, values in case.also.items():
        if equal(actual, torch.tensor(values, dtype=torch.float64).flatten()):
            return f"another definition: {name}", ""
    factor = scale(actual, expected)
    if factor > 0 and equal(actual / factor, expected):
        return "differs", f"x {factor:.3g}"
    first = int((actual - expected).abs().argmax())
    return "differs", f"{actual[first]:.3g} for {expected[first]:.3g}"


def scale(actual: Tensor, expected: Tensor) -> float:
    """The factor that brings `expected` nearest to `actual`; 0 if there is none."""
    return float((actual @ expected) / (expected @ expected)) if expected.any() else 0.0


def equal(actual: Tensor, expected: Tensor) -> bool:
    """Within TOLERANCE of the largest expected value."""
    return float((actual - expected).abs().max()) <= TOLERANCE * (float(expected.abs().max()) or 1.0)


def is_deviation(row: Row) -> bool:
    """Whether the papers say otherwise."""
    left_open = row.verdict.removeprefix("another definition: ") in OPEN
    return row.verdict not in ("agrees", "not offered") and not left_open


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 no deviation, 1 some, 2 no such adapter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("adapter", nargs="?", help="MODULE:CLASS, an object with the methods above")
    parser.add_argument("--json", metavar="FILE", help="write inputs and expected values of all cases")
    args = parser.parse_args(argv)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([vars(case) for case in all_cases()], file, default=as_data)
        print(f"written: {args.json}")
    if not args.adapter:
        print(__doc__)
        return 0
    sys.path.insert(0, "")
    try:
        module, name = args.adapter.split(":")
        adapter = getattr(importlib.import_module(module), name)()
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        print(f"conformance.py: {args.adapter} is no MODULE:CLASS that can be made ({error})", file=sys.stderr)
        return 2
    rows = check(adapter)
    for row in rows:
        print(f"{row.method:10} {row.case:50} {row.verdict} {row.detail}".rstrip())
    deviations = sum(map(is_deviation, rows))
    print(f"{sum(row.verdict == 'agrees' for row in rows)} of {len(rows)} agree, {deviations} deviate")
    return 1 if deviations else 0


def as_data(value: Any) -> Any:
    """A step as a dict, a tensor as lists."""
    return value.float().tolist() if isinstance(value, Tensor) else asdict(value)


if __name__ == "__main__":
    raise SystemExit(main())
