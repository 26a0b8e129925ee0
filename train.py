"""ScaleRL end to end: asynchronous reinforcement learning of a language model, with every ingredient a flag.

    python train.py                                    # the built-in task on a laptop CPU: the full recipe, k = 8
    python train.py --loss dapo                        # change one ingredient
    python train.py --help                             # every flag, by concept

The recipe (arXiv 2510.13786), and the file of each part:

    PipelineRL-8              new weights in flight, at most k = 8 steps off-policy     pipeline_rl.py
    forced interruption       thinking cut at a random budget, then an answer           length_control.py
    zero-variance filtering   drop groups with equal rewards                            filters.py
    no positive resampling    never resample solved prompts                             filters.py
    batch-level advantages    reward minus the prompt's mean, over the batch's std      losses.py
    CISPO                     a truncated importance weight on REINFORCE                losses.py
    prompt-level averaging    each prompt of the batch weighs the same                  losses.py
    FP32 logits               in trainer and generator                                  fp32_head.py

After the run, a sigmoid of pass rate against compute is fitted to it: fit_sigmoid.py. This file is the loop, `train`;
docs/one_group.md follows one group through it. runtime/ holds the machinery: the parts of a run in parts.py, the
forward and backward pass in fp32_head.py (`Scorer`) and trainer.py, the proof that new weights reached the generator in
evaluation.py, checkpoints and the end in run.py. tasks/ has the prompts and the graders.

Two counters: a step consumes one batch of B groups, a version is one optimizer update. A step makes no update, and the
version stays, when no rollout is left to train on (all groups have equal rewards, or the rest were truncated and
dropped), when a loss that masks stale tokens (lab/masks.py) keeps none and has no other term, or when the gradient is
not finite.

To add an ingredient, write a function in its concept file, a flag in runtime/flags.py, and one line in `train`. A loss
of your own needs none of it: `--loss module:function`.
"""

import signal
import sys

if __name__ == "__main__":  # --help, and what is seen to be wrong, before torch is imported, which takes seconds
    from runtime.flags import answer

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run catches it, Ctrl-C ends without a traceback
    answer(sys.argv[1:], __doc__)

import random
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

import filters
import length_control
import losses
from generator import Exhausted
from pipeline_rl import Group, Rollout
from runtime.flags import Flags
from runtime.folder import Progress, Record, RunFailed
from runtime.microbatches import TokenRow
from runtime.parts import Run
from runtime.run import run_program, save_if_due
from runtime.trainer import Trainer, TrainingBatch

BAD_STEPS = 3  # gradients in a row that are not finite, before the run ends


def train(run: Run) -> None:
    """The loop. While a step is computed here, the generator samples the groups of the next ones (`pipeline`), or waits
    for new weights (`ppo_off_policy`). With several trainer processes, each runs this loop on the same groups.

    Shapes: a batch has B groups (prompts) of G rollouts, N = B·G rollouts in all. v: the policy version.
    """
    flags, progress, trainer, evaluator, recorder = run.flags, run.progress, run.trainer, run.evaluator, run.recorder
    evaluator.begin_if_due(progress)
    # Waits for the oldest groups; the generator has already cut their thinking.
    while (round_groups := collect(run)) is not None:
        first_step, first_version = progress.step, progress.version
        # One batch of B groups under `pipeline`; k batches, all sampled by the same policy, under `ppo_off_policy`.
        batches = [round_groups[i : i + flags.batch_prompts] for i in range(0, len(round_groups), flags.batch_prompts)]
        # For TIS: the log-probs of each batch under the policy before the first of these steps.
        all_old_logprobs = [trainer.score(token_rows(groups)) if flags.loss == "tis" else None for groups in batches]
        for groups, old_logprobs in zip(batches, all_old_logprobs, strict=True):
            version = progress.version  # the lag of a token is this version minus the token's
            # (N,) index of the group in this batch; a prompt may occur twice
            group_ids = torch.arange(len(groups)).repeat_interleave(flags.rollouts)
            rewards = batch_rewards(groups, flags, progress.step)  # (N,)
            varied = filters.has_variance(rewards, group_ids)  # (N,)
            metrics = recorder.measure(groups, rewards, varied)  # what this step logs

            # Zero-variance filter: groups with equal rewards have no gradient. They leave before the std and the
            # average are taken; otherwise the gradient's size would depend on how many such groups there are. F5: the
            # terms of KL and entropy leave with them.
            keep = torch.ones_like(varied) if flags.zero_variance == "keep" else varied  # (N,)
            # Advantage: the reward minus its group's mean, over the std of the whole batch.
            advantages = torch.zeros_like(rewards)  # (N,)
            advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], flags.normalize_advantages)
            batch, dropped = select_rows(groups, keep, advantages, old_logprobs, flags)
            metrics |= dropped
            if batch is not None:
                # CISPO on FP32 logits, forward and backward: runtime/trainer.py
                loss_has_terms, loss_metrics = trainer.backward(batch)
                # An evaluation or a probe (the test that weights arrived) was sampled with the current weights and is
                # checked against them, so it must finish before they change.
                metrics |= loss_metrics | evaluator.wait(progress)
                metrics |= optimizer_step(trainer, progress, loss_has_terms)  # AdamW: v becomes v + 1
            metrics |= update_history(run, groups)  # no-positive-resampling: solved prompts are retired
            progress.step += 1
            del progress.taken[: len(groups)]  # a checkpoint lists what is taken and not trained, to sample it again
            recorder.write_step(progress, groups, batch, metrics, version)

        # Push in flight: running requests go on with the new weights. The groups count as outstanding until the new
        # weights are live.
        if progress.version > first_version:
            run.generator.push(trainer.weights, progress.version, release=len(round_groups))
        else:
            run.generator.release(len(round_groups))
        recorder.write_samples(progress.step, batches[-1])
        save_if_due(run, before=first_step)
        evaluator.begin_if_due(progress)  # every `eval_every` steps; it runs during the next step


