"""Does it fit, how fast will it be, and which split of the GPUs is best: before any of them is at hand.

    python tools/plan.py --card_gb 24 --model Qwen/Qwen3-0.6B --dtype bfloat16 --tokens_per_microbatch 8192 ...
    python tools/plan.py --card_gb 80 --gpus 8 --trainers 4 --lengths 4000,0.6 --data_parallel 4 ...

Give it a machine and the arguments of train.py.

DOES IT FIT? The trainer's side is counted, not guessed: the real policy runs forward and backward under FSDP2 on
tensors that have a shape and no data, and torch counts the bytes that live at the peak. (On one process in float32 the
trainer does without FSDP2 and needs less.) The engine's side is arithmetic:

    budget of an engine = its share of the card = weights + keys and values + work + CUDA

A GB is 1e9 bytes here, and cards are sold in GiB: the 7 % between them are left to the allocator's gaps.

HOW FAST, WHICH SPLIT? With --lengths the real `pipeline_rl.Pacer` paces engines and trainers that are simulated, event
by event. A roofline gives their speed: P parameters cost 2 P FLOPs a token in an engine and 6 P in training, of which
an MFU is reached; each step of an engine also reads all weights, and for each of its requests the keys and values.

    seconds of an engine's step = 2 P / (bandwidth · use)
        + requests · (kv_bytes_per_token · mean context / bandwidth + 2 P / peak) / use
    tokens/s of a trainer = MFU · peak / (6 P) · completion / (prompt + completion)

A plan is as good as these speeds; --engine_step, --trainer_tokens and --push_seconds take measured ones.

SIMPLIFIED. All engines run equally many requests, and prompts cost them nothing (the G rollouts of a group share one
prefill). A completion that is cut is one request with its answer. Judging takes no time, no step is thrown away, and
nothing is evaluated.

SOURCES. torch/distributed/_tools/fsdp2_mem_tracker.py; the shares of runtime/devices.py; CUDA's contexts and the work
of an engine are estimates.
"""

import argparse
import heapq
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from measuring import above_zero, new_parser, positive, table

from runtime.devices import RECEIVING, SHARED, engine_options, generator_devices
from runtime.flag_checks import check_flags
from runtime.flags import BUILT_IN, Flags, UsageError, has_adapters, parse_flags
from runtime.lora import add_adapters
from runtime.model import Policy, Row, make_microbatch, recompute_layers
from runtime.parts import new_pacer
from runtime.weights import BUFFER

# What the config.json of each has on huggingface.co (April 2025).
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
OF_A_SIZE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": dict(zip(OF_A_SIZE, (1024, 3072, 28, 16, True), strict=True)),
    "Qwen/Qwen3-8B": dict(zip(OF_A_SIZE, (4096, 12288, 36, 32, False), strict=True)),
}
PHRASE = 32  # tokens of the interruption's phrase, at most
CUDA = 0.5e9  # bytes of a process's CUDA context, estimated


# ---------------------------------------------------------------------------------------------------------- does it fit


def config_of(model: str) -> Any:
    """The configuration of a model: a folder or hub id, or one of SHAPES, which needs no network. Raises OSError or
    ValueError if there is none."""
    from transformers import AutoConfig, Qwen3Config

    return Qwen3Config(**QWEN3, **SHAPES[model]) if model in SHAPES else AutoConfig.from_pretrained(model)


def on_meta(config: Any) -> Any:
    """The model without any memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def sizes(config: Any) -> list[int]:
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


def trainer_bytes(config: Any, flags: Flags, ranks: int, shared: bool) -> dict[str, float]:
    """What lives on a trainer's GPU at the peak of a microbatch that is not the step's first, by kind."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from transformers import AutoModelForCausalLM

    n, dtype = max(flags.tokens_per_microbatch, longest_row(flags)), getattr(torch, flags.dtype)
    model, parameters = on_meta(config), sizes(config)
    if has_adapters(flags):  # what they keep for the backward pass is about what the layers alone keep
        with torch.device("meta"):
            add_adapters(flags, model, flags.model, flags.seed)
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


def engine_bytes(config: Any, flags: Flags, card: float, shared: bool) -> dict[str, float]:
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


