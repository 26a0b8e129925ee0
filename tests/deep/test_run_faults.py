"""runtime/run.py and folder.py: each way in which a run may be stopped, fail, be damaged, or go on."""

import ast
import io
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded import STEPS, Replay, assert_same_logs, assert_same_state, without_times
from scripted import Killed, small_model
from test_faults import small_disk
from test_run import save

from generator import EngineFailed, Exhausted, StopRequested
from runtime.flags import UsageError
from runtime.folder import Folder, Progress, RunFailed, signed
from runtime.run import load_tensors, save_tensors

ROOT = Path(__file__).parents[2]


RECORDS = st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2), max_size=4)


in_one_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@in_one_folder
@given(before=RECORDS, after=RECORDS, data=st.data())
def test_logs_cut_at_any_byte_give_whole_records(tmp_path, before, after, data):
    """What was written after a checkpoint goes at a resume, so that no step appears twice; what a killed writer leaves
    of its last line is not read."""
    folder = Folder(tmp_path)
    folder.clear()
    assert folder.read("metrics.jsonl") == [] and [length for length, _ in folder.logs().values()] == [0, 0, 0]
    for record in before:
        folder.append("metrics.jsonl", record)
    logs = folder.logs()
    for record in after:
        folder.append("metrics.jsonl", record)
        folder.append("eval.jsonl", record)
    assert folder.read("metrics.jsonl") == [*before, *after] and folder.read("eval.jsonl") == after
    folder.check_logs(logs)
    folder.cut_back(logs)
    assert folder.logs() == logs
    assert folder.read("metrics.jsonl") == before and folder.read("eval.jsonl") == []
    file = tmp_path / "metrics.jsonl"
    if before:
        os.truncate(file, data.draw(st.integers(0, logs["metrics.jsonl"][0] - 1)))
        records = folder.read("metrics.jsonl")
        assert records == before[: len(records)] and len(records) == file.read_bytes().count(b"\n")
        with pytest.raises(UsageError, match="metrics.jsonl is damaged"):  # a log that is shorter is no log of this run
            folder.check_logs(logs)


@given(st.integers(), st.integers(0, 99), st.integers(-1, 99), st.integers(0, 2000))
def test_progress_goes_through_a_state(seed, version, evaluated, drawn):
    """At any place of the random stream: what is drawn next is the same."""
    progress = Progress(random.Random(seed), step=version + 1, version=version, evaluated=evaluated)
    for _ in range(drawn):
        progress.rng.random()
    again = Progress(random.Random())
    again.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert again.state_dict() == progress.state_dict() and again.rng.gauss() == progress.rng.gauss()
    assert (again.taken, again.bad_steps) == ([], 0)


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


def killed_evaluation(self, future):
    if self.step == 3:
        raise Killed
    return Replay.result_of(self, future)


@pytest.mark.long
@pytest.mark.parametrize(
    "killed", [{"killed_after": 5}, {"killed_after": 2}, {"script": {"result_of": killed_evaluation}}]
)
def test_a_resumed_run_is_bit_equal(recorded, whole, tmp_path, killed):
    """Killed in step 6, behind the checkpoint of step 4: what the logs gained after it is cut, step 5 is made again. Or
    at a save, or in an evaluation. Weights, Adam's moments, curriculum and logs are those of a run that never stopped."""
    recorded("cut", **killed)
    if "script" in killed:
        assert [r["step"] for r in Folder(tmp_path / "cut").read("eval.jsonl")] == [0]
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


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--schedule ppo_off_policy --k 2 --max_steps 8", "--zero_variance replace"])
def test_a_resumed_run_of_the_alternatives_is_bit_equal(recorded, tmp_path, flags):
    """Turns of two updates; and groups taken one by one until three have unequal rewards, killed after the first."""

    def take(self, count):
        if self.step == self.killed_after and (count > 1 or self.progress.taken):
            raise Killed
        problems = [next(self.problems) for _ in range(count)]
        return [self.group(i, p, random.Random(f"{self.step} {p.key}")) for i, p in enumerate(problems)]

    options = [*flags.split(), "--pass_rate_threshold", "2"]
    whole = recorded("whole", *options, script={"take": take})
    recorded("cut", *options, script={"take": take}, killed_after=4)
    assert Folder(tmp_path / "cut").newest_checkpoint()[1]["step"] == 4
    assert_same_state(whole, recorded("cut", "--resume", script={"take": take}))
    assert_same_logs(tmp_path / "whole", tmp_path / "cut")
    if "dynamic" in flags:
        assert sum(r["discarded_groups"] for r in without_times(tmp_path / "cut", "metrics.jsonl")) > 0


