"""lab/exercises.py: every bug of docs/find_the_bug.md makes its test fail, and its mend makes it pass."""

import builtins

import pytest

from lab import exercises

pytestmark = pytest.mark.medium
PAGE = exercises.read_page()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where the copies go: not to the reader's own."""
    monkeypatch.setattr(exercises, "FOLDER", tmp_path)
    return tmp_path


def test_the_page_has_14_bugs():
    assert list(PAGE) == [str(number) for number in range(1, 15)]
    assert exercises.PAGE.read_text().count("```diff") == 14


def test_only_the_last_fold_has_the_cure():
    for exercise in PAGE.values():
        seen = exercise.symptom + exercise.hint
        assert "```" not in seen and exercise.right.strip() not in seen and f"`{exercise.test}`" not in seen


def test_the_file_has_every_test_that_the_page_names():
    for exercise in PAGE.values():
        assert f"def {exercise.test}(" in (exercises.ROOT / exercise.lesson).read_text()


@pytest.mark.slow  # two processes for each bug
@pytest.mark.parametrize("number", PAGE)
def test_the_test_fails_with_the_bug_and_passes_with_the_mend(number, capsys):
    """It fails because of an assertion, an error or a NaN in the test, and not because the copy cannot be imported."""
    exercise = PAGE[number]
    original = exercise.file.read_text()
    assert exercises.main([number, "--check"]) == 1
    output = capsys.readouterr().out
    assert f"FAILED {exercise.lesson}::{exercise.test}" in output and "Not yet." in output
    assert exercise.right not in exercise.copy.read_text() and exercise.wrong in exercise.copy.read_text()
    assert exercise.file.read_text() == original
    exercise.copy.write_text(original)
    assert exercises.main([number, "--check"]) == 0
    assert f"Right: {exercise.lesson} passes" in capsys.readouterr().out


def test_a_mend_that_breaks_something_else_is_not_right(capsys):
    """(k + 1) B for both schedules: the test that the page names is of the other one."""
    exercise = PAGE["13"]
    exercises.begin(exercise)
    mend = exercise.right.replace(' if schedule == "pipeline" else k * batch_prompts', "")
    exercise.copy.write_text(exercise.text.replace(exercise.wrong, mend))
    assert exercises.main(["13", "--check"]) == 1
    output = capsys.readouterr().out
    assert "FAILED tests/test_pipeline_rl.py::test_ppo_off_policy" in output and "Not yet." in output


def test_hints_go_from_vague_to_plain(monkeypatch, capsys):
    """The bug of exercise 12 stands alone in its line; the fifth try has the last hint again. An untouched copy costs
    no hint: the file to mend is named instead."""
    exercise = PAGE["12"]
    monkeypatch.setattr(exercises, "passes", lambda _: False)
    lines = exercise.file.read_text().splitlines(keepends=True)
    line = lines.index(exercise.right) + 1
    hints = [exercise.hint, "within ten lines", f"line {line}\n", exercise.right, exercise.right]
    assert exercises.main(["12", "--check"]) == 1
    output = capsys.readouterr().out
    assert str(exercise.copy) in output and "The bug" not in output
    exercise.copy.write_text(exercise.copy.read_text() + "\n")
    for expected in hints:
        assert exercises.main(["12", "--check"]) == 1
        assert expected in capsys.readouterr().out


def test_it_waits_for_the_mend(monkeypatch, capsys):
    """One Enter too early, then the mend; and a copy that is there already is not written again."""
    exercise = PAGE["11"]
    original = exercise.file.read_text()
    monkeypatch.setattr(exercises, "passes", lambda exercise: exercise.copy.read_text() == original)
    answers = iter([lambda: "", lambda: exercise.copy.write_text(original)])
    monkeypatch.setattr(builtins, "input", lambda _: next(answers)())
    assert exercises.main(["11"]) == 0
    output = capsys.readouterr().out
    assert exercise.symptom in output and output.count("Not yet.") == 1 and output.count("Right:") == 1
    assert exercises.main(["11", "--check"]) == 0
    assert exercises.main(["11"]) == 0
    output = capsys.readouterr().out
    assert "is mended" in output and "has a bug" not in output


def test_the_end_of_the_input_and_bad_numbers(monkeypatch, capsys):
    """Without a number, or with a wrong one, it says in three lines what it can do."""
    assert exercises.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(exercises, "passes", lambda _: False)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))
    assert exercises.main(["11"]) == 1
    assert "python lab/exercises.py 11 --check" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        exercises.main(["15"])
    assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 3


def test_each_concept_files_question_has_its_answer():
    """The file asks at the end of its docstring; the page repeats the question and folds the answer."""
    page = (exercises.ROOT / "lab" / "experiments.md").read_text()
    for name in ("losses", "filters", "length_control", "fp32_head", "pipeline_rl", "vllm_engine", "fit_sigmoid"):
        text = (exercises.ROOT / f"{name}.py").read_text().split('"""')[1]
        question = " ".join(text.partition("QUESTION. ")[2].split()).removesuffix(" (lab/experiments.md)")
        assert f"**[{name}.py](../{name}.py)** {question}\n<details><summary>Answer</summary>" in page