def cache_bytes(config: Any, flags: Flags) -> float:
    """Keys and values of one token on one GPU."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    held = getattr(torch, flags.dtype).itemsize
    return 2 * config.num_hidden_layers * heads * size * held / min(flags.tensor_parallel, heads)


def memory(args: argparse.Namespace, flags: Flags, config: Any, shared: bool) -> tuple[str, bool]:
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


# ------------------------------------------------------------------------------------------------- a simulated cluster


@dataclass(frozen=True)
class Setting:
    """A job and the machines that it runs on; seconds throughout. Schedule, batch and engines are those of `flags`."""

    flags: Flags
    trainers: int
    lengths: Sequence[Sequence[int]]  # tokens of the G completions of each group as it is admitted; then from the start
    engine_step: tuple[float, float]  # base, and for each request in it: each step gives every request one token
    trainer_rate: float  # sampled tokens/s of one trainer
    push_seconds: float  # of an update, in which every engine stands still and the trainer waits
    steps: int = 45  # that are counted, after those of `warm_up`

    @property
    def warm_up(self) -> int:
        """Steps until the engines are full; the rounds of ppo_off_policy are all alike."""
        return self.flags.k + 2 if self.flags.schedule == "pipeline" else self.flags.k

    @property
    def gpus(self) -> int:
        """In all."""
        return self.trainers + self.flags.data_parallel * self.flags.tensor_parallel


@dataclass
class Plan:
    """What the counted steps came to; shares are of their time."""

    step_seconds: float
    trainer_busy: float
    generator_busy: float  # a request is inside, and no update stops it
    requests: float  # inside each engine, mean
    lag_mean: float
    lag_max: int


@dataclass
class Group:
    """What the pacer sees of a group, and what its lags are counted from."""

    number: int
    first: int  # the version that was live when it began
    left: int  # requests that still run
    tokens: int
    versions: float  # of all its tokens, summed


class Simulation:
    """Time passes from event to event. Each step of an engine gives every request one token; as all engines step alike,
    one clock counts the steps of all."""

    def __init__(self, setting: Setting):
        self.s, self.pacer = setting, new_pacer(setting.flags)
        self.now = self.clock = 0.0
        self.versions = 0.0  # of the tokens of a request that runs from the start, summed
        self.ends: list[tuple[float, int]] = []  # a heap, one for each request inside: its end on `clock`, its group
        self.groups: dict[int, Group] = {}
        self.trained = self.live = 0  # the newest version, and the engines'
        self.pushing = False
        self.trainer, self.until = self._trainer(), math.inf  # when the trainer goes on; inf: it waits for groups
        self.total: Counter[str] = Counter()  # seconds of each state, tokens and their lags
        self.lag_max = 0

    def run(self) -> Plan:
        """Simulates until `steps` steps are counted. Raises RuntimeError if nobody can go on."""
        began = 0.0
        while self.trained < self.s.warm_up + self.s.steps:
            self._admit()
            self._pass_time()
            while self.ends and self.ends[0][0] <= self.clock + 1e-6:
                group = self.groups[heapq.heappop(self.ends)[1]]
                group.left, group.versions = group.left - 1, group.versions + self.versions
                if not group.left:
                    self.pacer.finish(self.groups.pop(group.number))
            trained = self.trained
            if self.now >= self.until or self.until == math.inf:
                self.until = next(self.trainer)
            if trained < self.s.warm_up == self.trained:
                began, self.total, self.lag_max = self.now, Counter(), 0
        passed, total = self.now - began, self.total
        return Plan(
            step_seconds=passed / self.s.steps,
            trainer_busy=total["trainer"] / passed,
            generator_busy=total["generator"] / passed,
            requests=total["requests"] / passed / self.s.flags.data_parallel,
            lag_mean=max(0.0, total["lags"] / total["tokens"]),  # rounding
            lag_max=self.lag_max,
        )

    def _admit(self) -> None:
        lengths, slots = self.s.lengths, self.s.flags.max_num_seqs * self.s.flags.data_parallel
        while len(self.ends) + len(lengths[0]) <= slots and self.pacer.may_admit():
            number = self.pacer.admit()
            of_group = lengths[number % len(lengths)]
            before = -self.versions * len(of_group)
            self.groups[number] = Group(number, self.live, len(of_group), sum(of_group), before)
            for length in of_group:
                heapq.heappush(self.ends, (self.clock + length, number))

    def _pass_time(self) -> None:
        """Until the trainer goes on or a request is complete, whichever comes first."""
        base, per_request = self.s.engine_step
        step = base + per_request * max(1.0, len(self.ends) / self.s.flags.data_parallel)  # seconds
        samples = bool(self.ends) and not self.pushing
        until = min(self.until, self.now + max(0.0, self.ends[0][0] - self.clock) * step if samples else math.inf)
        if until == math.inf:
            raise RuntimeError("nobody can go on: the groups that the trainer waits for do not fit the engines")
        passed, self.now = until - self.now, until
        if samples:
            self.clock += passed / step
            self.versions += passed / step * self.live
        self.total["generator"] += passed * samples
        self.total["requests"] += passed * len(self.ends)
        self.total["trainer"] += passed * (self.until < math.inf and not self.pushing)

    def _trainer(self) -> Iterator[float]:
        """Yields when it goes on; inf: when something happens."""
        size = self.s.flags.batch_prompts
        while True:
            while not (taken := self.pacer.take(self.pacer.take_size)):
                yield math.inf
            for batch in (taken[i : i + size] for i in range(0, len(taken), size)):
                tokens = sum(group.tokens for group in batch)
                yield self.now + tokens / (self.s.trainer_rate * self.s.trainers)
                self.total["tokens"] += tokens
                self.total["lags"] += tokens * self.trained - sum(group.versions for group in batch)
                self.lag_max = max(self.lag_max, *(self.trained - group.first for group in batch))
                self.trained += 1
            self.pushing = True
            yield self.now + self.s.push_seconds
            self.pushing, self.live = False, self.trained
            self.pacer.release(len(taken))


# ---------------------------------------------------------------------------------------------- how fast, which split


def lognormal(rng: random.Random, mean: float, sigma: float, longest: int) -> int:
    """Tokens of a completion: lognormal with this mean and standard deviation of their logarithm, cut."""
    return max(1, min(longest, round(mean * math.exp(rng.gauss(-(sigma**2) / 2, sigma)))))


def estimated(args: argparse.Namespace, flags: Flags, parameters: float, cache: float) -> Setting:
    """The job and the machines of the command line, with the speeds that were measured, or those of the roofline.
    `cache`: bytes of a token's keys and values on one GPU."""
    rng, groups = random.Random(0), (Setting.steps + 2 * flags.k + 4) * flags.batch_prompts
    tokens = [lognormal(rng, *args.lengths, flags.most_sampled) for _ in range(groups * flags.rollouts)]
    lengths = [tokens[i : i + flags.rollouts] for i in range(0, len(tokens), flags.rollouts)]
    completion = sum(tokens) / len(tokens)  # mean
    context = args.prompt + sum(x * x for x in tokens) / sum(tokens) / 2  # behind a running request, mean
    weights, peak, bandwidth = 2 * parameters, args.peak_tflops * 1e12, args.bandwidth_tb * 1e12
    of_a_gpu = weights / flags.tensor_parallel
    step = of_a_gpu / bandwidth / args.use, (cache * context / bandwidth + of_a_gpu / peak) / args.use
    rate = args.mfu * peak / (6 * parameters) * completion / (args.prompt + completion)
    return Setting(
        flags,
        args.trainers,
        lengths,
        engine_step=args.engine_step or step,
        trainer_rate=args.trainer_tokens or rate,
        push_seconds=args.push_seconds or weights / (args.link_gb * 1e9),
    )


