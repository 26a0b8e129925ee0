"""Verifiers: right verdicts on right, wrong, hedged and hostile answers of many forms."""

import random
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import verifiers
from tasks.answers import answer_of, last_box, plain
from tasks.judges import Job, RewardPool
from tasks.verifiers import math_kind

pytestmark = pytest.mark.long


def verdicts_other_than(kinds, pairs):
    """(answer, text, verdict) of the pairs whose verdict is none of `kinds`."""
    rows = [(answer, text, math_kind(text, answer)) for answer, text in pairs]
    return [row for row in rows if row[2] not in kinds]


def box(*contents):
    return ["\\boxed{" + content + "}" for content in contents]


# Ten kinds of `question :: answer`, in which <x> is the value of x: b < a, c from 2 to 6, s = a + b, p = a * b, ...
QUESTIONS = {
    "division": r"\frac{<p>}{<a>} :: <b> | <p>/<a> :: <b> | <p> \div <a> :: <b> | <p> ÷ <a> :: <b> | "
    r"\dfrac{<p>}{<a>} :: <b> | \frac{<b>0}{10} :: <b>",
    "function": r"\gcd(<p>, <a>) :: <a> | \max(<b>, <a>) :: <a> | \min\left(<a>,<b>\right) :: <b> | "
    r"gcd( <p>, <b> ) :: <b> | \operatorname{lcm}(<a>, <p>) :: <p> | \text{lcm}(<b>, <p>) :: <p> | "
    r"max(<b>, <a>) :: <a>",
    "sum": r"\sum_{i=1}^{<b>} <a> :: <p> | \prod_{i=1}^{1} <a> :: <a> | \binom{<a>}{1} :: <a> | "
    r"\int_0^{<b>} <a>\,dx :: <p> | \begin{vmatrix} <a> & 1 \\ 0 & <b> \end{vmatrix} :: <p> | 1 x <a> :: <a> | "
    r"<a> + <b> :: <s> | <a> \cdot <b> :: <p> | 1 × <a> :: <a> | \lfloor <a>.5 \rfloor :: <a> | (<a>)(<b>) :: <p>",
    "root": r"\sqrt{<a>^2} :: <a> | \sqrt[3]{<b>^3} :: <b> | sqrt(<b>*<b>) :: <b> | \sqrt{<q>} :: <b> | "
    r"√<q> :: <b> | <q>^{0.5} :: <b>",
    "percent": r"<b>% of 100 :: <b> | 100\% \text{ of } <b> :: <b> | <b> percent of 100 :: <b> | "
    r"\frac{<b>}{100} \cdot 100 :: <b>",
    "unit": r"<a>+<b> :: <s>\text{ cm} | <a>\text{ cm}+<b>\text{ cm} :: <s>~\mathrm{cm} | \$<a>+\$<b> :: \$<s> | "
    r"<a>+<b> :: €<s> | <a>^\circ+<b>^\circ :: <s>^\circ | <a>° + <b>° :: <s>° | x=<a>+<b> :: x=<s> | "
    r"<a> + <b> :: <s> dollars | <a>+<b> :: <s>\% | <a>+<b> :: \text{about }<s> | <a>+<b> :: \text{Rs. }<s> | "
    r"<a>+<b> :: \angle A = <s>° | <a> + <b> :: f(2)=<s>",
    "mixed": r"<a> + \frac{1}{<c>} :: <a>\frac{1}{<c>} | <a>+1/2 :: <a>½ | <a>+1.5-1 :: <a> 1/2 | "
    r"<a> + 0.5 :: \frac{<o>}{2}",
    "solution": r"<b>-<a> :: It is $<b>-<a>$, so \boxed{<n>}. | <b> - <a> :: \boxed{1}, no, \boxed{<n>\text{ cm}}",
    "power": r"<b>^2 :: <q> | <b>^{2} :: <q> | \left(<b>\right)^{2} :: <q> | <b>**2 :: <q> | 1^{<b>} :: 1 | "
    r"<b> ^ 2 :: <q>",
    "negative": r"<b>-<a> :: <n> | <b> − <a> :: <n> | -<a>+<b> :: <n> | -(<a>-<b>) :: <n> | "
    r"-\frac{<p>}{<a>} :: -<b> | <b> minus <a> :: <n>",
}
PROSE = r"X | The answer is X. | The answer is $X$. | **X** | So \(X\). | Answer: X | To get X, compute X. | x = X"


