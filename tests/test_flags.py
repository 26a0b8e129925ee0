"""runtime/flags.py and runtime/flag_checks.py: what a command line gives, what is refused, and what is only noted."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train
from runtime import flag_checks
from runtime.flag_checks import HOLDS, check_flags, lr_note
from runtime.flags import DEFAULTS, SECTIONS, Flags, UsageError, parse_flags
from runtime.gone import GONE

ROOT = Path(__file__).resolve().parent.parent
DATA = "--dataset rows.jsonl --model org/model "  # rows of one's own


def flags_with(**changes) -> Flags:
    """The defaults with these changes, in a folder that does not exist."""
    return Flags(**{"output_dir": "/nowhere/run"} | changes)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Reads and checks a command line in an empty folder: (flags or None, the sentence or the notes)."""
    monkeypatch.chdir(tmp_path)

    def call(line: str):
        try:
            flags = parse_flags(line.split(), "about")
            return flags, check_flags(flags)
        except UsageError as error:
            return None, str(error)
        except SystemExit as end:  # argparse prints its usage before the sentence
            assert end.code == 2
            return None, capsys.readouterr().err.strip().splitlines()[-1]

    return call


def test_a_command_line_by_hand():
    """Booleans are words, or nothing for true; dashes serve as underscores."""
    words = "--k 4 --lr 1e-6 --loss gspo --fp32_head false --share_prompts --batch-prompts 8 --dynamic_sampling true"
    flags = parse_flags(words.split(), "")
    assert (flags.k, flags.lr, flags.loss, flags.batch_prompts) == (4, 1e-6, "gspo", 8)
    assert (flags.fp32_head, flags.share_prompts, flags.dynamic_sampling, flags.overwrite) == (False, True, True, False)
    assert parse_flags([], "") == Flags() and vars(Flags()) == DEFAULTS and check_flags(flags_with()) == []
    names = [item.name for section in SECTIONS for item in dataclasses.fields(section)]
    assert list(DEFAULTS) == names and len(names) == len(set(names))  # config.json is in the order of --help


def test_resume_takes_over_the_flags_and_given_ones_win(command):
    """An unknown name is passed over, and what was asked of one call only is not asked again."""
    Path("run").mkdir()
    saved = {"k": 3, "lr": 0.1, "fp32_head": False, "unknown": 1, "output_dir": "elsewhere", "overwrite": True}
    Path("run/config.json").write_text(json.dumps(saved))
    flags = parse_flags(["--resume", "run", "--lr", "0.2"], "about")
    assert (flags.k, flags.lr, flags.fp32_head, flags.batch_prompts) == (3, 0.2, False, 16)
    assert flags.output_dir == flags.resume == "run" and not flags.overwrite and not hasattr(flags, "unknown")
    for other in ("elsewhere", DEFAULTS["output_dir"]):
        said = command(f"--resume run --output_dir {other}")[1]
        assert said.startswith(f"--output_dir {other}: --resume goes on in run; ")
    assert command("--output_dir run/ --resume run")[0].k == 3
    assert re.search(r"--resume missing.*config\.json", command("--resume missing")[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("unsafe_code", True),
        ("reward", "runs.evil:f"),
        ("reward", "math,evil:f"),
        ("engine_args", '{"worker_extension_cls": "evil.Worker"}'),
        ("engine_args", '{"block_size": 64, "trust_remote_code": true}'),
        ("engine_args", '{"logits_processors": ["evil:P"]}'),
        ("engine_args", '{"kv_transfer_config": {"kv_connector_module_path": "evil"}}'),
        ("engine_args", '{"plugin": "/tmp/evil"}'),
    ],
)
def test_what_runs_code_is_never_taken_over_from_a_folder(tmp_path, name, value):
    """A folder may come from elsewhere: a resume ends with one sentence until the flag is given again."""
    (tmp_path / "config.json").write_text(json.dumps({name: value}))
    given = str(value).lower() if isinstance(value, bool) else value
    with pytest.raises(UsageError, match=rf"^--{name} .* runs code, which no --resume takes over; give --{name} again"):
        parse_flags(["--resume", str(tmp_path)], "")
    assert getattr(parse_flags(["--resume", str(tmp_path), f"--{name}", given], ""), name) == value
    plain = {"engine_args": '{"block_size": 64, "cache": "fp8", "x": 1.5}', "reward": "exact", "lr": 1}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert vars(parse_flags(["--resume", str(tmp_path)], "")).items() >= plain.items()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=20) | st.dictionaries(st.sampled_from([*DEFAULTS, *GONE, "x"]), JSON, max_size=2))
