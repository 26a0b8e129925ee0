"""runtime/run.py and folder.py: what ends a run, with which exit code, what lies in its folder then, and how it goes on.

`FAULTS` has a row for each. Runs are on recorded rollouts (recorded.py), so that a resumed run can be compared, bit for
bit, with one that nothing stopped. Kills of the real job: engine/test_kills.py. Faults of the generator alone:
test_generator_faults.py.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from filelock import FileLock
from recorded import Program, Replay, assert_same_run, assert_same_weights, state_of, steps_of
from scripted import small_model

import runtime.parts
import runtime.run
import train
from generator import EngineDied, EngineFailed, Exhausted, Generator, GeneratorFailed, StopRequested
from runtime.flags import Flags, UsageError
from runtime.folder import Folder, Progress, check_folder
from runtime.ranks import Ranks, report_fault
from runtime.trainer import Trainer
from tasks import arithmetic
from tasks.judges import RewardError
from tasks.prompts import PromptStream
from torch_engine import TorchEngine

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


class Killed(BaseException):
    """As SIGKILL: nothing is saved on its way out."""


def breaks(monkeypatch, owner: type, method: str, call: int, effect: Any) -> None:
    """From its `call`-th call on, `effect` comes before the method: an error that is raised, or a function of `self`."""
    original, calls = getattr(owner, method), []

    def broken(self, *args, **options):
        calls.append(1)
        if len(calls) >= call:
            if isinstance(effect, BaseException):
                raise effect
            effect(self)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, method, broken)


def stopped_by_a_signal(generator):
    """It reaches the whole process group, so the engine may die of it, too."""
    generator.progress.stop_signal = 15
    raise DIED


def has_bad_gradients(trainer):
    next(trainer.policy.parameters()).grad.view(-1)[0] = float("nan")


def fails_with_bad_weights(generator):
    next(generator.trainer.model.parameters()).data.view(-1)[0] = float("nan")
    raise GeneratorFailed("the generator failed: RuntimeError: a log-prob that is not finite")


class Fault(NamedTuple):
    owner: type  # what breaks
    method: str
    call: int  # and when: at this call of the method, and at all after it
    effect: Any  # what it raises, or does
    code: int | None  # the exit code; None: killed
    words: str  # of the one line on stderr
    checkpoint: int  # the step of the newest one
    steps: int  # that the log has
    flags: str = ""
    resumes: bool = True  # and its end is that of a run that nothing stopped


DIED = EngineDied("the generator failed: EngineDied: it died")
ON = "checkpoint .*/step-00000{}; continue with --resume .*/run"
PHASES = "--schedule ppo_off_policy --k 2 --max_steps 8 --pass_rate_threshold 2"
REFILLED = "--zero_variance replace --pass_rate_threshold 2"
FAULTS = {
    "the engine dies while step 4 waits": Fault(
        Replay, "take", 4, DIED, 75, "the generator failed: EngineDied: it died after step 3; " + ON.format(3), 3, 3
    ),
    "a push fails, of which the trainer hears at the next one": Fault(
        Replay, "push", 4, DIED, 75, "the generator failed: EngineDied: it died after step 4; " + ON.format(4), 4, 4
    ),
    "a signal wins over a dead engine": Fault(
        Replay, "take", 4, stopped_by_a_signal, 143, ".* it died after step 3; " + ON.format(3), 3, 3
    ),
    # Its batch was taken and not trained: its prompts come first after the resume, in their old order, and once.
    "a signal while step 4 waits for an evaluation": Fault(
        Replay, "result_of", 4, StopRequested(), 143, "stopped by signal 0 after step 3; " + ON.format(3), 3, 3
    ),
    "killed behind a checkpoint": Fault(Replay, "take", 6, Killed(), None, "", 4, 5),
    "killed after a save": Fault(Replay, "take", 3, Killed(), None, "", 2, 2),
    "killed in a save": Fault(Accelerator, "save_state", 2, Killed(), None, "", 2, 4),
    "killed in an evaluation": Fault(Replay, "result_of", 4, Killed(), None, "", 2, 3),
    "killed at a checkpoint where an evaluation began": Fault(Replay, "take", 7, Killed(), None, "", 6, 6),
    "killed while that of step 0 waits, since step 1 made no update": Fault(
        Replay, "take", 2, Killed(), None, "", 1, 1, "--batch_prompts 1 --rollouts 2 --save_every 1"
    ),
    "killed in a phase of two updates": Fault(Replay, "take", 3, Killed(), None, "", 4, 4, PHASES),
    "killed in the middle of dynamic sampling": Fault(Replay, "take", 15, Killed(), None, "", 4, 4, REFILLED),
    # Bad gradients begin at step 3; step 4 is saved, with the weights of step 2.
    "gradients that are not finite": Fault(
        Trainer, "update", 3, has_bad_gradients, 1,
        "the gradient was not finite 3 times in a row .*; the newest checkpoint is .*/step-000004", 4, 4, resumes=False,
    ),
    "no room for the record of step 3": Fault(
        Folder, "append", 13, OSError(28, "No space left"), 1,
        r"\[Errno 28\] No space left; the newest checkpoint is .*/step-000002", 2, 2,
    ),
    "weights that are not finite": Fault(
        Replay, "take", 4, fails_with_bad_weights, 1,
        r"the weights are not finite, so they are not saved \(a lower --lr may help\); the newest checkpoint is .*/step-000002", 2, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_resumed_run_is_bit_equal(monkeypatch, program, whole, tmp_path, name):
    """Weights, Adam's moments, curriculum, place in the stream of prompts and logs."""
    fault, run = FAULTS[name], tmp_path / "run"
    with monkeypatch.context() as patch:
        breaks(patch, fault.owner, fault.method, fault.call, fault.effect)
        if fault.code is None:
            with pytest.raises(Killed):
                program(fault.flags)
        else:
            code, _, err = program(fault.flags)
            assert code == fault.code and re.fullmatch(f"train.py: {fault.words}\n", err), err
    assert (state_of(run)["progress"]["step"], len(steps_of(run))) == (fault.checkpoint, fault.steps)
    if fault.resumes:
        assert program("--resume") == (0, ANY_TEXT, "")
        assert_same_run(run, whole(fault.flags))


