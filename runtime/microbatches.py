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

Symbols: N rows (rollouts), T completion positions, L tokens of a line, U prompts that are shared up to position P, M
tokens that train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Of the positions of whole rows, sharing must leave fewer than this part: it costs a second pass, and a mask that the
# fastest attention on a GPU does without.
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
    """The input of one forward pass, or of two: of what rows share, and of the rest. Example: `make_microbatch`."""

    rows: list[int]  # N, which rows of the batch the (N, T) outputs belong to; no tensor, so that no device is asked
    tokens: int  # positions of the pass, without padding
    prompts: Tensor  # (U, P) the beginnings that rows share; P = 0 if they share none
    prompt_of: Tensor  # (N,) index into them
    lines: Tensor  # (N, L) each row from position P on
    start: int  # the first token of a line that is predicted: 0 behind a prompt, 1 in a whole row
    trained: Tensor  # (M,) the tokens that train, counted through lines[:, start:]
    outputs: Tensor  # (M,) the same tokens, counted through the (N, T) outputs
    width: int  # T

    def by_completion(self, values: Tensor) -> Tensor:
        """(N, T): `values` (M,) at the tokens that train, 0 elsewhere."""
        shape = len(self.rows), self.width
        return values.new_zeros(shape).flatten().scatter(0, self.outputs, values).view(shape)

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
    own = [max(1, length - shareable + 1) for _, shareable, length in sizes]  # 1 without a completion
    rows_of: list[list[int]] = [[] for _ in range(ranks)]
    done = 0
    for row in sorted(range(len(sizes)), key=lambda row: sizes[row][0]):
        middle = done + own[row] / 2
        rows_of[int(ranks * middle / sum(own))].append(row)
        done += own[row]
    return rows_of


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
    """Whether rows share their prompts, and the rows of each microbatch of each rank.

    Rows sorted by length need little padding; rows sorted by prompt share most. So with `share` prompts are put
    together in blocks of 1, of 2, of 4, ..., rows are sorted by length within each block, and the layout with the
    fewest positions is taken: or that of whole rows, if it is nearly as small."""

    def layout(sizes: list[RowSize], block: int) -> tuple[int, list[list[list[int]]]]:
        """(positions, rows of each microbatch of each rank)."""

        def order(row: int) -> tuple[int, int]:
            prompt, _, length = sizes[row]
            return prompt // block, -length

        cuts = [cut_rows(sizes, sorted(rows, key=order), tokens) for rows in split_rows(sizes, ranks)]
        return sum(positions([sizes[row] for row in piece]) for cut in cuts for piece in cut), cuts

    size, whole = layout([(0, 0, len(row)) for row in batch], block=1)
    if not share:
        return False, whole
    prompts = sorted({tuple(row.prompt_ids) for row in batch}, key=lambda prompt: (len(prompt), prompt))
    number_of = {prompt: number for number, prompt in enumerate(prompts)}
    # The last token of a row predicts none.
    sizes = [(number_of[tuple(row.prompt_ids)], len(row.prompt_ids), len(row) - 1) for row in batch]
    blocks = [1]
    while blocks[-1] < len(prompts):
        blocks.append(2 * blocks[-1])
    smallest, shared = min(layout(sizes, block) for block in blocks)
    return (True, shared) if smallest < WORTHWHILE * size else (False, whole)


def make_microbatch(batch: Sequence[TokenRow], rows: Sequence[int], width: int, shared: bool = False) -> Microbatch:
    """The microbatch of these rows of the batch; without rows, an empty one that still runs forward and backward.

    Three rows, of which all completion tokens but the 9 train, with T = 2:

    >>> batch = [TokenRow([5, 6], [7, 8], [1, 1]), TokenRow([5, 6], [9], [0]), TokenRow([1, 2, 3], [4], [1])]
    >>> part = make_microbatch(batch, [0, 1, 2], width=2, shared=True)
    >>> part.prompts.tolist(), part.prompt_of.tolist()  # up to P = 2, where the shortest prompt ends
    ([[5, 6], [1, 2]], [0, 0, 1])
    >>> part.lines.tolist()  # the rest of each row: of the third one its prompt's 3, too
    [[7, 8], [9, 0], [3, 4]]
    >>> part.trained.tolist(), part.outputs.tolist()  # 7, 8 and 4: in the lines, and in the outputs 7 8 | 9 . | 4 .
    ([0, 1, 5], [0, 1, 4])
    """
    shared_until = min((len(batch[i].prompt_ids) for i in rows), default=1) if shared else 0  # P
    number_of: dict[tuple[int, ...], int] = {}  # prompt -> its index among those that differ
    prompt_of = [number_of.setdefault(tuple(batch[i].prompt_ids), len(number_of)) for i in rows]
    lines = [[*batch[i].prompt_ids, *batch[i].completion_ids][shared_until:] for i in rows]
    trains = [[0] * (len(batch[i].prompt_ids) - shared_until) + list(batch[i].mask) for i in rows]  # as in the lines
    longest = max([2, *map(len, lines)])  # L
    start = 0 if shared else 1
    return Microbatch(
        rows=list(rows),
        tokens=len(number_of) * shared_until + sum(map(len, lines)) - shared * len(lines),
        prompts=padded([prompt[:shared_until] for prompt in number_of], shared_until),
        prompt_of=torch.tensor(prompt_of or [0]),
        lines=padded(lines, longest),
        start=start,
        trained=ones_in(padded(trains, longest)[:, start:]),
        outputs=ones_in(padded([batch[i].mask for i in rows], width)),
        width=width,
    )


def padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """(N, width) with zeros on the right; one row of zeros if there are none."""
    result = torch.zeros(max(1, len(rows)), width, dtype=torch.long)
    for line, row in zip(result, rows, strict=False):
        line[: len(row)] = torch.tensor(row)
    return result


def ones_in(mask: Tensor) -> Tensor:
    """Where it is 1, counted row by row."""
    return mask.flatten().nonzero()[:, 0]


def microbatches(
    batch: Sequence[TokenRow], tokens: int, *, rank: int = 0, ranks: int = 1, share: bool = False
) -> list[Microbatch]:
    """This rank's microbatches of the batch. All ranks get equally many, and their outputs (N, T) have one width T."""
    width = max((len(row.completion_ids) for row in batch), default=1)
    shared, cuts = lay_out(batch, tokens, ranks, share)
    count = max(1, *(len(cut) for cut in cuts))
    mine = cuts[rank] + [[]] * (count - len(cuts[rank]))
    return [make_microbatch(batch, rows, width, shared) for rows in mine]
