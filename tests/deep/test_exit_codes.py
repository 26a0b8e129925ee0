"""runtime/run.py: what ends a run early, its exit code, and what is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded import Replay, assert_same_logs

import fit_sigmoid
import runtime.parts
import runtime.run
import train
from generator import EngineDied, GeneratorFailed, StopRequested
from runtime.flags import Flags, UsageError
from runtime.folder import Folder, Progress, check_folder
from runtime.ranks import Ranks, report_fault
from runtime.trainer import Trainer
from tasks import arithmetic
from tasks.judges import RewardError
from tasks.prompts import PromptStream
from torch_engine import TorchEngine

SCRIPT = Path(__file__).with_name("as_on_windows.py")


SMALL = (
    "--max_steps 3 --batch_prompts 3 --rollouts 4 --k 1 --held_out 4 --max_num_seqs 16 --save_every 2 --eval_every 3"
)


def dead_take(self, count):
    if self.step == 3:
        raise EngineDied("the generator failed: EngineDied: it died")
    return Replay.take(self, count)


def dead_push(self, tensors, version, release):
    if version == 4:
        raise EngineDied("the generator failed: EngineDied: it died")
    Replay.push(self, tensors, version, release)


@pytest.mark.long
@pytest.mark.parametrize(("script", "step"), [({"take": dead_take}, 3), ({"push": dead_push}, 4)])
def test_a_dead_engine_leaves_a_checkpoint_and_exit_code_75(program, whole, tmp_path, script, step):
    """It dies while step 4 waits for groups: the checkpoint of step 3 lists what was in flight. Or the push of version 3
    fails, of which the trainer hears when it pushes version 4: that step is logged. `--resume` goes on, as if the run
    had never stopped."""
    code, _, err = program(script=script)
    assert code == 75 and err.startswith("train.py: the generator failed: EngineDied: it died; checkpoint")
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == step
    assert program("--resume")[0] == 0
    assert_same_logs(tmp_path / "run", whole[0])


def test_a_stop_request_wins_over_a_dead_engine(program, tmp_path):
    """A signal that came at the same time, to the whole process group, is what ends the run."""

    def take(self, count):
        if self.step == 3:
            self.progress.stop_signal = 15
            raise GeneratorFailed("the generator failed: EngineDied: it died")
        return Replay.take(self, count)

    code, _, err = program(script={"take": take})
    assert code == 143 and "it died; checkpoint" in err
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 3


RAISED = [  # where in the generator's thread, at which call, what, the exit code and the message
    (
        TorchEngine,
        "_step",
        60,
        EngineDied("no\nmore"),
        75,
        "the generator failed: EngineDied: no; checkpoint",
    ),
    (PromptStream, "__next__", 30, OSError(), 1, "the generator failed: OSError: ; checkpoint"),
    (arithmetic.ChainTask, "score", 12, RewardError("`reward` f raised:\nx"), 1, "--reward f raised:\nx; checkpoint"),
    (TorchEngine, "update", 1, TypeError("odd"), 2, "--model built in: the generator failed: TypeError: odd."),
]


@pytest.mark.parametrize(("place", "method", "call", "error", "code", "message"), RAISED)
def test_whatever_the_generators_thread_raises_ends_the_process_and_not_the_run(
    monkeypatch, tmp_path, model, capsys, place, method, call, error, code, message
):
    """The real generator over the torch engine; the n-th call of the method raises, and all after it. Exit code 75 says
    that a resume may go on, as it does here; an error of the user's own reward would come again. If the engine does not
    start (call 1), there is nothing to save."""
    original, calls = getattr(place, method), []

    def broken(self, *args):
        calls.append(1)
        if len(calls) >= call:
            raise error
        return original(self, *args)

    words = "--engine torch --save_every 50 --max_steps 99 --batch_prompts 3 --rollouts 4 --k 1 --held_out 4"
    words += " --zero_variance keep --max_num_seqs 16 --min_budget 3 --max_budget 4 --answer_budget 3"
    monkeypatch.setattr(runtime.run.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(runtime.parts, "first_model", lambda flags, ranks, task: model)
    monkeypatch.setattr(fit_sigmoid, "plot_fits", lambda fits, x, path: path.touch())
    with monkeypatch.context() as patch:
        patch.setattr(place, method, broken)
        assert train.main([*words.split(), "--output_dir", f"{tmp_path}/run"]) == code
    assert f"train.py: {message}" in "".join(capsys.readouterr())
    if call > 1:
        steps = [record for record in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in record]
        assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == len(steps)
        assert train.main(["--resume", f"{tmp_path}/run", "--max_steps", str(len(steps) + 1)]) == 0


def test_a_run_that_cannot_be_trusted_ends_with_one_sentence(monkeypatch, program, tmp_path):
    """Exit code 1, the reason and the newest checkpoint, no traceback and no new checkpoint. Bad gradients begin at
    step 2: step 4 is saved, with the weights of step 2."""
    update = Trainer.update

    def spoilt(trainer, version):
        if version >= 2:
            next(trainer.policy.parameters()).grad.view(-1)[0] = float("nan")
        return update(trainer, version)

    monkeypatch.setattr(Trainer, "update", spoilt)
    code, _, err = program()
    newest = f"{tmp_path}/run/checkpoints/step-000004"
    assert (
        code == 1 and err.startswith("train.py: the gradient was not finite 3 times in a row") and err.count("\n") == 1
    )
    assert f"possibly written after the failure, is {newest}: --resume {tmp_path}/run" in err
    assert str(Folder(tmp_path / "run").newest_checkpoint()[0]) == newest


def test_weights_that_are_not_finite_are_not_saved(monkeypatch, program, tmp_path):
    """The weights of step 3 are NaN, and then the engine dies: the good checkpoint of step 2 stays and is named."""
    update = Trainer.update

    def spoilt(trainer, version):
        result = update(trainer, version)
        if version == 2:
            next(trainer.model.parameters()).data.view(-1)[0] = float("nan")
        return result

    def take(self, count):
        if self.step == 3:
            raise GeneratorFailed("the generator failed: RuntimeError: a log-prob that is not finite")
        return Replay.take(self, count)

    monkeypatch.setattr(Trainer, "update", spoilt)
    code, _, err = program(script={"take": take})
    [checkpoint] = Folder(tmp_path / "run").checkpoints()
    assert code == 1 and checkpoint.name == "step-000002"
    assert err.startswith("train.py: the weights are not finite, so they are not saved; ")
    assert str(checkpoint) in err and err.count("\n") == 1


def test_a_stop_while_the_engine_starts_writes_nothing(program, tmp_path):
    """Before the engine is up and just after: exit code 143, and the same command may be given again."""

    def killed(self, weights, version=0):  # a signal to the whole group ends the engine, too
        self.progress.stop_signal = 15
        raise StopRequested

    def start(self, weights, version=0):
        self.progress.stop_signal = 15

    for method in (killed, start):
        code, out, err = program(script={"start": method})
        assert (code, err) == (143, "") and "stopped by signal 15 before the first step; nothing is written" in out
        assert not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_stops_the_run_unless_it_is_ignored(monkeypatch, ignored):
    """As it is under nohup."""
    handlers, progress = {}, Progress(None)
    monkeypatch.setattr(runtime.run.signal, "getsignal", lambda _: signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(runtime.run.signal, "signal", handlers.__setitem__)
    runtime.run.catch_signals(progress)
    numbers = {signal.SIGINT, signal.SIGTERM}
    assert handlers.keys() == (numbers if ignored else numbers | {signal.SIGHUP})
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert progress.stop_signal == 15


@pytest.mark.parametrize(("encoding", "closed"), [("ascii", False), ("utf-8", True)])
def test_a_terminal_that_cannot_show_a_line_does_not_end_the_run(tmp_path, encoding, closed):
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
            runtime.run.checked_flags = refuse
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
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, cwd=SCRIPT.parents[2])
    assert process.stdout.readline() == b"1\n"
    process.kill()
    process.wait()
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    check_folder(Flags(output_dir=str(tmp_path)))
    Folder(tmp_path).lock()


@pytest.mark.medium
def test_three_steps_and_a_resume_as_on_windows(tmp_path, model):
    """Without fcntl, resource, SIGHUP, user ids and vLLM; no folder can be opened; text is ASCII unless a file says
    otherwise."""
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    run = tmp_path / "run"
    for flags in (
        f"--output_dir {run} --model {model} --zero_variance keep {SMALL}",
        f"--resume {run} --max_steps 4",
    ):
        command = [sys.executable, str(SCRIPT), *flags.split()]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
        assert result.returncode == 0, result.stderr
    assert "resumed from" in result.stdout and (run / "model" / "config.json").exists()
    assert not (run / "lock").exists()