class AnyText:
    def __eq__(self, other):
        return isinstance(other, str)


ANY_TEXT = AnyText()


# ------------------------------------------------------------------------------------ what is refused beside an old run


class Evil:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pickled(path) -> bytes:
    content = io.BytesIO()
    torch.save({"state": Evil(path)}, content)
    return content.getvalue()


@contextmanager
def nothing_changes(folder: Path):
    """Not a byte."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--resume", "--model .*: no memory"),  # the engine does not start
        ("--overwrite true", "--model .*: no memory"),
        (f"--overwrite true --model {Path(__file__).parent}", "--model .* does not load as a causal LM"),
        ("--overwrite true --held_out 3000000", "--held_out 3000000: there are at most 100,000 problems"),
        (
            "--overwrite true --engine torch --max_budget 9999999999999",
            "--engine torch, --max_num_seqs 256 of .*Runtime",
        ),
        ("--overwrite true --loss losses:nowhere", "--loss losses:nowhere: AttributeError"),
        ("--resume --seed 5", "--resume: .* does not fit this run .*give --model, --dataset, --seed"),
        ("--resume --pass_rate_threshold 0.8", "--resume: .*and --pass_rate_threshold as before"),
        ("--resume --model OTHER", "--resume: .* does not fit this run"),
    ],
)
def test_a_mistake_changes_no_file_of_an_old_run(monkeypatch, program, tmp_path, flags, words):
    """What is seen only when the task, the model, a checkpoint or the engine is loaded: exit code 2, one sentence."""
    program("--max_steps 2")
    breaks(monkeypatch, Replay, "start", 1, EngineFailed("no memory"))
    other = small_model(tmp_path / "other", hidden_size=64)
    with nothing_changes(tmp_path / "run"):
        code, _, err = program(flags.replace("OTHER", other))
    assert code == 2 and re.fullmatch(f"train.py: {words}.*\n", err), err


DAMAGES = {  # what becomes of a file's bytes
    "gone": lambda content, mark: None,
    "cut": lambda content, mark: content[: len(content) // 2],
    "zeros": lambda content, mark: bytes(len(content)),
    "code": lambda content, mark: pickled(mark),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_damaged_checkpoint_is_one_sentence_that_names_it(program, whole, tmp_path, name, damage):
    """Nothing is changed, and what would run as it is unpickled does not run. (torch's own reader runs it: the test's
    own check.)"""
    shutil.copytree(whole("--max_steps 2"), tmp_path / "run")
    checkpoint, mark = Folder(tmp_path / "run").newest_checkpoint(), tmp_path / "mark"
    content = DAMAGES[damage]((checkpoint / name).read_bytes(), mark)
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_bytes(content)
    with nothing_changes(tmp_path / "run"):
        code, _, err = program("--resume --max_steps 3")
    assert code == 2 and re.fullmatch(f"train.py: --resume: {checkpoint} does not .*remove this checkpoint.\n", err), (
        err
    )
    assert not mark.exists()
    if (damage, name) == ("code", "optimizer.bin"):
        torch.load(checkpoint / name, weights_only=False)
        assert mark.exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("logs",), None), (("logs", "eval.jsonl"), -1), (("compute", "tokens"), -1), (("progress", "step"), 1),
        (("progress", "version"), "x"), (("prompts", "position"), 10**9), (("history", "counts", 0, 1), "x"),
    ],
)  # fmt: skip
def test_an_edited_state_is_one_sentence(program, whole, tmp_path, path, value):
    shutil.copytree(whole("--max_steps 2"), tmp_path / "run")
    file = Folder(tmp_path / "run").newest_checkpoint() / "state.json"
    node = state = json.loads(file.read_text())
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file.write_text(json.dumps(state))
    with nothing_changes(tmp_path / "run"):
        code, _, err = program("--resume --max_steps 3")
    assert code == 2 and re.fullmatch(f"train.py: --resume: {file.parent} does not .*\n", err), err


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("kind", ["folder", "link to nothing"])
def test_a_log_that_cannot_be_written_is_one_sentence(program, whole, tmp_path, name, kind):
    shutil.copytree(whole("--max_steps 2"), tmp_path / "run")
    log = tmp_path / "run" / name
    log.unlink()
    log.mkdir() if kind == "folder" else log.symlink_to("nowhere/log")
    code, _, err = program("--resume --max_steps 3")
    assert code == 1 and re.fullmatch(rf"train.py: \[Errno \d+\] .*: '{log}'; the newest checkpoint is .*\n", err), err


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"{", b"garbage\n{", "JSONDecodeError"),  # a first line of it
        (b"\n", b"\n\n", "JSONDecodeError"),  # an empty line
        (b'"pass_rate"', b'"rate"', "KeyError: 'pass_rate'"),
    ],
)
def test_a_damaged_log_of_evaluations_costs_the_fit_only(program, whole, tmp_path, old, new, reason):
    shutil.copytree(whole("--max_steps 2"), tmp_path / "run")
    log = tmp_path / "run" / "eval.jsonl"
    log.write_bytes(log.read_bytes().replace(old, new, 1))
    code, out, err = program("--resume --max_steps 3")
    assert (code, err) == (0, "") and f"No law is fitted to {log}: {reason}" in out
    assert json.loads((tmp_path / "run" / "model" / "run.json").read_text())["step"] == 3


def test_killed_in_a_resume_the_run_can_be_resumed(monkeypatch, program, tmp_path):
    """While config.json, which comes first, is half written."""
    write_text = Path.write_text

    def half(path, text):
        write_text(path, text[: len(text) // 2])
        raise Killed

    program("--max_steps 2")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "write_text", half)
        program("--resume --max_steps 3")
    assert program("--resume --max_steps 3")[0] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_runs_no_code(tmp_path):
    """FSDP2's shards hold what is no tensor as a pickle."""
    import torch.distributed.checkpoint as dcp

    folder, mark = Folder(tmp_path), tmp_path / "mark"
    dcp.save({"code": Evil(mark)}, checkpoint_id=folder.checkpoint(1))
    loader = SimpleNamespace(load_state=lambda path: dcp.load({"code": None}, no_dist=True, checkpoint_id=path))
    with pytest.raises(UsageError, match="does not fit this run"):
        runtime.run.resume(SimpleNamespace(folder=folder, ranks=SimpleNamespace(accelerator=loader)))
    assert not mark.exists()
    with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="0"):
        loader.load_state(folder.checkpoint(1))
    assert mark.exists()


