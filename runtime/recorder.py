"""What a run prints and writes while it trains: a record and a line for each step, evaluations, rollouts to read."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import filters
import length_control
from pipeline_rl import Group, Rollout, lags
from runtime.flags import Flags, changed_flags, has_adapters
from runtime.metrics import Clock, budget_advice, evaluation_line, evaluation_record, step_line, warnings_of
from runtime.model import forwarded
from runtime.ranks import Ranks, SharedGenerator
from runtime.run_folder import Folder, Progress
from runtime.trainer import TrainingBatch
from tasks.prompts import PromptStream


class Recorder:
    """Measures, prints and writes on rank 0; on the other ranks it does nothing."""

    def __init__(
        self, flags: Flags, ranks: Ranks, folder: Folder, task: Any, history: filters.PassRateHistory,
        prompts: PromptStream, generator: SharedGenerator,
    ):  # fmt: skip
        self.flags, self.ranks, self.folder, self.task = flags, ranks, folder, task
        self.history, self.prompts = history, prompts
        self.generator = generator.on_main
        self.clock: Clock | None = None  # rank 0's, once the engine is up
        self.bar: Any = None
        self.device = "cpu"
        self.discarded: list[tuple[Group, Tensor]] = []  # by dynamic sampling since the last step, with their rewards
        self.empty_steps = 0  # in a row, with no row left to train on
        self.seconds = {"trainer_idle": 0.0, "save_seconds": 0.0}  # since the last record

    # ---- the run ----

    def start_clock(self, parameters: int, devices: int, past: dict[str, float]) -> None:
        """Compute counts from now on, on top of that of the run before a resume."""
        if self.ranks.main:
            self.device = torch.cuda.get_device_name() if torch.cuda.device_count() else "cpu"
            self.clock = Clock(self.generator, parameters, devices, past, has_adapters(self.flags))
            self.counters, self.logged = vars(self.generator.counters).copy(), time.monotonic()

    def open(self, step: int) -> None:
        """Writes the flags, says which of them a resumed run has otherwise than before, and shows the progress bar."""
        from tqdm import tqdm

        settings = vars(self.flags)
        if self.ranks.main:
            if self.flags.resume:
                saved = json.loads((self.folder.path / "config.json").read_text())
                for line in changed_flags(saved, settings):
                    self.ranks.say(line)
            self.folder.replace("config.json", json.dumps(settings, indent=1))
            self.folder.append("metrics.jsonl", {"config": settings})  # once more after each resume
            self.bar = tqdm(total=self.flags.max_steps, initial=step, unit="step", disable=None, leave=False)
        folder = self.flags.output_dir
        name = f"{folder} from step {step}" if step else folder  # trackio and wandb cannot take steps back
        of = {"trackio": {"name": name}, "wandb": {"name": name, "dir": folder}}
        self.ranks.accelerator.init_trackers("scalerl", config=settings, init_kwargs=of)

    def compute(self) -> dict[str, float]:
        """Compute so far (`Clock.now`); empty on ranks other than 0."""
        return self.clock.now() if self.clock else {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the next step's `trainer_idle` or `save_seconds`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started

    # ---- a step ----

    def sampled(self, groups: Sequence[Group], rewards: Tensor) -> dict[str, Any]:
        """Metrics of everything that was sampled for a batch: its groups with their shaped rewards (n,), and what
        dynamic sampling discarded on the way."""
        group_ids = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g.rollouts) for g in groups]))  # (n,)
        varied = len(group_ids[filters.has_variance(rewards, group_ids)].unique())
        discarded, self.discarded = self.discarded, []
        rewards = torch.cat([rewards, *(shaped for _, shaped in discarded)])
        rollouts = [r for group in (*groups, *(group for group, _ in discarded)) for r in group.rollouts]
        metrics = {
            "reward": rewards.mean().item(),
            "pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
            "length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
            "interrupted": sum(rollout.interrupted for rollout in rollouts) / len(rollouts),
            "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in rollouts]),
            "zero_variance_groups": len(groups) - varied,
        }
        if self.flags.dynamic_sampling:
            metrics |= {"offered": len(groups) + len(discarded), "discarded_groups": len(discarded)}
        return metrics

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """One line of groups.jsonl: the prompts, how many of their rollouts are correct, and how many tokens each has
        sampled."""
        if self.ranks.main:
            counts = [[g.problem.key, sum(r.correct for r in g.rollouts), len(g.rollouts)] for g in groups]
            lengths = [[sum(rollout.mask) for rollout in group.rollouts] for group in groups]
            self.folder.append("groups.jsonl", {"step": step, "groups": counts, "lengths": lengths})

    def step(
        self, progress: Progress, groups: Sequence[Group], batch: TrainingBatch | None, metrics: dict[str, Any],
        version: int,
    ) -> None:  # fmt: skip
        """The record and the line of the step that `progress` has just counted; it began at `version`."""
        if not self.ranks.main:
            return
        flags = self.flags
        computed = flags.share_prompts, flags.tokens_per_microbatch, self.ranks.count
        positions = forwarded(batch.rows, *computed) if batch else 0
        if batch:
            metrics = metrics | {"rows": len(batch.rows), "trained_tokens": int(batch.mask.sum())}
            self.clock.trained_tokens += metrics["trained_tokens"]
            self.clock.forwarded += positions
        token_lags = [lag for group in groups for rollout in group.rollouts for lag in lags(rollout, version)]
        now, counters = time.monotonic(), vars(self.generator.counters).copy()
        compute = self.clock.now()
        compute["trained_tokens_total"] = compute.pop("trained_tokens")  # the step's own is in `metrics`
        record: dict[str, Any] = dict(  # of two values for one name one would be lost: a TypeError
            step=progress.step, version=progress.version, **metrics, **compute, **self.seconds,
            lag_mean=sum(token_lags) / len(token_lags), lag_max=max(token_lags), seconds=now - self.logged,
            generator_idle=counters["idle_seconds"] - self.counters["idle_seconds"],
            sync_seconds=counters["sync_seconds"] - self.counters["sync_seconds"],
            requests=(counters["request_seconds"] - self.counters["request_seconds"]) / (now - self.logged),
            outstanding=self.generator.pacer.outstanding, retired=self.history.n_retired, epoch=self.prompts.epoch,
            restarts=counters["restarts"], redone_groups=counters["redone_groups"],
        )  # fmt: skip
        if self.flags.peak_tflops and batch:
            possible = (record["seconds"] - record["trainer_idle"]) * self.ranks.count * self.flags.peak_tflops * 1e12
            record["mfu"] = self.clock.training_flops * positions / possible  # without the products inside attention
        if hasattr(self.task, "counts"):  # of a data set: verdicts so far by kind, lost reward workers among them
            record["verdicts"] = dict(self.task.counts)
        self.counters, self.logged, self.seconds = counters, now, dict.fromkeys(self.seconds, 0.0)
        self.folder.append("metrics.jsonl", record)
        numbers = {name: x for name, x in record.items() if isinstance(x, int | float) and name != "step"}
        self.ranks.accelerator.log(numbers, step=progress.step)
        self.bar.update()
        self.ranks.say(step_line(record))
        self.empty_steps = 0 if batch is not None else self.empty_steps + 1
        for warning in warnings_of(record, self.empty_steps):
            self.ranks.say(warning)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """Two rollouts of each of two groups, to read, into samples.jsonl."""
        for group in groups[:2] if self.ranks.main else ():
            for rollout in group.rollouts[:2]:
                prompt, completion = (self.task.text(ids) for ids in (group.problem.prompt_ids, rollout.completion_ids))
                record = {"step": step, "key": group.problem.key, "reward": rollout.reward}
                record |= {"interrupted": rollout.interrupted, "prompt": prompt, "completion": completion}
                self.folder.append("samples.jsonl", record)

    def evaluation(self, record: dict[str, Any], of: dict[str, list[list[Rollout]]]) -> None:
        """Writes and prints an evaluation: `record` says when it began, `of` holds the rollouts of each data set's
        problems. The pass rate is that of the data sets that are trained on; each data set has its own beside it, if
        there are several. Under --eval_only it is printed only."""
        trained = [group for source in self.task.sources for group in of[source]]
        record = record | evaluation_record(trained) | {"device": self.device}
        apart = [source for source in of if len(self.task.sources) > 1 or source not in self.task.sources]
        if apart:
            found = record["data_sets"] = {source: evaluation_record(of[source]) for source in apart}
            record["pass_rate_of"] = {source: figures["pass_rate"] for source, figures in found.items()}
        if self.flags.eval_only:
            self.ranks.say(json.dumps(record))
        else:
            self.folder.append("eval.jsonl", record)
            counts = {"step": record["step"], "n_samples": record["n_samples"], "correct": correct_of(trained)}
            if self.task.eval_sources:
                counts["data_sets"] = {source: correct_of(of[source]) for source in self.task.eval_sources}
            self.folder.append("eval_counts.jsonl", counts)
            rates = {f"eval/{source}/pass_rate": rate for source, rate in record.get("pass_rate_of", {}).items()}
            self.ranks.accelerator.log({"eval/pass_rate": record["pass_rate"], **rates}, step=record["step"])
        self.ranks.say(evaluation_line(record))
        if record["step"] == 0:
            rollouts = [rollout for groups in of.values() for group in groups for rollout in group]
            control, flags = self.generator.length_control, self.flags
            if advice := budget_advice(rollouts, control, flags.max_budget, flags.answer_budget):
                self.ranks.say(advice)

    def picture(self, path: Path, step: int) -> None:
        """Shows the tracker a PNG, as `curve`."""
        if self.flags.report_to == "none":
            return
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB"))[None]  # (1, height, width, 3)
        for tracker in self.ranks.accelerator.trackers:
            if tracker.name == "trackio":  # accelerate's tracker has no `log_images` for it
                import trackio

                tracker.log({"curve": trackio.Image(pixels[0])}, step=step)
            else:
                shape = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                tracker.log_images({"curve": pixels}, step=step, **shape)


def correct_of(groups: Sequence[Sequence[Rollout]]) -> list[int]:
    """How many samples of each problem are correct."""
    return [sum(rollout.correct for rollout in group) for group in groups]
