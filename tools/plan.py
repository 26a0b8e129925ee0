"""Does it fit: a card and the arguments of train.py, before any GPU is at hand.

    python tools/plan.py --card_gb 24 --model Qwen/Qwen3-0.6B --dtype bfloat16 --tokens_per_microbatch 8192 ...
    python tools/plan.py --card_gb 80 --gpus 8 --trainers 4 --data_parallel 4 --model Qwen/Qwen3-8B ...

The trainer's side is counted, not guessed: the real policy runs forward and backward under FSDP2 on tensors that have a
shape and no data, and torch counts the bytes that live at the peak. (On one process in float32 the trainer does without
FSDP2 and needs less.) The engine's side is arithmetic:

    budget of an engine = its share of the card = weights + keys and values + work + CUDA

A GB is 1e9 bytes here, and cards are sold in GiB: the 7 % between them are left to the allocator's gaps.

SOURCES. torch/distributed/_tools/fsdp2_mem_tracker.py; the shares of runtime/devices.py; CUDA's contexts and the work
of an engine are estimates.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import above_zero, new_parser, positive, table
from runtime.devices import RECEIVING, SHARED, engine_options, generator_devices

from runtime.flag_checks import check_flags
from runtime.flags import BUILT_IN, Flags, UsageError, parse_flags
from runtime.model import Policy, Row, make_microbatch, recompute_layers
from runtime.weights import BUFFER

# What the config.json of each has on huggingface.co (April 2025).
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
OF_A_SIZE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
Config = Any  # of transformers
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": dict(zip(OF_A_SIZE, (1024, 3072, 28, 16, True), strict=True)),
    "Qwen/Qwen3-8B": dict(zip(OF_A_SIZE, (4096, 12288, 36, 32, False), strict=True)),
}
PHRASE = 32  # tokens of the interruption's phrase, at most
CUDA = 0.5e9  # bytes of a process's CUDA context, estimated


# ---------------------------------------------------------------------------------------------------------- does it fit


def config_of(model: str) -> Config:
    """The configuration of a model: a folder or hub id, or one of SHAPES, which needs no network. Raises OSError or
    ValueError if there is none."""
    from transformers import AutoConfig, Qwen3Config

    return Qwen3Config(**QWEN3, **SHAPES[model]) if model in SHAPES else AutoConfig.from_pretrained(model)


def on_meta(config: Config) -> Any:
    """The model without any memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def sizes(config: Config) -> list[int]:
    """Numbers in each parameter."""
    return [parameter.numel() for parameter in on_meta(config).parameters()]


@contextmanager
def without_data(ranks: int) -> Iterator:
    """Tensors have no data, and `ranks` processes are pretended, of which this is the first; gives their mesh."""
    import torch.distributed as dist
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    packed = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda *_: None  # it would read data
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()
        transformers.masking_utils.find_packed_sequence_indices = packed


def sharded(policy: Policy, dtype: torch.dtype, mesh: Any) -> Policy:
    """The policy as accelerate hands it to the trainer: layer by layer under FSDP2, in `dtype` over FP32 weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in list(policy.modules()):
        if type(module).__name__ in (policy._no_split_modules or ()):
            fully_shard(module, mesh=mesh, mp_policy=mixed)
    return fully_shard(policy, mesh=mesh, mp_policy=mixed)


def by_kind(tracker: Any, moment: str = "current") -> dict[str, int]:
    """Bytes of each kind of tensor, now or at the peak, the sum left out."""
    (kinds,) = tracker.get_tracker_snapshot(moment).values()
    return {kind.value: size for kind, size in kinds.items() if kind != "Total"}


def in_transit(largest: int, shared: bool) -> int:
    """Bytes of an update's parts on either side: one by `ipc`; three by `nccl`, of which one has the largest tensor."""
    return max(largest, BUFFER) + (0 if shared else 2 * BUFFER)