@pytest.mark.parametrize("started_late", [False, True])
def test_another_run_in_the_folder_is_left_alone(monkeypatch, program, tmp_path, started_late):
    """It goes on in there; or it ended after the flags were checked: then the folder is looked at again, under the lock."""
    folder, acquire, lock = Folder(tmp_path / "run"), FileLock.acquire, Folder.lock
    folder.path.mkdir()

    def another(run):
        lock(run)
        for name in ("metrics.jsonl", "config.json"):
            (run.path / name).touch()

    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: acquire(lock, timeout=0))
    if started_late:
        monkeypatch.setattr(Folder, "lock", another)
    else:
        another(folder)
    code, _, err = program("" if started_late else "--overwrite true")
    sentence = "it holds a run; give another folder" if started_late else "another run uses the folder"
    assert code == 2 and sentence in err and err.count("\n") == 1
    assert {path.name for path in folder.path.iterdir()} - {"lock"} == {"metrics.jsonl", "config.json"}


@pytest.mark.parametrize("name", ["file/run", "loop/run"])
def test_a_folder_that_cannot_be_made_is_one_sentence(program, tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = program(folder=tmp_path / name)
    assert code == 2 and re.fullmatch(r"train.py: --output_dir .*\); choose another.\n", err)


def test_a_cleared_folder_keeps_what_is_not_the_runs(tmp_path):
    """What lies behind a link, too. The second time nothing is left to remove."""
    folder, elsewhere = Folder(tmp_path / "run"), tmp_path / "elsewhere"
    for path in (folder.checkpoint(10), folder.path / "model", elsewhere):
        path.mkdir(parents=True)
    for path in (elsewhere / "mine", folder.path / "config.json", folder.path / "notes.txt"):
        path.touch()
    (folder.path / "eval.jsonl").symlink_to(elsewhere / "mine")
    (folder.path / "curve.png").symlink_to(elsewhere)
    for _ in range(2):
        folder.clear()
        assert [path.name for path in folder.path.iterdir()] == ["notes.txt"] and (elsewhere / "mine").exists()


# -------------------------------------------------------------------------------------------------- ends that are no fault


def test_a_run_of_no_steps_evaluates_and_a_longer_one_goes_on(program, tmp_path):
    code, out, err = program("--max_steps 0")
    assert (code, err) == (0, "") and "no fit: " in out
    assert [r["step"] for r in steps_of(tmp_path / "run", "eval.jsonl")] == [0] and not steps_of(tmp_path / "run")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert program("--resume --max_steps 2")[0] == 0
    assert [r["step"] for r in steps_of(tmp_path / "run")] == [1, 2]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]  # the caller's again
    code, out, _ = program("--resume --max_steps 1")
    assert code == 0 and "nothing is left to train: it is at step 2; give a larger --max_steps" in out


