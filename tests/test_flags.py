"""runtime/flags.py and runtime/flag_checks.py: what a command line gives, what is refused, and what is only noted."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest

import train
from fp32_head import GENERATOR_ARGS
from runtime import flag_checks
from runtime.flag_checks import HOLDS, check_flags
from runtime.flags import (
    DEFAULTS,
    SECTIONS,
    Flags,
    UsageError,
    changed_flags,
    engine_options,
    engine_workers,
    key_values,
    merged,
    parse_flags,
)

ROOT = Path(__file__).resolve().parent.parent


def flags_with(**changes) -> Flags:
    """The defaults with these changes, in a folder that does not exist."""
    return Flags(**{"output_dir": "/nowhere/run"} | changes)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Reads and checks a command line in an empty folder: (the flags, or None if they are refused; the sentence)."""
    monkeypatch.chdir(tmp_path)

    def call(line: str):
        try:
            flags = parse_flags(line.split(), "about")
            check_flags(flags)
        except UsageError as error:
            return None, str(error)
        except SystemExit as end:  # argparse prints its usage before the sentence
            assert end.code == 2
            return None, capsys.readouterr().err.strip().splitlines()[-1]
        return flags, ""

    return call


# ----------------------------------------------------------------------------------------------------- worked examples


def test_a_command_line_by_hand():
    """Given flags win over the defaults; Booleans are words, or nothing for true; dashes serve as underscores."""
    flags = parse_flags(
        "--k 4 --lr 1e-6 --loss gspo --fp32_head false --packed --batch-prompts 8 --dynamic_sampling true".split(), ""
    )
    assert (flags.k, flags.lr, flags.loss, flags.batch_prompts) == (4, 1e-6, "gspo", 8)
    assert (flags.fp32_head, flags.packed, flags.dynamic_sampling, flags.overwrite) == (False, True, True, False)
    assert parse_flags([], "") == Flags() and vars(Flags()) == DEFAULTS
    names = [item.name for section in SECTIONS for item in dataclasses.fields(section)]
    assert list(DEFAULTS) == names and len(names) == len(set(names))  # config.json is in the order of --help


def test_defaults_are_the_recipe():
    recipe = {
        "schedule": "pipeline", "k": 8, "loss": "cispo", "eps_max": 5.0, "aggregation": "prompt", "fp32_head": True,
        "normalize_advantages": "batch", "zero_variance_filter": True, "pass_rate_threshold": 0.9, "kl_coef": 0.0,
        "length_control": "interruption", "entropy_coef": 0.0, "adam_eps": 1e-15, "weight_decay": 0.01,
    }  # fmt: skip
    assert {name: DEFAULTS[name] for name in recipe} == recipe
    assert check_flags(flags_with()) == []


def test_resume_takes_over_the_flags_and_given_ones_win(tmp_path):
    """Saved k = 3, lr = 0.1, a Boolean that is off; --lr is given again. A name that is gone is passed over, and what
    was asked of one call only is not asked again."""
    saved = {"k": 3, "lr": 0.1, "fp32_head": False, "gone": 1, "output_dir": "elsewhere", "resume": ""}
    saved |= {"overwrite": True, "eval_only": True, "dry_run": True}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    flags = parse_flags(["--resume", str(tmp_path), "--lr", "0.2"], "about")
    assert (flags.k, flags.lr, flags.fp32_head, flags.batch_prompts) == (3, 0.2, False, 16)
    assert flags.output_dir == flags.resume == str(tmp_path) and not hasattr(flags, "gone")
    assert not (flags.overwrite or flags.eval_only or flags.dry_run)
    assert changed_flags(saved, vars(flags)) == ["--lr is now 0.2 (it was 0.1)"]
    with pytest.raises(UsageError, match=r"--resume .*config\.json"):
        parse_flags(["--resume", str(tmp_path / "missing")], "about")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True), ("unsafe_code", True), ("reward", "runs.evil:f"), ("reward", "math,evil:f"),
        ("attn_implementation", "evil/kernel"), ("engine_args", "worker_extension_cls=evil.Worker"),
        ("engine_args", "block_size=64,trust_remote_code=true"), ("engine_args", 'logits_processors=["evil:P"]'),
        ("engine_args", 'kv_transfer_config={"kv_connector_module_path":"evil"}'), ("engine_args", "plugin=/tmp/evil"),
    ],
)  # fmt: skip
def test_what_runs_code_is_never_taken_over_from_a_folder(tmp_path, name, value):
    """A folder may come from elsewhere: a resume ends with one sentence until the flag is given again, in any way."""
    (tmp_path / "config.json").write_text(json.dumps({name: value}))
    given = str(value).lower() if isinstance(value, bool) else value
    with pytest.raises(UsageError, match=rf"^--{name} .* runs code, which no --resume takes over; give --{name} again"):
        parse_flags(["--resume", str(tmp_path)], "")
    assert getattr(parse_flags(["--resume", str(tmp_path), f"--{name}", given], ""), name) == value
    plain = {"engine_args": "block_size=64,cache=fp8,x=1.5,eager=true", "reward": "math,code", "lr": 1}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert vars(parse_flags(["--resume", str(tmp_path)], "")).items() >= plain.items()


