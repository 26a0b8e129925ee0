"""runtime/trace.py and evidence/timeline.py: what is written is what happened, and a trace without its end is drawn."""

import asyncio
import json
import time
from contextlib import closing
from itertools import pairwise

import pandas as pd
import pytest
import timeline
from fake_engine import FakeEngine, Problem, no_reward

from pipeline_rl import Generator, Pacer
from runtime.trace import ENGINE, PACER, TRAINER, Trace


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A folder with the trace of six groups of two, four taken in two steps, and its rollouts by group."""
    folder = tmp_path_factory.mktemp("run")
    trace = Trace(folder / "trace.json")
    prompts = [Problem(str(i), [i]) for i in range(6)]
    engine = FakeEngine(slots=4, seconds=0.01)
    with closing(Generator(engine, iter(prompts), no_reward, Pacer(2, 1), 2, max_completion=8)) as generator:
        trace.watch(generator)
        generator.start({})
        groups = generator.take(2)
        generator.push({}, 1, release=2)
        groups += generator.take(2)
        generator.push({}, 2, release=2)
        generator.settle()
        generator.result_of(generator.evaluate([Problem("held out", [9])], 1))
        trace.span("step 1", 1.0, TRAINER, end=2.0)
    trace.close()
    return folder, groups


def events(folder):
    return json.loads((folder / "trace.json").read_text().rstrip(",\n") + "]")


def test_requests_lie_in_lanes_of_their_own_and_name_their_versions(traced):
    folder, groups = traced
    spans = [e for e in events(folder) if e["ph"] == "X" and e["pid"] == ENGINE]
    assert {span["tid"] for span in spans} <= set(range(4))
    for lane in range(4):  # two requests in one slot do not overlap
        own = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == lane)
        assert all(end <= begin + 2 for (_, end), (begin, _) in pairwise(own))  # rounded microseconds
    sampled = {f"version {v}" for group in groups for rollout in group.rollouts for v in rollout.versions}
    assert {"version 0", "version 1"} <= sampled <= {span["name"] for span in spans}


def test_the_pacer_and_the_updates_are_there_in_their_order(traced):
    names = [e["name"] for e in events(traced[0]) if e["pid"] == PACER and e["ph"] != "M"]
    for number in range(4):
        assert names.index(f"admit {number}") < names.index(f"finish {number}")
    assert (
        names.index("finish 1") < names.index("take 0 to 1") < names.index("update to 1") < names.index("take 2 to 3")
    )
    assert names.count("evaluation") == 1 and "update to 2" in names


def test_the_warm_up_of_an_engine_gives_no_temperature(tmp_path):
    """vLLM's engine samples once by itself when it starts, with four arguments."""
    engine = FakeEngine(slots=4)
    with closing(Generator(engine, iter([]), no_reward, Pacer(2, 1), 2)) as generator:
        trace = Trace(tmp_path / "trace.json")
        trace.watch(generator)
        assert asyncio.run(engine.sample([0, 0], 2, "warm-up", 0)).completion_ids == [9, 9]
        trace.close()


def test_a_version_begins_when_its_update_ends(tmp_path):
    """A request that comes while an update lasts is frozen until then, and the next version samples all of it."""

    async def paused():
        await asyncio.sleep(0.02)

    engine = FakeEngine(slots=4)
    engine.update, engine.prepared = paused, 1
    with closing(Generator(engine, iter([]), no_reward, Pacer(2, 1), 2)) as generator:
        trace = Trace(tmp_path / "trace.json")
        trace.watch(generator)
        began = time.time()
        asyncio.run(engine.update())
        trace.request(lane=0, begin=began + 0.01, version=0)
        trace.close()
    frozen, sampled = (e for e in events(tmp_path) if e["ph"] == "X" and e["pid"] == ENGINE)
    assert (frozen["name"], sampled["name"]) == ("version 0", "version 1") and sampled["ts"] >= 1e6 * (began + 0.02)


def test_a_trace_goes_on_in_the_same_file(tmp_path):
    for number in range(2):
        trace = Trace(tmp_path / "trace.json")
        trace.mark(f"admit {number}")
        trace.close()
    assert [e["name"] for e in events(tmp_path) if e["ph"] == "i"] == ["admit 0", "admit 1"]


def test_a_trace_that_is_cut_is_drawn(traced, tmp_path):
    text = (traced[0] / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text[: len(text) * 2 // 3])
    timeline.main([str(tmp_path), "--begin", "0", "--seconds", "1", "--output", str(tmp_path / "t.png")])
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_shares_of_a_window():
    """Two lanes for 10 s: one full, one for 4 s, so 3 of 10 are empty; the trainer waits 1 s of the window's 5."""
    columns = ["process", "lane", "begin", "length", "name"]
    busy = [(ENGINE, 0, 0.0, 10.0, "version 0"), (ENGINE, 1, 0.0, 4.0, "version 0")]
    spans = pd.DataFrame([*busy, (TRAINER, 0, 4.0, 2.0, "trainer_idle")], columns=columns)
    assert timeline.shares(timeline.within(spans[:2], 0, 10), 10)[0] == pytest.approx(0.3)
    assert timeline.within(spans[2:], 5, 5).values.tolist() == [[TRAINER, 0, 0, 1, "trainer_idle"]]
    assert timeline.shares(timeline.within(spans, 5, 5), 5)[1] == pytest.approx(0.2)


def test_a_run_without_a_trace_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        timeline.main([str(tmp_path)])
    assert "trace.json" in capsys.readouterr().err