@pytest.mark.long
def test_a_finished_run_is_made_longer_and_loses_nothing(recorded, tmp_path):
    """Seven steps, then two more: the weights are those of a run of nine, and the final evaluation of step 7 stays."""
    whole = recorded("whole", "--max_steps", "9")
    recorded("run")
    assert_same_state(whole, recorded("run", "--resume", "--max_steps", "9"))
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, 10))
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0, 3, 6, 7, 9]
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
            raise StopRequested
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
def test_flags_given_again_win_and_are_logged(recorded, program, tmp_path):
    """config.json and metrics.jsonl have it. What does not fit the checkpoint's prompts is refused."""
    recorded("run", killed_after=3)
    assert program("--resume", "--lr", "0.02", "--max_steps", "4")[0] == 0
    configs = [r["config"] for r in Folder(tmp_path / "run").read("metrics.jsonl") if "config" in r]
    assert [(c["lr"], c["max_steps"]) for c in configs] == [(0.01, 7), (0.02, 4)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.02
    lrs = [r["lr"] for r in without_times(tmp_path / "run", "metrics.jsonl")]
    assert lrs == pytest.approx([0.01 * 1 / 5, 0.01 * 2 / 5, 0.02 * 3 / 5, 0.02 * 4 / 5])  # five steps of warm-up
    code, _, err = program("--resume", "--seed", "5")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*not among the prompts.*--seed.*\n", err)
    code, _, err = program("--resume", "--pass_rate_threshold", "0.8")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*Give --pass_rate_threshold as before.\n", err)


class Evil:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_does_not_serve_is_one_sentence(recorded, program, tmp_path):
    """A model of another width, zeros of the right size, and a file that would run code when it is unpickled, which
    does not run (without the weights-only loader it does: the test's own check)."""
    recorded("run", killed_after=3)
    checkpoint, state = Folder(tmp_path / "run").newest_checkpoint()
    mark, code = tmp_path / "mark", io.BytesIO()
    torch.save({"state": Evil(mark)}, code)
    optimizer = checkpoint / "optimizer.bin"
    sentence = rf"train.py: --resume: {checkpoint} does not fit this model \(.*\)\.\n"
    other = small_model(tmp_path / "other", hidden_size=64)
    exit_code, _, err = program("--resume", "--model", other)
    assert exit_code == 2 and re.fullmatch(sentence, err)
    for content in (bytes(optimizer.stat().st_size), code.getvalue()):
        optimizer.write_bytes(content)
        state["files"]["optimizer.bin"] = len(content)
        (checkpoint / "state.json").write_text(json.dumps(signed(state)))
        exit_code, _, err = program("--resume")
        assert exit_code == 2 and re.fullmatch(sentence, err) and not mark.exists()
    torch.load(optimizer, weights_only=False)
    assert mark.exists()
    (checkpoint / "state.json").unlink()
    exit_code, _, err = program("--resume")
    assert (
        exit_code == 2 and "no complete checkpoint is there; start anew with --output_dir and --overwrite true." in err
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_runs_no_code(tmp_path):
    """FSDP2's shards hold what is no tensor as a pickle. torch's own reader runs it: the test's own check."""
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import patch_environment

    mark = tmp_path / "mark"
    dcp.save({"code": Evil(mark)}, checkpoint_id=tmp_path / "shards")
    loader = SimpleNamespace(load_state=lambda path: dcp.load({"code": None}, no_dist=True, checkpoint_id=path))
    with pytest.raises(UsageError, match="does not fit this model"):
        load_tensors(loader, tmp_path / "shards")
    assert not mark.exists()
    with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="0"):
        loader.load_state(tmp_path / "shards")
    assert mark.exists()


@pytest.mark.long
def test_a_full_disk_costs_no_checkpoint(program, whole, tmp_path):
    """A disk of 300 kB holds the first checkpoint and not the second; once there is room the resumed run goes on."""
    with small_disk(tmp_path / "run", "300k") as remount:
        code, _, err = program()
        assert code == 1 and err.count("\n") == 1
        assert re.match(f"train.py: cannot write {tmp_path}/run/[^:]+: .+; the newest checkpoint, .*step-000002", err)
        assert [path.name for path in Folder(tmp_path / "run").checkpoints()] == ["step-000002"]
        remount("size=16m")
        assert program("--resume")[0] == 0
        assert_same_logs(tmp_path / "run", whole[0])


@pytest.mark.parametrize("full", [(28, "No space left on device"), None])
def test_what_one_rank_cannot_write_is_raised_on_all(monkeypatch, tmp_path, full):
    """The disk of this rank is full, or that of another one; whoever raised alone would leave the others waiting."""

    def save_state(path):
        if full:
            raise OSError(*full)

    def gather(mine):
        assert [bool(error) for error in mine] == [bool(full)]
        return [*mine, None if full else RunFailed("cannot write there: No space left on device")]

    monkeypatch.setattr("accelerate.utils.gather_object", gather)
    accelerator = SimpleNamespace(save_state=save_state)
    ranks = SimpleNamespace(main=True, from_main=lambda make: make(), accelerator=accelerator)
    with pytest.raises(RunFailed, match="cannot write .*: .*No space left"):
        save_tensors(ranks, Folder(tmp_path))


def test_no_text_becomes_code():
    """No eval, exec, shell or unpickling; torch.load only with weights_only; code that comes with a model only on
    --trust_remote_code."""
    sources = [file for folder in (".", "runtime", "tasks", "tools") for file in (ROOT / folder).glob("*.py")]
    picklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for file, node in ((f, node) for f in sources for node in ast.walk(ast.parse(f.read_text()))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & picklers
        if isinstance(node, ast.ImportFrom) and node.module in picklers:
            assert {alias.name for alias in node.names} == {"UnpicklingError"}
        if isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert name not in ("eval", "exec", "os.system") and "shell" not in options, file
            assert not name.endswith("torch.load") or options.get("weights_only") == "True"
            assert "trust_remote_code" not in options or options["trust_remote_code"] == "flags.trust_remote_code"


@pytest.mark.long
def test_a_run_of_no_steps_evaluates(program, tmp_path):
    """After a kill it evaluates the newest checkpoint, and a longer run goes on."""
    code, out, err = program("--max_steps", "0")
    assert (code, err) == (0, "") and "no fit: " in out
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0]
    assert not without_times(tmp_path / "run", "metrics.jsonl")
    assert program("--resume", "--max_steps", "2")[0] == 0
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2]


