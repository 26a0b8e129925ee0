"""Runs of the real loop, with the real trainer and real files, on recorded rollouts instead of a generator's.

vLLM's sampling depends on the timing of requests, so two runs of it are never equal; two runs over `Replay` are, bit for
bit, and can be compared. Groups are drawn by step; evaluation rollouts are scored by the trainer's own policy.
"""

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from PIL import Image
from scripted import ScriptedGenerator

import pipeline_rl
import runtime.parts
import train
from runtime import closing, evaluation, run_folder
from runtime.flags import parse_flags
from runtime.model import Row
from runtime.run_folder import Folder, Progress
from tasks import arithmetic, warm_start

STEPS = 7


class Killed(Exception):
    """Stands for SIGKILL: nothing may be saved on its way out."""


class Replay(ScriptedGenerator):
    """Takes what was recorded, whatever the pacer says. `killed_after`: the step whose groups never come."""

    killed_after: int | None = None
    trainer: "train.Trainer"  # scores the evaluation rollouts

    def __init__(self, problems, flags, progress):
        super().__init__(problems, runtime.parts.new_pacer(flags))
        self.rollouts, self.progress = flags.rollouts, progress

    @property
    def step(self):
        return self.progress.step

    def fill(self):
        pass

    def take(self, count):
        if self.step == self.killed_after:
            raise Killed
        draw = random.Random(f"recorded {self.step}")
        return [self.group(self.step * count + i, next(self.problems), draw) for i in range(count)]

    def group(self, number, problem, draw):
        rollouts = [self.rollout(draw) for _ in range(self.rollouts)]
        return pipeline_rl.Group(number, problem, self.version, rollouts)

    def rollout(self, draw):
        n = draw.randint(2, 12)
        ids, correct = [draw.randrange(len(arithmetic.WORDS)) for _ in range(n)], draw.random() < 0.5
        logprobs = [draw.uniform(-4.5, -3.0) for _ in range(n)]
        mask = [1] * n
        if n > 6:  # a forced phrase in the middle
            mask[3], logprobs[3] = 0, 0.0
        versions = [self.version if m else pipeline_rl.FORCED for m in mask]
        return pipeline_rl.Rollout(ids, logprobs, versions, mask, "stop", n > 6, 0, 1.0 if correct else -1.0, correct)

    def evaluate(self, problems, n_samples):
        draw = random.Random("evaluation")
        groups = [[self.rollout(draw) for _ in range(n_samples)] for _ in problems]
        pairs = [(p, r) for p, group in zip(problems, groups, strict=True) for r in group]
        scored = self.trainer.score([Row(p.prompt_ids, r.completion_ids, r.mask) for p, r in pairs]).tolist()
        for (_, rollout), logprobs in zip(pairs, scored, strict=True):
            rollout.logprobs = logprobs[: len(rollout.completion_ids)]
        return groups

    def push(self, tensors, version, release):
        self.version = version

    def release(self, count):
        pass


def small_model(folder, **changes) -> str:
    """A tiny untrained model and its tokenizer."""
    options = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 48}
    warm_start.new_model(replace(warm_start.SHAPES["xs"], **options | changes), seed=0).save_pretrained(folder)
    arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)


def arguments(folder, model, *extra) -> list[str]:
    """The command line of a short run, or of its resumption."""
    if "--resume" in extra:
        return ["--resume", str(folder), *extra[1:]]
    options = (
        f"--max_steps {STEPS} --save_every 2 --batch_prompts 3 --rollouts 4 --eval_every 3 "
        "--held_out 4 --pass_rate_threshold 0.6 --lr 0.01"
    )
    return ["--output_dir", str(folder), "--model", model, *options.split(), *extra]


def record_rollouts(monkeypatch, script: dict | None = None) -> None:
    """From now on, runs of train.py have recorded rollouts and twelve training prompts; `script` overrides what `Replay`
    does."""
    monkeypatch.setattr(arithmetic, "graded_task", partial(arithmetic.graded_task, pool_size=12))
    replay = type("Scripted", (Replay,), script or {})
    new_parts = runtime.parts.new_parts

    def new_scored_parts(flags, progress):
        parts = new_parts(flags, progress)
        parts.generator.on_main.trainer = parts.trainer
        return parts

    def new_generator(flags, engine, task, prompts, control, progress):
        return replay(prompts, flags, progress)

    monkeypatch.setattr(evaluation, "PROBE_EVERY", 1)
    monkeypatch.setattr(run_folder, "KEEP", 9)
    monkeypatch.setattr(runtime.parts, "new_generator", new_generator)
    monkeypatch.setattr(train, "new_parts", new_scored_parts)
    empty = Image.new("RGB", (4, 3))
    monkeypatch.setattr(closing.forecast, "plot_curves", lambda _, path: empty.save(path))  # half a second each


@dataclass
class Ended:
    """A run that came to its end, or was killed."""

    parts: runtime.parts.Parts
    progress: Progress

    def state(self):
        """Everything of the trainer's side that must be equal."""
        parts = self.parts
        optimizer = parts.trainer.optimizer.state_dict()["state"]
        tensors = dict(parts.trainer.model.state_dict())
        tensors |= {f"{i}.{name}": value for i, entry in optimizer.items() for name, value in entry.items()}
        counts = (self.progress.step, self.progress.version)
        return tensors, parts.history.state_dict(), parts.prompts.state_dict(), counts


def go(monkeypatch, folder, model, *extra, killed_after=None, script: dict | None = None) -> Ended:
    """Runs the real loop on recorded rollouts, without `main`: errors come through."""
    record_rollouts(monkeypatch, {"killed_after": killed_after} | (script or {}))
    flags = parse_flags(arguments(folder, model, *extra), "")
    progress = Progress(random.Random(flags.seed))
    parts = train.new_parts(flags, progress)
    try:
        train.start(flags, parts, progress)
        train.train(flags, parts, progress)
        train.end_of_run(flags, parts, progress)
    except Killed:
        pass
    finally:
        parts.close()
    return Ended(parts, progress)


class Program:
    """train.py's `main` on recorded rollouts: (exit code, stdout, stderr)."""

    def __init__(self, monkeypatch, folder: Path, model: str, capsys):
        self.monkeypatch, self.folder, self.model, self.capsys = monkeypatch, folder, model, capsys
        monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)  # pytest's own stay

    def __call__(self, *extra, folder: Path | None = None, script: dict | None = None) -> tuple[int, str, str]:
        record_rollouts(self.monkeypatch, script)
        code = train.main(arguments(folder or self.folder, self.model, *extra))
        return code, *self.capsys.readouterr()


def without_times(folder, name):
    """The records of a log without what a clock measured; notes between the steps are left out."""
    timed = {"seconds", "device_hours", "trainer_idle", "generator_idle", "sync_seconds", "save_seconds", "requests"}
    return [{k: v for k, v in r.items() if k not in timed} for r in Folder(folder).read(name) if "step" in r]


def assert_same_logs(one, other):
    """Two runs wrote the same, but for what a clock measured."""
    for name in ("metrics.jsonl", "eval.jsonl", "eval_counts.jsonl", "groups.jsonl"):
        assert without_times(one, name) == without_times(other, name), name
