"""FP32 head: log-probs of the sampled tokens, the same in trainer and generator, in little memory.

PROBLEM. The importance ratio rho = pi_train / pi_gen should be 1 when both sides have the same weights. But bfloat16
keeps 8 significant bits: near 20 its steps are 0.125, so a logit is off by up to 0.06, and two programs that round in
different places disagree on log-probs by as much. Memory is a problem, too: M tokens have M x V logits, which is 2.5 GB
for 4,096 tokens and a vocabulary of 152k, and autograd keeps several such tensors.

IDEA. ScaleRL (arXiv 2510.13786, section 3.2, after MiniMax-M1, arXiv 2506.13585) computes the head, the product of
hidden states and vocabulary matrix, in FP32 on BOTH sides. Its asymptotic pass rate rose from 0.52 to 0.61. On one side
only, it helps partly at best. With hidden states h, head W and its bias:
    z = (W h + bias) / temperature                   logits (V,), an FP32 product (`softcap` bends W h + bias)
    log p_j = z_j - log sum_i exp z_i                FP32 log-softmax
    logprob = log p_target,   entropy = -sum_j p_j log p_j        target: the sampled token

GENERATOR. vLLM stores the head in the model's dtype, say bfloat16. Its option `head_dtype`, which `GENERATOR_ARGS`
sets, changes only the product: bfloat16 factors, an FP32 sum. A trainer often keeps its head in FP32 (the master
copy: bfloat16 would round small updates away), and vLLM rounds those weights to bfloat16. So the trainer must compute
with `rounded(master, torch.bfloat16)`. Seven things must be equal on both sides:
    `token_logprobs` sees to    1 the FP32 product, 2 the FP32 log-softmax
    `Scorer` sees to            3 rounded W, 4 rounded h (by `dtype`), 5 bias, 6 which position predicts which token
    the caller sees to          7 the temperature; neither top-k nor top-p

SYMBOLS. M tokens, H hidden size, V vocabulary size; h hidden state, W head, z logits, p probability.

SIMPLIFIED. Each device holds the whole head. A scale on the logits (Granite) goes into `temperature`.

A MODEL THAT IS NOT HUGGING FACE'S, here with rows for padding in its head and a soft cap on its logits:
    inputs = collections.deque(maxlen=1)  # the last ones: where the model samples, too, it would grow
    model.lm_head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))  # (N, L, H)
    model(ids)  # computes its own logits, too
    logprobs, entropy = token_logprobs(inputs.pop()[:, :-1], model.lm_head.weight[:V], ids[:, 1:], softcap=15.0)
    logits = F.linear(hidden.float(), head.float())  # your own sampler's, outside autocast, on a copy without the hook

How far the trainer's log-probs are from the engine's, in nats per token:

>>> _ = torch.manual_seed(0)
>>> hidden, master, targets = torch.randn(64, 256).bfloat16(), torch.randn(1000, 256) * 0.3, torch.arange(64)
>>> coarse = rounded(master, torch.bfloat16)
>>> engine_logprobs = F.linear(hidden.float(), coarse).log_softmax(-1)[range(64), targets]
>>> for name, weight, fp32 in [("rounded", coarse, True), ("master", master, True), ("rounded", coarse, False)]:
...     logprobs, entropy = token_logprobs(hidden, weight, targets, fp32=fp32)
...     print(f"{name:7} head, FP32 product {fp32!s:5}  {(logprobs - engine_logprobs).abs().mean():.3f}")
rounded head, FP32 product True   0.000
master  head, FP32 product True   0.008
rounded head, FP32 product False  0.015

QUESTION. Why does `rounded` return a sum of three terms, and not simply the rounded weight? (lab/experiments.md)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

# What vLLM's AsyncEngineArgs needs so that its logits are the FP32 product too; leave it out for a bfloat16 head.
GENERATOR_ARGS = {"hf_overrides": {"head_dtype": "float32"}}  # an old vLLM ignores it: compare log-probs
# Size of one (chunk, V) buffer if the caller names none: on a CPU at V = 152k, chunks of 110 took 20 % longer than 220.
CHUNK_BYTES = 112 * 2**20
CHUNK_BYTES_GPU = 512 * 2**20  # on an H200: 149 ms with 112 MiB, 82 with 512, 79 with 1024 (8,192 positions)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` with its values rounded to `dtype`, as a generator stores them; its own dtype and shape stay. The
    gradient passes straight through, since that of rounding is 0 almost everywhere."""
    if weight.dtype == dtype:
        return weight
    # w + sg(round(w) - w): exact, as numbers within a factor of 2 subtract without rounding. w.to(dtype).to(w.dtype)
    # would round the gradient as well.
    return weight + (weight.to(dtype).to(weight.dtype) - weight).detach()


