"""runtime/ranks.py on two ranks, which are threads here: what rank 0 makes or raises, every rank gets. Real processes:
deep/test_trainer_processes.py."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import accelerate.utils
import pytest

from generator import EngineFailed
from runtime.folder import Folder, Progress
from runtime.ranks import GeneratorForRanks, Ranks
from runtime.run import save


def on_two_ranks(monkeypatch, work) -> list:
    """`work(ranks)` on rank 0 and on rank 1 at the same time: what each returned or raised."""
    sent, barrier, rank = {}, threading.Barrier(2, timeout=5), threading.local()

    def broadcast_object_list(values):
        if rank.number == 0:
            sent["values"] = values
        barrier.wait()
        received = list(sent["values"])
        barrier.wait()
        return received

    def run(number):
        rank.number = number
        try:
            return work(Ranks(SimpleNamespace(is_main_process=number == 0, num_processes=2)))
        except Exception as error:
            return error

    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", broadcast_object_list)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def test_what_rank_0_makes_or_raises_reaches_every_rank(monkeypatch):
    calls = []
    assert on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: calls.append(1) or 7)) == [7, 7]
    assert calls == [1]
    results = on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: 1 / 0))
    assert [type(error) for error in results] == [ZeroDivisionError] * 2
    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", lambda values: 1 / 0)  # one process asks nobody
    assert Ranks(SimpleNamespace(is_main_process=True, num_processes=1)).from_main(lambda: 3) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_gathers_the_weights_and_hears_of_a_push_that_failed(monkeypatch, fails):
    """Rank 0 gathers within the generator's push, rank 1 by its channel. A push that failed is raised by the next one's
    `settle`, on both, before anything is gathered."""
    calls, generator = [], SimpleNamespace(settle=lambda: 1 / (not fails))
    generator.push = lambda weights, version, release: calls.append(("push", version, release))
    generator.release = lambda count: calls.append(("release", count))

    def work(ranks):
        channel = SimpleNamespace(prepare=lambda weights: calls.append(("prepare", weights)))
        shared = GeneratorForRanks(generator if ranks.main else None, channel, ranks)
        shared.release(2)
        shared.push("weights", 5, release=3)

    results = on_two_ranks(monkeypatch, work)
    assert [type(error) for error in results] == [ZeroDivisionError if fails else type(None)] * 2
    gathered = [] if fails else [("prepare", "weights"), ("push", 5, 3)]
    assert sorted(calls) == [*gathered, ("release", 2)]


@pytest.mark.parametrize("starts", [True, False])
def test_every_rank_hears_of_an_engine_that_does_not_start(monkeypatch, starts):
    """Both have gathered the weights by then, rank 0 within the generator's start, so that none waits for the other."""
    gathered = []

    def start(weights, version):
        gathered.append(weights)
        if not starts:
            raise EngineFailed("vLLM does not start")

    def work(ranks):
        channel = SimpleNamespace(prepare=gathered.append)
        GeneratorForRanks(SimpleNamespace(start=start) if ranks.main else None, channel, ranks).start("weights", 0)

    results = on_two_ranks(monkeypatch, work)
    assert [str(error) for error in results] == ["None" if starts else "vLLM does not start"] * 2
    assert gathered == ["weights"] * 2


def test_other_ranks_save_without_a_clock_and_a_generator(tmp_path):
    """Only rank 0 has them: a save that asked for them on every rank left rank 0 waiting, and half a checkpoint."""
    saved, accelerator = [], SimpleNamespace(is_main_process=False, num_processes=1)
    accelerator.save_state, accelerator.wait_for_everyone = saved.append, lambda: None
    run = SimpleNamespace(
        ranks=Ranks(accelerator), folder=Folder(tmp_path), recorder=None, generator=None, progress=Progress(None, step=3),
        trainer=SimpleNamespace(weights_are_finite=lambda: True),
    )  # fmt: skip
    assert save(run) == str(tmp_path / "checkpoints/step-000003")
    assert saved == [str(tmp_path / "checkpoints/unfinished-step-000003")] and not any(tmp_path.iterdir())
