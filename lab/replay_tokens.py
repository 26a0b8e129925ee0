"""A recorded batch token by token: which tokens two losses weigh differently, on the terminal and in a browser.

The gradient of a batch is a sum over its tokens, of c ∇ log pi. A token's *weight* is its c, as a multiple of the
recipe's average and advantage: for CISPO min(rho, 5), for a loss that silences the token 0. It *helps* if
learning from it raises the pass rate: if moving the weights along g* raises its log-prob for A > 0, or lowers it for
A < 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from replay_step import Replayer, Step, Variant, metric

import train
from runtime.microbatches import TokenRow
from runtime.trainer import Trainer, TrainingBatch

TEMPLATE = Path(__file__).parent / "replay.html"


def coefficients(trainer: Trainer, batch: TrainingBatch, logprobs: Tensor) -> Tensor:
    """(N, T) what the loss puts before the gradient of each token's log-prob: average, factor and advantage. `logprobs`
    (N, T) are the trainer's."""
    logprobs = logprobs.clone().requires_grad_()
    options = dict(trainer.clip_options)
    if batch.old_logprobs is not None:
        options["old_logprobs"] = batch.old_logprobs
    token_loss, _ = trainer.policy_loss(logprobs, batch.behaviour_logprobs, batch.advantages, batch.mask, **options)
    (batch.token_weights * token_loss).sum().backward()
    return -logprobs.grad


def shares(batch: TrainingBatch, coefficient: Tensor, logprobs: Tensor) -> tuple[float, float]:
    """Of the tokens with an advantage: the share that the loss silences, and the share that it weighs by less than
    rho."""
    pull = batch.token_weights * batch.advantages[:, None]  # (N, T)
    counted = batch.mask & (pull != 0)  # (N, T)
    factor = coefficient[counted] / pull[counted]
    rho = (logprobs - batch.behaviour_logprobs)[counted].exp()
    silenced = factor == 0
    return float(silenced.float().mean()), float((~silenced & (factor < 0.9999 * rho)).float().mean())


def token_slopes(trainer: Trainer, rows: list[TokenRow], direction: Tensor) -> Tensor:
    """(N, T) how fast each token's log-prob rises if the weights go along `direction` (parameters,), per unit of it:
    the difference of two forward passes, a thousandth of the weights' size to each side."""
    parameters = list(trainer.model.parameters())
    size = 1e-3 * float(torch.cat([x.detach().flatten() for x in parameters]).norm() / direction.norm())
    before = [parameter.detach().clone() for parameter in parameters]
    shifts = direction.split([parameter.numel() for parameter in parameters])
    scores = []
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, middle, shift in zip(parameters, before, shifts, strict=True):
                parameter.copy_(middle + sign * size * shift.view_as(middle).to(middle.device))
            if trainer.low_precision:
                trainer.low_precision.round_masters()
            scores.append(trainer.score(rows))
        for parameter, middle in zip(parameters, before, strict=True):
            parameter.copy_(middle)
    if trainer.low_precision:
        trainer.low_precision.round_masters()
    return (scores[0] - scores[1]) / (2 * size)


def token_table(replayer: Replayer, step: Step, variants: Sequence[Variant]) -> dict:
    """The groups of the step that the recipe (the first of `variants`) trains on, token by token, for JSON. The weights
    of the step must be loaded."""
    rows = train.token_rows(step.groups)
    place = {id(row.completion_ids): i for i, row in enumerate(rows)}
    shape = len(rows), max(len(row.mask) for row in rows)

    def spread(batch: TrainingBatch, values: Tensor) -> Tensor:
        """(N, T) of all rows, from the (M, t) of those of the batch; 0 elsewhere."""
        result = torch.zeros(shape)
        for row, own in zip(batch.rows, values, strict=True):
            result[place[id(row.completion_ids)], : len(own)] = own
        return result

    weights, pull, advantages = {}, torch.zeros(shape), torch.zeros(len(rows))
    for variant in variants:
        trainer, batch = replayer.trainer_of(variant.flags), replayer.batch(step.groups, step.rewards, variant.flags)
        logprobs = trainer.score(batch.rows)
        if variant is variants[0]:
            pull = spread(batch, batch.token_weights * batch.advantages[:, None])
            rho = spread(batch, (logprobs - batch.behaviour_logprobs).exp() * batch.mask)
            for row, advantage in zip(batch.rows, batch.advantages.tolist(), strict=True):
                advantages[place[id(row.completion_ids)]] = advantage
        own = spread(batch, coefficients(trainer, batch, logprobs))
        weights[variant.name] = torch.where(pull != 0, own / pull, 0.0)
    slopes = token_slopes(replayer.trainer_of(variants[0].flags), rows, metric(step.variance) * step.stars.mean(0))
    helps = slopes * advantages[:, None] > 0
    text, groups = replayer.run.task.text, []
    for number, group in enumerate(step.groups):
        first = number * len(group.rollouts)
        completions = []
        for i, rollout in enumerate(group.rollouts, first):
            if not advantages[i]:
                continue
            words = [
                [text([token]), bool(pull[i, t] != 0), rounded(rho[i, t]), bool(helps[i, t]), abs(float(pull[i, t]))]
                + [rounded(weights[name][i, t]) for name in weights]
                for t, token in enumerate(rollout.completion_ids)
            ]
            completions.append({"advantage": rounded(advantages[i]), "reward": rollout.reward, "tokens": words})
        if completions:
            groups.append({"prompt": text(list(group.problem.prompt_ids)), "completions": completions})
    return {"step": step.number, "variants": list(weights), "groups": groups}


def rounded(value: Tensor) -> float:
    return round(float(value), 3) + 0.0  # no -0


def differences(table: dict, count: int, one: int = 0, other: int = 1) -> str:
    """The `count` tokens on which two variants differ most, each text once, and what of the difference helps."""
    names, tokens = table["variants"], []
    for group in table["groups"]:
        for completion in group["completions"]:
            for t, (_, trains, rho, helps, pull, *weights) in enumerate(completion["tokens"]):
                if trains:
                    text = " ".join(token[0] for token in completion["tokens"][max(0, t - 6) : t + 1])
                    gap = pull * abs(weights[one] - weights[other])
                    tokens.append((gap, text, rho, completion["advantage"], weights[one], weights[other], helps))
    tokens.sort(key=lambda token: -token[0])
    largest = {text: numbers for _, text, *numbers in reversed(tokens)}  # the first of each text wins
    order = dict.fromkeys(text for gap, text, *_ in tokens if gap)
    lines = [f"step {table['step']}: {'... and the token':40} rho      A  {names[one]:>10} {names[other]:>10}  helps"]
    for text in list(order)[:count]:
        rho, advantage, first, second, helps = largest[text]
        ends = f"... {text}"[-48:]
        lines.append(f"{ends:48} {rho:6.2f} {advantage:6.2f} {first:10.2f} {second:10.2f}  {'yes' if helps else 'no'}")
    moved = sum(token[0] for token in tokens)
    share = sum(token[0] for token in tokens if token[-1]) / moved if moved else 0.0
    lines.append(f"of the weight on which the two differ, {share:.0%} lies on tokens that help")
    return "\n".join(lines)


def write_page(table: dict, path: Path) -> None:
    """One file, which a browser shows without any network."""
    data = json.dumps(table).replace("<", "\\u003c")
    path.write_text(TEMPLATE.read_text().replace("/*DATA*/null", data))