def test_a_damaged_config_is_one_sentence(command):
    """No JSON, a value of another type, and what the command line would not take, either."""
    Path("run").mkdir()
    for content in (
        b"", b"{", b"null", b"[]", b"\xff\x00", b"[" * 99999, b'{"k": null}', b'{"k": 3.0}', b'{"k": true}', b'{"k": "3"}',
        b'{"lr": []}', b'{"loss": "ppo"}', b'{"loss": ["cispo"]}', b'{"packed": 1}', b'{"model": {}}', b'{"max_tokens": "x"}',
        b'{"size": "xxl"}', b'{"lr": Infinity}', b'{"seed": 1%s}' % (b"0" * 400), b'{"lr": 1%s}' % (b"0" * 400),
        b'{"cache_dir": "a\\u0000"}', b'{"model": "\\ud800"}', b'{"engine_args": "x"}', b'{"k": -1}', b'{"beta1": 1}',
    ):  # fmt: skip
        Path("run/config.json").write_bytes(content)
        flags, said = command("--resume run")
        assert flags is None and said.startswith("--") and said.endswith(".") and said.isprintable(), content[:99]


@pytest.mark.parametrize("other", ["elsewhere", DEFAULTS["output_dir"]])
def test_a_resumed_run_stays_in_its_folder(tmp_path, other):
    """Another folder was passed over without a word, and the run's own logs went on."""
    (tmp_path / "config.json").write_text('{"k": 3, "output_dir": "elsewhere"}')
    with pytest.raises(UsageError, match=rf"--output_dir {other}: --resume {tmp_path} goes on in its own folder"):
        parse_flags(["--resume", str(tmp_path), "--output_dir", other], "")
    assert parse_flags(["--output_dir", f"{tmp_path}/", "--resume", str(tmp_path)], "").k == 3


def test_a_renamed_flag_is_refused_with_its_new_name(command):
    for line in ("--max_tokens 5", "--max-tokens=5", "--k 3 --max_tokens 5"):
        assert command(line)[1].endswith("has a new name; give --max_sampled_tokens instead.")
    assert command("--prompt_template max_tokens --dataset a --model b/c")[0] is not None  # a value is no flag


def test_an_old_run_resumes_with_its_renamed_flag(tmp_path):
    (tmp_path / "config.json").write_text('{"max_tokens": 700, "k": 2}')
    flags = parse_flags(["--resume", str(tmp_path)], "")
    assert (flags.max_sampled_tokens, flags.k) == (700, 2) and not hasattr(flags, "max_tokens")
    flags = parse_flags(["--resume", str(tmp_path), "--max_sampled_tokens", "900"], "")
    lines = changed_flags({"max_tokens": 700, "k": 2}, vars(flags))
    assert lines == ["--max_sampled_tokens is now 900 (it was 700)"]


