"""Checks 0 to 3 of gpu_check.py: the machine, and the trainer's side against another way of computing the same."""

import random
import shlex
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from gpu_check_job import Job, gpus, required, versions
from measuring import timed
from memory import QWEN3, SHAPES
from torch import Tensor

import fp32_head
from runtime import checkpoints
from runtime.flags import parse_flags
from runtime.model import Row, full_tensors, make_microbatch, recompute_layers
from runtime.parts import new_accelerator
from runtime.trainer import Trainer, TrainingBatch
from tasks import arithmetic

QWEN3_06B = QWEN3 | SHAPES["Qwen/Qwen3-0.6B"]
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1,
        "tie_word_embeddings": True}  # fmt: skip


def random_qwen3(folder: Path, shape: dict[str, Any], ends: bool = False) -> str:
    """Folder of a Qwen3 with random weights. With `ends` it has the built-in task's tokenizer and end token; else vLLM
    would stop there, whatever the request says."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    end = arithmetic.IDS["<eos>"] if ends else None
    config = Qwen3Config(**shape, eos_token_id=end, pad_token_id=end, bos_token_id=None)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    if ends:
        arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)


def new_trainer(model: str, flags: str) -> Trainer:
    """As train.py makes it."""
    parsed = parse_flags(["--model", model, "--warmup_steps", "0", *shlex.split(flags)], "")
    return Trainer(parsed, new_accelerator(parsed), model)


def random_batch(count: int, shortest: int, longest: int) -> TrainingBatch:
    """Rows of random tokens, from `shortest` to `longest` with their prompt of 8; every second one is rewarded."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        ids = [rng.randrange(2, 40) for _ in range(rng.randint(shortest, longest))]
        rows.append(Row(ids[:8], ids[8:], [1] * len(ids[8:])))
    masks = [torch.ones(len(row.mask), dtype=torch.bool) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)  # (N, T)
    advantages = torch.tensor([1.0, -1.0]).repeat(count)[:count]  # (N,)
    return TrainingBatch(rows, torch.full(mask.shape, -3.5), mask, advantages, mask / mask.sum())


def best_of(count: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest call of so many; a GPU is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    return min(timed(lambda: (function(), wait())) for _ in range(count))


def seconds_of_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Of its forward and backward pass."""
    return best_of(4, lambda: fp32_head.token_logprobs(hidden, weight, targets)[0].sum().backward())


# ---------------------------------------------------------------------------------------------------------- the checks


def machine(job: Job) -> str:
    """0. The packages are those that were tested together, the driver can run them, and torch sees the GPU."""
    installed = versions()
    for name, version in required(job.size("", "cpu")).items():
        job.require(f"{name} is {version}", installed.get(name, "").partition("+")[0] == version)
    shared = job.figure("shared memory, GB", shutil.disk_usage("/dev/shm").total / 1e9)
    disk = job.figure("free disk, GB", shutil.disk_usage(job.folder).free / 1e9, above=job.size(25.0, 1.0))
    if job.cpu:
        return f"torch {torch.__version__}, {shared:.0f} GB of shared memory, {disk:.0f} GB of disk"
    if not gpus():
        raise RuntimeError("nvidia-smi finds no GPU; `python tools/gpu_check.py --cpu` makes the dry run")
    driver = gpus()[0].split(", ")[1]
    job.figure("driver", int(driver.partition(".")[0]), above=579)  # the packages are built for CUDA 13: R580
    job.require(f"torch, built for CUDA {torch.version.cuda}, sees a GPU", torch.cuda.is_available())
    free = torch.cuda.mem_get_info(0)[0] / 1e9
    job.figure("free memory of the first GPU, GB", free, above=18.0)  # what check 3 may take
    return f"{torch.cuda.get_device_name(0)}, driver {driver}, CUDA {torch.version.cuda}, {free:.0f} GB free"


def head(job: Job) -> str:
    """1. Log-probs and gradients of fp32_head.py against float64, also where TF32 is allowed elsewhere. The bound on
    log-probs is on the mean; the largest of 64 is recorded beside it. Gradients of bfloat16 factors are themselves
    rounded at the end."""
    device = job.size("cuda", "cpu")
    vocabulary, width, rows, many = job.size((151_936, 1024, 64, 1024), (2_000, 64, 16, 32))
    torch.manual_seed(0)
    hidden = torch.randn(many, width).bfloat16()  # (M, H)
    weight = (torch.randn(vocabulary, width) * 2 / width**0.5).bfloat16()  # (V, H): logits of std 2
    targets = torch.randint(vocabulary, (many,))  # (M,)
    h64, w64 = (x.double().requires_grad_() for x in (hidden[:rows], weight))
    exact = (h64 @ w64.T).log_softmax(-1).gather(1, targets[:rows, None]).squeeze(1)  # (rows,)
    exact.sum().backward()

    seconds, targets = {}, targets.to(device)
    cases = (("FP32", "ieee", torch.float32, 1e-3), ("FP32, TF32 elsewhere", "tf32", torch.float32, 1e-3),
             ("bfloat16 factors", "ieee", torch.bfloat16, 5e-3))  # fmt: skip
    for name, precision, dtype, bound in cases:
        torch.backends.cuda.matmul.fp32_precision = precision
        h, w = (x.detach().to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight))
        logprobs, _ = fp32_head.token_logprobs(h[:rows], w, targets[:rows])
        logprobs.sum().backward()
        gaps = (logprobs.detach().cpu() - exact.detach()).abs()
        job.figure(f"{name}: mean gap, nats", gaps.mean().item(), below=1e-5)
        job.figure(f"{name}: largest gap, nats", gaps.max().item())
        for of, own, oracle in (("hidden states", h.grad[:rows], h64.grad), ("head", w.grad, w64.grad)):
            off = ((own.cpu() - oracle).norm() / oracle.norm()).item()
            job.figure(f"{name}: gradient of the {of}, relative", off, below=bound)
        seconds[name] = seconds_of_head(h, w, targets)
        job.figure(f"{name}: {many} rows forward and backward, ms", 1e3 * seconds[name])
    return f"{many} rows forward and backward {1e3 * seconds['FP32']:.0f} ms"


def trainer(job: Job) -> str:
    """2. In float32 the GPU makes the CPU's three steps; rows that are packed, the steps of rows that are padded."""
    model = random_qwen3(job.folder / "model", TINY)
    no_gpu, other = mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""), get_context("spawn")
    with no_gpu, ProcessPoolExecutor(1, mp_context=other) as executor:
        on_cpu = executor.submit(three_steps, model, "false").result()
    largest = 0.0
    for packed, name in (("false", "padded"), ("true", "packed")):
        found = three_steps(model, packed)
        off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, on_cpu, strict=True))
        largest = max(largest, job.figure(f"{name} rows against padded ones on the CPU", off, below=1e-4))
    return f"losses and norms of three steps off by {largest:.0e} from the CPU's"


