"""ScaleRL end to end: asynchronous reinforcement learning of a language model, with every ingredient a flag.

    python train.py                                    # the built-in task on a laptop CPU: the full recipe, k = 8
    python train.py --loss dapo                        # change one ingredient
    python train.py --help                             # every flag, by concept

The recipe (arXiv 2510.13786), and the file of each part:

    sample       PipelineRL, k steps off-policy, weights swapped in flight     pipeline_rl.py
    interrupt    thinking cut at a random budget, then an answer               length_control.py
    filter       equal rewards out of the batch, solved prompts out for good   filters.py
    advantage    reward minus the prompt's mean, over the batch's std          losses.py
    loss         CISPO, averaged per prompt, FP32 logits                       losses.py, fp32_head.py
    predict      a sigmoid of pass rate against compute                        fit_sigmoid.py

This file is the loop, `train`; docs/one_group.md follows one group through it. What it takes to run is in runtime/: the
forward and backward pass in trainer.py and model.py, the proof that new weights reached the generator in evaluation.py,
the parts of a run in parts.py. What is asked and who judges the answers is in tasks/.

Two counters: a step consumes one batch of B groups, a version is one optimizer update. A step makes no update, and the
version stays, in three cases: every group has equal rewards (with the filter on), a mask drops every token, or the
gradient is not finite.
"""

import os
import random
import signal
import sys
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

import filters
import length_control
import losses
import pipeline_rl
from pipeline_rl import Group, Rollout
from runtime import closing, run_folder
from runtime.evaluation import RunFailed
from runtime.flag_checks import check_flags, lr_note
from runtime.flags import Flags, UsageError, parse_flags
from runtime.model import Row
from runtime.parts import Parts, new_parts, start, with_flag_names
from runtime.run_folder import Progress, Record
from runtime.trainer import Trainer, TrainingBatch
from tasks.judges import RewardError

BAD_STEPS = 3  # gradients in a row that are not finite, before the run ends
DEAD_ENGINE = 75  # the exit code for it, "temporary failure" in sysexits.h: --resume goes on from the checkpoint