def test_engine_options_by_hand():
    """One device and vLLM's own share of memory say nothing. Ray's workers are tensor x data x pipeline parallel."""
    assert engine_options(flags_with()) == {} and engine_workers(flags_with()) == 1
    flags = flags_with(
        tensor_parallel=2, data_parallel=4, gpu_memory_utilization=0.5, trust_remote_code=True,
        engine_args="pipeline_parallel_size=3",
    )  # fmt: skip
    assert engine_options(flags) == {
        "tensor_parallel_size": 2, "data_parallel_size": 4, "gpu_memory_utilization": 0.5, "trust_remote_code": True,
        "pipeline_parallel_size": 3,
    }  # fmt: skip
    assert engine_workers(flags) == 24


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("block_size=64,cache=fp8,eager=false", {"block_size": 64, "cache": "fp8", "eager": False}),
        ('a={"b":1,"c":{"d":[1,2]}},e=[3,4],f="x,y",g=null', {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": [3, 4], "f": "x,y", "g": None}),
        ("a=8x,b=1.5,c= 2 , d=x.y.Z", {"a": "8x", "b": 1.5, "c": 2, "d": "x.y.Z"}),
        ("a=,b=1,", {"a": "", "b": 1}),
    ],
)  # fmt: skip
def test_engine_args_by_hand(text, options):
    """Commas within JSON are its own; what is no JSON is a word up to the next comma."""
    assert key_values(text) == options
    assert engine_options(flags_with(engine_args=text)) == options


@pytest.mark.parametrize("text", ["a", "=1", "a=1,b", 'a={"b":1', "a=[1,2", 'a="x', 'a={"b":1}c', "a b=1"])
def test_engine_args_that_cannot_be_read_are_refused(text):
    with pytest.raises(UsageError, match="--engine_args"):
        key_values(text)


