r"""Answers: what is the final answer of a text, and is it a finished number? Text only; verifiers.py compares.

WHAT IS THE FINAL ANSWER. The first row that fits counts, and in it the last place:
    <answer>5</answer>             R1-Zero's form: what stands in the tag is read as a text of its own
    <solution>5   [result]5        such a tag at the end of the text, closed or cut off by a stop string
    \boxed{5}, \fbox{5}            the box, and nothing else
    {"answer": 5}                  `answer` or `final_answer` of a JSON object, as a text of its own
    The answer is 5.  #### 5       to the end of the sentence, if that is a number or a formula
    5   (2, 3)   B   x**2 + 1      a text without two plain words side by side is a formula, as if it stood in a box
    26 - 80 = -54, so it is -54.   other prose: the number that math-verify finds; a calculation counts as its result
Known answers are read by the same rows. A sentence is the one number in it; with several it is no answer.

A FINISHED NUMBER is on a list of what is allowed: a decimal or fraction (but 42 for 84/2), a mixed number, one of these
times a power of ten or percent, with a unit. math-verify computes whatever it can read: a policy that was trained
without this list learned to repeat the question (`26 - 80`, or in prose `To calculate 26 - 80, we`). That reward hack
paid for NUMBER, NO_SIDE and CALCULATION. The other expressions came from the spellings of data sets and from attacks by
hand. The comment beside each spelling is an example, which tests/test_verifiers.py runs.
"""

from __future__ import annotations

import json
import re
import unicodedata
from decimal import Decimal
from typing import Any

# Longer answers count as none: math-verify's grammar takes more than linear time.
MAX_ANSWER_CHARS = 1_000
# Without a box or a tag, only this much of the end of the text is searched for an answer, if it holds a digit.
MAX_TAIL_CHARS = 2_000
INTEGER = re.compile(r"-?\d+")  # compared as text
FUNCTIONS = "ln|log|exp|(?:arc)?(?:sin|cos|tan|cot)"

