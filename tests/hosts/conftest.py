"""Two hosts for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest
from ray_run import Pair
from two_hosts import LACKS, hosts


@pytest.fixture(scope="session")
def permitted() -> None:
    """Where hosts cannot be made, CI fails, and elsewhere these tests are left out."""
    if LACKS and "CI" not in os.environ:
        pytest.skip(f"tests of several hosts need {LACKS}")
    assert not LACKS, f"tests of several hosts need {LACKS}"


@pytest.fixture(scope="session")
def pair(permitted: None) -> Iterator[Pair]:
    """With Ray, and nothing in use."""
    with hosts(2) as (a, b):
        made = Pair(a, b)
        a.ray("start", "--head", "--num-gpus=0")
        made.start_b()
        yield made
