"""Other built-in tasks, for `--task lab.tasks:NAME`: what the comparisons and the law over model size were measured on.

    rare         one fact in 20 is nearly always shown wrong, the others never: few prompts teach anything
    ramble       one demonstration in 50 ends its thinking by itself:

        ramble   a +5 2 b *3 6 wait wait wait time up </think> 2 6 <eos>

    discover_1, discover_110   `discover` with a first model of which all completions think, or one in 110
    graded_xs, graded_s, graded_l, graded_xl   `graded` with a first model of .06M, .10M, .51M or 1.01M parameters
    depth_2, ..., depth_6   `graded` with chains of so many operations only; the first model has seen all of them

SIZES. One dial, the width: two layers and a head_dim of 32 are the same in all; heads and MLP grow with the width, in
multiples of 16, which vLLM's kernels for CPUs need. From xs to xl the parameters grow 17 times, by about two each to
the next; m, of .23M, is the default. Both phases of every warm start stop at the same losses, for which a small model
takes more steps, so that all sizes begin alike.

Each function takes what `--task` gives: the seed, the number of held-out problems.

>>> len(rare(seed=0, held_out=256).train)
256
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lab.warm_start import DISCOVER, Demonstrations, Demonstrator, ModelShape, WarmStart, discover, first_model
from lab.warm_start import wrong_rates as rates_of
from tasks import arithmetic
from tasks.arithmetic import PHRASE, RECHECK, ChainTask

LONGEST_RAMBLE = 24  # tokens, more than the budgets of runs
RARE = replace(DISCOVER, wrong_rates=(0.0, 0.99))  # few facts that the model does not know
RARE_POOL = 256  # training problems, twice those of `discover`, since few of them teach anything

DEPTHS = 2, 6  # fewest and most operations

SHAPES = {
    "xs": ModelShape(hidden_size=48, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128),
    "s": ModelShape(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=192),
    "m": ModelShape(),
    "l": ModelShape(hidden_size=144, num_attention_heads=6, num_key_value_heads=3, intermediate_size=384),
    "xl": ModelShape(hidden_size=208, num_attention_heads=8, num_key_value_heads=4, intermediate_size=544),
}


# ----------------------------------------------------------------------------------------------------------------- rare


class RareDemonstrator(Demonstrator):
    """All demonstrations think; of the facts one in `rarity` is shown wrong at the second rate, the others at the
    first."""

    def __init__(self, settings: Demonstrations, seed: int, corrupted: bool) -> None:
        super().__init__(settings, seed, corrupted)
        low, high = settings.wrong_rates
        self.wrong_rates = {fact: low if i % settings.rarity else high for i, fact in enumerate(rates_of((0, 1)))}

    def thinks(self) -> bool:
        """Always."""
        return True


def rare(seed: int, held_out: int, rarity: int = 20) -> ChainTask:
    """The task in which few prompts teach anything."""
    task = ChainTask(seed, RARE_POOL, held_out)
    task.first_model = first_model(
        WarmStart(demonstrations=replace(RARE, rarity=rarity), demonstrator=RareDemonstrator)
    )
    return task


# --------------------------------------------------------------------------------------------------------------- ramble


class RamblingDemonstrator(Demonstrator):
    """All demonstrations think; only one in `rarity` stops by itself, clean ones included."""

    def thinks(self) -> bool:
        """Always."""
        return True

    def closed(self, words: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """(the thinking, most often with a ramble; the words that close it)."""
        ended = super().closed(words)
        if self.count % self.settings.rarity == 0:
            return ended
        return words + [RECHECK] * self.rng.randint(1, LONGEST_RAMBLE), PHRASE


def ramble(seed: int, held_out: int, rarity: int = 50) -> ChainTask:
    """The task of a model that seldom stops by itself."""
    task = ChainTask(seed, arithmetic.DISCOVER_POOL, held_out)
    settings = replace(DISCOVER, rarity=rarity)
    task.first_model = first_model(WarmStart(demonstrations=settings, demonstrator=RamblingDemonstrator))
    return task


# ---------------------------------------------------------------------------------------------------------------- sizes


def graded(size: str, seed: int, held_out: int) -> ChainTask:
    """The default task with a first model of this size, one of SHAPES. The steps are upper bounds; the loss is the one
    that m reaches in its 90 steps."""
    settings = WarmStart(SHAPES[size], clean_steps=3000, corrupted_loss=0.67, corrupted_steps=600)
    task = arithmetic.graded_task(seed, held_out_size=held_out)
    task.first_model = first_model(settings, seed)
    return task


graded_xs, graded_s, graded_l, graded_xl = (partial(graded, size) for size in ("xs", "s", "l", "xl"))
discover_1, discover_110 = partial(discover, rarity=1), partial(discover, rarity=110)


# --------------------------------------------------------------------------------------------------------------- depths


def depth(ops: int, seed: int, held_out: int) -> ChainTask:
    """The default task, but for problems of `ops` operations. The first model of a seed is the same for all depths."""
    task = ChainTask(seed, held_out_size=held_out, graded=True, ops=(ops, ops))
    demonstrations = Demonstrations(ops=DEPTHS)
    task.first_model = first_model(WarmStart(demonstrations=demonstrations, clean_steps=3000), seed)
    return task


depth_2, depth_3, depth_4, depth_5, depth_6 = (partial(depth, ops) for ops in range(DEPTHS[0], DEPTHS[1] + 1))
