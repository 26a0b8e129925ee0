"""A resumed run is the run it was: bit for bit on the trainer's side, and no damaged checkpoint is taken for a whole one.

The generator is replaced by `Replay`, which hands out recorded rollouts by step, because vLLM's sampling depends on the
timing of requests. Everything else is the real `Run` and the real loop.
"""

import ast
import asyncio
import contextlib
import errno
import gc
import io
import json
import os
import pickle
import random
import re
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import new_generator, problems
from test_faults import small_disk

import pipeline_rl
import train
from runtime import checkpoints
from runtime.run_folder import Folder
from tasks import chain, warm_start

ROOT = Path(__file__).parent.parent

STEPS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny untrained model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    settings = warm_start.WarmStart(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    warm_start.new_model(settings, seed=0).save_pretrained(folder)
    chain.word_tokenizer().save_pretrained(folder)
    return str(folder)


class Killed(Exception):
    """Stands for SIGKILL: nothing may be saved on its way out."""


class Replay:
    """A generator that replays: groups by step, evaluation rollouts scored by the trainer's own policy."""

    killed_after: int | None = None
    run: "train.Run"

    def __init__(self, model, problems, score, pacer, rollouts, stop_ids, *channel, **options):
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
        ids, correct = [draw.randrange(len(chain.WORDS)) for _ in range(n)], draw.random() < 0.5
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


def arguments(folder, model, *extra):
    """The command line of a short run, or of its resumption."""
    if "--resume" in extra:
        return ["--resume", str(folder), *extra[1:]]
    argv = ["--output_dir", str(folder), "--model", model, "--max_steps", str(STEPS), "--save_every", "2", "--keep", "9"]
    argv += ["--batch_prompts", "3", "--rollouts", "4", "--prompts", "12", "--eval_every", "3", "--eval_problems", "4"]
    return [*argv, "--pass_rate_threshold", "0.6", "--probe_every", "1", "--lr", "0.01", *extra]


def go(monkeypatch, folder, model, *extra, killed_after=None):
    """Runs the real loop on recorded rollouts; returns the Run."""
    monkeypatch.setattr(pipeline_rl, "Generator", Replay)
    Replay.killed_after = killed_after
    run = Replay.run = train.Run(train.parse_flags(arguments(folder, model, *extra), ""))
    try:
        run.start()
        train.train(run)
    except Killed:
        pass
    finally:
        run.close()
    return run


@pytest.fixture
def program(monkeypatch, tmp_path, model, capsys):
    """Runs train.py's `main` on recorded rollouts in tmp_path/run; returns (exit code, stdout, stderr)."""

    class Run(train.Run):
        def __init__(self, flags):
            Replay.run = self
            super().__init__(flags)

    monkeypatch.setattr(pipeline_rl, "Generator", Replay)
    monkeypatch.setattr(train, "Run", Run)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)  # pytest's own stay

    def call(*extra, folder=tmp_path / "run"):
        Replay.killed_after = None
        code = train.main(arguments(folder, model, *extra))
        return code, *capsys.readouterr()

    return call


def without_times(folder, name):
    """The records of a log without what a clock measured; notes between the steps are left out."""
    timed = {"seconds", "device_hours", "trainer_idle", "generator_idle", "sync_seconds", "save_seconds"}
    return [{k: v for k, v in r.items() if k not in timed} for r in Folder(folder).read(name) if "step" in r]


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
    for name in ("metrics.jsonl", "eval.jsonl", "groups.jsonl"):
        left, right = (without_times(tmp_path / which, name) for which in ("whole", "cut"))
        assert left == right
    assert [r["step"] for r in without_times(tmp_path / "cut", "metrics.jsonl")] == list(range(1, STEPS + 1))


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
    settings = warm_start.WarmStart(hidden_size=64, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    warm_start.new_model(settings, seed=0).save_pretrained(other)
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


def contents(folder):
    """Content of every file in a run's folder, by name."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_eval_only_reads_a_finished_run_and_writes_nothing(program, tmp_path):
    """The model of step 7 is evaluated, with or without checkpoints; every file of the run stays as it is, and a later
    resume trains on. What is printed has the run's own step, tokens and FLOPs."""
    assert program()[0] == 0
    before, [*_, last] = contents(tmp_path / "run"), Folder(tmp_path / "run").read("eval.jsonl")
    assert last["step"] == STEPS
    checkpoints, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    for present in (True, False):
        if not present:
            checkpoints.rename(elsewhere)
        code, out, err = program("--resume", "--eval_only", "true")
        assert (code, err) == (0, "") and f"evaluating {tmp_path}/run/model, the model of step 7" in out
        [record] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        same = ("step", "version", "tokens", "trained_tokens", "flops", "pass_rate", "n_prompts")
        assert [record[name] for name in same] == [last[name] for name in same]
    elsewhere.rename(checkpoints)
    assert contents(tmp_path / "run") == before
    assert program("--resume", "--max_steps", "8")[0] == 0
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, 9))