def test_all_prompts_retired_is_a_success(program, tmp_path):
    """Every rollout is right: all 12 prompts are retired once each was seen."""

    def take(self, count):
        try:
            groups = Replay.take(self, count)
        except StopIteration:  # the real generator's word for it: test_pipeline_rl.py
            raise Exhausted("no prompt is left to admit; 0 groups stay untrained") from None
        for answer in [answer for group in groups for answer in group.rollouts]:
            answer.reward, answer.correct = 1.0, True
        return groups

    code, out, err = program(script={"take": take})
    assert code == 0 and err == ""
    assert "0 groups stay untrained; 12 of 12 prompts are retired. The run ends." in out
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3, 4]
    assert "Warning: 3 steps in a row had no rollout left to train on" in out
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0, 3, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("mistake", [f"--model {Path(__file__).parent}", "--held_out 3000000", "--max_budget 300"])
def test_a_mistake_beside_overwrite_keeps_the_old_run(program, tmp_path, mistake):
    """What is seen only when the task, the model or its context is loaded."""
    program("--max_steps", "1")
    before = sorted((tmp_path / "run").rglob("*"))
    code, _, err = program("--overwrite", "true", *mistake.split())
    assert code == 2 and mistake.split()[0] in err and sorted((tmp_path / "run").rglob("*")) == before


def test_a_run_that_ended_while_this_one_started_is_not_overwritten(monkeypatch, program, tmp_path):
    """The flags were checked when the folder was empty; it is looked at again under the lock."""
    lock = Folder.lock

    def late(self):
        lock(self)
        self.append("metrics.jsonl", {"config": {}})

    monkeypatch.setattr(Folder, "lock", late)
    code, _, err = program()
    assert code == 2 and "holds a run; give another folder, or --resume" in err
    assert Folder(tmp_path / "run").read("metrics.jsonl") == [{"config": {}}]


@pytest.mark.parametrize("name", ["file/run", "n" * 300, "loop/run", "a\0b"])
def test_a_folder_that_cannot_be_made_is_one_sentence(program, tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = program(folder=tmp_path / name)
    # The middle of a sentence of more than 800 characters is left out.
    assert code == 2 and re.fullmatch(r"train.py: --output_dir .*\); choose another.\n", err)


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
