"""Model outputs and data sets are data: 10,000 hostile completions and 10,000 hostile rows through rewards, reading,
logging and metrics. Nothing raises, and every one is in some count. Slow."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from scripted import batch_of

import pipeline_rl
from runtime.run_folder import Folder
from tasks import data_sets
from tasks.judges import Job, RewardPool
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


def test_ten_thousand_completions(tmp_path):
    """Every completion gets a verdict; the verdicts' counts add up; logging and metrics take them all."""
    draw = random.Random(1)
    texts = [hostile(draw) for _ in range(10_000)]
    with RewardPool(["math", "exact"], workers=2, timeout=10.0, end_of_thinking="</think>") as pool:
        verdicts = pool.judge([Job(draw.choice(["math", "exact"]), "p", text, "42") for text in texts])
        assert len(verdicts) == 10_000 and sum(pool.counts.values()) == 10_000
    print(dict(pool.counts))
    assert all(verdict.reward in (1.0, -1.0) for verdict in verdicts)
    folder = Folder(tmp_path)
    for text, verdict in zip(texts, verdicts, strict=True):
        folder.append("samples.jsonl", {"completion": text[:2000], "reward": verdict.reward})
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")[:-1]
    assert len(lines) == 10_000 and all(min(line) >= 32 and max(line) < 127 for line in lines)  # nothing for a terminal
    groups = []
    for number in range(0, 10_000, 16):
        rollouts = []
        for text, verdict in zip(texts[number : number + 16], verdicts[number : number + 16], strict=True):
            ids = [ord(c) % 47 for c in text[:30]] or [1]
            reward, correct = verdict.reward, verdict.correct
            new = pipeline_rl.Rollout(
                ids, [-1.0] * len(ids), [0] * len(ids), [1] * len(ids), "stop", False, 0, reward, correct
            )
            rollouts.append(new)
        groups.append(pipeline_rl.Group(number, SimpleNamespace(prompt_ids=[1], key=str(number)), 0, rollouts))
    _, record = batch_of(groups, tmp_path)
    assert record["pass_rate"] * 10_000 == pytest.approx(sum(verdict.correct for verdict in verdicts))


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
