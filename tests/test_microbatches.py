"""runtime/microbatches.py: how a batch is cut, on one rank or several, in whole rows or in rows that share their prompts."""

import pytest
import torch

from runtime.microbatches import TokenRow, cut_rows, lay_out, make_microbatch, microbatches, split_rows


def test_padded_microbatch_by_hand():
    """Rows 2 and 0: [5 6 | 7 8 9] and [1 | 2 3], the 8 forced. Nothing predicts the first token of a line, so four tokens
    of each count: 6 7 8 9, of which the 7 and the 9 train, and 2 3 and padding."""
    batch = [TokenRow([1], [2, 3], [1, 1]), TokenRow([9], [9], [1]), TokenRow([5, 6], [7, 8, 9], [1, 0, 1])]
    part = make_microbatch(batch, [2, 0], width=4)
    assert (part.rows, part.width) == ([2, 0], 4)
    assert part.lines.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]
    assert part.prompts.numel() == 0
    assert part.start == 1 and part.trained.tolist() == [1, 3, 4, 5]
    assert part.outputs.tolist() == [0, 2, 4, 5]  # (row 0, t 0), (0, 2), (1, 0), (1, 1) of 2 x 4
    assert part.by_completion(torch.tensor([7, 9, 2, 3])).tolist() == [[7, 0, 9, 0], [2, 3, 0, 0]]
    moved = part.to(torch.device("meta"))
    assert {x.device.type for x in vars(moved).values() if isinstance(x, torch.Tensor)} == {"meta"}


def test_shared_microbatch_by_hand():
    """[5 6 | 7 8], [5 6 | 9] and [1 2 3 | 4] share up to position 2. Of the first prompt nothing is left, of the other
    the 3. The end of its prompt predicts the first token of each line: all six tokens of the lines count."""
    batch = [TokenRow([5, 6], [7, 8], [1, 1]), TokenRow([5, 6], [9], [1]), TokenRow([1, 2, 3], [4], [1])]
    part = make_microbatch(batch, [0, 1, 2], width=2, shared=True)
    assert part.prompts.tolist() == [[5, 6], [1, 2]] and part.prompt_of.tolist() == [0, 0, 1]
    assert part.lines.tolist() == [[7, 8], [9, 0], [3, 4]]
    assert part.start == 0 and part.trained.tolist() == [0, 1, 2, 5] and part.outputs.tolist() == [0, 1, 2, 4]
    assert part.tokens == 2 * 2 + 2  # a last token predicts none, and is not computed


def test_cutting_by_hand():
    """Rows of 5, 4, 3, 3, 2. Of 10 positions two padded rows of up to 5 fill all, three of up to 3 take 9; of 9 positions
    5 + 4, padded to 10, are too many. A row of 12 is a list of its own."""
    sizes = [(0, 0, length) for length in (3, 5, 2, 4, 3, 12)]
    assert cut_rows(sizes, [1, 3, 0, 4, 2], 10) == [[1, 3], [0, 4, 2]]
    assert cut_rows(sizes, [1, 3, 0, 4, 2], 9) == [[1], [3, 0], [4, 2]]
    assert cut_rows(sizes, [5, 3, 4], 10) == [[5], [3, 4]]


def test_cutting_rows_that_share():
    """Two rows of 7 share 5 and have 2 of their own: 9. A third with another prompt, of 3, leaves P = 3: 2 x 3 + 3 x 4."""
    sizes = [(0, 5, 7), (0, 5, 7), (1, 3, 7)]
    assert cut_rows(sizes, [0, 1, 2], 18) == [[0, 1, 2]]
    assert cut_rows(sizes, [0, 1, 2], 17) == [[0, 1], [2]]
    assert cut_rows(sizes, [0, 1, 2], 8) == [[0], [1], [2]]


def test_splitting_by_hand():
    """Two ranks: 12 positions of the rows' own, 6 each. The rows of prompt 0 stay together; that they have 4 more, which
    they share, costs little."""
    sizes = [(1, 0, 2), (0, 4, 6), (1, 0, 2), (0, 4, 6)]
    assert split_rows(sizes, 2) == [[1, 3], [0, 2]]
    assert split_rows(sizes[:1], 3) == [[], [0], []]
    assert split_rows([(0, 4, 3), (1, 4, 2)], 1) == [[0, 1]]  # completions without a token, from somebody's engine


def picture(completion: int) -> list[TokenRow]:
    return [TokenRow([n] * 3, [7] * completion, [1] * completion) for n in (1, 1, 2)]


@pytest.mark.parametrize(("completion", "shared", "positions"), [(3, True, 12), (40, False, 129)])
def test_sharing_where_it_saves_a_tenth(completion, shared, positions):
    """Two prompts of 3 tokens and three completions: 3 + 3 and 3 x 2 for 3 x 6 positions; but 6 + 3 x 39 for 3 x 43 is
    more than nine tenths. Without `share` rows are whole."""
    assert lay_out(picture(completion), 1000, share=True)[0] == shared and not lay_out(picture(completion), 1000)[0]
    [part] = microbatches(picture(completion), 1000, share=True)
    assert part.tokens == part.prompts.numel() + part.lines[:, shared:].numel() == positions
