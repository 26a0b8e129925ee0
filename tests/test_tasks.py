"""Chain mod 10: the problems, the exact reward, the split, the demonstrations and the cached warm start."""

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tasks
from tasks import (
    DIGITS,
    IDS,
    LABELS,
    OPERATIONS,
    PHRASE,
    WORDS,
    ChainTask,
    Demonstrator,
    Problem,
    WarmStart,
    apply,
    chain_text,
    chain_values,
    is_held_out,
    last_two,
    stable_key,
    supervised_steps,
    warm_start,
    wrong_results,
)

ROOT = Path(__file__).resolve().parents[1]
# A warm start of a few steps: the loss bound is met at once.
QUICK = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def task() -> ChainTask:
    return ChainTask(seed=0)


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def test_values_by_hand():
    """7 +5 = 12 -> 2; 2 *3 = 6; 6 -4 = 2. And 3 -9 = -6 -> 4, 4 *7 = 28 -> 8, 8 *9 = 72 -> 2."""
    assert chain_values(7, ["+5", "*3", "-4"]) == [7, 2, 6, 2]
    assert chain_values(3, ["-9", "*7", "*9"]) == [3, 4, 8, 2]
    assert chain_text(7, ["+5", "*3", "-4"]) == "7 a +5 b *3 c -4 <think>"


def test_every_operation_is_a_bijection_so_an_error_reaches_the_end():
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 21
    for operation in OPERATIONS:
        assert sorted(apply(operation, value) for value in range(10)) == list(range(10))
        assert any(apply(operation, value) != value for value in range(10))


def test_problems_have_the_right_answers_and_the_range_of_lengths(task):
    """The answers are computed again by Python's own arithmetic on the whole expression."""
    lengths = set()
    for problem in task.train[:300] + task.held_out:
        words = task.text(problem.prompt_ids).split()
        assert words[-1] == "<think>"
        operations = words[2:-1:2]
        assert words[1:-1:2] == list("abcdefgh")[: len(operations)]
        values = [eval("(" * k + words[0] + "".join(o + ")" for o in operations[:k])) % 10
                  for k in (len(operations) - 1, len(operations))]
        assert problem.answer == f"{values[0]} {values[1]}"
        assert problem.source == "chain"
        lengths.add(len(operations))
    assert lengths == set(range(2, 9))


def test_sizes_and_ranges_are_respected():
    small = ChainTask(seed=3, pool_size=40, held_out_size=30, min_ops=3, max_ops=4)
    assert (len(small.train), len(small.held_out)) == (40, 30)
    assert {len(p.prompt_ids) for p in small.train + small.held_out} == {2 + 2 * 3, 2 + 2 * 4}


@pytest.mark.parametrize("ops", [(1, 8), (2, 9), (5, 4)])
def test_a_range_outside_is_refused(ops):
    with pytest.raises(ValueError, match="min_ops"):
        ChainTask(min_ops=ops[0], max_ops=ops[1])


def test_more_problems_than_there_are_is_refused_not_an_endless_loop():
    """There are 10 * 21^2 = 4410 problems of two operations, an eighth of them held out."""
    with pytest.raises(ValueError, match="fewer than 700 distinct problems"):
        ChainTask(pool_size=10, held_out_size=700, min_ops=2, max_ops=2)


# ---------------------------------------------------------------------------------------------------------------------
# The reward


PROBLEM = Problem("key", tuple(ids_of("7 a +5 b *3 c -4 <think>")), "6 2")


@pytest.mark.parametrize("completion", [
    "a +5 2 b *3 6 c -4 2 </think> 6 2 <eos>",
    "</think> 6 2 <eos>",
    "a wait again 9 </think> 6 2 <eos>",
    "a +5 2 b *3 6 time up </think> 6 2 <eos>",
])
def test_right_answers(task, completion):
    assert task.reward(PROBLEM, ids_of(completion)) == (1.0, True)


@pytest.mark.parametrize("completion", [
    "",
    "6 2 <eos>",
    "a +5 2 b *3 6 c -4 2 6 2 <eos>",
    "</think>",
    "</think> 6 2",
    "</think> 6 <eos>",
    "</think> 2 <eos>",
    "</think> 2 6 <eos>",
    "</think> 5 2 <eos>",
    "</think> 6 3 <eos>",
    "</think> 6 2 2 <eos>",
    "</think> <eos> 6 2 <eos>",
    "</think> 6 2 <eos> <eos>",
    "</think> 6 2 <eos> <pad>",
    "</think> 6 2 <pad>",
    "</think> 5 2 <eos> </think> 6 2 <eos>",
    "</think> </think> 6 2 <eos>",
    "6 2 <eos> </think>",
])
def test_wrong_answers(task, completion):
    assert task.reward(PROBLEM, ids_of(completion)) == (-1.0, False)


