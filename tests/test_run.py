"""runtime/run.py and folder.py: checkpoints that are whole or absent, and what a resume needs of them.

A resumed run that is, bit for bit, the run it was: deep/test_run_faults.py."""

import random
from pathlib import Path
from types import SimpleNamespace

from filters import PassRateHistory
from pipeline_rl import Group
from runtime.folder import Folder, Progress
from runtime.run import state_of
from tasks.prompts import PromptStream


def save(folder: Folder, step: int, **state) -> Path:
    temporary = folder.begin_checkpoint()
    (temporary / "weights.bin").write_bytes(b"w" * step)
    return folder.finish_checkpoint(temporary, step, {"step": step} | state)


def test_checkpoints_are_whole_and_few(tmp_path, capsys):
    """The newest two of steps 9, 10, 100 stay, newest by number; a damaged one is passed over; a half-written one of an
    earlier process is no checkpoint and is removed by the next save."""
    folder = Folder(tmp_path)
    assert folder.newest_checkpoint() is None and folder.checkpoints() == []
    first, second, third = [save(folder, step) for step in (9, 10, 100)]
    assert folder.checkpoints() == [second, third] and not first.exists()
    assert folder.newest_checkpoint()[0] == third and folder.newest_checkpoint()[1]["step"] == 100
    (third / "weights.bin").write_bytes(b"w" * 99)
    assert folder.newest_checkpoint()[0] == second and f"{third} is damaged" in capsys.readouterr().out
    for damaged in ("[]", "{}", '{"files": []}', "{"):
        (second / "state.json").write_text(damaged)
        assert folder.newest_checkpoint() is None
    half = tmp_path / "checkpoints" / "unfinished-1"
    half.mkdir()
    assert save(folder, 101) == folder.newest_checkpoint()[0] and not half.exists()
    for value in (1, 2):  # as after a SIGTERM right behind a save: the later state is there, and nothing else
        save(folder, 3, value=value)
    assert folder.newest_checkpoint()[1]["value"] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_a_checkpoint_lists_every_prompt_that_was_not_trained():
    """Two groups taken, two under way in the engine, one still to come again after an earlier resume: in this order."""
    problems = [SimpleNamespace(key=key) for key in "abcde"]
    progress = Progress(random.Random(0), taken=[Group(i, problem, 0, []) for i, problem in enumerate(problems[:2])])
    prompts = PromptStream(problems, 0, lambda key: False)
    prompts.first.append(problems[4])
    generator = SimpleNamespace(under_way={2: problems[2], 3: problems[3]})
    generator.in_loop = lambda function: function(generator)
    clock = SimpleNamespace(now=dict, hours=lambda: 0.5)
    run = SimpleNamespace(
        progress=progress, history=PassRateHistory(), prompts=prompts, generator=SimpleNamespace(on_main=generator),
        recorder=SimpleNamespace(clock=clock, mismatch=None),
    )  # fmt: skip
    state = state_of(run)
    assert state["prompts"]["first"] == list("abcde")