def token_logprobs(
    hidden: Tensor,  # (M, H) or (N, T, H) last hidden states, any float dtype
    weight: Tensor,  # (V, H) head; the embedding if they are tied; of a padded vocabulary the rows that are tokens
    targets: Tensor,  # (M,) or (N, T) int64 ids
    *,
    temperature: float = 1.0,  # the generator's, or rho is not 1 between equal weights
    bias: Tensor | None = None,  # (V,)
    softcap: float | None = None,  # cap * tanh(z / cap) for logits z before the temperature (Gemma 2, nanochat)
    chunk_tokens: int | None = None,  # None fills `CHUNK_BYTES`
    entropy_grad: bool = False,  # let the entropy carry a gradient; otherwise it is a monitor
    fp32: bool = True,  # False computes the product in the dtype of `hidden`, for the ablation (H1)
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token, entropy of its distribution: these lines (and `softcap`) without (M, V) tensors.
        log_p = (F.linear(hidden.float(), weight.float(), bias) / temperature).log_softmax(-1)  # (M, V)
        logprobs = log_p.gather(1, targets[:, None]).squeeze(1)  # (M,)
        entropy = -(log_p.exp() * log_p).sum(-1)  # (M,)

    `targets[i]` FOLLOWS position i: the caller has shifted by one. Padding needs an id below V: mask it later.

    Returns (logprobs, entropy), both shaped as `targets`, in nats, FP32, or FP64 if `hidden` or `weight` is. Gradients
    reach hidden, weight (summed over the chunks in FP32, cast once at the end) and bias. An active autocast is
    overruled. Memory: two or three buffers of (chunk, V), two more for a soft cap, and on a CPU an FP32 copy of a
    bfloat16 head. Raises ValueError for shapes that do not agree, `temperature` <= 0, `chunk_tokens` < 1.
    """
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden must be (M, H), weight (V, H), got {tuple(hidden.shape)} and {tuple(weight.shape)}.")
    if targets.shape != hidden.shape[:-1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"targets are {tuple(hidden.shape[:-1])}, bias ({len(weight)},); got {tuple(targets.shape)}.")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}.")
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    if chunk_tokens is None:
        chunk_tokens = max(1, (CHUNK_BYTES_GPU if weight.is_cuda else CHUNK_BYTES) // (len(weight) * dtype.itemsize))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    options = _Options(temperature, softcap, chunk_tokens, entropy_grad, dtype, dtype if fp32 else hidden.dtype)
    logprobs, entropy = _TokenLogprobs.apply(hidden.flatten(0, -2), weight, bias, targets.flatten(), options)
    return logprobs.view_as(targets), entropy.view_as(targets)


def head_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight (V, H), bias (V,) or None) of a Hugging Face causal LM's head, the embedding's weight if they are tied.
    Raises TypeError for a head under a PEFT adapter such as LoRA: its `weight` leaves the adapter out.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer"):  # what PEFT calls the layer that its adapter wraps
        name = type(head).__name__
        raise TypeError(f"the head is a {name}, which hides an adapter; keep it out of target_modules, or merge it.")
    return head.weight, getattr(head, "bias", None)


class Scorer(nn.Module):
    """A Hugging Face causal LM that returns log-probs: the module to wrap in DDP or FSDP, and to call.

        scorer = DDP(Scorer(model))  # or fully_shard(scorer), or accelerator.prepare(scorer)

    DDP and FSDP prepare to reduce gradients in the forward of the module that they wrap. If `token_logprobs` is called
    on parts of `ddp.module` instead, each rank silently keeps its own gradient. DeepSpeed should take a
    `Scorer` as its model, too (not tried here); under ZeRO-3 the head's weight is an external parameter to register.

    Args:
        model: has `base_model`, which returns hidden states, and `get_output_embeddings()`. For a PEFT model pass
            `model.get_base_model()`.
        dtype: the generator's, if it is not the model's.
        options: keywords of `token_logprobs`, such as temperature.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, **options: Any):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.options = options

    def forward(
        self, input_ids: Tensor, start: int = 1, chosen: Tensor | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy), each (N, L - start), of the tokens from position `start` >= 1 of `input_ids` (N, L).

        With `chosen` (M,), indices of tokens counted row by row, each is (M,): no other token costs a product with the
        head. `inputs` go to the body: attention_mask, position_ids. Errors: of `head_of` and `token_logprobs`.
        """
        hidden, targets = self.hidden_states(input_ids, start, **inputs), input_ids[:, start:]  # (N, L - start, H)
        if chosen is not None:
            hidden, targets = hidden.flatten(0, 1)[chosen], targets.flatten()[chosen]  # (M, H), (M,)
        weight, bias = head_of(self.model)
        if self.dtype is not None:
            hidden, weight = hidden.to(self.dtype), rounded(weight, self.dtype)
            bias = None if bias is None else rounded(bias, self.dtype)
        return token_logprobs(hidden, weight, targets, bias=bias, **self.options)

    def hidden_states(self, input_ids: Tensor, start: int, **inputs: Tensor) -> Tensor:
        """(N, L - start, H): those that predict the tokens from position `start` on."""
        body = self.model.base_model(input_ids=input_ids, use_cache=False, **inputs)
        return body.last_hidden_state[:, start - 1 : -1]  # position t - 1 predicts token t


# The concept ends here. -------------------------------------------------------------------- the same in little memory
# Chunks go through one or two (chunk, V) buffers, and the backward pass computes the logits again: 2.6 times as fast
# as `torch.utils.checkpoint` on each chunk (CPU, 2,048 tokens, V = 50,000). A buffer has one name and is
# overwritten in place; the comments say what it holds after each line.
#
# The three derivatives, with the incoming gradients g of a log-prob and g_entropy of an entropy:
#
#     d logprob / d z_j = [j = target] - p_j           dz_j = g ([j = target] - p_j) - g_entropy p_j (log p_j + entropy)
#     d entropy / d z_j = -p_j (log p_j + entropy)
#     z = (W h + bias) / temperature                   dh = dz W, dW = dz.t() h, d bias = sum dz, each / temperature


class _Options(NamedTuple):
    temperature: float
    softcap: float | None
    chunk_tokens: int
    entropy_grad: bool
    dtype: torch.dtype  # of log-softmax, results and gradient sums
    product_dtype: torch.dtype  # of the forward product: `dtype`, or the model's own for the ablation

    def buffer(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """(chunk, V), uninitialized; all chunks use it in turn."""
        return hidden.new_empty(min(self.chunk_tokens, len(hidden)), len(weight), dtype=self.dtype)

    def chunks(self, hidden: Tensor) -> list[slice]:
        return [slice(start, start + self.chunk_tokens) for start in range(0, len(hidden), self.chunk_tokens)]


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, options: _Options, buffer: Tensor) -> Tensor:
    """z = (W h + bias) / temperature of a chunk, (chunk, V), written into the buffer; `softcap` bends W h + bias."""
    z = buffer[: len(hidden)]  # (chunk, V), fewer rows in the last chunk
    if options.product_dtype != options.dtype:  # H1: the product that the FP32 head replaces
        bias = None if bias is None else bias.to(head.dtype)
        z.copy_(F.linear(hidden.to(head.dtype), head, bias))
    else:
        # Autocast would silently cast `hidden @ head.t()` back to bfloat16. It leaves alone what has an out=.
        fp32_product(hidden, head.t(), out=z)
        if bias is not None:
            z.add_(bias)
    if options.softcap:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.temperature != 1.0:
        z.div_(options.temperature)  # the generator's log-probs have it
    return z


@contextmanager
def _exact() -> Iterator[None]:
    """No TF32 inside, and no bfloat16 on a CPU, whatever `torch.set_float32_matmul_precision` allows elsewhere."""
    cuda = torch.backends.cuda.matmul
    cpu = torch.backends.mkldnn.matmul
    before = cuda.fp32_precision, cpu.fp32_precision
    cuda.fp32_precision = cpu.fp32_precision = "ieee"
    try:
        yield
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    @_exact()
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=options.dtype)  # (M,)
        entropy = torch.empty_like(logprobs)  # (M,)
        logsumexp = torch.empty_like(logprobs)  # (M,)
        head = _head_in(options.product_dtype, hidden, weight)  # (V, H)
        first, second = options.buffer(hidden, weight), options.buffer(hidden, weight)  # (chunk, V) each
        for rows in options.chunks(hidden):
            z = _logits(hidden[rows], head, bias, options, first)  # (chunk, V)
            top = z.amax(-1, keepdim=True)  # (chunk, 1)
            z.sub_(top)  # z - top: at most 0, so that exp cannot overflow
            # Not torch.log_softmax: its CPU kernel adds the V terms in a few long running sums, which costs 1e-5 in
            # FP32 at V = 152k; sum() adds in a tree.
            e = torch.exp(z, out=second[: len(z)])  # (chunk, V)
            total = e.sum(-1)  # (chunk,)
            # log p_target = (z_target - top) - log sum_i exp(z_i - top)
            logprobs[rows] = z.gather(1, targets[rows, None]).squeeze(1) - total.log()
            # entropy = -sum_j p_j log p_j = log total - sum_j e_j (z_j - top) / total, not a mean over samples
            e.mul_(z)  # e_j (z_j - top)
            entropy[rows] = total.log() - e.sum(-1) / total
            logsumexp[rows] = top.squeeze(1) + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, logsumexp)
        ctx.options = options
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    @_exact()
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, logsumexp = ctx.saved_tensors
        options: _Options = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=options.dtype) if needs_hidden else None  # (M, H)
        grad_weight = torch.zeros_like(weight, dtype=options.dtype) if needs_weight else None  # (V, H), the one sum
        grad_bias = torch.zeros_like(bias, dtype=options.dtype) if needs_bias else None  # (V,)
        head = _head_in(options.dtype, hidden, weight)  # (V, H); one FP32 copy of the head, not two
        forward_head = head if head.dtype == options.product_dtype else _head_in(options.product_dtype, hidden, weight)
        first = options.buffer(hidden, weight)  # (chunk, V)
        second = options.buffer(hidden, weight) if options.entropy_grad else None  # (chunk, V)
        for rows in options.chunks(hidden):
            dz = _logits(hidden[rows], forward_head, bias, options, first).sub_(logsumexp[rows, None])  # log p
            if options.softcap:  # the slope of cap * tanh(x / cap) is 1 - tanh^2
                tanh = (dz + logsumexp[rows, None]).mul_(options.temperature / options.softcap)  # (chunk, V)
            # Divided here: for a chunk's incoming gradients, not for its outgoing ones, V times as many
            g = (grad_logprobs[rows] / options.temperature).unsqueeze(1)  # (chunk, 1)
            if second is None:
                dz.exp_().mul_(-g)  # -g p
            else:
                p = torch.exp(dz, out=second[: len(dz)])  # (chunk, V)
                g_entropy = (grad_entropy[rows] / options.temperature).unsqueeze(1)  # (chunk, 1)
                dz.add_(entropy[rows, None]).mul_(g_entropy)  # g_entropy (log p + entropy)
                dz.add_(g).mul_(p).neg_()  # -p (g + g_entropy (log p + entropy))
            dz.scatter_add_(1, targets[rows, None], g)  # and + g [j = target]
            if options.softcap:
                dz.mul_(1 - tanh.square_())
            if grad_bias is not None:
                grad_bias.add_(dz.sum(0))
            for factor in _bfloat16_parts(dz) if on_tensor_cores(hidden, weight) else [dz]:
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], factor, head)
                if grad_weight is not None:
                    _add_product(grad_weight, factor.t(), hidden[rows].to(head.dtype))
        sums = [(hidden, grad_hidden), (weight, grad_weight), (bias, grad_bias)]
        # Cast once, at the end. Targets and options have no gradient.
        return *(None if grad is None else grad.to(x.dtype) for x, grad in sums), None, None


# --------------------------------------------------------------------------------------- which product has which dtypes
# The product of two bfloat16 numbers is exact in FP32, and a GPU's tensor cores add such products in FP32. So there a
# bfloat16 model's FP32 head costs no copy. dz is no bfloat16 number, but nearly the sum of two. (In float64 all is.)
#
#     factors -> sum            h and W in bfloat16, on a GPU         else
#     W h                       bfloat16 -> FP32                      FP32 -> FP32
#     dz W, dz.t() h            bfloat16 -> FP32, for two parts       FP32 -> FP32
#     W h with fp32=False       that of h -> that of h (H1)           likewise


def on_tensor_cores(a: Tensor, b: Tensor) -> bool:
    """Whether a GPU multiplies these factors as they are."""
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16


def fp32_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix product a b in FP32, or in the dtype of `out`."""
    if on_tensor_cores(a, b):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    dtype = torch.float32 if out is None else out.dtype
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b."""
    if on_tensor_cores(a, b):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a, b)


def _head_in(dtype: torch.dtype, hidden: Tensor, weight: Tensor) -> Tensor:
    """The head (V, H) as a product in `dtype` takes it: a copy only if it is stored in another, and not on a GPU."""
    return weight if dtype == torch.float32 and on_tensor_cores(hidden, weight) else weight.to(dtype)


def _bfloat16_parts(dz: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum is `dz` to 16 bits; `dz` is used up."""
    high = dz.bfloat16()
    return high, dz.sub_(high).bfloat16()


if __name__ == "__main__":  # show the worked example, and check it
    import doctest

    print(__doc__[__doc__.index("How far") :])
    raise SystemExit(doctest.testmod().failed)
