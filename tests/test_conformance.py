"""conformance.py: our own functions agree in every case, and planted mistakes are named."""

import json

import pytest
import torch

import conformance
import filters
import fp32_head
import length_control
import losses
import masks

CLIPPED = {"clip": losses.dapo, "gspo": losses.gspo}


class Ours:
    """The functions of this repository, as an adapter."""

    def loss(self, part, step):
        name, options = part.step.loss, part.step.options
        rows = part.logprobs, part.behaviour, part.advantages, part.mask
        if name in CLIPPED:
            token_loss, _ = CLIPPED[name](*rows, eps_low=options["low"], eps_high=options["high"])
        elif name == "tis":
            clip = {"eps_low": options["low"], "eps_high": options["high"], "cap": options["cap"]}
            token_loss, _ = losses.tis(*rows, old_logprobs=part.old, **clip)
        elif name in masks.MASKS:
            kept, _ = masks.MASKS[name](*rows, **options)
            token_loss = kept * losses.cispo(*rows, eps_max=1e9)[0]
        else:
            token_loss, _ = losses.cispo(*rows, eps_max=options.get("cap", 5.0))
        weights = losses.aggregation_weights(step.mask, step.group_ids, step.step.average, step.step.constant)
        mine = [step.rows.index(row) for row in part.rows]
        return (weights[mine] * token_loss).sum() * part.ranks

    def advantages(self, rewards, group_ids, how, lengths):
        return losses.normalize_advantages(rewards, group_ids, how)

    def filter(self, rewards, group_ids):
        return filters.has_variance(rewards, group_ids)

    def penalty(self, lengths, max_length, cache_length):
        return length_control.overlong_penalty(lengths, max_length, cache_length)

    def history(self, visits):
        state = filters.PassRateHistory(0.9).state_dict()
        for prompt, correct in visits:
            history = filters.PassRateHistory(0.9)
            history.load_state_dict(json.loads(json.dumps(state)))
            history.update(prompt, [bool(bit) for bit in correct])
            state = history.state_dict()
        return [prompt for prompt in {prompt for prompt, _ in visits} if history.retired(prompt)]

    def interrupt(self, ids, finish_reason, answer_budget, phrase_ids, end_ids):
        control = length_control.Interruption(1, 5, answer_budget, phrase_ids, end_ids)
        leg = control.second_leg([], ids, finish_reason)
        if leg is None:
            return None
        return leg.forced_ids, leg.max_tokens, control.mask(len(ids), len(leg.forced_ids), 0)

    def logprobs(self, hidden, weight, targets):
        return fp32_head.token_logprobs(hidden, weight, targets)[0]


def verdicts(adapter) -> dict[str, str]:
    return {row.case: row.verdict for row in conformance.check(adapter) if row.verdict != "agrees"}


def test_ours_agrees_in_every_case():
    assert len(conformance.all_cases()) == 79
    assert verdicts(Ours()) == {}


def replaced(name, function):
    return type("Adapter", (Ours,), {name: function})()


PLANTED = [
    (
        "advantages",
        lambda self, r, g, how, n: losses.normalize_advantages(r, g, how, ddof=1),
        "std of the prompt",
        "another definition: ddof 1",
    ),
    ("penalty", lambda self, n, most, cache: (most - cache - n).clamp(max=0) / cache, "-1 beyond L_max", "differs"),
    ("filter", lambda self, r, g: torch.ones(len(r)), "seven float32 thirds are equal", "differs"),
    ("loss", lambda self, part, step: Ours.loss(self, part, step) / part.ranks, "prompt average: 2 ranks", "differs"),
    ("loss", lambda self, part, step: 1.0, "GSPO: its clip", "error"),
    ("loss", lambda self, part, step: part.logprobs.sum() * float("nan"), "GSPO: its clip", "error"),
    ("advantages", lambda self, r, g, how, n: r[:1], "no std", "error"),
]


@pytest.mark.parametrize(("name", "function", "case", "verdict"), PLANTED)
def test_a_planted_mistake_is_named(name, function, case, verdict):
    """Also what an adapter may do wrong: a float, NaN, another shape. Never a traceback."""
    assert verdicts(replaced(name, function))[case] == verdict


def test_what_is_not_offered_is_no_deviation():
    rows = conformance.check(object())
    assert {row.verdict for row in rows} == {"not offered"}
    assert not any(map(conformance.is_deviation, rows))
