"""Tasks made of data sets: the split, what is judged, several data sets in one task."""

import hashlib
import random
from collections import Counter

import pytest
from bpe import bpe_tokenizer
from test_rows import write_rows

from tasks import data_sets, judges
from tasks.data_sets import PromptOptions, load_dataset_task
from tasks.prompts import epoch_order

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer()


def sums(n, start=0):
    return [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(start, start + n)]


@pytest.fixture
def load(tokenizer):
    """`load_dataset_task` with one worker, `exact` and 10 held-out prompts; its tasks are closed at the end."""
    loaded = []

    def load(path, tokenizer=tokenizer, held_out=10, reward="exact", **options):
        asked = {k: options.pop(k) for k in list(options) if k in PromptOptions.__dataclass_fields__}
        options = {"reward": reward, "reward_workers": 1, **options}
        loaded.append(load_dataset_task(path, tokenizer, PromptOptions(held_out=held_out, **asked), **options))
        return loaded[-1]

    yield load
    for task in loaded:
        task.close()


# ---------------------------------------------------------------------------------------------------------------------
# Worked examples


def test_scores_are_of_what_follows_the_thinking(tmp_path, tokenizer, load):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), reward="math")
    problem = task.train[0]

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    right = [ids(f"thinking</think>It is \\boxed{{{problem.answer}}}.<|end|>"), ids(f"</think>{problem.answer}")]
    unfinished, other = ids(f"\\boxed{{{problem.answer}}}"), ids("</think>\\boxed{-1}<|end|>")
    wrong = [unfinished, other, ids(f"</think>{problem.answer}1"), []]
    assert task.score(problem, right + wrong) == [(1.0, True)] * 2 + [(-1.0, False)] * 4
    assert task.reward(problem, tuple(right[0])) == (1.0, True)
    assert task.reward(problem, wrong[1]) == (-1.0, False)
    assert task.counts == Counter(correct=3, unfinished=2, wrong=3)


def test_ids_without_a_token_are_seen_in_the_text_and_spoil_an_answer(tmp_path, tokenizer, load):
    """`</think>1?2` must not be judged as 12, as `decode` would have it."""
    task = load(write_rows(tmp_path / "a.jsonl", sums(20)))
    problem = next(problem for problem in task.train if problem.answer == "12")
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("</think>1", "2"))
    spoiled = [*first, len(tokenizer), len(tokenizer) + 9999, *second]
    assert task.text(spoiled) == "</think>1\ufffd2" and tokenizer.decode(spoiled) == "</think>12"
    assert task.score(problem, [spoiled, first + second]) == [(-1.0, False), (1.0, True)]


def test_the_split_is_by_hash_whatever_the_order_and_the_template(tmp_path, load):
    """The ten smallest SHA-256 of the prompts are held out; order, duplicates and template change nothing."""
    rows = sums(60)
    expected = set(sorted(hashlib.sha256(row["question"].encode()).hexdigest()[:16] for row in rows)[:10])
    random.Random(0).shuffle(rows)
    again = [{**row, "question": "  " + row["question"].replace(" ", "  ") + "\n"} for row in rows[:25]]
    for name, some, options, asked in (
        ("one", sums(60), {}, "[user]%s[assistant]"),
        ("two", rows + again + again, {"prompt_template": "Solve: {prompt} Thanks {x}."}, "[user]Solve: %s Thanks {x}.[assistant]"),
        ("three", rows, {"apply_chat_template": False}, "%s"),
    ):  # fmt: skip
        task = load(write_rows(tmp_path / f"{name}.jsonl", some), **options)
        assert {p.key for p in task.held_out} == expected
        assert len(task.train) == 50
        assert not {p.key for p in task.train} & expected
        assert task.skipped == ({"duplicate_prompt": 50} if name == "two" else {})
        assert task.text(task.train[0].prompt_ids) == asked % f"What is {int(task.train[0].answer) - 2} + 2?"


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, what is judged


def test_no_option_carries_a_prompt_from_training_into_the_held_out(tmp_path, load):
    """The keys are taken over all prompts, whatever is left out later: by a limit, an answer column, a reward. What one
    data set holds out, the other trains on in no order of the two. (Of 40 held-out prompts 18 were once trained on.)"""
    rows = [row | {"question": row["question"] + " please" * (i % 30), "answer": row["answer"] if i % 7 else "\\frac{",
                   "other": None if i % 3 else "1"} for i, row in enumerate(sums(90))]  # fmt: skip
    more = rows[60:] + sums(60, 200)
    a, b = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", more)
    of_a, of_b = (
        set(sorted(hashlib.sha256(row["question"].encode()).hexdigest()[:16] for row in some)[:20])
        for some in (rows, more)
    )
    for names, held_out, options in (
        (a, of_a, {}), (a, of_a, {"max_prompt_tokens": 60}), (a, of_a, {"answer_column": "other"}),
        (a, of_a, {"reward": "math"}), (f"{a},{b}", of_a | of_b, {}), (f"{b},{a}", of_a | of_b, {"reward": "exact,math"}),
    ):  # fmt: skip
        task = load(names, held_out=20, **options)
        assert {p.key for p in task.held_out} <= held_out and not {p.key for p in task.train} & held_out
        keys = [p.key for p in task.train + task.held_out]
        assert len(keys) == len(set(keys)) and {p.source for p in task.train} == set(names.split(","))
    few = [*sums(3), *({"question": f"long {i} " * 200, "answer": "1"} for i in range(40))]
    with pytest.raises(ValueError, match="3 usable prompts .*`held_out` 1 leaves 3 to train on and 0 to evaluate"):
        load(write_rows(tmp_path / "few.jsonl", few), held_out=1, max_prompt_tokens=100)


