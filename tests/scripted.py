"""The loop of train.py without vLLM: generators and a trainer that follow a script.

`ScriptedGenerator` has the interface that the trainer's side of `pipeline_rl.Generator` has, over the real pacer.
`play` runs the real loop over it and a trainer without a model; `batch_of` runs one step of it on groups made by hand.

`Replay` gives recorded rollouts to the real trainer. vLLM's sampling depends on the timing of requests, so two runs of it
are never equal; two runs over `Replay` are, bit for bit. Groups are drawn by step; evaluation rollouts are scored by the
trainer's own policy. `go` and `Program` run it.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

import fit_sigmoid
import runtime.parts
import runtime.run
import train
from pipeline_rl import FORCED, Group, Pacer, Rollout
from runtime import evaluation
from runtime import folder as run_folder
from runtime.command_line import parse_flags
from runtime.flags import Flags
from runtime.folder import Folder, Progress
from runtime.generator import Counters
from runtime.model import TokenRow
from runtime.parts import Run
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder
from runtime.weights import RunWeightFile
from tasks import arithmetic, warm_start


def problem(key: str, prompt_ids=(1, 2), source: str = "") -> SimpleNamespace:
    return SimpleNamespace(key=key, prompt_ids=list(prompt_ids), source=source)


def rollout(reward: float, length: int = 2, reason: str = "stop", forced: int = 0) -> Rollout:
    """`length` tokens, of which the last `forced` but one are forced; log-prob of token t is -(t + 1) / 10."""
    mask = [1] * (length - 1 - forced) + [0] * forced + [1]
    ids, logprobs = list(range(10, 10 + length)), [-(t + 1) / 10 * m for t, m in enumerate(mask)]
    versions = [0 if m else FORCED for m in mask]
    return Rollout(ids, logprobs, versions, mask, reason, bool(forced), reward=float(reward), correct=reward > 0)


class ScriptedGenerator:
    """A group is finished as soon as it is admitted, and pushed weights become live as late as the interface allows.
    `rewards(n, problem)` are those of the n-th group."""

    rewards = staticmethod(lambda n, problem: [1.0, -1.0])
    mixed = False  # evaluation completions of two versions
    logprob = 0.0
    length_control = None

    def __init__(self, problems, pacer):
        self.problems, self.pacer = problems, pacer
        self.counters, self.version, self.waiting, self.calls = Counters(), 0, None, []
        self.taken, self.under_way, self.evaluating = [], {}, False

    def start(self, weights, version=0):
        self.version = version
        self.fill()

    def fill(self):
        while self.pacer.may_admit():
            problem = next(self.problems)
            number = self.pacer.admit()
            rollouts = [self.rollout(reward) for reward in self.rewards(number, problem)]
            self.under_way[number] = problem
            self.pacer.finish(Group(number, problem, self.version, rollouts))

    def rollout(self, reward, version=None):
        version = self.version if version is None else version
        return Rollout([9, 8], [self.logprob] * 2, [version] * 2, [1, 1], "stop", reward=reward, correct=reward > 0)

    def take(self, count):
        self.fill()
        groups = self.pacer.take(count)
        if groups is None:
            self.settle()
            groups = self.pacer.take(count)
        assert groups is not None, "deadlock"
        self.taken += [self.under_way.pop(group.number) for group in groups]
        return groups

    def release(self, count):
        self.calls.append(("release", count))
        self.pacer.release(count)
        self.fill()

    def push(self, weights, version, release):
        assert not self.evaluating, "weights pushed while an evaluation runs"
        self.settle()
        self.calls.append(("push", release))
        self.waiting = version, release

    def settle(self):
        if self.waiting is not None:
            (self.version, count), self.waiting = self.waiting, None
            self.pacer.release(count)
            self.fill()

    def evaluate(self, problems, n_samples):
        self.settle()
        assert not self.evaluating
        self.evaluating = True
        self.calls.append(("evaluate", len(problems) * n_samples))
        versions = [self.version - 1 if self.mixed else self.version] * n_samples
        return [[self.rollout(1.0, version) for version in versions] for _ in problems]

    def result_of(self, future):
        self.evaluating = False
        return future

    def ask(self, call):
        self.settle()
        return call(self)

    def weight_digests(self):
        return [{"w": f"of version {self.version}"}]

    def in_loop(self, function):
        return function(self)

    def close(self):
        pass


class ScriptedTrainer:
    """No model: every step works, unless its number is in `bad` (a gradient that is not finite). Keeps the batches."""

    bad: frozenset[int] = frozenset()
    parameters_in_flops = 1
    experts = 1
    off = (0.0,)  # log-probs of the first rows, the last one of all others, too

    def __init__(self, flags=None, accelerator=None, model_folder="", longest=0):
        config = SimpleNamespace(num_experts=self.experts, get_text_config=lambda: config)
        embeddings = SimpleNamespace(weight=torch.empty(99, 0))
        self.model = torch.nn.Module()
        self.model.config, self.model.get_input_embeddings = config, lambda: embeddings
        self.model.save_pretrained = lambda *a, **k: None
        self.versions, self.steps, self.batches, self.weights = [], 0, [], {}

    @property
    def prompts(self):
        return [tuple(row.prompt_ids) for batch in self.batches for row in batch.rows]

    def score(self, rows):
        values = torch.tensor([*self.off, *[self.off[-1]] * len(rows)][: len(rows)])
        return values[:, None].expand(-1, max(len(row.completion_ids) for row in rows))

    def backward(self, batch):
        self.batches.append(batch)
        names = ("ratio_mean", "ratio_max", "log_ratio_rms", "ess", "entropy", "loss")
        return True, dict.fromkeys(names, 1.0)

    def weights_are_finite(self):
        return True

    def update(self, version):
        self.steps += 1
        self.weights = {"w": torch.tensor([float(self.steps)])}
        self.versions.append(version)
        return {"grad_norm": 1.0, "lr": 1.0, "updated": int(self.steps - 1 not in self.bad)}


class Killed(Exception):
    """Stands for SIGKILL: nothing may be saved on its way out."""


@dataclass
class Ended:
    """A run that came to its end, or was killed."""

    run: Run

    @property
    def progress(self) -> Progress:
        return self.run.progress

    @property
    def generator(self) -> ScriptedGenerator:
        return self.run.generator.on_main

    @property
    def trainer(self) -> ScriptedTrainer:
        return self.run.trainer

    @property
    def steps(self) -> list[dict]:
        return [record for record in self.run.folder.read("metrics.jsonl") if "step" in record]

    @property
    def evals(self) -> list[dict]:
        return self.run.folder.read("eval.jsonl")

    def pushes(self) -> list[tuple[str, int]]:
        """Calls of `push` and `release`, with their counts of groups."""
        return [call for call in self.generator.calls if call[0] != "evaluate"]

    def state(self):
        """Everything of the trainer's side that must be equal."""
        run = self.run
        optimizer = run.trainer.optimizer.state_dict()["state"]
        tensors = dict(run.trainer.model.state_dict())
        tensors |= {f"{i}.{name}": value for i, entry in optimizer.items() for name, value in entry.items()}
        counts = (self.progress.step, self.progress.version)
        return tensors, run.history.state_dict(), run.prompts.state_dict(), counts


