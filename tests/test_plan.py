"""tools/plan.py: bytes by hand and by another way of counting, schedules that can be worked out by hand, the roofline."""

import itertools
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, fields, replace
from functools import cache
from pathlib import Path

import plan
import pytest
import torch
from fake_engine import FakeEngine, Problem, generating
from plan import Setting, Simulation, lognormal
from saved_bytes import saved_bytes
from transformers import AutoModelForCausalLM, Qwen3Config

from pipeline_rl import lags
from runtime.flags import Flags, parse_flags
from runtime.model import Policy, Row, make_microbatch, recompute_layers
from runtime.parts import new_pacer

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parent.parent
TINY = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
# Two tables of 1000 x 64. A layer: 64 x 64 for q and o, 64 x 32 for k and v, 3 x 64 x 96, norms of 2 x 64 and 2 x 16.
PARAMETERS = 2 * 64_000 + 3 * (2 * 4096 + 2 * 2048 + 18_432 + 128 + 32) + 64
POSITIONS = 512
FLAGS = {"dtype": "bfloat16", "model": "tiny", "tokens_per_microbatch": POSITIONS}


@pytest.fixture
def tiny(tmp_path) -> str:
    """A folder with nothing but the configuration."""
    Qwen3Config(**TINY).save_pretrained(tmp_path)
    return str(tmp_path)


@cache
def trainer(ranks: int = 1, **flags) -> dict[str, float]:
    return plan.trainer_bytes(Qwen3Config(**TINY), Flags(**FLAGS | flags), ranks, ranks == 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_and_gathered_weights_by_hand(ranks):
    """FP32 weight, gradient and two moments are shared by the ranks. At the peak both tables and the last norm are whole
    on each rank, at 2 bytes a parameter, and at most two layers."""
    found = trainer(ranks)
    assert found["FP32 weights, gradients, moments"] == pytest.approx(16 * PARAMETERS / ranks, rel=1e-3)
    root, layer = 2 * (2 * 64_000 + 64), 2 * (PARAMETERS - 2 * 64_000 - 64) / 3
    assert root <= found["layers and head, gathered"] <= root + 2 * layer


def test_what_is_kept_is_what_autograd_saves():
    """The same policy in bfloat16 with real data, its saved tensors counted by hooks; the microbatch's own are left out
    by neither. Each of three layers keeps its input only, 64 bfloat16 numbers of 512 positions; without recomputation
    at least ten times that: what its 7 products and its activations read."""
    part = make_microbatch([Row([0], [0] * (POSITIONS - 1), [1] * (POSITIONS - 1))], [0], POSITIONS - 1)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), dtype=torch.bfloat16)
    recompute_layers(model)
    saved = saved_bytes(model, lambda: Policy(model)(part))
    kept, everything = (trainer(gradient_checkpointing=on)["kept for the backward pass"] for on in (True, False))
    assert kept == pytest.approx(saved, rel=0.1) and everything - kept > 3 * 10 * POSITIONS * 64 * 2


def test_an_update_and_the_reference_model():
    """A table of 1000 x 64 in the engine's dtype, here float32, and on one GPU one part of 256 MiB. The model of the
    penalty is whole on every GPU."""
    assert trainer(dtype="float32")["an update: a whole tensor and what travels"] == 4 * 64_000 + 256 * 2**20
    assert trainer(4, kl_coef=0.1)["reference model of --kl_coef"] == 2 * PARAMETERS
    assert trainer(4)["reference model of --kl_coef"] == 0


def test_keys_and_values_and_the_longest_row_by_hand():
    """Qwen3-8B: 36 layers, 8 heads of 128, keys and values, 2 bytes; on 8 GPUs each has one of the heads. A row has
    prompt, thinking, phrase and answer."""
    config = plan.config_of("Qwen/Qwen3-8B")
    assert plan.cache_bytes(config, Flags(dtype="bfloat16")) == 147_456
    assert plan.cache_bytes(config, Flags(dtype="bfloat16", tensor_parallel=8)) == 18_432
    flags = Flags(dataset="x", max_prompt_tokens=100, max_budget=40, answer_budget=8)
    assert plan.longest_row(flags) == 100 + 40 + plan.PHRASE + 8


