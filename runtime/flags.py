"""Every flag of `train.py`, grouped by concept, with its bounds; below them the rules between flags.

The defaults are the ScaleRL recipe (arXiv 2510.13786) scaled to the built-in task. Every ingredient has an off value or
an alternative, so that an ablation is one flag. Section numbers in the help lines are the paper's.
Labels such as P2 or O3: see docs/choices.md. How a command line becomes `Flags`: command_line.py.
"""

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from typing import Any, Literal

from pipeline_rl import Pacer
from tasks.named import named

VERSION = "0.15.0"  # of this program; a run goes on with the version that wrote its folder
BUILT_IN = ("graded", "discover")  # the tasks that need no --model
# The default of --lr for a pretrained model: DAPO's for 32B (arXiv 2503.14476), IsoCompute's for 1,024 completions a
# step (2603.12151), twice ScaleRL's for 8B. Small ones take more: `make -C lab real` has 1e-5 for 135M.
PRETRAINED_LR = 1e-6
LONGEST_MESSAGE = 800  # characters
LOSSES = ("cispo", "gspo", "dapo", "grpo", "tis")  # those of losses.py, which would import torch
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}

# Flags that may name your own code, as `module:function`: the names that are ours, and what yours is called with.
SEAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "loss": (LOSSES, "logprobs, behaviour_logprobs, advantages, mask"),
    "engine": (("auto", "vllm", "torch"), "model, stop_ids, max_model_len, flags"),
    "task": ((), "seed, held_out"),
    "reward": (("task", "math", "exact", "shuffled"), "prompt, completion, answer"),
}


class UsageError(ValueError):
    """A flag that cannot work. The message names it and the fix in one line: unprintable characters are escaped, and of
    a long one, which repeats a long value, the middle is left out."""

    def __init__(self, message: str):
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


def flag(default: Any, text: str, *, section: str = "", only_with: str = "", **bounds: float) -> Any:
    """A dataclass field with its help line and its bounds: at_least, above, below. `section`: title of the flags from
    here on. `only_with`: "NAME VALUE VALUE", a flag and those of its values with which this one does anything."""
    return field(default=default, metadata={"help": text, "section": section, "only_with": only_with, "bounds": bounds})


VLLM = "engine auto vllm module:function"
WHOLE_BATCHES = "zero_variance drop keep"  # `replace` takes groups one by one
PENALTY = "length_control penalty penalty_all"


