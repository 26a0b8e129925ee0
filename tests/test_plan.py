"""tools/plan.py and tools/simulated_cluster.py: schedules that can be worked out by hand, and the roofline."""

import itertools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Problem, generating

from pipeline_rl import lags

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import plan
from simulated_cluster import Setting, Simulation, simulate

# One prompt a step, one completion of 100 tokens for each, 10 ms a token however many run: 1 s. Updates take no time.
HAND = Setting(
    batch_prompts=1, rollouts=1, k=1, mean=100, sigma=0, longest=100, trainers=1, engines=1, max_num_seqs=99,
    base=0.01, per_request=0, trainer_rate=50, push_seconds=0, steps=20,
)  # fmt: skip


def test_a_trainer_twice_as_slow_as_the_engine():
    """A step takes 2 s. When a group is taken the next one enters, and is complete after 1 s: the engine is busy half of
    the time. It entered one version before the one that trains on it."""
    found = simulate(HAND)
    assert found.step_seconds == pytest.approx(2) and found.trainer_busy == pytest.approx(1)
    assert found.generator_busy == pytest.approx(0.5) and found.slots_busy == pytest.approx(0.5 / 99)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(1), 1)
    assert found.tokens == pytest.approx(50)


def test_a_trainer_twice_as_fast_as_an_engine_of_one_slot():
    """The engine never stops; 0.5 s after a group enters, the version of the group before it goes live: of the 100
    tokens 50 have a lag of 1 and 50 of 0."""
    found = simulate(replace(HAND, trainer_rate=200, max_num_seqs=1))
    assert found.step_seconds == pytest.approx(1) and found.trainer_busy == pytest.approx(0.5)
    assert found.generator_busy == pytest.approx(1) and found.slots_busy == pytest.approx(1)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(0.5), 1)


def test_an_update_stops_the_requests_that_run():
    """The same with updates of 0.25 s: a request needs 1 s beside them, so the slot is never empty, but works 80 %."""
    found = simulate(replace(HAND, trainer_rate=1000, max_num_seqs=1, push_seconds=0.25, trainer_waits=False))
    assert found.step_seconds == pytest.approx(1.25) and found.slots_busy == pytest.approx(1)
    assert found.generator_busy == pytest.approx(0.8) and found.tokens == pytest.approx(80)


def test_on_policy_the_two_take_turns():
    """k = 0: 1 s of sampling, 0.5 s of training, an update of 0.25 s in which both stand still."""
    found = simulate(replace(HAND, k=0, trainer_rate=200, push_seconds=0.25))
    assert found.step_seconds == pytest.approx(1.75)
    assert found.trainer_busy == pytest.approx(0.5 / 1.75) and found.generator_busy == pytest.approx(1 / 1.75)
    assert found.lag_max == 0


def test_ppo_off_policy_by_hand():
    """k = 2: 1 s for two groups at once, two steps of 0.5 s, one update of 0.5 s: 2.5 s a round, lags 0 and 1."""
    found = simulate(replace(HAND, schedule="ppo_off_policy", k=2, trainer_rate=200, push_seconds=0.5))
    assert found.step_seconds == pytest.approx(1.25)
    assert found.trainer_busy == pytest.approx(1 / 2.5) and found.generator_busy == pytest.approx(1 / 2.5)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize(("max_ready", "busy", "engine"), [(0, 18 / 26, 12 / 26), (9, 1, 1)])
def test_completions_that_last_longer_than_a_step_need_a_deeper_queue(max_ready, busy, engine):
    """A completion lasts 10 s and a step 2 s, k = 8. Admission stops while one group is ready: nine groups enter
    together, the trainer takes one every 2 s, and only when it has the last one do eight enter, and one more 2 s later.
    They take 10 s, of which it waits 8: 9 steps in 26 s, and the engine is busy for 12 of them. With room for nine ready
    groups one enters whenever one is released, and nobody waits."""
    found = simulate(replace(HAND, k=8, mean=1000, longest=1000, trainer_rate=500, max_ready=max_ready, steps=90))
    assert found.trainer_busy == pytest.approx(busy, abs=0.005) and found.generator_busy == pytest.approx(
        engine, abs=0.005
    )
    assert found.step_seconds == pytest.approx(2 / busy, rel=0.005)


def test_an_engine_slows_down_with_its_load():
    """B = 2, k = 0, two engines of 5 ms and 5 ms a request: two requests each, so 15 ms a token and 1.5 s a batch."""
    slower = replace(HAND, k=0, batch_prompts=2, rollouts=2, engines=2, base=0.005, per_request=0.005, trainer_rate=800)
    assert simulate(slower).step_seconds == pytest.approx(1.5 + 400 / 800)
    assert simulate(replace(slower, trainers=4)).step_seconds == pytest.approx(1.5 + 400 / 3200)
    assert simulate(replace(slower, trained_share=0.5)).step_seconds == pytest.approx(1.5 + 200 / 800)


def test_a_trainer_that_does_not_wait_for_the_update_begins_the_next_step():
    """Two groups of k = 1 and an update of 0.5 s: the trainer works on during it, unless it waits."""
    waiting = replace(HAND, k=4, trainer_rate=100, push_seconds=0.5)
    assert simulate(waiting).step_seconds == pytest.approx(1.5)
    assert simulate(replace(waiting, trainer_waits=False)).step_seconds < 1.3


