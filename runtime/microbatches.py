"""From a batch to microbatches: which rows a forward pass has, on which rank, and where its log-probs are read.

What it must get right:

- Microbatches have at most `tokens` positions, padding counted. The weight of each token in the loss is fixed over the
  whole batch (`losses.aggregation_weights`), so no cut changes the gradient.
- Every rank gets the same number of them. A rank with no rows left runs an empty one forward and backward, or FSDP
  would wait for it forever.
- The G rows of a prompt can share it: it is computed once, and its keys and values (shared_prompts.py) stand before
  those of each completion. The last token of a row predicts none and is left out.

      whole rows, 18 positions          shared up to P = 3, 12 positions

      p p p a a a                       p p p ─┬─ a a
      p p p b b b                              └─ b b
      q q q c c c                       q q q ─── c c

  Prompts of several lengths are shared up to the end of the shortest of their microbatch, and the rest of the others
  stands in the lines. So all lines begin at one position, and need no mask but the causal one.

Symbols: N rows (rollouts), T completion positions, L positions of a line, U prompts that are shared up to position P,
M tokens that train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Sharing must leave fewer than this share of the positions: it costs a second pass, and a mask that the fastest
# attention on a GPU does without.
WORTHWHILE = 0.9


@dataclass
class TokenRow:
    """One rollout as the trainer reads it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]  # 1 on completion tokens that train

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class Microbatch:
    """The input of one forward pass, or of two: of what rows share, and of the rest."""

    rows: list[int]  # N, which rows of the batch the (N, T) outputs belong to; no tensor, so that no device is asked
    tokens: int  # positions of the pass, without padding
    prompts: Tensor  # (U, P) the beginnings that rows share; P = 0 if they share none
    prompt_of: Tensor  # (N,) index into them
    input_ids: Tensor  # (N, L) the lines: each row from position P on
    read: Tensor  # (M,) index into the U * P + N * L positions: the one before each token that trains
    write: Tensor  # (M,) index into the N * T places of the output
    targets: Tensor  # (M,) ids of the tokens that train
    width: int  # T

    def to(self, device: torch.device) -> Microbatch:
        """A copy on `device`."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items()})


RowSize = tuple[int, int, int]  # the number of its prompt, positions of it that can be shared, positions in all


def positions(rows: Sequence[RowSize]) -> int:
    """Those of a microbatch of these rows, with padding: U P + N L."""
    start = min(shareable for _, shareable, _ in rows)  # P
    longest = max(1, *(length - start for *_, length in rows))  # L
    return len({prompt for prompt, *_ in rows}) * start + len(rows) * longest


def split_rows(sizes: Sequence[RowSize], ranks: int) -> list[list[int]]:
    """The rows of each rank, sorted by prompt, so that few prompts are on two ranks. All ranks have about as many
    positions of their own rows."""
    own = [length - shareable + 1 for _, shareable, length in sizes]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    done = 0
    for row in sorted(range(len(sizes)), key=lambda row: sizes[row][0]):
        middle = done + own[row] / 2
        shares[int(ranks * middle / sum(own))].append(row)
        done += own[row]
    return shares


def cut_rows(sizes: Sequence[RowSize], rows: Sequence[int], tokens: float) -> list[list[int]]:
    """`rows` cut, in their order, into lists of at most `tokens` positions, padding counted. A row that is longer than
    that gets a list of its own."""
    pieces: list[list[int]] = []
    prompts: set[int] = set()  # of the last piece
    start = longest = 0  # likewise
    for row in rows:
        prompt, shareable, length = sizes[row]
        if pieces:
            prompts, start, longest = prompts | {prompt}, min(start, shareable), max(longest, length)
        if not pieces or len(prompts) * start + (len(pieces[-1]) + 1) * max(1, longest - start) > tokens:
            pieces.append([])
            prompts, start, longest = {prompt}, shareable, length
        pieces[-1].append(row)
    return pieces


def lay_out(
    batch: Sequence[TokenRow], tokens: float, ranks: int = 1, share: bool = False
) -> tuple[bool, list[list[list[int]]]]:
    """Whether rows share their prompts, and the rows of each microbatch of each rank. Rows sorted by length need little
    padding; rows sorted by prompt share most. So with `share` they are sorted by length among 1, 2, 4, ... prompts, and
    the layout with the fewest positions is taken: or that of whole rows, if it is nearly as small."""

    def layout(sizes: list[RowSize], power: int) -> tuple[int, list[list[list[int]]]]:
        def order(row: int) -> tuple[int, int]:
            return sizes[row][0] >> power, -sizes[row][2]

        cuts = [cut_rows(sizes, sorted(rows, key=order), tokens) for rows in split_rows(sizes, ranks)]
        return sum(positions([sizes[row] for row in piece]) for cut in cuts for piece in cut), cuts

    size, whole = layout([(0, 0, len(row)) for row in batch], 0)
    if not share:
        return False, whole
    prompts = sorted({tuple(row.prompt_ids) for row in batch}, key=lambda prompt: (len(prompt), prompt))
    number = {prompt: n for n, prompt in enumerate(prompts)}
    sizes = [(number[tuple(row.prompt_ids)], len(row.prompt_ids), len(row) - 1) for row in batch]
    smaller, shared = min(layout(sizes, power) for power in range((len(prompts) - 1).bit_length() + 1))
    return (True, shared) if smaller < WORTHWHILE * size else (False, whole)


def make_microbatch(batch: Sequence[TokenRow], rows: Sequence[int], width: int, shared: bool = False) -> Microbatch:
    """The microbatch of these rows of the batch; without rows, an empty one that still runs forward and backward."""
    start = min((len(batch[i].prompt_ids) for i in rows), default=1) if shared else 0  # P
    number: dict[tuple[int, ...], int] = {}  # of each prompt
    prompt_of = torch.tensor([number.setdefault(tuple(batch[i].prompt_ids), len(number)) for i in rows] or [0])  # (N,)
    prompts = torch.tensor([prompt[:start] for prompt in number] or [(0,) * start], dtype=torch.long)  # (U, P)
    lines = [[*batch[i].prompt_ids, *batch[i].completion_ids][start : len(batch[i]) - shared] for i in rows]
    longest = max([1, *map(len, lines)])  # L
    input_ids = torch.zeros(max(1, len(rows)), longest, dtype=torch.long)  # (N, L)
    completions = torch.zeros(len(rows), width, dtype=torch.long)  # (N, T)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)  # (N, T)
    for n, i in enumerate(rows):
        input_ids[n, : len(lines[n])] = torch.tensor(lines[n])
        completions[n, : len(batch[i].completion_ids)] = torch.tensor(batch[i].completion_ids)
        mask[n, : len(batch[i].mask)] = torch.tensor(batch[i].mask)
    n, t = mask.nonzero(as_tuple=True)  # (M,), (M,)
    lengths = torch.tensor([len(batch[i].prompt_ids) for i in rows], dtype=torch.long)  # (N,)
    place = lengths[n] - start + t - 1  # (M,) in the line: the position before token t predicts it
    end = prompt_of[n] * start + start - 1  # (M,) of what the line shares, which predicts the line's first token
    read = torch.where(place < 0, end, prompts.numel() + n * longest + place)  # (M,)
    write, tokens = n * width + t, len(number) * start + sum(map(len, lines))
    return Microbatch(list(rows), tokens, prompts, prompt_of, input_ids, read, write, completions[mask], width)


def microbatches(
    batch: Sequence[TokenRow], tokens: int, *, rank: int = 0, ranks: int = 1, share: bool = False
) -> list[Microbatch]:
    """This rank's microbatches of the batch. All ranks get equally many, and their outputs (N, T) have one width T."""
    width = max((len(row.completion_ids) for row in batch), default=1)
    shared, cuts = lay_out(batch, tokens, ranks, share)
    count = max(1, *(len(cut) for cut in cuts))
    mine = cuts[rank] + [[]] * (count - len(cuts[rank]))
    return [make_microbatch(batch, rows, width, shared) for rows in mine]
