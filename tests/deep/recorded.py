"""Runs of train.py on recorded rollouts.

`Replay` gives recorded rollouts to the real trainer. vLLM's sampling depends on the timing of requests, so two runs of it
are never equal; two runs over `Replay` are, bit for bit. Each group is drawn by its step and its prompt; evaluation
rollouts are scored by the trainer's own policy.
"""

import io
import json
import random
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from scripted import ScriptedGenerator

import fit_sigmoid
import runtime.parts
import runtime.run
import train
from pipeline_rl import FORCED, Group, Rollout
from runtime import evaluation
from runtime.folder import Folder
from runtime.microbatches import TokenRow
from runtime.parts import Run
from tasks import arithmetic

STEPS = 7


class Replay(ScriptedGenerator):
    """Takes what was recorded, whatever the pacer says. One prompt more is always under way."""

    trainer: "train.Trainer"  # scores the evaluation rollouts

    def __init__(self, problems, flags, progress):
        super().__init__(problems, runtime.parts.new_pacer(flags))
        self.rollouts, self.progress = flags.rollouts, progress

    def fill(self):
        pass

    def take(self, count):
        problems = list(self.under_way.values())
        problems += [next(self.problems) for _ in range(count + 1 - len(problems))]
        self.under_way = {0: problems.pop()}
        return [self.group(number, problem) for number, problem in enumerate(problems)]

    def group(self, number, problem):
        draw = random.Random(f"{self.progress.step} {problem.key}")
        return Group(number, problem, self.version, [self.rollout(draw) for _ in range(self.rollouts)])

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


def record_rollouts(monkeypatch) -> None:
    """From now on, runs of train.py have recorded rollouts and twelve training prompts."""

    class ScoredRun(Run):
        def __init__(self, flags):
            super().__init__(flags)
            self.generator.on_main.trainer = self.trainer

    def new_generator(flags, engine, task, prompts, control, progress):
        return Replay(prompts, flags, progress)

    monkeypatch.setattr(arithmetic, "graded_task", partial(arithmetic.graded_task, pool_size=12))
    monkeypatch.setattr(evaluation, "PROBE_EVERY", 1)
    monkeypatch.setattr(runtime.parts, "new_generator", new_generator)
    monkeypatch.setattr(runtime.run, "Run", ScoredRun)
    monkeypatch.setattr(runtime.run, "choose_engine", lambda flags: "")  # no vLLM is imported


class Program:
    """train.py's `main`: (exit code, stdout, stderr). Without --resume it begins a short run in `folder`."""

    def __init__(self, monkeypatch, folder: Path, model: str):
        self.folder, self.model = folder, model
        monkeypatch.setattr(runtime.run.signal, "signal", lambda number, handler: None)  # pytest's own stay
        monkeypatch.setattr(fit_sigmoid, "plot_fits", lambda fits, x, path: None)  # half a second each

    def __call__(self, flags: str = "", folder: Path | None = None) -> tuple[int, str, str]:
        folder, words = folder or self.folder, flags.split()
        if words[:1] == ["--resume"]:
            words.insert(1, str(folder))
        else:
            options = f"--max_steps {STEPS} --save_every 2 --batch_prompts 3 --rollouts 4 --eval_every 3 --held_out 4"
            options += f" --pass_rate_threshold 0.6 --lr 0.01 --output_dir {folder}"
            if self.model:
                options += f" --model {self.model}"
            words = [*options.split(), *words]
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = train.main(words)
        return code, out.getvalue(), err.getvalue()


TIMED = {"seconds", "device_hours", "trainer_idle", "generator_idle", "sync_seconds", "requests"}


def steps_of(folder, name="metrics.jsonl") -> list[dict]:
    """The records of steps, or of evaluations, without what a clock measured."""
    return [{k: v for k, v in r.items() if k not in TIMED} for r in Folder(folder).read(name) if "step" in r]


def state_of(folder) -> dict:
    """state.json of the newest checkpoint."""
    return json.loads((Folder(folder).newest_checkpoint() / "state.json").read_text())


def assert_same_weights(one, other):
    """Weights and Adam's moments of the newest checkpoints, to the last bit."""
    for name in ("model.safetensors", "optimizer.bin"):
        contents = [(Folder(folder).newest_checkpoint() / name).read_bytes() for folder in (one, other)]
        assert contents[0] == contents[1], name


def assert_same_run(one, other):
    """Two runs wrote the same, but for what a clock measured."""
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert steps_of(one, name) == steps_of(other, name), name
    for name in ("progress", "random", "history", "prompts"):
        assert state_of(one)[name] == state_of(other)[name], name
    assert_same_weights(one, other)
