"""Chain mod 10 (problems, exact reward, split, demonstrations, cached warm start) and the tasks made of data sets."""

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from length_control import PHRASE as PAPERS_PHRASE
from length_control import Interruption
from tasks import data_sets, judges, tokens
from tasks import warm_start as module
from tasks.chain import (
    DIGITS,
    IDS,
    LABELS,
    OPERATIONS,
    PHRASE,
    WORDS,
    ChainTask,
    apply,
    chain_text,
    chain_values,
    is_held_out,
)
from tasks.data_sets import PromptOptions, load_dataset_task
from tasks.prompts import Problem, epoch_order, stable_key
from tasks.rows import DataSet, final_answer, parse_data_sets
from tasks.warm_start import Demonstrator, WarmStart, last_two, supervised_steps, warm_start, wrong_results

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
    code = ("import random\nfrom tasks import chain\n"
            "print([p.key for p in chain.ChainTask._draw(random.Random('train 7'), 3, (2, 8), held_out=False)])")
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout
    assert found == f"{[p.key for p in ChainTask(7, 3, 3).train]}\n"


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
    assert task.text(ids_of("</think> 6 2 <eos> <pad>")) == "</think> 6 2 <eos> <pad>"
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
    value that a result was computed from is the result before, or the start digit after a restart. Half of the
    restarts come at the end, and of the others one in n: .5 + .5 * mean(1/2, ..., 1/8) = .623 of 700 (.018)."""
    settings = replace(WarmStart(), wrong_facts=0.0, noise=0.0, cut=0.0)
    demonstrator = Demonstrator(settings, 0, corrupted=True)
    restarts = steps = rechecks = over_budget = at_end = 0
    for _ in range(2000):
        prompt, completion, _ = demonstrator.demonstration()
        thinking = completion[: completion.index("</think>")]
        restarts += "again" in thinking
        assert thinking.count("again") <= 1
        last_label = prompt[-3]
        at_end += "again" in thinking and last_label in thinking[: thinking.index("again")]
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
    assert abs(at_end / restarts - 0.623) < 0.07
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
    model = module.new_model(WarmStart(), 0)
    ids, labels = Demonstrator(replace(QUICK, cut=1.0), 0, True).batch()
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits.double().log_softmax(-1)
    losses = [-logprobs[n, t - 1, labels[n, t]].item()
              for n in range(ids.shape[0]) for t in range(1, ids.shape[1]) if labels[n, t] != -100]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = module.warm_start_optimizer(model, WarmStart())
    first, second = supervised_steps(model, optimizer, [(ids, labels), (ids, labels)])
    assert first == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert second < first
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


def test_each_supervised_step_uses_its_own_batch_alone():
    """With learning rate 0 the gradients after two steps are those of the second batch, cut to norm 1."""
    model = module.new_model(WarmStart(), 0)
    demonstrator = Demonstrator(QUICK, 0, True)
    batches = [demonstrator.batch(), demonstrator.batch()]
    list(supervised_steps(model, torch.optim.SGD(model.parameters(), lr=0.0), batches))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ids, labels = batches[1]
    logprobs = model(input_ids=ids).logits.log_softmax(-1)
    places = [(n, t) for n in range(ids.shape[0]) for t in range(ids.shape[1]) if labels[n, t] != -100]
    (-sum(logprobs[n, t - 1, labels[n, t]] for n, t in places) / len(places)).backward()
    norm = sum((p.grad**2).sum() for p in model.parameters()) ** 0.5
    assert norm > 1
    for p, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, p.grad / norm, rtol=1e-3, atol=1e-6)


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
    source = module.inspect.getsource
    monkeypatch.setattr(module.inspect, "getsource",
                        lambda x: source(x) + ("# changed" if x is module.last_two else ""))
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
    monkeypatch.setattr(module, "word_tokenizer", lambda: 1 / 0)
    monkeypatch.setattr(module.inspect, "getsource", lambda x: "")
    with pytest.raises(ZeroDivisionError):
        warm_start(tmp_path, settings=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_that_finishes_first_is_taken(tmp_path, monkeypatch):
    folder = warm_start(tmp_path, settings=QUICK)
    kept = folder.rename(tmp_path / "kept")
    train = module.train_warm_start

    def slower(*args):
        model = train(*args)
        kept.rename(folder)
        return model

    real = module.inspect.getsource
    monkeypatch.setattr(module.inspect, "getsource", lambda x: real(train if x is slower else x))
    monkeypatch.setattr(module, "train_warm_start", slower)
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


# ---------------------------------------------------------------------------------------------------------------------
# Data sets


def bpe_tokenizer(chat: bool, think: bool = True):
    """A byte-level BPE tokenizer trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"] + ["<think>", "</think>"] * think
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["What is 1 + 2? It is boxed. Okay, time is up. Let me stop."] * 10, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    if chat:
        found.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}[assistant]{% endif %}")
    return found


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(chat=True)


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def sums(n, start=0, prompt="question", answer="answer"):
    return [{prompt: f"What is {i} + 2?", answer: str(i + 2)} for i in range(start, start + n)]