def test_an_engine_spends_its_share():
    """0.35 of a trainer's card of 10 GB are 3.5 GB, of its own 8.5; 16 sequences' logits are 3 FP32 tensors. An update
    travels in one part, between two GPUs in three."""
    config = Qwen3Config(**TINY)
    for shared, share, parts in ((True, 3.5e9, 1), (False, 8.5e9, 3)):
        found = plan.engine_bytes(config, Flags(**FLAGS, max_num_seqs=16), 1e10, shared)
        beyond = found.pop("beyond its share: what of an update travels")
        assert sum(found.values()) == pytest.approx(share) and beyond == parts * 256 * 2**20
        assert found["weights"] == 2 * PARAMETERS
        assert found["logits, prefill"] == 3 * 4 * 16 * 1000 + 8192 * 2 * (4 * 64 + 2 * 96)
    asked = plan.engine_bytes(config, Flags(**FLAGS, engine_args='{"gpu_memory_utilization": 0.5}'), 1e10, True)
    assert sum(asked.values()) - 256 * 2**20 == pytest.approx(5e9)


def test_exit_code_and_verdict(tiny, capsys):
    """CUDA's contexts and the update's buffers alone take 1.5 GB. A run that is there already is no hindrance."""
    for card, code, words in (("4", 0, "it fits"), ("1", 1, "it does NOT fit")):
        assert plan.main(["--card_gb", card, "--model", tiny, "--dtype", "bfloat16", "--output_dir", tiny]) == code
        assert words in capsys.readouterr().out


# The machine that docs/gpu.md names for each of its commands.
MACHINES = [(24, 1, 1), (80, 8, 4), (80, 8, 8)]


@pytest.mark.slow
def test_the_commands_of_the_gpu_page_fit_their_cards():
    shell = "".join(re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "gpu.md").read_text(), re.M | re.S))
    commands = re.findall(r"^.*\btrain\.py ((?:.*\\\n)*.*--model (?:.*\\\n)*.*)$", shell, re.M)
    for command, (card, gpus, trainers) in zip(commands, MACHINES, strict=True):
        options = f"--card_gb {card} --gpus {gpus} --trainers {trainers}"
        assert plan.main([*options.split(), *command.replace("\\\n", " ").split()]) == 0


# ------------------------------------------------------------------------------------------------- a simulated cluster

# One prompt a step, one completion of 100 tokens for each, 10 ms a token however many run: 1 s. Updates take no time.
JOB = Flags(batch_prompts=1, k=1, max_num_seqs=99)
HAND = Setting(JOB, 1, [[100]], engine_step=(0.01, 0), trainer_rate=50, push_seconds=0, steps=20)


def changed(setting: Setting, **changes) -> Setting:
    """With other values of its own, or of its flags."""
    own = {item.name: changes.pop(item.name) for item in fields(Setting) if item.name in changes}
    return replace(setting, **own, flags=replace(setting.flags, **changes))


def drawn(mean: float, sigma: float, longest: int, rollouts: int, groups: int) -> list[list[int]]:
    """Tokens of the completions of groups."""
    rng = random.Random(0)
    return [[lognormal(rng, mean, sigma, longest) for _ in range(rollouts)] for _ in range(groups)]


