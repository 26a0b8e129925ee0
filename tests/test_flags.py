"""runtime/flags.py, command_line.py and before_torch.py: what a command line gives, what is refused, what is only noted.

Each wrong command line is one sentence that names the flag and the fix, before anything is written. Every flag, every
bound and every rule: tests/deep/test_flag_rules.py. What names your own code: tests/deep/test_seams.py.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import losses
import train
from runtime import flags
from runtime.command_line import parse_flags
from runtime.flags import DEFAULTS, VERSION, Flags, UsageError, check_flags

ROOT = Path(__file__).resolve().parents[1]


def refusal(words: str) -> str:
    """The sentence that refuses a command line."""
    with pytest.raises(UsageError) as caught:
        check_flags(parse_flags(words.split(), "about"))
    return str(caught.value)


def notes(words: str) -> list[str]:
    return check_flags(parse_flags(words.split(), "about"))


def test_a_command_line_by_hand():
    """Booleans are words, or nothing for true; dashes serve as underscores; what is not given is the recipe."""
    words = "--k 4 --lr 1e-6 --loss gspo --fp32_head false --overwrite --batch-prompts 8"
    given = {"k": 4, "lr": 1e-6, "loss": "gspo", "fp32_head": False, "overwrite": True, "batch_prompts": 8}
    assert vars(parse_flags(words.split(), "about")) == DEFAULTS | given
    assert parse_flags([], "about") == Flags()


def test_a_number_beyond_its_bound():
    assert refusal("--k -1") == "--k must be at least 0 and finite, not -1."
    assert refusal("--lr 0") == "--lr must be above 0 and finite, not 0.0."
    assert refusal("--max_hours inf") == "--max_hours must be at least 0 and finite, not inf."


def test_a_flag_that_would_do_nothing():
    """An ablation that changes nothing must not run for hours first."""
    assert (
        refusal("--eps_max 8 --loss dapo") == "--eps_max 8.0 does nothing with --loss dapo; leave out one of the two."
    )
    sentence = "--eps_max 8.0 does nothing with --loss lab.masks:icepop; leave out one of the two."
    assert refusal("--eps_max 8 --loss lab.masks:icepop") == sentence
    assert notes("--eps_max 8") == notes("--eps_high 0.28 --loss dapo") == []


def test_two_flags_that_do_not_go_together():
    assert refusal("--min_budget 19") == "--min_budget 19 is above --max_budget 18; lower it."
    sentence = "--rollouts 1 trains nothing: a group of one has no advantage; use 2 or more."
    assert refusal("--rollouts 1") == sentence
    sentence = "--dataset rows.jsonl needs --model, whose tokenizer encodes the prompts."
    assert refusal("--dataset rows.jsonl") == sentence


def test_a_name_of_no_loss():
    """What may be your own code is named with what there is."""
    assert refusal("--loss ppo") == "--loss must be cispo, gspo, dapo, grpo, tis or module:function, not ppo."
    missing = "nowhere cannot be imported (ModuleNotFoundError: No module named 'nowhere')"
    assert refusal("--loss nowhere:f") == f"--loss nowhere:f: {missing}."


HEAVY = ["torch", "numpy", "transformers", "vllm", "accelerate", "pyarrow"]
# Runs train.py with each command line, in a process where none of these can be imported.
WITHOUT = f"""
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys({HEAVY}))
for words in json.loads(sys.argv[1]):
    sys.argv, said = ["train.py", *words.split()], io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        print(json.dumps([end.code, said.getvalue()]))