def load(path, tokenizer, held_out=10, reward="exact", reward_workers=1, **options):
    names = {k: options.pop(k) for k in list(options) if k in PromptOptions.__dataclass_fields__}
    return load_dataset_task(path, tokenizer, PromptOptions(held_out=held_out, **names), reward=reward,
                             reward_workers=reward_workers, **options)


def test_parse_data_sets():
    assert parse_data_sets("a.jsonl") == [DataSet("a.jsonl")]
    assert parse_data_sets("openai/gsm8k:main=2, my/own.parquet=0.5") == [
        DataSet("openai/gsm8k", "main", None, 2.0), DataSet("my/own.parquet", None, None, 0.5)]
    assert parse_data_sets("a:main:test=3,b::train[:100]=1") == [
        DataSet("a", "main", "test", 3.0), DataSet("b", None, "train[:100]", 1.0)]
    for bad in ("", "a=0", "a=-1", "a=x", "a=inf", "a=nan", "a,,b", "=1", "a=", ":main"):
        with pytest.raises(ValueError, match="`dataset` must be"):
            parse_data_sets(bad)
    with pytest.raises(ValueError, match="twice"):
        parse_data_sets("a=1,b=2,a=3")
    for some in ("a=1,b", "a,b=2", "a=1,b,c=1"):
        with pytest.raises(ValueError, match="give every data set a weight, or none"):
            parse_data_sets(some)
    for file in ("rows.jsonl::test", "rows.parquet:main", "rows.jsonl:main:test=2"):
        with pytest.raises(ValueError, match=r"`dataset` rows\.\S+: a file has no configuration and no split"):
            parse_data_sets(file)


def test_final_answer():
    assert final_answer("We add 40 and 2.\n#### 42") == "42"
    assert final_answer("#### 1 #### 2,000 ") == "2,000"
    assert final_answer(" x ") == "x"
    assert (final_answer(42), final_answer(42.0), final_answer(0.5), final_answer(-3)) == ("42", "42", "0.5", "-3")
    assert (final_answer(1e-05), final_answer(-2.5e-6), final_answer(12.5)) == ("0.00001", "-0.0000025", "12.5")
    assert (final_answer(1e22), final_answer(1e23)) == ("1" + 22 * "0", "1" + 23 * "0")
    assert (final_answer(-0.0), final_answer(100.0), final_answer(-0.5)) == ("0", "100", "-0.5")
    assert final_answer("\ud800") == "\ufffd"
    for bad in (None, True, [1], {"a": 1}, float("nan"), float("inf")):
        assert final_answer(bad) is None


SHAPES = {
    "gsm8k": {"question": "Tom has {i} + 2?", "answer": "He adds <<{i}+2={s}>>.\n#### {s}"},
    "polaris": {"problem": "Tom has {i} + 2?", "answer": "{s}", "difficulty": "3/8"},
    "deepscaler": {"problem": "Tom has {i} + 2?", "answer": "{s}", "solution": "Clearly \\boxed{{1}}."},
    "chat": {"prompt": [{"role": "user", "content": "Tom has {i} + 2?"}], "reward_model": {"ground_truth": "{s}"}},
}


def shaped(value, i):
    if isinstance(value, str):
        return value.format(i=i, s=i + 2) if "{{" not in value else value
    if isinstance(value, dict):
        return {key: shaped(x, i) for key, x in value.items()}
    return [shaped(x, i) for x in value]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_shapes_out_of_the_box(tmp_path, tokenizer, shape, kind):
    rows = [shaped(SHAPES[shape], i) for i in range(30)]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    task = load(str(path), tokenizer)
    assert (len(task.train), len(task.held_out), task.skipped) == (20, 10, {})
    for problem in task.train + task.held_out:
        i = int(problem.answer) - 2
        assert task.text(problem.prompt_ids) == f"[user]Tom has {i} + 2?[assistant]"
        assert problem.key == stable_key(f"Tom has {i} + 2?")
        assert problem.source == str(path)
    task.close()


