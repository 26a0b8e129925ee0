"""tools/plan.py and tools/simulated_cluster.py: schedules that can be worked out by hand, and the roofline."""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import plan
import pytest
from fake_engine import FakeEngine, Problem, generating
from simulated_cluster import Setting, Simulation, lognormal, simulate

from pipeline_rl import lags

# One prompt a step, one completion of 100 tokens for each, 10 ms a token however many run: 1 s. Updates take no time.
HAND = Setting(
    batch_prompts=1, k=1, lengths=[[100]], trainers=1, engines=1, max_num_seqs=99, engine_step=(0.01, 0),
    trainer_rates=[50], push_seconds=0, steps=20,
)  # fmt: skip


def test_a_trainer_twice_as_slow_as_the_engine():
    """A step takes 2 s. When a group is taken the next one enters, and is complete after 1 s: the engine is busy half of
    the time. It entered one version before the one that trains on it."""
    found = simulate(HAND)
    assert found.step_seconds == pytest.approx(2) and found.trainer_busy == pytest.approx(1)
    assert found.generator_busy == pytest.approx(0.5) and found.requests == pytest.approx(0.5)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(1), 1)
    assert found.tokens == pytest.approx(50)


def test_a_trainer_twice_as_fast_as_an_engine_of_one_slot():
    """The engine never stops; 0.5 s after a group enters, the version of the group before it goes live: of the 100
    tokens 50 have a lag of 1 and 50 of 0."""
    found = simulate(replace(HAND, trainer_rates=[200], max_num_seqs=1))
    assert found.step_seconds == pytest.approx(1) and found.trainer_busy == pytest.approx(0.5)
    assert found.generator_busy == pytest.approx(1) and found.requests == pytest.approx(1)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(0.5), 1)


def test_an_update_stops_the_requests_that_run():
    """The same with updates of 0.25 s: a request needs 1 s beside them, so the slot is never empty, but works 80 %."""
    found = simulate(replace(HAND, trainer_rates=[1000], max_num_seqs=1, push_seconds=0.25, trainer_waits=False))
    assert found.step_seconds == pytest.approx(1.25) and found.requests == pytest.approx(1)
    assert found.generator_busy == pytest.approx(0.8) and found.tokens == pytest.approx(80)


def test_on_policy_the_two_take_turns():
    """k = 0: 1 s of sampling, 0.5 s of training, an update of 0.25 s in which both stand still."""
    found = simulate(replace(HAND, k=0, trainer_rates=[200], push_seconds=0.25))
    assert found.step_seconds == pytest.approx(1.75)
    assert found.trainer_busy == pytest.approx(0.5 / 1.75) and found.generator_busy == pytest.approx(1 / 1.75)
    assert found.lag_max == 0


def test_ppo_off_policy_by_hand():
    """k = 2: 1 s for two groups at once, two steps of 0.5 s, one update of 0.5 s: 2.5 s a round, lags 0 and 1."""
    found = simulate(replace(HAND, schedule="ppo_off_policy", k=2, trainer_rates=[200], push_seconds=0.5))
    assert found.step_seconds == pytest.approx(1.25)
    assert found.trainer_busy == pytest.approx(1 / 2.5) and found.generator_busy == pytest.approx(1 / 2.5)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize(("max_ready", "busy", "engine"), [(1, 18 / 26, 12 / 26), (None, 1, 1)])
def test_completions_that_last_longer_than_a_step(max_ready, busy, engine):
    """A completion lasts 10 s and a step 2 s, k = 8. If nothing enters while a group is ready, nine groups enter
    together, the trainer takes one every 2 s, and only when it has the last one do eight enter, and one more 2 s later.
    They take 10 s, of which it waits 8: 9 steps in 26 s, and the engine is busy for 12 of them. By default the trainer
    finds a group in the place of each that it takes, and nobody waits."""
    queue = {"max_ready": max_ready}
    found = simulate(replace(HAND, k=8, lengths=[[1000]], trainer_rates=[500], queue=queue, steps=90))
    assert found.trainer_busy == pytest.approx(busy, abs=0.005)
    assert found.generator_busy == pytest.approx(engine, abs=0.005)
    assert found.step_seconds == pytest.approx(2 / busy, rel=0.005)


def test_an_engine_slows_down_with_its_load():
    """B = 2, k = 0, two engines of 5 ms and 5 ms a request: two requests each, so 15 ms a token and 1.5 s a batch."""
    slower = replace(
        HAND, k=0, batch_prompts=2, lengths=[[100, 100]], engines=2, engine_step=(0.005, 0.005), trainer_rates=[800]
    )
    assert simulate(slower).step_seconds == pytest.approx(1.5 + 400 / 800)
    assert simulate(replace(slower, trainers=4)).step_seconds == pytest.approx(1.5 + 400 / 3200)


