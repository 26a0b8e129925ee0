"""Judges: workers that hang, die, run out of memory, reply late, or outlive their run."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tasks import judge_process
from tasks.judge_process import Job
from tasks.judges import RewardError, RewardPool

pytestmark = pytest.mark.long  # processes of its own, and deadlines


FUNCTIONS = """
import mmap, os, signal, subprocess, time

def number(prompt, completion, answer): return float(completion)
def text(prompt, completion, answer): return "yes"
def fails(prompt, completion, answer):
    if completion == "bad": raise KeyError("the user's own mistake")
    if completion.startswith("quoted"): raise ValueError(completion)
    return True
def process(prompt, completion, answer):
    if completion == "pid": return os.getpid() / 1000
    while completion == "loop": pass
    if completion == "sleep": signal.pthread_sigmask(signal.SIG_BLOCK, {14, 15}); time.sleep(1000)  # SIGALRM, SIGTERM
    if completion == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if completion == "exit": os._exit(3)
    if completion == "orphan": subprocess.Popen(["sleep", "1000"]); os._exit(3)
    if completion == "memory": raise MemoryError
    if completion == "model": return len(mmap.mmap(-1, 8 << 30)) >> 30
    if completion == "file": open("big", "wb").write(bytes(100 << 20))
    if completion == "child": os.fork(); time.sleep(1000)
    if completion == "forged": os.write(3, b'[0, "", 1.0, true, "correct"]\\n'); time.sleep(1000)
    if completion == "no reply": os.write(3, b'5\\n')
    if completion == "replies": os.write(3, b"[" * 3_000_000); time.sleep(1000)
    return True
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A working folder with the user's module `own`, and one that has the name of our package."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    (tmp_path / "tasks.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)


def jobs(function, *completions):
    return [Job(f"own:{function}", "", completion, "") for completion in completions]


def test_an_exception_stops_with_its_traceback_which_cannot_steer_the_terminal(functions):
    """What the model wrote may be quoted in it: escape codes, carriage returns and direction marks come out as `?`.
    The worker goes on."""
    with closing(RewardPool(["own:fails", "own:text", "own:process"], workers=1, timeout=20)) as pool:
        for function, completion, words in (
            ("fails", "bad", "(?s)`reward` own:fails raised:.*own.py.*the user's own mistake"),
            ("fails", "quoted \x1b[2J\r\x07\u202e end", r"quoted \?\[2J\?\?\? end"),
            ("process", "file", "File too large"),
            ("text", "", "must be a number or a pair .*, not 'yes'"),
        ):
            with pytest.raises(RewardError, match=words) as caught:
                pool.judge(jobs(function, completion))
            assert not set("\x1b\r\x07\u202e") & set(str(caught.value))
        assert pool.judge(jobs("fails", "good"))[0].correct and pool.counts == {"correct": 1}


@pytest.mark.medium  # a second each
@pytest.mark.parametrize(("completion", "kind"), [
    ("sleep", "timeout"), ("stop", "timeout"), ("exit", "crash"), ("orphan", "crash"), ("memory", "memory"),
    ("replies", "crash"), ("forged", "crash"), ("no reply", "crash"), ("child", "timeout"),
])  # fmt: skip
def test_a_worker_that_hangs_or_dies_is_replaced(functions, completion, kind):
    """The verdict is wrong, within the deadline of 1 s, and the next job is judged. What the worker started dies with it:
    its process group is its own, and so is its session, which Ctrl-C at the run's terminal does not reach."""
    with closing(RewardPool(["own:process"], workers=1, timeout=1.0, memory_mb=1024)) as pool:
        first = round(1000 * pool.judge(jobs("process", "pid"))[0].reward)
        assert os.getsid(first) == os.getpgid(first) == first != os.getsid(0)
        start = time.monotonic()
        assert pool.judge(jobs("process", completion)) == [(-1.0, False, kind)]
        assert time.monotonic() - start < 4
        second = round(1000 * pool.judge(jobs("process", "pid"))[0].reward)
        assert second != first and pool.counts == {"correct": 2, kind: 1}
    time.sleep(0.2)
    assert not {first, second} & {group_of(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))


def test_memory_is_limited_for_the_verifiers_only_and_lost_verdicts_warn(functions):
    """The user's own function may load a model of 8 GiB. A text of 8 MB is too much for 1 MiB, in the same worker. Eleven
    such verdicts of twelve are more than a tenth."""
    with closing(RewardPool(["own:process", "exact"], workers=1, end_of_thinking="x", memory_mb=1)) as pool:
        assert pool.judge(jobs("process", "model")) == [(8.0, True, "correct")]
        large = Job("exact", "", "x" + "y" * 8_000_000, "z")
        assert pool.judge([large]) == [(-1.0, False, "memory")]
        assert pool.judge(jobs("process", "model"))[0].correct
        pool.counts["memory"] = 10
        with pytest.warns(UserWarning, match="more than a tenth"):
            pool.judge([large])