def test_a_folder_in_the_hubs_format_loads_through_datasets(tmp_path, tokenizer, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "train.jsonl", sums(15))
    write_rows(folder / "test.jsonl", sums(12, 100))
    task = load(str(folder), tokenizer)
    assert {int(p.answer) for p in task.train + task.held_out} == set(range(2, 17))
    task.close()
    task = load(f"{folder}::test", tokenizer)
    assert {int(p.answer) for p in task.train + task.held_out} == set(range(102, 114))
    task.close()


def test_the_split_is_by_hash_whatever_the_order_and_the_template(tmp_path, tokenizer):
    """The ten smallest SHA-256 of the prompts are held out; order, duplicates and template change nothing."""
    rows = sums(60)
    smallest = sorted(hashlib.sha256(row["question"].encode()).hexdigest() for row in rows)[:10]
    expected = {digest[:16] for digest in smallest}
    random.Random(0).shuffle(rows)
    again = [{**row, "question": "  " + row["question"].replace(" ", "  ") + "\n"} for row in rows[:25]]
    for name, some, options in (
        ("one", sums(60), {}),
        ("two", rows + again + again, {"prompt_template": "Solve: {prompt} Thanks {x}."}),
        ("three", rows, {"apply_chat_template": False}),
    ):
        task = load(write_rows(tmp_path / f"{name}.jsonl", some), tokenizer, **options)
        assert {p.key for p in task.held_out} == expected
        assert len(task.train) == 50
        assert not {p.key for p in task.train} & expected
        assert task.skipped == ({"duplicate_prompt": 50} if name == "two" else {})
        task.close()


def test_by_default_a_thousand_are_held_out(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", sums(1003))
    task = load_dataset_task(path, tokenizer, reward="exact", reward_workers=1)
    assert (len(task.held_out), len(task.train)) == (1000, 3)
    task.close()


def test_template_and_chat_template(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"question": "What is {prompt} + {x}?", "answer": "1"}, *sums(11)])
    options = {"prompt_template": "Q: {prompt} Box it: \\boxed{}."}
    with_chat, without = load(path, tokenizer, **options), load(path, tokenizer, apply_chat_template=False, **options)
    plain = load(path, bpe_tokenizer(chat=False), **options)
    key = stable_key("What is {prompt} + {x}?")
    text = "Q: What is {prompt} + {x}? Box it: \\boxed{}."
    for task, expected in ((with_chat, f"[user]{text}[assistant]"), (without, text), (plain, text)):
        problem = next(p for p in task.train + task.held_out if p.key == key)
        assert task.text(problem.prompt_ids) == expected
        task.close()


def test_bad_rows_are_counted_by_kind(tmp_path, tokenizer):
    bad = [
        "{not json", "[" * 100_000, "[1, 2]", '"text"', "",
        {"question": "", "answer": "1"}, {"question": " \n", "answer": "1"}, {"question": 5, "answer": "1"},
        {"question": [{"role": "user"}], "answer": "1"}, {"question": [], "answer": "1"},
        {"question": "no answer"}, {"question": "null", "answer": None}, {"question": "list", "answer": [1]},
        {"question": "bool", "answer": True}, {"question": "empty", "answer": " "},
        {"question": "empty2", "answer": "#### "},
        {"question": "unreadable", "answer": "\\frac{"}, {"question": "long " * 200, "answer": "1"},
        {"question": "What is 3 + 2?", "answer": "5"}, {"question": "lone \ud800", "answer": "7"},
        {"answer": "1"},
    ]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [{"other": 1}, *sums(20), *bad])
    task = load(path, tokenizer, reward="math", max_prompt_tokens=60)
    assert task.skipped == {
        "not_json": 2, "not_an_object": 2, "empty_prompt": 2, "prompt_is_no_text": 5, "no_answer": 2,
        "answer_is_no_text": 2, "empty_answer": 2, "unreadable_answer": 1, "prompt_too_long": 1, "duplicate_prompt": 1,
    }  # fmt: skip
    assert len(task.train) + len(task.held_out) == 21
    assert all(len(p.prompt_ids) <= 60 for p in task.train + task.held_out)
    task.close()


