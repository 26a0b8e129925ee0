"""runtime/metrics.py: the clock that counts compute, records, printed lines and warnings."""

import math
import random
from types import SimpleNamespace

import pytest

import length_control
from pipeline_rl import Counters, Rollout
from runtime import metrics
from runtime.metrics import (
    Clock,
    budget_advice,
    closing_fits,
    closing_table,
    enough_tokens,
    evaluation_line,
    evaluation_record,
    step_line,
    warnings_of,
)
from runtime.run_folder import Folder


@pytest.fixture
def new_clock(monkeypatch):
    """Makes a clock over counters and a wall clock that the test sets: (clock, counters, [seconds])."""

    def make(past: dict | None = None) -> tuple[Clock, Counters, list[float]]:
        now = [5000.0]
        monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
        counters = Counters()
        return Clock(SimpleNamespace(counters=counters), 1000, 2, past or {}), counters, now

    return make


def rollout(correct: bool, length: int = 2, reason: str = "stop", interrupted: bool = False) -> Rollout:
    return Rollout(
        completion_ids=[9] * length, logprobs=[0.0] * length, mask=[1] * length, finish_reason=reason,
        versions=[0] * length, interrupted=interrupted, correct=correct,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- compute


def test_compute_by_hand(new_clock):
    """P = 1000: 2 P (10 prefilled + 20 sampled) + 6 P 25 forwarded = 210,000 FLOPs. 100 s less evaluation's 28 s on two
    devices: 144 / 3600 = 0.04 device-hours."""
    clock, counters, now = new_clock()
    assert clock.now() == {"tokens": 0, "trained_tokens": 0, "flops": 0, "device_hours": 0}
    now[0] += 100
    counters.prefilled, counters.sampled, counters.eval_seconds = 10, 20, 28.0
    clock.forwarded, clock.trained_tokens = 25, 15
    assert clock.now() == pytest.approx({"tokens": 20, "trained_tokens": 15, "flops": 210_000, "device_hours": 0.04})


def test_compute_goes_on_after_a_resume(new_clock):
    """An hour on two devices, 7 tokens sampled and 3 trained, on top of what there was. Hours count evaluation, too."""
    past = {"tokens": 100, "trained_tokens": 50, "flops": 1e6, "device_hours": 1.5, "hours": 0.5}
    clock, counters, now = new_clock(past)
    assert clock.now() | {"hours": clock.hours()} == past
    now[0] += 3600
    counters.sampled, clock.trained_tokens = 7, 3
    assert clock.now() == pytest.approx({"tokens": 107, "trained_tokens": 53, "flops": 1_014_000, "device_hours": 3.5})
    counters.eval_seconds = 900.0
    assert clock.hours() == pytest.approx(1.5)


# --------------------------------------------------------------------------------------------------- records and lines


def test_evaluation_by_hand():
    """Three prompts, two samples: correct 2, 1, 0 of 2: mean 1/2, pass@2 2/3. One truncated, one interrupted of six;
    lengths 2 2 2 4 5 6 = 21."""
    groups = [
        [rollout(True), rollout(True)],
        [rollout(True), rollout(False, 4, "length")],
        [rollout(False, 5, interrupted=True), rollout(False, 6)],
    ]
    assert evaluation_record(groups) == pytest.approx({
        "pass_rate": 0.5, "pass_at_k": 2 / 3, "n_prompts": 3, "n_samples": 2, "interrupted": 1 / 6, "truncated": 1 / 6,
        "mean_length": 3.5,
    })  # fmt: skip
    line = evaluation_line(evaluation_record(groups) | {"step": 30, "tokens": 123_456})
    for part in ("step 30", "0.500", "pass@2 0.667", "123k", "truncated 16.7%", "interrupted 16.7%", "length 3.5"):
        assert part in line


def test_data_sets_end_the_line():
    record = evaluation_record([[rollout(True)]]) | {"step": 0, "tokens": 0}
    line = evaluation_line(record | {"data_sets": {"data/aime24": {"pass_rate": 0.1}, "math": {"pass_rate": 0.25}}})
    assert line == evaluation_line(record) + " · aime24 0.100 · math 0.250"


def step_record(**changes) -> dict:
    return {
        "step": 7, "pass_rate": 0.25, "length": 21.5, "lag_mean": 1.234, "lag_max": 3, "ratio_mean": 1.001,
        "ratio_max": 4.56, "ess": 0.987, "entropy": 0.345, "grad_norm": 0.12, "trainer_idle": 0.5,
        "generator_idle": 0.25, "seconds": 1.75, "sync_seconds": 0.1,
    } | changes  # fmt: skip


def test_step_line_shows_what_was_measured_and_lines_up():
    line = step_line(step_record())
    for part in (
        "step    7", "pass 0.250", "length  21.5", "lag 1.23/3", "rho 1.001/4.56", "ess 0.987", "entropy 0.345",
        "grad 0.12", "waits 0.50/0.25 s", "1.75 s",
    ):  # fmt: skip
        assert part in line
    assert len(step_line(step_record(step=1234, length=9.0))) == len(line)
    skipped = step_record()
    for name in ("ratio_mean", "ratio_max", "ess", "entropy", "grad_norm"):
        del skipped[name]
    assert "rho" not in step_line(skipped) and "waits 0.50/0.25 s" in step_line(skipped)


def test_closing_table_by_hand(new_clock, tmp_path):
    """Steps of 1 s and 3 s: the generator idle 0.5 + 0.1 + 0.3 + 0.1 = 1 of 4 s, the trainer 2 of 4 s; lag mean 1.5,
    max 4. Evaluations .1 .4 .6: from .1 to .6, the last two .5. The first line of the log holds the flags."""
    clock, counters, now = new_clock()
    now[0] += 10
    counters.sampled, clock.trained_tokens = 12_345, 678
    folder = Folder(tmp_path)
    folder.append("metrics.jsonl", {"config": {}})
    for seconds, idle, waited, lag, most in ((1.0, 0.5, 0.5, 1.0, 4), (3.0, 0.3, 1.5, 2.0, 2)):
        record = step_record(seconds=seconds, generator_idle=idle, trainer_idle=waited, lag_mean=lag, lag_max=most)
        folder.append("metrics.jsonl", record)
    for rate in (0.1, 0.4, 0.6):
        folder.append("eval.jsonl", {"pass_rate": rate})
    rows = {line[:16].strip(): line[16:] for line in closing_table(folder, clock, "cpu", 8).splitlines()}
    assert rows == {
        "pass rate": "0.100 -> 0.600 (mean of the last two 0.500)",
        "compute": "10 s on 2 x cpu, 2.47e+07 FLOPs",  # 2 P x 12,345
        "tokens": "12,345 sampled, 678 trained",
        "generator idle": "25.0%",
        "trainer idle": "50.0%",
        "lag mean / max": "1.50 / 4 (k = 8)",
        "files": str(tmp_path),
    }


def written(path, rows):
    folder = Folder(path)
    path.mkdir(exist_ok=True)
    for row in rows:
        folder.append("eval.jsonl", row)
    return folder


def risen(C):
    return 0.1 + 0.6 * C**2 / (9 + C**2)


@pytest.mark.parametrize(
    "last, known, words",
    [  # at 0, 1, ... 24 thousand tokens 13 of 25 evaluations lie in the first half; the last one is overwritten
        (
            risen(24),
            0.7,
            ["12k of 24k sampled tokens, 4.0 C_mid", "inside; of all 12 that came 12 inside", "holds"],
        ),
        (0.2, 0.7, ["0.200, OUTSIDE; of all 12 that came 11 inside", "the known 0.70"]),
        (risen(24), 0.99, ["MISSES the known 0.99"]),
        (risen(24), None, ["the ceiling"]),
    ],
)
def test_a_run_ends_with_the_forecast_of_its_half_and_what_came(tmp_path, last, known, words):
    """An exact curve of A .7, C_mid 3k."""
    rows = [
        {"step": i, "tokens": 1000 * i, "pass_rate": risen(i), "n_prompts": 4096, "n_samples": 4} for i in range(25)
    ]
    rows[-1]["pass_rate"] = last
    (half, whole), text = closing_fits(written(tmp_path, rows), "", known)
    assert all(word in text for word in words) and ("known" in text) == bool(known)
    assert half.unseen.sum() == 12 and not whole.unseen.any()


def test_no_forecast_where_half_cannot_carry_one(tmp_path):
    """Of 6 evaluations 3 lie in the first half, and two are too few in any case. A data set has its own figures."""
    rows = [
        {"step": i, "tokens": 1000 * i, "pass_rate": 0.1, "data_sets": {"a": {"pass_rate": risen(i)}}} for i in range(6)
    ]
    _, text = closing_fits(written(tmp_path, rows), "a", None)
    assert text.startswith("no forecast from the first half: 3 usable points") and "the whole run" in text
    assert closing_fits(written(tmp_path / "two", rows[:2]), "a", None)[1].count("\n") == 0


def test_data_sets_are_in_the_closing_table(new_clock, tmp_path):
    """An evaluation set that came with a resume: from its first evaluation, .2, to .3 and .5, whose mean is .4."""
    folder = Folder(tmp_path)
    for rate, of in ((0.1, {}), (0.4, {"aime": 0.2}), (0.4, {"aime": 0.3}), (0.6, {"aime": 0.5})):
        found = {"data_sets": {name: {"pass_rate": rate} for name, rate in of.items()}} if of else {}
        folder.append("eval.jsonl", {"pass_rate": rate} | found)
    first, second = closing_table(folder, new_clock()[0], "cpu", 8).splitlines()[:2]
    assert first == "pass rate       0.100 -> 0.600 (mean of the last two 0.500)"
    assert second == "                0.200 -> 0.500 (mean of the last two 0.400) of aime"


# ------------------------------------------------------------------------------------------------------------ warnings


def test_warnings_by_hand():
    """Each speaks at its level and not below: 5 % and 10 % truncated, entropy 0.001, every third step without a row."""
    healthy = {"truncated": 0.04, "entropy": 0.001, "step": 7}
    assert warnings_of(healthy, 0) == warnings_of(healthy, 2) == warnings_of(healthy, 4) == []
    assert [line[:7] for line in warnings_of(healthy | {"truncated": 0.07}, 0)] == ["Warning"]
    assert [line[:7] for line in warnings_of(healthy | {"truncated": 0.2}, 0)] == ["WARNING"]
    [line] = warnings_of(healthy | {"entropy": 0.0009}, 0)
    assert "the entropy is 9.0e-04 nats" in line
    for empty_steps in (3, 6):
        [line] = warnings_of({"truncated": 0.0}, empty_steps)
        assert f"{empty_steps} steps in a row had no group" in line


def test_enough_tokens_by_hand():
    """A cap of 100. Of 20 completions 4 are cut (1/5), 8 end at 60 and 8 by 50: beyond 50 there are 8 endings in 4 x 50 +
    8 x 10 = 280 tokens. A fifth becomes a twentieth after log(4) / (8 / 280) = 48.5 more tokens. An answer
    that ended at 90, beyond its budget of 40 (case d of length_control.py), is one ending in 70 tokens, and 20 of another."""
    lengths, cut = [100] * 4 + [60] * 8 + [50] * 8, [True] * 4 + [False] * 16
    assert enough_tokens(lengths, cut, 100) == pytest.approx(100 + 35 * math.log(4))
    assert enough_tokens([100, 50], [True, False], 100) == math.inf
    assert enough_tokens([90, 40], [False, True], 40) == pytest.approx(40 + 90 * math.log(10))


def test_enough_tokens_finds_the_rate_of_a_geometric_length():
    """Lengths that end with 1 % at each token: 5 % are longer than log(.05) / log(.99) = 298, whatever the cap is."""
    draw = random.Random(0)
    true = [math.ceil(math.log(1 - draw.random()) / math.log(0.99)) for _ in range(20_000)]
    for cap in (100, 150, 200):
        lengths = [min(length, cap) for length in true]
        assert enough_tokens(lengths, [length > cap for length in true], cap) == pytest.approx(298, rel=0.05)


def test_truncation_before_training_names_the_budget_to_raise():
    """As above: 1/5 cut at 100 = 80 + 20 tokens, 149 are needed, so a max_budget of 129, and 130 with two digits. Of
    answers after token 9, the mark, with a budget of 100: 149, and so 150. 10 % are no reason; where none of the long
    ones ends, four times as much is only the least."""
    groups = [(100, "length")] * 4 + [(60, "stop")] * 8 + [(50, "stop")] * 8
    whole = [rollout(False, length, reason) for length, reason in groups]
    said = budget_advice(whole, None, 80, 20)
    assert said.startswith(
        "Warning: 20% of completions are truncated before any training; raise --max_budget from 80 to 130,"
    )
    control = length_control.Interruption(5, 7, 100, [8, 9], [9])
    answers = [rollout(False, length + 3, reason) for length, reason in groups]
    for one in answers:
        one.completion_ids = [1, 1, 9, *[5] * (len(one.completion_ids) - 3)]
    assert "raise --answer_budget from 100 to 150, where 5% would be" in budget_advice(answers, control, 7, 100)
    assert budget_advice([*whole, *[rollout(True)] * 20], None, 80, 20) is None  # 4 of 40
    assert budget_advice([*whole, *[rollout(True)] * 19], None, 80, 20) is not None
    endless = [rollout(False, 100, "length"), rollout(True, 9)]
    assert "raise --max_budget from 80 to 380, at least: too few of" in budget_advice(endless, None, 80, 20)


def test_a_model_that_never_ends_its_thinking_is_mentioned_once():
    """Of 20 verdicts 11 are unfinished at step 1: a line with the flag. Not at one half, nor later, nor without verdicts."""
    record = {"truncated": 0.0, "step": 1, "verdicts": {"unfinished": 11, "correct": 4, "wrong": 5}}
    [line] = warnings_of(record, 0)
    assert line.startswith("Warning: 55% of completions never ended their thinking") and "--thinking false" in line
    assert warnings_of(record | {"step": 2}, 0) == []
    assert warnings_of(record | {"verdicts": {"unfinished": 10, "wrong": 10}}, 0) == []
    assert warnings_of(record | {"verdicts": {}}, 0) == warnings_of({"truncated": 0.0, "step": 1}, 0) == []
