"""runtime/run.py and folder.py: logs, checkpoints that are whole or absent, a resumed run that is the run it was."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripted import STEPS, Replay, assert_same_logs, without_times

from filters import PassRateHistory
from pipeline_rl import Group
from runtime.folder import Folder, Progress
from runtime.generator import EngineDied, EngineFailed
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
        recorder=SimpleNamespace(clock=clock),
    )  # fmt: skip
    state = state_of(run)
    assert state["prompts"]["first"] == list("abcde")


def assert_same_state(one, other):
    (a, *rest_a), (b, *rest_b) = one.state(), other.state()
    assert rest_a == rest_b and a.keys() == b.keys()
    for name in a:
        assert torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])), name


def test_a_resumed_run_is_bit_equal(recorded, whole, tmp_path):
    """Killed in step 6, behind the checkpoint of step 4: what the logs gained after it is cut, step 5 is made again.
    Weights, Adam's moments, curriculum and logs are those of a run that never stopped."""
    recorded("cut", killed_after=5)
    assert [r["step"] for r in without_times(tmp_path / "cut", "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert_same_state(whole[1], recorded("cut", "--resume"))
    assert_same_logs(whole[0], tmp_path / "cut")
    assert [r["step"] for r in without_times(tmp_path / "cut", "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [r["step"] for r in Folder(tmp_path / "cut").read("eval.jsonl")] == [0, 3, 6, 7]


@pytest.mark.parametrize("extra", ["--resume", "--overwrite"])
def test_no_file_is_changed_before_the_engine_is_up(program, tmp_path, extra):
    """One that does not start: exit code 2, and the old run is as it was, to the byte; --overwrite has deleted nothing,
    --resume cut nothing."""

    def start(self, weights, version=0):
        raise EngineFailed("no memory")

    program("--max_steps", "3")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, _, err = program(extra, script={"start": start})
    assert code == 2 and "no memory" in err and len(before) > 9
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_cleared_folder_keeps_what_is_not_the_runs(tmp_path):
    """Twice: the second time nothing is left to remove. A killed resume's half-written config.json is replaced."""
    folder = Folder(tmp_path / "run")
    save(folder, 10)
    (folder.path / "model").mkdir()
    (folder.path / "config.json.new").write_text("half")
    folder.replace("config.json", "{}")
    folder.append("metrics.jsonl", {"config": {}})
    for name in ("eval.jsonl", "curve.png", "notes.txt"):
        (folder.path / name).write_text("x")
    assert folder.holds_run()
    for _ in range(2):
        folder.clear()
        assert [path.name for path in folder.path.iterdir()] == ["notes.txt"] and not folder.holds_run()


def test_a_dead_engine_leaves_a_checkpoint_and_exit_code_75(program, whole, tmp_path):
    """It dies while step 4 waits for groups. The checkpoint of step 3 lists what was in flight; `--resume` goes on."""

    def take(self, count):
        if self.step == 3:
            raise EngineDied("the generator failed: EngineDied: it died")
        return Replay.take(self, count)

    code, _, err = program(script={"take": take})
    assert code == 75 and err.startswith("train.py: the generator failed: EngineDied: it died; checkpoint")
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 3
    assert program("--resume")[0] == 0
    assert_same_logs(tmp_path / "run", whole[0])
