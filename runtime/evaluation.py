"""Evaluations, and the proof that the generator has the trainer's weights.

Weights that never arrive raise no error: the generator samples from an old policy, and training becomes worse for no
visible reason. So the trainer scores what the generator sampled. On completions that one version sampled from prompt to
end, the two sides' log-probs must agree up to rounding, or the run ends.

The completions are those of an evaluation or, between evaluations, of a probe: one completion for each of a few
held-out prompts. Both run while the trainer computes the next gradient. The trainer waits for them just before it
applies that gradient: then it still has the weights that sampled them.

In bfloat16 rounding hides an update, or a hundred of them, from log-probs, but not from the bytes of the weights. So
both sides hash their weights, too: before and after the first update, and every HASH_EVERY steps. Tensors that were
byte-identical on both sides at the start (norms and most embeddings; vLLM fuses, pads, splits or repacks the rest) must
stay identical. This also catches an engine whose weights change, but one update late.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from length_control import COLLAPSE_TRUNCATION
from pipeline_rl import FORCED, Rollout
from runtime.flags import Flags
from runtime.model import TokenRow, experts
from runtime.ranks import Ranks, SharedGenerator
from runtime.recorder import Recorder, shares
from runtime.run_folder import Progress, Record, RunFailed
from runtime.trainer import Trainer
from tasks.prompts import Problem, Task

CHECK_ROWS = 64  # completions that are scored
PROBES = 16  # completions of a probe
PROBE_EVERY = 5  # steps

# Mean |difference| of log-probs, in nats per token, that rounding explains. float32: measured up to 4e-6, while weights
# one update old differ by 1.3e-3 to 5.4e-2 (lr 5e-4). bfloat16: measured up to 0.04 (random Qwen3s, more the further
# apart the logits are: 0.1M parameters 7e-4 to 8e-3, 0.9M .018, 6M 2e-3 to .033, 8M .04, 29M 4e-3 to .025; an FP32
# head changes little), so that only weights that are far off are noticed.
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass
class Pending:
    """An evaluation or a probe under way."""

    future: Future | None  # of the generator's rollouts; None on ranks other than 0
    problems: list[Problem]
    version: int
    record: Record | None = None  # of an evaluation: step and compute when it began


@dataclass(eq=False)
class Evaluator:
    """Begins evaluations and probes when they are due, and finishes them with the weights check. Call it on every
    rank."""

    flags: Flags
    ranks: Ranks
    task: Task
    trainer: Trainer
    generator: SharedGenerator
    recorder: Recorder

    def __post_init__(self) -> None:
        self.under_way: Pending | None = None

    def begin_if_due(self, progress: Progress) -> None:
        """Starts an evaluation (at the first step and every `eval_every`) or a probe (every PROBE_EVERY) at the live
        version, if one is due. It waits for the last push, and the next push waits for it."""
        flags, step = self.flags, progress.step
        before = step - (flags.k if flags.schedule == "ppo_off_policy" else 1)  # steps come in rounds of k there
        last = progress.evaluated
        if self.under_way is not None and self.under_way.record is not None:
            last = self.under_way.record["step"]
        if last < 0 or step // flags.eval_every > last // flags.eval_every:
            self.wait(progress)  # what began before steps that made no update: the version is still the same
            self.begin_evaluation(progress)
        elif self.under_way is None and step // PROBE_EVERY > before // PROBE_EVERY:
            draw = random.Random(f"{flags.seed} probe {step}")
            problems = draw.sample(self.task.held_out, min(PROBES, len(self.task.held_out)))
            self.under_way = Pending(self.generator.evaluate(problems, 1), problems, progress.version)

    def begin_evaluation(self, progress: Progress) -> None:
        """Starts an evaluation of the held-out prompts and of the evaluation sets, at the live version."""
        compute = self.recorder.clock.now() if self.ranks.main else {}
        record = {"step": progress.step, "version": progress.version} | compute
        future = self.generator.evaluate(self.task.held_out, self.flags.eval_samples)
        self.under_way = Pending(future, self.task.held_out, progress.version, record)

    def wait(self, progress: Progress) -> dict[str, float]:
        """Waits for what is under way, records an evaluation, and compares the log-probs. Must come before the weights
        change. Returns {"logprob_gap", "mismatch_rms"}, in nats, or {} if nothing was under way. Raises RunFailed."""
        check = self.under_way
        if check is None:
            return {}
        rows, behaviour = self.ranks.from_main(lambda: self._result(check, progress))
        self.under_way = None
        if check.record is not None:
            progress.evaluated = check.record["step"]  # steps without an update may have come since
        gaps = logprob_gaps(self.trainer.score(rows), behaviour, rows)
        gap = logprob_gap(gaps, experts(self.trainer.model.config.get_text_config()) > 1)
        largest = LARGEST_GAP[self.flags.dtype]
        if not gap <= largest:  # NaN, too
            raise RunFailed(
                f"weights check: at version {check.version} trainer and generator differ by {gap:.1e} nats per token, "
                f"more than {largest} ({self.flags.dtype}): the generator has other weights than the trainer, or "
                "computes with less precision (TF32, quantisation)"
            )
        return {"logprob_gap": gap, "mismatch_rms": torch.cat(gaps).square().mean().sqrt().item()}

    def _result(self, check: Pending, progress: Progress) -> tuple[list[TokenRow], list[list[float]]]:
        """Rank 0 waits for the rollouts; returns some of them as rows, with the generator's log-probs."""
        assert check.future is not None
        groups = self.generator.on_main.result_of(check.future)
        pairs = [(problem, r) for problem, group in zip(check.problems, groups, strict=True) for r in group]
        mixed = sum(set(rollout.versions) - {FORCED} != {check.version} for _, rollout in pairs)
        if mixed:
            raise RunFailed(
                f"weights check: {mixed} evaluation completions have tokens that version {check.version} did not sample"
            )
        if check.record is not None:
            self.write_evaluation(check.record, check.problems, groups, progress.step)
        sample = progress.rng.sample(pairs, min(CHECK_ROWS, len(pairs)))
        rows = [TokenRow(problem.prompt_ids, rollout.completion_ids, rollout.mask) for problem, rollout in sample]
        return rows, [rollout.logprobs for _, rollout in sample]

    def write_evaluation(
        self, at_start: Record, problems: list[Problem], groups: list[list[Rollout]], step: int
    ) -> None:
        """Writes and prints an evaluation: `at_start` says when it began. The pass rate is that of the data sets
        that are trained on; each data set has its own beside it, if there are several. A tracker gets it at the present
        `step`, since none takes an earlier one."""
        task, folder = self.task, self.recorder.folder

        def of(*sources: str) -> list[list[Rollout]]:
            return [group for problem, group in zip(problems, groups, strict=True) if problem.source in sources]

        record = at_start | figures(of(*task.sources)) | {"device": self.recorder.device}
        counts: Record = {"step": record["step"], "n_samples": record["n_samples"]}
        counts["correct"] = correct_samples(of(*task.sources))
        numbers = {"eval/pass_rate": record["pass_rate"]}
        reported_sets = list(task.eval_sources)
        if len(task.sources) > 1:
            reported_sets = [*task.sources, *task.eval_sources]
        if reported_sets:
            record["data_sets"] = {source: figures(of(source)) for source in reported_sets}
            record["pass_rate_of"] = {source: record["data_sets"][source]["pass_rate"] for source in reported_sets}
            for source, rate in record["pass_rate_of"].items():
                numbers[f"eval/{source}/pass_rate"] = rate
        if task.eval_sources:
            counts["data_sets"] = {source: correct_samples(of(source)) for source in task.eval_sources}
        folder.append("eval.jsonl", record)
        folder.append("eval_counts.jsonl", counts)
        self.ranks.accelerator.log(numbers, step=step)
        self.ranks.say(evaluation_line(record))
        if record["step"] == 0 and record["truncated"] > COLLAPSE_TRUNCATION:
            name = "answer_budget" if self.flags.length_control == "interruption" else "max_budget"
            self.ranks.say(
                f"Warning: {record['truncated']:.0%} of completions are truncated before any training; "
                f"raise --{name}, which is {getattr(self.flags, name)}."
            )