"""


def test_what_is_seen_to_be_wrong_is_answered_before_torch_is_imported(tmp_path):
    """Which takes seconds. So the names of the losses stand in flags.py once more."""
    assert flags.LOSSES == tuple(losses.LOSSES)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "metrics.jsonl").write_text('{"config": {}}\n')
    data = f"--model {tmp_path} --dataset"
    expected = {
        "--help": "prompts per optimizer step",
        "--k -1": "--k must be at least 0 and finite, not -1.",
        "--engine nowhere:E": "--engine nowhere:E: nowhere cannot be imported (",
        "--engine vllm": "--engine vllm needs vLLM, but vLLM is not installed (",
        '--engine_args {"seed":1}': "--engine_args seed: use --seed,",
        f"--output_dir {tmp_path}": f"--output_dir {tmp_path} holds a run; give another folder,",
        f"--model {tmp_path}/gone": f"--model {tmp_path}/gone: there is no such folder,",
        f"{data} gone.jsonl": "--dataset gone.jsonl: there is no such file.",
        f"{data} a.jsonl,": "--dataset must be NAME[:CONFIG",
        f"{data} {tmp_path}/rows.jsonl --eval_dataset a=gone.jsonl": "--eval_dataset gone.jsonl: there is no such file.",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(list(expected))],
        cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    for (words, said), line in zip(expected.items(), done.stdout.splitlines(), strict=True):
        code, text = json.loads(line)
        assert (code, said in text) == (0 if words == "--help" else 2, True), text


def test_help_of_the_fit_needs_no_scipy():
    program = [sys.executable, "-X", "importtime", "fit_sigmoid.py", "--help"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--plot PNG" in done.stdout and re.search(r"\| +argparse$", done.stderr, re.M)
    assert not re.search(r"\| +scipy\.(special|optimize)$", done.stderr, re.M)


def test_a_flag_that_moved_says_where():
    assert refusal("--mask icepop") == "--mask has moved: use --loss lab.masks:icepop."
    assert refusal("--dataset=rare --k 2") == "--dataset rare has moved: use --task lab.tasks:rare."
    assert refusal("--size xs") == "--size has moved: use --task lab.tasks:graded_xs."


def test_a_mistyped_flag():
    assert refusal("--rolouts 8") == "unknown flag --rolouts; did you mean --rollouts?"
    assert refusal("--learning_rate 1e-5") == "unknown flag --learning_rate; --help lists all of them."
    assert refusal("--frobnicate") == "unknown flag --frobnicate; --help lists all of them."
    assert refusal("--k eight") == "argument --k: invalid int value: 'eight'"


def test_the_program_says_it_in_one_line(monkeypatch, tmp_path, capsys):
    """On stderr, with exit code 2, and the folder of the run is not made."""
    monkeypatch.chdir(tmp_path)
    assert train.main(["--k", "-1"]) == 2
    assert capsys.readouterr() == ("", "train.py: --k must be at least 0 and finite, not -1.\n")
    assert not any(tmp_path.iterdir())


def test_a_resumed_run_takes_its_flags_over(monkeypatch, tmp_path):
    """Flags given now win. A run of another version is refused, and so is code that the folder names."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()

    def resume(config: dict, words: str = ""):
        Path("run/config.json").write_text(json.dumps(DEFAULTS | config))
        return parse_flags(["--resume", "run", *words.split()], "about")

    flags = resume({"version": VERSION, "k": 3, "lr": 0.1, "overwrite": True}, "--lr 0.2")
    assert vars(flags) == DEFAULTS | {"k": 3, "lr": 0.2, "resume": "run", "output_dir": "run"}
    with pytest.raises(UsageError, match="^--resume run: version 0.14.0 wrote this run; only that version can go on"):
        resume({"version": "0.14.0", "k": 3})
    theirs = {"version": VERSION, "loss": "theirs:loss"}
    with pytest.raises(UsageError, match="^--loss theirs:loss can run code, which no --resume takes over; give it"):
        resume(theirs)
    assert resume(theirs, "--loss theirs:loss").loss == "theirs:loss"


def test_what_is_only_noted():
    """PPO-off-policy-k makes steps in rounds of k; a pretrained model has a learning rate of its own."""
    words = "--schedule ppo_off_policy --k 4 --max_steps 10"
    flags = parse_flags(words.split(), "about")
    assert check_flags(flags) == ["--max_steps 10 is rounded up to 12, a multiple of --k 4"] and flags.max_steps == 12
    assert Flags().lr == 7e-4 and parse_flags("--dataset rows.jsonl --model org/model".split(), "about").lr == 1e-6


def test_help_names_every_flag_under_its_concept(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_flags(["--help"], "about")
    out = capsys.readouterr().out
    titles = [out.index(title) for title in ("The run:", "Length control (section 2).", "Loss, averages")]
    assert titles[0] < titles[1] < out.rindex("--min_budget") < titles[2]
    for item in fields(Flags):
        assert f"--{item.name}" in out and len(item.metadata["help"]) > 10
