"""train.py, flags.py and records.py without a model or an engine: flags, prompts, batches by hand, compute, files."""

import copy
import json
import math
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import losses
import train
from pipeline_rl import FORCED, Counters, Group, Rollout
from runtime import run_folder
from runtime.flags import DEFAULTS, Flags, UsageError, parse_flags
from runtime.run_folder import Folder
from runtime.trainer import clip_options, learning_rate
from tasks import chain, data_sets, verifiers, warm_start
from tasks.prompts import PromptStream
from train import make_batch

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(DEFAULTS)


def default_flags(**changes) -> Flags:
    found = parse_flags([], "about")
    assert set(changes) <= set(vars(found))
    vars(found).update(changes)
    return found


# ------------------------------------------------------------------------------------------------------------- flags


def test_learning_rates_by_hand():
    """4 warm-up steps of 1e-3: 1/4, 2/4, 3/4, 1, then constant. Cosine over 12 steps: full at step 4, half at 8, and
    (1 + cos(7/8 pi)) / 2 = 0.0381 at the last. sqrt: 32 x 8 = 256 completions, a quarter of 1024, give half."""
    flags = default_flags(lr=1e-3, warmup_steps=4, max_steps=12)
    rates = [learning_rate(flags, v) for v in (0, 1, 2, 3, 4, 11, 50)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    flags.lr_schedule = "cosine"
    rates = [learning_rate(flags, v) for v in (0, 3, 4, 8, 11, 12, 50)]
    assert rates == pytest.approx([0.25e-3, 1e-3, 1e-3, 0.5e-3, 0.0380602e-3, 0, 0], abs=1e-9)
    flags = default_flags(lr=1e-3, warmup_steps=0, lr_scale="sqrt", rollouts=8)
    assert learning_rate(flags, 0) == pytest.approx(0.5e-3)


# ------------------------------------------------------------------------------------------------------------- prompts


def problem(key: str, prompt_ids=(1, 2), source: str = "") -> SimpleNamespace:
    return SimpleNamespace(key=key, prompt_ids=list(prompt_ids), source=source)


POOL = [problem(str(i)) for i in range(50)]


def keys(stream: PromptStream, n: int) -> list[str]:
    return [next(stream).key for _ in range(n)]


def test_every_prompt_once_an_epoch_in_an_order_of_its_own():
    """The order is a function of seed and epoch alone."""
    stream = PromptStream(POOL, 0, lambda key: False)
    first, second = keys(stream, 50), keys(stream, 50)
    assert sorted(first) == sorted(second) == sorted(p.key for p in POOL) and stream.epoch == 1
    assert first != second and first != [p.key for p in POOL]
    assert keys(PromptStream(POOL, 0, lambda key: False), 100) == first + second
    assert keys(PromptStream(POOL, 1, lambda key: False), 50) != first
    assert iter(stream) is stream
    random.seed(0)  # other users of `random` change nothing
    assert keys(PromptStream(POOL, 0, lambda key: False), 50) == first


def test_retired_prompts_are_passed_over_from_the_moment_they_retire():
    gone: set[str] = set()
    stream = PromptStream(POOL, 0, gone.__contains__)
    order = keys(PromptStream(POOL, 0, lambda key: False), 100)
    assert keys(stream, 10) == order[:10]
    gone |= {order[3], order[12], order[20]}  # one seen, two to come
    assert keys(stream, 38) == [key for key in order[10:50] if key not in gone]
    assert keys(stream, 47) == [key for key in order[50:] if key not in gone] and stream.epoch == 1


def test_it_stops_when_every_prompt_is_retired():
    """It says so and does not spin, in the middle of an epoch or at its end; the last one left still comes."""
    gone: set[str] = set()
    stream = PromptStream(POOL, 0, gone.__contains__)
    keys(stream, 17)
    gone |= {p.key for p in POOL} - {"7"}
    assert "7" in keys(stream, 2)
    assert keys(stream, 3) == ["7", "7", "7"]
    gone.add("7")
    assert next(stream, None) is None and next(stream, None) is None


@pytest.mark.parametrize("weights", [{"a": 4.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1e-9}])
def test_a_weighted_mixture_ends_exactly_when_every_prompt_is_retired(weights):
    """30 of a and 60 of b, of which an epoch at 4 : 1 holds 18. All but b7, b8 and b9 retire when first drawn; these
    three still come, and no other, until they retire one by one."""
    pool = [problem(f"a{i}", source="a") for i in range(30)] + [problem(f"b{i}", source="b") for i in range(60)]
    for seed in range(5):
        gone, hard = set(), {"b7", "b8", "b9"}
        stream = PromptStream(pool, seed, gone.__contains__, weights)
        while len(gone) < 87:
            key = next(stream).key
            assert key not in gone
            gone |= {key} - hard
        for key in sorted(hard):
            assert set(keys(stream, 40)) == hard - gone
            gone.add(key)
        assert next(stream, None) is None and next(stream, None) is None


def sources(stream: PromptStream, n: int) -> Counter[str]:
    return Counter(next(stream).source for _ in range(n))


def test_the_others_take_the_places_of_a_source_that_is_retired():
    """20, 10 and 10 prompts at 2 : 1 : 1. An epoch has 40 places, 20, 10 and 10. Once all of a are retired, an epoch
    has the 20 places of b and c, 10 and 10; once all of b are too, each prompt of c comes once an epoch."""
    pool = [problem(f"{source}{i}", source=source) for source, n in (("a", 20), ("b", 10), ("c", 10)) for i in range(n)]
    gone: set[str] = set()
    stream = PromptStream(pool, 0, gone.__contains__, {"a": 2.0, "b": 1.0, "c": 1.0})
    assert sources(stream, 40) == {"a": 20, "b": 10, "c": 10} and stream.epoch == 0
    gone |= {f"a{i}" for i in range(20)}
    assert sources(stream, 20) == {"b": 10, "c": 10} and stream.epoch == 1  # of which a's 20 places were empty
    assert sources(stream, 20) == {"b": 10, "c": 10} and (stream.epoch, stream.position) == (2, 20)
    gone |= {f"b{i}" for i in range(10)}
    assert sorted(keys(stream, 10)) == [f"c{i}" for i in range(10)]
    assert (stream.epoch, stream.position) == (3, 10)


@pytest.mark.parametrize("n", [0, 40, 55, 70, 85])
def test_a_mixture_goes_on_from_its_saved_place(n):
    """Also inside an epoch that began with fewer sources than there are: those retired later do not change its order,
    and a new stream, for which they are retired from the start, has the same."""
    pool = [problem(f"{source}{i}", source=source) for source in "abc" for i in range(20)]
    gone = {f"a{i}" for i in range(20)}
    old, new = (PromptStream(pool, 3, gone.__contains__, {"a": 2.0, "b": 1.0, "c": 1.0}) for _ in range(2))
    keys(old, n)
    gone |= {f"b{i}" for i in range(20)}
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert keys(new, 80) == keys(old, 80) and (new.epoch, new.position) == (old.epoch, old.position)


def test_prompts_of_a_resumed_run_come_first():
    """Those that were in flight, in their old order, retired meanwhile or not; then the stream from its old place."""
    stream = PromptStream(POOL, 0, {"7"}.__contains__)
    order = keys(PromptStream(POOL, 0, lambda key: False), 50)
    stream.first.extend(POOL[i] for i in (7, 4, 4))
    assert keys(stream, 4) == ["7", "4", "4", next(key for key in order if key != "7")]


@pytest.mark.parametrize("n", [0, 1, 49, 50, 51, 73])
def test_a_stream_goes_on_from_its_saved_place(n):
    """Epoch, position and the keys of `first`, through JSON, into a new stream of the same pool."""
    old = PromptStream(POOL, 3, {"5", "6"}.__contains__)
    old.first.extend(POOL[i] for i in (1, 2, 3))
    keys(old, n)
    new = PromptStream(POOL, 3, {"5", "6"}.__contains__)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert keys(new, 80) == keys(old, 80) and (new.epoch, new.position) == (old.epoch, old.position)


# --------------------------------------------------------------------------------------------------------------- tasks


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a word tokenizer that knows `</think>` and has a chat template, and rows whose answer is `7`."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = chain.word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} wait{% if enable_thinking is defined %}"
    tokenizer.chat_template += "{% if enable_thinking %} <think>{% else %} </think>{% endif %}{% endif %}"
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{a} {b} again", "answer": "7"} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def data_flags(folder, **changes):
    found = {"dataset": str(folder / "rows.jsonl"), "model": str(folder), "held_out": 4, "reward_workers": 1}
    return default_flags(**found | {"reward": "exact", "interruption_phrase": "time up </think>"} | changes)


@pytest.mark.parametrize(
    ("changes", "prompt_ends", "correct"),
    [
        ({}, "again wait", [False, True]),
        ({"thinking": "true"}, "again wait <think>", [False, True]),
        ({"thinking": "false", "interruption_phrase": ""}, "again wait </think>", [True, False]),
        ({"apply_chat_template": False}, "again", [False, True]),
        ({"end_of_thinking": "up", "interruption_phrase": "time up"}, "again wait", [False, False]),
    ],
)
def test_flags_say_how_a_data_set_is_asked_and_judged(chat_model, changes, prompt_ends, correct):
    """The end of the prompts, and the verdicts on `7` and on `wait </think> 7`."""
    task = train.load_task(data_flags(chat_model, **changes))
    try:
        assert all(task.text(problem.prompt_ids).endswith(prompt_ends) for problem in task.train)
        completions = [task.tokenizer(text)["input_ids"] for text in ("7", "wait </think> 7")]
        assert [right for _, right in task.score(task.train[0], completions)] == correct
    finally:
        task.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stop_tokens": "<eos>,<end>, </s>"}, "--stop_tokens: the tokenizer has no token '<end>', '</s>'"),
        ({"interruption_phrase": "time up"}, "--interruption_phrase must end with the end of thinking '</think>'"),
    ],
)
def test_what_the_tokenizer_cannot_do_is_refused_by_the_flags_name(chat_model, changes, said):
    flags = data_flags(chat_model, **changes)
    with pytest.raises(UsageError, match=said):
        train.load_task(flags)
    assert set(changes) <= set(NAMES)


