"""`Generator` with real vLLM: log-probs, weights in flight, the schedule, and failures that end instead of hanging.

Oracles: the trainer's own forward pass in transformers; for completions that several versions sampled, a transformers
cache that is filled piece by piece with the weights that were live. Weights are random and differ wholly between
versions, so that tokens, keys or values of a wrong version are nats away, not 1e-4.
"""

import asyncio
import itertools
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import END_OF_THINKING, PHRASE, STOP, Engine, Problem, TinyModel, new_generator, no_reward, problems

from length_control import Interruption
from pipeline_rl import (
    FORCED,
    EngineFailed,
    Exhausted,
    Generator,
    Pacer,
    Rollout,
    WeightFile,
    check_arrival,
    engine_environment,
    environment,
    lags,
    reason_of,
)
from runtime import weight_channels as weight_sync
from runtime.weight_channels import FileWeights

ROOT = Path(__file__).resolve().parent.parent
CLOSE = 1e-5  # nats a token, mean; measured 1e-6. The runs' own limit is 1e-4


def take_and_flatten(generator: Generator, count: int) -> tuple[list[Problem], list[Rollout]]:
    """Takes `count` groups: the prompt of each rollout, and the rollouts."""
    pairs = [(group.problem, rollout) for group in generator.take(count) for rollout in group.rollouts]
    return [p for p, _ in pairs], [r for _, r in pairs]


def evaluated(generator: Generator, prompts: list[Problem], n_samples: int) -> tuple[list[Problem], list[Rollout]]:
    """Evaluates: the prompt of each rollout, and the rollouts."""
    groups = generator.result_of(generator.evaluate(prompts, n_samples))
    return [p for p in prompts for _ in range(n_samples)], [r for group in groups for r in group]


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@dataclass
class LongTraining:
    """As length control: training completions of `budget` tokens, evaluation completions of 12."""

    budget: int
    max_budget: int = 12
    max_completion: int = 900

    def draw_budget(self, rng: random.Random) -> int:
        return self.budget

    def second_leg(self, prompt_ids, completion_ids, finish_reason):
        return None

    def mask(self, n_first: int, n_forced: int, n_second: int) -> list[int]:
        raise AssertionError("there is no second leg")


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_also_after_an_interruption(vllm_engine: Engine, temperature: float) -> None:
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


def test_a_second_leg_finds_the_first_ones_keys_and_values(vllm_engine: Engine) -> None:
    """Same salt in both legs: of a prompt of 40 tokens, the second leg's first block of 32 comes from the cache."""
    control = Interruption(8, 8, answer_budget=3, phrase_ids=PHRASE, end_of_thinking_ids=[END_OF_THINKING])
    options = {"pacer": Pacer(6, 0), "rollouts": 1, "length_control": control}
    with vllm_engine.generator(problems(6, length=40), **options) as generator:
        rollouts = take_and_flatten(generator, 6)[1]
    assert sum(r.interrupted for r in rollouts) >= 2
    for rollout in rollouts:
        if rollout.interrupted:
            assert rollout.prefilled == 40 + (40 + 8 + 3 - 32)


# ---------------------------------------------------------------------------------------------------------------------
# Weights in flight


