"""The supervised control: its evaluation by hand, its records, and what the real warm start can do."""

import json
from pathlib import Path

import pytest
import supervised_control as control
import torch

from runtime.flags import Flags
from tasks.arithmetic import IDS, ChainTask
from tasks.prompts import Problem
from tasks.warm_start import WarmStart, warm_start

ROOT = Path(__file__).resolve().parents[2]


def ids_of(text):
    return [IDS[word] for word in text.split()]


class Scripted:
    """A model whose `generate` returns what the test wrote, and remembers what it was asked."""

    def __init__(self, *legs):
        self.legs, self.asked = list(legs), []

    def generate(self, input_ids, attention_mask, max_new_tokens, **options):
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        self.asked.append((prompts, max_new_tokens))
        rows = [ids_of(text) for text in self.legs.pop(0)]
        longest = max(map(len, rows))
        return torch.cat([input_ids, torch.tensor([r + [IDS["<pad>"]] * (longest - len(r)) for r in rows])], 1)


def test_control_evaluates_with_forced_interruption(monkeypatch):
    """Three rollouts of the problem 7 a +5 b *3 c -4 at thinking budget 6: one ends by itself and is right, one is
    cut and gets the phrase (right), one has its answer cut after </think> and goes on without the phrase (wrong)."""
    monkeypatch.setattr(control, "Flags", lambda **_: Flags(min_budget=6, max_budget=6, answer_budget=4))
    prompt = ids_of("7 a +5 b *3 c -4 <think>")
    task = ChainTask(0, 1, 1)
    task.held_out = [Problem("key", tuple(prompt), "6 2")] * 3
    model = Scripted(["</think> 6 2 <eos>", "a +5 2 b *3 6", "a a a a </think> 6"], ["6 2 <eos>", "5 <eos>"])
    found = control.evaluate(model, task, 1)
    assert found == {"pass_rate": 2 / 3, "n_prompts": 3, "n_samples": 1, "interrupted": 1 / 3}
    assert model.asked[0] == ([prompt] * 3, 6)
    second = [prompt + ids_of("a +5 2 b *3 6 time up </think>"), prompt + ids_of("a a a a </think> 6")]
    assert model.asked[1] == (second, 4)


def test_control_has_the_answer_budget_of_a_run(monkeypatch):
    """Of 4 answer tokens, 2 are left to thinking that ended by itself at the fourth of 6: `6 2` has no room to end."""
    monkeypatch.setattr(control, "Flags", lambda **_: Flags(min_budget=6, max_budget=6, answer_budget=4))
    task, judged = ChainTask(0, 1, 1), []
    task.held_out = [Problem("key", tuple(ids_of("7 a +5 b *3 c -4 <think>")), "6 2")]
    task.reward = lambda problem, ids: judged.append(ids) or (-1.0, False)
    control.evaluate(Scripted(["a +5 2 </think> a a"], ["6 2 <eos>"]), task, 1)
    assert judged == [ids_of("a +5 2 </think> a a 6 2")]


@pytest.mark.long
def test_control_writes_the_records_of_an_evaluation(tmp_path, monkeypatch):
    quick = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)
    monkeypatch.setattr(control, "WarmStart", lambda: quick)
    monkeypatch.setattr(control, "ChainTask", lambda seed: ChainTask(seed, held_out_size=8))
    monkeypatch.chdir(tmp_path)
    words = "--tokens 300 --eval_every 150 --eval_samples 1 --output_dir run"
    records = control.main(words.split())
    written = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert written == records
    assert set(records[0]) >= {"step", "tokens", "pass_rate", "n_prompts", "n_samples"}
    assert (records[0]["step"], records[0]["tokens"]) == (0, 0)
    assert records[-1]["tokens"] >= 300
    assert [r["tokens"] for r in records] == sorted({r["tokens"] for r in records})


@pytest.mark.slow
def test_the_real_warm_start_knows_the_format_and_little_else():
    """Held-out pass rate at temperature 1 between .04 and .12 (512 problems x 2: standard deviation .009), thinking
    interrupted in .12 to .35 of the rollouts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(warm_start(ROOT / "runs" / "cache", seed=0))
    found = control.evaluate(model, ChainTask(0), 2)
    assert 0.04 < found["pass_rate"] < 0.12
    assert 0.12 < found["interrupted"] < 0.35
