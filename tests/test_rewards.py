"""Verifiers and their worker processes: right verdicts, and a pool that survives what it is given."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks import verifiers
from tasks.judge_process import judge_one, verdict_of
from tasks.judges import Job, RewardError, RewardPool, Verdict
from tasks.verifiers import after_thinking, last_box, plain

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(["math", "exact"], workers=2, timeout=6.0, end_of_thinking="</think>") as pool:
        yield pool


def judge(pool, pairs):
    """Verdicts on (answer, what follows the thinking)."""
    return pool.judge([Job("math", "", "thinking </think> " + text, answer) for answer, text in pairs])


def box(*contents):
    return ["\\boxed{" + content + "}" for content in contents]


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_after_thinking():
    """The first end counts; a marker that never comes gives None; no marker at all gives everything."""
    assert after_thinking("a</think>b</think>c", "</think>") == "b</think>c"
    assert after_thinking("no end", "</think>") is None
    assert after_thinking("</think>", "</think>") == ""
    assert after_thinking("a</think>b", "") == "a</think>b"


@pytest.mark.parametrize(("text", "content"), [
    (r"\boxed{4}", "4"),
    (r"\boxed{1} and \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\}}", r"\}"),
    (r"\boxed {5}", "5"),
    (r"\fbox{6}", "6"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{}", ""),
    (r"} \boxed{8} {", "8"),
    (r"{ \boxed{8} } \boxed{9", "8"),
    (r"\boxed{1\\}", r"1\\"),
    (r"\boxed{10", None),
    (r"\boxed 11", None),
    (r"\unboxed{12}", None),
    (r"\\boxed", None),
    ("12", None),
    ("", None),
])
def test_last_box(text, content):
    assert last_box(text) == content


def test_last_box_is_linear():
    """200,000 openings take less than a second: a scan from each would take 2e10 steps."""
    start = time.monotonic()
    assert last_box(r"\boxed{" * 200_000) is None
    assert last_box(r"\boxed{" * 100_000 + "}" * 100_000) == ""
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(("answer", "text"), [
    (" 42. ", "42"), ("$42$", "42"), ("$$42$$", "42"), (r"\text{Yes}", "Yes"), ("1,234", "1234"), ("1,234,567",
    "1234567"),
    (r"1{,}234", "1234"), (r"1\,234", "1234"), ("+7", "7"), ("-007", "-7"), ("-0", "0"), ("000", "0"), ("12,34",
    "12,34"),
    ("1.50", "1.50"), ("1e-05", "0.00001"), ("+1.5E3", "1500"), ("-2.5e-6", "-0.0000025"), (".5e1", "5"),
    ("1e2 m", "100 m"), ("2e", "2e"), ("e-5", "e-5"), ("3x+2e+5", "3x+2e+5"), ("1e5x", "1e5x"), ("1e9999", "1e9999"),
    ("1e0009", "1e0009"), ("$5", "$5"), ("", ""), (".", ""), ("$", "$"), ("1,2", "1,2"),
])  # fmt: skip
def test_plain(answer, text):
    assert plain(answer) == text


def test_plain_is_linear():
    """A policy may write digits without end: each is looked at a few times, where a split in two would take 2e10 steps."""
    start = time.monotonic()
    assert plain("9" * 200_000) == "9" * 200_000
    assert plain("9" * 200_000 + "." + "9" * 200_000)[-3:] == "999"
    assert len(plain("1e999 " * 10_000)) < 100_000  # not the ten million digits that they stand for
    assert time.monotonic() - start < 2


# ---------------------------------------------------------------------------------------------------------------------
# math: right and wrong answers of many forms

RIGHT = {
    "42": [*box("42", "42.0", "042", r"\text{42}", "$42$", "x = 42", r"\frac{84}{2}", r"6 \times 7", r"6\cdot 7",
                r"\sqrt{1764}", " 42 ", r"42 \text{ cm}", r"42\,\text{m}^2", "+42", r"\boxed{42}", "(42)",
                r"42\cdot 10^0"),
           "The answer is 42.", "the final answer is $42$. I hope it is correct.", "42", "So $x=42$", "**42**",
           "Answer: 42",
           "#### 42", r"\boxed{41} no, \boxed{42}", "\\boxed{42}.\n\nDone 7 times.", r"\fbox{42}", r"\boxed {42}",
           r"\[ \boxed{42} \]", r"$\boxed{42}$", "$$42$$", r"\(42\)", "It is $42.", "I count 7. " * 400 + "So x = 42."],
    "1234": [*box("1,234", "1234", r"1{,}234", r"1\,234", r"1.234 \times 10^3"), "1,234"],
    "1,234": [*box("1234"), "1234"],
    "-5": [*box("-5", "- 5", r"-\frac{10}{2}"), "-5", "The answer is -5"],
    "0": box("0", "0.0", "-0", "3-3"),
    r"\frac{1}{2}": [*box(r"\frac{1}{2}", r"\frac12", "1/2", "0.5", ".5", r"\dfrac{1}{2}", r"\tfrac12", r"\frac{2}{4}",
                          r"50\%", "2^{-1}", r"\left(\frac{1}{2}\right)"), "1/2", r"$\frac{1}{2}$"],
    "1/3": box(r"\frac{1}{3}", "0.333333", r"\frac{3}{9}"),
    r"-\frac{3}{4}": box("-0.75", r"\frac{-3}{4}", r"\frac{3}{-4}", r"-\frac34"),
    r"3\frac{1}{2}": box("3.5", r"\frac{7}{2}"),
    "0.25": [*box("1/4", r"25\%", ".25"), "0.25"],
    r"25\%": box(r"25\%", "0.25", "25"),
    r"\sqrt{2}": box(r"\sqrt{2}", r"\sqrt2", "2^{1/2}", r"\frac{2}{\sqrt{2}}"),
    r"2\sqrt{3}": box(r"\sqrt{12}", r"2\cdot\sqrt3"),
    r"\frac{\sqrt{2}}{2}": box(r"\frac{1}{\sqrt{2}}"),
    r"\pi": box(r"\pi", "3.141592653589793"),
    r"4\pi": box(r"4\pi", r"4 \pi", r"\pi\cdot 4"),
    "10^{10}": box("10000000000", "10^{10}"),
    r"3 \times 10^8": box("300000000", r"3\cdot10^8"),
    "2^{2024}": box("2^{2024}", "4^{1012}"),
    "6!": box("720"),
    r"\binom{5}{2}": box("10", r"\binom{5}{3}"),
    "x^2+2x+1": box("(x+1)^2", "1+2x+x^2", "x^2+2x+1"),
    "y=2x+1": box("y=2x+1", "y = 1+2x", "2x+1"),
    "x=5": box("5", "x=5"),
    "(1,2)": box("(1,2)", "(1, 2)", r"\left(1,2\right)", r"(1,\frac{4}{2})"),
    "[1,2)": box("[1,2)", "[1, 2)"),
    r"(-\infty, 3]": box(r"(-\infty,3]"),
    r"x \le 3": box(r"x \leq 3", r"(-\infty,3]"),
    r"\{1,2\}": box(r"\{2,1\}", "1,2"),
    "1,2": box("2,1", "1, 2", r"1 \text{ and } 2"),
    r"\pm 2": box(r"\pm 2", "2,-2"),
    r"(-2,1)\cup(3,5)": box(r"(-2,1)\cup(3,5)", r"(3,5)\cup(-2,1)"),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": box(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
                                                r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    "1+2i": box("1+2i", "2i+1"),
    r"90^\circ": box("90", r"90^\circ", r"90^{\circ}"),
    r"5 \text{ cm}": box("5", r"5\text{ cm}"),
    r"\$5": box("5", r"\$5"),
    "$5": [*box("5"), "5"],
    r"12 \text{ hours}": box("12"),
    "A": box("A", r"\text{A}", r"\textbf{(A)}", "(A)"),
    "(B)": box("B"),
    "Evelyn": [*box("Evelyn", r"\text{Evelyn}", r"\text{evelyn}"), "Evelyn"],
    r"\text{Monday}": box("Monday", r"\text{Monday}"),
    "Yes": ["yes", *box(r"\text{Yes}")],
    r"\sin^2 x": box(r"1-\cos^2 x"),
    r"\log_2 8": box("3"),
    "e^2": box("e^{2}"),
    r"\infty": box(r"\infty"),
    "3:2": box("3:2"),
    "11_2": box("11_2"),
    r"\emptyset": box(r"\emptyset"),
    "No": [*box("No", "no", r"\text{No}"), "no."],
    # Scientific notation in the answer, in the completion, and in both.
    "1e-05": [*box("0.00001", "1e-5", "1E-05", r"10^{-5}", r"1 \times 10^{-5}", "x = 1e-5", r"1e-5\text{ m}", "1.0e-5"),
              "It is 0.00001.", "So 1e-5."],
    "0.00001": [*box("1e-05", "1e-5", "$1e-5$"), "It is $1e-5$.", "so x = 1e-05"],
    "-2.5e-6": box("-0.0000025", "-2.5E-06", r"-2.5\cdot 10^{-6}"),
    "1e20": box("1" + 20 * "0", "10^{20}", "1e+20"),
    "1500": box("1.5e3", "1.5E+03"),
    "2e + 5": box("5 + 2e"),
    "x+1e5": box("1e5+x"),
}  # fmt: skip
WRONG = {
    "42": [*box("43", "-42", "420", "4.2", "42.1", "42,43", r"\{42\}\cup\{43\}", r"42\text{ or }43", "", "x", "42x",
        "42+i",
                r"\infty", "42!", "4 2 1", r"\text{forty}", r"\ge 42", "x > 42", r"43 \to 42", r"\ne 42", "42^2",
                r"\text{any}", "[42, 43]", "NaN", r"\frac{42}{0}", "*", r"\pm 42", "42=43", r"\text{not }42",
                "n=42, m=41", "42;43", "42-43", "f(42)", "?"),
           "43", "The answer is 24.", "", "I do not know.", r"42 \boxed{41}", r"\boxed{1}\boxed{42}\boxed{7}",
           r"\boxed{42} or \boxed{43}", ".", "42 43 44"],
    "1234": box("1,23", "12,34", "1.234", "1,234,000"),
    "-5": [*box("5", "-5.5"), "5"],
    "0": box("1", "", "0.001", r"\emptyset"),
    r"\frac{1}{2}": box(r"\frac{1}{3}", "2", "12", "0.50001", r"\frac{2}{1}", "-0.5", "5"),
    "1/3": box("0.33", "3", "0.3"),
    r"\sqrt{2}": box("2", "1.41", r"\sqrt{3}", r"-\sqrt{2}"),
    r"\pi": box("3.14", "22/7", r"2\pi"),
    r"4\pi": box("4", r"\pi^4"),
    "2^{2024}": box("2^{2023}", "2024"),
    "x^2+2x+1": box("x^2+2x", "(x-1)^2", "(y+1)^2"),
    "y=2x+1": box("y=2x-1", "x=2y+1"),
    "(1,2)": box("(2,1)", "[1,2]", "(1,2,3)", "12", "1"),
    "[1,2)": box("[1,2]", "(1,2)", "[1,3)"),
    r"x \le 3": box("x < 3", r"x \ge 3", "3"),
    r"\{1,2\}": box(r"\{1,3\}", r"\{1\}", r"\{1,2,3\}"),
    "1,2": box("1", "1,3", "1,2,3"),
    r"\pm 2": box("2", "-2"),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": box(r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", "10"),
    "1+2i": box("1-2i", "3"),
    r"90^\circ": box("180"),
    "A": box("B", "AB", r"\text{None}"),
    "Evelyn": [*box("nylevE", r"\text{Evelin}", "E"), r"Evelyn or Anna? \boxed{Anna}", "nylevE"],
    r"\text{Monday}": box("dayMon", "Tuesday"),
    "Yes": ["no", *box(r"\text{No}")],
    "3:2": box("2:3"),
    "e^2": box("2e"),
    "x+1": [*box("x+2", "x"), "So x = x+1. " + "I count 7. " * 400],
    "No": [*box("on", "Yes", "oN"), "on"],
    "1e-05": [*box("e-5", "1e-4", "-1e-5", "1e5", "0.00002", "0", "1", "5"), "It is e - 5."],
    "0.00001": box("e-5", "1e-04", "1e-6"),
    "1e20": box("1e21", "20", "1e2"),
    "1500": box("1.5e2", "1.5"),
}  # fmt: skip


def test_math_accepts_right_answers_of_many_forms(pool):
    pairs = [(answer, text) for answer, texts in RIGHT.items() for text in texts]
    verdicts = judge(pool, pairs)
    assert len(pairs) > 150
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != (1.0, True, "correct")] == []


def test_math_refuses_wrong_answers_of_many_forms(pool):
    pairs = [(answer, text) for answer, texts in WRONG.items() for text in texts]
    verdicts = judge(pool, pairs)
    assert len(pairs) > 100
    assert [(pair, verdict) for pair, verdict in zip(pairs, verdicts, strict=True)
            if verdict not in {(-1.0, False, "wrong"), (-1.0, False, "unparsed")}] == []


HEDGES = ["A=B", "x=A=B", r"A \approx B", r"A \to B", "A,B", "A;B", r"A\text{ or }B", r"\{A,B\}", "A/B", "A:B", "A|B",
          r"A \equiv B", r"A\pm B", r"A\vee B", r"A\cup B", r"A \in B", "[A,B]", "(A,B)", r"A\quad B", r"A\\B",
          r"\text{A}B",
          "A_B", r"A \implies B", "x=A, x=B", r"x=A \text{ or } x=B", r"A \not= B", r"\boxed{A} \boxed{B}"]  # fmt: skip
OPEN_HEDGES = ["$A$ and $B$", "$A$ or $B$", "A or B", "the answer is A or B", r"\boxed{A} and \boxed{B}",
    r"\boxed{A}, \boxed{B}",
               "Answer: A\nAnswer: B", "**A** **B**", "A\nB"]  # fmt: skip


def test_naming_two_answers_never_earns_both(pool):
    """A policy that writes the same text with two candidates must not be right for either: it would learn to hedge."""
    texts = [text.replace("A", "3").replace("B", "7") for text in box(*HEDGES) + OPEN_HEDGES]
    first, second = (judge(pool, [(answer, text) for text in texts]) for answer in ("3", "7"))
    assert [text for text, a, b in zip(texts, first, second, strict=True) if a.correct and b.correct] == []


LENIENT = [
    ("5 cm", "5 km"), (r"5\text{ cm}", r"5\text{ m}"), ("3 hours", "3 minutes"), (r"10\%", "10"), ("10", r"10\%"),
    ("60", r"60^\circ"), ("11_2", "11"), ("123_5", "123"), ("10", "10_2"), ("2,3", "3,2"), ("(2,3)", "2,3"),
    ("(1,2)", r"\{1,2\}"), ("AB", "BA"), ("x=5", "5"), ("x=1,y=2", "1,2"), ("x", "X"), ("0.0000001", "0.0000002"),
    ("2e+5", "200000"),
]  # fmt: skip


def test_leniencies_that_the_file_lists(pool):
    """Wrong or doubtful answers that count as right: whoever mends one must take it out of the file's list."""
    verdicts = judge(pool, [(answer, *box(text)) for answer, text in LENIENT])
    assert [pair for pair, verdict in zip(LENIENT, verdicts, strict=True) if not verdict.correct] == []