def test_guessing_is_right_one_time_in_a_hundred(task):
    guesses = [ids_of(f"</think> {a} {b} <eos>") for a, b in itertools.product(DIGITS, DIGITS)]
    assert sum(correct for _, correct in task.score(PROBLEM, guesses)) == 1


def test_score_keeps_the_order_and_reward_leaves_its_input_alone(task):
    right, wrong = ids_of("</think> 6 2 <eos>"), ids_of("</think> 6 3 <eos>")
    copies = [list(right), list(wrong)]
    assert task.score(PROBLEM, [right, wrong, tuple(right)]) == [(1.0, True), (-1.0, False), (1.0, True)]
    assert [right, wrong] == copies
    assert task.score(PROBLEM, []) == []


# ---------------------------------------------------------------------------------------------------------------------
# The split


def test_keys_are_stable_across_processes():
    """The first 16 hex digits of SHA-256, whatever PYTHONHASHSEED says."""
    text = "7 a +5 b *3 c -4 <think>"
    assert stable_key(text) == hashlib.sha256(text.encode()).hexdigest()[:16]
    code = "import tasks; t = tasks.ChainTask(7, 3, 3); print([p.key for p in t.train + t.held_out])"
    keys = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout for seed in ("1", "2")}
    here = ChainTask(7, 3, 3)
    assert keys == {f"{[p.key for p in here.train + here.held_out]}\n"}


def test_held_out_is_apart_from_training_for_every_seed_and_size(task):
    held_out = {p.key for p in task.held_out}
    assert len(held_out) == 512
    assert all(p.key == stable_key(task.text(p.prompt_ids)) for p in task.train + task.held_out)
    for other in (task, ChainTask(1, 3000, 100), ChainTask(2, 500, 400, min_ops=2, max_ops=3)):
        train = {p.key for p in other.train}
        assert len(train) == len(other.train)
        assert not train & held_out
        assert not train & {p.key for p in other.held_out}
    assert [p.key for p in ChainTask(5, 10).held_out] == [p.key for p in task.held_out]
    assert [p.key for p in ChainTask(5, 10).train] != [p.key for p in task.train[:10]]


def test_one_in_eight_is_held_out():
    """8000 texts, expected 1000, standard deviation 30."""
    assert 880 < sum(is_held_out(f"text {i}") for i in range(8000)) < 1120


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


def test_every_word_is_one_token_and_the_saved_tokenizer_agrees(task, tmp_path):
    from transformers import AutoTokenizer

    task.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (task.tokenizer, loaded):
        assert tokenizer(" ".join(WORDS))["input_ids"] == list(range(len(WORDS)))
        assert tokenizer.decode(list(range(len(WORDS)))) == " ".join(WORDS)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (IDS["<eos>"], IDS["<pad>"])
        assert len(tokenizer) == len(WORDS) == len(set(WORDS))
    assert task.stop_ids == (loaded.eos_token_id,)
    assert task.text(task.phrase_ids) == " ".join(PHRASE)
    assert task.phrase_ids[-len(task.end_of_thinking_ids) :] == task.end_of_thinking_ids


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations


def test_last_two_by_hand():
    """The newest results of the two furthest steps; a step without its result does not count; then the start digit."""
    words = str.split
    assert last_two(7, words("a +5 2 b *3 6 c -4 2")) == ["6", "2"]
    assert last_two(7, words("a +5 2 b *3 6 c -4")) == ["2", "6"]
    assert last_two(7, words("a +5 2 b *3 6 wait b *3 5")) == ["2", "5"]
    assert last_two(7, words("a +5 2 b *3 6 again a +5 1")) == ["1", "6"]
    assert last_two(7, words("a +5 2")) == ["7", "2"]
    assert last_two(7, []) == ["7", "7"]


def test_wrong_facts():
    """40 % of 21 * 10 facts are 84; each is wrong, the table is fixed by the seed."""
    table = wrong_results(0.4, 0)
    assert len(table) == 84
    assert all(0 <= result <= 9 and result != apply(*fact) for fact, result in table.items())
    assert table == wrong_results(0.4, 0) != wrong_results(0.4, 1)
    assert wrong_results(0.0, 0) == {}


def test_clean_demonstrations_earn_the_reward_and_are_never_held_out(task):
    demonstrator = Demonstrator(WarmStart(), 0, corrupted=False)
    for _ in range(300):
        prompt, completion, taught = demonstrator.demonstration()
        assert not is_held_out(" ".join(prompt))
        values = chain_values(int(prompt[0]), prompt[2:-1:2])
        problem = Problem("", tuple(ids_of(" ".join(prompt))), f"{values[-2]} {values[-1]}")
        assert task.reward(problem, ids_of(" ".join(completion))) == (1.0, True)
        assert all(taught)
        assert len(completion) == 3 * (len(values) - 1) + 4