def figures(groups: Sequence[Sequence[Rollout]]) -> Record:
    """The figures of one evaluation, from its rollouts grouped by prompt."""
    result: Record = dict(shares([rollout for group in groups for rollout in group]))
    result["mean_length"] = result.pop("length")
    result["pass_at_k"] = sum(count > 0 for count in correct_samples(groups)) / len(groups)
    result["n_prompts"] = len(groups)
    result["n_samples"] = len(groups[0])
    return result


def correct_samples(groups: Sequence[Sequence[Rollout]]) -> list[int]:
    """How many rollouts of each prompt are correct."""
    return [sum(rollout.correct for rollout in group) for group in groups]


def evaluation_line(record: Record) -> str:
    """The printed line of one evaluation, with the pass rate of each data set at its end if there are several."""
    line = f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f}"
    if record["n_samples"] > 1:  # with one sample it is the pass rate
        line += f" · pass@{record['n_samples']} {record['pass_at_k']:.3f}"
    line += (
        f" · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
    )
    for source, rate in record.get("pass_rate_of", {}).items():
        name = source.rpartition("/")[2]
        line += f" · {name} {rate:.3f}"
    return line


def logprob_gaps(own: torch.Tensor, behaviour: list[list[float]], rows: list[TokenRow]) -> list[torch.Tensor]:
    """|trainer's log-prob - generator's| of each row's trained tokens, in nats; `own` is (N, T)."""
    gaps = []
    for i, row in enumerate(rows):
        difference = own[i, : len(row.mask)] - torch.tensor(behaviour[i])
        gaps.append(difference.abs()[torch.tensor(row.mask, dtype=torch.bool)])
    return gaps


def logprob_gap(gaps: list[torch.Tensor], mixture_of_experts: bool) -> float:
    """Mean gap over all tokens, in nats per token.

    For a mixture of experts it is the median row's mean: rounding may send a token to another expert, which puts its
    row far off, while old weights would put every row off.
    """
    if mixture_of_experts:
        return torch.stack([gap.mean() for gap in gaps]).median().item()
    return torch.cat(gaps).mean().item()
