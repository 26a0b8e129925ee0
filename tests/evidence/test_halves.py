"""evidence/halves.py: the graded task's halves as rows that a data set's judge reads."""

import halves

from tasks.arithmetic import IMPOSSIBLE_EVERY, graded_task
from tasks.verifiers import exact_kind


def test_the_halves_are_apart_and_their_answers_are_those_of_the_task():
    """Every fifth of 4,096 and of 1,024 problems is impossible: all are in the hard half, with a key of three digits."""
    easy, hard = halves.rows("easy"), halves.rows("hard")
    assert len(easy) == len(hard) == 2560 and not {row["prompt"] for row in easy} & {row["prompt"] for row in hard}
    three = [sum(len(row["answer"].split()) == 3 for row in rows) for rows in (easy, hard)]
    assert three == [0, 4096 // IMPOSSIBLE_EVERY + 1024 // IMPOSSIBLE_EVERY]
    task = graded_task(difficulty="easy")
    problem, row = task.train[0], easy[0]
    assert task.text(problem.prompt_ids) == row["prompt"] and exact_kind(f" {row['answer']} ", str(problem.answer))
    right = task.tokenizer(f"a </think> {row['answer']} <eos>")["input_ids"]
    assert task.reward(problem, right) == (1.0, True)
