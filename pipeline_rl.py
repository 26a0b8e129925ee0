"""PipelineRL-k and PPO-off-policy-k: generate and train at the same time, with a bound on how old a token may be.

SYMBOLS. k steps off-policy, v policy version, G rollouts of a prompt, batch: the groups of a step (recipe.py's B).

PROBLEM. Sampling takes most of the time of reinforcement learning on language models, and its slowest completions
take most of that. A trainer that waits for every completion leaves the generator idle at the end of each batch, and is
itself idle until the batch is complete.

IDEA (PipelineRL, arXiv 2509.19128; ScaleRL, arXiv 2510.13786, section 3.1). The generator never stops: prompts stream
in, finished groups stream out, and each optimizer step's weights are swapped into the engine while its requests run.
They go on with the new weights over the keys and values of the old ones: to compute these again would cost a prefill of
each request. A token's recorded log-prob is the one it was drawn with, old keys included, so its ratio is right as it
is. The price is that a token may be trained on by a later policy than the one that sampled it:

    lag(token) = v_train − v_token        v counts updates. v_train: the weights that compute the gradient; v_token:
                                          those that sampled the token. Every token carries its version.

THE BOUND. Groups are numbered as they enter the engine and trained strictly in that order. A new one may enter only
while the following holds:

    outstanding < (k + 1) · batch         outstanding: groups that were admitted, and the weights of the step that
                                          trains them are not yet live in the engine

A group that enters at version v has at most (k + 1) · batch − 1 outstanding groups before it. They fill at most k whole
steps, so at most k updates come between, and the group trains at version v + k at the latest. Its tokens were sampled
at v or later: their lag is at most k. For a batch of 2 and k = 1:

    version live       0          1          2          3
    groups admitted    0 1 2 3    4 5        6 7        8 9
    the step trains    0 1        2 3        4 5        6 7
    lag, at most       0          1          1          1

Nothing is dropped for its age: that would drop the long rollouts. Two shortcuts would break the bound. One: a group
stops being outstanding when it is taken, before its step's weights are live. Then k = 0 would train at lag 1. The
other: the trainer takes whichever groups finish first. Then 1, 2 and 3 would train and make room for 4, 5 and 6 while a
slow group 0 still runs. The count would stay within the limit, yet group 0 would age by one version a step.

A SECOND RULE. The first one guarantees the bound, but finished groups only grow old while they wait. So a new group
enters only if it keeps the trainer from waiting, or replaces one that the trainer took:

    outstanding < (k + 1) · batch  and  (ready < batch  or  under way < needed)

    ready        groups that the trainer could take now: they are finished, and so are all older ones. (If a finished
                 group behind a running one counted, a single long completion would empty the engine.)
    under way    groups admitted and not yet taken
    needed       the most groups that were ever under way. It grows only while ready < batch, when the trainer would
                 wait: so it is the number that keeps the trainer busy.

With a batch of 1, k = 8, an engine for two groups of 2 ticks each, and steps of 3 ticks, no long queue forms:

    tick          0    1  2  3  4  5  6  7  8
    enters        0 1     2        3        4
    taken                 0        1        2
    ready         0    0  1  1  2  1  1  2  1
    under way     2    2  2  2  2  2  2  2  2     needed: 2
    outstanding   2    2  3  3  3  3  3  3  3     9 are allowed

Nor does a group enter while fewer than G slots of the engine are free: nothing queues inside the engine.

PPO-off-policy-k, the alternative, freezes the policy, samples k batches and takes k steps. The pacer keeps at most k
batches outstanding. The caller does the freezing: it pushes once, after the k-th step, and releases all k batches
together, when those weights are live. (Groups that dynamic sampling discards are released earlier; those that take
their place are sampled by the same policy.) Lags are 0..k − 1, and the engine is idle while the trainer works.

P1: the paper has a queue between generator and trainer. Here admission is paced, and groups train in admission order.

SIMPLIFIED. Nothing samples here. generator.py drives an engine by these rules, in a thread of its own; who
copies the concept takes both files.

IN YOUR TRAINER, without generator.py: a thread that samples, and a lock around every call of the pacer. B is the batch.
For several groups at once start several threads; then `next(prompts)` needs the lock, too. If both sides share the
weights, `push` must not change them within a forward pass. (Without a thread training is on policy: by the second
rule no group enters while B are ready.)

    version, ended, changed = 0, False, threading.Condition()  # a lock, with which one side wakes the other

    def generate():
        for prompt in prompts:
            with changed:
                changed.wait_for(lambda: ended or pacer.may_admit())
                if ended:
                    return
                number, began = pacer.admit(), version
            rollouts = sample(prompt)  # yours; each token with the version that samples it. None if that failed
            with changed:
                if rollouts is None:
                    pacer.cancel(number)  # or the trainer would wait for it without end
                else:
                    pacer.finish(Group(number, prompt, began, rollouts))
                changed.notify_all()

    thread = threading.Thread(target=generate, daemon=True)  # so that an error in `train` ends the program
    thread.start()
    while version < steps:
        with changed:
            while not changed.wait_for(lambda: pacer.may_take(B), timeout=1):
                assert thread.is_alive(), "the thread has ended: an error above, or no prompts are left"
            groups = pacer.take(B)
            changed.notify_all()  # others may enter for these
        train(groups)  # yours: one optimizer step
        push()  # yours: its weights are live when this returns, also for what is being sampled
        with changed:
            version += 1
            pacer.release(B)
            ended = version == steps
            changed.notify_all()
    thread.join()  # a program that ends while a thread computes is aborted

`python pipeline_rl.py` simulates the pacing: with k = 0 the trainer waits 77 % of the time, with k = 2 34 %, and with
k = 8 2 %, at a mean lag of 5.3. Then the trainer is the slower side, and 27 % of the engine stays empty.

    >>> pacer = Pacer(batch_prompts=2, k=1)
    >>> numbers = [pacer.admit() for _ in range(4)]
    >>> pacer.may_admit()                  # 4 = (k + 1) · batch are outstanding
    False

QUESTION. Groups 1, 2, 3 finish, group 0 does not. What does `take(2)` return, and who works now? (lab/experiments.md)
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORCED = -1  # the "version" of a token that nobody sampled (the interruption phrase)
Problem = Any  # an object with `prompt_ids`


@dataclass
class Rollout:
    """One completion of one prompt and all that training needs to know about it; lists have one entry per token."""

    completion_ids: list[int]  # with the stop token, which trains, too
    logprobs: list[float]  # the generator's own, at its temperature; 0.0 on forced tokens
    versions: list[int]  # policy version that sampled the token; FORCED on forced tokens
    mask: list[int]  # 1 = sampled, trains; 0 = forced
    finish_reason: str  # "stop" or "length" (truncated)
    interrupted: bool = False  # its thinking was cut and the phrase appended
    prefilled: int = 0  # prompt tokens that the engine computed for it
    reward: float = math.nan  # until it is scored
    correct: bool = False  # what the pass rate counts; a reward may be shaped


@dataclass
class Group:
    """The G rollouts of one prompt: the unit of queueing, filtering and batching."""

    number: int  # order of admission
    problem: Problem
    version: int  # policy version live at admission
    rollouts: list[Rollout]


def rollout_of(sample: Any) -> Rollout:
    """What an engine returned, of which every token trains."""
    ids = list(sample.completion_ids)
    mask = [1] * len(ids)
    return Rollout(ids, sample.logprobs, sample.versions, mask, sample.finish_reason, prefilled=sample.prefilled)


def joined(first: Rollout, forced: list[int], second: Rollout, mask: Callable[[int, int, int], list[int]]) -> Rollout:
    """The two legs of a cut rollout, and the phrase if there was one; nobody sampled the phrase."""
    return Rollout(
        completion_ids=first.completion_ids + forced + second.completion_ids,
        logprobs=first.logprobs + [0.0] * len(forced) + second.logprobs,
        versions=first.versions + [FORCED] * len(forced) + second.versions,
        mask=mask(len(first.mask), len(forced), len(second.mask)),
        finish_reason=second.finish_reason,
        interrupted=bool(forced),
        prefilled=first.prefilled + second.prefilled,
    )


def lags(rollout: Any, version: int) -> list[int]:
    """Lag of each sampled token of `rollout` at the step that makes `version` + 1; forced tokens have none.
    `rollout` may also be a list of versions, one for each token, FORCED where nobody sampled."""
    versions = getattr(rollout, "versions", rollout)
    mask = getattr(rollout, "mask", [v != FORCED for v in versions])
    return [version - v for v, m in zip(versions, mask, strict=True) if m]


class Pacer:
    """Who may start, and who must wait: the rules of the module docstring, counted. `simulate` shows one in use. Not
    safe to call from several threads: call it from one event loop, or hold a lock. Of a group it reads `.number` only.

    Args:
        batch_prompts: groups that train in a step.
        k: `pipeline`: k >= 0, lag in 0..k. `ppo_off_policy`: k >= 1, lag in 0..k-1.
        min_ready: groups that stay ready when the trainer takes a batch, at most k batches, `pipeline` only. Each batch
            of them raises the lag by about 1. Above 0, a new group enters only while fewer than `min_ready` and a batch
            are ready: taken groups are not replaced at once. Set it to 0 when no prompt is left to admit.

    Raises ValueError for an unknown schedule or impossible numbers.
    """

    def __init__(self, batch_prompts: int, k: int, *, schedule: str = "pipeline", min_ready: int = 0):
        if schedule not in ("pipeline", "ppo_off_policy"):
            raise ValueError(f"schedule must be one of pipeline, ppo_off_policy, not {schedule!r}")
        least_k = 0 if schedule == "pipeline" else 1
        if batch_prompts < 1 or k < least_k:
            raise ValueError(f"{schedule} needs batch_prompts >= 1 and k >= {least_k}, not {batch_prompts} and {k}")
        self.take_size = batch_prompts if schedule == "pipeline" else k * batch_prompts  # groups the trainer takes
        self.capacity = (k + 1) * batch_prompts if schedule == "pipeline" else k * batch_prompts
        most = self.capacity - self.take_size
        if not 0 <= min_ready <= most:
            raise ValueError(f"min_ready must be {f'from 0 to {most}' if most else '0'}, not {min_ready}")
        self.min_ready = min_ready
        self.needed = 0  # the most groups that were ever under way
        self.admitted = 0  # numbers given out so far
        self.training = 0  # taken by the trainer, their step not yet live
        self._groups: dict[int, Any] = {}  # under way, in number order; None while the group runs

    @property
    def outstanding(self) -> int:
        """Groups admitted whose step is not yet live."""
        return len(self._groups) + self.training

    @property
    def ready(self) -> int:
        """Finished groups that the trainer could take now: those before the first one that still runs."""
        return sum(1 for _ in itertools.takewhile(lambda group: group is not None, self._groups.values()))

    def may_admit(self) -> bool:
        """Whether one more group may enter the engine."""
        trainer_would_wait = not self.may_take(self.take_size)
        replaces_one_taken = self.min_ready == 0 and len(self._groups) < self.needed
        return self.outstanding < self.capacity and (trainer_would_wait or replaces_one_taken)

    def admit(self) -> int:
        """The number of the group that enters now. Raises RuntimeError if none may enter."""
        if not self.may_admit():
            counts = f"{self.outstanding} of {self.capacity} are outstanding, {self.ready} are ready"
            raise RuntimeError(f"no group may enter now ({counts}); ask may_admit() first")
        self._groups[self.admitted] = None
        self.needed = max(self.needed, len(self._groups))
        self.admitted += 1
        return self.admitted - 1

    def finish(self, group: Group) -> None:
        """Every rollout of `group` is complete and scored. Raises KeyError if it was not running."""
        if group.number not in self._groups or self._groups[group.number] is not None:
            raise KeyError(f"group {group.number} is not running")
        self._groups[group.number] = group

    def cancel(self, number: int) -> None:
        """Group `number` will never finish: its request failed. It stops being outstanding, and those behind it move
        up. Raises KeyError if it was taken already, or never admitted."""
        del self._groups[number]

    def may_take(self, count: int) -> bool:
        """Whether `count` groups are ready and `min_ready` more."""
        return self.ready >= count + self.min_ready

    def take(self, count: int) -> list[Group] | None:
        """The `count` oldest groups, or None: the trainer must wait for them, even if younger groups are finished."""
        if not self.may_take(count):
            return None
        self.training += count
        return [self._groups.pop(number) for number in list(self._groups)[:count]]

    def release(self, count: int) -> None:
        """`count` taken groups stop being outstanding: their step is live in the engine, was skipped, or dynamic
        sampling discarded them."""
        if count > self.training:
            raise ValueError(f"{count} groups released, but only {self.training} are in training")
        self.training -= count


def simulate(k: int, schedule: str = "pipeline", batch: int = 8, slots: int = 24) -> tuple[list[int], float, float]:
    """(lags of all tokens, share of the time that slots were empty, share that the trainer waited) of 200 steps on an
    engine that samples one token of each group inside it a tick (groups of one rollout), while the trainer takes 16
    ticks a step."""
    pacer = Pacer(batch, k, schedule=schedule)
    rng = random.Random(0)
    steps = pacer.take_size // batch  # of each take
    lengths: dict[int, int] = {}  # number -> length of a group that runs
    versions: dict[int, list[int]] = {}  # number -> the version of each of its tokens
    token_lags: list[int] = []
    version = tick = empty = waited = 0
    live_at = math.inf  # the tick at which the weights of the steps in progress go live
    while version < 200:
        if tick == live_at:
            version += steps
            live_at = math.inf
            pacer.release(pacer.take_size)
        if live_at == math.inf and (groups := pacer.take(pacer.take_size)):
            for i, group in enumerate(groups):
                token_lags += [version + i // batch - v for v in versions[group.number]]
            live_at = tick + 16 * steps
        while pacer.may_admit() and len(lengths) < slots:
            number = pacer.admit()
            lengths[number] = rng.randint(10, 60)
            versions[number] = []
        empty += slots - len(lengths)
        waited += live_at == math.inf
        tick += 1
        for number, length in list(lengths.items()):
            versions[number].append(version)
            if len(versions[number]) == length:
                del lengths[number]
                pacer.finish(Group(number, None, versions[number][0], []))
    return token_lags, empty / slots / tick, waited / tick


if __name__ == "__main__":
    print("simulated        lag mean   largest   slots empty   trainer waits")
    for schedule, k in (("pipeline", 0), ("pipeline", 1), ("pipeline", 2), ("pipeline", 8), ("ppo_off_policy", 3)):
        lag, empty, waited = simulate(k, schedule)  # lag of each token
        print(f"{schedule:14} {k} {sum(lag) / len(lag):9.2f} {max(lag):9} {empty:13.0%} {waited:15.0%}")
