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
docs/one_group.md follows one group through it. runtime/ holds the machinery: the forward and backward pass in
trainer.py and model.py, the proof that new weights reached the generator in evaluation.py, the parts of a run in
parts.py. tasks/ has the prompts and the graders.

Two counters: a step consumes one batch of B groups, a version is one optimizer update. A step makes no update, and the
version stays, when no rollout is left to train on (all groups have equal rewards, or the rest were truncated and
dropped), when `--mask` keeps no token and the loss has no other term, or when the gradient is not finite.

To add an ingredient, write a function in its concept file, a flag in runtime/flags.py, and one line in `train`. A new
loss or mask goes into losses.LOSSES or masks.MASKS, and its options into runtime/trainer.py.
"""

import os
import random
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

import filters
import length_control
import losses
from pipeline_rl import Group, Rollout
from runtime import closing, run_folder
from runtime.flag_checks import check_flags, choose_engine, lr_note
from runtime.flags import Flags, UsageError, parse_flags, with_flag_names
from runtime.generator import Exhausted, GeneratorFailed, StopRequested
from runtime.model import TokenRow
from runtime.parts import Parts, new_parts, start
from runtime.ranks import report_fault
from runtime.run_folder import Progress, Record, RunFailed
from runtime.trainer import Trainer, TrainingBatch
from tasks.judges import RewardError

BAD_STEPS = 3  # gradients in a row that are not finite, before the run ends
DEAD_ENGINE = 75  # exit code after an engine failure, "temporary failure" in sysexits.h: --resume continues


def train(flags: Flags, parts: Parts, progress: Progress) -> None:
    """The loop. While a step is computed here, the generator samples the groups of the next ones (`pipeline`), or waits
    for new weights (`ppo_off_policy`). With several trainer processes, each runs this loop on the same groups.

    Shapes: a batch has B groups (prompts) of G rollouts, N = B·G rows in all, of which K train. T: tokens of the
    longest completion among these. v: the policy version. `parts`: the objects of the run. `progress`: what a
    checkpoint saves.
    """
    generator, trainer, evaluator, recorder = parts.generator, parts.trainer, parts.evaluator, parts.recorder
    evaluator.begin_if_due(progress)
    # Waits for the oldest groups; the generator has already cut their thinking.
    while (round_groups := collect(flags, parts, progress)) is not None:
        first_step, first_version = progress.step, progress.version
        # One batch of B groups under `pipeline`; k batches, all sampled by the same policy, under `ppo_off_policy`.
        batches = split(round_groups, flags.batch_prompts)
        # For TIS: the log-probs of each batch under the policy before the first of these steps.
        all_old_logprobs = [score_groups(groups, trainer) if flags.loss == "tis" else None for groups in batches]
        for groups, old_logprobs in zip(batches, all_old_logprobs, strict=True):
            version = progress.version  # the lag of a token is this version minus the token's
            rollouts, rows = rollouts_and_rows(groups)  # N of each
            # (N,) index of the group in this batch; a prompt may occur twice
            group_ids = torch.arange(len(groups)).repeat_interleave(flags.rollouts)
            rewards = shaped_rewards(rollouts, flags)  # (N,)
            if flags.reward == "shuffled":  # the control
                draw = random.Random(f"{flags.seed} {progress.step}")
                rewards = rewards[draw.sample(range(len(rewards)), len(rewards))]
            varied = filters.has_variance(rewards, group_ids)  # (N,)
            metrics = recorder.sampled(groups, rewards, varied)

            # Zero-variance filter: groups with equal rewards have no gradient. They leave before the std and the
            # average are taken; otherwise the step size would depend on how many such groups there are.
            keep = varied if flags.zero_variance_filter else torch.ones_like(varied)  # (N,)
            # Advantage: the reward minus its group's mean, over the std of the whole batch.
            advantages = torch.zeros_like(rewards)  # (N,)
            advantages[keep] = losses.normalize_advantages(rewards[keep], group_ids[keep], flags.normalize_advantages)
            # O3 (see docs/choices.md): truncated rollouts may leave, but only now. Dropped earlier, they would leave
            # the group's mean to its short rollouts.
            if flags.truncated_rollouts == "drop":
                truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])  # (N,)
                metrics["truncated_dropped"] = int((keep & truncated).sum())
                keep = keep & ~truncated

            batch = None
            if keep.any():
                kept_rollouts = list(compress(rollouts, keep))  # K of the N
                mask = pad([rollout.mask for rollout in kept_rollouts], torch.bool)  # (K, T)
                behaviour = pad([rollout.logprobs for rollout in kept_rollouts], torch.float32)  # (K, T)
                # The average of the loss, as one weight per token: per prompt, per sample, over all tokens, ...
                token_weights = losses.aggregation_weights(
                    mask, group_ids[keep], flags.aggregation, flags.completion_cap
                )  # (K, T)
                old_kept = None
                if old_logprobs is not None:
                    old_kept = old_logprobs[keep, : mask.shape[1]]  # (K, T)
                kept_rows = list(compress(rows, keep))
                batch = TrainingBatch(kept_rows, behaviour, mask, advantages[keep], token_weights, old_kept)
                # CISPO on FP32 logits, forward and backward: runtime/trainer.py
                loss_has_terms, loss_metrics = trainer.backward(batch)
                metrics |= loss_metrics
                # An evaluation or a probe (the test that weights arrived) was sampled with the current weights and is
                # checked against them, so it must finish before they change.
                metrics |= evaluator.wait(progress)
                metrics |= optimizer_step(trainer, progress, loss_has_terms)  # AdamW: v becomes v + 1

            metrics |= update_history(parts, groups)  # no-positive-resampling: solved prompts are retired
            recorder.consumed(progress.step, groups)
            progress.step += 1
            del progress.taken[: len(groups)]
            recorder.step(progress, groups, batch, metrics, version)

        # Push in flight: running requests go on with the new weights. The groups count as outstanding until the new
        # weights are live.
        if progress.version > first_version:
            generator.push(trainer.weights, progress.version, release=len(round_groups))
        else:
            generator.release(len(round_groups))
        recorder.samples(progress.step, batches[-1])
        evaluator.begin_if_due(progress)  # every `eval_every` steps; it runs during the next step
        crossed = flags.save_every and progress.step // flags.save_every > first_step // flags.save_every
        if crossed and progress.step < flags.max_steps:  # `end_of_run` saves the last one
            save(parts, progress)


# ------------------------------------------------------------------------------------------- what the loop is made of


def collect(flags: Flags, parts: Parts, progress: Progress) -> list[Group] | None:
    """The groups of the next round, the same on every rank: the B oldest, or under `ppo_off_policy` the k·B oldest,
    shuffled. None at the end of the run: the steps, a budget, or the prompts are used up."""
    groups = parts.ranks.from_main(lambda: wait_for_groups(flags, parts, progress))
    if groups is not None:  # if None, keep what dynamic sampling has collected; the last checkpoint lists it
        progress.taken = list(groups)
    return groups


def wait_for_groups(flags: Flags, parts: Parts, progress: Progress) -> list[Group] | None:
    """`collect` on rank 0."""
    generator, say = parts.generator.on_main, parts.ranks.say
    if progress.step >= flags.max_steps or limit_reached(flags, parts):
        return None
    try:
        with parts.recorder.waiting():
            if flags.dynamic_sampling:
                groups = refill(flags, parts, progress)
            else:
                groups = generator.take(generator.pacer.take_size)
    except (Exhausted, filters.NoVariedGroups) as reason:
        retired = f"{parts.history.n_retired} of {len(parts.task.train)} prompts are retired"
        say(f"{reason}; {retired}. The run ends.")
        return None
    if flags.schedule == "ppo_off_policy":
        # The k batches are to be random samples of what one policy sampled, as in PPO; in admission order, each batch
        # would hold consecutive prompts.
        progress.rng.shuffle(groups)
    return groups


def refill(flags: Flags, parts: Parts, progress: Progress) -> list[Group]:
    """Dynamic sampling: takes groups one by one until enough of them have unequal rewards."""
    generator = parts.generator.on_main
    sampler = filters.DynamicSampling(generator.pacer.take_size)
    progress.taken = []  # a checkpoint in the middle of it must list these prompts
    while not sampler.full:
        [group] = generator.take(1)
        progress.taken.append(group)  # whatever is raised now, a checkpoint lists it
        rewards = shaped_rewards(group.rollouts, flags)  # (G,)
        if not sampler.offer(group, rewards):
            progress.taken.pop()
            parts.recorder.discarded.append((group, rewards))
            parts.recorder.retired_in_flight = update_history(parts, [group])["retired_in_flight"]
            parts.recorder.consumed(progress.step, [group])
            generator.release(1)
    return sampler.take()


def limit_reached(flags: Flags, parts: Parts) -> bool:
    """Whether one of the budgets is used up; says which."""
    clock = parts.recorder.clock
    if flags.max_sampled_tokens and clock.now()["tokens"] >= flags.max_sampled_tokens:
        parts.ranks.say(f"--max_sampled_tokens {flags.max_sampled_tokens} reached")
    elif flags.max_hours and clock.hours() >= flags.max_hours:
        parts.ranks.say(f"--max_hours {flags.max_hours} reached")
    else:
        return False
    return True


def split(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """The groups of each step, in their order."""
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def score_groups(groups: Sequence[Group], trainer: Trainer) -> Tensor:
    """(N, T) log-probs of all rollouts under the trainer's policy as it is now."""
    _, rows = rollouts_and_rows(groups)
    return trainer.score(rows)