def train(flags: Flags, parts: Parts, progress: Progress) -> None:
    """The loop. While a step is computed here, the generator samples the groups of the next ones (`pipeline`), or waits
    for new weights (`ppo_off_policy`). With several trainer processes, each runs this loop on the same groups.

    Shapes: a batch has B groups (prompts) of G rollouts, n = B·G in all, of which N train. T: tokens of the longest
    completion among these. v: the policy version. `parts`: the objects of the run. `progress`: what a checkpoint saves.
    """
    generator, trainer, evaluator, recorder = parts.generator, parts.trainer, parts.evaluator, parts.recorder
    evaluator.begin_if_due(progress)
    while (taken := collect(flags, parts, progress)) is not None:  # waits for the oldest groups, thinking interrupted
        first_step, first_version = progress.step, progress.version
        # One batch of B groups under `pipeline`; k batches, all sampled by the same policy, under `ppo_off_policy`.
        for groups, old in batches_of(taken, flags, trainer):
            version = progress.version  # the lag of a token is this version minus the token's
            rollouts, rows = flat(groups)  # n of each
            group_ids = torch.arange(len(groups)).repeat_interleave(flags.rollouts)  # (n,) of groups, not of prompts
            rewards = shaped_rewards(rollouts, flags, random.Random(f"{flags.seed} {progress.step}"))  # (n,)
            metrics = recorder.sampled(groups, rewards)

            # Zero-variance filter: groups with equal rewards have no gradient. They leave before the std and the
            # average are taken, or the size of the step would depend on how many there are.
            keep = filters.has_variance(rewards, group_ids) | (not flags.zero_variance_filter)  # (n,)
            # Advantage: the reward minus its group's mean, over the std of the whole batch.
            advantages = torch.zeros_like(rewards)  # (n,)
            advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], flags.normalize_advantages)
            # O3: truncated rollouts may leave, but only now. Before, a group's mean would be that of its short ones.
            if flags.truncated_rollouts == "drop":
                truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])  # (n,)
                metrics["truncated_dropped"] = int((keep & truncated).sum())
                keep = keep & ~truncated

            batch = None
            if keep.any():
                kept_rollouts = list(compress(rollouts, keep))  # N of the n
                mask = padded([rollout.mask for rollout in kept_rollouts], torch.bool)  # (N, T)
                behaviour = padded([rollout.logprobs for rollout in kept_rollouts], torch.float32)  # (N, T)
                # The average of the loss, as one weight per token (N, T): per prompt, per sample, over all tokens, ...
                token_weights = losses.aggregation_weights(mask, group_ids[keep], flags.aggregation, flags.most_sampled)
                old = None if old is None else old[keep, : mask.shape[1]]  # (N, T), for TIS
                batch = TrainingBatch(list(compress(rows, keep)), behaviour, mask, advantages[keep], token_weights, old)
                metrics |= trainer.gradients(batch)  # CISPO on FP32 logits, forward and backward: runtime/trainer.py
                # An evaluation or a probe (the test that weights arrived) must end on these weights, which sampled it.
                metrics |= evaluator.finish(progress)
                metrics |= optimizer_step(trainer, progress, metrics)  # AdamW: v becomes v + 1

            metrics |= update_history(parts, progress, groups)  # no-positive-resampling: solved prompts are retired
            progress.step += 1
            del progress.taken[: len(groups)]
            recorder.step(progress, groups, batch, metrics, version)

        # Push in flight: running requests go on with the new weights. Until these are live, the groups are outstanding.
        if progress.version > first_version:
            generator.push(trainer.weights, progress.version, release=len(taken))
        else:
            generator.release(len(taken))
        recorder.samples(progress.step, groups)  # of the last batch
        evaluator.begin_if_due(progress)  # every `eval_every` steps; it runs during the next step
        if flags.save_every and progress.step // flags.save_every > first_step // flags.save_every:
            save(parts, progress)


# ------------------------------------------------------------------------------------------- what the loop is made of


def collect(flags: Flags, parts: Parts, progress: Progress) -> list[Group] | None:
    """The groups of the next take, the same on every rank: the B oldest, or under `ppo_off_policy` the k·B oldest,
    shuffled. None at the end of the run: the steps, a budget, or the prompts are used up."""
    taken = parts.ranks.from_main(lambda: wait_for_groups(flags, parts, progress))
    if taken is not None:  # else what dynamic sampling has collected so far stays, for the last checkpoint
        progress.taken = list(taken)
    return taken


def wait_for_groups(flags: Flags, parts: Parts, progress: Progress) -> list[Group] | None:
    """`collect` on rank 0."""
    generator, say = parts.generator.on_main, parts.ranks.say
    if progress.step >= flags.max_steps or budget_spent(flags, parts):
        return None
    try:
        with parts.recorder.waiting():
            if flags.dynamic_sampling:
                groups = refill(flags, parts, progress)
            else:
                groups = generator.take(generator.pacer.take_size)
    except (pipeline_rl.Exhausted, filters.NoVariedGroups) as reason:
        retired = f"{parts.history.n_retired} of {len(parts.task.train)} prompts are retired"
        say(f"{reason}; {retired}. The run ends.")
        return None
    if flags.schedule == "ppo_off_policy":
        # One policy sampled all of them, but in the order of admission a batch would be prompts that were drawn
        # together. Shuffled, so that the k batches are random samples, as in PPO.
        progress.rng.shuffle(groups)
    return groups