def test_eval_only_of_a_run_that_is_not_finished(monkeypatch, program, tmp_path, model):
    """Killed at step 5: the checkpoint of step 4 is evaluated. Finished, made longer and killed again at step 9, it is
    the checkpoint of step 8 and not the old `model/`, which is still there. Nothing is written, not even by a stop."""
    go(monkeypatch, tmp_path / "run", model, killed_after=5)
    for newest, extend in ((4, []), (8, ["--max_steps", "12"])):
        if extend:
            assert program("--resume")[0] == 0
            go(monkeypatch, tmp_path / "run", model, "--resume", *extend, killed_after=9)
        before = contents(tmp_path / "run")
        code, out, err = program("--resume", "--eval_only", "true")
        assert (code, err) == (0, "") and contents(tmp_path / "run") == before
        assert f"evaluating {tmp_path}/run/checkpoints/step-{newest:06d}" in out
        assert f"evaluation at step {newest}:" in out

    def result_of(self, future):
        raise pipeline_rl.Interrupted

    monkeypatch.setattr(Replay, "result_of", result_of)
    code, out, _ = program("--resume", "--eval_only", "true")
    assert code == 143 and "nothing was evaluated" in out and contents(tmp_path / "run") == before


def test_eval_only_of_a_model_needs_no_folder(program, tmp_path):
    """Also where --output_dir holds a run of its own: nothing there is touched."""
    code, out, err = program("--eval_only", "true")
    assert (code, err) == (0, "") and "evaluation at step 0:" in out and not (tmp_path / "run").exists()
    program("--max_steps", "1")
    before = contents(tmp_path / "run")
    assert program("--eval_only", "true")[0] == 0 and contents(tmp_path / "run") == before


def test_a_finished_run_is_made_longer_and_loses_nothing(monkeypatch, tmp_path, model):
    """Seven steps, then two more: the weights are bit for bit those of a run of nine, each step stands in the logs once,
    and the final evaluation of step 7 stays."""
    whole = go(monkeypatch, tmp_path / "whole", model, "--max_steps", "9")
    go(monkeypatch, tmp_path / "run", model)
    longer = go(monkeypatch, tmp_path / "run", model, "--resume", "--max_steps", "9")
    (a, *rest_a), (b, *rest_b) = state_of(whole), state_of(longer)
    assert rest_a == rest_b and all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, 10))
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0, 3, 6, 7, 9]
    assert Folder(tmp_path / "run").model()["step"] == 9
    assert not [f.name for f in (tmp_path / "run").iterdir() if f.name.startswith("model.")]


def test_hours_are_kept_over_a_resume(program, tmp_path):
    """The hours of steps 1 to 3 are spent when the run goes on: a budget of as many is reached before step 4."""
    program("--max_steps", "3")
    spent = Folder(tmp_path / "run").newest_checkpoint()[1]["compute"]["hours"]
    assert spent > 0
    code, out, _ = program("--resume", "--max_steps", "9", "--max_hours", str(spent))
    assert code == 0 and f"--max_hours {spent} reached" in out
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3]


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


