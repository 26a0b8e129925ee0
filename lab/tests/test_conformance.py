"""conformance.py: our own functions agree in every case, classic mistakes are named, and no adapter gives a traceback."""

import dataclasses
import json
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import filters
import fp32_head
import length_control
import losses
import pipeline_rl
from lab import conformance, masks

CLIPPED = {"clip": losses.dapo, "gspo": losses.gspo}


class Ours:
    """The functions of this repository, as an adapter."""

    def loss(self, part, step):
        weights = losses.aggregation_weights(step.mask, step.group_ids, step.average, step.constant)
        places = [step.rows.index(row) for row in part.rows]
        return (weights[places] * self.token_loss(part)).sum() * part.ranks

    def token_loss(self, part):
        options = part.options
        rows = part.logprobs, part.behaviour, part.advantages, part.mask
        if part.loss in CLIPPED:
            return CLIPPED[part.loss](*rows, eps_low=options["low"], eps_high=options["high"])[0]
        if part.loss == "tis":
            clip = {"eps_low": options["low"], "eps_high": options["high"], "cap": options["cap"]}
            return losses.tis(*rows, old_logprobs=part.old, **clip)[0]
        if part.loss in masks.MASKS:
            weights, _ = masks.MASKS[part.loss](*rows, **options)
            return weights * losses.cispo(*rows, eps_max=math.inf)[0]
        return losses.cispo(*rows, eps_max=options.get("cap", 5.0))[0]

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
            history.update(prompt, correct)
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

    generator_logprobs = logprobs

    def kl(self, logprobs, reference, estimator):
        return losses.kl_penalty(logprobs, reference, torch.ones_like(logprobs), estimator)

    def kl_sampled(self, logprobs, reference, estimator):
        return losses.kl_penalty(logprobs, reference, torch.ones_like(logprobs), estimator, sampling_term=True)

    def tempered(self, logits, targets, temperature):
        return fp32_head.token_logprobs(logits, torch.eye(logits.shape[1]), targets, temperature=temperature)[0]

    def prepare(self, rewards, prompts, group_ids, truncated, how):
        keep = filters.has_variance(rewards, group_ids)
        advantages = torch.zeros_like(rewards)
        advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], how)
        return advantages, keep & (truncated == 0)

    def dynamic_sampling(self, rewards, correct, group_ids):
        sampler = filters.DynamicSampling(len(rewards))
        return [sampler.offer(group, correct[group_ids == group]) for group in group_ids]

    def stale(self, scores, versions, now):
        recorded = scores[versions, torch.arange(len(versions))].tolist()
        mask = [1] * len(recorded)
        rollout = pipeline_rl.Rollout(mask, recorded, versions.tolist(), mask, "stop")
        ratios = (scores[now] - torch.tensor(rollout.logprobs)).exp()
        return torch.stack([ratios, torch.tensor(pipeline_rl.lags(rollout, now), dtype=torch.float32)])


@pytest.fixture(scope="module", autouse=True)
def one_set_of_cases():
    """The oracle's answers, which take most of a check's time, are computed once."""
    cases = conformance.all_cases()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(conformance, "all_cases", lambda: cases)
        yield


def rows_of(adapter) -> dict[str, conformance.Row]:
    """The rows that do not agree, by the name of their case."""
    return {row.case: row for row in conformance.check(adapter) if row.verdict != "agrees"}


def test_ours_agrees_in_every_case():
    assert [row.verdict for row in conformance.check(Ours())] == ["agrees"] * 149


def test_every_split_case_sees_what_it_is_named_for():
    """Averaging each microbatch by itself, or each rank, gives another gradient: the parts are uneven."""
    seen = 0
    for case in conformance.all_cases():
        layout = case.inputs[0].layout if case.method == "loss" else []
        for mistake, parts in (("microbatches'", sum(map(len, layout))), ("ranks'", len(layout))):
            if parts > 1:
                seen += 1
                assert not torch.allclose(case.also[f"the mean of the {mistake} means"], case.expected), case.name
    assert seen == 4 * 3 + (1 + 2) + 2 + 7 * 5 * 2


