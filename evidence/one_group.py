"""docs/one_group.md: one group from its prompt to the next token, made again from a recorded step of a real run.

    python evidence/one_group.py             # the page, from docs/results/one_group.json

Every number of the page comes from the functions that train.py calls, on the tensors that it makes. The record is the
step at which the run of COMMAND trained its groups; of each rollout it has the words, `versions`, `mask`, `reward`,
`correct`, and the log-probs: `then`, of the version that sampled, and `now`, of the trainer before its update.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from report import table

import filters
import losses
import train
from pipeline_rl import Pacer
from runtime.flags import parse_flags

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD, PAGE, TEMPLATE = DOCS / "results" / "one_group.json", DOCS / "one_group.md", Path(__file__).with_suffix(".txt")
B, G, K = 8, 4, 8
COMMAND = f"--batch_prompts {B} --rollouts {G} --max_num_seqs {2 * B * G} --max_steps 200"
# The group and its completion that the page tells of, by place. The completion shows all: it was cut and then ended by
# itself, its tokens are of two versions, and one of them DAPO silences.
PLACE, CUT = 4, 3
Record, Batch = dict[str, Any], dict[str, Tensor]


# ------------------------------------------------------------------------------------------------- the step's tensors


def batch_of(groups: Sequence[Record], average: str = "prompt") -> Batch:
    """What train.py makes of these groups: `rewards` and `group_ids` (n,) of all, `kept` (n,), and of the N that train
    `now`, `then`, `mask`, `token_weights` (N, T), `advantages`, `kept_ids` (N,)."""
    rollouts = [r for group in groups for r in group["rollouts"]]
    rewards, group_ids = torch.tensor([r["reward"] for r in rollouts]), torch.arange(len(groups)).repeat_interleave(G)
    kept = filters.has_variance(rewards, group_ids)
    rows = [r for r, keep in zip(rollouts, kept.tolist(), strict=True) if keep]
    made = {name: train.padded([r[name] for r in rows], torch.float32) for name in ("now", "then")}
    made |= {"rewards": rewards, "group_ids": group_ids, "kept": kept, "kept_ids": group_ids[kept]}
    mask = train.padded([r["mask"] for r in rows], torch.bool)
    longest = parse_flags(COMMAND.split(), "").most_sampled
    token_weights = losses.aggregation_weights(mask, group_ids[kept], average, longest)
    advantages = losses.normalize_advantages(rewards[kept], group_ids[kept])
    return made | {"mask": mask, "token_weights": token_weights, "advantages": advantages}


def factors(batch: Batch, loss: Callable) -> Tensor:
    """(N, T) what stands before A ∇log π, from autograd."""
    now = batch["now"].clone().requires_grad_()
    token_loss, _ = loss(now, batch["then"], batch["advantages"], batch["mask"])
    return torch.autograd.grad(-token_loss.sum(), now)[0] / batch["advantages"][:, None]


# ------------------------------------------------------------------------------------------------------------ the page


def page(step: Record) -> str:
    """The template with what happened to this step's group."""
    group, batch = step["groups"][PLACE], batch_of(step["groups"])
    row = int((batch["kept_ids"] < PLACE).sum()) + CUT  # of the completion, among those that train
    rollout, history = group["rollouts"][CUT], filters.PassRateHistory()
    history.update(group["key"], [r["correct"] for r in group["rollouts"]])
    token_loss, metrics = losses.cispo(*(batch[name] for name in ("now", "then", "advantages", "mask")))
    silenced = (factors(batch, losses.dapo) == 0) & batch["mask"]  # (N, T)
    told = {"B": B, "G": G, "k": K, "capacity": Pacer(B, K).capacity, "command": COMMAND}
    told |= {"step": step, "group": group, "next_version": step["version"] + 1, "metrics": metrics}
    told |= {"cut": CUT + 1, "budget": rollout["mask"].index(0), "A": batch["advantages"][row]}
    told |= {"n": batch["mask"][batch["kept_ids"] == PLACE].sum(), "silenced": silenced.sum()}
    told |= {"silent": ", ".join(f"`{rollout['words'].split()[t]}`" for t in silenced[row].nonzero())}
    told |= {"loss": (batch["token_weights"] * token_loss).sum(), "history": history}
    told |= {"again": "is retired" if history.retired(group["key"]) else "stays"}
    told |= {"completions": completion_table(group), "weights": weight_table(step["groups"])}
    told |= {"right": sum(r["correct"] for r in group["rollouts"]), "tokens": token_table(step, batch, row, rollout)}
    return TEMPLATE.read_text().format(**told, **judged(batch))


