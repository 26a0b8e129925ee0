"""A run's folder: logs, checkpoints that are whole or absent, a resumed run that is the run it was, bit for bit."""

import ast
import contextlib
import errno
import gc
import io
import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay import STEPS, Killed, Replay, assert_same_logs, go, small_model, without_times
from test_faults import small_disk

import pipeline_rl
from filters import PassRateHistory
from pipeline_rl import Group
from runtime import checkpoints
from runtime.run_folder import LOGS, Folder, Progress, disk
from tasks.prompts import PromptStream

ROOT = Path(__file__).parent.parent


RECORDS = st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2), max_size=4)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@in_one_folder
@given(before=RECORDS, after=RECORDS, data=st.data())
def test_logs_cut_at_any_byte_give_whole_records(tmp_path, before, after, data):
    """What was written after a checkpoint goes at a resume, so that no step appears twice; what a killed writer leaves
    of its last line is not read."""
    folder = Folder(tmp_path)
    folder.clear()
    assert folder.read("metrics.jsonl") == [] and set(folder.lengths().values()) == {0}
    for record in before:
        folder.append("metrics.jsonl", record)
    lengths = folder.lengths()
    for record in after:
        folder.append("metrics.jsonl", record)
        folder.append("eval.jsonl", record)
    assert folder.read("metrics.jsonl") == [*before, *after] and folder.read("eval.jsonl") == after
    folder.cut_back(lengths)
    assert folder.lengths() == lengths
    assert folder.read("metrics.jsonl") == before and folder.read("eval.jsonl") == []
    file = tmp_path / "metrics.jsonl"
    if before:
        os.truncate(file, at := data.draw(st.integers(0, lengths["metrics.jsonl"])))
        found = folder.read("metrics.jsonl")
        assert found == before[: len(found)] and len(found) == file.read_bytes().count(b"\n") and at >= len(found)


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
    """The newest two of steps 9, 10, 100 stay, newest by number; a damaged one is passed over; a half-written one of an
    earlier process is no checkpoint and is removed by the next save."""
    folder = Folder(tmp_path)
    assert folder.newest_checkpoint() is None and folder.checkpoints() == []
    first, second, third = [save(folder, step) for step in (9, 10, 100)]
    assert folder.checkpoints() == [second, third] and not first.exists()
    assert folder.newest_checkpoint()[0] == third and folder.newest_checkpoint()[1]["step"] == 100
    (third / "weights.bin").write_bytes(b"w" * 99)
    assert folder.newest_checkpoint()[0] == second and f"{third} is damaged" in capsys.readouterr().out
    (second / "state.json").write_text("{")
    half = tmp_path / "checkpoints" / "unfinished-1"
    half.mkdir()
    assert folder.newest_checkpoint() is None
    assert save(folder, 101) == folder.newest_checkpoint()[0] and not half.exists()
    for value in (1, 2):  # as after a SIGTERM right behind a save: the later state is there, and nothing else
        folder.finish_checkpoint(folder.begin_checkpoint(), 3, {"step": 3, "value": value}, keep=1)
    assert folder.newest_checkpoint()[1]["value"] == 2
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


