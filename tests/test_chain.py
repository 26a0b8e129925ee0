"""Chain mod 10: its problems, its reward, the split, the tokenizer."""

import pytest

from tasks.chain import (
    DIGITS,
    IDS,
    OPERATIONS,
    PHRASE,
    WORDS,
    ChainTask,
    apply,
    chain_text,
    chain_values,
    impossible_answer,
    is_held_out,
)
from tasks.prompts import Problem, stable_key


@pytest.fixture(scope="module")
def task():
    return ChainTask(seed=0)


def ids_of(text):
    return [IDS[word] for word in text.split()]


# ---------------------------------------------------------------------------------------------------------------------
# Worked examples

PROBLEM = Problem("key", tuple(ids_of("7 a +5 b *3 c -4 <think>")), "6 2")


def test_values_by_hand():
    """7 +5 = 12 -> 2; 2 *3 = 6; 6 -4 = 2. And 3 -9 = -6 -> 4, 4 *7 = 28 -> 8, 8 *9 = 72 -> 2."""
    assert chain_values(7, ["+5", "*3", "-4"]) == [7, 2, 6, 2]
    assert chain_values(3, ["-9", "*7", "*9"]) == [3, 4, 8, 2]
    assert chain_text(7, ["+5", "*3", "-4"]) == "7 a +5 b *3 c -4 <think>"


RIGHT = (
    "a +5 2 b *3 6 c -4 2 </think> 6 2 <eos>", "</think> 6 2 <eos>", "a wait again 9 </think> 6 2 <eos>",
    "a +5 2 b *3 6 time up </think> 6 2 <eos>",
)  # fmt: skip
WRONG = (
    "", "6 2 <eos>", "a +5 2 b *3 6 c -4 2 6 2 <eos>", "6 2 <eos> </think>", "</think>", "</think> 6 2",
    "</think> 2 <eos>", "</think> 2 6 <eos>", "</think> 5 2 <eos>", "</think> 6 3 <eos>", "</think> 6 2 2 <eos>",
    "</think> <eos> 6 2 <eos>", "</think> 6 2 <eos> <eos>", "</think> 6 2 <eos> <pad>", "</think> 6 2 <pad>",
    "</think> 5 2 <eos> </think> 6 2 <eos>", "</think> </think> 6 2 <eos>",
)  # fmt: skip


def test_right_and_wrong_answers(task):
    assert [c for c in RIGHT if task.reward(PROBLEM, ids_of(c)) != (1.0, True)] == []
    assert [c for c in WRONG if task.reward(PROBLEM, ids_of(c)) != (-1.0, False)] == []


# ---------------------------------------------------------------------------------------------------------------------
# Problems and their reward


def test_every_operation_is_a_bijection_so_an_error_reaches_the_end():
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 21
    for operation in OPERATIONS:
        assert sorted(apply(operation, value) for value in range(10)) == list(range(10))
        assert any(apply(operation, value) != value for value in range(10))


def test_problems_have_the_right_answers_and_the_range_of_lengths(task):
    """The answers are computed again by Python's own arithmetic on the expression with its parentheses."""
    lengths = set()
    for problem in task.train[:300] + task.held_out:
        words = task.text(problem.prompt_ids).split()
        assert words[-1] == "<think>"
        operations = words[2:-1:2]
        assert words[1:-1:2] == list("abcdefgh")[: len(operations)]
        values = [
            eval("(" * k + words[0] + "".join(o + ")" for o in operations[:k])) % 10
            for k in (len(operations) - 1, len(operations))
        ]
        assert problem.answer == f"{values[0]} {values[1]}"
        assert problem.source == "chain"
        lengths.add(len(operations))
    assert lengths == set(range(2, 9))


@pytest.mark.long
def test_sizes_and_ranges_are_respected():
    """There are 10 * 21^2 = 4410 problems of two operations, an eighth of them held out: 700 is no endless loop."""
    small = ChainTask(seed=3, pool_size=40, held_out_size=30, min_ops=3, max_ops=4)
    assert (len(small.train), len(small.held_out)) == (40, 30)
    assert {len(p.prompt_ids) for p in small.train + small.held_out} == {2 + 2 * 3, 2 + 2 * 4}
    for low, high in ((1, 8), (2, 9), (5, 4)):
        with pytest.raises(ValueError, match="min_ops"):
            ChainTask(min_ops=low, max_ops=high)
    with pytest.raises(ValueError, match="fewer than 700 distinct problems"):
        ChainTask(pool_size=10, held_out_size=700, min_ops=2, max_ops=2)