@pytest.mark.parametrize("broken", ["parse", "verify"])
def test_a_failing_library_is_a_verdict_of_its_own(monkeypatch, broken):
    """math-verify raises on one completion: reward as for a wrong answer, another kind; on the data set's own answer:
    no verifier reads it. Its time limit stays a timeout."""
    import math_verify
    from math_verify.errors import TimeoutException

    real, error = getattr(math_verify, broken), [ZeroDivisionError("a bug of SymPy")]

    def fails(*arguments, **options):
        if broken == "verify" or "x+7" in arguments[0]:
            raise error[0]
        return real(*arguments, **options)

    monkeypatch.setattr(math_verify, broken, fails)
    job = Job("math", "", r"\boxed{x+7}", "x+8")
    assert judge_one(job, {}, "", 2) == Verdict(-1.0, False, "verifier_error")
    if broken == "parse":
        assert judge_one(job._replace(answer="x+7", completion="y+1"), {}, "", 2).kind == "bad_answer"
        assert judge_one(job._replace(answer="x+7", completion=None), {}, "", 2).kind == "bad_answer"
    verifiers.parse_math.cache_clear()
    error[0] = TimeoutException()
    assert judge_one(job, {}, "", 2).kind == "timeout"
    monkeypatch.undo()
    verifiers.parse_math.cache_clear()
    assert judge_one(job, {}, "", 2).kind == "wrong"