@example(b"[" * 99999)
@example(b'{"k": null}')
@example({"k": True})
@example(b'{"lr": 1%s}' % (b"0" * 400))
@example({"lr": float("inf")})
@example({"model": "\ud800"})
@example({"model": "a\0"})
@example({"engine_args": "x=1"})
def test_any_config_of_a_folder_gives_flags_or_one_sentence(command, content):
    Path("run").mkdir(exist_ok=True)
    Path("run/config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    flags, said = command("--resume run")
    assert flags or (said.startswith("--") and said.endswith(".") and said.isprintable())
    assert all(type(value) is type(DEFAULTS[name]) for name, value in vars(flags or Flags()).items())
    assert parse_flags([], "") == Flags()  # nothing of it stays behind


@pytest.mark.parametrize("name", GONE)
def test_a_flag_that_is_gone_is_refused_with_what_stands_instead(command, name):
    """In a run's folder its default is passed over, and another value is one sentence."""
    default, instead = GONE[name]
    for line in (f"--{name} 5", f"--{name.replace('_', '-')}=5", f"--k 3 --{name} 5"):
        assert command(line)[1].endswith(f" is gone; instead there is {instead}.")
    assert command(f"--prompt_template {name} {DATA}")[0] is not None  # a value is no flag
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps({name: default, "k": 2}))
    flags, _ = command("--resume run")
    assert flags.k == 2 and not hasattr(flags, name)
    Path("run/config.json").write_text(json.dumps({name: "other"}))
    assert re.search(f"--{name} 'other' is gone; there is .*; take it out of run/c", command("--resume run")[1])


