"""Evaluations, and the proof that the generator has the trainer's weights.

Weights that never arrive raise no error: the generator samples from an old policy, and training becomes worse for no
visible reason. So the trainer scores what the generator sampled. On completions that one version sampled from prompt to
end, the two sides' log-probs must agree up to rounding, or the run ends.

The completions are those of an evaluation, or, between evaluations, of a probe: one completion for each of a few held-
out prompts. Both run while the trainer computes the next gradient, and are awaited just before it is applied: then the
trainer still has the weights that sampled them.

In bfloat16 rounding hides an update, or a hundred of them, from log-probs, but not from the bytes of the weights. So
before and after the first update and at every `save_every` both sides hash their parameters. If the trainer's have
changed and those of one of the engine's workers have not, no update reached that worker. And the tensors that all
workers held at first byte for byte as the trainer does (vLLM fuses, pads, splits or repacks the others, but keeps norms
and most embeddings) must be the trainer's each time: an engine that is one update behind changes, too.
"""

import hashlib
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from length_control import COLLAPSE_TRUNCATION
from pipeline_rl import Rollout
from runtime.flags import Flags, has_adapters
from runtime.model import Row, experts
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder, shares
from runtime.run_folder import Progress, Record
from runtime.trainer import Trainer
from tasks.prompts import Problem, Task

CHECK_ROWS = 64  # completions that are scored
PROBES = 16  # completions of a probe

# Mean |difference| of log-probs, in nats per token, that rounding explains. float32: measured up to 4e-6, while weights
# one update old differ by 1.3e-3 to 5.4e-2 (lr 5e-4). bfloat16: measured up to 0.04 (random Qwen3s, more the further
# apart the logits are: 0.1M parameters 7e-4 to 8e-3, 0.9M .018, 6M 2e-3 to .033, 8M .04, 29M 4e-3 to .025; an FP32
# head changes little), so that only weights that are far off are noticed.
# float16 rounds an eighth as much: on the built-in model 1.5e-4 to 2.4e-4 where bfloat16 has 1.1e-3 to 2.2e-3.
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.0125}


class RunFailed(RuntimeError):
    """Going on would train on what cannot be trusted."""


