"""Chain mod 10: sizes, lengths, words, impossible answers, and ids without a word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_arithmetic import PROBLEM, ids_of

from tasks import arithmetic
from tasks.arithmetic import IDS, WORDS, ChainTask, chain_values


@pytest.fixture(scope="module")
def task():
    return ChainTask(seed=0)


def test_sizes_are_respected():
    """There are about 10 * (21^2 + 21^3 + 21^4) / 8 / 5 = 51,000 held-out problems that are impossible, and 25,000 are
    the most that are needed of them. Too many are refused before anything is drawn."""
    small = ChainTask(3, 40, 30)
    assert (len(small.train), len(small.held_out)) == (40, 30)
    assert {len(p.prompt_ids) for p in small.train + small.held_out} == {2 + 2 * 2, 2 + 2 * 3, 2 + 2 * 4}
    with pytest.raises(ValueError, match="at most 100,000 problems"):
        ChainTask(0, 10, 10**9)


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_ids_without_a_word_are_wrong_in_an_answer_and_seen_in_a_text(task, ids):
    """A model may have more rows than the task has 47 words. `decode` would leave such ids out: `6 <47> 2` would read
    as the right answer. In the thinking, which ends at the first `</think>`, they are as free as any word."""
    right = ids_of("</think> 6 2 <eos>")
    thinking = [i for i in ids if i != IDS["</think>"]]
    scores = task.score(PROBLEM, [[*right[:2], 47, *right[2:]], [*right[:1], *ids], [*thinking, *right]])
    assert [correct for _, correct in scores] == [False, ids == list(right[1:]), True]
    assert task.text(ids).split() == [WORDS[i] if i < 47 else f"<{i}>" for i in ids]


def test_every_word_is_one_token_and_the_saved_tokenizer_agrees(task, tmp_path):
    from transformers import AutoTokenizer

    task.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (task.tokenizer, loaded):
        assert tokenizer(" ".join(WORDS))["input_ids"] == list(range(47))
        assert tokenizer.decode(list(range(47))) == " ".join(WORDS)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (IDS["<eos>"], IDS["<pad>"])
        assert len(tokenizer) == len(set(WORDS)) == 47
    assert task.stop_ids == (loaded.eos_token_id,)
    assert task.text(task.phrase_ids) == " ".join(arithmetic.PHRASE)
    assert task.phrase_ids[-len(task.end_of_thinking_ids) :] == task.end_of_thinking_ids


def test_every_problem_of_discover_can_be_solved():
    """By right arithmetic; none of its 128 training problems is held out, whatever the seed."""
    held_out = {problem.key for problem in ChainTask(held_out_size=1000).held_out}
    for task in [ChainTask(seed, arithmetic.DISCOVER_POOL) for seed in (0, 1)]:
        assert len({problem.key for problem in task.train}) == 128 and len(task.held_out) == 256
        assert not held_out & {problem.key for problem in task.train}
        for problem in task.train + task.held_out:
            start, *words = task.text(problem.prompt_ids).split()
            before, last = chain_values(int(start), words[1:-1:2])[-2:]
            assert task.score(problem, [ids_of(f"</think> {before} {last} <eos>")]) == [(1.0, True)]


def test_impossible_answers_are_drawn_by_the_text():
    """5,000 texts, one in five: 1,000 expected, standard deviation 28. Their 3,000 digits: 300 of each, sd 16."""
    answers = [answer for i in range(5000) if (answer := arithmetic.impossible_answer(f"text {i}"))]
    digits = " ".join(answers).split()
    assert 880 < len(answers) < 1120
    assert set(digits) == set(arithmetic.DIGITS)
    assert all(230 < digits.count(digit) < 370 for digit in arithmetic.DIGITS)
