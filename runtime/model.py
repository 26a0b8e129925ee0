"""The trainer's model: log-probs of sampled completions, in microbatches that waste little and change nothing.

It joins a Hugging Face causal LM to the concept files. What it must get right:

- Position t predicts token t + 1, so a completion's log-probs are read from the positions before its tokens.
- Rows are sorted by length and cut into microbatches of at most `tokens` positions, padding counted. The weight of each
  token in the loss is fixed over the whole batch (`losses.aggregation_weights`), so no cut changes the gradient.
- Padding is on the right. Under causal attention no real token sees it, so no attention mask is needed. Packed rows put
  the sequences of a microbatch end to end; position ids that restart at 0 keep attention inside each sequence. Models
  whose layers do not read them are refused (`keeps_rows_apart`).
- Shared rows are packed, and rows that begin with the same prompt have it once: its completions follow it, each at the
  positions that it would have alone, and a mask lets each see the prompt and itself. Nothing but the time differs.
- Every rank gets the same number of microbatches. A rank with no rows left runs an empty one forward and backward, or
  FSDP would wait for it forever.
- The head is multiplied as the generator multiplies it (`fp32_head`): in the dtype of both sides, an FP32 product.

Symbols: N rows (rollouts), T completion positions, R x L input positions, M tokens that train, H hidden size, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp32_head import head_of, token_logprobs
from runtime.weights import Meta

# What transformers and torch raise for a folder that is no model: cut short, of other shapes, a pickle with code in it.
UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, EOFError, ImportError, UnpicklingError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


@dataclass
class Microbatch:
    """The input of one forward pass."""

    rows: list[int]  # N, which rows of the batch the (N, T) outputs belong to; no tensor, so that no device is asked
    input_ids: Tensor  # (R, L): R = N if padded, R = 1 if packed
    position_ids: Tensor  # (R, L)
    sees: Tensor | None  # (L, L), of shared rows: whether a position (first axis) sees another
    read: Tensor  # (M,) index into the R * L positions: the one before each token that trains
    write: Tensor  # (M,) index into the N * T places of the output
    targets: Tensor  # (M,) ids of the tokens that train
    width: int  # T

    def to(self, device: torch.device) -> Microbatch:
        """A copy on `device`."""
        tensors: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors)


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


Layout = Literal["padded", "packed", "shared"]


def forwarded(rows: Sequence[Row], share_prompts: bool = False, tokens: float = math.inf, ranks: int = 1) -> int:
    """Positions of a forward pass of these rows on all ranks, without padding. A shared prompt counts once in each
    microbatch, for it is computed there."""
    if not share_prompts:
        return sum(map(len, rows))
    pieces = [piece for mine in cut_batch(rows, tokens, ranks, "shared") for piece in mine]
    prompts = [prompt for piece in pieces for prompt in {tuple(rows[i].prompt_ids) for i in piece}]
    return sum(len(row.completion_ids) for row in rows) + sum(map(len, prompts))


def cut_rows(lengths: Sequence[int], rows: Sequence[int], tokens: float, packed: bool) -> list[list[int]]:
    """`rows`, longest first, cut into lists of at most `tokens` positions each; a longer row gets a list of its own."""
    pieces: list[list[int]] = []
    used = 0  # positions in the last piece
    for row in sorted(rows, key=lambda i: -lengths[i]):
        cost = lengths[row] if packed or not pieces else lengths[pieces[-1][0]]  # padded: the longest row's length
        if not pieces or used + cost > tokens:
            pieces.append([])
            used, cost = 0, lengths[row]
        pieces[-1].append(row)
        used += cost
    return pieces


def cut_shared(batch: Sequence[Row], rows: Sequence[int], tokens: float) -> list[list[int]]:
    """`rows` with equal prompts side by side, cut into lists of at most `tokens` positions each, in which a prompt
    counts once; a row that is longer gets a list of its own."""
    pieces: list[list[int]] = []
    used = 0  # positions in the last piece
    for row in sorted(rows, key=lambda i: (tuple(batch[i].prompt_ids), -len(batch[i]))):
        known = pieces and batch[pieces[-1][-1]].prompt_ids == batch[row].prompt_ids
        cost = len(batch[row].completion_ids) if known else len(batch[row])
        if not pieces or used + cost > tokens:
            pieces.append([])
            used, cost = 0, len(batch[row])
        pieces[-1].append(row)
        used += cost
    return pieces


def make_microbatch(batch: Sequence[Row], rows: Sequence[int], width: int, layout: Layout = "padded") -> Microbatch:
    """The microbatch of these rows of the batch; without rows, an empty one that still runs forward and backward."""
    if layout == "shared":
        return make_shared(batch, rows, width)
    packed = layout == "packed"
    chosen = [batch[i] for i in rows]
    ids = torch.tensor([token for row in chosen for token in (*row.prompt_ids, *row.completion_ids)], dtype=torch.long)
    trained = torch.tensor([m for row in chosen for m in (*[0] * len(row.prompt_ids), *row.mask)], dtype=torch.bool)
    lengths = torch.tensor([len(row) for row in chosen], dtype=torch.long)  # (N,)
    prompt_lengths = torch.tensor([len(row.prompt_ids) for row in chosen], dtype=torch.long)  # (N,)
    n = torch.arange(len(chosen)).repeat_interleave(lengths)  # the row of each token
    t = torch.arange(len(ids)) - (lengths.cumsum(0) - lengths)[n]  # its position in the row
    longest = max((len(row) for row in chosen), default=1)
    shape = (1, max(len(ids), 1)) if packed else (max(len(chosen), 1), longest)
    place = torch.arange(len(ids)) if packed else n * longest + t
    input_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)  # (R, L)
    if not packed:
        position_ids += torch.arange(longest)  # padding counts on
    input_ids.view(-1)[place], position_ids.view(-1)[place] = ids, t
    read = (place - 1)[trained]  # position t - 1 predicts token t
    write = (n * width + t - prompt_lengths[n])[trained]
    return Microbatch(list(rows), input_ids, position_ids, None, read, write, ids[trained], width)


def make_shared(batch: Sequence[Row], rows: Sequence[int], width: int) -> Microbatch:
    """A microbatch in which neighbors with equal prompts share one; so prompt, completion, completion, prompt, ..."""
    ids: list[int] = []
    positions: list[int] = []
    families, members = [], []  # of each position: where its prompt starts, and which completion it is in, -1 if none
    read, write, prompt, start = [], [], None, 0
    for n, row in enumerate(batch[i] for i in rows):
        length = len(row.prompt_ids)
        if row.prompt_ids != prompt:
            prompt, start = row.prompt_ids, len(ids)
            ids += prompt
            positions += range(length)
            families += [start] * length
            members += [-1] * length
        for t, trains in enumerate(row.mask):
            if trains:  # the end of the prompt predicts the first token of each of its completions
                read.append(len(ids) + t - 1 if t else start + length - 1)
                write.append(n * width + t)
        ids += row.completion_ids
        positions += range(length, len(row))
        families += [start] * len(row.completion_ids)
        members += [n] * len(row.completion_ids)
    targets = [batch[i].completion_ids[t] for i in rows for t, trains in enumerate(batch[i].mask) if trains]
    if not rows:
        ids, positions, families, members = [0], [0], [0], [-1]
    family, member = torch.tensor(families), torch.tensor(members)
    sees = (family[:, None] == family) & ((member == -1) | (member[:, None] == member))
    sees &= torch.ones_like(sees).tril()
    where, to, wanted = (torch.tensor(x, dtype=torch.long) for x in (read, write, targets))
    return Microbatch(list(rows), torch.tensor([ids]), torch.tensor([positions]), sees, where, to, wanted, width)


def cut_batch(batch: Sequence[Row], tokens: float, ranks: int, layout: Layout) -> list[list[list[int]]]:
    """The rows of each microbatch of each rank."""
    lengths = [len(row) for row in batch]
    return [
        cut_shared(batch, share, tokens) if layout == "shared" else cut_rows(lengths, share, tokens, layout == "packed")
        for share in share_rows(lengths, ranks)
    ]


def microbatches(
    batch: Sequence[Row], tokens: int, *, rank: int = 0, ranks: int = 1, layout: Layout = "padded"
) -> list[Microbatch]:
    """This rank's microbatches of the batch. All ranks get equally many, and their outputs (N, T) have one width T."""
    width = max((len(row.completion_ids) for row in batch), default=1)
    cuts = cut_batch(batch, tokens, ranks, layout)
    count = max(1, *(len(cut) for cut in cuts))
    mine = cuts[rank] + [[]] * (count - len(cuts[rank]))
    return [make_microbatch(batch, rows, width, layout) for rows in mine]


