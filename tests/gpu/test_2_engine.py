"""New weights in a real engine while it samples, by the machine's fastest channel."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import ROOT, TINY, Check, Lacks, new_trainer, random_qwen3
from torch import Tensor

pytestmark = pytest.mark.gpu


@dataclass
class Sides:
    """Trainer and generator with the same tiny bfloat16 Qwen3. The completions of two long prompts are under way."""

    trainer: Any
    generator: Any
    long: list
    short: list

    def push(self, version: int) -> float:
        """Sends the trainer's weights; returns the seconds that the engine was paused."""
        paused = self.generator.counters.sync_seconds
        self.generator.push(self.trainer.weights, version, release=0)
        self.generator.settle()
        return self.generator.counters.sync_seconds - paused

    def sample(self) -> tuple[list, list]:
        """Two completions of each short prompt at the live version, as rows and as rollouts."""
        from runtime.model import Row

        groups = self.generator.result_of(self.generator.evaluate(self.short, 2))
        pairs = [(problem, rollout) for problem, group in zip(self.short, groups, strict=True) for rollout in group]
        return [Row(p.prompt_ids, r.completion_ids, r.mask) for p, r in pairs], [r for _, r in pairs]

    def gap(self, rows: list, rollouts: list) -> float:
        """Mean difference of log-probs to the trainer as it is now, in nats per token."""
        from runtime.evaluation import logprob_gap, logprob_gaps

        gaps = logprob_gaps(self.trainer.score(rows), [r.logprobs for r in rollouts], rows)
        return logprob_gap(gaps, mixture_of_experts=False)


@contextmanager
def both_sides(check: Check, tied: bool, longest: int, flags: str = "") -> Iterator[Sides]:
    """They are made as train.py makes them. The long completions have `longest` tokens, the short ones 16."""
    from runtime.devices import new_channel

    from runtime.parts import new_generator
    from runtime.run_folder import Progress
    from tasks.prompts import Problem

    model = random_qwen3(check.folder / "model", TINY | {"tie_word_embeddings": tied})
    if "--engine_args" not in flags:
        flags += check.size(""" --engine_args '{"gpu_memory_utilization": 0.15}'""", "")
    given = "--dtype bfloat16 --batch_prompts 2 --rollouts 1 --k 0 --max_num_seqs 32"
    trainer, draw = new_trainer(model, f"{given} {flags}"), random.Random(0)
    problems = [Problem(str(i), tuple(draw.randrange(2, 512) for _ in range(10)), "") for i in range(8)]
    long, short = problems[:2], problems[2:]
    task = SimpleNamespace(train=long, held_out=short, stop_ids=[], score=lambda _, texts: [(0.0, False)] * len(texts))
    control = SimpleNamespace(  # in the place of length control
        max_budget=16, max_completion=longest, draw_budget=lambda _: longest, second_leg=lambda *_: None
    )
    channel, devices = new_channel(trainer.flags, trainer.accelerator)
    generator = new_generator(trainer.flags, model, task, iter(long), channel, devices, control, Progress(draw))
    try:
        generator.start(trainer.weights)
        yield Sides(trainer, generator, long, short)
    finally:
        generator.close()


@torch.no_grad()
def new_weights(trainer: Any, version: int) -> None:
    """Gives the trainer random weights, the same for a version, whole nats from the last."""
    rng = torch.Generator().manual_seed(version)
    for parameter in trainer.model.parameters():
        values = torch.randn(parameter.shape, generator=rng) * 0.1 + (parameter.ndim == 1)  # norms around 1
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # FSDP2 on one process: all of it
        local.copy_(values.bfloat16())


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """A copy of the trainer's weights as the engine gets them, in FP32 and not on the GPU."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in trainer.weights.items()}


def updates_in_flight(check: Check, tied: bool, count: int, flags: str = "") -> None:
    """`count` updates while two long completions run: every token has the log-prob that its version's weights give it.
    What is sampled after an update has those of the new weights and not of other ones; for what was sampled across
    updates see `border_gaps`."""
    gaps, others, seconds, used = [], [], [], []
    with both_sides(check, tied, check.size(8000, 700), flags) as sides:
        weights, before = {0: weights_of(sides.trainer)}, None
        for version in range(1, count + 1):
            new_weights(sides.trainer, version)
            weights[version] = weights_of(sides.trainer)
            others += [sides.gap(*before)] if before else []  # of completions that these weights did not sample
            seconds.append(sides.push(version))
            before = sides.sample()
            gaps.append(sides.gap(*before))
            check.require(f"only version {version}", all({*r.versions} == {version} for r in before[1]))
            if not check.cpu:
                free, total = torch.cuda.mem_get_info()
                used.append((torch.cuda.memory_reserved(), total - free))
        long = [group.rollouts[0] for group in sides.generator.take(len(sides.long))]
        for rollout in long:
            rising = rollout.versions == sorted(rollout.versions)
            check.require("versions rise", rising and len({*rollout.versions}) > count // 2)
        exact, later, earlier = border_gaps(sides, weights, long)
    check.figure("largest gap under the new weights, nats", max(gaps), below=2e-2)
    check.figure("smallest gap under other weights, nats", min(others), above=0.1)
    check.figure("gap beside the borders of versions, nats", exact, below=0.1)
    check.figure("the same if borders were a token off, nats", min(later, earlier), above=0.1)
    check.figure("longest update after the first, s", max(seconds[1:]), below=check.size(1.0, 60.0))
    for place, sizes in zip(("trainer", "GPU"), zip(*used[-5:], strict=True), strict=False):
        grown = (max(sizes) - min(sizes)) / 2**20
        check.figure(f"memory of the {place} over the last five updates, MiB", grown, below=64)


def border_gaps(sides: Sides, weights: dict[int, dict[str, Tensor]], long: list) -> list[float]:
    """Mean |log-prob of transformers - the engine's| of the tokens beside an update: as their versions say, and with
    all versions one token later or earlier."""
    from stale_cache import stale_cache_logprobs
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(sides.generator.engine.model, dtype=torch.float32)
    oracle.to(sides.trainer.accelerator.device)
    found: list[list[Tensor]] = [[], [], []]
    for problem, rollout in zip(sides.long, long, strict=True):
        v = rollout.versions
        beside = sorted({t for first in range(1, len(v)) if v[first] != v[first - 1] for t in (first - 1, first)})
        for gaps, versions in zip(found, (v, v[:1] + v[:-1], v[1:] + v[-1:]), strict=True):
            logprobs = stale_cache_logprobs(oracle, weights, problem.prompt_ids, rollout.completion_ids, versions)
            gaps.append((logprobs - torch.tensor(rollout.logprobs)).abs()[beside])
    return [torch.cat(gaps).mean().item() for gaps in found]


@pytest.mark.parametrize("case", ["tied", "untied", "vLLM's own scheduler"])
def test_weights_in_flight(check: Check, case: str) -> None:
    """With a tied head and an untied one, and with vLLM's own scheduler, which a GPU has by default."""
    flags = """--engine_args '{"scheduler_cls": null}'""" if case.startswith("vLLM") else ""
    updates_in_flight(check, case != "untied", 10, flags)