@pytest.mark.parametrize("kind", QUESTIONS)
def test_the_question_repeated_is_no_answer(kind):
    """60 of each kind, in a box and in prose: a number must be computed by the policy, or the question is its own answer.
    (A policy learned to write `To calculate 26 - 80, we need to ...`. Without a list of what is finished 188 of 600 are
    right.)"""
    rng, right, forms = random.Random(kind), [], QUESTIONS[kind].split(" | ")
    for form in (forms * 60)[:60]:
        b, c = rng.randint(11, 40), rng.randint(2, 6)
        a = b + rng.randint(1, 40)
        values = {"a": a, "b": b, "c": c, "s": a + b, "p": a * b, "q": b * b, "n": b - a, "o": 2 * a + 1}
        question, _, answer = re.sub("<(.)>", lambda name: str(values[name[1]]), form).partition(" :: ")
        assert math_kind(None, answer) == "wrong", answer  # it can be read
        texts = (*box(question), rng.choice(PROSE.split(" | ")).replace("X", question))
        right += [(answer, text) for text in texts if math_kind(text, answer) == "correct"]
    assert right == []


BOXES = r"""4 :: \boxed{4} | 2 :: \boxed{1} and \boxed{2} | \frac{1}{2} :: \boxed{\frac{1}{2}} | \} :: \boxed{\}} | 5 :: \boxed {5} |
\{1,2\} :: \boxed{\{1,2\}} | 6 :: \fbox{6} | 7 :: \boxed{\boxed{7}} |  :: \boxed{} | 8 :: } \boxed{8} { |
9 :: { \boxed{9} } \boxed{10 | 1\\ :: \boxed{1\\} | 11 :: $\boxed 11$ | 5 :: \boxed5"""
PLAIN = r"""42 ::  42. , $42$ , $$42$$ , 042 , +42 | Yes :: \text{Yes} | 1234 :: 1,234 , 1{,}234 , 1\,234 | -7 :: -007 |
1234567 :: 1,234,567 | 0 :: -0 , 000 | 0.00001 :: 1e-05 | 1500 :: +1.5E3 | -0.0000025 :: -2.5e-6 | 5 :: .5e1 |
100 m :: 1e2 m |  :: . ,  """
UNCHANGED = "12,34 1.50 2e e-5 3x+2e+5 1e5x 1e9999 1e0009 $5 $ 1,2".split()


def test_last_box_and_plain():
    """`what is read :: in which texts`."""
    for content, _, text in (case.strip("\n").partition(" :: ") for case in BOXES.split(" |")):
        assert last_box(text) == content.strip()
    for text in (r"\boxed{10", r"\unboxed{12}", r"\\boxed", "12", ""):
        assert last_box(text) is None
    for result, _, texts in (case.strip("\n").partition(" :: ") for case in PLAIN.split(" |")):
        assert {plain(text) for text in texts.split(" , ")} == {result.strip()}
    assert list(map(plain, UNCHANGED)) == UNCHANGED


def test_reading_is_linear():
    """A policy may write boxes or digits without end. Each is looked at a few times: a scan from each of 200,000 openings,
    or a split in two, would take 2e10 steps."""
    start = time.process_time()
    assert last_box(r"\boxed{" * 200_000) is None
    assert not last_box(r"\boxed{" * 100_000 + "}" * 100_000).strip("{}")
    for part in ("<answer>", "[result", "answer is ", "#### 5", "<b>", "<steps>", "x = 3 or ", "\n", "*"):
        answer_of(part * 100_000)
    assert plain("*" * 200_000 + "x" * 200_000)[-1] == "x"
    assert plain("9" * 200_000) == "9" * 200_000
    assert plain("9" * 200_000 + "." + "9" * 200_000)[-3:] == "999"
    assert len(plain("1e999 " * 10_000)) < 100_000  # not the ten million digits that they stand for
    assert time.process_time() - start < 3