def stale_cache_logprobs(tiny: TinyModel, weights: dict[int, dict], problem: Problem, rollout: Rollout) -> torch.Tensor:
    """The log-probs of a completion that several versions sampled, by transformers: each piece is fed, under its own
    version's weights, onto the keys and values that the earlier versions left."""
    from transformers import DynamicCache

    cache, ids, found, start = DynamicCache(), rollout.completion_ids, [], 0
    for version, piece in itertools.groupby(rollout.versions):
        end = start + len(list(piece))
        fed = ([*problem.prompt_ids] if start == 0 else [ids[start - 1]]) + ids[start : end - 1]
        with torch.no_grad():
            logits = tiny.load(weights[version])(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits
        logits = logits[0, -(end - start) :].log_softmax(-1)  # (piece, V)
        found.append(logits.gather(1, torch.tensor(ids[start:end])[:, None])[:, 0])
        start = end
    return torch.cat(found)


def check_weights_move(generator: Generator, tiny: TinyModel, long: list[Problem]) -> None:
    """Ten updates while the completions of `long` run: the body of a test for tied and for untied heads."""
    weights = {version: tiny.weights(100 + version) for version in range(1, 11)} | {0: tiny.weights(0)}
    wait_until(lambda: generator.pacer.admitted == len(long))
    fresh = []
    for version in range(1, 11):
        generator.push(weights[version], version, 0)
        fresh.append(evaluated(generator, problems(3, seed=9), 2))
    assert generator.counters.pushes == 10 and generator.counters.sync_seconds > 0
    for version, (asked, rollouts) in enumerate(fresh, start=1):
        assert {v for r in rollouts for v in r.versions} == {version}
        assert tiny.gap(weights[version], asked, rollouts).mean() < CLOSE, f"stale weights after update {version}"
        assert tiny.gap(weights[version - 1], asked, rollouts).mean() > 0.1  # the check can fail

    asked, rollouts = take_and_flatten(generator, len(long))
    for problem, rollout in zip(asked, rollouts, strict=True):
        versions = rollout.versions
        assert versions == sorted(versions) and len(set(versions)) > 5, (len(versions), rollout.finish_reason)
        sampled = torch.tensor(rollout.logprobs)
        gap = (stale_cache_logprobs(tiny, weights, problem, rollout) - sampled).abs()
        assert gap.mean() < CLOSE and gap.max() < 1e-4
        # The last version alone, over keys and values of its own, is not what sampled the tail ...
        tail = torch.tensor(versions) == versions[-1]
        assert tiny.gap(weights[versions[-1]], [problem], [rollout])[tail].mean() > 0.01
        # ... nor are the spans one token longer or shorter.
        for moved in (versions[:1] + versions[:-1], versions[1:] + versions[-1:]):
            other = Rollout(rollout.completion_ids, rollout.logprobs, moved, rollout.mask, rollout.finish_reason)
            assert (stale_cache_logprobs(tiny, weights, problem, other) - sampled).abs().max() > 0.1


def test_weights_move_in_flight_under_a_tied_head(vllm_engine: Engine) -> None:
    """Tokens before a version's boundary score like its predecessor's, tokens after it like its own over the stale
    cache; completions begun afterwards like its own alone. A tied head is the one that can stay stale.
    """
    long = problems(2)
    with vllm_engine.generator(long, pacer=Pacer(2, 0), length_control=LongTraining(700), stop_ids=[]) as generator:
        check_weights_move(generator, vllm_engine.tiny, long)


def test_weights_move_in_flight_by_the_plain_channel_and_vllms_own_scheduler(tmp_path: Path) -> None:
    """What pipeline_rl.py has by itself, and what a GPU's engine does: token by token, with vLLM's spans of versions."""
    long, tiny = problems(2), TinyModel(tmp_path / "model", tied=True)
    options = {"pacer": Pacer(2, 0), "length_control": LongTraining(700), "stop_ids": [], "weights": WeightFile()}
    generator = new_generator(tiny, problems=iter(long), **options)
    try:
        generator.start(tiny.weights(0))
        check_weights_move(generator, tiny, long)
    finally:
        generator.close()
    assert not generator.weights.folder.exists()


ALONE = """
    import itertools, torch
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM
    from pipeline_rl import Generator, Pacer

    if __name__ == "__main__":
        model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval().requires_grad_(False)
        assert model.config.tie_word_embeddings
        problems = (SimpleNamespace(prompt_ids=[9, 10 + i % 50, 12]) for i in itertools.count())
        score = lambda problem, completions: [(1.0, True)] * len(completions)
        generator = Generator("model", problems, score, Pacer(2, 1), rollouts=2, stop_ids=[], max_tokens=500)
        try:
            generator.start(dict(model.named_parameters()))
            while generator.counters.pushes < 2:  # both while the first groups run
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.ndim == 1))
                generator.push(dict(model.named_parameters()), generator.counters.pushes + 1, 0)
                generator.settle()
            taken = [r for group in generator.take(2) for r in group.rollouts]
            problem = SimpleNamespace(prompt_ids=[5, 6, 7])
            rollouts = generator.result_of(generator.evaluate([problem], 4))[0]
        finally:
            generator.close()
        assert [len(r.versions) for r in taken] == [500] * 4 and {r.versions[-1] for r in taken} == {2}
        assert {v for r in rollouts for v in r.versions} == {2}
        for r in rollouts:
            ids = torch.tensor([problem.prompt_ids + r.completion_ids])
            found = model(ids).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
            print(float((found - torch.tensor(r.logprobs)).abs().mean()))
"""


def test_the_file_alone_drives_an_engine(tmp_path: Path) -> None:
    """pipeline_rl.py in an empty folder: samples, takes, pushes weights in flight twice; completions begun afterwards
    have the log-probs of transformers' forward. A script as a borrower would write it, without a file of ours."""
    TinyModel(tmp_path / "model", tied=True)
    shutil.copy(ROOT / "pipeline_rl.py", tmp_path)
    (tmp_path / "script.py").write_text(textwrap.dedent(ALONE))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gaps = [float(line) for line in done.stdout.split()]
    assert len(gaps) == 4 and max(gaps) < CLOSE


@pytest.mark.parametrize("salted", [True, False])
def test_a_prompt_does_not_hit_keys_and_values_of_another_version(vllm_engine: Engine, salted: bool) -> None:
    """A prompt of 70 tokens fills two blocks of 32. Sampled again under the same version it finds them: 6 tokens are
    computed. Under the next version it must not, and its log-probs are the new weights' alone. Without the salt it
    does, and they are not: what the salt is for.
    """
    prompt, tiny = problems(1, length=70), vllm_engine.tiny
    with vllm_engine.generator(max_tokens=12) as generator:
        if not salted:
            request = generator._request
            generator._request = lambda prompt_ids, max_tokens, salt: request(prompt_ids, max_tokens, "same")
        prefilled, gaps = [], []
        for version in (0, 0, 1, 1):
            if version != generator.version:
                generator.push(tiny.weights(version), version, 0)
            asked, rollouts = evaluated(generator, prompt, 1)
            prefilled.append(rollouts[0].prefilled)
            gaps.append(tiny.gap(tiny.weights(version), asked, rollouts).mean())
    assert prefilled == ([70, 6, 70, 6] if salted else [70, 6, 6, 6])
    assert max(gaps[:2]) < CLOSE
    assert max(gaps[2:]) < CLOSE if salted else min(gaps[2:]) > 0.01


# ---------------------------------------------------------------------------------------------------------------------
# The schedule


@pytest.mark.parametrize("k", [0, 2])
def test_pipeline_bounds_the_lag(vllm_engine: Engine, k: int) -> None:
    """B = 2: groups come in admission order; at the step that makes v + 1 no token is older than v - k. With k = 0 all
    are of v; with k = 2 the first six groups enter at once, so the third step trains on tokens two versions old.
    """
    prompts = problems(20)
    seen = []
    with vllm_engine.generator(prompts, pacer=Pacer(2, k), max_tokens=24) as generator:
        for version in range(8):
            groups = generator.take(2)
            assert [group.number for group in groups] == [2 * version, 2 * version + 1]
            assert [group.problem for group in groups] == prompts[2 * version : 2 * version + 2]
            assert all(version - k <= group.version <= version for group in groups)
            for rollout in (r for group in groups for r in group.rollouts):
                assert rollout.versions == sorted(rollout.versions)
                seen += lags(rollout, version)
            generator.push(vllm_engine.tiny.weights(version + 1), version + 1, 2)
        generator.settle()
        assert generator.version == 8
    assert 0 <= min(seen) and max(seen) == k


def test_ppo_off_policy_samples_each_round_from_one_version(vllm_engine: Engine) -> None:
    """k = 2, B = 2: rounds of 4 groups from one frozen version, two steps each: version 0, then 2, then 4."""
    with vllm_engine.generator(problems(12), pacer=Pacer(2, 2, schedule="ppo_off_policy"), max_tokens=16) as generator:
        for version in (0, 2, 4):
            groups = generator.take(4)
            assert {v for group in groups for r in group.rollouts for v in r.versions} == {version}
            generator.push(vllm_engine.tiny.weights(version + 2), version + 2, 4)


def test_a_push_waits_for_evaluation_which_no_pacer_holds_back(vllm_engine: Engine) -> None:
    """The pacer is full (k = 0, its one group runs on), yet evaluation runs, at one version; a push that comes while it
    runs is live only afterwards. Neither the pacer nor the counters of training see it. 40 requests, 16 slots.
    """
    with vllm_engine.generator(problems(3), length_control=LongTraining(800), stop_ids=[]) as generator:
        generator.length_control.max_budget = 40
        wait_until(lambda: generator.pacer.admitted == 1)
        assert not generator.pacer.may_admit()
        asked = problems(10, seed=5)
        future = generator.evaluate(asked, 4)
        generator.push(vllm_engine.tiny.weights(1), 1, 0)
        generator.settle()
        assert future.done(), "the push did not wait"
        groups = generator.result_of(future)
        assert [len(group) for group in groups] == [4] * 10
        assert {v for group in groups for r in group for v in r.versions} == {0} and generator.version == 1
        rollouts = [r for group in groups for r in group]
        gap = vllm_engine.tiny.gap(vllm_engine.tiny.weights(0), [p for p in asked for _ in range(4)], rollouts)
        assert gap.mean() < CLOSE
        assert {len(r.completion_ids) for r in rollouts} == {40}  # the longest budget
        counters = generator.counters
        assert generator.pacer.admitted == 1 and counters.sampled == 0
        assert (counters.eval_sampled, counters.eval_prefilled) == (1600, 400)
        assert 0 < counters.eval_seconds < 60
        assert set(generator.take(1)[0].rollouts[0].versions) == {0, 1}


def test_slots_and_idle_time(vllm_engine: Engine) -> None:
    """All 5 slots are used and never more, by groups of two (2 + 2, and when a first completion ends 1 + 2 + 2) and by
    evaluation. While the trainer keeps all groups to itself (k = 0), the engine is idle, and that is counted.
    """
    inside = []
    options = {"pacer": Pacer(8, 0), "max_num_seqs": 5, "max_tokens": 8, "stop_ids": []}
    with vllm_engine.generator(problems(8), **options) as generator:
        occupy = generator._occupy

        def watched(slots: int) -> None:
            occupy(slots)
            inside.append(generator._inside)

        generator._occupy = watched
        generator.take(8)
        assert max(inside) == 5 and inside[-1] == 0
        inside.clear()
        before = generator.counters.idle_seconds
        time.sleep(0.3)
        assert len(evaluated(generator, problems(4), 3)[1]) == 12
        assert max(inside) == 5 and inside[-1] == 0
        assert 0.25 < generator.counters.idle_seconds - before


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def test_exceptions_in_the_reward_and_in_the_problems_reach_the_trainer(vllm_engine: Engine) -> None:
    """The very exception is raised where the trainer waits, within seconds, and again at the next wait."""

    def broken_score(problem, completions):
        raise ZeroDivisionError("the verifier")

    def broken_problems():
        yield from problems(1)
        raise LookupError("the data set")

    for options, error in (
        ({"prompts": problems(4), "score": broken_score}, ZeroDivisionError),
        ({"prompts": broken_problems()}, LookupError),
        ({"prompts": problems(4), "score": lambda problem, completions: [(1.0, True)]}, ValueError),  # one too few
    ):
        with vllm_engine.generator(max_tokens=8, pacer=Pacer(2, 0), **options) as generator:
            started = time.monotonic()
            for _ in range(2):
                with pytest.raises(error):
                    generator.take(2)
            assert time.monotonic() - started < 20


def test_finite_problems_end_in_exhausted(vllm_engine: Engine) -> None:
    """Five prompts, B = 2: two steps, then one group is left that no step can use. Each prompt is used once."""
    with vllm_engine.generator(iter(problems(5)), pacer=Pacer(2, 1), max_tokens=8) as generator:
        keys = []
        for _ in range(2):
            keys += [group.problem.key for group in generator.take(2)]
            generator.release(2)
        with pytest.raises(Exhausted, match="1 groups stay untrained"):
            generator.take(2)
        assert keys == ["p0", "p1", "p2", "p3"]
        assert [problem.key for problem in generator.running.values()] == ["p4"]


def test_interrupted_ends_a_wait(vllm_engine: Engine) -> None:
    from pipeline_rl import Interrupted

    asked = []
    options = {"interrupted": lambda: bool(asked), "length_control": LongTraining(800), "stop_ids": []}
    with vllm_engine.generator(problems(1), **options) as generator:
        wait_until(lambda: generator.pacer.admitted == 1)
        asked.append(True)
        with pytest.raises(Interrupted):
            generator.take(1)
        asked.clear()
        assert generator.take(1)[0].number == 0  # nothing was lost


def test_weights_that_lack_a_tensor_are_refused_by_its_name(vllm_engine: Engine) -> None:
    """vLLM would keep the old one and say nothing."""
    weights = vllm_engine.tiny.weights(1)
    del weights["model.layers.1.mlp.down_proj.weight"]
    with vllm_engine.generator(max_tokens=8) as generator:
        generator.push(weights, 1, 0)
        with pytest.raises(Exception, match=r"no weights for .*layers\.1\.mlp\.down_proj"):
            generator.settle()
    with vllm_engine.generator(max_tokens=8) as generator:  # the next weights are whole
        asked, rollouts = evaluated(generator, problems(2), 1)
        assert vllm_engine.tiny.gap(vllm_engine.tiny.weights(0), asked, rollouts).mean() < CLOSE


def test_weights_that_do_not_fit_end_the_wait_with_that_error(vllm_engine: Engine) -> None:
    """The push fails in the engine, which stands still: whoever waits next gets the error, in seconds, `take` too."""
    with vllm_engine.generator(problems(2), length_control=LongTraining(800), stop_ids=[]) as generator:
        wait_until(lambda: generator.pacer.admitted == 1)
        generator.push(vllm_engine.tiny.weights(1) | {"model.layers.7.weight": torch.zeros(3)}, 1, 0)
        started = time.monotonic()
        with pytest.raises(Exception, match=r"layers\.7"):
            generator.take(2)
        with pytest.raises(Exception, match=r"layers\.7"):
            generator.settle()
        assert time.monotonic() - started < 10 and generator.version == 0
    with vllm_engine.generator(max_tokens=8) as generator:  # the next weights that fit are whole
        asked, rollouts = evaluated(generator, problems(2), 1)
        assert vllm_engine.tiny.gap(vllm_engine.tiny.weights(0), asked, rollouts).mean() < CLOSE


def engine_processes() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}


