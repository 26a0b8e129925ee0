"""Rows: how data sets are named, and what is read from their rows or left out and counted."""

import json
from collections import Counter

import pytest

from tasks.prompts import stable_key
from tasks.rows import DataSet, final_answer, parse_data_sets, usable_rows


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read(name, prompt_column=None, answer_column=None, raw=False, split=None):
    """({key: (text, answer)}, skipped)."""
    skipped = Counter()
    rows = usable_rows(
        DataSet(name, split=split), prompt_column, answer_column, "own:function" if raw else "math", skipped
    )
    return {key: (row.text, row.answer) for key, row in rows.items()}, skipped


def test_parse_data_sets():
    assert parse_data_sets("a.jsonl") == [DataSet("a.jsonl")]
    assert parse_data_sets("openai/gsm8k:main=2, my/own.parquet=0.5") == [
        DataSet("openai/gsm8k", "main", None, 2.0),
        DataSet("my/own.parquet", None, None, 0.5),
    ]
    assert parse_data_sets("a:main:test=3,b::train[:100]=1") == [
        DataSet("a", "main", "test", 3.0),
        DataSet("b", None, "train[:100]", 1.0),
    ]
    assert parse_data_sets("a.jsonl:math=2,b/c:main:test:code=1,d::train[:9]:exact=1,e:code:test=1") == [
        DataSet("a.jsonl", None, None, 2.0, "math"),
        DataSet("b/c", "main", "test", 1.0, "code"),
        DataSet("d", None, "train[:9]", 1.0, "exact"),
        DataSet("e", "code", "test", 1.0, None),  # a configuration that is named like a reward needs its split
    ]
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
    """Parquet makes floats of whole numbers, which Python writes as 1e-05 or 42.0: no verifier reads them so."""
    assert final_answer("We add 40 and 2.\n#### 42") == "42"
    assert final_answer("#### 1 #### 2,000 ") == "2,000"
    assert final_answer(" x ") == "x"
    assert (final_answer(42), final_answer(42.0), final_answer(0.5), final_answer(-3)) == ("42", "42", "0.5", "-3")
    assert (final_answer(1e-05), final_answer(-2.5e-6), final_answer(12.5)) == ("0.00001", "-0.0000025", "12.5")
    assert (final_answer(1e22), final_answer(1e23)) == ("1" + 22 * "0", "1" + 23 * "0")
    assert (final_answer(-0.0), final_answer(100.0), final_answer(-0.5)) == ("0", "100", "-0.5")
    assert final_answer("\ud800") == "\ufffd"
    for solution, answer in (
        (r"So it is $\boxed{-54}$.", "-54"),
        (r"One root is $\boxed{5}$, hence the sum is $\boxed{\frac{1}{2}}$, as we said.", r"\frac{1}{2}"),
        ("x" * 5000 + r" \fbox{12}", "12"),
        (r"\boxed{1} #### 2", "2"),
        (r"#### \boxed{3}", "3"),
        (r"It is \boxed{4", r"It is \boxed{4"),
        (r"\boxed{ }", ""),
    ):
        assert final_answer(solution) == answer
    for bad in (None, True, [1], {"a": 1}, float("nan"), float("inf")):
        assert final_answer(bad) is None


