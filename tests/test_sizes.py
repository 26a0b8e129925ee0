"""The built-in model's sizes: their parameters by hand, and that the default is what it was."""

from dataclasses import fields, replace
from typing import get_type_hints

import pytest

from runtime.flags import Flags
from tasks.chain import WORDS
from tasks.demonstrations import Demonstrations
from tasks.sizes import SHAPES, parameters, warm_start_of
from tasks.warm_start import ModelShape, WarmStart, new_model


@pytest.mark.parametrize(("size", "attention", "mlp", "norms", "outside"), [
    # q and o: 48 x 64 each, k and v: 48 x 32; three of 48 x 128; 2 x 48 and two of head_dim 32; 47 words x 48, norm
    ("xs", 2 * 48 * 64 + 2 * 48 * 32, 3 * 48 * 128, 2 * 48 + 2 * 32, 47 * 48 + 48),
    ("xl", 2 * 208 * 256 + 2 * 208 * 128, 3 * 208 * 544, 2 * 208 + 2 * 32, 47 * 208 + 208),
])  # fmt: skip
def test_parameters_of_the_smallest_and_the_largest_by_hand(size, attention, mlp, norms, outside):
    """57,920 and 1,009,344, 17.4 times as many; two layers, and the head is the embedding."""
    count = sum(p.numel() for p in new_model(SHAPES[size], 0).parameters())
    assert count == 2 * (attention + mlp + norms) + outside == {"xs": 57_920, "xl": 1_009_344}[size]
    assert count == parameters(size)


def test_the_default_is_the_warm_start_that_is_cached_and_the_others_stop_at_the_same_losses():
    """Equal settings have the same folder."""
    shown = Demonstrations(noise=0.3)
    assert warm_start_of("m", shown) == (default := WarmStart(demonstrations=shown))
    others = [warm_start_of(size, shown) for size in ("xs", "s", "l", "xl")]
    assert len({(other.clean_loss, other.corrupted_loss) for other in others}) == 1
    assert all(other.clean_loss == default.clean_loss and other.corrupted_loss > 0 for other in others)
    assert [other.shape for other in others] == [SHAPES[size] for size in ("xs", "s", "l", "xl")]
    assert Flags().size == "m" and list(SHAPES) == list(get_type_hints(Flags)["size"].__args__)


def test_a_vocabulary_is_rows_of_the_embedding_and_changes_nothing_else():
    """100 rows for 47 words: 53 more of width 96. The flag's default and bound are the task's words."""
    narrow, wide = (new_model(replace(ModelShape(), vocabulary=rows), 0) for rows in (47, 100))
    shapes = [{name: tuple(tensor.shape) for name, tensor in model.named_parameters()} for model in (narrow, wide)]
    assert wide.config.vocab_size == 100 and shapes[1].pop("model.embed_tokens.weight") == (100, 96)
    assert shapes[0].pop("model.embed_tokens.weight") == (47, 96) and shapes[0] == shapes[1]
    settings = warm_start_of("l", Demonstrations(), 100)
    assert replace(settings, shape=SHAPES["l"]) == warm_start_of("l", Demonstrations())
    assert settings.shape.vocabulary == 100
    vocabulary = next(item for item in fields(Flags) if item.name == "vocabulary")
    assert vocabulary.default == vocabulary.metadata["bounds"]["at_least"] == len(WORDS)
