"""A recorded step, and the trainer and the generator that are asked about it. replay.py says what for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import filters
import losses
import train
from lab.record import FOLDER, MOMENTS
from pipeline_rl import Group, Rollout, lags
from runtime.flags import DEFAULTS, Flags, UsageError, check_flags, parse_flags
from runtime.microbatches import TokenRow
from runtime.parts import Run
from runtime.trainer import Trainer, TrainingBatch, chosen_loss, clip_options
from tasks.prompts import Problem

# Flags that change what is made of a batch, and not what is sampled.
REPLAYED = (
    "loss", "eps_max", "eps_low", "eps_high", "aggregation", "normalize_advantages", "zero_variance",
    "truncated_rollouts", "entropy_coef", "fp32_head", "dtype",
)  # fmt: skip
PARTS = 8  # of the problems of g*: the even ones are one half


@dataclass
class Step:
    """A recorded step, and what was measured there."""

    folder: Path  # of the model
    number: int
    version: int
    groups: list[Group]
    rewards: Tensor  # (N,)
    variance: Tensor | None = None  # AdamW's second moments, all parameters in one row
    pass_rate: float = 0.0
    agreement: float = 0.0  # of the two halves of g*
    norm: float = 0.0  # of the recipe's gradient
    stars: Tensor | None = None  # (PARTS, parameters) g* by parts of its problems
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of each variant
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)  # of tokens silenced, and lowered
    signals: dict[str, list[float]] = field(default_factory=dict)  # of each variant, one for each part of g*

    def forget_gradients(self) -> None:
        """Keeps the signals, and g* in one part."""
        self.gradients.clear()
        self.stars = self.stars.mean(0, keepdim=True)

    @property
    def lag(self) -> float:
        """Mean over the tokens that train."""
        return float(
            np.mean([lag for rollout in train.rollouts_of(self.groups) for lag in lags(rollout, self.version)])
        )


@dataclass
class Variant:
    """What the batch is asked: the flags of the recipe with some changes."""

    name: str
    flags: Flags
    fresh: bool = False  # `lag=0`


def variant_of(text: str, recipe: Flags) -> Variant:
    """`dapo,eps_high=0.28` as flags. Raises UsageError for what cannot be replayed."""
    changes, fresh = {}, False
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            name, value = "loss", part
        if (name, value) == ("lag", "0"):
            fresh = True
            continue
        full = [flag for flag in REPLAYED if flag == name] or [flag for flag in REPLAYED if flag.startswith(name)]
        if len(full) != 1:
            raise UsageError(f"--against {text}: {name} cannot be replayed; these can: {', '.join(REPLAYED)}, lag=0.")
        changes[full[0]] = value
    read = parse_flags([f"--{name}={value}" for name, value in changes.items()], "")
    if "loss" in changes:  # another loss has clips of its own
        recipe = replace(recipe, **{name: DEFAULTS[name] for name in ("eps_max", "eps_low", "eps_high")})
    flags = replace(recipe, **{name: getattr(read, name) for name in changes})
    check_flags(flags)
    if flags.loss == "tis" and flags.schedule != "pipeline":
        raise UsageError(f"--against {text}: tis cannot be replayed there, its old log-probs were not kept.")
    return Variant(text, flags, fresh)


def recorded_steps(folder: Path, at: Sequence[str]) -> list[Path]:
    """The folders of a run's recorded steps, those of `--at` if it is given: `15 18` or `15:45:3`."""
    steps = {int(path.name[5:]): path for path in sorted((folder / FOLDER).glob("step-*")) if path.name[5:].isdecimal()}
    if not steps:
        raise UsageError(f"{folder} has no recorded steps; train with --record_every 10.")
    chosen = list(steps)
    if at:
        try:
            bounds = [list(map(int, text.split(":"))) for text in at]
            chosen = [n for first, *rest in bounds for n in (range(first, rest[0] + 1, *rest[1:]) if rest else [first])]
        except (ValueError, TypeError) as error:
            raise UsageError(f"--at {' '.join(at)}: steps are numbers, or FIRST:LAST:EVERY.") from error
        if missing := [number for number in chosen if number not in steps]:
            raise UsageError(f"--at: step {missing[0]} is not recorded; these are: {', '.join(map(str, steps))}.")
    return [steps[number] for number in chosen]