# ---------------------------------------------------------------------- right and wrong answers, by the form of the text
# `X` in a text is the known answer. math_answers.txt has the spellings of answers that are no integers.

IN_A_BOX = (
    r"X | x = X | X. | X, | (X) | \mathbf{X} | \text{X} | X\text{ cm} | X~\mathrm{cm} | X° | X^\circ | X^{\circ} | \$X | "
    r"€X | X\,\text{m}^{2} | X dollars | X.0 | $X$ | 2+3=X | \text{Area} = X"
)
AS_THEY_ARE = (
    "The answer is X. | So X° it is. | **X** | #### X | Answer: X | \\[\nX\n\\] | It is $X$. | We get X! | 26 - 80 = X | "
    r"So \(x = X\). | X apples | 3 + 4 comes before X. | X\text{ cm} | X~\mathrm{cm} | It costs \$X. | x_2 = X | X km/h | "
    "First 2 + 3 is 5, then X | `X` | Total: X"
)
FINAL = {
    "a tag": r"<answer>X</answer> | <think>9</think> <answer> X </answer> | <answer>\boxed{X}</answer> | "
    r"<Answer>$X$</Answer> | <answer>The sum is X.</answer> | <answer>8</answer> no <answer>X</answer> | "
    r'<answer>x = X</answer></s> | \boxed{8} <answer>X</answer> | <answer>{"answer": X}</answer> | <answer>X cm</answer>',
    "a tag of another name": "<solution>X</solution> | <result> X </result> | <final_answer>X</final_answer> Thanks 2 you. | "
    "[ANSWER]X[/ANSWER] | [Answer] X | <output>x = X</output> | <my_final_answer_only>X</my_final_answer_only> | "
    "<SOLUTION>So the sum is X.</SOLUTION> | <|begin_of_solution|>X<|end_of_solution|> | <final answer>X</final answer>",
    "a tag cut off": r"<answer>X | I add. <answer> NL X | <answer>x = X | <think>8</think> <solution>The sum is X. | [RESULT]X | <answer>X</ | <answer>X</answer",
    "behind a tag": "<think>8</think>X | <reasoning>I add 3 to 4.</reasoning> NL <answer>X | So I add.</reasoning>X | "
    "<steps>2+3=5</steps> <value>X</value> | The answer is <b>X</b>. | So it is <strong>X</strong>.",
    "a mark": r"Answer:X | answer:X. | The answer is:X. | **Final Answer:** X | ####X | #### X | ### Final Answer NL X | "
    r"The answer is X. This uses 3 rows of 4. | Answer: X NL (3 rows) | The answer is 8. No, the answer is X. | "
    r"The answer is `X`. | The answer is __X__. | Answer: X cm² | Answer: X m",
    "JSON": r'{"answer": X} | {"answer":"X"} | {"steps": ["9"], "final_answer": "X cm"} | {"answer": X, "unit": "9"}',
    "a special token": r"X</s> | The answer is X.<|im_end|> | \boxed{X}<|eot_id|> | X<eos></s> | It is X<｜end▁of▁sentence｜>",
    "Chinese": "答案是X。 | 答案：X | 所以，一共有X个苹果。 | X。 | 不是9，而是X。",
}
NOT_FINAL = (
    r"<answer>X or 9</answer> | <answer>9</answer> X | X <answer></answer> | <answer>not X</answer> | 答案不是X。 | 答案是X或9 | "
    r'{"answer": [9, X]} | {"answer": "X", "answer": "9"} | {"answer": "X or 9"} | {"answer": null, "guess": X} | '
    r"<solution>X or 9</solution> | <answer>X or 9 | <result>X</result> The answer is 9. | <result>X</result> \boxed{9} | "
    r"<answer>9</answer> <solution>X | <think>X</think>9 | X<y> | <b>X</b>9 | <answer>X and a half</answer> | Answer: at least X | The answer is X or 9. | Answer:X9 | <answer>I do not know</answer> X | "
    r"The answer is x + X | So x ≥ X. | – X | Answer: 9. It is X. | Answer: 8, 9, X | <answer>9, X</answer>"
)
WORDS = (
    "and a half | halves | point five | plus one | minus two | times ten | divided by two | below zero | negative | score | "
    "gross | doubled | hours and thirty minutes | is incorrect | if n is even and six otherwise | to six | choose two | "
    "tenths | remainder one | fifths | over seven | or so | unless odd | thirds | tripled | twenty | π | "
    "lakh | crores | isn't right"
)
UNITS = (
    "apples | points | months | times a week | years old | quarters | more apples | miles per hour | lengths | ways | "
    "bills"
)
BEHIND = (
    "and a half | and a quarter | million | dozen | squared | factorial | hours and 30 minutes | or more | plus 1 | "
    "cubed | below zero | degrees below zero | times three | to the third | to the power of two | r3 | - y | "
    "is the wrong answer | isn't right | cannot be right | would be wrong | is too small | if even, 6 if odd | or else 6 | "
    "or possibly 6 | ± 2 | lakh"
)
BEFORE = (
    "at least | more than | half of | twice | the square root of | either | between | not | one over | the reciprocal of | "
    "neither 16 nor | anything but | all except | one that excludes | double | the square of | log | ten plus | 3 point | "
    "a third of | ten to the power of | divisible by | a hundred and | x - | different from | smaller than | under | "
    "one in | 6 if odd, otherwise | hardly | no longer | not quite | not exactly | 6 or maybe | 6 ±"
)
MINUS_7 = (
    r"-$7 | #### -$7 | <answer>-$7</answer> | The answer is -$7. | She has -$7 left. | **-$7** | −$7 | –\$7 | - $7 | It's -$7. | "
    r"It is -\(7\). | The answer is negative 7. | The loss is negative $7$. | It fell to minus 7 degrees. | #### minus 7 | "
    "<answer>negative 7</answer> | Minus 7. | It is - 7 degrees. | The answer is \u20117. | It is \u20117 °C. | \\boxed{\u20117}"
)
SENTENCES = (
    "The answer is 25. | The answer is: 25 | Answer: 25 | There are 25 apples. | He needs 25 more minutes. | It is 25%."
)
PLAIN_RIGHT = (
    r"5 :: 5{} | 5 L | 5 in | \text{Answer: }5 | 5 m/s | 5 km/h | 5 mL | 5 oz | 5 \  | {}5 | \small 5 | 5 = x | 5 cm/s ;; 1234567 :: 1 \, 234 \, 567 ;; "
    r"1234 :: 1\text{,}234 ;; -1/2 :: -\left(\frac{1}{2}\right) | -(\frac12) ;; 3/4 :: \frac{3}{ 4 } ;; "
    r"(1,2) :: \big(1,2\big) | P(1,2) | \Bigl(1,2\Bigr) ;; 2x+1 :: f(x)=2x+1 ;; B :: \text{Option B} ;; x^2+1 :: x**2+1 ;; "
    r"6/11 :: {\frac{6}{11}} ;; $88 :: \text{\$88} ;; 47000 :: 4.7 x 10^4 ;; 7\sqrt{3} :: 7√(3) ;; "
    r"\text{May }10 :: \text{May 10} ;; 6:18 \text{ PM} :: \text{6:18 PM} | 6:18 PM"
)
PLAIN_WRONG = (
    r"12 :: 1'2 ;; x=1, y=2 :: (2,1) | 2,1 ;; 66 :: 45 \text{ for } n=66 ;; 2 :: 1=2 | 3=2 ;; \pi :: \Pi ;; \Gamma :: \gamma ;; 5 :: 5 xy | 5 m+s | 5 \text{ hundredths} | 5 pi | ₅ | ⁵ ;; "
    r"B :: B' | -B | !B | B=91"
)
CONTRASTS = (  # 5, and not 7
    "The answer is 5, not 7. | It is 5 and not 7. | It took 5 days, and not 7 or 8. | It is 5 instead of 7. | "
    "The answer is 5 rather than 7. | 12 - 7 = 5 NL => 5"
)
DENIALS = (
    "cannot be | can't be | is never | is not equal to | isn't equal to | must not be | is other than | is far from | "
    "is something different from"
)
INTEGERS = ("5", "-5", "60", "1234", "0", "17", "100", "-42")


