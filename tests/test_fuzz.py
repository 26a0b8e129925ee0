"""Data sets are data: 10,000 hostile rows are read. Nothing raises, and every one is in some count. Slow. (Hostile
completions: test_verifiers.py.)"""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from tasks import data_sets
from tasks.rows import DataSet

pytestmark = pytest.mark.slow
PIECES = ["</think>", "\\boxed{", "}", "{", "\\frac{1}{2}", "####", "42", "-", "^", "$", "\\(", "\x00", "\x1b[2J", "\u202e",
          "\ud800", "\udfff", "\U0001f600", "\n", "\r", "\u2028", "9" * 300, "(", ")", "[", "]", "__import__('os')", "%s"]  # fmt: skip


def hostile(draw):
    """One text: random pieces, random bytes, deep nesting, or (rarely) a megabyte."""
    kind = draw.random()
    if kind < 0.0005:
        return draw.choice(PIECES) * 1_000_000
    if kind < 0.02:
        return draw.choice("([{") * draw.randint(100, 5000) + "1"
    if kind < 0.4:
        return draw.randbytes(draw.randint(0, 200)).decode("utf-8", "surrogateescape")
    return "".join(draw.choices(PIECES, k=draw.randint(0, 30)))


def test_ten_thousand_rows(tmp_path):
    """Every line that is not blank is a problem or is counted as skipped, by kind."""
    draw = random.Random(2)

    def line():
        kind = draw.random()
        if kind < 0.3:
            return draw.randbytes(draw.randint(1, 300)).replace(b"\n", b"").replace(b"\r", b"")
        if kind < 0.35:
            return b"[" * draw.randint(1, 20_000)
        if kind < 0.4:
            return json.dumps(draw.choice([1, None, [], "text", [[]], True])).encode()
        value = draw.choice(
            [hostile(draw)[:5000], 7, None, [], {"a": 1}, [{"role": "user", "content": hostile(draw)[:500]}]]
        )
        row = {"prompt": value, "answer": draw.choice(["42", "", None, 3.5, [], hostile(draw)[:500]])}
        return json.dumps(row if draw.random() < 0.9 else {"prompt": "x"}).encode()

    lines = [line() for _ in range(10_000)]
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "first", "answer": "1"}\n' + b"\n".join(lines) + b"\n")
    skipped = Counter()
    data = DataSet(str(tmp_path / "rows.jsonl"), None, 1.0)
    tokenizer = SimpleNamespace(chat_template=None)
    found = data_sets.read_problems(
        data, Encoder(tokenizer), data_sets.PromptOptions(), lambda answers: [True] * len(answers), False, skipped)  # fmt: skip
    text = (tmp_path / "rows.jsonl").read_bytes().decode("utf-8", "replace")
    written = sum(bool(part.strip()) for part in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    print(dict(skipped))
    assert len(found) + sum(skipped.values()) == written
    assert len(skipped) >= 5 and len(found) > 100


class Encoder:
    """A tokenizer of characters."""

    def __init__(self, template):
        self.chat_template = template.chat_template

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(c) % 40 for c in text] for text in texts]}