@dataclass
class Flags:
    """Every flag: `flags.batch_prompts`."""

    output_dir: str = flag("runs/demo", "Folder of this run's files.", section="The run: length, evaluation, files.")
    overwrite: bool = flag(False, "Delete an existing run in --output_dir first.")
    resume: str = flag("", "Folder of a run to go on with; its flags are taken over, flags given here win.")
    seed: int = flag(0, "Seed of prompts, budgets, sampling and the warm start.", at_least=0, below=2**32)
    max_steps: int = flag(160, "Batches to train on; 0 only evaluates.", at_least=0)
    max_sampled_tokens: int = flag(0, "Stop after this many sampled completion tokens; 0 means no limit.", at_least=0)
    max_hours: float = flag(0.0, "Stop after this many hours, those before a resume too; 0 means no limit.", at_least=0)
    eval_every: int = flag(10, "Evaluate the held-out prompts every N steps, at the start and at the end.", at_least=1)
    eval_samples: int = flag(1, "Completions per held-out prompt (the paper's mean@16 has 16).", at_least=1)  # P2
    save_every: int = flag(30, "Checkpoint every N steps and at the end; 0 means at a stop only.", at_least=0)
    record_every: int = flag(0, "Keep every Nth step for lab/replay.py; 0 keeps none.", at_least=0)
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = flag("none", "Also log here, project `scalerl`.")

    model: str = flag(
        "", "Folder or hub id of a causal LM; empty means the task's own.", section="The model and its numbers."
    )
    dtype: Literal["float32", "bfloat16"] = flag("float32", "Of the passes on both sides; AdamW's weights stay FP32.")
    fp32_head: bool = flag(True, "FP32 logits in trainer and generator (section 3.2); changes nothing in float32.")
    temperature: float = flag(1.0, "Sampling temperature; the trainer's log-probs use it too.", above=0)  # O2
    gradient_checkpointing: bool = flag(False, "Recompute the body's activations in the backward pass.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model's files.")

    dataset: str = flag(
        "graded",
        "`graded` or `discover` (built in), or .jsonl / .parquet files or hub ids: NAME[:CONFIG[:SPLIT]][:REWARD],...",
        section="Prompts and rewards.",
    )
    task: str = flag("", "In place of --dataset: your own module:function(seed, held_out) -> a Task.")
    eval_dataset: str = flag("", "Also evaluated, never trained on: NAME=DATA[:CONFIG[:SPLIT]][:REWARD],...")
    prompt_column: str = flag("", "Column of the prompt; empty looks for the usual names.")
    answer_column: str = flag("", "Column of the answer; empty looks for the usual names.")
    prompt_template: str = flag("{prompt}", "Text around the prompt.")
    apply_chat_template: bool = flag(True, "Put prompts into the tokenizer's chat template, if it has one.")
    held_out: int = flag(256, "Prompts of each data set that are evaluated and never trained on.", at_least=1)
    reward: str = flag("task", "`task` (exact or math), `math`, `exact`, `shuffled`, or your own module:function.")
    thinking: str = flag("auto", "`true`, `false`, `auto` (true if it knows </think>), or the text that ends thinking.")
    interruption_phrase: str = flag("", "Text appended to thinking that is cut; empty means the paper's.")

    schedule: Literal["pipeline", "ppo_off_policy"] = flag(
        "pipeline", "PipelineRL-k or PPO-off-policy-k.", section="Asynchrony (section 3.1)."
    )
    k: int = flag(8, "Most steps off-policy; 0 (pipeline only) is on-policy.", at_least=0)
    batch_prompts: int = flag(16, "B, prompts per optimizer step.", at_least=1)
    rollouts: int = flag(16, "G, completions per prompt.", at_least=1)
    min_ready: int = flag(0, "Groups that wait ready: lag + min_ready / B.", only_with=WHOLE_BATCHES, at_least=0)
    engine: str = flag(
        "auto", "`auto`: vllm if it is there (on a GPU only with --model), else torch; or your module:Class."
    )
    max_num_seqs: int = flag(256, "Requests inside the engine at once.", at_least=1)
    engine_args: str = flag("", 'vLLM\'s own arguments, a JSON object: {"tensor_parallel_size": 2}.', only_with=VLLM)

    zero_variance: Literal["drop", "keep", "replace"] = flag(
        "drop",
        "Groups with equal rewards: dropped from loss and denominators, kept, or replaced (DAPO's dynamic sampling).",
        section="Which prompts and rollouts train (section 3.2).",
    )
    pass_rate_threshold: float = flag(0.9, "Retire prompts solved this often; above 1 none ever is.", above=0)
    truncated_rollouts: Literal["keep", "drop"] = flag("keep", "Rollouts cut at the cap: judged, or not trained.")  # O3

    length_control: Literal["interruption", "penalty", "penalty_all", "none"] = flag(
        "interruption",
        "How thinking is kept short; a penalty on correct answers (ScaleRL) or on all (DAPO).",
        section="Length control (section 2).",
    )
    # T3: the paper's budgets are 10,000 to 12,000 tokens
    min_budget: int = flag(14, "Least thinking tokens before the interruption; drawn per rollout.", at_least=1)
    max_budget: int = flag(18, "Most thinking tokens before the interruption.", at_least=0)
    answer_budget: int = flag(4, "Tokens for the answer.", at_least=1)
    penalty_window: int = flag(8, "Penalty: L_cache, tokens before the cap in which it grows to -1.", only_with=PENALTY)

    loss: str = flag(
        "cispo",
        "Policy loss: cispo, gspo, dapo, grpo, tis, or your own module:function, as lab.masks:icepop.",
        section="Loss, averages, advantages (Eq. 5).",
    )
    aggregation: Literal["prompt", "sample", "token", "constant"] = flag("prompt", "Average of the token losses.")
    normalize_advantages: Literal["batch", "prompt", "none"] = flag("batch", "Std that divides the advantages.")
    eps_max: float = flag(5.0, "CISPO: absolute cap on rho.", only_with="loss cispo", above=0)
    eps_low: float = flag(
        -1.0, "Lower clip of the loss; -1: the loss's own default.", only_with="loss gspo dapo grpo tis", at_least=-1
    )
    eps_high: float = flag(  # grpo's clip is symmetric
        -1.0, "Upper clip of the loss; -1: the loss's own default.", only_with="loss gspo dapo tis", at_least=-1
    )
    kl_coef: float = flag(0.0, "Weight of the KL penalty to the initial model; the paper uses none.", at_least=0)
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus; the paper uses none.", at_least=0)

    lr: float = flag(
        7e-4, f"{PRETRAINED_LR:g} for a pretrained model.", section="AdamW and the trainer's memory.", above=0
    )  # the paper's: 5e-7
    warmup_steps: int = flag(5, "Steps of linear warm-up (paper: 100).", at_least=0)
    tokens_per_microbatch: int = flag(2048, "Positions per forward pass, padding counted.", at_least=1)
    share_prompts: bool = flag(True, "Compute a prompt once for all its completions, where that saves a tenth.")

    @property
    def completion_budget(self) -> int:
        """Most tokens that a completion can sample. A forced phrase comes on top (`max_completion`)."""
        return self.max_budget + self.answer_budget

    @property
    def from_data_sets(self) -> bool:
        """Whether prompts come from data sets, and so their answers are judged."""
        return not self.task and self.dataset not in BUILT_IN

    @property
    def pretrained(self) -> bool:
        """Whether the model is a pretrained one, for which the defaults of the built-in model do not suit."""
        return self.from_data_sets or bool(self.task and self.model)


