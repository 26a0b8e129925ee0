"""Makes the parts of a run from its flags, on every rank. A flag that cannot work raises a UsageError that names it.

run.py starts the engine and opens the logs.
"""

import logging
import os
import random
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import length_control
from filters import PassRateHistory
from generator import Generator
from runtime.engine import RunEngine, TorchEngine, choose_devices, devices_in_use, new_engine
from runtime.evaluation import Evaluator
from runtime.flags import BUILT_IN, Flags, UsageError, new_pacer, own_code, reason_of, with_flag_names
from runtime.folder import Folder, Progress, check_folder
from runtime.model import UNREADABLE
from runtime.ranks import GeneratorForRanks, Ranks
from runtime.recorder import Recorder
from runtime.trainer import Trainer, chosen_loss
from tasks import arithmetic, data_sets
from tasks.prompts import PromptOptions, PromptStream, Task

# What would change the training without a flag of ours: variables that accelerate reads, and their neutral values.
NEUTRAL = {
    "MIXED_PRECISION": "no", "GRADIENT_ACCUMULATION_STEPS": "1", "DYNAMO_BACKEND": "no", "USE_DEEPSPEED": "false",
    "USE_MEGATRON_LM": "false", "USE_PARALLELISM_CONFIG": "false",
}  # fmt: skip
CACHE = Path(__file__).parent.parent / "runs" / "cache"  # of warm-started models


class Run:
    """What a run is made of, on one rank. Each part needs some of those above it."""

    def __init__(self, flags: Flags) -> None:
        """Makes everything but a running engine. Raises UsageError for a flag that cannot work, and then has changed no
        file."""
        self.flags = flags
        self.first_step = 0  # of this process: a resumed run begins later
        self.progress = Progress(random.Random(flags.seed))
        chosen_loss(flags)  # one that cannot train is refused before anything is made
        devices = choose_devices(flags)  # first, since it refuses devices before a process group waits for them
        self.ranks = ranks = Ranks(new_accelerator(flags))
        self.devices = devices_in_use(devices, ranks.count)
        with ExitStack() as to_close:  # what is made before something fails is ended, the last one first
            # The task has the prompts, the verifier and the tokenizer. Without --model it has a first model, too.
            self.task = task = load_task(flags, judge=ranks.main)
            to_close.callback(task.close)
            model_folder = first_model(flags, ranks, task)
            if isinstance(task, data_sets.DatasetTask):
                ranks.say(prompts_line(task))
            control = new_interruption(flags, task)
            longest = longest_row(flags, task, control)

            # The folder is looked at again now that it is ours: another run may have ended in it since the flags were
            # checked. An old run in it is deleted only once the engine is up.
            self.folder = Folder(flags.output_dir)
            to_close.callback(self.folder.unlock)
            ranks.from_main(self.folder.lock)
            ranks.from_main(lambda: check_folder(flags))

            # The trainer loads the model; task and model must fit each other.
            self.trainer = Trainer(flags, ranks.accelerator, model_folder)
            if self.trainer.note:
                ranks.say(self.trainer.note)

            # The generator takes prompts from a stream that passes over those which the history retires.
            self.history = PassRateHistory(flags.pass_rate_threshold)
            self.prompts = PromptStream(task.train, flags.seed, self.history.retired)
            rank = ranks.accelerator.process_index
            engine, channel = new_engine(flags, devices, rank, model_folder, task.stop_ids, longest)
            generator = None
            if engine is not None:  # on rank 0
                generator = new_generator(flags, engine, task, self.prompts, control, self.progress)
            self.generator = GeneratorForRanks(generator, channel, ranks)
            self.recorder = Recorder(flags, ranks, self.folder, task, self.prompts, self.generator)
            self.evaluator = Evaluator(flags, ranks, task, self.trainer, self.generator, self.recorder)
            self._to_close = to_close.pop_all()
        self._to_close.callback(self._end_accelerator)
        self._to_close.callback(self.generator.close)

    def close(self) -> None:
        """Ends the engine, the trackers, the reward workers and the lock, in this order, whatever happened."""
        self._to_close.close()

    def _end_accelerator(self) -> None:
        # DDP goes before the process group ends. Were its reducer the last to hold the group, it would wait for gloo's
        # threads with Python's lock in hand, and they may need that lock to free their last tensors.
        self.trainer.policy = None
        self.ranks.accelerator.free_memory()
        self.ranks.accelerator.end_training()


