"""Real engines that are killed, and a Ctrl-C that is not theirs."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fake_engine import problems, wait_until
from real_engine import new_engine, new_generator
from test_weights_in_flight import check_weights_move, evaluated, long_training
from tiny_model import TinyModel

from pipeline_rl import Pacer
from runtime.weights import PREFIX

ROOT = Path(__file__).resolve().parents[3]


def engine_processes() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.medium
def test_untied_head_then_a_death(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One engine of its own, start to end. Ten updates under an untied head. Then it is killed while six groups, an
    evaluation and a push that it cannot answer wait for it: an error wherever the trainer waits. Nothing is left
    behind, and vLLM logs no traceback: the run says itself what happened."""
    before = engine_processes()
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("vllm").addHandler(handler)
    tiny = TinyModel(tmp_path_factory.mktemp("untied"), tied=False)
    control = long_training(700)
    pacer = Pacer(3, 1)
    prompts, vllm = problems(20), new_engine(tiny, stop_ids=[], max_num_seqs=20)
    generator = new_generator(vllm, prompts, pacer=pacer, length_control=control, rollouts=3)
    folder = vllm.channel.folder
    try:
        generator.start(tiny.weights(0))
        check_weights_move(generator, tiny, prompts[:6])
        control.draw_budget, pacer.capacity = long_training(800).draw_budget, 8
        generator.release(6)
        wait_until(lambda: pacer.admitted == 12)

        (engine,) = engine_processes() - before
        semaphores = [line for line in Path(f"/proc/{engine}/maps").read_text().splitlines() if "/dev/shm/sem." in line]
        os.kill(engine, signal.SIGSTOP)  # it cannot answer the push
        future = generator.evaluate(prompts[:3], 2)
        time.sleep(0.3)
        os.kill(engine, signal.SIGKILL)
        started = time.monotonic()
        waits = [lambda: generator.result_of(future), lambda: generator.take(3)]
        for wait in (*waits, lambda: evaluated(generator, prompts[:1], 1)):
            with pytest.raises(RuntimeError, match="EngineDied"):
                wait()
        assert time.monotonic() - started < 10
    finally:
        generator.close()
        logging.getLogger("vllm").removeHandler(handler)
    assert [record.getMessage() for record in logged if record.exc_info] == []
    generator.close()  # twice does no harm
    assert engine_processes() <= before and not generator._thread.is_alive()
    assert semaphores == []  # or a SIGKILL of all processes leaves them in shared memory
    assert not folder.exists() and not Path(f"/proc/{engine}").exists()


def living_processes(group: int) -> list[int]:
    """Processes of the process group, those left out that have ended and that nobody has waited for."""
    pids = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


DRIVER = """
    import itertools, signal, sys, threading
    sys.path[:0] = [{root!r}, {tests!r}, {tests!r} + "/deep/engine"]
    from real_engine import new_engine, new_generator
    from fake_engine import problems
    from tiny_model import TinyModel

    if __name__ == "__main__":
        interrupted = threading.Event()
        signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
        tiny = TinyModel({folder!r}, tied=True)
        generator = new_generator(new_engine(tiny), itertools.cycle(problems(4)))
        try:
            generator.start(tiny.weights(0))
            print("ready", flush=True)
            interrupted.wait(60)
            for version in range(3):
                generator.take(1)
                generator.push(tiny.weights(version + 1), version + 1, 1)
            future = generator.evaluate(problems(4), 4)  # left open, as are the running groups
        finally:
            generator.close()
        print("version", generator.engine.version)
"""


@pytest.mark.medium
def test_ctrl_c_spares_the_engine_and_a_run_prints_nothing(tmp_path: Path) -> None:
    """Ctrl-C reaches trainer and engine alike; the trainer decides, so the engine must go on until `close`. A close in
    the middle of the work ends at once. Neither the start nor the end writes a line to stdout or stderr.
    """
    script = tmp_path / "driver.py"
    names = {"root": str(ROOT), "tests": str(ROOT / "tests"), "folder": str(tmp_path / "model")}
    script.write_text(textwrap.dedent(DRIVER).format(**names))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert out == "version 3\n"
    noise = [line for line in err.splitlines() if line and "Triton" not in line and "model shards" not in line]
    assert noise == []
    assert not list(Path("/dev/shm").glob(f"{PREFIX}{process.pid}-*"))
    wait_until(lambda: living_processes(process.pid) == [], 10)
