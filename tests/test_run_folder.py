"""runtime/run_folder.py: logs that a resume cuts back, checkpoints that are whole or absent."""

from pathlib import Path

import pytest

from runtime.run_folder import LOGS, Folder


def test_records_are_lines_that_can_be_cut_back(tmp_path):
    """A resume takes off what was written after the checkpoint, so that no step appears twice."""
    folder = Folder(tmp_path)
    assert folder.read("metrics.jsonl") == [] and set(folder.lengths().values()) == {0}
    folder.append("metrics.jsonl", {"step": 1})
    lengths = folder.lengths()
    folder.append("metrics.jsonl", {"step": 2})
    folder.append("eval.jsonl", {"step": 2})
    folder.append("eval_counts.jsonl", {"step": 2})
    assert [r["step"] for r in folder.read("metrics.jsonl")] == [1, 2]
    folder.cut_back(lengths)
    assert folder.read("metrics.jsonl") == [{"step": 1}] and folder.read("eval.jsonl") == []
    assert folder.read("eval_counts.jsonl") == []


def test_a_line_cut_short_is_left_out(tmp_path):
    """A killed writer leaves half a line: the records before it are read."""
    folder = Folder(tmp_path)
    folder.append("metrics.jsonl", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rewa')
    assert folder.read("metrics.jsonl") == [{"step": 1}]


def save(folder: Folder, step: int, keep: int = 2) -> Path:
    temporary = folder.begin_checkpoint()
    (temporary / "weights.bin").write_bytes(b"w" * step)
    return folder.finish_checkpoint(temporary, step, {"step": step}, keep)


def test_checkpoints_are_whole_and_few(tmp_path, capsys):
    """The newest two of steps 9, 10, 100 stay, newest by number; a damaged one is passed over with a line that names
    it; a half-written one of an earlier process is no checkpoint and is removed by the next save."""
    folder = Folder(tmp_path)
    assert folder.newest_checkpoint() is None and folder.checkpoints() == []
    paths = [save(folder, step) for step in (9, 10, 100)]
    assert folder.checkpoints() == paths[1:] and not paths[0].exists()
    found, state = folder.newest_checkpoint()
    assert found == paths[2] and state["step"] == 100
    (paths[2] / "weights.bin").write_bytes(b"w" * 99)
    assert folder.newest_checkpoint()[0] == paths[1]
    assert f"{paths[2]} is damaged" in capsys.readouterr().out
    (paths[1] / "state.json").write_text("{")
    assert folder.newest_checkpoint() is None
    half = tmp_path / "checkpoints" / "unfinished-1"
    half.mkdir()
    assert folder.newest_checkpoint() is None
    assert save(folder, 101) in folder.checkpoints() and not half.exists()
    assert folder.newest_checkpoint()[1]["step"] == 101
    assert save(folder, 101).exists()  # the same step again replaces it


def test_a_second_save_after_the_same_step(tmp_path):
    """As after a SIGTERM right behind a save: the later state is there, and nothing else."""
    folder = Folder(tmp_path)
    for value in (1, 2):
        folder.finish_checkpoint(folder.begin_checkpoint(), 3, {"step": 3, "value": value}, keep=1)
    assert folder.newest_checkpoint()[1]["value"] == 2
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_a_stop_leaves_the_old_file_or_the_new_one(monkeypatch, tmp_path):
    """config.json is written again at each resume: killed before the rename, the old one is still there."""
    folder = Folder(tmp_path)
    folder.replace("config.json", "old")

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "old"
    folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"


def test_clearing_a_run_removes_its_own_files_only(tmp_path):
    folder = Folder(tmp_path)
    for name in (*LOGS, "config.json", "curve.png", "notes.txt"):
        (tmp_path / name).write_text("x")
    for name in ("checkpoints/step-000001", "model", "mine"):
        (tmp_path / name).mkdir(parents=True)
    folder.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "notes.txt"]
    folder.clear()  # nothing left to remove
