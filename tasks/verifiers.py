"""Verifiers: is the answer in a completion the right one? Pure functions that read and compare text.

PROBLEM. The reward of ScaleRL (arXiv 2510.13786, section 2) comes from a program that compares the model's answer with
the known one, and the same answer has many spellings: `1/2`, `0.5`, `\\boxed{\\frac{1}{2}}`. A comparison that is too
strict costs rewards. One that is too lenient is worse: the policy learns whatever it lets pass.

IDEA. Two verifiers, and the verdict of each is one word:
    math    reads the content of the last `\\boxed{}`, or the last answer in the text if there is no box, and compares
            it with the known answer by the math-verify library, which parses both to SymPy
    exact   the text must equal the known answer, but for spaces around it
Both see only what follows the thinking (`after_thinking`). They may hang on text that a policy wrote, or exhaust the
memory; judges.py runs them where that does no harm.

SIMPLIFIED. Of several boxes only the last is read. A bare word as the answer is compared as text: as algebra, `Evelyn`
would equal its anagrams. `2e+5`, if nothing else is written, is 200000; with spaces, 2e + 5 is a sum. math-verify is
lenient: it takes these for right, and a policy may learn them.
    units        5 km for 5 cm, 3 minutes for 3 hours, 5 oranges for 5 apples, 5' and 5k for 5; 10 for 10 % and 10 % for
                 10; 60 for 60 degrees, 12 degrees for 12 %
    bases        11 for 11_2: a base of the known answer is ignored
    order        1, 2 for 2, 1, for (1, 2) and for {1, 2}; BA for AB; 5 for x = 5; 1, 2 for x = 1, y = 2; X for x
    decimals     3.1415927 for \\pi: compared to 6 places, small ones to .1 %; 100200 for the list 100,200
    sets         1 < x < 2 for the point (1, 2)
    prose        "Is it 5?" and "5 -" for 5: only `not`, `wrong`, `step` and the like beside a number take it back
    expressions  the question is its own answer: (x+1)^2 - x^2 for 2x+1, \\sqrt{50} for 5\\sqrt{2}, {1, 1+1} for {1, 2},
                 6:4 for 3:2, \\int 2x\\,dx for x^2, \\arctan 1 for \\pi/4, 2 + 3 for x + y = 5
If the known answer is a number, the answer must be a finished one: a decimal or a fraction (but 42 for 84/2), a mixed
number, one of these times a power of ten or percent. A policy that was trained without this rule learned to repeat the
question. The rule is strict: \\approx 5, 0.\\overline{3}, 5^{th}, and prose that ends in another calculation are wrong.
Refused, too: x < 1 or x > 2 for a union, 2i\\sqrt{3} for 2\\sqrt{3}i, \\frac\\pi2, \\sin t (a last t is
read as tons), [1,2[, and the letter of a choice in prose.

>>> math_kind("Adding up, it is \\\\boxed{0.5}.", "1/2"), math_kind("I do not know.", "1/2"), exact_kind(" 6 2 ", "6 2")
('correct', 'unparsed', 'correct')
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

# Longer answers count as none: math-verify's grammar takes more than linear time.
MAX_ANSWER_CHARS = 1_000
HOUR = 3_600  # seconds: math-verify's own limit, which is not to come first
# Without a box, only this much of the end of the text is searched for an answer.
MAX_TAIL_CHARS = 2_000
# A number such as 1e-05 with nothing attached to it, which math-verify would read as 1 * e - 5. The exponent has at
# most three digits, so that the number written out stays short.
SCIENTIFIC = re.compile(r"(?<![^\s$=*])[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?=[.,;*]?(?:[\s$\\*]|$))")
FUNCTIONS = "ln|log|exp|(?:arc)?(?:sin|cos|tan|cot)"
WORD = re.compile("[A-Za-z]{3}[A-Za-z ]*|(?i:no)")  # such as `Evelyn`, which algebra reads as a product of letters
CHOICE = re.compile(r"\(?[A-H]\)?")  # one of several answers
DOTS = r"\ldots"
INTEGER = re.compile(r"-?\d+")  # compared as text
# math-verify reads `\ge \pi` as \pi, but unless an interval is asked for, a relation gives no answer.
RELATION = re.compile(r"\\(?:[gl]eq?|neq?|[gl]t|to|(?:right|left)arrow)(?![a-z])|[<>≤≥≠→]")
# Spellings that math-verify does not read, and what it reads instead, in this order.
SPELLINGS: list[tuple[str, Any]] = [
    ("([¼-¾⅐-⅞])", r" \1 "),
    ("([²³])", r"^\1"),
    (r"[^\x00-\x7f]+", lambda match: unicodedata.normalize("NFKC", match[0])),  # full-width forms, ½ as 1⁄2
    (r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}"),
    (r"(?:\\(?:text|mathrm))? *\{\s*[-−–]\s*\}|[−–]", "-"),
    (r"\\[lc]?dots[a-z]?(?![a-z])|\.{3}", r"\\ldots "),
    # TeX writes thousands as 1{,}234, 1,\!234, 1\,234.
    (r"(?<=\d)(?:\{[, ]\}|,?\\[,! ] ?|\\[;:]|\\thinspace ?|~)(?=\d{3}(?!\d))", ""),
    (r"^([+-]?\d{1,3}),(\d{3})(?= ?\\(?:pi|sqrt))", r"\1\2"),
    (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![a-z]))|\\\\\s*$|~|\s+", " "),
    (r"\\(?:(?:text)?color *\{[a-z]+\}|phantom *\{\w*\}|(?:displaystyle|textstyle|[lL]arge|bf|rm)(?![a-z]))", ""),
    (r"\\(?:bm|boldsymbol|underline|ensuremath) *(?=\{)", ""),
    (r"\{ *([^{}]*?) *\\over(?![a-z]) *([^{}]*?) *\}", r"\\frac{\1}{\2}"),
    (r"\\(?:nice|s)frac", r"\\frac"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"°|\\degree(?![a-z])|\^\{?(?:\\text *\{o\}|o)\}?", r"^\\circ "),
    (r"\\text *\{ *(?:percent|\\?%) *\}", r"\\%"),
    ("∞", r"\\infty "),
    (r"\\varnothing", r"\\emptyset"),
    (r"√ *(\d+|[a-z])", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (rf"\\(?:mathrm|text|operatorname) *\{{ *({FUNCTIONS}) *\}}", r"\\\1 "),
    (r"\\(?:mathrm|text|operatorname) *\{ *([ie]) *\}", r"\1"),
    (r"(?<=[\d)}]) *(?:\\cdot)? *i(?![a-z])", "i"),
    (r"(?<=\d) +\([A-Za-z]{2}[A-Za-z ]*\)$", ""),  # a unit in brackets
    (r"^\\\{ *[a-z] *(?:\\mid|\||:) *(.*)\\\}$", r"\1"),  # {x | x > 3}
    (r"(?<![\\\w^}\] {])\{(-?\d+|:)\}|(?<=\d)\{(:)\}", r"\1\2"),
    (r"^\{+([^{}]*)\}+$|^\\[(\[](.*)\\[)\]]$", r"\1\2"),
]
IN_DOLLARS = re.compile(r"^\$+(.+?)\$+$", re.DOTALL)
UNIT = r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}\d]*)\}(?:\^\{?-?\d\}?)?"
# Words that change a number or take it back, and so are no unit.
NO_UNIT = re.compile(
    r"\b(?:not|wrong|false|squared|cubed|factorial|dozen|hundred|(?:thous|mill|bill|trill)\w+|or|more|most|least|than|mod)\b"
)
# A finished number: sign, decimal or fraction or mixed number, power of ten, percent; with degrees or a unit.
NUMBER = re.compile(
    r"([+-]?) ?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+|(?:\d+ ?)?\\frac ?\{[+-]?\d+\} ?\{[+-]?\d+\})"
    r"(?: ?(?:\\cdot|\\times|[*×·]) ?10 ?\^ ?\{?([+-]?\d{1,3})\}?)? ?(\\?%)?"
    r"(?: ?\^ ?\{?\\circ\}? ?[CF]?| [A-Za-z]{3,}[A-Za-z ]*)?"
)
# Before the last `=`, this is more than one side of an equation: of `x=3, y=4`, `x=3 or x=4`, `x !=4`.
NO_SIDE = re.compile(r"[,;](?![^()]*\))|\b(?:or|and|not|lor|vee|quad)\b|\\\\|[!<>≠]\s*$|\\neq?\b")
# A calculation in prose: words that hold a digit or TeX (but not Step2, m/s^2), or only signs, and what joins them.
MATH = r"(?<!\S)(?![A-Za-z][A-Za-z/]*[\^_]?\d*[.,;:?!]*(?!\S))(?:\S*[\d\\√∑∫]\S*|[]()[{}=+*/^|<>×÷·&%]+[.,;:?!]*(?!\S))"
JOINT = r"[-−–x:]|(?:percent |divided |multiplied |out )?(?:by|of)|mod|plus|minus|times|over|to(?: the power of)?|from"
GAP = rf"(?:(?<![.,;:?!])[^\S\n]+(?:(?:{JOINT})[^\S\n]+)?|,?[^\S\n]+(?:and|or)[^\S\n]+)"
# What takes a number in prose back, or only counts with it.
DENIED = re.compile(r"(?:\bnot|n't|\bstep|\bquestion|\bproblem|\bcase)[ :]*$", re.IGNORECASE)
DENIES = re.compile(r" (?:is|was) (?:not|n't|wrong|false|incorrect)\b")
CALCULATION = re.compile(f"{MATH}(?:{GAP}{MATH})*")


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
    content: str | None = None
    content_at = -1
    depth = 0
    boxes: list[tuple[int, int]] = []  # (depth outside, where the content starts) of the boxes that are open
    # An escaped brace is no brace, and the line break `\\\\` escapes nothing.
    for mark in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\boxed ([^\s{}$\\]+)|\\.|[{}]", text, re.DOTALL):
        if mark[1]:
            content, content_at = mark[1], mark.start(1)
        elif mark.group() == "}":
            depth -= 1
            if boxes and boxes[-1][0] == depth:
                start = boxes.pop()[1]
                if start > content_at:
                    content, content_at = text[start : mark.start()], start
        elif mark.group().endswith("{") and mark.group() != "\\{":
            if mark.group() != "{":
                boxes.append((depth, mark.end()))
            depth += 1
    return content


def decimals(text: str) -> str:
    """`text` with 1e-05 written as 0.00001."""
    return SCIENTIFIC.sub(lambda number: f"{Decimal(number.group()):f}", text)


def plain(answer: str) -> str:
    """An answer without what does not change it: dollars and `\\text{}` around it, a full stop, outer spaces, extra
    zeros, commas between thousands; and in the spelling that math-verify reads: 1e-05 as 0.00001, `½` as TeX."""
    text = IN_DOLLARS.sub(r"\1", answer.strip())
    short = len(text) <= MAX_ANSWER_CHARS  # 1e999 grows to 1,000 digits
    for spelling, usual in SPELLINGS if short else []:
        text = re.sub(spelling, usual, text.strip(" "))
    text = IN_DOLLARS.sub(r"\1", text.strip().rstrip(".,;").strip()).strip()
    if short:
        styles = r"text\w*|math(?:rm|bf|it|sf|tt)|emph|mbox"
        text = re.sub(rf"^\\(?:{styles})\s*\{{([^{{}}\\]*)\}}$", r"\1", text).rstrip(" .")
        text = decimals(text.strip(" "))
    # 1,234 and +007 as 1234 and 7, without int(): Python refuses more than 4,300 digits.
    if re.fullmatch(r"[+-]?(?:\d{1,3}(?:[, ]\d{3})+|\d+)", text):
        digits = re.sub("[+, -]", "", text).lstrip("0") or "0"
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
    text and comparing may take `soft_timeout` seconds of processor time each (see `time_limit`).
    """
    from math_verify.errors import TimeoutException

    answer_box = last_box(answer)  # a worked solution gives its answer in a box
    expected = plain(answer if answer_box is None else answer_box)
    box = last_box(text or "")
    candidate = plain(text or "" if box is None else box)
    if not expected:
        return "bad_answer"
    # Without regard to case, since math-verify does not tell x from X either.
    if text is not None and candidate.casefold() == expected.casefold():
        return "correct"
    if DOTS in expected + candidate and (box is not None or DOTS in expected):
        # A sequence with dots is text: which terms the dots stand for is nowhere written.
        return "correct" if candidate.replace(" ", "") == expected.replace(" ", "") else "wrong"
    if CHOICE.fullmatch(expected):
        letter = re.sub(r"\\text\w*|[^A-Za-z]", "", candidate)
        if letter.casefold() == expected.strip("()").casefold():
            return "correct"
        return "unparsed" if text is not None and box is None else "wrong"
    if WORD.fullmatch(expected):
        return "unparsed" if text is not None and box is None else "wrong"
    if INTEGER.fullmatch(expected) and (text is None or INTEGER.fullmatch(candidate)):
        return "wrong"
    if len(expected) > MAX_ANSWER_CHARS:
        return "bad_answer"
    try:
        return parsed_kind(text, box, candidate, expected, soft_timeout)
    except TimeoutException:
        return "timeout"