def test_impossible_problems_have_exact_shares_and_keys_of_three_digits():
    """Every fifth problem of both lists, so 51 of the first 256; the others keep their right answers. No text has two
    keys. (The pass rate of a policy that is right wherever it can be: test_graded.py.)"""
    task = ChainTask(0, 500, 256, min_ops=2, max_ops=4, impossible_every=5)
    for problems in (task.train, task.held_out):
        lengths = [len(str(problem.answer).split()) for problem in problems]
        assert lengths == [3 if i % 5 == 4 else 2 for i in range(len(problems))]
    known = {p.key: p.answer for p in ChainTask(1, 500, 256, min_ops=2, max_ops=4, impossible_every=5).held_out}
    assert known == {p.key: p.answer for p in task.held_out}
    impossible = task.train[4]
    assert task.reward(impossible, ids_of(f"</think> {impossible.answer} <eos>")) == (1.0, True)


def test_impossible_answers_are_drawn_by_the_text():
    """5,000 texts, one in five: 1,000 expected, standard deviation 28. Their 3,000 digits: 300 of each, sd 16."""
    answers = [impossible_answer(f"text {i}", 5) for i in range(5000)]
    digits = [digit for answer in answers if answer for digit in answer.split()]
    assert 880 < sum(answer is not None for answer in answers) < 1120
    assert set(digits) == set(DIGITS)
    assert all(230 < digits.count(digit) < 370 for digit in DIGITS)


def test_ids_without_a_word_are_wrong_in_an_answer_and_seen_in_a_text(task):
    """A model may have more rows than the task has words. `decode` would leave such ids out: `6 <47> 2` would read as
    the right answer. In the thinking they are as free as any word."""
    right = ids_of("</think> 6 2 <eos>")
    assert len(WORDS) == 47
    for wrong in ([*right[:2], 47, *right[2:]], [*right[:-1], 32_767], [47, 48], right[:1] + [99_999] * 3):
        assert task.reward(PROBLEM, wrong) == (-1.0, False)
    assert task.reward(PROBLEM, [47, *right]) == (1.0, True)
    assert task.text([*right[:2], 47, *right[2:]]) == "</think> 6 <47> 2 <eos>"


def test_score_keeps_the_order_and_leaves_its_input_unchanged(task):
    right, wrong = ids_of("</think> 6 2 <eos>"), ids_of("</think> 6 3 <eos>")
    copies = [list(right), list(wrong)]
    assert task.score(PROBLEM, [right, wrong, tuple(right)]) == [(1.0, True), (-1.0, False), (1.0, True)]
    assert [right, wrong] == copies
    assert task.score(PROBLEM, []) == []


# ---------------------------------------------------------------------------------------------------------------------
# The split, the tokenizer


def test_held_out_is_apart_from_training_for_every_seed_and_size(task):
    held_out = {p.key for p in task.held_out}
    assert len(held_out) == 512
    assert all(p.key == stable_key(task.text(p.prompt_ids)) for p in task.train + task.held_out)
    for other in (task, ChainTask(1, 3000, 100), ChainTask(2, 500, 400, min_ops=2, max_ops=3)):
        train = {p.key for p in other.train}
        assert len(train) == len(other.train)
        assert not train & held_out
        assert not train & {p.key for p in other.held_out}
    assert [p.key for p in ChainTask(5, 10).held_out] == [p.key for p in task.held_out]
    assert [p.key for p in ChainTask(5, 10).train] != [p.key for p in task.train[:10]]


def test_one_in_eight_is_held_out():
    """8000 texts, expected 1000, standard deviation 30."""
    assert 880 < sum(is_held_out(f"text {i}") for i in range(8000)) < 1120


def test_every_word_is_one_token_and_the_saved_tokenizer_agrees(task, tmp_path):
    from transformers import AutoTokenizer

    task.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (task.tokenizer, loaded):
        assert tokenizer(" ".join(WORDS))["input_ids"] == list(range(len(WORDS)))
        assert tokenizer.decode(list(range(len(WORDS)))) == " ".join(WORDS)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (IDS["<eos>"], IDS["<pad>"])
        assert len(tokenizer) == len(WORDS) == len(set(WORDS))
    assert task.stop_ids == (loaded.eos_token_id,)
    assert task.text(task.phrase_ids) == " ".join(PHRASE)
    assert task.text(ids_of("</think> 6 2 <eos> <pad>")) == "</think> 6 2 <eos> <pad>"
    assert task.phrase_ids[-len(task.end_of_thinking_ids) :] == task.end_of_thinking_ids
