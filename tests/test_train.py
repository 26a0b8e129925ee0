"""train.py: what one step makes of a batch, by hand, and the loop over a scripted generator and trainer."""

import pytest
import torch
from scripted import (
    ScriptedGenerator,
    problem,
    rollout,
)

import train
from pipeline_rl import Group
from runtime.flags import Flags
from tasks.prompts import PromptStream


def hand_groups() -> list[Group]:
    """Group 0: rewards 1 -1 -1 -1, centred 3/2 -1/2 -1/2 -1/2, trained tokens 3 1 2 2 = 8 (one row has a forced one).
    Group 1: all 1. Group 2: the first prompt once more, 1 1 -1 -1, tokens 2 2 2 4 = 10, the last row truncated."""
    return [
        Group(5, problem("a", [1]), 0, [rollout(1, 3), rollout(-1, 1), rollout(-1, 3, forced=1), rollout(-1, 2)]),
        Group(6, problem("b", [2, 2]), 0, [rollout(1, 2, "length"), rollout(1, 2), rollout(1, 2), rollout(1, 2)]),
        Group(7, problem("a", [3]), 0, [rollout(1), rollout(1), rollout(-1), rollout(-1, 4, "length")]),
    ]


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
    batch, record = one_step(hand_groups(), zero_variance="keep")
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
    assert one_step(groups[1:2], zero_variance="keep")[0] is not None


def test_length_penalty_on_correct_answers_only(one_step):
    """Cap 8 + 2 = 10, ramp of 4: nothing up to 6, -1/2 at 8, -1 at 10. Pass rate is correctness, never the shaped
    reward."""
    rollouts = [rollout(1, 6), rollout(1, 8), rollout(1, 10), rollout(-1, 10)]
    options = {"length_control": "penalty", "max_budget": 8, "answer_budget": 2, "penalty_window": 4}
    for more, expected in (
        ({}, [1, 0.5, 0, -1]),
        ({"length_control": "penalty_all"}, [1, 0.5, 0, -2]),
        ({"length_control": "interruption"}, [1, 1, 1, -1]),
    ):
        assert train.shaped_rewards(rollouts, Flags(**options | more)).tolist() == expected
    assert [r.reward for r in rollouts] == [1, 1, 1, -1]  # the verifier's own stay for the log
    batch, record = one_step([Group(0, problem("a"), 0, rollouts)], **options, normalize_advantages="none")
    assert batch.advantages.tolist() == pytest.approx([1 - 0.125, 0.5 - 0.125, -0.125, -1.125])
    assert record["reward"] == pytest.approx(0.125) and record["pass_rate"] == 0.75


def first_keys(played, n: int) -> list[str]:
    """The prompts that a fresh stream begins with."""
    stream = PromptStream(played.run.task.train, 0, lambda key: False)
    return [next(stream).key for _ in range(n)]


def some_equal(equal):
    """A script in which the groups whose number is `equal` have equal rewards."""
    return {"rewards": staticmethod(lambda n, problem: [1.0, 1.0] if equal(n) else [1.0, -1.0])}


@pytest.mark.parametrize("k", [0, 2])
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


def test_skipped_steps_release_their_groups_and_make_no_version(run):
    """Prompts 3 to 8 have equal rewards: steps 2 and 3 have nothing to train on. A gradient that is not finite (the
    second update) does the same."""
    played = run(some_equal(lambda n: 3 <= n < 9), {"bad": [1]}, max_steps=6, pass_rate_threshold=2.0)
    steps = played.steps
    assert [r["version"] for r in steps] == [1, 1, 1, 1, 2, 3]
    assert [r.get("updated") for r in steps] == [1, None, None, 0, 1, 1]
    assert played.pushes() == [(name, 3) for name in ("push", "release", "release", "release", "push", "push")]
    assert [r["zero_variance_groups"] for r in steps] == [0, 3, 3, 0, 0, 0]


def test_dynamic_sampling_fills_the_batch(run):
    """Every third group is all right, or all wrong at two shaped rewards: it is released at once. Each step is offered
    the groups up to its third good one: D G G D G, G D G G, ... of 27 groups 9 go. What was discarded was consumed,
    too: it is in the history and in the step's pass rate."""

    def rewards(number, problem):
        return {0: [-0.5, -1.0], 3: [1.0, 1.0]}.get(number % 6, [1.0, -1.0])

    script = {"rewards": staticmethod(rewards)}
    played = run(script, zero_variance="replace", max_steps=6, pass_rate_threshold=2.0)
    steps, taken = played.steps, played.generator.taken
    assert [r["zero_variance_groups"] for r in steps] == [0] * 6 and [r["rows"] for r in steps] == [6] * 6
    assert played.pushes().count(("push", 3)) == 6 and played.pushes().count(("release", 1)) == 9
    assert max(r["lag_max"] for r in steps) <= 2
    assert [p.key for p in taken] == first_keys(played, 27)
    rates = {key: solved / rollouts for key, solved, rollouts in played.run.history.state_dict()["counts"]}
    assert [rates[p.key] for p in taken] == ([0.0, 0.5, 0.5, 1.0, 0.5, 0.5] * 5)[:27]
    assert [(r["offered"], r["discarded_groups"]) for r in steps] == [(5, 2), (4, 1)] * 3
    assert [r["pass_rate"] for r in steps] == pytest.approx([2.5 / 5, 1.5 / 4, 2.5 / 5, 2.5 / 4, 2.5 / 5, 1.5 / 4])


def test_solved_prompts_retire_and_those_in_flight_are_counted(run):
    """Four prompts, B = 1, k = 8: the first prompt is always solved and retires when step 1 has consumed it. Groups 0
    to 8 are in: its second group, of epoch 1, and perhaps a third are trained and counted; no other enters."""
    seen = []

    def rewards(number, problem):
        seen.append(problem.key)
        return [1.0, 1.0] if problem.key == seen[0] else [1.0, -1.0]

    changes = {"batch_prompts": 1, "k": 8, "prompts": 4, "max_steps": 14, "min_ready": 8}
    played = run({"rewards": staticmethod(rewards)}, **changes, zero_variance="keep")
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