def test_engine_args_do_not_undo_the_fp32_head():
    """Other overrides of the model's configuration are added to it; one that contradicts --fp32_head is refused."""

    def options(line: str) -> dict:
        return engine_options(parse_flags(line.split(), ""))

    more = options('--engine_args hf_overrides={"rope_theta":1000000,"text_config":{"x":1}}')
    overrides = {"head_dtype": "float32", "rope_theta": 1000000, "text_config": {"x": 1}}
    assert merged(GENERATOR_ARGS, more) == {"hf_overrides": overrides}
    assert GENERATOR_ARGS == {"hf_overrides": {"head_dtype": "float32"}}
    for fp32_head, head in (("true", '"bfloat16"'), ("true", "null"), ("false", '"float32"')):
        with pytest.raises(UsageError, match="head_dtype .*--fp32_head"):
            options(f'--fp32_head {fp32_head} --dtype bfloat16 --engine_args hf_overrides={{"head_dtype":{head}}}')
    with pytest.raises(UsageError, match="hf_overrides must be a JSON object"):
        options("--engine_args hf_overrides=null")
    agreed = '--dtype bfloat16 --engine_args hf_overrides={"head_dtype":"float32"}'
    assert options(agreed) == {"hf_overrides": {"head_dtype": "float32"}}


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "line",
    [
        # an unknown option value, an unknown flag
        "--loss ppo", "--aggregation mean", "--normalize_advantages group", "--schedule sync", "--length_control cut",
        "--kl_estimator k4", "--dtype float16", "--reward none", "--report_to csv", "--truncated_rollouts mask",
        "--penalty_on wrong", "--pass_rate_window last", "--fp32_head maybe", "--k eight", "--lr fast", "--lamda 1",
        # a missing file
        "--dataset nowhere.jsonl", "--model /nowhere/model", "--resume /nowhere/run", "--lr_schedule linear",
        "--lr_scale half", "--reward_errors ignore",
        # numbers that cannot be
        "--k -1", "--k 0 --schedule ppo_off_policy", "--batch_prompts 0", "--rollouts 0", "--rollouts 257",
        "--max_num_seqs 8", "--min_budget 19", "--max_budget 13", "--min_budget 0", "--answer_budget 0",
        "--max_steps 0", "--eval_every 0", "--eval_samples 0", "--eval_problems 0", "--probe_every 0",
        "--save_every -1", "--keep 0", "--prompts 0", "--max_sampled_tokens -1", "--max_hours nan", "--max_ready -1", "--lr 0",
        "--max_hours -1", "--max_device_hours -1", "--peak_tflops -1", "--restart_window 0", "--rambling 1.1", "--rambling -0.1",
        "--vocabulary 46", "--vocabulary 100 --model a/b",
        "--lr -1e-3", "--lr nan", "--lr inf", "--temperature 0", "--eps_max 0", "--pass_rate_threshold 0",
        "--clip_grad 0", "--tis_cap 0", "--beta1 1", "--beta2 -0.1", "--adam_eps 0", "--weight_decay -1",
        "--warmup_steps -1", "--tokens_per_microbatch 0", "--threads 0", "--kl_coef nan", "--entropy_coef -1",
        "--held_out 0", "--max_prompt_tokens 0", "--reward_workers 0", "--reward_timeout 0", "--tensor_parallel 0",
        "--data_parallel 0", "--gpu_memory_utilization 1", "--gpu_memory_utilization -0.1", "--max_restarts -1",
        # pairs that do not fit
        "--seed -1", "--seed 4294967296", "--max_budget -1 --length_control none",
        "--max_ready 15", "--max_ready 47 --min_ready 32", "--min_ready 129", "--min_ready 1 --k 0", "--min_ready -1",
        "--min_ready 1 --schedule ppo_off_policy",
        "--penalty_window 0 --length_control penalty", "--penalty_window 23 --length_control penalty",
        "--engine torch --dtype bfloat16", "--engine torch --data_parallel 2", "--engine torch --engine_args seed=1",
        "--kl_estimator k1 --kl_coef 0.1", "--dynamic_sampling true --reward shuffled", "--reward math",
        "--tis_level sequence", "--tis_level row", "--eps_low nan --loss dapo", "--engine_args max_num_seqs=8", "--engine_args max_model_len=64",
        "--engine_args dtype=float16", "--max_budget 8",
        # how data sets are read, without one
        "--thinking true", "--thinking perhaps", "--apply_chat_template false",
        "--overwrite true --eval_only true", "--rollouts 1", "--rollouts 1 --normalize_advantages none",
        "--rollouts 1 --kl_coef 0.1", "--rollouts 1 --entropy_coef 0.1 --dynamic_sampling true",
        # flags that would do nothing with the others
        "--eps_high 0.28 --loss grpo", "--eps_high 0.28", "--eps_low 0.2", "--eps_max 8 --loss dapo", "--tis_cap 3",
        "--kl_estimator k1", "--penalty_window 9", "--penalty_on all", "--penalty_on all --length_control none",
        "--zero_variance_filter false --dynamic_sampling true", "--pass_rate_window latest --pass_rate_threshold 1.1",
        "--generator_devices 1 --engine_args distributed_executor_backend=ray",
        "--attn_implementation flash_attention_2", "--attn_implementation flash_attention_2 --dtype bfloat16",
        "--size xl --model a/b", "--eval_dataset a=b.jsonl", "--difficulty easy --dataset chain", "--prompt_order easy_first --dataset chain", "--restart_window 5 --max_restarts 0", "--prompt_column question", "--stop_tokens x", "--held_out 5",
        "--rollouts 16 --max_num_seqs 15 --data_parallel 2",
    ],
)  # fmt: skip
def test_bad_input_ends_with_one_sentence_that_names_the_flag(command, line):
    flags, sentence = command(line)
    assert flags is None and line.split()[0] in sentence and "\n" not in sentence
    assert not any(Path.cwd().iterdir())  # before anything is written


