r"""Verifiers: is the answer in a completion the right one? Pure functions that read and compare text.

PROBLEM. The reward of ScaleRL (arXiv 2510.13786, section 2) comes from a program that compares the model's answer with
the known one, and the same answer has many spellings: `1/2`, `0.5`, `\boxed{\frac{1}{2}}`. A comparison that is too
strict costs rewards. One that is too lenient is worse: the policy learns whatever it lets pass.

IDEA. Two verifiers, and the verdict of each is one word:
    exact   the text must equal the known answer, but for spaces around it
    math    asks two questions. What is the final answer of this text (answers.py: a table of the kinds)? And is it the
            known one: the library math-verify parses both to SymPy and compares. A known number asks for a finished
            one, and a bare word is compared as text: as algebra, `Evelyn` would equal its anagrams
Both see only what follows the thinking (`after_thinking`). They may hang on text that a policy wrote, or exhaust the
memory; judges.py runs them where that does no harm.

SIMPLIFIED. math-verify is lenient: it takes these for right, and a policy may learn them.
    units        5 km for 5 cm, 5 oranges for 5 apples, 5', 5k and 5th for 5; 10 for 10 % and back; 12 degrees for 12 %
    bases        11 for 11_2: a base of one side only is ignored
    order        1, 2 for 2, 1, for (1, 2) and for {1, 2}; BA for AB; 5 for x = 5; 1, 2 for x = 1, y = 2; X for x
    decimals     3.1415927 for \pi: compared to 6 places, small ones to .1 %; 100200 for the list 100,200
    prose        "Is it 5?", "We get 5!", "5 -" for 5; 1 < x < 2 for the point (1, 2). Words beside a number that change
                 it or take it back (twice, except, below zero) are on a list in answers.py; others go unseen: "nearly
                 5", "the conjugate of 5", "I doubt that it is 5" for 5
    expressions  the question is its own answer: (x+1)^2 - x^2 for 2x+1, \sqrt{50} for 5\sqrt{2}, 6:4 for 3:2,
                 0.4 for 12:30, \int 2x\,dx for x^2, \arctan 1 for \pi/4, 2 + 3 for x + y = 5
Refused, too: \approx 5, 0.\overline{3}, 5^{th}, x < 1 or x > 2 for a union, 2i\sqrt{3} for 2\sqrt{3}i, \frac\pi2,
\sin t (a last t is read as tons), [1,2[.

>>> math_kind(r"Adding up, it is \boxed{0.5}.", "1/2"), math_kind("I do not know.", "1/2"), exact_kind(" 6 2 ", "6 2")
('correct', 'unparsed', 'correct')
"""

from __future__ import annotations

import functools
import logging
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.answers import (
    INTEGER,
    MAX_ANSWER_CHARS,
    VARIABLE,
    answer_of,
    finished_number,
    finished_only,
    is_formula,
    known_answer,
)

HOUR = 3_600  # seconds: math-verify's own limit, which is not to come first
WORD = re.compile("[A-Za-z]{3}[A-Za-z ]*|(?i:no)")  # such as `Evelyn`, which algebra reads as a product of letters
CHOICE = re.compile(r"\(?[A-H]\)?")  # one of several answers
ALGEBRA = re.compile(  # 2B, B_2, B + 1, -B, B' are no choice of B
    r"\d[A-Ha-h]\b|[_^+] *[A-Ha-h]\b|\b[A-Ha-h](?:\d| *[_^+=])|[-!][A-H]|\b(?<!')[A-H]'"
)
BASE = re.compile(r"[\dA-F]_\{?(\d+)\}?$")  # 2A_{16}
DOTS = r"\ldots"
# math-verify reads `\ge \pi` as \pi, but unless an interval is asked for, a relation gives no answer.
RELATION = re.compile(r"\\(?:[gl]eq?|neq?|[gl]t|to|(?:right|left)arrow)(?![a-z])|[<>≤≥≠→]")
CAPITALS = re.compile(r"\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)\b")  # else \Pi would be \pi
LIST = re.compile(  # 3, 4 or x=3, y=4
    rf"^[^a-z]*\d[,;](?: +|(?!\d{{3}}\b))[-\d]|^{VARIABLE} *=[^=]*[,;] *{VARIABLE} *="
)
NAMED = re.compile(r"(?<![a-z\\])([a-z]) *= *")


def after_thinking(completion: str, end_of_thinking: str) -> str | None:
    """The text behind the first `end_of_thinking`; None if it never comes. All of it if `end_of_thinking` is empty."""
    if not end_of_thinking:
        return completion
    _, mark, answer = completion.partition(end_of_thinking)
    return answer if mark else None


