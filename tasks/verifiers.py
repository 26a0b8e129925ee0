"""Verifiers: is the answer in a completion the right one? Pure functions that read and compare text.

PROBLEM. The reward of ScaleRL (arXiv 2510.13786, section 2) comes from a program that compares the model's answer with
the known one, and the same answer has many spellings: `1/2`, `0.5`, `\\boxed{\\frac{1}{2}}`. A comparison that is too
strict costs rewards. One that is too lenient is worse: the policy learns whatever it lets pass.

IDEA. Two verifiers, each of which gives a verdict in one word:
    math    reads the content of the last `\\boxed{}`, or the last answer in the text if there is no box, and compares
            it with the known answer by the math-verify library, which parses both to SymPy
    exact   the text must equal the known answer, but for spaces around it
Both see only what follows the thinking (`after_thinking`). They may hang or exhaust the memory on text that a policy
wrote; judges.py runs them where that does no harm.

SIMPLIFIED. Of several boxes only the last is read. A bare word as the answer is compared as text: as algebra, `Evelyn`
would equal its anagrams. `2e+5`, if nothing else is written, is 200000; with spaces, 2e + 5 is a sum. math-verify is
lenient: it takes these for right, and a policy may learn them.
    units      5 km for 5 cm, 3 minutes for 3 hours; 10 for 10 % and 10 % for 10; 60 for 60 degrees
    bases      11 and 10_2 for 11_2 and 10: a base is ignored
    order      1, 2 for 2, 1, for (1, 2) and for {1, 2}; BA for AB; 5 for x = 5; 1, 2 for x = 1, y = 2; X for x
    decimals   0.0000002 for 0.0000001: numbers are compared to 6 decimals
If the known answer is a number, the answer must be one too: `26 - 80` is the question and not the answer -54. A policy
that was trained without this rule learned to repeat the question.

>>> math_kind("Adding up, it is \\\\boxed{0.5}.", "1/2"), math_kind("I do not know.", "1/2"), exact_kind(" 6 2 ", "6 2")
('correct', 'unparsed', 'correct')
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

# Longer answers count as none: math-verify's grammar takes more than linear time.
MAX_ANSWER_CHARS = 1_000
# Without a box, only this much of the end of the text is searched for an answer.
MAX_TAIL_CHARS = 2_000
# A number such as 1e-05 with nothing attached to it, which math-verify would read as 1 * e - 5. The exponent has at
# most three digits, so that the number written out stays short.
SCIENTIFIC = re.compile(r"(?<![^\s$=*])[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?=[.,;*]?(?:[\s$\\*]|$))")
WORD = re.compile("[A-Za-z]{3}[A-Za-z ]*|(?i:no)")  # such as `Evelyn`, which algebra reads as a product of letters
INTEGER = re.compile(r"-?\d+")  # compared as text
NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+|\d+/\d+|\\[dt]?frac\{-?\d+\}\{-?\d+\}|\\[dt]?frac\d\d)")
# math-verify reads `\ge 42` and `43 \to 42` as 42, but a relation does not give an answer that is none.
RELATION = re.compile(r"\\(?:[gl]eq?|neq?|[gl]t|to|(?:right|left)arrow)(?![a-z])|[<>≤≥≠→]")


def after_thinking(completion: str, end_of_thinking: str) -> str | None:
    """The text behind the first `end_of_thinking`; None if it never comes. All of it if `end_of_thinking` is empty."""
    if not end_of_thinking:
        return completion
    _, mark, answer = completion.partition(end_of_thinking)
    return answer if mark else None


def last_box(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` or `\\fbox{...}`, or None. Of nested boxes the inner one counts.

    One pass from the left: a scan from each opening would take quadratic time on `\\boxed{\\boxed{\\boxed{...`.
    """
    found, found_at, depth = None, -1, 0
    boxes: list[tuple[int, int]] = []  # (depth outside, where the content starts) of the boxes that are open
    # An escaped brace is no brace, and the line break `\\\\` escapes nothing.
    for mark in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if mark.group() == "}":
            depth -= 1
            if boxes and boxes[-1][0] == depth:
                start = boxes.pop()[1]
                if start > found_at:
                    found, found_at = text[start : mark.start()], start
        elif mark.group().endswith("{") and mark.group() != "\\{":
            if mark.group() != "{":
                boxes.append((depth, mark.end()))
            depth += 1
    return found


def decimals(text: str) -> str:
    """`text` with 1e-05 written as 0.00001."""
    return SCIENTIFIC.sub(lambda number: f"{Decimal(number.group()):f}", text)


def plain(answer: str) -> str:
    """An answer without what does not change it: dollars and `\\text{}` around it, a full stop, outer spaces, extra
    zeros, commas between thousands. 1e-05 becomes 0.00001."""
    text = answer.strip().rstrip(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    text = re.sub(r"^\\(?:text|mathrm|textbf)\{([^{}\\]*)\}$", r"\1", text).strip()
    # TeX writes thousands as 1{,}234 or 1\,234.
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))", "", text)
    text = decimals(text) if len(text) <= MAX_ANSWER_CHARS else text  # 1e999 grows to 1,000 digits
    # 1,234 and +007 as 1234 and 7, without int(): Python refuses more than 4,300 digits.
    if re.fullmatch(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)", text):
        digits = text.lstrip("+-").replace(",", "").lstrip("0") or "0"
        return "-" + digits if text[0] == "-" and digits != "0" else digits
    return text


