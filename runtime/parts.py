"""Makes the parts of a run from its flags. A flag that cannot work raises a UsageError that names it.

`new_parts` makes them on every rank, `start` starts the engine and opens the logs.
"""

import logging
import math
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import length_control
from filters import PassRateHistory
from runtime import run_folder
from runtime.engine import Placement, RunEngine, TorchEngine, devices_in_use, new_engine, place
from runtime.evaluation import Evaluator
from runtime.flag_checks import new_pacer
from runtime.flags import BUILT_IN, Flags, LengthFlags, UsageError, own_code, reason_of, with_flag_names
from runtime.generator import EngineFailed, Generator, StopRequested
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder
from runtime.run_folder import UNREADABLE, Folder, Progress
from runtime.trainer import Trainer
from tasks import data_sets, warm_start
from tasks.prompts import PromptStream, Task

CACHE = Path(__file__).parent.parent / "runs" / "cache"  # of warm-started models


@dataclass
class Parts:
    """What a run is made of, on one rank."""

    ranks: Ranks
    folder: Folder
    task: Task
    trainer: Trainer
    history: PassRateHistory
    prompts: PromptStream
    generator: SharedGenerator
    recorder: Recorder
    evaluator: Evaluator
    devices: int  # in use, of trainer and engine

    def close(self) -> None:
        """Ends the engine, the reward workers and the trackers, whatever happened."""
        self.generator.close()
        self.task.close()
        # DDP goes before the process group ends. Were its reducer the last to hold the group, it would wait for gloo's
        # threads with Python's lock in hand, and they may need that lock to free their last tensors.
        self.trainer.policy = None
        self.ranks.accelerator.free_memory()
        self.ranks.accelerator.end_training()
        self.folder.unlock()


def new_parts(flags: Flags, progress: Progress) -> Parts:
    """Everything but a running engine; with --resume, model and `progress` are those of the newest checkpoint. Raises
    UsageError."""
    placement = place(flags)
    ranks = Ranks(new_accelerator(flags))
    folder = Folder(flags.output_dir)
    task = load_task(flags, judge=ranks.main)  # before the folder is made, or emptied: it refuses most of what is wrong
    try:
        model_folder = first_model(flags, ranks, task)
        ranks.from_main(folder.lock)
        if ranks.main and flags.overwrite and not flags.resume:
            folder.clear()
        return parts_of(flags, placement, progress, ranks, folder, task, model_folder)
    except BaseException:  # nobody else would end the reward workers and unlock the folder
        task.close()
        folder.unlock()
        raise


def parts_of(
    flags: Flags, placement: Placement, progress: Progress, ranks: Ranks, folder: Folder, task: Task, model_folder: str
) -> Parts:  # fmt: skip
    """The parts of a run with this task and this model. Raises UsageError."""
    if isinstance(task, data_sets.DatasetTask):
        ranks.say(prompts_line(task))
    control = new_interruption(flags, task)  # on every rank, so that all end with the same sentence
    longest = longest_row(flags, task, control)
    trainer = Trainer(flags, ranks.accelerator, model_folder, longest)
    check_model(flags, trainer.model, task, longest)
    history = PassRateHistory(flags.pass_rate_threshold)
    prompts = PromptStream(task.train, flags.seed, history.retired)
    if flags.resume:
        resume(flags, ranks, folder, task, history, prompts, progress)
    if ranks.main:
        check_saving(trainer.model, task)
    rank = ranks.accelerator.process_index
    engine, channel = new_engine(flags, placement, rank, model_folder, task.stop_ids, longest)
    generator = None
    if engine is not None:
        generator = new_generator(flags, engine, task, prompts, control, progress)
    shared = SharedGenerator(generator, channel, ranks)
    recorder = Recorder(flags, ranks, folder, task, prompts, shared)
    evaluator = Evaluator(flags, ranks, task, trainer, shared, recorder)
    devices = devices_in_use(placement, ranks.count)
    return Parts(ranks, folder, task, trainer, history, prompts, shared, recorder, evaluator, devices)


