"""Length control: keep completions short enough that they end with an answer.

PROBLEM. A completion that hits the length cap has no answer, so its reward says nothing about its thinking. Truncations
also announce trouble: in ScaleRL (arXiv 2510.13786) 10-15 % of them preceded a collapse, healthy runs stayed below 5 %.

IDEA 1, forced interruption (ScaleRL's choice, arXiv 2510.13786, section 2). Thinking may take L_think tokens, drawn
uniformly from [min_budget, max_budget] for every rollout, so that there is no single deadline to learn. Where thinking
has not ended by then, a fixed phrase ends it, and the policy goes on with up to `answer_budget` answer tokens. An
engine serves this as two requests, the legs:

    leg 1: prompt                             up to L_think tokens
    leg 2: prompt + leg 1 + PHRASE            up to answer_budget tokens      if thinking was cut
           prompt + leg 1                     what is left of answer_budget   if only the answer was cut

    completion = leg 1 + forced + leg 2       mask = 1...1 0...0 1...1        forced = PHRASE, or nothing

IDEA 2, the overlong penalty (the alternative; DAPO, arXiv 2503.14476, Eq. 13). The reward falls on a ramp over the last
L_cache tokens before the cap L_max: 0 up to L_max - L_cache, -1/2 in the middle, -1 from L_max on.

    penalty(y) = clip((L_max - |y|) / L_cache - 1, -1, 0)

SYMBOLS. |y| completion length in tokens, L_think thinking budget, L_max cap, L_cache width of the ramp, N rollouts.

A batch engine such as Hugging Face's `generate`, with one limit for all rows and no finish reason, serves leg 1 so:
generate max(budgets) tokens, cut each row to its own budget, and call a row "length" if no stop token is left in it.

SIMPLIFIED. The answer budget is checked between the legs only: an answer begun early may run on inside leg 1, which
L_think bounds. An end-of-thinking mark of several tokens that the deadline cuts in two is not mended; the phrase brings
a whole one.

CHOICES, where papers are silent or differ. T1: the phrase is masked, as the policy did not sample it and there is no
log-prob to divide by (where an array needs one on forced tokens, any value does). T2: ScaleRL's paper adds the penalty
to correct answers only, DAPO to all; the caller chooses.

>>> cut = Interruption(10, 12, answer_budget=4, phrase_ids=[7, 8, 9], end_of_thinking_ids=[9])
>>> leg = cut.second_leg(prompt_ids=[1, 2], completion_ids=[3] * 11, finish_reason="length")
>>> leg.max_tokens, leg.forced_ids, cut.mask(n_first=2, n_forced=len(leg.forced_ids), n_second=1)
(4, [7, 8, 9], [1, 1, 0, 0, 0, 1])
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

# The paper's words. Another model may need another mark than `</think>`: the class takes ids.
PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"

# Shares of truncated completions: healthy runs stay below the first, above the second runs have collapsed.
HEALTHY_TRUNCATION = 0.05
COLLAPSE_TRUNCATION = 0.10


@dataclass(frozen=True)
class SecondLeg:
    """The request that follows an interrupted first leg. It must keep the first leg's cache_salt."""

    prompt_ids: list[int]  # the whole new prompt: old prompt + first leg + forced_ids
    forced_ids: list[int]  # the phrase, or [] if thinking had ended by itself
    max_tokens: int  # answer tokens that may still be sampled


