"""A run from its command line to its end: who writes which file, checkpoints, signals, exit codes.

    file             written by                              when, and what
    config.json      Recorder.open (recorder.py)             at the start and at each resume: the version, every flag
    metrics.jsonl    Recorder.open, Recorder.write_step      the flags; then a record for each step
    eval.jsonl       Evaluator (evaluation.py)               a record for each evaluation
    samples.jsonl    Recorder.write_samples                  after each round: two rollouts of each of two groups
    checkpoints/     save                                    every `save_every` steps, at a stop, at the end
    recorded/        record_if_due (step_file.py)            with --record_every: steps that lab/replay.py reads
    model/           save_model                              at the end: Hugging Face format; run.json has its step
    curve.png        evaluation.law                          at the end: Eq. 1 on the run's own evaluations
    lock             Folder.lock (folder.py)                 while a process has the folder

A checkpoint, `step-000030`, holds the model, the optimizer and the random states (accelerate writes them, one file per
rank or shard) and `state.json`: step, version, the pass-rate history, the place in the stream of prompts, compute so
far, and how long the logs were. Nothing that was sampled is saved. The prompts of groups in flight are listed instead,
and a resumed run samples them again before all others, in their old order. These begin anew at a resume: the counts of
bad and of empty steps in a row, and the random state of the thinking budgets.

Resume only folders of your own. Loading a checkpoint runs no code that its tensors may contain, and flags that can run
code must be given again.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from runtime.before_torch import checked_flags
from runtime.engine_flags import choose_engine
from runtime.evaluation import law
from runtime.flags import UsageError, with_flag_names
from runtime.folder import Folder, Progress, Record, RunFailed, remove, swap, writing
from runtime.generator import EngineDied, EngineFailed, GeneratorFailed, StopRequested
from runtime.model import UNREADABLE
from runtime.parts import Run
from runtime.ranks import Ranks, report_fault
from runtime.step_file import recording_note
from runtime.weights import full_tensors
from tasks.judges import RewardError

DEAD_ENGINE = 75  # exit code after an engine failure, "temporary failure" in sysexits.h: --resume continues


def run_program(loop: Callable[[Run], None], argv: Sequence[str], description: str) -> int:
    """Makes a run from its flags, lets `loop` train it, and ends it. Returns the exit code.

    0: success. 1: failure. 2: a flag that cannot work. 75: a dead engine. 128 + the signal that stopped it: 129 after
    SIGHUP, 130 after Ctrl-C, 143 after SIGTERM. (A launcher of several processes has exit codes of its own.)"""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="replace")  # a terminal may have ASCII only
    try:
        flags, messages = checked_flags(argv, description)
        messages += choose_engine(flags)
        if flags.pretrained:
            messages.append(f"--lr {flags.lr:g} (the paper's 8B: 5e-7; `make -C lab real`, 135M: 1e-5)")
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(messages))
        return from_start_to_end(Run(flags), loop)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)  # on every rank: it may be the only one that failed
        return 2


def from_start_to_end(run: Run, loop: Callable[[Run], None]) -> int:
    """Starts, trains, ends and closes a run; returns the exit code."""
    try:
        return train_and_end(run, loop)
    except RunFailed as error:
        report_fault(f"{error}; {where_to_go_on(run.folder)}")
        return 1
    finally:
        run.close()


def train_and_end(run: Run, loop: Callable[[Run], None]) -> int:
    """The run itself, and a checkpoint where it is stopped or its engine dies; returns the exit code."""
    progress = run.progress
    catch_signals(progress)
    try:
        start(run)
    except StopRequested:
        run.ranks.say(f"stopped by signal {progress.stop_signal} before the first step; nothing is written")
        return 128 + progress.stop_signal
    try:
        loop(run)
        end(run)
        return 0
    except StopRequested:
        run.ranks.say(save_and_say(run, f"stopped by signal {progress.stop_signal} after step {progress.step}"))
        return 128 + (progress.stop_signal or signal.SIGTERM)
    except GeneratorFailed as error:
        return generator_failed(run, error)


# -------------------------------------------------------------------------------------------------- what ends it early


def catch_signals(progress: Progress) -> None:
    """From now on, Ctrl-C, SIGTERM and the end of the terminal stop the run."""
    numbers, hangup = [signal.SIGINT, signal.SIGTERM], getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # ignored under nohup
        numbers.append(hangup)
    for number in numbers:
        signal.signal(number, lambda number, frame: stop(progress, number))


def stop(progress: Progress, number: int) -> None:
    """Signal handler: the loop ends at its next wait (under `ppo_off_policy` after k steps), with a checkpoint. The
    second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    progress.stop_signal = number


