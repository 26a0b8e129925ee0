"""What the checks of this folder share: figures with bounds, their processes, a random model, a trainer, a batch."""

import json
import os
import random
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "SCALERL_GPU_CHECK"  # an environment variable, which all processes of a check have
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1, "tie_word_embeddings": True}


class Lacks(Exception):
    """This machine lacks what the check needs: it is skipped, and the message says why."""


@dataclass
class Check:
    """A check's settings, and the file for what it finds, line by line: a check that dies keeps what it had."""

    folder: Path
    cpu: bool  # the dry run
    model: str  # folder or hub id; empty: a random one

    def size(self, gpu: Any, cpu: Any) -> Any:
        """The first on a GPU, the second in the dry run."""
        return cpu if self.cpu else gpu

    def figure(self, name: str, value: float, *, above: float | None = None, below: float | None = None) -> float:
        """A measured value with its bounds, which it must keep for the check to pass (NaN keeps none). Returns it."""
        bounds = {"above": above, "below": below}
        bound = " and ".join(f"{word} {limit:g}" for word, limit in bounds.items() if limit is not None)
        met = (above is None or value > above) and (below is None or value < below)
        self._write({"name": name, "value": value, "bound": bound, "met": bool(met)})
        return value

    def require(self, name: str, value: object) -> None:
        """What must be true for the check to pass."""
        self._write({"name": name, "value": bool(value), "bound": "true", "met": bool(value)})

    def figures(self) -> list[dict]:
        """What was found so far."""
        file = self.folder / "figures.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _write(self, record: dict) -> None:
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def gpus() -> list[str]:
    """Name and driver of each GPU, as nvidia-smi says them; none without it, or if they are hidden. No CUDA context is
    made: it would stay on the GPU through all checks."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(query, text=True).strip().splitlines()
    return []


def marked() -> list[int]:
    """The other processes with the mark of this check, its children's children among them."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ends just now, or is another user's
            if mark in file.read_bytes().split(b"\0"):  # empty of a process that has ended
                found.append(int(file.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def none_left(seconds: float) -> bool:
    """Waits until no process has the mark, but not longer than this; returns whether that came."""
    end = time.monotonic() + seconds
    while marked() and time.monotonic() < end:
        time.sleep(0.1)
    return not marked()


# ------------------------------------------------------------------------------------------------------- the two sides


def qwen3_06b() -> dict:
    """The shape of Qwen3-0.6B."""
    from plan import QWEN3, SHAPES

    return QWEN3 | SHAPES["Qwen/Qwen3-0.6B"]


def random_qwen3(folder: Path, shape: dict, ends: bool = False) -> str:
    """Folder of a Qwen3 with random weights. With `ends` it has the built-in task's tokenizer and end token; else vLLM
    would stop there, whatever the request says."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tasks import arithmetic

    torch.manual_seed(0)
    end = arithmetic.IDS["<eos>"] if ends else None
    config = Qwen3Config(**shape, eos_token_id=end, pad_token_id=end, bos_token_id=None)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    if ends:
        arithmetic.word_tokenizer().save_pretrained(folder)
    return str(folder)


def new_trainer(model: str, flags: str) -> Any:
    """As train.py makes it."""
    from runtime.flags import parse_flags
    from runtime.parts import new_accelerator
    from runtime.trainer import Trainer

    parsed = parse_flags(["--model", model, "--warmup_steps", "0", *shlex.split(flags)], "")
    return Trainer(parsed, new_accelerator(parsed), model)


def random_batch(count: int, shortest: int, longest: int) -> Any:
    """Rows of random tokens, from `shortest` to `longest` with their prompt of 8; every second one is rewarded."""
    from runtime.model import Row
    from runtime.trainer import TrainingBatch

    rng, rows = random.Random(0), []
    for _ in range(count):
        ids = [rng.randrange(2, 40) for _ in range(rng.randint(shortest, longest))]
        rows.append(Row(ids[:8], ids[8:], [1] * len(ids[8:])))
    masks = [torch.ones(len(row.mask), dtype=torch.bool) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)  # (N, T)
    advantages = torch.tensor([1.0, -1.0]).repeat(count)[:count]  # (N,)
    return TrainingBatch(rows, torch.full(mask.shape, -3.5), mask, advantages, mask / mask.sum())
