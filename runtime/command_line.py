"""From a command line to `Flags`, and what a resumed run takes over. Whatever is wrong is one sentence (UsageError)."""

import json
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_args

from runtime.flags import DEFAULTS, PRETRAINED_LR, SEAMS, VERSION, Flags, UsageError, bounds

# A resumed run does not take these over: they are for one command.
OF_ONE_CALL = ("resume", "output_dir", "overwrite")
OPTION_OF_DATA_SETS = "--task with a function of yours that gives it to load_dataset_task: docs/operations.md has one"
# Flags of version 0.14, or values of flags, and what to give instead. {} is the value that was given.
MOVED = {
    "mask none": "nothing; it is the default",
    "mask": "--loss lab.masks:{}",
    "mask_low": "a function of your own around the one in lab/masks.py",
    "mask_high": "a function of your own around the one in lab/masks.py",
    "loss dispo": "--loss lab.masks:dispo",
    "normalize_advantages maxrl": "--loss lab.masks:maxrl --normalize_advantages none",
    "size m": "nothing; it is the default",
    "size": "--task lab.tasks:graded_{}",
    "dataset rare": "--task lab.tasks:rare",
    "dataset ramble": "--task lab.tasks:ramble",
    "penalty_on correct": "--length_control penalty",
    "penalty_on all": "--length_control penalty_all",
    "end_of_thinking": "--thinking {}",
    "weight_channel nccl": "--engine lab.hosts:NcclEngine",
    "weight_channel message": "--engine lab.hosts:RayMessageEngine",
    "weight_channel": "nothing; new weights go by a file in shared memory",
    "zero_variance_filter true": "nothing; it is the default",
    "zero_variance_filter": "--zero_variance keep",
    "dynamic_sampling": "--zero_variance replace",
    "rarity": "--task lab.tasks:discover_1, discover_110, or a function like them",
    "max_prompt_tokens": OPTION_OF_DATA_SETS,
    "reward_workers": OPTION_OF_DATA_SETS,
    "reward_timeout": OPTION_OF_DATA_SETS,
    "stop_tokens": "--task with a function of yours that sets the task's `stop_ids`: docs/operations.md has one",
}


def parse_flags(argv: Sequence[str], description: str) -> Flags:
    """The flags of the command line. With --resume, flags that are not given are those of the earlier run. A pretrained
    model has a default --lr of its own. Raises UsageError."""
    refuse_moved(argv)
    parser = _parser(description.split("\n")[0])
    flags = _parsed(parser, argv)
    saved = saved_flags(flags.resume) if flags.resume else {}
    code = [name for name, value in saved.items() if runs_code(name, value)]
    if flags.resume:
        parser.set_defaults(output_dir=flags.resume, **saved | dict.fromkeys(code))
    elif flags.pretrained:
        parser.set_defaults(lr=PRETRAINED_LR)
    flags = _parsed(parser, argv)
    for name in code:
        if getattr(flags, name) is None:
            raise UsageError(f"--{name} {saved[name]} can run code, which no --resume takes over; give it again.")
    if flags.resume and Path(flags.output_dir) != Path(flags.resume):
        raise UsageError(
            f"--output_dir {flags.output_dir}: --resume goes on in {flags.resume}; leave --output_dir out."
        )
    return flags


def refuse_moved(argv: Sequence[str]) -> None:
    """Raises UsageError for a flag, or a value, that is elsewhere now."""
    words = [part for word in argv for part in word.split("=", 1)]
    for word, value in zip_longest(words, words[1:], fillvalue=""):
        name = word.removeprefix("--").replace("-", "_")
        for key in (f"{name} {value}", name):
            if word.startswith("--") and key in MOVED:
                raise UsageError(f"--{key} has moved: use {MOVED[key].format(value)}.")


def reason_of(error: BaseException) -> str:
    """Kind and first line of the error that caused `error`. An error inside the engine's process is printed by that
    process and is not known here."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)  # of pydantic, which checks arguments
    first_line = text.strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])


# ------------------------------------------------------------------------------------------------------- a resumed run


def saved_flags(folder: str) -> dict[str, Any]:
    """The flags that a resumed run takes over from the run in `folder`. Raises UsageError."""
    config = Path(folder) / "config.json"
    try:
        saved = json.loads(config.read_text())
        version = saved.pop("version", "0.13 or older")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"--resume {folder}: {config} cannot be read; give the folder of an earlier run.") from error
    if version != VERSION:
        raise UsageError(f"--resume {folder}: version {version} wrote this run; only that version can go on with it.")
    flags = {name: saved.get(name) for name in DEFAULTS if name not in OF_ONE_CALL}
    try:
        read = _parsed(_parser(""), [f"--{name}={value}" for name, value in flags.items()])
        wrong = [f"{name} is {value!r}" for name, value in flags.items() if getattr(read, name) != value]
        problems = [*wrong, *bounds(read)]
    except UsageError as error:  # of another type, or none of the choices
        problems = [str(error)]
    if problems:
        raise UsageError(f"--resume {folder}: {config} is damaged ({problems[0].rstrip('.')}); put back a copy of it.")
    return flags


def runs_code(name: str, value: Any) -> bool:
    """Whether this value of a flag can make a run execute code that somebody else put into its folder."""
    if name == "trust_remote_code":
        return bool(value)
    if name in SEAMS:
        return ":" in value
    return name == "engine_args" and bool(value)  # they may name a module or a file that vLLM runs


# ------------------------------------------------------------------------------------------------------------ argparse


def _parsed(parser: ArgumentParser, argv: Sequence[str]) -> Flags:
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        raise UsageError(f"unknown flag {name}; {advice_for(name)}")
    return Flags(**vars(options))


def advice_for(unknown: str) -> str:
    """The nearest flag to an unknown one."""
    for nearest in get_close_matches(unknown.lstrip("-").replace("-", "_").lower(), DEFAULTS, n=1):
        return f"did you mean --{nearest}?"
    return "--help lists all of them."


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without argparse's usage of sixty flags before it."""
        raise UsageError(message)


def _parser(description: str) -> ArgumentParser:
    parser = _Parser(
        prog="train.py", description=description, allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter
    )
    group = parser.add_argument_group()
    for item in fields(Flags):
        if item.metadata["section"]:
            group = parser.add_argument_group(item.metadata["section"])
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