def test_a_prompt_as_long_as_the_limit_stays(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", sums(12, 10))
    length = len(tokenizer.apply_chat_template([{"role": "user", "content": "What is 10 + 2?"}], return_dict=False,
                                               add_generation_prompt=True))
    task = load(path, tokenizer, max_prompt_tokens=length)
    assert not task.skipped
    task.close()
    with pytest.raises(ValueError, match="prompt_too_long"):
        load(path, tokenizer, max_prompt_tokens=length - 1)


@pytest.mark.parametrize(("change", "words"), [
    ({"datasets": "missing.jsonl"}, "`dataset` missing.jsonl: there is no such file"),
    ({"datasets": "notes.txt"}, "must end with .jsonl or .parquet"),
    ({"datasets": "broken.parquet"}, "`dataset` broken.parquet cannot be loaded"),
    ({"datasets": "empty.jsonl"}, "(?s)no row has prompt, problem.*none at all.*`prompt_column`"),
    ({"prompt_column": "text"}, "(?s)no row has text.*columns are answer, question.*`prompt_column`"),
    ({"answer_column": "label"}, "(?s)no row has label.*columns are answer, question.*`answer_column`"),
    ({"datasets": "nocolumn.jsonl"}, "(?s)no row has answer, ground_truth.*`answer_column`"),
    ({"held_out": 12}, "(?s)12 usable prompts.*`held_out` 12"),
    ({"prompt_template": "{question}"}, "`prompt_template` must hold {prompt}"),
    ({"interruption_phrase": "Stop."}, "`interruption_phrase` must end with"),
    ({"stop_tokens": "<|end|>, <nope>,<|END|>"}, "`stop_tokens`: the tokenizer has no token '<nope>', '<|END|>'; "),
    ({"stop_tokens": ""}, "`stop_tokens`: the tokenizer has no token ''"),
    ({"thinking": False, "end_of_thinking": "</think>"}, "`end_of_thinking` is for models that think"),
    ({"reward": "exact,exact"}, "`reward` must be one name or one for each of the 1"),
    ({"reward": "exactly"}, "`reward` must be one of"),
])  # fmt: skip
def test_bad_options_name_the_flag_and_leave_no_process(tmp_path, monkeypatch, tokenizer, change, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", sums(12))
    write_rows(tmp_path / "nocolumn.jsonl", [{"question": "a", "b": 1}])
    for name in ("notes.txt", "broken.parquet", "empty.jsonl"):
        (tmp_path / name).write_text("")
    pools = []
    real = judges.RewardPool
    monkeypatch.setattr(data_sets, "RewardPool", lambda *a, **k: pools.append(real(*a, **k)) or pools[-1])
    with pytest.raises(ValueError, match=words):
        load(change.pop("datasets", "good.jsonl"), tokenizer, **change)
    assert all(worker.process.poll() is not None for pool in pools for worker in pool._workers)


def test_a_data_set_that_the_hub_does_not_have(tokenizer, monkeypatch, tmp_path):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def offline(*_, **__):
        raise DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"(?s)`dataset` no/such cannot be loaded.*NAME:CONFIG"):
        load("no/such:main", tokenizer)


def test_named_columns_and_nested_ones(tmp_path, tokenizer):
    rows = [{"prompt": "ignored", "in": {"text": f"Say {i}"}, "a.b": str(i), "answer": "ignored"} for i in range(12)]
    task = load(write_rows(tmp_path / "a.jsonl", rows), tokenizer, prompt_column="in.text", answer_column="a.b")
    assert all(p.key == stable_key(f"Say {p.answer}") for p in task.train + task.held_out)
    task.close()


def test_scores_are_of_what_follows_the_thinking(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, reward="math")
    problem = task.train[0]

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    right = [ids(f"thinking</think>It is \\boxed{{{problem.answer}}}.<|end|>"), ids(f"</think>{problem.answer}")]
    unfinished, other = ids(f"\\boxed{{{problem.answer}}}"), ids("</think>\\boxed{-1}<|end|>")
    wrong = [unfinished, other, ids(f"</think>{problem.answer}1"), []]
    assert task.score(problem, right + wrong) == [(1.0, True)] * 2 + [(-1.0, False)] * 4
    assert task.reward(problem, tuple(right[0])) == (1.0, True)
    assert task.reward(problem, wrong[1]) == (-1.0, False)
    assert task.counts == Counter(correct=3, unfinished=2, wrong=3)
    assert task.end_of_thinking_ids == tuple(ids("</think>"))
    assert task.phrase_ids[-1:] == task.end_of_thinking_ids
    assert task.text(task.phrase_ids) == (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>")
    task.close()


def test_exact_does_not_see_the_stop_token_but_sees_another(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    problem = task.train[0]
    body = tokenizer.encode(f"</think>{problem.answer}", add_special_tokens=False)
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert task.score(problem, [body, [*body, stop], [*body, stop, stop], [*body, pad]]) == [
        (1.0, True), (1.0, True), (-1.0, False), (-1.0, False)]
    task.close()


def test_a_model_that_does_not_think_apart(tmp_path):
    tokenizer = bpe_tokenizer(chat=True, think=False)
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    assert task.end_of_thinking_ids == task.phrase_ids == ()
    ids = tokenizer.encode(task.train[0].answer, add_special_tokens=False)
    assert task.reward(task.train[0], ids) == (1.0, True)
    task.close()
    task = load(write_rows(tmp_path / "b.jsonl", sums(12)), tokenizer, end_of_thinking="</think>")
    assert len(task.end_of_thinking_ids) > 1
    assert task.thinking_end(task.phrase_ids) == len(task.phrase_ids)
    assert task.reward(task.train[0], ids) == (-1.0, False)
    assert task.reward(task.train[0], [*task.end_of_thinking_ids, *ids]) == (1.0, True)
    task.close()


def test_stop_tokens_come_from_the_generation_config_too(tmp_path):
    """Chat models end a turn with one token and a text with another; the model's generation_config.json names both."""
    from transformers import AutoTokenizer, GenerationConfig

    bpe_tokenizer(chat=True).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0,)
    GenerationConfig(eos_token_id=[7, 0]).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 7)
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert tokens.default_stop_ids(AutoTokenizer.from_pretrained(tmp_path)) == (0, 9)


def test_stop_tokens_are_given_by_name(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, stop_tokens="<|pad|>, <|end|>")
    assert task.stop_ids == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    task.close()


def test_a_tokenizer_without_an_end_needs_a_stop_token(tmp_path):
    tokenizer = bpe_tokenizer(chat=True)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token; name one with `stop_tokens`"):
        load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)