# Where a final answer stands.
NAME = r"\|?(?:final )?[\w-]{0,30}?(?:answer|solution|result|output|conclusion|final)[\w-]{0,30}\|?"
INSIDE = rf"((?:(?![<\[]/?{NAME}[>\]]).)*?)"
TAG = re.compile(rf"(?is)[<\[](?=[\w |-]{{0,40}}answer){NAME}[>\]]{INSIDE}[<\[]/{NAME}[>\]]")
LAST_TAG = re.compile(rf"(?is)[<\[]{NAME}[>\]]{INSIDE}(?:[<\[]/{NAME}[>\]]\s*)*(?:</[\w-]*)?$")
# Tags of other names: thinking before the answer, and marks such as <b>.
THOUGHT = re.compile(r"(?s)\A(?:\s*<(\w{4,})>.*?</\1>)+(?=.*\w)")
OTHER_TAG = re.compile(r"</\w+>|<(?:[A-Za-z]\w+|[bip](?=>[^<]*</[bip]>))>")
JSON_ANSWER = re.compile(r'"(?:final_)?answer"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}"\[{]+)\s*[,}]', re.IGNORECASE)
ANSWER_IS = re.compile(
    r"(?i)\b(?:answer|correct (?:option|choice))(?:[*_]*:| is\b:?|[*_]*\n)|####(?=[^A-Za-z\n]{1,200}(?:\n|$))"
)
CLAIM = re.compile(r"""[*_`"'\s]*(.+?)[*_`"']*(?=[.,;]?\s*$|\.\s|\n)""")
SENTENCE = r"(?<![A-Za-z\\])[A-Za-z]{2,},? +[A-Za-z]{2,}"  # two plain words side by side
NO_FORMULA = re.compile(rf"{SENTENCE}|\$|\\[(\[]")
# Of a completion: what the tokenizer ends it with, marks without a space behind them, Chinese.
TEXT_SPELLINGS: list[tuple[str, Any]] = [
    (r"(?<!\s)(?:\s*(?:</s>|<eos>|<end_of_turn>|<[|｜][^|｜<>]*[|｜]>))+\s*$", ""),  # 5</s><|im_end|> -> 5
    (r"####(?=\S)", "#### "),  # ####5 -> #### 5
    ("’", "'"),  # It isn’t 5 -> It isn't 5
    ("=+>", "→"),  # => 5 -> → 5
    (r"答案(?:是|为|为：|：|:)?[：:]?", " The answer is "),  # 答案是：5 -> The answer is 5
    (r"不(?:是|等于)", " not "),  # 这不是5 -> 这 not 5
    ("或者?", " or "),  # 4或5 -> 4 or 5
    ("[。．]", ". "),  # 5。 -> 5.
    ("[：，]", lambda match: unicodedata.normalize("NFKC", match[0]) + " "),  # 1，2 -> 1, 2
    (r"[\u3000-\u303f\u4e00-\u9fff]+", " "),  # 因此5 -> 5
]
# Spellings that math-verify does not read, and what it reads instead, in this order. The comment is an example.
SPELLINGS: list[tuple[str, Any]] = [
    ("([¼-¾⅐-⅞])", r" \1 "),  # 4½x -> 4 ½ x
    (r"(?<=[\w)])\*\*(?=[\w({])", "^"),  # x**2 -> x^2
    ("([⁻⁰¹²³⁴-⁹]+)", r"^{\1}"),  # x² -> x^{²}
    ("([₀-₉]+)", r"_{\1}"),  # x₂ -> x_{₂}
    (r"[^\x00-\x7f]+", lambda match: unicodedata.normalize("NFKC", match[0])),  # ５^² -> 5^2
    (r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}"),  # 4 1⁄2 -> 4 \frac{1}{2}
    (r"(?:\\(?:text|mathrm))? *\{\s*[-−–]\s*\}|[−–\u2010]", "-"),  # {-}5 -> -5
    (r"\\[lc]?dots[a-z]?(?![a-z])|\.{3}", r"\\ldots "),  # 1,\dots,n -> 1,\ldots ,n
    (r"(?<=\d)(?:(?:\\text)?\{[, ]\}|(?:\\!)?,? ?\\[,!;: ] ?|\\thinspace ?|~)(?=\d{3}(?!\d))", ""),  # 1{,}234 -> 1234
    (r"^([+-]?\d{1,3}),(\d{3})(?= ?\\(?:pi|sqrt))", r"\1\2"),  # 2,000\pi -> 2000\pi
    (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![a-z])|$)|\\\\\s*$|~|\s+", " "),  # 5\,m~s -> 5 m s
    (r"\\(?:(?:text)?color *\{[a-z]+\}|phantom *\{\w*\})|^\{\}|\{\}$", ""),  # \color{red}{5} -> {5}
    (r"\\text *\{[Aa]nswer: *\}", ""),  # \text{Answer: }5 -> 5
    (r"\\(?:(?:display|text)style|[lL]arge|small|bf|rm)(?![a-z])", ""),  # {\bf 5} -> { 5}
    (r"\\(?:left|right|[bB]igg?[lr]?) *(?=[()\[\]])", ""),  # \left(1,2\right] -> (1,2]
    (r"\\(?:bm|boldsymbol|underline|ensuremath) *(?=\{)", ""),  # \bm{5} -> {5}
    (r"\{ *([^{}]*?) *\\over(?![a-z]) *([^{}]*?) *\}", r"\\frac{\1}{\2}"),  # {1 \over 2} -> \frac{1}{2}
    (r"\\(?:nice|s)frac", r"\\frac"),  # \nicefrac{1}{2} -> \frac{1}{2}
    (r"\\lbrace(?![a-z])", r"\\{"),  # \lbrace 1 -> \{ 1
    (r"\\rbrace(?![a-z])", r"\\}"),  # 1 \rbrace -> 1 \}
    (r"°|\\degree(?![a-z])|\^\{?(?:\\text *\{o\}|o)\}?", r"^\\circ "),  # 90° -> 90^\circ
    (r"\\text *\{ *(?:percent|\\?%) *\}", r"\\%"),  # 5\text{ percent} -> 5\%
    ("∞", r"\\infty "),  # (3,∞) -> (3,\infty )
    (r"\\varnothing", r"\\emptyset"),  # \varnothing -> \emptyset
    (r"√ *(?:(\d+|[a-z])|\((\w+)\))", r"\\sqrt{\1\2}"),  # 2√13 -> 2\sqrt{13}
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),  # 9pi+6 -> 9\pi +6
    (rf"\\(?:mathrm|text|operatorname) *\{{ *({FUNCTIONS}) *\}}", r"\\\1 "),  # \text{ln}2 -> \ln 2
    (r"\\(?:mathrm|text|operatorname) *\{ *([ie]) *\}", r"\1"),  # 5\mathrm{i} -> 5i
    (r"(?<=[\d)}]) *(?:\\cdot)? *i(?![a-z])", "i"),  # 9 i+5 -> 9i+5
    (r"(?<=\d) +\([A-Za-z]{2}[A-Za-z ]*\)$", ""),  # 9 (apples) -> 9
    (r"^\\\{ *[a-z] *(?:\\mid|\||:) *(.*)\\\}$", r"\1"),  # \{x \mid x > 3\} -> x > 3
    (r"(?<![\\\w^}\] {])\{(-?\d+|:)\}|(?<=\d)\{(:)\}", r"\1\2"),  # 3{:}30 -> 3:30
    (r"^\{+([^{}]*)\}+$|^\{((?:[^{}]|\{[^{}]*\})*)\}$|^\\[(\[](.*)\\[)\]]$", r"\1\2\3"),  # {{5}} -> 5
    (r"^[A-Z](\([^()]*,[^()]*\))$", r"\1"),  # P(1,2) -> (1,2)
    (r"^([^=]*[^=!<> ]) *= *([a-z])$", r"\2=\1"),  # 5 = x -> x=5
]
# What data sets have in the place of an answer: NuminaMath's `proof` and `notfound`.
NO_ANSWER = re.compile("(?i)proof|not ?found|none|n/?a|nan|null|unknown|see (?:the )?solution")
IN_MARKS = re.compile(r"""^([*_`"]{1,3})((?:(?!\1).)+)\1(?=[.,;]?$)""")  # **5**
IN_DOLLARS = re.compile(r"^\$+(.+?)\$+$", re.DOTALL)
# A number such as 1e-05 with nothing attached to it, which math-verify would read as 1 * e - 5. The exponent has at
# most three digits, so that the number written out stays short.
SCIENTIFIC = re.compile(r"(?<![^\s$=*])[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?=[.,;*]?(?:[\s$\\*]|$))")
UNIT = r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}\d]*)\}(?:\^\{?-?\d\}?)?"
SHORT_UNIT = r"(?:[cmk]?m|[mk]?g|m?[lL]|oz|lbs?|ft|in|h|hrs?|min|s)"
FRACTION_WORD = "hal(?:f|ves)|thirds?|(?:four|fif|six|seven|eigh|nin|ten)ths?"
NUMBER_WORD = (
    r"(?:hund\w+|thous\w+|(?:m|b|tr)illi\w+|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
    r"(?:twen|thir|for|fif)ty)"
)
# Words that make another number of the one before them: 5 million, 5 squared, 5 plus one, 5 and a half.
ANOTHER = (
    r"(?:dozen|score|gross|lakhs?|crores?|pi|π|squared|cubed|factorial|doubled|tripled|plus|minus|divided|multiplied|"
    rf"over|choose|mod\w*|point|remainder|(?:(?:times|to|by|out of) )?{NUMBER_WORD}|{FRACTION_WORD})\b(?!-)"
)
# Words behind a number in a box that are no unit, whatever comes between: they change the number or take it back.
NO_UNIT = re.compile(
    rf"\b(?:{ANOTHER}|(?:not|wrong|false|incorrect|is|if|unless|otherwise|and|or|most|least|less|than|more than|"
    r"above|below|under|negative|between|twice|half of)\b)|\bmore *\W*$|\d'\d|n't\b"
)
# How NUMBER spells what may be a finished number, in this order. The comment is an example.
NUMBER_SPELLINGS: list[tuple[str, Any]] = [
    (r"^([+-]?)\((.*)\)$", r"\1\2"),  # -(5) -> -5
    (r"(\d+) ?/ ?(\d+)", r"\\frac{\1}{\2}"),  # 2 1/2 -> 2 \frac{1}{2}
    (r"^([+-]?)10 ?\^", r"\g<1>1\\cdot10^"),  # -10^3 -> -1\cdot10^3
    (r"^([+-]?)(\d+) ?\^ ?\{?-1\}?$", r"\1\\frac{1}{\2}"),  # 2^{-1} -> \frac{1}{2}
]
# A finished number: sign, decimal or fraction or mixed number, power of ten, percent; with degrees or a unit.
NUMBER = re.compile(
    r"([+-]?) ?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+|(?:\d+ ?)?\\frac ?\{ ?[+-]?\d+ ?\} ?\{ ?[+-]?\d+ ?\})"
    r"(?: ?(?:\\cdot|\\times|[*×·x]) ?10 ?\^ ?\{?([+-]?\d{1,3})\}?)? ?(\\?%)?"
    rf"(?: ?\^ ?\{{?\\circ\}}? ?[CF]?| [A-Za-z]{{3,}}[A-Za-z ]*|"
    rf" ?{SHORT_UNIT}/{SHORT_UNIT}| (?:[cmk]m|[mk]g|m?[lL]|in|oz|lbs?|ft))?"
)
# Before the last `=`, this is more than one side of an equation: of `x=3, y=4`, `x=3 or x=4`, `3 for n=4`, `x !=4`.
NO_SIDE = re.compile(
    r"[,;](?![^()]*\))|\d.*\b(?:for|if|when|where)\b|\b(?:or|and|not|lor|vee|quad)\b|\\\\|[!<>≠]\s*$|\\neq?\b"
)
# A calculation in prose: words that hold a digit or TeX (but not Step2, m/s^2), or only signs, and what joins them.
MATH = (
    r"(?<!\S)(?![A-Za-z][A-Za-z/]*[\^_]?\d*[.,;:?!]*(?!\S))"
    r"(?:\S*[\d\\√∑∫]\S*|[]()[{}=+*/^|<>≤≥≠×÷·±&%]+[.,;:?!]*(?!\S))"
)
JOINT = r"[-−–x:]|(?:percent |divided |multiplied |out )?(?:by|of)|mod|plus|minus|times|over|to(?: the power of)?|from"
GAP = rf"(?:(?<![.,;:?!])[^\S\n]+(?:(?:{JOINT})[^\S\n]+)?|,?[^\S\n]+(?:and|or)[^\S\n]+)"
CALCULATION = re.compile(f"{MATH}(?:{GAP}{MATH})*")
VARIABLE = r"[A-Za-z]_?\w?"
EITHER = re.compile(rf"\b({VARIABLE})\s*=\s*\S+(?:,?\s+(?:or\s+{VARIABLE}|and\s+\1)\s*=\s*\S+)+")  # x = 3 or x = 4
# What says that another number is the answer: 5, not 6.
CONTRAST = re.compile(r"(?:, |\band )not $|\b(?:instead of|rather than) $")
PERHAPS = "else|maybe|perhaps|possibly"
# What takes a number in prose back, or makes another of it: before it, before it if it is no result, and behind it.
DENIED = re.compile(
    r"(?:(?:not|n't|\bn(?:ever|or|o longer)|hardly)(?: quite| \w+ly)?(?: be)?(?: equal)?(?: to)?|"
    rf"\b(?:n?either|or (?:{PERHAPS})|otherwise|between|without|except|exclud\w+|than|"
    r"(?:any|every)\w+ but|(?:far|differ\w*) from|instead of|at (?:least|most)|step|question|problem|case))[ :]*$",
    re.IGNORECASE,
)
CHANGED = re.compile(
    r"\b(?:twice|thrice|plus|minus|times|point|over|under|above|below|exceeds?|to the(?: power of)?|"
    r"(?:divi|multipl)\w+ by|(?:double|triple|root|square|cube|reciprocal|inverse|opposite|negation|negative|logarithm|"
    rf"multiple|percent|quarter|{FRACTION_WORD})(?: of)?|{NUMBER_WORD}(?: and| in)?|{FUNCTIONS}) $|"
    r"(?<!\S)[b-z] [-−–] $",
    re.IGNORECASE,
)
DENIES = re.compile(
    rf" (?:(?:is|was|would be) (?:not|(?:the )?wrong|false|incorrect|impossible|excluded|too)\b|\w+n't\b|cannot\b|"
    rf"(?:degrees )?below zero|to the (?:power|{FRACTION_WORD})|[rR] ?\d|[-−–+*/] [b-z]\b|{ANOTHER}|"
    rf"if (?:\w+ is )?(?:even|odd)\b|"
    rf"(?:\S+ )?(?:and|or) (?:an? )?(?:\d|{PERHAPS}|more|less|so\b|quarter|{ANOTHER}))"
)
# A minus sign that is a word, or with a dollar or a space behind it.
MINUS = re.compile(
    r"(?i)(?<![\w)])(?<!\s[b-z] )(?:[-−–]|(?:minus|negative) |(?:\A|(?<= is ))[-−–] )(?:\\?\$ ?|\\\( ?)?(?=[\d.\\])"
)