@pytest.mark.parametrize("main", [True, False])
def test_only_rank_0_keeps_reward_workers(monkeypatch, tmp_path, chat_model, main):
    """On the other ranks the rows are checked all the same, and then no worker process is left."""
    import accelerate

    pools = []

    class Pool(verifiers.RewardPool):
        def __init__(self, *options, **more):
            super().__init__(*options, **more)
            pools.append((self, [worker.process for worker in self._workers]))

    def stop(*_):
        raise KeyboardInterrupt  # the task is loaded: what follows needs a model

    monkeypatch.setattr(data_sets, "RewardPool", Pool)
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: SimpleNamespace(is_main_process=main))
    monkeypatch.setattr(train, "Trainer", stop)
    with pytest.raises(KeyboardInterrupt):
        train.Run(data_flags(chat_model, output_dir=str(tmp_path / "run")))
    [(pool, [process])] = pools
    assert (process.poll() is None) == main
    pool.close()


def test_the_generator_finds_the_end_of_thinking_as_the_task_does(monkeypatch):
    task = chain.ChainTask(pool_size=8, held_out_size=8)
    task.thinking_end = lambda ids: ids.index(task.end_of_thinking_ids[0]) + 1
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=256, vocab_size=len(task.tokenizer)))
    run = SimpleNamespace(
        flags=default_flags(), task=task, trainer=SimpleNamespace(model=model), prompts=None, channel=None,
        engine_devices={},
    )  # fmt: skip
    monkeypatch.setattr(train.pipeline_rl, "Generator", lambda *_, **options: options["length_control"])
    assert train.Run._new_generator(run, "model", train.Run._interruption(run)).thinking_end is task.thinking_end


# ------------------------------------------------------------------------------------------------------------- batches


def rollout(reward: float, length: int = 2, reason: str = "stop", forced: int = 0) -> Rollout:
    """`length` tokens, of which the last `forced` but one are forced; log-prob of token t is -(t + 1) / 10."""
    mask = [1] * length
    for t in range(length - 1 - forced, length - 1):
        mask[t] = 0
    logprobs = [-(t + 1) / 10 * m for t, m in enumerate(mask)]
    return Rollout(
        completion_ids=list(range(10, 10 + length)), logprobs=logprobs, mask=mask, finish_reason=reason,
        versions=[0 if m else FORCED for m in mask], interrupted=bool(forced), reward=float(reward), correct=reward > 0,
    )  # fmt: skip


def hand_groups() -> list[Group]:
    """Group 0: rewards 1 -1 -1 -1, centred 3/2 -1/2 -1/2 -1/2, trained tokens 3 1 2 2 = 8 (one row has a forced one).
    Group 1: all 1: no variance. Group 2: 1 1 -1 -1, centred the same, tokens 2 2 2 4 = 10, the last row truncated."""
    return [
        Group(5, problem("a", [1]), 0, [rollout(1, 3), rollout(-1, 1), rollout(-1, 3, forced=1), rollout(-1, 2)]),
        Group(6, problem("b", [2, 2]), 0, [rollout(1, 2, "length"), rollout(1, 2), rollout(1, 2), rollout(1, 2)]),
        Group(7, problem("c", [3]), 0, [rollout(1), rollout(1), rollout(-1), rollout(-1, 4, "length")]),
    ]