class Policy(nn.Module):
    """A causal LM that returns the log-probs of the tokens that train, computed in the dtype of its parameters: that of
    the generator, if the two are to agree.

    Args:
        model: any Hugging Face causal LM with a body that returns hidden states and an output embedding.
        fp32_head: False multiplies the head in the parameters' dtype, for the ablation.
        temperature, entropy_grad: of `fp32_head.token_logprobs`.
    """

    def __init__(
        self, model: PreTrainedModel, *, fp32_head: bool = True, temperature: float = 1.0, entropy_grad: bool = False
    ):
        super().__init__()
        self.model = model
        # FSDP shards layer by layer. A model may also name layers that it does not have.
        names = getattr(model, "_no_split_modules", None) or ()
        self._no_split_modules = sorted({type(module).__name__ for module in model.modules()} & set(names))
        self._head_options: dict[str, Any] = {
            "temperature": temperature, "fp32": fp32_head, "entropy_grad": entropy_grad,
        }  # fmt: skip

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(log-probs (N, T), entropy (N, T)), both 0 where no token trains."""
        mask = None
        if microbatch.sees is not None:  # what attention adds to its scores; transformers takes (R, 1, L, L) as it is
            dtype = self.model.get_input_embeddings().weight.dtype
            mask = torch.zeros_like(microbatch.sees, dtype=dtype).masked_fill(~microbatch.sees, torch.finfo(dtype).min)
            mask = mask[None, None]
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
            for x in token_logprobs(hidden, weight, microbatch.targets, bias=bias, **self._head_options)  # (M,) each
        )
        return logprobs, entropy  # (N, T)


def recompute_layers(model: nn.Module) -> int:
    """Gradient checkpointing: each layer keeps only its input and runs again in the backward pass. Returns the number
    of layers, 0 if transformers knows none of this model.

    `model.gradient_checkpointing_enable` does not serve: its layers recompute in training mode only, and that switches
    the dropout of some models on (OPT's layers drop by a flag of their own).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Flash attention does not run on a CPU."""
    attention = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    yield
    model.config._attn_implementation = attention


@torch.no_grad()
def keeps_rows_apart(model: PreTrainedModel, layout: Layout) -> bool:
    """Whether three short rows have the log-probs in one microbatch of that layout that each has alone, up to rounding.
    Layers that do not read position ids see what lies before (Mamba, convolutions) or count on (OPT)."""
    rows = [
        Row([1, 2, 3], [4, 5, 6, 7], [1] * 4),
        Row([1, 2, 3], [8, 9, 7, 6], [1] * 4),
        Row([9], [3, 1, 2, 5], [1] * 4),
    ]
    with eager_attention(model):
        alone, together = (
            torch.cat([Policy(model)(make_microbatch(rows, cut, 4, layout))[0] for cut in cuts])
            for cuts in ([[0], [1], [2]], [[0, 1, 2]])
        )
    return torch.allclose(together, alone, rtol=0, atol=5e-5 * float(alone.std()))


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are W h + b of the body's last hidden states, as `Policy` computes them. Granite,
    Cohere and Gemma 2 scale or cap theirs. Takes two forward passes of four tokens on the CPU, before any sharding."""
    body, head, ids = model.base_model, model.get_output_embeddings(), torch.arange(4)[None]
    if body is model or head is None:
        return False
    with eager_attention(model):
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state  # (1, 4, H)
        logits = model(input_ids=ids, use_cache=False).logits  # (1, 4, V)
    plain = nn.functional.linear(hidden, head.weight, head.bias)
    return logits.shape == plain.shape and torch.allclose(logits, plain, rtol=1e-5, atol=1e-5 * float(plain.std()))


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
    """The parameters as a Hugging Face checkpoint stores them, gathered one at a time: what a generator loads.

    The two differ for a mixture: transformers holds the experts of a layer in one tensor, checkpoints hold them apart.
    """

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


def attention_kinds(config: Any) -> list[str]:
    """The attention of each layer, in transformers' words."""
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return list(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])


def experts(config: Any) -> int:
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
