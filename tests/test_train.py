"""train.py: what one step makes of a batch, by hand; the loop over a scripted generator and trainer; and each way in
which the program may end."""

import os
import signal
import sys
from types import SimpleNamespace

import accelerate
import pytest
import torch
from scripted import (
    Replay,
    ScriptedGenerator,
    ScriptedTrainer,
    assert_same_logs,
    batch_of,
    problem,
    rollout,
    without_times,
)

import fit_sigmoid
import runtime.parts
import runtime.run
import train
from pipeline_rl import Group
from runtime.flags import Flags, UsageError
from runtime.folder import Folder, Progress
from runtime.generator import EngineDied, Exhausted, GeneratorFailed, StopRequested
from runtime.ranks import Ranks, report_fault
from runtime.torch_engine import TorchEngine
from runtime.trainer import Trainer
from tasks import arithmetic
from tasks.judges import RewardError
from tasks.prompts import PromptStream


def hand_groups() -> list[Group]:
    """Group 0: rewards 1 -1 -1 -1, centred 3/2 -1/2 -1/2 -1/2, trained tokens 3 1 2 2 = 8 (one row has a forced one).
    Group 1: all 1. Group 2: the first prompt once more, 1 1 -1 -1, tokens 2 2 2 4 = 10, the last row truncated."""
    return [
        Group(5, problem("a", [1]), 0, [rollout(1, 3), rollout(-1, 1), rollout(-1, 3, forced=1), rollout(-1, 2)]),
        Group(6, problem("b", [2, 2]), 0, [rollout(1, 2, "length"), rollout(1, 2), rollout(1, 2), rollout(1, 2)]),
        Group(7, problem("a", [3]), 0, [rollout(1), rollout(1), rollout(-1), rollout(-1, 4, "length")]),
    ]


@pytest.fixture
def one_step(tmp_path):
    """`batch_of` in a folder of its own."""
    return lambda groups, **changes: batch_of(groups, tmp_path, **changes)


def row_weights(batch) -> list[float]:
    """One weight per row: all trained tokens of a row have the same here."""
    for token_weights, mask in zip(batch.token_weights, batch.mask, strict=True):
        assert len(token_weights[mask].unique()) == 1 and not token_weights[~mask].any()
    return batch.token_weights.amax(1).tolist()


def test_batch_by_hand(one_step):
    """Group 1 leaves. Then the std over the 8 rows left: squares 9/4 + 3/4 + 4 = 7, std sqrt(7/8) = 0.935414. (With
    group 1 it would be sqrt(7/12) = 0.763763.) Prompt average over 2 prompts: 1/16 for each of group 0's 8 tokens, 1/20
    for each of group 2's 10. Rewards sum to 2 over 12 rows; lengths 9 + 8 + 10 = 27."""
    batch, record = one_step(hand_groups())
    expected = [1.603567, -0.534522, -0.534522, -0.534522, 1.069045, 1.069045, -1.069045, -1.069045]
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), atol=1e-5, rtol=0)
    assert row_weights(batch) == pytest.approx([1 / 16] * 4 + [1 / 20] * 4)
    assert batch.token_weights.sum().item() == pytest.approx(1.0)
    masks = ["".join(map(str, row)) for row in batch.mask.int().tolist()]
    assert masks == ["1110", "1000", "1010", "1100", "1100", "1100", "1100", "1111"]
    assert [list(row.prompt_ids) for row in batch.rows] == [[1]] * 4 + [[3]] * 4
    assert [list(row.completion_ids) for row in batch.rows][:3] == [[10, 11, 12], [10], [10, 11, 12]]
    assert [list(row.mask) for row in batch.rows][:3] == [[1, 1, 1], [1], [1, 0, 1]]
    expected = [[-0.1, -0.2, -0.3, 0], [-0.1, 0, 0, 0], [-0.1, 0, -0.3, 0]]
    torch.testing.assert_close(batch.behaviour_logprobs[:3], torch.tensor(expected))
    assert batch.behaviour_logprobs.dtype == torch.float32 and batch.old_logprobs is None
    expected = {"reward": 2 / 12, "pass_rate": 7 / 12, "length": 27 / 12, "interrupted": 1 / 12, "truncated": 2 / 12}
    expected |= {"zero_variance_groups": 1, "rows": 8, "trained_tokens": 18}
    assert {name: record[name] for name in expected} == pytest.approx(expected)