def test_untied_head_then_engine_deaths(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One engine of its own, start to end. Ten updates under an untied head. Then it is killed while six groups and an
    evaluation run and two groups wait for slots: a new engine starts with the weights of version 10, and the evaluation
    and all rollouts of the groups are redone, under their old numbers, wholly by that version. The second death comes
    while a push waits for its answer and is one too many: an error wherever the trainer waits. Nothing is left behind.
    """
    before = engine_processes()
    tiny = TinyModel(tmp_path_factory.mktemp("untied"), tied=False)
    control = LongTraining(700)
    pacer = Pacer(3, 1, max_ready=99)
    options = {"pacer": pacer, "length_control": control, "stop_ids": [], "rollouts": 3, "max_num_seqs": 20}
    prompts = problems(20)
    generator = new_generator(tiny, problems=iter(prompts), **options)
    folder = generator.weights.folder
    try:
        generator.start(tiny.weights(0))
        check_weights_move(generator, tiny, prompts[:6])
        control.budget, pacer.capacity = 800, 8
        generator.release(6)
        wait_until(lambda: pacer.admitted == 12)

        (engine,) = engine_processes() - before
        semaphores = [line for line in Path(f"/proc/{engine}/maps").read_text().splitlines() if "/dev/shm/sem." in line]
        os.kill(engine, signal.SIGSTOP)
        future = generator.evaluate(prompts[:3], 2)
        time.sleep(0.3)
        control.budget = 10
        os.kill(engine, signal.SIGKILL)
        rollouts = [r for group in generator.result_of(future) for r in group]
        groups = generator.take(8)
        assert generator.counters.restarts == 1 and generator.counters.redone_groups >= 1
        assert [group.number for group in groups] == [*range(6, 14)]
        assert [group.problem for group in groups] == prompts[6:14]
        asked = [p for p in prompts[:3] for _ in range(2)] + [g.problem for g in groups for _ in range(3)]
        rollouts += [r for group in groups for r in group.rollouts]
        assert [len(r.completion_ids) for r in rollouts[-6:]] == [10] * 6
        assert {v for r in rollouts for v in r.versions} == {10} == {group.version for group in groups}
        assert tiny.gap(tiny.weights(110), asked, rollouts).mean() < CLOSE

        control.budget = 800
        generator.release(8)
        wait_until(lambda: pacer.admitted == 20)
        (second,) = engine_processes() - before
        os.kill(second, signal.SIGSTOP)  # it cannot answer the push
        generator.push(tiny.weights(11), 11, 0)
        os.kill(second, signal.SIGKILL)
        started = time.monotonic()
        for wait in (generator.settle, lambda: generator.take(3), lambda: evaluated(generator, prompts[:1], 1)):
            with pytest.raises(RuntimeError, match="died 2 times"):
                wait()
        assert time.monotonic() - started < 10
    finally:
        generator.close()
    generator.close()  # twice does no harm
    assert engine_processes() == before and not generator._thread.is_alive()
    assert semaphores == []  # or a SIGKILL of all processes leaves them in shared memory
    assert not folder.exists() and not Path(f"/proc/{engine}").exists() and not Path(f"/proc/{second}").exists()


def living_processes(group: int) -> list[int]:
    """Processes of the process group, those left out that have ended and that nobody has waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fp32_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_updates(tmp_path: Path, tied: bool, fp32_head: bool) -> None:
    """In bfloat16 trainer and generator round in different places: 0.02 nats a token, whichever head (measured 0.016 to
    0.019), after every update; the weights of the version before are 1.6 nats away."""
    from fp32_head import GENERATOR_ARGS

    tiny = TinyModel(tmp_path, tied=tied)
    options = {"dtype": "bfloat16", "max_tokens": 40, "engine_args": GENERATOR_ARGS if fp32_head else {}}
    generator = new_generator(tiny, **options)

    def rounded(version: int) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() for name, tensor in tiny.weights(version).items()}

    try:
        generator.start(rounded(0))
        for version in range(4):
            if version:
                generator.push(rounded(version), version, 0)
            asked, rollouts = evaluated(generator, problems(8), 2)
            trainer = {"dtype": torch.bfloat16, "fp32_head": fp32_head}
            assert 1e-3 < tiny.gap(tiny.weights(version), asked, rollouts, **trainer).mean() < 0.04
            assert tiny.gap(tiny.weights(version - 1), asked, rollouts, **trainer).mean() > 0.5
    finally:
        generator.close()


