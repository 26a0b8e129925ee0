"""What a run leaves at its end: the model, and the law on the run itself, in a picture and in words."""

from collections.abc import Sequence

import numpy as np
import torch

import forecast
from fit_sigmoid import UNITS, short
from forecast import CurveReport, Forecast
from runtime.parts import Parts
from runtime.recorder import Clock
from runtime.run_folder import Folder, Progress, Record, writing
from runtime.weights import full_tensors


def save_model(parts: Parts, progress: Progress) -> None:
    """The final model in Hugging Face format, in float32. A collective."""
    tensors = full_tensors(parts.trainer.model, torch.float32)
    state = {name: tensor.cpu() for name, tensor in tensors if parts.ranks.main}  # gathered on every rank
    if not parts.ranks.main:
        return
    compute = parts.recorder.clock.now()
    with writing(parts.folder.path / "model"):
        new = parts.folder.begin_model()
        parts.trainer.model.save_pretrained(new, state_dict=state)
        parts.task.tokenizer.save_pretrained(new)
        parts.folder.finish_model({"step": progress.step, "version": progress.version, "compute": compute})


def report(parts: Parts, k: int) -> str:
    """What a finished run says: the fit of each data set, its forecast at half, and the closing table. Draws
    curve.png."""
    folder, picture = parts.folder, parts.folder.path / "curve.png"
    curves, texts = [], []
    for name in pass_rates(folder.read("eval.jsonl")):  # of all that is trained on, and of each data set
        (half, whole), text = closing_fits(folder, name, parts.task.ceiling)
        curves.append([half, whole])
        texts.append(f"{forecast.format_report(whole)}\n\n{text}\n\n")
    forecast.plot_curves(curves, picture)
    table = closing_table(folder, parts.recorder.clock, parts.recorder.device, k)
    return f"\nThe law on this run ({picture}):\n{''.join(texts)}{table}"


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
    records = of_data_set(folder.read("eval.jsonl"), name)
    label = f"{folder.path}, {name}" if name else str(folder.path)
    half = forecast.curve(records, 0.5, label)
    whole = forecast.curve(records, 1.0, label)
    lines = forecast_lines(half, known)
    if whole.forecast.allowed:
        lines += [
            "the whole run",
            f"  the ceiling         {ceiling_line(whole.forecast, None)}",
        ]  # of the policy as sampled
    return [half, whole], "\n".join(lines)


def forecast_lines(half: CurveReport, known: float | None) -> list[str]:
    """What the first half of a run forecast for its end, beside what came."""
    f = half.forecast
    if not f.allowed:
        return [f"no forecast from the first half: {f.reason}"]
    C, R = float(half.C[-1]), float(half.R[-1])  # the end of the run
    low, high = f.interval(C, noise=True)[:, 0]
    verdict = "inside" if low <= R <= high else "OUTSIDE"
    later = half.unseen & np.isfinite(half.R)
    later_R = half.R[later]
    lows, highs = f.interval(half.C[later], noise=True)
    inside = (lows <= later_R) & (later_R <= highs)
    units = UNITS[half.x]
    seen = f.fit.C[-1]
    return [
        f"forecast at half: {short(float(seen))} of {short(C)} {units}, {seen / f.fit.C_mid:.1f} C_mid",
        f"  the end, forecast   {low:.3f} to {high:.3f} in 95% of cases",
        f"{'':22}{f.numbers(C)}",
        f"  the end, measured   {R:.3f}, {verdict}; of {len(inside)} evaluations {inside.sum()} inside",
        f"  the ceiling         {ceiling_line(f, known)}",
    ]


def ceiling_line(f: Forecast, known: float | None) -> str:
    """A's interval in words, and whether it holds the ceiling that is known."""
    low, high = f.A_interval
    line = f"{low:.3f} to {high:.3f}, {'identifiable' if f.identifiable else 'not identifiable yet'}"
    if known:
        line += f"; {'holds' if low <= known <= high else 'MISSES'} the known {known:.2f}"
    return line


def closing_table(folder: Folder, clock: Clock, device: str, k: int) -> str:
    """Start and end, compute, waiting, lag, and where the files are."""
    steps = [record for record in folder.read("metrics.jsonl") if "step" in record]
    compute = clock.now()
    seconds = max(1e-9, sum(record["seconds"] for record in steps))
    generator_idle = sum(record["generator_idle"] + record["sync_seconds"] for record in steps)
    trainer_idle = sum(record["trainer_idle"] for record in steps)
    mean_lag = sum(record["lag_mean"] for record in steps) / max(1, len(steps))
    largest_lag = max((record["lag_max"] for record in steps), default=0)
    wall_time = compute["device_hours"] * 3600 / clock.devices
    rows = []
    for name, rates in pass_rates(folder.read("eval.jsonl")).items():
        mean = sum(rates[-2:]) / len(rates[-2:])
        text = f"{rates[0]:.3f} -> {rates[-1]:.3f} (mean of the last two {mean:.3f})"
        rows.append(("", f"{text} of {name}") if name else ("pass rate", text))
    rows += [
        ("compute", f"{wall_time:.0f} s on {clock.devices} x {device}, {compute['flops']:.2e} FLOPs"),
        ("tokens", f"{compute['tokens']:,} sampled, {compute['trained_tokens']:,} trained"),
        ("generator idle", f"{generator_idle / seconds:.1%}"),
        ("trainer idle", f"{trainer_idle / seconds:.1%}"),
        ("lag mean / max", f"{mean_lag:.2f} / {largest_lag} (k = {k})"),
        ("files", str(folder.path)),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in rows)
