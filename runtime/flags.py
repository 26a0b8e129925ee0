"""Every flag of `train.py`, grouped by concept; flag_checks.py has the rules between them.

The defaults are the ScaleRL recipe (arXiv 2510.13786) scaled to the built-in task. Every ingredient has an off value or
an alternative, so that an ablation is one flag. Section numbers in the help lines are the paper's.
Labels such as P2 or O3: see docs/choices.md.
"""

import json
import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from tasks.named import named

VERSION = "0.14.0"  # of this program; a run goes on with the version that wrote its folder


class UsageError(ValueError):
    """A flag that cannot work. The message names it and the fix in one line: unprintable characters are escaped."""

    def __init__(self, message: str):
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


def reason_of(error: BaseException) -> str:
    """Kind and first line of the error that caused `error`. An error inside the engine's process is printed by that
    process and is not known here."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)  # of pydantic, which checks arguments
    first_line = text.strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])


def flag(default: Any, text: str, **bounds: float) -> Any:
    """A dataclass field with its help line and its bounds: at_least, above, below."""
    return field(default=default, metadata={"help": text, "bounds": bounds})


WITH_RARITY = ("discover",)
BUILT_IN = ("graded", *WITH_RARITY)  # the tasks that need no --model
# The default of --lr for a pretrained model: DAPO's for 32B (arXiv 2503.14476), IsoCompute's for 1,024 completions a
# step (2603.12151), twice ScaleRL's for 8B. Small ones take more: `make real` has 1e-5 for 135M.
PRETRAINED_LR = 1e-6
# What your own code is called with, by the flag that names it; --reward's is in tasks/judge_process.py.
CALLED_WITH = {
    "loss": "logprobs, behaviour_logprobs, advantages, mask",
    "task": "seed, held_out, rarity",
    "engine": "model, stop_ids, max_model_len, flags",
}
# A resumed run does not take these over: they are for one command.
OF_ONE_CALL = ("resume", "output_dir", "overwrite")


@dataclass
class RunFlags:
    """The run: length, evaluation, files."""

    output_dir: str = flag("runs/demo", "Folder of this run's files.")
    overwrite: bool = flag(False, "Delete an existing run in --output_dir first.")
    resume: str = flag("", "Folder of a run to go on with; its flags are taken over, flags given here win.")
    seed: int = flag(0, "Seed of prompts, budgets, sampling and the warm start.", at_least=0, below=2**32)
    max_steps: int = flag(310, "Batches to train on; 0 only evaluates.", at_least=0)
    max_sampled_tokens: int = flag(0, "Stop after this many sampled completion tokens; 0 means no limit.", at_least=0)
    max_hours: float = flag(0.0, "Stop after this many hours, those before a resume too; 0 means no limit.", at_least=0)
    eval_every: int = flag(10, "Evaluate the held-out prompts every N steps, at the start and at the end.", at_least=1)
    eval_samples: int = flag(1, "Completions per held-out prompt (the paper's mean@16 has 16).", at_least=1)  # P2
    save_every: int = flag(30, "Checkpoint every N steps and at the end; 0 means at a stop only.", at_least=0)
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = flag("none", "Also log here, project `scalerl`.")


@dataclass
class ModelFlags:
    """The model and its numbers."""

    model: str = flag("", "Folder or hub id of a causal LM; empty means the built-in warm-started one.")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "Dtype of the forward passes on both sides; AdamW's weights stay FP32."
    )
    fp32_head: bool = flag(True, "FP32 logits in trainer and generator (section 3.2); changes nothing in float32.")
    temperature: float = flag(1.0, "Sampling temperature; the trainer's log-probs use it too.", above=0)  # O2
    gradient_checkpointing: bool = flag(False, "Recompute the body's activations in the backward pass.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model's files.")


@dataclass
class DataFlags:
    """Prompts and rewards."""

    dataset: str = flag(
        "graded",
        "`graded` or `discover` (built in), or .jsonl / .parquet files or hub ids: NAME[:CONFIG[:SPLIT]][:REWARD],...",
    )
    task: str = flag("", "In place of --dataset: module:function, which takes seed, held_out, rarity.")
    rarity: int = flag(50, "One in this many completions of the first model of `discover` thinks.", at_least=1)
    eval_dataset: str = flag("", "Also evaluated, never trained on: NAME=DATA[:CONFIG[:SPLIT]][:REWARD],...")
    prompt_column: str = flag("", "Column of the prompt; empty looks for the usual names.")
    answer_column: str = flag("", "Column of the answer; empty looks for the usual names.")
    prompt_template: str = flag("{prompt}", "Text around the prompt.")
    apply_chat_template: bool = flag(True, "Put prompts into the tokenizer's chat template, if it has one.")
    held_out: int = flag(256, "Prompts of each data set that are evaluated and never trained on.", at_least=1)
    max_prompt_tokens: int = flag(2048, "Longer prompts are left out and counted.", at_least=1)
    reward: str = flag("task", "`task` (exact or math), `math`, `exact`, `module:function`, or `shuffled`.")
    reward_workers: int = flag(2, "Processes that judge answers to data sets.", at_least=1)
    reward_timeout: float = flag(8.0, "Seconds for one answer, then its worker is replaced.", above=0)
    thinking: Literal["auto", "true", "false"] = flag("auto", "Whether it thinks; `auto`: if it knows </think>.")
    end_of_thinking: str = flag("", "Text that ends thinking; empty finds it from the tokenizer.")
    interruption_phrase: str = flag("", "Text appended to thinking that is cut; empty means the paper's.")
    stop_tokens: str = flag("", "Comma-separated tokens that end a completion; empty finds them from the tokenizer.")


@dataclass
class ScheduleFlags:
    """Asynchrony (section 3.1)."""

    schedule: Literal["pipeline", "ppo_off_policy"] = flag("pipeline", "PipelineRL-k or PPO-off-policy-k.")
    k: int = flag(8, "Most steps off-policy; 0 (pipeline only) is on-policy.", at_least=0)
    batch_prompts: int = flag(16, "B, prompts per optimizer step.", at_least=1)
    rollouts: int = flag(16, "G, completions per prompt.", at_least=1)
    min_ready: int = flag(0, "Groups that stay ready behind each batch: about min_ready / B more lag.", at_least=0)
    engine: str = flag(
        "auto",
        "`torch`: no vLLM, for the built-in model or as small a Qwen3. `auto`: vllm where it can be imported. Or your "
        "own module:Class, as lab.hosts:RayEngine (runtime/engine.py).",
    )
    max_num_seqs: int = flag(256, "Requests inside the engine at once.", at_least=1)
    weight_channel: Literal["auto", "file"] = flag("auto", "New weights: `file`, in shared memory.")
    engine_args: str = flag("", 'More of vLLM\'s engine arguments, a JSON object: {"tensor_parallel_size": 2}.')


@dataclass
class LossFlags:
    """Loss, averages, advantages (Eq. 5)."""

    loss: str = flag("cispo", "Policy loss: cispo, dispo, gspo, dapo, grpo, tis, or your own module:function.")
    aggregation: Literal["prompt", "sample", "token", "constant"] = flag("prompt", "Average of the token losses.")
    normalize_advantages: Literal["batch", "prompt", "none"] = flag("batch", "Std that divides the advantages.")
    eps_max: float = flag(5.0, "CISPO: absolute cap on rho.", above=0)
    eps_low: float = flag(-1.0, "Lower clip of dispo, gspo, dapo, grpo, tis; -1: the loss's own default.", at_least=-1)
    eps_high: float = flag(-1.0, "Upper clip of dispo, gspo, dapo, tis; -1: the loss's own default.", at_least=-1)
    kl_coef: float = flag(0.0, "Weight of the KL penalty to the initial model; the paper uses none.", at_least=0)
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus; the paper uses none.", at_least=0)


@dataclass
class FilterFlags:
    """Which prompts and rollouts train (section 3.2)."""

    zero_variance_filter: bool = flag(True, "Drop groups with equal rewards from loss and denominators.")
    dynamic_sampling: bool = flag(False, "DAPO instead: replace such groups until the batch is full.")
    pass_rate_threshold: float = flag(0.9, "Retire prompts solved this often; above 1 none ever is.", above=0)
    truncated_rollouts: Literal["keep", "drop"] = flag("keep", "Rollouts cut at the cap: judged, or not trained.")  # O3


@dataclass
class LengthFlags:
    """Length control (section 2)."""

    length_control: Literal["interruption", "penalty", "none"] = flag("interruption", "How thinking is kept short.")
    # T3: the paper's budgets are 10,000 to 12,000 tokens
    min_budget: int = flag(14, "Least thinking tokens before the interruption; drawn per rollout.", at_least=1)
    max_budget: int = flag(18, "Most thinking tokens before the interruption.", at_least=0)
    answer_budget: int = flag(4, "Tokens for the answer.", at_least=1)
    penalty_window: int = flag(8, "Penalty: L_cache, tokens before the cap over which it grows to -1.")
    penalty_on: Literal["correct", "all"] = flag("correct", "Penalty on correct answers (ScaleRL) or all (DAPO).")

    @property
    def completion_cap(self) -> int:
        """Most tokens that a completion can sample; the phrase comes on top."""
        return self.max_budget + self.answer_budget


@dataclass
class OptimizerFlags:
    """AdamW and the trainer's memory."""

    lr: float = flag(7e-4, f"Learning rate; {PRETRAINED_LR:g} for a --dataset of your own (paper: 5e-7).", above=0)
    warmup_steps: int = flag(5, "Steps of linear warm-up (paper: 100).", at_least=0)
    tokens_per_microbatch: int = flag(2048, "Positions per forward pass, padding counted.", at_least=1)


