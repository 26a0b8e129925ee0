"""The warm start: rates of mistakes, its two phases, its cache under failure and race."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks import arithmetic
from tasks import warm_start as module
from tasks.arithmetic import IDS, LABELS, OPERATIONS, PHRASE, WORDS, apply, chain_values
from tasks.warm_start import Demonstrations, Demonstrator, ModelShape, WarmStart, new_model, warm_start

ROOT = Path(__file__).resolve().parents[2]


DEFAULT = Demonstrations()


# A warm start of a few steps: any loss is low enough.
QUICK = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)


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


@pytest.mark.long
def test_corrupted_demonstrations_ramble_as_asked_for():
    """2,000 demonstrations. Restart .35, cut .15 (standard deviations .011, .008). Every step keeps its chain: the
    value that a result was computed from is the result before, or the start digit after a restart. Half of the
    restarts come at the end, and of the others one in n: .5 + .5 * mean(1/2, 1/3, 1/4) = .681 of 700 (.018)."""
    settings = Demonstrations(wrong_rates=(0.0, 0.0), cut=0.0)
    demonstrator = Demonstrator(settings, 0, corrupted=True)
    count = Counter()
    for _ in range(2000):
        prompt, completion, _ = demonstrator.demonstration()
        thinking = completion[: completion.index("</think>")]
        values = chain_values(int(prompt[0]), prompt[2:-1:2])
        labels = [i for i, word in enumerate(thinking) if word in LABELS]
        for i in labels:
            k = LABELS.index(thinking[i])
            assert thinking[i + 1 : i + 3] == [prompt[2 + 2 * k], str(values[k + 1])]
        assert completion[-3:] == [str(values[-2]), str(values[-1]), "<eos>"]
        assert thinking.count("again") <= 1
        count["rechecks"] += thinking.count("wait")
        count["steps"] += len(labels) - thinking.count("wait")
        if "again" in thinking:
            count["restarts"] += 1
            count["at end"] += prompt[-3] in thinking[: thinking.index("again")]
    assert count["restarts"] / 2000 == pytest.approx(0.35, abs=0.04)
    assert count["at end"] / count["restarts"] == pytest.approx(0.681, abs=0.07)
    assert count["rechecks"] / count["steps"] == pytest.approx(0.15, abs=0.02)
    cuts = sum(PHRASE[0] in Demonstrator(DEFAULT, seed, True).demonstration()[1] for seed in range(1000))
    assert 0.10 < cuts / 1000 < 0.20


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


@pytest.mark.slow
def test_the_warm_start_gives_right_results_about_as_often_as_they_were_shown():
    """Mean probability of the right result by quarters of the graded rates (.79, .56, .34, .11): it falls from quarter
    to quarter, and is within .15 of what was shown. So the strengths are graded in the model, too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(warm_start(ROOT / "runs" / "cache"))
    rng = random.Random(0)
    rows, right = [], []
    for operation, value in module.wrong_rates(DEFAULT.wrong_rates):  # from seldom wrong to often
        prompt = arithmetic.chain_text(value, [operation, rng.choice(OPERATIONS)])
        words = [*prompt.split(), LABELS[0], operation]  # what comes next is the result of the first step
        rows.append([IDS[word] for word in words])
        right.append(IDS[str(apply(operation, value))])
    with torch.no_grad():
        shares = model(input_ids=torch.tensor(rows)).logits[:, -1].softmax(-1)  # (210, V)
    likely = shares[torch.arange(len(right)), right].tolist()
    quarters = [sum(likely[i : i + 52]) / 52 for i in range(0, 208, 52)]
    assert quarters == sorted(quarters, reverse=True)
    assert quarters == pytest.approx([0.79, 0.56, 0.34, 0.11], abs=0.15)


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