def test_the_alternatives_by_hand(one_step):
    """The ablation: std sqrt(7/12), three prompts in the average, group 1 with advantage 0. Then without a std, and
    divided by the completion budget, 18 + 4, times 8 rows."""
    batch, record = one_step(hand_groups(), zero_variance_filter=False)
    assert batch.advantages[:2].tolist() == pytest.approx([1.5 / 0.763763, -0.5 / 0.763763], rel=1e-5)
    assert batch.advantages[4:8].tolist() == [0.0] * 4
    assert row_weights(batch) == pytest.approx([1 / 24] * 4 + [1 / 24] * 4 + [1 / 30] * 4)
    assert record["zero_variance_groups"] == 1 and record["rows"] == 12
    batch, _ = one_step(hand_groups(), normalize_advantages="none", aggregation="constant")
    assert batch.advantages.tolist() == [1.5, -0.5, -0.5, -0.5, 1, 1, -1, -1]
    assert row_weights(batch) == pytest.approx([1 / (22 * 8)] * 8)


def test_truncated_rows_leave_after_the_centring(one_step):
    """The last row of group 2 leaves: the group's 6 tokens left weigh 1/12 each. Group 1's truncated row had left with
    its group, so one row is counted as dropped."""
    kept, _ = one_step(hand_groups())
    batch, record = one_step(hand_groups(), truncated_rollouts="drop")
    assert torch.equal(batch.advantages, kept.advantages[:7])
    assert row_weights(batch) == pytest.approx([1 / 16] * 4 + [1 / 12] * 3)
    assert batch.mask.shape == (7, 3) and record["rows"] == 7 and record["truncated_dropped"] == 1
    assert record["truncated"] == pytest.approx(2 / 12)  # of all that was sampled


def test_nothing_to_train_on_is_no_batch_and_is_counted(one_step):
    groups = hand_groups()
    batch, record = one_step(groups[1:2])
    assert batch is None and record["zero_variance_groups"] == 1 and record["pass_rate"] == 1
    cut = [Group(0, problem("a"), 0, [rollout(1, 2, "length"), rollout(-1, 2, "length")])]
    batch, record = one_step(cut, truncated_rollouts="drop")
    assert batch is None and record["truncated_dropped"] == 2 and "rows" not in record
    assert one_step(cut)[0] is not None
    assert one_step(groups[1:2], zero_variance_filter=False)[0] is not None


def test_length_penalty_on_correct_answers_only(one_step):
    """Cap 8 + 2 = 10, ramp of 4: nothing up to 6, -1/2 at 8, -1 at 10. Pass rate is correctness, never the shaped
    reward."""
    rollouts = [rollout(1, 6), rollout(1, 8), rollout(1, 10), rollout(-1, 10)]
    options = {"length_control": "penalty", "max_budget": 8, "answer_budget": 2, "penalty_window": 4}
    for more, expected in (
        ({}, [1, 0.5, 0, -1]),
        ({"penalty_on": "all"}, [1, 0.5, 0, -2]),
        ({"length_control": "interruption"}, [1, 1, 1, -1]),
    ):
        assert train.shaped_rewards(rollouts, Flags(**options | more)).tolist() == expected
    assert [r.reward for r in rollouts] == [1, 1, 1, -1]  # the verifier's own stay for the log
    batch, record = one_step([Group(0, problem("a"), 0, rollouts)], **options, normalize_advantages="none")
    assert batch.advantages.tolist() == pytest.approx([1 - 0.125, 0.5 - 0.125, -0.125, -1.125])
    assert record["reward"] == pytest.approx(0.125) and record["pass_rate"] == 0.75


def test_shuffled_rewards_keep_the_multiset(one_step):
    """The control permutes all rewards of the batch, over group borders; pass rate is true."""
    groups = [Group(i, problem(str(i)), 0, [rollout(1 if i < 3 else -1) for _ in range(4)]) for i in range(8)]
    rollouts = [r for group in groups for r in group.rollouts]
    varied = []
    for seed in (0, 1, 0):
        batch, record = one_step(groups, reward="shuffled", seed=seed)
        assert record["pass_rate"] == 12 / 32 and record["reward"] == pytest.approx(-8 / 32)
        assert batch is not None and record["zero_variance_groups"] < 8
        varied.append(batch.advantages.tolist())
    assert varied[0] == varied[2] != varied[1]
    assert [r.reward for r in rollouts] == [1] * 12 + [-1] * 20