DRIVER = """
    import itertools, signal, sys, threading
    sys.path[:0] = [{root!r}, {tests!r}]
    from conftest import TinyModel, problems, new_generator

    if __name__ == "__main__":
        interrupted = threading.Event()
        signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
        tiny = TinyModel({folder!r}, tied=True)
        generator = new_generator(tiny, problems=itertools.cycle(problems(4)))
        try:
            generator.start(tiny.weights(0))
            print("ready", flush=True)
            interrupted.wait(60)
            for version in range(3):
                generator.take(1)
                generator.push(tiny.weights(version + 1), version + 1, 1)
            future = generator.evaluate(problems(4), 4)  # left open, as are the running groups
        finally:
            generator.close()
        print("restarts", generator.counters.restarts)
"""


def test_ctrl_c_spares_the_engine_and_a_run_prints_nothing(tmp_path: Path) -> None:
    """Ctrl-C reaches trainer and engine alike; the trainer decides, so the engine must go on until `close`. A close in
    the middle of the work ends at once. Neither the start nor the end writes a line to stdout or stderr.
    """
    script = tmp_path / "driver.py"
    names = {"root": str(ROOT), "tests": str(ROOT / "tests"), "folder": str(tmp_path / "model")}
    script.write_text(textwrap.dedent(DRIVER).format(**names))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert out == "restarts 0\n"
    noise = [line for line in err.splitlines() if line and "Triton" not in line and "model shards" not in line]
    assert noise == []
    assert not list(Path("/dev/shm").glob(f"{weight_sync.PREFIX}{process.pid}-*"))
    wait_until(lambda: living_processes(process.pid) == [], 10)