def test_thinking_decides_what_is_judged(tmp_path, tokenizer):
    """The tokenizer knows `</think>`, as those of instruct models do that never think. A right answer at once is
    unfinished for `None` and `True`, and right for `False`; one behind `</think>` is right for a model that thinks."""
    path = write_rows(tmp_path / "a.jsonl", sums(12))
    for thinking, expected in ((None, [False, True]), (True, [False, True]), (False, [True, False])):
        task = load(path, tokenizer, thinking=thinking)
        answer = task.train[0].answer
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (answer, f"so</think>{answer}")]
        assert [correct for _, correct in task.score(task.train[0], ids)] == expected
        assert (task.end_of_thinking_ids == ()) == (thinking is False)
        task.close()


def test_a_model_that_thinks_without_a_token_for_its_end(tmp_path):
    """`True` needs no `</think>` in the vocabulary; another end of thinking replaces it."""
    tokenizer = bpe_tokenizer(chat=False, think=False)
    for end in ("</think>", "DONE"):
        task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, thinking=True,
                    end_of_thinking=None if end == "</think>" else end)
        ids = tokenizer.encode(f"so {end} {task.train[0].answer}", add_special_tokens=False)
        assert task.reward(task.train[0], ids) == (1.0, True)
        assert tokenizer.decode(task.end_of_thinking_ids) == end
        task.close()


def test_the_chat_template_is_told_whether_to_think(tmp_path):
    """A template as Qwen3's: thinking unless `enable_thinking` is false, which closes it in the prompt."""
    tokenizer = bpe_tokenizer(chat=True)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.chat_template += "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    path = write_rows(tmp_path / "a.jsonl", sums(12))
    for thinking, end in ((None, "[assistant]"), (True, "[assistant]<think>"), (False, "[assistant]<think></think>")):
        task = load(path, tokenizer, thinking=thinking)
        assert all(task.text(problem.prompt_ids).endswith(f"+ 2?{end}") for problem in task.train)
        task.close()


QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
               r"\s+(?!\S)|\s+")  # fmt: skip


def qwen2_tokenizer(texts):
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer, trained on `texts`; `</think>` is no token of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def test_the_end_of_thinking_is_found_however_it_is_tokenized(tmp_path):
    """`</think>` is `</ think >` alone, `</ think >\\n\\n` before a blank line and ` </ think >` behind a space. Thinking
    that ended so by itself gets no phrase, and the answer's tokens are those behind the token that completes the mark.
    The paper's phrase ends with ` </think>`, encoded as a whole."""
    tokenizer = qwen2_tokenizer(["I think </think>\n\nThe answer is 5", "think</think> 5", PAPERS_PHRASE] * 20)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    forms = {text: [tokenizer.decode([i]) for i in encode(text)] for text in
             ("</think>", "</think>\n\n", " </think>", " </think>\n\n")}
    assert forms == {"</think>": ["</", "think", ">"], "</think>\n\n": ["</", "think", ">\n\n"],
                     " </think>": [" </", "think", ">"], " </think>\n\n": [" </", "think", ">\n\n"]}  # fmt: skip
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer, thinking=True)
    assert task.phrase_ids == tuple(encode(PAPERS_PHRASE))
    for phrase_ids in (task.phrase_ids, (*encode(PAPERS_PHRASE[:-8]), *task.end_of_thinking_ids)):
        control = Interruption(50, 50, 9, phrase_ids, task.end_of_thinking_ids, task.thinking_end)
        for between in forms:
            for answer in ("", "7", "The answer is 5"):
                ids = encode(f"I think{between}{answer}")
                leg = control.second_leg([1], ids, "length")
                assert (leg.prompt_ids, leg.forced_ids) == ([1, *ids], [])
                assert leg.max_tokens == 9 - len(encode(answer))
        for text in ("I think", "I think </", "I think </think", "\u20ac"):
            assert control.second_leg([1], encode(text), "length").forced_ids == list(phrase_ids)
        assert control.second_leg([1], encode("\u20ac")[:1], "length").forced_ids  # half a character
    task.close()


def test_a_token_of_its_own_is_found_by_its_id(tmp_path, tokenizer):
    task = load(write_rows(tmp_path / "a.jsonl", sums(12)), tokenizer)
    assert task.thinking_end is None and len(task.end_of_thinking_ids) == 1
    task.close()