def test_only_a_disk_is_called_a_disk(program, monkeypatch, tmp_path, model):
    """What else a save may raise is no full disk: memory that ran out and a lost peer stay what they are (torch's errors
    are RuntimeErrors, too), and a folder without permission is called that."""
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Connection closed by peer [127.0.0.1]")):

        def save_state(self, folder, error=error):
            raise error

        monkeypatch.setattr("accelerate.Accelerator.save_state", save_state)
        with pytest.raises(type(error), match=str(error).split()[0]):
            program("--overwrite", "true")

    def forbidden(self, folder):
        raise PermissionError(13, "Permission denied", f"{folder}/model.safetensors")

    monkeypatch.setattr("accelerate.Accelerator.save_state", forbidden)
    code, _, err = program("--overwrite", "true")
    assert code == 1 and re.fullmatch(r"train.py: cannot write .*/model.safetensors: Permission denied; .*\n", err)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["torch", "safetensors", "sharded", "file"])
def test_what_a_full_and_a_read_only_disk_raise(tmp_path, how):
    """Real ones, of 100 kB, under 400 kB of weights: torch says "unexpected pos", safetensors and FSDP2's format errors
    of their own. All become an OSError with the disk's own reason and the path."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    weights, folder = {"a": torch.zeros(100_000)}, tmp_path / "disk"
    write = {
        "torch": lambda: torch.save(weights, folder / "a.bin"),
        "safetensors": lambda: save_file(weights, folder / "a.safetensors"),
        "sharded": lambda: dcp.save(weights, checkpoint_id=folder / "sharded"),
        "file": lambda: (folder / "a.json").write_text("x" * 400_000),
    }[how]
    with small_disk(folder, "100k") as remount:
        for number, options in ((errno.ENOSPC, "rw"), (errno.EROFS, "ro")):
            remount(options)
            with pytest.raises(OSError) as caught, train.disk(folder):
                write()
            found = caught.value.errno, caught.value.filename
            del caught
            gc.collect()  # its frames hold torch's open file
            assert found[0] == number and found[1].startswith(str(folder))


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
    task = chain.ChainTask(pool_size=8, held_out_size=8)
    flags = train.parse_flags([], "")
    with pytest.raises(train.UsageError, match="--model has a vocabulary of 40, the task's tokenizer has 47"):
        train.check_model(flags, config, task, None)
    monkeypatch.setattr(chain.ChainTask, "end_of_thinking_ids", property(lambda self: (), lambda self, value: None), raising=False)
    with pytest.raises(train.UsageError, match="--length_control interruption: end_of_thinking_ids is empty"):
        go(monkeypatch, tmp_path / "run", model)


# ---------------------------------------------------------------------------------------------------------------------
# The program's end: exit code, one sentence, whole checkpoints


def test_full_disk_ends_with_one_sentence_and_goes_on_with_more_room(program, tmp_path):
    """A disk of 300 kB holds the first checkpoint and not the second: exit code 1, the path, and once there is room the
    resumed run writes the logs of one that never stopped."""
    program(folder=tmp_path / "whole")
    with small_disk(tmp_path / "run", "300k") as remount:
        code, _, err = program()
        assert code == 1
        said = rf"train.py: cannot write {tmp_path}/run/checkpoints/unfinished-\d+: .*; earlier checkpoints are whole\n"
        assert re.fullmatch(said, err)
        assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
        remount("size=16m")
        assert program("--resume")[0] == 0
        for name in ("metrics.jsonl", "eval.jsonl", "groups.jsonl"):
            assert without_times(tmp_path / "run", name) == without_times(tmp_path / "whole", name)


def test_full_disk_under_the_logs(program, tmp_path, monkeypatch):
    """The disk is full when a step is logged, not saved: the same end; half a line is cut off by the resumed run."""
    original = Folder.append

    def append(self, name, record):
        if name == "metrics.jsonl" and record.get("step") == 4:
            with contextlib.suppress(OSError), (tmp_path / "run" / "ballast").open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            record = record | {"filler": "x" * 8192}  # the page at the end of the log has room
        original(self, name, record)

    monkeypatch.setattr(Folder, "append", append)
    with small_disk(tmp_path / "run", "2m"):
        code, _, err = program()
        assert code == 1
        assert err == (
            f"train.py: cannot write {tmp_path}/run/metrics.jsonl: No space left on device; earlier checkpoints are whole\n"
        )
        (tmp_path / "run" / "ballast").unlink()
        monkeypatch.setattr(Folder, "append", original)
        assert program("--resume")[0] == 0
        assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_read_only_folder(program, tmp_path):
    """A folder that cannot be written from the start: exit code 1, one sentence with the path."""
    with small_disk(tmp_path / "disk", "1m", "ro"):
        code, out, err = program(folder=tmp_path / "disk" / "run")
    assert code == 1 and out == ""
    assert err == (
        f"train.py: cannot write {tmp_path}/disk/run: Read-only file system; earlier checkpoints are whole\n"
    )


def test_folder_becomes_read_only(program, tmp_path, monkeypatch):
    """As a disk does after an error: step 4 can be neither logged nor saved. The checkpoint of step 2 is whole and the run
    goes on from it."""
    original = Replay.take

    def take(self, count):
        if Replay.run.step == 3:
            remount("ro")
        return original(self, count)

    with small_disk(tmp_path / "run", "4m") as remount:
        monkeypatch.setattr(Replay, "take", take)
        code, _, err = program()
        monkeypatch.setattr(Replay, "take", original)
        assert code == 1
        assert re.fullmatch(rf"train.py: cannot write {tmp_path}/run/\S+: Read-only file system; earlier .* whole\n", err)
        assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 2
        remount("rw")
        code, out, _ = program("--resume")
        assert code == 0 and "step-000002" in out
        assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == list(range(1, STEPS + 1))


class Evil:
    """Unpickled without care, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def replace(checkpoint, name, content):
    """Another file in a checkpoint, with the size that state.json then says."""
    (checkpoint / name).write_bytes(content)
    state = json.loads((checkpoint / "state.json").read_text())
    state["files"][name] = len(content)
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_checkpoint_runs_no_code(monkeypatch, program, tmp_path, model, name, form):
    """A file that would run code when unpickled, in a checkpoint from elsewhere: the code does not run. (Without the
    weights-only loader it does: the test's own check.)"""
    go(monkeypatch, tmp_path / "run", model, killed_after=3)
    mark, file = tmp_path / "mark", io.BytesIO()
    save = pickle.dump if form == "pickle" else torch.save
    save({"state": Evil(mark)}, file)
    replace(Folder(tmp_path / "run").newest_checkpoint()[0], name, file.getvalue())
    code, _, err = program("--resume")
    assert not mark.exists()
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*step-000002 does not fit this model \(.*\)\.\n", err)
    file.seek(0)
    pickle.load(file) if form == "pickle" else torch.load(file, weights_only=False)
    assert mark.exists()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A real checkpoint of torch's distributed format, as FSDP2 has it: model and optimiser on a mesh of one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = tmp_path_factory.mktemp("sharded")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer_0")
        dcp.save({"code": Evil(folder / "mark")}, checkpoint_id=folder / "evil")
    finally:
        torch.distributed.destroy_process_group()
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_runs_no_code(program, monkeypatch, tmp_path, model, sharded):
    """A real `.metadata` is plain data and is accepted; one that calls os.system is refused in one sentence before
    anything loads it. (By torch's own reader the command runs: the test's own check.)"""
    import torch.distributed.checkpoint as dcp

    go(monkeypatch, tmp_path / "run", model, killed_after=3)
    checkpoint, _ = Folder(tmp_path / "run").newest_checkpoint()
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        (checkpoint / part).mkdir()
        replace(checkpoint, f"{part}/.metadata", (sharded / part / ".metadata").read_bytes())
    code, _, err = program("--resume", "--max_steps", "3")
    assert (code, err) == (0, "")
    [checkpoint] = Folder(tmp_path / "run").checkpoints()[-1:]
    mark = tmp_path / "mark"

    class Command:
        def __reduce__(self):
            return (os.system, (f"touch {mark}",))

    content = pickle.dumps({"state_dict_metadata": Command()})
    (checkpoint / "optimizer_0").mkdir(exist_ok=True)
    replace(checkpoint, "optimizer_0/.metadata", content)
    code, _, err = program("--resume", "--max_steps", "4")
    assert not mark.exists()
    said = rf"train.py: --resume: {checkpoint} does not fit this model \(optimizer_0/.metadata: it would call \w+.system\).\n"
    assert code == 2 and re.fullmatch(said, err)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({}, no_dist=True, checkpoint_id=checkpoint / "optimizer_0")
    assert mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_in_a_sharded_checkpoint_run_no_code(sharded):
    """What is no tensor lies in the shards as a pickle, which torch's reader loads without care; here it does not."""
    import torch.distributed.checkpoint as dcp

    mark, reader = sharded / "mark", {"no_dist": True, "checkpoint_id": sharded / "evil"}
    checkpoints.check_pickles(sharded)  # its .metadata is plain: it names the object and no more
    with checkpoints.weights_only(), pytest.raises(dcp.CheckpointException, match="[Ww]eights only"):
        dcp.load({"code": None}, **reader)
    assert not mark.exists()
    dcp.load({"code": None}, **reader)
    assert mark.exists()
    own = {"optimizer": {"param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "fused": None}]}}
    with checkpoints.weights_only():
        dcp.load(own, no_dist=True, checkpoint_id=sharded / "optimizer_0")
    assert own["optimizer"]["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.999), "fused": None}]  # AdamW's defaults


@pytest.mark.parametrize("name", ["optimizer.bin", "model.safetensors"])
def test_a_checkpoint_of_zeros(monkeypatch, program, tmp_path, model, name):
    """Right size, no content: one sentence with the checkpoint's name, exit code 2."""
    go(monkeypatch, tmp_path / "run", model, killed_after=3)
    checkpoint, _ = Folder(tmp_path / "run").newest_checkpoint()
    (checkpoint / name).write_bytes(bytes((checkpoint / name).stat().st_size))
    code, _, err = program("--resume")
    assert code == 2 and re.fullmatch(rf"train.py: --resume: {checkpoint} does not fit this model \(.*\)\.\n", err)


def test_flags_given_again_win_and_are_logged(monkeypatch, program, tmp_path, model):
    """--resume with another learning rate: a line says so, config.json and metrics.jsonl have it. What does not fit the
    checkpoint's prompts is refused in one sentence."""
    go(monkeypatch, tmp_path / "run", model, killed_after=3)
    code, out, _ = program("--resume", "--lr", "0.02", "--max_steps", "4")
    assert code == 0
    lines = out.splitlines()
    assert "--lr is now 0.02 (it was 0.01)" in lines and "--max_steps is now 4 (it was 7)" in lines
    assert sum(" is now " in line for line in lines) == 2
    configs = [r["config"] for r in Folder(tmp_path / "run").read("metrics.jsonl") if "config" in r]
    assert [(c["lr"], c["max_steps"]) for c in configs] == [(0.01, 7), (0.02, 4)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.02
    lrs = [r["lr"] for r in without_times(tmp_path / "run", "metrics.jsonl")]
    assert lrs == pytest.approx([0.01 * 1 / 5, 0.01 * 2 / 5, 0.02 * 3 / 5, 0.02 * 4 / 5])  # five steps of warm-up
    assert " is now " not in program("--resume")[1]
    code, _, err = program("--resume", "--seed", "5")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*not among the prompts.*--seed.*\n", err)
    code, _, err = program("--resume", "--pass_rate_threshold", "0.8")
    assert code == 2 and re.fullmatch(r"train.py: --resume: .*Give --pass_rate_threshold and .* as before.\n", err)


def test_the_engine_dies_while_weights_are_pushed(monkeypatch, program, tmp_path, model):
    """The push of version 3 fails for good; the trainer hears of it when it pushes version 4, in the middle of step 4. Exit
    code 1, the checkpoint of step 4 named; that step is logged, so the resumed run's logs are those of one that never
    stopped."""
    go(monkeypatch, tmp_path / "whole", model)

    def push(self, tensors, version, release):
        if version == 4:
            raise pipeline_rl.EngineDied("the vLLM engine died 2 times")
        original(self, tensors, version, release)

    original = Replay.push
    with monkeypatch.context() as patch:
        patch.setattr(Replay, "push", push)
        code, out, _ = program()
    assert code == 1 and "train.py: the vLLM engine died 2 times; checkpoint" in out
    assert Folder(tmp_path / "run").newest_checkpoint()[1]["step"] == 4
    assert program("--resume")[0] == 0
    for name in ("metrics.jsonl", "eval.jsonl", "groups.jsonl"):
        assert without_times(tmp_path / "run", name) == without_times(tmp_path / "whole", name)


def test_an_evaluation_killed_in_the_middle(monkeypatch, tmp_path, model):
    """Killed while the evaluation of step 3 is waited for: the resumed run makes it, once, and the logs are the same."""
    go(monkeypatch, tmp_path / "whole", model)
    original = Replay.result_of

    def result_of(self, future):
        if Replay.run.step == 3:
            raise Killed
        return original(self, future)

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "result_of", result_of)
        go(monkeypatch, tmp_path / "run", model)
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0]
    go(monkeypatch, tmp_path / "run", model, "--resume")
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0, 3, 6, 7]
    for name in ("metrics.jsonl", "eval.jsonl", "groups.jsonl"):
        assert without_times(tmp_path / "run", name) == without_times(tmp_path / "whole", name)


def test_all_prompts_retired_is_a_success(monkeypatch, program, tmp_path):
    """Every rollout is right: all 12 prompts are retired once each was seen. The run says so, evaluates, writes its model
    and ends with exit code 0."""
    original = Replay.take

    def take(self, count):
        try:
            groups = original(self, count)
        except StopIteration:  # the real generator's word for it: test_generator.py
            raise pipeline_rl.Exhausted("no prompt is left to admit; 0 groups stay untrained") from None
        for rollout in [r for group in groups for r in group.rollouts]:
            rollout.reward, rollout.correct = 1.0, True
        return groups

    monkeypatch.setattr(Replay, "take", take)
    code, out, err = program()
    assert code == 0 and err == ""
    assert "0 groups stay untrained; 12 of 12 prompts are retired. The run ends." in out
    assert [r["step"] for r in without_times(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3, 4]
    assert "Warning: 3 steps in a row had no group with unequal rewards" in out
    assert [r["step"] for r in Folder(tmp_path / "run").read("eval.jsonl")] == [0]  # nothing was trained: it stands
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(("every", "said"), [(11, "Warning: "), (4, "WARNING")])
def test_the_loop_prints_the_truncation_warning(monkeypatch, program, every, said):
    """One rollout in 11 is cut at its cap (9 %), then one in 4 (25 %)."""
    original, count = Replay.rollout, [0]

    def rollout(self, draw):
        made = original(self, draw)
        count[0] += 1
        made.finish_reason = "length" if count[0] % every == 0 else "stop"
        return made

    monkeypatch.setattr(Replay, "rollout", rollout)
    _, out, _ = program("--max_steps", "1", "--eval_problems", "1")
    [line] = [line for line in out.splitlines() if line.lower().startswith("warning") and "truncated" in line.lower()]
    assert line.startswith(said)


@pytest.mark.parametrize("fault", ["gradient", "weights"])
def test_a_run_that_cannot_be_trusted_ends_with_one_sentence(monkeypatch, program, fault):
    """Gradients that stay bad, and log-probs that differ: exit code 1, the reason and the last good checkpoint, no
    traceback and no new checkpoint."""
    if fault == "gradient":
        original = train.Trainer.update

        def update(trainer, version):
            if Replay.run.step >= 2:
                next(trainer.policy.parameters()).grad.view(-1)[0] = float("nan")
            return original(trainer, version)

        monkeypatch.setattr(train.Trainer, "update", update)
    else:
        original = Replay.evaluate

        def evaluate(self, problems, n_samples):
            future = original(self, problems, n_samples)
            for rollout in [r for group in future.result() for r in group]:
                rollout.logprobs = [x - 1e-3 * (Replay.run.step >= 3) for x in rollout.logprobs]
            return future

        monkeypatch.setattr(Replay, "evaluate", evaluate)
    code, _, err = program()
    reason = {"gradient": "the gradient was not finite 3 times in a row", "weights": "weights check: at version 3"}[fault]
    step = {"gradient": 4, "weights": 2}[fault]  # step 4 was saved, unchanged since step 2
    assert code == 1 and err.startswith(f"train.py: {reason}") and err.count("\n") == 1
    assert f"step-{step:06d}" in err and "--resume" in err
    assert Folder(Replay.run.folder.path).newest_checkpoint()[1]["step"] == step


def test_who_waits_for_whom(capsys, tmp_path):
    """After the time limit the trainer says what it waits for: two groups of which one is finished."""
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)), pacer=pipeline_rl.Pacer(2, 1))
    numbers = [generator.pacer.admit() for _ in range(3)]
    generator.pacer.finish(pipeline_rl.Group(numbers[0], None, 0, []))
    with pytest.raises(TimeoutError):
        generator._loop.run_until_complete(asyncio.wait_for(generator._until_ready(2, 0.05), 0.12))
    generator.close()
    generator._loop.close()
    assert capsys.readouterr().out == "the trainer waits for 2 groups; 2 run, the oldest is [1]\n" * 2