def start(flags: Flags, parts: Parts, progress: Progress) -> None:
    """Starts the engine with the trainer's weights, then the clock and the logs. Raises UsageError, or StopRequested
    before anything is written."""
    trainer, recorder = parts.trainer, parts.recorder
    try:
        parts.generator.start(trainer.weights, progress.version)
    except EngineFailed as error:
        raise UsageError(f"--model {flags.model or 'built in'}: {error}.") from error
    if parts.ranks.from_main(lambda: progress.stop_signal):
        raise StopRequested
    recorder.start_clock(trainer.parameters_in_flops, parts.devices, progress.compute)
    recorder.open(progress.step)


# ------------------------------------------------------------------------------------------------------------- trainer


def new_accelerator(flags: Flags) -> Any:
    """accelerate's `Accelerator`: one process, or one of several under `torch.distributed.run`."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # "removed shared tensor" at every save
    torch.manual_seed(flags.seed)
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # it may be empty, or a list
    torch.set_num_threads(max(1, int(threads)) if threads.isdigit() else 1)  # torch's default takes the engine's cores
    # The other ranks block in a collective while rank 0 waits for rollouts, so the ten-minute timeout must go. gloo
    # carries Python objects without the GPU.
    group = InitProcessGroupKwargs(timeout=timedelta(days=7))
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:  # without it accelerate makes no process group
        group.backend = "cpu:gloo,cuda:nccl"
    return Accelerator(
        cpu=not torch.cuda.is_available(), kwargs_handlers=[group], project_dir=flags.output_dir,
        log_with=None if flags.report_to == "none" else flags.report_to,
    )  # fmt: skip


def first_model(flags: Flags, ranks: Ranks, task: Task) -> str:
    """Folder or hub id of the model that a run begins with. Rank 0 makes the task's own: ranks that made it at the same
    time would break each other's. Raises UsageError if there is none."""
    make = task.first_model
    if flags.model:
        return flags.model
    if make is None:
        raise UsageError(f"--task {flags.task} returns a task without a `first_model`; give --model.")
    return ranks.from_main(lambda: str(make(CACHE, ranks.say)))


def resume(
    flags: Flags, ranks: Ranks, folder: Folder, task: Task, history: PassRateHistory, prompts: PromptStream,
    progress: Progress,
) -> None:  # fmt: skip
    """Loads the newest complete checkpoint and takes off what the logs gained after it. Raises UsageError."""
    newest = folder.newest_checkpoint()
    if newest is None:
        raise UsageError(
            f"--resume {folder.path}: no complete checkpoint is there; start anew with --output_dir and "
            "--overwrite true."
        )
    checkpoint, state = newest
    run_folder.load(ranks.accelerator, checkpoint)
    used = {*state["prompts"]["first"], *(key for key, *_ in state["history"]["counts"])}
    if not used <= {problem.key for problem in task.train}:
        raise UsageError(
            f"--resume: prompts of {checkpoint} are not among the prompts of this data set; give --dataset and --seed "
            "as before, and no --eval_dataset that has prompts of it."
        )
    try:
        history.load_state_dict(state["history"])
    except ValueError as error:
        raise UsageError(f"--resume: {error} Give --pass_rate_threshold as before.") from error
    prompts.load_state_dict(state["prompts"])
    progress.load_state_dict(state)
    progress.compute = state["compute"]
    if ranks.main:
        folder.cut_back(state["logs"])
    ranks.say(f"resumed from {checkpoint}; {len(prompts.first)} prompts that were in flight come first")


# ----------------------------------------------------------------------------------------------------------- generator


def new_generator(
    flags: Flags, engine: RunEngine | TorchEngine, task: Task, prompts: PromptStream,
    control: length_control.Interruption | None, progress: Progress,
) -> Generator:  # fmt: skip
    """Rank 0's generator, whose engine is not yet started."""
    return Generator(
        engine,
        prompts,
        task.score,
        new_pacer(flags),
        flags.rollouts,
        length_control=control,
        max_completion=flags.completion_cap,
        seed=flags.seed,
        stop_requested=lambda: progress.stop_signal != 0,
    )