def batch_of(groups, **changes):
    changes = {"length_control": "none"} | changes
    return make_batch(groups, default_flags(**changes), random.Random(0))


def row_weights(batch) -> list[float]:
    """One weight a row: all trained tokens of a row have the same here."""
    for weights, mask in zip(batch.weights, batch.mask, strict=True):
        assert len(weights[mask].unique()) == 1 and not weights[~mask].any()
    return batch.weights.amax(1).tolist()


def test_batch_by_hand():
    """Group 1 leaves. Then the std over the 8 rows left: squares 9/4 + 3/4 + 4 = 7, std sqrt(7/8) = 0.935414, so the
    advantages are 1.603567, -0.534522 and +-1.069045. (With group 1 the std would be sqrt(7/12) = 0.763763.) Prompt
    average over 2 prompts: 1/16 for each of group 0's 8 tokens, 1/20 for each of group 2's 10. Rewards sum to 2 over 12
    rows, 7 of 12 are correct, 2 of 12 truncated, 1 interrupted; lengths 9 + 8 + 10 = 27."""
    batch, metrics = batch_of(hand_groups())
    expected = [1.603567, -0.534522, -0.534522, -0.534522, 1.069045, 1.069045, -1.069045, -1.069045]
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), atol=1e-5, rtol=0)
    assert row_weights(batch) == pytest.approx([1 / 16] * 4 + [1 / 20] * 4)
    assert batch.weights.sum().item() == pytest.approx(1.0)
    assert batch.mask.int().tolist() == [
        [1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1],
    ]  # fmt: skip
    assert [list(row.prompt_ids) for row in batch.rows] == [[1]] * 4 + [[3]] * 4
    assert [list(row.completion_ids) for row in batch.rows][:3] == [[10, 11, 12], [10], [10, 11, 12]]
    assert [list(row.mask) for row in batch.rows][:3] == [[1, 1, 1], [1], [1, 0, 1]]
    expected = [[-0.1, -0.2, -0.3, 0], [-0.1, 0, 0, 0], [-0.1, 0, -0.3, 0]]
    torch.testing.assert_close(batch.behaviour_logprobs[:3], torch.tensor(expected))
    assert batch.behaviour_logprobs.dtype == torch.float32 and batch.old_logprobs is None
    assert metrics == pytest.approx({
        "reward": 2 / 12, "pass_rate": 7 / 12, "length": 27 / 12, "interrupted": 1 / 12, "truncated": 2 / 12,
        "zero_variance_groups": 1, "rows": 8, "trained_tokens": 18,
    })  # fmt: skip


def test_filter_off_keeps_the_dead_group_in_every_denominator():
    """The ablation: std sqrt(7/12), three prompts in the average, group 1 with advantage 0."""
    batch, metrics = batch_of(hand_groups(), zero_variance_filter=False)
    assert batch.advantages[:2].tolist() == pytest.approx([1.5 / 0.763763, -0.5 / 0.763763], rel=1e-5)
    assert batch.advantages[4:8].tolist() == [0.0] * 4
    assert row_weights(batch) == pytest.approx([1 / 24] * 4 + [1 / 24] * 4 + [1 / 30] * 4)
    assert metrics["zero_variance_groups"] == 1 and metrics["rows"] == 12


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("token", [1 / 18] * 8),
        ("sample", [1 / 24, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 32]),
        ("constant", [1 / (34 * 8)] * 8),  # the completion budget: 30 + 4
    ],
)
def test_other_averages_by_hand(how, wanted):
    assert row_weights(batch_of(hand_groups(), aggregation=how)[0]) == pytest.approx(wanted)


def test_other_advantages_by_hand():
    """None: as centred. Prompt: group 0 has std sqrt(3)/2, group 2 has 1."""
    centred = [1.5, -0.5, -0.5, -0.5, 1, 1, -1, -1]
    assert batch_of(hand_groups(), normalize_advantages="none")[0].advantages.tolist() == centred
    found = batch_of(hand_groups(), normalize_advantages="prompt")[0].advantages.tolist()
    assert found == pytest.approx([a / (0.8660254 if i < 4 else 1) for i, a in enumerate(centred)], rel=1e-5)


def test_truncated_rows_leave_after_the_centring():
    """The last row of group 2 leaves: the other advantages stay as they are, the group's 6 tokens left weigh 1/12
    each. Group 1's truncated row had left with its group, so one row is counted as dropped here."""
    kept, _ = batch_of(hand_groups())
    batch, metrics = batch_of(hand_groups(), truncated_rollouts="drop")
    assert torch.equal(batch.advantages, kept.advantages[:7])
    assert row_weights(batch) == pytest.approx([1 / 16] * 4 + [1 / 12] * 3)
    assert batch.mask.shape == (7, 3) and metrics["rows"] == 7 and metrics["truncated_dropped"] == 1
    assert metrics["truncated"] == pytest.approx(2 / 12)  # of all that was sampled


def test_a_prompt_that_occurs_twice_is_two_groups():
    groups = hand_groups()
    groups[2].problem = groups[0].problem
    batch, _ = batch_of(groups)
    assert row_weights(batch) == pytest.approx([1 / 16] * 4 + [1 / 20] * 4)
    assert batch.advantages[4].item() == pytest.approx(1.069045, rel=1e-5)


def test_nothing_to_train_on_is_none_with_its_counts():
    groups = hand_groups()
    batch, metrics = batch_of(groups[1:2])
    assert batch is None and metrics["zero_variance_groups"] == 1 and metrics["pass_rate"] == 1
    cut = [Group(0, problem("a"), 0, [rollout(1, 2, "length"), rollout(-1, 2, "length")])]
    batch, metrics = batch_of(cut, truncated_rollouts="drop")
    assert batch is None and metrics["truncated_dropped"] == 2 and "rows" not in metrics
    assert batch_of(cut)[0] is not None
    assert batch_of(groups[1:2], zero_variance_filter=False)[0] is not None