def test_known_limits_of_the_comparison(pool):
    """Right answers that are not recognised: they cost a reward, they do not give a false one."""
    limits = [(r"\sqrt{2}", r"\boxed{2^{0.5}}"), ("12 dollars", r"\boxed{12}"), (r"(-\infty,3]", r"\boxed{x \le 3}")]
    assert {verdict.kind for verdict in judge(pool, limits)} <= {"wrong", "unparsed"}


def test_kinds(pool):
    assert [v.kind for v in pool.judge([
        Job("math", "", r"\boxed{4}", "4"),
        Job("math", "", r"</think> \boxed{4}", "4"),
        Job("math", "", r"</think> \boxed{5}", "4"),
        Job("math", "", "</think> no idea", "4"),
        Job("math", "", r"</think> \boxed{4}", r"\frac{"),
        Job("math", "", r"</think> \boxed{4}", ""),
        Job("math", "", r"</think> \boxed{four}", "four"),
        Job("math", "", "</think> perhaps four", "four"),
        Job("math", "", r"</think> \boxed{4}", 4),
    ])] == ["unfinished", "correct", "wrong", "unparsed", "bad_answer", "bad_answer", "correct", "unparsed",
    "correct"]  # fmt: skip


def test_exact(pool):
    verdicts = pool.judge([Job("exact", "", text, "6 2") for text in
                           ("6 1 </think>  6 2\n", "</think> 6 2.", "</think> 62", "6 2", "</think> </think> 6 2")])
    assert [v.correct for v in verdicts] == [True, False, False, False, False]
    assert [v.kind for v in verdicts] == ["correct", "wrong", "wrong", "unfinished", "wrong"]


