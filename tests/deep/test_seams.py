"""Your own code by name: --loss, --engine, --task and --reward, each with everything that can be wrong with a name.

One sentence that begins with the flag and says what was looked for, exit code 2, and no folder of a run. What is right
runs: the lab's losses and tasks are named in just this way.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest
from scripted import small_model

import train
from tasks.named import named

MINE = """
def raises(*arguments):
    raise KeyError("no such digit")


def nothing(*arguments):
    pass
"""
# What is named | the sentence after the flag and the name
WRONG = """
nowhere:f | ModuleNotFoundError: No module named 'nowhere'.
mine.deeper:f | ModuleNotFoundError: No module named 'mine.deeper'; 'mine' is not a package.
broken:f | ZeroDivisionError: division by zero.
unwritten:f | SyntaxError: invalid syntax (unwritten.py, line 1).
leaves:f | SystemExit: 7.
mine:absent | AttributeError: module 'mine' has no attribute 'absent'.
math:pi | TypeError: a float is no function and no class.
""".strip().splitlines()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A working directory with modules in it, from which train.py is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # `named` appends the working directory
    Path("mine.py").write_text(MINE)
    Path("broken.py").write_text("\n1 / 0\n")
    Path("unwritten.py").write_text("def\n")
    Path("leaves.py").write_text("raise SystemExit(7)\n")
    yield tmp_path
    for name in ("mine", "broken", "unwritten", "leaves"):
        sys.modules.pop(name, None)


def refused(words: str, capsys) -> str:
    """The sentence with which train.py refuses to run; nothing was written."""
    assert train.main([*shlex.split(words), "--output_dir", "run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: --") and err.count("\n") == 1 and not Path("run").exists()
    return err.removeprefix("train.py: ").strip()


def data_set(folder) -> str:
    """Flags of a data set and its model: a --reward judges no built-in task."""
    small_model(folder / "model")
    rows = [{"prompt": f"{a} a +{b} <think>", "answer": "7 7"} for a in range(9) for b in range(1, 9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "--engine torch --model model --dataset rows.jsonl --held_out 4 --interruption_phrase 'time up </think>' "


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.split(" | ")[0])
@pytest.mark.parametrize("flag", ["loss", "engine", "task"])
def test_what_cannot_be_had_is_one_sentence_and_nothing_is_written(folder, capsys, flag, row):
    name, sentence = row.split(" | ")
    engine = "" if flag == "engine" else "--engine torch "
    assert refused(f"{engine}--{flag} {name}", capsys) == f"--{flag} {name}: {sentence}"


@pytest.mark.long
@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.split(" | ")[0])
def test_a_reward_is_looked_for_in_its_worker_and_is_the_same_sentence(folder, capsys, row):
    name, sentence = row.split(" | ")
    words = data_set(folder)
    capsys.readouterr()  # the bars of writing a model
    assert refused(words + f"--reward {name}", capsys) == f"--reward {name}: {sentence}"


@pytest.mark.long
def test_a_wrong_reward_does_not_empty_the_folder_of_an_older_run(folder, capsys):
    """--overwrite deletes a run only when the new one can begin."""
    words = data_set(folder) + "--reward mine:absent --overwrite"
    Path("old").mkdir()
    for name in ("metrics.jsonl", "config.json"):
        Path("old", name).touch()
    assert train.main([*shlex.split(words), "--output_dir", "old"]) == 2
    assert "--reward mine:absent" in capsys.readouterr().err and Path("old/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--task mine:raises", "raises KeyError: 'no such digit'."),
        ("--task mine:nothing", "returns no Task (tasks/prompts.py)."),
        ("--engine mine:nothing", "is no class."),
    ],
)
def test_a_function_that_does_not_fit_its_flag_is_one_sentence(folder, capsys, words, sentence):
    """What a name must be, and which flags do not go together: tests/test_flags.py."""
    engine = "" if "--engine" in words else "--engine torch "
    assert refused(engine + words, capsys) == f"{words} {sentence}"


@pytest.mark.long
@pytest.mark.parametrize("loss", ["lab.masks:icepop", "lab.masks:dispo", "mine:copy"])
def test_a_run_with_a_loss_of_ones_own_trains(folder, loss):
    Path("mine.py").write_text(
        "from losses import cispo\n\ndef copy(*args, **kwargs):\n    return cispo(*args, **kwargs)\n"
    )
    model = small_model(folder / "model")
    words = f"--engine torch --model {model} --loss {loss} --max_steps 3 --batch_prompts 2 --rollouts 4 --held_out 4"
    assert train.main([*words.split(), "--zero_variance", "keep", "--output_dir", "run"]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert len(steps) == 3 and all(record["updated"] == 1 for record in steps)


def test_a_working_directory_hides_no_installed_package(folder):
    """It is looked through last: somebody's losses.py is not the program's."""
    Path("losses.py").write_text("cispo = None\n")
    assert named("loss", "losses:cispo").__module__ == "losses"
    assert sys.path[-1] == str(folder)
