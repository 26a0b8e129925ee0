"""train.py, the loop's other branches, over a scripted generator and trainer; test_train.py has its main road."""

from types import SimpleNamespace

import accelerate
import pytest
import torch
from scripted import ScriptedTrainer, problem, rollout
from test_train import some_equal

import runtime.parts
import runtime.run
import train
from pipeline_rl import Group
from runtime.flags import Flags


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


def test_old_log_probs_stay_with_their_rows():
    """Of three groups of two the second leaves, and with it the one rollout of three tokens."""
    groups = [Group(i, problem(str(i)), 0, [rollout(1, 2), rollout(-1, 3 if i == 1 else 2)]) for i in range(3)]
    old = torch.arange(18.0).view(6, 3)
    keep = torch.tensor([True, True, False, False, True, True])
    batch, _ = train.select_rows(groups, keep, torch.zeros(6), old, Flags(rollouts=2))
    assert batch.old_logprobs.tolist() == [[0, 1], [3, 4], [12, 13], [15, 16]]


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
    assert capsys.readouterr().out.count("Warning: 3 steps in a row had nothing to train on") == 1
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
    steps = run(trainer={"bad": [1, 2, 4, 5]}).steps  # never three in a row
    assert [r["trained_tokens"] > 0 for r in steps[:6]] == [True, False, False, True, False, False]


def test_what_a_phase_discarded_is_counted_at_its_first_step(run):
    """k B = 6 good groups of nine offered, D G G D G G D G G: three discarded ones, all right, beside the first."""
    changes = {"zero_variance": "replace", "schedule": "ppo_off_policy", "k": 2, "max_steps": 4}
    steps = run(some_equal(lambda n: n % 3 == 0), **changes, pass_rate_threshold=2.0).steps
    assert [(r["offered"], r["discarded_groups"], r["pass_rate"]) for r in steps] == [(6, 3, 0.75), (3, 0, 0.5)] * 2