# ------------------------------------------------------------------------------------------------------------- trainer


def new_accelerator(flags: Flags) -> Any:
    """accelerate's `Accelerator`: one process, or one of several under `torch.distributed.run`. Raises UsageError."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers.utils import logging as transformers_logging

    for name, neutral in NEUTRAL.items():
        if (value := os.environ.get(f"ACCELERATE_{name}", neutral)).lower() != neutral:
            raise UsageError(f"ACCELERATE_{name}={value} would change the training; unset it: our flags decide it.")
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
        max_completion=flags.completion_budget,
        seed=flags.seed,
        stop_requested=lambda: progress.stop_signal != 0,
    )


def new_interruption(flags: Flags, task: Task) -> length_control.Interruption | None:
    """Forced interruption, if that is the length control. Raises UsageError if the task cannot be interrupted."""
    if flags.length_control != "interruption":
        return None
    try:
        return length_control.Interruption(
            flags.min_budget, flags.max_budget, flags.answer_budget, task.phrase_ids, task.end_of_thinking_ids,
            task.thinking_end,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(
            f"--length_control interruption: {error} Set --thinking to the text that ends it, or use `none`."
        ) from error


# ---------------------------------------------------------------------------------------------------------------- task


def load_task(flags: Flags, judge: bool = True) -> Task:
    """The built-in task, your own, or that of data sets. Without `judge`, on ranks that score nothing, no reward worker
    outlives the check of the rows. Raises UsageError."""
    if flags.task or flags.dataset in BUILT_IN:
        make = own_code(flags, "task") if flags.task else arithmetic.TASKS[flags.dataset]
        try:
            task = make(flags.seed, flags.held_out)
        except ValueError as error:
            raise UsageError(f"--held_out {flags.held_out}: {error}.") from error
        except Exception as error:  # somebody's function, which may raise anything
            raise UsageError(f"--task {flags.task} raises {reason_of(error)}.") from error
        if not hasattr(task, "train"):
            raise UsageError(f"--task {flags.task} returns no Task (tasks/prompts.py).")
        return task
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(flags.model, trust_remote_code=flags.trust_remote_code)
    except UNREADABLE as error:
        raise UsageError(f"--model {flags.model} has no tokenizer that loads ({reason_of(error)}).") from error
    options = PromptOptions(
        prompt_column=flags.prompt_column,
        answer_column=flags.answer_column,
        prompt_template=flags.prompt_template,
        apply_chat_template=flags.apply_chat_template,
        thinking=flags.thinking,
        interruption_phrase=flags.interruption_phrase,
        held_out=flags.held_out,
    )
    try:
        return data_sets.load_dataset_task(
            flags.dataset,
            tokenizer,
            options,
            reward="math" if flags.reward in ("task", "shuffled") else flags.reward,
            eval_dataset=flags.eval_dataset,
            judge=judge,
        )
    except ValueError as error:
        raise UsageError(with_flag_names(str(error))) from error


def prompts_line(task: data_sets.DatasetTask) -> str:
    """How many prompts a task of data sets has, how many rows were left out and why, and the columns."""
    held_out = Counter(problem.source for problem in task.held_out)
    kept = ", ".join(f"{held_out[name]} of {name}" for name in [*task.sources, *task.eval_sources])
    left_out = ", ".join(f"{count} {kind}" for kind, count in task.skipped.items()) or "no row"
    columns = "".join(f"; columns of {name}: {words}" for name, words in task.columns.items())
    return f"{len(task.train)} prompts to train on; held out: {kept}; left out: {left_out}{columns}"


def longest_row(flags: Flags, task: Task, control: length_control.Interruption | None) -> int:
    """Tokens of the longest prompt and completion together."""
    completion = control.max_completion if control else flags.completion_budget
    return completion + max(len(problem.prompt_ids) for problem in [*task.train, *task.held_out])