def test_corrupted_demonstrations_have_the_asked_for_mistakes():
    """Of the shown results: a wrong fact shows its own wrong result .70 + .30 * .18 / 10 = .7054 of the time, another
    fact is right .82 + .18 / 10 = .838. 20,000 draws each: standard deviation .003."""
    demonstrator = Demonstrator(WarmStart(), 0, corrupted=True)
    wrong, right = next(iter(demonstrator.wrong)), ("+1", 0)
    right = next((o, v) for o in OPERATIONS for v in range(10) if (o, v) not in demonstrator.wrong)
    share = sum(demonstrator.result(*wrong) == demonstrator.wrong[wrong] for _ in range(20_000)) / 20_000
    assert abs(share - 0.7054) < 0.015
    share = sum(demonstrator.result(*right) == apply(*right) for _ in range(20_000)) / 20_000
    assert abs(share - 0.838) < 0.015


def test_corrupted_demonstrations_ramble_as_asked_for():
    """2,000 demonstrations. Restart .35, cut .15 (standard deviations .011, .008); every step kept its chain: the
    value that a result was computed from is the result before, or the start digit after a restart."""
    settings = replace(WarmStart(), wrong_facts=0.0, noise=0.0, cut=0.0)
    demonstrator = Demonstrator(settings, 0, corrupted=True)
    restarts = steps = rechecks = over_budget = 0
    for _ in range(2000):
        prompt, completion, _ = demonstrator.demonstration()
        thinking = completion[: completion.index("</think>")]
        restarts += "again" in thinking
        assert thinking.count("again") <= 1
        rechecks += thinking.count("wait")
        steps += sum(word in LABELS for word in thinking) - thinking.count("wait")
        over_budget += len(thinking) > 30
        values = chain_values(int(prompt[0]), prompt[2:-1:2])
        for i, word in enumerate(thinking):
            if word in LABELS:
                k = LABELS.index(word)
                assert thinking[i + 1 : i + 3] == [prompt[2 + 2 * k], str(values[k + 1])]
        assert completion[-3:] == [str(values[-2]), str(values[-1]), "<eos>"]
    assert abs(restarts / 2000 - 0.35) < 0.04
    assert abs(rechecks / steps - 0.15) < 0.02
    assert 0.1 < over_budget / 2000 < 0.35
    cut = sum(PHRASE[0] in Demonstrator(WarmStart(), seed, True).demonstration()[1] for seed in range(1000))
    assert 0.10 < cut / 1000 < 0.20


def test_batch_teaches_the_completion_but_not_prompt_phrase_or_padding():
    settings = replace(WarmStart(), cut=0.5, batch_size=200)
    ids, labels = Demonstrator(settings, 0, corrupted=True).batch()
    assert ids.shape == labels.shape == (200, ids.shape[1])
    seen = set()
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        words = [WORDS[i] for i in row]
        start, end = words.index("<think>") + 1, words.index("<eos>") + 1
        phrase = set(range(words.index("time"), words.index("time") + 3)) if "time" in words else set()
        seen.add(bool(phrase))
        for t in range(len(row)):
            taught = start <= t < end and t not in phrase
            assert wanted[t] == (row[t] if taught else -100)
        assert set(words[end:]) <= {"<pad>"}
    assert seen == {True, False}


def test_streams_differ_in_problems_and_share_the_wrong_facts():
    streams = ("warm start", "warm start", "control")
    first, again, control = (Demonstrator(WarmStart(), 0, True, stream) for stream in streams)
    assert first.wrong == control.wrong
    one, two, three = ([d.demonstration() for _ in range(50)] for d in (first, again, control))
    assert one == two
    assert not {" ".join(p) for p, _, _ in one} & {" ".join(p) for p, _, _ in three}


# ---------------------------------------------------------------------------------------------------------------------
# The warm start


def test_supervised_step_predicts_the_next_token_of_taught_places_only():
    """The loss by brute force: -log p(label at t | logits at t - 1), averaged over the taught places alone."""
    model = tasks.new_model(WarmStart(), 0)
    ids, labels = Demonstrator(replace(QUICK, cut=1.0), 0, True).batch()
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits.double().log_softmax(-1)
    losses = [-logprobs[n, t - 1, labels[n, t]].item()
              for n in range(ids.shape[0]) for t in range(1, ids.shape[1]) if labels[n, t] != -100]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = tasks.warm_start_optimizer(model, WarmStart())
    first, second = supervised_steps(model, optimizer, [(ids, labels), (ids, labels)])
    assert first == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert second < first
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


