"""tools/score.py: a data set is scored by the model that is to be trained, and split by that."""

import json

import pytest
import score
from test_rows import write_rows

from tasks import arithmetic
from tasks.prompts import stable_key

ROWS = [
    {"prompt": "a  b", "answer": "1", "id": 0},
    {"prompt": "c", "answer": "2", "id": 1},
    {"prompt": "a b", "answer": "3", "id": 2},  # the first one's problem again
    {"prompt": "d", "answer": "4", "id": 3},
    {"prompt": 7, "answer": "5", "id": 4},  # no text
    {"prompt": "e", "answer": "6", "id": 5},  # not scored: too long, say
    {"prompt": "f", "answer": "7", "id": 6},
    {"prompt": "g", "answer": "8", "id": 7},
]
RATES = {
    stable_key("a b"): 0.25,
    stable_key("c"): 1.0,
    stable_key("d"): 0.5,
    stable_key("f"): 0.0,
    stable_key("g"): 0.5,
}


def written(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_rows_are_scored_sorted_and_split(tmp_path, monkeypatch, capsys):
    """Rates 1, .5, .5, .25, 0: equal ones stay in their order, and easy begins at .5 and ends below 1."""
    monkeypatch.setattr(score, "pass_rates", lambda flags: RATES)
    data = write_rows(tmp_path / "data.jsonl", ROWS)
    assert score.main([data, "--output", str(tmp_path / "scored"), "--model", "org/name"]) == 0
    found = {name: written(tmp_path / "scored", name) for name in ("easy_first", "easy", "hard")}
    assert [row["id"] for row in found["easy_first"]] == [1, 3, 7, 0, 6]
    assert [row["id"] for row in found["easy"]] == [3, 7] and [row["id"] for row in found["hard"]] == [0]
    assert found["hard"] == [ROWS[0] | {"pass_rate": 0.25}]  # all its columns
    assert "5 problems, 16 samples each: pass rate 0.450, 1 always solved, 1 never" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("nothing.jsonl --model org/name", "nothing.jsonl: there is no such file"),
        ("data.jsonl", "--dataset needs --model"),
        ("data.jsonl --model org/name --prompt_column x", "x"),
        ("data.jsonl --model org/name --rollouts 0", "--rollouts must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(score, "pass_rates", lambda flags: RATES)
    write_rows(tmp_path / "data.jsonl", ROWS)
    assert score.main([*words.split(), "--output", "scored"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (tmp_path / "scored").exists()


@pytest.mark.slow
def test_the_built_in_model_scores_its_own_task(tmp_path, capsys):
    """Thirty problems of one to eight steps with real vLLM: short ones come first."""
    from tasks.warm_start import warm_start

    task = arithmetic.graded_task(0, 30)
    rows = [{"prompt": task.text(p.prompt_ids), "answer": p.answer} for p in task.train]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = (
        f"--model {warm_start(tmp_path / 'cache', 0)} --reward exact --min_budget 14 --max_budget 18 --answer_budget 4"
    )
    mark = ["--end_of_thinking", "</think>", "--interruption_phrase", "time up </think>"]
    assert score.main([data, "--output", str(tmp_path), *flags.split(), *mark, "--eval_samples", "32"]) == 0
    found = written(tmp_path, "easy_first")
    assert len(found) == 30 and found[0]["pass_rate"] > 0
    assert "30 problems, 32 samples each" in capsys.readouterr().out