@pytest.mark.parametrize("how", ["prompt", "batch"])
@pytest.mark.parametrize("average", ["sample", "token", "prompt"])
def test_who_has_one_average_is_asked_with_that(average, how):
    """Then every loss is asked for, and each property of advantages that this way of scaling has."""

    def loss(self, part, step):
        if step.average != average:
            raise NotImplementedError
        return Ours.loss(self, part, step)

    def advantages(self, rewards, group_ids, asked, lengths):
        if asked != how:
            raise NotImplementedError
        return Ours.advantages(self, rewards, group_ids, asked, lengths)

    adapter = type("Adapter", (Ours,), {"loss": loss, "advantages": advantages})()
    rows = conformance.check(adapter)
    refused = {row.case for row in rows if row.verdict == "not offered"}
    other = {row.verdict for row in rows} - {"agrees", "not offered"}
    assert other == ({f"another definition: its {average} average"} if average != "sample" else set())  # of GSPO
    answered = {"sample": 8, "prompt": 14, "token": 9}
    assert len(refused & {row.case for row in rows if row.topic == "on_policy"}) == 39 - answered[average]
    assert not refused & {"equal rewards give exactly 0", "a lost rollout", "a group of one gives 0"}
    assert {row.topic for row in rows if row.case in refused} == {"on_policy", "advantages"}


OPTIONS = {
    "cispo": {"cap": 1.5},
    "clip": {"low": 0.2, "high": 0.3},
    "gspo": {"low": 0.05, "high": 0.1},
    "tis": {"low": 0.2, "high": 0.3, "cap": 1.5},
    "icepop": {"low": 0.5, "high": 1.5},
    "dppo": {"high": 0.1},
    "deepseek": {"high": 0.1},
    "m2po": {"high": 0.1},
}
AVERAGES = ["sample", "prompt", "token", "constant"]
LAYOUTS = [[[[0, 1, 2, 3, 4]]], [[[0, 2], [1, 3, 4]]], [[[3], [2, 0]], [[4, 1]]]]


@st.composite
def steps(draw, loss):
    """Five rows of four tokens, with holes and rows left out, on microbatches and ranks."""
    noise = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    first, second, third, fourth = torch.randn(4, 5, 4, generator=noise, dtype=torch.float64)
    rows = torch.tensor(draw(st.lists(st.booleans(), min_size=5, max_size=5)))
    logprobs = -0.1 - first.abs()
    return conformance.Batch(
        logprobs=logprobs,
        behaviour=logprobs - 0.4 * second,
        old=logprobs - 0.2 * third,
        mask=((fourth < 0.7) & rows[:, None]).float(),
        advantages=torch.tensor(draw(st.lists(st.sampled_from([-1.5, 0.5, 2.0]), min_size=5, max_size=5))),
        group_ids=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=5, max_size=5))),
        layout=LAYOUTS[0]
        if loss == "m2po"
        else draw(st.sampled_from(LAYOUTS)),  # which compares the tokens it is given
        loss=loss,
        options=OPTIONS[loss],
        average=draw(st.sampled_from(AVERAGES)),
    )


@pytest.mark.parametrize("loss", OPTIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_batch_agrees_with_the_oracle(loss, data):
    step = data.draw(steps(loss))
    expected = conformance.expected_gradient(step)
    torch.testing.assert_close(conformance.gradient(Ours(), step).double(), expected, atol=1e-5, rtol=1e-4)


REWARDS = st.sampled_from([-1.0, 0.0, 0.1, 1 / 3, 1.0])


@pytest.mark.parametrize("how", ["prompt", "batch", "none"])
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=12))
def test_any_rewards_agree_with_the_oracle(how, rows):
    """Groups of any size in any order; a lone row gets 0."""
    rewards, group_ids = (list(column) for column in zip(*rows, strict=True))
    expected = conformance.expected_advantages(rewards, group_ids, how, [1] * len(rows))
    actual = losses.normalize_advantages(torch.tensor(rewards), torch.tensor(group_ids), how)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def cispo(weight):
    """A `token_loss` with this weight as a function of ρ; of its cap where no other is asked for."""

    def token_loss(self, part):
        if part.loss != "cispo":
            return Ours.token_loss(self, part)
        trained = part.mask.bool()
        rho = torch.where(trained, part.logprobs - part.behaviour, 0.0).clamp(-20, 20).exp()
        return -weight(rho) * part.advantages[:, None] * part.logprobs * trained

    return token_loss