def test_answers_are_checked_before_training(pool):
    before = pool.counts.copy()
    answers = ["42", r"\frac{1}{2}", "Evelyn", "x^2", r"\frac{", "", "{", "1" * 5000, r"\text{a, b}", "9" * 2000 + "x"]
    assert pool.answers_readable("math", answers)[:7] == [True, True, True, True, False, False, False]
    assert pool.answers_readable("math", answers)[9] is False
    assert pool.answers_readable("exact", answers) == [True] * 10
    assert pool.counts == before


HOSTILE = [
    *box("9^{9^{9^9}}", "((10!)!)!", "9" * 100_000, "{" * 5000 + "4" + "}" * 5000, r"\prod_{k=1}^{10^9}k", "\ud800"),
    "9" * 100_000, "\\sqrt{" * 20_000, "\\boxed{" * 10_000, "__import__('os').system('touch /tmp/tasks_hacked')",
    '{"kind": "correct"}\n["correct", 1.0, true, ""]\n', "x" * 2_000_000,
]  # fmt: skip
MORE_HOSTILE = [
    *box("9^{9^{9^9}}", "2^{2^{2^{2^{2^2}}}}", "10^{1000000000}", "(10^9)!", "((10!)!)!",
    r"\binom{10^9}{5\cdot 10^8}", "9" * 100_000,
         "9" * 900, "{" * 5000 + "4" + "}" * 5000, r"\frac{1}{" * 300 + "4" + "}" * 300,
         r"\sqrt{" * 100 + "4" + "}" * 100,
         "x^{" * 60 + "2" + "}" * 60, r"\left(" * 400, "1+" * 400 + "1", "(x+1)^{1000000}", r"\prod_{k=1}^{10^9}k",
         r"\sum_{k=1}^{10^8}\sin k", r"\int_0^1 x^x e^{x^x} dx", r"\ud800", "\ud800", "\x00", "\u202e24",
         "4" + "\u0301" * 500),
    "9" * 100_000, "\\sqrt{" * 20_000, "$" * 5000, "answer is " * 2000, "\\boxed{" * 10_000, "\\" * 100_000,
    "{" * 100_000,
    "__import__('os').system('touch /tmp/tasks_hacked')", "answer: exec('1/0')", "().__class__.__bases__[0]",
    "%s%n%x" * 1000,
    '{"kind": "correct"}\n["correct", 1.0, true, ""]\n', "1/" * 3000, "(" * 5000 + "1" + ")" * 5000,
    "-" * 5000 + "7", "\n" * 100_000,
    "x" * 2_000_000, "\U0001f600" * 10_000, "".join(map(chr, range(0x300))),
]  # fmt: skip