def test_a_finished_run_is_made_longer_and_loses_nothing(program, whole, tmp_path):
    """Seven steps, then two more: the weights are those of a run of nine, and the final evaluation of step 7 stays."""
    run = tmp_path / "run"
    shutil.copytree(whole(), run)
    assert program("--resume --max_steps 9")[0] == 0
    assert_same_weights(run, whole("--max_steps 9"))
    assert [r["step"] for r in steps_of(run)] == list(range(1, 10))
    assert [r["step"] for r in steps_of(run, "eval.jsonl")] == [0, 3, 6, 7, 9]
    assert json.loads((run / "model" / "run.json").read_text())["step"] == 9
    assert not list(run.glob("unfinished-*"))


def test_hours_and_flags_over_a_resume(program, whole, tmp_path):
    """Flags given again win, and both logs have them. A budget of the hours of steps 1 to 4 is reached before step 5."""
    run = tmp_path / "run"
    shutil.copytree(whole("--max_steps 2"), run)
    assert program("--resume --lr 0.02 --max_steps 4")[0] == 0
    configs = [r["config"] for r in Folder(run).read("metrics.jsonl") if "config" in r]
    assert [(c["lr"], c["max_steps"]) for c in configs] == [(0.01, 2), (0.02, 4)]
    assert json.loads((run / "config.json").read_text())["lr"] == 0.02
    lrs = [r["lr"] for r in steps_of(run)]
    assert lrs == pytest.approx([0.01 * 1 / 5, 0.01 * 2 / 5, 0.02 * 3 / 5, 0.02 * 4 / 5])  # five steps of warm-up
    hours = state_of(run)["compute"]["hours"]
    code, out, _ = program(f"--resume --max_steps 9 --max_hours {hours}")
    assert code == 0 and f"--max_hours {hours} reached" in out and len(steps_of(run)) == 4 and hours > 0