def test_checksums(check: Check) -> None:
    """The engine's own digests of its weights: of five versions by the channel, and of the same five by file."""
    from runtime.weights import FileWeights

    with closing(FileWeights()) as by_file, both_sides(check, True, 16) as sides:
        first, second, ask = [], [], sides.generator.ask
        for version in range(1, 6):
            new_weights(sides.trainer, version)
            sides.push(version)
            first += ask(lambda engine: engine.weight_digests())  # of the one worker: name -> digest
        for version in range(1, 6):
            new_weights(sides.trainer, version)
            by_file.prepare(sides.trainer.weights)
            ask(lambda engine: by_file.deliver(engine.vllm))
            second += ask(lambda engine: engine.weight_digests())
    # On a CPU the engine multiplies with repacked copies of linear layers; the weights beside them stay the first ones.
    weights = [name for name in first[0] if name.endswith("weight") and not (check.cpu and "proj" in name)]
    check.figure("weights with a digest", len(weights), above=0)
    for version, (a, b) in enumerate(zip(first, second, strict=True), start=1):
        check.require(f"version {version}: equal, name by name", a == b)
    for version, (a, b) in enumerate(pairwise(first), start=2):
        check.require(f"version {version}: every weight is new", all(a[name] != b[name] for name in weights))


# ---------------------------------------------------------------------------------------------------------- several GPUs


def engines_elsewhere(case: str, count: int) -> str:
    """The flags for an engine on the second of `count` GPUs, or for one on two of them."""
    if case != "tensor parallel":
        return "--generator_devices 1"
    return f"--tensor_parallel 2 --generator_devices {'1,2' if count > 2 else '0,1 --weight_channel file'}"


@pytest.mark.parametrize("case", ["tied", "untied", "tensor parallel"])
def test_weights_reach_another_gpu(check: Check, case: str) -> None:
    """By `nccl`; an engine on two GPUs has them by file if there are no more. The dry run has two processes for the one
    engine, and for the other cases vLLM's own `nccl` classes over what the tests have in the place of GPUs."""
    if not check.cpu:
        if torch.cuda.device_count() < 2:
            raise Lacks("it needs two GPUs")
        flags = engines_elsewhere(case, torch.cuda.device_count())
    elif case == "tied":
        raise Lacks("the stand-ins for GPUs leave a tied head behind, as vLLM's CPU build does")
    elif case == "untied":
        flags = stand_ins()
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or each of the two wants a NUMA node of its own
        flags = "--tensor_parallel 2"
    updates_in_flight(check, case != "untied", 5, flags)


def stand_ins() -> str:
    """Puts the stand-ins for GPUs in their places; the flags for that. (In bfloat16 vLLM's CPU build would use AMX, which
    Linux allows only where a weight file is loaded.)"""
    sys.path.append(str(ROOT / "tests" / "engine"))
    import transfers_on_cpu

    from runtime import devices

    devices.torch = transfers_on_cpu.Torch()
    receiver = '{"worker_extension_cls": "transfers_on_cpu.Receiver"}'
    return f"--dtype float32 --generator_devices 1 --engine_args '{receiver}'"


def test_ray(check: Check) -> None:
    """An engine that Ray places: Ray has the second GPU alone, and the trainer the first."""
    if check.cpu or torch.cuda.device_count() < 2 or not find_spec("ray"):
        raise Lacks("it needs two GPUs and Ray (requirements-ray.txt)")
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-gpus=1", "--port=6390"]
    subprocess.run([*ray, "--node-ip-address=127.0.0.1"], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, check=True)
    os.environ |= {"RAY_ADDRESS": "127.0.0.1:6390", "VLLM_HOST_IP": "127.0.0.1"}
    updates_in_flight(check, True, 5, RAY)


RAY = '--engine_args \'{"distributed_executor_backend": "ray"}\' --weight_channel nccl'
