"""A resumed run is the run it was: bit for bit on the trainer's side, and no damaged checkpoint is taken for a whole one.

The generator is replaced by `Replay`, which hands out recorded rollouts by step, because vLLM's sampling depends on the
timing of requests. Everything else is the real `Run` and the real loop.
"""

import json
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

import pipeline_rl
import tasks
import train
from records import Folder

STEPS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny untrained model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    settings = tasks.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    tasks.new_model(settings, seed=0).save_pretrained(folder)
    tasks.word_tokenizer().save_pretrained(folder)
    return str(folder)


class Killed(Exception):
    """Stands for SIGKILL: nothing may be saved on its way out."""


class Replay:
    """A generator that replays: groups by step, evaluation rollouts scored by the trainer's own policy."""

    killed_after: int | None = None
    run: "train.Run"

    def __init__(self, model, problems, score, pacer, rollouts, stop_ids, **options):
        self.problems, self.score, self.pacer, self.rollouts = problems, score, pacer, rollouts
        self.counters, self.running, self.version, self.pushed = pipeline_rl.Counters(), {}, 0, []

    def start(self, tensors, version=0):
        self.version = version

    def take(self, count):
        step = Replay.run.step
        if step == Replay.killed_after:
            raise Killed
        draw = random.Random(f"recorded {step}")
        return [self.group(step * count + i, next(self.problems), draw) for i in range(count)]

    def group(self, number, problem, draw):
        rollouts = [self.rollout(draw) for _ in range(self.rollouts)]
        return pipeline_rl.Group(number, problem, self.version, rollouts)

    def rollout(self, draw):
        n = draw.randint(2, 12)
        ids, correct = [draw.randrange(len(tasks.WORDS)) for _ in range(n)], draw.random() < 0.5
        logprobs = [draw.uniform(-4.5, -3.0) for _ in range(n)]
        mask = [1] * n
        if n > 6:  # a forced phrase in the middle
            mask[3], logprobs[3] = 0, 0.0
        versions = [self.version if m else pipeline_rl.FORCED for m in mask]
        return pipeline_rl.Rollout(ids, logprobs, versions, mask, "stop", n > 6, 0, 1.0 if correct else -1.0, correct)

    def evaluate(self, problems, n_samples):
        future, draw = Future(), random.Random("evaluation")
        groups = [[self.rollout(draw) for _ in range(n_samples)] for _ in problems]
        rows = [train.policies.Row(p.prompt_ids, r.completion_ids, r.mask) for p, g in zip(problems, groups, strict=True) for r in g]
        scored = Replay.run.trainer.score(rows).tolist()
        for rollout, logprobs in zip([r for g in groups for r in g], scored, strict=True):
            rollout.logprobs = logprobs[: len(rollout.completion_ids)]
        future.set_result(groups)
        return future

    def result_of(self, future):
        return future.result()

    def push(self, tensors, version, release):
        self.version = version
        self.pushed.append(version)

    def release(self, count):
        pass

    def in_loop(self, function):
        return function(self)

    def close(self):
        pass


def go(monkeypatch, folder, model, *extra, killed_after=None):
    """Runs the real loop on recorded rollouts; returns the Run."""
    monkeypatch.setattr(pipeline_rl, "Generator", Replay)
    Replay.killed_after = killed_after
    argv = [
        "--output_dir",
        str(folder),
        "--model",
        model,
        "--max_steps",
        str(STEPS),
        "--save_every",
        "2",
        "--keep",
        "9",
    ]
    argv += ["--batch_prompts", "3", "--rollouts", "4", "--prompts", "12", "--eval_every", "3", "--eval_problems", "4"]
    argv += ["--pass_rate_threshold", "0.6", "--probe_every", "1", "--lr", "0.01", *extra]
    flags = train.parse_flags(["--resume", str(folder)] if "--resume" in extra else argv, "")
    run = Replay.run = train.Run(flags)
    try:
        run.start()
        train.train(run)
    except Killed:
        pass
    finally:
        run.close()
    return run


def state_of(run):
    """Everything of the trainer's side that must be equal."""
    optimizer = run.trainer.optimizer.state_dict()["state"]
    tensors = dict(run.trainer.model.state_dict())
    tensors |= {f"{i}.{name}": value for i, entry in optimizer.items() for name, value in entry.items()}
    return tensors, run.history.state_dict(), run.prompts.state_dict(), (run.step, run.version)