DEFAULTS = asdict(Flags())


# ------------------------------------------------------------------------------------------------------ what is refused
# A rule stands here if the run would otherwise fail late, or be another than its command line says. Its sentence names
# the flag and the fix. The engine's own rules stand in engine_flags.py, those of a run's folder in folder.py.


def check_flags(flags: Flags) -> list[str]:
    """Raises UsageError for what cannot work; returns notes. Rounds `max_steps` up where steps come in rounds of k."""
    for rule in (bounds, unused, names, schedule, length, data):
        for sentence in rule(flags):
            raise UsageError(sentence)
    messages = list(notes(flags))
    if flags.schedule == "ppo_off_policy":
        flags.max_steps = math.ceil(flags.max_steps / flags.k) * flags.k
    return messages


def bounds(flags: Flags) -> Iterator[str]:
    """Numbers beyond the bounds that stand beside each flag."""
    for item in fields(flags):
        value = getattr(flags, item.name)
        for word, bound in item.metadata["bounds"].items():
            if not (BOUNDS[word](value, bound) and value < math.inf):
                yield f"--{item.name} must be {word.replace('_', ' ')} {bound} and finite, not {value}."


def unused(flags: Flags) -> Iterator[str]:
    """Flags that were changed and would do nothing, by their `only_with`."""
    for item in fields(flags):
        value = getattr(flags, item.name)
        if item.metadata["only_with"] and value != item.default:
            other, *values = item.metadata["only_with"].split()
            setting = str(getattr(flags, other))
            if (setting if ":" not in setting else "module:function") not in values:
                yield f"--{item.name} {value} does nothing with --{other} {setting.lower()}; leave out one of the two."


def names(flags: Flags) -> Iterator[str]:
    """Names of SEAMS that are neither ours nor those of your own code. A reward is looked for in its worker process."""
    for name, (ours, _) in SEAMS.items():
        value = getattr(flags, name)
        if ":" in value and name != "reward":
            own_code(flags, name)
        elif ":" not in value and value not in ("", *ours):
            *others, last = [*ours, "module:Class" if name == "engine" else "module:function"]
            yield f"--{name} must be {' or '.join(filter(None, [', '.join(others), last]))}, not {value}."
    if not find_spec(flags.report_to) and flags.report_to != "none":
        yield f"--report_to {flags.report_to}: pip install {flags.report_to}, or leave it out."


def own_code(flags: Flags, name: str) -> Any:
    """The function or class that the flag `name` names, as `module:function`. Raises UsageError."""
    try:
        return named(name, getattr(flags, name), SEAMS[name][1])
    except ValueError as error:
        raise UsageError(with_flag_names(str(error))) from error


def with_flag_names(message: str) -> str:
    """A message from tasks/, which names its options in backticks, with the flags of the same names: `held_out` becomes
    --held_out."""
    return re.sub(r"`(\w+)`", lambda option: f"--{option[1]}" if option[1] in DEFAULTS else option[0], message)


def schedule(flags: Flags) -> Iterator[str]:
    """Batches that never become ready, and groups that never fit into the engine."""
    try:
        new_pacer(flags)
    except ValueError as error:
        yield f"--schedule {flags.schedule} --k {flags.k} --min_ready {flags.min_ready}: {error}."
    if flags.rollouts > flags.max_num_seqs:
        yield f"--rollouts {flags.rollouts} do not fit one engine; raise --max_num_seqs (now {flags.max_num_seqs})."