def exact_kind(text: str | None, answer: str) -> str:
    """`correct` or `wrong`: is `text` the answer, but for spaces around it? `wrong` if `text` is None."""
    return "correct" if text is not None and text.strip() == answer.strip() else "wrong"


def math_kind(text: str | None, answer: str, soft_timeout: int = 2) -> str:
    """Whether the answer in `text` is `answer`, as math: `correct`, `wrong`, `unparsed` (`text` has no answer),
    `bad_answer` (math-verify cannot read `answer`), `timeout`, or `verifier_error` (the library raised).

    With `text` None it only says whether `answer` can be read: `bad_answer`, or `wrong` if it can. Numbers are compared
    to 6 decimals; sets, intervals, matrices, equations and expressions are understood. Parsing the answer, parsing the
    text and comparing may take `soft_timeout` seconds of processor time each (see `time_limit`).
    """
    from math_verify.errors import TimeoutException

    expected = known_answer(answer)
    if not expected:
        return "bad_answer"
    candidate, prose = answer_of(text) if text is not None else ("", None)
    refused = "wrong" if prose is None else "unparsed"
    if prose is None or is_formula(candidate):
        if text is not None and set(CAPITALS.findall(candidate)) != set(CAPITALS.findall(expected)):
            return "wrong"
    # Without regard to case, since math-verify does not tell x from X either.
    if text is not None and without_text(candidate).casefold() == without_text(expected).casefold():
        return "correct"
    if len({*BASE.findall(expected), *BASE.findall(candidate)}) > 1:
        return "wrong"
    if DOTS in expected or (DOTS in candidate and prose is None):
        # A sequence with dots is text: which terms the dots stand for is nowhere written.
        return "correct" if candidate.replace(" ", "") == expected.replace(" ", "") else "wrong"
    if CHOICE.fullmatch(expected):
        if ALGEBRA.search(candidate):
            return refused
        letter = re.sub(r"\\text\w*|(?i:option|choice)|[^A-Za-z]", "", candidate)
        return "correct" if letter.casefold() == expected.strip("()").casefold() else refused
    if WORD.fullmatch(expected):
        return refused
    if INTEGER.fullmatch(expected) and (text is None or INTEGER.fullmatch(candidate)):
        return "wrong"
    if len(expected) > MAX_ANSWER_CHARS:
        return "bad_answer"
    try:
        kind = parsed_kind(None if text is None else candidate, prose, expected, soft_timeout)
    except TimeoutException:
        return "timeout"
    if kind == "wrong" and text is not None and not re.search(r"%\W*%", text):
        # math-verify takes 35 for 35 %, but not 12.5 for 12.5 %.
        bare, known = (re.sub(r"\\?%(?! *\w)| percent\b", "", part) for part in (text, answer))
        if (bare, known) != (text, answer):
            return math_kind(bare, known, soft_timeout)
    return kind


def without_text(answer: str) -> str:
    """`12:30 PM` of `12:30 \\text{ PM}`."""
    return re.sub(r" *\\text\w* *\{ *([^{}]*?) *\} *", r" \1 ", answer).strip()


def parsed_kind(candidate: str | None, prose: str | None, expected: str, soft_timeout: int) -> str:
    """The rest of `math_kind`, by what math-verify reads. `candidate` and `expected` are the plain forms of the answer
    and of the known one, `prose` is as in `answer_of`. math-verify's TimeoutException passes through."""
    from sympy import Equality

    as_formula = candidate is not None and (prose is None or is_formula(candidate))
    offered, known = in_order_of_names(candidate, expected) if candidate and as_formula else (candidate, expected)
    known_number = finished_number(known)
    known_formula = known if known_number is None else with_last_side(known, known_number)
    gold = parse_math(rf"\boxed{{{known_formula}}}", soft_timeout)
    if not gold:
        return "bad_answer"
    if offered is None:
        return "wrong"
    if as_formula and len(offered) > MAX_ANSWER_CHARS:
        return "unparsed"
    value = gold[0].rhs if isinstance(gold[0], Equality) else gold[0]
    asked = number_asked_for(gold[0], value, known_formula, known_number)
    integer = asked is not None and re.fullmatch(r"-?\d+(?:\.0*)?", asked) is not None
    formula = formula_offered(offered, known_formula, value, asked, integer) if as_formula else None
    if formula is not None:
        readable = rf"\boxed{{{formula}}}"
    elif prose is None or (len(offered) <= MAX_ANSWER_CHARS and LIST.search(offered)):
        return "wrong"  # a list is not its last number
    else:
        readable = prose if asked is None else finished_only(prose, integer)
    parsed = parse_math(readable, soft_timeout)
    if parsed is None:
        return "verifier_error"
    if not parsed:
        return "unparsed"
    equal = same(gold, parsed, soft_timeout)
    if equal is None:
        return "verifier_error"
    return "correct" if equal and close(gold[0], parsed[0]) else "wrong"


