"""Rows: files that are none, numbers written out, columns in messages, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rows import read, write_rows

from tasks.rows import DataSet, final_answer, parse_data_sets, parse_eval_sets

REFUSED = {
    "`dataset` must be": "| a,,b | :main | math",
    "`dataset` names a data set twice": "a,b,a:main",
    r"`dataset` a\.\S+: a file has no configuration": "a.jsonl::test | a.parquet:main | a.jsonl:main:test",
    "`eval_dataset` must be NAME=DATA": "a.jsonl | =a.jsonl | a= | a/b=c.jsonl | a b=c.jsonl",
    "`eval_dataset` has the name a twice": "a=b.jsonl,a=c.jsonl",
}


@pytest.mark.parametrize("words", REFUSED)
def test_names_that_mean_nothing_are_refused(words):
    for text in REFUSED[words].split("|"):
        with pytest.raises(ValueError, match=words):
            (parse_eval_sets if "eval_dataset" in words else parse_data_sets)(text.strip())


@pytest.mark.parametrize("name", ["lr=1e-6/a=b.jsonl", "run:3/a.jsonl", "a,b.jsonl", "C:\\a,b:exact.jsonl"])
def test_a_file_may_have_any_mark_in_its_name(tmp_path, name):
    """As folders of a sweep do."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    file = str(tmp_path / name)
    Path(file).touch()
    assert parse_data_sets(file) == [DataSet(file)]
    assert parse_data_sets(f"{file}:exact") == [DataSet(file, reward="exact")]
    assert parse_eval_sets(f"mine={file}") == {"mine": DataSet(file)}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_written_out_and_keeps_its_value(number):
    assert float(final_answer(number)) == number and "e" not in final_answer(number)


def test_a_folder_in_the_hubs_format_loads_through_datasets(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for name in ("train", "test"):
        write_rows(tmp_path / "set" / f"{name}.jsonl", [{"question": name, "answer": "1"}])
    for split, name in ((None, "train"), ("test", "test")):
        assert list(read(str(tmp_path / "set"), split=split)[0].values()) == [(name, "1")]


FILES = {  # what is written -> what is read
    "mark": ('{"prompt": "a", "answer": "1"}\n'.encode("utf-8-sig"), "a"),
    "separator": ('{"prompt": "a", "answer": "1", "of": "\u2028"}'.encode(), "a"),  # Unicode's end of a line is none
    "parts": (b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "answer": ["1"]}', "a"),
    "utf16": ('{"prompt": "a", "answer": "1"}'.encode("utf-16"), "is not UTF-8"),
    "latin1": ('{"prompt": "\xe4", "answer": "1"}'.encode("latin-1"), "is not UTF-8"),
    "array": (b'[{"prompt": "a", "answer": "1"}]', r"begins with '\[\{\"prompt.*one object on each line"),
    "pretty": (b'{\n "prompt": "a",\n "answer": "1"\n}', "one object on each line"),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_read_or_refused_for_what_it_is(tmp_path, file):
    content, expected = FILES[file]
    path = tmp_path / f"{file}.jsonl"
    path.write_bytes(content)
    if expected == "a":
        assert list(read(str(path))[0].values()) == [("a", "1")]
    else:
        with pytest.raises(ValueError, match=f"`dataset` .*{expected}"):
            read(str(path))


def test_column_names_in_a_message_are_few(tmp_path):
    """The first 300 characters of them; what a terminal obeys is escaped by UsageError."""
    row = {"Ä": 1, "B" * 200: 1, **{f"c{i:05}": 1 for i in range(20_000)}}
    with pytest.raises(ValueError, match="no row has prompt") as error:
        read(write_rows(tmp_path / "a.jsonl", [row]))
    message = str(error.value).replace(str(tmp_path), "")  # of any length
    assert "its columns are " + "B" * 200 + ", c00000, " in message and len(message) < 480


@pytest.mark.parametrize(("name", "columns", "words"), [
    ("missing.jsonl", {}, "`dataset` missing.jsonl: there is no such file"),
    ("notes.txt", {}, "must end with .jsonl or .parquet"),
    ("broken.parquet", {}, "`dataset` broken.parquet cannot be loaded"),
    ("empty.jsonl", {}, "no row has prompt, problem.*none at all.*`prompt_column`"),
    ("good.jsonl", {"prompt_column": "text"}, "no row has text; its columns are b, question; .* with `prompt_column`$"),
    ("good.jsonl", {"answer_column": "label"}, "no row has label; its columns are b, question; .* `answer_column`$"),
    ("good.jsonl", {}, "^`dataset` good.jsonl: no row has answer, ground_truth, final_answer, expected_answer, "
                       "reward_model.ground_truth, solution; its columns are b, question; name the right one with `answer_column`$"),
    ("script", {}, r"^`dataset` script cannot be loaded \(RuntimeError: Dataset scripts are no longer supported"),
    ("long" * 99, {}, "^`dataset` (long)+ cannot be loaded"),
    ("long" * 99 + ".jsonl", {}, "there is no such file"),
    ("no/such", {}, r"(?s)`dataset` no/such cannot be loaded \(DatasetNotFoundError.*NAME:CONFIG"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch, name, columns, words):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def offline(*_, **__):
        raise DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub")

    if name == "no/such":
        monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").touch()
    write_rows(tmp_path / "good.jsonl", [{"question": "a", "b": 1}])
    for file in ("notes.txt", "broken.parquet", "empty.jsonl"):
        (tmp_path / file).write_text("")
    with pytest.raises(ValueError, match=words):
        read(name, **columns)