@pytest.mark.parametrize(
    "line",
    [
        "--max_ready 16", "--max_ready 48 --min_ready 32", "--min_ready 128", "--min_ready 0 --k 0",
        "--k 0", "--k 1 --schedule ppo_off_policy", "--rollouts 256", "--max_budget 20 --length_control none",
        "--rollouts 16 --max_num_seqs 16 --data_parallel 2", "--min_budget 18", "--max_budget 14",
        "--penalty_window 22 --length_control penalty", "--penalty_window 1 --length_control penalty",
        "--kl_estimator k2 --kl_coef 0.1", "--save_every 0", "--eps_high 0.28 --loss dapo", "--eps_low 0.1 --loss grpo",
        "--eps_high 0.01 --loss gspo", "--tis_cap 3 --loss tis", "--penalty_on all --length_control penalty",
        "--eps_high 0.3 --loss tis", "--pass_rate_window latest --pass_rate_threshold 1", "--eps_max 5 --loss dapo",
        "--max_ready 0", "--warmup_steps 0", "--pass_rate_threshold 1.1", "--reward shuffled", "--beta1 0",
        "--dynamic_sampling true", "--max_sampled_tokens 0", "--batch_prompts 1 --rollouts 2", "--rollouts 1 --eval_only true",
        "--rollouts 1 --kl_coef 0.1 --zero_variance_filter false", "--generator_devices 1 --weight_channel nccl",
        "--engine_args distributed_executor_backend=ray", "--attn_implementation sdpa",
        "--seed 4294967295", "--max_budget 0 --length_control none",
    ],
)  # fmt: skip
def test_good_input_at_the_same_boundaries_starts(command, line):
    assert command(line)[0] is not None


@pytest.mark.parametrize("package", ["flash_attn", "kernels"])  # transformers takes either
def test_flash_attention_needs_its_package_and_bfloat16(monkeypatch, package):
    flags = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}
    with pytest.raises(UsageError, match="flash_attention_2: pip install flash-attn, or leave it out"):
        check_flags(flags_with(**flags))
    monkeypatch.setattr(flag_checks, "find_spec", lambda name: name == package)
    check_flags(flags_with(**flags))  # is accepted
    with pytest.raises(UsageError, match="--share_prompts needs a mask, which flash_attention_2 does not take"):
        check_flags(flags_with(**flags, share_prompts=True))
    with pytest.raises(UsageError, match="flash_attention_2 has no float32; add --dtype bfloat16"):
        check_flags(flags_with(**flags | {"dtype": "float32"}))


def test_no_value_breaks_a_refusal(monkeypatch, tmp_path, capsys):
    """One line, whatever is given: ends of lines and escape sequences are written as Python does; paths that are too long,
    text that cannot be saved, and numbers that are no float are refused before anything is written."""
    monkeypatch.chdir(tmp_path)
    paths = "output_dir cache_dir model lora_adapter resume"
    for value, names in (
        ("/a\nb\x1b[1m", "model lora_adapter resume dataset engine_args k packed loss lamda"),
        ("x" * 256, paths), ("x/" * 2000, paths), ("\udcff/a", paths), ("a=" + "[" * 99999, "engine_args"),
        (str(10**400), "seed k lr max_num_seqs warmup_steps max_hours eval_temperature"),
    ):  # fmt: skip
        for name in names.split():
            with contextlib.suppress(SystemExit):  # of argparse, whose code is 2
                assert train.main([f"--{name}", value]) == 2, name
            last = capsys.readouterr().err.removesuffix("\n").split("\n")[-1]
            assert last.startswith("train.py: ") and last.isprintable() and f"--{name}" in last
    assert not any(tmp_path.iterdir())


def test_a_refusal_reaches_the_shell_as_exit_code_2(monkeypatch, capsys, tmp_path):
    """One sentence on stderr and no traceback, by our rules or by argparse; nothing is written."""
    monkeypatch.chdir(tmp_path)
    for argv in (["--k", "-1"], ["--max_tokens", "5"]):
        assert train.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"train.py: {argv[0]}") and err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        train.main(["--loss", "ppo"])
    assert "usage:" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_an_existing_run_is_not_overwritten(command):
    """Refused unless --overwrite or --resume says so; an empty folder is not a run."""
    Path("runs/demo").mkdir(parents=True)
    assert command("")[0]
    config = Path("runs/demo/config.json")
    written = json.dumps({"k": 3, "max_steps": 9, "output_dir": "runs/demo"})
    config.write_text(written)
    _, said = command("")
    assert all(words in said for words in ("--output_dir runs/demo", "--overwrite", "--resume runs/demo"))
    assert config.read_text() == written
    for line in ("--overwrite true", "--output_dir runs/other", "--dry_run true", "--eval_only true"):
        assert command(line)[0]
    flags, _ = command("--resume runs/demo")
    assert (flags.output_dir, flags.k) == ("runs/demo", 3)
    assert "--overwrite deletes the run that --resume" in command("--resume runs/demo --overwrite true")[1]