def ppo(self, part):
    """The gradient goes through the ratio and ends at the cap."""
    if part.loss != "cispo":
        return Ours.token_loss(self, part)
    rho = (part.logprobs - part.behaviour).exp()
    return -torch.where(part.mask.bool(), rho.clamp(max=5) * part.advantages[:, None], 0.0)


def exchanged(self, part):
    """DAPO with the lower bound above and the upper one below: ratios between .74 and .8 and between 1.2 and 1.26 tell."""
    if part.loss != "clip":
        return Ours.token_loss(self, part)
    low, high = part.options["low"], part.options["high"]
    return losses.dapo(part.logprobs, part.behaviour, part.advantages, part.mask, eps_low=high, eps_high=low)[0]


def every_row_counts(self, part, step):
    weights = losses.aggregation_weights(step.mask, step.group_ids, step.average, step.constant)
    full = (step.mask.sum(1) > 0).float().mean()  # share of the rows that have tokens
    places = [step.rows.index(row) for row in part.rows]
    return (full * weights[places] * self.token_loss(part)).sum() * part.ranks


def mean_of_means(self, part, step):
    return Ours.loss(self, part, part) / part.parts / part.ranks


def raw_std(self, rewards, group_ids, how, lengths):
    centred = losses.normalize_advantages(rewards, group_ids, "none")
    if how == "batch":
        return centred / rewards.std(correction=0)
    return losses.normalize_advantages(rewards, group_ids, how)


def rounded_std(self, rewards, group_ids, how, lengths):
    """A float32 mean and std, as (r - mean) / (std + 1e-9)."""
    if how != "prompt":
        return losses.normalize_advantages(rewards, group_ids, how)
    groups = [rewards[group_ids == g] for g in group_ids.unique()]
    return torch.cat([(group - group.mean()) / (group.std(correction=0) + 1e-9) for group in groups])


def last_epoch(self, visits):
    return [prompt for prompt, correct in dict(visits).items() if sum(correct) >= 0.9 * len(correct)]


def trained_phrase(self, *inputs):
    leg = Ours.interrupt(self, *inputs)
    return leg and (*leg[:2], [1] * len(leg[2]))


def goes_on(self, ids, finish_reason, *rest):
    return Ours.interrupt(self, ids, "length", *rest)


def other_estimator(self, logprobs, reference, estimator):
    return Ours.kl(self, logprobs, reference, {"k1": "k3", "k3": "k1"}.get(estimator, estimator))


def other_ratio(self, logprobs, reference, estimator):
    log = logprobs - reference  # for k3 the ratio is π / π_ref
    return log.exp() - 1 - log if estimator == "k3" else Ours.kl(self, logprobs, reference, estimator)


def rounded_logits(self, hidden, weight, targets):
    return (hidden @ weight.T).float().log_softmax(-1)[torch.arange(len(targets)), targets]


def newest_version(self, scores, versions, now):
    return torch.stack([torch.ones(len(versions)), (now - versions).float()])


def oldest_version(self, scores, versions, now):
    return Ours.stale(self, scores, versions * 0 + versions[0], now)


def lag_of_the_next_step(self, scores, versions, now):
    return torch.stack([Ours.stale(self, scores, versions, now)[0], (now + 1 - versions).float()])


def clamped(self, logprobs, reference, estimator):  # at 10, as verl, SkyRL, OpenRLHF and ms-swift do
    return Ours.kl(self, logprobs, reference, estimator).clamp(-10, 10)


