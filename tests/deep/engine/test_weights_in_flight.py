"""Log-probs and weights in flight, with real vLLM.

Oracles: the trainer's own forward pass in transformers; for completions that several versions sampled, a transformers
cache that is filled piece by piece with the weights that were live. Weights are random and differ wholly between
versions, so that tokens, keys or values of a wrong version are nats away, not 1e-4.
"""

from types import SimpleNamespace

import pytest
import torch
from fake_engine import Problem, problems, wait_until
from real_engine import SharedEngine
from stale_cache import stale_cache_logprobs
from tiny_model import END_OF_THINKING, PHRASE, STOP, TinyModel

from generator import Generator
from length_control import Interruption
from pipeline_rl import FORCED, Pacer, Rollout

CLOSE = 1e-5  # nats a token, mean; measured 1e-6. The runs' own limit is 1e-4


def take_and_flatten(generator: Generator, count: int) -> tuple[list[Problem], list[Rollout]]:
    """Takes `count` groups: the prompt of each rollout, and the rollouts."""
    pairs = [(group.problem, rollout) for group in generator.take(count) for rollout in group.rollouts]
    return [p for p, _ in pairs], [r for _, r in pairs]


def evaluated(generator: Generator, prompts: list[Problem], n_samples: int) -> tuple[list[Problem], list[Rollout]]:
    """Evaluates: the prompt of each rollout, and the rollouts."""
    groups = generator.result_of(generator.evaluate(prompts, n_samples))
    return [p for p in prompts for _ in range(n_samples)], [r for group in groups for r in group]


def long_training(budget: int) -> SimpleNamespace:
    """As length control: training completions of `budget` tokens, evaluation completions of 12, and no second leg."""
    functions = {"draw_budget": lambda rng: budget, "second_leg": lambda *_: None}
    return SimpleNamespace(max_budget=12, max_completion=900, **functions)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_also_after_an_interruption(vllm_engine: SharedEngine, temperature: float) -> None:
    """Completions wholly by one version, in one leg and in two: per token the trainer finds the generator's log-prob.
    At temperature 0.7 a side that forgets it is 0.1 nats away. Forced tokens are the phrase, unsampled and masked.
    """
    control = Interruption(6, 12, answer_budget=5, phrase_ids=PHRASE, end_of_thinking_ids=[END_OF_THINKING])
    prompts = problems(12)
    options = {"length_control": control, "temperature": temperature}
    with vllm_engine.generator(prompts, rollouts=4, pacer=Pacer(12, 0), **options) as generator:
        asked, rollouts = take_and_flatten(generator, 12)
        counters = generator.counters

    gap = vllm_engine.tiny.gap(vllm_engine.tiny.weights(0), asked, rollouts, temperature=temperature)
    assert gap.mean() < CLOSE and gap.max() < 1e-4
    assert vllm_engine.tiny.gap(vllm_engine.tiny.weights(0), asked, rollouts, temperature=0.85).mean() > 0.02

    interrupted = [r for r in rollouts if r.interrupted]
    assert 5 < len(interrupted) < len(rollouts)
    budgets = set()
    for rollout in interrupted:
        start = rollout.mask.index(0)
        budgets.add(start)
        assert rollout.completion_ids[start : start + 3] == PHRASE
        assert rollout.mask == [1] * start + [0] * 3 + [1] * (len(rollout.mask) - start - 3)
        assert rollout.logprobs[start : start + 3] == [0.0] * 3
        assert END_OF_THINKING not in rollout.completion_ids[:start] and 1 <= len(rollout.mask) - start - 3 <= 5
    assert min(budgets) >= 6 and max(budgets) <= 12 and len(budgets) > 3
    for rollout in rollouts:
        assert rollout.finish_reason == ("stop" if rollout.completion_ids[-1] == STOP else "length")
        assert [v for v, m in zip(rollout.versions, rollout.mask, strict=True) if m] == [0] * sum(rollout.mask)
        assert all(v == FORCED for v, m in zip(rollout.versions, rollout.mask, strict=True) if not m)
        assert rollout.prefilled >= 10
    # An interrupted one prefills the prompt, then prompt + first leg + phrase: shorter than the cache's blocks of 32.
    assert [r.prefilled for r in interrupted] == [10 + 10 + r.mask.index(0) + 3 for r in interrupted]
    assert counters.prefilled == sum(r.prefilled for r in rollouts)
    assert counters.sampled == sum(sum(r.mask) for r in rollouts)


