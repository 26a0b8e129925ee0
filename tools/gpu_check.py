"""Whether all of this works on your GPUs: 13 checks in 20 minutes, one line each, up to the first that fails.

    make gpu-check                            # the environment, then every check
    python tools/gpu_check.py --only 4 5      # some of them again
    python tools/gpu_check.py --cpu           # the dry run: the same code, small numbers, no device

What only a GPU can show is here, from the single function to the whole job, so that the first line that fails names the
smallest part that is broken. A line begins with

    ok        everything in it was measured and is within its bounds
    dry       the dry run: within its bounds, but no device was used; what was not run is named
    not run   the machine lacks what the check needs
    FAILED    the script ends with exit code 1

OUTPUT/report.json has the machine, the versions and every figure with its bound: paste it into a bug report.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_check_job import MARK, Job, NotRun, gpus, marked, none_left, versions
from measuring import ROOT, processor
from psutil import virtual_memory

LIMIT = 5.0  # minutes that a check may take, and as many times those that it should take
PATIENCE = 10.0  # seconds in which the processes of a check may end by themselves


class Check(NamedTuple):
    """One line of the output."""

    number: int
    name: str
    function: str  # module:function, which gets a job, writes figures into it and returns the rest of the line
    minutes: float  # that it should take on one GPU
    on_cpu: str = ""  # what the dry run leaves out


CHECKS = (
    Check(0, "machine", "gpu_check_parts:machine", 0.5, "driver, CUDA"),
    Check(1, "head", "gpu_check_parts:head", 0.5, "a GPU's products"),
    Check(2, "trainer", "gpu_check_parts:trainer", 1.0, "the GPU's side"),
    Check(3, "memory", "gpu_check_parts:memory", 1.5, "memory of the GPU"),
    Check(4, "weights in flight", "gpu_check_engine:weights_in_flight", 3.0, "ipc, asynchronous scheduling, memory"),
    Check(5, "checksums", "gpu_check_engine:checksums", 1.5, "ipc (both are by file), linear layers"),
    Check(6, "demo, float32", "gpu_check_runs:demo_float32", 2.0, "a GPU's precision"),
    Check(7, "demo, bfloat16", "gpu_check_runs:demo_bfloat16", 1.5, "a GPU's precision"),
    Check(8, "the command for one GPU", "gpu_check_runs:readme_command", 4.0, "ipc, a real model's size and speed"),
    Check(9, "stop and resume", "gpu_check_runs:stop_and_resume", 1.0, "ipc"),
    Check(10, "engine killed", "gpu_check_runs:engine_killed", 1.0, "ipc"),
    Check(11, "FSDP2", "gpu_check_runs:fsdp2", 2.0, "accelerate's launcher, NCCL"),
    Check(12, "several GPUs", "gpu_check_runs:several_gpus", 3.0, "NCCL, Ray, accelerate's launcher"),
)


def run_checks(checks: Sequence[Check], output: Path, cpu: bool, model: str) -> dict[str, Any]:
    """Runs the checks in order up to the first that fails. Prints a line and renews OUTPUT/report.json after each, as
    `ok 4 weights in flight: ipc tied 0.31 s/update gap 6e-03 · ...`; returns what is in the report."""
    report: dict[str, Any] = {"dry_run": cpu, "machine": machine(), "versions": versions(), "checks": []}
    report |= {"arguments": sys.argv[1:], "date": time.strftime("%Y-%m-%d %H:%M"), "passed": True}
    for check in checks:
        found = run_check(check, Job(output / f"{check.number:02d}", cpu, model))
        report["checks"].append(found)
        report["passed"] = found["status"] != "FAILED"
        (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        left_out = f" (not run: {'; '.join(found['not_run'])})" if found["not_run"] else ""
        print(f"{found['status']} {check.number} {check.name}: {found['line']}{left_out}", flush=True)
        if not report["passed"]:
            print(found["log"][-2000:], file=sys.stderr)
            break
    return report


def machine() -> dict[str, Any]:
    """What this runs on. It is asked without CUDA, whose context would stay on the GPU through all checks."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"gpus": gpus(), "cpu": processor(), "cores": os.cpu_count(), "memory_gb": virtual_memory().total // 10**9,
            "system": platform.platform(), "commit": head.stdout.strip()}  # fmt: skip


def run_check(check: Check, job: Job) -> dict[str, Any]:
    """The record of one check: status, line, seconds, figures, what was not run, and the end of the log if it failed.
    It has a process of its own, as a failed one may hold a GPU's memory, and none of its processes is left."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    resource_tracker.ensure_running()  # before the mark: it is not of this check
    os.environ[MARK] = f"{os.getpid()}-{check.number}"
    os.environ["SPT_NOENV"] = "1"  # or vLLM's engine overwrites the mark with its title
    process = get_context("spawn").Process(target=in_own_process, args=(check.function, job))
    limit, started = 60 * LIMIT * (1 + check.minutes), time.monotonic()
    try:
        process.start()
        process.join(limit)
        code = process.exitcode
        if code is not None:
            none_left(PATIENCE)
    finally:
        for pid in marked():  # an engine that outlives its check would keep its memory
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        none_left(PATIENCE)
        process.join()
    figures, errors, skipped = job.read("figure"), job.read("error"), job.read("skipped")
    errors += [f"{f['name']}: {f['value']}, must be {f['bound']}" for f in figures if not f["met"]]
    if code is None:
        errors.append(f"it did not end within {limit:.0f} s")
    elif not (errors or skipped or job.read("line")):
        errors.append(f"its process ended with {code} and no result")
    status = "FAILED" if errors else "not run" if skipped else "dry" if job.cpu else "ok"
    not_run = job.read("not_run") + [check.on_cpu] * bool(job.cpu and check.on_cpu)
    record = {"number": check.number, "name": check.name, "seconds": round(time.monotonic() - started, 1)}
    record |= {"status": status, "line": "; ".join(errors or skipped or job.read("line")), "not_run": not_run}
    if errors:
        record["log"] = job.log.read_text(errors="replace")[-4000:] if job.log.exists() else ""
    else:
        for folder in [entry for entry in job.folder.iterdir() if entry.is_dir()]:
            shutil.rmtree(folder)  # models and runs: 20 GB
    return record | {"figures": figures}


def in_own_process(function: str, job: Job) -> None:
    """The process of a check: its output goes to its log, what it finds to its file."""
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, _, name = function.partition(":")
    try:
        job.write("line", getattr(importlib.import_module(module), name)(job))
    except NotRun as reason:
        job.write("skipped", str(reason))
    except BaseException as error:
        job.write("error", f"{type(error).__name__}: {error}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if no check failed, 1 if one did, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [check.number for check in CHECKS]
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help="checks")
    parser.add_argument("--cpu", action="store_true", help="the dry run, on a CPU")
    parser.add_argument("--model", default="", help="folder or hub id for checks 3 and 8 to 12 (a random Qwen3-0.6B)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check", help="folder of report and logs")
    args = parser.parse_args(argv)
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds: no process is left
    output, model = args.output.resolve(), Path(args.model)  # the runs have folders of their own as current ones
    model = str(model.resolve()) if args.model and model.is_dir() else args.model
    report = run_checks([check for check in CHECKS if check.number in args.only], output, args.cpu, model)
    counts = {word: sum(c["status"] == word for c in report["checks"]) for word in ("ok", "dry", "not run", "FAILED")}
    print(", ".join(f"{count} {word}" for word, count in counts.items() if count) + f"; {output / 'report.json'}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
