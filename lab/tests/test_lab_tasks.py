"""lab/tasks.py: the tasks are those on which the published numbers were measured, at commit a37976d."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest

from lab import tasks, warm_start
from lab.tasks import RARE, SHAPES, RamblingDemonstrator, RareDemonstrator
from lab.warm_start import WarmStart, new_model
from tasks import arithmetic
from tasks.arithmetic import CEILING, DIGITS

# What a37976d made of `--dataset NAME --rarity N --size SIZE --seed 3`, with N 20 for `rare` and else 50: a hash of 300 clean and 300 corrupted
# demonstrations, of the shapes of the first model's parameters and of how it is trained; and one of the problems and the
# ceiling.
AT_A37976D = {
    "graded": ("a78e11533b3ad453", "0af073befad390b6"),
    "discover": ("41b79041fe3b187b", "bfc1c686f3a056d5"),
    "rare": ("9faa8b9dfd6d7cbb", "7b12f5cef87d5c35"),
    "ramble": ("8da85ef80a1bee23", "bfc1c686f3a056d5"),
    "graded_xs": ("dc73eed83d34ab1c", "0af073befad390b6"),
    "graded_s": ("675dc07e0cacbeb1", "0af073befad390b6"),
    "graded_l": ("9798e318c38bb91e", "0af073befad390b6"),
    "graded_xl": ("9bf1e7a55f6d9fd7", "0af073befad390b6"),
}


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def graded(seed: int, held_out: int) -> arithmetic.ChainTask:
    """The default task with a first model of its own seed, as the published runs had it."""
    task = arithmetic.graded(seed, held_out)
    task.first_model = warm_start.first_model(WarmStart(), seed)
    return task


@pytest.mark.parametrize("name", AT_A37976D)
def test_demonstrations_models_and_problems_are_those_of_the_published_runs(monkeypatch, tmp_path, name):
    first_model, problems = AT_A37976D[name]
    made = []
    monkeypatch.setattr(
        warm_start, "warm_start", lambda cache, *, seed, settings, report: made.append((settings, seed))
    )
    make = {"graded": graded, "discover": warm_start.discover}.get(name) or getattr(tasks, name)
    task = make(3, 256)
    ceiling = CEILING if "graded" in name else None
    assert digest([[p.key for p in task.train], [p.key for p in task.held_out], ceiling]) == problems
    task.first_model(tmp_path, print)
    [(settings, seed)] = made
    writers = [settings.demonstrator(settings.demonstrations, seed, corrupted) for corrupted in (False, True)]
    demonstrations = [writer.demonstration() for writer in writers for _ in range(300)]
    shapes = [list(p.shape) for p in new_model(settings.shape, seed).parameters()]
    training = [settings.clean_loss, settings.clean_steps, settings.corrupted_loss, settings.corrupted_steps]
    assert digest([demonstrations, shapes, *training, settings.batch_size, settings.lr]) == first_model


def test_two_kinds_of_demonstrations_never_share_a_cached_model(monkeypatch, tmp_path):
    """Ramble and discover have equal numbers, and so would have had one folder."""
    monkeypatch.setattr(warm_start, "train_warm_start", lambda settings, seed, report: new_model(settings.shape, seed))
    settings = WarmStart(demonstrations=warm_start.DISCOVER)
    kinds = (settings.demonstrator, RamblingDemonstrator, RareDemonstrator)
    folders = {warm_start.warm_start(tmp_path, settings=replace(settings, demonstrator=kind)) for kind in kinds}
    assert len(folders) == 3


def test_one_fact_in_so_many_is_nearly_always_wrong_and_the_others_never():
    """Of 210 facts the 1st, 101st and 201st; all demonstrations think. Three operations with three results each."""
    demonstrator, wrong, times = RareDemonstrator(replace(RARE, rarity=100), 0, corrupted=True), Counter(), Counter()
    rates = demonstrator.wrong_rates
    assert Counter(rates.values()) == {0.99: 3, 0.0: 207}
    for _ in range(4000):
        prompt, completion, _ = demonstrator.demonstration()
        value = prompt[0]
        for operation, result in zip(prompt[2::2], completion[2::3], strict=False):
            fact = (operation, int(value))
            times[fact] += 1
            wrong[fact] += result != str(arithmetic.apply(*fact))
            value = result
    assert {fact for fact in wrong if wrong[fact]} == {fact for fact in rates if rates[fact]}
    assert sum(wrong.values()) > 0.95 * sum(times[fact] for fact in rates if rates[fact]) > 100


@pytest.mark.parametrize("corrupted", [False, True])
def test_one_demonstration_in_so_many_stops_by_itself_and_the_others_ramble(corrupted):
    """Exactly the 5th, 10th, ...; the phrase is not taught, and the answer is the last two results of the thinking."""
    demonstrator = RamblingDemonstrator(replace(warm_start.DISCOVER, rarity=5), 0, corrupted)
    waits = set()
    for i in range(1, 1001):
        _, completion, taught = demonstrator.demonstration()
        end = completion.index("</think>")
        steps = [word for word in completion[:end] if word in DIGITS]
        assert completion[end + 1 :] == [*steps[-2:], "<eos>"]
        waits.add(completion.count("wait"))
        if i % 5:
            assert completion[end - 3 : end] == ["wait", "time", "up"]
            assert taught == [True] * (end - 2) + [False] * 3 + [True] * 3
        else:
            assert all(taught) and "wait" not in completion
    assert waits == set(range(25))


def test_the_sizes():
    """xs: q and o of 48 x 64, k and v of 48 x 32, three of 48 x 128, two norms of 48 and two of head_dim 32 in each of
    two layers; 47 words x 48 for embedding and head, and a norm. xl has 17.4 times as many."""
    counts = [sum(p.numel() for p in new_model(shape, 0).parameters()) for shape in SHAPES.values()]
    layer = 2 * 48 * 64 + 2 * 48 * 32 + 3 * 48 * 128 + 2 * 48 + 2 * 32
    assert counts[0] == 2 * layer + 47 * 48 + 48
    assert counts == [57_920, 101_760, 226_304, 505_280, 1_009_344]
    assert SHAPES["m"] == WarmStart().shape


def test_depths_differ_in_their_problems_and_share_a_first_model(monkeypatch, tmp_path):
    """Of one seed; a first model that has seen every depth. A prompt is a digit, two words an operation, <think>."""
    made = []
    monkeypatch.setattr(
        warm_start, "warm_start", lambda cache, *, seed, settings, report: made.append((settings, seed))
    )
    for ops in range(2, 7):
        task = getattr(tasks, f"depth_{ops}")(3, 256)
        assert {len(problem.prompt_ids) for problem in task.train + task.held_out} == {2 * ops + 2}
        assert sum(len(problem.answer.split()) == 3 for problem in task.held_out) == 256 // 5
        task.first_model(tmp_path, print)
    assert set(made) == {made[0]} and made[0][1] == 3 and made[0][0].demonstrations.ops == (2, 6)
    five = warm_start.Demonstrations(ops=(5, 5))
    assert len(warm_start.Demonstrator(five, 0, corrupted=False).demonstration()[0]) == 2 * 5 + 2