# A command line that is refused | words of the sentence, which names the first flag | its neighbor that starts
REFUSED = """
--loss ppo | invalid choice
--lamda 1 | unrecognized
--fp32_head maybe | true or false | --fp32_head
--k eight | invalid int
--k -1 | at least 0 | --k 0
--seed 4294967296 | below 4294967296 | --seed 4294967295
--lr nan | above 0
--lr inf | above 0
--report_to wandb | pip install wandb, or leave it out
--pass_rate_threshold 0 | above 0 | --pass_rate_threshold 1.1
--review 1 | below 1 | --review 0.2
--review 0.1 --pass_rate_threshold 2 | does nothing without prompts that retire | --review 0.1
--vocabulary 46 | at least 47
--k 0 --schedule ppo_off_policy | at least 1 with --schedule | --k 1 --schedule ppo_off_policy
--rollouts 16 --max_num_seqs 15 | raise --max_num_seqs | --rollouts 16 --max_num_seqs 16
--min_ready 129 | = 128 groups | --min_ready 128
--min_ready 1 --k 0 | = 0 groups | --min_ready 0 --k 0
--min_ready 1 --schedule ppo_off_policy | --schedule pipeline
--min_budget 19 | above --max_budget 18 | --min_budget 18
--max_budget 13 | above --max_budget 13 | --max_budget 0 --length_control none
--penalty_window 0 --length_control penalty | --answer_budget = 22 | --penalty_window 1 --length_control penalty
--penalty_window 23 --length_control penalty | --answer_budget = 22 | --penalty_window 22 --length_control penalty
--rollouts 1 | trains nothing | --rollouts 1 --max_steps 0
--rollouts 1 --kl_coef 0.1 | trains nothing | --rollouts 1 --kl_coef 0.1 --zero_variance_filter false
--rollouts 1 --entropy_coef 0.1 --dynamic_sampling true | trains nothing | --batch_prompts 1 --rollouts 2
--dynamic_sampling true --reward shuffled | --reward task | --dynamic_sampling true
--reward math | judges data sets | --reward shuffled
--dataset nowhere.jsonl | --model
--model /nowhere/model | no config.json
--resume /nowhere/run | earlier run
--engine torch --dtype bfloat16 | leave out --model and --dtype | --engine torch
--model . --dataset rows.jsonl --engine torch | leave out --model and --dtype | --engine torch
--engine_args max_num_seqs=8 | JSON object
--engine_args {"max_num_seqs":8} | use --max_num_seqs
--engine_args {"max_model_len":64} | use --max_budget
--engine_args {"dtype":"float16"} | use --dtype
--engine_args {"hf_overrides":null} | must be a JSON object
--eps_max 8 --loss dapo | --loss cispo | --eps_max 5 --loss dapo
--eps_low 0.2 | --loss dispo, gspo, dapo | --eps_low 0.1 --loss grpo
--eps_high 0.28 | --loss dispo, gspo, dapo | --eps_high 0.28 --loss dapo
--eps_high 0.28 --loss grpo | symmetric | --eps_high 0.3 --loss tis
--mask drop | invalid choice | --mask deepseek
--mask truncate | --loss cispo caps itself | --mask truncate --loss dapo
--mask truncate --loss gspo | use dapo or grpo | --mask truncate --loss grpo --mask_high 3
--mask_low 0.5 --mask dppo | icepop, sequence or geometric | --mask_low 0.4 --mask icepop
--mask_high 0.5 | a --mask | --mask_high 0.5 --mask dppo_kl
--mask_low 5.1 --mask icepop | low <= high | --mask_low 5.1 --mask_high 5.1 --mask icepop
--mask_high nan --mask m2po | at least -1 | --mask_high 0 --mask m2po
--normalize_advantages maxrl --length_control penalty --penalty_on all | pass rate | --normalize_advantages maxrl
--penalty_on all --length_control none | --length_control penalty | --penalty_on all --length_control penalty
--zero_variance_filter false --dynamic_sampling true | --dynamic_sampling false
--engine_args {"block_size":1} --engine torch | --engine vllm
--size xl --model a/b | no --model
--vocabulary 100 --model a/b | no --model
--difficulty easy --dataset chain | --dataset graded
--prompt_order easy_first --dataset chain | is for --dataset graded | --prompt_order easy_first
--prompt_order file | for data sets without weights | --prompt_order shuffled
--thinking true | a --dataset | --thinking true --end_of_thinking DONE DATA
--held_out 5 | a --dataset | --held_out 5 DATA
--eval_dataset a=b.jsonl | a --dataset
--interruption_phrase x --length_control none DATA | --length_control interruption
--thinking false DATA | add --length_control none or penalty | --thinking false --length_control penalty DATA
--end_of_thinking x --thinking false --length_control none DATA | for models that think
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
    bounds = item.metadata["bounds"]
    assert set(bounds) <= set(HOLDS) and (not bounds or item.type in (int, float))
    for word, bound in bounds.items():
        beyond = bound - 1 if word in ("at_least", "above") else bound + 1
        bad = {"at_least": [beyond], "above": [beyond, bound], "below": [beyond, bound]}[word]
        for value in bad:
            with pytest.raises(UsageError, match=f"^--{item.name} must be .*{word.replace('_', ' ')} "):
                check_flags(flags_with(**{item.name: value}))


def test_no_value_breaks_a_refusal(monkeypatch, tmp_path, capsys):
    """One line and exit code 2, by our rules or by argparse, whatever is given: ends of lines and escape sequences are
    written as Python does."""
    monkeypatch.chdir(tmp_path)
    paths = "output_dir model lora_adapter resume"
    for value, names in (
        ("/a\nb\x1b[1m", "model resume dataset engine_args k fp32_head loss lamda"),
        ("x" * 256, paths),
        ("x/" * 2000, paths),
        ("\udcff/a", paths),
        ("[" * 99999, "engine_args"),
        (str(10**400), "seed k lr max_num_seqs warmup_steps max_hours"),
        ("-2", "k max_tokens lr"),
    ):
        for name in names.split():
            try:
                code = train.main([f"--{name}={value}"])
            except SystemExit as end:  # of argparse
                code = end.code
            last = capsys.readouterr().err.removesuffix("\n").split("\n")[-1]
            assert code == 2 and last.startswith("train.py: ") and last.isprintable() and f"--{name}" in last
    assert not any(tmp_path.iterdir())


def test_an_existing_run_is_not_overwritten(command):
    """An empty folder is not a run."""
    Path("runs/demo").mkdir(parents=True)
    assert command("")[0]
    Path("runs/demo/config.json").write_text(json.dumps({"k": 3, "max_steps": 9, "output_dir": "runs/demo"}))
    _, said = command("")
    assert all(words in said for words in ("--output_dir runs/demo", "--overwrite", "--resume runs/demo"))
    assert command("--overwrite true")[0] and command("--output_dir runs/other")[0]
    assert command("--resume runs/demo")[0].k == 3
    assert "--overwrite deletes the run that --resume" in command("--resume runs/demo --overwrite true")[1]


def test_a_folder_of_other_things_is_never_a_run_folder(command):
    """`--output_dir . --overwrite true` must not empty somebody's folder, with a model's config.json or somebody's log
    in it, too. A run whose config.json is lost is one by its log."""
    Path("thesis.txt").write_text("all of it")
    Path("link").symlink_to("gone")
    for config, metrics in (("", ""), ('{"model_type": "llama"}', '{"loss": 1}'), ("[1]", "[2]"), ("{", "\xff")):
        Path("config.json").write_text(config)
        Path("metrics.jsonl").write_text(metrics + "\n")
        for line in (". --overwrite true", ".", "thesis.txt", "thesis.txt/x", "link"):
            flags, said = command(f"--output_dir {line}")
            assert flags is None and line.removesuffix(" --overwrite true") in said and "holds no run" in said
    assert Path("thesis.txt").read_text() == "all of it"
    Path("metrics.jsonl").write_text('{"config": {"k": 3}}\n{"step"')
    assert command("--output_dir . --overwrite true")[0] and "holds a run" in command("--output_dir .")[1]


def test_overwrite_does_not_delete_the_model_it_starts_from(tmp_path):
    """Through a link, too; a neighbor of the same beginning may stay."""
    for model in (tmp_path / "run" / "model", tmp_path / "runner" / "model"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"output_dir": "run", "max_steps": 1}')
    options = {"overwrite": True, "output_dir": str(tmp_path / "run")}
    check_flags(flags_with(**options, model=str(tmp_path / "runner" / "model")))
    for inside in ("run/model", "link/model"):
        with pytest.raises(UsageError, match="--overwrite would delete --model"):
            check_flags(flags_with(**options, model=str(tmp_path / inside)))


TIS = "--loss tis: every batch gets one update, so pi_old is pi, the clip never acts and it equals --loss cispo --eps_max 2"
LENGTHS = "--min_budget 700 --max_budget 900 --answer_budget 100 "
NOTED = {  # a command line -> words of its only note; "" for none
    "--loss tis": TIS,
    "--loss tis --schedule ppo_off_policy --k 1 --max_steps 8": TIS,
    "--loss tis --schedule ppo_off_policy --k 2 --max_steps 8": "",
    "--loss gspo": "--aggregation prompt: GSPO's own paper averages by --aggregation sample",
    "--loss gspo --aggregation sample": "",
    "--min_ready 64 --dynamic_sampling true": "--min_ready 64 does nothing with --dynamic_sampling",
    "--schedule ppo_off_policy --k 4 --max_steps 10": "--max_steps 10 is rounded up to 12",
    "--schedule ppo_off_policy --k 4 --max_steps 12": "",
    "--k 4 --max_steps 10": "",
    "--min_budget 20 --length_control none": "--min_budget 20 does nothing",
    f"--max_budget 900 {DATA}": "--min_budget 14 (usual for a real model: 768 to 10000), --answer_budget 4",
    f"--length_control none {DATA}": "task: --max_budget 18 (usual for a real model: 1024 to 12000)",  # nothing draws the least
    LENGTHS + DATA: ": --dtype float32 (usual for a real model: bfloat16)",
    LENGTHS + "--dtype bfloat16 " + DATA: "",
}


@pytest.mark.parametrize("line", NOTED)
def test_what_works_otherwise_than_its_name_promises_is_said(command, line):
    flags, notes = command(line)
    assert len(notes) == bool(NOTED[line]) and NOTED[line] in "".join(notes)
    again = check_flags(flags)  # what had to be changed was changed, and is not said again
    assert again == [note for note in notes if "rounded" not in note and "_ready" not in note]


@pytest.mark.parametrize(
    ("line", "lr", "said"),
    [
        ("--model runs/demo/model", 7e-4, "--lr 0.0007: the default for the built-in model"),
        (DATA, 1e-6, "--lr 1e-06: the default for a pretrained model (the paper's 8B: 5e-7"),
        ("--lr=1e-6", 1e-6, "--lr 1e-06: given, now or before a resume; 0.0007 is the default for the built-in model"),
        ("--resume old", 5e-4, "--lr 0.0005: given, now or before a resume; 1e-06 is the default for a pretrained"),
        (
            f"{DATA} --lr 5e-4",
            5e-4,
            "--lr 0.0005: given, now or before a resume; 1e-06 is the default for a pretrained",
        ),
    ],
)
def test_a_pretrained_model_has_a_learning_rate_of_its_own(command, line, lr, said):
    """7e-4 is for the built-in task, also where its model is given as a folder; a data set is for a pretrained model. A
    given value wins, and that of the run before a resume."""
    Path("old").mkdir()
    Path("old/config.json").write_text(json.dumps({"dataset": "a.jsonl", "model": "org/model", "lr": 5e-4}))
    flags, _ = command(line)
    assert flags.lr == lr and lr_note(flags).startswith(said)


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_flags(["--help"], "about")
    out = capsys.readouterr().out
    for item in dataclasses.fields(Flags):
        assert f"--{item.name}" in out and len(item.metadata["help"]) > 10


def test_no_flag_is_dead():
    """Every flag is read outside its own definition and the check of its bounds."""
    files = [ROOT / "train.py", *(ROOT / "runtime").glob("*.py")]
    source = "".join(file.read_text() for file in files if file.name != "flag_checks.py")
    assert [name for name in DEFAULTS if not re.search(rf"\bflags\.{name}\b", source)] == []
    assert not GONE.keys() & DEFAULTS.keys() and flag_checks.NEEDS
    of_0_12_0 = json.loads((ROOT / "tests" / "run_0_12_0.json").read_text())["config"]
    assert of_0_12_0.keys() <= GONE.keys() | DEFAULTS.keys()  # whatever has gone since is refused with a sentence
