"""How far is a policy from itself k updates later? The exponent of k, in a run with --record_every.

    python lab/law/walk.py runs/demo        # `make demo` records every eighth step: k = 8, 16, 32, 64

If Adam's steps pointed anywhere, as those of a random walk, the distance would grow as sqrt(k); if they all pointed one
way, as k. Three distances, between the weights after t updates and after t + k, on the batch that t trains next:

    weights     the norm of their difference
    logits      the rms over tokens and words of the difference of logits, less its mean over the words
    log rho     the rms over tokens of the difference of the log-prob of the token that was sampled

k is the spacing of the recorded steps, and its doubles up to half of the run. The exponent from k to 2k is log2 of a
ratio of distances; its interval, over the starting points t, is that of a mean (Student, 95 %): as if they did not
overlap, so it is too narrow.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.stats import t as student
from torch import Tensor
from transformers import AutoModelForCausalLM

ROWS = 64  # of a batch
Policy = tuple[Tensor, Tensor, Tensor]  # weights (P,), logits (M, V), log-probs of the sampled tokens (M,)


def batch_of(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """ids (N, L), padded on the right; mask (N, L) of attention; trained (N, L - 1): the token after it trains."""
    rows = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // ROWS)]
    length = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    ids, mask, trained = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))
    for i, row in enumerate(rows):
        tokens = [*row["prompt_ids"], *row["completion_ids"]]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, : len(tokens)] = 1
        trained[i, len(row["prompt_ids"]) : len(tokens)] = torch.tensor(row["mask"])
    return ids, mask, trained[:, 1:].bool()


@torch.no_grad()
def policy(model: torch.nn.Module, folder: Path, batch: tuple[Tensor, Tensor, Tensor]) -> Policy:
    """The weights that `folder` recorded, and what they say of the batch."""
    ids, mask, trained = batch
    state = load_file(folder / "model.safetensors")
    model.load_state_dict(state, strict=False)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][trained].double()  # (M, V)
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][trained][:, None])[:, 0]  # (M,)
    weights = torch.cat([tensor.flatten().double() for tensor in state.values()])  # (P,)
    return weights, logits - logits.mean(-1, keepdim=True), logprobs


def distances(run: Path) -> tuple[list[int], np.ndarray]:
    """K lags, and (T, K, 3) distances from T starting points. Raises ValueError if too few steps were recorded."""
    recorded = {int(folder.name.split("-")[1]): folder for folder in sorted((run / "recorded").glob("step-*"))}
    if len(recorded) < 8:
        raise ValueError(f"{len(recorded)} recorded steps, and at least 8 are needed: --record_every 8")
    every = min(recorded)
    lags = [every << i for i in range(32) if 2 * (every << i) <= max(recorded)]
    starts = [t for t in recorded if all(t + k in recorded for k in lags)]
    model = AutoModelForCausalLM.from_pretrained(recorded[every]).eval()
    rows = []
    for t in starts:
        batch = batch_of(recorded[t])
        before = policy(model, recorded[t], batch)
        rows.append([between(before, policy(model, recorded[t + k], batch)) for k in lags])
    return lags, np.array(rows)


def between(before: Policy, after: Policy) -> list[float]:
    """The three distances."""
    weights, logits, logprobs = (y - x for x, y in zip(before, after, strict=True))
    return [float(weights.norm()), float(logits.square().mean().sqrt()), float(logprobs.square().mean().sqrt())]


def exponents(table: np.ndarray) -> list[tuple[float, float, float]]:
    """Mean exponent and its 95 % interval from each lag to the next, for distances (T, K)."""
    result = []
    for values in np.diff(np.log2(table), axis=1).T:
        half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        result.append((values.mean(), values.mean() - half, values.mean() + half))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(description="How the distance of a policy from itself grows with updates.")
    parser.add_argument("run", type=Path, help="the folder of a run with --record_every")
    args = parser.parse_args(argv)
    try:
        lags, tables = distances(args.run)
    except (ValueError, OSError) as error:
        print(f"walk.py: {args.run}: {error}", file=sys.stderr)
        return 2
    print(f"{args.run}: {len(tables)} starting points")
    for i, name in enumerate(("weights", "logits", "log rho")):
        table = tables[:, :, i]
        far = ", ".join(f"{x:.3g} at {k}" for k, x in zip(lags, table.mean(0), strict=True))
        parts = [
            f"{k} to {2 * k} {e:.2f} [{a:.2f}, {b:.2f}]" for k, (e, a, b) in zip(lags, exponents(table), strict=False)
        ]
        print(f"  {name}: {far}\n    exponents: {', '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