def answers(section):
    """(answer, completion) of one section of math_answers.txt."""
    text = Path(__file__).with_name("math_answers.txt").read_text()
    lines = text.partition(f"== {section}\n")[2].partition("\n== ")[0]
    for line in lines.rstrip("\n").replace("\n    ", " ").split("\n"):
        answer, _, forms = line.partition(" :: ")
        yield from ((answer, form) for form in forms.split(" | "))


def forms(texts, *known):
    """(answer, text) of each text for each answer; NL is the end of a line."""
    texts = texts.replace(" NL ", "\n").split(" | ")
    return [(answer, text.replace("X", answer)) for answer in known for text in texts]


def each(words, text):
    """The text with each of the words in the place of W."""
    return " | ".join(text.replace("W", word) for word in words.split(" | "))


def table(rows):
    """(answer, text) of `answer :: text | text ;; answer :: ...`."""
    return [pair for row in rows.split(" ;; ") for pair in forms(row.partition(" :: ")[2], row.partition(" :: ")[0])]


def boxed(pairs):
    return [(answer, *box(text)) for answer, text in pairs]


SENTENCES_OF_25 = [*SENTENCES.split(" | "), r"So it is \boxed{25}.", "<answer>25</answer>"]
SENTENCES_OF_25.append("Of 30 some are red. The answer is 25.")
RIGHT = {
    "integers in a box": boxed(forms(IN_A_BOX, *INTEGERS)),
    "integers as they are": forms(AS_THEY_ARE, *INTEGERS),
    "other answers in a box": boxed(answers("right, in a box")),
    "spellings of data sets": boxed(answers("right, in a box: spellings of GSM8K, ASDiv, MATH, AIME and Minerva")),
    "other answers as they are": [*answers("right, as it is")],
    "behind much text": [("42", "I count 7. " * 400 + "So x = 42."), ("42", "\\boxed{42}.\n\nDone 7 times.")],
    # A base model goes on after its answer.
    "before much text": [
        ("42", text + "So it is. " * 400)
        for text in ("The answer is 42. ", "#### 42\n", "<answer>42</answer>", "\\boxed{42}")
    ],
    "separators of thousands": [
        (answer, text)
        for answer, sum_ in (("200000", "250,000 - 50,000 = 200,000"), ("1234.5", "1,000.25 + 234.25 = 1,234.5"))
        for text in (
            sum_,
            f"So it is {sum_}.",
            f"The answer is {sum_}.",
            f"$ {sum_} dollars",
            *box(sum_),
            f"<answer>{sum_}",
        )
    ],
    "percents": table(
        r"35 :: \boxed{35.0\%} | 35.0% | It is 35.00 %. ;; 12.5 :: \boxed{12.5\%} | The answer is 12.5%. | 12.5 percent ;; "
        r"12.5\% :: \boxed{12.5} | \boxed{0.125} | \boxed{12.50\%} ;; 0.125 :: \boxed{12.5\%}"
    ),
    "R1-Zero's tags, marks, JSON, special tokens, Chinese": forms(" | ".join(FINAL.values()), "5", "-17", "1/2"),
    "formulas and letters": table(
        r"70000 :: <answer>$70,000</answer> ;; B :: The answer is B. ;; (C) :: <answer>C</answer> ;; x^2+1 :: The answer "
        r"is x**2+1. ;; Tuesday :: The answer is Tuesday. | **Tuesday** | `Tuesday` ;; 6\pi :: Answer: 6π ;; (1,2) :: "
        r"The answer is (1, 2). | **(1, 2)** ;; 2x+1 :: **2x+1** ;; 12:30 :: **12:30**. ;; Evelyn Smith :: 2 + 3 is 5. The "
        r"answer is Evelyn Smith. ;; B :: The answer is option B. | The correct choice is B. | The correct option is **(B)**."
    ),
    # They counted as readable, and no completion could be right. One number is the answer; of several none is.
    "of known answers that are sentences": [
        (a, text) for a in SENTENCES_OF_25 for text in (r"\boxed{25}", "It is 25.")
    ],
    "units in a box": boxed(forms(each(UNITS, r"5 \text{ W} | 5 W"), "5")),
    "units": forms(each(UNITS, "It is 5 W."), "5"),
    "single spellings": boxed(table(PLAIN_RIGHT)),
    "the same base": boxed(table("101_2 :: 101_2 | 101_{2} | 101")),
    "a choice": [*boxed(table(r"B :: (B) 42 | B | b | \textbf{(B)} | B) 3^2")), ("B", "**B**"), ("B", '"B"')],
    "claims": forms(
        each("cannot be 6, so it is | is 5, no other number: | can be nothing but", "The answer W 5."), "5"
    ),
    "contrasts": forms(CONTRASTS, "5"),
    "signs": forms(MINUS_7, "-7"),
    "results behind such words": table(
        "8 :: 10 minus 2 = 8 | In the final third 10 - 2 = 8 are left. | 7 quarters + 1 quarter = 8 quarters | "
        "10 - $2 = $8 for the man | $8 to the man | Total - $8"
    ),
    "spaced digits": boxed(table(r"12345678 :: 12\!,\!345\!,\!678 ;; 12000 :: 12\;000")),
}
WRONG = {
    "other answers in a box": boxed(answers("wrong, in a box")),
    "beside spellings of data sets": boxed(answers("wrong, in a box: beside spellings of those data sets")),
    "other answers as they are": [*answers("wrong, as it is")],
    "two solutions": forms(
        "x = 3 or x = X | The answer is x = 3 or x = X. | So x = 3, or x=X. | The solutions are x = 3 and x = X. | x=3, y=X | "
        "x_1 = 3; x_2 = X | We get x = 1 or x = 3 or x = X. | Either a = 3 or b = X. | so $x = 3$ or $x = X$.",
        "4",
        "1/2",
    ),
    "separators of thousands": table(
        "200000 :: 250,000 - 50,000 | 100,000, 200,000 | \\boxed{100,000, 200,000} ;; 5 :: 4,200 = 5 | \\boxed{1,200 = 5} | "
        "\\boxed{10, 5 = 5}"
    ),
    "percents": table(
        r"35 :: \boxed{36.0\%} | \boxed{35\%\%} ;; 12.5\% :: \boxed{12.6} | \boxed{1250} ;; 12.5 :: \boxed{0.125} | 12.51%"
    ),
    "taken back far from the end": [
        ("42", text + "So it is. " * 400 + "No, it is 7.") for text in ("The answer is 42. ", "#### 42\n")
    ],
    "too far from the end": [("x+1", "So it is $x+1$. " + "I count. " * 400)],
    "another number": [("6", text) for _, text in RIGHT["R1-Zero's tags, marks, JSON, special tokens, Chinese"]],
    "no final answer": forms(NOT_FINAL, "5", "17"),
    "formulas and letters": table(
        "B :: The answer is A or B. | The answer is not B. | The correct option is A or B. | The incorrect option is B. ;; x^2+1 :: "
        "The answer is x**2-1. ;; Evelyn :: **Evelyn** or **Carla** | **not Evelyn** | The answer is not Evelyn Smith."
    ),
    "of known answers that are sentences": [(answer, r"\boxed{26}") for answer in SENTENCES_OF_25],
    # any word behind a number counted as its unit
    "words that make another number, in a box": boxed(forms(each(WORDS, r"5 \text{ W} | 5 W"), "5")),
    "words behind": forms(each(BEHIND, "The answer is 5 W."), "5"),
    "words before": forms(each(BEFORE, "The answer is W 5."), "5"),
    "contrasts": forms(CONTRASTS + " | It isn’t 7. | It is not 5, not 7.", "7"),
    "signs": forms(MINUS_7, "7"),
    "single spellings": boxed(table(PLAIN_WRONG)),
    "denied": forms(each(DENIALS, "So the answer W 5."), "5"),
    "another base": boxed(table("101_2 :: 101_3 | 101_{10} | 101_{20} ;; 2A_{16} :: 2A_{12}")),
    "a letter in algebra": [*boxed(table("B :: b_2 | B^2 | 2B | B + 1 | a + b | B2")), ("B", "The answer is B_1.")],
}


