"""The trainer's model: log-probs of sampled completions, in microbatches that waste little and change nothing.

It joins a Hugging Face causal LM to the concept files. What it must get right:

- Position t predicts token t + 1, so a completion's log-probs are read from the positions before its tokens.
- Rows are sorted by length and cut into microbatches of at most `tokens` positions, padding counted. The weight of each
  token in the loss is fixed over the whole batch (`losses.aggregation_weights`), so no cut changes the gradient.
- Every rank gets the same number of microbatches. A rank with no rows left runs an empty one forward and backward, or
  FSDP would wait for it forever.
- The head is multiplied as the generator multiplies it (`fp32_head`): in the dtype of both sides, an FP32 product.

A microbatch has lines, padded on the right, of one of two layouts, which differ in time and memory only:

- A line for each row. Under causal attention no real token sees padding, so no attention mask is needed.
- `shared`: a line for each prompt. Its completions follow it, each at the positions that it would have alone, and a
  mask lets each see the prompt and itself.

Symbols: N rows (rollouts), T completion positions, R lines of L positions, M tokens that train, H hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp32_head import head_of, token_logprobs
from runtime.weights import Meta

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass
class Microbatch:
    """The input of one forward pass."""

    rows: list[int]  # N, which rows of the batch the (N, T) outputs belong to; no tensor, so that no device is asked
    input_ids: Tensor  # (R, L)
    position_ids: Tensor  # (R, L)
    sees: Tensor | None  # (R, L, L), of shared rows: whether a position (second axis) sees another of its line
    read: Tensor  # (M,) index into the R * L positions: the one before each token that trains
    write: Tensor  # (M,) index into the N * T places of the output
    targets: Tensor  # (M,) ids of the tokens that train
    width: int  # T

    def to(self, device: torch.device) -> Microbatch:
        """A copy on `device`."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items()})


@dataclass
class Row:
    """One rollout as the trainer reads it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]  # 1 on completion tokens that train

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def share_rows(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Row indices of each rank: longest first, dealt back and forth, so that all ranks get about as many tokens."""
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, row in enumerate(longest_first):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(row)
    return shares


def cut_rows(batch: Sequence[Row], rows: Sequence[int], tokens: float, shared: bool) -> list[list[int]]:
    """`rows`, those of the longest lines first, cut into lists of at most `tokens` positions, padding counted; a longer
    row gets a list of its own. Shared rows with equal prompts stand side by side."""
    line: Counter[tuple[int, ...]] = Counter()  # prompt -> positions of its completions
    for row in rows if shared else ():
        line[tuple(batch[row].prompt_ids)] += len(batch[row].completion_ids)

    def order(row: int) -> tuple[int, tuple[int, ...], int]:
        prompt = tuple(batch[row].prompt_ids) if shared else ()
        return -line[prompt] - len(prompt), prompt, -len(batch[row])

    pieces: list[list[int]] = []
    lines = longest = last = 0  # of the last piece; `last`: the length of its last line
    for row in sorted(rows, key=order):
        follows = shared and pieces and batch[pieces[-1][-1]].prompt_ids == batch[row].prompt_ids
        lines += not follows
        last = last + len(batch[row].completion_ids) if follows else len(batch[row])
        longest = max(longest, last)
        if not pieces or lines * longest > tokens:
            pieces.append([])
            lines, longest, last = 1, len(batch[row]), len(batch[row])
        pieces[-1].append(row)
    return pieces


def cut_batch(batch: Sequence[Row], tokens: float, ranks: int, shared: bool) -> list[list[list[int]]]:
    """The rows of each microbatch of each rank."""
    return [cut_rows(batch, share, tokens, shared) for share in share_rows([len(row) for row in batch], ranks)]


def forwarded(rows: Sequence[Row], share_prompts: bool, tokens: float, ranks: int) -> int:
    """Positions of a forward pass of these rows on all ranks, without padding. A shared prompt counts once in each
    microbatch, for it is computed there."""
    if not share_prompts:
        return sum(map(len, rows))
    pieces = [piece for mine in cut_batch(rows, tokens, ranks, True) for piece in mine]
    prompts = [prompt for piece in pieces for prompt in {tuple(rows[i].prompt_ids) for i in piece}]
    return sum(len(row.completion_ids) for row in rows) + sum(map(len, prompts))


