"""Our training step against the best of several bare loops: forward, backward, AdamW and nothing else.

    python tools/benchmark_trainer.py

A bare loop computes the same loss in one line on tensors that are ready, which is what the hardware allows with this
model and these rows; it cuts the rows into microbatches in one of several ways, and the fastest one is compared. Two
threads and two processes are compared with one. Rows are synthetic, as long as those of the built-in task.
"""

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, ratios, take_turns, timed
from subjects import Helper, TrainerSide, synthetic_groups, warm_model

from runtime.model import cut_rows, make_microbatch

CUTS = ("unsorted 64", "sorted 32", "sorted 64", "sorted 128", "tokens 1024", "tokens 2048", "tokens 4096")
ROWS, LENGTH = 512, 23  # of a batch of the built-in task


class BareLoop:
    """Forward, backward, AdamW. `cut`: so many rows to a microbatch, sorted by length or not, or so many tokens."""

    def __init__(self, model: str, batch: Any, cut: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        lengths, (kind, size) = [len(row) for row in batch.rows], cut.split()
        if kind == "tokens":
            pieces = cut_rows(lengths, range(len(lengths)), int(size), packed=False)
        else:
            order = sorted(range(len(lengths)), key=lambda i: -lengths[i] if kind == "sorted" else i)
            pieces = [order[i : i + int(size)] for i in range(0, len(order), int(size))]
        factors = batch.token_weights * batch.advantages[:, None]  # (N, T)
        self.pieces = []  # of each microbatch: its input; of its tokens the generator's log-prob, weight x advantage
        for piece in pieces:
            mask, microbatch = batch.mask[piece], make_microbatch(batch.rows, piece, batch.mask.shape[1])
            self.pieces.append((microbatch, batch.behaviour_logprobs[piece][mask], factors[piece][mask]))

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


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(benchmark_parser(__file__, __doc__), argv)
    report, model = Report(args), warm_model(args.seed)
    torch.set_num_threads(1)
    side, groups = TrainerSide(model), synthetic_groups(ROWS, LENGTH)
    batch = side.batch(groups)
    tokens = 2 * int(batch.mask.sum())  # each case makes two steps

    def ours(threads: int) -> float:
        torch.set_num_threads(threads)
        seconds = timed(lambda: [side.step(side.batch(groups)) for _ in range(2)])
        torch.set_num_threads(1)
        return tokens / seconds

    def bare(loop: BareLoop) -> float:
        return tokens / timed(lambda: [loop.step() for _ in range(2)])

    ours(1)  # libraries get their own memory
    loops = {f"bare, {cut}": BareLoop(model, batch, cut) for cut in CUTS}
    tried = take_turns({name: lambda loop=loop: bare(loop) for name, loop in loops.items()}, 2)
    best = max(tried, key=lambda name: max(tried[name]))
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 60000)), "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    with ExitStack() as until_the_end:
        pair = [until_the_end.enter_context(closing(Helper(rank, model, RANK=str(i), LOCAL_RANK=str(i), **both)))
                for i in (0, 1)]  # fmt: skip

        def two_processes() -> float:
            return tokens / max(call.result() for call in [helper.send(2) for helper in pair])

        two_processes()
        cases = {"ours": lambda: ours(1), best: lambda: bare(loops[best]), "ours, 2 threads": lambda: ours(2),
                 "ours, 2 processes": two_processes}  # fmt: skip
        found = take_turns(cases, args.repeats)
    report.add(found, "tokens/s")
    report.add({f"{name} (2 turns)": values for name, values in tried.items() if name != best}, "tokens/s")
    report.figures = [
        Figure(f"ours / {best}, the best bare loop", ratios(found["ours"], found[best]), least=0.9),
        Figure("2 processes / 1", ratios(found["ours, 2 processes"], found["ours"])),
        Figure("2 threads / 1", ratios(found["ours, 2 threads"], found["ours"])),
    ]
    report.close()


if __name__ == "__main__":
    main()