def sampling_left_out(self, logprobs, reference, estimator):
    return Ours.kl(self, logprobs, reference, estimator)


def tokens_only(self, part, step):  # AReaL's GSPO
    if part.average != "token":
        raise NotImplementedError
    return Ours.loss(self, part, step)


def divided_again(self, part, step):
    [rank] = [parts for parts in step.layout if list(part.rows) in parts]
    return Ours.loss(self, part, step) / len(rank)


def average_of_unmasked(self, part, step):
    if part.loss != "icepop":
        return Ours.loss(self, part, step)
    factors, _ = masks.MASKS["icepop"](
        step.logprobs.detach(), step.behaviour, step.advantages, step.mask, **step.options
    )
    return Ours.loss(self, part, dataclasses.replace(step, mask=step.mask * (factors > 0)))


def merged_prompts(self, rewards, prompts, group_ids, truncated, how):
    return Ours.prepare(self, rewards, prompts, prompts, truncated, how)


def std_before_filter(self, rewards, prompts, group_ids, truncated, how):
    _, trains = Ours.prepare(self, rewards, prompts, group_ids, truncated, how)
    return losses.normalize_advantages(rewards, group_ids, how), trains


def truncated_first(self, rewards, prompts, group_ids, truncated, how):
    whole = truncated == 0
    advantages, trains = torch.zeros_like(rewards), torch.zeros_like(whole)
    rest = rewards[whole], prompts[whole], group_ids[whole], truncated[whole]
    advantages[whole], trains[whole] = Ours.prepare(self, *rest, how)
    return advantages, trains


def temperature_1(self, logits, targets, temperature):
    return Ours.tempered(self, logits, targets, 1.0)


def of_shaped_rewards(self, rewards, correct, group_ids):
    return filters.has_variance(rewards, group_ids)


def leave_one_out(self, rewards, group_ids):  # NeMo-RL's, by default
    others = [rewards[(group_ids == g) & (torch.arange(len(rewards)) != i)] for i, g in enumerate(group_ids)]
    return [bool((x != x[:1]).any()) for x in others]