@pytest.mark.slow
def test_two_data_parallel_engines_get_every_update(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two engines behind one client share the requests, and after each of five updates all completions, of either
    engine, are wholly by the new version and have its log-probs, not those of the version before."""
    tiny = TinyModel(tmp_path_factory.mktemp("tied"), tied=True)
    generator = new_generator(tiny, max_tokens=16, max_num_seqs=24, engine_args={"data_parallel_size": 2})
    prompts, served, inside = problems(12), {}, 0
    try:
        generator.start(tiny.weights(0))
        for version in range(1, 6):
            generator.push(tiny.weights(version), version, 0)
            future = generator.evaluate(prompts, 4)
            while not future.done():
                served |= generator.in_loop(lambda made: dict(made._engine.engine_core.reqs_in_flight))
                inside = max(inside, generator.in_loop(lambda made: made._inside))
            rollouts = [r for group in generator.result_of(future) for r in group]
            asked = [problem for problem in prompts for _ in range(4)]
            assert {v for r in rollouts for v in r.versions} == {version}
            assert tiny.gap(tiny.weights(version), asked, rollouts).max() < CLOSE
            assert tiny.gap(tiny.weights(version - 1), asked, rollouts).mean() > 0.1
    finally:
        generator.close()
    assert inside == 48  # 24 in each
    engines = list(served.values())
    assert len({bytes(engine) for engine in engines}) == 2
    assert min(engines.count(engine) for engine in set(engines)) >= 20


# ---------------------------------------------------------------------------------------------------------------------
# Without an engine


def test_a_start_that_fails_raises_and_leaves_nothing(tmp_path: Path) -> None:
    """A model folder that is none: the start ends in one sentence; the thread and the weights' folder are gone."""
    generator = Generator(
        str(tmp_path), iter(()), no_reward, Pacer(1, 0), 2, [STOP], FileWeights(), max_tokens=8,
        engine_args={"max_model_len": 64},
    )  # fmt: skip
    with pytest.raises(EngineFailed, match="vLLM does not start"):
        generator.start({"weight": torch.zeros(2)})
    assert generator.weights.path.exists()
    generator.close()
    assert not generator.weights.folder.exists() and not generator._thread.is_alive()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    """The line of the first cause, not that of what was raised over it; what vLLM's checks of its arguments wrap is
    told without the wrapping."""
    from vllm import AsyncEngineArgs

    generator = Generator("", iter(()), no_reward, Pacer(1, 0), 2, [STOP], FileWeights(), max_tokens=8)
    generator.engine_args = {"scheduler_cls": "nowhere.Scheduler"}
    with pytest.raises(EngineFailed, match=r"ModuleNotFoundError: scheduler_cls=nowhere\.Scheduler: "):
        generator.start({"weight": torch.zeros(2)})
    generator.close()
    with pytest.raises(ValueError) as caught:
        AsyncEngineArgs(model=str(tmp_path)).create_engine_config()
    second = RuntimeError("see above")
    second.__cause__ = caught.value
    assert re.fullmatch("ValidationError: Value error, Invalid repository ID or local directory.*", reason_of(second))
    assert reason_of(KeyError()) == "KeyError"


def test_closing_admits_nothing_and_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end because the generator closes give their slots to no new group, and the engine that is gone by
    then is not replaced."""

    async def request(self: Generator, *_: object) -> None:
        await asyncio.sleep(100)

    monkeypatch.setattr(Generator, "_request", request)
    monkeypatch.setattr(Generator, "_new_engine", lambda self: pytest.fail("a new engine was started"))
    pacer = Pacer(4, 8)
    generator = Generator(
        "", iter(problems(50)), no_reward, pacer, 2, [STOP], FileWeights(), max_tokens=8, max_num_seqs=4
    )
    generator._thread.start()
    generator._engine = SimpleNamespace(shutdown=lambda timeout: None)
    generator._loop.call_soon_threadsafe(generator._dispatch)
    wait_until(lambda: pacer.admitted == 2)
    generator.close()
    assert pacer.admitted == 2 and not generator._tasks


def test_more_rollouts_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="9 rollouts per prompt do not fit 8 engine slots"):
        Generator("", iter(()), no_reward, Pacer(1, 0), 9, [STOP], None, max_num_seqs=8)
    Generator("", iter(()), no_reward, Pacer(1, 0), 8, [STOP], FileWeights(), max_num_seqs=8).close()


def test_max_num_seqs_is_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four engines of 8 slots: 16 groups of two are let in, and each engine is told 8. So also by vLLM's own names."""
    told = []

    async def group(*_: object) -> None:
        await asyncio.sleep(100)

    def engine_args(**args: object) -> None:
        told.append(args)
        raise KeyError

    monkeypatch.setattr(Generator, "_run_group", group)
    monkeypatch.setattr("vllm.AsyncEngineArgs", engine_args)
    for args in ({"data_parallel_size": 4}, {"data_parallel_size": 4, "max_num_seqs": 8}):
        slots = 99 if "max_num_seqs" in args else 8
        generator = Generator(
            "",
            iter(problems(50)),
            no_reward,
            Pacer(8, 8),
            2,
            [STOP],
            FileWeights(),
            max_num_seqs=slots,
            engine_args=args,
        )
        generator._thread.start()
        inside = generator.in_loop(lambda made: made._dispatch() or made._inside)
        with pytest.raises(KeyError):
            generator.in_loop(Generator._new_engine)
        generator.close()
        assert inside == 32 and told.pop()["max_num_seqs"] == 8


def test_a_prompt_that_is_too_long_is_named(vllm_engine: Engine) -> None:
    with (
        vllm_engine.generator(problems(1, length=21), max_prompt=20) as generator,
        pytest.raises(ValueError, match="21 tokens, above max_prompt = 20"),
    ):
        generator.take(1)


def cut(x: torch.Tensor) -> torch.Tensor:
    """To 10 of the 23 bits of significand, as TF32 does."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def tf32_attention(module, query, key, value, attention_mask, scaling, **options):
    """(B, heads, T, d) -> (B, T, heads, d): causal attention whose two products see operands of 10 bits."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = cut(query) @ cut(key).transpose(2, 3) * scaling
    scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return (cut(scores.softmax(-1)) @ cut(value)).transpose(1, 2), None


def test_float32_on_a_gpu_asks_for_whole_products(tmp_path: Path) -> None:
    """Attention products in TF32, Triton's default on NVIDIA, move log-probs by more than the bound at which a run ends,
    so that the engine must be told otherwise; a trainer in float32 multiplies whole numbers by default."""
    from transformers import AttentionInterface

    from runtime.weights_check import LARGEST_GAP

    tiny = TinyModel(tmp_path, tied=True)
    model = tiny.load(tiny.weights(0))
    ids = torch.tensor([problem.prompt_ids for problem in problems(8, length=60)])
    AttentionInterface.register("tf32", tf32_attention)
    found = {}
    with torch.no_grad():
        for name in ("sdpa", "tf32"):
            model.set_attn_implementation(name)
            found[name] = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    assert (found["tf32"] - found["sdpa"]).abs().mean() > LARGEST_GAP["float32"]
    assert engine_environment(True, False, "float32")["TRITON_F32_DEFAULT"] == "ieee"
    for gpu, dtype in ((True, "bfloat16"), (False, "float32")):
        assert "TRITON_F32_DEFAULT" not in engine_environment(gpu, False, dtype)


def test_environment_is_set_inside_only_and_respects_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEST_SET", "user")
    monkeypatch.delenv("A_TEST_UNSET", raising=False)
    with pytest.raises(KeyError), environment({"A_TEST_SET": "ours", "A_TEST_UNSET": "ours"}):
        assert (os.environ["A_TEST_SET"], os.environ["A_TEST_UNSET"]) == ("user", "ours")
        raise KeyError
    assert os.environ["A_TEST_SET"] == "user" and "A_TEST_UNSET" not in os.environ


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "finish_reason"),
    [
        ([], [], [], "stop"),  # no token at all
        ([3, 4], [-1.0], [0, 0], "stop"),  # a log-prob is missing
        ([3, 4], [-1.0, -1.0], [0], "stop"),  # a version is missing
        ([3], [math.nan], [0], "stop"),
        ([3], [-math.inf], [0], "stop"),
        ([3], [0.1], [0], "stop"),  # a probability above 1
        ([3], [-1.0], [0], "abort"),
        ([3], [-1.0], [0], None),
    ],
)
def test_check_arrival_refuses(ids, logprobs, versions, finish_reason) -> None:
    with pytest.raises(RuntimeError):
        check_arrival(ids, logprobs, versions, finish_reason)


def test_check_arrival_accepts() -> None:
    """Probability 1 is 0.0, and rounding may leave a trace above it."""
    check_arrival([3, 4, 5], [-80.0, 0.0, 1e-6], [2, 2, 3], "stop")
    check_arrival([3], [-0.5], [0], "length")


@pytest.mark.slow
def test_a_bfloat16_engine_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its attention uses AMX where the CPU has it, which Linux allows a process only after it has asked."""
    tiny = TinyModel(tmp_path_factory.mktemp("bfloat16"), tied=True)
    generator = new_generator(tiny, dtype="bfloat16", max_tokens=16)
    try:
        generator.start(tiny.weights(0))
        [rollouts] = generator.result_of(generator.evaluate(problems(1), 2))
    finally:
        generator.close()
    assert [len(rollout.completion_ids) > 0 for rollout in rollouts] == [True, True]