def check_hostile(texts):
    """None is the answer 5, none outlasts the deadline (beside a replaced worker's start), none kills a worker."""
    with RewardPool(["math"], workers=1, timeout=3.0, end_of_thinking="</think>") as pool:
        for text in texts:
            start = time.monotonic()
            verdict = judge(pool, [("5", text)])[0]
            assert time.monotonic() - start < 3.0 + 10.0
            assert not verdict.correct
            assert verdict.kind in ("wrong", "unparsed", "verifier_error", "timeout"), text[:80]
        assert judge(pool, [("5", r"\boxed{5}")])[0].correct
        assert sum(pool.counts.values()) == len(texts) + 1
    assert not Path("/tmp/tasks_hacked").exists()


def test_hostile_completions_are_wrong_within_the_deadline_and_the_pool_recovers():
    check_hostile(HOSTILE)


@pytest.mark.slow
def test_more_hostile_completions():
    check_hostile(MORE_HOSTILE)


def test_hostile_answers_of_a_data_set_do_no_harm(pool):
    verdicts = judge(pool, [(text, r"\boxed{5}") for text in HOSTILE if "import" not in text])
    assert not any(verdict.correct for verdict in verdicts)


def test_random_completions_never_crash_a_worker(pool):
    rng = random.Random(0)
    pieces = ["\\frac{", "}", "{", "\\boxed{", "$", "1", "2", "x", "\\sqrt", "^", "_", "&", "\\\\", "\\left(",
        "\\right)", ",", "=",
              "\\begin{pmatrix}", "\\end{pmatrix}", "\\text{", "\ud83d", "%", "\\pi", "!", "\\cup", "[", ")",
              "answer is "]  # fmt: skip
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 30))) for _ in range(300)]
    kinds = [v.kind for v in judge(pool, [("12345", text) for text in texts])]
    assert set(kinds) <= {"wrong", "unparsed", "verifier_error", "timeout"}


