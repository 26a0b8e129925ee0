"""What a run leaves at its end: the model, and the law on the run itself, in a picture and in words."""

from collections.abc import Sequence

import numpy as np
import torch

import fit_sigmoid
from fit_sigmoid import CurveReport, SigmoidFit, short
from runtime.model import full_tensors
from runtime.parts import Parts
from runtime.recorder import Clock
from runtime.run_folder import Folder, Progress, Record, disk


def save_model(parts: Parts, progress: Progress) -> None:
    """The final model in Hugging Face format, in float32. A collective. Raises OSError for a full or read-only disk."""
    tensors = full_tensors(parts.trainer.model, torch.float32)  # on every rank
    state = {name: tensor.cpu() for name, tensor in tensors if parts.ranks.main}
    if not parts.ranks.main:
        return
    with disk(parts.folder.path / "model"):
        new = parts.folder.begin_model()
        parts.trainer.model.save_pretrained(new, state_dict=state)
        parts.task.tokenizer.save_pretrained(new)
        compute = parts.recorder.clock.now()
        parts.folder.finish_model({"step": progress.step, "version": progress.version, "compute": compute})


def report(parts: Parts, k: int) -> str:
    """What a finished run says: the fit of each data set, its forecast at half, and the closing table. Draws
    curve.png."""
    folder, picture = parts.folder, parts.folder.path / "curve.png"
    names = pass_rates(folder.read("eval.jsonl"))  # of all that is trained on, and of each data set
    found = [closing_fits(folder, name, parts.task.ceiling) for name in names]
    fit_sigmoid.plot_curves([curves for curves, _ in found], picture)
    fits = "\n\n".join(f"{fit_sigmoid.format_report(whole)}\n\n{text}" for (_, whole), text in found)
    table = closing_table(folder, parts.recorder.clock, parts.recorder.device, k)
    return f"\nThe law on this run ({picture}):\n{fits}\n\n{table}"


def pass_rates(evaluations: Sequence[Record]) -> dict[str, list[float]]:
    """Pass rates over all that is trained on (""), and of each data set that the last evaluation has."""
    names = ["", *evaluations[-1].get("data_sets", {})]
    return {name: [record["pass_rate"] for record in of_data_set(evaluations, name)] for name in names}


def of_data_set(records: Sequence[Record], name: str) -> list[Record]:
    """The records of evaluations with the figures of one data set ("": of all that is trained on), from the first that
    has it: a set may have come with a resume."""
    if not name:
        return list(records)
    return [record | record["data_sets"][name] for record in records if name in record.get("data_sets", {})]


def closing_fits(folder: Folder, name: str, known: float | None) -> tuple[list[CurveReport], str]:
    """The forecast that the first half of a run makes, and the fit to all of it: both reports, and what a person reads.
    `name` is the data set's, "" for all; `known` is the task's own ceiling, where it has one."""
    records, label = of_data_set(folder.read("eval.jsonl"), name), f"{folder.path}, {name}".removesuffix(", ")
    found = [fit_sigmoid.curve(records, share, label) for share in (0.5, 1.0)]
    half, f = found[0], found[0].fit
    lines = [f"no forecast from the first half: {f.reason}"]
    if f.best:
        at, last = float(half.C[-1]), float(half.R[-1])
        low, high = f.interval(at, noise=True)[:, 0]
        come = half.unseen & np.isfinite(half.R)
        ends = f.interval(half.C[come], noise=True)
        held = int(((ends[0] <= half.R[come]) & (half.R[come] <= ends[1])).sum())
        lines = [
            f"forecast at half: {short(float(f.C[-1]))} of {short(at)} {fit_sigmoid.UNITS[half.x]}, "
            f"{f.C[-1] / f.C_mid:.1f} C_mid",
            f"  the end, forecast   {float(f.predict(at, f.form)):.3f}, in 95% of cases {low:.3f} to {high:.3f}",
            f"  the end, measured   {last:.3f}, {'inside' if low <= last <= high else 'OUTSIDE'}; "
            f"of {come.sum()} evaluations {held} inside",
            f"  the ceiling         {ceiling_line(f, known)}",
        ]
    if (whole := found[1].fit).best:
        lines += ["the whole run", f"  the ceiling         {ceiling_line(whole, None)}"]  # of the policy as sampled
    return found, "\n".join(lines)


def ceiling_line(f: SigmoidFit, known: float | None) -> str:
    """A's interval in words, and whether it holds the ceiling that is known."""
    low, high = f.A_interval
    line = f"{low:.3f} to {high:.3f}, {'identifiable' if f.identifiable else 'not identifiable yet'}"
    return line + (f"; {'holds' if low <= known <= high else 'MISSES'} the known {known:.2f}" if known else "")


def closing_table(folder: Folder, clock: Clock, device: str, k: int) -> str:
    """Start and end, compute, waiting, lag, and where the files are."""
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    compute = clock.now()
    flops, seconds = f"{compute['flops']:.2e} FLOPs", max(1e-9, sum(record["seconds"] for record in steps))
    mean_lag = sum(record["lag_mean"] for record in steps) / max(1, len(steps))
    generator_idle = sum(record["generator_idle"] + record["sync_seconds"] for record in steps)
    rates = [
        f"{found[0]:.3f} -> {found[-1]:.3f} (mean of the last two {sum(found[-2:]) / len(found[-2:]):.3f})"
        + (f" of {name}" if name else "")
        for name, found in pass_rates(folder.read("eval.jsonl")).items()
    ]
    rows = {
        "pass rate": f"\n{'':<16}".join(rates),
        "compute": f"{compute['device_hours'] * 3600 / clock.devices:.0f} s on {clock.devices} x {device}, {flops}",
        "tokens": f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained",
        "generator idle": f"{generator_idle / seconds:.1%}",
        "trainer idle": f"{sum(r['trainer_idle'] for r in steps) / seconds:.1%}",
        "lag mean / max": f"{mean_lag:.2f} / {max((r['lag_max'] for r in steps), default=0)} (k = {k})",
        "files": str(folder.path),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in rows.items())
