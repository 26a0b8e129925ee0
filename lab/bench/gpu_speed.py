"""What the trainer's two expensive parts cost on this device; docs/gpu.md has the answers.

    python lab/bench/gpu_speed.py head       # time and memory of the head: 8,192 positions, a vocabulary of 151,936
    python lab/bench/gpu_speed.py trainer    # a whole optimizer step in the shapes of Qwen3-0.6B and Qwen3-1.7B
    python lab/bench/gpu_speed.py prompts    # the same with prompts computed once and with whole rows

Each is run on random numbers. On a CPU the sizes are small, to try the code.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import fp32_head
from runtime.flags import parse_flags
from runtime.microbatches import TokenRow
from runtime.model import recompute_layers
from runtime.parts import new_accelerator
from runtime.trainer import Trainer, TrainingBatch
from tasks import arithmetic

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HEAD = (8192, 2048, 151_936) if GPU else (64, 64, 2000)  # positions, width, vocabulary
SHAPES = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}
LENGTH, ROWS = (1024, 64) if GPU else (16, 8)  # of the trainer's batch


def measured(work: Callable[[], object], times: int = 3) -> tuple[float, float]:
    """(median seconds, greatest memory in GB beyond what is there before) of `work`, after a first call."""
    work()
    seconds = []
    before = torch.cuda.memory_allocated() if GPU else 0
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(times):
        wait()
        started = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if GPU else 0
    return sorted(seconds)[times // 2], (peak - before) / 1e9


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def matrix_rate() -> float:
    """bfloat16 FLOPs a second of a large matrix product: what a step could reach at best."""
    size = 8192 if GPU else 512
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    seconds, _ = measured(lambda: a @ b, times=9)
    return 2 * size**3 / seconds


# ---------------------------------------------------------------------------------------------------------------- head


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor, fp32: bool) -> Tensor:
    """With all logits at once."""
    logits = hidden.float() @ weight.float().t() if fp32 else (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def fused_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The Liger kernel's."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    return -Fused.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "none")[0]


def head() -> None:
    """Forward and backward pass of each way, and how far its log-probs and gradients are from those in float64."""
    positions, width, vocabulary = HEAD
    hidden = torch.randn(positions, width, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) * 2 / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (positions,), device=DEVICE)
    signs = torch.randn(positions, device=DEVICE).sign()  # as advantages are: a sum over tokens would cancel nothing
    ways: dict[str, Callable[[], Tensor]] = {}
    for mib in (112, 256, 512, 1024, 2048):
        chunk = mib * 2**20 // (4 * vocabulary)
        ways[f"ours, chunks of {mib} MiB"] = lambda chunk=chunk: fp32_head.token_logprobs(
            hidden, weight, targets, chunk_tokens=chunk
        )[0]
    ways["ours, bfloat16 logits"] = lambda: fp32_head.token_logprobs(hidden, weight, targets, fp32=False)[0]
    ways["FP32 factors, all logits at once"] = lambda: plain_head(hidden, weight, targets, True)
    ways["bfloat16 logits, all at once"] = lambda: plain_head(hidden, weight, targets, False)
    ways["Liger's fused kernel"] = lambda: fused_head(hidden, weight, targets)
    exact = exact_head(hidden, weight, targets, signs)
    print("| way | ms | GB | log-probs, nats | gradient of hidden | gradient of head |\n|---|---|---|---|---|---|")
    for name, way in ways.items():
        try:
            print(f"| {name} | {head_cells(way, hidden, weight, signs, exact)} |", flush=True)
        except (ImportError, RuntimeError) as error:
            print(f"| {name} | not run: {str(error).splitlines()[0]} |", flush=True)


def head_cells(way: Callable[[], Tensor], hidden: Tensor, weight: Tensor, signs: Tensor, exact: list[Tensor]) -> str:
    def step() -> Tensor:
        hidden.grad = weight.grad = None
        logprobs = way()
        (logprobs * signs).sum().backward()
        return logprobs.detach()

    seconds, peak = measured(step)
    logprobs = step()
    results = logprobs, hidden.grad, weight.grad
    logprobs, *gradients = [result[: len(expected)] for result, expected in zip(results, exact, strict=True)]
    gap = (logprobs - exact[0]).abs().mean().item()
    gaps = [relative(gradient, expected) for gradient, expected in zip(gradients, exact[1:], strict=True)]
    return f"{1000 * seconds:.0f} | {peak:.2f} | {gap:.1e} | {gaps[0]:.1e} | {gaps[1]:.1e}"


def relative(values: Tensor, exact: Tensor) -> float:
    return ((values.double() - exact).norm() / exact.norm()).item()


def exact_head(hidden: Tensor, weight: Tensor, targets: Tensor, signs: Tensor, rows: int = 512) -> list[Tensor]:
    """In float64: log-probs and gradients of the first positions, and the gradient of the head's first rows."""
    h, w = hidden.detach().double(), weight.detach().double()
    head_gradient = torch.zeros(min(rows, len(w)), w.shape[1], dtype=torch.float64, device=DEVICE)
    first: list[Tensor] = []
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        logprobs = (h[part] @ w.t()).log_softmax(-1)
        dz = -logprobs.exp() * signs[part, None]
        dz[range(len(dz)), targets[part]] += signs[part]
        head_gradient += dz[:, : len(head_gradient)].t() @ h[part]
        if not first:
            first = [logprobs.gather(1, targets[part, None])[:, 0], dz @ w]
    return [*first, head_gradient]


