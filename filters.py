"""Which groups to train on: drop those with equal rewards, do not draw solved prompts again, or refill.

PROBLEM. With Â = r - mean_group(r), a group whose rewards are all equal has Â = 0 on every token: no gradient. If it
stays in the batch, it still counts in the prompt average, which shrinks the gradient, and its zeros lower the batch
std, which enlarges it (`normalize_advantages` in losses.py has the numbers). A prompt that the policy solves nine
times in ten still gives a mixed group (of 16) in four of five, but few wrong answers to learn from; one that it nearly
always solves mostly gives equal groups. Drawing these again costs compute and teaches little.

IDEA. ScaleRL (arXiv 2510.13786, section 3.2) filters twice.
- Zero-variance filter: groups with equal rewards leave the loss AND its denominators. The batch is not refilled.
      keep(g)  <=>  max_i r_gi != min_i r_gi
- No-positive-resampling: a prompt whose pass rate so far reaches 0.9 is never drawn again.
      retire(x)  <=>  sum correct(x) / sum rollouts(x) >= threshold     (all visits so far: F1)
DAPO's dynamic sampling (2503.14476, section 3.2) replaces the first: draw until the batch is full of varied groups.

SYMBOLS. N rows (rollouts) · P their groups · r reward · Â advantage · group_ids (N,): which group of this batch a row
belongs to · prompt_key: the prompt's name in the data set in every epoch, for `PassRateHistory` only.

SEVERAL RANKS. `has_variance` needs whole groups. Where ranks share prompts, each must also see every group of the step,
in the same order, or ranks would retire different prompts: gather keys and correctness before `PassRateHistory.update`.
Ranks that have prompts of their own keep histories of their own.

CHOICES, where the paper is silent. F1: the pass rate counts all epochs; by the last visit alone more retires, and our
runs ended lower. F2: a prompt is retired for good; a group of it still in flight trains and counts. F3: the rate is
that of 0/1 correctness, never of shaped rewards, and one group is enough to retire a prompt: a lucky one, or a prompt
forgotten later, goes unnoticed. Do they stay solved? In three runs 2,559 retired prompts were asked again: 95 to 99 %
were still right in nine tries of ten.

>>> has_variance(torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
[True, True, False, False]
>>> history = PassRateHistory(threshold=0.9)
>>> for key, solved in [("train-17", 15), ("train-23", 14)]:
...     history.update(key, [1] * solved + [0] * (16 - solved))
...     print(key, solved / 16, history.retired(key))
train-17 0.9375 True
train-23 0.875 False
>>> list(unretired(["train-17", "train-23", "train-99"], history))
['train-23', 'train-99']
>>> sampler = DynamicSampling(batch_prompts=2)
>>> [sampler.offer(group, rewards) for group, rewards in [("a", [1, 1]), ("b", [1, 0]), ("c", [0, 1])]]
[False, True, True]
>>> sampler.take()
['b', 'c']

QUESTION. If prompt 23 comes again and is solved 16 times of 16, does `update` retire it? (lab/experiments.md)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PromptKey = str | int | tuple  # a tuple of these, such as ("gsm8k", 17)


def has_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(N,) bool: whether the rewards of the row's group differ, so that it can train (arXiv 2510.13786, section 3.2).

    The rows that stay: `rewards[keep]`, `group_ids[keep]`, and of the average `mask * keep[:, None]`. If none, no step.

    Equality is exact: a std that rounding makes 1e-9 instead of 0 would keep a group without a signal. A NaN differs
    from everything, so its group stays and the error shows. Raises ValueError for other shapes than (N,), (N,).
    """
    rewards, group_ids = torch.as_tensor(rewards), torch.as_tensor(group_ids)
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be (N,).")
    ids, group = torch.unique(group_ids, return_inverse=True)  # (P,), (N,)
    zeros = rewards.new_zeros(len(ids))  # (P,), replaced: include_self=False
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)  # (P,)
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)  # (P,)
    # keep(g)  <=>  max_i r_gi != min_i r_gi
    return (highest != lowest)[group]  # (N,)