@pytest.mark.parametrize("killed_after", [2, 3, 5, 6])
def test_resumed_run_is_bit_equal(monkeypatch, tmp_path, model, killed_after):
    """Killed before the first, at and after a save: weights, Adam's moments, curriculum and logs are those of a run that
    never stopped."""
    whole = go(monkeypatch, tmp_path / "whole", model)
    go(monkeypatch, tmp_path / "cut", model, killed_after=killed_after)
    resumed = go(monkeypatch, tmp_path / "cut", model, "--resume")
    (a, *rest_a), (b, *rest_b) = state_of(whole), state_of(resumed)
    assert rest_a == rest_b
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])), name
    for name in ("metrics.jsonl", "eval.jsonl"):
        left, right = (Folder(tmp_path / which).read(name) for which in ("whole", "cut"))
        assert [r.get("step") for r in left] == [r.get("step") for r in right]
        assert [r.get("pass_rate") for r in left] == [r.get("pass_rate") for r in right]
        assert [r.get("loss") for r in left] == [r.get("loss") for r in right]
    assert len([r for r in Folder(tmp_path / "cut").read("metrics.jsonl") if "step" in r]) == STEPS


def test_weights_changed_at_all(monkeypatch, tmp_path, model):
    """Guards the test above: with lr 0.01 the run's end is not its start."""
    run = go(monkeypatch, tmp_path / "run", model)
    fresh = train.Trainer(run.flags, run.accelerator, model)
    assert not torch.equal(next(run.trainer.model.parameters()), next(fresh.model.parameters()))
    assert run.generator.pushed == list(range(1, STEPS + 1))


def test_damaged_checkpoint_is_passed_over(monkeypatch, tmp_path, model, capsys):
    """The newest checkpoint loses its last byte: the one before it is taken, and the line says so."""
    go(monkeypatch, tmp_path / "run", model, killed_after=5)
    newest, before = Folder(tmp_path / "run").checkpoints()[::-1][:2]
    weights = newest / "optimizer.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    found, state = Folder(tmp_path / "run").newest_checkpoint()
    assert (found, state["step"]) == (before, 2)
    assert f"{newest} is damaged" in capsys.readouterr().out
    (before / "state.json").write_text('{"step": 2')
    assert Folder(tmp_path / "run").newest_checkpoint() is None


def test_no_whole_checkpoint_is_one_sentence(monkeypatch, tmp_path, model):
    """--resume of a folder without a checkpoint names the flag and the fix."""
    go(monkeypatch, tmp_path / "run", model, killed_after=1)
    with pytest.raises(train.UsageError, match=r"--resume .*no whole checkpoint.*--overwrite"):
        go(monkeypatch, tmp_path / "run", model, "--resume")


def test_checkpoint_of_other_shapes(monkeypatch, tmp_path, model):
    """A model of another width does not load: one sentence that names the checkpoint, not a traceback."""
    go(monkeypatch, tmp_path / "run", model, killed_after=3)
    other = tmp_path / "other"
    settings = tasks.WarmStart(hidden_size=64, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    tasks.new_model(settings, seed=0).save_pretrained(other)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"model": str(other)}))
    with pytest.raises(train.UsageError, match="does not fit this model"):
        go(monkeypatch, tmp_path / "run", model, "--resume")


def test_half_written_checkpoint_is_no_checkpoint(tmp_path):
    """A folder that was never renamed is not listed, and the next save removes it."""
    folder = Folder(tmp_path)
    half = folder.begin_checkpoint()
    (half / "model.safetensors").write_bytes(b"half")
    assert folder.checkpoints() == [] and folder.newest_checkpoint() is None
    again = folder.begin_checkpoint()
    assert list(again.iterdir()) == []


def test_keep_and_order(tmp_path):
    """keep = 2 leaves steps 9 and 10; step 10 sorts after 9."""
    folder = Folder(tmp_path)
    for step in (1, 9, 10):
        folder.finish_checkpoint(folder.begin_checkpoint(), step, {"step": step}, keep=2)
    assert [f.name for f in folder.checkpoints()] == ["step-000009", "step-000010"]
    assert folder.newest_checkpoint()[1]["step"] == 10


def test_logs_are_cut_back(tmp_path):
    """What was appended after the checkpoint goes; a log that did not exist then becomes empty."""
    folder = Folder(tmp_path)
    folder.append("metrics.jsonl", {"step": 1})
    lengths = folder.lengths()
    folder.append("metrics.jsonl", {"step": 2})
    folder.append("eval.jsonl", {"step": 2})
    folder.cut_back(lengths)
    assert folder.read("metrics.jsonl") == [{"step": 1}] and folder.read("eval.jsonl") == []


def test_interrupt_in_mid_step_keeps_every_prompt(monkeypatch, tmp_path, model):
    """Ctrl-C while step 4's evaluation is waited for: its batch was taken but not trained, so its prompts come first
    after the resume, in their old order, and are trained exactly once."""
    seen = []
    original = Replay.take

    def take(self, count):
        groups = original(self, count)
        seen.append([group.problem.key for group in groups])
        return groups

    def result_of(self, future):
        if Replay.run.step == 3 and len(seen) == 4:
            raise pipeline_rl.Interrupted
        return future.result()

    monkeypatch.setattr(Replay, "take", take)
    monkeypatch.setattr(Replay, "result_of", result_of)
    with pytest.raises(pipeline_rl.Interrupted):
        go(monkeypatch, tmp_path / "run", model)
    stopped = Replay.run
    stopped.save()
    resumed = go(monkeypatch, tmp_path / "run", model, "--resume")
    assert seen[4] == seen[3]
    whole = go(monkeypatch, tmp_path / "whole", model)
    assert resumed.history.state_dict() == whole.history.state_dict()
    assert SimpleNamespace(**resumed.prompts.state_dict()) == SimpleNamespace(**whole.prompts.state_dict())


