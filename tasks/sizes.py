"""The built-in model in five sizes, for laws over model size (fit_power_law.py): one dial, the width.

Two layers and a head_dim of 32 are the same in all; heads and MLP grow with the width, in multiples of 16, which vLLM's
kernels for CPUs need. From xs to xl the parameters grow 17 times, by about two from one to the next. Both phases of
every warm start stop at the same losses, for which a small model takes more steps, so that all sizes begin alike.
"""

from dataclasses import replace

from tasks.chain import WORDS
from tasks.demonstrations import Demonstrations
from tasks.warm_start import ModelShape, WarmStart

SHAPES = {  # size -> shape; parameters with the embedding
    "xs": ModelShape(hidden_size=48, heads=2, kv_heads=1, intermediate_size=128),  # 0.058M
    "s": ModelShape(hidden_size=64, heads=2, kv_heads=1, intermediate_size=192),  # 0.102M
    "m": ModelShape(),  # 0.226M
    "l": ModelShape(hidden_size=144, heads=6, kv_heads=3, intermediate_size=384),  # 0.505M
    "xl": ModelShape(hidden_size=208, heads=8, kv_heads=4, intermediate_size=544),  # 1.009M
}
CLEAN_STEPS, CORRUPTED_STEPS = 3000, 600  # at most
CORRUPTED_LOSS = 0.67  # that of m after its 90 steps on the graded task


def warm_start_of(size: str, demonstrations: Demonstrations, vocabulary: int = len(WORDS)) -> WarmStart:
    """Settings of the warm start of a model of this size and these rows; those of m with the words are the defaults."""
    settings = WarmStart(shape=replace(SHAPES[size], vocabulary=vocabulary), demonstrations=demonstrations)
    if settings.shape == ModelShape():
        return settings
    return replace(settings, clean_steps=CLEAN_STEPS, corrupted_steps=CORRUPTED_STEPS, corrupted_loss=CORRUPTED_LOSS)


def parameters(size: str) -> int:
    """How many the model has, those of the embedding, which is the head's too, among them."""
    shape = SHAPES[size]
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden_size + 2 * shape.head_dim
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size  # and two norms
    return shape.vocabulary * shape.hidden_size + shape.layers * layer + shape.hidden_size
