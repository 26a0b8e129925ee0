"""The head and the trainer against another way of computing the same, and their memory. No vLLM is needed."""

import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest
import torch
from small import QWEN3_06B, TINY, random_qwen3

import fp32_head
from runtime.flags import parse_flags
from runtime.microbatches import TokenRow
from runtime.parts import new_accelerator
from runtime.trainer import Trainer, TrainingBatch

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["ieee", "tf32"])
def elsewhere(request):
    """The precision of FP32 products that do not ask for one."""
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head(device, figure, dtype, elsewhere):
    """Log-probs and gradients against float64, also where other products may be TF32. Gradients of bfloat16 factors are
    themselves rounded at the end."""
    vocabulary, width, rows = (151_936, 1024, 64) if device == "cuda" else (2_000, 64, 16)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).bfloat16()  # (M, H)
    weight = (torch.randn(vocabulary, width) * 2 / width**0.5).bfloat16()  # (V, H): logits of std 2
    targets = torch.randint(vocabulary, (rows,))  # (M,)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact = (exact_hidden @ exact_weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)  # (M,)
    exact.sum().backward()
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    logprobs, _ = fp32_head.token_logprobs(hidden, weight, targets.to(device))
    logprobs.sum().backward()
    figure("mean gap, nats", (logprobs.cpu() - exact).abs().mean().item(), below=1e-5)
    for name, ours, oracle in (("hidden states", hidden, exact_hidden), ("head", weight, exact_weight)):
        error = (ours.grad.cpu() - oracle.grad).norm() / oracle.grad.norm()
        bound = 1e-3 if dtype == torch.float32 else 5e-3
        figure(f"relative error of the gradient of the {name}", error.item(), below=bound)


def new_trainer(model: str, *flags: str) -> Trainer:
    """As train.py makes it."""
    parsed = parse_flags(["--model", model, "--warmup_steps", "0", *flags], "")
    return Trainer(parsed, new_accelerator(parsed), model)


def random_batch(count: int, shortest: int, longest: int) -> TrainingBatch:
    """Rows of `shortest` to `longest` random tokens, 8 of them the prompt; every second row is rewarded."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        ids = [rng.randrange(2, 40) for _ in range(rng.randint(shortest, longest))]
        rows.append(TokenRow(ids[:8], ids[8:], [1] * len(ids[8:])))
    masks = [torch.ones(len(row.mask), dtype=torch.bool) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)  # (N, T)
    advantages = torch.tensor([1.0, -1.0]).repeat(count)[:count]  # (N,)
    return TrainingBatch(rows, torch.full(mask.shape, -3.5), mask, advantages, mask / mask.sum())


def three_steps(model: str) -> list[float]:
    """Loss and norm of the gradient of each of three steps."""
    trainer = new_trainer(model, "--lr", "1e-3", "--tokens_per_microbatch", "256")
    batch, values = random_batch(24, 12, 60), []
    for step in range(3):
        metrics = trainer.backward(batch)[1] | trainer.update(step)
        values += [metrics["loss"], metrics["grad_norm"]]
    return values


def test_trainer(device, figure, tmp_path):
    """In float32 the GPU makes the CPU's three steps."""
    model = random_qwen3(tmp_path / "model", TINY)
    no_gpu = mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="")
    with no_gpu, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        expected = executor.submit(three_steps, model).result()
    gaps = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(three_steps(model), expected, strict=True)]
    figure("largest difference to the CPU", max(gaps), below=1e-4)


def test_memory(device, figure, tmp_path):
    """What a step of 16,384 positions takes with --gradient_checkpointing in the shape of Qwen3-0.6B. The
    peak leaves out what CUDA itself takes (half a GB)."""
    shape, row, rows = (QWEN3_06B, 1024, 16) if device == "cuda" else (TINY, 64, 8)
    flags = ["--dtype", "bfloat16", "--gradient_checkpointing", "true", "--tokens_per_microbatch", str(row * rows)]
    trainer = new_trainer(random_qwen3(tmp_path / "model", shape), *flags)
    batch = random_batch(rows, row, row)
    for step in range(2):
        trainer.backward(batch)
        trainer.update(step)
    figure("peak, GB", torch.cuda.max_memory_allocated() / 1e9, below=18)


@pytest.mark.parametrize(("shape", "dtype"), [(TINY, "float32"), (QWEN3_06B, "bfloat16")])
def test_prompts_computed_once(device, figure, tmp_path, shape, dtype):
    """Steps on 16 completions of each of 8 prompts that are as long as they. The gradients are the same but for
    rounding."""
    if shape is QWEN3_06B and device == "cpu":
        pytest.skip("too large for a CPU")
    model, length, gradients = random_qwen3(tmp_path / "model", shape), 128 if device == "cuda" else 8, []
    ids = torch.randint(5, 40, (2, 128, length))
    ids[0] = ids[0, :8].repeat_interleave(16, 0)  # of the prompts
    rows = [TokenRow(begin, end, [1] * length) for begin, end in zip(*ids.tolist(), strict=True)]
    mask = torch.ones(len(rows), length, dtype=torch.bool)
    batch = TrainingBatch(rows, torch.full(mask.shape, -11.0), mask, torch.randn(len(rows)), mask / mask.sum())
    for share in ("true", "false"):
        flags = ["--dtype", dtype, "--share_prompts", share, "--tokens_per_microbatch", "8192"]
        trainer = new_trainer(model, *flags)
        trainer.backward(batch)
        gradients.append(torch.cat([parameter.grad.flatten().cpu() for parameter in trainer.model.parameters()]))
        for step in range(4):  # the first two are no measure
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.update(step)
            trainer.backward(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            if step > 1:
                figure(f"--share_prompts {share}, {dtype}: seconds a step", time.perf_counter() - started)
        del trainer
    gap = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    figure(f"difference of the gradients, {dtype}", gap.item(), below=1e-5 if dtype == "float32" else 1.0)
