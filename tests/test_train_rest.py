"""Left over from test_train.py for the files of runtime/ and tasks/: flags, prompts, the trainer, metrics."""

import copy
import dataclasses
import json
import math
import random
import re
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripted import batch_of, problem, rollout
from test_train import hand_groups
from transformers import AutoModelForCausalLM

import losses
import train
from pipeline_rl import Counters
from runtime import flags as flags_module
from runtime import metrics as records
from runtime.flag_checks import check_flags
from runtime.flags import DEFAULTS, Flags, UsageError, engine_options, parse_flags
from runtime.metrics import Clock, evaluation_line, evaluation_record, pass_at_k, step_line
from runtime.run_folder import Folder
from runtime.trainer import Trainer, TrainingBatch, clip_options, learning_rate
from tasks import warm_start
from tasks.prompts import PromptStream

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(DEFAULTS)


def default_flags(**changes) -> Flags:
    found = parse_flags([], "about")
    assert set(changes) <= set(vars(found))
    vars(found).update(changes)
    return found


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `main` in an empty folder: (exit code, stdout, stderr). A run that would start raises `Started` instead."""

    class Started(Exception):
        pass

    def start(flags, progress):
        raise Started(flags)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "new_parts", start)

    def call(*argv: str):
        try:
            code = train.main(list(argv))
        except SystemExit as end:  # argparse
            code = end.code
        except Started as started:
            return "started", started.args[0], ""
        return code, *capsys.readouterr()

    return call


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "argv",
    [
        # an unknown option value, an unknown flag
        "--loss ppo", "--aggregation mean", "--normalize_advantages group", "--schedule sync", "--length_control cut",
        "--kl_estimator k4", "--dtype float16", "--reward none", "--report_to csv", "--truncated_rollouts mask",
        "--penalty_on wrong", "--pass_rate_window last", "--fp32_head maybe", "--k eight", "--lr fast", "--lamda 1",
        # a missing file
        "--dataset nowhere.jsonl", "--model /nowhere/model", "--resume /nowhere/run", "--lr_schedule linear",
        "--lr_scale half", "--reward_errors ignore",
        # numbers that cannot be
        "--k -1", "--k 0 --schedule ppo_off_policy", "--batch_prompts 0", "--rollouts 0", "--rollouts 513",
        "--max_num_seqs 8", "--min_budget 31", "--max_budget 25", "--min_budget 0", "--answer_budget 0",
        "--max_steps 0", "--eval_every 0", "--eval_samples 0", "--eval_problems 0", "--probe_every 0",
        "--save_every -1", "--keep 0", "--prompts 0", "--max_sampled_tokens -1", "--max_hours nan", "--max_ready -1", "--lr 0",
        "--max_device_hours -1", "--rambling 1.1", "--rambling -0.1",
        "--lr -1e-3", "--lr nan", "--lr inf", "--temperature 0", "--eps_max 0", "--pass_rate_threshold 0",
        "--clip_grad 0", "--tis_cap 0", "--beta1 1", "--beta2 -0.1", "--adam_eps 0", "--weight_decay -1",
        "--warmup_steps -1", "--tokens_per_microbatch 0", "--threads 0", "--kl_coef nan", "--entropy_coef -1",
        "--held_out 0", "--max_prompt_tokens 0", "--reward_workers 0", "--reward_timeout 0", "--tensor_parallel 0",
        "--data_parallel 0", "--gpu_memory_utilization 1", "--gpu_memory_utilization -0.1", "--max_restarts -1",
        # pairs that do not fit
        "--max_ready 31", "--max_ready 63 --min_ready 32", "--min_ready 257", "--min_ready 1 --k 0", "--min_ready -1",
        "--min_ready 1 --schedule ppo_off_policy",
        "--penalty_window 0 --length_control penalty", "--penalty_window 35 --length_control penalty",
        "--kl_estimator k1 --kl_coef 0.1", "--dynamic_sampling true --reward shuffled", "--reward math",
        "--tis_level sequence", "--tis_level row", "--eps_low nan --loss dapo", "--engine_args max_num_seqs=8",
        "--engine_args dtype=float16", "--max_budget 20",
        # how data sets are read, without one
        "--thinking true", "--thinking perhaps", "--apply_chat_template false",
        "--overwrite true --eval_only true", "--rollouts 1", "--rollouts 1 --normalize_advantages none",
        "--rollouts 1 --kl_coef 0.1", "--rollouts 1 --entropy_coef 0.1 --dynamic_sampling true",
        # flags that would do nothing beside the others
        "--eps_high 0.28 --loss grpo", "--eps_high 0.28", "--eps_low 0.2", "--eps_max 8 --loss dapo", "--tis_cap 3",
        "--kl_estimator k1", "--penalty_window 9", "--penalty_on all", "--penalty_on all --length_control none",
        "--zero_variance_filter false --dynamic_sampling true", "--pass_rate_window latest --pass_rate_threshold 1.1",
        "--restart_window 5 --max_restarts 0", "--prompt_column question", "--stop_tokens x", "--held_out 5",
    ],
)  # fmt: skip
def test_bad_input_ends_with_one_sentence_that_names_the_flag(command, argv):
    """Exit code 2, before anything is loaded or written. argparse prints its usage before the sentence."""
    code, out, err = command(*argv.split())
    assert code == 2 and out == ""
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("train.py: ") and argv.split()[0] in sentence
    assert "usage:" in err or err.strip() == sentence  # no traceback
    assert not any(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "argv",
    [
        "--max_ready 32", "--max_ready 64 --min_ready 32", "--min_ready 256", "--min_ready 0 --k 0",
        "--k 0", "--k 1 --schedule ppo_off_policy", "--rollouts 256", "--max_budget 20 --length_control none",
        "--rollouts 16 --max_num_seqs 8 --data_parallel 2", "--min_budget 30", "--max_budget 26",
        "--penalty_window 34 --length_control penalty", "--penalty_window 1 --length_control penalty",
        "--kl_estimator k2 --kl_coef 0.1", "--save_every 0", "--eps_high 0.28 --loss dapo", "--eps_low 0.1 --loss grpo",
        "--eps_high 0.01 --loss gspo", "--tis_cap 3 --loss tis", "--penalty_on all --length_control penalty",
        "--eps_high 0.3 --loss tis", "--pass_rate_window latest --pass_rate_threshold 1", "--eps_max 5 --loss dapo",
        "--max_ready 0", "--warmup_steps 0", "--pass_rate_threshold 1.1", "--reward shuffled", "--beta1 0",
        "--dynamic_sampling true", "--max_sampled_tokens 0", "--batch_prompts 1 --rollouts 2", "--rollouts 1 --eval_only true",
        "--rollouts 1 --kl_coef 0.1 --zero_variance_filter false",
    ],
)  # fmt: skip
def test_good_input_at_the_same_boundaries_starts(command, argv):
    assert command(*argv.split())[0] == "started"


@pytest.mark.parametrize(
    ("argv", "notes"),
    [
        ("", []),
        ("--loss tis --tis_cap 3", ["clip never acts; with --tis_level token it equals --loss cispo --eps_max 3"]),
        ("--loss tis --schedule ppo_off_policy --k 1", ["it equals --loss cispo --eps_max 2"]),
        ("--loss tis --tis_level sequence", ["the clip never acts"]),
        ("--loss tis --schedule ppo_off_policy --k 2", []),
        ("--loss gspo", ["--aggregation prompt: GSPO's own paper averages by --aggregation sample"]),
        ("--loss gspo --aggregation sample", []),
    ],
)
def test_a_loss_that_is_not_what_its_name_promises_is_said(argv, notes):
    found = check_flags(parse_flags(["--output_dir", "/nowhere/run", *argv.split()], ""))
    assert len(found) == len(notes) and all(note.endswith(end) for note, end in zip(found, notes, strict=True))


@pytest.mark.parametrize(
    ("flag", "other"), [("max_ready 64", "schedule ppo_off_policy"), ("min_ready 64", "dynamic_sampling true")]
)
def test_a_queue_that_does_nothing_is_said_and_not_kept(flag, other, tmp_path):
    """Off-policy takes all k B groups at once, and dynamic sampling takes groups one by one."""
    found = parse_flags(f"--{flag} --{other} --max_steps 8 --output_dir {tmp_path}".split(), "about")
    [note] = check_flags(found)
    assert note.startswith(f"--{flag} does nothing with --{other.split()[0]}")
    assert getattr(found, flag.split()[0]) == 0


def test_an_existing_run_is_not_overwritten(command):
    """Refused unless --overwrite or --resume says so; an empty folder is not a run."""
    Path("runs/demo").mkdir(parents=True)
    assert command()[0] == "started"
    config = Path("runs/demo/config.json")
    config.write_text(json.dumps({"k": 3}))
    code, _, err = command()
    assert code == 2 and "--output_dir runs/demo" in err and "--overwrite" in err and "--resume runs/demo" in err
    assert config.read_text() == '{"k": 3}'
    assert command("--overwrite", "true")[0] == "started"
    assert command("--output_dir", "runs/other")[0] == "started"
    state, flags, _ = command("--resume", "runs/demo")
    assert state == "started" and (flags.output_dir, flags.k) == ("runs/demo", 3)


def test_a_folder_of_other_things_is_never_a_run_folder(command):
    """`--output_dir . --overwrite true` must not empty somebody's folder: not empty and no config.json is refused."""
    Path("thesis.txt").write_text("all of it")
    for more in ((), ("--overwrite", "true")):
        code, _, err = command("--output_dir", ".", *more)
        assert code == 2 and "--output_dir" in err and "holds no run" in err
    code, _, err = command("--output_dir", "thesis.txt")
    assert code == 2 and "--output_dir thesis.txt" in err
    assert Path("thesis.txt").read_text() == "all of it"


