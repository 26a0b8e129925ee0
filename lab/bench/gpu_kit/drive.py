"""Runs experiments one after another on a machine with one GPU, each with a time limit; goes on after a failure; writes each
figure as soon as it is known.

    python3 drive.py --here KIT --parts FOLDER --out OUT --seconds 560 --plan e1,e2,e3 [--dry]

FOLDER has site-*.tar.xz (vLLM and what it needs); KIT has this file, those beside it and scalerl.tar (the project). OUT gets results.jsonl, logs.txt, smi.csv and
runs.tar.gz. --dry: on a CPU, in tiny sizes, to try this file.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil

parser = argparse.ArgumentParser()
parser.add_argument("--here", type=Path, required=True)
parser.add_argument("--parts", type=Path, default=Path("."))
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--seconds", type=float, default=560)
parser.add_argument("--plan", default="e1,e2,e3,e4,e6,e7,e5")
parser.add_argument("--work", type=Path, default=Path("/tmp/scalerl-work"))
parser.add_argument("--dry", action="store_true")
parser.add_argument("--skip", default="")
args = parser.parse_args()
HERE, OUT, WORK, DRY = args.here.resolve(), args.out.resolve(), args.work, args.dry
ROOT, SITE = WORK / "scalerl", WORK / "site"
STARTED = time.monotonic()
PY = sys.executable
RESULTS: list[dict] = []
ENGINE_ARGS: dict = {}
EXTRA_ENV: dict[str, str] = {}


def left() -> float:
    return args.seconds - (time.monotonic() - STARTED)


def say(name: str, **values) -> None:
    record = {"at": round(time.monotonic() - STARTED, 1), "name": name} | values
    RESULTS.append(record)
    with (OUT / "results.jsonl").open("a") as file:
        file.write(json.dumps(record, default=str) + "\n")
    print(json.dumps(record, default=str), flush=True)


def log(name: str, path: Path, tail: int = 150_000) -> None:
    text = path.read_text(errors="replace") if path.exists() else "(nothing)"
    with (OUT / "logs.txt").open("a") as file:
        file.write(
            f"\n\n######## {name}\n{text if len(text) < tail else text[: tail // 2] + ' ... ' + text[-tail // 2 :]}"
        )


# ------------------------------------------------------------------------------------------------------------- processes


def environment(**more: str) -> dict[str, str]:
    env = os.environ | {
        "PYTHONPATH": f"{HERE / 'probe'}:{SITE}" if not DRY else f"{HERE / 'probe'}:{os.environ.get('DRY_PATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    env |= {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env |= {
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # FlashInfer is not carried
    return env | EXTRA_ENV | more


def kill_tree(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            pass


class Run:
    """A command with a limit; afterwards `code`, `seconds`, `text`, `timed_out`, and the CPU seconds of its processes."""

    def __init__(self, name: str, command: list, limit: float, cwd: Path | None = None, **env: str):
        self.name, self.limit, self.started = name, min(limit * (3 if DRY else 1), left() - 5), time.monotonic()
        self.path = WORK / "logs" / f"{name}.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.probe = WORK / "logs" / f"{name}.probe"
        self.cpu: dict[int, tuple[str, float, float]] = {}
        self.timed_out, self.code = False, None
        self.file = self.path.open("a")
        self.preloaded = False
        ready = PRELOADED.pop(name, None)
        if self.limit < 10:
            self.process, self.timed_out, self.seconds = None, True, 0.0
            return
        if ready is not None and ready.poll() is None and not ENGINE_ARGS and not EXTRA_ENV:
            self.file.close()
            self.preloaded = Path(f"{self.path}.go.ready").exists()
            Path(f"{self.path}.go").touch()
            self.process = ready
            CURRENT.append(self)
            return
        if ready is not None:
            kill_tree(ready.pid)
        self.process = subprocess.Popen(
            [str(c) for c in command], cwd=cwd or WORK, stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment(PROBE_FILE=str(self.probe), **env),
        )  # fmt: skip
        CURRENT.append(self)

    def stuck(self, first: float, later: float) -> bool:
        """Whether no engine started within `first` seconds, or nothing was noted for `later` seconds since."""
        passed = time.monotonic() - self.started
        noted = self.probe.stat().st_mtime if self.probe.exists() else 0
        up = self.probe.exists() and "RunEngine.start" in self.probe.read_text()
        return (passed > first and not up) or (up and time.time() - noted > later)

    def wait(self, grace: float = 20.0, first: float = 1e9, later: float = 1e9) -> "Run":
        if self.process is None:
            return self
        while (
            self.process.poll() is None
            and time.monotonic() - self.started < self.limit
            and not self.stuck(first, later)
        ):
            time.sleep(0.1)
        if self.process.poll() is None:
            self.timed_out = True
            self.process.send_signal(signal.SIGTERM)
            self.terminated = time.monotonic()
            try:
                self.process.wait(max(1.0, min(grace, left() - 3)))
            except subprocess.TimeoutExpired:
                kill_tree(self.process.pid, signal.SIGABRT)  # faulthandler writes where each thread is
                time.sleep(1.5)
                kill_tree(self.process.pid)
                self.process.wait()
            self.grace = time.monotonic() - self.terminated
        self.code = self.process.returncode
        self.seconds = time.monotonic() - self.started
        CURRENT.remove(self)
        self.file.close()
        log(
            f"{self.name} (exit {self.code}, {self.seconds:.0f} s{', stopped at its limit' if self.timed_out else ''})",
            self.path,
        )
        return self

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def cores(self) -> dict[str, float]:
        """Cores used on average from the first sight of a process to the last."""
        found = {}
        for name, first, cpu in self.cpu.values():
            lived = max(1.0, getattr(self, "seconds", 1.0) - first)
            if cpu > 1:
                found[f"{name}"] = round(found.get(name, 0) + cpu / lived, 2)
        return found


CURRENT: list[Run] = []
PRELOADED: dict[str, subprocess.Popen] = {}
TRAINER = "torch,transformers,accelerate,transformers.models.qwen3.modeling_qwen3,scipy.optimize,pandas"
WITH_VLLM = f"{TRAINER},vllm,vllm.v1.engine.async_llm,vllm.v1.engine.exceptions"


def preload(name: str, modules: str, script: Path, *argv: object, cwd: Path, **env: str) -> None:
    """Starts a program of which `Run` of the same name lets go: its imports are then already made."""
    path = WORK / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    command = [PY, HERE / "preload.py", f"{path}.go", modules, script, *argv]
    PRELOADED[name] = subprocess.Popen(
        [str(c) for c in command], cwd=cwd, stdout=path.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        env=environment(PROBE_FILE=str(WORK / "logs" / f"{name}.probe"), **env),
    )  # fmt: skip


def sample_for_ever() -> None:
    """Memory and use of the card, and CPU time of the processes, twice a second."""
    handle = None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:
        print("no pynvml:", error)
    with (OUT / "smi.csv").open("w") as file:
        file.write("at,run,used_MB,gpu_%,memory_%,watt,processes_MB\n")
        while True:
            time.sleep(0.5)
            run = CURRENT[-1] if CURRENT else None
            if run is not None:
                try:
                    parent = psutil.Process(run.process.pid)
                    for process in [parent, *parent.children(recursive=True)]:
                        times = process.cpu_times()
                        name = process.name() if "VLLM" in process.name() else " ".join(process.cmdline())[-40:]
                        first = run.cpu.get(process.pid, (0, time.monotonic() - run.started, 0))[1]
                        run.cpu[process.pid] = (name, first, times.user + times.system)
                except (psutil.Error, OSError):
                    pass
            if handle is not None:
                try:
                    memory, use = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetUtilizationRates(handle)
                    watt = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
                    apps = {
                        p.pid: round((p.usedGpuMemory or 0) / 1e6)
                        for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    }
                    at = time.monotonic() - STARTED
                    file.write(
                        f"{at:.1f},{run.name if run else ''},{memory.used / 1e6:.0f},{use.gpu},{use.memory},{watt:.0f},{str(apps).replace(',', ';')}\n"
                    )
                    file.flush()
                except Exception:
                    pass


def peak_memory(name: str) -> float | None:
    values = [
        float(line.split(",")[2])
        for line in (OUT / "smi.csv").read_text().splitlines()[1:]
        if line.split(",")[1] == name
    ]
    return max(values) / 1000 if values else None


def busy(name: str) -> float | None:
    values = [
        float(line.split(",")[3])
        for line in (OUT / "smi.csv").read_text().splitlines()[1:]
        if line.split(",")[1] == name
    ]
    return round(statistics.mean(values[len(values) // 2 :]), 1) if values else None


# -------------------------------------------------------------------------------------------------------- what a run says


def lines_of(path: Path) -> list[dict]:
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


def probes(path: Path) -> dict:
    calls: dict[str, list[float]] = {}
    for line in lines_of(path):
        calls.setdefault(line["name"], []).append(line["s"])
    found = {}
    for name, values in calls.items():
        later = values[1:] or values
        found[name] = {
            "n": len(values),
            "first": values[0],
            "median": round(statistics.median(later), 4),
            "max": max(later),
        }
    memory = [
        (line["name"], line.get("allocated_MB"), line.get("peak_MB"), line.get("card_used_MB"))
        for line in lines_of(path)
    ]
    return found | {"memory_last": memory[-1] if memory else None}


def summary(folder: Path, probe: Path | None = None, skip: int = 2) -> dict:
    """The figures of a run of train.py; rates are of the steps after the first `skip`."""
    steps = [r for r in lines_of(folder / "metrics.jsonl") if "step" in r]
    evals = [r for r in lines_of(folder / "eval.jsonl") if "step" in r]
    if not steps:
        return {"steps": 0}
    rest = steps[skip:] if len(steps) > skip + 1 else steps
    before = steps[skip - 1] if len(steps) > skip + 1 and skip else {"tokens": 0, "trained_tokens_total": 0}
    seconds = sum(r["seconds"] for r in rest)
    found = {
        "steps": len(steps), "all_seconds": round(sum(r["seconds"] for r in steps), 1),
        "pass": [evals[0]["pass_rate"], evals[-1]["pass_rate"]] if evals else None,
        "s_a_step": round(seconds / len(rest), 3), "s_a_step_median": round(statistics.median(r["seconds"] for r in rest), 3),
        "sampled_tokens_s": round((rest[-1]["tokens"] - before["tokens"]) / seconds),
        "trained_tokens_s": round((rest[-1]["trained_tokens_total"] - before["trained_tokens_total"]) / seconds),
        "completions_s": None,
        "generator_idle_%": round(100 * sum(r["generator_idle"] for r in rest) / seconds, 1),
        "paused_%": round(100 * sum(r["sync_seconds"] for r in rest) / seconds, 1),
        "sync_s_median": round(statistics.median(r["sync_seconds"] for r in rest), 4),
        "sync_s_max": round(max(r["sync_seconds"] for r in rest), 4),
        "trainer_waits_%": round(100 * sum(r["trainer_idle"] for r in rest) / seconds, 1),
        "requests": round(statistics.mean(r["requests"] for r in rest), 1),
        "lag_mean": round(statistics.mean(r["lag_mean"] for r in rest), 2), "lag_max": max(r["lag_max"] for r in steps),
        "gaps": [float(f"{r['logprob_gap']:.2e}") for r in steps if "logprob_gap" in r][:12],
        "gap_max": max([r["logprob_gap"] for r in steps if "logprob_gap" in r], default=None),
        "rho": [round(r["ratio_mean"], 4) for r in steps if "ratio_mean" in r][-6:],
        "rho_lag0": [round(r["ratio_mean"], 4) for r in steps if r["lag_max"] == 0 and "ratio_mean" in r][:3],
        "ess": [round(r["ess"], 3) for r in steps if "ess" in r][-3:],
        "length": round(statistics.mean(r["length"] for r in rest), 1),
        "updates": sum(r.get("updated", 0) for r in steps),
        "seconds_list": [round(r["seconds"], 2) for r in steps][:24],
    }  # fmt: skip
    if probe is not None:
        found["probe"] = probes(probe)
    return found


def engine_notes(text: str) -> list[str]:
    """The lines of vLLM's log that say how it runs."""
    wanted = r"attention backend|FLASH_ATTN|TRITON|KV cache size|Maximum concurrency|torch\.compile|compil|graph|Model loading took|Available KV|init engine|runner|reloaded|WARNING|ERROR|Error"
    found = []
    for line in text.splitlines():
        if re.search(wanted, line) and len(found) < 60:
            found.append(line[-220:])
    return found