def main(argv: Sequence[str] | None = None) -> int:
    """One run with these flags, by default those of the command line; returns the exit code (runtime/run.py)."""
    return run_program(train, sys.argv[1:] if argv is None else argv, __doc__ or "")


# ------------------------------------------------------------------------------------------- what the loop is made of


def collect(run: Run) -> list[Group] | None:
    """The groups of the next round, the same on every rank: the B oldest, or under `ppo_off_policy` the k·B oldest,
    shuffled. None at the end of the run: the steps, a budget, or the prompts are used up."""
    groups = run.ranks.from_main(lambda: wait_for_groups(run))  # rank 0 waits, and sends them to the others
    if groups is not None:  # if None, keep what dynamic sampling has collected; the last checkpoint lists it
        run.progress.taken = list(groups)
    return groups


def wait_for_groups(run: Run) -> list[Group] | None:
    """`collect` on rank 0."""
    generator, say = run.generator.on_main, run.ranks.say  # `run.generator` is every rank's; only rank 0 drives one
    if run.progress.step >= run.flags.max_steps or limit_reached(run):
        return None
    try:
        with run.recorder.waiting():  # takes the time
            if run.flags.zero_variance == "replace":
                groups = refill(run)
            else:
                groups = generator.take(generator.pacer.take_size)
    except (Exhausted, filters.NoVariedGroups) as reason:
        retired = f"{run.history.n_retired} of {len(run.task.train)} prompts are retired"
        say(f"{reason}; {retired}. The run ends.")
        return None
    if run.flags.schedule == "ppo_off_policy":
        # The k batches are to be random samples of what one policy sampled, as in PPO; in admission order, each batch
        # would hold consecutive prompts.
        run.progress.rng.shuffle(groups)
    return groups


def refill(run: Run) -> list[Group]:
    """Dynamic sampling: takes groups one by one until enough of them are neither all right nor all wrong. F4: it counts
    right answers, as DAPO does (arXiv 2503.14476, Eq. 11): by shaped rewards, wrong answers of several lengths vary."""
    generator, progress, recorder = run.generator.on_main, run.progress, run.recorder
    sampler = filters.DynamicSampling(generator.pacer.take_size)
    progress.taken = []  # a checkpoint in the middle of it must list these prompts
    while not sampler.full:
        [group] = generator.take(1)
        progress.taken.append(group)  # whatever is raised now, a checkpoint lists it
        if not sampler.offer(group, [float(rollout.correct) for rollout in group.rollouts]):
            progress.taken.pop()
            recorder.discarded.append((group, shaped_rewards(group.rollouts, run.flags)))
            recorder.retired_in_flight = update_history(run, [group])["retired_in_flight"]
            generator.release(1)
    return sampler.take()


def limit_reached(run: Run) -> bool:
    """Whether one of the budgets is used up; says which."""
    flags, clock = run.flags, run.recorder.clock
    if flags.max_sampled_tokens and clock.now()["tokens"] >= flags.max_sampled_tokens:
        run.ranks.say(f"--max_sampled_tokens {flags.max_sampled_tokens} reached")
    elif flags.max_hours and clock.hours() >= flags.max_hours:
        run.ranks.say(f"--max_hours {flags.max_hours} reached")
    else:
        return False
    return True


