"""Which groups of rollouts are worth a step: no variance, too easy, or refill until the batch is full.

PROBLEM. With A = r - mean_group(r), a group whose rewards are all equal has A = 0 on every token: it costs sampling and
has no gradient. Left in the batch it still counts in the denominators of the loss and shrinks the step. And a prompt
that the policy nearly always solves will mostly give such groups, so sampling it again is compute without a signal.

IDEA. ScaleRL (arXiv 2510.13786, section 3.2) filters twice.
- Zero-variance filter: groups with equal rewards leave the loss AND its denominators; the batch is not refilled.
      keep(g)  <=>  max_i r_gi != min_i r_gi
- No-positive-resampling: a prompt whose historical pass rate reaches 0.9 is never sampled again.
      retire(x)  <=>  sum correct(x) / sum rollouts(x) >= threshold
DAPO's dynamic sampling (2503.14476, section 3.2) is the alternative to the first: draw groups until B have variance.

SYMBOLS. N rows (rollouts) · r reward · group_ids (N,) one id a group: a prompt twice in a batch is two groups ·
prompt_key in `PassRateHistory`: the data set's own stable key, the same in every epoch · B prompts an optimiser step.

SEVERAL RANKS. Each rank must see every group of the step: gather rewards and ids before `has_variance`, and (id,
correct) before `PassRateHistory.update`, in the same order everywhere. Otherwise the ranks come to retire different
prompts, and denominators differ.

CHOICES, where the paper is silent. F1: the pass rate is cumulative over all epochs; `window="latest"` takes the last
group only. F2: retirement is for good, also if a group still in flight lowers the rate afterwards. F3: the rate counts
0/1 correctness, never a shaped reward, and there is no least number of rollouts beyond one group.

>>> has_variance(torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
[True, True, False, False]
>>> history = PassRateHistory(threshold=0.9)
>>> history.update("train-17", [1] * 9 + [0]), history.retired("train-17")  # 9/10 reaches 0.9
(None, True)
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

PromptKey = str | int


def has_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(N,) bool: True, to keep, where the row's group has unequal rewards (arXiv 2510.13786, section 3.2).

    Equality is exact: a std that rounding makes 1e-9 instead of 0 would keep a group without a signal. A NaN reward is
    unequal to all, so that its group stays and the error shows. Groups of one row are dropped.
    rewards (N,), group_ids (N,) in any order. Raises ValueError for other shapes.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be (N,).")
    _, group = torch.unique(group_ids, return_inverse=True)  # (N,)
    blank = torch.zeros_like(rewards)  # (N,), room for a value a group: the first P are used
    highest, lowest = (blank.scatter_reduce(0, group, rewards, f, include_self=False) for f in ("amax", "amin"))
    return (highest != lowest)[group]  # (N,)


class PromptsExhausted(RuntimeError):
    """No prompt is left to sample: every one is retired, or too many groups in a row had equal rewards."""


class PassRateHistory:
    """No-positive-resampling: remembers how often each prompt was solved and retires those that became easy.

    Update it when a group is consumed, ask `retired` before a prompt is sampled again. It is state of the run: save
    `state_dict()` with the checkpoint.

    Args:
        threshold: pass rate from which a prompt is retired, > 0. Above 1 no prompt ever is: the off value.
        window: `cumulative` counts all groups of a prompt, `latest` the last one (F1).
    Raises:
        ValueError: threshold not a finite number > 0, or an unknown window.
    """

    def __init__(self, threshold: float = 0.9, window: str = "cumulative") -> None:
        if not 0 < threshold < float("inf"):
            raise ValueError(f"PassRateHistory: threshold must be a finite number > 0, got {threshold}.")
        if window not in ("cumulative", "latest"):
            raise ValueError(f"PassRateHistory: window={window!r} is not one of cumulative, latest.")
        self.threshold, self.window = float(threshold), window
        self._counts: dict[PromptKey, tuple[int, int]] = {}  # prompt -> (correct, rollouts)
        self._retired: dict[PromptKey, None] = {}  # a set that keeps its order, so that equal runs save equal files

    def update(self, prompt_key: PromptKey, correct: Iterable[bool | int]) -> None:
        """Count one group: `correct` has a 0/1 (or bool) for each of its rollouts.

        Raises ValueError if `correct` is empty or holds anything but 0 and 1 (a reward of -1, a shaped 0.5). This and
        the other methods raise TypeError for a prompt id that is neither str nor int: a 0-d tensor hashes by identity
        and would be a new prompt every time, one that is never retired.
        """
        values = [float(c) for c in correct]
        if not values or any(v not in (0.0, 1.0) for v in values):
            raise ValueError(f"PassRateHistory: expected a 0 or 1 for each rollout of the group, got {values}.")
        self._check(prompt_key)
        before = self._counts.get(prompt_key, (0, 0)) if self.window == "cumulative" else (0, 0)
        solved, rollouts = before[0] + int(sum(values)), before[1] + len(values)
        self._counts[prompt_key] = (solved, rollouts)
        # solved / rollouts >= threshold, in integers: 0.57 * 100 is 56.99999999999999 in floating point
        bound = Fraction(str(self.threshold))
        if solved * bound.denominator >= bound.numerator * rollouts:
            self._retired[prompt_key] = None

    def _check(self, prompt_key: Any) -> None:
        if not isinstance(prompt_key, PromptKey):
            kind = type(prompt_key).__name__
            raise TypeError(f"PassRateHistory: prompt_key must be str or int, got {kind}; use int(id) or str(id).")

    def pass_rate(self, prompt_key: PromptKey) -> float | None:
        """Share of the prompt's counted rollouts that were correct, or None if none was counted yet."""
        self._check(prompt_key)
        solved, rollouts = self._counts.get(prompt_key, (0, 0))
        return solved / rollouts if rollouts else None

    def retired(self, prompt_key: PromptKey) -> bool:
        """Whether the prompt must not be sampled again. A prompt never seen is not retired."""
        self._check(prompt_key)
        return prompt_key in self._retired

    @property
    def n_retired(self) -> int:
        """How many prompts are retired so far, for the log."""
        return len(self._retired)

    def remaining(self, prompt_keys: Sequence[PromptKey]) -> list[PromptKey]:
        """Those of a pool that may still be sampled, in order. Raises PromptsExhausted if none is left."""
        left = [p for p in prompt_keys if not self.retired(p)]
        if not left:
            raise PromptsExhausted(
                f"All {len(prompt_keys)} prompts reached a pass rate of {self.threshold}: the run has learnt its pool. "
                "Use more prompts or a higher pass-rate threshold."
            )
        return left

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ids stand in lists, as JSON would turn the int keys of a dict into strings."""
        counts = [[prompt_key, solved, rollouts] for prompt_key, (solved, rollouts) in self._counts.items()]
        return {"threshold": self.threshold, "window": self.window, "counts": counts, "retired": list(self._retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved history; unchanged if the state is refused.

        Raises ValueError for missing or unknown keys, another threshold or window than this object's, or counts that
        are not [id, correct, rollouts] with 0 <= correct <= rollouts, each id once, each retired id counted.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"PassRateHistory: the state has keys {sorted(state)}, not {sorted(self.state_dict())}.")
        if (state["threshold"], state["window"]) != (self.threshold, self.window):
            raise ValueError(
                f"PassRateHistory: the state was kept with threshold {state['threshold']} and window "
                f"{state['window']}, this run has {self.threshold} and {self.window}."
            )
        counts: dict[PromptKey, tuple[int, int]] = {}
        for entry in state["counts"]:
            match entry:
                case [int() | str() as prompt_key, int(solved), int(rollouts)] if prompt_key not in counts:
                    counts[prompt_key] = (solved, rollouts)
                case _:
                    raise ValueError(f"PassRateHistory: {entry!r} is not [id, correct, rollouts] of a new id.")
            if not (0 <= solved <= rollouts and rollouts > 0):
                raise ValueError(f"PassRateHistory: {entry!r} does not hold 0 <= correct <= rollouts, rollouts > 0.")
        if not set(state["retired"]) <= set(counts):
            raise ValueError("PassRateHistory: a retired prompt is missing from the counts.")
        self._counts, self._retired = counts, dict.fromkeys(state["retired"])


class DynamicSampling:
    """DAPO's refill (arXiv 2503.14476, section 3.2): draw groups until B of them have unequal rewards.

    Offer groups as they are consumed, train when `full`:

        while not sampler.full:
            sampler.offer(next_group, rewards)
        groups = sampler.take()

    A refill costs sampling that is not trained on: `discarded` and `offered` count it since the last `take`. One
    consumer only: with two, both may see `full` as False, and the second offer raises. There is no `state_dict`: the
    groups it holds are lost at a checkpoint, so sample their prompts again after a resume.

    Args:
        batch_prompts: B.
        max_in_a_row: groups with equal rewards in a row after which it gives up; 10 * B if None (DAPO's own code
            gives up after 10 batches).
    Raises:
        ValueError: batch_prompts or max_in_a_row below 1.
    """

    def __init__(self, batch_prompts: int, max_in_a_row: int | None = None) -> None:
        self.batch_prompts = batch_prompts
        self.max_in_a_row = 10 * batch_prompts if max_in_a_row is None else max_in_a_row
        if self.batch_prompts < 1 or self.max_in_a_row < 1:
            raise ValueError(f"DynamicSampling: {batch_prompts=} and {max_in_a_row=} must be at least 1.")
        self.offered = 0
        self.discarded = 0
        self._in_a_row = 0
        self._groups: list[Any] = []

    @property
    def full(self) -> bool:
        """Whether B groups are kept, so that `take` may be called."""
        return len(self._groups) == self.batch_prompts

    def offer(self, group: Any, rewards: Sequence[float] | Tensor) -> bool:
        """Keep the group, or discard it if its (G,) rewards are all equal. Returns whether it was kept.

        Raises RuntimeError if the batch is full already, ValueError for a group without rewards, and PromptsExhausted
        after `max_in_a_row` discarded groups.
        """
        if self.full:
            raise RuntimeError("DynamicSampling: the batch is full; call take() before the next offer().")
        values = torch.as_tensor(rewards, dtype=torch.float64)  # (G,)
        if not len(values):
            raise ValueError("DynamicSampling: a group without rewards has nothing to keep or to discard.")
        keep = bool(has_variance(values, torch.zeros(len(values), dtype=torch.long)).any())
        self.offered += 1
        if keep:
            self._groups.append(group)
            self._in_a_row = 0
            return True
        self.discarded += 1
        self._in_a_row += 1
        if self._in_a_row >= self.max_in_a_row:
            raise PromptsExhausted(
                f"Dynamic sampling discarded {self._in_a_row} groups in a row: the policy solves all or none of these "
                "prompts. Use other prompts, more rollouts a prompt, or the zero-variance filter instead."
            )
        return False

    def take(self) -> list[Any]:
        """The B kept groups in the order they were offered; the next batch starts with counts of 0.

        Raises RuntimeError if the batch is not full.
        """
        if not self.full:
            raise RuntimeError(f"DynamicSampling: {len(self._groups)} of {self.batch_prompts} groups so far.")
        groups, self._groups = self._groups, []
        self.offered = self.discarded = 0
        return groups
