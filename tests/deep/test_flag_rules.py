"""Flags: every bound, every rule with its neighbor that starts, folders, engines, and what a resume takes over."""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.before_torch import check_engine
from runtime.command_line import MOVED, parse_flags
from runtime.engine_flags import engine_options

import train
from runtime import engine_flags
from runtime.flags import BOUNDS, DEFAULTS, VERSION, Flags, UsageError, check_flags, new_pacer
from runtime.folder import check_folder

ROOT = Path(__file__).resolve().parents[2]
DATA = "--dataset rows.jsonl --model org/model "  # rows of one's own


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Reads and checks a command line in an empty folder: (flags or None, the sentence or the notes)."""
    monkeypatch.chdir(tmp_path)

    def call(line: str):
        try:
            flags = parse_flags(line.split(), "about")
            messages = check_flags(flags)
            check_engine(flags)
            check_folder(flags)
            return flags, messages
        except UsageError as error:
            return None, str(error)

    return call


def write_config(folder: str, **flags) -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps({"version": VERSION} | DEFAULTS | flags))


def test_resume_takes_over_the_flags_and_given_ones_win(command):
    """But for what is asked of one command only."""
    saved = {"k": 3, "lr": 0.1, "fp32_head": False, "reward": "math", "seed": 5}
    write_config("run", **saved, output_dir="elsewhere", overwrite=True)
    flags = parse_flags(["--resume", "run", "--lr", "0.2"], "")
    assert vars(flags) == DEFAULTS | saved | {"lr": 0.2, "resume": "run", "output_dir": "run"}
    assert parse_flags([], "") == Flags()  # nothing of it stays behind
    for other in ("elsewhere", DEFAULTS["output_dir"]):
        assert command(f"--resume run --output_dir {other}")[1].startswith(f"--output_dir {other}: --resume goes on")
    assert command("--output_dir run/ --resume run --reward task")[0].k == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("reward", "mine:f"),
        ("loss", "mine:f"),
        ("engine", "mine:E"),
        ("task", "mine:t"),
        ("engine_args", '{"worker_cls": "mine.Worker"}'),
    ],
)
def test_no_resume_takes_over_what_can_run_code(command, name, value):
    """A folder from somebody else must not run their code; who gives the flag again trusts it."""
    write_config("run", **{name: value})
    assert command("--resume run")[1].startswith(f"--{name} {value} can run code, which no --resume takes over")
    again = parse_flags(["--resume", "run", f"--{name}", str(value).lower() if value is True else value], "")
    assert getattr(again, name) == value


def test_a_folder_of_another_version_or_of_none_is_one_sentence(command):
    write_config("new", version="9.0.0")
    assert re.fullmatch("--resume new: version 9.0.0 wrote this run; only that version .*", command("--resume new")[1])
    Path("old").mkdir()
    Path("old/config.json").write_text(json.dumps({"k": 3}))  # until 0.13
    assert "version 0.13 or older wrote this run" in command("--resume old")[1]
    for content in (b"", b"[1]", b"\xff"):
        Path("old/config.json").write_bytes(content)
        assert re.fullmatch("--resume old: old/config.json cannot be read; .*", command("--resume old")[1])
    assert "missing/config.json cannot be read" in command("--resume missing")[1]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--zzz=3", "unknown flag --zzz; --help lists all of them."),
        ("--eps-maxx", "unknown flag --eps-maxx; did you mean --eps_max?"),
        ("--rolouts", "unknown flag --rolouts; did you mean --rollouts?"),
        ("--loss=ppo", "--loss must be cispo, gspo, dapo, grpo, tis or module:function, not ppo."),
        ("--k=eight", "argument --k: invalid int value: 'eight'"),
        ("--fp32_head=maybe", "argument --fp32_head/--fp32-head: must be true or false, not maybe"),
        ("--model=/a\nb\x1b", "--model /a\\nb\\x1b: there is no such folder,"),
        ("--model=~/a", "--model ~/a: there is no such folder, and a hub id is NAME or OWNER/NAME."),
        ("--model=a/b", "--engine torch samples from"),
        ("--rollouts\n=3", "unknown flag --rollouts\\n; did you mean --rollouts?"),
        ("--k=a\nb", "argument --k: invalid int value: 'a\\nb'"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capsys, word, sentence):
    """Not argparse's usage of every flag before it."""
    monkeypatch.chdir(tmp_path)
    assert train.main(["--engine", "torch", word]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"train.py: {sentence}") and err.count("\n") == 1
    assert not any(tmp_path.iterdir())  # before anything is written


def test_the_readmes_command_for_your_data_is_whole(command):
    """No flag is missing: the notes have nothing to add."""
    [words] = re.findall(r"`python train.py (--model MODEL .*?)`", (ROOT / "README.md").read_text())
    flags, notes = command(words)
    assert flags.pretrained and notes == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b"\xff\x00", b"[" * 100_000, None])
