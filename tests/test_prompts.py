"""Problems' keys and the stream of training prompts."""

import random

from tasks.prompts import Problem, PromptStream

POOL = [Problem(str(i), (), "") for i in range(50)]


def keys(stream, n):
    return [next(stream).key for _ in range(n)]


def order_of(seed, n):
    """The first n keys of POOL when nothing is retired."""
    return keys(PromptStream(POOL, seed, lambda key: False), n)


def test_every_prompt_once_per_epoch_in_an_order_of_its_own():
    """The order is a function of the seed and the epoch only, whoever else uses `random`."""
    stream = PromptStream(POOL, 0, lambda key: False)
    first, second = keys(stream, 50), keys(stream, 50)
    assert sorted(first) == sorted(second) == sorted(p.key for p in POOL) and stream.epoch == 1
    assert first != second and first != [p.key for p in POOL] and order_of(1, 50) != first
    random.seed(0)
    assert order_of(0, 100) == first + second


def test_retired_prompts_are_passed_over_from_the_moment_they_retire():
    retired: set[str] = set()
    stream, order = PromptStream(POOL, 0, retired.__contains__), order_of(0, 100)
    assert keys(stream, 10) == order[:10]
    retired |= {order[3], order[12], order[20]}  # one seen, two to come
    assert keys(stream, 38 + 47) == [key for key in order[10:] if key not in retired] and stream.epoch == 1


def test_it_stops_when_every_prompt_is_retired():
    """In the middle of an epoch or at its end, without spinning; the last prompt that is left still comes."""
    retired: set[str] = set()
    stream = PromptStream(POOL, 0, retired.__contains__)
    keys(stream, 17)
    retired |= {p.key for p in POOL} - {"7"}
    assert "7" in keys(stream, 2) and keys(stream, 3) == ["7", "7", "7"]
    retired.add("7")
    assert next(stream, None) is None and next(stream, None) is None


def test_prompts_of_a_resumed_run_come_first():
    """Those that were in flight, in their old order, retired meanwhile or not; then the stream from its old place."""
    stream = PromptStream(POOL, 0, {"7"}.__contains__)
    stream.unfinished.extend(POOL[i] for i in (7, 4, 4))
    assert keys(stream, 4) == ["7", "4", "4", next(key for key in order_of(0, 50) if key != "7")]
