"""The graded task: its known ceiling, and a warm start whose mistakes are graded as its demonstrations are."""

import random
from pathlib import Path

import pytest
import torch

from tasks.chain import IDS, LABELS, OPERATIONS, apply, chain_text, chain_values
from tasks.demonstrations import Demonstrator
from tasks.graded import CEILING, DEMONSTRATIONS, easiness, graded_task
from tasks.prompts import Problem
from tasks.warm_start import WarmStart, warm_start

ROOT = Path(__file__).resolve().parents[1]


def test_no_policy_that_knows_all_of_arithmetic_passes_the_ceiling():
    """Right answers to 255 problems, a fifth of which are impossible."""
    task = graded_task(held_out_size=255)
    passed = lengths = 0
    for problem in task.held_out:
        words = task.text(problem.prompt_ids).split()
        values = chain_values(int(words[0]), words[2:-1:2])
        passed += task.reward(problem, [IDS[word] for word in f"</think> {values[-2]} {values[-1]} <eos>".split()])[1]
        lengths |= 1 << len(values) - 1
    assert passed / 255 == CEILING == 0.8
    assert lengths == 0b11100  # of two to four operations


def test_every_fact_has_a_wrong_result_and_its_right_one_is_shown_up_to_nine_times_in_ten():
    demonstrator = Demonstrator(DEMONSTRATIONS, 0, corrupted=True)
    shown = [1 - demonstrator.wrong_shown[operation, value] for operation in OPERATIONS for value in range(10)]
    assert len(shown) == 210
    assert 0.05 < min(shown) < 0.053
    assert 0.89 < max(shown) < 0.9
    assert sum(shown) / 210 == pytest.approx(0.475)


def test_easiness_is_the_product_of_what_is_shown_and_zero_for_the_impossible():
    """Fact i of 210 is shown right with .9 - .85 (i + .5) / 210: the first with .89798. `1 a -9 b +7 c -5` has the
    facts 1 - 9 = 2, 2 + 7 = 9 and 9 - 5."""
    facts = list(Demonstrator(DEMONSTRATIONS, 0, corrupted=True).wrong)

    def made(text):
        return Problem("", tuple(IDS[word] for word in text.split()), "")

    right = [0.9 - 0.85 * (facts.index(fact) + 0.5) / 210 for fact in (("-9", 1), ("+7", 2), ("-5", 9))]
    assert easiness(made("1 a -9 b +7 c -5 <think>")) == pytest.approx(right[0] * right[1] * right[2])
    task = graded_task(pool_size=5, held_out_size=5)
    for problem in (*task.train, *task.held_out):
        impossible = len(str(problem.answer).split()) == 3  # numbers of the key
        assert (easiness(problem) == 0) == impossible


def test_the_halves_have_no_problem_in_common_and_the_hard_one_has_all_that_are_impossible():
    """40 of 80 problems each, 16 of which are impossible; in the order in which they were drawn, not sorted, so that an
    evaluation of the first few is one of the half."""
    whole = graded_task(3, pool_size=80, held_out_size=40)
    easy, hard = (graded_task(3, pool_size=40, held_out_size=20, difficulty=name) for name in ("easy", "hard"))
    for name, impossible in (("train", 16), ("held_out", 8)):
        all_of_it, *halves = (getattr(task, name) for task in (whole, easy, hard))
        assert [len(half) for half in halves] == [len(all_of_it) // 2] * 2
        assert sorted(halves[0] + halves[1], key=all_of_it.index) == all_of_it
        assert [problem for problem in all_of_it if problem in halves[0]] == halves[0]
        assert min(map(easiness, halves[0])) > max(map(easiness, halves[1]))
        assert [sum(easiness(problem) == 0 for problem in half) for half in halves] == [0, impossible]


@pytest.mark.slow
def test_the_warm_start_gives_right_results_about_as_often_as_they_were_shown():
    """Mean probability of the right result by quarters of the shown shares (.79, .56, .34, .11): it falls from quarter
    to quarter, and is within .15 of what was shown. So the strengths are graded in the model, too."""
    from transformers import AutoModelForCausalLM

    folder = warm_start(ROOT / "runs" / "cache", seed=0, settings=WarmStart(demonstrations=DEMONSTRATIONS))
    model, rng = AutoModelForCausalLM.from_pretrained(folder), random.Random(0)
    facts = list(Demonstrator(DEMONSTRATIONS, 0, corrupted=True).wrong)  # from often right to seldom
    rows, right = [], []
    for operation, value in facts:
        prompt = chain_text(value, [operation, rng.choice(OPERATIONS)])
        words = [*prompt.split(), LABELS[0], operation]  # what comes next is the result of the first step
        rows.append([IDS[word] for word in words])
        right.append(IDS[str(apply(operation, value))])
    with torch.no_grad():
        shares = model(input_ids=torch.tensor(rows)).logits[:, -1].softmax(-1)  # (210, V)
    found = shares[torch.arange(len(right)), right].tolist()
    quarters = [sum(found[i : i + 52]) / 52 for i in range(0, 208, 52)]
    assert quarters == sorted(quarters, reverse=True)
    assert quarters == pytest.approx([0.79, 0.56, 0.34, 0.11], abs=0.15)