def test_a_damaged_model_folder_is_one_sentence(command, content):
    """Cut, empty, of another kind, binary, or not there."""
    Path("mine").mkdir()
    if content is not None:
        Path("mine/config.json").write_bytes(content)
    assert command("--engine torch --model mine")[1].startswith("--engine torch samples from")


def test_a_long_value_is_not_repeated_whole(command):
    """5,000 characters, and brackets that no JSON reader follows so deep."""
    for words in (f"--loss {'x' * 5000}", f"--{'x' * 5000}", f"--engine_args {'[' * 3000}"):
        sentence = command(words)[1]
        assert len(sentence) < 900 and re.match("--loss must be|unknown flag --xxx|--engine_args must be", sentence)


# A command line that is refused | words of the sentence, which names the first flag | its neighbor that starts
REFUSED = """
--report_to wandb | pip install wandb, or leave it out
--k 0 --schedule ppo_off_policy | k >= 1 | --k 1 --schedule ppo_off_policy
--rollouts 16 --max_num_seqs 15 | raise --max_num_seqs | --rollouts 16 --max_num_seqs 16
--min_ready 129 | from 0 to 128 | --min_ready 128
--min_ready 1 --k 0 | from 0 to 0 | --min_ready 0 --k 0
--min_ready 1 --schedule ppo_off_policy | from 0 to 0
--min_budget 19 | above --max_budget 18 | --min_budget 18
--max_budget 13 | above --max_budget 13 | --max_budget 0 --length_control none
--penalty_window 0 --length_control penalty | --answer_budget = 22 | --penalty_window 1 --length_control penalty
--penalty_window 23 --length_control penalty | --answer_budget = 22 | --penalty_window 22 --length_control penalty
--rollouts 1 | trains nothing | --rollouts 1 --max_steps 0
--rollouts 1 --kl_coef 0.1 | trains nothing | --rollouts 1 --kl_coef 0.1 --zero_variance keep
--rollouts 1 --entropy_coef 0.1 --zero_variance replace | trains nothing | --batch_prompts 1 --rollouts 2
--zero_variance replace --reward shuffled | --reward task | --zero_variance replace
--reward math | judges data sets | --reward shuffled
--eval_dataset a=b.jsonl | needs a data set
--dataset nowhere.jsonl | --model
--model . --dataset rows.jsonl --engine torch | leave out --model, or --engine | --engine torch --dtype bfloat16
--dataset discover --model . | leave out --model | --dataset discover
--engine_args max_num_seqs=8 | JSON object
--engine_args [1] | JSON object
--engine_args {"max_num_seqs":8} | use --max_num_seqs
--engine_args {"hf_overrides":null} | must be a JSON object
--eps_max 8 --loss dapo | with --loss dapo | --eps_max 5 --loss dapo
--eps_low 0.2 | with --loss cispo | --eps_low 0.1 --loss grpo
--eps_high 0.28 | with --loss cispo | --eps_high 0.28 --loss dapo
--eps_high 0.28 --loss grpo | with --loss grpo | --eps_high 0.3 --loss tis
--eps_max 8 --loss lab.masks:icepop | with --loss lab.masks:icepop | --loss lab.masks:icepop
--penalty_window 4 | with --length_control interruption | --penalty_window 4 --length_control penalty_all
--min_ready 64 --zero_variance replace | with --zero_variance replace
--engine_args {"block_size":1} --engine torch | with --engine torch
--thinking false DATA | add --length_control none or penalty | --thinking false --length_control penalty DATA
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED)
def test_bad_input_ends_with_one_sentence_that_names_the_flag(command, row):
    line, words, *starts = row.replace("DATA", DATA).split(" | ")
    flags, sentence = command(line)
    assert flags is None and line.split()[0] in sentence and words in sentence and "\n" not in sentence
    assert all(command(line)[0] is not None for line in starts)
    assert not any(Path.cwd().iterdir())  # before anything is written


@pytest.mark.parametrize("item", dataclasses.fields(Flags), ids=lambda item: item.name)
def test_every_bound_is_kept(item):
    """At the bound, next to it, and for what is no finite number."""
    for word, bound in item.metadata["bounds"].items():
        beyond = bound + 1 if word == "below" else bound - 1
        for value in [beyond, float("nan"), float("inf"), *([] if word == "at_least" else [bound])]:
            with pytest.raises(UsageError, match=f"^--{item.name} must be .* and finite"):
                check_flags(Flags(output_dir="/nowhere/run", **{item.name: value}))
    assert item.metadata["bounds"].keys() <= BOUNDS.keys()


def test_an_existing_run_is_not_overwritten(command):
    """An empty folder is not a run."""
    Path("runs/demo").mkdir(parents=True)
    assert command("")[0]
    Path("runs/demo/metrics.jsonl").write_text('{"config": {"k": 3}}\n{"step"')
    sentence = command("")[1]
    assert all(words in sentence for words in ("--output_dir runs/demo", "--overwrite", "--resume runs/demo"))
    assert command("--overwrite true")[0] and command("--output_dir runs/other")[0]
    write_config("runs/demo", k=3)
    assert command("--resume runs/demo")[0].k == 3


def test_a_folder_of_other_things_is_never_a_run_folder(command):
    """`--output_dir . --overwrite true` must not empty somebody's folder, with a model's config.json or somebody's log
    in it, too."""
    Path("thesis.txt").write_text("all of it")
    Path("config.json").write_text('{"model_type": "llama"}')
    for log in (b"", b'{"loss": 1}', b"2", b"\xff"):
        Path("metrics.jsonl").write_bytes(log + b"\n")
        for line in (". --overwrite true", ".", "thesis.txt"):
            flags, sentence = command(f"--output_dir {line}")
            assert flags is None and "is not empty and holds no run" in sentence


def test_overwrite_does_not_delete_the_model_it_starts_from(command, tmp_path):
    """Through a link, too; a neighbor of the same beginning may stay."""
    for model in ("run/model", "runner/model"):
        Path(model).mkdir(parents=True)
    Path("link").symlink_to("run")
    Path("run/metrics.jsonl").write_text('{"config": {}}\n')
    line = f"--overwrite true --output_dir {tmp_path}/run --model"
    assert command(f"{line} runner/model")[0]
    for inside in ("run/model", "link/model"):
        assert f"--overwrite would delete --model {inside}" in command(f"{line} {inside}")[1]


NOT_THERE = "vLLM is not installed (pip install it)"


@pytest.mark.parametrize(("line", "problem", "engine", "notes"), [
    ("", "", "vllm", []),
    ("", NOT_THERE, "torch", [f"--engine torch, since {NOT_THERE}"]),
    ("--engine torch", NOT_THERE, "torch", []),
    ("--resume run", "", "torch", []),  # a run keeps its engine, also where vLLM has come meanwhile
])  # fmt: skip
def test_auto_takes_vllm_or_says_why_not(monkeypatch, tmp_path, line, problem, engine, notes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_flags, "vllm_problem", lambda: problem)
    write_config("run", engine="torch")
    flags = parse_flags(line.split(), "")
    assert engine_flags.choose_engine(flags) == notes and flags.engine == engine


@pytest.mark.parametrize("words", ["--engine vllm", "--model run", "--resume run"])
def test_what_needs_vllm_is_refused_without_it(monkeypatch, tmp_path, capsys, words):
    """One sentence and exit code 2, before anything is written; so is a resumed run that sampled with vLLM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_flags, "vllm_problem", lambda: NOT_THERE)
    write_config("run", engine="vllm", model_type="llama")
    assert train.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"train.py: --{words.split()[0][2:].replace('resume', 'engine')}") and err.count("\n") == 1
    assert err.endswith(f"needs vLLM, but {NOT_THERE}.\n") and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_mistyped_model_is_refused_before_the_engine_that_it_would_need(monkeypatch, tmp_path, capsys):
    """Whoever mistypes --model must not be sent to install vLLM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_flags, "vllm_problem", lambda: NOT_THERE)
    Path("empty").mkdir()
    assert train.main(["--model", "empty"]) == 2
    assert capsys.readouterr().err.startswith("train.py: --model empty does not load (")


def test_a_folder_that_holds_a_run_hides_no_other_fault(command):
    write_config("run")
    Path("run/metrics.jsonl").write_text('{"config": {}}\n')
    assert "holds a run" in command("--output_dir run")[1]
    for line, sentence in (("--lr -1", "--lr must be"), ('--engine_args {"seed":1}', "--engine_args seed")):
        assert sentence in command(f"--output_dir run {line}")[1]


def test_a_vllm_that_cannot_be_imported_is_named_with_its_cause(monkeypatch, tmp_path):
    """As with torchvision's CUDA build beside torch's CPU build, which from then on is not there for transformers."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("vllm", "torchvision"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    cause = "RuntimeError: operator torchvision::nms does not exist"
    assert f"vLLM cannot be imported: {cause} (pip install" in engine_flags.vllm_problem()
    assert f"torchvision is broken: {cause} (pip uninstall" in engine_flags.torchvision_problem.__wrapped__()
    assert sys.modules["torchvision"] is None
    monkeypatch.delitem(sys.modules, "torchvision")