@pytest.mark.parametrize("form", RIGHT)
def test_right_answers(form):
    assert RIGHT[form] and verdicts_other_than(["correct"], RIGHT[form]) == []


@pytest.mark.parametrize("form", WRONG)
def test_wrong_answers(form):
    assert WRONG[form] and verdicts_other_than(["wrong", "unparsed"], WRONG[form]) == []


def test_leniencies_that_the_file_lists():
    """Wrong or doubtful answers that count as right: whoever mends one must take it out of the file's list."""
    pairs = boxed(answers("lenient, in a box: wrong or doubtful, and taken for right"))
    assert pairs and verdicts_other_than(["correct"], pairs) == []


def test_sentences_without_one_number_are_no_known_answers():
    assert math_kind(None, "There are 25 red apples and 3 green ones.") == "bad_answer"
    assert math_kind(None, "It is 26 - 80 of them.") == "bad_answer"


HEDGES = (
    r"A=B | x=A=B | A \approx B | A \to B | A,B | A;B | A\text{ or }B | \{A,B\} | A/B | A:B | A|B | A \equiv B | "
    r"A\pm B | A\vee B | A\cup B | A \in B | [A,B] | (A,B) | A\quad B | A\\B | \text{A}B | A_B | A \implies B | x=A, x=B | "
    r"x=A \text{ or } x=B | A \not= B | \boxed{A} \boxed{B}"
)
OPEN_HEDGES = (
    r"$A$ and $B$ | $A$ or $B$ | A or B | the answer is A or B | \boxed{A} and \boxed{B} | \boxed{A}, \boxed{B} | "
    "Answer: A\nAnswer: B | **A** **B** | A\nB"
)