def test_length_penalty_on_correct_answers_only():
    """Cap 8 + 2 = 10, ramp of 4: nothing up to 6, -1/2 at 8, -1 at 10. On correct answers: 1, 1/2, 0 and a wrong answer
    of 10 tokens keeps its -1. On all: that one gets -2."""
    groups = [Group(0, problem("a"), 0, [rollout(1, 6), rollout(1, 8), rollout(1, 10), rollout(-1, 10)])]
    options = {"length_control": "penalty", "max_budget": 8, "answer_budget": 2, "penalty_window": 4}
    flags = default_flags(**options)
    assert train.shaped_rewards(groups, flags, random.Random(0)).tolist() == [1, 0.5, 0, -1]
    flags.penalty_on = "all"
    assert train.shaped_rewards(groups, flags, random.Random(0)).tolist() == [1, 0.5, 0, -2]
    flags.length_control = "interruption"
    assert train.shaped_rewards(groups, flags, random.Random(0)).tolist() == [1, 1, 1, -1]
    assert [r.reward for r in groups[0].rollouts] == [1, 1, 1, -1]  # the verifier's own stay for the log
    batch, metrics = batch_of(groups, **options, normalize_advantages="none")
    assert batch.advantages.tolist() == pytest.approx([1 - 0.125, 0.5 - 0.125, -0.125, -1.125])
    assert (
        metrics["reward"] == pytest.approx(0.125) and metrics["pass_rate"] == 0.75
    )  # correctness, never the shaped reward


def test_the_penalty_gives_variance_to_a_group_of_correct_answers():
    groups = [Group(0, problem("a"), 0, [rollout(1, 2), rollout(1, 34)])]
    assert batch_of(groups)[0] is None
    assert batch_of(groups, length_control="penalty")[0] is not None


def test_shuffled_rewards_keep_the_multiset():
    """The control permutes all rewards of the batch: same values elsewhere, over group borders; pass rate is true."""
    groups = [Group(i, problem(str(i)), 0, [rollout(1 if i < 3 else -1) for _ in range(4)]) for i in range(8)]
    flags = default_flags(length_control="none", reward="shuffled")
    plain = train.shaped_rewards(groups, default_flags(length_control="none"), random.Random(0)).tolist()
    assert plain == [1] * 12 + [-1] * 20
    found = [train.shaped_rewards(groups, flags, random.Random(seed)).tolist() for seed in (0, 1, 0)]
    assert all(sorted(x) == sorted(plain) for x in found)
    assert found[0] != plain and found[0] != found[1] and found[0] == found[2]
    batch, metrics = make_batch(groups, flags, random.Random(0))
    assert metrics["pass_rate"] == 12 / 32 and metrics["reward"] == pytest.approx(-8 / 32)
    assert batch is not None and metrics["zero_variance_groups"] < 8
    assert [r.reward for group in groups for r in group.rollouts] == plain


def test_padded_by_hand():
    found = train.padded([[1, 0, 1], [1]], torch.bool)
    assert found.dtype == torch.bool and found.int().tolist() == [[1, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("loss", "changes", "wanted"),
    [
        ("cispo", {"eps_max": 4.0, "eps_low": 0.1, "eps_high": 0.2}, {"eps_max": 4.0}),
        ("gspo", {}, {}),
        ("gspo", {"eps_low": 0.0, "eps_high": 0.005}, {"eps_low": 0.0, "eps_high": 0.005}),
        ("dapo", {"eps_high": 0.28}, {"eps_high": 0.28}),
        ("grpo", {}, {}),
        ("grpo", {"eps_low": 0.1, "eps_high": 0.3}, {"eps": 0.1}),
        ("tis", {"tis_cap": 3.0, "tis_level": "sequence"}, {"cap": 3.0, "level": "sequence"}),
        ("tis", {"eps_low": 0.1, "eps_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3, "cap": 2.0, "level": "token"}),
    ],
)
def test_clip_options(loss, changes, wanted):
    """What was given reaches the loss, what was not stays at the loss's own default; the loss takes all of it."""
    found = clip_options(default_flags(loss=loss, **changes))
    assert found == wanted
    zeros, old = torch.zeros(1, 1), {"old_logprobs": torch.zeros(1, 1)} if loss == "tis" else {}
    losses.LOSSES[loss](zeros, zeros, torch.ones(1), torch.ones(1, 1), **found, **old)


# ------------------------------------------------------------------------------------------------------------- trainer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with a tied head, saved as `from_pretrained` wants it."""
    folder = tmp_path_factory.mktemp("model")
    settings = warm_start.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    warm_start.new_model(settings, seed=0).save_pretrained(folder)
    return str(folder)


class Alone:
    """What the trainer asks of accelerate, for one of `num_processes` ranks that never meet."""

    device = torch.device("cpu")

    def __init__(self, process_index: int = 0, num_processes: int = 1):
        self.process_index, self.num_processes = process_index, num_processes

    def prepare(self, *things):
        return things

    def unwrap_model(self, model):
        return model

    def no_sync(self, model):
        return nullcontext()

    def backward(self, loss):
        loss.backward()

    def reduce(self, tensor):
        return tensor

    def clip_grad_norm_(self, parameters, largest):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)


def trainer_and_batch(model_folder, accelerator=None, **changes) -> tuple[train.Trainer, train.TrainingBatch]:
    trainer = train.Trainer(default_flags(**changes), accelerator or Alone(), model_folder)
    batch, _ = batch_of(hand_groups())
    batch.behaviour_logprobs -= 3.5 * batch.mask  # near the random model's -3.8, so that some ratios are capped
    batch.old_logprobs = batch.behaviour_logprobs - 0.1
    return trainer, batch


def gradient_of(trainer: train.Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("loss", ["cispo", "tis"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, 1), (12, 1), (12, 2), (1, 3), (2048, 2)])
def test_microbatches_and_ranks_change_nothing(model_folder, loss, packed, tokens, ranks):
    """Data parallelism averages the ranks' gradients: the mean over ranks is the gradient of the whole batch in one
    pass on one rank. The loss that is logged is a sum over the ranks' rows."""
    options = {"loss": loss, "eps_max": 1.05, "kl_coef": 0.1, "entropy_coef": 0.05}
    whole, batch = trainer_and_batch(model_folder, **options)
    summary = whole.gradients(batch)
    found = []
    for rank in range(ranks):
        part, batch = trainer_and_batch(
            model_folder, Alone(rank, ranks), **options, tokens_per_microbatch=tokens, packed=packed
        )
        found.append((part.gradients(batch), gradient_of(part)))
    torch.testing.assert_close(sum(g for _, g in found) / ranks, gradient_of(whole), atol=1e-6, rtol=1e-4)
    assert sum(s["loss"] for s, _ in found) == pytest.approx(summary["loss"], rel=1e-4)
    assert max(s["ratio_max"] for s, _ in found) == pytest.approx(summary["ratio_max"], rel=1e-5)


def test_the_loss_is_put_together_with_the_right_signs(model_folder):
    """Oracle: full logits row by row. minimise  sum weights * (-min(rho, cap) A log pi + kl_coef kl - entropy_coef H),
    the reference being the model as it was at the start."""
    options = {"eps_max": 1.05, "kl_coef": 0.3, "entropy_coef": 0.2, "temperature": 0.8}
    trainer, batch = trainer_and_batch(model_folder, **options)
    reference = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model = copy.deepcopy(trainer.model)
    loss, kls, entropies = 0.0, [], []
    for n, row in enumerate(batch.rows):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0] / 0.8, -1) for m in (model, reference))
        for t, token in enumerate(row.completion_ids):
            if not row.mask[t]:
                continue
            at = len(row.prompt_ids) + t - 1
            logp, entropy = new[at, token], torch.distributions.Categorical(logits=new[at]).entropy()
            log_r = old[at, token].detach() - logp
            ratio = min(math.exp(logp.item() - batch.behaviour_logprobs[n, t].item()), 1.05)
            kl = log_r.exp() - 1 - log_r
            term = -ratio * batch.advantages[n] * logp + 0.3 * kl - 0.2 * entropy
            loss = loss + batch.weights[n, t] * term
            kls.append(kl.item())
            entropies.append(entropy.item())
    loss.backward()
    summary = trainer.gradients(batch)
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient_of(trainer), wanted, atol=1e-6, rtol=1e-3)
    assert summary["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert summary["kl"] == pytest.approx(sum(kls) / 18, rel=1e-3) and len(kls) == 18
    assert summary["entropy"] == pytest.approx(sum(entropies) / 18, rel=1e-4)
    assert trainer.reference is not None and all(p.grad is None for p in trainer.reference.parameters())


def test_update_warms_up_clips_and_throws_bad_gradients_away(model_folder):
    """lr 1e-3 after 4 warm-up steps: 1/4, 2/4, 3/4, 1, 1 of it at versions 0 1 2 3 4. A NaN gradient changes nothing,
    not the weights, not Adam's moments, and it does not stay for the next step."""
    trainer, batch = trainer_and_batch(model_folder, lr=1e-3, warmup_steps=4, clip_grad=1e-3, weight_decay=0.0)
    rates = []
    for version in range(5):
        summary = trainer.gradients(batch)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        found = trainer.update(version)
        rates.append(found["lr"])
        assert found["updated"] == 1 and found["grad_norm"] > 1e-3 and math.isfinite(summary["loss"])
        moved = [(p - b).abs().max().item() for p, b in zip(trainer.model.parameters(), before, strict=True)]
        if version == 0:  # Adam's first step is lr * sign(gradient)
            assert max(moved) == pytest.approx(found["lr"], rel=1e-3)
        assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    state = copy.deepcopy(trainer.optimizer.state_dict())
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.gradients(batch)
    next(iter(trainer.model.parameters())).grad[0, 0] = math.nan
    assert trainer.update(5)["updated"] == 0
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    for found, kept in zip(trainer.optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_clipping_is_by_the_norm_of_the_whole_gradient(model_folder):
    """With an optimiser that only subtracts, at lr 1: the step's norm is clip_grad where the gradient's is larger, and
    the gradient's own where it is not."""
    for clip in (1e-3, 1e3):
        trainer, batch = trainer_and_batch(model_folder, lr=1.0, warmup_steps=0, clip_grad=clip)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.gradients(batch)
        norm = gradient_of(trainer).norm().item()
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        found = trainer.update(0)
        moved = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) - before
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert moved.norm().item() == pytest.approx(min(norm, clip), rel=1e-2)


def test_score_is_the_policys_own_logprobs_on_the_whole_batch(model_folder):
    """All rows at their places whatever the microbatches; two ranks fill in a part each, and the parts add up."""
    one, batch = trainer_and_batch(model_folder)
    whole = one.score(batch.rows)
    assert whole.shape == batch.mask.shape and not whole.requires_grad
    assert ((whole < 0) == batch.mask).all()
    for ranks in (1, 2):
        parts = [
            trainer_and_batch(model_folder, Alone(rank, ranks), tokens_per_microbatch=9)[0].score(batch.rows)
            for rank in range(ranks)
        ]
        torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=0)