def test_all_prompts_retired_is_a_success(monkeypatch, program, tmp_path):
    """Every rollout is right: all 12 prompts are retired once each was seen."""
    take, run = Replay.take, tmp_path / "run"

    def all_right(self, count):
        try:
            groups = take(self, count)
        except StopIteration:  # the real generator's word for it: test_generator.py
            raise Exhausted("no prompt is left to admit; 0 groups stay untrained") from None
        for answer in [answer for group in groups for answer in group.rollouts]:
            answer.reward, answer.correct = 1.0, True
        return groups

    monkeypatch.setattr(Replay, "take", all_right)
    code, out, err = program()
    assert (code, err) == (0, "")
    assert "0 groups stay untrained; 12 of 12 prompts are retired. The run ends." in out
    assert [r["step"] for r in steps_of(run)] == [1, 2, 3, 4] and "Warning: 3 steps in a row had nothing" in out
    assert [r["step"] for r in steps_of(run, "eval.jsonl")] == [0, 3, 4]
    assert (run / "model" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------- the real generator, disks, terminals

THREAD = [  # what breaks in the generator's thread, at which call, what it raises | the exit code, words of the line
    (TorchEngine, "step", 60, EngineDied("no\nmore"), 75, "the generator failed: EngineDied: no after step"),
    (PromptStream, "__next__", 30, OSError(), 1, "the generator failed: OSError:  after step"),
    (arithmetic.ChainTask, "score", 12, RewardError("`reward` f raised:\nx"), 1, "--reward f raised:\nx after step"),
    (TorchEngine, "update", 1, TypeError("odd"), 2, "--model built in: the generator failed: TypeError: odd."),
    (Generator, "result_of", 1, StopRequested(), 143, "stopped by signal 0 after step 0; nothing is written"),
]


@pytest.mark.parametrize(("owner", "method", "call", "error", "code", "words"), THREAD)
def test_what_the_generators_thread_raises_ends_the_process_and_not_the_run(
    monkeypatch, tmp_path, model, owner, method, call, error, code, words
):
    """The real generator over the torch engine. The checkpoint is that of the last step in the log, and a resume goes on
    from it. If the engine does not start (call 1), there is nothing to save, and the same command may be given again."""
    monkeypatch.setattr(runtime.parts, "first_model", lambda flags, ranks, task: model)
    run, program = tmp_path / "run", Program(monkeypatch, tmp_path / "run", "")
    flags = "--engine torch --save_every 50 --max_steps 99 --k 1 --zero_variance keep --max_num_seqs 16"
    with monkeypatch.context() as patch:
        breaks(patch, owner, method, call, error)
        result = program(flags + " --min_budget 3 --max_budget 4 --answer_budget 3")
    assert result[0] == code and result[2].startswith(f"train.py: {words}"), result
    if call == 1:
        assert {path.name for path in run.iterdir()} <= {"lock"}
    else:
        steps = len(steps_of(run))
        assert state_of(run)["progress"]["step"] == steps > 0
        assert program(f"--resume --max_steps {steps + 1}")[0] == 0


@contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own in memory, mounted at `folder`; gives a function that mounts it again with options."""

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True)

    folder.mkdir()
    if mount(f"size={size}").returncode:
        pytest.skip("mounting a tmpfs is not permitted here: run this test as root")
    try:
        yield lambda options: mount(f"remount,{options}").check_returncode()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_no_checkpoint(program, whole, tmp_path):
    """A disk of 300 kB holds the first checkpoint and not the second; once there is room the resumed run goes on. One of
    60 kB holds none."""
    sentence = r"train.py: .*/step-00000{} cannot be written \(.*\); {}\n"
    with small_disk(tmp_path / "small", "60k"):
        code, _, err = program(folder=tmp_path / "small")
        assert code == 1 and re.fullmatch(sentence.format(2, "there is no checkpoint in .*/small"), err), err
    with small_disk(tmp_path / "run", "300k") as remount:
        code, _, err = program()
        assert code == 1 and re.fullmatch(sentence.format(4, "the newest checkpoint is .*/step-000002"), err), err
        assert state_of(tmp_path / "run")["progress"]["step"] == 2
        remount("size=16m")
        assert program("--resume")[0] == 0
        assert_same_run(tmp_path / "run", whole())


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_stops_the_run_unless_it_is_ignored(monkeypatch, ignored):
    """As it is under nohup."""
    handlers, progress = {}, Progress(None)
    monkeypatch.setattr(runtime.run.signal, "getsignal", lambda _: signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(runtime.run.signal, "signal", handlers.__setitem__)
    runtime.run.catch_signals(progress)
    assert handlers.keys() == (set() if ignored else {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    if not ignored:
        handlers[signal.SIGHUP](signal.SIGHUP, None)
        assert progress.stop_signal == signal.SIGHUP and handlers[signal.SIGHUP] == signal.SIG_DFL


@pytest.mark.parametrize(("encoding", "closed"), [("ascii", False), ("utf-8", True)])
def test_a_terminal_that_cannot_show_a_line_does_not_end_the_run(encoding, closed):
    """One of ASCII only, and one that is gone: what is printed is lost, and the exit code is the run's own."""

    def refuse(argv, description):
        ranks = Ranks(SimpleNamespace(is_main_process=True))
        for _ in range(3):
            ranks.say("waits · 1")
            report_fault("waits · 1")
        raise UsageError("7")

    reader, writer = os.pipe()
    if closed:
        os.close(reader)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 1), os.dup2(writer, 2)
            sys.stdout, sys.stderr = (open(number, "w", encoding=encoding, closefd=False) for number in (1, 2))
            runtime.run.parse_flags = refuse
            code = train.main([])
            sys.stdout.flush(), sys.stderr.flush()  # as at the end of an interpreter
            os._exit(code)
        finally:
            os._exit(70)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    if not closed:
        assert os.read(reader, 999).decode().count("waits ? 1") == 6
        os.close(reader)


def test_a_killed_process_holds_no_lock(tmp_path):
    """Its file stays, and hinders neither a new run nor the next holder."""
    script = "import sys, time; from runtime.folder import Folder; Folder(sys.argv[1]).lock(); print(1, flush=True); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"1\n"
    process.kill()
    process.wait()
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    check_folder(Flags(output_dir=str(tmp_path)))
    Folder(tmp_path).lock()


@pytest.mark.medium
def test_three_steps_and_a_resume_as_on_windows(tmp_path, model):
    """Without fcntl, resource, SIGHUP, user ids and vLLM; text is ASCII unless a file says otherwise."""
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    run = tmp_path / "run"
    flags = (
        f"--output_dir {run} --model {model} --zero_variance keep --max_steps 3 --batch_prompts 3 --rollouts 4 --k 1"
    )
    flags += f" --held_out 4 --max_num_seqs 16 --save_every 2 --eval_every 3 then --resume {run} --max_steps 4"
    command = [sys.executable, str(ROOT / "tests/deep/as_on_windows.py"), *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
    assert result.returncode == 0, result.stderr
    assert "resumed from" in result.stdout and (run / "model" / "config.json").exists()