# A changed HAND: seconds a step, share of the trainer, of the generator, requests inside, mean and largest lag.
BY_HAND = {
    # A step takes 2 s. When a group is taken the next one enters, and is complete after 1 s. It entered one version
    # before the one that trains on it.
    "a trainer twice as slow as the engine": ({}, (2, 1, 1 / 2, 1 / 2, 1, 1)),
    # The engine never stops; 0.5 s after a group enters, the version of the group before it goes live: of the 100 tokens
    # 50 have a lag of 1 and 50 of 0.
    "twice as fast as an engine of one slot": ({"trainer_rate": 200, "max_num_seqs": 1}, (1, 1 / 2, 1, 1, 1 / 2, 1)),
    # An update of 0.25 s stops the only request: the slot is never empty, but works 80 %. Its first 10 tokens have a lag
    # of 1.
    "an update stops the requests that run": (
        {"trainer_rate": 1000, "max_num_seqs": 1, "push_seconds": 0.25},
        (1.25, 0.1 / 1.25, 0.8, 1, 0.1, 1),
    ),
    # 1 s of sampling, 0.5 s of training, an update of 0.25 s in which both stand still.
    "on-policy the two take turns": (
        {"k": 0, "trainer_rate": 200, "push_seconds": 0.25},
        (1.75, 0.5 / 1.75, 1 / 1.75, 1 / 1.75, 0, 0),
    ),
    # 1 s for two groups at once, two steps of 0.5 s, one update of 0.5 s: 2.5 s a round, lags 0 and 1.
    "ppo_off_policy": (
        {"schedule": "ppo_off_policy", "k": 2, "trainer_rate": 200, "push_seconds": 0.5},
        (1.25, 1 / 2.5, 1 / 2.5, 2 / 2.5, 1 / 2, 1),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_schedules_by_hand(name):
    changes, wanted = BY_HAND[name]
    assert astuple(Simulation(changed(HAND, **changes)).run()) == pytest.approx(wanted)


@pytest.mark.parametrize(("max_ready", "busy", "engine"), [(1, 18 / 26, 12 / 26), (0, 1, 1)])
def test_completions_that_last_longer_than_a_step(max_ready, busy, engine):
    """A completion lasts 10 s and a step 2 s, k = 8. If nothing enters while a group is ready, nine groups enter
    together, the trainer takes one every 2 s, and only when it has the last one do eight enter, and one more 2 s later.
    They take 10 s, of which it waits 8: 9 steps in 26 s, and the engine is busy for 12 of them. By default the trainer
    finds a group in the place of each that it takes, and nobody waits."""
    found = Simulation(changed(HAND, k=8, lengths=[[1000]], trainer_rate=500, max_ready=max_ready, steps=90)).run()
    assert (found.trainer_busy, found.generator_busy) == pytest.approx((busy, engine), abs=0.005)
    assert found.step_seconds == pytest.approx(2 / busy, rel=0.005)


def test_an_engine_slows_down_with_its_load():
    """B = 2, k = 0, two engines of 5 ms and 5 ms a request: two requests each, so 15 ms a token and 1.5 s a batch."""
    pairs = changed(HAND, k=0, batch_prompts=2, lengths=[[100, 100]], trainer_rate=800)
    slower = changed(pairs, data_parallel=2, engine_step=(0.005, 0.005))
    assert Simulation(slower).run().step_seconds == pytest.approx(1.5 + 400 / 800)
    assert Simulation(changed(slower, trainers=4)).run().step_seconds == pytest.approx(1.5 + 400 / 3200)


@pytest.mark.parametrize("schedule", ["pipeline", "ppo_off_policy"])
@pytest.mark.parametrize("k", [1, 3])
def test_lags_keep_their_bound(schedule, k):
    """Completions of random lengths."""
    flags = Flags(batch_prompts=4, k=k, schedule=schedule, data_parallel=2, max_num_seqs=16)
    lengths = drawn(40, 0.8, 160, rollouts=3, groups=99)
    found = Simulation(Setting(flags, 1, lengths, (0.01, 0.001), trainer_rate=2000, push_seconds=0.05, steps=30)).run()
    assert found.lag_max == (k if schedule == "pipeline" else k - 1) and 0 <= found.lag_mean < found.lag_max + (k == 1)


def test_slots_that_no_batch_fits_are_said():
    """A group of two requests never fits one slot, so the trainer would wait forever."""
    with pytest.raises(RuntimeError, match="do not fit the engines"):
        Simulation(changed(HAND, batch_prompts=2, lengths=[[100, 100]], max_num_seqs=1)).run()


def generator_share(setting: Setting) -> tuple[float, float]:
    """(share of the time that the trainer works, mean lag) of the real Generator. Its engine sleeps for each token, the
    trainer for each step; completions have the lengths of the simulation."""
    flags = setting.flags
    lengths, found, version, began, worked = itertools.cycle(itertools.chain(*setting.lengths)), [], 0, 0.0, 0.0
    engine = FakeEngine(flags.max_num_seqs, lambda ids, most: next(lengths), setting.engine_step[0])
    prompts, size = (Problem(str(i), [1]) for i in itertools.count()), len(setting.lengths[0])
    with generating(prompts, engine, new_pacer(flags), rollouts=size, max_completion=1000) as generator:
        while version < setting.warm_up + setting.steps:
            groups = generator.take(flags.batch_prompts)
            seconds = sum(len(r.mask) for g in groups for r in g.rollouts) / setting.trainer_rate
            time.sleep(seconds)
            if version >= setting.warm_up:
                found += [lag for g in groups for r in g.rollouts for lag in lags(r, version)]
                worked += seconds
            version += 1
            if version == setting.warm_up:
                began = time.monotonic()
            now = time.monotonic()
            generator.push({}, version, len(groups))
    return worked / (now - began), sum(found) / len(found)


def test_the_plan_is_what_the_real_generator_does():
    """Completions of 2 s and steps of 0.4 s: by default, with a short queue, and on an engine with few slots."""
    lengths = drawn(8, 0.5, 20, rollouts=2, groups=200)
    setting = Setting(Flags(batch_prompts=4, k=8, max_num_seqs=1000), 1, lengths, (0.25, 0), 160, 0.002, steps=20)
    settings = [setting, changed(setting, max_ready=4), changed(setting, max_num_seqs=24)]
    with ThreadPoolExecutor(len(settings)) as pool:
        measured = list(pool.map(generator_share, settings))
    for case, (busy, lag) in zip(settings, measured, strict=True):
        planned = Simulation(case).run()
        assert busy == pytest.approx(planned.trainer_busy, abs=0.05), case
        assert lag == pytest.approx(planned.lag_mean, abs=0.5), case


# ------------------------------------------------------------------------------------------------- the command line

SPEED = "--card_gb 40 --gpus 2 --dataset x --max_budget 1500 --answer_budget 500 --batch_prompts 2 --rollouts 2 --k 2"


def test_the_roofline_by_hand():
    """P = 1e9 at 1 TB/s and 100 TFLOP/s of which half is reached: 2 ms of weights become 4. All completions have 1,000
    tokens, 500 of them behind a token on average, and 100 of the prompt: 600 · 1,000 bytes are 0.6 us, 2 P FLOPs 20 us.
    Training at an MFU of 0.3: 3e13 / 6e9 = 5,000 tokens/s, of which 10 in 11 are the completions'. 2 GB over 4 GB/s:
    0.5 s. An engine on two GPUs reads half of the weights in each."""
    words = "--bandwidth_tb 1 --peak_tflops 100 --use 0.5 --mfu 0.3 --link_gb 4 --prompt 100 --lengths 1000,0"
    args, others = plan.command_line().parse_known_args([*SPEED.split(), *words.split()])
    found = plan.estimated(args, parse_flags(others, ""), 1e9, 1000)
    assert found.engine_step == (pytest.approx(0.004), pytest.approx(2 * 20.6e-6))
    assert found.trainer_rate == pytest.approx(5000 * 10 / 11) and found.push_seconds == pytest.approx(0.5)
    two = plan.estimated(args, parse_flags([*others, "--tensor_parallel", "2"], ""), 1e9, 1000)
    assert two.engine_step == (pytest.approx(0.002), pytest.approx(2 * 10.6e-6))


def test_the_best_split_gives_the_slower_side_more():
    """A trainer needs four times as long for a token as an engine: 8 of 10 GPUs train. If an engine has two GPUs, 6
    train: a batch of 800 tokens takes them 5.3 s and the two engines 4 s; with one engine it takes 8 s."""
    setting = changed(HAND, batch_prompts=8, k=4, trainers=5, data_parallel=5, max_num_seqs=1, trainer_rate=25)
    of_two = changed(setting, trainers=8, data_parallel=1, tensor_parallel=2)
    for asked, trainers in ((setting, 8), (of_two, 6)):
        found = plan.best_split(asked)
        assert (found.trainers, found.flags.data_parallel) == (trainers, 2)


def test_the_table_has_a_line_for_each_schedule(tiny, capsys):
    words = "--lengths 50,0.3 --engine_step 0.01,0 --trainer_tokens 100 --push_seconds 0.1 --model"
    assert plan.main([*SPEED.split(), *words.split(), tiny]) == 0
    printed = capsys.readouterr().out
    for name in ("pipeline 2", "the best split", "ppo_off_policy 2", "on-policy (pipeline 0)"):
        assert f"| {name} | 1 + 1 |" in printed
    assert "trainers: 100 tokens/s" in printed and "it fits" in printed


def test_what_cannot_work_is_refused(capsys):
    for words, message in (
        ("", "--model must be a folder, a hub id, or one of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B"),
        ("--model /nowhere", "--model /nowhere is no folder of a Hugging Face model"),
        ("--model Qwen/Qwen3-8B --generator_devices 3", "--generator_devices 3"),
        ("--model Qwen/Qwen3-8B --k -1", "--k must be at least 0"),
        ("--model Qwen/Qwen3-8B --lengths 8000,0.6", "--lengths is for engines on GPUs of their own; raise --gpus"),
        ("--model Qwen/Qwen3-8B --max_num_seqs 8", "--rollouts 16 do not fit one engine; raise --max_num_seqs"),
        ("--lengths 8000", "--lengths: must be two numbers, A,B, not '8000'"),
        ("--mfu 0", "--mfu: must be a number above 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            plan.main(["--card_gb", "80", *words.split()])
        assert ended.value.code == 2 and message in capsys.readouterr().err
