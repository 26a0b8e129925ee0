"""Program of test_fp32_head_properties.py, one of several ranks: gradients of one batch through a wrapped `Scorer`, to a file.

RANK=0 WORLD_SIZE=2 python tests/deep/scorer_worker.py STORE OUT"""

import os
import sys
from types import SimpleNamespace

import torch
from torch import Tensor, nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from fp32_head import Scorer
from losses import aggregation_weights, cispo

V, H, START = 13, 8, 3
ROWS = [[0], [1, 2, 3]]  # of each rank: shares of unequal size, from the middle of a group


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, H), nn.Linear(H, H)

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert use_cache is False  # keys and values of a whole batch, which nobody reads
        mixed = self.layer(self.embedding(input_ids)).tanh().cumsum(1)  # causal: a token sees those before it
        return SimpleNamespace(last_hidden_state=mixed)


class Model(nn.Module):
    """What a `Scorer` asks of a Hugging Face model, with a tied head and a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base_model, self.lm_head = Body(), nn.Linear(H, V)
        self.lm_head.weight = self.base_model.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def batch() -> tuple[Tensor, ...]:
    """(input_ids (4, 9), behaviour (4, 6), advantages (4,), mask (4, 6), weights (4, 6)), the same in every process."""
    rng = torch.Generator().manual_seed(1)
    input_ids = torch.randint(V, (4, 9), generator=rng)
    behaviour, advantages = -3 * torch.rand(4, 9 - START, generator=rng), torch.tensor([1.0, -1.0, 0.5, -0.5])
    mask = (torch.arange(9 - START) < torch.tensor([[6], [2], [1], [4]])).float()
    return input_ids, behaviour, advantages, mask, aggregation_weights(mask, torch.tensor([0, 0, 1, 1]))


def loss_of(logprobs: Tensor, rows: list[int]) -> Tensor:
    """The share of these rows in the step's loss."""
    _, behaviour, advantages, mask, token_weights = batch()
    token_loss, _ = cispo(logprobs, behaviour[rows], advantages[rows], mask[rows])
    return (token_weights[rows] * token_loss).sum()


def main(store: str, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    gradients = {}
    for name, factor in (("ddp", ranks), ("fsdp2", ranks), ("ddp without the factor", 1)):
        model = Model()
        scorer = Scorer(model)
        if name == "fsdp2":
            fully_shard(model.base_model.layer, mesh=mesh)
            fully_shard(scorer, mesh=mesh)
        else:
            scorer = DistributedDataParallel(scorer)
        logprobs, _ = scorer(batch()[0][ROWS[rank]], START)
        (loss_of(logprobs, ROWS[rank]) * factor).backward()
        whole = {n: p.grad.full_tensor() if name == "fsdp2" else p.grad for n, p in model.named_parameters()}
        gradients |= {(name, n): grad for n, grad in whole.items()}
    if rank == 0:
        torch.save(gradients, out)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort the process when the interpreter takes them down


if __name__ == "__main__":
    main(*sys.argv[1:])