def first_keys(played, n: int) -> list[str]:
    """The prompts that a fresh stream begins with."""
    stream = PromptStream(played.run.task.train, 0, lambda key: False)
    return [next(stream).key for _ in range(n)]


def some_equal(equal):
    """A script in which the groups whose number is `equal` have equal rewards."""
    return {"rewards": staticmethod(lambda n, problem: [1.0, 1.0] if equal(n) else [1.0, -1.0])}


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"save_every": 3}, [3, 6, 8]),
        ({"save_every": 3, "schedule": "ppo_off_policy"}, [4, 6, 8]),  # 2 steps a round: 4 crosses 3
        ({"save_every": 4}, [4, 8]),  # the last one is written once
        ({"save_every": 0}, []),
    ],
)
def test_checkpoints_come_when_a_multiple_was_crossed(run, monkeypatch, changes, saved):
    """And once more at the end; 0 is never."""
    steps, save = [], runtime.run.save
    monkeypatch.setattr(runtime.run, "save", lambda run: steps.append(run.progress.step) or save(run))
    run(**changes)
    assert steps == saved


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 2, 8])
def test_the_loop_on_the_pipeline_schedule(run, k):
    """One version and one push of its B groups a step; prompts in the stream's order; lag up to k; evaluations at 0, 4
    and 8, probes at the other multiples of 3."""
    played = run(k=k, max_steps=12, min_ready=3 * k)
    steps, evals, generator = played.steps, played.evals, played.generator
    assert [r["step"] for r in steps] == list(range(1, 13)) == [r["version"] for r in steps]
    assert played.trainer.versions == list(range(12))
    assert max(r["lag_max"] for r in steps) == k and all(0 <= r["lag_mean"] <= r["lag_max"] for r in steps)
    assert [r["step"] for r in evals] == [0, 4, 8, 12] == [r["version"] for r in evals]
    assert evals[0]["pass_rate"] == 1.0 and evals[0]["n_prompts"] == 5 and evals[0]["n_samples"] == 2
    assert played.pushes() == [("push", 3)] * 12
    assert [n for name, n in generator.calls if name == "evaluate"] == [10, 5, 10, 5, 10, 5, 10]
    assert [p.key for p in generator.taken] == first_keys(played, 36)
    assert played.trainer.prompts == [tuple(p.prompt_ids) for p in generator.taken for _ in range(2)]
    assert all(r["logprob_gap"] == 0 for r in steps if r["step"] in (1, 4, 5))