def read_step(folder: Path, batch: Path, names: dict[str, torch.Size]) -> Step:
    """A step from its files; `names` are the model's parameters. Raises UsageError."""
    try:
        lines = [json.loads(line) for line in batch.read_text().splitlines()]
        record = {"step": 0, "version": 0}
        if (folder / "run.json").exists():
            record |= json.loads((folder / "run.json").read_text())
        step = Step(folder, record["step"], record["version"], *groups_of(lines))
        if (folder / MOMENTS).exists():
            moments = load_file(folder / MOMENTS)
            columns = [moments[f"exp_avg_sq {name}"] for name in names]
            if [column.shape for column in columns] != list(names.values()):
                raise ValueError("its moments have another shape")
            step.variance = torch.cat([column.flatten() for column in columns])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{batch.parent} is no step of this model ({type(error).__name__}: {error}).") from error
    return step


def groups_of(lines: list[dict]) -> tuple[list[Group], Tensor]:
    """The groups of a batch.jsonl, and the rewards (N,)."""
    groups: list[Group] = []
    for line in lines:
        ids = line["completion_ids"]
        if not groups or groups[-1].number != line["group"]:
            problem = Problem(line.get("key", ""), tuple(line["prompt_ids"]), None)
            groups.append(Group(line["group"], problem, 0, []))
        groups[-1].rollouts.append(
            Rollout(
                ids, line["logprobs"], line.get("versions", [0] * len(ids)), line.get("mask", [1] * len(ids)),
                line.get("finish_reason", "stop"), reward=line["reward"],
                correct=line.get("correct", line["reward"] > 0),
            )
        )  # fmt: skip
    return groups, torch.tensor([line["reward"] for line in lines])


# -------------------------------------------------------------------------------------------------------- the machinery