def make_microbatch(batch: Sequence[Row], rows: Sequence[int], width: int, shared: bool = False) -> Microbatch:
    """The microbatch of these rows of the batch; without rows, an empty one that still runs forward and backward.
    Shared rows that follow each other and have the same prompt stand in one line."""
    lines = [list(line) for _, line in groupby(rows, lambda i: tuple(batch[i].prompt_ids) if shared else i)]
    longest = max((len(batch[i]) + sum(len(batch[j].completion_ids) for j in more) for i, *more in lines), default=1)
    ids: list[int] = []  # of all R x L positions, one line after the other
    positions: list[int] = []  # likewise
    owner: list[int] = []  # likewise: the row whose completion it is; -1 in a prompt, -2 in padding
    read: list[int] = []  # (M,), as in `Microbatch`
    write: list[int] = []
    targets: list[int] = []
    place = 0  # of a row's first token among the N * T
    for line in lines:
        start, prompt = len(ids), batch[line[0]].prompt_ids
        ids += prompt
        positions += range(len(prompt))
        owner += [-1] * len(prompt)
        for i in line:
            completion, mask = batch[i].completion_ids, batch[i].mask
            # Position t - 1 predicts token t. The end of the prompt predicts the first token of each completion.
            predicts = [start + len(prompt) - 1, *range(len(ids), len(ids) + len(completion) - 1)]
            read += compress(predicts, mask)
            write += compress(range(place, place + len(completion)), mask)
            targets += compress(completion, mask)
            ids += completion
            positions += range(len(prompt), len(batch[i]))
            owner += [i] * len(completion)
            place += width
        padding = start + longest - len(ids)
        ids += [0] * padding
        positions += range(positions[-1] + 1, positions[-1] + 1 + padding)  # it counts on
        owner += [-2] * padding
    if not rows:
        ids, positions, owner = [0], [0], [-1]
    input_ids, position_ids, owners = (torch.tensor(x).view(-1, longest) for x in (ids, positions, owner))
    where, to, wanted = (torch.tensor(x, dtype=torch.long) for x in (read, write, targets))
    sees = who_sees_whom(owners) if shared else None
    return Microbatch(list(rows), input_ids, position_ids, sees, where, to, wanted, width)


def who_sees_whom(owner: Tensor) -> Tensor:
    """(R, L, L) bool of shared rows: whether a position (second axis) sees another, one before it in the prompt or in
    its own completion. owner (R, L): the row whose completion it is; -1 in a prompt, -2 in padding."""
    return ((owner[:, None] == -1) | (owner[:, None] == owner[:, :, None])).tril()


def microbatches(
    batch: Sequence[Row], tokens: int, *, rank: int = 0, ranks: int = 1, shared: bool = False
) -> list[Microbatch]:
    """This rank's microbatches of the batch. All ranks get equally many, and their outputs (N, T) have one width T."""
    width = max((len(row.completion_ids) for row in batch), default=1)
    cuts = cut_batch(batch, tokens, ranks, shared)
    count = max(1, *(len(cut) for cut in cuts))
    mine = cuts[rank] + [[]] * (count - len(cuts[rank]))
    return [make_microbatch(batch, rows, width, shared) for rows in mine]