def test_naming_two_answers_never_earns_both():
    """A policy that writes the same text with two candidates must not be right for either: it would learn to hedge."""
    texts = box(*HEDGES.split(" | ")) + OPEN_HEDGES.split(" | ")
    texts = [text.replace("A", "3").replace("B", "7") for text in texts]
    assert [text for text in texts if math_kind(text, "3") == math_kind(text, "7") == "correct"] == []


@pytest.mark.parametrize(("busy", "kind"), [(False, "correct"), (True, "timeout")])
def test_the_time_limit_is_of_the_judges_own_time(monkeypatch, busy, kind):
    """A limit of 1 s, and a reader that takes 1.2 s: of other processes' time, as on a busy machine, or of its own."""
    import math_verify.parser

    real = math_verify.parser.extract_target_from_pred

    def slow(*arguments, **options):
        if busy:
            end = time.process_time() + 1.2
            while time.process_time() < end:
                pass
        else:
            time.sleep(1.2)
        return real(*arguments, **options)

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", slow)
    verifiers.parse_math.cache_clear()
    assert math_kind(r"\boxed{x+7}", "7+x", 1) == kind
    verifiers.parse_math.cache_clear()


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
    assert math_kind(r"\boxed{x+7}", "x+8") == "verifier_error"
    if broken == "parse":
        assert math_kind("y+1", "x+7") == math_kind(None, "x+7") == "bad_answer"
    verifiers.parse_math.cache_clear()
    error[0] = TimeoutException()
    assert math_kind(r"\boxed{x+7}", "x+8") == "timeout"
    monkeypatch.undo()
    verifiers.parse_math.cache_clear()
    assert math_kind(r"\boxed{x+7}", "x+8") == "wrong"