class Replayer:
    """Trainer and generator of a run, whose weights are those of one recorded step at a time."""

    def __init__(self, flags: Flags, model: Path, output: str):
        """`output`: an empty folder, which stays so. Raises UsageError."""
        self.recipe = flags
        self.run = Run(replace(flags, model=str(model), output_dir=output, resume="", overwrite=False))
        self.trainer = self.run.trainer
        self.generator = self.run.generator.on_main
        self.generator.problems = iter(())  # nothing is sampled but what is asked for
        self.generator.start(self.trainer.weights)
        self.others: dict[tuple[str, bool], Trainer] = {}  # trainers with another dtype or head
        self.names = {name: parameter.shape for name, parameter in self.trainer.model.named_parameters()}

    def close(self) -> None:
        self.run.close()

    def load(self, step: Step) -> None:
        """Trainers and engine get the weights of this step. Raises UsageError for those of another model."""
        from transformers import AutoModelForCausalLM

        try:
            weights = AutoModelForCausalLM.from_pretrained(step.folder, dtype=torch.float32).state_dict()
            for trainer in (self.trainer, *self.others.values()):
                trainer.model.load_state_dict(weights)
                if trainer.low_precision:
                    trainer.low_precision.round_masters()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UsageError(f"{step.folder} has no weights of this model ({str(error).splitlines()[0]}).") from error
        largest = max(max([*row.prompt_ids, *row.completion_ids]) for row in train.token_rows(step.groups))
        if largest >= self.trainer.model.get_input_embeddings().weight.shape[0]:
            raise UsageError(f"{step.folder}: the batch is of another model: it has token {largest}.")
        self.generator.push(self.trainer.weights, step.version, release=0)
        self.generator.settle()

    def trainer_of(self, flags: Flags) -> Trainer:
        """The trainer, set to compute with these flags."""
        key = flags.dtype, flags.fp32_head
        if key == (self.recipe.dtype, self.recipe.fp32_head):
            trainer = self.trainer
        elif key in self.others:
            trainer = self.others[key]
        else:
            trainer = Trainer(flags, self.run.ranks.accelerator, self.run.flags.model, self.trainer.longest)
            trainer.model.load_state_dict(self.trainer.model.state_dict())
            self.others[key] = trainer
        trainer.flags, trainer.policy_loss, trainer.clip_options = flags, chosen_loss(flags), clip_options(flags)
        return trainer

    def batch(self, groups: Sequence[Group], rewards: Tensor, flags: Flags) -> TrainingBatch | None:
        """What the loop of train.py makes of these groups; None if nothing is left to train on."""
        group_ids = torch.arange(len(groups)).repeat_interleave(len(groups[0].rollouts))  # (N,)
        varied = filters.has_variance(rewards, group_ids)  # (N,)
        keep = torch.ones_like(varied) if flags.zero_variance == "keep" else varied  # (N,)
        if not varied.any():
            return None
        advantages = torch.zeros_like(rewards)  # (N,)
        advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], flags.normalize_advantages)
        old = self.trainer.score(train.token_rows(groups)) if flags.loss == "tis" else None
        flags = replace(flags, rollouts=len(groups[0].rollouts))
        return train.select_rows(groups, keep, advantages, old, flags)[0]

    def fresh_batch(self, step: Step) -> tuple[list[Group], Tensor]:
        """A batch of the same problems, sampled with the weights that are loaded, as the run samples."""
        problems = {problem.key: problem for problem in self.run.task.train}
        asked = [problems.get(group.problem.key) for group in step.groups]
        if None in asked:
            raise UsageError("lag=0 needs the problems of the batch, and the task has none with their keys.")
        self.generator.problems, self.generator.exhausted = iter(asked), False
        self.generator._run(self.generator._admit)
        groups = self.generator.take(len(asked))
        self.generator.release(len(asked))
        return groups, train.batch_rewards(groups, self.recipe, step.number)

    def direction(self, step: Step, problems: list[Problem], samples: int) -> Tensor:
        """(PARTS, parameters) g* by parts of the problems; also the pass rate of the step."""
        future = self.generator.evaluate(problems, samples)
        groups = self.generator.result_of(future)
        step.pass_rate = float(np.mean([rollout.correct for group in groups for rollout in group]))
        trainer = self.trainer_of(replace(self.recipe, entropy_coef=0.0))
        trainer.policy_loss, trainer.clip_options = reinforce, {}
        stars = torch.empty(PARTS, sum(shape.numel() for shape in self.names.values()))
        for i in range(PARTS):
            stars[i] = self.part(trainer, problems[i::PARTS], groups[i::PARTS])
        return stars

    def part(self, trainer: Trainer, problems: list[Problem], groups: list[list[Rollout]]) -> Tensor:
        """The gradient of the mean reward over these problems, to be maximized."""
        rows, logprobs, advantages = [], [], []
        for problem, group in zip(problems, groups, strict=True):
            rewards = torch.tensor([float(rollout.correct) for rollout in group])
            for rollout, reward in zip(group, rewards.tolist(), strict=True):
                # The baseline is the mean of the others: it does not depend on this completion.
                advantage = (reward - float(rewards.mean())) * len(group) / (len(group) - 1)
                if advantage:
                    rows.append(TokenRow(problem.prompt_ids, rollout.completion_ids, rollout.mask))
                    logprobs.append(rollout.logprobs)
                    advantages.append(advantage)
        if not rows:
            return torch.zeros(sum(shape.numel() for shape in self.names.values()))
        mask = train.pad([row.mask for row in rows], torch.bool)  # (n, T)
        weights = mask / sum(map(len, groups))  # (n, T)
        behaviour = train.pad(logprobs, torch.float32)  # (n, T)
        return -gradient(trainer, TrainingBatch(rows, behaviour, mask, torch.tensor(advantages), weights))


def reinforce(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> losses.LossAndMetrics:
    """CISPO whose ratios are 1."""
    return losses.cispo(logprobs, logprobs.detach(), advantages, mask)


def gradient(trainer: Trainer, batch: TrainingBatch) -> Tensor:
    """(parameters,) what `trainer.backward` makes of the batch."""
    trainer.optimizer.zero_grad()
    trainer.backward(batch)
    columns = [torch.zeros_like(x) if x.grad is None else x.grad for x in trainer.model.parameters()]
    vector = torch.cat([column.flatten() for column in columns]).cpu()
    trainer.optimizer.zero_grad()
    return vector


def metric(variance: Tensor | float | None) -> Tensor | float:
    """Adam's 1 / (sqrt(v) + eps), with a share of the mean as eps: what has hardly ever had a gradient says nothing."""
    if variance is None:
        return 1.0
    root = variance.sqrt()
    return 1 / (root + 1e-3 * root.mean() + 1e-30)


def cosine(one: Tensor, other: Tensor, weighting: Tensor | float) -> float:
    """Of two gradients in this metric."""
    sizes = (one @ (weighting * one)).sqrt() * (other @ (weighting * other)).sqrt()
    return float(one @ (weighting * other) / sizes.clamp_min(1e-30))