@pytest.mark.parametrize("k", [1, 4])
def test_the_loop_off_policy(run, k):
    """k updates of B from one frozen version, then one push of all k B groups; shuffled batches."""
    played = run(schedule="ppo_off_policy", k=k, max_steps=8)
    steps = played.steps
    assert [(r["lag_max"], r["lag_mean"]) for r in steps] == [(lag, lag) for lag in range(k)] * (8 // k)
    assert played.pushes() == [("push", 3 * k)] * (8 // k)
    assert [r["version"] for r in steps] == list(range(1, 9))
    taken = [tuple(p.prompt_ids) for p in played.generator.taken for _ in range(2)]
    for phase in range(8 // k):
        part = slice(phase * 6 * k, (phase + 1) * 6 * k)
        assert sorted(played.trainer.prompts[part]) == sorted(taken[part])
    assert played.trainer.prompts != taken  # shuffled within the phase


def test_min_ready_holds_the_lag_up(run):
    """B = 3, k = 2, six groups kept ready: nine are in at version 0 and train at lags 0, 1, 2; then each new group has
    six before it."""
    assert [r["lag_mean"] for r in run(k=2, min_ready=6).steps] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_tis_scores_the_batches_of_a_phase_before_its_first_step(run):
    """k = 2: both batches are scored before the first update. The script scores the r-th row of a batch by -r; group 0
    has equal rewards, so two neighbours are missing from one batch."""
    calls = []

    def score(self, rows):
        calls.append(self.steps)
        n = len(rows) if len(calls) <= 2 else 1  # later calls are weights checks
        return -torch.arange(n)[:, None].expand(len(rows), 2).float() if n > 1 else torch.zeros(len(rows), 2)

    changes = {"loss": "tis", "schedule": "ppo_off_policy", "k": 2, "max_steps": 2, "pass_rate_threshold": 2.0}
    played = run(some_equal(lambda n: n == 0), {"score": score}, **changes)
    assert calls[:2] == [0, 0]
    short, whole = sorted((batch.old_logprobs[:, 0].tolist() for batch in played.trainer.batches), key=len)
    assert whole == [0, -1, -2, -3, -4, -5]
    assert short in [whole[:i] + whole[i + 2 :] for i in (0, 2, 4)]


def test_skipped_steps_release_their_groups_and_make_no_version(run):
    """Prompts 3 to 8 have equal rewards: steps 2 and 3 have nothing to train on. A gradient that is not finite (the
    second update) does the same."""
    played = run(some_equal(lambda n: 3 <= n < 9), {"bad": [1]}, max_steps=6, pass_rate_threshold=2.0)
    steps = played.steps
    assert [r["version"] for r in steps] == [1, 1, 1, 1, 2, 3]
    assert [r.get("updated") for r in steps] == [1, None, None, 0, 1, 1]
    assert played.pushes() == [(name, 3) for name in ("push", "release", "release", "release", "push", "push")]
    assert [r["zero_variance_groups"] for r in steps] == [0, 3, 3, 0, 0, 0]


def test_a_batch_whose_mask_leaves_no_token_makes_no_version(run, capsys):
    """At steps 2 to 5 nothing is left; the third such step in a row warns. They are no bad gradients, of which three in
    a row end the run."""
    left = iter([5, 0, 0, 0, 0, 7])
    thrown = []

    def backward(trainer, batch):
        trainer.optimizer = SimpleNamespace(zero_grad=lambda: thrown.append(1))
        kept = next(left)
        return kept > 0, ScriptedTrainer.backward(trainer, batch)[1] | {"kept_tokens": kept}

    played = run({}, {"backward": backward}, max_steps=6, pass_rate_threshold=2.0)
    assert [r["version"] for r in played.steps] == [1, 1, 1, 1, 1, 2] and len(thrown) == 4
    assert [r["updated"] for r in played.steps] == [1, 0, 0, 0, 0, 1]
    assert [r["trained_tokens"] for r in played.steps] == [5, 0, 0, 0, 0, 7]
    assert capsys.readouterr().out.count("Warning: 3 steps in a row had no token that the mask keeps") == 1
    assert played.steps[-1]["trained_tokens_total"] == 12 and played.steps[1]["grad_norm"] == 0
    assert played.pushes() == [("push", 3), *[("release", 3)] * 4, ("push", 3)]


def test_evaluations_that_come_due_while_no_step_makes_an_update(run, monkeypatch):
    """Only step 1 has something to train on. The probe begun at step 2 is collected at step 3, that evaluation at step
    6. No tracker is asked to go back."""
    logged = []
    monkeypatch.setattr(accelerate.Accelerator, "log", lambda self, values, step: logged.append(step))
    played = run(some_equal(lambda n: n >= 3), eval_every=3, probe_every=2, pass_rate_threshold=2.0)
    assert len(logged) == 8 + 4 and logged == sorted(logged)
    assert [r["step"] for r in played.evals] == [0, 3, 6, 8] and played.progress.version == 1
    assert [n for name, n in played.generator.calls if name == "evaluate"] == [10, 5, 10, 10, 10]


def test_gradients_that_stay_bad_end_the_run(run):
    with pytest.raises(train.RunFailed, match="not finite 3 times in a row"):
        run(trainer={"bad": [2, 3, 4]})
    run(trainer={"bad": [1, 2, 4, 5]})  # never three in a row


def test_dynamic_sampling_fills_the_batch(run):
    """Every third group has equal rewards: it is released at once. Each step is offered the groups up to its third good
    one: D G G D G, G D G G, ... of 27 groups 9 go. What was discarded was consumed, too: it is in the history and in
    the step's pass rate."""
    played = run(some_equal(lambda n: n % 3 == 0), dynamic_sampling=True, max_steps=6, pass_rate_threshold=2.0)
    steps, taken = played.steps, played.generator.taken
    assert [r["zero_variance_groups"] for r in steps] == [0] * 6 and [r["rows"] for r in steps] == [6] * 6
    assert played.pushes().count(("push", 3)) == 6 and played.pushes().count(("release", 1)) == 9
    assert max(r["lag_max"] for r in steps) <= 2
    assert [p.key for p in taken] == first_keys(played, 27)
    rates = {key: solved / rollouts for key, solved, rollouts in played.run.history.state_dict()["counts"]}
    assert [rates[p.key] for p in taken] == [1.0, 0.5, 0.5] * 9
    assert [(r["offered"], r["discarded_groups"]) for r in steps] == [(5, 2), (4, 1)] * 3
    assert [r["pass_rate"] for r in steps] == pytest.approx([(2 + 3 / 2) / 5, (1 + 3 / 2) / 4] * 3)


def test_what_a_phase_discarded_is_counted_at_its_first_step(run):
    """k B = 6 good groups of nine offered, D G G D G G D G G: three discarded ones, all right, beside the first."""
    changes = {"dynamic_sampling": True, "schedule": "ppo_off_policy", "k": 2, "max_steps": 4}
    steps = run(some_equal(lambda n: n % 3 == 0), **changes, pass_rate_threshold=2.0).steps
    assert [(r["offered"], r["discarded_groups"], r["pass_rate"]) for r in steps] == [(6, 3, 0.75), (3, 0, 0.5)] * 2


def test_dynamic_sampling_looks_at_shaped_rewards(run):
    """Two right answers of 2 and 34 tokens, the cap: the penalty is 0 and -1, so there is a signal and nothing goes."""

    def answer(self, reward, version=None):
        result = ScriptedGenerator.rollout(self, reward, version)
        if reward > 1:  # the long one
            result.completion_ids, result.logprobs, result.versions = [9] * 34, [0.0] * 34, result.versions * 17
            result.mask, result.reward = [1] * 34, 1.0
        return result

    both = {"rewards": staticmethod(lambda n, problem: [1.0, 2.0]), "rollout": answer}
    changes = {"dynamic_sampling": True, "length_control": "penalty", "pass_rate_threshold": 2.0, "max_steps": 2}
    assert [(r["offered"], r["discarded_groups"], r["rows"]) for r in run(both, **changes).steps] == [(3, 0, 6)] * 2


def test_solved_prompts_retire_and_those_in_flight_are_counted(run):
    """Four prompts, B = 1, k = 8: the first prompt is always solved and retires when step 1 has consumed it. Groups 0
    to 8 are in: its second group, of epoch 1, and perhaps a third are trained and counted; no other enters."""
    seen = []

    def rewards(number, problem):
        seen.append(problem.key)
        return [1.0, 1.0] if problem.key == seen[0] else [1.0, -1.0]

    changes = {"batch_prompts": 1, "k": 8, "prompts": 4, "max_steps": 14, "min_ready": 8}
    played = run({"rewards": staticmethod(rewards)}, **changes, zero_variance_filter=False)
    history, steps = played.run.history, played.steps
    assert history.retired(seen[0]) and history.n_retired == 1 == steps[-1]["retired"]
    late = [r["retired_in_flight"] for r in steps]
    assert late == [int(n > 0 and key == seen[0]) for n, key in enumerate(seen[:14])] and sum(late) >= 1
    assert seen[0] not in seen[9:] and len(seen) > 14


def test_budgets_end_the_run_cleanly(run):
    """Twelve tokens a step (3 x 2 x 2): a budget of 30 is reached after three steps. 1e-12 hours have passed before the
    first one."""

    def take(self, count):
        self.counters.sampled += 4 * count
        return ScriptedGenerator.take(self, count)

    played = run({"take": take}, max_sampled_tokens=30)
    assert len(played.steps) == 3 and played.evals[-1]["step"] == 3 and played.steps[-1]["tokens"] == 36
    assert run(max_hours=1e-12).steps == []


@pytest.mark.long
def test_a_run_of_no_steps_evaluates(program, tmp_path):
    """After a kill it evaluates the newest checkpoint, and a longer run goes on."""
    code, out, err = program("--max_steps", "0")
    assert (code, err) == (0, "") and "no fit: " in out
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0]
    assert not without_times(tmp_path / "run", "metrics.jsonl")
    assert program("--resume", "--max_steps", "2")[0] == 0
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2]


def test_all_prompts_retired_is_a_success(program, tmp_path):
    """Every rollout is right: all 12 prompts are retired once each was seen."""

    def take(self, count):
        try:
            groups = Replay.take(self, count)
        except StopIteration:  # the real generator's word for it: test_pipeline_rl.py
            raise Exhausted("no prompt is left to admit; 0 groups stay untrained") from None
        for answer in [answer for group in groups for answer in group.rollouts]:
            answer.reward, answer.correct = 1.0, True
        return groups

    code, out, err = program(script={"take": take})
    assert code == 0 and err == ""
    assert "0 groups stay untrained; 12 of 12 prompts are retired. The run ends." in out
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3, 4]
    assert "Warning: 3 steps in a row had no rollout left to train on" in out
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0, 3, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_engine_dies_while_weights_are_pushed(program, whole, tmp_path):
    """The push of version 3 fails; the trainer hears of it when it pushes version 4. That step is logged, so the
    resumed run's logs are those of one that never stopped."""

    def push(self, tensors, version, release):
        if version == 4:
            failure = GeneratorFailed("the generator failed: EngineDied: it died")
            failure.engine_died = True
            raise failure
        Replay.push(self, tensors, version, release)

    code, _, err = program(script={"push": push})
    assert code == 75 and "train.py: the generator failed: EngineDied: it died; checkpoint" in err
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 4
    assert program("--resume")[0] == 0
    assert_same_logs(tmp_path / "run", whole[0])