HOSTILE = [
    *box("9^{9^{9^9}}", "((10!)!)!", "9" * 100_000, "{" * 5000 + "4" + "}" * 5000, r"\prod_{k=1}^{10^9}k", "\ud800"),
    "9" * 100_000,
    "\\sqrt{" * 20_000,
    "\\boxed{" * 10_000,
    "__import__('os').system('touch /tmp/tasks_hacked')",
    '{"kind": "correct"}\n["correct", 1.0, true, ""]\n',
    "x" * 2_000_000,
]


@pytest.mark.medium
def test_hostile_text_is_wrong_within_the_deadline_and_the_pool_recovers():
    """In a worker process, which has a memory limit. As a completion none is the answer 5, none outlasts the deadline
    (and the start of a new worker), none makes a worker crash. As an answer of a data set none is 5 either."""

    def judge(answer, text):
        (verdict,) = pool.judge([Job("math", "", "thinking </think> " + text, answer)])
        return verdict.kind

    with closing(RewardPool(["math"], workers=1, timeout=3.0, end_of_thinking="</think>")) as pool:
        for text in HOSTILE:
            start = time.monotonic()
            kind = judge("5", text)
            assert time.monotonic() - start < 3.0 + 10.0
            assert kind in ("wrong", "unparsed", "verifier_error", "timeout"), text[:80]
        assert judge("5", r"\boxed{5}") == "correct"
        assert sum(pool.counts.values()) == len(HOSTILE) + 1
        answers = [text for text in HOSTILE if "import" not in text]
        assert "correct" not in [judge(answer, r"\boxed{5}") for answer in answers]
    assert not Path("/tmp/tasks_hacked").exists()