def rollouts_and_rows(groups: Sequence[Group]) -> tuple[list[Rollout], list[TokenRow]]:
    """All rollouts of the groups, and each as the trainer reads it."""
    rollouts, rows = [], []
    for group in groups:
        for rollout in group.rollouts:
            rollouts.append(rollout)
            rows.append(TokenRow(group.problem.prompt_ids, rollout.completion_ids, rollout.mask))
    return rollouts, rows


def shaped_rewards(rollouts: Sequence[Rollout], flags: Flags) -> Tensor:
    """(N,) rewards: the verifier's, plus the length penalty."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts])  # (N,)
    if flags.length_control == "penalty":
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])  # (N,)
        penalty = length_control.overlong_penalty(lengths, flags.completion_cap, flags.penalty_window)  # (N,)
        applies = torch.tensor([rollout.correct or flags.penalty_on == "all" for rollout in rollouts])  # (N,)
        rewards = rewards + torch.where(applies, penalty, 0.0)
    return rewards


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


def update_history(parts: Parts, groups: Sequence[Group]) -> Record:
    """No-positive-resampling: counts what these groups solved in the pass-rate history, which retires solved prompts.
    `retired_in_flight` are the groups of a prompt that was retired while they were under way, those that dynamic
    sampling discarded since the last step among them."""
    late, parts.recorder.retired_in_flight = parts.recorder.retired_in_flight, 0
    late += sum(parts.history.retired(group.problem.key) for group in groups)
    for group in groups:
        parts.history.update(group.problem.key, [rollout.correct for rollout in group.rollouts])
    return {"retired_in_flight": late, "retired": parts.history.n_retired}


# ---------------------------------------------------------------------------------------------------- the run's end


def save(parts: Parts, progress: Progress) -> Path | None:
    """Writes a checkpoint; returns its folder on rank 0. Raises RunFailed for weights that are not finite, which would
    take the place of good ones."""
    check_weights(parts)

    def state() -> Record:  # of rank 0, which alone has a clock and a generator
        clock = parts.recorder.clock
        compute = clock.now() | {"hours": clock.hours()}
        return run_folder.state_of(progress, parts.history, parts.prompts, parts.generator.on_main, compute)

    return run_folder.save(parts.ranks, parts.folder, progress.step, state)


def check_weights(parts: Parts) -> None:
    """Raises RunFailed for weights that are not finite."""
    if not parts.trainer.weights_are_finite():
        raise RunFailed("the weights are not finite, so they are not saved")


def end_of_run(flags: Flags, parts: Parts, progress: Progress) -> None:
    """The last evaluation, a checkpoint from which a longer run may go on, the final model, and the sigmoid fitted to
    this run."""
    parts.evaluator.wait(progress)
    if progress.evaluated != progress.step:
        parts.evaluator.begin_evaluation(progress)
        check = parts.evaluator.wait(progress)
        parts.ranks.say(f"weights check of the last evaluation: {check['logprob_gap']:.1e} nats per token")
    if flags.save_every or flags.resume:  # otherwise the next --resume would start from the older checkpoint
        save(parts, progress)
    check_weights(parts)
    closing.save_model(parts, progress)
    if parts.ranks.main:
        parts.recorder.close()
        parts.ranks.say(closing.report(parts, flags.k))


def checkpoint_message(parts: Parts, progress: Progress, reason: str) -> str:
    """Saves a checkpoint; returns one line that says why the run ends and how to continue."""
    checkpoint = save(parts, progress)
    return f"{reason}; checkpoint {checkpoint}; continue with --resume {parts.folder.path}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 1 failure, 2 usage, 75 a dead engine, 129 after SIGHUP, 130 after Ctrl-C, 143 after
    SIGTERM. (A launcher of several processes has exit codes of its own.)"""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="replace")  # a terminal may have ASCII only
    try:
        return run_with(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)  # on every rank: it may be the only one that failed
        return 2


