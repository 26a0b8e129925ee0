"""Real engines that are killed, and a Ctrl-C that is not theirs."""

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fake_engine import problems, wait_until
from forked import Context, fork_engines, run_program
from real_engine import new_engine, new_generator
from test_weights_in_flight import check_weights_move, evaluated, long_training
from tiny_model import TinyModel

from pipeline_rl import Pacer
from runtime.weights import PREFIX


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


def drive(folder: str) -> None:
    """The program of the next test."""
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    tiny = TinyModel(folder, tied=True)
    generator = new_generator(new_engine(tiny), itertools.cycle(problems(4)))
    try:
        generator.start(tiny.weights(0))
        print("ready", flush=True)
        interrupted.wait(60)
        for version in range(3):
            generator.take(1)
            generator.push(tiny.weights(version + 1), version + 1, 1)
        _future = generator.evaluate(problems(4), 4)  # left open, as are the running groups
    finally:
        generator.close()
    print("version", generator.engine.version, flush=True)


@pytest.mark.medium
def test_ctrl_c_spares_the_engine_and_a_run_prints_nothing(tmp_path: Path) -> None:
    """Ctrl-C reaches trainer and engine alike; the trainer decides, so the engine must go on until `close`. A close in
    the middle of the work ends at once. Neither the start nor the end writes a line to stdout or stderr; that vLLM's
    import does not, either: test_alone.py.
    """
    fork_engines()
    out, err = tmp_path / "out", tmp_path / "err"
    process = Context().Process(target=run_program, args=(drive, str(out), str(err), str(tmp_path / "model")))
    process.start()
    try:
        wait_until(lambda: not process.is_alive() or (out.exists() and "ready" in out.read_text()), 60)
        os.killpg(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 0, err.read_text()
    assert out.read_text() == "ready\nversion 3\n"
    lines = err.read_text().splitlines()
    assert [line for line in lines if line and "Triton" not in line and "model shards" not in line] == []
    assert not list(Path("/dev/shm").glob(f"{PREFIX}{process.pid}-*"))
    wait_until(lambda: living_processes(process.pid) == [], 10)