def refill(flags: Flags, parts: Parts, progress: Progress) -> list[Group]:
    """Dynamic sampling: takes groups one by one until enough of them have unequal rewards."""
    generator = parts.generator.on_main
    sampler = filters.DynamicSampling(generator.pacer.take_size)
    progress.taken = []  # a checkpoint in the middle of it must list these prompts
    while not sampler.full:
        [group] = generator.take(1)
        rewards = shaped_rewards(group.rollouts, flags, progress.rng)  # (G,)
        if sampler.offer(group, rewards):
            progress.taken.append(group)
        else:
            parts.recorder.discarded.append((group, rewards))
            update_history(parts, progress, [group])
            generator.release(1)
    return sampler.take()


def budget_spent(flags: Flags, parts: Parts) -> bool:
    """Whether one of the budgets is used up; says which."""
    clock = parts.recorder.clock
    if flags.max_sampled_tokens and clock.now()["tokens"] >= flags.max_sampled_tokens:
        parts.ranks.say(f"--max_sampled_tokens {flags.max_sampled_tokens} reached")
    elif flags.max_hours and clock.hours() >= flags.max_hours:
        parts.ranks.say(f"--max_hours {flags.max_hours} reached")
    else:
        return False
    return True


def batches_of(taken: Sequence[Group], flags: Flags, trainer: Trainer) -> list[tuple[Sequence[Group], Tensor | None]]:
    """The groups of each step. Truncated importance sampling (TIS) also needs, for each, the (n, T) log-probs of the
    trainer's policy before the first of these steps; the other losses need none."""
    batches = [taken[i : i + flags.batch_prompts] for i in range(0, len(taken), flags.batch_prompts)]
    if flags.loss != "tis":
        return [(groups, None) for groups in batches]
    return [(groups, trainer.score(flat(groups)[1])) for groups in batches]


def flat(groups: Sequence[Group]) -> tuple[list[Rollout], list[Row]]:
    """All rollouts of the groups, and each as the trainer reads it."""
    rollouts, rows = [], []
    for group in groups:
        for rollout in group.rollouts:
            rollouts.append(rollout)
            rows.append(Row(group.problem.prompt_ids, rollout.completion_ids, rollout.mask))
    return rollouts, rows


def shaped_rewards(rollouts: Sequence[Rollout], flags: Flags, rng: random.Random) -> Tensor:
    """(n,) rewards: the verifier's, plus the length penalty, or shuffled for the control."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (n,)
    if flags.length_control == "penalty":
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])  # (n,)
        penalty = length_control.overlong_penalty(lengths, flags.most_sampled, flags.penalty_window)  # (n,)
        penalized = torch.tensor([rollout.correct or flags.penalty_on == "all" for rollout in rollouts])  # (n,)
        rewards = rewards + torch.where(penalized, penalty, 0.0)
    if flags.reward == "shuffled":
        rewards = rewards[rng.sample(range(len(rewards)), len(rewards))]
    return rewards


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """(N, T) with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def optimizer_step(trainer: Trainer, progress: Progress, metrics: Record) -> Record:
    """AdamW's step, and its metrics; `metrics` are the batch's. Without a token that the mask keeps there is no step.
    Nor is there one with a gradient that is not finite; BAD_STEPS of these in a row raise RunFailed."""
    if metrics.get("kept_tokens") == 0:
        trainer.optimizer.zero_grad()
        return {"grad_norm": 0.0, "updated": 0}
    result = trainer.update(progress.version)
    progress.version += int(result["updated"])
    progress.bad_steps = 0 if result["updated"] else progress.bad_steps + 1
    if progress.bad_steps >= BAD_STEPS:
        raise RunFailed(f"the gradient was not finite {progress.bad_steps} times in a row (a lower --lr may help)")
    return result


def update_history(parts: Parts, progress: Progress, groups: Sequence[Group]) -> Record:
    """No-positive-resampling: counts what these groups solved in the pass-rate history, which retires solved prompts.
    `retired_in_flight` are the groups of a prompt that was retired while they were under way."""
    late = sum(parts.history.retired(group.problem.key) for group in groups)
    for group in groups:
        parts.history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])
    parts.recorder.consumed(progress.step, groups)
    return {"retired_in_flight": late, "retired": parts.history.n_retired}