def run_with(argv: Sequence[str]) -> int:
    """One run with these flags, to its end or to the fault that ends it; returns the exit code. Raises UsageError."""
    flags = parse_flags(argv, __doc__ or "")
    messages = [*check_flags(flags), *choose_engine(flags), lr_note(flags)]
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(messages))
    progress = Progress(random.Random(flags.seed))
    parts = new_parts(flags, progress)
    try:
        return run(flags, parts, progress)
    except RunFailed as error:
        hint = "there is no checkpoint"
        if newest := parts.folder.newest_checkpoint():
            hint = f"the newest checkpoint, possibly written after the failure, is {newest[0]}: "
            hint += f"--resume {parts.folder.path}"
        report_fault(f"{error}; {hint}")
        return 1
    finally:
        parts.close()


def run(flags: Flags, parts: Parts, progress: Progress) -> int:
    """The run itself, and a checkpoint where it is stopped or its engine dies; returns the exit code."""
    catch_signals(progress)
    try:
        start(flags, parts, progress)
    except StopRequested:
        parts.ranks.say(f"stopped by signal {progress.stop_signal} before the first step; nothing is written")
        return 128 + progress.stop_signal
    try:
        train(flags, parts, progress)
        end_of_run(flags, parts, progress)
        return 0
    except StopRequested:
        reason = f"stopped by signal {progress.stop_signal} after step {progress.step}"
        parts.ranks.say(checkpoint_message(parts, progress, reason))
        return 128 + (progress.stop_signal or signal.SIGTERM)
    except GeneratorFailed as error:
        return generator_failed(parts, progress, error)


def generator_failed(parts: Parts, progress: Progress, error: GeneratorFailed) -> int:
    """The trainer's weights are unaffected, so they are saved. Returns the exit code: DEAD_ENGINE, or 1 for what
    would happen again, as when the user's own reward function raised; a signal that came meanwhile wins."""
    code = DEAD_ENGINE if error.engine_died else 1
    message = str(error).splitlines()[0]
    if isinstance(error.__cause__, RewardError):
        message = with_flag_names(str(error.__cause__))  # with the traceback of the function
    report_fault(checkpoint_message(parts, progress, message))
    return 128 + progress.stop_signal if progress.stop_signal else code


def catch_signals(progress: Progress) -> None:
    """From now on, Ctrl-C, SIGTERM and the end of the terminal stop the run."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # ignored under nohup
        numbers.append(hangup)
    for number in numbers:
        signal.signal(number, lambda number, frame: stop(progress, number))


def stop(progress: Progress, number: int) -> None:
    """Signal handler: the loop ends at its next wait (under `ppo_off_policy` after k steps), with a checkpoint. The
    second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    progress.stop_signal = number


if __name__ == "__main__":
    sys.exit(main())