def parsed_kind(text: str | None, box: str | None, candidate: str, expected: str, soft_timeout: int) -> str:
    """The rest of `math_kind`, by what math-verify reads. `candidate` is the plain form of the answer in `text`, which
    has a `box` or none; `expected` is that of the known answer. math-verify's TimeoutException passes through."""
    from sympy import Add, Equality, Interval, Number, Pow, Union

    expected_number = number(expected)
    if expected_number is not None:
        expected = "=".join([*expected.split("=")[:-1], expected_number])
    gold = parse_math(rf"\boxed{{{expected}}}", soft_timeout)
    if not gold:
        return "bad_answer"
    if text is None:
        return "wrong"
    value = gold[0].rhs if isinstance(gold[0], Equality) else gold[0]
    if isinstance(gold[0], Equality) and gold[0].free_symbols and isinstance(gold[0].lhs, Add | Pow):
        expected_number = None  # x + y = 5 asks for an equation
    elif expected_number is None and isinstance(value, Number) and len(re.findall(r"\d+(?:\.\d+)?", expected)) == 1:
        expected_number = str(value)  # `about 42`
    integer = expected_number is not None and re.fullmatch(r"-?\d+(?:\.0*)?", expected_number) is not None
    if box is None:
        tail = decimals(text[-MAX_TAIL_CHARS:])[-MAX_TAIL_CHARS:]
        readable = tail if expected_number is None else finished_only(tail, integer)
    elif len(candidate) > MAX_ANSWER_CHARS:
        return "unparsed"
    else:
        relation = RELATION.search(candidate) and not RELATION.search(expected)
        if relation and not isinstance(value, Interval | Union):
            return "wrong"
        if expected_number is not None:
            finished = number(candidate, integer)
            if finished is None:
                return "wrong"
            candidate = "=".join([*candidate.split("=")[:-1], finished]) if "=" in expected else finished
        readable = rf"\boxed{{{candidate}}}"
    parsed = parse_math(readable, soft_timeout)
    if parsed is None:
        return "verifier_error"
    if not parsed:
        return "unparsed"
    equal = same(gold, parsed, soft_timeout)
    if equal is None:
        return "verifier_error"
    return "correct" if equal and close(gold[0], parsed[0]) else "wrong"


