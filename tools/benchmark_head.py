"""The FP32 head against full logits and log_softmax on a CPU: time, memory and error.

    python tools/benchmark_head.py                         # vocabularies of 32,000 and 151,936
    python tools/benchmark_head.py --vocabularies 32000

Peak memory is what a forward and backward pass takes beyond inputs, weight and weight gradient, as a share of one FP32
(tokens, vocabulary) tensor. Errors are those against the same computation in float64.

Rounding is what a bfloat16 head costs: the mean |log-prob - float64's| of sampled tokens, all from the same bfloat16
hidden states and head. The logits are spread alike in every vocabulary, but the more there are the larger is the
largest, and with it the steps of bfloat16: --vocabularies 40 4096 32768 151936.
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
SPREAD = 4.0  # standard deviation of the logits that are rounded: of 151,936 the largest is near 20
ROUNDED = 2**23  # how many of them, at most


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


def rounding(vocabulary: int) -> dict[str, float]:
    """{product: mean |log-prob - float64's|} of tokens drawn from the policy, for a head in FP32 and in bfloat16."""
    random = torch.Generator().manual_seed(0)
    tokens = min(TOKENS, max(1, ROUNDED // vocabulary))
    hidden = torch.randn(tokens, HIDDEN, generator=random).bfloat16()  # (M, H)
    weight = (torch.randn(vocabulary, HIDDEN, generator=random) * SPREAD / math.sqrt(HIDDEN)).bfloat16()  # (V, H)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)  # (M, V)
    targets = torch.multinomial(exact.exp(), 1, generator=random)  # (M, 1)
    true = exact.gather(1, targets).squeeze(1)
    return {
        name: (fp32_head.token_logprobs(hidden, weight, targets.squeeze(1), fp32=fp32)[0] - true).abs().mean().item()
        for name, fp32 in (("FP32", True), ("bfloat16", False))
    }


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
            *(Figure(f"rounding of a head in {name}, V = {V:,}", [gap]) for name, gap in rounding(V).items()),
        ]
    error, gradient = errors(max(args.vocabularies))
    report.figures += [
        Figure(f"largest log-prob error against float64, {CHECKED} tokens", [error], most=1e-5),
        Figure(f"relative gradient error against float64, {CHECKED} tokens", [gradient]),
    ]
    report.close()


if __name__ == "__main__":
    main()