def rollouts_of(groups: Sequence[Group]) -> list[Rollout]:
    """All rollouts of the groups, in their order."""
    return [rollout for group in groups for rollout in group.rollouts]


def token_rows(groups: Sequence[Group]) -> list[TokenRow]:
    """The same rollouts as the trainer reads them."""
    rows = []
    for group in groups:
        for rollout in group.rollouts:
            rows.append(TokenRow(group.problem.prompt_ids, rollout.completion_ids, rollout.mask))
    return rows


def batch_rewards(groups: Sequence[Group], flags: Flags, step: int) -> Tensor:
    """(N,) rewards of a batch; `--reward shuffled`, the control, deals them out anew."""
    rewards = shaped_rewards(rollouts_of(groups), flags)
    if flags.reward == "shuffled":
        draw = random.Random(f"{flags.seed} {step}")
        rewards = rewards[draw.sample(range(len(rewards)), len(rewards))]
    return rewards


def shaped_rewards(rollouts: Sequence[Rollout], flags: Flags) -> Tensor:
    """(N,) rewards: the verifier's, plus the length penalty."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
    if flags.length_control.startswith("penalty"):
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])  # (N,)
        penalty = length_control.overlong_penalty(lengths, flags.completion_budget, flags.penalty_window)  # (N,)
        all_pay = flags.length_control == "penalty_all"
        applies = torch.tensor([rollout.correct or all_pay for rollout in rollouts])  # (N,)
        rewards = rewards + torch.where(applies, penalty, 0.0)
    return rewards


def select_rows(
    groups: Sequence[Group], keep: Tensor, advantages: Tensor, old_logprobs: Tensor | None, flags: Flags
) -> tuple[TrainingBatch | None, Record]:
    """The M rollouts to train on, of the N that were sampled, and how many truncated ones are dropped. They are those
    in `keep` (N,), with their `advantages` (N,) and, for TIS, `old_logprobs` (N, T). None if none is left."""
    rollouts = rollouts_of(groups)
    dropped: Record = {}
    # O3 (see docs/choices.md): truncated rollouts may leave, but only now. Dropped earlier, they would leave the mean
    # of a group to its short rollouts.
    if flags.truncated_rollouts == "drop":
        truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])  # (N,)
        dropped["truncated_dropped"] = int((keep & truncated).sum())
        keep = keep & ~truncated
    if not keep.any():
        return None, dropped
    kept = list(compress(rollouts, keep))
    mask = pad([rollout.mask for rollout in kept], torch.bool)  # (M, T), T: tokens of the longest of them
    behaviour = pad([rollout.logprobs for rollout in kept], torch.float32)  # (M, T)
    # The average of the loss, as one weight per token: per prompt, per sample, over all tokens, ...
    group_ids = torch.arange(len(groups)).repeat_interleave(flags.rollouts)[keep]  # (M,)
    token_weights = losses.aggregation_weights(mask, group_ids, flags.aggregation, flags.completion_budget)  # (M, T)
    if old_logprobs is not None:
        old_logprobs = old_logprobs[keep, : mask.shape[1]]  # (M, T)
    rows = list(compress(token_rows(groups), keep))
    return TrainingBatch(rows, behaviour, mask, advantages[keep], token_weights, old_logprobs), dropped


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """(N, T) with zeros on the right."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def optimizer_step(trainer: Trainer, progress: Progress, loss_has_terms: bool) -> Record:
    """AdamW's step, and its metrics. A loss without a term makes no step. Nor does a gradient that is not finite;
    BAD_STEPS of these in a row raise RunFailed."""
    if not loss_has_terms:
        trainer.optimizer.zero_grad()
        return {"grad_norm": 0.0, "updated": 0}
    result = trainer.update(progress.version)
    progress.version += int(result["updated"])
    progress.bad_steps = 0 if result["updated"] else progress.bad_steps + 1
    if progress.bad_steps >= BAD_STEPS:
        raise RunFailed(f"the gradient was not finite {progress.bad_steps} times in a row (a lower --lr may help)")
    return result


def update_history(run: Run, groups: Sequence[Group]) -> Record:
    """No-positive-resampling: counts what these groups solved in the pass-rate history, which retires solved prompts.
    `retired_in_flight` are the groups of a prompt that was retired while they were under way, those that dynamic
    sampling discarded since the last step among them."""
    late, run.recorder.retired_in_flight = run.recorder.retired_in_flight, 0
    late += sum(run.history.retired(group.problem.key) for group in groups)
    for group in groups:
        run.history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])
    return {"retired_in_flight": late, "retired": run.history.n_retired}


if __name__ == "__main__":
    sys.exit(main())
