"""Program of test_distributed.py: trains on recorded rollouts, alone, under DDP (accelerate) or FSDP2 (torch's own
fully_shard on a CPU mesh, since accelerate offers FSDP on accelerators only), and saves the full weights.

    python tests/distributed_worker.py MODEL OUT MODE ROWS

MODE is `plain`, `fsdp2` (with gradient checkpointing) or `memory`: then OUT gets the bytes that a forward pass in
bfloat16 under FSDP2 adds to the process by the end of the body.
"""

import gc
import os
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from scripted import batch_of

import pipeline_rl
from runtime.flags import parse_flags
from runtime.model import Row
from runtime.trainer import Trainer

STEPS = 5


class Sharding:
    """What Trainer asks of accelerate, with torch's FSDP2 behind it."""

    def __init__(self):
        torch.distributed.init_process_group("gloo")
        self.process_index, self.num_processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device, self.is_main_process = torch.device("cpu"), self.process_index == 0

    def prepare(self, policy, optimizer):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.num_processes,))
        for layer in policy.model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(policy.parameters())  # the sharded ones
        return policy, optimizer

    def unwrap_model(self, model):
        return model

    def no_sync(self, model):
        return nullcontext()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, most):
        return torch.nn.utils.clip_grad_norm_(parameters, most)

    def reduce(self, tensor):
        torch.distributed.all_reduce(tensor)
        return tensor


def recorded(step, rows):
    """Groups of very different lengths; the same in every process."""
    draw = random.Random(f"step {step}")
    groups = []
    for number in range(rows // 2):
        problem = SimpleNamespace(prompt_ids=[draw.randrange(40) for _ in range(draw.randint(2, 9))], key=str(number))
        rollouts = []
        for correct in (True, False):
            n = draw.choice([2, 3, 40])
            ids, logprobs = [draw.randrange(40) for _ in range(n)], [draw.uniform(-4.5, -3.0) for _ in range(n)]
            reward = 1.0 if correct else -1.0
            rollouts.append(pipeline_rl.Rollout(ids, logprobs, [0] * n, [1] * n, "stop", False, 0, reward, correct))
        groups.append(pipeline_rl.Group(number, problem, 0, rollouts))
    return groups


def anonymous_bytes():
    """Memory of this process that is no file's, as the kernel counts it."""
    return 1024 * int(re.search(r"Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])


def body_memory(trainer):
    """Bytes that a forward pass adds by the end of the body: the second one's, as the first one fills FSDP's buffers."""
    marks = []
    trainer.model.base_model.norm.register_forward_hook(lambda *_: marks.append(anonymous_bytes()))
    [microbatch] = trainer._microbatches([Row([1, 2], [3, 4], [1, 1])])
    for _ in range(2):
        gc.collect()
        before = anonymous_bytes()
        trainer.policy(microbatch)[0].sum().backward()
        trainer.optimizer.zero_grad()
    return marks[-1] - before


def main(model, out, mode, rows):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    argv = ["--model", model, "--lr", "0.01", "--tokens_per_microbatch", "64"]
    argv += ["--kl_coef", "0.1"] if mode != "memory" else ["--dtype", "bfloat16"]
    argv += ["--gradient_checkpointing", "true"] if mode != "plain" else []
    flags = parse_flags(argv, "")
    if mode == "fsdp2":
        import accelerate.utils

        accelerator = Sharding()
        gather = [None] * accelerator.num_processes

        def gather_object(value):
            torch.distributed.all_gather_object(gather, value)
            return [item for part in gather for item in part]

        accelerate.utils.gather_object = gather_object
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    trainer = Trainer(flags, accelerator, model)
    if mode == "memory":
        grown = torch.tensor(body_memory(trainer))
        if accelerator.is_main_process:
            save_file({"grown": grown}, out)
        torch.distributed.barrier()
        os._exit(0)
    for step in range(STEPS):
        with TemporaryDirectory() as folder:
            batch, _ = batch_of(recorded(step, int(rows)), folder)
        metrics = trainer.gradients(batch)
        before = trainer.score(batch.rows)  # as the log-prob check does, between gradient and update
        metrics |= trainer.update(step)
        scores = trainer.score(batch.rows)
        assert step == 0 or not torch.equal(before, scores)
    weights = dict(trainer.weights.items())
    if accelerator.is_main_process:
        save_file(weights | {"scores": scores, "loss": torch.tensor([metrics["loss"], metrics["grad_norm"]])}, out)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads sometimes abort the process when the interpreter takes them down


if __name__ == "__main__":
    main(*sys.argv[1:])