TIS = "--loss tis: every batch gets one update, so pi_old is pi, the clip never acts and it equals --loss cispo --eps_max 2"
LENGTHS = "--min_budget 700 --max_budget 900 --answer_budget 100 "
NOTED = {  # a command line -> words of its only note; "" for none
    "--loss tis": TIS,
    "--loss tis --schedule ppo_off_policy --k 1 --max_steps 8": TIS,
    "--loss tis --schedule ppo_off_policy --k 2 --max_steps 8": "",
    "--loss gspo": "--aggregation prompt: GSPO's own paper averages by --aggregation sample",
    "--loss gspo --aggregation sample": "",
    "--schedule ppo_off_policy --k 4 --max_steps 10": "--max_steps 10 is rounded up to 12",
    "--schedule ppo_off_policy --k 4 --max_steps 12": "",
    "--k 4 --max_steps 10": "",
    f"--max_budget 900 {DATA}": "--min_budget 14 (usual for a real model: 768 to 10000), --answer_budget 4",
    f"--length_control none {DATA}": "task: --max_budget 18 (usual for a real model: 1024 to 12000)",
    LENGTHS + DATA: ": --dtype float32 (usual for a real model: bfloat16)",
    LENGTHS + "--dtype bfloat16 " + DATA: "",
}