def best_split(setting: Setting) -> Setting:
    """The split of the same GPUs that has the shortest step, of nine: 10 %, 20 % ... 90 % of them train."""
    flags, splits = setting.flags, [setting]
    for trainers in sorted({round(setting.gpus * tenths / 10) for tenths in range(1, 10)} - {0}):
        engines = (setting.gpus - trainers) // flags.tensor_parallel
        if flags.max_num_seqs * engines >= len(setting.lengths[0]):
            splits.append(replace(setting, trainers=trainers, flags=replace(flags, data_parallel=engines)))
    return min(splits, key=lambda split: Simulation(split).run().step_seconds)


def speed(asked: Setting) -> str:
    """What is printed: the job that was asked for, and what is compared with it."""
    flags, k = asked.flags, asked.flags.k
    plain = replace(flags, schedule="pipeline", min_ready=0, max_ready=0)
    cases = {f"{flags.schedule} {k}": asked, "the best split": best_split(asked)}
    if k:
        off_policy, whole_rounds = replace(plain, schedule="ppo_off_policy"), -(-asked.steps // k) * k
        cases[f"ppo_off_policy {k}"] = replace(asked, flags=off_policy, steps=whole_rounds)
    cases["on-policy (pipeline 0)"] = replace(asked, flags=replace(plain, k=0))
    head = ["schedule", "trainers + engines", "s a step", "trainers busy", "engines busy", "requests an engine"]
    rows = []
    for label, setting in cases.items():
        plan = Simulation(setting).run()
        row = [label, f"{setting.trainers} + {setting.flags.data_parallel}", f"{plan.step_seconds:.3g}"]
        row += [f"{plan.trainer_busy:.2f}", f"{plan.generator_busy:.2f}", f"{plan.requests:.0f}"]
        rows.append([*row, f"{plan.lag_mean:.2f} / {plan.lag_max}", f"{plan.step_seconds * setting.gpus / 3.6:,.0f}"])
    base, per_request = asked.engine_step
    return (
        f"an engine's step: {1e3 * base:.3g} ms and {1e3 * per_request:.3g} ms a request; trainers: "
        f"{asked.trainer_rate * asked.trainers:,.0f} tokens/s; an update: {asked.push_seconds:.2g} s\n\n"
        + table([*head, "lag mean / max", "GPU-hours / 1,000 steps"], rows)
    )


# --------------------------------------------------------------------------------------------------------- command line


def two_numbers(text: str) -> tuple[float, float]:
    """A,B for argparse; the second may be 0."""
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"must be two numbers, A,B, not {text!r}")
    return above_zero(first), 0.0 if second.strip() == "0" else above_zero(second)


