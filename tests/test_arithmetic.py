"""The built-in task: its problems, reward, split and tokenizer, and its known ceiling."""

import pytest

from tasks import arithmetic
from tasks.arithmetic import IDS, OPERATIONS, ChainTask, apply, chain_values, graded_task
from tasks.prompts import Problem, stable_key

PROBLEM = Problem("key", tuple(IDS[word] for word in "7 a +5 b *3 c -4 <think>".split()), "6 2")


@pytest.fixture(scope="module")
def task():
    return ChainTask(seed=0)


def ids_of(text):
    return tuple(IDS[word] for word in text.split())


def test_values_by_hand():
    """7 +5 = 12 -> 2; 2 *3 = 6; 6 -4 = 2. And 3 -9 = -6 -> 4, 4 *7 = 28 -> 8, 8 *9 = 72 -> 2."""
    assert chain_values(7, ["+5", "*3", "-4"]) == [7, 2, 6, 2]
    assert chain_values(3, ["-9", "*7", "*9"]) == [3, 4, 8, 2]
    assert arithmetic.chain_text(7, ["+5", "*3", "-4"]) == "7 a +5 b *3 c -4 <think>"


RIGHT = """a +5 2 b *3 6 c -4 2 </think> 6 2 <eos> | </think> 6 2 <eos> | a wait again 9 </think> 6 2 <eos> |
a +5 2 b *3 6 time up </think> 6 2 <eos>""".split("|")


WRONG = """ | 6 2 <eos> | a +5 2 b *3 6 c -4 2 6 2 <eos> | 6 2 <eos> </think> | </think> | </think> 6 2 | </think> 2 <eos> |
</think> 2 6 <eos> | </think> 5 2 <eos> | </think> 6 3 <eos> | </think> 6 2 2 <eos> | </think> <eos> 6 2 <eos> |
</think> 6 2 <eos> <eos> | </think> 6 2 <eos> <pad> | </think> 6 2 <pad> | </think> 5 2 <eos> </think> 6 2 <eos> |
</think> </think> 6 2 <eos>""".split("|")


def test_right_and_wrong_answers(task):
    """One by one and as a group, whose order stays."""
    assert task.score(PROBLEM, [ids_of(text) for text in RIGHT]) == [(1.0, True)] * 4
    assert task.score(PROBLEM, [ids_of(text) for text in WRONG]) == [(-1.0, False)] * 17
    assert task.score(PROBLEM, [list(ids_of(WRONG[9])), ids_of(RIGHT[1])]) == [(-1.0, False), (1.0, True)]
    assert task.score(PROBLEM, []) == []


def test_every_operation_is_a_bijection_so_an_error_reaches_the_end():
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 21
    for operation in OPERATIONS:
        results = [apply(operation, value) for value in range(10)]
        assert sorted(results) == list(range(10)) != results


def test_held_out_is_apart_from_training_for_every_seed_and_size(task):
    """One in eight texts is held out: of 8,000 an expected 1,000, standard deviation 30. A smaller held-out set is the
    beginning of a larger one."""
    assert all(p.key == stable_key(task.text(p.prompt_ids)) for p in task.train + task.held_out)
    large = graded_task(held_out_size=1000)
    held_out = {p.key for p in large.held_out}
    for other in (graded_task(0), graded_task(1, 3000, 100), graded_task(2, 500, 400)):
        train = {p.key for p in other.train}
        assert len(train) == len(other.train)
        assert not train & held_out
        assert other.held_out == large.held_out[: len(other.held_out)]
    assert graded_task(5, 10, 1).train != large.train[:10]
    assert len(graded_task(0).held_out) == 256
    assert 880 < sum(arithmetic.is_held_out(f"text {i}") for i in range(8000)) < 1120


def test_no_policy_that_knows_all_of_arithmetic_passes_the_ceiling():
    """Every fifth problem of both lists is impossible, so 51 of the first 256: its key has three digits, and right
    arithmetic is wrong."""
    task = graded_task(0, 500)
    lengths = set()
    for problems in (task.train, task.held_out):
        for i, problem in enumerate(problems):
            start, *words = task.text(problem.prompt_ids).split()
            values = chain_values(int(start), words[1:-1:2])
            lengths.add(len(values) - 1)
            possible = i % 5 != 4
            answers = [f"{values[-2]} {values[-1]}", problem.answer]
            scores = task.score(problem, [ids_of(f"</think> {answer} <eos>") for answer in answers])
            assert [correct for _, correct in scores] == [possible, True]
            assert len(problem.answer.split()) == (2 if possible else 3)
    assert arithmetic.CEILING == 0.8
    assert lengths == {2, 3, 4}
