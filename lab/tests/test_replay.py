"""lab/replay.py on four recorded steps of a tiny run: the recipe's gradient is the run's, known answers, bad input."""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests"), str(Path(__file__).resolve().parents[1])]

import replay
from replay_step import Replayer, read_step
from replay_tokens import coefficients, token_slopes
from scripted import small_model

import train
from lab.record import FOLDER
from runtime.trainer import Trainer

TASK = ["--task", "replay_task:even"]
FLAGS = (
    "--engine torch --batch_prompts 6 --rollouts 4 --k 1 --max_steps 6 --record_every 1 --held_out 16 --eval_every 9 "
    "--save_every 0 --lr 0.01 --warmup_steps 0 --length_control none --max_budget 4 --pass_rate_threshold 2"
)
FEW = ["--problems", "16", "--samples", "4"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(folder of a run of six steps, its gradients by version)."""
    folder, gradients, update = tmp_path_factory.mktemp("recorded"), {}, Trainer.update

    def spied(self, version):
        gradients[version] = torch.cat([x.grad.flatten().clone() for x in self.model.parameters()])
        return update(self, version)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Trainer, "update", spied)
        monkeypatch.setattr("runtime.run.law", lambda *_: "")
        model = small_model(folder / "model")
        assert train.main([*FLAGS.split(), *TASK, "--model", model, "--output_dir", str(folder / "run")]) == 0
    return folder / "run", gradients


@pytest.fixture
def call(recorded, monkeypatch, capsys):
    """replay.py: (exit code, stdout, stderr, the rows of its table by variant)."""

    def run(*words, folder=recorded[0], noisy=-1.0):
        monkeypatch.setattr(replay, "NOISY", noisy)
        table = folder / FOLDER / "replay.json"
        table.unlink(missing_ok=True)
        code = replay.main([str(folder), *words, *FEW, *TASK])
        rows = {row["variant"]: row for row in json.loads(table.read_text())} if table.exists() else {}
        return code, *capsys.readouterr(), rows

    return run


@pytest.fixture(scope="module")
def replayer(recorded, tmp_path_factory):
    """At the fourth step: (replayer, step)."""
    options, rest = replay.read_arguments([str(recorded[0]), "--at", "3", "--against", "dapo", *TASK])
    flags, [(folder, batch)] = replay.what_to_replay(options, rest)
    with closing(Replayer(flags, folder, str(tmp_path_factory.mktemp("empty")))) as made:
        step = read_step(folder, batch, made.names)
        made.load(step)
        yield made, step


def test_the_recipes_own_gradient_is_the_runs(recorded, replayer):
    """Of every step, with stale tokens, and bit for bit but for the order of threads."""
    folder, gradients = recorded
    made, _ = replayer
    for path in sorted((folder / FOLDER).glob("step-*")):
        step = read_step(path, path / "batch.jsonl", made.names)
        made.load(step)
        own = replay.gradient(made.trainer_of(made.recipe), made.batch(step.groups, step.rewards, made.recipe))
        assert (own - gradients[step.version]).norm() < 1e-6 * own.norm()
    assert step.lag > 0.2  # of the last one


def test_known_answers(call, recorded):
    """The recipe by another name needs exactly as many tokens, a loss of the other sign never arrives and has its
    signal turned, one that silences A < 0 says so; and nothing of the run has changed."""
    folder, _ = recorded
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    variants = ["replay_task:same", "eps_max=5", "fp32=false", "replay_task:turned", "replay_task:silent"]
    code, out, _, rows = call("--at", "1:5", "--against", *variants)
    assert code == 0
    for name in variants[:3]:
        assert rows[name]["tokens"] == rows[name]["low"] == rows[name]["high"] == 1 and rows[name]["silenced"] == 0
    turned = rows["replay_task:turned"]
    assert turned["signal"] == -rows["recipe"]["signal"] and rows["recipe"]["signal"] > 0 and "never" in out
    assert 0.2 < rows["replay_task:silent"]["silenced"] < 0.8
    assert out.count("differ from the run's by 0e+00") + out.count("e-07") + out.count("e-08") == 1
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path in before}
    assert after == before and (folder / FOLDER / "replay.png").exists()


def test_steps_of_other_runs_count_too(call, recorded, tmp_path):
    """Of the table, not of replay.json. The same steps once more leave the ratio and narrow the interval; two variants
    whose interval includes 1 are not told apart, and the recipe from itself is not asked."""
    other = tmp_path / "other.json"
    _, out, _, rows = call("--against", "dapo,eps_low=0.02,eps_high=0.02", "aggregation=token")
    shutil.copy(recorded[0] / FOLDER / "replay.json", other)
    more = ["--against", "dapo,eps_low=0.02,eps_high=0.02", "aggregation=token", "--also", str(other)]
    _, again, _, own = call(*more)
    assert [len(row["steps"]) for row in own.values()] == [5, 5, 5]
    assert f"picture: {recorded[0] / FOLDER / 'replay.png'}" in again
    for text in (out, again):
        lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
        assert "no difference" not in lines["recipe"]
    both = replay.predict(replay.with_others({name: row["steps"] for name, row in rows.items()}, [other]))
    for row in both:
        assert row["of_recipe"] == pytest.approx(rows[row["variant"]]["of_recipe"]) and len(row["steps"]) == 10
    # Of 1 / tokens, since the end of an interval may be "never".
    widths = [[1 / row["low"] - 1 / row["high"] for row in table[1:]] for table in (list(rows.values()), both)]
    assert all(narrow < wide for wide, narrow in zip(*widths, strict=True))
    code, _, err, _ = call("--against", "grpo", "--also", str(other))
    assert code == 2 and "no replay.json with the same variants (KeyError: 'grpo')" in err.splitlines()[-1]
    assert call("--against", "dapo", "--also", str(tmp_path / "none.json"))[0] == 2


def test_only_an_interval_that_includes_1_tells_no_difference():
    row = {"variant": "x", "signal": 0.1, "of_recipe": 0.8, "tokens": 1.25, "silenced": 0.0, "lowered": 0.0}
    for low, high, told in ((0.9, 1.4, False), (1.1, 1.4, True), (0.6, 0.9, True), (1, 1, True)):
        assert ("no difference told" not in replay.report([row | {"low": low, "high": high}])) == told


def test_no_lag_is_a_fresh_batch_of_the_same_size(replayer):
    made, step = replayer
    made.load(step)
    groups, rewards = made.fresh_batch(step)
    assert [len(group.rollouts) for group in groups] == [4] * 6 and rewards.shape == step.rewards.shape
    assert [group.problem.key for group in groups] == [group.problem.key for group in step.groups]
    assert {v for group in groups for rollout in group.rollouts for v in rollout.versions} == {step.version}
    fresh = [rollout.completion_ids for rollout in train.rollouts_of(groups)]
    assert fresh != [rollout.completion_ids for rollout in train.rollouts_of(step.groups)]


def test_the_tokens_slopes_add_up_to_the_signal(replayer):
    """sum over tokens of c times slope = <g, d>, here along a random direction; then the weights are as they were."""
    made, step = replayer
    made.load(step)
    trainer, batch = made.trainer_of(made.recipe), made.batch(step.groups, step.rewards, made.recipe)
    g = -replay.gradient(trainer, batch)
    direction = torch.randn(g.shape, generator=torch.Generator().manual_seed(0)) + g / g.std()
    logprobs = trainer.score(batch.rows)
    slopes = token_slopes(trainer, batch.rows, direction)
    total = (coefficients(trainer, batch, logprobs) * slopes).sum()
    torch.testing.assert_close(total, g @ direction, rtol=0.05, atol=0)
    assert torch.equal(trainer.score(batch.rows), logprobs)


def test_tokens_on_the_terminal_and_on_a_page(call, tmp_path):
    """The tokens that one loss silences have a weight of 0 there; the page holds every completion and needs no network."""
    page = tmp_path / "page.html"
    words = ["--at", "5", "--against", "replay_task:silent", "--show", "3", "--page", str(page)]
    code, out, _, _ = call(*words)
    shown = out.split("helps\n")[1].splitlines()[:-1]
    assert code == 0 and len(shown) == 4
    for line in shown[:3]:
        _, advantage, _, weight, _ = line.split()[-5:]
        assert float(advantage) < 0 and float(weight) == 0
    text = page.read_text()
    table = json.loads(text.split("const data = ")[1].split(";\n")[0])
    assert table["variants"] == ["recipe", "replay_task:silent"] and table["step"] == 5
    rows = [row for group in table["groups"] for row in group["completions"]]
    assert len(rows) % 4 == 0 and "http" not in text
    for row in rows:
        for _, trains, rho, _, _, one, other in row["tokens"]:
            assert not trains or (one == min(rho, 5) and other == (one if row["advantage"] > 0 else 0))


def test_another_trainers_step_is_replayed_from_five_columns(recorded, tmp_path, monkeypatch, capsys):
    """Its gradient is the one that a run of ours would make of it."""
    source = recorded[0] / FOLDER / "step-000003"
    columns = ("group", "prompt_ids", "completion_ids", "logprobs", "reward")
    lines = [json.loads(line) for line in (source / "batch.jsonl").read_text().splitlines()]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("\n".join(json.dumps({name: line[name] for name in columns}) for line in lines))
    monkeypatch.setattr(replay, "NOISY", -1.0)
    flags = [*TASK, "--engine", "torch", "--length_control", "none", "--max_budget", "4", "--lr", "0.01"]
    words = ["--model", str(source), "--batch", str(batch), *FEW, "--against", "dapo,eps_low=9,eps_high=9", *flags]
    assert replay.main(words) == 0
    recipe, unclipped = json.loads((tmp_path / "replay.json").read_text())
    assert unclipped["tokens"] == pytest.approx(1, abs=1e-5) and recipe["signal"] != 0
    assert "Few batches predict badly" in capsys.readouterr().out
    assert replay.main([*words[: words.index("--task")], "--engine", "torch"]) == 2
    assert "needs --dataset or --task" in capsys.readouterr().err


def damaged(source, target, name, change):
    """A copy of the run whose step 3 has one file changed."""
    shutil.copytree(source, target)
    change(target / FOLDER / "step-000003" / name)
    return target


def other_tokens(path):
    path.write_text(path.read_text().replace('"prompt_ids": [', '"prompt_ids": [999, '))


def equal_rewards(path):
    lines = [json.loads(line) | {"reward": 1.0} for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, lines)))


def other_shape(path):
    moments = load_file(path)
    name = next(name for name in moments if name.startswith("exp_avg_sq"))
    save_file(moments | {name: torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("batch.jsonl", other_tokens, "the batch is of another model: it has token 999."),
        ("batch.jsonl", equal_rewards, "no batch has a group with unequal rewards"),
        ("moments/adamw.safetensors", other_shape, "its moments have another shape"),
        ("batch.jsonl", lambda path: path.write_text('{"group": 0}\n'), "is no step of this model"),
        ("moments/adamw.safetensors", lambda path: path.write_bytes(b"cut off"), "is no step of this model"),
    ],
)
def test_files_that_do_not_fit(call, recorded, tmp_path, name, change, sentence):
    folder = damaged(recorded[0], tmp_path / "run", name, change)
    code, _, err, _ = call("--at", "3", "--against", "dapo", folder=folder)
    assert code == 2 and sentence in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--against", "schedule=ppo_off_policy"], "schedule cannot be replayed; these can: loss, "),
        (["--against", "length_control=none"], "length_control cannot be replayed"),
        (["--against", "e=1"], "e cannot be replayed"),
        (["--against", "nothing"], "--loss must be cispo, "),
        (["--against", "dapo,eps_max=3"], "--eps_max 3.0 does nothing with --loss dapo"),
        (["--against", "dapo", "--at", "77"], "step 77 is not recorded; these are: 1, 2, 3, 4, 5."),
        (["--against", "dapo", "--at", "x"], "steps are numbers"),
        (["--against", "dapo", "--kl_coef", "0.1"], "a KL penalty cannot be replayed"),
        (["--against", "dapo", "--nonsense", "1"], "unknown flag --nonsense"),
        (
            ["--model", "a", "--batch", "b", "--against", "dapo"],
            "give the folder of a run, or both --model and --batch",
        ),
        (["--against", "tis", "--schedule", "ppo_off_policy"], "tis cannot be replayed there, its old log-probs were"),
        ([], "the following arguments are required: --against"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(call, words, sentence):
    code, out, err, _ = call(*words)
    assert code == 2 and sentence in err and len(err.splitlines()) == 1 and not out


def test_a_step_whose_weights_are_cut_off(call, recorded, tmp_path):
    """The first step makes the trainer; this is the second."""
    folder = damaged(recorded[0], tmp_path / "run", "model.safetensors", lambda path: path.write_bytes(b"cut off"))
    code, _, err, _ = call("--at", "2", "3", "--against", "dapo", folder=folder)
    assert code == 2 and "step-000003 has no weights of this model" in err.splitlines()[-1]


def test_gradients_that_do_not_fit_are_measured_one_step_after_the_other(call, monkeypatch, recorded):
    """Three steps, of which all are in the run's own metric either way: the same signals, and each gradient is gone
    when the next step is measured, but g* stays for --show. Those of one step that would not fit are refused before any is made."""
    words = ["--at", "1:3", "--against", "dapo"]
    together = call(*words)[3]
    weights = load_file(recorded[0] / FOLDER / "step-000001" / "model.safetensors")
    one_step = 4 * (2 + replay.PARTS) * sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(replay, "LARGEST", 2.9 * one_step)
    kept, measure = [], replay.measure

    def spied(replayer, step, *others):
        kept.append([len(earlier.gradients) for earlier in steps])
        steps.append(step)
        measure(replayer, step, *others)
        directions.append(step.stars.mean(0))

    steps, directions = [], []
    monkeypatch.setattr(replay, "measure", spied)
    assert call(*words)[3] == together and kept == [[], [0], [0, 0]]
    assert all(torch.equal(step.stars[0], star) for step, star in zip(steps, directions, strict=True))
    monkeypatch.setattr(replay, "LARGEST", 0.9 * one_step)
    code, out, err, _ = call(*words)
    assert code == 2 and not out and "GB; give fewer variants." in err


def test_a_run_without_recorded_steps(call, tmp_path):
    code, _, err, _ = call("--against", "dapo", folder=tmp_path)
    assert code == 2 and "has no recorded steps; train with --record_every" in err


def test_a_noisy_direction_says_how_many_samples_would_do(call):
    """Halves that agree by less than is asked for here: no table, and exit code 1. Halves that agree by .1 have 9 times
    the squared noise of a half's signal; those by .3 have 7/3, so it takes 27/7 times the completions: 4."""
    code, out, _, rows = call("--at", "5", "--against", "dapo", noisy=1.1)
    assert (
        code == 1
        and not rows
        and "step 5: the halves of g* agree by" in out
        and "times the completions would do" in out
    )
    step = SimpleNamespace(number=5, agreement=0.1)
    assert "about 4 times the completions" in replay.noise(step)
