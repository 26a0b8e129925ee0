"""The warm start: its supervised steps against brute force, and the folder that keeps the model."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks import warm_start as module
from tasks.chain import IDS, WORDS, ChainTask
from tasks.demonstrations import Demonstrations, Demonstrator
from tasks.warm_start import ModelShape, WarmStart, supervised_steps, warm_start

# A warm start of a few steps: any loss is low enough.
QUICK = WarmStart(clean_loss=99.0, corrupted_steps=2, batch_size=4)


def mean_loss(logprobs, labels):
    """-log p(label at t | logits at t - 1) by a loop, averaged over the taught places."""
    places = [(n, t) for n in range(labels.shape[0]) for t in range(1, labels.shape[1]) if labels[n, t] != -100]
    return -sum(logprobs[n, t - 1, labels[n, t]] for n, t in places) / len(places)


# ---------------------------------------------------------------------------------------------------------------------
# Supervised steps


def test_supervised_step_predicts_the_next_token_of_taught_places_only():
    model = module.new_model(ModelShape(), 0)
    ids, labels = Demonstrator(replace(Demonstrations(), cut=1.0), 0, True).batch(4)
    with torch.no_grad():
        expected = mean_loss(model(input_ids=ids).logits.double().log_softmax(-1), labels)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = module.warm_start_optimizer(model, WarmStart().lr)
    first, second = supervised_steps(model, optimizer, [(ids, labels), (ids, labels)])
    assert first == pytest.approx(expected.item(), rel=1e-5)
    assert second < first
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


def test_supervised_steps_teach_that_unused_ids_are_improbable():
    """Random weights give 953 of 1,000 ids most of the probability; fifteen steps leave them less than a tenth."""
    model = module.new_model(ModelShape(hidden_size=32, layers=1, vocabulary=1000), 0)
    demonstrator = Demonstrator(Demonstrations(), 0, True)
    ids, labels = demonstrator.batch(8)

    def unused() -> float:
        with torch.no_grad():
            p = model(input_ids=ids).logits[:, :-1][labels[:, 1:] != -100].softmax(-1)
        return p[:, len(WORDS) :].sum(-1).mean().item()

    before = unused()
    optimizer = module.warm_start_optimizer(model, 1e-2)
    list(supervised_steps(model, optimizer, (demonstrator.batch(8) for _ in range(15))))
    assert before > 0.9 and unused() < 0.1


def test_each_supervised_step_uses_only_its_own_batch():
    """With learning rate 0 the gradients after two steps are those of the second batch, cut to norm 1."""
    model = module.new_model(ModelShape(), 0)
    demonstrator = Demonstrator(Demonstrations(), 0, True)
    batches = [demonstrator.batch(4), demonstrator.batch(4)]
    list(supervised_steps(model, torch.optim.SGD(model.parameters(), lr=0.0), batches))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ids, labels = batches[1]
    mean_loss(model(input_ids=ids).logits.log_softmax(-1), labels).backward()
    norm = sum((p.grad**2).sum() for p in model.parameters()) ** 0.5
    assert norm > 1
    for p, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, p.grad / norm, rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The cached folder


def test_warm_start_is_cached_under_its_settings_and_its_code(tmp_path, monkeypatch):
    lines: list[str] = []
    cache = tmp_path / "cache"
    folder = warm_start(cache, settings=QUICK, report=lines.append)
    assert len(lines) == 2
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert warm_start(cache, settings=QUICK, report=lines.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert len(lines) == 2
    others = [
        warm_start(cache, settings=replace(QUICK, demonstrations=Demonstrations(noise=0.2))),
        warm_start(cache, settings=QUICK, seed=1),
    ]
    changed = tmp_path / "tasks"
    shutil.copytree(Path(module.__file__).parent, changed)
    with open(changed / "demonstrations.py", "a") as file:
        file.write("# changed\n")
    monkeypatch.setattr(module, "__file__", str(changed / "warm_start.py"))
    others.append(warm_start(cache, settings=QUICK))
    assert len({folder, *others}) == len(list(cache.iterdir())) == 4


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
    assert AutoTokenizer.from_pretrained(one)("7 a +5")["input_ids"] == [IDS[word] for word in ("7", "a", "+5")]


@pytest.mark.parametrize(("enough", "steps"), [(99.0, 1), (0.0, 2)])
def test_the_second_phase_ends_at_its_loss_or_after_its_steps(enough, steps):
    lines: list[str] = []
    module.train_warm_start(replace(QUICK, corrupted_loss=enough), 0, lines.append)
    assert f"{steps} corrupted steps" in lines[1]


def test_a_warm_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="clean_steps"):
        warm_start(tmp_path, settings=replace(QUICK, clean_loss=0.0, clean_steps=2))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(module, "word_tokenizer", lambda: 1 / 0)
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


def test_warm_start_leaves_the_callers_random_numbers_unchanged(tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    warm_start(tmp_path, settings=QUICK)
    ChainTask(0, 5, 5)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