class Policy(nn.Module):
    """A causal LM that returns the log-probs of the tokens that train, computed in the dtype of its parameters: that of
    the generator, if the two are to agree. fp32_head: False multiplies the head in the parameters' dtype, for the
    ablation. temperature, entropy_grad: of `fp32_head.token_logprobs`."""

    def __init__(
        self, model: PreTrainedModel, *, fp32_head: bool = True, temperature: float = 1.0, entropy_grad: bool = False
    ):
        super().__init__()
        self.model = model
        # FSDP shards layer by layer. A model may also name layers that it does not have.
        names = getattr(model, "_no_split_modules", None) or ()
        self._no_split_modules = sorted({type(module).__name__ for module in model.modules()} & set(names))
        self._head = partial(token_logprobs, temperature=temperature, fp32=fp32_head, entropy_grad=entropy_grad)

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(log-probs (N, T), entropy (N, T)), both 0 where no token trains."""
        mask, sees = None, microbatch.sees
        if sees is not None:  # (R, 1, L, L), what attention adds to its scores, which transformers takes as it is
            dtype = self.model.get_input_embeddings().weight.dtype
            mask = torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)[:, None]
        hidden = self.model.base_model(
            input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state  # (R, L, H)
        hidden = hidden.flatten(0, 1)[microbatch.read]  # (M, H)
        weight, bias = head_of(self.model)  # (V, H), (V,)
        n = len(microbatch.rows)
        logprobs, entropy = (
            # The sum * 0 ties an empty microbatch to the parameters, so that its backward pass runs.
            x.new_zeros(n * microbatch.width).scatter(0, microbatch.write, x).view(n, microbatch.width)
            + hidden.sum() * 0
            for x in self._head(hidden, weight, microbatch.targets, bias=bias)  # (M,) each
        )
        return logprobs, entropy  # (N, T)


def recompute_layers(model: nn.Module) -> int:
    """Gradient checkpointing: each layer keeps only its input and runs again in the backward pass. Returns the number
    of layers, 0 if transformers knows none of this model. (`model.gradient_checkpointing_enable` recomputes in training
    mode only, which switches dropout on.)"""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor or shard) of each parameter as the model without LoRA adapters (lora.py) has it: an adapter is
    merged, W + alpha / r · B A. Shards are multiplied as such, so every rank must iterate."""
    for name, parameter in model.named_parameters():
        layer, wrapped, kind = name.partition(".base_layer.")  # peft's name for what an adapter wraps
        if wrapped and kind == "weight":
            parameter = parameter + model.get_submodule(layer).get_delta_weight("default")
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def whole(tensor: Any) -> Tensor:
    """The tensor, gathered from all ranks if it is a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in `dtype`) of each parameter, adapters merged, one at a time. Gathering a shard is a collective,
    so every rank must iterate. A tied head appears once, under the embedding's name."""
    for name, parameter in merged_parameters(model):
        yield name, whole(parameter.to(dtype))  # rounded before shards travel


class CheckpointTensors:
    """The parameters as a Hugging Face checkpoint stores them, gathered one at a time: what a generator loads. The two
    differ for a mixture: transformers holds the experts of a layer in one tensor, checkpoints hold them apart."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        # name of a parameter -> the tensors, without data, that a checkpoint has for it
        self._stored = {name: self._as_stored(name, x.to("meta")) for name, x in merged_parameters(model)}

    def _as_stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, {name: tensor})

    def metadata(self) -> list[Meta]:
        """Names, dtypes and shapes, in the order of `items()`; nothing is gathered."""
        return [Meta(n, self.dtype, tuple(x.shape)) for stored in self._stored.values() for n, x in stored.items()]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gathered tensor); every rank must iterate."""
        for name, tensor in full_tensors(self.model, self.dtype):
            unchanged = list(self._stored[name]) == [name]
            yield from [(name, tensor)] if unchanged else self._as_stored(name, tensor).items()


def experts(config: PretrainedConfig) -> int:
    """Experts of a layer; 1 if the model is no mixture."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((x for x in (getattr(config, name, None) for name in names) if x), 1)


def active_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token is multiplied with: without the embedding table, which is looked up, but with the head,
    tied or not, and with only as many experts of a mixture as a token visits."""
    visited = getattr(model.config, "num_experts_per_tok", None) or 1
    (head, _), embedding = head_of(model), model.get_input_embeddings().weight
    total = head.numel() if head is embedding else 0
    for name, parameter in model.named_parameters():
        if parameter is not embedding and ".lora_" not in name:  # the generator has adapters merged
            total += parameter.numel() * visited // experts(model.config) if ".experts." in name else parameter.numel()
    return total