def to_the_end(flags: Flags) -> Ended:
    """A run without `main`: errors come through."""
    runtime.folder.check_folder(flags)
    run = runtime.run.Run(flags)
    try:
        runtime.run.start(run)
        train.train(run)
        runtime.run.end(run)
    except Killed:
        pass
    finally:
        run.close()
    return Ended(run)


def play(
    monkeypatch, folder, generator: dict | None = None, trainer: dict | None = None, prompts: int = 40, probe_every: int = 3,
    **changes,
) -> Ended:  # fmt: skip
    """Runs the real loop and its end in `folder`; `generator` and `trainer` override what the scripted ones do.
    `prompts` is the size of the training pool."""
    monkeypatch.setattr(evaluation, "PROBE_EVERY", probe_every)
    scripted = type("Scripted", (ScriptedGenerator,), generator or {})

    def new_generator(flags, engine, task, prompts, *_):
        return scripted(prompts, runtime.parts.new_pacer(flags))

    def new_engine(flags, placement, rank, *_):
        return "no engine", RunWeightFile(rank)

    monkeypatch.setattr(runtime.parts, "new_engine", new_engine)
    monkeypatch.setattr(arithmetic, "graded_task", partial(arithmetic.graded_task, pool_size=prompts))
    monkeypatch.setattr(runtime.parts, "new_generator", new_generator)
    monkeypatch.setattr(runtime.parts, "Trainer", type("T", (ScriptedTrainer,), trainer or {}))
    monkeypatch.setattr(runtime.run, "law", lambda *_: "fitted to nothing")  # half a second
    options = {
        "output_dir": str(folder), "model": "scripted", "batch_prompts": 3, "rollouts": 2, "max_steps": 8,
        "eval_every": 4, "held_out": 5, "eval_samples": 2, "save_every": 0, "k": 2,
    }  # fmt: skip
    return to_the_end(Flags(**options | changes))


class Alone:
    """What is asked of accelerate, for one of `num_processes` ranks that never meet."""

    device = torch.device("cpu")
    is_main_process = True

    def __init__(self, process_index: int = 0, num_processes: int = 1):
        self.process_index, self.num_processes = process_index, num_processes

    def init_trackers(self, *_, **__):
        pass

    log = init_trackers


def batch_of(groups, folder, **changes):
    """(the batch that one step of the loop trains on, or None; the step's record) of these groups."""
    options = {"length_control": "none", "batch_prompts": len(groups), "rollouts": len(groups[0].rollouts)} | changes
    flags = Flags(**options, max_steps=1, k=0, output_dir=str(folder))
    pacer = Pacer(len(groups), 0)
    for group in groups:
        group.number = pacer.admit()
        pacer.finish(group)
    generator = ScriptedGenerator(iter(()), pacer)
    generator.under_way = {group.number: group.problem for group in groups}
    generator.fill = lambda: None
    trainer, ranks = ScriptedTrainer(), Ranks(Alone())
    shared = SharedGenerator(generator, SimpleNamespace(folder=folder), ranks)
    history, prompts, task = train.filters.PassRateHistory(), SimpleNamespace(epoch=0), SimpleNamespace(text=str)
    recorder = Recorder(flags, ranks, Folder(folder), task, prompts, shared)
    evaluator = SimpleNamespace(begin_if_due=str, check_bytes=str, wait=lambda progress: {})
    run = SimpleNamespace(
        flags=flags, progress=Progress(random.Random(0)), ranks=ranks, folder=recorder.folder, task=task, trainer=trainer,
        history=history, prompts=prompts, generator=shared, recorder=recorder, evaluator=evaluator,
    )  # fmt: skip
    recorder.start_clock(1, 1, {})
    recorder.open(0)
    train.train(run)
    record = run.folder.read("metrics.jsonl")[-1]
    return (trainer.batches or [None])[0], record


# ----------------------------------------------------------------------------------------------- recorded rollouts

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

    def evaluate(self, problems, n_samples):
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


def small_model(folder, **changes) -> str:
    """A tiny untrained model and its tokenizer."""
    options = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 48}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    warm_start.new_model(warm_start.ModelShape(**options | changes), seed=0).save_pretrained(folder)
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