# ---------------------------------------------------------------------------------------------------------------------
# The user's own functions


FUNCTIONS = '''
import ctypes, os, signal, subprocess, sys, time
from fractions import Fraction

def equal(prompt, completion, answer): return completion == answer
def number(prompt, completion, answer): return float(completion)
def pair(prompt, completion, answer): return 0.25, True
def nothing(prompt, completion, answer): return None
def text(prompt, completion, answer): return "yes"
def echo(prompt, completion, answer): return len(prompt), completion == answer["text"]
def loud(prompt, completion, answer):
    print("noise\\n" * 1000); os.write(1, b"more noise\\n"); return True
def fails(prompt, completion, answer):
    if completion == "bad": raise KeyError("the user's own mistake")
    if completion.startswith("quoted"): raise ValueError(completion)
    return True
def process(prompt, completion, answer):
    if completion == "pid": return os.getpid()
    if completion == "loop":
        while True: pass
    if completion == "sleep":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM}); time.sleep(1000)
    if completion == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if completion == "exit": os._exit(3)
    if completion == "leave": sys.exit(0)
    if completion == "segfault": ctypes.string_at(0)
    if completion == "memory": return len(bytearray(8 << 30))
    if completion == "file": open("big", "wb").write(bytes(100 << 20))
    if completion == "child":
        if os.fork() == 0: time.sleep(1000)
        time.sleep(1000)
    if completion == "replies": os.write(3, b"[" * 3_000_000); time.sleep(1000)
    if completion == "deep":
        def f(): return f()
        f()
    return True
'''


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def test_return_values():
    """True and False, a number, a pair, None; NumPy and torch scalars like Python's."""
    import numpy
    import torch

    assert verdict_of(True) == Verdict(1.0, True, "correct")
    assert verdict_of(False) == Verdict(-1.0, False, "wrong")
    assert verdict_of(numpy.bool_(False)) == Verdict(-1.0, False, "wrong")
    assert verdict_of(torch.tensor(0.5)) == Verdict(0.5, True, "correct")
    assert verdict_of(numpy.float32(-2)) == Verdict(-2.0, False, "wrong")
    assert verdict_of(0) == Verdict(0.0, False, "wrong")
    assert verdict_of((0.25, False)) == Verdict(0.25, False, "wrong")
    assert verdict_of((-1, 1)) == Verdict(-1.0, True, "correct")
    assert verdict_of(None) == Verdict(-1.0, False, "unparsed")
    for bad in ("yes", b"", {}, [1], [1, 2, 3], object()):
        with pytest.raises((TypeError, ValueError)):
            verdict_of(bad)
    for bad in (float("nan"), float("inf"), (float("nan"), True)):
        with pytest.raises(ValueError, match="finite"):
            verdict_of(bad)