# ------------------------------------------------------------------------------------------------------------- trainer


def whole_step() -> None:
    """Trained positions a second, the share of the device's own matrix rate, memory."""
    rate = matrix_rate()
    print(f"a product of two bfloat16 matrices: {rate / 1e12:.0f} TFLOP/s\n")
    print("| shape | checkpointing | positions/s | share of that rate | peak, GB |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        with TemporaryDirectory() as folder:
            random_model(folder, shape if GPU else shape | {"hidden_size": 64, "num_hidden_layers": 2})
            trainer = new_trainer(folder)
            print(f"| {name} | no | {trainer_cells(trainer, rate)} |", flush=True)
            recompute_layers(trainer.policy.model)
            print(f"| {name} | yes | {trainer_cells(trainer, rate)} |", flush=True)
            del trainer


def random_model(folder: str, shape: dict[str, int]) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    common = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=HEAD[2], **common, **shape))
    model.bfloat16().save_pretrained(folder)
    arithmetic.word_tokenizer().save_pretrained(folder)


def new_trainer(folder: str, *more: str) -> Trainer:
    tokens = str(ROWS // 8 * LENGTH)
    flags = parse_flags(["--model", folder, "--dtype", "bfloat16", "--tokens_per_microbatch", tokens, *more], "")
    return Trainer(flags, new_accelerator(flags), folder)


def trainer_cells(trainer: Trainer, rate: float) -> str:
    rows = [TokenRow([5] * 8, torch.randint(5, 100, (LENGTH - 8,)).tolist(), [1] * (LENGTH - 8)) for _ in range(ROWS)]
    mask = torch.ones(ROWS, LENGTH - 8, dtype=torch.bool)
    batch = TrainingBatch(rows, torch.full(mask.shape, -11.0), mask, torch.randn(ROWS), mask / mask.sum())

    def step() -> None:
        trainer.backward(batch)
        trainer.update(0)

    seconds, _ = measured(step)
    peak = torch.cuda.max_memory_allocated() / 1e9 if GPU else math.nan
    flops = 6 * trainer.parameters_in_flops * ROWS * LENGTH
    return f"{ROWS * LENGTH / seconds:,.0f} | {flops / seconds / rate:.0%} | {peak:.1f}"


# ------------------------------------------------------------------------------------------------------------- prompts


def prompts() -> None:
    """A line of JSON for each figure: steps on 16 completions of each of 8 prompts, which are as long as they. The two
    gradients must be the same but for rounding: in float32, in a small shape, to 1e-5."""
    groups, length = (8, 128) if GPU else (2, 8)
    beginnings = torch.randint(5, 100, (groups, length)).repeat_interleave(16, 0).tolist()
    endings = torch.randint(5, 100, (16 * groups, length)).tolist()
    rows = [TokenRow(begin, end, [1] * length) for begin, end in zip(beginnings, endings, strict=True)]
    mask = torch.ones(len(rows), length, dtype=torch.bool)
    batch = TrainingBatch(rows, torch.full(mask.shape, -11.0), mask, torch.randn(len(rows)), mask / mask.sum())
    whole = SHAPES["Qwen3-0.6B"]
    small = whole | {"hidden_size": 64, "num_hidden_layers": 2}
    for shape, dtype in ((small, "float32"), (whole, "bfloat16"))[: 1 + GPU]:
        gradients = []
        with TemporaryDirectory() as folder:
            random_model(folder, shape)
            for share in ("true", "false"):
                options = ["--dtype", dtype, "--share_prompts", share, "--tokens_per_microbatch", "8192"]
                trainer = new_trainer(folder, *options)
                gradients.append(gradient(trainer, batch))
                seconds, peak = measured(lambda trainer=trainer: (trainer.backward(batch), trainer.update(0)))
                figure = f"--share_prompts {share}, {dtype}, width {shape['hidden_size']}"
                print(json.dumps({"figure": figure, "s_a_step": round(seconds, 3), "GB": round(peak, 2)}), flush=True)
                del trainer
        gap = relative(*gradients)
        print(json.dumps({"figure": f"gradients, {dtype}", "value": gap, "holds": dtype != "float32" or gap < 1e-5}))


def gradient(trainer: Trainer, batch: TrainingBatch) -> Tensor:
    trainer.backward(batch)
    values = torch.cat([parameter.grad.flatten().cpu() for parameter in trainer.model.parameters()])
    trainer.optimizer.zero_grad()
    return values


QUESTIONS = {"head": head, "trainer": whole_step, "prompts": prompts}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    print(torch.cuda.get_device_name() if GPU else "CPU", f"torch {torch.__version__}\n")
    QUESTIONS[parser.parse_args().question]()
