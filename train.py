"""ScaleRL end to end: asynchronous reinforcement learning of a language model, with every ingredient a flag.

    python train.py                                    # the built-in task on a laptop CPU: the whole recipe, k = 8
    python train.py --loss dapo --aggregation token    # change one ingredient
    python train.py --help                             # every flag, by concept

The recipe (arXiv 2510.13786) and where each part stands:

    sample       PipelineRL, k steps off-policy, weights swapped in flight     pipeline_rl.py
    interrupt    thinking cut at a random budget, then an answer               length_control.py
    filter       equal rewards out of the batch, solved prompts out for good   filters.py
    advantage    reward minus the prompt's mean, over the batch's std          losses.py
    loss         CISPO, averaged per prompt, FP32 logits                       losses.py, fp32_head.py
    predict      a sigmoid of pass rate against compute                        fit_sigmoid.py

This file is the glue, and `train` is the loop; what it takes to run is in runtime/, what is asked in tasks/.
Words: a step takes one batch of B groups; the version counts optimiser steps (a skipped batch makes none).
"""

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

import filters
import fit_sigmoid
import fp32_head
import length_control
import losses
import pipeline_rl
from runtime import model as policies
from runtime.checkpoints import DISK, check_pickles, disk, weights_only
from runtime.devices import generator_devices, new_channel
from runtime.flag_checks import check_flags
from runtime.flags import UsageError, changed_flags, engine_options, engine_workers, merged, parse_flags
from runtime.metrics import (
    Clock,
    accelerators_in_use,
    closing_table,
    evaluation_line,
    evaluation_record,
    joined,
    step_line,
    warnings_of,
)
from runtime.run_folder import Folder
from runtime.setup import check_model, load_task
from runtime.trainer import Trainer, TrainingBatch
from tasks import warm_start
from tasks.prompts import PromptStream
from tasks.verifiers import RewardError

# ------------------------------------------------------------------------------------------------- prompts and batches


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """(N, T) with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def shaped_rewards(groups: Sequence[pipeline_rl.Group], flags: Any, rng: random.Random) -> Tensor:
    """(N,) rewards of all rollouts: the verifier's, plus the length penalty, or shuffled for the control."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
    if flags.length_control == "penalty":
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])  # (N,)
        cap = flags.max_budget + flags.answer_budget
        penalty = length_control.overlong_penalty(lengths, cap, flags.penalty_window)
        on = torch.tensor([rollout.correct or flags.penalty_on == "all" for rollout in rollouts])
        rewards = rewards + torch.where(on, penalty, 0.0)
    if flags.reward == "shuffled":
        rewards = rewards[rng.sample(range(len(rewards)), len(rewards))]
    return rewards