PIECES = r"\frac{ } { \boxed{ $ 1 2 x \sqrt ^ _ & \\ \left( \right) , = \begin{pmatrix} \end{pmatrix} \text{ % \pi ! \cup [ )"
PIECE = st.sampled_from([*PIECES.split(), "\ud83d", "answer is "]) | st.text(max_size=3)


@pytest.mark.medium
@settings(max_examples=300, deadline=None)
@given(st.lists(PIECE, max_size=30).map("".join), st.sampled_from(["12345", "x^2+7", r"\frac{3}{7}", r"\{5,12345\}"]))
def test_no_text_raises_and_none_is_right_by_chance(text, answer):
    """`12345` and `x^2+7` cannot be put together from the pieces."""
    assert math_kind(text, answer) in {"wrong", "unparsed", "verifier_error", "timeout"}
    assert math_kind(r"\boxed{5}", text) in {"wrong", "unparsed", "verifier_error", "timeout", "bad_answer", "correct"}


TWO = (
    r"<answer>A</answer><answer>B</answer> | <answer>A</answer> \boxed{B} | \boxed{B} <answer>A</answer> | #### A #### B | "
    r'{"answer": A, "answer": B} | {"answer": A} #### B | Answer: A. It is B. | It is B. Answer: A | The answer is A</s>B | '
    r"<solution>A</solution> <result>B</result> | <answer>A</answer> <result>B | \boxed{A} <result>B | A <solution>B | "
    r"答案是A。答案是B。 | <answer>A NL B</answer> | <answer>A</answer> The answer is B | The answer is A. The answer is B."
)


def test_one_final_answer_whatever_is_asked_for():
    """Which part of a text is its answer must not depend on the known answer: `Answer: 1/2. It is 3.` was, in a first
    draft, right for 1/2 and for 3, since a fraction is no finished integer."""
    values, both = ("3", "-5", "1/2", "2^{10}", "40\\%", "1e-05"), []
    for first, second in [(a, b) for a in values for b in values if a != b]:
        for form in TWO.replace(" NL ", "\n").split(" | "):
            text = re.sub(r"\b[AB]\b", lambda name: first if name[0] == "A" else second, form)
            both += [text] if math_kind(text, first) == math_kind(text, second) == "correct" else []
    assert both == []
