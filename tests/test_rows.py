"""Rows: how data sets are named, and what is read from their rows or left out and counted."""

import json
from pathlib import Path

import pytest

from tasks.prompts import stable_key
from tasks.rows import DataSet, final_answer, parse_data_sets, parse_eval_sets, read_rows


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def says(role, content):
    return {"role": role, "content": content}


def read(name, prompt_column="", answer_column="", reward="math", split=None):
    """({key: (text, answer)}, skipped)."""
    rows = read_rows(DataSet(name, split=split), prompt_column, answer_column, reward)
    assert rows.usable.keys() <= rows.prompts
    return {key: (row.text, row.answer) for key, row in rows.usable.items()}, rows.skipped


def test_data_sets_are_named():
    """A configuration that is named like a reward needs its split."""
    for text, data_sets in (
        ("a.jsonl", [DataSet("a.jsonl")]),
        ("openai/gsm8k:main, own.parquet", [DataSet("openai/gsm8k", "main"), DataSet("own.parquet")]),
        ("a:main:test,b::train[:100]", [DataSet("a", "main", "test"), DataSet("b", None, "train[:100]")]),
        ("a.jsonl:math,b:c:test:exact", [DataSet("a.jsonl", reward="math"), DataSet("b", "c", "test", "exact")]),
        ("d::train[:9]:exact,e:math:test", [DataSet("d", None, "train[:9]", "exact"), DataSet("e", "math", "test")]),
    ):
        assert parse_data_sets(text) == data_sets


def test_evaluation_sets_are_named():
    assert parse_eval_sets("") == {}
    test, exact = DataSet("HuggingFaceH4/MATH-500", None, "test"), DataSet("b.jsonl", reward="exact")
    data_sets = parse_eval_sets("aime24=a.jsonl, math-500 = HuggingFaceH4/MATH-500::test,own=b.jsonl:exact")
    assert data_sets == {"aime24": DataSet("a.jsonl"), "math-500": test, "own": exact}


def test_final_answer():
    for line in Path(__file__).with_name("row_answers.txt").read_text().splitlines()[2:]:
        value, text = map(json.loads, line.split(" :: "))
        assert final_answer(value) == text, line