def number(text: str, integer: bool = False) -> str | None:
    """The finished number that `text` is, without unit, currency and `x =`; else None, as for 26 - 80. It is a list of
    what is allowed: math-verify computes whatever it can read. If `integer`, a fraction is not finished, as 84/2."""
    from math_verify.parser import NormalizationConfig, normalize_latex

    if NO_UNIT.search(text):
        return None
    text = re.sub(rf"(?:(?:[ /]|\\cdot)*{UNIT})+$", "", text)
    text = normalize_latex(text, NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none"))
    side, _, text = re.sub("[€£¥₹]", "", text).rpartition("=")
    text = re.sub(r"^\((.*)\)$", r"\1", text.strip()).strip()
    text = re.sub(r"^([+-]?)10 ?\^", r"\g<1>1\\cdot10^", re.sub(r"(\d+) ?/ ?(\d+)", r"\\frac{\1}{\2}", text))
    text = re.sub(r"^([+-]?)(\d+) ?\^ ?\{?-1\}?$", r"\1\\frac{1}{\2}", text)  # 2^{-1}
    match = NUMBER.fullmatch(text)
    if match is None or NO_SIDE.search(side) or (integer and "frac" in text):
        return None
    sign, value, power, percent = (part or "" for part in match.groups())
    sign = sign.strip("+")
    if "frac" in value:
        return sign + value + (rf"\cdot10^{{{power}}}" if power else "") + percent
    digits = value.replace(",", "")
    exponent = power or "0"
    return f"{sign}{Decimal(f'{digits}e{exponent}'):f}{percent}"


def finished_only(text: str, integer: bool) -> str:
    """Prose in which each calculation, such as `26 - 80 = -54`, is its result, or the unknown u if it has none."""

    def result(calculation: re.Match[str]) -> str:
        before = calculation.string[: calculation.start()][-20:]
        if DENIED.search(before) or DENIES.match(calculation.string, calculation.end()):
            return "$u$"
        if not re.search(r"\w", calculation[0]):
            last: str | None = calculation[0]
        else:
            last = number(plain(calculation[0].strip("*_`\"':?!")), integer)
        if last is None:
            return "$u$"
        return f"${last}$" if "\\" in last else last

    text = re.sub(r"\\?\$|\\[()\[\]]", " ", re.sub(UNIT, r" \1 ", text))
    without_stars = re.sub(r"(?<!\S)\*+(?=\S)|(?<=\S)\*+(?=[.,;:?!]*(?:\s|$))", "", text)  # of **42**
    return CALCULATION.sub(result, without_stars)


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