def test_weights_and_parameters_that_cost_flops(model_folder):
    """Tied: the table is multiplied once, as the head. P = all parameters, since the lookup costs nothing and the
    head's product costs vocabulary x hidden. The generator gets its own dtype; the trainer's weights stay FP32."""
    trainer, _ = trainer_and_batch(model_folder, dtype="bfloat16")
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert trainer.parameters_in_flops == sum(sizes.values()) and "lm_head.weight" not in sizes
    weights = dict(trainer.weights.items())
    assert set(weights) == set(sizes) and {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_an_untied_embedding_costs_no_flops(tmp_path):
    settings = warm_start.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    config = warm_start.new_model(settings, seed=0).config
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer, _ = trainer_and_batch(str(tmp_path))
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert trainer.parameters_in_flops == sum(sizes.values()) - sizes["model.embed_tokens.weight"]


# ------------------------------------------------------------------------------------------------------------- the loop


class ScriptedGenerator:
    """The trainer's side of `Generator` over the real pacer; a group is finished as soon as it is admitted, and pushed
    weights become live as late as the interface allows. `rewards[n]` are those of the n-th prompt."""

    rewards = staticmethod(lambda n, problem: [1.0, -1.0])
    mixed = False  # evaluation completions of two versions
    logprob = 0.0

    def __init__(self, model, problems, score, pacer, rollouts, stop_ids, **options):
        self.problems, self.pacer, self.rollouts, self.options = problems, pacer, rollouts, options
        self.counters, self.version, self.waiting, self.calls = Counters(), 0, None, []
        self.taken, self.running, self.evaluating = [], {}, False

    def start(self, weights, version=0):
        self.version = version
        self.fill()

    def fill(self):
        while self.pacer.may_admit():
            problem = next(self.problems)
            number = self.pacer.admit()
            rollouts = [self.rollout(reward) for reward in self.rewards(number, problem)]
            self.running[number] = problem
            self.pacer.finish(Group(number, problem, self.version, rollouts))

    def rollout(self, reward, version=None):
        version = self.version if version is None else version
        return Rollout([9, 8], [self.logprob] * 2, [version] * 2, [1, 1], "stop", reward=reward, correct=reward > 0)

    def take(self, count):
        self.fill()
        groups = self.pacer.take(count)
        if groups is None:
            self.settle()
            groups = self.pacer.take(count)
        assert groups is not None, "deadlock"
        self.taken += [self.running.pop(group.number) for group in groups]
        return groups

    def release(self, count):
        self.calls.append(("release", count))
        self.pacer.release(count)
        self.fill()

    def push(self, weights, version, release):
        assert not self.evaluating, "weights pushed while an evaluation runs"
        self.settle()
        self.calls.append(("push", release))
        self.waiting = version, release

    def settle(self):
        if self.waiting is not None:
            (self.version, count), self.waiting = self.waiting, None
            self.pacer.release(count)
            self.fill()

    def evaluate(self, problems, n_samples):
        self.settle()
        assert not self.evaluating
        self.evaluating = True
        self.calls.append(("evaluate", len(problems) * n_samples))
        versions = [self.version - 1 if self.mixed else self.version] * n_samples
        return [[self.rollout(1.0, version) for version in versions] for _ in problems]

    def result_of(self, future):
        self.evaluating = False
        return future

    def close(self):
        pass


class ScriptedTrainer:
    """No model: every step works, unless its number is in `bad` (a gradient that is not finite)."""

    bad: frozenset[int] = frozenset()
    parameters_in_flops = 1
    experts = 1
    off = (0.0,)  # log-probs of the first rows, the last one of all others, too

    def __init__(self, flags, accelerator, model_folder):
        config = SimpleNamespace(vocab_size=99, num_experts=self.experts)
        self.model = SimpleNamespace(config=config, named_parameters=lambda: [], save_pretrained=lambda *a, **k: None)
        self.versions, self.steps, self.prompts = [], 0, []

    def weights(self):
        return {}

    def score(self, rows):
        values = torch.tensor([*self.off, *[self.off[-1]] * len(rows)][: len(rows)])
        return values[:, None].expand(-1, max(len(row.completion_ids) for row in rows))

    def gradients(self, batch):
        self.prompts += [tuple(row.prompt_ids) for row in batch.rows]
        names = ("ratio_mean", "ratio_max", "ess", "entropy", "loss")
        return dict.fromkeys(names, 1.0)

    def update(self, version):
        self.steps += 1
        self.versions.append(version)
        return {"grad_norm": 1.0, "lr": 1.0, "updated": int(self.steps - 1 not in self.bad)}


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Runs the real loop over the scripted generator and trainer; returns (run, step records, evaluation records)."""

    def call(generator: dict | None = None, trainer: dict | None = None, **changes):
        scripted = type("Scripted", (ScriptedGenerator,), generator or {})
        monkeypatch.setattr(train.pipeline_rl, "Generator", scripted)
        monkeypatch.setattr(train.fit_sigmoid, "curve", lambda *a, **k: None)  # half a second a picture
        monkeypatch.setattr(train.fit_sigmoid, "format_report", lambda curve: "")
        monkeypatch.setattr(train, "Trainer", type("T", (ScriptedTrainer,), trainer or {}))
        options = {
            "output_dir": str(tmp_path / "run"), "model": "scripted", "batch_prompts": 3, "rollouts": 2, "max_steps": 8,
            "eval_every": 4, "eval_problems": 5, "eval_samples": 2, "prompts": 40, "save_every": 0, "probe_every": 3, "k": 2,
        }  # fmt: skip
        run = train.Run(default_flags(**options | changes))
        try:
            run.start()
            train.train(run)
        finally:
            run.close()
        steps = [record for record in run.folder.read("metrics.jsonl") if "step" in record]
        return run, steps, run.folder.read("eval.jsonl")

    return call


@pytest.mark.parametrize("k", [0, 1, 2, 8])
def test_the_loop_on_the_pipeline_schedule(play, k):
    """Every step one version and one push of its B groups; prompts in the stream's order; lag up to k and no more;
    evaluations at 0, 4 and 8, probes at the other multiples of 3."""
    run, steps, evals = play(k=k, max_steps=12, max_ready=100)
    assert [r["step"] for r in steps] == list(range(1, 13)) == [r["version"] for r in steps]
    assert run.trainer.versions == list(range(12))
    assert max(r["lag_max"] for r in steps) == k and all(0 <= r["lag_mean"] <= r["lag_max"] for r in steps)
    assert [r["step"] for r in evals] == [0, 4, 8, 12] == [r["version"] for r in evals]
    assert evals[0]["pass_rate"] == 1.0 and evals[0]["n_prompts"] == 5 and evals[0]["n_samples"] == 2
    calls = run.generator.calls
    assert [x for x in calls if x[0] == "push"] == [("push", 3)] * 12
    assert [n for name, n in calls if name == "evaluate"] == [10, 16, 10, 16, 10, 16, 10]
    fresh = PromptStream(run.task.train, 0, lambda key: False)
    assert [p.key for p in run.generator.taken] == keys(fresh, 36)
    assert run.trainer.prompts == [p.prompt_ids for p in run.generator.taken for _ in range(2)]
    assert all(r["logprob_gap"] == 0 for r in steps if r["step"] in (1, 4, 5))


def test_min_ready_holds_the_lag_up(play):
    """B = 3, k = 2, six groups kept ready: nine are in at version 0 and train at lags 0, 1, 2; then each new group has
    six before it and trains at lag 2."""
    _, steps, _ = play(k=2, min_ready=6)
    assert [r["lag_mean"] for r in steps] == [0, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("limit", "steps"), [(0.0, 3), (1e-12, 0), (1e3, 3)])
def test_a_budget_of_device_hours_ends_the_run(play, limit, steps):
    """0 is no limit; 1e-12 hours have passed before the first step; 1,000 have not after the last."""
    assert len(play(max_device_hours=limit, max_steps=3)[1]) == steps


def test_rambling_chooses_the_warm_start(monkeypatch):
    """--rambling 0.9 asks for demonstrations of which 0.9 start over, and the default for those of WarmStart()."""
    asked = []
    monkeypatch.setattr(train.warm_start, "warm_start", lambda folder, **options: asked.append(options["settings"]) or 1 / 0)
    for flags in (default_flags(rambling=0.9), default_flags()):
        with pytest.raises(ZeroDivisionError):
            train.Run(flags)
    assert asked == [train.warm_start.WarmStart(restart=0.9), train.warm_start.WarmStart()]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_loop_off_policy(play, k):
    """k updates of B from one frozen version, then one push of all k B groups: lags 0 to k - 1, shuffled batches."""
    run, steps, _ = play(schedule="ppo_off_policy", k=k, max_steps=8)
    assert [r["lag_max"] for r in steps] == list(range(k)) * (8 // k)
    assert [r["lag_mean"] for r in steps] == list(range(k)) * (8 // k)  # all groups of one version
    assert [x for x in run.generator.calls if x[0] == "push"] == [("push", 3 * k)] * (8 // k)
    assert [r["version"] for r in steps] == list(range(1, 9))
    taken = [p.prompt_ids for p in run.generator.taken for _ in range(2)]
    for phase in range(8 // k):
        part = slice(phase * 6 * k, (phase + 1) * 6 * k)
        assert sorted(run.trainer.prompts[part]) == sorted(taken[part])
    assert run.trainer.prompts != taken  # shuffled within the phase


def test_skipped_steps_release_their_groups_and_make_no_version(play):
    """Prompts 3 to 8 have equal rewards: steps 2 and 3 have nothing to train on. No push, no version; the groups are
    let go, and the run goes on. A gradient that is not finite (the second update) does the same."""
    same = {"rewards": staticmethod(lambda n, problem: [1.0, 1.0] if 3 <= n < 9 else [1.0, -1.0])}
    run, steps, _ = play(same, trainer={"bad": [1]}, max_steps=6, pass_rate_threshold=2.0)
    assert [r["version"] for r in steps] == [1, 1, 1, 1, 2, 3]
    assert [r.get("updated") for r in steps] == [1, None, None, 0, 1, 1]
    assert [x for x in run.generator.calls if x[0] != "evaluate"] == [
        ("push", 3), ("release", 3), ("release", 3), ("release", 3), ("push", 3), ("push", 3),
    ]  # fmt: skip
    assert [r["zero_variance_groups"] for r in steps] == [0, 3, 3, 0, 0, 0]


def test_gradients_that_stay_bad_end_the_run(play):
    with pytest.raises(RuntimeError, match="not finite 3 times in a row"):
        play(trainer={"bad": [2, 3, 4]})
    play(trainer={"bad": [1, 2, 4, 5]}, overwrite=True)  # never three in a row


def test_dynamic_sampling_fills_the_batch(play):
    """Every third group has equal rewards: it is released at once and the batch filled up from the next ones."""
    same = {"rewards": staticmethod(lambda n, problem: [1.0, 1.0] if n % 3 == 0 else [1.0, -1.0])}
    run, steps, _ = play(same, dynamic_sampling=True, max_steps=6, pass_rate_threshold=2.0)
    assert [r["zero_variance_groups"] for r in steps] == [0] * 6 and [r["rows"] for r in steps] == [6] * 6
    calls = [x for x in run.generator.calls if x[0] != "evaluate"]
    assert calls.count(("push", 3)) == 6 and calls.count(("release", 1)) == 9  # 27 groups for 18
    assert max(r["lag_max"] for r in steps) <= 2
    fresh = PromptStream(run.task.train, 0, lambda key: False)
    assert [p.key for p in run.generator.taken] == keys(fresh, 27)
    rates = [run.history.pass_rate(p.key) for p in run.generator.taken]
    assert rates == [1.0, 0.5, 0.5] * 9  # discarded groups were consumed too
    # Each step is offered the groups up to its third good one: D G G D G, G D G G, ... of 27 groups 9 go.
    assert [(r["offered"], r["discarded_groups"]) for r in steps] == [(5, 2), (4, 1)] * 3
    assert [r["pass_rate"] for r in steps] == pytest.approx([(2 + 3 / 2) / 5, (1 + 3 / 2) / 4] * 3)  # of all sampled


def test_what_a_phase_discarded_is_counted_at_its_first_step(play):
    """k B = 6 good groups of nine offered, D G G D G G D G G: three discarded ones, all right, beside the first three."""
    same = {"rewards": staticmethod(lambda n, problem: [1.0, 1.0] if n % 3 == 0 else [1.0, -1.0])}
    changes = {"dynamic_sampling": True, "schedule": "ppo_off_policy", "k": 2, "max_steps": 4, "pass_rate_threshold": 2.0}
    _, steps, _ = play(same, **changes)
    assert [(r["offered"], r["discarded_groups"], r["pass_rate"]) for r in steps] == [(6, 3, 0.75), (3, 0, 0.5)] * 2


def test_dynamic_sampling_looks_at_shaped_rewards(play):
    """Two right answers of 2 and 34 tokens, the cap: the penalty is 0 and -1, so there is a signal and nothing goes."""

    def rollout(self, reward, version=None):
        made = ScriptedGenerator.rollout(self, reward, version)
        if reward > 1:  # the long one
            made.completion_ids, made.logprobs, made.versions, made.mask = [9] * 34, [0.0] * 34, made.versions * 17, [1] * 34
            made.reward = 1.0
        return made

    both = {"rewards": staticmethod(lambda n, problem: [1.0, 2.0]), "rollout": rollout}
    changes = {"dynamic_sampling": True, "length_control": "penalty", "pass_rate_threshold": 2.0, "max_steps": 2}
    _, steps, _ = play(both, **changes)
    assert [(r["offered"], r["discarded_groups"], r["rows"]) for r in steps] == [(3, 0, 6)] * 2


def test_trained_tokens_of_a_step_and_of_the_run(play):
    """Each step trains 6 rows of two tokens: `trained_tokens` are the step's, `trained_tokens_total` the run's."""
    _, steps, evals = play(max_steps=3, eval_every=3)
    assert [r["trained_tokens"] for r in evals] == [0, 36]  # evaluations stand at a place of the whole run
    assert [r["trained_tokens"] for r in steps] == [12, 12, 12]
    assert [r["trained_tokens_total"] for r in steps] == [12, 24, 36]


def test_solved_prompts_retire_and_those_in_flight_are_counted(play):
    """Four prompts, B = 1, k = 8: the first prompt is always solved and retires when step 1 has consumed it. Then
    groups 0 to 8 are in: its second group, of epoch 1, and perhaps a third are trained and counted; no other
    enters."""
    seen = []

    def rewards(number, problem):
        seen.append(problem.key)
        return [1.0, 1.0] if problem.key == seen[0] else [1.0, -1.0]

    run, steps, _ = play(
        {"rewards": staticmethod(rewards)}, batch_prompts=1, k=8, prompts=4, max_steps=14, max_ready=100,
        zero_variance_filter=False,
    )  # fmt: skip
    assert run.history.retired(seen[0]) and run.history.n_retired == 1 == steps[-1]["retired"]
    late = [r["retired_in_flight"] for r in steps]
    assert late == [int(n > 0 and key == seen[0]) for n, key in enumerate(seen[:14])] and sum(late) >= 1
    assert seen[0] not in seen[9:] and len(seen) > 14


def test_weights_that_did_not_move_end_the_run(play):
    """Log-probs that differ by more than 1e-4 (bfloat16: 0.1) are an error, and evaluation tokens of another version."""
    with pytest.raises(RuntimeError, match=r"weights check: at version 0 .* by 2\.0e-04 .* than 0.0001 \(float32\)"):
        play({"logprob": -2e-4})
    with pytest.raises(RuntimeError, match="weights check: 10 evaluation completions are not wholly by"):
        play({"mixed": True}, overwrite=True)
    run, steps, _ = play({"logprob": -5e-5}, overwrite=True)
    assert steps[0]["logprob_gap"] == pytest.approx(5e-5) and run.step == 8
    assert play({"logprob": -0.08}, overwrite=True, dtype="bfloat16")[0].step == 8
    with pytest.raises(RuntimeError, match=r"by 1\.2e-01 .* than 0.1 \(bfloat16\): .* weights .* precision"):
        play({"logprob": -0.12}, overwrite=True, dtype="bfloat16")


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gap_that_is_no_number_ends_the_run(play, dtype, experts):
    """One row of ten."""
    with pytest.raises(RuntimeError, match="weights check: at version 0 trainer and generator differ by nan nats"):
        play(trainer={"experts": experts, "off": [math.nan, 0.0]}, dtype=dtype)


@pytest.mark.parametrize("rank", [None, "0"])
def test_one_process_on_a_gpu_needs_no_process_group(monkeypatch, rank):
    """Without LOCAL_RANK, as under plain `python train.py`, accelerate must not be told of a backend: it would ask a
    process group that nobody made. With it, objects travel by gloo."""
    import accelerate
    from accelerate.state import AcceleratorState

    class Reached(Exception):
        pass

    def folder(path):
        raise Reached

    made = []
    handlers = accelerate.InitProcessGroupKwargs
    monkeypatch.setattr(accelerate, "InitProcessGroupKwargs", lambda **k: made.append(handlers(**k)) or made[-1])
    monkeypatch.setattr(train, "Folder", folder)  # what `Run` makes next
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr(accelerate, "Accelerator", lambda **k: SimpleNamespace(is_main_process=True))
    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(Reached):
            train.Run(default_flags())
    finally:
        AcceleratorState._reset_state(True)
    assert made[0].backend == ("nccl" if rank is None else "cpu:gloo,cuda:nccl")  # accelerate's own, not asked for


def test_model_flops_utilisation(play):
    """6 FLOPs a parameter (here one) and position of the batch, over what a trainer of 2 FLOP/s could have done."""
    run, steps, _ = play(peak_tflops=2e-12, max_steps=2)
    prompts = iter(run.trainer.prompts)  # of each row trained on, step after step; completions have two tokens
    for step in steps:
        positions = sum(len(next(prompts)) + 2 for _ in range(step["rows"]))
        assert step["mfu"] * 2 * (step["seconds"] - step["trainer_idle"]) == pytest.approx(6 * positions)
    assert "mfu" not in play(overwrite=True, max_steps=2)[1][0]


def test_the_median_row_decides_for_a_mixture_of_experts(play):
    """Ten rows: one or four off by 0.1 are what rounding at the router does, seven off are old weights."""
    for off in ([0.1, 0.0], [0.1] * 4 + [0.0]):
        _, steps, _ = play(trainer={"experts": 4, "off": off}, overwrite=True)
        assert steps[0]["logprob_gap"] == 0.0
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-01"):
        play(trainer={"experts": 4, "off": [0.1] * 7 + [0.0]}, overwrite=True)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02"):  # the mean of one in ten
        play(trainer={"off": [0.1, 0.0]}, overwrite=True)


def test_token_budget_ends_the_run_cleanly(play):
    """Twelve tokens a step (3 x 2 x 2): a budget of 30 is reached after three steps; the last evaluation is made."""

    def take(self, count):
        self.counters.sampled += 4 * count
        return ScriptedGenerator.take(self, count)

    _, steps, evals = play({"take": take}, max_sampled_tokens=30)
    assert len(steps) == 3 and evals[-1]["step"] == 3 and steps[-1]["tokens"] == 36


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, 2),  # one trains, one samples, six are idle
        ({"tensor_parallel": 2, "data_parallel": 2}, 5),
        ({"tensor_parallel": 4, "engine_args": "distributed_executor_backend=ray,pipeline_parallel_size=2"}, 9),
    ],
)
def test_device_hours_count_devices_in_use(monkeypatch, play, changes, devices):
    """One trainer process on a host with eight GPUs."""
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(train.torch.cuda, "get_device_name", lambda: "GPU")
    assert play(max_steps=1, **changes)[0].clock.devices == devices


def test_hours_are_those_of_the_whole_run(play):
    """Half an hour before a resume and a quarter after it make .75: a budget of .7 is spent, one of .8 is not."""
    run, _, _ = play(max_steps=1)
    run.clock.past, run.flags.max_hours = {"hours": 0.5}, 0.7
    run.clock.started -= 900
    assert run._budget_spent()
    run.flags.max_hours = 0.8
    assert not run._budget_spent()


def test_records_are_lines_that_can_be_cut_back(tmp_path):
    """A resume takes off what was written after the checkpoint, so that no step appears twice."""
    folder = Folder(tmp_path)
    assert folder.read("metrics.jsonl") == [] and set(folder.lengths().values()) == {0}
    folder.append("metrics.jsonl", {"step": 1})
    lengths = folder.lengths()
    folder.append("metrics.jsonl", {"step": 2})
    folder.append("eval.jsonl", {"step": 2})
    assert [r["step"] for r in folder.read("metrics.jsonl")] == [1, 2]
    folder.cut_back(lengths)
    assert folder.read("metrics.jsonl") == [{"step": 1}] and folder.read("eval.jsonl") == []


def test_clearing_a_run_removes_its_own_files_only(tmp_path):
    folder = Folder(tmp_path)
    for name in (*run_folder.LOGS, "config.json", "curve.png", "notes.txt"):
        (tmp_path / name).write_text("x")
    for name in ("checkpoints/step-000001", "model", "mine"):
        (tmp_path / name).mkdir(parents=True)
    folder.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "notes.txt"]
    folder.clear()  # nothing left to remove


def save(folder: Folder, step: int, keep: int = 2) -> Path:
    temporary = folder.begin_checkpoint()
    (temporary / "weights.bin").write_bytes(b"w" * step)
    return folder.finish_checkpoint(temporary, step, {"step": step}, keep)


def test_checkpoints_are_whole_and_few(tmp_path):
    """The newest two of steps 9, 10, 100 stay, newest by number; a damaged one is passed over, and a half-written one
    of an earlier process is removed."""
    folder = Folder(tmp_path)
    assert folder.newest_checkpoint() is None and folder.checkpoints() == []
    paths = [save(folder, step) for step in (9, 10, 100)]
    assert folder.checkpoints() == paths[1:] and not paths[0].exists()
    found, state = folder.newest_checkpoint()
    assert found == paths[2] and state["step"] == 100
    (paths[2] / "weights.bin").write_bytes(b"w" * 99)
    assert folder.newest_checkpoint()[0] == paths[1]
    (paths[1] / "state.json").write_text("{")
    assert folder.newest_checkpoint() is None
    half = tmp_path / "checkpoints" / "unfinished-1"
    half.mkdir()
    assert save(folder, 101) in folder.checkpoints() and not half.exists()
    assert folder.newest_checkpoint()[1]["step"] == 101
    assert save(folder, 101).exists()  # the same step again replaces it