def test_long_prompts_and_unreadable_answers_are_counted(tmp_path, tokenizer, load):
    """A prompt as long as the limit stays. `math` cannot read `\\frac{`."""
    bad = [{"question": "unreadable", "answer": "\\frac{"}, {"question": "long " * 200, "answer": "1"}]
    path = write_rows(tmp_path / "a.jsonl", [*sums(12, 10), *bad, *sums(1, 10)])
    message = [{"role": "user", "content": "What is 10 + 2?"}]
    length = len(tokenizer.apply_chat_template(message, return_dict=False, add_generation_prompt=True))
    task = load(path, reward="math", max_prompt_tokens=length)
    assert task.skipped == {"duplicate_prompt": 1, "unreadable_answer": 1, "prompt_too_long": 1}
    assert len(task.train + task.held_out) == 12 and all(len(p.prompt_ids) == length for p in task.train)
    with pytest.raises(ValueError, match="(?s)0 usable prompts.*prompt_too_long"):
        load(path, max_prompt_tokens=length - 1)


def test_exact_does_not_see_the_stop_token_but_sees_another(tmp_path, tokenizer, load):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)))
    problem = task.train[0]
    body = tokenizer.encode(f"</think>{problem.answer}", add_special_tokens=False)
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    verdicts = task.score(problem, [body, [*body, stop], [*body, stop, stop], [*body, pad]])
    assert verdicts == [(1.0, True)] * 2 + [(-1.0, False)] * 2


def test_the_users_function_gets_prompt_completion_and_the_rows_own_answer(tmp_path, tokenizer, monkeypatch, load):
    (tmp_path / "judge_rows.py").write_text(
        "def judge(prompt, completion, answer):\n"
        "    return prompt == 'Say ' + answer['say'] and completion == 'no</think>' + answer['say']\n"
    )
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}", "answer": {"say": str(i)}} for i in range(12)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    task = load(path, reward="judge_rows:judge", prompt_template="<<{prompt}>>")
    for problem in task.train:
        ids = tokenizer.encode(f"no</think>{problem.answer['say']}<|end|>", add_special_tokens=False)
        assert task.score(problem, [ids, ids[:-2]]) == [(1.0, True), (0.0, False)]


# ---------------------------------------------------------------------------------------------------------------------
# Several data sets


def test_several_data_sets_with_their_own_rewards_and_no_shared_prompt(tmp_path, tokenizer, load):
    """The second has ten prompts of the first, which stay with it. One of them, 36 + 2, is among the ten smallest
    SHA-256 of either, so the second holds out nine."""
    one = write_rows(tmp_path / "one.jsonl", sums(40))
    two = write_rows(tmp_path / "two.jsonl", sums(40, start=30))
    task = load(f"{one}=3,{two}=1", reward="exact,math")
    assert task.sources == [one, two]
    assert task.weights == {one: 3.0, two: 1.0}
    assert task.skipped == {"duplicate_prompt": 10}
    assert Counter(p.source for p in task.train) == {one: 30, two: 21}
    assert Counter(p.source for p in task.held_out) == {one: 10, two: 9}
    keys = [p.key for p in task.train + task.held_out]
    assert len(keys) == len(set(keys)) == 70
    for source, expected in ((one, (-1.0, False)), (two, (1.0, True))):
        problem = next(p for p in task.train if p.source == source)
        ids = tokenizer.encode(f"</think>The answer is {problem.answer}.", add_special_tokens=False)
        assert task.reward(problem, ids) == expected


def test_data_sets_without_weights_are_drawn_by_their_sizes(tmp_path, load):
    """`epoch_order` without weights is a shuffle of everything: 20 and 5 prompts to train on, all in one epoch. A single
    data set has all the places whatever its weight. (Equal weights were once the default.)"""
    one, two = write_rows(tmp_path / "one.jsonl", sums(30)), write_rows(tmp_path / "two.jsonl", sums(15, 50))
    task = load(f"{one},{two}")
    assert task.weights == {} and task.sources == [one, two]
    order = epoch_order(task.train, task.weights, 0, 0)
    assert Counter(task.train[i].source for i in order) == {one: 20, two: 5} and len(set(order)) == 25
    assert load(f"{one}=5").weights == {}


# ---------------------------------------------------------------------------------------------------------------------
# Errors and worker processes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset": "missing.jsonl"}, "`dataset` missing.jsonl: there is no such file"),
        ({"held_out": 12}, "(?s)12 usable prompts.*`held_out` 12"),
        ({"prompt_template": "{question}"}, "`prompt_template` must hold {prompt}"),
        ({"reward": "exact,exact"}, "`reward` must be one name or one for each of the 1"),
    ],
)
def test_bad_options_are_refused_by_name_and_leave_no_process(tmp_path, monkeypatch, load, change, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", sums(12))
    pools = []
    real = judges.RewardPool
    monkeypatch.setattr(data_sets, "RewardPool", lambda *a, **k: pools.append(real(*a, **k)) or pools[-1])
    with pytest.raises(ValueError, match=words):
        load(change.pop("dataset", "good.jsonl"), **change)
    assert all(worker.process.poll() is not None for pool in pools for worker in pool._workers)


def test_a_process_that_does_not_judge_keeps_no_worker(tmp_path, load):
    """Bad rows are counted all the same. (Every rank once kept its workers: see test_parts.py.)"""
    path = write_rows(tmp_path / "a.jsonl", [*sums(12), {"question": "unreadable", "answer": "\\frac{"}])
    task = load(path, reward="math", judge=False)
    assert task.skipped == {"unreadable_answer": 1}
    with pytest.raises(RuntimeError, match="the reward workers are closed|cannot schedule new futures"):
        task.reward(task.train[0], [1])