def new_pacer(flags: Flags) -> Pacer:
    """Who may enter the engine, and when. Raises ValueError."""
    return Pacer(flags.batch_prompts, flags.k, schedule=flags.schedule, min_ready=flags.min_ready)


def length(flags: Flags) -> Iterator[str]:
    """Budgets that cannot be drawn, a penalty that does not fit under the cap, thinking that nothing can interrupt."""
    if flags.length_control == "interruption":
        if flags.min_budget > flags.max_budget:
            yield f"--min_budget {flags.min_budget} is above --max_budget {flags.max_budget}; lower it."
        if flags.thinking == "false":
            yield "--thinking false leaves nothing to interrupt; add --length_control none or penalty."
    cap = flags.completion_budget
    if flags.length_control.startswith("penalty") and not 1 <= flags.penalty_window <= cap:
        yield f"--penalty_window must be from 1 to --max_budget + --answer_budget = {cap}, not {flags.penalty_window}."


def data(flags: Flags) -> Iterator[str]:
    """Groups without a gradient, prompts that no model can read, rewards that nobody gives."""
    other_terms = flags.kl_coef > 0 or flags.entropy_coef > 0
    if flags.rollouts == 1 and flags.max_steps and not (flags.zero_variance == "keep" and other_terms):
        yield "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more."
    if flags.zero_variance == "replace" and flags.reward == "shuffled":
        yield "--zero_variance replace looks at true rewards; use --reward task with it."
    if flags.task and flags.dataset != DEFAULTS["dataset"]:
        yield f"--task {flags.task} takes the place of --dataset {flags.dataset}; leave out one of the two."
    if not flags.task and flags.dataset == "discover" and flags.model:
        yield f"--dataset discover has a first model of its own; leave out --model {flags.model}."
    if not flags.from_data_sets:
        if flags.reward not in ("task", "shuffled"):
            yield f"--reward {flags.reward} judges data sets; other tasks have `task` and `shuffled`."
        if flags.eval_dataset:
            yield f"--eval_dataset {flags.eval_dataset} needs a data set as --dataset beside it."
    elif not flags.model:
        yield f"--dataset {flags.dataset} needs --model, whose tokenizer encodes the prompts."
    else:
        names = [data.split(":")[0] for data in flags.dataset.split(",") + flags.eval_dataset.split(",") if data]
        needed = [] if all(name.endswith(".jsonl") for name in names) else ["datasets"]
        needed += ["math_verify"] if flags.reward in ("task", "math", "shuffled") else []
        if missing := [package.replace("_", "-") for package in needed if not find_spec(package)]:
            yield f"--dataset {flags.dataset}: pip install {' '.join(missing)}, or take a built-in task."
        if not find_spec("resource"):
            yield f"--dataset {flags.dataset} needs limits for its judges that Windows does not have; use Linux or WSL."


# -------------------------------------------------------------------------------------------------- what is only noted

USUAL = {  # values for real models, where the default suits the built-in task
    "min_budget": "768 to 10000",
    "max_budget": "1024 to 12000",
    "answer_budget": "128 to 2000",
    "dtype": "bfloat16",
}


def notes(flags: Flags) -> Iterator[str]:
    """What works, but not as its name or the defaults promise."""
    if flags.schedule == "ppo_off_policy" and flags.max_steps % flags.k:
        rounded = math.ceil(flags.max_steps / flags.k) * flags.k
        yield f"--max_steps {flags.max_steps} is rounded up to {rounded}, a multiple of --k {flags.k}"
    if flags.loss == "tis" and (flags.schedule == "pipeline" or flags.k == 1):
        one_update = "every batch gets one update, so pi_old is pi, the clip never acts"
        yield f"--loss tis: {one_update} and it equals --loss cispo --eps_max 2"
    if flags.loss == "gspo" and flags.aggregation != "sample":
        yield f"--loss gspo with --aggregation {flags.aggregation}: GSPO's own paper averages by --aggregation sample"
    if flags.pretrained:
        defaults = [name for name in USUAL if getattr(flags, name) == DEFAULTS[name]]
        if flags.length_control != "interruption" and "min_budget" in defaults:
            defaults.remove("min_budget")  # nothing draws it
        if defaults:
            values = [f"--{name} {DEFAULTS[name]} (usual for a real model: {USUAL[name]})" for name in defaults]
            yield f"left at what suits the built-in task: {', '.join(values)}"