def test_own_functions(functions, capfd):
    names = ["own:equal", "own:number", "own:pair", "own:nothing", "own:echo", "own:loud"]
    with RewardPool(names, workers=2, timeout=5, end_of_thinking="</think>") as pool:
        verdicts = pool.judge([
            Job("own:equal", "", "x </think> y", "x </think> y"), Job("own:equal", "", "a", "b"), Job("own:number",
            "", "-0.5", ""),
            Job("own:pair", "", "", ""), Job("own:nothing", "", "", ""), Job("own:loud", "", "", ""),
            Job("own:echo", "\ud800" * 7, "\udfff \x00 \u2028", {"text": "\udfff \x00 \u2028"}),
            Job("own:equal", "", "z" * 3_000_000, "z" * 3_000_000),
        ])  # fmt: skip
        assert verdicts == [(1.0, True, "correct"), (-1.0, False, "wrong"), (-0.5, False, "wrong"), (0.25, True,
            "correct"),
                            (-1.0, False, "unparsed"), (1.0, True, "correct"), (7.0, True, "correct"), (1.0, True,
                            "correct")]  # fmt: skip
        assert pool.counts == {"correct": 5, "wrong": 2, "unparsed": 1}
    assert capfd.readouterr().out == ""


def test_an_exception_stops_with_its_traceback(functions, capfd):
    with RewardPool(["own:fails"], workers=1, timeout=5) as pool:
        with pytest.raises(RewardError, match="the user's own mistake") as caught:
            pool.judge([Job("own:fails", "", "good", ""), Job("own:fails", "", "bad", "")])
        assert "own.py" in str(caught.value)
        assert "`reward_errors` zero" in str(caught.value)
        assert pool.judge([Job("own:fails", "", "good", "")])[0].correct


@pytest.mark.parametrize("errors", ["raise", "zero"])
def test_a_traceback_cannot_steer_the_terminal(functions, capfd, errors):
    """What the model wrote may be quoted in it: escape codes, carriage returns and direction marks come out as `?`."""
    with RewardPool(["own:fails"], workers=1, timeout=5, errors=errors) as pool:
        told = ""
        try:
            pool.judge([Job("own:fails", "", "quoted \x1b[2J\r\x07\u202e end", "")])
        except RewardError as error:
            told = str(error)
        told += capfd.readouterr().err
    assert "quoted ?[2J??? end" in told and not set("\x1b\r\x07\u202e") & set(told)


def test_reward_errors_zero_shows_the_first_and_goes_on(functions, capfd):
    with RewardPool(["own:fails", "own:text"], workers=2, timeout=5, errors="zero") as pool:
        verdicts = pool.judge([Job("own:fails", "", text, "") for text in ("bad", "good", "bad", "bad")])
        assert verdicts == [(0.0, False, "error"), (1.0, True, "correct"), (0.0, False, "error"), (0.0, False, "error")]
        assert pool.judge([Job("own:text", "", "", "")])[0].kind == "error"
        assert pool.counts == {"error": 4, "correct": 1}
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(("completion", "kind"), [
    ("loop", "timeout"), ("sleep", "timeout"), ("stop", "timeout"), ("child", "timeout"), ("exit", "crash"),
    ("leave", "crash"),
    ("segfault", "crash"), ("memory", "memory"), ("file", "error"), ("replies", "crash"), ("deep", "error"),
])  # fmt: skip
def test_a_worker_that_hangs_or_dies_is_replaced(functions, completion, kind):
    """The verdict is wrong (an exception: zero), within the deadline of 1 s; the next job is judged."""
    with RewardPool(["own:process"], workers=1, timeout=1.0, memory_mb=1024, errors="zero") as pool:
        first = int(pool.judge([Job("own:process", "", "pid", "")])[0].reward)
        start = time.monotonic()
        verdict = pool.judge([Job("own:process", "", completion, "")])[0]
        assert time.monotonic() - start < 4
        assert verdict == ((0.0 if kind == "error" else -1.0), False, kind)
        second = int(pool.judge([Job("own:process", "", "pid", "")])[0].reward)
        assert (second == first) == (kind == "error")
        assert pool.counts == {"correct": 2, kind: 1}
    for pid in (first, second):
        assert not Path(f"/proc/{pid}").exists()


def test_children_of_a_killed_worker_die_with_it(functions):
    with RewardPool(["own:process"], workers=1, timeout=0.5) as pool:
        group = pool._workers[0].process.pid
        pool.judge([Job("own:process", "", "child", "")])
    time.sleep(0.2)
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and group_of(pid) == group] == []