@dataclass(frozen=True)
class Interruption:
    """Forced interruption of thinking (arXiv 2510.13786, section 2). It takes token ids and never text, which encoded
    again may become other ids than those that were sampled.

    Args:
        min_budget, max_budget: bounds of a rollout's thinking budget in tokens, both included (ScaleRL: 10k and 12k).
        answer_budget: answer tokens after the end of thinking (ScaleRL: 2k).
        phrase_ids: `PHRASE` in tokens.
        end_of_thinking_ids: the mark that ends thinking, one token or several.
        thinking_end: for a mark that its neighbours change: with many tokenizers ` </think>` and `</think>\\n\\n` have
            other ids than `</think>`, unless that is one special token. It returns where the answer begins in given
            completion ids, None while the thinking lasts; by default that is behind the first end_of_thinking_ids.
    Raises:
        ValueError: the settings cannot work together.
    """

    min_budget: int
    max_budget: int
    answer_budget: int
    phrase_ids: Sequence[int]
    end_of_thinking_ids: Sequence[int]
    thinking_end: Callable[[Sequence[int]], int | None] | None = None

    def __post_init__(self) -> None:
        phrase, end = _as_ids("phrase_ids", self.phrase_ids), _as_ids("end_of_thinking_ids", self.end_of_thinking_ids)
        object.__setattr__(self, "phrase_ids", phrase)
        object.__setattr__(self, "end_of_thinking_ids", end)
        if self.min_budget < 1 or self.answer_budget < 1:
            raise ValueError(
                f"Thinking and answer budgets must be at least 1 token, got {self.min_budget} and {self.answer_budget}."
            )
        if self.min_budget > self.max_budget:
            raise ValueError(
                f"The smallest thinking budget ({self.min_budget}) must not exceed the largest ({self.max_budget})."
            )
        if not end:
            raise ValueError("end_of_thinking_ids is empty: the model needs a token that ends its thinking.")
        if self.thinking_end is not None:
            if self.thinking_end(phrase) is None:
                raise ValueError(f"phrase_ids must end thinking, and thinking_end finds no end in {phrase}.")
        elif phrase[-len(end) :] != end:
            raise ValueError(
                f"phrase_ids must end with end_of_thinking_ids, got {phrase} and {end}: tokenize phrase and mark "
                "together, as a space before the mark or a newline after it changes its ids, or give thinking_end."
            )

    @property
    def max_completion(self) -> int:
        """Length of the longest possible completion in tokens, forced ones included: what a context must hold."""
        return self.max_budget + len(self.phrase_ids) + self.answer_budget

    def draw_budget(self, rng: random.Random) -> int:
        """A thinking budget, uniform over the integers from min_budget to max_budget, both included."""
        return rng.randint(self.min_budget, self.max_budget)

    def needs_phrase(self, completion_ids: Sequence[int], finish_reason: str | None) -> bool:
        """True if the first leg ran into its budget while still thinking.

        completion_ids: the first leg. finish_reason: the engine's; "length" means that the budget was reached
        (a leg that stops by itself on its very last token has the same length, so length does not tell).
        Raises ValueError for one that is none of stop, length, abort and None.
        """
        return _was_cut(finish_reason) and self._answer_start(completion_ids) is None

    def second_leg(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None
    ) -> SecondLeg | None:
        """The request to send after the first leg, or None if the completion is over.

        None if the first leg finished by itself, or if it was cut with no answer budget left: then it is truncated,
        and its finish_reason "length" says so.
        """
        if not _was_cut(finish_reason):
            return None
        so_far = [int(i) for i in (*prompt_ids, *completion_ids)]
        answer_start = self._answer_start(completion_ids)
        if answer_start is None:
            forced = list(self.phrase_ids)
            return SecondLeg(so_far + forced, forced, self.answer_budget)
        left = self.answer_budget - (len(completion_ids) - answer_start)
        return SecondLeg(so_far, [], left) if left > 0 else None

    def mask(self, n_first: int, n_forced: int, n_second: int) -> list[int]:
        """Mask of the whole completion, (n_first + n_forced + n_second,): 1 on sampled tokens, 0 on forced ones."""
        return [1] * n_first + [0] * n_forced + [1] * n_second

    def _answer_start(self, ids: Sequence[int]) -> int | None:
        if self.thinking_end is not None:
            return self.thinking_end(ids)
        return _end_of_first(ids, self.end_of_thinking_ids)


def _was_cut(finish_reason: str | None) -> bool:
    """Whether the engine ended a leg at its budget. Raises ValueError for a reason that it does not give."""
    if finish_reason not in ("stop", "length", "abort", None):
        raise ValueError(f"finish_reason must be stop, length, abort or None, got {finish_reason!r}.")
    return finish_reason == "length"


def _as_ids(name: str, ids: Sequence[int]) -> list[int]:
    """`ids` as a list of ints. Raises ValueError if they are text."""
    if isinstance(ids, str) or any(isinstance(i, str) for i in ids):
        raise ValueError(f"{name} must be token ids, got the text {ids!r}: encode it with the model's tokenizer.")
    return [int(i) for i in ids]


def _end_of_first(ids: Sequence[int], mark: Sequence[int]) -> int | None:
    """Index just behind the first occurrence of `mark` in `ids`, None without one."""
    ids, mark = [int(i) for i in ids], list(mark)
    for end in range(len(mark), len(ids) + 1):
        if ids[end - len(mark) : end] == mark:
            return end
    return None


def overlong_penalty(lengths: torch.Tensor, max_length: int, cache_length: int) -> torch.Tensor:
    """Penalty to add to the reward of long completions (arXiv 2503.14476, Eq. 13).

    Args:
        lengths: (N,) completion lengths in tokens, integer or float.
        max_length: L_max, from which on the penalty is -1 (ScaleRL's comparison: 14k).
        cache_length: L_cache, the width of the ramp (2k).
    Returns:
        (N,) in [-1, 0], FP32, or FP64 for FP64 lengths.
    Raises:
        ValueError: unless 1 <= cache_length <= max_length.
    """
    if not 1 <= cache_length <= max_length:
        raise ValueError(f"cache_length must be from 1 to max_length ({max_length}), got {cache_length}.")
    lengths = lengths.to(torch.promote_types(lengths.dtype, torch.float32))  # (N,)
    # clip((L_max - |y|) / L_cache - 1, -1, 0)
    return ((max_length - lengths) / cache_length - 1).clamp(-1, 0)  # (N,)


def truncation_rate(finish_reasons: Iterable[str | None]) -> float:
    """Share of completions whose last leg ended with "length", 0.0 for none at all.

    By finish reason, never by length: a completion may end by itself on the last token it is allowed.
    """
    reasons = list(finish_reasons)
    return sum(reason == "length" for reason in reasons) / max(len(reasons), 1)


def truncation_warning(rate: float) -> str | None:
    """A sentence if too many completions are truncated, else None.

    Args:
        rate: share in [0, 1]. Healthy runs stay below 5 %; 10-15 % preceded a collapse (arXiv 2510.13786).
    Raises:
        ValueError: `rate` is not a share.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"The truncation rate is a share from 0 to 1, got {rate}.")
    if rate < HEALTHY_TRUNCATION:
        return None
    if rate <= COLLAPSE_TRUNCATION:
        return f"Warning: {rate:.1%} of completions are truncated; healthy runs stay below {HEALTHY_TRUNCATION:.0%}."
    return (
        f"WARNING: {rate:.1%} OF COMPLETIONS ARE TRUNCATED; above {COLLAPSE_TRUNCATION:.0%} runs have collapsed: "
        "raise the budgets or strengthen the length control."
    )