SECTIONS = (RunFlags, ModelFlags, DataFlags, ScheduleFlags, FilterFlags, LengthFlags, LossFlags, OptimizerFlags)


# A function takes the section that it reads, and mypy sees that it reads no other. Two sections together have a name.
class EngineFlags(ScheduleFlags, ModelFlags):
    """What an engine is started with."""


@dataclass
class Flags(  # a dataclass puts the fields of its last base first
    OptimizerFlags, LossFlags, LengthFlags, FilterFlags, EngineFlags, DataFlags, ModelFlags, RunFlags
):
    """Every flag, each a field of its own: `flags.batch_prompts`."""


DEFAULTS = asdict(Flags())


def parse_flags(argv: Sequence[str], description: str) -> Flags:
    """The flags of the command line. With --resume, flags that are not given are those of the earlier run. A pretrained
    model has a default --lr of its own. Raises UsageError."""
    parser = _parser(description.split("\n")[0])
    flags = _parsed(parser, argv)
    if flags.dataset not in BUILT_IN:
        parser.set_defaults(lr=PRETRAINED_LR)
    saved = saved_flags(flags.resume) if flags.resume else {}
    code = [name for name, value in saved.items() if runs_code(name, value)]
    if flags.resume:
        parser.set_defaults(output_dir=flags.resume, **saved | dict.fromkeys(code))
    flags = _parsed(parser, argv)
    for name in code:
        if getattr(flags, name) is None:
            raise UsageError(f"--{name} {saved[name]} can run code, which no --resume takes over; give it again.")
    if flags.resume and Path(flags.output_dir) != Path(flags.resume):
        raise UsageError(
            f"--output_dir {flags.output_dir}: --resume goes on in {flags.resume}; leave --output_dir out."
        )
    return flags


