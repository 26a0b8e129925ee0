"""runtime/step_file.py: what --record_every keeps, and that keeping it changes nothing."""

import json

import torch
from recorded import assert_same_logs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import train
from lab.record import FOLDER, MOMENTS


def lines_of(step):
    return [json.loads(line) for line in (step / "batch.jsonl").read_text().splitlines()]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_kept_step_is_what_the_run_had(recorded, capsys, monkeypatch):
    """Seven batches: the third, the fifth and the seventh are kept, before they train. The folder loads as a model; it
    and AdamW's moments are those of the checkpoint of that step; the batch is the one of three groups of four that
    the run took next."""
    taken, record = [], train.record_if_due
    monkeypatch.setattr(train, "record_if_due", lambda *args: taken.append(args[1:]) or record(*args))
    run = recorded("run", "--record_every", "2")
    steps = sorted((run.run.folder.path / FOLDER).iterdir())
    assert [step.name for step in steps] == ["step-000002", "step-000004", "step-000006"]
    parameters = sum(parameter.numel() for parameter in run.trainer.model.parameters())
    assert f"--record_every 2: 3 steps of {12 * parameters / 1e6:.1f} MB each" in capsys.readouterr().out
    for step, number in zip(steps, (2, 4, 6), strict=True):
        assert json.loads((step / "run.json").read_text()) == {"step": number, "version": number}
        checkpoint = run.run.folder.path / "checkpoints" / f"step-{number:06d}"
        weights = dict(AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32).named_parameters())
        saved = load_file(checkpoint / "model.safetensors")
        assert all(torch.equal(weights[name], saved["model." + name]) for name in weights)
        moments = load_file(step / MOMENTS)
        optimizer = torch.load(checkpoint / "optimizer.bin")["state"]
        for i, name in enumerate(weights):
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(moments[f"{moment} {name}"], optimizer[i][moment])
    first, last = lines_of(steps[0]), lines_of(steps[2])
    assert [line["group"] for line in first] == [0] * 4 + [1] * 4 + [2] * 4
    assert set(first[0]) == {
        "group", "key", "prompt_ids", "completion_ids", "logprobs", "versions", "mask", "reward", "correct",
        "finish_reason",
    }  # fmt: skip
    groups, rewards = taken[6]
    assert [line["reward"] for line in last] == rewards.tolist()
    for line, rollout in zip(last, (rollout for group in groups for rollout in group.rollouts), strict=True):
        assert line["prompt_ids"] == list(groups[line["group"]].problem.prompt_ids)
        assert line["key"] == groups[line["group"]].problem.key
        names = ("completion_ids", "logprobs", "versions", "mask", "correct", "finish_reason")
        assert {name: line[name] for name in names} == {name: getattr(rollout, name) for name in names}


def test_recording_changes_nothing(recorded, whole):
    """Bit for bit: weights, moments, history, place in the prompts; and the logs. So does a run that is resumed, which
    writes the steps after its checkpoint again."""
    folder, other = whole
    kept = recorded("kept", "--record_every", "1")
    state, without = kept.state(), other.state()
    assert equal(state[0], without[0]) and state[1:] == without[1:]
    assert_same_logs(kept.run.folder.path, folder)
    last = kept.run.folder.path / FOLDER / "step-000006"
    before = {file: file.read_bytes() for file in last.rglob("*.*") if file.is_file()}
    (kept.run.folder.path / "checkpoints" / "step-000007").rename(folder / "elsewhere")
    (last / "batch.jsonl").write_text("of a run that was cut short")
    recorded("kept", "--resume")
    assert {file: file.read_bytes() for file in last.rglob("*.*") if file.is_file()} == before


def test_a_new_run_in_the_folder_keeps_no_old_steps(recorded):
    path = recorded("run", "--record_every", "2").run.folder.path
    recorded("run", "--overwrite", "true", "--max_steps", "3")
    assert not (path / FOLDER).exists()