def test_a_folder_of_other_things_is_never_a_run_folder(command):
    """`--output_dir . --overwrite true` must not empty somebody's folder: not empty and no run's flags is refused, with a
    model's config.json or somebody's log in it, too. A run whose config.json is lost is one by its log."""
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
    """--model inside --output_dir is refused, through a link too; a neighbor of the same beginning is not."""
    for model in (tmp_path / "run" / "model", tmp_path / "runner" / "model"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"output_dir": "run", "max_steps": 1}')
    options = {"overwrite": True, "output_dir": str(tmp_path / "run")}
    for inside in ("run/model", "link/model"):
        with pytest.raises(UsageError, match="--overwrite would delete --model"):
            check_flags(flags_with(**options, model=str(tmp_path / inside)))
    check_flags(flags_with(**options, model=str(tmp_path / "runner" / "model")))


def test_a_model_that_does_not_think_is_not_interrupted():
    """The default length control, and what belongs to thinking, are refused with the fix; `none` and `penalty` are not."""
    options = {"dataset": "rows.jsonl", "model": "some/model", "thinking": "false"}
    with pytest.raises(UsageError, match="--thinking false .*--length_control none or --length_control penalty"):
        check_flags(flags_with(**options))
    for control in ("none", "penalty"):
        check_flags(flags_with(**options, length_control=control))  # is accepted
        for name in ("end_of_thinking", "interruption_phrase"):
            with pytest.raises(UsageError, match=f"--{name} is for models that think; drop it, or --thinking false"):
                check_flags(flags_with(**options, length_control=control, **{name: "</think>"}))
    check_flags(flags_with(**options | {"thinking": "true"}, end_of_thinking="DONE"))  # is accepted


# -------------------------------------------------------------------------------------------------- what is only noted


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("--loss tis --tis_cap 3", ["clip never acts; with --tis_level token it equals --loss cispo --eps_max 3"]),
        ("--loss tis --schedule ppo_off_policy --k 1", ["it equals --loss cispo --eps_max 2"]),
        ("--loss tis --tis_level sequence", ["the clip never acts"]),
        ("--loss tis --schedule ppo_off_policy --k 2", []),
        ("--loss gspo", ["--aggregation prompt: GSPO's own paper averages by --aggregation sample"]),
        ("--loss gspo --aggregation sample", []),
    ],
)
def test_a_loss_that_is_not_what_its_name_promises_is_said(line, ends):
    notes = check_flags(parse_flags(["--output_dir", "/nowhere/run", *line.split()], ""))
    assert len(notes) == len(ends) and all(note.endswith(end) for note, end in zip(notes, ends, strict=True))


@pytest.mark.parametrize(
    ("name", "other"), [("max_ready", "schedule ppo_off_policy"), ("min_ready", "dynamic_sampling true")]
)
def test_a_queue_that_does_nothing_is_said_and_not_kept(name, other):
    """Off-policy takes all k B groups at once, and dynamic sampling takes groups one by one."""
    flags = parse_flags(f"--{name} 64 --{other} --max_steps 8 --output_dir /nowhere/run".split(), "")
    [note] = check_flags(flags)
    assert note.startswith(f"--{name} 64 does nothing with --{other.split()[0]}")
    assert getattr(flags, name) == 0


def test_off_policy_steps_are_rounded_up_and_it_says_so():
    """Phases of k steps cannot be cut: 10 steps with k = 4 are 12, 12 are 12; `pipeline` leaves 10 as it is."""
    flags = flags_with(schedule="ppo_off_policy", k=4, max_steps=10)
    [note] = check_flags(flags)
    assert flags.max_steps == 12 and "--max_steps 10" in note and "rounded up to 12" in note
    assert check_flags(flags) == [] and flags.max_steps == 12
    flags = flags_with(k=4, max_steps=10)
    assert check_flags(flags) == [] and flags.max_steps == 10