def exact_kind(text: str | None, answer: str) -> str:
    """`correct` or `wrong`: is `text` the answer, but for spaces around it? `wrong` if `text` is None."""
    return "correct" if text is not None and text.strip() == answer.strip() else "wrong"


def math_kind(text: str | None, answer: str, soft_timeout: int = 2) -> str:
    """Whether the answer in `text` is `answer`, as math: `correct`, `wrong`, `unparsed` (`text` has no answer),
    `bad_answer` (math-verify cannot read `answer`), `timeout`, or `verifier_error` (the library raised).

    With `text` None it only says whether `answer` can be read: `bad_answer`, or `wrong` if it can. Numbers are compared
    to 6 decimals; sets, intervals, matrices, equations and expressions are understood. Parsing the answer, parsing the
    text and comparing may take `soft_timeout` seconds each, by an alarm that interrupts Python code (so this runs in
    the main thread only).
    """
    from math_verify.errors import TimeoutException

    wanted, box = plain(answer), last_box(text or "")
    given = plain(box if box is not None else text or "")
    if not wanted:
        return "bad_answer"
    # Without regard to case, since math-verify does not tell x from X either.
    if text is not None and given.casefold() == wanted.casefold():
        return "correct"
    if WORD.fullmatch(wanted):
        return "unparsed" if text is not None and box is None else "wrong"
    if INTEGER.fullmatch(wanted) and (text is None or INTEGER.fullmatch(given)):
        return "wrong"
    if box is not None and RELATION.search(given) and not RELATION.search(wanted):
        return "wrong"
    try:
        gold = parse_math(rf"\boxed{{{wanted}}}", soft_timeout) if len(wanted) <= MAX_ANSWER_CHARS else ()
        if not gold or text is None:
            return "wrong" if gold else "bad_answer"
        if box is None:
            found = parse_math(decimals(text[-MAX_TAIL_CHARS:])[-MAX_TAIL_CHARS:], soft_timeout)
        else:
            found = parse_math(rf"\boxed{{{given}}}", soft_timeout) if len(given) <= MAX_ANSWER_CHARS else ()
        if found is None:
            return "verifier_error"
        if not found:
            return "unparsed"
        equal = same(gold, found, soft_timeout)
        if equal and NUMBER.fullmatch(wanted) and any(is_unfinished(x, given, wanted) for x in found):
            return "wrong"
        return "verifier_error" if equal is None else "correct" if equal else "wrong"
    except TimeoutException:
        return "timeout"


@functools.lru_cache(maxsize=256)  # a group's completions share one answer
def parse_math(text: str, soft_timeout: int) -> tuple[Any, ...] | None:
    """The SymPy objects that math-verify finds in `text`: () if there are none, None if it raises. Its TimeoutException
    passes through."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:
        found = parse(text, configs, fallback_mode="no_fallback", parsing_timeout=soft_timeout, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # SymPy and its grammar raise all kinds: RecursionError, TypeError, IndexError, ...
        return None
    return tuple(found)


def is_unfinished(value: Any, text: str, wanted: str) -> bool:
    """Whether the number `wanted`, which `text` gives, is still to be computed, as 26 - 80 for -54; then repeating the
    question would be right. Finished are 5, 14/3, 5 * 10^3, 10^6 and 12 %, and of an equation its right side counts.

    math-verify leaves sums, products and powers as they stand, but computes \\frac{84}{2}: an integer must be in the
    text.
    """
    from sympy import Abs, Add, Equality, Function, Integer, Mul, Number, Pow, preorder_traversal

    value = value.rhs if isinstance(value, Equality) else value
    if isinstance(value, Integer):
        return str(abs(value)) not in re.sub(r"(?<=\d)(?:\{,\}|\\[,!]|,)(?=\d{3})", "", decimals(text))
    for part in preorder_traversal(value):
        if isinstance(part, Add | Abs | Function):
            return True
        if isinstance(part, Pow) and part.base != 10 and (part.exp != -1 or INTEGER.fullmatch(wanted)):
            return True
        if isinstance(part, Mul) and sum(isinstance(x, Number) and abs(x) != 1 for x in part.args) > 1:
            return True
    return False


def same(gold: Sequence[Any], found: Sequence[Any], soft_timeout: int) -> bool | None:
    """math-verify's comparison; None where it raises. Its TimeoutException passes through."""
    from math_verify import verify

    try:
        return bool(verify(list(gold), list(found), timeout_seconds=soft_timeout, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # as above
        return None


def warm_up() -> None:
    """Imports math-verify and compares a few answers, so that what SymPy loads on first use costs no deadline."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text, answer in ((r"\boxed{(x+1)^2}", "x^2+2x+1"), (r"\boxed{(1,2]}", "[1,2)"), (r"$x = 3$", r"\frac{1}{3}")):
        math_kind(text, answer, soft_timeout=30)
