"""The FP32 head against full logits and log_softmax on a CPU: time, memory and error.

    python tools/benchmark_head.py                         # vocabularies of 32,000 and 151,936
    python tools/benchmark_head.py --vocabularies 32000

Peak memory is what a forward and backward pass takes beyond inputs, weight and weight gradient, as a share of one FP32
(tokens, vocabulary) tensor. Errors are those against the same computation in float64.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import Figure, Report, benchmark_parser, parse, positive, ratios, take_turns, timed
from subjects import Helper

import fp32_head

TOKENS, HIDDEN = 4096, 256
CHECKED = 512  # tokens compared with float64


def full_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) the same log-probs with all (M, V) logits in memory."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def our_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(M,) by the chunked head."""
    return fp32_head.token_logprobs(hidden, weight, targets)[0]


CASES = {"ours": our_logprobs, "full logits": full_logprobs}


def inputs(vocabulary: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, head and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / math.sqrt(HIDDEN)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def head_case(name: str, vocabulary: int) -> Callable[[str], float]:
    """In a helper: the `seconds` of one forward and backward pass, or its peak of `bytes`."""
    torch.set_num_threads(1)
    hidden, weight, targets = inputs(vocabulary, TOKENS)

    def once(rows: int = TOKENS) -> None:
        CASES[name](hidden[:rows], weight, targets[:rows]).sum().backward()
        hidden.grad = weight.grad = None

    def measure(what: str) -> float:
        if what == "seconds":
            return timed(once)
        forget_peak()
        before = peak()
        loss = CASES[name](hidden, weight, targets).sum()
        first = peak() - before
        forget_peak()
        loss.backward()  # its peak has the weight gradient in it
        return max(first, peak() - before - weight.numel() * weight.itemsize)

    once(8)  # libraries get their own memory
    return measure


def forget_peak() -> None:
    """`peak` starts anew from what is allocated now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def errors(vocabulary: int) -> tuple[float, float]:
    """(largest |log-prob - float64's|, largest relative error of the gradients)."""

    def computed(logprobs_of: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        hidden, weight, targets = inputs(vocabulary, CHECKED)
        h, w = (x.to(dtype).detach().requires_grad_() for x in (hidden, weight))
        logprobs = logprobs_of(h, w, targets)
        logprobs.mean().backward()
        return logprobs.detach(), h.grad, w.grad

    (found, *grads), (true, *true_grads) = computed(our_logprobs, torch.float32), computed(full_logprobs, torch.float64)
    error = max(float((g - t).norm() / t.norm()) for g, t in zip(grads, true_grads, strict=True))
    return float((found - true).abs().max()), error


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--vocabularies", type=positive, nargs="+", default=[32_000, 151_936], help="(32000 151936)")
    args = parse(parser, argv)
    report = Report(args)
    for V in args.vocabularies:
        with ExitStack() as until_the_end:
            helpers = {name: until_the_end.enter_context(closing(Helper(head_case, name, V, OMP_NUM_THREADS="1")))
                       for name in CASES}  # fmt: skip
            memory = {f"{name}, V = {V:,}, memory": [h.ask("bytes") / 2**20] for name, h in helpers.items()}
            cases = {f"{name}, V = {V:,}": lambda h=h: h.ask("seconds") for name, h in helpers.items()}
            found = take_turns(cases, args.repeats)
        report.add(found, "s")
        report.add(memory, "MiB")
        large = V > 100_000  # the targets are for this one
        share = memory[f"ours, V = {V:,}, memory"][0] * 2**20 / (TOKENS * V * 4)
        report.figures += [
            Figure(f"time / full logits, V = {V:,}", ratios(*found.values()), most=1.5 if large else None),
            Figure(f"peak memory / one (M, V) tensor, V = {V:,}", [share], most=0.1 if large else None),
        ]
    error, gradient = errors(max(args.vocabularies))
    report.figures += [
        Figure(f"largest log-prob error against float64, {CHECKED} tokens", [error], most=1e-5),
        Figure(f"relative gradient error against float64, {CHECKED} tokens", [gradient]),
    ]
    report.close()


if __name__ == "__main__":
    main()