def generator_failed(run: Run, error: GeneratorFailed) -> int:
    """The trainer's weights are unaffected, so they are saved. Returns the exit code: DEAD_ENGINE, or 1 for what
    would happen again, as when the user's own reward function raised; a signal that came meanwhile wins."""
    message = str(error).splitlines()[0]
    if isinstance(error.__cause__, RewardError):
        message = with_flag_names(str(error.__cause__))  # with the traceback of the function
    report_fault(save_and_say(run, message))
    if run.progress.stop_signal:
        return 128 + run.progress.stop_signal
    return DEAD_ENGINE if isinstance(error, EngineDied) else 1


def save_and_say(run: Run, reason: str) -> str:
    """Saves a checkpoint; returns one line that says why the run ends and how to continue."""
    checkpoint = save(run)
    return f"{reason}; checkpoint {checkpoint}; continue with --resume {run.folder.path}"


def where_to_go_on(folder: Folder) -> str:
    """The newest checkpoint of a run that failed, in words."""
    if (newest := folder.newest_checkpoint()) is None:
        return "there is no checkpoint"
    return f"the newest checkpoint, possibly written after the failure, is {newest[0]}: --resume {folder.path}"


# ------------------------------------------------------------------------------------------------------ start and end


def start(run: Run) -> None:
    """Starts the engine with the trainer's weights, then the clock and the logs. Only when the engine is up are files
    changed: until then a flag may turn out not to work. Raises UsageError, or StopRequested."""
    logs = resume(run) if run.flags.resume else None
    try:
        run.generator.start(run.trainer.weights, run.progress.version)
    except EngineFailed as error:
        raise UsageError(f"--model {run.flags.model or 'built in'}: {error}.") from error
    if run.ranks.from_main(lambda: run.progress.stop_signal):
        raise StopRequested
    if run.ranks.main:
        if logs is not None:
            run.folder.cut_back(logs)
        elif run.flags.overwrite:
            run.folder.clear()
    run.recorder.start_clock(run.trainer.parameters_in_flops, run.devices, run.progress.compute)
    run.recorder.open(run.progress.step)
    if run.flags.record_every:
        run.ranks.say(recording_note(run))


def end(run: Run) -> None:
    """The last evaluation, a checkpoint from which a longer run may go on, the final model, and the sigmoid fitted to
    this run."""
    flags, progress, evaluator = run.flags, run.progress, run.evaluator
    evaluator.wait(progress)
    if progress.evaluated != progress.step:
        evaluator.begin_evaluation(progress)
        check = evaluator.wait(progress)
        run.ranks.say(f"weights check of the last evaluation: {check['logprob_gap']:.1e} nats per token")
    if flags.save_every or flags.resume:  # otherwise the next --resume would start from the older checkpoint
        save(run)
    check_weights(run)
    save_model(run)
    if run.ranks.main:
        run.ranks.say(f"{law(run.folder, run.recorder.device)}\n{run.recorder.table()}")


def save_model(run: Run) -> None:
    """The final model in Hugging Face format, in float32; an earlier one stays until this one takes its place. A
    collective."""
    tensors = full_tensors(run.trainer.model, torch.float32)
    state = {name: tensor.cpu() for name, tensor in tensors if run.ranks.main}  # gathered on every rank
    if not run.ranks.main:
        return
    progress, path = run.progress, run.folder.path
    record = {"step": progress.step, "version": progress.version, "compute": run.recorder.clock.now()}
    with writing(path / "model"):
        new = path / "model.new"
        remove(new)
        new.mkdir()
        run.trainer.model.save_pretrained(new, state_dict=state)
        run.task.tokenizer.save_pretrained(new)
        (new / "run.json").write_text(json.dumps(record))
        swap(new, path / "model")


# ------------------------------------------------------------------------------------------------- saving and going on


def save_if_due(run: Run, before: int) -> None:
    """A checkpoint if a multiple of `save_every` was crossed since the step `before`. The last one is the end's."""
    step, every = run.progress.step, run.flags.save_every
    if every and step // every > before // every and step < run.flags.max_steps:
        save(run)


