"""Our training step against the best of several bare loops: forward, backward, AdamW and nothing else.

    python tools/benchmark_trainer.py

A bare loop computes the same loss in one line on tensors that are ready, which is what the hardware allows with this
model and these rows; it cuts the rows into microbatches in one of several ways, and the fastest one is compared. Two
threads and two processes are compared with one. Rows are synthetic, as long as those of the built-in task.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, ratios, take_turns, timed
from subjects import Helper, TrainerSide, synthetic_groups, warm_model

from runtime import model as policies

CUTS = ("unsorted 64", "sorted 32", "sorted 64", "sorted 128", "tokens 1024", "tokens 2048", "tokens 4096")
ROWS, LENGTH = 512, 23  # of a batch of the built-in task


class BareLoop:
    """Forward, backward, AdamW. `cut`: so many rows to a microbatch, sorted by length or not, or so many tokens."""

    def __init__(self, model: str, batch: Any, cut: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        lengths = [len(row) for row in batch.rows]
        order = list(range(len(lengths)))
        kind, size = cut.split()
        if kind == "tokens":
            pieces = policies.cut_rows(lengths, order, int(size), packed=False)
        else:
            order = order if kind == "unsorted" else sorted(order, key=lambda i: -lengths[i])
            pieces = [order[i : i + int(size)] for i in range(0, len(order), int(size))]
        width = batch.mask.shape[1]
        self.pieces = [
            (policies.make_microbatch(batch.rows, piece, width), *self._terms(batch, piece)) for piece in pieces
        ]

    @staticmethod
    def _terms(batch: Any, piece: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the piece's trained tokens: the generator's log-probs, and weight times advantage."""
        mask = batch.mask[piece]
        return batch.behaviour_logprobs[piece][mask], (batch.weights[piece] * batch.advantages[piece, None])[mask]

    def step(self) -> None:
        """One optimizer step with CISPO's loss."""
        for microbatch, behaviour, factor in self.pieces:
            hidden = self.model.base_model(input_ids=microbatch.input_ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[microbatch.read])  # (M, V)
            logprobs = logits.log_softmax(-1).gather(1, microbatch.targets[:, None]).squeeze(1)
            rho = (logprobs.detach() - behaviour).exp().clamp(max=5.0)
            (-(rho * factor * logprobs)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank(model: str) -> Callable[[int], float]:
    """In a helper: one of several trainer processes; the seconds that so many steps take."""
    torch.set_num_threads(1)
    side = TrainerSide(model)
    batch = side.batch(synthetic_groups(ROWS, LENGTH))
    return lambda count: timed(lambda: [side.step(batch) for _ in range(count)])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what it prints as JSON."""
    args = parse(benchmark_parser(__file__, __doc__), argv)
    report, model = Report(args), warm_model(args.seed)
    torch.set_num_threads(1)
    side, groups = TrainerSide(model), synthetic_groups(ROWS, LENGTH)
    tokens = 2 * side.step(side.batch(groups))  # each case makes two steps

    def ours(threads: int) -> float:
        torch.set_num_threads(threads)
        seconds = timed(lambda: [side.step(side.batch(groups)) for _ in range(2)])
        torch.set_num_threads(1)
        return tokens / seconds

    loops = {cut: BareLoop(model, side.batch(groups), cut) for cut in CUTS}
    bare = {f"bare, {cut}": lambda loop=loop: tokens / timed(lambda: [loop.step() for _ in range(2)])
            for cut, loop in loops.items()}  # fmt: skip
    tried = take_turns(bare, 2)
    best = max(tried, key=lambda name: max(tried[name]))
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 60000)), "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    pair = [Helper(rank, model, RANK=str(i), LOCAL_RANK=str(i), **both) for i in (0, 1)]

    def two_processes() -> float:
        return tokens / max(call.result() for call in [helper.send(2) for helper in pair])

    try:
        two_processes()
        cases = {"ours": lambda: ours(1), best: bare[best], "ours, 2 threads": lambda: ours(2),
                 "ours, 2 processes": two_processes}  # fmt: skip
        found = take_turns(cases, args.repeats)
    finally:
        for helper in pair:
            helper.close()
    report.add(found, "tokens/s")
    report.add({f"{name} (2 turns)": values for name, values in tried.items() if name != best}, "tokens/s")
    report.figures = [
        Figure(f"ours / {best}, the best bare loop", ratios(found["ours"], found[best]), least=0.9),
        Figure("2 processes / 1", ratios(found["ours, 2 processes"], found["ours"])),
        Figure("2 threads / 1", ratios(found["ours, 2 threads"], found["ours"])),
    ]
    return report.close()


if __name__ == "__main__":
    main()