def command_line() -> argparse.ArgumentParser:
    """All that it does not know is for train.py."""
    made = new_parser(__file__, __doc__)
    add = made.add_argument
    add("--card_gb", type=above_zero, required=True, help="memory of each GPU")
    add("--gpus", type=positive, default=1, help="in all, of trainers and engines (1)")
    add("--trainers", type=positive, default=1, help="trainer processes, a GPU each (1)")
    add("--lengths", type=two_numbers, metavar="MEAN,SIGMA", help="tokens of a completion, sd of their logarithm")
    add("--prompt", type=positive, default=200, help="tokens of a prompt (200)")
    add("--peak_tflops", type=above_zero, default=989, help="bfloat16, dense, of one GPU (989, of an H100 SXM)")
    add("--bandwidth_tb", type=above_zero, default=3.35, help="TB/s of one GPU's memory (3.35, of an H100 SXM)")
    add("--use", type=above_zero, default=0.5, help="share of both that an engine reaches, a guess (0.5)")
    add("--mfu", type=above_zero, default=0.3, help="share of the peak that training reaches, a guess (0.3)")
    add("--link_gb", type=above_zero, default=25, help="GB/s at which weights reach the engines, a guess (25)")
    add("--engine_step", type=two_numbers, metavar="BASE,PER_REQUEST", help="measured: seconds of an engine's step")
    add("--trainer_tokens", type=above_zero, help="measured: of completions, tokens/s of one trainer")
    add("--push_seconds", type=above_zero, help="measured: of an update")
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
        if args.lengths and shared:
            raise UsageError("--lengths is for engines on GPUs of their own; raise --gpus.")
        if args.lengths:
            print(speed(estimated(args, flags, sum(sizes(config)), cache_bytes(config, flags))) + "\n")
        text, fits = memory(args, flags, config, shared)
    except (UsageError, OSError, ValueError) as error:
        made.error(str(error).splitlines()[0])
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