def test_a_model_that_does_not_think_is_not_interrupted():
    """The default length control, and what belongs to thinking, are refused with the fix; `none` and `penalty` are not."""
    options = {"dataset": "rows.jsonl", "model": "some/model", "thinking": "false", "output_dir": "none-such"}
    with pytest.raises(UsageError, match="--thinking false .*--length_control none or --length_control penalty"):
        check_flags(default_flags(**options))
    for control in ("none", "penalty"):
        check_flags(default_flags(**options, length_control=control))  # is accepted
        for name in ("end_of_thinking", "interruption_phrase"):
            with pytest.raises(UsageError, match=f"--{name} is for models that think; drop it, or --thinking false"):
                check_flags(default_flags(**options, length_control=control, **{name: "</think>"}))
    check_flags(default_flags(**options | {"thinking": "true"}, end_of_thinking="DONE"))  # is accepted


def test_engine_options_by_hand():
    """One device and vLLM's own share of memory say nothing; KEY=VALUE are JSON where they can be, else words."""
    assert engine_options(default_flags()) == {}
    found = default_flags(tensor_parallel=2, data_parallel=4, gpu_memory_utilization=0.5, trust_remote_code=True)
    assert engine_options(found) == {
        "tensor_parallel_size": 2, "data_parallel_size": 4, "gpu_memory_utilization": 0.5, "trust_remote_code": True,
    }  # fmt: skip
    found = engine_options(default_flags(engine_args="block_size=64,kv_cache_dtype=fp8,enforce_eager=false"))
    assert found == {"block_size": 64, "kv_cache_dtype": "fp8", "enforce_eager": False}
    for wrong in ("block_size", "=64", "block_size=64,eager"):
        with pytest.raises(UsageError, match="--engine_args"):
            engine_options(default_flags(engine_args=wrong))