CACHES = [
    Path.home() / ".cache" / "vllm",
    Path.home() / ".triton" / "cache",
]  # compiled kernels: 30 to 50 s of a first start


def unpack_caches() -> None:
    """What an earlier session brought back as caches.tar.xz (not tried on a GPU yet)."""
    for archived in args.parts.resolve().glob("caches*.tar.xz"):
        with tarfile.open(archived) as tar:
            tar.extractall(Path.home(), filter="fully_trusted")
        say("caches unpacked", file=archived.name)


def pack_caches() -> None:
    folders = [str(path.relative_to(Path.home())) for path in CACHES if path.exists()]
    if folders and not DRY:
        command = f"tar -cf - {' '.join(folders)} | xz -T0 -1 > {OUT}/caches.tar.xz"
        subprocess.run(command, shell=True, cwd=Path.home(), timeout=max(5, left()))
        say("caches packed", MB=round((OUT / "caches.tar.xz").stat().st_size / 1e6, 1))


def archive() -> None:
    try:
        with tarfile.open(OUT / "runs.tar.gz", "w:gz") as tar:
            for pattern in ("runs/*/*.jsonl", "runs/*/*.json", "logs/*.probe", "*/*/metrics.jsonl"):
                for path in WORK.glob(pattern):
                    tar.add(path, path.relative_to(WORK))
    except OSError as error:
        print("archive:", error)