def children():
    """Ids of this process's children that run."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        found |= set((thread / "children").read_text().split())
    return found


def test_a_process_that_does_not_judge_keeps_no_worker(tmp_path, tokenizer):
    """Bad rows are counted all the same; a process that judges has its worker."""
    path = write_rows(tmp_path / "a.jsonl", [*sums(12), {"question": "unreadable", "answer": "\\frac{"}])
    before = children()
    task = load(path, tokenizer, reward="math", judge=False)
    assert task.skipped == {"unreadable_answer": 1}
    assert children() == before
    with pytest.raises(RuntimeError, match="the reward workers are closed|cannot schedule new futures"):
        task.reward(task.train[0], [1])
    task.close()
    task = load(path, tokenizer, reward="math")
    assert len(children() - before) == 1
    task.close()
    assert children() == before


def test_the_users_function_gets_prompt_completion_and_the_rows_own_answer(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "judge_rows.py").write_text(
        "def judge(prompt, completion, answer):\n"
        "    return prompt == 'Say ' + answer['say'] and completion == 'no</think>' + answer['say']\n")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}", "answer": {"say": str(i)}} for i in range(12)]
    task = load(write_rows(tmp_path / "a.jsonl", rows), tokenizer, reward="judge_rows:judge", prompt_template="<<{prompt}>>")
    for problem in task.train:
        ids = tokenizer.encode(f"no</think>{problem.answer['say']}<|end|>", add_special_tokens=False)
        assert task.score(problem, [ids, ids[:-2]]) == [(1.0, True), (-1.0, False)]
    task.close()


def test_several_data_sets_with_their_own_rewards_and_no_shared_prompt(tmp_path, tokenizer):
    """The second has ten prompts of the first: they stay with the first, on whichever side of its split they fell."""
    one = write_rows(tmp_path / "one.jsonl", sums(40))
    two = write_rows(tmp_path / "two.jsonl", sums(40, start=30))
    task = load(f"{one}=3,{two}=1", tokenizer, reward="exact,math")
    assert task.sources == [one, two]
    assert task.weights == {one: 3.0, two: 1.0}
    assert task.skipped == {"duplicate_prompt": 10}
    assert Counter(p.source for p in task.train) == {one: 30, two: 20}
    assert Counter(p.source for p in task.held_out) == {one: 10, two: 10}
    keys = [p.key for p in task.train + task.held_out]
    assert len(keys) == len(set(keys)) == 70
    for source, expected in ((one, (-1.0, False)), (two, (1.0, True))):
        problem = next(p for p in task.train if p.source == source)
        ids = tokenizer.encode(f"</think>The answer is {problem.answer}.", add_special_tokens=False)
        assert task.reward(problem, ids) == expected
    task.close()


def test_data_sets_without_weights_are_drawn_by_their_sizes(tmp_path, tokenizer):
    """`epoch_order` without weights is a shuffle of everything: 20 and 5 prompts to train on, all in one epoch. A single
    data set has all the places whatever its weight."""
    one, two = write_rows(tmp_path / "one.jsonl", sums(30)), write_rows(tmp_path / "two.jsonl", sums(15, 50))
    task = load(f"{one},{two}", tokenizer)
    assert task.weights == {} and task.sources == [one, two]
    order = epoch_order(task.train, task.weights, 0, 0)
    assert Counter(task.train[i].source for i in order) == {one: 20, two: 5} and len(set(order)) == 25
    task.close()
    task = load(f"{one}=5", tokenizer)
    assert task.weights == {}
    task.close()


def mixture(**sizes):
    return [Problem(f"{source}{i}", (), "", source) for source, size in sizes.items() for i in range(size)]


def test_an_epoch_without_weights_is_a_shuffle_of_everything():
    problems = mixture(a=50)
    orders = [epoch_order(problems, {}, 0, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] == epoch_order(problems, {}, 0, 0) != epoch_order(problems, {}, 1, 0)


def test_an_epoch_has_the_shares_that_the_weights_ask_for():
    """60 + 30 + 10 problems at weights 1 : 2 : 1 give 25, 50 and 25 places. Over six epochs the 150 places of a go
    2.5 times through its 60, the 300 of b ten times through its 30, the 150 of c 15 times through its 10."""
    problems = mixture(a=60, b=30, c=10)
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    seen = Counter()
    for epoch in range(6):
        order = epoch_order(problems, weights, 7, epoch)
        assert order == epoch_order(problems, weights, 7, epoch)
        assert Counter(problems[i].source for i in order) == {"a": 25, "b": 50, "c": 25}
        # Mixed, not one source after the other.
        assert len({problems[i].source for i in order[:20]}) == 3
        seen.update(order)
    assert {seen[i] for i in range(60)} == {2, 3}
    assert {seen[i] for i in range(60, 90)} == {10}
    assert {seen[i] for i in range(90, 100)} == {15}


def test_an_epochs_shares_add_up_when_they_do_not_divide():
    problems = mixture(a=7, b=5, c=5)
    for epoch in range(4):
        assert len(epoch_order(problems, {"a": 1.0, "b": 1.0, "c": 1.3}, 0, epoch)) == 17


def test_no_problem_is_repeated_before_its_source_is_through():
    """Equal weights, 4 and 8 problems: 6 places each an epoch. The first 8 places of b are its 8 problems."""
    problems = mixture(a=4, b=8)
    order = [i for epoch in range(4) for i in epoch_order(problems, {"a": 1.0, "b": 1.0}, 3, epoch)]
    b = Counter(i for i in order if problems[i].source == "b")
    assert set(b.values()) == {3}
    assert set(Counter(i for i in order if problems[i].source == "a").values()) == {6}


def test_a_source_is_shuffled_anew_each_time_round():
    """20 problems of a in 10 places an epoch: epochs 0 and 1 are its first round, 2 and 3 its second. That both rounds
    are halved alike has a chance of 1 in 184,756."""
    problems = mixture(a=20, b=20)
    halves = [{i for i in epoch_order(problems, {"a": 1.0, "b": 3.0}, 0, epoch) if i < 20} for epoch in range(4)]
    assert [len(half) for half in halves] == [10] * 4
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(20))
    assert halves[0] != halves[2]