def test_full_disk_leaves_earlier_checkpoints_whole(monkeypatch, tmp_path, model):
    """The second save meets a full disk after its first file: the error names the path, the first checkpoint stays, the
    half-written one is gone."""
    from safetensors import SafetensorError

    saves = []
    original = train.Run.save

    def save(run):
        saves.append(run.step)
        if len(saves) == 2:

            def full(folder):
                (train.Path(folder) / "model.safetensors").write_bytes(b"half")
                raise SafetensorError("No space left on device (os error 28)")

            run.accelerator.save_state = full
        return original(run)

    monkeypatch.setattr(train.Run, "save", save)
    with pytest.raises(OSError, match="could not be written .*No space left") as caught:
        go(monkeypatch, tmp_path / "run", model)
    assert "checkpoints/unfinished-" in caught.value.filename
    assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 2


@pytest.mark.parametrize("bad_steps", [1, 3])
def test_gradient_that_is_not_finite(monkeypatch, tmp_path, model, bad_steps):
    """One NaN step is thrown away and counted and the version stays; three in a row end the run and name the checkpoint."""
    original = train.Trainer.gradients

    def gradients(trainer, batch):
        metrics = original(trainer, batch)
        if 2 <= Replay.run.step < 2 + bad_steps:
            next(trainer.policy.parameters()).grad.view(-1)[0] = float("nan")
        return metrics

    monkeypatch.setattr(train.Trainer, "gradients", gradients)
    if bad_steps == 3:
        with pytest.raises(RuntimeError, match=r"not finite 3 times in a row; .*step-000004.*--resume"):
            go(monkeypatch, tmp_path / "run", model)
        return
    run = go(monkeypatch, tmp_path / "run", model)
    records = [r for r in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in r]
    assert [r["updated"] for r in records] == [1, 1, 0, 1, 1, 1, 1]
    assert (run.step, run.version) == (STEPS, STEPS - 1)
    assert all(torch.isfinite(p).all() for p in run.trainer.model.parameters())


def test_warnings():
    """Each watchdog speaks at its level and not below: 5 % and 10 % truncated, entropy 0.001, every third empty step."""
    from records import warnings_of

    healthy = {"truncated": 0.04, "entropy": 0.5}
    assert warnings_of(healthy, 0) == [] and warnings_of(healthy, 2) == []
    assert [w[:7] for w in warnings_of(healthy | {"truncated": 0.07}, 0)] == ["Warning"]
    assert [w[:7] for w in warnings_of(healthy | {"truncated": 0.2}, 0)] == ["WARNING"]
    assert "entropy is 5.0e-04" in warnings_of(healthy | {"entropy": 0.0005}, 0)[0]
    assert "3 steps in a row" in warnings_of({"truncated": 0.0}, 3)[0]
    assert warnings_of({"truncated": 0.0}, 4) == []


def test_a_line_cut_short_is_left_out(tmp_path):
    """A killed writer leaves half a line: the records before it are read."""
    folder = Folder(tmp_path)
    folder.append("metrics.jsonl", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rewa')
    assert folder.read("metrics.jsonl") == [{"step": 1}]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max_budget", "300"], "--max_budget 300: .*context has 256; lower --max_budget"),
        (["--max_budget", "300", "--length_control", "none"], "--max_budget 300: .*context has 256"),
    ],
)
def test_budget_beyond_the_context_is_refused(monkeypatch, tmp_path, model, argv, said):
    """256 positions do not hold 300 thinking tokens: one sentence before the engine starts."""
    with pytest.raises(train.UsageError, match=said):
        go(monkeypatch, tmp_path / "run", model, *argv)


def test_model_of_another_vocabulary_and_without_an_end_of_thinking(monkeypatch, tmp_path, model):
    """A model with 40 tokens cannot answer a task with 47; a tokenizer without </think> cannot be interrupted."""
    config = SimpleNamespace(max_position_embeddings=256, vocab_size=40)
    task = tasks.ChainTask(pool_size=8, held_out_size=8)
    flags = train.parse_flags([], "")
    with pytest.raises(train.UsageError, match="--model has a vocabulary of 40, the task's tokenizer has 47"):
        train.check_model(flags, config, task, None)
    monkeypatch.setattr(tasks.ChainTask, "end_of_thinking_ids", property(lambda self: (), lambda self, value: None), raising=False)
    with pytest.raises(train.UsageError, match="--length_control interruption: end_of_thinking_ids is empty"):
        go(monkeypatch, tmp_path / "run", model)