SHAPES = {
    "gsm8k": lambda i: {"question": f"Tom has {i} + 2?", "answer": f"He adds <<{i}+2={i + 2}>>.\n#### {i + 2}"},
    "polaris": lambda i: {"problem": f"Tom has {i} + 2?", "answer": f"{i + 2}", "difficulty": "3/8"},
    "deepscaler": lambda i: {"problem": f"Tom has {i} + 2?", "answer": f"{i + 2}", "solution": "Clearly \\boxed{1}."},
    "chat": lambda i: {"prompt": [says("user", f"Tom has {i} + 2?")], "reward_model": {"ground_truth": f"{i + 2}"}},
    "aime": lambda i: {"ID": "I-1", "Problem": f"Tom has {i} + 2?", "Solution": "So 1.", "Answer": i + 2},
    "openmath": lambda i: {"problem": f"Tom has {i} + 2?", "expected_answer": f"{i + 2}", "generated_solution": "1"},
    "rlvr": lambda i: {"messages": [says("user", f"Tom has {i} + 2?")], "ground_truth": f"{i + 2}", "dataset": "x"},
    "query": lambda i: {"query": f"Tom has {i} + 2?", "response": "So 1.", "answer": f"{i + 2}"},
}


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_row_shapes_out_of_the_box(tmp_path, shape):
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow, which the package datasets brings")
    import pyarrow.parquet

    rows = [SHAPES[shape](i) for i in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    write_rows(tmp_path / "data.jsonl", rows)
    expected = [(f"Tom has {i} + 2?", str(i + 2)) for i in range(9)]
    for name in ("data.parquet", "data.jsonl"):
        assert read(str(tmp_path / name)) == ({stable_key(text): (text, answer) for text, answer in expected}, {})


def test_bad_rows_are_counted_by_kind(tmp_path):
    """A conversation that ends with the assistant's turn has its answer in the prompt; its earlier turns are part of the
    question."""
    turns = [says("user", "6 * 7?"), says("assistant", "It is 42.")]
    pairs = [
        ("What is it?", "1"), ("", "1"), (" \n", "1"), (5, "1"), ([{"role": "user"}], "1"), ([], "1"), ("null", None),
        *(([says("user", [{"text": "How many?"}, part])], "1") for part in ("2 + 2?", {"type": "image"}, {"text": None}, 3)),
        ("list", [1, 2]), ("bool", True), ("empty", " "), ("empty2", "#### "), (" What\n is it?", "5"), ("lone \ud800", "7"),
        (turns, "42"), ([*turns, turns[0]], "42"),
    ]  # fmt: skip
    rows = [{"x": 1}, *({"question": question, "answer": answer} for question, answer in pairs)]
    rows += ["{not json", "[" * 100_000, "[1, 2]", '"text"', "", {"question": "no answer"}, {"answer": "1"}]
    usable, skipped = read(write_rows(tmp_path / "a.jsonl", rows))
    twice = "not_json not_an_object empty_prompt no_answer answer_is_no_text empty_answer".split()
    once = {"duplicate_prompt": 1, "ends_with_assistant": 1}
    assert skipped == dict.fromkeys(twice, 2) | once | {"prompt_is_no_text": 9}
    conversation = ("6 * 7?\n\nIt is 42.\n\n6 * 7?", "42")
    assert list(usable.values()) == [("What is it?", "1"), ("lone \ufffd", "7"), conversation]


PART = {  # what stands beside a question of a few words, from data sets of these kinds
    "choices": ["3 m", "5 m"],
    "Options": ["A)3", "B)5"],
    "answer_choices": {"text": ["3 m", "5 m"], "label": ["A", "B"]},
    "option_b": "5 m",
    "choice1": "5 m",
    "B": "5 m",
    "number_choices": [3, 7],
    "Body": "Tom has 5 pears.",
    "passage": "It is a long story.",
    "context": "It is five.",
    "article": "It is five.",
    "input": "3 and 4",
    "paragraphs": [{"title": "a", "text": "It is five."}],
    "pre_text": ["It is five."],
    "history": [["Hello", "Good day"]],
    "images": [{"bytes": None, "path": "a.png"}],
    "image_path": "a.png",
    "tools": "[{'name': 'add'}]",
    "instruction": "Answer in meters.",
}


@pytest.mark.parametrize("column", PART)
def test_a_question_that_is_not_whole_is_refused(tmp_path, column):
    """Such rows trained on `How many?`, and nothing said so. Whoever names the column knows what is in it."""
    whole = {"question": "How many more?", "answer": "1", column: None}
    file = write_rows(tmp_path / "a.jsonl", [whole, {"question": "How many?", "answer": "5", column: PART[column]}])
    words = f"question is no whole question without the column {column}, in 1 of 2 rows; .* `prompt_column`"
    with pytest.raises(ValueError, match=words):
        read(file)
    assert len(read(file, "question")[0]) == 2


def test_columns_that_a_question_does_not_need(tmp_path):
    """Empty ones, counts, what the prompt holds or what repeats it, parts of the solution. They are named."""
    row = {
        "question": "Is it 3 or 5? Tom  has 5.",
        "answer": "5",
        "choices": ["3", "5"],
        "body": "Tom has 5.",
        "input": "",
    }
    row |= {"images": [], "tools": "[]", "context": "N/A", "text": "Q: Is it 3 or 5? Tom has 5. A: 5", "num_choices": 2}
    row |= {"solution": "So 5.", "answer_text": "five", "level": "easy"}
    rows = read_rows(DataSet(write_rows(tmp_path / "a.jsonl", [row])), "", "", "math")
    assert len(rows.usable) == 1
    assert rows.columns.startswith("question and answer, not 'choices', 'body', ")
    assert rows.columns.endswith("'solution', 'answer_text', 'level'")


def test_named_columns_and_nested_ones(tmp_path):
    row = {"prompt": "ignored", "in": {"text": "Say 1"}, "a.b": "1", "answer": "ignored"}
    usable, _ = read(write_rows(tmp_path / "a.jsonl", [row]), "in.text", "a.b")
    assert list(usable.values()) == [("Say 1", "1")]