@pytest.mark.parametrize("line", NOTED)
def test_what_works_otherwise_than_its_name_promises_is_noted(command, line):
    flags, notes = command(line)
    assert len(notes) == bool(NOTED[line]) and NOTED[line] in "".join(notes)
    assert check_flags(flags) == [note for note in notes if "rounded" not in note]  # it was rounded in place


@pytest.mark.parametrize(
    ("line", "lr"), [("--model runs/demo/model", 7e-4), (DATA, 1e-6), ("--lr=1e-6", 1e-6), ("--resume old", 5e-4)]
)
def test_a_pretrained_model_has_a_learning_rate_of_its_own(command, line, lr):
    """7e-4 is for the built-in task, also where its model is given as a folder; a data set is for a pretrained model. A
    given value wins, and that of the run before a resume."""
    write_config("old", dataset="a.jsonl", model="org/model", lr=5e-4)
    flags, _ = command(line)
    assert flags.lr == lr


def test_no_flag_is_dead():
    """Every flag is read outside its own definition and the checks; two functions beside these build what a run has."""
    files = [ROOT / "train.py", *(ROOT / "runtime").glob("*.py")]
    source = "".join(file.read_text() for file in files if file.name != "flags.py")
    source += inspect.getsource(engine_options) + inspect.getsource(new_pacer)
    dead = [name for name in DEFAULTS if not re.search(rf"\bflags\.{name}\b", source)]
    assert dead == []


@given(st.lists(st.tuples(st.sampled_from([*DEFAULTS, *MOVED, "x"]), st.text(max_size=6)), max_size=4))
def test_any_command_line_is_read_or_refused_in_one_line(pairs):
    """Whatever follows the names: flags, or one line that can be printed and has no traceback in it."""
    words = [f"--{name}={value}" for name, value in pairs if name != "resume"]
    try:
        flags = parse_flags(words, "about")
        check_flags(flags)
    except UsageError as error:
        assert str(error).isprintable() and len(str(error)) > 10
    else:
        assert isinstance(flags, Flags)


GONE = ("mask", "size", "penalty_on", "weight_channel", "zero_variance_filter")


@pytest.mark.parametrize("key", MOVED)
def test_every_flag_that_moved_says_where_and_what_it_says_is_there(key):
    """Both ways to write a value. A flag that is still one has moved values only."""
    name, _, value = key.partition(" ")
    value = value or "xs"
    for words in ([f"--{name}={value}"], [f"--{name.replace('_', '-')}", value]):
        with pytest.raises(UsageError, match=f"^--{key} has moved: use ") as caught:
            parse_flags(words, "about")
    assert (name in DEFAULTS) == (key != name and name not in GONE)
    for flag_name in re.findall(r"--(\w+)", str(caught.value).split("use ")[1]):
        assert flag_name in DEFAULTS
    for module, names in re.findall(r"(lab\.\w+):(\w+)", str(caught.value)):
        assert names == "xs" or hasattr(importlib.import_module(module), names)


@pytest.mark.parametrize(
    ("line", "packages"),
    [
        ("--dataset rows.jsonl --reward exact", ""),
        ("--dataset rows.jsonl --reward mine:f", ""),
        ("--dataset rows.jsonl", "math-verify"),
        ("--dataset rows.jsonl --reward exact --eval_dataset other=my/set", "datasets"),
        ("--dataset a.jsonl:exact,my/set", "datasets math-verify"),
    ],
)
def test_only_what_the_rows_need_must_be_installed(command, monkeypatch, line, packages):
    monkeypatch.setattr("runtime.flags.find_spec", lambda name: None if name != "resource" else name)
    _, said = command(f"{line} --model org/model")
    assert (f"pip install {packages}, or" in str(said)) if packages else ("pip install" not in str(said))