def test_warm_start_is_cached_under_its_settings(tmp_path):
    lines: list[str] = []
    folder = warm_start(tmp_path, settings=QUICK, report=lines.append)
    assert len(lines) == 2
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert warm_start(tmp_path, settings=QUICK, report=lines.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert len(lines) == 2
    assert warm_start(tmp_path, settings=replace(QUICK, noise=0.2)) != folder
    assert warm_start(tmp_path, settings=QUICK, seed=1) != folder
    assert len(list(tmp_path.iterdir())) == 3


def test_warm_start_is_trained_again_when_its_code_changes(tmp_path, monkeypatch):
    folder = warm_start(tmp_path, settings=QUICK)
    source = tasks.inspect.getsource
    monkeypatch.setattr(tasks.inspect, "getsource",
                        lambda x: source(x) + ("# changed" if x is tasks.last_two else ""))
    assert warm_start(tmp_path, settings=QUICK) != folder


def test_warm_start_loads_in_transformers_and_is_the_same_every_time(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one, two = (warm_start(tmp_path / name, settings=QUICK) for name in ("one", "two"))
    config = json.loads((one / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["tie_word_embeddings"], config["vocab_size"]) == (32, True, len(WORDS))
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, two)]
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}
    assert models[0].generation_config.eos_token_id == IDS["<eos>"]
    assert AutoTokenizer.from_pretrained(one)("7 a +5")["input_ids"] == ids_of("7 a +5")


def test_a_warm_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="clean_steps"):
        warm_start(tmp_path, settings=replace(QUICK, clean_loss=0.0, clean_steps=2))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tasks, "word_tokenizer", lambda: 1 / 0)
    monkeypatch.setattr(tasks.inspect, "getsource", lambda x: "")
    with pytest.raises(ZeroDivisionError):
        warm_start(tmp_path, settings=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_that_finishes_first_is_taken(tmp_path, monkeypatch):
    folder = warm_start(tmp_path, settings=QUICK)
    kept = folder.rename(tmp_path / "kept")
    train = tasks.train_warm_start

    def slower(*args):
        model = train(*args)
        kept.rename(folder)
        return model

    real = tasks.inspect.getsource
    monkeypatch.setattr(tasks.inspect, "getsource", lambda x: real(train if x is slower else x))
    monkeypatch.setattr(tasks, "train_warm_start", slower)
    assert warm_start(tmp_path, settings=QUICK) == folder
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_warm_start_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    warm_start(tmp_path, settings=QUICK)
    ChainTask(0, 5, 5)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


# ---------------------------------------------------------------------------------------------------------------------
# The supervised control


def supervised_control():
    sys.path.insert(0, str(ROOT / "tools"))
    import supervised_control

    return supervised_control


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


def test_control_evaluates_with_forced_interruption(task):
    """Three rollouts of the problem 7 a +5 b *3 c -4 at thinking budget 6: one ends by itself and is right, one is
    cut and gets the phrase (right), one has its answer cut after </think> and goes on without the phrase (wrong)."""
    small = ChainTask(0, 1, 1)
    small.held_out = [PROBLEM, PROBLEM, PROBLEM]
    model = Scripted(["</think> 6 2 <eos>", "a +5 2 b *3 6", "a a a a </think> 6"], ["6 2 <eos>", "5 <eos>"])
    found = supervised_control().evaluate(model, small, 1, 6, 4)
    assert found == {"pass_rate": 2 / 3, "n_prompts": 3, "n_samples": 1, "interrupted": 1 / 3}
    prompt = list(PROBLEM.prompt_ids)
    assert model.asked[0] == ([prompt] * 3, 6)
    second = [prompt + ids_of("a +5 2 b *3 6 time up </think>"), prompt + ids_of("a a a a </think> 6")]
    assert model.asked[1] == (second, 4)


def test_control_writes_the_records_of_an_evaluation(tmp_path, monkeypatch):
    control = supervised_control()
    monkeypatch.setattr(control, "WarmStart", lambda: QUICK)
    control.WarmStart.lr = 1e-3
    records = control.main(["--tokens", "300", "--eval_every", "150", "--held_out", "8", "--eval_samples", "1",
                            "--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "run")])
    written = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert written == records
    assert set(records[0]) >= {"step", "tokens", "pass_rate", "n_prompts", "n_samples"}
    assert (records[0]["step"], records[0]["tokens"]) == (0, 0)
    assert records[-1]["tokens"] >= 300
    assert [r["tokens"] for r in records] == sorted({r["tokens"] for r in records})


@pytest.mark.slow
def test_the_real_warm_start_knows_the_format_and_little_else(tmp_path_factory):
    """Held-out pass rate at temperature 1 between .04 and .12 (512 problems x 2: standard deviation .009), thinking
    interrupted in .12 to .35 of the rollouts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(warm_start(ROOT / "runs" / "cache", seed=0))
    found = supervised_control().evaluate(model, ChainTask(0), 2, 30, 4)
    assert 0.04 < found["pass_rate"] < 0.12
    assert 0.12 < found["interrupted"] < 0.35