def test_a_trainer_that_does_not_wait_for_the_update_begins_the_next_step():
    """Two groups of k = 1 and an update of 0.5 s: the trainer works on during it, unless it waits."""
    waiting = replace(HAND, k=4, trainer_rates=[100], push_seconds=0.5)
    assert simulate(waiting).step_seconds == pytest.approx(1.5)
    assert simulate(replace(waiting, trainer_waits=False)).step_seconds < 1.3


def test_a_trainer_whose_speed_changes():
    """Steps of 2 s and of 1 s in turn; with k = 4 there is always a group for the next one."""
    found = simulate(replace(HAND, k=4, trainer_rates=[50, 100]))
    assert found.step_seconds == pytest.approx(1.5) and found.trainer_busy == pytest.approx(1)


@pytest.mark.parametrize("schedule", ["pipeline", "ppo_off_policy"])
@pytest.mark.parametrize("k", [1, 3])
def test_every_token_is_trained_once_at_a_lag_within_the_bound(schedule, k):
    """Random lengths: the tokens whose lag was counted are those of the groups that were trained."""
    setting = Setting(
        batch_prompts=4, k=k, lengths=lognormal(40, 0.8, 160, rollouts=3, groups=99), trainers=1, engines=2,
        max_num_seqs=16, engine_step=(0.01, 0.001), trainer_rates=[2000], push_seconds=0.05, schedule=schedule, steps=30,
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
    """A group of two requests never fits one slot, so the trainer would wait forever."""
    with pytest.raises(RuntimeError, match="do not fit the engines"):
        simulate(replace(HAND, batch_prompts=2, lengths=[[100, 100]], max_num_seqs=1))


def generator_share(setting: Setting) -> tuple[float, float]:
    """(share of the time that the trainer works, mean lag) of the real Generator. Its engine sleeps for each token, the
    trainer for each step; completions have the lengths of the simulation."""
    lengths, found, version, began, worked = itertools.cycle(itertools.chain(*setting.lengths)), [], 0, 0.0, 0.0
    engine = FakeEngine(setting.max_num_seqs, lambda ids, most: next(lengths), setting.engine_step[0])
    prompts = (Problem(str(i), [1]) for i in itertools.count())
    with generating(
        prompts, engine, setting.pacer(), rollouts=len(setting.lengths[0]), max_completion=1000
    ) as generator:
        while version < setting.warm_up + setting.steps:
            groups = generator.take(setting.batch_prompts)
            seconds = sum(len(r.mask) for g in groups for r in g.rollouts) / setting.trainer_rates[0]
            time.sleep(seconds)
            if version >= setting.warm_up:
                found += [lag for g in groups for r in g.rollouts for lag in lags(r, version)]
                worked += seconds
            version += 1
            if version == setting.warm_up:
                began = time.monotonic()
            now = time.monotonic()
            generator.push({}, version, len(groups))
    return worked / (now - began), sum(found) / len(found)


@pytest.mark.medium
def test_the_plan_is_what_the_real_generator_does():
    """Completions of 2 s and steps of 0.4 s: by default, with a short queue, and on an engine with few slots."""
    setting = replace(
        HAND, batch_prompts=4, k=8, lengths=lognormal(8, 0.5, 20, rollouts=2, groups=200), max_num_seqs=1000,
        engine_step=(0.25, 0), trainer_rates=[160], push_seconds=0.002, trainer_waits=False, steps=20,
    )  # fmt: skip
    settings = [setting, replace(setting, queue={"max_ready": 4}), replace(setting, max_num_seqs=24)]
    with ThreadPoolExecutor(len(settings)) as pool:
        measured = list(pool.map(generator_share, settings))
    for case, (busy, lag) in zip(settings, measured, strict=True):
        planned = simulate(case)
        assert busy == pytest.approx(planned.trainer_busy, abs=0.05), case
        assert lag == pytest.approx(planned.lag_mean, abs=0.5), case


# -------------------------------------------------------------------------------------------------------- a run's logs


def finished_run(folder: Path, **changes: object) -> Path:
    """The logs of 20 steps of `HAND`: in a step of 2 s the engine works for one, its only request takes 0.01 s a token,
    and the trainer never waits. During the steps 7 and 13 the held-out prompts were evaluated: those took 50 s."""
    config = {"batch_prompts": 1, "k": 1, "schedule": "pipeline", "max_num_seqs": 99, "data_parallel": 1,
              "min_ready": 0, "max_ready": 0} | changes  # fmt: skip
    step = {"trainer_idle": 0.0, "generator_idle": 1.0, "sync_seconds": 0.0, "requests": 0.5, "length": 100.0,
            "lag_mean": 1.0, "lag_max": 1}  # fmt: skip
    rows = [step | {"step": i, "seconds": 50.0 if i in (7, 13) else 2.0, "tokens": 100 * i} for i in range(1, 21)]
    logs = {
        "metrics.jsonl": [{"config": config}, *rows],
        "groups.jsonl": [{"step": i, "groups": [["p", 1, 1]], "lengths": [[100]]} for i in range(20)],
        "eval.jsonl": [{"step": 6}, {"step": 12}],
    }
    for name, records in logs.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_run_is_planned_with_its_own_speeds(tmp_path, capsys):
    """What was measured comes out of the plan again, in whatever unit the engine's step was given; and with the same
    speeds the two take turns in 3 s if k = 0."""
    for shape in ("1,0", "0.002,0"):
        plans = plan.main(["--like", str(finished_run(tmp_path)), "--engine_step", shape])
        found = plans["pipeline 1"]
        assert found.step_seconds == pytest.approx(2) and found.trainer_busy == pytest.approx(1)
        assert found.generator_busy == pytest.approx(0.5) and found.requests == pytest.approx(0.5)
        assert (found.lag_mean, found.lag_max) == (pytest.approx(1), 1)
        assert plans["on-policy (pipeline 0)"].step_seconds == pytest.approx(3)
    printed = capsys.readouterr().out
    assert printed.count("| measured | 1 + 1 | 2 | 1.00 | 0.50 | 0 | 1.00 / 1 |") == 2
    assert printed.count("an engine's step: 10 ms and 0 ms a request; trainers: 50 tokens/s; an update: 0 s") == 2


def test_evaluations_of_a_run_are_left_out(tmp_path):
    """Of 20 steps the first k + 2 = 3 and the two with an evaluation. Under ppo_off_policy with k = 3 an evaluation
    falls on the whole round that follows: of the steps 4 to 20 not 7, 8, 9 and 13, 14, 15."""
    setting, _ = plan.like(plan.Folder(finished_run(tmp_path)), (1, 0), 1)
    assert setting.steps == 15
    setting, _ = plan.like(plan.Folder(finished_run(tmp_path, schedule="ppo_off_policy", k=3)), (1, 0), 1)
    assert setting.steps == 11


# --------------------------------------------------------------------------------------------------- the command line


def test_the_roofline_by_hand():
    """P = 1e9 at 1 TB/s and 100 TFLOP/s of which half is reached: 2 ms of weights become 4. All completions have 1,000
    tokens, 500 of them behind a token on average, and 100 of the prompt: 600 · 1,000 bytes are 0.6 us, 2 P FLOPs 20 us.
    Training at an MFU of 0.3: 3e13 / 6e9 = 5,000 tokens/s, of which 10 in 11 are the completions', and half of these are
    trained. 2 GB over 4 GB/s: 0.5 s."""
    words = "--model_parameters 1e9 --bandwidth_tb 1 --peak_tflops 100 --use 0.5 --mfu 0.3 --link_gb 4 --prompt 100"
    words += " --lengths 1000,0 --longest 2000 --trained_share 0.5 --kv_bytes_per_token 1000"
    found = plan.estimated(plan.parser().parse_args(words.split()))
    assert found.engine_step == (pytest.approx(0.004), pytest.approx(2 * 20.6e-6))
    assert found.trainer_rates == [pytest.approx(5000 * 10 / 11 / 0.5)] and found.push_seconds == pytest.approx(0.5)


def test_the_best_split_gives_the_slower_side_more():
    """A trainer needs four times as long for a token as an engine: 8 of 10 GPUs train."""
    setting = replace(HAND, batch_prompts=8, k=4, trainers=5, engines=5, max_num_seqs=1, trainer_rates=[25])
    found = plan.best_split(setting)
    assert (found.trainers, found.engines) == (8, 2)


def test_the_table_has_a_line_for_each_schedule(capsys):
    words = "--trainers 1 --engines 1 --batch_prompts 2 --rollouts 2 --k 2 --lengths 50,0.3 --longest 100 --steps 4"
    found = plan.main([*words.split(), "--engine_step", "0.01,0", "--trainer_tokens", "100", "--push_seconds", "0.1"])
    assert list(found) == ["pipeline 2", "the best split", "ppo_off_policy 2", "on-policy (pipeline 0)"]
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in found) and "trainers: 100 tokens/s" in printed


@pytest.mark.parametrize(("words", "message"), [
    ("--k -1", "--k: pipeline needs batch_prompts >= 1 and k >= 0"),
    ("--engines 1 --max_num_seqs 8", "--rollouts 16 do not fit the engines' slots; raise --max_num_seqs or"),
    ("--like /nowhere", "--like: /nowhere is not the folder of a run"),
    ("--lengths 8000", "--lengths: must be two numbers, A,B, not '8000'"),
    ("--mfu 0", "--mfu: must be a number above 0"),
])  # fmt: skip
def test_what_cannot_work_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main(words.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
