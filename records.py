"""A run's files: settings, one record a step, evaluations, checkpoints; and the clock that counts compute.

    config.json      every flag                     metrics.jsonl   the flags, then one record a step
    eval.jsonl       one record an evaluation       samples.jsonl   a few rollouts to read
    groups.jsonl     what each step consumed: [prompt key, correct, rollouts], counted from step 0
    checkpoints/     step-000030, ...               model/          the final model, Hugging Face format; run.json

A checkpoint is written to a temporary folder, flushed to disk and renamed, so one that exists is whole; `state.json`
in it lists the other files with their sizes, so one that was damaged later is told from a whole one. Loading one runs
no code that stands in it: torch's weights-only loader builds tensors and plain containers, and where torch unpickles
without it (`.metadata` of FSDP2), `check_pickles` has read the file before.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch

import length_control
from flags import OF_ONE_CALL

LOW_ENTROPY = 1e-3  # nats per token
EMPTY_STEPS = 3
UNFINISHED = 0.5  # share of completions whose thinking never ended
LOGS = ("metrics.jsonl", "eval.jsonl", "groups.jsonl", "samples.jsonl")


class Folder:
    """The files of one run. Every line is written when it is measured, so that a stop keeps what came before it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def clear(self) -> None:
        """Removes the files of the run that this folder holds, and nothing else."""
        for name in (*LOGS, "config.json", "curve.png"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("checkpoints", "model", "model.new", "model.old"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def append(self, name: str, record: dict[str, Any]) -> None:
        """One more line of the JSON-lines file `name`."""
        with _named(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Writes the file `name` as a whole: a stop leaves the old one or the new one."""
        new = self.path / f"{name}.new"
        with _named(new):
            new.write_text(text)
        new.replace(self.path / name)

    def read(self, name: str) -> list[dict[str, Any]]:
        """All records of `name`; none if it does not exist. A last line that is not whole, as a reader beside a writer
        or a killed writer leaves it, is left out."""
        file = self.path / name
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def lengths(self) -> dict[str, int]:
        """Bytes in each log, for a checkpoint."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in LOGS}

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Takes off what the logs gained after a checkpoint, so that no step appears twice."""
        for name, length in lengths.items():
            if (self.path / name).exists():
                os.truncate(self.path / name, length)

    # ---- the final model ----

    def begin_model(self) -> Path:
        """An empty folder to write the model into."""
        new = self.path / "model.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        return new

    def finish_model(self, record: dict[str, Any]) -> None:
        """Adds `record` (of step and compute) as run.json; an earlier model stays until this one takes its place."""
        new, old, final = (self.path / name for name in ("model.new", "model.old", "model"))
        with _named(new):
            (new / "run.json").write_text(json.dumps(record))
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def model(self) -> dict[str, Any] | None:
        """run.json of the final model; None if there is none."""
        file = self.path / "model" / "run.json"
        return json.loads(file.read_text()) if file.exists() else None

    # ---- checkpoints ----

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def begin_checkpoint(self) -> Path:
        """An empty folder to write the next checkpoint into; half-written ones of earlier processes are removed."""
        for leftover in self._checkpoints.glob("unfinished-*"):
            shutil.rmtree(leftover)
        temporary = self._checkpoints / f"unfinished-{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def finish_checkpoint(self, temporary: Path, step: int, state: dict[str, Any], keep: int) -> Path:
        """Adds state.json, flushes everything and the logs too, renames the folder to its final name and removes the
        oldest ones."""
        files = {str(f.relative_to(temporary)): f.stat().st_size for f in sorted(temporary.rglob("*")) if f.is_file()}
        (temporary / "state.json").write_text(json.dumps(state | {"files": files}))
        logs = [self.path / name for name in LOGS if (self.path / name).exists()]
        for file in [*temporary.rglob("*"), *logs]:
            _flush(file)
        _flush(temporary)
        final = self._checkpoints / f"step-{step:06d}"
        replaced = temporary.with_name(f"{temporary.name}-replaced")
        if final.exists():  # a second save after the same step
            final.rename(replaced)
        temporary.rename(final)
        _flush(self._checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.checkpoints()[: -max(1, keep)]:
            shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(f for f in self._checkpoints.glob("step-*") if re.fullmatch(r"step-\d+", f.name))

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """(folder, its state) of the newest whole checkpoint; damaged ones are passed over with a printed line."""
        for folder in reversed(self.checkpoints()):
            state = _whole(folder)
            if state is not None:
                return folder, state
            print(f"checkpoint {folder} is damaged and is passed over", flush=True)
        return None


def changed_flags(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each flag that a resumed run has otherwise than before."""
    changed = [name for name in new if name not in OF_ONE_CALL and name in old and new[name] != old[name]]
    return [f"--{name} is now {new[name]} (it was {old[name]})" for name in changed]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError in the block names `path`: a full disk is found when a file is written, where Python knows no name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole(folder: Path) -> dict[str, Any] | None:
    """The state of a checkpoint whose files all have the sizes that it was written with, else None."""
    try:
        state = json.loads((folder / "state.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if sizes == state["files"] else None


PLAIN = {  # what stands in the `.metadata` of a torch distributed checkpoint, beside dtypes
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
}


class _Plain(Unpickler):
    """Builds what PLAIN names, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in PLAIN.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnpicklingError(f"it would call {module}.{name}")


def check_pickles(checkpoint: Path) -> None:
    """Reads the files of a checkpoint that torch or accelerate unpickle and whose errors would come late or not at all:
    `.metadata` (FSDP2; torch's reader runs any code in it) and the random states (accelerate goes on without bad ones).
    Raises UnpicklingError if one asks for more than plain data."""
    from accelerate.utils.other import load

    for file in sorted(checkpoint.rglob("*.metadata")):
        with file.open("rb") as stream:
            try:
                _Plain(stream).load()
            except (UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
                raise UnpicklingError(f"{file.relative_to(checkpoint)}: {error}") from error
    for file in sorted(checkpoint.glob("random_states_*.pkl")):
        load(file)


@contextmanager
def weights_only() -> Iterator[None]:
    """Every `torch.load` in the block loads weights only, also where its caller asks for more, as FSDP2's does."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """One record of several; a name that stands in two of them is an error (KeyError), as one value would be lost."""
    record: dict[str, Any] = {}
    for part in parts:
        if twice := record.keys() & part.keys():
            raise KeyError(f"two values for {sorted(twice)} in one record")
        record |= part
    return record


def accelerators_in_use(trainers: int, here: int, engines: Sequence[int], elsewhere: int = 0) -> int:
    """Devices that train or sample; idle ones do not count.

    trainers: trainer processes, one device each, `here` of them on this host's first devices. engines: this host's
    devices that engines use. elsewhere: workers that Ray places.
    """
    return trainers + len({device for device in engines if device >= here}) + elsewhere


class Clock:
    """Compute so far. Start-up and evaluation's share of the time do not count; a resumed run goes on from `past`.

    generator: has `.counters` (`pipeline_rl.Counters`). parameters: P, those multiplied for each token.
    devices: accelerators of both sides that are in use, or CPU cores.
    """

    def __init__(self, generator: Any, parameters: int, devices: int, past: dict[str, float]):
        self.generator, self.parameters, self.devices, self.past = generator, parameters, devices, past
        self.started = time.monotonic()
        self.trained_tokens = self.forwarded = 0  # tokens in the loss; prompt + completion tokens in forward passes

    def trained_flops(self, batch: Any) -> int:
        """Forward and backward of one step, attention's products left out."""
        return 6 * self.parameters * sum(map(len, batch.rows))

    def hours(self) -> float:
        """Wall time, evaluation too, that of the run before a resume among it."""
        return self.past.get("hours", 0.0) + (time.monotonic() - self.started) / 3600

    def now(self) -> dict[str, float]:
        """tokens (sampled, dropped ones too), trained_tokens, flops, device_hours."""
        counters, past = self.generator.counters, self.past
        seconds = time.monotonic() - self.started - counters.eval_seconds
        # FLOPs: 2 P for each token that the generator computes, 6 P for each that the trainer does
        flops = 2 * self.parameters * (counters.prefilled + counters.sampled) + 6 * self.parameters * self.forwarded
        return {
            "tokens": past.get("tokens", 0) + counters.sampled,
            "trained_tokens": past.get("trained_tokens", 0) + self.trained_tokens,
            "flops": past.get("flops", 0) + flops,
            "device_hours": past.get("device_hours", 0.0) + seconds * self.devices / 3600,
        }


def pass_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Share of prompts with at least one correct sample among their k."""
    return sum(any(samples) for samples in correct) / len(correct)


def evaluation_record(groups: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The figures of one evaluation, from its rollouts grouped by prompt."""
    rollouts = [rollout for group in groups for rollout in group]
    return {
        "pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "pass_at_k": pass_at_k([[rollout.correct for rollout in group] for group in groups]),
        "n_prompts": len(groups),
        "n_samples": len(groups[0]),
        "interrupted": sum(rollout.interrupted for rollout in rollouts) / len(rollouts),
        "truncated": length_control.truncation_rate([rollout.finish_reason for rollout in rollouts]),
        "mean_length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
    }


def evaluation_line(record: dict[str, Any]) -> str:
    """The printed line of one evaluation."""
    return (
        f"evaluation at step {record['step']}: pass rate {record['pass_rate']:.3f} · pass@{record['n_samples']} "
        f"{record['pass_at_k']:.3f} · {record['tokens'] / 1e3:.0f}k tokens · truncated {record['truncated']:.1%} "
        f"· interrupted {record['interrupted']:.1%} · length {record['mean_length']:.1f}"
    )


def step_line(record: dict[str, Any]) -> str:
    """The printed line of one step; README explains each number."""
    line = (
        f"step {record['step']:4d} · pass {record['pass_rate']:.3f} · length {record['length']:5.1f} · "
        f"lag {record['lag_mean']:.2f}/{record['lag_max']}"
    )
    if "ratio_max" in record:
        line += (
            f" · rho {record['ratio_mean']:.3f}/{record['ratio_max']:.2f} · ess {record['ess']:.3f} · "
            f"entropy {record['entropy']:.3f} · grad {record['grad_norm']:.2f}"
        )
    return line + f" · waits {record['trainer_idle']:.2f}/{record['generator_idle']:.2f} s · {record['seconds']:.2f} s"


def warnings_of(record: dict[str, Any], empty_steps: int) -> list[str]:
    """What a healthy run does not show. `empty_steps`: steps in a row without a row to train on."""
    found = [length_control.truncation_warning(record["truncated"])]
    if record.get("entropy", 1.0) < LOW_ENTROPY:
        found.append(f"Warning: the entropy is {record['entropy']:.1e} nats: the policy hardly explores any more.")
    if empty_steps and empty_steps % EMPTY_STEPS == 0:
        found.append(
            f"Warning: {empty_steps} steps in a row had no group with unequal rewards, so nothing was trained."
        )
    verdicts = record.get("verdicts", {})
    unfinished = verdicts.get("unfinished", 0) / max(1, sum(verdicts.values()))
    if record.get("step") == 1 and unfinished > UNFINISHED:  # once, with the first evaluation's verdicts
        found.append(
            f"Warning: {unfinished:.0%} of completions never ended their thinking and count as wrong; if the model "
            "does not think, use --thinking false."
        )
    return [warning for warning in found if warning is not None]


def closing_table(folder: Folder, clock: Clock, device: str, k: int) -> str:
    """Start and end, compute, waiting, lag, and where the files are."""
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    rates = [record["pass_rate"] for record in folder.read("eval.jsonl")]
    last_two = sum(rates[-2:]) / len(rates[-2:])
    compute = clock.now()
    seconds = max(1e-9, sum(record["seconds"] for record in steps))
    mean_lag = sum(record["lag_mean"] for record in steps) / max(1, len(steps))
    rows = {
        "pass rate": f"{rates[0]:.3f} -> {rates[-1]:.3f} (mean of the last two {last_two:.3f})",
        "compute": f"{compute['device_hours'] * 3600 / clock.devices:.0f} s on {clock.devices} x {device}, "
        f"{compute['flops']:.2e} FLOPs",
        "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
        "generator idle": f"{sum(r['generator_idle'] + r['sync_seconds'] for r in steps) / seconds:.1%}",
        "trainer idle": f"{sum(r['trainer_idle'] for r in steps) / seconds:.1%}",
        "lag mean / max": f"{mean_lag:.2f} / {max((r['lag_max'] for r in steps), default=0)} (k = {k})",
        "files": str(folder.path),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in rows.items())
