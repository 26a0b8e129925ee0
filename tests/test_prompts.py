"""Problems' keys, the order of an epoch, and the stream of training prompts."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.arithmetic import ChainTask
from tasks.prompts import Problem, PromptStream, epoch_order, places_of, stable_key

ROOT = Path(__file__).resolve().parents[1]


def mixture(**sizes):
    return [Problem(f"{source}{i}", (), "", source) for source, size in sizes.items() for i in range(size)]


POOL = [Problem(str(i), (), "") for i in range(50)]


def keys(stream, n):
    return [next(stream).key for _ in range(n)]


def order_of(seed, n):
    """The first n keys of POOL when nothing is retired."""
    return keys(PromptStream(POOL, seed, lambda key: False), n)


# ------------------------------------------------------------------------------------------------ the order of an epoch


def test_an_epoch_has_the_shares_that_the_weights_ask_for():
    """60 + 30 + 10 problems at weights 1 : 2 : 1 give 25, 50 and 25 places. Over six epochs the 150 places of a go
    2.5 times through its 60, the 300 of b ten times through its 30, the 150 of c 15 times through its 10."""
    problems, seen = mixture(a=60, b=30, c=10), Counter()
    for epoch in range(6):
        order = epoch_order(problems, {"a": 1.0, "b": 2.0, "c": 1.0}, 7, epoch)
        assert Counter(problems[i].source for i in order) == {"a": 25, "b": 50, "c": 25}
        assert len({problems[i].source for i in order[:20]}) == 3  # mixed, and not one source after the other
        seen.update(order)
    assert [{seen[i] for i in some} for some in (range(60), range(60, 90), range(90, 100))] == [{2, 3}, {10}, {15}]


def test_a_source_with_less_than_a_place_an_epoch_comes_in_some_epochs():
    """At 100 : 1 an epoch of 45 places has .45 for b: 45 in 101 epochs, all 40 prompts among them. (It once had none in
    any epoch.)"""
    problems = mixture(a=5, b=40)
    orders = [epoch_order(problems, {"a": 100.0, "b": 1.0}, 0, epoch) for epoch in range(101)]
    found = Counter(problems[i].key for order in orders for i in order if i >= 5)
    assert {len(order) for order in orders} == {45} and found.total() == 45 and len(found) == 40


WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-9, 1e4), min_size=1)


@given(WEIGHTS, st.integers(0, 3000), st.integers(0, 99))
def test_the_places_so_far_add_up_and_never_fall(weights, places, more):
    """And each source is at most two places off its share."""
    now, later = places_of(weights, places), places_of(weights, places + more)
    assert sum(now.values()) == places and all(later[name] >= now[name] >= 0 for name in weights)
    assert all(abs(now[name] - places * w / sum(weights.values())) <= 2 for name, w in weights.items())


def test_a_source_is_shuffled_anew_each_time_round():
    """20 problems of a in 10 places per epoch: epochs 0 and 1 are its first round, 2 and 3 its second. That both rounds
    are halved alike has a chance of 1 in 184,756."""
    problems = mixture(a=20, b=20)
    halves = [{i for i in epoch_order(problems, {"a": 1.0, "b": 3.0}, 0, epoch) if i < 20} for epoch in range(4)]
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(20)) and halves[0] != halves[2]


# ------------------------------------------------------------------------------------------------------------ the stream


def test_the_others_take_the_places_of_a_source_that_is_retired():
    """20, 10 and 10 prompts at 2 : 1 : 1. An epoch has 40 places, 20, 10 and 10. Once all of a are retired, an epoch
    has the 20 places of b and c, 10 and 10; once all of b are too, each prompt of c comes once per epoch. (Retired
    places once stayed empty, which ended a run with prompts left.)"""
    gone: set[str] = set()
    stream = PromptStream(mixture(a=20, b=10, c=10), 0, gone.__contains__, {"a": 2.0, "b": 1.0, "c": 1.0})

    def sources(n):
        return Counter(next(stream).source for _ in range(n))

    assert sources(40) == {"a": 20, "b": 10, "c": 10} and stream.epoch == 0
    gone |= {f"a{i}" for i in range(20)}
    assert sources(20) == {"b": 10, "c": 10} and stream.epoch == 1  # whose 20 places of a were empty
    assert sources(20) == {"b": 10, "c": 10} and (stream.epoch, stream.position) == (2, 20)
    gone |= {f"b{i}" for i in range(10)}
    assert sorted(keys(stream, 10)) == [f"c{i}" for i in range(10)] and (stream.epoch, stream.position) == (3, 10)


def test_every_prompt_once_per_epoch_in_an_order_of_its_own():
    """The order is a function of the seed and the epoch only, whoever else uses `random`."""
    stream = PromptStream(POOL, 0, lambda key: False)
    first, second = keys(stream, 50), keys(stream, 50)
    assert sorted(first) == sorted(second) == sorted(p.key for p in POOL) and stream.epoch == 1
    assert first != second and first != [p.key for p in POOL] and order_of(1, 50) != first
    random.seed(0)
    assert order_of(0, 100) == first + second
    assert keys(PromptStream(POOL[:5], 0, {"3"}.__contains__, shuffled=False), 6) == ["0", "1", "2", "4", "0", "1"]


def test_retired_prompts_are_passed_over_from_the_moment_they_retire():
    gone: set[str] = set()
    stream, order = PromptStream(POOL, 0, gone.__contains__), order_of(0, 100)
    assert keys(stream, 10) == order[:10]
    gone |= {order[3], order[12], order[20]}  # one seen, two to come
    assert keys(stream, 38 + 47) == [key for key in order[10:] if key not in gone] and stream.epoch == 1


def test_a_share_of_the_retired_prompts_is_reviewed():
    """Of 50 prompts 40 are retired, and a quarter of these comes in each of 200 epochs: 2,000 of 8,000, give or take
    four standard deviations, 4 sqrt(8000 / 4 * 3 / 4) = 155; and all of the others."""
    gone = {p.key for p in POOL[:40]}
    stream, came = PromptStream(POOL, 0, gone.__contains__, review=0.25), []
    while stream.epoch < 200:
        came.append(next(stream).key in gone)
    del came[-1]  # of epoch 200
    assert abs(sum(came) - 2000) < 155 and came.count(False) == 200 * 10


def test_it_stops_when_every_prompt_is_retired():
    """In the middle of an epoch or at its end, without spinning; the last prompt that is left still comes."""
    gone: set[str] = set()
    stream = PromptStream(POOL, 0, gone.__contains__)
    keys(stream, 17)
    gone |= {p.key for p in POOL} - {"7"}
    assert "7" in keys(stream, 2) and keys(stream, 3) == ["7", "7", "7"]
    gone.add("7")
    assert next(stream, None) is None and next(stream, None) is None


@pytest.mark.parametrize("weights", [{"a": 4.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1e-9}])
def test_a_weighted_mixture_ends_exactly_when_every_prompt_is_retired(weights):
    """30 of a and 60 of b, of which an epoch at 4 : 1 holds 18. All but b7, b8 and b9 retire when first drawn. These
    three still come, and no other, until they retire one by one. (The stream once ended with prompts of b left.)"""
    for seed in range(5):
        gone, hard = set(), {"b7", "b8", "b9"}
        stream = PromptStream(mixture(a=30, b=60), seed, gone.__contains__, weights)
        while len(gone) < 87:
            key = next(stream).key
            assert key not in gone
            gone |= {key} - hard
        for key in sorted(hard):
            assert set(keys(stream, 40)) == hard - gone
            gone.add(key)
        assert next(stream, None) is None and next(stream, None) is None


def test_prompts_of_a_resumed_run_come_first():
    """Those that were in flight, in their old order, retired meanwhile or not; then the stream from its old place."""
    stream = PromptStream(POOL, 0, {"7"}.__contains__)
    stream.first.extend(POOL[i] for i in (7, 4, 4))
    assert keys(stream, 4) == ["7", "4", "4", next(key for key in order_of(0, 50) if key != "7")]


THREE = {"a": 2, "b": 4, "c": 3}, {"a": 2.0, "b": 1.0, "c": 1.0}
MIXTURES = st.sampled_from([({"a": 9}, {}), THREE, ({"a": 3, "b": 9}, {"a": 5.0, "b": 1.0})])  # sizes, weights
SHARES = st.sampled_from([0.0, 0.3, 0.6])


@given(MIXTURES, st.booleans(), st.integers(0, 9999), st.integers(0, 40), SHARES)
def test_a_stream_that_stops_at_any_place_goes_on_as_if_it_had_not(mixed, shuffled, seed, stop, share):
    """A `share` of the prompts that are drawn retire. The place is saved, through JSON, into a new stream, for which what
    is retired by then has been so from the start: also inside an epoch that began with fewer sources than there are."""
    (sizes, weights), rng = mixed, random.Random(seed)
    gone, problems, retire = set[str](), mixture(**sizes), [rng.random() < share for _ in range(60)]

    def new_stream():
        return PromptStream(problems, seed, lambda key: key in gone, weights, shuffled, review=0.3)

    def go_on(stream, retire):
        found = []
        for one in retire:
            if (problem := next(stream, None)) is not None and one:
                gone.add(problem.key)
            found.append((problem and problem.key, stream.epoch, stream.position))
        return found

    stream = new_stream()
    stream.first.extend(problems[:2])
    go_on(stream, retire[:stop])
    saved, at_stop = json.dumps(stream.state_dict()), set(gone)
    never_stopped = go_on(stream, retire[stop:])
    gone, resumed = at_stop, new_stream()
    resumed.load_state_dict(json.loads(saved))
    assert go_on(resumed, retire[stop:]) == never_stopped


@pytest.mark.long
def test_keys_are_stable_across_processes():
    """The first 16 hex digits of SHA-256, whatever PYTHONHASHSEED says; so are the problems of the built-in task."""
    assert stable_key("7 a +5 <think>") == hashlib.sha256(b"7 a +5 <think>").hexdigest()[:16]
    code = "from tasks.arithmetic import ChainTask; print([p.key for p in ChainTask(7, 3, 3).train])"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=ROOT, text=True)
    assert found == f"{[p.key for p in ChainTask(7, 3, 3).train]}\n"