def test_a_stop_request_wins_over_a_dead_engine(program, tmp_path):
    """A signal that came at the same time, to the whole process group, is what ends the run."""

    def take(self, count):
        if self.step == 3:
            self.progress.stop_signal = 15
            raise GeneratorFailed("the generator failed: EngineDied: it died")
        return Replay.take(self, count)

    code, _, err = program(script={"take": take})
    assert code == 143 and "it died; checkpoint" in err
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 3


RAISED = [  # where in the generator's thread, at which call, what, the exit code and the message
    (
        TorchEngine,
        "_step",
        60,
        EngineDied("no\nmore"),
        75,
        "the generator failed: EngineDied: no; checkpoint",
    ),
    (PromptStream, "__next__", 30, OSError(), 1, "the generator failed: OSError: ; checkpoint"),
    (arithmetic.ChainTask, "score", 12, RewardError("`reward` f raised:\nx"), 1, "--reward f raised:\nx; checkpoint"),
    (TorchEngine, "update", 1, TypeError("odd"), 2, "--model built in: the generator failed: TypeError: odd."),
]


@pytest.mark.parametrize(("place", "method", "call", "error", "code", "message"), RAISED)
def test_whatever_the_generators_thread_raises_ends_the_process_and_not_the_run(
    monkeypatch, tmp_path, model, capsys, place, method, call, error, code, message
):
    """The real generator over the torch engine; the n-th call of the method raises, and all after it. Exit code 75 says
    that a resume may go on, as it does here; an error of the user's own reward would come again. If the engine does not
    start (call 1), there is nothing to save."""
    original, calls = getattr(place, method), []

    def broken(self, *args):
        calls.append(1)
        if len(calls) >= call:
            raise error
        return original(self, *args)

    words = "--engine torch --save_every 50 --max_steps 99 --batch_prompts 3 --rollouts 4 --k 1 --held_out 4"
    words += " --zero_variance_filter false --max_num_seqs 16 --min_budget 3 --max_budget 4 --answer_budget 3"
    monkeypatch.setattr(runtime.run.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(runtime.parts, "first_model", lambda flags, ranks, task: model)
    monkeypatch.setattr(fit_sigmoid, "plot_fits", lambda fits, x, path: path.touch())
    with monkeypatch.context() as patch:
        patch.setattr(place, method, broken)
        assert train.main([*words.split(), "--output_dir", f"{tmp_path}/run"]) == code
    assert f"train.py: {message}" in "".join(capsys.readouterr())
    if call > 1:
        steps = [record for record in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in record]
        assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == len(steps)
        assert train.main(["--resume", f"{tmp_path}/run", "--max_steps", str(len(steps) + 1)]) == 0


def test_a_run_that_cannot_be_trusted_ends_with_one_sentence(monkeypatch, program, tmp_path):
    """Exit code 1, the reason and the newest checkpoint, no traceback and no new checkpoint. Bad gradients begin at
    step 2: step 4 is saved, with the weights of step 2."""
    update = Trainer.update

    def spoilt(trainer, version):
        if version >= 2:
            next(trainer.policy.parameters()).grad.view(-1)[0] = float("nan")
        return update(trainer, version)

    monkeypatch.setattr(Trainer, "update", spoilt)
    code, _, err = program()
    newest = f"{tmp_path}/run/checkpoints/step-000004"
    assert (
        code == 1 and err.startswith("train.py: the gradient was not finite 3 times in a row") and err.count("\n") == 1
    )
    assert f"possibly written after the failure, is {newest}: --resume {tmp_path}/run" in err
    assert str(Folder(tmp_path / "run").newest_checkpoint()[0]) == newest


def test_weights_that_are_not_finite_are_not_saved(monkeypatch, program, tmp_path):
    """The weights of step 3 are NaN, and then the engine dies: the good checkpoint of step 2 stays and is named."""
    update = Trainer.update

    def spoilt(trainer, version):
        result = update(trainer, version)
        if version == 2:
            next(trainer.model.parameters()).data.view(-1)[0] = float("nan")
        return result

    def take(self, count):
        if self.step == 3:
            raise GeneratorFailed("the generator failed: RuntimeError: a log-prob that is not finite")
        return Replay.take(self, count)

    monkeypatch.setattr(Trainer, "update", spoilt)
    code, _, err = program(script={"take": take})
    [checkpoint] = Folder(tmp_path / "run").checkpoints()
    assert code == 1 and checkpoint.name == "step-000002"
    assert err.startswith("train.py: the weights are not finite, so they are not saved; ")
    assert str(checkpoint) in err and err.count("\n") == 1


def test_a_stop_while_the_engine_starts_writes_nothing(program, tmp_path):
    """Before the engine is up and just after: exit code 143, and the same command may be given again."""

    def killed(self, weights, version=0):  # a signal to the whole group ends the engine, too
        self.progress.stop_signal = 15
        raise StopRequested

    def start(self, weights, version=0):
        self.progress.stop_signal = 15

    for method in (killed, start):
        code, out, err = program(script={"start": method})
        assert (code, err) == (143, "") and "stopped by signal 15 before the first step; nothing is written" in out
        assert not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_stops_the_run_unless_it_is_ignored(monkeypatch, ignored):
    """As it is under nohup."""
    handlers, progress = {}, Progress(None)
    monkeypatch.setattr(runtime.run.signal, "getsignal", lambda _: signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(runtime.run.signal, "signal", handlers.__setitem__)
    runtime.run.catch_signals(progress)
    numbers = {signal.SIGINT, signal.SIGTERM}
    assert handlers.keys() == (numbers if ignored else numbers | {signal.SIGHUP})
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert progress.stop_signal == 15


@pytest.mark.parametrize(("encoding", "closed"), [("ascii", False), ("utf-8", True)])
def test_a_terminal_that_cannot_show_a_line_does_not_end_the_run(tmp_path, encoding, closed):
    """One of ASCII only, and one that is gone: what is printed is lost, and the exit code is the run's own."""

    def refuse(argv, description):
        ranks = Ranks(SimpleNamespace(is_main_process=True))
        for _ in range(3):
            ranks.say("waits · 1")
            report_fault("waits · 1")
        raise UsageError("7")

    reader, writer = os.pipe()
    if closed:
        os.close(reader)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 1), os.dup2(writer, 2)
            sys.stdout, sys.stderr = (open(number, "w", encoding=encoding, closefd=False) for number in (1, 2))
            runtime.run.parse_flags = refuse
            code = train.main([])
            sys.stdout.flush(), sys.stderr.flush()  # as at the end of an interpreter
            os._exit(code)
        finally:
            os._exit(70)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    if not closed:
        assert os.read(reader, 999).decode().count("waits ? 1") == 6
        os.close(reader)
