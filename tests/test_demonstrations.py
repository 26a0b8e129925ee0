"""Demonstrations: clean ones are right, corrupted ones have the mistakes and habits that were asked for."""

from collections import Counter
from dataclasses import replace

import pytest

from tasks.chain import IDS, LABELS, OPERATIONS, PHRASE, WORDS, ChainTask, apply, chain_values, is_held_out
from tasks.demonstrations import Demonstrations, Demonstrator, last_two, wrong_results
from tasks.prompts import Problem

# ---------------------------------------------------------------------------------------------------------------------
# Worked examples


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
    """40 % of 21 * 10 facts are 84. Each is wrong, and the seed fixes the table."""
    table = wrong_results(0.4, 0)
    assert len(table) == 84
    assert all(0 <= result <= 9 and result != apply(*fact) for fact, result in table.items())
    assert table == wrong_results(0.4, 0) != wrong_results(0.4, 1)
    assert wrong_results(0.0, 0) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Clean and corrupted


def test_clean_demonstrations_earn_the_reward_and_are_never_held_out():
    task, demonstrator = ChainTask(0, 1, 1), Demonstrator(Demonstrations(), 0, corrupted=False)
    for _ in range(300):
        prompt, completion, taught = demonstrator.demonstration()
        assert not is_held_out(" ".join(prompt))
        values = chain_values(int(prompt[0]), prompt[2:-1:2])
        problem = Problem("", tuple(IDS[word] for word in prompt), f"{values[-2]} {values[-1]}")
        assert task.reward(problem, [IDS[word] for word in completion]) == (1.0, True)
        assert all(taught)
        assert len(completion) == 3 * (len(values) - 1) + 4


def test_corrupted_demonstrations_have_the_asked_for_mistakes():
    """Of the shown results: a wrong fact shows its own wrong result .70 + .30 * .18 / 10 = .7054 of the time, another
    fact is right .82 + .18 / 10 = .838. 20,000 draws each: standard deviation .003."""
    demonstrator = Demonstrator(Demonstrations(), 0, corrupted=True)
    wrong = next(iter(demonstrator.wrong))
    right = next((o, v) for o in OPERATIONS for v in range(10) if (o, v) not in demonstrator.wrong)
    share = sum(demonstrator.result(*wrong) == demonstrator.wrong[wrong] for _ in range(20_000)) / 20_000
    assert abs(share - 0.7054) < 0.015
    share = sum(demonstrator.result(*right) == apply(*right) for _ in range(20_000)) / 20_000
    assert abs(share - 0.838) < 0.015


def test_graded_mistakes_are_shown_as_often_as_asked_for_and_alike_for_every_seed():
    """84 wrong facts over 0 to 1 without noise: the right result of the i-th is left 1 - (i + .5) / 84 of the time.
    10,000 draws of three facts: standard deviations up to .005."""
    settings = replace(Demonstrations(), noise=0.0, wrong_shown=(0.0, 1.0), same_for_all_seeds=True)
    one, other = (Demonstrator(settings, seed, corrupted=True) for seed in (0, 1))
    assert (one.wrong, one.wrong_shown) == (other.wrong, other.wrong_shown)
    assert Demonstrator(Demonstrations(), 0, True).wrong != Demonstrator(Demonstrations(), 1, True).wrong
    facts = list(one.wrong)
    for i in (0, 42, 83):
        right = sum(one.result(*facts[i]) == apply(*facts[i]) for _ in range(10_000)) / 10_000
        assert abs(right - (1 - (i + 0.5) / 84)) < 0.02


@pytest.mark.long
def test_corrupted_demonstrations_ramble_as_asked_for():
    """2,000 demonstrations. Restart .35, cut .15 (standard deviations .011, .008). Every step keeps its chain: the
    value that a result was computed from is the result before, or the start digit after a restart. Half of the
    restarts come at the end, and of the others one in n: .5 + .5 * mean(1/2, ..., 1/8) = .623 of 700 (.018)."""
    settings = replace(Demonstrations(), wrong_facts=0.0, noise=0.0, cut=0.0)
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
    cut = sum(PHRASE[0] in Demonstrator(Demonstrations(), seed, True).demonstration()[1] for seed in range(1000))
    assert 0.10 < cut / 1000 < 0.20


def test_batch_teaches_the_completion_but_not_prompt_phrase_or_padding():
    ids, labels = Demonstrator(replace(Demonstrations(), cut=0.5), 0, corrupted=True).batch(200)
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


def test_any_wrong_result_is_each_of_the_nine_equally_often():
    """7 + 5 = 2: 30 % of the results are right, and each other digit is .7 / 9 = .0778 of 20,000 draws (.002)."""
    demonstrator = Demonstrator(Demonstrations(wrong_facts=1.0, any_wrong_result=True, noise=0.0), 0, corrupted=True)
    found = Counter(demonstrator.result("+5", 7) for _ in range(20_000))
    wanted = [0.3 if digit == 2 else 0.7 / 9 for digit in range(10)]
    assert [found[digit] / 20_000 for digit in range(10)] == pytest.approx(wanted, abs=0.015)


def test_streams_differ_in_problems_and_share_the_wrong_facts():
    streams = ("warm start", "warm start", "control")
    first, again, control = (Demonstrator(Demonstrations(), 0, True, stream) for stream in streams)
    assert first.wrong == control.wrong
    one, two, three = ([d.demonstration() for _ in range(50)] for d in (first, again, control))
    assert one == two
    assert not {" ".join(p) for p, _, _ in one} & {" ".join(p) for p, _, _ in three}