def tail(text: str, count: int = 25) -> list[str]:
    return [line[-300:] for line in text.splitlines()[-count:]]


# ------------------------------------------------------------------------------------------------------------ experiments


def unpack(part: str) -> str:
    with tarfile.open(part) as tar:
        tar.extractall(SITE, filter="fully_trusted")
    return part


def prepare() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    if not ROOT.exists():
        with tarfile.open(HERE / "scalerl.tar") as tar:
            tar.extractall(ROOT, filter="fully_trusted")
    if not DRY and not (SITE / "vllm").exists():
        parts = sorted(map(str, args.parts.resolve().glob("site-*.tar.xz")))
        with ProcessPoolExecutor(8) as executor:
            list(executor.map(unpack, parts))
        # what only a GPU machine without the newest torch needs
        subprocess.Popen([PY, "-m", "compileall", "-q", "-j", "10", str(SITE)],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    unpack_caches()
    say("unpacked", files=sum(1 for _ in SITE.glob("*")) if SITE.exists() else 0)


INFO = (
    "import torch, json, sys, importlib.metadata as m\n"
    "v = lambda n: m.version(n)\n"
    "g = torch.cuda.is_available()\n"
    "print(json.dumps({'gpu': torch.cuda.get_device_name() if g else None, 'torch': torch.__version__, 'cuda': torch.version.cuda,"
    "'transformers': v('transformers'), 'accelerate': v('accelerate'), 'numpy': v('numpy')}))\n"
)


def machine(info: subprocess.Popen) -> None:
    smi = "nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm --format=csv,noheader"
    text = subprocess.run(smi, shell=True, capture_output=True, text=True).stdout.strip()
    out, error = info.communicate()
    say("machine", smi=text, info=out.strip(), error=error[-500:] if info.returncode else "",
        shm_GB=round(psutil.disk_usage("/dev/shm").total / 1e9, 1), ram_GB=round(psutil.virtual_memory().available / 1e9, 1),
        cores=os.cpu_count(), python=sys.version.split()[0])  # fmt: skip


def warm() -> Run:
    """The built-in model, made beside the first experiment."""
    code = """
import sys, time
sys.path.insert(0, ".")
started = time.time()
from runtime.flags import parse_flags
from runtime.parts import Ranks, first_model, load_task, new_accelerator

flags = parse_flags([], "")
task = load_task(flags)
print(first_model(flags, Ranks(new_accelerator(flags)), task), time.time() - started)
task.close()
"""
    return Run("warm", [PY, "-c", code], 150, cwd=ROOT)


def shapes(*names: str) -> list[Run]:
    started = []
    for name in names:
        folder = WORK / name
        if not (folder / "phrase.txt").exists():
            run = Run(f"shape-{name}", [PY, HERE / "shapes.py", folder, "tiny" if DRY else name, ROOT], 90, cwd=ROOT)
            started.append(run)
    return started


def check(name: str, *tests: str, more=()) -> Run:
    """The project's own test of an engine."""
    tests = [f"lab/tests/gpu/test_2_engine.py::test_new_weights_reach_an_engine_that_samples[{test}]" for test in tests]
    return Run(name, [PY, "-m", "pytest", *tests, "-m", "gpu", "--device", "cpu" if DRY else "cuda", "-v", "-s", "-p",
                      "no:cacheprovider", *more, "--basetemp", WORK / f"{name}tmp", "--junitxml", WORK / f"{name}.xml"], 200, cwd=ROOT,
               PYTHONPATH=f"{environment()['PYTHONPATH']}:{HERE}:{ROOT}")  # fmt: skip


def e1(name: str = "e1", run: Run | None = None) -> bool:
    """New weights reach an engine that samples."""
    run = (run or check(name, "vllm-True")).wait(3.0, *([] if DRY else [160, 90]))
    xml = WORK / f"{name}.xml"
    figures = (
        re.findall(r'testcase [^>]*name="([^"]*)"|<property name="([^"]*)" value="([^"]*)"', xml.read_text())
        if xml.exists()
        else []
    )
    verdicts = re.findall(r"(test_new_weights\S*)\s+(PASSED|FAILED|SKIPPED|ERROR)|^(PASSED|FAILED)", run.text, re.M)
    memory = [
        (line["name"], line["s"], line.get("allocated_MB"), line.get("card_used_MB"))
        for line in lines_of(run.probe)
        if line["name"] in ("RunEngine.update", "RunEngine.start")
    ]
    say(
        f"E1 weights in flight, {name}",
        exit=run.code,
        seconds=round(run.seconds, 1),
        verdicts=verdicts,
        figures=figures,
        probe=probes(run.probe),
        updates=memory,
    )
    say(f"E1 {name} notes", notes=engine_notes(run.text))
    if run.code != 0:
        say(f"E1 {name} tail", tail=tail(run.text, 40))
    return run.code == 0


def smoke() -> bool:
    """Which settings start? All at once."""
    names = ["default", "eager", "triton", "triton eager", "runner v1", "runner v1 triton eager", "float32"]
    runs = [
        Run(f"smoke-{name.replace(' ', '-')}", [PY, HERE / "smoke.py", WORK / "tiny" / "model", name], 75)
        for name in names
    ]
    works = []
    for name, run in zip(names, runs, strict=True):
        run.wait(2.0)
        ok = [line for line in run.text.splitlines() if line.startswith("SMOKE")] if run.process else []
        say("smoke", variant=name, result=ok or tail(run.text, 12))
        if ok:
            works.append(name)
    for name in ("default", "eager", "triton", "triton eager"):
        if name in works:
            ENGINE_ARGS.update({"default": {}, "eager": {"enforce_eager": True}, "triton": {"attention_backend": "TRITON_ATTN"},
                                "triton eager": {"attention_backend": "TRITON_ATTN", "enforce_eager": True}}[name])  # fmt: skip
            return True
    if "runner v1" in works:
        EXTRA_ENV["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return True
    if "runner v1 triton eager" in works:
        EXTRA_ENV["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        ENGINE_ARGS.update({"attention_backend": "TRITON_ATTN", "enforce_eager": True})
        return True
    return False


def engine_flags(**more) -> list[str]:
    options = ENGINE_ARGS | more
    return ["--engine_args", json.dumps(options)] if options else []


def train(name: str, limit: float, *flags, cwd: Path | None = None, launcher=()) -> Run:
    folder = WORK / "runs" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Run(name, [PY, *launcher, ROOT / "train.py", *flags, "--output_dir", folder], limit, cwd=cwd or ROOT).wait()


WHOLE = {
    "scheduler_cls": "runtime.inside_vllm.WholeCompletions",
    "async_scheduling": False,
}  # the project's own on a CPU


def e2(engine: str, limit: float, name: str = "", **more_engine) -> bool:
    """The default run."""
    more = ["--max_steps", "6", "--eval_every", "3"] if DRY else []
    name = name or f"e2-{engine}"
    run = train(name, limit, "--engine", engine, *more, *(engine_flags(**more_engine) if engine == "vllm" else []))
    found = summary(WORK / "runs" / name, run.probe, skip=3)
    say(f"E2 default run, {engine}{' ' + name if more_engine else ''}", exit=run.code, preloaded=run.preloaded, seconds=round(run.seconds, 1), stopped=run.timed_out, figures=found,
        cores=run.cores(), card_GB=peak_memory(run.name), gpu_busy=busy(run.name))  # fmt: skip
    say(f"E2 {engine} notes", notes=engine_notes(run.text)[:30], tail=tail(run.text, 14))
    return found["steps"] > 0


def real(name: str) -> list[str]:
    folder = WORK / name
    sizes = "--min_budget 448 --max_budget 480 --answer_budget 32 --batch_prompts 16 --rollouts 8 --tokens_per_microbatch 8192"
    if DRY:
        sizes = "--min_budget 8 --max_budget 12 --answer_budget 4 --batch_prompts 4 --rollouts 4"
    data = [
        "--model",
        folder / "model",
        "--dataset",
        "problems.jsonl",
        "--reward",
        "reward:coin",
        "--dtype",
        "bfloat16",
    ]
    data += [
        "--interruption_phrase",
        (HERE / "phrase.txt").read_text(),
        "--held_out",
        "32",
        "--pass_rate_threshold",
        "2",
    ]
    return [*data, *sizes.split(), "--eval_every", "1000000", "--save_every", "0", "--engine", "vllm"]


def real_flags(steps: int, *more, **engine) -> list:
    return [*real("qwen"), "--max_steps", steps, *more, *engine_flags(**engine)]


def real_run(name: str, title: str, limit: float, steps: int, *more, skip: int = 3, **engine) -> bool:
    run = train(name, limit, *real_flags(steps, *more, **engine), cwd=WORK / "qwen")
    found = summary(WORK / "runs" / name, run.probe, skip=skip)
    if found["steps"]:
        found["completions_s"] = round(128 / found["s_a_step"], 1)
    up = re.search(r"init engine.*?took ([\d.]+)", run.text)
    say(title, exit=run.code, preloaded=run.preloaded, seconds=round(run.seconds, 1), stopped=run.timed_out, figures=found, cores=run.cores(),
        card_GB=peak_memory(run.name), gpu_busy=busy(run.name), init_engine_s=up and up[1])  # fmt: skip
    say(f"{title}: notes", notes=engine_notes(run.text)[:40], tail=tail(run.text, 6 if found["steps"] else 30))
    return found["steps"] > 0


def e3() -> bool:
    return real_run("e3", "E3 Qwen3-0.6B shape, pipeline-8", 140, E3_STEPS)


def e3b() -> bool:
    return real_run("e3b", "E3b the same without the FP32 head", 75, 2 if DRY else 4, "--fp32_head", "false", skip=2)


def e3c() -> bool:
    return real_run("e3c", "E3c the same with max_num_seqs 512", 90, 3 if DRY else 9, "--max_num_seqs", "512")


E3_STEPS = 4 if DRY else 12


def preload_all(plan: list[str]) -> None:
    """In the order of the plan."""
    for name in plan:
        folder = WORK / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        if name in ("e2", "e2t"):
            engine = "vllm" if name == "e2" else "torch"
            more = ["--max_steps", "6", "--eval_every", "3"] if DRY else []
            preload(f"e2-{engine}", WITH_VLLM if name == "e2" else TRAINER, ROOT / "train.py", "--engine", engine, *more,
                    "--output_dir", folder / f"e2-{engine}", cwd=ROOT)  # fmt: skip
        elif name == "e3":
            preload(
                "e3",
                WITH_VLLM,
                ROOT / "train.py",
                *real_flags(E3_STEPS),
                "--output_dir",
                folder / "e3",
                cwd=WORK / "qwen",
            )
        elif name == "e3b":
            flags = real_flags(2 if DRY else 4, "--fp32_head", "false")
            preload("e3b", WITH_VLLM, ROOT / "train.py", *flags, "--output_dir", folder / "e3b", cwd=WORK / "qwen")
        elif name == "e7":
            preload("e7", WITH_VLLM, HERE / "speeds.py", *speeds_argv(), cwd=WORK / "qwen", **speeds_env())
        elif name == "e5":
            preload("e5", f"{TRAINER},datasets,trl,trl.trainer.grpo_trainer,trl.generation.vllm_generation", HERE / "peer_trl.py", WORK / "qwen",
                    json.dumps(trl_options()), cwd=WORK, **TRL_ENV)  # fmt: skip


def e4() -> bool:
    return real_run(
        "e4",
        "E4 Qwen3-0.6B shape, PPO-off-policy-8",
        140,
        8 if DRY else 16,
        "--schedule",
        "ppo_off_policy",
        "--k",
        "8",
        skip=8,
    )


TRL_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
TRL_ENV["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def trl_options() -> dict:
    options = {"generations": 8, "prompts": 16, "length": 512, "steps": 6, "micro": 16}
    if DRY:
        options = {"generations": 4, "prompts": 4, "length": 12, "steps": 2, "micro": 16, "use_vllm": False}
    if ENGINE_ARGS:
        options["llm"] = ENGINE_ARGS
    return options


def e5() -> bool:
    options = trl_options()
    run = Run("e5", [PY, HERE / "peer_trl.py", WORK / "qwen", json.dumps(options)], 120, **TRL_ENV).wait(3.0)
    found = [json.loads(line) for line in run.text.splitlines() if line.startswith('{"trl')]
    seconds = [r["s"] for r in found if "trl_step" in r]
    later = seconds[1:]
    rate = round(options["generations"] * options["prompts"] / statistics.mean(later), 1) if later else None
    say(
        "E5 TRL 1.16, vLLM colocated",
        exit=run.code,
        seconds=round(run.seconds, 1),
        steps=found,
        completions_s=rate,
        card_GB=peak_memory("e5"),
        cores=run.cores(),
    )
    if not later:
        say("E5 tail", tail=tail(run.text, 30))
    return bool(later)


def e6() -> bool:
    limit = min(110 * (3 if DRY else 1), left() - 8)
    engine = ENGINE_ARGS if DRY else ENGINE_ARGS | {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.1}
    text = json.dumps(engine) if engine else ""
    untied = check("e1-untied", "vllm-False", more=[] if DRY else ["-p", "small_cache"])
    run = Run(
        "e6", [PY, HERE / "faults.py", ROOT, WORK / "tiny", limit - 10, text, *(["--cpu"] if DRY else [])], limit
    ).wait(3.0)
    for line in run.text.splitlines():
        if line.startswith('{"fault"'):
            say("E6", **{("run" if k == "name" else k): v for k, v in json.loads(line).items()})
    for name in ("sigterm", "killed", "fsdp2"):
        log(f"e6 {name}", WORK / "tiny" / f"{name}.log", 20_000)
    if '"fault"' not in run.text:
        say("E6 tail", tail=tail(run.text, 20))
    e1("e1-untied", untied)
    return run.code == 0


def speeds_argv() -> list:
    return ["4", *real("qwen"), "--output_dir", WORK / "runs" / "e7", "--max_steps", "80000", *engine_flags()]


def speeds_env() -> dict[str, str]:
    return {"BENCH_ROOT": str(ROOT), "PYTHONPATH": f"{environment()['PYTHONPATH']}:{ROOT}:{ROOT / 'lab' / 'bench'}"}


def e7() -> bool:
    run = Run("e7", [PY, HERE / "speeds.py", *speeds_argv()], 170, cwd=WORK / "qwen", **speeds_env()).wait(3.0)
    for line in run.text.splitlines():
        if line.startswith('{"speed"'):
            say("E7", **{("what" if k == "speed" else k): v for k, v in json.loads(line).items()})
    if "bare vLLM" not in run.text:
        say("E7 tail", tail=tail(run.text, 25))
    return run.code == 0


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=sample_for_ever, daemon=True).start()
    info = subprocess.Popen([PY, "-c", INFO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    prepare()
    plan = args.plan.split(",")
    made = shapes("tiny", "qwen")  # beside the first experiment
    first = warm() if any(name in ("e2", "e2t") for name in plan) else None
    threading.Thread(target=machine, args=(info,), daemon=True).start()
    preload_all(plan)
    table = {
        "e1": e1, "smoke": smoke, "e2": lambda: e2("vllm", 90), "e2t": lambda: e2("torch", 60),
        "e2w": lambda: e2("vllm", 65, "e2-whole", **WHOLE),
        "e3w": lambda: real_run("e3w", "E3w the same, each completion sent once", 85, 3 if DRY else 9, **WHOLE),
        "e3e": lambda: real_run("e3e", "E3e the same, enforce_eager", 70, 3 if DRY else 6, enforce_eager=True),
        "e3l": lambda: real_run("e3l", "E3l the same, latest", 85, 3 if DRY else 9), "e3": e3, "e3b": e3b, "e3c": e3c,
        "e4": e4, "e5": e5, "e6": e6, "e7": e7,
    }  # fmt: skip
    needs = {
        "e1": 60,
        "e2": 35,
        "e2t": 30,
        "e3": 60,
        "e3b": 40,
        "e3c": 50,
        "e4": 70,
        "e5": 50,
        "e6": 50,
        "e7": 60,
        "smoke": 30,
        "e2w": 40,
        "e3w": 50,
        "e3e": 45,
        "e3l": 50,
    }
    healthy = None
    for name in plan:
        if left() < needs[name]:
            say("skipped", what=name, left=round(left()))
            continue
        if name in ("e2", "e2t") and first is not None:
            first.wait(1.0)
            say("warm start", seconds=round(first.seconds, 1), tail=tail(first.text, 3))
            first = None
        if name not in ("e1", "e2", "e2t", "e2w"):
            for run in made:
                run.wait()
                if run.code:
                    say("shape failed", run=run.name, tail=tail(run.text, 10))
            made = []
        try:
            ok = table[name]()
        except Exception as error:
            say("driver error", what=name, error=repr(error)[:300])
            ok = False
        archive()
        stopped = any(r["name"].startswith("E1 weights") and r["exit"] not in (0, 1) for r in RESULTS)
        if name == "e1" and not ok and not stopped:  # stopped at its limit: no sign that vLLM does not start
            for run in made:
                run.wait()
            made = []
            healthy = smoke()
            archive()
            if not healthy:
                say("no vLLM starts; the rest is left out")
                break
        if name == "e2" and not ok and healthy is not None:
            say("neither check nor default run; the rest is left out")
            break
    for process in PRELOADED.values():
        kill_tree(process.pid)
    archive()
    pack_caches()
    say("end", left=round(left()))
    print("\n| what | figures |\n|---|---|")
    for record in RESULTS:
        if record["name"].startswith("E") and "notes" not in record["name"] and "tail" not in record["name"]:
            text = {k: v for k, v in record.items() if k not in ("at", "name", "probe", "updates", "cores")}
            if isinstance(text.get("figures"), dict):
                text["figures"] = {
                    k: v
                    for k, v in text["figures"].items()
                    if k
                    in (
                        "steps",
                        "pass",
                        "s_a_step",
                        "sampled_tokens_s",
                        "trained_tokens_s",
                        "completions_s",
                        "generator_idle_%",
                        "paused_%",
                        "sync_s_median",
                        "trainer_waits_%",
                        "gap_max",
                        "lag_mean",
                    )
                }
            print(f"| {record['name']} | {json.dumps(text, default=str)[:700]} |")


if __name__ == "__main__":
    main()
    os._exit(0)