def make_batch(
    groups: Sequence[pipeline_rl.Group], flags: Any, rng: random.Random, discarded: Sequence[pipeline_rl.Group] = ()
) -> tuple[TrainingBatch | None, dict[str, Any]]:
    """(the batch, or None if no row is left to train on; metrics of everything that was sampled for it, the groups that
    dynamic sampling discarded among it)."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = rollouts + [rollout for group in discarded for rollout in group.rollouts]
    prompts = [group.problem.prompt_ids for group in groups for _ in group.rollouts]
    group_ids = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g.rollouts) for g in groups]))  # (N,)
    shaped = shaped_rewards([*groups, *discarded], flags, rng)  # (M,)
    rewards = shaped[: len(rollouts)]  # (N,)
    truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    varied = filters.has_variance(rewards, group_ids)  # (N,)
    keep = varied if flags.zero_variance_filter else torch.ones_like(varied)
    counts = {
        "reward": shaped.mean().item(),
        "pass_rate": sum(rollout.correct for rollout in sampled) / len(sampled),
        "length": sum(len(rollout.completion_ids) for rollout in sampled) / len(sampled),
        "interrupted": sum(rollout.interrupted for rollout in sampled) / len(sampled),
        "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in sampled]),
        "zero_variance_groups": len(groups) - len(group_ids[varied].unique()),
    }
    if flags.dynamic_sampling:
        counts |= {"offered": len(groups) + len(discarded), "discarded_groups": len(discarded)}
    if not keep.any():
        return None, counts
    # Whole groups leave first; the std is that of the rows that stay.
    advantages = torch.zeros_like(rewards)
    advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], flags.normalize_advantages)
    if flags.truncated_rollouts == "drop":  # single rows leave after the centring, never before
        counts["truncated_dropped"] = int((keep & truncated).sum())
        keep = keep & ~truncated
    if not keep.any():
        return None, counts
    chosen = keep.nonzero().squeeze(1).tolist()
    mask = padded([rollouts[i].mask for i in chosen], torch.bool)  # (N, T)
    constant = flags.max_budget + flags.answer_budget
    weights = losses.aggregation_weights(mask, group_ids[keep], flags.aggregation, constant)
    rows = [policies.Row(prompts[i], rollouts[i].completion_ids, rollouts[i].mask) for i in chosen]
    behaviour = padded([rollouts[i].logprobs for i in chosen], torch.float32)
    return TrainingBatch(rows, behaviour, mask, advantages[keep], weights), counts | {
        "rows": len(rows),
        "trained_tokens": int(mask.sum()),
    }


# ------------------------------------------------------------------------------------------------------------- the run


class RunFailed(RuntimeError):
    """Going on would train on what cannot be trusted; the message names the last good checkpoint."""


@dataclass
class Check:
    """An evaluation or a probe under way at one version."""

    future: Any  # of the generator's rollouts; None on ranks other than 0
    problems: list[Any]
    version: int
    record: dict[str, Any] | None  # of an evaluation: step and compute when it began; None for a probe


class Run:
    """Everything of one run, and what the loop does with it; rank 0 alone has the generator and writes files."""

    CHECK_ROWS = 64  # completions that the log-prob check scores
    PROBES = 16  # completions of a probe
    # Mean |difference| of log-probs, nats a token, that rounding explains. float32: measured up to 4e-6; weights one
    # update old differ by 1.3e-3 to 5.4e-2 (lr 5e-4). bfloat16: measured up to 0.04 (random Qwen3s, more the further
    # apart the logits are: 0.1M parameters 7e-4 to 8e-3, 0.9M .018, 6M 2e-3 to .033, 8M .04, 29M 4e-3 to .025; an FP32
    # head changes little), so that only weights that are far off are noticed.
    LARGEST_GAP: ClassVar = {"float32": 1e-4, "bfloat16": 0.1}
    BAD_STEPS = 3  # gradients in a row that are not finite, before the run ends

    def __init__(self, flags: Any):
        from accelerate import Accelerator, InitProcessGroupKwargs
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # "removed shared tensor" at every save
        torch.manual_seed(flags.seed)
        torch.set_num_threads(flags.threads)
        self.flags = flags
        # Ranks wait for rank 0, which waits for the generator: as long as it takes, and for objects not on the GPU.
        group = InitProcessGroupKwargs(timeout=timedelta(days=7))
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:  # without it accelerate makes no process group
            group.backend = "cpu:gloo,cuda:nccl"
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), kwargs_handlers=[group], project_dir=flags.output_dir,
            log_with=None if flags.report_to == "none" else flags.report_to,
        )  # fmt: skip
        self.main = self.accelerator.is_main_process
        self.generator: pipeline_rl.Generator | None = None
        self.folder = Folder(flags.output_dir)
        if self.main and not flags.eval_only:
            if flags.overwrite and not flags.resume:
                self.folder.clear()
            self.folder.path.mkdir(parents=True, exist_ok=True)
        finished = self.finished_model()
        start = warm_start.WarmStart(restart=flags.rambling)
        model = str(self.folder.path / "model") if finished else flags.model
        model = model or self.from_main(  # ranks that made it side by side would break each other's
            lambda: str(warm_start.warm_start(flags.cache_dir, seed=flags.seed, settings=start, report=self.say))
        )
        self.task = load_task(flags, judge=self.main)
        self.trainer = Trainer(flags, self.accelerator, model)
        self.history = filters.PassRateHistory(flags.pass_rate_threshold, flags.pass_rate_window)
        self.prompts = PromptStream(self.task.train, flags.seed, self.history.retired, self.task.weights)
        self.rng = random.Random(flags.seed)  # for what rank 0 alone draws
        self.eval_problems = [
            problem for source in self.task.sources
            for problem in [p for p in self.task.held_out if p.source == source][: flags.eval_problems]
        ]  # fmt: skip
        self.channel, self.engine_devices = new_channel(flags, self.accelerator)
        self.step = self.version = 0
        self.evaluated = -1  # step of the last recorded evaluation
        self.bad_steps = self.empty_steps = 0  # in a row: gradient not finite; no row left to train on
        self.compute: dict[str, float] = {}  # of the run before a resume
        self.check: Check | None = None
        self.in_hand: list[list[pipeline_rl.Group]] = []  # taken, not yet trained
        self.discarded: list[pipeline_rl.Group] = []  # by dynamic sampling, for the batch in hand
        self.stop_signal = 0
        self.save_seconds = 0.0  # since the last record
        if finished:
            self.step, self.version, self.compute = finished["step"], finished["version"], finished["compute"]
            self.say(f"evaluating {model}, the model of step {self.step}")
        elif flags.resume:
            self._load()
        control = self._interruption()  # on every rank, so that all end with the same sentence
        check_model(flags, self.trainer.model.config, self.task, control)
        if self.main:
            self.generator = self._new_generator(model, control)

    def finished_model(self) -> dict[str, Any] | None:
        """run.json of the resumed run's `model/`, if --eval_only shall evaluate that: no checkpoint is newer."""
        if not (self.flags.eval_only and self.flags.resume):
            return None
        model, checkpoint = self.folder.model(), self.folder.newest_checkpoint()
        return model if model and (checkpoint is None or checkpoint[1]["step"] <= model["step"]) else None

    def _interruption(self) -> length_control.Interruption | None:
        flags, task = self.flags, self.task
        if flags.length_control != "interruption":
            return None
        try:
            return length_control.Interruption(
                flags.min_budget, flags.max_budget, flags.answer_budget, task.phrase_ids, task.end_of_thinking_ids,
                task.thinking_end,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(f"--length_control interruption: {error} Set --end_of_thinking or use `none`.") from error

    def _new_generator(self, model: str, control: length_control.Interruption | None) -> pipeline_rl.Generator:
        flags, task = self.flags, self.task
        return pipeline_rl.Generator(
            model, iter(()) if flags.eval_only else self.prompts, task.score,
            pipeline_rl.Pacer(flags.batch_prompts, flags.k, schedule=flags.schedule, max_ready=flags.max_ready or None,
                              min_ready=flags.min_ready),
            flags.rollouts, task.stop_ids, weights=self.channel, length_control=control,
            max_tokens=flags.max_budget + flags.answer_budget,
            temperature=flags.temperature, max_num_seqs=flags.max_num_seqs, dtype=flags.dtype, seed=flags.seed,
            max_prompt=max(len(problem.prompt_ids) for problem in [*task.train, *task.held_out]),
            max_restarts=flags.max_restarts, restart_window=flags.restart_window, devices=self.engine_devices,
            interrupted=lambda: self.stop_signal != 0,
            engine_args=merged(fp32_head.GENERATOR_ARGS if flags.fp32_head else {}, engine_options(flags)),
        )  # fmt: skip

    def say(self, line: str) -> None:
        """Prints on rank 0, above the progress bar."""
        from tqdm import tqdm

        if self.main:
            tqdm.write(line)
            sys.stdout.flush()

    def start(self) -> None:
        """Starts the generator with the trainer's weights, the clock and the progress bar."""
        from tqdm import tqdm

        flags = self.flags
        if not self.main:
            self.channel.prepare(self.trainer.weights)
        if self.main:
            self.device = torch.cuda.get_device_name() if torch.cuda.device_count() else "cpu"
            try:
                self.generator.start(self.trainer.weights, self.version)
            except pipeline_rl.EngineFailed as error:
                raise UsageError(
                    f"--model {flags.model or 'built in'}: {error}. Take a model that vLLM can run here, or check "
                    "--dtype, --gpu_memory_utilization and --engine_args."
                ) from error
            self.clock = Clock(self.generator, self.trainer.parameters_in_flops, self.devices(), self.compute)
            self.counters, self.logged, self.waited = vars(self.generator.counters).copy(), time.monotonic(), 0.0
        if flags.eval_only:  # nothing is written
            return
        if self.main:
            if flags.resume:
                saved = json.loads((self.folder.path / "config.json").read_text())
                for line in changed_flags(saved, vars(flags)):
                    self.say(line)
            self.folder.replace("config.json", json.dumps(vars(flags), indent=1))
            self.folder.append("metrics.jsonl", {"config": vars(flags)})  # once more after each resume
            self.bar = tqdm(total=flags.max_steps, initial=self.step, unit="step", disable=None, leave=False)
        self.accelerator.init_trackers("scalerl", config=vars(flags))

    def devices(self) -> int:
        """Devices in use on both sides: accelerators, or CPU cores."""
        flags, trainers, gpus = self.flags, self.accelerator.num_processes, torch.cuda.device_count()
        if not gpus:
            return min(os.cpu_count() or 1, trainers * flags.threads + engine_workers(flags))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        engines = generator_devices(flags, gpus, here)
        placed = 0 if engines else engine_workers(flags)  # by Ray, on any host
        return accelerators_in_use(trainers, here, engines, placed)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """Rank 0's `make()`, on every rank; if it raises there, every rank raises, so that none waits alone."""
        from accelerate.utils import broadcast_object_list

        if self.accelerator.num_processes == 1:
            return make()
        value = error = None
        try:
            value = make() if self.main else None
        except Exception as raised:  # told to the other ranks
            error = raised
        value, error = broadcast_object_list([value, error])
        if error is not None:
            raise error
        return value

    # ---- what the loop does ----

    def collect(self) -> list[list[pipeline_rl.Group]] | None:
        """The groups of the next steps: one batch of B under `pipeline`, k batches under `ppo_off_policy`; None at the
        end of the run."""
        parts = self.from_main(self._collect)
        if parts is None:  # what dynamic sampling had begun to collect stays in hand, for the last checkpoint
            return None
        self.in_hand = list(parts)
        return parts

    def _collect(self) -> list[list[pipeline_rl.Group]] | None:
        flags, generator = self.flags, self.generator
        if self.step >= flags.max_steps or self._budget_spent():
            return None
        started, self.discarded = time.monotonic(), []
        try:
            if not flags.dynamic_sampling:
                groups = generator.take(generator.pacer.take_size)
            else:
                sampler = filters.DynamicSampling(generator.pacer.take_size)
                kept: list[pipeline_rl.Group] = []
                self.in_hand = [kept]
                while not sampler.full:
                    [group] = generator.take(1)
                    if sampler.offer(group, shaped_rewards([group], flags, self.rng)):
                        kept.append(group)
                    else:
                        self.discarded.append(group)
                        self.remember([group])
                        generator.release(1)
                groups = sampler.take()
        except (pipeline_rl.Exhausted, filters.PromptsExhausted) as reason:
            self.say(f"{reason}; {self.history.n_retired} of {len(self.task.train)} prompts are retired. The run ends.")
            return None
        self.waited += time.monotonic() - started
        if flags.schedule == "ppo_off_policy":
            self.rng.shuffle(groups)
        size = flags.batch_prompts
        return [groups[i : i + size] for i in range(0, len(groups), size)]

    def _budget_spent(self) -> bool:
        flags, compute = self.flags, self.clock.now()
        for name, limit, spent in (
            ("max_sampled_tokens", flags.max_sampled_tokens, compute["tokens"]),
            ("max_hours", flags.max_hours, self.clock.hours()),
            ("max_device_hours", flags.max_device_hours, compute["device_hours"]),
        ):
            if limit and spent >= limit:
                self.say(f"--{name} {limit} reached")
                return True
        return False

    def score_old(self, batches: Sequence[tuple[TrainingBatch | None, dict[str, Any]]]) -> None:
        """TIS needs the trainer's own log-probs from before the first of these steps."""
        for batch, _ in batches if self.flags.loss == "tis" else ():
            if batch is not None:
                batch.old_logprobs = self.trainer.score(batch.rows)

    def update(self, metrics: dict[str, Any]) -> bool:
        """The optimiser step; `metrics` gains its figures. False if the gradient was not finite: then nothing changed.
        Raises RunFailed after BAD_STEPS of those in a row."""
        metrics |= self.trainer.update(self.version)
        self.version += metrics["updated"]
        self.bad_steps = 0 if metrics["updated"] else self.bad_steps + 1
        if self.bad_steps >= self.BAD_STEPS:
            reason = f"the gradient was not finite {self.bad_steps} times in a row"
            raise RunFailed(f"{reason}; {self.last_good()}: lower --lr and --resume {self.folder.path}")
        return bool(metrics["updated"])

    def last_good(self) -> str:
        """Names the newest whole checkpoint, for a message."""
        found = self.folder.newest_checkpoint()
        return f"the last good checkpoint is {found[0] if found else 'none'}"

    def remember(self, groups: Sequence[pipeline_rl.Group]) -> int:
        """Counts consumed groups in the pass-rate history; returns how many were of a prompt retired meanwhile."""
        late = sum(self.history.retired(group.problem.key) for group in groups)
        solved = [(group.problem.key, [rollout.correct for rollout in group.rollouts]) for group in groups]
        for key, correct in solved:
            self.history.update(key, correct)
        if self.main:
            record = {"step": self.step, "groups": [[key, sum(correct), len(correct)] for key, correct in solved]}
            self.folder.append("groups.jsonl", record)
        return late

    def push(self, groups: int, updated: bool) -> None:
        """New weights to the generator; `groups` groups are done with. Without an update they are done with at once."""
        if updated:
            self.settle()
        if updated and not self.main:
            self.channel.prepare(self.trainer.weights)
        elif updated:
            with disk(self.channel.folder):
                self.generator.push(self.trainer.weights, self.version, release=groups)
        elif self.main:
            self.generator.release(groups)

    def settle(self) -> None:
        """Several ranks: waits until the last weights are live; if that push failed, it is raised on every rank."""
        if self.accelerator.num_processes > 1:
            self.from_main(lambda: self.generator.settle())

    def begin_check(self) -> None:
        """Starts an evaluation or a probe at the live version, if one is due now."""
        flags = self.flags
        if self.check is not None:  # still open, as after a skipped step; the version is the same
            return
        if self.evaluated < 0 or self.step // flags.eval_every > self.evaluated // flags.eval_every:
            self.begin_evaluation()
        elif self.step % flags.probe_every == 0:
            self.settle()
            draw = random.Random(f"{flags.seed} probe {self.step}")
            problems = draw.sample(self.task.held_out, min(self.PROBES, len(self.task.held_out)))
            future = self.generator.evaluate(problems, 1) if self.main else None
            self.check = Check(future, problems, self.version, None)

    def begin_evaluation(self) -> None:
        """Starts an evaluation of the held-out prompts at the live version."""
        self.settle()
        self.check = Check(None, self.eval_problems, self.version, {})
        if self.main:
            self.check.record = {"step": self.step, "version": self.version, "device": self.device} | self.clock.now()
            self.check.future = self.generator.evaluate(self.check.problems, self.flags.eval_samples)

    def finish_check(self) -> dict[str, float]:
        """Waits for the evaluation or probe; must come before the weights change. Its completions were made wholly by
        this version, so the trainer's log-probs must be the generator's: a mean difference that is NaN or above the
        dtype's LARGEST_GAP ends the run (RunFailed); of a mixture of experts that of the median row. Returns it."""
        if self.check is None:
            return {}
        rows, behaviour = self.from_main(lambda: self._checked_rows(self.check))
        check, self.check = self.check, None
        if check.record is not None:
            self.evaluated = self.step
        own = self.trainer.score(rows)  # (N, T)
        mask = padded([row.mask for row in rows], torch.bool)  # (N, T)
        gaps = (own - padded(behaviour, torch.float32)).abs() * mask  # (N, T)
        gap = (gaps.sum() / mask.sum()).item()
        if policies.experts(self.trainer.model.config) > 1:  # rounding may send a token to another expert, and its row
            gap = (gaps.sum(1) / mask.sum(1)).median().item()  # is off; old weights would put every row off
        largest = self.LARGEST_GAP[self.flags.dtype]
        if not gap <= largest:
            raise RunFailed(
                f"weights check: at version {check.version} trainer and generator differ by {gap:.1e} nats a token, "
                f"more than {largest} ({self.flags.dtype}): the generator has other weights than the trainer, or "
                f"computes with less precision (TF32, quantisation); {self.last_good()}: --resume {self.folder.path}"
            )
        return {"logprob_gap": gap}

    def _checked_rows(self, check: Check) -> tuple[list[policies.Row], list[list[float]]]:
        groups = self.generator.result_of(check.future)
        flat = [(problem, r) for problem, group in zip(check.problems, groups, strict=True) for r in group]
        mixed = sum(any(v != check.version for v, m in zip(r.versions, r.mask, strict=True) if m) for _, r in flat)
        if mixed:
            raise RunFailed(
                f"weights check: {mixed} evaluation completions are not wholly by {check.version}; {self.last_good()}"
            )
        if check.record is not None:
            record = check.record | evaluation_record(groups)
            if len(self.task.sources) > 1:
                pairs = list(zip(check.problems, groups, strict=True))
                record["pass_rate_of"] = {
                    source: evaluation_record([g for problem, g in pairs if problem.source == source])["pass_rate"]
                    for source in self.task.sources
                }
            if self.flags.eval_only:
                self.say(json.dumps(record))
            else:
                self.folder.append("eval.jsonl", record)
                self.accelerator.log({"eval/pass_rate": record["pass_rate"]}, step=self.step)
            self.say(evaluation_line(record))
        chosen = self.rng.sample(flat, min(self.CHECK_ROWS, len(flat)))
        rows = [policies.Row(problem.prompt_ids, r.completion_ids, r.mask) for problem, r in chosen]
        return rows, [r.logprobs for _, r in chosen]

    def log(
        self, groups: Sequence[pipeline_rl.Group], batch: TrainingBatch | None, metrics: dict[str, Any], version: int
    ) -> None:
        """One record and one line a step; `version` is the one that the step started from."""
        if not self.main:
            return
        if batch is not None:
            self.clock.trained_tokens += int(batch.mask.sum())
            self.clock.forwarded += sum(map(len, batch.rows))
        found = [lag for group in groups for rollout in group.rollouts for lag in pipeline_rl.lags(rollout, version)]
        now, counters = time.monotonic(), vars(self.generator.counters).copy()
        passed = {name: counters[name] - self.counters[name] for name in ("idle_seconds", "sync_seconds")}
        compute = self.clock.now()
        compute["trained_tokens_total"] = compute.pop("trained_tokens")  # the step's own is in `metrics`
        record = joined({"step": self.step, "version": self.version}, metrics, compute, {
            "lag_mean": sum(found) / len(found), "lag_max": max(found),
            "seconds": now - self.logged, "trainer_idle": self.waited, "generator_idle": passed["idle_seconds"],
            "sync_seconds": passed["sync_seconds"], "outstanding": self.generator.pacer.outstanding,
            "retired": self.history.n_retired, "epoch": self.prompts.epoch, "restarts": counters["restarts"],
            "redone_groups": counters["redone_groups"], "save_seconds": self.save_seconds,
        })  # fmt: skip
        if self.flags.peak_tflops and batch is not None:
            ranks, busy = self.accelerator.num_processes, record["seconds"] - record["trainer_idle"]
            record["mfu"] = self.clock.trained_flops(batch) / (busy * ranks * self.flags.peak_tflops * 1e12)
        if hasattr(self.task, "counts"):  # of a data set: verdicts so far by kind, lost reward workers among them
            record["verdicts"] = dict(self.task.counts)
        self.counters, self.logged, self.waited, self.save_seconds = counters, now, 0.0, 0.0
        self.folder.append("metrics.jsonl", record)
        self.accelerator.log({name: x for name, x in record.items() if isinstance(x, int | float)}, step=self.step)
        self.bar.update()
        self.say(step_line(record))
        self.empty_steps = 0 if batch is not None else self.empty_steps + 1
        for warning in warnings_of(record, self.empty_steps):
            self.say(warning)

    def sample(self, groups: Sequence[pipeline_rl.Group]) -> None:
        """A few rollouts to read, into samples.jsonl."""
        for group in groups[:2] if self.main else ():
            for rollout in group.rollouts[:2]:
                prompt, completion = (self.task.text(ids) for ids in (group.problem.prompt_ids, rollout.completion_ids))
                record = {"step": self.step, "key": group.problem.key, "reward": rollout.reward}
                record |= {"interrupted": rollout.interrupted, "prompt": prompt, "completion": completion}
                self.folder.append("samples.jsonl", record)

    # ---- checkpoints and the end ----

    def save(self) -> Path | None:
        """A checkpoint of the state after `step` steps; prompts in flight are listed, to come first on resume."""
        started = time.monotonic()
        temporary = self.from_main(lambda: str(self.folder.begin_checkpoint()))
        try:
            with disk(temporary):
                self.accelerator.save_state(temporary)  # model, optimiser, random states; every rank, FSDP2: sharded
                self.accelerator.wait_for_everyone()
            if not self.main:
                return None
            state = self._state()
            with disk(temporary):
                return self.folder.finish_checkpoint(Path(temporary), self.step, state, self.flags.keep)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            self.save_seconds += time.monotonic() - started

    def _state(self) -> dict[str, Any]:
        """What the trainer's side must remember beside tensors."""
        taken = [group.problem.key for groups in self.in_hand for group in groups]
        flying, prompts = self.generator.in_loop(
            lambda generator: ([problem.key for problem in generator.running.values()], self.prompts.state_dict())
        )
        return {
            "step": self.step, "version": self.version, "evaluated": self.evaluated,
            "history": self.history.state_dict(), "prompts": prompts | {"first": taken + flying + prompts["first"]},
            "random": self.rng.getstate(), "compute": self.clock.now() | {"hours": self.clock.hours()},
            "logs": self.folder.lengths(),
        }  # fmt: skip

    def _load(self) -> None:
        found = self.folder.newest_checkpoint()
        if found is None:
            raise UsageError(
                f"--resume {self.folder.path}: no whole checkpoint is there; start anew with --output_dir and "
                "--overwrite true."
            )
        checkpoint, state = found
        try:
            check_pickles(checkpoint)
            with weights_only():
                self.accelerator.load_state(str(checkpoint))
        except (RuntimeError, ValueError, EOFError, SafetensorError, UnpicklingError, CheckpointException) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise UsageError(f"--resume: {checkpoint} does not fit this model ({reason}).") from error
        used = {*state["prompts"]["first"], *(key for key, *_ in state["history"]["counts"])}
        if not used <= {problem.key for problem in self.task.train}:
            raise UsageError(
                f"--resume: prompts of {checkpoint} are not among the prompts of this data set; give --dataset, "
                "--prompts and --seed as before."
            )
        self.step, self.version, self.evaluated = state["step"], state["version"], state["evaluated"]
        try:
            self.history.load_state_dict(state["history"])
        except ValueError as error:
            fix = "Give --pass_rate_threshold and --pass_rate_window as before."
            raise UsageError(f"--resume: {error} {fix}") from error
        self.prompts.load_state_dict(state["prompts"])
        version, internal, gauss = state["random"]
        self.rng.setstate((version, tuple(internal), gauss))
        self.compute = state["compute"]
        if self.flags.eval_only:
            self.say(f"evaluating {checkpoint}, as the run is not finished")
            return
        if self.main:
            self.folder.cut_back(state["logs"])
        self.say(f"resumed from {checkpoint}; {len(self.prompts.first)} prompts that were in flight come first")

    def stop_early(self, reason: str) -> None:
        """A checkpoint, and one line that says why the run ends and how to go on."""
        if self.flags.eval_only:
            self.say(f"{reason}; nothing was evaluated")
            return
        checkpoint = self.save()
        self.say(f"{reason}; checkpoint {checkpoint}; go on with --resume {self.folder.path}")

    def finish(self) -> None:
        """Last evaluation, a checkpoint from which a longer run may go on, the final model and the closing table."""
        self.finish_check()
        if self.evaluated != self.step:
            self.begin_evaluation()
            self.finish_check()
        if self.flags.save_every or self.flags.resume:  # an older checkpoint would take the logs back with it
            self.save()
        state = {}
        for name, tensor in policies.full_tensors(self.trainer.model, torch.float32):
            state |= {name: tensor.cpu()} if self.main else {}
        if self.main:
            with disk(self.folder.path / "model"):
                new = self.folder.begin_model()
                self.trainer.model.save_pretrained(new, state_dict=state)
                self.task.tokenizer.save_pretrained(new)
                self.folder.finish_model({"step": self.step, "version": self.version, "compute": self.clock.now()})
            self.bar.close()
            evaluations, picture = self.folder.path / "eval.jsonl", self.folder.path / "curve.png"
            curve = fit_sigmoid.curve(evaluations, fit_until=0.5, plot=picture)
            self.say(f"\nfitted to the first half of the compute ({picture}):\n{fit_sigmoid.format_report(curve)}\n")
            self.say(closing_table(self.folder, self.clock, self.device, self.flags.k))

    def close(self) -> None:
        """Ends the generator and the trackers, whatever happened."""
        if self.generator is not None:
            self.generator.close()
        self.channel.close()
        self.task.close()
        self.accelerator.end_training()


# ------------------------------------------------------------------------------------------------------------- the loop


def train(run: Run) -> None:
    """The loop: collect, filter, advantages, loss, step, push weights, log, save; evaluation runs beside it."""
    run.begin_check()
    while (parts := run.collect()) is not None:
        batches = [  # what dynamic sampling discarded on the way is counted with the first
            make_batch(groups, run.flags, random.Random(f"{run.flags.seed} {run.step + i}"), () if i else run.discarded)
            for i, groups in enumerate(parts)
        ]
        run.score_old(batches)
        updated = False
        for groups, (batch, metrics) in zip(parts, batches, strict=True):
            before = run.version
            if batch is not None:
                metrics |= run.trainer.gradients(batch)
                metrics |= run.finish_check()  # the weights change next
                updated |= run.update(metrics)
            metrics["retired_in_flight"] = run.remember(groups)
            run.step += 1
            run.in_hand.pop(0)
            try:
                if not run.in_hand:
                    run.push(sum(map(len, parts)), updated)
            finally:  # a step that counts is logged, even if its weights go nowhere
                run.log(groups, batch, metrics, before)
        run.sample(parts[-1])
        if run.flags.save_every and run.step // run.flags.save_every > (run.step - len(parts)) // run.flags.save_every:
            run.save()
        run.begin_check()
    run.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 1 failure, 2 usage, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        return run_with(sys.argv[1:] if argv is None else argv)
    except OSError as error:
        if error.errno not in DISK:
            raise
        where, why = error.filename, error.strerror
        print(f"train.py: cannot write {where}: {why}; earlier checkpoints are whole", file=sys.stderr)
        return 1


def run_with(argv: Sequence[str]) -> int:
    """One run with these flags, to its end or to the fault that ends it; returns the exit code."""
    run = None
    try:
        flags = parse_flags(argv, __doc__)
        for note in check_flags(flags):
            if os.environ.get("RANK", "0") == "0":
                print(note)
        if flags.dry_run:
            print(json.dumps(vars(flags), indent=1))
            return 0
        run = Run(flags)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stop(run, number))
        run.start()
        if flags.eval_only:
            run.begin_evaluation()
            run.finish_check()
        else:
            train(run)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except pipeline_rl.Interrupted:
        run.stop_early(f"stopped by signal {run.stop_signal} after step {run.step}")
        return 128 + (run.stop_signal or signal.SIGTERM)
    except (pipeline_rl.EngineDied, RewardError) as error:
        run.stop_early(f"train.py: {error}")
        return 1
    except RunFailed as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    finally:
        if run is not None:
            run.close()
    return 0


def stop(run: Run, number: int) -> None:
    """Signal handler: the loop ends at its next wait, with a checkpoint. The second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    run.stop_signal = number


if __name__ == "__main__":
    sys.exit(main())