def save(run: Run) -> Path | None:
    """Writes a checkpoint; on every rank, since a sharded model is written by all. Returns its folder, None on ranks
    other than 0. Raises RunFailed for weights that are not finite, which would take the place of good ones."""
    check_weights(run)
    temporary = save_tensors(run.ranks, run.folder)
    if not run.ranks.main:
        return None
    state = state_of(run)
    with writing(run.folder.path / "checkpoints"):
        return run.folder.finish_checkpoint(temporary, run.progress.step, state)


def check_weights(run: Run) -> None:
    """Raises RunFailed for weights that are not finite."""
    if not run.trainer.weights_are_finite():
        raise RunFailed("the weights are not finite, so they are not saved")


def save_tensors(ranks: Ranks, folder: Folder) -> Path:
    """Model, optimizer and random states, in a new unfinished checkpoint. What one rank could not write is raised on
    all of them."""
    from accelerate.utils import gather_object

    failure = None
    temporary = Path()
    try:
        with writing(folder.path / "checkpoints"):
            temporary = Path(ranks.from_main(lambda: str(folder.begin_checkpoint())))
            ranks.accelerator.save_state(temporary)
    except RunFailed as error:
        failure = error
    for error in gather_object([failure]):
        if error is not None:
            raise error
    return temporary


def state_of(run: Run) -> Record:
    """What state.json says of a run. Read between two events of the generator's thread, which draws from the
    prompts."""
    generator, clock = run.generator.on_main, run.recorder.clock
    flying, stream = generator.in_loop(lambda thread: (list(thread.under_way.values()), run.prompts.state_dict()))
    in_flight = [*(group.problem for group in run.progress.taken), *flying]
    stream["first"] = [problem.key for problem in in_flight] + stream["first"]
    compute = clock.now() | {"hours": clock.hours()}
    state = {"history": run.history.state_dict(), "prompts": stream, "compute": compute}
    return run.progress.state_dict() | state | {"mismatch": run.recorder.mismatch}


def resume(run: Run) -> Record:
    """Loads the newest complete checkpoint. Returns how long the logs were then; what they gained after it is taken off
    once the engine is up. Raises UsageError, and then has changed no file."""
    newest = run.folder.newest_checkpoint()
    if newest is None:
        raise UsageError(
            f"--resume {run.folder.path}: no complete checkpoint is there; start anew with --output_dir and "
            "--overwrite true."
        )
    checkpoint, state = newest
    load_tensors(run.ranks.accelerator, checkpoint)
    load_state(run, checkpoint, state)
    run.folder.check_logs(state["logs"])
    run.ranks.say(f"resumed from {checkpoint}; {len(run.prompts.first)} prompts that were in flight come first")
    step, last = run.progress.step, run.flags.max_steps
    if step >= last:
        run.ranks.say(f"nothing is trained: the run is at step {step}, --max_steps is {last}; give a larger one")
    return state["logs"]


def load_tensors(accelerator: Any, checkpoint: Path) -> None:
    """Model, optimizer and random states of a checkpoint, on every rank. Raises UsageError for one of another model.
    Every `torch.load` in it loads weights only, also where its caller asks for more, as FSDP2's does."""
    from accelerate.utils import patch_environment

    try:
        with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
            accelerator.load_state(str(checkpoint))
    except UNREADABLE as error:
        reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
        raise UsageError(f"--resume: {checkpoint} does not fit this model ({reason}).") from error


def load_state(run: Run, checkpoint: Path, state: Record) -> None:
    """Takes over `state`, a checkpoint's state.json. Raises UsageError if the prompts or the threshold are others."""
    history = state["history"]
    used = {*state["prompts"]["first"], *(key for key, _, _ in history["counts"]), *history["retired"]}
    if not used <= {problem.key for problem in run.task.train}:
        raise UsageError(
            f"--resume: prompts of {checkpoint} are not among the prompts of this data set; give --dataset and --seed "
            "as before, and no --eval_dataset that has prompts of it."
        )
    if (before := history["threshold"]) != run.flags.pass_rate_threshold:
        raise UsageError(
            f"--resume: {checkpoint} has retired prompts at {before}. Give --pass_rate_threshold as before."
        )
    run.history.load_state_dict(history)
    run.prompts.load_state_dict(state["prompts"])
    run.progress.load_state_dict(state)
    run.progress.compute = dict(state["compute"])
    run.recorder.mismatch = state["mismatch"]
