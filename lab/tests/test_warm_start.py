"""The warm start: its demonstrations, its supervised steps against brute force, and the folder that keeps it."""

from dataclasses import replace
from pathlib import Path

from lab import warm_start as module
from lab.warm_start import Demonstrations, Demonstrator, WarmStart, warm_start
from tasks import arithmetic
from tasks.arithmetic import IDS, WORDS, chain_values
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
