"""runtime/ranks.py with two ranks in two threads: what rank 0 makes or raises, every rank gets."""

import threading
from types import SimpleNamespace

import accelerate.utils
import pytest

from pipeline_rl import EngineFailed
from runtime.ranks import Ranks, SharedGenerator


def on_two_ranks(monkeypatch, work) -> list:
    """`work(ranks)` on rank 0 and on rank 1 at the same time: what each returned or raised."""
    sent, barrier = {}, threading.Barrier(2, timeout=5)
    rank = threading.local()

    def broadcast_object_list(values):
        if rank.number == 0:
            sent["values"] = values
        barrier.wait()
        found = list(sent["values"])
        barrier.wait()
        return found

    def run(number):
        rank.number = number
        try:
            found[number] = work(Ranks(SimpleNamespace(is_main_process=number == 0, num_processes=2)))
        except Exception as error:
            found[number] = error

    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", broadcast_object_list)
    found = [None, None]
    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


def test_what_rank_0_makes_or_raises_reaches_every_rank(monkeypatch):
    """`make` runs on rank 0 only; its error is raised on both ranks, so that none waits forever."""
    made = []
    assert on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: made.append(1) or 7)) == [7, 7]
    assert made == [1]
    found = on_two_ranks(monkeypatch, lambda ranks: ranks.from_main(lambda: 1 / 0))
    assert [type(error) for error in found] == [ZeroDivisionError] * 2


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", lambda values: 1 / 0)
    assert Ranks(SimpleNamespace(is_main_process=True, num_processes=1)).from_main(lambda: 3) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_gathers_the_weights_and_hears_of_a_push_that_failed(monkeypatch, tmp_path, fails):
    """The weights are gathered by both ranks: rank 0 within the generator's push, rank 1 by its channel. A push that
    failed is raised by the next one's `settle`, on both, before anything is gathered."""
    calls = []

    def settle():
        if fails:
            raise RuntimeError("the push failed")

    generator = SimpleNamespace(
        settle=settle, push=lambda weights, version, release: calls.append(("push", version, release)),
        release=lambda count: calls.append(("release", count)),
    )  # fmt: skip

    def work(ranks):
        channel = SimpleNamespace(folder=tmp_path, prepare=lambda weights: calls.append(("prepare", weights)))
        shared = SharedGenerator(generator if ranks.main else None, channel, ranks)
        shared.release(2)
        shared.push("weights", 5, release=3)

    found = on_two_ranks(monkeypatch, work)
    if fails:
        assert [str(error) for error in found] == ["the push failed"] * 2 and calls == [("release", 2)]
    else:
        assert found == [None, None]
        assert sorted(calls) == [("prepare", "weights"), ("push", 5, 3), ("release", 2)]


@pytest.mark.parametrize("transfer", [True, False])
@pytest.mark.parametrize("starts", [True, False])
def test_every_rank_hears_of_an_engine_that_does_not_start(monkeypatch, transfer, starts):
    """Before a transfer, in which rank 1 would wait for rank 0; a file is written before the engine starts."""
    gathered = []

    def work(ranks):
        def prepare(weights):
            channel.meet() if transfer else None
            gathered.append(weights)

        def start(weights, version):
            if not transfer:
                prepare(weights)
            if not starts:
                raise EngineFailed("vLLM does not start")
            if transfer:
                prepare(weights)

        channel = SimpleNamespace(prepare=prepare)
        SharedGenerator(SimpleNamespace(start=start) if ranks.main else None, channel, ranks).start("weights", 0)

    found = on_two_ranks(monkeypatch, work)
    assert [str(error) for error in found] == ["None" if starts else "vLLM does not start"] * 2
    assert gathered == ["weights"] * (2 if starts or not transfer else 0)