# ---------------------------------------------------------------------------------------------------- the run's end


def save(parts: Parts, progress: Progress) -> Path | None:
    """Writes a checkpoint; returns its folder on rank 0."""

    def state() -> Record:  # of rank 0, which alone has a clock and a generator
        clock = parts.recorder.clock
        compute = clock.now() | {"hours": clock.hours()}
        return run_folder.state_of(progress, parts.history, parts.prompts, parts.generator.on_main, compute)

    return run_folder.save(parts.ranks, parts.folder, progress.step, state)


def finish(flags: Flags, parts: Parts, progress: Progress) -> None:
    """The last evaluation, a checkpoint from which a longer run may go on, the final model, and the law on this run."""
    parts.evaluator.finish(progress)
    if progress.evaluated != progress.step:
        parts.evaluator.begin_evaluation(progress)
        parts.evaluator.finish(progress)
    if flags.save_every or flags.resume:  # a resume from an older checkpoint would cut the logs back to it
        save(parts, progress)
    closing.save_model(parts, progress)
    if parts.ranks.main:
        parts.recorder.bar.close()
        parts.ranks.say(closing.report(parts, flags.k))


def stop_early(parts: Parts, progress: Progress, reason: str) -> None:
    """A checkpoint, and one line that says why the run ends and how to go on."""
    checkpoint = save(parts, progress)
    parts.ranks.say(f"{reason}; checkpoint {checkpoint}; go on with --resume {parts.folder.path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 1 failure, 2 usage, 75 a dead engine, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        return run_with(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


def run_with(argv: Sequence[str]) -> int:
    """One run with these flags, to its end or to the fault that ends it; returns the exit code. Raises UsageError."""
    flags = parse_flags(argv, __doc__ or "")
    for note in [*check_flags(flags), lr_note(flags)]:
        if os.environ.get("RANK", "0") == "0":
            print(note)
    progress = Progress(random.Random(flags.seed))
    parts = new_parts(flags, progress)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stop(progress, number))
        start(flags, parts, progress)
        train(flags, parts, progress)
        finish(flags, parts, progress)
        return 0
    except pipeline_rl.StopRequested:
        stop_early(parts, progress, f"stopped by signal {progress.stop_signal} after step {progress.step}")
        return 128 + (progress.stop_signal or signal.SIGTERM)
    except pipeline_rl.GeneratorFailed as error:
        return generator_failed(parts, progress, error)
    except RunFailed as error:
        newest = parts.folder.newest_checkpoint()
        hint = "there is no checkpoint"
        if newest:
            hint = f"the newest checkpoint, perhaps made after the fault, is {newest[0]}: --resume {parts.folder.path}"
        print(f"train.py: {error}; {hint}", file=sys.stderr)
        return 1
    finally:
        parts.close()


def generator_failed(parts: Parts, progress: Progress, error: pipeline_rl.GeneratorFailed) -> int:
    """The trainer's weights are as good as before, so they are saved. Returns the exit code: DEAD_ENGINE, or 1 for what
    would happen again, as when the user's own reward function raised; a signal that came meanwhile wins."""
    code = DEAD_ENGINE if error.engine_died else 1
    message = str(error).splitlines()[0]
    if isinstance(error.__cause__, RewardError):
        message = with_flag_names(str(error.__cause__))  # with the traceback of the function
    if parts.ranks.count > 1 and parts.generator.channel.trainer_waits:  # the others may wait inside the transfer
        parts.ranks.say(f"train.py: {message}; go on from the newest checkpoint with --resume {parts.folder.path}")
        return code
    stop_early(parts, progress, f"train.py: {message}")
    return 128 + progress.stop_signal if progress.stop_signal else code


def stop(progress: Progress, number: int) -> None:
    """Signal handler: the loop ends at its next wait (under `ppo_off_policy` after k steps), with a checkpoint. The
    second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    progress.stop_signal = number


if __name__ == "__main__":
    sys.exit(main())