def completion_table(group: Record) -> str:
    """Words, in bold the phrase that nobody sampled, and versions: (5, 5, 5, 6) is "5 ×3, 6 ×1"."""
    rows = []
    for i, r in enumerate(group["rollouts"], 1):
        pairs = list(zip(r["mask"], r["words"].split(), r["versions"], strict=True))
        texts = [(m, " ".join(word for _, word, _ in some)) for m, some in groupby(pairs, key=lambda pair: pair[0])]
        versions = [(v, len(list(some))) for v, some in groupby(v for m, _, v in pairs if m)]
        words = " ".join(f"`{text}`" if sampled else f"**`{text}`**" for sampled, text in texts)
        rows.append([i, words, ", ".join(f"{v} ×{n}" for v, n in versions)])
    return table(["", "completion", "tokens of each version"], rows)


def judged(batch: Batch) -> dict[str, Any]:
    """Rewards and advantages of the group, and what the dead groups would do to them."""
    kept, own = batch["kept"], batch["group_ids"] == PLACE  # (n,) each
    rewards, raw = batch["rewards"], losses.normalize_advantages(batch["rewards"], batch["group_ids"], "none")
    std, std_all = (float(x.std(correction=0)) for x in (raw[kept], raw))
    rows = {"reward": rewards[own], "A": batch["advantages"][own[kept]]}
    shown = [[name, *(f"{float(x):.4g}" for x in row)] for name, row in rows.items()]
    P, larger = int(kept.sum()) // G, std / std_all
    told = {"mean": float(rewards[own].mean()), "std": std, "std_all": std_all, "P": P, "dropped": B - P}
    told |= {"larger": larger, "lighter": P / B, "together": larger * P / B}
    return told | {"advantages": table(["completion", *range(1, G + 1)], shown)}


def weight_table(groups: Sequence[Record]) -> str:
    """Of a completion of each length, under four averages: 1,000 times a token's weight, its share of the group."""
    rows = []
    for average in ("prompt", "sample", "token", "constant"):
        batch = batch_of(groups, average)
        w = batch["token_weights"][batch["kept_ids"] == PLACE]  # (G, T)
        lengths = dict(zip((w > 0).sum(1).tolist(), zip(w.amax(1), w.sum(1) / w.sum(), strict=True), strict=True))
        rows.append([f"`{average}`", *(f"{1000 * most:.2f} ({share:.0%})" for most, share in lengths.values())])
    return table(["average", *(f"a completion of {n} tokens" for n in lengths)], rows)


def token_table(step: Record, batch: Batch, row: int, rollout: Record) -> str:
    """Each sampled token of a completion: its lag, both log-probs, and its factor under CISPO, which is ρ."""
    words = rollout["words"].split()  # the tensors are padded
    numbers = zip(batch["then"][row], batch["now"][row], factors(batch, losses.cispo)[row], strict=True)
    rows = [
        [f"`{word}`", step["version"] - version, *(f"{round(float(x), 3) + 0.0:.3f}" for x in some)]  # + 0: no -0.000
        for word, version, sampled, some in zip(words, rollout["versions"], rollout["mask"], numbers, strict=False)
        if sampled
    ]
    return table(["token", "lag", "log π_gen", "log π", "ρ"], rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    PAGE.write_text(page(json.loads(RECORD.read_text())))