def last_box(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` or `\\fbox{...}`, or None. Marks of boxes inside it are left out:
    `\\boxed{\\boxed{5}+2}` gives `5+2`.

    Only the last twenty openings are tried: a scan from each of `\\boxed{\\boxed{\\boxed{...` takes quadratic time.
    """
    openings = list(re.finditer(r"\\(?:boxed|fbox)\s*\{|\\boxed(?: |(?=\d))([^\s{}$\\]+)", text))
    start = end = 0  # of the content
    for opening in reversed(openings[-20:]):
        first = opening.start(1) if opening[1] else opening.end()
        last = opening.end(1) if opening[1] else closing_brace(text, first)
        if last > end:  # a box around the one found before, if there is one
            start, end = first, last
    return re.sub(r"\\(?:boxed|fbox)\s*(?:\{([\w.]*)\}|(?=\{))", r"\1", text[start:end]) if end else None


def closing_brace(text: str, start: int) -> int:
    """Where the brace that was opened before `start` is closed; -1 if it is not."""
    depth = 1
    # An escaped brace is no brace, and the line break `\\\\` escapes nothing.
    for mark in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.start()
    return -1


def answer_of(text: str) -> tuple[str, str | None]:
    """(answer, prose): the final answer of `text` in its plain form, by the table above, and the prose to read if that
    is no number and no formula: None if it stands in a box."""
    for spelling, usual in TEXT_SPELLINGS:
        text = re.sub(spelling, usual, text)
    if tags := TAG.findall(text):
        return answer_of(tags[-1])
    if (box := last_box(text)) is not None:
        return plain(box), None
    if values := JSON_ANSWER.findall(text):
        return answer_of(json_text(values[-1]))
    if tag := LAST_TAG.search(text):
        return answer_of(tag[1])
    text = OTHER_TAG.sub(" ", THOUGHT.sub("", text))
    tail = decimals(text[-MAX_TAIL_CHARS:])[-MAX_TAIL_CHARS:]
    searched = tail if re.search(r"\d", tail) else text  # a base model goes on after its answer
    for mark in [*ANSWER_IS.finditer(searched)][-1:]:
        claim = CLAIM.match(searched, mark.end(), mark.end() + MAX_TAIL_CHARS)
        if claim:
            answer = plain(claim[1])
            return answer, claim[1] if is_formula(answer) else tail
    return plain(tail), tail


def is_formula(answer: str) -> bool:
    """Whether a plain answer that stands in no box is to be read as if it did."""
    return len(answer) <= MAX_ANSWER_CHARS and not NO_FORMULA.search(answer)


def json_text(value: str) -> str:
    """A JSON value as text. What is no JSON, as TeX with single backslashes, loses its quotes only."""
    try:
        return str(json.loads(value))
    except ValueError:
        return value.strip('"')


def decimals(text: str) -> str:
    """`text` with 1e-05 written as 0.00001."""
    return SCIENTIFIC.sub(lambda number: f"{Decimal(number.group()):f}", text)


def plain(answer: str) -> str:
    """An answer without what does not change it: dollars and `\\text{}` around it, a full stop, outer spaces, extra
    zeros, commas between thousands; and in the spelling that math-verify reads: 1e-05 as 0.00001, `½` as TeX."""
    text = IN_DOLLARS.sub(r"\1", IN_MARKS.sub(r"\2", answer.strip()))
    short = len(text) <= MAX_ANSWER_CHARS  # 1e999 grows to 1,000 digits
    for spelling, usual in SPELLINGS if short else []:
        text = re.sub(spelling, usual, text.strip(" "))
    text = IN_DOLLARS.sub(r"\1", text.strip().rstrip(".,;").strip()).strip()
    if short:
        styles = r"text\w*|math(?:rm|bf|it|sf|tt)|emph|mbox"
        text = re.sub(rf"^\\(?:{styles})\s*\{{((?:[^{{}}\\]|\\\$)*)\}}$", r"\1", text).rstrip(" .")
        text = decimals(text.strip(" "))
    # 1,234 and +007 as 1234 and 7, without int(): Python refuses more than 4,300 digits.
    if re.fullmatch(r"[+-]?(?:\d{1,3}(?:[, ]\d{3})+|\d+)", text):
        digits = re.sub("[+, -]", "", text).lstrip("0") or "0"
        return "-" + digits if text[0] == "-" and digits != "0" else digits
    return text


def finished_number(text: str, integer: bool = False) -> str | None:
    """The finished number that `text` is, without unit, currency and `x =`; else None, as for 26 - 80. It is a list of
    what is allowed: math-verify computes whatever it can read. If `integer`, a fraction is not finished, as 84/2."""
    from math_verify.parser import NormalizationConfig, normalize_latex

    if NO_UNIT.search(text):
        return None
    without_unit = re.sub(rf"(?:(?:[ /]|\\cdot)*{UNIT})+$", "", text)  # 5\text{ km} -> 5
    config = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
    side, _, value = re.sub("[€£¥₹]", "", normalize_latex(without_unit, config)).rpartition("=")  # x = €5 -> x, 5
    side = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", side)
    for spelling, usual in NUMBER_SPELLINGS:
        value = re.sub(spelling, usual, value.strip())
    match = NUMBER.fullmatch(value)
    if match is None or NO_SIDE.search(side) or (integer and "frac" in value):
        return None
    if INTEGER.fullmatch(value) and INTEGER.fullmatch(side.strip()) and side.strip() != value:
        return None  # 1 = 2
    sign, digits, power, percent = (part or "" for part in match.groups())
    sign = sign.strip("+")
    if "frac" in digits:
        return sign + digits + (rf"\cdot10^{{{power}}}" if power else "") + percent
    written_out = Decimal(digits.replace(",", "") + f"e{power or 0}")
    return f"{sign}{written_out:f}{percent}"


def finished_only(text: str, integer: bool) -> str:
    """Prose in which each calculation, such as `26 - 80 = -54`, is its result, or the unknown u if it has none."""

    def result(calculation: re.Match[str]) -> str:
        before = calculation.string[: calculation.start()][-20:]
        if CONTRAST.search(before):
            return ""
        if DENIED.search(before) or DENIES.match(calculation.string, calculation.end()):
            return "$u$"
        if "=" not in calculation[0] and CHANGED.search(before):
            return "$u$"
        if not re.search(r"\w", calculation[0]):
            last: str | None = calculation[0]
        else:
            last = finished_number(plain(calculation[0].removesuffix(".").strip("*_`\"':?!")), integer)
        if last is None or (re.match(r"[+*] ", calculation[0]) and before.strip()):
            return "$u$"
        return f"${last}$" if "\\" in last else last

    text = re.sub(r"\\?\$|\\[()\[\]]", " ", re.sub(UNIT, r" \1 ", MINUS.sub("-", text)))
    without_stars = re.sub(r"(?<!\S)\*+(?=\S)|(?<=\S)\*+(?=[.,;:?!]*(?:\s|$))", "", text)  # of **42**
    return CALCULATION.sub(result, EITHER.sub(" $u$", without_stars))


def known_answer(answer: str) -> str:
    """The plain form of a data set's answer. A sentence is the one number in it, or "" if it has several. "" also for
    words that say that there is no answer."""
    expected, prose = answer_of(answer)
    if NO_ANSWER.fullmatch(expected):
        return ""
    if re.search(SENTENCE, expected) and finished_number(expected) is None:
        numbers = [finished_number(plain(calculation)) for calculation in CALCULATION.findall(prose or expected)]
        if numbers:
            expected = numbers[0] or "" if len(numbers) == 1 else ""
    return expected