@dataclass
class Check:
    """An evaluation or a probe under way."""

    future: Future | None  # of the generator's rollouts; None on ranks other than 0
    problems: list[Problem]
    version: int
    record: Record | None = None  # of an evaluation: step and compute when it began


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
        self, flags: Flags, ranks: Ranks, task: Task, trainer: Trainer, generator: SharedGenerator, recorder: Recorder
    ):
        self.flags, self.ranks, self.task, self.trainer = flags, ranks, task, trainer
        self.generator, self.recorder = generator, recorder
        self.sources = [*task.sources, *task.eval_sources]
        of = {source: [problem for problem in task.held_out if problem.source == source] for source in self.sources}
        self.problems = [problem for problems in of.values() for problem in problems[: flags.eval_problems]]
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
            problems = draw.sample(self.task.held_out, min(PROBES, len(self.task.held_out)))
            self.under_way = Check(self.generator.evaluate(problems, 1), problems, progress.version)

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
        if last and sent != last.trainer:
            stale = [i for i, (old, new) in enumerate(zip(last.engine, held, strict=True)) if old == new]
            if stale:
                raise RunFailed(
                    f"weights check: workers {stale} of the engine hold the same bytes at version {progress.version} "
                    f"as at {last.version}, but the trainer's weights have changed: no update reached them"
                )
        if other and (last or not equal):
            raise RunFailed(
                f"weights check: at version {progress.version} the engine holds other bytes than the trainer, as of "
                f"{other[0]}: its weights are not those of this version"
            )

    def begin_evaluation(self, progress: Progress) -> None:
        """Starts an evaluation of the held-out prompts and of the evaluation sets, at the live version."""
        compute = self.recorder.clock.now() if self.ranks.main else {}
        record = {"step": progress.step, "version": progress.version} | compute
        future = self.generator.evaluate(self.problems, self.flags.eval_samples)
        self.under_way = Check(future, self.problems, progress.version, record)

    def finish(self, progress: Progress) -> dict[str, float]:
        """Waits for what is under way, records an evaluation, and compares the log-probs. Must come before the weights
        change. Returns {"logprob_gap", "mismatch_rms"}, in nats, or {} if nothing was under way. Raises RunFailed."""
        if (check := self.under_way) is None:
            return {}
        rows, behaviour = self.ranks.from_main(lambda: self._result(check, progress))
        self.under_way = None
        if check.record is not None:
            progress.evaluated = check.record["step"]  # steps without an update may have come since
        gaps = logprob_gaps(self.trainer.score(rows), behaviour, rows)
        gap = logprob_gap(gaps, experts(self.trainer.model.config) > 1)
        largest = LARGEST_GAP[self.flags.dtype]
        if not gap <= largest:  # NaN, too
            raise RunFailed(
                f"weights check: at version {check.version} trainer and generator differ by {gap:.1e} nats per token, "
                f"more than {largest} ({self.flags.dtype}): the generator has other weights than the trainer, or "
                "computes with less precision (TF32, quantisation)"
            )
        return {"logprob_gap": gap, "mismatch_rms": torch.cat(gaps).square().mean().sqrt().item()}

    def _result(self, check: Check, progress: Progress) -> tuple[list[Row], list[list[float]]]:
        """Rank 0 waits for the rollouts; returns some of them as rows, with the generator's log-probs."""
        assert check.future is not None
        groups = self.generator.on_main.result_of(check.future)
        flat = [(problem, r) for problem, group in zip(check.problems, groups, strict=True) for r in group]
        mixed = sum(any(v != check.version for v, m in zip(r.versions, r.mask, strict=True) if m) for _, r in flat)
        if mixed:
            raise RunFailed(
                f"weights check: {mixed} evaluation completions have tokens that version {check.version} did not sample"
            )
        if check.record is not None:
            of: dict[str, list[list[Rollout]]] = {source: [] for source in self.sources}
            for problem, group in zip(check.problems, groups, strict=True):
                of[problem.source].append(group)
            self.record(check.record, of, progress.step)
        chosen = progress.rng.sample(flat, min(CHECK_ROWS, len(flat)))
        rows = [Row(problem.prompt_ids, r.completion_ids, r.mask) for problem, r in chosen]
        return rows, [r.logprobs for _, r in chosen]

    def record(self, begun: Record, of: dict[str, list[list[Rollout]]], step: int) -> None:
        """Writes and prints an evaluation: `begun` says when it began, `of` holds the rollouts of each data set's
        problems. The pass rate is that of the data sets that are trained on; each data set has its own beside it, if
        there are several. A tracker gets it at the present `step`, since none takes an earlier one."""
        task, recorder, say = self.task, self.recorder, self.ranks.say
        trained = [group for source in task.sources for group in of[source]]
        record = begun | figures(trained) | {"device": recorder.device}
        if apart := [source for source in of if len(task.sources) > 1 or source not in task.sources]:
            record["data_sets"] = {source: figures(of[source]) for source in apart}
            record["pass_rate_of"] = {source: found["pass_rate"] for source, found in record["data_sets"].items()}
        recorder.folder.append("eval.jsonl", record)
        correct = {source: [sum(r.correct for r in group) for group in groups] for source, groups in of.items()}
        counts = {"step": record["step"], "n_samples": record["n_samples"]}
        counts["correct"] = [count for source in task.sources for count in correct[source]]
        if task.eval_sources:
            counts["data_sets"] = {source: correct[source] for source in task.eval_sources}
        recorder.folder.append("eval_counts.jsonl", counts)
        rates = {f"eval/{source}/pass_rate": rate for source, rate in record.get("pass_rate_of", {}).items()}
        self.ranks.accelerator.log({"eval/pass_rate": record["pass_rate"], **rates}, step=step)
        say(evaluation_line(record))
        if record["step"] == 0 and (share := record["truncated"]) > COLLAPSE_TRUNCATION:
            name = "answer_budget" if self.flags.length_control == "interruption" else "max_budget"
            raised = f"raise --{name}, which is {getattr(self.flags, name)}"
            say(f"Warning: {share:.0%} of completions are truncated before any training; {raised}.")


def figures(groups: Sequence[Sequence[Rollout]]) -> Record:
    """The figures of one evaluation, from its rollouts grouped by prompt."""
    found: Record = dict(shares([rollout for group in groups for rollout in group]))
    found["mean_length"] = found.pop("length")
    solved = sum(any(rollout.correct for rollout in group) for group in groups)
    return found | {"pass_at_k": solved / len(groups), "n_prompts": len(groups), "n_samples": len(groups[0])}


def evaluation_line(record: Record) -> str:
    """The printed line of one evaluation, with the pass rate of each data set at its end if there are several."""
    apart = {name.rpartition("/")[2]: found["pass_rate"] for name, found in record.get("data_sets", {}).items()}
    return (
        f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f} · pass@{record['n_samples']} "
        f"{record['pass_at_k']:.3f} · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
        + "".join(f" · {name} {rate:.3f}" for name, rate in apart.items())
    )


def sha256(tensor: torch.Tensor) -> str:
    """vLLM's hash of a parameter's bytes (the torch engine's is `torch.hash_tensor`)."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def logprob_gaps(own: torch.Tensor, behaviour: list[list[float]], rows: list[Row]) -> list[torch.Tensor]:
    """|trainer's log-prob - generator's| of each row's trained tokens, in nats; `own` is (N, T)."""
    return [
        (own[i, : len(row.mask)] - torch.tensor(behaviour[i])).abs()[torch.tensor(row.mask, dtype=torch.bool)]
        for i, row in enumerate(rows)
    ]


def logprob_gap(gaps: list[torch.Tensor], mixture_of_experts: bool) -> float:
    """Mean gap over all tokens, in nats per token.

    For a mixture of experts it is the median row's mean: rounding may send a token to another expert, which puts its
    row far off, while old weights would put every row off.
    """
    if mixture_of_experts:
        return torch.stack([gap.mean() for gap in gaps]).median().item()
    return torch.cat(gaps).mean().item()
