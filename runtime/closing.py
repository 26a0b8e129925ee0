"""What a run leaves at its end: the model, and the law on the run itself, in a picture and in words."""

from collections.abc import Sequence

import torch

import fit_sigmoid
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
    """What a finished run says: Eq. 1 fitted to each data set's pass rates, and the closing table. Draws curve.png."""
    folder, picture = parts.folder, parts.folder.path / "curve.png"
    fits, x = {}, "tokens" if parts.recorder.device == "cpu" else "device_hours"
    for name in pass_rates(folder.read("eval.jsonl")):  # of all that is trained on, and of each data set
        rows = of_data_set(folder.read("eval.jsonl"), name)
        C = [0 if row["step"] == 0 else row[x] for row in rows]
        n = [row["n_prompts"] * row["n_samples"] for row in rows]
        fits[name or str(folder.path)] = fit_sigmoid.fit(C, [row["pass_rate"] for row in rows], n_samples=n)
    fit_sigmoid.plot_fits({name: f for name, f in fits.items() if f.A == f.A}, x, picture)
    texts = [fit_sigmoid.report(name, f, x) for name, f in fits.items()]
    table = closing_table(folder, parts.recorder.clock, parts.recorder.device, k)
    return "\n\n".join([f"\nThe law on this run ({picture}):", *texts, table])


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