def new_interruption(flags: LengthFlags, task: Task) -> length_control.Interruption | None:
    """Forced interruption, if that is the length control. Raises UsageError if the task cannot be interrupted."""
    if flags.length_control != "interruption":
        return None
    try:
        return length_control.Interruption(
            flags.min_budget, flags.max_budget, flags.answer_budget, task.phrase_ids, task.end_of_thinking_ids,
            task.thinking_end,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--length_control interruption: {error} Set --end_of_thinking or use `none`.") from error


# ---------------------------------------------------------------------------------------------------------------- task


def load_task(flags: Flags, judge: bool = True) -> Task:
    """The built-in task, your own, or that of data sets. Without `judge`, on ranks that score nothing, no reward worker
    outlives the check of the rows. Raises UsageError."""
    if flags.task or flags.dataset in BUILT_IN:
        make = own_code(flags, "task") if flags.task else warm_start.TASKS[flags.dataset]
        try:
            task = make(flags.seed, flags.held_out, flags.rarity)
        except ValueError as error:
            raise UsageError(f"--held_out {flags.held_out}: {error}.") from error
        members = [*Task.__annotations__, *(name for name in vars(Task) if not name.startswith("_"))]
        if missing := [name for name in members if not hasattr(task, name)]:
            raise UsageError(f"--task {flags.task} returns no task of tasks/prompts.py: it has no `{missing[0]}`.")
        return task
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(flags.model, trust_remote_code=flags.trust_remote_code)
    except UNREADABLE as error:
        raise UsageError(f"--model {flags.model} has no tokenizer that loads ({reason_of(error)}).") from error
    options = data_sets.PromptOptions(
        prompt_column=flags.prompt_column,
        answer_column=flags.answer_column,
        prompt_template=flags.prompt_template,
        apply_chat_template=flags.apply_chat_template,
        end_of_thinking=flags.end_of_thinking,
        thinking={"auto": None, "true": True, "false": False}[flags.thinking],
        stop_tokens=flags.stop_tokens,
        interruption_phrase=flags.interruption_phrase,
        held_out=flags.held_out,
        max_prompt_tokens=flags.max_prompt_tokens,
    )
    try:
        return data_sets.load_dataset_task(
            flags.dataset,
            tokenizer,
            options,
            reward="math" if flags.reward in ("task", "shuffled") else flags.reward,
            reward_workers=flags.reward_workers,
            reward_timeout=flags.reward_timeout,
            eval_dataset=flags.eval_dataset,
            judge=judge,
        )
    except ValueError as error:
        raise UsageError(with_flag_names(str(error))) from error


def prompts_line(task: data_sets.DatasetTask) -> str:
    """How many prompts a task of data sets has, and how many rows were left out and why."""
    held_out = Counter(problem.source for problem in task.held_out)
    kept = ", ".join(f"{held_out[name]} of {name}" for name in [*task.sources, *task.eval_sources])
    left_out = ", ".join(f"{count} {kind}" for kind, count in task.skipped.items()) or "no row"
    return f"{len(task.train)} prompts to train on; held out: {kept}; left out: {left_out}"


def longest_row(flags: LengthFlags, task: Task, control: length_control.Interruption | None) -> int:
    """Tokens of the longest prompt and completion together."""
    completion = control.max_completion if control else flags.completion_cap
    return completion + max(len(problem.prompt_ids) for problem in [*task.train, *task.held_out])


def check_model(flags: LengthFlags, model: Any, task: Task, longest: int) -> None:
    """Raises UsageError if the task does not fit the model: its vocabulary, or its context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if longest > context:
        raise UsageError(
            f"--max_budget {flags.max_budget}: the longest prompt and completion take {longest} tokens, the model's "
            f"context has {context}; lower --max_budget, --answer_budget or --max_prompt_tokens."
        )
    ids = {*task.stop_ids, *task.phrase_ids, *task.end_of_thinking_ids}
    for problem in [*task.train, *task.held_out]:
        ids.update(problem.prompt_ids)
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise UsageError(
            f"--model has embeddings of {rows} tokens, the task's prompts have token {max(ids)}; give the model that "
            "belongs to the task."
        )


def check_saving(model: Any, task: Task) -> None:
    """Saves all of the final model but its weights: what fails would otherwise fail after the last step. Raises
    UsageError."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder, state_dict={})
            task.tokenizer.save_pretrained(folder)
        except UNREADABLE as error:
            raise UsageError(f"--model could not be saved after the last step ({reason_of(error)}).") from error
