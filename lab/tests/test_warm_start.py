"""The warm start: its demonstrations and their mistakes, its supervised steps against brute force, and the folder that keeps it."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab import warm_start as module
from lab.warm_start import Demonstrations, Demonstrator, ModelShape, WarmStart, new_model, warm_start
from tasks import arithmetic
from tasks.arithmetic import IDS, WORDS, apply, chain_values
from tasks.prompts import Problem

DEFAULT = Demonstrations()


# A warm start of a few steps: any loss is low enough.
QUICK = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)


def test_last_two_by_hand():
    """The newest results of the two furthest steps; a step without its result does not count; then the start digit."""
    cases = "a +5 2 b *3 6 c -4 2 = 6 2 | a +5 2 b *3 6 c -4 = 2 6 | a +5 2 b *3 6 wait b *3 5 = 2 5 | "
    cases += "a +5 2 b *3 6 again a +5 1 = 1 6 | a +5 2 = 7 2 | = 7 7"
    for thinking, answer in (case.split("=") for case in cases.split("|")):
        assert module.last_two(7, thinking.split()) == answer.split()


def test_clean_demonstrations_earn_the_reward_and_are_never_held_out():
    task = arithmetic.ChainTask(0, 1, 1)
    demonstrator = Demonstrator(DEFAULT, 0, corrupted=False)
    for _ in range(300):
        prompt, completion, taught = demonstrator.demonstration()
        assert not arithmetic.is_held_out(" ".join(prompt))
        values = chain_values(int(prompt[0]), prompt[2:-1:2])
        problem = Problem("", tuple(IDS[word] for word in prompt), f"{values[-2]} {values[-1]}")
        assert task.score(problem, [[IDS[word] for word in completion]]) == [(1.0, True)]
        assert all(taught)
        assert len(completion) == 3 * (len(values) - 1) + 4


def test_batch_teaches_the_completion_but_not_prompt_phrase_or_padding():
    ids, labels = Demonstrator(replace(DEFAULT, cut=0.5), 0, corrupted=True).batch(200)
    assert ids.shape == labels.shape == (200, ids.shape[1])
    seen = set()
    for row, label_row in zip(ids.tolist(), labels.tolist(), strict=True):
        words = [WORDS[i] for i in row]
        start, end = words.index("<think>") + 1, words.index("<eos>") + 1
        phrase = range(words.index("time"), words.index("time") + 3) if "time" in words else ()
        seen.add(len(phrase) > 0)
        assert label_row == [i if start <= t < end and t not in phrase else -100 for t, i in enumerate(row)]
        assert set(words[end:]) <= {"<pad>"}
    assert seen == {True, False}


def test_warm_start_is_cached_under_its_settings_and_its_code(tmp_path, monkeypatch):
    lines = list[str]()
    cache = tmp_path / "cache"
    folder = warm_start(cache, settings=QUICK, report=lines.append)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert warm_start(cache, settings=QUICK, report=lines.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert len(lines) == 2
    other = replace(QUICK, demonstrations=Demonstrations(cut=0.2))
    others = [warm_start(cache, settings=other), warm_start(cache, settings=QUICK, seed=1)]
    for source in (arithmetic, module):
        changed = tmp_path / Path(source.__file__).name
        changed.write_text(Path(source.__file__).read_text() + "# changed\n")
        monkeypatch.setattr(source, "__file__", str(changed))
        others.append(warm_start(cache, settings=QUICK))
    assert len({folder, *others}) == len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("place", [0, 105, 209])
def test_corrupted_results_are_wrong_as_often_as_asked_for(place):
    """20,000 draws: standard deviations up to .0035. Of 210 facts in an order that no seed changes, fact i is wrong at
    x = .1 + .85 (i + .5) / 210: from .102 to .948, and any of nine digits is as likely."""
    demonstrator = Demonstrator(DEFAULT, seed=place, corrupted=True)
    rates = module.wrong_rates((0.1, 0.95))
    facts = list(rates)
    assert len(facts) == 210
    assert facts[:2] == [("-5", 4), ("+3", 0)]
    x = 0.1 + 0.85 * (place + 0.5) / 210
    assert rates[facts[place]] == pytest.approx(x)
    count = Counter(demonstrator.result(*facts[place]) for _ in range(20_000))
    expected = [x / 9] * 10
    expected[apply(*facts[place])] = 1 - x
    assert [count[digit] / 20_000 for digit in range(10)] == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(("rarity", "share"), [(1, 1), (3, 0)])
def test_the_rate_falls_to_nothing_where_few_demonstrations_think(rarity, share, monkeypatch):
    """Where all think it stays as it is."""
    optimizers = []
    new = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *args, **options: optimizers.append(new(*args, **options)) or optimizers[0]
    )
    module.train_warm_start(replace(QUICK, demonstrations=Demonstrations(rarity=rarity)), 0)
    assert optimizers[0].param_groups[0]["lr"] == share * QUICK.lr


def mean_loss(logprobs, labels):
    """-log p(label at t | logits at t - 1) by a loop, averaged over the taught places."""
    places = [(n, t) for n in range(labels.shape[0]) for t in range(1, labels.shape[1]) if labels[n, t] != -100]
    return -sum(logprobs[n, t - 1, labels[n, t]] for n, t in places) / len(places)


def test_supervised_steps_learn_the_taught_tokens_of_their_own_batch():
    """The first loss is that of the untrained model, by a loop. Then, with learning rate 0, the gradients after two steps
    are those of the second batch alone, cut to norm 1."""
    model = new_model(ModelShape(), 0)
    demonstrator = Demonstrator(replace(DEFAULT, cut=0.5), 0, True)
    batches = [demonstrator.batch(4), demonstrator.batch(4)]
    ids, labels = batches[1]
    loss = mean_loss(model(input_ids=ids).logits.log_softmax(-1), labels)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    norm = sum((gradient**2).sum() for gradient in expected) ** 0.5
    list(module.supervised_steps(model, torch.optim.SGD(model.parameters(), lr=0.0), batches))
    assert norm > 1
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient / norm, rtol=1e-3, atol=1e-6)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), WarmStart().lr)
    first, second = module.supervised_steps(model, optimizer, [(ids, labels)] * 2)
    assert first == pytest.approx(loss.item(), rel=1e-5)
    assert second < first
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("enough", "steps"), [(99.0, 1), (0.0, 2)])
def test_the_second_phase_ends_at_its_loss_or_after_its_steps(enough, steps):
    lines = list[str]()
    module.train_warm_start(replace(QUICK, corrupted_loss=enough), 0, lines.append)
    assert f"{steps} corrupted steps" in lines[1]


def test_warm_start_loads_in_transformers_and_is_the_same_every_time(tmp_path):
    """And leaves the caller's random numbers as they were."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(5)
    state = torch.get_rng_state(), random.getstate()
    one, two = (warm_start(tmp_path / name, settings=QUICK) for name in ("one", "two"))
    arithmetic.ChainTask(0, 5, 5)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, two)]
    config = models[0].config
    assert (config.architectures, config.vocab_size) == (["Qwen3ForCausalLM"], len(WORDS))
    assert (config.head_dim, config.tie_word_embeddings) == (32, True)
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}
    assert models[0].generation_config.eos_token_id == IDS["<eos>"]
    assert AutoTokenizer.from_pretrained(one)("7 a +5")["input_ids"] == [IDS[word] for word in ("7", "a", "+5")]


def test_a_warm_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="clean_steps"):
        warm_start(tmp_path, settings=replace(QUICK, clean_loss=0.0, clean_steps=2))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(arithmetic, "word_tokenizer", lambda: 1 / 0)
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

    monkeypatch.setattr(module, "train_warm_start", slower)
    assert warm_start(tmp_path, settings=QUICK) == folder
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
