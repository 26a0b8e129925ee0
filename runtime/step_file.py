"""The steps that a run keeps, so that lab/replay.py can ask what another loss would have done with them.

`--record_every N` keeps the steps that follow N, 2 N, 3 N, ... trained batches (the first one of all has no moments
yet). OUTPUT_DIR/recorded/step-000030 is the state after 30 batches, and the batch that trains next:

    config.json, model.safetensors, ...    a model folder in Hugging Face format, with its tokenizer; FP32 weights
    moments/adamw.safetensors              `exp_avg NAME` and `exp_avg_sq NAME` of each parameter; FP32. (In a folder of
                                           its own: vLLM loads every *.safetensors beside config.json.)
    run.json                               {"step", "version"}: batches consumed, updates made
    batch.jsonl                            a JSON object for each rollout, in the batch's order:

        group                         number of its prompt in the batch, from 0; a prompt may occur twice
        prompt_ids, completion_ids    token ids; the completion with its stop token
        logprobs                      of each completion token, the generator's own at its temperature; 0.0 if forced
        versions, mask                of each completion token: the policy version that sampled it, or -1 where it was
                                      forced; 1 if it trains, else 0
        reward                        the one that trains: shaped, or shuffled
        correct, finish_reason        what the pass rate counts; "stop" or "length"
        key                           of the problem, by which its task finds it

Of another trainer's step, `group`, the ids, `logprobs` and `reward` are enough, beside a model folder.

Recording draws nothing and changes nothing: given the same rollouts, the weights of a run are the same, bit for bit,
with it and without. A resumed run writes the steps after its checkpoint again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline_rl import Group
from runtime.folder import remove, swap, writing
from runtime.trainer import Trainer
from runtime.weights import full_tensors, whole

if TYPE_CHECKING:
    from runtime.parts import Run

FOLDER = "recorded"
MOMENTS = "moments/adamw.safetensors"
BYTES = 12  # of a parameter: its weight and two moments


def recording_note(run: Run) -> str:
    """What --record_every will take of the disk."""
    flags, step = run.flags, run.progress.step
    count = max(0, (flags.max_steps - 1) // flags.record_every - step // flags.record_every)
    size = BYTES * sum(parameter.numel() for parameter in run.trainer.model.parameters())
    bytes_each = f"{size / 1e6:,.1f} MB each ({count * size / 1e9:.2g} GB)"
    where = f"and their rollouts go to {run.folder.path / FOLDER}"
    return f"--record_every {flags.record_every}: {count} steps of {bytes_each} {where}"


def record_if_due(run: Run, groups: Sequence[Group], rewards: Tensor) -> None:
    """Keeps the step that `groups` train next, with their `rewards` (N,), if it is one of those. A collective."""
    every, step = run.flags.record_every, run.progress.step
    if not every or not step or step % every:
        return
    main = run.ranks.main  # what is gathered on all ranks is kept on this one
    weights = {name: x.cpu() for name, x in full_tensors(run.trainer.model, torch.float32) if main}
    moments = {name: x for name, x in moments_of(run.trainer) if main}
    run.ranks.from_main(lambda: write_step(run, weights, moments, batch_lines(groups, rewards)))


def moments_of(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """(`exp_avg NAME`, tensor), (`exp_avg_sq NAME`, tensor) of each parameter that was stepped, gathered one by one."""
    for name, parameter in trainer.model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in trainer.optimizer.state:
                yield f"{moment} {name}", whole(trainer.optimizer.state[parameter][moment]).cpu()


def batch_lines(groups: Sequence[Group], rewards: Tensor) -> list[str]:
    """batch.jsonl."""
    lines = []
    rollouts = [(i, group.problem, rollout) for i, group in enumerate(groups) for rollout in group.rollouts]
    for (i, problem, rollout), reward in zip(rollouts, rewards.tolist(), strict=True):
        names = ("completion_ids", "logprobs", "versions", "mask", "correct", "finish_reason")
        record = {"group": i, "key": problem.key, "prompt_ids": list(problem.prompt_ids), "reward": reward}
        lines.append(json.dumps(record | {name: getattr(rollout, name) for name in names}))
    return lines


def write_step(run: Run, weights: dict[str, Tensor], moments: dict[str, Tensor], lines: list[str]) -> None:
    """Writes one step on rank 0, into a folder that is whole or absent."""
    progress = run.progress
    final = run.folder.path / FOLDER / f"step-{progress.step:06d}"
    new = final.with_suffix(".new")
    with writing(final):
        remove(new)
        new.mkdir(parents=True)
        run.trainer.model.save_pretrained(new, state_dict=weights)
        run.task.tokenizer.save_pretrained(new)
        (new / MOMENTS).parent.mkdir()
        save_file(moments, new / MOMENTS)
        (new / "run.json").write_text(json.dumps({"step": progress.step, "version": progress.version}))
        (new / "batch.jsonl").write_text("\n".join(lines) + "\n")
        swap(new, final)
