"""Length control: keep completions short enough that they end with an answer.

PROBLEM. A completion that hits the length cap has no answer, so it is scored wrong however good the thinking was. In
ScaleRL (arXiv 2510.13786) a truncation rate of 10-15 % preceded a collapse; healthy runs stayed below 5 %.

IDEA 1, forced interruption (ScaleRL's choice, section 2). Each rollout has a budget drawn uniformly from [min_budget,
max_budget], so that there is no single deadline to learn. If thinking has not ended by then, a fixed phrase ends it,
and the policy goes on with up to `answer_budget` tokens of answer. An engine cannot put in a phrase, so it serves this
as two requests, called legs. The first leg may be as long as the budget, whatever its tokens are. The four cases, with
a budget of 11 tokens and an answer_budget of 4 (. thinks, > is </think>, x answers, ! is PHRASE, $ is <eos>):

        leg 1, at most 11         leg 2
    a   . . . . . . . . . . .  |  ! ! ! x x x x     thinking was cut: PHRASE ends it, and up to 4 tokens answer
    b   . . . . . . . > x x x  |  x                 3 answer tokens so far: leg 2 has no PHRASE, and up to 1 more
    c   . . . . . > x x x x x  |                    none of the 4 is left: no leg 2, the completion is truncated
    d   . . . . . > x $        |                    finished: no leg 2

Every sampled token of both legs trains; only PHRASE is masked. The answer budget counts the sampled tokens after
</think>, in both legs. Leg 1 stops only at the thinking budget, so in cases c and d the answer may be longer than 4.

IDEA 2, the overlong penalty (the alternative; DAPO, arXiv 2503.14476, Eq. 13). Over the last L_cache tokens before the
cap L_max the penalty that is added to the reward falls on a ramp from 0 to -1, and stays there.

    penalty(y) = clip((L_max - |y|) / L_cache - 1, -1, 0),     |y| the completion's length in tokens

SIMPLIFIED. If the cut falls inside an end-of-thinking mark of several tokens, the half mark stays and the phrase adds a
complete one.

IN YOUR TRAINER. `two_legs` calls any function that generates, `after_token` serves a loop over tokens. Hugging Face's
`generate` has one limit for all rows and no finish reason: generate max(limits) tokens, cut each row to its own limit,
and set its finish_reason to "length" if no stop token is left. THE TRAP: by default it is greedy, or has top_k=50, and
a model's generation_config.json may say more. Pass do_sample=True, temperature=1.0, top_k=0 and top_p=1.0, or the
log-probs are not those of what was sampled.

CHOICES, where papers are silent or differ. T1: the phrase is masked, because the policy did not sample it and there is
no log-prob to divide by. T2: ScaleRL adds the penalty only to correct answers, DAPO to all; the caller chooses.

Case a, then case b, where token 9 is </think> and the budget drawn is 11. `leg.prompt_ids` is what to send:

>>> control = Interruption(10, 12, answer_budget=4, phrase_ids=[7, 8, 9], end_of_thinking_ids=[9])
>>> control.draw_budget(random.Random(0))
11
>>> leg = control.second_leg(prompt_ids=[1, 2], completion_ids=[3] * 11, finish_reason="length")
>>> leg.forced_ids, leg.max_tokens, control.mask(n_first=11, n_forced=3, n_second=4)
([7, 8, 9], 4, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1])
>>> leg = control.second_leg(prompt_ids=[1, 2], completion_ids=[3] * 7 + [9] + [5] * 3, finish_reason="length")
>>> leg.forced_ids, leg.max_tokens
([], 1)
>>> overlong_penalty(torch.tensor([12, 13, 14]), max_length=14, cache_length=2).tolist()
[0.0, -0.5, -1.0]

QUESTION. Case a with finish_reason "stop" and 11 tokens: what does `second_leg` return? (lab/experiments.md)
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

# The paper's words. Another model may need another mark than `</think>`: the class takes ids.
PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"

HEALTHY_TRUNCATION = 0.05  # share of truncated completions below which healthy runs stay
COLLAPSE_TRUNCATION = 0.10  # and above which runs have collapsed


@dataclass(frozen=True)
class SecondLeg:
    """The request that follows a first leg that was cut.

    vLLM keeps the keys and values that it has computed, and shares them between requests of one cache_salt. Sent with
    the first leg's salt, the second one computes only the last, incomplete block of these and the phrase.
    """

    prompt_ids: list[int]  # the complete new prompt: old prompt + first leg + forced_ids
    forced_ids: list[int]  # the phrase, or [] if thinking had ended by itself
    max_tokens: int  # answer tokens that may still be sampled


@dataclass(frozen=True)
class Interruption:
    """Forced interruption of thinking (arXiv 2510.13786, section 2).

    It takes token ids and never text, because encoding a text again may give other ids than those that were sampled.

    `thinking_end` takes completion ids and returns where the answer begins, or None while thinking lasts. Without it
    the answer begins after the first `end_of_thinking_ids`. It is for tokenizers whose ids for ` </think>` and
    `</think>\\n\\n` differ from those for `</think>`. Raises ValueError for settings that cannot work together.
    """

    min_budget: int  # bounds of a rollout's thinking budget, the tokens of leg 1, both included (ScaleRL: 10k and 12k)
    max_budget: int
    answer_budget: int  # answer tokens after the end of thinking (ScaleRL: 2k)
    phrase_ids: Sequence[int]  # `PHRASE` in tokens
    end_of_thinking_ids: Sequence[int]  # the mark that ends thinking, one token or several
    thinking_end: Callable[[Sequence[int]], int | None] | None = None

    def __post_init__(self) -> None:
        phrase = [int(i) for i in self.phrase_ids]
        end = [int(i) for i in self.end_of_thinking_ids]
        object.__setattr__(self, "phrase_ids", phrase)  # how a frozen dataclass is written to
        object.__setattr__(self, "end_of_thinking_ids", end)
        smallest, largest = self.min_budget, self.max_budget
        if smallest < 1 or self.answer_budget < 1:
            raise ValueError(
                f"Thinking and answer budgets must be at least 1 token, got {smallest} and {self.answer_budget}."
            )
        if smallest > largest:
            raise ValueError(f"The smallest thinking budget ({smallest}) must not exceed the largest ({largest}).")
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

    def second_leg(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None
    ) -> SecondLeg | None:
        """The request to send after the first leg, or None if the completion is over (or truncated, case c).

        The engine's finish_reason "length" means that leg 1 ran into its budget. The completion's length cannot tell,
        since a leg may stop by itself on its last token. Raises ValueError for a finish_reason other than stop, length,
        abort and None.
        """
        if finish_reason not in ("stop", "length", "abort", None):
            raise ValueError(f"finish_reason must be stop, length, abort or None, got {finish_reason!r}.")
        if finish_reason != "length":
            return None
        so_far = [int(i) for i in (*prompt_ids, *completion_ids)]
        answer_start = self.answer_start(completion_ids)
        if answer_start is None:
            forced = list(self.phrase_ids)
            return SecondLeg(so_far + forced, forced, self.answer_budget)
        left = self.answer_budget - (len(completion_ids) - answer_start)
        return SecondLeg(so_far, [], left) if left > 0 else None

    def two_legs(self, generate: Callable, prompts: list, rng: random.Random) -> Iterator[tuple]:
        """(completion_ids, logprobs, mask, finish_reason) for each prompt: its legs, the phrase with log-probs of 0.

        `generate(prompts, limits)` samples at most limits[i] tokens after prompts[i], and returns for each prompt its
        (completion_ids, logprobs, finish_reason), two lists and the engine's word.
        """
        firsts = generate(prompts, [self.draw_budget(rng) for _ in prompts])
        legs = [self.second_leg(prompt, ids, reason) for prompt, (ids, _, reason) in zip(prompts, firsts, strict=True)]
        cut = [leg for leg in legs if leg]
        seconds = iter(generate([leg.prompt_ids for leg in cut], [leg.max_tokens for leg in cut]) if cut else [])
        for (ids, logprobs, reason), leg in zip(firsts, legs, strict=True):
            forced, more, more_logprobs = [], [], []
            if leg:
                forced = leg.forced_ids
                more, more_logprobs, reason = next(seconds)
            mask = self.mask(len(ids), len(forced), len(more))
            yield ids + forced + more, logprobs + [0.0] * len(forced) + more_logprobs, mask, reason

    def after_token(self, completion_ids: Sequence[int], budget: int) -> list[int] | None:
        """What follows in a loop over tokens, asked after each token of a row that has not stopped. []: sample on. Ids:
        feed these one by one, with mask 0, then go on. None: the row ends, with "length". Draw `budget` once a row."""
        if len(completion_ids) < budget:
            return []
        leg = self.second_leg([], completion_ids, "length")
        return leg.forced_ids if leg else None

    def mask(self, n_first: int, n_forced: int, n_second: int) -> list[int]:
        """Mask of the complete completion, (n_first + n_forced + n_second,): 1 on sampled tokens, 0 on forced ones."""
        return [1] * n_first + [0] * n_forced + [1] * n_second

    def answer_start(self, ids: Sequence[int]) -> int | None:
        """Index of the first answer token, right after the first end of thinking; None while thinking lasts."""
        if self.thinking_end is not None:
            return self.thinking_end(ids)
        ids = [int(i) for i in ids]
        mark = self.end_of_thinking_ids
        for end in range(len(mark), len(ids) + 1):
            if ids[end - len(mark) : end] == mark:
                return end
        return None


def overlong_penalty(lengths: torch.Tensor, max_length: int, cache_length: int) -> torch.Tensor:
    """Penalty to add to the reward of long completions (arXiv 2503.14476, Eq. 13).

    Add it before the zero-variance filter: right answers of different lengths then have something to teach.

    Args:
        lengths: (N,) in tokens, the stop token too.
        max_length: L_max, from which on the penalty is -1 (ScaleRL's comparison: 14k).
        cache_length: L_cache, the width of the ramp (2k).
    Returns (N,) in [-1, 0], float64 for float64 lengths, else float32.
    Raises ValueError unless 1 <= cache_length <= max_length.
    """
    if not 1 <= cache_length <= max_length:
        raise ValueError(f"cache_length must be from 1 to max_length ({max_length}), got {cache_length}.")
    lengths = lengths.to(torch.promote_types(lengths.dtype, torch.float32))  # (N,)
    # clip((L_max - |y|) / L_cache - 1, -1, 0)
    return ((max_length - lengths) / cache_length - 1).clamp(-1, 0)  # (N,)


def truncation_rate(finish_reasons: Iterable[str | None]) -> float:
    """Share of completions whose last leg ended with "length"; 0.0 if there are no completions.

    By finish reason, never by length: a completion may end by itself on the last token it is allowed.
    """
    reasons = list(finish_reasons)
    return sum(reason == "length" for reason in reasons) / max(len(reasons), 1)


def truncation_warning(rate: float) -> str | None:
    """A sentence if too many completions are truncated, else None. `rate` is a share from 0 to 1."""
    if rate < HEALTHY_TRUNCATION:
        return None
    share = f"{rate:.1%} of completions are truncated"
    if rate <= COLLAPSE_TRUNCATION:
        return f"Warning: {share}; healthy runs stay below {HEALTHY_TRUNCATION:.0%}."
    return f"WARNING: {share}; above {COLLAPSE_TRUNCATION:.0%} runs have collapsed: raise the budgets."


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index("Case a, then") :])
    raise SystemExit(doctest.testmod().failed)