SHAPES = {
    "gsm8k": lambda i: {"question": f"Tom has {i} + 2?", "answer": f"He adds <<{i}+2={i + 2}>>.\n#### {i + 2}"},
    "polaris": lambda i: {"problem": f"Tom has {i} + 2?", "answer": f"{i + 2}", "difficulty": "3/8"},
    "deepscaler": lambda i: {"problem": f"Tom has {i} + 2?", "answer": f"{i + 2}", "solution": "Clearly \\boxed{1}."},
    "chat": lambda i: {
        "prompt": [{"role": "user", "content": f"Tom has {i} + 2?"}],
        "reward_model": {"ground_truth": f"{i + 2}"},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_shapes_out_of_the_box(tmp_path, shape, kind):
    import pyarrow
    import pyarrow.parquet

    rows, path = [SHAPES[shape](i) for i in range(9)], tmp_path / f"data.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    texts = [f"Tom has {i} + 2?" for i in range(9)]
    assert read(str(path)) == ({stable_key(text): (text, str(i + 2)) for i, text in enumerate(texts)}, {})


def test_a_folder_in_the_hubs_format_loads_through_datasets(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name, first in (("train", 0), ("test", 100)):
        rows = [{"question": f"Q {i}", "answer": str(i)} for i in range(first, first + 9)]
        write_rows(folder / f"{name}.jsonl", rows)
    for split, first in ((None, 0), ("test", 100)):
        found, _ = read(str(folder), split=split)
        assert {int(answer) for _, answer in found.values()} == set(range(first, first + 9))


def test_bad_rows_are_counted_by_kind(tmp_path):
    pairs = [
        ("What is it?", "1"), ("", "1"), (" \n", "1"), (5, "1"), ([{"role": "user"}], "1"), ([], "1"), ("null", None),
        ("list", [1]), ("bool", True), ("empty", " "), ("empty2", "#### "), (" What\n is it?", "5"), ("lone \ud800", "7"),
    ]  # fmt: skip
    rows = [{"x": 1}, *({"question": question, "answer": answer} for question, answer in pairs)]
    rows += ["{not json", "[" * 100_000, "[1, 2]", '"text"', "", {"question": "no answer"}, {"answer": "1"}]
    found, skipped = read(write_rows(tmp_path / "a.jsonl", rows))
    assert skipped == {
        "not_json": 2, "not_an_object": 2, "empty_prompt": 2, "prompt_is_no_text": 5, "no_answer": 2,
        "answer_is_no_text": 2, "empty_answer": 2, "duplicate_prompt": 1,
    }  # fmt: skip
    assert list(found.values()) == [("What is it?", "1"), ("lone \ufffd", "7")]


def test_a_conversation_that_ends_with_the_assistants_turn_is_left_out(tmp_path):
    """Its answer would be in the prompt. Earlier turns of the assistant are part of the question."""
    turns = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "It is 42."}]
    rows = [{"prompt": turns, "answer": "42"}, {"prompt": [*turns, turns[0]], "answer": "42"}]
    found, skipped = read(write_rows(tmp_path / "a.jsonl", rows))
    assert list(found.values()) == [("6 * 7?\n\nIt is 42.\n\n6 * 7?", "42")]
    assert skipped == {"ends_with_assistant": 1}


def test_column_names_in_a_message_are_few_and_escaped(tmp_path):
    """A name may be long or hold what a terminal obeys; Unicode letters stay."""
    row = {"\x1b]0;owned\x07\n\u202e": 1, "Ä": 1, "B" * 1000: 1, **{f"c{i:05}": 1 for i in range(20_000)}}
    with pytest.raises(ValueError, match="no row has prompt") as error:
        read(write_rows(tmp_path / "a.jsonl", [row]))
    columns = str(error.value).partition("its columns are ")[2].partition(";")[0]
    assert columns == "\\x1b]0" and len(str(error.value)) < 700  # the first `;` is the name's own
    assert ";owned\\x07\\n\\u202e, " + "B" * 50 + ", c00000, " in str(error.value)
    assert "c00007 and 19,993 more; name" in str(error.value)


def test_named_columns_and_nested_ones(tmp_path):
    rows = [{"prompt": "ignored", "in": {"text": f"Say {i}"}, "a.b": str(i), "answer": "ignored"} for i in range(12)]
    found, _ = read(write_rows(tmp_path / "a.jsonl", rows), "in.text", "a.b")
    assert list(found.values()) == [(f"Say {i}", str(i)) for i in range(12)]


def test_a_users_function_gets_the_rows_own_answer(tmp_path):
    rows = [{"prompt": "a", "answer": {"say": [1]}}, {"prompt": "b", "answer": " #### 1"}, {"prompt": "c"}]
    found, skipped = read(write_rows(tmp_path / "a.jsonl", rows), raw=True)
    assert list(found.values()) == [("a", {"say": [1]}), ("b", " #### 1")] and skipped == {"no_answer": 1}


@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        ("missing.jsonl", {}, "`dataset` missing.jsonl: there is no such file"),
        ("notes.txt", {}, "must end with .jsonl or .parquet"),
        ("broken.parquet", {}, "`dataset` broken.parquet cannot be loaded"),
        ("empty.jsonl", {}, "(?s)no row has prompt, problem.*none at all.*`prompt_column`"),
        ("good.jsonl", {"prompt_column": "text"}, "(?s)no row has text.*columns are b, question.*`prompt_column`"),
        ("good.jsonl", {"answer_column": "label"}, "(?s)no row has label.*columns are b, question.*`answer_column`"),
        ("good.jsonl", {}, "(?s)no row has answer, ground_truth.*`answer_column`"),
        (
            "other.jsonl",
            {},
            "^`dataset` other.jsonl: no row has prompt, problem, question, instruction, and none has answer, ground_truth, "
            "final_answer, reward_model.ground_truth, solution; its columns are a, b; name the right ones with "
            "`prompt_column` and `answer_column`$",
        ),
        (
            "other.jsonl",
            {"prompt_column": "text", "answer_column": "b"},
            "^`dataset` other.jsonl: no row has text; its columns are a, b; name the right one with `prompt_column`$",
        ),
        ("no/such", {}, r"(?s)`dataset` no/such cannot be loaded \(DatasetNotFoundError.*NAME:CONFIG"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch, name, columns, words):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def offline(*_, **__):
        raise DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", [{"question": "a", "b": 1}])
    write_rows(tmp_path / "other.jsonl", [{"a": 1, "b": 1}])
    for file in ("notes.txt", "broken.parquet", "empty.jsonl"):
        (tmp_path / file).write_text("")
    with pytest.raises(ValueError, match=words):
        read(name, **columns)