def test_learning_rates_by_hand():
    """4 warm-up steps of 1e-3: 1/4, 2/4, 3/4, 1, then constant. Cosine over 12 steps: full at step 4, half at 8, and
    (1 + cos(7/8 pi)) / 2 = 0.0381 at the last. sqrt: 32 x 8 = 256 completions, a quarter of 1024, give half."""
    flags = default_flags(lr=1e-3, warmup_steps=4, max_steps=12)
    rates = [learning_rate(flags, v) for v in (0, 1, 2, 3, 4, 11, 50)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    flags.lr_schedule = "cosine"
    rates = [learning_rate(flags, v) for v in (0, 3, 4, 8, 11, 12, 50)]
    assert rates == pytest.approx([0.25e-3, 1e-3, 1e-3, 0.5e-3, 0.0380602e-3, 0, 0], abs=1e-9)
    flags = default_flags(lr=1e-3, warmup_steps=0, lr_scale="sqrt", rollouts=8)
    assert learning_rate(flags, 0) == pytest.approx(0.5e-3)


def test_resume_takes_over_the_flags_and_given_ones_win(tmp_path):
    """Saved k = 3, lr = 0.1, a Boolean that is off; --lr is given again. A name that is gone is passed over."""
    saved = {
        "k": 3,
        "lr": 0.1,
        "fp32_head": False,
        "overwrite": True,
        "eval_only": True,
        "dry_run": True,
        "gone": 1,
        "output_dir": "elsewhere",
        "resume": "",
    }
    (tmp_path / "config.json").write_text(json.dumps(saved))
    flags = parse_flags(["--resume", str(tmp_path), "--lr", "0.2"], "about")
    assert (flags.k, flags.lr, flags.fp32_head, flags.batch_prompts) == (3, 0.2, False, 32)
    assert flags.output_dir == flags.resume == str(tmp_path) and not hasattr(flags, "gone")
    assert not (flags.overwrite or flags.eval_only or flags.dry_run)  # asked for once, not for good
    with pytest.raises(UsageError, match=r"--resume .*config\.json"):
        parse_flags(["--resume", str(tmp_path / "missing")], "about")


def test_dry_run_prints_the_resolved_flags_and_touches_nothing(command):
    code, out, err = command("--dry_run", "true", "--k", "3", "--loss", "gspo", "--output_dir", "new")
    assert code == 0 and err == "" and not any(Path.cwd().iterdir())
    shown = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert set(shown) == set(NAMES) and (shown["k"], shown["loss"], shown["lr"]) == (3, "gspo", 5e-4)


def test_off_policy_steps_are_rounded_up_and_it_says_so(command):
    """Phases of k steps cannot be cut: 10 steps with k = 4 are 12, 12 are 12; `pipeline` leaves 10 as it is."""
    found = default_flags(schedule="ppo_off_policy", k=4, max_steps=10)
    notes = check_flags(found)
    assert found.max_steps == 12 and len(notes) == 1 and "--max_steps 10" in notes[0] and "12" in notes[0]
    assert check_flags(found) == [] and found.max_steps == 12
    found = default_flags(k=4, max_steps=10)
    assert check_flags(found) == [] and found.max_steps == 10
    code, out, _ = command("--dry_run", "true", "--schedule", "ppo_off_policy", "--k", "4", "--max_steps", "10")
    assert code == 0 and "rounded up to 12" in out and '"max_steps": 12' in out


def test_what_a_run_does_otherwise_than_one_may_expect_is_said_at_its_start():
    """Cosine whose end a budget never reaches; a least budget that nothing draws; a data set at the learning rate and
    the lengths of the built-in task, each named unless it was given. The defaults themselves say nothing."""
    said = check_flags(default_flags(lr_schedule="cosine", max_sampled_tokens=1000))
    assert len(said) == 1 and "--lr_schedule cosine" in said[0] and "--max_steps 130" in said[0]
    assert check_flags(default_flags(lr_schedule="cosine")) == check_flags(default_flags()) == []
    [said] = check_flags(default_flags(min_budget=20, length_control="none"))
    assert "--min_budget 20 does nothing" in said
    data = {"dataset": "a.jsonl", "model": "org/model"}
    [said] = check_flags(default_flags(**data, max_budget=900))
    assert all(f"--{name}" in said for name in ("lr 0.0005", "min_budget 26", "answer_budget 4")) and "max_budget 9" not in said
    assert check_flags(default_flags(**data, lr=1e-6, min_budget=700, max_budget=900, answer_budget=100)) == []


def test_help_explains_every_flag(command):
    code, out, _ = command("--help")
    assert code == 0
    for item in dataclasses.fields(Flags):
        assert f"--{item.name}" in out and len(item.metadata["help"]) > 10


def test_defaults_are_the_recipe():
    found = default_flags()
    recipe = {
        "schedule": "pipeline", "k": 8, "loss": "cispo", "eps_max": 5.0, "aggregation": "prompt", "fp32_head": True,
        "normalize_advantages": "batch", "zero_variance_filter": True, "pass_rate_threshold": 0.9, "kl_coef": 0.0,
        "length_control": "interruption", "entropy_coef": 0.0, "adam_eps": 1e-15, "weight_decay": 0.01,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in recipe} == recipe


def test_overwrite_does_not_delete_the_model_it_starts_from(tmp_path):
    """--model inside --output_dir is refused, through a link too; a neighbour of the same beginning is not."""
    for model in (tmp_path / "run" / "model", tmp_path / "runner" / "model"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{}")
    options = {"overwrite": True, "output_dir": str(tmp_path / "run")}
    for inside in ("run/model", "link/model"):
        with pytest.raises(UsageError, match="--overwrite would delete --model"):
            check_flags(default_flags(**options, model=str(tmp_path / inside)))
    check_flags(default_flags(**options, model=str(tmp_path / "runner" / "model")))


def test_no_flag_is_dead():
    """Every flag is read outside its own definition and the check of its bounds."""
    files = [ROOT / "train.py", *(ROOT / "runtime").glob("*.py")]
    source = "".join(file.read_text() for file in files if file.name != "flag_checks.py")
    assert len(NAMES) == len(set(NAMES))
    assert [name for name in NAMES if not re.search(rf"\bflags\.{name}\b", source)] == []


# ------------------------------------------------------------------------------------------------------------- prompts


POOL = [problem(str(i)) for i in range(50)]


def keys(stream: PromptStream, n: int) -> list[str]:
    return [next(stream).key for _ in range(n)]


def test_every_prompt_once_an_epoch_in_an_order_of_its_own():
    """The order is a function of seed and epoch alone."""
    stream = PromptStream(POOL, 0, lambda key: False)
    first, second = keys(stream, 50), keys(stream, 50)
    assert sorted(first) == sorted(second) == sorted(p.key for p in POOL) and stream.epoch == 1
    assert first != second and first != [p.key for p in POOL]
    assert keys(PromptStream(POOL, 0, lambda key: False), 100) == first + second
    assert keys(PromptStream(POOL, 1, lambda key: False), 50) != first
    assert iter(stream) is stream
    random.seed(0)  # other users of `random` change nothing
    assert keys(PromptStream(POOL, 0, lambda key: False), 50) == first


def test_retired_prompts_are_passed_over_from_the_moment_they_retire():
    gone: set[str] = set()
    stream = PromptStream(POOL, 0, gone.__contains__)
    order = keys(PromptStream(POOL, 0, lambda key: False), 100)
    assert keys(stream, 10) == order[:10]
    gone |= {order[3], order[12], order[20]}  # one seen, two to come
    assert keys(stream, 38) == [key for key in order[10:50] if key not in gone]
    assert keys(stream, 47) == [key for key in order[50:] if key not in gone] and stream.epoch == 1


def test_it_stops_when_every_prompt_is_retired():
    """It says so and does not spin, in the middle of an epoch or at its end; the last one left still comes."""
    gone: set[str] = set()
    stream = PromptStream(POOL, 0, gone.__contains__)
    keys(stream, 17)
    gone |= {p.key for p in POOL} - {"7"}
    assert "7" in keys(stream, 2)
    assert keys(stream, 3) == ["7", "7", "7"]
    gone.add("7")
    assert next(stream, None) is None and next(stream, None) is None


@pytest.mark.parametrize("weights", [{"a": 4.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1e-9}])
def test_a_weighted_mixture_ends_exactly_when_every_prompt_is_retired(weights):
    """30 of a and 60 of b, of which an epoch at 4 : 1 holds 18. All but b7, b8 and b9 retire when first drawn; these
    three still come, and no other, until they retire one by one."""
    pool = [problem(f"a{i}", source="a") for i in range(30)] + [problem(f"b{i}", source="b") for i in range(60)]
    for seed in range(5):
        gone, hard = set(), {"b7", "b8", "b9"}
        stream = PromptStream(pool, seed, gone.__contains__, weights)
        while len(gone) < 87:
            key = next(stream).key
            assert key not in gone
            gone |= {key} - hard
        for key in sorted(hard):
            assert set(keys(stream, 40)) == hard - gone
            gone.add(key)
        assert next(stream, None) is None and next(stream, None) is None


def sources(stream: PromptStream, n: int) -> Counter[str]:
    return Counter(next(stream).source for _ in range(n))


def test_the_others_take_the_places_of_a_source_that_is_retired():
    """20, 10 and 10 prompts at 2 : 1 : 1. An epoch has 40 places, 20, 10 and 10. Once all of a are retired, an epoch
    has the 20 places of b and c, 10 and 10; once all of b are too, each prompt of c comes once an epoch."""
    pool = [problem(f"{source}{i}", source=source) for source, n in (("a", 20), ("b", 10), ("c", 10)) for i in range(n)]
    gone: set[str] = set()
    stream = PromptStream(pool, 0, gone.__contains__, {"a": 2.0, "b": 1.0, "c": 1.0})
    assert sources(stream, 40) == {"a": 20, "b": 10, "c": 10} and stream.epoch == 0
    gone |= {f"a{i}" for i in range(20)}
    assert sources(stream, 20) == {"b": 10, "c": 10} and stream.epoch == 1  # of which a's 20 places were empty
    assert sources(stream, 20) == {"b": 10, "c": 10} and (stream.epoch, stream.position) == (2, 20)
    gone |= {f"b{i}" for i in range(10)}
    assert sorted(keys(stream, 10)) == [f"c{i}" for i in range(10)]
    assert (stream.epoch, stream.position) == (3, 10)


@pytest.mark.parametrize("n", [0, 40, 55, 70, 85])
def test_a_mixture_goes_on_from_its_saved_place(n):
    """Also inside an epoch that began with fewer sources than there are: those retired later do not change its order,
    and a new stream, for which they are retired from the start, has the same."""
    pool = [problem(f"{source}{i}", source=source) for source in "abc" for i in range(20)]
    gone = {f"a{i}" for i in range(20)}
    old, new = (PromptStream(pool, 3, gone.__contains__, {"a": 2.0, "b": 1.0, "c": 1.0}) for _ in range(2))
    keys(old, n)
    gone |= {f"b{i}" for i in range(20)}
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert keys(new, 80) == keys(old, 80) and (new.epoch, new.position) == (old.epoch, old.position)


def test_prompts_of_a_resumed_run_come_first():
    """Those that were in flight, in their old order, retired meanwhile or not; then the stream from its old place."""
    stream = PromptStream(POOL, 0, {"7"}.__contains__)
    order = keys(PromptStream(POOL, 0, lambda key: False), 50)
    stream.first.extend(POOL[i] for i in (7, 4, 4))
    assert keys(stream, 4) == ["7", "4", "4", next(key for key in order if key != "7")]


@pytest.mark.parametrize("n", [0, 1, 49, 50, 51, 73])
def test_a_stream_goes_on_from_its_saved_place(n):
    """Epoch, position and the keys of `first`, through JSON, into a new stream of the same pool."""
    old = PromptStream(POOL, 3, {"5", "6"}.__contains__)
    old.first.extend(POOL[i] for i in (1, 2, 3))
    keys(old, n)
    new = PromptStream(POOL, 3, {"5", "6"}.__contains__)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert keys(new, 80) == keys(old, 80) and (new.epoch, new.position) == (old.epoch, old.position)


@pytest.mark.parametrize(
    ("loss", "changes", "wanted"),
    [
        ("cispo", {"eps_max": 4.0, "eps_low": 0.1, "eps_high": 0.2}, {"eps_max": 4.0}),
        ("gspo", {}, {}),
        ("gspo", {"eps_low": 0.0, "eps_high": 0.005}, {"eps_low": 0.0, "eps_high": 0.005}),
        ("dapo", {"eps_high": 0.28}, {"eps_high": 0.28}),
        ("grpo", {}, {}),
        ("grpo", {"eps_low": 0.1, "eps_high": 0.3}, {"eps": 0.1}),
        ("tis", {"tis_cap": 3.0, "tis_level": "sequence"}, {"cap": 3.0, "level": "sequence"}),
        ("tis", {"eps_low": 0.1, "eps_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3, "cap": 2.0, "level": "token"}),
    ],
)
def test_clip_options(loss, changes, wanted):
    """What was given reaches the loss, what was not stays at the loss's own default; the loss takes all of it."""
    found = clip_options(default_flags(loss=loss, **changes))
    assert found == wanted
    zeros, old = torch.zeros(1, 1), {"old_logprobs": torch.zeros(1, 1)} if loss == "tis" else {}
    losses.LOSSES[loss](zeros, zeros, torch.ones(1), torch.ones(1, 1), **found, **old)


# ------------------------------------------------------------------------------------------------------------- trainer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with a tied head, saved as `from_pretrained` wants it."""
    folder = tmp_path_factory.mktemp("model")
    settings = warm_start.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    warm_start.new_model(settings, seed=0).save_pretrained(folder)
    return str(folder)


class Alone:
    """What the trainer asks of accelerate, for one of `num_processes` ranks that never meet."""

    device = torch.device("cpu")

    def __init__(self, process_index: int = 0, num_processes: int = 1):
        self.process_index, self.num_processes = process_index, num_processes

    def prepare(self, *things):
        return things

    def unwrap_model(self, model):
        return model

    def no_sync(self, model):
        return nullcontext()

    def backward(self, loss):
        loss.backward()

    def reduce(self, tensor):
        return tensor

    def clip_grad_norm_(self, parameters, largest):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)


def trainer_and_batch(model_folder, accelerator=None, **changes) -> tuple[Trainer, TrainingBatch]:
    trainer = Trainer(default_flags(**changes), accelerator or Alone(), model_folder)
    batch, _ = batch_of(hand_groups(), tempfile.mkdtemp())
    batch.behaviour_logprobs -= 3.5 * batch.mask  # near the random model's -3.8, so that some ratios are capped
    batch.old_logprobs = batch.behaviour_logprobs - 0.1
    return trainer, batch


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("loss", ["cispo", "tis"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, 1), (12, 1), (12, 2), (1, 3), (2048, 2)])
def test_microbatches_and_ranks_change_nothing(model_folder, loss, packed, tokens, ranks):
    """Data parallelism averages the ranks' gradients: the mean over ranks is the gradient of the whole batch in one
    pass on one rank. The loss that is logged is a sum over the ranks' rows."""
    options = {"loss": loss, "eps_max": 1.05, "kl_coef": 0.1, "entropy_coef": 0.05}
    whole, batch = trainer_and_batch(model_folder, **options)
    summary = whole.gradients(batch)
    found = []
    for rank in range(ranks):
        part, batch = trainer_and_batch(
            model_folder, Alone(rank, ranks), **options, tokens_per_microbatch=tokens, packed=packed
        )
        found.append((part.gradients(batch), gradient_of(part)))
    torch.testing.assert_close(sum(g for _, g in found) / ranks, gradient_of(whole), atol=1e-6, rtol=1e-4)
    assert sum(s["loss"] for s, _ in found) == pytest.approx(summary["loss"], rel=1e-4)
    assert max(s["ratio_max"] for s, _ in found) == pytest.approx(summary["ratio_max"], rel=1e-5)


def test_the_loss_is_put_together_with_the_right_signs(model_folder):
    """Oracle: full logits row by row. minimise  sum weights * (-min(rho, cap) A log pi + kl_coef kl - entropy_coef H),
    the reference being the model as it was at the start."""
    options = {"eps_max": 1.05, "kl_coef": 0.3, "entropy_coef": 0.2, "temperature": 0.8}
    trainer, batch = trainer_and_batch(model_folder, **options)
    reference = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model = copy.deepcopy(trainer.model)
    loss, kls, entropies = 0.0, [], []
    for n, row in enumerate(batch.rows):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        new, old = (torch.log_softmax(m(input_ids=ids).logits[0] / 0.8, -1) for m in (model, reference))
        for t, token in enumerate(row.completion_ids):
            if not row.mask[t]:
                continue
            at = len(row.prompt_ids) + t - 1
            logp, entropy = new[at, token], torch.distributions.Categorical(logits=new[at]).entropy()
            log_r = old[at, token].detach() - logp
            ratio = min(math.exp(logp.item() - batch.behaviour_logprobs[n, t].item()), 1.05)
            kl = log_r.exp() - 1 - log_r
            term = -ratio * batch.advantages[n] * logp + 0.3 * kl - 0.2 * entropy
            loss = loss + batch.weights[n, t] * term
            kls.append(kl.item())
            entropies.append(entropy.item())
    loss.backward()
    summary = trainer.gradients(batch)
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient_of(trainer), wanted, atol=1e-6, rtol=1e-3)
    assert summary["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert summary["kl"] == pytest.approx(sum(kls) / 18, rel=1e-3) and len(kls) == 18
    assert summary["entropy"] == pytest.approx(sum(entropies) / 18, rel=1e-4)
    assert trainer.reference is not None and all(p.grad is None for p in trainer.reference.parameters())


def test_update_warms_up_clips_and_throws_bad_gradients_away(model_folder):
    """lr 1e-3 after 4 warm-up steps: 1/4, 2/4, 3/4, 1, 1 of it at versions 0 1 2 3 4. A NaN gradient changes nothing,
    not the weights, not Adam's moments, and it does not stay for the next step."""
    trainer, batch = trainer_and_batch(model_folder, lr=1e-3, warmup_steps=4, clip_grad=1e-3, weight_decay=0.0)
    rates = []
    for version in range(5):
        summary = trainer.gradients(batch)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        found = trainer.update(version)
        rates.append(found["lr"])
        assert found["updated"] == 1 and found["grad_norm"] > 1e-3 and math.isfinite(summary["loss"])
        moved = [(p - b).abs().max().item() for p, b in zip(trainer.model.parameters(), before, strict=True)]
        if version == 0:  # Adam's first step is lr * sign(gradient)
            assert max(moved) == pytest.approx(found["lr"], rel=1e-3)
        assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    state = copy.deepcopy(trainer.optimizer.state_dict())
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.gradients(batch)
    next(iter(trainer.model.parameters())).grad[0, 0] = math.nan
    assert trainer.update(5)["updated"] == 0
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    for found, kept in zip(trainer.optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_clipping_is_by_the_norm_of_the_whole_gradient(model_folder):
    """With an optimiser that only subtracts, at lr 1: the step's norm is clip_grad where the gradient's is larger, and
    the gradient's own where it is not."""
    for clip in (1e-3, 1e3):
        trainer, batch = trainer_and_batch(model_folder, lr=1.0, warmup_steps=0, clip_grad=clip)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.gradients(batch)
        norm = gradient_of(trainer).norm().item()
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        found = trainer.update(0)
        moved = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) - before
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert moved.norm().item() == pytest.approx(min(norm, clip), rel=1e-2)


def test_score_is_the_policys_own_logprobs_on_the_whole_batch(model_folder):
    """All rows at their places whatever the microbatches; two ranks fill in a part each, and the parts add up."""
    one, batch = trainer_and_batch(model_folder)
    whole = one.score(batch.rows)
    assert whole.shape == batch.mask.shape and not whole.requires_grad
    assert ((whole < 0) == batch.mask).all()
    for ranks in (1, 2):
        parts = [
            trainer_and_batch(model_folder, Alone(rank, ranks), tokens_per_microbatch=9)[0].score(batch.rows)
            for rank in range(ranks)
        ]
        torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=0)


def test_weights_and_parameters_that_cost_flops(model_folder):
    """Tied: the table is multiplied once, as the head. P = all parameters, since the lookup costs nothing and the
    head's product costs vocabulary x hidden. The generator gets its own dtype; the trainer's weights stay FP32."""
    trainer, _ = trainer_and_batch(model_folder, dtype="bfloat16")
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert trainer.parameters_in_flops == sum(sizes.values()) and "lm_head.weight" not in sizes
    weights = dict(trainer.weights.items())
    assert set(weights) == set(sizes) and {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_an_untied_embedding_costs_no_flops(tmp_path):
    settings = warm_start.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    config = warm_start.new_model(settings, seed=0).config
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer, _ = trainer_and_batch(str(tmp_path))
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    assert trainer.parameters_in_flops == sum(sizes.values()) - sizes["model.embed_tokens.weight"]


def test_a_model_that_never_ends_its_thinking_is_told_of_once():
    """Of 20 verdicts 11 are unfinished at step 1: a line with the flag. Not at one half, nor later, nor without verdicts."""
    record = {"truncated": 0.0, "step": 1, "verdicts": {"unfinished": 11, "correct": 4, "wrong": 5}}
    [line] = records.warnings_of(record, 0)
    assert line.startswith("Warning: 55% of completions never ended their thinking") and "--thinking false" in line
    assert records.warnings_of(record | {"step": 2}, 0) == []
    assert records.warnings_of(record | {"verdicts": {"unfinished": 10, "wrong": 10}}, 0) == []
    assert records.warnings_of(record | {"verdicts": {}}, 0) == records.warnings_of({"truncated": 0.0, "step": 1}, 0) == []




# ------------------------------------------------------------------------------------------------------------- records


def fake_clock(monkeypatch, past=None, parameters=1000, devices=2) -> tuple[Clock, Counters, list[float]]:
    now = [5000.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    counters = Counters()
    return Clock(SimpleNamespace(counters=counters), parameters, devices, past or {}), counters, now


def test_compute_by_hand(monkeypatch):
    """P = 1000: 2 P (10 prefilled + 20 sampled) + 6 P 25 forwarded = 210,000 FLOPs. 100 s less evaluation's 28 s on two
    devices: 144 / 3600 = 0.04 device-hours. What evaluation sampled and prefilled counts nowhere."""
    clock, counters, now = fake_clock(monkeypatch)
    assert clock.now() == {"tokens": 0, "trained_tokens": 0, "flops": 0, "device_hours": 0}
    now[0] += 100
    counters.prefilled, counters.sampled, counters.eval_seconds = 10, 20, 28.0
    counters.eval_sampled = counters.eval_prefilled = 10**6
    clock.forwarded, clock.trained_tokens = 25, 15
    assert clock.now() == pytest.approx({"tokens": 20, "trained_tokens": 15, "flops": 210_000, "device_hours": 0.04})


@pytest.mark.parametrize(
    ("trainers", "here", "engines", "elsewhere", "devices"),
    [
        (1, 1, [0], 0, 1),  # one GPU, shared, whatever else is visible
        (1, 1, [1], 0, 2),
        (4, 4, [4, 5, 6, 7], 0, 8),
        (4, 4, [0, 1, 2, 3], 0, 4),  # four, shared
        (8, 8, [], 8, 16),  # two hosts, engines placed by Ray
        (16, 8, [8], 0, 17),  # trainers on two hosts
    ],
)
def test_devices_in_use_by_hand(trainers, here, engines, elsewhere, devices):
    assert records.accelerators_in_use(trainers, here, engines, elsewhere) == devices


def test_compute_goes_on_after_a_resume(monkeypatch):
    past = {"tokens": 100, "trained_tokens": 50, "flops": 1e6, "device_hours": 1.5}
    clock, counters, now = fake_clock(monkeypatch, past)
    assert clock.now() == past
    now[0] += 3600
    counters.sampled, clock.trained_tokens = 7, 3
    assert clock.now() == pytest.approx(
        {"tokens": 107, "trained_tokens": 53, "flops": 1e6 + 14_000, "device_hours": 3.5}
    )


def test_evaluation_by_hand():
    """Three prompts, two samples: correct 2, 1, 0 of 2: mean 1/2, pass@2 2/3. One truncated, one interrupted of six;
    lengths 2 2 2 4 5 6 = 21."""
    groups = [
        [rollout(1), rollout(1)],
        [rollout(1), rollout(-1, 4, "length")],
        [rollout(-1, 5, forced=2), rollout(-1, 6)],
    ]
    assert evaluation_record(groups) == pytest.approx({
        "pass_rate": 0.5, "pass_at_k": 2 / 3, "n_prompts": 3, "n_samples": 2, "interrupted": 1 / 6, "truncated": 1 / 6,
        "mean_length": 3.5,
    })  # fmt: skip
    assert pass_at_k([[False, False], [False, True]]) == 0.5
    line = evaluation_line(evaluation_record(groups) | {"step": 30, "tokens": 123_456})
    for part in ("step 30", "0.500", "pass@2 0.667", "123k", "truncated 16.7%", "interrupted 16.7%", "length 3.5"):
        assert part in line


def step_record(**changes):
    return {
        "step": 7, "pass_rate": 0.25, "length": 21.5, "lag_mean": 1.234, "lag_max": 3, "ratio_mean": 1.001,
        "ratio_max": 4.56, "ess": 0.987, "entropy": 0.345, "grad_norm": 0.12, "trainer_idle": 0.5,
        "generator_idle": 0.25, "seconds": 1.75, "sync_seconds": 0.1,
    } | changes  # fmt: skip


def test_step_line_shows_what_was_measured_and_lines_up():
    line = step_line(step_record())
    parts = (
        "step    7", "pass 0.250", "length  21.5", "lag 1.23/3", "rho 1.001/4.56", "ess 0.987", "entropy 0.345",
        "grad 0.12", "waits 0.50/0.25 s", "1.75 s",
    )  # fmt: skip
    for part in parts:
        assert part in line
    assert len(step_line(step_record(step=1234, length=9.0))) == len(line)
    skipped = {
        k: v for k, v in step_record().items() if k not in ("ratio_mean", "ratio_max", "ess", "entropy", "grad_norm")
    }
    assert "rho" not in step_line(skipped) and "waits 0.50/0.25 s" in step_line(skipped)  # a skipped step has none


def test_closing_table_by_hand(monkeypatch, tmp_path):
    """Steps of 1 s and 3 s: the generator idle 0.5 + 0.1 + 0.3 + 0.1 = 1 of 4 s, the trainer 2 of 4 s; lag mean 1.5,
    max 4. Evaluations .1 .4 .6: from .1 to .6, the last two .5. The first line of the log holds the flags."""
    clock, counters, now = fake_clock(monkeypatch)
    now[0] += 10
    counters.sampled, clock.trained_tokens = 12_345, 678
    folder = Folder(tmp_path)
    folder.append("metrics.jsonl", {"config": {}})
    for seconds, idle, waited, lag, most in ((1.0, 0.5, 0.5, 1.0, 4), (3.0, 0.3, 1.5, 2.0, 2)):
        folder.append("metrics.jsonl", step_record(
            seconds=seconds, generator_idle=idle, trainer_idle=waited, lag_mean=lag, lag_max=most))  # fmt: skip
    for rate in (0.1, 0.4, 0.6):
        folder.append("eval.jsonl", {"pass_rate": rate})
    table = records.closing_table(folder, clock, "cpu", 8)
    rows = {line[:16].strip(): line[16:] for line in table.splitlines()}
    assert rows["pass rate"] == "0.100 -> 0.600 (mean of the last two 0.500)"
    assert rows["compute"].startswith("20 s on 2 x cpu") or rows["compute"].startswith("10 s on 2 x cpu")
    assert rows["tokens"] == "12,345 sampled, 678 trained"
    assert (rows["generator idle"], rows["trainer idle"]) == ("25.0%", "50.0%")
    assert rows["lag mean / max"] == "1.50 / 4 (k = 8)" and rows["files"] == str(tmp_path)


def test_flags_module_raises_usage_errors_only():
    assert issubclass(UsageError, ValueError) and flags_module.UsageError is train.UsageError
    with pytest.raises(UsageError):
        check_flags(default_flags(lr=math.nan))


def test_warnings():
    """Each watchdog speaks at its level and not below: 5 % and 10 % truncated, entropy 0.001, every third empty step."""
    healthy = {"truncated": 0.04, "entropy": 0.5}
    assert records.warnings_of(healthy, 0) == [] and records.warnings_of(healthy, 2) == []
    assert [w[:7] for w in records.warnings_of(healthy | {"truncated": 0.07}, 0)] == ["Warning"]
    assert [w[:7] for w in records.warnings_of(healthy | {"truncated": 0.2}, 0)] == ["WARNING"]
    assert "entropy is 5.0e-04" in records.warnings_of(healthy | {"entropy": 0.0005}, 0)[0]
    assert "3 steps in a row" in records.warnings_of({"truncated": 0.0}, 3)[0]
    assert records.warnings_of({"truncated": 0.0}, 4) == []
