"""The order of prompts: a stream that stops anywhere, and keys in other processes."""

import hashlib
import json
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.arithmetic import graded_task
from tasks.prompts import Problem, PromptStream, stable_key

ROOT = Path(__file__).resolve().parents[2]


POOL = [Problem(str(i), (), "") for i in range(50)]


@given(st.integers(0, 9999), st.integers(0, 40), st.sampled_from([0.0, 0.3, 0.6]))
def test_a_stream_that_stops_at_any_place_goes_on_as_if_it_had_not(seed, stop, share):
    """A `share` of the prompts that are drawn retire. The place is saved, through JSON, into a new stream, for which what
    is retired by then has been so from the start."""
    rng, problems, retired = random.Random(seed), POOL[:9], set[str]()
    retire = [rng.random() < share for _ in range(60)]

    def new_stream():
        return PromptStream(problems, seed, lambda key: key in retired)

    def go_on(stream, retire):
        places = []
        for retires in retire:
            problem = next(stream, None)
            if problem and retires:
                retired.add(problem.key)
            places.append((problem and problem.key, stream.epoch, stream.position))
        return places

    stream = new_stream()
    stream.unfinished.extend(problems[:2])
    go_on(stream, retire[:stop])
    saved, at_stop = json.dumps(stream.state_dict()), set(retired)
    never_stopped = go_on(stream, retire[stop:])
    retired, resumed = at_stop, new_stream()
    resumed.load_state_dict(json.loads(saved))
    assert go_on(resumed, retire[stop:]) == never_stopped


@pytest.mark.long
def test_keys_are_stable_across_processes_and_the_published_runs_keep_their_order():
    """The first 16 hex digits of SHA-256, whatever PYTHONHASHSEED says; so are the problems of the built-in task."""
    assert stable_key("7 a +5 <think>") == hashlib.sha256(b"7 a +5 <think>").hexdigest()[:16]
    code = "from tasks.arithmetic import graded_task; print([p.key for p in graded_task(7, 3, 3).train])"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=ROOT, text=True)
    assert output == f"{[p.key for p in graded_task(7, 3, 3).train]}\n"
    stream = PromptStream(graded_task(0).train, 0, lambda key: False)
    assert [p.key for p in islice(stream, 3)] == ["f113fb021eac67f2", "5df7a90c1815cdb7", "3ec490dd052fedeb"]
