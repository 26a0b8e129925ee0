"""Evaluations, and the proof that the generator has the trainer's weights.

Weights that never arrive raise no error: the generator keeps sampling from an old policy, and training becomes worse
for no visible reason. So the trainer scores what the generator sampled. Every token carries the version that sampled
it; on completions that one version sampled from prompt to end, the two sides' log-probs must agree up to rounding, and
if they do not, the run ends. (Tokens sampled over older keys and values may differ with nothing wrong; there the gap
only shows in the logged ratios.)

The completions are those of an evaluation of the held-out prompts (unless --eval_temperature gives it another
temperature), or, between evaluations, of a probe: one completion for each of a few held-out prompts. Both run while the
trainer computes the next gradient, and are awaited just before that gradient is applied: then the trainer still has the
weights that sampled them.

In bfloat16 rounding hides an update, or a hundred of them, from log-probs, but not from the bytes of the weights. So
before and after the first update and at every `save_every` both sides hash their parameters. If the trainer's have
changed and those of one of the engine's workers have not, no update reached that worker. And the tensors that all
workers held at first byte for byte as the trainer does (vLLM fuses, pads, splits or repacks the others, but keeps norms
and most embeddings) must be the trainer's each time: an engine that is one update behind changes, too.
"""

import hashlib
import random
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.flags import Flags, eval_temperature, has_adapters
from runtime.model import Row, experts
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder
from runtime.run_folder import Progress
from runtime.trainer import Trainer

CHECK_ROWS = 64  # completions that are scored
PROBES = 16  # completions of a probe

# Mean |difference| of log-probs, in nats per token, that rounding explains. float32: measured up to 4e-6, while weights
# one update old differ by 1.3e-3 to 5.4e-2 (lr 5e-4). bfloat16: measured up to 0.04 (random Qwen3s, more the further
# apart the logits are: 0.1M parameters 7e-4 to 8e-3, 0.9M .018, 6M 2e-3 to .033, 8M .04, 29M 4e-3 to .025; an FP32
# head changes little), so that only weights that are far off are noticed.
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.1}


class RunFailed(RuntimeError):
    """Going on would train on what cannot be trusted."""


@dataclass
class Check:
    """An evaluation or a probe under way."""

    future: Future | None  # of the generator's rollouts; None on ranks other than 0
    problems: list[Any]
    version: int
    record: dict[str, Any] | None  # of an evaluation: step and compute when it began; None for a probe


class Hashes(NamedTuple):
    """Of the weights of `version`, taken at `step`."""

    step: int
    version: int
    trainer: list[int]  # one for each tensor
    engine: list[dict[str, str]]  # one for each parameter of each worker
    equal: set[str]  # names of the tensors that every worker which has them holds as the trainer does


