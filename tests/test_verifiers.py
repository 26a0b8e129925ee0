"""Verifiers and answers: what the final answer of a text is, and whether it is the known one."""

import inspect
import re

import pytest

from tasks import answers
from tasks.answers import answer_of, finished_number, known_answer
from tasks.verifiers import after_thinking, exact_kind, math_kind


@pytest.fixture
def math_verify():
    return pytest.importorskip("math_verify", reason="`math` compares with the package math-verify")


def test_math_by_hand(math_verify):
    """1/2 is written in four ways; the last of two boxes counts; text without any answer is not wrong but unparsed."""
    for text in (r"It is \boxed{0.5}.", r"\boxed{\frac12}", "So $x = 1/2$.", r"\boxed{2} no, \boxed{2^{-1}}"):
        assert math_kind(text, "1/2") == "correct"
    assert math_kind(r"\boxed{0.5} no, \boxed{2}", "1/2") == "wrong"
    assert math_kind("I do not know.", "1/2") == "unparsed"
    assert math_kind(r"\boxed{0.5}", r"\frac{") == math_kind(None, r"\frac{") == "bad_answer"


def test_exact_and_what_follows_the_thinking():
    """The first end counts; a marker that never comes gives None; no marker at all gives everything."""
    texts = (" 6 2\n", "6 2.", "62", "x 6 2", None)
    assert [exact_kind(text, "6 2") for text in texts] == ["correct", "wrong", "wrong", "wrong", "wrong"]
    assert after_thinking("a</think>b</think>c", "</think>") == "b</think>c"
    assert after_thinking("no end", "</think>") is None
    assert after_thinking("a</think>b", "") == "a</think>b"


def test_the_table_of_final_answers():
    """A row of the table each: what is read, and what stays to be read as prose."""
    assert answer_of("<think>4?</think> <answer>4</answer> no: <answer>5 cm</answer></s>") == ("5 cm", "5 cm")
    assert answer_of(r"<answer>so \boxed{5}</answer> \boxed{6}") == ("5", None)
    assert answer_of(r"\boxed{4}, no, \boxed{\boxed{5}}") == ("5", None)
    assert answer_of("<think>4?</think> so <final_result>5") == answer_of("2 [SOLUTION]5[/SOLUTION]\n") == ("5", "5")
    assert answer_of("<result>4</result> The answer is 5.") == ("5", "5")
    assert answer_of("<reasoning>4</reasoning> <b>5</b>")[0] == "5"
    assert answer_of('{"steps": ["2+3"], "answer": "5"}')[0] == "5"
    assert answer_of("The answer is 4. No! Answer:5. Done 7 times.") == ("5", "5")
    assert answer_of("#### 5\n" + "So it is. " * 400) == ("5", "5")
    assert answer_of("Answer: we cannot know, 5?")[1] == "Answer: we cannot know, 5?"
    assert answer_of("x**2 + 1")[0] == "x^2 + 1"


def test_what_a_finished_number_is(math_verify):
    """A number that the policy computed. (A policy without this rule learned to repeat the question.)"""
    finished = {"1,234": "1234", "5 km/h": "5", "x = 1/2": r"\frac{1}{2}", "5e3": None, "-5 apples": "-5", "12%": "12%"}
    for text, value in finished.items():
        assert finished_number(text) == value
    unfinished = (
        "26 - 80",
        "2^{10}",
        r"\sqrt{16}",
        "5 or 6",
        r"5 \text{ and a half}",
        "5 million",
        "x",
        "1 = 2",
        "5, 6",
    )
    assert [finished_number(text) for text in unfinished] == [None] * len(unfinished)
    assert finished_number("84/2") == r"\frac{84}{2}"
    assert finished_number("84/2", integer=True) is None
    assert math_kind("To calculate 26 - 80, we need to compute 26 - 80.", "-54") == "wrong"
    assert math_kind("26 - 80 = -54", "-54") == math_kind("So it is -54 degrees.", "-54") == "correct"


def test_known_answers(math_verify):
    """Also of a worked solution or a sentence. Two numbers in a sentence are no answer."""
    assert known_answer(r"As $2 + 3 = 5$ it is $\boxed{5}$.") == known_answer("There are 5 apples.") == "5"
    assert known_answer("There are 5 apples and 3 pears here.") == ""
    for none in ("There are 5 apples and 3 pears here.", "proof", "notfound", "N/A", "See solution"):
        assert math_kind(None, none) == math_kind(none, none) == "bad_answer"


ROWS = re.findall(r"^    \((?:r?f?\"|\[).*\),  # (.+) -> (.*)$", inspect.getsource(answers), re.MULTILINE)


TABLES = answers.TEXT_SPELLINGS + answers.SPELLINGS + answers.NUMBER_SPELLINGS


@pytest.mark.parametrize("i", range(len(TABLES)))
def test_each_spelling_does_what_stands_beside_it(i):
    pattern, usual = TABLES[i]
    before, after = ROWS[i]
    assert re.sub(pattern, usual, before).strip() == after.strip() != before