class PassRateHistory:
    """No-positive-resampling: remembers how often each prompt was solved and retires those that have become easy.

    Update it when a group is consumed, ask `retired` before a prompt is sampled again, and save `state_dict()` with the
    checkpoint. A threshold above 1 retires nothing. Raises ValueError for a threshold that is not finite and > 0, and
    TypeError for a key that is no str, int or tuple of these: a tensor hashes by identity and would be a new prompt.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        if not 0 < threshold < float("inf"):
            raise ValueError(f"PassRateHistory: threshold must be a finite number > 0, got {threshold}.")
        self.threshold = float(threshold)
        self._counts: dict[PromptKey, tuple[int, int]] = {}  # prompt -> (solved, rollouts)
        self._retired: dict[PromptKey, None] = {}  # a set that keeps its order, so that equal runs save equal files

    def update(self, prompt_key: PromptKey, correct: Iterable[bool | int]) -> None:
        """Count one group: `correct` has a 0/1 (or bool) for each of its rollouts.

        Raises ValueError if it is empty or holds anything else (a reward of -1, a shaped 0.5).
        """
        self._check(prompt_key)
        values = [float(c) for c in correct]
        if not values or any(v not in (0.0, 1.0) for v in values):
            raise ValueError(f"PassRateHistory: expected a 0 or 1 for each rollout of the group, got {values}.")
        solved, rollouts = self._counts.get(prompt_key, (0, 0))
        solved += int(sum(values))
        rollouts += len(values)
        self._counts[prompt_key] = (solved, rollouts)
        # solved / rollouts >= threshold; the margin because 0.07 * 100 is 7.000000000000001 in floating point
        if solved >= self.threshold * rollouts - 1e-6:
            self._retired[prompt_key] = None

    def _check(self, prompt_key: object) -> None:
        for part in prompt_key if isinstance(prompt_key, tuple) else [prompt_key]:
            if not isinstance(part, str | int):
                raise TypeError(
                    f"a key must be str, int or a flat tuple of them, got {type(part).__name__}; use str(key)."
                )

    def retired(self, prompt_key: PromptKey) -> bool:
        """Whether the prompt must not be sampled again. A prompt never seen is not retired."""
        self._check(prompt_key)
        return prompt_key in self._retired

    @property
    def n_retired(self) -> int:
        return len(self._retired)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. The counts are a list, because JSON would turn int keys of a dict into strings."""
        counts = [[key, *count] for key, count in self._counts.items()]
        return {"threshold": self.threshold, "counts": counts, "retired": list(self._retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved history. Raises ValueError for a threshold other than its own."""
        saved = state["threshold"]
        if saved != self.threshold:
            raise ValueError(f"PassRateHistory: the state was kept with threshold {saved}, not with {self.threshold}.")

        def key_of(saved: Any) -> PromptKey:  # JSON has no tuples
            return tuple(saved) if isinstance(saved, list) else saved

        self._counts = {key_of(key): (int(solved), int(rollouts)) for key, solved, rollouts in state["counts"]}
        self._retired = dict.fromkeys(map(key_of, state["retired"]))


def unretired(
    prompts: Iterable, history: PassRateHistory, key: Callable[[Any], PromptKey] = lambda prompt: prompt
) -> Iterator:
    """Skips the retired prompts of any iterable: a list of indices, a DataLoader with `batch_size=None`, a `cycle`.
    Each prompt is looked up when it is drawn. `key` gives a prompt's key; without it the prompt is the key.

    Raises RuntimeError when it has skipped 100 times as many in a row as are retired: nothing else will come.
    """
    passed = 0  # retired prompts in a row
    for prompt in prompts:
        passed += 1
        if not history.retired(key(prompt)):
            passed = 0
            yield prompt
        elif passed > 100 * history.n_retired:
            raise RuntimeError(f"all prompts are retired, as it seems ({history.n_retired} are): end the run.")


class NoVariedGroups(RuntimeError):
    """Too many groups in a row had equal rewards."""


class DynamicSampling:
    """DAPO's refill (arXiv 2503.14476, section 3.2): offer groups until `full`, then `take` those with unequal rewards.

    It has no `state_dict`: a resumed run must sample anew the prompts whose groups it had kept.
    """

    def __init__(self, batch_prompts: int) -> None:
        self.batch_prompts = batch_prompts  # groups that make a batch
        self._discarded = 0  # groups in a row, since the last that was kept
        self._groups: list[object] = []

    @property
    def full(self) -> bool:
        return len(self._groups) == self.batch_prompts

    def offer(self, group: object, rewards: Sequence[float] | Tensor) -> bool:
        """Keep the group, or discard it if its (G,) rewards are all equal. Returns whether it was kept; count that.
        With rewards that a length penalty shapes, give 0 and 1 for wrong and right instead: DAPO counts right answers.

        Raises RuntimeError if the batch is full, ValueError for a group without rewards, and NoVariedGroups after 10
        batches of discarded groups in a row, as DAPO's own code does.
        """
        if self.full:
            raise RuntimeError("DynamicSampling: the batch is full; call take() before the next offer().")
        values = torch.as_tensor(rewards, dtype=torch.float64)  # (G,) float64, as Python's numbers are
        if not len(values):
            raise ValueError("DynamicSampling: a group without rewards has nothing to keep or to discard.")
        one_group = torch.zeros_like(values)  # (G,)
        kept = bool(has_variance(values, one_group).any())
        if kept:
            self._groups.append(group)
            self._discarded = 0
        else:
            self._discarded += 1
        if self._discarded >= 10 * self.batch_prompts:
            raise NoVariedGroups(
                f"Dynamic sampling discarded {self._discarded} groups in a row: the policy solves all or none of these "
                "prompts. Use other prompts, more rollouts per prompt, or the zero-variance filter instead."
            )
        return kept

    def take(self) -> list[Any]:
        """The kept groups in the order they were offered. Raises RuntimeError before `full`."""
        if not self.full:
            raise RuntimeError(f"DynamicSampling: {len(self._groups)} of {self.batch_prompts} groups so far.")
        groups, self._groups = self._groups, []
        return groups


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index(">>>") :])
    raise SystemExit(doctest.testmod().failed)