CAPPED = "CISPO: above the cap of 5 a token still trains"
HEADS = [f"FP32 product{of}, of bfloat16 factors" for of in ("", " of the generator")]
STALE = "three versions in one completion"
PLANTED = {  # mistake: method, case, verdict
    "cap 1 + 5": ("token_loss", cispo(lambda rho: rho.detach().clamp(max=6)), CAPPED, "cap 1 + 5"),
    "a lower bound": (
        "token_loss",
        cispo(lambda rho: rho.detach().clamp(0.8, 5)),
        "CISPO: no lower bound",
        "a lower bound of .8",
    ),
    "no detach": ("token_loss", cispo(lambda rho: rho.clamp(max=5)), "CISPO: the weight has no gradient", ""),
    "gradient through the ratio": ("token_loss", ppo, CAPPED, ""),
    "the clip's sides exchanged": ("token_loss", exchanged, "DAPO: clip .2 below, .26 above", ""),
    "empty rows counted": (
        "loss",
        every_row_counts,
        "sample average: a row without tokens",
        "an empty row counts",
    ),
    "std of raw rewards": (
        "advantages",
        raw_std,
        "the batch's std is that of the centred rewards",
        "std of the raw rewards",
    ),
    "std + 1e-9": ("advantages", rounded_std, "equal rewards give exactly 0", ""),
    "mean of means": (
        "loss",
        mean_of_means,
        "sample average: 2 microbatches",
        "the mean of the microbatches' means",
    ),
    "last epoch": ("history", last_epoch, "counts of earlier visits last, also through a restart", ""),
    "k1 and k3 exchanged": ("kl", other_estimator, "KL: k1, its value and gradient", "k3"),
    "k3 and k1 exchanged": ("kl", other_estimator, "KL: k3, its value and gradient", "k1"),
    "k3 of the other KL": ("kl", other_ratio, "KL: k3, its value and gradient", "k3 of π / π_ref"),
    "FP32 logits in the generator only": ("logprobs", rounded_logits, HEADS[0], "bfloat16 logits"),
    "FP32 logits in the trainer only": ("generator_logprobs", rounded_logits, HEADS[1], "bfloat16 logits"),
    "the newest version's log-probs": (
        "stale",
        newest_version,
        "one version in a completion",
        "log-probs of the newest version",
    ),
    "the oldest version's": ("stale", oldest_version, STALE, "the first version's log-probs and lag"),
    "a lag of one more": ("stale", lag_of_the_next_step, "one version in a completion", "a lag that is 1 more"),
    "the phrase trains": ("interrupt", trained_phrase, "the phrase does not train", ""),
    "k3 clamped": ("kl", clamped, "KL: k3 of more than 10", "clamped to 10"),
    "no sampling term": (
        "kl_sampled",
        sampling_left_out,
        "KL: k3 with its sampling term",
        "without the sampling term",
    ),
    "GSPO weighed by tokens": (
        "loss",
        tokens_only,
        "GSPO: padding is not in that mean",
        "its token average",
    ),
    "two divisors": (
        "loss",
        divided_again,
        "sample average: 2 microbatches",
        "divided once more by the number of microbatches",
    ),
    "IcePop's masked tokens leave": ("loss", average_of_unmasked, "IcePop mask: .5, 5", ""),
    "a prompt drawn twice": (
        "prepare",
        merged_prompts,
        "a prompt drawn twice is two groups",
        "a prompt drawn twice is one group",
    ),
    "std before the filter": (
        "prepare",
        std_before_filter,
        "the std of what the filter keeps",
        "a std that counts dropped groups",
    ),
    "truncated rows leave first": (
        "prepare",
        truncated_first,
        "a truncated row counts in its group's mean",
        "means without truncated rows",
    ),
    "another temperature": (
        "tempered",
        temperature_1,
        "log-probs at the generator's temperature",
        "log-probs at temperature 1",
    ),
    "shaped rewards": (
        "dynamic_sampling",
        of_shaped_rewards,
        "dynamic sampling counts right answers",
        "by the rewards",
    ),
    "the others' std": (
        "filter",
        leave_one_out,
        "the right one of 1, 0, 0, 0 stays",
        "the std of the other rows",
    ),
    "goes on after EOS": ("interrupt", goes_on, "ended by itself without the mark", ""),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_classic_mistake_is_named(mistake):
    """By the case that was made for it, as another definition where somebody uses it on purpose, and a first cause."""
    method, function, case, definition = PLANTED[mistake]
    rows = conformance.check(type("Adapter", (Ours,), {method: function})())
    said = rows if definition in conformance.OPEN else conformance.first_causes(rows)
    assert {row.case: row.verdict for row in said}[case] == (
        f"another definition: {definition}" if definition else "differs"
    )


def with_answer(method, answer):
    return type("Adapter", (Ours,), {method: lambda self, *inputs: answer})()


@pytest.mark.parametrize(
    ("method", "answer", "case", "detail"),
    [
        ("loss", 1.0, CAPPED, "TypeError: loss must return a tensor that has a gradient, not 1.0"),
        ("loss", torch.tensor(1.0), CAPPED, "TypeError: loss must return a tensor that has a gradient"),
        ("advantages", torch.ones(1), "no std", "shape (1,) for (8,)"),
        ("advantages", torch.ones(8, 1), "no std", "shape (8, 1) for (8,)"),
        ("advantages", torch.full((8,), math.nan), "no std", "NaN or infinity"),
        ("filter", None, "equal +1, equal -1, mixed", "RuntimeError: Could not infer dtype of NoneType"),
        ("prepare", 1, "the std of what the filter keeps", "TypeError: 'int' object is not iterable"),
        ("history", 1.5, "9 of 10 is .9", "1.5 for ['a']"),
        ("interrupt", 7, "the answer's budget used up", "7 for None"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_a_row(method, answer, case, detail):
    row = rows_of(with_answer(method, answer))[case]
    assert row.verdict in ("error", "differs")
    assert row.detail.startswith(detail)
    assert conformance.is_deviation(row)


def test_a_gradient_of_nan_is_a_row():
    adapter = type("Adapter", (Ours,), {"token_loss": lambda self, part: part.logprobs * math.nan})()
    assert {row.detail for row in rows_of(adapter).values()} == {"NaN or infinity in the gradient"}


def test_what_an_adapter_raises_is_a_row():
    """Also in a property. NotImplementedError is no error."""

    def division(self, *inputs):
        return 1 / 0

    def nothing(self, *inputs):
        raise NotImplementedError

    adapter = type("Adapter", (), {"penalty": division, "filter": property(division), "history": nothing})()
    verdicts = {(row.topic, row.verdict, row.detail) for row in conformance.check(adapter)}
    assert ("penalty", "error", "ZeroDivisionError: division by zero") in verdicts
    assert ("filter", "error", "ZeroDivisionError: division by zero") in verdicts
    assert ("history", "not offered", "") in verdicts


@pytest.mark.parametrize(("factor", "detail"), [(2, "x 2"), (0.25, "x 0.25"), (-1, "x -1")])
def test_a_factor_is_named(factor, detail):
    adapter = type("Adapter", (Ours,), {"loss": lambda self, *inputs: factor * Ours.loss(self, *inputs)})()
    row = rows_of(adapter)["token average: rows of one length"]
    assert row.verdict == "differs"
    assert row.detail == detail


@pytest.mark.parametrize(
    ("verdict", "detail", "guess"),
    [
        ("agrees", "", ""),
        ("not offered", "", ""),
        ("another definition: ddof 1", "", ""),
        ("error", "KeyError: 'x'", ""),
        ("another definition: cap 1 + 5", "", "[Eq. 4]"),
        ("differs", "x -1", "[Eq. 4; the sign]"),
        ("differs", "x 0.25", "[Eq. 4; a count, a divisor, microbatches or ranks]"),
        ("differs", "NaN or infinity", "[Eq. 4; an exp that overflows, 0 / 0, or what lies outside the mask]"),
        ("differs", "0 for 2", "[Eq. 4; made for: one cap]"),
    ],
)
def test_the_hint_is_by_what_came_out(verdict, detail, guess):
    """The mistake that a case was made for is named only where a number alone came out wrong."""
    row = conformance.Row("cispo", "a case", verdict, detail, "Eq. 4; one cap")
    assert conformance.hint(row).strip() == guess


def test_rows_may_be_masked_or_left_out():
    """A trainer that keeps dropped rows with an empty mask agrees too, if it counts no empty row."""
    assert rows_of(type("Adapter", (Ours,), {"masks_dropped": True})()) == {}
    counting = type("Adapter", (Ours,), {"masks_dropped": True, "loss": every_row_counts})()
    row = rows_of(counting)["sample average: a group with equal rewards"]
    assert row.verdict == "another definition: dropped rows stay in the average"
    assert conformance.is_deviation(row)


def test_what_the_papers_leave_open_is_no_deviation():
    def sample_std(self, rewards, group_ids, how, lengths):
        return losses.normalize_advantages(rewards, group_ids, how, ddof=1)

    rows = rows_of(type("Adapter", (Ours,), {"advantages": sample_std})()).values()
    assert {row.verdict for row in rows} == {"another definition: ddof 1"}
    assert not any(map(conformance.is_deviation, rows))


def test_robustness_is_told_and_sets_no_exit_code(capsys, monkeypatch):
    """A tolerance of 1e-6 takes 1/3 and its next float32 for equal."""

    def tolerant(self, rewards, group_ids):
        return torch.stack([(of := rewards[group_ids == g]).max() - of.min() > 1e-6 for g in group_ids])

    monkeypatch.setattr("test_conformance.Tolerant", type("Adapter", (Ours,), {"filter": tolerant}), raising=False)
    assert conformance.main(["test_conformance:Tolerant"]) == 0
    assert "nearest  robustness 7 agrees, 1 differs" in capsys.readouterr().out


def test_who_does_not_answer_is_not_asked_again(monkeypatch):
    """The method that hangs gives errors; the others go on."""
    monkeypatch.setattr(conformance, "SECONDS", 2.0)
    calls = []

    def hangs(self, visits):
        calls.append(visits)
        threading.Event().wait(60)

    rows = rows_of(type("Adapter", (Ours,), {"history": hangs})()).values()
    assert {(row.topic, row.verdict) for row in rows} == {("history", "error")}
    assert {row.detail for row in rows} == {"TimeoutError: no answer in 2 s; this method is not asked again"}
    assert (len(calls), len(rows)) == (1, 7)


def test_each_verdict_is_given_twice(capsys, monkeypatch):
    """By a trainer whose penalty has a floor only where it is asked for."""

    def penalty(self, lengths, max_length, cache_length):
        value = (max_length - cache_length - lengths).clamp(max=0) / cache_length
        return value.clamp(min=-1) if self.settings == "nearest" else value

    monkeypatch.setattr(
        "test_conformance.Twice", type("Adapter", (), {"settings": "nearest", "penalty": penalty}), raising=False
    )
    assert conformance.main(["test_conformance:Twice"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "other penalty -1 beyond L_max agrees by default -1 beyond L_max differs -4 for -1 nearest" in printed
    assert "default other 73 not asked, 1 agrees, 1 differs" in printed


def test_a_whole_step_may_be_asked():
    """`gradient` instead of `loss`: one call has the rows of all microbatches."""

    def whole_step(self, step):
        exact = dataclasses.replace(step, logprobs=step.logprobs.detach())
        return conformance.expected_gradient(
            dataclasses.replace(exact, average="sample") if step.loss == "gspo" else exact
        )

    adapter = type("Adapter", (), {"gradient": whole_step, "filter": None})()
    rows = [row for row in conformance.check(adapter) if row.source and row.verdict != "not asked"]
    assert {row.verdict for row in rows} == {"agrees", "not offered"}
    assert {row.case.split(": ")[-1] for row in rows if row.verdict == "not offered" and row.topic == "on_policy"} == {
        "a group with equal rewards"
    }


def test_nothing_asked_is_no_deviation_and_no_success(capsys):
    assert {row.verdict for row in conformance.check(object())} == {"not asked"}
    assert conformance.main(["builtins:object"]) == 1
    summary = capsys.readouterr().out
    assert summary.startswith("nearest  recipe     66 not asked\n")
    assert "\nanswered: on_policy 0 of 39, cispo 0 of 11, " in summary


@pytest.mark.parametrize("name", ["nothing", "test_conformance", "test_conformance:Nothing", "math:nan"])
def test_an_adapter_that_cannot_be_made_is_one_sentence(name, capsys):
    assert conformance.main([name]) == 2
    assert f"{name} is no MODULE:CLASS" in capsys.readouterr().err


def test_the_command_line(tmp_path, capsys):
    """Ours passes; the vectors are strict JSON, with NaN as null."""
    assert conformance.main(["test_conformance:Ours"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 149 + 4
    assert [" ".join(line.split()) for line in lines[-4:-1]] == [
        "nearest recipe 66 agrees",
        "nearest other 75 agrees",
        "nearest robustness 8 agrees",
    ]
    assert "on_policy 39 of 39" in lines[-1]
    path = tmp_path / "vectors.json"
    assert conformance.main(["--json", str(path)]) == 0
    cases = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert len({case["name"] for case in cases}) == 149
    padding = next(case for case in cases if case["name"] == "CISPO: NaN where the mask is 0")
    assert padding["inputs"][0]["behaviour"][0][1] is None
    assert padding["expected"][0] == pytest.approx([2.0, 0.0, 4.0, 0.0], rel=0.02)
