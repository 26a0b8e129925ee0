"""The real job under SIGKILL, SIGTERM and Ctrl-C: real vLLM, the built-in task, the whole recipe. Slow."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from processes import alive, family, wait_for_end
from recorded import state_of, steps_of

from runtime.folder import Folder

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def launch(log, *command, **options):
    """A process that writes to the end of the file `log`."""
    with log.open("a") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment, **options)


def start(folder, *flags):
    """train.py in `folder`: a fresh run, or with --resume an old one that goes on."""
    place = ["--resume", str(folder)] if "--resume" in flags else ["--output_dir", str(folder)]
    words = [word for word in flags if word != "--resume"]
    return launch(folder.parent / "log.txt", sys.executable, "train.py", *place, *words)


def wait_until(condition, process, timeout=240.0):
    """Polls; returns False if the process ended first."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "timed out"
        time.sleep(0.003)
    return True


def shared_files(pids):
    """Files in shared memory that these processes have mapped."""
    paths = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended
            paths |= {part.path for part in psutil.Process(pid).memory_maps()}
    return {path for path in paths if path.startswith("/dev/shm/")}


def last_step(folder):
    return steps_of(folder)[-1]["step"] if steps_of(folder) else 0


def evaluated(folder):
    return [record["step"] for record in steps_of(folder, "eval.jsonl")]


def consumed(folder):
    """[(step, key, correct, rollouts)] of every group that a step took, in order."""
    return [(record["step"], *group) for record in steps_of(folder) for group in record["groups"]]


def check_run(folder, steps, k, eval_every):
    """Every step once and every evaluation once; lag within k; the curriculum's history equal to a recount of what each
    step consumed; that recount's pass rate of each step the one in metrics.jsonl."""
    records = steps_of(folder)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert max(record["lag_max"] for record in records) <= k
    recount, by_step = {}, {}
    for step, key, correct, rollouts in consumed(folder):
        assert rollouts == 16  # all of one attempt: what was sampled for a group before a kill is not saved
        for counts, name in ((recount, key), (by_step, step)):
            old = counts.get(name, (0, 0))
            counts[name] = (old[0] + correct, old[1] + rollouts)
    assert [r["pass_rate"] for r in records] == [by_step[r["step"]][0] / by_step[r["step"]][1] for r in records]
    state = state_of(folder)
    assert state["progress"]["step"] == steps
    assert {key: (correct, n) for key, correct, n in state["history"]["counts"]} == recount
    assert evaluated(folder) == sorted({*range(0, steps, eval_every), steps})


def unfinished(folder):
    return any((folder / "checkpoints").glob("unfinished-*"))