@in_one_folder
@given(keep=st.integers(1, 3), events=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12))
def test_a_damaged_checkpoint_is_not_counted(monkeypatch, tmp_path, keep, events):
    """Saves at any steps, some damaged afterwards: after each save the `keep` newest whole ones up to it are left."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    folder, whole = Folder(tmp_path), []
    for step, damaged in events:
        made = save(folder, step, keep)
        whole = sorted({*(old for old in whole if old < step), step})[-keep:]
        assert [int(path.name[5:]) for path in folder.checkpoints()] == whole
        assert folder.newest_checkpoint()[0] == made
        if damaged:
            (made / "weights.bin").write_bytes(b"")
            whole.remove(step)
            found = folder.newest_checkpoint()
            assert (found and int(found[0].name[5:])) == (whole[-1] if whole else None)


@given(st.integers(), st.integers(0, 99), st.integers(-1, 99), st.integers(0, 2000))
def test_progress_goes_through_a_state(seed, version, evaluated, drawn):
    """At any place of the random stream: what is drawn next is the same."""
    progress = Progress(random.Random(seed), step=version + 1, version=version, evaluated=evaluated)
    for _ in range(drawn):
        progress.rng.random()
    again = Progress(random.Random())
    again.load_state_dict(json.loads(json.dumps(progress.state_dict() | {"compute": {"tokens": 7}})))
    assert again.state_dict() == progress.state_dict() and again.rng.gauss() == progress.rng.gauss()
    assert (again.compute, again.taken, again.bad_steps) == ({"tokens": 7}, [], 0)


def test_a_checkpoint_lists_every_prompt_that_was_not_trained():
    """Two groups taken, two under way in the engine, one still to come again after an earlier resume: in this order."""
    problems = [SimpleNamespace(key=key) for key in "abcde"]
    progress = Progress(random.Random(0), taken=[Group(i, problem, 0, []) for i, problem in enumerate(problems[:2])])
    prompts = PromptStream(problems, 0, lambda key: False)
    prompts.first.append(problems[4])
    generator = SimpleNamespace(under_way={2: problems[2], 3: problems[3]})
    generator.in_loop = lambda function: function(generator)
    state = checkpoints.state_of(progress, PassRateHistory(), prompts, generator, {})
    assert state["prompts"]["first"] == list("abcde")


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
    for name in (*LOGS, "config.json", "curve.png", "notes.txt"):
        (folder.path / name).write_text("x")
    for _ in range(2):  # what is no file of a run stays; then nothing is left to remove
        folder.clear()
        assert [file.name for file in folder.path.iterdir()] == ["notes.txt"]
    assert len(list(disk.rglob("*"))) == 12 and (disk / "text").read_text() == "kept"


def test_a_stop_leaves_the_old_file_or_the_new_one(monkeypatch, tmp_path):
    """config.json is written again at each resume: killed before the rename, the old one is still there."""
    folder = Folder(tmp_path)
    folder.replace("config.json", "old")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, "replace", lambda self, target: 1 / 0)
        folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "old"
    folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"


@pytest.fixture
def run(monkeypatch, tmp_path, model):
    """Runs in tmp_path / name, on recorded rollouts."""
    return lambda name, *extra, **options: go(monkeypatch, tmp_path / name, model, *extra, **options)


def assert_same_state(one, other):
    (a, *rest_a), (b, *rest_b) = one.state(), other.state()
    assert rest_a == rest_b and a.keys() == b.keys()
    for name in a:
        assert torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])), name


def killed_evaluation(self, future):
    if self.step == 3:
        raise Killed
    return Replay.result_of(self, future)


@pytest.mark.long
@pytest.mark.parametrize(
    "killed", [{"killed_after": 2}, {"killed_after": 5}, {"script": {"result_of": killed_evaluation}}]
)
def test_resumed_run_is_bit_equal(run, whole, tmp_path, killed):
    """Killed at and after a save, and while the evaluation of step 3 is waited for: weights, Adam's moments, curriculum
    and logs are those of a run that never stopped."""
    run("cut", **killed)
    if "script" in killed:
        assert [r["step"] for r in Folder(tmp_path / "cut").read("eval.jsonl")] == [0]
    assert_same_state(whole[1], run("cut", "--resume"))
    assert_same_logs(whole[0], tmp_path / "cut")
    assert [r["step"] for r in without_times(tmp_path / "cut", "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [r["step"] for r in Folder(tmp_path / "cut").read("eval.jsonl")] == [0, 3, 6, 7]


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--schedule ppo_off_policy --k 2 --max_steps 8", "--dynamic_sampling true"])
def test_a_resumed_run_of_the_alternatives_is_bit_equal(run, tmp_path, flags):
    """Turns of two updates; and groups taken one by one until three have unequal rewards, killed after the first."""

    def take(self, count):
        if self.step == self.killed_after and (count > 1 or self.progress.taken):
            raise Killed
        problems = [next(self.problems) for _ in range(count)]
        return [self.group(i, p, random.Random(f"{self.step} {p.key}")) for i, p in enumerate(problems)]

    given = [*flags.split(), "--pass_rate_threshold", "2"]
    whole = run("whole", *given, script={"take": take})
    run("cut", *given, script={"take": take}, killed_after=4)
    assert Folder(tmp_path / "cut").newest_checkpoint()[1]["step"] == 4
    assert_same_state(whole, run("cut", "--resume", script={"take": take}))
    assert_same_logs(tmp_path / "whole", tmp_path / "cut")
    if "dynamic" in flags:
        assert sum(r["discarded_groups"] for r in without_times(tmp_path / "cut", "metrics.jsonl")) > 0


@pytest.mark.long
def test_a_finished_run_is_made_longer_and_loses_nothing(run, tmp_path):
    """Seven steps, then two more: the weights are those of a run of nine, and the final evaluation of step 7 stays."""
    whole = run("whole", "--max_steps", "9")
    run("run")
    assert_same_state(whole, run("run", "--resume", "--max_steps", "9"))
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, 10))
    for log in ("eval.jsonl", "eval_counts.jsonl"):
        assert [r["step"] for r in Folder(tmp_path / "run").read(log)] == [0, 3, 6, 7, 9]
    assert json.loads((tmp_path / "run" / "model" / "run.json").read_text())["step"] == 9
    assert not [f.name for f in (tmp_path / "run").iterdir() if f.name.startswith("model.")]


@pytest.mark.long
def test_a_stop_in_mid_step_keeps_every_prompt(program, whole, tmp_path):
    """Ctrl-C while step 4's evaluation is waited for: its batch was taken but not trained, so its prompts come first
    after the resume, in their old order, and are trained exactly once."""
    seen = []

    def take(self, count):
        groups = Replay.take(self, count)
        seen.append([group.problem.key for group in groups])
        return groups

    def result_of(self, future):
        if self.step == 3 and len(seen) == 4:
            raise pipeline_rl.StopRequested
        return future

    code, out, _ = program(script={"take": take, "result_of": result_of})
    assert code == 143 and "after step 3; checkpoint" in out
    assert program("--resume", script={"take": take})[0] == 0
    assert seen[4] == seen[3]
    ended, expected = (Folder(path).newest_checkpoint()[1] for path in (tmp_path / "run", whole[0]))
    assert ended["history"] == expected["history"] and ended["prompts"] == expected["prompts"]


@pytest.mark.long
def test_hours_are_kept_over_a_resume(program, tmp_path):
    """A budget of the hours of steps 1 to 3 is reached before step 4."""
    program("--max_steps", "3")
    spent = Folder(tmp_path / "run").newest_checkpoint()[1]["compute"]["hours"]
    assert spent > 0
    code, out, _ = program("--resume", "--max_steps", "9", "--max_hours", str(spent))
    assert code == 0 and f"--max_hours {spent} reached" in out
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.long
def test_flags_given_again_win_and_are_logged(run, program, tmp_path):
    """A line says so, config.json and metrics.jsonl have it. What does not fit the checkpoint's prompts is refused."""
    run("run", killed_after=3)
    code, out, _ = program("--resume", "--lr", "0.02", "--max_steps", "4")
    changed = [line for line in out.splitlines() if " is now " in line]
    assert code == 0 and sorted(changed) == ["--lr is now 0.02 (it was 0.01)", "--max_steps is now 4 (it was 7)"]
    configs = [r["config"] for r in Folder(tmp_path / "run").read("metrics.jsonl") if "config" in r]
    assert [(c["lr"], c["max_steps"]) for c in configs] == [(0.01, 7), (0.02, 4)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.02
    lrs = [r["lr"] for r in without_times(tmp_path / "run", "metrics.jsonl")]
    assert lrs == pytest.approx([0.01 * 1 / 5, 0.01 * 2 / 5, 0.02 * 3 / 5, 0.02 * 4 / 5])  # five steps of warm-up
    assert " is now " not in program("--resume")[1]
    code, _, err = program("--resume", "--seed", "5")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*not among the prompts.*--seed.*\n", err)
    code, _, err = program("--resume", "--pass_rate_threshold", "0.8")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*Give --pass_rate_threshold as before.\n", err)


@pytest.mark.parametrize(("path", "value"), [
    ("step", None), ("step", 1.0), ("version", "1"), ("evaluated", -2), ("random", [3, [], None]), ("random", 5),
    ("history", []), ("history counts", [["a", 1]]), ("history counts", [[1, 1, 1]]), ("history retired", None),
    ("prompts epoch", -1), ("prompts position", True), ("prompts first", [0]),
    ("compute tokens", "1"), ("compute hours", float("nan")), ("logs", {"eval.jsonl": -1}), ("logs eval.jsonl", 1e3),
    ("logs", None),
])  # fmt: skip
def test_a_damaged_state_is_refused(whole, path, value):
    """Each value that a resumed run reads, of another type, out of its range, or missing."""
    folder = Folder(whole[0])
    checkpoint, state = folder.newest_checkpoint()
    checkpoints.check(folder, checkpoint, state)  # is accepted
    *places, name = path.split()
    place = state[places[0]] if places else state
    had = place.pop(name)
    for missing in (True, False) if name not in ("sources", "hours", "tokens") else (False,):
        place |= {} if missing else {name: value}
        with pytest.raises(checkpoints.CheckpointError, match=rf"^{checkpoint}/state\.json is damaged"):
            checkpoints.check(folder, checkpoint, state)
    place[name] = had
    checkpoints.check(folder, checkpoint, state)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@in_one_folder
@given(data=st.data())
def test_any_junk_in_a_state_is_refused_or_loads(whole, data):
    """What passes the check is what a resumed run can load."""
    folder = Folder(whole[0])
    checkpoint, state = folder.newest_checkpoint()
    place, keys = state, ["step", "version", "evaluated", "random", "history", "prompts", "compute", "logs"]
    name = data.draw(st.sampled_from(keys))
    if isinstance(state[name], dict) and data.draw(st.booleans()):
        place, name = state[name], data.draw(st.sampled_from([*state[name], "x"]))
    place[name] = data.draw(JUNK)
    with contextlib.suppress(checkpoints.CheckpointError):
        checkpoints.check(folder, checkpoint, json.loads(json.dumps(state)))
        Progress(random.Random()).load_state_dict(state)
        with contextlib.suppress(ValueError):  # of another threshold or other keys
            PassRateHistory(0.6).load_state_dict(state["history"])


@pytest.mark.long
def test_a_damaged_folder_is_refused_and_stays_as_it_is(run, program, tmp_path):
    """A log that is no JSON before the checkpoint, or a link; after it, anything may stand. No file changes."""
    run("run", killed_after=3)
    folder, other = Folder(tmp_path / "run"), tmp_path / "other"
    checkpoint, state = folder.newest_checkpoint()
    for name in LOGS:
        log, before = folder.path / name, (folder.path / name).read_bytes()
        later = b'{"step": 3}\n' * (len(before) // 12)
        for content in (b"\xff" + before[1:], b"null\n" + before, b"\0" * len(before), later):
            log.write_bytes(content)
            with pytest.raises(checkpoints.CheckpointError, match=rf"^{log} is damaged from line \d+ on; "):
                checkpoints.check(folder, checkpoint, state)
        code, _, err = program("--resume")
        assert code == 2 and err.startswith(f"train.py: --resume: {log} is damaged from line ") and err.endswith(".\n")
        assert log.read_bytes() == content
        other.write_bytes(before)
        log.unlink()
        log.symlink_to(other)
        code, _, err = program("--resume")
        assert code == 2 and re.fullmatch(rf"train.py: --resume {folder.path}: {name} there is a link, .*\.\n", err)
        assert other.read_bytes() == before
        log.unlink()
        log.write_bytes(before + b"\0\xff")
    assert program("--resume")[0] == 0


class Evil:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pickled(value, dump) -> bytes:
    file = io.BytesIO()
    dump({"state": value}, file)
    return file.getvalue()


def replace(checkpoint, name, content):
    """Another file in a checkpoint, with the size that state.json then says."""
    (checkpoint / name).write_bytes(content)
    state = json.loads((checkpoint / "state.json").read_text())
    state["files"][name] = len(content)
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_does_not_serve_is_one_sentence(run, program, tmp_path):
    """Zeros of the right size, a model of another width, and files that would run code when they are unpickled, which
    does not run (without the weights-only loader it does: the test's own check)."""
    run("run", killed_after=3)
    checkpoint, _ = Folder(tmp_path / "run").newest_checkpoint()
    mark, other = tmp_path / "mark", small_model(tmp_path / "other", hidden_size=64)
    evil = {"optimizer.bin": pickled(Evil(mark), torch.save), "random_states_0.pkl": pickled(Evil(mark), pickle.dump)}
    zeros = {name: bytes((checkpoint / name).stat().st_size) for name in ("optimizer.bin", "model.safetensors")}
    for name, content in [("state.json", b""), *zeros.items(), *evil.items()]:
        had, state = (checkpoint / name).read_bytes(), (checkpoint / "state.json").read_bytes()
        if content:
            replace(checkpoint, name, content)
        code, _, err = program("--resume", *([] if content else ["--model", other]))
        said = rf"train.py: --resume: {checkpoint} does not fit this model \(.*\)\.\n"
        assert code == 2 and re.fullmatch(said, err) and not mark.exists(), name
        (checkpoint / name).write_bytes(had)
        (checkpoint / "state.json").write_bytes(state)
    pickle.loads(evil["random_states_0.pkl"])
    mark.unlink()  # was there
    torch.load(io.BytesIO(evil["optimizer.bin"]), weights_only=False)
    assert mark.exists()
    (checkpoint / "state.json").unlink()
    code, _, err = program("--resume")
    assert code == 2 and "no complete checkpoint is there; start anew with --output_dir and --overwrite true." in err


@pytest.mark.long
def test_only_a_disk_is_called_a_disk(program, monkeypatch, tmp_path):
    """Memory that ran out and a lost peer stay what they are (torch's errors are RuntimeErrors, too); a folder without
    permission is called that."""
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Connection closed by peer [127.0.0.1]")):
        with pytest.raises(type(error), match=str(error).split()[0]), disk(tmp_path):
            raise error

    def forbidden(self, folder):
        raise PermissionError(13, "Permission denied", f"{folder}/model.safetensors")

    monkeypatch.setattr(Accelerator, "save_state", forbidden)
    code, _, err = program("--overwrite", "true")
    assert code == 1 and re.fullmatch(r"train.py: cannot write .*/model.safetensors: Permission denied; .*\n", err)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["torch", "safetensors", "sharded", "log"])
def test_what_a_full_and_a_read_only_disk_raise(tmp_path, how):
    """Real ones, of 100 kB, under 400 kB of weights: torch says "unexpected pos", safetensors and FSDP2's format errors
    of their own. All become an OSError with the disk's own reason and the path."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    weights, folder = {"a": torch.zeros(100_000)}, tmp_path / "disk"
    write = {
        "torch": lambda: torch.save(weights, folder / "a.bin"),
        "safetensors": lambda: save_file(weights, folder / "a.safetensors"),
        "sharded": lambda: dcp.save(weights, checkpoint_id=folder / "sharded"),
        "log": lambda: Folder(folder).append("metrics.jsonl", {"x": "x" * 400_000}),
    }[how]
    with small_disk(folder, "100k") as remount:
        for number, options in ((errno.ENOSPC, "rw"), (errno.EROFS, "ro")):
            remount(options)
            with pytest.raises(OSError) as caught, disk(folder):
                write()
            found = caught.value.errno, caught.value.filename
            del caught
            gc.collect()  # its frames hold torch's open file
            assert found[0] == number and found[1].startswith(str(folder / "metrics.jsonl" if how == "log" else folder))


@pytest.mark.long
def test_full_disk_ends_with_one_sentence_and_goes_on_with_more_room(program, whole, tmp_path):
    """A disk of 300 kB holds the first checkpoint and not the second; once there is room the resumed run goes on."""
    with small_disk(tmp_path / "run", "300k") as remount:
        code, _, err = program()
        assert code == 1
        place = f"{tmp_path}/run/checkpoints/unfinished-\\d+"
        assert re.fullmatch(rf"train.py: cannot write {place}: .*; earlier checkpoints are complete\n", err)
        assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
        remount("size=16m")
        assert program("--resume")[0] == 0
        assert_same_logs(tmp_path / "run", whole[0])


def test_read_only_folder(program, tmp_path):
    with small_disk(tmp_path / "disk", "1m", "ro"):
        code, out, err = program(folder=tmp_path / "disk" / "run")
    assert code == 1 and out.startswith("--lr 0.01: given, ") and out.count("\n") == 1
    assert err.startswith(f"train.py: cannot write {tmp_path}/disk/run: Read-only file system; earlier checkpoints ")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A real checkpoint of torch's distributed format, as FSDP2 has it: model and optimiser on a mesh of one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = tmp_path_factory.mktemp("sharded")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer_0")
        dcp.save({"code": Evil(folder / "mark")}, checkpoint_id=folder / "evil")
    finally:
        torch.distributed.destroy_process_group()
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_runs_no_code(sharded):
    """A real `.metadata` is plain data and is accepted; one that calls os.system is refused. What is no tensor lies in
    the shards as a pickle. torch's own reader runs both: the test's own check."""
    import torch.distributed.checkpoint as dcp

    mark, evil = sharded / "mark", sharded / "evil"
    checkpoints.check_pickles(sharded)  # evil's .metadata names the object and no more
    with checkpoints.weights_only(), pytest.raises(dcp.CheckpointException, match="[Ww]eights only"):
        dcp.load({"code": None}, no_dist=True, checkpoint_id=evil)
    assert not mark.exists()
    dcp.load({"code": None}, no_dist=True, checkpoint_id=evil)
    mark.unlink()  # was there
    (evil / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil(mark)}))
    with pytest.raises(pickle.UnpicklingError, match=r"^evil/\.metadata: it would call \w+\.system$"):
        checkpoints.check_pickles(sharded)
    assert not mark.exists()
    with pytest.raises(dcp.CheckpointException):
        dcp.load({}, no_dist=True, checkpoint_id=evil)
    assert mark.exists()
    own = {"optimizer": {"param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "fused": None}]}}
    with checkpoints.weights_only():
        dcp.load(own, no_dist=True, checkpoint_id=sharded / "optimizer_0")
    assert own["optimizer"]["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.999), "fused": None}]  # AdamW's defaults


@pytest.mark.long
def test_no_text_becomes_code():
    """No eval, exec or unpickling but in the sandbox; torch.load only with weights_only; code that comes with a model
    only on --trust_remote_code."""
    sources = [file for folder in (".", "runtime", "tasks", "tools") for file in (ROOT / folder).glob("*.py")]
    picklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for file, node in ((f, node) for f in sources for node in ast.walk(ast.parse(f.read_text()))):
        if isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & picklers
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":  # the exception; a base that is narrowed below
            assert {a.name for a in node.names} <= {"Unpickler", "UnpicklingError"}
        if isinstance(node, ast.Name) and node.id == "Unpickler":
            assert "class _Plain(Unpickler):" in file.read_text() and "def find_class(" in file.read_text()
        if isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in ("eval", "exec", "os.system"):  # shut in; and the forms that stand above it
                given = file.name, ast.unparse(node.args[0])
                assert file.name == "sandbox.py" or given == ("real_model.py", "returned")
            assert "shell" not in options
            assert not called.endswith("torch.load") or options.get("weights_only") == "True"
            assert "trust_remote_code" not in options or options["trust_remote_code"] == "flags.trust_remote_code"