def test_what_a_run_does_otherwise_than_one_may_expect_is_said_at_its_start():
    """Cosine whose end a budget never reaches; a least budget that nothing draws; a data set at the lengths of the
    built-in task, each named unless it was given."""
    [note] = check_flags(flags_with(lr_schedule="cosine", max_sampled_tokens=1000))
    assert "--lr_schedule cosine" in note and "--max_steps 310" in note
    assert check_flags(flags_with(lr_schedule="cosine")) == []
    [note] = check_flags(flags_with(min_budget=20, length_control="none"))
    assert "--min_budget 20 does nothing" in note
    data = {"dataset": "a.jsonl", "model": "org/model"}
    [note] = check_flags(flags_with(**data, max_budget=900))
    assert all(f"--{name}" in note for name in ("min_budget 14", "answer_budget 4"))
    assert "max_budget 9" not in note
    [note] = check_flags(flags_with(**data, length_control="none"))
    assert "--max_budget 18" in note and "--min_budget" not in note  # which nothing draws
    lengths = {"min_budget": 700, "max_budget": 900, "answer_budget": 100}
    [note] = check_flags(flags_with(**data, **lengths))
    assert note.endswith(": --dtype float32 (usual for a real model: bfloat16)")
    assert check_flags(flags_with(**data, **lengths, dtype="bfloat16")) == []


def test_a_pretrained_model_has_a_learning_rate_of_its_own(monkeypatch, capsys, tmp_path):
    """7e-4 is for the built-in task, also where its model is given as a folder; a data set is for a pretrained model, and
    has 1e-6. A given value wins, and that of the run before a resume. A sentence at the start says which it is."""
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    Path("old/config.json").write_text(json.dumps({"dataset": "a.jsonl", "model": "org/model", "lr": 5e-4}))
    data = "--dataset a.jsonl --model org/model"
    for line, lr, said in (
        ("", 7e-4, "--lr 0.0007: the default for the built-in model"),
        ("--model runs/demo/model", 7e-4, "--lr 0.0007: the default for the built-in model"),
        (data, 1e-6, "--lr 1e-06: the default for a pretrained model (the paper's 8B: 5e-7"),
        (
            f"{data} --lr 5e-4",
            5e-4,
            "--lr 0.0005: given, now or before a resume; 1e-06 is the default for a pretrained",
        ),
        ("--lr=1e-6", 1e-6, "--lr 1e-06: given, now or before a resume; 0.0007 is the default for the built-in model"),
        ("--resume old", 5e-4, "--lr 0.0005: given, now or before a resume; 1e-06 is the default"),
    ):
        assert parse_flags(line.split(), "").lr == lr
        assert train.main([*line.split(), "--dry_run", "true"]) == 0
        assert said in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- for all flags


def test_dry_run_prints_the_resolved_flags_and_touches_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.main("--dry_run true --k 4 --schedule ppo_off_policy --max_steps 10 --output_dir new".split()) == 0
    out, err = capsys.readouterr()
    assert err == "" and not any(tmp_path.iterdir()) and "rounded up to 12" in out
    shown = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert set(shown) == set(DEFAULTS) and (shown["k"], shown["max_steps"], shown["lr"]) == (4, 12, 7e-4)


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_flags(["--help"], "about")
    out = capsys.readouterr().out
    for item in dataclasses.fields(Flags):
        assert f"--{item.name}" in out and len(item.metadata["help"]) > 10


def test_every_bound_is_one_that_the_check_knows():
    for item in dataclasses.fields(Flags):
        assert set(item.metadata["bounds"]) <= set(HOLDS), item.name
        assert not item.metadata["bounds"] or item.type in (int, float), item.name


def test_no_flag_is_dead():
    """Every flag is read outside its own definition and the check of its bounds."""
    files = [ROOT / "train.py", *(ROOT / "runtime").glob("*.py")]
    source = "".join(file.read_text() for file in files if file.name != "flag_checks.py")
    assert [name for name in DEFAULTS if not re.search(rf"\bflags\.{name}\b", source)] == []