def group_of(pid):
    """The process group of a process that runs; None if it is gone or a zombie, which is dead and only not reaped."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


def test_one_hanging_job_delays_only_its_own_worker(functions):
    """20 quick jobs and one of 1.5 s on 2 workers: with one the sum, with two the hanging job alone."""
    with RewardPool(["own:process"], workers=2, timeout=1.5) as pool:
        done: list[float] = []
        hanging = threading.Thread(target=lambda: pool.judge([Job("own:process", "", "loop", "")]))
        start = time.monotonic()
        hanging.start()
        time.sleep(0.1)
        pool.judge([Job("own:process", "", "", "")] * 20)
        done.append(time.monotonic() - start)
        hanging.join()
    assert done[0] < 1.2


def test_several_threads_get_their_own_verdicts(functions):
    with RewardPool(["own:number"], workers=2, timeout=5) as pool:
        found: dict[int, list[float]] = {}

        def ask(k: int) -> None:
            found[k] = [v.reward for v in pool.judge([Job("own:number", "", str(k * 100 + i), "") for i in range(30)])]

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {k: [float(k * 100 + i) for i in range(30)] for k in range(6)}
        assert sum(pool.counts.values()) == 180


@pytest.mark.parametrize("jobs", [1, 3])
def test_closing_ends_a_running_call_and_every_process(functions, jobs):
    pool = RewardPool(["own:process"], workers=2, timeout=60)
    pids = [worker.process.pid for worker in pool._workers]
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            pool.judge([Job("own:process", "", "loop", "")] * jobs)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    pool.close()
    thread.join()
    assert time.monotonic() - start < 2
    assert "closed" in str(raised[0])
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    pool.close()


def test_workers_end_with_a_run_that_is_killed(functions, tmp_path):
    """SIGKILL leaves no time to clean up: an idle worker sees its stdin end,
    a hanging one uses up its processor time."""
    code = ("from tasks import judges as rewards; import threading, time\n"
            "pool = rewards.RewardPool(['own:process'], workers=2, timeout=0.25)\n"
            "print(*[w.process.pid for w in pool._workers], flush=True)\n"
            "pool.timeout = 60\n"
            "pool.judge([rewards.Job('own:process', '', 'loop', '')])\n")  # fmt: skip
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    pids = [int(pid) for pid in run.stdout.readline().split()]
    time.sleep(0.3)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 60  # processor time passes slowly on a busy machine
    alive = set(pids)
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if group_of(pid) is not None}
        time.sleep(0.1)
    assert len(pids) == 2
    assert not alive


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(("options", "words"), [
    ({"rewards": ["maths"]}, "`reward` must be one of math, exact or module:function"),
    ({"rewards": ["own:"]}, "`reward` must be one of"),
    ({"rewards": ["os.system('x'):y"]}, "`reward` must be one of"),
    ({"rewards": ["no_such_module:f"]}, "(?s)`reward` no_such_module:f cannot be loaded.*No module named"),
    ({"rewards": ["own:no_such"]}, "(?s)cannot be loaded.*has no function no_such"),
    ({"rewards": ["exact"], "errors": "ignore"}, "`reward_errors` must be raise or zero"),
    ({"rewards": ["exact"], "workers": 0}, "`reward_workers`"),
    ({"rewards": ["exact"], "timeout": 0.0}, "`reward_timeout`"),
])  # fmt: skip
def test_bad_options_are_refused_by_name(functions, options, words):
    with pytest.raises(ValueError, match=words):
        RewardPool(options.pop("rewards"), **options)


def test_a_worker_that_cannot_start_is_an_error_not_a_hang(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="does not start"):
        RewardPool(["exact"], workers=1)


def test_requests_and_replies_are_plain_json(functions, tmp_path):
    """The protocol itself: one line in, one line out, nothing that is pickled."""
    settings = {"rewards": ["exact"], "timeout": 5.0, "memory_mb": 512, "end_of_thinking": ""}
    run = subprocess.run([sys.executable, str(ROOT / "tasks" / "judge_process.py"), json.dumps(settings)], capture_output=True,
        text=True, timeout=30,
                         input=json.dumps(["exact", "", "a", "a"]) + "\n" + json.dumps(["exact", "", "a",
                         "b"]) + "\n")  # fmt: skip
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        ["ready", 0.0, False, ""], ["correct", 1.0, True, ""], ["wrong", -1.0, False, ""]]  # fmt: skip
    assert run.returncode == 0