@pytest.mark.parametrize("schedule", ["pipeline", "ppo_off_policy"])
@pytest.mark.parametrize("k", [1, 3])
def test_every_token_is_trained_once_at_a_lag_within_the_bound(schedule, k):
    """Random lengths: the tokens whose lag was counted are those of the groups that were trained."""
    setting = Setting(
        batch_prompts=4, rollouts=3, k=k, schedule=schedule, mean=40, sigma=0.8, longest=160, trainers=1, engines=2,
        max_num_seqs=16, base=0.01, per_request=0.001, trainer_rate=2000, push_seconds=0.05, steps=30,
    )  # fmt: skip
    simulation = Simulation(setting)
    trained, count = [], simulation._count_lags
    simulation._count_lags = lambda batch: (
        trained.append(sum(e - g.begin for g in batch for e in g.ends)),
        count(batch),
    )
    found = simulation.run()
    assert found.lag_max == (k if schedule == "pipeline" else k - 1)
    assert sum(simulation.lags.values()) == pytest.approx(sum(trained[-setting.steps :]))


def test_slots_that_no_batch_fits_are_said():
    """Two of the four requests of the oldest group can never run, so the trainer would wait forever."""
    with pytest.raises(RuntimeError, match="do not fit the engines"):
        simulate(replace(HAND, rollouts=4, max_num_seqs=2))


def generator_share(setting: Setting) -> tuple[float, float]:
    """(share of the time that the trainer works, mean lag) of the real Generator. Its engine sleeps for each token, the
    trainer for each step; completions have the lengths that the simulation draws."""
    rng, found, version, began, worked = random.Random(setting.seed), [], 0, 0.0, 0.0
    engine = FakeEngine(setting.slots, lambda ids, most: setting.draw_length(rng), setting.base)
    prompts, warm_up = (Problem(str(i), [1]) for i in itertools.count()), setting.k + 2
    with generating(
        prompts, engine, setting.pacer(), rollouts=setting.rollouts, max_completion=setting.longest
    ) as generator:
        while version < warm_up + setting.steps:
            groups = generator.take(setting.batch_prompts)
            seconds = sum(len(r.mask) for g in groups for r in g.rollouts) / setting.trainer_rate
            time.sleep(seconds)
            if version >= warm_up:
                found += [lag for g in groups for r in g.rollouts for lag in lags(r, version)]
                worked += seconds
            version += 1
            if version == warm_up:
                began = time.monotonic()
            now = time.monotonic()
            generator.push({}, version, len(groups))
    return worked / (now - began), sum(found) / len(found)


@pytest.mark.medium
def test_the_plan_is_what_the_real_generator_does():
    """Completions of 2 s and steps of 0.4 s: with and without a deeper queue, and on an engine with few slots."""
    setting = replace(
        HAND, batch_prompts=4, rollouts=2, k=8, mean=8, sigma=0.5, longest=20, max_num_seqs=1000, base=0.25,
        trainer_rate=160, push_seconds=0.002, trainer_waits=False, steps=20,
    )  # fmt: skip
    settings = [setting, replace(setting, max_ready=36), replace(setting, max_num_seqs=24)]
    with ThreadPoolExecutor(len(settings)) as pool:
        measured = list(pool.map(generator_share, settings))
    for case, (busy, lag) in zip(settings, measured, strict=True):
        planned = simulate(case)
        assert busy == pytest.approx(planned.trainer_busy, abs=0.05), case
        assert lag == pytest.approx(planned.lag_mean, abs=0.5), case


# --------------------------------------------------------------------------------------------------- the command line


def test_the_roofline_by_hand():
    """P = 1e9 at 1 TB/s and 100 TFLOP/s of which half is reached: 2 ms of weights become 4. All completions have 1,000
    tokens, 500 of them behind a token on average, and 100 of the prompt: 600 · 1,000 bytes are 0.6 us, 2 P FLOPs 20 us.
    Training at an MFU of 0.3: 3e13 / 6e9 = 5,000 tokens/s. 2 GB over 4 GB/s: 0.5 s."""
    words = "--model_parameters 1e9 --bandwidth_tb 1 --peak_tflops 100 --use 0.5 --mfu 0.3 --link_gb 4 --prompt 100"
    args = plan.parser().parse_args([*words.split(), "--kv_bytes_per_token", "1000"])
    found = plan.with_speeds(Setting(mean=1000, sigma=0, longest=2000), args)
    assert found.base == pytest.approx(0.004) and found.per_request == pytest.approx(2 * 20.6e-6)
    assert found.trainer_rate == pytest.approx(5000) and found.push_seconds == pytest.approx(0.5)


def test_the_best_split_gives_the_slower_side_more():
    """A trainer needs four times as long for a token as an engine: 8 of 10 GPUs train."""
    setting = replace(HAND, batch_prompts=8, k=4, trainers=5, engines=5, max_num_seqs=1, trainer_rate=25)
    found = plan.best_split(setting)
    assert (found.trainers, found.engines) == (8, 2)


def test_the_table_has_a_line_for_each_schedule(capsys):
    words = "--trainers 1 --engines 1 --batch_prompts 2 --rollouts 2 --k 2 --lengths 50,0.3 --longest 100 --steps 4"
    found = plan.main([*words.split(), "--engine_step", "0.01,0", "--trainer_tokens", "100", "--push_seconds", "0.1"])
    assert list(found) == [
        "pipeline 2", "pipeline 2, --max_ready 6", "the faster one, best split", "ppo_off_policy 2",
        "on-policy (pipeline 0)",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in found) and "trainers: 100 tokens/s" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--k -1", "--k, --min_ready, --max_ready: pipeline needs batch_prompts >= 1 and k >= 0"),
        ("--min_ready 500", "min_ready must be from 0 to 384, not 500"),
        ("--engines 1 --max_num_seqs 8", "--rollouts 16 do not fit 8 slots; raise --max_num_seqs or --engines"),
        ("--lengths 8000", "--lengths: must be two numbers, A,B, not '8000'"),
        ("--mfu 0", "--mfu: must be a number above 0"),
    ],
)
def test_what_cannot_work_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main(words.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
