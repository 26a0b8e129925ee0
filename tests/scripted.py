"""The loop of train.py without vLLM: generators and a trainer that follow a script.

`ScriptedGenerator` has the interface that the trainer's side of `generator.Generator` has, over the real pacer.
`play` runs the real loop over it and a trainer without a model; `batch_of` runs one step of it on groups made by hand.
"""

import random
from functools import partial
from types import SimpleNamespace

import torch

import runtime.parts
import runtime.run
import train
from generator import Counters
from pipeline_rl import FORCED, Group, Pacer, Rollout
from runtime import evaluation
from runtime.flags import Flags
from runtime.folder import Folder, Progress
from runtime.parts import Run
from runtime.ranks import GeneratorForRanks, Ranks
from runtime.recorder import Recorder
from runtime.weights import RunWeightFile
from tasks import arithmetic


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

    def evaluate(self, problems, n_samples, longest_leg=0):
        self.settle()
        assert not self.evaluating
        self.evaluating = True
        self.calls.append(("evaluate", len(problems) * n_samples))
        versions = [self.version - 1 if self.mixed else self.version] * n_samples
        return [[self.rollout(1.0, version) for version in versions] for _ in problems]

    def result_of(self, future):
        self.evaluating = False
        return future

    def in_loop(self, function):
        return function(self)

    def close(self):
        pass


class ScriptedTrainer:
    """No model: every step works, unless its number is in `bad` (a gradient that is not finite). Keeps the batches."""

    bad: frozenset[int] = frozenset()
    parameters_in_flops = 1
    note = ""
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
        return True, dict.fromkeys(names, 1.0) | {"forward_tokens": sum(map(len, batch.rows))}

    def weights_are_finite(self):
        return True

    def update(self, version):
        self.steps += 1
        self.weights = {"w": torch.tensor([float(self.steps)])}
        self.versions.append(version)
        return {"grad_norm": 1.0, "lr": 1.0, "updated": int(self.steps - 1 not in self.bad)}


def play(
    monkeypatch, folder, generator: dict | None = None, trainer: dict | None = None, prompts: int = 40, probe_every: int = 3,
    **changes,
) -> SimpleNamespace:  # fmt: skip
    """Runs the real loop and its end in `folder`; `generator` and `trainer` override what the scripted ones do.
    `prompts` is the size of the training pool. Returns the run that came to its end, and what it wrote."""
    monkeypatch.setattr(evaluation, "PROBE_EVERY", probe_every)
    scripted = type("Scripted", (ScriptedGenerator,), generator or {})

    def new_generator(flags, engine, task, prompts, *_):
        return scripted(prompts, runtime.parts.new_pacer(flags))

    def new_engine(flags, devices, rank, *_):
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
    run = Run(Flags(**options | changes))
    try:  # without `main`: errors come through
        runtime.run.start(run)
        train.train(run)
        runtime.run.end(run)
    finally:
        run.close()
    records, generator = run.folder.read("metrics.jsonl"), run.generator.on_main
    return SimpleNamespace(
        run=run,
        progress=run.progress,
        generator=generator,
        trainer=run.trainer,
        steps=[record for record in records if "step" in record],
        evals=run.folder.read("eval.jsonl"),
        # and releases, with their counts of groups
        pushes=lambda: [call for call in generator.calls if call[0] != "evaluate"],
    )


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
    shared = GeneratorForRanks(generator, SimpleNamespace(folder=folder), ranks)
    history, prompts, task = train.filters.PassRateHistory(), SimpleNamespace(epoch=0), SimpleNamespace(text=str)
    recorder = Recorder(flags, ranks, Folder(folder), task, prompts, shared)
    evaluator = SimpleNamespace(begin_if_due=str, wait=lambda progress: {})
    run = SimpleNamespace(
        flags=flags, progress=Progress(random.Random(0)), ranks=ranks, folder=recorder.folder, task=task, trainer=trainer,
        history=history, prompts=prompts, generator=shared, recorder=recorder, evaluator=evaluator,
    )  # fmt: skip
    recorder.start_clock(1, 1, {})
    recorder.open(0)
    train.train(run)
    record = run.folder.read("metrics.jsonl")[-1]
    return (trainer.batches or [None])[0], record


def small_model(folder, **changes) -> str:
    """A tiny untrained model and its tokenizer."""
    from tiny_trainer import saved_model  # its imports take seconds

    options = {"num_hidden_layers": 1, "vocab_size": len(arithmetic.WORDS), "tie_word_embeddings": True}
    options |= {"initializer_range": 0.08, "eos_token_id": arithmetic.IDS["<eos>"], "max_position_embeddings": 256}
    arithmetic.word_tokenizer().save_pretrained(folder)
    return saved_model("Qwen3", folder, **options | changes)