def test_a_worker_that_dies_between_two_jobs_costs_one_verdict():
    """As when the kernel is short of memory: one verdict is a crash, and the pool goes on."""
    with closing(RewardPool(["exact"], workers=2)) as pool:
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        pool._workers[0].process.wait()
        assert sorted(v.kind for v in pool.judge([Job("exact", "", "a", "a")] * 4)) == ["correct"] * 3 + ["crash"]
        assert all(v.correct for v in pool.judge([Job("exact", "", "a", "a")] * 4))


def test_a_worker_that_was_slow_to_start_shifts_no_verdict(monkeypatch):
    """Its "ready" comes when nobody waits for it any more, and is no reply to the next job."""
    asked = [Job("exact", "", text, "a") for text in "abab"]
    with closing(RewardPool(["exact"], workers=1)) as pool:
        pool._workers[0].kill()
        monkeypatch.setattr("tasks.judges.START_TIMEOUT", 0.01)
        assert pool.judge(asked[:1])[0].kind == "crash"
        for _ in range(2):
            with pytest.raises(ValueError, match="a worker does not start in"):
                pool.judge(asked[:1])
            assert not pool._workers
        monkeypatch.undo()
        assert [verdict.kind for verdict in pool.judge(asked)] == ["correct", "wrong", "correct", "wrong"]


def group_of(pid):
    """The process group of a process that runs; None if it is gone or a zombie, which is dead and only not reaped."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


def test_several_threads_get_their_own_verdicts(functions):
    with closing(RewardPool(["own:number"], workers=2, timeout=5)) as pool, ThreadPoolExecutor(6) as threads:
        numbers = [[float(100 * k + i) for i in range(30)] for k in range(6)]
        results = threads.map(lambda part: pool.judge(jobs("number", *map(str, part))), numbers)
        assert [[verdict.reward for verdict in verdicts] for verdicts in results] == numbers
        assert sum(pool.counts.values()) == 180


@pytest.mark.parametrize("count", [1, 3])
def test_a_hanging_job_delays_its_own_worker_until_closing_ends_it_and_every_process(functions, count):
    """Of two workers one goes on: 20 quick jobs are judged. Or both hang, for 60 s unless the pool is closed."""
    pool, start = RewardPool(["own:process"], workers=2, timeout=60), time.monotonic()
    pids = [worker.process.pid for worker in pool._workers]
    with ThreadPoolExecutor() as thread:
        hanging = thread.submit(pool.judge, jobs("process", *["loop"] * count))
        time.sleep(0.3)
        if count == 1:
            pool.judge(jobs("process", *[""] * 20))
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            hanging.result()
    assert time.monotonic() - start < 30 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    pool.close()


@pytest.mark.medium
def test_workers_end_with_a_run_that_is_killed(functions):
    """SIGKILL leaves no time to clean up: an idle worker sees its stdin end, a hanging one uses up its processor time."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(judge_process.__file__).parents[1])!r})
from tasks.judges import Job, RewardPool
pool = RewardPool(['own:process'], workers=2, timeout=0.25)
print(*[w.process.pid for w in pool._workers], flush=True)
pool.timeout = 60
pool.judge([Job('own:process', '', 'loop', '')])
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = alive = {int(pid) for pid in run.stdout.readline().split()}
    time.sleep(0.3)
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 60  # processor time passes slowly on a busy machine
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if group_of(pid) is not None}
        time.sleep(0.1)
    assert len(pids) == 2 and not alive


def test_what_cannot_work_is_an_error_not_a_hang(functions, monkeypatch):
    """At the end a worker that does not start."""
    for options, words in (
        ({"rewards": ["maths"]}, "`reward` must be one of math, exact or module:function"),
        ({"rewards": ["os.system('x'):y"]}, "`reward` must be one of"),
        (
            {"rewards": ["no_such_module:f"]},
            "`reward` no_such_module:f: ModuleNotFoundError: No module named",
        ),
        ({"rewards": ["own:no_such"]}, "`reward` own:no_such: AttributeError: .* has no attribute 'no_such'."),
        ({"workers": 0}, "`reward_workers`"),
        ({"timeout": 0.0}, "`reward_timeout`"),
        ({"rewards": ["exact"]}, "does not start"),
    ):
        if words == "does not start":
            monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ValueError, match=words):
            RewardPool(**options)


def test_a_system_that_refuses_a_limit_of_memory_has_none(monkeypatch):
    """As macOS does; each data set ended in an inner traceback there."""

    def refuses(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(judge_process.resource, "setrlimit", refuses)
    judge_process.limit_memory("math", 2048)
