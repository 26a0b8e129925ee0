"""Evaluations, and the proof that the generator has the trainer's weights.

Weights that never arrive raise no error: the generator samples from an old policy, and training becomes worse for no
visible reason. So the trainer scores what the generator sampled. On completions that one version sampled from prompt to
end, the two sides' log-probs must agree up to rounding, or the run ends.

The completions are those of an evaluation or, between evaluations, of a probe: one completion for each of a few
held-out prompts. Both run while the trainer computes the next gradient. The trainer waits for them just before it
applies that gradient: then it still has the weights that sampled them.
"""

import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from pipeline_rl import FORCED, Rollout
from runtime.flags import Flags
from runtime.folder import Folder, Progress, Record, RunFailed
from runtime.microbatches import TokenRow
from runtime.model import experts
from runtime.ranks import GeneratorForRanks, Ranks
from runtime.recorder import Recorder, rates
from runtime.trainer import Trainer
from tasks.prompts import Problem, Task

CHECK_ROWS = 64  # completions that are scored
PROBES = 16  # completions of a probe
PROBE_TOKENS = 32  # that each leg of them samples at most: the next weights wait for it
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
    generator: GeneratorForRanks
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
            future = self.generator.evaluate(problems, 1, PROBE_TOKENS)
            self.under_way = Pending(future, problems, progress.version)

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
        task = self.task

        def figures_of(*sources: str) -> Record:
            return figures(
                [group for problem, group in zip(problems, groups, strict=True) if problem.source in sources]
            )

        record = at_start | figures_of(*task.sources) | {"device": self.recorder.device}
        numbers = {"eval/pass_rate": record["pass_rate"]}
        apart = task.eval_sources if len(task.sources) == 1 else [*task.sources, *task.eval_sources]
        if apart:
            record["data_sets"] = {source: figures_of(source) for source in apart}
            numbers |= {f"eval/{source}/pass_rate": record["data_sets"][source]["pass_rate"] for source in apart}
        self.recorder.folder.append("eval.jsonl", record)
        self.ranks.accelerator.log(numbers, step=step)
        self.ranks.say(evaluation_line(record))


def figures(groups: Sequence[Sequence[Rollout]]) -> Record:
    """The figures of one evaluation, from its rollouts grouped by prompt; `correct` counts the right ones of each."""
    result: Record = dict(rates([rollout for group in groups for rollout in group]))
    result["mean_length"] = result.pop("length")
    correct = [sum(rollout.correct for rollout in group) for group in groups]
    result["pass_at_k"] = sum(count > 0 for count in correct) / len(groups)
    result["n_prompts"] = len(groups)
    result["n_samples"] = len(groups[0])
    result["correct"] = correct
    return result


def evaluation_line(record: Record) -> str:
    """The printed line of one evaluation, with the pass rate of each data set at its end if there are several."""
    line = f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f}"
    if record["n_samples"] > 1:  # with one sample it is the pass rate
        line += f" · pass@{record['n_samples']} {record['pass_at_k']:.3f}"
    line += (
        f" · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
    )
    for source, figures_of_source in record.get("data_sets", {}).items():
        name = source.rpartition("/")[2]
        line += f" · {name} {figures_of_source['pass_rate']:.3f}"
    return line


def logprob_gaps(own: torch.Tensor, behaviour: list[list[float]], rows: list[TokenRow]) -> list[torch.Tensor]:
    """|trainer's log-prob - generator's| of each row's trained tokens, in nats; `own` is (N, T)."""
    gaps = []
    for i, row in enumerate(rows):
        difference = own[i, : len(row.mask)] - torch.tensor(behaviour[i])
        gaps.append(difference.abs()[torch.tensor(row.mask, dtype=torch.bool)])
    return gaps


def logprob_gap(gaps: list[torch.Tensor], mixture_of_experts: bool) -> float:
    """Mean gap over all tokens, in nats per token; NaN if one is.

    For a mixture of experts it is the median row's mean: rounding may send a token to another expert, which puts its
    row far off, while old weights would put every row off.
    """
    if mixture_of_experts:
        return torch.stack([gap.mean() for gap in gaps]).median().item()
    return torch.cat(gaps).mean().item()


# --------------------------------------------------------------------------------------------- the law on the whole run


def law(folder: Folder, device: str) -> str:
    """What a finished run says of its evaluations: Eq. 1 fitted to its pass rates and to those of each data set, and
    where they began and ended. Draws curve.png."""
    import fit_sigmoid  # scipy takes half a second

    x = "tokens" if device == "cpu" else "device_hours"
    picture, fits = folder.path / "curve.png", {}
    ends: list[str] = []
    for name, rows in evaluations(folder).items():
        C = [0 if row["step"] == 0 else row[x] for row in rows]  # at step 0 the clock has run, nothing is trained
        R = [row["pass_rate"] for row in rows]
        n = [row["n_prompts"] * row["n_samples"] for row in rows]
        fits[name] = fit_sigmoid.fit(C, R, n_samples=n)
        text = f"{R[0]:.3f} -> {R[-1]:.3f} (mean of the last two {sum(R[-2:]) / len(R[-2:]):.3f})"
        ends.append(f"{'pass rate':<16}{text}" if not ends else f"{'':<16}{text} of {name}")
    drawn = {name: fit for name, fit in fits.items() if not math.isnan(fit.A)}
    if drawn:
        fit_sigmoid.plot_fits(drawn, x, picture)
    title = f"\nThe law on this run ({picture}):" if drawn else "\nThe law on this run:"
    texts = [fit_sigmoid.report(name, fit, x) for name, fit in fits.items()]
    return "\n\n".join([title, *texts, "\n".join(ends)])


def evaluations(folder: Folder) -> dict[str, list[Record]]:
    """The records of eval.jsonl, under the folder's name, and those of each data set that the last one tells apart,
    from the first that has it: a set may have come with a resume."""
    records = folder.read("eval.jsonl")
    result = {str(folder.path): records}
    for name in records[-1].get("data_sets", {}):
        result[name] = [row | row["data_sets"][name] for row in records if name in row.get("data_sets", {})]
    return result