def test_a_second_leg_finds_the_first_ones_keys_and_values(vllm_engine: SharedEngine) -> None:
    """Same salt in both legs: of a prompt of 40 tokens, the second leg's first block of 32 comes from the cache."""
    control = Interruption(8, 8, answer_budget=3, phrase_ids=PHRASE, end_of_thinking_ids=[END_OF_THINKING])
    options = {"pacer": Pacer(6, 0), "rollouts": 1, "length_control": control}
    with vllm_engine.generator(problems(6, length=40), **options) as generator:
        rollouts = take_and_flatten(generator, 6)[1]
    assert sum(r.interrupted for r in rollouts) >= 2
    for rollout in rollouts:
        if rollout.interrupted:
            assert rollout.prefilled == 40 + (40 + 8 + 3 - 32)


def check_weights_move(generator: Generator, tiny: TinyModel, long: list[Problem]) -> None:
    """Ten updates while the completions of `long` run: the body of a test for tied and for untied heads."""
    weights = {version: tiny.weights(100 + version) for version in range(1, 11)} | {0: tiny.weights(0)}
    wait_until(lambda: generator.pacer.admitted == len(long))
    fresh = []
    for version in range(1, 11):
        generator.push(weights[version], version, 0)
        fresh.append(evaluated(generator, problems(3, seed=9), 2))
    assert generator.counters.sync_seconds > 0
    for version, (asked, rollouts) in enumerate(fresh, start=1):
        assert {v for r in rollouts for v in r.versions} == {version}
        assert tiny.gap(weights[version], asked, rollouts).mean() < CLOSE, f"stale weights after update {version}"
        assert tiny.gap(weights[version - 1], asked, rollouts).mean() > 0.1  # the check can fail

    asked, rollouts = take_and_flatten(generator, len(long))
    for problem, rollout in zip(asked, rollouts, strict=True):
        versions = rollout.versions
        assert versions == sorted(versions) and len(set(versions)) > 5, (len(versions), rollout.finish_reason)
        sampled = torch.tensor(rollout.logprobs)
        of_it = tiny.model, weights, problem.prompt_ids, rollout.completion_ids
        gap = (stale_cache_logprobs(*of_it, versions) - sampled).abs()
        assert gap.mean() < CLOSE and gap.max() < 1e-4
        # The last version alone, over keys and values of its own, is not what sampled the tail ...
        tail = torch.tensor(versions) == versions[-1]
        assert tiny.gap(weights[versions[-1]], [problem], [rollout])[tail].mean() > 0.01
        # ... nor are the spans one token longer or shorter.
        for moved in (versions[:1] + versions[:-1], versions[1:] + versions[-1:]):
            assert (stale_cache_logprobs(*of_it, moved) - sampled).abs().max() > 0.1


def test_weights_move_in_flight_under_a_tied_head(vllm_engine: SharedEngine) -> None:
    """Tokens before a version's boundary score like its predecessor's, tokens after it like its own over the stale
    cache; completions begun afterwards like its own alone. A tied head is the one that can stay stale.
    """
    long = problems(2)
    with vllm_engine.generator(long, pacer=Pacer(2, 0), length_control=long_training(700), stop_ids=[]) as generator:
        check_weights_move(generator, vllm_engine.tiny, long)


def test_a_prompt_does_not_hit_keys_and_values_of_another_version(vllm_engine: SharedEngine) -> None:
    """A prompt of 70 tokens fills two blocks of 32. Sampled again under the same version it finds them: 6 tokens are
    computed. Under the next version it must not, and its log-probs are the new weights' alone: what the salt is for."""
    prompt, tiny = problems(1, length=70), vllm_engine.tiny
    with vllm_engine.generator(max_completion=12) as generator:
        for version, prefilled in ((0, 70), (0, 6), (1, 70), (1, 6)):
            if version != generator.engine.version:
                generator.push(tiny.weights(version), version, 0)
            asked, rollouts = evaluated(generator, prompt, 1)
            assert rollouts[0].prefilled == prefilled
            assert tiny.gap(tiny.weights(version), asked, rollouts).mean() < CLOSE


def test_every_parameter_changes_with_every_update(vllm_engine: SharedEngine) -> None:
    """By the hashes that vLLM itself takes: each is another with other weights, and the same again with the same weights,
    to the byte. (On a CPU linear layers have packed theirs: the hash is of an empty parameter. Log-probs see them.)"""
    with vllm_engine.generator() as generator:
        seen = []
        for version, seed in ((1, 2), (2, 3), (3, 2)):
            generator.push(vllm_engine.tiny.weights(seed), version, 0)
            generator.settle()
            host = generator.engine.host
            seen += host.result_of(host._run(host.engine.vllm.compute_weight_checksums))
    stayed = [name for name, digest in seen[0].items() if digest == seen[1][name]]
    assert seen[0] == seen[2] and len(stayed) < len(seen[0]) and all("_proj" in name for name in stayed)