class Evaluator:
    """Begins evaluations and probes when they are due, and finishes them with the weights check. Call it on every
    rank."""

    def __init__(
        self, flags: Flags, ranks: Ranks, task: Any, trainer: Trainer, generator: SharedGenerator, recorder: Recorder
    ):
        self.flags, self.ranks, self.trainer, self.generator, self.recorder = flags, ranks, trainer, generator, recorder
        self.held_out, self.sources = task.held_out, [*task.sources, *task.eval_sources]
        self.problems = [
            problem
            for source in self.sources
            for problem in [p for p in self.held_out if p.source == source][: flags.eval_problems]
        ]
        self.under_way: Check | None = None
        self.hashes: list[Hashes] = []  # the first and the last ones

    def begin_if_due(self, progress: Progress) -> None:
        """Starts an evaluation (at the first step and every `eval_every`) or a probe (every `probe_every`) at the live
        version, if one is due. It waits for the last push, and the next push waits for it."""
        self.check_arrival(progress)
        flags, step = self.flags, progress.step
        before = step - (flags.k if flags.schedule == "ppo_off_policy" else 1)  # steps come in rounds of k there
        record = self.under_way and self.under_way.record
        last = record["step"] if record else progress.evaluated
        if last < 0 or step // flags.eval_every > last // flags.eval_every:
            self.finish(progress)  # what began before steps that made no update: the version is still the same
            self.begin_evaluation(progress)
        elif self.under_way is None and step // flags.probe_every > before // flags.probe_every:
            draw = random.Random(f"{flags.seed} probe {step}")
            problems = draw.sample(self.held_out, min(PROBES, len(self.held_out)))
            self.under_way = Check(self.generator.evaluate(problems, 1), problems, progress.version, None)

    def check_arrival(self, progress: Progress) -> None:
        """Compares both sides' hashes with each other's and with the last ones: before and after the first update, then
        at the first one after each multiple of `save_every`. Call it on every rank after a push. Raises RunFailed."""
        # vLLM's CPU build keeps linear layers repacked, where no hash sees them, and adapters change nothing else.
        if has_adapters(self.flags) and self.flags.engine == "vllm" and not torch.cuda.is_available():
            return
        every, last = self.flags.save_every, self.hashes[-1] if self.hashes else None
        saved = every and last and progress.step // every > last.step // every
        if last and (progress.version == last.version or (len(self.hashes) > 1 and not saved)):
            return
        held = self.ranks.from_main(lambda: self.generator.on_main.ask(lambda engine: engine.weight_digests()))
        of: dict[str, set[str]] = {}  # name -> its hashes in the workers, which put their own name before it
        for name, digest in (entry for worker in held for entry in worker.items()):
            of.setdefault(name.rpartition(":")[2], set()).add(digest)
        compared = self.hashes[0].equal if last else set(of)
        sent, equal, other = [], set[str](), list[str]()
        for name, tensor in self.trainer.weights.items():
            sent.append(torch.hash_tensor(tensor).item())
            if name in compared:
                (equal.add if of[name] <= {str(sent[-1]), sha256(tensor)} else other.append)(name)
        self.hashes = [*self.hashes[:1], Hashes(progress.step, progress.version, sent, held, equal)]
        stale = [i for i, (old, new) in enumerate(zip(last.engine, held, strict=True)) if old == new] if last else []
        if stale and sent != last.trainer:
            raise RunFailed(
                f"weights check: workers {stale} of the engine hold the same bytes at version {progress.version} as at "
                f"{last.version}, but the trainer's weights have changed: no update reached them"
            )
        if other and (last or not equal):
            raise RunFailed(
                f"weights check: at version {progress.version} the engine holds other bytes than the trainer, as of "
                f"{other[0]}: its weights are not those of this version"
            )

    def begin_evaluation(self, progress: Progress) -> None:
        """Starts an evaluation of the held-out prompts and of the evaluation sets, at the live version."""
        record = {"step": progress.step, "version": progress.version} | self.recorder.compute()
        future = self.generator.evaluate(self.problems, self.flags.eval_samples, eval_temperature(self.flags))
        self.under_way = Check(future, self.problems, progress.version, record)

    def finish(self, progress: Progress) -> dict[str, float]:
        """Waits for what is under way, records an evaluation, and compares the log-probs. Must come before the weights
        change. Returns {"logprob_gap": nats per token}, or {} if nothing was under way. Raises RunFailed."""
        if self.under_way is None:
            return {}
        rows, behaviour = self.ranks.from_main(lambda: self._result(self.under_way, progress.rng))
        check, self.under_way = self.under_way, None
        if check.record is not None:
            progress.evaluated = check.record["step"]  # steps without an update may have come since
            if eval_temperature(self.flags) != self.flags.temperature:
                return {}  # the trainer's log-probs are those at --temperature, at which probes sample
        gap = logprob_gap(self.trainer.score(rows), behaviour, rows, experts(self.trainer.model.config) > 1)
        largest = LARGEST_GAP[self.flags.dtype]
        if not gap <= largest:  # NaN, too
            raise RunFailed(
                f"weights check: at version {check.version} trainer and generator differ by {gap:.1e} nats per token, "
                f"more than {largest} ({self.flags.dtype}): the generator has other weights than the trainer, or "
                "computes with less precision (TF32, quantisation)"
            )
        return {"logprob_gap": gap}

    def _result(self, check: Check, rng: random.Random) -> tuple[list[Row], list[list[float]]]:
        """Rank 0 waits for the rollouts; returns some of them as rows, with the generator's log-probs."""
        groups = self.generator.on_main.result_of(check.future)
        flat = [(problem, r) for problem, group in zip(check.problems, groups, strict=True) for r in group]
        mixed = sum(any(v != check.version for v, m in zip(r.versions, r.mask, strict=True) if m) for _, r in flat)
        if mixed:
            raise RunFailed(
                f"weights check: {mixed} evaluation completions have tokens that version {check.version} did not sample"
            )
        if check.record is not None:
            of: dict[str, list[Any]] = {source: [] for source in self.sources}
            for problem, group in zip(check.problems, groups, strict=True):
                of[problem.source].append(group)
            self.recorder.evaluation(check.record, of)
        chosen = rng.sample(flat, min(CHECK_ROWS, len(flat)))
        rows = [Row(problem.prompt_ids, r.completion_ids, r.mask) for problem, r in chosen]
        return rows, [r.logprobs for _, r in chosen]


def sha256(tensor: torch.Tensor) -> str:
    """vLLM's hash of a parameter's bytes (the torch engine's is `torch.hash_tensor`)."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def logprob_gap(own: torch.Tensor, behaviour: list[list[float]], rows: list[Row], mixture_of_experts: bool) -> float:
    """Mean |trainer's log-prob - generator's| over trained tokens, in nats per token; `own` is (N, T).

    For a mixture of experts it is the median row's mean: rounding may send a token to another expert, which puts its
    row far off, while old weights would put every row off.
    """
    gaps = [
        (own[i, : len(row.mask)] - torch.tensor(behaviour[i])).abs()[torch.tensor(row.mask, dtype=torch.bool)]
        for i, row in enumerate(rows)
    ]
    if mixture_of_experts:
        return torch.stack([gap.mean() for gap in gaps]).median().item()
    return torch.cat(gaps).mean().item()