def in_order_of_names(candidate: str, expected: str) -> tuple[str, str]:
    """(3, 4) and (3, 4) of `3, 4` where `x=3, y=4` is known: the order is that of the names."""
    names = NAMED.findall(expected)
    if "=" in candidate or not len(set(names)) == len(names) > 1:
        return candidate, expected
    return f"({candidate.strip('() ')})", f"({NAMED.sub('', expected)})"


def with_last_side(formula: str, number: str) -> str:
    """`formula` with `number` behind its last `=`, or in its place if it has none."""
    return "=".join([*formula.split("=")[:-1], number])


def number_asked_for(gold: Any, value: Any, known_formula: str, known_number: str | None) -> str | None:
    """The number that an answer must be, finished; None if anything else is asked for. `value` is gold's last side."""
    from sympy import Add, Equality, Number, Pow

    if isinstance(gold, Equality) and gold.free_symbols and isinstance(gold.lhs, Add | Pow):
        return None  # x + y = 5 asks for an equation
    if known_number is None and isinstance(value, Number) and len(re.findall(r"\d+(?:\.\d+)?", known_formula)) == 1:
        return str(value)  # `about 42`
    return known_number


def formula_offered(offered: str, known_formula: str, value: Any, asked: str | None, integer: bool) -> str | None:
    """`offered` as math-verify is to read it in a box; None if it must not: a relation where none is known, or no
    finished number where one is asked for."""
    from sympy import Interval, Union

    if RELATION.search(offered) and not RELATION.search(known_formula) and not isinstance(value, Interval | Union):
        return None
    if asked is None:
        return offered
    finished = finished_number(offered, integer)
    return with_last_side(offered, finished) if finished is not None and "=" in known_formula else finished


@functools.lru_cache(maxsize=256)  # a group's completions share one answer
def parse_math(text: str, soft_timeout: int) -> tuple[object, ...] | None:
    """The SymPy objects that math-verify finds in `text`: () if there are none, None if it raises. Its TimeoutException
    passes through."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    with time_limit(soft_timeout):
        objects = or_none(parse, text, configs, fallback_mode="no_fallback", parsing_timeout=HOUR)
    return None if objects is None else tuple(objects)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises math-verify's TimeoutException after `seconds` of processor time in the block, in the main thread only.
    Its own limit is of the clock: on a busy machine right answers would be `timeout`."""
    from math_verify.errors import TimeoutException

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutException

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def or_none(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function of math-verify returns; None if SymPy or its grammar raise, as they do in all kinds."""
    try:
        return call(*args, raise_on_error=True, **options)
    except MemoryError:
        raise
    except Exception:
        return None


def same(gold: Sequence[object], parsed: Sequence[object], soft_timeout: int) -> bool | None:
    """math-verify's comparison; None where it raises. Its TimeoutException passes through."""
    from math_verify import verify

    # Twelve digits and not fifteen: 2^{0.5}, of floats, differs from \sqrt{2} in the sixteenth.
    options = {"timeout_seconds": HOUR, "numeric_precision": 12, "allow_set_relation_comp": True}
    with time_limit(soft_timeout):
        return or_none(verify, list(gold), list(parsed), **options)


def close(gold: Any, parsed: Any) -> bool:
    """Whether two numbers are equal relative to their size, which math-verify does not ask: to it, whatever is below
    1e-12 is 0. True for what are no numbers, and for percent, since 10 % is taken for 10."""
    from sympy import Expr, Float, UnevaluatedExpr, true

    both = (gold, parsed)
    for value in both:
        if not isinstance(value, Expr) or not value.is_number or value.is_infinite or value.has(UnevaluatedExpr):
            return True
    tolerance = 1e-3 if any(value.has(Float) for value in both) else 1e-40
    x, y = (value.evalf(60) for value in both)
    return (abs(x - y) > tolerance * abs(x)) is not true


def warm_up() -> None:
    """Imports math-verify and compares a few answers, so that what SymPy loads on first use costs no deadline."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text, answer in ((r"\boxed{(x+1)^2}", "x^2+2x+1"), (r"\boxed{(1,2]}", "[1,2)"), (r"$x = 3$", r"\frac{1}{3}")):
        math_kind(text, answer, soft_timeout=30)