def saved_flags(folder: str) -> dict[str, Any]:
    """The flags that a resumed run takes over from the run in `folder`. Raises UsageError."""
    config = Path(folder) / "config.json"
    try:
        saved = json.loads(config.read_text())
        version = saved.pop("version", "0.13 or older")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"--resume {folder}: {config} cannot be read; give the folder of an earlier run.") from error
    if version != VERSION:
        raise UsageError(f"--resume {folder}: version {version} wrote this run; only that version can go on with it.")
    return {name: value for name, value in saved.items() if name in DEFAULTS and name not in OF_ONE_CALL}


# vLLM's arguments that only set numbers and switches. Any other may name a module, a class or a file that vLLM runs.
PLAIN_ENGINE_ARGS = set(
    "block_size gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens enforce_eager "
    "tensor_parallel_size pipeline_parallel_size enable_prefix_caching enable_chunked_prefill async_scheduling".split()
)


def runs_code(name: str, value: Any) -> bool:
    """Whether this value of a flag can make a run execute code that somebody else put into its folder."""
    if name == "trust_remote_code":
        return bool(value)
    if name in ("reward", "loss", "engine", "task"):
        return ":" in value
    if name == "engine_args":
        for key, setting in parsed_engine_args(value).items():
            if key not in PLAIN_ENGINE_ARGS or not isinstance(setting, int | float | None):
                return True
    return False


def own_code(flags: Any, name: str) -> Any:
    """The function or class that the flag `name` names, as `module:function`. Raises UsageError."""
    try:
        return named(name, getattr(flags, name), CALLED_WITH[name])
    except ValueError as error:
        raise UsageError(with_flag_names(str(error))) from error


def with_flag_names(message: str) -> str:
    """A message from tasks/, which names its options in backticks, with the flags of the same names: `held_out` becomes
    --held_out."""
    return re.sub(r"`(\w+)`", lambda option: f"--{option[1]}" if option[1] in DEFAULTS else option[0], message)


def _parsed(parser: ArgumentParser, argv: Sequence[str]) -> Flags:
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        [nearest] = get_close_matches(name.lstrip("-").replace("-", "_"), DEFAULTS, n=1, cutoff=0)
        raise UsageError(f"unknown flag {name}; did you mean --{nearest}?")
    return Flags(**vars(options))


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without argparse's usage of sixty flags before it."""
        raise UsageError(message)


def _parser(description: str) -> ArgumentParser:
    parser = _Parser(
        prog="train.py", description=description, allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter
    )
    for section in SECTIONS:
        title = section.__name__.removesuffix("Flags").lower()
        group = parser.add_argument_group(title, section.__doc__)
        for item in fields(section):
            dashes = item.name.replace("_", "-")
            names = dict.fromkeys([f"--{item.name}", f"--{dashes}"])  # one name where the two are equal
            options: dict[str, Any] = {"type": item.type}
            if item.type is bool:
                options = {"type": _boolean, "nargs": "?", "const": True, "metavar": "true|false"}
            elif choices := get_args(item.type):
                options = {"choices": choices}
            group.add_argument(*names, dest=item.name, default=item.default, help=item.metadata["help"], **options)
    return parser


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"must be true or false, not {text}")
    return text.lower() == "true"


def parsed_engine_args(text: str) -> dict[str, Any]:
    """--engine_args, a JSON object, as a dict. Raises UsageError."""
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UsageError(f"--engine_args must be a JSON object, as '{{\"block_size\": 64}}', not {text}.")
    return options
