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


def test_a_log_is_cut_by_its_name_only_and_never_made_longer(tmp_path, capsys):
    """What a state.json from elsewhere says of other files, of links, or beyond a log's end changes nothing."""
    folder, other = Folder(tmp_path / "run"), tmp_path / "other.txt"
    folder.path.mkdir()
    other.write_text("0123456789")
    (folder.path / "groups.jsonl").symlink_to(other)
    (folder.path / "notes.txt").write_text("mine")
    folder.append("eval.jsonl", {"step": 0})
    folder.cut_back({str(other): 0, "../other.txt": 1, "groups.jsonl": 2, "notes.txt": 0, "eval.jsonl": 20})
    assert other.read_text() == "0123456789" and (folder.path / "notes.txt").read_text() == "mine"
    assert folder.read("eval.jsonl") == [{"step": 0}] and (folder.path / "eval.jsonl").stat().st_size == 12
    assert f"{folder.path}/eval.jsonl has lost its last 8 bytes" in capsys.readouterr().out
    assert folder.not_its_own() == ["groups.jsonl"]


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


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_is_not_counted(tmp_path, keep):
    """Of 60 and 90 the newer one is damaged: what is saved after 60 stays, and the damaged one goes."""
    folder = Folder(tmp_path)
    for step in (60, 90):
        save(folder, step)
    (tmp_path / "checkpoints/step-000090/weights.bin").write_bytes(b"")
    for step, left in ((70, [60, 70]), (80, [70, 80])):
        made = save(folder, step, keep)
        assert folder.newest_checkpoint()[0] == made
        assert [int(path.name[5:]) for path in folder.checkpoints()] == left[-keep:]


def test_links_go_and_what_they_point_to_stays(tmp_path):
    """A checkpoint that was moved to another disk is loaded, and its link is removed in its turn; files and links with
    the names of checkpoints and models are no hindrance."""
    folder, disk = Folder(tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    save(folder, 10).rename(disk / "moved")
    (disk / "text").write_text("kept")
    places = {"step-000010": "moved", "step-000030": "gone", "unfinished-1": "moved", "unfinished-2": "text"}
    for name, target in places.items():
        (folder.path / "checkpoints" / name).symlink_to(disk / target)
    (folder.path / "checkpoints/step-000020").write_text("no folder")
    (folder.path / "checkpoints/step-x").mkdir()
    for name in ("model", "model.new", "model.old", "config.json.new"):
        (folder.path / name).symlink_to(disk / ("text" if "." in name else "moved"))
    assert folder.newest_checkpoint()[1]["step"] == 10
    for step in (20, 30):
        save(folder, step)
    folder.begin_model()
    folder.finish_model({"step": 1})
    folder.replace("config.json", "{}")
    assert [path.name for path in folder.checkpoints()] == ["step-000020", "step-000030"]
    assert not any(path.is_symlink() for path in folder.path.rglob("*"))
    (folder.path / "checkpoints").rename(disk / "checkpoints")
    (folder.path / "checkpoints").symlink_to(disk / "checkpoints")
    folder.clear()
    assert not any(folder.path.iterdir()) and len(list(disk.rglob("*"))) == 12 and (disk / "text").read_text() == "kept"


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