def trainer_bytes(config: Config, flags: Flags, ranks: int, shared: bool) -> dict[str, float]:
    """What lives on a trainer's GPU at the peak of a microbatch that is not the step's first, by kind."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from transformers import AutoModelForCausalLM

    n, dtype = max(flags.tokens_per_microbatch, longest_row(flags)), getattr(torch, flags.dtype)
    model, parameters = on_meta(config), sizes(config)
    states = sum(parameter.numel() * (16 if parameter.requires_grad else 4) for parameter in model.parameters())
    microbatch = make_microbatch([Row([0], [0] * (n - 1), [1] * (n - 1))], [0], n - 1)
    with without_data(ranks) as mesh:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if flags.gradient_checkpointing:
            recompute_layers(model)
        policy = sharded(Policy(model, fp32_head=flags.fp32_head), dtype, mesh)
        with FSDPMemTracker(policy) as tracker:
            for parameter in policy.parameters():  # as after the step's first microbatch
                parameter.grad = torch.zeros_like(parameter)
            gradients = by_kind(tracker)["Activation"]  # torch does not know better what these are
            logprobs, _ = policy(microbatch)
            kept = by_kind(tracker)["Activation"] - gradients
            logprobs.sum().backward()
        peak = by_kind(tracker, "peak")
    del peak["Sharded Param"]  # among the states
    gathered = sum(peak.pop(kind, 0) for kind in ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"))
    largest = max(parameters) * dtype.itemsize
    return {
        "FP32 weights, gradients, moments": states / ranks,
        "layers and head, gathered": gathered,
        "kept for the backward pass": kept,
        "head, recomputation of a layer": sum(peak.values()) - gradients - kept,
        "reference model of --kl_coef": sum(parameters) * dtype.itemsize * (flags.kl_coef > 0),
        "an update: a whole tensor and what travels": largest + in_transit(largest, shared),
        "CUDA": CUDA,
    }


def longest_row(flags: Flags) -> int:
    """Tokens of the longest prompt and completion."""
    prompt = 64 if flags.dataset in BUILT_IN else flags.max_prompt_tokens
    return prompt + flags.max_budget + PHRASE * (flags.length_control == "interruption") + flags.answer_budget


def engine_bytes(config: Config, flags: Flags, card: float, shared: bool) -> dict[str, float]:
    """What an engine does with its share of a GPU, by kind. An update's tensors are outside of that share."""
    share = engine_options(flags).get("gpu_memory_utilization", SHARED if shared else RECEIVING)
    held, parameters = getattr(torch, flags.dtype).itemsize, sizes(config)
    # Work, estimated: logits, log-probs and probabilities in FP32; a prefill of 8,192 tokens through one layer.
    logits = 3 * 4 * flags.max_num_seqs * config.vocab_size
    prefill = 8192 * held * (4 * config.hidden_size + 2 * config.intermediate_size)
    weights, work = held * sum(parameters) / flags.tensor_parallel, (logits + prefill) / flags.tensor_parallel
    return {
        "weights": weights,
        "logits, prefill": work,
        "CUDA": CUDA,
        "keys and values": share * card - weights - work - CUDA,
        "beyond its share: what of an update travels": in_transit(max(parameters) * held, shared),
    }


def cache_bytes(config: Config, flags: Flags) -> float:
    """Keys and values of one token on one GPU."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    held = getattr(torch, flags.dtype).itemsize
    return 2 * config.num_hidden_layers * heads * size * held / min(flags.tensor_parallel, heads)


def memory(args: argparse.Namespace, flags: Flags, config: Config, shared: bool) -> tuple[str, bool]:
    """(What is printed, whether it fits)."""
    card = args.card_gb * 1e9
    trainer = trainer_bytes(config, flags, args.trainers, shared)
    engine = engine_bytes(config, flags, card, shared)
    room = engine["keys and values"] / cache_bytes(config, flags) / longest_row(flags)
    used = {"a trainer's GPU": sum(trainer.values()), "an engine's GPU": sum(engine.values())}
    if shared:
        used = {"a GPU of both": sum(used.values())}
    rows = [[f"trainer: {kind}", size / 1e9] for kind, size in trainer.items() if size]
    rows += [[f"engine: {kind}", size / 1e9] for kind, size in engine.items()]
    rows += [[f"**{where}**", size / 1e9] for where, size in used.items()]
    fits = room >= 1 and max(used.values()) <= card
    return (
        f"{table([f'of {args.card_gb:g} GB', 'GB'], rows)}\n\n"
        f"keys and values: room for {max(0.0, room):.1f} completions of {longest_row(flags):,} tokens at once\n"
        f"it {'fits' if fits else 'does NOT fit'}, by this arithmetic; a run decides"
    ), fits


# --------------------------------------------------------------------------------------------------------- command line


def command_line() -> argparse.ArgumentParser:
    """All that it does not know is for train.py."""
    made = new_parser(__file__, __doc__)
    add = made.add_argument
    add("--card_gb", type=above_zero, required=True, help="memory of each GPU")
    add("--gpus", type=positive, default=1, help="in all, of trainers and engines (1)")
    add("--trainers", type=positive, default=1, help="trainer processes, a GPU each (1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 it fits, 1 it does not, 2 usage."""
    made = command_line()
    args, others = made.parse_known_args(argv)
    try:
        flags = parse_flags(others, "")
        flags.output_dir, flags.resume, flags.overwrite = "runs/none", "", False  # nothing is written
        check_flags(flags)
        if not flags.model:
            raise UsageError(f"--model must be a folder, a hub id, or one of {', '.join(SHAPES)}.")
        config, devices = config_of(flags.model), generator_devices(flags, args.gpus, args.trainers)
        shared = any(device < args.trainers for device in devices)
        text, fits = memory(args, flags, config, shared)
    except (UsageError, OSError, ValueError) as error:
        made.error(str(error).splitlines()[0])
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
