"""Runs of train.py on recorded rollouts.

`Replay` gives recorded rollouts to the real trainer. vLLM's sampling depends on the timing of requests, so two runs of it
are never equal; two runs over `Replay` are, bit for bit. Groups are drawn by step; evaluation rollouts are scored by the
trainer's own policy. `go` and `Program` run it.
"""

import random
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from scripted import Ended, Killed, ScriptedGenerator, to_the_end

import fit_sigmoid
import runtime.parts
import runtime.run
import train
from pipeline_rl import FORCED, Group, Rollout
from runtime import evaluation
from runtime import folder as run_folder
from runtime.flags import parse_flags
from runtime.folder import Folder
from runtime.microbatches import TokenRow
from runtime.parts import Run
from tasks import arithmetic

STEPS = 7


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
        return Group(number, problem, self.version, rollouts)

    def rollout(self, draw):
        n = draw.randint(2, 12)
        ids, correct = [draw.randrange(len(arithmetic.WORDS)) for _ in range(n)], draw.random() < 0.5
        logprobs = [draw.uniform(-4.5, -3.0) for _ in range(n)]
        mask = [1] * n
        if n > 6:  # a forced phrase in the middle
            mask[3], logprobs[3] = 0, 0.0
        versions = [self.version if m else FORCED for m in mask]
        return Rollout(ids, logprobs, versions, mask, "stop", n > 6, 0, 1.0 if correct else -1.0, correct)

    def evaluate(self, problems, n_samples, longest_leg=0):
        draw = random.Random("evaluation")
        groups = [[self.rollout(draw) for _ in range(n_samples)] for _ in problems]
        pairs = [(p, r) for p, group in zip(problems, groups, strict=True) for r in group]
        scored = self.trainer.score([TokenRow(p.prompt_ids, r.completion_ids, r.mask) for p, r in pairs]).tolist()
        for (_, rollout), logprobs in zip(pairs, scored, strict=True):
            rollout.logprobs = logprobs[: len(rollout.completion_ids)]
        return groups

    def push(self, tensors, version, release):
        self.version = version

    def release(self, count):
        pass


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

    class ScoredRun(Run):
        def __init__(self, flags):
            super().__init__(flags)
            self.generator.on_main.trainer = self.trainer

    def new_generator(flags, engine, task, prompts, control, progress):
        return replay(prompts, flags, progress)

    monkeypatch.setattr(evaluation, "PROBE_EVERY", 1)
    monkeypatch.setattr(run_folder, "KEEP", 9)
    monkeypatch.setattr(runtime.parts, "new_generator", new_generator)
    monkeypatch.setattr(runtime.run, "Run", ScoredRun)
    empty = Image.new("RGB", (4, 3))
    monkeypatch.setattr(fit_sigmoid, "plot_fits", lambda fits, x, path: empty.save(path))  # half a second each


def go(monkeypatch, folder, model, *extra, killed_after=None, script: dict | None = None) -> Ended:
    """Runs the real loop on recorded rollouts, without `main`: errors come through."""
    record_rollouts(monkeypatch, {"killed_after": killed_after} | (script or {}))
    return to_the_end(parse_flags(arguments(folder, model, *extra), ""))


class Program:
    """train.py's `main` on recorded rollouts: (exit code, stdout, stderr)."""

    def __init__(self, monkeypatch, folder: Path, model: str, capsys):
        self.monkeypatch, self.folder, self.model, self.capsys = monkeypatch, folder, model, capsys
        monkeypatch.setattr(runtime.run.signal, "signal", lambda number, handler: None)  # pytest's own stay
        monkeypatch.setattr(runtime.run, "choose_engine", lambda flags: [])  # no vLLM is imported

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
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_times(one, name) == without_times(other, name), name


def assert_same_state(one, other):
    (a, *rest_a), (b, *rest_b) = one.state(), other.state()
    assert rest_a == rest_b and a.keys() == b.keys()
    for name in a:
        assert torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])), name