def three_steps(model: str, packed: str) -> list[float]:
    """Loss and norm of the gradient of each of three steps, and the largest gradient that an empty microbatch leaves:
    one as a rank has it that has no rows, 0."""
    made = new_trainer(model, f"--packed {packed} --lr 1e-3 --tokens_per_microbatch 256")
    batch, found = random_batch(24, 12, 60), []
    for step in range(3):
        metrics = made.gradients(batch) | made.update(step)
        found += [metrics["loss"], metrics["grad_norm"]]
    made.policy(make_microbatch(batch.rows, [], 4).to(made.accelerator.device))[0].sum().backward()
    return [*found, max(parameter.grad.abs().max().item() for parameter in made.policy.parameters())]


def memory(job: Job) -> str:
    """3. What a forward pass keeps, what a step takes, and how fast it is, in the shape of Qwen3-0.6B. Peaks leave out
    what CUDA itself takes (half a GB)."""
    model = job.model or random_qwen3(job.folder / "model", job.size(QWEN3_06B, TINY))
    short, long, row = job.size((2048, 16_384, 1024), (128, 512, 64))  # positions
    made = new_trainer(model, f"--dtype bfloat16 --tokens_per_microbatch {long}")
    kept = kept_by_forward(made, short, row)
    recompute_layers(made.model)  # what --gradient_checkpointing true does
    kept_less = kept_by_forward(made, short, row)
    batch = random_batch(long // row, row, row)
    seconds = best_of(3, lambda: made.gradients(batch) | made.update(0))
    speed = job.figure("trained positions/s", long / seconds)
    device, shape = made.accelerator.device, fp32_head.head_of(made.model)[0].shape
    peak = torch.cuda.max_memory_allocated() / 1e9
    hidden, weight = (torch.randn(n, shape[1], device=device).requires_grad_() for n in (long, shape[0]))
    share = seconds_of_head(hidden, weight, torch.zeros(long, dtype=torch.long, device=device)) / seconds
    job.figure("share of the head in a step's time, in FP32", share)
    if job.cpu:
        return f"{speed:.0f} positions/s"
    job.figure(f"peak at {long} positions, GB", peak, below=18.0)
    ratio = job.figure(f"kept at {short} positions, checkpointing on / off", kept_less / kept, below=0.35)
    return f"peak {peak:.1f} GB at {long} positions, kept {ratio:.2f} of it, {speed:.0f} positions/s, head {share:.0%}"


def kept_by_forward(made: Trainer, positions: int, row: int) -> int:
    """Bytes that a forward pass keeps for the backward pass; 0 on a CPU."""
    [microbatch] = made._microbatches(random_batch(positions // row, row, row).rows)
    before = torch.cuda.memory_allocated()
    logprobs, _ = made.policy(microbatch)
    kept = torch.cuda.memory_allocated() - before
    logprobs.sum().backward()
    made.optimizer.zero_grad()
    return kept


def step_after_a_load(model: str, saved: str) -> None:
    """11, under a launcher: a step, and the same step after a load of what was saved before it, must leave the same
    weights."""
    made, batch, found = new_trainer(model, "--dtype bfloat16"), random_batch(8, 12, 40), []
    made.gradients(batch)
    made.update(0)
    made.accelerator.save_state(saved)
    for _ in range(2):
        made.gradients(batch)
        made.update(1)
        found.append([tensor.clone() for _, tensor in full_tensors(made.model, torch.float32)])
        checkpoints.load(made.accelerator, Path(saved))
    loaded = [tensor for _, tensor in full_tensors(made.model, torch.float32)]
    assert not all(map(torch.equal, found[0], loaded)), "the load did not bring the weights back"
    assert all(map(torch.equal, *found)), "the step after a load is another than the step before it"


if __name__ == "__main__":
    step_after_a_load(*sys.argv[1:])