def test_samples_reach_no_terminal(monkeypatch, program, tmp_path):
    """Completions that would clear the screen, ring, or rename the window: samples.jsonl is plain ASCII without control
    characters, from which the text comes back whole; nothing of it is printed."""
    text = "\x1b[2J\x07\x1b]0;title\x07\r\x7f\x9b31m\u202e\ud800 </think> 1"
    monkeypatch.setattr(chain.ChainTask, "text", lambda self, ids: text)
    _, out, err = program("--max_steps", "1")
    content = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in content)
    records = Folder(tmp_path / "run").read("samples.jsonl")
    assert len(records) == 4 and {r["completion"] for r in records} == {text}
    assert not set(out + err) & set("\x1b\x07\x7f\x9b\u202e\ud800") and "title" not in out + err


SOURCES = sorted(f for f in ROOT.glob("*.py")) + sorted((ROOT / "tools").glob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_text_becomes_code(file):
    """No eval, exec or unpickling in our source; torch.load only with weights_only; code that comes with a model only on
    --trust_remote_code."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":  # the exception; a base that is narrowed below
            assert {a.name for a in node.names} <= {"Unpickler", "UnpicklingError"}
        if isinstance(node, ast.Name) and node.id == "Unpickler":
            assert "class _Plain(Unpickler):" in file.read_text() and "def find_class(" in file.read_text()
        if isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert called not in ("eval", "exec", "os.system")
            assert "shell" not in options
            assert not called.endswith("torch.load") or options.get("weights_only") == "True"
            assert "trust_remote_code" not in options or options["trust_remote_code"] == "flags.trust_remote_code"


def test_verdicts_are_logged(monkeypatch, program, tmp_path):
    """What became of the judged completions, lost reward workers among it, is in each step's record."""
    monkeypatch.setattr(chain.ChainTask, "counts", Counter(correct=5, timeout=2), raising=False)
    program("--max_steps", "1")
    [record] = without_times(tmp_path / "run", "metrics.jsonl")
    assert record["verdicts"] == {"correct": 5, "timeout": 2}


def test_saving_is_timed(monkeypatch, program, tmp_path):
    """Two seconds in each save, after steps 2, 4 and 6: the record of the next step says so."""
    original = Folder.finish_checkpoint

    def finish_checkpoint(self, *args):
        clock[0] += 2.0
        return original(self, *args)

    clock, real = [0.0], time.monotonic
    monkeypatch.setattr(train.time, "monotonic", lambda: real() + clock[0])
    monkeypatch.setattr(Folder, "finish_checkpoint", finish_checkpoint)
    program()
    spent = [r["save_seconds"] for r in Folder(tmp_path / "run").read("metrics.jsonl") if "step" in r]
    assert [s > 0 for s in spent] == [False, False, True, False, True, False, True]
    assert all(2.0 < s < 3.0 for s in spent if s)


def test_a_stop_leaves_the_old_file_or_the_new_one(monkeypatch, tmp_path):
    """config.json is written again at each resume: killed before the rename, the old one is still there."""
    folder = Folder(tmp_path)
    folder.replace("config.json", "old")

    def killed(self, target):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", killed)
        folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "old"
    folder.replace("config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"


def test_a_second_save_after_the_same_step(tmp_path):
    """As after a SIGTERM right behind a save: the later state is there, and nothing else."""
    folder = Folder(tmp_path)
    for value in (1, 2):
        folder.finish_checkpoint(folder.begin_checkpoint(), 3, {"step": 3, "value": value}, keep=1)
    assert folder.newest_checkpoint()[1]["value"] == 2
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_groups_admitted_while_the_engine_restarts_are_no_second_death(monkeypatch, tmp_path, turns):
    """Forty groups, two at a time; the first engine dies. Its slots are free at once, so others begin on it and fail, one
    after the other, also while the new engine starts. One death, one restart, forty groups. (`turns` of the event loop
    shift the moments against each other.)"""
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    made = []

    def new_engine(args):
        made.append(SimpleNamespace(shutdown=lambda timeout: None, errored=False, dead=False))
        return made[-1]

    async def load_weights(self, engine):
        await asyncio.sleep(0.1)

    async def request(self, prompt_ids, max_tokens, salt):
        engine = self._engine
        for _ in range(turns):
            await asyncio.sleep(0)
        if not engine.dead:
            await asyncio.sleep(0.01)
        if engine is made[0] and salt != "warm-up":
            engine.dead = True
            raise self._dead_engine
        return pipeline_rl.Rollout([1], [-1.0], [0], [1], "stop")

    monkeypatch.setattr(vllm, "AsyncEngineArgs", SimpleNamespace)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", new_engine)
    monkeypatch.setattr(pipeline_rl.Generator, "_load_weights", load_weights)
    monkeypatch.setattr(pipeline_rl.Generator, "_request", request)
    generator = new_generator(
        SimpleNamespace(folder=str(tmp_path)), problems=iter(problems(40)), pacer=pipeline_rl.Pacer(40, 0), max_num_seqs=4
    )
    try:
        generator.start({})
        assert [group.number for group in generator.take(40)] == list(range(40))
    finally:
        generator.close()
    assert generator.counters.restarts == 1 and len(made) == 2
    assert 2 <= generator.counters.redone_groups <= 40


@pytest.mark.parametrize(("versions", "survives"), [((0, 5), True), ((0, 4), False), ((0, 5, 10), True), ((0, 5, 9), False)])
def test_deaths_of_the_engine_count_within_a_window(monkeypatch, tmp_path, versions, survives):
    """One death survived within 5 versions: the next one 5 versions later is, 4 versions later it is not."""

    async def start_engine(self):
        self._engine_number += 1

    monkeypatch.setattr(pipeline_rl.Generator, "_start_engine", start_engine)
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)), max_restarts=1, restart_window=5)
    generator._engine = SimpleNamespace(shutdown=lambda timeout: None)

    def die(version):
        generator.version = version
        generator._loop.run_until_complete(generator._restart(generator._engine_number))

    try:
        for version in versions[:-1]:
            die(version)
        with nullcontext() if survives else pytest.raises(pipeline_rl.EngineDied, match="died 2 times within 5 versions"):
            die(versions[-1])
        assert generator.counters.restarts == len(versions) - (not survives)
    finally:
        generator._engine = None
        generator.close()
        generator._loop.close()


def test_an_engine_that_does_not_start_again(monkeypatch, tmp_path):
    """Whatever vLLM raises when the new engine starts becomes EngineDied, which saves and ends the run."""

    def new_engine(self):
        raise ValueError("no memory")

    monkeypatch.setattr(pipeline_rl.Generator, "_new_engine", new_engine)
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)))
    generator._engine = SimpleNamespace(shutdown=lambda timeout: None)
    with pytest.raises(pipeline_rl.EngineDied, match=r"did not start again: .*\(ValueError: no memory\)"):
        generator._loop.run_until_complete(generator._restart(0))
    generator._engine = None
    generator.close()
    generator._loop.close()
