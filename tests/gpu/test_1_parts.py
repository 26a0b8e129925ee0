"""The machine, and the trainer's side against another way of computing the same."""

import os
import re
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from unittest import mock

import pytest
import torch
from checks import ROOT, TINY, Check, gpus, new_trainer, qwen3_06b, random_batch, random_qwen3

pytestmark = pytest.mark.gpu


def test_machine(check: Check) -> None:
    """The packages are those that were tested together, the driver can run them, and torch sees the GPU."""
    file = ROOT / check.size("requirements.txt", "requirements-cpu.txt")
    for name, tested in re.findall(r"^([\w-]+)==(\S+)$", file.read_text(), re.M):
        check.require(f"{name} is {tested}", version(name).partition("+")[0] == tested)
    check.figure("shared memory, GB", shutil.disk_usage("/dev/shm").total / 1e9)
    check.figure("free disk, GB", shutil.disk_usage(check.folder).free / 1e9, above=check.size(25.0, 1.0))
    if check.cpu:
        return
    name, driver = gpus()[0].split(", ")
    check.figure(f"driver of {name}", int(driver.partition(".")[0]), above=579)  # built for CUDA 13: R580
    check.require(f"torch, built for CUDA {torch.version.cuda}, sees a GPU", torch.cuda.is_available())
    free = torch.cuda.mem_get_info(0)[0] / 1e9
    check.figure("free memory of the first GPU, GB", free, above=18.0)  # what test_memory may take


def test_head(check: Check) -> None:
    """Log-probs and gradients of fp32_head.py against float64, also where TF32 is allowed elsewhere. The bound on
    log-probs is on the mean; the largest of 64 is recorded beside it. Gradients of bfloat16 factors are themselves
    rounded at the end."""
    import fp32_head

    device = check.size("cuda", "cpu")
    vocabulary, width, rows = check.size((151_936, 1024, 64), (2_000, 64, 16))
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).bfloat16()  # (M, H)
    weight = (torch.randn(vocabulary, width) * 2 / width**0.5).bfloat16()  # (V, H): logits of std 2
    targets = torch.randint(vocabulary, (rows,))  # (M,)
    h64, w64 = (x.double().requires_grad_() for x in (hidden, weight))
    exact = (h64 @ w64.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)  # (M,)
    exact.sum().backward()
    targets = targets.to(device)
    for name, precision, dtype, bound in (
        ("FP32", "ieee", torch.float32, 1e-3),
        ("FP32, TF32 elsewhere", "tf32", torch.float32, 1e-3),
        ("bfloat16 factors", "ieee", torch.bfloat16, 5e-3),
    ):
        torch.backends.cuda.matmul.fp32_precision = precision
        h, w = (x.detach().to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight))
        logprobs, _ = fp32_head.token_logprobs(h, w, targets)
        logprobs.sum().backward()
        gaps = (logprobs.detach().cpu() - exact.detach()).abs()
        check.figure(f"{name}: mean gap, nats", gaps.mean().item(), below=1e-5)
        check.figure(f"{name}: largest gap, nats", gaps.max().item())
        for of, own, oracle in (("hidden states", h.grad, h64.grad), ("head", w.grad, w64.grad)):
            off = ((own.cpu() - oracle).norm() / oracle.norm()).item()
            check.figure(f"{name}: gradient of the {of}, relative", off, below=bound)


def test_trainer(check: Check) -> None:
    """In float32 the GPU makes the CPU's three steps."""
    model = random_qwen3(check.folder / "model", TINY)
    no_gpu, other = mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), get_context("spawn")
    with no_gpu, ProcessPoolExecutor(1, mp_context=other) as executor:
        on_cpu = executor.submit(three_steps, model).result()
    found = three_steps(model)
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, on_cpu, strict=True))
    check.figure("steps against those on the CPU", off, below=1e-4)


def three_steps(model: str) -> list[float]:
    """Loss and norm of the gradient of each of three steps, and the largest gradient that an empty microbatch leaves:
    one as a rank has it that has no rows, 0."""
    from runtime.model import make_microbatch

    made = new_trainer(model, "--lr 1e-3 --tokens_per_microbatch 256")
    batch, found = random_batch(24, 12, 60), []
    for step in range(3):
        metrics = made.backward(batch)[1] | made.update(step)
        found += [metrics["loss"], metrics["grad_norm"]]
    made.policy(make_microbatch(batch.rows, [], 4).to(made.accelerator.device))[0].sum().backward()
    return [*found, max(parameter.grad.abs().max().item() for parameter in made.policy.parameters())]


def test_memory(check: Check) -> None:
    """What a forward pass keeps, what a step takes, and how fast it is, in the shape of Qwen3-0.6B. Peaks leave out what
    CUDA itself takes (half a GB)."""
    from runtime.model import recompute_layers

    model = check.model or random_qwen3(check.folder / "model", check.size(qwen3_06b(), TINY))
    short, long, row = check.size((2048, 16_384, 1024), (128, 512, 64))  # positions
    made = new_trainer(model, f"--dtype bfloat16 --tokens_per_microbatch {long}")

    def kept_by_forward() -> int:
        """Bytes that a forward pass keeps for the backward pass; 0 on a CPU."""
        [microbatch] = made._microbatches(random_batch(short // row, row, row).rows)
        before = torch.cuda.memory_allocated()
        logprobs, _ = made.policy(microbatch)
        kept = torch.cuda.memory_allocated() - before
        logprobs.sum().backward()
        made.optimizer.zero_grad()
        return kept

    kept = kept_by_forward()
    recompute_layers(made.policy)  # what --gradient_checkpointing true does
    kept_less = kept_by_forward()
    batch = random_batch(long // row, row, row)
    made.backward(batch)[1] | made.update(0)
    started = time.perf_counter()
    made.backward(batch)[1] | made.update(1)  # the loss's value has waited for the GPU
    check.figure("trained positions/s", long / (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / 1e9
    if not check.cpu:
        check.figure(f"peak at {long} positions, GB", peak, below=18.0)
        check.figure(f"kept at {short} positions, checkpointing on / off", kept_less / kept, below=0.35)
