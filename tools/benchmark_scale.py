"""The cost of a trained token as completions and batches grow.

    python tools/benchmark_scale.py

Completions grow at an equal number of tokens in a batch, with and without attention (which grows with the square of the
length); then batches grow at an equal length. Rows are synthetic, so no engine is needed.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, ratios, take_turns, timed
from subjects import TrainerSide, random_model, synthetic_groups

BATCH_TOKENS = 16_384
LENGTHS = (32, 128, 512, 2048)  # mean tokens of a completion
ROLLOUTS = (128, 512, 1024, 4096)  # of a batch


def no_attention(
    module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Each position takes its own value: attention's inputs and outputs, without the part that grows with length."""
    heads = query.shape[1] // value.shape[1]
    return value.repeat_interleave(heads, 1).transpose(1, 2).contiguous(), None


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AttentionInterface

    args = parse(benchmark_parser(__file__, __doc__), argv)
    AttentionInterface.register("none", no_attention)
    torch.set_num_threads(1)
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        side = TrainerSide(random_model(Path(folder), "0.2M", context=4096))

        def cost(groups: list[Any], attention: str = "sdpa") -> float:
            side.trainer.model.set_attn_implementation(attention)
            tokens = sum(len(rollout.mask) for group in groups for rollout in group.rollouts)
            return 1e6 * timed(lambda: side.step(side.batch(groups))) / tokens

        lengths = {n: synthetic_groups(max(16, BATCH_TOKENS // n // 16 * 16), n) for n in LENGTHS}
        sizes = {n: synthetic_groups(n, 32) for n in ROLLOUTS}
        cost(lengths[LENGTHS[0]])
        cases = {f"{n} tokens": lambda g=g: cost(g) for n, g in lengths.items()}
        cases |= {f"{n} tokens, without attention": lambda g=g: cost(g, "none") for n, g in lengths.items()}
        cases |= {f"{n} rollouts of 32 tokens": lambda g=g: cost(g) for n, g in sizes.items()}
        found = take_turns(cases, args.repeats)
    report.add(found, "µs a token")
    for n in LENGTHS[1:]:
        for rest in ("", ", without attention"):
            grown = ratios(found[f"{n} tokens{rest}"], found[f"{LENGTHS[0]} tokens{rest}"])
            target = 1.5 if n == 512 and not rest else None
            report.figures.append(Figure(f"{n} / {LENGTHS[0]} tokens{rest}", grown, most=target))
    for n in ROLLOUTS[1:]:
        grown = ratios(found[f"{n} rollouts of 32 tokens"], found[f"{ROLLOUTS[0]} rollouts of 32 tokens"])
        report.figures.append(Figure(f"{n} / {ROLLOUTS[0]} rollouts", grown))
    report.close()


if __name__ == "__main__":
    main()
