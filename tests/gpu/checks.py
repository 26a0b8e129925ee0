"""What the checks of this folder share: figures with bounds, a random model, a trainer, a batch, a run of train.py."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "SCALERL_GPU_CHECK"  # an environment variable, which all processes of a check have
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}


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

    def figures(self) -> list[dict[str, Any]]:
        """What was found so far."""
        file = self.folder / "figures.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _write(self, record: dict[str, Any]) -> None:
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


def qwen3_06b() -> dict[str, Any]:
    """The shape of Qwen3-0.6B."""
    from plan import QWEN3, SHAPES

    return QWEN3 | SHAPES["Qwen/Qwen3-0.6B"]


def random_qwen3(folder: Path, shape: dict[str, Any], ends: bool = False) -> str:
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


def best_of(count: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest call of so many; a GPU is waited for."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


# ---------------------------------------------------------------------------------------------------- a run of train.py


class Run:
    """A run of train.py in the folder CHECK/NAME; the current folder is CHECK. Of equal flags the last wins."""

    def __init__(self, check: Check, name: str, flags: str, processes: int = 0, resume: bool = False):
        self.folder = check.folder / name
        place = ["--resume" if resume else "--output_dir", str(self.folder)]
        command = [*launcher(check, processes), str(ROOT / "train.py"), *shlex.split(flags), *place]
        print(shlex.join(command), flush=True)
        local = {"GLOO_SOCKET_IFNAME": "lo"} if check.cpu else {}
        self.process = subprocess.Popen(command, cwd=check.folder, env=os.environ | local)

    def end(self, code: int = 0) -> None:
        """Waits for its end. Raises RuntimeError for another exit code."""
        if self.process.wait() != code:
            raise RuntimeError(f"train.py ended with {self.process.returncode}, not {code}")

    def steps(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The records of steps, or of evaluations, so far."""
        from runtime.run_folder import Folder

        return [record for record in Folder(self.folder).read(name) if "step" in record]

    def wait_for_step(self, step: int) -> None:
        """Returns when this step is recorded. Raises RuntimeError if the run ends before."""
        while not any(record["step"] >= step for record in self.steps()):
            if self.process.poll() is not None:
                raise RuntimeError(f"train.py ended with {self.process.returncode} before step {step}")
            time.sleep(0.01)

    def gaps(self) -> list[float]:
        """Differences of log-probs between trainer and engine, in nats per token."""
        return [record["logprob_gap"] for record in self.steps() if "logprob_gap" in record]


def launcher(check: Check, processes: int) -> list[str]:
    """The words before a script: for `processes` of it under FSDP2, or for one without a launcher (0). The dry run has
    torch's launcher, since accelerate's offers FSDP2 to GPUs only."""
    if processes == 0:
        return [sys.executable]
    if check.cpu:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    configured = ["--config_file", str(ROOT / "configs" / "fsdp2.yaml"), "--num_processes", str(processes)]
    return [sys.executable, "-m", "accelerate.commands.launch", *configured]


SHORT = """--pass_rate_threshold 2 --batch_prompts 16 --rollouts 8 --min_budget 192 --max_budget 256 --answer_budget 32
    --max_steps 5 --eval_every 5 --held_out 32 --eval_problems 32 --save_every 2 --probe_every 1"""
DRY = "--batch_prompts 4 --rollouts 4 --min_budget 8 --max_budget 12 --answer_budget 4 --eval_problems 8"
REWARD = "import random\ndef coin(*_):\n    return random.random() < 0.5\n"  # so that a random model has a gradient


def real_model(check: Check) -> str:
    """The flags of docs/gpu.md's command for one GPU, shortened, with prompts made here. The model is --model, or a
    random one of its shape with the built-in task's words."""
    from tasks import arithmetic

    rows = [{"question": f"{a} {b} {c}", "answer": a} for a in "0123456789" for b in "0123456789" for c in "01234"]
    (check.folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (check.folder / "reward.py").write_text(REWARD)
    model = check.model or random_qwen3(check.folder / "model", check.size(qwen3_06b(), TINY), ends=True)
    phrase = "" if check.model else f"--interruption_phrase '{' '.join(arithmetic.PHRASE)}'"
    [command] = re.findall(r"python train\.py (--model Qwen/.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.S)[:1]
    data = f"--model {shlex.quote(model)} --dataset problems.jsonl --reward reward:coin {phrase}"
    return " ".join([command.replace("\\\n", ""), data, SHORT, check.size("", DRY)])


def as_it_should(check: Check, run: Run) -> None:
    """Bounds on a run of `real_model`, which ends now, and its speed."""
    run.end()
    steps = run.steps()
    check.figure("largest gap, nats", max(run.gaps()), below=2e-2)
    for record in steps:
        if record["lag_max"] == 0 and "ratio_mean" in record:
            check.figure(f"step {record['step']}: mean rho at lag 0", record["ratio_mean"], above=0.98, below=1.02)
    check.require("two updates or more", sum(record.get("updated", 0) for record in steps) >= 2)
    stall = max(record["sync_seconds"] for record in steps)
    check.figure("longest stall for new weights, s", stall, below=check.size(1.0, 60.0))
    wall = sum(record["seconds"] for record in steps)
    busy = wall - sum(record["trainer_idle"] for record in steps)
    check.figure("sampled tokens/s", steps[-1]["tokens"] / wall)
    check.figure("trained tokens/s while it trains", steps[-1]["trained_tokens_total"] / busy)
    check.figure("generator idle, share", sum(record["generator_idle"] for record in steps) / wall)
