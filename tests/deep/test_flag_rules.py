"""runtime/flags.py: every bound, the borders of the rules, and what no command line can bring about. tests/test_flags.py has
the rules."""

import importlib
import inspect
import re
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import flags as flags_module
from runtime.flags import DEFAULTS, MOVED, Flags, UsageError, check_flags, parse_flags
from runtime.folder import check_folder

ROOT = Path(__file__).resolve().parents[2]

# A command line that is refused | its neighbor that is not
BORDERS = """
--k 0 --schedule ppo_off_policy | --k 1 --schedule ppo_off_policy
--min_ready 129 | --min_ready 128
--min_ready 1 --k 0 | --min_ready 0 --k 0
--min_ready 1 --schedule ppo_off_policy | --schedule ppo_off_policy
--penalty_window 0 --length_control penalty | --penalty_window 1 --length_control penalty
--penalty_window 23 --length_control penalty_all | --penalty_window 22 --length_control penalty_all
--rollouts 1 | --rollouts 1 --max_steps 0
--rollouts 1 --kl_coef 0 | --rollouts 1 --entropy_coef 0.1
--reward math | --reward shuffled
--dataset discover --model . | --dataset discover
--eps_low 0.2 | --eps_low 0.2 --loss gspo
--eps_high 0.28 --loss grpo | --eps_high 0.3 --loss tis
--eps_max 8 --loss lab.masks:icepop | --loss lab.masks:icepop
--engine_args {"block_size":1} --engine torch | --engine_args {"block_size":1} --engine lab.fast_vllm:FastEngine
--engine_args {"hf_overrides":{}} | --engine_args {}
--engine_args max_num_seqs=16 | --max_num_seqs 16
""".strip().splitlines()


@pytest.mark.parametrize("row", BORDERS)
def test_a_rule_ends_where_it_says(row):
    refused, accepted = row.split(" | ")
    with pytest.raises(UsageError, match="^--"):
        check_flags(parse_flags(refused.split(), "about"))
    check_flags(parse_flags(accepted.split(), "about"))


@pytest.mark.parametrize("item", fields(Flags), ids=lambda item: item.name)
def test_every_bound_is_kept(item):
    """At the bound, next to it, and for what is no finite number."""
    for word, bound in item.metadata["bounds"].items():
        beyond = bound + 1 if word == "below" else bound - 1
        for value in [beyond, float("nan"), float("inf"), *([] if word == "at_least" else [bound])]:
            with pytest.raises(UsageError, match=f"^--{item.name} must be .* and finite"):
                check_flags(Flags(**{item.name: value}))


@pytest.mark.parametrize(("model", "inside"), [("run/model", True), ("link/model", True), ("runner/model", False)])
def test_overwrite_does_not_delete_the_model_it_starts_from(monkeypatch, tmp_path, model, inside):
    """Through a link, too; a neighbor of the same beginning may stay."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run/model", "runner/model"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("run")
    for name in ("metrics.jsonl", "config.json"):
        Path("run", name).touch()
    with pytest.raises(UsageError, match=f"would delete --model {model}") if inside else nullcontext():
        check_folder(Flags(output_dir=f"{tmp_path}/run", overwrite=True, model=model))


def test_no_flag_is_dead():
    """Every flag is read outside its own definition and the checks; two functions beside these build what a run has."""
    files = [ROOT / "train.py", *(ROOT / "runtime").glob("*.py")]
    source = "".join(file.read_text() for file in files if file.name != "flags.py")
    source += inspect.getsource(flags_module.engine_options) + inspect.getsource(flags_module.new_pacer)
    assert [name for name in DEFAULTS if not re.search(rf"\bflags\.{name}\b", source)] == []


@given(st.lists(st.tuples(st.sampled_from([*DEFAULTS, *MOVED, "x"]), st.text(max_size=6)), max_size=4))
def test_any_command_line_is_read_or_refused(pairs):
    """Whatever follows the names: flags, or one sentence."""
    words = [f"--{name}={value}" for name, value in pairs if name != "resume"]
    try:
        check_flags(parse_flags(words, "about"))
    except UsageError as error:
        assert len(str(error)) > 10


@pytest.mark.parametrize("name", MOVED)
def test_what_a_flag_that_moved_points_to_is_there(name):
    assert name not in DEFAULTS
    for flag_name in re.findall(r"--(\w+)", MOVED[name]):
        assert flag_name in DEFAULTS
    for module, _ in re.findall(r"(lab\.\w+):(\w+)", MOVED[name]):
        importlib.import_module(module)
    for page in re.findall(r"\w+/\w+\.(?:md|py)", MOVED[name]):
        assert (ROOT / page).exists()