def wait_for(kind, folder, process, draw):
    """Waits for a random moment of this kind; False if the process ended first."""
    if kind == "start":
        time.sleep(draw.uniform(1.0, 8.0))
        return True
    goal, last = last_step(folder) + draw.randint(1, 4), last_step(folder)
    target, pause = {
        "step": (lambda: last_step(folder) >= goal, draw.uniform(0.0, 1.0)),
        "save": (lambda: unfinished(folder), 0.0),
        "evaluation": (lambda: last_step(folder) // 12 > last // 12, draw.uniform(0.0, 0.3)),
    }[kind]
    if not wait_until(target, process):
        return False
    time.sleep(pause)
    return True


def met(kind, folder):
    """What the kill met, from what it left: half a checkpoint, or an evaluation due and not recorded."""
    if unfinished(folder):
        return "save"
    if kind != "start" and last_step(folder) // 12 * 12 not in evaluated(folder):
        return "evaluation"
    return kind


def test_twenty_kills(tmp_path):
    """SIGKILL at 20 random moments (start-up, sampling, training, saving, evaluation), resumed each time. The end is that
    of a run never killed: every check of `check_run`, the same prompts in the same order over the first epoch, a final
    pass rate within 0.06 (three standard errors of two runs of 512 samples and their seeds' spread)."""
    folder, whole, steps, draw = tmp_path / "run", tmp_path / "whole", 96, random.Random(7)
    flags = f"--max_steps {steps} --save_every 3 --eval_every 12 --eval_samples 2 --batch_prompts 32".split()
    process, pids, shared, kinds, saved = start(folder, *flags), [], set(), set(), set()
    for kill in range(20):
        kind = ("step", "save", "step", "evaluation", "step", "save", "step", "start")[kill % 8]
        assert wait_for(kind, folder, process, draw), f"the run ended before kill {kill + 1}"
        relatives = family(process.pid)
        shared |= shared_files([process.pid, *relatives])
        process.kill()
        process.wait()
        wait_for_end(relatives)
        pids.append(process.pid)
        kinds.add(met(kind, folder))
        newest = Folder(folder).newest_checkpoint()
        if newest:
            saved.add(state_of(folder)["progress"]["step"])
        process = start(folder, "--resume") if newest else start(folder, *flags, "--overwrite", "true")
    assert process.wait(timeout=400) == 0
    assert start(whole, *flags).wait(timeout=400) == 0
    for path in (folder, whole):
        check_run(path, steps, 8, 12)
    rates = [steps_of(path, "eval.jsonl")[-1]["pass_rate"] for path in (folder, whole)]
    assert abs(rates[0] - rates[1]) < 0.06
    keys = [[key for _, key, _, _ in consumed(path)][:2048] for path in (folder, whole)]
    assert keys[0] == keys[1] and len(set(keys[0])) == 2048
    assert kinds == {"step", "save", "evaluation", "start"}
    lines = [line for line in (tmp_path / "log.txt").read_text().splitlines() if line.startswith("resumed from")]
    reported = [int(line.split(";")[0][-6:]) for line in lines]  # a run killed while it starts may not report it
    assert len(reported) >= 12 and saved.issuperset(reported)
    assert not [f for pid in [*pids, process.pid] for f in Path("/dev/shm").glob(f"scalerl-weights-{pid}-*")]
    assert not [f for f in shared if Path(f).exists()]


# The real job with a signal sent by itself at an exact moment.
DRIVER = """
    import os, sys
    sys.path.insert(0, {root!r})
    import train
    from accelerate import Accelerator
    from generator import Generator
    from runtime.evaluation import Evaluator
    from runtime.trainer import Trainer

    def wrap(owner, name, at):
        original, calls = getattr(owner, name), []

        def wrapped(self, *args, **options):
            calls.append(1)
            if len(calls) == at:
                assert name != "_result" or not args[0].future.done(), "the evaluation is over"
                print("signal now", flush=True)
                os.kill(os.getpid(), {number})
            return original(self, *args, **options)

        setattr(owner, name, wrapped)

    if __name__ == "__main__":
        wrap({moment})
        sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("moment", "number", "steps"),
    [
        ("Generator, 'take', 2", signal.SIGTERM, 1),
        ("Trainer, 'update', 3", signal.SIGTERM, 3),
        ("Evaluator, '_result', 2", signal.SIGTERM, 2),
        ("Accelerator, 'save_state', 1", signal.SIGTERM, 4),
        ("Generator, 'take', 2", signal.SIGINT, 1),
    ],
)
def test_signal_leaves_a_whole_checkpoint(tmp_path, moment, number, steps):
    """Sent while the trainer waits for rollouts, in its third update (which is finished), while an evaluation runs,
    while a checkpoint is written: a complete checkpoint of every step that was logged, exit code 128 + signal, all
    within a minute, no process left and nothing in shared memory. The evaluation of step 2 that was cut short is made
    again by the resumed run."""
    folder, script, log = tmp_path / "run", tmp_path / "driver.py", tmp_path / "log.txt"
    script.write_text(textwrap.dedent(DRIVER).format(root=str(ROOT), number=int(number), moment=moment))
    flags = ["--output_dir", str(folder), "--max_steps", "40", "--eval_every", "2", "--save_every", "4"]
    process = launch(log, sys.executable, str(script), *flags)
    assert wait_until(lambda: "signal now" in log.read_text(), process), log.read_text()
    relatives = family(process.pid)
    assert process.wait(timeout=60) == 128 + number, log.read_text()
    wait_for_end(relatives)
    assert "Traceback" not in log.read_text()
    assert state_of(folder)["progress"]["step"] == steps == len(steps_of(folder))
    assert f"checkpoint {Folder(folder).newest_checkpoint()}" in log.read_text() and not unfinished(folder)
    assert not list(Path("/dev/shm").glob(f"scalerl-weights-{process.pid}-*"))
    if "Evaluator" in moment:
        assert evaluated(folder) == [0]
        assert start(folder, "--resume", "--max_steps", "4").wait(timeout=240) == 0
        check_run(folder, 4, k=8, eval_every=2)


def engine_of(process):
    """Process id of the trainer's engine; None while there is none."""
    for pid in family(process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine") and alive(pid):
                return pid
    return None


def test_a_signal_to_the_group_while_the_engine_starts_leaves_an_empty_folder(tmp_path):
    """As a scheduler sends it: exit code 143, no traceback, and the same command may be given again."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    process = launch(log, sys.executable, "train.py", "--output_dir", str(folder), start_new_session=True)
    assert wait_until(lambda: engine_of(process), process), log.read_text()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=240) == 143, log.read_text()
    assert "\nTraceback" not in log.read_text()  # vLLM logs one of its own, behind a prefix
    assert "nothing is written" in log.read_text()
    assert {path.name for path in folder.iterdir()} <= {"lock"}


def under_a_network_name(tmp_path):
    """A prefix for commands: they run where the host's name resolves to its network address, as on most hosts. Empty
    where that is not permitted."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        address = probe.getsockname()[0]
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} faraway\n")
    script = f'hostname faraway && mount --bind {hosts} /etc/hosts && exec "$@"'
    prefix = ["unshare", "-u", "-m", "sh", "-c", script, "-"]
    return prefix if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0 else []


def listening(pids):
    """Addresses on which these processes accept TCP connections."""
    connections = [one for pid in pids for one in psutil.Process(pid).net_connections("tcp")]
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


LOOP = "{python} train.py {flags} || until {python} train.py --resume {folder} || [ $? != 75 ]; do sleep 1; done"


def test_a_shell_loop_goes_on_after_each_death_of_the_engine(tmp_path):
    """The engine is killed at steps 2 and 9. Each time the trainer saves a checkpoint of every logged step, says so in
    one line and ends with exit code 75; the loop of README starts another process, and the run ends as if nothing had
    been. All the while nothing listens on other than loopback, whatever the host's name stands for."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    flags = f"--output_dir {folder} --max_steps 24 --eval_every 12 --save_every 6"
    script = LOOP.format(python=sys.executable, flags=flags, folder=folder)
    process = launch(log, *under_a_network_name(tmp_path), "sh", "-c", script)
    for steps in (2, 9):
        assert wait_until(lambda: last_step(folder) >= steps and engine_of(process), process), log.read_text()
        addresses = listening(family(process.pid))
        assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses
        os.kill(engine_of(process), signal.SIGKILL)
        assert wait_until(lambda: log.read_text().count("EngineDied") == 1 + (steps > 2), process), log.read_text()
    assert process.wait(timeout=300) == 0, log.read_text()
    ends = [line for line in log.read_text().splitlines() if line.startswith("train.py: ")]
    assert len(ends) == 2 and all("; checkpoint " in line and "continue with --resume" in line for line in ends)
    assert "Traceback" not in log.read_text()
    check_run(folder, 24, k=8, eval_every=12)
