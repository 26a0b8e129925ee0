"""Tasks made of data sets: the split, what is judged, several data sets in one task, sets that are only evaluated."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest
from test_rows import write_rows

pytestmark = pytest.mark.long


def sums(n, start=0):
    return [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(start, start + n)]


def smallest(rows, n):
    """The keys of the n prompts with the smallest SHA-256."""
    return set(sorted(hashlib.sha256(row["question"].encode()).hexdigest()[:16] for row in rows)[:n])


def keys(problems):
    return {problem.key for problem in problems}


def test_scores_are_of_what_follows_the_thinking(tokenizer, load):
    task = load(sums(12), reward="math")
    problem = task.train[0]
    x = problem.answer
    right = [f"thinking</think>It is \\boxed{{{x}}}.<|end|>", f"</think>{x}"]
    wrong = [f"\\boxed{{{x}}}", "</think>\\boxed{-1}<|end|>", f"</think>{x}1", ""]
    completions = [tokenizer.encode(text, add_special_tokens=False) for text in right + wrong]
    assert task.score(problem, completions) == [(1.0, True)] * 2 + [(-1.0, False)] * 4
    assert task.counts == Counter(correct=2, unfinished=2, wrong=2)


def test_the_split_is_by_hash_whatever_the_order_and_the_template(load):
    """The ten smallest SHA-256 of the prompts are held out; order, duplicates and template change nothing."""
    rows = sums(60)
    expected = smallest(rows, 10)
    random.Random(0).shuffle(rows)
    again = [{**row, "question": "  " + row["question"].replace(" ", "  ") + "\n"} for row in rows[:25]]
    for data, options, prompt in (
        (sums(60), {}, "[user]%s[assistant]"),
        (rows + again * 2, {"prompt_template": "Solve: {prompt} Bye {x}."}, "[user]Solve: %s Bye {x}.[assistant]"),
        (rows, {"apply_chat_template": False}, "%s"),
    ):
        task = load(data, **options)
        assert keys(task.held_out) == expected
        assert len(task.train) == len(keys(task.train) - expected) == 50
        assert task.skipped == ({"duplicate_prompt": 50} if len(data) > 60 else {})
        assert task.text(task.train[0].prompt_ids) == prompt % f"What is {int(task.train[0].answer) - 2} + 2?"


def is_correct_in_prose(task, problem):
    """`math` reads such an answer, `exact` does not."""
    ids = task.tokenizer.encode(f"</think>The answer is {problem.answer}.", add_special_tokens=False)
    return task.score(problem, [ids])[0][1]


def test_several_data_sets_with_their_own_rewards_and_no_shared_prompt(load):
    """The second has ten prompts of the first, which stay with it. One of them, 36 + 2, is among the ten smallest
    SHA-256 of either, so the second holds out nine."""
    one = write_rows(Path("1.jsonl"), sums(40))
    two = write_rows(Path("2.jsonl"), sums(40, start=30))
    task = load(f"{one}:exact,{two}:math")
    assert task.sources == [one, two]
    assert task.skipped == {"duplicate_prompt": 10}
    assert Counter(p.source for p in task.train) == {one: 30, two: 21}
    assert Counter(p.source for p in task.held_out) == {one: 10, two: 9}
    assert len(keys(task.train + task.held_out)) == 70
    for source, correct in ((one, False), (two, True)):
        problem = next(p for p in task.train if p.source == source)
        assert is_correct_in_prose(task, problem) == correct


def test_an_evaluation_set_is_whole_and_its_prompts_are_not_trained_on(load):
    """Of 40 sums ten are held out. The set has 14: all of ten trained or held-out ones, and four others. It is whole;
    the split of the rest stays as it was, but training goes without the prompts that the set has."""
    data = write_rows(Path("sums.jsonl"), sums(40))
    own = write_rows(Path("own.jsonl"), [*sums(10), *sums(4, start=90)])
    alone, task = load(data), load(data, eval_dataset=f"own={own}")
    held_out = [p for p in task.held_out if p.source != "own"]
    in_set = keys(p for p in task.held_out if p.source == "own")
    assert task.eval_sources == ["own"]
    assert task.sources == alone.sources
    assert len(in_set) == 14
    assert held_out == alone.held_out
    assert keys(held_out) & in_set  # evaluated in both
    assert keys(task.train) == keys(alone.train) - in_set != keys(alone.train)
    assert task.skipped == {"in_eval_dataset": len(keys(alone.train) & in_set)}
    assert alone.skipped == {}
