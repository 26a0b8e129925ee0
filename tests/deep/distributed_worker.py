"""Program of test_trainer_processes.py, in one or several trainer processes.

    python tests/deep/distributed_worker.py job FLAGS               train.py with these flags
    python tests/deep/distributed_worker.py steps OUT ROWS FLAGS    five steps on recorded rollouts, a checkpoint, one more

`accelerate launch --config_file configs/fsdp2.yaml` makes it run accelerate's own FSDP2, for which accelerate wants
accelerators: it takes this CPU for one, and gloo is in the place of nccl.
"""

import os
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

STEPS = 5


def take_this_cpu_for_an_accelerator():
    """What accelerate asks of its surroundings before it shards a model."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    torch.distributed.init_process_group("gloo")


def job(*argv):
    """Exit code of train.py."""
    import train

    return train.main(argv)


def new_trainer(argv):
    from runtime.flags import parse_flags
    from runtime.parts import new_accelerator
    from runtime.trainer import Trainer

    flags = parse_flags(argv, "")
    accelerator = new_accelerator(flags)
    return Trainer(flags, accelerator, flags.model), accelerator


def recorded(step, rows):
    """A batch of two rollouts a prompt, one right and one wrong, of very different lengths; the same in every process.
    Prompts are so long that rows share them."""
    from losses import aggregation_weights
    from runtime.microbatches import TokenRow, lay_out
    from runtime.trainer import TrainingBatch

    draw = random.Random(f"step {step}")
    prompts = [[draw.randrange(40) for _ in range(draw.randint(20, 29))] for _ in range(rows // 2)]
    lengths = [draw.choice([2, 3, 20]) for _ in range(rows)]
    batch = [TokenRow(prompts[i // 2], [draw.randrange(40) for _ in range(n)], [1] * n) for i, n in enumerate(lengths)]
    logprobs = [torch.tensor([draw.uniform(-4.5, -3.0) for _ in range(n)]) for n in lengths]
    assert rows == 2 or lay_out(batch, 64, share=True)[0]
    mask = pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
    weights = aggregation_weights(mask, torch.arange(rows) // 2)
    advantages = torch.tensor([1.0, -1.0]).repeat(rows // 2)
    return TrainingBatch(batch, pad_sequence(logprobs, batch_first=True), mask, advantages, weights)


def steps(out, rows, *argv):
    """Writes the weights after STEPS steps, and scores, loss and norm of the last one. Then a checkpoint is loaded:
    it has these weights, and the next step from it is the same, bit for bit."""
    trainer, accelerator = new_trainer(argv)
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", 1))
    sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    assert sharded == bool(os.environ.get("ACCELERATE_USE_FSDP"))

    def weights():
        return {name: tensor.clone() for name, tensor in trainer.weights.items()}

    def equal(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    def step(number):
        batch = recorded(number, int(rows))
        _, metrics = trainer.backward(batch)
        before = trainer.score(batch.rows)  # as the log-prob check does, between gradient and update
        metrics |= trainer.update(number)
        scores = trainer.score(batch.rows)
        assert number == 0 or not torch.equal(before, scores)
        return {"scores": scores, "loss": torch.tensor([metrics["loss"], metrics["grad_norm"]])}

    for number in range(STEPS):
        last = step(number)
    trained = weights()
    accelerator.save_state(f"{out}-checkpoint")
    accelerator.wait_for_everyone()
    step(STEPS)
    further = weights()
    accelerator.load_state(f"{out}-checkpoint")
    assert equal(weights(), trained) and not equal(trained, further)
    step(STEPS)
    assert equal(weights(), further)
    if accelerator.is_main_process:
        save_file(trained | last, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP"):
        take_this_cpu_for_an_accelerator()
    mode, *rest = sys.argv[1:]
    code = {"job": job, "steps": steps}[mode](*rest)
    if mode == "job":
        sys.exit(code)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the process when the interpreter takes them down
