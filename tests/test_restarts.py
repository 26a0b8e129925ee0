"""The engine dies or does not start; who waits for whom. Left over from test_checkpoint.py for the engine's tests."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from conftest import new_generator, problems

import pipeline_rl


def test_who_waits_for_whom(capsys, tmp_path):
    """After the time limit the trainer says what it waits for: two groups of which one is finished."""
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)), pacer=pipeline_rl.Pacer(2, 1))
    numbers = [generator.pacer.admit() for _ in range(3)]
    generator.pacer.finish(pipeline_rl.Group(numbers[0], None, 0, []))
    with pytest.raises(TimeoutError):
        generator._loop.run_until_complete(asyncio.wait_for(generator._until_ready(2, 0.05), 0.12))
    generator.close()
    generator._loop.close()
    assert capsys.readouterr().out == "the trainer waits for 2 groups; 2 run, the oldest is [1]\n" * 2


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_groups_admitted_while_the_engine_restarts_are_no_second_death(monkeypatch, tmp_path, turns):
    """Forty groups, two at a time; the first engine dies. Its slots are free at once, so others begin on it and fail, one
    after the other, also while the new engine starts. One death, one restart, forty groups. (`turns` of the event loop
    shift the moments against each other.)"""
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    made = []

    def new_engine(args):
        made.append(SimpleNamespace(shutdown=lambda timeout: None, errored=False, dead=False))
        return made[-1]

    async def load_weights(self, engine):
        await asyncio.sleep(0.1)

    async def request(self, prompt_ids, max_tokens, salt):
        engine = self._engine
        for _ in range(turns):
            await asyncio.sleep(0)
        if not engine.dead:
            await asyncio.sleep(0.01)
        if engine is made[0] and salt != "warm-up":
            engine.dead = True
            raise self._dead_engine
        return pipeline_rl.Rollout([1], [-1.0], [0], [1], "stop")

    monkeypatch.setattr(vllm, "AsyncEngineArgs", SimpleNamespace)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", new_engine)
    monkeypatch.setattr(pipeline_rl.Generator, "_load_weights", load_weights)
    monkeypatch.setattr(pipeline_rl.Generator, "_request", request)
    generator = new_generator(
        SimpleNamespace(folder=str(tmp_path)), problems=iter(problems(40)), pacer=pipeline_rl.Pacer(40, 0), max_num_seqs=4
    )
    try:
        generator.start({})
        assert [group.number for group in generator.take(40)] == list(range(40))
    finally:
        generator.close()
    assert generator.counters.restarts == 1 and len(made) == 2
    assert 2 <= generator.counters.redone_groups <= 40


@pytest.mark.parametrize(("versions", "survives"), [((0, 5), True), ((0, 4), False), ((0, 5, 10), True), ((0, 5, 9), False)])
def test_deaths_of_the_engine_count_within_a_window(monkeypatch, tmp_path, versions, survives):
    """One death survived within 5 versions: the next one 5 versions later is, 4 versions later it is not."""

    async def start_engine(self):
        self._engine_number += 1

    monkeypatch.setattr(pipeline_rl.Generator, "_start_engine", start_engine)
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)), max_restarts=1, restart_window=5)
    generator._engine = SimpleNamespace(shutdown=lambda timeout: None)

    def die(version):
        generator.version = version
        generator._loop.run_until_complete(generator._restart(generator._engine_number))

    try:
        for version in versions[:-1]:
            die(version)
        with nullcontext() if survives else pytest.raises(pipeline_rl.EngineDied, match="died 2 times within 5 versions"):
            die(versions[-1])
        assert generator.counters.restarts == len(versions) - (not survives)
    finally:
        generator._engine = None
        generator.close()
        generator._loop.close()


def test_an_engine_that_does_not_start_again(monkeypatch, tmp_path):
    """Whatever vLLM raises when the new engine starts becomes EngineDied, which saves and ends the run."""

    def new_engine(self):
        raise ValueError("no memory")

    monkeypatch.setattr(pipeline_rl.Generator, "_new_engine", new_engine)
    generator = new_generator(SimpleNamespace(folder=str(tmp_path)))
    generator._engine = SimpleNamespace(shutdown=lambda timeout: None)
    with pytest.raises(pipeline_rl.EngineDied, match=r"did not start again: .*\(ValueError: no memory\)"):
        generator._loop.run_until_complete(generator._restart(0))
    generator._engine = None
    generator.close()
    generator._loop.close()
